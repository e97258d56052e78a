"""Guidance: which branches are evaluated, in which order they are packed, and how they are combined.

Branches are packed along the batch: rows [0, B) hold the first branch, [B, 2B) the second, and so on. What makes
a branch is a set of boolean region inputs ("flags"), e.g. drop the text. Scales are run-time scalars, one for each
branch but the first, and say how far to go away from it: 0 is no guidance, and the branch is not evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from voicehub_aot.errors import UsageError

LARGEST_FLOAT = torch.finfo(torch.float32).max  # torch refuses a Python number beyond it beside float32 tensors
NO_OP = 1e-5  # scales smaller than this leave the conditional prediction alone (F5-TTS, model/cfm.py, CFM.sample)
LEAST_SQUARE = 1e-8  # CFG-Zero*: what keeps its division finite (arXiv 2503.18886, and OpenBMB/VoxCPM unified_cfm.py)


class Branch(BaseModel):
    """One row block of a packed evaluation: `flags` are the region's boolean inputs and their value.

    scale: the default weight of (conditional - this branch). The conditional branch has none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    flags: dict[str, bool] = {}
    scale: float = Field(default=0.0, ge=-LARGEST_FLOAT, le=LARGEST_FLOAT)


class Guidance(BaseModel):
    """branches: packing order, the conditional one first. equation: a key of EQUATIONS."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    equation: str
    branches: tuple[Branch, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Guidance:
        names = [branch.name for branch in self.branches]
        if self.equation not in EQUATIONS:
            raise ValueError(f"equation {self.equation!r} is not known; known are {', '.join(EQUATIONS)}")
        if len(set(names)) < len(names):
            raise ValueError(f"branches {names!r}: a name is given twice")
        if self.equation == "zero_star" and len(names) != 2:
            raise ValueError(f"equation 'zero_star' combines two branches, got {names!r}")
        return self

    @property
    def others(self) -> tuple[Branch, ...]:
        return self.branches[1:]

    def scales(self, wanted: float | Mapping[str, float] | None) -> dict[str, float]:
        """The scale of every branch but the conditional one, by name.

        wanted: one number for all, or numbers by branch; None and branches left out keep their default. Raises
        UsageError for an unknown branch, or what is not a finite number.
        """
        defaults = {branch.name: branch.scale for branch in self.others}
        given = wanted if isinstance(wanted, Mapping) else {} if wanted is None else dict.fromkeys(defaults, wanted)
        unknown = sorted(set(given) - set(defaults))
        if unknown:
            raise UsageError(f"guidance={wanted!r}: no branches {unknown!r}; this model has {sorted(defaults)!r}")
        try:
            scales = {name: float(value) for name, value in {**defaults, **given}.items()}
        except (TypeError, ValueError) as error:
            raise UsageError(f"guidance={wanted!r}, wanted a finite number, or one by branch") from error
        if not all(math.isfinite(scale) for scale in scales.values()):
            raise UsageError(f"guidance={wanted!r}, wanted a finite number, or one by branch")
        return scales

    def taking_part(self, against: Sequence[str] | None, scales: Mapping[str, float]) -> tuple[int, ...]:
        """Positions of the branches to evaluate, the conditional one first; what has no effect is left out.

        against: branches to guide against, None for all. One program may serve a model with and without a condition:
        where there is no such branch, there is nothing to leave out.
        """
        wanted = [b.name for b in self.others] if against is None else list(against)
        names = [branch.name for branch in self.branches]
        return (0, *(names.index(name) for name in wanted if abs(scales.get(name, 0.0)) >= NO_OP))


def classifier_free(predictions: torch.Tensor, scales: Sequence[float]) -> torch.Tensor:
    """predictions: [(1 + K) B, ...], conditional rows first -> c + sum of scale_k (c - branch_k), [B, ...].

    F5's `cfg_strength` is such a scale; Supertonic v3's 4 c - 3 u is scale 3; where upstream writes u + w (c - u), the
    scale is w - 1.
    """
    conditional, *others = predictions.chunk(1 + len(scales))
    if len(others) == 1:
        return torch.lerp(others[0], conditional, 1.0 + scales[0])
    guided = conditional * (1.0 + sum(scales))
    for scale, other in zip(scales, others, strict=True):
        guided = torch.add(guided, other, alpha=-scale)
    return guided


def zero_star(predictions: torch.Tensor, scales: Sequence[float]) -> torch.Tensor:
    """CFG-Zero* (arXiv 2503.18886): [2B, ...] -> c + scale (c - p u), p = <c, u> / |u|^2 for each row, [B, ...]."""
    conditional, unconditional = predictions.chunk(2)
    c, u = conditional.flatten(1), unconditional.flatten(1)
    projection = (c * u).sum(1) / (u.square().sum(1) + LEAST_SQUARE)
    projected = projection.reshape(-1, *(1,) * (conditional.dim() - 1)) * unconditional
    return torch.lerp(projected, conditional, 1.0 + scales[0])


EQUATIONS: dict[str, Callable[[torch.Tensor, Sequence[float]], torch.Tensor]] = {
    "classifier_free": classifier_free,
    "zero_star": zero_star,
}
