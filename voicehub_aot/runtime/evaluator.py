"""What computes velocities: the interface, and a region's stages run by engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from voicehub_aot.artifacts.manifest import EngineEntry
from voicehub_aot.artifacts.watch import Watch
from voicehub_aot.engines import StageEngine
from voicehub_aot.errors import EngineUnavailable
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.region import BATCH, RegionSpec, TensorSpec, row_blocks


class Prepared(Protocol):
    """One request's values, computed once."""

    def velocity(self, evaluation: int, state: torch.Tensor) -> torch.Tensor: ...

    def blocks(self, wanted: Sequence[int], rows: int) -> Prepared:
        """The same request with some of its row blocks, each of `rows` rows: guidance branches, say."""


class Evaluator(Protocol):
    """Computes velocities. any_time: not bound to the times of built programs. dtype: of states and velocities."""

    @property
    def any_time(self) -> bool: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def engine_at(self, sizes: Mapping[str, int]) -> str:
        """Name of the engine that evaluates a request of these sizes."""

    def prepare(self, inputs: Mapping[str, torch.Tensor], program: Program, sizes: Mapping[str, int]) -> Prepared:
        """inputs: packed and padded. sizes: what they are padded to, by dimension; a state may be alone to have one."""


@dataclass(frozen=True)
class EngineEvaluator:
    """A region's stages run by engines.

    tables: program name -> value name -> [N, ...]. A step engine fits when its bucket equals the request's sizes, and
    serves them when it was chosen for the promised bucket they fall into. watch: over the files that are read in place.
    """

    spec: RegionSpec
    buckets: Buckets
    prepare_engine: tuple[EngineEntry, StageEngine]
    step_engines: Sequence[tuple[EngineEntry, StageEngine]]
    tables: Mapping[str, Mapping[str, torch.Tensor]]
    watch: Watch | None = None
    any_time: bool = False
    dtype: torch.dtype = torch.float32

    def prepare(self, inputs: Mapping[str, torch.Tensor], program: Program, sizes: Mapping[str, int]) -> EnginePrepared:
        if self.watch is not None:
            self.watch.check()
        entry, engine = self.prepare_engine
        table = self.tables[program.name]
        values = {**inputs, **table}
        results = engine([values[i.name] for i in entry.inputs])
        computed = dict(zip((o.name for o in entry.outputs), results, strict=True))
        changing = {o.name: computed.pop(o.name) for o in entry.outputs if o.stacked}
        step, step_engine = self._step_for(sizes)
        return EnginePrepared(
            self.spec, step, step_engine, {**inputs, **computed}, {**table, **changing}, len(program.times)
        )

    def engine_at(self, sizes: Mapping[str, int]) -> str:
        return self._step_for(sizes)[0].engine

    def _step_for(self, sizes: Mapping[str, int]) -> tuple[EngineEntry, StageEngine]:
        for entry, engine in self.step_engines:
            fits = all(sizes[dim] == size for dim, size in entry.bucket.items())
            fits = fits and (entry.most_requests is None or sizes.get(BATCH, 1) <= entry.most_requests)
            if fits and (not entry.serves or self.buckets.nearest(sizes) in entry.serves):
                return entry, engine
        raise EngineUnavailable(f"no step engine was built for sizes {dict(sizes)}")


class EnginePrepared:
    """Input lists of the step engine, one per evaluation, complete but for the state."""

    def __init__(
        self,
        spec: RegionSpec,
        step: EngineEntry,
        engine: StageEngine,
        values: Mapping[str, torch.Tensor],
        changing: Mapping[str, torch.Tensor],
        evaluations: int,
    ) -> None:
        self.spec, self.step, self.engine, self.values, self.changing = spec, step, engine, values, changing
        self.evaluations = evaluations
        self.state_at = next(i for i, v in enumerate(step.inputs) if v.name == spec.state.name)
        self.calls = [[self._value(v, n) for v in step.inputs] for n in range(evaluations)]

    def _value(self, wanted: TensorSpec, evaluation: int) -> Any:
        if wanted.name == self.spec.state.name:
            return None
        return self.changing[wanted.name][evaluation] if wanted.name in self.changing else self.values[wanted.name]

    def velocity(self, evaluation: int, state: torch.Tensor) -> torch.Tensor:
        call = self.calls[evaluation]
        call[self.state_at] = state
        return self.engine(call)[0]

    def blocks(self, wanted: Sequence[int], rows: int) -> EnginePrepared:
        values, changing = dict(self.values), dict(self.changing)
        kept = row_blocks(wanted, rows)
        for value in self.step.inputs:
            if BATCH in value.shape and value.name in values:
                values[value.name] = values[value.name].index_select(value.shape.index(BATCH), kept)
            elif BATCH in value.shape and value.name in changing:
                changing[value.name] = changing[value.name].index_select(value.shape.index(BATCH) + 1, kept)
        return EnginePrepared(self.spec, self.step, self.engine, values, changing, self.evaluations)
