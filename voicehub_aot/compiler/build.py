"""adapter -> Region -> graph -> stages -> engines -> choice -> parity -> artifact."""

from __future__ import annotations

import copy
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from voicehub_aot import engines
from voicehub_aot.artifacts import report as reports, store
from voicehub_aot.artifacts.manifest import Manifest
from voicehub_aot.compiler.assemble import Parts, assemble
from voicehub_aot.compiler.cache import cache_dir
from voicehub_aot.compiler.choose import EAGER, choose, noise
from voicehub_aot.compiler.compile import Compiled, compile_all
from voicehub_aot.compiler.decisions import decisions
from voicehub_aot.compiler.export import MAX_ROWS, export_region
from voicehub_aot.compiler.jobs import plan_jobs, size_spans
from voicehub_aot.compiler.models import Model
from voicehub_aot.compiler.options import Options, RequestedOptions
from voicehub_aot.compiler.passes.few_rows import serves_few
from voicehub_aot.compiler.split import split
from voicehub_aot.compiler.stages import Stages
from voicehub_aot.engines import toolchain
from voicehub_aot.errors import (
    BuildError,
    EngineUnavailable,
    GateFailed,
    MissingDependency,
    ParityFailed,
    Unsupported,
    UsageError,
)
from voicehub_aot.progress import Progress
from voicehub_aot.proof import parity, timing
from voicehub_aot.proof.cases import Recording, plan, save_recording
from voicehub_aot.proof.verify import report_of
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.runtime.load import open_artifact
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.bucket import Buckets, label, waste
from voicehub_aot.spec.region import Region

log = logging.getLogger(__name__)

CANDIDATES = "candidates"  # folder of an artifact with every candidate, while they are timed
TIMING_SECONDS = 4.0  # per bucket
NOTES = {"split": "stages against the whole graph"}
PAUSE_SECONDS = 0.06  # before a timed call: what an engine left spinning slows the next one


def build(
    model: Model, options: RequestedOptions, output: Path, progress: Progress | None = None, settings: str | None = None
) -> Manifest:
    """Build `output`, an artifact directory, whole or not at all.

    settings: the resolved options as TOML, kept as config.toml. Raises BuildError (ExportFailed, StageFailed,
    CompileFailed, ParityFailed), GateFailed or UsageError. When parity fails the report stays beside the output, as
    `<output>.parity`.
    """
    progress = progress or Progress()
    start = time.perf_counter()
    cache = options.cache or cache_dir()
    options, unable = able(options, cache, output, progress)
    with store.writing(output, options.replace) as folder:
        progress.stage(f"export {model.region.spec.name}")
        graph, symbols = export_region(model.region)
        progress.stage("split by binding time")
        stages = split(graph, model.region.spec, symbols)
        parts = Parts(model, decided(options, stages), stages, symbols, settings)
        compiled, left_out = _compile(parts, cache, start, progress)
        left_out = {**unable, **left_out}
        if not options.parity and not options.auto:
            manifest = assemble(parts, compiled, folder, options.choice)
            manifest = manifest.model_copy(update={"decisions": decisions(model, options.programs, None)})
        else:
            manifest = _Proof(parts, compiled, left_out, start, progress).finish(folder, output)
        return store.write_manifest(folder, manifest)


def able(
    options: RequestedOptions, cache: Path, output: Path, progress: Progress
) -> tuple[RequestedOptions, dict[str, str]]:
    """The options with the engines that can be built here, and why others cannot, told before the long work.

    An engine asked for by name is never left out: its error is raised.
    """
    unable: dict[str, str] = {}
    for name in options.engines:
        engine = engines.get(name)
        try:
            if options.engines_from is None:  # else nothing is compiled
                engine.check_build(cache, options.target)
            if engine.NATIVE and (options.parity or options.auto):
                toolchain.check_may_run(output.resolve().parent)
        except (Unsupported, UsageError, MissingDependency) as error:
            if not options.auto:
                raise
            unable[name] = str(error)
            progress.stage(f"left out {name}: {error}")
    left = tuple(name for name in options.engines if name not in unable)
    if not left:
        raise EngineUnavailable(f"no engine can be built here: {unable}")
    return replace(options, engines=left), unable


def decided(options: RequestedOptions, stages: Stages) -> Options:
    """The options with the weights mode decided on: shared where every linear of the step has few rows."""
    if options.weights_mode != "auto":
        return options.resolved(options.weights_mode)
    shared = serves_few(stages.step, size_spans(stages.spec, options))
    return options.resolved("shared" if shared else "packed")


def _compile(parts: Parts, cache: Path, start: float, progress: Progress) -> tuple[list[Compiled], dict[str, str]]:
    """Every engine's stages, and why a candidate was left out. An engine asked for by name is never left out."""
    options, spec = parts.options, parts.model.region.spec
    compiled: list[Compiled] = []
    left_out: dict[str, str] = {}
    exported: dict[tuple[str, int], torch.export.ExportedProgram] = {}
    for name in options.engines:
        jobs = plan_jobs(parts.stages, options, name)
        progress.stage(f"compile {len(jobs)} stages for {name} ({options.weights_mode}, {options.shapes})")
        if options.auto and compiled and time.perf_counter() - start > options.engine_budget:
            left_out[name] = f"the budget of {options.engine_budget:g} s was spent"
        else:
            try:
                compiled += compile_all(jobs, spec, options, cache, progress, exported)
            except (BuildError, Unsupported) as error:
                if not options.auto:
                    raise
                left_out[name] = str(error)
        if name in left_out:
            progress.stage(f"left out {name}: {left_out[name]}")
    if not compiled:
        raise BuildError(f"{parts.model.name}: no engine could be built: {left_out}")
    return compiled, left_out


@dataclass(frozen=True)
class _Proof:
    """One build's way from finished engines to an artifact that was timed and checked."""

    parts: Parts
    compiled: Sequence[Compiled]
    left_out: Mapping[str, str]
    start: float
    progress: Progress

    def finish(self, folder: Path, output: Path) -> Manifest:
        """Check and time what was built; with `auto`, keep what is fastest. Writes the reports, if there is parity.

        Returns the manifest, which is yet to be written.
        """
        options, model = self.parts.options, self.parts.model
        eager = eager_runtime(model.region, options.programs, model.name)
        recording = self._record(eager)
        if options.auto:
            times = self._time_candidates(folder / CANDIDATES, eager, recording)
            manifest, findings = self._choose(folder, times, recording)
        else:
            manifest = assemble(self.parts, self.compiled, folder, options.choice)
            findings = self._check(folder, manifest, recording)
            times = self._time(folder, manifest, eager, recording)
        self._check_speed(times, manifest)
        bucket = recording.cases[0].bucket if options.parity else None
        made = decisions(model, options.programs, bucket, self.progress.case)
        manifest = manifest.model_copy(update={"decisions": made})
        if not options.parity:
            return manifest
        report = report_of(manifest, findings, self._timings(times, manifest), self.left_out)
        save_recording(recording, folder / store.PARITY)
        write_reports(report, folder / store.PARITY)
        if not report:
            raise _failed(report, folder, output)
        return manifest.model_copy(update={"files": store.list_files(folder)})

    def _check_speed(self, times: Sequence[timing.StepTime], manifest: Manifest) -> None:
        """GateFailed for a bucket whose fastest serving engine is below the speed-up that was asked for."""
        least = self.parts.options.min_speedup
        if least is None:
            return
        for timed in times:
            serving = {e.engine for e in manifest.engines if not e.serves or dict(timed.bucket) in e.serves}
            best = max(timed.median_ms(EAGER) / timed.median_ms(e) for e in serving & set(timed.samples_ms))
            if not best >= least:
                raise GateFailed(f"{label(timed.bucket)}: {best:.3f}x of eager, wanted at least {least:g}x")

    def _record(self, eager: Runtime) -> Recording:
        """What the model gives in every case; without parity, the cases alone: they are what is timed."""
        options, region = self.parts.options, self.parts.model.region
        axes = [a for a in options.buckets.axes if a != "batch"]
        buckets = options.buckets.combinations(axes) or [{}]
        max_batch = options.buckets.largest("batch") or MAX_ROWS
        if not options.parity:
            return Recording(tuple(plan(region.spec, eager.programs, buckets, max_batch)))
        self.progress.stage("record the reference (float32 and float64 eager)")
        double = Region(region.spec, copy.deepcopy(region.module).double())
        exact = eager_runtime(double, options.programs, self.parts.model.name, torch.float64)
        return parity.record(eager, exact, buckets, max_batch, self.progress.case)

    def _check(self, folder: Path, manifest: Manifest, recording: Recording) -> list[reports.Finding]:
        """Every recorded case, on the mix that was chosen or on each engine in turn."""
        if not self.parts.options.parity:
            return []
        self.progress.stage("check every engine, bucket and program")
        findings = deviation_findings(self.compiled)
        for engine in (None,) if manifest.mixed else manifest.engine_names:
            findings += parity.check(open_artifact(folder, manifest, engine=engine), recording, self.progress.case)
        return findings

    def _time(self, folder: Path, manifest: Manifest, eager: Runtime, recording: Recording) -> list[timing.StepTime]:
        """Every engine in every bucket; nothing where the engines come with a choice made earlier."""
        if manifest.mixed:
            return []
        self.progress.stage("time engines and eager")
        runtimes = {name: open_artifact(folder, manifest, engine=name) for name in manifest.engine_names}
        left = self.parts.options.engine_budget - (time.perf_counter() - self.start)
        seconds = max(0.0, min(TIMING_SECONDS, left / len(recording.cases)))
        times = timing.time_steps({EAGER: eager, **runtimes}, recording, seconds, PAUSE_SECONDS)
        if elsewhere := reports.busiest(times):
            self.progress.stage(
                f"other processes used up to {elsewhere:.1f} processors meanwhile: times say little; "
                "for a choice that holds, build again when the machine is quiet"
            )
        return times

    def _time_candidates(self, place: Path, eager: Runtime, recording: Recording) -> list[timing.StepTime]:
        """From an artifact that has them all."""
        place.mkdir()
        times = self._time(place, assemble(self.parts, self.compiled, place), eager, recording)
        shutil.rmtree(place)
        return times

    def _choose(
        self, folder: Path, times: Sequence[timing.StepTime], recording: Recording
    ) -> tuple[Manifest, list[reports.Finding]]:
        """The fastest that pass parity, assembled and checked as they will run together."""
        order = tuple(dict.fromkeys(item.job.engine for item in self.compiled))
        refused: set[tuple[str, str]] = set()
        while True:
            choice = choose(times, order, refused)
            for engine, reason in choice.reasons.items():
                self.progress.stage(f"keep {engine} for {reason}")
            store.empty(folder)
            manifest = assemble(self.parts, self.compiled, folder, choice)
            findings = self._check(folder, manifest, recording)
            failed = {
                (finding.engine, label(finding.bucket))
                for finding in findings
                if not finding.passed and finding.engine != EAGER
            }
            if not failed - refused:
                return manifest, findings
            self.progress.stage(f"parity failed, choose again: {sorted(failed)}")
            refused |= failed

    def _timings(self, times: Sequence[timing.StepTime], manifest: Manifest) -> tuple[reports.Timing, ...]:
        options, axis = self.parts.options, self.parts.model.region.spec.main_dim
        serving = {(e.engine, label(b)) for e in manifest.engines for b in e.serves}
        return tuple(
            reports.Timing(
                bucket=dict(t.bucket),
                rows=t.rows,
                engine=engine,
                engine_ms=t.median_ms(engine),
                eager_ms=t.median_ms(EAGER),
                noise=noise(t.samples_ms[engine]),
                elsewhere=t.elsewhere,
                kept=not options.auto or (engine, label(t.bucket)) in serving,
                flops=manifest.stages["step"].flops[label(t.bucket)],
                waste=bucket_waste(options.histogram, options.buckets, t.bucket, axis),
            )
            for t in times
            for engine in t.samples_ms
            if engine != EAGER
        )


def _failed(report: reports.ParityReport, folder: Path, output: Path) -> ParityFailed:
    """The error; the report moves beside the output."""
    kept = output.absolute().with_name(output.name + ".parity")
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(folder / store.PARITY, kept)
    worst = report.failures[0]
    return ParityFailed(
        f"{report.model}: {len(report.failures)} of {len(report.findings)} parity findings failed, first {worst.name}: "
        f"distance {worst.distance:.3g}, budget {worst.budget:.3g} {worst.note}; no artifact was written, see {kept}"
    )


def deviation_findings(compiled: Sequence[Compiled]) -> list[reports.Finding]:
    """What the split, and every pass for an engine, measured of itself."""
    found = {(item.job.engine, name): d for item in compiled for name, d in item.job.deviations.items()}
    return [
        reports.Finding(
            check="split", engine=engine, bucket={}, lengths=(), program=None, time=None, guided=True,
            max_abs=d.worst, rel_l2=0.0, snr_db=None, first_bad_step=None, distance=d.worst,
            budget=d.allowed, passed=d.worst <= d.allowed, note=NOTES.get(name, f"after the pass {name}"),
            seconds=d.seconds,
        )
        for (engine, name), d in found.items()
    ]  # fmt: skip


def bucket_waste(
    histogram: Mapping[int, float] | None, buckets: Buckets, bucket: Mapping[str, int], axis: str | None
) -> float | None:
    """Expected padding of the lengths that fall into one bucket; None without a histogram, or where none falls."""
    if histogram is None or axis is None or axis not in bucket:
        return None
    top = bucket[axis]
    below = max((size for size in buckets.axes[axis] if size < top), default=0)
    inside = {length: weight for length, weight in histogram.items() if below < length <= top}
    return waste(inside, (top,)) if inside else None


def write_reports(report: reports.ParityReport, folder: Path) -> None:
    """report.json, report.html and junit.xml, all or none.

    The HTML is left out, and the log says so, where its extra is absent.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contents = {folder / "report.json": reports.as_json(report), folder / "junit.xml": reports.junit(report)}
    try:
        contents[folder / "report.html"] = reports.html(report)
    except MissingDependency as error:
        log.warning("no report.html: %s", error)
    store.write_whole(contents)
