"""What a model supports: its formulation, the operations of its loop, and what may be changed about either.

Traits describe the model as released and as VoiceHub's optimization layer classifies it (kadirnar/VoiceHub 6b065341,
voicehub/optimization/capabilities.py), under VoiceHub's names. "stork2" says that the model's velocity admits the
solver, not that a program for it exists here: `Traits.support` tells what is admitted, built and verified apart. Tools
query traits, never model names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator

from voicehub_aot.errors import ContradictoryTraits

VELOCITY = ("conditional-flow-matching", "rectified-flow", "flow-matching")  # the network predicts dx/dt
FORMULATIONS = (*VELOCITY, "style-diffusion", "denoising-diffusion", "autoregressive")
FORMULATIONS_BY_SOLVER: Mapping[str, tuple[str, ...]] = {  # the formulations each can integrate
    "euler-solver": VELOCITY,
    "midpoint-solver": VELOCITY,
    "iterative-estimator": VELOCITY,  # the network itself returns the next state
    "adpm2-solver": ("style-diffusion",),
    "dpm-solver-plus-plus": ("denoising-diffusion",),
    "categorical-sampler": ("autoregressive",),
}
GUIDED = "classifier-free-guidance"
KNOWN: Mapping[str, tuple[str, ...]] = {
    "formulation": FORMULATIONS,
    "operations": ("denoiser", GUIDED, *FORMULATIONS_BY_SOLVER),
    "techniques": ("schedule", "discrete-step-count", "guidance", "prediction-cache", "stork2"),
    "attention": ("native", "sdpa", "flash_attention_4"),
    "kernels": ("native", "torch", "auto", "triton", "cuda_extension"),
    "dtypes": ("float32", "float16", "bfloat16"),
    "passes": ("compile", "sdpa", "attention-backend", "custom-kernels", "diffusion-cache", "diffusion-sampling"),
}


BUILT: Mapping[str, tuple[str, ...]] = {  # what this package does, for every model that admits it
    "techniques": ("schedule", "discrete-step-count"),  # --steps and --program
    "attention": ("native", "sdpa"),  # kernels/attention.py is both
    "kernels": ("native", "torch"),
    "dtypes": ("float32",),
}
VERIFIED = ("eager float32 tiny", "aoti float32 tiny", "onnxruntime float32 tiny")  # by recorded loops of every model


class Support(BaseModel):
    """Of one item of a model's traits. Admitted: the model allows it, which is why it is there. Built: this package
    does it. verified: "ENGINE DTYPE SIZE" where the default test run holds it to recorded cases."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    admitted: bool
    built: bool
    verified: tuple[str, ...]


class Traits(BaseModel):
    """Contradictions raise ContradictoryTraits at construction, which is the import of the adapter.

    formulation  what the network predicts
    operations   of one solve: the denoiser, guidance, then the solvers it is released with
    techniques   how the solve may be shortened or changed
    attention    implementations the network can run with
    kernels      back ends of its elementwise operations
    dtypes       of weights and activations
    passes       of VoiceHub's that apply to it
    surfaces     what VoiceHub hands to a compiler at inference; empty = nothing by name
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    formulation: str
    operations: tuple[str, ...]
    techniques: tuple[str, ...] = ()
    attention: tuple[str, ...] = ("native",)
    kernels: tuple[str, ...] = ("native", "torch")
    dtypes: tuple[str, ...]
    passes: tuple[str, ...]
    surfaces: tuple[str, ...] = ()

    @property
    def support(self) -> dict[str, dict[str, Support]]:
        """By kind (the keys of BUILT) and name: what is admitted, built and verified."""
        return {kind: {name: _support(name in built) for name in getattr(self, kind)} for kind, built in BUILT.items()}

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, values: Any, build: ModelWrapValidatorHandler[Traits]) -> Traits:
        try:
            traits = build(values)
        except ValidationError as error:
            found = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ContradictoryTraits(f"traits are malformed: {found}; wanted {', '.join(cls.model_fields)}") from error
        if problems := _unknown(traits) or _contradictions(traits):
            raise ContradictoryTraits(f"traits of a {traits.formulation} model: {'; '.join(problems)}")
        return traits


def _support(built: bool) -> Support:
    return Support(admitted=True, built=built, verified=VERIFIED if built else ())


def _unknown(traits: Traits) -> list[str]:
    """Problems with names: those that are not known, and those that are given twice."""
    problems = []
    for field, value in dict(traits).items():
        names = (value,) if isinstance(value, str) else value
        known = KNOWN.get(field, names)
        if unknown := [name for name in names if name not in known]:
            problems.append(f"{field} {', '.join(map(repr, unknown))} not known; known are {', '.join(known)}")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            problems.append(f"{field} names {', '.join(map(repr, twice))} more than once")
    return problems


def _contradictions(traits: Traits) -> list[str]:
    """The rules that these traits break. A rule is what must hold, and what the error says where it does not."""
    operations, techniques, passes = traits.operations, traits.techniques, traits.passes
    solvers = [name for name in operations if name in FORMULATIONS_BY_SOLVER]
    foreign = [name for name in solvers if traits.formulation not in FORMULATIONS_BY_SOLVER[name]]
    half = {"float16", "bfloat16"} & set(traits.dtypes)
    rules = (
        (solvers, f"operations need one of {', '.join(FORMULATIONS_BY_SOLVER)}"),
        (not foreign, f"operations {foreign!r} do not solve this formulation"),
        ("denoiser" in operations or traits.formulation == "autoregressive", "operations need 'denoiser'"),
        (traits.dtypes, "dtypes are empty"),
        (
            bool(techniques) == ("diffusion-sampling" in passes),
            "the pass 'diffusion-sampling' and at least one technique go together",
        ),
        (
            ("discrete-step-count" in techniques) == ("iterative-estimator" in operations),
            "the technique 'discrete-step-count' and the operation 'iterative-estimator' go together",
        ),
        (
            not {"schedule", "discrete-step-count"} <= set(techniques),
            "techniques 'schedule' and 'discrete-step-count' exclude each other",
        ),
        ("guidance" not in techniques or GUIDED in operations, f"technique 'guidance' needs operation {GUIDED!r}"),
        (
            "stork2" not in techniques or (traits.formulation in VELOCITY and "schedule" in techniques),
            f"technique 'stork2' needs a velocity on a schedule: 'schedule', and one of {', '.join(VELOCITY)}",
        ),
        ("native" in traits.attention, "attention needs 'native'"),
        (
            ("sdpa" in traits.attention) == bool({"sdpa", "attention-backend"} & set(passes)),
            "attention 'sdpa' and one of the passes 'sdpa', 'attention-backend' go together",
        ),
        (
            ("flash_attention_4" in traits.attention) == ("attention-backend" in passes),
            "attention 'flash_attention_4' and the pass 'attention-backend' go together",
        ),
        ("flash_attention_4" not in traits.attention or half, "attention 'flash_attention_4' needs a 16-bit dtype"),
        ({"native", "torch"} <= set(traits.kernels), "kernels need 'native' and 'torch'"),
        (
            bool({"auto", "triton", "cuda_extension"} & set(traits.kernels)) == ("custom-kernels" in passes),
            "kernels beyond 'native' and 'torch' and the pass 'custom-kernels' go together",
        ),
        (not traits.surfaces or "compile" in passes, "surfaces need the pass 'compile'"),
    )
    return [problem for holds, problem in rules if not holds]
