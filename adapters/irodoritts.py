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
    drop_text, drop_speaker, drop_caption [B]   flags   none of the condition is seen
    velocity       [B, T, 32]     output

A dropped condition is masked here and zeroed as well upstream: masked keys do not matter, so one state serves all
branches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from voicehub_aot.adapters import _rf_checkpoint as checkpoints, _rf_sampling as sampling
from voicehub_aot.adapters._irodori_checkpoint import (
    CONFIGS,
    FILES,
    NAME,
    OUTSIDE,
    checkpoint_shapes,
    config_from,
    formula_weights as formula_weights,
    network,
    read_checkpoint as read_checkpoint,
)
from voicehub_aot.adapters._irodori_net import Config, TextToLatentRFDiT
from voicehub_aot.checkpoint import check_shapes, loaded
from voicehub_aot.errors import OptionUnsupported, UsageError
from voicehub_aot.golden import Case
from voicehub_aot.guidance import Branch, Guidance
from voicehub_aot.program import Program, check_options, probe
from voicehub_aot.region import Call, Dim, Input, Parameter, Region, RegionSpec
from voicehub_aot.schedule import Schedule
from voicehub_aot.solver import euler
from voicehub_aot.traits import Traits

if TYPE_CHECKING:
    from voicehub_aot.adapters import Sampler

ALIASES = ("irodori", "irodori-tts", "irodori_tts")
DEFAULT_CONFIG = "Irodori-TTS-500M-v3"
DEFAULT_BUCKETS: Mapping[str, tuple[int, ...]] = {"frames": (128, 256, 512, 750)}
DEFAULT_STEPS: tuple[int, ...] = (40,)
HUB_FILES: Mapping[str, tuple[str, ...]] = {name: () if "tiny" in name else FILES[:1] for name in CONFIGS}
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


def region(config: Config, weights: Mapping[str, Tensor]) -> Region:
    weights = checkpoints.without(weights, OUTSIDE)
    check_shapes(f"{NAME} denoiser", weights, checkpoint_shapes(config))
    return Region(_spec(config), loaded(network(config), weights))


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


def _spec(config: Config) -> RegionSpec:
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


# --- the sampling loop

MODES = ("independent", "joint", "alternating")
CHOICES = {"cfg_guidance_mode": MODES, "t_schedule_mode": ("linear", "sway"), "time_dtype": sampling.TIME_DTYPES}
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


def program(steps: int, **options: Any) -> Program:
    """Euler from time 0.999 to 0, guided while cfg_min_t <= t <= cfg_max_t, without guidance outside.

    cfg_guidance_mode: "independent" guides against each of `conditions` at once, "joint" against the unconditional
    branch, "alternating" against one of `conditions` a step, in turn. conditions: comma-separated, those that are
    guided (text, speaker, caption); default all that the model has. sway_coeff: for t_schedule_mode "sway". rescale_k
    with rescale_sigma: the temporal score rescale. time_dtype: as which upstream's model is given its times, float32
    or bfloat16.
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
        times=sampling.rounded(schedule.times[:-1], o["time_dtype"]),
        against=against,
        rescale=sampling.rescale(NAME, o["rescale_k"], o["rescale_sigma"]),
    )


def _conditions(names: str | None) -> tuple[str, ...]:
    if names is None:
        return tuple(SCALES)  # a branch that a model does not have is left out
    conditions = tuple(name.strip() for name in names.split(",") if name.strip())
    if unknown := sorted(set(conditions) - set(SCALES)):
        raise OptionUnsupported(f"{NAME}: conditions={names!r}, but {unknown!r} are none of {list(SCALES)!r}")
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


# --- recorded cases

CALL_SCALARS: Mapping[str, Any] = {f"cfg_scale_{name}": None for name in SCALES}
LOOP_SCALARS: Mapping[str, Any] = {
    "num_steps": 40,
    "cfg_scale": None,
    **{f"cfg_scale_{name}": scale for name, scale in SCALES.items()},
    **{name: value for name, value in PROGRAM_OPTIONS.items() if name not in ("conditions", "time_dtype")},
    "truncation_factor": None,
    "use_context_kv_cache": True,
    "speaker_kv_scale": None,
    "speaker_kv_max_layers": None,
    "speaker_kv_min_t": None,
    "speaker_uncond_mode": "mask",
    "seed": None,
    "cfg_steps": None,
    "sequence_length": None,
}


def _guided(case: Case, s: Mapping[str, Any]) -> dict[str, float]:
    """The conditions that take part in guidance, with their scales. cfg_scale: one for all of them."""
    single = s.get("cfg_scale")
    names = config_from(case.config).conditions
    scales = {name: (s[f"cfg_scale_{name}"] if single is None else single) or 0.0 for name in names}
    if "caption" in scales and not case.inputs["caption_mask"].any():
        scales["caption"] = 0.0
    return {name: scale for name, scale in scales.items() if scale > 0}


def case_program(case: Case) -> Program:
    if case.kind != "sampler":
        return probe(sorted(set(case.inputs["t"].reshape(-1).tolist())))
    s = case.scalars_over(LOOP_SCALARS)
    options = {name: s[name] for name in PROGRAM_OPTIONS if name in s}
    return program(s["num_steps"], conditions=",".join(_guided(case, s)), **options)


def replay(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    """`kv_*`, which an engine keeps between its stages, come from an eager module of the case's checkpoint."""
    return _replay_loop(case, sampler) if case.kind == "sampler" else _replay_call(case, sampler)


def _conditioning(case: Case) -> dict[str, Any]:
    names = config_from(case.config).conditions
    return {f"{name}_{part}": case.inputs[f"{name}_{part}"] for name in names for part in ("state", "mask")}


def _wanted(case: Case, *names: str) -> set[str]:
    conditions = config_from(case.config).conditions
    return {*names, *(f"{name}_{part}" for name in conditions for part in ("state", "mask"))}


@torch.no_grad()
def _replay_call(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    s, inputs, config = case.scalars_over(CALL_SCALARS), case.inputs, config_from(case.config)
    case.check_inputs(_wanted(case, "x_t", "t"), {"latent_mask"})
    request, x, time = _conditioning(case), inputs["x_t"], inputs["t"]
    if "latent_mask" in inputs:
        request["hidden"] = ~inputs["latent_mask"]
    results = {"v": sampler.evaluate(x, time, **request)}
    module = loaded(network(config), checkpoints.without(case.checkpoint(), OUTSIDE))
    assert isinstance(module, TextToLatentRFDiT)
    for name in config.conditions:
        results[f"kv_k_{name}"], results[f"kv_v_{name}"] = module.keys_values(name, inputs[f"{name}_state"])
    if guided := _guided(case, s):
        packed = torch.split(sampler.evaluate(x, time, packed=True, **request), len(x))
        branches = ("conditional", *config.conditions)
        kept = [block for name, block in zip(branches, packed, strict=False) if name in ("conditional", *guided)]
        results["v_packed"] = torch.cat(kept)
        scales = dict.fromkeys((*config.conditions, JOINT), 0.0) | guided
        results["v_guided"] = sampler.evaluate(x, time, guidance=scales, **request)
    return results


def _replay_loop(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    """From the noise on."""
    s, loop, inputs, config = (
        case.scalars_over(LOOP_SCALARS),
        case_program(case),
        case.inputs,
        config_from(case.config),
    )
    outside = {"text_input_ids", "caption_input_ids", "ref_latent", "ref_mask"}
    case.check_inputs(_wanted(case, "noise"), outside)
    if s["speaker_uncond_mode"] != "mask":
        raise UsageError(
            f"{case.name}: speaker_uncond_mode={s['speaker_uncond_mode']!r} is not understood, wanted 'mask'"
        )
    guided = _guided(case, s)
    if s["cfg_guidance_mode"] == "joint" and len(set(guided.values())) > 1:
        raise UsageError(f"{case.name}: joint guidance wants one scale, got {guided!r}")
    noise = inputs["noise"] * (1.0 if s["truncation_factor"] is None else s["truncation_factor"])
    scaled = None
    if s["speaker_kv_scale"] is not None and "speaker" in config.conditions:
        layers = config.num_layers
        scaled = sampling.speaker_scale(len(noise), layers, s["speaker_kv_scale"], s["speaker_kv_max_layers"])
    *_, final = sampling.scaled_trajectory(
        sampler,
        loop.schedule,
        scaled,
        s["speaker_kv_min_t"],
        noise=noise,
        program=loop.name,
        guidance=guided | dict.fromkeys((JOINT,), next(iter(guided.values()), 0.0)),
        **_conditioning(case),
    )
    return {"latent": final, "t_schedule": torch.tensor(loop.schedule)}
