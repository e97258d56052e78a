"""What is compiled: a module, and a description of its inputs that needs no code.

`RegionSpec` is data. It travels in the artifact's manifest, so the runtime can check, pad and pack a request
without importing the model. `Region` is the spec with the module beside it.

Vocabulary: "B" is the batch (rows); every other letter-string in a shape is the name of a `Dim`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from torch import nn

from voicehub_aot.errors import InternalError
from voicehub_aot.spec.guidance import LARGEST_FLOAT, Guidance

BATCH = "B"
EVALUATIONS = "N"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64, "bool": torch.bool}
LARGEST_SIZE = 10**9
LARGEST_INTEGER = 2**53  # every integer up to here is a float64, which JSON numbers often become


def _known_dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not known; known are {', '.join(DTYPES)}")
    return name


Name = Annotated[str, Field(min_length=1, max_length=256)]
Size = Annotated[int, Field(strict=True, ge=1, le=LARGEST_SIZE)]
Integer = Annotated[int, Field(strict=True, ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)]
Expression = Annotated[str, Field(pattern=r"^[A-Za-z0-9_ +*/(),-]{1,256}$")]  # of sizes, e.g. "2*frames + 1"


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
    min: Size = 1
    max: Size
    length: str | None = None
    extent: str | None = None
    doc: str

    @model_validator(mode="after")
    def _check(self) -> Dim:
        if self.min > self.max:
            raise ValueError(f"dimension {self.name!r}: min {self.min} exceeds max {self.max}")
        return self


class Input(_Data):
    """One argument of the region's module.

    pad: what the runtime writes beyond a row's extent and into bucket padding.
    low, high: range of valid integers, high exclusive.
    flag: a boolean that only guidance branches set; callers never pass it.
    shorter: a caller may pass fewer positions than the state has; the rest is padding (a prompt, say).
    branch: the one guidance branch that reads it; a request that does not run this branch may leave it out.
    optional: a caller may leave it out; it is `pad` everywhere then, and dims that are its alone have their least size.

    A boolean that is not a flag is a mask or a switch, which callers pass; what they do not reach is False.
    """

    name: Name
    shape: tuple[Name | Size, ...]
    dtype: Literal["float32", "int64", "bool"] = "float32"
    binding: Literal["TIME", "REQUEST", "STATE"]
    doc: str
    pad: float = Field(default=0.0, ge=-LARGEST_FLOAT, le=LARGEST_FLOAT)
    low: Integer = 0
    high: Integer = 2
    flag: bool = False
    shorter: bool = False
    optional: bool = False
    branch: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Input:
        """Rank and kind by binding: a TIME is float32 (1,), everything else has its rows first."""
        at = f"input {self.name!r}"
        if self.binding == "TIME" and (self.shape, self.dtype) != ((1,), "float32"):
            raise ValueError(f"{at}: a time is float32 (1,), got {self.dtype} {self.shape!r}")
        if self.binding != "TIME" and (self.shape[:1] != (BATCH,) or len(set(self.names)) < len(self.names)):
            raise ValueError(f"{at}: shape {self.shape!r}, wanted {BATCH!r} first and each name once")
        if self.binding == "STATE" and self.dtype != "float32":
            raise ValueError(f"{at}: a state is float32, got {self.dtype}")
        if self.low >= self.high:
            raise ValueError(f"{at}: no integer lies from {self.low} to below {self.high}")
        if self.dtype == "int64" and not (self.pad.is_integer() and abs(self.pad) <= LARGEST_INTEGER):
            raise ValueError(f"{at}: pad {self.pad!r}, wanted an integer")
        if self.flag and (self.shape, self.dtype, self.binding) != ((BATCH,), "bool", "REQUEST"):
            raise ValueError(f"{at}: a flag is a bool REQUEST of shape ({BATCH!r},)")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The named sizes of its shape."""
        return tuple(size for size in self.shape if isinstance(size, str))

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


class TensorSpec(_Data):
    """A tensor at a stage's border. shape: numbers, "B", "N" (evaluations), names of dims, or expressions of them."""

    name: Name
    shape: tuple[Annotated[int, Field(strict=True, ge=0, le=LARGEST_SIZE)] | Expression, ...]
    dtype: Annotated[str, AfterValidator(_known_dtype)]

    @property
    def stacked(self) -> bool:
        """Whether it holds the values of all evaluations, [N, ...]."""
        return self.shape[:1] == (EVALUATIONS,)


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

    @model_validator(mode="after")
    def _check(self) -> RegionSpec:
        for problem in _problems(self):
            raise ValueError(f"region {self.name!r}: {problem}")
        return self

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


def _problems(spec: RegionSpec) -> Iterator[str]:
    """What the runtime relies on and this spec does not have."""
    inputs, dims = {i.name: i for i in spec.inputs}, {d.name: d for d in spec.dims}
    if len(inputs) < len(spec.inputs) or len(dims) < len(spec.dims) or len(set(spec.outputs)) < len(spec.outputs):
        yield "an input, dimension or output is given twice"
    if not spec.outputs or [i.binding for i in spec.inputs].count("STATE") != 1:
        yield "wanted an output and exactly one STATE input"
    if "TIME" not in {i.binding for i in spec.inputs}:
        yield "wanted a TIME input"
    if reserved := {BATCH, EVALUATIONS, "batch", ""} & set(dims):
        yield f"the dimension {min(reserved)!r} has a name that means something else, or none"
    for item in spec.inputs:
        if unknown := [n for n in item.names if n != BATCH and n not in dims]:
            yield f"input {item.name!r} has the unknown dimensions {unknown!r}; known are {list(dims)!r}"
    if spec.main_dim is not None and spec.main_dim not in dims:
        yield f"main_dim {spec.main_dim!r} is not a dimension; known are {list(dims)!r}"
    counts = [n for d in spec.dims for n in (d.length, d.extent) if n is not None]
    for name in counts:
        count = inputs.get(name)
        if count is None or (count.shape, count.dtype, count.binding) != ((BATCH,), "int64", "REQUEST"):
            yield f"the length or extent {name!r} is not an int64 REQUEST input of shape ({BATCH!r},)"
    if len(set(counts)) < len(counts):
        yield f"lengths and extents {counts!r}: an input serves twice"
    for branch in spec.guidance.branches if spec.guidance else ():
        if unknown := sorted(n for n in branch.flags if n not in inputs or not inputs[n].flag):
            yield f"guidance branch {branch.name!r} sets {unknown!r}, which are not flags of the region"
    yield from _call_problems(spec, inputs, set(dims))


def _call_problems(spec: RegionSpec, inputs: Mapping[str, Input], dims: set[str]) -> Iterator[str]:
    """What the denoiser relies on: every argument feeds something of its kind, and one of them is the state.

    A region without a call has no denoiser.
    """
    parameters = spec.call.parameters
    times = {i.name for i in spec.inputs if i.binding == "TIME"}
    tensors = {i.name for i in (spec.state, *spec.conditioning)}
    booleans = {i.name for i in spec.request if i.dtype == "bool" and i.shape == (BATCH,)}
    known = {"tensor": tensors, "mask": dims, "time": times, "switch": booleans, "flag": booleans}
    if len({p.name for p in parameters}) < len(parameters):
        yield "the call has two arguments of one name"
    if parameters and spec.state.name not in {p.feeds for p in parameters if p.kind == "tensor"}:
        yield f"no argument of the call feeds the state {spec.state.name!r}"
    for parameter in parameters:
        wanted = known.get(parameter.kind)
        optional = parameter.kind == "time" and parameter.feeds is None
        if wanted is not None and parameter.feeds not in wanted and not optional:
            yield f"argument {parameter.name!r} of the call feeds {parameter.feeds!r}, wanted one of {sorted(wanted)!r}"


@dataclass(frozen=True)
class Region:
    """module(**{input.name: tensor}) -> the velocity, or a tuple of `spec.outputs`."""

    spec: RegionSpec
    module: nn.Module


def example_mask(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """A mask or switch, random but for its first position: a mask that reaches nothing is not an example."""
    mask = torch.rand(list(shape), generator=generator, dtype=torch.float32, device="cpu") < 0.5
    if len(shape) > 1:
        mask[..., 0] = True
    return mask


def row_blocks(wanted: Sequence[int], rows: int) -> torch.Tensor:
    """Places of these blocks, of `rows` rows each, in a packed batch: its guidance branches, say. [N] int64."""
    return torch.cat([torch.arange(block * rows, (block + 1) * rows, device="cpu") for block in wanted])
