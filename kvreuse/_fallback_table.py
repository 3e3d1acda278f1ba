"""The calls on a part's table in Python: the same bytes in shared memory as the core writes.

Meanings, checks and their order: include/kvreuse.h.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from . import _api, _status
from . import _ctypes_structs as c
from . import _fallback_host as host
from ._fallback_host import INT32, UINT32, Mapping, MappingBuffer, Region, bytes_view, check_length, crc, int64_view
from ._fallback_owners import check_still
from ._fallback_part import (
    CLAIM_BITS,
    CLAIM_MASK,
    FREE,
    HOLD_SLOTS,
    INT64_MAX,
    KEEPER,
    READER,
    RECORD_STATE,
    SEAL,
    SEALED,
    STAMP_MAX,
    SUPERBLOCK,
    U32,
    W_CAPACITY,
    W_CLEARED,
    W_CLOCK,
    W_CORRUPT,
    W_DIRTY,
    W_EPOCH,
    W_EVICTED,
    W_FREE,
    W_FREE_HEAD,
    W_FREED,
    W_HEARTBEAT,
    W_NEWEST,
    W_OLDEST,
    W_REPLACED,
    W_ROWS,
    W_SEALED,
    W_STALE,
    W_STATE,
    W_STORED,
    W_UNREADY,
    W_WRITER,
    W_WRITING,
    WORDS_NBYTES,
    WRITER,
    WRITING,
    BrokenError,
    Call,
    ExpiredError,
    Heart,
    Keys,
    Table,
    check_layout_range,
    check_superblock,
    close_lock,
    free_links,
    layout_of,
    open_lock,
    record_crc,
    run,
    superblock_crc,
    superblock_fields,
)

# ---- a fresh part ----


def table_layout(slot_count: Any, manifest_nbytes: Any) -> _api.TableLayout:
    slot_count = _status.as_integer(slot_count, "slot_count")
    manifest_nbytes = _status.as_integer(manifest_nbytes, "manifest_nbytes")
    check_layout_range(slot_count, manifest_nbytes, "table_layout")
    return layout_of(slot_count, manifest_nbytes)


def table_create(
    table_region: Any,
    claims_region: Any,
    part_id: bytes,
    slot_count: Any,
    block_nbytes: Any,
    region_count: Any,
    manifest: Any,
) -> None:
    call = "table_create"
    table_handle = _status.as_integer(table_region, "table_region")
    claims_handle = _status.as_integer(claims_region, "claims_region")
    part_id = host.as_bytes(part_id, "part_id")
    slot_count = _status.as_integer(slot_count, "slot_count")
    block_nbytes = _status.as_integer(block_nbytes, "block_nbytes")
    region_count = _status.as_integer(region_count, "region_count")
    content = bytes_view(manifest, "manifest")
    check_length("part_id", len(part_id), 16, "bytes")
    with host.lock:
        table = host.find(table_handle, Region, call)
        claims = host.find(claims_handle, Region, call)
        host.check_host(table, call)
        host.check_host(claims, call)
        host.check_fork(call)
        if not 1 <= slot_count <= c.KVR_SLOT_COUNT_MAX:
            check_layout_range(slot_count, 0, call)
        if not 1 <= block_nbytes <= c.KVR_NBYTES_MAX:
            values: tuple[int, ...] = (block_nbytes, c.KVR_NBYTES_MAX)
            raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_BLOCK_NBYTES_RANGE, values, call)
        most = min(slot_count, c.KVR_REGION_COUNT_MAX)
        if not 1 <= region_count <= most:
            raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_REGION_COUNT_RANGE, (region_count, most), call)
        check_layout_range(slot_count, content.nbytes, call)
        if slot_count * block_nbytes > c.KVR_NBYTES_MAX:
            raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_LAYOUT_NBYTES, (slot_count,), call)
        layout = layout_of(slot_count, content.nbytes)
        for region, needed in ((table, layout.table_nbytes), (claims, layout.claims_nbytes)):
            if region.nbytes < needed:
                values = (region.nbytes, needed)
                raise _status.make(c.KVR_ERROR_SIZE_MISMATCH, c.KVR_DETAIL_TABLE_NBYTES, values, call)
        for region in (table, claims):
            if region.access != c.KVR_ACCESS_READ_WRITE:
                raise _status.make(c.KVR_ERROR_PERMISSION_DENIED, c.KVR_DETAIL_ACCESS_READ_ONLY, (region.handle,), call)
        buffer = host.map_memory(table.fd, layout.table_nbytes, c.KVR_ACCESS_READ_WRITE, True, call)
    try:
        if int.from_bytes(buffer[:8], "little") == c.KVR_TABLE_MAGIC:
            state = int.from_bytes(buffer[WORDS_NBYTES : WORDS_NBYTES + 8], "little", signed=True)
            raise _status.make(c.KVR_ERROR_BUSY, c.KVR_DETAIL_TABLE_SEALED, (state,), call)
        data = content.tobytes()
        fields = superblock_fields(layout, part_id, slot_count, block_nbytes, region_count, len(data), crc(data))
        _write_fresh(buffer, layout, slot_count)
        buffer[c.KVR_MANIFEST_OFFSET_BYTES : c.KVR_MANIFEST_OFFSET_BYTES + len(data)] = data
        block = SUPERBLOCK.pack(*fields.values())
        block = block[:12] + U32.pack(superblock_crc(block)) + block[16:]
        buffer[8 : len(block)] = block[8:]
        buffer[:8] = block[:8]  # last: what was cut short is no part
    finally:
        host.unmap_memory(buffer)


def _write_fresh(buffer: MappingBuffer, layout: _api.TableLayout, slot_count: int) -> None:
    with memoryview(buffer) as memory:
        with memory[WORDS_NBYTES : 2 * WORDS_NBYTES] as page, page.cast("q") as words:
            words[W_EPOCH] = 1
            words[W_OLDEST] = words[W_NEWEST] = -1
            words[W_FREE] = slot_count
        links, _ = free_links(slot_count, range(slot_count))
        start = layout.link_offset_bytes
        memory[start : start + 16 * slot_count] = memoryview(links).cast("B")
        start = layout.bucket_offset_bytes
        memory[start : start + 4 * layout.bucket_count] = b"\xff" * (4 * layout.bucket_count)


# ---- open, close, what a part is ----


def table_open(
    table_region: Any, claims_region: Any, lock_fd: Any, role: Any, session: Any, row: Any, lock_wait_ns: Any
) -> int:
    call = "table_open"
    table_handle = _status.as_integer(table_region, "table_region")
    claims_handle = _status.as_integer(claims_region, "claims_region")
    lock_fd = _status.as_integer(lock_fd, "lock_fd", *INT32)
    role = _status.as_integer(role, "role", *INT32)
    session = _status.as_integer(session, "session")
    row = _status.as_integer(row, "row", *INT32)
    lock_wait_ns = _status.as_integer(lock_wait_ns, "lock_wait_ns")
    with host.lock:
        region = host.find(table_handle, Region, call)
        claims = host.find(claims_handle, Region, call)
        host.check_host(region, call)
        host.check_host(claims, call)
        host.check_fork(call)
        if role not in (READER, WRITER, KEEPER):
            raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_ROLE_UNKNOWN, (role,), call)
        if session != 0 if role == KEEPER else session <= 0:
            raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_SESSION_RANGE, (session,), call)
        if row != -1 if role == KEEPER else not 0 <= row < c.KVR_ROW_COUNT:
            raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_ROW_RANGE, (row, c.KVR_ROW_COUNT), call)
        if lock_fd < 0:
            raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_FD_NEGATIVE, (lock_fd,), call)
        if lock_wait_ns < 0:
            values = (lock_wait_ns, INT64_MAX)
            raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_NBYTES_RANGE, values, call)
        for thing, is_written in ((region, role != READER), (claims, True)):
            if is_written and thing.access != c.KVR_ACCESS_READ_WRITE:
                raise _status.make(c.KVR_ERROR_PERMISSION_DENIED, c.KVR_DETAIL_ACCESS_READ_ONLY, (thing.handle,), call)
        access = c.KVR_ACCESS_READ if role == READER else c.KVR_ACCESS_READ_WRITE
        memory = host.map_memory(region.fd, region.physical_nbytes, access, True, call)
        table = None
        try:
            fields = check_superblock(memory, region.nbytes, claims.nbytes, call)
            state = int.from_bytes(memory[WORDS_NBYTES : WORDS_NBYTES + 8], "little", signed=True)
            if role != KEEPER and state == c.KVR_PART_RETIRED:
                raise _status.make(c.KVR_ERROR_STALE_EPOCH, c.KVR_DETAIL_PART_RETIRED, (state,), call)
            if role != KEEPER and state != c.KVR_PART_LAYOUT_SEALED:
                raise _status.make(c.KVR_ERROR_NOT_READY, c.KVR_DETAIL_PART_NOT_SEALED, (state,), call)
            table = Table(memory, fields, role, session, row)
            table.wait_ns = lock_wait_ns
            table.map_claims(claims, call)
            table.lock = open_lock(lock_fd)
            return host.register(table)
        except BaseException:
            if table is None:
                host.unmap_memory(memory)
            else:
                table.close_memory()
            raise


def table_close(table: Any) -> None:
    call = "table_close"
    handle = _status.as_integer(table, "table")
    with host.lock:
        thing = host.find(handle, Table, call)
        host.check_fork(call)
        if thing.calls:
            raise _status.make(c.KVR_ERROR_BUSY, c.KVR_DETAIL_NONE, (), call)
        if thing.operations:
            values = (handle, thing.operations)
            raise _status.make(c.KVR_ERROR_NOT_QUIESCENT, c.KVR_DETAIL_TABLE_IN_FLIGHT, values, call)
        host.unregister(thing)
        for mapping in thing.bound:
            if mapping is not None:
                mapping.holds -= 1
        if thing.heart is not None:
            thing.heart.stop()
        thing.close_memory()
        close_lock(thing.lock)


def table_info(table: Any) -> _api.TableInfo:
    return run("table_info", _status.as_integer(table, "table"), _info)  # type: ignore[no-any-return]


def _info(call: Call, table: Table) -> _api.TableInfo:
    return _api.TableInfo(
        table.part_id,
        table.slot_count,
        table.block_nbytes,
        table.region_count,
        table.slots_per_region,
        table.manifest_nbytes,
        table.session,
        table.role,
        table.row,
        table.operations,
        table.words[W_EPOCH],
        table.words[W_HEARTBEAT],
        table.capacity(),
    )


def table_manifest(table: Any) -> bytes:
    return run("table_manifest", _status.as_integer(table, "table"), _manifest)  # type: ignore[no-any-return]


def _manifest(call: Call, table: Table) -> bytes:
    start = c.KVR_MANIFEST_OFFSET_BYTES
    return table.memory[start : start + table.manifest_nbytes]


def table_bind(table: Any, index: Any, mapping: Any) -> None:
    handle = _status.as_integer(table, "table")
    index = _status.as_integer(index, "index")
    mapping = _status.as_integer(mapping, "mapping")
    run("table_bind", handle, _bind, index, mapping)


def _bind(call: Call, table: Table, index: int, mapping_handle: int) -> None:
    with host.lock:
        mapping = host.find(mapping_handle, Mapping, call.name)
        if not 0 <= index < table.region_count:
            raise call.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_REGION_INDEX_RANGE, index, table.region_count)
        slots = min(table.slots_per_region, table.slot_count - index * table.slots_per_region)
        needed = max(slots, 0) * table.block_nbytes
        if mapping.nbytes < needed:
            raise call.error(c.KVR_ERROR_SIZE_MISMATCH, c.KVR_DETAIL_REGION_BIND_NBYTES, mapping.nbytes, needed)
        old = table.bound[index]
        mapping.holds += 1
        table.bound[index] = mapping
        if old is not None:
            old.holds -= 1


# ---- the keeper's calls ----


def table_set_unready(table: Any, unready: Any) -> None:
    handle = _status.as_integer(table, "table")
    run("table_set_unready", handle, _set_unready, _status.as_integer(unready, "unready", *INT32))


def _set_unready(call: Call, table: Table, unready: int) -> None:
    call.require(table, KEEPER)
    table.words[W_UNREADY] = int(unready != 0)


def table_set_capacity(table: Any, capacity: Any) -> None:
    handle = _status.as_integer(table, "table")
    run("table_set_capacity", handle, _set_capacity, _status.as_integer(capacity, "capacity"))


def _set_capacity(call: Call, table: Table, capacity: int) -> None:
    call.require(table, KEEPER)
    if not 1 <= capacity <= table.slot_count:
        raise call.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_SLOT_COUNT_RANGE, capacity, table.slot_count)
    table.words[W_CAPACITY] = capacity


def table_beat(table: Any, period_ns: Any) -> None:
    run("table_beat", _status.as_integer(table, "table"), _beat, _status.as_integer(period_ns, "period_ns"))


def _beat(call: Call, table: Table, period_ns: int) -> None:
    call.require(table, WRITER)
    least, most = c.KVR_BEAT_MIN_NS, c.KVR_BEAT_MAX_NS
    if not least <= period_ns <= most:
        raise call.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_PERIOD_RANGE, period_ns, least, most)
    with host.lock:
        if table.heart is not None:
            raise call.error(c.KVR_ERROR_BUSY, c.KVR_DETAIL_HEARTBEAT_RUNS, table.handle)
        table.heart = Heart(table.words, period_ns)


def table_set_state(table: Any, state: Any) -> None:
    handle = _status.as_integer(table, "table")
    run("table_set_state", handle, _set_state, _status.as_integer(state, "state", *INT32))


def _set_state(call: Call, table: Table, state: int) -> None:
    call.require(table, KEEPER)
    if state not in (c.KVR_PART_CREATING, c.KVR_PART_LAYOUT_SEALED, c.KVR_PART_RETIRED):
        raise call.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_STATE_RANGE, state)
    table.words[W_STATE] = state


def _check_row(call: Call, table: Table, row: int, session: int) -> None:
    call.require(table, KEEPER)
    if not 0 <= row < c.KVR_ROW_COUNT:
        raise call.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_ROW_RANGE, row, c.KVR_ROW_COUNT)
    if session <= 0:
        raise call.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_SESSION_RANGE, session)


def _zero_row(table: Table, row: int) -> None:
    start = row * table.row_nbytes
    table.claims_buffer[start : start + table.row_nbytes] = bytes(table.row_nbytes)


def table_admit(table: Any, row: Any, session: Any, role: Any) -> None:
    handle = _status.as_integer(table, "table")
    row = _status.as_integer(row, "row", *INT32)
    session = _status.as_integer(session, "session")
    role = _status.as_integer(role, "role", *INT32)
    run("table_admit", handle, _admit, row, session, role)


def _admit(call: Call, table: Table, row: int, session: int, role: int) -> None:
    _check_row(call, table, row, session)
    if role not in (READER, WRITER):
        raise call.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_ROLE_UNKNOWN, role)
    _zero_row(table, row)
    table.words[W_ROWS + row] = session
    if role == WRITER:
        table.words[W_HEARTBEAT] = 0
        table.words[W_WRITER] = session


def table_drop(table: Any, row: Any, session: Any) -> None:
    handle = _status.as_integer(table, "table")
    row = _status.as_integer(row, "row", *INT32)
    session = _status.as_integer(session, "session")
    run("table_drop", handle, _drop, row, session)


def _drop(call: Call, table: Table, row: int, session: int) -> None:
    _check_row(call, table, row, session)
    words = table.words
    if words[W_WRITER] == session:
        words[W_WRITER] = c.KVR_WRITER_SESSION_NONE
    if words[W_ROWS + row] == session:
        words[W_ROWS + row] = 0
        _zero_row(table, row)


def _check_no_writer(call: Call, table: Table) -> None:
    """One mutator: a keeper changes a table only while no writer is admitted."""
    writer = table.words[W_WRITER]
    if table.role == KEEPER and writer != c.KVR_WRITER_SESSION_NONE:
        raise call.error(c.KVR_ERROR_BUSY, c.KVR_DETAIL_SESSION_FENCED, 0, writer)


def table_recover(table: Any) -> int:
    return run("table_recover", _status.as_integer(table, "table"), _recover)  # type: ignore[no-any-return]


def _recover(call: Call, table: Table) -> int:
    call.require(table, KEEPER)
    call.take(table, repair=False)
    _check_no_writer(call, table)
    words = table.words
    if words[W_DIRTY]:
        freed = table.rebuild(keep_writing=False)[2]
        words[W_FREED] += freed
        return freed
    states = table.record_bytes[RECORD_STATE::64].tobytes()
    freed = 0
    slot = states.find(WRITING)
    while slot >= 0:
        words[W_DIRTY] = 1
        table.free(slot)
        words[W_WRITING] -= 1
        words[W_FREED] += 1
        freed += 1
        slot = states.find(WRITING, slot + 1)
    words[W_DIRTY] = 0
    return freed


def table_restore(table: Any) -> _api.RestoreResult:
    return run("table_restore", _status.as_integer(table, "table"), _restore)  # type: ignore[no-any-return]


def _restore(call: Call, table: Table) -> _api.RestoreResult:
    call.require(table, WRITER, KEEPER)
    call.take(table, repair=False)
    _check_no_writer(call, table)
    content, bad, freed, stale = table.rebuild(keep_writing=False)
    table.words[W_FREED] += freed
    return _api.RestoreResult(content, bad, freed + stale)


def _count_content(table: Table) -> int:
    epoch, states = table.epoch(), table.record_bytes[RECORD_STATE::64].tobytes()
    return sum(table.is_content(table.record(slot), epoch) for slot, state in enumerate(states) if state == SEALED)


def table_reset(table: Any) -> None:
    run("table_reset", _status.as_integer(table, "table"), _reset)


def _reset(call: Call, table: Table) -> None:
    call.require(table, WRITER, KEEPER)
    call.take(table, repair=False)
    _check_no_writer(call, table)
    words, content = table.words, _count_content(table)
    words[W_DIRTY] = 1
    table.next_epoch()
    _, _, freed, _ = table.rebuild(keep_writing=False)
    words[W_CLEARED] += content
    words[W_FREED] += freed


def table_expire(table: Any) -> int:
    return run("table_expire", _status.as_integer(table, "table"), _expire)  # type: ignore[no-any-return]


def _expire(call: Call, table: Table) -> int:
    call.require(table, KEEPER)
    call.take(table, check=False, repair=False)
    words, content = table.words, _count_content(table)
    # A writer may be admitted: lists and index stay its own, and it makes them and the counts anew.
    words[W_DIRTY] = 1
    table.next_epoch()
    words[W_STALE] += words[W_SEALED]
    words[W_SEALED] = 0
    words[W_CLEARED] += content
    return content


# ---- calls of any session ----


def table_match(table: Any, keys: Any, key_stride: Any, key_nbytes: Any) -> int:
    handle = _status.as_integer(table, "table")
    batch = Keys(keys, key_stride, key_nbytes)
    batch.check_length()
    return run("table_match", handle, _match, batch)  # type: ignore[no-any-return]


def _match(call: Call, table: Table, batch: Keys) -> int:
    keys = batch.unpack(call)
    call.take(table)
    for i, key in enumerate(keys):
        if i and not i % HOLD_SLOTS:
            call.breathe(table)
        if table.find(key) < 0:
            return i
    return len(keys)


def table_lookup(table: Any, keys: Any, key_stride: Any, key_nbytes: Any, slots: Any, generations: Any) -> None:
    handle = _status.as_integer(table, "table")
    batch = Keys(keys, key_stride, key_nbytes)
    out_slots, out_generations = int64_view(slots, "slots", True), int64_view(generations, "generations", True)
    if batch.check_length():
        check_length("slots", len(out_slots), batch.count, "entries")
        check_length("generations", len(out_generations), batch.count, "entries")
    run("table_lookup", handle, _lookup, batch, out_slots, out_generations)


def _lookup(call: Call, table: Table, batch: Keys, slots: memoryview, generations: memoryview) -> None:
    keys = batch.unpack(call)
    call.take(table)
    for i, key in enumerate(keys):
        if i and not i % HOLD_SLOTS:
            call.breathe(table)
        slot = table.find(key)
        slots[i] = slot
        generations[i] = table.record_words[8 * slot + 4] if slot >= 0 else 0


def table_inventory(
    table: Any, first_slot: Any, slots: Any, generations: Any, keys: Any, key_nbytes: Any
) -> tuple[int, int]:
    handle = _status.as_integer(table, "table")
    first_slot = _status.as_integer(first_slot, "first_slot")
    outputs = (
        int64_view(slots, "slots", True),
        int64_view(generations, "generations", True),
        bytes_view(keys, "keys", True),
        bytes_view(key_nbytes, "key_nbytes", True),
    )
    capacity = len(outputs[0])
    check_length("generations", len(outputs[1]), capacity, "entries")
    check_length("keys", outputs[2].nbytes, 32 * capacity, "bytes")
    check_length("key_nbytes", outputs[3].nbytes, capacity, "bytes")
    return run("table_inventory", handle, _inventory, first_slot, *outputs)  # type: ignore[no-any-return]


def _inventory(
    call: Call,
    table: Table,
    first_slot: int,
    slots: memoryview,
    generations: memoryview,
    keys: memoryview,
    key_nbytes: memoryview,
) -> tuple[int, int]:
    capacity = len(slots)
    if capacity > c.KVR_BATCH_COUNT_MAX:
        raise call.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_COUNT_RANGE, capacity, c.KVR_BATCH_COUNT_MAX)
    if first_slot < 0:
        raise call.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_SLOT_RANGE, 0, first_slot, table.slot_count)
    call.take(table)
    count, slot, epoch = 0, first_slot, table.epoch()
    looked_at = 0
    while slot < table.slot_count and count < capacity:
        if looked_at == HOLD_SLOTS:
            call.breathe(table)
            looked_at, epoch = 0, table.epoch()
        looked_at += 1
        if table.state(slot) == SEALED:
            record = table.record(slot)
            if table.is_content(record, epoch):
                slots[count] = slot
                generations[count] = table.record_words[8 * slot + 4]
                keys[32 * count : 32 * count + 32] = record[:32]
                key_nbytes[count] = record[60]
                count += 1
        slot += 1
    return count, slot if slot < table.slot_count else -1


def table_stats(table: Any) -> _api.TableStats:
    return run("table_stats", _status.as_integer(table, "table"), _stats)  # type: ignore[no-any-return]


def _stats(call: Call, table: Table) -> _api.TableStats:
    words, count = table.words, table.slot_count
    claimed: set[int] = set()
    for row in table.rows():
        with table.claims[row : row + count] as view:
            claimed.update(slot for slot, word in enumerate(view.tolist()) if word & CLAIM_MASK)
    return _api.TableStats(
        words[W_STATE],
        words[W_EPOCH],
        words[W_WRITER],
        words[W_DIRTY],
        count,
        words[W_FREE],
        words[W_WRITING],
        words[W_SEALED],
        words[W_STALE],
        len(claimed),
        *words[W_STORED : W_FREED + 1].tolist(),
        *[len(frozenset[int]().union(*list(table.owners.values())))],
    )


def table_verify(table: Any, slots: Any, verdicts: Any) -> None:
    handle = _status.as_integer(table, "table")
    slots = int64_view(slots, "slots")
    out = bytes_view(verdicts, "verdicts", True)
    check_length("verdicts", out.nbytes, len(slots), "bytes")
    run("table_verify", handle, _verify, slots.tolist(), out)


def _verify(call: Call, table: Table, slots: list[int], verdicts: memoryview) -> None:
    call.require_slots(table, slots)
    table.check_bound(slots, call.name)
    records = [table.record(slot) for slot in slots]
    covered = [i for i, record in enumerate(records) if record[61] & c.KVR_RECORD_HAS_DATA_CRC]
    found = table.data_crcs([slots[i] for i in covered], call.name)
    verdicts[:] = b"\2" * len(slots)
    for i, value in zip(covered, found, strict=True):
        verdicts[i] = value != U32.unpack_from(records[i], 52)[0]


# ---- claims and touches ----


def table_claim(table: Any, keys: Any, key_stride: Any, key_nbytes: Any, slots: Any, generations: Any) -> int:
    handle = _status.as_integer(table, "table")
    batch = Keys(keys, key_stride, key_nbytes)
    out_slots, out_generations = int64_view(slots, "slots", True), int64_view(generations, "generations", True)
    if batch.check_length():
        check_length("slots", len(out_slots), batch.count, "entries")
        check_length("generations", len(out_generations), batch.count, "entries")
    return run("table_claim", handle, _claim, batch, out_slots, out_generations)  # type: ignore[no-any-return]


def _add_claim(call: Call, table: Table, i: int, slot: int) -> None:
    word = table.own[8 + slot]
    if word & CLAIM_MASK == c.KVR_CLAIM_COUNT_MAX:
        raise call.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_CLAIMS_FULL, i, slot, c.KVR_CLAIM_COUNT_MAX)
    table.own[8 + slot] = word + 1


def _undo_claims(table: Table, slots: Iterable[int]) -> None:
    """Take claims back, perhaps without the lock: a lower count of our own row harms nobody."""
    if table.words[W_ROWS + table.row] == table.session:
        for slot in slots:
            table.own[8 + slot] -= 1


def _claim(call: Call, table: Table, batch: Keys, slots: memoryview, generations: memoryview) -> int:
    call.require(table, READER, WRITER)
    keys = batch.unpack(call)
    call.take(table)
    done: list[int] = []
    try:
        for i, key in enumerate(keys):
            if i and not i % HOLD_SLOTS:
                call.breathe(table)
            slot = table.find(key)
            if slot < 0:
                break
            _add_claim(call, table, i, slot)
            done.append(slot)
            slots[i] = slot
            generations[i] = table.record_words[8 * slot + 4]
    except BaseException:
        _undo_claims(table, done)
        raise
    return len(done)


def table_claim_slots(table: Any, slots: Any, generations: Any) -> None:
    handle = _status.as_integer(table, "table")
    slots, generations = int64_view(slots, "slots"), int64_view(generations, "generations")
    check_length("generations", len(generations), len(slots), "entries")
    run("table_claim_slots", handle, _claim_slots, slots.tolist(), generations.tolist())


def _claim_slots(call: Call, table: Table, slots: list[int], generations: list[int]) -> None:
    call.require(table, READER, WRITER)
    call.require_slots(table, slots)
    try:
        claim_all(call, table, slots, generations, [])
    except StaleSlotError as stale:
        raise call.error(c.KVR_ERROR_STALE_BLOCK, stale.detail, stale.index, *stale.values) from None


class StaleSlotError(Exception):
    """A slot does not hold the block that was carried."""

    def __init__(self, index: int, detail: int, *values: int) -> None:
        self.index, self.detail, self.values = index, detail, values


def claim_all(call: Call, table: Table, slots: list[int], generations: list[int], done: list[int]) -> None:
    """Take the lock, claim all the slots and append them to `done`, or none of them."""
    call.take(table)
    try:
        # Everything is checked before a full count is reported; in a longer batch, as far as one hold of the lock goes.
        for start in range(0, len(slots), HOLD_SLOTS):
            if start:
                call.breathe(table)
            epoch = table.epoch()
            hold = range(start, min(start + HOLD_SLOTS, len(slots)))
            for i in hold:
                found = table.record_words[8 * slots[i] + 4]
                if found != generations[i]:
                    raise StaleSlotError(i, c.KVR_DETAIL_GENERATION, slots[i], generations[i], found)
                record = table.record(slots[i])
                if not table.is_content(record, epoch):
                    raise StaleSlotError(i, c.KVR_DETAIL_SLOT_STATE, slots[i], record[RECORD_STATE], SEALED)
            for i in hold:
                _add_claim(call, table, i, slots[i])
                done.append(slots[i])
    except BaseException:
        _undo_claims(table, done)
        done.clear()
        raise


def _check_generation(call: Call, table: Table, i: int, slot: int, carried: int) -> None:
    found = table.record_words[8 * slot + 4]
    if found != carried:
        raise call.error(c.KVR_ERROR_STALE_BLOCK, c.KVR_DETAIL_GENERATION, i, slot, carried, found)


def _check_epoch(call: Call, table: Table, i: int, slot: int) -> None:
    """Refuse to seal what was reserved before the part was emptied: its bytes may be of what was forgotten."""
    reserved, epoch = table.record_halves[16 * slot + 12], table.epoch()
    if reserved != epoch:
        raise call.error(c.KVR_ERROR_STALE_BLOCK, c.KVR_DETAIL_CONTENT_EPOCH, i, slot, reserved, epoch)


def table_release(table: Any, slots: Any) -> None:
    handle = _status.as_integer(table, "table")
    run("table_release", handle, _release, int64_view(slots, "slots").tolist())


def _release(call: Call, table: Table, slots: list[int]) -> None:
    call.require(table, READER, WRITER)
    call.require_slots(table, slots)
    call.take(table, check=False, repair=False)
    if table.words[W_ROWS + table.row] != table.session:
        return
    own = table.own
    # Counts of this row change only under the in-process lock, so one look at them is enough for all.
    wanted: dict[int, int] = {}
    for i, slot in enumerate(slots):
        wanted[slot] = wanted.get(slot, 0) + 1
        if wanted[slot] > own[8 + slot] & CLAIM_MASK:
            raise call.error(c.KVR_ERROR_STALE_BLOCK, c.KVR_DETAIL_NOT_CLAIMED, i, slot)
        if i and not i % HOLD_SLOTS:
            call.breathe_row(table)
    for i, (slot, count) in enumerate(wanted.items()):
        if i and not i % HOLD_SLOTS:
            call.breathe_row(table)
        if table.words[W_ROWS + table.row] == table.session:
            own[8 + slot] -= count


def table_touch(table: Any, keys: Any, key_stride: Any, key_nbytes: Any) -> int:
    handle = _status.as_integer(table, "table")
    batch = Keys(keys, key_stride, key_nbytes)
    batch.check_length()
    return run("table_touch", handle, _touch, batch)  # type: ignore[no-any-return]


def _touch(call: Call, table: Table, batch: Keys) -> int:
    call.require(table, READER, WRITER)
    keys = batch.unpack(call)
    call.take(table)
    words, is_writer = table.words, table.role == WRITER
    touched = 0
    stamp = table.last_stamp()
    for done, key in enumerate(reversed(keys)):
        if done and not done % HOLD_SLOTS:
            call.breathe(table)
            stamp = table.last_stamp()
        slot = table.find(key)
        if slot < 0:
            continue
        touched += 1
        stamp = min(stamp + 1, STAMP_MAX)
        if is_writer:
            words[W_DIRTY] = 1
            words[W_CLOCK] = stamp
            table.recency_remove(slot)
            table.record_words[8 * slot + 5] = stamp
            table.recency_append(slot)
            words[W_DIRTY] = 0
        else:
            table.own[0] = stamp
            table.own[8 + slot] = stamp << CLAIM_BITS | table.own[8 + slot] & CLAIM_MASK
    return touched


# ---- the writer's calls ----


def _sweep(call: Call, table: Table) -> None:
    """Free stale slots that nobody claims any more, oldest first."""
    words = table.words
    left = words[W_STALE]
    if left <= 0:
        return
    epoch, rows = table.epoch(), table.rows()
    slot = words[W_OLDEST]
    words[W_DIRTY] = 1
    for step in range(1, table.slot_count + 1):
        if left <= 0 or not 0 <= slot < table.slot_count:
            break
        if not step % HOLD_SLOTS:
            if call.breathe(table, dirty=True):
                break  # a rebuild has freed them
            rows = table.rows()
        following = table.links[4 * slot + 2]
        if table.record_halves[16 * slot + 12] != epoch:
            left -= 1
            if not table.is_claimed(slot, rows):
                table.free(slot)
                words[W_STALE] -= 1
        slot = following
    words[W_DIRTY] = 0


def _key_of(record: bytes) -> bytes:
    return record[: min(record[60], 32)]


def _evictable(call: Call, table: Table, keep: set[bytes], limit: int) -> int:
    """Count blocks that could be evicted, up to a limit; changes nothing."""
    epoch, rows = table.epoch(), table.rows()
    found = 0
    slot = table.words[W_OLDEST]
    for step in range(1, table.slot_count + 1):
        if found >= limit or not 0 <= slot < table.slot_count:
            break
        if not step % HOLD_SLOTS:
            call.walk_on(table)
            rows = table.rows()
        if (
            table.record_halves[16 * slot + 12] == epoch
            and table.state(slot) == SEALED
            and not table.is_claimed(slot, rows)
        ):
            found += not keep or _key_of(table.record(slot)) not in keep
        slot = table.links[4 * slot + 2]
    return found


def _evict(call: Call, table: Table, count: int, keep: set[bytes], freed: list[int]) -> list[tuple[bytes, int]]:
    """Free up to `count` least recent blocks, and say so in `freed`; return each one's padded key and length.

    A block that a reader touched since is first moved to where its stamp belongs. Dirty is set by the caller.
    """
    words, links, claims = table.words, table.links, table.claims
    epoch, rows = table.epoch(), table.rows()
    gone: list[tuple[bytes, int]] = []
    slot = words[W_OLDEST]
    # Each block is looked at once more at most, after it was moved.
    for step in range(1, 2 * table.slot_count + 1):
        if len(gone) >= count or not 0 <= slot < table.slot_count:
            return gone
        if not step % HOLD_SLOTS:
            call.walk_on(table, dirty=True)
            rows = table.rows()
        following = links[4 * slot + 2]
        if table.record_halves[16 * slot + 12] == epoch and table.state(slot) == SEALED:
            stamp = 0
            for row in rows:
                word = claims[row + slot]
                if word & CLAIM_MASK:
                    break
                stamp = max(stamp, word >> CLAIM_BITS)
            else:
                record = table.record(slot)
                if not keep or _key_of(record) not in keep:
                    if stamp > table.record_words[8 * slot + 5]:
                        # The reader's row may be zeroed next: later stamps must still be newer than this one.
                        words[W_CLOCK] = max(words[W_CLOCK], stamp)
                        before = links[4 * slot + 1]
                        table.recency_remove(slot)
                        table.record_words[8 * slot + 5] = stamp
                        table.recency_sort_in(slot, stamp)
                        # Whoever stands there now is the next in order; it may be the same slot.
                        following = links[4 * before + 2] if before >= 0 else words[W_OLDEST]
                    else:
                        freed.append(slot)
                        table.free(slot)
                        words[W_SEALED] -= 1
                        gone.append((record[:32], min(record[60], 32)))
        slot = following
    raise BrokenError


def table_reserve(
    table: Any,
    keys: Any,
    key_stride: Any,
    key_nbytes: Any,
    named_slots: Any,
    flags: Any,
    slots: Any,
    generations: Any,
    evicted_keys: Any,
    evicted_key_nbytes: Any,
) -> int:
    handle = _status.as_integer(table, "table")
    batch = Keys(keys, key_stride, key_nbytes)
    named = None if named_slots is None else int64_view(named_slots, "named_slots")
    flags = _status.as_integer(flags, "flags", *UINT32)
    out_slots, out_generations = int64_view(slots, "slots", True), int64_view(generations, "generations", True)
    out_keys = bytes_view(evicted_keys, "evicted_keys", True)
    out_nbytes = bytes_view(evicted_key_nbytes, "evicted_key_nbytes", True)
    if batch.check_length():
        if named is not None:
            check_length("named_slots", len(named), batch.count, "entries")
        check_length("slots", len(out_slots), batch.count, "entries")
        check_length("generations", len(out_generations), batch.count, "entries")
        check_length("evicted_keys", out_keys.nbytes, 32 * batch.count, "bytes")
        check_length("evicted_key_nbytes", out_nbytes.nbytes, batch.count, "bytes")
    names = None if named is None else named.tolist()
    found, carried, gone = run("table_reserve", handle, _reserve, batch, names, flags)
    for i, slot in enumerate(found):
        out_slots[i], out_generations[i] = slot, carried[i]
    for i, (key, nbytes) in enumerate(gone):
        out_keys[32 * i : 32 * i + 32] = key
        out_nbytes[i] = nbytes
    return len(gone)


def _reserve(
    call: Call, table: Table, batch: Keys, named: list[int] | None, flags: int
) -> tuple[list[int], list[int], list[tuple[bytes, int]]]:
    call.require(table, WRITER)
    call.require_flags(flags, c.KVR_RESERVE_EVICT | c.KVR_RESERVE_DUPLICATE)
    keys = batch.unpack(call)
    if named is not None:
        call.require_slots(table, named, end=table.capacity())
    call.take(table)
    while True:
        try:
            return _try_reserve(call, table, keys, named, flags)
        except ExpiredError:
            # From the beginning: nothing of what was found is so any more.
            if table.words[W_DIRTY]:
                table.rebuild(keep_writing=True)


def _try_reserve(
    call: Call, table: Table, keys: list[bytes], named: list[int] | None, flags: int
) -> tuple[list[int], list[int], list[tuple[bytes, int]]]:
    _sweep(call, table)
    entries, replaced = _plan(call, table, keys, named, bool(flags & c.KVR_RESERVE_DUPLICATE))
    words, keep = table.words, set(keys)
    # Where it holds more than its capacity became, that must not grow.
    room = max(words[W_FREE] - (table.slot_count - table.capacity()), 0)
    missing = 0 if named is not None else max(len(entries) - room, 0)
    if missing:
        may_evict = bool(flags & c.KVR_RESERVE_EVICT)
        if not may_evict or _evictable(call, table, keep, missing) < missing:
            values = (len(entries), room, _evictable(call, table, keep, table.slot_count))
            raise call.error(c.KVR_ERROR_NO_SPACE, c.KVR_DETAIL_NO_FREE_SLOT, *values)
    slots, generations = [-1] * len(keys), [0] * len(keys)
    freed: list[int] = []
    filled: list[int] = []
    words[W_DIRTY] = 1
    try:
        if replaced:
            gone = _replace(call, table, replaced, freed)
        else:
            gone = _evict(call, table, missing, keep, freed) if missing else []
        if len(gone) < missing:
            # Readers claimed blocks while a long batch let them have the lock.
            values = (len(entries), room, len(gone))
            raise call.error(c.KVR_ERROR_NO_SPACE, c.KVR_DETAIL_NO_FREE_SLOT, *values)
        for done, i in enumerate(entries):
            if done and not done % HOLD_SLOTS:
                call.walk_on(table, dirty=True)
            slot = words[W_FREE_HEAD] if named is None else named[i]
            filled.append(slot)
            generations[i] = table.fill(slot, keys[i])
            slots[i] = slot
        words[W_REPLACED if replaced else W_EVICTED] += len(gone)
        words[W_DIRTY] = 0
    except BaseException:
        _undo_reserve(table, freed, filled)
        raise
    return slots, generations, gone


def _plan(
    call: Call, table: Table, keys: list[bytes], named: list[int] | None, duplicate: bool
) -> tuple[list[int], list[int]]:
    """Find which entries need a slot, and which named slots hold a block; changes nothing."""
    rows = table.rows()
    entries: list[int] = []
    replaced: list[int] = []
    seen: set[bytes] = set()
    taken: set[int] = set()
    for i, key in enumerate(keys):
        if i and not i % HOLD_SLOTS:
            call.walk_on(table)
            rows = table.rows()
        if key in seen:
            continue
        seen.add(key)
        present, is_writing = table.look(key)
        if present >= 0 and not duplicate:
            continue
        if is_writing:
            raise call.error(c.KVR_ERROR_BUSY, c.KVR_DETAIL_KEY_RESERVED, i)
        if named is not None:
            slot = named[i]
            if slot in taken:
                raise call.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_SLOT_REPEATED, i, slot)
            taken.add(slot)
            state = table.state(slot)
            if state not in (FREE, SEALED) or (state == SEALED and table.is_claimed(slot, rows)):
                raise call.error(c.KVR_ERROR_BUSY, c.KVR_DETAIL_SLOT_BUSY, i, slot)
            if state == SEALED:
                replaced.append(slot)
        entries.append(i)
    return entries, replaced


def _replace(call: Call, table: Table, replaced: list[int], freed: list[int]) -> list[tuple[bytes, int]]:
    """Free the blocks that named slots hold, oldest first."""
    words, epoch = table.words, table.epoch()
    gone: list[tuple[bytes, int]] = []
    for done, slot in enumerate(sorted(replaced, key=lambda slot: (table.record_words[8 * slot + 5], slot))):
        if done and not done % HOLD_SLOTS:
            call.walk_on(table, dirty=True)
        if table.is_claimed(slot, table.rows()):
            # Only in a batch so long that others had the lock since it was planned.
            raise call.error(c.KVR_ERROR_BUSY, c.KVR_DETAIL_SLOT_BUSY, 0, slot)
        record = table.record(slot)
        freed.append(slot)
        table.free(slot)
        words[W_SEALED if table.record_halves[16 * slot + 12] == epoch else W_STALE] -= 1
        gone.append((record[:32], min(record[60], 32)))
    return gone


def _undo_reserve(table: Table, freed: list[int], filled: list[int]) -> None:
    """Take a reserve back that was cut short. Its records say FREE or SEALED again; the rest is left to a rebuild.

    The lock may be lost by now. One state byte is one store, and a session that lost its place touches nothing.
    """
    if not table.holds_place():
        return
    table.words[W_DIRTY] = 1
    states = table.record_bytes
    for slot in filled:
        if 0 <= slot < table.slot_count and table.state(slot) == WRITING:
            states[64 * slot + RECORD_STATE] = FREE
            table.record_halves[16 * slot + 12] = 0
    epoch = table.epoch()
    for slot in freed:
        # What was not yet filled anew is still whole.
        if table.state(slot) == FREE and table.is_content(table.record(slot)[:RECORD_STATE] + bytes([SEALED]), epoch):
            states[64 * slot + RECORD_STATE] = SEALED


def table_commit(table: Any, slots: Any, generations: Any, flags: Any) -> None:
    handle = _status.as_integer(table, "table")
    slots, generations = int64_view(slots, "slots"), int64_view(generations, "generations")
    flags = _status.as_integer(flags, "flags", *UINT32)
    check_length("generations", len(generations), len(slots), "entries")
    run("table_commit", handle, commit_slots, slots.tolist(), generations.tolist(), flags)


def commit_slots(
    call: Call, table: Table, slots: list[int], generations: list[int], flags: int, own_count: int = 0
) -> None:
    """Seal reserved slots that nobody else writes into: at most `own_count` operations own each."""
    call.require(table, WRITER)
    call.require_flags(flags, c.KVR_COMMIT_CHECKSUM)
    call.require_slots(table, slots, allow_none=True)
    seen: set[int] = set()
    entries: list[int] = []
    for i, slot in enumerate(slots):
        if slot == -1:
            continue
        if slot in seen:
            raise call.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_SLOT_REPEATED, i, slot)
        seen.add(slot)
        entries.append(i)
    # Before a CRC is taken of what is still written, and again under the lock.
    check_still(call, table, slots, generations, own_count)
    has_crc = c.KVR_RECORD_HAS_DATA_CRC if flags & c.KVR_COMMIT_CHECKSUM else 0
    crcs = table.data_crcs([slots[i] for i in entries], call.name) if has_crc else [0] * len(entries)
    call.take(table)
    for done, i in enumerate(entries):
        if done and not done % HOLD_SLOTS:
            call.breathe(table)
        _check_generation(call, table, i, slots[i], generations[i])
        state = table.state(slots[i])
        if state != WRITING:
            raise call.error(c.KVR_ERROR_STALE_BLOCK, c.KVR_DETAIL_SLOT_STATE, i, slots[i], state, WRITING)
        _check_epoch(call, table, i, slots[i])
    check_still(call, table, slots, generations, own_count)
    if len(entries) > HOLD_SLOTS:
        call.breathe(table)
    words, memory = table.words, table.memory
    stamp, epoch = table.last_stamp(), table.epoch()
    if len(entries) > HOLD_SLOTS:
        _check_epoch(call, table, entries[0], slots[entries[0]])
    for done, i in enumerate(entries):
        if done and not done % HOLD_SLOTS:
            if call.breathe(table):
                # What was sealed of this batch is no content any more either.
                _check_epoch(call, table, i, slots[i])
            stamp, epoch = table.last_stamp(), table.epoch()
        slot = slots[i]
        start = table.record_offset + 64 * slot
        stamp = min(stamp + 1, STAMP_MAX)
        words[W_DIRTY] = 1
        words[W_CLOCK] = stamp
        table.record_words[8 * slot + 5] = stamp
        SEAL.pack_into(memory, start + 48, epoch, crcs[done])
        table.record_bytes[64 * slot + 61] = has_crc
        U32.pack_into(memory, start + 56, record_crc(table.record(slot)))
        table.recency_append(slot)
        words[W_WRITING] -= 1
        words[W_SEALED] += 1
        words[W_STORED] += 1
        table.record_bytes[64 * slot + RECORD_STATE] = SEALED
        words[W_DIRTY] = 0


def table_abort(table: Any, slots: Any, generations: Any) -> int:
    handle = _status.as_integer(table, "table")
    slots, generations = int64_view(slots, "slots"), int64_view(generations, "generations")
    check_length("generations", len(generations), len(slots), "entries")
    return run("table_abort", handle, abort_slots, slots.tolist(), generations.tolist())  # type: ignore[no-any-return]


def abort_slots(call: Call, table: Table, slots: list[int], generations: list[int]) -> int:
    """Free reserved slots, those that operations write into when these have ended; return how many were freed now."""
    call.require(table, WRITER)
    call.require_slots(table, slots, allow_none=True)
    call.take(table)
    freed = 0
    for i, slot in enumerate(slots):
        if i and not i % HOLD_SLOTS:
            call.breathe(table)
        if slot == -1 or table.state(slot) != WRITING or table.record_words[8 * slot + 4] != generations[i]:
            continue
        if slot in table.given_up:
            continue
        # Said before it is looked: an operation that ends now sees the one, or this the other.
        table.given_up[slot] = None
        if not table.owner_count(slot):
            table.free_reserved(slot)
            del table.given_up[slot]
            freed += 1
    return freed


def table_evict(table: Any, evict_count: Any, keys: Any, key_stride: Any, key_nbytes: Any) -> int:
    handle = _status.as_integer(table, "table")
    evict_count = _status.as_integer(evict_count, "evict_count")
    batch = Keys(keys, key_stride, key_nbytes)
    batch.check_length()
    return run("table_evict", handle, _evict_call, evict_count, batch)  # type: ignore[no-any-return]


def _evict_call(call: Call, table: Table, count: int, batch: Keys) -> int:
    call.require(table, WRITER)
    keep = set(batch.unpack(call))
    if count < 0:
        raise call.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_COUNT_RANGE, count, INT64_MAX)
    call.take(table)
    _sweep(call, table)
    if not count:
        return 0
    freed: list[int] = []
    table.words[W_DIRTY] = 1
    try:
        with contextlib.suppress(ExpiredError):  # nothing is left to be evicted
            _evict(call, table, count, keep, freed)
    finally:
        # What went has gone, also if the rest was cut short.
        if table.holds_place():
            table.words[W_EVICTED] += len(freed)
    table.words[W_DIRTY] = 0
    return len(freed)


def table_clear(table: Any) -> tuple[int, int]:
    return run("table_clear", _status.as_integer(table, "table"), _clear)  # type: ignore[no-any-return]


def _clear(call: Call, table: Table) -> tuple[int, int]:
    call.require(table, WRITER)
    call.take(table)
    _sweep(call, table)
    words, old, rows = table.words, table.epoch(), table.rows()
    content = words[W_SEALED]
    words[W_DIRTY] = 1
    table.next_epoch()
    words[W_STALE] += words[W_SEALED]
    words[W_SEALED] = 0
    removed = kept = 0
    slot = words[W_OLDEST]
    for step in range(1, table.slot_count + 1):
        if not 0 <= slot < table.slot_count:
            break
        if not step % HOLD_SLOTS:
            if call.breathe(table, dirty=True):
                # A rebuild has freed what nobody claims.
                kept = min(words[W_STALE], content)
                removed = content - kept
                break
            rows = table.rows()
        following = table.links[4 * slot + 2]
        if table.record_halves[16 * slot + 12] == old:
            if table.is_claimed(slot, rows):
                kept += 1
            else:
                table.free(slot)
                words[W_STALE] -= 1
                removed += 1
        slot = following
    words[W_CLEARED] += removed + kept
    words[W_DIRTY] = 0
    return removed, kept


def table_invalidate(table: Any, slots: Any, generations: Any) -> int:
    handle = _status.as_integer(table, "table")
    slots, generations = int64_view(slots, "slots"), int64_view(generations, "generations")
    check_length("generations", len(generations), len(slots), "entries")
    return run("table_invalidate", handle, _invalidate, slots.tolist(), generations.tolist())  # type: ignore[no-any-return]


def _invalidate(call: Call, table: Table, slots: list[int], generations: list[int]) -> int:
    call.require(table, WRITER)
    call.require_slots(table, slots)
    call.take(table)
    words, epoch, rows = table.words, table.epoch(), table.rows()
    count = 0
    for i, slot in enumerate(slots):
        if i and not i % HOLD_SLOTS:
            call.breathe(table)
            epoch, rows = table.epoch(), table.rows()
        if (
            table.state(slot) != SEALED
            or table.record_words[8 * slot + 4] != generations[i]
            or table.record_halves[16 * slot + 12] != epoch
        ):
            continue
        words[W_DIRTY] = 1
        table.forget(slot)
        count += 1
        words[W_SEALED] -= 1
        words[W_CORRUPT] += 1
        if table.is_claimed(slot, rows):
            words[W_STALE] += 1
            table.recency_remove(slot)
            table.recency_insert(slot, -1)
        else:
            table.free(slot)
        words[W_DIRTY] = 0
    return count
