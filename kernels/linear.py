"""Matrix products of few rows, which take as long as reading their weights does.

A matrix library is made for many rows: it packs weights into panels, and computes on float32. Few rows are a reduction
over each weight row instead, which a compiler fuses with what stands around it, and which may read weights as narrow as
they were released and widen them on the way: half the bytes of bfloat16, and the same float32 arithmetic.

The rule by which a linear is left to the matrix library or fused is `few`; engines/aoti.py applies it at compile time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

FEW_ROWS = 4  # measured by bench/bench_linear.py; on CPU, where weights do not fit the cache


def few(rows: int, device: str = "cpu") -> bool:
    """Whether a product of at most `rows` rows is better fused than given to the matrix library."""
    return device == "cpu" and rows <= FEW_ROWS


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x: [..., K]; weight: [M, K], stored as narrow as it was released. Returns [..., M] in x's dtype."""
    return F.linear(x, weight.to(x.dtype), bias)


def reduced(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`linear` as a reduction over each weight row; rows of x innermost, so that a weight row is read once."""
    rows = x.reshape(-1, x.shape[-1])
    product = (weight.to(x.dtype)[:, None, :] * rows[None]).sum(-1)  # [M, rows]
    if bias is not None:
        product = product + bias[:, None]
    return product.t().reshape(*x.shape[:-1], weight.shape[0])


class Linear(torch.nn.Linear):
    """Keeps its weight in the dtype it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)
