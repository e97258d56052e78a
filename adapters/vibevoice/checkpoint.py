"""VibeVoice's released sizes, and how the prediction head is read out of its checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from voicehub_aot.adapters.f5tts.sizes import count, size
from voicehub_aot.adapters.vibevoice.net import PREFIX, Config, released_shapes
from voicehub_aot.errors import CheckpointMismatch, UnknownModel, UsageError
from voicehub_aot.spec.checkpoint import Reading, read_weights
from voicehub_aot.spec.hyperparameters import config_of, part_of, without_fixed

NAME = "vibevoice"
CONFIGS: Mapping[str, Config] = {
    "VibeVoice-Realtime-0.5B": Config(hidden_size=896, guidance_scale=1.5),
    "VibeVoice-1.5B": Config(hidden_size=1536),
    "VibeVoice-Large": Config(hidden_size=3584),
    "tiny": Config(hidden_size=24, head_layers=2, head_ffn_ratio=2.5, latent_size=6),
}
FIXED: Mapping[str, Any] = {  # of every release
    "prediction_type": "v_prediction",
    "diffusion_type": "ddpm",
    "ddpm_num_steps": 1000,
    "ddpm_beta_schedule": "cosine",
}
INERT = {"model_type", "speech_vae_dim", "ddpm_num_inference_steps", "ddpm_batch_mul"}  # they change no evaluation


def config_from(values: Mapping[str, Any]) -> Config:
    """Names as in `Config` and upstream's diffusion_head_config, or a whole released config.json that holds one."""
    if "diffusion_head_config" in values:
        values = part_of(NAME, values, "diffusion_head_config")
    given = {name: value for name, value in values.items() if name not in INERT}
    given = without_fixed(NAME, given, FIXED, "every release has")
    config = config_of(NAME, Config, given, INERT | set(FIXED))
    for name in ("hidden_size", "head_layers", "latent_size"):
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{NAME}: {name}={value!r} is no positive integer; give upstream's hyperparameters")
    for name in ("head_ffn_ratio", "rms_norm_eps", "guidance_scale"):
        value = getattr(config, name)
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or (value <= 0 and name != "guidance_scale"):
            raise UsageError(f"{NAME}: {name}={value!r} is no number that it can be; give upstream's hyperparameters")
    return config


def checkpoint_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    return {PREFIX + key: shape for key, shape in released_shapes(config).items()}


NAMES = (PREFIX, "prediction_head.")  # of a whole model, and of its inner module; a head alone has neither
INDEX = "model.safetensors.index.json"


def _files(path: Path) -> list[Path]:
    """The files that hold the head: of a released folder or its index, only the shards that do."""
    index = path / INDEX if path.is_dir() else path
    if index.name.endswith(".index.json") and index.is_file():
        try:
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = {str(name) for key, name in shards.items() if key.startswith(NAMES)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointMismatch(f"{index}: unreadable ({error!r}); wanted JSON with a weight_map") from error
        if not names:
            raise CheckpointMismatch(f"{index}: no key starts with {PREFIX!r}; give a VibeVoice checkpoint")
        return [index.parent / name for name in sorted(names)]
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        listed = ", ".join(f.name for f in found) or "none"
        raise CheckpointMismatch(f"{path}: wanted {INDEX} or one .safetensors, found {listed}; name the file")
    return found


def _head(file: Path, reading: Reading) -> dict[str, Tensor]:
    """Tensors of the head under released keys; the other parts of a whole model are not even read."""
    content: Mapping[str, Any] = read_weights(file, reading, NAMES)[0]
    if not any(str(key).startswith(NAMES) for key in content):
        content = read_weights(file, reading)[0]
    weights = {}
    inside = any(str(key).startswith(NAMES) for key in content)
    for key, value in content.items():
        if inside and not str(key).startswith(NAMES):
            continue
        if not isinstance(value, Tensor):
            raise CheckpointMismatch(f"{file}: {key!r} is a {type(value).__name__}, wanted a tensor")
        weights[PREFIX + str(key).removeprefix(NAMES[0]).removeprefix(NAMES[1])] = value
    return weights


def _sizes(weights: Mapping[str, Tensor], base: Config) -> Config:
    """`base` with the sizes that the tensors have; a tensor that is missing leaves the base's."""

    def told(otherwise: int, *places: tuple[str, int]) -> int:
        return size(weights, otherwise, *((PREFIX + key, axis) for key, axis in places))

    width = told(base.hidden_size, ("cond_proj.weight", 0), ("noisy_images_proj.weight", 0))
    inner = told(
        int(width * base.head_ffn_ratio), ("layers.*.ffn.down_proj.weight", 1), ("layers.*.ffn.up_proj.weight", 0)
    )
    same = int(width * base.head_ffn_ratio) == inner or not width
    return replace(
        base,
        hidden_size=width,
        head_layers=count(weights, PREFIX + "layers") or base.head_layers,
        head_ffn_ratio=base.head_ffn_ratio if same else inner / width,
        latent_size=told(base.latent_size, ("noisy_images_proj.weight", 1), ("final_layer.linear.weight", 0)),
    )


def read_checkpoint(
    path: Path, config: str | Config | None, reading: Reading | None = None
) -> tuple[Config, dict[str, Tensor]]:
    if isinstance(config, str) and config not in CONFIGS:
        raise UnknownModel(f"{NAME}: configuration {config!r} is not known; known are {', '.join(CONFIGS)}")
    weights: dict[str, Tensor] = {}
    for file in _files(path):
        weights |= _head(file, reading or Reading())
    if config is not None:
        return _sizes(weights, CONFIGS[config] if isinstance(config, str) else config), weights
    released = CONFIGS["VibeVoice-1.5B"]
    found = _sizes(weights, released)
    return next((known for known in CONFIGS.values() if _sizes(weights, known) == known), found), weights
