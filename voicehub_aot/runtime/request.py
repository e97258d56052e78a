"""One request, checked and laid out: every tensor right in rank, size, dtype and device before an engine sees it.

The runtime writes its own padding. Whatever a caller's buffer holds beyond a row's extent (NaN included) is never
read.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

import torch

from voicehub_aot.errors import InputMismatch
from voicehub_aot.spec.bucket import Fit
from voicehub_aot.spec.region import BATCH, Dim, Input, RegionSpec

SEEDS = (-(2**63), 2**64 - 1)  # what torch's generators take


@dataclass(frozen=True)
class Request:
    """state: [B, ...] padded to `sizes`. inputs: every request input but the branch flags, padded likewise.

    given: the caller's sizes; extents: per dim, the last position of each row that is read, plus one.
    """

    spec: RegionSpec
    state: torch.Tensor
    inputs: Mapping[str, torch.Tensor]
    given: Mapping[str, int]
    sizes: Mapping[str, int]
    extents: Mapping[str, tuple[int, ...]]

    @property
    def batch(self) -> int:
        return self.given[BATCH]

    def packed(self, branches: Sequence[int]) -> dict[str, torch.Tensor]:
        """Inputs for these guidance branches: rows [0, B) the first, [B, 2B) the second, with their flags."""
        inputs = {n: t.repeat(len(branches), *(1,) * (t.dim() - 1)) for n, t in self.inputs.items()}
        for item in self.spec.inputs:
            if item.flag:
                values = [self.spec.branch_flags(b)[item.name] for b in branches]
                inputs[item.name] = torch.tensor(values, device="cpu").repeat_interleave(self.batch)
        return inputs

    def crop(self, state: torch.Tensor) -> torch.Tensor:
        """A padded state -> the caller's size, zero beyond each row's extent."""
        item = self.spec.state
        for axis, dim in enumerate(item.shape):
            if isinstance(dim, str) and dim != BATCH:
                state = state.narrow(axis, 0, self.given[dim])
                state = state.clone() if axis == _first_named(item) else state
                for row, extent in enumerate(self.extents[dim]):
                    if extent < self.given[dim]:
                        state[row].narrow(axis - 1, extent, self.given[dim] - extent).zero_()
        return state


def _first_named(item: Input) -> int:
    return next(i for i, s in enumerate(item.shape) if isinstance(s, str) and s != BATCH)


def _left_out(item: Input, sizes: Mapping[str, int]) -> torch.Tensor:
    """What an optional input is when the caller does not pass it."""
    shape = [sizes[s] if isinstance(s, str) else s for s in item.shape]
    return torch.full(shape, item.pad, dtype=item.torch_dtype, device="cpu")


def integers(value: Any) -> list[int] | None:
    """One integer, a list or tuple of them, or an integer tensor [B] -> a list; None for anything else."""
    if isinstance(value, torch.Tensor):
        plain = value.layout == torch.strided and not (value.is_nested or value.is_quantized or value.is_meta)
        if not plain or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool or value.dim() > 1:
            return None
        value = value.reshape(-1).tolist()
    entries = list(value) if isinstance(value, Sequence) else [value]
    if any(isinstance(entry, bool) for entry in entries):
        return None
    try:
        return [operator.index(entry) for entry in entries]
    except TypeError:
        return None


def numbers(value: Any) -> list[float] | None:
    """One finite number, or a tensor or sequence [] or [B] of them -> a list; None for anything else."""
    if isinstance(value, torch.Tensor):
        plain = value.layout == torch.strided and not (value.is_nested or value.is_quantized or value.is_meta)
        if not plain or value.is_complex() or value.dtype == torch.bool or value.dim() > 1:
            return None
        value = value.detach().reshape(-1).tolist()
    entries = list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
    if any(isinstance(entry, bool) or not isinstance(entry, SupportsFloat) for entry in entries):
        return None
    try:
        result = [float(entry) for entry in entries]
    except (TypeError, ValueError, OverflowError):
        return None
    return result if result and all(map(math.isfinite, result)) else None


class RequestReader:
    """Turns a caller's arguments into a `Request` for one region."""

    def __init__(self, spec: RegionSpec, fit: Fit) -> None:
        self.spec, self.fit, self.where = spec, fit, fit.where

    def read(self, state: torch.Tensor, arguments: Mapping[str, Any], branches: Collection[int] = ()) -> Request:
        """state: [B, ...] noise or latent. arguments: conditioning, lengths and extents by name.

        branches: positions of the guidance branches that will run; what only others read may be left out. Raises
        InputMismatch naming the argument, what came and what is wanted, and NoBucketFits.
        """
        conditioning = self._conditioning(arguments, branches)
        given = self._sizes({self.spec.state.name: state, **conditioning})
        conditioning = {i.name: conditioning.get(i.name, _left_out(i, given)) for i in self.spec.conditioning}
        sizes = {**given, **self.fit.sizes(given)}
        lengths, extents = self._lengths(arguments, given)
        inputs = {}
        for item in self.spec.request:
            if item.name in lengths:
                inputs[item.name] = torch.tensor(lengths[item.name], dtype=torch.int64, device="cpu")
            elif item.name in conditioning:
                inputs[item.name] = self._lay_out(item, conditioning[item.name], given, sizes, extents)
        laid_out = self._lay_out(self.spec.state, state, given, sizes, extents)
        return Request(self.spec, laid_out, inputs, given, sizes, extents)

    def read_state(self, state: torch.Tensor, request: Request) -> torch.Tensor:
        """Another tensor like the request's state (a solver's further noise), checked and laid out as that was."""
        given = self._sizes({self.spec.state.name: state})
        wrong = [d for d in self.spec.state.shape if isinstance(d, str) and given[d] != request.given[d]]
        if wrong:
            raise InputMismatch(
                f"{self.where}: {self.spec.state.name} has {wrong[0]}={given[wrong[0]]}, "
                f"others have {wrong[0]}={request.given[wrong[0]]}"
            )
        return self._lay_out(self.spec.state, state, request.given, request.sizes, request.extents)

    def lengths_argument(self, lengths: Sequence[int] | torch.Tensor | None) -> dict[str, Any]:
        if lengths is None:
            return {}
        if self.spec.main is None:
            raise InputMismatch(
                f"{self.where}: lengths={lengths!r}, but rows of this model have no length; leave it out"
            )
        return {self.spec.main.length: lengths} if self.spec.main.length else {}

    def draw(
        self,
        seed: int | Sequence[int] | None,
        lengths: Sequence[int] | torch.Tensor | None,
        conditioning: Mapping[str, Any],
        draws: int,
    ) -> list[torch.Tensor]:
        """`draws` times the state's noise; each row from its own generator, one draw after the other."""
        item, main = self.spec.state, self.spec.main
        if seed is None:
            raise InputMismatch(f"{self.where}: give either noise or a seed with lengths")
        if main is None or main.name not in item.shape:
            rows = [t for t in conditioning.values() if isinstance(t, torch.Tensor) and t.dim()]
            numbers = [0] * (len(rows[0]) if rows else 0)
        else:
            numbers = self._valid_lengths(lengths, main)
        seeds = integers(seed) or []
        if not isinstance(seed, Sequence) and len(seeds) == 1:
            seeds = [seeds[0] + row for row in range(len(numbers))]
        if len(seeds) != len(numbers) or not all(SEEDS[0] <= s <= SEEDS[1] for s in seeds):
            raise InputMismatch(
                f"{self.where}: seed={seed!r}, wanted one integer or {len(numbers)}, one per row, of 64 bits"
            )
        whole = [max(numbers, default=0) if isinstance(s, str) else s for s in item.shape[1:]]
        drawn = [torch.zeros([len(numbers), *whole], dtype=torch.float32, device="cpu") for _ in range(draws)]
        for row, (own, number) in enumerate(zip(seeds, numbers, strict=True)):
            generator = torch.Generator("cpu").manual_seed(own)
            size = [number if isinstance(s, str) else s for s in item.shape[1:]]
            for noise in drawn:
                place = tuple(slice(n) for n in size)
                noise[row][place] = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
        return drawn

    def _valid_lengths(self, lengths: Sequence[int] | torch.Tensor | None, dim: Dim) -> list[int]:
        if lengths is None:
            raise InputMismatch(f"{self.where}: a seed needs lengths, one per row")
        numbers = integers(lengths)
        if numbers is None:
            raise InputMismatch(f"{self.where}: lengths={lengths!r}, wanted integers, one per row")
        for number in numbers:
            if not dim.min <= number <= dim.max:
                raise InputMismatch(f"{self.where}: length {number}, wanted {dim.min} to {dim.max} {dim.name}")
        return numbers

    def _conditioning(self, arguments: Mapping[str, Any], branches: Collection[int]) -> dict[str, torch.Tensor]:
        guidance = self.spec.guidance
        running = {guidance.branches[position].name for position in branches} if guidance else set()
        computed = {n for d in self.spec.dims for n in (d.length, d.extent) if n}
        wanted = {i.name: i for i in self.spec.conditioning}
        unknown = sorted(set(arguments) - set(wanted) - computed)
        needed = {n: i for n, i in wanted.items() if not i.optional and (i.branch is None or i.branch in running)}
        missing = sorted(n for n in needed if arguments.get(n) is None)
        if unknown or missing:
            parts = [f"unknown {unknown}" if unknown else "", f"missing {missing}" if missing else ""]
            raise InputMismatch(
                f"{self.where}: {', '.join(p for p in parts if p)}; this model takes {sorted(wanted)} "
                f"and optionally {sorted(computed)}"
            )
        return {n: self._check(item, arguments[n]) for n, item in wanted.items() if arguments.get(n) is not None}

    def _check(self, item: Input, tensor: Any) -> torch.Tensor:
        """Rank, dtype, device and fixed sizes; named sizes are checked once all are known."""
        wanted = f"{item.dtype} [{', '.join(map(str, item.shape))}] on the CPU"
        if not isinstance(tensor, torch.Tensor):
            raise InputMismatch(f"{self.where}: {item.name} is a {type(tensor).__name__}, wanted a tensor, {wanted}")
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            kind = "quantized" if tensor.is_quantized else kind
            raise InputMismatch(f"{self.where}: {item.name} is a {kind} tensor, wanted a plain one, {wanted}")
        got = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
        fixed = all(isinstance(w, str) or w == g for w, g in zip(item.shape, tensor.shape, strict=False))
        same = tensor.dim() == len(item.shape) and fixed and tensor.device.type == "cpu"
        if not same or tensor.dtype != item.torch_dtype:
            hint = "; convert it first" if same else ""
            raise InputMismatch(f"{self.where}: {item.name} is {got}, wanted {wanted}{hint}")
        return tensor

    def _sizes(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Named sizes: the state's first, then what only conditioning has; all tensors must agree."""
        state = self._check(self.spec.state, tensors[self.spec.state.name])
        given: dict[str, int] = {}
        for item in (self.spec.state, *(i for i in self.spec.conditioning if i.name in tensors)):
            tensor = state if item.binding == "STATE" else tensors[item.name]
            for axis, dim in enumerate(item.shape):
                if isinstance(dim, int):
                    continue
                size = tensor.shape[axis]
                wanted = given.setdefault(dim, size)
                if size != wanted and not (item.shorter and dim != BATCH and size < wanted):
                    raise InputMismatch(f"{self.where}: {item.name} has {dim}={size}, others have {dim}={wanted}")
        if given[BATCH] < 1:
            raise InputMismatch(f"{self.where}: {self.spec.state.name} has no rows; wanted B >= 1")
        return {**{dim.name: dim.min for dim in self.spec.dims}, **given}

    def _lengths(
        self, arguments: Mapping[str, Any], given: Mapping[str, int]
    ) -> tuple[dict[str, list[int]], dict[str, tuple[int, ...]]]:
        """Values of the length and extent inputs, and how far each dim of each row is read."""
        values: dict[str, list[int]] = {}
        extents: dict[str, tuple[int, ...]] = {}
        for dim in self.spec.dims:
            size, batch = given[dim.name], given[BATCH]
            full = [size] * batch
            lengths = full
            if dim.length:
                lengths = self._integers(dim.length, arguments.get(dim.length), full, dim.min, size, dim.name)
                values[dim.length] = lengths
            reach = lengths
            if dim.extent:
                reach = self._integers(dim.extent, arguments.get(dim.extent), lengths, dim.min, size, dim.name)
                short = [(n, e) for n, e in zip(lengths, reach, strict=True) if e < n]
                if short:
                    raise InputMismatch(
                        f"{self.where}: {dim.extent} {short[0][1]} is less than the length {short[0][0]}"
                    )
                values[dim.extent] = reach
            extents[dim.name] = tuple(reach)
        return values, extents

    def _integers(self, name: str, value: Any, default: list[int], low: int, high: int, dim: str) -> list[int]:
        if value is None:
            return list(default)
        numbers = integers(value)
        if numbers is None or len(numbers) != len(default):
            raise InputMismatch(f"{self.where}: {name}={value!r}, wanted {len(default)} integers, one per row")
        bad = [n for n in numbers if not low <= n <= high]
        if bad:
            raise InputMismatch(f"{self.where}: {name} holds {bad[0]}, wanted {low} to {high} ({dim} given)")
        return numbers

    def _lay_out(
        self,
        item: Input,
        tensor: torch.Tensor,
        given: Mapping[str, int],
        sizes: Mapping[str, int],
        extents: Mapping[str, tuple[int, ...]],
    ) -> torch.Tensor:
        """A fresh contiguous tensor at the padded sizes: the caller's values inside each row's extent, else `pad`."""
        shape = [sizes[s] if isinstance(s, str) else s for s in item.shape]
        laid_out = torch.full(shape, item.pad, dtype=item.torch_dtype, device="cpu")
        region = tuple(slice(0, n) for n in tensor.shape)
        laid_out[region] = tensor.detach()
        for axis, dim in enumerate(item.shape):
            if isinstance(dim, str) and dim != BATCH:
                for row, extent in enumerate(extents[dim]):
                    if extent < tensor.shape[axis]:
                        laid_out[row].narrow(axis - 1, extent, shape[axis] - extent).fill_(item.pad)
        self._check_values(item, laid_out)
        return laid_out

    def _check_values(self, item: Input, tensor: torch.Tensor) -> None:
        if tensor.dtype == torch.float32:
            if not torch.isfinite(tensor).all():
                raise InputMismatch(f"{self.where}: {item.name} holds NaN or infinity inside a row's length")
        elif tensor.dtype == torch.int64:
            bad = tensor[((tensor < item.low) | (tensor >= item.high)) & (tensor != int(item.pad))]
            if bad.numel():
                raise InputMismatch(
                    f"{self.where}: {item.name} holds {bad[0].item()}, wanted {item.low} to {item.high - 1}, "
                    f"or {int(item.pad)} for padding"
                )
