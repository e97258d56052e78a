"""F5-TTS's DiT: every block is modulated by the time.

Ported from SWivid/F5-TTS 2ae2c9bd9b64dab2cb069c4b97e5e7673c521e01 (MIT), src/f5_tts/model/backbones/dit.py. Parameters
keep upstream's names and shapes.
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
class DiTConfig(Config):
    long_skip_connection: bool = False
    backbone: Literal["DiT"] = "DiT"


class Modulation(nn.Module):
    """te: [1, D] -> `parts` tensors of [1, 1, D]: they depend on the time alone and broadcast over rows."""

    def __init__(self, dim: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.linear = nn.Linear(dim, dim * parts)

    def forward(self, te: Tensor) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = self.linear(F.silu(te))[:, None].chunk(self.parts, dim=-1)
        return parts


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x: [B, T, D]; shift, scale: [1, 1, D] -> [B, T, D]."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


class DiTBlock(nn.Module):
    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.attn_norm = Modulation(config.dim, 6)
        self.attn = Attention(config)
        self.ff = FeedForward(config.dim, config.ff_mult)

    def forward(self, h: Tensor, te: Tensor, rope: Rope, bias: Tensor, inside: Tensor) -> Tensor:
        shift_attn, scale_attn, gate_attn, shift_ff, scale_ff, gate_ff = self.attn_norm(te)
        h = h + gate_attn * self.attn(modulate(h, shift_attn, scale_attn), rope, bias, inside)
        h = h + gate_ff * self.ff(modulate(h, shift_ff, scale_ff))
        return h


class DiT(nn.Module):
    """The arguments are the region's inputs; returns velocity [B, T, mel] and the text embedding [B, T, C]."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.attn_mask_enabled = config.attn_mask_enabled
        self.time_embed = TimestepEmbedding(config.dim)
        self.text_embed = TextEmbedding(config)
        self.input_embed = InputEmbedding(config)
        self.rotary_embed = RotaryEmbedding(config.dim_head)
        self.transformer_blocks = nn.ModuleList(DiTBlock(config) for _ in range(config.depth))
        self.long_skip_connection = (
            nn.Linear(2 * config.dim, config.dim, bias=False) if config.long_skip_connection else None
        )
        self.norm_out = Modulation(config.dim, 2)
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
        position = torch.arange(cond.shape[1], device=cond.device)
        inside, reach = position < lengths[:, None], position < extent[:, None]
        real = inside[..., None].to(cond.dtype)
        te = self.time_embed(time)
        text_embed = self.text_embed(text, inside, reach, drop_text)
        h = self.input_embed(x, cond.masked_fill(drop_audio[:, None, None], 0.0), text_embed, real)
        rope = self.rotary_embed(cond.shape[1])
        bias = key_bias(inside if self.attn_mask_enabled else reach)
        first = h
        for block in self.transformer_blocks:
            h = block(h, te, rope, bias, real)
        if self.long_skip_connection is not None:
            h = self.long_skip_connection(torch.cat((h, first), dim=-1))
        scale, shift = self.norm_out(te)  # the other order than in the blocks
        return self.proj_out(modulate(h, shift, scale)), text_embed
