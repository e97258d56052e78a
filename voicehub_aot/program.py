"""The sampling loop as data: a straight line of two instructions over named registers.

    evaluate   out <- velocity of register `x` at table row `row` (guided, or the conditional branch alone)
    combine    out <- sum of coefficient * register

Every deterministic solver here is linear in the state and the velocities, so this is all a solver needs. Register
"x" holds the noise on entry and the result at the end; each `combine` into "x" ends one step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from voicehub_aot.schedule import Schedule

STATE = "x"


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Evaluate(_Data):
    """out <- velocity(x at times[row])."""

    op: Literal["evaluate"] = "evaluate"
    out: str
    x: str = STATE
    row: int
    guided: bool = True


class Combine(_Data):
    """out <- sum of coefficient * register, in the order of `terms`."""

    op: Literal["combine"] = "combine"
    out: str
    terms: tuple[tuple[str, float], ...]


Instruction = Annotated[Evaluate | Combine, Field(discriminator="op")]


class Program(_Data):
    """name: how a request asks for it. times: the time of each table row, one per denoiser evaluation."""

    name: str
    solver: str
    schedule: tuple[float, ...]
    times: tuple[float, ...]
    instructions: tuple[Instruction, ...]

    @model_validator(mode="after")
    def _check(self) -> Program:
        known = {STATE}
        for position, instruction in enumerate(self.instructions):
            at = f"program {self.name!r}, instruction {position}"
            reads = [instruction.x] if isinstance(instruction, Evaluate) else [r for r, _ in instruction.terms]
            if not reads or not set(reads) <= known:
                raise ValueError(f"{at}: reads {reads!r}, known registers are {sorted(known)!r}")
            if isinstance(instruction, Evaluate) and not 0 <= instruction.row < len(self.times):
                raise ValueError(f"{at}: row {instruction.row} of {len(self.times)}")
            if isinstance(instruction, Combine) and not all(math.isfinite(c) for _, c in instruction.terms):
                raise ValueError(f"{at}: coefficients must be finite")
            known.add(instruction.out)
        if not any(isinstance(i, Combine) and i.out == STATE for i in self.instructions):
            raise ValueError(f"program {self.name!r} never writes {STATE!r}")
        return self

    @property
    def steps(self) -> int:
        return len(self.schedule) - 1

    @property
    def evaluations(self) -> int:
        return sum(isinstance(i, Evaluate) for i in self.instructions)


def euler(schedule: Schedule) -> Program:
    """x <- x + (t' - t) v(x, t)."""
    instructions: list[Evaluate | Combine] = []
    for row, (t, t_next) in enumerate(zip(schedule.times, schedule.times[1:], strict=False)):
        instructions += [Evaluate(out="v", row=row), Combine(out=STATE, terms=((STATE, 1.0), ("v", t_next - t)))]
    return Program(
        name=f"euler-{schedule.steps}",
        solver="euler",
        schedule=schedule.times,
        times=schedule.times[:-1],
        instructions=tuple(instructions),
    )


def midpoint(schedule: Schedule) -> Program:
    """k = v(x, t); x <- x + h v(x + h/2 k, t + h/2) with h = t' - t."""
    instructions: list[Evaluate | Combine] = []
    times: list[float] = []
    for t, t_next in zip(schedule.times, schedule.times[1:], strict=False):
        h, row = t_next - t, len(times)
        times += [t, t + h / 2]
        instructions += [
            Evaluate(out="k", row=row),
            Combine(out="middle", terms=((STATE, 1.0), ("k", h / 2))),
            Evaluate(out="v", x="middle", row=row + 1),
            Combine(out=STATE, terms=((STATE, 1.0), ("v", h))),
        ]
    return Program(
        name=f"midpoint-{schedule.steps}",
        solver="midpoint",
        schedule=schedule.times,
        times=tuple(times),
        instructions=tuple(instructions),
    )


def probe(times: Sequence[float], name: str = "probe") -> Program:
    """A program that evaluates each time once, for single evaluations outside any schedule."""
    instructions: list[Evaluate | Combine] = []
    for row in range(len(times)):
        instructions += [Evaluate(out="v", row=row), Combine(out=STATE, terms=(("v", 1.0),))]
    grid = tuple(float(n) for n in range(len(times) + 1))
    return Program(name=name, solver="probe", schedule=grid, times=tuple(times), instructions=tuple(instructions))


SOLVERS = {"euler": euler, "midpoint": midpoint}
