"""What a build needs of the machine is found within seconds, and said in one line."""

import os
import time

import pytest
import toy

from voicehub_aot import engine_cache, toolchain
from voicehub_aot.bucket import Buckets
from voicehub_aot.build import able, build
from voicehub_aot.errors import AotError, EngineUnavailable, UsageError
from voicehub_aot.options import Options
from voicehub_aot.schedule import linear
from voicehub_aot.solver import euler
from voicehub_aot.target import default_target, parse_target

OPTIONS = Options(
    Buckets(axes={"frames": (8,)}), (euler(linear(2)),), parse_target(default_target()), engines=("aoti", "onnxruntime")
)


def script(folder, text):
    file = folder / "compiler"
    file.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    file.chmod(0o755)
    return file


@pytest.fixture(autouse=True)
def fresh():
    toolchain._probe.cache_clear()
    yield
    toolchain._probe.cache_clear()


def test_this_machine_can_compile(tmp_path):
    start = time.perf_counter()

    toolchain.check_compiler(tmp_path)

    assert time.perf_counter() - start < 30
    assert toolchain.describe(tmp_path).startswith("ok")


BROKEN = {
    "absent": "no-such-compiler",
    "a folder": "/tmp",
    "empty words": "  ",
    "fails": "exit 3",
    "says nothing and writes nothing": "exit 0",
    "another program": "echo hello",
    "writes garbage": 'for last; do true; done; echo garbage > "$last"',
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_compiler_is_told_with_what_to_do(tmp_path, monkeypatch, kind):
    value = BROKEN[kind]
    if " " in value.strip():
        value = str(script(tmp_path, value))
    monkeypatch.setenv("CXX", value)

    with pytest.raises(EngineUnavailable, match=r"CXX|noexec") as caught:
        toolchain.check_compiler(tmp_path / "cache")

    assert caught.value.exit_code == 4


def test_a_file_that_may_not_be_run_is_no_compiler(tmp_path, monkeypatch):
    script(tmp_path, "exit 0").chmod(0o644)
    monkeypatch.setenv("CXX", str(tmp_path / "compiler"))

    with pytest.raises(EngineUnavailable, match="may not be run"):
        toolchain.check_compiler(tmp_path / "cache")


@pytest.mark.parametrize("name", ["a blank", "a'quote", 'a"quote', "a$dollar", "a\nline"])
def test_a_path_that_commands_cannot_name_is_told(tmp_path, name):
    with pytest.raises(UsageError, match="VOICEHUB_AOT_CACHE_DIR"):
        toolchain.check_folders(tmp_path / name)

    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("variable", ["TMPDIR", "TORCHINDUCTOR_CACHE_DIR"])
def test_so_is_any_other_folder_of_the_compiler(tmp_path, monkeypatch, variable):
    odd = tmp_path / "a blank"
    odd.mkdir()
    monkeypatch.setenv(variable, str(odd))
    monkeypatch.setattr("tempfile.tempdir", None)

    with pytest.raises(UsageError, match=f"set {variable}"):
        toolchain.check_folders(tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(UsageError, match="set VOICEHUB_AOT_CACHE_DIR"):
        toolchain.check_folders(tmp_path / "file" / "cache")


def test_an_absent_home_is_told(monkeypatch):
    for variable in ("HOME", "VOICEHUB_AOT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))

    with pytest.raises(UsageError, match="set VOICEHUB_AOT_CACHE_DIR"):
        engine_cache.cache_dir()


def test_a_build_by_name_ends_before_anything_is_exported(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    start = time.perf_counter()

    with pytest.raises(AotError, match="no C\\+\\+ compiler"):
        build(toy.model(), OPTIONS, tmp_path / "toy.aot", toy.Quiet())

    assert time.perf_counter() - start < 5
    assert not (tmp_path / "toy.aot").exists()


def test_auto_goes_on_with_the_others(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")

    left, unable = able(OPTIONS.__class__(**{**vars(OPTIONS), "auto": True}), tmp_path, toy.Quiet())

    assert left.engines == ("onnxruntime",)
    assert "no C++ compiler" in unable["aoti"]


@pytest.mark.parametrize("mine", [None, "/tmp/mine"])
def test_inductors_folder_is_ours_only_while_a_build_runs(tmp_path, monkeypatch, mine):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if mine:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", mine)

    with engine_cache.inductor_cache(tmp_path):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == (mine or str(tmp_path / "inductor"))

    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == mine
