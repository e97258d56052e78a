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

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from voicehub_aot.artifacts.report import Row, measure
from voicehub_aot.errors import ArtifactCorrupt, StageFailed
from voicehub_aot.program import Program
from voicehub_aot.region import BATCH, Dim, RegionSpec, example_mask
from voicehub_aot.runtime import Runtime

FLOOR = 1e-6  # of the largest value of the reference: about eight float32 roundings
SANE = 1e-2  # of the largest value: float32 eager further than this from float64 is no reference
LEAST_CHANGE = 1e-4  # relative change that another input must cause
EXACT_SECONDS = 20.0
MIN_ROUNDS, MAX_ROUNDS = 3, 15  # of timing
STEP_SAMPLES = 4096  # state elements kept per step to name the first bad one
NO_DIM = Dim(name="", max=1, doc="stands in for the main dimension where only the number of rows varies")


class Case(BaseModel):
    """One recorded case. Its inputs are drawn from `seed`, its results lie in the recording's tensors under `name`.

    row: the program's table row for a single evaluation, None for a whole trajectory. guided: default scale or none.
    alone: compare each row with its own unpadded run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    check: str
    bucket: dict[str, int]
    sizes: dict[str, int]
    lengths: tuple[int, ...]
    program: str
    row: int | None
    guided: bool
    seed: int
    budget: float
    note: str = ""


@dataclass(frozen=True)
class Recording:
    """cases and, per case, "<name>/float32", "<name>/correction" (float64 result minus it) and "<name>/steps"."""

    cases: tuple[Case, ...]
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


def row_lengths(spec: RegionSpec, case: Case) -> dict[str, list[int]]:
    """Valid sizes of each row, by dimension that has lengths. In padding cases every such dimension is ragged."""
    lengths = {}
    for dim in spec.dims:
        if dim.length:
            full = case.sizes[dim.name]
            ragged = [max(dim.min, full * (row + 1) // len(case.lengths)) for row in range(len(case.lengths))]
            lengths[dim.name] = ragged if case.check == "padding" else [full] * len(case.lengths)
    if spec.main is not None and spec.main.length:
        lengths[spec.main.name] = list(case.lengths)
    return lengths


def draw(spec: RegionSpec, case: Case, seed: int) -> dict[str, Any]:
    """A random valid request: the state under its own name, conditioning, and the lengths.

    Beyond a row's length float tensors hold NaN: the runtime must never read it.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = row_lengths(spec, case)
    request: dict[str, Any] = {}
    for item in (spec.state, *spec.conditioning):
        shape = [case.sizes[s] if isinstance(s, str) else s for s in item.shape]
        if item.dtype == "bool":
            tensor = example_mask(shape, generator)
        elif item.dtype == "int64":
            tensor = torch.randint(item.low, item.high, shape, generator=generator)
        else:
            tensor = torch.randn(shape, generator=generator)
        for axis, dim in enumerate(item.shape):
            for row, length in enumerate(lengths.get(str(dim), [])):
                beyond = tensor[row].narrow(axis - 1, length, shape[axis] - length)
                beyond.fill_(float("nan") if tensor.is_floating_point() else int(item.pad))
        request[item.name] = tensor
    return request | {str(spec.dim(dim).length): values for dim, values in lengths.items()}


def run(runtime: Runtime, case: Case, request: Mapping[str, Any]) -> list[torch.Tensor]:
    """The states of a trajectory, or the one velocity of an evaluation."""
    arguments = dict(request)
    state = arguments.pop(runtime.spec.state.name)
    if case.row is None:
        scale = None if case.guided else 0.0
        guidance = scale if runtime.spec.guidance else None
        program = runtime.programs[case.program]
        fresh = step_noise(program, state, case.seed)
        return list(
            runtime.trajectory(noise=state, step_noise=fresh, program=program.name, guidance=guidance, **arguments)
        )
    return [evaluation(runtime, case, case.row, {runtime.spec.state.name: state, **arguments})]


def step_noise(program: Program, state: torch.Tensor, seed: int) -> torch.Tensor | None:
    """What a program draws on its way: [K, ...], each like the state; None if it draws nothing."""
    if not program.noises:
        return None
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn([len(program.noises), *state.shape], generator=generator)


def evaluation(runtime: Runtime, case: Case, row: int, request: Mapping[str, Any]) -> torch.Tensor:
    """The velocity at one table row, of every branch if the case is guided."""
    arguments = dict(request)
    state, program = arguments.pop(runtime.spec.state.name), runtime.programs[case.program]
    clock = program.clock(row, runtime.spec.time.name)
    time = clock.pop(runtime.spec.time.name)
    return runtime.evaluate(state, time, extra_times=clock, packed=case.guided, **arguments)


def row_alone(spec: RegionSpec, case: Case, request: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Row `row` of a request by itself, cut to its own lengths."""
    lengths = row_lengths(spec, case)
    alone: dict[str, Any] = {}
    for item in (spec.state, *spec.conditioning):
        tensor = request[item.name][row : row + 1]
        for axis, dim in enumerate(item.shape):
            if dim in lengths:
                tensor = tensor.narrow(axis, 0, lengths[str(dim)][row])
        alone[item.name] = tensor
    return alone


def plan(
    spec: RegionSpec, programs: Mapping[str, Program], buckets: list[dict[str, int]], max_batch: int
) -> Iterator[Case]:
    """The cases for these buckets, their budgets still open (0)."""
    dim = spec.main or NO_DIM
    guidance = spec.guidance is not None
    first = next(iter(programs.values()))
    for number, bucket in enumerate(buckets):
        size = bucket.get(dim.name, min(dim.max, 64))
        sizes = {d.name: bucket.get(d.name, min(d.max, 24)) for d in spec.dims}
        if spec.main is not None:
            sizes[dim.name] = size

        def case(
            check: str,
            program: Program,
            row: int | None,
            lengths: tuple[int, ...],
            guided: bool = guidance,
            bucket: dict[str, int] = bucket,
            sizes: dict[str, int] = sizes,
            seed: int = number,
        ) -> Case:
            return Case(
                name="/".join(
                    [
                        check,
                        "-".join(f"{k}{v}" for k, v in bucket.items()) or "any",
                        program.name,
                        "all" if row is None else f"row{row}",
                        "x".join(map(str, lengths)),
                        "guided" if guided else "single",
                    ]
                ),
                check=check,
                bucket=bucket,
                sizes={**sizes, BATCH: len(lengths), **{n: max(lengths) for n in sizes if n == dim.name}},
                lengths=lengths,
                program=program.name,
                row=row,
                guided=guided,
                seed=sum(lengths) + 7 * seed,
                budget=0.0,
            )

        middle = len(first.times) // 2
        for row in sorted({0, middle, len(first.times) - 1}):
            yield case("evaluation", first, row, (size,))
        if size > dim.min:
            yield case("evaluation", first, middle, (max(dim.min, (2 * size) // 3),))
        if guidance:
            yield case("evaluation", first, middle, (size,), guided=False)
        if max_batch > 1 and (spec.main is None or (dim.length and size > dim.min)):
            ragged = (size, max(dim.min, size // 3), max(dim.min, size - 1))
            yield case("padding", first, middle, ragged[:max_batch])
        for program in programs.values():
            yield case("trajectory", program, None, (size,))
        if guidance and number == 0:
            yield case("trajectory", first, None, (size,), guided=False)


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


def thin(state: torch.Tensor) -> torch.Tensor:
    """At most STEP_SAMPLES evenly spread elements."""
    flat = state.flatten()
    return flat[:: max(1, -(-flat.numel() // STEP_SAMPLES))].float().clone()


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
        check=case.check,  # type: ignore[arg-type]
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


RECORDING_CASES = "cases.json"
RECORDING_TENSORS = "references.safetensors"


def save(recording: Recording, folder: Path) -> None:
    """The recording as JSON and safetensors, to be checked again by `verify`."""
    folder.mkdir(parents=True, exist_ok=True)
    cases = [case.model_dump(mode="json") for case in recording.cases]
    (folder / RECORDING_CASES).write_text(json.dumps(cases, indent=1) + "\n")
    save_file(dict(recording.tensors), folder / RECORDING_TENSORS)


def load_recording(folder: Path) -> Recording:
    """Raises ArtifactCorrupt if the artifact was built without parity, or its recording is unreadable."""
    if not (folder / RECORDING_CASES).is_file():
        raise ArtifactCorrupt(f"{folder}: holds no parity recording (built with --no-parity?); rebuild with parity")
    try:
        cases = tuple(Case.model_validate(c) for c in json.loads((folder / RECORDING_CASES).read_text()))
        return Recording(cases, load_file(folder / RECORDING_TENSORS))
    except (OSError, ValueError, SafetensorError) as error:
        raise ArtifactCorrupt(
            f"{folder}: the parity recording is unreadable ({error}); rebuild the artifact"
        ) from error


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of one evaluation of `rows` packed rows, preparation not counted, by candidate.

    The n-th figures of all candidates were taken in the same round.
    """

    bucket: Mapping[str, int]
    rows: int
    samples_ms: Mapping[str, tuple[float, ...]]

    def median_ms(self, candidate: str) -> float:
        return statistics.median(self.samples_ms[candidate])


def time_steps(
    candidates: Mapping[str, Runtime], recording: Recording, seconds: float = 4.0, pause_s: float = 0.0
) -> list[StepTime]:
    """One guided evaluation of every candidate per bucket, interleaved. For choices and reports, not for claims.

    seconds: per bucket, about. pause_s: before each call, so that threads a candidate left spinning do not slow the
    next one.
    """
    times = []
    for case in _one_per_bucket(recording.cases):
        calls = {name: _evaluation(runtime, case) for name, runtime in candidates.items()}
        for call in calls.values():
            call()
        samples: dict[str, list[float]] = {name: [] for name in calls}
        end = time.perf_counter() + seconds
        for round_number in range(MAX_ROUNDS):
            if round_number >= MIN_ROUNDS and time.perf_counter() > end:
                break
            for name, call in calls.items():
                time.sleep(pause_s)
                start = time.perf_counter()
                call()
                samples[name].append(1e3 * (time.perf_counter() - start))
        spec = next(iter(candidates.values())).spec
        rows = case.sizes[BATCH] * (len(spec.guidance.branches) if case.guided and spec.guidance else 1)
        times.append(StepTime(case.bucket, rows, {name: tuple(values) for name, values in samples.items()}))
    return times


def _one_per_bucket(cases: Iterable[Case]) -> list[Case]:
    """The first full-length evaluation of each bucket."""
    found: dict[str, Case] = {}
    for case in cases:
        if case.check == "evaluation":
            found.setdefault(json.dumps(case.bucket), case)
    return list(found.values())


def _evaluation(runtime: Runtime, case: Case) -> Callable[[], object]:
    """A prepared evaluation, ready to be called again and again."""
    request = draw(runtime.spec, case, case.seed)
    return runtime.stepper(request.pop(runtime.spec.state.name), case.program, case.row or 0, **request)
