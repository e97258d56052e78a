"""The command line. Each command reads its options, calls one function of the package, and shows the result."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from voicehub_aot import __version__
from voicehub_aot.cli import console, reports
from voicehub_aot.cli.arguments import Artifact, Guidance, Json, Junit, Report, Threads, Verbose, parse_program
from voicehub_aot.cli.quality import evaluate
from voicehub_aot.errors import GateFailed, OptionUnsupported, ParityFailed

app = typer.Typer(
    name="voicehub-aot",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Ahead-of-time compiler for text-to-speech denoisers.",
)

Weights = Annotated[
    str | None,
    typer.Option("--checkpoint", "--weights", help="A path, hf:owner/name[@revision][:file], or 'synthetic'."),
]
BucketTexts = Annotated[
    list[str] | None, typer.Option("--buckets", help="64,128 (main axis) or frames=64,128 text=100 batch=1,2.")
]
WeightsKind = Annotated[
    str | None, typer.Option(help="ema or raw, where a checkpoint holds both; default ema, and the build says so.")
]
WeightsMode = Annotated[str | None, typer.Option(help="packed (CPU default) or shared.")]
ENGINE_HELP = "aoti (default), onnxruntime, openvino, tensorrt; several: aoti,openvino; auto: the fastest per bucket."
Jobs = Annotated[int | None, typer.Option(help="Compilations at once; default half the processors.")]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        console.stdout().print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise typer.Exit


@app.command()
def build(
    model: Annotated[str, typer.Argument(help="See `voicehub-aot models`.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Default MODEL.aot.")] = None,
    config: Annotated[str | None, typer.Option(help="A released name, or a .json file of hyperparameters.")] = None,
    checkpoint: Weights = None,
    weights_kind: WeightsKind = None,
    buckets: BucketTexts = None,
    histogram: Annotated[Path | None, typer.Option(help="JSON lengths; chooses the buckets.")] = None,
    max_buckets: Annotated[int, typer.Option("--max", help="With --histogram: at most so many.")] = 6,
    multiple_of: Annotated[int, typer.Option(help="With --histogram: bucket sizes are multiples of this.")] = 8,
    steps: Annotated[str | None, typer.Option(help="Step counts, e.g. 32,16,7.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Of the requests loop, NAME=VALUE, e.g. solver=midpoint; see `models`.")
    ] = None,
    program: Annotated[
        list[str] | None, typer.Option(help="A loop with a name: NAME:steps=7,OPTION=VALUE,…; repeated.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help=ENGINE_HELP)] = None,
    engine_budget: Annotated[
        float | None, typer.Option(help="With auto: seconds after which no further engine is tried.")
    ] = None,
    min_speedup: Annotated[
        float | None, typer.Option(help="Exit 6 if an engine is slower than this x eager in a bucket it serves.")
    ] = None,
    weights_mode: WeightsMode = None,
    shapes: Annotated[str | None, typer.Option(help="dynamic or static (shared only; its default).")] = None,
    target: Annotated[str | None, typer.Option(help="cpu:x86-64-v3 (default on x86-64), -v4, cpu:native.")] = None,
    jobs: Jobs = None,
    parity: Annotated[bool, typer.Option("--parity/--no-parity", help="Prove the engines before finishing.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output.")] = False,
    file: Annotated[Path | None, typer.Option("--from", help="A TOML file of these options; flags win.")] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Compile MODEL into an artifact, with a parity report. Exit 3 if parity fails."""
    from voicehub_aot import adapters
    from voicehub_aot.cli import inspection, settings
    from voicehub_aot.compiler.build import build as run_build
    from voicehub_aot.compiler.models import resolve

    console.set_up_logging(verbose)
    given = {
        "config": config, "checkpoint": checkpoint, "buckets": buckets, "steps": steps,
        "options": settings.parse_options(option) if option else None,
        "program": settings.parse_programs(program), "engine": engine, "weights_mode": weights_mode, "shapes": shapes,
        "weights_kind": weights_kind,
        "target": target, "jobs": jobs, "engine_budget": engine_budget,
        "min_speedup": min_speedup,
    }  # fmt: skip
    chosen = settings.BuildSettings.merge(file, given)
    progress = console.ConsoleProgress()
    try:
        source = chosen.checkpoint_of(adapters.load(model))
        chosen = chosen.model_copy(update={"checkpoint": source})
        progress.stage(f"load {model} from {source}")
        loaded = resolve(model, chosen.config, source, weights_kind=chosen.weights_kind, tell=progress.stage)
        options = settings.options(loaded, chosen, histogram, max_buckets, multiple_of, parity, force)
        path = output or Path(f"{loaded.name}.aot")
        manifest = run_build(loaded, options, path, progress, settings.as_toml(loaded, chosen, options))
        progress.stage(f"wrote {path}")
    finally:
        progress.close()
    summary = inspection.summary(path, manifest)
    if as_json:
        console.show_json(summary)
    else:
        inspection.show(summary)


@app.command()
def verify(
    artifact: Artifact,
    junit: Junit = None,
    html: Annotated[Path | None, typer.Option(help="Write an HTML report here.")] = None,
    report: Report = None,
    threads: Threads = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Digests, then every recorded parity case on every engine. Exit 3 if one drifted, 5 if it does not open."""
    from voicehub_aot.artifacts import report as parity
    from voicehub_aot.proof.verify import verify as run_verify

    console.set_up_logging(verbose)
    reports.check(artifact, junit, html, report)
    progress = console.ConsoleProgress()
    try:
        progress.stage(f"verify {artifact}")
        result = run_verify(artifact, threads, progress.case)
    finally:
        progress.close()
    makers = {junit: parity.junit, html: parity.html, report: parity.as_json}
    reports.write({path: partial(make, result) for path, make in makers.items()})
    if as_json:
        console.show_json(json.loads(result.model_dump_json()))
    else:
        columns = ("check", "cases", "failed", "most of its budget")
        console.show_table(f"{artifact}: {result.model} {result.config}", columns, parity.summary(result))
    if not result:
        first = result.failures[0].name if result.failures else "none was run"
        failed = f"{len(result.failures)} of {len(result.findings)} cases failed, first {first}"
        raise console.after_result(ParityFailed(f"{artifact}: {failed}"))


@app.command()
def inspect(artifact: Artifact, as_json: Json = False) -> None:
    """What an artifact holds: inputs, stages, engines, programs, sizes."""
    from voicehub_aot.artifacts import store
    from voicehub_aot.cli import inspection

    summary = inspection.summary(artifact, store.read_manifest(artifact))
    if as_json:
        console.show_json(summary)
    else:
        inspection.show(summary)


@app.command()
def sample(
    artifact: Artifact,
    output: Annotated[Path, typer.Option("--output", "-o", help="A .safetensors file for the result.")],
    length: Annotated[list[int] | None, typer.Option(help="Length of each row; default all of the noise.")] = None,
    seed: Annotated[int, typer.Option(help="Noise seed; row b uses seed + b.")] = 0,
    inputs: Annotated[Path | None, typer.Option(help="Conditioning by name, a .safetensors file.")] = None,
    random: Annotated[bool, typer.Option("--random", help="Random conditioning, for a first try.")] = False,
    program: Annotated[str | None, typer.Option(help="A program's name, or its step count.")] = None,
    guidance: Guidance = None,
    threads: Threads = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """One request through an artifact."""
    from voicehub_aot.cli import requests

    console.set_up_logging(verbose)
    console.check_output(output)
    wanted = parse_program(program)
    scales = requests.parse_guidance(guidance)
    result = requests.sample_to_file(artifact, output, length or [], seed, inputs, random, wanted, scales, threads)
    if as_json:
        console.show_json(result)
    else:
        console.show_table(f"{artifact} -> {output}", ("what", "value"), list(result.items()))


@app.command()
def replay(
    cases: Annotated[list[Path], typer.Argument(help="Case folders, or folders of them.")],
    engine: Annotated[str, typer.Option(help="eager, or an engine by name.")] = "eager",
    weights_mode: WeightsMode = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Recorded reference cases against an engine. Exit 3 if an output is over its tolerance."""
    from dataclasses import asdict

    from voicehub_aot.compiler.replay import case_folders, replay_all

    console.set_up_logging(verbose)
    mode = weights_mode_of(weights_mode or "packed")
    outcomes = replay_all(case_folders(cases), engine, mode, tell=console.say)
    if as_json:
        rows = [{**asdict(o), "passed": o.passed} for o in outcomes]
        console.show_json(json.loads(json.dumps(rows).replace("Infinity", '"Infinity"')))
    else:
        columns = ("case", "engine", "output", "max error", "of tolerance", "")
        console.show_table(
            f"{len(outcomes)} outputs",
            columns,
            [
                (o.case, o.engine, o.output, f"{o.worst:.2e}", f"{o.used:.1%}", "ok" if o.passed else "FAILED")
                for o in outcomes
            ],
        )
    failed = [o for o in outcomes if not o.passed]
    if failed:
        first = f"{failed[0].case} {failed[0].output}"
        raise console.after_result(
            ParityFailed(f"{len(failed)} of {len(outcomes)} outputs over tolerance, first {first}")
        )


@app.command()
def models(as_json: Json = False) -> None:
    """Every model that can be built, its configurations, and what it supports."""
    from voicehub_aot import adapters

    rows: list[dict[str, Any]] = []
    inventory = adapters.inventory()
    for name in adapters.names():
        adapter = adapters.load(name)
        rows.append(
            {
                "model": name,
                "aliases": list(adapter.ALIASES),
                "configs": list(adapter.CONFIGS),
                "default": adapter.DEFAULT_CONFIG,
                "buckets": {k: list(v) for k, v in adapter.DEFAULT_BUCKETS.items()},
                "steps": list(adapter.DEFAULT_STEPS),
                "traits": inventory[name].model_dump(mode="json"),
                "support": {
                    kind: {item: found.model_dump(mode="json") for item, found in items.items()}
                    for kind, items in inventory[name].support.items()
                },
            }
        )
    if as_json:
        console.show_json(rows)
    else:
        console.show_table(
            "models (* = admitted and not built here; further traits: --json)",
            ("model", "configs (first = default)", "steps", "techniques"),
            [
                (
                    r["model"],
                    "\n".join([r["default"], *(c for c in r["configs"] if c != r["default"])]),
                    ",".join(map(str, r["steps"])),
                    "\n".join(t if s["built"] else f"{t} *" for t, s in r["support"]["techniques"].items()),
                )
                for r in rows
            ],
        )


@app.command()
def buckets(
    histogram: Annotated[Path, typer.Option(help='JSON: [120, 95, …] or {"120": 2, …}.')],
    max_buckets: Annotated[int, typer.Option("--max", help="At most so many buckets.")] = 6,
    multiple_of: Annotated[int, typer.Option(help="Sizes are multiples of this.")] = 1,
    as_json: Json = False,
) -> None:
    """The bucket set with the least expected padding, against powers of two."""
    from voicehub_aot.spec import bucket

    lengths = bucket.read_histogram(histogram)
    chosen = bucket.choose_buckets(lengths, max_buckets, multiple_of)
    powers = bucket.powers_of_two(lengths, max_buckets)
    rows = [("chosen", chosen), ("powers of two", powers)]
    if as_json:
        console.show_json({name: {"buckets": list(b), "waste": bucket.waste(lengths, b)} for name, b in rows})
    else:
        columns = ("set", "buckets", "expected waste")
        console.show_table(
            str(histogram), columns, [(n, ",".join(map(str, b)), f"{bucket.waste(lengths, b):.2%}") for n, b in rows]
        )


@app.command()
def reweight(
    artifact: Artifact,
    checkpoint: Annotated[str, typer.Option("--checkpoint", "--weights", help="The fine-tune's weights.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The new artifact.")],
    weights_kind: WeightsKind = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output.")] = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """A new artifact for a fine-tune of the same shapes: weights and tables anew, engines untouched, parity again."""
    from voicehub_aot.cli import inspection
    from voicehub_aot.compiler.reweight import reweight as run_reweight

    console.set_up_logging(verbose)
    progress = console.ConsoleProgress()
    try:
        manifest = run_reweight(artifact, checkpoint, output, force, progress, weights_kind)
    finally:
        progress.close()
    summary = inspection.summary(output, manifest)
    if as_json:
        console.show_json(summary)
    else:
        inspection.show(summary)


@app.command()
def export(
    artifact: Artifact,
    layout: Annotated[str, typer.Option("--format", help="onnx-dir or triton-repository.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output.")] = False,
    as_json: Json = False,
) -> None:
    """An artifact as a folder for other hosts: ONNX graphs with the loop as data, or a Triton server's model."""
    from voicehub_aot.deploy.bundle import write_bundle

    written = write_bundle(artifact, layout, output, force)
    if as_json:
        console.show_json(written)
    else:
        rows = [(k, "\n".join(v) if isinstance(v, list) else v) for k, v in written.items()]
        console.show_table(f"{artifact} -> {output}", ("what", "value"), rows)


@app.command()
def bench(
    artifact: Artifact,
    min_speedup: Annotated[float | None, typer.Option(help="Exit 6 if a bucket is slower than this x eager.")] = None,
    checkpoint: Weights = None,
    weights_kind: WeightsKind = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Milliseconds of one guided evaluation per bucket; with the checkpoint, against eager."""
    from voicehub_aot.cli import requests

    rows = requests.bench(artifact, checkpoint, threads, min_speedup, weights_kind)
    if as_json:
        console.show_json(rows)
    else:
        columns = ("bucket", "rows", "engine ms", "eager ms", "speed-up")
        console.show_table(str(artifact), columns, [tuple(r.values()) for r in rows])
    try:
        requests.check_speedup(rows, min_speedup)
    except GateFailed as error:
        raise console.after_result(error) from error


@app.command()
def doctor(as_json: Json = False) -> None:
    """What this machine has: versions, compiler, processor, threads, cache."""
    from voicehub_aot.cli import inspection

    facts = inspection.doctor()
    if as_json:
        console.show_json(facts)
    else:
        console.show_table("doctor", ("what", "value"), list(facts.items()))


app.command()(evaluate)


def weights_mode_of(text: str) -> Literal["packed", "shared"]:
    if text == "packed":
        return "packed"
    if text == "shared":
        return "shared"
    raise OptionUnsupported(f"--weights-mode {text!r} is not known; choose packed or shared")


def main() -> None:
    """Entry point of the console script; exit codes are documented in the README."""
    sys.exit(console.run(lambda: app(standalone_mode=False)))
