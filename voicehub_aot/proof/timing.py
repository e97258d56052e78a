"""Times one evaluation of several runtimes at each bucket, interleaved: for choices and reports, not for claims."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from voicehub_aot.proof.cases import ParityCase, Recording, draw
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.region import BATCH

MIN_ROUNDS, MAX_ROUNDS = 3, 15  # of timing
LEAST_SECONDS = 0.5  # the system counts work in ticks of 10 ms: over less it cannot be told


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of one evaluation of `rows` packed rows, preparation not counted, by candidate.

    The n-th figures of all candidates were taken in the same round. elsewhere: processors that others used meanwhile,
    None where the system does not say, or they took too little time to tell.
    """

    bucket: Mapping[str, int]
    rows: int
    samples_ms: Mapping[str, tuple[float, ...]]
    elsewhere: float | None = None

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
        began, others = time.perf_counter(), seconds_of_others()
        end = began + seconds
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
        kept = {name: tuple(values) for name, values in samples.items()}
        times.append(StepTime(case.bucket, rows, kept, _elsewhere(others, time.perf_counter() - began)))
    return times


def _elsewhere(before: float | None, seconds: float) -> float | None:
    """Processors that others used in the `seconds` since `before`; None where it cannot be told."""
    now = seconds_of_others()
    if before is None or now is None or seconds < LEAST_SECONDS:
        return None
    return max(0.0, now - before) / seconds


def seconds_of_others(stat: Path = Path("/proc/stat")) -> float | None:
    """Processor time that other processes, and other guests of the machine, took so far of our processors.

    None where it cannot be told: not on Linux, or hidden by a sandbox. Source: proc_stat(5).
    """
    try:
        lines = [line.split() for line in stat.read_text(encoding="utf-8").splitlines()]
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        ticks = 0
        for name, *counts in lines:
            if name in mine:
                user, nice, system, _idle, _iowait, irq, softirq, steal = (int(count) for count in counts[:8])
                ticks += user + nice + system + irq + softirq + steal
    except (OSError, ValueError, AttributeError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def _one_per_bucket(cases: Iterable[ParityCase]) -> list[ParityCase]:
    """The first full-length evaluation of each bucket."""
    found: dict[str, ParityCase] = {}
    for case in cases:
        if case.check == "evaluation":
            found.setdefault(json.dumps(case.bucket), case)
    return list(found.values())


def _evaluation(runtime: Runtime, case: ParityCase) -> Callable[[], object]:
    """A prepared evaluation, ready to be called again and again."""
    request = draw(runtime.spec, case, case.seed)
    return runtime.stepper(request.pop(runtime.spec.state.name), case.program, case.evaluation or 0, **request)
