import math

import pytest
from pydantic import ValidationError

from voicehub_aot.errors import UsageError
from voicehub_aot.schedule import Schedule, cosine, epss, linear, sway

# SWivid/F5-TTS 2ae2c9b, src/f5_tts/model/utils.py, get_epss_timesteps: numerators of 32.
EPSS = {
    5: [0, 2, 4, 8, 16, 32],
    6: [0, 2, 4, 6, 8, 16, 32],
    7: [0, 2, 4, 6, 8, 16, 24, 32],
    10: [0, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32],
    12: [0, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32],
    16: [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32],
}
# What CFM.sample of the same commit integrates over with 7 steps, EPSS and sway -1, in float32.
F5_SEVEN_STEPS = (
    0.0,
    0.004815280437469482,
    0.0192146897315979,
    0.04305964708328247,
    0.07612049579620361,
    0.2928932309150696,
    0.6173166036605835,
    1.0,
)


@pytest.mark.parametrize("steps", [1, 2, 7, 32])
def test_linear_is_uniform_from_zero_to_one(steps):
    schedule = linear(steps)

    assert schedule.steps == steps
    assert schedule.times == pytest.approx([i / steps for i in range(steps + 1)], abs=1e-7)
    assert (schedule.times[0], schedule.times[-1]) == (0.0, 1.0)


@pytest.mark.parametrize("steps", EPSS)
def test_epss_keeps_the_published_points_of_a_32_step_grid(steps):
    schedule = epss(steps)

    assert [32 * t for t in schedule.times] == EPSS[steps]


@pytest.mark.parametrize("steps", [1, 4, 8, 32])
def test_epss_is_uniform_for_other_step_counts(steps):
    assert epss(steps) == linear(steps)


def test_sway_minus_one_is_one_minus_cosine():
    schedule = sway(linear(16), -1.0)

    assert schedule.times == pytest.approx([1 - math.cos(math.pi * i / 32) for i in range(17)], abs=1e-6)


# FunAudioLLM/CosyVoice 074ca6d, cosyvoice/flow/flow_matching.py: what CausalConditionalCFM integrates over in 5 steps.
COSYVOICE_FIVE_STEPS = (0.0, 0.04894345998764038, 0.19098299741744995, 0.41221481561660767, 0.6909830570220947, 1.0)


def test_the_released_cosyvoice_grid_is_reproduced_bit_for_bit():
    assert cosine(5).times == COSYVOICE_FIVE_STEPS
    assert cosine(10).times[::2] == pytest.approx(COSYVOICE_FIVE_STEPS, abs=1e-7)


@pytest.mark.parametrize("coefficient", [-1.0, -0.5, 0.5])
def test_sway_keeps_both_ends(coefficient):
    times = sway(linear(8), coefficient).times

    assert (times[0], times[-1]) == pytest.approx((0.0, 1.0), abs=1e-6)


def test_sway_spends_more_steps_near_the_noise_when_negative():
    assert sway(linear(4), -1.0).times[2] < 0.5 < sway(linear(4), 0.5).times[2]


@pytest.mark.parametrize("coefficient", [None, 0.0])
def test_no_sway_leaves_the_grid_alone(coefficient):
    assert sway(epss(7), coefficient) == epss(7)


def test_the_released_f5_grid_is_reproduced_bit_for_bit():
    assert sway(epss(7), -1.0).times == F5_SEVEN_STEPS


@pytest.mark.parametrize("grid", [linear, epss, cosine])
@pytest.mark.parametrize("steps", [0, -1])
def test_fewer_than_one_step_is_a_usage_error(grid, steps):
    with pytest.raises(UsageError, match=f"steps={steps}: a schedule needs at least 1 step"):
        grid(steps)


@pytest.mark.parametrize("coefficient", [5.0, -9.0, math.nan, math.inf])
def test_a_sway_that_folds_the_grid_is_a_usage_error(coefficient):
    with pytest.raises(UsageError, match="sway="):
        sway(linear(8), coefficient)


@pytest.mark.parametrize(
    "times", [(), (0.0,), (0.0, 0.0), (0.0, 0.5, 0.5), (0.0, 0.6, 0.5), (0.0, math.nan), (0.0, math.inf)]
)
def test_times_must_be_two_or_more_finite_and_strictly_monotone(times):
    with pytest.raises(ValidationError, match="times"):
        Schedule(times=times)


def test_a_descending_schedule_is_a_schedule():
    assert Schedule(times=(1.0, 0.5, 0.0)).steps == 2


def test_a_schedule_survives_json_bit_for_bit():
    schedule = sway(linear(13), -1.0)

    assert Schedule.model_validate_json(schedule.model_dump_json()) == schedule
