"""The decoder of chatterbox's S3Gen and of CosyVoice2: one graph under the same keys. Smallest parts first.

Restates resemble-ai/chatterbox 5de7a54aa4e5e2baadb0182dde554908b48b85c2 (MIT), src/chatterbox/models/s3gen/decoder.py,
ConditionalDecoder, which also knows mean flow, and FunAudioLLM/CosyVoice 074ca6dc9e80a2f424f1f74b48bdd7d3fea531cc
(Apache-2.0), cosyvoice/flow/decoder.py, CausalConditionalDecoder, which also knows chunks. Parameters keep upstream's
names and shapes. All releases have one channel level, so that nothing is resampled.

Inside all is channels-last, and contiguous: a linear over a transposed view would be compiled as one matrix product a
row, its weights not packed. Upstream masks around every convolution. Padding stands behind the real frames and
convolutions look back only, so it meets them as attention keys alone: masking those and the output is the same. Order
enters through the convolutions: attention knows no positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from voicehub_aot.adapters._tables import sines_first
from voicehub_aot.kernels.attention import attention
from voicehub_aot.kernels.mish import mish

TIME_WIDTH = 4  # the time embedding is this many times as wide as the decoder


@dataclass(frozen=True)
class DecoderConfig:
    """Upstream's hyperparameters. in_channels: of state, mu, speaker and prompt, which are equally wide.

    meanflow: the velocity is the mean one from `time` to a second time. static_chunk_size: frames of a chunk, for rows
    that stream; 0 = none do.
    """

    in_channels: int = 320
    out_channels: int = 80
    channels: tuple[int, ...] = (256,)
    attention_head_dim: int = 64
    n_blocks: int = 4
    num_mid_blocks: int = 12
    num_heads: int = 8
    meanflow: bool = False
    static_chunk_size: int = 0


def chunk_bias(valid: Tensor, streaming: Tensor | None, chunk: int) -> Tensor:
    """valid: [B, T] bool, True = real, a prefix of 1 or more; streaming: [B] bool -> [B, 1, T, T] or [B, 1, 1, T].

    0 or -inf, float32. Rows that stream see the keys of their own chunk and of all earlier ones.
    """
    hidden = ~valid[:, None]
    if streaming is not None:
        chunks = torch.arange(valid.shape[1], device=valid.device) // chunk
        hidden = hidden | (streaming[:, None, None] & (chunks > chunks[:, None]))
    bias = torch.zeros(hidden.shape, dtype=torch.float32, device=valid.device).masked_fill(hidden, float("-inf"))
    return bias[:, None]


def channels_last(x: Tensor) -> Tensor:
    """x: [B, C, T] -> [B, T, C], contiguous."""
    return x.transpose(1, 2).contiguous()


class TimeEmbedding(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(inputs, outputs)
        self.linear_2 = nn.Linear(outputs, outputs)

    def forward(self, time: Tensor) -> Tensor:
        embedded: Tensor = self.linear_2(F.silu(self.linear_1(sines_first(time, self.linear_1.in_features))))
        return embedded


class ByPieces(nn.Conv1d):
    """A convolution of cat(pieces) that looks back only, as a sum: a piece that the state is not in leaves the step.

    pieces: each [B, T, C]; the bias goes with the last one.
    """

    def forward(self, *pieces: Tensor) -> Tensor:
        weights = torch.split(self.weight, [piece.shape[2] for piece in pieces], dim=1)
        out = self.look_back(pieces[-1], weights[-1], self.bias)
        for piece, weight in zip(pieces[:-1], weights[:-1], strict=True):
            out = self.look_back(piece, weight, None) + out
        return out

    def look_back(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.kernel_size == (1,):
            return F.linear(x, weight.squeeze(-1), bias)
        past = F.pad(x, (0, 0, self.kernel_size[0] - 1, 0))
        return channels_last(F.conv1d(past.transpose(1, 2), weight, bias))


class ConvBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"0": ByPieces(inputs, outputs, 3), "2": nn.LayerNorm(outputs)})

    def forward(self, *pieces: Tensor) -> Tensor:
        return mish(self.block["2"](self.block["0"](*pieces)))


class Resnet(nn.Module):
    def __init__(self, inputs: int, outputs: int, time_width: int) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"1": nn.Linear(time_width, outputs)})
        self.block1 = ConvBlock(inputs, outputs)
        self.block2 = ConvBlock(outputs, outputs)
        self.res_conv = ByPieces(inputs, outputs, 1)

    def forward(self, pieces: Sequence[Tensor], e: Tensor) -> Tensor:
        """pieces: [B, T, C] each, C adding up; e: [1, E] -> [B, T, D]."""
        h = self.block1(*pieces) + self.mlp["1"](mish(e))[:, None]
        out: Tensor = self.block2(h) + self.res_conv(*pieces)
        return out


class Attention(nn.Module):
    """The heads together are wider than the decoder."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, heads * head_dim, bias=False)
        self.to_k = nn.Linear(width, heads * head_dim, bias=False)
        self.to_v = nn.Linear(width, heads * head_dim, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(heads * head_dim, width)])

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        def heads(linear: nn.Linear) -> Tensor:
            projected: Tensor = linear(x)
            return projected.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

        mixed = attention(heads(self.to_q), heads(self.to_k), heads(self.to_v), bias)
        out: Tensor = self.to_out[0](mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    def __init__(self, width: int, mult: int = 4) -> None:
        super().__init__()
        expand = nn.ModuleDict({"proj": nn.Linear(width, width * mult)})
        self.net = nn.ModuleDict({"0": expand, "2": nn.Linear(width * mult, width)})

    def forward(self, x: Tensor) -> Tensor:
        expand = self.net["0"].get_submodule("proj")
        out: Tensor = self.net["2"](F.gelu(expand(x)))
        return out


class TransformerBlock(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width = config.channels[0]
        self.norm1 = nn.LayerNorm(width)
        self.attn1 = Attention(width, config.num_heads, config.attention_head_dim)
        self.norm3 = nn.LayerNorm(width)
        self.ff = FeedForward(width)

    def forward(self, h: Tensor, bias: Tensor) -> Tensor:
        h = h + self.attn1(self.norm1(h), bias)
        h = h + self.ff(self.norm3(h))
        return h


class Stage(nn.ModuleList):
    """Upstream's list: a resnet, its transformer blocks, and at either end of the decoder a convolution."""

    def __init__(self, config: DecoderConfig, inputs: int, convolution: bool = False) -> None:
        width = config.channels[0]
        resnet = Resnet(inputs, width, TIME_WIDTH * width)
        blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_blocks))
        super().__init__([resnet, blocks, *([ByPieces(width, width, 3)] if convolution else [])])

    def forward(self, pieces: Sequence[Tensor], e: Tensor, bias: Tensor) -> Tensor:
        resnet, blocks = self[0], self[1]
        h: Tensor = resnet(pieces, e)
        for block in blocks:  # type: ignore[attr-defined]
            h = block(h, bias)
        return h


class ConditionalDecoder(nn.Module):
    """The arguments are the region's inputs; returns the velocity [B, C, T], 0 beyond a row's length."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.chunk = config.static_chunk_size
        width = config.channels[0]
        self.time_mlp = TimeEmbedding(config.in_channels, TIME_WIDTH * width)
        self.time_embed_mixer = (
            nn.Linear(2 * TIME_WIDTH * width, TIME_WIDTH * width, bias=False) if config.meanflow else None
        )
        self.down_blocks = nn.ModuleList([Stage(config, config.in_channels, convolution=True)])
        self.mid_blocks = nn.ModuleList(Stage(config, width) for _ in range(config.num_mid_blocks))
        self.up_blocks = nn.ModuleList([Stage(config, 2 * width, convolution=True)])
        self.final_block = ConvBlock(width, width)
        self.final_proj = ByPieces(width, config.out_channels, 1)

    def forward(
        self,
        *,
        x: Tensor,
        time: Tensor,
        mu: Tensor,
        spks: Tensor,
        cond: Tensor,
        lengths: Tensor,
        drop: Tensor | None = None,
        r: Tensor | None = None,
        streaming: Tensor | None = None,
    ) -> Tensor:
        frames = mu.shape[2]
        valid = torch.arange(frames, device=mu.device) < lengths[:, None]
        bias = chunk_bias(valid, streaming, self.chunk)
        e = self.time_mlp(time)
        if self.time_embed_mixer is not None and r is not None:
            e = self.time_embed_mixer(torch.cat((e, self.time_mlp(r)), dim=-1))
        known = channels_last(torch.cat((mu, spks[..., None].expand(-1, -1, frames), cond), dim=1))
        if drop is not None:
            known = known.masked_fill(drop[:, None, None], 0.0)
        down, up = self.down_blocks[0], self.up_blocks[0]
        h = skip = down([channels_last(x), known], e, bias)
        h = down[2](h)  # type: ignore[index]
        for stage in self.mid_blocks:
            h = stage([h], e, bias)
        h = up([h, skip], e, bias)
        h = up[2](h)  # type: ignore[index]
        h = self.final_block(h)
        out: Tensor = self.final_proj(h) * valid[..., None].to(mu.dtype)
        return out.transpose(1, 2)
