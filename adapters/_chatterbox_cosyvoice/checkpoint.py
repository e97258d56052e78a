"""Checkpoints of S3Gen and CosyVoice: where the estimator lies in them, and the causal decoder's hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from voicehub_aot.adapters._chatterbox_cosyvoice.net import DecoderConfig
from voicehub_aot.adapters.f5tts.sizes import count, size
from voicehub_aot.errors import CheckpointMismatch, OptionUnsupported, UsageError
from voicehub_aot.spec.checkpoint import Reading, read_weights
from voicehub_aot.spec.hyperparameters import config_of, without_fixed

ESTIMATOR = "decoder.estimator."
# The other modules of a flow, and those beside it in S3Gen: resemble-ai/chatterbox 5de7a54, models/s3gen: s3gen.py and
# flow.py, and FunAudioLLM/CosyVoice 074ca6d, cosyvoice/flow/flow.py.
ELSEWHERE = (
    *("input_embedding.", "spk_embed_affine_layer.", "encoder.", "encoder_proj.", "pre_lookahead_layer."),
    *("tokenizer.", "speaker_encoder.", "mel2wav."),
)
TRAINING = ("epoch", "step")  # numbers that CosyVoice's trainer writes beside the tensors


def find(path: Path, files: Sequence[str]) -> Path:
    """`path` itself, or in a folder the first of `files` that is there."""
    if not path.is_dir():
        return path
    for name in files:
        if (path / name).is_file():
            return path / name
    raise CheckpointMismatch(f"{path}: no {' or '.join(files)} in it; name the checkpoint file")


def read_estimator(file: Path, prefix: str, reading: Reading) -> dict[str, Tensor]:
    """The estimator's tensors under `prefix`, from a whole S3Gen, a flow, or the estimator alone (bare keys).

    What belongs to the other modules is left out; what belongs to none keeps its key, to be named as unexpected.
    """
    content = read_weights(file, reading)[0]
    inner = {str(key): str(key).removeprefix("flow.") for key in content}
    whole = any(name.startswith(ESTIMATOR) for name in inner.values())
    weights = {}
    for (key, name), value in zip(inner.items(), content.values(), strict=True):
        if name in TRAINING or name.startswith(ELSEWHERE):
            continue
        if not isinstance(value, Tensor):
            raise CheckpointMismatch(f"{file}: {key!r} is a {type(value).__name__}, wanted a tensor")
        if whole and not name.startswith(ESTIMATOR):
            weights[key] = value
        else:
            weights[prefix + name.removeprefix(ESTIMATOR)] = value
    return weights


# --- the causal decoder

INERT = {"backbone", "dropout", "num_decoding_left_chunks"}  # they change no inference result
ONLY: Mapping[str, Any] = {"causal": True, "act_fn": "gelu"}  # of releases
SIZES = ("in_channels", "out_channels", "attention_head_dim", "n_blocks", "num_mid_blocks", "num_heads")


def decoder_fault(config: DecoderConfig) -> str | None:
    """What is wrong with the hyperparameters' values, if anything."""
    for name in SIZES:
        value = getattr(config, name)
        if not isinstance(value, int) or value < 1:
            return f"{name}={value!r} is no positive integer"
    if config.in_channels != 4 * config.out_channels:
        return f"in_channels={config.in_channels!r} is not 4 x out_channels={config.out_channels!r}"
    if not isinstance(config.channels[0], int) or config.channels[0] < 1:
        return f"channels={list(config.channels)!r} holds no positive integer"
    return None


def decoder_config(where: str, values: Mapping[str, Any]) -> DecoderConfig:
    """Hyperparameters under upstream's names; what is not given is as released."""
    given = {name: value for name, value in values.items() if name not in INERT}
    given = without_fixed(where, given, ONLY, "known is")
    if isinstance(levels := given.get("channels"), list | tuple) and len(levels) != 1:
        raise OptionUnsupported(f"{where}: channels={levels!r} is not supported; wanted one level, not resampled")
    config = config_of(where, DecoderConfig, given, INERT)
    if fault := decoder_fault(config):
        raise UsageError(f"{where}: {fault}; give upstream's hyperparameters")
    return config


def decoder_sizes(weights: Mapping[str, Tensor], base: DecoderConfig) -> DecoderConfig:
    """weights: bare keys. The sizes that they have; `base` for those they do not tell: width and number of heads."""
    attention = base.num_heads * base.attention_head_dim
    inner = size(
        weights, attention, *((f"{at}.attn1.to_q.weight", 0) for at in ("down_blocks.0.1.*", "mid_blocks.*.1.*"))
    )
    first = ("down_blocks.0.0.res_conv.weight", "down_blocks.0.0.block1.block.0.weight")
    return DecoderConfig(
        in_channels=size(weights, base.in_channels, *((key, 1) for key in first)),
        out_channels=size(weights, base.out_channels, ("final_proj.weight", 0), ("final_proj.bias", 0)),
        channels=(size(weights, base.channels[0], *((key, 0) for key in first)),),
        attention_head_dim=base.attention_head_dim,
        n_blocks=max(count(weights, at) for at in ("down_blocks.0.1", "mid_blocks.*.1")) or base.n_blocks,
        num_mid_blocks=count(weights, "mid_blocks") or base.num_mid_blocks,
        num_heads=inner // base.attention_head_dim,
        meanflow="time_embed_mixer.weight" in weights,
        static_chunk_size=base.static_chunk_size,
    )
