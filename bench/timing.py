"""The timer every benchmark shares: candidates take turns, so that a slow moment of the machine hits all of them."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

WARM_UP = 5  # calls of each candidate before the first round


def environment() -> str:
    """What a time depends on: torch, threads, processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = f"{names[0]} x{len(names)}" if names else platform.processor() or platform.machine()
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, {cpu}, {platform.system()}"


def interleaved(candidates: Mapping[str, Callable[[], object]], rounds: int, calls: int) -> dict[str, float]:
    """Median seconds of one call per candidate, each round timing `calls` calls of every candidate in turn."""
    for run in candidates.values():
        for _ in range(WARM_UP):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            for _ in range(calls):
                run()
            seconds[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(times) for name, times in seconds.items()}


def report(title: str, medians: Mapping[str, float]) -> None:
    """One line: each median, and its ratio to the first candidate's."""
    first = next(iter(medians.values()))
    columns = [f"{name} {median * 1e6:9.1f} us ({median / first:.2f}x)" for name, median in medians.items()]
    print(f"{title:<32} {'   '.join(columns)}")
