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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from voicehub_aot.adapters._chatterbox_cosyvoice import flow as mel_flow
from voicehub_aot.adapters._chatterbox_cosyvoice.checkpoint import (
    decoder_config,
    decoder_fault,
    decoder_sizes,
    find,
    read_estimator,
)
from voicehub_aot.adapters._chatterbox_cosyvoice.net import ConditionalDecoder, DecoderConfig
from voicehub_aot.errors import CheckpointMismatch, OptionUnsupported, UnknownModel
from voicehub_aot.spec.checkpoint import Reading, check_shapes, loaded
from voicehub_aot.spec.program import Program, check_options
from voicehub_aot.spec.region import Region, RegionSpec
from voicehub_aot.spec.solver import euler
from voicehub_aot.spec.traits import Traits

if TYPE_CHECKING:
    pass

NAME = "chatterbox"
ALIASES = ("chatterbox-tts", "s3gen")
PREFIX = "flow.decoder.estimator."

_TURBO = DecoderConfig(meanflow=True)
_TINY = DecoderConfig(
    in_channels=80, out_channels=20, channels=(32,), attention_head_dim=16, n_blocks=2, num_mid_blocks=2, num_heads=3
)
CONFIGS: Mapping[str, DecoderConfig] = {
    "chatterbox": DecoderConfig(),
    "chatterbox-turbo": _TURBO,
    "chatterbox-nano": _TURBO,
    "tiny": _TINY,
    "tiny-meanflow": replace(_TINY, meanflow=True),
}
DEFAULT_CONFIG = "chatterbox"
DEFAULT_BUCKETS: Mapping[str, tuple[int, ...]] = {"frames": (512, 1024, 1536, 2560)}  # prompts of 500, speech of 2000
DEFAULT_STEPS: tuple[int, ...] = (10,)
CONFIG_STEPS: Mapping[str, tuple[int, ...]] = dict.fromkeys((n for n, c in CONFIGS.items() if c.meanflow), (2,))
_FILES = ("s3gen.safetensors", "s3gen.pt")
_MEANFLOW_FILES = ("s3gen_meanflow.safetensors",)
HUB_FILES: Mapping[str, tuple[str, ...]] = {
    "chatterbox": _FILES[:1],
    "chatterbox-turbo": _MEANFLOW_FILES,
    "chatterbox-nano": _MEANFLOW_FILES,
    "tiny": (),
    "tiny-meanflow": (),
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


def config_from(values: Mapping[str, Any]) -> DecoderConfig:
    config = decoder_config(NAME, values)
    if config.static_chunk_size:
        raise OptionUnsupported(f"{NAME}: static_chunk_size={config.static_chunk_size!r}; released S3Gen has no chunks")
    return config


# --- checkpoints


def _network(config: DecoderConfig) -> ConditionalDecoder:
    with torch.device("meta"):  # no memory for weights that are replaced at once
        return ConditionalDecoder(config)


def checkpoint_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    return {PREFIX + key: tuple(tensor.shape) for key, tensor in _network(config).state_dict().items()}


def formula_weights(config: DecoderConfig) -> dict[str, Tensor]:
    """None: the decoder has no rotary table."""
    return {}


def _file(path: Path, config: DecoderConfig | None) -> Path:
    """In a folder: the file of the configuration, or the only one there."""
    if config is not None:
        return find(path, _MEANFLOW_FILES if config.meanflow else _FILES)
    both = [name for name in (_FILES[0], _MEANFLOW_FILES[0]) if (path / name).is_file()]
    if len(both) > 1:
        raise CheckpointMismatch(f"{path}: holds {' and '.join(both)}; name one, or its --config")
    return find(path, (*_FILES, *_MEANFLOW_FILES))


def read_checkpoint(
    path: Path, config: str | DecoderConfig | None, reading: Reading | None = None
) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """s3gen*.safetensors, s3gen.pt, or a folder with one. Whether it is of mean flow, its tensors tell."""
    if isinstance(config, str) and config not in CONFIGS:
        raise UnknownModel(f"{NAME}: configuration {config!r} is not known; known are {', '.join(CONFIGS)}")
    given = CONFIGS[config] if isinstance(config, str) else config
    file = _file(path, given)
    weights = read_estimator(file, PREFIX, reading or Reading())
    bare = {key.removeprefix(PREFIX): tensor for key, tensor in weights.items()}
    found = decoder_sizes(bare, given or CONFIGS[DEFAULT_CONFIG])
    if fault := decoder_fault(found):
        raise CheckpointMismatch(f"{file}: its tensors have impossible shapes: {fault}; give an S3Gen checkpoint")
    return found, weights


# --- region, sampling loop


def region_spec(config: DecoderConfig) -> RegionSpec:
    return mel_flow.spec(
        mel=config.out_channels,
        mu=config.out_channels,
        spk=config.out_channels,
        meanflow=config.meanflow,
        ignored=() if config.meanflow else ("r",),  # upstream's loop passes None
        source="resemble-ai/chatterbox 5de7a54a, src/chatterbox/models/s3gen/decoder.py, ConditionalDecoder.forward",
    )


def region(config: DecoderConfig, weights: Mapping[str, Tensor]) -> Region:
    check_shapes(f"{NAME} {region_spec(config).name}", weights, checkpoint_shapes(config))
    return Region(region_spec(config), loaded(_network(config), weights, PREFIX))


PROGRAM_OPTIONS: Mapping[str, Any] = {"grid": "cosine", "meanflow": False}


def program(steps: int, **options: Any) -> Program:
    """grid: cosine or linear. meanflow: of the configuration; it knows the linear grid alone, released with 2 steps."""
    chosen = check_options(NAME, PROGRAM_OPTIONS, options, {"grid": mel_flow.GRIDS})
    if not chosen["meanflow"]:
        return euler(mel_flow.GRIDS[chosen["grid"]](steps))
    if options.get("grid", "linear") != "linear":
        raise OptionUnsupported(f"{NAME}: grid={options['grid']!r} with mean flow; upstream knows only 'linear' there")
    return mel_flow.mean_flow(steps)
