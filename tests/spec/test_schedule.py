import itertools
import math

import pytest
from pydantic import ValidationError

from voicehub_aot.errors import UsageError
from voicehub_aot.spec.schedule import (
    Schedule,
    cosine,
    cosine_noise_ratios,
    descending,
    epss,
    karras,
    linear,
    sway,
    training_timesteps,
)

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
def test_descending_is_uniform_from_one_to_zero(steps):
    times = descending(steps).times
    assert times == pytest.approx([1 - n / steps for n in range(steps + 1)], abs=1e-6)
    assert (times[0], times[-1]) == (1.0, 0.0)


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


@pytest.mark.parametrize("grid", [linear, descending, epss, cosine])
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


# yl4579/StyleTTS2 5cedc71, Modules/diffusion/sampler.py, KarrasSchedule(0.0001, 3.0, 9.0) with 5 steps.
STYLETTS2_FIVE_LEVELS = (
    2.999999761581421,
    0.5579147934913635,
    0.07036221772432327,
    0.004757816903293133,
    0.00010000002657761797,
    0.0,
)


def test_karras_levels_are_styletts2s_bit_for_bit():
    assert karras(5, 1e-4, 3.0, 9.0).times == STYLETTS2_FIVE_LEVELS


@pytest.mark.parametrize("rho", [1.0, 7.0])
def test_karras_levels_are_even_in_their_root_and_end_at_zero(rho):
    *levels, last = karras(9, 0.01, 80.0, rho).times

    roots = [level ** (1 / rho) for level in levels]
    assert last == 0.0
    assert (levels[0], levels[-1]) == (pytest.approx(80.0, rel=1e-6), pytest.approx(0.01, rel=1e-3))
    assert [b - a for a, b in itertools.pairwise(roots)] == pytest.approx([(roots[-1] - roots[0]) / 8] * 8, rel=1e-3)


@pytest.mark.parametrize(("steps", "sigma_min", "sigma_max"), [(1, 0.1, 1.0), (5, 1.0, 1.0), (5, -1.0, 1.0)])
def test_karras_levels_that_do_not_fall_are_refused(steps, sigma_min, sigma_max):
    with pytest.raises(UsageError):
        karras(steps, sigma_min, sigma_max, 7.0)


# microsoft/VibeVoice e73d1e1, vibevoice/schedule/dpm_solver.py, set_timesteps: halves go to the even number.
@pytest.mark.parametrize(
    ("steps", "times"),
    [
        (1, (999, -1)),
        (2, (999, 500, -1)),
        (5, (999, 799, 599, 400, 200, -1)),
        (6, (999, 832, 666, 500, 333, 166, -1)),
        (10, (999, 899, 799, 699, 599, 500, 400, 300, 200, 100, -1)),
    ],
)
def test_training_timesteps_fall_to_the_clean_end(steps, times):
    assert training_timesteps(steps).times == times


@pytest.mark.parametrize(("steps", "middle"), [(26, 499), (58, 500), (100, 500)])
def test_a_training_timestep_is_a_half_where_numpys_linspace_has_one(steps, middle):
    assert training_timesteps(steps).times[steps // 2] == middle


@pytest.mark.parametrize("steps", [0, 1500])
def test_more_timesteps_than_were_trained_are_refused(steps):
    with pytest.raises(UsageError):
        training_timesteps(steps)


def test_cosine_noise_ratios_are_vibevoices():
    ratios = cosine_noise_ratios()

    assert len(ratios) == 1000
    assert ratios[999] == pytest.approx(20291.3, rel=1e-6)
    assert [ratios[t] for t in (899, 500, 100)] == pytest.approx([6.364592, 1.015551, 0.17104375], rel=1e-6)


def test_cosine_noise_ratios_are_the_tangent_of_the_time():
    """Until the largest step is clipped, alpha^2 = cos^2(a(t)) / cos^2(a(0))."""
    ratios = cosine_noise_ratios(100)

    def angle(u):
        return (u + 0.008) / 1.008 * math.pi / 2

    for step in (0, 40, 90):
        alpha = math.cos(angle((step + 1) / 100)) / math.cos(angle(0))
        assert ratios[step] == pytest.approx(math.sqrt(1 / alpha**2 - 1), rel=1e-4)
