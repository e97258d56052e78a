"""Writing, reading and verifying an artifact's directory.

Written to a temporary sibling and renamed, manifest last: a killed build leaves nothing that loads. Read with every
digest checked before anything is opened.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from glob import escape
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from voicehub_aot.artifacts import relations
from voicehub_aot.artifacts.manifest import SCHEMA_VERSION, EngineEntry, FileEntry, Manifest, digest_of, made_for
from voicehub_aot.artifacts.reading import parse_json, read_bytes, reason
from voicehub_aot.errors import ArtifactCorrupt, UsageError, VersionUnsupported
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.region import DTYPES, RegionSpec, TensorSpec

MANIFEST = "manifest.json"
WEIGHTS, PROGRAMS = relations.WEIGHTS, relations.PROGRAMS
PARITY = "parity"
ENGINES = "engines"
SETTINGS = "config.toml"

OS_ERROR = re.compile(r"\(os error (\d+)\)|code: (\d+)")
LARGEST_DOCUMENT = 64 * 2**20  # bytes of a manifest or program, and of the header of a weight file
READ_PLACES = (ENGINES, PROGRAMS, PARITY, WEIGHTS, SETTINGS)  # what lies here is read, so it must be listed


def table_key(program: str, value: str) -> str:
    """Name of a time table in the weight file."""
    return f"table/{program}/{value}"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_files(root: Path) -> dict[str, FileEntry]:
    """Every file below `root` but the manifest, by its path inside."""
    paths = sorted(p for p in root.rglob("*") if p.is_file() and p != root / MANIFEST)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        digests = pool.map(sha256, paths)
        return {
            p.relative_to(root).as_posix(): FileEntry(sha256=d, size=p.stat().st_size)
            for p, d in zip(paths, digests, strict=True)
        }


def write_whole(contents: Mapping[Path, str]) -> None:
    """Write text files, all of them or none. Raises UsageError.

    All are written beside their places before the first is renamed, and a rename that fails undoes those before it.
    A symlink stays one: what it points to is written.
    """
    written: list[tuple[Path, Path]] = []  # the place, and where its text lies meanwhile
    path = Path()
    try:
        for number, path in enumerate(contents):
            place = path.resolve()
            text = place.with_name(f".voicehub-aot-{os.getpid()}-{number}.tmp")
            written.append((place, text))
            text.write_text(contents[path], encoding="utf-8")
        with _undone() as before:
            for path, (place, text) in zip(contents, written, strict=True):  # noqa: B007  (the error names it)
                old = place.read_bytes() if place.exists() else None
                text.replace(place)
                before[place] = old
    except (OSError, RuntimeError) as error:  # RuntimeError: a circle of links
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: cannot be written ({reason}); give another place") from error
    finally:
        for _, text in written:
            text.unlink(missing_ok=True)


@contextmanager
def _undone() -> Iterator[dict[Path, bytes | None]]:
    """What files held before, to be filled: if the block fails they hold it again; None = the file was absent."""
    before: dict[Path, bytes | None] = {}
    try:
        yield before
    except BaseException:
        for place, content in before.items():
            if content is None:
                place.unlink()
            else:
                place.write_bytes(content)
        raise


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """A safetensors file with the permissions that any new file has here; its library would make it 0600.

    Raises OSError, with the reason that the library wraps.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        code = OS_ERROR.search(str(error))
        number = int(code[1] or code[2]) if code else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error
    path.chmod(stat.S_IMODE(mode))


@contextmanager
def writing(output: Path, replace: bool) -> Iterator[Path]:
    """A temporary sibling of `output` to fill; renamed into place when the block ends well, removed otherwise.

    A symlink is followed: what it points to is written.
    """
    from filelock import FileLock, Timeout

    try:
        output = output.resolve() if output.is_symlink() else output.absolute()
        output.with_name(_old_name(output)).exists()  # raises where this, the longest of the names, is too long
        _check_free(output, replace)
    except (OSError, RuntimeError) as error:  # too long a name, a circle of links
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{str(output)[:80]}: cannot be written ({reason}); give another --output") from error
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
            _follow_umask(folder)
            _check_free(output, replace)  # again: somebody may have put it there meanwhile
            _move_into_place(folder, output)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def _follow_umask(folder: Path) -> None:
    """Permissions of what a folder holds as any new file has them, whatever the library or cache that it came from."""
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        path.chmod(mode | ((mode & 0o444) >> 2) if path.is_dir() else mode)


def empty(folder: Path) -> None:
    """Remove what a folder holds."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_mount(path: Path) -> bool:
    """Also of a bind mount within one file system, as a container's volume may be one."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return path.is_mount()
    return any(line.split(" ")[4] == str(path) for line in lines)


def _check_free(output: Path, replace: bool) -> None:
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file, and an artifact is a folder; give another --output")
    if _is_mount(output):
        raise UsageError(f"{output} is a mount point, which cannot be replaced whole; give a folder inside it")
    if output.exists() and not replace:
        raise UsageError(f"{output} exists; give another --output, or --force to replace it")


def _old_name(output: Path) -> str:
    return f".{output.name}.tmp-old-{os.getpid()}"


def _move_into_place(folder: Path, output: Path) -> None:
    old = output.with_name(_old_name(output))
    if output.exists():
        output.rename(old)
    folder.rename(output)
    shutil.rmtree(old, ignore_errors=True)


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Returns it as written, with its digest."""
    signed = manifest.signed()
    (folder / MANIFEST).write_text(signed.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return signed


def read_manifest(path: Path) -> Manifest:
    """The manifest, its own digest and the relations between its parts checked.

    Raises ArtifactCorrupt or VersionUnsupported.
    """
    file = path / MANIFEST
    try:
        if not path.is_dir():
            raise ArtifactCorrupt(f"{path}: no such artifact folder; build one with voicehub-aot build")
        if file.is_symlink():
            raise _link(path, MANIFEST)
        if not file.is_file():
            raise ArtifactCorrupt(f"{path}: has no {MANIFEST}; it is not an artifact, or its build was interrupted")
        data = read_bytes(file, LARGEST_DOCUMENT)
        document = parse_json(data)
        _check_version(document, file)
        manifest = Manifest.model_validate_json(data, strict=True)
    except (OSError, ValueError) as error:
        raise ArtifactCorrupt(f"{file}: unreadable ({reason(error)}); rebuild the artifact") from error
    document.pop("digest", None)  # of the document as it stands: an older one lacks fields that have defaults by now
    if digest_of(document) != manifest.digest:
        raise ArtifactCorrupt(f"{file}: was edited after the build (its digest differs); rebuild the artifact")
    return manifest


def _link(root: Path, name: str) -> ArtifactCorrupt:
    return ArtifactCorrupt(f"{root}: {name} is a symlink; copy the artifact with its files, as cp -rL does")


def _check_version(document: object, file: Path) -> None:
    """Before anything else is looked at: another version may have other fields."""
    if not isinstance(document, dict) or "schema_version" not in document:
        raise ValueError("it states no schema_version")
    version = document["schema_version"]
    if version is True or version != SCHEMA_VERSION:
        raise VersionUnsupported(
            f"{file}: schema version {version!r}, this package reads {SCHEMA_VERSION}; "
            "rebuild the artifact, or install the package it was built with"
        )


def verify_files(path: Path, manifest: Manifest) -> None:
    """Every listed file present, a plain file of its size with its digest, and no other file where files are read.

    Raises ArtifactCorrupt naming the file. The root itself may be a symlink; nothing inside may be one.
    """
    try:
        for name, entry in manifest.files.items():
            _check_plain(path, name, entry.size)
        for place in READ_PLACES:
            _check_listed(path, place, manifest)
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            digests = pool.map(lambda n: sha256(path / n), manifest.files)
            for name, digest in zip(manifest.files, digests, strict=True):
                if digest != manifest.files[name].sha256:
                    raise ArtifactCorrupt(f"{path}: {name} was altered (sha256 differs); copy the artifact again")
    except OSError as error:
        raise ArtifactCorrupt(f"{path}: cannot be read ({error}); check its permissions, or copy it again") from error


def _check_plain(root: Path, name: str, size: int) -> None:
    """A regular file of this size that is reached without a symlink."""
    place = root
    for part in name.split("/"):
        place = place / part
        if place.is_symlink():
            raise _link(root, place.relative_to(root).as_posix())
    if not place.is_file():
        raise ArtifactCorrupt(f"{root}: {name} is missing; copy the artifact again, or rebuild it")
    if place.stat().st_size != size:
        raise ArtifactCorrupt(f"{root}: {name} has {place.stat().st_size} bytes, wanted {size}; copy it again")


def _check_listed(root: Path, name: str, manifest: Manifest) -> None:
    """A file, or every file in a folder."""
    if (root / name).is_symlink():
        raise _link(root, name)
    found = [root / name] if (root / name).is_file() else []
    for place, folders, files in os.walk(root / name):
        found += [Path(place) / f for f in files]
        found += [Path(place) / f for f in folders if (Path(place) / f).is_symlink()]
    names = sorted(path.relative_to(root).as_posix() for path in found)
    if unknown := [name for name in names if name not in manifest.files]:
        raise ArtifactCorrupt(f"{root}: {unknown[0]} is not listed in {MANIFEST}; remove it, or copy it again")


def read_programs(path: Path, manifest: Manifest) -> dict[str, Program]:
    """Every program, checked against the region. Raises ArtifactCorrupt; run `verify_files` before."""
    return {name: _read_program(path, name, manifest) for name in manifest.programs}


def _read_program(path: Path, name: str, manifest: Manifest) -> Program:
    file = f"{PROGRAMS}/{name}.json"
    try:
        if file not in manifest.files:
            raise ValueError(f"{MANIFEST} does not list it")
        data = read_bytes(path / file, LARGEST_DOCUMENT)
        parse_json(data)
        program = Program.model_validate_json(data, strict=True)
        _check_program(program, name, manifest.region)
    except (OSError, ValueError) as error:
        raise ArtifactCorrupt(f"{path}: a program is unreadable ({file}: {reason(error)}); rebuild it") from error
    return program


def _check_program(program: Program, name: str, spec: RegionSpec) -> None:
    """Raises ValueError unless it is the program of this name, and the region can be evaluated as it says."""
    further = {i.name for i in spec.inputs if i.binding == "TIME"} - {spec.time.name}
    if program.name != name:
        raise ValueError(f"it holds the program {program.name!r}")
    if set(program.extra_times) != further:
        raise ValueError(f"it has times for {sorted(program.extra_times)!r}, wanted {sorted(further)!r}")
    if not program.evaluations:
        raise ValueError("it never evaluates the denoiser")


def map_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file over a memory map: pages are read when first used and shared between processes."""
    try:
        with file.open("rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise ValueError("it is not a regular file")
            if (header := int.from_bytes(stream.read(8), "little")) > LARGEST_DOCUMENT:
                raise ValueError(f"its header has {header} bytes, wanted at most {LARGEST_DOCUMENT}")
        with safe_open(file, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors raises its own, and torch others for dtypes it lacks
        raise ArtifactCorrupt(f"{file}: unreadable ({reason(error)}); rebuild the artifact") from error


def tensor_places(file: Path) -> dict[str, tuple[int, int]]:
    """(offset, length) in bytes of each tensor in a safetensors file. Format: 8 bytes of header size, JSON, data.

    Raises ArtifactCorrupt for a header that is not one.
    """
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > min(LARGEST_DOCUMENT, file.stat().st_size):
                raise ValueError(f"its header is said to have {size} bytes")
            header = parse_json(stream.read(size))
        header.pop("__metadata__", None)
        ranges = {name: entry["data_offsets"] for name, entry in header.items()}
        return {name: (8 + size + begin, end - begin) for name, (begin, end) in ranges.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ArtifactCorrupt(f"{file}: unreadable ({reason(error)}); rebuild the artifact") from error


def time_table(program: Program, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A program's values that depend on time alone, [evaluations, ...] by name. Raises ArtifactCorrupt."""
    table = {}
    for spec in manifest.stages["table"].outputs:
        key = table_key(program.name, spec.name)
        whole = spec.model_copy(update={"name": key, "shape": (len(program.times), *spec.shape)})
        table[spec.name] = _tensor(whole, tensors, "time table")
    return table


def constants(entry: EngineEntry, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights that an engine reads from the weight file, by name, fit for its code. Raises ArtifactCorrupt."""
    weights = {spec.name: _tensor(spec, tensors, f"{entry.path}: weight") for spec in entry.constants}
    if entry.made_for and entry.made_for != made_for(entry, manifest.region, weights):
        raise ArtifactCorrupt(
            f"{entry.path}: the engine was made for another region, border or sizes than {MANIFEST} states; rebuild it"
        )
    return weights


def _tensor(spec: TensorSpec, tensors: Mapping[str, torch.Tensor], what: str) -> torch.Tensor:
    have = tensors.get(spec.name)
    if have is None or list(have.shape) != list(spec.shape) or have.dtype != DTYPES[spec.dtype]:
        raise ArtifactCorrupt(f"{what} {spec.name!r} is missing or not {spec.dtype} {list(spec.shape)}; rebuild it")
    return have
