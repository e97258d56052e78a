"""A model's network: made without storage, measured by a checkpoint's tensors, and filled with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

Config = TypeVar("Config")
Network = TypeVar("Network", bound=nn.Module)


def unfilled(kind: Callable[[Config], Network], config: Config) -> Network:
    """The network without storage, until `loaded` fills it: it has keys and shapes, and costs no memory."""
    with torch.device("meta"):
        return kind(config)


def shapes_of(network: nn.Module, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """Every key of the network's state, `prefix` before it, and the shape of its tensor."""
    return {prefix + key: tuple(tensor.shape) for key, tensor in network.state_dict().items()}


def loaded(network: nn.Module, weights: Mapping[str, Tensor], prefix: str = "") -> nn.Module:
    """An unfilled network with these weights in float32, ready to evaluate. prefix: of their keys."""
    state = {key: tensor.float().contiguous() for key, tensor in without_prefix(weights, prefix).items()}
    network.load_state_dict(state, assign=True)
    return network.eval().requires_grad_(False)


def without_prefix(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in weights.items()}


# --- what a checkpoint's tensors tell of the network, also where one of them is missing


def size(weights: Mapping[str, Tensor], otherwise: int, *places: tuple[str, int]) -> int:
    """The size at the first of `places` that is there; `otherwise` if none is.

    places: (key, axis); `*` in a key stands for any number, so that one block of many is enough. Several places keep
    one missing tensor from changing the size: `check_shapes` then names the tensor.
    """
    for key, axis in places:
        pattern = re.compile(re.escape(key).replace(r"\*", r"\d+"))
        tensor = next((t for k, t in weights.items() if pattern.fullmatch(k) and t.dim() > axis), None)
        if tensor is not None:
            return tensor.shape[axis]
    return otherwise


def count(weights: Mapping[str, Tensor], prefix: str) -> int:
    """How many numbered children `prefix` has, by the highest number: tensors that are missing change nothing.

    A number far beyond the others is not a depth: then the children are counted, and `check_shapes` names the rest.
    """
    pattern = re.compile(re.escape(prefix).replace(r"\*", r"\d+") + r"\.(\d{1,9})\.")
    numbers = {int(match[1]) for match in map(pattern.match, weights) if match}
    highest = max(numbers, default=-1)
    return highest + 1 if highest < 2 * len(numbers) else len(numbers)
