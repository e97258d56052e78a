"""One sampling step of a request: the denoiser with every guidance branch packed, guidance, and the Euler update.

    python bench/bench_step.py --model supertonic --lengths 64,128,250
    python bench/bench_step.py --model f5tts --lengths 64,128,250,512 --rounds 9 --json step.jsonl --gate

Candidates, all with the same synthetic weights and the same request of one row, checked against our module by value
before they are timed, then timed in turn:

    eager          upstream's own module where its package is installed (f5-tts), else its computation in plain torch:
                   nothing hoisted or fused, F5's text embeddings cached as upstream caches them
    torch.compile  of that computation in plain torch, default mode, one compilation a length
    onnxruntime    on the same computation exported whole (dynamo exporter, opset 20), one model a length
    ours           the packed artifact: what depends on the request alone is prepared once, as in a sampling loop
    ours-shared    the artifact with shared weights, one engine a length (not by default)

roofline: matrix operations of our step over its time, as a share of what the packed matrix product reaches at the
model's largest linear with as many rows, measured in the same rounds. The same count of operations is used for every
candidate, so that eager's repeated work shows as time lost.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves a script's own folder out

import torch
from subject import (
    DEFAULT_LENGTHS,
    Subject,
    build_artifact,
    characters,
    check_artifact,
    difference,
    draw,
    numbers,
    open_artifact,
    parser,
    resolve,
    use_threads,
)
from timing import Times, append_json, environment, interleaved, note, print_table
from torch import Tensor

EAGER, COMPILED, ONNX, OURS, SHARED = "eager", "torch.compile", "onnxruntime", "ours", "ours-shared"
CANDIDATES = (EAGER, COMPILED, ONNX, OURS, SHARED)
MATRIX = "packed matrix"
TOLERANCE = 1e-4  # relative, of the step against our module's
WARM_UP = 2  # a step of F5 takes seconds
TARGETS: Mapping[str, Mapping[int, float]] = {  # over eager, by frames
    "f5tts": {128: 1.35, 512: 1.12},
    "supertonic": {64: 1.35, 128: 1.35},
}
FLOOR = 1.0  # over eager and torch.compile, at every length
MATRIX_SECONDS = 0.02  # of one timed call of the matrix product, about

Step = Callable[[], Tensor]


def onnx_session(module: torch.nn.Module, inputs: tuple[Tensor, ...], folder: Path) -> Step:
    """The module exported whole at these sizes, behind onnxruntime with as many threads as torch."""
    import onnxruntime  # type: ignore[import-untyped]

    path = folder / "step.onnx"
    with torch.no_grad():
        exported = torch.onnx.export(module, inputs, dynamo=True, opset_version=20, verbose=False)
    assert exported is not None
    exported.save(path, external_data=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # else it steals from the next candidate
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feeds = {item.name: tensor.numpy() for item, tensor in zip(session.get_inputs(), inputs, strict=True)}
    return lambda: torch.from_numpy(session.run(None, feeds)[0])


def compiled_step(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Step, float]:
    """And the seconds of the first call, with no cache to help."""
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    compiled = torch.compile(module, dynamic=False)
    with fresh_cache():
        start = time.perf_counter()
        compiled(*inputs)
        seconds = time.perf_counter() - start
    return lambda: compiled(*inputs), seconds


def matrix_shape(subject: Subject) -> tuple[int, int]:
    """Inputs and outputs of the largest linear that is work of every step."""
    c = subject.model.config
    if subject.model.name == "f5tts":
        return c["dim"], c["dim"] * c["ff_mult"]
    return c["hidden"], c["intermediate_dim"]


def packed_matrix(rows: int, inputs: int, outputs: int) -> tuple[Callable[[], object], int]:
    """A packed matrix product as our engines call it, repeated to be measurable; and its operations in all."""
    weight, bias, x = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(rows, inputs)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    flops = 2 * rows * inputs * outputs
    repeats = max(1, round(MATRIX_SECONDS * 50e9 / flops))

    def run() -> None:
        for _ in range(repeats):
            torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    return run, flops * repeats


def step_flops(subject: Subject, lengths: tuple[int, ...]) -> dict[int, int]:
    """Matrix operations of our step for one request with all its guidance branches, by frames."""
    from voicehub_aot.export import export_region
    from voicehub_aot.region import BATCH
    from voicehub_aot.stage import matrix_flops, split

    note("counting the step's matrix operations")
    graph, symbols = export_region(subject.model.region)
    staged = split(graph, subject.spec, symbols)
    others = {d.name: d for d in subject.spec.dims}
    result = {}
    for frames in lengths:
        text = characters(subject.model.name, frames)
        sizes = {name: min(dim.max, text) for name, dim in others.items()}
        sizes |= {subject.spec.main_dim: frames, BATCH: subject.rows}
        result[frames] = matrix_flops(staged.step, sizes, symbols)
    return result


def our_step(subject: Subject, runtime: Any, state: Tensor, request: Mapping[str, Tensor], row: int) -> Step:
    """A prepared evaluation and the update, as in `Runtime.sample`'s loop."""
    from voicehub_aot.kernels.combine import combine

    program = subject.programs[0]
    velocity = runtime.stepper(state, program.name, row, **request)
    h = program.schedule[row + 1] - program.schedule[row]
    return lambda: combine([(state, 1.0), (velocity(), h)])


def candidates_at(
    subject: Subject, chosen: list[str], runtimes: Mapping[str, Any], modules: Mapping[str, Any], frames: int, to: Path
) -> tuple[dict[str, Step], dict[str, float], dict[str, float]]:
    """Every candidate ready to be timed, its relative difference to our module, and seconds it took to make."""
    from voicehub_aot.build import eager_runtime

    program = subject.programs[0]
    row = len(program.times) // 2
    state, request = draw(subject.spec, frames, characters(subject.model.name, frames))
    module = eager_runtime(subject.model.region, subject.programs, subject.model.name)
    wanted = our_step(subject, module, state, request, row)()
    steps: dict[str, Step] = {}
    seconds: dict[str, float] = {}
    for name in chosen:
        start = time.perf_counter()
        if name in runtimes:
            steps[name] = our_step(subject, runtimes[name], state, request, row)
            continue
        source = modules[name]
        inputs = source.inputs(source.prepare(request, state), state, program.schedule, row)
        if name == COMPILED:
            note(f"torch.compile at {frames} frames")
            steps[name], seconds[name] = compiled_step(source, inputs)
        elif name == ONNX:
            note(f"ONNX export at {frames} frames")
            steps[name] = onnx_session(source, inputs, to)
            seconds[name] = time.perf_counter() - start
        else:
            steps[name] = lambda source=source, inputs=inputs: source(*inputs)  # type: ignore[misc]
    errors = {name: difference(step(), wanted, state) for name, step in steps.items()}
    note("  ".join(f"{name} differs by {error:.1e}" for name, error in errors.items()))
    wrong = [f"{name} ({error:.2e})" for name, error in errors.items() if not error <= TOLERANCE]
    if wrong:
        raise SystemExit(f"{subject.title}, {frames} frames: not the same step as our module: {', '.join(wrong)}")
    return steps, errors, seconds


def verdict(model: str, frames: int, times: Mapping[str, Times]) -> tuple[bool, str]:
    """Whether ours meets the targets at this length, and the numbers in words."""
    ours = times[OURS]
    wanted = {EAGER: max(FLOOR, TARGETS.get(model, {}).get(frames, FLOOR)), COMPILED: FLOOR}
    met = {name: ours.speedup_over(times[name]) >= least for name, least in wanted.items() if name in times}
    parts = [f"{ours.speedup_over(times[name]):.2f}x of {name} (target {wanted[name]:.2f}x)" for name in met]
    return all(met.values()), f"{'PASS' if all(met.values()) else 'SHORT'} {frames} frames: {', '.join(parts)}"


def main() -> int:
    arguments = parser(__doc__, rounds=15)
    arguments.add_argument("--lengths", type=numbers, help="frames, e.g. 64,128")
    arguments.add_argument("--candidates", default=",".join(CANDIDATES[:4]), help="default %(default)s")
    arguments.add_argument("--artifact", type=Path, help="the packed artifact (default: one is built)")
    arguments.add_argument("--shared-artifact", type=Path, help="the one with shared weights (default: one is built)")
    options = arguments.parse_args()
    chosen = options.candidates.split(",")
    if unknown := sorted(set(chosen) - set(CANDIDATES)):
        arguments.error(f"unknown candidates {unknown}; known are {', '.join(CANDIDATES)}")
    lengths = options.lengths or DEFAULT_LENGTHS[options.model]
    threads = use_threads(options.threads)
    subject = resolve(options.model, options.config)
    runtimes = {}
    for name, given, mode in ((OURS, options.artifact, "packed"), (SHARED, options.shared_artifact, "shared")):
        if name in chosen:
            path = given or build_artifact(subject, lengths, mode)[0]  # type: ignore[arg-type]
            runtimes[name] = open_artifact(path, threads)
            check_artifact(subject, runtimes[name])
    plain = subject.plain()
    kind, eager = subject.upstream() if EAGER in chosen else ("", None)
    modules = {COMPILED: plain, ONNX: plain, EAGER: eager}
    flops = step_flops(subject, lengths)

    print(f"{subject.title}: one step, {subject.rows} packed rows; eager is {kind or 'left out'}")
    print(environment())
    table: list[list[object]] = []
    records: list[dict[str, Any]] = []
    lines: list[str] = []
    passed = True
    for frames in lengths:
        with torch.no_grad(), TemporaryDirectory() as scratch:
            steps, errors, seconds = candidates_at(subject, chosen, runtimes, modules, frames, Path(scratch))
            matrix, matrix_flops = packed_matrix(subject.rows * frames, *matrix_shape(subject))
            times = interleaved(
                {**steps, MATRIX: matrix},
                options.rounds,
                pause_s=options.pause_ms / 1e3,
                warm_up=WARM_UP,
                on_round=lambda number, frames=frames: note(f"{frames} frames, round {number}"),  # type: ignore[misc]
            )
            del steps
        rate = matrix_flops / times.pop(MATRIX).median
        for name, t in times.items():
            speedup = t.speedup_over(times[EAGER]) if EAGER in times else None
            share = flops[frames] / t.median / rate
            record = {
                "model": subject.model.name,
                "config": subject.model.config_name,
                "rows": subject.rows,
                "frames": frames,
                "text": characters(subject.model.name, frames),
                "candidate": name,
                "kind": kind if name == EAGER else None,
                "rounds": options.rounds,
                "pause_ms": options.pause_ms,
                "median_ms": 1e3 * t.median,
                "p95_ms": 1e3 * t.p95,
                "speedup_over_eager": speedup,
                "step_flops": flops[frames],
                "matrix_gflops": rate / 1e9,
                "roofline_share": share,
                "difference": errors[name],
                "make_s": seconds.get(name),
            }
            records.append(record)
            table.append(
                [
                    frames,
                    name,
                    f"{1e3 * t.median:.2f}",
                    f"{1e3 * t.p95:.2f}",
                    f"{speedup:.2f}x" if speedup else None,
                    f"{flops[frames] / t.median / 1e9:.1f}",
                    f"{100 * share:.0f} %",
                    f"{seconds[name]:.1f}" if name in seconds else None,
                    f"{errors[name]:.1e}",
                ]
            )
        if OURS in times:
            met, line = verdict(subject.model.name, frames, times)
            passed, lines = passed and met, [*lines, line]
    append_json(options.json, "step", records)
    columns = ["frames", "candidate", "ms", "p95 ms", "of eager", "GFLOP/s", "roofline", "made in s", "difference"]
    print_table(f"{subject.title}: one step", columns, table)
    print("\n".join(lines))
    return 0 if passed or not options.gate else 6


if __name__ == "__main__":
    from voicehub_aot.errors import AotError

    try:
        sys.exit(main())
    except AotError as error:
        sys.exit(str(error))
