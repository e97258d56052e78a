"""What Echo-TTS's and Irodori-TTS's loops share: when speaker scaling ends, and which part of a run has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from voicehub_aot.adapters._echo_irodoritts import sampling

TIMES = (0.9, 0.6, 0.3, 0.0)


class Counting:
    """A sampler whose step adds 1 and which remembers what each part of the run was given."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, int, float | None]] = []

    def trajectory(self, *, noise: Tensor, start: int = 0, stop: int | None = None, **request: Any) -> Iterator[Tensor]:
        stop = len(TIMES) - 1 if stop is None else stop
        scale = request.get("speaker_scale")
        self.parts.append((start, stop, None if scale is None else scale.max().item()))
        for _ in range(start, stop):
            noise = noise + 1
            yield noise


@pytest.mark.parametrize(
    ("least", "parts"),
    [
        (0.6, [(0, 2, 1.5), (2, 3, None)]),  # the step that starts at 0.6 still has it
        (0.5, [(0, 2, 1.5), (2, 3, None)]),
        (0.1, [(0, 3, 1.5)]),
        (0.95, [(0, 3, 1.5)]),  # no step crosses it: scaled to the end
        (None, [(0, 3, 1.5)]),
    ],
)
def test_speaker_scaling_ends_after_the_step_that_crosses_the_least_time(least: float | None, parts: list[Any]) -> None:
    sampler = Counting()
    scaled = sampling.speaker_scale(1, 3, 1.5, 1)
    states = list(sampling.scaled_trajectory(sampler, TIMES, scaled, least, noise=torch.zeros(1)))  # type: ignore[arg-type]
    assert sampler.parts == parts
    assert [s.item() for s in states] == [1, 2, 3]


def test_without_scaling_the_run_is_one_part() -> None:
    sampler = Counting()
    list(sampling.scaled_trajectory(sampler, TIMES, None, 0.5, noise=torch.zeros(1)))  # type: ignore[arg-type]
    assert sampler.parts == [(0, 3, None)]


def test_only_the_first_layers_are_scaled() -> None:
    assert sampling.speaker_scale(2, 3, 1.5, 2).tolist() == [[1.5, 1.5, 1.0]] * 2
    assert sampling.speaker_scale(1, 3, 0.5, None).tolist() == [[0.5] * 3]


def test_bounds_are_compared_in_float32() -> None:
    """0.6 is no float32: upstream compares its float32 grid with the rounded bound."""
    grid = torch.tensor(TIMES).tolist()
    assert sampling.crossing(grid, 0.6) == 1
