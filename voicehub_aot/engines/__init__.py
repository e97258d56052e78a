"""Back ends that run one stage. Each file here is one engine; `open` of it returns a `StageEngine`."""

from __future__ import annotations

from typing import Protocol

import torch


class StageEngine(Protocol):
    """inputs: the stage's tensors in manifest order, contiguous, already checked. Returns its outputs in order.

    Outputs are fresh tensors that the caller owns; no input is written to.
    """

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]: ...
