"""Runs the recorded reference cases of Irodori-TTS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from voicehub_aot.adapters import Sampler
from voicehub_aot.adapters._echo_irodoritts import checkpoint as checkpoints
from voicehub_aot.adapters.irodoritts import JOINT, PROGRAM_OPTIONS, SCALES, program
from voicehub_aot.adapters.irodoritts.checkpoint import OUTSIDE, config_from, network
from voicehub_aot.adapters.irodoritts.net import TextToLatentRFDiT
from voicehub_aot.errors import UsageError
from voicehub_aot.spec.golden import Case
from voicehub_aot.spec.network import loaded
from voicehub_aot.spec.program import Program, probe
from voicehub_aot.spec.speaker import SpeakerScaling

CALL_DEFAULTS: Mapping[str, Any] = {f"cfg_scale_{name}": None for name in SCALES}
LOOP_DEFAULTS: Mapping[str, Any] = {
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
        return probe(case.times("t"))
    s = case.scalars_over(LOOP_DEFAULTS)
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
    s, inputs, config = case.scalars_over(CALL_DEFAULTS), case.inputs, config_from(case.config)
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
        case.scalars_over(LOOP_DEFAULTS),
        case_program(case),
        case.inputs,
        config_from(case.config),
    )
    outside = {"text_input_ids", "caption_input_ids", "ref_latent", "ref_mask"}
    case.check_inputs(_wanted(case, "noise"), outside)
    case.check_fixed({"speaker_uncond_mode": "mask"})
    guided = _guided(case, s)
    if s["cfg_guidance_mode"] == "joint" and len(set(guided.values())) > 1:
        raise UsageError(f"{case.name}: joint guidance wants one scale, got {guided!r}")
    noise = inputs["noise"] * (1.0 if s["truncation_factor"] is None else s["truncation_factor"])
    speaker = None
    if s["speaker_kv_scale"] is not None and "speaker" in config.conditions:
        speaker = SpeakerScaling(s["speaker_kv_scale"], s["speaker_kv_max_layers"], s["speaker_kv_min_t"])
    (final,) = sampler.blocks(
        noise=noise,
        speaker=speaker,
        program=loop.name,
        guidance=guided | dict.fromkeys((JOINT,), next(iter(guided.values()), 0.0)),
        **_conditioning(case),
    )
    return {"latent": final, "t_schedule": torch.tensor(loop.schedule)}
