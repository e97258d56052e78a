"""Compute threads: each runtime has its own number of them. They do not survive `os.fork`: who waits for one hangs."""

from __future__ import annotations

import os
import threading

import torch

from voicehub_aot.errors import ProcessForked

_computed_in: set[int] = set()  # processes in which a runtime has computed on several threads; a fork inherits it


def check_threads(threads: int, where: str) -> None:
    """Raises ProcessForked if this is a fork of a process that has computed on several threads, and needs them too."""
    if threads > 1 and _computed_in - {os.getpid()}:
        raise ProcessForked(
            f"{where}: this process was forked after its parent (process {min(_computed_in)}) had computed, and "
            f"compute threads do not survive a fork; wanted {threads} of them. Load with threads=1, or fork before the "
            "parent's first request, or start processes by spawn"
        )


class Turns:
    """Lets so many requests compute at once, in the process that opened the runtime.

    threads: the compute threads its engines were opened with; None = torch's. A runtime with one thread also works in
    a fork, where processes share its weights, unless a request was running at the fork: its locks stay taken.
    """

    def __init__(self, most: int, threads: int | None, where: str) -> None:
        self._most, self._threads, self._where = most, threads, where
        self._move_in()

    def _move_in(self) -> None:
        self._process = os.getpid()
        self._free = threading.BoundedSemaphore(self._most)

    def check(self) -> None:
        """To be called before any computation: gives the calling thread this runtime's number of compute threads.

        Raises ProcessForked where it would wait for ever.
        """
        threads = torch.get_num_threads()
        if self._threads not in (None, threads):  # another runtime, or the caller's own code, has changed it
            threads = self._threads
            torch.set_num_threads(threads)
        if os.getpid() != self._process:
            alone = threads == 1 and self._threads in (None, 1)
            if not alone or not all(self._free.acquire(blocking=False) for _ in range(self._most)):
                raise ProcessForked(
                    f"{self._where}: was opened in process {self._process}, and this one ({os.getpid()}) is a fork of "
                    "it; compute threads and running requests do not survive a fork. Load the artifact in each process "
                    "after the fork, or before it with threads=1 and fork while no request runs"
                )
            self._move_in()
        if threads > 1:
            _computed_in.add(os.getpid())

    def __enter__(self) -> None:
        self._free.acquire()

    def __exit__(self, *_: object) -> None:
        self._free.release()
