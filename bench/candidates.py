"""What is compared, ready to be timed: upstream's step on other back ends, our artifacts, and the check.

All candidates of one comparison have the same synthetic weights, the same request of one row and as many threads as
torch. Each is checked by value against our module before it is timed; then they take turns.

    eager          upstream's own module where its package is installed (f5-tts), else its computation in plain torch:
                   nothing hoisted or fused, F5's text embeddings cached as upstream caches them
    torch.compile  of that computation in plain torch, default mode, one compilation a length
    onnxruntime    on the same computation exported whole (dynamo exporter, opset 20), one model a length
    openvino       on the same file
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from subject import Subject, build_artifact, characters, check_artifact, difference, draw, open_artifact
from timing import note
from torch import Tensor

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from voicehub_aot.runtime.runtime import Runtime

EAGER, COMPILED, ONNX, OPENVINO = "eager", "torch.compile", "onnxruntime", "openvino"
PEERS = (EAGER, COMPILED, ONNX, OPENVINO)
OURS = "ours"
NEEDS: Mapping[str, Mapping[str, str]] = {  # package -> extra that installs it
    ONNX: {"onnxruntime": "onnx", "onnxscript": "onnx"},
    OPENVINO: {"openvino": "openvino", "onnxscript": "onnx"},
}
TOLERANCE = 1e-4  # relative, of the step against our module's

Step = Callable[[], Tensor]


class CannotTakePart(Exception):
    """A peer that fails on this model; the others are compared without it, and that is said."""


def chosen_of(arguments: ArgumentParser, text: str, known: Sequence[str]) -> list[str]:
    """ "eager,ours" as a list; an unknown name is a usage error."""
    chosen = text.split(",")
    if unknown := sorted(set(chosen) - set(known)):
        arguments.error(f"unknown candidates {unknown}; known are {', '.join(known)}")
    return chosen


def missing(name: str) -> str:
    """Why a peer cannot take part here and how to change that; "" if it can."""
    absent = {p: extra for p, extra in NEEDS.get(name, {}).items() if importlib.util.find_spec(p) is None}
    extras = ",".join(dict.fromkeys(absent.values()))
    return f"{' and '.join(absent)} not installed: pip install 'voicehub-aot[{extras}]'" if absent else ""


# --- upstream's step on other back ends


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


def export_onnx(module: torch.nn.Module, inputs: tuple[Tensor, ...], path: Path) -> float:
    """The module exported whole at these sizes; returns the seconds it took."""
    start = time.perf_counter()
    with torch.no_grad():
        exported = torch.onnx.export(module, inputs, dynamo=True, opset_version=20, verbose=False)
    assert exported is not None
    exported.save(path, external_data=True)
    return time.perf_counter() - start


def onnxruntime_step(path: Path, inputs: tuple[Tensor, ...]) -> Step:
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # else it steals from the next candidate
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feeds = {item.name: tensor.numpy() for item, tensor in zip(session.get_inputs(), inputs, strict=True)}
    return lambda: torch.from_numpy(session.run(None, feeds)[0])


def openvino_step(path: Path, inputs: tuple[Tensor, ...]) -> Step:
    """One stream in float32: on processors with bfloat16 units its own default is not float32."""
    import openvino

    threads = torch.get_num_threads()
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "ENABLE_HYPER_THREADING": True,  # else it leaves out half of the processors that the others use
        "ENABLE_CPU_PINNING": False,  # pinning would bind the calling thread, which the others run on too
    }
    core = openvino.Core()
    try:
        compiled = core.compile_model(core.read_model(path), "CPU", settings)
    except RuntimeError as error:  # version 2026.4 with one thread: Supertonic's Mish
        raise CannotTakePart(" ".join(str(error).split())) from error
    if (used := compiled.get_property("INFERENCE_NUM_THREADS")) != threads:
        raise SystemExit(
            f"{OPENVINO} uses {used} threads where every other candidate has {threads}; set --threads {used}"
        )
    request = compiled.create_infer_request()
    for item, tensor in zip(compiled.inputs, inputs, strict=True):
        request.set_tensor(item, openvino.Tensor(tensor.numpy()))

    def run() -> Tensor:
        request.infer()
        return torch.from_numpy(request.get_output_tensor(0).data.copy())  # the request writes there again

    return run


# --- ours


def opened(
    subject: Subject, given: Path | None, lengths: Sequence[int], threads: int, engine: str | None = None, **build: Any
) -> Runtime:
    """The artifact given by path, else one built for these lengths; open, and known to hold the subject's weights.

    engine: open this one. build: arguments of `build_artifact`.
    """
    runtime = open_artifact(given or build_artifact(subject, lengths, **build)[0], threads, engine)
    check_artifact(subject, runtime)
    return runtime


def our_step(subject: Subject, runtime: Runtime, state: Tensor, request: Mapping[str, Tensor], row: int) -> Step:
    """A prepared evaluation and the update, as in `Runtime.sample`'s loop."""
    from voicehub_aot.kernels.combine import combine

    program = subject.programs[0]
    velocity = runtime.stepper(state, program.name, row, **request)
    h = program.schedule[row + 1] - program.schedule[row]
    return lambda: combine([(state, 1.0), (velocity(), h)])


# --- all of them, at one length


@dataclass(frozen=True)
class LineUp:
    """What takes part. runtimes: ours by candidate. modules: upstream's step by peer. kind: what eager is."""

    subject: Subject
    chosen: Sequence[str]
    runtimes: Mapping[str, Runtime]
    modules: Mapping[str, Any]
    kind: str


def line_up(subject: Subject, chosen: Sequence[str], runtimes: Mapping[str, Runtime]) -> LineUp:
    plain = subject.plain()
    kind, eager = subject.upstream() if EAGER in chosen else ("left out", None)
    return LineUp(subject, chosen, runtimes, {EAGER: eager, COMPILED: plain, ONNX: plain, OPENVINO: plain}, kind)


@dataclass(frozen=True)
class Candidate:
    """error: relative difference to our module. make_s: what making it took. call_s: of its first checked call."""

    step: Step
    make_s: float | None
    error: float
    call_s: float


def _made(
    line: LineUp, frames: int, row: int, folder: Path, failed: dict[str, str]
) -> Iterator[tuple[str, Step, float | None]]:
    """Name, step, and seconds it took to make; `failed` gets the others with their reason."""
    subject = line.subject
    state, request = draw(subject.spec, frames, characters(subject.model.name, frames))
    path, export_s = folder / "step.onnx", 0.0
    for name in line.chosen:
        if name in line.runtimes:
            yield name, our_step(subject, line.runtimes[name], state, request, row), None
            continue
        source = line.modules[name]
        inputs = source.inputs(source.prepare(request, state), state, subject.programs[0].schedule, row)
        if name == EAGER:
            yield name, lambda source=source, inputs=inputs: source(*inputs), None  # type: ignore[misc]
            continue
        note(f"{name} at {frames} frames")
        if name == COMPILED:
            yield name, *compiled_step(source, inputs)
            continue
        export_s = export_s if path.exists() else export_onnx(source, inputs, path)
        start = time.perf_counter()
        try:
            step = {ONNX: onnxruntime_step, OPENVINO: openvino_step}[name](path, inputs)
        except CannotTakePart as error:
            failed[name] = str(error)
            print(f"{frames} frames: {name} is left out, it fails: {error}")
            continue
        yield name, step, export_s + time.perf_counter() - start


def candidates_at(line: LineUp, frames: int, folder: Path) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Every candidate ready to be timed and checked against our module; and the peers that failed, with their reason.

    folder: for files that they map.
    """
    from voicehub_aot.runtime.eager import eager_runtime

    subject = line.subject
    row = len(subject.programs[0].times) // 2
    state, request = draw(subject.spec, frames, characters(subject.model.name, frames))
    module = eager_runtime(subject.model.region, subject.programs, subject.model.name)
    wanted = our_step(subject, module, state, request, row)()
    made: dict[str, Candidate] = {}
    failed: dict[str, str] = {}
    for name, step, make_s in _made(line, frames, row, folder, failed):
        start = time.perf_counter()
        got = step()
        made[name] = Candidate(step, make_s, difference(got, wanted, state), time.perf_counter() - start)
    note("  ".join(f"{name} differs by {c.error:.1e}" for name, c in made.items()))
    wrong = [f"{name} ({c.error:.2e})" for name, c in made.items() if not c.error <= TOLERANCE]
    if wrong:
        raise SystemExit(f"{subject.title}, {frames} frames: not the same step as our module: {', '.join(wrong)}")
    return made, failed
