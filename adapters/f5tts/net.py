"""F5-TTS's networks: the parts that both backbones are made of, smallest first.

Ported from SWivid/F5-TTS 2ae2c9bd9b64dab2cb069c4b97e5e7673c521e01 (MIT), src/f5_tts/model/modules.py; the
rotary embedding from x_transformers. Parameters keep upstream's names and shapes.

Two masks run through everything. `inside` (n < lengths) is the mask upstream builds from durations; `reach`
(n < extent) is where a row physically ends: what lies beyond it must not be seen, whatever the tensor's size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from voicehub_aot.adapters._tables import Rope, inverse_frequencies, rope_of, sines_first
from voicehub_aot.kernels.attention import attention
from voicehub_aot.kernels.mish import mish
from voicehub_aot.kernels.rotary import in_halves_order, rotate_halves, rotate_pairs


@dataclass(frozen=True)
class Config:
    """Upstream's hyperparameters and defaults, those of both backbones.

    text_mask_padding: zero the padding tokens between text convolutions. pe_attn_head: how many heads are rotated,
    None = all. attn_mask_enabled: attention keys end at a row's length, not at its extent.
    """

    dim: int
    depth: int = 8
    heads: int = 8
    dim_head: int = 64
    ff_mult: int = 4
    mel_dim: int = 100
    text_num_embeds: int = 256
    text_dim: int = 100
    text_mask_padding: bool = True
    qk_norm: Literal["rms_norm"] | None = None
    conv_layers: int = 0
    pe_attn_head: int | None = None
    attn_mask_enabled: bool = False


class TimestepEmbedding(nn.Module):
    """time: [1] float32, 0 = noise, 1 = data -> [1, D]."""

    def __init__(self, dim: int, features: int = 256) -> None:
        super().__init__()
        self.features = features
        self.time_mlp = nn.Sequential(nn.Linear(features, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, time: Tensor) -> Tensor:
        embedded: Tensor = self.time_mlp(sines_first(time, self.features))
        return embedded


class RotaryEmbedding(nn.Module):
    """tokens -> cos and sin, each [tokens, 1, E / 2], float32. inv_freq is in released checkpoints."""

    inv_freq: Tensor

    def __init__(self, dim_head: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(dim_head))

    def forward(self, tokens: int) -> Rope:
        return rope_of(torch.arange(tokens, device=self.inv_freq.device), self.inv_freq)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        inner = config.heads * config.dim_head
        self.heads, self.dim_head = config.heads, config.dim_head
        self.rotated = config.heads if config.pe_attn_head is None else config.pe_attn_head
        self.to_q = nn.Linear(config.dim, inner)
        self.to_k = nn.Linear(config.dim, inner)
        self.to_v = nn.Linear(config.dim, inner)
        self.to_out = nn.ModuleList([nn.Linear(inner, config.dim)])
        self.q_norm = nn.RMSNorm(config.dim_head, eps=1e-6) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(config.dim_head, eps=1e-6) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rope: Rope, bias: Tensor, inside: Tensor) -> Tensor:
        """x: [B, T, D]; bias: [B, 1, 1, T] from `key_bias`; inside: [B, T, 1] 1.0 = real -> [B, T, D], 0 elsewhere."""
        heads = (*x.shape[:2], self.heads, -1)
        query = self.rotated_heads(x, self.to_q, self.q_norm, rope)
        key = self.rotated_heads(x, self.to_k, self.k_norm, rope)
        value = self.to_v(x).view(heads)
        mixed = attention(query, key, value.transpose(1, 2), bias)
        out: Tensor = self.to_out[0](mixed.transpose(1, 2).flatten(2))
        return out * inside

    def rotated_heads(self, x: Tensor, linear: nn.Linear, norm: nn.Module, rope: Rope) -> Tensor:
        """x: [B, T, D] -> [B, H, T, E], normed per head and rotated. Exported, channels come in halves order.

        Laid out by head: frames 4 KiB apart would share few cache sets in attention's blocks (0.97 of the step's time).
        """
        weight: Tensor = linear.weight
        bias: Tensor = linear.bias
        gain: Tensor | None = norm.weight if isinstance(norm, nn.RMSNorm) else None
        width, rotate = self.dim_head, rotate_pairs
        if torch.compiler.is_exporting():
            weight, bias, rotate = in_halves_order(weight, width), in_halves_order(bias, width), rotate_halves
            gain = in_halves_order(gain, width) if gain is not None else None
        heads = F.linear(x, weight, bias).view(*x.shape[:2], self.heads, width)
        if gain is not None:
            heads = F.rms_norm(heads, (width,), gain, eps=1e-6)
        heads = heads.transpose(1, 2)
        cos, sin = (table.transpose(0, 1) for table in rope)
        if self.rotated >= self.heads:
            return rotate(heads, cos, sin).contiguous()
        return torch.cat((rotate(heads[:, : self.rotated], cos, sin), heads[:, self.rotated :]), dim=1)


class FeedForward(nn.Module):
    def __init__(self, dim: int, mult: int) -> None:
        super().__init__()
        expand = nn.Sequential(nn.Linear(dim, dim * mult), nn.GELU(approximate="tanh"))
        self.ff = nn.Sequential(expand, nn.Identity(), nn.Linear(dim * mult, dim))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.ff(x)
        return out


class GRN(nn.Module):
    """Global response normalisation: its statistics run over time, so they end at `reach`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(1, 1, dim))
        self.beta = nn.Parameter(torch.zeros(1, 1, dim))

    def forward(self, x: Tensor, reach: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x * reach, dim=1, keepdim=True)
        response = norm / (norm.mean(dim=-1, keepdim=True) + 1e-6)
        out: Tensor = self.gamma * (x * response) + self.beta + x
        return out


class ConvNeXtV2Block(nn.Module):
    """x: [B, T, C], zero beyond `reach`; the result is not."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv1d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, inner)
        self.grn = GRN(inner)
        self.pwconv2 = nn.Linear(inner, dim)

    def forward(self, x: Tensor, reach: Tensor) -> Tensor:
        y = self.norm(self.dwconv(x.transpose(1, 2)).transpose(1, 2))
        y = self.grn(F.gelu(self.pwconv1(y)), reach)
        out: Tensor = x + self.pwconv2(y)
        return out


class TextEmbedding(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.mask_padding = config.text_mask_padding
        self.text_embed = nn.Embedding(config.text_num_embeds + 1, config.text_dim)  # row 0 is the filler
        blocks = [ConvNeXtV2Block(config.text_dim, config.text_dim * 2) for _ in range(config.conv_layers)]
        self.text_blocks = nn.ModuleList(blocks)

    def forward(self, text: Tensor, inside: Tensor, reach: Tensor, drop_text: Tensor) -> Tensor:
        """text: [B, L] ids, -1 = padding; inside, reach: [B, T] bool; drop_text: [B] bool -> [B, T, C], 0 beyond reach.

        The dropped text keeps the real text's padding mask, so it still tells the text's length.
        """
        frames = inside.shape[1]
        ids = F.pad(text + 1, (0, frames))[:, :frames] * inside
        real = ids != 0
        x: Tensor = self.text_embed(ids.masked_fill(drop_text[:, None], 0))
        if self.text_blocks:
            x = x + text_positions(frames, x.shape[2], x.device)
            keep = (real if self.mask_padding else reach)[..., None].to(x.dtype)
            x = x * (real if self.mask_padding else inside)[..., None]
            for block in self.text_blocks:
                x = block(x, reach[..., None].to(x.dtype)) * keep
            return x
        return x * inside[..., None]


def text_positions(frames: int, dim: int, device: torch.device) -> Tensor:
    """[frames, dim]: all cosines, then all sines. A formula here; a table of 8192 rows upstream."""
    angles = torch.arange(frames, device=device).float()[:, None] * inverse_frequencies(dim).to(device)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class ConvPositionEmbedding(nn.Module):
    """x: [B, T, D]; mask: [B, T, 1] -> [B, T, D]. Masked after Mish instead of before it: Mish(0) = 0."""

    def __init__(self, dim: int, kernel: int = 31, groups: int = 16) -> None:
        super().__init__()

        def conv() -> nn.Conv1d:
            return nn.Conv1d(dim, dim, kernel, groups=groups, padding=kernel // 2)

        self.conv1d = nn.ModuleDict({"0": conv(), "2": conv()})  # Mish stands at upstream's places 1 and 3

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask = mask.transpose(1, 2)
        x = x.transpose(1, 2) * mask
        for place in ("0", "2"):
            x = mish(self.conv1d[place](x)) * mask
        return x.transpose(1, 2)


class InputEmbedding(nn.Module):
    """Linear(cat(x, cond, text)) as a sum, so that only x's columns are work of every step."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.columns = [config.mel_dim, config.mel_dim, config.text_dim]
        self.proj = nn.Linear(sum(self.columns), config.dim)
        self.conv_pos_embed = ConvPositionEmbedding(config.dim)

    def forward(self, x: Tensor, cond: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        of_x, of_cond, of_text = torch.split(self.proj.weight, self.columns, dim=1)
        h = F.linear(x, of_x) + (F.linear(cond, of_cond, self.proj.bias) + F.linear(text, of_text))
        embedded: Tensor = self.conv_pos_embed(h, mask) + h
        return embedded
