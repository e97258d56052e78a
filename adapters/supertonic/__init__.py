"""Supertonic v1, v2 and v3: the vector estimator (flow matching in a latent space) as a torch module.

Upstream   supertone-inc/supertonic 9015bd0 and supertonic-py 5851a87, MIT; arXiv 2503.23108, LARoPE arXiv 2509.11084
Weights    Supertone/supertonic, supertonic-2, supertonic-3 on the hub, OpenRAIL-M. They exist only inside ONNX graphs;
           `graph` reads them, `net` restates `onnx/vector_estimator.onnx`
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

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from voicehub_aot.adapters.supertonic.checkpoint import (
    CONFIGS,
    GRAPH,
    NAME,
    checkpoint_shapes,
    config_from as config_from,
    formula_weights as formula_weights,
    network,
    read_checkpoint as read_checkpoint,
    released_key,
)
from voicehub_aot.adapters.supertonic.net import Config
from voicehub_aot.errors import UsageError
from voicehub_aot.spec.checkpoint import check_shapes
from voicehub_aot.spec.guidance import Branch, Guidance
from voicehub_aot.spec.network import loaded
from voicehub_aot.spec.program import Program, check_options
from voicehub_aot.spec.region import Call, Dim, Input, Parameter, Region, RegionSpec
from voicehub_aot.spec.schedule import Schedule
from voicehub_aot.spec.solver import euler
from voicehub_aot.spec.traits import Traits

ALIASES: tuple[str, ...] = ()
DEFAULT_CONFIG = "supertonic-3"
DEFAULT_BUCKETS: Mapping[str, tuple[int, ...]] = {"frames": (64, 128, 250)}
DEFAULT_STEPS: tuple[int, ...] = (8, 5)
HUB_FILES: Mapping[str, tuple[str, ...]] = dict.fromkeys(CONFIGS, (f"onnx/{GRAPH}", "onnx/tts.json"))
HUB_IDS: Mapping[str, str] = {name: f"Supertone/{name}" for name in ("supertonic-3", "supertonic-2", "supertonic")}
TRAITS = Traits(
    formulation="flow-matching",
    operations=("denoiser", "iterative-estimator"),
    techniques=("discrete-step-count",),
    dtypes=("float32", "float16", "bfloat16"),
    passes=("compile", "diffusion-cache", "diffusion-sampling"),
    surfaces=("duration_predictor.forward", "text_encoder.forward", "vector_estimator.forward", "vocoder.forward"),
)


# --- the region


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
    spec = region_spec(config)
    check_shapes(f"{NAME} {spec.name}", weights, checkpoint_shapes(config))
    module = network(config)
    ours = {name: weights[released_key(config, name)] for name in module.state_dict()}
    return Region(spec, loaded(module, ours))


# --- the sampling loop

PROGRAM_OPTIONS: Mapping[str, Any] = {}


def program(steps: int, **options: Any) -> Program:
    """x <- x + v / N at the times i / N, the only loop that the released graph can run: it has no options."""
    check_options(NAME, PROGRAM_OPTIONS, options)
    if steps < 1:
        raise UsageError(f"steps={steps!r}: a schedule needs at least 1 step")
    return euler(Schedule(times=tuple(i / steps for i in range(steps + 1))))
