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


def descending(steps: int) -> Schedule:
    """The uniform grid from 1 to 0, for models whose time is 1 at the noise end."""
    _check_steps(steps)
    return _from_grid(torch.linspace(1, 0, steps + 1, dtype=torch.float32), f"steps={steps}")


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


def karras(steps: int, sigma_min: float, sigma_max: float, rho: float) -> Schedule:
    """Noise levels of Karras et al. (arXiv 2206.00364, eq. 5): `steps` of them from sigma_max to sigma_min, then 0.

    (max^(1/rho) + i / (n - 1) (min^(1/rho) - max^(1/rho)))^rho, in yl4579/StyleTTS2 5cedc71's order of float32
    operations, Modules/diffusion/sampler.py, KarrasSchedule.
    """
    if steps < 2:
        raise UsageError(f"steps={steps!r}: a Karras schedule needs at least 2 levels")
    root = 1.0 / rho
    place = torch.arange(steps, dtype=torch.float32) / (steps - 1)
    levels = (sigma_max**root + place * (sigma_min**root - sigma_max**root)) ** rho
    grid = torch.cat((levels, torch.zeros(1)))
    return _from_grid(grid, f"steps={steps}, sigma_min={sigma_min!r}, sigma_max={sigma_max!r}, rho={rho!r}")


def training_timesteps(steps: int, train_steps: int = 1000) -> Schedule:
    """Integer steps of the training chain, from the last one down, evenly spread and never 0; then -1, the clean end.

    In microsoft/VibeVoice e73d1e1, vibevoice/schedule/dpm_solver.py, halves go to the even number, and numpy's
    linspace, i times a rounded step, says what is a half: at 26 steps the middle is a little less, torch's exactly one.
    """
    _check_steps(steps)
    step = (train_steps - 1) / steps
    grid = torch.tensor([*(round(i * step) for i in range(steps, 0, -1)), -1], dtype=torch.float64)
    return _from_grid(grid, f"steps={steps} of {train_steps} trained")


def cosine_noise_ratios(train_steps: int = 1000) -> tuple[float, ...]:
    """sigma / alpha after each step of the cosine training chain (arXiv 2102.09672), in float32.

    beta_i = min(1 - f((i + 1) / T) / f(i / T), 0.999) with f(u) = cos^2(pi / 2 (u + 0.008) / 1.008).
    """

    def kept(u: float) -> float:
        return math.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2

    betas = [min(1 - kept((i + 1) / train_steps) / kept(i / train_steps), 0.999) for i in range(train_steps)]
    alphas = torch.cumprod(1 - torch.tensor(betas, dtype=torch.float32), dim=0)
    return tuple(((1 - alphas) / alphas).sqrt().tolist())
