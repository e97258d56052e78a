"""VoxCPM2, VoxCPM1.5 and VoxCPM-0.5B: the local DiT that turns language-model states into one patch of speech latents.

Upstream   OpenBMB/VoxCPM 616d3d3e630a9c96c2853250eef91b0f39dcd5fa, src/voxcpm/modules/locdit: local_dit.py (v1),
           local_dit_v2.py, unified_cfm.py; Apache-2.0
Weights    openbmb/VoxCPM2 (Apache-2.0), openbmb/VoxCPM1.5, openbmb/VoxCPM-0.5B on the hub: feat_decoder.estimator.*
Compiled   one evaluation of the estimator. Language models, patch encoder and codec stay with the host, which solves
           one patch after the other: mu and cond are new for each
Time       1 = noise, 0 = data. The loop starts with steps of zero velocity (CFG-Zero*), which cost no evaluation

| tensor       | binding | shape                | VoxCPM2      | 1.5        | 0.5B       |
|---|---|---|---|---|---|
| x, velocity  | state   | [B, feat, P]         | [B, 64, 4]   | [B, 64, 4] | [B, 64, 2] |
| time, dt     | time    | [1]                  |              |            |            |
| mu           | request | [B, n * D]           | [B, 2048]    | [B, 1024]  | [B, 1024]  |
| cond         | request | [B, feat, P]         | as x         | as x       | as x       |
| drop_mu      | flag    | [B]; mu becomes 0    |              |            |            |
| tokens       |         | n (+ 1 in v2) + 2 P  | 11           | 9          | 5          |

dt is 0 except in mean mode, where it is the step's width; its embedding of 0 is not 0, so it is an input always.
cond is the previous patch, zeros before the first. Rows are independent and have no length: nothing is padded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from voicehub_aot.adapters._tables import TIME_DTYPES
from voicehub_aot.adapters.voxcpm.checkpoint import (
    CONFIGS,
    NAME,
    PREFIX,
    checkpoint_shapes,
    config_from as config_from,
    formula_weights as formula_weights,
    network,
    read_checkpoint as read_checkpoint,
)
from voicehub_aot.adapters.voxcpm.net import Config
from voicehub_aot.errors import OptionUnsupported
from voicehub_aot.spec import schedule
from voicehub_aot.spec.checkpoint import check_shapes
from voicehub_aot.spec.guidance import Branch, Guidance
from voicehub_aot.spec.network import loaded
from voicehub_aot.spec.program import Program, check_options
from voicehub_aot.spec.region import Call, Input, Parameter, Region, RegionSpec
from voicehub_aot.spec.schedule import Schedule
from voicehub_aot.spec.solver import euler
from voicehub_aot.spec.traits import Traits

ALIASES = ("voxcpm2",)
DEFAULT_CONFIG = "VoxCPM2"
DEFAULT_BUCKETS: Mapping[str, tuple[int, ...]] = {}
DEFAULT_STEPS = (10,)
RELEASED_DTYPE = torch.bfloat16
HUB_FILES: Mapping[str, tuple[str, ...]] = {
    name: () if name.startswith("tiny") else ("config.json", "model.safetensors", "pytorch_model.bin")
    for name in CONFIGS
}
HUB_IDS: Mapping[str, str] = {name: f"openbmb/{name}" for name in ("VoxCPM2", "VoxCPM1.5", "VoxCPM-0.5B")}
TRAITS = Traits(
    formulation="conditional-flow-matching",
    operations=("denoiser", "classifier-free-guidance", "euler-solver"),
    techniques=("schedule", "guidance", "prediction-cache"),
    attention=("native", "sdpa"),
    dtypes=("float32", "float16", "bfloat16"),
    passes=("compile", "sdpa", "diffusion-cache", "diffusion-sampling"),
    surfaces=("generate_features",),
)

# --- the region

_CALL = Call(
    parameters=(
        Parameter(name="x", kind="tensor", feeds="x"),
        Parameter(name="mu", kind="tensor", feeds="mu"),
        Parameter(name="t", kind="time"),
        Parameter(name="cond", kind="tensor", feeds="cond"),
        Parameter(name="dt", kind="time", feeds="dt"),
    ),
    returns="velocity",
    source="OpenBMB/VoxCPM 616d3d3e, src/voxcpm/modules/locdit/local_dit_v2.py, VoxCPMLocDiT.forward",
)


def _guidance(config: Config) -> Guidance:
    """Upstream's cfg_value w is scale w - 1 here; released 2. The equation is the config's: it is compiled in."""
    branches = (
        Branch(name="conditional", flags={}),
        Branch(name="unconditional", flags={"drop_mu": True}, scale=1.0),
    )
    return Guidance(equation="zero_star" if config.use_cfg_zero_star else "classifier_free", branches=branches)


def region_spec(config: Config) -> RegionSpec:
    c = config
    return RegionSpec(
        name="local_dit",
        inputs=(
            Input(name="x", shape=("B", c.feat_dim, c.patch_size), binding="STATE", doc="patch, noise at time 1"),
            Input(name="time", shape=(1,), binding="TIME", doc="1 = noise, 0 = data"),
            Input(name="dt", shape=(1,), binding="TIME", doc="width of the step in mean mode, else 0"),
            Input(
                name="mu",
                shape=("B", c.mu_tokens * c.hidden_size),
                binding="REQUEST",
                doc="projected states of both language models",
            ),
            Input(
                name="cond", shape=("B", c.feat_dim, c.context_size), binding="REQUEST", doc="previous patch, or zeros"
            ),
            Input(name="drop_mu", shape=("B",), dtype="bool", binding="REQUEST", flag=True, doc="mu becomes 0"),
        ),
        dims=(),
        guidance=_guidance(config),
        call=_CALL,
        main_dim=None,
    )


def region(config: Config, weights: Mapping[str, Tensor]) -> Region:
    check_shapes(f"{NAME} {region_spec(config).name}", weights, checkpoint_shapes(config))
    return Region(region_spec(config), loaded(network(config), weights, PREFIX))


# --- the sampling loop

PROGRAM_OPTIONS: Mapping[str, Any] = {
    "sway": 1.0,
    "use_cfg_zero_star": True,  # the loop starts with steps of zero velocity; the equation is the configuration's
    "zero_init_steps": None,  # how many; None = upstream's 4 % of the grid's points, at least 1
    "mean_mode": False,  # the denoiser is given the width of the step as dt
    "time_dtype": "float32",  # what upstream's loop computes its grid and times in: the model's dtype
}
BEHAVIOUR_OPTIONS = ("use_cfg_zero_star", "zero_init_steps", "mean_mode")


def swayed(steps: int, sway: float | None, dtype: torch.dtype) -> Schedule:
    """From 1 to 0, swayed, every operation rounded to `dtype`."""
    exact = schedule.sway(schedule.descending(steps), sway)
    if dtype == torch.float32:
        return exact
    u = torch.linspace(1, 0, steps + 1, dtype=dtype)
    t = u if sway is None else u + sway * (torch.cos(torch.pi / 2 * u) - 1 + u)
    try:
        return Schedule(times=tuple(t.tolist()))
    except ValueError as error:
        raise OptionUnsupported(
            f"{NAME}: {steps} steps with sway={sway!r} coincide in {dtype}; ask for fewer steps, or another time_dtype"
        ) from error


def accumulated(grid: Schedule, dtype: torch.dtype = torch.float32) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """t and dt of each step as upstream's loop has them: t <- t - dt, then dt <- t - next."""
    points = torch.tensor(grid.times, dtype=dtype)
    t, times, widths = points[0], list[float](), list[float]()
    for point in points[1:]:
        dt = t - point
        times.append(float(t))
        widths.append(float(dt))
        t = t - dt
    return tuple(times), tuple(widths)


def program(steps: int, **options: Any) -> Program:
    """The loop of UnifiedCFM.solve_euler, which computes the times by repeated subtraction, in the model's dtype.

    time_dtype: bfloat16 as the checkpoints are released to run; it rounds the grid, and with it the steps.
    """
    chosen = check_options(NAME, PROGRAM_OPTIONS, options, {"time_dtype": TIME_DTYPES})
    dtype = TIME_DTYPES[chosen["time_dtype"]]
    grid = swayed(steps, chosen["sway"], dtype)
    skipped = chosen["zero_init_steps"]
    if skipped is None:
        skipped = max(1, int((steps + 1) * 0.04)) if chosen["use_cfg_zero_star"] else 0
    if not isinstance(skipped, int) or isinstance(skipped, bool) or not 0 <= skipped < steps:
        raise OptionUnsupported(
            f"{NAME}: {skipped!r} of {steps} steps have zero velocity, wanted 0 to {steps - 1}, so that one is "
            "evaluated; ask for more steps, or set zero_init_steps"
        )
    times, widths = accumulated(grid, dtype)
    dt = widths if chosen["mean_mode"] else (0.0,) * steps
    return euler(grid, times=times, extra_times={"dt": dt}, skip=skipped)
