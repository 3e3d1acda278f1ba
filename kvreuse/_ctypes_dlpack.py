"""DLPack capsules of the fallback. numpy makes them: a deleter in Python crashes a consumer that calls it while an
exception is set, or after Python's end. What numpy cannot say, the device, is written into the tensor that it made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int32, c_void_p
from typing import Any

import numpy as np

# Not ctypes.pythonapi, whose function objects are everybody's: another's argtypes would be ours.
_pointer = ctypes.PyDLL(None)["PyCapsule_GetPointer"]
_pointer.argtypes, _pointer.restype = [ctypes.py_object, ctypes.c_char_p], c_void_p
# Where the tensor's device, two int32, lies (dlpack.h): it follows the data pointer; DLManagedTensor starts with the
# tensor, DLManagedTensorVersioned has 32 bytes before it.
_DEVICE_OFFSET = {b"dltensor": 8, b"dltensor_versioned": 40}


class View:
    """Memory that numpy makes an array of, without touching it; `done` is called when the last array is gone."""

    def __init__(self, address: int, nbytes: int, is_read_only: bool, done: Callable[[], None]) -> None:
        self._done = done
        self.is_read_only = is_read_only
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, is_read_only), "version": 3}

    def __del__(self) -> None:
        self._done()


def capsule(view: View, device_type: int, device_id: int, is_versioned: bool) -> Any:
    """Make a capsule: of DLPack 1.0 if `is_versioned` and numpy can (2.1), else of the one before, always allowed.

    Raises
    ------
    BufferError
        Read-only memory, and no DLPack 1.0 to say so.
    """
    array = np.asarray(view)
    name, made = b"dltensor", None
    if is_versioned:
        try:
            name, made = b"dltensor_versioned", array.__dlpack__(max_version=(1, 0))
        except TypeError:
            name = b"dltensor"
    if made is None:
        made = array.__dlpack__()
    device = (c_int32 * 2).from_address(_pointer(made, name) + _DEVICE_OFFSET[name])
    device[0], device[1] = device_type, device_id
    return made


_increment = ctypes.PyDLL(None)["Py_IncRef"]
_increment.argtypes, _increment.restype = [ctypes.py_object], None


def keep_for_ever(value: Any) -> None:
    """Let an object outlive Python: native work still writes into what it holds."""
    _increment(value)


class _Tensor(ctypes.Structure):
    """DLTensor (dlpack.h)."""

    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


def describe(made: Any) -> tuple[int, int, int, int]:
    """Read a capsule before DLPack 1.0 that nobody consumes: (address, nbytes, device type, device id).

    The memory is there as long as the capsule is.

    Raises
    ------
    BufferError
        It is not contiguous, or its elements are no whole bytes.
    """
    tensor = _Tensor.from_address(_pointer(made, b"dltensor"))
    shape = [tensor.shape[i] for i in range(tensor.ndim)]
    expected, bits = 1, tensor.bits * tensor.lanes
    for i in reversed(range(tensor.ndim)):
        if tensor.strides and shape[i] > 1 and 0 not in shape and tensor.strides[i] != expected:
            raise BufferError(f"the tensor is not contiguous: shape {shape}")
        expected *= shape[i]
    if bits % 8:
        raise BufferError(f"the tensor's elements have {bits} bits: expected whole bytes")
    return (tensor.data or 0) + tensor.byte_offset, expected * bits // 8, tensor.device_type, tensor.device_id
