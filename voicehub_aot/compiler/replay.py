"""Recorded reference cases run through an adapter and an engine, each output held to the case's tolerance."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from voicehub_aot import adapters
from voicehub_aot.compiler.build import build
from voicehub_aot.compiler.models import Model, from_case
from voicehub_aot.compiler.options import Options
from voicehub_aot.engines import ENGINES
from voicehub_aot.errors import EngineUnavailable, UsageError
from voicehub_aot.progress import Progress
from voicehub_aot.runtime import eager
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.runtime.load import load
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.golden import Case, find_cases, read_case
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.target import default_target, parse_target


@dataclass(frozen=True)
class Outcome:
    """One output of one case. worst: largest error; used: largest share of its tolerance, 1.0 = all of it."""

    case: str
    engine: str
    output: str
    worst: float
    used: float

    @property
    def passed(self) -> bool:
        return self.used <= 1.0


def case_folders(roots: Sequence[Path]) -> list[Path]:
    """Every case below the given folders. A folder without any is a UsageError: nothing passes by being empty."""
    found = []
    for root in roots:
        below = find_cases(root)
        if not below:
            raise UsageError(f"{root}: holds no recorded case (no case.json below it)")
        found += below
    return found


def replay(
    folder: Path,
    engine: str,
    weights_mode: Literal["packed", "shared"] = "packed",
    cache: Path | None = None,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Run one case. Raises UsageError for a case that is not understood, EngineUnavailable for an unknown engine."""
    if engine not in (eager.NAME, *ENGINES):
        raise EngineUnavailable(f"engine {engine!r} is not known; known are {', '.join((eager.NAME, *ENGINES))}")
    case = read_case(folder)
    cases = adapters.cases(case.model)
    model, program = from_case(case), cases.case_program(case)
    if engine == eager.NAME:
        return compare(case, engine, cases.replay(case, eager_runtime(model.region, [program], case.name)))
    with tempfile.TemporaryDirectory(prefix="voicehub-aot-") as scratch:
        runtime = _built(model, program, engine, weights_mode, cache, Path(scratch) / "case.aot", progress)
        return compare(case, engine, cases.replay(case, runtime))


def _built(
    model: Model,
    program: Program,
    engine: str,
    weights_mode: Literal["packed", "shared"],
    cache: Path | None,
    path: Path,
    progress: Progress | None,
) -> Runtime:
    options = Options(
        Buckets(axes={}),
        (program,),
        parse_target(default_target()),
        engines=(engine,),
        weights_mode=weights_mode,
        parity=False,
        cache=cache,
    )
    build(model, options, path, progress)
    return load(path)


def compare(case: Case, engine: str, results: dict[str, torch.Tensor]) -> list[Outcome]:
    """Every recorded output against its result; another shape or anything not finite fails."""
    outcomes = []
    for name, got in case.recorded(results).items():
        want = case.outputs[name]
        worst = used = float("inf")
        if got.shape == want.shape and want.numel() and (got.isfinite() & want.isfinite()).all():
            atol, rtol = case.tolerance_of(name)
            error = (got.double() - want.double()).abs()
            worst = error.max().item()
            used = torch.where(error == 0, 0.0, error / (atol + rtol * want.double().abs())).max().item()
        outcomes.append(Outcome(case.name, engine, name, worst, used))
    return outcomes


def replay_all(
    folders: Sequence[Path],
    engine: str,
    weights_mode: Literal["packed", "shared"] = "packed",
    cache: Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
    progress: Progress | None = None,
) -> list[Outcome]:
    outcomes = []
    for folder in folders:
        tell(f"{folder.parent.name}/{folder.name} on {engine}")
        outcomes += replay(folder, engine, weights_mode, cache, progress)
    return outcomes
