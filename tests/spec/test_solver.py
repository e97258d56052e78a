import math
from itertools import pairwise

import pytest

from voicehub_aot.errors import UsageError
from voicehub_aot.spec.program import Combine, Evaluate, Program
from voicehub_aot.spec.schedule import Schedule, karras, linear, sway
from voicehub_aot.spec.solver import SOLVERS, Preconditioner, adpm2, ancestral, dpm_solver_2m, euler, midpoint


def run(program, x, velocity, noises=None, seen=None):
    """The state after the program; velocity(x, t). noises: further registers. seen: gets the state after each step."""
    registers = {"x": x, **(noises or {})}
    for instruction in program.instructions:
        if isinstance(instruction, Evaluate):
            registers[instruction.out] = velocity(registers[instruction.x], program.times[instruction.evaluation])
        else:
            registers[instruction.out] = sum(c * registers[name] for name, c in instruction.terms)
            if seen is not None and instruction.out == "x":
                seen.append(registers["x"])
    return registers["x"]


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("midpoint", 2)])
@pytest.mark.parametrize("grid", [linear, lambda steps: sway(linear(steps), -1.0)], ids=["linear", "sway"])
@pytest.mark.parametrize("velocity", [lambda x, t: x, lambda x, t: x * math.cos(t)], ids=["x", "x cos t"])
def test_error_falls_with_the_order_of_the_solver(solver, order, grid, velocity):
    exact = run(midpoint(linear(4096)), 1.0, velocity)

    coarse, fine = (abs(run(SOLVERS[solver](grid(steps)), 1.0, velocity) - exact) for steps in (64, 128))

    assert math.log2(coarse / fine) == pytest.approx(order, abs=0.1)


def test_euler_of_the_exponential_is_the_textbook_product():
    assert run(euler(linear(4)), 1.0, lambda x, t: x) == 1.25**4


def test_midpoint_of_the_exponential_is_the_textbook_product():
    assert run(midpoint(linear(4)), 1.0, lambda x, t: x) == pytest.approx((1 + 1 / 4 + 1 / 32) ** 4, rel=1e-15)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_descending_schedule_is_integrated_backwards(solver):
    program = SOLVERS[solver](Schedule(times=(1.0, 0.75, 0.5, 0.25, 0.0)))

    assert run(program, 3.0, lambda x, t: 2.0) == 1.0


def test_euler_evaluates_once_a_step_at_its_start():
    program = euler(Schedule(times=(0.0, 0.25, 1.0)))

    assert (program.name, program.steps, program.evaluations) == ("euler-2", 2, 2)
    assert program.times == (0.0, 0.25)


def test_midpoint_evaluates_twice_a_step_at_its_start_and_middle():
    program = midpoint(Schedule(times=(0.0, 0.25, 1.0)))

    assert (program.name, program.steps, program.evaluations) == ("midpoint-2", 2, 4)
    assert program.times == (0.0, 0.125, 0.25, 0.625)


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_table_row_is_evaluated_once_in_order_and_guided(solver):
    program = SOLVERS[solver](linear(5))

    evaluations = [i for i in program.instructions if isinstance(i, Evaluate)]

    assert [i.evaluation for i in evaluations] == list(range(len(program.times)))
    assert all(i.against is None for i in evaluations)


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_state_is_written_once_a_step(solver):
    program = SOLVERS[solver](linear(5))

    assert sum(isinstance(i, Combine) and i.out == "x" for i in program.instructions) == 5


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_program_survives_json_bit_for_bit(solver):
    program = SOLVERS[solver](sway(linear(7), -1.0))

    restored = Program.model_validate_json(program.model_dump_json())

    assert restored == program


DESCENDING = Schedule(times=(0.999, 0.6, 0.3, 0.0))


def test_skipped_steps_leave_the_state_and_have_no_row():
    program = euler(DESCENDING, skip=1)

    assert (program.times, program.steps, program.evaluations) == ((0.6, 0.3), 3, 2)
    assert run(program, 1.0, lambda x, t: 1.0) == pytest.approx(1.0 - 0.6)


def test_what_the_denoiser_is_told_may_differ_from_the_schedule():
    program = euler(DESCENDING, times=(1.0, 0.5, 0.25), extra_times={"end": (0.6, 0.3, 0.0)}, skip=1)

    assert program.times == (0.5, 0.25)
    assert program.extra_times == {"end": (0.3, 0.0)}
    assert run(program, 0.0, lambda x, t: 1.0) == pytest.approx(-0.6)


def test_branches_are_chosen_step_by_step():
    program = euler(DESCENDING, against=lambda step: ("text",) if step == 0 else ())

    assert [i.against for i in program.instructions if isinstance(i, Evaluate)] == [("text",), (), ()]


@pytest.mark.parametrize(("k", "sigma"), [(1.2, 3.0), (0.7, 0.5)])
def test_temporal_score_rescaling_is_its_formula_step_by_step(k, sigma):
    velocity = lambda x, t: 0.3 * x - t  # noqa: E731
    x = 0.8
    for t, t_next in zip(DESCENDING.times, DESCENDING.times[1:], strict=False):
        snr = (1 - t) ** 2 / t**2
        ratio = (snr * sigma**2 + 1) / (snr * sigma**2 / k + 1)
        v = (ratio * ((1 - t) * velocity(x, t) + x) - x) / (1 - t)
        x += v * (t_next - t)

    assert run(euler(DESCENDING, rescale=(k, sigma)), 0.8, velocity) == pytest.approx(x, rel=1e-12)


def test_rescaling_leaves_the_step_from_pure_noise_alone():
    whole = Schedule(times=(1.0, 0.5, 0.0))

    assert euler(whole, rescale=(1.2, 3.0)).instructions[1] == euler(whole).instructions[1]


# --- solvers of diffusion models

LEVELS = karras(6, 1e-3, 3.0, 7.0)
DATA = 0.4
MEAN = 0.7


def told(level):
    """What ADPM2's network is told of a noise level, in float32."""
    return math.log(level) / 4


def constant(model):
    """A network F whose preconditioned prediction is MEAN, whatever it is given."""

    def network(scaled, time):
        level = math.exp(4 * time)
        return (MEAN - model.skip(level) * scaled / model.into(level)) / model.out(level)

    return network


def test_preconditioning_gives_the_network_unit_variance_on_both_sides():
    """x = data + level noise: Var(into x) = 1, and (data - skip x) / out has variance 1."""
    model = Preconditioner(DATA)
    for level in (1e-4, 0.3, 80.0):
        skip = model.skip(level)
        assert model.into(level) ** 2 * (DATA**2 + level**2) == pytest.approx(1)
        assert ((1 - skip) * DATA) ** 2 + (skip * level) ** 2 == pytest.approx(model.out(level) ** 2)


def test_the_slope_is_that_of_the_preconditioned_prediction_towards_the_data():
    model, x, f = Preconditioner(DATA), 1.7, -0.6
    for level in (1e-2, 0.3, 80.0):
        of_x, of_f = model.slope(level)
        assert of_x * x + of_f * f == pytest.approx((x - model.skip(level) * x - model.out(level) * f) / level)


def test_a_transition_splits_its_noise_level_into_what_stays_and_what_is_fresh():
    for level, following in pairwise(LEVELS.times[:-1]):
        up, down, middle = ancestral(level, following)
        assert math.hypot(up, down) == pytest.approx(following, rel=1e-6)
        assert down == pytest.approx(following**2 / level, rel=1e-3)
        assert middle == pytest.approx((level + down) / 2, rel=1e-6)


def test_adpm2_of_a_constant_prediction_shrinks_the_rest_and_adds_the_fresh_noise():
    """x - mean becomes (x - mean) down / level + up noise, however large the step."""
    model = Preconditioner(DATA)
    program = adpm2(LEVELS, model)
    fresh = {name: math.cos(i) for i, name in enumerate(program.noises)}
    want = LEVELS.times[0] * 1.3
    for noise, (level, following) in zip(fresh.values(), pairwise(LEVELS.times[:-1]), strict=True):
        up, down, _ = ancestral(level, following)
        want = MEAN + (want - MEAN) * down / level + up * noise

    got = run(program, 1.3, constant(model), fresh)

    assert got == pytest.approx(want, abs=2e-6)


def test_adpm2_evaluates_each_level_but_the_last_and_a_midpoint_after_each():
    program = adpm2(LEVELS, Preconditioner(DATA))

    middles = [ancestral(*pair)[2] for pair in pairwise(LEVELS.times[:-1])]
    levels = [level for pair in zip(LEVELS.times, middles, strict=False) for level in pair]
    assert (program.name, program.evaluations, len(program.noises)) == ("adpm2-6", 10, 5)
    assert program.times == pytest.approx([told(level) for level in levels], abs=1e-6)
    assert sum(isinstance(i, Combine) and i.out == "x" for i in program.instructions) == 5


RATIOS = (40.0, 5.0, 2.0, 0.7, 0.1, 0.0)
STEPS = Schedule(times=(9.0, 7.0, 5.0, 3.0, 1.0, -1.0))


def v_prediction(clean):
    """v of a model that predicts clean(time)."""

    def velocity(x, time):
        ratio = RATIOS[STEPS.times.index(time)]
        alpha = 1 / math.sqrt(ratio**2 + 1)
        return (alpha * x - clean(time)) / (ratio * alpha)

    return velocity


@pytest.mark.parametrize("first", [0, 2, 4])
def test_dpm_solver_ends_at_a_constant_prediction_exactly(first):
    schedule, ratios = Schedule(times=STEPS.times[first:]), RATIOS[first:]

    assert run(dpm_solver_2m(schedule, ratios), 1.3, v_prediction(lambda time: MEAN)) == pytest.approx(MEAN, rel=1e-14)


def test_dpm_solver_follows_the_published_update():
    """arXiv 2211.01095, algorithm 2, in log-SNR; the last step is first order and lands on its prediction."""

    def clean(time):
        return math.sin(time)

    alpha = [1 / math.sqrt(r * r + 1) for r in RATIOS]
    snr = [-math.log(r) if r else math.inf for r in RATIOS]
    x, states = 1.3, []
    for i in range(4):
        h, sigma, sigma_next = snr[i + 1] - snr[i], RATIOS[i] * alpha[i], RATIOS[i + 1] * alpha[i + 1]
        predicted = clean(STEPS.times[i])
        if i:
            r = (snr[i] - snr[i - 1]) / h
            predicted += (predicted - clean(STEPS.times[i - 1])) / (2 * r)
        x = sigma_next / sigma * x - alpha[i + 1] * math.expm1(-h) * predicted
        states.append(x)
    program = dpm_solver_2m(STEPS, RATIOS)
    found = []

    run(program, 1.3, v_prediction(clean), seen=found)

    assert found == pytest.approx([*states, clean(STEPS.times[4])], rel=1e-12)


def test_dpm_solver_tells_the_model_other_times_when_asked():
    program = dpm_solver_2m(STEPS, RATIOS, times=(8.0, 8.0, 4.0, 4.0, 0.0))

    assert program.times == (8.0, 8.0, 4.0, 4.0, 0.0)
    assert program.instructions == dpm_solver_2m(STEPS, RATIOS).instructions


@pytest.mark.parametrize("ratios", [RATIOS[1:], (*RATIOS[:-1], 0.05), (1.0, *RATIOS[1:])])
def test_dpm_solver_wants_falling_noise_down_to_none(ratios):
    with pytest.raises(UsageError, match="wanted 6 decreasing noise ratios"):
        dpm_solver_2m(STEPS, ratios)
