"""Evaluations at times that a caller names: which evaluation of which built program is at that time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from voicehub_aot.errors import InputMismatch, ProgramNotBuilt
from voicehub_aot.runtime.evaluator import Evaluator
from voicehub_aot.runtime.request import numbers
from voicehub_aot.spec.program import Program, probe
from voicehub_aot.spec.region import RegionSpec

TIME_TOLERANCE = 1e-6  # a time this close to a table's, relatively above 1, is that one: grids are float32


@dataclass(frozen=True)
class Moments:
    """The times at which an evaluator can evaluate. where: for error texts."""

    spec: RegionSpec
    evaluator: Evaluator
    programs: Mapping[str, Program]
    where: str

    def velocity(
        self,
        inputs: Mapping[str, torch.Tensor],
        state: torch.Tensor,
        clocks: Sequence[Mapping[str, float]],
        sizes: Mapping[str, int],
    ) -> torch.Tensor:
        """Velocity where rows may have different times: one evaluation per distinct clock, its rows kept."""
        result: torch.Tensor | None = None
        for clock in {tuple(clock.items()): clock for clock in clocks}.values():
            program, evaluation = self._locate(clock)
            velocity = self.evaluator.prepare(inputs, program, sizes).velocity(evaluation, state)
            if len(clocks) == 1 or result is None:
                result = velocity
            else:
                rows = torch.tensor([other == clock for other in clocks], device="cpu")
                result[rows] = velocity[rows]
        assert result is not None
        return result

    def clocks(self, given: Mapping[str, Any], batch: int) -> list[dict[str, float]]:
        """The value of every time input by name, for all rows at once or for each row. Raises InputMismatch."""
        wanted = [i.name for i in self.spec.inputs if i.binding == "TIME"]
        if set(given) != set(wanted):
            further = sorted(set(wanted) - {self.spec.time.name})
            raise InputMismatch(
                f"{self.where}: extra_times has {sorted(set(given) - {self.spec.time.name})}, wanted {further}"
            )
        values = {}
        for name in wanted:
            found = numbers(given[name])
            if found is None:
                raise InputMismatch(
                    f"{self.where}: {name}={given[name]!r:.80}, wanted finite numbers, one or one per row"
                )
            if len(found) not in (1, batch):
                raise InputMismatch(f"{self.where}: {name} has {len(found)} values, wanted 1 or {batch}")
            values[name] = found
        count = max(map(len, values.values()))
        return [{name: found[row % len(found)] for name, found in values.items()} for row in range(count)]

    def _locate(self, wanted: Mapping[str, float]) -> tuple[Program, int]:
        """The evaluation at these values of the region's time inputs."""
        time = wanted[self.spec.time.name]
        if self.evaluator.any_time:
            further = {name: [value] for name, value in wanted.items() if name != self.spec.time.name}
            return probe([time], further), 0
        best = min(
            (
                (
                    max(abs(t - wanted[name]) for name, t in program.clock(evaluation, self.spec.time.name).items()),
                    program,
                    evaluation,
                )
                for program in self.programs.values()
                for evaluation in range(len(program.times))
            ),
            key=lambda found: found[0],
        )
        tolerance = TIME_TOLERANCE * max(1.0, abs(best[1].times[best[2]]))
        if not best[0] <= tolerance:  # a time that is not a number is near nothing
            raise ProgramNotBuilt(
                f"{self.where}: time {time!r} is not an evaluation time of the built programs {list(self.programs)} "
                f"(nearest {best[1].times[best[2]]!r}); rebuild with the step count and schedule of your loop"
            )
        return best[1], best[2]
