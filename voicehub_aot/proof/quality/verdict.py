"""From scores to a verdict. The gate carries its own noise: the band of the reference against itself (A/A).

A candidate is held to what the reference does when nothing changes but the seed of its noise. The bound of a measure is
the worst of that band plus the measure's slack. Where both sides start from the same noise they are held to more: a
share of what another seed changes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from voicehub_aot.artifacts.quality import Judged, SideFacts, Verdict
from voicehub_aot.artifacts.report import number
from voicehub_aot.errors import UsageError
from voicehub_aot.proof.quality.measures import Measure, Score, pooled

OTHER_NOISE = 0.15  # slack for the distances of a candidate with other noise, as a part of the worst of the band
LEAST_SAVING = 0.05  # of the evaluations, or of the real-time factor: less is within what timing errs by

# Scores by seed, or by a pair of seeds; one a spoken utterance.
Scores = dict[str, list[Score]]


@dataclass
class Tally:
    """The scores of one measure, as they come in. band: the reference's own, by its seed or pair of seeds."""

    candidate: list[Score] = field(default_factory=list)
    band: Scores = field(default_factory=dict)

    def add_candidate(self, score: Score) -> None:
        self.candidate.append(score)

    def add_band(self, seeds: Sequence[int], score: Score) -> None:
        self.band.setdefault("/".join(map(str, seeds)), []).append(score)


def pairs(seeds: Sequence[int]) -> list[tuple[int, int]]:
    """Every two seeds of the reference."""
    return list(itertools.combinations(seeds, 2))


def judge(measure: Measure, tally: Tally, matched: bool, words: int, bounds: Mapping[str, float]) -> Judged:
    """matched: both sides had the same noise. words: of the set, spoken once. bounds: those set by hand, by measure."""
    value = pooled(tally.candidate)
    band = {seeds: pooled(scores) for seeds, scores in tally.band.items()}
    bound, rule = _bound(measure, tuple(band.values()), matched, words)
    if measure.name in bounds:
        bound, rule = bounds[measure.name], f"set by hand; without it {number(bound)}: {rule}"
    good = value <= bound if measure.better == "lower" else value >= bound
    return Judged(
        name=measure.name,
        about=measure.about,
        better=measure.better,
        value=value,
        band=band,
        bound=bound,
        rule=rule,
        passed=good and math.isfinite(value),
    )


def _bound(measure: Measure, band: Sequence[float], matched: bool, words: int) -> tuple[float, str]:
    """The bound, and how it follows from the band."""
    slack, why = measure.slack, measure.reason
    if measure.kind == "matched" and matched:
        mean = sum(band) / len(band)
        return mean * measure.share, f"{measure.share:.3g} of the band's mean {number(mean)}: {why}"
    if measure.kind == "matched":
        slack, why = OTHER_NOISE * max(band), f"{OTHER_NOISE:.0%} of it, for pairs of seeds differ among themselves"
    if measure.counts_words and words * slack < 1:
        slack, why = 1 / words, f"one of the {words} words of a run: with so few a rate cannot move by less"
    if measure.better == "lower":
        worst = max(band)
        return worst + slack, f"worst of the band {number(worst)} + {number(slack)}: {why}"
    worst = min(band)
    return worst - slack, f"worst of the band {number(worst)} - {number(slack)}: {why}"


def decide(judged: Sequence[Judged], candidate: SideFacts, reference: SideFacts) -> tuple[Verdict, tuple[str, ...]]:
    """The verdict and its reasons.

    An approximation (another program, guidance or checkpoint than the reference's) must save something. What computes
    the same by other means, another engine say, need not.
    """
    failed = tuple(item.verdict for item in judged if not item.passed)
    if failed:
        return "rejected", failed
    exact = (candidate.program, candidate.guidance, candidate.checkpoint_digest) == (
        reference.program, reference.guidance, reference.checkpoint_digest,
    )  # fmt: skip
    evaluations = _saving(candidate.evaluations, reference.evaluations)
    time = _saving(candidate.rtf_p50, reference.rtf_p50)
    saving = f"{evaluations:.0%} of the evaluations and {time:.0%} of the time"
    if exact:
        return "accepted", ("the same program, guidance and weights as the reference's, and within every bound",)
    if max(evaluations, time) >= LEAST_SAVING:
        return "accepted", (f"within every bound, and saves {saving}",)
    return "no benefit", (f"within every bound, but an approximation must save {LEAST_SAVING:.0%}; it saves {saving}",)


def _saving(candidate: float, reference: float) -> float:
    return 1 - candidate / reference if reference > 0 else 0.0


def parse_bounds(texts: Sequence[str], because: str | None, known: Sequence[str]) -> dict[str, float]:
    """--bound MEASURE=VALUE, repeated, with --because. Raises UsageError."""
    bounds: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in known or name in bounds:
            raise UsageError(f"--bound {text!r}: wanted MEASURE=VALUE, each measure once; known are {', '.join(known)}")
        try:
            bounds[name] = float(value)
        except ValueError:
            bounds[name] = math.nan
        if not math.isfinite(bounds[name]):
            raise UsageError(f"--bound {text!r}: {value!r} is not a finite number")
    if bounds and not (because or "").strip():
        raise UsageError("--bound needs --because TEXT: the report records why a bound was set by hand")
    if because and not bounds:
        raise UsageError("--because explains a --bound; give one, or leave it out")
    return bounds
