"""The file system and the terminal as they are: permissions, links, full disks, closed streams, odd names."""

import ast
import errno
import functools
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file

from voicehub_aot.artifacts import store
from voicehub_aot.cli import console, settings
from voicehub_aot.compiler import models
from voicehub_aot.errors import UsageError

ROOT = Path(__file__).parents[2]
CLI = [sys.executable, "-c", "from voicehub_aot.cli.commands import main; main()"]


def mode_of(path):
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_tensors_have_the_permissions_of_any_new_file(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        store.save_tensors({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    finally:
        os.umask(before)

    assert mode_of(tmp_path / "a.safetensors") == mode
    assert load_file(tmp_path / "a.safetensors")["a"].tolist() == [1.0, 1.0]


def test_every_file_of_an_artifact_can_be_read_by_a_service(supertonic_packed):
    unreadable = [p for p in supertonic_packed.rglob("*") if p.is_file() and not p.stat().st_mode & 0o044]

    assert unreadable == []


def test_a_full_disk_is_told_as_such(tmp_path, monkeypatch):
    def full(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(store, "save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        store.save_tensors({"a": torch.ones(2)}, tmp_path / "a.safetensors")

    assert caught.value.errno == errno.ENOSPC


def test_several_files_are_written_all_or_none(tmp_path):
    (tmp_path / "known.json").write_text("before", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    contents = {tmp_path / "known.json": "{}", tmp_path / "new.xml": "<a/>", tmp_path / "folder": "text"}

    with pytest.raises(UsageError, match="folder: cannot be written"):
        store.write_whole(contents)

    assert (tmp_path / "known.json").read_text(encoding="utf-8") == "before"
    assert {p.name for p in tmp_path.iterdir()} == {"folder", "known.json"}


def test_nothing_is_written_if_the_writing_is_interrupted(tmp_path, monkeypatch):
    renamed = []

    def replace(self, target):
        renamed.append(target)
        if len(renamed) == 2:
            raise KeyboardInterrupt
        self.rename(target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        store.write_whole({tmp_path / "a.json": "{}", tmp_path / "b.xml": "<a/>"})

    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_a_link_stays_one_and_a_long_name_is_no_hindrance(tmp_path):
    (tmp_path / "link").symlink_to("real")

    store.write_whole({tmp_path / "link": "here", tmp_path / ("x" * 250): "there"})

    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text(encoding="utf-8") == "here"
    assert (tmp_path / ("x" * 250)).read_text(encoding="utf-8") == "there"


def test_a_report_in_a_place_that_cannot_be_written_leaves_no_other(tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        store.write_whole({tmp_path / "a.json": "{}", tmp_path / "absent/b.xml": "<a/>"})

    assert list(tmp_path.iterdir()) == []


def write(output, replace=False):
    with store.writing(output, replace) as folder:
        (folder / "file").write_text("here", encoding="utf-8")


def test_an_output_that_is_a_link_writes_what_it_points_to(tmp_path):
    (tmp_path / "link").symlink_to("real")

    write(tmp_path / "link")
    write(tmp_path / "link", replace=True)

    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real/file").is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]


@pytest.mark.parametrize("replace", [False, True])
def test_an_output_that_is_a_file_is_kept(tmp_path, replace):
    (tmp_path / "file.aot").write_text("mine", encoding="utf-8")

    with pytest.raises(UsageError, match="is a file, and an artifact is a folder"):
        write(tmp_path / "file.aot", replace)

    assert (tmp_path / "file.aot").read_text(encoding="utf-8") == "mine"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("output", ["/proc", "x" * 250, "x" * 300, "/proc/self/absent.aot"])
def test_a_place_where_nothing_can_be_written_is_named(tmp_path, output):
    with pytest.raises(UsageError, match=r"give (another --output|a folder inside it)"):
        write(tmp_path / output, replace=True)


def test_a_circle_of_links_is_named(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")

    with pytest.raises(UsageError, match="cannot be written"):
        write(tmp_path / "a")


@pytest.mark.parametrize("place", ["/dev/null", "/proc", "absent/file"])
def test_a_result_never_replaces_a_device_or_a_folder(tmp_path, place):
    with pytest.raises(UsageError, match="give"):
        console.check_output(tmp_path / place)


def test_reports_are_different_files_outside_the_artifact(tmp_path):
    (tmp_path / "a.aot").mkdir()
    (tmp_path / "link.xml").symlink_to("report")

    with pytest.raises(UsageError, match="two reports name one file"):
        console.check_reports(tmp_path / "a.aot", (tmp_path / "report", None, tmp_path / "link.xml"))
    with pytest.raises(UsageError, match="must stay as it was built"):
        console.check_reports(tmp_path / "a.aot", (tmp_path / "a.aot" / "junit.xml", None, None))
    console.check_reports(tmp_path / "a.aot", (None, tmp_path / "a.html", tmp_path / "b.json"))


def test_a_folder_that_cannot_be_written_is_told_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)  # root may write everywhere

    with pytest.raises(UsageError, match="its folder cannot be written"):
        console.check_output(tmp_path / "report.xml")


def test_what_an_artifact_holds_follows_the_umask(tmp_path):
    with store.writing(tmp_path / "a.aot", False) as folder:
        (folder / "inside").mkdir(mode=0o700)
        (folder / "inside/file").touch(mode=0o600)

    assert mode_of(tmp_path / "a.aot/inside/file") & 0o044 == 0o044
    assert mode_of(tmp_path / "a.aot/inside") & 0o055 == 0o055


SYSTEM = [
    OSError(errno.ENOSPC, "No space left on device", "there"),
    OSError(errno.EROFS, "Read-only file system", "there"),
    PermissionError(errno.EACCES, "Permission denied", "there"),
    IsADirectoryError(errno.EISDIR, "Is a directory", "there"),
    FileNotFoundError(errno.ENOENT, "No such file or directory", "there"),
    OSError(errno.ENAMETOOLONG, "File name too long", "there"),
    OSError(errno.EMFILE, "Too many open files", "there"),
    TimeoutError("timed out"),
    OSError("without a number"),
    RecursionError("maximum recursion depth exceeded"),
    MemoryError(),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    UnicodeEncodeError("ascii", "\xe9", 0, 1, "ordinal not in range"),
]


@pytest.mark.parametrize("error", SYSTEM, ids=repr)
def test_what_the_system_refuses_is_not_our_bug(capsys, error):
    def fails():
        raise error

    assert console.run(fails) == 2
    assert "our bug" not in capsys.readouterr().err


def test_our_bug_stays_ours(capsys):
    def fails():
        raise ZeroDivisionError("division by zero")

    assert console.run(fails) == 1
    assert "our bug" in capsys.readouterr().err


def shell(line, **changes):
    environment = {**os.environ, **changes}
    return subprocess.run(["bash", "-c", line], env=environment, capture_output=True, check=False, timeout=120)


def command(arguments):
    return " ".join([f"'{CLI[0]}' -c '{CLI[2]}'", arguments])


@pytest.mark.parametrize("arguments", ["models --json", "models"])
def test_a_reader_that_goes_away_is_no_error(arguments):
    done = shell(f"set -o pipefail; {command(arguments)} | true")

    assert done.returncode == 0
    assert done.stderr == b""


def test_a_full_disk_behind_stdout_is_told():
    done = shell(f"{command('models --json')} > /dev/full")

    assert done.returncode == 2
    assert b"no space left" in done.stderr


def test_a_closed_stdout_is_told_and_a_closed_stderr_does_not_matter():
    assert shell(f"{command('models')} >&-").returncode == 2
    assert shell(f"{command('models')} 2>&-").returncode == 0


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_names_that_the_terminal_lacks_are_escaped(tmp_path, encoding):
    done = shell(
        f"{command('inspect')} '{tmp_path}/stimme-\u7d75-\u00e9.aot'", PYTHONIOENCODING=encoding, PYTHONUTF8="0"
    )

    assert done.returncode == 5
    assert b"no such artifact folder" in done.stderr


def test_text_files_are_read_and_written_in_utf8():
    """Without an encoding Python takes the locale's, which is ASCII in many containers."""
    without = []
    for folder in ("voicehub_aot", "adapters", "kernels", "artifacts", "bench", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    texts = {"read_text": 0, "write_text": 1}
                    known = any(k.arg == "encoding" for k in node.keywords)
                    if node.func.attr in texts and not known and len(node.args) <= texts[node.func.attr]:
                        without.append(f"{path.relative_to(ROOT)}:{node.lineno}")

    assert without == []


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@functools.cache
def resolved():
    model = models.resolve("f5tts", "tiny", "synthetic")
    asked = settings.BuildSettings(checkpoint="synthetic", buckets="16", steps="2", engine="onnxruntime")
    return model, asked, settings.options(model, asked, None, 6, 1, True, False)


VALUES = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(-1e9, 1e9) | TEXTS


@hypothesis.settings(deadline=None)
@given(checkpoint=TEXTS, options=st.dictionaries(st.text("abc", min_size=1), VALUES))
def test_the_options_that_a_build_keeps_can_be_built_from_again(tmp_path_factory, checkpoint, options):
    model, asked, whole = resolved()
    asked = asked.model_copy(update={"options": options, "checkpoint": checkpoint})
    file = tmp_path_factory.mktemp("settings") / "config.toml"

    file.write_text(settings.as_toml(model, asked, whole), encoding="utf-8", newline="")

    again = settings.BuildSettings.merge(file, {})
    assert again.checkpoint == checkpoint
    assert again.options == {name: None if value == settings.NULL else value for name, value in options.items()}
    assert tomllib.loads(file.read_text(encoding="utf-8"))["steps"] == "2"
