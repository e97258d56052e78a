"""F5-TTS: flow-matching text-to-speech that in-fills a mel spectrogram; and E2-TTS, the same task on another backbone.

Upstream: SWivid/F5-TTS 2ae2c9bd9b64dab2cb069c4b97e5e7673c521e01, src/f5_tts/model: cfm.py, backbones/{dit,unett}.py.
Code MIT; released weights CC-BY-NC-4.0. Checkpoints, in the hub's SWivid/F5-TTS and SWivid/E2-TTS: F5TTS_v1_Base,
F5TTS_v1_Base_no_zero_init, F5TTS_Base (v0: text padding is not zeroed, one head is rotated), E2TTS_Base (UNetT).

Compiled: one evaluation of the backbone, text encoder included. B rows, T frames (93.75 per second), L text tokens:

    x           [B, T, mel]   state      log-mel, noise at time 0, data at time 1
    time        [1]           time       one for all rows
    cond        [B, T, mel]   request    log-mel of the prompt in its frames, 0 elsewhere
    text        [B, L]        request    token ids, -1 = padding; cut at the row's frames
    lengths     [B]           request    frames of each row: the mask upstream builds from durations
    extent      [B]           request    frames that attention keys and the text encoder's statistics see
    drop_audio  [B]           flag       cond becomes 0
    drop_text   [B]           flag       ids become the filler's; the padding mask stays the real text's
    velocity    [B, T, mel]   output
    text_embed  [B, T, C]     output     what the text contributes; depends on the request alone

With extent = lengths a row gives what it gives alone, whatever the tensor's size. With extent = T and shorter lengths
it gives upstream's ragged batch, where released flags let real frames attend to padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from voicehub_aot.adapters.f5tts.checkpoint import (
    CONFIGS as CONFIGS,
    NAME,
    PREFIX,
    checkpoint_shapes,
    config_from as config_from,
    formula_weights,
    network,
    read_checkpoint as read_checkpoint,
)
from voicehub_aot.adapters.f5tts.net import Config
from voicehub_aot.adapters.f5tts.unett import UNetTConfig
from voicehub_aot.spec import schedule
from voicehub_aot.spec.checkpoint import check_shapes
from voicehub_aot.spec.guidance import Branch, Guidance
from voicehub_aot.spec.network import loaded
from voicehub_aot.spec.program import Program, check_options
from voicehub_aot.spec.region import Call, Dim, Input, Parameter, Region, RegionSpec
from voicehub_aot.spec.solver import SOLVERS
from voicehub_aot.spec.traits import Traits

ALIASES = ("f5", "f5-tts", "f5_tts")
DEFAULT_CONFIG = "F5TTS_v1_Base"
DEFAULT_BUCKETS = {"frames": (128, 256, 512, 1024, 2048), "text": (512,)}
DEFAULT_STEPS = (32, 16, 7)
HUB_FILES = {
    "F5TTS_v1_Base": ("F5TTS_v1_Base/model_1250000.safetensors",),
    "F5TTS_v1_Base_no_zero_init": ("F5TTS_v1_Base_no_zero_init/model_1250000.safetensors",),
    "F5TTS_Base": ("F5TTS_Base/model_1200000.safetensors",),
    "E2TTS_Base": ("E2TTS_Base/model_1200000.safetensors",),
    "tiny": (),
}
HUB_IDS: Mapping[str, str] = {
    **dict.fromkeys(("F5TTS_v1_Base", "F5TTS_v1_Base_no_zero_init", "F5TTS_Base"), "SWivid/F5-TTS"),
    "E2TTS_Base": "SWivid/E2-TTS",
}
TRAITS = Traits(
    formulation="conditional-flow-matching",
    operations=("denoiser", "classifier-free-guidance", "euler-solver", "midpoint-solver"),
    techniques=("schedule", "guidance", "prediction-cache", "stork2"),
    attention=("native", "sdpa", "flash_attention_4"),
    kernels=("native", "torch", "auto", "triton", "cuda_extension"),
    dtypes=("float32", "float16", "bfloat16"),
    passes=("compile", "attention-backend", "custom-kernels", "diffusion-cache", "diffusion-sampling"),
    surfaces=("flow_model.transformer.forward",),
)

# --- the region

GUIDANCE = Guidance(
    equation="classifier_free",
    branches=(
        Branch(name="conditional"),
        Branch(name="unconditional", flags={"drop_audio": True, "drop_text": True}, scale=2.0),
    ),
)
_CALL = Call(
    parameters=(
        Parameter(name="x", kind="tensor", feeds="x"),
        Parameter(name="cond", kind="tensor", feeds="cond"),
        Parameter(name="text", kind="tensor", feeds="text"),
        Parameter(name="time", kind="time"),
        Parameter(name="mask", kind="mask", feeds="frames", required=False),
        Parameter(name="drop_audio_cond", kind="flag", feeds="drop_audio", default=False, required=False),
        Parameter(name="drop_text", kind="flag", feeds="drop_text", default=False, required=False),
        Parameter(name="cfg_infer", kind="packed", default=False, required=False),
        Parameter(name="cache", kind="ignored", default=False, required=False),
    ),
    returns="velocity",
    source="SWivid/F5-TTS 2ae2c9bd, src/f5_tts/model/backbones/dit.py, DiT.forward",
)


def region_spec(config: Config) -> RegionSpec:
    top = 4096 if isinstance(config, UNetTConfig) else 8192  # upstream's text position tables
    mel: tuple[str | int, ...] = ("B", "frames", config.mel_dim)
    request: Any = {"binding": "REQUEST"}
    count: Any = {"binding": "REQUEST", "shape": ("B",), "dtype": "int64", "low": 1, "high": top + 1}
    flag: Any = {"binding": "REQUEST", "shape": ("B",), "dtype": "bool", "flag": True}
    ids: Any = {"dtype": "int64", "pad": -1, "low": 0, "high": config.text_num_embeds}
    return RegionSpec(
        name="denoiser",
        inputs=(
            Input(name="x", shape=mel, binding="STATE", doc="log-mel, noise at time 0"),
            Input(name="time", shape=(1,), binding="TIME", doc="0 = noise, 1 = data"),
            Input(name="cond", shape=mel, shorter=True, doc="log-mel of the prompt in its frames, else 0", **request),
            Input(name="text", shape=("B", "text"), doc="token ids, -1 = padding", **ids, **request),
            Input(name="lengths", doc="frames of each row", **count),
            Input(name="extent", doc="frames that keys and text statistics of each row see", **count),
            Input(name="drop_audio", doc="without the prompt's audio", **flag),
            Input(name="drop_text", doc="without the text", **flag),
        ),
        dims=(
            Dim(name="frames", max=top, length="lengths", extent="extent", doc="mel frames, 93.75 per second"),
            Dim(name="text", max=4096, doc="text tokens"),
        ),
        outputs=("velocity", "text_embed"),
        guidance=GUIDANCE,
        call=_CALL,
    )


def region(config: Config, weights: Mapping[str, Tensor]) -> Region:
    weights = {**formula_weights(config), **weights}
    check_shapes(f"{NAME} {region_spec(config).name}", weights, checkpoint_shapes(config))
    return Region(region_spec(config), loaded(network(config), weights, PREFIX))


# --- the sampling loop

GRIDS = {"epss": schedule.epss, "linear": schedule.linear}
PROGRAM_OPTIONS: Mapping[str, Any] = {"solver": "euler", "grid": "epss", "sway": -1.0}  # of the released inference


def program(steps: int, **options: Any) -> Program:
    """solver: euler or midpoint; grid: epss or linear; sway: coefficient, None = none."""
    chosen = check_options(NAME, PROGRAM_OPTIONS, options, {"solver": SOLVERS, "grid": GRIDS})
    return SOLVERS[chosen["solver"]](schedule.sway(GRIDS[chosen["grid"]](steps), chosen["sway"]))
