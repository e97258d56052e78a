"""Rotary position embedding, on interleaved pairs and on halves.

Released F5 checkpoints rotate channel pairs (2 j, 2 j + 1). Compiled, loads of every other channel do not vectorise;
the same rotation on halves does. Attention does not mind the order of a head's channels as long as queries and keys
agree, so a compiled graph permutes the projections once (constants, folded at build) and rotates halves.
"""

from __future__ import annotations

import torch


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [B, T, H, E]; cos, sin: [T, 1, E / 2] -> (x0 cos - x1 sin, x1 cos + x0 sin) of each channel pair."""
    even, odd = x.view(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As `rotate_pairs` for x whose channels are in `halves_order`: channel j pairs with channel j + E / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def halves_order(width: int) -> torch.Tensor:
    """[width] int64: the channel at each place once even channels come first, then odd ones."""
    return torch.arange(width).view(-1, 2).t().flatten()


def in_halves_order(parameter: torch.Tensor, width: int) -> torch.Tensor:
    """Rows of a projection [H * width, ...], or one head's vector [width], with each head's channels reordered."""
    heads = parameter.reshape(-1, width, *parameter.shape[1:])
    return heads[:, halves_order(width)].flatten(0, 1)
