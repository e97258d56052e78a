"""Runs the recorded reference cases of VoxCPM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from voicehub_aot.adapters import Sampler
from voicehub_aot.adapters.voxcpm import program
from voicehub_aot.adapters.voxcpm.checkpoint import config_from
from voicehub_aot.adapters.voxcpm.net import Config
from voicehub_aot.spec.golden import Case
from voicehub_aot.spec.guidance import EQUATIONS, LEAST_SQUARE
from voicehub_aot.spec.program import Program, probe

CALL_SCALARS = {"cfg_value"}
LOOP_SCALARS = {"temperature", "sway_sampling_coef", "use_cfg_zero_star", "cfg_value", "n_timesteps"}
DERIVED = {"patch_size", "zero_init_steps", "estimator_calls"}  # what follows from the others, and from the inputs


def case_config(case: Case) -> Config:
    """A case's configuration, with the sizes that upstream reads off its tensors."""
    inputs, width = case.inputs, case.config["decoder"]["hidden_size"]
    sizes = {
        "patch_size": inputs["noise" if case.kind == "sampler" else "x"].shape[2],
        "context_size": inputs["cond"].shape[2],
        "mu_tokens": inputs["mu"].shape[1] // width,
        "use_cfg_zero_star": case.scalars.get("use_cfg_zero_star", True),
    }
    return config_from({**case.config, **sizes})


def _moments(case: Case) -> list[tuple[float, float]]:
    """(time, dt) of each row of a case of single evaluations."""
    rows = len(case.inputs["x"])
    times = case.inputs["t"].expand(rows).tolist()
    return list(zip(times, case.inputs.get("dt", torch.zeros(1)).expand(rows).tolist(), strict=True))


def case_program(case: Case) -> Program:
    if case.kind == "sampler":
        s = case.scalars
        return program(
            s["n_timesteps"],
            sway=float(s["sway_sampling_coef"]),
            use_cfg_zero_star=s["use_cfg_zero_star"],
            mean_mode=case.config["mean_mode"],
        )
    times, widths = zip(*dict.fromkeys(_moments(case)), strict=True)
    return probe(times, {"dt": widths})


def replay(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    case.check_scalars({*LOOP_SCALARS, *DERIVED} if case.kind == "sampler" else CALL_SCALARS)
    return _replay_loop(case, sampler) if case.kind == "sampler" else _replay_call(case, sampler)


def _replay_call(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    """Each row at its own time: a region has one for all rows."""
    moments, state = _moments(case), case.inputs["x"]
    blocks = []
    for row, (time, width) in enumerate(moments):
        request: dict[str, Any] = {name: case.inputs[name][row : row + 1] for name in ("mu", "cond")}
        blocks.append(sampler.evaluate(state[row : row + 1], time, extra_times={"dt": width}, packed=True, **request))
    packed = torch.stack(blocks, dim=1).flatten(0, 1)  # conditional rows, then unconditional ones
    c, u = packed.flatten(1).chunk(2)
    results = {"v": packed[: len(state)], "v_packed": packed}
    results["st_star"] = (c * u).sum(1, keepdim=True) / (u.square().sum(1, keepdim=True) + LEAST_SQUARE)
    if "cfg_value" in case.scalars:
        for name, equation in (("zero_star", "zero_star"), ("plain", "classifier_free")):
            results[f"v_guided_{name}"] = EQUATIONS[equation](packed, [case.scalars["cfg_value"] - 1.0])
    return results


def _replay_loop(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    loop, s = case_program(case), case.scalars
    counted = {"estimator_calls": loop.evaluations, "zero_init_steps": loop.steps - loop.evaluations}
    counted["patch_size"] = case.inputs["noise"].shape[2]
    case.check_fixed(counted)
    *_, patch = sampler.trajectory(
        noise=case.inputs["noise"] * s["temperature"],
        program=loop.name,
        guidance=s["cfg_value"] - 1.0,
        mu=case.inputs["mu"],
        cond=case.inputs["cond"],
    )
    schedules = {"t_schedule": loop.schedule, "t_evaluated": loop.times, "dt_evaluated": loop.extra_times["dt"]}
    return {"patch": patch, **{name: torch.tensor(values) for name, values in schedules.items()}}
