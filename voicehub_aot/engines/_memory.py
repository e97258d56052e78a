"""Giving memory back: mappings of a file that an engine no longer reads, and the heap's free pages."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

_MADV_DONTNEED = 4


@dataclass(frozen=True)
class Mapping:
    """A part of the address space that shows a file. start: its address; offset: in the file; all in bytes."""

    start: int
    length: int
    permissions: str
    offset: int


def mappings(file: Path) -> frozenset[Mapping]:
    """The mappings of this very file, whatever it was called when it was mapped. Linux only; none elsewhere."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return frozenset()
    inode = file.stat().st_ino
    found = set()
    for line in maps.read_text(errors="replace", encoding="utf-8").splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) ([0-9a-f]+) \S+ (\d+)\s+(.*)", line)
        if match and int(match[5]) == inode and match[6].endswith(file.name):
            start, end, offset = (int(match[i], 16) for i in (1, 2, 4))
            found.add(Mapping(start, end - start, match[3], offset))
    return frozenset(found)


def release(mapping: Mapping) -> None:
    """Drop its pages, which must be clean: the kernel reads them again should anyone ask."""
    _libc().madvise(ctypes.c_void_p(mapping.start), ctypes.c_size_t(mapping.length), _MADV_DONTNEED)


def unmap(mapping: Mapping) -> None:
    """Take it out of the address space. Nobody may read it afterwards."""
    _libc().munmap(ctypes.c_void_p(mapping.start), ctypes.c_size_t(mapping.length))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
