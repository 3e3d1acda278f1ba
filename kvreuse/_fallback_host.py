"""Handles, regions and mappings of the fallback, and the conversion of arguments. Meanings: include/kvreuse.h."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from . import _api, _status
from . import _ctypes_libc as libc
from . import _ctypes_structs as c

with warnings.catch_warnings():
    # Without its C extension it warns and takes Python: slower, as everything here.
    warnings.simplefilter("ignore", RuntimeWarning)
    import google_crc32c

PAGE = mmap.PAGESIZE
INT32 = (-(2**31), 2**31 - 1)
UINT32 = (0, 2**32 - 1)
UINT64 = (0, 2**64 - 1)

# Guards handles and what they name. Re-entrant: a finalizer may close something while this thread is in here.
lock: Any = threading.RLock()
_idle = threading.Condition(lock)  # a call on something has ended


# ---- CRC32C ----

if google_crc32c.implementation == "c":
    crc: Callable[[Any], int] = google_crc32c.value
    crc_extend: Callable[[int, Any], int] = google_crc32c.extend
else:

    def crc(data: Any) -> int:
        """Compute the CRC32C of bytes, or of a ctypes array."""
        return int(google_crc32c.value(bytes(data)))

    def crc_extend(value: int, data: Any) -> int:
        """Go on from `value`."""
        return int(google_crc32c.extend(value, bytes(data)))


_CRC_STEP = 1 << 18  # bytes copied at a time: google_crc32c takes no memoryview


# ---- arguments ----


def bytes_view(value: Any, name: str, writable: bool = False) -> memoryview:
    """Take a C-contiguous buffer as unsigned bytes."""
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):
        view = None
    if view is None or not view.c_contiguous or (writable and view.readonly):
        want = "a writable C-contiguous bytes buffer" if writable else "a C-contiguous bytes buffer"
        raise _status.buffer_error(name, value, want)
    if view.format == "B" and view.ndim == 1:
        return view
    # A view without bytes cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def int64_view(value: Any, name: str, writable: bool = False) -> memoryview:
    """Take a C-contiguous one-dimensional buffer of int64."""
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):
        view = None
    if (
        view is None
        or view.ndim != 1
        or view.format not in ("q", "l")
        or view.itemsize != 8
        or not view.c_contiguous
        or (writable and view.readonly)
    ):
        want = "a writable C-contiguous int64 array" if writable else "a C-contiguous int64 array"
        raise _status.buffer_error(name, value, want)
    return view


def check_length(name: str, found: int, expected: int, unit: str) -> None:
    if found != expected:
        raise _status.buffer_length_error(name, found, expected, unit)


def as_bytes(value: Any, name: str) -> bytes:
    if type(value) is not bytes:
        raise _status.buffer_error(name, value, "bytes")
    return value


def _as_text(value: Any, name: str, want: str) -> bytes:
    if not isinstance(value, str):
        raise _status.buffer_error(name, value, want)
    if "\0" in value:
        raise _status.buffer_error(name, value, "str without NUL")
    return value.encode("utf-8", "surrogateescape")


# ---- handles ----


class Region:
    """A region; its fd, or the driver's handle, is owned."""

    __slots__ = (
        "access",
        "calls",
        "closing",
        "device",
        "fabric_count",
        "fd",
        "handle",
        "inode",
        "kind",
        "mapping_count",
        "native",
        "nbytes",
        "origin",
        "physical_nbytes",
        "provider",
        "region_id",
    )
    sort = c.KVR_SORT_REGION

    def __init__(
        self,
        fd: int,
        nbytes: int,
        physical_nbytes: int,
        kind: int,
        access: int,
        origin: int,
        device: int,
        inode: int,
        region_id: bytes,
    ) -> None:
        self.handle = 0
        self.fd = fd
        self.nbytes, self.physical_nbytes = nbytes, physical_nbytes
        self.kind, self.access, self.origin = kind, access, origin
        self.mapping_count = 0
        self.device, self.inode = device, inode
        self.region_id = region_id
        self.provider = c.KVR_PROVIDER_HOST
        self.native = 0  # CUDA: the allocation handle
        self.fabric_count = 0
        self.calls = 0  # threads inside a call on it, which does not hold the lock
        self.closing = False  # being closed without the lock: stale to every other call

    def info(self) -> _api.RegionInfo:
        return _api.RegionInfo(
            self.handle,
            self.nbytes,
            self.physical_nbytes,
            self.kind,
            self.access,
            self.origin,
            self.mapping_count,
            self.device,
            self.inode,
            self.region_id,
            self.provider,
            self.fabric_count,
        )


def check_host(region: Region, call: str) -> None:
    """Refuse a region that the CPU cannot map, in a call that needs host memory."""
    if region.provider != c.KVR_PROVIDER_HOST:
        values = (region.handle, region.provider)
        raise _status.make(c.KVR_ERROR_NOT_SUPPORTED, c.KVR_DETAIL_PROVIDER, values, call)


class MappingBuffer(mmap.mmap):
    """What exports a mapping's bytes; the mapping stays while anyone has a buffer of it."""

    __slots__ = ()


class Mapping:
    """A mapping of a region; `buffer` is None for CUDA memory."""

    __slots__ = (
        "access",
        "address",
        "buffer",
        "calls",
        "closing",
        "flights",
        "handle",
        "holds",
        "is_unmapped",
        "nbytes",
        "region",
        "uses",
    )
    sort = c.KVR_SORT_MAPPING

    def __init__(self, region: Region, buffer: MappingBuffer | None, address: int, access: int) -> None:
        self.handle = 0
        self.region = region
        self.buffer = buffer
        self.address = address
        self.nbytes = region.nbytes
        self.access = access
        self.uses = 0  # by mapping_use: callers may drop these
        self.holds = 0  # by tables and calls that read it; views are counted by the buffer
        self.flights = 0  # operations that name it
        self.calls = 0  # as of a region
        self.closing = False
        self.is_unmapped = False  # CUDA: only the addresses are left to give back

    def info(self) -> _api.MappingInfo:
        uses = self.uses + self.holds + (libc.export_count(self.buffer) if self.buffer is not None else 0)
        address = 0 if self.is_unmapped else self.address
        return _api.MappingInfo(self.handle, self.region.handle, address, self.nbytes, self.access, uses)


def mapping_of(region: Region) -> Mapping | None:
    """Find any mapping of a region. The caller holds `lock`."""
    if not region.mapping_count:
        return None
    mappings = (o for o in _objects if type(o) is Mapping and o.region is region)
    return next((o for o in mappings if not o.closing and not o.is_unmapped), None)


_GENERATION_MAX = 2**31 - 1
_generations: list[int] = []
_objects: list[Any] = []
_vacant: list[int] = []
_counts: dict[int, int] = dict.fromkeys(range(c.KVR_SORT_REGION, c.KVR_SORT_OPERATION + 1), 0)

_owner_pid = os.getpid()
_is_forked = False

T = TypeVar("T")


def register(thing: Any) -> int:
    """Give `thing` a handle that no other thing ever had or will have. The caller holds `lock`."""
    if _vacant:
        slot = _vacant.pop()
    else:
        slot = len(_objects)
        _generations.append(0)
        _objects.append(None)
    _generations[slot] += 1
    _objects[slot] = thing
    _counts[thing.sort] += 1
    handle = _generations[slot] << 32 | slot
    thing.handle = handle
    return handle


def unregister(thing: Any) -> None:
    """Make a handle stale. The caller holds `lock`."""
    slot = thing.handle & 0xFFFFFFFF
    _objects[slot] = None
    _counts[thing.sort] -= 1
    # An exhausted generation retires its slot.
    if _generations[slot] < _GENERATION_MAX:
        _vacant.append(slot)


def is_registered(thing: Any) -> bool:
    """Whether a thing has a handle that is not stale. The caller holds `lock`."""
    return thing.handle > 0 and _objects[thing.handle & 0xFFFFFFFF] is thing


def find(handle: int, sort: type[T], call: str) -> T:
    """Return what a handle names, or raise. The caller holds `lock` for as long as it needs the thing."""
    if handle <= 0:
        raise _status.make(c.KVR_ERROR_INVALID_HANDLE, c.KVR_DETAIL_HANDLE_NOT_POSITIVE, (handle,), call)
    slot, generation = handle & 0xFFFFFFFF, handle >> 32
    if slot >= len(_objects) or generation == 0 or generation > _generations[slot]:
        raise _status.make(c.KVR_ERROR_INVALID_HANDLE, c.KVR_DETAIL_HANDLE_UNKNOWN, (handle,), call)
    thing = _objects[slot]
    if thing is None or thing.closing or generation < _generations[slot]:
        raise _status.make(c.KVR_ERROR_STALE_HANDLE, c.KVR_DETAIL_HANDLE_STALE, (handle,), call)
    if type(thing) is not sort:
        values = (handle, thing.sort, sort.sort)  # type: ignore[attr-defined]
        raise _status.make(c.KVR_ERROR_INVALID_HANDLE, c.KVR_DETAIL_HANDLE_SORT, values, call)
    return thing


def call_begin(thing: Any) -> None:
    """Say that this call works on a thing while it lets `lock` go. The caller holds `lock`."""
    thing.calls += 1


def call_end(thing: Any) -> None:
    """Say that it is done. The caller does not hold `lock`."""
    with lock:
        thing.calls -= 1
        _idle.notify_all()


def tell_idle() -> None:
    """Say that a call which was counted otherwise is done."""
    with lock:
        _idle.notify_all()


def find_idle(handle: int, sort: type[T], call: str) -> T:
    """Find what is to be closed, once no call is on it; others' are waited for. The caller holds `lock`."""
    until = 0.0
    while True:
        thing: Any = find(handle, sort, call)
        check_fork(call)
        if not thing.calls:
            return thing  # type: ignore[no-any-return]
        until = until or time.monotonic() + c.KVR_CLOSE_WAIT_NS / 1e9
        if not _idle.wait(until - time.monotonic()):
            raise _status.make(c.KVR_ERROR_BUSY, c.KVR_DETAIL_HANDLE_IN_CALL, (handle,), call)


def check_fork(call: str) -> None:
    """Refuse to work in a forked child of the process that owns the state."""
    if _is_forked:
        raise _status.make(c.KVR_ERROR_FORKED, c.KVR_DETAIL_FORKED, (_owner_pid, os.getpid()), call)


def is_forked() -> bool:
    return _is_forked


def _after_fork_in_child() -> None:
    global _is_forked, lock, _idle
    _is_forked = True
    lock = threading.RLock()  # another thread of the parent may have held the old one
    _idle = threading.Condition(lock)
    for buffer in _buffers:
        # Its destructor would unmap an address that may be another mapping's here: MADV_DONTFORK left a hole.
        libc.keep_for_ever(buffer)


os.register_at_fork(after_in_child=_after_fork_in_child)


# ---- memory ----

_buffers: set[MappingBuffer] = set()
# An mmap object dups its fd, from Python 3.13 on only if asked to.
try:
    MappingBuffer(-1, PAGE, trackfd=False).close()  # type: ignore[call-arg,unused-ignore]
except TypeError:
    _TRACK: dict[str, Any] = {}
    _FDS_A_BUFFER = 1
else:
    _TRACK = {"trackfd": False}
    _FDS_A_BUFFER = 0


def map_memory(fd: int, nbytes: int, access: int, dontfork: bool, call: str, offset: int = 0) -> MappingBuffer:
    """Map `nbytes` bytes of an fd, shared. Close it with `unmap_memory`."""
    # Touching pages that a file was cut by is a SIGBUS; mmap itself looks only at files whose fstat works.
    try:
        found = os.fstat(fd).st_size
    except OSError as error:
        raise _status.from_errno("fstat", error.errno or 0) from None
    if found < offset + nbytes:
        raise _status.make(c.KVR_ERROR_SIZE_MISMATCH, c.KVR_DETAIL_IMPORT_SIZE, (offset + nbytes, found), call)
    protection = mmap.PROT_READ | mmap.PROT_WRITE if access == c.KVR_ACCESS_READ_WRITE else mmap.PROT_READ
    try:
        buffer = MappingBuffer(fd, nbytes, mmap.MAP_SHARED, protection, mmap.ACCESS_DEFAULT, offset, **_TRACK)
    except OSError as error:
        raise _status.from_errno("mmap", error.errno or 0) from None
    except ValueError:
        # It was cut just now.
        found = step("fstat", os.fstat, fd).st_size
        values = (offset + nbytes, found)
        raise _status.make(c.KVR_ERROR_SIZE_MISMATCH, c.KVR_DETAIL_IMPORT_SIZE, values, call) from None
    _buffers.add(buffer)
    if dontfork:
        try:
            buffer.madvise(libc.MADV_DONTFORK)
        except OSError as error:
            unmap_memory(buffer)
            raise _status.from_errno("madvise", error.errno or 0) from None
    return buffer


def unmap_memory(buffer: MappingBuffer) -> None:
    """Unmap; BufferError while somebody has a buffer of it."""
    buffer.close()
    _buffers.discard(buffer)


def buffer_fds() -> int:
    return len(_buffers) * _FDS_A_BUFFER


def _round_up(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _access_of(fd: int) -> int:
    mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    return {os.O_RDONLY: c.KVR_ACCESS_READ, os.O_RDWR: c.KVR_ACCESS_READ_WRITE}.get(mode, c.KVR_ACCESS_NONE)


def _seals_of(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, libc.F_GET_SEALS)
    except OSError:
        return -1


def step(call: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of `os`, turning its OSError into ours."""
    try:
        return function(*arguments)
    except OSError as error:
        raise _status.from_errno(call, error.errno or 0) from None


_ID_BATCH = 64
_ids: list[bytes] = []  # random, not given out yet; a forked child gets none of them


def random_id() -> bytes:
    """Return 16 random bytes, which no other call returns."""
    size = c.KVR_REGION_ID_NBYTES
    with lock:
        if not _ids:
            # Not os.urandom: where the call fails, that reads a file and keeps its fd.
            data = bytes(step("getrandom", os.getrandom, _ID_BATCH * size))
            _ids.extend(data[i : i + size] for i in range(0, len(data), size))
        return _ids.pop()


def _host_region(fd: int, nbytes: int, physical: int, kind: int, origin: int, region_id: bytes | None) -> Region:
    """Make a region of an fd, without a handle yet. region_id None: a new one."""
    found = step("fstat", os.fstat, fd)
    access = step("fcntl", _access_of, fd)
    name = random_id() if region_id is None else region_id
    return Region(fd, nbytes, physical, kind, access, origin, found.st_dev, found.st_ino, name)


_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)


def _open_unnamed(directory: bytes) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise _status.from_errno("open", error.errno or 0) from None
    # A file system without O_TMPFILE: the name exists for a moment.
    path = os.path.join(directory, b".kvreuse-" + random_id()[:8].hex().encode())
    fd = int(step("open", os.open, path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    try:
        step("unlink", os.unlink, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def host_allocate(nbytes: Any, kind: Any, name: str, directory: str | None) -> _api.RegionInfo:
    call = "host_allocate"
    nbytes = _status.as_integer(nbytes, "nbytes")
    kind = _status.as_integer(kind, "kind", *INT32)
    label = _as_text(name, "name", "str")
    folder = None if directory is None else _as_text(directory, "directory", "str or None")
    if not 1 <= nbytes <= c.KVR_NBYTES_MAX:
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_NBYTES_RANGE, (nbytes, c.KVR_NBYTES_MAX), call)
    if len(label) > c.KVR_REGION_NAME_NBYTES:
        values = (len(label), c.KVR_REGION_NAME_NBYTES)
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_NAME_TOO_LONG, values, call)
    if kind == c.KVR_KIND_FABRIC:
        raise _status.make(c.KVR_ERROR_NOT_SUPPORTED, c.KVR_DETAIL_KIND_NOT_ALLOCATABLE, (kind,), call)
    if kind not in (c.KVR_KIND_NONE, c.KVR_KIND_POSIX_FD):
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_KIND_UNKNOWN, (kind,), call)
    check_fork(call)
    physical = _round_up(nbytes)
    if folder is None:
        fd = step("memfd_create", libc.memfd_create, label, libc.MFD_CLOEXEC | libc.MFD_ALLOW_SEALING)
    else:
        fd = _open_unnamed(folder)
    try:
        step("ftruncate", os.ftruncate, fd, physical)
        if folder is None:
            seals = libc.F_SEAL_SHRINK | libc.F_SEAL_GROW | libc.F_SEAL_SEAL
            step("fcntl", fcntl.fcntl, fd, libc.F_ADD_SEALS, seals)
        else:
            # A full file system is an error now, not a SIGBUS at the first touch.
            step("posix_fallocate", os.posix_fallocate, fd, 0, physical)
        region = _host_region(fd, nbytes, physical, kind, c.KVR_ORIGIN_ALLOCATED, None)
        with lock:
            register(region)
            return region.info()
    except BaseException:
        os.close(fd)
        raise


def region_info(region: Any) -> _api.RegionInfo:
    handle = _status.as_integer(region, "region")
    with lock:
        return find(handle, Region, "region_info").info()


def region_export(region: Any) -> int:
    call = "region_export"
    handle = _status.as_integer(region, "region")
    with lock:
        thing = find(handle, Region, call)
        check_fork(call)
        if thing.kind != c.KVR_KIND_POSIX_FD:
            raise _status.make(c.KVR_ERROR_NOT_SUPPORTED, c.KVR_DETAIL_KIND_NOT_EXPORTABLE, (thing.kind,), call)
        if thing.provider == c.KVR_PROVIDER_HOST:
            try:
                return fcntl.fcntl(thing.fd, fcntl.F_DUPFD_CLOEXEC, 0)
            except OSError as error:
                raise _status.from_errno("fcntl", error.errno or 0) from None
        call_begin(thing)
    try:
        return int(_cuda().export_fd(thing))
    finally:
        call_end(thing)


def region_import(
    fd: Any, nbytes: Any, physical_nbytes: Any, region_id: bytes, device: Any, inode: Any, flags: Any
) -> _api.RegionInfo:
    call = "region_import"
    fd = _status.as_integer(fd, "fd", *INT32)
    nbytes = _status.as_integer(nbytes, "nbytes")
    physical = _status.as_integer(physical_nbytes, "physical_nbytes")
    region_id = as_bytes(region_id, "region_id")
    device = _status.as_integer(device, "device", *UINT64)
    inode = _status.as_integer(inode, "inode", *UINT64)
    flags = _status.as_integer(flags, "flags", *UINT32)
    check_length("region_id", len(region_id), c.KVR_REGION_ID_NBYTES, "bytes")
    if flags & ~c.KVR_IMPORT_ALLOW_UNSEALED:
        values: tuple[int, ...] = (flags, c.KVR_IMPORT_ALLOW_UNSEALED)
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_FLAGS_UNKNOWN, values, call)
    if fd < 0:
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_FD_NEGATIVE, (fd,), call)
    if not 1 <= nbytes <= c.KVR_NBYTES_MAX:
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_NBYTES_RANGE, (nbytes, c.KVR_NBYTES_MAX), call)
    if physical != _round_up(nbytes):
        values = (nbytes, physical, PAGE)
        raise _status.make(c.KVR_ERROR_SIZE_MISMATCH, c.KVR_DETAIL_IMPORT_NBYTES, values, call)
    found = step("fstat", os.fstat, fd)
    if not stat.S_ISREG(found.st_mode):
        raise _status.make(c.KVR_ERROR_KIND_MISMATCH, c.KVR_DETAIL_FD_NOT_MEMORY, (fd, found.st_mode), call)
    if (device or inode) and (device, inode) != (found.st_dev, found.st_ino):
        values = (device, inode, found.st_dev, found.st_ino)
        raise _status.make(c.KVR_ERROR_STALE_HANDLE, c.KVR_DETAIL_IMPORT_INODE, values, call)
    if found.st_size != physical:
        values = (physical, found.st_size)
        raise _status.make(c.KVR_ERROR_SIZE_MISMATCH, c.KVR_DETAIL_IMPORT_SIZE, values, call)
    if not flags & c.KVR_IMPORT_ALLOW_UNSEALED:
        seals = _seals_of(fd)
        if seals < 0 or not seals & libc.F_SEAL_SHRINK:
            values = (seals, libc.F_SEAL_SHRINK)
            raise _status.make(c.KVR_ERROR_PERMISSION_DENIED, c.KVR_DETAIL_IMPORT_SEALS, values, call)
    check_fork(call)
    own = step("fcntl", fcntl.fcntl, fd, fcntl.F_DUPFD_CLOEXEC, 0)
    try:
        region = _host_region(own, nbytes, physical, c.KVR_KIND_POSIX_FD, c.KVR_ORIGIN_IMPORTED, region_id)
        with lock:
            register(region)
            return region.info()
    except BaseException:
        os.close(own)
        raise


def region_observe(region: Any) -> _api.HostObservation:
    handle = _status.as_integer(region, "region")
    with lock:
        thing = find(handle, Region, "region_observe")
        check_host(thing, "region_observe")
        found = step("fstat", os.fstat, thing.fd)
        access = step("fcntl", _access_of, thing.fd)
        seals = _seals_of(thing.fd)
    return _api.HostObservation(
        found.st_size,
        found.st_blocks * 512,
        found.st_dev,
        found.st_ino,
        found.st_mode,
        seals,
        access,
        PAGE,
        found.st_blksize,
    )


def region_placement(region: Any, nodes: Any) -> int:
    call = "region_placement"
    handle = _status.as_integer(region, "region")
    out = int64_view(nodes, "nodes", True)
    capacity = len(out)
    with lock:
        thing = find(handle, Region, call)
        check_host(thing, call)
        if not 1 <= capacity <= c.KVR_PLACEMENT_COUNT_MAX:
            values = (capacity, c.KVR_PLACEMENT_COUNT_MAX)
            raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_COUNT_RANGE, values, call)
        check_fork(call)
        mapping = mapping_of(thing)
        if mapping is None:
            return 0
        last = (mapping.nbytes - 1) // PAGE
        count = min(last + 1, capacity)
        pages = [mapping.address + (last * i // (count - 1) if count > 1 else 0) * PAGE for i in range(count)]
        found = step("move_pages", libc.page_nodes, pages)
    for i, node in enumerate(found):
        out[i] = node
    return count


def region_map(region: Any, access: Any, flags: Any) -> _api.MappingInfo:
    call = "region_map"
    handle = _status.as_integer(region, "region")
    access = _status.as_integer(access, "access", *INT32)
    flags = _status.as_integer(flags, "flags", *UINT32)
    with lock:
        thing = find(handle, Region, call)
        if access not in (c.KVR_ACCESS_READ, c.KVR_ACCESS_READ_WRITE):
            raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_ACCESS_UNKNOWN, (access,), call)
        if flags & ~c.KVR_MAP_DONTFORK:
            values = (flags, c.KVR_MAP_DONTFORK)
            raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_FLAGS_UNKNOWN, values, call)
        if access == c.KVR_ACCESS_READ_WRITE and thing.access != c.KVR_ACCESS_READ_WRITE:
            raise _status.make(c.KVR_ERROR_PERMISSION_DENIED, c.KVR_DETAIL_ACCESS_READ_ONLY, (handle,), call)
        check_fork(call)
        if thing.provider == c.KVR_PROVIDER_HOST:
            buffer = map_memory(thing.fd, thing.nbytes, access, bool(flags & c.KVR_MAP_DONTFORK), call)
            try:
                mapping = Mapping(thing, buffer, libc.address_of(buffer), access)
                register(mapping)
            except BaseException:
                unmap_memory(buffer)
                raise
            thing.mapping_count += 1
            return _api.MappingInfo(mapping.handle, handle, mapping.address, mapping.nbytes, access, 0)
        call_begin(thing)
    try:
        mapping = Mapping(thing, None, _cuda().map_region(thing, access, call), access)
        try:
            with lock:
                register(mapping)
                thing.mapping_count += 1
        except BaseException:
            _cuda().unmap(mapping)
            raise
        return mapping.info()
    finally:
        call_end(thing)


def region_close(region: Any) -> None:
    call = "region_close"
    handle = _status.as_integer(region, "region")
    with lock:
        thing = find_idle(handle, Region, call)
        if thing.mapping_count:
            values = (handle, thing.mapping_count)
            raise _status.make(c.KVR_ERROR_BUSY, c.KVR_DETAIL_REGION_MAPPED, values, call)
        if thing.fabric_count:
            values = (handle, thing.fabric_count)
            raise _status.make(c.KVR_ERROR_BUSY, c.KVR_DETAIL_FABRIC_GIVEN_OUT, values, call)
        if thing.provider == c.KVR_PROVIDER_HOST:
            unregister(thing)
            fd, thing.fd = thing.fd, -1
        else:
            thing.closing = True
    if thing.closing:
        _close_without_lock(thing, _cuda().release)
        return
    try:  # noqa: SIM105 - contextlib.suppress costs more than the call
        os.close(fd)
    except OSError:
        pass  # after close() the number is free whatever it says


def _close_without_lock(thing: Any, close: Callable[[Any], None]) -> None:
    """Close a thing that is marked as closing by a call that may take long; it stays if that fails."""
    try:
        close(thing)
    except BaseException:
        thing.closing = False
        raise
    with lock:
        unregister(thing)
        if type(thing) is Mapping:
            thing.region.mapping_count -= 1


def _cuda() -> Any:
    from . import _fallback_cuda  # which imports this module

    return _fallback_cuda


def mapping_info(mapping: Any) -> _api.MappingInfo:
    handle = _status.as_integer(mapping, "mapping")
    with lock:
        return find(handle, Mapping, "mapping_info").info()


def mapping_buffer(mapping: Any) -> MappingBuffer:
    call = "mapping_buffer"
    handle = _status.as_integer(mapping, "mapping")
    with lock:
        thing = find(handle, Mapping, call)
        check_fork(call)
        if thing.buffer is None:
            raise _status.make(c.KVR_ERROR_NOT_SUPPORTED, c.KVR_DETAIL_NO_HOST_ADDRESS, (handle,), call)
        return thing.buffer


def mapping_dlpack(mapping: Any, device_type: Any, device_id: Any, is_versioned: Any) -> Any:
    call = "mapping_dlpack"
    handle = _status.as_integer(mapping, "mapping")
    device_type = _status.as_integer(device_type, "device_type", *INT32)
    device_id = _status.as_integer(device_id, "device_id", *INT32)
    from . import _ctypes_dlpack  # which imports numpy

    with lock:
        thing = find(handle, Mapping, call)
        check_fork(call)
        if thing.is_unmapped:
            raise _status.make(c.KVR_ERROR_STALE_HANDLE, c.KVR_DETAIL_HANDLE_STALE, (handle,), call)
        thing.holds += 1

    def done() -> None:
        with lock:
            thing.holds -= 1

    # Before DLPack 1.0 it cannot be said: the classes ask for that only of writable mappings.
    is_read_only = bool(is_versioned) and thing.access != c.KVR_ACCESS_READ_WRITE
    view = _ctypes_dlpack.View(thing.address, thing.nbytes, is_read_only, done)  # from here on it ends the hold
    return _ctypes_dlpack.capsule(view, device_type, device_id, bool(is_versioned))


def mapping_use(mapping: Any, delta: Any) -> None:
    call = "mapping_use"
    handle = _status.as_integer(mapping, "mapping")
    delta = _status.as_integer(delta, "delta", *INT32)
    with lock:
        thing = find(handle, Mapping, call)
        if delta not in (1, -1) or thing.uses + delta < 0:
            raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_COUNT_RANGE, (delta, 1), call)
        thing.uses += delta


def mapping_unmap(mapping: Any) -> None:
    call = "mapping_unmap"
    handle = _status.as_integer(mapping, "mapping")
    with lock:
        thing = find_idle(handle, Mapping, call)
        is_used = thing.uses > 0 or thing.holds > 0
        if thing.flights:
            if is_used or (thing.buffer is not None and libc.export_count(thing.buffer)):
                raise _status.make(c.KVR_ERROR_BUSY, c.KVR_DETAIL_MAPPING_IN_USE, (handle,), call)
            values = (handle, thing.flights)
            raise _status.make(c.KVR_ERROR_BUSY, c.KVR_DETAIL_MAPPING_IN_FLIGHT, values, call)
        if not is_used and thing.buffer is not None:
            try:
                unmap_memory(thing.buffer)
            except BufferError:
                is_used = True
        if is_used:
            raise _status.make(c.KVR_ERROR_BUSY, c.KVR_DETAIL_MAPPING_IN_USE, (handle,), call)
        if thing.buffer is not None:
            unregister(thing)
            thing.region.mapping_count -= 1
            return
        thing.closing = True
    _close_without_lock(thing, _cuda().unmap)


def counts() -> dict[int, int]:
    return _counts


def things(sort: type[T]) -> list[T]:
    """All that have a handle, of a sort. The caller holds `lock`."""
    return [thing for thing in _objects if type(thing) is sort]


def region_fds() -> int:
    """Count the fds that regions own. The caller holds `lock`."""
    return sum(type(thing) is Region and thing.fd >= 0 for thing in _objects)


def crc32c(data: Any, value: Any = 0) -> int:
    view = bytes_view(data, "data")
    value = _status.as_integer(value, "value", *UINT32)
    for start in range(0, view.nbytes, _CRC_STEP):
        value = crc_extend(value, view[start : start + _CRC_STEP].tobytes())
    return int(value)
