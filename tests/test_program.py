import math

import pytest
from pydantic import ValidationError

from voicehub_aot.program import SOLVERS, Combine, Evaluate, Program, euler, midpoint
from voicehub_aot.schedule import Schedule, linear, sway


def run(program, x, velocity):
    """The state after the program; velocity(x, t)."""
    registers = {"x": x}
    for instruction in program.instructions:
        if isinstance(instruction, Evaluate):
            registers[instruction.out] = velocity(registers[instruction.x], program.times[instruction.row])
        else:
            registers[instruction.out] = sum(c * registers[name] for name, c in instruction.terms)
    return registers["x"]


def program_of(*instructions, times=(0.0,), **fields):
    values = {"name": "test", "solver": "euler", "schedule": (0.0, 1.0), "times": times, **fields}
    return Program(instructions=instructions, **values)


STEP = Combine(out="x", terms=(("x", 1.0),))


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
    assert all(i.guided for i in evaluations)


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_state_is_written_once_a_step(solver):
    program = SOLVERS[solver](linear(5))

    assert sum(isinstance(i, Combine) and i.out == "x" for i in program.instructions) == 5


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_program_survives_json_bit_for_bit(solver):
    program = SOLVERS[solver](sway(linear(7), -1.0))

    restored = Program.model_validate_json(program.model_dump_json())

    assert restored == program


def test_an_unguided_evaluation_survives_json():
    program = program_of(Evaluate(out="v", row=0, guided=False), STEP)

    assert Program.model_validate_json(program.model_dump_json()).instructions[0].guided is False


@pytest.mark.parametrize(
    ("instructions", "message"),
    [
        ((Combine(out="x", terms=(("v", 1.0),)),), r"instruction 0: reads \['v'\], known registers are \['x'\]"),
        ((Evaluate(out="v", x="middle", row=0), STEP), r"instruction 0: reads \['middle'\]"),
        ((Combine(out="x", terms=()),), "instruction 0: reads"),
        ((STEP, Evaluate(out="v", row=1)), "instruction 1: row 1 of 1"),
        ((Evaluate(out="v", row=-1), STEP), "instruction 0: row -1 of 1"),
        ((Combine(out="x", terms=(("x", math.nan),)),), "instruction 0: coefficients must be finite"),
        ((Combine(out="x", terms=(("x", math.inf),)),), "instruction 0: coefficients must be finite"),
        ((Evaluate(out="v", row=0),), "never writes 'x'"),
        ((), "never writes 'x'"),
    ],
)
def test_a_program_that_cannot_run_is_refused_where_it_fails(instructions, message):
    with pytest.raises(ValidationError, match=message):
        program_of(*instructions)


@pytest.mark.parametrize(
    "instruction",
    [
        {"op": "branch", "out": "x"},
        {"out": "x", "terms": [["x", 1.0]]},
        {"op": "combine", "out": "x", "terms": [["x", 1.0]], "scale": 2.0},
    ],
)
def test_unknown_instructions_and_fields_are_refused(instruction):
    with pytest.raises(ValidationError):
        program_of(instruction)
