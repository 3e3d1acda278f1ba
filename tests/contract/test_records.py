"""The SharedHandle record and its passing: whatever is wrong with it is a clear error, and no fd is left behind."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import threading
import time

import pytest

import kvreuse
from kvreuse import HandleKind, SharedHandle, errors
from kvreuse.handles import _CRC, _RECORD, RECORD_NBYTES
from kvreuse.handles import _backend as backend

PAGE = os.sysconf("SC_PAGESIZE")
FIELDS = (
    "magic",
    "version",
    "record_nbytes",
    "kind",
    "payload_nbytes",
    "nbytes",
    "physical_nbytes",
    "region_id",
    "provider",
    "device",
    "inode",
    "payload",
)
DAMAGE = (errors.CorruptError, errors.IncompatibleError)

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def provider():
    return kvreuse.open_provider("host")


@pytest.fixture
def shared(provider):
    with provider.allocate(PAGE + 1) as region, region.export() as shared:
        yield shared


@pytest.fixture
def pair():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right:
        yield left, right


def made_of(record: bytes, **fields) -> bytes:
    """The record with other fields and a CRC that fits: only the fields' own checks can find it."""
    values = dict(zip(FIELDS, _RECORD.unpack(record[:-4]), strict=True)) | fields
    body = _RECORD.pack(*values.values())
    return body + _CRC.pack(backend.crc32c(body))


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def refused(data: bytes, fd: int, *kinds: type[Exception]) -> errors.KVReuseError:
    """`data` is refused with a dup of `fd`, which is closed, and without one, by the same words."""
    own = os.dup(fd)
    with pytest.raises(kinds) as with_fd:
        SharedHandle.from_bytes(data, own)
    assert not is_open(own)
    with pytest.raises(kinds) as without:
        SharedHandle.from_bytes(data)
    assert str(with_fd.value) == str(without.value)
    assert with_fd.value.status < 0
    assert with_fd.value.name
    return with_fd.value


# ---- the record ----


def test_cut_record_is_corrupt(shared):
    """H3: cut at every byte, and one or many bytes too long: CorruptError, the fd closed."""
    record = shared.to_bytes()
    assert len(record) == RECORD_NBYTES
    for data in [record[:n] for n in range(RECORD_NBYTES)] + [record + b"\0", record * 2]:
        error = refused(data, shared.fileno(), errors.CorruptError)
        assert str(len(data)) in str(error)


def test_each_flipped_bit_is_found(shared):
    """H3: each bit flipped alone: CorruptError, or the version by its own error; never a region."""
    record = shared.to_bytes()
    for bit in range(RECORD_NBYTES * 8):
        data = bytearray(record)
        data[bit // 8] ^= 1 << bit % 8
        error = refused(bytes(data), shared.fileno(), *DAMAGE)
        assert isinstance(error, errors.IncompatibleError) == (4 <= bit // 8 < 6)


@pytest.mark.parametrize("version", [0, 2, 65535])
def test_another_version_is_named_and_nothing_after_it_is_read(shared, version):
    """C3's rule for the record: both versions are named; random bytes or another length after it change nothing."""
    record = shared.to_bytes()
    head = record[:4] + struct.pack("<H", version)
    for data in (made_of(record, version=version), head + os.urandom(RECORD_NBYTES - 6), head, head + bytes(500)):
        error = refused(data, shared.fileno(), errors.IncompatibleError)
        assert error.fields == {"version": (1, version)}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"kind": 0}, errors.KindMismatchError),
        ({"kind": 2}, errors.CorruptError),
        ({"kind": -1}, errors.CorruptError),
        ({"payload_nbytes": 4}, errors.KindMismatchError),
        ({"payload_nbytes": 64}, errors.KindMismatchError),
        ({"payload_nbytes": 2**32 - 1}, errors.KindMismatchError),
        ({"record_nbytes": 147}, errors.KindMismatchError),
        ({"nbytes": 0}, errors.SizeMismatchError),
        ({"nbytes": -1}, errors.SizeMismatchError),
        ({"nbytes": -(2**63)}, errors.SizeMismatchError),
        ({"nbytes": 2**63 - 1}, errors.SizeMismatchError),
        ({"physical_nbytes": 0}, errors.SizeMismatchError),
        ({"physical_nbytes": -1}, errors.SizeMismatchError),
        ({"physical_nbytes": PAGE}, errors.SizeMismatchError),
        ({"provider": b"h\xffst"}, errors.CorruptError),
    ],
)
def test_a_well_checksummed_lie_is_refused(shared, fields, kind):
    """C2, H3, H4: kinds, payload lengths and sizes that cannot be, under a CRC that fits."""
    refused(made_of(shared.to_bytes(), **fields), shared.fileno(), kind)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"physical_nbytes": 3 * PAGE}, errors.SizeMismatchError),
        ({"nbytes": 1}, errors.SizeMismatchError),
        ({"nbytes": 2**62 - 1, "physical_nbytes": 2**62}, errors.SizeMismatchError),
        ({"nbytes": 2**63 - 1, "physical_nbytes": 2**63 - 1}, errors.RangeError),
        ({"inode": 1}, errors.StaleHandleError),
        ({"device": 2**64 - 1, "inode": 2**64 - 1}, errors.StaleHandleError),
        ({"provider": b"cuda:0"}, errors.IncompatibleError),
    ],
)
def test_a_lie_that_only_the_kernel_can_find_is_refused_at_import(provider, shared, fields, kind):
    """H3, H4: the record reads well; the import compares it with what the kernel says."""
    before = backend.handle_counts()
    data = made_of(shared.to_bytes(), **fields)
    with SharedHandle.from_bytes(data, os.dup(shared.fileno())) as lie, pytest.raises(kind):
        provider.import_region(lie)
    assert backend.handle_counts() == before


def test_fabric_payload_is_exact_and_never_opened(provider, shared):
    """H3, C2: 64 bytes come through as they are; an import does not try it; an fd with it is refused."""
    payload = bytes(range(64))
    data = made_of(shared.to_bytes(), kind=HandleKind.FABRIC, payload_nbytes=64, payload=payload)
    with SharedHandle.from_bytes(data) as fabric:
        assert (fabric.kind, fabric.payload) == (HandleKind.FABRIC, payload)
        assert fabric.to_bytes() == data
        with pytest.raises(errors.NotSupportedError, match="FABRIC") as error:
            provider.import_region(fabric)
        assert error.value.native_code == 0
        with pytest.raises(errors.InvalidHandleError):
            fabric.fileno()
    own = os.dup(shared.fileno())
    with pytest.raises(errors.KindMismatchError, match="fd"):
        SharedHandle.from_bytes(data, own)
    assert not is_open(own)
    for nbytes in (0, 4, 63, 65):
        wrong = made_of(shared.to_bytes(), kind=HandleKind.FABRIC, payload_nbytes=nbytes, payload=payload)
        refused(wrong, shared.fileno(), errors.KindMismatchError)


def test_a_record_without_its_fd_can_be_read_but_not_imported(provider, shared):
    """Section 6: from_bytes(data) gives the declared fields; importing is InvalidHandleError."""
    with SharedHandle.from_bytes(shared.to_bytes()) as read:
        assert (read.nbytes, read.physical_nbytes) == (PAGE + 1, 2 * PAGE)
        assert (read.region_id, read.provider, read.inode) == (shared.region_id, "host", shared.inode)
        with pytest.raises(errors.InvalidHandleError):
            provider.import_region(read)


# ---- passing ----


def send_raw(sock: socket.socket, data: bytes, fds) -> None:
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"={len(fds)}i", *fds))] if fds else [])


def works(pair, provider, shared) -> None:
    """The same connection passes a record, and what arrives is the region."""
    left, right = pair
    shared.send(left)
    with SharedHandle.recv(right) as got, provider.import_region(got) as region:
        assert not os.get_inheritable(got.fileno())
        assert (region.nbytes, region.region_id) == (shared.nbytes, shared.region_id)


@pytest.fixture
def fds_left():
    """``with fds_left(n):`` only n more fds can be opened."""

    @contextlib.contextmanager
    def limit(n):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        probes = []
        # Fill the gaps: the limit is on the number, not on the count.
        highest = max(map(int, os.listdir("/proc/self/fd")))
        while (fd := os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)) < highest:
            probes.append(fd)
        os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (fd + n, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in probes:
                os.close(fd)

    return limit


@pytest.mark.parametrize("count", [0, 2, 3, 4])
def test_a_wrong_number_of_fds_is_refused(pair, provider, shared, count):
    """F5: expected 1, got `count`; all are closed; the same connection works."""
    send_raw(pair[0], shared.to_bytes(), [shared.fileno()] * count)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(errors.ProtocolError) as error:
        SharedHandle.recv(pair[1])
    assert (error.value.expected, error.value.got) == (1, count)
    assert len(os.listdir("/proc/self/fd")) == before
    works(pair, provider, shared)


def test_more_fds_than_there_is_room_for_are_closed(pair, provider, shared):
    """F5: 200 fds where 1 is expected: ProtocolError, nothing leaked, the same connection works."""
    send_raw(pair[0], shared.to_bytes(), [shared.fileno()] * 200)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(errors.ProtocolError, match="cut") as error:
        SharedHandle.recv(pair[1])
    assert error.value.expected == 1
    assert error.value.got >= 4
    assert len(os.listdir("/proc/self/fd")) == before
    works(pair, provider, shared)


@pytest.mark.parametrize("left", [0, 1, 2])
def test_the_fd_limit_cuts_and_the_connection_lives(pair, provider, shared, fds_left, left):
    """F4: 4 fds sent, `left` slots free; then the limit is raised."""
    before = len(os.listdir("/proc/self/fd"))
    with fds_left(left):
        send_raw(pair[0], shared.to_bytes(), [shared.fileno()] * 4)
        with pytest.raises(errors.ProtocolError, match="limit") as error:
            SharedHandle.recv(pair[1])
    assert (error.value.expected, error.value.got) == (1, left)
    assert len(os.listdir("/proc/self/fd")) == before
    works(pair, provider, shared)


def test_damaged_record_over_the_socket_closes_its_fd(pair, provider, shared):
    """H3, F5: CorruptError as of from_bytes; the received fd is closed; the same connection works."""
    data = bytearray(shared.to_bytes())
    data[50] ^= 1
    send_raw(pair[0], bytes(data), [shared.fileno()])
    with pytest.raises(errors.CorruptError):
        SharedHandle.recv(pair[1])
    works(pair, provider, shared)


def test_fabric_record_comes_with_no_fd(pair, shared):
    """H3: the number of fds follows the record's own kind, both ways."""
    data = made_of(shared.to_bytes(), kind=HandleKind.FABRIC, payload_nbytes=64, payload=b"p" * 64)
    with SharedHandle.from_bytes(data) as fabric:
        fabric.send(pair[0])
    with SharedHandle.recv(pair[1]) as got:
        assert got.payload == b"p" * 64
    send_raw(pair[0], data, [shared.fileno()])
    with pytest.raises(errors.ProtocolError) as error:
        SharedHandle.recv(pair[1])
    assert (error.value.expected, error.value.got) == (0, 1)


def test_peer_that_closed_is_told(pair, shared):
    """Section 6: ProtocolError at recv; send to it is a KVReuseError, no signal."""
    left, right = pair
    left.close()
    with pytest.raises(errors.ProtocolError, match="closed"):
        SharedHandle.recv(right, timeout=2.0)
    with pytest.raises(errors.KVReuseError):
        shared.send(right, timeout=2.0)


def test_record_after_record_keeps_its_own_fd(pair, provider):
    """H4: two records sent before the first is received do not mix."""
    with provider.allocate(10) as one, provider.allocate(3 * PAGE) as two:
        for region in (one, two):
            with region.export() as shared:
                shared.send(pair[0])
        for region in (one, two):
            with SharedHandle.recv(pair[1]) as got, provider.import_region(got) as imported:
                assert imported.region_id == region.region_id


def test_record_that_comes_in_pieces_is_read(pair, provider, shared):
    """F5: a stream may cut a message anywhere: the rest is waited for, within the bound."""
    record = shared.to_bytes()
    send_raw(pair[0], record[:100], [shared.fileno()])
    thread = threading.Thread(target=pair[0].sendall, args=(record[100:],))
    thread.start()
    try:
        with SharedHandle.recv(pair[1], timeout=5.0) as got, provider.import_region(got) as region:
            assert region.region_id == shared.region_id
    finally:
        thread.join(10)
    send_raw(pair[0], record[:100], [shared.fileno()])
    with pytest.raises(errors.WaitTimeoutError):
        SharedHandle.recv(pair[1], timeout=0.05)


@pytest.mark.parametrize("timeout", [0.0, 0.05])
def test_waits_are_bounded(pair, shared, timeout):
    """F4: nothing comes, and nobody reads: WaitTimeoutError within the bound, on a blocking socket too."""
    left, right = pair
    start = time.monotonic()
    with pytest.raises(errors.WaitTimeoutError):
        SharedHandle.recv(right, timeout=timeout)
    left.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            left.send(bytes(65536))
    left.setblocking(True)
    with pytest.raises(errors.WaitTimeoutError):
        shared.send(left, timeout=timeout)
    assert time.monotonic() - start < 5


def test_records_that_a_stream_glues_together_are_told_apart(pair, shared):
    """F5: two records without fds, sent before the first is received, are two records."""
    for byte in (b"1", b"2"):
        data = made_of(shared.to_bytes(), kind=HandleKind.FABRIC, payload_nbytes=64, payload=byte * 64)
        with SharedHandle.from_bytes(data) as fabric:
            fabric.send(pair[0])
    for byte in (b"1", b"2"):
        with SharedHandle.recv(pair[1]) as got:
            assert got.payload == byte * 64


def test_short_record_of_another_version_is_not_waited_for(pair, shared):
    """C3's rule for the record: the version is told at once, whatever its length; its fd is closed."""
    send_raw(pair[0], shared.to_bytes()[:4] + struct.pack("<H", 2) + b"short", [shared.fileno()])
    with pytest.raises(errors.IncompatibleError):
        SharedHandle.recv(pair[1], timeout=30.0)


def test_peer_that_closes_amid_a_record_is_told(pair, shared):
    """F5: the fd that came with the first piece is closed."""
    send_raw(pair[0], shared.to_bytes()[:60], [shared.fileno()])
    pair[0].close()
    with pytest.raises(errors.ProtocolError, match="60 of 148") as error:
        SharedHandle.recv(pair[1], timeout=30.0)
    assert (error.value.expected, error.value.got) == (RECORD_NBYTES, 60)


def test_sequenced_packets_carry_records_too(provider, shared):
    """Section 6: any connected AF_UNIX socket; a packet that is too long is refused, its fd closed."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        works((left, right), provider, shared)
        send_raw(left, shared.to_bytes() + b"more", [shared.fileno()])
        with pytest.raises(errors.ProtocolError):
            SharedHandle.recv(right)
        send_raw(left, shared.to_bytes()[:90], [shared.fileno()])
        with pytest.raises(errors.CorruptError):
            SharedHandle.recv(right)
        works((left, right), provider, shared)


def test_only_unix_sockets(shared):
    """Section 6: fds travel over AF_UNIX only: ProtocolError for another family."""
    with socket.socket(socket.AF_INET) as sock:
        with pytest.raises(errors.ProtocolError, match="AF_UNIX"):
            shared.send(sock)
        with pytest.raises(errors.ProtocolError, match="AF_UNIX"):
            SharedHandle.recv(sock)
