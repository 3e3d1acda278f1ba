"""What this library uses of the CUDA driver's ABI, for Python. native/cuda_driver.h is its twin; cuda.h judges both.

Nothing links to libcuda: it is opened on demand. Every function has its argument and result types: without them ctypes
cuts 64-bit handles to 32 bits.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_uint8, c_uint16, c_uint32
from ctypes import c_int32 as c_int32
from ctypes import c_size_t as c_size_t
from ctypes import c_uint64 as c_uint64
from ctypes import c_void_p as c_void_p
from typing import Any

LIBRARY = "libcuda.so.1"

OK, INVALID_VALUE, NOT_READY, NOT_SUPPORTED = 0, 1, 600, 801
ALLOCATION_PINNED = 1
LOCATION_DEVICE = 1
GRANULARITY_MINIMUM, GRANULARITY_RECOMMENDED = 0, 1
ATTRIBUTE_VMM, ATTRIBUTE_POSIX_FD, ATTRIBUTE_FABRIC = 102, 103, 128
POINTER_RANGE_SIZE, POINTER_ALLOWED_HANDLE_TYPES = 12, 14
STREAM_NON_BLOCKING, EVENT_DISABLE_TIMING = 1, 2
SRC_ACCESS_ORDER_STREAM = 1


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", c_int32), ("id", c_int32)]


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp. It has no size."""

    _fields_ = [
        ("type", c_int32),
        ("requested_handle_types", c_int32),
        ("location", Location),
        ("win32_handle_meta_data", c_void_p),
        ("compression_type", c_uint8),
        ("gpu_direct_rdma_capable", c_uint8),
        ("usage", c_uint16),
        ("reserved", c_uint8 * 4),
    ]


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", c_int32)]


class MemcpyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [
        ("src_access_order", c_int32),
        ("src_loc_hint", Location),
        ("dst_loc_hint", Location),
        ("flags", c_uint32),
    ]


class Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = [("data", c_uint8 * 16)]


# Name for cuGetProcAddress_v2: exact symbol, version, argument types. A bare name is often an older function, with
# 32-bit sizes.
REQUIRED: dict[str, tuple[str, int, tuple[Any, ...]]] = {
    "cuInit": ("cuInit", 2000, (c_uint32,)),
    "cuDriverGetVersion": ("cuDriverGetVersion", 2020, (POINTER(c_int32),)),
    "cuDeviceGetCount": ("cuDeviceGetCount", 2000, (POINTER(c_int32),)),
    "cuDeviceGet": ("cuDeviceGet", 2000, (POINTER(c_int32), c_int32)),
    "cuDeviceGetAttribute": ("cuDeviceGetAttribute", 2000, (POINTER(c_int32), c_int32, c_int32)),
    "cuDeviceGetUuid": ("cuDeviceGetUuid_v2", 11040, (POINTER(Uuid), c_int32)),
    "cuDevicePrimaryCtxRetain": ("cuDevicePrimaryCtxRetain", 7000, (POINTER(c_void_p), c_int32)),
    "cuCtxGetCurrent": ("cuCtxGetCurrent", 4000, (POINTER(c_void_p),)),
    "cuCtxSetCurrent": ("cuCtxSetCurrent", 4000, (c_void_p,)),
    "cuMemGetAllocationGranularity": (
        "cuMemGetAllocationGranularity",
        10020,
        (POINTER(c_size_t), POINTER(AllocationProp), c_int32),
    ),
    "cuMemCreate": ("cuMemCreate", 10020, (POINTER(c_uint64), c_size_t, POINTER(AllocationProp), c_uint64)),
    "cuMemRelease": ("cuMemRelease", 10020, (c_uint64,)),
    "cuMemExportToShareableHandle": (
        "cuMemExportToShareableHandle",
        10020,
        (c_void_p, c_uint64, c_int32, c_uint64),
    ),
    "cuMemImportFromShareableHandle": (
        "cuMemImportFromShareableHandle",
        10020,
        (POINTER(c_uint64), c_void_p, c_int32),
    ),
    "cuMemGetAllocationPropertiesFromHandle": (
        "cuMemGetAllocationPropertiesFromHandle",
        10020,
        (POINTER(AllocationProp), c_uint64),
    ),
    "cuMemAddressReserve": (
        "cuMemAddressReserve",
        10020,
        (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    ),
    "cuMemAddressFree": ("cuMemAddressFree", 10020, (c_uint64, c_size_t)),
    "cuMemMap": ("cuMemMap", 10020, (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64)),
    "cuMemUnmap": ("cuMemUnmap", 10020, (c_uint64, c_size_t)),
    "cuMemSetAccess": ("cuMemSetAccess", 10020, (c_uint64, c_size_t, POINTER(AccessDesc), c_size_t)),
    "cuMemGetAccess": ("cuMemGetAccess", 10020, (POINTER(c_uint64), POINTER(Location), c_uint64)),
    "cuMemGetAddressRange": ("cuMemGetAddressRange_v2", 3020, (POINTER(c_uint64), POINTER(c_size_t), c_uint64)),
    "cuPointerGetAttribute": ("cuPointerGetAttribute", 4000, (c_void_p, c_int32, c_uint64)),
    "cuStreamCreate": ("cuStreamCreate", 2000, (POINTER(c_void_p), c_uint32)),
    "cuStreamDestroy": ("cuStreamDestroy_v2", 4000, (c_void_p,)),
    "cuEventCreate": ("cuEventCreate", 2000, (POINTER(c_void_p), c_uint32)),
    "cuEventDestroy": ("cuEventDestroy_v2", 4000, (c_void_p,)),
    "cuEventRecord": ("cuEventRecord", 2000, (c_void_p, c_void_p)),
    "cuEventQuery": ("cuEventQuery", 2000, (c_void_p,)),
    "cuMemcpyAsync": ("cuMemcpyAsync", 4000, (c_uint64, c_uint64, c_size_t, c_void_p)),
}
# As above; None where the driver lacks it.
HAS_BATCH_COPY = 1  # the feature bit of kvr_cuda_info
USED_IF_THERE: dict[str, tuple[str, int, tuple[Any, ...]]] = {
    "cuMemcpyBatchAsync": (
        "cuMemcpyBatchAsync_v2",
        13000,
        (
            POINTER(c_uint64),
            POINTER(c_uint64),
            POINTER(c_size_t),
            c_size_t,
            POINTER(MemcpyAttributes),
            POINTER(c_size_t),
            c_size_t,
            c_void_p,
        ),
    ),
}
# Only asked for, to say whether the driver can do it: symbol, version, feature bit of kvr_cuda_info.
OPTIONAL: dict[str, tuple[str, int, int]] = {
    "cuStreamQuery": ("cuStreamQuery", 2000, 2),
    "cuMemGetHandleForAddressRange": ("cuMemGetHandleForAddressRange", 11070, 4),
}


class MissingEntryError(Exception):
    """The driver has no such entry point; the text is its symbol."""


class Driver:
    """The driver's entry points: an attribute for each name of REQUIRED and USED_IF_THERE, and `features`."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)
        self._get = self._symbol(
            "cuGetProcAddress_v2", (ctypes.c_char_p, POINTER(c_void_p), c_int32, c_uint64, c_void_p)
        )
        for name, (symbol, version, argtypes) in REQUIRED.items():
            function = self._resolve(name, symbol, version, argtypes)
            if function is None:
                raise MissingEntryError(symbol)
            setattr(self, name, function)
        # An older driver may answer with the function of its own version, which takes other arguments.
        has = c_int32()
        self.cuDriverGetVersion(byref(has))
        for name, (symbol, version, argtypes) in USED_IF_THERE.items():
            setattr(self, name, self._resolve(name, symbol, version, argtypes) if has.value >= version else None)
        self.features = 0 if self.cuMemcpyBatchAsync is None else HAS_BATCH_COPY
        for name, (symbol, version, bit) in OPTIONAL.items():
            if self._entry(name, version) or self._symbol(symbol, ()):
                self.features |= bit

    def _resolve(self, name: str, symbol: str, version: int, argtypes: tuple[Any, ...]) -> Any:
        address = self._entry(name, version)
        return ctypes.CFUNCTYPE(c_int32, *argtypes)(address) if address else self._symbol(symbol, argtypes)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def _symbol(self, symbol: str, argtypes: tuple[Any, ...]) -> Any:
        try:
            function = self._library[symbol]
        except AttributeError:
            return None
        function.argtypes, function.restype = argtypes, c_int32
        return function

    def _entry(self, name: str, version: int) -> int:
        # The result can be 0 with a NULL pointer: only the pointer counts.
        found = c_void_p()
        if self._get is None or self._get(name.encode(), ctypes.byref(found), version, 0, None) != OK:
            return 0
        return found.value or 0


byref = ctypes.byref
sizeof = ctypes.sizeof


def payload() -> Any:
    """Make 64 zeroed bytes: the driver may write more than it was asked for."""
    return ctypes.create_string_buffer(64)


def address_of(thing: Any) -> int:
    return int(ctypes.addressof(thing))


def missing_reason() -> str:
    """Return "" where libcuda.so.1 can be loaded, else why not."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        return f"{LIBRARY} cannot be loaded: {error}"
    return ""


def describe_result(code: int) -> str:
    """Say a CUresult in the words of the loaded driver: name, number, text."""
    try:
        library = ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        texts = []
        for symbol in ("cuGetErrorName", "cuGetErrorString"):
            function = library[symbol]
            function.argtypes, function.restype = [c_int32, POINTER(ctypes.c_char_p)], c_int32
            text = ctypes.c_char_p()
            # A code that it does not know: 1, and NULL.
            if function(code, ctypes.byref(text)) != OK or not text.value:
                return f"CUresult {code}"
            texts.append(text.value.decode("utf-8", "replace"))
    except (OSError, AttributeError):
        return f"CUresult {code}"
    return f"{texts[0]} (CUresult {code}): {texts[1]}"
