"""Linears of few rows as reductions, and which linears of a stage they are."""

import pytest
import torch
import torch.nn.functional as F

from voicehub_aot.kernels.linear import FEW_ROWS, few, reduced


@pytest.mark.parametrize("outputs", [1, 7, 24])
@pytest.mark.parametrize("shape", [(1, 5), (3, 5), (2, 2, 5)])
@pytest.mark.parametrize("biased", [True, False])
def test_a_reduction_is_the_linear(outputs, shape, biased):
    generator = torch.Generator().manual_seed(outputs)
    x, weight = torch.randn(shape, generator=generator), torch.randn(outputs, 5, generator=generator)
    bias = torch.randn(outputs, generator=generator) if biased else None

    torch.testing.assert_close(reduced(x, weight, bias, most=4), F.linear(x, weight, bias))


def test_a_narrow_weight_is_widened_before_it_is_used():
    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn(2, 64, generator=generator), torch.randn(8, 64, generator=generator).bfloat16()

    torch.testing.assert_close(reduced(x, weight, None, most=2), F.linear(x, weight.float()))


def test_few_is_a_rule_of_rows_and_device():
    assert few(FEW_ROWS)
    assert not few(FEW_ROWS + 1)
    assert not few(1, device="cuda")
