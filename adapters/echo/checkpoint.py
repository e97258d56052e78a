"""Echo-TTS's released size, and how its checkpoint is read: the denoiser's tensors, and what their shapes tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from voicehub_aot.adapters._echo_irodoritts import checkpoint as checkpoints
from voicehub_aot.adapters.echo.net import Config, EchoDiT
from voicehub_aot.spec.checkpoint import Reading, check_sizes, find
from voicehub_aot.spec.hyperparameters import config_of, named_config, refuse
from voicehub_aot.spec.network import shapes_of, unfilled

NAME = "echo"
FILES = ("pytorch_model.safetensors", "*.safetensors", "*.pt")
OUTSIDE = ("text_encoder.", "speaker_encoder.", "latent_encoder.", "text_norm.", "speaker_norm.", "latent_norm.")

# --- hyperparameters

CONFIGS: Mapping[str, Config] = {
    "echo-tts-base": Config(),
    "tiny": Config(
        latent_size=20,
        model_size=64,
        num_layers=3,
        num_heads=4,
        intermediate_size=112,
        text_model_size=40,
        text_num_layers=1,
        text_num_heads=2,
        text_intermediate_size=56,
        speaker_model_size=36,
        speaker_num_layers=1,
        speaker_num_heads=2,
        speaker_intermediate_size=44,
        timestep_embed_size=32,
        adaln_rank=12,
    ),
}


def config_from(values: Mapping[str, Any]) -> Config:
    config = config_of(NAME, Config, values)
    refuse(NAME, checkpoints.fault(config.sizes))
    return config


# --- keys and shapes


def network(config: Config) -> EchoDiT:
    return unfilled(EchoDiT, config)


def checkpoint_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    return shapes_of(network(config))


def formula_weights(config: Config) -> dict[str, Tensor]:
    """None: rotary and time frequencies are not in checkpoints."""
    return {}


# --- files


def denoiser_part(config: Config, weights: Mapping[str, Tensor]) -> tuple[Config, dict[str, Tensor]]:
    """Without the encoders, and blockwise only if both the config and the weights are."""
    weights = checkpoints.without(weights, OUTSIDE)
    if not config.blockwise:
        weights = {k: v for k, v in weights.items() if not checkpoints.has_context((k,), "latent")}
    return replace(config, blockwise=checkpoints.has_context(weights, "latent")), weights


def read_checkpoint(
    path: Path, config: str | Config | None, reading: Reading | None = None
) -> tuple[Config, dict[str, Tensor]]:
    base = named_config(NAME, CONFIGS, config) or CONFIGS["echo-tts-base"]
    file = find(path, FILES)
    base, weights = denoiser_part(base, checkpoints.read(file, reading or Reading())[0])
    sizes = checkpoints.sizes_of(weights, base.sizes)
    found = replace(
        base,
        latent_size=sizes.latent,
        model_size=sizes.width,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        intermediate_size=sizes.inner,
        text_model_size=sizes.context["text"],
        speaker_model_size=sizes.context["speaker"],
        timestep_embed_size=sizes.waves,
        adaln_rank=sizes.rank,
    )
    check_sizes(file, checkpoints.fault(found.sizes), "an Echo-TTS checkpoint")
    return found, weights
