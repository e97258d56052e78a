"""CosyVoice's released sizes, and how the estimator is read out of a flow's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from voicehub_aot.adapters._chatterbox_cosyvoice.checkpoint import (
    INERT,
    decoder_config,
    decoder_fault,
    decoder_sizes_of,
    read_estimator,
)
from voicehub_aot.adapters._chatterbox_cosyvoice.net import ConditionalDecoder, DecoderConfig
from voicehub_aot.adapters._tables import inverse_frequencies
from voicehub_aot.adapters.cosyvoice.net import CosyDiT, CosyDiTConfig
from voicehub_aot.errors import CheckpointMismatch, OptionUnsupported, UsageError
from voicehub_aot.spec.checkpoint import Reading, check_sizes, find
from voicehub_aot.spec.hyperparameters import config_of, named_config, not_positive, refuse
from voicehub_aot.spec.network import count, shapes_of, size, unfilled, without_prefix

Config = CosyDiTConfig | DecoderConfig

NAME = "cosyvoice"
PREFIX = "decoder.estimator."
FILES = ("flow.pt", "flow.safetensors")

# --- hyperparameters

CHUNK = 50  # frames: 25 tokens
CONFIGS: Mapping[str, Config] = {
    "Fun-CosyVoice3-0.5B-2512": CosyDiTConfig(),
    "CosyVoice2-0.5B": DecoderConfig(static_chunk_size=CHUNK),
    "tiny": CosyDiTConfig(
        dim=64, depth=2, heads=4, dim_head=16, mel_dim=20, mu_dim=20, spk_dim=12, static_chunk_size=8
    ),
    "tiny-cv2": DecoderConfig(
        in_channels=80,
        out_channels=20,
        channels=(32,),
        attention_head_dim=16,
        n_blocks=2,
        num_mid_blocks=2,
        num_heads=3,
        static_chunk_size=8,
    ),
}
SIZES = (
    "dim",
    "depth",
    "heads",
    "dim_head",
    "ff_mult",
    "mel_dim",
    "mu_dim",
    "spk_dim",
    "static_chunk_size",
)  # of a DiT


def fault(config: Config) -> str | None:
    """What is wrong with the hyperparameters' values, if anything."""
    if isinstance(config, DecoderConfig):
        return decoder_fault(config)
    if wrong := not_positive(vars(config), SIZES):
        return wrong
    if config.dim % 16:
        return f"dim={config.dim!r} is not a multiple of 16, the groups of the position convolution"
    if config.dim_head % 2:
        return f"dim_head={config.dim_head!r} is odd, but rotary embedding pairs channels"
    return None


def config_from(values: Mapping[str, Any]) -> Config:
    """`channels`, or `backbone` with upstream's name of its class, tells a causal decoder from a DiT."""
    backbone = values.get("backbone", "CausalConditionalDecoder" if "channels" in values else "DiT")
    if backbone == "CausalConditionalDecoder":
        config = decoder_config(NAME, {"static_chunk_size": CHUNK, **values})
        if config.meanflow or not isinstance(config.static_chunk_size, int) or config.static_chunk_size < 1:
            chunk = f"meanflow={config.meanflow!r}, static_chunk_size={config.static_chunk_size!r}"
            raise OptionUnsupported(f"{NAME}: {chunk}; CosyVoice2 has chunks of one frame or more, and no mean flow")
        return config
    if backbone != "DiT":
        raise UsageError(f"{NAME}: backbone {backbone!r} is not known; known are DiT, CausalConditionalDecoder")
    given = {name: value for name, value in values.items() if name not in INERT}
    out = given.pop("out_channels", None)
    dit = config_of(f"{NAME} DiT", CosyDiTConfig, given, INERT)
    if out not in (None, dit.mel_dim):
        raise UsageError(f"{NAME}: out_channels={out!r} is not mel_dim={dit.mel_dim!r}: a velocity is like its state")
    refuse(NAME, fault(dit))
    return dit


# --- keys and shapes


def network(config: Config) -> nn.Module:
    return unfilled(ConditionalDecoder, config) if isinstance(config, DecoderConfig) else unfilled(CosyDiT, config)


def checkpoint_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    return shapes_of(network(config), PREFIX)


def formula_weights(config: Config) -> dict[str, Tensor]:
    if isinstance(config, DecoderConfig):
        return {}
    return {PREFIX + "rotary_embed.inv_freq": inverse_frequencies(config.dim_head)}


# --- files


def _dit_sizes_of(weights: Mapping[str, Tensor], base: CosyDiTConfig) -> CosyDiTConfig:
    """weights: bare keys. The sizes that they have. mu is as wide as the mel, in releases and where base says so."""
    dim = size(weights, base.dim, ("proj_out.weight", 1), ("time_embed.time_mlp.2.weight", 0))
    mel = size(weights, base.mel_dim, ("proj_out.weight", 0), ("proj_out.bias", 0))
    dim_head = 2 * size(weights, base.dim_head // 2, ("rotary_embed.inv_freq", 0))
    mu = base.mu_dim if base.mel_dim == mel else mel
    columns = size(weights, 2 * mel + mu + base.spk_dim, ("input_embed.proj.weight", 1))
    block = "transformer_blocks.*"
    inner = size(weights, base.ff_mult * dim, (f"{block}.ff.ff.0.0.weight", 0), (f"{block}.ff.ff.2.weight", 1))
    return replace(
        base,
        dim=dim,
        depth=count(weights, "transformer_blocks") or base.depth,
        heads=size(weights, base.heads * dim_head, (f"{block}.attn.to_q.weight", 0)) // max(1, dim_head),
        dim_head=dim_head,
        ff_mult=inner // max(1, dim),
        mel_dim=mel,
        mu_dim=mu,
        spk_dim=columns - 2 * mel - mu,
        long_skip_connection=base.long_skip_connection or "long_skip_connection.weight" in weights,
    )


def read_checkpoint(
    path: Path, config: str | Config | None, reading: Reading | None = None
) -> tuple[Config, dict[str, Tensor]]:
    """flow.pt as released or trained, or a folder with it. The tensors tell the network, but not its chunks."""
    base = named_config(NAME, CONFIGS, config)
    file = find(path, FILES)
    weights = read_estimator(file, PREFIX, reading or Reading())
    bare = without_prefix(weights, PREFIX)
    decoder = any(key.startswith("down_blocks.") for key in bare)
    if base is None:
        base = CONFIGS["CosyVoice2-0.5B" if decoder else "Fun-CosyVoice3-0.5B-2512"]
    if isinstance(base, DecoderConfig) != decoder:
        holds = "CosyVoice2's decoder" if decoder else "no CosyVoice2 decoder"
        raise CheckpointMismatch(f"{file}: holds {holds}, but --config {config} is the other network")
    found = decoder_sizes_of(bare, base) if isinstance(base, DecoderConfig) else _dit_sizes_of(bare, base)
    check_sizes(file, fault(found), "a CosyVoice flow")
    return found, weights
