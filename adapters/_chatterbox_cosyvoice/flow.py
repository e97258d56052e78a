"""What chatterbox and CosyVoice share around their networks: region, guidance, programs, recorded cases.

Both turn speech tokens into mel frames with CausalConditionalCFM: resemble-ai/chatterbox
5de7a54aa4e5e2baadb0182dde554908b48b85c2, src/chatterbox/models/s3gen/flow_matching.py, and FunAudioLLM/CosyVoice
074ca6dc9e80a2f424f1f74b48bdd7d3fea531cc, cosyvoice/flow/flow_matching.py. Rows are packed conditional, then
unconditional with mu, spks and cond zero; v = (1 + w) c - w u. A mean-flow network is asked for the velocity from t to
r, the two ends of the step, on the linear grid and without guidance.
"""

from __future__ import annotations

from typing import Any

from voicehub_aot.spec import schedule
from voicehub_aot.spec.guidance import Branch, Guidance
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.region import Call, Dim, Input, Parameter, RegionSpec
from voicehub_aot.spec.solver import euler

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

    ignored: further arguments of upstream's call, which have no effect.
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
