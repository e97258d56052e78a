"""A region of rows alone: no length, two guidance branches, a further time, noise on the way, inputs to leave out."""

from dataclasses import replace

import pytest
import torch
import toy
from torch import nn

from voicehub_aot.artifacts.manifest import Checkpoint
from voicehub_aot.compiler.build import build
from voicehub_aot.compiler.export import export_region
from voicehub_aot.compiler.models import Model
from voicehub_aot.compiler.options import Options
from voicehub_aot.compiler.split import split
from voicehub_aot.errors import EngineUnavailable, InputMismatch, NoBucketFits, ProgramNotBuilt
from voicehub_aot.proof.cases import plan
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.runtime.load import load
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.guidance import Branch, Guidance
from voicehub_aot.spec.program import STATE, Combine, Evaluate, Program
from voicehub_aot.spec.region import Call, Dim, Input, Parameter, Region, RegionSpec
from voicehub_aot.spec.target import default_target, parse_target

REQUEST = {"binding": "REQUEST"}
FLAG = {"shape": ("B",), "dtype": "bool", "flag": True, "binding": "REQUEST"}
SPEC = RegionSpec(
    name="head",
    inputs=(
        Input(name="x", shape=("B", 6), binding="STATE", doc="state"),
        Input(name="end", shape=(1,), binding="TIME", doc="end of the step"),
        Input(name="time", shape=(1,), binding="TIME", doc="0 = noise"),
        Input(name="cond", shape=("B", "tokens", 4), doc="tokens", **REQUEST),
        Input(name="mask", shape=("B", "tokens"), dtype="bool", doc="True = a token to read", **REQUEST),
        Input(name="extra", shape=("B", "extras", 4), optional=True, doc="more tokens", **REQUEST),
        Input(name="gain", shape=("B",), pad=1.0, optional=True, doc="of the extra tokens", **REQUEST),
        Input(name="loud", shape=("B",), dtype="bool", doc="a switch", **REQUEST),
        Input(name="drop_cond", doc="without cond", **FLAG),
        Input(name="drop_extra", doc="without extra", **FLAG),
    ),
    dims=(Dim(name="tokens", max=32, doc="tokens"), Dim(name="extras", max=32, doc="more tokens")),
    guidance=Guidance(
        equation="classifier_free",
        branches=(
            Branch(name="conditional"),
            Branch(name="cond", flags={"drop_cond": True}, scale=3.0),
            Branch(name="extra", flags={"drop_extra": True}, scale=0.5),
        ),
    ),
    call=Call(
        parameters=(
            Parameter(name="x", kind="tensor", feeds="x"),
            Parameter(name="t", kind="time"),
            Parameter(name="r", kind="time", feeds="end"),
            Parameter(name="cond", kind="tensor", feeds="cond"),
            Parameter(name="mask", kind="tensor", feeds="mask"),
            Parameter(name="loud", kind="switch", feeds="loud", default=False, required=False),
        ),
        returns="velocity",
        source="made up",
    ),
    main_dim=None,
)
PROGRAM = Program(
    name="made-up-2",
    solver="made-up",
    schedule=(0.0, 0.5, 1.0),
    times=(0.0, 0.5, 0.75),
    extra_times={"end": (0.5, 0.75, 1.0)},
    noises=("fresh",),
    instructions=(
        Evaluate(out="v", evaluation=0),
        Combine(out=STATE, terms=((STATE, 1.0), ("v", 0.5), ("fresh", 0.1))),
        Evaluate(out="v", evaluation=1, against=("extra",)),
        Evaluate(out="w", evaluation=2, against=()),
        Combine(out=STATE, terms=((STATE, 1.0), ("v", 0.25), ("w", 0.25))),
    ),
)


class Head(nn.Module):
    """The step reads the raw end time, and a product of time and request."""

    def __init__(self):
        super().__init__()
        self.into, self.out, self.clock, self.given = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(1, 8), nn.Linear(4, 8)

    def forward(self, x, end, time, cond, mask, extra, gain, loud, drop_cond, drop_extra):
        read = (self.given(cond) * mask[..., None]).sum(1) * (~drop_cond)[:, None]
        more = self.given(extra).sum(1) * (gain * ~drop_extra)[:, None]
        gate = torch.tanh(self.clock(time) + read + more) * torch.where(loud, 2.0, 1.0)[:, None]
        return self.out(torch.tanh(self.into(x)) * gate) * (1 + end)


def region():
    generator = torch.Generator().manual_seed(4)
    module = Head().eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return Region(SPEC, module)


def request(rows=2):
    generator = torch.Generator().manual_seed(rows)
    return {
        "cond": torch.randn(rows, 5, 4, generator=generator),
        "mask": torch.arange(5).expand(rows, 5) < 3,
        "extra": torch.randn(rows, 3, 4, generator=generator),
        "loud": torch.arange(rows) % 2 == 1,
    }


@pytest.fixture(scope="module")
def eager():
    return eager_runtime(region(), [PROGRAM], "head")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    path = tmp_path_factory.mktemp("head") / "head.aot"
    model = Model("head", "tiny", {}, region(), Checkpoint(source="seed", digest="4"))
    options = Options(
        Buckets(axes={"batch": (1, 4)}), (PROGRAM,), parse_target(default_target()), engines=("onnxruntime",)
    )
    build(model, options, path, toy.Quiet())
    return load(path, threads=1)


def by_hand(noise, fresh, given, scales=(3.0, 0.5)):
    """The program written out over the module."""
    given = {"gain": torch.ones(len(noise)), **given}

    def branch(x, row, cond=False, extra=False):
        flags = {n: torch.full((len(x),), v) for n, v in (("drop_cond", cond), ("drop_extra", extra))}
        clock = {n: torch.tensor([t]) for n, t in PROGRAM.clock(row, "time").items()}
        return region().module(x=x, **clock, **given, **flags)

    def guided(x, row):
        c = branch(x, row)
        return c + scales[0] * (c - branch(x, row, cond=True)) + scales[1] * (c - branch(x, row, extra=True))

    x = noise + 0.5 * guided(noise, 0) + 0.1 * fresh
    c = branch(x, 1)
    v = c + scales[1] * (c - branch(x, 1, extra=True))
    return x + 0.25 * v + 0.25 * branch(x, 2)


def _given(rows=2):
    generator = torch.Generator().manual_seed(9)
    return request(rows), torch.randn(rows, 6, generator=generator), torch.randn(rows, 6, generator=generator)


def test_each_evaluation_runs_the_branches_it_names(eager, built):
    given, noise, fresh = _given()

    for runtime in (eager, built):
        got = runtime.sample(noise=noise, step_noise=fresh[None], **given)
        torch.testing.assert_close(got, by_hand(noise, fresh, given), rtol=1e-5, atol=1e-5)


def test_scales_are_given_by_branch(built):
    given, noise, fresh = _given()

    got = built.sample(noise=noise, step_noise=fresh[None], guidance={"cond": 0.0, "extra": 2.0}, **given)

    torch.testing.assert_close(got, by_hand(noise, fresh, given, (0.0, 2.0)), rtol=1e-5, atol=1e-5)


def test_what_is_left_out_is_padding(built):
    given, noise, fresh = _given()
    del given["extra"]
    nothing = {**given, "extra": torch.zeros(2, 1, 4), "gain": torch.ones(2)}

    got = built.sample(noise=noise, step_noise=fresh[None], **given)

    assert torch.equal(got, built.sample(noise=noise, step_noise=fresh[None], **nothing))


def test_a_seed_gives_each_row_its_own_noise_whatever_is_beside_it(built):
    given = request(3)
    together = built.sample(seed=7, **given)
    alone = built.sample(seed=8, **{name: value[1:2] for name, value in given.items()})

    torch.testing.assert_close(together[1:2], alone, rtol=1e-5, atol=1e-5)
    assert not torch.equal(together[0], together[1])


def test_a_program_is_run_in_parts(built):
    given, noise, fresh = _given()
    parts = {"step_noise": fresh[None], **given}

    (half,) = built.trajectory(noise=noise, stop=1, **parts)
    (rest,) = built.trajectory(noise=half, start=1, **parts)

    assert torch.equal(rest, built.sample(noise=noise, **parts))


def test_a_single_evaluation_takes_every_time(eager, built):
    given, noise, _ = _given()

    got = built.evaluate(noise, 0.5, extra_times={"end": 0.75}, packed=True, **given)

    torch.testing.assert_close(got, eager.evaluate(noise, 0.5, extra_times={"end": 0.75}, packed=True, **given))
    assert got.shape == (6, 6)


def test_upstreams_call_feeds_times_and_switches(eager):
    given, noise, _ = _given()
    given = {**given, "loud": torch.tensor([True, True])}
    del given["extra"]

    got = eager.denoiser()(noise, torch.tensor([0.5]), 0.75, given["cond"], given["mask"], loud=True)

    assert torch.equal(got, eager.evaluate(noise, 0.5, extra_times={"end": 0.75}, **given))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"step_noise": None}, InputMismatch, "step_noise holds 0 draws, 'made-up-2' needs 1"),
        ({"lengths": [3, 3]}, InputMismatch, r"lengths=\[3, 3\], but rows of this model have no length"),
        ({"guidance": {"voice": 1.0}}, InputMismatch, r"no branches \['voice'\]; this model has \['cond', 'extra'\]"),
        ({"mask": None}, InputMismatch, r"missing \['mask'\]"),
        ({"seed": 3}, InputMismatch, "give either noise or a seed"),
    ],
)
def test_a_request_that_cannot_run_is_refused(built, changes, error, message):
    given, noise, fresh = _given()

    with pytest.raises(error, match=message):
        built.sample(**{"noise": noise, "step_noise": fresh[None], **given, **changes})


@pytest.mark.parametrize(
    ("extra_times", "error", "message"),
    [
        ({}, InputMismatch, r"extra_times has \[\], wanted \['end'\]"),
        ({"end": 0.5}, ProgramNotBuilt, "time 0.5 is not an evaluation time"),
    ],
)
def test_a_time_must_be_whole_and_built(built, extra_times, error, message):
    given, noise, _ = _given()

    with pytest.raises(error, match=message):
        built.evaluate(noise, 0.5, extra_times=extra_times, **given)


def test_the_step_keeps_what_depends_on_the_state_alone():
    graph, symbols = export_region(region())
    stages = split(graph, SPEC, symbols)

    assert {name.split(".")[0] for name in stages.step.constants} == {"into", "out"}
    assert stages.mixed is not None
    assert "end" in {value.name for value in stages.table.outputs}


def test_a_step_of_few_rows_reads_narrow_weights_from_the_file(tmp_path):
    few = region()
    for parameter in few.module.parameters():
        parameter.copy_(parameter.bfloat16())
    model = Model("head", "tiny", {}, few, Checkpoint(source="seed", digest="narrow"))
    options = Options(
        Buckets(axes={"batch": (1,)}), (PROGRAM,), parse_target(default_target()), weights_mode="auto", parity=False
    )
    manifest = build(model, options, tmp_path / "few.aot", toy.Quiet())
    runtime, eager = load(tmp_path / "few.aot", threads=1), eager_runtime(few, [PROGRAM], "head")
    given, noise, fresh = _given(1)

    step = next(e for e in manifest.engines if e.stage == "step")
    assert (manifest.weights_mode, step.most_requests) == ("shared", 1)
    assert {c.name: c.dtype for c in step.constants}["into.weight_bfloat16"] == "bfloat16"
    got = runtime.sample(noise=noise, step_noise=fresh[None], guidance={"extra": 0.0}, **given)
    want = eager.sample(noise=noise, step_noise=fresh[None], guidance={"extra": 0.0}, **given)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    with pytest.raises(NoBucketFits, match="batch=2 exceeds the largest bucket 1"):
        runtime.sample(seed=1, **request(2))


def test_more_requests_than_a_step_was_made_for_find_no_engine(tmp_path, built):
    engines = [(e.model_copy(update={"most_requests": 1}), run) for e, run in built.evaluator.step_engines]
    narrow = replace(built.evaluator, step_engines=engines)

    assert narrow.engine_at({"B": 1, "tokens": 5, "extras": 3}) == "onnxruntime"
    with pytest.raises(EngineUnavailable, match="no step engine"):
        narrow.engine_at({"B": 2, "tokens": 5, "extras": 3})


def test_parity_covers_rows_alone_and_together():
    cases = list(plan(SPEC, {PROGRAM.name: PROGRAM}, [{}], 4))

    assert {c.check for c in cases} == {"evaluation", "padding", "trajectory"}
    assert max(len(c.lengths) for c in cases) == 3
