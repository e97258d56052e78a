"""OpenVINO on CPU: the ONNX graph of a stage, compiled when it is opened.

Like onnxruntime's, one graph with varying sizes serves every bucket and reads the artifact's one weight file.
"""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from voicehub_aot.engines import Source, _onnx
from voicehub_aot.errors import ArtifactCorrupt, EngineUnavailable, InternalError, MissingDependency
from voicehub_aot.spec.target import Target

NAME = "openvino"
FUSES = False
NATIVE = False
STATIC = False
FORMAT = _onnx.FORMAT
KERNEL_BYTES = 0

reads_weight_file = _onnx.reads_weight_file
settings = _onnx.settings
compile_stage = _onnx.compile_stage
install = _onnx.install


def check() -> None:
    _package()
    _onnx.require()


def check_build(cache: Path, target: Target) -> None:
    """Nothing is compiled to code of this machine."""
    check()


def _package() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise MissingDependency(
            f"the openvino engine needs openvino: pip install 'voicehub-aot[openvino]' ({error})"
        ) from error
    except (RuntimeError, OSError) as error:  # it looks for a home folder, to keep a consent in
        raise EngineUnavailable(f"openvino cannot be imported ({error}); set HOME to a folder") from error
    return openvino


def versions() -> dict[str, str]:
    return {"openvino": str(_package().__version__).split("-")[0], **_onnx.versions()}


def open_stage(source: Source, runners: int) -> RequestStage:
    """Raises ArtifactCorrupt, or EngineUnavailable if it cannot run with as many threads as torch has."""
    openvino = _package()
    if source.path not in source.digests:
        raise ArtifactCorrupt(f"{source.where}: the graph is missing; rebuild the artifact")
    threads = source.threads or torch.get_num_threads()
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",  # its own default is bfloat16 where the processor has it
        "ENABLE_HYPER_THREADING": True,  # else it leaves out half of the processors that torch uses
        "ENABLE_CPU_PINNING": False,  # would bind the calling thread, on which torch runs too
    }
    try:
        core = openvino.Core()
        compiled = core.compile_model(core.read_model(source.root / source.path), "CPU", options)
        _onnx.check_border(
            source,
            {port.any_name: len(port.partial_shape) for port in compiled.inputs},
            {port.any_name: len(port.partial_shape) for port in compiled.outputs},
        )
    except ArtifactCorrupt:
        raise
    except Exception as error:  # openvino raises plain RuntimeError, and its own exceptions below Exception
        raise ArtifactCorrupt(f"{source.where}: openvino cannot open the graph ({error}); rebuild it") from error
    if (used := compiled.get_property("INFERENCE_NUM_THREADS")) != threads:
        raise EngineUnavailable(
            f"{source.where}: openvino runs {used} threads, wanted {threads}; load with threads={used}"
        )
    return RequestStage(openvino, compiled, source, runners)


class RequestStage:
    """One opened stage. Inputs are read where they lie; outputs are copies, the request writes there again."""

    def __init__(self, openvino: Any, compiled: Any, source: Source, runners: int) -> None:
        self._tensor = openvino.Tensor
        self._inputs = [compiled.input(v.name) for v in source.inputs]
        self._outputs = [compiled.output(v.name) for v in source.outputs]
        self._idle: SimpleQueue[Any] = SimpleQueue()
        for _ in range(runners):
            self._idle.put(compiled.create_infer_request())
        self._where = source.where

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Thread-safe; calls beyond `runners` wait for an idle request."""
        request = self._idle.get()
        try:
            for port, tensor in zip(self._inputs, inputs, strict=True):
                request.set_tensor(port, self._tensor(tensor.numpy(), shared_memory=True))
            request.infer()
            return [torch.from_numpy(request.get_tensor(port).data.copy()) for port in self._outputs]
        except RuntimeError as error:
            raise InternalError(f"{self._where}: openvino failed: {error}") from error
        finally:
            self._idle.put(request)
