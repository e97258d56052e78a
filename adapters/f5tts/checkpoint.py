"""F5-TTS's released sizes, and how its checkpoints are read: keys, nests, folders, and what their shapes tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from voicehub_aot.adapters.f5tts import sizes
from voicehub_aot.adapters.f5tts.net import Config, DiT, DiTConfig, inverse_frequencies
from voicehub_aot.adapters.f5tts.unett import UNetT, UNetTConfig
from voicehub_aot.errors import CheckpointMismatch, OptionUnsupported, UnknownModel, UsageError
from voicehub_aot.spec.checkpoint import Reading, read_weights
from voicehub_aot.spec.hyperparameters import config_of, without_fixed

NAME = "f5tts"

_V1 = DiTConfig(dim=1024, depth=22, heads=16, ff_mult=2, text_num_embeds=2545, text_dim=512, conv_layers=4)
_E2 = UNetTConfig(dim=1024, depth=24, heads=16, text_num_embeds=2545, text_mask_padding=False, pe_attn_head=1)
_TINY = DiTConfig(
    dim=64, depth=2, heads=4, dim_head=16, ff_mult=2, mel_dim=20, text_num_embeds=24, text_dim=32, conv_layers=2
)
CONFIGS: Mapping[str, Config] = {
    "F5TTS_v1_Base": _V1,
    "F5TTS_v1_Base_no_zero_init": _V1,
    "F5TTS_Base": replace(_V1, text_mask_padding=False, pe_attn_head=1),
    "E2TTS_Base": _E2,
    "tiny": _TINY,
}

BACKBONES: Mapping[str, type[Config]] = {"DiT": DiTConfig, "UNetT": UNetTConfig}
INERT = {"attn_backend", "dropout", "checkpoint_activations"}  # they change no inference result
SIZES = ("dim", "depth", "heads", "dim_head", "ff_mult", "mel_dim", "text_num_embeds", "text_dim")


def _backbone_of(names: Iterable[str]) -> str:
    """Upstream's configurations name the backbone elsewhere: tell it by what only one of them is given."""
    if "skip_connect_type" in names:
        return "UNetT"
    of_dit = {"text_dim", "conv_layers", "long_skip_connection", "text_embedding_average_upsampling"}
    return "DiT" if of_dit & set(names) else "UNetT"


def _fault(config: Config) -> str | None:
    """What is wrong with the hyperparameters' values, if anything."""
    for name in SIZES:
        value = getattr(config, name)
        if not isinstance(value, int) or value < 1:
            return f"{name}={value!r} is no positive integer"
    if config.dim % 16:
        return f"dim={config.dim!r} is no multiple of 16, the groups of the position convolution"
    if isinstance(config, UNetTConfig):
        if config.depth % 2:
            return f"depth={config.depth!r} is odd, but UNetT pairs its layers"
        if config.skip_connect_type not in ("concat", "add", "none"):
            return f"skip_connect_type={config.skip_connect_type!r} is not one of concat, add, none"
    return None


def config_from(values: Mapping[str, Any]) -> Config:
    given = {name: value for name, value in values.items() if name not in INERT}
    backbone = given.pop("backbone", _backbone_of(values))
    if not isinstance(backbone, str) or backbone not in BACKBONES:
        raise UsageError(f"{NAME}: backbone {backbone!r} is not known; known are {', '.join(BACKBONES)}")
    given = without_fixed(NAME, given, {"text_embedding_average_upsampling": False}, "every release has")
    if isinstance(given.get("qk_norm"), str) and given["qk_norm"] != "rms_norm":
        raise OptionUnsupported(f"{NAME}: qk_norm {given['qk_norm']!r} is not supported; known are None, 'rms_norm'")
    if given.get("text_dim") is None:
        given["text_dim"] = given.get("mel_dim", 100)
    config = config_of(f"{NAME} {backbone}", BACKBONES[backbone], given, INERT)
    if fault := _fault(config):
        raise UsageError(f"{NAME}: {fault}; give upstream's hyperparameters")
    return config


PREFIX = "ema_model.transformer."
FILES = ("model*.safetensors", "model*.pt")


def network(config: Config) -> nn.Module:
    """Without storage: only keys and shapes, until weights are assigned."""
    with torch.device("meta"):
        return UNetT(config) if isinstance(config, UNetTConfig) else DiT(config)  # type: ignore[arg-type]


def checkpoint_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    return {PREFIX + key: tuple(tensor.shape) for key, tensor in network(config).state_dict().items()}


def formula_weights(config: Config) -> dict[str, Tensor]:
    return {PREFIX + "rotary_embed.inv_freq": inverse_frequencies(config.dim_head)}


def _find(path: Path, config: str | None) -> Path:
    """The one checkpoint file in a folder, which may be a copy of the hub repository with a folder per config."""
    if path.is_file():
        return path
    folder = path / config if config and (path / config).is_dir() else path
    for pattern in FILES:
        found = sorted(folder.rglob(pattern))
        if len(found) > 1:
            names = ", ".join(str(f.relative_to(path)) for f in found)
            raise CheckpointMismatch(f"{path}: several checkpoints ({names}); name one file, or its --config")
        if found:
            return found[0]
    raise CheckpointMismatch(f"{path}: no {' or '.join(FILES)} in it; name the checkpoint file")


def _released_keys(file: Path, content: Mapping[str, Any]) -> dict[str, Tensor]:
    """Bare or prefixed keys -> prefixed ones, without what belongs to training or to the mel front end."""
    weights = {}
    for key, value in content.items():
        bare = str(key).removeprefix("ema_model.").removeprefix("transformer.")
        if bare in ("initted", "step") or bare.startswith("mel_spec."):
            continue
        if not isinstance(value, Tensor):
            raise CheckpointMismatch(
                f"{file}: {key!r} is a {type(value).__name__}, wanted a tensor, or tensors under 'ema_model_state_dict'"
            )
        weights[PREFIX + bare] = value
    return weights


def _flags(file: Path, config: str | Config | None, weights: Mapping[str, Tensor]) -> Config:
    """The config whose flags hold for this file: the one given or named, else the one its path names."""
    kind = UNetTConfig if any(k.startswith(PREFIX + "layers.") for k in weights) else DiTConfig
    if config is not None:
        if isinstance(config, str) and config not in CONFIGS:
            raise UnknownModel(f"{NAME}: configuration {config!r} is not known; known are {', '.join(CONFIGS)}")
        given = CONFIGS[config] if isinstance(config, str) else config
        if not isinstance(given, kind):
            raise CheckpointMismatch(
                f"{file}: holds a {kind.__name__.removesuffix('Config')}, but --config {config} is the other backbone"
            )
        return given
    for part in reversed(file.absolute().parts):
        for name, known in CONFIGS.items():
            if name != "tiny" and name in part and isinstance(known, kind):
                return known
    if kind is UNetTConfig:
        return _E2
    raise CheckpointMismatch(
        f"{file}: F5TTS_v1_Base and F5TTS_Base have the same tensors but other flags, and the path names neither; "
        "choose with --config"
    )


def _sizes(weights: Mapping[str, Tensor], base: Config) -> Config:
    """`base` with the sizes that the tensors have; a tensor that is missing leaves the base's."""
    unett = isinstance(base, UNetTConfig)
    blocks = "layers" if unett else "transformer_blocks"
    attn, ff = ("layers.*.2", "layers.*.4.ff") if unett else ("transformer_blocks.*.attn", "transformer_blocks.*.ff.ff")

    def size(otherwise: int, *places: tuple[str, int]) -> int:
        return sizes.size(weights, otherwise, *((PREFIX + key, axis) for key, axis in places))

    dim = size(base.dim, ("proj_out.weight", 1), ("time_embed.time_mlp.2.weight", 0))
    dim_head = 2 * size(base.dim_head // 2, ("rotary_embed.inv_freq", 0))
    mel = size(base.mel_dim, ("proj_out.weight", 0), ("proj_out.bias", 0))
    columns = size(2 * base.mel_dim + base.text_dim, ("input_embed.proj.weight", 1))  # of state, prompt and text
    long_skip = base.long_skip_connection if isinstance(base, DiTConfig) else False
    own = {} if unett else {"long_skip_connection": long_skip or PREFIX + "long_skip_connection.weight" in weights}
    return replace(
        base,
        dim=dim,
        depth=sizes.count(weights, PREFIX + blocks) or base.depth,
        heads=size(base.heads * dim_head, (f"{attn}.to_q.weight", 0)) // max(1, dim_head),
        dim_head=dim_head,
        ff_mult=size(base.ff_mult * dim, (f"{ff}.0.0.weight", 0), (f"{ff}.2.weight", 1)) // max(1, dim),
        mel_dim=mel,
        text_num_embeds=size(base.text_num_embeds + 1, ("text_embed.text_embed.weight", 0)) - 1,
        text_dim=size(columns - 2 * mel, ("text_embed.text_embed.weight", 1)),
        conv_layers=sizes.count(weights, f"{PREFIX}text_embed.text_blocks"),
        qk_norm="rms_norm" if any(key.endswith(("q_norm.weight", "k_norm.weight")) for key in weights) else None,
        **own,
    )


def read_checkpoint(
    path: Path, config: str | Config | None, reading: Reading | None = None
) -> tuple[Config, dict[str, Tensor]]:
    file = _find(path, config if isinstance(config, str) else None)
    weights = _released_keys(file, read_weights(file, reading or Reading())[0])
    found = _sizes(weights, _flags(file, config, weights))
    if fault := _fault(found):
        raise CheckpointMismatch(f"{file}: its tensors have impossible shapes: {fault}; give an F5-TTS checkpoint")
    return found, weights
