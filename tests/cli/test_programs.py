"""`build --program`: loops with names of their own."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from voicehub_aot.cli.settings import BuildSettings, as_toml, options, parse_programs
from voicehub_aot.compiler.models import Model, resolve
from voicehub_aot.compiler.options import RequestedOptions
from voicehub_aot.errors import AotError, OptionUnsupported, UsageError


@functools.cache
def f5() -> Model:
    return resolve("f5tts", "tiny", "synthetic")


def resolved(*programs: str, **flags: object) -> tuple[BuildSettings, RequestedOptions]:
    given = {"checkpoint": "synthetic", "engine": "onnxruntime", "program": parse_programs(programs), **flags}
    settings = BuildSettings.merge(None, given)
    return settings, options(f5(), settings, None, 6, 1, True, False)


def test_each_has_its_own_steps_and_options() -> None:
    _, found = resolved("fast:steps=7,grid=epss", "plain:steps=7,grid=linear,sway=null", steps="16")

    steps, fast, plain = found.programs
    assert [p.name for p in found.programs] == ["euler-16", "fast", "plain"]
    assert fast.schedule != plain.schedule
    assert (steps.options, fast.options) == ({}, {})  # "epss" is the released grid
    assert plain.options == {"grid": "linear", "sway": None}


def test_the_models_own_step_counts_are_built_only_where_none_is_named() -> None:
    assert [p.name for p in resolved()[1].programs] == ["euler-32", "euler-16", "euler-7"]
    assert [p.name for p in resolved("fast:steps=7")[1].programs] == ["fast"]


def test_the_file_that_a_build_keeps_gives_the_same_programs(tmp_path: Path) -> None:
    settings, found = resolved("plain:steps=7,grid=linear,sway=null", steps="16")
    file = tmp_path / "config.toml"
    file.write_text(as_toml(f5(), settings, found), encoding="utf-8")

    again = options(f5(), BuildSettings.merge(file, {}), None, 6, 1, True, False)

    assert again.programs == found.programs


REFUSED: list[tuple[str, type[AotError], str]] = [
    ("fast", UsageError, "wanted NAME:steps=N,OPTION=VALUE"),
    ("fast:grid=epss", UsageError, "wanted NAME:steps=N,OPTION=VALUE"),
    (":steps=7", UsageError, "wanted NAME:steps=N,OPTION=VALUE"),
    ("fast:steps=7,grid", UsageError, "wanted NAME=VALUE, each name once"),
    ("fast:steps=7,steps=8", UsageError, "wanted NAME=VALUE, each name once"),
    ("fast:steps=seven", UsageError, "program.0.steps"),
    ("fast:steps=0", UsageError, "program.0.steps"),
    ("fast:steps=true", UsageError, "program.0.steps"),
    ("fast:steps=99999", UsageError, "wanted 1 to 4096"),
    ("../fast:steps=7", UsageError, "program.0.name"),
    ("7:steps=7", UsageError, "would be taken for a step count"),
    ("fast:steps=7,speed=2", OptionUnsupported, "'speed'"),
    ("fast:steps=7,grid=coarse", OptionUnsupported, "choose one of epss, linear"),
    ("euler-16:steps=7", UsageError, "euler-16 is given more than once"),
]


@pytest.mark.parametrize(("text", "error", "words"), REFUSED)
def test_what_cannot_be_a_program_is_refused_by_name(text: str, error: type[AotError], words: str) -> None:
    with pytest.raises(error) as caught:
        resolved(text, steps="16")
    assert words in str(caught.value)
