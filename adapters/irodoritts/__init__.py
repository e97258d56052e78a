"""Irodori-TTS: Japanese rectified-flow text-to-speech, with a reference speaker, a described voice (caption), or both.

Upstream: Aratako/Irodori-TTS eaf74d6a19138f743acb5b71a445fd25a57db987, irodori_tts/{model,rf,config}.py. Code MIT; the
weights' licences are on their model cards. On the hub under Aratako: Irodori-TTS-500M-v2, -500M-v2-VoiceDesign,
-500M-v3, -600M-v3-VoiceDesign, one model.safetensors each, with the hyperparameters in its metadata. v1 has another
graph.

Compiled: one evaluation of TextToLatentRFDiT (`forward_with_encoded_conditions`). The encoders run once a request,
outside: the region takes their states after their norms. Time: 1 = noise, 0 = data. B rows, T frames (25 per second);
the speaker and the caption inputs are there when the model has the condition:

    x_t            [B, T, 32]     state      codec latents
    time           [1]            time       one for all rows
    text_state     [B, L, 512]    request    of the text encoder; text_mask [B, L], True = real token
    speaker_state  [B, R, 768]    request    of the reference encoder, its mean token first; speaker_mask [B, R]
    speaker_scale  [B, layers]    request    factor of the speaker's keys and values in each layer, 1 if left out
    caption_state  [B, K, 512]    request    of the caption encoder; caption_mask [B, K]
    hidden         [B, T]         request    True = not attended to (upstream's ~latent_mask), none if left out
    lengths        [B]            request    frames of each row
    drop_text, drop_speaker, drop_caption [B]   flags   no frame attends to the condition
    velocity       [B, T, 32]     output

A dropped condition is masked here and zeroed as well upstream: masked keys do not matter, so one state serves all
branches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from voicehub_aot.adapters._echo_irodoritts import checkpoint as checkpoints, sampling
from voicehub_aot.adapters._tables import TIME_DTYPES, rounded
from voicehub_aot.adapters.irodoritts.checkpoint import (
    CONFIGS,
    FILES,
    NAME,
    OUTSIDE,
    checkpoint_shapes,
    config_from as config_from,
    formula_weights as formula_weights,
    network,
    read_checkpoint as read_checkpoint,
)
from voicehub_aot.adapters.irodoritts.net import Config
from voicehub_aot.errors import OptionUnsupported, UsageError
from voicehub_aot.spec.checkpoint import check_shapes
from voicehub_aot.spec.guidance import Branch, Guidance
from voicehub_aot.spec.network import loaded
from voicehub_aot.spec.program import Program, check_options
from voicehub_aot.spec.region import Call, Dim, Input, Parameter, Region, RegionSpec
from voicehub_aot.spec.schedule import Schedule
from voicehub_aot.spec.solver import euler
from voicehub_aot.spec.traits import Traits

ALIASES = ("irodori", "irodori-tts", "irodori_tts")
DEFAULT_CONFIG = "Irodori-TTS-500M-v3"
DEFAULT_BUCKETS: Mapping[str, tuple[int, ...]] = {"frames": (128, 256, 512, 750)}
DEFAULT_STEPS: tuple[int, ...] = (40,)
HUB_FILES: Mapping[str, tuple[str, ...]] = {name: () if "tiny" in name else FILES[:1] for name in CONFIGS}
HUB_IDS: Mapping[str, str] = {name: f"Aratako/{name}" for name in CONFIGS if "tiny" not in name}
TRAITS = Traits(
    formulation="rectified-flow",
    operations=("denoiser", "classifier-free-guidance", "euler-solver"),
    techniques=("schedule", "guidance", "prediction-cache"),
    attention=("native", "sdpa"),
    kernels=("native", "torch", "auto", "triton", "cuda_extension"),
    dtypes=("float32", "bfloat16"),
    passes=("compile", "sdpa", "custom-kernels", "diffusion-cache", "diffusion-sampling"),
    surfaces=("model.forward_with_encoded_conditions", "codec.decode_latent"),
)

# --- the region

SCALES = {"text": 3.0, "speaker": 5.0, "caption": 3.0}
JOINT = "unconditional"
JOINT_SCALE = 3.0  # upstream wants one scale for all conditions then, and has no default of it


def _guidance(config: Config) -> Guidance:
    single = [Branch(name=name, flags={f"drop_{name}": True}, scale=SCALES[name]) for name in config.conditions]
    everything = Branch(name=JOINT, flags={f"drop_{name}": True for name in config.conditions}, scale=JOINT_SCALE)
    return Guidance(equation="classifier_free", branches=(Branch(name="conditional"), *single, everything))


def _call(config: Config) -> Call:
    """Upstream passes None for the conditions that a model does not have."""

    def condition(name: str, part: str) -> Parameter:
        if name in config.conditions:
            return Parameter(name=f"{name}_{part}", kind="tensor", feeds=f"{name}_{part}")
        return Parameter(name=f"{name}_{part}", kind="ignored", required=False)

    return Call(
        parameters=(
            Parameter(name="x_t", kind="tensor", feeds="x_t"),
            Parameter(name="t", kind="time"),
            *(condition(name, part) for name in SCALES for part in ("state", "mask")),
            Parameter(name="latent_mask", kind="mask", feeds="frames", required=False),
            Parameter(name="context_kv_cache", kind="ignored", required=False),
        ),
        returns="velocity",
        source="Aratako/Irodori-TTS eaf74d6a, irodori_tts/model.py, TextToLatentRFDiT.forward_with_encoded_conditions; "
        "speaker scaling is an input here, not in the cache",
    )


def region_spec(config: Config) -> RegionSpec:
    c, sizes = config, config.sizes
    request: Any = {"binding": "REQUEST"}
    mask: Any = {"dtype": "bool", **request}
    flag: Any = {"shape": ("B",), "flag": True, **mask}
    scale: Any = {"shape": ("B", sizes.layers), "pad": 1.0, "optional": True, **request}
    inputs = [
        Input(name="x_t", shape=("B", "frames", sizes.latent), binding="STATE", doc="latents, noise at time 1"),
        Input(name="time", shape=(1,), binding="TIME", doc="1 = noise, 0 = data"),
    ]
    for name, width in sizes.context.items():
        inputs += [
            Input(name=f"{name}_state", shape=("B", name, width), doc=f"of the {name} encoder", **request),
            Input(name=f"{name}_mask", shape=("B", name), doc="True = real token", **mask),
        ]
    if "speaker" in c.conditions:
        inputs.append(Input(name="speaker_scale", doc="factor of the speaker's keys and values, by layer", **scale))
    inputs += [
        Input(name="hidden", shape=("B", "frames"), optional=True, doc="True = not attended to", **mask),
        Input(name="lengths", shape=("B",), dtype="int64", low=1, high=4097, doc="frames of each row", **request),
        *(Input(name=f"drop_{name}", doc=f"without the {name}", **flag) for name in c.conditions),
    ]
    docs = {"text": "tokens", "speaker": "reference frames and their mean", "caption": "tokens of the caption"}
    return RegionSpec(
        name="denoiser",
        inputs=tuple(inputs),
        dims=(
            Dim(name="frames", max=4096, length="lengths", doc="latent frames, 25 per second"),
            *(Dim(name=name, max=4096, doc=docs[name]) for name in c.conditions),
        ),
        guidance=_guidance(c),
        call=_call(c),
    )


def region(config: Config, weights: Mapping[str, Tensor]) -> Region:
    weights = checkpoints.without(weights, OUTSIDE)
    check_shapes(f"{NAME} {region_spec(config).name}", weights, checkpoint_shapes(config))
    return Region(region_spec(config), loaded(network(config), weights))


# --- the sampling loop

MODES = ("independent", "joint", "alternating")
CHOICES = {"cfg_guidance_mode": MODES, "t_schedule_mode": ("linear", "sway"), "time_dtype": TIME_DTYPES}
PROGRAM_OPTIONS: Mapping[str, Any] = {
    "cfg_guidance_mode": "independent",
    "conditions": None,
    "cfg_min_t": 0.5,
    "cfg_max_t": 1.0,
    "t_schedule_mode": "linear",
    "sway_coeff": -1.0,
    "rescale_k": None,
    "rescale_sigma": None,
    "time_dtype": "float32",
}
BEHAVIOUR_OPTIONS = ("cfg_guidance_mode", "conditions", "cfg_min_t", "cfg_max_t", "rescale_k", "rescale_sigma")


def _conditions(names: str | None) -> tuple[str, ...]:
    if names is None:
        return tuple(SCALES)  # a branch that a model does not have is left out
    conditions = tuple(name.strip() for name in names.split(",") if name.strip())
    if unknown := sorted(set(conditions) - set(SCALES)):
        raise OptionUnsupported(
            f"{NAME}: conditions={names!r}, but {unknown!r} are not known; known are {list(SCALES)!r}"
        )
    return conditions


def _schedule(steps: int, sway: float | None) -> Schedule:
    if steps < 1:
        raise UsageError(f"{NAME}: steps={steps!r}: a schedule needs at least 1 step")
    u = torch.linspace(0.0, 1.0, steps + 1)
    if sway is not None:
        u = (u + sway * (torch.cos(torch.pi / 2 * u) + u - 1.0)).clamp(0.0, 1.0)
    try:
        return Schedule(times=tuple(((1.0 - u) * sampling.FIRST_TIME).tolist()))
    except ValueError as error:
        raise OptionUnsupported(
            f"{NAME}: steps={steps!r} with sway_coeff={sway!r} gives no decreasing times: choose other values"
        ) from error


def program(steps: int, **options: Any) -> Program:
    """Euler from time 0.999 to 0, guided while cfg_min_t <= t <= cfg_max_t, without guidance outside.

    cfg_guidance_mode: "independent" guides against each of `conditions` at once, "joint" against the unconditional
    branch, "alternating" against one of `conditions` a step, in turn. conditions: comma-separated, those that are
    guided (text, speaker, caption); default all that the model has. sway_coeff: for t_schedule_mode "sway". rescale_k
    with rescale_sigma: the temporal score rescale. time_dtype: of the times that upstream's model is given,
    float32 or bfloat16.
    """
    o = check_options(NAME, PROGRAM_OPTIONS, options, CHOICES)
    mode, conditions = o["cfg_guidance_mode"], _conditions(o["conditions"])
    if mode == "alternating" and o["conditions"] is None:
        raise OptionUnsupported(f"{NAME}: cfg_guidance_mode='alternating' takes turns: name the model's conditions")
    schedule = _schedule(steps, o["sway_coeff"] if o["t_schedule_mode"] == "sway" else None)

    def against(step: int) -> tuple[str, ...]:
        if not conditions or not o["cfg_min_t"] <= schedule.times[step] <= o["cfg_max_t"]:
            return ()
        if mode == "joint":
            return (JOINT,)
        return conditions if mode == "independent" else (conditions[step % len(conditions)],)

    return euler(
        schedule,
        times=rounded(schedule.times[:-1], o["time_dtype"]),
        against=against,
        rescale=sampling.rescale(NAME, o["rescale_k"], o["rescale_sigma"]),
    )
