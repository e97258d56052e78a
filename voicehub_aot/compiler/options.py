"""How a build is asked for, and what it tells while it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from voicehub_aot.compiler.choose import Choice
from voicehub_aot.engines import Weights
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.target import Target


@dataclass(frozen=True)
class RequestedOptions:
    """How it is to be built, as asked for.

    weights_mode: auto leaves it to the build, which has to see the stages first.
    shapes: static gives one step engine a bucket (of engines that have such), dynamic one for all.
    engines: all are built; a runtime opens the first unless told otherwise. auto: they are candidates, and only the
    fastest in each bucket are kept. engine_budget: seconds after which no further candidate is compiled, and timing is
    cut short. min_speedup: the least speed-up over eager that every bucket must have. choice: an earlier one, to be
    repeated.
    engines_from: finished engines by key; with it nothing is compiled, and a key that is missing is an error.
    """

    buckets: Buckets
    programs: tuple[Program, ...]
    target: Target
    weights_mode: Literal["packed", "shared", "auto"] = "packed"
    shapes: Literal["dynamic", "static"] = "dynamic"
    engines: tuple[str, ...] = ("aoti",)
    auto: bool = False
    engine_budget: float = math.inf
    min_speedup: float | None = None
    choice: Choice | None = None
    jobs: int = 1
    parity: bool = True
    cache: Path | None = None
    replace: bool = False
    histogram: Mapping[int, float] | None = None
    engines_from: Mapping[str, Path] | None = None

    def resolved(self, weights_mode: Weights) -> Options:
        """With what was left to the build."""
        return Options(**{**vars(self), "weights_mode": weights_mode})


@dataclass(frozen=True)
class Options(RequestedOptions):
    """How it is built: nothing is left open."""

    weights_mode: Weights = "packed"
