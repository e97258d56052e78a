"""Giving mapped file pages back once an engine has its own copy of what they hold."""

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
    for line in maps.read_text(encoding="utf-8").splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) ([0-9a-f]+) \S+ \d+\s+(.*)", line)
        if match is None or match[5] != path:
            continue
        start, end, offset = (int(match[i], 16) for i in (1, 2, 4))
        if wanted(match[3], start, end, offset):
            libc = ctypes.CDLL(None, use_errno=True)
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)
