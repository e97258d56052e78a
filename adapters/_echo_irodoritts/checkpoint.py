"""How checkpoints of Echo-TTS and Irodori-TTS are read: one file holds a whole model, the denoiser among it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from voicehub_aot.adapters._echo_irodoritts.net import Sizes
from voicehub_aot.spec.checkpoint import Reading, only_tensors, read_weights, refuse_lora
from voicehub_aot.spec.hyperparameters import not_positive
from voicehub_aot.spec.network import count, size


def read(file: Path, reading: Reading) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """Returns all tensors of the model, and what stands beside them in a trainer's file."""
    weights, beside = read_weights(file, reading)
    refuse_lora(file, weights)
    return only_tensors(file, weights, "tensors, or a mapping of them under 'model'"), beside


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
    counts = ("latent", "layers", "heads", "inner", "waves", "rank")
    if wrong := not_positive(vars(sizes), counts) or not_positive(sizes.context, sizes.context):
        return wrong
    if not sizes.eps > 0:
        return f"norm_eps={sizes.eps!r} is not positive"
    if sizes.heads < 2:
        return f"heads={sizes.heads!r}: half of them are rotated, so 2 at least"
    if sizes.width % sizes.heads or (sizes.width // sizes.heads) % 2:
        return f"width {sizes.width!r} is not an even number of channels for each of {sizes.heads!r} heads"
    if sizes.waves % 2:
        return f"time embedding of {sizes.waves!r}: wanted as many cosines as sines"
    return None


def has_context(weights: Iterable[str], name: str) -> bool:
    return any(f".wk_{name}." in key or f".wv_{name}." in key for key in weights)
