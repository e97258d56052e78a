"""What is measured without any package: how far a candidate's states and sound are from the reference's.

Every measure, a scorer's too, is described by a `Measure`; verdict.py turns it into a bound.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import torch

from voicehub_aot.proof.quality.clip import Clip
from voicehub_aot.proof.quality.side import Spoken

FROZEN = 1e-6  # relative; a step that moves a float32 state by less is rounding
WINDOW_S, HOP_S = 0.064, 0.016  # of the log-mel spectrum
BANDS = 80
HIGHEST_HZ = 8000.0
RANGE = 1e-3  # of the reference's largest band: what lies 60 dB below it is not heard


@dataclass(frozen=True)
class Measure:
    """about: what it is, with its unit.

    kind: "clip" = of one clip: the band is the reference's own, by seed. "pair" = distance of two clips: the band is
    that of two seeds of the reference. "matched" = likewise, and where both sides have the same noise the distance
    must be at most `share` of the band's mean.
    slack: how far beyond the worst of the band the bound lies. counts_words: and at least one word of a run, for an
    error rate cannot move by less. reason: why so much. validates: it hears speech, so that quality is validated.
    """

    name: str
    about: str
    kind: Literal["clip", "pair", "matched"]
    reason: str
    slack: float = 0.0
    share: float = 0.0
    better: Literal["lower", "higher"] = "lower"
    counts_words: bool = False
    validates: bool = False


class Score(NamedTuple):
    """The value of a measure for one utterance, and how much it weighs in the mean. Signed: means are of |value|."""

    value: float
    weight: float = 1.0


_SHARE = (
    "the same noise leads to nearly the same speech: a third of what another seed changes is a ninth of its power, and "
    "leaves the seed in charge"
)
OWN = (
    Measure("latent", "relative L2 distance of the final states", "matched", _SHARE, share=1 / 3),
    Measure("log_mel", "mean absolute difference of log-mel spectra, nats", "matched", _SHARE, share=1 / 3),
    Measure("level_db", "difference of the levels, dB", "pair", "1 dB is about the least difference heard", slack=1.0),
    Measure("duration", "difference of the durations, relative", "pair", "2 % is about the least heard", slack=0.02),
    Measure("frozen_steps", "steps that leave the state as it is", "clip", "no step of a program is idle"),
)


def of_one(spoken: Spoken) -> dict[str, Score]:
    """The measures above that are of one clip."""
    return {"frozen_steps": Score(float(frozen_steps(spoken.states)))}


def of_two(candidate: Spoken, reference: Spoken) -> dict[str, Score]:
    """The measures above that compare two."""
    return {
        "latent": Score(relative_l2(candidate.states[-1], reference.states[-1])),
        "log_mel": Score(log_mel_distance(candidate.clip, reference.clip)),
        "level_db": Score(candidate.clip.level_db - reference.clip.level_db if candidate.clip.finite else math.inf),
        "duration": Score(candidate.clip.seconds / reference.clip.seconds - 1),
    }


def pooled(scores: Iterable[Score]) -> float:
    """The weighted mean of the absolute values; not a number where there is nothing to pool."""
    taken = list(scores)
    weight = sum(score.weight for score in taken)
    return sum(abs(score.value) * score.weight for score in taken) / weight if weight else math.nan


def relative_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want|; infinite where the shapes differ or something is not finite."""
    if got.shape != want.shape or not (got.isfinite().all() and want.isfinite().all()):
        return math.inf
    error, norm = (got.double() - want.double()).norm().item(), want.double().norm().item()
    return error / norm if norm > 0 else 0.0 if error == 0 else math.inf


def frozen_steps(states: Sequence[torch.Tensor]) -> int:
    """How many states are the one before."""
    return sum(relative_l2(after, before) <= FROZEN for before, after in itertools.pairwise(states))


def errors_by_step(candidate: Spoken, reference: Spoken) -> list[float]:
    """Relative L2 distance after each of the candidate's steps, from the reference's state at that time.

    Between two of the reference's times its state is interpolated linearly.
    """
    return [
        relative_l2(state, _state_at(reference, time))
        for time, state in zip(candidate.times[1:], candidate.states[1:], strict=True)
    ]


def _state_at(spoken: Spoken, time: float) -> torch.Tensor:
    sign = 1.0 if spoken.times[-1] > spoken.times[0] else -1.0
    times = [sign * t for t in spoken.times]
    after = min(max(1, bisect_left(times, sign * time)), len(times) - 1)
    part = (sign * time - times[after - 1]) / (times[after] - times[after - 1])
    before, behind = spoken.states[after - 1], spoken.states[after]
    return torch.lerp(before, behind, min(1.0, max(0.0, part))) if part < 1 else behind


def log_mel_distance(candidate: Clip, reference: Clip) -> float:
    """Mean absolute difference over the frames that both have, nats; infinite where a sample is not finite."""
    if not (candidate.finite and reference.finite) or candidate.rate_hz != reference.rate_hz:
        return math.inf
    got, want = mel(candidate), mel(reference)
    floor = RANGE * max(want.max().item(), 1e-9)
    frames = min(len(got), len(want))
    logs = [spectrum[:frames].clamp(min=floor).log() for spectrum in (got, want)]
    return (logs[0] - logs[1]).abs().mean().item()


def mel(clip: Clip) -> torch.Tensor:
    """Magnitudes in mel bands, float64 [frames, BANDS]."""
    window = round(WINDOW_S * clip.rate_hz)
    samples = torch.nn.functional.pad(clip.samples.double(), (0, max(0, window - len(clip.samples))))
    spectrum = torch.stft(
        samples,
        window,
        hop_length=round(HOP_S * clip.rate_hz),
        window=torch.hann_window(window, dtype=torch.float64),
        center=False,
        return_complex=True,
    ).abs()
    return spectrum.T @ _filters(window, clip.rate_hz)


@cache
def _filters(window: int, rate_hz: int) -> torch.Tensor:
    """Triangles on HTK's mel scale, 2595 log10(1 + f / 700), float64 [window / 2 + 1, BANDS]."""
    top = 2595 * math.log10(1 + min(HIGHEST_HZ, rate_hz / 2) / 700)
    edges = 700 * (10 ** (torch.linspace(0, top, BANDS + 2, dtype=torch.float64) / 2595) - 1)
    bins = torch.arange(window // 2 + 1, dtype=torch.float64)[:, None] * rate_hz / window
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    return torch.minimum((bins - low) / (middle - low), (high - bins) / (high - middle)).clamp(min=0)
