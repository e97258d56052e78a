"""Guidance: which branches are evaluated, in which order they are packed, and how they are combined.

Branches are packed along the batch: rows [0, B) hold the first branch, [B, 2B) the second, and so on. What makes
a branch is a set of boolean region inputs ("flags"), e.g. drop the text. The scale is a run-time scalar.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from pydantic import BaseModel, ConfigDict

NO_OP = 1e-5  # scales smaller than this leave the conditional prediction alone (F5-TTS, model/cfm.py, CFM.sample)


class Branch(BaseModel):
    """One row block of a packed evaluation: `flags` are the region's boolean inputs and their value."""

    model_config = ConfigDict(frozen=True)
    name: str
    flags: dict[str, bool]


class Guidance(BaseModel):
    """branches: packing order, the conditional one first. equation: a key of EQUATIONS. scale: the default."""

    model_config = ConfigDict(frozen=True)
    equation: str
    branches: tuple[Branch, ...]
    scale: float


def classifier_free(predictions: torch.Tensor, scale: float) -> torch.Tensor:
    """predictions: [2B, ...], conditional rows then unconditional ones -> c + scale (c - u), [B, ...].

    In this convention scale 0 is no guidance; F5's `cfg_strength` is it, Supertonic v3's 4 c - 3 u is scale 3.
    """
    conditional, unconditional = predictions.chunk(2)
    return torch.lerp(unconditional, conditional, 1.0 + scale)


EQUATIONS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {"classifier_free": classifier_free}


def is_off(guidance: Guidance | None, scale: float) -> bool:
    """True when the guided value equals the conditional one, so only the first branch need be evaluated."""
    return guidance is None or abs(scale) < NO_OP
