import math

import pytest
from pydantic import ValidationError

from voicehub_aot.errors import OptionUnsupported
from voicehub_aot.spec.program import Combine, Evaluate, Program, check_options, probe


def program_of(*instructions, times=(0.0,), **fields):
    values = {"name": "test", "solver": "euler", "schedule": (0.0, 1.0), "times": times, **fields}
    return Program(instructions=instructions, **values)


STEP = Combine(out="x", terms=(("x", 1.0),))


@pytest.mark.parametrize("against", [None, (), ("text", "speaker")])
def test_the_branches_of_an_evaluation_survive_json(against):
    program = program_of(Evaluate(out="v", evaluation=0, against=against), STEP)

    assert Program.model_validate_json(program.model_dump_json()).instructions[0].against == against


def test_noise_registers_are_known_from_the_start():
    program = program_of(Combine(out="x", terms=(("x", 1.0), ("fresh", 0.5))), noises=("fresh",))

    assert program.noises == ("fresh",)


def test_a_row_has_a_value_of_every_time_input():
    program = probe([0.0, 0.5], {"end": [0.5, 1.0]})

    assert program.clock(1, "time") == {"time": 0.5, "end": 1.0}


def test_further_times_must_be_as_many_as_the_rows():
    with pytest.raises(ValidationError, match="1 values of 'end', wanted 2"):
        probe([0.0, 0.5], {"end": [0.5]})


KNOWN = {"solver": "euler", "sway": -1.0, "guided": True}


def test_options_override_the_defaults():
    chosen = check_options("model", KNOWN, {"sway": None, "solver": "midpoint"}, {"solver": ("euler", "midpoint")})

    assert chosen == {"solver": "midpoint", "sway": None, "guided": True}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"swing": 1}, r"options \['swing'\] are not known; known are solver, sway, guided"),
        ({"solver": "heun"}, "solver='heun' is not known; choose one of euler, midpoint"),
        ({"sway": "much"}, "sway='much', wanted a finite number"),
        ({"sway": math.nan}, "sway=nan, wanted a finite number"),
        ({"sway": True}, "sway=True, wanted a finite number"),
        ({"guided": 1}, "guided=1, wanted true or false"),
    ],
)
def test_an_option_that_a_model_does_not_know_is_named(given, message):
    with pytest.raises(OptionUnsupported, match=message):
        check_options("model", KNOWN, given, {"solver": ("euler", "midpoint")})


@pytest.mark.parametrize(
    ("instructions", "message"),
    [
        ((Combine(out="x", terms=(("v", 1.0),)),), r"instruction 0: reads \['v'\], known registers are \['x'\]"),
        ((Evaluate(out="v", x="middle", evaluation=0), STEP), r"instruction 0: reads \['middle'\]"),
        ((Combine(out="x", terms=()),), "instruction 0: reads"),
        ((STEP, Evaluate(out="v", evaluation=1)), "instruction 1: evaluation 1 of 1"),
        ((Evaluate(out="v", evaluation=-1), STEP), "instruction 0: evaluation -1 of 1"),
        ((Combine(out="x", terms=(("x", math.nan),)),), "instruction 0: coefficients must be finite"),
        ((Combine(out="x", terms=(("x", math.inf),)),), "instruction 0: coefficients must be finite"),
        ((Evaluate(out="v", evaluation=0),), "never writes 'x'"),
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
