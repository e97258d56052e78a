"""Depthwise convolution over frames that replicates the edges of each row at the row's own end."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def depthwise(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, extent: torch.Tensor, dilation: int
) -> torch.Tensor:
    """x: [B, T, D]; weight: [D, 1, k], k odd; bias: [D]; extent: [B] int64, 1 <= extent <= T. Returns [B, T, D].

    out[b, n] = bias + sum over j of weight[:, 0, j] * x[b, clamp(n + (j - k // 2) * dilation, 0, extent_b - 1)]

    With extent = T it is `conv1d` behind replicate padding. With extent = the row's length, frames before it see what
    they would see if the row were alone. Written as k gathers of whole frames, which Inductor fuses into one loop,
    vectorised over D, with neither the padded copy nor the transposes that `conv1d` needs.
    """
    B, T, D = x.shape
    rows = torch.arange(B, device=x.device)[:, None]
    frames = torch.arange(T, device=x.device)[None, :]
    last = extent[:, None] - 1
    taps = torch.stack(weight.squeeze(1).unbind(-1))  # [k, D]; a transposed view would be read with stride k
    out = bias.expand(B, T, D)
    for j in range(taps.shape[0]):
        offset = (j - taps.shape[0] // 2) * dilation
        source = torch.minimum((frames + offset).clamp(min=0), last)
        out = torch.addcmul(out, taps[j], _gather(x, rows, source))
    return out


def _gather(x: torch.Tensor, rows: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """x[b, source[b, n]]: x: [B, T, D], rows: [B, 1], source: [B, T] -> [B, T, D].

    Compiled, two indices are best: a flat one costs an integer division per element. Eager, one flat index is twice
    as fast.
    """
    if torch.compiler.is_exporting():
        return x[rows, source]
    return F.embedding(rows * x.shape[1] + source, x.flatten(0, 1))
