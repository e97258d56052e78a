"""Proof that engines compute what the model computes.

At build, `record` runs the model's own module (float32 and float64) on chosen cases and keeps the results.
`check` runs an artifact's runtime on the same cases and compares. `voicehub-aot verify` needs only the recorded
results: neither the model's code nor its checkpoint.

    evaluation   one packed denoiser evaluation, at several times and valid lengths
    trajectory   a whole request per program; its first bad step is named
    padding      rows shorter than the tensor, garbage behind them, against each row run alone and unpadded
    sensitivity  other noise, time, guidance or conditioning must give other output

Budget: an engine may be at most twice as far from the float64 result as float32 eager is, plus FLOOR of the result's
largest value. Where float64 would take too long (a trajectory whose float32 run took more than EXACT_SECONDS), the
largest relative distance of that program at smaller buckets stands in, and the row says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from voicehub_aot.artifacts.report import Row, measure
from voicehub_aot.errors import ArtifactCorrupt, StageFailed
from voicehub_aot.recording import Case, Recording, draw, evaluation, plan, row_alone, run, step_noise, thin
from voicehub_aot.region import BATCH
from voicehub_aot.runtime import Runtime

FLOOR = 1e-6  # of the largest value of the reference: about eight float32 roundings
SANE = 1e-2  # of the largest value: float32 eager further than this from float64 is no reference
LEAST_CHANGE = 1e-4  # relative change that another input must cause
EXACT_SECONDS = 20.0


def record(
    eager: Runtime,
    exact: Runtime,
    buckets: list[dict[str, int]],
    max_batch: int,
    progress: Callable[[str], None] = lambda _: None,
) -> Recording:
    """Run every case on the model's module. eager: float32, exact: float64; both over the same programs."""
    cases: list[Case] = []
    tensors: dict[str, torch.Tensor] = {}
    relative: dict[tuple[str, bool], float] = {}  # a program's distance relative to its largest value
    for case in plan(eager.spec, eager.programs, buckets, max_batch):
        progress(case.name)
        request = draw(eager.spec, case, case.seed)
        start = time.perf_counter()
        want = _reference(eager, case, request)
        key = (case.program, case.guided)
        long = key in relative and time.perf_counter() - start > EXACT_SECONDS
        if long:
            distance = relative[key] * want[-1].abs().max().item()
            result = want[-1].double()
        else:
            result = _reference(exact, case, request)[-1].double()
            distance = (want[-1].double() - result).abs().max().item()
            if not distance <= SANE * result.abs().max().item():
                raise StageFailed(f"{case.name}: eager float32 and float64 differ by {distance:.3g}; fix the adapter")
            if case.row is None:
                relative[key] = max(relative.get(key, 0.0), distance / result.abs().max().item())
        budget = 2 * distance + FLOOR * result.abs().max().item()
        note = "budget from smaller buckets; distance to float32 eager" if long else ""
        cases.append(case.model_copy(update={"budget": budget, "note": note}))
        tensors[f"{case.name}/float32"] = want[-1].contiguous()
        if not long:
            tensors[f"{case.name}/correction"] = (result - want[-1].double()).float().contiguous()
        if case.row is None:
            tensors[f"{case.name}/steps"] = torch.stack([thin(state) for state in want])
    return Recording(tuple(cases), tensors)


def _reference(runtime: Runtime, case: Case, request: Mapping[str, Any]) -> list[torch.Tensor]:
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


def check(runtime: Runtime, recording: Recording, progress: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Run every recorded case on `runtime` and judge it."""
    rows = []
    for case in recording.cases:
        progress(case.name)
        request = draw(runtime.spec, case, case.seed)
        rows.append(_judge(case, run(runtime, case, request), recording, runtime))
    rows += sensitivity(runtime, recording.cases[0])
    return rows


def engine_of(runtime: Runtime, case: Case) -> str:
    return runtime.engine_at(**{d.name: case.sizes[d.name] for d in runtime.spec.dims})


def _judge(case: Case, got: list[torch.Tensor], recording: Recording, runtime: Runtime) -> Row:
    try:
        want = recording.tensors[f"{case.name}/float32"]
        correction = recording.tensors.get(f"{case.name}/correction")
        exact = want.double() if correction is None else want.double() + correction.double()
        expected_steps = recording.tensors[f"{case.name}/steps"] if case.row is None else None
    except KeyError as error:
        raise ArtifactCorrupt(f"the parity recording lacks {error}; rebuild the artifact") from error
    max_abs, rel_l2, snr_db = measure(got[-1], want)
    distance, _, _ = measure(got[-1].double(), exact)
    errors: tuple[float, ...] = ()
    first_bad = None
    if expected_steps is not None:
        errors = tuple(measure(thin(s), e)[0] for s, e in zip(got, expected_steps, strict=True))
        first_bad = next((i for i, e in enumerate(errors) if not e <= case.budget), None)
    return Row(
        check=case.check,
        engine=engine_of(runtime, case),
        bucket=case.bucket,
        lengths=case.lengths,
        program=case.program,
        time=None if case.row is None else runtime.programs[case.program].times[case.row],
        guided=case.guided,
        max_abs=max_abs,
        rel_l2=rel_l2,
        snr_db=snr_db,
        first_bad_step=first_bad,
        distance=distance,
        budget=case.budget,
        passed=distance <= case.budget and math.isfinite(max_abs),
        note=case.note,
        errors_by_step=errors,
    )


def sensitivity(runtime: Runtime, base: Case) -> list[Row]:
    """Other noise, time, guidance scale and conditioning must each give other output than `base` (full length)."""
    spec = runtime.spec
    program = runtime.programs[base.program]
    request = draw(spec, base, base.seed)
    other = draw(spec, base, base.seed + 1)
    other.update({i.name: ~request[i.name] for i in spec.conditioning if i.dtype == "bool" and i.shape == (BATCH,)})
    lengths = {k: v for k, v in request.items() if isinstance(v, list)}

    def velocity(changed: str | None, row: int = 0) -> torch.Tensor:
        return evaluation(runtime, base, row, {k: other[k] if k == changed else v for k, v in request.items()})

    def final(guidance: Mapping[str, float] | None) -> torch.Tensor:
        arguments = {k: v for k, v in request.items() if k != spec.state.name}
        noise = request[spec.state.name]
        fresh = step_noise(program, noise, base.seed)
        *_, last = runtime.trajectory(
            noise=noise, step_noise=fresh, program=base.program, guidance=guidance, **arguments
        )
        return last

    reference = velocity(None)
    trials = {name: velocity(name) for name in request if name not in lengths}
    if len(program.times) > 1:
        trials["time"] = velocity(None, len(program.times) - 1)
    changes = {name: (result - reference).norm() / reference.norm() for name, result in trials.items()}
    if spec.guidance is not None:
        whole = final(None)
        more = {name: scale + 1 for name, scale in spec.guidance.scales(None).items()}
        changes["guidance"] = (final(more) - whole).norm() / whole.norm()
    return [
        Row(
            check="sensitivity",
            engine=engine_of(runtime, base),
            bucket=base.bucket,
            lengths=base.lengths,
            program=base.program,
            time=program.times[0],
            guided=base.guided,
            max_abs=0.0,
            rel_l2=0.0,
            snr_db=None,
            first_bad_step=None,
            distance=change.item(),
            budget=LEAST_CHANGE,
            passed=change.item() >= LEAST_CHANGE,
            note=f"another {name} must change the output",
        )
        for name, change in changes.items()
    ]
