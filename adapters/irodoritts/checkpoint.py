"""Irodori-TTS's released sizes, and how its checkpoints are read: the denoiser's part, and what its shapes tell."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from voicehub_aot.adapters._echo_irodoritts import checkpoint as checkpoints
from voicehub_aot.adapters._echo_irodoritts.net import Sizes
from voicehub_aot.adapters.irodoritts.net import Config, TextToLatentRFDiT
from voicehub_aot.errors import CheckpointMismatch, UsageError
from voicehub_aot.spec.checkpoint import Reading, check_sizes, find
from voicehub_aot.spec.hyperparameters import config_of, named_config, refuse
from voicehub_aot.spec.network import shapes_of, unfilled

NAME = "irodoritts"
FILES = ("model.safetensors", "*.safetensors", "*.pt")
METADATA = "config_json"
OUTSIDE = (
    *(f"{name}_{part}." for name in ("text", "speaker", "caption") for part in ("encoder", "norm")),
    "duration_predictor.",
)

# --- hyperparameters

_RELEASED = Config(
    latent_dim=32, model_dim=1280, num_layers=12, num_heads=20, text_dim=512, speaker_dim=768, adaln_rank=192
)
_TINY = Config(
    latent_dim=12,
    model_dim=48,
    num_layers=3,
    num_heads=4,
    text_dim=40,
    speaker_dim=36,
    timestep_embed_dim=32,
    adaln_rank=10,
)
CONFIGS: Mapping[str, Config] = {
    "Irodori-TTS-500M-v3": _RELEASED,
    "Irodori-TTS-600M-v3-VoiceDesign": replace(_RELEASED, use_speaker_condition=True, use_caption_condition=True),
    "Irodori-TTS-500M-v2": _RELEASED,
    "Irodori-TTS-500M-v2-VoiceDesign": replace(_RELEASED, use_caption_condition=True),
    "tiny": _TINY,
    "tiny-caption": replace(_TINY, use_speaker_condition=True, use_caption_condition=True, caption_dim=44),
}
INERT = {  # of the encoders, the tokenizers and training
    "dropout", "text_vocab_size", "text_tokenizer_repo", "text_add_bos", "text_layers", "text_heads", "text_mlp_ratio",
    "caption_vocab_size", "caption_tokenizer_repo", "caption_add_bos", "caption_layers", "caption_heads",
    "caption_mlp_ratio", "speaker_layers", "speaker_heads", "speaker_mlp_ratio", "speaker_patch_size",
    "use_duration_predictor",
}  # fmt: skip
INERT_PREFIX = "duration_"


def _shaping(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in INERT and not name.startswith(INERT_PREFIX)}


def config_from(values: Mapping[str, Any]) -> Config:
    config = config_of(NAME, Config, _shaping(values), INERT)
    refuse(NAME, checkpoints.fault(config.sizes))
    return config


# --- keys and shapes


def network(config: Config) -> TextToLatentRFDiT:
    return unfilled(TextToLatentRFDiT, config)


def checkpoint_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    return shapes_of(network(config))


def formula_weights(config: Config) -> dict[str, Tensor]:
    """None: rotary and time frequencies are not in checkpoints."""
    return {}


# --- files


def _recorded(file: Path, beside: Mapping[str, Any]) -> Config | None:
    """The hyperparameters that a released or a trainer's file holds; it may hold a tokenizer's limits as well."""
    values = beside.get("model_config")
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="pt") as opened:
                values = json.loads((opened.metadata() or {}).get(METADATA, "null"))
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointMismatch(f"{file}: its {METADATA} is unreadable ({error})") from error
    if not isinstance(values, Mapping):
        return None
    known = {f.name for f in fields(Config)}
    try:
        return config_from({name: value for name, value in values.items() if name in known})
    except (UsageError, TypeError) as error:
        raise CheckpointMismatch(f"{file}: its hyperparameters are impossible: {error}") from error


def _ratio(sizes: Sizes, base: float) -> float:
    """`base` if it gives the MLP's width, else one that does: a ratio is cut to whole channels."""
    return base if int(sizes.width * base) == sizes.inner else (sizes.inner + 0.5) / max(1, sizes.width)


def read_checkpoint(
    path: Path, config: str | Config | None, reading: Reading | None = None
) -> tuple[Config, dict[str, Tensor]]:
    given = named_config(NAME, CONFIGS, config)
    file = find(path, FILES)
    everything, beside = checkpoints.read(file, reading or Reading())
    weights = checkpoints.without(everything, OUTSIDE)
    base = given or _recorded(file, beside) or _RELEASED
    conditions = {name: checkpoints.has_context(weights, name) for name in ("speaker", "caption")}
    found = replace(base, use_speaker_condition=conditions["speaker"], use_caption_condition=conditions["caption"])
    sizes = checkpoints.sizes_of(weights, found.sizes)
    found = replace(
        found,
        latent_dim=sizes.latent // base.latent_patch_size,
        model_dim=sizes.width,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        mlp_ratio=_ratio(sizes, base.mlp_ratio),
        text_dim=sizes.context["text"],
        speaker_dim=sizes.context.get("speaker", base.speaker_dim),
        caption_dim=sizes.context.get("caption", base.caption_dim),
        timestep_embed_dim=sizes.waves,
        adaln_rank=sizes.rank,
    )
    check_sizes(file, checkpoints.fault(found.sizes), "an Irodori-TTS checkpoint")
    return next((known for known in CONFIGS.values() if known.sizes == found.sizes), found), weights
