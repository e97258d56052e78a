"""Irodori-TTS's denoiser, in its conditioning sets: text and speaker, text and caption, or all three.

Facts from Aratako/Irodori-TTS eaf74d6a19138f743acb5b71a445fd25a57db987 (MIT), irodori_tts/{model,config}.py. Parameters
keep upstream's names and shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from voicehub_aot.adapters._echo_irodoritts.net import Context, RectifiedFlowTransformer, Sizes


@dataclass(frozen=True)
class Config:
    """Upstream's hyperparameters that shape the region, and upstream's defaults.

    use_speaker_condition: None = when captions are off. caption_dim: None = text_dim.
    """

    latent_dim: int = 128
    latent_patch_size: int = 1
    model_dim: int = 2048
    num_layers: int = 24
    num_heads: int = 16
    mlp_ratio: float = 2.875
    text_dim: int = 1280
    speaker_dim: int = 1280
    caption_dim: int | None = None
    use_speaker_condition: bool | None = None
    use_caption_condition: bool = False
    timestep_embed_dim: int = 512
    adaln_rank: int = 256
    norm_eps: float = 1e-5

    @property
    def conditions(self) -> tuple[str, ...]:
        """In the order of upstream's keys and guidance branches."""
        speaker = self.use_speaker_condition
        with_speaker = not self.use_caption_condition if speaker is None else speaker
        present = (("text", True), ("speaker", with_speaker), ("caption", self.use_caption_condition))
        return tuple(name for name, there in present if there)

    @property
    def sizes(self) -> Sizes:
        caption = self.text_dim if self.caption_dim is None else self.caption_dim
        widths = {"text": self.text_dim, "speaker": self.speaker_dim, "caption": caption}
        return Sizes(
            latent=self.latent_dim * self.latent_patch_size,
            width=self.model_dim,
            layers=self.num_layers,
            heads=self.num_heads,
            inner=int(self.model_dim * self.mlp_ratio),
            waves=self.timestep_embed_dim,
            rank=self.adaln_rank,
            eps=self.norm_eps,
            context={name: widths[name] for name in self.conditions},
        )


class TextToLatentRFDiT(RectifiedFlowTransformer):
    """The arguments are the region's inputs; returns the velocity [B, T, C]. Absent conditions are left out."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.sizes)

    def forward(
        self,
        *,
        x_t: Tensor,
        time: Tensor,
        text_state: Tensor,
        text_mask: Tensor,
        hidden: Tensor,
        lengths: Tensor,
        drop_text: Tensor,
        speaker_state: Tensor | None = None,
        speaker_mask: Tensor | None = None,
        speaker_scale: Tensor | None = None,
        drop_speaker: Tensor | None = None,
        caption_state: Tensor | None = None,
        caption_mask: Tensor | None = None,
        drop_caption: Tensor | None = None,
    ) -> Tensor:
        position = torch.arange(hidden.shape[1], device=hidden.device)
        seen = (position < lengths[:, None]) & ~hidden
        sources = {"text": Context(text_state, text_mask & ~drop_text[:, None])}
        if speaker_state is not None and speaker_mask is not None and drop_speaker is not None:
            visible = speaker_mask & ~drop_speaker[:, None]
            sources["speaker"] = Context(speaker_state, visible, scale=speaker_scale)
        if caption_state is not None and caption_mask is not None and drop_caption is not None:
            sources["caption"] = Context(caption_state, caption_mask & ~drop_caption[:, None])
        return self.velocity(x_t, time, position, seen, sources)
