"""CosyVoice: the flow-matching estimators of Fun-CosyVoice3 (a DiT) and of CosyVoice2 (a causal decoder).

Upstream   FunAudioLLM/CosyVoice 074ca6dc9e80a2f424f1f74b48bdd7d3fea531cc, cosyvoice/flow: DiT/dit.py (DiT), decoder.py
           (CausalConditionalDecoder), flow_matching.py (CausalConditionalCFM). Code Apache-2.0
Weights    `flow.pt` of FunAudioLLM/Fun-CosyVoice3-0.5B-2512 and FunAudioLLM/CosyVoice2-0.5B on the hub, Apache-2.0
Compiled   one evaluation of `decoder.estimator`. The token encoder before it and the vocoder after it are not
Time       0 = noise, 1 = data

B rows, T frames (50 per second, N = 2 x tokens):

| tensor      | shape      |         |                                                                  |
|---|---|---|---|
| x           | [B, 80, T] | state   | log-mel                                                          |
| time        | [1]        | time    | one for all rows                                                 |
| mu          | [B, 80, T] | request | encoded tokens                                                   |
| spks        | [B, 80]    | request | projected speaker embedding                                      |
| cond        | [B, 80, T] | request | log-mel of the prompt in its frames, 0 elsewhere                 |
| lengths     | [B]        | request | frames of each row: upstream's mask                              |
| extent      | [B]        | request | frames whose velocity is computed (DiT: upstream has no mask)    |
| streaming   | [B]        | request | frames see their own chunk of 50 and earlier ones; default False |
| drop        | [B]        | flag    | mu, spks and cond become 0                                       |
| velocity    | [B, 80, T] | output  | 0 beyond a row's extent; CosyVoice2: beyond its length           |

Padding on the right is exact: convolutions look back only, attention keys are masked. Noise is the caller's; upstream
takes the first frames of randn([1, 80, 15000]) drawn on the CPU after seeding with 0, for every request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from voicehub_aot.adapters._chatterbox_cosyvoice import flow
from voicehub_aot.adapters._chatterbox_cosyvoice.net import DecoderConfig
from voicehub_aot.adapters.cosyvoice.checkpoint import (
    CONFIGS,
    FILES,
    NAME,
    PREFIX,
    Config,
    checkpoint_shapes,
    config_from as config_from,
    formula_weights,
    network,
    read_checkpoint as read_checkpoint,
)
from voicehub_aot.spec.checkpoint import check_shapes
from voicehub_aot.spec.network import loaded
from voicehub_aot.spec.program import Program, check_options
from voicehub_aot.spec.region import Region, RegionSpec
from voicehub_aot.spec.solver import euler
from voicehub_aot.spec.traits import Traits

ALIASES = ("cosyvoice3", "cosyvoice2", "fun-cosyvoice3")
DEFAULT_CONFIG = "Fun-CosyVoice3-0.5B-2512"
DEFAULT_BUCKETS: Mapping[str, tuple[int, ...]] = {"frames": (256, 512, 1024, 2048)}
DEFAULT_STEPS: tuple[int, ...] = (10,)
HUB_FILES: Mapping[str, tuple[str, ...]] = {name: () if "tiny" in name else FILES[:1] for name in CONFIGS}
HUB_IDS: Mapping[str, str] = {name: f"FunAudioLLM/{name}" for name in ("Fun-CosyVoice3-0.5B-2512", "CosyVoice2-0.5B")}
TRAITS = Traits(
    formulation="conditional-flow-matching",
    operations=("denoiser", "classifier-free-guidance", "euler-solver"),
    techniques=("schedule", "guidance", "prediction-cache", "stork2"),
    kernels=("native", "torch", "auto", "triton", "cuda_extension"),
    dtypes=("float32", "float16", "bfloat16"),
    passes=("compile", "custom-kernels", "diffusion-cache", "diffusion-sampling"),
    surfaces=("llm.transformer.forward", "flow.estimator.forward", "hift.forward"),
)


# --- the region


def region_spec(config: Config) -> RegionSpec:
    where = "FunAudioLLM/CosyVoice 074ca6dc, cosyvoice/flow/"
    if isinstance(config, DecoderConfig):
        wide = config.out_channels
        source = where + "decoder.py, CausalConditionalDecoder.forward"
        return flow.spec(mel=wide, mu=wide, spk=wide, chunks=True, source=source)
    return flow.spec(
        mel=config.mel_dim,
        mu=config.mu_dim,
        spk=config.spk_dim,
        chunks=True,
        extent=True,
        source=where + "DiT/dit.py, DiT.forward",
    )


def region(config: Config, weights: Mapping[str, Tensor]) -> Region:
    weights = {**formula_weights(config), **weights}
    check_shapes(f"{NAME} {region_spec(config).name}", weights, checkpoint_shapes(config))
    return Region(region_spec(config), loaded(network(config), weights, PREFIX))


# --- the sampling loop

PROGRAM_OPTIONS: Mapping[str, Any] = {"grid": "cosine"}


def program(steps: int, **options: Any) -> Program:
    """grid: cosine or linear."""
    chosen = check_options(NAME, PROGRAM_OPTIONS, options, {"grid": flow.GRIDS})
    return euler(flow.GRIDS[chosen["grid"]](steps))
