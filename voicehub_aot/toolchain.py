"""Can this machine compile? One small library, compiled and loaded the way an engine's is, tells within seconds.

Without it a missing compiler, a folder that may not hold code or a blank in a path is met after a minute of exporting,
as an error of a compiler's command line.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

from voicehub_aot.errors import EngineUnavailable, UsageError

SOURCE = """
#include <omp.h>
#include <vector>
extern "C" int voicehub_aot_probe(int n) {
    std::vector<int> values(n, 1);
    int sum = 0;
    #pragma omp parallel for reduction(+ : sum)
    for (int i = 0; i < n; i++) sum += values[i];
    return sum;
}
"""
SECONDS = 60.0  # for one small file; a compiler that takes longer waits for something
ODD = re.compile(r"""[\s'"\\$`;&|<>()*?#!]""")  # what a command line would not take for part of a path


def compiler() -> str:
    """The C++ compiler that Inductor will call: $CXX, else g++."""
    return os.environ.get("CXX") or "g++"


def check_folders(cache_folder: Path) -> None:
    """UsageError if the cache cannot be written, or a path that compile commands name cannot be part of one."""
    places = {
        "the cache folder; set VOICEHUB_AOT_CACHE_DIR": cache_folder,
        "the folder for temporary files; set TMPDIR": Path(tempfile.gettempdir()),
        "the Python environment; install it elsewhere": Path(sysconfig.get_path("purelib")),
    }
    if own := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        places["Inductor's cache folder; set TORCHINDUCTOR_CACHE_DIR"] = Path(own)
    for what, path in places.items():
        if found := ODD.search(str(path)):
            raise UsageError(f"{str(path)!r} has {found[0]!r} in it, which compile commands cannot name: it is {what}")
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache_folder):
            pass
    except OSError as error:
        raise UsageError(
            f"{cache_folder}: finished engines cannot be kept there ({error.strerror}); set VOICEHUB_AOT_CACHE_DIR"
        ) from error


def check_compiler(cache_folder: Path) -> None:
    """EngineUnavailable, with what to do, if C++ cannot be compiled and loaded here. Known failures are not cached."""
    _probe(compiler(), os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(cache_folder))


@cache
def _probe(command: str, folder: str) -> None:
    words = shlex.split(command)
    if not words or shutil.which(words[0]) is None:
        raise EngineUnavailable(
            f"no C++ compiler: {command!r} is not found or may not be run; install g++, or set CXX to a compiler. "
            "Building AOTInductor engines needs one, running them does not"
        )
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="probe-", dir=folder) as scratch:
        source, library = Path(scratch) / "probe.cpp", Path(scratch) / "probe.so"
        source.write_text(SOURCE, encoding="utf-8")
        build = [*words, "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-O1", str(source), "-o", str(library)]
        try:
            done = subprocess.run(build, capture_output=True, text=True, errors="replace", check=False, timeout=SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineUnavailable(f"the C++ compiler {command!r} does not work ({error}); set CXX to one") from error
        if done.returncode or not library.is_file():
            reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}, no library"])[0]
            raise EngineUnavailable(
                f"the C++ compiler {command!r} cannot build a shared library with OpenMP ({reason}); "
                "install g++ with its standard library, or set CXX to one that has them"
            )
        try:
            total = ctypes.CDLL(str(library)).voicehub_aot_probe(1000)
        except OSError as error:
            raise EngineUnavailable(
                f"{folder}: compiled code cannot be loaded from there ({error}); is it mounted noexec? "
                "Set VOICEHUB_AOT_CACHE_DIR to a folder that may hold code"
            ) from error
        if total != 1000:
            raise EngineUnavailable(f"the C++ compiler {command!r} makes code that computes {total} for 1000; set CXX")


def describe(cache_folder: Path) -> str:
    """What `doctor` prints: "ok", or what is wrong."""
    try:
        check_folders(cache_folder)
        check_compiler(cache_folder)
    except (EngineUnavailable, UsageError) as error:
        return str(error)
    return "ok: compiles and loads C++ with OpenMP"
