"""Back ends that compile and run one stage.

A new engine is one file here with the names of `Engine`, one test, and its line in ENGINES.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch

from voicehub_aot.errors import EngineUnavailable
from voicehub_aot.spec.region import TensorSpec
from voicehub_aot.spec.target import Target

if TYPE_CHECKING:
    from torch import fx

ENGINES = (
    "aoti",
    "onnxruntime",
    "openvino",
    "tensorrt",
)
Weights = Literal["packed", "shared"]
Span = tuple[int, int]  # of a size: from, to, both included


@dataclass(frozen=True)
class StageCode:
    """One stage to compile.

    name: of its files, e.g. "step-frames128". program: exported, its weights under the region's names; sizes that may
    vary are symbols. examples: inputs whose sizes steer loop choices. spans: what each varying size must serve, by
    name: one span a promised bucket, ascending, without gaps. cache: a folder that outlives the build, for what makes
    later ones faster.
    """

    name: str
    program: torch.export.ExportedProgram
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    examples: tuple[torch.Tensor, ...]
    spans: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)
    cache: Path | None = None

    @cached_property
    def graph(self) -> fx.GraphModule:
        """The program as a flat graph with its weights as attributes."""
        return self.program.module(check_guards=False)

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        return {**dict(self.graph.named_parameters()), **dict(self.graph.named_buffers())}


@dataclass(frozen=True)
class Source:
    """One stage in an artifact whose digests were verified.

    root: the artifact. path: the engine's file or folder inside. digests: sha256 by file. constants: the weights it
    reads from the weight file, by name, checked for shape and dtype. where: for error texts. outside: the engine holds
    no weights, so `constants` must be all that it asks for. threads: to compute with; 0 = as many as torch has.
    """

    root: Path
    path: str
    digests: Mapping[str, str]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    constants: Mapping[str, torch.Tensor]
    where: str
    outside: bool = False
    threads: int = 0


class StageEngine(Protocol):
    """inputs: the stage's tensors in manifest order, contiguous, already checked. Returns its outputs in order.

    Outputs are fresh tensors that the caller owns; no input is written to.
    """

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]: ...


class Engine(Protocol):
    """What every module here offers.

    FUSES: linears of few rows come to it as reductions (`few_rows`), which it fuses.
    NATIVE: its code is bound to an instruction set and to torch's minor version. STATIC: it may be compiled for fixed
    sizes; otherwise its one engine serves every bucket. FORMAT: of its compiled stages; engines that share one find
    each other's in the cache where their settings agree. KERNEL_BYTES: what the process keeps for each packed matrix
    product at each new number of rows, until it ends; 0 = nothing. It decides how finely a ladder is divided.
    """

    NAME: str
    FUSES: bool
    NATIVE: bool
    STATIC: bool
    FORMAT: str
    KERNEL_BYTES: int

    def check(self) -> None:
        """Raises EngineUnavailable or MissingDependency if this machine cannot build or run it."""

    def check_build(self, cache: Path, target: Target) -> None:
        """Raises EngineUnavailable or UsageError, within seconds, if nothing can be compiled here.

        cache: where finished engines are kept.
        """

    def reads_weight_file(self, weights: Weights) -> bool:
        """False if compiled stages hold their weights."""

    def settings(self, code: StageCode, weights: Weights, target: Target) -> dict[str, Any]:
        """Everything but the graph that shapes the compiled code, as JSON: part of its key in the cache."""

    def versions(self) -> dict[str, str]:
        """Of the packages, beside torch, that its code needs or was made by."""

    def compile_stage(self, code: StageCode, weights: Weights, target: Target, folder: Path) -> None:
        """Compile into `folder`, which does not exist yet. Raises CompileFailed."""

    def install(self, compiled: Path, root: Path, name: str, target: Target) -> str:
        """Copy a compiled folder into an artifact that has its weight file; returns the path inside."""

    def open_stage(self, source: Source, runners: int) -> StageEngine:
        """runners: calls that may run at once. Raises LoadError, EngineUnavailable or MissingDependency."""


def get(name: str) -> Engine:
    """The engine of this name. Raises EngineUnavailable if there is none."""
    if name not in ENGINES:
        raise EngineUnavailable(f"engine {name!r} is not known; known are {', '.join(ENGINES)}")
    return cast(Engine, import_module(f"voicehub_aot.engines.{name}"))


def kernel_bytes(name: str, weights: Weights) -> int:
    """What the engine keeps for each product and new number of rows; nothing unless it holds packed weights."""
    engine = get(name)
    return 0 if engine.reads_weight_file(weights) else engine.KERNEL_BYTES


def code_digest(*files: str) -> str:
    """sha256 over source files: an engine's own code is part of what shapes its output."""
    return hashlib.sha256(b"".join(Path(f).read_bytes() for f in files)).hexdigest()
