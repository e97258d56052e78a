"""`--engine auto`: candidates are timed, the fastest that pass parity are kept, each serves its buckets."""

from dataclasses import replace

import pytest
import torch
import toy

from voicehub_aot.artifacts import store
from voicehub_aot.artifacts.report import read_json
from voicehub_aot.compiler import build as building
from voicehub_aot.compiler.build import build
from voicehub_aot.compiler.options import Options
from voicehub_aot.engines import onnxruntime as ort
from voicehub_aot.errors import CompileFailed, GateFailed
from voicehub_aot.proof import timing
from voicehub_aot.proof.verify import verify
from voicehub_aot.runtime.load import load
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.schedule import linear
from voicehub_aot.spec.solver import euler
from voicehub_aot.spec.target import default_target, parse_target

OPTIONS = Options(
    Buckets(axes={"frames": (8, 16)}),
    (euler(linear(2)),),
    parse_target(default_target()),
    "shared",
    "static",
    engines=("aoti", "onnxruntime"),
    auto=True,
)
REQUEST = {"seed": 0, "lengths": [8], "cond": torch.ones(1, 8, 5), "ids": torch.zeros(1, 3, dtype=torch.int64)}


def steady(monkeypatch, **milliseconds):
    """Times as told, by "engine_frames", in place of a clock."""

    def time_steps(candidates, recording, seconds, pause_s):
        return [
            timing.StepTime(
                {"frames": frames},
                2,
                {name: (milliseconds.get(f"{name}_{frames}", milliseconds.get(name)),) * 5 for name in candidates},
                milliseconds.get("elsewhere"),
            )
            for frames in (8, 16)
        ]

    monkeypatch.setattr(timing, "time_steps", time_steps)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """AOTInductor for 8 frames, ONNX Runtime for 16."""
    path = tmp_path_factory.mktemp("auto") / "mixed.aot"
    with pytest.MonkeyPatch.context() as patch:
        steady(patch, eager=9.0, aoti_8=2.0, aoti_16=4.0, onnxruntime_8=2.5, onnxruntime_16=3.0)
        return path, build(toy.model(), OPTIONS, path, toy.Quiet())


def test_each_bucket_has_the_engine_that_was_fastest_there(mixed):
    path, manifest = mixed
    runtime = load(path)

    assert [runtime.engine_at(frames=n, text=3) for n in (1, 8, 9, 16)] == ["aoti", "aoti", *["onnxruntime"] * 2]
    assert manifest.mixed
    assert {(e.engine, e.stage) for e in manifest.engines} == {
        ("onnxruntime", "prepare"),
        ("aoti", "step"),
        ("onnxruntime", "step"),
    }


def test_only_kept_engines_are_in_the_artifact_over_one_weight_file(mixed):
    path, manifest = mixed

    assert sorted(p.name for p in path.glob("*.onnx")) == ["prepare.onnx", "step.onnx"]
    assert [p.name for p in (path / "engines/aoti").glob("*/*")] == ["step-frames8"]
    assert [p for p in path.iterdir() if p.suffix == ".safetensors"] == [path / store.WEIGHTS]
    assert not (path / building.CANDIDATES).exists()
    assert manifest.weights_mode == "shared"


def test_every_figure_is_on_record(mixed):
    report = read_json(mixed[0] / "parity/report.json")

    assert {(t.engine, t.bucket["frames"], t.kept) for t in report.timings} == {
        ("aoti", 8, True),
        ("onnxruntime", 8, False),
        ("aoti", 16, False),
        ("onnxruntime", 16, True),
    }
    assert {r.engine for r in report.findings} == {"aoti", "onnxruntime"}
    step = next(e for e in mixed[1].engines if e.engine == "aoti")
    assert step.reason == "frames=8: 2 ms, eager 9 (4.50x), onnxruntime 2.5"


def test_a_mixed_artifact_verifies_and_samples_what_one_engine_samples(mixed):
    path, _ = mixed
    longer = {**REQUEST, "lengths": [16], "cond": torch.ones(1, 16, 5)}

    assert verify(path)
    for request in (REQUEST, longer):
        torch.testing.assert_close(load(path).sample(**request), load(path, engine="onnxruntime").sample(**request))


def test_one_engine_that_is_fastest_everywhere_is_alone(tmp_path, monkeypatch):
    steady(monkeypatch, eager=9.0, aoti=3.0, onnxruntime=2.0)

    manifest = build(toy.model(), OPTIONS, tmp_path / "one.aot", toy.Quiet())

    assert manifest.engine_names == ("onnxruntime",)
    assert not (tmp_path / "one.aot/engines").exists()


def test_an_engine_that_fails_parity_gives_way_to_the_next(tmp_path, monkeypatch):
    steady(monkeypatch, eager=9.0, aoti=3.0, onnxruntime=2.0)
    call = ort.SessionStage.__call__
    monkeypatch.setattr(ort.SessionStage, "__call__", lambda self, inputs: [1.01 * t for t in call(self, inputs)])

    manifest = build(toy.model(), OPTIONS, tmp_path / "second.aot", toy.Quiet())

    assert manifest.engine_names == ("aoti",)
    assert verify(tmp_path / "second.aot")


def test_where_no_engine_is_faster_than_eager_the_fastest_is_kept_and_marked(tmp_path, monkeypatch):
    steady(monkeypatch, eager=1.0, aoti=3.0, onnxruntime=2.0)

    manifest = build(toy.model(), OPTIONS, tmp_path / "slow.aot", toy.Quiet())

    assert manifest.engine_names == ("onnxruntime",)
    assert all("not faster" in entry.reason for entry in manifest.engines)


def test_a_build_below_the_speed_that_was_asked_for_ends(tmp_path, monkeypatch):
    steady(monkeypatch, eager=3.0, aoti=3.0, onnxruntime=2.0)

    with pytest.raises(GateFailed, match=r"1.500x of eager, wanted at least 2x"):
        build(toy.model(), replace(OPTIONS, min_speedup=2.0), tmp_path / "slow.aot", toy.Quiet())
    assert not list(tmp_path.iterdir())
    assert build(toy.model(), replace(OPTIONS, min_speedup=1.4), tmp_path / "fast.aot", toy.Quiet())


def test_a_candidate_that_does_not_compile_is_left_out_with_its_reason(tmp_path, monkeypatch):
    steady(monkeypatch, eager=9.0, aoti=3.0)

    def fails(*_):
        raise CompileFailed("step: no such operator")

    monkeypatch.setattr(ort, "compile_stage", fails)
    monkeypatch.setattr(ort, "settings", lambda *_: {"code": "never compiled"})
    path = tmp_path / "left.aot"

    manifest = build(toy.model(), OPTIONS, path, toy.Quiet())

    assert manifest.engine_names == ("aoti",)
    assert read_json(path / "parity/report.json").left_out == {"onnxruntime": "step: no such operator"}


def test_a_spent_budget_leaves_further_candidates_out(tmp_path, monkeypatch):
    steady(monkeypatch, eager=9.0, aoti=3.0)
    path = tmp_path / "budget.aot"

    build(toy.model(), replace(OPTIONS, engine_budget=1e-3), path, toy.Quiet())

    assert read_json(path / "parity/report.json").left_out == {"onnxruntime": "the budget of 0.001 s was spent"}


def test_several_engines_by_name_are_all_kept_and_the_first_is_opened(tmp_path):
    path = tmp_path / "both.aot"

    manifest = build(toy.model(), replace(OPTIONS, auto=False), path, toy.Quiet())

    assert manifest.engine_names == ("aoti", "onnxruntime")
    assert not manifest.mixed
    assert load(path).engine_at(frames=16, text=3) == "aoti"
    assert load(path, engine="onnxruntime").engine_at(frames=16, text=3) == "onnxruntime"
    assert {r.engine for r in verify(path).findings} == {"aoti", "onnxruntime"}


class Listening(toy.Quiet):
    def __init__(self):
        self.stages = []

    def stage(self, text):
        self.stages.append(text)


@pytest.mark.parametrize(("elsewhere", "told"), [(1.25, True), (0.1, False), (None, False)])
def test_a_busy_machine_is_told_and_recorded(tmp_path, monkeypatch, elsewhere, told):
    steady(monkeypatch, eager=9.0, aoti=2.0, onnxruntime=2.5, elsewhere=elsewhere)
    progress = Listening()

    build(toy.model(), replace(OPTIONS, auto=False), tmp_path / "busy.aot", progress)

    assert any("other processes used up to 1.2 processors" in text for text in progress.stages) == told
    report = read_json(tmp_path / "busy.aot" / store.PARITY / "report.json")
    assert {t.elsewhere for t in report.timings} == {elsewhere}
    assert ("Other processes used" in (tmp_path / "busy.aot" / store.PARITY / "report.html").read_text()) == told
