"""Which engine serves which bucket, decided by measured times.

The main engine is the fastest over all buckets together. Another one takes a bucket only where it is faster by more
than the noise: in at least three rounds of four. Where nothing is faster than eager the fastest is kept all the same,
and its reason says so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from voicehub_aot.errors import BuildError
from voicehub_aot.proof.timing import StepTime
from voicehub_aot.spec.bucket import label

EAGER = "eager"


@dataclass(frozen=True)
class Choice:
    """prepare: the engine of what runs once per request. steps: the buckets each engine serves. reasons: by engine."""

    prepare: str
    steps: Mapping[str, tuple[Mapping[str, int], ...]]
    reasons: Mapping[str, str]

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.prepare, *self.steps)))

    def served(self, engine: str, bucket: Mapping[str, int]) -> tuple[dict[str, int], ...]:
        """Those buckets of an engine that one compiled for `bucket` (some of their sizes, or none) fits."""
        return tuple(dict(b) for b in self.steps.get(engine, ()) if all(b[axis] == n for axis, n in bucket.items()))


def faster(first: Sequence[float], second: Sequence[float]) -> bool:
    """True if `first` took less time in at least three rounds of four."""
    wins = sum(a < b for a, b in zip(first, second, strict=True))
    return 4 * wins >= 3 * len(first)


def noise(samples: Sequence[float]) -> float:
    """Half the distance between the quartiles, as a share of the median."""
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / 2 / middle


def choose(times: Sequence[StepTime], order: Sequence[str], refused: Collection[tuple[str, str]] = ()) -> Choice:
    """order: the candidates, the simplest first. refused: (engine, bucket label) that did not pass parity.

    Raises BuildError if no engine that passed parity is left for a bucket.
    """
    usable = {label(t.bucket): _usable(t, order, refused) for t in times}

    def total(engine: str) -> tuple[int, float]:
        """Buckets it cannot serve, then the logarithm of its time relative to eager."""
        mine = [t for t in times if engine in usable[label(t.bucket)]]
        logs = [math.log(_median(t, engine) / _median(t, EAGER)) for t in mine]
        return len(times) - len(mine), sum(logs)

    main = min(order, key=total)
    steps: dict[str, list[Mapping[str, int]]] = {}
    reasons: dict[str, list[str]] = {}
    for timed in times:
        able = usable[label(timed.bucket)]
        best = min(able, key=lambda engine: _median(timed, engine))
        if main in able and not faster(timed.samples_ms[best], timed.samples_ms[main]):
            best = main
        steps.setdefault(best, []).append(timed.bucket)
        reasons.setdefault(best, []).append(_reason(timed, best))
    prepare = main if main in steps else next(iter(steps))
    ordered = {engine: tuple(steps[engine]) for engine in order if engine in steps}
    return Choice(prepare, ordered, {engine: "; ".join(texts) for engine, texts in reasons.items()})


def _usable(timed: StepTime, order: Sequence[str], refused: Collection[tuple[str, str]]) -> list[str]:
    where = label(timed.bucket)
    able = [engine for engine in order if engine in timed.samples_ms and (engine, where) not in refused]
    if not able:
        raise BuildError(f"{where}: no engine passed parity; build one by name to see its report")
    return [engine for engine in able if _median(timed, engine) < _median(timed, EAGER)] or able


def _median(timed: StepTime, candidate: str) -> float:
    return timed.median_ms(candidate)


def _reason(timed: StepTime, engine: str) -> str:
    """e.g. "frames=128: 75.2 ms, eager 117 (1.56x), onnxruntime 94.1"."""
    mine, eager = _median(timed, engine), _median(timed, EAGER)
    others = [f"{o} {_median(timed, o):.3g}" for o in timed.samples_ms if o not in (engine, EAGER)]
    verdict = f"{eager / mine:.2f}x" + ("" if mine < eager else ", not faster")
    return ", ".join([f"{label(timed.bucket)}: {mine:.3g} ms, eager {eager:.3g} ({verdict})", *others])
