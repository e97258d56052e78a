"""Supertonic v1, v2 and v3: the vector estimator (flow matching in a latent space) as a torch module.

Upstream   supertone-inc/supertonic 9015bd0 and supertonic-py 5851a87, MIT; arXiv 2503.23108, LARoPE arXiv 2509.11084
Weights    Supertone/supertonic, supertonic-2, supertonic-3 on the hub, OpenRAIL-M. They exist only inside ONNX graphs;
           `_supertonic_onnx` reads them, `_supertonic_net` restates `onnx/vector_estimator.onnx`
Compiled   one region: the velocity. Upstream's graph returns the next latent, latent + velocity / steps, and v3 runs
           two branches inside, 4 conditional - 3 unconditional; here step and guidance belong to the sampling loop
Time       0 = noise, 1 = data

| tensor                   | v1, v2         | v3             |
|---|---|---|
| noisy_latent, velocity   | [B, 144, T]    | [B, 144, T]    |
| text_emb                 | [B, 256, L]    | [B, 256, L]    |
| style_ttl                | [B, 50, 256]   | [B, 50, 256]   |
| hidden D, inner, units U | 512, 1024, 256 | 512, 2048, 512 |
| heads: text, style       | 4, 2           | 8, 2           |
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from voicehub_aot.adapters.supertonic.checkpoint import STYLE_KEY, read_graph, sizes
from voicehub_aot.adapters.supertonic.net import Config, VectorEstimator
from voicehub_aot.errors import CheckpointMismatch, UnknownModel, UsageError
from voicehub_aot.spec.checkpoint import Reading, check_shapes, loaded, read_weights
from voicehub_aot.spec.guidance import Branch, Guidance
from voicehub_aot.spec.hyperparameters import config_of
from voicehub_aot.spec.program import Program, check_options
from voicehub_aot.spec.region import Call, Dim, Input, Parameter, Region, RegionSpec
from voicehub_aot.spec.schedule import Schedule
from voicehub_aot.spec.solver import euler
from voicehub_aot.spec.traits import Traits

if TYPE_CHECKING:
    pass

NAME = "supertonic"
ALIASES: tuple[str, ...] = ()
GRAPH = "vector_estimator.onnx"


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
    "tiny-v2": dataclasses.replace(_V2, **_TINY, intermediate_dim=48, text_attn_units=24, text_n_heads=2),
}
DEFAULT_CONFIG = "supertonic-3"
DEFAULT_BUCKETS: Mapping[str, tuple[int, ...]] = {"frames": (64, 128, 250)}
DEFAULT_STEPS: tuple[int, ...] = (8, 5)
PROGRAM_OPTIONS: Mapping[str, Any] = {}
HUB_FILES: Mapping[str, tuple[str, ...]] = dict.fromkeys(CONFIGS, (f"onnx/{GRAPH}", "onnx/tts.json"))
TRAITS = Traits(
    formulation="flow-matching",
    operations=("denoiser", "iterative-estimator"),
    techniques=("discrete-step-count",),
    dtypes=("float32", "float16", "bfloat16"),
    passes=("compile", "diffusion-cache", "diffusion-sampling"),
    surfaces=("duration_predictor.forward", "text_encoder.forward", "vector_estimator.forward", "vocoder.forward"),
)


def config_from(values: Mapping[str, Any]) -> Config:
    """Names as in `Config`; latent_dim * chunk_compress_factor stands for latent_channels."""
    values = dict(values)
    factors = {name: values.pop(name) for name in ("latent_dim", "chunk_compress_factor") if name in values}
    for name, factor in factors.items():
        if not isinstance(factor, int) or isinstance(factor, bool) or factor < 1:
            raise UsageError(f"{NAME}: {name}={factor!r} is no positive integer; give upstream's hyperparameters")
    product = math.prod(factors.values())
    if len(factors) == 2 and values.setdefault("latent_channels", product) != product:
        raise UsageError(f"{NAME}: latent_channels {values['latent_channels']!r} is not the product of {factors!r}")
    return config_of(NAME, Config, values, ("latent_dim", "chunk_compress_factor"))


def _skeleton(config: Config) -> VectorEstimator:
    with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
        return VectorEstimator(config)


def _released_key(config: Config, name: str) -> str:
    return name if name == STYLE_KEY else config.prefix + name


def checkpoint_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    return {_released_key(config, k): tuple(v.shape) for k, v in _skeleton(config).state_dict().items()}


def formula_weights(config: Config) -> dict[str, Tensor]:
    """None: theta and the positions are formulas in upstream's graph, but no checkpoint entries of ours."""
    return {}


def _weights_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    candidates = [path / "onnx" / GRAPH, path / GRAPH]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise CheckpointMismatch(f"{path}: wanted the released folder, with {' or '.join(map(str, candidates))}")


def read_checkpoint(
    path: Path, config: str | Config | None = None, reading: Reading | None = None
) -> tuple[Config, dict[str, Tensor]]:
    """The released folder, its folder `onnx`, `vector_estimator.onnx`, or a .safetensors with the same keys.

    Sizes are the file's. A .safetensors tells neither head counts nor factors: those of `config`, or the released
    ones (text heads of width 64, two style heads, 4 and 3), are taken then.
    """
    if isinstance(config, str) and config not in CONFIGS:
        raise UnknownModel(f"supertonic has no configuration {config!r}; known are {', '.join(CONFIGS)}")
    file = _weights_file(path)
    reading = reading or Reading()
    if file.suffix == ".onnx":
        if reading.kind:
            raise CheckpointMismatch(f"{file}: an ONNX graph holds one set of weights; leave --weights-kind out")
        facts, weights = read_graph(file)
    else:
        facts, weights = {}, read_weights(file, reading)[0]
    if strange := [f"{k!r} is a {type(v).__name__}" for k, v in weights.items() if not isinstance(v, Tensor)]:
        raise CheckpointMismatch(f"{file}: {strange[0]}, wanted tensors")
    told = sizes(str(file), weights)
    if config is not None:
        base = CONFIGS[config] if isinstance(config, str) else config
        if len(base.dilations_0) == len(told["dilations_0"]):
            told["dilations_0"] = base.dilations_0
        _check_agrees(file, config, base, {**told, **facts}, {"version", "guidance_in_graph", *facts})
        chosen = _config(file, {**vars(base), **told, **facts})
    else:
        defaults = {"text_n_heads": max(told["text_attn_units"] // 64, 1)}
        if not told["guidance_in_graph"]:
            defaults |= {"guidance_cond": 1.0, "guidance_uncond": 0.0}
        chosen = _config(file, {**defaults, **told, **facts})
    check_shapes(str(file), weights, checkpoint_shapes(chosen))
    return chosen, weights


def _check_agrees(file: Path, name: object, base: Config, values: Mapping[str, Any], fixed: set[str]) -> None:
    """Sizes may be others, as of a deeper model; what is `fixed` says that it is another one."""
    wrong = {k: f"{k} is {v!r}, wanted {getattr(base, k)!r}" for k, v in values.items() if getattr(base, k) != v}
    if wrong.keys() & fixed:
        raise CheckpointMismatch(f"{file}: not the configuration {name!r}: {'; '.join(wrong.values())}")


def _config(file: Path, values: Mapping[str, Any]) -> Config:
    try:
        return Config(**values)
    except UsageError as error:
        raise CheckpointMismatch(f"{file}: {error}") from error


def _guidance(config: Config) -> Guidance | None:
    """4 c - 3 u = c + 3 (c - u): the scale is upstream's factor of the unconditional branch."""
    if not config.guidance_in_graph:
        return None
    unconditional = Branch(name="unconditional", flags={"drop": True}, scale=config.guidance_uncond)
    return Guidance(equation="classifier_free", branches=(Branch(name="conditional"), unconditional))


def region_spec(config: Config) -> RegionSpec:
    c, longest = config, config.max_positions

    def lengths(name: str, doc: str) -> Input:
        return Input(name=name, shape=("B",), dtype="int64", binding="REQUEST", low=1, high=longest + 1, doc=doc)

    drop = Input(name="drop", shape=("B",), dtype="bool", binding="REQUEST", flag=True, doc="unconditional tokens")
    return RegionSpec(
        name="vector_estimator",
        inputs=(
            Input(
                name="noisy_latent", shape=("B", c.latent_channels, "frames"), binding="STATE", doc="noise at time 0"
            ),
            Input(name="time", shape=(1,), binding="TIME", doc="current_step / total_step, 0 = noise"),
            Input(name="text_emb", shape=("B", c.text_dim, "text"), binding="REQUEST", doc="of the text encoder"),
            Input(name="style_ttl", shape=("B", c.n_style, c.style_dim), binding="REQUEST", doc="of the voice file"),
            lengths("lengths", "real latent frames"),
            lengths("extent", "where the frames' edge is replicated from"),
            lengths("text_lengths", "real characters"),
            *([drop] if config.guidance_in_graph else []),
        ),
        dims=(
            Dim(name="frames", max=longest, length="lengths", extent="extent", doc="latent frames, 3072 samples each"),
            Dim(name="text", max=longest, length="text_lengths", doc="characters"),
        ),
        guidance=_guidance(config),
        call=Call(
            parameters=(
                *(Parameter(name=n, kind="tensor", feeds=n) for n in ("noisy_latent", "text_emb", "style_ttl")),
                Parameter(name="latent_mask", kind="mask", feeds="frames"),
                Parameter(name="text_mask", kind="mask", feeds="text"),
                Parameter(name="current_step", kind="step"),
                Parameter(name="total_step", kind="steps"),
            ),
            returns="next_state",
            source="supertone-inc/supertonic 9015bd0, onnx/vector_estimator.onnx",
        ),
    )


def region(config: Config, weights: Mapping[str, Tensor]) -> Region:
    check_shapes("supertonic", weights, checkpoint_shapes(config))
    module = _skeleton(config)
    ours = {name: weights[_released_key(config, name)] for name in module.state_dict()}
    return Region(region_spec(config), loaded(module, ours))


def program(steps: int, **options: Any) -> Program:
    """x <- x + v / N at the times i / N, the only loop that the released graph can run: it has no options."""
    check_options(NAME, PROGRAM_OPTIONS, options)
    if steps < 1:
        raise UsageError(f"steps={steps!r}: a schedule needs at least 1 step")
    return euler(Schedule(times=tuple(i / steps for i in range(steps + 1))))
