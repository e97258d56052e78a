"""Writing, reading and verifying an artifact's directory.

Written to a temporary sibling and renamed, manifest last: a killed build leaves nothing that loads. Read with every
digest checked before anything is opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from glob import escape
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from voicehub_aot.artifacts.manifest import SCHEMA_VERSION, FileEntry, Manifest
from voicehub_aot.errors import ArtifactCorrupt, UsageError, VersionUnsupported
from voicehub_aot.program import Program

MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
PROGRAMS = "programs"
PARITY = "parity"
ENGINES = "engines"
SETTINGS = "config.toml"


def table_key(program: str, value: str) -> str:
    """Name of a time table in the weight file."""
    return f"table/{program}/{value}"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_files(root: Path) -> dict[str, FileEntry]:
    """Every file below `root` but the manifest, by its path inside."""
    paths = sorted(p for p in root.rglob("*") if p.is_file() and p.name != MANIFEST)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        digests = pool.map(sha256, paths)
        return {
            p.relative_to(root).as_posix(): FileEntry(sha256=d, size=p.stat().st_size)
            for p, d in zip(paths, digests, strict=True)
        }


@contextmanager
def writing(output: Path, replace: bool) -> Iterator[Path]:
    """A temporary sibling of `output` to fill; renamed into place when the block ends well, removed otherwise."""
    from filelock import FileLock, Timeout

    output = output.absolute()
    _check_free(output, replace)
    lock = FileLock(output.parent / f".{output.name}.lock", timeout=0)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise UsageError(f"{output}: another build is writing it; wait for it, or give another --output") from error
    except OSError as error:
        raise UsageError(f"{output}: cannot be written ({error.strerror}); give another --output") from error
    try:
        for stale in output.parent.glob(f".{escape(output.name)}.tmp-*"):
            shutil.rmtree(stale)  # left by a killed build: we hold the lock, so nobody is writing it
        folder = output.parent / f".{output.name}.tmp-{os.getpid()}"
        folder.mkdir()
        try:
            yield folder
            _check_free(output, replace)  # again: somebody may have put it there meanwhile
            _move_into_place(folder, output)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def empty(folder: Path) -> None:
    """Remove what a folder holds."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _check_free(output: Path, replace: bool) -> None:
    if output.exists() and not replace:
        raise UsageError(f"{output} exists; give another --output, or --force to replace it")


def _move_into_place(folder: Path, output: Path) -> None:
    old = output.parent / f".{output.name}.tmp-old-{os.getpid()}"
    if output.exists():
        output.rename(old)
    folder.rename(output)
    shutil.rmtree(old, ignore_errors=True)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_text(manifest.signed().model_dump_json(indent=2) + "\n")


def read_manifest(path: Path) -> Manifest:
    """The manifest, its own digest checked. Raises ArtifactCorrupt or VersionUnsupported."""
    file = path / MANIFEST
    if not path.is_dir():
        raise ArtifactCorrupt(f"{path}: no such artifact folder; build one with voicehub-aot build")
    if not file.is_file():
        raise ArtifactCorrupt(f"{path}: has no {MANIFEST}; it is no artifact, or its build was interrupted")
    try:
        raw = json.loads(file.read_text())
        version = raw["schema_version"]
        if version != SCHEMA_VERSION:
            raise VersionUnsupported(
                f"{file}: schema version {version!r}, this package reads {SCHEMA_VERSION}; "
                "rebuild the artifact, or install the package it was built with"
            )
        manifest = Manifest.model_validate(raw)
    except (OSError, KeyError, TypeError, ValueError, ValidationError) as error:
        raise ArtifactCorrupt(f"{file}: unreadable ({str(error).splitlines()[0]}); rebuild the artifact") from error
    if manifest.computed_digest() != manifest.digest:
        raise ArtifactCorrupt(f"{file}: was edited after the build (its digest differs); rebuild the artifact")
    return manifest


def verify_files(path: Path, manifest: Manifest) -> None:
    """Every listed file present, of its size, with its digest. Raises ArtifactCorrupt naming the file."""
    for name, entry in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise ArtifactCorrupt(f"{path}: {name} is missing; copy the artifact again, or rebuild it")
        if file.stat().st_size != entry.size:
            raise ArtifactCorrupt(f"{path}: {name} has {file.stat().st_size} bytes, wanted {entry.size}; copy it again")
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for name, digest in zip(manifest.files, pool.map(lambda n: sha256(path / n), manifest.files), strict=True):
            if digest != manifest.files[name].sha256:
                raise ArtifactCorrupt(f"{path}: {name} was altered (sha256 differs); copy the artifact again")


def read_programs(path: Path, manifest: Manifest) -> dict[str, Program]:
    try:
        return {n: Program.model_validate_json((path / PROGRAMS / f"{n}.json").read_text()) for n in manifest.programs}
    except (OSError, ValidationError) as error:
        raise ArtifactCorrupt(f"{path}: a program is unreadable ({error})") from error


def map_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file over a memory map: pages are read when first used and shared between processes."""
    try:
        with safe_open(file, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ArtifactCorrupt(f"{file}: unreadable ({error}); rebuild the artifact") from error
