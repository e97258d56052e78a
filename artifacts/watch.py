"""Tells when a file that a runtime has mapped is overwritten under it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from voicehub_aot.artifacts.manifest import FileEntry
from voicehub_aot.artifacts.store import sha256
from voicehub_aot.errors import ArtifactCorrupt

Stamp = tuple[int, int, int, int, int]  # device, inode, size, time of the last write, of the last change of any kind


class Watch:
    """The files of an artifact as they were when it was opened.

    Engines read weights and code where the file lies: what is written there changes results, and what is cut off ends
    the process. A file that was deleted, moved or replaced by another one stays whole for those who have it open.
    """

    def __init__(self, root: Path, files: Mapping[str, FileEntry]) -> None:
        self._files = {(root / name).absolute(): entry for name, entry in files.items()}
        self._stamps = {path: stamp for path in self._files if (stamp := _stamp(path)) is not None}

    def check(self) -> None:
        """~1 us a file. Raises ArtifactCorrupt if one was overwritten; one that was only touched is read again."""
        for path, known in self._stamps.items():
            stamp = _stamp(path)
            if stamp == known or stamp is None or stamp[:2] != known[:2]:
                continue
            entry = self._files[path]
            if stamp[2] != entry.size or sha256(path) != entry.sha256:
                raise ArtifactCorrupt(
                    f"{path}: was overwritten while this process has it open; restart the process. "
                    "Write a new artifact beside the old one and rename it, instead of writing into its files"
                )
            self._stamps[path] = stamp


def _stamp(path: Path) -> Stamp | None:
    """None if there is no such file any more, or it cannot be seen."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
