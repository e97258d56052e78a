"""Stages -> compiled engines: what to compile, the cache of finished engines, and parallel compilation.

Finished engines live in <cache>/engines/<key>, where the key is a digest of everything that shapes the code.
Inductor's own cache lies beside them, so that its headers are compiled once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import sympy
import torch

from voicehub_aot import engines, few_rows
from voicehub_aot.artifacts import store
from voicehub_aot.artifacts.manifest import EngineEntry
from voicehub_aot.bucket import Buckets
from voicehub_aot.choice import Choice
from voicehub_aot.engines import Span, StageCode, Weights
from voicehub_aot.errors import InternalError, VersionUnsupported
from voicehub_aot.export import example_inputs, export_program, named_dims
from voicehub_aot.program import Program
from voicehub_aot.region import BATCH, RegionSpec, TensorSpec
from voicehub_aot.stage import Staged, stacked_prepare
from voicehub_aot.target import Target, usable_threads

log = logging.getLogger(__name__)

EXAMPLE_EVALUATIONS = 5
MAX_EVALUATIONS = 4096
UNPROMISED_REQUESTS = (1, 4)  # what an engine that needs a range serves at once, if no batch was promised
RECORD = "engine.json"  # of a finished engine in the cache: its payload, and digests of its files


@dataclass(frozen=True)
class Options:
    """How it is to be built.

    weights_mode: auto is shared where every linear of the step has few rows, else packed; `build` decides.
    shapes: static gives one step engine a bucket (of engines that have such), dynamic one for all.
    engines: all are built; a runtime opens the first unless told otherwise. auto: they are candidates, and only the
    fastest in each bucket are kept. engine_budget: seconds after which no further candidate is compiled, and timing is
    cut short. choice: an earlier one, to be repeated.
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
    choice: Choice | None = None
    jobs: int = 1
    parity: bool = True
    cache: Path | None = None
    replace: bool = False
    histogram: Mapping[int, float] | None = None
    engines_from: Mapping[str, Path] | None = None

    @property
    def weights(self) -> Weights:
        """The weights mode that was decided on."""
        if self.weights_mode == "auto":
            raise InternalError("the weights mode was not decided yet")
        return self.weights_mode


class Progress:
    """What a build tells while it runs; the command line overrides it. This one only logs."""

    def stage(self, text: str) -> None:
        log.info("%s", text)

    def engine(self, name: str, state: str, seconds: float = 0.0) -> None:
        log.info("engine %s: %s (%.1f s)", name, state, seconds)

    def case(self, name: str) -> None:
        log.debug("parity case %s", name)


@dataclass(frozen=True)
class Job:
    """One stage for one engine.

    bucket: sizes fixed at compile time. examples: their sizes steer loop choices. most_requests: the code is made for
    so many and no more.
    """

    engine: str
    stage: Literal["prepare", "step"]
    bucket: Mapping[str, int]
    module: torch.nn.Module
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    examples: tuple[torch.Tensor, ...]
    most_requests: int | None = None

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


def cache_dir() -> Path:
    """$VOICEHUB_AOT_CACHE_DIR, else $XDG_CACHE_HOME/voicehub-aot, else ~/.cache/voicehub-aot."""
    own = os.environ.get("VOICEHUB_AOT_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else (Path(base) if base else Path.home() / ".cache") / "voicehub-aot"


def weights_digest(weights: Mapping[str, torch.Tensor]) -> str:
    """sha256 over names, shapes, dtypes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous()
        digest.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def plan_jobs(staged: Staged, options: Options, engine: str) -> list[Job]:
    """One `prepare` for every size, and a step for each combination of the sizes that are to be fixed."""
    used = {str(s) for v in staged.step.inputs for s in v.shape}
    values = _example_values(staged, example_sizes(staged, options.buckets, {}))
    module, inputs, outputs = stacked_prepare(staged)
    stacked = {v.name: torch.stack([values[v.name]] * EXAMPLE_EVALUATIONS) for v in inputs if v.shape[:1] == ("N",)}
    prepare = tuple((values | stacked)[v.name] for v in inputs)
    static = options.shapes == "static" and engines.get(engine).STATIC
    axes = [a for a in options.buckets.axes if a != "batch" and a in used] if static else []
    jobs = [Job(engine, "prepare", {}, module, inputs, outputs, prepare)]
    fuses = engines.get(engine).FUSES and options.weights == "shared"
    spans = size_spans(staged.spec, options)
    for bucket in options.buckets.combinations(axes) if axes else [{}]:
        values = _example_values(staged, example_sizes(staged, options.buckets, bucket))
        examples = tuple(values[v.name] for v in staged.step.inputs)
        step = staged.step
        body = few_rows.fused(step, spans) if fuses else step.module
        most = None if body is step.module else max(options.buckets.axes.get("batch", UNPROMISED_REQUESTS))
        jobs.append(Job(engine, "step", bucket, body, step.inputs, step.outputs, examples, most))
    if options.choice is None:
        return jobs
    chosen = options.choice
    return [
        j for j in jobs if (j.engine == chosen.prepare if j.stage == "prepare" else chosen.served(engine, j.bucket))
    ]


def example_sizes(staged: Staged, buckets: Buckets, fixed: Mapping[str, int]) -> dict[str, int]:
    """Sizes to compile with: what is fixed, else odd numbers near the middle bucket (odd: no model size is equal)."""
    sizes = {BATCH: 2}
    for dim in staged.spec.dims:
        promised = buckets.axes.get(dim.name, (min(dim.max, 64),))
        sizes[dim.name] = fixed.get(dim.name, min(promised[len(promised) // 2] | 1, dim.max))
    return sizes


def size_spans(spec: RegionSpec, options: Options) -> dict[str, tuple[Span, ...]]:
    """What each size that varies must serve, by name: one span for each of its buckets, else the region's own limits.

    Rows are requests x guidance branches. "N": evaluations of the programs.
    """
    axes = options.buckets.axes
    branches = len(spec.guidance.branches) if spec.guidance else 1
    rows = [branches * n for n in axes.get("batch", UNPROMISED_REQUESTS)]
    spans = {dim.name: _between(dim.min, axes.get(dim.name, (dim.max,))) for dim in spec.dims}
    return {**spans, BATCH: _between(1, rows), "N": ((1, max(len(p.times) for p in options.programs)),)}


def _between(least: int, sizes: Sequence[int]) -> tuple[Span, ...]:
    """least=1, sizes (64, 128) -> (1, 64), (65, 128)."""
    starts = (least, *(size + 1 for size in sizes))
    return tuple(zip(starts, sizes, strict=False))


def _example_values(staged: Staged, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    values = example_inputs(staged.spec, sizes)
    with torch.no_grad():
        for stage in (staged.table, staged.prepare, staged.rows):
            if stage is not None:
                values.update(stage(values))
    return values


def _dynamic(job: Job, dims: Mapping[str, Any]) -> list[dict[int, Any]]:
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


@dataclass(frozen=True)
class Compiled:
    """A finished engine in the cache. seconds: what compiling took; 0 where it was found."""

    job: Job
    payload: Mapping[str, Any]
    place: Path
    seconds: float = 0.0

    def reads_weight_file(self, weights: engines.Weights) -> bool:
        return engines.get(self.job.engine).reads_weight_file(weights)


def compile_all(
    jobs: Sequence[Job],
    spec: RegionSpec,
    options: Options,
    cache: Path,
    progress: Progress,
    exported: dict[tuple[str, int], torch.export.ExportedProgram] | None = None,
) -> list[Compiled]:
    """Compile every job, or find it in the cache; in the order of `jobs`.

    exported: programs by stage name, used and added to: engines share the export of a stage they take alike.
    """
    exported = {} if exported is None else exported
    dims = named_dims(spec) | {"N": torch.export.Dim("N", min=1, max=MAX_EVALUATIONS)}
    spans = size_spans(spec, options)
    found: dict[str, Compiled] = {}
    waiting: list[tuple[Compiled, StageCode]] = []
    for job in jobs:
        stage = (job.stage_name, id(job.module))
        if stage not in exported:
            progress.engine(job.name, "export")
            dynamic = {v.name: sizes for v, sizes in zip(job.inputs, _dynamic(job, dims), strict=True)}
            exported[stage] = export_program(job.module, job.examples, dynamic, job.name)
        program = exported[stage]
        code = StageCode(job.stage_name, program, job.inputs, job.outputs, job.examples, spans, cache)
        payload = engine_payload(code, job, options)
        place = cache / "engines" / payload_key(payload)
        compiled = Compiled(job, payload, place)
        if options.engines_from is not None:
            found[job.name] = replace(compiled, place=_given_engine(options.engines_from, place.name, job))
        elif cached_engine(place, payload):
            found[job.name] = compiled
            progress.engine(job.name, "from cache")
        else:
            waiting.append((compiled, code))
    found.update((c.job.name, c) for c in _compile_waiting(waiting, options, progress))
    return [found[job.name] for job in jobs]


def install(item: Compiled, folder: Path, options: Options) -> EngineEntry:
    """Copy a finished engine into an artifact that has its weight file."""
    job, engine = item.job, engines.get(item.job.engine)
    constants = item.payload["constants"] if item.reads_weight_file(options.weights) else {}
    return EngineEntry(
        engine=engine.NAME,
        stage=job.stage,
        bucket=dict(job.bucket),
        most_requests=job.most_requests,
        path=engine.install(item.place, folder, job.stage_name, options.target),
        inputs=job.inputs,
        outputs=job.outputs,
        constants=tuple(TensorSpec(name=n, shape=tuple(s), dtype=d) for n, (s, d) in constants.items()),
        key=payload_key(item.payload),
        seconds=round(item.seconds, 2),
        reason="",
    )


def _given_engine(given: Mapping[str, Path], key: str, job: Job) -> Path:
    if key not in given:
        raise VersionUnsupported(
            f"{job.name}: the artifact's engine was compiled from another graph, torch or option set; build it anew"
        )
    return given[key]


def _compile_waiting(
    waiting: Sequence[tuple[Compiled, StageCode]], options: Options, progress: Progress
) -> Iterable[Compiled]:
    """In this process for one job at a time; else in worker processes, the processors shared out between them."""
    workers = min(options.jobs, len(waiting))
    if workers <= 1:
        for item, code in waiting:
            progress.engine(item.job.name, "compile")
            start = time.perf_counter()
            compile_into_cache(code, item.job.engine, item.payload, item.place, options.weights, options.target)
            seconds = time.perf_counter() - start
            progress.engine(item.job.name, "done", seconds)
            yield replace(item, seconds=seconds)
        return
    threads = max(1, usable_threads() // workers)
    with (
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool,
    ):
        pending = {}
        for number, (item, code) in enumerate(waiting):
            file = Path(scratch) / f"{number}.pt2"
            torch.export.save(code.program, file)  # a program does not pickle
            border = replace(code, program=None)  # type: ignore[arg-type]
            future = pool.submit(
                _compile_in_worker, file, border, item.job.engine, item.payload, item.place, options.weights,
                options.target, threads,
            )  # fmt: skip
            pending[future] = item
            progress.engine(item.job.name, "compile")
        for future in as_completed(pending):
            seconds = future.result()
            progress.engine(pending[future].job.name, "done", seconds)
            yield replace(pending[future], seconds=seconds)


def _compile_in_worker(
    file: Path,
    border: StageCode,
    engine: str,
    payload: Mapping[str, Any],
    place: Path,
    weights_mode: engines.Weights,
    target: Target,
    threads: int,
) -> float:
    """border: the code without its program, which lies in `file`."""
    torch.set_num_threads(threads)
    start = time.perf_counter()
    code = replace(border, program=torch.export.load(file))
    compile_into_cache(code, engine, payload, place, weights_mode, target)
    return time.perf_counter() - start


def engine_payload(code: StageCode, job: Job, options: Options) -> dict[str, Any]:
    """Everything that shapes the compiled code, as JSON: its digest is the engine's key in the cache."""
    engine = engines.get(job.engine)
    shapes = {n: (list(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in code.weights.items()}
    nodes = code.graph.graph.nodes
    graph = "\n".join(f"{n.name} {n.op} {n.target} {n.args} {n.kwargs} {n.meta.get('val')}" for n in nodes)
    return {
        "format": engine.FORMAT,
        "stage": job.stage,
        "bucket": dict(job.bucket),
        "graph": hashlib.sha256(graph.encode()).hexdigest(),
        "border": [v.model_dump(mode="json") for v in (*job.inputs, *job.outputs)],
        "examples": [[list(t.shape), str(t.dtype)] for t in job.examples],
        "constants": shapes,
        "weights": "" if engine.reads_weight_file(options.weights) else weights_digest(code.weights),
        "settings": engine.settings(code, options.weights, options.target),
        "torch": torch.__version__,
    }


def payload_key(payload: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()


def cached_engine(place: Path, payload: Mapping[str, Any]) -> bool:
    """True if a finished engine of exactly this payload lies there, unaltered. A damaged one is removed."""
    record = place / RECORD
    if not record.is_file():
        return False
    try:
        saved = json.loads(record.read_text())
        intact = all(store.sha256(place / name) == digest for name, digest in saved["files"].items())
        if intact and saved["payload"] == json.loads(json.dumps(payload)):
            return True
    except (OSError, ValueError, KeyError):
        pass
    log.warning("cached engine %s is damaged and will be compiled anew", place)
    shutil.rmtree(place, ignore_errors=True)
    return False


def compile_into_cache(
    code: StageCode,
    engine: str,
    payload: Mapping[str, Any],
    place: Path,
    weights_mode: engines.Weights,
    target: Target,
) -> None:
    """Compile beside the cache entry and rename it in: an interrupted build leaves no half engine."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix="tmp-") as scratch:
        folder = Path(scratch) / "engine"
        engines.get(engine).compile_stage(code, weights_mode, target, folder)
        files = {p.relative_to(folder).as_posix(): store.sha256(p) for p in folder.rglob("*") if p.is_file()}
        (folder / RECORD).write_text(json.dumps({"payload": payload, "files": files}, indent=1))
        try:
            folder.rename(place)
        except OSError:  # another build finished the same engine first
            if not cached_engine(place, payload):
                folder.rename(place)
