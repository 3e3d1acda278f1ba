"""What the kernel or the driver says of a region now (H5). Imports no numpy."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import stat
from array import array
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from . import _status
from ._select import backend as _backend
from .errors import KVReuseError


class Access(enum.IntEnum):
    """What a mapping allows. The numbers are CUDA's (cuda.h, CUmemAccess_flags)."""

    NONE = 0
    READ = 1
    READ_WRITE = 3


@dataclasses.dataclass(frozen=True)
class Observation:
    """What the kernel says of a host region now, beside what was declared.

    Attributes
    ----------
    nbytes, physical_nbytes : int
        Declared (carried with the handle), bytes.
    file_type : str or None
        "memory file" for a memfd or an unlinked file; anything else is no region of this library.
    observed_nbytes, allocated_nbytes : int or None
        Size of the memory, and how much of it has pages now, bytes.
    device, inode : int or None
        Identity of the memory (st_dev, st_ino).
    seals : int or None
        F_GET_SEALS bits.
    access : Access or None
        What the region's fd allows.
    page_nbytes, huge_page_nbytes : int or None
        The kernel's page size, and the page size that backs this memory if it is larger, bytes.
    numa_nodes : mapping of int to int, or None
        NUMA node to pages of a sample of at most 64, spread over the region; -1 counts pages that nothing has touched.
    mapping_count, fd_count : int or None
        Mappings of this memory in this process, and its open fds here, whoever made them.
    sources : mapping of str to str
        For each field the call it came from; "carried" for declared ones.
    reasons : mapping of str to str
        For each field that is None, why; "kind" says why a weaker kind was granted, "memory" why it is no memfd.
    """

    nbytes: int
    physical_nbytes: int
    file_type: str | None
    observed_nbytes: int | None
    allocated_nbytes: int | None
    device: int | None
    inode: int | None
    seals: int | None
    access: Access | None
    page_nbytes: int | None
    huge_page_nbytes: int | None
    numa_nodes: MappingProxyType[int, int] | None
    mapping_count: int | None
    fd_count: int | None
    sources: MappingProxyType[str, str]
    reasons: MappingProxyType[str, str]


@dataclasses.dataclass(frozen=True)
class CudaObservation:
    """What the CUDA driver says of a region now, beside what was declared.

    No driver call tells the size of an allocation that is not mapped: `observed_nbytes` is that of one mapping in this
    process.

    Attributes
    ----------
    nbytes, physical_nbytes : int
        Declared (carried with the handle), bytes.
    observed_nbytes, mapped_base : int or None
        Size and device address of one mapping of it in this process.
    reserved_nbytes : int or None
        Size of the address reservation that the mapping lies in.
    handle_types : int or None
        Kinds that the allocation was made with, as bits (POSIX_FD 1, FABRIC 8).
    allowed_handle_types : int or None
        The same, asked of the mapped address.
    allocation_type, location_type, location_id : int or None
        PINNED is 1; DEVICE is 1, HOST_NUMA 3; the device's ordinal here.
    granularity, recommended_granularity : int or None
        Of this very allocation's properties, bytes.
    access : Access or None
        What the mapping allows its device.
    device_uuid : bytes or None
        16 bytes.
    driver_version : int or None
        As 1000 * major + 10 * minor.
    vmm_attribute, posix_fd_attribute, fabric_attribute : int or None
        Device attributes 102, 103 and 128. 1 does not mean that a create succeeds: see `Provider.capabilities`.
    sources, reasons : mapping of str to str
        As of `Observation`.
    """

    nbytes: int
    physical_nbytes: int
    observed_nbytes: int | None
    mapped_base: int | None
    reserved_nbytes: int | None
    handle_types: int | None
    allowed_handle_types: int | None
    allocation_type: int | None
    location_type: int | None
    location_id: int | None
    granularity: int | None
    recommended_granularity: int | None
    access: Access | None
    device_uuid: bytes | None
    driver_version: int | None
    vmm_attribute: int | None
    posix_fd_attribute: int | None
    fabric_attribute: int | None
    sources: MappingProxyType[str, str]
    reasons: MappingProxyType[str, str]


PLACEMENT_SAMPLE_PAGES = 64
_SOURCES = MappingProxyType(
    {
        "nbytes": "carried",
        "physical_nbytes": "carried",
        "file_type": "fstat st_mode",
        "observed_nbytes": "fstat st_size",
        "allocated_nbytes": "fstat st_blocks",
        "device": "fstat st_dev",
        "inode": "fstat st_ino",
        "seals": "fcntl F_GET_SEALS",
        "access": "fcntl F_GETFL",
        "page_nbytes": "sysconf _SC_PAGESIZE",
        "huge_page_nbytes": "fstat st_blksize",
        "numa_nodes": "move_pages without target nodes",
        "mapping_count": "/proc/self/maps",
        "fd_count": "/proc/self/fd",
    }
)
# Field: (field of the backend's record, its result field, the call).
_CUDA_FIELDS = {
    "observed_nbytes": ("mapped_nbytes", "range_result", "cuMemGetAddressRange"),
    "mapped_base": ("mapped_base", "range_result", "cuMemGetAddressRange"),
    "reserved_nbytes": ("reserved_nbytes", "reservation_result", "cuPointerGetAttribute 12"),
    "handle_types": ("handle_types", "properties_result", "cuMemGetAllocationPropertiesFromHandle"),
    "allowed_handle_types": ("allowed_handle_types", "allowed_result", "cuPointerGetAttribute 14"),
    "allocation_type": ("allocation_type", "properties_result", "cuMemGetAllocationPropertiesFromHandle"),
    "location_type": ("location_type", "properties_result", "cuMemGetAllocationPropertiesFromHandle"),
    "location_id": ("location_id", "properties_result", "cuMemGetAllocationPropertiesFromHandle"),
    "granularity": ("granularity_min", "granularity_result", "cuMemGetAllocationGranularity"),
    "recommended_granularity": ("granularity_recommended", "granularity_result", "cuMemGetAllocationGranularity"),
    "access": ("access", "access_result", "cuMemGetAccess"),
}
_DEVICE_SOURCES = {
    "device_uuid": "cuDeviceGetUuid",
    "driver_version": "cuDriverGetVersion",
    "vmm_attribute": "cuDeviceGetAttribute 102",
    "posix_fd_attribute": "cuDeviceGetAttribute 103",
    "fabric_attribute": "cuDeviceGetAttribute 128",
}
_CUDA_SOURCES = MappingProxyType(
    {
        "nbytes": "carried",
        "physical_nbytes": "carried",
        **{field: call for field, (_, _, call) in _CUDA_FIELDS.items()},
        **_DEVICE_SOURCES,
    }
)


def observe_host(handle: int, nbytes: int, physical_nbytes: int, notes: dict[str, str]) -> Observation:
    """Ask the kernel what a region is; `notes` are reasons that are known already."""
    seen = _backend.region_observe(handle)
    reasons = dict(notes)
    if seen.seals < 0:
        reasons["seals"] = "fcntl F_GET_SEALS failed: the file cannot have seals"
    if seen.block_nbytes <= seen.page_nbytes:
        reasons["huge_page_nbytes"] = "the memory is not backed by huge pages"
    return Observation(
        nbytes=nbytes,
        physical_nbytes=physical_nbytes,
        file_type="memory file" if stat.S_ISREG(seen.file_mode) else oct(seen.file_mode),
        observed_nbytes=seen.file_nbytes,
        allocated_nbytes=seen.allocated_nbytes,
        device=seen.device,
        inode=seen.inode,
        seals=None if seen.seals < 0 else seen.seals,
        access=Access(seen.access),
        page_nbytes=seen.page_nbytes,
        huge_page_nbytes=seen.block_nbytes if seen.block_nbytes > seen.page_nbytes else None,
        numa_nodes=_numa_nodes(handle, reasons),
        mapping_count=_count("mapping_count", reasons, _mappings_here, seen.device, seen.inode),
        fd_count=_count("fd_count", reasons, _fds_here, seen.device, seen.inode),
        sources=_SOURCES,
        reasons=MappingProxyType(reasons),
    )


def observe_cuda(
    handle: int, ordinal: int, nbytes: int, physical_nbytes: int, notes: dict[str, str]
) -> CudaObservation:
    """Ask the driver what a region is; `notes` are reasons that are known already."""
    seen = _backend.cuda_observe(handle)
    reasons = dict(notes)
    fields: dict[str, Any] = {}
    for field, (name, result_name, call) in _CUDA_FIELDS.items():
        result = getattr(seen, result_name)
        fields[field] = getattr(seen, name) if result == 0 else None
        if result == -1:
            properties = seen.properties_result
            reasons[field] = (
                "the region is not mapped in this process"
                if result_name != "granularity_result"
                else str(_status.from_curesult("cuMemGetAllocationPropertiesFromHandle", properties))
            )
        elif result:
            reasons[field] = str(_status.from_curesult(call.split()[0], result))
    access = fields.pop("access")
    device: dict[str, Any] = dict.fromkeys(_DEVICE_SOURCES)
    try:
        info = _backend.cuda_info(ordinal)
    except KVReuseError as error:
        reasons.update(dict.fromkeys(_DEVICE_SOURCES, str(error)))
    else:
        values = (info.uuid, info.driver_version, info.vmm, info.posix_fd, info.fabric)
        device = dict(zip(_DEVICE_SOURCES, values, strict=True))
    return CudaObservation(
        nbytes=nbytes,
        physical_nbytes=physical_nbytes,
        access=None if access is None else Access(access),
        sources=_CUDA_SOURCES,
        reasons=MappingProxyType(reasons),
        **fields,
        **device,
    )


def _numa_nodes(handle: int, reasons: dict[str, str]) -> MappingProxyType[int, int] | None:
    pages = array("q", bytes(8 * PLACEMENT_SAMPLE_PAGES))
    try:
        count = _backend.region_placement(handle, pages)
    except KVReuseError as error:
        reasons["numa_nodes"] = str(error)
        return None
    if not count:
        reasons["numa_nodes"] = "the region is not mapped in this process"
        return None
    nodes: dict[int, int] = {}
    for node in pages[:count]:
        nodes[max(node, -1)] = nodes.get(max(node, -1), 0) + 1
    return MappingProxyType(nodes)


def _count(
    field: str, reasons: dict[str, str], count: Callable[[int, int], int], device: int, inode: int
) -> int | None:
    try:
        return count(device, inode)
    except OSError as error:
        reasons[field] = f"{error.filename}: {error.strerror}"
        return None


def _mappings_here(device: int, inode: int) -> int:
    # /proc shows st_dev as hexadecimal major:minor.
    wanted = f"{os.major(device):02x}:{os.minor(device):02x}"
    found = 0
    with open("/proc/self/maps") as lines:
        for line in lines:
            _, _, _, dev, ino, *_ = line.split(None, 5)
            found += dev == wanted and int(ino) == inode
    return found


def _fds_here(device: int, inode: int) -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the fd of the listing itself
            status = os.fstat(int(name))
            found += (status.st_dev, status.st_ino) == (device, inode)
    return found
