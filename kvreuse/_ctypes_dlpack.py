"""DLPack tensors of the fallback (dlpack.h 0.x and 1.0): 1-D uint8, in structs that live until their deleter runs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any

READ_ONLY = 1


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("type_code", c_uint8),
        ("type_bits", c_uint8),
        ("type_lanes", c_uint16),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", c_void_p),
        ("byte_offset", c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, c_void_p)


class Managed(ctypes.Structure):
    """DLManagedTensor, and what is ours behind it."""

    _fields_ = [("dl_tensor", Tensor), ("manager_ctx", c_void_p), ("deleter", _Deleter), ("extent", c_int64)]


class Versioned(ctypes.Structure):
    """DLManagedTensorVersioned, and what is ours behind it."""

    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager_ctx", c_void_p),
        ("deleter", _Deleter),
        ("flags", c_uint64),
        ("dl_tensor", Tensor),
        ("extent", c_int64),
    ]


_live: dict[int, tuple[Any, Callable[[], None]]] = {}


def _delete(address: int) -> None:
    _, done = _live.pop(address)
    done()


_deleter = _Deleter(_delete)
_Destructor = ctypes.CFUNCTYPE(None, c_void_p)
# Not ctypes.pythonapi, whose function objects are everybody's: another's argtypes would be ours.
_python = ctypes.PyDLL(None)
_new = _python["PyCapsule_New"]
_new.argtypes, _new.restype = [c_void_p, ctypes.c_char_p, _Destructor], ctypes.py_object
# By address: the capsule is being destroyed when these are called.
_is_valid = _python["PyCapsule_IsValid"]
_is_valid.argtypes, _is_valid.restype = [c_void_p, ctypes.c_char_p], ctypes.c_int
_pointer = _python["PyCapsule_GetPointer"]
_pointer.argtypes, _pointer.restype = [c_void_p, ctypes.c_char_p], c_void_p
_NAMES = (b"dltensor", b"dltensor_versioned")  # kept: a capsule does not copy its name


def _destroy(capsule: int) -> None:
    # A consumer renames the capsule and calls the deleter itself.
    for name in _NAMES:
        if _is_valid(capsule, name):
            _delete(_pointer(capsule, name))


_destructor = _Destructor(_destroy)


def capsule(
    address: int,
    nbytes: int,
    device_type: int,
    device_id: int,
    is_versioned: bool,
    flags: int,
    done: Callable[[], None],
) -> Any:
    """Make a capsule; `done` is called once, when its consumer, or nobody, needs the memory any more."""
    made: Any = Versioned() if is_versioned else Managed()
    made.deleter = _deleter
    made.extent = nbytes
    if is_versioned:
        made.major, made.flags = 1, flags
    shape = ctypes.cast(ctypes.addressof(made) + type(made).extent.offset, ctypes.POINTER(c_int64))
    made.dl_tensor = Tensor(address, device_type, device_id, 1, 1, 8, 1, shape, None, 0)
    place = ctypes.addressof(made)
    _live[place] = (made, done)
    try:
        return _new(place, _NAMES[is_versioned], _destructor)
    except BaseException:
        del _live[place]
        raise
