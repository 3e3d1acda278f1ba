"""Provider, Region, Mapping, SharedHandle: what they say, refuse and own (contract/test_records.py: the record)."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import socket
import warnings

import numpy as np
import pytest

import kvreuse
from kvreuse import Access, HandleKind, SharedHandle, errors, handles, observation

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def module(backend, monkeypatch):
    """The backend that this test's objects work on: everything is given back, whatever the test did."""
    monkeypatch.setattr(handles, "_backend", backend)
    monkeypatch.setattr(observation, "_backend", backend)
    before = backend.handle_counts(), len(os.listdir("/proc/self/fd"))
    yield backend
    # What is dropped has to be closed by the backend that made it.
    if (backend.handle_counts(), len(os.listdir("/proc/self/fd"))) != before:
        gc.collect()
    assert (backend.handle_counts(), len(os.listdir("/proc/self/fd"))) == before


@pytest.fixture
def provider(module):
    return kvreuse.open_provider("host")


@pytest.fixture
def region(provider):
    with provider.allocate(PAGE + 1) as region:
        yield region


def write(region, data: bytes) -> None:
    with region.map() as mapping, mapping.buffer as view:
        view[: len(data)] = data


def read(region, count: int) -> bytes:
    with region.map(Access.READ) as mapping, mapping.buffer as view:
        return bytes(view[:count])


# ---- providers ----


@pytest.mark.parametrize("name", ["", "Host", "host:0", "cuda", "cuda:", "cuda:x", "cuda:-1", "shm"])
def test_unknown_providers_are_refused_by_name(name):
    with pytest.raises(errors.NotSupportedError, match='expected "host" or "cuda:N"') as caught:
        kvreuse.open_provider(name)
    assert repr(name) in str(caught.value)


def test_capabilities_are_tried(provider):
    """H10: each kind has an answer and a reason; host memory has no fabric."""
    found = provider.capabilities()
    assert {kind: capability.ok for kind, capability in found.items()} == {
        HandleKind.NONE: True,
        HandleKind.POSIX_FD: True,
        HandleKind.FABRIC: False,
    }
    assert all(capability.reason for capability in found.values())
    assert "FABRIC" in found[HandleKind.FABRIC].reason


def test_a_capability_that_does_not_read_back_is_false(provider, monkeypatch):
    """H10: other bytes than were written are no capability."""
    with provider.allocate(PAGE) as other:
        monkeypatch.setattr(handles.Provider, "import_region", lambda self, shared: _reopened(self, other))
        found = provider._trial(HandleKind.POSIX_FD)
    assert not found.ok
    assert "other bytes" in found.reason


def _reopened(provider, region):
    with region.export() as shared:
        info = handles._backend.region_import(
            shared.fileno(),
            shared.nbytes,
            shared.physical_nbytes,
            shared.region_id,
            shared.device,
            shared.inode,
            0,
        )
    return handles.Region(provider.name, info.handle, {})


def test_cuda_is_refused_with_its_reason_at_each_call(backend_name, run_python, tmp_path):
    """E10, C2: nothing is left behind where libcuda.so.1 cannot be loaded."""
    (tmp_path / "libcuda.so.1").write_text("no library")
    code = (
        "import os, kvreuse\n"
        "cuda = kvreuse.open_provider('cuda:0')\n"
        "with kvreuse.open_provider('host').allocate(1) as region, region.export() as shared:\n"
        "    shared.provider = 'cuda:1'\n"
        "    fds = len(os.listdir('/proc/self/fd'))\n"
        "    for call in (lambda: cuda.allocate(1), lambda: cuda.import_region(shared), cuda.features):\n"
        "        try: call()\n"
        "        except kvreuse.NotSupportedError as error: print(error)\n"
        "    print(*sorted({capability.reason for capability in cuda.capabilities().values()}), sep='\\n')\n"
        "    assert len(os.listdir('/proc/self/fd')) == fds\n"
    )
    done = run_python(code, env={"LD_LIBRARY_PATH": str(tmp_path)}, backend=backend_name)
    lines = done.stdout.splitlines()
    assert len(lines) == 5, done.stderr
    assert all(line.startswith("libcuda.so.1 cannot be loaded: ") for line in lines[:4]), lines
    assert lines[4].startswith(("not tried", "libcuda.so.1"))


# ---- allocation ----


def test_sizes_are_as_asked_and_in_pages(provider):
    for nbytes in (1, PAGE - 1, PAGE, PAGE + 1):
        with provider.allocate(nbytes) as region:
            assert region.nbytes == nbytes
            assert region.physical_nbytes == -(-nbytes // PAGE) * PAGE
            assert (region.provider, region.kind, len(region.region_id)) == ("host", HandleKind.POSIX_FD, 16)
            assert read(region, nbytes) == bytes(nbytes)


@pytest.mark.parametrize("nbytes", [0, -1, -(2**63), 2**63 - 1, 2**63])
def test_sizes_out_of_range_are_refused(provider, nbytes):
    """E2, H7"""
    with pytest.raises(errors.RangeError, match=str(nbytes)):
        provider.allocate(nbytes)


@pytest.mark.parametrize("nbytes", [None, 1.0, True, "4096"])
def test_sizes_that_are_no_integers_are_refused(provider, nbytes):
    """H7"""
    with pytest.raises(TypeError, match="nbytes"):
        provider.allocate(nbytes)


@pytest.mark.parametrize(("kind", "error"), [(2, errors.RangeError), (-1, errors.RangeError), (True, TypeError),
                                             ("posix_fd", TypeError), (None, TypeError)])  # fmt: skip
def test_kinds_are_the_three(provider, kind, error):
    """H7"""
    with pytest.raises(error):
        provider.allocate(1, kind=kind)
    with pytest.raises(error):
        provider.allocate(1, fallback=(kind,))


def test_fabric_falls_back_only_where_it_is_told_to(provider):
    """E8: the reason for the weaker kind stays with the region."""
    with pytest.raises(errors.NotSupportedError, match="FABRIC"):
        provider.allocate(1, kind=HandleKind.FABRIC)
    with pytest.raises(errors.NotSupportedError, match="FABRIC"):
        provider.allocate(1, kind=HandleKind.FABRIC, fallback=(HandleKind.FABRIC,))
    with provider.allocate(1, kind=HandleKind.FABRIC, fallback=(HandleKind.POSIX_FD, HandleKind.NONE)) as region:
        assert region.kind is HandleKind.POSIX_FD
        assert "FABRIC was not granted" in region.observe().reasons["kind"]
    with provider.allocate(1, fallback=(HandleKind.NONE,)) as region:
        assert region.kind is HandleKind.POSIX_FD
        assert "kind" not in region.observe().reasons


def test_kind_none_works_but_is_not_shared(provider):
    """H3"""
    with provider.allocate(8, kind=HandleKind.NONE) as region:
        write(region, b"12345678")
        assert read(region, 8) == b"12345678"
        with pytest.raises(errors.NotSupportedError, match="NONE"):
            region.export()


# ---- sharing ----


def test_an_import_is_the_same_memory(provider, region):
    """H4: same id and bytes, a handle of its own; closing one leaves the other."""
    with region.export() as shared, provider.import_region(shared) as imported:
        assert imported.handle != region.handle
        assert (imported.region_id, imported.nbytes, imported.physical_nbytes) == (
            region.region_id,
            region.nbytes,
            region.physical_nbytes,
        )
        shared.close()
        write(imported, b"from there")
        assert read(region, 10) == b"from there"
        imported.close()
        assert read(region, 10) == b"from there"


def test_memory_outlives_the_region_that_made_it(provider):
    """A2's rule: an exported fd pins the memory."""
    with provider.allocate(4) as region:
        write(region, b"kept")
        shared = region.export()
    with shared, provider.import_region(shared) as imported:
        assert read(imported, 4) == b"kept"


def test_a_record_goes_through_bytes_and_a_socket(provider, region):
    """H3"""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right, region.export() as shared:
        record = shared.to_bytes()
        assert len(record) == handles.RECORD_NBYTES == 148
        with SharedHandle.from_bytes(record, os.dup(shared.fileno())) as again:
            assert again.to_bytes() == record
        shared.send(left)
        with SharedHandle.recv(right) as got, provider.import_region(got) as imported:
            assert got.to_bytes() == record
            assert got.fileno() != shared.fileno()
            assert not os.get_inheritable(got.fileno())
            assert imported.region_id == region.region_id


def test_the_payload_is_the_fd_while_it_is_open(region):
    """H3: a C int in this machine's order; closed, it is an error and no number."""
    with region.export() as shared:
        assert np.frombuffer(shared.payload, np.intc).tolist() == [shared.fileno()]
    shared.close()
    for call in (shared.fileno, lambda: shared.payload):
        with pytest.raises(errors.InvalidHandleError, match="has no fd"):
            call()
    assert len(shared.to_bytes()) == 148
    assert "fd -1" in repr(shared)


def test_handles_do_not_pickle(region):
    """H2: a number of this process means nothing in another."""
    with region.export() as shared:
        for call in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=r"send\(\) and recv\(\)"):
                call(shared)


def test_a_closed_record_is_not_imported_or_sent(provider, region):
    """H2"""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    shared = region.export()
    shared.close()
    with left, right:
        with pytest.raises(errors.InvalidHandleError):
            shared.send(left)
        with pytest.raises(errors.InvalidHandleError):
            provider.import_region(shared)
        right.setblocking(False)
        with pytest.raises(BlockingIOError):
            right.recv(1)


def test_what_is_of_another_provider_is_not_imported(provider, region):
    """C2"""
    with region.export() as shared:
        shared.provider = "cuda:0"
        with pytest.raises(errors.IncompatibleError) as caught:
            provider.import_region(shared)
        assert caught.value.fields == {"provider": ("host", "cuda:0")}
        shared.provider, shared.kind = "host", HandleKind.NONE
        with pytest.raises(errors.NotSupportedError, match="imports POSIX_FD"):
            provider.import_region(shared)


# ---- mappings and their views ----


def test_access_is_kept(region):
    with region.map(Access.READ) as mapping, mapping.buffer as view:
        assert (mapping.access, mapping.nbytes, mapping.region) == (Access.READ, PAGE + 1, region)
        assert view.readonly
        with pytest.raises(TypeError):
            view[0] = 1
        assert not np.frombuffer(view, np.uint8).flags.writeable
    with region.map() as mapping, mapping.buffer as view:
        assert mapping.access is Access.READ_WRITE
        assert not view.readonly
        assert (view.format, view.ndim, view.shape) == ("B", 1, (PAGE + 1,))


@pytest.mark.parametrize(("access", "error"), [(0, errors.RangeError), (2, errors.RangeError), (4, errors.RangeError),
                                               (True, TypeError), (None, TypeError)])  # fmt: skip
def test_access_is_read_or_read_write(region, access, error):
    """H7"""
    with pytest.raises(error):
        region.map(access)


def test_a_numpy_array_keeps_its_mapping(region):
    """H5: no copy, and no unmapping under it."""
    mapping = region.map()
    array = np.frombuffer(mapping.buffer, np.uint8)
    array[:3] = (1, 2, 3)
    assert array.ctypes.data == mapping.address
    part = array[1:3]
    del array
    for call in (mapping.close, mapping.unmap):
        with pytest.raises(errors.BusyError):
            call()
    assert not mapping.closed
    assert part.tolist() == [2, 3]
    del part
    mapping.unmap()
    with pytest.raises(errors.HandleClosedError, match="Mapping is closed"):
        mapping.unmap()
    assert read(region, 3) == b"\1\2\3"


def test_a_mapping_that_was_dropped_lives_while_its_array_does(region):
    """H5: the array's owner is the backend's buffer; the handle can be unmapped once it is gone."""
    made = [region.map()]
    handle = made[0].handle
    array = np.frombuffer(made[0].buffer, np.uint8)
    with pytest.warns(ResourceWarning, match="was dropped and cannot be closed"):
        made.clear()
    array[0] = 9
    assert array[0] == 9
    del array
    handles._backend.mapping_unmap(handle)


# ---- lifetime ----


def test_closed_things_say_so(provider):
    region = provider.allocate(1)
    mapping = region.map()
    with pytest.raises(errors.BusyError, match=r"1 mapping\(s\)"):
        region.close()
    mapping.close()
    mapping.close()
    region.close()
    region.close()
    assert region.closed
    assert mapping.closed
    calls = [region.map, region.export, region.observe, region.__enter__, lambda: region.handle]
    calls += [mapping.unmap, mapping.__enter__, lambda: mapping.buffer, lambda: mapping.address]
    for call in calls:
        with pytest.raises(errors.HandleClosedError, match="is closed"):
            call()
    # What was declared can be read on.
    assert (region.nbytes, mapping.nbytes) == (1, 1)


def test_what_is_dropped_is_closed_with_a_warning(provider, region):
    """H6: nothing is left behind, and nothing is silent."""
    for make in (lambda: provider.allocate(1), region.map, region.export):
        with pytest.warns(ResourceWarning, match="was dropped without close"):
            make()


def test_what_was_closed_is_dropped_in_silence(provider):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        region = provider.allocate(1)
        mapping, shared = region.map(), region.export()
        for thing in (shared, mapping, region):
            thing.close()
        del thing, shared, mapping, region
        gc.collect()


def test_an_error_in_a_context_is_not_hidden_by_close(region):
    """The error of the body comes through, that of close() is a note on it."""
    mapping, views = region.map(), []

    def body():
        with mapping:
            views.append(mapping.buffer)
            raise ValueError("body")

    with pytest.raises(ValueError, match="body") as caught:
        body()
    if hasattr(caught.value, "add_note"):  # Python 3.11
        assert "closing the Mapping failed too" in caught.value.__notes__[0]
    with pytest.raises(errors.BusyError), mapping:
        pass
    views.pop().release()
    mapping.close()


def test_a_fork_uses_and_closes_nothing_of_its_parent(run_python, backend_name):
    """H2: ForkedError in the child, which closes nothing; the parent's handles work on."""
    code = """
import os
import kvreuse
region = kvreuse.open_provider("host").allocate(4096)
mapping, shared = region.map(), region.export()
child = os.fork()
if not child:
    refused = 0
    for call in (region.map, region.export, region.close, mapping.unmap, lambda: mapping.buffer, shared.fileno):
        try:
            call()
        except kvreuse.ForkedError:
            refused += 1
    shared.close()
    del region, mapping, shared
    os._exit(refused)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
os.fstat(shared.fileno())
for thing in (shared, mapping, region):
    thing.close()
print("ok")
"""
    done = run_python(code, backend=backend_name)
    assert (done.stdout, done.stderr) == ("ok\n", "")


# ---- observation ----


def test_observation_is_of_the_kernel(region):
    """H4: declared and observed side by side, each with its source; what is unknown has a reason."""
    write(region, b"x")
    with region.map() as mapping, mapping.buffer as view:
        view[0] = 1
        seen = region.observe()
    with region.export() as shared:
        status = os.fstat(shared.fileno())
        assert (seen.device, seen.inode, seen.observed_nbytes) == (status.st_dev, status.st_ino, status.st_size)
        assert region.observe().fd_count == 2
    assert (seen.nbytes, seen.physical_nbytes, seen.observed_nbytes) == (PAGE + 1, 2 * PAGE, 2 * PAGE)
    assert (seen.file_type, seen.access, seen.page_nbytes) == ("memory file", Access.READ_WRITE, PAGE)
    assert seen.seals == 1 | 2 | 4
    after = region.observe()
    assert (seen.mapping_count, after.mapping_count, after.fd_count) == (1, 0, 1)
    assert PAGE <= seen.allocated_nbytes <= 2 * PAGE
    fields = set(vars(seen)) - {"sources", "reasons"}
    assert set(seen.sources) == fields
    assert {field for field in fields if getattr(seen, field) is None} == set(seen.reasons)
    assert "not mapped" in after.reasons["numa_nodes"]


def test_names_of_objects_say_what_they_are(region):
    assert repr(kvreuse.open_provider("host")) == "<kvreuse.Provider host>"
    assert f"{PAGE + 1} bytes POSIX_FD" in repr(region)
    with region.map(Access.READ) as mapping, region.export() as shared:
        assert f"{PAGE + 1} bytes READ handle" in repr(mapping)
        assert f"POSIX_FD {PAGE + 1} bytes of host" in repr(shared)
