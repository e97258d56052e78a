"""Chatterbox: the flow-matching decoder of S3Gen, from speech tokens to a mel spectrogram.

Upstream   resemble-ai/chatterbox 5de7a54aa4e5e2baadb0182dde554908b48b85c2, src/chatterbox/models/s3gen: decoder.py
           (ConditionalDecoder), flow_matching.py (CausalConditionalCFM). Code MIT
Weights    on the hub, MIT: ResembleAI/chatterbox (English, multilingual and voice conversion share this network),
           chatterbox-turbo and chatterbox-nano (mean flow: two steps, no guidance)
Compiled   one evaluation of `flow.decoder.estimator`. The token encoder before it and the vocoder after it are not
Time       0 = noise, 1 = data

B rows, T frames (50 per second, N = 2 x tokens):

| tensor      | shape      |         |                                                       |
|---|---|---|---|
| x           | [B, 80, T] | state   | log-mel                                               |
| time        | [1]        | time    | one for all rows                                      |
| mu          | [B, 80, T] | request | encoded tokens                                        |
| spks        | [B, 80]    | request | projected speaker embedding                           |
| cond        | [B, 80, T] | request | log-mel of the prompt in its frames, 0 elsewhere      |
| lengths     | [B]        | request | frames of each row: upstream's mask                   |
| drop        | [B]        | flag    | mu, spks and cond become 0; not with mean flow        |
| r           | [1]        | time    | end of the step, r > time; with mean flow             |
| velocity    | [B, 80, T] | output  | 0 beyond a row's length                               |

Padding on the right is exact: convolutions look back only, attention keys and the output are masked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from voicehub_aot.adapters._chatterbox_cosyvoice import flow
from voicehub_aot.adapters._chatterbox_cosyvoice.net import DecoderConfig
from voicehub_aot.adapters.chatterbox.checkpoint import (
    CONFIGS,
    FILES,
    MEANFLOW_FILES,
    NAME,
    PREFIX,
    checkpoint_shapes,
    config_from as config_from,
    formula_weights as formula_weights,
    network,
    read_checkpoint as read_checkpoint,
)
from voicehub_aot.errors import OptionUnsupported
from voicehub_aot.spec.checkpoint import check_shapes
from voicehub_aot.spec.network import loaded
from voicehub_aot.spec.program import Program, check_options
from voicehub_aot.spec.region import Region, RegionSpec
from voicehub_aot.spec.solver import euler
from voicehub_aot.spec.traits import Traits

ALIASES = ("chatterbox-tts", "s3gen")
DEFAULT_CONFIG = "chatterbox"
DEFAULT_BUCKETS: Mapping[str, tuple[int, ...]] = {"frames": (512, 1024, 1536, 2560)}  # prompts of 500, speech of 2000
DEFAULT_STEPS: tuple[int, ...] = (10,)
CONFIG_STEPS: Mapping[str, tuple[int, ...]] = dict.fromkeys((n for n, c in CONFIGS.items() if c.meanflow), (2,))
HUB_FILES: Mapping[str, tuple[str, ...]] = {
    name: () if "tiny" in name else MEANFLOW_FILES if config.meanflow else FILES[:1] for name, config in CONFIGS.items()
}
HUB_IDS: Mapping[str, str] = {
    name: f"ResembleAI/{name}" for name in ("chatterbox", "chatterbox-turbo", "chatterbox-nano")
}
TRAITS = Traits(
    formulation="conditional-flow-matching",
    operations=("denoiser", "classifier-free-guidance", "euler-solver"),
    techniques=("schedule", "prediction-cache"),
    attention=("native", "sdpa"),
    dtypes=("float32", "float16", "bfloat16"),
    passes=("compile", "sdpa", "diffusion-cache", "diffusion-sampling"),
    surfaces=("t3.inference", "s3gen.flow_inference", "s3gen.hift_inference"),
)


# --- the region


def region_spec(config: DecoderConfig) -> RegionSpec:
    return flow.spec(
        mel=config.out_channels,
        mu=config.out_channels,
        spk=config.out_channels,
        meanflow=config.meanflow,
        ignored=() if config.meanflow else ("r",),  # upstream's loop passes None
        source="resemble-ai/chatterbox 5de7a54a, src/chatterbox/models/s3gen/decoder.py, ConditionalDecoder.forward",
    )


def region(config: DecoderConfig, weights: Mapping[str, Tensor]) -> Region:
    check_shapes(f"{NAME} {region_spec(config).name}", weights, checkpoint_shapes(config))
    return Region(region_spec(config), loaded(network(config), weights, PREFIX))


# --- the sampling loop

PROGRAM_OPTIONS: Mapping[str, Any] = {"grid": "cosine", "meanflow": False}
BEHAVIOUR_OPTIONS = ("meanflow",)


def program(steps: int, **options: Any) -> Program:
    """grid: cosine or linear. meanflow: as the configuration; then the grid is linear, and releases take 2 steps."""
    chosen = check_options(NAME, PROGRAM_OPTIONS, options, {"grid": flow.GRIDS})
    if not chosen["meanflow"]:
        return euler(flow.GRIDS[chosen["grid"]](steps))
    if options.get("grid", "linear") != "linear":
        raise OptionUnsupported(f"{NAME}: grid={options['grid']!r} with mean flow; upstream knows only 'linear' there")
    return flow.mean_flow(steps)
