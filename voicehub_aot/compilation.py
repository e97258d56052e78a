"""Stages -> compiled engines: what to compile, the cache of finished engines, and parallel compilation.

Finished engines live in <cache>/engines/<key>, where the key is a digest of everything that shapes the code.
Inductor's own cache lies beside them, so that its headers are compiled once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import sympy
import torch
from torch import fx

from voicehub_aot.artifacts import store
from voicehub_aot.artifacts.manifest import EngineEntry, TensorSpec
from voicehub_aot.bucket import Buckets
from voicehub_aot.engines import aoti
from voicehub_aot.errors import VersionUnsupported
from voicehub_aot.export import Value, example_inputs, export_program, named_dims
from voicehub_aot.program import Program
from voicehub_aot.region import BATCH, RegionSpec
from voicehub_aot.runtime import usable_threads
from voicehub_aot.stage import Staged, set_attribute, stacked_prepare
from voicehub_aot.target import Target, host_features

log = logging.getLogger(__name__)

EXAMPLE_EVALUATIONS = 5
MAX_EVALUATIONS = 4096


@dataclass(frozen=True)
class Options:
    """How it is to be built. shapes: static gives one step engine a bucket, dynamic one for all.

    engines_from: finished engines by key; with it nothing is compiled, and a key that is missing is an error.
    """

    buckets: Buckets
    programs: tuple[Program, ...]
    target: Target
    weights_mode: Literal["packed", "shared"] = "packed"
    shapes: Literal["dynamic", "static"] = "dynamic"
    jobs: int = 1
    parity: bool = True
    cache: Path | None = None
    replace: bool = False
    histogram: Mapping[int, float] | None = None
    engines_from: Mapping[str, Path] | None = None


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
    """One engine to compile. bucket: sizes fixed at compile time. sizes: of the examples, which steer loop choices."""

    stage: Literal["prepare", "step"]
    bucket: Mapping[str, int]
    module: torch.nn.Module
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    examples: tuple[torch.Tensor, ...]

    @property
    def name(self) -> str:
        return "-".join([self.stage, *(f"{k}{v}" for k, v in self.bucket.items())])


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


def plan_jobs(staged: Staged, options: Options) -> list[Job]:
    """One `prepare` for every size, and one step engine for each combination of the sizes it depends on."""
    used = {str(s) for v in staged.step.inputs for s in v.shape}
    axes = [a for a in options.buckets.axes if a != "batch" and a in used] if options.shapes == "static" else []
    values = _example_values(staged, example_sizes(staged, options.buckets, {}))
    module, inputs, outputs = stacked_prepare(staged)
    stacked = {v.name: torch.stack([values[v.name]] * EXAMPLE_EVALUATIONS) for v in inputs if v.shape[:1] == ("N",)}
    prepare = tuple((values | stacked)[v.name] for v in inputs)
    jobs = [Job("prepare", {}, module, inputs, outputs, prepare)]
    for bucket in options.buckets.combinations(axes) if axes else [{}]:
        values = _example_values(staged, example_sizes(staged, options.buckets, bucket))
        examples = tuple(values[v.name] for v in staged.step.inputs)
        jobs.append(Job("step", bucket, staged.step.module, staged.step.inputs, staged.step.outputs, examples))
    return jobs


def example_sizes(staged: Staged, buckets: Buckets, fixed: Mapping[str, int]) -> dict[str, int]:
    """Sizes to compile with: what is fixed, else odd numbers near the middle bucket (odd: no model size is equal)."""
    sizes = {BATCH: 2}
    for dim in staged.spec.dims:
        promised = buckets.axes.get(dim.name, (min(dim.max, 64),))
        sizes[dim.name] = fixed.get(dim.name, min(promised[len(promised) // 2] | 1, dim.max))
    return sizes


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


def compile_all(
    jobs: Sequence[Job], spec: RegionSpec, options: Options, cache: Path, folder: Path, progress: Progress
) -> list[EngineEntry]:
    """Compile or take from the cache; each engine's folder is copied into the artifact."""
    dims = named_dims(spec) | {"N": torch.export.Dim("N", min=1, max=MAX_EVALUATIONS)}
    found: dict[str, tuple[dict[str, Any], Path, float]] = {}
    waiting: list[tuple[Job, dict[str, Any], Path, torch.export.ExportedProgram]] = []
    for job in jobs:
        progress.engine(job.name, "export")
        dynamic = {v.name: sizes for v, sizes in zip(job.inputs, _dynamic(job, dims), strict=True)}
        program = export_program(job.module, job.examples, dynamic, job.name)
        payload = engine_payload(program, job, options)
        place = cache / "engines" / payload_key(payload)
        if options.engines_from is not None:
            found[job.name] = (payload, _given_engine(options.engines_from, place.name, job), 0.0)
        elif cached_engine(place, payload):
            found[job.name] = (payload, place, 0.0)
            progress.engine(job.name, "from cache")
        else:
            waiting.append((job, payload, place, program))
    for name, payload, place, seconds in _compile_waiting(waiting, options, progress):
        found[name] = (payload, place, seconds)
    entries = []
    for job in jobs:
        payload, place, seconds = found[job.name]
        path = Path(store.ENGINES) / aoti.NAME / options.target.folder / job.name
        shutil.copytree(place / "data", folder / path / "data")
        constants = payload["constants"] if options.weights_mode == "shared" else {}
        entries.append(
            EngineEntry(
                engine=aoti.NAME,
                stage=job.stage,
                bucket=dict(job.bucket),
                path=path.as_posix(),
                inputs=tensor_specs(job.inputs),
                outputs=tensor_specs(job.outputs),
                constants=tuple(TensorSpec(name=n, shape=tuple(s), dtype=d) for n, (s, d) in constants.items()),
                key=payload_key(payload),
                seconds=round(seconds, 2),
                reason="the only engine built for CPU",
            )
        )
    return entries


def _given_engine(engines: Mapping[str, Path], key: str, job: Job) -> Path:
    if key not in engines:
        raise VersionUnsupported(
            f"{job.name}: the artifact's engine was compiled from another graph, torch or option set; build it anew"
        )
    return engines[key]


def _compile_waiting(
    waiting: Sequence[tuple[Job, dict[str, Any], Path, torch.export.ExportedProgram]],
    options: Options,
    progress: Progress,
) -> Iterable[tuple[str, dict[str, Any], Path, float]]:
    """In this process for one job at a time; else in worker processes, the processors shared out between them."""
    workers = min(options.jobs, len(waiting))
    if workers <= 1:
        for job, payload, place, program in waiting:
            progress.engine(job.name, "compile")
            start = time.perf_counter()
            compile_into_cache(program, job.examples, payload, place, options.weights_mode, options.target, job.name)
            seconds = time.perf_counter() - start
            progress.engine(job.name, "done", seconds)
            yield job.name, payload, place, seconds
        return
    threads = max(1, usable_threads() // workers)
    with (
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool,
    ):
        pending = {}
        for number, (job, payload, place, program) in enumerate(waiting):
            file = Path(scratch) / f"{number}.pt2"
            torch.export.save(program, file)
            future = pool.submit(
                _compile_in_worker, file, job.examples, payload, place, options.weights_mode, options.target,
                job.name, threads,
            )  # fmt: skip
            pending[future] = (job, payload, place)
            progress.engine(job.name, "compile")
        for future in as_completed(pending):
            job, payload, place = pending[future]
            seconds = future.result()
            progress.engine(job.name, "done", seconds)
            yield job.name, payload, place, seconds


def _compile_in_worker(
    file: Path,
    examples: tuple[torch.Tensor, ...],
    payload: dict[str, Any],
    place: Path,
    weights_mode: aoti.Weights,
    target: Target,
    name: str,
    threads: int,
) -> float:
    torch.set_num_threads(threads)
    start = time.perf_counter()
    compile_into_cache(torch.export.load(file), examples, payload, place, weights_mode, target, name)
    return time.perf_counter() - start


def graph_of(program: torch.export.ExportedProgram) -> fx.GraphModule:
    """The flat graph, its weights under the region's names: `stacked_prepare` nests two stages in one module."""
    graph = program.module(check_guards=False)
    for node in graph.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        plain = name.removeprefix("prepare.").removeprefix("rows.")
        if plain != name:
            set_attribute(graph, plain, graph.get_buffer(name))
            node.target = plain
    graph.delete_all_unused_submodules()
    graph.recompile()
    return graph


def engine_payload(program: torch.export.ExportedProgram, job: Job, options: Options) -> dict[str, Any]:
    """Everything that shapes the compiled code, as JSON: its digest is the engine's key in the cache."""
    module = graph_of(program)
    constants = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    shapes = {n: (list(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in constants.items()}
    graph = "\n".join(f"{n.name} {n.op} {n.target} {n.args} {n.kwargs} {n.meta.get('val')}" for n in module.graph.nodes)
    return {
        "engine_code": store.sha256(Path(aoti.__file__)),
        "stage": job.stage,
        "bucket": dict(job.bucket),
        "graph": hashlib.sha256(graph.encode()).hexdigest(),
        "examples": [[list(t.shape), str(t.dtype)] for t in job.examples],
        "constants": shapes,
        "weights": weights_digest(constants) if options.weights_mode == "packed" else "",
        "options": aoti.options(options.weights_mode, options.target),
        "torch": torch.__version__,
        "compiler": compiler_version(),
        "matrix_isa": torch.backends.cpu.get_cpu_capability() if options.weights_mode == "packed" else "",
        "features": sorted(host_features()) if options.target.isa == "native" else [],
    }


def payload_key(payload: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()


@cache
def compiler_version() -> str:
    compiler = os.environ.get("CXX", "g++")
    try:
        text = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return text.splitlines()[0]


def cached_engine(place: Path, payload: Mapping[str, Any]) -> bool:
    """True if a finished engine of exactly this payload lies there, unaltered. A damaged one is removed."""
    record = place / "engine.json"
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
    program: torch.export.ExportedProgram,
    examples: Sequence[torch.Tensor],
    payload: Mapping[str, Any],
    place: Path,
    weights_mode: aoti.Weights,
    target: Target,
    name: str,
) -> None:
    """Compile beside the cache entry and rename it in: an interrupted build leaves no half engine."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix="tmp-") as scratch:
        folder = Path(scratch) / "engine"
        aoti.compile_stage(graph_of(program), list(examples), weights_mode, target, folder, name)
        files = {p.relative_to(folder).as_posix(): store.sha256(p) for p in folder.rglob("*") if p.is_file()}
        (folder / "engine.json").write_text(json.dumps({"payload": payload, "files": files}, indent=1))
        try:
            folder.rename(place)
        except OSError:  # another build finished the same engine first
            if not cached_engine(place, payload):
                folder.rename(place)


def tensor_specs(values: Iterable[Value]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name=v.name, shape=v.shape, dtype=v.dtype) for v in values)
