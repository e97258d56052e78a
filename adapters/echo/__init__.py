"""Echo-TTS: rectified-flow text-to-speech with a reference speaker, over PCA latents of a codec, whole or in blocks.

Upstream: jordandare/echo-tts 230202af252e30a692a6f6310789ad212f83e2bb, model.py, inference.py, inference_blockwise.py.
Code MIT; released weights (jordand/echo-tts-base on the hub, pytorch_model.safetensors) CC-BY-NC-SA-4.0.

Compiled: one evaluation of EchoDiT. The text and speaker encoders run once a request, outside: the region takes their
states after text_norm and speaker_norm. Time: 1 = noise, 0 = data. B rows, T frames (21.5 per second):

    x              [B, T, 80]    state      PCA latents
    time           [1]           time       one for all rows
    text_state     [B, L, 1280]  request    of the text encoder; text_mask [B, L], True = real byte
    speaker_state  [B, R, 1280]  request    of the speaker encoder, a patch of 4 frames each; speaker_mask [B, R],
                                            True = real: a patch is when its first frame is
    speaker_scale  [B, layers]   request    factor of the speaker's keys and values in each layer, 1 if left out
    hidden         [B, T]        request    True = no frame attends to this one; none if left out
    lengths        [B]           request    frames of each row
    latent_state   [B, P, 1280]  request    blockwise: the latent encoder's patches of what is finished; latent_mask
                                            [B, P], True = real
    start_pos      [B]           request    blockwise: frames that are finished, 0 if left out
    drop_text, drop_speaker [B]  flags      no frame attends to the text, to the speaker
    velocity       [B, T, 80]    output

Upstream has no mask over frames; without `hidden` and with full lengths there is none here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from voicehub_aot.adapters._echo_irodoritts import sampling
from voicehub_aot.adapters._tables import TIME_DTYPES, rounded
from voicehub_aot.adapters.echo.checkpoint import (
    CONFIGS as CONFIGS,
    FILES,
    NAME,
    checkpoint_shapes,
    config_from as config_from,
    denoiser_part,
    formula_weights as formula_weights,
    network,
    read_checkpoint as read_checkpoint,
)
from voicehub_aot.adapters.echo.net import Config
from voicehub_aot.errors import UsageError
from voicehub_aot.spec.checkpoint import check_shapes
from voicehub_aot.spec.guidance import Branch, Guidance
from voicehub_aot.spec.network import loaded
from voicehub_aot.spec.program import Program, check_options
from voicehub_aot.spec.region import Call, Dim, Input, Parameter, Region, RegionSpec
from voicehub_aot.spec.schedule import Schedule
from voicehub_aot.spec.solver import euler
from voicehub_aot.spec.traits import Traits

ALIASES = ("echo-tts", "echotts", "echo_tts")
DEFAULT_CONFIG = "echo-tts-base"
DEFAULT_BUCKETS: Mapping[str, tuple[int, ...]] = {"frames": (640,)}
DEFAULT_STEPS: tuple[int, ...] = (40,)
HUB_FILES: Mapping[str, tuple[str, ...]] = {"echo-tts-base": FILES[:1], "tiny": ()}
HUB_IDS: Mapping[str, str] = {"echo-tts-base": "jordand/echo-tts-base"}
TRAITS = Traits(
    formulation="rectified-flow",
    operations=("denoiser", "classifier-free-guidance", "euler-solver"),
    techniques=("schedule", "guidance", "prediction-cache"),
    kernels=("native", "torch", "auto", "triton", "cuda_extension"),
    dtypes=("float32", "bfloat16"),
    passes=("compile", "custom-kernels", "diffusion-cache", "diffusion-sampling"),
)

# --- the region

GUIDANCE = Guidance(
    equation="classifier_free",
    branches=(
        Branch(name="conditional"),
        Branch(name="text", flags={"drop_text": True}, scale=3.0),
        Branch(name="speaker", flags={"drop_speaker": True}, scale=8.0),
    ),
)
_CALL = Call(
    parameters=(
        Parameter(name="x", kind="tensor", feeds="x"),
        Parameter(name="t", kind="time"),
        Parameter(name="text_mask", kind="tensor", feeds="text_mask"),
        Parameter(name="speaker_mask", kind="tensor", feeds="speaker_mask"),
        Parameter(name="kv_cache_text", kind="tensor", feeds="text_state"),
        Parameter(name="kv_cache_speaker", kind="tensor", feeds="speaker_state"),
    ),
    returns="velocity",
    source="jordandare/echo-tts 230202af, model.py, EchoDiT.forward, with the states in place of their keys and values "
    "and a speaker mask of patches",
)


def region_spec(config: Config) -> RegionSpec:
    c = config
    request: Any = {"binding": "REQUEST"}
    latents: tuple[str | int, ...] = ("B", "frames", c.latent_size)
    mask: Any = {"dtype": "bool", **request}
    flag: Any = {"shape": ("B",), "flag": True, **mask}
    count: Any = {"shape": ("B",), "dtype": "int64", "high": 4097, **request}
    scale: Any = {"shape": ("B", c.num_layers), "pad": 1.0, "optional": True, **request}
    prefix: Any = {"optional": True, **request}
    blockwise = (
        Input(name="latent_state", shape=("B", "prefix", c.speaker_model_size), doc="patches of the prefix", **prefix),
        Input(name="latent_mask", shape=("B", "prefix"), dtype="bool", doc="True = real patch", **prefix),
        Input(name="start_pos", doc="frames of the prefix that are finished", optional=True, low=0, **count),
    )
    return RegionSpec(
        name="denoiser",
        inputs=(
            Input(name="x", shape=latents, binding="STATE", doc="PCA latents, noise at time 1"),
            Input(name="time", shape=(1,), binding="TIME", doc="1 = noise, 0 = data"),
            Input(name="text_state", shape=("B", "text", c.text_model_size), doc="of the text encoder", **request),
            Input(name="text_mask", shape=("B", "text"), doc="True = real byte", **mask),
            Input(name="speaker_state", shape=("B", "speaker", c.speaker_model_size), doc="patches", **request),
            Input(name="speaker_mask", shape=("B", "speaker"), doc="True = real patch", **mask),
            Input(name="speaker_scale", doc="factor of the speaker's keys and values, by layer", **scale),
            Input(name="hidden", shape=("B", "frames"), optional=True, doc="True = not attended to", **mask),
            Input(name="lengths", doc="frames of each row", low=1, **count),
            Input(name="drop_text", doc="without the text", **flag),
            Input(name="drop_speaker", doc="without the speaker", **flag),
            *(blockwise if c.blockwise else ()),
        ),
        dims=(
            Dim(name="frames", max=4096, length="lengths", doc="latent frames, 2048 samples of 44.1 kHz each"),
            Dim(name="text", max=4096, doc="bytes"),
            Dim(name="speaker", max=4096, doc="patches of the reference, 4 frames each"),
            *((Dim(name="prefix", max=1024, doc="patches of the prefix, 4 frames each"),) if c.blockwise else ()),
        ),
        guidance=GUIDANCE,
        call=_CALL,
    )


def region(config: Config, weights: Mapping[str, Tensor]) -> Region:
    config, weights = denoiser_part(config, weights)
    check_shapes(f"{NAME} {region_spec(config).name}", weights, checkpoint_shapes(config))
    return Region(region_spec(config), loaded(network(config), weights))


# --- the sampling loop

PROGRAM_OPTIONS: Mapping[str, Any] = {
    "cfg_min_t": 0.5,
    "cfg_max_t": 1.0,
    "rescale_k": None,
    "rescale_sigma": None,
    "time_dtype": "float32",
}
BEHAVIOUR_OPTIONS = ("cfg_min_t", "cfg_max_t", "rescale_k", "rescale_sigma")


def program(steps: int, **options: Any) -> Program:
    """Euler from time 0.999 to 0, guided while cfg_min_t <= t <= cfg_max_t, without guidance outside.

    rescale_k with rescale_sigma: the temporal score rescale. time_dtype: of the times that upstream's model is given,
    float32 or bfloat16 (how it is released to run).
    """
    o = check_options(NAME, PROGRAM_OPTIONS, options, {"time_dtype": TIME_DTYPES})
    if steps < 1:
        raise UsageError(f"{NAME}: steps={steps!r}: a schedule needs at least 1 step")
    grid = torch.linspace(1.0, 0.0, steps + 1) * sampling.FIRST_TIME
    inside = ((grid >= o["cfg_min_t"]) & (grid <= o["cfg_max_t"])).tolist()
    schedule = Schedule(times=tuple(grid.tolist()))
    return euler(
        schedule,
        times=rounded(schedule.times[:-1], o["time_dtype"]),
        against=lambda step: None if inside[step] else (),
        rescale=sampling.rescale(NAME, o["rescale_k"], o["rescale_sigma"]),
    )
