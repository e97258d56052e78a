"""What to compile: a job for each stage, engine and fixed size, with the examples that steer its code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import sympy
import torch

from voicehub_aot import engines
from voicehub_aot.compiler.export import example_inputs
from voicehub_aot.compiler.options import Options, RequestedOptions
from voicehub_aot.compiler.passes import rewritten
from voicehub_aot.compiler.stages import Deviation, Stages
from voicehub_aot.engines import Span
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.region import BATCH, EVALUATIONS, RegionSpec, TensorSpec

EXAMPLE_EVALUATIONS = 5
MAX_EVALUATIONS = 4096
UNPROMISED_REQUESTS = (1, 4)  # what an engine that needs a range serves at once, if no batch was promised


@dataclass(frozen=True)
class Job:
    """One stage for one engine.

    bucket: sizes fixed at compile time. examples: their sizes steer loop choices. most_requests: the code is made for
    so many and no more. deviations: what the split and each pass measured of themselves.
    """

    engine: str
    stage: Literal["prepare", "step"]
    bucket: Mapping[str, int]
    module: torch.nn.Module
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    examples: tuple[torch.Tensor, ...]
    most_requests: int | None = None
    deviations: Mapping[str, Deviation] = field(default_factory=dict)

    @property
    def stage_name(self) -> str:
        """The same for every engine, e.g. "step-frames128"."""
        return "-".join([self.stage, *(f"{k}{v}" for k, v in self.bucket.items())])

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    @property
    def name(self) -> str:
        return f"{self.engine} {self.stage_name}"


def plan_jobs(stages: Stages, options: Options, engine: str) -> list[Job]:
    """One `prepare` for every size, and a step for each combination of the sizes that are to be fixed."""
    used = {str(s) for v in stages.step.inputs for s in v.shape}
    values = _example_values(stages, compile_sizes(stages, options.buckets, {}))
    spans = size_spans(stages.spec, options)
    ready = rewritten(stages, engine, options.weights_mode, spans)
    prepare, step = ready.prepare, ready.step
    examples = tuple(
        torch.stack([values[v.name]] * EXAMPLE_EVALUATIONS) if v.stacked else values[v.name] for v in prepare.inputs
    )
    static = options.shapes == "static" and engines.get(engine).STATIC
    axes = [a for a in options.buckets.axes if a != "batch" and a in used] if static else []
    done = ready.deviations
    jobs = [Job(engine, "prepare", {}, prepare.module, prepare.inputs, prepare.outputs, examples, deviations=done)]
    most = max(options.buckets.axes.get("batch", UNPROMISED_REQUESTS)) if step.row_bound else None
    for bucket in options.buckets.combinations(axes) if axes else [{}]:
        values = _example_values(stages, compile_sizes(stages, options.buckets, bucket))
        examples = tuple(values[v.name] for v in step.inputs)
        jobs.append(Job(engine, "step", bucket, step.module, step.inputs, step.outputs, examples, most, done))
    if options.choice is None:
        return jobs
    chosen = options.choice
    return [
        j for j in jobs if (j.engine == chosen.prepare if j.stage == "prepare" else chosen.served(engine, j.bucket))
    ]


def compile_sizes(stages: Stages, buckets: Buckets, fixed: Mapping[str, int]) -> dict[str, int]:
    """Sizes to compile with: what is fixed, else odd numbers near the middle bucket (odd: no model size is equal)."""
    sizes = {BATCH: 2}
    for dim in stages.spec.dims:
        promised = buckets.axes.get(dim.name, (min(dim.max, 64),))
        sizes[dim.name] = fixed.get(dim.name, min(promised[len(promised) // 2] | 1, dim.max))
    return sizes


def size_spans(spec: RegionSpec, options: RequestedOptions) -> dict[str, tuple[Span, ...]]:
    """What each size that varies must serve, by name: one span for each of its buckets, else the region's own limits.

    Rows are requests x guidance branches. "N": evaluations of the programs.
    """
    axes = options.buckets.axes
    branches = len(spec.guidance.branches) if spec.guidance else 1
    rows = [branches * n for n in axes.get("batch", UNPROMISED_REQUESTS)]
    spans = {dim.name: _between(dim.min, axes.get(dim.name, (dim.max,))) for dim in spec.dims}
    return {**spans, BATCH: _between(1, rows), EVALUATIONS: ((1, max(len(p.times) for p in options.programs)),)}


def _between(least: int, sizes: Sequence[int]) -> tuple[Span, ...]:
    """least=1, sizes (64, 128) -> (1, 64), (65, 128)."""
    starts = (least, *(size + 1 for size in sizes))
    return tuple(zip(starts, sizes, strict=False))


def _example_values(stages: Stages, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    values = example_inputs(stages.spec, sizes)
    with torch.no_grad():
        for stage in (stages.table, stages.prepare, stages.mixed):
            if stage is not None:
                values.update(stage(values))
    return values


def dynamic_axes(job: Job, dims: Mapping[str, Any]) -> list[dict[int, Any]]:
    """torch.export dimensions of each input; sizes that the bucket fixes are left out."""
    return [
        {
            axis: dynamic
            for axis, size in enumerate(value.shape)
            if isinstance(size, str) and (dynamic := _dimension(size, job.bucket, dims)) is not None
        }
        for value in job.inputs
    ]


def _dimension(size: str, fixed: Mapping[str, int], dims: Mapping[str, Any]) -> Any:
    """The torch.export dimension of "frames", "2*frames + 1" or an expression that only torch can infer.

    None if every name in it is fixed. torch.export wants a derived size spelled out beside the named one.
    """
    expression = sympy.sympify(size, locals={name: sympy.Symbol(name) for name in dims})
    free = [s for s in expression.free_symbols if s.name not in fixed]
    if not free:
        return None
    expression = expression.subs({name: value for name, value in fixed.items()})
    if len(free) == 1:
        line = sympy.Poly(expression, free[0]) if expression.is_polynomial(free[0]) else None
        if line is not None and line.degree() == 1 and all(c.is_integer for c in line.all_coeffs()):
            slope, offset = (int(c) for c in line.all_coeffs())
            dim = dims[free[0].name]
            dim = dim if slope == 1 else slope * dim
            return dim if offset == 0 else dim + offset
    return torch.export.Dim.AUTO
