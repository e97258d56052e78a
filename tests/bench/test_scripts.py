"""Every benchmark starts, wherever it is called from, and explains itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
SCRIPTS = sorted(p.name for p in BENCH.glob("*.py") if "(__doc__" in p.read_text() or "=__doc__" in p.read_text())


def test_scripts_are_found():
    assert {
        "bench_step.py",
        "bench_peers.py",
        "bench_request.py",
        "bench_cold.py",
        "bench_artifact.py",
        "demo.py",
    } <= set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_says_how_to_run_it(name, tmp_path):
    variables = {**os.environ, "PYTHONSAFEPATH": "1"}  # as under make

    done = subprocess.run(
        [sys.executable, BENCH / name, "--help"],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert f"usage: {name}" in done.stdout
