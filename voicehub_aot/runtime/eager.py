"""The region's own module, unsplit and uncompiled: the reference every other engine is held to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.region import Region, row_blocks

NAME = "eager"


class EagerEvaluator:
    """Evaluates a region at any time. `dtype` float64 makes it the high-precision reference."""

    any_time = True

    def __init__(self, region: Region, dtype: torch.dtype = torch.float32) -> None:
        self.region, self.dtype = region, dtype

    def engine_at(self, sizes: Mapping[str, int]) -> str:
        return NAME

    def prepare(self, inputs: Mapping[str, torch.Tensor], program: Program, sizes: Mapping[str, int]) -> EagerPrepared:
        cast = {n: t.to(self.dtype) if t.is_floating_point() else t for n, t in inputs.items()}
        return EagerPrepared(self, cast, program)


@dataclass(frozen=True)
class EagerPrepared:
    """One request's inputs; the module itself does the preparing, at every evaluation."""

    evaluator: EagerEvaluator
    inputs: Mapping[str, torch.Tensor]
    program: Program

    def velocity(self, evaluation: int, state: torch.Tensor) -> torch.Tensor:
        spec, dtype = self.evaluator.region.spec, self.evaluator.dtype
        clock = {
            n: torch.tensor([t], dtype=dtype, device="cpu")
            for n, t in self.program.clock(evaluation, spec.time.name).items()
        }
        with torch.no_grad():
            result = self.evaluator.region.module(**{spec.state.name: state.to(dtype)}, **clock, **self.inputs)
        return result[0] if isinstance(result, tuple) else result  # type: ignore[no-any-return]

    def blocks(self, wanted: Sequence[int], rows: int) -> EagerPrepared:
        kept = row_blocks(wanted, rows)
        return EagerPrepared(self.evaluator, {n: t.index_select(0, kept) for n, t in self.inputs.items()}, self.program)


def eager_runtime(
    region: Region, programs: Iterable[Program], name: str, dtype: torch.dtype = torch.float32
) -> Runtime:
    """The region's own module behind the runtime's interface: no buckets, any time."""
    return Runtime(
        region.spec, EagerEvaluator(region, dtype), {p.name: p for p in programs}, Buckets(axes={}), name=name
    )
