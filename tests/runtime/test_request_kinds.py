"""Arguments of a request of every wrong kind: one typed error that names the argument, before anything runs."""

from fractions import Fraction

import numpy as np
import pytest
import torch
import toy

from voicehub_aot.compiler import models
from voicehub_aot.errors import AotError, InputMismatch, UsageError
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.spec.schedule import linear
from voicehub_aot.spec.solver import euler

PROGRAM = euler(linear(8))


@pytest.fixture(scope="module")
def runtime():
    return eager_runtime(toy.region(), (PROGRAM,), "toy")


def request(rows=2, frames=5):
    return {"cond": torch.randn(rows, frames, toy.COND), "ids": torch.ones(rows, 3, dtype=torch.int64)}


NOISE = torch.randn(2, 5, toy.CHANNELS)


@pytest.mark.parametrize(
    ("start", "stop"),
    [
        (-1, None),
        (0, 9),
        (0, 0),
        (3, 3),
        (5, 2),
        (8, None),
        (0, -1),
        (1.0, None),
        (0, "8"),
        (True, None),
        (10**30, None),
    ],
)
def test_steps_outside_the_program_are_refused_at_the_call(runtime, start, stop):
    with pytest.raises(InputMismatch, match=r"0 <= start < stop <= 8, the steps of 'euler-8'"):
        runtime.trajectory(noise=NOISE, start=start, stop=stop, **request())


def test_a_program_runs_in_parts(runtime):
    given = request()
    whole = list(runtime.trajectory(noise=NOISE, **given))

    first = list(runtime.trajectory(noise=NOISE, stop=3, **given))
    rest = list(runtime.trajectory(noise=first[-1], start=3, stop=8, **given))

    assert all(torch.equal(a, b) for a, b in zip(whole, first + rest, strict=True))


TENSORS = {
    "sparse": lambda t: t.to_sparse(),
    "compressed": lambda t: t[0].to_sparse_csr(),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "nested": lambda t: torch.nested.nested_tensor(list(t)),
    "meta": lambda t: t.to("meta"),
    "complex": lambda t: t.to(torch.complex64),
    "double": lambda t: t.double(),
    "an array": lambda t: t.numpy(),
    "a list": lambda t: t.tolist(),
    "a text": lambda _: "noise",
}


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR", "ignore:.*nested tensors", "ignore:torch.quantize", "ignore:.*deprecat"
)
@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("name", ["noise", "cond"])
def test_a_tensor_of_another_kind_is_named(runtime, name, kind):
    arguments = {"noise": NOISE, **request()}
    arguments[name] = TENSORS[kind](arguments[name])

    with pytest.raises(InputMismatch, match=r"(x|cond) is"):
        runtime.sample(**arguments)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.requires_grad_(),
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t[:1].expand(2, -1, -1),
    ],
)
def test_gradients_and_strides_do_not_matter(runtime, change):
    given = request()
    given["cond"][1] = given["cond"][0]
    want = runtime.sample(noise=NOISE, **given)

    got = runtime.sample(noise=NOISE, **{**given, "cond": change(given["cond"].clone())})

    assert torch.equal(got, want)
    assert not got.requires_grad


BAD_TIMES = {
    "text": "0.5",
    "none": None,
    "bool": True,
    "bool tensor": torch.tensor(True),
    "complex": 1j,
    "complex tensor": torch.tensor(1j),
    "not a number": float("nan"),
    "infinite": float("inf"),
    "too many": torch.zeros(3),
    "a matrix": torch.zeros(2, 1),
    "empty": torch.zeros(0),
    "sparse": torch.zeros(2).to_sparse(),
    "meta": torch.zeros(2, device="meta"),
    "a dict": {},
    "an array": np.zeros((2, 2)),
}


@pytest.mark.parametrize("kind", BAD_TIMES)
def test_a_time_of_another_kind_is_named(runtime, kind):
    with pytest.raises(InputMismatch, match=r"time(=| has \d)"):
        runtime.evaluate(NOISE, BAD_TIMES[kind], **request())


@pytest.mark.parametrize(
    "time", [0.5, 0, Fraction(1, 2), np.float32(0.5), torch.tensor(0.5), [0.5, 0.25], torch.tensor([1, 0])]
)
def test_times_may_be_numbers_of_any_sort(runtime, time):
    assert runtime.evaluate(NOISE, time, **request()).isfinite().all()


def test_every_time_input_may_differ_by_row():
    model = models.resolve("chatterbox", "tiny-meanflow", "synthetic")
    runtime = eager_runtime(model.region, (models.program(model, 2),), "chatterbox")
    frames = 6
    x = torch.randn(3, 20, frames)
    given = {
        "mu": torch.randn(3, 20, frames),
        "spks": torch.randn(3, 20),
        "cond": torch.randn(3, 20, frames),
    }
    times, ends = torch.tensor([0.0, 0.0, 0.5]), torch.tensor([0.5, 1.0, 1.0])

    got = runtime.evaluate(x, times, extra_times={"r": ends}, **given)
    called = runtime.denoiser()(
        x=x, mask=torch.ones(3, 1, frames), t=times, r=ends, mu=given["mu"], spks=given["spks"], cond=given["cond"]
    )

    for row in range(3):
        alone = {name: value[row : row + 1] for name, value in given.items()}
        want = runtime.evaluate(x[row : row + 1], times[row], extra_times={"r": ends[row]}, **alone)
        torch.testing.assert_close(got[row : row + 1], want)
        torch.testing.assert_close(called[row : row + 1], want)


def test_what_only_a_branch_reads_is_needed_only_where_it_runs():
    model = models.resolve("vibevoice", "tiny", "synthetic")
    runtime = eager_runtime(model.region, (models.program(model, 3),), "vibevoice")
    sizes = {i.name: i.shape[1] for i in model.region.spec.inputs if len(i.shape) == 2}
    noise, condition = torch.randn(2, sizes[model.region.spec.state.name]), torch.randn(2, sizes["condition"])
    negative = torch.randn(2, sizes["condition"])

    unguided = runtime.sample(noise=noise, condition=condition, guidance=0)

    assert torch.equal(unguided, runtime.sample(noise=noise, condition=condition, neg_condition=negative, guidance=0))
    assert runtime.evaluate(noise, 0.0, condition=condition).isfinite().all()
    for arguments in ({}, {"guidance": 1.5}, {"guidance": {"negative": 0.1}}):
        with pytest.raises(InputMismatch, match=r"missing .'neg_condition'"):
            runtime.sample(noise=noise, condition=condition, **arguments)
    with pytest.raises(InputMismatch, match=r"missing .'neg_condition'"):
        runtime.evaluate(noise, 0.0, condition=condition, packed=True)


@pytest.mark.parametrize("steps", [0, -1, 4097, 10**6, 10**30])
def test_programs_of_absurd_length_are_refused_at_once(steps):
    model = models.resolve("f5tts", "tiny", "synthetic")

    with pytest.raises(UsageError, match="wanted 1 to 4096"):
        models.program(model, steps)


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "-inf"])
def test_a_gate_that_is_no_positive_number_is_refused(command, tmp_path, value):
    ran = command("bench", tmp_path / "absent.aot", f"--min-speedup={value}", "--checkpoint", "synthetic")

    assert ran.code == 2
    assert "wanted a positive number" in ran.err


def triton_argument(name, array):
    from voicehub_aot.deploy.triton_model import argument

    return argument(name, array)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        *((name, np.array([], dtype=object)) for name in ("program", "guidance", "guidance_by_branch")),
        ("program", np.array([b"\xff\xfe"], dtype=object)),
        ("program", np.array([b"a", b"b"], dtype=object)),
        ("guidance", np.array([b"much"], dtype=object)),
        ("guidance", np.array([1.0, 2.0])),
        ("guidance_by_branch", np.array([b"text=much"], dtype=object)),
        ("guidance_by_branch", np.array([b"text"], dtype=object)),
        ("seed", np.array([b"one"], dtype=object)),
        ("cond", np.array([b"one"], dtype=object)),
    ],
)
def test_an_input_of_the_server_that_holds_something_else_is_the_callers_fault(name, array):
    with pytest.raises(InputMismatch, match=f"input '{name}' is object|input 'guidance' is float64"):
        triton_argument(name, array)


def test_the_server_takes_guidance_by_branch():
    given = np.array([b"text=3.0 speaker=5"], dtype=object)

    assert triton_argument("guidance_by_branch", given) == {"text": 3.0, "speaker": 5.0}


def test_all_of_these_are_errors_a_caller_can_catch():
    assert issubclass(InputMismatch, AotError)
