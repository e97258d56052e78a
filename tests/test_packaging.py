"""The wheel, as somebody else installs it: everything inside, and working away from the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "voicehub_aot": "voicehub_aot",
    "adapters": "voicehub_aot/adapters",
    "kernels": "voicehub_aot/kernels",
    "artifacts": "voicehub_aot/artifacts",
}
DATA = {
    "voicehub_aot/py.typed",
    "voicehub_aot/artifacts/page.css.jinja",
    "voicehub_aot/artifacts/quality.html.jinja",
    "voicehub_aot/artifacts/quality.schema.json",
    "voicehub_aot/artifacts/report.html.jinja",
    "voicehub_aot/artifacts/report.schema.json",
}


def run(*command, cwd):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: setuptools would put its leftovers, and find older ones, in the checkout."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        shutil.copy(ROOT / file, source)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", output, source, cwd=output)
    (path,) = output.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """bin/ of a virtual environment with the wheel, and third-party packages lent by the running one."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin/python", "--isolated")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    # A folder named in a .pth file is searched, its own .pth files are not read: an editable install stays out.
    (site_packages / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_the_wheel_holds_every_module_and_data_file(wheel):
    sources = {
        f"{inside}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, inside in FOLDERS.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert held == sources | DATA


def test_every_package_has_its_init(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    assert {f"{Path(name).parent}/__init__.py" for name in names if name.endswith(".py")} <= names


def test_the_wheel_carries_its_licence_and_entry_point(wheel):
    with zipfile.ZipFile(wheel) as archive:
        texts = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}

    assert "Apache License" in texts["LICENSE"]
    assert "voicehub-aot = voicehub_aot.cli.commands:main" in texts["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in texts["METADATA"]


def test_the_installed_command_runs_away_from_the_checkout(installed, tmp_path):
    where = run(installed / "python", "-c", "import voicehub_aot; print(voicehub_aot.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)

    models = run(installed / "voicehub-aot", "models", cwd=tmp_path)

    adapters = [p.parent.name for p in (ROOT / "adapters").glob("[!_]*/__init__.py")]
    assert adapters
    assert [name for name in adapters if name not in models] == []


def test_the_installed_report_finds_its_template(installed, tmp_path):
    script = """
from voicehub_aot.artifacts.report import ParityReport, html
facts = dict(model="m", config="c", checkpoint="k", target="t", weights_mode="packed", versions={})
print(html(ParityReport(**facts)))
"""
    assert "FAILED: parity of m c" in run(installed / "python", "-c", script, cwd=tmp_path)
