"""VibeVoice: the prediction head, which denoises one speech latent for each frame of 133 ms.

Upstream: microsoft/VibeVoice e73d1e1, vibevoice/modular/{modular_vibevoice_diffusion_head,
modeling_vibevoice_streaming_inference}.py and vibevoice/schedule/dpm_solver.py. Code and weights MIT. Checkpoints in
the hub: microsoft/VibeVoice-Realtime-0.5B, VibeVoice-1.5B, VibeVoice-Large; of their keys those below
model.prediction_head are read.

Compiled: one evaluation of the head. B rows are streams; there is no length:

    noisy_images  [B, 64]   state      latent of the frame, noise first
    time          [1]       time       step of the training chain, 999 = noise, one for all rows
    condition     [B, H]    request    hidden state of the language model
    neg_condition [B, H]    request    the same of the negative prompt
    negative      [B]       flag       neg_condition instead of condition
    prediction    [B, 64]   output     v = alpha noise - sigma data

A request is one frame. Its modulations, 27 % of the weights, depend on time and condition but not on the latent: they
are one matrix product for all steps, before the first. H = 896 (Realtime), 1536 (1.5B), 3584 (Large).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from voicehub_aot import schedule, solver
from voicehub_aot.adapters._vibevoice_checkpoint import (
    CONFIGS,
    INDEX,
    NAME,
    checkpoint_shapes,
    config_from as config_from,
    read_checkpoint as read_checkpoint,
)
from voicehub_aot.adapters._vibevoice_head import PREFIX, Config, PredictionHead, module_state
from voicehub_aot.checkpoint import check_shapes, loaded
from voicehub_aot.errors import UsageError
from voicehub_aot.guidance import EQUATIONS, Branch, Guidance
from voicehub_aot.program import Program, check_options, probe
from voicehub_aot.region import Call, Input, Parameter, Region, RegionSpec
from voicehub_aot.traits import Traits

if TYPE_CHECKING:
    from voicehub_aot.adapters import Sampler
    from voicehub_aot.golden import Case

ALIASES = ("vibe-voice",)
DEFAULT_CONFIG = "VibeVoice-1.5B"
DEFAULT_BUCKETS = {"batch": (1,)}  # more rows are another engine: --buckets 8
RELEASED_DTYPE = torch.bfloat16
DEFAULT_STEPS = (10, 5)
HUB_FILES: Mapping[str, tuple[str, ...]] = dict.fromkeys(CONFIGS, ("model*.safetensors", INDEX))
TRAITS = Traits(
    formulation="denoising-diffusion",
    operations=("denoiser", "classifier-free-guidance", "dpm-solver-plus-plus"),
    techniques=("schedule", "guidance", "prediction-cache"),
    attention=("native", "sdpa"),
    kernels=("native", "torch", "auto", "triton", "cuda_extension"),
    dtypes=("float32", "float16", "bfloat16"),
    passes=("compile", "sdpa", "custom-kernels", "diffusion-cache", "diffusion-sampling"),
)


def formula_weights(config: Config) -> dict[str, Tensor]:
    """None: every entry is learned."""
    return {}


def _guidance(config: Config) -> Guidance:
    """Upstream writes u + w (c - u), so our scale is w - 1; at w = 1 it still evaluates both, for the same result."""
    negative = Branch(name=NEGATIVE, flags={"negative": True}, scale=config.guidance_scale - 1.0)
    return Guidance(equation="classifier_free", branches=(Branch(name="conditional"), negative))


NEGATIVE = "negative"  # the guidance branch of the negative prompt


def _spec(config: Config) -> RegionSpec:
    latent: Any = {"shape": ("B", config.latent_size), "binding": "STATE"}
    hidden: Any = {"shape": ("B", config.hidden_size), "binding": "REQUEST"}
    flag: Any = {"shape": ("B",), "dtype": "bool", "binding": "REQUEST", "flag": True}
    return RegionSpec(
        name="prediction_head",
        inputs=(
            Input(name="noisy_images", doc="speech latent, noise at time 999", **latent),
            Input(name="time", shape=(1,), binding="TIME", doc="step of the training chain, 999 = noise"),
            Input(name="condition", doc="hidden state of the language model", **hidden),
            Input(name="neg_condition", doc="the same of the negative prompt", branch=NEGATIVE, **hidden),
            Input(name="negative", doc="neg_condition instead of condition", **flag),
        ),
        dims=(),
        outputs=("prediction",),
        guidance=_guidance(config),
        call=Call(
            parameters=(
                Parameter(name="noisy_images", kind="tensor", feeds="noisy_images"),
                Parameter(name="timesteps", kind="time"),
                Parameter(name="condition", kind="tensor", feeds="condition"),
            ),
            returns="velocity",
            source="microsoft/VibeVoice e73d1e1, vibevoice/modular/modular_vibevoice_diffusion_head.py, "
            "VibeVoiceDiffusionHead.forward",
        ),
        main_dim=None,
    )


def region(config: Config, weights: Mapping[str, Tensor]) -> Region:
    check_shapes(f"{NAME} {_spec(config).name}", weights, checkpoint_shapes(config))
    with torch.device("meta"):
        module = PredictionHead(config)
    bare = {key.removeprefix(PREFIX): tensor for key, tensor in weights.items()}
    return Region(_spec(config), loaded(module, module_state(config, bare)))


# --- sampling loop

TIME_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROGRAM_OPTIONS: Mapping[str, Any] = {"time_dtype": "float32"}


def program(steps: int, **options: Any) -> Program:
    """DPM-Solver++(2M) over the cosine training chain of 1000 steps.

    time_dtype: what the times are rounded to before the head sees them. Upstream casts them to the latents' dtype, so
    its bfloat16 runs say 1000 for 999; its float16 and float32 runs keep them exact.
    """
    chosen = check_options(NAME, PROGRAM_OPTIONS, options, {"time_dtype": TIME_DTYPES})
    chain = schedule.cosine_noise_ratios()
    grid = schedule.training_timesteps(steps, len(chain))
    exact = torch.tensor(grid.times[:-1])
    times = exact.to(TIME_DTYPES[chosen["time_dtype"]]).tolist()
    return solver.dpm_solver_2m(grid, [*(chain[int(t)] for t in grid.times[:-1]), 0.0], times=times)


# --- recorded cases

CALL = {"inputs": {"noisy_images", "timesteps", "condition"}, "scalars": {"cfg_scale"}}
LOOP = {
    "inputs": {"noise", "condition", "neg_condition"},
    "scalars": {"num_inference_steps", "cfg_scale", "solver", "timestep_spacing", "final_sigmas_type"}
    | {"lower_order_final", "euler_at_final", "nfe"},
}
LOOP_SETTINGS = {
    "solver": "dpmsolver++ 2M midpoint",
    "timestep_spacing": "linspace",
    "final_sigmas_type": "zero",
    "lower_order_final": True,
    "euler_at_final": False,
}


def _check_case(case: Case) -> None:
    known = LOOP if case.kind == "sampler" else CALL
    case.check_inputs(known["inputs"])
    other = {n: v for n, v in case.scalars.items() if n not in known["scalars"] or LOOP_SETTINGS.get(n, v) != v}
    if other or (case.kind == "sampler" and not {"num_inference_steps", "cfg_scale"} <= set(case.scalars)):
        raise UsageError(f"{case.name}: scalars {other or dict(case.scalars)!r} are not understood")


def case_program(case: Case) -> Program:
    _check_case(case)
    if case.kind != "sampler":
        return probe(sorted(set(case.inputs["timesteps"].reshape(-1).tolist())))
    return program(case.scalars["num_inference_steps"])


def replay(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    _check_case(case)
    return _replay_loop(case, sampler) if case.kind == "sampler" else _replay_call(case, sampler)


def _replay_call(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    """A guidance pair is rows of one call upstream, [conditional; negative]: each row names its own condition."""
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
