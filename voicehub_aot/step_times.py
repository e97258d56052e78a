"""Times one evaluation of several runtimes at each bucket, interleaved: for choices and reports, not for claims."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from voicehub_aot.recording import Case, Recording, draw
from voicehub_aot.region import BATCH
from voicehub_aot.runtime import Runtime

MIN_ROUNDS, MAX_ROUNDS = 3, 15  # of timing


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of one evaluation of `rows` packed rows, preparation not counted, by candidate.

    The n-th figures of all candidates were taken in the same round.
    """

    bucket: Mapping[str, int]
    rows: int
    samples_ms: Mapping[str, tuple[float, ...]]

    def median_ms(self, candidate: str) -> float:
        return statistics.median(self.samples_ms[candidate])


def time_steps(
    candidates: Mapping[str, Runtime], recording: Recording, seconds: float = 4.0, pause_s: float = 0.0
) -> list[StepTime]:
    """One guided evaluation of every candidate per bucket, interleaved. For choices and reports, not for claims.

    seconds: per bucket, about. pause_s: before each call, so that threads a candidate left spinning do not slow the
    next one.
    """
    times = []
    for case in _one_per_bucket(recording.cases):
        calls = {name: _evaluation(runtime, case) for name, runtime in candidates.items()}
        for call in calls.values():
            call()
        samples: dict[str, list[float]] = {name: [] for name in calls}
        end = time.perf_counter() + seconds
        for round_number in range(MAX_ROUNDS):
            if round_number >= MIN_ROUNDS and time.perf_counter() > end:
                break
            for name, call in calls.items():
                time.sleep(pause_s)
                start = time.perf_counter()
                call()
                samples[name].append(1e3 * (time.perf_counter() - start))
        spec = next(iter(candidates.values())).spec
        rows = case.sizes[BATCH] * (len(spec.guidance.branches) if case.guided and spec.guidance else 1)
        times.append(StepTime(case.bucket, rows, {name: tuple(values) for name, values in samples.items()}))
    return times


def _one_per_bucket(cases: Iterable[Case]) -> list[Case]:
    """The first full-length evaluation of each bucket."""
    found: dict[str, Case] = {}
    for case in cases:
        if case.check == "evaluation":
            found.setdefault(json.dumps(case.bucket), case)
    return list(found.values())


def _evaluation(runtime: Runtime, case: Case) -> Callable[[], object]:
    """A prepared evaluation, ready to be called again and again."""
    request = draw(runtime.spec, case, case.seed)
    return runtime.stepper(request.pop(runtime.spec.state.name), case.program, case.row or 0, **request)
