"""Loops of loops: requests that change on the way, block by block or frame by frame."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from voicehub_aot.errors import InputMismatch
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.region import RegionSpec
from voicehub_aot.spec.speaker import SPEAKER_SCALE, SpeakerScaling

FRAME_SEEDS = 2**20  # between the seeds of two frames; a request has fewer rows


class Sampling(Protocol):
    """What the loops here drive: a `Runtime`."""

    spec: RegionSpec

    def program(self, wanted: str | int | None = None) -> Program: ...

    def trajectory(
        self, *, noise: Tensor, program: str | None, start: int = 0, stop: int | None = None, **request: Any
    ) -> Iterator[Tensor]: ...


def blocks(
    runtime: Sampling,
    noise: Tensor,
    sizes: Sequence[int] | None,
    request: Callable[[Tensor, int], Mapping[str, Any]] | None,
    finished: Tensor | None,
    speaker: SpeakerScaling | None,
    program: str | int | None,
    conditioning: Mapping[str, Any],
) -> Iterator[Tensor]:
    """`Runtime.blocks`, checked at the call."""
    spec, chosen = runtime.spec, runtime.program(program)
    axis = _main_axis(spec)
    sizes = [noise.shape[axis]] if sizes is None else list(sizes)
    if not sizes or min(sizes) < 1 or sum(sizes) != noise.shape[axis]:
        raise InputMismatch(
            f"{spec.name}: blocks of {sizes} for noise {list(noise.shape)}; wanted positive sizes that make up its "
            f"{noise.shape[axis]} {spec.main_dim}"
        )
    if speaker is not None:
        _layers(spec)
    return _blocks(runtime, noise, axis, sizes, request, finished, speaker, chosen, conditioning)


def _blocks(
    runtime: Sampling,
    noise: Tensor,
    axis: int,
    sizes: Sequence[int],
    request: Callable[[Tensor, int], Mapping[str, Any]] | None,
    finished: Tensor | None,
    speaker: SpeakerScaling | None,
    program: Program,
    conditioning: Mapping[str, Any],
) -> Iterator[Tensor]:
    start, whole, factor = 0, torch.zeros_like(noise), 1.0
    if finished is not None:
        start, whole = finished.shape[axis], torch.cat((finished, whole), dim=axis)
    for block in torch.split(noise, list(sizes), dim=axis):
        given = {**conditioning, **(request(whole, start) if request else {})}
        if speaker is not None:
            factor *= speaker.factor  # again at each block: it stays where no step ends it
        *_, final = _scaled(runtime, program, speaker, factor, block, given)
        if speaker is not None and speaker.last_step(program.schedule) is not None:
            factor = 1.0
        whole.narrow(axis, start, final.shape[axis]).copy_(final)
        start += final.shape[axis]
        yield final


def _scaled(
    runtime: Sampling,
    program: Program,
    speaker: SpeakerScaling | None,
    factor: float,
    noise: Tensor,
    request: Mapping[str, Any],
) -> Iterator[Tensor]:
    """A trajectory whose speaker keys are scaled by `factor`, up to the step that ends it."""
    if speaker is None:
        yield from runtime.trajectory(noise=noise, program=program.name, **request)
        return
    scaled = {**request, SPEAKER_SCALE: speaker.scale(len(noise), _layers(runtime.spec), factor)}
    last = speaker.last_step(program.schedule)
    stop = program.steps if last is None else last + 1
    for state in runtime.trajectory(noise=noise, program=program.name, stop=stop, **scaled):
        noise = state
        yield state
    if stop < program.steps:
        yield from runtime.trajectory(noise=noise, program=program.name, start=stop, **request)


def frame_seeds(seed: int) -> Iterator[int]:
    """A seed for each frame, so that no two rows of any frames share one."""
    return itertools.count(seed, FRAME_SEEDS)


def _main_axis(spec: RegionSpec) -> int:
    if spec.main_dim is None:
        raise InputMismatch(f"{spec.name}: rows have no length, so that there are no blocks; use `frames`")
    return list(spec.state.shape).index(spec.main_dim)


def _layers(spec: RegionSpec) -> int:
    """How many layers speaker scaling can tell apart."""
    for item in spec.inputs:
        if item.name == SPEAKER_SCALE:
            return int(item.shape[1])
    raise InputMismatch(f"{spec.name}: speaker scaling was asked for, but this model has no {SPEAKER_SCALE!r} input")
