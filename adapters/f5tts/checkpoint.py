"""F5-TTS's released sizes, and how its checkpoints are read: keys, nests, folders, and what their shapes tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from voicehub_aot.adapters._tables import inverse_frequencies
from voicehub_aot.adapters.f5tts.dit import DiT, DiTConfig
from voicehub_aot.adapters.f5tts.net import Config
from voicehub_aot.adapters.f5tts.unett import UNetT, UNetTConfig
from voicehub_aot.errors import CheckpointMismatch, OptionUnsupported, UsageError
from voicehub_aot.spec.checkpoint import COUNTERS, Reading, check_sizes, find, only_tensors, read_weights
from voicehub_aot.spec.hyperparameters import config_of, named_config, not_positive, refuse, without_fixed
from voicehub_aot.spec.network import count, shapes_of, size, unfilled, without_prefix

NAME = "f5tts"
PREFIX = "ema_model.transformer."
FILES = ("**/model*.safetensors", "**/model*.pt")

# --- hyperparameters

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
    """Upstream's configurations do not name the backbone: the hyperparameters that only one of them has tell it."""
    if "skip_connect_type" in names:
        return "UNetT"
    of_dit = {"text_dim", "conv_layers", "long_skip_connection", "text_embedding_average_upsampling"}
    return "DiT" if of_dit & set(names) else "UNetT"


def fault(config: Config) -> str | None:
    """What is wrong with the hyperparameters' values, if anything."""
    if wrong := not_positive(vars(config), SIZES):
        return wrong
    if config.dim % 16:
        return f"dim={config.dim!r} is not a multiple of 16, the groups of the position convolution"
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
    refuse(NAME, fault(config))
    return config


# --- keys and shapes


def network(config: Config) -> nn.Module:
    return unfilled(UNetT, config) if isinstance(config, UNetTConfig) else unfilled(DiT, config)  # type: ignore[arg-type]


def checkpoint_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    return shapes_of(network(config), PREFIX)


def formula_weights(config: Config) -> dict[str, Tensor]:
    return {PREFIX + "rotary_embed.inv_freq": inverse_frequencies(config.dim_head)}


# --- files


def _bare(key: str) -> str:
    return key.removeprefix("ema_model.").removeprefix("transformer.")


def _own_weights(file: Path, reading: Reading) -> dict[str, Tensor]:
    """The network's tensors under released keys. A file may lack their prefix, and hold tensors of other parts."""
    content = read_weights(file, reading)[0]
    own = {k: v for k, v in content.items() if _bare(k) not in COUNTERS and not _bare(k).startswith("mel_spec.")}
    own = only_tensors(file, own, "a tensor, or tensors under 'ema_model_state_dict'")
    return {PREFIX + _bare(key): tensor for key, tensor in own.items()}


def _named_by(file: Path, kind: type[Config]) -> Config:
    """The released config of this backbone that the file's path names; its tensors do not tell the flags."""
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


def _sizes_of(weights: Mapping[str, Tensor], base: Config) -> Config:
    """weights: bare keys. `base` with the sizes that they have; a tensor that is missing leaves the base's."""
    unett = isinstance(base, UNetTConfig)
    blocks = "layers" if unett else "transformer_blocks"
    attn, ff = ("layers.*.2", "layers.*.4.ff") if unett else ("transformer_blocks.*.attn", "transformer_blocks.*.ff.ff")
    dim = size(weights, base.dim, ("proj_out.weight", 1), ("time_embed.time_mlp.2.weight", 0))
    dim_head = 2 * size(weights, base.dim_head // 2, ("rotary_embed.inv_freq", 0))
    mel = size(weights, base.mel_dim, ("proj_out.weight", 0), ("proj_out.bias", 0))
    columns = size(weights, 2 * base.mel_dim + base.text_dim, ("input_embed.proj.weight", 1))  # state, prompt, text
    inner = size(weights, base.ff_mult * dim, (f"{ff}.0.0.weight", 0), (f"{ff}.2.weight", 1))
    long_skip = base.long_skip_connection if isinstance(base, DiTConfig) else False
    own = {} if unett else {"long_skip_connection": long_skip or "long_skip_connection.weight" in weights}
    return replace(
        base,
        dim=dim,
        depth=count(weights, blocks) or base.depth,
        heads=size(weights, base.heads * dim_head, (f"{attn}.to_q.weight", 0)) // max(1, dim_head),
        dim_head=dim_head,
        ff_mult=inner // max(1, dim),
        mel_dim=mel,
        text_num_embeds=size(weights, base.text_num_embeds + 1, ("text_embed.text_embed.weight", 0)) - 1,
        text_dim=size(weights, columns - 2 * mel, ("text_embed.text_embed.weight", 1)),
        conv_layers=count(weights, "text_embed.text_blocks"),
        qk_norm="rms_norm" if any(key.endswith(("q_norm.weight", "k_norm.weight")) for key in weights) else None,
        **own,
    )


def read_checkpoint(
    path: Path, config: str | Config | None, reading: Reading | None = None
) -> tuple[Config, dict[str, Tensor]]:
    """A checkpoint file, or a folder with one: a copy of the hub repository may hold a folder for each config."""
    base = named_config(NAME, CONFIGS, config)
    own = path / config if isinstance(config, str) else path
    file = find(own if own.is_dir() else path, FILES, "name one file, or its --config")
    weights = _own_weights(file, reading or Reading())
    bare = without_prefix(weights, PREFIX)
    kind = UNetTConfig if any(key.startswith("layers.") for key in bare) else DiTConfig
    if not isinstance(base, kind | None):
        backbone = kind.__name__.removesuffix("Config")
        raise CheckpointMismatch(f"{file}: holds a {backbone}, but --config {config} is the other backbone")
    found = _sizes_of(bare, base or _named_by(file, kind))
    check_sizes(file, fault(found), "an F5-TTS checkpoint")
    return found, weights
