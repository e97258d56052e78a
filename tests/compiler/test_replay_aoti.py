"""Recorded reference cases on AOTInductor: one of each graph, the rest and released sizes under `slow`."""

import pytest
from recorded import cases_for, check


@pytest.mark.parametrize("case", cases_for("aoti"))
def test_a_recorded_case_is_reproduced(case):
    check("aoti", case)
