"""A group claim's ticket for one rank: which slots hold its blocks, and of which generation.

Little endian, without padding:

====== ==== ==========================================
offset type meaning
====== ==== ==========================================
0      4s   "KVRT"
4      u16  version, read before anything after it
6      u16  zero
8      u32  entries
12     16s  part id: another part than this is another incarnation of the rank's memory
28     i64  slot, then i64 generation, an entry
end    u32  CRC32C of all before it
====== ==== ==========================================
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from ._select import backend as _backend
from .errors import CorruptError, IncompatibleError

VERSION = 1
_HEADER = struct.Struct("<4sHHI16s")
_MAGIC = b"KVRT"
_CRC = struct.Struct("<I")

Int64Array = npt.NDArray[np.int64]


def pack(part_id: bytes, slots: Int64Array, generations: Int64Array) -> bytes:
    """Make a ticket of entries of one part."""
    pairs = np.stack([slots, generations], axis=1).astype("<i8").tobytes()
    body = _HEADER.pack(_MAGIC, VERSION, 0, len(slots), part_id) + pairs
    return body + _CRC.pack(_backend.crc32c(body))


def unpack(ticket: bytes) -> tuple[bytes, Int64Array, Int64Array]:
    """Read a ticket: (part id, slots, generations).

    Raises
    ------
    TypeError
        It is no bytes object.
    CorruptError
        It is damaged, cut short, or no ticket.
    IncompatibleError
        It is of another version.
    """
    if not isinstance(ticket, (bytes, bytearray, memoryview)):
        raise TypeError(f"a ticket is bytes, not {type(ticket).__name__}")
    data = bytes(ticket)
    if len(data) < 6 or data[:4] != _MAGIC:
        raise _corrupt(f"this is no ticket: {len(data)} bytes that start with {data[:4]!r}, not {_MAGIC!r}")
    version = int.from_bytes(data[4:6], "little")
    if version != VERSION:
        raise IncompatibleError(
            f"the ticket is of version {version}, this is {VERSION}: install one kvreuse",
            status=-15,
            name="INCOMPATIBLE",
            fields={"version": (VERSION, version)},
        )
    least = _HEADER.size + _CRC.size
    if len(data) < least or _CRC.unpack_from(data, len(data) - _CRC.size)[0] != _backend.crc32c(data[: -_CRC.size]):
        raise _corrupt(f"the ticket of {len(data)} bytes is damaged or cut short")
    _, _, _, count, part_id = _HEADER.unpack_from(data)
    if len(data) != least + 16 * count:
        raise _corrupt(f"the ticket says {count} entries, which is {least + 16 * count} bytes: it has {len(data)}")
    pairs = np.frombuffer(data, "<i8", 2 * count, _HEADER.size).reshape(count, 2).astype(np.int64)
    return part_id, np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])


def _corrupt(text: str) -> CorruptError:
    return CorruptError(text, status=-20, name="CORRUPT")
