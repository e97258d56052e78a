"""Runs the recorded reference cases of StyleTTS 2."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from voicehub_aot.adapters import Sampler
from voicehub_aot.adapters.styletts2 import program
from voicehub_aot.spec import solver
from voicehub_aot.spec.golden import Case
from voicehub_aot.spec.program import Program, probe

CALL_SCALARS = {"embedding_scale"}
LOOP_SCALARS = {"num_steps", "embedding_scale", "sigma_min", "sigma_max", "rho", "adpm2_rho", "clamp"}
DERIVED = {"transitions", "nfe", "sigmas"}  # what follows from the others


def _check_case(case: Case) -> None:
    loop = case.kind == "sampler"
    case.check_inputs(("noise", "step_noise", "embedding") if loop else ("x", "time", "embedding"), ("features",))
    case.check_scalars(DERIVED, LOOP_SCALARS if loop else CALL_SCALARS)
    case.check_fixed({"clamp": False})


def case_program(case: Case) -> Program:
    _check_case(case)
    if case.kind != "sampler":
        return probe(case.times("time"))
    options = {name: case.scalars[name] for name in ("sigma_min", "sigma_max", "rho", "adpm2_rho")}
    return program(case.scalars["num_steps"], sigma_data=case.config["sigma_data"], **options)


def replay(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    _check_case(case)
    return _replay_loop(case, sampler) if case.kind == "sampler" else _replay_call(case, sampler)


def _request(case: Case) -> dict[str, Any]:
    return {name: case.inputs[name] for name in ("embedding", "features") if name in case.inputs}


def _replay_call(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    x, time, request = case.inputs["x"], case.inputs["time"], _request(case)
    conditional, unconditional = sampler.evaluate(x, time, packed=True, **request).chunk(2)
    out = sampler.denoiser()(x, time, **request, embedding_scale=case.scalars["embedding_scale"])
    return {"out": out, "cond": conditional, "uncond": unconditional}


def _replay_loop(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    loop, request, guidance = case_program(case), _request(case), case.scalars["embedding_scale"] - 1
    levels, model = loop.schedule, solver.Preconditioner(case.config["sigma_data"])
    noises: dict[str, Any] = {"noise": case.inputs["noise"], "step_noise": case.inputs["step_noise"]}
    *_, style = sampler.trajectory(program=loop.name, guidance=guidance, **noises, **request)
    transitions = [solver.ancestral(s, t, case.scalars["adpm2_rho"]) for s, t in pairwise(levels[:-1])]
    up, down, middle = torch.tensor(transitions).unbind(-1)

    def denoised(x: Tensor, sigma: float, row: int) -> Tensor:
        raw = sampler.evaluate(model.into(sigma) * x, loop.times[row], guidance=guidance, **request)
        return model.skip(sigma) * x + model.out(sigma) * raw

    first, second = levels[0], transitions[0][2]
    x = first * case.inputs["noise"]
    start = denoised(x, first, 0)
    return {
        "style": style,
        "sigmas": torch.tensor(levels),
        "sigma_up": up,
        "sigma_down": down,
        "sigma_mid": middle,
        "denoised_first": start,
        "denoised_mid_first": denoised(x + (x - start) / first * (second - first), second, 1),
    }
