"""Frames between keeper and clients: SOCK_SEQPACKET, one frame a message, fds by SCM_RIGHTS. Imports no numpy.

A frame is a header of 16 bytes, little endian, and a msgpack payload; at most 64 KiB together:

====== ==== ==========================================
offset type meaning
====== ==== ==========================================
0      4s   "KVRF"
4      u16  version, read before anything after it
6      u16  zero
8      u32  bytes of the payload: exactly the rest
12     u32  file descriptors that come with the frame
====== ==== ==========================================
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from .. import _status
from ..errors import IncompatibleError, KVReuseError, ProtocolError

VERSION = 1
SOCKET_PATH_NBYTES = 107  # sun_path holds 108 with the final NUL
FRAME_NBYTES_MAX = 65536
FDS_MAX = 200  # the kernel passes 253 a message
PAGE_PARTS = 32
PAGE_NBYTES = 40960  # of parts in a page of status
PAGE_RANKS = 64
TEXT_MAX = 400
_HEADER = struct.Struct("<4sHHII")
_MAGIC = b"KVRF"


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    serial: int


# (nbytes, physical_nbytes, region_id, device, inode, unsealed) of one region's memory
Record = tuple[int, int, bytes, int, int, bool]


class Hello(_Message, frozen=True, kw_only=True):
    """First frame of a client."""

    abi: int
    backend: str
    version: str


class Attach(_Message, frozen=True, kw_only=True):
    """Become the writer of a rank's part; `donate` regions of the client's own follow (0: the keeper makes one).

    Of device memory the keeper sees only fds: their sizes are as declared.
    """

    attach_id: bytes
    manifest: dict[str, Any]
    rank: dict[str, int]
    group: str
    blocks: int
    provider: str
    donate: int


class Donate(_Message, frozen=True, kw_only=True):
    """One data region, with its fd; the last one is answered by Attached."""

    session: int
    index: int
    record: Record


class Confirm(_Message, frozen=True, kw_only=True):
    """The client has opened the part; this is what it found."""

    session: int
    kind: str
    blocks: int
    reason: str


class Open(_Message, frozen=True, kw_only=True):
    """Read a rank's part: a session with a claims row of its own; `data`: with the data's fds, for reading only."""

    attach_id: bytes
    group: str
    dp: int
    index: int
    data: bool


class Progress(_Message, frozen=True, kw_only=True):
    """How far a worker is with what it does before it is ready; `done` == `total`: it is."""

    session: int
    done: int
    total: int


class ClearGroup(_Message, frozen=True, kw_only=True):
    """Empty all parts of a group; with another `weights_id` ("": none) that is the group's from now on."""

    group: str
    dp: int
    weights_id: str = ""


class Goodbye(_Message, frozen=True, kw_only=True):
    """End of this process's session of that attach; it may not exist (an attach whose answer was lost)."""

    attach_id: bytes


class Resume(_Message, frozen=True, kw_only=True):
    """The same process after a cut connection."""

    session: int
    attach_id: bytes


class GetStatus(_Message, frozen=True, kw_only=True):
    """Ask for a page of status, from part number `first`."""

    first: int


class GetReadiness(_Message, frozen=True, kw_only=True):
    """Ask for a page of a group's readiness, from rank `first`; answered when it is ready, or after wait_s seconds."""

    group: str
    dp: int
    wait_s: float
    first: int = 0


class Release(_Message, frozen=True, kw_only=True):
    """Free a part that has no writer; an empty id: all of them. The next attach is told the reason."""

    part_id: bytes
    reason: str = "released by an operator"


class Welcome(_Message, frozen=True, kw_only=True):
    """Answer to Hello. `profile` is None where none was declared."""

    abi: int
    incarnation: int
    label: str
    profile: dict[str, Any] | None


class NeedRegions(_Message, frozen=True, kw_only=True):
    """Answer to Attach: donate regions of at least these sizes, in order."""

    session: int
    nbytes: list[int]


class Attached(_Message, frozen=True, kw_only=True):
    """The part. fds of table, claims, lock and data come in this order, `fd_count` in all; 3 where no data was asked.

    FDS_MAX of them come with this frame, with a record each but the lock's; the rest with MoreFds.
    """

    part_id: bytes
    session: int
    row: int
    offered: str
    reason: str
    records: list[Record]
    blocks: int
    block_bytes: int
    lock_wait_ns: int
    reuse_enabled: bool
    reuse_reason: str
    checksum: str
    fd_count: int


class MoreFds(_Message, frozen=True, kw_only=True):
    """More fds of Attached, and their records."""

    records: list[Record]


class Refused(_Message, frozen=True, kw_only=True):
    """Answer to Attach and Open: REFUSED."""

    reason: str
    pid: int


class Done(_Message, frozen=True, kw_only=True):
    """A request was carried out."""

    value: int = 0


class Cleared(_Message, frozen=True, kw_only=True):
    """Answer to ClearGroup: blocks removed, and why some ranks (by index) could not be emptied yet."""

    removed: int
    failed: dict[int, str]


class StatusPage(_Message, frozen=True, kw_only=True):
    """A page of status; `next` is the next page's first part, -1 at the end."""

    summary: dict[str, Any]
    parts: list[dict[str, Any]]
    next: int


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a group. Times are CLOCK_MONOTONIC seconds, 0.0 where it did not happen."""

    index: int
    rank: dict[str, int]
    ready: bool
    reason: str
    pid: int
    blocks: int  # of its part, or as its refused attach asked
    progress: tuple[int, int]  # done, total; (0, 0): not told
    stalled: bool
    died_at: float  # its last writer's pidfd fired, or it said goodbye
    ready_at: float  # its writer confirmed


class ReadinessReply(_Message, frozen=True, kw_only=True):
    """A group's readiness, and a page of its topology's ranks; `next` is the next page's first rank, -1 at the end."""

    ready: bool
    reason: str
    manifest: dict[str, Any] | None
    ranks: list[RankState]
    next: int
    capacity: int  # blocks that each rank can hold; 0: no part


class Failed(_Message, frozen=True, kw_only=True):
    """A request failed; `status` is a KVR_ERROR_ number."""

    status: int
    text: str
    fields: dict[str, list[Any]]


Request = (
    Hello
    | Attach
    | Donate
    | Confirm
    | Open
    | Progress
    | ClearGroup
    | Goodbye
    | Resume
    | GetStatus
    | GetReadiness
    | Release
)
Reply = Welcome | NeedRegions | Attached | MoreFds | Refused | Done | Cleared | StatusPage | ReadinessReply | Failed
_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


def protocol_error(text: str, expected: Any = None, got: Any = None, **fields: Any) -> ProtocolError:
    """Build a ProtocolError. `usable=True`: the frame was whole, so that the connection can go on."""
    return ProtocolError(text, status=-22, name="PROTOCOL", expected=expected, got=got, **fields)


def clip(text: str, size: int = TEXT_MAX) -> str:
    """Cut a text that comes from outside, so that a frame of many stays within its bound."""
    return text if len(text) <= size else text[: size - 3] + "..."


def failed(serial: int, error: KVReuseError | TypeError) -> Failed:
    """Put an error into a frame."""
    status = -6 if isinstance(error, TypeError) else (error.status or _status.NUMBER.get(type(error), -22))
    fields = {name: list(pair) for name, pair in getattr(error, "fields", {}).items()}
    counts = {"expected": getattr(error, "expected", None), "got": getattr(error, "got", None)}
    if isinstance(counts["expected"], int):
        fields = {name: [value] for name, value in counts.items()}
    return Failed(serial=serial, status=status, text=clip(str(error), 4096), fields=fields)


def raise_failed(message: Failed) -> None:
    """Raise the error of a frame."""
    error = _status.make_text(message.status, message.text)
    if isinstance(error, IncompatibleError):
        error.fields = {name: (pair[0], pair[1]) for name, pair in message.fields.items()}
    elif isinstance(error, ProtocolError) and message.fields:
        error.expected, error.got = message.fields["expected"][0], message.fields["got"][0]
    raise error


def encode(message: Any, fd_count: int = 0) -> bytes:
    """Make a frame. Raises ProtocolError if it would be larger than 64 KiB."""
    payload = _encoder.encode(message)
    size = _HEADER.size + len(payload)
    if size > FRAME_NBYTES_MAX:
        raise protocol_error(
            f"a frame has at most {FRAME_NBYTES_MAX} bytes: {type(message).__name__} has {size}", FRAME_NBYTES_MAX, size
        )
    return _HEADER.pack(_MAGIC, VERSION, 0, len(payload), fd_count) + payload


def send(sock: socket.socket, message: Any, fds: Sequence[int] = ()) -> None:
    """Send one frame with its fds, which stay the caller's. Raises OSError, and ProtocolError as `encode` does."""
    frame = encode(message, len(fds))
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"={len(fds)}i", *fds))] if fds else []
    sock.sendmsg([frame], ancillary, socket.MSG_NOSIGNAL)


def recv_request(sock: socket.socket, fds_max: int) -> tuple[Any, list[int]] | None:
    """Receive one request and its fds, owned by the caller; None at the end of the connection."""
    return _recv(sock, fds_max, _request_decoder)


def recv_reply(sock: socket.socket, fds_max: int) -> tuple[Any, list[int]] | None:
    """Receive one reply and its fds, owned by the caller; None at the end of the connection."""
    return _recv(sock, fds_max, _reply_decoder)


def _recv(sock: socket.socket, fds_max: int, decoder: Any) -> tuple[Any, list[int]] | None:
    """Receive one frame.

    Raises
    ------
    ProtocolError
        Not a frame of this version, or other fds than it says. What arrived is closed. After the latter (`usable`, with
        the frame's `serial`) the connection can go on.
    """
    # One int of room more than allowed, so that too many are seen.
    room = socket.CMSG_SPACE(4 * (fds_max + 1))
    data, ancillary, flags, _ = sock.recvmsg(FRAME_NBYTES_MAX + 1, room, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            count = len(payload) // 4
            fds.extend(struct.unpack(f"={count}i", payload[: 4 * count]))
    if not data:
        close_fds(fds)
        return None
    try:
        return _decode(data, len(fds), flags, decoder), fds
    except BaseException:
        close_fds(fds)
        raise


def _decode(data: bytes, fd_count: int, flags: int, decoder: Any) -> Any:
    if flags & socket.MSG_TRUNC or len(data) > FRAME_NBYTES_MAX:
        raise protocol_error(f"a frame has at most {FRAME_NBYTES_MAX} bytes: a longer one came", FRAME_NBYTES_MAX)
    if len(data) < 6 or data[:4] != _MAGIC:
        raise protocol_error(f"this is no kvreuse frame: it starts with {data[:8]!r}", _MAGIC, data[:4])
    version = int.from_bytes(data[4:6], "little")
    if version != VERSION:
        raise protocol_error(f"the peer speaks protocol version {version}, this is {VERSION}", VERSION, version)
    if len(data) < _HEADER.size:
        raise protocol_error(f"a frame's header has {_HEADER.size} bytes: got {len(data)}", _HEADER.size, len(data))
    _, _, zero, size, expected_fds = _HEADER.unpack_from(data)
    if zero or size != len(data) - _HEADER.size:
        got = len(data) - _HEADER.size
        raise protocol_error(f"the frame says {size} bytes of payload and has {got}", size, got)
    try:
        message = decoder.decode(memoryview(data)[_HEADER.size :])
    except (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise protocol_error(f"the frame's payload is not well-formed: {error}") from None
    if expected_fds != fd_count or flags & socket.MSG_CTRUNC:
        raise protocol_error(
            f"expected {expected_fds} fd(s) with the frame, got {fd_count}: is the fd limit reached?",
            expected_fds,
            fd_count,
            usable=True,
            serial=message.serial,
        )
    return message


def close_fds(fds: Iterable[int]) -> None:
    """Close fds; errors do not matter any more."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
