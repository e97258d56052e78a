"""The ONNX Runtime engine: standard graphs over the one weight file, and what it refuses."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
import toy

from voicehub_aot.artifacts import store
from voicehub_aot.compiler.build import build
from voicehub_aot.compiler.export import example_inputs
from voicehub_aot.compiler.options import Options
from voicehub_aot.engines import Source, _onnx, onnxruntime as engine
from voicehub_aot.errors import ArtifactCorrupt, EngineUnavailable, MissingDependency
from voicehub_aot.runtime.load import load
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.schedule import linear
from voicehub_aot.spec.solver import euler
from voicehub_aot.spec.target import default_target, parse_target


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return toy.Compiled("onnxruntime", "shared", tmp_path_factory.mktemp("onnxruntime"))


@pytest.fixture(scope="module")
def step(built):
    return onnx.load(built.folder / "step.onnx", load_external_data=False)


@pytest.mark.parametrize("stage", ["prepare", "step"])
def test_an_opened_stage_computes_the_stage(built, stage):
    job = getattr(built, stage)
    opened = built.open(job)

    results = opened(list(job.examples))

    for got, want in zip(results, job.module(*job.examples), strict=True):
        torch.testing.assert_close(got, want)


def test_one_graph_serves_every_size(built):
    built.check_sizes(built.open(built.step), (1, 1), (2, 5), (3, 40))


def test_a_graph_names_its_border_and_its_sizes(built, step):
    shapes = {
        i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim]
        for i in (*step.graph.input, *step.graph.output)
    }

    assert shapes == {v.name: list(v.shape) for v in (*built.step.inputs, *built.step.outputs)}
    assert [(o.domain, o.version) for o in step.opset_import] == [("", _onnx.OPSET)]


def test_weights_lie_in_the_one_file_and_nowhere_else(built, step):
    outside = {t.name for t in step.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL}
    places = store.tensor_places(built.folder / "weights.safetensors")
    entries = {t.name: {e.key: e.value for e in t.external_data} for t in step.graph.initializer}

    assert outside == {c.name for c in built.entry(built.step).constants}
    for name in outside:
        offset, length = places[name]
        assert entries[name] == {"location": "weights.safetensors", "offset": str(offset), "length": str(length)}


def test_the_graph_runs_without_us(built):
    """From the folder alone, as another host would run it."""
    session = onnxruntime.InferenceSession(built.folder / "step.onnx", providers=["CPUExecutionProvider"])
    feed = {v.name: t.numpy() for v, t in zip(built.step.inputs, built.step.examples, strict=True)}

    (got,) = session.run(None, feed)

    torch.testing.assert_close(torch.from_numpy(got), built.step.module(*built.step.examples)[0])


def test_other_weights_need_no_other_graph(built):
    ours = {n: t.clone() for n, t in built.constants(built.step).items()}
    (before,) = built.open(built.step, ours)(list(built.step.examples))

    ours["out.bias"] += 1.0
    (after,) = built.open(built.step, ours)(list(built.step.examples))

    assert (after - before).abs().max().item() == pytest.approx(1.0, abs=1e-5)


def test_equal_weights_stay_two(tmp_path):
    """Folding must not merge tensors that are equal by chance: a reweight may part them."""
    model = toy.Compiled("onnxruntime", "shared", tmp_path)
    names = {t.name for t in onnx.load(tmp_path / "step.onnx", load_external_data=False).graph.initializer}

    assert {c.name for c in model.entry(model.step).constants} <= names


def test_outputs_are_the_callers_own(built):
    opened = built.open(built.step)
    (first,) = opened(list(built.step.examples))
    kept = first.clone()

    (second,) = opened([2 * t if t.is_floating_point() else t for t in built.step.examples])
    del opened

    assert torch.equal(first, kept)
    assert not torch.equal(first, second)


def test_eight_threads_share_a_session(built):
    opened = built.open(built.step)
    inputs = [[(n + 1) * t if t.is_floating_point() else t for t in built.step.examples] for n in range(8)]

    toy.check_threads(lambda n: opened(inputs[n])[0], 20)


def test_threads_are_those_of_the_process(built, monkeypatch):
    seen = []
    real = onnxruntime.InferenceSession
    monkeypatch.setattr(
        onnxruntime, "InferenceSession", lambda *a, **k: seen.append(a[1].intra_op_num_threads) or real(*a, **k)
    )

    built.open(built.step)

    assert seen == [torch.get_num_threads()]


def test_an_absent_provider_is_refused_not_replaced(built):
    with pytest.raises(EngineUnavailable, match=r"no CUDAExecutionProvider; it has .*CPUExecutionProvider"):
        engine._session(built.source(built.step), "cuda")


def test_a_provider_that_falls_back_in_silence_is_refused(built, monkeypatch):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    real = onnxruntime.InferenceSession

    def falls_back(path, options, providers):
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "0")
        return real(path, options, providers=["CPUExecutionProvider"])

    monkeypatch.setattr(onnxruntime, "InferenceSession", falls_back)

    with pytest.raises(EngineUnavailable, match="fell back from CUDAExecutionProvider to CPUExecutionProvider"):
        engine._session(built.source(built.step), "cuda")


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)

    with pytest.raises(MissingDependency, match=r"voicehub-aot\[onnx\]"):
        engine.check()


def test_two_distributions_that_broke_each_other_are_told_apart(monkeypatch):
    monkeypatch.delattr(onnxruntime, "InferenceSession")

    with pytest.raises(EngineUnavailable, match="onnxruntime and onnxruntime-gpu share one folder"):
        engine.check()


def test_a_missing_graph_is_corrupt(tmp_path):
    with pytest.raises(ArtifactCorrupt, match="missing"):
        engine.open_stage(Source(tmp_path, "step.onnx", {}, (), (), {}, "step"), 1)


def test_a_graph_that_does_not_open_is_corrupt(built, tmp_path):
    (tmp_path / "step.onnx").write_bytes(b"no protobuf")
    source = Source(tmp_path, "step.onnx", {"step.onnx": "digest"}, (), (), {}, "step")

    with pytest.raises(ArtifactCorrupt, match="onnxruntime cannot open the graph"):
        engine.open_stage(source, 1)


def test_memory_stays_flat_over_fifty_shapes(built):
    opened = built.open(built.step)

    def run(frames):
        inputs = example_inputs(toy.SPEC, {"B": 2, "frames": frames, "text": 3})
        opened(
            [
                inputs[v.name]
                if v.name in inputs
                else torch.randn([{"B": 2, "frames": frames}.get(s, s) for s in v.shape])
                for v in built.step.inputs
            ]
        )

    def resident():
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * 4096

    order = torch.randperm(500, generator=torch.Generator().manual_seed(0))[:50].tolist()
    run(512)
    before = resident()
    for frames in order:
        run(frames + 1)

    assert resident() - before < 8 * 2**20


# --- a whole artifact


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    options = Options(
        Buckets(axes={"frames": (8, 16)}),
        (euler(linear(2)),),
        parse_target(default_target()),
        engines=("onnxruntime",),
        parity=False,
    )
    path = tmp_path_factory.mktemp("artifact") / "toy.aot"
    build(toy.model(), options, path, toy.Quiet())
    return path


def sample(runtime, seed, frames=8):
    cond, ids = torch.ones(1, frames, toy.COND), torch.zeros(1, 3, dtype=torch.int64)
    return runtime.sample(seed=seed, lengths=[frames], cond=cond, ids=ids)


def edit(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda a: (a / store.WEIGHTS).rename(a / "moved.safetensors"), f"{store.WEIGHTS} is missing"),
        (
            lambda a: (a / store.WEIGHTS).write_bytes((a / store.WEIGHTS).read_bytes()[:-8]),
            f"{store.WEIGHTS} has .* bytes, wanted",
        ),
        (lambda a: edit(a / store.WEIGHTS), f"{store.WEIGHTS} was altered"),
        (lambda a: edit(a / "step.onnx"), r"step\.onnx was altered"),
    ],
    ids=["weights moved", "weights truncated", "weights edited", "graph edited"],
)
def test_a_damaged_artifact_is_refused_before_a_session_is_made(artifact, tmp_path, damage, told):
    copy = shutil.copytree(artifact, tmp_path / "copy.aot")
    damage(copy)

    with pytest.raises(ArtifactCorrupt, match=told):
        load(copy)


def test_a_process_killed_while_it_opens_leaves_nothing(artifact, tmp_path):
    script = f"import voicehub_aot\nwhile True: print(voicehub_aot.load({str(artifact)!r}).name, flush=True)"
    before = sorted(artifact.rglob("*"))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout.readline() == b"toy\n"
        process.kill()

    assert sorted(artifact.rglob("*")) == before
    assert list(tmp_path.iterdir()) == []
    assert sample(load(artifact), 0).isfinite().all()


def test_eight_threads_share_a_runtime(artifact):
    runtime = load(artifact, concurrency=4)

    toy.check_threads(lambda seed: sample(runtime, seed), 5)


def test_one_processor_means_one_thread(artifact):
    script = f"""
import os, torch
os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
import voicehub_aot
from voicehub_aot.engines import onnxruntime as engine
runtime = voicehub_aot.load({str(artifact)!r})
options = runtime.evaluator.step_engines[0][1]._session.get_session_options()
cond, ids = torch.ones(1, 8, 5), torch.zeros(1, 3, dtype=torch.int64)
print(options.intra_op_num_threads, runtime.sample(seed=0, lengths=[8], cond=cond, ids=ids).sum().item())
"""

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    threads, total = done.stdout.split()
    assert threads == "1"
    assert float(total) == pytest.approx(sample(load(artifact), 0).sum().item(), abs=1e-4)


def test_an_artifact_needs_neither_the_builds_torch_nor_its_processor(artifact, monkeypatch):
    """Its graphs are portable, unlike compiled code."""
    monkeypatch.setattr("voicehub_aot.runtime.load.torch_minor", lambda: "9.9")
    monkeypatch.setattr("voicehub_aot.spec.target.host_features", frozenset)

    assert sample(load(artifact), 0).isfinite().all()
