"""adapter -> Region -> graph -> stages -> engines -> parity -> artifact."""

from __future__ import annotations

import copy
import json
import logging
import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import voicehub_aot
from voicehub_aot import engines, parity
from voicehub_aot.artifacts import report as reports
from voicehub_aot.artifacts import store
from voicehub_aot.artifacts.manifest import Checkpoint, Manifest, StageReport
from voicehub_aot.bucket import Buckets, waste
from voicehub_aot.compilation import Options, Progress, cache_dir, compile_all, example_sizes, install_all, plan_jobs
from voicehub_aot.engines.eager import NAME as EAGER
from voicehub_aot.engines.eager import EagerEvaluator
from voicehub_aot.errors import MissingDependency, ParityFailed
from voicehub_aot.export import MAX_ROWS, export_region
from voicehub_aot.program import Program
from voicehub_aot.region import BATCH, Region
from voicehub_aot.runtime import Runtime, load, table_key
from voicehub_aot.stage import Staged, StagingError, matrix_flops, split
from voicehub_aot.verify import report_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """What is to be built: a region with its weights, and where they came from."""

    name: str
    config_name: str
    config: Mapping[str, Any]
    region: Region
    checkpoint: Checkpoint


def config_values(config: Any) -> dict[str, Any]:
    """An adapter's config dataclass as JSON values."""
    values = asdict(config) if is_dataclass(config) and not isinstance(config, type) else dict(config)
    return json.loads(json.dumps(values))  # type: ignore[no-any-return]


def build(
    model: Model, options: Options, output: Path, progress: Progress | None = None, settings: str | None = None
) -> Manifest:
    """Build `output`, an artifact directory, whole or not at all.

    settings: the resolved options as TOML, kept as config.toml. Raises BuildError (ExportFailed, StageFailed,
    CompileFailed, ParityFailed) or UsageError. When parity fails the report stays beside the output, as
    `<output>.parity`.
    """
    progress = progress or Progress()
    cache = options.cache or cache_dir()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
    with store.writing(output, options.replace) as folder:
        progress.stage(f"export {model.region.spec.name}")
        graph, symbols = export_region(model.region)
        progress.stage("split by binding time")
        staged = split(graph, model.region.spec, symbols)
        tables = {p.name: time_table(staged, p) for p in options.programs}
        jobs = plan_jobs(staged, options)
        progress.stage(f"compile {len(jobs)} stages ({options.weights_mode}, {options.shapes})")
        compiled = compile_all(jobs, model.region.spec, options, cache, progress)
        _write_tensors(folder, staged, tables, options)
        entries = install_all(compiled, folder, options)
        if settings is not None:
            (folder / "config.toml").write_text(settings)
        for program in options.programs:
            path = folder / store.PROGRAMS / f"{program.name}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(program.model_dump_json(indent=2) + "\n")
        manifest = Manifest(
            created_by=f"voicehub-aot {voicehub_aot.__version__}",
            model=model.name,
            config_name=model.config_name,
            config=dict(model.config),
            checkpoint=model.checkpoint,
            target=options.target,
            versions=versions(),
            region=model.region.spec,
            buckets=options.buckets,
            shapes=options.shapes,
            weights_mode=options.weights_mode,
            engines=tuple(entries),
            stages=stage_reports(staged, options.buckets, symbols),
            folded=tuple(sorted(staged.folded)),
            programs=tuple(p.name for p in options.programs),
            files=store.list_files(folder),
        )
        store.write_manifest(folder, manifest)
        if options.parity:
            _prove(model, options, staged, folder, manifest, output, progress)
            manifest = manifest.model_copy(update={"files": store.list_files(folder)})
            store.write_manifest(folder, manifest)
    return manifest.signed()


def versions() -> dict[str, str]:
    return {
        "voicehub_aot": voicehub_aot.__version__,
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
    }


def time_table(staged: Staged, program: Program) -> dict[str, torch.Tensor]:
    """What depends on time alone, one row per evaluation: value name -> [N, ...]."""
    (clock,) = (i for i in staged.spec.inputs if i.binding == "TIME")
    with torch.no_grad():
        rows = [staged.table({clock.name: torch.tensor([t], dtype=torch.float32)}) for t in program.times]
    return {name: torch.stack([row[name] for row in rows]).contiguous() for name in rows[0]}


def bucket_label(bucket: Mapping[str, int]) -> str:
    return ",".join(f"{k}={v}" for k, v in bucket.items()) or "any"


def _write_tensors(
    folder: Path, staged: Staged, tables: Mapping[str, Mapping[str, torch.Tensor]], options: Options
) -> None:
    """weights.safetensors: time tables, and the weights that the stages read, once, if an engine takes them there."""
    tensors = {table_key(program, value): t for program, table in tables.items() for value, t in table.items()}
    if any(engines.get(name).reads_weight_file(options.weights_mode) for name in options.engines):
        for stage in (staged.prepare, staged.rows, staged.step):
            if stage is not None:
                tensors.update({n: t.detach().contiguous() for n, t in stage.constants.items()})
    save_file(tensors, folder / store.WEIGHTS)


def stage_reports(staged: Staged, buckets: Buckets, symbols: Mapping[str, str]) -> dict[str, StageReport]:
    """Node counts, weights and matrix operations of each stage, the latter per bucket at one guided request."""
    rows = len(staged.spec.guidance.branches) if staged.spec.guidance else 1
    axes = [a for a in buckets.axes if a != "batch"]
    result = {}
    for stage in (staged.table, staged.prepare, staged.rows, staged.step):
        if stage is None:
            continue
        flops = {}
        for bucket in buckets.combinations(axes) or [{}]:
            sizes = example_sizes(staged, buckets, bucket) | {BATCH: rows}
            flops[bucket_label(bucket)] = matrix_flops(stage, sizes, symbols)
        result[stage.name] = StageReport(
            nodes=stage.nodes,
            parameters=sum(t.numel() for t in stage.constants.values()),
            weight_bytes=stage.weight_bytes,
            inputs=stage.inputs,
            outputs=stage.outputs,
            flops=flops,
        )
    return result


def _prove(
    model: Model,
    options: Options,
    staged: Staged,
    folder: Path,
    manifest: Manifest,
    output: Path,
    progress: Progress,
) -> None:
    """Record the reference, check the engines, write the reports. Raises ParityFailed."""
    progress.stage("record the reference (float32 and float64 eager)")
    eager = eager_runtime(model.region, options.programs, model.name)
    double = Region(model.region.spec, copy.deepcopy(model.region.module).double())
    exact = eager_runtime(double, options.programs, model.name, torch.float64)
    axes = [a for a in options.buckets.axes if a != "batch"]
    buckets = options.buckets.combinations(axes) or [{}]
    max_batch = options.buckets.largest("batch") or MAX_ROWS
    recording = parity.record(eager, exact, buckets, max_batch, progress.case)
    del exact, double
    progress.stage("check every engine, bucket and program")
    runtimes = {name: load(folder, engine=name) for name in manifest.engine_names}
    rows = [staged_row(staged)]
    for runtime in runtimes.values():
        rows += parity.check(runtime, recording, progress.case)
    progress.stage("time engines and eager")
    timings = [
        reports.Timing(
            bucket=dict(t.bucket),
            rows=t.rows,
            engine=name,
            engine_ms=t.median_ms(name),
            eager_ms=t.median_ms(EAGER),
            flops=manifest.stages["step"].flops[bucket_label(t.bucket)],
            waste=bucket_waste(options.histogram, options.buckets, t.bucket, model.region.spec.main_dim),
        )
        for t in parity.time_steps({EAGER: eager, **runtimes}, recording)
        for name in runtimes
    ]
    report = report_of(manifest, rows, tuple(timings))
    parity.save(recording, folder / store.PARITY)
    write_reports(report, folder / store.PARITY)
    if not report:
        kept = output.absolute().with_name(output.name + ".parity")
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(folder / store.PARITY, kept)
        worst = report.failures[0]
        raise ParityFailed(
            f"{manifest.model}: {len(report.failures)} of {len(rows)} parity rows failed, first {worst.name}: distance "
            f"{worst.distance:.3g}, budget {worst.budget:.3g} {worst.note}; no artifact was written, see {kept}"
        )


def staged_row(staged: Staged) -> reports.Row:
    """What the split measured of itself."""
    error = staged.error or StagingError(float("inf"), 0.0)
    return reports.Row(
        check="staged", engine="eager", bucket={}, lengths=(), program=None, time=None, guided=True,
        max_abs=error.worst, rel_l2=0.0, snr_db=None, first_bad_step=None, distance=error.worst,
        budget=error.allowed, passed=error.worst <= error.allowed, note="staged graphs against the whole graph",
    )  # fmt: skip


def bucket_waste(
    histogram: Mapping[int, float] | None, buckets: Buckets, bucket: Mapping[str, int], axis: str
) -> float | None:
    """Expected padding of the lengths that fall into one bucket; None without a histogram, or where none falls."""
    if histogram is None or axis not in bucket:
        return None
    top = bucket[axis]
    below = max((size for size in buckets.axes[axis] if size < top), default=0)
    inside = {length: weight for length, weight in histogram.items() if below < length <= top}
    return waste(inside, (top,)) if inside else None


def write_reports(report: reports.ParityReport, folder: Path) -> None:
    """report.json, report.html and junit.xml; the HTML is left out, and the log says so, where its extra is absent."""
    folder.mkdir(parents=True, exist_ok=True)
    reports.write_json(report, folder / "report.json")
    (folder / "junit.xml").write_text(reports.junit(report))
    try:
        (folder / "report.html").write_text(reports.html(report))
    except MissingDependency as error:
        log.warning("no report.html: %s", error)


def eager_runtime(
    region: Region, programs: Iterable[Program], name: str, dtype: torch.dtype = torch.float32
) -> Runtime:
    """The region's own module behind the runtime's interface: no buckets, any time."""
    return Runtime(
        region.spec, EagerEvaluator(region, dtype), {p.name: p for p in programs}, Buckets(axes={}), name=name
    )
