"""Memory of others that copies can name: buffers, tensors, addresses; and an engine's blocks in it."""

from __future__ import annotations

from collections.abc import Mapping as Mappings
from typing import Any, TypeAlias

import numpy as np

from . import _ctypes_dlpack, _status
from .errors import NotSupportedError, RangeError
from .handles import DeviceView, Mapping

_CPU_TYPES = (1, 3)  # DLPack: kDLCPU, kDLCUDAHost
_CUDA_TYPE = 2
_NBYTES_MAX = 2**62 - 1


class Memory:
    """Bytes that this library does not own. Made by `wrap` and `from_address`; keeps what it was made of alive.

    An operation keeps its Memory until it has ended, whatever the caller drops.

    Attributes
    ----------
    address, nbytes : int
        Where it begins, and its bytes.
    device : str
        "cpu" or "cuda:N".
    readonly : bool
        Whether it can only be a source.
    """

    def __init__(self, address: int, nbytes: int, ordinal: int, readonly: bool, owner: Any) -> None:
        self.address = address
        self.nbytes = nbytes
        self.readonly = readonly
        self._ordinal = ordinal
        self._owner = owner

    def __repr__(self) -> str:
        return f"<kvreuse.Memory {self.nbytes} bytes at {self.address:#x} of {self.device}>"

    @property
    def device(self) -> str:
        """Where it is."""
        return "cpu" if self._ordinal < 0 else f"cuda:{self._ordinal}"

    @classmethod
    def wrap(cls, obj: Any) -> Memory:
        """Name the bytes of an object: a buffer, a tensor with DLPack, or one with ``__cuda_array_interface__``.

        Nothing is copied. A buffer cannot be resized while it is wrapped (BufferError). No stream is synchronised: give
        `after=` what the bytes depend on.

        Raises
        ------
        TypeError
            It has no such interface.
        BufferError
            It is not contiguous.
        """
        if isinstance(obj, Memory):
            return obj
        try:
            view = memoryview(obj)
        except TypeError:
            view = None
        if view is not None:
            return cls._of_buffer(view)
        if hasattr(obj, "__dlpack__"):
            return cls._of_dlpack(obj)
        if hasattr(obj, "__cuda_array_interface__"):
            return cls._of_cuda_array(obj)
        raise TypeError(
            f"{type(obj).__name__} cannot be wrapped: expected a buffer, DLPack, or __cuda_array_interface__"
        )

    @classmethod
    def _of_buffer(cls, view: memoryview) -> Memory:
        if not view.c_contiguous:
            raise BufferError(f"the buffer is not contiguous: shape {view.shape}, strides {view.strides}")
        if not view.nbytes:
            return cls(0, 0, -1, view.readonly, view)
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        return cls(address, view.nbytes, -1, view.readonly, view)

    @classmethod
    def _of_dlpack(cls, obj: Any) -> Memory:
        device_type, _ = obj.__dlpack_device__()
        # -1: a consumer that orders its own work (DLPack's Python specification).
        capsule = obj.__dlpack__(stream=-1) if device_type == _CUDA_TYPE else obj.__dlpack__()
        address, nbytes, device_type, ordinal = _ctypes_dlpack.describe(capsule)
        if device_type not in (*_CPU_TYPES, _CUDA_TYPE):
            raise NotSupportedError(
                f"memory of DLPack device type {device_type} cannot be copied: expected the CPU or CUDA",
                status=-7,
                name="NOT_SUPPORTED",
            )
        return cls(address, nbytes, ordinal if device_type == _CUDA_TYPE else -1, False, (capsule, obj))

    @classmethod
    def _of_cuda_array(cls, obj: Any) -> Memory:
        interface = obj.__cuda_array_interface__
        address, readonly = interface["data"]
        itemsize = np.dtype(interface["typestr"]).itemsize
        shape = tuple(interface["shape"])
        strides, expected = interface.get("strides"), itemsize
        for i in reversed(range(len(shape))):
            if strides is not None and shape[i] > 1 and 0 not in shape and strides[i] != expected:
                raise BufferError(f"the array is not contiguous: shape {shape}, strides {strides}")
            expected *= shape[i]
        if isinstance(obj, DeviceView):
            ordinal = obj.ordinal
        else:
            # The interface does not tell: cupy and torch say it beside.
            device = getattr(obj, "device", None)
            ordinal = getattr(device, "index", getattr(device, "id", 0)) or 0
        return cls(address, expected, ordinal, bool(readonly), obj)

    @classmethod
    def from_address(cls, address: int, nbytes: int, owner: Any, device: str = "cpu", readonly: bool = False) -> Memory:
        """Name bytes by their address.

        Parameters
        ----------
        address, nbytes : int
            Where they begin, and how many: the caller vouches for both.
        owner : object
            Kept alive as long as the memory is named; None: the caller keeps it.
        device : str
            "cpu" or "cuda:N", whose address it is.
        readonly : bool
            Only to be read.

        Raises
        ------
        RangeError
            A negative number, address 0, or bytes past the end of the address space.
        """
        address = _status.as_integer(address, "address", 0, 2**64 - 1)
        nbytes = _status.as_integer(nbytes, "nbytes", 0, _NBYTES_MAX)
        kind, _, number = device.partition(":")
        if device != "cpu" and not (kind == "cuda" and number.isascii() and number.isdigit() and len(number) < 5):
            raise RangeError(f'device {device!r} is unknown: expected "cpu" or "cuda:N"', status=-6, name="RANGE")
        if address + nbytes >= 2**64 or (nbytes and not address):
            raise _status.make(-6, 106, (address - 2**64 if address >= 2**63 else address, nbytes), "from_address")
        return cls(address, nbytes, -1 if device == "cpu" else int(number), readonly, owner)


Copyable: TypeAlias = "Memory | Mapping"


def as_copyable(obj: Any) -> Copyable:
    """Give a Mapping as it is, and wrap all else."""
    return obj if isinstance(obj, Mapping) else Memory.wrap(obj)


def memory_words(memory: Copyable) -> list[int]:
    """Describe it as the backends do (kvr_memory)."""
    if isinstance(memory, Mapping):
        return [memory.handle, 0, 0, 0, 0]
    address = memory.address - 2**64 if memory.address >= 2**63 else memory.address
    return [0, address, memory.nbytes, memory._ordinal, int(not memory.readonly)]


class EngineBlocks:
    """Where an engine keeps its blocks: for each segment a memory, with one slice of every block.

    Parameters
    ----------
    segments : mapping of str to (memory, offset, stride)
        Names as in the manifest's `segments` (any one name if that has none); memory is a Memory, a Mapping or what
        Memory.wrap takes; block i's slice begins at byte offset + i * stride.

    Raises
    ------
    TypeError, RangeError, BufferError
        No such mapping; a negative number; memory that cannot be wrapped.
    """

    def __init__(self, segments: Mappings[str, tuple[Any, int, int]]) -> None:
        if not isinstance(segments, Mappings):
            raise TypeError(f"segments must be a mapping of names, not {type(segments).__name__}")
        self._segments: dict[str, tuple[Copyable, int, int]] = {}
        for name, slice_ in segments.items():
            try:
                memory, offset, stride = slice_
            except (TypeError, ValueError):
                raise TypeError(f"segment {name!r} must be (memory, offset, stride)") from None
            self._segments[name] = (
                as_copyable(memory),
                _status.as_integer(offset, f"the offset of segment {name!r}", 0, _NBYTES_MAX),
                _status.as_integer(stride, f"the stride of segment {name!r}", 0, _NBYTES_MAX),
            )

    def __repr__(self) -> str:
        return f"<kvreuse.EngineBlocks {len(self._segments)} segment(s)>"

    @property
    def segments(self) -> tuple[str, ...]:
        """Names, as given."""
        return tuple(self._segments)

    def words(self, layout: list[tuple[str, int, int]]) -> tuple[list[int], list[Copyable]]:
        """Describe slices as the backends do (kvr_segment): for each (name, offset in the slot, bytes).

        Returns
        -------
        (words, memories)
            The memories are what the caller has to keep until the copy has ended.

        Raises
        ------
        RangeError
            A segment is not there.
        """
        words: list[int] = []
        memories: list[Copyable] = []
        for name, slot_offset, nbytes in layout:
            if name not in self._segments:
                known = ", ".join(map(repr, self._segments))
                raise RangeError(f"the engine has no segment {name!r}: it has {known}", status=-6, name="RANGE")
            memory, offset, stride = self._segments[name]
            words += [*memory_words(memory), offset, stride, slot_offset, nbytes]
            memories.append(memory)
        return words, memories


__all__ = ["EngineBlocks", "Memory"]
