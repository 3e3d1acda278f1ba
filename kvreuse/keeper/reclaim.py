"""Giving memory back beside the keeper's loop (K7): freeing a large part takes seconds. Imports no numpy."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import threading
from collections.abc import Callable

from .._select import backend as _backend
from ..errors import KVReuseError
from ..handles import Region
from .held import HeldFd


@dataclasses.dataclass(eq=False)
class Reclaim:
    """Memory of one retired part, until the keeper has closed all of it and no reader's session is left.

    `held` are the bytes that readers have, by session.
    """

    part_id: bytes
    nbytes: int
    table: int
    regions: list[Region | HeldFd]
    held: dict[int, int]
    is_closed: bool = False

    @property
    def pending_nbytes(self) -> int:
        """Bytes that are not given back yet."""
        return max(self.held.values(), default=0) if self.is_closed else self.nbytes


class Reclaimer:
    """One thread, started by the first retired part; `fd` polls readable when something was closed."""

    def __init__(self) -> None:
        self.fd, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._work: queue.SimpleQueue[Reclaim | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.pending: list[Reclaim] = []

    def add(self, item: Reclaim) -> None:
        """Close the item's memory soon; it is `pending` until then."""
        self.pending.append(item)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvreuse-reclaim", daemon=True)
            self._thread.start()
        self._work.put(item)

    def pending_nbytes(self) -> int:
        """Bytes that are not given back yet."""
        return sum(item.pending_nbytes for item in self.pending)

    def collect(self) -> None:
        """Forget what has been given back; call when `fd` is readable, or when a reader's session has ended."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 4096):
                pass
        self.pending = [item for item in self.pending if not item.is_closed or item.held]

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            close_all(item)
            item.is_closed = True
            with contextlib.suppress(BlockingIOError):  # full: the loop is told already
                os.write(self._wake, b"\0")

    def close(self) -> None:
        """Wait until all is closed, and end the thread."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
        os.close(self.fd)
        os.close(self._wake)


def close_all(item: Reclaim) -> None:
    """Close a retired part's table and regions, each whatever the others do."""
    closers: list[Callable[[], object]] = [region.close for region in item.regions]
    if item.table:
        closers.insert(0, lambda: _backend.table_close(item.table))
    for close in closers:
        with contextlib.suppress(KVReuseError, OSError):
            close()
