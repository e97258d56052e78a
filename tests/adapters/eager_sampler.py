"""A stand-in for the runtime: runs a region's module eagerly behind the `Sampler` protocol of the adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from voicehub_aot.errors import InputMismatch
from voicehub_aot.guidance import EQUATIONS, is_off
from voicehub_aot.kernels.combine import combine
from voicehub_aot.program import STATE, Evaluate, Program
from voicehub_aot.region import Dim, Region


class EagerSampler:
    def __init__(self, region: Region, programs: Iterable[Program | None] = ()) -> None:
        self.spec, self.module = region.spec, region.module
        self.programs = {p.name: p for p in programs if p is not None}

    @torch.no_grad()
    def _run(self, state: torch.Tensor, time: Any, flags: Mapping[str, bool], request: Mapping[str, Any]) -> Any:
        values = {k: torch.as_tensor(v) for k, v in request.items() if v is not None}
        values[self.spec.state.name] = state
        values[self.spec.time.name] = torch.as_tensor(time, dtype=torch.float32).reshape(1)
        rows = state.shape[0]
        for dim in self.spec.dims:
            size = self._size(dim, values)
            if dim.length is not None:
                values.setdefault(dim.length, torch.full((rows,), size))
            if dim.extent is not None:
                values.setdefault(dim.extent, values[dim.length] if dim.length else torch.full((rows,), size))
            self._write_padding(dim, size, values)
        values |= {name: torch.full((rows,), value) for name, value in flags.items()}
        return self.module(**{i.name: values[i.name] for i in self.spec.inputs})

    def _size(self, dim: Dim, values: Mapping[str, torch.Tensor]) -> int:
        for item in self.spec.inputs:
            if dim.name in item.shape and item.name in values:
                return values[item.name].shape[item.shape.index(dim.name)]
        raise InputMismatch(f"no input has dimension {dim.name!r}")

    def _write_padding(self, dim: Dim, size: int, values: dict[str, torch.Tensor]) -> None:
        reach = dim.extent or dim.length
        for item in self.spec.inputs:
            if reach is not None and dim.name in item.shape and item.name in values:
                axis = item.shape.index(dim.name)
                beyond = torch.arange(size) >= values[reach][:, None]
                beyond = beyond.reshape([-1, *[1] * (axis - 1), size, *[1] * (len(item.shape) - axis - 1)])
                values[item.name] = values[item.name].masked_fill(beyond, item.pad)

    def _first(self, out: Any) -> torch.Tensor:
        return out if isinstance(out, torch.Tensor) else out[0]

    def evaluate(
        self,
        state: torch.Tensor,
        time: float | torch.Tensor,
        *,
        packed: bool = False,
        flags: Mapping[str, bool] | None = None,
        **request: Any,
    ) -> torch.Tensor:
        branches = range(len(self.spec.guidance.branches)) if packed and self.spec.guidance else (0,)
        runs = [{**self.spec.branch_flags(b), **(flags or {})} for b in branches]
        return torch.cat([self._first(self._run(state, time, run, request)) for run in runs])

    def exposed(self, state: torch.Tensor, **request: Any) -> dict[str, torch.Tensor]:
        out = self._run(state, 0.0, self.spec.branch_flags(0), request)
        return dict(zip(self.spec.outputs[1:], () if isinstance(out, torch.Tensor) else out[1:], strict=True))

    def guided(self, state: torch.Tensor, time: Any, scale: float | None, **request: Any) -> torch.Tensor:
        guidance = self.spec.guidance
        scale = guidance.scale if scale is None and guidance else scale or 0.0
        if guidance is None or is_off(guidance, scale):
            return self.evaluate(state, time, **request)
        return EQUATIONS[guidance.equation](self.evaluate(state, time, packed=True, **request), scale)

    def trajectory(
        self, *, noise: torch.Tensor, program: str | None = None, guidance: float | None = None, **request: Any
    ) -> Iterator[torch.Tensor]:
        chosen = self.programs[program] if program else next(iter(self.programs.values()))
        registers = {STATE: noise}
        for step in chosen.instructions:
            if isinstance(step, Evaluate):
                scale = guidance if step.guided else 0.0
                registers[step.out] = self.guided(registers[step.x], chosen.times[step.row], scale, **request)
            else:
                registers[step.out] = combine([(registers[r], c) for r, c in step.terms])
                if step.out == STATE:
                    yield registers[STATE]

    def denoiser(self) -> nn.Module:
        return _Denoiser(self)


class _Denoiser(nn.Module):
    """Upstream's call, as `spec.call` declares it."""

    def __init__(self, sampler: EagerSampler) -> None:
        super().__init__()
        self.sampler = sampler

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        spec = self.sampler.spec
        given = dict(zip((p.name for p in spec.call.parameters), args, strict=False)) | kwargs
        request: dict[str, Any] = {}
        flags: dict[str, bool] = {}
        packed, time, step, steps, real = False, None, None, None, None
        for p in spec.call.parameters:
            value = given.get(p.name, p.default)
            if p.kind == "tensor":
                request[str(p.feeds)] = value
            elif p.kind == "flag":
                flags[str(p.feeds)] = bool(value)
            elif p.kind == "packed":
                packed = bool(value)
            elif p.kind == "mask" and value is not None:
                dim, size = spec.dim(str(p.feeds)), value.shape[-1]
                lengths = value.reshape(-1, size).sum(-1).long()
                if dim.length is not None:
                    request[dim.length] = lengths
                if dim.extent is not None:
                    request[dim.extent] = torch.full_like(lengths, size)
                if dim.name == spec.main_dim:
                    real = value
            time = value if p.kind == "time" else time
            step = value if p.kind == "step" else step
            steps = value if p.kind == "steps" else steps
        if step is not None and steps is not None:
            time = step / steps
        state, time = request.pop(spec.state.name), torch.as_tensor(time).reshape(-1)
        if not bool((time == time[0]).all()):
            raise InputMismatch(f"one time for all rows is wanted, got {time.tolist()!r}")
        if spec.call.returns == "velocity":
            chosen = None if packed else flags
            return self.sampler.evaluate(state, time[0], packed=packed, flags=chosen, **request)
        assert steps is not None
        advanced = state + self.sampler.guided(state, time[0], None, **request) / steps.reshape(-1, 1, 1)
        masked: torch.Tensor = advanced if real is None else advanced * real
        return masked
