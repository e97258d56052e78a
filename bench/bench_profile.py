"""Where the time of one evaluation goes, by operator: matrix products, attention, convolutions, and the rest.

    python bench/bench_profile.py --models voxcpm,styletts2 --json profile.jsonl

The step's graph is run once to see the sizes of its matrix operations. Each distinct one is then timed by itself, on
the step's own values, in rounds with the whole step: linears with packed weights as the engine calls them, over as many
copies of the weights as keep them out of the caches, the others as torch has them. What is left of the step is "rest":
generated loops and calls. Packed artifacts with AOTInductor only.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves a script's own folder out

import torch
from bench_models import Job, artifacts_folder, build_artifact, jobs_named, models_parser, rows_run
from subject import draw, open_artifact, use_threads
from timing import Times, append_json, command, environment, interleaved, note, print_table
from torch import Tensor

from voicehub_aot.compiler.flops import MATRIX_OPERATIONS

if TYPE_CHECKING:
    from voicehub_aot.compiler.models import Model
    from voicehub_aot.runtime.runtime import Runtime

aten = torch.ops.aten
KINDS = {  # of MATRIX_OPERATIONS; every other one is a "product"
    aten.linear.default: "linear",
    aten.scaled_dot_product_attention.default: "attention",
    aten.conv1d.default: "convolution",
    aten.convolution.default: "convolution",
}
OUT_OF_CACHE = 128 * 2**20  # bytes of weights that no cache holds
CALL_SECONDS = 50e-3  # of one timed run of an operator, about: after a pause the first calls are slow
STEP, REST = "step", "rest"


@dataclass
class Operator:
    """One matrix operation of the step. shapes: of its tensors. calls: how often a step has it."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    run: Callable[[], object]
    flops: int
    weight_bytes: int
    calls: int = 1

    @property
    def title(self) -> str:
        return f"{self.kind} " + ", ".join("x".join(map(str, shape)) for shape in self.shapes)


@dataclass
class Recorder(torch.fx.Interpreter):
    """Runs a step's graph and keeps its matrix operations, equal ones once."""

    module: torch.fx.GraphModule
    found: dict[Any, Operator] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.module)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().call_function(target, args, kwargs)
        if target in MATRIX_OPERATIONS:
            shapes = tuple(tuple(a.shape) for a in args if isinstance(a, Tensor))
            if (target, shapes) in self.found:
                self.found[target, shapes].calls += 1
            else:
                self.found[target, shapes] = operator(target, shapes, args, kwargs, result)
        return result


def operator(target: Any, shapes: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Operator:
    kind, flops = KINDS.get(target, "product"), MATRIX_OPERATIONS[target](result.shape, *shapes)
    size = args[1].numel() * args[1].element_size()
    if kind == "linear":
        x, weight, bias = (*args, None)[:3]
        return Operator(kind, shapes[:2], packed_linear(x, weight, bias, max(1, OUT_OF_CACHE // size)), flops, size)
    return Operator(kind, shapes, lambda: target(*args, **kwargs), flops, size if kind == "convolution" else 0)


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, copies: int) -> Callable[[], object]:
    """The product as the engine calls it, each time with another copy of the weights."""
    rows = x.numel() // x.shape[-1]
    packed = itertools.cycle([torch.ops.mkldnn._reorder_linear_weight(weight, rows) for _ in range(copies)])
    return lambda: torch.ops.mkldnn._linear_pointwise(x, next(packed), bias, "none", [], "")


def operators(model: Model, sizes: Mapping[str, int]) -> list[Operator]:
    """The step's matrix operations on random inputs of these sizes."""
    from voicehub_aot.compiler.export import example_inputs, export_region
    from voicehub_aot.compiler.split import split

    graph, symbols = export_region(model.region)
    stages = split(graph, model.region.spec, symbols)
    values = example_inputs(model.region.spec, sizes)
    with torch.no_grad():
        for stage in (stages.table, stages.prepare, stages.mixed):
            if stage is not None:
                values.update(stage(values))
        recorder = Recorder(stages.step.module)
        recorder.run(*(values[i.name] for i in stages.step.inputs))
    return list(recorder.found.values())


def repeated(run: Callable[[], object], times: int) -> Callable[[], object]:
    def several() -> None:
        for _ in range(times):
            run()

    return several


@dataclass(frozen=True)
class Share:
    """An operator's part of a step. flops, weight_bytes: of all its calls."""

    name: str
    calls: int
    seconds: float
    of_step: float
    flops: int = 0
    weight_bytes: int = 0

    @property
    def gflops(self) -> float | None:
        return self.flops / self.seconds / 1e9 if self.flops else None

    @property
    def gigabytes(self) -> float | None:
        return self.weight_bytes / self.seconds / 1e9 if self.weight_bytes else None


def profile(model: Model, runtime: Runtime, job: Job, length: int, rounds: int, pause_s: float) -> list[Share]:
    """Of one evaluation, guided as released; the step itself comes first, the rest last."""
    spec = model.region.spec
    program = next(iter(runtime.programs.values()))
    state, request = draw(spec, length, job.texts)
    sizes = {d.name: min(d.max, job.texts) for d in spec.dims} | {"B": rows_run(program, spec.guidance)}
    if spec.main_dim:
        sizes[spec.main_dim] = length
    found = operators(model, sizes)
    repeats = [max(1, round(CALL_SECONDS * 100e9 / op.flops)) for op in found]
    runs = {str(n): repeated(op.run, times) for n, (op, times) in enumerate(zip(found, repeats, strict=True))}
    step = runtime.stepper(state, program.name, 0, **request)
    with torch.no_grad():
        times: dict[str, Times] = interleaved({STEP: step, **runs}, rounds, pause_s=pause_s, warm_up=1)
    whole = times[STEP].median
    shares = [Share(STEP, 1, whole, 1.0, sum(op.flops * op.calls for op in found))]
    for number, (op, often) in enumerate(zip(found, repeats, strict=True)):
        seconds = times[str(number)].median / often * op.calls
        shares.append(
            Share(op.title, op.calls, seconds, seconds / whole, op.flops * op.calls, op.weight_bytes * op.calls)
        )
    shares[1:] = sorted(shares[1:], key=lambda share: -share.seconds)
    rest = whole - sum(share.seconds for share in shares[1:])
    return [*shares, Share(REST, 1, rest, rest / whole)]


def main() -> int:
    options = models_parser(__doc__, rounds="of the step and of every operator", everything=False).parse_args()
    jobs = jobs_named(options)
    from voicehub_aot.compiler import models

    threads, folder = use_threads(options.threads), artifacts_folder(options)
    print(environment())
    print(command())
    for name, job in jobs.items():
        model = models.resolve(name, options.config, models.SYNTHETIC)
        output, manifest = build_artifact(model, job, folder, {})
        if manifest.weights_mode != "packed":
            raise SystemExit(f"{name}: its linears are generated loops (few rows), there is nothing to take apart")
        runtime = open_artifact(output, threads)
        for length in job.lengths or (0,):
            size = f"{length} {model.region.spec.main_dim}" if length else "1 row"
            note(f"{name}, {size}")
            shares = profile(model, runtime, job, length, options.rounds, options.pause_ms / 1e3)
            rows = [
                [
                    s.name,
                    s.calls,
                    f"{1e3 * s.seconds:.2f}",
                    f"{100 * s.of_step:.1f} %",
                    f"{s.gflops:.0f}" if s.gflops else None,
                    f"{s.gigabytes:.1f}" if s.gigabytes else None,
                ]
                for s in shares
            ]
            columns = ["operator", "calls", "ms", "of the step", "GFLOP/s", "GB/s of weights"]
            print_table(f"{name} {model.config_name}, {size}: one evaluation", columns, rows)
            stamp = {"model": name, "config": model.config_name, "size": size}
            append_json(
                options.json,
                "profile",
                [stamp | vars(s) | {"gflops": s.gflops, "gigabytes": s.gigabytes} for s in shares],
            )
    return 0


if __name__ == "__main__":
    from voicehub_aot.errors import AotError

    try:
        sys.exit(main())
    except AotError as error:
        sys.exit(str(error))
