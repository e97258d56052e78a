"""Runs the recorded reference cases of Supertonic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from voicehub_aot.adapters import Sampler
from voicehub_aot.adapters.supertonic import config_from, program, region_spec
from voicehub_aot.errors import UsageError
from voicehub_aot.spec.golden import Case
from voicehub_aot.spec.guidance import EQUATIONS
from voicehub_aot.spec.program import Program, probe

CONDITIONING = ("text_emb", "style_ttl", "latent_mask", "text_mask")
LOOP_SCALARS = {"total_step"}
DERIVED = {"nfe"}  # what follows from the others


def _check_case(case: Case) -> None:
    if case.kind == "sampler":
        case.check_inputs(("noise", *CONDITIONING))
        case.check_scalars(DERIVED, LOOP_SCALARS)
    else:
        case.check_inputs(("noisy_latent", "current_step", "total_step", *CONDITIONING))
        case.check_scalars(())


def case_program(case: Case) -> Program:
    _check_case(case)
    if case.kind != "sampler":
        times = case.inputs["current_step"] / case.inputs["total_step"]
        return probe(sorted(set(times.reshape(-1).tolist())))
    return program(int(case.scalars["total_step"]))


def replay(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    """Padded batches as upstream runs them, the edge at the tensor's end; `alone_b` from the same batch, exact edge."""
    _check_case(case)
    return _replay_loop(case, sampler) if case.kind == "sampler" else _replay_call(case, sampler)


def _prefix_lengths(case: Case, name: str) -> Tensor:
    """[B, 1, N] of ones, then zeros -> [B] int64."""
    mask = case.inputs[name][:, 0]
    lengths = mask.sum(1).long()
    if not torch.equal(mask, (torch.arange(mask.shape[1]) < lengths[:, None]).to(mask.dtype)):
        raise UsageError(f"{case.name}: {name} is not a prefix mask: it must be 1 up to a row's length, and 0 beyond")
    return lengths


def _request(case: Case) -> dict[str, Any]:
    """Conditioning, lengths, and upstream's edge."""
    lengths = _prefix_lengths(case, "latent_mask")
    return {
        "text_emb": case.inputs["text_emb"],
        "style_ttl": case.inputs["style_ttl"],
        "lengths": lengths,
        "extent": torch.full_like(lengths, case.inputs["latent_mask"].shape[2]),
        "text_lengths": _prefix_lengths(case, "text_mask"),
    }


def _replay_call(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    spec, request, results = region_spec(config_from(case.config)), _request(case), dict[str, Tensor]()
    steps = torch.stack([case.inputs["current_step"], case.inputs["total_step"]], dim=1)
    for pair in torch.unique(steps, dim=0):  # a region has one time for all rows, upstream's graph one for each
        rows = (steps == pair).all(dim=1).nonzero()[:, 0]
        upstream = {p.name: case.inputs[p.name][rows] for p in spec.call.parameters}
        state, time = upstream["noisy_latent"], float(pair[0] / pair[1])
        asked = {name: value[rows] for name, value in request.items()}
        exact = sampler.evaluate(state, time, packed=True, **{**asked, "extent": asked["lengths"]})
        if spec.guidance is not None:
            exact = EQUATIONS[spec.guidance.equation](exact, [spec.guidance.branches[1].scale])
        branches = sampler.evaluate(state, time, packed=True, **asked)
        names = ("velocity_cond", "velocity_uncond")[: len(branches) // len(rows)]
        found = dict(zip(names, torch.chunk(branches, len(names)), strict=True))
        found["denoised_latent"] = sampler.denoiser()(**upstream)
        found["alone"] = (state + exact / pair[1]) * upstream["latent_mask"]
        for name, value in found.items():
            results.setdefault(name, torch.zeros_like(case.inputs["noisy_latent"]))[rows] = value
    alone = results.pop("alone")
    return results | {f"alone_{b}": alone[b : b + 1, :, :n] for b, n in enumerate(request["lengths"].tolist())}


def _replay_loop(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    chosen = program(int(case.scalars["total_step"]))
    noise = case.inputs["noise"] * case.inputs["latent_mask"]
    states = list(sampler.trajectory(noise=noise, program=chosen.name, **_request(case)))
    schedule = torch.tensor(chosen.times, dtype=torch.float32)
    return {"latent": states[-1], "latent_after_first": states[0], "schedule": schedule}
