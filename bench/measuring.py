"""Candidates timed in turn against the roofline: the numbers, their JSON rows and their table.

Roofline: matrix operations of our step over its time, as a share of what the packed matrix product reaches at the
model's largest linear with as many rows, measured in the same rounds. The same count of operations is used for every
candidate, so that eager's repeated work shows as time lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from candidates import EAGER, LineUp, candidates_at
from subject import Subject, characters
from timing import Times, interleaved, note

MATRIX = "packed matrix"
WARM_UP = 2  # a step of F5 takes seconds
LEAST_ROUNDS = 5  # however slow the candidates are
MATRIX_SECONDS = 0.02  # of one timed call of the matrix product, about


# --- the roofline


def matrix_shape(subject: Subject) -> tuple[int, int]:
    """Inputs and outputs of the largest linear that is work of every step."""
    c = subject.model.config
    if subject.model.name == "f5tts":
        return c["dim"], c["dim"] * c["ff_mult"]
    return c["hidden"], c["intermediate_dim"]


def packed_matrix(rows: int, inputs: int, outputs: int) -> tuple[Callable[[], object], int]:
    """A packed matrix product as our engines call it, repeated to be measurable; and its operations in all."""
    weight, bias, x = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(rows, inputs)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    flops = 2 * rows * inputs * outputs
    repeats = max(1, round(MATRIX_SECONDS * 50e9 / flops))

    def run() -> None:
        for _ in range(repeats):
            torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    return run, flops * repeats


def sizes_at(subject: Subject, frames: int) -> dict[str, int]:
    """Of the request at this length, by dimension."""
    text = characters(subject.model.name, frames)
    return {d.name: min(d.max, text) for d in subject.spec.dims} | {subject.spec.main_dim: frames}


def step_flops(subject: Subject, lengths: Sequence[int]) -> dict[int, int]:
    """Matrix operations of our step for one request with all its guidance branches, by frames."""
    from voicehub_aot.compiler.export import export_region
    from voicehub_aot.compiler.flops import matrix_flops
    from voicehub_aot.compiler.split import split
    from voicehub_aot.spec.region import BATCH

    note("counting the step's matrix operations")
    graph, symbols = export_region(subject.model.region)
    step = split(graph, subject.spec, symbols).step
    sizes = {frames: {**sizes_at(subject, frames), BATCH: subject.rows} for frames in lengths}
    return {frames: matrix_flops(step, at, symbols) for frames, at in sizes.items()}


# --- measuring


@dataclass(frozen=True)
class Measured:
    """One length, by candidate.

    errors: relative differences to our module. made_s: what making it took. failed: peers that could not take part,
    and why. engines: which of ours ran. flops: of our step. rate: FLOP/s of the packed matrix product.
    """

    line: LineUp
    frames: int
    pause_s: float
    times: Mapping[str, Times]
    errors: Mapping[str, float]
    made_s: Mapping[str, float | None]
    failed: Mapping[str, str]
    engines: Mapping[str, str]
    flops: int
    rate: float

    def share(self, name: str) -> float:
        """Of the packed matrix roofline."""
        return self.flops / self.times[name].median / self.rate

    def over_eager(self, name: str) -> float | None:
        return self.times[name].speedup_over(self.times[EAGER]) if EAGER in self.times else None


def measure(line: LineUp, frames: int, flops: int, rounds: int, pause_s: float, budget_s: float = math.inf) -> Measured:
    """budget_s: of timed calls; fewer rounds than asked for where they would take longer, and that is said."""
    subject = line.subject
    sizes = sizes_at(subject, frames)
    engines = {name: runtime.engine_at(**sizes) for name, runtime in line.runtimes.items()}
    with torch.no_grad(), TemporaryDirectory() as folder:
        made, failed = candidates_at(line, frames, Path(folder))
        round_s = sum(c.call_s for c in made.values())
        fewer = min(rounds, max(LEAST_ROUNDS, int(min(rounds, budget_s / round_s))))
        if fewer < rounds:
            print(f"{frames} frames: {fewer} rounds instead of {rounds}, one takes {round_s:.1f} s")
        matrix, matrix_flops = packed_matrix(subject.rows * frames, *matrix_shape(subject))
        times = interleaved(
            {**{name: c.step for name, c in made.items()}, MATRIX: matrix},
            fewer,
            pause_s=pause_s,
            warm_up=WARM_UP,
            on_round=lambda number: note(f"{frames} frames, round {number}"),
        )
    rate = matrix_flops / times.pop(MATRIX).median
    errors, made_s = {n: c.error for n, c in made.items()}, {n: c.make_s for n, c in made.items()}
    return Measured(line, frames, pause_s, times, errors, made_s, failed, engines, flops, rate)


# --- for files and people


def record(
    subject: Subject, frames: int, name: str, times: Times, eager: Times | None, kind: str, pause_s: float
) -> dict[str, Any]:
    """What every JSON row about a timed candidate has."""
    return {
        "model": subject.model.name,
        "config": subject.model.config_name,
        "frames": frames,
        "text": characters(subject.model.name, frames),
        "candidate": name,
        "kind": kind if name == EAGER else None,
        "rounds": len(times.seconds),
        "pause_ms": 1e3 * pause_s,
        "median_ms": 1e3 * times.median,
        "p95_ms": 1e3 * times.p95,
        "speedup_over_eager": times.speedup_over(eager) if eager else None,
    }


def records(m: Measured) -> list[dict[str, Any]]:
    return [
        record(m.line.subject, m.frames, name, times, m.times.get(EAGER), m.line.kind, m.pause_s)
        | {
            "rows": m.line.subject.rows,
            "engine": m.engines.get(name),
            "step_flops": m.flops,
            "matrix_gflops": m.rate / 1e9,
            "roofline_share": m.share(name),
            "difference": m.errors[name],
            "make_s": m.made_s[name],
        }
        for name, times in m.times.items()
    ]


COLUMNS = ("frames", "candidate", "ms", "p95 ms", "of eager", "GFLOP/s", "roofline", "made in s", "difference")


def cells(m: Measured) -> list[list[object]]:
    """Table rows under COLUMNS."""
    rows: list[list[object]] = []
    for name, times in m.times.items():
        speedup, made_s = m.over_eager(name), m.made_s[name]
        rows.append(
            [
                m.frames,
                name,
                f"{1e3 * times.median:.2f}",
                f"{1e3 * times.p95:.2f}",
                f"{speedup:.2f}x" if speedup else None,
                f"{m.flops / times.median / 1e9:.1f}",
                f"{100 * m.share(name):.0f} %",
                f"{made_s:.1f}" if made_s is not None else None,
                f"{m.errors[name]:.1e}",
            ]
        )
    return rows
