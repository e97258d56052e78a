"""Checkpoints of S3Gen and CosyVoice: where the estimator lies in them, and the causal decoder's hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from voicehub_aot.adapters._chatterbox_cosyvoice.net import DecoderConfig
from voicehub_aot.errors import OptionUnsupported
from voicehub_aot.spec.checkpoint import Reading, only_tensors, read_weights
from voicehub_aot.spec.hyperparameters import config_of, not_positive, refuse, without_fixed
from voicehub_aot.spec.network import count, size

ESTIMATOR = "decoder.estimator."
# The other modules of a flow, and those beside it in S3Gen: resemble-ai/chatterbox 5de7a54, models/s3gen: s3gen.py and
# flow.py, and FunAudioLLM/CosyVoice 074ca6d, cosyvoice/flow/flow.py.
OUTSIDE = (
    *("input_embedding.", "spk_embed_affine_layer.", "encoder.", "encoder_proj.", "pre_lookahead_layer."),
    *("tokenizer.", "speaker_encoder.", "mel2wav."),
)
TRAINING = ("epoch", "step")  # numbers that CosyVoice's trainer writes beside the tensors


def read_estimator(file: Path, prefix: str, reading: Reading) -> dict[str, Tensor]:
    """The estimator's tensors under `prefix`, from a whole S3Gen, a flow, or the estimator alone (bare keys).

    What belongs to the other modules is left out; what belongs to none keeps its key, to be named as unexpected.
    """
    content = read_weights(file, reading)[0]
    inner = {key: key.removeprefix("flow.") for key in content}
    whole = any(name.startswith(ESTIMATOR) for name in inner.values())
    own = {k: v for k, v in content.items() if inner[k] not in TRAINING and not inner[k].startswith(OUTSIDE)}
    return {
        key if whole and not inner[key].startswith(ESTIMATOR) else prefix + inner[key].removeprefix(ESTIMATOR): tensor
        for key, tensor in only_tensors(file, own).items()
    }


# --- the causal decoder

INERT = {"backbone", "dropout", "num_decoding_left_chunks"}  # they change no inference result
ONLY: Mapping[str, Any] = {"causal": True, "act_fn": "gelu"}  # of releases
SIZES = ("in_channels", "out_channels", "attention_head_dim", "n_blocks", "num_mid_blocks", "num_heads")


def decoder_fault(config: DecoderConfig) -> str | None:
    """What is wrong with the hyperparameters' values, if anything."""
    if wrong := not_positive(vars(config), SIZES):
        return wrong
    if config.in_channels != 4 * config.out_channels:
        return f"in_channels={config.in_channels!r} is not 4 x out_channels={config.out_channels!r}"
    if not isinstance(config.channels[0], int) or config.channels[0] < 1:
        return f"channels={list(config.channels)!r} is not a list of positive integers"
    return None


def decoder_config(where: str, values: Mapping[str, Any]) -> DecoderConfig:
    """Hyperparameters under upstream's names; what is not given is as released."""
    given = {name: value for name, value in values.items() if name not in INERT}
    given = without_fixed(where, given, ONLY, "known is")
    if isinstance(levels := given.get("channels"), list | tuple) and len(levels) != 1:
        raise OptionUnsupported(f"{where}: channels={levels!r} is not supported; wanted one level, not resampled")
    config = config_of(where, DecoderConfig, given, INERT)
    refuse(where, decoder_fault(config))
    return config


def decoder_sizes_of(weights: Mapping[str, Tensor], base: DecoderConfig) -> DecoderConfig:
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
