"""Giving the C library's free heap pages back to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

EVERY = 32  # requests


class HeapTrim:
    """Trims the heap after the first request at each set of sizes, and after every further EVERY requests.

    An engine that keeps kernels for every size it has seen leaves them strewn among what that first request has freed,
    so the next new size would add to those pages instead of using them; requests of varied sizes strew the heap too.
    Where the C library is not glibc this does nothing.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[int, ...]] = set()
        self._due = False
        self._requests = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def before(self, sizes: Mapping[str, int]) -> None:
        """Call at the start of a request. A trim takes a few milliseconds."""
        if self._due and self._trim is not None:
            self._trim(0)
        key = tuple(sizes.values())
        self._requests += 1
        self._due = key not in self._seen or self._requests % EVERY == 0
        self._seen.add(key)
