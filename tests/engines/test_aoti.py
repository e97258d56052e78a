"""The AOTInductor engine: packed means packed, shared means bound to our tensors, opened without a compiler."""

import json
import subprocess
import sys

import pytest
import torch
import toy

from voicehub_aot.compiler.compile import compile_all
from voicehub_aot.compiler.export import export_region
from voicehub_aot.compiler.jobs import plan_jobs
from voicehub_aot.compiler.options import Options
from voicehub_aot.compiler.split import split
from voicehub_aot.engines import Source, aoti
from voicehub_aot.errors import ArtifactCorrupt, CompileFailed
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.schedule import linear
from voicehub_aot.spec.solver import euler
from voicehub_aot.spec.target import default_target, parse_target

TARGET = parse_target(default_target())


@pytest.fixture(scope="module", params=["packed", "shared"])
def compiled(request, tmp_path_factory):
    return request.param, toy.Compiled("aoti", request.param, tmp_path_factory.mktemp(request.param))


def test_an_opened_step_computes_the_stage(compiled):
    _, built = compiled
    engine = built.open(built.step)

    (got,) = engine(list(built.step.examples))

    torch.testing.assert_close(got, built.step.module(*built.step.examples)[0])


def test_a_shared_engine_reads_our_tensors_in_place(compiled):
    mode, built = compiled
    ours = {n: t.clone() for n, t in built.constants(built.step).items()}
    engine = built.open(built.step, ours)
    (before,) = engine(list(built.step.examples))

    if mode == "shared":
        ours["out.bias"] += 1.0
    (after,) = engine(list(built.step.examples))

    changed = (after - before).abs().max().item()
    assert changed == pytest.approx(1.0, abs=1e-5) if mode == "shared" else changed == 0


def test_a_shared_library_holds_no_weights(compiled):
    mode, built = compiled
    library = (built.folder / built.entry(built.step).path / aoti.LIBRARY).read_bytes()
    weight = built.stages.step.constants["into.weight"].numpy().tobytes()[:64]

    assert weight not in library if mode == "shared" else len(library) > 0


def test_a_missing_weight_is_named_before_anything_runs(compiled):
    mode, built = compiled
    if mode == "packed":
        built.open(built.step, {})  # needs none
        return

    with pytest.raises(ArtifactCorrupt, match=r"into\.weight"):
        built.open(built.step, {"out.weight": torch.zeros(6, 16)})


def test_a_folder_without_library_is_corrupt(tmp_path):
    with pytest.raises(ArtifactCorrupt, match="missing"):
        aoti.open_stage(Source(tmp_path, "step", {}, (), (), {}, "step"), 1)


def test_packing_that_did_not_happen_fails_the_build(tmp_path, monkeypatch):
    built = export_region(toy.region())
    stages = split(built[0], toy.SPEC, built[1])
    monkeypatch.setattr(aoti, "PACKED_MARK", "a mark no code holds")
    options = Options(Buckets(axes={"frames": (16,)}), (euler(linear(2)),), TARGET, cache=tmp_path)
    jobs = [j for j in plan_jobs(stages, options, "aoti") if j.stage == "step"]

    with pytest.raises(CompileFailed, match="not packed"):
        compile_all(jobs, toy.SPEC, options, tmp_path, toy.Quiet())


def test_opening_imports_no_compiler_and_writes_no_file(compiled, tmp_path):
    _, built = compiled
    source = built.source(built.step)
    script = f"""
import json, sys
from pathlib import Path
import torch
from voicehub_aot.engines import Source, aoti
weights = {{n: torch.zeros(s) for n, s in {[(n, list(t.shape)) for n, t in source.constants.items()]!r}}}
aoti.open_stage(Source(Path({str(source.root)!r}), {source.path!r}, {source.digests!r}, (), (), weights, "step"), 1)
print(json.dumps([m for m in ("torch._inductor", "torch._dynamo") if m in sys.modules]))
"""
    environment = {"TMPDIR": str(tmp_path), "PATH": "/nonexistent"}

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)

    assert json.loads(done.stdout) == []
    assert list(tmp_path.iterdir()) == []
