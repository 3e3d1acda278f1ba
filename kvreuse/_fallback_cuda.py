"""CUDA memory of the fallback: the driver calls of native/cuda.c in the same order. Meanings: include/kvreuse.h."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from . import _api, _status, errors
from . import _ctypes_cuda as cu
from . import _ctypes_structs as c
from . import _fallback_host as host
from ._ctypes_cuda import c_int32, c_size_t, c_uint64, c_void_p

_driver_lock = threading.RLock()  # a signal handler may come in the middle
_driver: Any = None
_is_started = False
_version = 0
_device_count = 0
_gives_cloexec: bool | None = None  # the driver's exported fds are CLOEXEC by themselves; None: not seen yet


class Device:
    """A device that this process has taken: its primary context is retained."""

    def __init__(self, ordinal: int) -> None:
        number, context = c_int32(), c_void_p()
        call("cuDeviceGet", cu.byref(number), ordinal)
        self.ordinal, self.number = ordinal, number.value
        self.info = self.ask()
        call("cuDevicePrimaryCtxRetain", cu.byref(context), self.number)
        self.context = context.value

    def ask(self) -> _api.CudaInfo:
        vmm = self._attribute(cu.ATTRIBUTE_VMM)
        posix_fd = self._attribute(cu.ATTRIBUTE_POSIX_FD)
        fabric = self._attribute(cu.ATTRIBUTE_FABRIC)
        uuid = cu.Uuid()
        call("cuDeviceGetUuid", cu.byref(uuid), self.number)
        return _api.CudaInfo(self.ordinal, _version, vmm, posix_fd, fabric, _driver.features, bytes(uuid.data))

    def _attribute(self, number: int) -> int:
        value = c_int32()
        call("cuDeviceGetAttribute", cu.byref(value), number, self.number)
        return value.value


_devices: dict[int, Device] = {}


def call(name: str, *arguments: Any) -> None:
    """Call an entry point; raise what its CUresult means."""
    code = getattr(_driver, name)(*arguments)
    if code:
        raise _status.from_curesult(name, code)


def _start(what: str) -> None:
    global _driver, _is_started, _version, _device_count
    if _driver is None:
        try:
            _driver = cu.Driver()
        except OSError:
            raise _status.make(c.KVR_ERROR_NOT_SUPPORTED, c.KVR_DETAIL_DRIVER_MISSING, (), what) from None
        except cu.MissingEntryError as error:
            raise _status.make(c.KVR_ERROR_NOT_SUPPORTED, c.KVR_DETAIL_DRIVER_ENTRY, (), str(error)) from None
    if not _is_started:
        version, count = c_int32(), c_int32()
        call("cuInit", 0)
        call("cuDriverGetVersion", cu.byref(version))
        call("cuDeviceGetCount", cu.byref(count))
        _version, _device_count = version.value, min(count.value, c.KVR_ORDINAL_COUNT_MAX)
        _is_started = True


def _take_device(ordinal: int, what: str) -> Device:
    host.check_fork(what)
    found = _devices.get(ordinal)
    if found is None:
        with _driver_lock:
            _start(what)
            if not 0 <= ordinal < _device_count:
                raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_ORDINAL_RANGE, (ordinal, _device_count), what)
            found = _devices.get(ordinal)
            if found is None:
                found = _devices[ordinal] = Device(ordinal)
    return found


@contextlib.contextmanager
def _current(target: Device) -> Iterator[None]:
    """Make the device's primary context this thread's, for a while."""
    previous = c_void_p()
    call("cuCtxGetCurrent", cu.byref(previous))
    is_other = previous.value != target.context
    if is_other:
        call("cuCtxSetCurrent", target.context)
    try:
        yield
    finally:
        # Fails only if the caller destroyed its own context meanwhile; what was done stands.
        if is_other:
            _driver.cuCtxSetCurrent(previous)


def cuda_info(ordinal: Any) -> _api.CudaInfo:
    number = _status.as_integer(ordinal, "ordinal", *host.INT32)
    return _take_device(number, "cuda_info").ask()


# ---- regions ----


def _granularity(prop: Any, option: int) -> int:
    out = c_size_t()
    call("cuMemGetAllocationGranularity", cu.byref(out), cu.byref(prop), option)
    return out.value


def _add_region(
    native: int, ordinal: int, nbytes: int, physical: int, kind: int, origin: int, region_id: bytes
) -> _api.RegionInfo:
    region = host.Region(-1, nbytes, physical, kind, c.KVR_ACCESS_READ_WRITE, origin, 0, 0, region_id)
    region.provider, region.native = ordinal, native
    with host.lock:
        host.register(region)
        return region.info()


def cuda_allocate(ordinal: Any, nbytes: Any, kind: Any, flags: Any) -> _api.RegionInfo:
    what = "cuda_allocate"
    ordinal = _status.as_integer(ordinal, "ordinal", *host.INT32)
    nbytes = _status.as_integer(nbytes, "nbytes")
    kind = _status.as_integer(kind, "kind", *host.INT32)
    flags = _status.as_integer(flags, "flags", *host.UINT32)
    if not 1 <= nbytes <= c.KVR_NBYTES_MAX:
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_NBYTES_RANGE, (nbytes, c.KVR_NBYTES_MAX), what)
    if kind not in (c.KVR_KIND_NONE, c.KVR_KIND_POSIX_FD, c.KVR_KIND_FABRIC):
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_KIND_UNKNOWN, (kind,), what)
    if flags & ~c.KVR_CUDA_ALLOW_FABRIC:
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_FLAGS_UNKNOWN, (flags, c.KVR_CUDA_ALLOW_FABRIC), what)
    if kind == c.KVR_KIND_FABRIC and not flags & c.KVR_CUDA_ALLOW_FABRIC:
        raise _status.make(c.KVR_ERROR_PROFILE, c.KVR_DETAIL_FABRIC_NOT_ALLOWED, (), what)
    target = _take_device(ordinal, what)
    if not target.info.vmm:
        raise _status.make(c.KVR_ERROR_NOT_SUPPORTED, c.KVR_DETAIL_DEVICE_LACKS_VMM, (ordinal,), what)
    with _current(target):
        prop = cu.AllocationProp(cu.ALLOCATION_PINNED, kind, cu.Location(cu.LOCATION_DEVICE, ordinal))
        granularity = _granularity(prop, cu.GRANULARITY_MINIMUM)
        if not 0 < granularity <= c.KVR_NBYTES_MAX:
            raise _status.make(c.KVR_ERROR_DRIVER, c.KVR_DETAIL_CUDA_GRANULARITY, (nbytes, granularity), what)
        physical = -(-nbytes // granularity) * granularity
        native = c_uint64()
        call("cuMemCreate", cu.byref(native), physical, cu.byref(prop), 0)
        try:
            region_id = host.random_id()
            return _add_region(native.value, ordinal, nbytes, physical, kind, c.KVR_ORIGIN_ALLOCATED, region_id)
        except BaseException:
            _driver.cuMemRelease(native)
            raise


def _check_import(target: Device, native: Any, kind: int, physical: int, what: str) -> None:
    """Check that an imported allocation is what its record says, as far as the driver tells."""
    prop = cu.AllocationProp()
    call("cuMemGetAllocationPropertiesFromHandle", cu.byref(prop), native)
    if not prop.requested_handle_types & kind:
        values: tuple[int, ...] = (kind, prop.requested_handle_types)
        raise _status.make(c.KVR_ERROR_KIND_MISMATCH, c.KVR_DETAIL_CUDA_HANDLE_TYPES, values, what)
    if (prop.location.type, prop.location.id) != (cu.LOCATION_DEVICE, target.ordinal):
        values = (target.ordinal, prop.location.type, prop.location.id)
        raise _status.make(c.KVR_ERROR_INCOMPATIBLE, c.KVR_DETAIL_CUDA_LOCATION, values, what)
    granularity = _granularity(prop, cu.GRANULARITY_MINIMUM)
    if not 0 < granularity <= c.KVR_NBYTES_MAX or physical % granularity:
        values = (physical, granularity)
        raise _status.make(c.KVR_ERROR_SIZE_MISMATCH, c.KVR_DETAIL_CUDA_GRANULARITY, values, what)


def cuda_import(
    ordinal: Any, kind: Any, fd: Any, fabric: bytes, nbytes: Any, physical_nbytes: Any, region_id: bytes
) -> _api.RegionInfo:
    what = "cuda_import"
    ordinal = _status.as_integer(ordinal, "ordinal", *host.INT32)
    kind = _status.as_integer(kind, "kind", *host.INT32)
    fd = _status.as_integer(fd, "fd", *host.INT32)
    fabric = host.as_bytes(fabric, "fabric")
    nbytes = _status.as_integer(nbytes, "nbytes")
    physical = _status.as_integer(physical_nbytes, "physical_nbytes")
    region_id = host.as_bytes(region_id, "region_id")
    host.check_length("fabric", len(fabric), c.KVR_FABRIC_NBYTES, "bytes")
    host.check_length("region_id", len(region_id), c.KVR_REGION_ID_NBYTES, "bytes")
    if kind not in (c.KVR_KIND_POSIX_FD, c.KVR_KIND_FABRIC):
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_KIND_UNKNOWN, (kind,), what)
    if kind == c.KVR_KIND_POSIX_FD and fd < 0:
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_FD_NEGATIVE, (fd,), what)
    if not 1 <= nbytes <= c.KVR_NBYTES_MAX:
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_NBYTES_RANGE, (nbytes, c.KVR_NBYTES_MAX), what)
    if physical < nbytes:
        raise _status.make(c.KVR_ERROR_SIZE_MISMATCH, c.KVR_DETAIL_IMPORT_PHYSICAL, (nbytes, physical), what)
    target = _take_device(ordinal, what)
    with _current(target):
        native = c_uint64()
        # A fabric handle travels as a pointer to 64 bytes, an fd as its value.
        token = cu.payload()
        token.raw = fabric
        shareable = cu.address_of(token) if kind == c.KVR_KIND_FABRIC else fd
        code = _driver.cuMemImportFromShareableHandle(cu.byref(native), shareable, kind)
        if code and kind == c.KVR_KIND_POSIX_FD:
            host.step("fcntl", fcntl.fcntl, fd, fcntl.F_GETFD)  # not open: that is the reason, whatever the code
        if code:
            raise _status.from_curesult("cuMemImportFromShareableHandle", code)
        try:
            _check_import(target, native, kind, physical, what)
            return _add_region(native.value, ordinal, nbytes, physical, kind, c.KVR_ORIGIN_IMPORTED, region_id)
        except BaseException:
            _driver.cuMemRelease(native)
            raise


# ---- what works on a region: it is pinned, so that nobody closes it meanwhile ----


@contextlib.contextmanager
def _pinned(handle: int, what: str) -> Iterator[Any]:
    with host.lock:
        region = host.find(handle, host.Region, what)
        if region.provider == c.KVR_PROVIDER_HOST:
            values = (handle, c.KVR_PROVIDER_HOST)
            raise _status.make(c.KVR_ERROR_NOT_SUPPORTED, c.KVR_DETAIL_PROVIDER, values, what)
        host.check_fork(what)
        host.call_begin(region)
    try:
        yield region
    finally:
        host.call_end(region)


def _export(region: Any, kind: int) -> bytes:
    out = cu.payload()
    with _current(_devices[region.provider]):
        call("cuMemExportToShareableHandle", cu.address_of(out), region.native, kind, 0)
    return bytes(out.raw)


def export_fd(region: Any) -> int:
    """Export a pinned region of kind POSIX_FD."""
    global _gives_cloexec
    fd = int.from_bytes(_export(region, c.KVR_KIND_POSIX_FD)[:4], "little", signed=True)
    try:
        if _gives_cloexec is None:
            _gives_cloexec = bool(host.step("fcntl", fcntl.fcntl, fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC)
        if not _gives_cloexec:
            host.step("fcntl", fcntl.fcntl, fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    except BaseException:
        os.close(fd)
        raise
    return fd


def cuda_export_fabric(region: Any) -> bytes:
    what = "cuda_export_fabric"
    handle = _status.as_integer(region, "region")
    with _pinned(handle, what) as thing:
        if thing.kind != c.KVR_KIND_FABRIC:
            raise _status.make(c.KVR_ERROR_NOT_SUPPORTED, c.KVR_DETAIL_KIND_NOT_EXPORTABLE, (thing.kind,), what)
        token = _export(thing, c.KVR_KIND_FABRIC)
        with host.lock:
            thing.fabric_count += 1
    return token


def cuda_fabric_done(region: Any) -> None:
    what = "cuda_fabric_done"
    handle = _status.as_integer(region, "region")
    with host.lock:
        thing = host.find(handle, host.Region, what)
        if thing.fabric_count < 1:
            raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_COUNT_RANGE, (-1,), what)
        thing.fabric_count -= 1


# ---- mappings: reserve, map, set access, look; undone in reverse ----


def _map_reserved(region: Any, address: int, access: int, what: str) -> None:
    size = region.physical_nbytes
    code = _driver.cuMemMap(address, size, 0, region.native, 0)
    if code == cu.INVALID_VALUE and region.origin == c.KVR_ORIGIN_IMPORTED:
        raise _status.make(
            c.KVR_ERROR_SIZE_MISMATCH, c.KVR_DETAIL_CUDA_MAP_REFUSED, (size,), "cuMemMap", c.KVR_NATIVE_CUDA, code
        )
    if code:
        raise _status.from_curesult("cuMemMap", code)
    try:
        desc = cu.AccessDesc(cu.Location(cu.LOCATION_DEVICE, region.provider), access)
        call("cuMemSetAccess", address, size, cu.byref(desc), 1)
        # The mapping has to have the declared size: nothing else tells how large imported memory is.
        base, found = c_uint64(), c_size_t()
        call("cuMemGetAddressRange", cu.byref(base), cu.byref(found), address)
        if (base.value, found.value) != (address, size):
            values = (size, found.value)
            raise _status.make(c.KVR_ERROR_SIZE_MISMATCH, c.KVR_DETAIL_CUDA_MAPPED_NBYTES, values, what)
    except BaseException:
        _driver.cuMemUnmap(address, size)
        raise


def map_region(region: Any, access: int, what: str) -> int:
    """Map a pinned region; return its device address."""
    with _current(_devices[region.provider]):
        address = c_uint64()
        call("cuMemAddressReserve", cu.byref(address), region.physical_nbytes, 0, 0, 0)
        try:
            _map_reserved(region, address.value, access, what)
        except BaseException:
            _driver.cuMemAddressFree(address, region.physical_nbytes)
            raise
    return address.value


def unmap(mapping: Any) -> None:
    """Unmap; where only giving back the addresses failed, another try goes on from there."""
    region = mapping.region
    with _current(_devices[region.provider]):
        if not mapping.is_unmapped:
            call("cuMemUnmap", mapping.address, region.physical_nbytes)
        mapping.is_unmapped = True
        call("cuMemAddressFree", mapping.address, region.physical_nbytes)


def release(region: Any) -> None:
    with _current(_devices[region.provider]):
        call("cuMemRelease", region.native)


# ---- copies: a stream and an event for each thread of a queue ----


class CopyStream:
    """A thread's stream on a device, and the event that proves the end of what was issued on it."""

    __slots__ = ("device", "event", "stream")

    def __init__(self, device: int) -> None:
        """Make both. The caller has made the device's context current."""
        stream, event = c_void_p(), c_void_p()
        call("cuStreamCreate", cu.byref(stream), cu.STREAM_NON_BLOCKING)
        try:
            call("cuEventCreate", cu.byref(event), cu.EVENT_DISABLE_TIMING)
        except BaseException:
            _driver.cuStreamDestroy(stream)
            raise
        self.device, self.stream, self.event = device, stream.value or 0, event.value or 0

    def close(self) -> None:
        with contextlib.suppress(errors.KVReuseError), _current(_take_device(self.device, "copy")):
            _driver.cuEventDestroy(self.event)
            _driver.cuStreamDestroy(self.stream)


def copy_ready(ordinal: int, what: str) -> None:
    _take_device(ordinal, what)


Entries = Sequence[tuple[int, int, int, int]]  # destination, source, bytes, index


def _issue_batch(stream: CopyStream, entries: Entries) -> bool:
    """Issue all by one call; False if it cannot be had: take one call an entry."""
    count = len(entries)
    if _driver.cuMemcpyBatchAsync is None or count < 2:
        return False
    dsts, srcs, sizes, _ = zip(*entries, strict=True)
    attributes = cu.MemcpyAttributes(src_access_order=cu.SRC_ACCESS_ORDER_STREAM)
    code = _driver.cuMemcpyBatchAsync(
        (c_uint64 * count)(*dsts),
        (c_uint64 * count)(*srcs),
        (c_size_t * count)(*sizes),
        count,
        cu.byref(attributes),
        cu.byref(c_size_t(0)),
        1,
        stream.stream,
    )
    # A driver may have the entry point and not the device for it: nothing was issued then.
    if code == cu.NOT_SUPPORTED:
        return False
    if code:
        raise _status.from_curesult("cuMemcpyBatchAsync", code)
    return True


def _issue(stream: CopyStream, entries: Entries) -> tuple[int, errors.KVReuseError | None]:
    """Issue all; return how many are on their way, and the failure."""
    try:
        if _issue_batch(stream, entries):
            return len(entries), None
    except errors.KVReuseError as error:
        # A batch that failed may have been begun: it says not how far.
        return len(entries), error
    for issued, (dst, src, nbytes, _) in enumerate(entries):
        code = _driver.cuMemcpyAsync(dst, src, nbytes, stream.stream)
        if code:
            return issued, _status.from_curesult("cuMemcpyAsync", code)
    return len(entries), None


def copy_issue(
    ordinal: int, streams: dict[int, CopyStream], entries: Entries
) -> tuple[int, bool, errors.KVReuseError | None]:
    """Issue all; return how many are on their way, whether the stream's event tells of them, and the failure."""
    issued, recorded, failure = 0, 0, None
    try:
        with _current(_take_device(ordinal, "copy")):
            if ordinal not in streams:
                streams[ordinal] = CopyStream(ordinal)
            stream = streams[ordinal]
            issued, failure = _issue(stream, entries)
            # The event is what proves the end: without it nothing is known of what was issued.
            recorded = _driver.cuEventRecord(stream.event, stream.stream) if issued else cu.OK
            if recorded and failure is None:
                failure = _status.from_curesult("cuEventRecord", recorded)
    except errors.KVReuseError as error:
        return issued, not recorded, error
    return issued, not recorded, failure


def event_poll(ordinal: int, event: int) -> bool:
    """Tell whether a recorded event is over; raises if the driver does not tell."""
    with _current(_take_device(ordinal, "copy")):
        code = _driver.cuEventQuery(event)
    if code == cu.NOT_READY:
        return False
    if code:
        raise _status.from_curesult("cuEventQuery", code)
    return True


# ---- observation ----


def _observe_allocation(native: int, out: dict[str, int]) -> None:
    prop = cu.AllocationProp()
    out["properties_result"] = _driver.cuMemGetAllocationPropertiesFromHandle(cu.byref(prop), native)
    if out["properties_result"]:
        return
    out["handle_types"], out["allocation_type"] = prop.requested_handle_types, prop.type
    out["location_type"], out["location_id"] = prop.location.type, prop.location.id
    sizes = []
    for option in (cu.GRANULARITY_MINIMUM, cu.GRANULARITY_RECOMMENDED):
        size = c_size_t()
        out["granularity_result"] = _driver.cuMemGetAllocationGranularity(cu.byref(size), cu.byref(prop), option)
        if out["granularity_result"]:
            return
        sizes.append(size.value)
    out["granularity_min"], out["granularity_recommended"] = sizes


def _observe_mapping(ordinal: int, address: int, out: dict[str, int]) -> None:
    base, size, number = c_uint64(), c_size_t(), c_uint64()
    out["range_result"] = _driver.cuMemGetAddressRange(cu.byref(base), cu.byref(size), address)
    if not out["range_result"]:
        out["mapped_base"], out["mapped_nbytes"] = base.value, size.value
    for field, result, attribute in (
        ("reserved_nbytes", "reservation_result", cu.POINTER_RANGE_SIZE),
        ("allowed_handle_types", "allowed_result", cu.POINTER_ALLOWED_HANDLE_TYPES),
    ):
        number = c_uint64()  # whole, since the driver writes only 4 bytes of some
        out[result] = _driver.cuPointerGetAttribute(cu.address_of(number), attribute, address)
        if not out[result]:
            out[field] = number.value
    flags, here = c_uint64(), cu.Location(cu.LOCATION_DEVICE, ordinal)
    out["access_result"] = _driver.cuMemGetAccess(cu.byref(flags), cu.byref(here), address)
    if not out["access_result"]:
        out["access"] = flags.value


def cuda_observe(region: Any) -> _api.CudaObservation:
    what = "cuda_observe"
    handle = _status.as_integer(region, "region")
    with _pinned(handle, what) as thing:
        out = dict.fromkeys(_api.CudaObservation._fields, -1)
        out["mapped_base"] = 0
        with _current(_devices[thing.provider]):
            _observe_allocation(thing.native, out)
            with host.lock:
                mapping = host.mapping_of(thing)
                if mapping is not None:
                    host.call_begin(mapping)
            if mapping is not None:
                try:
                    _observe_mapping(thing.provider, mapping.address, out)
                finally:
                    host.call_end(mapping)
    return _api.CudaObservation(**out)
