"""Graph passes: rewrites of a region's stages that leave what they compute as it is.

A new pass is one module here with the names of `Pass`, one test, and its line in PASSES.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Protocol, cast

from voicehub_aot import engines
from voicehub_aot.compiler.export import example_sizes
from voicehub_aot.compiler.stages import Stages, deviation, run_stages
from voicehub_aot.engines import Span, Weights

PASSES = ("all_evaluations", "few_rows")  # in the order they run

Spans = Mapping[str, tuple[Span, ...]]  # what each varying size serves, by name


class Pass(Protocol):
    """What every module here offers."""

    def wanted(self, engine: engines.Engine, weights: Weights) -> bool:
        """Whether this engine, with its weights held so, gets the rewritten stages."""

    def rewrite(self, stages: Stages, spans: Spans) -> Stages:
        """Stages that compute the same, the given ones untouched; the given ones where there is nothing to do."""


def rewritten(stages: Stages, engine: str, weights: Weights, spans: Spans) -> Stages:
    """The stages as `engine` takes them: after every pass that it wants, each held to the stages before it.

    Raises StageFailed, naming the pass, if one changes what they compute by more than float32 rounding. What each pass
    deviates by is in `Stages.deviations`.
    """
    for name in PASSES:
        one = cast(Pass, import_module(f"{__name__}.{name}"))
        if one.wanted(engines.get(engine), weights):
            stages = proven(name, stages, one.rewrite(stages, spans), spans)
    return stages


def proven(name: str, before: Stages, after: Stages, spans: Spans) -> Stages:
    """`after` with its deviation from `before`, at sizes within `spans`. StageFailed if the two differ."""
    if after is before:
        return before
    sizes = {n: min(size, spans[n][-1][1]) if n in spans else size for n, size in example_sizes(before.spec).items()}
    runs = [lambda inputs, stages=stages: run_stages(stages, inputs) for stages in (before, after)]
    found = deviation(f"pass {name}:", before.spec, sizes, *runs)
    return replace(after, deviations={**before.deviations, name: found})
