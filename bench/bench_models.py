"""Every architecture at released size with synthetic weights: an evaluation and a request, ours against eager.

    python bench/bench_models.py --json models.jsonl --plot models.png
    python bench/bench_models.py --models echo --weights-mode shared      # packing takes three times its 7 GB
    python bench/bench_models.py --models echo --config two-layers.json

eager    the adapter's own module in plain torch, run as upstream runs its own: what upstream computes once a request
         (F5's text, the keys and values of Echo and Irodori) is kept, everything else is computed in each evaluation
ours     the artifact `voicehub-aot build` gives, in the runtime: checks, layout, prepare, then every step

An evaluation has all guidance branches of one request; a request is the sampling loop from noise to result. Both
start from the same noise and must end in the same state before they are timed. The share of a stage: of the
parameters and bytes that table, prepare and step read, how many it has.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves a script's own folder out

import torch
from subject import difference, draw, open_artifact, use_threads
from timing import Times, append_json, command, environment, interleaved, note, print_table
from torch import Tensor

if TYPE_CHECKING:
    from voicehub_aot.artifacts.manifest import Manifest
    from voicehub_aot.compiler.models import Model
    from voicehub_aot.runtime.runtime import Runtime
    from voicehub_aot.spec.guidance import Guidance
    from voicehub_aot.spec.program import Program
    from voicehub_aot.spec.region import Region

EAGER, OURS = "eager", "ours"
TOLERANCE = 1e-3  # relative, of the final state: rounding grows over the steps
CEILING = 0.97  # of eager: no request may take more


@dataclass(frozen=True)
class Job:
    """lengths: of the main dimension, one measurement each; () = rows alone. texts: positions of other dimensions.

    steps: of the request timed, fewer than released where a released one takes minutes. caches: upstream keeps what
    depends on the request alone. target: largest share of eager's time that is wanted, by length.
    """

    lengths: tuple[int, ...]
    steps: int
    texts: int = 64
    caches: bool = False
    target: Mapping[int, float] | None = None


JOBS = {
    "chatterbox": Job((128, 512), 4, target={128: 0.75, 512: 0.9}),
    "cosyvoice": Job((128, 512), 4, target={128: 0.75, 512: 0.9}),
    "echo": Job((128, 512), 2, caches=True, target={128: 0.75, 512: 0.9}),
    "f5tts": Job((128, 512), 5, texts=40, caches=True),
    "irodoritts": Job((128, 512), 4, caches=True, target={128: 0.75, 512: 0.9}),
    "styletts2": Job((100,), 5, target={100: 0.5}),
    "supertonic": Job((64, 128), 8),
    "vibevoice": Job((), 10, target={0: 0.32}),
    "voxcpm": Job((), 10, target={0: 0.6}),
}


# --- eager, as upstream runs it


@dataclass(frozen=True)
class CachedEager:
    """The region's graph in plain torch, what depends on the request alone computed once: upstream's caches.

    The table is not known to it: every evaluation computes its time path, as upstream does.
    """

    region: Region
    any_time: bool = True
    dtype: torch.dtype = torch.float32

    def engine_at(self, sizes: Mapping[str, int]) -> str:
        return EAGER

    def prepare(self, inputs: Mapping[str, Tensor], program: Program, sizes: Mapping[str, int]) -> CachedPrepared:
        with torch.no_grad():
            return CachedPrepared(self, {**inputs, **self.stages.prepare(inputs)}, program)

    @property
    def stages(self) -> Any:
        return _staged_without_time(self.region)


_STAGED: dict[int, Any] = {}


def _staged_without_time(region: Region) -> Any:
    """The region split as if times came with the state."""
    from voicehub_aot.compiler.export import export_region
    from voicehub_aot.compiler.split import split

    if id(region) not in _STAGED:
        graph, symbols = export_region(region)
        late = [i.model_copy(update={"binding": "STATE"}) if i.binding == "TIME" else i for i in region.spec.inputs]
        late.sort(key=lambda i: i.name != region.spec.state.name)  # a spec's state is its first
        _STAGED[id(region)] = split(graph, region.spec.model_copy(update={"inputs": tuple(late)}), symbols)
    return _STAGED[id(region)]


@dataclass(frozen=True)
class CachedPrepared:
    eager: CachedEager
    values: Mapping[str, Tensor]
    program: Program

    def velocity(self, evaluation: int, state: Tensor) -> Tensor:
        spec = self.eager.region.spec
        clock = {name: torch.tensor([t]) for name, t in self.program.clock(evaluation, spec.time.name).items()}
        with torch.no_grad():
            outputs = self.eager.stages.step({**self.values, **clock, spec.state.name: state})
        return outputs[spec.outputs[0]]  # type: ignore[no-any-return]

    def blocks(self, wanted: Sequence[int], rows: int) -> CachedPrepared:
        from voicehub_aot.spec.region import BATCH, row_blocks

        stage, values = self.eager.stages.step, dict(self.values)
        kept = row_blocks(wanted, rows)
        for value in stage.inputs:
            if value.name in values and BATCH in value.shape:
                values[value.name] = values[value.name].index_select(value.shape.index(BATCH), kept)
        return replace(self, values=values)


def eager_runtime(model: Model, program: Program, caches: bool) -> Runtime:
    from voicehub_aot.runtime import eager
    from voicehub_aot.runtime.runtime import Runtime
    from voicehub_aot.spec.bucket import Buckets

    if not caches:
        return eager.eager_runtime(model.region, [program], model.name)
    evaluator: Any = CachedEager(model.region)
    return Runtime(model.region.spec, evaluator, {program.name: program}, Buckets(axes={}), name=model.name)


# --- what is measured


CHOICES = ("engine", "weights_mode", "target")  # of `voicehub-aot build`, for all models measured


def build_artifact(model: Model, job: Job, folder: Path, choices: Mapping[str, str | None]) -> tuple[Path, Manifest]:
    """With the model's own defaults where nothing else is chosen, parity off."""
    from voicehub_aot.cli import settings
    from voicehub_aot.cli.console import ConsoleProgress
    from voicehub_aot.compiler import build

    main = model.region.spec.main
    sizes = [f"{main.name}={','.join(map(str, job.lengths))}"] if main and job.lengths else []
    chosen = settings.BuildSettings.merge(None, {"steps": str(job.steps), "buckets": sizes or None, **choices})
    parts = ["models", model.name, model.config_name, *filter(None, choices.values())]
    output = folder / f"{'-'.join(parts).replace('/', '_').replace(':', '-')}.aot"
    options = settings.options(model, chosen, None, 1, 1, parity=False, replace=True)
    progress = ConsoleProgress()
    try:
        return output, build.build(model, options, output, progress)
    finally:
        progress.close()


@dataclass(frozen=True)
class Measured:
    """One model at one length. evaluation, request: by candidate. error: of the final state, relative."""

    model: str
    config: str
    size: str
    rows: int
    evaluation: Mapping[str, Times]
    request: Mapping[str, Times]
    error: float
    target: float | None

    def share(self, times: Mapping[str, Times]) -> float:
        return times[OURS].median / times[EAGER].median


def rows_run(program: Program, guidance: Guidance | None) -> int:
    """Row blocks of the program's first evaluation with the model's own guidance scales."""
    from voicehub_aot.spec.program import Evaluate

    if guidance is None:
        return 1
    against = next(i.against for i in program.instructions if isinstance(i, Evaluate) and i.evaluation == 0)
    return len(guidance.taking_part(against, guidance.scales(None)))


def measure(
    model: Model, job: Job, program: Program, runtime: Runtime, rounds: int, pause_s: float
) -> Iterator[Measured]:
    spec = model.region.spec
    eager = eager_runtime(model, program, job.caches)
    for length in job.lengths or (0,):
        state, request = draw(spec, length, job.texts)
        fresh = torch.randn(len(program.noises), *state.shape) if program.noises else None
        candidates = {EAGER: eager, OURS: runtime}
        whole = {"noise": state, "step_noise": fresh, "program": program.name, **request}
        evaluations = {n: c.stepper(state, program.name, 0, **request) for n, c in candidates.items()}
        requests = {n: functools.partial(c.sample, **whole) for n, c in candidates.items()}
        error = difference(requests[OURS](), requests[EAGER](), state)
        if not error <= TOLERANCE:
            raise SystemExit(f"{model.name}, {length}: ours and eager end {error:.2e} apart")
        note(f"{model.name} {length or ''}: differ by {error:.1e}, timing")
        with torch.no_grad():
            evaluation_times = interleaved(evaluations, rounds, pause_s=pause_s, warm_up=1)
            request_times = interleaved(requests, max(1, rounds // 2), pause_s=pause_s, warm_up=0)
        yield Measured(
            model=model.name,
            config=model.config_name,
            size=f"{length} {spec.main_dim}" if length else "1 row",
            rows=rows_run(program, spec.guidance),
            evaluation=evaluation_times,
            request=request_times,
            error=error,
            target=None if job.target is None else job.target.get(length),
        )


def stage_shares(manifest: Manifest) -> dict[str, tuple[float, float]]:
    """Parameters and bytes of each stage, as shares of all."""
    parameters = sum(s.parameters for s in manifest.stages.values()) or 1
    size = sum(s.weight_bytes for s in manifest.stages.values()) or 1
    return {name: (s.parameters / parameters, s.weight_bytes / size) for name, s in manifest.stages.items()}


# --- output


def cells(m: Measured) -> list[object]:
    shares = [m.share(m.evaluation), m.share(m.request)]
    times = [1e3 * t[name].median for t in (m.evaluation, m.request) for name in (EAGER, OURS)]
    verdict = "-" if m.target is None else f"{m.target:.2f}"
    return [
        f"{m.model} {m.config}",
        m.size,
        m.rows,
        *(f"{t:.1f}" for t in times[:2]),
        f"{shares[0]:.2f}x",
        *(f"{t:.1f}" for t in times[2:]),
        f"{shares[1]:.2f}x",
        verdict,
    ]


def records(m: Measured) -> list[dict[str, Any]]:
    return [
        {
            "model": m.model,
            "config": m.config,
            "size": m.size,
            "rows": m.rows,
            "what": what,
            "candidate": name,
            "median_s": t.median,
            "p95_s": t.p95,
            "of_eager": t.median / times[EAGER].median,
            "difference": m.error,
        }
        for what, times in (("evaluation", m.evaluation), ("request", m.request))
        for name, t in times.items()
    ]


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Ours as a share of eager's time, a bar a model and size, evaluation beside request. rows: of `records`."""
    from matplotlib.figure import Figure

    shares = {(f"{r['model']}, {r['size']}", r["what"]): r["of_eager"] for r in rows if r["candidate"] == OURS}
    names = sorted({name for name, _ in shares})
    figure = Figure(figsize=(9, 0.42 * len(names) + 1.2), layout="constrained")
    axes = figure.subplots()
    for offset, what in ((-0.2, "evaluation"), (0.2, "request")):
        places = [place + offset for place in range(len(names))]
        bars = axes.barh(places, [shares[name, what] for name in names], height=0.36, label=what)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("time, as a share of eager's")
    axes.legend(loc="upper right")
    axes.set_xlim(0, 1.2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def models_parser(doc: str | None, rounds: str, everything: bool) -> argparse.ArgumentParser:
    """The arguments of a benchmark of several models. rounds: what they are of. everything: all models by default."""
    arguments = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = f"of {', '.join(JOBS)}{'; default all' if everything else ''}"
    arguments.add_argument("--models", default=",".join(JOBS), required=not everything, help=which)
    arguments.add_argument("--config", help="of every model named: a released size, tiny, or a .json file")
    arguments.add_argument("--lengths", help="of every model named that has them, e.g. 64,128")
    arguments.add_argument("--folder", type=Path, help="for the artifacts (default beside the engine cache)")
    arguments.add_argument("--threads", type=int, help="compute threads (default: what this process may use)")
    arguments.add_argument("--rounds", type=int, default=9, help=f"{rounds} (default 9)")
    arguments.add_argument("--pause-ms", type=float, default=60.0, help="before each timed call (default 60)")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="append one JSON object per row")
    return arguments


def jobs_named(options: argparse.Namespace) -> dict[str, Job]:
    """The jobs of --models, with --lengths."""
    names = options.models.split(",")
    if unknown := sorted(set(names) - set(JOBS)):
        raise SystemExit(f"--models {options.models!r}: {unknown} are not known; known are {', '.join(JOBS)}")
    lengths = tuple(int(n) for n in options.lengths.split(",")) if options.lengths else None
    found = {name: JOBS[name] for name in names}
    return {name: replace(job, lengths=lengths) if lengths and job.lengths else job for name, job in found.items()}


def artifacts_folder(options: argparse.Namespace) -> Path:
    from voicehub_aot.compiler.cache import cache_dir

    folder: Path = options.folder or cache_dir() / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def main() -> int:
    arguments = models_parser(__doc__, rounds="of evaluations; half as many requests", everything=True)
    for choice in CHOICES:
        arguments.add_argument(f"--{choice.replace('_', '-')}", help="as `voicehub-aot build` takes it")
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="picture of the ratios, of all rows in --json")
    arguments.add_argument("--gate", action="store_true", help="exit with 6 if a target is missed")
    options = arguments.parse_args()
    jobs = jobs_named(options)
    from voicehub_aot.compiler import models

    threads, folder = use_threads(options.threads), artifacts_folder(options)
    print(environment())
    print(command())
    measured: list[Measured] = []
    shares: list[list[object]] = []
    for name, job in jobs.items():
        model = models.resolve(name, options.config, models.SYNTHETIC)
        program = models.program(model, job.steps)
        output, manifest = build_artifact(model, job, folder, {c: getattr(options, c) for c in CHOICES})
        runtime = open_artifact(output, threads)
        for m in measure(model, job, program, runtime, options.rounds, options.pause_ms / 1e3):
            measured.append(m)
            append_json(options.json, "models", records(m))
        for stage, (parameters, size) in stage_shares(manifest).items():
            report = manifest.stages[stage]
            millions, mib = f"{report.parameters / 1e6:.1f}", f"{report.weight_bytes / 2**20:.0f}"
            shares.append([name, stage, millions, f"{parameters:.1%}", mib, f"{size:.1%}"])
        _STAGED.clear()
        del model, runtime
        gc.collect()
    columns = ["model", "size", "rows", "eager ms", "ours ms", "of eager", "request: eager", "ours", "of eager", "aim"]
    print_table("One evaluation with all its guidance branches, and one request (ms)", columns, map(cells, measured))
    print_table("What each stage reads", ["model", "stage", "M parameters", "share", "MiB", "share of bytes"], shares)
    if options.plot:
        kept = options.json.read_text(encoding="utf-8").splitlines() if options.json else []
        rows = [json.loads(line) for line in kept] or [row for m in measured for row in records(m)]
        plot(rows, options.plot)
    short = [m for m in measured if not m.share(m.request) <= (m.target or CEILING)]
    for m in short:
        note(f"SHORT: {m.model}, {m.size}: {m.share(m.request):.2f} of eager, wanted {m.target or CEILING:.2f}")
    return 6 if short and options.gate else 0


if __name__ == "__main__":
    from voicehub_aot.errors import AotError

    try:
        sys.exit(main())
    except AotError as error:
        sys.exit(str(error))
