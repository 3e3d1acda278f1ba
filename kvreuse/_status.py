"""Where a status becomes an exception, and where every message of the backends is built; once, for both."""

from __future__ import annotations

import errno as _errno
import os as _os
import resource as _resource  # here: at the fd limit nothing can be imported any more
from typing import Any, NoReturn

from . import _ctypes_cuda as _cuda
from . import errors as _e

# Numbers of include/kvreuse.h; tests/lockstep compares every one with the header.
STATUS: dict[int, tuple[str, type[_e.KVReuseError]]] = {
    -1: ("INVALID_HANDLE", _e.InvalidHandleError),
    -2: ("STALE_HANDLE", _e.StaleHandleError),
    -3: ("HANDLE_CLOSED", _e.HandleClosedError),
    -4: ("KIND_MISMATCH", _e.KindMismatchError),
    -5: ("SIZE_MISMATCH", _e.SizeMismatchError),
    -6: ("RANGE", _e.RangeError),
    -7: ("NOT_SUPPORTED", _e.NotSupportedError),
    -8: ("PERMISSION_DENIED", _e.PermissionDeniedError),
    -9: ("OUT_OF_MEMORY", _e.OutOfMemoryError),
    -10: ("NO_SPACE", _e.NoSpaceError),
    -11: ("TOO_MANY_FDS", _e.TooManyFdsError),
    -12: ("BUSY", _e.BusyError),
    -13: ("NOT_QUIESCENT", _e.NotQuiescentError),
    -14: ("NOT_READY", _e.NotReadyError),
    -15: ("INCOMPATIBLE", _e.IncompatibleError),
    -16: ("ATTACH_REFUSED", _e.AttachRefusedError),
    -17: ("KEEPER_UNAVAILABLE", _e.KeeperUnavailableError),
    -18: ("STALE_EPOCH", _e.StaleEpochError),
    -19: ("STALE_BLOCK", _e.StaleBlockError),
    -20: ("CORRUPT", _e.CorruptError),
    -21: ("PROFILE", _e.ProfileError),
    -22: ("PROTOCOL", _e.ProtocolError),
    -23: ("WAIT_TIMEOUT", _e.WaitTimeoutError),
    -24: ("DRIVER", _e.DriverError),
    -25: ("SYSTEM_CALL", _e.SystemCallError),
    -26: ("FORKED", _e.ForkedError),
}
NUMBER: dict[type[_e.KVReuseError], int] = {cls: number for number, (_, cls) in STATUS.items()}

SOURCES = {0: "", 1: "errno", 2: "cuda"}
SORTS = {1: "region", 2: "mapping", 3: "lock", 4: "part table", 5: "queue", 6: "operation"}
KINDS = {0: "NONE", 1: "POSIX_FD", 8: "FABRIC"}
ROLES = {1: "reader", 2: "writer", 3: "keeper"}
OUTCOMES = {2: "DONE", 3: "FAILED", 4: "CANCELLED"}
STATES = {0: "FREE", 1: "WRITING", 2: "SEALED"}

# Which status an errno becomes; every other one is SYSTEM_CALL. native/handles.c holds the same rule.
ERRNO_STATUS: dict[int, int] = {
    _errno.EMFILE: -11,
    _errno.ENFILE: -11,
    _errno.ENOMEM: -9,
    _errno.ENOSPC: -10,
    _errno.EPERM: -8,
    _errno.EACCES: -8,
    _errno.ENOSYS: -7,
}

# Which status a CUresult becomes; every other one is DRIVER. native/cuda.c holds the same rule.
CURESULT_STATUS: dict[int, int] = {2: -9, 100: -7, 800: -8, 801: -7}

# Detail number -> text; {0}..{3} are the record's values, {sort0} and the like their names.
DETAILS: dict[int, str] = {
    0: "no detail",
    1: "{call} failed: {strerror} (errno {errno} {errname})",
    2: "a size must be 0 or more and within what the call allows: got {0}, the largest is {1}",
    3: "a handle is a positive integer made by this library: got {0}",
    4: "handle {0} was never given out in this process",
    5: "handle {0} is stale: what it named was closed; handles are never reused",
    6: "handle {0} names a {sort1}; this call needs a {sort2}",
    7: "kind {0} is unknown: expected NONE 0, POSIX_FD 1 or FABRIC 8",
    8: "the host provider cannot allocate kind {kind0}: ask for POSIX_FD, or a provider whose capabilities() list it",
    9: "a region allocated with kind {kind0} cannot be exported: kinds are fixed at allocation; allocate with POSIX_FD",
    10: "access {0} is unknown: expected READ 1 or READ_WRITE 3",
    11: "region {0} was given for reading only: its fd does not allow writing; map it with READ",
    12: "flags {0} contain unknown bits: known are {1}",
    13: "region {0} still has {1} mapping(s): close them first",
    14: "mapping {0} is in use by a view or a part: release it first",
    15: "the record declares {0} bytes of memory, the kernel observes {1}: the sizes must be equal",
    16: "nbytes {0} and physical_nbytes {1} do not fit: physical_nbytes must be nbytes rounded up to pages of {2}",
    17: "the memory is not sealed against shrinking (seals {0}, required {1}): its peer could cut it under a mapping; "
    "allow it only for a file fallback that the profile declares",
    18: "the record names memory (st_dev {0}, st_ino {1}), the fd is of another (st_dev {2}, st_ino {3}): "
    "it belongs to another region",
    19: "fd {0} is not memory (st_mode {1}): expected a memfd or a regular file",
    20: "an fd must be 0 or more: got {0}",
    21: "the name has {0} bytes: the longest is {1}",
    22: "the library's state belongs to process {0}; this is its forked child {1}: open things anew in the child",
    23: "no handle is left: {0} are open",
    24: "slot_count must be 1 to {1}: got {0}",
    25: "block_nbytes must be 1 to {1}: got {0}",
    26: "region_count must be 1 to {1}: got {0}",
    27: "the manifest has {0} bytes: at most {1} are possible",
    28: "the memory has {0} bytes, the part's layout needs {1}",
    29: "this is no part: it starts with {0}, expected {1}",
    30: "the part has version {0}, this library reads version {1}",
    31: "the superblock is damaged: its CRC is {0}, computed {1}",
    32: "the superblock is damaged: its field at byte {0} says {1}, expected {2}",
    33: "the manifest is damaged: its CRC is {0}, computed {1}",
    34: "role {0} is unknown: expected READER 1, WRITER 2 or KEEPER 3",
    35: "a {role0} may not do this: it needs a {role1}",
    36: "row {0} is outside of this part's rows: 0 to {1} - 1 (a keeper has -1)",
    37: "session {0} is not possible here: a session is a positive integer, a keeper's is 0",
    38: "this session ({0}) no longer holds its place in the part: session {1} does; attach again",
    39: "the part was retired (state {0}): attach again",
    40: "the part's layout is not sealed (state {0})",
    41: "a change of the part was cut short and only its writer or the keeper may repair it: try again, or miss",
    42: "the part's lock was not free within {0} ns: {holder1} holds it",
    43: "key {0} has {1} bytes: a key has 1 to {2}",
    44: "keys of {0} bytes are not possible: a key has 1 to {1}",
    45: "a count of {0} is not possible: 0 to {1}",
    46: "entry {0} names slot {1}: the part has slots 0 to {2} - 1",
    47: "entry {0} names slot {1} a second time",
    48: "entry {0} names slot {1}, which is claimed or being written",
    49: "key {0} is under another open reservation: commit or abort that one first",
    50: "{0} slot(s) are needed, {1} are free and {2} can be evicted",
    51: "entry {0}: slot {1} has generation {3}, the caller carries {2}: the block was replaced",
    52: "entry {0}: slot {1} is {state2}, expected {state3}",
    53: "entry {0}: this session has no claim on slot {1}",
    54: "entry {0}: slot {1} has {2} claims of this session, the most that can be counted",
    55: "the data region that holds slot {0} is not bound",
    56: "data region {0} is outside of this part's: 0 to {1} - 1",
    57: "the mapping has {0} bytes, the data region needs {1}",
    58: "state {0} is unknown",
    59: "the memory already holds a part (state {0})",
    60: "a part of {0} slots of this size does not fit in 62 bits",
    61: "fd {0} names lock memory that this process holds open under another fd",
    62: "{call} failed: {cuda}",
    63: "{missing}",
    64: "the CUDA driver has no entry point {call}: virtual memory management needs 10.2 or newer",
    65: "device {0} does not exist: the driver has {1} device(s), counted from 0",
    66: "device {0} has no virtual memory management (attribute 102 is 0)",
    67: 'fabric memory is not allocated unless the profile says so: set [handles] fabric = "allocate"',
    68: "region {0} still has {1} fabric handle(s) given out: it can be closed only when all importers have imported: "
    "close the shared handles then",
    69: "handle {0} is inside a call of another thread: try again after it",
    70: "region {0} is of provider {provider1}: this call is for the other kind of provider",
    71: "{0} bytes of memory are no multiple of this allocation's granularity of {1}",
    72: "{0} bytes were declared, the driver mapped {1}: the sizes must be equal",
    73: "the driver refuses to map {0} bytes, as the record declares: the allocation is smaller ({call}: {cuda})",
    74: "the record says kind {kind0}, but the allocation was made with kinds {1} (bits)",
    75: "the allocation is at location type {1}, id {2}: expected device {0} (type 1)",
    76: "nbytes {0} and physical_nbytes {1} do not fit: physical_nbytes must be as many or more",
    77: "mapping {0} is device memory: the CPU cannot read it; view it by DLPack or __cuda_array_interface__",
    78: "a queue has 1 to {1} threads: got {0}",
    79: "entry {0} would write {2} bytes at offset {1}: the destination has {3} bytes",
    80: "entry {0} would read {2} bytes at offset {1}: the source has {3} bytes",
    81: "entries {0} and {1} write into the same bytes: nothing was copied",
    82: "entry {0} writes into bytes that entry {1} reads: nothing was copied; submit them one after the other",
    83: "the destination can only be read (mapping {0}; 0: foreign memory)",
    84: "queue {0} is being closed: it takes no more work",
    85: "{1} operation(s) of queue {0} have not ended: what they name stays; wait, and close again",
    86: "operation {0} has not ended: wait for it, or cancel it and wait",
    87: "dependency {0} is of kind {1}: expected an fd 1, an operation 2 or a CUDA event 3",
    88: "operation {0}, which this one waited for, ended {outcome1}: nothing was copied",
    89: "{0} bytes are in quarantine, of {1} allowed: no new work is taken before some has ended or was given back",
    90: "mapping {0} is named by {1} operation(s) that have not ended: wait for them",
    91: "entry {0}: slot {1} is still being written by {2} operation(s): wait for them, or commit after them",
    92: "entry {0}: a copy into slot {1} failed or was cancelled: its bytes are invalid; abort the reservation",
    93: "the part has {1} operation(s) that have not ended: wait for them, and close again",
    94: "entry {0}: only {1} of {2} bytes were moved",
    95: "entry {0}: the block in slot {1} has CRC {3}, at its commit it had {2}",
    96: "entry {0}: the reservation of slot {1} was aborted",
    97: "operation {0} is not in quarantine: only such can be given back",
    98: "queue {0} was not opened for faults",
    99: "fault {0} is unknown",
    100: "operation {0} was given back by an operator while its end was unknown",
    101: "segment {0} lies at offset {1} of a slot and has {2} bytes: a slot has {3}",
    102: "entry {0} names engine block {1}: it does not lie within the {3} bytes of segment {2}'s memory",
    103: "direction {0} is unknown: expected IN 1 or OUT 2",
    104: "operation {0} was cancelled: its destination is invalid",
    105: "segment {0} has offset {1} and stride {2} for blocks of {3} bytes: expected 0 or more, and at least a block",
    106: "foreign memory cannot be {1} bytes at address {0}",
    108: "the keeper knows of no live worker of this part, or it is not ready: its group's readiness says why",
    109: "a heartbeat's period must be {1} to {2} ns: got {0}",
    110: "the part table {0} has a heartbeat already",
    107: "entry {0}: slot {1} was reserved in content epoch {2}, the part is in {3}: its bytes may be of what was "
    "forgotten; abort the reservation",
}

_CODES = _errno.errorcode


def _holder(pid: int) -> str:
    if pid == -1:
        return "a thread of this process"
    return f"process {pid}" if pid > 0 else "an unknown process"


def make(
    status: int,
    detail: int = 0,
    values: tuple[int, ...] = (),
    call: str = "",
    native_source: int = 0,
    native_code: int = 0,
) -> _e.KVReuseError:
    """Build the exception of an error record (kvr_error). `values` may be shorter than four: the rest is 0."""
    name, cls = STATUS[status]
    v = (*values, 0, 0, 0, 0)[:4]
    if detail == 18:  # u64 numbers, carried in int64
        v = tuple(value & (2**64 - 1) for value in v)
    names: dict[str, str] = {}
    for i in range(3):
        names[f"sort{i}"] = SORTS.get(v[i], str(v[i]))
        names[f"kind{i}"] = KINDS.get(v[i], str(v[i]))
        names[f"role{i}"] = ROLES.get(v[i], str(v[i]))
    text = DETAILS[detail].format(
        *v,
        call=call,
        strerror=_os.strerror(native_code) if native_source == 1 else "",
        errno=native_code,
        errname=_CODES.get(native_code, "?"),
        state2=STATES.get(v[2], str(v[2])),
        state3=STATES.get(v[3], str(v[3])),
        holder1=_holder(v[1]),
        outcome1=OUTCOMES.get(v[1], str(v[1])),
        provider1="host" if v[1] < 0 else f"cuda:{v[1]}",
        cuda=_cuda.describe_result(native_code) if native_source == 2 else "",
        missing=_cuda.missing_reason() if detail == 63 else "",
        **names,
    )
    fields: dict[str, Any] = {
        "status": status,
        "name": name,
        "call": call,
        "native_source": SOURCES[native_source],
        "native_code": native_code,
    }
    if detail == 50:
        fields.update(needed=v[0], free=v[1], evictable=v[2])
    elif detail in (85, 90, 93):
        fields.update(count=v[1])
    elif detail == 91:
        fields.update(count=v[2])
    elif detail == 42 and v[1] > 0:
        fields.update(holder_pid=v[1])
    elif detail == 30:
        fields.update(fields={"version": (v[1], v[0])})
    if status == -11:
        soft, hard = _resource.getrlimit(_resource.RLIMIT_NOFILE)
        fields.update(needed=1, soft=soft, hard=hard)
        text += f"; this process may open {soft} (hard limit {hard}): raise RLIMIT_NOFILE"
    return cls(text, **fields)


def from_errno(call: str, code: int) -> _e.KVReuseError:
    """Build the exception of a failed system call."""
    return make(ERRNO_STATUS.get(code, -25), 1, (), call, 1, code)


def from_curesult(call: str, code: int) -> _e.KVReuseError:
    """Build the exception of a failed driver call."""
    return make(CURESULT_STATUS.get(code, -24), 62, (), call, 2, code)


def raise_status(*record: Any) -> NoReturn:
    """Raise the exception of an error record; arguments as of `make`."""
    raise make(*record)


INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def as_integer(value: Any, name: str, low: int = INT64_MIN, high: int = INT64_MAX) -> int:
    """Turn an argument into an int within [low, high] by the one rule of H7: `__index__`, but no bool.

    Raises
    ------
    TypeError
        Not an integer (bool, float, None, str ...).
    RangeError
        Outside of [low, high].
    """
    if type(value) is not int:
        # numpy before 2.3 only warns where its bool is used as an index.
        index = None if type(value).__name__ in ("bool", "bool_") else getattr(type(value), "__index__", None)
        if index is None:
            raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
        value = index(value)
    if not low <= value <= high:
        raise _e.RangeError(f"{name} must be from {low} to {high}: got {value}", status=-6, name="RANGE", call="")
    return int(value)


def buffer_error(name: str, value: Any, want: str) -> TypeError:
    """Build the error of an argument that is no usable buffer; `want` says what it has to be."""
    return TypeError(f"{name} must be {want}, not {type(value).__name__}")


def buffer_length_error(name: str, found: int, expected: int, unit: str) -> _e.RangeError:
    """Build the error of a buffer of the wrong length."""
    return _e.RangeError(f"{name} must have {expected} {unit}: got {found}", status=-6, name="RANGE", call="")


def make_text(status: int, text: str, **fields: Any) -> _e.KVReuseError:
    """Build the exception of a status with a text of its own (the classes above the backends)."""
    name, cls = STATUS.get(status, STATUS[-22])
    return cls(text, status=status, name=name, **fields)
