"""The TensorRT engine's plans: profiles, the ONNX graph for the parser, and the record beside a plan.

Nothing here needs TensorRT or a GPU; building and running are in tensorrt.py.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import sympy
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.torch import save_file

from voicehub_aot.artifacts import store
from voicehub_aot.engines import Source, Span, StageCode, _onnx
from voicehub_aot.errors import (
    ArtifactCorrupt,
    CompileFailed,
    NoBucketFits,
    TargetMismatch,
    VersionUnsupported,
)
from voicehub_aot.spec.region import TensorSpec

if TYPE_CHECKING:
    import onnx

RECORD = "plan.json"
PROFILES_AT_MOST = 16  # each is tuned and stored on its own
PRECISIONS = {1: "fp32", 10: "fp16", 11: "fp64", 16: "bf16"}  # by onnx.TensorProto.DataType


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Machine(_Data):
    """sm: compute capability, 90 = 9.0. tensorrt: its whole version; plans are not portable between two."""

    sm: int
    tensorrt: str


class Key(_Data):
    """What a plan was built for. precision: float types of the graph. graph: sha256 of the ONNX file, no weights."""

    machine: Machine
    precision: str
    graph: str

    @property
    def name(self) -> str:
        return f"sm{self.machine.sm}-trt{self.machine.tensorrt}-{self.precision}-{self.graph[:16]}"


class Shapes(_Data):
    """Of one input: the smallest, the one to tune for, the largest."""

    least: tuple[int, ...]
    likely: tuple[int, ...]
    most: tuple[int, ...]

    def hold(self, shape: Sequence[int]) -> bool:
        return len(shape) == len(self.least) and all(
            a <= n <= b for a, n, b in zip(self.least, shape, self.most, strict=True)
        )


Profile = dict[str, Shapes]  # by input


class Plan(_Data):
    """The record beside a plan. workspace_bytes: device memory that one call needs, by profile."""

    key: Key
    profiles: tuple[Profile, ...]
    workspace_bytes: tuple[int, ...]


def profiles(inputs: Sequence[TensorSpec], spans: Mapping[str, Sequence[Span]]) -> tuple[Profile, ...]:
    """One per combination of the spans that the inputs depend on, tuned for the largest size of each.

    Neighbouring spans are merged where there would be more than PROFILES_AT_MOST. Raises CompileFailed for a size
    without a span.
    """
    words = {
        word: sympy.Symbol(word) for v in inputs for size in v.shape for word in re.findall(r"[A-Za-z_]\w*", str(size))
    }
    sizes = {size: sympy.sympify(size, locals=words) for v in inputs for size in v.shape}
    used = sorted({symbol.name for size in sizes.values() for symbol in size.free_symbols})
    unknown = [name for name in used if name not in spans]
    if unknown:
        raise CompileFailed(f"inputs {[v.name for v in inputs]}: no range is known for {', '.join(unknown)}")
    chosen = {name: tuple(spans[name]) for name in used}
    while prod(map(len, chosen.values())) > PROFILES_AT_MOST:
        longest = max(chosen, key=lambda name: len(chosen[name]))
        chosen[longest] = _merged(chosen[longest])

    def shape(value: TensorSpec, at: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(int(sizes[size].subs(at)) for size in value.shape)

    result = []
    for combination in product(*chosen.values()):
        least = {name: span[0] for name, span in zip(chosen, combination, strict=True)}
        most = {name: span[1] for name, span in zip(chosen, combination, strict=True)}
        result.append(
            {v.name: Shapes(least=shape(v, least), likely=shape(v, most), most=shape(v, most)) for v in inputs}
        )
    return tuple(result)


def _merged(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Every two neighbours as one."""
    return tuple((spans[i][0], spans[min(i + 1, len(spans) - 1)][1]) for i in range(0, len(spans), 2))


def precision(graph: onnx.ModelProto) -> str:
    """The float types values have, e.g. "fp32" or "bf16-fp32". A strongly typed network keeps each where it stands."""
    types = {v.type.tensor_type.elem_type for v in (*graph.graph.input, *graph.graph.value_info, *graph.graph.output)}
    types |= {tensor.data_type for tensor in graph.graph.initializer}
    types |= {a.i for n in graph.graph.node if n.op_type == "Cast" for a in n.attribute if a.name == "to"}
    return "-".join(sorted(PRECISIONS[t] for t in types if t in PRECISIONS))


@dataclass(frozen=True)
class Graph:
    """The ONNX file with its weights beside it, ready for the parser. weights: initializers in the weight file."""

    path: Path
    digest: str
    precision: str
    weights: tuple[str, ...]


def write_graph(code: StageCode, scratch: Path) -> Graph:
    """What the onnxruntime engine runs, but for convolutions over frames. Raises CompileFailed or MissingDependency.

    Those stay gathers, which TensorRT fuses: whether it refits a convolution through a reshape of the weight was not
    tried.
    """
    _onnx.require()
    import onnx

    bare = scratch / "bare"
    _onnx.write(code, bare, composed=(torch.ops.voicehub_aot.depthwise.default,))
    save_file({n: t.detach().clone(memory_format=torch.contiguous_format) for n, t in code.weights.items()},
              scratch / store.WEIGHTS)  # fmt: skip
    path = scratch / _onnx.place(bare, scratch, code.name)
    proto = onnx.load(path, load_external_data=False)
    outside = [t.name for t in proto.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    digest = hashlib.sha256((bare / _onnx.MODEL).read_bytes()).hexdigest()
    return Graph(path, digest, precision(proto), tuple(outside))


def replace_file(path: Path, data: bytes) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_plan(folder: Path, plan: Plan, data: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / f"{plan.key.name}.plan", data)
    replace_file(folder / RECORD, plan.model_dump_json(indent=1).encode())


def read_plan(source: Source, machine: Machine) -> tuple[Plan, Path]:
    """The record and the plan's file, checked. Raises ArtifactCorrupt, TargetMismatch or VersionUnsupported."""
    where, record = source.where, f"{source.path}/{RECORD}"
    if record not in source.digests:
        raise ArtifactCorrupt(f"{where}: {RECORD} is missing; rebuild the artifact")
    try:
        plan = Plan.model_validate_json((source.root / record).read_bytes())
    except (OSError, ValidationError) as error:
        raise ArtifactCorrupt(
            f"{where}: {RECORD} is not the record of a plan ({error}); rebuild the artifact"
        ) from error
    file = f"{source.path}/{plan.key.name}.plan"
    if file not in source.digests:
        raise ArtifactCorrupt(
            f"{where}: the record tells of {plan.key.name}.plan, which is missing; rebuild the artifact"
        )
    wanted = {v.name: len(v.shape) for v in source.inputs}
    if any({n: len(s.most) for n, s in profile.items()} != wanted for profile in plan.profiles):
        raise ArtifactCorrupt(
            f"{where}: the plan's inputs are not the stage's {', '.join(wanted)}; rebuild the artifact"
        )
    if len(plan.workspace_bytes) != len(plan.profiles):
        raise ArtifactCorrupt(f"{where}: the record lacks a profile's workspace; rebuild the artifact")
    built = plan.key.machine
    if built.sm != machine.sm:
        raise TargetMismatch(
            f"{where}: the plan is for GPUs of sm{built.sm}, this one is sm{machine.sm}; rebuild it here"
        )
    if built.tensorrt != machine.tensorrt:
        raise VersionUnsupported(
            f"{where}: the plan is TensorRT {built.tensorrt}'s, this is {machine.tensorrt}; "
            "rebuild it, or install that version"
        )
    return plan, source.root / file


def profile_for(plan: Plan, shapes: Mapping[str, Sequence[int]], where: str) -> int:
    """The first profile that holds all shapes; NoBucketFits if there is none."""
    for number, profile in enumerate(plan.profiles):
        if all(profile[name].hold(shape) for name, shape in shapes.items()):
            return number
    beyond = [
        f"{name} {tuple(shape)} (largest {max(p[name].most for p in plan.profiles)})"
        for name, shape in shapes.items()
        if not any(p[name].hold(shape) for p in plan.profiles)
    ]
    raise NoBucketFits(
        f"{where}: no optimisation profile holds {', '.join(beyond or shapes)}; rebuild with larger --buckets, "
        "which name the batch too, as in batch=1,8"
    )
