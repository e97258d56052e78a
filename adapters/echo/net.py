"""Echo-TTS's denoiser, and the encoder that turns a finished prefix into conditioning.

Facts from jordandare/echo-tts 230202af252e30a692a6f6310789ad212f83e2bb (MIT), model.py. Parameters keep upstream's
names and shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from voicehub_aot.adapters._echo_irodoritts.net import (
    Context,
    RectifiedFlowTransformer,
    RMSNorm,
    Sizes,
    SwiGLU,
    linear,
)
from voicehub_aot.adapters._tables import inverse_frequencies, rope_of
from voicehub_aot.kernels.attention import attention
from voicehub_aot.kernels.rotary import rotate_pairs


@dataclass(frozen=True)
class Config:
    """Upstream's hyperparameters as released.

    text_*, speaker_*: sizes of encoders outside the region, which reads only their widths.
    blockwise: with the weights that read a finished prefix; False leaves them out, as upstream's loader can.
    """

    latent_size: int = 80
    model_size: int = 2048
    num_layers: int = 24
    num_heads: int = 16
    intermediate_size: int = 5888
    norm_eps: float = 1e-5
    text_vocab_size: int = 256
    text_model_size: int = 1280
    text_num_layers: int = 14
    text_num_heads: int = 10
    text_intermediate_size: int = 3328
    speaker_patch_size: int = 4
    speaker_model_size: int = 1280
    speaker_num_layers: int = 14
    speaker_num_heads: int = 10
    speaker_intermediate_size: int = 3328
    timestep_embed_size: int = 512
    adaln_rank: int = 256
    blockwise: bool = True

    @property
    def sizes(self) -> Sizes:
        latent = {"latent": self.speaker_model_size} if self.blockwise else {}
        return Sizes(
            latent=self.latent_size,
            width=self.model_size,
            layers=self.num_layers,
            heads=self.num_heads,
            inner=self.intermediate_size,
            waves=self.timestep_embed_size,
            rank=self.adaln_rank,
            eps=self.norm_eps,
            context={**latent, "text": self.text_model_size, "speaker": self.speaker_model_size},
        )


class EchoDiT(RectifiedFlowTransformer):
    """The arguments are the region's inputs; returns the velocity [B, T, C]."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.sizes)
        self.patch = config.speaker_patch_size

    def latent_positions(self, latent_state: Tensor) -> Tensor:
        """[P] int64: the first frame of each patch of the prefix."""
        return torch.arange(latent_state.shape[1], device=latent_state.device) * self.patch

    def forward(
        self,
        *,
        x: Tensor,
        time: Tensor,
        text_state: Tensor,
        text_mask: Tensor,
        speaker_state: Tensor,
        speaker_mask: Tensor,
        speaker_scale: Tensor,
        hidden: Tensor,
        lengths: Tensor,
        drop_text: Tensor,
        drop_speaker: Tensor,
        latent_state: Tensor | None = None,
        latent_mask: Tensor | None = None,
        start_pos: Tensor | None = None,
    ) -> Tensor:
        position = torch.arange(hidden.shape[1], device=hidden.device)
        seen = (position < lengths[:, None]) & ~hidden
        sources = {}
        if latent_state is not None and latent_mask is not None and start_pos is not None:
            frames = self.latent_positions(latent_state)
            visible = latent_mask & (frames < start_pos[:, None])
            sources["latent"] = Context(latent_state, visible, rope=self.rope(frames))
            position = position + start_pos[:, None]
        sources["text"] = Context(text_state, text_mask & ~drop_text[:, None])
        visible = speaker_mask & ~drop_speaker[:, None]
        sources["speaker"] = Context(speaker_state, visible, scale=speaker_scale)
        return self.velocity(x, time, position, seen, sources)


# --- the encoder of a finished prefix; it runs between requests, outside the region


class EncoderAttention(nn.Module):
    """Causal; every head is rotated."""

    def __init__(self, width: int, heads: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo, self.gate = (linear(width, width) for _ in range(5))
        self.q_norm, self.k_norm = (RMSNorm((heads, width // heads), eps) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, P, D] -> [B, P, D]."""
        tokens, shape = x.shape[1], (*x.shape[:2], self.heads, -1)
        frequencies = inverse_frequencies(x.shape[2] // self.heads, x.device)
        rope = rope_of(torch.arange(tokens, device=x.device), frequencies)
        query = rotate_pairs(self.q_norm(self.wq(x).view(shape)), *rope).transpose(1, 2)
        key = rotate_pairs(self.k_norm(self.wk(x).view(shape)), *rope).transpose(1, 2)
        future = torch.full((tokens, tokens), float("-inf"), device=x.device).triu(1)
        mixed = attention(query, key, self.wv(x).view(shape).transpose(1, 2), future)
        out: Tensor = self.wo(mixed.transpose(1, 2).flatten(2) * torch.sigmoid(self.gate(x)))
        return out


class EncoderBlock(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.attention = EncoderAttention(width, heads, eps)
        self.mlp = SwiGLU(width, inner)
        self.attention_norm, self.mlp_norm = RMSNorm((width,), eps), RMSNorm((width,), eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class PatchEncoder(nn.Module):
    """Latents [B, T, C], T a multiple of the patch size -> [B, T / patch, D']."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, heads, inner = config.speaker_model_size, config.speaker_num_heads, config.speaker_intermediate_size
        self.patch = config.speaker_patch_size
        self.in_proj = nn.Linear(config.latent_size * self.patch, width)
        blocks = [EncoderBlock(width, heads, inner, config.norm_eps) for _ in range(config.speaker_num_layers)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, latents: Tensor) -> Tensor:
        rows, frames, channels = latents.shape
        patches = latents.reshape(rows, frames // self.patch, channels * self.patch)
        h: Tensor = self.in_proj(patches) / 6.0  # upstream's, for the activations' size
        for block in self.blocks:
            h = block(h)
        return h


class LatentEncoder(nn.Module):
    """Latents [B, T, C], not yet generated ones 0 -> latent_state [B, T / patch, D'].

    Causal, so a patch does not see what is not yet generated.
    """

    PREFIXES = ("latent_encoder.", "latent_norm.")

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.latent_encoder = PatchEncoder(config)
        self.latent_norm = RMSNorm((config.speaker_model_size,), config.norm_eps)

    def forward(self, latents: Tensor) -> Tensor:
        state: Tensor = self.latent_norm(self.latent_encoder(latents))
        return state
