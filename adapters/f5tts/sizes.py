"""What a checkpoint's tensors tell of the network's sizes, also where one of them is missing."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor


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
