"""Matrix products of few rows, which take as long as reading their weights does.

A matrix library is made for many rows: it packs weights into panels, and computes on float32. Few rows are a reduction
over each weight row instead, which a compiler fuses with what stands around it, and which may read weights as narrow as
they were released and widen them on the way: half the bytes of bfloat16, and the same float32 arithmetic.

The rule by which a linear is left to the matrix library or fused is `few`; voicehub_aot/compiler/fuse.py applies it
before a stage is compiled.
"""

from __future__ import annotations

import math

import torch

FEW_ROWS = 4  # bench/bench_linear.py; on CPU, for weights that do not fit the cache
STREAMS = 4  # weight rows read side by side: no worse on a quiet machine, more of the bandwidth on a busy one


def few(rows: int, device: str = "cpu") -> bool:
    """Whether a product of at most `rows` rows is better fused than given to the matrix library."""
    return device == "cpu" and rows <= FEW_ROWS


def reduced(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, most: int) -> torch.Tensor:
    """`F.linear` as reductions over weight rows, each read once for all rows of x.

    x: [..., K], of at most `most` rows, which the caller checks; weight: [M, K], in x's dtype or a narrower one.
    Returns [..., M] in x's dtype.
    """
    rows = x.reshape(-1, x.shape[-1])
    count, outputs = rows.shape[0], weight.shape[0]
    streams = weight.chunk(math.gcd(outputs, STREAMS))
    all_rows = rows.index_select(
        0, torch.arange(most, device=x.device).clamp(max=count - 1)
    )  # the last again and again
    products = [torch.cat([(stream.to(x.dtype) * row).sum(-1) for stream in streams]) for row in all_rows.unbind()]
    out = torch.stack(products).index_select(0, torch.arange(count, device=x.device).clamp(max=most - 1))
    if bias is not None:
        out = out + bias
    return out.reshape(*x.shape[:-1], outputs)
