import math

import pytest

from voicehub_aot.program import Combine, Evaluate, Program
from voicehub_aot.schedule import Schedule, linear, sway
from voicehub_aot.solver import SOLVERS, euler, midpoint


def run(program, x, velocity):
    """The state after the program; velocity(x, t)."""
    registers = {"x": x}
    for instruction in program.instructions:
        if isinstance(instruction, Evaluate):
            registers[instruction.out] = velocity(registers[instruction.x], program.times[instruction.row])
        else:
            registers[instruction.out] = sum(c * registers[name] for name, c in instruction.terms)
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

    assert [i.row for i in evaluations] == list(range(len(program.times)))
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
