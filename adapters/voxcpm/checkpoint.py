"""VoxCPM's released sizes, and how its checkpoints are read: config.json, whole-model files, LoRA.

Upstream: OpenBMB/VoxCPM 616d3d3e630a9c96c2853250eef91b0f39dcd5fa, src/voxcpm/model/{voxcpm,voxcpm2}.py and
modules/minicpm4/config.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from voicehub_aot.adapters.voxcpm.factors import FACTORS_32, FACTORS_64
from voicehub_aot.adapters.voxcpm.net import Config, LocDiT
from voicehub_aot.errors import CheckpointMismatch, OptionUnsupported, UsageError
from voicehub_aot.spec.checkpoint import (
    Reading,
    check_shapes,
    check_sizes,
    find,
    only_tensors,
    read_weights,
    refuse_lora,
)
from voicehub_aot.spec.hyperparameters import config_of, named_config, not_positive, part_of, refuse
from voicehub_aot.spec.network import count, shapes_of, size, unfilled, without_prefix

NAME = "voxcpm"
PREFIX = "feat_decoder.estimator."
OUTSIDE = (  # of a whole-model file: language models, patch encoder, what lies between them, the codec
    *("base_lm.", "residual_lm.", "feat_encoder.", "audio_vae.", "fsq_layer.", "stop_proj.", "stop_head."),
    *("lm_to_dit_proj.", "res_to_dit_proj.", "enc_to_lm_proj.", "fusion_concat_proj."),
)
FILES = ("model.safetensors", "pytorch_model.bin")

# --- hyperparameters


def _released(variant: str, layers: int, head: int, patch: int, factors: tuple[float, ...]) -> Config:
    return Config(
        variant=variant,  # type: ignore[arg-type]
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=2,
        kv_channels=head,
        rope_factors=factors,
        patch_size=patch,
        context_size=patch,
        mu_tokens=2 if variant == "v2" else 1,
    )


_TINY: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "feat_dim": 7,
}
CONFIGS: Mapping[str, Config] = {
    "VoxCPM2": _released("v2", 12, 128, 4, FACTORS_64),
    "VoxCPM1.5": _released("v1", 8, 64, 4, FACTORS_32),
    "VoxCPM-0.5B": _released("v1", 4, 64, 2, FACTORS_32),
    "tiny": Config(variant="v2", kv_channels=10, rope_factors=(1.0, 1.2, 1.7, 2.6, 4.1), mu_tokens=2, **_TINY),
    "tiny-v1": Config(
        variant="v1", kv_channels=8, rope_factors=(1.0, 1.2, 1.7, 2.6), patch_size=3, context_size=3, **_TINY
    ),
}

SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("kv_channels", "feat_dim", "patch_size", "context_size", "mu_tokens"),
)


def fault(config: Config) -> str | None:
    """What is wrong with the hyperparameters' values, if anything."""
    if wrong := not_positive(vars(config), SIZES):
        return wrong
    c = config
    positive = {"rope_scale": c.rope_scale, "rope_theta": c.rope_theta, "rms_norm_eps": c.rms_norm_eps}
    faults = {f"{name}={value!r} is not positive": not value > 0 for name, value in positive.items()} | {
        "rope_factors holds numbers that are not positive": not all(f > 0 for f in c.rope_factors),
        f"variant={c.variant!r} is not one of 'v1', 'v2'": c.variant not in ("v1", "v2"),
        f"mu_tokens={c.mu_tokens!r}, but v1 has 1": c.variant == "v1" and c.mu_tokens != 1,
        f"hidden_size={c.hidden_size!r} is odd or less than 4": c.hidden_size % 2 == 1 or c.hidden_size < 4,
        f"kv_channels={c.kv_channels!r} is odd": c.kv_channels % 2 == 1,
        f"num_attention_heads={c.num_attention_heads!r} is not a multiple of num_key_value_heads="
        f"{c.num_key_value_heads!r}": c.num_attention_heads % c.num_key_value_heads != 0,
        f"{len(c.rope_factors)} rotary factors for heads of {c.kv_channels!r}; wanted {c.kv_channels // 2}": (
            len(c.rope_factors) != c.kv_channels // 2
        ),
    }
    return next((fault for fault, is_so in faults.items() if is_so), None)


def config_from(values: Mapping[str, Any]) -> Config:
    """One of three forms: the released config.json; a decoder's configuration under `decoder`; the fields of `Config`.

    With any of them use_cfg_zero_star=False chooses plain guidance; upstream has it as an argument of its loop.
    """
    given = dict(values)
    own = {name: given.pop(name) for name in ("use_cfg_zero_star",) if name in given}
    if "lm_config" in given or "dit_config" in given:
        return _of_release(given, own)
    if "decoder" in given:
        return _of_decoder(given, own)
    return _checked({**given, **own})


def _checked(values: Mapping[str, Any]) -> Config:
    config = config_of(NAME, Config, values)
    refuse(NAME, fault(config))
    return config


def _only(values: Mapping[str, Any], known: list[str], what: str) -> None:
    if unknown := sorted(set(values) - set(known)):
        raise UsageError(f"{NAME}: {what} {unknown!r} are not known; known are {sorted(known)!r}")


def _all(values: Mapping[str, Any], wanted: list[str], what: str) -> None:
    if missing := [name for name in wanted if name not in values]:
        raise UsageError(f"{NAME}: {what} {missing!r} are missing, got {sorted(values)!r}")


# MiniCPM4Config's names that a decoder without embedding and without context limit does not use.
INERT = ("bos_token_id", "eos_token_id", "vocab_size", "scale_emb", "dim_model_base")
OF_DECODER = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("rms_norm_eps", "rope_theta", "rope_scaling", "max_position_embeddings", "scale_depth"),
)
OF_DIT = {"hidden_dim": "hidden_size", "ffn_dim": "intermediate_size", "num_heads": "num_attention_heads"}
OF_DIT |= {"num_layers": "num_hidden_layers"}


def _of_release(values: Mapping[str, Any], own: Mapping[str, Any]) -> Config:
    """config.json: the decoder is the language model's configuration with dit_config's sizes.

    mean_mode inside dit_config is not read: upstream's field is dit_mean_mode, at the root in v1.
    """
    _all(values, ["architecture", "lm_config", "dit_config"], "fields of config.json")
    variants = {"voxcpm": "v1", "voxcpm2": "v2"}
    architecture = values["architecture"]
    if not isinstance(architecture, str):
        raise UsageError(f"{NAME}: architecture={architecture!r} is not text; known are {', '.join(variants)}")
    if architecture.lower() not in variants:
        raise OptionUnsupported(f"{NAME}: architecture {architecture!r} is not known; known are {', '.join(variants)}")
    variant, dit = variants[architecture.lower()], part_of(NAME, values, "dit_config")
    _all(dit, list(OF_DIT), "fields of dit_config")
    loop = part_of(NAME, dit, "cfm_config") if "cfm_config" in dit else {}
    if (solver := loop.get("solver", "euler")) != "euler":
        raise OptionUnsupported(f"{NAME}: solver {solver!r} is not known; upstream's loop is 'euler'")
    model = part_of(NAME, values, "lm_config")
    decoder = {name: value for name, value in model.items() if name in (*OF_DECODER, "use_mup")}
    decoder |= {ours: dit[theirs] for theirs, ours in OF_DIT.items()} | {"kv_channels": dit.get("kv_channels")}
    mean = dit.get("dit_mean_mode", False) if variant == "v2" else values.get("dit_mean_mode", False)
    patch = values.get("patch_size", 4 if variant == "v2" else 2)
    sizes = {"feat_dim": values.get("feat_dim", 64), "patch_size": patch, "mean_mode": mean}
    return _of_decoder({"variant": variant, "decoder": decoder, **sizes}, own)


def _of_decoder(values: Mapping[str, Any], own: Mapping[str, Any]) -> Config:
    outer = ["variant", "decoder", "feat_dim", "mean_mode", "patch_size", "context_size", "mu_tokens"]
    _only(values, outer, "hyperparameters")
    _all(values, ["variant", "decoder"], "hyperparameters")
    decoder = {name: value for name, value in part_of(NAME, values, "decoder").items() if name not in INERT}
    _only(decoder, [*OF_DECODER, "use_mup", "kv_channels", "no_rope", *INERT], "hyperparameters of the decoder")
    _all(decoder, list(OF_DECODER), "hyperparameters of the decoder")
    if decoder.pop("no_rope", False):
        raise OptionUnsupported(f"{NAME}: a decoder with no_rope=True is not supported; no release has one")
    factors, scale = _rope(part_of(NAME, decoder, "rope_scaling"), decoder["max_position_embeddings"])
    width = decoder.get("kv_channels") or _size(decoder, "hidden_size") // _size(decoder, "num_attention_heads")
    decoder = {k: v for k, v in decoder.items() if k not in ("rope_scaling", "max_position_embeddings", "kv_channels")}
    patch = values.get("patch_size", 4)
    given = {name: value for name, value in values.items() if name != "decoder"}
    derived = {"context_size": patch, "mu_tokens": 2 if values["variant"] == "v2" else 1, "use_mup": True}
    rope = {"kv_channels": width, "rope_factors": factors, "rope_scale": scale}
    return _checked({**derived, **decoder, **given, **own, **rope})


def _size(values: Mapping[str, Any], name: str) -> int:
    refuse(NAME, not_positive(values, (name,)))
    return int(values[name])


def _rope(scaling: Mapping[str, Any], longest: Any) -> tuple[tuple[float, ...], float]:
    """The factors that the context length chooses, once and for every sequence, and the scale of cos and sin."""
    _all(scaling, ["type", "long_factor", "short_factor", "original_max_position_embeddings"], "fields of rope_scaling")
    if scaling["type"] != "longrope":
        raise OptionUnsupported(f"{NAME}: rope_scaling of type {scaling['type']!r} is not known; wanted 'longrope'")
    original = _size(scaling, "original_max_position_embeddings")
    longest = _size({"max_position_embeddings": longest}, "max_position_embeddings")
    if original == 1:
        raise UsageError(f"{NAME}: original_max_position_embeddings=1, wanted 2 or more")
    name = "long_factor" if longest > original else "short_factor"
    factors = scaling[name]
    if not isinstance(factors, list | tuple) or not all(
        isinstance(f, int | float) and not isinstance(f, bool) and 0 < f < math.inf for f in factors
    ):
        raise UsageError(f"{NAME}: {name}={factors!r} is not a list of positive numbers")
    return tuple(map(float, factors)), math.sqrt(1 + math.log(longest / original) / math.log(original))


# --- keys and shapes


def network(config: Config) -> LocDiT:
    """Its rotary rows have storage: they are formulas, not weights."""
    return unfilled(LocDiT, config)


def checkpoint_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    return shapes_of(network(config), PREFIX)


def formula_weights(config: Config) -> dict[str, Tensor]:
    """None: rotary rows are not in checkpoints."""
    return {}


# --- files


def _own_weights(file: Path, reading: Reading) -> dict[str, Tensor]:
    """The estimator's tensors under released keys, and whatever belongs to no part of the model."""
    content, _ = read_weights(file, reading)
    refuse_lora(file, content)
    own = {key: value for key, value in content.items() if not key.startswith(OUTSIDE)}
    return only_tensors(file, own, "tensors")


def _config_beside(file: Path) -> Config | None:
    """What config.json in the same folder says."""
    path = file.parent / "config.json"
    if not path.is_file():
        return None
    try:
        return config_from(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, AttributeError, UsageError, OptionUnsupported) as error:
        raise CheckpointMismatch(f"{path}: {error}; wanted the config.json of a VoxCPM release") from error


def _released_as(file: Path, weights: Mapping[str, Tensor]) -> Config:
    """The first release that has all of these keys and shapes, and this depth."""
    shapes = {key: tuple(tensor.shape) for key, tensor in weights.items()}
    depth = count(weights, PREFIX + "decoder.layers")
    for known in CONFIGS.values():
        if known.num_hidden_layers == depth and shapes.items() <= checkpoint_shapes(known).items():
            return known
    raise CheckpointMismatch(
        f"{file}: no config.json beside it, and its {len(weights)} tensors are those of no released model; "
        "put config.json there, or choose with --config"
    )


def _sizes_of(weights: Mapping[str, Tensor], base: Config) -> Config:
    """weights: bare keys. `base` with their sizes. The width of a head is the base's: its rotary factors are."""
    c, layer = base, "decoder.layers.*"
    query = size(weights, c.num_attention_heads * c.kv_channels, (f"{layer}.self_attn.q_proj.weight", 0))
    key = size(weights, c.num_key_value_heads * c.kv_channels, (f"{layer}.self_attn.k_proj.weight", 0))
    return replace(
        base,
        hidden_size=size(weights, c.hidden_size, ("in_proj.weight", 0), ("cond_proj.weight", 0)),
        intermediate_size=size(weights, c.intermediate_size, (f"{layer}.mlp.gate_proj.weight", 0)),
        num_hidden_layers=count(weights, "decoder.layers") or c.num_hidden_layers,
        num_attention_heads=query // c.kv_channels,
        num_key_value_heads=key // c.kv_channels,
        feat_dim=size(weights, c.feat_dim, ("in_proj.weight", 1), ("cond_proj.weight", 1)),
    )


def read_checkpoint(
    path: Path, config: str | Config | None, reading: Reading | None = None
) -> tuple[Config, dict[str, Tensor]]:
    """A released folder or its weight file. Hyperparameters: `config`, or else config.json, or else the shapes'.

    Sizes that the tensors tell are theirs.
    """
    given = named_config(NAME, CONFIGS, config)
    file = find(path, FILES)
    weights = _own_weights(file, reading or Reading())
    base = given or _config_beside(file) or _released_as(file, weights)
    found = _sizes_of(without_prefix(weights, PREFIX), base)
    check_sizes(file, fault(found), "a VoxCPM checkpoint")
    check_shapes(str(file), weights, checkpoint_shapes(found))
    return found, weights
