"""Proof that engines compute what the model computes.

At build, `record` runs the model's own module (float32 and float64) on chosen cases and keeps the results.
`check` runs an artifact's runtime on the same cases and compares. `voicehub-aot verify` needs only the recorded
results: neither the model's code nor its checkpoint.

    evaluation   one packed denoiser evaluation, at several times and valid lengths
    trajectory   a whole request per program; its first bad step is named
    padding      rows shorter than the tensor, garbage behind them, against each row run alone and unpadded
    sensitivity  other noise, time, guidance or conditioning must give other output

Budgets rest on the spread of float32 itself. Every case is run RUNS times in float32 by the model's own module: once as
it is, and then with nothing changed but rounding (`noise`). The worst distance from float64 of these runs is the
spread, in the relative L2 norm and in the largest element. An engine may be at most MOST_L2 times and MOST_ABS times as
far, plus a floor. One run alone would be one draw of a random variable, and a lucky one would refuse a correct engine.

Where a case takes long, fewer runs are made (MOST_SECONDS). Where even float64 would take too long (a trajectory whose
float32 run took more than EXACT_SECONDS), the largest relative spread of that program at smaller buckets stands in. The
report says both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from voicehub_aot.artifacts.report import Finding, Spread, measure
from voicehub_aot.errors import ArtifactCorrupt, StageFailed
from voicehub_aot.proof import noise
from voicehub_aot.proof.cases import ParityCase, Recording, draw, evaluate, plan, row_alone, run, step_noise, thin
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.region import BATCH

RUNS = 9  # float32 runs of a case: one as it is, the others moved
LEAST_RUNS = 3
MOST_L2, MOST_ABS = 3.0, 4.0  # times the worst of the runs; docs/parity.md has what was measured
FLOOR_L2, FLOOR_ABS = 3e-7, 1e-6  # relative; of the largest value: about eight float32 roundings
MOST_SECONDS = 10.0  # for the moved runs of one case beyond LEAST_RUNS
SANE = 1e-2  # of the largest value: float32 eager further than this from float64 is not a reference
LEAST_CHANGE = 1e-4  # relative change that another input must cause
EXACT_SECONDS = 20.0


@dataclass
class _Measured:
    """One case on the model's module. exact: the float64 result, None where that took too long."""

    case: ParityCase
    request: Mapping[str, Any]
    float32: list[torch.Tensor]
    exact: torch.Tensor | None
    seconds: float
    spread: Spread

    @property
    def key(self) -> tuple[str, bool] | None:
        """What a whole program's relative spread is kept under."""
        return (self.case.program, self.case.guided) if self.case.evaluation is None else None

    @property
    def result(self) -> torch.Tensor:
        return self.float32[-1].double() if self.exact is None else self.exact

    def add(self, run: torch.Tensor) -> None:
        assert self.exact is not None
        max_abs, rel_l2, _ = measure(run.double(), self.exact)
        worst = (max(self.spread.max_abs, max_abs), max(self.spread.rel_l2, rel_l2))
        self.spread = Spread(runs=self.spread.runs + 1, max_abs=worst[0], rel_l2=worst[1])

    def judged(self, relative: Mapping[tuple[str, bool] | None, Spread]) -> ParityCase:
        """The case with its budgets. relative: spread by program, as a share of the largest value."""
        largest = self.result.abs().max().item()
        spread, note = self.spread, self.case.note
        if self.exact is None:
            other = relative[self.key]
            spread = Spread(runs=other.runs, max_abs=other.max_abs * largest, rel_l2=other.rel_l2)
            note = "spread from smaller buckets; distance to float32 eager"
        budgets = {
            "budget": MOST_ABS * spread.max_abs + FLOOR_ABS * largest,
            "budget_l2": MOST_L2 * spread.rel_l2 + FLOOR_L2,
        }
        return self.case.model_copy(update={**budgets, "spread": spread, "note": note})


def record(
    eager: Runtime,
    exact: Runtime,
    buckets: list[dict[str, int]],
    max_batch: int,
    progress: Callable[[str], None] = lambda _: None,
) -> Recording:
    """Run every case on the model's module. eager: float32, exact: float64; both over the same programs.

    Raises StageFailed if the two are so far apart that float32 is not a reference.
    """
    cases: list[_Measured] = []
    for case in plan(eager.spec, eager.programs, buckets, max_batch):
        progress(case.name)
        cases.append(_measured(eager, exact, case, {other.key for other in cases}))
    for seed in range(1, RUNS):
        moved = noise.moved(eager, seed)
        for one in cases:
            if one.exact is not None and (seed < LEAST_RUNS or seed * one.seconds < MOST_SECONDS):
                progress(f"{one.case.name}, float32 run {seed + 1}")
                one.add(_moved_run(moved, one, seed))
    relative: dict[tuple[str, bool] | None, Spread] = {}
    for one in cases:
        if one.key is not None and one.exact is not None:
            share, known = one.spread.max_abs / one.exact.abs().max().item(), relative.get(one.key, one.spread)
            relative[one.key] = Spread(
                runs=min(known.runs, one.spread.runs),
                max_abs=max(share, known.max_abs if one.key in relative else 0.0),
                rel_l2=max(one.spread.rel_l2, known.rel_l2),
            )
    tensors: dict[str, torch.Tensor] = {}
    for one in cases:
        last = one.float32[-1]
        tensors[f"{one.case.name}/float32"] = last.contiguous()
        if one.exact is not None:
            tensors[f"{one.case.name}/correction"] = (one.exact - last.double()).float().contiguous()
        if one.case.evaluation is None:
            tensors[f"{one.case.name}/steps"] = torch.stack([thin(state) for state in one.float32])
    return Recording(tuple(one.judged(relative) for one in cases), tensors)


def _measured(
    eager: Runtime, exact: Runtime, case: ParityCase, known: Collection[tuple[str, bool] | None]
) -> _Measured:
    """The case in float32 and float64. known: programs whose spread was measured at a smaller bucket."""
    request = draw(eager.spec, case, case.seed)
    start = time.perf_counter()
    float32 = _reference(eager, case, request)
    seconds = time.perf_counter() - start
    one = _Measured(case, request, float32, None, seconds, Spread(runs=0, max_abs=0.0, rel_l2=0.0))
    if one.key not in known or case.evaluation is not None or seconds <= EXACT_SECONDS:
        one.exact = _reference(exact, case, request)[-1].double()
        one.add(float32[-1])
        if not one.spread.max_abs <= SANE * one.exact.abs().max().item():
            raise StageFailed(
                f"{case.name}: eager float32 and float64 differ by {one.spread.max_abs:.3g}; fix the adapter"
            )
    return one


def _moved_run(moved: Runtime, one: _Measured, seed: int) -> torch.Tensor:
    """One more float32 run; every other on one thread, every fourth with the rows beside a copy of themselves."""
    request = noise.moved_request(one.request, seed)
    with noise.one_thread() if seed % 2 else nullcontext():
        if seed % 4 == 0 and one.case.check != "padding" and not moved.programs[one.case.program].noises:
            return noise.beside_itself(request, len(one.case.lengths), lambda r: run(moved, one.case, r)[-1])
        return _reference(moved, one.case, request)[-1]


def _reference(runtime: Runtime, case: ParityCase, request: Mapping[str, Any]) -> list[torch.Tensor]:
    """What the case should give: the rows alone for padding cases, put back side by side; else the run itself."""
    if case.check != "padding":
        return run(runtime, case, request)
    spec = runtime.spec
    blocks: list[list[torch.Tensor]] = []
    for row in range(len(case.lengths)):
        alone = run(runtime, case, row_alone(spec, case, request, row))[-1]
        shape = [case.sizes[s] if isinstance(s, str) else s for s in spec.state.shape[1:]]
        padded = alone.new_zeros([len(alone), *shape])
        padded[tuple(slice(size) for size in alone.shape)] = alone
        blocks.append(list(padded.unbind(0)))
    return [torch.stack([block[branch] for branch in range(len(blocks[0])) for block in blocks])]


def check(runtime: Runtime, recording: Recording, progress: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """Run every recorded case on `runtime` and judge it."""
    findings = []
    for case in recording.cases:
        progress(case.name)
        request = draw(runtime.spec, case, case.seed)
        start = time.perf_counter()
        got = run(runtime, case, request)
        seconds = time.perf_counter() - start
        findings.append(_judge(case, got, recording, runtime).model_copy(update={"seconds": seconds}))
    findings += sensitivity(runtime, recording.cases[0])
    return findings


def engine_of(runtime: Runtime, case: ParityCase) -> str:
    return runtime.engine_at(**{d.name: case.sizes[d.name] for d in runtime.spec.dims})


def _judge(case: ParityCase, got: list[torch.Tensor], recording: Recording, runtime: Runtime) -> Finding:
    try:
        want = recording.tensors[f"{case.name}/float32"]
        correction = recording.tensors.get(f"{case.name}/correction")
        exact = want.double() if correction is None else want.double() + correction.double()
        expected_steps = recording.tensors[f"{case.name}/steps"] if case.evaluation is None else None
    except KeyError as error:
        raise ArtifactCorrupt(f"the parity recording lacks {error}; rebuild the artifact") from error
    max_abs, rel_l2, snr_db = measure(got[-1], want)
    distance, distance_l2, _ = measure(got[-1].double(), exact)
    errors: tuple[float, ...] = ()
    first_bad = None
    if expected_steps is not None:
        errors = tuple(measure(thin(s), e)[0] for s, e in zip(got, expected_steps, strict=True))
        first_bad = next((i for i, e in enumerate(errors) if not e <= case.budget), None)
    return Finding(
        check=case.check,
        engine=engine_of(runtime, case),
        bucket=case.bucket,
        lengths=case.lengths,
        program=case.program,
        time=None if case.evaluation is None else runtime.programs[case.program].times[case.evaluation],
        guided=case.guided,
        max_abs=max_abs,
        rel_l2=rel_l2,
        snr_db=snr_db,
        first_bad_step=first_bad,
        distance=distance,
        budget=case.budget,
        passed=distance <= case.budget and distance_l2 <= case.budget_l2 and math.isfinite(max_abs),
        distance_l2=distance_l2,
        budget_l2=case.budget_l2,
        spread=case.spread,
        note=case.note,
        errors_by_step=errors,
    )


def sensitivity(runtime: Runtime, base: ParityCase) -> list[Finding]:
    """Other noise, time, guidance scale and conditioning must each give other output than `base` (full length)."""
    spec = runtime.spec
    program = runtime.programs[base.program]
    request = draw(spec, base, base.seed)
    other = draw(spec, base, base.seed + 1)
    other.update({i.name: ~request[i.name] for i in spec.conditioning if i.dtype == "bool" and i.shape == (BATCH,)})
    lengths = {k: v for k, v in request.items() if isinstance(v, list)}

    def velocity(changed: str | None, at: int = 0) -> torch.Tensor:
        return evaluate(runtime, base, at, {k: other[k] if k == changed else v for k, v in request.items()})

    def final(guidance: Mapping[str, float] | None) -> torch.Tensor:
        arguments = {k: v for k, v in request.items() if k != spec.state.name}
        noise = request[spec.state.name]
        fresh = step_noise(program, noise, base.seed)
        *_, last = runtime.trajectory(
            noise=noise, step_noise=fresh, program=base.program, guidance=guidance, **arguments
        )
        return last

    reference = velocity(None)
    trials = [(name, partial(velocity, name), reference) for name in request if name not in lengths]
    if len(program.times) > 1:
        trials.append(("time", partial(velocity, None, len(program.times) - 1), reference))
    if spec.guidance is not None:
        more = {name: scale + 1 for name, scale in spec.guidance.scales(None).items()}
        trials.append(("guidance", partial(final, more), final(None)))
    return [_changed(runtime, base, name, trial, want) for name, trial, want in trials]


def _changed(
    runtime: Runtime, base: ParityCase, name: str, trial: Callable[[], torch.Tensor], want: torch.Tensor
) -> Finding:
    """The finding of a trial with another `name`, which must give something else than `want`."""
    start = time.perf_counter()
    change = ((trial() - want).norm() / want.norm()).item()
    return Finding(
        check="sensitivity",
        engine=engine_of(runtime, base),
        bucket=base.bucket,
        lengths=base.lengths,
        program=base.program,
        time=runtime.programs[base.program].times[0],
        guided=base.guided,
        max_abs=0.0,
        rel_l2=0.0,
        snr_db=None,
        first_bad_step=None,
        distance=change,
        budget=LEAST_CHANGE,
        passed=change >= LEAST_CHANGE,
        note=f"another {name} must change the output",
        seconds=time.perf_counter() - start,
    )
