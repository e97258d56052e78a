"""Candidates whose speech is wrong on purpose: a side with one fault planted. The quality gate must refuse each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from voicehub_aot.proof.quality.side import Side, Spoken


class Remembered(Side):
    """A side that speaks every utterance once, however many candidates it is compared with."""

    @cached_property
    def spoken(self) -> dict[tuple[str, int], Spoken]:
        return {}

    def speak(self, text: str, seed: int) -> Spoken:
        if (text, seed) not in self.spoken:
            self.spoken[text, seed] = super().speak(text, seed)
        return self.spoken[text, seed]


def remembered(side: Side) -> Side:
    return Remembered(**fields(side))


def fields(side: Side) -> dict[str, Any]:
    """What makes a side: for another class with the same."""
    return {field.name: getattr(side, field.name) for field in dataclasses.fields(side)}


def with_sound(side: Side, change: Callable[[Tensor], Tensor]) -> Side:
    """The side, with another end of its vocoder."""
    vocoder = side.entry.vocoder
    return replace(side, entry=replace(side.entry, vocoder=lambda latent, request: change(vocoder(latent, request))))


def hissing(samples: Tensor) -> Tensor:
    """White noise 30 dB below the speech."""
    noise = torch.randn(samples.shape, generator=torch.Generator().manual_seed(0))
    return samples + noise * samples.square().mean().sqrt() * 10 ** (-30 / 20)


def swapped(text: str) -> str:
    """The first word at the end, and the last at the beginning."""
    first, *middle, last = text.split()
    return " ".join([last, *middle, first])


class Frozen(Side):
    """One step leaves the state as it is."""

    step = 5

    def trajectory(self, noise: Tensor, step_noise: Tensor | None, request: dict[str, Any]) -> Iterator[Tensor]:
        name = self.program.name
        for step in range(self.program.steps):
            if step != self.step:
                (noise,) = self.runtime.trajectory(
                    noise=noise, program=name, guidance=self.guidance, start=step, stop=step + 1, **request
                )
            yield noise


class LateFrozen(Frozen):
    step = 31


def frozen(side: Side, kind: type[Frozen]) -> Side:
    return kind(**fields(side))


# What is planted, and the measures that must find it.
FAULTS: dict[str, tuple[Callable[[Side], Side], set[str]]] = {
    "level halved": (lambda s: with_sound(s, lambda samples: samples / 2), {"level_db", "log_mel"}),
    "hiss": (lambda s: with_sound(s, hissing), {"log_mel"}),
    "two words swapped": (
        lambda s: replace(s, entry=replace(s.entry, front_end=lambda text: s.entry.front_end(swapped(text)))),
        {"tone_wer"},
    ),
    "a guidance branch lost": (lambda s: replace(s, guidance=0.0), {"latent"}),
    "a frozen step": (lambda s: frozen(s, Frozen), {"frozen_steps"}),
    "a frozen last step": (lambda s: frozen(s, LateFrozen), {"frozen_steps"}),
    "two steps": (lambda s: replace(s, program=s.runtime.program(2)), {"latent"}),
    "one step": (lambda s: replace(s, program=s.runtime.program(1)), {"latent", "log_mel"}),
    "silence": (lambda s: with_sound(s, torch.zeros_like), {"level_db", "log_mel", "tone_wer"}),
    "not a number": (lambda s: with_sound(s, lambda samples: samples * torch.nan), {"level_db", "log_mel"}),
    "a sentence cut short": (lambda s: with_sound(s, lambda samples: samples[:-1000]), {"duration"}),
}
