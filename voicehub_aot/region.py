"""What is compiled: a module, and a description of its inputs that needs no code.

`RegionSpec` is data. It travels in the artifact's manifest, so the runtime can check, pad and pack a request
without importing the model. `Region` is the spec with the module beside it.

Vocabulary: "B" is the batch (rows); every other letter-string in a shape is the name of a `Dim`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from voicehub_aot.errors import InternalError
from voicehub_aot.guidance import Guidance

BATCH = "B"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64, "bool": torch.bool}


class Binding(enum.Flag):
    """When a value is known. A value computed from several is known when all of them are: the union."""

    CONSTANT = 0
    TIME = enum.auto()
    REQUEST = enum.auto()
    STATE = enum.auto()


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Dim(_Data):
    """A dimension that varies between requests.

    length: the [B] int64 input that holds each row's valid size, if rows may be shorter than the tensor.
    extent: the [B] int64 input that says how far the row reaches for everything that looks beyond its valid size
        (attention keys, statistics, edge replication). It equals `length` for exact padding, which is the default;
        set to the tensor's size it reproduces what upstream computes for a ragged batch.
    """

    name: str
    min: int = 1
    max: int
    length: str | None = None
    extent: str | None = None
    doc: str


class Input(_Data):
    """One argument of the region's module.

    pad: what the runtime writes beyond a row's extent and into bucket padding.
    low, high: range of valid integers, high exclusive.
    flag: a boolean that only guidance branches set; callers never pass it.
    shorter: a caller may pass fewer positions than the state has; the rest is padding (a prompt, say).
    optional: a caller may leave it out; it is `pad` everywhere then, and dims that are its alone have their least size.

    A boolean that is no flag is a mask or a switch, which callers pass; what they do not reach is False.
    """

    name: str
    shape: tuple[str | int, ...]
    dtype: Literal["float32", "int64", "bool"] = "float32"
    binding: Literal["TIME", "REQUEST", "STATE"]
    doc: str
    pad: float = 0.0
    low: int = 0
    high: int = 2
    flag: bool = False
    shorter: bool = False
    optional: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


class TensorSpec(_Data):
    """A tensor at a stage's border. shape: numbers, "B", "N" (evaluations), names of dims, or expressions of them."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


class Parameter(_Data):
    """One argument of upstream's call, and what it feeds.

    kind   tensor   the region input `feeds`, as it is
           mask     a prefix mask, True or 1 = real; its row sums are the length of dim `feeds`; None = all real.
                    The extent becomes the whole tensor, as upstream has it.
           time     [] or [B], the region's time; with `feeds`, that further time input, one value for all rows
           switch   a Python bool for the boolean input `feeds`, the same for every row
           step     [] or [B], numerator of the time; `steps` its denominator
           flag     a Python bool for the flag input `feeds`
           scale    a number w: guide by u + w (c - u), so that 1 is the first branch alone
           packed   a Python bool: evaluate every guidance branch and return them packed along the batch
           ignored  accepted and unused
    """

    name: str
    kind: Literal["tensor", "mask", "time", "step", "steps", "flag", "switch", "scale", "packed", "ignored"]
    feeds: str | None = None
    default: bool | float | None = None
    required: bool = True


class Call(_Data):
    """Upstream's call signature, in its order, so that our denoiser can stand in upstream's own loop.

    returns  velocity    the velocity of the first branch, or of all of them when `packed`
             next_state  (state + guided velocity / steps), masked by the row lengths
    """

    parameters: tuple[Parameter, ...]
    returns: Literal["velocity", "next_state"]
    source: str


class RegionSpec(_Data):
    """inputs: in the module's order, exactly one STATE; TIME inputs have shape (1,).

    The TIME input called "time", or the only one, is a program's `times`; further ones are its `extra_times`.
    main_dim: the dimension that lengths and buckets without a name mean; None if no size varies but the rows.
    outputs: the module's outputs. The first is the velocity, shaped like the state; the others are request
    values worth seeing (e.g. a text embedding), computed once per request.
    """

    name: str
    inputs: tuple[Input, ...]
    dims: tuple[Dim, ...]
    outputs: tuple[str, ...] = ("velocity",)
    guidance: Guidance | None = None
    call: Call
    main_dim: str | None = "frames"

    def input(self, name: str) -> Input:
        for item in self.inputs:
            if item.name == name:
                return item
        raise InternalError(f"region {self.name}: no input {name!r}")

    def dim(self, name: str) -> Dim:
        for item in self.dims:
            if item.name == name:
                return item
        raise InternalError(f"region {self.name}: no dimension {name!r}")

    @property
    def state(self) -> Input:
        return next(i for i in self.inputs if i.binding == "STATE")

    @property
    def time(self) -> Input:
        clocks = [i for i in self.inputs if i.binding == "TIME"]
        return next((i for i in clocks if i.name == "time"), clocks[0])

    @property
    def main(self) -> Dim | None:
        return None if self.main_dim is None else self.dim(self.main_dim)

    @property
    def request(self) -> tuple[Input, ...]:
        """Inputs known per request, branch flags included."""
        return tuple(i for i in self.inputs if i.binding == "REQUEST")

    @property
    def conditioning(self) -> tuple[Input, ...]:
        """What a caller passes by name: request inputs that are neither flags, lengths nor extents."""
        computed = {d.length for d in self.dims} | {d.extent for d in self.dims}
        return tuple(i for i in self.request if not i.flag and i.name not in computed)

    def branch_flags(self, branch: int) -> Mapping[str, bool]:
        """Flag values of one guidance branch; flags that the branch does not name are False."""
        flags = {i.name: False for i in self.inputs if i.flag}
        if self.guidance is not None:
            flags.update(self.guidance.branches[branch].flags)
        return flags


@dataclass(frozen=True)
class Region:
    """module(**{input.name: tensor}) -> the velocity, or a tuple of `spec.outputs`."""

    spec: RegionSpec
    module: nn.Module


def example_mask(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """A mask or switch, random but for its first position: a mask that reaches nothing is no example."""
    mask = torch.rand(list(shape), generator=generator, dtype=torch.float32, device="cpu") < 0.5
    if len(shape) > 1:
        mask[..., 0] = True
    return mask


def row_blocks(wanted: Sequence[int], rows: int) -> torch.Tensor:
    """Places of these blocks, of `rows` rows each, in a packed batch: its guidance branches, say. [N] int64."""
    return torch.cat([torch.arange(block * rows, (block + 1) * rows, device="cpu") for block in wanted])
