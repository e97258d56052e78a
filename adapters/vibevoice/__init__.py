"""VibeVoice: the prediction head, which denoises one speech latent for each frame of 133 ms.

Upstream: microsoft/VibeVoice e73d1e1, vibevoice/modular/{modular_vibevoice_diffusion_head,
modeling_vibevoice_streaming_inference}.py and vibevoice/schedule/dpm_solver.py. Code and weights MIT. Checkpoints in
the hub: microsoft/VibeVoice-Realtime-0.5B, VibeVoice-1.5B, VibeVoice-Large; of their keys those below
model.prediction_head are read.

Compiled: one evaluation of the head. B rows are streams, which have no length:

    noisy_images  [B, 64]   state      latent of the frame, noise first
    time          [1]       time       step of the training chain, 999 = noise, one for all rows
    condition     [B, H]    request    hidden state of the language model
    neg_condition [B, H]    request    the same of the negative prompt
    negative      [B]       flag       neg_condition instead of condition
    prediction    [B, 64]   output     v = alpha noise - sigma data

A request is one frame. Its modulations, 27 % of the weights, depend on time and condition but not on the latent: they
are one matrix product for all steps, before the first. H = 896 (Realtime), 1536 (1.5B), 3584 (Large).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from voicehub_aot.adapters._tables import TIME_DTYPES, rounded
from voicehub_aot.adapters.vibevoice.checkpoint import (
    CONFIGS,
    INDEX,
    NAME,
    checkpoint_shapes,
    config_from as config_from,
    formula_weights as formula_weights,
    network,
    read_checkpoint as read_checkpoint,
)
from voicehub_aot.adapters.vibevoice.net import PREFIX, Config, module_state
from voicehub_aot.spec import schedule, solver
from voicehub_aot.spec.checkpoint import check_shapes
from voicehub_aot.spec.guidance import Branch, Guidance
from voicehub_aot.spec.network import loaded, without_prefix
from voicehub_aot.spec.program import Program, check_options
from voicehub_aot.spec.region import Call, Input, Parameter, Region, RegionSpec
from voicehub_aot.spec.traits import Traits

ALIASES = ("vibe-voice",)
DEFAULT_CONFIG = "VibeVoice-1.5B"
DEFAULT_BUCKETS = {"batch": (1,)}  # more rows are another engine: --buckets 8
DEFAULT_STEPS = (10, 5)
RELEASED_DTYPE = torch.bfloat16
HUB_FILES: Mapping[str, tuple[str, ...]] = dict.fromkeys(CONFIGS, ("model*.safetensors", INDEX))
HUB_IDS: Mapping[str, str] = {name: f"microsoft/{name}" for name in ("VibeVoice-1.5B", "VibeVoice-Realtime-0.5B")}
TRAITS = Traits(
    formulation="denoising-diffusion",
    operations=("denoiser", "classifier-free-guidance", "dpm-solver-plus-plus"),
    techniques=("schedule", "guidance", "prediction-cache"),
    attention=("native", "sdpa"),
    kernels=("native", "torch", "auto", "triton", "cuda_extension"),
    dtypes=("float32", "float16", "bfloat16"),
    passes=("compile", "sdpa", "custom-kernels", "diffusion-cache", "diffusion-sampling"),
)


# --- the region

NEGATIVE = "negative"  # the guidance branch of the negative prompt


def _guidance(config: Config) -> Guidance:
    """Upstream writes u + w (c - u), so our scale is w - 1; at w = 1 it still evaluates both, for the same result."""
    negative = Branch(name=NEGATIVE, flags={"negative": True}, scale=config.guidance_scale - 1.0)
    return Guidance(equation="classifier_free", branches=(Branch(name="conditional"), negative))


def region_spec(config: Config) -> RegionSpec:
    latent: Any = {"shape": ("B", config.latent_size), "binding": "STATE"}
    hidden: Any = {"shape": ("B", config.hidden_size), "binding": "REQUEST"}
    flag: Any = {"shape": ("B",), "dtype": "bool", "binding": "REQUEST", "flag": True}
    return RegionSpec(
        name="prediction_head",
        inputs=(
            Input(name="noisy_images", doc="speech latent, noise at time 999", **latent),
            Input(name="time", shape=(1,), binding="TIME", doc="step of the training chain, 999 = noise"),
            Input(name="condition", doc="hidden state of the language model", **hidden),
            Input(name="neg_condition", doc="the same of the negative prompt", branch=NEGATIVE, **hidden),
            Input(name="negative", doc="neg_condition instead of condition", **flag),
        ),
        dims=(),
        outputs=("prediction",),
        guidance=_guidance(config),
        call=Call(
            parameters=(
                Parameter(name="noisy_images", kind="tensor", feeds="noisy_images"),
                Parameter(name="timesteps", kind="time"),
                Parameter(name="condition", kind="tensor", feeds="condition"),
            ),
            returns="velocity",
            source="microsoft/VibeVoice e73d1e1, vibevoice/modular/modular_vibevoice_diffusion_head.py, "
            "VibeVoiceDiffusionHead.forward",
        ),
        main_dim=None,
    )


def region(config: Config, weights: Mapping[str, Tensor]) -> Region:
    check_shapes(f"{NAME} {region_spec(config).name}", weights, checkpoint_shapes(config))
    state = module_state(config, without_prefix(weights, PREFIX))
    return Region(region_spec(config), loaded(network(config), state))


# --- the sampling loop

PROGRAM_OPTIONS: Mapping[str, Any] = {"time_dtype": "float32"}


def program(steps: int, **options: Any) -> Program:
    """DPM-Solver++(2M) over the cosine training chain of 1000 steps.

    time_dtype: what the times are rounded to before the head sees them. Upstream casts them to the latents' dtype, so
    its bfloat16 runs say 1000 for 999; its float16 and float32 runs keep them exact.
    """
    chosen = check_options(NAME, PROGRAM_OPTIONS, options, {"time_dtype": TIME_DTYPES})
    chain = schedule.cosine_noise_ratios()
    grid = schedule.training_timesteps(steps, len(chain))
    times = rounded(grid.times[:-1], chosen["time_dtype"])
    return solver.dpm_solver_2m(grid, [*(chain[int(t)] for t in grid.times[:-1]), 0.0], times=times)
