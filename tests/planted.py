"""Engines that are wrong on purpose: the toy with one fault inside. The parity gate must refuse each of them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
import toy
from torch import Tensor, nn

from voicehub_aot.kernels.attention import attention, key_bias

MATRICES = ("into", "out", "clock", "given", "mixed", "table")


class Opened(toy.Toy):
    """The toy's forward in pieces that a fault can replace."""

    def product(self, linear: nn.Linear, x: Tensor) -> Tensor:
        return linear(x)

    def clock_input(self, time: Tensor) -> Tensor:
        return torch.sin(time[:, None] * torch.arange(1, 5))

    def bias(self, real: Tensor) -> Tensor | None:
        return key_bias(real)

    def residual(self, h: Tensor, added: Tensor) -> Tensor:
        return h + added

    def heads(self, h: Tensor, gate: Tensor) -> Tensor:
        return h * gate[:, None]

    def forward(self, x, time, cond, ids, lengths, drop):
        rows, frames, _ = x.shape
        real = torch.arange(frames) < lengths[:, None]
        scale, shift = self.clock(self.clock_input(time)).chunk(2, -1)
        summary = (self.table(ids + 1) * (ids >= 0)[..., None]).sum(1, keepdim=True)
        context = torch.where(drop[:, None, None], torch.tanh(self.bank), self.given(cond) + summary)
        pooled = (context * real[..., None]).sum(1) / lengths[:, None]
        gate = self.mixed(F.silu(pooled + scale))
        h = (self.product(self.into, x) + context) * (1 + scale[:, None]) + shift[:, None]
        heads = self.heads(h, gate).view(rows, frames, 2, toy.WIDTH // 2).transpose(1, 2)
        attended = attention(heads, heads, heads, self.bias(real)).transpose(1, 2).reshape(rows, frames, toy.WIDTH)
        return self.out(self.residual(h, attended)) * real[..., None], summary


class Narrow(Opened):
    """One product in half precision."""

    dtype = torch.bfloat16

    def product(self, linear, x):
        return F.linear(x.to(self.dtype), linear.weight.to(self.dtype), linear.bias.to(self.dtype)).float()


class NarrowFloat16(Narrow):
    dtype = torch.float16


class NoResidual(Opened):
    def residual(self, h, added):
        return added


class NoMask(Opened):
    def bias(self, real):
        return None


class NoGate(Opened):
    def heads(self, h, gate):
        return h


class StaleTime(Opened):
    """The time of the first evaluation at every evaluation."""

    first: Tensor | None = None

    def clock_input(self, time):
        self.first = time if self.first is None else self.first
        return super().clock_input(self.first.expand_as(time))


class RoundedTime(Opened):
    """Times in bfloat16."""

    def clock_input(self, time):
        return super().clock_input(time.to(torch.bfloat16).to(time.dtype))


class SwappedBranches(Opened):
    def forward(self, x, time, cond, ids, lengths, drop):
        return super().forward(x, time, cond, ids, lengths, ~drop)


class LostText(Opened):
    def forward(self, x, time, cond, ids, lengths, drop):
        return super().forward(x, time, cond, torch.full_like(ids, -1), lengths, drop)


class ApproximateTanh(Opened):
    """A saturating polynomial in the place of an exact function: off by 1e-4."""

    def heads(self, h, gate):
        return super().heads(h, gate + 1e-4 * torch.sin(gate))


def scaled(name: str) -> Callable[[int], nn.Module]:
    """One weight scaled by 1 + 1e-5."""

    def make(seed: int) -> nn.Module:
        module = toy.region(seed).module
        with torch.no_grad():
            getattr(module, name).weight.mul_(1 + 1e-5)
        return module

    return make


def of_class(kind: type[Opened]) -> Callable[[int], nn.Module]:
    def make(seed: int) -> nn.Module:
        module = kind().eval().requires_grad_(False)
        module.load_state_dict(toy.region(seed).module.state_dict())
        return module

    return make


FAULTS: dict[str, Callable[[int], nn.Module]] = {
    **{f"{name}.weight scaled by 1 + 1e-5": scaled(name) for name in MATRICES},
    "a product in bfloat16": of_class(Narrow),
    "a product in float16": of_class(NarrowFloat16),
    "a dropped residual": of_class(NoResidual),
    "an ignored mask": of_class(NoMask),
    "a lost gate": of_class(NoGate),
    "a stale time": of_class(StaleTime),
    "times in bfloat16": of_class(RoundedTime),
    "swapped branches": of_class(SwappedBranches),
    "a lost text": of_class(LostText),
    "an approximation of 1e-4": of_class(ApproximateTanh),
}
