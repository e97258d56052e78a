"""Giving the C library's free heap pages back to the system."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

SLACK = 8 * 2**20  # bytes that the process may grow by before its heap is trimmed again
STATM = Path("/proc/self/statm")


class HeapTrim:
    """Trims the heap after requests, once the process has grown by SLACK since the last time.

    An engine that keeps kernels for every size it has seen leaves them strewn among what a request has freed, so that
    the next new size would add to those pages instead of using them. A trim takes a few milliseconds. Where the C
    library is not glibc on Linux this does nothing.
    """

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if STATM.exists() else None
        self._low = self._resident()

    def after_request(self) -> None:
        """Call when a request's own tensors are gone."""
        if self._trim is not None and self._resident() - self._low > SLACK:
            self._trim(0)
            self._low = self._resident()

    def _resident(self) -> int:
        """Bytes of this process that are in memory."""
        return int(STATM.read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE if self._trim is not None else 0
