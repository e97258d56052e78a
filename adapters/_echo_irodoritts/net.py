"""The rectified-flow transformer that Echo-TTS and Irodori-TTS share, smallest parts first.

Facts from jordandare/echo-tts 230202af252e30a692a6f6310789ad212f83e2bb, model.py, and Aratako/Irodori-TTS
eaf74d6a19138f743acb5b71a445fd25a57db987, irodori_tts/model.py (both MIT). Parameters keep upstream's names and shapes.
Time: 1 = noise, 0 = data.

What leaves the step. All modulations depend on the time alone and are stacked into one tensor. Keys and values of the
conditioning, their masks and the rotary tables depend on the request alone. Attention over frames needs only which of
them are seen: frames mix nowhere else, so a row with a key mask gives what it gives alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from voicehub_aot.adapters._tables import Rope, cosines_first, inverse_frequencies, rope_of
from voicehub_aot.kernels.attention import attention, key_bias
from voicehub_aot.kernels.rotary import in_halves_order, rotate_halves, rotate_pairs

KeysValues = tuple[Tensor, Tensor]

TIME_SCALE = 1000.0  # the fastest wave of the time embedding, radians per unit of time


@dataclass(frozen=True)
class Sizes:
    """latent: channels of the state. inner: width of the MLP. waves: size of the time embedding, cosines and sines.

    context: width of each conditioning state by name, in the order of upstream's keys.
    """

    latent: int
    width: int
    layers: int
    heads: int
    inner: int
    waves: int
    rank: int
    eps: float
    context: Mapping[str, int]


@dataclass(frozen=True)
class Context:
    """One source of keys and values. state: [B, L, D']; visible: [B, L] bool, True = seen by every frame.

    rope: its rotation, None = none. scale: [B, layers] factors of its keys and values, None = none.
    """

    state: Tensor
    visible: Tensor
    rope: Rope | None = None
    scale: Tensor | None = None


def normalised(x: Tensor, eps: float) -> Tensor:
    """x / RMS(x) over the last axis."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """shape: of the weight; the mean is over its last axis."""

    def __init__(self, shape: Sequence[int], eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return normalised(x, self.eps) * self.weight


def linear(columns: int, rows: int) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False)


class LowRankAdaLN(nn.Module):
    """cond: [1, 3 D] of shift, scale and gate -> [3, 1, D]: shift, 1 + scale, tanh(gate), each with its own update."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        for name in ("shift", "scale", "gate"):
            self.add_module(f"{name}_down", linear(width, rank))
            self.add_module(f"{name}_up", nn.Linear(rank, width))

    def _updated(self, name: str, value: Tensor) -> Tensor:
        down, up = self.get_submodule(f"{name}_down"), self.get_submodule(f"{name}_up")
        updated: Tensor = up(down(F.silu(value))) + value
        return updated

    def forward(self, cond: Tensor) -> Tensor:
        names = ("shift", "scale", "gate")
        shift, scale, gate = (self._updated(n, v) for n, v in zip(names, cond.chunk(3, dim=-1), strict=True))
        return torch.stack((shift, scale + 1, torch.tanh(gate)))


class JointAttention(nn.Module):
    """Frames attend to frames and to every context. One k_norm serves all keys; half of the heads are rotated."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.width = sizes.heads, sizes.width // sizes.heads
        for name in ("wq", "wk", "wv", "gate", "wo"):
            self.add_module(name, linear(sizes.width, sizes.width))
        for name, columns in sizes.context.items():
            self.add_module(f"wk_{name}", linear(columns, sizes.width))
            self.add_module(f"wv_{name}", linear(columns, sizes.width))
        self.q_norm = RMSNorm((self.heads, self.width), sizes.eps)
        self.k_norm = RMSNorm((self.heads, self.width), sizes.eps)

    def _weight(self, name: str) -> Tensor:
        return self.get_parameter(f"{name}.weight")

    def _normed(self, x: Tensor, name: str, norm: RMSNorm, rope: Rope | None) -> Tensor:
        """x: [B, T, D] -> [B, T, H, E]: projected, normed per head, rotated. Exported, channels are in halves order."""
        weight, rotate = self._weight(name), rotate_pairs
        gain: Tensor = norm.weight
        if torch.compiler.is_exporting():
            weight, rotate = in_halves_order(weight, self.width), rotate_halves
            gain = in_halves_order(gain.flatten(), self.width).view_as(gain)
        heads = normalised(F.linear(x, weight).view(*x.shape[:2], self.heads, self.width), norm.eps) * gain
        if rope is None:
            return heads
        rotated, plain = heads.chunk(2, dim=2)
        return torch.cat((rotate(rotated, *rope), plain), dim=2)

    def keys_values(self, name: str, state: Tensor, rope: Rope | None = None) -> KeysValues:
        """state: [B, L, D'] of context `name` -> keys and values, each [B, L, H, E]."""
        values = F.linear(state, self._weight(f"wv_{name}")).view(*state.shape[:2], self.heads, self.width)
        return self._normed(state, f"wk_{name}", self.k_norm, rope), values

    def context(self, sources: Mapping[str, Context], layer: int) -> KeysValues:
        """Keys and values of all sources, joined: they depend on the request alone."""
        pairs = []
        for name, source in sources.items():
            pair = self.keys_values(name, source.state, source.rope)
            if source.scale is not None:
                factor = source.scale[:, layer, None, None, None]
                pair = (pair[0] * factor, pair[1] * factor)
            pairs.append(pair)
        return torch.cat([k for k, _ in pairs], dim=1), torch.cat([v for _, v in pairs], dim=1)

    def forward(self, x: Tensor, rope: Rope, context: KeysValues, bias: Tensor) -> Tensor:
        """x: [B, T, D]; context: each [B, L, H, E]; bias: [B, 1, 1, T + L] -> [B, T, D]."""
        query = self._normed(x, "wq", self.q_norm, rope)
        key = torch.cat((self._normed(x, "wk", self.k_norm, rope), context[0]), dim=1)
        value = torch.cat((F.linear(x, self._weight("wv")).view(query.shape), context[1]), dim=1)
        mixed = attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), bias)
        gate = torch.sigmoid(F.linear(x, self._weight("gate")))
        return F.linear(mixed.transpose(1, 2).flatten(2) * gate, self._weight("wo"))


class SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = linear(width, inner)
        self.w3 = linear(width, inner)
        self.w2 = linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.eps = sizes.eps
        self.attention = JointAttention(sizes)
        self.mlp = SwiGLU(sizes.width, sizes.inner)
        self.attention_adaln = LowRankAdaLN(sizes.width, sizes.rank)
        self.mlp_adaln = LowRankAdaLN(sizes.width, sizes.rank)

    def forward(self, h: Tensor, of_time: Tensor, rope: Rope, context: KeysValues, bias: Tensor) -> Tensor:
        """h: [B, T, D]; of_time: [2, 3, 1, D], of the attention and of the MLP."""
        shift, gain, gate = of_time[0].unbind()
        h = h + gate * self.attention(normalised(h, self.eps) * gain + shift, rope, context, bias)
        shift, gain, gate = of_time[1].unbind()
        h = h + gate * self.mlp(normalised(h, self.eps) * gain + shift)
        return h


class RectifiedFlowTransformer(nn.Module):
    """Without its encoders: the conditioning comes in as their states."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.cond_module = nn.Sequential(
            linear(sizes.waves, sizes.width),
            nn.SiLU(),
            linear(sizes.width, sizes.width),
            nn.SiLU(),
            linear(sizes.width, 3 * sizes.width),
        )
        self.in_proj = nn.Linear(sizes.latent, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.out_norm = RMSNorm((sizes.width,), sizes.eps)
        self.out_proj = nn.Linear(sizes.width, sizes.latent)

    def rope(self, positions: Tensor) -> Rope:
        frequencies = inverse_frequencies(self.sizes.width // self.sizes.heads, positions.device)
        return rope_of(positions, frequencies)

    def layers(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def modulations(self, time: Tensor) -> Tensor:
        """time: [1] -> [2 layers, 3, 1, D], of attention and MLP in turn: one tensor, so that a step reads one row."""
        cond = self.cond_module(cosines_first(time, self.sizes.waves, TIME_SCALE))
        adalns = [adaln for block in self.layers() for adaln in (block.attention_adaln, block.mlp_adaln)]
        return torch.stack([adaln(cond) for adaln in adalns])

    def velocity(
        self, x: Tensor, time: Tensor, positions: Tensor, seen: Tensor, sources: Mapping[str, Context]
    ) -> Tensor:
        """x: [B, T, C]; positions: [T] or [B, T] int64; seen: [B, T] bool, frames that are keys -> [B, T, C]."""
        of_time, rope = self.modulations(time), self.rope(positions)
        bias = key_bias(torch.cat([seen, *(source.visible for source in sources.values())], dim=1))
        h = self.in_proj(x)
        for layer, block in enumerate(self.layers()):
            context = block.attention.context(sources, layer)
            h = block(h, of_time[2 * layer : 2 * layer + 2], rope, context, bias)
        out: Tensor = self.out_proj(self.out_norm(h))
        return out

    def keys_values(self, name: str, state: Tensor, rope: Rope | None = None) -> KeysValues:
        """Every layer's keys and values of one context, each [layers, B, L, H, E], for recorded cases."""
        pairs = [block.attention.keys_values(name, state, rope) for block in self.layers()]
        return torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])
