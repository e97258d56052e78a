"""Runs the recorded reference cases of Chatterbox and CosyVoice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from voicehub_aot.adapters import Sampler
from voicehub_aot.adapters._chatterbox_cosyvoice.flow import GRIDS, RATE, mean_flow
from voicehub_aot.errors import UsageError
from voicehub_aot.spec.golden import Case
from voicehub_aot.spec.program import Program, probe
from voicehub_aot.spec.region import RegionSpec
from voicehub_aot.spec.solver import euler

CALL_DEFAULTS: Mapping[str, Any] = {"packed_cfg": False, "inference_cfg_rate": None, "streaming": False}
LOOP_DEFAULTS: Mapping[str, Any] = {
    "n_timesteps": 10,
    "inference_cfg_rate": RATE,
    "t_scheduler": "cosine",
    "meanflow": False,
    "streaming": False,
    "temperature": 1.0,  # the recorded noise has it
    "noise_seed": None,
}


def case_program(case: Case) -> Program:
    if case.kind == "sampler":
        s = case.scalars_over(LOOP_DEFAULTS)
        if s["meanflow"]:  # whatever t_scheduler says
            return mean_flow(s["n_timesteps"])
        if s["t_scheduler"] not in GRIDS:
            raise UsageError(f"{case.name}: t_scheduler {s['t_scheduler']!r} is not one of {', '.join(GRIDS)}")
        return euler(GRIDS[s["t_scheduler"]](s["n_timesteps"]))
    times, ends = case.inputs["t"].reshape(-1), case.inputs.get("r")
    if ends is None:
        return probe(case.times("t"))
    pairs = sorted(set(zip(times.tolist(), ends.reshape(-1).expand_as(times).tolist(), strict=True)))
    return probe([t for t, _ in pairs], extra_times={"r": [r for _, r in pairs]})


def replay(case: Case, sampler: Sampler, region: RegionSpec) -> dict[str, Tensor]:
    return _replay_loop(case, sampler, region) if case.kind == "sampler" else _replay_call(case, sampler, region)


def _names(region: RegionSpec) -> set[str]:
    return {item.name for item in region.inputs}


def _request(region: RegionSpec, inputs: Mapping[str, Tensor], streaming: bool) -> dict[str, Any]:
    """Conditioning and reach as upstream has them: velocities to the tensor's end, if there are any."""
    mask = inputs["mask"][:, 0]
    rows, frames = mask.shape
    request = {name: inputs[name] for name in ("mu", "spks", "cond")} | {"lengths": mask.sum(1).long()}
    if "extent" in _names(region):
        request["extent"] = torch.full((rows,), frames)
    if "streaming" in _names(region):
        request["streaming"] = torch.full((rows,), streaming)
    return request


def _replay_call(case: Case, sampler: Sampler, region: RegionSpec) -> dict[str, Tensor]:
    s = case.scalars_over(CALL_DEFAULTS)
    own = {"r"} & _names(region)
    inputs = case.check_inputs(("x", "mask", "mu", "t", "spks", "cond", *own))
    streaming = {"streaming": s["streaming"]} if "streaming" in _names(region) else {}
    out = sampler.denoiser()(**inputs, **streaming)
    if not s["packed_cfg"]:
        return {"velocity": out}
    results = {"packed": out}
    if s["inference_cfg_rate"] is not None:  # by our own packing, from the conditional rows alone
        first = {name: value[: len(value) // 2] for name, value in inputs.items()}
        request = _request(region, first, s["streaming"])
        guidance = s["inference_cfg_rate"]
        results["guided"] = sampler.evaluate(first["x"], first["t"], guidance=guidance, **request)
    return results


def _replay_loop(case: Case, sampler: Sampler, region: RegionSpec) -> dict[str, Tensor]:
    """CausalConditionalCFM.forward from the noise on."""
    s, loop = case.scalars_over(LOOP_DEFAULTS), case_program(case)
    inputs = case.check_inputs(("noise", "mu", "mask", "spks", "cond"), ("noised_mels",))
    noise = inputs["noise"]
    if "noised_mels" in inputs:
        tail = inputs["noised_mels"]
        noise = torch.cat((noise[..., : noise.shape[2] - tail.shape[2]], tail), dim=2)
    guidance = None if region.guidance is None else s["inference_cfg_rate"]
    request = _request(region, inputs, s["streaming"])
    *_, final = sampler.trajectory(noise=noise, program=loop.name, guidance=guidance, **request)
    if "extent" not in request:  # a network that masks its velocity leaves the padding's noise as it is
        final = torch.where(inputs["mask"] == 0, noise, final)
    return {"schedule": torch.tensor(loop.schedule), "result": final}
