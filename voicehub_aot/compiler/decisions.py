"""The decisions of a build that can move a number: each with its class, and measured where it is not exact."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from voicehub_aot.artifacts.report import measure
from voicehub_aot.compiler.models import Model, program as make_program
from voicehub_aot.proof.cases import ParityCase, draw, plan, run
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.bucket import label
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.safety import Decision, SafetyClass

PARITY = "float64, by parity"
NOT_MEASURED = "nothing"
DRAWS_NOISE = "nothing: it draws fresh noise on its way"
SEEDS = 3  # of a program's distance
MOST_SECONDS = 20.0  # for the seeds beyond the first


def decisions(
    model: Model,
    programs: Sequence[Program],
    bucket: Mapping[str, int] | None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Decision, ...]:
    """bucket: where programs are measured; None = they are only classed."""
    own = [Decision(kind="precision", name="float32", safety="exact", reason="the model's own", against=PARITY)]
    if model.region.spec.guidance is not None:
        scales = Decision(kind="guidance", name="default", safety="exact", reason="the released scales", against=PARITY)
        own.append(scales)
    found = [classed(model, program) for program in programs]
    if bucket is not None:
        found = _measured(model, programs, found, bucket, progress)
    return (*own, *found)


def classed(model: Model, program: Program) -> Decision:
    """A program's class, by what sets it apart from the released loop. Nothing is measured yet."""
    released = program.steps if model.released_steps is None else model.released_steps
    changed = ", ".join(f"{name}={value!r}" for name, value in program.options.items())
    safety: SafetyClass = "exact"
    reason = "the released loop" if program.steps == released else f"more steps than the released {released}"
    if set(program.options) & set(model.behaviour_options):
        safety, reason = "behaviour change", f"{changed} is not the released loop's"
    elif program.options:
        safety, reason = "approximate", f"{changed} is not the released loop's; {program.steps} steps"
    elif program.steps < released:
        safety, reason = "approximate", f"{program.steps} of the released {released} steps"
    against = PARITY if safety == "exact" else NOT_MEASURED
    return Decision(kind="program", name=program.name, safety=safety, reason=reason, against=against)


def _measured(
    model: Model,
    programs: Sequence[Program],
    found: Sequence[Decision],
    bucket: Mapping[str, int],
    progress: Callable[[str], None],
) -> list[Decision]:
    """The decisions with the distance of every program that is not exact from the released loop."""
    inexact = [p for p, d in zip(programs, found, strict=True) if d.safety != "exact"]
    if not inexact:
        return list(found)
    assert model.released_steps is not None  # else all are exact
    full = make_program(model, model.released_steps, name="the released loop")  # a name that no program can have
    eager = eager_runtime(model.region, [full, *programs], model.name)
    cases = plan(model.region.spec, eager.programs, [dict(bucket)], max_batch=1)
    case = next(c for c in cases if c.check == "trajectory" and c.program == full.name)
    comparable = [p for p in inexact if not (p.noises or full.noises)]
    distances, seeds = _distances(eager, case, comparable, progress) if comparable else ({}, 0)
    against = f"{full.solver}-{full.steps} in float32, {label(bucket)}, {seeds} seeds"
    for program in inexact:
        known = program.name in distances
        fresh = {"against": against if known else DRAWS_NOISE, "distance": distances.get(program.name)}
        found = [d.model_copy(update=fresh) if d.name == program.name else d for d in found]
    return list(found)


def _distances(
    eager: Runtime, case: ParityCase, programs: Sequence[Program], progress: Callable[[str], None]
) -> tuple[dict[str, float], int]:
    """By program: the largest relative L2 distance of its result from that of the case; and over how many seeds."""
    start, worst, seeds = time.perf_counter(), dict.fromkeys((p.name for p in programs), 0.0), 0
    while seeds < SEEDS and (seeds == 0 or time.perf_counter() - start < MOST_SECONDS):
        seeded = case.model_copy(update={"seed": case.seed + seeds})
        request = draw(eager.spec, seeded, seeded.seed)
        progress(f"distance from the released loop, seed {seeds + 1} of {SEEDS}")
        want = _last(eager, seeded, request)
        for program in programs:
            got = _last(eager, seeded.model_copy(update={"program": program.name}), request)
            worst[program.name] = max(worst[program.name], measure(got, want)[1])
        seeds += 1
    return worst, seeds


def _last(eager: Runtime, case: ParityCase, request: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return run(eager, case, request)[-1]
