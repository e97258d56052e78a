"""Each measure against an answer that is known."""

from __future__ import annotations

import math

import pytest
import torch

from voicehub_aot.proof.quality import measures
from voicehub_aot.proof.quality.clip import QUIETEST_DB, Clip, pcm16, wav
from voicehub_aot.proof.quality.measures import Score
from voicehub_aot.proof.quality.side import Spoken


def tone(hertz: float, seconds: float = 1.0, rate_hz: int = 16000, amplitude: float = 0.5) -> Clip:
    times = torch.arange(round(seconds * rate_hz), dtype=torch.float64) / rate_hz
    return Clip("tone", (amplitude * torch.sin(2 * torch.pi * hertz * times)).float(), rate_hz)


def spoken(times: list[float], states: list[float], clip: Clip | None = None, seconds: float = 0.5) -> Spoken:
    return Spoken(0, tuple(times), tuple(torch.full((1, 2, 3), float(s)) for s in states), clip or tone(440), seconds)


def test_the_level_of_a_sine_is_three_decibels_below_its_peak() -> None:
    assert tone(1000, amplitude=1.0).level_db == pytest.approx(-3.01, abs=0.01)
    assert Clip("", torch.zeros(100), 16000).level_db == QUIETEST_DB


@pytest.mark.parametrize(("rate_hz", "count"), [(8000, 8000), (16000, 16000), (24000, 24000), (44100, 44100)])
def test_another_rate_holds_the_same_tone(rate_hz: int, count: int) -> None:
    resampled = tone(440).at(rate_hz)
    assert (len(resampled), resampled.dtype) == (count, torch.float32)
    torch.testing.assert_close(
        resampled, tone(440, rate_hz=rate_hz).samples, rtol=0, atol=1e-3
    )  # of the phase in float32


def test_a_tone_above_the_new_rate_is_gone() -> None:
    assert tone(6000).at(8000).abs().max() < 1e-5


def test_sound_becomes_sixteen_bits_and_is_clipped() -> None:
    assert pcm16(torch.tensor([0.0, 1.0, -2.0, math.nan])) == b"\x00\x00\xff\x7f\x01\x80\x00\x00"
    data = wav(tone(440, seconds=0.25))
    assert (data[:4], data[8:12], len(data)) == (b"RIFF", b"WAVE", 44 + 2 * 4000)


def test_half_of_the_level_is_six_decibels_and_ln_2_of_the_log_mel_spectrum() -> None:
    one = spoken([0, 1], [0, 1], Clip("", torch.randn(16000, generator=torch.Generator().manual_seed(0)), 16000))
    half = spoken([0, 1], [0, 1], Clip("", one.clip.samples / 2, 16000))
    scores = measures.of_two(half, one)
    assert scores["level_db"].value == pytest.approx(-6.02, abs=0.01)
    assert scores["log_mel"].value == pytest.approx(math.log(2), abs=1e-3)


def test_equal_sound_has_no_distance() -> None:
    scores = measures.of_two(spoken([0, 1], [0, 1]), spoken([0, 1], [0, 1]))
    assert {name: score.value for name, score in scores.items()} == {
        "latent": 0.0, "log_mel": 0.0, "level_db": 0.0, "duration": 0.0,
    }  # fmt: skip


def test_what_lies_sixty_decibels_below_the_reference_is_not_heard() -> None:
    faint = Clip("", tone(1000).samples + 1e-7 * tone(3000).samples, 16000)
    assert measures.log_mel_distance(faint, tone(1000)) < 1e-3


def test_a_shorter_clip_is_compared_where_both_have_sound() -> None:
    scores = measures.of_two(spoken([0, 1], [0, 1], tone(440, 0.5)), spoken([0, 1], [0, 1], tone(440)))
    assert scores["duration"].value == -0.5
    assert scores["log_mel"].value == pytest.approx(0, abs=1e-9)


def test_a_clip_shorter_than_a_window_is_measured() -> None:
    assert measures.log_mel_distance(tone(440, 0.01), tone(440, 0.01)) == 0.0


def test_the_loudest_mel_band_of_a_tone_is_where_its_frequency_lies() -> None:
    """HTK: 1000 Hz is 1000 mel; the 80 bands stand 2840 / 81 mel apart."""
    band = measures.mel(tone(1000)).mean(0).argmax().item()
    assert abs((band + 1) * 2840.02 / 81 - 1000) < 2840.02 / 81


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_infinitely_far(value: float) -> None:
    bad = Clip("", torch.full((16000,), value), 16000)
    scores = measures.of_two(spoken([0, 1], [0, value], bad), spoken([0, 1], [0, 1]))
    assert all(math.isinf(scores[name].value) for name in ("latent", "log_mel", "level_db"))


def test_relative_l2_is_of_the_reference() -> None:
    want = torch.tensor([3.0, 4.0])
    assert measures.relative_l2(want + torch.tensor([0.5, 0.0]), want) == pytest.approx(0.1)
    assert measures.relative_l2(torch.zeros(2), torch.zeros(2)) == 0.0
    assert math.isinf(measures.relative_l2(torch.ones(2), torch.zeros(2)))
    assert math.isinf(measures.relative_l2(torch.ones(3), want))


def test_steps_are_compared_at_equal_times() -> None:
    """The reference's state is its time; so is the candidate's, after its first step."""
    reference = spoken([0, 0.25, 0.5, 1], [0, 0.25, 0.5, 1])
    assert measures.errors_by_step(spoken([0, 0.5, 1], [0, 0.5, 1.5]), reference) == pytest.approx([0, 0.5])


def test_between_two_times_the_reference_is_interpolated() -> None:
    reference = spoken([0, 0.5, 1], [0, 1, 2])
    assert measures.errors_by_step(spoken([0, 0.75, 1], [0, 1.5, 2]), reference) == pytest.approx([0, 0])


def test_times_may_go_down() -> None:
    reference = spoken([1, 0.5, 0], [0, 1, 2])
    assert measures.errors_by_step(spoken([1, 0.25, 0], [0, 3, 2]), reference) == pytest.approx([1, 0])


def test_a_step_that_does_not_move_is_counted() -> None:
    assert measures.frozen_steps(spoken([0, 1, 2, 3], [1, 1, 1 + 1e-8, 2]).states) == 2
    assert measures.frozen_steps(spoken([0, 1, 2], [1, 1.001, 2]).states) == 0


def test_means_are_of_absolute_values_and_weighted() -> None:
    assert measures.pooled([Score(-1.0), Score(1.0)]) == 1.0
    assert measures.pooled([Score(0.5, 2), Score(0.0, 6)]) == 0.125
    assert math.isnan(measures.pooled([]))
    assert math.isnan(measures.pooled([Score(1.0, 0.0)]))


def test_the_real_time_factor_is_seconds_a_second_of_speech() -> None:
    assert spoken([0, 1], [0, 1], tone(440, 2.0), seconds=0.5).rtf == 0.25
