"""What the gate must refuse and what it must let pass, on a voice whose faults are known because they are planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from speech_faults import FAULTS

from voicehub_aot.artifacts.quality import QualityReport
from voicehub_aot.proof.quality.evaluate import evaluate
from voicehub_aot.proof.quality.side import Side


@pytest.fixture(scope="module")
def gate(reference: Side, utterances: Any, recogniser: Any) -> Callable[[Side], QualityReport]:
    return lambda candidate: evaluate(candidate, reference, utterances, [recogniser]).report


def failed(report: QualityReport) -> set[str]:
    return {item.name for item in report.measures if not item.passed}


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
    assert "saves 50% of the evaluations" in report.reasons[0]


def test_other_seeds_are_accepted_and_held_to_the_band(reference: Side, gate: Callable[[Side], QualityReport]) -> None:
    report = gate(replace(reference, seeds=(7, 8, 9)))
    assert report.verdict == "accepted", report.reasons
    assert not report.matched
    latent = report.measure("latent")
    assert latent is not None
    assert latent.value > max(latent.band.values()) / 2
    assert latent.bound > max(latent.band.values())
