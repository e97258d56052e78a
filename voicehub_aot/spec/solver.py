"""Solvers: a schedule -> the program that integrates over it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from voicehub_aot.errors import UsageError
from voicehub_aot.spec.program import STATE, Combine, Evaluate, Program
from voicehub_aot.spec.schedule import Schedule

# step -> the guidance branches evaluated in it, as `Evaluate.against` has them
Against = Callable[[int], tuple[str, ...] | None]


def all_branches(step: int) -> None:
    """Guided against every branch in every step."""


def euler(
    schedule: Schedule,
    *,
    times: Sequence[float] | None = None,
    extra_times: Mapping[str, Sequence[float]] | None = None,
    against: Against = all_branches,
    skip: int = 0,
    rescale: tuple[float, float] | None = None,
    name: str | None = None,
) -> Program:
    """x <- x + (t' - t) v(x, t).

    times: what the denoiser is told, one value a step, where that is not the schedule's own (rounded, say).
    extra_times: of further time inputs, likewise. skip: leading steps whose velocity is taken to be 0, so that they
    need no evaluation. rescale: k and sigma of temporal score rescaling.
    """
    instructions: list[Evaluate | Combine] = []
    steps = range(skip, schedule.steps)
    for evaluation, step in enumerate(steps):
        t, t_next = schedule.times[step], schedule.times[step + 1]
        from_state, from_velocity = (1.0, t_next - t) if rescale is None else _rescaled(t, t_next, *rescale)
        terms = ((STATE, from_state), ("v", from_velocity))
        instructions += [
            Evaluate(out="v", evaluation=evaluation, against=against(step)),
            Combine(out=STATE, terms=terms),
        ]
    told = schedule.times[:-1] if times is None else times
    return Program(
        name=name or f"euler-{schedule.steps}",
        solver="euler",
        schedule=schedule.times,
        times=tuple(told[step] for step in steps),
        extra_times={key: tuple(values[step] for step in steps) for key, values in (extra_times or {}).items()},
        instructions=tuple(instructions),
    )


def _rescaled(t: float, t_next: float, k: float, sigma: float) -> tuple[float, float]:
    """Factors of x and v in x + (t' - t) v', v' = (r ((1 - t) v + x) - x) / (1 - t); time 1 = noise, where v' = v.

    r = (snr sigma^2 + 1) / (snr sigma^2 / k + 1), snr = ((1 - t) / t)^2. Source: jordandare/echo-tts 230202af,
    inference.py, and Aratako/Irodori-TTS eaf74d6a, irodori_tts/rf.py, temporal_score_rescale.
    """
    h = t_next - t
    if not t < 1.0:
        return 1.0, h
    signal, noise = ((1.0 - t) * sigma) ** 2, t**2  # snr sigma^2 is their ratio; t may be 0
    r = (signal + noise) / (signal / k + noise)
    return 1.0 + h * (r - 1.0) / (1.0 - t), h * r


def midpoint(schedule: Schedule) -> Program:
    """k = v(x, t); x <- x + h v(x + h/2 k, t + h/2) with h = t' - t."""
    instructions: list[Evaluate | Combine] = []
    times: list[float] = []
    for t, t_next in zip(schedule.times, schedule.times[1:], strict=False):
        h, evaluation = t_next - t, len(times)
        times += [t, t + h / 2]
        instructions += [
            Evaluate(out="k", evaluation=evaluation),
            Combine(out="middle", terms=((STATE, 1.0), ("k", h / 2))),
            Evaluate(out="v", x="middle", evaluation=evaluation + 1),
            Combine(out=STATE, terms=((STATE, 1.0), ("v", h))),
        ]
    return Program(
        name=f"midpoint-{schedule.steps}",
        solver="midpoint",
        schedule=schedule.times,
        times=tuple(times),
        instructions=tuple(instructions),
    )


@dataclass(frozen=True)
class Preconditioner:
    """Karras et al. (arXiv 2206.00364, table 1, "EDM"): D(x, sigma) = skip x + out F(in x, ln(sigma) / 4).

    sigma_data: standard deviation of what is generated.
    """

    sigma_data: float

    def skip(self, sigma: float) -> float:
        return self.sigma_data**2 / (sigma**2 + self.sigma_data**2)

    def out(self, sigma: float) -> float:
        return sigma * self.sigma_data / math.sqrt(sigma**2 + self.sigma_data**2)

    def into(self, sigma: float) -> float:
        return 1 / math.sqrt(sigma**2 + self.sigma_data**2)

    def slope(self, sigma: float) -> tuple[float, float]:
        """(x - D(x, sigma)) / sigma as coefficients of x and of F, without the cancellation in 1 - skip."""
        variance = sigma**2 + self.sigma_data**2
        return sigma / variance, -self.sigma_data / math.sqrt(variance)


def ancestral(sigma: float, sigma_next: float, rho: float = 1.0) -> tuple[float, float, float]:
    """Levels of one ADPM2 transition: (noise put back, where the step goes, where it is evaluated again).

    In float32, square by square as in yl4579/StyleTTS2 5cedc71, Modules/diffusion/sampler.py, ADPM2Sampler: with few
    steps up^2 nears next^2, and `down` keeps what upstream's rounding leaves of it, not next^2 / sigma.
    """
    s, t = torch.tensor(sigma, dtype=torch.float32), torch.tensor(sigma_next, dtype=torch.float32)
    up = math.sqrt(t**2 * (s**2 - t**2) / s**2)
    down = math.sqrt(t**2 - up**2)
    middle = ((s ** (1 / rho) + down ** (1 / rho)) / 2) ** rho
    return up, down, float(middle)


def adpm2(schedule: Schedule, model: Preconditioner, *, rho: float = 1.0, name: str | None = None) -> Program:
    """Ancestral DPM-Solver-2 over noise levels (k-diffusion's sample_dpm_2_ancestral), of a preconditioned network F.

    d = (x - D(x, s)) / s; m = x + d (mid - s); d' = (m - D(m, mid)) / mid; x <- x + d' (down - s) + up noise.
    Starts at s_0 times the noise. Each transition draws one noise of its own; the schedule's last level, 0, is not
    reached: N levels above 0 make N - 1 transitions.
    """
    levels = schedule.times[:-1]
    instructions: list[Evaluate | Combine] = [Combine(out="start", terms=((STATE, levels[0]),))]
    evaluated: list[float] = []
    noises = tuple(f"noise_{i}" for i in range(len(levels) - 1))
    for s, s_next, noise in zip(levels, levels[1:], noises, strict=False):
        up, down, middle = ancestral(s, s_next, rho)
        x, evaluation = STATE if evaluated else "start", len(evaluated)
        evaluated += [s, middle]
        (of_x, of_f), (of_m, of_g) = model.slope(s), model.slope(middle)
        half, whole = middle - s, down - s
        instructions += [
            Combine(out="scaled", terms=((x, model.into(s)),)),
            Evaluate(out="f", x="scaled", evaluation=evaluation),
            Combine(out="middle", terms=((x, 1 + half * of_x), ("f", half * of_f))),
            Combine(out="scaled", terms=(("middle", model.into(middle)),)),
            Evaluate(out="f", x="scaled", evaluation=evaluation + 1),
            Combine(out=STATE, terms=((x, 1.0), ("middle", whole * of_m), ("f", whole * of_g), (noise, up))),
        ]
    times = (torch.tensor(evaluated, dtype=torch.float32).log() * 0.25).tolist()
    return Program(
        name=name or f"adpm2-{schedule.steps}",
        solver="adpm2",
        schedule=schedule.times,
        times=tuple(times),
        noises=noises,
        instructions=tuple(instructions),
    )


def dpm_solver_2m(
    schedule: Schedule, ratios: Sequence[float], *, times: Sequence[float] | None = None, name: str | None = None
) -> Program:
    """DPM-Solver++(2M) (arXiv 2211.01095, alg. 2), midpoint, of a v-prediction; first and last step are first order.

    ratios: sigma / alpha at each time of the schedule; the last is 0, the clean end, where x becomes the prediction.
    times: what the network is told instead of the schedule's.
    With alpha = 1 / sqrt(ratio^2 + 1), sigma = ratio alpha, l = -ln ratio, h = l' - l:
    c = alpha x - sigma v; x <- sigma' / sigma x + alpha' (1 - e^-h) (c + (c - c_before) h / (2 h_before)).
    """
    if len(ratios) != len(schedule.times) or ratios[-1] != 0 or any(a <= b for a, b in pairwise(ratios)):
        raise UsageError(f"ratios={tuple(ratios)!r}: wanted {len(schedule.times)} decreasing noise ratios down to 0")
    alpha = [1 / math.sqrt(r * r + 1) for r in ratios]
    sigma = [r * a for r, a in zip(ratios, alpha, strict=True)]
    instructions: list[Evaluate | Combine] = []
    for i in range(schedule.steps):
        clean, before = ("clean", "clean_before") if i % 2 else ("clean_before", "clean")
        instructions += [
            Evaluate(out="v", evaluation=i),
            Combine(out=clean, terms=((STATE, alpha[i]), ("v", -sigma[i]))),
        ]
        if i == schedule.steps - 1:
            instructions.append(Combine(out=STATE, terms=((clean, 1.0),)))
            break
        gain = alpha[i + 1] * (1 - ratios[i + 1] / ratios[i])
        terms = [(STATE, sigma[i + 1] / sigma[i]), (clean, gain)]
        if i:
            extra = gain * math.log(ratios[i] / ratios[i + 1]) / (2 * math.log(ratios[i - 1] / ratios[i]))
            terms = [terms[0], (clean, gain + extra), (before, -extra)]
        instructions.append(Combine(out=STATE, terms=tuple(terms)))
    return Program(
        name=name or f"dpm-solver-2m-{schedule.steps}",
        solver="dpm_solver_2m",
        schedule=schedule.times,
        times=tuple(schedule.times[:-1] if times is None else times),
        instructions=tuple(instructions),
    )


SOLVERS = {"euler": euler, "midpoint": midpoint}
