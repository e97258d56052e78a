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
from voicehub_aot.errors import AotError, InputMismatch, UsageError, VersionUnsupported

BY_BRANCH = "guidance_by_branch"
WANTED = {
    "program": "one text, UTF-8: the name of a program, or its step count",
    "guidance": "one number",
    BY_BRANCH: "one text, UTF-8, as in 'text=3.0 speaker=5.0'",
    "seed": "one whole number, or one per row",
}


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
            request = {name: argument(name, array) for name, array in arguments.items()}
            if BY_BRANCH in request:
                request["guidance"] = request.pop(BY_BRANCH)
            latent = self._runtime.sample(**request)
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
    """An input tensor as `Runtime.sample` takes it; InputMismatch for one that holds something else.

    program: [1] text. guidance: [1]. guidance_by_branch: [1] text, "branch=scale branch=scale". seed: [1] or [B].
    Others are tensors.
    """
    try:
        if name == "program":
            text = _text(array)
            return int(text) if text.isdecimal() else text
        if name == BY_BRANCH:
            return {branch: float(scale) for branch, _, scale in (one.partition("=") for one in _text(array).split())}
        if name == "guidance":
            (scale,) = array.reshape(-1).tolist()
            return float(scale)
        if name == "seed":
            seeds = array.reshape(-1).tolist()
            return seeds if len(seeds) != 1 else int(seeds[0])
        return torch.tensor(array)  # a copy: the server owns the memory
    except (TypeError, ValueError, UnicodeDecodeError) as error:
        got = f"{array.dtype} {list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__
        raise InputMismatch(f"input {name!r} is {got}, wanted {WANTED.get(name, 'a numeric tensor')}") from error


def _text(array: Any) -> str:
    (value,) = array.reshape(-1).tolist()
    return value.decode() if isinstance(value, bytes) else str(value)
