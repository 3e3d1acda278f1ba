"""The few things of libc and of CPython's buffers that Python does not offer, or not as this library needs them.

Every function has its argument and result types: without them ctypes cuts 64-bit values to 32 bits.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
# A call through PyDLL keeps the GIL: a lock taken by one that releases it is held for as long as other threads run.
_libc_with_gil = ctypes.PyDLL(None, use_errno=True)

# Linux numbers, written out since Python's own constants depend on the libc it was built with.
F_GETLK, F_SETLK = 5, 6
F_WRLCK, F_UNLCK, SEEK_SET = 1, 2, 0
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4
MFD_CLOEXEC, MFD_ALLOW_SEALING = 1, 2
MADV_DONTFORK = 10
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}


# ---- memory without a name ----

_syscall = _libc.syscall
_syscall.argtypes = [ctypes.c_long, ctypes.c_char_p, ctypes.c_uint]
_syscall.restype = ctypes.c_long


def memfd_create(name: bytes, flags: int) -> int:
    """Make anonymous memory by the system call itself: glibc before 2.27 has no function for it.

    Raises
    ------
    OSError
        With the call's errno; ENOSYS also on a machine whose number of the call is not known here.
    """
    number = _MEMFD_CREATE.get(platform.machine(), -1)
    fd: int = _syscall(number, name, flags)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "memfd_create")
    return fd


# ---- POSIX record locks ----


class flock(ctypes.Structure):
    _fields_ = [
        ("l_type", ctypes.c_short),
        ("l_whence", ctypes.c_short),
        ("l_start", ctypes.c_int64),
        ("l_len", ctypes.c_int64),
        ("l_pid", ctypes.c_int32),
    ]


_fcntl = _libc_with_gil.fcntl
_fcntl.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.POINTER(flock)]
_fcntl.restype = ctypes.c_int

_LOCK = flock(F_WRLCK, SEEK_SET, 0, 1, 0)
_UNLOCK = flock(F_UNLCK, SEEK_SET, 0, 1, 0)
_LOCK_REF, _UNLOCK_REF = ctypes.pointer(_LOCK), ctypes.pointer(_UNLOCK)


def lock_try(fd: int) -> int:
    """Try once to take the record lock on byte 0; return 0 or the errno. Keeps the GIL, never blocks."""
    return 0 if _fcntl(fd, F_SETLK, _LOCK_REF) == 0 else ctypes.get_errno()


def lock_drop(fd: int) -> None:
    """Drop this process' record lock on byte 0, if it has it."""
    _fcntl(fd, F_SETLK, _UNLOCK_REF)


def lock_holder(fd: int) -> int:
    """Return the pid of a process that keeps this one from the lock, 0 if nobody does or it has no pid here."""
    query = flock(F_WRLCK, SEEK_SET, 0, 1, 0)
    if _fcntl(fd, F_GETLK, ctypes.pointer(query)) != 0 or query.l_type == F_UNLCK:
        return 0
    return max(int(query.l_pid), 0)


# ---- where pages are ----

_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}
_move_pages = _libc["syscall"]  # another function object: its own argtypes
_move_pages.argtypes = [
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int,
]
_move_pages.restype = ctypes.c_long


def page_nodes(addresses: list[int]) -> list[int]:
    """Return the NUMA node of each page, or a negative errno; moves nothing. Raises OSError."""
    count = len(addresses)
    pages, status = (ctypes.c_void_p * count)(*addresses), (ctypes.c_int * count)()
    number = _MOVE_PAGES.get(platform.machine(), -1)
    if _move_pages(number, 0, count, ctypes.addressof(pages), None, ctypes.addressof(status), 0) < 0:
        raise OSError(ctypes.get_errno(), "move_pages")
    return list(status)


# ---- buffers ----


class Py_buffer(ctypes.Structure):
    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


# Not ctypes.pythonapi, whose function objects are everybody's: another's argtypes would be ours.
_get_buffer = _libc_with_gil["PyObject_GetBuffer"]
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(Py_buffer), ctypes.c_int]
_get_buffer.restype = ctypes.c_int
_release_buffer = _libc_with_gil["PyBuffer_Release"]
_release_buffer.argtypes = [ctypes.POINTER(Py_buffer)]
_release_buffer.restype = None
_incref = _libc_with_gil["Py_IncRef"]
_incref.argtypes = [ctypes.py_object]
_incref.restype = None


def _address_of_buffer(exporter: Any) -> int:
    view = Py_buffer()
    _get_buffer(exporter, ctypes.byref(view), 0)  # 0: PyBUF_SIMPLE; raises by itself
    address = int(view.buf or 0)
    _release_buffer(ctypes.byref(view))
    return address


def array_type(nbytes: int) -> Any:
    """Return the ctypes type of `nbytes` bytes; its ``from_address`` gives memory to google_crc32c without a copy."""
    return ctypes.c_ubyte * nbytes


def keep_for_ever(thing: Any) -> None:
    """Make sure that no destructor of `thing` runs in this process any more."""
    _incref(thing)


# mmap_object: the head, then data, size, pos, offset, and the count of exported buffers, which Python does not tell.
_DATA_OFFSET = object.__basicsize__
_EXPORTS_OFFSET = _DATA_OFFSET + 4 * ctypes.sizeof(ctypes.c_void_p)
_word_at = ctypes.c_ssize_t.from_address


def _peek(exporter: mmap.mmap) -> int:
    return _word_at(id(exporter) + _EXPORTS_OFFSET).value


def _can_peek() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as probe:
        seen = [_peek(probe)]
        for _ in range(2):
            with memoryview(probe), memoryview(probe):
                seen.append(_peek(probe))
        address = _word_at(id(probe) + _DATA_OFFSET).value
        return seen == [0, 2, 2] and _peek(probe) == 0 and address == _address_of_buffer(probe)


_CAN_PEEK = _can_peek()


def export_count(exporter: mmap.mmap) -> int:
    """Count the buffers taken from an open mmap; where this Python lays its objects out otherwise, always 0."""
    return _peek(exporter) if _CAN_PEEK and not exporter.closed else 0


def address_of(exporter: mmap.mmap) -> int:
    """Return the address of an open mmap's first byte, read-only ones included. Valid while the mmap is open."""
    return _word_at(id(exporter) + _DATA_OFFSET).value if _CAN_PEEK else _address_of_buffer(exporter)


# Between addresses; lets the GIL go.
memmove = ctypes.memmove
