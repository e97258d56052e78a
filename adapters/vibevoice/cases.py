"""Runs the recorded reference cases of VibeVoice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from voicehub_aot.adapters import Sampler
from voicehub_aot.adapters.vibevoice import program
from voicehub_aot.spec import schedule
from voicehub_aot.spec.golden import Case
from voicehub_aot.spec.guidance import EQUATIONS
from voicehub_aot.spec.program import Program, probe

CALL_SCALARS = {"cfg_scale"}
LOOP_SCALARS = {"num_inference_steps", "cfg_scale"}
DERIVED = {"nfe"}  # what follows from the others
SETTINGS = {
    "solver": "dpmsolver++ 2M midpoint",
    "timestep_spacing": "linspace",
    "final_sigmas_type": "zero",
    "lower_order_final": True,
    "euler_at_final": False,
}


def _check_case(case: Case) -> None:
    if case.kind == "sampler":
        case.check_inputs(("noise", "condition", "neg_condition"))
        case.check_scalars({*SETTINGS, *DERIVED}, LOOP_SCALARS)
        case.check_fixed(SETTINGS)
    else:
        case.check_inputs(("noisy_images", "timesteps", "condition"))
        case.check_scalars(CALL_SCALARS)


def case_program(case: Case) -> Program:
    _check_case(case)
    if case.kind != "sampler":
        return probe(case.times("timesteps"))
    return program(case.scalars["num_inference_steps"])


def replay(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    _check_case(case)
    return _replay_loop(case, sampler) if case.kind == "sampler" else _replay_call(case, sampler)


def _replay_call(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    """Upstream passes a guidance pair as rows of one call, [conditional; negative]: each row has its own condition."""
    results = {"v": sampler.denoiser()(**case.inputs)}
    if "cfg_scale" in case.scalars:
        results["v_guided"] = EQUATIONS["classifier_free"](results["v"], [case.scalars["cfg_scale"] - 1])
    return results


def _replay_loop(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    """Upstream draws noise for both branches of its packed batch and uses the first."""
    loop, chain = case_program(case), schedule.cosine_noise_ratios()
    request: dict[str, Any] = {name: case.inputs[name] for name in ("condition", "neg_condition")}
    noise = case.inputs["noise"][: len(request["condition"])]
    states = list(sampler.trajectory(noise=noise, program=loop.name, guidance=case.scalars["cfg_scale"] - 1, **request))
    timesteps = torch.tensor(loop.schedule[:-1]).long()
    return {
        "latent": states[-1],
        "latent_after_first": states[0],
        "timesteps": timesteps,
        "sigmas": torch.tensor([*(chain[t] for t in timesteps.tolist()), 0.0]),
        "v_first": sampler.evaluate(noise, loop.times[0], packed=True, **request),
    }
