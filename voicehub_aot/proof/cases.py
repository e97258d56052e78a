"""The cases that parity is checked on: what is tried at each bucket, drawn from seeds, kept with its results.

`voicehub-aot verify` needs only these: neither the model's code nor its checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file

from voicehub_aot.artifacts import store
from voicehub_aot.artifacts.reading import parse_json, read_bytes, reason
from voicehub_aot.artifacts.report import Spread
from voicehub_aot.errors import ArtifactCorrupt
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.program import STATE, Program
from voicehub_aot.spec.region import BATCH, Dim, RegionSpec, Size, example_mask

LARGEST_CASES = 64 * 2**20  # bytes of their file
LARGEST_SEED = 2**62  # torch takes 2**63, and some are drawn from the next ones
MOST_ROWS = 4096  # of a case
STEP_SAMPLES = 4096  # state elements kept per step to name the first bad one
NO_DIM = Dim(name="", max=1, doc="stands in for the main dimension where only the number of rows varies")


class ParityCase(BaseModel):
    """One recorded case. Its inputs are drawn from `seed`, its results lie in the recording's tensors under `name`.

    evaluation: the one of the program's that is run alone, None for a whole trajectory. guided: default scale or none.
    budget: the most that an element may differ by. budget_l2: the most that the relative norm of the difference may
    be; infinite in recordings of earlier versions. spread: what the budgets rest on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    check: Literal["evaluation", "padding", "trajectory"]
    bucket: dict[str, Size]
    sizes: dict[str, Size]
    lengths: tuple[int, ...]
    program: str
    evaluation: Annotated[int, Field(ge=0)] | None
    guided: bool
    seed: int
    budget: FiniteFloat
    budget_l2: Annotated[float, Field(ge=0, allow_inf_nan=True)] = math.inf
    spread: Spread | None = None
    note: str = ""


CASES = TypeAdapter(tuple[ParityCase, ...])


@dataclass(frozen=True)
class Recording:
    """cases and, per case, "<name>/float32", "<name>/correction" (float64 result minus it) and "<name>/steps"."""

    cases: tuple[ParityCase, ...]
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


def row_lengths(spec: RegionSpec, case: ParityCase) -> dict[str, list[int]]:
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


def draw(spec: RegionSpec, case: ParityCase, seed: int) -> dict[str, Any]:
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
            tensor = torch.randint(item.low, item.high, shape, generator=generator, device="cpu")
        else:
            tensor = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        for axis, dim in enumerate(item.shape):
            for row, length in enumerate(lengths.get(str(dim), [])):
                beyond = tensor[row].narrow(axis - 1, length, shape[axis] - length)
                beyond.fill_(float("nan") if tensor.is_floating_point() else int(item.pad))
        request[item.name] = tensor
    return request | {str(spec.dim(dim).length): values for dim, values in lengths.items()}


def run(runtime: Runtime, case: ParityCase, request: Mapping[str, Any]) -> list[torch.Tensor]:
    """The states of a trajectory, or the one velocity of an evaluation."""
    arguments = dict(request)
    state = arguments.pop(runtime.spec.state.name)
    if case.evaluation is None:
        scale = None if case.guided else 0.0
        guidance = scale if runtime.spec.guidance else None
        program = runtime.programs[case.program]
        fresh = step_noise(program, state, case.seed)
        return list(
            runtime.trajectory(noise=state, step_noise=fresh, program=program.name, guidance=guidance, **arguments)
        )
    return [evaluate(runtime, case, case.evaluation, {runtime.spec.state.name: state, **arguments})]


def step_noise(program: Program, state: torch.Tensor, seed: int) -> torch.Tensor | None:
    """What a program draws on its way: [K, ...], each like the state; None if it draws nothing."""
    if not program.noises:
        return None
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn([len(program.noises), *state.shape], generator=generator, dtype=torch.float32, device="cpu")


def evaluate(runtime: Runtime, case: ParityCase, evaluation: int, request: Mapping[str, Any]) -> torch.Tensor:
    """The velocity of one evaluation, of every branch if the case is guided."""
    arguments = dict(request)
    state, program = arguments.pop(runtime.spec.state.name), runtime.programs[case.program]
    clock = program.clock(evaluation, runtime.spec.time.name)
    time = clock.pop(runtime.spec.time.name)
    return runtime.evaluate(state, time, extra_times=clock, packed=case.guided, **arguments)


def row_alone(spec: RegionSpec, case: ParityCase, request: Mapping[str, Any], row: int) -> dict[str, Any]:
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
) -> Iterator[ParityCase]:
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
            check: Literal["evaluation", "padding", "trajectory"],
            program: Program,
            evaluation: int | None,
            lengths: tuple[int, ...],
            guided: bool = guidance,
            bucket: dict[str, int] = bucket,
            sizes: dict[str, int] = sizes,
            seed: int = number,
        ) -> ParityCase:
            return ParityCase(
                name="/".join(
                    [
                        check,
                        "-".join(f"{k}{v}" for k, v in bucket.items()) or "any",
                        program.name,
                        "all" if evaluation is None else f"evaluation{evaluation}",
                        "x".join(map(str, lengths)),
                        "guided" if guided else "single",
                    ]
                ),
                check=check,
                bucket=bucket,
                sizes={**sizes, BATCH: len(lengths), **{n: max(lengths) for n in sizes if n == dim.name}},
                lengths=lengths,
                program=program.name,
                evaluation=evaluation,
                guided=guided,
                seed=sum(lengths) + 7 * seed,
                budget=0.0,
            )

        middle = len(first.times) // 2
        for evaluation in sorted({0, middle, len(first.times) - 1}):
            yield case("evaluation", first, evaluation, (size,))
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


def thin(state: torch.Tensor) -> torch.Tensor:
    """At most STEP_SAMPLES evenly spread elements."""
    flat = state.flatten()
    return flat[:: max(1, -(-flat.numel() // STEP_SAMPLES))].float().clone()


RECORDING_CASES = "cases.json"
RECORDING_TENSORS = "references.safetensors"


def save_recording(recording: Recording, folder: Path) -> None:
    """The recording as JSON and safetensors, to be checked again by `verify`."""
    folder.mkdir(parents=True, exist_ok=True)
    cases = [case.model_dump(mode="json") for case in recording.cases]
    (folder / RECORDING_CASES).write_text(json.dumps(cases, indent=1) + "\n", encoding="utf-8")
    store.save_tensors(recording.tensors, folder / RECORDING_TENSORS)


def load_recording(folder: Path) -> Recording:
    """Raises ArtifactCorrupt if the artifact was built without parity, or its recording is unreadable."""
    file = folder / RECORDING_CASES
    if not file.is_file():
        raise ArtifactCorrupt(f"{folder}: holds no parity recording (built with --no-parity?); rebuild with parity")
    try:
        data = read_bytes(file, LARGEST_CASES)
        parse_json(data)
        cases = CASES.validate_json(data, strict=True)
        return Recording(cases, load_file(folder / RECORDING_TENSORS))
    except (OSError, ValueError, SafetensorError) as error:
        raise ArtifactCorrupt(
            f"{folder}: the parity recording is unreadable ({reason(error)}); rebuild the artifact"
        ) from error


def check_recording(recording: Recording, spec: RegionSpec, programs: Mapping[str, Program]) -> None:
    """Raises ArtifactCorrupt unless every case is a request of this region, and its results have the request's sizes.

    For a recording that was read: what `plan` makes fits.
    """
    names = [case.name for case in recording.cases]
    if not names or len(set(names)) < len(names):
        raise ArtifactCorrupt("the parity recording has no cases, or two of one name; rebuild the artifact")
    for case in recording.cases:
        for problem in _problems(case, recording.tensors, spec, programs):
            raise ArtifactCorrupt(f"the parity recording's case {case.name[:80]!r} {problem}; rebuild the artifact")


def _problems(
    case: ParityCase, tensors: Mapping[str, torch.Tensor], spec: RegionSpec, programs: Mapping[str, Program]
) -> Iterator[str]:
    limits = {dim.name: (dim.min, dim.max) for dim in spec.dims} | {BATCH: (1, MOST_ROWS)}
    longest = case.sizes.get(spec.main_dim or "", 1)
    known = set(case.sizes) == set(limits)
    if not known or not all(least <= case.sizes[name] <= most for name, (least, most) in limits.items()):
        yield f"has the sizes {case.sizes!r}, wanted each from its least to its most: {limits!r}"
    elif len(case.lengths) != case.sizes[BATCH] or not all(1 <= length <= longest for length in case.lengths):
        yield f"has the lengths {case.lengths!r}, wanted one from 1 to {longest} for each of {case.sizes[BATCH]} rows"
    elif abs(case.seed) > LARGEST_SEED:
        yield f"has the seed {case.seed}, wanted at most {LARGEST_SEED}"
    elif case.program not in programs:
        yield f"is of the program {case.program!r}, which the artifact does not hold"
    elif case.evaluation is not None and not case.evaluation < len(programs[case.program].times):
        yield f"runs evaluation {case.evaluation} of {len(programs[case.program].times)}"
    else:
        yield from _result_problems(case, tensors, spec, programs[case.program])


def _result_problems(
    case: ParityCase, tensors: Mapping[str, torch.Tensor], spec: RegionSpec, program: Program
) -> Iterator[str]:
    branches = len(spec.guidance.branches) if spec.guidance and case.guided and case.evaluation is not None else 1
    shape = [case.sizes[s] if isinstance(s, str) else s for s in spec.state.shape]
    result = [shape[0] * branches, *shape[1:]]
    wanted = {f"{case.name}/float32": result}
    if f"{case.name}/correction" in tensors:
        wanted[f"{case.name}/correction"] = result
    if case.evaluation is None:
        count = sum(instruction.out == STATE for instruction in program.instructions)
        wanted[f"{case.name}/steps"] = [count, thin(torch.empty(shape)).numel()]
    for name, sizes in wanted.items():
        have = tensors.get(name)
        if have is None or list(have.shape) != sizes or have.dtype != torch.float32:
            yield f"lacks its result {name.removeprefix(case.name)!r}, or it is not float32 {sizes}"
