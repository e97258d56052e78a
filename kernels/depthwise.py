"""Depthwise convolution over frames that replicates the edges of each row at the row's own end.

Exported, it is one operator, `voicehub_aot::depthwise`, whose definition is the composition below: a compiler that
takes it apart (AOTInductor) gets k gathers of whole frames, which Inductor fuses into one loop, vectorised over D, with
neither the padded copy nor the transposes that `conv1d` needs. An ONNX engine would run them one by one, and gets a
convolution instead (engines/_onnx.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def depthwise(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, extent: torch.Tensor, dilation: int
) -> torch.Tensor:
    """x: [B, T, D]; weight: [D, 1, k], k odd; bias: [D]; extent: [B] int64, 1 <= extent <= T. Returns [B, T, D].

    out[b, n] = bias + sum over j of weight[:, 0, j] * x[b, clamp(n + (j - k // 2) * dilation, 0, extent_b - 1)]

    With extent = T it is `conv1d` behind replicate padding. With extent = the row's length, frames before it see what
    they would see if the row were alone.
    """
    taps = torch.stack(weight.squeeze(1).unbind(-1))  # [k, D]; a transposed view would be read with stride k
    if torch.compiler.is_exporting():
        out: torch.Tensor = torch.ops.voicehub_aot.depthwise(x, taps, bias, extent, dilation)
        return out
    out = bias.expand(x.shape)
    base = torch.arange(x.shape[0], device=x.device)[:, None] * x.shape[1]
    for tap, source in zip(taps, sources(x, taps.shape[0], extent, dilation), strict=True):
        # Eager, one flat index is twice as fast as two.
        out = torch.addcmul(out, tap, F.embedding(base + source, x.flatten(0, 1)))
    return out


def sources(x: torch.Tensor, k: int, extent: torch.Tensor, dilation: int) -> list[torch.Tensor]:
    """The frames that each tap reads: k tensors [B, T] int64."""
    frames = torch.arange(x.shape[1], device=x.device)[None, :]
    last = extent[:, None] - 1
    return [torch.minimum((frames + (j - k // 2) * dilation).clamp(min=0), last) for j in range(k)]


torch.library.define(
    "voicehub_aot::depthwise", "(Tensor x, Tensor taps, Tensor bias, Tensor extent, int dilation) -> Tensor"
)


@torch.library.impl("voicehub_aot::depthwise", "CompositeImplicitAutograd")
def composed(
    x: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor, extent: torch.Tensor, dilation: int
) -> torch.Tensor:
    """As `depthwise`, taps: [k, D]. Compiled, two indices are best: a flat one divides integers for each element."""
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    out = bias.expand(x.shape)
    for tap, source in zip(taps.unbind(), sources(x, taps.shape[0], extent, dilation), strict=True):
        out = torch.addcmul(out, tap, x[rows, source])
    return out
