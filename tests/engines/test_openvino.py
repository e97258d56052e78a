"""The OpenVINO engine: the same graph as ONNX Runtime's, compiled when it is opened."""

import sys

import pytest
import torch
import toy

from voicehub_aot.engines import Source, _onnx, openvino as engine
from voicehub_aot.errors import ArtifactCorrupt, MissingDependency


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return toy.Compiled("openvino", "shared", tmp_path_factory.mktemp("openvino"))


@pytest.mark.parametrize("stage", ["prepare", "step"])
def test_an_opened_stage_computes_the_stage(built, stage):
    job = getattr(built, stage)

    results = built.open(job)(list(job.examples))

    for got, want in zip(results, job.module(*job.examples), strict=True):
        torch.testing.assert_close(got, want)


def test_one_graph_serves_every_size(built):
    built.check_sizes(built.open(built.step), (1, 1), (2, 5), (3, 40), (1, 2))


def test_outputs_are_the_callers_own(built):
    opened = built.open(built.step)
    (first,) = opened(list(built.step.examples))
    kept = first.clone()

    (second,) = opened([2 * t if t.is_floating_point() else t for t in built.step.examples])

    assert torch.equal(first, kept)
    assert not torch.equal(first, second)


def test_eight_threads_share_two_requests(built):
    opened = engine.open_stage(built.source(built.step), 2)
    inputs = [[(n + 1) * t if t.is_floating_point() else t for t in built.step.examples] for n in range(8)]

    toy.check_threads(lambda n: opened(inputs[n])[0], 20)


def test_onnxruntime_finds_the_graph_in_the_cache(built, tmp_path, monkeypatch):
    monkeypatch.setattr(_onnx, "write", None)  # would fail

    other = toy.Compiled("onnxruntime", "shared", tmp_path)

    assert [entry.key for entry in other.entries] == [entry.key for entry in built.entries]


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)

    with pytest.raises(MissingDependency, match=r"voicehub-aot\[openvino\]"):
        engine.check()


def test_a_missing_graph_is_corrupt(tmp_path):
    with pytest.raises(ArtifactCorrupt, match="missing"):
        engine.open_stage(Source(tmp_path, "step.onnx", {}, (), (), {}, "step"), 1)


def test_a_graph_that_does_not_open_is_corrupt(tmp_path):
    (tmp_path / "step.onnx").write_bytes(b"no protobuf")
    source = Source(tmp_path, "step.onnx", {"step.onnx": "digest"}, (), (), {}, "step")

    with pytest.raises(ArtifactCorrupt, match="openvino cannot open the graph"):
        engine.open_stage(source, 1)
