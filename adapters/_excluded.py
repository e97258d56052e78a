"""Models of VoiceHub that have no denoiser to compile, and why.

Source: kadirnar/VoiceHub 6b065341, docs/guides/diffusion-optimization.md, docs/guides/vits-optimization.md and
docs/models/providers.
"""

from __future__ import annotations

from collections.abc import Mapping

_AUTOREGRESSIVE = "it predicts audio tokens one after another, so that no denoiser runs"
_NORMALIZING_FLOW = "its flow is an invertible transform that runs once, and not a sampler with steps"

EXCLUDED: Mapping[str, str] = {
    **dict.fromkeys(
        ("conversationtts", "csm", "fishtts", "higgstts", "llasa", "mosstts", "neutts", "orpheustts", "outetts", "vui"),
        _AUTOREGRESSIVE,
    ),
    **dict.fromkeys(("zonos", "zonos2"), _AUTOREGRESSIVE),
    **dict.fromkeys(("inflecttts", "melotts", "openvoice", "vits"), _NORMALIZING_FLOW),
    "gptsovits": "VoiceHub runs its semantic model and a VITS graph, and not the flow of its versions 3 and 4",
    "kokoro": "its style diffusion was not released",
    "omnivoice": "'denoise' is a control token of it, and not a sampler",
    "qwen3tts": "its codec decoder is not a denoiser; VoiceHub does not reach the DiT of its 25 Hz codec",
    "xtts": "VoiceHub does not reach Tortoise's diffusion from it",
}
