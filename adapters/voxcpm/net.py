"""VoxCPM's local DiT: a few tokens through a bidirectional MiniCPM decoder. Smallest parts first.

Ported from OpenBMB/VoxCPM 616d3d3e630a9c96c2853250eef91b0f39dcd5fa (Apache-2.0), src/voxcpm/modules:
locdit/{local_dit,local_dit_v2}.py and minicpm4/model.py. Parameters keep upstream's names and shapes.

Attention does not mind the order of tokens that carry their positions, so they are ordered by when they are known:
the lead (the time), the context (the request) and x (the state). The first layer projects each group by itself, and
only x's projections are work of every step. The last layer computes what follows from x's tokens alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from voicehub_aot.adapters._tables import Rope, sines_first
from voicehub_aot.kernels.attention import attention


@dataclass(frozen=True)
class Config:
    """The decoder's hyperparameters under MiniCPM's names, and what the released model wraps around it.

    variant: "v1" adds the time to its one mu token, "v2" gives it a token of its own after mu's.
    rope_factors: the half head size's divisors chosen by the released context length; rope_scale: of cos and sin.
    context_size: positions of `cond`, the previous patch. mean_mode: trained with the step width as an input; the
    loop's option of that name must agree. use_cfg_zero_star: which guidance equation runs, CFG-Zero* or the plain one.
    """

    variant: Literal["v1", "v2"]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    kv_channels: int
    rope_factors: tuple[float, ...]
    rope_scale: float = 1.0
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    use_mup: bool = False
    scale_depth: float = 1.4
    feat_dim: int = 64
    patch_size: int = 4
    context_size: int = 4
    mu_tokens: int = 1
    mean_mode: bool = False
    use_cfg_zero_star: bool = True

    @property
    def lead_position(self) -> int:
        return self.mu_tokens if self.variant == "v2" else 0

    @property
    def positions(self) -> list[int]:
        """Of the tokens, in the order lead, context, x."""
        total = self.mu_tokens + (self.variant == "v2") + self.context_size + self.patch_size
        return [self.lead_position, *(p for p in range(total) if p != self.lead_position)]


def rope_rows(config: Config) -> Rope:
    """cos and sin of the tokens, each [tokens, 1, E / 2] float32 on the CPU: upstream's table cut to what is used."""
    width = config.kv_channels
    exponents = torch.arange(0, width, 2, device="cpu").float() / width
    frequencies = 1.0 / torch.pow(torch.tensor(config.rope_theta, device="cpu"), exponents)
    factors = torch.tensor(config.rope_factors, dtype=torch.float32, device="cpu")
    positions = torch.tensor(config.positions, dtype=torch.float32, device="cpu")
    angles = (torch.outer(positions, 1.0 / factors) * frequencies)[:, None]
    return angles.cos() * config.rope_scale, angles.sin() * config.rope_scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [B, T, H, E]; cos, sin: [T, 1, E / 2]; channel j pairs with j + E / 2.

    As kernels.rotary.rotate_halves, but stacked: v1's lead is projected once a patch for all steps, under vmap, and
    torch 2.13's vmap gives a `cat` fixed sizes.
    """
    first, second = x.view(*x.shape[:-1], 2, -1).unbind(-2)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-2).flatten(-2)


class TimestepEmbedding(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(dim, dim)
        self.linear_2 = nn.Linear(dim, dim)

    def forward(self, embedded: Tensor) -> Tensor:
        out: Tensor = self.linear_2(F.silu(self.linear_1(embedded)))
        return out


class Attention(nn.Module):
    """Query heads come in `num_key_value_heads` groups, one key head for each.

    Nothing is masked, so a group's heads are but more queries against the same keys: keys are never repeated.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.groups, self.width = config.num_key_value_heads, config.kv_channels
        inner, shared = config.num_attention_heads * self.width, self.groups * self.width
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, shared, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, shared, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def project(self, h: Tensor, rope: Rope, queries: int) -> tuple[Tensor, Tensor, Tensor]:
        """h: [B, T, D] -> rotated queries of its last tokens [B, queries, H, E]; keys and values [B, T, groups, E]."""
        rows, tokens, _ = h.shape
        cos, sin = rope
        query = self.q_proj(h[:, tokens - queries :]).view(rows, queries, -1, self.width)
        key = self.k_proj(h).view(rows, tokens, -1, self.width)
        value = self.v_proj(h).view(rows, tokens, -1, self.width)
        return rotate(query, cos[tokens - queries :], sin[tokens - queries :]), rotate(key, *rope), value

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What `project` returns, of all tokens that see each other -> [B, queries, D]."""
        rows, queries, heads, width = query.shape
        grouped = query.view(rows, queries, self.groups, -1, width).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mixed = attention(grouped, key.transpose(1, 2), value.transpose(1, 2))
        mixed = mixed.view(rows, self.groups, heads // self.groups, queries, width).permute(0, 3, 1, 2, 4)
        out: Tensor = self.o_proj(mixed.flatten(2))
        return out


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))
        return out


class DecoderLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.residual_scale = config.scale_depth / math.sqrt(config.num_hidden_layers) if config.use_mup else 1.0
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def project(self, h: Tensor, rope: Rope, queries: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.project(self.input_layernorm(h), rope, queries)

    def forward(self, h: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """h: [B, queries, D], the residual stream of the queries' tokens -> the same after this layer."""
        h = self.add(h, self.self_attn.mix(query, key, value))
        return self.add(h, self.mlp(self.post_attention_layernorm(h)))

    def add(self, h: Tensor, update: Tensor) -> Tensor:
        return h + (update if self.residual_scale == 1.0 else update * self.residual_scale)


class Decoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, lead: Tensor, context: Tensor, x: Tensor, rope: Rope) -> Tensor:
        """lead: [1 or B, 1, D]; context: [B, C, D]; x: [B, P, D]; rope: of them all -> [B, P, D]."""
        rows, last = x.shape[0], x.shape[1]

        def joined(parts: tuple[Tensor, ...]) -> Tensor:
            first, *others = parts
            return torch.cat((first.expand(rows, *first.shape[1:]), *others), dim=1)

        groups, start, projected = (lead, context, x), 0, []
        for group in groups:
            size = group.shape[1]
            own = (rope[0][start : start + size], rope[1][start : start + size])
            projected.append(self.layers[0].project(group, own, size))  # type: ignore[operator]
            start += size
        query, key, value = map(joined, zip(*projected, strict=True))
        h = joined(groups)
        for number, layer in enumerate(self.layers):
            queries = last if number == len(self.layers) - 1 else start
            if number > 0:
                query, key, value = layer.project(h, rope, queries)  # type: ignore[operator]
            h = layer(h[:, start - queries :], query[:, query.shape[1] - queries :], key, value)
        out: Tensor = self.norm(h)
        return out


class LocDiT(nn.Module):
    """The arguments are the region's inputs; returns the velocity [B, feat, P]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.in_proj = nn.Linear(config.feat_dim, width)
        self.cond_proj = nn.Linear(config.feat_dim, width)
        self.out_proj = nn.Linear(width, config.feat_dim)
        self.time_mlp = TimestepEmbedding(width)
        self.delta_time_mlp = TimestepEmbedding(width)
        self.decoder = Decoder(config)
        for name, table in zip(("cos", "sin"), rope_rows(config), strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, *, x: Tensor, time: Tensor, dt: Tensor, mu: Tensor, cond: Tensor, drop_mu: Tensor) -> Tensor:
        width = self.config.hidden_size
        tau = self.time_mlp(sines_first(time, width)) + self.delta_time_mlp(sines_first(dt, width))
        tokens = mu.masked_fill(drop_mu[:, None], 0.0).view(-1, self.config.mu_tokens, width)
        previous = self.cond_proj(cond.transpose(1, 2))
        if self.config.variant == "v1":
            lead, context = tokens + tau[:, None], previous
        else:
            lead, context = tau[:, None], torch.cat((tokens, previous), dim=1)
        h = self.decoder(lead, context, self.in_proj(x.transpose(1, 2)), (self.cos, self.sin))
        velocity: Tensor = self.out_proj(h).transpose(1, 2)
        return velocity
