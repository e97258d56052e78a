"""What a loaded artifact answers and what it refuses: seeds, lengths, guidance, programs, loops, layouts, threads."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import Tensor

import voicehub_aot
from voicehub_aot.compiler.models import resolve
from voicehub_aot.errors import (
    EngineUnavailable,
    InputMismatch,
    NoBucketFits,
    OptionUnsupported,
    ProgramNotBuilt,
)
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.runtime.load import load
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.program import Evaluate, Program
from voicehub_aot.spec.target import usable_threads

ROUNDING = 1e-5  # measured: 4e-6 between batch sizes, and between engine and eager, for values of up to 8


def opened(path: Path, **options: Any) -> Runtime:
    """On one thread: threads that wait for each other on a busy machine make milliseconds of tiny work seconds."""
    return load(path, threads=1, **options)


@pytest.fixture(scope="module", autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def packed(supertonic_packed: Path) -> Runtime:
    return opened(supertonic_packed)


@pytest.fixture(scope="module")
def static(supertonic_shared: Path) -> Runtime:
    return opened(supertonic_shared)


@pytest.fixture(scope="module")
def f5(f5_shared: Path) -> Runtime:
    return opened(f5_shared)


@pytest.fixture(params=["supertonic packed", "supertonic static", "f5 shared"])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    name = {"supertonic packed": "packed", "supertonic static": "static", "f5 shared": "f5"}[request.param]
    chosen: Runtime = request.getfixturevalue(name)
    return chosen


@pytest.fixture(scope="module")
def eager(packed: Runtime, f5: Runtime) -> dict[str, Runtime]:
    """The models' own modules, by model."""
    return {
        r.name: eager_runtime(resolve(r.name, "tiny", "synthetic").region, r.programs.values(), r.name)
        for r in (packed, f5)
    }


def conditioning(runtime: Runtime, rows: int = 1, frames: int = 8, tokens: int = 5, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"B": rows, "frames": frames, "text": tokens}
    drawn = {}
    for item in runtime.spec.conditioning:
        shape = [sizes[s] if isinstance(s, str) else s for s in item.shape]
        if item.dtype == "int64":
            drawn[item.name] = torch.randint(item.low, item.high, shape, generator=generator)
        else:
            drawn[item.name] = torch.randn(shape, generator=generator)
    return drawn


def noise_of(runtime: Runtime, rows: int = 1, frames: int = 8, seed: int = 1) -> Tensor:
    sizes = {"B": rows, "frames": frames}
    shape = [sizes[s] if isinstance(s, str) else s for s in runtime.spec.state.shape]
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def frames_axis(runtime: Runtime) -> int:
    return runtime.spec.state.shape.index("frames")


def one_row(runtime: Runtime, given: dict[str, Tensor], row: int, frames: int) -> dict[str, Tensor]:
    """Row `row` of a request, its frames cut to its own."""
    axes = {i.name: i.shape.index("frames") for i in runtime.spec.conditioning if "frames" in i.shape}
    alone = {k: v[row : row + 1] for k, v in given.items()}
    return {k: v.narrow(axes[k], 0, frames) if k in axes else v for k, v in alone.items()}


class Counting:
    """A step engine that remembers how many rows each call had."""

    def __init__(self, engine: Callable[[list[Tensor]], list[Tensor]], state_at: int) -> None:
        self.engine, self.state_at, self.rows = engine, state_at, list[int]()

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        self.rows.append(len(inputs[self.state_at]))
        return self.engine(inputs)


def counted(path: Path) -> tuple[Runtime, list[int]]:
    """A runtime, and the rows of each of its step engine's calls."""
    runtime = opened(path)
    ((entry, engine),) = runtime.evaluator.step_engines  # type: ignore[attr-defined]
    counting = Counting(engine, [i.name for i in entry.inputs].index(runtime.spec.state.name))
    runtime.evaluator = replace(runtime.evaluator, step_engines=[(entry, counting)])  # type: ignore[type-var]
    return runtime, counting.rows


# --- seeds


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(runtime: Runtime) -> None:
    given = conditioning(runtime)
    first = runtime.sample(seed=3, lengths=[8], **given)
    assert torch.equal(runtime.sample(seed=3, lengths=[8], **given), first)
    assert (runtime.sample(seed=4, lengths=[8], **given) - first).abs().max() > 0.1
    assert first.std() > 0.5


def test_the_same_seed_gives_the_same_bytes_in_another_runtime_of_the_artifact(supertonic_packed: Path) -> None:
    one, other = opened(supertonic_packed), opened(supertonic_packed, concurrency=3)
    given = conditioning(one)
    assert torch.equal(one.sample(seed=3, lengths=[8], **given), other.sample(seed=3, lengths=[8], **given))


def test_row_b_is_what_seed_plus_b_gives_alone(runtime: Runtime) -> None:
    """The noise is the same to the bit; what engines make of it differs by the rounding of another batch size."""
    lengths, given = [8, 5, 1], conditioning(runtime, rows=3)
    together = runtime.sample(seed=40, lengths=lengths, **given)
    for row, length in enumerate(lengths):
        alone = runtime.sample(seed=40 + row, lengths=[length], **one_row(runtime, given, row, length))
        got = together[row : row + 1].narrow(frames_axis(runtime), 0, length)
        torch.testing.assert_close(got, alone, atol=ROUNDING, rtol=0)


def test_a_seed_is_noise_drawn_by_each_rows_own_generator(runtime: Runtime) -> None:
    lengths, given = [8, 5], conditioning(runtime, rows=2)
    noise = torch.full_like(noise_of(runtime, rows=2), float("nan"))
    for row, length in enumerate(lengths):
        shape = [length if s == "frames" else s for s in runtime.spec.state.shape[1:]]
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(40 + row))  # type: ignore[arg-type]
        noise[row].narrow(frames_axis(runtime) - 1, 0, length).copy_(drawn)
    want = runtime.sample(seed=40, lengths=lengths, **given)
    assert torch.equal(runtime.sample(noise=noise, lengths=lengths, **given), want)
    assert torch.equal(runtime.sample(seed=[40, 41], lengths=lengths, **given), want)
    assert torch.equal(runtime.sample(seed=torch.tensor(40), lengths=torch.tensor(lengths), **given), want)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "either noise or a seed"),
        ({"seed": 1, "noise": torch.zeros(1, 12, 8)}, "either noise or a seed"),
        ({"seed": 1}, "a seed needs lengths"),
        ({"seed": [1, 2], "lengths": [8]}, r"seed=\[1, 2\], wanted one integer or 1"),
        ({"seed": 1.5, "lengths": [8]}, "seed=1.5, wanted one integer"),
        ({"seed": "7", "lengths": [8]}, "seed='7', wanted one integer"),
        ({"seed": 2**64, "lengths": [8]}, "of 64 bits"),
        ({"seed": 1, "lengths": [8.0]}, r"lengths=\[8.0\], wanted integers"),
        ({"seed": 1, "lengths": "8"}, "lengths='8', wanted integers"),
        ({"seed": 1, "lengths": [None]}, "wanted integers"),
        ({"seed": 1, "lengths": []}, "noisy_latent has B=0|others have B=0"),
        ({"noise": [[0.0]], "lengths": [8]}, "noisy_latent is a list"),
    ],
)
def test_noise_that_cannot_be_drawn_is_refused(packed: Runtime, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputMismatch, match=words):
        packed.sample(**changes, **conditioning(packed))


# --- lengths and buckets


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16])
def test_every_promised_length_gives_what_the_model_gives(
    runtime: Runtime, eager: dict[str, Runtime], length: int
) -> None:
    """1, a bucket less one, a bucket, a bucket and one; the largest of the artifacts is promised by all."""
    given = conditioning(runtime, frames=length)
    got = runtime.sample(seed=5, lengths=[length], **given)
    want = eager[runtime.name].sample(seed=5, lengths=[length], program=next(iter(runtime.programs)), **given)
    assert got.shape[frames_axis(runtime)] == length
    torch.testing.assert_close(got, want, atol=ROUNDING, rtol=0)


def test_rows_of_all_lengths_in_one_batch_give_what_they_give_alone(
    runtime: Runtime, eager: dict[str, Runtime]
) -> None:
    lengths = [16, 1, 15, 8, 9]
    given, noise = conditioning(runtime, rows=5, frames=16), noise_of(runtime, rows=5, frames=16)
    got = runtime.sample(noise=noise, lengths=lengths, **given)
    for row, length in enumerate(lengths):
        alone = eager[runtime.name].sample(
            noise=noise[row : row + 1].narrow(frames_axis(runtime), 0, length),
            program=next(iter(runtime.programs)),
            **one_row(runtime, given, row, length),
        )
        mine = got[row : row + 1]
        torch.testing.assert_close(mine.narrow(frames_axis(runtime), 0, length), alone, atol=ROUNDING, rtol=0)
        assert not mine.narrow(frames_axis(runtime), length, 16 - length).any()


@pytest.mark.parametrize("garbage", [float("nan"), float("-inf"), 1e4])
def test_garbage_behind_a_row_changes_no_byte(runtime: Runtime, garbage: float) -> None:
    given, noise = conditioning(runtime, rows=2, frames=12), noise_of(runtime, rows=2, frames=12)
    clean = runtime.sample(noise=noise, lengths=[12, 5], **given)
    noise[1].narrow(frames_axis(runtime) - 1, 5, 7).fill_(garbage)
    for item in runtime.spec.conditioning:
        if "frames" in item.shape:
            given[item.name][1].narrow(item.shape.index("frames") - 1, 5, 7).fill_(garbage)
    assert torch.equal(runtime.sample(noise=noise, lengths=[12, 5], **given), clean)


@pytest.mark.parametrize("lengths", [[16], (16,), torch.tensor([16]), torch.tensor([16], dtype=torch.int32), 16])
def test_lengths_come_as_list_tuple_tensor_or_one_number(static: Runtime, lengths: Any) -> None:
    given = conditioning(static)
    assert torch.equal(static.sample(seed=1, lengths=lengths, **given), static.sample(seed=1, lengths=[16], **given))


@pytest.mark.parametrize(("length", "largest"), [(17, 16), (100, 16)])
def test_one_past_the_largest_bucket_is_refused_with_the_flag_that_would_allow_it(
    static: Runtime, length: int, largest: int
) -> None:
    words = f"frames={length} exceeds the largest bucket {largest} .*--buckets frames=8,16,{length}"
    with pytest.raises(NoBucketFits, match=words):
        static.sample(seed=1, lengths=[length], **conditioning(static))
    with pytest.raises(NoBucketFits, match=words):
        static.sample(noise=noise_of(static, frames=length), **conditioning(static))


@pytest.mark.parametrize("length", [0, -1, 101, 10**9])
def test_a_length_the_model_cannot_have_is_refused(packed: Runtime, length: int) -> None:
    with pytest.raises(InputMismatch, match=f"length {length}, wanted 1 to 100 frames"):
        packed.sample(seed=1, lengths=[length], **conditioning(packed))


def test_no_frames_at_all_are_refused(runtime: Runtime) -> None:
    with pytest.raises((InputMismatch, NoBucketFits)):
        runtime.sample(noise=noise_of(runtime, frames=0), **conditioning(runtime, frames=0))


def test_text_beyond_the_model_and_no_text_are_refused(packed: Runtime) -> None:
    for tokens in (0, 101):
        with pytest.raises((InputMismatch, NoBucketFits), match=f"text={tokens}|text_lengths holds {tokens}"):
            packed.sample(seed=1, lengths=[8], **conditioning(packed, tokens=tokens))


def test_overflow_runs_what_a_dynamic_engine_can_and_counts_it(
    supertonic_packed: Path, eager: dict[str, Runtime]
) -> None:
    runtime = opened(supertonic_packed, overflow="run")
    given = conditioning(runtime)
    for length in (24, 25, 100):
        got = runtime.sample(seed=2, lengths=[length], **given)
        want = eager["supertonic"].sample(seed=2, lengths=[length], program="euler-3", **given)
        torch.testing.assert_close(got, want, atol=ROUNDING, rtol=0)
    assert runtime.overflowed == 2
    with pytest.raises((InputMismatch, NoBucketFits), match="101"):
        runtime.sample(noise=noise_of(runtime, frames=101), **given)


def test_static_engines_cannot_overflow(supertonic_shared: Path) -> None:
    with pytest.raises(OptionUnsupported, match="static buckets"):
        load(supertonic_shared, overflow="run")


# --- guidance


def test_without_guidance_half_the_rows_run_and_the_conditional_branch_is_the_result(supertonic_packed: Path) -> None:
    runtime, rows = counted(supertonic_packed)
    given, noise = conditioning(runtime, rows=2), noise_of(runtime, rows=2)
    runtime.sample(noise=noise, **given)
    assert rows == [4, 4, 4]
    rows.clear()
    got = runtime.sample(noise=noise, guidance=0.0, **given)
    assert rows == [2, 2, 2]
    x = noise
    for time in (0.0, 1 / 3, 2 / 3):
        x = x + runtime.evaluate(x, time, **given) / 3
    torch.testing.assert_close(got, x, atol=ROUNDING, rtol=0)


def test_the_guidance_scale_is_a_run_time_number(runtime: Runtime) -> None:
    """c + s (c - u), at any scale, from one artifact."""
    given, noise = conditioning(runtime), noise_of(runtime)
    conditional, unconditional = runtime.evaluate(noise, 0.0, packed=True, **given).chunk(2)
    for scale in (0.0, 0.5, 3.0, -1.0):
        got = runtime.evaluate(noise, 0.0, guidance=scale, **given)
        want = conditional + scale * (conditional - unconditional)
        torch.testing.assert_close(got, want, atol=ROUNDING, rtol=0)
    assert runtime.spec.guidance is not None
    default, other = (runtime.sample(noise=noise, guidance=s, **given) for s in (None, 1.25))
    assert torch.equal(runtime.sample(noise=noise, guidance=runtime.spec.guidance.branches[1].scale, **given), default)
    assert (default - other).abs().max() > 0.01


@pytest.mark.parametrize("guidance", [float("nan"), float("inf"), "much", [1.0]])
def test_a_scale_that_is_no_finite_number_is_refused(packed: Runtime, guidance: Any) -> None:
    with pytest.raises(InputMismatch, match=r"guidance=.*, wanted a finite number"):
        packed.sample(seed=1, lengths=[8], guidance=guidance, **conditioning(packed))


def test_an_unguided_instruction_runs_the_conditional_rows_of_the_same_request(supertonic_packed: Path) -> None:
    """Guidance limited to an interval: here the first step alone."""
    runtime, rows = counted(supertonic_packed)
    program = runtime.programs["euler-3"]
    limited = tuple(
        i.model_copy(update={"against": None if i.evaluation == 0 else ()}) if isinstance(i, Evaluate) else i
        for i in program.instructions
    )
    runtime.programs["euler-3"] = Program(**{**dict(program), "instructions": limited})
    given, noise = conditioning(runtime, rows=2), noise_of(runtime, rows=2)
    got = runtime.sample(noise=noise, **given)
    assert rows == [4, 2, 2]
    x = noise + runtime.evaluate(noise, 0.0, guidance=3.0, **given) / 3
    for time in (1 / 3, 2 / 3):
        x = x + runtime.evaluate(x, time, **given) / 3
    torch.testing.assert_close(got, x, atol=ROUNDING, rtol=0)


# --- programs and times


def test_a_program_is_asked_for_by_name_or_by_its_steps_and_the_first_is_the_default(supertonic_packed: Path) -> None:
    runtime, rows = counted(supertonic_packed)
    given, results = conditioning(runtime), {}
    for wanted, calls in ((None, 3), (3, 3), ("euler-3", 3), (2, 2), ("euler-2", 2)):
        rows.clear()
        results[wanted] = runtime.sample(seed=1, lengths=[8], program=wanted, **given)
        assert len(rows) == calls
    assert torch.equal(results[None], results[3])
    assert torch.equal(results[3], results["euler-3"])
    assert torch.equal(results[2], results["euler-2"])
    assert (results[2] - results[3]).abs().max() > 0.01


@pytest.mark.parametrize("wanted", [4, "euler-4", "3", ""])
def test_a_program_that_was_not_built_is_an_error_with_those_that_were(packed: Runtime, wanted: str | int) -> None:
    with pytest.raises(ProgramNotBuilt, match=r"is not built; built are \['euler-3', 'euler-2'\]; .*--steps"):
        packed.sample(seed=1, lengths=[8], program=wanted, **conditioning(packed))


def test_two_programs_of_as_many_steps_must_be_told_apart_by_name(packed: Runtime) -> None:
    twin = packed.programs["euler-3"].model_copy(update={"name": "other-3"})
    both = Runtime(
        packed.spec, packed.evaluator, {"euler-3": packed.programs["euler-3"], "other-3": twin}, packed.buckets
    )
    with pytest.raises(ProgramNotBuilt, match="3 is ambiguous"):
        both.sample(seed=1, lengths=[8], program=3, **conditioning(packed))


@pytest.mark.parametrize("time", [0.25, 1.0, -1.0, 1e30, torch.tensor(1)])
def test_a_time_of_no_built_program_is_refused(packed: Runtime, time: Any) -> None:
    wanted = r"is not an evaluation time of the built programs \[.euler-3., .euler-2.\]"
    with pytest.raises(ProgramNotBuilt, match=wanted):
        packed.evaluate(noise_of(packed), time, **conditioning(packed))


@pytest.mark.parametrize("time", [torch.tensor(0), torch.tensor([0]), torch.tensor(0.0, dtype=torch.float64), 0])
def test_a_time_of_any_number_type_means_its_value(packed: Runtime, time: Any) -> None:
    given, x = conditioning(packed), noise_of(packed)
    assert torch.equal(packed.evaluate(x, time, **given), packed.evaluate(x, 0.0, **given))


def test_each_row_may_have_its_own_time(packed: Runtime) -> None:
    given, x, times = conditioning(packed, rows=3), noise_of(packed, rows=3), [2 / 3, 0.0, 0.5]
    together = packed.evaluate(x, torch.tensor(times), **given)
    for row, time in enumerate(times):
        alone = packed.evaluate(x[row : row + 1], time, **{k: v[row : row + 1] for k, v in given.items()})
        torch.testing.assert_close(together[row : row + 1], alone, atol=ROUNDING, rtol=0)
    with pytest.raises(InputMismatch, match="time has 2 values, wanted 1 or 3"):
        packed.evaluate(x, torch.tensor([0.0, 0.5]), **given)


# --- the drop-in denoiser


@pytest.mark.parametrize("frames", [8, 13])
def test_the_denoiser_in_f5s_own_loop_gives_what_sample_gives(f5: Runtime, frames: int) -> None:
    denoiser = f5.denoiser()
    assert next(denoiser.parameters()).dtype == denoiser.dtype == torch.float32
    assert denoiser.device == torch.device("cpu")
    given, x = conditioning(f5, rows=2, frames=frames), noise_of(f5, rows=2, frames=frames)
    mask = torch.arange(frames) < torch.tensor([[frames], [frames - 3]])
    ragged = f5.sample(noise=x, lengths=mask.sum(1), extent=[frames, frames], guidance=2.0, **given)
    schedule = torch.tensor(f5.programs["euler-4"].schedule)
    for t, t_next in itertools.pairwise(schedule):
        both = denoiser(x=x, cond=given["cond"], text=given["text"], time=t, mask=mask, cfg_infer=True, cache=True)
        conditional, unconditional = both.chunk(2)
        x = x + (t_next - t) * (conditional + 2.0 * (conditional - unconditional))
    denoiser.clear_cache()
    torch.testing.assert_close(x, ragged, atol=ROUNDING, rtol=0)


def test_f5s_flags_drop_what_they_name(f5: Runtime) -> None:
    denoiser, given, x = f5.denoiser(), conditioning(f5), noise_of(f5)
    conditional, unconditional = denoiser(x, given["cond"], given["text"], 0.0, cfg_infer=True).chunk(2)
    flags = {"drop_audio_cond": True, "drop_text": True}
    dropped = denoiser(x, given["cond"], given["text"], 0.0, **flags)
    torch.testing.assert_close(denoiser(x, given["cond"], given["text"], 0.0), conditional, atol=ROUNDING, rtol=0)
    torch.testing.assert_close(dropped, unconditional, atol=ROUNDING, rtol=0)
    half = denoiser(x, given["cond"], given["text"], 0.0, drop_text=True)
    assert min((half - other).abs().max() for other in (conditional, unconditional)) > 1e-3


@pytest.mark.parametrize("artifact", ["packed", "static"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_the_denoiser_in_supertonics_own_loop_gives_what_sample_gives(
    request: pytest.FixtureRequest, artifact: str, dtype: torch.dtype
) -> None:
    runtime: Runtime = request.getfixturevalue(artifact)
    given, x = conditioning(runtime, rows=2), noise_of(runtime, rows=2)
    latent_mask = (torch.arange(8) < torch.tensor([[8], [5]])).float()[:, None]
    text_mask = torch.ones(2, 1, 5)
    x = x * latent_mask
    want = runtime.sample(noise=x, lengths=[8, 5], extent=[8, 8], **given)
    for step in range(3):
        x = runtime.denoiser()(
            x,
            *given.values(),
            latent_mask,
            text_mask,
            torch.full((2,), step, dtype=dtype),
            torch.full((2,), 3, dtype=dtype),
        )
    torch.testing.assert_close(x, want, atol=ROUNDING, rtol=0)


def call(runtime: Runtime, **changes: Any) -> Tensor:
    """Supertonic's denoiser on a valid call with something changed."""
    values: dict[str, Any] = {
        "noisy_latent": noise_of(runtime, rows=2),
        **conditioning(runtime, rows=2),
        "latent_mask": torch.ones(2, 1, 8),
        "text_mask": torch.ones(2, 1, 5),
        "current_step": torch.tensor([1.0, 1.0]),
        "total_step": torch.tensor([3.0, 3.0]),
    }
    return runtime.denoiser()(**(values | changes))


HOLES = torch.tensor([1.0, 0, 1, 1, 1, 1, 1, 1]).expand(2, 1, 8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"latent_mask": torch.ones(2, 1, 7)}, r"mask of frames is \[2, 1, 7\], wanted \[B, 8\] or \[B, 1, 8\]"),
        ({"latent_mask": torch.ones(2, 12, 8)}, r"mask of frames is \[2, 12, 8\]"),
        ({"latent_mask": torch.ones(8)}, r"mask of frames is \[8\]"),
        ({"latent_mask": torch.ones(1, 1, 8)}, "lengths=.*, wanted 2 integers"),
        ({"latent_mask": torch.zeros(2, 1, 8)}, "lengths holds 0"),
        ({"latent_mask": HOLES}, "not a prefix mask"),
        ({"latent_mask": [[1.0]]}, "mask of frames is a list"),
        ({"text_mask": torch.ones(2, 1, 6)}, r"mask of text is \[2, 1, 6\], wanted \[B, 5\]"),
        ({"current_step": torch.tensor([1.0, 1.0, 1.0])}, "3 steps of 2 totals"),
        ({"current_step": torch.ones(3), "total_step": torch.ones(1)}, "time has 3 values, wanted 1 or 2"),
        ({"current_step": "one"}, "current_step='one', wanted a finite number"),
        ({"noisy_latent": torch.zeros(2, 8, 12)}, r"mask of frames is \[2, 1, 8\], wanted \[B, 12\]"),
        ({"step": 1}, r"unknown arguments \['step'\]"),
    ],
)
def test_what_upstreams_call_would_not_take_is_refused(packed: Runtime, changes: dict[str, Any], words: str) -> None:
    assert call(packed).isfinite().all()
    with pytest.raises(InputMismatch, match=words):
        call(packed, **changes)


def test_no_steps_at_all_are_no_time(packed: Runtime) -> None:
    with pytest.raises(InputMismatch, match="wanted finite numbers"):
        call(packed, current_step=torch.zeros(2), total_step=torch.zeros(2))


def test_an_argument_by_position_and_by_name_and_a_missing_one_are_refused(f5: Runtime) -> None:
    given, x = conditioning(f5), noise_of(f5)
    with pytest.raises(InputMismatch, match=r"\['x'\] are given by position and by name"):
        f5.denoiser()(x, given["cond"], given["text"], 0.0, x=x)
    with pytest.raises(InputMismatch, match=r"missing \['time'\]"):
        f5.denoiser()(x, given["cond"], given["text"])


# --- the caller's tensors


def transposed(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT


def strided(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, torch.full_like(tensor, 3)], dim=-1)[..., 0]


def with_gradient(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_(tensor.is_floating_point())


@pytest.mark.parametrize("form", [transposed, strided, with_gradient])
def test_the_memory_layout_of_inputs_changes_no_byte(runtime: Runtime, form: Callable[[Tensor], Tensor]) -> None:
    given, noise = conditioning(runtime, rows=2, frames=12), noise_of(runtime, rows=2, frames=12)
    got = runtime.sample(noise=form(noise), **{k: form(v) for k, v in given.items()})
    assert torch.equal(got, runtime.sample(noise=noise, **given))
    assert got.is_contiguous()
    assert not got.requires_grad
    velocity = runtime.evaluate(form(noise), 0.0, **{k: form(v) for k, v in given.items()})
    assert torch.equal(velocity, runtime.evaluate(noise, 0.0, **given))


def test_a_square_state_is_not_confused_with_its_transpose(packed: Runtime) -> None:
    """12 channels and 12 frames: only strides tell, and a view has the values of its copy."""
    given, square = conditioning(packed), noise_of(packed, frames=12)
    assert torch.equal(packed.sample(noise=square.mT, **given), packed.sample(noise=square.mT.contiguous(), **given))
    assert (packed.sample(noise=square.mT, **given) - packed.sample(noise=square, **given)).abs().max() > 0.1


def test_an_expanded_row_gives_that_row_again_and_again(runtime: Runtime) -> None:
    given, noise = conditioning(runtime), noise_of(runtime)
    wide = {k: v.expand(3, *v.shape[1:]) for k, v in given.items()}
    got = runtime.sample(noise=noise.expand(3, *noise.shape[1:]), **wide)
    torch.testing.assert_close(got, runtime.sample(noise=noise, **given).expand_as(got), atol=ROUNDING, rtol=0)


def test_a_request_leaves_the_callers_tensors_alone_and_the_result_is_the_callers(runtime: Runtime) -> None:
    given, noise, lengths = conditioning(runtime, rows=2), noise_of(runtime, rows=2), torch.tensor([8, 3])
    before = {k: v.clone() for k, v in {**given, "noise": noise, "lengths": lengths}.items()}
    first = runtime.sample(noise=noise, lengths=lengths, **given)
    assert all(torch.equal(v, before[k]) for k, v in {**given, "noise": noise, "lengths": lengths}.items())
    kept = first.clone()
    runtime.sample(noise=noise * 2, lengths=lengths, **given)
    assert torch.equal(first, kept), "a later request wrote into an earlier result"


def test_the_steps_of_a_trajectory_are_not_written_to_later(packed: Runtime) -> None:
    states = packed.trajectory(noise=noise_of(packed), **conditioning(packed))
    first = next(states)
    kept = first.clone()
    rest = list(states)
    assert torch.equal(first, kept)
    assert len(rest) == 2


# --- threads


@pytest.mark.parametrize("concurrency", [1, 3])
def test_threads_on_one_runtime_get_what_they_get_alone(supertonic_packed: Path, concurrency: int) -> None:
    runtime = opened(supertonic_packed, concurrency=concurrency)
    requests = [
        {"seed": n, "lengths": [8 + n % 3, 5], "guidance": None if n % 2 else 0.5, **conditioning(runtime, 2, seed=n)}
        for n in range(20)
    ]
    serial = [runtime.sample(**r) for r in requests]  # type: ignore[arg-type]
    start = threading.Barrier(4)

    def five(first: int) -> list[Tensor]:
        start.wait(timeout=30)
        return [runtime.sample(**r) for r in requests[first : first + 5]]  # type: ignore[arg-type]

    with ThreadPoolExecutor(4) as pool:
        parallel = [result for five_of_them in pool.map(five, range(0, 20, 5)) for result in five_of_them]
    assert all(torch.equal(a, b) for a, b in zip(serial, parallel, strict=True))


def test_a_failed_request_gives_its_turn_back(packed: Runtime) -> None:
    for _ in range(3):
        with pytest.raises(InputMismatch):
            packed.sample(seed=1, lengths=[8])
    assert packed.sample(seed=1, lengths=[8], **conditioning(packed)).isfinite().all()


# --- loading

LOADS = """
import json, os, sys, tempfile
import torch
before = set(sys.modules)
import voicehub_aot
runtime = voicehub_aot.load(sys.argv[1])
spec, sizes = runtime.spec, {"B": 1, "frames": 8, "text": 5}
given = {
    i.name: torch.zeros([sizes.get(s, s) for s in i.shape], dtype=i.torch_dtype) for i in spec.conditioning
}
result = runtime.sample(seed=1, lengths=[8], **given)
runtime.denoiser()
print(json.dumps({
    "modules": sorted(set(sys.modules) - before),
    "finite": bool(torch.isfinite(result).all()),
    "temporary": os.listdir(tempfile.gettempdir()),
}))
"""


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file and folder below."""
    return {str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns) for p in (folder, *folder.rglob("*"))}


@pytest.mark.parametrize("artifact", ["supertonic_packed", "f5_shared"])
def test_loading_and_sampling_import_no_model_and_no_compiler_and_write_nothing(
    request: pytest.FixtureRequest, artifact: str, tmp_path: Path
) -> None:
    """In a folder without write permission, which root does not heed: so the listing is compared too."""
    folder, scratch = tmp_path / "model.aot", tmp_path / "scratch"
    copytree(request.getfixturevalue(artifact), folder)
    scratch.mkdir()
    paths = [folder, *folder.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = listing(folder)
    environment = os.environ | {"TMPDIR": str(scratch), "HOME": str(scratch), "XDG_CACHE_HOME": str(scratch)}
    environment |= {"VOICEHUB_AOT_CACHE_DIR": str(scratch / "cache"), "PYTHONDONTWRITEBYTECODE": "1", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOADS, str(folder)],
        env=environment, cwd=scratch, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    for path in paths:
        path.chmod(0o755)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    ours = ("adapters", "export", "stage", "build", "compilation", "models", "parity", "engines.eager", "console")
    heavy = [f"voicehub_aot.{name}" for name in ours] + ["torch._inductor", "torch._dynamo", "torch.export", "typer"]
    assert "voicehub_aot.runtime.runtime" in found["modules"]
    assert [m for m in found["modules"] if any(m == h or m.startswith(f"{h}.") for h in heavy)] == []
    assert found["finite"]
    assert listing(folder) == before
    assert found["temporary"] == []
    assert list(scratch.iterdir()) == []
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"device": "cuda"}, OptionUnsupported, "device 'cuda'; this artifact was built for cpu:"),
        ({"engine": "tensorrt"}, EngineUnavailable, "engine 'tensorrt' was not built; built are aoti"),
        ({"threads": 0}, OptionUnsupported, r"threads=0, .*wanted 1 or more"),
        ({"concurrency": 0}, OptionUnsupported, "concurrency=0"),
        ({"overflow": "crop"}, OptionUnsupported, "overflow='crop'"),
    ],
)
def test_options_that_cannot_be_had_are_named(
    supertonic_packed: Path, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        load(supertonic_packed, **options)


def test_compute_threads_are_what_the_process_may_use_or_what_is_asked_for(supertonic_packed: Path) -> None:
    load(supertonic_packed)
    assert torch.get_num_threads() == usable_threads() <= (os.cpu_count() or 1)
    voicehub_aot.load(supertonic_packed, threads=1)
    assert torch.get_num_threads() == 1
