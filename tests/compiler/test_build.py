"""Builds: whole or not at all, resumable, engines never taken for another's, and proven before they are finished."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toy

from voicehub_aot.artifacts import store
from voicehub_aot.artifacts.report import read_json
from voicehub_aot.compiler.assemble import time_table
from voicehub_aot.compiler.build import bucket_waste, build
from voicehub_aot.compiler.cache import compile_into_cache
from voicehub_aot.compiler.export import export_region
from voicehub_aot.compiler.jobs import plan_jobs
from voicehub_aot.compiler.options import Options
from voicehub_aot.compiler.split import split
from voicehub_aot.errors import ParityFailed, UsageError, VersionUnsupported
from voicehub_aot.proof import parity
from voicehub_aot.runtime.load import load
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.schedule import linear
from voicehub_aot.spec.solver import euler, midpoint
from voicehub_aot.spec.target import default_target, parse_target

TARGET = parse_target(default_target())
PROGRAMS = (euler(linear(3)), midpoint(linear(2)))


class Recorder(toy.Quiet):
    def __init__(self):
        self.states = {}

    def engine(self, name, state, seconds=0.0):
        self.states.setdefault(name, []).append(state)

    @property
    def compiled(self):
        return sorted(n for n, s in self.states.items() if "compile" in s)


def options(**changes) -> Options:
    base = Options(Buckets(axes={"frames": (8, 16)}), PROGRAMS, TARGET, "shared", "dynamic")
    return replace(base, **changes)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    path = tmp_path_factory.mktemp("built") / "toy.aot"
    return path, build(toy.model(), options(), path, toy.Quiet())


def test_an_artifact_holds_what_its_manifest_says(built):
    path, manifest = built

    on_disk = store.read_manifest(path)
    store.verify_files(path, on_disk)

    assert on_disk == manifest
    assert set(on_disk.files) == {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()} - {
        "manifest.json"
    }
    assert {"parity/report.json", "parity/report.html", "parity/junit.xml"} <= set(on_disk.files)


def test_every_kind_of_parity_is_in_the_report(built):
    report = read_json(built[0] / "parity/report.json")

    assert report
    assert {r.check for r in report.findings} == {"split", "evaluation", "trajectory", "padding", "sensitivity"}
    assert {r.program for r in report.findings if r.check == "trajectory"} == {p.name for p in PROGRAMS}
    assert {tuple(r.bucket.items()) for r in report.findings if r.check == "padding"} == {
        (("frames", 8),),
        (("frames", 16),),
    }
    assert any("mixed" in r.note or "time" in r.note for r in report.findings if r.check == "sensitivity")


def test_weights_lie_in_one_file_once_with_the_tables(built):
    path = built[0]
    tensors = store.map_tensors(path / store.WEIGHTS)

    assert {n for n in tensors if n.startswith("table/")} == {f"table/{p.name}/linear" for p in PROGRAMS}
    assert tensors[f"table/{PROGRAMS[1].name}/linear"].shape[0] == 4
    assert {"into.weight", "mixed.weight", "given.weight"} <= set(tensors)
    assert "clock.weight" not in tensors
    assert not any(p.suffix in (".pkl", ".pt") for p in path.rglob("*"))


def test_a_second_build_compiles_nothing(built, tmp_path):
    recorder = Recorder()

    build(toy.model(), options(parity=False), tmp_path / "again.aot", recorder)

    assert recorder.compiled == []


def test_other_weights_share_engines_in_shared_mode_and_give_other_results(built, tmp_path):
    recorder = Recorder()

    build(toy.model(seed=1), options(), tmp_path / "other.aot", recorder)

    assert recorder.compiled == []
    request = {"seed": 0, "lengths": [8], "cond": torch.ones(1, 8, 5), "ids": torch.zeros(1, 3, dtype=torch.int64)}
    first, second = (load(p).sample(**request) for p in (built[0], tmp_path / "other.aot"))
    assert (first - second).abs().max() > 1e-2


def key_of(model=None, **changes):
    from voicehub_aot.compiler.cache import engine_payload, payload_key
    from voicehub_aot.compiler.export import export_program, named_dims
    from voicehub_aot.compiler.jobs import dynamic_axes
    from voicehub_aot.engines import StageCode

    graph, symbols = export_region((model or toy.model()).region)
    chosen = options(**changes)
    job = plan_jobs(split(graph, toy.SPEC, symbols), chosen, chosen.engines[0])[1]
    dynamic = {v.name: d for v, d in zip(job.inputs, dynamic_axes(job, named_dims(toy.SPEC)), strict=True)}
    program = export_program(job.module, job.examples, dynamic, "step")
    code = StageCode("step", program, job.inputs, job.outputs, job.examples)
    return payload_key(engine_payload(code, job, chosen))


def test_a_key_covers_mode_target_bucket_weights_and_graph():
    other = toy.model()
    other.region.module.out = torch.nn.Sequential(other.region.module.out, torch.nn.Tanh())
    keys = [
        key_of(),
        key_of(weights_mode="packed"),
        key_of(engines=("onnxruntime",)),
        key_of(toy.model(seed=1), weights_mode="packed"),
        key_of(shapes="static"),
        key_of(shapes="static", buckets=Buckets(axes={"frames": (12,)})),
        key_of(target=parse_target("cpu:native")),
        key_of(other),
    ]

    assert len(set(keys)) == len(keys)
    assert key_of() == keys[0]


def test_a_damaged_cached_engine_is_compiled_anew(built, tmp_path, monkeypatch):
    key = next(e.key for e in built[1].engines if e.stage == "step")
    from voicehub_aot.compiler.cache import cache_dir

    place = cache_dir() / "engines" / key
    library = next(place.rglob("*.so"))
    library.write_bytes(library.read_bytes()[:-1] + b"x")
    asked = []
    monkeypatch.setattr(
        "voicehub_aot.compiler.compile.compile_into_cache",
        lambda *a: (asked.append(a[0].name), compile_into_cache(*a)),
    )

    build(toy.model(), options(parity=False), tmp_path / "new.aot", toy.Quiet())

    assert asked == ["step"]


def test_independent_engines_compile_in_parallel_processes(tmp_path):
    recorder = Recorder()
    chosen = options(shapes="static", jobs=2, cache=tmp_path / "cache", parity=False)

    manifest = build(toy.model(), chosen, tmp_path / "parallel.aot", recorder)

    assert recorder.compiled == ["aoti prepare", "aoti step-frames16", "aoti step-frames8"]
    assert [e.bucket for e in manifest.engines if e.stage == "step"] == [{"frames": 8}, {"frames": 16}]
    runtime = load(tmp_path / "parallel.aot")
    sampled = runtime.sample(seed=0, lengths=[5], cond=torch.ones(1, 5, 5), ids=torch.zeros(1, 2, dtype=torch.int64))
    assert sampled.shape == (1, 5, 6)


def test_failed_parity_leaves_a_report_and_no_artifact(tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "FLOOR_ABS", -1.0)

    with pytest.raises(ParityFailed, match=r"evaluation frames=8.*no artifact was written") as caught:
        build(toy.model(), options(), tmp_path / "toy.aot", toy.Quiet())

    assert caught.value.exit_code == 3
    assert not (tmp_path / "toy.aot").exists()
    assert not read_json(tmp_path / "toy.aot.parity" / "report.json")
    assert [p.name for p in tmp_path.iterdir()] == ["toy.aot.parity"]


def test_an_existing_output_is_kept_unless_replaced(built, tmp_path):
    output = tmp_path / "there.aot"
    output.mkdir()
    (output / "mine").touch()

    with pytest.raises(UsageError, match="--force"):
        build(toy.model(), options(parity=False), output, toy.Quiet())
    assert (output / "mine").exists()
    build(toy.model(), options(parity=False, replace=True), output, toy.Quiet())
    assert not (output / "mine").exists()
    assert (output / "manifest.json").exists()


def test_given_engines_are_never_taken_for_others(built, tmp_path):
    given = {"another key": built[0] / built[1].engines[0].path}

    with pytest.raises(VersionUnsupported, match="build it anew"):
        build(toy.model(), options(engines_from=given), tmp_path / "x.aot", toy.Quiet())
    assert not list(tmp_path.iterdir())


def test_a_time_table_has_a_row_per_evaluation():
    graph, symbols = export_region(toy.region())
    stages = split(graph, toy.SPEC, symbols)

    table = time_table(stages, PROGRAMS[1])

    clock = toy.region().module.clock
    for time, row in zip(PROGRAMS[1].times, table["linear"], strict=True):
        torch.testing.assert_close(row, clock(torch.sin(torch.tensor([[time]]) * torch.arange(1, 5))))


def test_waste_of_a_bucket_counts_the_lengths_that_fall_into_it():
    buckets = Buckets(axes={"frames": (8, 16)})

    assert bucket_waste({8: 1, 12: 1, 16: 1}, buckets, {"frames": 16}, "frames") == pytest.approx(32 / 28 - 1)
    assert bucket_waste(None, buckets, {"frames": 16}, "frames") is None
    assert bucket_waste({4: 1}, buckets, {"frames": 16}, "frames") is None


def test_programs_are_readable_json(built):
    saved = json.loads((built[0] / "programs" / "euler-3.json").read_text())

    assert saved["instructions"][0] == {"op": "evaluate", "out": "v", "x": "x", "evaluation": 0, "against": None}
    assert Path(built[0] / "programs" / "midpoint-2.json").exists()
