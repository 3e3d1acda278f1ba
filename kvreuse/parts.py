"""A rank's part of the KV cache, as its writer sees it. Nothing here needs a round trip to the keeper (K6)."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import numpy as np
import numpy.typing as npt

from . import _status, tickets
from ._api import TableStats
from ._context import Context
from ._select import backend as _backend
from .copies import After, CopyQueue, Operation, after_words, int64s, submit_words
from .errors import (
    BusyError,
    ForkedError,
    HandleClosedError,
    KVReuseError,
    NotQuiescentError,
    RangeError,
    StaleBlockError,
)
from .handles import IMPORT_ALLOW_UNSEALED, MAP_DONTFORK, PAYLOAD_NBYTES, Access, DeviceView, HandleKind
from .memory import EngineBlocks

if TYPE_CHECKING:
    from .keeper.client import Attachment
    from .manifest import Manifest, Rank

Keys = Union[Sequence[bytes], "npt.NDArray[np.uint8]"]
Int64Array = npt.NDArray[np.int64]

KEY_NBYTES = 32
ROLE_WRITER = 2
RESERVE_EVICT = 1
RESERVE_DUPLICATE = 2
COMMIT_CHECKSUM = 1
DIRECTION_IN, DIRECTION_OUT = 1, 2  # KVR_DIRECTION_...
SLOTS_COMMIT, SLOTS_CHECKSUM, SLOTS_VERIFY = 1, 2, 4  # KVR_SLOTS_...
# Bounds the memory and the claims of a verification at a time.
VERIFY_BATCH_SLOTS = 1024
_BEATS = 8  # heartbeats within stall_s


class OutcomeKind(enum.Enum):
    """How an attach ended."""

    RESTORED = "RESTORED"
    EMPTY = "EMPTY"
    REFUSED = "REFUSED"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an attach ended: the kind, the number of blocks restored (0 unless RESTORED), and the reason."""

    kind: OutcomeKind
    blocks: int
    reason: str

    def __str__(self) -> str:
        if self.kind is OutcomeKind.RESTORED:
            return f"RESTORED({self.blocks})" + (f": {self.reason}" if self.reason else "")
        return f"{self.kind.name}({self.reason})"


@dataclasses.dataclass(frozen=True)
class Reuse:
    """Whether blocks of this part are retained and found, and if not, why."""

    enabled: bool
    reason: str


class ClearResult(NamedTuple):
    """Blocks removed, and blocks that are claimed and so keep their memory (they are no content any more)."""

    removed: int
    kept: int


class VerifyResult(NamedTuple):
    """Blocks compared with the checksum of their commit, and the keys of those that differed (taken out)."""

    checked: int
    bad: tuple[bytes, ...]


@dataclasses.dataclass(frozen=True)
class PackedKeys:
    """Keys as the backends take them: key i is the first nbytes[i] (None: all) of stride bytes at i * stride."""

    data: Any
    stride: int
    nbytes: bytes | None
    count: int

    def prefix(self, count: int) -> PackedKeys:
        """Give the first `count` keys, without a copy."""
        if count == self.count:
            return self
        data = memoryview(self.data).cast("B")[: count * self.stride]
        return PackedKeys(data, self.stride, None if self.nbytes is None else self.nbytes[:count], count)

    def key(self, i: int) -> bytes:
        """Return key i as bytes."""
        size = self.stride if self.nbytes is None else self.nbytes[i]
        return bytes(memoryview(self.data).cast("B")[i * self.stride : i * self.stride + size])


def pack_keys(keys: Keys) -> PackedKeys:
    """Bring keys into the backends' form.

    Parameters
    ----------
    keys : sequence of bytes, or uint8 array of shape (n, key_size)
        Each key has 1 to 32 bytes. A C-contiguous array is used as it is.

    Raises
    ------
    TypeError
        Something is no bytes object, or the array is not uint8.
    RangeError
        A key is empty or longer than 32 bytes, or the array is not 2-D and contiguous.
    """
    if isinstance(keys, np.ndarray):
        if keys.dtype != np.uint8:
            raise TypeError(f"an array of keys must be of dtype uint8, not {keys.dtype}")
        if keys.ndim != 2 or not keys.flags.c_contiguous:
            raise _range_error(f"an array of keys must be contiguous with shape (n, key_size): got shape {keys.shape}")
        _check_key_size(0, keys.shape[1])
        return PackedKeys(keys, keys.shape[1], None, keys.shape[0])
    if isinstance(keys, (bytes, bytearray, memoryview, str)):
        raise TypeError(f"keys must be a sequence of bytes objects, not one {type(keys).__name__}")
    count = len(keys)
    if not count:
        return PackedKeys(b"", 1, None, 0)
    for i, key in enumerate(keys):
        if not isinstance(key, bytes):
            raise TypeError(f"key {i} must be bytes, not {type(key).__name__}")
    sizes = set(map(len, keys))
    if len(sizes) == 1:
        size = sizes.pop()
        _check_key_size(0, size)
        return PackedKeys(b"".join(keys), size, None, count)
    for i, key in enumerate(keys):
        _check_key_size(i, len(key))
    return PackedKeys(b"".join(key.ljust(KEY_NBYTES, b"\0") for key in keys), KEY_NBYTES, bytes(map(len, keys)), count)


def _check_key_size(index: int, size: int) -> None:
    if not 1 <= size <= KEY_NBYTES:
        raise _status.make(-6, 43, (index, size, KEY_NBYTES), "pack_keys")


def _range_error(text: str) -> RangeError:
    return RangeError(text, status=-6, name="RANGE")


def _empty(count: int) -> Int64Array:
    return np.empty(count, np.int64)


class Part(Context):
    """One rank's share of a KV cache, attached as its one writer. Made by Keeper.attach; usable from any thread.

    Attributes
    ----------
    part_id : bytes
        16 bytes that name the part; another manifest or geometry is another part.
    blocks, block_bytes : int
        Slots, and bytes of each.
    manifest, rank : Manifest, Rank
        As attached.
    outcome : Outcome
        RESTORED(n) or EMPTY(reason).
    reuse : Reuse
        Whether blocks are retained and found.
    """

    def __init__(self, attachment: Attachment, manifest: Manifest, rank: Rank) -> None:
        self._keeper = attachment.keeper
        self._attachment = attachment
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._closed = False
        self._table = 0
        self._regions: list[int] = []
        self._mappings: list[int] = []
        self._exporters: list[Any] = []  # by region: what gives buffers of it, or the device address of its first byte
        self._unended: weakref.WeakSet[_Slots] = weakref.WeakSet()
        self.part_id = attachment.part_id
        self.blocks = attachment.blocks
        self.block_bytes = attachment.block_bytes
        self.manifest = manifest
        self.rank = rank
        self.reuse = Reuse(attachment.reuse_enabled, attachment.reuse_reason)
        self.outcome = Outcome(OutcomeKind.EMPTY, 0, "not attached")
        self._checksum = attachment.checksum
        kind, _, ordinal = attachment.provider.partition(":")
        self._ordinal = int(ordinal) if kind == "cuda" else -1
        self._slots_per_region = 0
        self._queue: CopyQueue | None = None

    @classmethod
    def _open(cls, attachment: Attachment, manifest: Manifest, rank: Rank) -> Part:
        """Take over what the keeper gave; its fds are closed or owned by the part in every case."""
        part = cls(attachment, manifest, rank)
        try:
            part._open_memory(attachment)
            part.outcome = part._restore(attachment)
            attachment.keeper._confirm(
                attachment.part_id,
                attachment.session,
                part.outcome.kind.value,
                part.outcome.blocks,
                part.outcome.reason,
            )
        except BaseException:
            with contextlib.suppress(KVReuseError):  # the first error is the one to tell
                part._close_memory()
            part._closed = True
            raise
        return part

    def _open_memory(self, attachment: Attachment) -> None:
        fds = [attachment.table_fd, attachment.claims_fd, *attachment.data_fds]
        lock_fd = attachment.lock_fd
        regions: list[int] = []
        try:
            for index, (fd, record) in enumerate(zip(fds, attachment.records, strict=True)):
                nbytes, physical_nbytes, region_id, device, inode, unsealed = record
                if index >= 2 and self._ordinal >= 0:
                    sizes = (nbytes, physical_nbytes)
                    kind, none = int(HandleKind.POSIX_FD), bytes(PAYLOAD_NBYTES[HandleKind.FABRIC])
                    info = _backend.cuda_import(self._ordinal, kind, fd, none, *sizes, region_id)
                else:
                    flags = IMPORT_ALLOW_UNSEALED if unsealed else 0
                    info = _backend.region_import(fd, nbytes, physical_nbytes, region_id, device, inode, flags)
                regions.append(info.handle)
            self._table = _backend.table_open(
                regions[0],
                regions[1],
                lock_fd,
                ROLE_WRITER,
                attachment.session,
                attachment.row,
                attachment.lock_wait_ns,
            )
            lock_fd = -1  # consumed
            stall_s = attachment.keeper.profile.retention.stall_s
            if stall_s:
                _backend.table_beat(self._table, max(1_000_000, int(stall_s * 1e9 / _BEATS)))
            self._slots_per_region = _backend.table_info(self._table).slots_per_region
            for index, region in enumerate(regions[2:]):
                # R6: a forked child must not hold writable memory that a later writer owns.
                mapped = _backend.region_map(region, int(Access.READ_WRITE), MAP_DONTFORK)
                self._mappings.append(mapped.handle)
                if self._ordinal >= 0:  # the CPU cannot read it: no checksums
                    self._exporters.append(mapped.address)
                    continue
                _backend.table_bind(self._table, index, mapped.handle)
                self._exporters.append(_backend.mapping_buffer(mapped.handle))
        finally:
            for fd in (*fds, lock_fd):
                if fd >= 0:
                    with contextlib.suppress(OSError):
                        os.close(fd)
            # A mapping pins its memory by itself, but its region is closed after it: keep those that are mapped.
            self._regions = regions

    def _restore(self, attachment: Attachment) -> Outcome:
        if not self.reuse.enabled:
            return Outcome(OutcomeKind.EMPTY, 0, self.reuse.reason)
        if attachment.offered != "RESTORED":
            return Outcome(OutcomeKind.EMPTY, 0, attachment.reason)
        try:
            found = _backend.table_restore(self._table)
            bad_data = 0
            if self._checksum in ("attach", "always") and self._ordinal < 0:
                bad_data = len(self._verify_all().bad)
        except KVReuseError as error:
            # R2: never half. What could not be checked to the end is not offered at all.
            _backend.table_reset(self._table)
            return Outcome(OutcomeKind.EMPTY, 0, f"restore failed: {error}")
        notes = []
        if found.bad_count:
            notes.append(f"{found.bad_count} damaged record(s) freed")
        if bad_data:
            notes.append(f"{bad_data} block(s) with damaged data freed")
        return Outcome(OutcomeKind.RESTORED, found.sealed_count - bad_data, ", ".join(notes))

    def __repr__(self) -> str:
        return f"<kvreuse.Part {self.part_id.hex()[:8]} rank {self.rank} {self.blocks} blocks, {self.outcome}>"

    # ---- inventory ----

    @property
    def _handle(self) -> int:
        if self._closed:
            raise HandleClosedError("the part is closed", status=-3, name="HANDLE_CLOSED")
        return self._table

    def match(self, keys: Keys) -> int:
        """Count the leading keys that are present. Advisory: reserves nothing and promises nothing (I1).

        Parameters
        ----------
        keys : sequence of bytes, or uint8 array of shape (n, key_size)
            Repeats are allowed and count each time.

        Returns
        -------
        int
            Keys; 0 with reuse off.

        Raises
        ------
        StaleEpochError
            Another writer took the part, or it was retired.
        WaitTimeoutError
            The part's lock was held longer than the profile's lock_wait_s.
        """
        packed = pack_keys(keys)
        if not self.reuse.enabled:
            return 0
        return _backend.table_match(self._handle, packed.data, packed.stride, packed.nbytes)

    def claim(self, keys: Keys) -> Claim:
        """Claim the leading keys that are present: their blocks stay until the claim is released.

        Returns
        -------
        Claim
            May be empty. Owned by the caller: release it.

        Raises
        ------
        StaleEpochError, WaitTimeoutError
            As `match`.
        RangeError
            A block has more claims of this session than can be counted (1048575).
        """
        packed = pack_keys(keys)
        table = self._handle
        slots, generations = _empty(packed.count), _empty(packed.count)
        count = 0
        if self.reuse.enabled and packed.count:
            count = _backend.table_claim(table, packed.data, packed.stride, packed.nbytes, slots, generations)
        claim = Claim(self, slots[:count], generations[:count])
        if self._checksum == "always" and self._ordinal < 0 and count:
            self._cut_at_damage(claim)
        return claim

    def adopt(self, ticket: bytes) -> Claim:
        """Claim what a scheduler's group claim names, in this worker's own session.

        Parameters
        ----------
        ticket : bytes
            Of GroupClaim.ticket for this rank.

        Returns
        -------
        Claim
            Of all entries. Owned by the caller: release it.

        Raises
        ------
        StaleBlockError
            A block was evicted or overwritten since, or the ticket is of another part (an earlier one of this rank, or
            another rank's); nothing is claimed.
        CorruptError, IncompatibleError, TypeError
            It is damaged, of another version, or no bytes object.
        StaleEpochError, WaitTimeoutError
            As `match`.
        """
        part_id, slots, generations = tickets.unpack(ticket)
        table = self._handle
        if part_id != self.part_id:
            raise StaleBlockError(
                f"the ticket is of part {part_id.hex()[:8]}, this is part {self.part_id.hex()[:8]}: match again",
                status=-19,
                name="STALE_BLOCK",
            )
        if len(slots):
            _backend.table_claim_slots(table, slots, generations)
        return Claim(self, slots, generations)

    def progress(self, done: int, total: int) -> None:
        """Say how far this worker is with what it does before it is ready (loading its model, say).

        Parameters
        ----------
        done, total : int
            In a unit of the caller's. While done < total the rank is not ready; `Group.wait_ready` sees it move.

        Raises
        ------
        RangeError
            Not 0 <= done <= total.
        StaleEpochError
            This session is over.
        KeeperUnavailableError
            The keeper did not answer in time.
        """
        counts = _status.as_integer(done, "done"), _status.as_integer(total, "total")
        _ = self._handle
        self._keeper._progress(self._attachment.session, *counts)

    def _cut_at_damage(self, claim: Claim) -> None:
        verdicts = np.zeros(len(claim), np.uint8)
        _backend.table_verify(self._table, claim.slots, verdicts)
        bad = np.flatnonzero(verdicts == 1)
        if len(bad):
            slots, generations = claim.slots[bad], claim.generations[bad]
            claim._cut(int(bad[0]))
            _backend.table_invalidate(self._table, np.ascontiguousarray(slots), np.ascontiguousarray(generations))

    def reserve(
        self,
        keys: Keys,
        slots: npt.ArrayLike | None = None,
        evict: bool = False,
        duplicate: bool = False,
    ) -> Reservation:
        """Reserve a slot for each key that is to be written; all or nothing.

        Parameters
        ----------
        keys : sequence of bytes, or uint8 array of shape (n, key_size)
            An entry that is present already, or repeated earlier in keys, needs no slot: its `slots` entry is -1.
        slots : int64 array of shape (n,), optional
            Name the slot of each entry (an engine that manages its slots in place). Each must be FREE, or SEALED and
            unclaimed: its old block is then gone. The old bytes are invalid from the return on: call before writing.
        evict : bool
            Where free slots are missing, evict the least recent unclaimed blocks that are not among keys.
        duplicate : bool
            Store a second copy of keys that are present.

        Returns
        -------
        Reservation
            Owned by the caller: commit or abort it; leaving its context without commit aborts.

        Raises
        ------
        NoSpaceError
            With needed, free and evictable slots; nothing changed.
        BusyError
            A key is under another open reservation, or a named slot is claimed or being written; nothing changed.
        StaleEpochError, WaitTimeoutError
            As `match`.
        """
        packed = pack_keys(keys)
        count = packed.count
        named = None
        if slots is not None:
            named = np.ascontiguousarray(slots)
            if named.dtype.kind not in "iu" or named.shape != (count,):
                raise TypeError(f"slots must be integers of shape ({count},): got {named.dtype} of shape {named.shape}")
            named = named.astype(np.int64, copy=False)
        got, generations = _empty(count), _empty(count)
        evicted_keys, evicted_nbytes = np.empty(count * KEY_NBYTES, np.uint8), np.empty(count, np.uint8)
        flags = (RESERVE_EVICT if evict else 0) | (RESERVE_DUPLICATE if duplicate else 0)
        evicted = _backend.table_reserve(
            self._handle,
            packed.data,
            packed.stride,
            packed.nbytes,
            named,
            flags,
            got,
            generations,
            evicted_keys,
            evicted_nbytes,
        )
        return Reservation(self, got, generations, _unpack_keys(evicted_keys, evicted_nbytes, evicted))

    def touch(self, keys: Keys) -> int:
        """Make present keys the most recent, from the last to the first, so that a chain's tail is older than its head.

        Returns
        -------
        int
            Keys touched; absent ones are skipped.
        """
        packed = pack_keys(keys)
        return _backend.table_touch(self._handle, packed.data, packed.stride, packed.nbytes)

    def evict(self, n: int, keep: Keys = ()) -> int:
        """Evict up to n of the least recent unclaimed blocks whose key is not in keep.

        Returns
        -------
        int
            Blocks evicted.
        """
        packed = pack_keys(keep)
        return _backend.table_evict(self._handle, n, packed.data, packed.stride, packed.nbytes)

    def clear(self) -> ClearResult:
        """Forget all content in one step. Claimed blocks keep their memory until released, but are no hits any more.

        Reservations made before can only be aborted: their commit is StaleBlockError.

        Returns
        -------
        ClearResult
        """
        return ClearResult(*_backend.table_clear(self._handle))

    def verify(self, keys: Keys | None = None) -> VerifyResult:
        """Compare blocks with the checksum of their commit, and take out those that differ.

        Parameters
        ----------
        keys : optional
            Only these; absent ones are skipped. None: all blocks.

        Returns
        -------
        VerifyResult
            Blocks committed without a checksum (policy "off", or device memory) are not counted as checked.
        """
        table = self._handle
        if self._ordinal >= 0:
            return VerifyResult(0, ())
        if keys is None:
            return self._verify_all()
        packed = pack_keys(keys)
        slots, generations = _empty(packed.count), _empty(packed.count)
        _backend.table_lookup(table, packed.data, packed.stride, packed.nbytes, slots, generations)
        found = np.flatnonzero(slots >= 0)
        _, unique = np.unique(slots[found], return_index=True)
        wanted = found[np.sort(unique)]
        checked, bad = self._verify_slots(slots[wanted], generations[wanted])
        return VerifyResult(checked, tuple(packed.key(int(wanted[i])) for i in bad))

    def _verify_all(self) -> VerifyResult:
        checked, first = 0, 0
        bad: list[bytes] = []
        size = VERIFY_BATCH_SLOTS
        slots, generations = _empty(size), _empty(size)
        keys, nbytes = np.empty(size * KEY_NBYTES, np.uint8), np.empty(size, np.uint8)
        while first >= 0:
            count, first = _backend.table_inventory(self._table, first, slots, generations, keys, nbytes)
            n, indices = self._verify_slots(slots[:count], generations[:count])
            checked += n
            names = _unpack_keys(keys, nbytes, count)
            bad.extend(names[i] for i in indices)
        return VerifyResult(checked, tuple(bad))

    def _verify_slots(self, slots: Int64Array, generations: Int64Array) -> tuple[int, list[int]]:
        """Verify slots under a claim; return (checked, indices of bad ones). Blocks replaced meanwhile are skipped."""
        table = self._table
        indices = np.arange(len(slots))
        try:
            _backend.table_claim_slots(table, slots, generations)
        except StaleBlockError:
            kept = []
            for i in indices:
                with contextlib.suppress(StaleBlockError):
                    _backend.table_claim_slots(table, slots[i : i + 1], generations[i : i + 1])
                    kept.append(i)
            indices = np.array(kept, np.int64)
        claimed = np.ascontiguousarray(slots[indices])
        verdicts = np.zeros(len(claimed), np.uint8)
        try:
            _backend.table_verify(table, claimed, verdicts)
        finally:
            _backend.table_release(table, claimed)
        bad = indices[verdicts == 1]
        if len(bad):
            _backend.table_invalidate(table, np.ascontiguousarray(slots[bad]), np.ascontiguousarray(generations[bad]))
        return int(np.count_nonzero(verdicts != 2)), [int(i) for i in bad]

    def keys(self) -> Iterator[bytes]:
        """List the keys of all blocks that count, in the order of their slots; read in pages, not at one moment."""
        first, size = 0, VERIFY_BATCH_SLOTS
        slots, generations = _empty(size), _empty(size)
        keys, nbytes = np.empty(size * KEY_NBYTES, np.uint8), np.empty(size, np.uint8)
        while first >= 0:
            count, first = _backend.table_inventory(self._handle, first, slots, generations, keys, nbytes)
            yield from _unpack_keys(keys, nbytes, count)

    # ---- copies ----

    @property
    def queue(self) -> CopyQueue:
        """The queue that copies of this part take unless another is named: one thread, started at the first use."""
        with self._lock:
            _ = self._handle
            if self._queue is None:
                self._queue = CopyQueue(1, self._keeper.profile)
            return self._queue

    def store(
        self,
        keys: Keys,
        engine_blocks: EngineBlocks,
        indices: npt.ArrayLike,
        *,
        evict: bool = False,
        duplicate: bool = False,
        queue: CopyQueue | None = None,
        after: Iterable[After] = (),
    ) -> Operation:
        """Reserve a slot for each key, copy the engine's blocks in, and commit when all bytes have moved.

        The commit happens also when the caller goes away; if the operation FAILED or was CANCELLED the slots are given
        back and nothing is present.

        Parameters
        ----------
        keys, evict, duplicate :
            As `reserve`: what is present already is not copied.
        engine_blocks : EngineBlocks
            All segments of the manifest.
        indices : integers of shape (n,)
            The engine block of each key.
        queue : CopyQueue, optional
            By default the part's own.
        after : sequence, optional
            As CopyQueue.submit.

        Returns
        -------
        Operation

        Raises
        ------
        NoSpaceError, BusyError, StaleEpochError, WaitTimeoutError
            As `reserve`; nothing changed.
        RangeError, TypeError, ProfileError, NotQuiescentError
            As CopyQueue.submit; nothing changed.
        """
        queue = queue or self.queue
        queue.check_after(after := tuple(after))
        reservation = self.reserve(keys, evict=evict, duplicate=duplicate)
        try:
            operation = reservation._submit(
                DIRECTION_IN, engine_blocks, indices, None, None, queue, after, commits=True
            )
        except BaseException:
            reservation.abort()
            raise
        reservation._finish()
        return operation

    def load(
        self,
        claim: Claim,
        engine_blocks: EngineBlocks,
        indices: npt.ArrayLike,
        segments: Sequence[str] | None = None,
        *,
        queue: CopyQueue | None = None,
        after: Iterable[After] = (),
    ) -> Operation:
        """Copy claimed blocks out to the engine. The operation has a claim of its own: `claim` may be released at once.

        Parameters
        ----------
        claim : Claim
            Of this part.
        engine_blocks, indices, segments, queue, after :
            As Claim.copy_out.

        Returns
        -------
        Operation
            FAILED with StaleBlockError if a block is gone.
        """
        if claim._part is not self:
            raise _range_error("the claim is of another part")
        return claim.copy_out(engine_blocks, indices, segments=segments, queue=queue, after=after)

    def _layout(self, engine_blocks: EngineBlocks, segments: Sequence[str] | None) -> list[tuple[str, int, int]]:
        """Find where the segments lie in a slot: (name, offset, bytes)."""
        if self.manifest.segments is None:
            if len(engine_blocks.segments) != 1:
                count = len(engine_blocks.segments)
                raise _range_error(f"the manifest declares no segments: the engine's blocks must have one, not {count}")
            whole = [(engine_blocks.segments[0], 0, self.block_bytes)]
        else:
            whole, offset = [], 0
            for name, nbytes in self.manifest.segments:
                whole.append((name, offset, nbytes))
                offset += nbytes
        if segments is None:
            return whole
        by_name = {name: (name, offset, nbytes) for name, offset, nbytes in whole}
        unknown = [name for name in segments if name not in by_name]
        if unknown:
            raise _range_error(f"the manifest has no segment {unknown[0]!r}: it has {', '.join(map(repr, by_name))}")
        return [by_name[name] for name in segments]

    def stats(self) -> TableStats:
        """Read the part's counts and words.

        Returns
        -------
        TableStats
            In slots; the totals count since the part was created, over all its writers.
        """
        return _backend.table_stats(self._handle)

    # ---- lifetime ----

    def close(self) -> None:
        """Say goodbye: open reservations are aborted, claims released, memory unmapped. Blocks stay with the keeper.

        Closing again does nothing.

        Raises
        ------
        BusyError
            A view of a slot is still used (a numpy array made of it, say): its memory may get another writer.
        NotQuiescentError
            Copies of the part have not ended: wait for them, and close again.
        """
        with self._lock:
            if self._closed:
                return
            if self._pid != os.getpid():
                raise ForkedError("the part belongs to the parent process", status=-26, name="FORKED")
            in_flight = _backend.table_info(self._table).operation_count if self._table else 0
            if in_flight:
                raise NotQuiescentError(
                    f"{in_flight} operation(s) of the part have not ended: wait for them, and close again",
                    status=-13,
                    name="NOT_QUIESCENT",
                    count=in_flight,
                )
            if self._queue is not None:
                self._queue.close()
                self._queue = None
            open_slots = list(self._unended)
            for item in open_slots:
                item._drop_views()
            # The binding to the table is one use; whatever is more can still reach the memory.
            bound = int(self._ordinal < 0)  # device memory is not bound
            used = sum(_backend.mapping_info(mapping).use_count - bound for mapping in self._mappings)
            if used:
                raise BusyError(
                    f"{used} view(s) of the part's slots are still used, by a numpy array say: drop them first",
                    status=-12,
                    name="BUSY",
                )
            for item in open_slots:
                item._end(quiet=True)
            self._close_memory()
            self._closed = True
        with contextlib.suppress(KVReuseError):
            # The keeper may be gone; it learns of the end from the process then.
            self._keeper._goodbye(self._attachment.part_id, self._attachment.session)

    def _close_memory(self) -> None:
        self._exporters.clear()
        if self._table:
            _backend.table_close(self._table)
            self._table = 0
        # One by one: where the driver refuses one, closing again goes on from there.
        while self._mappings:
            _backend.mapping_unmap(self._mappings[-1])
            self._mappings.pop()
        while self._regions:
            _backend.region_close(self._regions[-1])
            self._regions.pop()

    def __enter__(self) -> Part:
        return self

    def __del__(self) -> None:
        if self._closed or self._pid != os.getpid():
            return
        warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, stacklevel=2, source=self)
        with contextlib.suppress(KVReuseError):
            self.close()

    def _view(self, slot: int, writable: bool = True) -> memoryview | DeviceView:
        region, index = divmod(slot, self._slots_per_region)
        offset = index * self.block_bytes
        if self._ordinal >= 0:
            return DeviceView(self._exporters[region] + offset, self.block_bytes, self._ordinal, writable)
        # A buffer of its own, so that the mapping counts it.
        return memoryview(self._exporters[region])[offset : offset + self.block_bytes]


def _unpack_keys(keys: npt.NDArray[np.uint8], nbytes: npt.NDArray[np.uint8], count: int) -> list[bytes]:
    data = keys[: count * KEY_NBYTES].tobytes()
    return [data[i * KEY_NBYTES : i * KEY_NBYTES + int(nbytes[i])] for i in range(count)]


class _Slots(Context):
    """What a reservation and a claim share: slots of a part, and the views that were handed out."""

    def __init__(self, part: Part, slots: Int64Array, generations: Int64Array) -> None:
        self._part = part
        self._pid = os.getpid()
        self._views: list[memoryview | DeviceView] = []
        self._done = False
        self.slots = slots
        self.generations = generations
        with part._lock:
            part._unended.add(self)

    def __len__(self) -> int:
        return len(self.slots)

    def _checked_view(self, i: int, writable: bool) -> memoryview | DeviceView:
        i = _status.as_integer(i, "i")
        if self._done or self._part._closed:
            raise HandleClosedError(f"this {type(self).__name__} has ended", status=-3, name="HANDLE_CLOSED")
        if not 0 <= i < len(self.slots):
            raise _range_error(f"entry {i} is outside of this {type(self).__name__}: it has {len(self.slots)} entries")
        slot = int(self.slots[i])
        if slot < 0:
            raise _range_error(f"entry {i} needs no slot: its block is present, or an earlier entry writes it")
        return self._part._view(slot, writable)

    def _drop_views(self) -> None:
        # What was made of a view, a numpy array say, cannot be taken back; the mapping counts it until it is gone.
        for view in self._views:
            with contextlib.suppress(BufferError):
                view.release()
        self._views = []

    def _submit(
        self,
        direction: int,
        engine_blocks: EngineBlocks | None,
        indices: npt.ArrayLike,
        entries: npt.ArrayLike | None,
        segments: Sequence[str] | None,
        queue: CopyQueue | None,
        after: Iterable[After],
        commits: bool = False,
    ) -> Operation:
        part = self._part
        if self._done or part._closed:
            raise HandleClosedError(f"this {type(self).__name__} has ended", status=-3, name="HANDLE_CLOSED")
        queue = queue or part.queue
        queue.check_after(after := tuple(after))
        slots, generations = self.slots, self.generations
        if entries is not None:
            wanted = int64s(entries, "entries")
            if len(wanted) and not (wanted.min() >= 0 and wanted.max() < len(slots)):
                raise _range_error(f"entries must be from 0 to {len(slots)} - 1: got {wanted.min()} to {wanted.max()}")
            slots, generations = np.ascontiguousarray(slots[wanted]), np.ascontiguousarray(generations[wanted])
        words: list[int] = []
        kept: list[Any] = []
        if engine_blocks is not None:
            words, kept = engine_blocks.words(part._layout(engine_blocks, segments))
        flags = 0
        if commits:
            flags = SLOTS_COMMIT | (SLOTS_CHECKSUM if self._checks() else 0)
        elif direction == DIRECTION_OUT and part._checksum == "always" and part._ordinal < 0:
            flags = SLOTS_VERIFY
        waits, waited = after_words(after)
        arguments = (
            part._handle,
            direction,
            np.array(part._mappings, np.int64),
            slots,
            generations,
            int64s(indices, "indices"),
            submit_words(words),
            flags,
            submit_words(waits),
        )
        label = "store" if direction == DIRECTION_IN else "load"
        return queue._take(_backend.copy_slots, arguments, (kept, waited, part), label)

    def _checks(self) -> bool:
        """Whether a commit computes checksums."""
        return self._part._checksum != "off" and self._part._ordinal < 0

    def _finish(self) -> None:
        self._done = True
        self._drop_views()
        with self._part._lock:
            self._part._unended.discard(self)

    def _end(self, quiet: bool = False) -> None:
        raise NotImplementedError

    def _end_context(self) -> None:
        self._end()

    def __del__(self) -> None:
        if getattr(self, "_done", True) or self._part._closed or self._pid != os.getpid():
            return
        if len(self.slots):
            warnings.warn(
                f"{type(self).__name__} was dropped without being ended", ResourceWarning, stacklevel=2, source=self
            )
        self._end(quiet=True)


class Reservation(_Slots):
    """The writer's right to fill some slots. Made by Part.reserve; use it from one thread at a time.

    Attributes
    ----------
    slots, generations : int64 array of shape (n,)
        One entry a key; slot -1 where nothing is to be written.
    evicted : list of bytes
        Keys whose blocks made room, oldest first.
    """

    def __init__(self, part: Part, slots: Int64Array, generations: Int64Array, evicted: list[bytes]) -> None:
        super().__init__(part, slots, generations)
        self.evicted = evicted

    def __enter__(self) -> Reservation:
        return self

    def view(self, i: int) -> memoryview | DeviceView:
        """Give the writable bytes of entry i's slot; valid until commit or abort. Of device memory: a DeviceView.

        An array made of it (numpy.frombuffer) is not taken back by commit: do not write through it afterwards.
        """
        view = self._checked_view(i, True)
        self._views.append(view)
        return view

    def copy_in(
        self,
        engine_blocks: EngineBlocks,
        indices: npt.ArrayLike,
        entries: npt.ArrayLike | None = None,
        segments: Sequence[str] | None = None,
        *,
        queue: CopyQueue | None = None,
        after: Iterable[After] = (),
    ) -> Operation:
        """Copy an engine's blocks into the reserved slots. Commit after it: ``commit(after=[operation])``.

        Parameters
        ----------
        engine_blocks : EngineBlocks
            Where they are.
        indices : integers of shape (n,)
            The engine block of each entry.
        entries : integers of shape (n,), optional
            Which entries of the reservation; by default all. Entries without a slot are skipped.
        segments : sequence of str, optional
            Only these of the manifest's; by default all.
        queue, after :
            As Part.store.

        Returns
        -------
        Operation
            After FAILED or CANCELLED the reservation cannot be committed any more (O4).
        """
        return self._submit(DIRECTION_IN, engine_blocks, indices, entries, segments, queue, after)

    def commit(self, after: Iterable[After] = (), *, queue: CopyQueue | None = None) -> Operation | None:
        """Seal the slots, in order: the blocks are present from now on. Views end.

        Parameters
        ----------
        after : sequence, optional
            Commit only when these are over and, being operations, DONE; also if the caller goes away. If one ended
            otherwise, the slots are given back and nothing is present. The reservation ends at once.
        queue : CopyQueue, optional
            With `after`: whose thread commits.

        Returns
        -------
        Operation or None
            None without `after`: it is committed.

        Raises
        ------
        BusyError
            A copy into a slot has not ended: name it in `after`.
        CorruptError
            A copy into a slot FAILED or was CANCELLED: its bytes are invalid; abort.
        StaleEpochError
            Another writer took the part; nothing is sealed.
        HandleClosedError
            Committed or aborted before.
        """
        if self._done or self._part._closed:
            raise HandleClosedError("this Reservation has ended", status=-3, name="HANDLE_CLOSED")
        self._drop_views()
        after = tuple(after)
        if after:
            none = np.zeros(len(self.slots), np.int64)
            operation = self._submit(DIRECTION_IN, None, none, None, None, queue, after, commits=True)
            self._finish()
            return operation
        flags = COMMIT_CHECKSUM if self._checks() else 0
        _backend.table_commit(self._part._handle, self.slots, self.generations, flags)
        self._finish()
        return None

    def abort(self) -> None:
        """Give the slots back unwritten; after commit or abort it does nothing."""
        self._end()

    def _end(self, quiet: bool = False) -> None:
        if self._done or self._part._closed:
            return
        try:
            _backend.table_abort(self._part._table, self.slots, self.generations)
        except KVReuseError:
            # The slots stay reserved, and are freed when the writer's session ends.
            if not quiet:
                raise
        finally:
            self._finish()


class Claim(_Slots):
    """A right to read some blocks, which keeps them from being evicted. Made by Part.claim.

    Attributes
    ----------
    slots, generations : int64 array of shape (n,)
        One entry a claimed key.
    """

    def __enter__(self) -> Claim:
        return self

    def view(self, i: int) -> memoryview | DeviceView:
        """Give the read-only bytes of entry i's block; valid until release. Of device memory: a DeviceView.

        An array made of it (numpy.frombuffer) is not taken back by release: copy what you keep.
        """
        base = self._checked_view(i, False)
        view = base
        if isinstance(base, memoryview):
            view = base.toreadonly()
            base.release()
        self._views.append(view)
        return view

    def copy_out(
        self,
        engine_blocks: EngineBlocks,
        indices: npt.ArrayLike,
        entries: npt.ArrayLike | None = None,
        segments: Sequence[str] | None = None,
        *,
        queue: CopyQueue | None = None,
        after: Iterable[After] = (),
    ) -> Operation:
        """Copy claimed blocks out to the engine. The operation has a claim of its own.

        Under the checksum policy `always` whole blocks are verified before the first byte moves, whatever the segments.

        Parameters
        ----------
        engine_blocks, queue, after :
            As Reservation.copy_in.
        indices : integers of shape (n,)
            The engine block of each entry.
        entries : integers of shape (n,), optional
            Which entries of the claim; by default all.
        segments : sequence of str, optional
            Only these, in this order: one layer a call, say.

        Returns
        -------
        Operation
            FAILED with StaleBlockError: a block is gone; with CorruptError: one differs from its checksum.
        """
        return self._submit(DIRECTION_OUT, engine_blocks, indices, entries, segments, queue, after)

    def release(self) -> None:
        """Give the claim back; again does nothing. Views end."""
        self._end()

    def _end(self, quiet: bool = False) -> None:
        if self._done or self._part._closed:
            return
        try:
            if len(self.slots):
                _backend.table_release(self._part._table, self.slots)
        except KVReuseError:
            if not quiet:
                raise
        self._finish()

    def _cut(self, count: int) -> None:
        """Keep the first `count` entries, give back the rest."""
        _backend.table_release(self._part._table, np.ascontiguousarray(self.slots[count:]))
        self.slots, self.generations = self.slots[:count], self.generations[:count]


__all__ = [
    "Claim",
    "ClearResult",
    "Outcome",
    "OutcomeKind",
    "Part",
    "Reservation",
    "Reuse",
    "VerifyResult",
    "pack_keys",
]
