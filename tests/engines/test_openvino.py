"""The OpenVINO engine: the same graph as ONNX Runtime's, compiled when it is opened."""

import sys
import threading

import pytest
import torch
import toy

from voicehub_aot.engines import Source
from voicehub_aot.engines import openvino as engine
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
    opened = built.open(built.step)

    for rows, frames in ((1, 1), (2, 5), (3, 40), (1, 2)):
        sizes = {"B": rows, "frames": frames, "text": 3}
        inputs = [
            torch.full((rows,), frames)
            if v.name == "lengths"
            else torch.randn([sizes[s] if isinstance(s, str) else s for s in v.shape])
            for v in built.step.inputs
        ]
        (got,) = opened(inputs)
        torch.testing.assert_close(got, built.step.module(*inputs)[0])


def test_outputs_are_the_callers_own(built):
    opened = built.open(built.step)
    (first,) = opened(list(built.step.examples))
    kept = first.clone()

    (second,) = opened([2 * t if t.is_floating_point() else t for t in built.step.examples])

    assert torch.equal(first, kept)
    assert not torch.equal(first, second)


def test_eight_threads_share_two_requests(built):
    opened = engine.open_stage(built.source(built.step), 2)
    (want,) = opened(list(built.step.examples))
    wrong = []

    def work():
        for _ in range(20):
            (got,) = opened(list(built.step.examples))
            if not torch.equal(got, want):
                wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong


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
