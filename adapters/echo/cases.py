"""Runs the recorded reference cases of Echo-TTS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from voicehub_aot.adapters import Sampler
from voicehub_aot.adapters.echo import PROGRAM_OPTIONS, program
from voicehub_aot.adapters.echo.checkpoint import config_from, denoiser_part, network
from voicehub_aot.adapters.echo.net import Config, EchoDiT, LatentEncoder
from voicehub_aot.errors import UsageError
from voicehub_aot.spec.golden import Case
from voicehub_aot.spec.network import loaded
from voicehub_aot.spec.program import Program, probe
from voicehub_aot.spec.speaker import SpeakerScaling

CALL_DEFAULTS: Mapping[str, Any] = {"cfg_scale_text": None, "cfg_scale_speaker": None}
LOOP_DEFAULTS: Mapping[str, Any] = {
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
        return probe(case.times("t"))
    s = case.scalars_over(LOOP_DEFAULTS)
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
    s, inputs = case.scalars_over(CALL_DEFAULTS), case.inputs
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
    s, loop, inputs = case.scalars_over(LOOP_DEFAULTS), case_program(case), case.inputs
    outside = {"text_input_ids", "speaker_latent", "continuation_latent"}
    case.check_inputs({"noise", *CONDITIONS}, outside)
    noise = inputs["noise"] * (1.0 if s["truncation_factor"] is None else s["truncation_factor"])
    config, weights = config_from(case.config), case.checkpoint()
    sizes = [noise.shape[1]] if s["block_sizes"] is None else s["block_sizes"]
    if sum(sizes) != noise.shape[1]:
        raise UsageError(f"{case.name}: noise has {noise.shape[1]} frames, but the blocks are {sizes!r}")

    def prefix(finished: Tensor, start: int) -> dict[str, Any]:
        """Upstream re-encodes all that is finished before every block."""
        state = _latent_encoder(config, weights)(finished)
        mask = torch.ones(state.shape[:2], dtype=torch.bool)
        return {"latent_state": state, "latent_mask": mask, "start_pos": torch.full((len(noise),), start)}

    speaker = None
    if s["speaker_kv_scale"] is not None:
        speaker = SpeakerScaling(s["speaker_kv_scale"], s["speaker_kv_max_layers"], s["speaker_kv_min_t"])
    before = [inputs["continuation_latent"]] if "continuation_latent" in inputs else []
    finished = sampler.blocks(
        noise=noise,
        sizes=sizes,
        request=None if s["block_sizes"] is None else prefix,
        finished=before[0] if before else None,
        speaker=speaker,
        program=loop.name,
        guidance={"text": s["cfg_scale_text"], "speaker": s["cfg_scale_speaker"]},
        **_request(case),
    )
    return {"latent": torch.cat((*before, *finished), dim=1), "t_schedule": torch.tensor(loop.schedule)}


def _latent_encoder(config: Config, weights: Mapping[str, Tensor]) -> LatentEncoder:
    encoder = LatentEncoder(config)
    encoder.load_state_dict({k: v.float() for k, v in weights.items() if k.startswith(LatentEncoder.PREFIXES)})
    return encoder.eval()
