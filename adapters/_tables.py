"""Tables that several models compute alike: waves of the time, rotary angles, times in a model's dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Rope = tuple[Tensor, Tensor]

BASE = 10000.0
TIME_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def rounded(times: Sequence[float], dtype: str) -> tuple[float, ...]:
    """Evaluation times as a model of this dtype is given them; the steps between them stay as they are.

    In bfloat16 a time below 1 moves by up to 0.002, which the fastest wave of a time embedding turns into 2 rad.
    """
    return tuple(torch.tensor(times, dtype=torch.float32).to(TIME_DTYPES[dtype]).double().tolist())


def sines_first(time: Tensor, width: int) -> Tensor:
    """time: [1] -> [1, width]: all sines, then all cosines, of 1000 time times frequencies from 1 down to 1 / BASE.

    Angles reach 1000 rad, where one float32 ulp is 6e-5: the order of the products is upstream's. The dtype is the
    time's throughout: in bfloat16 the rounding of 1000 rad is part of the model.
    """
    decay = -math.log(BASE) / (width // 2 - 1)
    frequencies = torch.exp(torch.arange(width // 2, dtype=time.dtype, device=time.device) * decay)
    angles = 1000 * time[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def cosines_first(time: Tensor, width: int, scale: float) -> Tensor:
    """time: [1] -> [1, width]: all cosines, then all sines. scale: of the time, which leads to angles of 1000 rad.

    The order of the products is upstream's, and the last frequency is just above 1 / BASE.
    """
    half = width // 2
    exponents = -math.log(BASE) * torch.arange(half, device=time.device).float() / half
    angles = time[:, None] * (scale * torch.exp(exponents))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def inverse_frequencies(width: int, device: torch.device | None = None) -> Tensor:
    """[width / 2] float32: BASE ** (-2 j / width)."""
    return 1.0 / torch.pow(BASE, torch.arange(0, width, 2, device=device).float() / width)


def rope_of(positions: Tensor, frequencies: Tensor) -> Rope:
    """positions: [..., T]; frequencies: [W / 2] -> cos and sin, each [..., T, 1, W / 2], float32."""
    angles = positions.float()[..., None, None] * frequencies
    return angles.cos(), angles.sin()
