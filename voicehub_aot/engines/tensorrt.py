"""TensorRT: ONNX graph -> a plan for one GPU generation, refitted from the artifact's weight file when it is opened.

The plan holds no weights of ours: exactly those of the weight file are marked refittable (`REFIT_INDIVIDUAL`) and
stripped. `REFIT_IDENTICAL` would be undefined after a reweight, and `REFIT` strips our index tables too.

One plan serves every bucket, so its weights are on the device once: each combination of promised sizes has an
optimisation profile, tuned for the bucket's own size. A profile's workspace is recorded beside the plan, and is taken
from torch for each call, so idle contexts hold none.

TensorRT synchronises the host when it is given the default stream. Each context therefore has a stream of its own,
which waits on the device for torch's current stream and is waited for by it: in order for every other torch
operation, no host synchronisation, and a context's calls never overlap whichever thread or stream they come from.

Facts about the Python names, TensorRT 10 and 11: networks of 11 are always strongly typed, and the flag is ignored;
`set_optimization_profile_async` raises RuntimeError, most others return False or None and tell the logger why.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import LifoQueue
from typing import Any

import torch

from voicehub_aot.engines import Source, StageCode, Weights, _onnx, _plan, code_digest
from voicehub_aot.engines._plan import RECORD, Graph, Key, Machine, Plan, Profile
from voicehub_aot.errors import (
    ArtifactCorrupt,
    CompileFailed,
    EngineUnavailable,
    InputMismatch,
    InternalError,
    MissingDependency,
)
from voicehub_aot.spec.region import DTYPES
from voicehub_aot.spec.target import Target

NAME = "tensorrt"
FUSES = False
NATIVE = False  # bound to a GPU generation and a TensorRT version, which the plan's own key says
STATIC = False
FORMAT = NAME
KERNEL_BYTES = 0

DATA_TYPES = {torch.float32: "FLOAT", torch.int64: "INT64", torch.bool: "BOOL"}  # tensorrt.DataType

log = logging.getLogger(__name__)


def check() -> None:
    _ready()
    _onnx.require()


def check_build(cache: Path, target: Target) -> None:
    """Nothing is compiled to code of this machine."""
    check()


def _ready() -> Any:
    """The tensorrt package. Raises MissingDependency, or EngineUnavailable without a CUDA device or names we need."""
    try:
        import tensorrt
    except (ImportError, OSError) as error:  # OSError: its bindings are there, its libraries are not
        raise MissingDependency(
            f"the tensorrt engine needs tensorrt: pip install 'voicehub-aot[tensorrt]' ({error})"
        ) from error
    if not torch.cuda.is_available():
        raise EngineUnavailable(
            f"the tensorrt engine needs a CUDA device to build and to run; this torch ({torch.__version__}) sees none"
        )
    if not hasattr(tensorrt.BuilderFlag, "REFIT_INDIVIDUAL"):
        raise EngineUnavailable(
            f"TensorRT {tensorrt.__version__} cannot refit single weights (REFIT_INDIVIDUAL); install a newer one"
        )
    return tensorrt


def _machine() -> Machine:
    """Of the current CUDA device."""
    major, minor = torch.cuda.get_device_capability()
    return Machine(sm=10 * major + minor, tensorrt=_ready().__version__)


def reads_weight_file(weights: Weights) -> bool:
    return True


def versions() -> dict[str, str]:
    return {"tensorrt": str(_ready().__version__), **_onnx.versions()}


def settings(code: StageCode, weights: Weights, target: Target) -> dict[str, Any]:
    """Raises MissingDependency or EngineUnavailable: a plan is for the machine that builds it."""
    _ready()
    _onnx.require()
    return {
        "code": code_digest(__file__, _plan.__file__, _onnx.__file__),
        **_onnx.versions(),
        **_machine().model_dump(),
        "profiles": [
            {n: s.model_dump(mode="json") for n, s in p.items()} for p in _plan.profiles(code.inputs, code.spans)
        ],
    }


# Building.


@cache
def _logger() -> Any:
    """TensorRT takes one logger a process. It keeps the last errors, which the calls that fail do not return."""
    trt = _ready()
    levels = {"VERBOSE": 5, "INFO": logging.DEBUG, "WARNING": logging.INFO}  # what it warns of is ours to know

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: deque[str] = deque(maxlen=4)

        def log(self, severity: Any, text: str) -> None:
            level = levels.get(severity.name, logging.ERROR)
            if level == logging.ERROR:
                self.errors.append(text)
            log.log(min(level, logging.INFO), "%s", text)

    return Logger()


def _reason() -> str:
    """Why the last call failed; other threads' failures may be among it."""
    errors = _logger().errors
    text = "; ".join(errors) or "TensorRT gave no reason"
    errors.clear()
    return text


def timing_cache(folder: Path, machine: Machine) -> Path:
    """Measured kernel times of one machine, which later builds reuse."""
    return folder / NAME / f"sm{machine.sm}-trt{machine.tensorrt}.timing"


def compile_stage(code: StageCode, weights: Weights, target: Target, folder: Path) -> None:
    """Raises CompileFailed, EngineUnavailable or MissingDependency."""
    _ready()
    machine, wanted = _machine(), _plan.profiles(code.inputs, code.spans)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        graph = _plan.write_graph(code, Path(scratch))
        key = Key(machine=machine, precision=graph.precision, graph=graph.digest)
        try:
            with _timings(code.cache, machine) as timings:
                data = _build(graph, wanted, timings, code.name)
            workspace = _inspect(data, graph, len(wanted), code.name)
        except (RuntimeError, TypeError, ValueError) as error:  # what the bindings raise
            raise CompileFailed(f"{code.name}: TensorRT failed ({error}): {_reason()}") from error
    _plan.write_plan(folder, Plan(key=key, profiles=wanted, workspace_bytes=workspace), data)


@contextmanager
def _timings(folder: Path | None, machine: Machine) -> Iterator[dict[str, bytes]]:
    """The timing cache under "cache", to be replaced there. One build at a time: two would time each other."""
    from filelock import FileLock

    timings = {"cache": b""}
    if folder is None:
        yield timings
        return
    file = timing_cache(folder, machine)
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock"):
        if file.is_file():
            timings["cache"] = file.read_bytes()
        yield timings
        _plan.replace_file(file, timings["cache"])


def _build(graph: Graph, wanted: Sequence[Profile], timings: dict[str, bytes], where: str) -> bytes:
    """The stripped plan. Raises CompileFailed."""
    trt = _ready()
    builder = trt.Builder(_logger())
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, _logger())
    if not parser.parse_from_file(str(graph.path)):
        problems = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
        raise CompileFailed(f"{where}: TensorRT cannot read the graph: {problems or _reason()}")
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    steering = [v.name for v in inputs if v.is_shape_tensor]
    if steering:
        raise CompileFailed(f"{where}: values of {', '.join(steering)} decide shapes, which would need the host")
    fixed = [name for name in graph.weights if not network.mark_weights_refittable(name)]
    if fixed:
        raise CompileFailed(f"{where}: TensorRT would keep weights inside: {', '.join(fixed[:6])}")
    config = builder.create_builder_config()
    config.set_flag(trt.BuilderFlag.STRIP_PLAN)
    config.set_flag(trt.BuilderFlag.REFIT_INDIVIDUAL)
    config.clear_flag(trt.BuilderFlag.TF32)  # else float32 products have 10 bits, beyond every parity budget
    for shapes in wanted:
        profile = builder.create_optimization_profile()
        for value in inputs:
            if -1 in tuple(value.shape):
                of = shapes[value.name]
                profile.set_shape(value.name, of.least, of.likely, of.most)
        if config.add_optimization_profile(profile) < 0:
            raise CompileFailed(f"{where}: TensorRT refused a profile: {_reason()}")
    for known in (timings["cache"], b""):  # a damaged one, or one of another model of the same generation, is refused
        times = config.create_timing_cache(known)
        if times is not None and config.set_timing_cache(times, ignore_mismatch=False):
            break
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise CompileFailed(f"{where}: TensorRT built no plan: {_reason()}")
    timings["cache"] = bytes(config.get_timing_cache().serialize())
    return bytes(plan)


def _inspect(data: bytes, graph: Graph, count: int, where: str) -> tuple[int, ...]:
    """Workspace bytes by profile. Raises CompileFailed if a weight would not come from the weight file."""
    trt = _ready()
    engine = trt.Runtime(_logger()).deserialize_cuda_engine(data)
    if engine is None:
        raise CompileFailed(f"{where}: TensorRT cannot open what it built: {_reason()}")
    refittable = set(trt.Refitter(engine, _logger()).get_all_weights())
    if refittable != set(graph.weights):
        odd = sorted(refittable ^ set(graph.weights))
        raise CompileFailed(f"{where}: plan and weight file disagree about {', '.join(odd[:6])}")
    return tuple(int(engine.get_device_memory_size_for_profile_v2(number)) for number in range(count))


def install(compiled: Path, root: Path, name: str, target: Target) -> str:
    path = Path("engines") / NAME / name
    plan = Plan.model_validate_json((compiled / RECORD).read_bytes())
    (root / path).mkdir(parents=True)
    for file in (RECORD, f"{plan.key.name}.plan"):
        shutil.copyfile(compiled / file, root / path / file)
    return path.as_posix()


# Running.


def open_stage(source: Source, runners: int) -> TensorrtStage:
    """On the current CUDA device."""
    trt = _ready()
    plan, file = _plan.read_plan(source, _machine())
    engine = trt.Runtime(_logger()).deserialize_cuda_engine(file.read_bytes())
    if engine is None:
        raise ArtifactCorrupt(f"{source.where}: TensorRT cannot open the plan: {_reason()}")
    named = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
    border = {v.name for v in (*source.inputs, *source.outputs)}
    if named != border:
        raise ArtifactCorrupt(f"{source.where}: plan and manifest disagree about {', '.join(sorted(named ^ border))}")
    _refit(engine, source)
    return TensorrtStage(engine, plan, source, runners)


def _refit(engine: Any, source: Source) -> None:
    """Copy the stage's weights to the device, read from where the weight file is mapped."""
    trt = _ready()
    refitter = trt.Refitter(engine, _logger())
    for name in refitter.get_all_weights():
        tensor = source.constants.get(name)
        if tensor is None:
            raise ArtifactCorrupt(f"{source.where}: the weight file lacks {name}; rebuild the artifact")
        kind = getattr(trt.DataType, DATA_TYPES[tensor.dtype])
        if not refitter.set_named_weights(name, trt.Weights(kind, tensor.data_ptr(), tensor.numel())):
            raise ArtifactCorrupt(f"{source.where}: TensorRT refused weight {name!r}: {_reason()}")
    missing = refitter.get_missing_weights()
    if missing or not refitter.refit_cuda_engine():
        raise ArtifactCorrupt(f"{source.where}: refitting failed, missing {missing[:6]}: {_reason()}")


@dataclass
class _Runner:
    """One execution context. profile: the one it has selected, -1 before the first call and after a failure."""

    context: Any
    stream: torch.cuda.Stream
    profile: int = -1


class TensorrtStage:
    """One opened stage on one device."""

    def __init__(self, engine: Any, plan: Plan, source: Source, runners: int) -> None:
        self._engine, self._plan, self._where = engine, plan, source.where
        self._inputs = [v.name for v in source.inputs]
        self._outputs = [(v.name, DTYPES[v.dtype]) for v in source.outputs]
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._idle: LifoQueue[_Runner] = LifoQueue()  # the last one used has the right profile most often
        for _ in range(runners):
            context = engine.create_execution_context(_ready().ExecutionContextAllocationStrategy.USER_MANAGED)
            if context is None:
                raise EngineUnavailable(f"{source.where}: no execution context could be created: {_reason()}")
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._idle.put(_Runner(context, stream))

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Thread-safe: a call beyond `runners` waits for a context. Returns before the device is done.

        Raises NoBucketFits for sizes that no profile holds, InputMismatch for tensors elsewhere than on the device.
        """
        elsewhere = {str(t.device) for t in inputs} - {str(self._device)}
        if elsewhere:
            raise InputMismatch(f"{self._where}: inputs on {', '.join(sorted(elsewhere))}, wanted {self._device}")
        profile = _plan.profile_for(
            self._plan, {n: t.shape for n, t in zip(self._inputs, inputs, strict=True)}, self._where
        )
        runner = self._idle.get()
        try:
            with torch.cuda.device(self._device):
                return self._run(runner, profile, inputs)
        except BaseException:
            runner.profile = -1
            raise
        finally:
            self._idle.put(runner)

    def _run(self, runner: _Runner, profile: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs and workspace belong to torch's current stream, whose later work waits for the runner's."""
        context, current, handle = runner.context, torch.cuda.current_stream(), runner.stream.cuda_stream
        try:
            self._select(runner, profile)
            taken = [
                context.set_input_shape(name, tuple(tensor.shape))
                and context.set_tensor_address(name, tensor.data_ptr())
                for name, tensor in zip(self._inputs, inputs, strict=True)
            ]
            outputs = [self._empty(context.get_tensor_shape(name), dtype) for name, dtype in self._outputs]
            taken += [
                context.set_tensor_address(name, tensor.data_ptr())
                for (name, _), tensor in zip(self._outputs, outputs, strict=True)
            ]
            workspace = self._empty((self._plan.workspace_bytes[profile],), torch.uint8)
            context.set_device_memory(workspace.data_ptr(), workspace.numel())
            runner.stream.wait_stream(current)  # after the last allocation: its memory may be in use on that stream
            if not all(taken) or not context.execute_async_v3(handle):
                raise InternalError(f"{self._where}: TensorRT failed: {_reason()}")
            return outputs
        finally:
            current.wait_stream(runner.stream)

    def _select(self, runner: _Runner, profile: int) -> None:
        if runner.profile == profile:
            return
        try:
            runner.context.set_optimization_profile_async(profile, runner.stream.cuda_stream)
        except RuntimeError as error:
            raise InternalError(f"{self._where}: TensorRT cannot select profile {profile}: {_reason()}") from error
        runner.profile = profile

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A fresh tensor: what the engine writes never lies where an input does."""
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)
