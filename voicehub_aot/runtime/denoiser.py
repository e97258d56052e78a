"""A stand-in for upstream's denoiser, with upstream's call signature, for use inside upstream's own loop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from voicehub_aot.errors import InputMismatch
from voicehub_aot.runtime.request import numbers
from voicehub_aot.spec.region import Call, Parameter, RegionSpec


class Evaluating(Protocol):
    """What it drives: `Runtime.evaluate`."""

    @property
    def spec(self) -> RegionSpec: ...

    def evaluate(
        self,
        state: torch.Tensor,
        time: float | torch.Tensor,
        *,
        extra_times: Mapping[str, float | torch.Tensor] | None = None,
        packed: bool = False,
        flags: Mapping[str, bool] | None = None,
        guidance: float | Mapping[str, float] | None = None,
        **request: Any,
    ) -> torch.Tensor: ...


class Denoiser(nn.Module):
    """forward takes what upstream's denoiser takes (`RegionSpec.call`) and returns what it returns.

    Times must be evaluation times of a program in the artifact. It holds one empty parameter, so that code which
    asks a module for its device and dtype gets an answer.
    """

    def __init__(self, runtime: Evaluating) -> None:
        super().__init__()
        self.runtime = runtime
        self.anchor = nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu"), requires_grad=False)

    @property
    def device(self) -> torch.device:
        """Upstream's loop may ask for it, as of any of transformers' models."""
        return self.anchor.device

    @property
    def dtype(self) -> torch.dtype:
        """Upstream's loop may cast its tensors to it."""
        return self.anchor.dtype

    def clear_cache(self) -> None:
        """Upstream's loop calls it between requests; nothing is kept here."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Shapes as in upstream's call. Raises InputMismatch for what the call does not have."""
        spec = self.runtime.spec
        if not spec.call.parameters:
            raise InputMismatch(f"denoiser: region {spec.name!r} states no call of upstream's; use Runtime.evaluate")
        given = bind(spec.call, args, kwargs)
        state = given.tensor[spec.state.name]
        request: dict[str, Any] = {n: t for n, t in given.tensor.items() if n != spec.state.name}
        request.update(_reach(spec, given))
        request.update({n: torch.full((len(state),), value, device="cpu") for n, value in given.switches.items()})
        if spec.call.returns == "velocity":
            flags = {n: v for n, v in given.flags.items() if v}
            options: Any = {"extra_times": given.extra_times, "packed": given.packed, "guidance": given.guidance}
            return self.runtime.evaluate(state, given.time(), flags=flags, **options, **request)
        scales = spec.guidance.scales(None) if spec.guidance else None
        velocity = self.runtime.evaluate(state, given.time(), guidance=scales, **request)
        steps = given.steps.to(torch.float32).reshape(-1, *(1,) * (state.dim() - 1))
        return (state + velocity / steps) * given.state_mask(spec)


class Bound:
    """Upstream's arguments sorted by what they feed."""

    def __init__(self) -> None:
        self.tensor: dict[str, torch.Tensor] = {}
        self.masks: dict[str, torch.Tensor] = {}
        self.flags: dict[str, bool] = {}
        self.packed = False
        self.guidance: float | None = None
        self.clock: torch.Tensor | None = None
        self.extra_times: dict[str, torch.Tensor] = {}
        self.switches: dict[str, bool] = {}
        self.steps = torch.ones(1, dtype=torch.float32, device="cpu")

    def time(self) -> torch.Tensor:
        if self.clock is None:
            raise InputMismatch("denoiser: no time was given")
        if 1 not in (self.clock.numel(), self.steps.numel()) and self.clock.numel() != self.steps.numel():
            raise InputMismatch(f"denoiser: {self.clock.numel()} steps of {self.steps.numel()} totals; wanted as many")
        return self.clock / self.steps

    def state_mask(self, spec: RegionSpec) -> torch.Tensor:
        mask = self.masks.get(spec.main_dim or "")
        if mask is None:
            return torch.ones(1, dtype=torch.float32, device="cpu")
        shape = [-1 if s == spec.main_dim else 1 for s in spec.state.shape[1:]]
        return mask.to(torch.float32).reshape(len(mask), *shape)


def bind(call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bound:
    """Positional and keyword arguments -> `Bound`, as Python would bind them to upstream's signature."""
    names = [p.name for p in call.parameters]
    unknown = sorted(set(kwargs) - set(names))
    if len(args) > len(names) or unknown:
        raise InputMismatch(f"denoiser: unknown arguments {unknown or args[len(names) :]!r}; wanted {names}")
    twice = sorted(set(kwargs) & set(names[: len(args)]))
    if twice:
        raise InputMismatch(f"denoiser: {twice} are given by position and by name; give each once")
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    missing = [p.name for p in call.parameters if p.required and p.name not in values]
    if missing:
        raise InputMismatch(f"denoiser: missing {missing}; wanted {names}")
    bound = Bound()
    for parameter in call.parameters:
        _sort(bound, parameter, values.get(parameter.name, parameter.default))
    return bound


def _sort(bound: Bound, parameter: Parameter, value: Any) -> None:
    feeds = parameter.feeds or ""
    match parameter.kind:
        case "tensor":
            bound.tensor[feeds] = value
        case "mask" if value is not None:
            bound.masks[feeds] = value
        case "switch":
            bound.switches[feeds] = bool(value)
        case "flag":
            bound.flags[feeds] = bool(value)
        case "scale" if value != 1:
            bound.guidance = _one_number(parameter.name, value) - 1.0
        case "packed":
            bound.packed = bool(value)
        case "time" if feeds:
            bound.extra_times[feeds] = _numbers(parameter.name, value)
        case "time" | "step":
            bound.clock = _numbers(parameter.name, value)
        case "steps":
            bound.steps = _numbers(parameter.name, value)
        case _:
            pass


def _numbers(name: str, value: Any) -> torch.Tensor:
    found = numbers(value)
    if found is None:
        raise InputMismatch(f"denoiser: {name}={value!r:.80}, wanted a finite number or a tensor [] or [B]")
    return torch.tensor(found, dtype=torch.float32, device="cpu")


def _one_number(name: str, value: Any) -> float:
    """A number that every row shares."""
    distinct = set(_numbers(name, value).tolist())
    if len(distinct) != 1:
        raise InputMismatch(f"denoiser: {name} has the values {sorted(distinct)}, wanted one for all rows")
    return float(distinct.pop())


def _size(spec: RegionSpec, given: Bound, dim: str) -> int | None:
    """How large the tensors are in `dim`; None where no tensor tells."""
    for item in spec.inputs:
        tensor = given.tensor.get(item.name)
        if dim in item.shape and isinstance(tensor, torch.Tensor) and tensor.dim() == len(item.shape):
            return tensor.shape[item.shape.index(dim)]
    return None


def _reach(spec: RegionSpec, given: Bound) -> dict[str, list[int]]:
    """Lengths from the prefix masks; extents the whole tensor, as upstream computes ragged batches."""
    reach: dict[str, list[int]] = {}
    for dim in spec.dims:
        mask = given.masks.get(dim.name)
        if dim.length and mask is not None:
            size = _size(spec, given, dim.name)
            if not isinstance(mask, torch.Tensor) or mask.dim() < 2 or math.prod(mask.shape[1:]) != size:
                got = list(mask.shape) if isinstance(mask, torch.Tensor) else f"a {type(mask).__name__}"
                raise InputMismatch(f"denoiser: the mask of {dim.name} is {got}, wanted [B, {size}] or [B, 1, {size}]")
            rows = mask.flatten(1).to(torch.bool)
            lengths = rows.sum(1)
            if not torch.equal(rows, torch.arange(rows.shape[1], device="cpu") < lengths[:, None]):
                raise InputMismatch(f"denoiser: the mask of {dim.name} is not a prefix mask; real positions come first")
            reach[dim.length] = lengths.tolist()
            if dim.extent:
                reach[dim.extent] = [rows.shape[1]] * rows.shape[0]
    return reach
