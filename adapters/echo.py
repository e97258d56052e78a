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
    drop_text, drop_speaker [B]  flags      none of the text, none of the speaker is seen
    velocity       [B, T, 80]    output

Upstream has no mask over frames; without `hidden` and with full lengths there is none here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from voicehub_aot.adapters import _rf_sampling as sampling
from voicehub_aot.adapters._echo_checkpoint import (
    CONFIGS as CONFIGS,
    FILES,
    NAME,
    checkpoint_shapes,
    config_from,
    denoiser_part,
    formula_weights as formula_weights,
    network,
    read_checkpoint as read_checkpoint,
)
from voicehub_aot.adapters._echo_net import Config, EchoDiT, LatentEncoder
from voicehub_aot.checkpoint import check_shapes, loaded
from voicehub_aot.errors import UsageError
from voicehub_aot.golden import Case
from voicehub_aot.guidance import Branch, Guidance
from voicehub_aot.program import Program, check_options, probe
from voicehub_aot.region import Call, Dim, Input, Parameter, Region, RegionSpec
from voicehub_aot.schedule import Schedule
from voicehub_aot.solver import euler
from voicehub_aot.traits import Traits

if TYPE_CHECKING:
    from voicehub_aot.adapters import Sampler

ALIASES = ("echo-tts", "echotts", "echo_tts")
DEFAULT_CONFIG = "echo-tts-base"
DEFAULT_BUCKETS: Mapping[str, tuple[int, ...]] = {"frames": (640,)}
DEFAULT_STEPS: tuple[int, ...] = (40,)
HUB_FILES: Mapping[str, tuple[str, ...]] = {"echo-tts-base": FILES[:1], "tiny": ()}
TRAITS = Traits(
    formulation="rectified-flow",
    operations=("denoiser", "classifier-free-guidance", "euler-solver"),
    techniques=("schedule", "guidance", "prediction-cache"),
    kernels=("native", "torch", "auto", "triton", "cuda_extension"),
    dtypes=("float32", "bfloat16"),
    passes=("compile", "custom-kernels", "diffusion-cache", "diffusion-sampling"),
)


def region(config: Config, weights: Mapping[str, Tensor]) -> Region:
    config, weights = denoiser_part(config, weights)
    check_shapes(f"{NAME} denoiser", weights, checkpoint_shapes(config))
    return Region(_spec(config), loaded(network(config), weights))


# --- the region

_GUIDANCE = Guidance(
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


def _spec(config: Config) -> RegionSpec:
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
        guidance=_GUIDANCE,
        call=_CALL,
    )


# --- the sampling loop

PROGRAM_OPTIONS: Mapping[str, Any] = {
    "cfg_min_t": 0.5,
    "cfg_max_t": 1.0,
    "rescale_k": None,
    "rescale_sigma": None,
    "time_dtype": "float32",
}


def program(steps: int, **options: Any) -> Program:
    """Euler from time 0.999 to 0, guided while cfg_min_t <= t <= cfg_max_t, without guidance outside.

    rescale_k with rescale_sigma: the temporal score rescale. time_dtype: as which upstream's model is given its times,
    float32 or bfloat16 (how it is released to run).
    """
    o = check_options(NAME, PROGRAM_OPTIONS, options, {"time_dtype": sampling.TIME_DTYPES})
    if steps < 1:
        raise UsageError(f"{NAME}: steps={steps!r}: a schedule needs at least 1 step")
    grid = torch.linspace(1.0, 0.0, steps + 1) * sampling.FIRST_TIME
    inside = ((grid >= o["cfg_min_t"]) & (grid <= o["cfg_max_t"])).tolist()
    schedule = Schedule(times=tuple(grid.tolist()))
    return euler(
        schedule,
        times=sampling.rounded(schedule.times[:-1], o["time_dtype"]),
        against=lambda step: None if inside[step] else (),
        rescale=sampling.rescale(NAME, o["rescale_k"], o["rescale_sigma"]),
    )


# --- recorded cases

CALL_SCALARS: Mapping[str, Any] = {"cfg_scale_text": None, "cfg_scale_speaker": None}
LOOP_SCALARS: Mapping[str, Any] = {
    "num_steps": 40,
    "cfg_scale_text": 3.0,
    "cfg_scale_speaker": 8.0,
    "cfg_min_t": 0.5,
    "cfg_max_t": 1.0,
    "truncation_factor": None,
    "rescale_k": None,
    "rescale_sigma": None,
    "speaker_kv_scale": None,
    "speaker_kv_max_layers": None,
    "speaker_kv_min_t": None,
    "block_sizes": None,
    "sequence_length": None,
    "rng_seed": None,
    "cfg_steps": None,
}
CONDITIONS = {"text_state", "text_mask", "speaker_state", "speaker_mask"}


def case_program(case: Case) -> Program:
    if case.kind != "sampler":
        return probe(sorted(set(case.inputs["t"].reshape(-1).tolist())))
    s = case.scalars_over(LOOP_SCALARS)
    return program(s["num_steps"], **{name: s[name] for name in PROGRAM_OPTIONS if name in s})


def replay(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    """`kv_*`, which an engine keeps between its stages, come from an eager module of the case's checkpoint; so does
    the state of a finished prefix, whose encoder is outside the region."""
    return _replay_loop(case, sampler) if case.kind == "sampler" else _replay_call(case, sampler)


def _request(case: Case) -> dict[str, Any]:
    patch = config_from(case.config).speaker_patch_size
    request = {name: case.inputs[name] for name in sorted(CONDITIONS)}
    return request | {"speaker_mask": case.inputs["speaker_mask"][:, ::patch].contiguous()}


@torch.no_grad()
def _replay_call(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    s, inputs = case.scalars_over(CALL_SCALARS), case.inputs
    case.check_inputs({"x", "t", *CONDITIONS}, {"latent_state", "start_pos"})
    config, weights = denoiser_part(config_from(case.config), case.checkpoint())
    request, x, time = _request(case), inputs["x"], inputs["t"]
    module = loaded(network(config), weights)
    assert isinstance(module, EchoDiT)
    states = {"text": inputs["text_state"], "speaker": inputs["speaker_state"]}
    if "latent_state" in inputs:
        state = states["latent"] = inputs["latent_state"]
        request["latent_state"], request["latent_mask"] = state, torch.ones(state.shape[:2], dtype=torch.bool)
        request["start_pos"] = inputs["start_pos"].reshape(-1).expand(len(x)).contiguous()
    results = {"v": sampler.evaluate(x, time, **request)}
    for name, state in states.items():
        rope = module.rope(module.latent_positions(state)) if name == "latent" else None
        results[f"kv_{name}_k"], results[f"kv_{name}_v"] = module.keys_values(name, state, rope)
    if s["cfg_scale_text"] is not None:
        scales = {"text": s["cfg_scale_text"], "speaker": s["cfg_scale_speaker"]}
        results["v_packed"] = sampler.evaluate(x, time, packed=True, **request)
        results["v_guided"] = sampler.evaluate(x, time, guidance=scales, **request)
    return results


@torch.no_grad()
def _replay_loop(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    """From the noise on: in one go, or block by block, each after the re-encoded prefix."""
    s, loop, inputs = case.scalars_over(LOOP_SCALARS), case_program(case), case.inputs
    outside = {"text_input_ids", "speaker_latent", "continuation_latent"}
    case.check_inputs({"noise", *CONDITIONS}, outside)
    noise = inputs["noise"] * (1.0 if s["truncation_factor"] is None else s["truncation_factor"])
    config, weights = config_from(case.config), case.checkpoint()
    blocks = [noise.shape[1]] if s["block_sizes"] is None else s["block_sizes"]
    if sum(blocks) != noise.shape[1]:
        raise UsageError(f"{case.name}: noise has {noise.shape[1]} frames, but the blocks are {blocks!r}")
    common: dict[str, Any] = {
        "program": loop.name,
        "guidance": {"text": s["cfg_scale_text"], "speaker": s["cfg_scale_speaker"]},
        **_request(case),
    }
    rows, start, factor, least = len(noise), 0, 1.0, s["speaker_kv_min_t"]
    finished = torch.zeros_like(noise)
    if "continuation_latent" in inputs:
        start = inputs["continuation_latent"].shape[1]
        finished = torch.cat((inputs["continuation_latent"], finished), dim=1)
    for block, of_block in zip(blocks, torch.split(noise, blocks, dim=1), strict=True):
        if s["block_sizes"] is not None:
            state = _latent_encoder(config, weights)(finished)
            common |= {"latent_state": state, "latent_mask": torch.ones(state.shape[:2], dtype=torch.bool)}
            common["start_pos"] = torch.full((rows,), start)
        scaled = None
        if s["speaker_kv_scale"] is not None:
            factor *= s["speaker_kv_scale"]  # again at each block: it stays when no step undoes it
            scaled = sampling.speaker_scale(rows, config.num_layers, factor, s["speaker_kv_max_layers"])
        *_, final = sampling.scaled_trajectory(sampler, loop.schedule, scaled, least, noise=of_block, **common)
        if sampling.crossing(loop.schedule, least) is not None:
            factor = 1.0
        finished[:, start : start + block] = final
        start += block
    return {"latent": finished, "t_schedule": torch.tensor(loop.schedule)}


def _latent_encoder(config: Config, weights: Mapping[str, Tensor]) -> LatentEncoder:
    encoder = LatentEncoder(config)
    encoder.load_state_dict({k: v.float() for k, v in weights.items() if k.startswith(LatentEncoder.PREFIXES)})
    return encoder.eval()
