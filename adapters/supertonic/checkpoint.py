"""Supertonic's released sizes, and how its checkpoints are read: the ONNX graph, or the same keys in .safetensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from voicehub_aot.adapters.supertonic.graph import FIELD, PREFIXES, STYLE_KEY, read_graph
from voicehub_aot.adapters.supertonic.net import Config, VectorEstimator
from voicehub_aot.errors import CheckpointMismatch, UsageError
from voicehub_aot.spec.checkpoint import Reading, check_shapes, check_sizes, only_tensors, read_weights
from voicehub_aot.spec.hyperparameters import config_of, named_config, not_positive, refuse
from voicehub_aot.spec.network import count, size, unfilled

NAME = "supertonic"
GRAPH = "vector_estimator.onnx"

# --- hyperparameters

_V2 = Config(
    version=2,
    intermediate_dim=1024,
    text_attn_units=256,
    text_n_heads=4,
    guidance_in_graph=False,
    guidance_cond=1.0,
    guidance_uncond=0.0,
)
_TINY: dict[str, Any] = {
    "latent_channels": 12,
    "hidden": 32,
    "n_blocks": 2,
    "n_last_convnext": 2,
    "time_dim": 16,
    "time_hdim": 24,
    "text_dim": 24,
    "style_dim": 24,
    "n_style": 7,
    "max_positions": 100,
}
CONFIGS: Mapping[str, Config] = {
    "supertonic-3": Config(),
    "supertonic-2": _V2,
    "supertonic": _V2,
    "tiny": Config(**_TINY, intermediate_dim=64, text_attn_units=32, text_n_heads=4),
    "tiny-v2": replace(_V2, **_TINY, intermediate_dim=48, text_attn_units=24, text_n_heads=2),
}
FACTORS = ("latent_dim", "chunk_compress_factor")  # upstream's, of latent_channels


def fault(config: Config) -> str | None:
    """What is wrong with the hyperparameters' values, if anything."""
    c = config
    if wrong := not_positive(vars(c), [f.name for f in fields(c) if f.type == "int"]):
        return wrong
    numbers = {"rotary_base": c.rotary_base, "rotary_scale": c.rotary_scale, "layer_norm_eps": c.layer_norm_eps}
    heads = f"text_n_heads={c.text_n_heads!r} must divide text_attn_units={c.text_attn_units!r}, to even widths"
    style = f"style_n_heads={c.style_n_heads!r} must divide style_dim={c.style_dim!r}"
    factors = f"guidance_cond={c.guidance_cond!r} - guidance_uncond={c.guidance_uncond!r} must be 1"
    rules = {
        f"dilations_0={c.dilations_0!r} must be positive integers": c.dilations_0 and min(c.dilations_0) > 0,
        **{f"{name}={value!r} must be positive": 0 < value < math.inf for name, value in numbers.items()},
        heads: c.text_attn_units % (2 * c.text_n_heads) == 0,
        style: c.style_dim % c.style_n_heads == 0,
        f"ksz={c.ksz!r} must be odd": c.ksz % 2 == 1,
        f"time_dim={c.time_dim!r} must be even": c.time_dim % 2 == 0,
        factors: math.isclose(c.guidance_cond - c.guidance_uncond, 1.0),
    }
    return "; ".join(rule for rule, kept in rules.items() if not kept) or None


def config_from(values: Mapping[str, Any]) -> Config:
    """Names as in `Config`; latent_dim * chunk_compress_factor stands for latent_channels."""
    given = {name: value for name, value in values.items() if name not in FACTORS}
    factors = {name: values[name] for name in FACTORS if name in values}
    refuse(NAME, not_positive(factors, factors))
    product = math.prod(factors.values())
    if len(factors) == 2 and given.setdefault("latent_channels", product) != product:
        raise UsageError(f"{NAME}: latent_channels {given['latent_channels']!r} is not the product of {factors!r}")
    config = config_of(NAME, Config, given, FACTORS)
    refuse(NAME, fault(config))
    return config


# --- keys and shapes


def network(config: Config) -> VectorEstimator:
    return unfilled(VectorEstimator, config)


def released_key(config: Config, name: str) -> str:
    return name if name == STYLE_KEY else config.prefix + name


def checkpoint_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    return {released_key(config, k): tuple(v.shape) for k, v in network(config).state_dict().items()}


def formula_weights(config: Config) -> dict[str, Tensor]:
    """None: theta and the positions are formulas in upstream's graph, and our checkpoints do not hold them."""
    return {}


# --- files


def _file(path: Path) -> Path:
    if not path.is_dir():
        return path
    candidates = [path / "onnx" / GRAPH, path / GRAPH]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise CheckpointMismatch(f"{path}: wanted the released folder, with {' or '.join(map(str, candidates))}")


def _own_weights(file: Path, reading: Reading) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """-> (hyperparameters that shapes do not tell, as far as the file does; weights under released keys)."""
    if file.suffix != ".onnx":
        return {}, only_tensors(file, read_weights(file, reading)[0], "tensors")
    if reading.kind:
        raise CheckpointMismatch(f"{file}: an ONNX graph holds one set of weights; leave --weights-kind out")
    return read_graph(file)


BLOCK = FIELD + "main_blocks.*."
SIZES: Mapping[str, tuple[tuple[str, int], ...]] = {  # where each can be read, as (key, axis)
    "latent_channels": ((FIELD + "proj_in.net.weight", 1), (FIELD + "proj_out.net.weight", 0)),
    "hidden": ((FIELD + "proj_in.net.weight", 0), (FIELD + "proj_out.net.weight", 1)),
    "intermediate_dim": ((BLOCK + "convnext.*.pwconv1.weight", 0),),
    "ksz": ((BLOCK + "convnext.*.dwconv.weight", 2),),
    "time_dim": ((FIELD + "time_encoder.mlp.0.linear.weight", 1), (FIELD + "time_encoder.mlp.2.linear.weight", 0)),
    "time_hdim": ((FIELD + "time_encoder.mlp.0.linear.weight", 0), (FIELD + "time_encoder.mlp.2.linear.weight", 1)),
    "text_dim": ((BLOCK + "attn.W_key.linear.weight", 1),),
    "text_attn_units": ((BLOCK + "attn.W_key.linear.weight", 0),),
    "style_dim": ((STYLE_KEY, 2), (BLOCK + "attention.W_key.linear.weight", 1)),
}
N_STYLE = ((STYLE_KEY, 1), ("uncond_masker.style_key_special_token", 1))
LAYERS = 6  # of a block: convnext, time, convnext, text attention, convnext, style attention


def _sizes_of(where: str, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """The hyperparameters that names and shapes tell; one missing tensor changes none of them."""
    prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in weights)), "")
    named = {name.removeprefix(prefix): weight for name, weight in weights.items()}
    told = {name: size(named, 0, *places) for name, places in SIZES.items()}
    missing = sorted({SIZES[name][0][0] for name, value in told.items() if not value})
    if not prefix or missing:
        wanted = ", ".join(missing) or " or ".join(p + "…" for p in PREFIXES)
        raise CheckpointMismatch(f"{where}: not a Supertonic vector estimator; not found, or of another rank: {wanted}")
    return {
        "version": PREFIXES[prefix],
        **told,
        "n_style": size(named, Config.n_style, *N_STYLE),
        "dilations_0": tuple(2**i for i in range(count(named, FIELD + "main_blocks.0.convnext"))),
        "n_blocks": -(-count(named, FIELD + "main_blocks") // LAYERS),
        "n_last_convnext": count(named, FIELD + "last_convnext.convnext"),
        "guidance_in_graph": any(name.startswith("uncond_masker.") for name in named),
    }


def _check_agrees(file: Path, name: object, base: Config, values: Mapping[str, Any], fixed: set[str]) -> None:
    """Sizes may be others, as of a deeper model; what is `fixed` says that it is another one."""
    own = vars(base)
    wrong = {k: f"{k} is {v!r}, wanted {own[k]!r}" for k, v in values.items() if own[k] != v}
    if wrong.keys() & fixed:
        raise CheckpointMismatch(f"{file}: not the configuration {name!r}: {'; '.join(wrong.values())}")


def read_checkpoint(
    path: Path, config: str | Config | None = None, reading: Reading | None = None
) -> tuple[Config, dict[str, Tensor]]:
    """The released folder, its folder `onnx`, `vector_estimator.onnx`, or a .safetensors with the same keys.

    Sizes are the file's. A .safetensors tells neither head counts nor factors: those of `config`, or the released
    ones (text heads of width 64, two style heads, 4 and 3), are taken then.
    """
    base = named_config(NAME, CONFIGS, config)
    file = _file(path)
    facts, weights = _own_weights(file, reading or Reading())
    told = _sizes_of(str(file), weights)
    if base is not None:
        if len(base.dilations_0) == len(told["dilations_0"]):
            told["dilations_0"] = base.dilations_0
        _check_agrees(file, config, base, {**told, **facts}, {"version", "guidance_in_graph", *facts})
        found = replace(base, **{**told, **facts})
    else:
        unsaid = {"text_n_heads": max(told["text_attn_units"] // 64, 1)}
        if not told["guidance_in_graph"]:
            unsaid |= {"guidance_cond": 1.0, "guidance_uncond": 0.0}
        found = Config(**{**unsaid, **told, **facts})
    check_sizes(file, fault(found), "a Supertonic vector estimator")
    check_shapes(str(file), weights, checkpoint_shapes(found))
    return found, weights
