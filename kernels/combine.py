"""Linear combination of registers: the one arithmetic the sampling loop does itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def combine(terms: Sequence[tuple[torch.Tensor, float]]) -> torch.Tensor:
    """terms: tensors of one shape with their coefficients -> a new tensor, sum of coefficient * tensor in order."""
    (first, coefficient), *rest = terms
    total = first * coefficient if coefficient != 1.0 else first
    for tensor, coefficient in rest:
        total = torch.add(total, tensor, alpha=coefficient)
    return total if total is not first else first.clone()
