"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of tables.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Logs on stderr.")]
Artifact = Annotated[Path, typer.Argument(help="An artifact directory.")]
Junit = Annotated[Path | None, typer.Option(help="Write a JUnit report here.")]
Report = Annotated[Path | None, typer.Option(help="Write the JSON report here.")]
Guidance = Annotated[list[str] | None, typer.Option(help="Guidance scale, 0 = none; or BRANCH=SCALE, repeated.")]
Threads = Annotated[int | None, typer.Option(help="Compute threads; default what affinity and cgroup allow.")]


def parse_program(text: str | None) -> str | int | None:
    """A program as --program names it: digits are a step count."""
    return int(text) if text and text.isdecimal() else text
