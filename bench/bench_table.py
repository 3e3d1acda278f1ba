"""Calls on a part, against one uncontended lock and unlock of a POSIX record lock, which each of them contains."""

from __future__ import annotations

import contextlib
import fcntl
import os

import numpy as np
import pytest
from conftest import median_seconds

SLOTS, BATCH, WRITER, KEEPER = 30000, 24, 2, 3


@contextlib.contextmanager
def part(backend, slots=SLOTS):
    """A part of this process alone: yields (table handle, keys of all blocks); every slot is sealed."""
    layout = backend.table_layout(slots, 0)
    table_region = backend.host_allocate(layout.table_nbytes, 1, "kvreuse-bench", None).handle
    claims_region = backend.host_allocate(layout.claims_nbytes, 1, "kvreuse-bench", None).handle
    lock = backend.host_allocate(4096, 1, "kvreuse-bench", None).handle
    backend.table_create(table_region, claims_region, bytes(16), slots, 4096, 1, b"")
    keeper = backend.table_open(table_region, claims_region, backend.region_export(lock), KEEPER, 0, -1, 10**9)
    backend.table_set_state(keeper, 1)
    backend.table_admit(keeper, 0, 7, WRITER)
    table = backend.table_open(table_region, claims_region, backend.region_export(lock), WRITER, 7, 0, 10**9)
    keys = np.random.default_rng(1).integers(0, 256, (slots, 16), np.uint8)
    reserve_commit(backend, table, keys, 0)
    yield table, keys
    for handle in (table, keeper):
        backend.table_close(handle)
    for handle in (table_region, claims_region, lock):
        backend.region_close(handle)


def reserve_commit(backend, table, keys, flags):
    n = len(keys)
    slots, generations = np.empty(n, np.int64), np.empty(n, np.int64)
    evicted, sizes = np.empty(32 * n, np.uint8), np.empty(n, np.uint8)
    count = backend.table_reserve(table, keys, 16, None, None, flags, slots, generations, evicted, sizes)
    backend.table_commit(table, slots, generations, 0)
    return count


def operations(backend, table, keys):
    """Operation name -> a call on one batch of present keys, or of new ones that evict as many."""
    batch = np.ascontiguousarray(keys[:BATCH])
    slots, generations = np.empty(BATCH, np.int64), np.empty(BATCH, np.int64)
    fresh = np.zeros((BATCH, 16), np.uint8)
    counter = iter(range(1 << 40))

    def claim_release():
        count = backend.table_claim(table, batch, 16, None, slots, generations)
        backend.table_release(table, slots[:count])

    def store():
        fresh.view(np.uint64)[:, 0] = next(counter)
        fresh.view(np.uint64)[:, 1] = np.arange(BATCH)
        reserve_commit(backend, table, fresh, 1)

    return {
        "match": lambda: backend.table_match(table, batch, 16, None),
        "claim_release": claim_release,
        "touch": lambda: backend.table_touch(table, batch, 16, None),
        "reserve_evict_commit": store,
    }


@pytest.mark.parametrize("operation", ["match", "claim_release", "touch", "reserve_evict_commit"])
@pytest.mark.benchmark(group="part, 24 keys")
def test_operation(benchmark, backend, operation):
    with part(backend) as (table, keys):
        assert backend.table_match(table, keys[:BATCH], 16, None) == BATCH
        benchmark(operations(backend, table, keys)[operation])


@contextlib.contextmanager
def lock_pair():
    fd = os.memfd_create("kvreuse-bench")
    os.truncate(fd, 4096)

    def pair():
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        fcntl.lockf(fd, fcntl.LOCK_UN, 1)

    yield pair
    os.close(fd)


@pytest.mark.benchmark(group="part, 24 keys")
def test_floor_lock_pair(benchmark):
    with lock_pair() as pair:
        benchmark(pair)


@pytest.mark.gate
@pytest.mark.parametrize(
    ("operation", "locks", "bound"), [("match", 1, 2.5), ("claim_release", 2, 2.5), ("touch", 1, 3.0)]
)
def test_core_call_is_near_its_lock(operation, locks, bound):
    """A batch of 24 keys costs at most `bound` times the locks that it takes."""
    core = pytest.importorskip("kvreuse._core")
    with part(core) as (table, keys), lock_pair() as pair:
        call = median_seconds(operations(core, table, keys)[operation])
        floor = median_seconds(pair) * locks
    assert call <= bound * floor, f"{operation} {call * 1e6:.2f} us, locks {floor * 1e6:.2f} us"
