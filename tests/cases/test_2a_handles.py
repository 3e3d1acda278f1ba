"""Cases C10, E4, E6, E13 and G4: regions, mappings and their handles, on both backends."""

from __future__ import annotations

import inspect
import os
import random
import threading
from array import array
from collections import deque

import pytest

from kvreuse import _api, errors

PAGE = os.sysconf("SC_PAGESIZE")
NONE, POSIX_FD = 0, 1
READ, READ_WRITE = 1, 3


def run_ok(run_python, backend_name, code) -> None:
    """Run code on the public layer over one backend: it ends well, and warns and prints nothing."""
    start = "import os, gc, warnings; import kvreuse; from kvreuse import errors; warnings.simplefilter('error')\n"
    code = "def refused(kind, call, *arguments):\n    try:\n        call(*arguments)\n    except kind as error:\n" + (
        "        return error\n    raise AssertionError(f'no {kind.__name__}')\n" + code
    )
    done = run_python(start + f"assert kvreuse.backend == '{backend_name}'\n" + code, backend=backend_name)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- C10, E6 ----


def test_c10_one_region_mapped_twice(backend_name, run_python):
    """C10: two mappings of a region show the same bytes and count 2; each is unmapped once, then HandleClosedError."""
    run_ok(
        run_python,
        backend_name,
        """
with kvreuse.open_provider("host").allocate(10_000) as region:
    a, b = region.map(), region.map(kvreuse.Access.READ)
    assert a.address != b.address
    with a.buffer as view:
        view[9_999] = 7
    with b.buffer as view:
        assert view.readonly and view[9_999] == 7 and len(view) == 10_000
    assert region.observe().mapping_count == 2
    from kvreuse._select import backend
    assert backend.region_info(region.handle).mapping_count == 2
    a.unmap()
    assert region.observe().mapping_count == 1
    b.unmap()
    assert region.observe().mapping_count == 0
    for mapping in (a, b):
        assert "Mapping is closed" in str(refused(errors.HandleClosedError, mapping.unmap))
        assert refused(errors.HandleClosedError, lambda: mapping.buffer).status == -3
        assert refused(errors.HandleClosedError, lambda: mapping.address).name == "HANDLE_CLOSED"
assert backend.handle_counts() == (0, 0, 0, 0, 0)
""",
    )


def test_e6_order_of_unmap_close_and_finalizer(backend_name, run_python):
    """E6: unmap twice, map twice, close while mapped, close, finalizer; after an error the next good call succeeds."""
    run_ok(
        run_python,
        backend_name,
        """
region = kvreuse.open_provider("host").allocate(4096)
first = region.map()
first.unmap()
refused(errors.HandleClosedError, first.unmap)
first.close()  # close() is idempotent, unmap() is not
one, two = region.map(), region.map()
assert one.address != two.address, "each map is a mapping of its own"
refused(errors.BusyError, region.close)
assert not region.closed
assert region.observe().observed_nbytes == 4096, "after an error the next good call works"
one.close()
assert "1 mapping(s)" in str(refused(errors.BusyError, region.close))
view = two.buffer
refused(errors.BusyError, two.close)
refused(errors.BusyError, two.unmap)
view[0] = 1
view.release()
two.close()
region.close()
region.close()
refused(errors.HandleClosedError, region.map)
del region, first, one, two
gc.collect()
from kvreuse._select import backend
assert backend.handle_counts() == (0, 0, 0, 0, 0)
""",
    )


# ---- E4 ----


def test_e4_sparse_region_of_5_gib(backend, no_leaks):
    """E4, H7: bytes around 4 GiB are where they were put; only touched pages take memory. A region is mapped whole:
    no call takes an offset that could miss a page (flags in its place are a RangeError).
    """
    gib = 1 << 30
    places = {4 * gib - 65536: 1, 4 * gib - 1: 2, 4 * gib: 3, 4 * gib + 4096: 4, 5 * gib - 1: 5, 0: 6}
    region = backend.host_allocate(5 * gib, POSIX_FD, "kvreuse-sparse", None)
    with pytest.raises(errors.RangeError):
        backend.region_map(region.handle, READ, 4097)
    mapping = backend.region_map(region.handle, READ_WRITE, 0)
    assert mapping.nbytes == 5 * gib
    with memoryview(backend.mapping_buffer(mapping.handle)) as view:
        assert len(view) == 5 * gib
        for place, byte in places.items():
            view[place] = byte
    fd = backend.region_export(region.handle)
    again = backend.region_import(
        fd, region.nbytes, region.physical_nbytes, region.region_id, region.device, region.inode, 0
    )
    other = backend.region_map(again.handle, READ, 0)
    with memoryview(backend.mapping_buffer(other.handle)) as view:
        assert {place: view[place] for place in places} == places
        assert view[1] == view[4 * gib + 1] == view[4 * gib - 2] == 0
    for place, byte in places.items():
        assert os.pread(fd, 1, place) == bytes([byte])
    seen = backend.region_observe(again.handle)
    assert (seen.file_nbytes, seen.allocated_nbytes < 64 * PAGE) == (5 * gib, True)
    os.close(fd)
    for handle in (mapping.handle, other.handle):
        backend.mapping_unmap(handle)
    for handle in (region.handle, again.handle):
        backend.region_close(handle)


# ---- E13 ----

HANDLES = ("region", "mapping", "table", "table_region", "claims_region", "queue", "operation")
OTHERS = {
    "access": READ,
    "block_nbytes": 4096,
    "delta": 1,
    "device_id": 0,
    "device_type": 1,
    "direction": 1,
    "evict_count": 1,
    "fault": 0,
    "first_slot": 0,
    "flags": 0,
    "index": 0,
    "is_versioned": False,
    "key_nbytes": None,
    "key_stride": 8,
    "lock_fd": -1,
    "lock_wait_ns": 0,
    "named_slots": None,
    "part_id": bytes(16),
    "region_count": 1,
    "role": 1,
    "row": 0,
    "session": 1,
    "slot_count": 1,
    "state": 1,
    "unready": 1,
    "capacity": 1,
    "period_ns": 1_000_000,
    "value": 0,
    "wait_ns": 0,
}
BUFFERS = {
    "after": array("q"),
    "destination": array("q", [0] * 5),
    "destination_offsets": array("q", [0]),
    "engine_blocks": array("q", [0]),
    "evicted_key_nbytes": bytearray(1),
    "evicted_keys": bytearray(32),
    "generations": array("q", [0]),
    "keys": bytes(8),
    "lengths": array("q", [0]),
    "manifest": b"m",
    "mappings": array("q", [0]),
    "nodes": array("q", [0]),
    "operations": array("q", [0]),
    "segments": array("q", [0] * 9),
    "slots": array("q", [0]),
    "source": array("q", [0] * 5),
    "source_offsets": array("q", [0]),
    "verdicts": bytearray(1),
}
INVENTORY = {"keys": bytearray(32), "key_nbytes": bytearray(1)}
CALLS = [
    name
    for name in _api.FUNCTIONS
    if name != "table_layout" and set(inspect.signature(getattr(_api.Backend, name)).parameters) & set(HANDLES)
]


def arguments(name: str) -> tuple[list, list[int]]:
    """Good arguments of a call, and which of them are handles."""
    names = list(inspect.signature(getattr(_api.Backend, name)).parameters)[1:]
    given = OTHERS | BUFFERS | (INVENTORY if name == "table_inventory" else {}) | dict.fromkeys(HANDLES, 1)
    return [given[n] for n in names], [i for i, n in enumerate(names) if n in HANDLES]


def test_e13_every_call_with_a_handle_is_there():
    """E13: the list of calls below is the contract's own."""
    assert len(CALLS) >= 35
    assert {"region_export", "mapping_unmap", "table_open", "table_bind", "table_inventory"} <= set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_e13_no_number_is_taken_for_a_handle(backend, name, no_leaks):
    """E13, H2, H7: None, floats, 0, -1 and 10 000 random int64 in each place of each call: a clear error, no crash,
    nothing made, and the handles that are open go on working.
    """
    call = getattr(backend, name)
    given, places = arguments(name)
    region = backend.host_allocate(PAGE, POSIX_FD, "kvreuse-e13", None)
    mapping = backend.region_map(region.handle, READ_WRITE, 0)
    valid = {"region": region.handle, "mapping": mapping.handle}
    before = backend.handle_counts()
    random_numbers = random.Random(13)
    numbers = [0, -1, 1, 2**31, 2**32, 2**32 - 1, 2**63 - 1, -(2**63)]
    for handle in valid.values():
        numbers += [-handle, handle + 1, handle + 2**32, handle ^ 2**62, handle & 0xFFFFFFFF]
    numbers = [n for n in numbers if n not in valid.values()]
    numbers += [random_numbers.randrange(-(2**63), 2**63) for _ in range(10_000 // len(places))]
    expected = (errors.InvalidHandleError, errors.StaleHandleError)
    for place in places:
        values = list(given)
        # The others are good ones, so that it is this one that is refused.
        for other in places:
            values[other] = valid["mapping"] if name == "table_bind" and other == 2 else valid["region"]
        for wrong in (None, 1.5, True, "1", b"", object()):
            values[place] = wrong
            with pytest.raises(TypeError):
                call(*values)
        for wrong in (2**63, -(2**63) - 1):
            values[place] = wrong
            with pytest.raises(errors.RangeError):
                call(*values)
        for wrong in numbers:
            values[place] = wrong
            try:
                call(*values)
            except expected:
                continue
            raise AssertionError(f"{name} took {wrong} for a handle")
    assert backend.handle_counts() == before
    assert backend.region_info(region.handle).mapping_count == 1
    backend.mapping_unmap(mapping.handle)
    backend.region_close(region.handle)


def test_e13_kind_none_is_not_exportable(backend, backend_name, run_python, no_leaks):
    """E13, H3: allocated with NONE: export is NotSupportedError on both layers; everything else works."""
    region = backend.host_allocate(PAGE, NONE, "kvreuse-none", None)
    with pytest.raises(errors.NotSupportedError, match="NONE"):
        backend.region_export(region.handle)
    mapping = backend.region_map(region.handle, READ_WRITE, 0)
    backend.mapping_unmap(mapping.handle)
    backend.region_close(region.handle)
    run_ok(
        run_python,
        backend_name,
        """
with kvreuse.open_provider("host").allocate(1, kind=kvreuse.HandleKind.NONE) as region:
    assert "NONE" in str(refused(errors.NotSupportedError, region.export))
    region.map().close()
""",
    )


# ---- G4 ----

THREADS, ROUNDS = 8, 10_000


def test_g4_threads_allocate_and_close_each_others_handles(backend, no_leaks):
    """G4, H2: 8 threads x 10 000 allocate/close over one pool of handles: no handle is given out twice, nothing is
    lost, the counts balance.
    """
    before = backend.handle_counts()
    pool: deque[int] = deque()
    seen: list[set[int]] = [set() for _ in range(THREADS)]
    failures: list[BaseException] = []
    start = threading.Barrier(THREADS, timeout=30)

    def work(handles: set[int]) -> None:
        try:
            start.wait()
            for _ in range(ROUNDS):
                handle = backend.host_allocate(1, POSIX_FD, "kvreuse-g4", None).handle
                handles.add(handle)
                pool.append(handle)
                backend.region_close(pool.popleft())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(handles,)) for handles in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    assert not pool
    assert len(set().union(*seen)) == THREADS * ROUNDS
    assert backend.handle_counts() == before
