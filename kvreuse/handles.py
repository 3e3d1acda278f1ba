"""Providers, regions, mappings and shared handles: the objects over the backend's handles. Imports no numpy (P1)."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import mmap
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from . import _status
from ._api import MappingInfo
from ._context import Context
from ._select import backend as _backend
from .errors import (
    CorruptError,
    ForkedError,
    HandleClosedError,
    IncompatibleError,
    InvalidHandleError,
    KindMismatchError,
    KVReuseError,
    NotSupportedError,
    PermissionDeniedError,
    ProfileError,
    ProtocolError,
    SizeMismatchError,
    StaleHandleError,
    SystemCallError,
    WaitTimeoutError,
)
from .observation import Access, CudaObservation, Observation, observe_cuda, observe_host

if TYPE_CHECKING:
    from .profile import Profile

MAP_DONTFORK = 1  # KVR_MAP_DONTFORK
IMPORT_ALLOW_UNSEALED = 1  # KVR_IMPORT_ALLOW_UNSEALED
CUDA_ALLOW_FABRIC = 1  # KVR_CUDA_ALLOW_FABRIC
CUDA_FEATURES = {"batch_copy": 1, "stream_query": 2, "address_range_handle": 4}  # KVR_CUDA_HAS_...
REGION_ID_NBYTES = 16
TRIAL_TIMEOUT_S = 30.0
# How a sandbox or an old kernel says that there is no memfd for this process.
_NO_MEMFD = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL)


class HandleKind(enum.IntEnum):
    """How a region can be shared. The numbers are CUDA's (cuda.h, CUmemAllocationHandleType)."""

    NONE = 0
    POSIX_FD = 1
    FABRIC = 8


PAYLOAD_NBYTES = {HandleKind.NONE: 0, HandleKind.POSIX_FD: 4, HandleKind.FABRIC: 64}


@dataclasses.dataclass(frozen=True)
class Capability:
    """Whether a kind works here, found out by trial, and why not."""

    ok: bool
    reason: str


def open_provider(name: str, profile: Profile | None = None) -> Provider:
    """Open the provider "host" or "cuda:N".

    Parameters
    ----------
    name : str
        "host" (anonymous memfd) or "cuda:N" with N the device ordinal.
    profile : Profile, optional
        Allows what is off by default: the file fallback, fabric allocation.

    Returns
    -------
    Provider
        Owns nothing; regions made by it own themselves.

    Raises
    ------
    NotSupportedError
        No such provider.
    """
    return Provider(name, profile)


class Provider:
    """Where memory comes from. Made by `open_provider`."""

    def __init__(self, name: str, profile: Profile | None = None) -> None:
        if not isinstance(name, str):
            raise TypeError(f"a provider's name must be a str, not {type(name).__name__}")
        kind, _, ordinal = name.partition(":")
        if len(ordinal) > 10 or not (name == "host" or (kind == "cuda" and ordinal.isascii() and ordinal.isdigit())):
            raise NotSupportedError(f'provider {name!r} is unknown: expected "host" or "cuda:N"')
        self.name = name
        self._ordinal = -1 if name == "host" else _status.as_integer(int(ordinal), "the device ordinal", 0, 2**31 - 1)
        self._profile = profile

    def __repr__(self) -> str:
        return f"<kvreuse.Provider {self.name}>"

    def features(self) -> dict[str, Capability]:
        """Tell which optional driver calls there are; {} for the host.

        Returns
        -------
        dict of str to Capability
            batch_copy, stream_query, address_range_handle.

        Raises
        ------
        NotSupportedError, RangeError
            There is no driver, or no such device.
        """
        if self._ordinal < 0:
            return {}
        bits = _backend.cuda_info(self._ordinal).features
        return {
            name: Capability(bool(bits & bit), "the driver has it" if bits & bit else "the driver has no such call")
            for name, bit in CUDA_FEATURES.items()
        }

    def capabilities(self) -> dict[HandleKind, Capability]:
        """Find out by trial which kinds can be allocated, exported, imported and looked at.

        Attributes of a device prove nothing: only a create that succeeds does. CUDA memory is imported by a second
        process.
        A fabric handle that works here can still fail for a peer on another machine.

        Returns
        -------
        dict of HandleKind to Capability
        """
        return {kind: self._trial(kind) for kind in HandleKind}

    def _trial(self, kind: HandleKind) -> Capability:
        if self._ordinal >= 0 and kind is HandleKind.FABRIC and not self._may_allocate_fabric():
            return Capability(False, 'not tried: the profile does not say [handles] fabric = "allocate"')
        try:
            with self.allocate(mmap.PAGESIZE, kind=kind) as region:
                if kind is HandleKind.NONE:
                    return Capability(True, "allocated; this kind cannot be shared")
                if self._ordinal >= 0:
                    return self._trial_in_second_process(region)
                with region.map(Access.READ_WRITE) as mapping, mapping.buffer as view:
                    view[:4] = b"\x01\x02\x03\x04"
                with (
                    region.export() as shared,
                    self.import_region(shared) as imported,
                    imported.map(Access.READ) as mapping,
                    mapping.buffer as view,
                ):
                    if bytes(view[:4]) != b"\x01\x02\x03\x04":
                        return Capability(False, "the imported memory has other bytes than were written")
        except KVReuseError as error:
            return Capability(False, str(error))
        return Capability(True, "allocated, exported, imported and read back")

    def _trial_in_second_process(self, region: Region) -> Capability:
        if not sys.executable:
            return Capability(False, "there is no interpreter to start a second process with")
        # With this process's own path: a module of the working directory must not come before the library.
        code = "import sys; sys.path[:] = sys.argv[2:]; from kvreuse import trial; sys.exit(trial.main(sys.argv[1:2]))"
        command = [sys.executable, "-c", code, self.name, *sys.path]
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with (
                ours,
                theirs,
                region.export() as shared,
                subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                ) as child,
            ):
                try:
                    theirs.close()
                    shared.send(ours, TRIAL_TIMEOUT_S)
                    said, _ = child.communicate(timeout=TRIAL_TIMEOUT_S)
                finally:
                    child.kill()
        except subprocess.TimeoutExpired:
            return Capability(False, f"the second process did not import it within {TRIAL_TIMEOUT_S:g} s")
        except OSError as error:
            return Capability(False, f"the second process cannot be started: {error}")
        text = said.decode("utf-8", "replace").strip()
        if child.returncode == 0:
            return Capability(True, "allocated, exported, and imported and mapped by a second process")
        return Capability(False, f"a second process could not import it: {text[-500:]}")

    def _may_allocate_fabric(self) -> bool:
        return self._profile is not None and self._profile.handles.fabric == "allocate"

    def allocate(
        self, nbytes: int, kind: HandleKind = HandleKind.POSIX_FD, fallback: Sequence[HandleKind] = ()
    ) -> Region:
        """Allocate memory: zeroed for the host; of a CUDA device with whatever bytes the driver gives.

        Parameters
        ----------
        nbytes : int
            Bytes wanted, 1 or more; the memory is rounded up to pages, or to the device's granularity for this kind.
        kind : HandleKind
            How it can be shared later; fixed from now on.
        fallback : sequence of HandleKind
            Kinds to take, in this order, where `kind` is not supported; `observe()` then says why.

        Returns
        -------
        Region
            Owned by the caller: close it.

        Raises
        ------
        RangeError, TypeError
            nbytes is not a positive integer.
        NotSupportedError
            The provider cannot allocate this kind.
        ProfileError
            FABRIC of a CUDA device, and the profile does not allow it.
        TooManyFdsError, NoSpaceError, OutOfMemoryError, PermissionDeniedError, SystemCallError, DriverError
            The kernel or the driver refused.
        """
        notes: dict[str, str] = {}
        kinds = [_as_kind(kind), *(_as_kind(k) for k in fallback)]
        for i, wanted in enumerate(kinds):
            try:
                return Region(self.name, self._allocate(nbytes, wanted, notes), notes)
            except (NotSupportedError, PermissionDeniedError) as error:
                # 800 and 801 of the driver mean this kind; an errno means this machine.
                if i + 1 == len(kinds) or error.native_source == "errno" or not _is_about_kind(error):
                    raise
                notes["kind"] = f"{wanted.name} was not granted: {error}"
        raise AssertionError("unreachable")

    def _allocate(self, nbytes: int, kind: HandleKind, notes: dict[str, str]) -> int:
        if self._ordinal < 0:
            return self._allocate_host(nbytes, kind, notes)
        flags = CUDA_ALLOW_FABRIC if self._may_allocate_fabric() else 0
        return _backend.cuda_allocate(self._ordinal, nbytes, int(kind), flags).handle

    def _allocate_host(self, nbytes: int, kind: HandleKind, notes: dict[str, str], name: str = "kvreuse") -> int:
        try:
            return _backend.host_allocate(nbytes, int(kind), name, None).handle
        except (PermissionDeniedError, NotSupportedError, SystemCallError) as error:
            refused = error.call == "memfd_create" and error.native_code in _NO_MEMFD
            if not refused or self._profile is None or not self._profile.handles.file_fallback:
                raise
            try:
                folder = tempfile.gettempdir()
            except OSError as second:  # none can be written to, or the fd limit is reached
                raise error from second
            handle = _backend.host_allocate(nbytes, int(kind), name, folder).handle
            notes["memory"] = f"an unlinked file instead of a memfd, as the profile allows: {error}"
            return handle

    def import_region(self, shared: SharedHandle) -> Region:
        """Take a region that another process shared, after checking it against what the kernel or the driver observes.

        The size of CUDA memory is checked when it is mapped: no driver call tells it before.

        Parameters
        ----------
        shared : SharedHandle
            Stays the caller's and can be closed afterwards: the region has its own reference.

        Returns
        -------
        Region
            Owned by the caller. Closing it never frees the owner's memory.

        Raises
        ------
        NotSupportedError
            The kind or provider cannot be imported here.
        InvalidHandleError
            The record came without its fd.
        KindMismatchError, StaleHandleError, SizeMismatchError, PermissionDeniedError
            The fd is no memory; of another region; of another size; not sealed against shrinking.
        IncompatibleError
            The record is of another provider, or the allocation of another device.
        ProfileError
            FABRIC, and the profile says off.
        DriverError
            The driver refused.
        """
        if not isinstance(shared, SharedHandle):
            raise TypeError(f"import_region takes a SharedHandle, not {type(shared).__name__}")
        if self._ordinal < 0 and shared.kind is not HandleKind.POSIX_FD:
            raise NotSupportedError(
                f"provider {self.name} cannot import kind {shared.kind.name}: it imports POSIX_FD",
                status=-7,
                name="NOT_SUPPORTED",
            )
        if shared.provider.partition(":")[0] != self.name.partition(":")[0]:
            raise IncompatibleError(
                f"the record is of provider {shared.provider}: this is {self.name}",
                status=-15,
                name="INCOMPATIBLE",
                fields={"provider": (self.name, shared.provider)},
            )
        if self._ordinal >= 0:
            return Region(self.name, self._import_cuda(shared), {})
        unsealed = self._profile is not None and self._profile.handles.file_fallback
        with shared._use_fd() as fd:
            info = _backend.region_import(
                fd,
                shared.nbytes,
                shared.physical_nbytes,
                shared.region_id,
                shared.device,
                shared.inode,
                IMPORT_ALLOW_UNSEALED if unsealed else 0,
            )
        return Region(self.name, info.handle, {})

    def _import_cuda(self, shared: SharedHandle) -> int:
        record = (shared.nbytes, shared.physical_nbytes, shared.region_id)
        # The branch is on the descriptor's own kind (H3).
        if shared.kind is HandleKind.POSIX_FD:
            none = bytes(PAYLOAD_NBYTES[HandleKind.FABRIC])
            with shared._use_fd() as fd:
                return _backend.cuda_import(self._ordinal, int(shared.kind), fd, none, *record).handle
        if self._profile is not None and self._profile.handles.fabric == "off":
            raise ProfileError(
                'the profile says [handles] fabric = "off": a fabric handle is not imported', status=-21, name="PROFILE"
            )
        return _backend.cuda_import(self._ordinal, int(shared.kind), -1, shared.payload, *record).handle


def _is_about_kind(error: KVReuseError) -> bool:
    return not error.native_code or (
        error.native_source == "cuda" and error.call in ("cuMemCreate", "cuMemGetAllocationGranularity")
    )


def _as_kind(kind: Any) -> HandleKind:
    number = _status.as_integer(kind, "kind", -(2**31), 2**31 - 1)
    try:
        return HandleKind(number)
    except ValueError:
        raise _status.make(-6, 7, (number,), "host_allocate") from None


class _Owned(Context):
    """What owns a backend handle: closed once, by the process that made it, and never silently forgotten."""

    _handle: int = 0

    def _close_handle(self, handle: int) -> None:
        raise NotImplementedError

    @property
    def handle(self) -> int:
        """The int64 handle. Raises HandleClosedError after close."""
        if not self._handle:
            raise HandleClosedError(f"{type(self).__name__} is closed", status=-3, name="HANDLE_CLOSED")
        return self._handle

    @property
    def closed(self) -> bool:
        """Whether close has been done."""
        return not self._handle

    def close(self) -> None:
        """Close it; closing again does nothing.

        Raises
        ------
        BusyError
            Still mapped, viewed or in flight; nothing changed.
        """
        handle = self._handle  # once: another thread may be closing it
        if handle:
            with contextlib.suppress(StaleHandleError):  # it has just done so
                self._close_handle(handle)
            self._handle = 0

    def __enter__(self) -> Any:
        _ = self.handle
        return self

    def __del__(self) -> None:
        if not self._handle:
            return
        try:
            self.close()
        except ForkedError:
            return
        except KVReuseError as error:
            warnings.warn(
                f"{self!r} was dropped and cannot be closed: {error}", ResourceWarning, stacklevel=2, source=self
            )
            return
        warnings.warn(f"{type(self).__name__} was dropped without close()", ResourceWarning, stacklevel=2, source=self)


_copied_lock = threading.RLock()


class Region(_Owned):
    """One physical allocation. Made by Provider.allocate and Provider.import_region; owns its handle and fd."""

    def __init__(self, provider: str, handle: int, notes: dict[str, str]) -> None:
        self._handle = handle
        self._provider = provider
        self._notes = notes
        info = _backend.region_info(handle)
        self._ordinal = info.provider
        self._nbytes, self._physical_nbytes = info.nbytes, info.physical_nbytes
        self._kind, self._region_id = HandleKind(info.kind), info.region_id
        self._copied: Mapping | None = None  # what copies of this region use

    def __repr__(self) -> str:
        return f"<kvreuse.Region {self._provider} {self._nbytes} bytes {self._kind.name} handle {self._handle}>"

    def _close_handle(self, handle: int) -> None:
        with _copied_lock:
            if self._copied is not None:
                self._copied.close()
                self._copied = None
        _backend.region_close(handle)

    def _copy_mapping(self) -> Mapping:
        """Map it for copies, once, with all the access there is; closed with the region."""
        with _copied_lock:
            if self._copied is None:
                self._copied = self.map(Access(_backend.region_info(self.handle).access))
            return self._copied

    @property
    def provider(self) -> str:
        """The provider's name."""
        return self._provider

    @property
    def nbytes(self) -> int:
        """Bytes asked for."""
        return self._nbytes

    @property
    def physical_nbytes(self) -> int:
        """Bytes of memory: nbytes rounded up to pages, or to the granularity of this very CUDA allocation."""
        return self._physical_nbytes

    @property
    def kind(self) -> HandleKind:
        """How it can be shared."""
        return self._kind

    @property
    def region_id(self) -> bytes:
        """16 random bytes that name this memory in every process."""
        return self._region_id

    def map(self, access: Access = Access.READ_WRITE) -> Mapping:
        """Map it whole, at an address of its own each time.

        Returns
        -------
        Mapping
            Owned by the caller. The region cannot be closed before it.

        Raises
        ------
        PermissionDeniedError
            READ_WRITE of a region that was given for reading.
        """
        number = _status.as_integer(access, "access", -(2**31), 2**31 - 1)
        return Mapping(self, _backend.region_map(self.handle, number, 0))

    def export(self) -> SharedHandle:
        """Make what another process needs to import this region.

        Returns
        -------
        SharedHandle
            POSIX_FD: owns an fd of its own, which pins the memory until it is closed. FABRIC: pins nothing, so this
            region cannot be closed before it: close it when all importers have imported.

        Raises
        ------
        NotSupportedError
            Allocated with kind NONE.
        DriverError
            The driver refused.
        """
        info = _backend.region_info(self.handle)
        is_fabric = self._kind is HandleKind.FABRIC
        return SharedHandle(
            kind=HandleKind.FABRIC if is_fabric else HandleKind.POSIX_FD,
            nbytes=info.nbytes,
            physical_nbytes=info.physical_nbytes,
            region_id=info.region_id,
            provider=self._provider,
            device=info.device,
            inode=info.inode,
            fd=None if is_fabric else _backend.region_export(self.handle),
            payload=_backend.cuda_export_fabric(self.handle) if is_fabric else b"",
            exporter=self if is_fabric else None,
        )

    def observe(self) -> Observation | CudaObservation:
        """Ask the kernel, or the CUDA driver, what this memory is now.

        Returns
        -------
        Observation or CudaObservation
            By the provider.
        """
        if self._ordinal < 0:
            return observe_host(self.handle, self._nbytes, self._physical_nbytes, self._notes)
        return observe_cuda(self.handle, self._ordinal, self._nbytes, self._physical_nbytes, self._notes)


class Mapping(_Owned):
    """A region's bytes in this process. Made by Region.map; keeps its region open."""

    def __init__(self, region: Region, info: MappingInfo) -> None:
        self._handle = info.handle
        self._region = region
        self._address = info.address
        self._nbytes = info.nbytes
        self._access = Access(info.access)

    def __repr__(self) -> str:
        return f"<kvreuse.Mapping {self._nbytes} bytes {self._access.name} handle {self._handle}>"

    def _close_handle(self, handle: int) -> None:
        _backend.mapping_unmap(handle)

    @property
    def region(self) -> Region:
        """The region that is mapped."""
        return self._region

    @property
    def nbytes(self) -> int:
        """Bytes that a view has: the region's nbytes."""
        return self._nbytes

    @property
    def access(self) -> Access:
        """What it allows."""
        return self._access

    @property
    def address(self) -> int:
        """Address of the first byte in this process, of CUDA memory a device address; valid until close.

        Raises
        ------
        HandleClosedError
            Closed; or a close whose memory is unmapped, but which the driver did not let end.
        """
        if self._region._ordinal >= 0 and not _backend.mapping_info(self.handle).address:
            raise HandleClosedError("the mapping is unmapped: close it again", status=-3, name="HANDLE_CLOSED")
        _ = self.handle
        return self._address

    @property
    def buffer(self) -> memoryview:
        """A new 1-D view of format "B"; numpy.frombuffer of it copies nothing.

        Everything made of it keeps the mapping alive: close() raises BusyError until all are gone.

        Raises
        ------
        NotSupportedError
            Device memory, which the CPU cannot read: use DLPack or ``__cuda_array_interface__``.
        """
        return memoryview(_backend.mapping_buffer(self.handle))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """CUDA memory as 1-D uint8, version 3 of the protocol. The consumer must keep this mapping open itself."""
        if self._region._ordinal < 0:
            raise AttributeError("__cuda_array_interface__: this is host memory; use `buffer`")
        return _cuda_array(self.address, self._nbytes, self._access is not Access.READ_WRITE)

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's (device type, id): CPU 1, CUDA 2."""
        return (1, 0) if self._region._ordinal < 0 else (2, self._region._ordinal)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Give the mapping as a 1-D uint8 DLPack capsule. Until the consumer is done with it, close() raises BusyError.

        Raises
        ------
        BufferError
            A copy, another device, or a read-only mapping for a consumer that cannot be told so (before DLPack 1.0).
        """
        is_versioned = max_version is not None and max_version[0] >= 1
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError("a mapping is given as it is: no copy, no other device")
        if self._access is not Access.READ_WRITE and not is_versioned:
            raise BufferError("a read-only mapping needs a consumer of DLPack 1.0 or newer (max_version)")
        device_type, device_id = self.__dlpack_device__()
        return _backend.mapping_dlpack(self.handle, device_type, device_id, is_versioned)

    def unmap(self) -> None:
        """Close it, but refuse a second time.

        Raises
        ------
        HandleClosedError
            Closed before.
        BusyError
            A view is alive; nothing changed.
        """
        _ = self.handle
        self.close()


class DeviceView:
    """Some bytes of device memory: what a part's `view(i)` gives on a CUDA provider. What gave it owns and ends it.

    torch.as_tensor and cupy.asarray take it by ``__cuda_array_interface__``; what they make of it is not taken back.
    """

    def __init__(self, address: int, nbytes: int, ordinal: int, is_writable: bool) -> None:
        self._address = address
        self.nbytes = nbytes
        self.ordinal = ordinal
        self.readonly = not is_writable

    def __repr__(self) -> str:
        return f"<kvreuse.DeviceView cuda:{self.ordinal} {self.nbytes} bytes>"

    @property
    def address(self) -> int:
        """Device address of the first byte. Raises HandleClosedError after the end of the reservation or claim."""
        if not self._address:
            raise HandleClosedError("this DeviceView has ended", status=-3, name="HANDLE_CLOSED")
        return self._address

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return _cuda_array(self.address, self.nbytes, self.readonly)

    def release(self) -> None:
        """End it."""
        self._address = 0


def _cuda_array(address: int, nbytes: int, is_read_only: bool) -> dict[str, Any]:
    return {
        "shape": (nbytes,),
        "typestr": "|u1",
        "data": (address, is_read_only),
        "strides": None,
        "stream": None,  # nothing of this library's is in flight on it
        "version": 3,
    }


# magic, version, record bytes, kind, payload bytes, nbytes, physical_nbytes, region id, provider, st_dev, st_ino,
# payload; then the CRC.
_RECORD = struct.Struct("<4sHHiIqq16s16sQQ64s")
_CRC = struct.Struct("<I")
_MAGIC = b"KVRH"
_VERSION = 1
RECORD_NBYTES = _RECORD.size + _CRC.size
assert RECORD_NBYTES == 148, "the shared record is part of the wire format"


class SharedHandle:
    """What one process gives another so that it can import a region: kind, payload, sizes, identity.

    Made by Region.export, `recv` and `from_bytes`. A POSIX_FD one owns its fd, which pins the memory while open. Not
    picklable: an fd number means nothing in another process; use `send` and `recv`.
    """

    def __init__(
        self,
        *,
        kind: HandleKind,
        nbytes: int,
        physical_nbytes: int,
        region_id: bytes,
        provider: str,
        device: int = 0,
        inode: int = 0,
        fd: int | None = None,
        payload: bytes = b"",
        exporter: Region | None = None,
    ) -> None:
        self._fd = -1 if fd is None else fd
        self._exporter = exporter  # its region, which a fabric handle does not pin
        self._pid = os.getpid()
        self.kind = kind
        self.nbytes = nbytes
        self.physical_nbytes = physical_nbytes
        self.region_id = region_id
        self.provider = provider
        self.device = device
        self.inode = inode
        self._payload = payload
        self._users = 0  # calls that use the fd now
        self._lock = threading.RLock()  # re-entrant: a signal handler may close

    def __repr__(self) -> str:
        return f"<kvreuse.SharedHandle {self.kind.name} {self.nbytes} bytes of {self.provider}, fd {self._fd}>"

    def __reduce__(self) -> Any:
        raise TypeError("a SharedHandle cannot be pickled: its fd is of this process; use send() and recv()")

    @property
    def payload(self) -> bytes:
        """The exact native payload: POSIX_FD 4 bytes (the fd as a native-endian C int, valid while open), FABRIC 64."""
        if self.kind is HandleKind.POSIX_FD:
            return struct.pack("=i", self.fileno())
        return self._payload

    def fileno(self) -> int:
        """Return the fd, which stays this object's.

        Raises
        ------
        InvalidHandleError
            No fd: closed, read from bytes without one, or not of kind POSIX_FD.
        """
        if self._fd < 0:
            raise InvalidHandleError(
                f"this {self.kind.name} record has no fd: receive it with recv(), or give from_bytes() the fd",
                status=-1,
                name="INVALID_HANDLE",
            )
        if self._pid != os.getpid():
            raise ForkedError("the fd belongs to the parent process", status=-26, name="FORKED")
        return self._fd

    @contextlib.contextmanager
    def _use_fd(self) -> Iterator[int]:
        """Lend the fd for a call: another thread may close this object meanwhile, and the number be reused."""
        with self._lock:
            fd = self.fileno()
            self._users += 1
        try:
            yield fd
        finally:
            with self._lock:
                self._users -= 1
                late = self._users == 0 and self._fd != fd
            if late:
                os.close(fd)

    def close(self) -> None:
        """Close the fd; the record can still be read. Closing again does nothing.

        The fd is closed when the last import or send that uses it has ended.

        Of a fabric handle that Region.export made, this says that all importers have imported: only then can the region
        be closed, since releasing it before would make a later import use freed memory.
        """
        with self._lock:
            fd, self._fd = self._fd, -1
            exporter, self._exporter = self._exporter, None
            is_used = self._users > 0
        if self._pid != os.getpid():
            return
        if fd >= 0 and not is_used:
            os.close(fd)
        if exporter is not None:
            _backend.cuda_fabric_done(exporter.handle)

    def __enter__(self) -> SharedHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        is_open = getattr(self, "_fd", -1) >= 0 or getattr(self, "_exporter", None) is not None
        if is_open and self._pid == os.getpid():
            self.close()
            warnings.warn("SharedHandle was dropped without close()", ResourceWarning, stacklevel=2, source=self)

    def to_bytes(self) -> bytes:
        """Write the record: versioned, fixed width, no padding, no fd number, a CRC32C last.

        Returns
        -------
        bytes
            RECORD_NBYTES (148) bytes.
        """
        body = _RECORD.pack(
            _MAGIC,
            _VERSION,
            RECORD_NBYTES,
            int(self.kind),
            len(self._payload),
            self.nbytes,
            self.physical_nbytes,
            self.region_id,
            self.provider.encode(),
            self.device,
            self.inode,
            self._payload,
        )
        return body + _CRC.pack(_backend.crc32c(body))

    @classmethod
    def from_bytes(cls, data: bytes, fd: int | None = None) -> SharedHandle:
        """Read a record.

        Parameters
        ----------
        data : bytes
            RECORD_NBYTES bytes of `to_bytes`.
        fd : int, optional
            The region's fd. Taken in every case: closed if this raises. Without it the record can only be read.

        Raises
        ------
        CorruptError
            Cut, too long, or damaged.
        IncompatibleError
            Another version of the record.
        KindMismatchError
            An fd with a kind that has none, or a payload that does not fit the kind.
        SizeMismatchError
            Sizes that cannot be.
        """
        try:
            return cls._parse(bytes(data), fd)
        except BaseException:
            if fd is not None and fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
            raise

    @classmethod
    def _parse(cls, data: bytes, fd: int | None) -> SharedHandle:
        if len(data) >= 6 and data[:4] == _MAGIC:
            version = int.from_bytes(data[4:6], "little")
            if version != _VERSION:
                raise IncompatibleError(
                    f"the shared handle has record version {version}: this library reads {_VERSION}",
                    status=-15,
                    name="INCOMPATIBLE",
                    fields={"version": (_VERSION, version)},
                )
        if len(data) != RECORD_NBYTES:
            raise CorruptError(
                f"a shared handle has {RECORD_NBYTES} bytes: got {len(data)}", status=-20, name="CORRUPT"
            )
        body, crc = data[:-4], _CRC.unpack(data[-4:])[0]
        found = _backend.crc32c(body)
        if crc != found or body[:4] != _MAGIC:
            raise CorruptError(
                f"the shared handle is damaged: its CRC is {crc:#010x}, computed {found:#010x}",
                status=-20,
                name="CORRUPT",
            )
        (_, _, size, kind, payload_nbytes, nbytes, physical, region_id, provider, device, inode, payload) = (
            _RECORD.unpack(body)
        )
        try:
            known = HandleKind(kind)
            name = provider.rstrip(b"\0").decode("ascii")
        except ValueError as error:
            raise CorruptError(f"the shared handle is not well-formed: {error}", status=-20, name="CORRUPT") from None
        expected = 64 if known is HandleKind.FABRIC else 0
        if known is HandleKind.NONE or size != RECORD_NBYTES or payload_nbytes != expected:
            raise KindMismatchError(
                f"a record of kind {known.name} carries {expected} bytes of payload: got {payload_nbytes}",
                status=-4,
                name="KIND_MISMATCH",
            )
        if fd is not None and known is not HandleKind.POSIX_FD:
            raise KindMismatchError(
                f"a record of kind {known.name} has no fd: got fd {fd}", status=-4, name="KIND_MISMATCH"
            )
        if nbytes <= 0 or physical < nbytes:
            raise SizeMismatchError(
                f"the record declares {nbytes} bytes in {physical} of memory: expected 1 or more, and enough memory",
                status=-5,
                name="SIZE_MISMATCH",
            )
        return cls(
            kind=known,
            nbytes=nbytes,
            physical_nbytes=physical,
            region_id=region_id,
            provider=name,
            device=device,
            inode=inode,
            fd=fd,
            payload=payload[:expected],
        )

    def send(self, sock: socket.socket, timeout: float = 5.0) -> None:
        """Send the record, and the fd by SCM_RIGHTS, over a connected AF_UNIX socket. The fd stays this object's.

        Raises
        ------
        ProtocolError
            The socket is no connected AF_UNIX one, or took only a part of the record.
        WaitTimeoutError
            The peer did not read within `timeout` seconds.
        """
        _check_unix(sock)
        if self.kind is HandleKind.POSIX_FD:
            with self._use_fd() as fd:
                self._send(sock, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("=i", fd))], timeout)
        else:
            self._send(sock, [], timeout)

    def _send(self, sock: socket.socket, ancillary: list[tuple[int, int, bytes]], timeout: float) -> None:
        data = self.to_bytes()
        deadline = time.monotonic() + timeout
        sent = None
        while sent is None:
            _wait(sock, select.POLLOUT, deadline, timeout)
            try:
                sent = sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
            except (BlockingIOError, TimeoutError):
                continue
            except OSError as error:
                raise _status.make_text(-22, f"the record cannot be sent: {error.strerror}") from error
        if sent != len(data):
            raise ProtocolError(
                f"the socket took {sent} of {len(data)} bytes",
                status=-22,
                name="PROTOCOL",
                expected=len(data),
                got=sent,
            )

    @classmethod
    def recv(cls, sock: socket.socket, timeout: float = 5.0) -> SharedHandle:
        """Receive what `send` sent.

        Returns
        -------
        SharedHandle
            Owns the received fd, which is CLOEXEC.

        Raises
        ------
        ProtocolError
            Too many or too few fds, cut fd passing, or the peer closed. What arrived is closed; `expected` and `got`
            are counts.
        WaitTimeoutError
            Nothing came within `timeout` seconds.
        """
        _check_unix(sock)
        fds: list[int] = []
        try:
            data, cut = _recv_record(sock, fds, timeout)
            wanted = 0 if len(data) >= 12 and int.from_bytes(data[8:12], "little") == HandleKind.FABRIC else 1
            if len(fds) != wanted or cut:
                raise ProtocolError(
                    f"expected {wanted} fd(s) with the record, got {len(fds)}"
                    + (" (cut: is the fd limit reached?)" if cut else ""),
                    status=-22,
                    name="PROTOCOL",
                    expected=wanted,
                    got=len(fds),
                )
            fd = fds.pop() if fds else None
        finally:
            for extra in fds:
                os.close(extra)
        return cls.from_bytes(data, fd)


def _check_unix(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        raise ProtocolError(
            f"a shared handle travels over an AF_UNIX socket: got {sock.family!r}", status=-22, name="PROTOCOL"
        )


def _wait(sock: socket.socket, event: int, deadline: float, timeout: float) -> None:
    poll = select.poll()
    poll.register(sock, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise WaitTimeoutError(f"the peer did nothing within {timeout} s", status=-23, name="WAIT_TIMEOUT")


def _recv_record(sock: socket.socket, fds: list[int], timeout: float) -> tuple[bytes, bool]:
    """Receive one record, which a stream may cut or glue to the next: (bytes, whether fds were cut).

    The fds are added to `fds`, whose owner is the caller also if this raises; there is room for 4 a message, to see
    and close too many.
    """
    deadline = time.monotonic() + timeout
    data, cut = b"", False
    while len(data) < RECORD_NBYTES:
        _wait(sock, select.POLLIN, deadline, timeout)
        how = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        try:
            more, ancillary, flags, _ = sock.recvmsg(RECORD_NBYTES - len(data), socket.CMSG_SPACE(4 * 4), how)
        except (BlockingIOError, TimeoutError):
            continue
        except OSError as error:
            raise _status.make_text(-22, f"the record cannot be received: {error.strerror}") from error
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                count = len(payload) // 4
                fds.extend(struct.unpack(f"={count}i", payload[: count * 4]))
        cut = cut or bool(flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC))
        if not more:
            raise ProtocolError(
                f"the peer closed the connection after {len(data)} of {RECORD_NBYTES} bytes",
                status=-22,
                name="PROTOCOL",
                expected=RECORD_NBYTES,
                got=len(data),
            )
        data += more
        # A record of another version may be shorter.
        is_other = data[:4] == _MAGIC and len(data) >= 6 and int.from_bytes(data[4:6], "little") != _VERSION
        if is_other or sock.type != socket.SOCK_STREAM:
            break
    return data, cut


def allocate_named(provider: Provider, nbytes: int, name: str) -> Region:
    """Allocate host memory under a memfd name (at most 200 bytes), so that /proc shows whose it is."""
    notes: dict[str, str] = {}
    return Region(provider.name, provider._allocate_host(nbytes, HandleKind.POSIX_FD, notes, name), notes)


__all__ = [
    "Access",
    "Capability",
    "CudaObservation",
    "DeviceView",
    "HandleKind",
    "Mapping",
    "Observation",
    "Provider",
    "Region",
    "SharedHandle",
    "open_provider",
]
