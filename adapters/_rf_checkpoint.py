"""How checkpoints of Echo-TTS and Irodori-TTS are read: one file of a whole model, of which the denoiser is a part."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from voicehub_aot.adapters._rf_dit import Sizes
from voicehub_aot.checkpoint import read_tensors
from voicehub_aot.errors import CheckpointMismatch

NEST = "model"  # of .pt files written by Irodori-TTS's trainer
LORA = re.compile(r"(^|\.)lora_[A-Za-z_]+(\.|$)|^base_model\.model\.")


def find(path: Path, files: Iterable[str]) -> Path:
    """The one checkpoint file in a folder, or `path` itself. files: names as released, then patterns."""
    if path.is_file():
        return path
    for pattern in files:
        found = sorted(path.glob(pattern))
        if len(found) > 1:
            names = ", ".join(f.name for f in found)
            raise CheckpointMismatch(f"{path}: several checkpoints ({names}); name one file")
        if found:
            return found[0]
    raise CheckpointMismatch(f"{path}: no {' or '.join(files)} in it; name the checkpoint file")


def read(file: Path) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """-> (all tensors of the model, what stands beside them in a trainer's file). A LoRA is refused."""
    content: Mapping[str, Any] = read_tensors(file)
    nested = isinstance(content.get(NEST), Mapping)
    weights = content[NEST] if nested else content
    if strange := [f"{k!r} is a {type(v).__name__}" for k, v in weights.items() if not isinstance(v, Tensor)]:
        raise CheckpointMismatch(f"{file}: {strange[0]}, wanted tensors, or a mapping of them under {NEST!r}")
    if lora := sorted(k for k in weights if LORA.search(k)):
        raise CheckpointMismatch(
            f"{file}: holds a LoRA ({len(lora)} tensors, e.g. {lora[0]!r}); merge it into its base model first"
        )
    return dict(weights), content if nested else {}


def without(weights: Mapping[str, Tensor], outside: tuple[str, ...]) -> dict[str, Tensor]:
    """The denoiser's tensors. outside: prefixes of the model's other parts."""
    return {key: tensor for key, tensor in weights.items() if not key.startswith(outside)}


def sizes_of(weights: Mapping[str, Tensor], base: Sizes) -> Sizes:
    """`base` with the sizes that the tensors have; a tensor that is missing or odd leaves the base's."""

    def size(key: str, axis: int, otherwise: int) -> int:
        tensor = weights.get(key)
        return tensor.shape[axis] if tensor is not None and tensor.dim() > axis else otherwise

    attention = "blocks.0.attention"
    blocks = {match[1] for match in (re.match(r"blocks\.(\d+)\.", key) for key in weights) if match}
    context = {name: size(f"{attention}.wk_{name}.weight", 1, width) for name, width in base.context.items()}
    return Sizes(
        latent=size("in_proj.weight", 1, base.latent),
        width=size("in_proj.weight", 0, base.width),
        layers=len(blocks) or base.layers,
        heads=size(f"{attention}.q_norm.weight", 0, base.heads),
        inner=size("blocks.0.mlp.w1.weight", 0, base.inner),
        waves=size("cond_module.0.weight", 1, base.waves),
        rank=size("blocks.0.attention_adaln.shift_down.weight", 0, base.rank),
        eps=base.eps,
        context=context,
    )


def fault(sizes: Sizes) -> str | None:
    """What is wrong with the sizes, if anything."""
    numbers = {"latent": sizes.latent, "layers": sizes.layers, "heads": sizes.heads, "inner": sizes.inner}
    numbers |= {"waves": sizes.waves, "rank": sizes.rank, **sizes.context}
    for name, value in numbers.items():
        if not isinstance(value, int) or value < 1:
            return f"{name}={value!r} is no positive integer"
    if sizes.heads < 2:
        return f"heads={sizes.heads!r}: half of them are rotated, so 2 at least"
    if sizes.width % sizes.heads or (sizes.width // sizes.heads) % 2:
        return f"width {sizes.width!r} is no even number of channels for each of {sizes.heads!r} heads"
    if sizes.waves % 2:
        return f"time embedding of {sizes.waves!r}: wanted as many cosines as sines"
    return None


def has_context(weights: Iterable[str], name: str) -> bool:
    return any(f".wk_{name}." in key or f".wv_{name}." in key for key in weights)
