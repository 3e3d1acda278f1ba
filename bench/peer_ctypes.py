"""The handle API as a careful person writes it by hand over ctypes, for bench_calls.py.

The system calls of `floor_calls.c` in the same order, each through ctypes with complete argument and result types, its
result checked; arguments by the one integer rule; handles in a dictionary under a lock. No messages, no fork check.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from typing import NamedTuple

from kvreuse import _status
from kvreuse._ctypes_libc import F_ADD_SEALS, F_GET_SEALS

_libc = ctypes.CDLL(None, use_errno=True)
_int, _long, _ptr = ctypes.c_int, ctypes.c_long, ctypes.c_void_p


class Stat(ctypes.Structure):
    """struct stat of x86-64; the fields that are read lie elsewhere on other machines, which changes no time."""

    _fields_ = [
        ("st_dev", ctypes.c_uint64),
        ("st_ino", ctypes.c_uint64),
        ("st_nlink", ctypes.c_uint64),
        ("st_mode", ctypes.c_uint32),
        ("ids", ctypes.c_uint32 * 3),
        ("st_rdev", ctypes.c_uint64),
        ("st_size", ctypes.c_int64),
        ("st_blksize", ctypes.c_int64),
        ("st_blocks", ctypes.c_int64),
        ("rest", ctypes.c_uint8 * 256),
    ]


class Info(NamedTuple):
    handle: int
    nbytes: int
    region_id: bytes
    device: int
    inode: int


class Seen(NamedTuple):
    nbytes: int
    blocks: int
    device: int
    inode: int
    mode: int
    seals: int
    flags: int
    block_nbytes: int


def _function(name, result, *arguments):
    function = _libc[name]
    function.argtypes, function.restype = arguments, result
    return function


_memfd_create = _function("memfd_create", _int, ctypes.c_char_p, ctypes.c_uint)
_ftruncate = _function("ftruncate", _int, _int, ctypes.c_int64)
_fcntl = _function("fcntl", _int, _int, _int, _long)
_fstat = _function("fstat", _int, _int, ctypes.POINTER(Stat))
_getrandom = _function("getrandom", ctypes.c_ssize_t, _ptr, ctypes.c_size_t, ctypes.c_uint)
_mmap = _function("mmap", _ptr, _ptr, ctypes.c_size_t, _int, _int, _int, ctypes.c_int64)
_munmap = _function("munmap", _int, _ptr, ctypes.c_size_t)
_close = _function("close", _int, _int)
_lock = threading.Lock()
_numbers = itertools.count(1)
_things: dict[int, tuple[int, int]] = {}


def _checked(result, call):
    if result < 0:
        raise _status.from_errno(call, ctypes.get_errno())
    return result


def _find(handle):
    try:
        return _things[_status.as_integer(handle, "handle")]
    except KeyError:
        raise _status.make(-1, 4, (handle,), "find") from None


def _register(thing):
    with _lock:
        handle = next(_numbers)
        _things[handle] = thing
    return handle


_ids: list[bytes] = []


def _random_id():
    with _lock:
        if not _ids:
            data = ctypes.create_string_buffer(1024)
            _checked(_getrandom(data, 1024, 0), "getrandom")
            _ids.extend(data.raw[i : i + 16] for i in range(0, 1024, 16))
        return _ids.pop()


def host_allocate(nbytes, kind, name, directory):
    nbytes, kind = _status.as_integer(nbytes, "nbytes", 1), _status.as_integer(kind, "kind", 0, 8)
    fd = _checked(_memfd_create(name.encode(), 3), "memfd_create")
    try:
        _checked(_ftruncate(fd, nbytes), "ftruncate")
        _checked(_fcntl(fd, F_ADD_SEALS, 7), "fcntl")
        found = Stat()
        _checked(_fstat(fd, ctypes.byref(found)), "fstat")
        _checked(_fcntl(fd, 3, 0), "fcntl")
        return Info(_register((fd, nbytes)), nbytes, _random_id(), found.st_dev, found.st_ino)
    except BaseException:
        _close(fd)
        raise


def region_export(handle):
    with _lock:
        return _checked(_fcntl(_find(handle)[0], 1030, 0), "fcntl")


def region_import(fd, nbytes, physical_nbytes, region_id, device, inode, flags):
    fd, nbytes = _status.as_integer(fd, "fd", 0, 2**31 - 1), _status.as_integer(nbytes, "nbytes", 1)
    physical_nbytes = _status.as_integer(physical_nbytes, "physical_nbytes", 1)
    device, inode = _status.as_integer(device, "device", 0, 2**64 - 1), _status.as_integer(inode, "inode", 0, 2**64 - 1)
    found = Stat()
    _checked(_fstat(fd, ctypes.byref(found)), "fstat")
    if (found.st_dev, found.st_ino, found.st_size) != (device, inode, physical_nbytes):
        raise ValueError("another memory")
    if not _checked(_fcntl(fd, F_GET_SEALS, 0), "fcntl") & 2:
        raise ValueError("not sealed")
    own = _checked(_fcntl(fd, 1030, 0), "fcntl")
    try:
        _checked(_fstat(own, ctypes.byref(found)), "fstat")
        _checked(_fcntl(own, 3, 0), "fcntl")
        return Info(_register((own, nbytes)), nbytes, region_id, found.st_dev, found.st_ino)
    except BaseException:
        _close(own)
        raise


def region_map(handle, access, flags):
    access, flags = _status.as_integer(access, "access", 1, 3), _status.as_integer(flags, "flags", 0, 1)
    with _lock:
        fd, nbytes = _find(handle)
        found = Stat()
        _checked(_fstat(fd, ctypes.byref(found)), "fstat")
        if found.st_size < nbytes:
            raise ValueError("cut")
        address = _mmap(None, nbytes, access, 1, fd, 0)
        if address in (None, 2**64 - 1):
            raise _status.from_errno("mmap", ctypes.get_errno())
    return Info(_register((address, nbytes)), nbytes, b"", 0, 0)


def region_observe(handle):
    with _lock:
        fd, _ = _find(handle)
        found = Stat()
        _checked(_fstat(fd, ctypes.byref(found)), "fstat")
        flags = _checked(_fcntl(fd, 3, 0), "fcntl") & os.O_ACCMODE
        seals = _checked(_fcntl(fd, F_GET_SEALS, 0), "fcntl")
    return Seen(
        found.st_size, found.st_blocks, found.st_dev, found.st_ino, found.st_mode, seals, flags, found.st_blksize
    )


def mapping_unmap(handle):
    with _lock:
        address, nbytes = _find(handle)
        _checked(_munmap(address, nbytes), "munmap")
        del _things[handle]


def region_close(handle):
    with _lock:
        fd, _ = _find(handle)
        del _things[handle]
    _checked(_close(fd), "close")


def echo(value):
    return _status.as_integer(value, "value")
