"""The evaluation as a whole: what it tells, keeps and repeats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import toy

from voicehub_aot.errors import UsageError
from voicehub_aot.proof.quality.evaluate import MOST_SOUNDS, Evaluation, evaluate
from voicehub_aot.proof.quality.scorers import OpenScorer
from voicehub_aot.proof.quality.side import Side
from voicehub_aot.proof.quality.utterances import Utterance
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.spec.schedule import linear
from voicehub_aot.spec.solver import euler

TIMED = {"rtf", "reference_rtf"}


@pytest.fixture(scope="module")
def candidate(reference: Side) -> Side:
    return replace(reference, program=reference.runtime.program(8))


@pytest.fixture(scope="module")
def result(candidate: Side, reference: Side, utterances: list[Utterance], recogniser: OpenScorer) -> Evaluation:
    return evaluate(candidate, reference, utterances, [recogniser], not_scored={"ears": "are absent"}, name="cases")


def test_every_utterance_is_compared_from_every_seed(result: Evaluation, utterances: list[Utterance]) -> None:
    compared = [(c.utterance, c.seed, c.candidate_seed) for c in result.report.comparisons]
    assert compared == [(u.name, seed, seed) for u in utterances for seed in (0, 1, 2)]
    assert result.report.names == [u.name for u in utterances]


def test_the_band_is_by_seed_or_by_pair_of_seeds(result: Evaluation) -> None:
    bands = {measure.name: list(measure.band) for measure in result.report.measures}
    assert bands["tone_wer"] == bands["frozen_steps"] == ["0", "1", "2"]
    assert bands["latent"] == bands["log_mel"] == bands["level_db"] == ["0/1", "0/2", "1/2"]


def test_the_latent_error_is_told_for_every_step(result: Evaluation) -> None:
    report = result.report
    assert len(report.times) == len(report.mean_latent_by_step) == 8
    assert report.times[-1] == 1.0
    latent = report.measure("latent")
    assert latent is not None
    assert report.mean_latent_by_step[-1] == pytest.approx(latent.value)


def test_a_report_of_the_same_seeds_is_the_same_but_for_time(
    result: Evaluation, candidate: Side, reference: Side, utterances: list[Utterance], recogniser: OpenScorer
) -> None:
    again = evaluate(candidate, replace(reference), utterances, [recogniser])
    for one, other in zip(result.report.comparisons, again.report.comparisons, strict=True):
        assert one.model_dump(exclude=TIMED) == other.model_dump(exclude=TIMED)
    assert again.report.measures == result.report.measures
    assert again.sounds == result.sounds


def test_one_line_is_told_an_utterance(
    candidate: Side, reference: Side, utterances: list[Utterance], recogniser: OpenScorer
) -> None:
    lines: list[str] = []
    evaluate(candidate, reference, utterances, [recogniser], tell=lines.append)
    assert len(lines) == len(utterances)
    assert lines[0].startswith("1 of 2  utterance 0: log-mel distance ")
    assert lines[0].endswith(f"heard {utterances[0].text}")


def test_only_the_sounds_that_differ_most_are_kept(candidate: Side, reference: Side) -> None:
    texts = ["window", "garden", "computer", "yellow", "river", "doctor", "monday", "banana"]
    many = [Utterance(text=text, name=text) for text in texts]
    result = evaluate(candidate, reference, many)
    first = {c.utterance: c.values["log_mel"] for c in result.report.comparisons if c.seed == 0}
    assert len(result.sounds) == MOST_SOUNDS < len(texts)
    assert [s.utterance for s in result.sounds] == sorted(first, key=lambda name: -first[name])[:MOST_SOUNDS]
    assert all(sound.reference[:4] == sound.candidate[:4] == b"RIFF" for sound in result.sounds)


def test_without_trained_weights_and_a_recogniser_quality_is_not_validated(result: Evaluation) -> None:
    assert result.report.candidate.synthetic
    assert not result.report.quality_validated


def test_guidance_branches_count_as_evaluations(reference: Side) -> None:
    assert reference.evaluations == 64
    assert replace(reference, guidance=0.0).evaluations == 32
    assert replace(reference, guidance={"unconditional": 1.0}).scales == {"unconditional": 1.0}
    with pytest.raises(UsageError, match="no branches"):
        replace(reference, guidance={"other": 1.0}).scales  # noqa: B018


def test_as_many_seeds_are_wanted_on_both_sides(reference: Side, utterances: list[Utterance]) -> None:
    with pytest.raises(UsageError, match="wanted as many on both sides"):
        evaluate(replace(reference, seeds=(1, 2)), reference, utterances)


def test_two_models_cannot_be_compared(reference: Side, utterances: list[Utterance]) -> None:
    region = toy.region()
    state = region.spec.state.model_copy(update={"shape": ("B", "frames", 99)})
    inputs = tuple(state if item.binding == "STATE" else item for item in region.spec.inputs)
    other = replace(region, spec=region.spec.model_copy(update={"inputs": inputs}))
    side = replace(reference, runtime=eager_runtime(other, [euler(linear(32))], "other"))
    with pytest.raises(UsageError, match="wanted two artifacts of one model"):
        evaluate(side, reference, utterances)


def test_programs_that_draw_on_their_way_start_from_the_same_noise(reference: Side) -> None:
    plain = reference.runtime.program(2)
    noisy = plain.model_copy(update={"name": "noisy", "noises": ("fresh",)})
    runtime = eager_runtime(toy.region(), [plain, noisy], "toy")
    request = reference.entry.request("window garden")
    one, none = runtime.noise(3, program="euler-2", **request)
    other, drawn = runtime.noise(3, program="noisy", **request)
    assert torch.equal(one, other)
    assert none is None
    assert drawn is not None
    assert drawn.shape == (1, *one.shape)
    sampled = runtime.sample(seed=3, program="euler-2", **request)
    assert torch.equal(sampled, runtime.sample(noise=one, program="euler-2", **request))


def test_the_clock_of_a_side_is_of_sampling_alone(reference: Side) -> None:
    spoken: Any = replace(reference).speak("window", 0)
    assert 0 < spoken.seconds < 60
    assert len(spoken.states) == 33
    sampled = reference.runtime.sample(seed=0, program=32, **reference.entry.request("window"))
    assert torch.equal(spoken.states[-1], sampled)
