"""Jobs -> compiled engines: found in the cache, or compiled here or in parallel processes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from voicehub_aot import engines
from voicehub_aot.artifacts.manifest import EngineEntry
from voicehub_aot.compiler.cache import cached_engine, compile_into_cache, engine_payload, payload_key
from voicehub_aot.compiler.export import export_program, named_dims
from voicehub_aot.compiler.jobs import MAX_EVALUATIONS, Job, dynamic_axes, size_spans
from voicehub_aot.compiler.options import Options
from voicehub_aot.engines import StageCode, toolchain
from voicehub_aot.errors import EngineUnavailable, VersionUnsupported
from voicehub_aot.progress import Progress
from voicehub_aot.spec.region import EVALUATIONS, RegionSpec, TensorSpec
from voicehub_aot.spec.target import Target, usable_threads


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
    dims = named_dims(spec) | {EVALUATIONS: torch.export.Dim(EVALUATIONS, min=1, max=MAX_EVALUATIONS)}
    spans = size_spans(spec, options)
    found: dict[str, Compiled] = {}
    waiting: list[tuple[Compiled, StageCode]] = []
    for job in jobs:
        stage = (job.stage_name, id(job.module))
        if stage not in exported:
            progress.engine(job.name, "export")
            dynamic = {v.name: sizes for v, sizes in zip(job.inputs, dynamic_axes(job, dims), strict=True)}
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
    constants = item.payload["constants"] if item.reads_weight_file(options.weights_mode) else {}
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
            compile_into_cache(code, item.job.engine, item.payload, item.place, options.weights_mode, options.target)
            seconds = time.perf_counter() - start
            progress.engine(item.job.name, "done", seconds)
            yield replace(item, seconds=seconds)
        return
    try:
        yield from _compile_in_workers(waiting, workers, options, progress)
    except BrokenProcessPool as error:
        names = ", ".join(item.job.name for item, _ in waiting)
        raise EngineUnavailable(f"{names}: a process that compiles them was killed, {toolchain.MORE_MEMORY}") from error


def _compile_in_workers(
    waiting: Sequence[tuple[Compiled, StageCode]], workers: int, options: Options, progress: Progress
) -> Iterable[Compiled]:
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
                _compile_in_worker, file, border, item.job.engine, item.payload, item.place, options.weights_mode,
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
