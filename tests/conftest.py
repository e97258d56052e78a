"""Artifacts that many tests read, built once a session. A test that damages one works on a copy."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from voicehub_aot import adapters
from voicehub_aot.cli import commands, console
from voicehub_aot.compiler.build import build
from voicehub_aot.compiler.models import resolve
from voicehub_aot.compiler.options import Options
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.target import default_target, parse_target

CACHE = "VOICEHUB_AOT_CACHE_DIR"


@pytest.fixture(scope="session", autouse=True)
def engine_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where finished engines are kept: the developer's choice, who then waits once, or else this session's own.

    Workers that share a session's tests share its engines.
    """
    own = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        if CACHE not in os.environ:
            session = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
            patch.setenv(CACHE, str(session / "engine-cache"))
        yield Path(os.environ[CACHE])


def built(
    output: Path,
    model: str,
    frames: tuple[int, ...],
    steps: tuple[int, ...],
    weights_mode: Literal["packed", "shared"],
    shapes: Literal["dynamic", "static"],
) -> Path:
    """A tiny model with synthetic weights, parity proven."""
    adapter = adapters.load(model)
    options = Options(
        buckets=Buckets(axes={"frames": frames}),
        programs=tuple(adapter.program(n) for n in steps),
        target=parse_target(default_target()),
        weights_mode=weights_mode,
        shapes=shapes,
    )
    build(resolve(model, "tiny", "synthetic"), options, output)
    return output


@pytest.fixture(scope="session")
def supertonic_packed(tmp_path_factory: pytest.TempPathFactory, engine_cache: Path) -> Path:
    """One engine for every size, guidance, programs euler-3 and euler-2."""
    output = tmp_path_factory.mktemp("artifacts") / "packed.aot"
    return built(output, "supertonic", (8, 16, 24), (3, 2), "packed", "dynamic")


@pytest.fixture(scope="session")
def supertonic_shared(tmp_path_factory: pytest.TempPathFactory, engine_cache: Path) -> Path:
    """An engine a bucket over one weight file, program euler-3."""
    output = tmp_path_factory.mktemp("artifacts") / "shared.aot"
    return built(output, "supertonic", (8, 16), (3,), "shared", "static")


@pytest.fixture(scope="session")
def f5_shared(tmp_path_factory: pytest.TempPathFactory, engine_cache: Path) -> Path:
    """Another model, whose conditioning has frames and whose text is token ids; program euler-4."""
    output = tmp_path_factory.mktemp("artifacts") / "f5.aot"
    return built(output, "f5tts", (16, 32), (4,), "shared", "dynamic")


@dataclass(frozen=True)
class Ran:
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout; an error if there is anything else."""
        return json.loads(self.out)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ran]]:
    """Runs `voicehub-aot ARGUMENTS` in this process, through its entry point."""

    monkeypatch.setenv("COLUMNS", "200")  # tables as on a wide terminal
    console.stdout.cache_clear()

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["voicehub-aot", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            commands.main()
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return Ran(int(left.value.code or 0), printed.out, printed.err)

    yield run
    console.stdout.cache_clear()
