"""What the gate must refuse and what it must let pass, on a voice whose faults are known because they are planted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import tones
import torch
from torch import Tensor

from voicehub_aot.artifacts.quality import QualityReport
from voicehub_aot.proof.quality.evaluate import evaluate
from voicehub_aot.proof.quality.side import Side


@pytest.fixture(scope="module")
def gate(reference: Side, utterances: Any, recogniser: Any) -> Callable[[Side], QualityReport]:
    return lambda candidate: evaluate(candidate, reference, utterances, [recogniser]).report


def failed(report: QualityReport) -> set[str]:
    return {item.name for item in report.measures if not item.passed}


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
    return kind(**tones.fields(side))


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


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_rejected(reference: Side, gate: Callable[[Side], QualityReport], fault: str) -> None:
    plant, found_by = FAULTS[fault]
    report = gate(plant(reference))

    assert report.verdict == "rejected"
    assert found_by <= failed(report), report.reasons
    assert len(report.reasons) == len(failed(report))


def test_the_reference_itself_is_accepted(reference: Side, gate: Callable[[Side], QualityReport]) -> None:
    report = gate(replace(reference))
    assert report.verdict == "accepted", report.reasons
    assert {m.name: m.value for m in report.measures} == dict.fromkeys((m.name for m in report.measures), 0.0)


def test_half_of_the_steps_are_accepted_for_what_they_save(
    reference: Side, gate: Callable[[Side], QualityReport]
) -> None:
    report = gate(replace(reference, program=reference.runtime.program(16)))
    assert report.verdict == "accepted", report.reasons
    assert report.candidate.evaluations * 2 == report.reference.evaluations
    assert "50% fewer evaluations" in report.reasons[0]


def test_other_seeds_are_accepted_and_held_to_the_band(reference: Side, gate: Callable[[Side], QualityReport]) -> None:
    report = gate(replace(reference, seeds=(7, 8, 9)))
    assert report.verdict == "accepted", report.reasons
    assert not report.matched
    latent = report.measure("latent")
    assert latent is not None
    assert latent.value > max(latent.band.values()) / 2
    assert latent.bound > max(latent.band.values())
