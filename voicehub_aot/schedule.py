"""Time grids: a schedule of N steps is N + 1 strictly monotone times, noise first.

Grids are computed in float32 with torch, as the reference samplers do, so that their values agree bit for bit.
"""

from __future__ import annotations

import itertools
import math

import torch
from pydantic import BaseModel, ConfigDict, field_validator

from voicehub_aot.errors import UsageError

# Steps kept of a 32-step grid, by step count.
# Source: SWivid/F5-TTS 2ae2c9b, src/f5_tts/model/utils.py, get_epss_timesteps.
EPSS_32 = {
    5: (0, 2, 4, 8, 16, 32),
    6: (0, 2, 4, 6, 8, 16, 32),
    7: (0, 2, 4, 6, 8, 16, 24, 32),
    10: (0, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32),
    12: (0, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32),
    16: (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32),
}


class Schedule(BaseModel):
    """times: N + 1 floats, strictly monotone; times[0] is the noise end."""

    model_config = ConfigDict(frozen=True)
    times: tuple[float, ...]

    @field_validator("times")
    @classmethod
    def _monotone(cls, times: tuple[float, ...]) -> tuple[float, ...]:
        if len(times) < 2 or not all(math.isfinite(t) for t in times):
            raise ValueError(f"a schedule needs two or more finite times, got {times!r}")
        deltas = [b - a for a, b in itertools.pairwise(times)]
        if not (all(d > 0 for d in deltas) or all(d < 0 for d in deltas)):
            raise ValueError(f"times must be strictly monotone, got {times!r}")
        return times

    @property
    def steps(self) -> int:
        return len(self.times) - 1


def _check_steps(steps: int) -> None:
    if steps < 1:
        raise UsageError(f"steps={steps!r}: a schedule needs at least 1 step")


def _from_grid(grid: torch.Tensor, what: str) -> Schedule:
    try:
        return Schedule(times=tuple(grid.tolist()))
    except ValueError as error:
        raise UsageError(f"{what} gives no strictly monotone grid of finite times: choose other values") from error


def linear(steps: int) -> Schedule:
    """The uniform grid from 0 to 1."""
    _check_steps(steps)
    return _from_grid(torch.linspace(0, 1, steps + 1, dtype=torch.float32), f"steps={steps}")


def epss(steps: int) -> Schedule:
    """F5's empirically pruned grid where it has one (5, 6, 7, 10, 12, 16 steps), else the uniform grid."""
    if steps not in EPSS_32:
        return linear(steps)
    return _from_grid(torch.tensor(EPSS_32[steps], dtype=torch.float32) / 32, f"steps={steps}")


def cosine(steps: int) -> Schedule:
    """From 0 to 1, most densely at 0: 1 - cos(pi u / 2) of the uniform grid (CosyVoice's and chatterbox's)."""
    uniform = torch.tensor(linear(steps).times, dtype=torch.float32)
    return _from_grid(1 - torch.cos(uniform * 0.5 * torch.pi), f"steps={steps}")


def sway(schedule: Schedule, coefficient: float | None) -> Schedule:
    """Sway sampling (F5-TTS, arXiv 2410.06885): t + s (cos(pi t / 2) - 1 + t). None leaves the grid alone."""
    if coefficient is None:
        return schedule
    t = torch.tensor(schedule.times, dtype=torch.float32)
    return _from_grid(t + coefficient * (torch.cos(torch.pi / 2 * t) - 1 + t), f"sway={coefficient!r}")
