"""Giving memory back: mapped file pages that an engine has copied, and the heap's free pages."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

_MADV_DONTNEED = 4


def release_pages(file: Path, wanted: Callable[[str, int, int, int], bool]) -> None:
    """Drop this process's pages of the mappings of `file` that `wanted(permissions, start, end, offset)` picks.

    They must be clean: the kernel then reads them again should anyone ask, while what was written to a private mapping
    would be lost. Linux only; elsewhere the pages stay until memory is short.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    path = str(file.resolve())
    for line in maps.read_text().splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) ([0-9a-f]+) \S+ \d+\s+(.*)", line)
        if match is None or match[5] != path:
            continue
        start, end, offset = (int(match[i], 16) for i in (1, 2, 4))
        if wanted(match[3], start, end, offset):
            libc = ctypes.CDLL(None, use_errno=True)
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def release_heap() -> None:
    """Give the system what the C library's heap holds free; a few milliseconds. Nothing where that is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
