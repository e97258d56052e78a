"""What the command line shows: progress and logs on stderr, results on stdout, errors with their exit code.

A terminal gets live lines, a CI log gets plain ones. With --json, stdout holds one JSON document and nothing else.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from voicehub_aot.errors import AotError, InternalError, UsageError
from voicehub_aot.progress import Progress

INTERRUPTED = 130
# click's base of everything wrong with arguments. Newer typer carries its own click, and exports one descendant of it.
CLICK_ERROR: type[Exception] = typer.BadParameter.__mro__[2]


@cache
def stderr() -> Console:
    return Console(stderr=True, highlight=False)


class _Results(Console):
    """Where results go. A reader that goes away (head, say) ends the output, and not the command and its exit code."""

    def on_broken_pipe(self) -> None:
        _give_up_stdout()


@cache
def stdout() -> Console:
    return _Results(highlight=False)


class ConsoleProgress(Progress):
    """A build's progress: one line a stage and an engine; on a terminal a status line with the current case."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._status = stderr().status("starting") if stderr().is_terminal else None
        if self._status:
            self._status.start()

    def _line(self, text: str) -> None:
        stderr().print(f"[dim]{time.perf_counter() - self._start:7.1f} s[/]  {text}", soft_wrap=True)

    def stage(self, text: str) -> None:
        self._line(escape(text))
        self._update(text)

    def engine(self, name: str, state: str, seconds: float = 0.0) -> None:
        took = f" in {seconds:.1f} s" if seconds else ""
        self._line(f"  engine [bold]{name}[/]: {state}{took}")
        self._update(f"engine {name}: {state}")

    def case(self, name: str) -> None:
        self._update(name)

    def _update(self, text: str) -> None:
        if self._status:
            self._status.update(escape(text))

    def close(self) -> None:
        if self._status:
            self._status.stop()


def show_json(value: Any) -> None:
    """One document on stdout."""
    text = json.dumps(value, indent=2, allow_nan=False, default=str)
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _give_up_stdout()


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Columns of numbers stand right, all others left."""
    table = Table(title=escape(title), title_justify="left", header_style="bold")
    rows = [[escape(str(cell)) for cell in row] for row in rows]
    for number, column in enumerate(columns):
        numbers = all(row[number][:1].isdigit() or row[number] in ("", "-") for row in rows)
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    stdout().print(table)


def check_output(path: Path | None) -> None:
    """Before the work: UsageError if a file that the user named cannot lie there."""
    if path is None:
        return
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: is a folder, a device or a pipe, which a file cannot replace; give another place")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: lies in no folder that exists; give a file in one that does")
    if not os.access(path.resolve().parent, os.W_OK):
        raise UsageError(f"{path}: its folder cannot be written; give another place")


def check_reports(artifact: Path, paths: Sequence[Path | None]) -> None:
    """The same of several files about an artifact: they are different, and none lies inside it."""
    named = [path for path in paths if path is not None]
    for path in named:
        check_output(path)
        if path.resolve().is_relative_to(artifact.resolve()):
            raise UsageError(f"{path}: lies in {artifact}, which must stay as it was built; give another place")
    if len({path.resolve() for path in named}) < len(named):
        raise UsageError(f"{', '.join(map(str, named))}: two reports name one file; give each its own")


def say(text: str) -> None:
    """A remark beside the result."""
    stderr().print(text, markup=False, soft_wrap=True)


def set_up_logging(verbose: bool) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, stream=sys.stderr, format="%(message)s")


def run(command: Callable[[], Any]) -> int:
    """Run a click command and return the documented exit code; errors become one line on stderr."""
    try:
        _open_streams()
        result = command()
        if sys.stdout is not None:
            sys.stdout.flush()  # a full disk behind a redirected result is told now, not when the interpreter ends
    except BaseException as error:
        if os.environ.get("VOICEHUB_AOT_DEBUG"):
            traceback.print_exc()
        code = _failed(error)
        _give_up_stdout()
        return code
    if result == INTERRUPTED:  # newer typer turns the interrupt itself into this code
        stderr().print("interrupted")
    return result if isinstance(result, int) else 0


def _open_streams() -> None:
    """Streams that take every text; without stdout there is no place for a result."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115  (open as long as the process)
    if sys.stdout is None:
        raise UsageError("standard output is closed; redirect it, to /dev/null if the result does not matter")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal's encoding lacks


def _give_up_stdout() -> None:
    """What cannot be written to stdout is let go, or the interpreter tries again at its end and complains."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _of_the_system(error: BaseException) -> BaseException:
    """What the system, not we, got wrong, as the error that is documented for it."""
    match error:
        case AotError() | BrokenPipeError() | InternalError():
            return error
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = error.filename or "a file"
            text = f"{where}: no space left; free some, or give another --output, cache folder or TMPDIR"
        case OSError():
            where = f"{error.filename}: " if error.filename else ""
            text = f"{where}{error.strerror or error}; check the path, its permissions and the file system"
        case UnicodeError():
            text = f"a text or file name is not valid in its encoding ({error}); wanted UTF-8"
        case RecursionError():
            text = "an input is nested too deeply to be read; wanted a plain file"
        case MemoryError():
            text = "there is not enough memory for this; use smaller buckets, fewer jobs or a larger machine"
        case _:
            return error
    return UsageError(text)


def _failed(error: BaseException) -> int:
    error = _of_the_system(error)
    match error:
        case typer.Exit():
            return int(error.exit_code)
        case KeyboardInterrupt() | typer.Abort():
            stderr().print("interrupted")
            return INTERRUPTED
        case CLICK_ERROR():
            if message := error.format_message():  # type: ignore[attr-defined]  # empty where help was shown instead
                _report("UsageError", message)
            return 2
        case AotError() | InternalError():
            _report(type(error).__name__, str(error))
            return error.exit_code
        case BrokenPipeError():  # the reader of our output went away: head, say
            return 0
    _report("InternalError", f"{type(error).__name__}: {error}; this is our bug, please report it")
    stderr().print("VOICEHUB_AOT_DEBUG=1 prints the traceback")
    return InternalError.exit_code


def after_result(error: AotError) -> typer.Exit:
    """For an error that comes when the result is shown: told on stderr alone, so stdout keeps its one document."""
    _tell(type(error).__name__, str(error))
    return typer.Exit(error.exit_code)


def _report(kind: str, message: str) -> None:
    if "--json" in sys.argv and sys.stdout is not None:
        with suppress(OSError):  # it may be stdout that cannot be written
            show_json({"error": {"type": kind, "message": message}})
    _tell(kind, message)


def _tell(kind: str, message: str) -> None:
    stderr().print(f"[bold red]error[/] ({kind}): ", end="")
    stderr().print(message, markup=False, soft_wrap=True)  # a path broken at column 80 cannot be searched for
