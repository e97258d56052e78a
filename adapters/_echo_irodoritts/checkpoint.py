"""How checkpoints of Echo-TTS and Irodori-TTS are read: one file of a whole model, of which the denoiser is a part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from voicehub_aot.adapters._echo_irodoritts.net import Sizes
from voicehub_aot.adapters.f5tts.sizes import count, size
from voicehub_aot.errors import CheckpointMismatch
from voicehub_aot.spec.checkpoint import Reading, read_weights, refuse_lora


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


def read(file: Path, reading: Reading) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """-> (all tensors of the model, what stands beside them in a trainer's file)."""
    weights, beside = read_weights(file, reading)
    refuse_lora(file, weights)
    if strange := [f"{k!r} is a {type(v).__name__}" for k, v in weights.items() if not isinstance(v, Tensor)]:
        raise CheckpointMismatch(f"{file}: {strange[0]}, wanted tensors, or a mapping of them under 'model'")
    return weights, beside


def without(weights: Mapping[str, Tensor], outside: tuple[str, ...]) -> dict[str, Tensor]:
    """The denoiser's tensors. outside: prefixes of the model's other parts."""
    return {key: tensor for key, tensor in weights.items() if not key.startswith(outside)}


def sizes_of(weights: Mapping[str, Tensor], base: Sizes) -> Sizes:
    """`base` with the sizes that the tensors have; a tensor that is missing or odd leaves the base's."""

    attention, mlp = "blocks.*.attention", "blocks.*.mlp"
    context = {
        name: size(weights, width, (f"{attention}.wk_{name}.weight", 1), (f"{attention}.wv_{name}.weight", 1))
        for name, width in base.context.items()
    }
    return Sizes(
        latent=size(weights, base.latent, ("in_proj.weight", 1), ("out_proj.weight", 0)),
        width=size(weights, base.width, ("in_proj.weight", 0), ("out_proj.weight", 1)),
        layers=count(weights, "blocks") or base.layers,
        heads=size(weights, base.heads, (f"{attention}.q_norm.weight", 0)),
        inner=size(weights, base.inner, (f"{mlp}.w1.weight", 0)),
        waves=size(weights, base.waves, ("cond_module.0.weight", 1)),
        rank=size(weights, base.rank, ("blocks.*.attention_adaln.shift_down.weight", 0)),
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
    if not sizes.eps > 0:
        return f"norm_eps={sizes.eps!r} is not positive"
    if sizes.heads < 2:
        return f"heads={sizes.heads!r}: half of them are rotated, so 2 at least"
    if sizes.width % sizes.heads or (sizes.width // sizes.heads) % 2:
        return f"width {sizes.width!r} is no even number of channels for each of {sizes.heads!r} heads"
    if sizes.waves % 2:
        return f"time embedding of {sizes.waves!r}: wanted as many cosines as sines"
    return None


def has_context(weights: Iterable[str], name: str) -> bool:
    return any(f".wk_{name}." in key or f".wv_{name}." in key for key in weights)
