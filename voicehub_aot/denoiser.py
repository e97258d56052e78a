"""A stand-in for upstream's denoiser, with upstream's call signature, for use inside upstream's own loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from voicehub_aot.errors import InputMismatch
from voicehub_aot.region import Call, Parameter, RegionSpec


class Evaluating(Protocol):
    """What it drives: `Runtime.evaluate`."""

    @property
    def spec(self) -> RegionSpec: ...

    def evaluate(
        self,
        state: torch.Tensor,
        time: float | torch.Tensor,
        *,
        packed: bool = False,
        flags: Mapping[str, bool] | None = None,
        guidance: float | None = None,
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
        self.anchor = nn.Parameter(torch.empty(0), requires_grad=False)

    def clear_cache(self) -> None:
        """Upstream's loop calls it between requests; nothing is kept here."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Shapes as in upstream's call. Raises InputMismatch for what the call does not have."""
        spec = self.runtime.spec
        given = bind(spec.call, args, kwargs)
        state = given.tensor[spec.state.name]
        request: dict[str, Any] = {n: t for n, t in given.tensor.items() if n != spec.state.name}
        request.update(_reach(spec, given, state))
        if spec.call.returns == "velocity":
            flags = {n: v for n, v in given.flags.items() if v}
            return self.runtime.evaluate(state, given.time(), packed=given.packed, flags=flags, **request)
        scale = spec.guidance.scale if spec.guidance else None
        velocity = self.runtime.evaluate(state, given.time(), guidance=scale, **request)
        steps = given.steps.to(torch.float32).reshape(-1, *(1,) * (state.dim() - 1))
        return (state + velocity / steps) * given.state_mask(spec)


class Bound:
    """Upstream's arguments sorted by what they feed."""

    def __init__(self) -> None:
        self.tensor: dict[str, torch.Tensor] = {}
        self.masks: dict[str, torch.Tensor] = {}
        self.flags: dict[str, bool] = {}
        self.packed = False
        self.clock: torch.Tensor | None = None
        self.steps = torch.ones(1)

    def time(self) -> torch.Tensor:
        if self.clock is None:
            raise InputMismatch("denoiser: no time was given")
        return self.clock.to(torch.float32) / self.steps if self.steps.numel() else self.clock

    def state_mask(self, spec: RegionSpec) -> torch.Tensor:
        mask = self.masks.get(spec.main_dim)
        return torch.ones(1) if mask is None else mask.to(torch.float32)


def bind(call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bound:
    """Positional and keyword arguments -> `Bound`, as Python would bind them to upstream's signature."""
    names = [p.name for p in call.parameters]
    unknown = sorted(set(kwargs) - set(names))
    if len(args) > len(names) or unknown:
        raise InputMismatch(f"denoiser: unknown arguments {unknown or args[len(names) :]!r}; wanted {names}")
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
        case "flag":
            bound.flags[feeds] = bool(value)
        case "packed":
            bound.packed = bool(value)
        case "time" | "step":
            bound.clock = torch.as_tensor(value, dtype=torch.float32).reshape(-1)
        case "steps":
            bound.steps = torch.as_tensor(value, dtype=torch.float32).reshape(-1)
        case _:
            pass


def _reach(spec: RegionSpec, given: Bound, state: torch.Tensor) -> dict[str, list[int]]:
    """Lengths from the prefix masks; extents the whole tensor, as upstream computes ragged batches."""
    reach: dict[str, list[int]] = {}
    for dim in spec.dims:
        mask = given.masks.get(dim.name)
        if dim.length and mask is not None:
            rows = mask.reshape(mask.shape[0], -1).to(torch.bool)
            lengths = rows.sum(1)
            if not torch.equal(rows, torch.arange(rows.shape[1]) < lengths[:, None]):
                raise InputMismatch(f"denoiser: the mask of {dim.name} is no prefix mask; real positions come first")
            reach[dim.length] = lengths.tolist()
            if dim.extent:
                reach[dim.extent] = [rows.shape[1]] * rows.shape[0]
    return reach
