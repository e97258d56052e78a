"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of tables.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Logs on stderr.")]
Artifact = Annotated[Path, typer.Argument(help="An artifact directory.")]
Threads = Annotated[int | None, typer.Option(help="Compute threads; default what affinity and cgroup allow.")]
