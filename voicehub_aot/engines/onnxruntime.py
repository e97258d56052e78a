"""ONNX Runtime: one session per stage over the artifact's one weight file.

One graph with varying sizes serves every bucket, so its weights are laid out for the matrix library once, when it is
opened. A session per bucket would each hold that layout again (Python cannot share it), and fixed sizes gain nothing.

The session's threads are as many as `load` was given. They spin within a call and stop with it: torch's own work
between two steps needs the same processors.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.dlpack import from_dlpack

from voicehub_aot.artifacts import store
from voicehub_aot.engines import Source, _memory, _onnx
from voicehub_aot.errors import ArtifactCorrupt, EngineUnavailable, InternalError, MissingDependency
from voicehub_aot.spec.target import Target

if TYPE_CHECKING:
    import onnxruntime

NAME = "onnxruntime"
FUSES = False
NATIVE = False
STATIC = False
FORMAT = _onnx.FORMAT
KERNEL_BYTES = 0

reads_weight_file = _onnx.reads_weight_file
settings = _onnx.settings
compile_stage = _onnx.compile_stage
install = _onnx.install

DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu")
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
ELEMENT_TYPES = {torch.float32: 1, torch.int64: 7, torch.bool: 9}  # onnx.TensorProto.DataType


def check() -> None:
    _runtime()
    _onnx.require()


def check_build(cache: Path, target: Target) -> None:
    """Nothing is compiled to code of this machine."""
    check()


def _runtime() -> Any:
    """The onnxruntime package. Raises MissingDependency, or EngineUnavailable if two installations broke each other."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # importing it would leave a file in TMPDIR, and send reports
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependency(
            f"the onnxruntime engine needs onnxruntime or onnxruntime-gpu: pip install 'voicehub-aot[onnx]' ({error})"
        ) from error
    if not hasattr(onnxruntime, "InferenceSession"):
        raise EngineUnavailable(
            f"onnxruntime is installed but broken: {' and '.join(DISTRIBUTIONS)} share one folder, and removing one "
            "damages the other; uninstall both, then install one"
        )
    return onnxruntime


def versions() -> dict[str, str]:
    return {"onnxruntime": str(_runtime().__version__), **_onnx.versions()}


def open_stage(source: Source, runners: int) -> SessionStage:
    return SessionStage(_session(source, "cpu"), source)


def _session(source: Source, device: str) -> onnxruntime.InferenceSession:
    """Raises EngineUnavailable if the device's provider is absent or did not take the graph; never another one."""
    ort = _runtime()
    provider = PROVIDERS[device]
    if provider not in ort.get_available_providers():
        raise EngineUnavailable(
            f"{source.where}: this onnxruntime ({ort.__version__}) has no {provider}; it has "
            f"{', '.join(ort.get_available_providers())}; install the distribution for {device!r}"
        )
    if source.path not in source.digests:
        raise ArtifactCorrupt(f"{source.where}: the graph is missing; rebuild the artifact")
    options = ort.SessionOptions()
    options.intra_op_num_threads = source.threads or torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.enable_mem_pattern = False  # plans memory for one set of sizes, and keeps it for every further one
    options.enable_cpu_mem_arena = False  # keeps the most it ever held
    if device != "cpu":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    values = [ort.OrtValue.ortvalue_from_numpy(tensor.numpy()) for tensor in source.constants.values()]
    for name, value in zip(source.constants, values, strict=True):
        options.add_initializer(name, value)
    try:
        session = ort.InferenceSession(str(source.root / source.path), options, providers=[provider])
    except Exception as error:  # onnxruntime's own exceptions have no common base but Exception
        raise ArtifactCorrupt(f"{source.where}: onnxruntime cannot open the graph ({error}); rebuild it") from error
    _onnx.check_border(
        source,
        {value.name: len(value.shape) for value in session.get_inputs()},
        {value.name: len(value.shape) for value in session.get_outputs()},
    )
    if session.get_providers()[0] != provider:
        raise EngineUnavailable(
            f"{source.where}: onnxruntime fell back from {provider} to {session.get_providers()[0]}; "
            "its libraries for this device are missing or do not match"
        )
    session.kept = values  # the session reads in place what it did not lay out anew
    for mapping in _memory.mappings(source.root / store.WEIGHTS):  # of matrices it now has its own layout
        _memory.release(mapping)
    return session


class SessionStage:
    """One opened stage. Inputs are read where they lie; outputs are what the session allocated."""

    def __init__(self, session: onnxruntime.InferenceSession, source: Source) -> None:
        self._session = session
        self._inputs, self._outputs = [v.name for v in source.inputs], [v.name for v in source.outputs]
        self._where = source.where

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Thread-safe: every call has its own binding."""
        binding = self._session.io_binding()
        for name, tensor in zip(self._inputs, inputs, strict=True):
            binding.bind_input(name, "cpu", 0, ELEMENT_TYPES[tensor.dtype], tensor.shape, tensor.data_ptr())
        for name in self._outputs:
            binding.bind_output(name, "cpu")
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # onnxruntime's own exceptions have no common base but Exception
            raise InternalError(f"{self._where}: onnxruntime failed: {error}") from error
        return [from_dlpack(value) for value in binding.get_outputs()]
