"""Runs the recorded reference cases of F5-TTS and E2-TTS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from voicehub_aot.adapters import Sampler
from voicehub_aot.adapters.f5tts import GUIDANCE, program
from voicehub_aot.adapters.f5tts.checkpoint import PREFIX, config_from
from voicehub_aot.adapters.f5tts.net import TextEmbedding
from voicehub_aot.adapters.f5tts.unett import UNetTConfig
from voicehub_aot.errors import UsageError
from voicehub_aot.spec.golden import Case
from voicehub_aot.spec.guidance import EQUATIONS
from voicehub_aot.spec.network import loaded, unfilled
from voicehub_aot.spec.program import Program, probe

CALL_DEFAULTS: Mapping[str, Any] = {
    "cfg_infer": False,
    "drop_audio_cond": False,
    "drop_text": False,
    "cfg_strength": None,
    "mask_is_none": None,
}
LOOP_DEFAULTS: Mapping[str, Any] = {  # CFM.sample's own
    "steps": 32,
    "cfg_strength": 1.0,
    "sway_sampling_coef": None,
    "method": "euler",
    "use_epss": True,
    "noise_seed": None,
    "no_ref_audio": False,
}


def case_program(case: Case) -> Program:
    if case.kind != "sampler":
        return probe(case.times("time"))
    s = case.scalars_over(LOOP_DEFAULTS)
    grid = "epss" if s["use_epss"] else "linear"
    return program(s["steps"], solver=s["method"], grid=grid, sway=s["sway_sampling_coef"])


def replay(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    return _replay_loop(case, sampler) if case.kind == "sampler" else _replay_call(case, sampler)


def _replay_call(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    s = case.scalars_over(CALL_DEFAULTS)
    inputs = case.check_inputs(("x", "cond", "text", "time"), ("mask",))
    x, cond, text, mask = inputs["x"], inputs["cond"], inputs["text"], inputs.get("mask")
    if s["mask_is_none"] not in (None, mask is None):
        raise UsageError(f"{case.name}: mask_is_none={s['mask_is_none']!r}, but the inputs are {sorted(inputs)!r}")
    results = _text_embeddings(case)
    dropped = {"drop_audio_cond": s["drop_audio_cond"], "drop_text": s["drop_text"]}
    out = sampler.denoiser()(x, cond, text, inputs["time"], mask=mask, cfg_infer=s["cfg_infer"], **dropped)
    results["packed" if s["cfg_infer"] else "velocity"] = out
    if s["cfg_infer"] and s["cfg_strength"] is not None:
        results["guided"] = EQUATIONS[GUIDANCE.equation](out, [s["cfg_strength"]])
    return results


@torch.no_grad()
def _text_embeddings(case: Case) -> dict[str, Tensor]:
    """What the text contributes with and without guidance's drop, of an eager text encoder with the case's weights."""
    config, prefix = config_from(case.config), f"{PREFIX}text_embed."
    weights = {key: tensor for key, tensor in case.checkpoint().items() if key.startswith(prefix)}
    encoder = loaded(unfilled(TextEmbedding, config), weights, prefix)
    rows, frames = case.inputs["x"].shape[:2]
    reach = torch.ones(rows, frames, dtype=torch.bool)
    masked = "mask" in case.inputs and not isinstance(config, UNetTConfig)  # UNetT does not mask its text
    inside = case.inputs["mask"] if masked else reach
    return {
        name: encoder(case.inputs["text"], inside, reach, torch.full((rows,), dropped))
        for name, dropped in (("text_embed_cond", False), ("text_embed_uncond", True))
    }


def _replay_loop(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    """CFM.sample from the noise on; what it does to durations and prompts is done here."""
    s, loop = case.scalars_over(LOOP_DEFAULTS), case_program(case)
    inputs = case.check_inputs(("noise", "cond", "text", "lens", "duration"), ("edit_mask",))
    noise, cond, text, lens = (inputs[name] for name in ("noise", "cond", "text", "lens"))
    rows, frames = noise.shape[:2]
    duration = torch.maximum(torch.maximum((text != -1).sum(1), lens) + 1, inputs["duration"])
    if int(duration.max()) != frames:
        raise UsageError(f"{case.name}: noise has {frames} frames, but durations are {duration.tolist()!r}")

    def to_frames(values: Tensor) -> Tensor:
        padded = values.new_zeros(rows, frames, *values.shape[2:])
        padded[:, : values.shape[1]] = values[:, :frames]
        return padded

    known = torch.arange(frames) < lens[:, None]
    if "edit_mask" in inputs:
        known = known & to_frames(inputs["edit_mask"])
    cond = torch.zeros_like(noise) if s["no_ref_audio"] else to_frames(cond)
    request: dict[str, Any] = {
        "cond": cond.masked_fill(~known[..., None], 0.0),
        "text": text,
        "lengths": duration,
        "extent": torch.full((rows,), frames),
    }
    guidance = max(s["cfg_strength"], 0.0)  # upstream guides above 1e-5 only
    *_, final = sampler.trajectory(noise=noise, program=loop.name, guidance=guidance, **request)
    result = torch.where(known[..., None], cond, final)
    return {"schedule": torch.tensor(loop.schedule), "final_state": final, "result": result}
