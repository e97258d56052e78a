"""The AOTInductor engine: packed means packed, shared means bound to our tensors, opened without a compiler."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import toy

from voicehub_aot.bucket import Buckets
from voicehub_aot.compilation import Options, cache_dir, compile_all, plan_jobs
from voicehub_aot.engines import aoti
from voicehub_aot.errors import ArtifactCorrupt, CompileFailed
from voicehub_aot.export import export_region
from voicehub_aot.program import euler
from voicehub_aot.schedule import linear
from voicehub_aot.stage import split
from voicehub_aot.target import default_target, parse_target

TARGET = parse_target(default_target())


class Compiled:
    """The toy's stages compiled in one mode, and the values to run them on."""

    def __init__(self, mode: str, folder: Path) -> None:
        graph, symbols = export_region(toy.region())
        self.staged = split(graph, toy.SPEC, symbols)
        shapes = "dynamic" if mode == "packed" else "static"
        options = Options(Buckets(axes={"frames": (16,)}), (euler(linear(2)),), TARGET, mode, shapes)
        self.jobs = plan_jobs(self.staged, options)
        self.entries = compile_all(self.jobs, toy.SPEC, options, cache_dir(), folder, toy.Quiet())
        self.folder = folder

    def step(self):
        (entry,) = (e for e in self.entries if e.stage == "step")
        (job,) = (j for j in self.jobs if j.stage == "step")
        return entry, job


@pytest.fixture(scope="module", params=["packed", "shared"])
def compiled(request, tmp_path_factory):
    return request.param, Compiled(request.param, tmp_path_factory.mktemp(request.param))


def constants(compiled):
    return {n: t.contiguous() for n, t in compiled.staged.step.constants.items()}


def test_an_opened_step_computes_the_stage(compiled):
    mode, built = compiled
    entry, job = built.step()
    engine = aoti.open_stage(built.folder / entry.path, mode, constants(built), 1, "step")

    (got,) = engine(list(job.examples))

    torch.testing.assert_close(got, job.module(*job.examples)[0])


def test_a_shared_engine_reads_our_tensors_in_place(compiled):
    mode, built = compiled
    entry, job = built.step()
    ours = constants(built)
    engine = aoti.open_stage(built.folder / entry.path, mode, ours, 1, "step")
    (before,) = engine(list(job.examples))

    ours["out.bias"] += 1.0
    (after,) = engine(list(job.examples))
    ours["out.bias"] -= 1.0

    changed = (after - before).abs().max().item()
    assert changed == pytest.approx(1.0, abs=1e-5) if mode == "shared" else changed == 0


def test_a_shared_library_holds_no_weights(compiled):
    mode, built = compiled
    library = (built.folder / built.step()[0].path / aoti.LIBRARY).read_bytes()
    weight = built.staged.step.constants["into.weight"].numpy().tobytes()[:64]

    assert weight not in library if mode == "shared" else len(library) > 0


def test_a_missing_weight_is_named_before_anything_runs(compiled):
    mode, built = compiled
    entry, _ = built.step()
    if mode == "packed":
        aoti.open_stage(built.folder / entry.path, mode, {}, 1, "step")  # needs none
        return

    with pytest.raises(ArtifactCorrupt, match=r"into\.weight"):
        aoti.open_stage(built.folder / entry.path, mode, {"out.weight": torch.zeros(6, 16)}, 1, "step")


def test_a_folder_without_library_is_corrupt(tmp_path):
    with pytest.raises(ArtifactCorrupt, match="missing"):
        aoti.open_stage(tmp_path, "packed", {}, 1, "step")


def test_packing_that_did_not_happen_fails_the_build(tmp_path, monkeypatch):
    built = export_region(toy.region())
    staged = split(built[0], toy.SPEC, built[1])
    monkeypatch.setattr(aoti, "PACKED_MARK", "a mark no code holds")
    options = Options(Buckets(axes={"frames": (16,)}), (euler(linear(2)),), TARGET, cache=tmp_path)
    jobs = [j for j in plan_jobs(staged, options) if j.stage == "step"]

    with pytest.raises(CompileFailed, match="not packed"):
        compile_all(jobs, toy.SPEC, options, tmp_path, tmp_path / "out", toy.Quiet())


def test_opening_imports_no_compiler_and_writes_no_file(compiled, tmp_path):
    mode, built = compiled
    entry, _ = built.step()
    script = f"""
import json, sys
from pathlib import Path
import torch
from voicehub_aot.engines import aoti
weights = {{n: torch.zeros(s) for n, s in {[(n, list(t.shape)) for n, t in constants(built).items()]!r}}}
aoti.open_stage(Path({str(built.folder / entry.path)!r}), {mode!r}, weights, 1, "step")
print(json.dumps([m for m in ("torch._inductor", "torch._dynamo") if m in sys.modules]))
"""
    environment = {"TMPDIR": str(tmp_path), "PATH": "/nonexistent"}

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)

    assert json.loads(done.stdout) == []
    assert list(tmp_path.iterdir()) == []
