"""Recorded reference cases on ONNX Runtime: one of each graph, the rest and released sizes under `slow`."""

import pytest
from recorded import cases_for, check


@pytest.mark.parametrize("case", cases_for("onnxruntime"))
def test_a_recorded_case_is_reproduced(case):
    check("onnxruntime", case)
