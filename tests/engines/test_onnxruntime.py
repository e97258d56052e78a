"""The ONNX Runtime engine."""

import pytest
import torch
import toy


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return toy.Compiled("onnxruntime", "shared", tmp_path_factory.mktemp("onnxruntime"))


@pytest.mark.parametrize("stage", ["prepare", "step"])
def test_an_opened_stage_computes_the_stage(built, stage):
    job = getattr(built, stage)
    engine = built.open(job)

    results = engine(list(job.examples))

    for got, want in zip(results, job.module(*job.examples), strict=True):
        torch.testing.assert_close(got, want)
