"""The part's table: each function's meaning, errors and order of checks, on both backends; damage, locks, fences."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
import warnings
from array import array
from pathlib import Path

import numpy as np
import pytest
from part_memory import (
    CHECKSUM,
    CONTENT_EPOCH,
    CREATING,
    DIRTY,
    DUPLICATE,
    EVICT,
    KEEPER,
    LAYOUT_SEALED,
    PAGE,
    PART_ID,
    READ,
    READER,
    RETIRED,
    WRITER,
    WRITER_SESSION,
    PartMemory,
    backend_modules,
    fails,
    is_detail,
    longs,
    pack,
    read_only,
)

from kvreuse import errors

pytestmark = pytest.mark.usefixtures("no_leaks")

A, B, C, D, E, F, G, H = (bytes([letter]) * 32 for letter in b"ABCDEFGH")
KEYS = [A, B, C, D, E, F, G, H]


@pytest.fixture
def part(backend):
    """A part of 8 slots of 64 bytes in 2 data regions."""
    with PartMemory(backend, region_count=2) as memory:
        yield memory


@pytest.fixture
def writer(backend, part):
    return part.open(backend)


@pytest.fixture
def reader(backend, part, writer):
    return part.open(backend, READER, session=2, row=1)


# ---- layout, create ----


@pytest.mark.parametrize("slot_count", [1, 15, 16, 17, 504, 505, 1024, 1025, 30_000, 2**30])
@pytest.mark.parametrize("manifest_nbytes", [0, 1, 4096, 4097, 1_048_576])
def test_layout(backend, slot_count, manifest_nbytes):
    """The header's rule: 4096-aligned, in the order manifest, records, links, buckets; buckets a power of two."""
    layout = backend.table_layout(slot_count, manifest_nbytes)
    buckets = 1 << max(4, (slot_count - 1).bit_length())
    records = 8192 + -(-manifest_nbytes // 4096) * 4096
    links = records + -(-64 * slot_count // 4096) * 4096
    chains = links + -(-16 * slot_count // 4096) * 4096
    row = -(-(64 + 8 * slot_count) // 4096) * 4096
    assert tuple(layout) == (chains + -(-4 * buckets // 4096) * 4096, 64 * row, records, links, chains, buckets, row)


def test_layout_out_of_range(backend):
    """H7"""
    for slot_count in (0, -1, 2**30 + 1, 2**63 - 1):
        with fails(-6, 24, slot_count, 2**30, call="table_layout"):
            backend.table_layout(slot_count, 0)
    for nbytes in (-1, 1_048_577):
        with fails(-6, 27, nbytes, 1_048_576, call="table_layout"):
            backend.table_layout(1, nbytes)


def test_a_fresh_part_has_the_bytes_of_the_header(backend):
    """H1: the superblock, the words, the records and the index as include/kvreuse.h says, read from outside."""
    manifest = b"m" * 5000
    with PartMemory(backend, 5, 100, 2, manifest, state=CREATING) as part:
        image, layout = part.image(), part.layout
    fields = struct.unpack_from("<8sII16s8qII7q", image["superblock"])
    assert fields[0] == b"KVREUSE1"
    assert fields[1] == 1
    covered = image["superblock"][:12] + bytes(4) + image["superblock"][16:256]
    assert fields[2] == backend.crc32c(covered)
    assert fields[3] == PART_ID
    assert fields[4:12] == (layout.table_nbytes, layout.claims_nbytes, 5, 100, 2, 3, 8192, 5000)
    assert fields[12:14] == (backend.crc32c(manifest), 0)
    assert fields[14:] == (
        layout.record_offset_bytes,
        layout.link_offset_bytes,
        layout.bucket_offset_bytes,
        layout.bucket_count,
        layout.row_nbytes,
        64,
        0,
    )
    assert not any(image["superblock"][152:])
    assert image["manifest"] == manifest.ljust(8192, b"\0")
    words = struct.unpack("<512q", image["words"])
    found = {8 * i: value for i, value in enumerate(words) if value}
    assert found == {CONTENT_EPOCH: 1, 456: -1, 464: -1, 472: 5}
    assert not any(image["records"])
    links = [struct.unpack_from("<iiiI", image["links"], 16 * i) for i in range(5)]
    assert links == [(-1, i - 1, i + 1 if i < 4 else -1, 0) for i in range(5)]
    assert image["buckets"][: 4 * layout.bucket_count] == b"\xff" * 4 * layout.bucket_count
    assert not any(image["claims"])


@pytest.mark.parametrize(
    ("slot_count", "block_nbytes", "region_count", "detail", "values"),
    [
        (0, 64, 1, 24, (0, 2**30)),
        (-1, 64, 1, 24, (-1, 2**30)),
        (8, 0, 1, 25, (0, 0x3FFFFFFFFFFFFFFF)),
        (8, -1, 1, 25, (-1, 0x3FFFFFFFFFFFFFFF)),
        (8, 64, 0, 26, (0, 8)),
        (8, 64, 9, 26, (9, 8)),
        (8, 0x3FFFFFFFFFFFFFFF, 1, 60, (8,)),
        (3, 0x3FFFFFFFFFFFFFFF // 2, 1, 60, (3,)),
    ],
)
def test_geometry_out_of_range_is_refused(backend, part, slot_count, block_nbytes, region_count, detail, values):
    """H7: products are checked too."""
    table, claims = part.import_(backend, "table"), part.import_(backend, "claims")
    with fails(-6, detail, *values, call="table_create"):
        backend.table_create(table, claims, PART_ID, slot_count, block_nbytes, region_count, b"")
    for region in (table, claims):
        backend.region_close(region)


def test_create_needs_room_and_fresh_memory(backend, part):
    """A table or claims memory that is too small, and one that holds a part already."""
    table, claims, lock = (part.import_(backend, name) for name in ("table", "claims", "lock"))
    layout = backend.table_layout(8, 0)
    with fails(-5, 28, PAGE, layout.table_nbytes):
        backend.table_create(lock, claims, PART_ID, 8, 64, 1, b"")
    with fails(-5, 28, PAGE, layout.claims_nbytes):
        backend.table_create(table, lock, PART_ID, 8, 64, 1, b"")
    before = part.image()
    with fails(-12, 59, LAYOUT_SEALED):
        backend.table_create(table, claims, PART_ID, 8, 64, 1, b"")
    assert part.image() == before
    for region in (table, claims, lock):
        backend.region_close(region)


def test_a_part_of_the_state_creating_is_only_the_keepers(backend):
    """R1: without a sealed layout nobody but the keeper opens it."""
    with PartMemory(backend, state=CREATING) as part:
        for role in (WRITER, READER):
            with fails(-14, 40, CREATING, call="table_open"):
                part.open(backend, role)
        keeper = part.open(backend, KEEPER)
        assert keeper.stats().state == CREATING
        backend.table_set_state(keeper.table, LAYOUT_SEALED)
        part.open(backend)
        backend.table_set_state(keeper.table, RETIRED)
        for role in (WRITER, READER):
            with fails(-18, 39, RETIRED, call="table_open"):
                part.open(backend, role)
        assert part.open(backend, KEEPER).stats().state == RETIRED


# ---- open ----


def test_info_and_manifest(backend):
    with PartMemory(backend, 5, 100, 2, b"m" * 5000) as part:
        opened = part.open(backend, READER, session=77, row=63)
        assert tuple(opened.info()) == (PART_ID, 5, 100, 2, 3, 5000, 77, READER, 63, 0, 1, 0, 5)
        assert backend.table_manifest(opened.table) == b"m" * 5000
        keeper = part.open(backend, KEEPER)
        assert keeper.info()[-7:] == (0, KEEPER, -1, 0, 1, 0, 5)
    with PartMemory(backend, 1, 1, 1, b"") as part:
        assert backend.table_manifest(part.open(backend).table) == b""


@pytest.mark.parametrize("role", [WRITER, READER, KEEPER])
def test_wrong_magic(backend, part, role):
    """R2: other bytes than a part's are CorruptError."""
    part.write("table", 0, b"XXXXXXXX")
    with fails(-20, 29, int.from_bytes(b"XXXXXXXX", "little"), 0x314553554552564B, call="table_open"):
        part.open(backend, role)


@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
def test_another_version_is_read_before_anything_else(backend, part, version):
    """C3: random bytes after the version are never parsed."""
    part.write("table", 8, struct.pack("<I", version) + random.Random(1).randbytes(4096 - 12))
    with fails(-15, 30, version, 1, call="table_open"):
        part.open(backend)
    with pytest.raises(errors.IncompatibleError) as caught:
        part.open(backend)
    assert caught.value.fields == {"version": (1, version)}


def test_every_checksummed_byte_of_the_superblock(backend, part):
    """A1 d: a flip anywhere in the 256 bytes is refused, and undone it is accepted again."""
    for offset in range(256):
        part.flip("table", offset, 1 << offset % 8)
        with pytest.raises((errors.CorruptError, errors.IncompatibleError)) as caught:
            part.open(backend)
        expected = errors.IncompatibleError if 8 <= offset < 12 else errors.CorruptError
        assert type(caught.value) is expected, offset
        assert ("CRC" in str(caught.value)) == (offset >= 12), (offset, str(caught.value))
        part.flip("table", offset, 1 << offset % 8)
    part.open(backend)


def _reseal_superblock(backend, part) -> None:
    covered = part.read("table", 0, 12) + bytes(4) + part.read("table", 16, 240)
    part.write("table", 12, struct.pack("<I", backend.crc32c(covered)))


@pytest.mark.parametrize(
    "offset", [32, 40, 48, 56, 64, 72, 80, 88, 104, 112, 120, 128, 136, 144], ids=lambda offset: f"byte{offset}"
)
@pytest.mark.parametrize("value", [0, -1, 2**62, "+1"])
def test_geometry_is_checked_although_the_crc_is_right(backend, part, offset, value):
    """H7: a superblock whose numbers do not fit together cannot make anyone read outside of the memory."""
    old = struct.unpack("<q", part.read("table", offset, 8))[0]
    new = old + 1 if value == "+1" else value
    part.write("table", offset, struct.pack("<q", new))
    _reseal_superblock(backend, part)
    if (offset, value) == (56, "+1"):
        return  # no contradiction: any block size is possible
    with pytest.raises(errors.CorruptError):
        part.open(backend)


def test_memory_smaller_than_the_superblock_says(backend):
    """H4: the table and the claims memory are measured, not believed."""
    with PartMemory(backend, slot_count=2000) as big, PartMemory(backend, slot_count=8) as small:
        head = big.read("table", 0, small.layout.table_nbytes)
        small.write("table", 0, head)
        with fails(-20, 28, small.layout.table_nbytes, big.layout.table_nbytes, call="table_open"):
            small.open(backend)
        big.fds["claims"], kept = small.fds["claims"], big.fds["claims"]
        try:
            with fails(-20, 28, small.layout.claims_nbytes, big.layout.claims_nbytes, call="table_open"):
                big.open(backend, admit=False)
        finally:
            big.fds["claims"] = kept


def test_damaged_manifest(backend, part):
    part.flip("table", 8192)
    with fails(-20, 33, call="table_open"):
        part.open(backend)


def test_arguments_of_open(backend, part):
    """Each wrong argument hides those that are checked later."""
    table, claims = part.import_(backend, "table"), part.import_(backend, "claims")
    lock = part.fds["lock"]

    def call(role=WRITER, session=1, row=0, fd=lock, wait=0):
        return backend.table_open(table, claims, fd, role, session, row, wait)

    for role in (0, 4, -1):
        with fails(-6, 34, role, call="table_open"):
            call(role, 0, -2, -1, -1)
    for role, session in ((WRITER, 0), (READER, -1), (KEEPER, 1)):
        with fails(-6, 37, session, call="table_open"):
            call(role, session, -2, -1, -1)
    for role, session, row in ((WRITER, 1, 64), (READER, 1, -1), (KEEPER, 0, 0)):
        with fails(-6, 36, row, 64, call="table_open"):
            call(role, session, row, -1, -1)
    with fails(-6, 20, -1, call="table_open"):
        call(fd=-1, wait=-1)
    with fails(-6, 2, -1, 2**63 - 1, call="table_open"):
        call(wait=-1)
    reading = read_only(part.fds["table"])
    read = part.import_(backend, "table", reading)
    os.close(reading)
    for role, session, row in ((WRITER, 1, 0), (KEEPER, 0, -1)):
        with fails(-8, 11, read, call="table_open"):
            backend.table_open(read, claims, lock, role, session, row, 0)
    with pytest.raises(errors.InvalidHandleError):
        backend.table_open(0, claims, lock, 9, 1, 0, 0)
    for region in (table, claims, read):
        backend.region_close(region)
    with fails(-2, 5, table, call="table_open"):
        call()


def test_a_failed_open_leaves_nothing_and_takes_no_fd(backend, part):
    """H6: the lock fd is still the caller's."""
    before = backend.handle_counts()
    part.flip("table", 20)
    with pytest.raises(errors.CorruptError):
        part.open(backend)
    assert backend.handle_counts() == before


def test_regions_may_be_closed_while_the_table_is_open(backend, part, writer):
    """O2: the table owns its mappings."""
    for region in writer._regions[:2]:
        backend.region_close(region)
    del writer._regions[:2]
    writer.store([A])
    assert writer.match([A]) == 1


def _table_mappings() -> dict[str, list[tuple[set[str], str]]]:
    """VmFlags and permissions of this process' mappings of test memfds, by their names."""
    found: dict[str, list[tuple[set[str], str]]] = {}
    current = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            name = fields[5] if len(fields) > 5 else ""
            current = (name.partition("memfd:kvreuse-test-")[2], fields[1]) if "memfd:kvreuse-test-" in name else None
        elif fields[0] == "VmFlags:" and current:
            found.setdefault(current[0], []).append((set(fields[1:]), current[1]))
    return found


@pytest.mark.parametrize("role", [WRITER, READER, KEEPER])
def test_no_mapping_of_a_part_reaches_a_forked_child(backend, part, role):
    """R6: MADV_DONTFORK ("dc") on every mapping, data that was mapped with KVR_MAP_DONTFORK included."""
    part.open(backend, role)
    mappings = _table_mappings()
    assert {"table", "claims", "data0", "data1"} <= set(mappings)
    for name, found in mappings.items():
        for flags, _ in found:
            assert "dc" in flags, f"{name} would be inherited"


def test_roles_map_no_more_than_they_may_write(backend, part):
    """S4: a reader maps the table read-only; of the claims only its own row is writable."""
    part.open(backend, READER, session=5, row=3, bind=False)
    mappings = _table_mappings()
    assert {permissions for _, permissions in mappings["table"]} == {"r--s"}
    assert sorted(permissions for _, permissions in mappings["claims"]) in (["r--s", "rw-s"], ["r--s", "r--s", "rw-s"])
    part.open(backend, WRITER, bind=False)
    assert "rw-s" in {permissions for _, permissions in _table_mappings()["table"]}


def test_closing_gives_back_everything(backend, part):
    """H6: counts and handles; a second close is stale."""
    before = backend.handle_counts()
    opened = part.open(backend)
    assert backend.handle_counts().tables == before.tables + 1
    opened.close()
    assert backend.handle_counts() == before
    with fails(-2, 5, opened.table, call="table_close"):
        backend.table_close(opened.table)


def test_two_tables_on_one_lock_memory(backend, part, writer):
    """Closing any fd of an inode drops a POSIX lock, so fds wait for the last table; all are closed then."""
    before = backend.handle_counts()
    reader = part.open(backend, READER, session=2, row=1)
    keeper = part.open(backend, KEEPER)
    reader.close()
    writer.store([A])
    assert keeper.match([A]) == 1
    keeper.close()
    fds = backend.handle_counts().fds
    assert fds - before.fds <= 2
    writer.close()
    counts = backend.handle_counts()
    assert (counts.locks, counts.tables) == (0, 0)


# ---- arguments that all table calls share ----


def _key_calls(session):
    """Every call that takes keys, as a function of (keys, stride, lengths)."""
    backend, table = session.backend, session.table
    out = lambda n: (longs([0] * n), longs([0] * n))  # noqa: E731
    return {
        "table_match": lambda k, s, n, count: backend.table_match(table, k, s, n),
        "table_lookup": lambda k, s, n, count: backend.table_lookup(table, k, s, n, *out(count)),
        "table_claim": lambda k, s, n, count: backend.table_claim(table, k, s, n, *out(count)),
        "table_touch": lambda k, s, n, count: backend.table_touch(table, k, s, n),
        "table_evict": lambda k, s, n, count: backend.table_evict(table, 0, k, s, n),
        "table_reserve": lambda k, s, n, count: backend.table_reserve(
            table, k, s, n, None, 0, *out(count), bytearray(32 * count), bytearray(count)
        ),
    }


KEY_CALLS = ["table_match", "table_lookup", "table_claim", "table_touch", "table_evict", "table_reserve"]


@pytest.mark.parametrize("call", KEY_CALLS)
def test_bad_keys(writer, call):
    """H7: stride, lengths and buffers."""
    function = _key_calls(writer)[call]
    for stride in (0, -1, 33, 2**63 - 1):
        with fails(-6, 44, stride, 32, call=call):
            function(b"", stride, b"", 0)
    with fails(-6, 43, 1, 0, 4, call=call):
        function(bytes(8), 4, b"\x04\x00", 2)
    with fails(-6, 43, 0, 5, 4, call=call):
        function(bytes(8), 4, b"\x05\x04", 2)
    for length in (7, 9):
        with pytest.raises(errors.RangeError, match=rf"keys must have 8 bytes: got {length}"):
            function(bytes(length), 4, b"\x04\x04", 2)
    for wrong in (None, 1, "text", memoryview(bytes(16))[::2]):
        with pytest.raises(TypeError, match="keys must be"):
            function(wrong, 4, None, 2)
    for wrong in (1, "text", [1]):
        with pytest.raises(TypeError, match="key_nbytes must be"):
            function(bytes(8), 4, wrong, 2)
    assert writer.stats().free_count == 8


@pytest.mark.parametrize("call", KEY_CALLS)
def test_no_keys(writer, call):
    """An empty batch is done at once."""
    _key_calls(writer)[call](b"", 32, None, 0)


@pytest.mark.parametrize("call", ["table_lookup", "table_claim", "table_reserve"])
def test_wrong_output_arrays(backend, writer, call):
    """A wrong buffer is TypeError, a wrong length RangeError, and nothing is claimed or reserved."""
    table, keys = writer.table, pack([A, B])
    good = (longs([0, 0]), longs([0, 0]), bytearray(64), bytearray(2))
    used = 4 if call == "table_reserve" else 2
    lead = (*keys, None, 0) if call == "table_reserve" else keys
    function = getattr(backend, call)
    for position in range(used):
        is_longs = position < 2
        wrong = [longs([0]), longs([0] * 3)] if is_longs else [bytearray(1), bytearray(65)]
        for value in wrong:
            with pytest.raises(errors.RangeError, match="must have"):
                function(table, *lead, *good[:position], value, *good[position + 1 : used])
        read_only_buffer = memoryview(bytes(16)).cast("q") if is_longs else bytes(64 if position == 2 else 2)
        for value in [read_only_buffer, None, 5, [0, 0], array("i", [0, 0]), array("d", [0, 0])]:
            if not is_longs and isinstance(value, array):
                continue
            with pytest.raises(TypeError, match="must be"):
                function(table, *lead, *good[:position], value, *good[position + 1 : used])
    assert writer.stats()[5:10] == (8, 0, 0, 0, 0)


TABLE_CALLS = {
    "table_close": (),
    "table_info": (),
    "table_manifest": (),
    "table_bind": (0, 1),
    "table_set_state": (1,),
    "table_set_unready": (1,),
    "table_set_capacity": (1,),
    "table_beat": (1_000_000,),
    "table_admit": (0, 1, 1),
    "table_drop": (0, 1),
    "table_recover": (),
    "table_expire": (),
    "table_restore": (),
    "table_reset": (),
    "table_match": (b"", 32, None),
    "table_lookup": (b"", 32, None, longs([]), longs([])),
    "table_claim": (b"", 32, None, longs([]), longs([])),
    "table_claim_slots": (longs([]), longs([])),
    "table_release": (longs([]),),
    "table_touch": (b"", 32, None),
    "table_reserve": (b"", 32, None, None, 0, longs([]), longs([]), bytearray(), bytearray()),
    "table_commit": (longs([]), longs([]), 0),
    "table_abort": (longs([]), longs([])),
    "table_evict": (0, b"", 32, None),
    "table_clear": (),
    "table_verify": (longs([]), bytearray()),
    "table_invalidate": (longs([]), longs([])),
    "table_inventory": (0, longs([]), longs([]), bytearray(), bytearray()),
    "table_stats": (),
}


@pytest.mark.parametrize("call", TABLE_CALLS)
def test_bad_table_handles(backend, part, call):
    """H2, H7, E13: every table call refuses what is no open table, and crashes on nothing."""
    function, rest = getattr(backend, call), TABLE_CALLS[call]
    opened = part.open(backend)
    region = opened._regions[0]
    for handle in (0, -1):
        with fails(-1, 3, handle, call=call):
            function(handle, *rest)
    with fails(-1, 4, 2**63 - 1, call=call):
        function(2**63 - 1, *rest)
    with fails(-1, 6, region, 1, 4, call=call):
        function(region, *rest)
    opened.close()
    with fails(-2, 5, opened.table, call=call):
        function(opened.table, *rest)
    for value in (True, 1.5, None, "1"):
        with pytest.raises(TypeError, match="table must be an integer"):
            function(value, *rest)
    with pytest.raises(errors.RangeError):
        function(2**63, *rest)


def test_random_numbers_are_no_tables(backend, writer):
    """E13"""
    rng = random.Random(3)
    for _ in range(2000):
        handle = rng.randrange(-(2**63), 2**63)
        if handle == writer.table:
            continue
        with pytest.raises((errors.InvalidHandleError, errors.StaleHandleError)):
            backend.table_match(handle, A, 32, None)


_WRITER_ONLY = [
    "table_beat",
    "table_reserve",
    "table_commit",
    "table_abort",
    "table_evict",
    "table_clear",
    "table_invalidate",
]
_SESSION_ONLY = ["table_claim", "table_claim_slots", "table_release", "table_touch"]
_KEEPER_ONLY = [
    "table_set_state",
    "table_set_unready",
    "table_set_capacity",
    "table_admit",
    "table_drop",
    "table_recover",
    "table_expire",
]


@pytest.mark.parametrize("call", [*_WRITER_ONLY, *_SESSION_ONLY, *_KEEPER_ONLY, "table_restore", "table_reset"])
def test_roles(backend, part, writer, reader, call):
    """One mutator: what a role may not do is PermissionDeniedError, and changes nothing."""
    keeper = part.open(backend, KEEPER)
    sessions = {READER: reader, WRITER: writer, KEEPER: keeper}
    if call in _WRITER_ONLY:
        forbidden = {READER: WRITER, KEEPER: WRITER}
    elif call in _SESSION_ONLY:
        forbidden = {KEEPER: READER}
    elif call in _KEEPER_ONLY:
        forbidden = {READER: KEEPER, WRITER: KEEPER}
    else:
        forbidden = {READER: WRITER}
    before = part.image()
    for role, needed in forbidden.items():
        with fails(-8, 35, role, needed, call=call):
            getattr(backend, call)(sessions[role].table, *TABLE_CALLS[call])
    assert part.image() == before


# ---- one session's work ----


def test_store_match_lookup(backend, part, writer, reader):
    """R1: a block counts from its commit on, for the reader as for the writer; lookups change nothing."""
    reserved = writer.reserve([A, B, C])
    assert reserved == ([0, 1, 2], [1, 1, 1], [])
    assert reader.match([A, B, C]) == writer.match([A]) == 0
    writer.commit(reserved)
    before = part.image()
    for session in (writer, reader, part.open(backend, KEEPER)):
        assert session.match([A, B, C]) == 3
        assert session.match([A, A, C, D, B]) == 3
        assert session.match([D, A]) == 0
        assert session.lookup([C, D, A, A]) == ([2, -1, 0, 0], [1, 0, 1, 1])
        assert session.inventory() == [(0, 1, A), (1, 1, B), (2, 1, C)]
    assert part.image() == before, "a lookup changed the part"


def test_records_have_the_bytes_of_the_header(backend, part, writer):
    """H1: a sealed record, field by field, with its own CRC computed here."""
    part.data(0, b"content")
    writer.store([b"short"], checksum=CHECKSUM)
    record = part.read("table", part.record_offset(0), 64)
    key, generation, recency, epoch, data_crc, record_crc, nbytes, flags, row, state = struct.unpack(
        "<32sqqIIIBBBB", record
    )
    assert (key, generation, recency, epoch) == (b"short".ljust(32, b"\0"), 1, 1, 1)
    assert data_crc == backend.crc32c(b"content".ljust(64, b"\0"))
    assert record_crc == backend.crc32c(record[:40] + record[48:56] + record[60:62])
    assert (nbytes, flags, row, state) == (5, 1, 0, 2)
    link = struct.unpack("<iiiI", part.read("table", part.layout.link_offset_bytes, 16))
    assert link == (-1, -1, -1, backend.crc32c(b"short"))
    bucket = part.layout.bucket_offset_bytes + 4 * (link[3] & part.layout.bucket_count - 1)
    assert part.read("table", bucket, 4) == bytes(4)
    assert part.word(DIRTY) == 0


def test_generation_goes_up_at_every_reserve(writer):
    """O7: a slot that is given out again carries another generation; the old one is StaleBlockError."""
    first = writer.reserve([A])
    writer.abort(first)
    second = writer.reserve([A])
    assert (second.slots, second.generations) == ([0], [2])
    with fails(-19, 51, 0, 0, 1, 2, call="table_commit"):
        writer.commit(first)
    assert writer.abort(first) == 0
    writer.commit(second)
    with fails(-19, 51, 0, 0, 1, 2, call="table_claim_slots"):
        writer.claim_slots([0], [1])
    assert writer.stats().sealed_count == 1


def test_keys_of_every_length(writer):
    """I2: 1 to 32 bytes; a key is not its zero-padded longer one, and not its prefix."""
    keys = [b"\0" * n for n in range(1, 5)] + [bytes(range(1, n + 1)) for n in (29, 30, 31, 32)]
    writer.store(keys)
    assert writer.match(keys) == 8
    assert [writer.lookup([key])[0] for key in keys] == [[i] for i in range(8)]
    for missing in (b"\0" * 5, bytes(range(1, 29)), bytes(range(1, 33))[::-1]):
        assert writer.match([missing]) == 0
    assert [key for _, _, key in writer.inventory()] == keys
    for n in (1, 32):
        assert writer.match([keys[0 if n == 1 else 7]]) == 1


def _hash_collision(backend, nbytes: int = 32) -> tuple[bytes, bytes]:
    """Two keys of one length and one CRC32C: CRC is affine, so a kernel vector of its 33rd input bit exists."""
    zero = backend.crc32c(bytes(nbytes))
    basis: dict[int, tuple[int, int]] = {}
    for bit in range(33):
        vector = (1 << bit).to_bytes(nbytes, "little")
        crc, combination = backend.crc32c(vector) ^ zero, 1 << bit
        while crc:
            top = crc.bit_length()
            if top not in basis:
                basis[top] = (crc, combination)
                break
            crc, combination = crc ^ basis[top][0], combination ^ basis[top][1]
        else:
            return bytes(nbytes), combination.to_bytes(nbytes, "little")
    raise AssertionError("33 vectors of 32 bits are dependent")


@pytest.mark.parametrize("nbytes", [5, 16, 32])
def test_keys_with_one_short_hash_are_never_confused(backend, writer, nbytes):
    """I2: the whole key is compared; both live in one chain, each can go without the other."""
    first, second = _hash_collision(backend, nbytes)
    assert first != second
    assert backend.crc32c(first) == backend.crc32c(second)
    writer.store([first])
    assert writer.match([second]) == 0
    assert writer.reserve([second, first]).slots == [1, -1]
    writer.commit(([1], [1]))
    assert writer.lookup([first, second]) == ([0, 1], [1, 1])
    writer.touch([first])
    assert writer.evict(1) == 1
    assert (writer.match([first]), writer.match([second])) == (1, 0)
    writer.store([second])
    assert writer.evict(1, keep=[second]) == 1
    assert (writer.match([first]), writer.match([second])) == (0, 1)


def test_a_key_is_not_its_zero_padded_self(backend, writer):
    """I2: four bytes 0xff make the register of CRC32C zero, and zero bytes leave it so: one hash, one padded form."""
    keys = [b"\xff" * 4 + b"\0" * n for n in (0, 1, 28)]
    assert {backend.crc32c(key) for key in keys} == {0xFFFFFFFF}
    for i, key in enumerate(keys):
        assert [writer.match([other]) for other in keys] == [int(j < i) for j in range(3)]
        writer.store([key])
    assert [writer.lookup([key])[0] for key in keys] == [[0], [1], [2]]
    assert writer.reserve(keys).slots == [-1, -1, -1]


def test_long_chains(backend):
    """I2: many keys of one bucket; any of them can be taken out of the chain."""
    with PartMemory(backend, slot_count=16) as part:
        writer = part.open(backend)
        same = [key for key in (i.to_bytes(4, "little") for i in range(2000)) if backend.crc32c(key) & 15 == 5][:16]
        writer.store(same)
        order = same[:]
        random.Random(5).shuffle(order)
        for i, key in enumerate(order):
            slot, generation = (values[0] for values in writer.lookup([key]))
            assert writer.invalidate([slot], [generation]) == 1
            assert [k for k in same if writer.match([k])] == [k for k in same if k in order[i + 1 :]]


def test_repeated_keys(writer):
    """A key that is repeated in one batch is stored once, matched and claimed each time."""
    reserved = writer.reserve([A, B, A, A, B])
    assert reserved == ([0, 1, -1, -1, -1], [1, 1, 0, 0, 0], [])
    writer.commit(reserved)
    assert writer.match([A, A, B, A]) == 4
    assert writer.claim([A, A, B]) == ([0, 0, 1], [1, 1, 1])
    assert writer.stats().claimed_count == 2
    writer.release([0])
    with fails(-19, 53, 1, 0, call="table_release"):
        writer.release([0, 0])
    writer.release([0, 1])
    assert writer.stats().claimed_count == 0


def test_a_part_of_one_slot(backend):
    """The smallest part goes through everything."""
    with PartMemory(backend, slot_count=1, block_nbytes=1) as part:
        writer = part.open(backend)
        assert writer.store([A]).slots == [0]
        with fails(-10, 50, 1, 0, 1, call="table_reserve"):
            writer.reserve([B])
        with fails(-10, 50, 1, 0, 0, call="table_reserve"):
            writer.reserve([A, B], EVICT)
        assert writer.store([B], EVICT) == ([0], [2], [A])
        with fails(-10, 50, 2, 0, 1, call="table_reserve"):
            writer.reserve([C, D], EVICT)
        assert writer.clear() == (1, 0)
        assert writer.store([C]) == ([0], [3], [])
        assert writer.restore() == (1, 0, 0)


def test_reserve_is_all_or_nothing(backend, part, writer, reader):
    """E7: whatever stops it, no slot is taken, no block is gone and no generation has moved."""
    writer.store([A, B, C, D, E])
    reader.claim([A, B, C])
    open_ = writer.reserve([F])
    before = part.image()
    with fails(-10, 50, 3, 2, 2, call="table_reserve"):
        writer.reserve([G, H, b"x"])
    with fails(-10, 50, 5, 2, 2, call="table_reserve"):
        writer.reserve([G, H, b"x", b"y", b"z"], EVICT)
    with fails(-10, 50, 4, 2, 1, call="table_reserve"):
        writer.reserve([G, H, b"x", b"y", D], EVICT)
    with fails(-12, 49, 2, call="table_reserve"):
        writer.reserve([G, H, F], EVICT)
    for flags in (4, 8, 2**32 - 1):
        with fails(-6, 12, flags, 3, call="table_reserve"):
            writer.reserve([G], flags)
    with fails(-6, 46, 1, 8, 8, call="table_reserve"):
        writer.reserve([G, H], named=[6, 8])
    with fails(-6, 46, 0, -1, 8, call="table_reserve"):
        writer.reserve([G, H], named=[-1, 6])
    with fails(-6, 47, 1, 6, call="table_reserve"):
        writer.reserve([G, H], named=[6, 6])
    for slot in (0, open_.slots[0]):
        with fails(-12, 48, 1, slot, call="table_reserve"):
            writer.reserve([G, H], named=[6, slot])
    assert part.image() == before
    assert writer.reserve([G, H, b"x", b"y"], EVICT).evicted == [D, E]


def test_named_slots(writer):
    """An engine's own slots: a free one is used, a sealed one is overwritten, its key goes with reason overwritten."""
    assert writer.reserve([A, B], named=[5, 2]) == ([5, 2], [1, 1], [])
    writer.commit(([5, 2], [1, 1]))
    assert writer.lookup([A, B])[0] == [5, 2]
    replaced = writer.reserve([C, B, D], named=[5, 7, 0])
    assert replaced == ([5, -1, 0], [2, 0, 1], [A])
    assert writer.match([A]) == 0
    stats = writer.stats()
    assert (stats.replaced_total, stats.evicted_total, stats.writing_count, stats.sealed_count) == (1, 0, 2, 1)
    assert writer.abort(replaced) == 2
    assert writer.stats().free_count == 7
    assert sorted(writer.store([b"%d" % i for i in range(7)]).slots) == [0, 1, 3, 4, 5, 6, 7]


def test_a_named_slot_of_an_entry_that_needs_none_is_not_looked_at(writer):
    """Present and repeated keys need no slot: their named one may be busy or named twice."""
    writer.store([A])
    writer.claim([A])
    assert writer.reserve([A, B, B], named=[0, 3, 3]) == ([-1, 3, -1], [0, 1, 0], [])


def test_duplicates(writer):
    """D6: a second copy is asked for by name; the key is there until the last copy is gone."""
    writer.store([A, B])
    assert writer.reserve([A]).slots == [-1]
    second = writer.reserve([A], DUPLICATE)
    assert (second.slots, writer.match([A])) == ([2], 1)
    assert writer.lookup([A])[0] == [0]
    with fails(-12, 49, 0, call="table_reserve"):
        writer.reserve([A], DUPLICATE)
    writer.commit(second)
    assert writer.lookup([A])[0] == [2], "the newest copy is the one that counts"
    assert [key for _, _, key in writer.inventory()] == [A, B, A]
    assert writer.evict(1) == 1
    assert writer.lookup([A, B]) == ([2, 1], [1, 1])
    writer.invalidate([2], [1])
    assert writer.match([A]) == 0


def test_eviction_takes_the_least_recent_first(writer):
    """Commit order is the order of use until a touch; what is kept, claimed or being written is passed over."""
    writer.store([A, B, C, D])
    writer.store([E, F])
    pending = writer.reserve([G])
    writer.touch([B, A])  # from the last to the first: B is now the most recent
    claimed = writer.claim([C])
    assert writer.evict(2, keep=[D]) == 2
    assert [key for key in KEYS if writer.match([key])] == [A, B, C, D]
    assert writer.reserve([b"1", b"2", b"3", b"4", b"5"], EVICT).evicted == [D, A]
    writer.release(claimed[0])
    writer.commit(pending)
    assert writer.evict(100) == 3
    assert writer.stats().evicted_total == 7
    assert writer.evict(1) == 0
    with fails(-6, 45, -1, 2**63 - 1, call="table_evict"):
        writer.evict(-1)


def test_eviction_spares_the_keys_of_its_own_batch(writer):
    """The rule of the replay: what is asked for and resident is neither written nor evicted."""
    writer.store(KEYS)
    reserved = writer.reserve([b"new1", A, b"new2", C], EVICT)
    assert reserved.evicted == [B, D]
    assert reserved.slots[1] == reserved.slots[3] == -1
    assert set(reserved.slots) == {-1, 1, 3}


def test_touch_goes_from_the_last_to_the_first(writer):
    """So that a chain's tail is older than its head; absent keys are skipped, repeats count."""
    writer.store([A, B, C, D])
    assert writer.touch([D, b"absent", A, D]) == 3
    assert writer.reserve([b"%d" % i for i in range(8)], EVICT).evicted == [B, C, A, D]


def test_a_readers_touch_is_looked_at_before_eviction(backend, part, writer, reader):
    """A reader stamps its own row; the order over all sessions is that of the calls."""
    writer.store([A, B, C, D])
    table = part.image()["records"]
    assert reader.touch([B, A, b"absent"]) == 2
    assert part.image()["records"] == table, "a reader changed the table"
    writer.touch([C])
    other = part.open(backend, READER, session=3, row=2)
    assert other.touch([B]) == 1
    reserved = writer.reserve([b"%d" % i for i in range(8)], EVICT)
    assert reserved.evicted == [D, A, C, B]


def test_a_stale_block_does_not_hide_one_that_a_reader_touched(writer, reader):
    """A block that was invalidated while claimed has a newer stamp and no rank: eviction finds what lies beside it."""
    writer.store([A])
    reader.touch([A])
    writer.store([B])
    writer.claim([B])
    assert writer.invalidate([1], [1]) == 1
    assert writer.evict(1) == 1
    assert writer.match([A]) == 0
    writer.store([C])
    reader.touch([C])
    assert len(writer.store([*KEYS[3:], b"x"], EVICT).slots) == 6
    assert writer.reserve([b"y", b"z"], EVICT).evicted == [C, D]


def test_claims_keep_blocks(backend, part, writer, reader):
    """A claim of any session keeps a block; each session counts its own, and can release only its own."""
    writer.store([A, B])
    assert reader.claim([A, B, C]) == ([0, 1], [1, 1])
    assert writer.claim([A])[0] == [0]
    assert writer.evict(5) == 0
    reader.release([0, 1])
    with fails(-19, 53, 0, 1, call="table_release"):
        writer.release([1])
    assert (writer.evict(5), writer.match([A])) == (1, 1)
    writer.release([0])
    assert writer.evict(5) == 1
    reader.claim([A])
    assert reader.stats().claimed_count == 0


def test_claim_of_slots_is_all_or_nothing(writer, reader):
    """I1: claimed by number, checked by generation and state."""
    writer.store([A, B])
    pending = writer.reserve([C])
    with fails(-19, 52, 2, 2, 1, 2, call="table_claim_slots"):
        reader.claim_slots([0, 1, pending.slots[0]], [1, 1, 1])
    with fails(-19, 51, 1, 1, 9, 1, call="table_claim_slots"):
        reader.claim_slots([0, 1], [1, 9])
    for bad in (-1, 8, 2**62):
        with fails(-6, 46, 1, bad, 8, call="table_claim_slots"):
            reader.claim_slots([0, bad], [1, 1])
    assert reader.stats().claimed_count == 0
    reader.claim_slots([1, 1, 0], [1, 1, 1])
    assert reader.stats().claimed_count == 2
    reader.release([1, 0, 1])
    assert reader.stats().claimed_count == 0
    with pytest.raises(errors.RangeError, match="generations must have 2 entries: got 1"):
        reader.claim_slots([0, 1], [1])


def test_claims_cannot_run_over(part, writer, reader):
    """H7: a count of 20 bits that is full is refused, all or nothing, and does not reach the stamp beside it."""
    writer.store([A, B])
    offset = 1 * part.layout.row_nbytes + 64
    stamp = 5 << 20
    part.write("claims", offset + 8, struct.pack("<q", stamp | 1_048_574))
    with fails(-6, 54, 2, 1, 1_048_575, call="table_claim"):
        reader.claim([A, B, B])
    with fails(-6, 54, 2, 1, 1_048_575, call="table_claim_slots"):
        reader.claim_slots([0, 1, 1], [1, 1, 1])
    assert struct.unpack("<qq", part.read("claims", offset, 16)) == (0, stamp | 1_048_574)
    reader.claim([A, B])
    assert struct.unpack("<qq", part.read("claims", offset, 16)) == (1, stamp | 1_048_575)
    reader.release([1, 0])
    assert struct.unpack("<qq", part.read("claims", offset, 16)) == (0, stamp | 1_048_574)


def test_commit_checks_every_entry_first(part, writer):
    """All entries or none."""
    reserved = writer.reserve([A, B])
    before = part.image()
    with fails(-6, 46, 1, 8, 8, call="table_commit"):
        writer.commit(([0, 8], [1, 1]))
    with fails(-6, 46, 0, -2, 8, call="table_commit"):
        writer.commit(([-2, 1], [1, 1]))
    with fails(-6, 47, 1, 0, call="table_commit"):
        writer.commit(([0, 0], [1, 1]))
    with fails(-19, 51, 1, 1, 2, 1, call="table_commit"):
        writer.commit(([0, 1], [1, 2]))
    with fails(-19, 52, 1, 5, 0, 1, call="table_commit"):
        writer.commit(([0, 5], [1, 0]))
    with fails(-6, 12, 2, 1, call="table_commit"):
        writer.commit(reserved, 2)
    assert part.image() == before
    writer.commit(([1, -1, -1, 0], [1, 0, 5, 1]))
    with fails(-19, 52, 0, 0, 2, 1, call="table_commit"):
        writer.commit(reserved)
    assert writer.reserve([b"%d" % i for i in range(8)], EVICT).evicted == [B, A], "recency is the order of the commit"


def test_abort_skips_what_is_not_its_own(writer):
    """A reservation that is gone already is no error; entries of -1 are skipped."""
    reserved = writer.reserve([A, B, C])
    writer.commit(([0], [1]))
    assert writer.abort(([-1, 0, 1, 1, 2], [0, 1, 1, 1, 9])) == 1
    assert writer.stats()[5:8] == (6, 1, 1)
    for bad in (8, -2):
        with fails(-6, 46, 0, bad, 8, call="table_abort"):
            writer.abort(([bad], [1]))
    assert writer.abort(reserved) == 1
    assert writer.match([A]) == 1


def test_checksums(backend, part, writer, reader):
    """R1: a byte that changes after the commit is found by verify; a block without a checksum says so."""
    for slot, content in enumerate((b"a", b"b", b"c")):
        part.data(slot, content)
    writer.store([A, B], checksum=CHECKSUM)
    writer.store([C])
    for session in (writer, reader):
        assert session.verify([0, 1, 2, 0]) == [0, 0, 2, 0]
    part.flip("data0", part.block_nbytes + 63, 0x80)
    for session in (writer, reader):
        assert session.verify([0, 1, 2]) == [0, 1, 2]
    for bad in (-1, 8):
        with fails(-6, 46, 0, bad, 8, call="table_verify"):
            writer.verify([bad])
    with pytest.raises(errors.RangeError, match="verdicts must have 2 bytes: got 1"):
        backend.table_verify(writer.table, longs([0, 1]), bytearray(1))


def test_data_that_is_not_bound(backend, part):
    """Without its region a slot's bytes cannot be summed: NotReadyError, nothing sealed; it works without a sum."""
    writer = part.open(backend, bind=False)
    reserved = writer.reserve(KEYS[:5])
    region = part.import_(backend, "data0")
    mapping = backend.region_map(region, READ, 0).handle
    backend.table_bind(writer.table, 0, mapping)
    assert backend.mapping_info(mapping).use_count == 1
    with fails(-12, 14, mapping):
        backend.mapping_unmap(mapping)
    with fails(-14, 55, 4, call="table_commit"):
        writer.commit(reserved, CHECKSUM)
    assert writer.stats().sealed_count == 0
    writer.commit((reserved.slots[:4], reserved.generations[:4]), CHECKSUM)
    writer.commit((reserved.slots[4:], reserved.generations[4:]))
    with fails(-14, 55, 4, call="table_verify"):
        writer.verify([0, 4])
    for index in (-1, 2):
        with fails(-6, 56, index, 2, call="table_bind"):
            backend.table_bind(writer.table, index, mapping)
    with fails(-1, 6, region, 1, 2, call="table_bind"):
        backend.table_bind(writer.table, 1, region)
    backend.table_bind(writer.table, 0, mapping)
    assert backend.mapping_info(mapping).use_count == 1, "binding again replaces"
    writer.close()
    assert backend.mapping_info(mapping).use_count == 0
    backend.mapping_unmap(mapping)
    backend.region_close(region)


def test_bind_of_a_mapping_that_is_too_small(backend):
    """H4: the bytes that the region's slots need must be there; the last region may need fewer."""
    with PartMemory(backend, slot_count=5, block_nbytes=PAGE, region_count=2) as part:
        writer = part.open(backend, bind=False)
        small = backend.host_allocate(2 * PAGE, 1, "kvreuse-test", None)
        mapping = backend.region_map(small.handle, READ, 0).handle
        with fails(-5, 57, 2 * PAGE, 3 * PAGE, call="table_bind"):
            backend.table_bind(writer.table, 0, mapping)
        assert backend.mapping_info(mapping).use_count == 0
        backend.table_bind(writer.table, 1, mapping)
        writer.close()
        backend.mapping_unmap(mapping)
        backend.region_close(small.handle)


def test_clear(backend, part, writer, reader):
    """I4, D7, (b): one increment forgets all; claimed blocks stay as memory only; reservations stay, to be aborted."""
    writer.store([A, B, C])
    pending = writer.reserve([D])
    claimed = reader.claim([B])
    assert writer.clear() == (2, 1)
    for session in (writer, reader):
        assert session.match([B]) == 0
        assert session.inventory() == []
    stats = writer.stats()
    assert (stats.content_epoch, stats.free_count, stats.writing_count, stats.sealed_count, stats.stale_count) == (
        2,
        6,
        1,
        0,
        1,
    )
    assert stats.cleared_total == 3
    with fails(-19, 107, 0, 3, 1, 2, call="table_commit"):
        writer.commit(pending)
    assert reader.match([D]) == 0
    assert writer.abort(pending) == 1
    assert writer.store([D]).slots == [3]
    assert reader.match([D]) == 1
    with fails(-19, 52, 0, 1, 2, 2, call="table_claim_slots"):
        reader.claim_slots([1], [1])
    with fails(-12, 48, 0, 1, call="table_reserve"):
        writer.reserve([B], named=[1])
    assert len(writer.reserve([b"%d" % i for i in range(6)]).slots) == 6
    with fails(-10, 50, 1, 0, 1, call="table_reserve"):
        writer.reserve([A])
    reader.release(claimed[0])
    assert writer.reserve([A]).slots == [1], "a stale block is given back once nobody claims it"
    assert writer.stats().stale_count == 0


def test_invalidate(writer, reader):
    """A block found bad is no content at once; it goes when its claims go; other generations are skipped."""
    writer.store([A, B, C])
    claimed = reader.claim([A])
    assert writer.invalidate([0, 1, 2, 5], [1, 1, 9, 0]) == 2
    assert [reader.match([key]) for key in (A, B, C)] == [0, 0, 1]
    stats = writer.stats()
    assert (stats.free_count, stats.sealed_count, stats.stale_count, stats.corrupt_total) == (6, 1, 1, 2)
    assert writer.invalidate([0, 1], [1, 1]) == 0
    with fails(-6, 46, 0, 8, 8, call="table_invalidate"):
        writer.invalidate([8], [1])
    assert writer.store([A]).slots == [1], "the key can be stored again while the bad block is still claimed"
    assert reader.match([A]) == 1
    reader.release(claimed[0])
    assert len(writer.reserve([b"%d" % i for i in range(6)]).slots) == 6
    assert writer.stats().free_count == 0


def test_inventory_in_pages(backend, part, writer):
    """S2: ascending slots, any page size, pages that do not tear; what is no content is not listed."""
    writer.store(KEYS)
    writer.invalidate([0, 3], [1, 1])
    writer.reserve([b"pending"])
    expected = [(i, 1, KEYS[i]) for i in (1, 2, 4, 5, 6, 7)]
    for capacity in (1, 2, 3, 6, 7, 100):
        assert writer.inventory(capacity) == expected
    assert writer.page(5, 100) == (expected[3:], -1)
    assert writer.page(8, 10) == ([], -1)
    rows, following = writer.page(0, 0)
    assert rows == []
    assert following == 0 or following == 1
    with fails(-6, 46, 0, -1, 8, call="table_inventory"):
        writer.page(-1, 1)
    with pytest.raises(errors.RangeError):
        backend.table_inventory(writer.table, 0, longs([0]), longs([0]), bytearray(33), bytearray(1))


def test_totals(writer):
    """Each counter counts its own cause."""
    writer.store([A, B, C, D])
    writer.evict(1)
    writer.reserve([E], named=[1])
    writer.commit(([1], [2]))
    writer.invalidate([2], [1])
    writer.clear()
    stats = writer.stats()
    assert stats[10:] == (5, 1, 1, 2, 1, 0, 0)
    assert stats.free_count == 8


# ---- sessions, fences, states ----


def test_fenced_writer(backend, part, writer):
    """R6: once another writer is admitted, the old one's calls are StaleEpochError and change nothing."""
    writer.store([A, B])
    reserved = writer.reserve([C])
    claimed = writer.claim([A])
    newer = part.open(backend, WRITER, session=9, row=4)
    before = part.image()
    for call in (
        lambda: writer.match([A]),
        lambda: writer.lookup([A]),
        lambda: writer.claim([A]),
        lambda: writer.claim_slots([0], [1]),
        lambda: writer.touch([A]),
        lambda: writer.reserve([D]),
        lambda: writer.commit(reserved),
        lambda: writer.abort(reserved),
        lambda: writer.evict(1),
        lambda: writer.clear(),
        lambda: writer.invalidate([0], [1]),
        lambda: writer.inventory(),
        lambda: writer.restore(),
        lambda: backend.table_reset(writer.table),
    ):
        with fails(-18, 38, 1, 9):
            call()
    assert part.image() == before
    assert writer.stats().writer_session == 9
    writer.release(claimed[0])
    assert newer.stats().claimed_count == 0
    assert newer.restore() == (2, 0, 1)
    assert newer.match([A, B]) == 2


def test_fenced_reader(backend, part, writer, reader):
    """R6: a reader whose row was given to another session; its release changes nothing of the new one."""
    writer.store([A])
    reader.claim([A])
    other = part.open(backend, READER, session=3, row=1)
    other.claim([A])
    for call in (
        lambda: reader.match([A]),
        lambda: reader.claim([A]),
        lambda: reader.touch([A]),
        lambda: reader.inventory(),
    ):
        with fails(-18, 38, 2, 3):
            call()
    before = part.image()
    reader.release([0])
    reader.release([5])  # claimed by nobody: the row is another's, so nothing is done
    assert part.image() == before


def test_retired_part(backend, part, writer, reader):
    """(d): processes that still map a retired part get StaleEpochError; claims can be given back."""
    writer.store([A])
    claimed = reader.claim([A])
    keeper = part.open(backend, KEEPER)
    backend.table_set_state(keeper.table, RETIRED)
    for call in (
        lambda: reader.match([A]),
        lambda: writer.reserve([B]),
        lambda: writer.clear(),
        lambda: writer.restore(),
        lambda: reader.claim([A]),
    ):
        with fails(-18, 39, RETIRED):
            call()
    reader.release(claimed[0])
    for state in (3, -1):
        with fails(-6, 58, state, call="table_set_state"):
            backend.table_set_state(keeper.table, state)


def test_admit_and_drop(backend, part):
    """R6: a row is zeroed before its id is stored; a drop takes the writer's place first, and no foreign row."""
    keeper = part.open(backend, KEEPER)
    row = part.layout.row_nbytes
    part.write("claims", 3 * row, b"\x01" * row)
    backend.table_admit(keeper.table, 3, 7, WRITER)
    assert part.read("claims", 3 * row, row) == bytes(row)
    assert (part.word(1024 + 24), part.word(WRITER_SESSION)) == (7, 7)
    backend.table_admit(keeper.table, 4, 8, READER)
    assert part.word(WRITER_SESSION) == 7
    writer = part.open(backend, WRITER, session=7, row=3, admit=False)
    writer.store([A])
    writer.claim([A])
    backend.table_drop(keeper.table, 4, 7)
    assert (part.word(1024 + 32), part.word(1024 + 24), part.word(WRITER_SESSION)) == (8, 7, 0)
    assert keeper.stats().claimed_count == 1
    with fails(-18, 38, 7, 0):
        writer.match([A])
    backend.table_drop(keeper.table, 3, 7)
    assert part.word(1024 + 24) == 0
    assert part.read("claims", 3 * row, row) == bytes(row)
    before = part.image()
    backend.table_drop(keeper.table, 3, 7)
    assert part.image() == before, "a drop is idempotent"
    for bad in (-1, 64):
        with fails(-6, 36, bad, 64, call="table_admit"):
            backend.table_admit(keeper.table, bad, 1, READER)
        with fails(-6, 36, bad, 64, call="table_drop"):
            backend.table_drop(keeper.table, bad, 1)
    for bad in (0, -1):
        with fails(-6, 37, bad, call="table_admit"):
            backend.table_admit(keeper.table, 0, bad, READER)
    for bad in (0, 3, 4):
        with fails(-6, 34, bad, call="table_admit"):
            backend.table_admit(keeper.table, 0, 1, bad)


@pytest.mark.parametrize("name", ["table_restore", "table_reset", "table_recover"])
def test_a_keeper_changes_nothing_while_a_writer_is_admitted(backend, part, writer, name):
    """R6: one mutator."""
    writer.store([A])
    keeper = part.open(backend, KEEPER)
    with fails(-12, 38, 0, 1, call=name):
        getattr(backend, name)(keeper.table)
    assert writer.match([A]) == 1
    backend.table_drop(keeper.table, 0, 1)
    getattr(backend, name)(keeper.table)


def test_recover(backend, part, writer):
    """K1: the keeper frees a gone writer's unfinished slots, sealed blocks stay; not while a writer is admitted."""
    writer.store([A, B])
    writer.reserve([C, D])
    keeper = part.open(backend, KEEPER)
    with fails(-12, 38, call="table_recover"):
        backend.table_recover(keeper.table)
    backend.table_drop(keeper.table, 0, 1)
    assert backend.table_recover(keeper.table) == 2
    assert keeper.match([A, B]) == 2
    stats = keeper.stats()
    assert (stats.free_count, stats.writing_count, stats.sealed_count, stats.freed_total) == (6, 0, 2, 2)
    assert backend.table_recover(keeper.table) == 0
    new = part.open(backend, WRITER, session=2, row=1)
    assert sorted(new.store([C, D]).slots) == [2, 3]


def test_restore_keeps_the_order_of_recency(part, writer):
    """R2: as stamped; the free list is ascending."""
    writer.store([A, B, C, D, E, F])
    writer.touch([A])
    writer.invalidate([4, 1], [1, 1])
    assert writer.restore() == (4, 0, 0)
    # The evicted slots are pushed at the free list's head, oldest first.
    assert writer.reserve([b"%d" % i for i in range(7)], EVICT) == (
        [5, 3, 2, 1, 4, 6, 7],
        [2, 2, 2, 2, 2, 1, 1],
        [C, D, F],
    )


def test_reset(backend, part, writer, reader):
    """R2: EMPTY in one step: nothing counts, reservations are void; a claimed slot stays until its claim goes."""
    writer.store([A, B])
    pending = writer.reserve([C])
    claimed = reader.claim([A])
    backend.table_reset(writer.table)
    assert (reader.match([A]), writer.inventory()) == (0, [])
    stats = writer.stats()
    assert (stats.content_epoch, stats.free_count, stats.writing_count, stats.sealed_count, stats.stale_count) == (
        2,
        7,
        0,
        0,
        1,
    )
    with pytest.raises(errors.StaleBlockError):
        writer.commit(pending)
    reader.release(claimed[0])
    writer.store(KEYS)
    assert writer.match(KEYS) == 8


# ---- the heartbeat ----


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _until(condition, bound_s=20.0):
    deadline = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_beat(backend, part, writer, reader):
    """The word is stored at once and each period, in the clock that all processes share; nothing else changes."""
    keeper = part.open(backend, KEEPER)
    assert {session.info().heartbeat_ns for session in (writer, reader, keeper)} == {0}
    before, start = part.image(), time.monotonic_ns()
    backend.table_beat(writer.table, 1_000_000)
    seen = [keeper.info().heartbeat_ns]
    assert start <= seen[0] <= time.monotonic_ns()
    while len(seen) < 5:
        _until(lambda: keeper.info().heartbeat_ns != seen[-1])
        seen.append(reader.info().heartbeat_ns)
    assert seen == sorted(seen)
    assert seen[-1] <= time.monotonic_ns()
    with fails(-12, 110, writer.table, call="table_beat"):
        backend.table_beat(writer.table, 1_000_000)
    writer.close()
    last = part.word(384)
    time.sleep(0.02)
    assert part.word(384) == last, "it beats after its close"
    assert part.image() == before
    backend.table_admit(keeper.table, 0, 5, READER)
    assert keeper.info().heartbeat_ns == last
    backend.table_admit(keeper.table, 0, 6, WRITER)
    assert keeper.info().heartbeat_ns == 0, "a beat of the writer before"


@pytest.mark.parametrize("period_ns", [-1, 0, 999_999, 3_600_000_000_001, 2**63 - 1])
def test_a_period_out_of_range(backend, part, writer, period_ns):
    threads = _threads()
    with fails(-6, 109, period_ns, 1_000_000, 3_600_000_000_000, call="table_beat"):
        backend.table_beat(writer.table, period_ns)
    assert (part.word(384), _threads()) == (0, threads)


def test_closing_does_not_wait_for_a_beat(backend, part):
    """The thread of the longest period ends at once; many tables beat side by side."""
    threads, start = _threads(), time.monotonic()
    for _ in range(20):
        with PartMemory(backend) as other:
            sessions = [other.open(backend, WRITER), part.open(backend, WRITER)]
            for session in sessions:
                backend.table_beat(session.table, 3_600_000_000_000)
                assert session.store([A, B]).slots
                session.clear()
            assert _threads() == threads + 2
            for session in sessions:
                session.close()
    _until(lambda: _threads() == threads)
    assert time.monotonic() - start < 20


def test_the_thread_of_a_beat_blocks_all_signals(backend, part, writer):
    """A signal is never delivered to it."""
    before = set(os.listdir("/proc/self/task"))
    backend.table_beat(writer.table, 3_600_000_000_000)
    (thread,) = set(os.listdir("/proc/self/task")) - before

    def blocked():
        with open(f"/proc/self/task/{thread}/status") as lines:
            return next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk"))

    usual = sum(1 << number - 1 for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
    _until(lambda: blocked() & usual == usual)


def test_a_forked_child_does_not_beat(backend, part, writer):
    """The child's calls are ForkedError; the parent goes on."""
    backend.table_beat(writer.table, 1_000_000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads is the point
        pid = os.fork()
    if not pid:
        code = 1
        with contextlib.suppress(errors.ForkedError):
            backend.table_beat(writer.table, 1_000_000)
            code = 2
        with contextlib.suppress(errors.ForkedError):
            backend.table_close(writer.table)
            code = 2
        os._exit(code - 1)
    assert os.waitpid(pid, 0)[1] == 0
    last = writer.info().heartbeat_ns
    _until(lambda: writer.info().heartbeat_ns > last)


# ---- emptied from outside ----


def test_expire(backend, part, writer, reader):
    """R6, I4: beside a writer the keeper stores the epoch, dirty and counts, and nothing else; the writer repairs."""
    keeper = part.open(backend, KEEPER)
    writer.store([A, B, C])
    pending = writer.reserve([D])
    claimed = reader.claim([B])
    before = part.image()
    assert backend.table_expire(keeper.table) == 3
    words = bytearray(before["words"])
    for offset, value in ((CONTENT_EPOCH, 2), (DIRTY, 1), (488, 0), (496, 3), (536, 3)):
        struct.pack_into("<q", words, offset, value)
    assert part.image() == {**before, "words": bytes(words)}
    for call in (lambda: reader.match([A]), lambda: reader.claim([B]), reader.inventory):
        with fails(-14, 41):
            call()
    assert backend.table_expire(keeper.table) == 0, "it is not content any more"
    assert writer.match([A]) == 0
    assert part.word(DIRTY) == 0
    assert (reader.match([A]), reader.inventory()) == (0, [])
    stats = writer.stats()
    assert stats[5:9] == (6, 1, 0, 1), "what is claimed and what is reserved stays"
    assert (stats.content_epoch, stats.cleared_total) == (3, 3)
    assert writer.abort(pending) == 1
    reader.release(claimed[0])
    assert sorted(writer.store(KEYS).slots) == list(range(8))
    backend.table_set_state(keeper.table, RETIRED)
    assert backend.table_expire(keeper.table) == 8


def test_unready(backend, part, writer, reader):
    """R4, K6: the keeper says in the part's memory that no live writer stands behind it; readers find nothing then."""
    keeper = part.open(backend, KEEPER)
    writer.store([A, B])
    claimed = reader.claim([A])
    before = part.image()
    backend.table_set_unready(keeper.table, 7)
    words = bytearray(before["words"])
    struct.pack_into("<q", words, 584, 1)
    assert part.image() == {**before, "words": bytes(words)}
    for call in (lambda: reader.match([A]), lambda: reader.claim([B]), lambda: reader.touch([A]), reader.inventory):
        with fails(-14, 108):
            call()
    assert writer.match([A, B]) == 2
    assert writer.evict(2) == 1, "the reader's claim stays"
    reader.release(claimed[0])
    backend.table_set_unready(keeper.table, 0)
    assert reader.match([A]) == 1


def test_capacity(backend, part, writer, reader):
    """C1: no more slots than that are other than FREE, and no named slot is beyond it."""
    keeper = part.open(backend, KEEPER)
    for wrong in (0, -1, 9, 2**62):
        with fails(-6, 24, wrong, 8, call="table_set_capacity"):
            backend.table_set_capacity(keeper.table, wrong)
    assert backend.table_info(reader.table).capacity == 8
    before = part.image()
    backend.table_set_capacity(keeper.table, 5)
    words = bytearray(before["words"])
    struct.pack_into("<q", words, 576, 5)
    assert part.image() == {**before, "words": bytes(words)}
    assert backend.table_info(writer.table).capacity == 5
    with fails(-6, 46, 1, 5, 5):
        writer.reserve([A, B], named=[4, 5])
    writer.abort(writer.reserve([A], named=[4]))
    with fails(-10, 50, 6, 5, 0):
        writer.reserve(KEYS[:6])
    writer.store(KEYS[:5])
    with fails(-10, 50, 1, 0, 5):
        writer.reserve([KEYS[5]])
    made = writer.reserve([KEYS[5]], EVICT)
    assert made.evicted == [KEYS[0]]
    writer.commit(made)
    assert writer.stats()[5:9] == (3, 0, 5, 0)
    # Above what the capacity becomes: nothing goes by itself, and it grows no more.
    backend.table_set_capacity(keeper.table, 2)
    assert writer.match([KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]]) == 5
    with fails(-10, 50, 1, 0, 5):
        writer.reserve([KEYS[6]])
    made = writer.reserve([KEYS[6]], EVICT)
    assert made.evicted == KEYS[1:2]
    writer.commit(made)
    assert writer.stats()[5:9] == (3, 0, 5, 0)
    assert writer.evict(3) == 3
    claimed = reader.claim([KEYS[5], KEYS[6]])
    with fails(-10, 50, 1, 0, 0):
        writer.reserve([KEYS[7]], EVICT)
    reader.release(claimed[0])
    backend.table_set_capacity(keeper.table, 8)
    assert len(writer.reserve([KEYS[0], KEYS[7]]).slots) == 2


def test_info_tells_the_content_epoch(backend, part, writer, reader):
    assert backend.table_info(reader.table).content_epoch == 1
    writer.clear()
    assert backend.table_info(reader.table).content_epoch == 2 == backend.table_info(writer.table).content_epoch


def test_expire_waits_for_nobody(backend, part, lock_holder):
    """K7: the keeper never waits for a part's lock; nothing is changed."""
    keeper = part.open(backend, KEEPER)
    before = part.image()
    with fails(-23, 42, 0, lock_holder.pid, call="table_expire"):
        backend.table_expire(keeper.table)
    assert part.image() == before


def _expire(backend, keeper, writer):
    backend.table_expire(keeper.table)


def _clear(backend, keeper, writer):
    writer.clear()


@pytest.mark.parametrize("empty", [_expire, _clear])
def test_what_was_reserved_before_the_part_was_emptied_never_counts(backend, part, writer, reader, empty):
    """I4, R1: its bytes may be of the weights before; nothing of the batch is sealed; the slots are given back."""
    keeper = part.open(backend, KEEPER)
    old = writer.reserve([A, B])
    empty(backend, keeper, writer)
    new = writer.reserve([C])
    mixed = ([*new.slots, -1, *old.slots], [*new.generations, 0, *old.generations])
    for checksum in (0, CHECKSUM):
        with fails(-19, 107, 2, 0, 1, 2, call="table_commit"):
            writer.commit(mixed, checksum)
    assert reader.inventory() == []
    assert writer.stats()[5:9] == (5, 3, 0, 0)
    writer.commit(new)
    with fails(-12, 49, 0, call="table_reserve"):
        writer.reserve([A])
    assert writer.abort(old) == 2
    writer.commit(writer.reserve([A, B]))
    assert reader.match([A, B, C]) == 3


def test_a_reservation_outlives_a_rebuild(part, writer):
    """K7: a repair without a new epoch leaves reservations as they are."""
    reserved = writer.reserve([A])
    part.word(DIRTY, 1)
    assert writer.match([A]) == 0
    writer.commit(reserved)
    assert writer.match([A]) == 1


def test_epochs_of_more_than_32_bits(backend, part, writer):
    """H1: records carry the low 32 bits, and 0 is skipped."""
    keeper = part.open(backend, KEEPER)
    part.word(CONTENT_EPOCH, 2**32 - 1)
    reserved = writer.reserve([A])
    assert backend.table_expire(keeper.table) == 0
    assert part.word(CONTENT_EPOCH) == 2**32 + 1
    with fails(-19, 107, 0, 0, 2**32 - 1, 1, call="table_commit"):
        writer.commit(reserved)
    writer.abort(reserved)
    writer.store([A])
    assert writer.match([A]) == 1


@pytest.mark.parametrize("commits", [True, False])
def test_copies_end_failed_if_the_part_was_emptied(backend, part, writer, commits):
    """O4, I4: a copy that is to commit ends FAILED and gives its slots back; any other leaves that to its caller."""
    keeper = part.open(backend, KEEPER)
    queue = backend.queue_open(1, 0)
    data = np.frombuffer(bytes(range(64)), np.uint8)
    event = os.eventfd(0)
    try:
        reserved = writer.reserve([A])
        segment = longs([0, data.ctypes.data, 64, -1, 0, 0, 64, 0, 64])
        operation = backend.copy_slots(
            queue,
            writer.table,
            1,
            longs(writer._mappings),
            longs(reserved.slots),
            longs(reserved.generations),
            longs([0]),
            segment,
            int(commits),  # KVR_SLOTS_COMMIT
            longs([1, event, 0]),
        )
        assert backend.table_expire(keeper.table) == 0
        os.eventfd_write(event, 1)
        assert backend.operation_wait(operation, 20 * 10**9)
        info, error = backend.operation_info(operation), backend.operation_error(operation)
        assert (info.state, info.moved_nbytes) == (3 if commits else 2, 64)
        if commits:
            assert is_detail(error, -19, 107, (0, 0, 1, 2))
        else:
            with fails(-19, 107, 0, 0, 1, 2, call="table_commit"):
                writer.commit(reserved)
            assert writer.abort(reserved) == 1
        assert writer.stats()[5:9] == (8, 0, 0, 0)
        assert writer.match([A]) == 0
        backend.operation_release(operation)
    finally:
        backend.queue_close(queue, 20 * 10**9)
        os.close(event)


# ---- damage ----

COVERED = [*range(40), *range(48, 56), *range(56, 60), 60, 61]


def test_every_covered_byte_of_a_record(backend, part, writer):
    """A1 c, R1: one flipped bit in a covered byte: the block does not count; restore frees and counts just that one."""
    writer.store(KEYS, checksum=CHECKSUM)
    for offset in COVERED:
        slot = offset % 8
        generation = struct.unpack("<q", part.read("table", part.record_offset(slot) + 32, 8))[0]
        part.flip("table", part.record_offset(slot) + offset, 1 << offset % 8)
        assert writer.match([KEYS[slot]]) == 0, offset
        before = writer.stats().corrupt_total
        result = writer.restore()
        assert (result.sealed_count, result.bad_count) == (7, 1), offset
        assert writer.stats().corrupt_total == before + 1
        assert [key for _, _, key in writer.inventory()] == [key for key in KEYS if key != KEYS[slot]], offset
        # Make the slot's generation what it was, so that a flip of it does not add up.
        part.write("table", part.record_offset(slot) + 32, struct.pack("<q", generation))
        writer.store([KEYS[slot]], checksum=CHECKSUM)
        assert writer.match(KEYS) == 8


def test_recency_is_not_covered(part, writer):
    """A stamp is advice: a wrong one costs an eviction, never a block."""
    writer.store([A])
    part.flip("table", part.record_offset(0) + 40, 0x40)
    assert writer.match([A]) == 1
    assert writer.restore() == (1, 0, 0)


@pytest.mark.parametrize("state", [3, 255])
def test_an_unknown_slot_state_is_freed(part, writer, state):
    writer.store([A, B])
    part.write("table", part.record_offset(0) + 63, bytes([state]))
    assert writer.match([A]) == 0
    result = writer.restore()
    assert (result.sealed_count, result.bad_count + result.freed_count) == (1, 1)
    assert writer.stats().free_count == 7


def test_a_record_of_an_older_epoch_does_not_count(part, writer):
    """(b)"""
    writer.store([A, B])
    part.word(CONTENT_EPOCH, 2)
    assert writer.match([A]) == 0
    result = writer.restore()
    assert tuple(result) == (0, 0, 2)


def test_dirty_is_repaired_by_the_writer_and_reported_to_readers(part, writer, reader):
    """K7, A10: derived structures that lie are rebuilt from the records by the next who may; a reader says unready."""
    writer.store([A, B, C])
    writer.claim([A])
    part.write("table", part.layout.link_offset_bytes, b"\x5a" * 16 * 8)
    part.write("table", part.layout.bucket_offset_bytes, b"\x5a" * 4 * part.layout.bucket_count)
    part.write("table", 4096 + 448, b"\x5a" * 56)
    part.word(DIRTY, 1)
    for call in (
        lambda: reader.match([A]),
        lambda: reader.claim([A]),
        lambda: reader.touch([A]),
        lambda: reader.lookup([A]),
        lambda: reader.inventory(),
    ):
        with fails(-14, 41):
            call()
    assert part.word(DIRTY) == 1
    assert writer.match([A, B, C]) == 3
    assert part.word(DIRTY) == 0
    assert reader.match([A, B, C]) == 3
    assert len(writer.reserve(KEYS[3:]).slots) == 5
    with fails(-10, 50, 1, 0, 2):
        writer.reserve([b"x"])


def test_a_wiped_index_without_dirty_is_restored(part, writer):
    """A10: 8 slots, 3 SEALED and claimed; after restore 5 can be reserved, then NoSpaceError; never free as unknown."""
    writer.store([A, B, C])
    writer.claim([A, B, C])
    part.write("table", part.layout.link_offset_bytes, bytes(16 * 8))
    part.write("table", part.layout.bucket_offset_bytes, b"\xff" * 4 * part.layout.bucket_count)
    assert writer.restore() == (3, 0, 0)
    assert sorted(writer.reserve(KEYS[3:]).slots) == [3, 4, 5, 6, 7]
    with fails(-10, 50, 1, 0, 0):
        writer.reserve([b"x"], EVICT)


@pytest.mark.parametrize("seed", range(3))
def test_garbage_in_the_derived_structures_crashes_nothing(backend, seed):
    """E13, K7: any call on any derived bytes ends, with a result or an error; restore makes it right again."""
    rng = random.Random(seed)
    with PartMemory(backend, slot_count=20) as part:
        writer = part.open(backend)
        keys = [b"key%d" % i for i in range(12)]
        writer.store(keys)
        for _ in range(40):
            name, size = rng.choice([("link", 16 * 20), ("bucket", 4 * part.layout.bucket_count)])
            start = part.layout.link_offset_bytes if name == "link" else part.layout.bucket_offset_bytes
            width = rng.choice([4, 8])
            value = rng.choice(
                [rng.randbytes(width), struct.pack("<i", rng.randrange(20)) * (width // 4), b"\xff" * width]
            )
            part.write("table", start + rng.randrange(0, size - width, 4), value)
            for call in (
                lambda: writer.match(keys),
                lambda: writer.touch(keys),
                lambda: writer.reserve([rng.randbytes(4), rng.randbytes(4)], EVICT),
                lambda: writer.evict(1),
                lambda: writer.abort((list(range(20)), [1] * 20)),
            ):
                with contextlib.suppress(errors.KVReuseError):
                    call()
        writer.restore()
        stats = writer.stats()
        assert stats.free_count + stats.sealed_count + stats.stale_count == 20
        assert stats.sealed_count == len(writer.inventory())


# ---- the lock ----

_HOLD_LOCK = """
import fcntl, os, sys
fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX, 1, 0)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def lock_holder(part):
    """Another process that holds the part's lock until its stdin ends."""
    fd = part.fds["lock"]
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD_LOCK, str(fd)], pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.stdin.close()
        process.wait(20)


@pytest.mark.parametrize("wait_ns", [0, 30_000_000])
def test_a_held_lock_ends_in_a_bounded_wait(backend, part, wait_ns, lock_holder):
    """K7: WaitTimeoutError within the bound, naming the holder; nothing is repaired or taken; afterwards it works."""
    writer = part.open(backend, lock_wait_ns=wait_ns)
    before = part.image()
    for call in (
        lambda: writer.match([A]),
        lambda: writer.reserve([A]),
        lambda: writer.clear(),
        lambda: writer.restore(),
    ):
        with pytest.raises(errors.WaitTimeoutError, match=f"process {lock_holder.pid} holds it") as caught:
            call()
        assert caught.value.holder_pid == lock_holder.pid
    assert part.image() == before
    assert tuple(writer.info())[1] == 8
    assert writer.stats().free_count == 8
    lock_holder.stdin.close()
    assert lock_holder.wait(20) == 0
    assert writer.store([A]).slots == [0]


def test_a_lock_whose_holder_dies_is_free(backend, part, lock_holder):
    """K1: SIGKILL of the holder gives the lock back at once."""
    writer = part.open(backend)
    lock_holder.kill()
    lock_holder.wait(20)
    assert writer.match([A]) == 0


def test_the_lock_is_free_after_every_call_and_every_error(backend, part, writer):
    """K7: another process can take it at any time in between."""
    code = """
import fcntl, sys
for line in sys.stdin:
    fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
    fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_UN, 1, 0)
    print("free", flush=True)
"""
    fd = part.fds["lock"]
    calls = [
        lambda: writer.store([A]),
        lambda: writer.commit(([0], [9])),
        lambda: writer.reserve([b"%d" % i for i in range(9)]),
        lambda: writer.release([0]),
        lambda: writer.restore(),
    ]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(fd)], pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        for call in calls:
            with contextlib.suppress(errors.KVReuseError):
                call()
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "free\n"
        process.stdin.close()
        assert process.wait(20) == 0


# ---- a writer that is killed ----

_VICTIM = """
import importlib, json, os, random, sys
fds = json.loads(sys.argv[2])
geometry = json.loads(sys.argv[3])
sys.path.insert(0, sys.argv[4])
backend = importlib.import_module(sys.argv[1])
from part_memory import PartMemory
part = object.__new__(PartMemory)
part.__dict__.update(geometry, fds=fds, layout=backend.table_layout(geometry["slot_count"], 8), _sessions=[])
writer = part.open(backend, session=int(sys.argv[5]), row=0, admit=False, lock_wait_ns=10**9)
rng = random.Random(int(sys.argv[6]))
log = int(sys.argv[7])
def say(*record):
    os.write(log, (json.dumps(record) + "\\n").encode())
number = 0
say("ready")
while True:
    keys = [rng.randrange(1, 400).to_bytes(rng.choice([4, 8]), "big") for _ in range(rng.randrange(1, 9))]
    choice = rng.random()
    if choice < 0.7:
        say("reserving")
        reserved = writer.reserve(keys, 1)
        say("evicted", [key.hex() for key in reserved.evicted])
        todo = [i for i, slot in enumerate(reserved.slots) if slot != -1]
        for i in todo:
            part.data(reserved.slots[i], keys[i] * 4)
        if rng.random() < 0.1:
            writer.abort(reserved)
        else:
            say("committing", [keys[i].hex() for i in todo])
            writer.commit(reserved, 1)
            say("sealed", [keys[i].hex() for i in todo])
    elif choice < 0.8:
        slots, _ = writer.claim(keys)
        writer.touch(keys)
        writer.release(slots)
    elif choice < 0.95:
        say("evicting")
        writer.evict(2, keys[:1])
        say("inventory", [key.hex() for _, _, key in writer.inventory()])
    else:
        writer.touch(keys)
"""


def _run_victim(backend, part, session: int, seed: int, delay_s: float) -> list[list]:
    """Drive a writer in another process, SIGKILL it after a while; return what it said it had done."""
    reading, writing = os.pipe()
    geometry = {
        name: getattr(part, name) for name in ("slot_count", "block_nbytes", "region_count", "slots_per_region")
    }
    arguments = [backend.__name__, json.dumps(part.fds), json.dumps(geometry), str(Path(__file__).parent)]
    command = [sys.executable, "-c", _VICTIM, *arguments, str(session), str(seed), str(writing)]
    process = subprocess.Popen(command, pass_fds=[*part.fds.values(), writing], stderr=subprocess.PIPE)
    os.close(writing)
    said = b""
    try:
        while b"\n" not in said:
            ready, _, _ = select.select([reading], [], [], 30)
            chunk = os.read(reading, 65536) if ready else b""
            assert chunk, process.communicate(timeout=5)[1].decode()
            said += chunk
        # Its writes are read meanwhile, so that the pipe never stops it.
        deadline = time.monotonic() + delay_s
        while (left := deadline - time.monotonic()) > 0:
            if select.select([reading], [], [], left)[0]:
                said += os.read(reading, 65536)
        process.send_signal(signal.SIGKILL)
        while chunk := os.read(reading, 65536):
            said += chunk
    finally:
        process.kill()
        process.wait(20)
        process.stderr.close()
        os.close(reading)
    return [json.loads(line) for line in said.split(b"\n")[:-1] if line]


def _surviving(said: list[list], before: set[bytes]) -> tuple[set[bytes], set[bytes], int]:
    """(keys that were sealed, keys that may be there, how many of the first the call that was cut off could evict)."""
    must, may = set(before), set(before)
    for what, *rest in said:
        keys = {bytes.fromhex(key) for key in rest[0]} if rest else set()
        if what == "evicted":
            must, may = must - keys, may - keys
        elif what == "committing":
            may = may | keys
        elif what == "sealed":
            must, may = must | keys, may | keys
        elif what == "inventory":
            must, may = keys, keys
    return must, may, {"reserving": 8, "evicting": 2}.get(said[-1][0], 0)


@pytest.mark.parametrize("half", [0, 1])
def test_a_killed_writer_loses_no_sealed_block_and_publishes_none_half(backend, half):
    """K1: 20 kills a backend at random moments of reserve, commit, evict, touch; restored by the other backend."""
    rng = random.Random(half)
    others = [module for module in backend_modules() if module is not backend] or [backend]
    with PartMemory(backend, slot_count=64, block_nbytes=64, region_count=3) as part:
        keeper = part.open(others[0], KEEPER, lock_wait_ns=10**9)
        present: set[bytes] = set()
        for round_ in range(10):
            session = 10 + round_
            others[0].table_admit(keeper.table, 0, session, WRITER)
            said = _run_victim(backend, part, session, 100 * half + round_, rng.uniform(0.0, 0.04))
            others[0].table_drop(keeper.table, 0, session)
            if round_ % 2 == 0:
                others[0].table_recover(keeper.table)
            others[0].table_admit(keeper.table, 0, 1000 + session, WRITER)
            writer = part.open(others[0], WRITER, 1000 + session, 0, admit=False, lock_wait_ns=10**9)
            result = writer.restore()
            rows = writer.inventory()
            found = {key for _, _, key in rows}
            must, may, evictable = _surviving(said, present)
            assert len(rows) == len(found) == result.sealed_count
            assert result.bad_count == 0, said[-3:]
            assert found <= may, (found - may, said[-3:])
            assert len(must - found) <= evictable, (must - found, said[-3:])
            assert writer.verify([slot for slot, _, _ in rows]) == [0] * len(rows)
            for slot, _, key in rows:
                assert part.data(slot) == (key * 4).ljust(64, b"\0"), "a block has another block's bytes"
            stats = writer.stats()
            assert (stats.free_count + stats.sealed_count, stats.claimed_count) == (64, 0)
            present = found
            writer.close()
            others[0].table_drop(keeper.table, 0, 1000 + session)


_CRC_STEPS = [0, 1, 7, 8, 15, 16, 63, 64, 255, 4096]


def test_pieces_sum_up(backend):
    """crc32c goes on from a value: any cut gives the same sum."""
    data = random.Random(2).randbytes(5000)
    whole = backend.crc32c(data)
    for cut in _CRC_STEPS:
        assert backend.crc32c(data[cut:], backend.crc32c(data[:cut])) == whole


def test_restore_is_bounded_by_its_records(backend):
    """Every subset of slot states restores to what the records say."""
    with PartMemory(backend, slot_count=4) as part:
        for session, states in enumerate(itertools.product([0, 1, 2], repeat=4), start=1):
            writer = part.open(backend, WRITER, session, 0)
            backend.table_reset(writer.table)
            reserved = writer.reserve(KEYS[:4])
            order = [reserved.slots.index(i) for i in range(4)]
            for slot, state in enumerate(states):
                pick = ([slot], [reserved.generations[order[slot]]])
                if state == 0:
                    writer.abort(pick)
                elif state == 2:
                    writer.commit(pick)
            assert writer.restore() == (states.count(2), 0, states.count(1))
            assert writer.stats().free_count == 4 - states.count(2)
            writer.close()
