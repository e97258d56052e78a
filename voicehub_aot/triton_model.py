"""An artifact behind Triton Inference Server's Python back end.

`voicehub-aot export --format triton-repository` copies this file to MODEL/1/model.py, beside the artifact that the
parameter "artifact" in MODEL/config.pbtxt names. The server's Python needs voicehub-aot installed.

Requests are answered one after another, each with all its rows as one batch: on a processor, merging requests gains
no throughput, and a wrong one would fail its neighbours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from voicehub_aot import load
from voicehub_aot.errors import AotError, UsageError, VersionUnsupported


class TritonPythonModel:
    """The name and the methods that the back end calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """args["model_config"]: config.pbtxt as JSON. An error here is the server's reason not to load the model."""
        check_arrays()
        given = json.loads(args["model_config"])["parameters"]
        parameters = {name: value["string_value"] for name, value in given.items()}
        threads = int(parameters["threads"]) if "threads" in parameters else None
        self._runtime = load(Path(__file__).with_name(parameters["artifact"]), threads=threads)

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response for each request, in order."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        import triton_python_backend_utils as triton  # exists inside the server alone

        try:
            arguments = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            latent = self._runtime.sample(**{name: argument(name, array) for name, array in arguments.items()})
        except Exception as error:  # one that leaves this method would fail the requests beside it
            wrong = triton.TritonError.INVALID_ARG if isinstance(error, UsageError) else triton.TritonError.INTERNAL
            text = f"{type(error).__name__}: {error}"
            if not isinstance(error, AotError):
                text = f"InternalError: {text}; this is our bug, please report it"
            return triton.InferenceResponse(error=triton.TritonError(text, wrong))
        return triton.InferenceResponse(output_tensors=[triton.Tensor("latent", latent.contiguous().numpy())])


def check_arrays() -> None:
    """Raises VersionUnsupported where the back end was built for NumPy 1 and finds NumPy 2.

    It then hands over arrays that repeat their first element, without a word (seen with Triton 2.51 and NumPy 2.4).
    """
    import triton_python_backend_utils as triton

    wanted = [0.0, 1.0, 2.0]
    got = triton.Tensor.from_dlpack("check", torch.tensor(wanted)).as_numpy().tolist()
    if got != wanted:
        raise VersionUnsupported(
            f"this server's Python back end reads {wanted} as {got} with the NumPy installed for it; "
            "install 'numpy<2' there, or take a newer server"
        )


def argument(name: str, array: Any) -> Any:
    """An input tensor as `Runtime.sample` takes it: program [1] text, guidance [1], seed [1] or [B], else a tensor."""
    if name == "program":
        text = array.reshape(-1)[0].decode()
        return int(text) if text.isdecimal() else text
    if name == "guidance":
        return float(array.reshape(-1)[0])
    if name == "seed":
        return array.tolist() if array.size != 1 else int(array.reshape(-1)[0])
    return torch.tensor(array)  # a copy: the server owns the memory
