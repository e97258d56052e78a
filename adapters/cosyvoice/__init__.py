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
| extent      | [B]        | request | frames whose velocity is computed (DiT: upstream masks it not)   |
| streaming   | [B]        | request | frames see their own chunk of 50 and earlier ones; default False |
| drop        | [B]        | flag    | mu, spks and cond become 0                                       |
| velocity    | [B, 80, T] | output  | 0 beyond a row's extent; CosyVoice2: beyond its length           |

Padding on the right is exact: convolutions look back only, attention keys are masked. Noise is the caller's; upstream
takes the first frames of randn([1, 80, 15000]) drawn on the CPU after seeding with 0, for every request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from voicehub_aot.adapters._chatterbox_cosyvoice import flow as mel_flow
from voicehub_aot.adapters._chatterbox_cosyvoice.checkpoint import (
    INERT,
    decoder_config,
    decoder_fault,
    decoder_sizes,
    find,
    read_estimator,
)
from voicehub_aot.adapters._chatterbox_cosyvoice.net import ConditionalDecoder, DecoderConfig
from voicehub_aot.adapters.cosyvoice.net import CosyDiT, CosyDiTConfig
from voicehub_aot.adapters.f5tts.net import inverse_frequencies
from voicehub_aot.adapters.f5tts.sizes import count, size
from voicehub_aot.errors import CheckpointMismatch, OptionUnsupported, UnknownModel, UsageError
from voicehub_aot.spec.checkpoint import Reading, check_shapes, loaded
from voicehub_aot.spec.hyperparameters import config_of
from voicehub_aot.spec.program import Program, check_options
from voicehub_aot.spec.region import Region, RegionSpec
from voicehub_aot.spec.solver import euler
from voicehub_aot.spec.traits import Traits

if TYPE_CHECKING:
    pass

Config = CosyDiTConfig | DecoderConfig

NAME = "cosyvoice"
ALIASES = ("cosyvoice3", "cosyvoice2", "fun-cosyvoice3")
PREFIX = "decoder.estimator."
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
DEFAULT_CONFIG = "Fun-CosyVoice3-0.5B-2512"
DEFAULT_BUCKETS: Mapping[str, tuple[int, ...]] = {"frames": (256, 512, 1024, 2048)}
DEFAULT_STEPS: tuple[int, ...] = (10,)
FILES = ("flow.pt", "flow.safetensors")
HUB_FILES: Mapping[str, tuple[str, ...]] = {
    "Fun-CosyVoice3-0.5B-2512": FILES[:1],
    "CosyVoice2-0.5B": FILES[:1],
    "tiny": (),
    "tiny-cv2": (),
}
TRAITS = Traits(
    formulation="conditional-flow-matching",
    operations=("denoiser", "classifier-free-guidance", "euler-solver"),
    techniques=("schedule", "guidance", "prediction-cache", "stork2"),
    kernels=("native", "torch", "auto", "triton", "cuda_extension"),
    dtypes=("float32", "float16", "bfloat16"),
    passes=("compile", "custom-kernels", "diffusion-cache", "diffusion-sampling"),
    surfaces=("llm.transformer.forward", "flow.estimator.forward", "hift.forward"),
)


def _dit_fault(config: CosyDiTConfig) -> str | None:
    """What is wrong with the hyperparameters' values, if anything."""
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name != "long_skip_connection" and (not isinstance(value, int) or value < 1):
            return f"{field.name}={value!r} is no positive integer"
    if config.dim % 16:
        return f"dim={config.dim!r} is no multiple of 16, the groups of the position convolution"
    if config.dim_head % 2:
        return f"dim_head={config.dim_head!r} is odd, but rotary embedding pairs channels"
    return None


def config_from(values: Mapping[str, Any]) -> Config:
    """A causal decoder is told from a DiT by its `channels`, or by `backbone`, its class upstream."""
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
    if fault := _dit_fault(dit):
        raise UsageError(f"{NAME}: {fault}; give upstream's hyperparameters")
    return dit


# --- checkpoints


def _network(config: Config) -> nn.Module:
    with torch.device("meta"):  # no memory for weights that are replaced at once
        return ConditionalDecoder(config) if isinstance(config, DecoderConfig) else CosyDiT(config)


def checkpoint_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    return {PREFIX + key: tuple(tensor.shape) for key, tensor in _network(config).state_dict().items()}


def formula_weights(config: Config) -> dict[str, Tensor]:
    if isinstance(config, DecoderConfig):
        return {}
    return {PREFIX + "rotary_embed.inv_freq": inverse_frequencies(config.dim_head)}


def _dit_sizes(weights: Mapping[str, Tensor], base: CosyDiTConfig) -> CosyDiTConfig:
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
    if isinstance(config, str) and config not in CONFIGS:
        raise UnknownModel(f"{NAME}: configuration {config!r} is not known; known are {', '.join(CONFIGS)}")
    file = find(path, FILES)
    weights = read_estimator(file, PREFIX, reading or Reading())
    bare = {key.removeprefix(PREFIX): tensor for key, tensor in weights.items()}
    decoder = any(key.startswith("down_blocks.") for key in bare)
    base = CONFIGS[config] if isinstance(config, str) else config
    if base is None:
        base = CONFIGS["CosyVoice2-0.5B" if decoder else DEFAULT_CONFIG]
    if isinstance(base, DecoderConfig) != decoder:
        holds = "CosyVoice2's decoder" if decoder else "no CosyVoice2 decoder"
        raise CheckpointMismatch(f"{file}: holds {holds}, but --config {config} is the other network")
    found = decoder_sizes(bare, base) if isinstance(base, DecoderConfig) else _dit_sizes(bare, base)
    if fault := decoder_fault(found) if isinstance(found, DecoderConfig) else _dit_fault(found):
        raise CheckpointMismatch(f"{file}: its tensors have impossible shapes: {fault}; give a CosyVoice flow")
    return found, weights


# --- region, sampling loop


def region_spec(config: Config) -> RegionSpec:
    where = "FunAudioLLM/CosyVoice 074ca6dc, cosyvoice/flow/"
    if isinstance(config, DecoderConfig):
        wide = config.out_channels
        source = where + "decoder.py, CausalConditionalDecoder.forward"
        return mel_flow.spec(mel=wide, mu=wide, spk=wide, chunks=True, source=source)
    return mel_flow.spec(
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
    return Region(region_spec(config), loaded(_network(config), weights, PREFIX))


PROGRAM_OPTIONS: Mapping[str, Any] = {"grid": "cosine"}


def program(steps: int, **options: Any) -> Program:
    """grid: cosine or linear."""
    return euler(mel_flow.GRIDS[check_options(NAME, PROGRAM_OPTIONS, options, {"grid": mel_flow.GRIDS})["grid"]](steps))
