"""Runs both sides over a set of utterances, scores them, and judges the candidate.

Memory is bounded by one utterance: what stays of it are its scores, and of the few that differ most their sound.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from voicehub_aot.artifacts.quality import Comparison, Judged, QualityReport, SideFacts, Sound
from voicehub_aot.artifacts.report import number
from voicehub_aot.errors import UsageError
from voicehub_aot.proof.quality import measures, verdict
from voicehub_aot.proof.quality.clip import wav
from voicehub_aot.proof.quality.measures import Measure, Score
from voicehub_aot.proof.quality.scorers import OpenScorer
from voicehub_aot.proof.quality.side import Side, Spoken
from voicehub_aot.proof.quality.utterances import Utterance, words

MOST_SOUNDS = 6  # utterances to listen to
SYNTHETIC = "synthetic"  # the source of weights that nobody trained


@dataclass(frozen=True)
class Evaluation:
    """report: the data. sounds: the utterances that differ most, most first."""

    report: QualityReport
    sounds: tuple[Sound, ...]


@dataclass
class _Record:
    """What is kept of the utterances so far."""

    tallies: dict[str, verdict.Tally] = field(default_factory=lambda: defaultdict(verdict.Tally))
    comparisons: list[Comparison] = field(default_factory=list)
    sounds: list[Sound] = field(default_factory=list)


def evaluate(
    candidate: Side,
    reference: Side,
    utterances: Sequence[Utterance],
    scorers: Sequence[OpenScorer] = (),
    *,
    bounds: Mapping[str, float] | None = None,
    because: str = "",
    not_scored: Mapping[str, str] | None = None,
    name: str = "utterances",
    tell: Callable[[str], None] = lambda _: None,
) -> Evaluation:
    """utterances: spoken by both sides from each of their seeds. bounds: set by hand, by measure; because: why.

    not_scored: why further scorers are missing. name: of the set. tell: is given a line for each utterance.
    Raises UsageError for sides that cannot be compared, and what an entry or a runtime raises.
    """
    _check(candidate, reference)
    _warm_up(candidate, reference, utterances[0])
    record = _Record()
    for position, utterance in enumerate(utterances, 1):
        _one(candidate, reference, utterance, scorers, record)
        latest = [c for c in record.comparisons if c.utterance == utterance.name]
        tell(f"{position} of {len(utterances)}  {utterance.name}: {_line(latest)}")
    count = sum(len(words(utterance.text)) for utterance in utterances)
    judged = tuple(
        verdict.judge(measure, record.tallies[measure.name], _matched(candidate, reference), count, bounds or {})
        for measure in known_measures(scorers)
    )
    validates = any(measure.validates for measure in known_measures(scorers))
    report = _report(candidate, reference, record, judged, validates)
    about = {"utterances": name, "not_scored": dict(not_scored or {}), "because": because}
    return Evaluation(report.model_copy(update=about), tuple(record.sounds))


def _matched(candidate: Side, reference: Side) -> bool:
    """Both sides start from the same noise."""
    return candidate.seeds == reference.seeds


def _report(
    candidate: Side, reference: Side, record: _Record, judged: tuple[Judged, ...], validates: bool
) -> QualityReport:
    """validates: words or naturalness were scored."""
    facts, own = _facts(candidate, record, "rtf"), _facts(reference, record, "reference_rtf")
    decided, reasons = verdict.decide(judged, facts, own)
    manifest = candidate.runtime.manifest
    return QualityReport(
        matched=_matched(candidate, reference),
        candidate=facts,
        reference=own,
        measures=judged,
        comparisons=tuple(record.comparisons),
        times=candidate.program.schedule[1:],
        quality_validated=validates and not (facts.synthetic or own.synthetic),
        verdict=decided,
        reasons=reasons,
        versions=dict(manifest.versions) if manifest else {},
    )


def known_measures(scorers: Sequence[OpenScorer]) -> tuple[Measure, ...]:
    """Those that need no package, then the scorers'."""
    return (*measures.OWN, *(measure for scorer in scorers for measure in scorer.measures))


def _check(candidate: Side, reference: Side) -> None:
    if len(candidate.seeds) != len(reference.seeds):
        raise UsageError(
            f"the candidate has the seeds {list(candidate.seeds)}, the reference {list(reference.seeds)}; "
            "wanted as many on both sides, for they are compared one by one"
        )
    if candidate.runtime.spec.state.shape != reference.runtime.spec.state.shape:
        raise UsageError(
            f"{candidate.runtime.name} has the state {candidate.runtime.spec.state.shape!r}, {reference.runtime.name} "
            f"{reference.runtime.spec.state.shape!r}; wanted two artifacts of one model"
        )


def _warm_up(candidate: Side, reference: Side, utterance: Utterance) -> None:
    """The first request of an engine reads its weights from the disk, which is not what the real-time factor tells."""
    for side in (reference, candidate):
        side.speak(utterance.text, side.seeds[0])


def _one(
    candidate: Side, reference: Side, utterance: Utterance, scorers: Sequence[OpenScorer], record: _Record
) -> None:
    """Speaks one utterance on both sides, in turns, and keeps its scores."""
    own: list[Spoken] = []
    for position, seed in enumerate(reference.seeds):
        own.append(reference.speak(utterance.text, seed))
        spoken = candidate.speak(utterance.text, candidate.seeds[position])
        scores = _compare(spoken, own[-1], utterance, scorers, record)
        if position == 0:
            _keep_sound(spoken, own[0], utterance, scores["log_mel"].value, record)
        _hear(scorers, "clip", own[-1], own[-1], record, (seed,))
    for first, second in verdict.pairs(range(len(own))):
        _hear(scorers, "pair", own[second], own[first], record, (own[first].seed, own[second].seed))


def _hear(
    scorers: Sequence[OpenScorer], kind: str, clip: Spoken, other: Spoken, record: _Record, seeds: Sequence[int]
) -> None:
    """Scores the reference against itself: each clip alone, or two of other seeds."""
    scores = measures.of_one(clip) if kind == "clip" else measures.of_two(clip, other)
    for scorer in scorers:
        if scorer.measures[0].kind == kind:
            scores |= scorer.hear(clip.clip, other.clip).values
    for name, score in scores.items():
        record.tallies[name].add_band(seeds, score)


def _compare(
    spoken: Spoken, own: Spoken, utterance: Utterance, scorers: Sequence[OpenScorer], record: _Record
) -> dict[str, Score]:
    """Scores the candidate, alone and against the reference."""
    scores: dict[str, Score] = measures.of_one(spoken) | measures.of_two(spoken, own)
    heard: dict[str, str] = {}
    for scorer in scorers:
        scored = scorer.hear(spoken.clip, own.clip)
        scores |= scored.values
        heard |= {scorer.name: scored.heard} if scored.heard else {}
    for name, score in scores.items():
        record.tallies[name].add_candidate(score)
    record.comparisons.append(
        Comparison(
            utterance=utterance.name,
            text=utterance.text,
            seed=own.seed,
            candidate_seed=spoken.seed,
            seconds=spoken.clip.seconds,
            rtf=spoken.rtf,
            reference_rtf=own.rtf,
            values={name: score.value for name, score in scores.items()},
            heard=heard,
            latent_by_step=tuple(measures.errors_by_step(spoken, own)),
        )
    )
    return scores


def _keep_sound(spoken: Spoken, own: Spoken, utterance: Utterance, distance: float, record: _Record) -> None:
    """Keeps the sound of the utterances that differ most."""
    sound = Sound(utterance.name, utterance.text, distance, wav(own.clip), wav(spoken.clip))
    record.sounds = sorted([*record.sounds, sound], key=lambda kept: -kept.distance)[:MOST_SOUNDS]


def _line(comparisons: Sequence[Comparison]) -> str:
    """How far an utterance is from the reference, for the one who waits."""
    distance = statistics.fmean(c.values["log_mel"] for c in comparisons)
    texts = list(dict.fromkeys(text for c in comparisons for text in c.heard.values()))
    return f"log-mel distance {number(distance)}" + (f", heard {' | '.join(texts)}" if texts else "")


def _facts(side: Side, record: _Record, clock: str) -> SideFacts:
    manifest, runtime = side.runtime.manifest, side.runtime
    times = sorted(getattr(comparison, clock) for comparison in record.comparisons)
    return SideFacts(
        artifact=side.name or runtime.name,
        model=manifest.model if manifest else runtime.name,
        config=manifest.config_name if manifest else "",
        checkpoint=manifest.checkpoint.source if manifest else "",
        checkpoint_digest=manifest.checkpoint.digest if manifest else "",
        engine=side.engine or (", ".join(manifest.engine_names) if manifest else "eager"),
        program=side.program.name,
        steps=side.program.steps,
        evaluations=side.evaluations,
        guidance=side.scales,
        seeds=side.seeds,
        rtf_p50=statistics.median(times),
        rtf_p95=times[min(len(times) - 1, int(0.95 * len(times)))],
        synthetic=manifest is None or manifest.checkpoint.source == SYNTHETIC,
    )
