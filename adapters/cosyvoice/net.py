"""Fun-CosyVoice3's DiT: F5-TTS's blocks behind another input embedding.

Restates FunAudioLLM/CosyVoice 074ca6dc9e80a2f424f1f74b48bdd7d3fea531cc (Apache-2.0), cosyvoice/flow/DiT: dit.py and
modules.py.
Parameters keep upstream's names and shapes.

Upstream rotates the flat projections of queries and keys, before they are split into heads, with a table as wide as one
head: head 0 knows positions, the others none. Attention adds nothing to frames beyond a row's length; the velocity
there is whatever comes out, up to the row's extent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from voicehub_aot.adapters._chatterbox_cosyvoice.net import channels_last, chunk_bias
from voicehub_aot.adapters.f5tts.dit import DiTBlock, DiTConfig, Modulation, modulate
from voicehub_aot.adapters.f5tts.net import RotaryEmbedding, TimestepEmbedding
from voicehub_aot.kernels.mish import mish


@dataclass(frozen=True)
class CosyDiTConfig:
    """Upstream's hyperparameters. static_chunk_size: mel frames of a chunk, for rows that stream."""

    dim: int = 1024
    depth: int = 22
    heads: int = 16
    dim_head: int = 64
    ff_mult: int = 2
    mel_dim: int = 80
    mu_dim: int = 80
    spk_dim: int = 80
    static_chunk_size: int = 50
    long_skip_connection: bool = False


class CausalConvPositionEmbedding(nn.Module):
    """x: [B, T, D] -> [B, T, D]. Looks 60 frames back and none ahead, so it needs no mask."""

    def __init__(self, dim: int, kernel: int = 31, groups: int = 16) -> None:
        super().__init__()
        self.past = kernel - 1
        self.conv1 = nn.ModuleList([nn.Conv1d(dim, dim, kernel, groups=groups)])
        self.conv2 = nn.ModuleList([nn.Conv1d(dim, dim, kernel, groups=groups)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for conv in (self.conv1[0], self.conv2[0]):
            x = mish(conv(F.pad(x, (self.past, 0))))
        return channels_last(x)


class InputEmbedding(nn.Module):
    """Linear(cat(x, cond, mu, spks)) as a sum, so that only x's columns are work of every step."""

    def __init__(self, config: CosyDiTConfig) -> None:
        super().__init__()
        self.columns = [config.mel_dim, config.mel_dim, config.mu_dim, config.spk_dim]
        self.proj = nn.Linear(sum(self.columns), config.dim)
        self.conv_pos_embed = CausalConvPositionEmbedding(config.dim)

    def forward(self, x: Tensor, cond: Tensor, mu: Tensor, spks: Tensor) -> Tensor:
        """x, cond, mu: [B, T, C]; spks: [B, C] -> [B, T, D]."""
        of_x, of_cond, of_mu, of_spks = torch.split(self.proj.weight, self.columns, dim=1)
        known = F.linear(cond, of_cond) + F.linear(mu, of_mu) + F.linear(spks, of_spks, self.proj.bias)[:, None]
        h = F.linear(x, of_x) + known
        embedded: Tensor = self.conv_pos_embed(h) + h
        return embedded


class CosyDiT(nn.Module):
    """The arguments are the region's inputs; returns the velocity [B, C, T], 0 beyond a row's extent."""

    def __init__(self, config: CosyDiTConfig) -> None:
        super().__init__()
        self.chunk = config.static_chunk_size
        block = DiTConfig(
            dim=config.dim, heads=config.heads, dim_head=config.dim_head, ff_mult=config.ff_mult, pe_attn_head=1
        )
        self.time_embed = TimestepEmbedding(config.dim)
        self.input_embed = InputEmbedding(config)
        self.rotary_embed = RotaryEmbedding(config.dim_head)
        self.transformer_blocks = nn.ModuleList(DiTBlock(block) for _ in range(config.depth))
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
        mu: Tensor,
        spks: Tensor,
        cond: Tensor,
        lengths: Tensor,
        extent: Tensor,
        streaming: Tensor,
        drop: Tensor,
    ) -> Tensor:
        frames = mu.shape[2]
        position = torch.arange(frames, device=mu.device)
        inside, reach = position < lengths[:, None], position < extent[:, None]
        real = inside[..., None].to(mu.dtype)
        te = self.time_embed(time)
        cond, mu = (channels_last(v).masked_fill(drop[:, None, None], 0.0) for v in (cond, mu))
        h = first = self.input_embed(channels_last(x), cond, mu, spks.masked_fill(drop[:, None], 0.0))
        rope = self.rotary_embed(frames)
        bias = chunk_bias(inside, streaming, self.chunk)
        for block in self.transformer_blocks:
            h = block(h, te, rope, bias, real)
        if self.long_skip_connection is not None:
            h = self.long_skip_connection(torch.cat((h, first), dim=-1))
        scale, shift = self.norm_out(te)  # the other order than in the blocks
        out: Tensor = self.proj_out(modulate(h, shift, scale)).transpose(1, 2)
        return out * reach[:, None].to(mu.dtype)
