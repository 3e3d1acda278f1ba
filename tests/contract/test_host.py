"""Host memory: allocate, export, import, map, observe, close; handles, fds and buffers. Every rule on both backends."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import stat
import subprocess
import sys
from array import array

import numpy as np
import pytest
from part_memory import FABRIC, NONE, PAGE, POSIX_FD, READ, READ_WRITE, SEALS, fails, memfd, pages, read_only

from kvreuse import _status, errors

NBYTES_MAX = 0x3FFFFFFFFFFFFFFF
DONTFORK, ALLOW_UNSEALED = 1, 1
ORIGIN_ALLOCATED, ORIGIN_IMPORTED = 1, 2
REGION, MAPPING = 1, 2
REGION_ID = bytes(range(100, 116))

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def region(backend):
    """A region of 10 000 bytes; the test may close it itself."""
    info = backend.host_allocate(10_000, POSIX_FD, "kvreuse-test", None)
    yield info
    with contextlib.suppress(errors.StaleHandleError):
        backend.region_close(info.handle)


@pytest.fixture
def make_fd():
    """Make memfds that are closed at the end of the test."""
    fds = []

    def make(nbytes=PAGE, seals=SEALS):
        fds.append(memfd("fd", nbytes, seals))
        return fds[-1]

    yield make
    for fd in fds:
        os.close(fd)


def import_(backend, fd, nbytes=PAGE, physical=PAGE, region_id=REGION_ID, device=0, inode=0, flags=0):
    return backend.region_import(fd, nbytes, physical, region_id, device, inode, flags)


# ---- allocate ----


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, 10 * PAGE])
def test_size_is_rounded_up_to_pages(backend, nbytes):
    """H4, H5: what is declared is what the kernel sees: st_size is physical_nbytes, the memory reads as zeros."""
    info = backend.host_allocate(nbytes, POSIX_FD, "kvreuse-test", None)
    seen = backend.region_observe(info.handle)
    mapping = backend.region_map(info.handle, READ, 0)
    content = bytes(memoryview(backend.mapping_buffer(mapping.handle)))
    backend.mapping_unmap(mapping.handle)
    backend.region_close(info.handle)
    assert (info.nbytes, info.physical_nbytes) == (nbytes, pages(nbytes))
    assert seen.file_nbytes == pages(nbytes)
    assert content == bytes(nbytes)
    assert (info.kind, info.access, info.origin, info.mapping_count) == (POSIX_FD, READ_WRITE, ORIGIN_ALLOCATED, 0)


def test_observation_is_the_kernels_own_word(backend, region):
    """H5: each field equals what fstat and fcntl say of an exported fd, not what was declared."""
    fd = backend.region_export(region.handle)
    try:
        st = os.fstat(fd)
        seen = backend.region_observe(region.handle)
        assert seen.file_nbytes == st.st_size
        assert (seen.device, seen.inode, seen.file_mode) == (st.st_dev, st.st_ino, st.st_mode)
        assert (region.device, region.inode) == (st.st_dev, st.st_ino)
        assert seen.block_nbytes == st.st_blksize
        assert seen.seals == fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        assert (seen.access, seen.page_nbytes) == (READ_WRITE, PAGE)
        assert seen.allocated_nbytes == st.st_blocks * 512 == 0
        os.pwrite(fd, b"x", 0)
        assert backend.region_observe(region.handle).allocated_nbytes == os.fstat(fd).st_blocks * 512 > 0
    finally:
        os.close(fd)


def test_memory_is_sealed(backend, region):
    """S4, F7: a peer that got the fd cannot shrink, grow or unseal the memory."""
    fd = backend.region_export(region.handle)
    try:
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == SEALS
        for size in (0, region.physical_nbytes - PAGE, region.physical_nbytes + PAGE):
            with pytest.raises(PermissionError) as caught:
                os.ftruncate(fd, size)
            assert caught.value.errno == errno.EPERM
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(fd)


def test_name_is_shown_and_bounded(backend):
    """K3: the name is only a label of a memfd; 200 bytes are the most, counted in bytes."""
    for name in ("a" * 200, "é" * 100, ""):
        info = backend.host_allocate(1, POSIX_FD, name, None)
        fd = backend.region_export(info.handle)
        link = os.readlink(f"/proc/self/fd/{fd}")
        os.close(fd)
        backend.region_close(info.handle)
        assert link == f"/memfd:{name} (deleted)"
    for name in ("a" * 201, "é" * 101):
        with fails(-6, 21, len(name.encode()), 200, call="host_allocate"):
            backend.host_allocate(1, POSIX_FD, name, None)


@pytest.mark.parametrize("nbytes", [0, -1, NBYTES_MAX + 1, 2**63 - 1, -(2**63)])
def test_size_out_of_range_is_refused(backend, nbytes):
    """H7"""
    with fails(-6, 2, nbytes, NBYTES_MAX, call="host_allocate"):
        backend.host_allocate(nbytes, POSIX_FD, "n", None)


def test_kinds(backend):
    """H3, C2, E8, E13: FABRIC is not the host's, other numbers are unknown, NONE cannot be exported."""
    with fails(-7, 8, FABRIC, call="host_allocate"):
        backend.host_allocate(1, FABRIC, "n", None)
    for kind in (2, 4, -1, 9, 2**31 - 1):
        with fails(-6, 7, kind, call="host_allocate"):
            backend.host_allocate(1, kind, "n", None)
    info = backend.host_allocate(1, NONE, "n", None)
    assert info.kind == NONE
    with fails(-7, 9, NONE, call="region_export"):
        backend.region_export(info.handle)
    backend.region_close(info.handle)


def test_a_size_that_the_kernel_refuses_leaves_nothing(backend):
    """H6: the largest size that we allow is no int64 overflow, only too much for the kernel or untouched memory."""
    info, refused = None, None
    try:
        info = backend.host_allocate(NBYTES_MAX, POSIX_FD, "n", None)
    except errors.KVReuseError as error:
        refused = error
    if info is None:
        assert refused.status in (-9, -10, -25)
        assert refused.native_source == "errno"
    else:
        assert info.physical_nbytes == NBYTES_MAX + 1
        backend.region_close(info.handle)


# ---- the file fallback ----


def test_file_fallback_has_no_name(backend, tmp_path):
    """K3: the file has no name, its blocks are there at once, it has no seals."""
    info = backend.host_allocate(3 * PAGE, POSIX_FD, "kvreuse-test", str(tmp_path))
    try:
        assert list(tmp_path.iterdir()) == []
        seen = backend.region_observe(info.handle)
        assert seen.file_nbytes == 3 * PAGE
        assert seen.allocated_nbytes >= 3 * PAGE
        assert seen.device == tmp_path.stat().st_dev
        assert stat.S_ISREG(seen.file_mode)
        assert seen.seals in (-1, fcntl.F_SEAL_SEAL)  # tmpfs files report F_SEAL_SEAL: nothing can be sealed
    finally:
        backend.region_close(info.handle)


def test_file_fallback_in_a_missing_directory(backend, tmp_path):
    with pytest.raises(errors.SystemCallError) as caught:
        backend.host_allocate(1, POSIX_FD, "n", str(tmp_path / "absent"))
    assert (caught.value.errno, caught.value.native_source) == (errno.ENOENT, "errno")


_SMALL_TMPFS = """
import ctypes, importlib, os, sys
libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWUSER, MS_REC, MS_PRIVATE = 0x20000, 0x10000000, 0x4000, 1 << 18
ids = {"uid_map": os.getuid(), "gid_map": os.getgid()}
isolated = libc.unshare(CLONE_NEWNS) == 0
if not isolated and libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0:
    isolated = True
    with open("/proc/self/setgroups", "w") as out:
        out.write("deny")
    for name, number in ids.items():
        with open(f"/proc/self/{name}", "w") as out:
            out.write(f"0 {number} 1")
if not isolated or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) or libc.mount(
        b"tmpfs", sys.argv[2].encode(), b"tmpfs", 0, b"size=64k"):
    print("no mount", ctypes.get_errno())
    sys.exit(0)
backend = importlib.import_module(sys.argv[1])
before = backend.handle_counts()
try:
    backend.host_allocate(131072, 1, "n", sys.argv[2])
except Exception as error:
    print(type(error).__name__, error.native_code)
assert backend.handle_counts() == before
info = backend.host_allocate(65536, 1, "n", sys.argv[2])
mapping = backend.region_map(info.handle, 3, 0)
view = memoryview(backend.mapping_buffer(mapping.handle))
view[:] = b"x" * 65536
view.release()
backend.mapping_unmap(mapping.handle)
backend.region_close(info.handle)
print("filled")
"""


def test_full_file_system_is_an_error_not_a_signal(backend, run_python, tmp_path):
    """F7: 128 KiB on a tmpfs of 64 KiB is NoSpaceError at once; 64 KiB can be written to the last byte."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = run_python(_SMALL_TMPFS, backend.__name__, folder)
    if done.stdout.startswith("no mount"):
        pytest.skip(f"mounting a tmpfs is not permitted here ({done.stdout.strip()})")
    assert (done.returncode, done.stdout.split("\n")[:2]) == (0, [f"NoSpaceError {errno.ENOSPC}", "filled"]), (
        done.stderr
    )


# ---- export, fds ----


def test_export_gives_a_new_cloexec_fd_that_pins_the_memory(backend, region):
    """H6: each fd is the caller's own, closed on exec, and holds the memory after the region is closed."""
    before = backend.handle_counts()
    fds = [backend.region_export(region.handle) for _ in range(3)]
    try:
        assert len(set(fds)) == 3
        for fd in fds:
            assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert backend.handle_counts() == before, "an exported fd is the caller's and not counted here"
        os.pwrite(fds[0], b"alive", 0)
        backend.region_close(region.handle)
        assert os.pread(fds[1], 5, 0) == b"alive"
    finally:
        for fd in fds:
            os.close(fd)


def _memory_fds() -> set[int]:
    fds = set()
    for name in os.listdir("/proc/self/fd"):
        # The listing's own fd is gone by now.
        with contextlib.suppress(FileNotFoundError):
            if "memfd:" in os.readlink(f"/proc/self/fd/{name}"):
                fds.add(int(name))
    return fds


def test_own_fds_are_cloexec_and_counted(backend):
    """H6: one fd a region; a mapping of core has none, the fallback's mmap may own one more, and it is counted."""
    before, fds_before = backend.handle_counts(), _memory_fds()
    info = backend.host_allocate(1, POSIX_FD, "kvreuse-test", None)
    mapping = backend.region_map(info.handle, READ_WRITE, 0)
    opened = _memory_fds() - fds_before
    now = backend.handle_counts()
    assert (now.regions, now.mappings) == (before.regions + 1, before.mappings + 1)
    assert now.fds - before.fds == len(opened)
    for fd in opened:
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    backend.mapping_unmap(mapping.handle)
    backend.region_close(info.handle)
    assert backend.handle_counts() == before


def test_no_free_fd_is_its_own_error(backend, run_python):
    """E1, H6: TooManyFdsError with needed, soft and hard; nothing is left behind; afterwards calls succeed."""
    code = """
import importlib, os, resource, sys
backend = importlib.import_module(sys.argv[1])
kept = backend.host_allocate(1, 1, "n", None)
fd = backend.region_export(kept.handle)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
top = max(int(fd) for fd in os.listdir("/proc/self/fd")) + 1
resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
filler = []
try:
    while True:
        filler.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
before = backend.handle_counts()
for call in (
    lambda: backend.host_allocate(1, 1, "n", None),
    lambda: backend.region_export(kept.handle),
    lambda: backend.region_import(fd, 4096, 4096, bytes(16), 0, 0, 0),
):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, error.needed, error.soft == top, error.hard == hard)
assert backend.handle_counts() == before
for fd in filler:
    os.close(fd)
backend.region_close(backend.host_allocate(1, 1, "n", None).handle)
print("ok")
"""
    done = run_python(code, backend.__name__)
    assert done.stdout.split("\n")[:4] == ["TooManyFdsError 1 True True"] * 3 + ["ok"], done.stderr


# ---- import ----


def test_import_sees_the_same_memory(backend, region):
    """H4, H6: an import owns an fd of its own; the given one stays the caller's; the exporter may go."""
    fd = backend.region_export(region.handle)
    imported = backend.region_import(
        fd, region.nbytes, region.physical_nbytes, REGION_ID, region.device, region.inode, 0
    )
    os.pwrite(fd, b"hello", 100)
    os.close(fd)
    backend.region_close(region.handle)
    assert imported.handle != region.handle
    assert (imported.origin, imported.region_id, imported.access) == (ORIGIN_IMPORTED, REGION_ID, READ_WRITE)
    assert (imported.device, imported.inode) == (region.device, region.inode)
    assert backend.region_info(imported.handle) == imported
    mapping = backend.region_map(imported.handle, READ, 0)
    with memoryview(backend.mapping_buffer(mapping.handle)) as view:
        assert bytes(view[100:105]) == b"hello"
    backend.mapping_unmap(mapping.handle)
    backend.region_close(imported.handle)


def test_import_observes_the_size(backend, make_fd):
    """H4, F7: smaller than declared, and larger than declared, are both refused."""
    fd = make_fd(2 * PAGE)
    with fails(-5, 15, 4 * PAGE, 2 * PAGE, call="region_import"):
        import_(backend, fd, 4 * PAGE, 4 * PAGE)
    with fails(-5, 15, PAGE, 2 * PAGE, call="region_import"):
        import_(backend, fd, PAGE, PAGE)


def test_import_of_memory_that_was_shrunk(backend, make_fd):
    """H4: the size is observed at the import, not remembered."""
    fd = make_fd(2 * PAGE, 0)
    os.ftruncate(fd, PAGE)
    with fails(-5, 15, 2 * PAGE, PAGE, call="region_import"):
        import_(backend, fd, 2 * PAGE, 2 * PAGE, flags=ALLOW_UNSEALED)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL])
def test_unsealed_memory_is_refused_by_default(backend, make_fd, seals):
    """F7: a peer could cut it under a mapping; allowed only where the caller says so."""
    fd = make_fd(PAGE, seals)
    with fails(-8, 17, call="region_import"):
        import_(backend, fd)
    backend.region_close(import_(backend, fd, flags=ALLOW_UNSEALED).handle)


def test_shrink_seal_is_what_counts(backend, make_fd):
    fd = make_fd(PAGE, fcntl.F_SEAL_SHRINK)
    backend.region_close(import_(backend, fd).handle)


def test_import_of_something_else_than_memory(backend):
    """H4: a pipe, a socket, a directory, a device are KindMismatchError."""
    read_end, write_end = os.pipe()
    directory, device = os.open("/", os.O_RDONLY), os.open("/dev/null", os.O_RDWR)
    try:
        for fd in (read_end, write_end, directory, device):
            with fails(-4, 19, fd, os.fstat(fd).st_mode, call="region_import"):
                import_(backend, fd)
    finally:
        for fd in (read_end, write_end, directory, device):
            os.close(fd)


def test_import_of_another_regions_fd(backend, make_fd):
    """H2: the record of one region with the fd of another is StaleHandleError, naming both."""
    fd, other = make_fd(), make_fd()
    a, b = os.fstat(fd), os.fstat(other)
    with fails(-2, 18, a.st_dev, a.st_ino, b.st_dev, b.st_ino, call="region_import"):
        import_(backend, other, device=a.st_dev, inode=a.st_ino)
    with pytest.raises(errors.StaleHandleError):
        import_(backend, fd, device=a.st_dev, inode=2**64 - 1)
    backend.region_close(import_(backend, fd, device=a.st_dev, inode=a.st_ino).handle)


def test_import_checks_in_order(backend, make_fd):
    """Each wrong argument hides those that are checked later."""
    fd = make_fd(PAGE, 0)
    st = os.fstat(fd)
    closed = os.dup(fd)
    os.close(closed)
    wrong = (st.st_dev, st.st_ino + 1)
    with fails(-6, 12, 6, ALLOW_UNSEALED):
        import_(backend, -1, 0, 0, REGION_ID, *wrong, 6)
    with fails(-6, 20, -1):
        import_(backend, -1, 0, 0, REGION_ID, *wrong)
    for nbytes, physical in ((0, 0), (-1, PAGE), (NBYTES_MAX + 1, PAGE)):
        with fails(-6, 2, nbytes, NBYTES_MAX):
            import_(backend, closed, nbytes, physical, REGION_ID, *wrong)
    for nbytes, physical in ((PAGE, PAGE + 1), (PAGE + 1, PAGE), (1, 2 * PAGE), (PAGE, 0), (PAGE, -PAGE)):
        with fails(-5, 16, nbytes, physical, PAGE):
            import_(backend, closed, nbytes, physical, REGION_ID, *wrong)
    with pytest.raises(errors.SystemCallError) as caught:
        import_(backend, closed, 2 * PAGE, 2 * PAGE, REGION_ID, *wrong)
    assert (caught.value.errno, caught.value.call) == (errno.EBADF, "fstat")
    with fails(-2, 18, *wrong, st.st_dev, st.st_ino):
        import_(backend, fd, 2 * PAGE, 2 * PAGE, REGION_ID, *wrong)
    with fails(-5, 15, 2 * PAGE, PAGE):
        import_(backend, fd, 2 * PAGE, 2 * PAGE)
    with fails(-8, 17):
        import_(backend, fd)


def test_read_only_fd_gives_a_read_only_region(backend, make_fd):
    """S4: what a reader got can be read, and not written, by any way through the library."""
    fd = make_fd()
    os.pwrite(fd, b"x", 0)
    reading = read_only(fd)
    info = import_(backend, reading)
    os.close(reading)
    assert info.access == READ
    assert backend.region_observe(info.handle).access == READ
    with fails(-8, 11, info.handle, call="region_map"):
        backend.region_map(info.handle, READ_WRITE, 0)
    mapping = backend.region_map(info.handle, READ, 0)
    assert bytes(memoryview(backend.mapping_buffer(mapping.handle))[:1]) == b"x"
    backend.mapping_unmap(mapping.handle)
    backend.region_close(info.handle)


@pytest.mark.parametrize("region_id", [b"", bytes(15), bytes(17)])
def test_region_id_has_16_bytes(backend, make_fd, region_id):
    with pytest.raises(errors.RangeError, match=rf"region_id must have 16 bytes: got {len(region_id)}"):
        import_(backend, make_fd(), region_id=region_id)


# ---- map, buffers ----


def test_mappings_are_counted_and_each_has_its_own_address(backend, region):
    """C10: the same bytes twice, counted 2; gone afterwards."""
    first, second = (backend.region_map(region.handle, READ_WRITE, 0) for _ in range(2))
    assert first.address != second.address
    assert first.address % PAGE == second.address % PAGE == 0
    assert (first.region, first.nbytes, first.access, first.use_count) == (region.handle, 10_000, READ_WRITE, 0)
    assert backend.mapping_info(first.handle) == first
    assert backend.region_info(region.handle).mapping_count == 2
    ctypes.memmove(first.address, b"shared", 6)
    assert ctypes.string_at(second.address, 6) == b"shared"
    with fails(-12, 13, region.handle, 2, call="region_close"):
        backend.region_close(region.handle)
    backend.mapping_unmap(first.handle)
    with fails(-12, 13, region.handle, 1, call="region_close"):
        backend.region_close(region.handle)
    backend.mapping_unmap(second.handle)
    with fails(-2, 5, second.handle, call="mapping_unmap"):
        backend.mapping_unmap(second.handle)
    assert backend.region_info(region.handle).mapping_count == 0


def test_bad_access_and_flags(backend, region):
    """H7"""
    for access in (0, 2, 4, -1, 2**31 - 1):
        with fails(-6, 10, access, call="region_map"):
            backend.region_map(region.handle, access, 0)
    with fails(-6, 12, 2, DONTFORK, call="region_map"):
        backend.region_map(region.handle, READ, 2)
    for flags in (-1, 2**32):
        with pytest.raises(errors.RangeError):
            backend.region_map(region.handle, READ, flags)
    assert backend.region_info(region.handle).mapping_count == 0


def _vm_flags(address: int) -> set[str]:
    inside = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if "-" in line.split(" ")[0]:
                inside = line.startswith(f"{address:x}-")
            elif inside and line.startswith("VmFlags:"):
                return set(line.split()[1:])
    raise AssertionError(f"no mapping at {address:x}")


def test_dontfork_is_asked_of_the_kernel(backend, region):
    """R6: a forked child does not get such a mapping; an ordinary one is inherited."""
    private, inherited = (
        backend.region_map(region.handle, READ_WRITE, DONTFORK),
        backend.region_map(region.handle, READ, 0),
    )
    assert "dc" in _vm_flags(private.address)
    assert "dc" not in _vm_flags(inherited.address)
    for mapping in (private, inherited):
        backend.mapping_unmap(mapping.handle)


def test_a_buffer_is_bytes(backend, region):
    """A 1-D buffer of format "B" of the region's nbytes, not of its pages."""
    mapping = backend.region_map(region.handle, READ_WRITE, 0)
    with memoryview(backend.mapping_buffer(mapping.handle)) as view:
        assert (view.format, view.ndim, view.shape, view.strides, view.readonly) == ("B", 1, (10_000,), (1,), False)
        view[9_999] = 7
    assert ctypes.string_at(mapping.address + 9_999, 1) == b"\x07"
    backend.mapping_unmap(mapping.handle)


def test_read_only_mapping_gives_a_read_only_buffer(backend, region):
    """S4"""
    mapping = backend.region_map(region.handle, READ, 0)
    with memoryview(backend.mapping_buffer(mapping.handle)) as view:
        assert view.readonly
        with pytest.raises(TypeError):
            view[0] = 1
    array_ = np.frombuffer(backend.mapping_buffer(mapping.handle), np.uint8)
    assert not array_.flags.writeable
    del array_
    gc.collect()
    backend.mapping_unmap(mapping.handle)


def test_a_numpy_view_keeps_its_mapping(backend, region):
    """A mapping with a view is BusyError until the last view is gone; nothing that a view can reach is unmapped."""
    mapping = backend.region_map(region.handle, READ_WRITE, 0)
    exporter = backend.mapping_buffer(mapping.handle)
    first = np.frombuffer(exporter, np.uint8)
    second = memoryview(exporter)
    del exporter
    assert backend.mapping_info(mapping.handle).use_count == 2
    first[:3] = [1, 2, 3]
    with fails(-12, 14, mapping.handle, call="mapping_unmap"):
        backend.mapping_unmap(mapping.handle)
    part = first[1:3]
    del first
    gc.collect()
    second.release()
    with fails(-12, 14, mapping.handle, call="mapping_unmap"):
        backend.mapping_unmap(mapping.handle)
    assert list(part) == [2, 3]
    del part
    gc.collect()
    assert backend.mapping_info(mapping.handle).use_count == 0
    backend.mapping_unmap(mapping.handle)


def test_no_buffer_after_unmap(backend, region):
    """The exporter may live on; it gives nothing any more, and never crashes."""
    mapping = backend.region_map(region.handle, READ_WRITE, 0)
    exporter = backend.mapping_buffer(mapping.handle)
    backend.mapping_unmap(mapping.handle)
    with pytest.raises((errors.StaleHandleError, ValueError)):
        memoryview(exporter)
    with fails(-2, 5, mapping.handle, call="mapping_buffer"):
        backend.mapping_buffer(mapping.handle)


def test_uses_are_counted(backend, region):
    """O2: a mapping that something uses is not unmapped; a count never goes below zero."""
    mapping = backend.region_map(region.handle, READ, 0).handle
    with fails(-6, 45, call="mapping_use"):
        backend.mapping_use(mapping, -1)
    for delta in (0, 2, -2):
        with fails(-6, 45, call="mapping_use"):
            backend.mapping_use(mapping, delta)
    backend.mapping_use(mapping, 1)
    backend.mapping_use(mapping, 1)
    assert backend.mapping_info(mapping).use_count == 2
    backend.mapping_use(mapping, -1)
    with fails(-12, 14, mapping, call="mapping_unmap"):
        backend.mapping_unmap(mapping)
    backend.mapping_use(mapping, -1)
    backend.mapping_unmap(mapping)


# ---- handles ----

_REGION_CALLS = {
    "region_info": (),
    "region_export": (),
    "region_observe": (),
    "region_map": (READ, 0),
    "region_close": (),
}
_MAPPING_CALLS = {"mapping_info": (), "mapping_buffer": (), "mapping_use": (1,), "mapping_unmap": ()}
_HANDLE_CALLS = {**_REGION_CALLS, **_MAPPING_CALLS}


@pytest.mark.parametrize("call", _HANDLE_CALLS)
def test_numbers_that_are_no_handles_are_refused(backend, call):
    """H2, E13: zero, negative and never given out; the number is in the message."""
    function, rest = getattr(backend, call), _HANDLE_CALLS[call]
    for handle in (0, -1, -(2**63)):
        with fails(-1, 3, handle, call=call):
            function(handle, *rest)
    for handle in (2**32 - 1, 2**32 + 2**31, 2**63 - 1):
        with fails(-1, 4, handle, call=call):
            function(handle, *rest)


@pytest.mark.parametrize("call", _HANDLE_CALLS)
def test_stale_handles_are_refused(backend, call):
    """H2: a closed handle stays stale although its place is used again by the next one."""
    info = backend.host_allocate(1, POSIX_FD, "n", None)
    mapping = backend.region_map(info.handle, READ, 0)
    backend.mapping_unmap(mapping.handle)
    backend.region_close(info.handle)
    again = backend.host_allocate(1, POSIX_FD, "n", None)
    stale = info.handle if call in _REGION_CALLS else mapping.handle
    assert again.handle != info.handle
    with fails(-2, 5, stale, call=call):
        getattr(backend, call)(stale, *_HANDLE_CALLS[call])
    backend.region_close(again.handle)


@pytest.mark.parametrize("call", _HANDLE_CALLS)
def test_handles_of_another_sort_are_refused(backend, region, call):
    """H2: a region is no mapping and the other way round."""
    mapping = backend.region_map(region.handle, READ, 0).handle
    foreign, found, expected = (mapping, MAPPING, REGION) if call in _REGION_CALLS else (region.handle, REGION, MAPPING)
    with fails(-1, 6, foreign, found, expected, call=call):
        getattr(backend, call)(foreign, *_HANDLE_CALLS[call])
    backend.mapping_unmap(mapping)


def test_handle_numbers_are_never_used_again(backend):
    """H2: positive, generation above, slot below; 1000 of them are 1000 numbers."""
    seen = set()
    for _ in range(1000):
        handle = backend.host_allocate(1, POSIX_FD, "n", None).handle
        backend.region_close(handle)
        seen.add(handle)
    assert len(seen) == 1000
    assert min(seen) > 0
    assert max(seen) < 2**63


@pytest.mark.parametrize("call", _HANDLE_CALLS)
@pytest.mark.parametrize("value", [True, False, 1.0, 1.5, None, "1", b"1", float("nan")])
def test_no_integer_is_a_type_error(backend, call, value):
    """H7: nothing is truncated or guessed."""
    with pytest.raises(TypeError, match=f"must be an integer, not {type(value).__name__}"):
        getattr(backend, call)(value, *_HANDLE_CALLS[call])


@pytest.mark.parametrize("call", _HANDLE_CALLS)
@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**64, 2**200])
def test_integers_beyond_64_bits_are_range_errors(backend, call, value):
    """H7: ctypes would wrap them."""
    with pytest.raises(errors.RangeError, match=str(value)):
        getattr(backend, call)(value, *_HANDLE_CALLS[call])


@pytest.mark.parametrize("position", range(7))
@pytest.mark.parametrize("value", [True, 1.5, None])
def test_every_integer_argument_goes_through_one_rule(backend, make_fd, position, value):
    """H7"""
    arguments = [make_fd(), PAGE, PAGE, REGION_ID, 0, 0, 0]
    arguments[position] = value
    with pytest.raises(TypeError):
        backend.region_import(*arguments)


@pytest.mark.parametrize(
    ("position", "value"),
    [(0, 2**31), (0, -(2**31) - 1), (4, -1), (4, 2**64), (5, -1), (5, 2**64), (6, -1), (6, 2**32)],
)
def test_width_of_every_integer_argument(backend, make_fd, position, value):
    """H1, H7: an argument of 32 bits, or without sign, is not wrapped."""
    arguments = [make_fd(), PAGE, PAGE, REGION_ID, 0, 0, 0]
    arguments[position] = value
    with pytest.raises(errors.RangeError, match=str(value)):
        backend.region_import(*arguments)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_numpy_integers_are_integers(backend, dtype):
    """H7: they pass through __index__."""
    scalar = getattr(np, dtype)
    assert backend.echo(scalar(100)) == 100
    info = backend.host_allocate(scalar(100), scalar(POSIX_FD), "n", None)
    assert info.nbytes == 100
    assert type(info.nbytes) is int
    assert backend.region_info(np.int64(info.handle)) == info
    backend.region_close(np.uint64(info.handle))


@pytest.mark.parametrize("value", [0, -1, 1, 2**31 - 1, 2**31, -(2**31) - 1, 2**32 + 5, 2**63 - 1, -(2**63)])
def test_echo_keeps_the_width(backend, value):
    """H1, G1"""
    assert backend.echo(value) == value


@pytest.mark.parametrize("value", [1.5, True, None, np.float64(1), np.bool_(True), "1"])
def test_echo_refuses_what_is_no_integer(backend, value):
    """H7, G1"""
    with pytest.raises(TypeError, match="must be an integer"):
        backend.echo(value)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, np.uint64(2**63)])
def test_echo_refuses_wide_integers(backend, value):
    """H7, G1"""
    with pytest.raises(errors.RangeError, match=str(value)) as caught:
        backend.echo(value)
    assert (caught.value.status, caught.value.name) == (-6, "RANGE")


@pytest.mark.parametrize("name", [None, 1, b"n"])
def test_name_must_be_text(backend, name):
    with pytest.raises(TypeError):
        backend.host_allocate(1, POSIX_FD, name, None)


@pytest.mark.parametrize("directory", [1, b"/tmp", True])
def test_directory_must_be_text_or_none(backend, directory):
    with pytest.raises(TypeError):
        backend.host_allocate(1, POSIX_FD, "n", directory)


@pytest.mark.parametrize("data", [1, None, "text", array("q", [1]), np.zeros((4, 4), np.uint8)[:, 1]])
def test_crc32c_wants_bytes(backend, data):
    """Read as unsigned bytes where contiguous: an int64 array is 8 bytes an entry."""
    if isinstance(data, array):
        assert backend.crc32c(data) == backend.crc32c(data.tobytes())
        return
    with pytest.raises(TypeError, match="data must be"):
        backend.crc32c(data)


def test_counts_come_back_to_where_they_were(backend):
    """H6: after every path above, nothing is counted that is not open."""
    before = backend.handle_counts()
    info = backend.host_allocate(1, POSIX_FD, "n", None)
    for call in (
        lambda: backend.region_map(info.handle, 99, 0),
        lambda: backend.host_allocate(0, POSIX_FD, "n", None),
        lambda: import_(backend, 0, PAGE, PAGE),
    ):
        with pytest.raises(errors.KVReuseError):
            call()
    backend.region_close(info.handle)
    assert backend.handle_counts() == before


# ---- fork ----

_FORK = """
import importlib, os, sys
backend = importlib.import_module(sys.argv[1])
from kvreuse import errors
info = backend.host_allocate(4096, 1, "kvreuse-test", None)
mapping = backend.region_map(info.handle, 3, 0)
view = memoryview(backend.mapping_buffer(mapping.handle))
view[:4] = b"mine"
fd = backend.region_export(info.handle)
parent = os.getpid()
pid = os.fork()
if pid == 0:
    found = []
    for call in (
        lambda: backend.host_allocate(1, 1, "n", None),
        lambda: backend.region_export(info.handle),
        lambda: backend.region_import(fd, 4096, 4096, bytes(16), 0, 0, 0),
        lambda: backend.region_map(info.handle, 1, 0),
        lambda: backend.mapping_unmap(mapping.handle),
        lambda: backend.region_close(info.handle),
    ):
        try:
            call()
            found.append("nothing raised")
        except errors.KVReuseError as error:
            good = type(error) is errors.ForkedError and str(parent) in str(error) and str(os.getpid()) in str(error)
            found.append("forked" if good else repr(error))
    print(" ".join(found), flush=True)
    del view
    sys.exit(0)  # an ordinary exit: finalizers run
_, status = os.waitpid(pid, 0)
assert status == 0, status
assert bytes(view[:4]) == b"mine"
assert backend.region_info(info.handle).mapping_count == 1
view.release()
backend.mapping_unmap(mapping.handle)
backend.region_close(info.handle)
os.close(fd)
print("ok")
"""


def test_a_forked_child_may_use_nothing_and_releases_nothing(backend, run_python):
    """ForkedError names both processes; the parent's memory and handles are as before."""
    done = run_python(_FORK, backend.__name__)
    assert done.stdout == "forked forked forked forked forked forked\nok\n", done.stdout + done.stderr
    assert (done.returncode, done.stderr) == (0, "")


def test_threads_share_the_handles(backend, run_python):
    """G4: counts balance after many threads' work; a handle is closed by exactly one of two who try."""
    code = """
import importlib, sys, threading
backend = importlib.import_module(sys.argv[1])
from kvreuse import errors
before = backend.handle_counts()
shared = [backend.host_allocate(1, 1, "n", None).handle for _ in range(200)]
closed, bad = [], []
def work():
    try:
        for handle in shared:
            own = backend.host_allocate(1, 1, "n", None).handle
            try:
                backend.region_close(handle)
                closed.append(handle)
            except errors.StaleHandleError:
                pass
            backend.region_close(own)
    except BaseException as error:
        bad.append(error)
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]
[t.join(30) for t in threads]
assert not bad, bad
assert sorted(closed) == sorted(shared)
assert backend.handle_counts() == before
print("ok")
"""
    done = run_python(code, backend.__name__)
    assert done.stdout == "ok\n", done.stderr


def test_bytes_are_exactly_bytes(backend):
    """H8: an id or a payload of a class of bytes is refused alike."""

    class Bytes(bytes):
        pass

    with pytest.raises(TypeError, match="region_id must be bytes, not Bytes"):
        backend.region_import(0, 1, 4096, Bytes(16), 0, 0, 0)


def test_importing_leaves_the_gil_as_it_was(backend, run_python):
    """A free-threaded interpreter turns the GIL on, and says so, for an extension that does not declare itself safe."""
    code = """
import sys, warnings
enabled = getattr(sys, "_is_gil_enabled", lambda: True)
if sys.argv[1].endswith("fallback"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import google_crc32c  # which is not ours, and may turn it on
before = enabled()
__import__(sys.argv[1])
assert enabled() == before
print("ok")
"""
    done = run_python(code, backend.__name__)
    assert (done.stdout, done.stderr) == ("ok\n", "")


def test_errno_becomes_the_same_status_in_both(backend):
    """One rule for errno in _status.py; a directory without permission or of a wrong type shows it."""
    with pytest.raises(errors.SystemCallError) as caught:
        backend.host_allocate(1, POSIX_FD, "n", "/proc/self/status")
    error = caught.value
    assert error.errno == errno.ENOTDIR
    assert str(error) == str(_status.from_errno(error.call, errno.ENOTDIR))


def test_importing_starts_nothing():
    """P1: importing a backend opens no fd that stays, and starts no thread, imports no numpy."""
    code = (
        "import os, sys\n"
        "before = len(os.listdir('/proc/self/fd'))\n"
        "import kvreuse\n"
        "print(len(os.listdir('/proc/self/fd')) - before, len(os.listdir('/proc/self/task')), 'numpy' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["0", "1", "False"], done.stdout
