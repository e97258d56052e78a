"""Classes of change: what a decision does to the result, and against what that was measured."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, FiniteFloat

SafetyClass = Literal["exact", "relaxed", "approximate", "behaviour change"]


class Decision(BaseModel):
    """One decision of a build that can move a number.

    exact             the model's own loop and arithmetic, to float32 rounding
    relaxed           narrower numbers in the same places
    approximate       another way to the same result: fewer steps, another solver or grid, a cache
    behaviour change  another result is asked for: another guidance, another noise law

    kind, name: what was decided on. reason: why it has its class. against: what it was measured against. distance: how
    far it was from that, in the relative L2 norm; None where parity is the measure, or where nothing was measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: Literal["program", "precision", "guidance"]
    name: str
    safety: SafetyClass
    reason: str
    against: str
    distance: FiniteFloat | None = None
