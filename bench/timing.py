"""What every benchmark shares: the timer, the stamp that says what a number depends on, the JSON lines and the table.

Candidates take turns, so that a slow moment of the machine hits all of them. Between two calls lies a pause: thread
pools that spin after their work (onnxruntime's, OpenMP's) would otherwise slow down whoever comes next.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

WARM_UP = 5  # calls of each candidate before the first round
PAUSE_S = 0.06  # before each timed call
PACKAGES = ("voicehub-aot", "torch", "onnxruntime", "openvino", "onnx", "onnxscript", "f5-tts", "x-transformers")


@dataclass(frozen=True)
class Times:
    """Seconds of one call, one number a round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p95(self) -> float:
        """The smallest time that at least 95 % of the rounds did not exceed."""
        return sorted(self.seconds)[math.ceil(0.95 * len(self.seconds)) - 1]

    def speedup_over(self, other: Times) -> float:
        """How many times faster than `other`, by the medians."""
        return other.median / self.median


def interleaved(
    candidates: Mapping[str, Callable[[], object]],
    rounds: int,
    calls: int = 1,
    *,
    pause_s: float = PAUSE_S,
    warm_up: int = WARM_UP,
    on_round: Callable[[int], None] = lambda number: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Times]:
    """Each round times `calls` calls of every candidate, in the order given, with a pause before each."""
    for run in candidates.values():
        for _ in range(warm_up):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds):
        for name, run in candidates.items():
            if pause_s:
                sleep(pause_s)
            start = clock()
            for _ in range(calls):
                run()
            seconds[name].append((clock() - start) / calls)
        on_round(number + 1)
    return {name: Times(tuple(values)) for name, values in seconds.items()}


def report(title: str, times: Mapping[str, Times]) -> None:
    """One line: each median, and its ratio to the first candidate's."""
    first = next(iter(times.values()))
    columns = [f"{name} {t.median * 1e6:9.1f} us ({t.median / first.median:.2f}x)" for name, t in times.items()]
    print(f"{title:<32} {'   '.join(columns)}")


# --- what a number depends on


def machine() -> dict[str, Any]:
    """load_1m: what else ran; a time taken at a load above the thread count is not worth much."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "load_1m": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def versions() -> dict[str, str]:
    """Of the packages that take part; absent ones are left out. commit: of the checkout, "+" = with changes."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__  # with its local part, e.g. +cpu
    try:
        git = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--dirty=+")
        found["commit"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    return found


def environment() -> str:
    """One line for people."""
    m = machine()
    return f"torch {torch.__version__}, {m['threads']} threads, {m['cpu']} x{m['cores']}, {m['isa']}, {m['system']}"


def command() -> str:
    """As typed: what reproduces the numbers."""
    return shlex.join([Path(sys.executable).name, *sys.argv])


def append_json(path: Path | None, benchmark: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append one JSON object a row, each with what its numbers depend on. None: nothing to do."""
    if path is None:
        return
    stamp = {
        "benchmark": benchmark,
        "recorded": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command(),
        "environment": machine(),
        "versions": versions(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({**stamp, **row}, allow_nan=False) + "\n" for row in rows)


# --- for people


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Numbers right; "-" for what there is none of."""
    from rich.console import Console
    from rich.table import Table

    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    table = Table(header_style="bold")
    for position, column in enumerate(columns):
        numeric = any(row[position][:1].isdigit() for row in cells)
        table.add_column(column, justify="right" if numeric else "left")
    for row in cells:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    console.print(title, style="bold")
    console.print(table)


def note(text: str) -> None:
    """Progress goes to stderr, results to stdout."""
    print(text, file=sys.stderr, flush=True)
