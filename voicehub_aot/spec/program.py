"""The sampling loop as data: a straight line of two instructions over named registers.

    evaluate   out <- what the denoiser predicts for register `x` at evaluation `evaluation`, guided or not
    combine    out <- sum of coefficient * register

Every solver here is linear in the state, the predictions and the noise, so this is all a solver needs. Register "x"
holds the noise on entry and the result at the end; each `combine` into "x" ends one step. Generators: solver.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, model_validator

from voicehub_aot.errors import OptionUnsupported

STATE = "x"
LARGEST = 3.4028234663852886e38  # of float32: torch refuses a coefficient beyond it
FILE_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.+,=-]{0,127}$"  # of a program: it is the name of its file, too


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Evaluate(_Data):
    """out <- velocity(x at times[evaluation]).

    against: the guidance branches to evaluate beside the conditional one; None = all of the model's, () = none.
    """

    op: Literal["evaluate"] = "evaluate"
    out: str
    x: str = STATE
    evaluation: int
    against: tuple[str, ...] | None = None


class Combine(_Data):
    """out <- sum of coefficient * register, in the order of `terms`."""

    op: Literal["combine"] = "combine"
    out: str
    terms: tuple[tuple[str, float], ...]


Instruction = Annotated[Evaluate | Combine, Field(discriminator="op")]


class Program(_Data):
    """name: how a request asks for it. times: the time of each denoiser evaluation.

    extra_times: as many values of each further time input of the region (the end of the step, say), by its name.
    noises: registers that hold fresh noise on entry, beside "x". options: in what it was asked to differ from the loop
    that the model was released with, its number of steps aside.
    """

    name: str = Field(pattern=FILE_NAME)
    solver: str
    schedule: tuple[FiniteFloat, ...] = Field(min_length=2)
    times: tuple[FiniteFloat, ...] = Field(min_length=1)
    extra_times: dict[str, tuple[FiniteFloat, ...]] = {}
    noises: tuple[str, ...] = ()
    options: dict[str, JsonValue] = {}
    instructions: tuple[Instruction, ...]

    @model_validator(mode="after")
    def _check(self) -> Program:
        known = {STATE, *self.noises}
        if len(known) <= len(self.noises):
            raise ValueError(f"program {self.name!r}: noises {self.noises!r}, wanted distinct names but {STATE!r}")
        for name, values in self.extra_times.items():
            if len(values) != len(self.times):
                raise ValueError(f"program {self.name!r}: {len(values)} values of {name!r}, wanted {len(self.times)}")
        for position, instruction in enumerate(self.instructions):
            at = f"program {self.name!r}, instruction {position}"
            reads = [instruction.x] if isinstance(instruction, Evaluate) else [r for r, _ in instruction.terms]
            if not reads or not set(reads) <= known:
                raise ValueError(f"{at}: reads {reads!r}, known registers are {sorted(known)!r}")
            if isinstance(instruction, Evaluate) and not 0 <= instruction.evaluation < len(self.times):
                raise ValueError(f"{at}: evaluation {instruction.evaluation} of {len(self.times)}")
            if isinstance(instruction, Combine) and not all(abs(c) <= LARGEST for _, c in instruction.terms):
                raise ValueError(f"{at}: coefficients must be finite in float32")
            against = (isinstance(instruction, Evaluate) and instruction.against) or ()
            if len(set(against)) < len(against):
                raise ValueError(f"{at}: against {against!r} names a branch twice")
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

    def clock(self, evaluation: int, time: str) -> dict[str, float]:
        """The value of every time input of an evaluation. time: name of the region's main one."""
        return {time: self.times[evaluation], **{name: values[evaluation] for name, values in self.extra_times.items()}}


def probe(
    times: Sequence[float], extra_times: Mapping[str, Sequence[float]] | None = None, name: str = "probe"
) -> Program:
    """A program that evaluates each time once, for single evaluations outside any schedule."""
    instructions: list[Evaluate | Combine] = []
    for evaluation in range(len(times)):
        instructions += [Evaluate(out="v", evaluation=evaluation), Combine(out=STATE, terms=(("v", 1.0),))]
    return Program(
        name=name,
        solver="probe",
        schedule=tuple(float(n) for n in range(len(times) + 1)),
        times=tuple(times),
        extra_times={key: tuple(values) for key, values in (extra_times or {}).items()},
        instructions=tuple(instructions),
    )


def check_options(
    model: str,
    known: Mapping[str, Any],
    given: Mapping[str, Any],
    choices: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> dict[str, Any]:
    """A model's program options: `known` with its defaults, overridden by `given`.

    choices: the values that an option may have. Raises OptionUnsupported for an unknown option, another value than
    those, or one of another kind than its default.
    """
    unknown = sorted(set(given) - set(known))
    if unknown:
        wanted = f"known are {', '.join(known)}" if known else "it has none"
        raise OptionUnsupported(f"{model}: program options {unknown!r} are not known; {wanted}")
    for name, value in given.items():
        if name in choices and value not in choices[name]:
            raise OptionUnsupported(f"{model}: {name}={value!r} is not known; choose one of {', '.join(choices[name])}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(known[name], float) and value is not None and not (number and math.isfinite(value)):
            raise OptionUnsupported(f"{model}: {name}={value!r}, wanted a finite number")
        if isinstance(known[name], bool) and not isinstance(value, bool):
            raise OptionUnsupported(f"{model}: {name}={value!r}, wanted true or false")
    return {**known, **given}
