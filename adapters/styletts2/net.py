"""StyleTTS2's style denoiser as a torch module, smallest parts first; the adapter says what it is.

Parameters keep the names and shapes of yl4579/StyleTTS2 5cedc71 (MIT), Modules/diffusion/modules.py. Upstream has no
mask; here keys of the attention and rows of the final mean end at each row's length, so padding is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from voicehub_aot.kernels.attention import attention, key_bias

Affine = tuple[Tensor, Tensor]  # scale, shift


@dataclass(frozen=True)
class Config:
    """Upstream's hyperparameters, sizes as released.

    context_features: width of the reference style; None is the single-speaker network, Transformer1d.
    sigma_data: a statistic of the training data that only the released config.yml holds.
    """

    sigma_data: float
    num_layers: int = 3
    channels: int = 256
    num_heads: int = 8
    head_features: int = 64
    multiplier: int = 2
    context_embedding_features: int = 768
    context_features: int | None = None
    embedding_max_length: int = 512

    @property
    def width(self) -> int:
        return self.channels + self.context_embedding_features


class TimeFeatures(nn.Module):
    """time: [1] -> [1, 1 + channels]: the time, its sines and its cosines at learned frequencies."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(channels // 2))

    def forward(self, time: Tensor) -> Tensor:
        time = time[:, None]
        angles = time * self.weights * (2 * math.pi)
        return torch.cat((time, angles.sin(), angles.cos()), dim=-1)


class AdaptiveAffine(nn.Module):
    """features: [B, F] -> scale and shift of a layer norm, each [B, 1, D]."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(features, 2 * width)

    def forward(self, features: Tensor) -> Affine:
        gain, shift = self.fc(features)[:, None].chunk(2, dim=-1)
        return 1 + gain, shift


class LearnedAffine(nn.Module):
    """Scale and shift of a layer norm, each [D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, features: Tensor | None) -> Affine:
        return self.weight, self.bias


class Pointwise(nn.Module):
    """A 1x1 convolution, weight [out, in, 1], as a linear over the last dimension."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, 1))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.squeeze(-1), self.bias)


class Output(nn.Module):
    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.to_out = nn.Linear(inner, width)


class Attention(nn.Module):
    """Queries and keys of the same hidden state, normed apart: one normalisation, two affine maps of it."""

    def __init__(self, c: Config) -> None:
        super().__init__()

        def affine() -> nn.Module:
            return AdaptiveAffine(c.context_features, c.width) if c.context_features else LearnedAffine(c.width)

        inner = c.num_heads * c.head_features
        self.heads = c.num_heads
        self.norm, self.norm_context = affine(), affine()
        self.to_q = nn.Linear(c.width, inner, bias=False)
        self.to_kv = nn.Linear(c.width, 2 * inner, bias=False)
        self.attention = Output(inner, c.width)

    def forward(self, h: Tensor, features: Tensor | None, bias: Tensor) -> Tensor:
        """h: [B, T, D]; bias: [B, 1, 1, T] from `key_bias`."""
        normed = F.layer_norm(h, h.shape[-1:])
        (scale, shift), (scale_context, shift_context) = self.norm(features), self.norm_context(features)
        query = self._heads(self.to_q(normed * scale + shift))
        key, value = map(self._heads, self.to_kv(normed * scale_context + shift_context).chunk(2, dim=-1))
        out: Tensor = self.attention.to_out(attention(query, key, value, bias).transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class FixedEmbedding(nn.Module):
    """What stands for the text where it is dropped: a learned row for each position."""

    def __init__(self, positions: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(positions, width)


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        inner = c.width * c.multiplier
        self.attention = Attention(c)
        self.feed_forward = nn.Sequential(nn.Linear(c.width, inner), nn.GELU(), nn.Linear(inner, c.width))

    def attend(self, h: Tensor, mapping: Tensor, features: Tensor | None, bias: Tensor) -> Tensor:
        """mapping: [B or 1, 1, D], added before the block's norms and kept in its residual."""
        h = h + mapping
        out: Tensor = self.attention(h, features, bias) + h
        return out

    def forward(self, h: Tensor, mapping: Tensor, features: Tensor | None, bias: Tensor) -> Tensor:
        h = self.attend(h, mapping, features, bias)
        out: Tensor = self.feed_forward(h) + h
        return out

    def mean(self, h: Tensor, mapping: Tensor, features: Tensor | None, bias: Tensor, share: Tensor) -> Tensor:
        """Mean over tokens of `forward`, [B, 1, D]. share: [B, 1, T], each token's weight, in sum 1.

        The second linear commutes with the mean, so it sees one row instead of T.
        """
        h = self.attend(h, mapping, features, bias)
        first, gelu, second = self.feed_forward
        out: Tensor = second(share @ gelu(first(h))) + share @ h
        return out


class StyleDenoiser(nn.Module):
    """The arguments are the region's inputs; returns the raw prediction [B, 1, C]."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.to_out = nn.Sequential(nn.Identity(), Pointwise(c.width, c.channels))  # upstream transposes at place 0
        self.to_mapping = nn.Sequential(nn.Linear(c.width, c.width), nn.GELU(), nn.Linear(c.width, c.width), nn.GELU())
        self.to_time = nn.Sequential(
            nn.Sequential(TimeFeatures(c.channels), nn.Linear(1 + 2 * (c.channels // 2), c.width)), nn.GELU()
        )
        self.to_features = (
            nn.Sequential(nn.Linear(c.context_features, c.width), nn.GELU()) if c.context_features else None
        )
        self.fixed_embedding = FixedEmbedding(c.embedding_max_length, c.context_embedding_features)

    def forward(
        self,
        *,
        x: Tensor,
        time: Tensor,
        embedding: Tensor,
        lengths: Tensor,
        drop: Tensor,
        features: Tensor | None = None,
    ) -> Tensor:
        tokens = embedding.shape[1]
        inside = torch.arange(tokens, device=embedding.device) < lengths[:, None]
        bias = key_bias(inside)
        share = (inside.to(embedding.dtype) / lengths[:, None])[:, None]
        embedding = torch.where(drop[:, None, None], self.fixed_embedding.embedding.weight[:tokens], embedding)
        mapping = self.to_time(time)
        if self.to_features is not None:
            mapping = mapping + self.to_features(features)
        mapping = self.to_mapping(mapping)[:, None]
        h = torch.cat((x.expand(-1, tokens, -1), embedding), dim=-1)
        *blocks, last = self.blocks
        assert isinstance(last, Block)
        for block in blocks:
            h = block(h, mapping, features, bias)
        out: Tensor = self.to_out(last.mean(h, mapping, features, bias, share))
        return out
