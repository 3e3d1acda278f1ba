"""An open part in Python: its lock, its shared memory, and the steps that calls are made of.

Lock order: a part's lock (in-process half, then record lock), then `_fallback_host.lock`. Never two parts' locks.
Derived structures are read from memory that others can write: every index is checked, every walk is bounded.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from . import _api, _status
from . import _ctypes_libc as libc
from . import _ctypes_structs as c
from . import _fallback_host as host
from ._fallback_host import Mapping, MappingBuffer, Region, bytes_view, check_length, crc

READER, WRITER, KEEPER = c.KVR_ROLE_READER, c.KVR_ROLE_WRITER, c.KVR_ROLE_KEEPER
FREE, WRITING, SEALED = c.KVR_SLOT_FREE, c.KVR_SLOT_WRITING, c.KVR_SLOT_SEALED
LOW32 = 0xFFFFFFFF
CLAIM_BITS, CLAIM_MASK = c.KVR_CLAIM_COUNT_BITS, c.KVR_CLAIM_COUNT_MAX
INT64_MAX = _status.INT64_MAX
STAMP_MAX = INT64_MAX >> CLAIM_BITS
HOLD_SLOTS = 256  # slots for which the part's lock is held at a time
_WAIT_MIN_S, WAIT_MAX_S = 10e-6, 200e-6


def _word(name: str) -> int:
    return int(getattr(c.kvr_words, name).offset) // 8


# Indexes of 8-byte words in the second page.
W_STATE, W_EPOCH, W_WRITER = _word("state"), _word("content_epoch"), _word("writer_session")
W_DIRTY, W_CLOCK = _word("dirty"), _word("clock")
W_FREE_HEAD, W_OLDEST, W_NEWEST = _word("free_head"), _word("lru_oldest"), _word("lru_newest")
W_FREE, W_WRITING = _word("free_count"), _word("writing_count")
W_SEALED, W_STALE = _word("sealed_count"), _word("stale_count")
W_STORED, W_EVICTED, W_REPLACED = _word("stored_total"), _word("evicted_total"), _word("replaced_total")
W_CLEARED, W_CORRUPT, W_FREED = _word("cleared_total"), _word("corrupt_total"), _word("freed_total")
W_ROWS, W_UNREADY, W_CAPACITY = _word("row_session"), _word("unready"), _word("capacity")
W_HEARTBEAT = _word("heartbeat")
WORDS_NBYTES = 4096

# A record after its key: generation, recency, content_epoch, data_crc, record_crc, key_nbytes, flags, owner_row, state.
_TAIL = struct.Struct("<qqIIIBBBB")
_NEW_HEAD = struct.Struct("<32sq")
_NEW_TAIL = struct.Struct("<IIIBBB")
SEAL = struct.Struct("<II")
U32 = struct.Struct("<I")
SUPERBLOCK = struct.Struct("<qII16s8qII8q88x")
RECORD_STATE = 63
# Superblock fields by name, in the order of SUPERBLOCK.
_FIELDS = [name for name, *_ in c.kvr_superblock._fields_ if name != "reserved1"]


class BrokenError(Exception):
    """A derived structure contradicts itself: the dirty word stays set, so that the next one who may rebuilds it."""


class ExpiredError(Exception):
    """The keeper emptied the part, and its lists were made anew, while a long batch let others have the lock."""


# ---- layout, superblock ----


def _pages(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


def layout_of(slot_count: int, manifest_nbytes: int) -> _api.TableLayout:
    records = c.KVR_MANIFEST_OFFSET_BYTES + _pages(manifest_nbytes)
    links = records + _pages(64 * slot_count)
    buckets = links + _pages(16 * slot_count)
    bucket_count = 1 << (max(slot_count, 16) - 1).bit_length()
    row = _pages(64 + 8 * slot_count)
    return _api.TableLayout(
        buckets + _pages(4 * bucket_count), row * c.KVR_ROW_COUNT, records, links, buckets, bucket_count, row
    )


def check_layout_range(slot_count: int, manifest_nbytes: int, call: str) -> None:
    if not 1 <= slot_count <= c.KVR_SLOT_COUNT_MAX:
        values = (slot_count, c.KVR_SLOT_COUNT_MAX)
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_SLOT_COUNT_RANGE, values, call)
    if not 0 <= manifest_nbytes <= c.KVR_MANIFEST_NBYTES_MAX:
        values = (manifest_nbytes, c.KVR_MANIFEST_NBYTES_MAX)
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_MANIFEST_NBYTES_RANGE, values, call)


def superblock_fields(
    layout: _api.TableLayout,
    part_id: bytes,
    slot_count: int,
    block_nbytes: int,
    region_count: int,
    manifest_nbytes: int,
    manifest_crc: int,
) -> dict[str, Any]:
    """What the superblock of such a part says; its own CRC is left 0."""
    fields = dict.fromkeys(_FIELDS, 0)
    fields.update(
        layout._asdict(),
        magic=c.KVR_TABLE_MAGIC,
        version=c.KVR_TABLE_VERSION,
        slot_count=slot_count,
        block_nbytes=block_nbytes,
        region_count=region_count,
        slots_per_region=-(-slot_count // region_count),
        manifest_offset_bytes=c.KVR_MANIFEST_OFFSET_BYTES,
        manifest_nbytes=manifest_nbytes,
        manifest_crc=manifest_crc,
        row_count=c.KVR_ROW_COUNT,
    )
    return {**fields, "part_id": part_id}


def superblock_crc(block: bytes) -> int:
    return crc(block[:12] + bytes(4) + block[16:])


def free_links(slot_count: int, free: Sequence[int]) -> tuple[array[int], int]:
    """Links of a part in which only the free list stands, in the order given; and its head."""
    links = array("i", [-1, -1, -1, 0]) * slot_count
    older = -1
    for slot in free:
        links[4 * slot + 1] = older
        if older >= 0:
            links[4 * older + 2] = slot
        older = slot
    return links, free[0] if free else -1


def check_superblock(memory: MappingBuffer, table_nbytes: int, claims_nbytes: int, call: str) -> dict[str, Any]:
    """Check everything that the superblock says before anything else is read by it."""
    block = memory[: SUPERBLOCK.size]
    fields = dict(zip(_FIELDS, SUPERBLOCK.unpack(block), strict=True))
    if fields["magic"] != c.KVR_TABLE_MAGIC:
        values: tuple[int, ...] = (fields["magic"], c.KVR_TABLE_MAGIC)
        raise _status.make(c.KVR_ERROR_CORRUPT, c.KVR_DETAIL_TABLE_MAGIC, values, call)
    if fields["version"] != c.KVR_TABLE_VERSION:
        values = (fields["version"], c.KVR_TABLE_VERSION)
        raise _status.make(c.KVR_ERROR_INCOMPATIBLE, c.KVR_DETAIL_TABLE_VERSION, values, call)
    computed = superblock_crc(block)
    if fields["superblock_crc"] != computed:
        values = (fields["superblock_crc"], computed)
        raise _status.make(c.KVR_ERROR_CORRUPT, c.KVR_DETAIL_TABLE_SUPERBLOCK_CRC, values, call)
    _check_geometry(fields, call)
    for found, needed in ((table_nbytes, fields["table_nbytes"]), (claims_nbytes, fields["claims_nbytes"])):
        if found < needed:
            raise _status.make(c.KVR_ERROR_CORRUPT, c.KVR_DETAIL_TABLE_NBYTES, (found, needed), call)
    start = c.KVR_MANIFEST_OFFSET_BYTES
    computed = crc(memory[start : start + fields["manifest_nbytes"]])
    if fields["manifest_crc"] != computed:
        values = (fields["manifest_crc"], computed)
        raise _status.make(c.KVR_ERROR_CORRUPT, c.KVR_DETAIL_TABLE_MANIFEST_CRC, values, call)
    return fields


def _check_geometry(fields: dict[str, Any], call: str) -> None:
    def fail(name: str, expected: int) -> None:
        values = (int(getattr(c.kvr_superblock, name).offset), fields[name], expected)
        raise _status.make(c.KVR_ERROR_CORRUPT, c.KVR_DETAIL_TABLE_GEOMETRY, values, call)

    slot_count, block_nbytes = fields["slot_count"], fields["block_nbytes"]
    for name, low, high in (
        ("slot_count", 1, c.KVR_SLOT_COUNT_MAX),
        ("block_nbytes", 1, c.KVR_NBYTES_MAX // max(slot_count, 1)),
        ("region_count", 1, min(slot_count, c.KVR_REGION_COUNT_MAX)),
        ("manifest_nbytes", 0, c.KVR_MANIFEST_NBYTES_MAX),
    ):
        if not low <= fields[name] <= high:
            fail(name, low if fields[name] < low else high)
    layout = layout_of(slot_count, fields["manifest_nbytes"])
    expected = superblock_fields(layout, b"", slot_count, block_nbytes, fields["region_count"], 0, 0)
    for name, value in expected.items():
        if name not in ("part_id", "superblock_crc", "manifest_nbytes", "manifest_crc") and fields[name] != value:
            fail(name, value)


# ---- the lock ----


class PartLock:
    """One lock memory in this process: the record lock on the first fd, under an in-process lock for its threads."""

    def __init__(self, key: tuple[int, int], fd: int) -> None:
        self.key = key
        self.fds = [fd]  # the first is used; the others wait, since closing any fd of an inode drops the record lock
        # An RLock knows its owner even if a signal handler raises right after it was acquired.
        self.mutex: Any = threading.RLock()

    def take(self, wait_ns: int, call: str) -> None:
        """Take both halves within `wait_ns`, or raise. The caller calls `drop` in any case."""
        deadline = time.monotonic_ns() + wait_ns
        wait_s = min(wait_ns / 1e9, threading.TIMEOUT_MAX)
        if not self.mutex.acquire(blocking=False) and not (wait_ns and self.mutex.acquire(timeout=wait_s)):
            raise self.timeout(wait_ns, -1, call)
        self.take_record(deadline, wait_ns, call)

    def take_record(self, deadline: int, wait_ns: int, call: str) -> None:
        pause = _WAIT_MIN_S
        while code := libc.lock_try(self.fds[0]):
            if code not in (errno.EACCES, errno.EAGAIN, errno.EINTR):
                raise _status.from_errno("fcntl", code)
            if time.monotonic_ns() >= deadline:
                raise self.timeout(wait_ns, libc.lock_holder(self.fds[0]), call)
            time.sleep(pause)
            pause = min(2 * pause, WAIT_MAX_S)

    def drop(self) -> None:
        """Drop what this thread holds; nothing if it holds nothing."""
        if self.mutex._is_owned():
            libc.lock_drop(self.fds[0])
            self.mutex.release()

    def timeout(self, wait_ns: int, holder: int, call: str) -> Exception:
        return _status.make(c.KVR_ERROR_WAIT_TIMEOUT, c.KVR_DETAIL_LOCK_TIMEOUT, (wait_ns, holder), call)


_locks: dict[tuple[int, int], PartLock] = {}
_lock_users: dict[tuple[int, int], int] = {}


def open_lock(fd: int) -> PartLock:
    """Take over `fd`. The caller holds host.lock."""
    try:
        found = os.fstat(fd)
    except OSError as error:
        raise _status.from_errno("fstat", error.errno or 0) from None
    key = (found.st_dev, found.st_ino)
    if key in _locks:
        _locks[key].fds.append(fd)
    else:
        _locks[key] = PartLock(key, fd)
    _lock_users[key] = _lock_users.get(key, 0) + 1
    return _locks[key]


def close_lock(lock: PartLock) -> None:
    _lock_users[lock.key] -= 1
    if _lock_users[lock.key]:
        return
    del _lock_users[lock.key], _locks[lock.key]
    for fd in lock.fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def lock_count() -> int:
    return len(_locks)


def lock_fds() -> int:
    return sum(len(lock.fds) for lock in _locks.values())


# ---- an open part ----


class Heart:
    """A writer's heartbeat: a thread that moves the part's word. Unlike the core's it needs the GIL."""

    def __init__(self, words: memoryview, period_ns: int) -> None:
        self._words = words
        self._period_s = period_ns / 1e9
        self._over = threading.Event()
        words[W_HEARTBEAT] = time.monotonic_ns()  # at once: the thread may begin later
        self._thread = threading.Thread(target=self._beat, name="kvreuse-heartbeat", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # no thread can be had
            words[W_HEARTBEAT] = 0
            raise

    def _beat(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not self._over.is_set():
            self._words[W_HEARTBEAT] = time.monotonic_ns()
            self._over.wait(self._period_s)

    def stop(self) -> None:
        """Wait until the thread has ended."""
        self._over.set()
        self._thread.join()


class Table:
    """An open part: its mappings, views of them, and the steps that all calls are made of."""

    sort = c.KVR_SORT_TABLE
    closing = False

    def __init__(self, memory: MappingBuffer, fields: dict[str, Any], role: int, session: int, row: int) -> None:
        self.handle = 0
        self.calls = 0  # threads inside a call
        self.operations = 0  # copies that name its slots; under host.lock
        # Slots that each operation writes into, beside the caller. Lookups need no lock.
        self.owners: dict[Any, frozenset[int]] = {}
        self.given_up: dict[int, None] = {}  # aborted while an operation writes into them; under the part's lock
        self.spoiled: dict[int, int] = {}  # by slot: the generation of which a copy failed
        self.late: list[list[int]] = []  # claims of operations that have ended, to be given back under the part's lock
        self.heart: Heart | None = None  # under host.lock
        self.memory = memory
        self.role, self.session, self.row = role, session, row
        self.wait_ns = 0
        self.lock: PartLock
        self.part_id: bytes = fields["part_id"]
        self.slot_count: int = fields["slot_count"]
        self.block_nbytes: int = fields["block_nbytes"]
        self.region_count: int = fields["region_count"]
        self.slots_per_region: int = fields["slots_per_region"]
        self.manifest_nbytes: int = fields["manifest_nbytes"]
        self.record_offset: int = fields["record_offset_bytes"]
        self.bucket_mask: int = fields["bucket_count"] - 1
        self.row_nbytes: int = fields["row_nbytes"]
        self.row_words = self.row_nbytes // 8
        self.block_type = libc.array_type(self.block_nbytes)
        self.bound: list[Mapping | None] = [None] * self.region_count
        self.buffers = [memory]
        self.views: list[memoryview] = []
        self.words = self._view(memory, WORDS_NBYTES, WORDS_NBYTES, "q")
        # One view a width over the records: words 8 a record, 32-bit fields 16, bytes 64.
        self.record_words = self._view(memory, self.record_offset, 64 * self.slot_count, "q")
        self.record_halves = self._view(memory, self.record_offset, 64 * self.slot_count, "I")
        self.record_bytes = self._view(memory, self.record_offset, 64 * self.slot_count, "B")
        # Four entries a slot: chain_next, prev, next; the hash unsigned.
        self.links = self._view(memory, fields["link_offset_bytes"], 16 * self.slot_count, "i")
        self.hashes = self._view(memory, fields["link_offset_bytes"], 16 * self.slot_count, "I")
        self.buckets = self._view(memory, fields["bucket_offset_bytes"], 4 * fields["bucket_count"], "i")
        self.claims_buffer: MappingBuffer
        self.claims: memoryview
        self.own: memoryview  # this session's row

    def _view(self, buffer: MappingBuffer, start: int, nbytes: int, kind: Literal["q", "i", "I", "B"]) -> memoryview:
        with memoryview(buffer) as whole, whole[start : start + nbytes] as piece:
            view = piece.cast(kind)
        self.views.append(view)
        return view

    def map_claims(self, claims: Region, call: str) -> None:
        """Map the rows: a keeper's are all writable, a session's only its own."""
        nbytes = self.row_nbytes * c.KVR_ROW_COUNT
        access = c.KVR_ACCESS_READ_WRITE if self.role == KEEPER else c.KVR_ACCESS_READ
        self.claims_buffer = host.map_memory(claims.fd, nbytes, access, True, call)
        self.buffers.append(self.claims_buffer)
        self.claims = self._view(self.claims_buffer, 0, nbytes, "q")
        if self.role != KEEPER:
            start = self.row * self.row_nbytes
            # Rows are multiples of 4096 bytes, the kernel's pages may be larger.
            skipped = start % host.PAGE
            offset = start - skipped
            row = host.map_memory(
                claims.fd, skipped + self.row_nbytes, c.KVR_ACCESS_READ_WRITE, True, call, offset=offset
            )
            self.buffers.append(row)
            self.own = self._view(row, skipped, self.row_nbytes, "q")

    def close_memory(self) -> None:
        for view in self.views:
            view.release()
        for buffer in self.buffers:
            # Nobody outside has a buffer of these; if a debugger does, the memory goes with it.
            with contextlib.suppress(BufferError):
                host.unmap_memory(buffer)

    # ---- reading ----

    def next_epoch(self) -> None:
        """Empty the part by one increment. Records carry the low 32 bits, of which 0 is never content."""
        following = self.words[W_EPOCH] + 1
        self.words[W_EPOCH] = following if following & LOW32 else following + 1

    def state(self, slot: int) -> int:
        return self.record_bytes[64 * slot + RECORD_STATE]

    def record(self, slot: int) -> bytes:
        start = self.record_offset + 64 * slot
        return self.memory[start : start + 64]

    def epoch(self) -> int:
        """The content epoch as records carry it."""
        return self.words[W_EPOCH] & LOW32

    def is_content(self, record: bytes, epoch: int) -> bool:
        """Whether a record is SEALED, of the epoch, and intact."""
        if record[RECORD_STATE] != SEALED:
            return False
        _, _, found, _, stored, nbytes, _, _, _ = _TAIL.unpack_from(record, 32)
        return found == epoch and epoch != 0 and 1 <= nbytes <= 32 and stored == record_crc(record)

    def look(self, key: bytes) -> tuple[int, bool]:
        """Find a key's newest block that counts, -1 if none, and whether a slot is being written under it."""
        hashed = crc(key)
        slot = self.buckets[hashed & self.bucket_mask]
        best, best_recency, is_writing = -1, 0, False
        if slot < 0:
            return -1, False
        nbytes, count, links = len(key), self.slot_count, self.links
        padded = key if nbytes == 32 else key.ljust(32, b"\0")
        epoch = self.words[W_EPOCH] & LOW32
        for _ in range(count):
            if not 0 <= slot < count:
                break
            if self.hashes[4 * slot + 3] == hashed:
                start = self.record_offset + 64 * slot
                record = self.memory[start : start + 64]
                if record.startswith(padded) and record[60] == nbytes:
                    if record[63] == WRITING:
                        is_writing = True
                    elif record[63] == SEALED:
                        _, recency, found, _, stored, _, _, _, _ = _TAIL.unpack_from(record, 32)
                        if (
                            found == epoch
                            and epoch
                            and stored == crc(record[:40] + record[48:56] + record[60:62])
                            and (best < 0 or (recency, slot) > (best_recency, best))
                        ):
                            best, best_recency = slot, recency
            slot = links[4 * slot]
        return best, is_writing

    def capacity(self) -> int:
        """So many slots may be other than FREE."""
        declared = self.words[W_CAPACITY]
        return int(declared) if 0 < declared < self.slot_count else self.slot_count

    def find(self, key: bytes) -> int:
        return self.look(key)[0]

    def rows(self) -> list[int]:
        """Where the claims of each session begin in `claims`: index of slot 0's word."""
        sessions = self.words[W_ROWS : W_ROWS + c.KVR_ROW_COUNT].tolist()
        return [i * self.row_words + 8 for i, session in enumerate(sessions) if session]

    def is_claimed(self, slot: int, rows: list[int]) -> bool:
        claims = self.claims
        return any(claims[row + slot] & CLAIM_MASK for row in rows)

    def last_stamp(self) -> int:
        """The newest stamp of anyone."""
        return max([self.words[W_CLOCK], *(self.claims[row - 8] for row in self.rows())])

    def holds_place(self) -> bool:
        """Whether this session may still write: its row, and the table if it is the writer."""
        words = self.words
        if self.role == KEEPER:
            return True
        if words[W_ROWS + self.row] != self.session:
            return False
        return self.role == READER or words[W_WRITER] == self.session

    def owner_count(self, slot: int) -> int:
        """Count the operations that write into a slot."""
        return sum(slot in slots for slots in list(self.owners.values()))

    # ---- changing derived structures; the caller holds the lock and has set dirty ----

    def _neighbour(self, value: int) -> int:
        if not -1 <= value < self.slot_count:
            raise BrokenError
        return value

    def chain_insert(self, slot: int, hashed: int) -> None:
        bucket = hashed & self.bucket_mask
        self.links[4 * slot] = self._neighbour(self.buckets[bucket])
        self.hashes[4 * slot + 3] = hashed
        self.buckets[bucket] = slot

    def chain_remove(self, slot: int) -> None:
        links = self.links
        bucket = self.hashes[4 * slot + 3] & self.bucket_mask
        before, here = -1, self.buckets[bucket]
        for _ in range(self.slot_count):
            if here == slot:
                following = self._neighbour(links[4 * slot])
                if before < 0:
                    self.buckets[bucket] = following
                else:
                    links[4 * before] = following
                return
            if not 0 <= here < self.slot_count:
                break
            before, here = here, links[4 * here]
        raise BrokenError

    def list_remove(self, slot: int, first: int, last: int) -> None:
        """Take a slot out of the recency list, or of the free list (whose end has no word: last = -1)."""
        links, words = self.links, self.words
        before, after = self._neighbour(links[4 * slot + 1]), self._neighbour(links[4 * slot + 2])
        if (links[4 * before + 2] if before >= 0 else words[first]) != slot:
            raise BrokenError
        if after >= 0 and links[4 * after + 1] != slot:
            raise BrokenError
        if before >= 0:
            links[4 * before + 2] = after
        else:
            words[first] = after
        if after >= 0:
            links[4 * after + 1] = before
        elif last >= 0:
            words[last] = before

    def recency_remove(self, slot: int) -> None:
        self.list_remove(slot, W_OLDEST, W_NEWEST)

    def recency_insert(self, slot: int, older: int) -> None:
        """Put a slot right after `older`, -1: as the oldest."""
        links, words = self.links, self.words
        newer = self._neighbour(links[4 * older + 2] if older >= 0 else words[W_OLDEST])
        links[4 * slot + 1], links[4 * slot + 2] = older, newer
        if older >= 0:
            links[4 * older + 2] = slot
        else:
            words[W_OLDEST] = slot
        if newer >= 0:
            links[4 * newer + 1] = slot
        else:
            words[W_NEWEST] = slot

    def recency_append(self, slot: int) -> None:
        self.recency_insert(slot, self._neighbour(self.words[W_NEWEST]))

    def recency_sort_in(self, slot: int, recency: int) -> None:
        """Put a slot where (recency, slot) belongs, looking from the newest; stale slots stay at the oldest end."""
        epoch = self.epoch()
        older = self._neighbour(self.words[W_NEWEST])
        for _ in range(self.slot_count):
            if (
                older < 0
                or self.record_halves[16 * older + 12] != epoch
                or (self.record_words[8 * older + 5], older) <= (recency, slot)
            ):
                return self.recency_insert(slot, older)
            older = self._neighbour(self.links[4 * older + 1])
        raise BrokenError

    def free(self, slot: int) -> None:
        """SEALED or WRITING -> FREE; the caller counts."""
        self.chain_remove(slot)
        if self.state(slot) == SEALED:
            self.recency_remove(slot)
        self.record_bytes[64 * slot + RECORD_STATE] = FREE
        head = self._neighbour(self.words[W_FREE_HEAD])
        at = 4 * slot
        self.links[at] = self.links[at + 1] = -1
        self.links[at + 2] = head
        self.hashes[at + 3] = 0
        if head >= 0:
            self.links[4 * head + 1] = slot
        self.words[W_FREE_HEAD] = slot
        self.words[W_FREE] += 1

    def free_reserved(self, slot: int) -> None:
        """WRITING -> FREE; dirty is 0 before and after, unless this fails."""
        words = self.words
        words[W_DIRTY] = 1
        self.free(slot)
        words[W_WRITING] -= 1
        words[W_DIRTY] = 0

    def fill(self, slot: int, key: bytes) -> int:
        """FREE -> WRITING under a key; return its generation."""
        if not 0 <= slot < self.slot_count or self.state(slot) != FREE:
            raise BrokenError
        self.list_remove(slot, W_FREE_HEAD, -1)
        generation = self.record_words[8 * slot + 4] + 1
        if generation > INT64_MAX:
            generation = 1
        start = self.record_offset + 64 * slot
        _NEW_HEAD.pack_into(self.memory, start, key, generation)
        _NEW_TAIL.pack_into(self.memory, start + 48, 0, 0, 0, len(key), 0, self.row)
        self.links[4 * slot + 1] = self.links[4 * slot + 2] = -1
        self.chain_insert(slot, crc(key))
        # Late: a slot that was not filled is never taken for the block that it held.
        self.record_halves[16 * slot + 12] = self.epoch()
        self.words[W_FREE] -= 1
        self.words[W_WRITING] += 1
        self.record_bytes[64 * slot + RECORD_STATE] = WRITING
        return generation

    def forget(self, slot: int) -> None:
        """Make a record never content."""
        start = self.record_offset + 64 * slot
        U32.pack_into(self.memory, start + 48, 0)
        U32.pack_into(self.memory, start + 56, record_crc(self.record(slot)))

    def rebuild(self, keep_writing: bool) -> tuple[int, int, int, int]:
        """Make index, lists and counts anew from the records; return (content, bad, WRITING freed, stale freed)."""
        words, count, epoch, rows = self.words, self.slot_count, self.epoch(), self.rows()
        words[W_DIRTY] = 1
        writing: list[int] = []
        sealed: list[tuple[bool, int, int]] = []  # stale slots come first
        free: list[int] = []
        content = bad = freed = stale_freed = 0
        states = self.record_bytes[RECORD_STATE::64].tobytes()
        for slot, state in enumerate(states):
            if state == FREE:
                free.append(slot)
            elif state == WRITING and keep_writing:
                writing.append(slot)
            elif state == SEALED:
                record = self.record(slot)
                if self.is_content(record, epoch):
                    content += 1
                    sealed.append((True, self.record_words[8 * slot + 5], slot))
                    continue
                is_bad = not 1 <= record[60] <= 32 or U32.unpack_from(record, 56)[0] != record_crc(record)
                bad += is_bad
                if self.is_claimed(slot, rows):
                    if is_bad:
                        self.forget(slot)
                    sealed.append((False, self.record_words[8 * slot + 5], slot))
                    continue
                stale_freed += not is_bad
                self._set_free(slot, free)
            else:
                freed += state == WRITING
                bad += state != WRITING
                self._set_free(slot, free)
        links, words[W_FREE_HEAD] = free_links(count, free)
        sealed.sort()
        self._index(links, [slot for _, _, slot in sealed], writing)
        words[W_OLDEST], words[W_NEWEST] = (sealed[0][2], sealed[-1][2]) if sealed else (-1, -1)
        words[W_FREE], words[W_WRITING] = len(free), len(writing)
        words[W_SEALED], words[W_STALE] = content, len(sealed) - content
        words[W_CORRUPT] += bad
        words[W_DIRTY] = 0
        return content, bad, freed, stale_freed

    def _set_free(self, slot: int, free: list[int]) -> None:
        self.record_bytes[64 * slot + RECORD_STATE] = FREE
        free.append(slot)

    def _index(self, links: array[int], sealed: list[int], writing: list[int]) -> None:
        """Fill in chains and the recency list, and store it all."""
        hashes = memoryview(links).cast("B").cast("I")
        buckets = array("i", [-1]) * (self.bucket_mask + 1)
        older = -1
        for slot in sealed:
            links[4 * slot + 1] = older
            if older >= 0:
                links[4 * older + 2] = slot
            older = slot
        for slot in (*sealed, *writing):
            record = self.record(slot)
            hashed = crc(record[: min(record[60], 32)])
            links[4 * slot] = buckets[hashed & self.bucket_mask]
            hashes[4 * slot + 3] = hashed
            buckets[hashed & self.bucket_mask] = slot
        self.links[:] = memoryview(links)
        self.buckets[:] = memoryview(buckets)

    # ---- what slots hold ----

    def check_bound(self, slots: Iterable[int], call: str) -> None:
        for slot in slots:
            if self.bound[slot // self.slots_per_region] is None:
                raise _status.make(c.KVR_ERROR_NOT_READY, c.KVR_DETAIL_DATA_NOT_BOUND, (slot,), call)

    def data_crcs(self, slots: Sequence[int], call: str) -> list[int]:
        """Compute the CRCs of slots' bytes; their mappings stay while it runs."""
        with host.lock:
            self.check_bound(slots, call)
            pinned = {index: self.bound[index] for index in {slot // self.slots_per_region for slot in slots}}
            mappings = [mapping for mapping in pinned.values() if mapping is not None]
            for mapping in mappings:
                mapping.holds += 1
        try:
            found = []
            for slot in slots:
                index, place = divmod(slot, self.slots_per_region)
                address = pinned[index].address + place * self.block_nbytes  # type: ignore[union-attr]
                found.append(crc(self.block_type.from_address(address)))
            return found
        finally:
            with host.lock:
                for mapping in mappings:
                    mapping.holds -= 1


def record_crc(record: bytes) -> int:
    return crc(record[:40] + record[48:56] + record[60:62])


# ---- a call ----


class Call:
    """One call on an open part: it keeps the table open, takes the lock if asked to, and gives both back at its end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.table: Table | None = None
        self.may_hold = False

    def enter(self, handle: int) -> Table:
        with host.lock:
            table = host.find(handle, Table, self.name)
            host.check_fork(self.name)
            table.calls += 1
            self.table = table
        return table

    def leave(self) -> None:
        """Give back; again does nothing."""
        table = self.table
        if table is None:
            return
        if self.may_hold:
            table.lock.drop()
        with host.lock:
            if self.table is not None:
                self.table = None
                table.calls -= 1

    def error(self, status: int, detail: int, *values: int) -> Exception:
        return _status.make(status, detail, values, self.name)

    def require(self, table: Table, *roles: int) -> None:
        """Refuse a session of another role; the first one is named as needed."""
        if table.role not in roles:
            raise self.error(c.KVR_ERROR_PERMISSION_DENIED, c.KVR_DETAIL_ROLE_FORBIDS, table.role, roles[0])

    def require_flags(self, flags: int, known: int) -> None:
        if flags & ~known:
            raise self.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_FLAGS_UNKNOWN, flags, known)

    def require_slots(
        self, table: Table, slots: Sequence[int], allow_none: bool = False, end: int | None = None
    ) -> None:
        count, end = len(slots), table.slot_count if end is None else end
        if count > c.KVR_BATCH_COUNT_MAX:
            raise self.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_COUNT_RANGE, count, c.KVR_BATCH_COUNT_MAX)
        low = -1 if allow_none else 0
        for i, slot in enumerate(slots):
            if not low <= slot < end:
                raise self.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_SLOT_RANGE, i, slot, end)

    # ---- the lock ----

    def take(self, table: Table, check: bool = True, repair: bool = True) -> None:
        """Take the part's lock; then, if asked, see that the session holds its place, and repair or report damage."""
        if table.lock.mutex._is_owned():
            # A signal handler or a finalizer runs inside of another call of this thread.
            raise table.lock.timeout(table.wait_ns, -1, self.name)
        self.may_hold = True
        table.lock.take(table.wait_ns, self.name)
        self._check(table, check, repair)
        if check and repair and (table.given_up or table.late):
            self._settle(table)

    def breathe(self, table: Table, dirty: bool = False) -> bool:
        """Let others have the lock for a moment, in the midst of a batch; return whether the part was emptied in it."""
        epoch = table.words[W_EPOCH]
        if dirty:
            table.words[W_DIRTY] = 0
        libc.lock_drop(table.lock.fds[0])
        time.sleep(WAIT_MAX_S)  # who waits looks as often
        table.lock.take_record(time.monotonic_ns() + table.wait_ns, table.wait_ns, self.name)
        self._check(table, True, True)
        if dirty:
            table.words[W_DIRTY] = 1
        return bool(table.words[W_EPOCH] != epoch)

    def walk_on(self, table: Table, dirty: bool = False) -> None:
        """The same where a list is walked, or was planned with: it must still be the same one afterwards."""
        if self.breathe(table, dirty):
            raise ExpiredError

    def breathe_row(self, table: Table) -> None:
        """The same for a session that may be fenced, and changes its own row only."""
        libc.lock_drop(table.lock.fds[0])
        time.sleep(WAIT_MAX_S)
        table.lock.take_record(time.monotonic_ns() + table.wait_ns, table.wait_ns, self.name)

    def give_back(self, table: Table) -> None:
        """Give back the claims of operations that have ended."""
        done = 0
        while table.late:
            slots = table.late[0]
            while slots:
                if done and not done % HOLD_SLOTS:
                    self.breathe_row(table)
                done += 1
                slot = slots[-1]
                # Else the row was zeroed, and may be another's.
                if table.words[W_ROWS + table.row] == table.session and table.own[8 + slot] & CLAIM_MASK:
                    table.own[8 + slot] -= 1
                del slots[-1]
            del table.late[0]

    def _settle(self, table: Table) -> None:
        """Do what was left to do when operations ended and the lock could not be had."""
        self.give_back(table)
        for done, slot in enumerate(list(table.given_up)):
            if done and not done % HOLD_SLOTS:
                self.breathe(table)
            if not table.owner_count(slot):
                if table.state(slot) == WRITING:
                    table.free_reserved(slot)
                del table.given_up[slot]

    def _check(self, table: Table, check: bool, repair: bool) -> None:
        words = table.words
        if check and table.role != KEEPER:
            if words[W_STATE] == c.KVR_PART_RETIRED:
                raise self.error(c.KVR_ERROR_STALE_EPOCH, c.KVR_DETAIL_PART_RETIRED, words[W_STATE])
            holders = [words[W_WRITER]] if table.role == WRITER else []
            for holder in (*holders, words[W_ROWS + table.row]):
                if holder != table.session:
                    raise self.error(c.KVR_ERROR_STALE_EPOCH, c.KVR_DETAIL_SESSION_FENCED, table.session, holder)
            if table.role == READER and words[W_UNREADY]:
                raise self.error(c.KVR_ERROR_NOT_READY, c.KVR_DETAIL_PART_UNREADY)
        if repair and words[W_DIRTY]:
            if table.role == READER:
                raise self.error(c.KVR_ERROR_NOT_READY, c.KVR_DETAIL_PART_DIRTY)
            table.rebuild(keep_writing=True)


def run(name: str, handle: int, body: Callable[..., Any], *arguments: Any) -> Any:
    """Run one call's body; whatever happens in it, or raises out of a signal handler, its lock is given back."""
    call = Call(name)
    try:
        return body(call, call.enter(handle), *arguments)
    except BrokenError:
        raise call.error(c.KVR_ERROR_NOT_READY, c.KVR_DETAIL_PART_DIRTY) from None
    finally:
        try:
            call.leave()
        finally:
            call.leave()  # a signal handler may have raised inside of the first


class Keys:
    """A batch of keys as given: converted, its lengths checked unless the stride is impossible."""

    def __init__(self, keys: Any, key_stride: Any, key_nbytes: Any) -> None:
        self.data = bytes_view(keys, "keys")
        self.stride = _status.as_integer(key_stride, "key_stride")
        self.nbytes = None if key_nbytes is None else bytes_view(key_nbytes, "key_nbytes")
        self.is_possible = 1 <= self.stride <= c.KVR_KEY_NBYTES
        self.count = 0

    def check_length(self) -> bool:
        """Check the buffers' lengths; False if the stride is impossible, which `unpack` reports."""
        if not self.is_possible:
            return False
        self.count = self.data.nbytes // self.stride if self.nbytes is None else self.nbytes.nbytes
        check_length("keys", self.data.nbytes, self.count * self.stride, "bytes")
        return True

    def unpack(self, call: Call) -> list[bytes]:
        if not self.is_possible:
            raise call.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_KEY_STRIDE, self.stride, c.KVR_KEY_NBYTES)
        if self.count > c.KVR_BATCH_COUNT_MAX:
            raise call.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_COUNT_RANGE, self.count, c.KVR_BATCH_COUNT_MAX)
        stride, data = self.stride, self.data.tobytes()
        starts = range(0, len(data), stride)
        if self.nbytes is None:
            return [data[start : start + stride] for start in starts]
        sizes = self.nbytes.tobytes()
        for i, size in enumerate(sizes):
            if not 1 <= size <= stride:
                raise call.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_KEY_NBYTES, i, size, stride)
        return [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]
