"""Solvers: a schedule -> the program that integrates over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from voicehub_aot.program import STATE, Combine, Evaluate, Program
from voicehub_aot.schedule import Schedule

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
    for row, step in enumerate(steps):
        t, t_next = schedule.times[step], schedule.times[step + 1]
        from_state, from_velocity = (1.0, t_next - t) if rescale is None else _rescaled(t, t_next, *rescale)
        terms = ((STATE, from_state), ("v", from_velocity))
        instructions += [Evaluate(out="v", row=row, against=against(step)), Combine(out=STATE, terms=terms)]
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
        h, row = t_next - t, len(times)
        times += [t, t + h / 2]
        instructions += [
            Evaluate(out="k", row=row),
            Combine(out="middle", terms=((STATE, 1.0), ("k", h / 2))),
            Evaluate(out="v", x="middle", row=row + 1),
            Combine(out=STATE, terms=((STATE, 1.0), ("v", h))),
        ]
    return Program(
        name=f"midpoint-{schedule.steps}",
        solver="midpoint",
        schedule=schedule.times,
        times=tuple(times),
        instructions=tuple(instructions),
    )


SOLVERS = {"euler": euler, "midpoint": midpoint}
