"""StyleTTS2: the style denoiser, which draws one style vector for an utterance from noise and the text.

Upstream: yl4579/StyleTTS2 5cedc71, Modules/diffusion/{modules,sampler}.py; sampler settings: Demo/Inference_*.ipynb.
Code MIT; the weights ask that synthesis be announced and cloned voices have consented (upstream's README). Checkpoints
in the hub: yl4579/StyleTTS2-LibriTTS (several speakers) and yl4579/StyleTTS2-LJSpeech (one).

Compiled: the raw network F, one guidance branch a row. Preconditioning and the ADPM2 sampler are the program's. B rows,
T tokens of text, 512 at most; the state has no length:

    x          [B, 1, C]   state      c_in times the noisy style; C = 256: acoustic half, prosodic half
    time       [1]         time       ln(sigma) / 4, one for all rows
    embedding  [B, T, E]   request    of the text encoder PL-BERT; E = 768
    features   [B, 256]    request    reference style; LibriTTS only
    lengths    [B]         request    tokens of each row: attention keys and the mean over tokens end there
    drop       [B]         flag       the learned table's first rows instead of the embedding
    prediction [B, 1, C]   output

| computed once for      | LibriTTS                                | LJSpeech     |
|---|---|---|
| a program (table)      | time features                           | all of m     |
| a request              | scales and shifts of all norms          | -            |
| a request, all steps   | m, what each block adds to every token  | -            |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from voicehub_aot.adapters.styletts2.checkpoint import (
    CONFIGS,
    NAME,
    PREFIX,
    SIGMA_DATA,
    checkpoint_shapes,
    config_from as config_from,
    formula_weights as formula_weights,
    network,
    read_checkpoint as read_checkpoint,
)
from voicehub_aot.adapters.styletts2.net import Config
from voicehub_aot.errors import OptionUnsupported
from voicehub_aot.spec import schedule, solver
from voicehub_aot.spec.checkpoint import check_shapes
from voicehub_aot.spec.guidance import Branch, Guidance
from voicehub_aot.spec.network import loaded
from voicehub_aot.spec.program import Program, check_options
from voicehub_aot.spec.region import Call, Dim, Input, Parameter, Region, RegionSpec
from voicehub_aot.spec.traits import Traits

ALIASES = ("style-tts2", "style_tts2")
DEFAULT_CONFIG = "LibriTTS"
DEFAULT_BUCKETS = {"tokens": (64, 128, 256, 512)}
DEFAULT_STEPS = (5, 10)
HUB_FILES: Mapping[str, tuple[str, ...]] = dict.fromkeys(CONFIGS, ("Models/*/epoch*.pth",))
HUB_IDS: Mapping[str, str] = {name: f"yl4579/StyleTTS2-{name}" for name in ("LibriTTS", "LJSpeech")}
TRAITS = Traits(
    formulation="style-diffusion",
    operations=("denoiser", "classifier-free-guidance", "adpm2-solver"),
    techniques=("schedule",),
    dtypes=("float32", "float16", "bfloat16"),
    passes=("compile", "diffusion-cache", "diffusion-sampling"),
    surfaces=("sampler.forward", "decoder.forward"),
)

# --- the region

GUIDANCE = Guidance(
    equation="classifier_free",
    branches=(Branch(name="conditional"), Branch(name="unconditional", flags={"drop": True})),
)


def region_spec(config: Config) -> RegionSpec:
    longest = config.embedding_max_length
    state: Any = {"shape": ("B", 1, config.channels), "binding": "STATE"}
    tokens: Any = {"shape": ("B", "tokens", config.context_embedding_features), "binding": "REQUEST"}
    style: Any = {"shape": ("B", config.context_features), "binding": "REQUEST"}
    lengths: Any = {"shape": ("B",), "dtype": "int64", "binding": "REQUEST", "low": 1, "high": longest + 1}
    drop: Any = {"shape": ("B",), "dtype": "bool", "binding": "REQUEST", "flag": True}
    several = config.context_features is not None
    return RegionSpec(
        name="denoiser",
        inputs=(
            Input(name="x", doc="noisy style times 1 / sqrt(sigma^2 + sigma_data^2)", **state),
            Input(name="time", shape=(1,), binding="TIME", doc="ln(sigma) / 4"),
            Input(name="embedding", doc="of the text, from PL-BERT", **tokens),
            *([Input(name="features", doc="reference style", **style)] if several else []),
            Input(name="lengths", doc="tokens of each row", **lengths),
            Input(name="drop", doc="without the text", **drop),
        ),
        dims=(Dim(name="tokens", max=longest, length="lengths", doc="text tokens, the leading pad included"),),
        outputs=("prediction",),
        guidance=GUIDANCE,
        call=Call(
            parameters=(
                Parameter(name="x", kind="tensor", feeds="x"),
                Parameter(name="time", kind="time"),
                Parameter(name="embedding_mask_proba", kind="ignored", required=False),  # of training
                Parameter(name="embedding", kind="tensor", feeds="embedding"),
                Parameter(name="features", kind="tensor", feeds="features")
                if several
                else Parameter(name="features", kind="ignored", required=False),
                Parameter(name="embedding_scale", kind="scale", default=1.0, required=False),
            ),
            returns="velocity",
            source="yl4579/StyleTTS2 5cedc71, Modules/diffusion/modules.py, StyleTransformer1d.forward",
        ),
        main_dim="tokens",
    )


def region(config: Config, weights: Mapping[str, Tensor]) -> Region:
    check_shapes(f"{NAME} {region_spec(config).name}", weights, checkpoint_shapes(config))
    return Region(region_spec(config), loaded(network(config), weights, PREFIX))


# --- the sampling loop

PROGRAM_OPTIONS: Mapping[str, Any] = {
    "sigma_data": None,
    "sigma_min": 1e-4,
    "sigma_max": 3.0,
    "rho": 9.0,
    "adpm2_rho": 1.0,
}
BEHAVIOUR_OPTIONS = ("sigma_data", "sigma_min", "sigma_max")


def program(steps: int, **options: Any) -> Program:
    """ADPM2 over Karras levels. steps: levels, as upstream counts them: one transition fewer, two evaluations each.

    sigma_data: the model's, of its configuration. sigma_min, sigma_max, rho: of the levels. adpm2_rho: of the midpoint.
    """
    chosen = check_options(NAME, PROGRAM_OPTIONS, options)
    sigma_data = chosen["sigma_data"]
    if not isinstance(sigma_data, int | float) or not sigma_data > 0:
        raise OptionUnsupported(f"{NAME}: sigma_data={sigma_data!r}, wanted a positive number; {SIGMA_DATA}")
    levels = schedule.karras(steps, chosen["sigma_min"], chosen["sigma_max"], chosen["rho"])
    return solver.adpm2(levels, solver.Preconditioner(sigma_data), rho=chosen["adpm2_rho"])
