"""Device memory as a keeper without CUDA holds it: by an fd alone, whose size is declared. Imports no numpy."""

from __future__ import annotations

import fcntl
import os

from .. import _status
from .._select import backend as _backend
from ..handles import Region
from . import protocol


class HeldFd:
    """An fd that pins device memory. Owned: close it."""

    def __init__(self, fd: int, nbytes: int, physical_nbytes: int, region_id: bytes) -> None:
        """Take a copy of `fd`; raises SystemCallError or TooManyFdsError."""
        try:
            self._fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
        except OSError as error:
            raise _status.from_errno("fcntl", error.errno or 0) from None
        self._record = (nbytes, physical_nbytes, region_id, 0, 0, False)

    def record(self) -> protocol.Record:
        return self._record

    def duplicate(self) -> int:
        try:
            return fcntl.fcntl(self._fd, fcntl.F_DUPFD_CLOEXEC, 0)
        except OSError as error:
            raise _status.from_errno("fcntl", error.errno or 0) from None

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def record_of(memory: Region | HeldFd) -> protocol.Record:
    """Describe memory of a part, as it travels beside its fd."""
    if isinstance(memory, HeldFd):
        return memory.record()
    info = _backend.region_info(memory.handle)
    seals = _backend.region_observe(memory.handle).seals
    return info.nbytes, info.physical_nbytes, info.region_id, info.device, info.inode, seals <= 0


def fd_of(memory: Region | HeldFd) -> int:
    """Give a new fd of memory of a part, the caller's to close."""
    return memory.duplicate() if isinstance(memory, HeldFd) else int(_backend.region_export(memory.handle))


def read_only_fd_of(memory: Region | HeldFd) -> int:
    """Give a new fd of memory of a part that is open for reading only (S4), the caller's to close.

    Device memory has no such thing: an fd of it says nothing of access.
    """
    fd = fd_of(memory)
    if isinstance(memory, HeldFd):
        return fd
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _status.from_errno("open", error.errno or 0) from None
    finally:
        os.close(fd)
