"""Requests that change on the way: block by block, with speaker scaling, frame by frame."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from voicehub_aot.compiler.models import program, resolve
from voicehub_aot.errors import InputMismatch
from voicehub_aot.proof.cases import draw, plan
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.region import Input, RegionSpec
from voicehub_aot.spec.schedule import Schedule
from voicehub_aot.spec.solver import euler
from voicehub_aot.spec.speaker import SpeakerScaling

TIMES = (0.9, 0.6, 0.3, 0.0)


def tiny(model: str, steps: int = 3) -> Runtime:
    built = resolve(model, "tiny", "synthetic")
    return eager_runtime(built.region, [program(built, steps)], model)


def random_request(runtime: Runtime, sizes: dict[str, int], seed: int = 0) -> dict[str, Any]:
    """A valid request of one row: the state under its own name, and conditioning."""
    case = next(plan(runtime.spec, runtime.programs, [sizes], max_batch=1))
    drawn = draw(runtime.spec, case, seed)
    return {name: value for name, value in drawn.items() if isinstance(value, Tensor)}


# --- frames


@pytest.mark.parametrize("model", ["vibevoice", "voxcpm"])
def test_frames_are_requests_in_a_row_and_the_next_one_sees_the_last(model: str) -> None:
    runtime = tiny(model)
    given = random_request(runtime, {})
    given.pop(runtime.spec.state.name)
    seen: list[Tensor | None] = []

    def three(frame: Tensor | None) -> dict[str, Tensor] | None:
        seen.append(frame)
        return given if len(seen) <= 3 else None

    got = list(runtime.frames(three, seed=7, temperature=0.5))

    assert seen[0] is None
    assert all(torch.equal(before, frame) for before, frame in zip(seen[1:], got, strict=True))
    for number, frame in enumerate(got):
        noise, _ = runtime.noise(7 + number * 2**20, **given)
        assert torch.equal(frame, runtime.sample(noise=0.5 * noise, **given))
    assert not torch.equal(got[0], got[1])


def test_two_streams_share_nothing_and_one_that_is_left_holds_nothing() -> None:
    runtime = tiny("vibevoice")
    given = random_request(runtime, {})
    given.pop(runtime.spec.state.name)

    first, second = (runtime.frames(lambda _: given, seed=3) for _ in range(2))
    taken = [next(first), next(second), next(first), next(second)]
    first.close()

    assert torch.equal(taken[0], taken[1])
    assert torch.equal(taken[2], taken[3])
    assert runtime.sample(seed=0, **given).isfinite().all()  # concurrency is 1: nobody keeps the turn


# --- blocks


class Counting:
    """A sampler whose step adds 1 and which remembers what each part of a run was given."""

    spec = RegionSpec.model_construct(
        name="counting",
        main_dim="frames",
        inputs=(
            Input.model_construct(name="x", shape=("B", "frames"), binding="STATE"),
            Input.model_construct(name="speaker_scale", shape=("B", 3), binding="REQUEST"),
        ),
    )

    def __init__(self) -> None:
        self.parts: list[tuple[int, int, list[float] | None]] = []
        self.requests: list[dict[str, Any]] = []

    def program(self, wanted: str | int | None = None) -> Program:
        return euler(Schedule(times=TIMES))

    def trajectory(self, *, noise: Tensor, start: int = 0, stop: int | None = None, **request: Any) -> Iterator[Tensor]:
        stop = len(TIMES) - 1 if stop is None else stop
        scale = request.pop("speaker_scale", None)
        self.parts.append((start, stop, None if scale is None else scale[0].tolist()))
        self.requests.append(request)
        for _ in range(start, stop):
            noise = noise + 1
            yield noise

    blocks = Runtime.blocks


@pytest.mark.parametrize(
    ("until", "parts"),
    [
        (0.6, [(0, 2, [1.5, 1.0, 1.0]), (2, 3, None)]),  # the step that starts at 0.6 still has it
        (0.5, [(0, 2, [1.5, 1.0, 1.0]), (2, 3, None)]),
        (0.1, [(0, 3, [1.5, 1.0, 1.0])]),
        (0.95, [(0, 3, [1.5, 1.0, 1.0])]),  # no step crosses it: scaled to the end
        (None, [(0, 3, [1.5, 1.0, 1.0])]),
    ],
)
def test_speaker_scaling_ends_after_the_step_that_crosses_its_time(until: float | None, parts: list[Any]) -> None:
    sampler = Counting()
    (final,) = sampler.blocks(noise=torch.zeros(1, 2), speaker=SpeakerScaling(1.5, 1, until))
    assert sampler.parts == parts
    assert final.tolist() == [[3, 3]]


def test_scaling_that_no_step_ends_grows_from_block_to_block_as_upstreams_does() -> None:
    sampler = Counting()
    list(sampler.blocks(noise=torch.zeros(1, 4), sizes=[2, 2], speaker=SpeakerScaling(2.0)))
    assert [scale for *_, scale in sampler.parts] == [[2.0] * 3, [4.0] * 3]

    sampler = Counting()
    list(sampler.blocks(noise=torch.zeros(1, 4), sizes=[2, 2], speaker=SpeakerScaling(2.0, until=0.1)))
    assert [scale for *_, scale in sampler.parts] == [[2.0] * 3, [2.0] * 3]

    sampler = Counting()
    list(sampler.blocks(noise=torch.zeros(1, 4), sizes=[2, 2], speaker=SpeakerScaling(2.0, until=0.5)))
    assert [scale for *_, scale in sampler.parts] == [[2.0] * 3, None] * 2


def test_bounds_are_compared_in_float32() -> None:
    """0.6 is not a float32: upstream compares its float32 grid with the rounded bound."""
    assert SpeakerScaling(1.5, until=0.6).last_step(torch.tensor(TIMES).tolist()) == 1


def test_a_block_sees_what_is_finished_and_where_it_starts() -> None:
    sampler, seen = Counting(), []

    def request(whole: Tensor, start: int) -> dict[str, int]:
        seen.append((whole.tolist(), start))
        return {"start_pos": start}

    finished = torch.full((1, 1), 9.0)
    got = list(sampler.blocks(noise=torch.zeros(1, 3), sizes=[2, 1], request=request, finished=finished, guidance=2.0))

    assert [block.tolist() for block in got] == [[[3, 3]], [[3]]]
    assert seen == [([[9, 0, 0, 0]], 1), ([[9, 3, 3, 0]], 3)]
    assert [r.pop("program") for r in sampler.requests] == ["euler-3", "euler-3"]
    assert sampler.requests == [{"start_pos": 1, "guidance": 2.0}, {"start_pos": 3, "guidance": 2.0}]


def test_a_block_is_computed_when_it_is_asked_for() -> None:
    sampler = Counting()
    one = next(sampler.blocks(noise=torch.zeros(1, 4), sizes=[2, 2]))
    assert one.shape == (1, 2)
    assert len(sampler.parts) == 1


@pytest.mark.parametrize("sizes", [[], [0, 4], [2, 3], [5], [-1, 5]])
def test_blocks_that_do_not_make_up_the_noise_are_refused_at_the_call(sizes: list[int]) -> None:
    with pytest.raises(InputMismatch, match=r"blocks of .*wanted positive sizes that make up its 4 frames"):
        Counting().blocks(noise=torch.zeros(1, 4), sizes=sizes)


def test_models_without_what_is_asked_for_say_so() -> None:
    with pytest.raises(InputMismatch, match="no 'speaker_scale' input"):
        tiny("f5tts").blocks(noise=torch.zeros(1, 4, 20), speaker=SpeakerScaling(2.0))
    with pytest.raises(InputMismatch, match="use `frames`"):
        tiny("vibevoice").blocks(noise=torch.zeros(1, 8))


def test_blocks_of_a_model_are_its_trajectories() -> None:
    runtime = tiny("echo")
    given = random_request(runtime, {"frames": 8})
    noise = given.pop(runtime.spec.state.name)
    del given["hidden"]  # says which frames of the whole tensor exist: all of them

    got = list(runtime.blocks(noise=noise, sizes=[4, 4], **given))

    alone = [runtime.sample(noise=part, **given) for part in noise.split(4, dim=1)]
    for block, want in itertools.zip_longest(got, alone):
        torch.testing.assert_close(block, want)
