"""A part's memory as a keeper would make it, and sessions on it, for the contract tests.

Made by system calls of Python's own and not by a backend, so that both can be pointed at the same bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.util
import os
import re
import struct
from array import array
from typing import Any, NamedTuple

from kvreuse import _status, errors

PAGE = os.sysconf("SC_PAGESIZE")
WORDS, RECORD_NBYTES, LINK_NBYTES = 4096, 64, 16
READER, WRITER, KEEPER = 1, 2, 3
CREATING, LAYOUT_SEALED, RETIRED = 0, 1, 2
EVICT, DUPLICATE, CHECKSUM = 1, 2, 1
NONE, POSIX_FD, FABRIC = 0, 1, 8
READ, READ_WRITE = 1, 3
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
PART_ID = bytes(range(16))

# Offsets in kvr_words that tests write to or read.
STATE, CONTENT_EPOCH, WRITER_SESSION, DIRTY, CLOCK = 0, 64, 128, 192, 320
HEARTBEAT = 384


def backend_names() -> list[str]:
    """The backends of this build. A missing extension is an error unless the run was told that there is none."""
    pure = os.environ.get("KVREUSE_TEST_PURE") == "1" and importlib.util.find_spec("kvreuse._core") is None
    return ["_fallback"] if pure else ["_core", "_fallback"]


def backend_modules() -> list[Any]:
    return [importlib.import_module(f"kvreuse.{name}") for name in backend_names()]


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def memfd(name: str, nbytes: int, seals: int = SEALS) -> int:
    fd = os.memfd_create(f"kvreuse-test-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def read_only(fd: int) -> int:
    """A second fd of the same memory, open for reading only."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def is_detail(error: BaseException, status: int, detail: int, values: tuple[int, ...] | None = None) -> bool:
    """Whether an exception is the one of (status, detail), with these values where given."""
    if type(error) is not _status.STATUS[status][1] or getattr(error, "status", None) != status:
        return False
    if values is not None:
        return str(error) == str(_status.make(status, detail, values, call=error.call))
    pattern = ".*?".join(re.escape(text) for text in re.split(r"\{\w+\}", _status.DETAILS[detail]))
    return re.match(pattern, str(error)) is not None


@contextlib.contextmanager
def fails(status: int, detail: int, *values: int, call: str | None = None):
    """The block must raise the error of (status, detail); values are compared where given, `call` too."""
    caught = None
    try:
        yield
    except errors.KVReuseError as error:
        caught = error
    assert caught is not None, f"nothing was raised; expected {status}, {_status.DETAILS[detail]}"
    want = _status.make(status, detail, values, call=caught.call) if values else _status.DETAILS[detail]
    found = f"{type(caught).__name__}({caught.status}): {caught}"
    assert is_detail(caught, status, detail, values or None), f"found {found}; expected {status}, {want}"
    assert caught.name == _status.STATUS[status][0]
    if call is not None:
        assert caught.call == call


class Packed(NamedTuple):
    keys: bytes
    stride: int
    nbytes: bytes | None


def pack(keys: list[bytes]) -> Packed:
    """Keys in the form that the backends take: padded to one stride, lengths beside them where they differ."""
    stride = max(map(len, keys), default=1)
    if all(len(key) == stride for key in keys):
        return Packed(b"".join(keys), stride, None)
    return Packed(b"".join(key.ljust(stride, b"\0") for key in keys), stride, bytes(map(len, keys)))


class Reserved(NamedTuple):
    slots: list[int]
    generations: list[int]
    evicted: list[bytes]


def longs(values) -> array:
    return array("q", values)


class Session:
    """One open table, with calls over lists. Closing closes only what `open` made."""

    def __init__(self, backend: Any, table: int, mappings: list[int], regions: list[int], row: int) -> None:
        self.backend, self.table, self.row = backend, table, row
        self._mappings, self._regions = mappings, regions

    def close(self) -> None:
        self.backend.table_close(self.table)
        for mapping in self._mappings:
            self.backend.mapping_unmap(mapping)
        for region in self._regions:
            self.backend.region_close(region)

    def match(self, keys):
        return self.backend.table_match(self.table, *pack(keys))

    def lookup(self, keys):
        slots, generations = longs([7] * len(keys)), longs([7] * len(keys))
        self.backend.table_lookup(self.table, *pack(keys), slots, generations)
        return list(slots), list(generations)

    def claim(self, keys):
        slots, generations = longs([0] * len(keys)), longs([0] * len(keys))
        n = self.backend.table_claim(self.table, *pack(keys), slots, generations)
        return list(slots[:n]), list(generations[:n])

    def claim_slots(self, slots, generations):
        return self.backend.table_claim_slots(self.table, longs(slots), longs(generations))

    def release(self, slots):
        return self.backend.table_release(self.table, longs(slots))

    def touch(self, keys):
        return self.backend.table_touch(self.table, *pack(keys))

    def reserve(self, keys, flags=0, named=None) -> Reserved:
        n = len(keys)
        slots, generations, evicted, lengths = longs([0] * n), longs([0] * n), bytearray(32 * n), bytearray(n)
        named = None if named is None else longs(named)
        count = self.backend.table_reserve(self.table, *pack(keys), named, flags, slots, generations, evicted, lengths)
        gone = [bytes(evicted[32 * i : 32 * i + lengths[i]]) for i in range(count)]
        for i in range(count):
            assert not any(evicted[32 * i + lengths[i] : 32 * i + 32]), "an evicted key is not padded with zeros"
        return Reserved(list(slots), list(generations), gone)

    def commit(self, reserved, flags=0):
        slots, generations = reserved[:2]
        return self.backend.table_commit(self.table, longs(slots), longs(generations), flags)

    def abort(self, reserved):
        slots, generations = reserved[:2]
        return self.backend.table_abort(self.table, longs(slots), longs(generations))

    def store(self, keys, flags=0, checksum=0) -> Reserved:
        reserved = self.reserve(keys, flags)
        self.commit(reserved, checksum)
        return reserved

    def evict(self, count, keep=()):
        return self.backend.table_evict(self.table, count, *pack(list(keep)))

    def clear(self):
        return self.backend.table_clear(self.table)

    def invalidate(self, slots, generations):
        return self.backend.table_invalidate(self.table, longs(slots), longs(generations))

    def verify(self, slots):
        verdicts = bytearray(b"\x77" * len(slots))
        self.backend.table_verify(self.table, longs(slots), verdicts)
        return list(verdicts)

    def page(self, first, capacity):
        slots, generations = longs([0] * capacity), longs([0] * capacity)
        keys, lengths = bytearray(32 * capacity), bytearray(capacity)
        count, following = self.backend.table_inventory(self.table, first, slots, generations, keys, lengths)
        rows = [(slots[i], generations[i], bytes(keys[32 * i : 32 * i + lengths[i]])) for i in range(count)]
        return rows, following

    def inventory(self, capacity=1000):
        rows, first = [], 0
        while first != -1:
            page, following = self.page(first, capacity)
            assert following == -1 or following > first, "the inventory does not go on"
            rows += page
            first = following
        return rows

    def stats(self):
        return self.backend.table_stats(self.table)

    def info(self):
        return self.backend.table_info(self.table)

    def restore(self):
        return self.backend.table_restore(self.table)


class PartMemory:
    """The fds of one part. A context manager; `open` may be called with any backend."""

    def __init__(
        self, backend: Any, slot_count=8, block_nbytes=64, region_count=1, manifest=b"manifest", state=LAYOUT_SEALED
    ) -> None:
        self.layout = backend.table_layout(slot_count, len(manifest))
        self.slot_count, self.block_nbytes, self.region_count = slot_count, block_nbytes, region_count
        self.slots_per_region = -(-slot_count // region_count)
        self._sessions: list[Session] = []
        self.fds = {
            "table": memfd("table", self.layout.table_nbytes),
            "claims": memfd("claims", self.layout.claims_nbytes),
            "lock": memfd("lock", PAGE),
        }
        for i in range(region_count):
            self.fds[f"data{i}"] = memfd(f"data{i}", pages(self.slots_per_region * block_nbytes))
        table, claims = (self.import_(backend, name) for name in ("table", "claims"))
        backend.table_create(table, claims, PART_ID, slot_count, block_nbytes, region_count, manifest)
        for region in (table, claims):
            backend.region_close(region)
        self.word(STATE, state)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for session in self._sessions:
            with contextlib.suppress(errors.StaleHandleError, errors.InvalidHandleError):
                session.close()
        for fd in self.fds.values():
            os.close(fd)
        self.fds = {}

    def import_(self, backend: Any, name: str, fd: int | None = None) -> int:
        fd = self.fds[name] if fd is None else fd
        nbytes = os.fstat(fd).st_size
        return backend.region_import(fd, nbytes, nbytes, bytes(16), 0, 0, 0).handle

    def open(
        self, backend, role=WRITER, session=1, row=0, *, admit=True, lock_wait_ns=0, bind=True, fd=None
    ) -> Session:
        """Open a session; it is admitted first, by words written from outside, unless `admit` is false."""
        if role == KEEPER:
            session, row = 0, -1
        elif admit:
            self.admit(row, session, role)
        regions, mappings, lock = [], [], -1
        try:
            if role == READER:
                reading = read_only(self.fds["table"])
                try:
                    regions.append(self.import_(backend, "table", reading))
                finally:
                    os.close(reading)
            else:
                regions.append(self.import_(backend, "table"))
            regions.append(self.import_(backend, "claims"))
            lock = fcntl.fcntl(self.fds["lock"] if fd is None else fd, fcntl.F_DUPFD_CLOEXEC, 3)
            table = backend.table_open(regions[0], regions[1], lock, role, session, row, lock_wait_ns)
        except BaseException:
            if lock != -1:
                os.close(lock)
            for region in regions:
                backend.region_close(region)
            raise
        if bind:
            for i in range(self.region_count):
                region = self.import_(backend, f"data{i}")
                mapping = backend.region_map(region, READ if role == READER else READ_WRITE, 1).handle
                regions.append(region)
                mappings.append(mapping)
                backend.table_bind(table, i, mapping)
        opened = Session(backend, table, mappings, regions, row)
        self._sessions.append(opened)
        return opened

    def admit(self, row: int, session: int, role: int) -> None:
        self.write("claims", row * self.layout.row_nbytes, bytes(self.layout.row_nbytes))
        self.word(1024 + 8 * row, session)
        if role == WRITER:
            self.word(WRITER_SESSION, session)

    # ---- bytes ----

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        return os.pread(self.fds[name], nbytes, offset)

    def write(self, name: str, offset: int, data: bytes) -> None:
        assert os.pwrite(self.fds[name], data, offset) == len(data)

    def word(self, offset: int, value: int | None = None) -> int:
        """Read a word of kvr_words, or write it."""
        if value is not None:
            self.write("table", WORDS + offset, struct.pack("<q", value))
        return struct.unpack("<q", self.read("table", WORDS + offset, 8))[0]

    def record_offset(self, slot: int) -> int:
        return self.layout.record_offset_bytes + RECORD_NBYTES * slot

    def flip(self, name: str, offset: int, bits: int = 0x01) -> None:
        self.write(name, offset, bytes([self.read(name, offset, 1)[0] ^ bits]))

    def data(self, slot: int, content: bytes | None = None) -> bytes:
        """Read a slot's bytes, or write them."""
        name = f"data{slot // self.slots_per_region}"
        offset = slot % self.slots_per_region * self.block_nbytes
        if content is not None:
            self.write(name, offset, content.ljust(self.block_nbytes, b"\0"))
        return self.read(name, offset, self.block_nbytes)

    def image(self) -> dict[str, bytes]:
        """Everything that both backends must leave equal: not the heartbeat, which is a time."""
        table = bytearray(self.read("table", 0, self.layout.table_nbytes))
        table[WORDS + HEARTBEAT : WORDS + HEARTBEAT + 8] = bytes(8)
        table = bytes(table)
        layout = self.layout
        return {
            "superblock": table[:WORDS],
            "words": table[WORDS : 2 * WORDS],
            "manifest": table[2 * WORDS : layout.record_offset_bytes],
            "records": table[layout.record_offset_bytes : layout.link_offset_bytes],
            "links": table[layout.link_offset_bytes : layout.bucket_offset_bytes],
            "buckets": table[layout.bucket_offset_bytes :],
            "claims": self.read("claims", 0, layout.claims_nbytes),
        }


def difference(a: dict[str, bytes], b: dict[str, bytes]) -> list[str]:
    """Where two images differ, in words: at most a few places a part."""
    found = []
    for name in a:
        places = [i for i, (x, y) in enumerate(zip(a[name], b[name], strict=True)) if x != y]
        unit = {"records": RECORD_NBYTES, "links": LINK_NBYTES, "buckets": 4}.get(name, 8)
        for i in sorted({place // unit for place in places})[:4]:
            found.append(
                f"{name}[{i}]: {a[name][i * unit : (i + 1) * unit].hex()} {b[name][i * unit : (i + 1) * unit].hex()}"
            )
    return found
