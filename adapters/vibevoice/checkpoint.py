"""VibeVoice's released sizes, and how the prediction head is read out of its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from voicehub_aot.adapters.vibevoice.net import PREFIX, Config, PredictionHead, released_shapes
from voicehub_aot.errors import CheckpointMismatch
from voicehub_aot.spec.checkpoint import Reading, check_sizes, only_tensors, read_weights
from voicehub_aot.spec.hyperparameters import config_of, named_config, not_positive, part_of, refuse, without_fixed
from voicehub_aot.spec.network import count, size, unfilled, without_prefix

NAME = "vibevoice"
NAMES = (PREFIX, "prediction_head.")  # of a whole model, and of its inner module; a head alone has neither
INDEX = "model.safetensors.index.json"

# --- hyperparameters

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


def fault(config: Config) -> str | None:
    """What is wrong with the hyperparameters' values, if anything."""
    if wrong := not_positive(vars(config), ("hidden_size", "head_layers", "latent_size")):
        return wrong
    ratios = {"head_ffn_ratio": config.head_ffn_ratio, "rms_norm_eps": config.rms_norm_eps}
    return next((f"{name}={value!r} is not a positive number" for name, value in ratios.items() if not value > 0), None)


def config_from(values: Mapping[str, Any]) -> Config:
    """Names as in `Config` and upstream's diffusion_head_config, or a whole released config.json that holds one."""
    if "diffusion_head_config" in values:
        values = part_of(NAME, values, "diffusion_head_config")
    given = {name: value for name, value in values.items() if name not in INERT}
    given = without_fixed(NAME, given, FIXED, "every release has")
    config = config_of(NAME, Config, given, INERT | set(FIXED))
    refuse(NAME, fault(config))
    return config


# --- keys and shapes


def network(config: Config) -> PredictionHead:
    """Its keys are ours, not the released ones: `module_state` leads from one to the other."""
    return unfilled(PredictionHead, config)


def checkpoint_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    return {PREFIX + key: shape for key, shape in released_shapes(config).items()}


def formula_weights(config: Config) -> dict[str, Tensor]:
    """None: every entry is learned."""
    return {}


# --- files


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


def _own_weights(file: Path, reading: Reading) -> dict[str, Tensor]:
    """The head's tensors under released keys; the other parts of a whole model are not even read."""
    content: Mapping[str, Any] = read_weights(file, reading, NAMES)[0]
    if not any(key.startswith(NAMES) for key in content):
        content = read_weights(file, reading)[0]
    inside = any(key.startswith(NAMES) for key in content)
    own = only_tensors(file, {k: v for k, v in content.items() if not inside or k.startswith(NAMES)})
    return {PREFIX + key.removeprefix(NAMES[0]).removeprefix(NAMES[1]): tensor for key, tensor in own.items()}


def _sizes_of(weights: Mapping[str, Tensor], base: Config) -> Config:
    """weights: bare keys. `base` with the sizes that they have; a tensor that is missing leaves the base's."""
    width = size(weights, base.hidden_size, ("cond_proj.weight", 0), ("noisy_images_proj.weight", 0))
    places = (("layers.*.ffn.down_proj.weight", 1), ("layers.*.ffn.up_proj.weight", 0))
    inner = size(weights, int(width * base.head_ffn_ratio), *places)
    same = int(width * base.head_ffn_ratio) == inner or not width
    latent = size(weights, base.latent_size, ("noisy_images_proj.weight", 1), ("final_layer.linear.weight", 0))
    return replace(
        base,
        hidden_size=width,
        head_layers=count(weights, "layers") or base.head_layers,
        head_ffn_ratio=base.head_ffn_ratio if same else inner / width,
        latent_size=latent,
    )


def read_checkpoint(
    path: Path, config: str | Config | None, reading: Reading | None = None
) -> tuple[Config, dict[str, Tensor]]:
    """A released folder, its index, or one file: a whole model, its inner module, or the head alone."""
    base = named_config(NAME, CONFIGS, config)
    weights: dict[str, Tensor] = {}
    for file in _files(path):
        weights |= _own_weights(file, reading or Reading())
    bare = without_prefix(weights, PREFIX)
    found = _sizes_of(bare, base or CONFIGS["VibeVoice-1.5B"])
    if base is None:
        found = next((known for known in CONFIGS.values() if _sizes_of(bare, known) == known), found)
    check_sizes(path, fault(found), "a VibeVoice checkpoint")
    return found, weights
