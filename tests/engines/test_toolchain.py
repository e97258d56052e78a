"""What a build needs of the machine is found within seconds, and said in one line."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import toy

from voicehub_aot import engines
from voicehub_aot.cli import inspection
from voicehub_aot.compiler import cache, compile
from voicehub_aot.compiler.assemble import Parts
from voicehub_aot.compiler.build import _compile, able, build
from voicehub_aot.compiler.compile import compile_all
from voicehub_aot.compiler.export import export_region
from voicehub_aot.compiler.jobs import plan_jobs
from voicehub_aot.compiler.options import Options
from voicehub_aot.compiler.split import split
from voicehub_aot.engines import StageCode, aoti, toolchain
from voicehub_aot.errors import EngineUnavailable, UsageError
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.schedule import linear
from voicehub_aot.spec.solver import euler
from voicehub_aot.spec.target import default_target, parse_target

TARGET = parse_target(default_target())
OPTIONS = Options(Buckets(axes={"frames": (8,)}), (euler(linear(2)),), TARGET, engines=("aoti", "onnxruntime"))
INDUCTOR = toolchain.INDUCTOR_CACHE
ODD_NAMES = ["a blank", "a'quote", 'a"quote', "a\\backslash", "a\nline", "all 'of\" them\\"]


def script(folder, text):
    file = folder / "compiler"
    file.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def noexec(tmp_path, monkeypatch):
    """A folder that may not hold code: really one where this user may mount, else one that the system calls so."""
    place = tmp_path / "noexec"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "noexec,size=64m", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False) if shutil.which("mount") else None
    if done is not None and done.returncode == 0:
        yield place
        subprocess.run(["umount", "--lazy", str(place)], check=True)
        return
    print(f"no mount here ({done.stderr.strip() if done else 'no such program'}): noexec is simulated")
    real, printed = os.statvfs, toolchain._output

    def statvfs(path):
        inside = Path(path).is_relative_to(place)
        return SimpleNamespace(f_flag=os.ST_NOEXEC) if inside else real(path)

    def output(command, place):
        inside = toolchain.LOAD in command and Path(command[-1]).resolve().is_relative_to(place)
        return (1, "failed to map segment from shared object") if inside else printed(command, place)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(toolchain, "_output", output)
    yield place


# --- the compiler


def test_this_machine_can_compile_which_is_found_out_once(tmp_path):
    aoti.check_build(tmp_path, TARGET)

    start = time.perf_counter()
    aoti.check_build(tmp_path, TARGET)

    assert time.perf_counter() - start < 0.1


VERSION = 'case "$*" in --version) exec g++ --version;; esac\n'
LAST = "for last; do true; done\n"  # the library to write
WITHOUT = VERSION + 'case "$*" in *{0}*) echo "error: unknown option {0}" >&2; exit 1;; esac\nexec g++ "$@"'
BROKEN = {
    "absent": "no-such-compiler",
    "a folder": "/tmp",
    "a command line": "g++ -O0",
    "fails": "exit 3",
    "says no version": 'case "$*" in --version) exit 1;; esac\nexec g++ "$@"',
    "says nothing and writes nothing": "exit 0",
    "another program": "echo hello",
    "is killed": VERSION + "kill -9 $$",
    "writes garbage": VERSION + LAST + 'echo garbage > "$last"',
    "writes half a library": VERSION + LAST + 'g++ "$@" && truncate -s 9000 "$last"',
    "cannot do OpenMP": WITHOUT.format("-fopenmp"),
    "knows an older C++": WITHOUT.format("-std=c++20"),
    "knows no such processor": WITHOUT.format("-march"),
    "finds no headers": VERSION + 'for a; do case "$a" in -I*) ;; *) set -- "$@" "$a";; esac; shift; done; g++ "$@"',
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_compiler_is_told_with_what_to_do(tmp_path, monkeypatch, kind):
    value = BROKEN[kind]
    plain = kind in ("absent", "a folder", "a command line")
    monkeypatch.setenv("CXX", value if plain else script(tmp_path, value))
    start = time.perf_counter()

    with pytest.raises(EngineUnavailable, match="CXX") as caught:
        aoti.check_build(tmp_path / "cache", TARGET)

    assert caught.value.exit_code == 4
    assert "\n" not in str(caught.value)
    assert time.perf_counter() - start < 20


def test_a_file_that_may_not_be_run_is_no_compiler(tmp_path, monkeypatch):
    Path(script(tmp_path, "exit 0")).chmod(0o644)
    monkeypatch.setenv("CXX", str(tmp_path / "compiler"))

    with pytest.raises(EngineUnavailable, match="may not be run"):
        aoti.check_build(tmp_path / "cache", TARGET)


def test_a_compiler_that_waits_is_not_waited_for_nor_is_what_it_started(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", script(tmp_path, VERSION + f"sleep 300 & echo $! > {tmp_path}/child; wait"))
    monkeypatch.setattr(toolchain, "SECONDS", 1.0)
    start = time.perf_counter()

    with pytest.raises(EngineUnavailable, match="no answer within 1 s"):
        aoti.check_build(tmp_path / "cache", TARGET)

    assert time.perf_counter() - start < 20
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_a_compiler_in_this_folder_is_found_from_others(tmp_path, monkeypatch):
    script(tmp_path, VERSION + 'exec g++ "$@"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "./compiler")

    aoti.check_build(tmp_path / "cache", TARGET)

    assert toolchain.compiler() == str(tmp_path / "compiler")
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "compiler"}


def test_a_compiler_that_is_empty_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", " ")

    aoti.check_build(tmp_path, TARGET)

    assert toolchain.compiler() == "g++"


def test_what_was_found_holds_for_its_surroundings_only(tmp_path, monkeypatch):
    aoti.check_build(tmp_path, TARGET)
    known = toolchain.compiler_version()
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(EngineUnavailable, match=r"no C\+\+ compiler"):
        aoti.check_build(tmp_path, TARGET)

    assert known != toolchain.compiler_version() == "unknown"


# --- folders


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_cache_of_any_name_is_compiled_in(tmp_path, monkeypatch, name):
    monkeypatch.delenv(INDUCTOR, raising=False)

    aoti.check_build(tmp_path / name, TARGET)

    with toolchain.inductor_cache(tmp_path / name):
        place = Path(os.environ[INDUCTOR])
        assert not toolchain.ODD.search(str(place))
        assert place.samefile(tmp_path / name / "inductor")
    assert not place.exists()
    assert INDUCTOR not in os.environ


def test_so_is_one_given_from_an_odd_folder(tmp_path, monkeypatch):
    (tmp_path / "a blank").mkdir()
    monkeypatch.chdir(tmp_path / "a blank")

    with toolchain.inductor_cache(Path("cache")):
        assert " " not in os.environ[INDUCTOR]


@pytest.mark.parametrize("name", ["plain", "a blank"])
def test_inductors_own_setting_is_heeded_and_left_as_it_was(tmp_path, monkeypatch, name):
    monkeypatch.setenv(INDUCTOR, str(tmp_path / name))

    with toolchain.inductor_cache(tmp_path / "cache"):
        assert Path(os.environ[INDUCTOR]).samefile(tmp_path / name)

    assert os.environ[INDUCTOR] == str(tmp_path / name)
    assert not (tmp_path / "cache").exists()


def test_an_odd_folder_for_temporary_files_is_told(tmp_path, monkeypatch):
    odd = tmp_path / "a blank"
    odd.mkdir()
    monkeypatch.setenv("TMPDIR", str(odd))
    monkeypatch.setattr(tempfile, "tempdir", None)

    with pytest.raises(UsageError, match="set TMPDIR"):
        aoti.check_build(tmp_path / "cache", TARGET)


def test_so_is_an_odd_login_name_or_place_of_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "a blank" / "torch" / "__init__.py"))
    with pytest.raises(UsageError, match="install Python and torch"):
        aoti.check_build(tmp_path / "cache", TARGET)

    monkeypatch.undo()
    monkeypatch.setenv("LOGNAME", "some one")
    with pytest.raises(UsageError, match="set LOGNAME"):
        aoti.check_build(tmp_path / "cache", TARGET)


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(UsageError, match="set VOICEHUB_AOT_CACHE_DIR"):
        aoti.check_build(tmp_path / "file" / "cache", TARGET)


def test_an_absent_home_is_told(monkeypatch, tmp_path):
    for variable in ("HOME", "VOICEHUB_AOT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))

    with pytest.raises(UsageError, match="set VOICEHUB_AOT_CACHE_DIR"):
        cache.cache_dir()

    (tmp_path / "openvino.py").write_text("raise RuntimeError('no home')", encoding="utf-8")  # as openvino does then
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "openvino", raising=False)
    facts = inspection.doctor()
    assert "set VOICEHUB_AOT_CACHE_DIR" in facts["cache"]
    assert "set HOME" in facts["build with openvino"]


@pytest.mark.parametrize("variable", [None, INDUCTOR])
def test_a_cache_that_may_not_hold_code_is_told(noexec, tmp_path, monkeypatch, variable):
    monkeypatch.delenv(INDUCTOR, raising=False)  # torch sets it wherever it compiles
    if variable:
        monkeypatch.setenv(variable, str(noexec))

    with pytest.raises(EngineUnavailable, match="mounted noexec; set VOICEHUB_AOT_CACHE_DIR") as caught:
        aoti.check_build(tmp_path / "cache" if variable else noexec / "cache", TARGET)

    assert str(noexec) in str(caught.value)


# --- a build


@pytest.fixture(scope="module")
def parts():
    graph, symbols = export_region(toy.region())
    return split(graph, toy.SPEC, symbols)


def test_code_is_compiled_in_an_odd_cache_beside_temporary_files_that_may_not_be_code(
    noexec, tmp_path, monkeypatch, parts
):
    import torch._inductor.codecache  # (it takes the folder of its headers from TMPDIR once)

    cache = tmp_path / "an odd 'name"
    monkeypatch.delenv(INDUCTOR, raising=False)
    monkeypatch.setenv("TMPDIR", str(noexec))
    monkeypatch.setattr(tempfile, "tempdir", None)
    options = replace(OPTIONS, engines=("aoti",), weights_mode="shared", cache=cache)
    before = dict(os.environ)

    written = []
    real = torch._inductor.aot_compile

    def recorded(*args, **options):
        written.extend(file for file in real(*args, **options) if isinstance(file, str))
        return written

    monkeypatch.setattr(torch._inductor, "aot_compile", recorded)
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):  # else three more files are compiled to see
        (step,) = compile_all([plan_jobs(parts, options, "aoti")[1]], toy.SPEC, options, cache, toy.Quiet())

    assert (step.place / aoti.LIBRARY).is_file()
    assert step.place.is_relative_to(cache)
    assert dict(os.environ) == before
    (place,) = {Path(file).parent for file in written}  # nobody else's: another process may compile the same code
    assert place.name.startswith("stage-")
    assert not place.exists()
    shutil.copytree(step.place / "data", noexec / "engine" / "data")
    source = engines.Source(noexec, "engine", {f"engine/{aoti.LIBRARY}": "0"}, (), (), {}, "step", outside=True)
    with pytest.raises(EngineUnavailable, match=rf"{noexec} is mounted noexec; move"):
        aoti.open_stage(source, 1)


def test_an_output_that_may_not_hold_code_is_told_before_anything_is_exported(noexec, tmp_path):
    start = time.perf_counter()

    with pytest.raises(UsageError, match="is mounted noexec"):
        build(toy.model(), OPTIONS, noexec / "new" / "toy.aot", toy.Quiet())

    assert time.perf_counter() - start < 20
    left, unable = able(replace(OPTIONS, auto=True), tmp_path, noexec / "toy.aot", toy.Quiet())
    assert left.engines == ("onnxruntime",)
    assert "noexec" in unable["aoti"]
    assert able(replace(OPTIONS, parity=False), tmp_path, noexec / "toy.aot", toy.Quiet()) == (
        replace(OPTIONS, parity=False), {}
    )  # fmt: skip


def test_a_build_by_name_ends_before_anything_is_exported(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    start = time.perf_counter()

    with pytest.raises(EngineUnavailable, match=r"no C\+\+ compiler"):
        build(toy.model(), OPTIONS, tmp_path / "toy.aot", toy.Quiet())

    assert time.perf_counter() - start < 5
    assert not (tmp_path / "toy.aot").exists()


def test_auto_goes_on_with_the_others_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    told = []
    progress = SimpleNamespace(stage=told.append)

    left, unable = able(replace(OPTIONS, auto=True), tmp_path, tmp_path / "toy.aot", progress)

    assert left.engines == ("onnxruntime",)
    assert "no C++ compiler" in unable["aoti"]
    assert told == [f"left out aoti: {unable['aoti']}"]
    with pytest.raises(EngineUnavailable, match=r"no C\+\+ compiler"):
        able(replace(OPTIONS, auto=True, engines=("aoti",)), tmp_path, tmp_path / "toy.aot", progress)


def test_doctor_says_of_each_engine_whether_it_can_be_built(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")

    facts = inspection.doctor()

    assert {f"build with {name}" for name in engines.ENGINES} <= set(facts)
    assert "no C++ compiler: 'no-such-compiler'" in facts["build with aoti"]
    assert facts["build with onnxruntime"] == "ok"


# --- processes that the system kills


class Fatal:
    """Kills whoever unpickles it."""

    def __reduce__(self):
        return signal.raise_signal, (signal.SIGKILL,)


def waiting(payload):
    code = StageCode("step", None, (), (), ())
    job = SimpleNamespace(name="aoti step", engine="aoti")
    return [(compile.Compiled(job, payload, Path("place")), code)] * 2


def test_a_compile_worker_that_was_killed_is_told(monkeypatch):
    monkeypatch.setattr(torch.export, "save", lambda *_: None)

    with pytest.raises(EngineUnavailable, match=r"aoti step.* was killed, for lack of memory.*--jobs 1"):
        list(compile._compile_waiting(waiting(Fatal()), replace(OPTIONS, jobs=2), toy.Quiet()))


def test_so_is_one_that_was_killed_while_others_are_started(monkeypatch):
    def submit(*_):
        raise compile.BrokenProcessPool("a process died")

    monkeypatch.setattr(torch.export, "save", lambda *_: None)
    monkeypatch.setattr(compile.ProcessPoolExecutor, "submit", submit)

    with pytest.raises(EngineUnavailable, match="was killed"):
        list(compile._compile_waiting(waiting({}), replace(OPTIONS, jobs=2), toy.Quiet()))


def test_auto_goes_on_without_an_engine_whose_compiler_was_killed(monkeypatch, tmp_path, parts):
    def killed(jobs, *_):
        if jobs[0].engine == "aoti":
            raise EngineUnavailable("killed")
        return list(jobs)

    monkeypatch.setattr("voicehub_aot.compiler.build.compile_all", killed)
    options = replace(OPTIONS, auto=True, weights_mode="shared")
    whole = Parts(toy.model(), options, parts, {}, None)

    compiled, left_out = _compile(whole, tmp_path, 0.0, toy.Quiet())

    assert {job.engine for job in compiled} == {"onnxruntime"}
    assert left_out == {"aoti": "killed"}
    with pytest.raises(EngineUnavailable, match="killed"):
        _compile(replace(whole, options=replace(options, auto=False)), tmp_path, 0.0, toy.Quiet())


@pytest.mark.parametrize(
    "error",
    [
        subprocess.CalledProcessError(-9, ["g++"]),
        RuntimeError("C++ compile error\ng++: fatal error: Killed signal terminated program cc1plus"),
    ],
    ids=["compiler", "its pass"],
)
def test_a_compiler_that_was_killed_is_told(tmp_path, monkeypatch, error):
    def killed(*_, **__):
        raise RuntimeError("InductorError") from error

    monkeypatch.setattr(torch._inductor, "aot_compile", killed)
    code = StageCode("step", SimpleNamespace(module=lambda check_guards: None), (), (), (), cache=tmp_path)

    with pytest.raises(EngineUnavailable, match="step: the C\\+\\+ compiler was killed, for lack of memory"):
        aoti.compile_stage(code, "shared", TARGET, tmp_path / "engine")


def test_the_compiler_that_was_tried_is_the_one_that_is_used_and_openssl_is_not_needed(tmp_path, monkeypatch):
    asked = []

    def compiled(*_, options):
        asked.append(options)
        raise RuntimeError("enough")

    monkeypatch.setattr(torch._inductor, "aot_compile", compiled)
    monkeypatch.setenv("CXX", "/usr/bin/my-compiler")
    monkeypatch.setenv("PATH", str(tmp_path))
    code = StageCode("step", SimpleNamespace(module=lambda check_guards: None), (), (), (), cache=tmp_path)

    with pytest.raises(Exception, match="enough"):
        aoti.compile_stage(code, "shared", TARGET, tmp_path / "engine")

    assert asked[0]["cpp.cxx"] == ("/usr/bin/my-compiler",)
    assert asked[0]["aot_inductor.precompile_headers"] is False
