"""The reports that a command writes beside its result: all of them or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from voicehub_aot.cli import console


def check(artifact: Path, junit: Path | None, html: Path | None, report: Path | None) -> None:
    """Before the work: the places can be written, and an HTML page can be made if one is wanted."""
    from voicehub_aot.artifacts import pages

    console.check_reports(artifact, (junit, html, report))
    if html:
        pages.html_tools()


def write(texts: Mapping[Path | None, Callable[[], str]]) -> None:
    """By place, what makes the report there; None = not wanted."""
    from voicehub_aot.artifacts import store

    store.write_whole({path: text() for path, text in texts.items() if path is not None})
