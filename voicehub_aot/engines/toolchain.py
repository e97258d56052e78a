"""Can this machine compile? One small library, compiled and loaded the way an engine's is, tells within seconds.

Without it a missing compiler, a folder that may not hold code or a blank in a path is met after a minute of exporting,
as an error of a compiler's command line.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from voicehub_aot.errors import EngineUnavailable, UsageError

PROBE = """
#include <new>
#include <type_traits>
#include <omp.h>
extern "C" int voicehub_aot_probe(int n) {
    int* values = new int[n];
    int sum = 0;
    #pragma omp parallel for reduction(+ : sum)
    for (int i = 0; i < n; i++) sum += values[i] = 1;
    delete[] values;
    return sum;
}
"""
LOAD = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).voicehub_aot_probe(1000) != 1000)"
SECONDS = 30.0  # for one small file; a compiler that takes longer waits for something
ODD = re.compile(r"""[\s'"\\]""")  # what splits a command line, or quotes in it
MORE_MEMORY = "for lack of memory most likely: build with --jobs 1, or give the build more memory"
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
# What decides, beside CXX, whether compiling works.
SURROUNDINGS = ("PATH", "TMPDIR", "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "LD_LIBRARY_PATH", "COMPILER_PATH")


@dataclass(frozen=True)
class Needs:
    """What an engine asks of the C++ compiler. flags: of its commands. headers: what its code includes."""

    flags: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        return "".join(f"#include <{header}>\n" for header in self.headers) + PROBE


def compiler() -> str:
    """The C++ compiler: $CXX, else g++. A relative path is made absolute: compilers run in other folders."""
    name = os.environ.get("CXX", "").strip() or "g++"
    return str(Path(name).absolute()) if os.sep in name and not ODD.search(name) else name


def compiler_version() -> str:
    """The first line of what the compiler says about itself, or "unknown"."""
    return _version(compiler(), _surroundings())


@cache
def _version(command: str, surroundings: tuple[str | None, ...]) -> str:
    try:
        status, said = _output([command, "--version"], tempfile.gettempdir())
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return "unknown"
    return (said.splitlines() or ["unknown"])[0] if status == 0 else "unknown"


def check_paths(folders: Sequence[Path]) -> None:
    """UsageError if a path that compile commands name, and that has no other name, cannot be part of a command.

    folders: of the engine's own libraries and headers.
    """
    temporary = Path(tempfile.gettempdir())
    places = {str(temporary): "set TMPDIR to another folder for temporary files"}
    with suppress(KeyError, OSError):  # a user without a name: Inductor takes the number
        name = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())  # as Inductor names its folder of headers
        places[name] = "it is the login name; set LOGNAME to another one"
    for folder in (*folders, Path(sysconfig.get_config_var("LIBDIR") or "/")):
        places.setdefault(str(folder), "install Python and torch in a folder without it")
    for name, advice in places.items():
        if found := ODD.search(name):
            raise UsageError(f"{name!r} has {found[0]!r} in it, which compile commands cannot name: {advice}")


def check_cache(folder: Path) -> None:
    """UsageError if finished engines cannot be written to `folder`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"{folder}: finished engines cannot be kept there ({error.strerror}); set VOICEHUB_AOT_CACHE_DIR"
        ) from error


def noexec(folder: Path) -> bool:
    """Whether `folder`, or the nearest one above that exists, lies on a file system that may not hold code."""
    folder = folder.absolute()
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    return bool(os.statvfs(existing).f_flag & os.ST_NOEXEC)


def check_may_run(folder: Path) -> None:
    """UsageError if compiled code in `folder` could not be run, so that nothing of it can be checked or timed."""
    if noexec(folder):
        raise UsageError(
            f"{folder}: is mounted noexec, so compiled code cannot be checked there; "
            "write to another place (--output, or TMPDIR for what is temporary) and move the artifact"
        )


def check_compiler(cache_folder: Path, needs: Needs) -> None:
    """EngineUnavailable, with what to do, if C++ cannot be compiled and loaded here. Failures are not cached."""
    _probe(compiler(), _inductor_folder(cache_folder), needs, _surroundings())


def _surroundings() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in SURROUNDINGS)


def _inductor_folder(cache_folder: Path) -> Path:
    """Where Inductor keeps its files: where the user says, else below our cache."""
    asked = os.environ.get(INDUCTOR_CACHE)
    return (Path(asked) if asked else cache_folder / "inductor").absolute()


@contextmanager
def inductor_cache(cache_folder: Path) -> Iterator[Path]:
    """Inductor's files lie in our cache, or where the user says, while the block runs; then all is as it was before.

    Yields the folder, under a name that commands can hold.

    Inductor reads the folder's name from the environment and writes it into commands, whatever is in it: a folder
    whose name has blanks or quotes gets another one for as long.
    """
    before = os.environ.get(INDUCTOR_CACHE)
    with plain_name(_inductor_folder(cache_folder)) as name:
        os.environ[INDUCTOR_CACHE] = str(name)
        try:
            yield name
        finally:
            os.environ.pop(INDUCTOR_CACHE, None)
            if before is not None:
                os.environ[INDUCTOR_CACHE] = before


@contextmanager
def plain_name(folder: Path) -> Iterator[Path]:
    """The folder, made if it is absent, under a name that commands can hold: its own, or else a temporary link."""
    folder.mkdir(parents=True, exist_ok=True)
    if not ODD.search(str(folder)):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="voicehub-aot-") as place:
        link = Path(place) / "cache"
        link.symlink_to(folder, target_is_directory=True)
        yield link


@cache
def _probe(command: str, folder: Path, needs: Needs, surroundings: tuple[str | None, ...]) -> None:
    if ODD.search(command):
        raise EngineUnavailable(
            f"CXX is {command!r}, and commands take one program without blanks or quotes; put a script or a link "
            "with a plain name there"
        )
    if shutil.which(command) is None:
        raise EngineUnavailable(
            f"no C++ compiler: {command!r} is not found or may not be run; install g++, or set CXX to a compiler. "
            "Building AOTInductor engines needs one, running them does not"
        )
    if _version(command, surroundings) == "unknown":
        raise EngineUnavailable(f"`{command} --version` fails, so it is not a C++ compiler; set CXX to one")
    try:
        with plain_name(folder) as plain, tempfile.TemporaryDirectory(prefix="probe-", dir=plain) as scratch:
            _compile_and_load(command, folder, needs, Path(scratch))
    except OSError as error:
        raise UsageError(
            f"{folder}: cannot be written ({error.strerror or error}); set VOICEHUB_AOT_CACHE_DIR or {INDUCTOR_CACHE}"
        ) from error


def _compile_and_load(command: str, folder: Path, needs: Needs, scratch: Path) -> None:
    source, library = scratch / "probe.cpp", scratch / "probe.so"
    source.write_text(needs.source, encoding="utf-8")
    build = [command, *needs.flags, "-shared", "-fPIC", "-fopenmp", str(source), "-o", str(library)]
    try:
        status, said = _output(build, scratch)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = f"no answer within {SECONDS:g} s" if isinstance(error, subprocess.TimeoutExpired) else error.strerror
        raise EngineUnavailable(f"the C++ compiler {command!r} does not work ({reason}); set CXX to one") from error
    if status or not library.is_file():
        lines = [line for line in said.splitlines() if line.strip()]
        reason = next((line for line in lines if "error" in line), (lines or [f"exit status {status}, no library"])[0])
        raise EngineUnavailable(
            f"the C++ compiler {command!r} cannot build what engines need, a shared library in C++20 with OpenMP and "
            f"torch's headers ({reason}); install g++ 11 or newer, or set CXX to such a compiler"
        )
    status, said = _output([sys.executable, "-I", "-S", "-c", LOAD, str(library)], scratch)
    if status:
        reason = (said.strip().splitlines() or [f"exit status {status}"])[-1]
        advice = f"the C++ compiler {command!r} does not make code for this machine; set CXX to one that does"
        if noexec(folder):
            advice = "it is mounted noexec; set VOICEHUB_AOT_CACHE_DIR to a folder that may hold code"
        raise EngineUnavailable(f"{folder}: compiled code cannot be loaded from there ({reason}): {advice}")


def _output(command: Sequence[str], place: Path | str) -> tuple[int, str]:
    """Exit status, and all that was printed. Raises TimeoutExpired, with nothing that it started left running.

    place: where it runs, and may leave what a compiler would not.
    """
    with tempfile.TemporaryFile() as printed:  # a pipe would be waited for as long as any descendant holds it
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, cwd=place, start_new_session=True
        )
        try:
            status = started.wait(SECONDS)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()
            raise
        printed.seek(0)
        return status, printed.read().decode(errors="replace")


def was_killed(error: BaseException | None) -> bool:
    """Whether this error comes from a process that the system ended: for lack of memory, as a rule."""
    while error is not None:
        if isinstance(error, subprocess.CalledProcessError) and error.returncode < 0:
            return True
        if "Killed signal" in str(error):  # gcc's word for a compiler pass that was killed
            return True
        error = error.__cause__ or error.__context__
    return False
