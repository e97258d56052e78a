"""What chatterbox and CosyVoice share around their networks: region, guidance, programs, recorded cases.

Both turn speech tokens into mel frames with CausalConditionalCFM: resemble-ai/chatterbox
5de7a54aa4e5e2baadb0182dde554908b48b85c2, src/chatterbox/models/s3gen/flow_matching.py, and FunAudioLLM/CosyVoice
074ca6dc9e80a2f424f1f74b48bdd7d3fea531cc, cosyvoice/flow/flow_matching.py. Rows are packed conditional, then
unconditional with mu, spks and cond zero; v = (1 + w) c - w u. A mean-flow network is asked for the velocity from t to
r, the two ends of the step, on the linear grid and without guidance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from voicehub_aot import schedule
from voicehub_aot.errors import UsageError
from voicehub_aot.golden import Case
from voicehub_aot.guidance import Branch, Guidance
from voicehub_aot.program import Program, probe
from voicehub_aot.region import Call, Dim, Input, Parameter, RegionSpec
from voicehub_aot.solver import euler

if TYPE_CHECKING:
    from voicehub_aot.adapters import Sampler

RATE = 0.7  # inference_cfg_rate of every release with guidance
LONGEST = 15000  # frames of CosyVoice's noise table, five minutes
GRIDS = {"cosine": schedule.cosine, "linear": schedule.linear}
GUIDANCE = Guidance(
    equation="classifier_free",
    branches=(
        Branch(name="conditional"),
        Branch(name="unconditional", flags={"drop": True}, scale=RATE),
    ),
)


def spec(
    *,
    mel: int,
    mu: int,
    spk: int,
    source: str,
    meanflow: bool = False,
    chunks: bool = False,
    extent: bool = False,
    ignored: tuple[str, ...] = (),
) -> RegionSpec:
    """meanflow: two times and no guidance. chunks: rows may stream. extent: velocities beyond a row's length count.

    ignored: further arguments of upstream's call that say nothing.
    """
    request: Any = {"binding": "REQUEST"}
    flag: Any = {"binding": "REQUEST", "shape": ("B",), "dtype": "bool"}
    reach: Any = {"binding": "REQUEST", "shape": ("B",), "dtype": "int64", "low": 1, "high": LONGEST + 1}
    inputs = [
        Input(name="x", shape=("B", mel, "frames"), binding="STATE", doc="mel, noise at time 0"),
        Input(name="time", shape=(1,), binding="TIME", doc="0 = noise, 1 = data"),
        Input(name="mu", shape=("B", mu, "frames"), doc="encoded speech tokens", **request),
        Input(name="spks", shape=("B", spk), doc="projected speaker embedding", **request),
        Input(name="cond", shape=("B", mel, "frames"), shorter=True, doc="mel of the prompt, then 0", **request),
        Input(name="lengths", doc="frames of each row", **reach),
    ]
    parameters = [
        Parameter(name="x", kind="tensor", feeds="x"),
        Parameter(name="mask", kind="mask", feeds="frames"),
        Parameter(name="mu", kind="tensor", feeds="mu"),
        Parameter(name="t", kind="time"),
        Parameter(name="spks", kind="tensor", feeds="spks"),
        Parameter(name="cond", kind="tensor", feeds="cond"),
    ]
    if extent:
        inputs.append(Input(name="extent", doc="frames of each row whose velocity is computed", **reach))
    if meanflow:
        inputs.append(Input(name="r", shape=(1,), binding="TIME", doc="where the mean velocity leads to"))
        parameters.append(Parameter(name="r", kind="time", feeds="r"))
    else:
        inputs.append(Input(name="drop", flag=True, doc="without mu, spks and cond", **flag))
    if chunks:
        inputs.append(Input(name="streaming", optional=True, doc="attend to no later chunk", **flag))
        parameters.append(Parameter(name="streaming", kind="switch", feeds="streaming", default=False, required=False))
    parameters += [Parameter(name=name, kind="ignored", required=False) for name in ignored]
    frames = Dim(
        name="frames",
        max=LONGEST,
        length="lengths",
        extent="extent" if extent else None,
        doc="mel frames, 50 per second",
    )
    return RegionSpec(
        name="estimator",
        inputs=tuple(inputs),
        dims=(frames,),
        guidance=None if meanflow else GUIDANCE,
        call=Call(parameters=tuple(parameters), returns="velocity", source=source),
    )


def mean_flow(steps: int) -> Program:
    """From the start of each step of the linear grid to its end."""
    grid = schedule.linear(steps)
    return euler(grid, extra_times={"r": grid.times[1:]})


# --- recorded cases

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
            raise UsageError(f"{case.name}: t_scheduler {s['t_scheduler']!r} is none of {', '.join(GRIDS)}")
        return euler(GRIDS[s["t_scheduler"]](s["n_timesteps"]))
    times, ends = case.inputs["t"].reshape(-1), case.inputs.get("r")
    if ends is None:
        return probe(sorted(set(times.tolist())))
    pairs = sorted(set(zip(times.tolist(), ends.reshape(-1).expand_as(times).tolist(), strict=True)))
    return probe([t for t, _ in pairs], extra_times={"r": [r for _, r in pairs]})


def replay(case: Case, sampler: Sampler, region: RegionSpec) -> dict[str, Tensor]:
    return (_replay_loop if case.kind == "sampler" else _replay_call)(case, sampler, region)


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
