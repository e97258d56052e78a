"""Chatterbox's released sizes, and how S3Gen's checkpoints are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from voicehub_aot.adapters._chatterbox_cosyvoice.checkpoint import (
    decoder_config,
    decoder_fault,
    decoder_sizes_of,
    read_estimator,
)
from voicehub_aot.adapters._chatterbox_cosyvoice.net import ConditionalDecoder, DecoderConfig
from voicehub_aot.errors import CheckpointMismatch, OptionUnsupported
from voicehub_aot.spec.checkpoint import Reading, check_sizes, find
from voicehub_aot.spec.hyperparameters import named_config
from voicehub_aot.spec.network import shapes_of, unfilled, without_prefix

NAME = "chatterbox"
PREFIX = "flow.decoder.estimator."
FILES = ("s3gen.safetensors", "s3gen.pt")
MEANFLOW_FILES = ("s3gen_meanflow.safetensors",)

# --- hyperparameters

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


def config_from(values: Mapping[str, Any]) -> DecoderConfig:
    config = decoder_config(NAME, values)
    if config.static_chunk_size:
        raise OptionUnsupported(f"{NAME}: static_chunk_size={config.static_chunk_size!r}; released S3Gen has no chunks")
    return config


# --- keys and shapes


def network(config: DecoderConfig) -> ConditionalDecoder:
    return unfilled(ConditionalDecoder, config)


def checkpoint_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    return shapes_of(network(config), PREFIX)


def formula_weights(config: DecoderConfig) -> dict[str, Tensor]:
    """None: the decoder has no rotary table."""
    return {}


# --- files


def _file(path: Path, config: DecoderConfig | None) -> Path:
    """In a folder: the file of the configuration, or the only one there."""
    if config is not None:
        return find(path, MEANFLOW_FILES if config.meanflow else FILES)
    both = [name for name in (FILES[0], MEANFLOW_FILES[0]) if (path / name).is_file()]
    if len(both) > 1:
        raise CheckpointMismatch(f"{path}: holds {' and '.join(both)}; name one, or its --config")
    return find(path, (*FILES, *MEANFLOW_FILES))


def read_checkpoint(
    path: Path, config: str | DecoderConfig | None, reading: Reading | None = None
) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """s3gen*.safetensors, s3gen.pt, or a folder with one. Its tensors tell whether it is of mean flow."""
    base = named_config(NAME, CONFIGS, config)
    file = _file(path, base)
    weights = read_estimator(file, PREFIX, reading or Reading())
    found = decoder_sizes_of(without_prefix(weights, PREFIX), base or CONFIGS["chatterbox"])
    check_sizes(file, decoder_fault(found), "an S3Gen checkpoint")
    return found, weights
