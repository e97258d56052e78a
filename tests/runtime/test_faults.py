"""Damaged artifacts, foreign machines, artifacts that move while in use, and two builders of one output."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ran
from filelock import FileLock
from safetensors.torch import load_file, save_file

from voicehub_aot.artifacts import store
from voicehub_aot.artifacts.manifest import Manifest
from voicehub_aot.engines import aoti
from voicehub_aot.errors import ArtifactCorrupt, LoadError, TargetMismatch, UsageError, VersionUnsupported
from voicehub_aot.runtime.load import load

Command = Callable[..., Ran]
WEIGHTS, MANIFEST = store.WEIGHTS, store.MANIFEST
LIBRARY = "model.wrapper.so"


def library(artifact: Path, stage: str) -> Path:
    """The compiled library of a stage; of the smallest bucket, if it has several."""
    return sorted(p for p in artifact.rglob(LIBRARY) if f"/{stage}" in str(p))[0]


def flip(file: Path, position: float = 0.5) -> None:
    content = bytearray(file.read_bytes())
    content[int(position * (len(content) - 1))] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def edit(artifact: Path, **changes: Any) -> None:
    """A text editor's work: the manifest's own digest stays what it was."""
    file = artifact / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def sign(artifact: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The manifest another builder would have written: changed, its digest right."""
    manifest = json.loads((artifact / MANIFEST).read_text())
    change(manifest)
    store.write_manifest(artifact, Manifest.model_validate(manifest))


def sign_files(artifact: Path) -> None:
    """Digests of the files as they are now: damage that happened before the build's end."""
    sign(artifact, lambda m: m.update(files={k: v.model_dump() for k, v in store.list_files(artifact).items()}))


def another_checkpoint(artifact: Path) -> None:
    """A weight file with the same names and shapes, as another build would have it."""
    file = artifact / WEIGHTS
    save_file({name: tensor + 0.25 for name, tensor in load_file(file).items()}, file)


# --- damaged artifacts

DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("byte of an engine flipped", lambda a: flip(library(a, "step")), f"step.*{LIBRARY} was altered"),
    ("first byte of an engine flipped", lambda a: flip(library(a, "prepare"), 0), f"prepare.*{LIBRARY} was altered"),
    ("last byte of the weights flipped", lambda a: flip(a / WEIGHTS, 1), f"{WEIGHTS} was altered"),
    ("byte of a program flipped", lambda a: flip(a / "programs" / "euler-3.json"), "euler-3.json was altered"),
    ("byte of the reference flipped", lambda a: flip(a / "parity" / "references.safetensors"), "references.* altered"),
    ("engine cut", lambda a: cut(library(a, "step")), f"step.*{LIBRARY} has .* bytes, wanted "),
    ("weights cut", lambda a: cut(a / WEIGHTS), f"{WEIGHTS} has .* bytes, wanted "),
    ("weights emptied", lambda a: (a / WEIGHTS).write_bytes(b""), f"{WEIGHTS} has 0 bytes"),
    ("engine missing", lambda a: library(a, "step").unlink(), f"step.*{LIBRARY} is missing"),
    ("weights missing", lambda a: (a / WEIGHTS).unlink(), f"{WEIGHTS} is missing"),
    ("program missing", lambda a: (a / "programs" / "euler-3.json").unlink(), "euler-3.json is missing"),
    ("engines missing", lambda a: shutil.rmtree(a / "engines"), "is missing; copy the artifact again, or rebuild it"),
    ("weights are a folder", lambda a: ((a / WEIGHTS).unlink(), (a / WEIGHTS).mkdir()), f"{WEIGHTS} is missing"),
    ("engines swapped", lambda a: swap(library(a, "prepare"), library(a, "step")), f"{LIBRARY} (was|has) "),
    ("weights of another checkpoint", another_checkpoint, f"{WEIGHTS} was altered"),
    ("manifest missing", lambda a: (a / MANIFEST).unlink(), "has no manifest.json; it is not an artifact"),
    ("manifest cut", lambda a: cut(a / MANIFEST), "manifest.json: unreadable"),
    ("manifest emptied", lambda a: (a / MANIFEST).write_bytes(b""), "manifest.json: unreadable"),
    ("manifest of bytes", lambda a: (a / MANIFEST).write_bytes(b"\xff\xfe\x00"), "manifest.json: unreadable"),
    ("manifest of a list", lambda a: (a / MANIFEST).write_text("[]"), "manifest.json: unreadable"),
    ("manifest edited", lambda a: edit(a, model="f5tts"), "was edited after the build"),
    ("manifest's digest removed", lambda a: edit(a, digest=""), "was edited after the build"),
    ("manifest with more", lambda a: edit(a, extra=1), "manifest.json: unreadable"),
    ("manifest with other kinds", lambda a: edit(a, buckets=3), "manifest.json: unreadable"),
    ("all gone", shutil.rmtree, "no such artifact folder"),
    ("a file instead", lambda a: (shutil.rmtree(a), a.write_text("")), "no such artifact folder"),
]  # fmt: skip


@pytest.fixture(params=["supertonic_packed", "supertonic_shared"])
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    shutil.copytree(request.getfixturevalue(request.param), tmp_path / "copy.aot")
    return tmp_path / "copy.aot"


@pytest.mark.parametrize(("damage", "words"), [pytest.param(d, w, id=name) for name, d, w in DAMAGE])
def test_a_damaged_artifact_is_refused_and_what_is_damaged_named(
    copy: Path, damage: Callable[[Path], object], words: str
) -> None:
    damage(copy)
    with pytest.raises(ArtifactCorrupt, match=words):
        load(copy)


def test_an_engine_of_another_bucket_is_refused(supertonic_shared: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.aot"
    shutil.copytree(supertonic_shared, copy)
    small, large = sorted(p for p in copy.rglob(LIBRARY) if "/step" in str(p))
    swap(small, large)
    with pytest.raises(ArtifactCorrupt, match=LIBRARY):
        load(copy)


@pytest.mark.parametrize("command_name", ["verify", "sample", "bench", "inspect", "reweight"])
def test_every_command_returns_5_for_a_damaged_artifact(
    supertonic_shared: Path, tmp_path: Path, command: Command, command_name: str
) -> None:
    copy, output = tmp_path / "copy.aot", tmp_path / "output"
    shutil.copytree(supertonic_shared, copy)
    if command_name == "inspect":  # it shows the manifest, and opens nothing
        edit(copy, model="f5tts")
    else:
        flip(copy / WEIGHTS)
    options = {
        "sample": ["--random", "--length", 8, "-o", output],
        "reweight": ["--weights", "synthetic", "-o", output],
    }
    ran = command(command_name, copy, *options.get(command_name, []), "--json")
    assert (ran.code, ran.document["error"]["type"]) == (5, "ArtifactCorrupt")
    assert {p.name for p in tmp_path.iterdir()} == {"copy.aot"}


def test_a_whole_copy_elsewhere_is_the_artifact(supertonic_shared: Path, tmp_path: Path) -> None:
    """What every test above relies on; and that paths inside are relative."""
    shutil.copytree(supertonic_shared, tmp_path / "a" / "b.aot")
    assert torch.equal(constant_result(tmp_path / "a" / "b.aot"), constant_result(supertonic_shared))


# --- artifacts that move or change under a process that has them open


def constant_result(artifact: Path) -> torch.Tensor:
    """What `artifact` makes of conditioning of ones."""
    runtime = load(artifact, threads=1)
    sizes: dict[str | int, int] = {"B": 1, "frames": 8, "text": 5}
    given = {
        i.name: torch.ones([sizes.get(s, s) for s in i.shape], dtype=i.torch_dtype) for i in runtime.spec.conditioning
    }
    return runtime.sample(seed=1, lengths=[8], **given)


def test_an_artifact_that_was_moved_opens_at_its_new_place(copy: Path) -> None:
    before = constant_result(copy)
    moved = copy.rename(copy.with_name("moved.aot"))
    assert torch.equal(constant_result(moved), before)


def test_another_artifact_at_the_same_place_is_not_taken_for_its_predecessor(copy: Path, f5_shared: Path) -> None:
    constant_result(copy)
    shutil.rmtree(copy)
    shutil.copytree(f5_shared, copy)
    assert torch.equal(constant_result(copy), constant_result(f5_shared))


def test_an_engine_that_was_overwritten_while_in_use_is_refused(tmp_path: Path) -> None:
    library = tmp_path / "step" / aoti.LIBRARY
    library.parent.mkdir(parents=True)
    library.write_text("in use")
    name = aoti.pinned(tmp_path, "step", "digest")
    assert Path(name, aoti.LIBRARY).read_text() == "in use"
    assert aoti.pinned(tmp_path, "step", "digest") == name
    library.write_text("overwritten")
    with pytest.raises(ArtifactCorrupt, match="was overwritten while this process had it open; restart"):
        aoti.pinned(tmp_path, "step", "another digest")


# --- built wrongly: digests are right, the content is not


def rewrite(artifact: Path, change: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]) -> None:
    file = artifact / WEIGHTS
    save_file(dict(change(load_file(file))), file)
    sign_files(artifact)


def without(what: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    keeps_tables = what == "weights"
    return lambda tensors: {n: t for n, t in tensors.items() if n.startswith("table/") == keeps_tables}


def a_row_less(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t[:-1].clone() if name.startswith("table/") else t for name, t in tensors.items()}


def in_double(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t if name.startswith("table/") else t.double() for name, t in tensors.items()}


def flat(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t if name.startswith("table/") else t.flatten() for name, t in tensors.items()}


MISSING = r"is missing or not float32 \["
BUILT_WRONGLY: list[tuple[str, Callable[[Path], object], str]] = [
    ("no weights", lambda a: rewrite(a, without("weights")), f"weight .* {MISSING}"),
    ("weights in float64", lambda a: rewrite(a, in_double), f"weight .* {MISSING}"),
    ("weights of another shape", lambda a: rewrite(a, flat), f"weight .* {MISSING}"),
    ("no time tables", lambda a: rewrite(a, without("tables")), f"time table .* {MISSING}3, "),
    ("time tables of fewer steps", lambda a: rewrite(a, a_row_less), f"time table .* {MISSING}3, "),
    ("weights cut", lambda a: (cut(a / WEIGHTS), sign_files(a)), f"{WEIGHTS}: unreadable"),
    ("engine of prose", lambda a: (library(a, "step").write_text("prose"), sign_files(a)), "cannot be opened"),
    ("no engine", lambda a: (library(a, "step").unlink(), sign_files(a)), f"{LIBRARY} is missing"),
    ("program cut", lambda a: (cut(a / "programs" / "euler-3.json"), sign_files(a)), "a program is unreadable"),
]


@pytest.mark.parametrize(("damage", "words"), [pytest.param(d, w, id=name) for name, d, w in BUILT_WRONGLY])
def test_an_artifact_that_was_built_wrongly_is_refused(
    supertonic_shared: Path, tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    copy = tmp_path / "copy.aot"
    shutil.copytree(supertonic_shared, copy)
    damage(copy)
    with pytest.raises(ArtifactCorrupt, match=words):
        load(copy)


# --- foreign machines and versions

FOREIGN: list[tuple[str, Callable[[dict[str, Any]], object], type[LoadError], str]] = [
    ("features", lambda m: m["target"].update(features=["avx2", "sme9", "rvv7"]), TargetMismatch, "lacks rvv7, sme9"),
    ("machine", lambda m: m["target"].update(machine="riscv128"), TargetMismatch, "built for linux/riscv128, this is"),
    ("system", lambda m: m["target"].update(system="plan9"), TargetMismatch, "built for plan9/"),
    ("older torch", lambda m: m["versions"].update(torch="1.13.1"), VersionUnsupported, "built with torch 1.13.1"),
    ("newer torch", lambda m: m["versions"].update(torch="9.0.0"), VersionUnsupported, "built with torch 9.0.0"),
    ("schema", lambda m: m.update(schema_version=1), VersionUnsupported, "schema version 1, this package reads 2"),
    ("schema of words", lambda m: m.update(schema_version="x"), VersionUnsupported, "schema version 'x'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "words"), [pytest.param(*f[1:], id=f[0]) for f in FOREIGN])
def test_an_artifact_for_another_machine_or_version_is_refused_before_its_code_is_opened(
    copy: Path, change: Callable[[dict[str, Any]], object], error: type[LoadError], words: str, command: Command
) -> None:
    manifest = json.loads((copy / MANIFEST).read_text())
    change(manifest)
    (copy / MANIFEST).write_text(json.dumps(manifest))
    if manifest["schema_version"] == 2:
        sign(copy, lambda m: None)
    shutil.rmtree(copy / "engines")
    with pytest.raises(error, match=words):
        load(copy)
    assert command("verify", copy).code == 5


def test_another_patch_of_the_same_torch_is_accepted(copy: Path) -> None:
    minor = torch.__version__.split("+")[0].rsplit(".", 1)[0]
    sign(copy, lambda m: m["versions"].update(torch=f"{minor}.99"))
    assert load(copy).programs


# --- builders

BUILD = ("build", "supertonic", "--config", "tiny", "--weights", "synthetic", "--buckets", "16", "--steps", "2")


def siblings(output: Path) -> list[str]:
    return sorted(p.name for p in output.parent.iterdir())


def test_a_build_of_what_another_is_building_is_refused(tmp_path: Path, command: Command) -> None:
    output = tmp_path / "model.aot"
    with FileLock(tmp_path / ".model.aot.lock"):
        ran = command(*BUILD, "-o", output, "--json")
    assert (ran.code, ran.document["error"]["type"]) == (2, "UsageError")
    assert "another build is writing it; wait for it, or give another --output" in ran.err
    assert not output.exists()


def test_builds_of_different_outputs_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    """Names that are patterns to a shell, too: [ab].aot is not a.aot."""
    with store.writing(tmp_path / "a.aot", False) as one:
        with store.writing(tmp_path / "[ab].aot", False) as other, store.writing(tmp_path / "b.aot", False) as third:
            assert len({one, other, third}) == 3
            (other / "x").touch()
        assert one.is_dir()
    assert siblings(tmp_path / "a.aot") == ["[ab].aot", "a.aot", "b.aot"]


def test_a_builder_that_finishes_second_does_not_replace_the_first(tmp_path: Path) -> None:
    output = tmp_path / "model.aot"
    with pytest.raises(UsageError, match=r"model\.aot exists; .*--force"), store.writing(output, False) as folder:
        (folder / "mine").touch()
        output.mkdir()
        (output / "theirs").touch()
    assert [p.name for p in output.iterdir()] == ["theirs"]
    assert siblings(output) == ["model.aot"]


def test_force_replaces_the_whole_artifact_and_a_failed_build_keeps_it(tmp_path: Path) -> None:
    output = tmp_path / "model.aot"
    output.mkdir()
    (output / "old").touch()
    with pytest.raises(RuntimeError, match="the build failed"), store.writing(output, True) as folder:
        (folder / "new").touch()
        raise RuntimeError("the build failed")
    assert [p.name for p in output.iterdir()] == ["old"]
    with store.writing(output, True) as folder:
        (folder / "new").touch()
    assert [p.name for p in output.iterdir()] == ["new"]
    assert siblings(output) == ["model.aot"]


def test_what_a_killed_builder_left_is_removed_by_the_next(tmp_path: Path) -> None:
    for name in (".model.aot.tmp-1", ".model.aot.tmp-old-1", ".other.aot.tmp-1"):
        (tmp_path / name / "engines").mkdir(parents=True)
    with store.writing(tmp_path / "model.aot", False):
        assert {".model.aot.tmp-1", ".model.aot.tmp-old-1"} & set(siblings(tmp_path / "model.aot")) == set()
    assert siblings(tmp_path / "model.aot") == [".other.aot.tmp-1", "model.aot"]
