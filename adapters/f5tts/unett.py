"""E2-TTS's flat U-Net transformer: the time is a token, and early layers feed late ones.

Ported from SWivid/F5-TTS 2ae2c9bd9b64dab2cb069c4b97e5e7673c521e01 (MIT), src/f5_tts/model/backbones/unett.py;
RMSNorm from x_transformers. Upstream masks neither its text nor its position convolution; here both end at a row's
extent, which is the same thing in an unpadded tensor and exact in a padded one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from voicehub_aot.adapters._tables import Rope
from voicehub_aot.adapters.f5tts.net import (
    Attention,
    Config,
    FeedForward,
    InputEmbedding,
    RotaryEmbedding,
    TextEmbedding,
    TimestepEmbedding,
)
from voicehub_aot.kernels.attention import key_bias


@dataclass(frozen=True)
class UNetTConfig(Config):
    """depth is even. skip_connect_type: how an early layer's input joins the late layer it is paired with."""

    skip_connect_type: Literal["concat", "add", "none"] = "concat"
    backbone: Literal["UNetT"] = "UNetT"


class RMSNorm(nn.Module):
    """x / ||x|| * sqrt(D) * g."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = dim**0.5
        self.g = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = F.normalize(x, dim=-1) * self.scale * self.g
        return out


class Layer(nn.ModuleList):
    """In checkpoints: 0 skip projection, 1 attention norm, 2 attention, 3 feed-forward norm, 4 feed-forward."""

    def __init__(self, config: UNetTConfig, late: bool) -> None:
        concat = late and config.skip_connect_type == "concat"
        join = nn.Linear(2 * config.dim, config.dim, bias=False) if concat else nn.Identity()
        attn, ff = Attention(config), FeedForward(config.dim, config.ff_mult)
        super().__init__([join, RMSNorm(config.dim), attn, RMSNorm(config.dim), ff])
        self.skip_connect_type = config.skip_connect_type

    def forward(self, h: Tensor, skip: Tensor | None, rope: Rope, bias: Tensor, inside: Tensor) -> Tensor:
        join, attn_norm, attn, ff_norm, ff = self
        if skip is not None and self.skip_connect_type == "concat":
            h = join(torch.cat((h, skip), dim=-1))
        elif skip is not None and self.skip_connect_type == "add":
            h = h + skip
        h = h + attn(attn_norm(h), rope, bias, inside)
        h = h + ff(ff_norm(h))
        return h


class UNetT(nn.Module):
    """The arguments are the region's inputs; returns velocity [B, T, mel] and the text embedding [B, T, C]."""

    def __init__(self, config: UNetTConfig) -> None:
        super().__init__()
        self.depth = config.depth
        self.attn_mask_enabled = config.attn_mask_enabled
        self.time_embed = TimestepEmbedding(config.dim)
        self.text_embed = TextEmbedding(config)
        self.input_embed = InputEmbedding(config)
        self.rotary_embed = RotaryEmbedding(config.dim_head)
        self.layers = nn.ModuleList(Layer(config, late=2 * i >= config.depth) for i in range(config.depth))
        self.norm_out = RMSNorm(config.dim)
        self.proj_out = nn.Linear(config.dim, config.mel_dim)

    def forward(
        self,
        *,
        x: Tensor,
        time: Tensor,
        cond: Tensor,
        text: Tensor,
        lengths: Tensor,
        extent: Tensor,
        drop_audio: Tensor,
        drop_text: Tensor,
    ) -> tuple[Tensor, Tensor]:
        rows, frames = cond.shape[:2]
        reach = torch.arange(frames, device=cond.device) < extent[:, None]
        text_embed = self.text_embed(text, reach, reach, drop_text)
        cond = cond.masked_fill(drop_audio[:, None, None], 0.0)
        h = self.input_embed(x, cond, text_embed, reach[..., None].to(cond.dtype))

        te = self.time_embed(time)
        h = torch.cat((te[:, None].expand(rows, -1, -1), h), dim=1)
        token = torch.arange(frames + 1, device=cond.device)  # token 0 is the time: real in every row
        inside, reach = token < lengths[:, None] + 1, token < extent[:, None] + 1
        real = inside[..., None].to(cond.dtype)
        bias = key_bias(inside if self.attn_mask_enabled else reach)
        rope = self.rotary_embed(frames + 1)
        skips: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            early = 2 * i < self.depth
            skips += [h] if early else []
            h = layer(h, None if early else skips.pop(), rope, bias, real)
        return self.proj_out(self.norm_out(h)[:, 1:]), text_embed
