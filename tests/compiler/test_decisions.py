"""Decisions that can move a number: their classes, and how far programs are from the released loop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from voicehub_aot import adapters
from voicehub_aot.compiler.decisions import NOT_MEASURED, PARITY, classed, decisions
from voicehub_aot.compiler.models import Model, program, resolve


@pytest.fixture(scope="module")
def f5() -> Model:
    return resolve("f5tts", "tiny", "synthetic")


CLASSES = [
    pytest.param("f5tts", 32, {}, "exact", "the released loop", id="the released loop"),
    pytest.param("f5tts", 48, {}, "exact", "more steps than the released 32", id="more steps"),
    pytest.param("f5tts", 7, {}, "approximate", "7 of the released 32 steps", id="fewer steps"),
    pytest.param("f5tts", 32, {"solver": "midpoint"}, "approximate", "solver='midpoint'", id="another solver"),
    pytest.param("f5tts", 32, {"solver": "euler"}, "exact", "the released loop", id="the released solver, named"),
    pytest.param("echo", 40, {"cfg_min_t": 0.7}, "behaviour change", "cfg_min_t=0.7", id="another guidance window"),
    pytest.param(
        "voxcpm", 10, {"use_cfg_zero_star": False}, "behaviour change", "use_cfg_zero_star=False", id="equation"
    ),
]


@pytest.mark.parametrize(("model", "steps", "options", "safety", "reason"), CLASSES)
def test_a_program_has_the_class_of_what_sets_it_apart(model, steps, options, safety, reason) -> None:
    loaded = resolve(model, "tiny", "synthetic")

    found = classed(loaded, program(loaded, steps, **options))

    assert found.safety == safety
    assert reason in found.reason
    assert found.against == (PARITY if safety == "exact" else NOT_MEASURED)


def test_the_distance_from_the_released_loop_shrinks_with_the_steps(f5: Model) -> None:
    programs = [program(f5, n) for n in (2, 8, 16)]

    *_, two, eight, sixteen = decisions(f5, programs, {"frames": 16})

    assert two.distance > eight.distance > sixteen.distance > 0
    assert sixteen.against == "euler-32 in float32, frames=16, 3 seeds"


def test_exact_programs_are_left_to_parity(f5: Model) -> None:
    *_, found = decisions(f5, [program(f5, 32)], {"frames": 16})
    assert (found.safety, found.against, found.distance) == ("exact", PARITY, None)


def test_without_parity_nothing_is_measured_and_the_decision_says_so(f5: Model) -> None:
    *_, found = decisions(f5, [program(f5, 8)], None)
    assert (found.safety, found.against, found.distance) == ("approximate", NOT_MEASURED, None)


def test_a_loop_that_draws_noise_on_its_way_says_why_it_has_no_distance() -> None:
    model = replace(resolve("styletts2", "tiny", "synthetic"), released_steps=6)
    *_, found = decisions(model, [program(model, 3)], {"tokens": 8})
    assert (found.safety, found.distance) == ("approximate", None)
    assert found.against == "nothing: it draws fresh noise on its way"


def test_precision_and_guidance_are_decisions_too(f5: Model) -> None:
    precision, guidance, *_ = decisions(f5, [program(f5, 32)], None)
    assert (precision.kind, precision.name, precision.safety) == ("precision", "float32", "exact")
    assert (guidance.kind, guidance.name, guidance.safety) == ("guidance", "default", "exact")


@pytest.mark.parametrize("name", adapters.names())
def test_options_that_change_the_behaviour_are_options_of_the_loop(name: str) -> None:
    adapter = adapters.load(name)
    assert set(adapters.optional(adapter, "BEHAVIOUR_OPTIONS")) <= set(adapter.PROGRAM_OPTIONS)
