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
