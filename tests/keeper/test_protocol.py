"""Frames: exact, bounded, versioned; fds all or none."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keeper_peers import TIMEOUT_S, Peer, fd_count, manifest

import kvreuse
from kvreuse.keeper import protocol

GOODBYE = protocol.Goodbye(serial=7, attach_id=bytes(16))


@pytest.fixture
def pair():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with a, b:
        a.settimeout(TIMEOUT_S)
        b.settimeout(TIMEOUT_S)
        yield a, b


def header(magic=b"KVRF", version=1, zero=0, size=0, fds=0):
    return struct.pack("<4sHHII", magic, version, zero, size, fds)


@pytest.mark.usefixtures("no_leaks")
def test_frame_arrives_with_its_fds(pair):
    """H6: received fds are CLOEXEC."""
    a, b = pair
    with open(os.devnull) as file:
        protocol.send(a, GOODBYE, [file.fileno()] * 3)
    message, fds = protocol.recv_request(b, 10)
    assert message == GOODBYE
    assert len(fds) == 3
    assert not any(os.get_inheritable(fd) for fd in fds)
    protocol.close_fds(fds)


@pytest.mark.parametrize(
    "frame",
    [
        b"x",
        b"GET / HTTP/1.1\r\n\r\n",
        header(magic=b"KVRX"),
        header()[:6],
        header(zero=1),
        header(size=1),
        header(size=2**31),
        header(size=2**32 - 1),  # -1
        header(size=3) + b"\xc1\xc1\xc1",
        header(size=1) + b"\xc0",
    ],
)
def test_garbage_is_protocol_error(pair, frame):
    """S2, F16: the length must equal the rest; nothing is allocated by it."""
    a, b = pair
    a.send(frame)
    tracemalloc.start()
    try:
        with pytest.raises(kvreuse.ProtocolError) as error:
            protocol.recv_request(b, 4)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert not getattr(error.value, "usable", False)


def test_version_is_read_before_anything_else(pair):
    """S2."""
    a, b = pair
    a.send(b"KVRF\x02\x00")
    with pytest.raises(kvreuse.ProtocolError, match="version 2, this is 1"):
        protocol.recv_request(b, 4)


def test_deep_nesting_is_protocol_error(pair):
    """S2."""
    a, b = pair
    payload = b"\x83\xa4type\xa6Attach\xa6serial\x01\xa8manifest\x81\xa1x" + b"\x91" * 60000 + b"\xc0"
    a.send(header(size=len(payload)) + payload)
    with pytest.raises(kvreuse.ProtocolError, match="not well-formed"):
        protocol.recv_request(b, 4)


def test_frame_over_64_kib_is_refused_on_both_ends(pair):
    """S2."""
    a, b = pair
    with pytest.raises(kvreuse.ProtocolError, match="at most 65536 bytes"):
        protocol.send(a, protocol.Failed(serial=0, status=-1, text="x" * 65536, fields={}))
    a.send(header(size=70000 - 16) + bytes(70000 - 16))
    with pytest.raises(kvreuse.ProtocolError, match="at most 65536 bytes"):
        protocol.recv_request(b, 4)


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(("declared", "sent"), [(1, 2), (2, 1), (0, 1), (1, 0), (4, 6)])
def test_other_fds_than_declared_are_closed(pair, declared, sent):
    """S3, F5: expected and got are told; the connection can go on."""
    a, b = pair
    frame = protocol.encode(GOODBYE, declared)
    with open(os.devnull) as file:
        socket.send_fds(a, [frame], [file.fileno()] * sent)
    with pytest.raises(kvreuse.ProtocolError) as error:
        protocol.recv_request(b, 10)
    assert (error.value.expected, error.value.got) == (declared, sent)
    assert (error.value.usable, error.value.serial) == (True, 7)
    protocol.send(a, GOODBYE)
    assert protocol.recv_request(b, 10) == (GOODBYE, [])


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("free", [2, 0])
def test_cut_fd_passing_is_closed_and_told(pair, few_fds, free):
    """S3, F4: a receiver with few free fds gets an error, keeps none, and the connection goes on."""
    a, b = pair
    with open(os.devnull) as file:
        protocol.send(a, GOODBYE, [file.fileno()] * 4)
        before = fd_count()
        with few_fds(free), pytest.raises(kvreuse.ProtocolError) as error:
            protocol.recv_request(b, 10)
        assert (error.value.expected, error.value.got) == (4, free)
        assert fd_count() == before
        protocol.send(a, GOODBYE, [file.fileno()] * 4)
    message, fds = protocol.recv_request(b, 10)
    assert (message, len(fds)) == (GOODBYE, 4)
    protocol.close_fds(fds)


@pytest.mark.usefixtures("no_leaks")
def test_more_fds_than_allowed_are_closed(pair):
    """S3."""
    a, b = pair
    with open(os.devnull) as file:
        protocol.send(a, GOODBYE, [file.fileno()] * 50)
    with pytest.raises(kvreuse.ProtocolError, match="expected 50"):
        protocol.recv_request(b, 1)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_protocol_error(data):
    """S2: no other exception comes out of what a peer sends."""
    for frame in (data, header(size=len(data)) + data):
        if frame:
            with contextlib.suppress(kvreuse.ProtocolError):
                protocol._decode(frame, 0, 0, protocol._request_decoder)


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
_fields = ["attach_id", "manifest", "rank", "group", "blocks", "provider", "donate", "session", "index", "record"]
_fields += ["kind", "reason", "first", "dp", "wait_s", "part_id", "abi", "backend", "version"]
_kinds = ["Hello", "Attach", "Donate", "Confirm", "Goodbye", "Resume", "GetStatus", "GetReadiness", "Release", "Other"]
_messages = st.builds(
    lambda kind, serial, rest: {**rest, "type": kind, "serial": serial},
    st.sampled_from(_kinds),
    st.integers(0, 9),
    st.dictionaries(st.sampled_from(_fields), _values),
)


def test_keeper_survives_any_messages(path):
    """S2: bad input is a clear error to that peer, nothing is lost, the service stays up."""
    sound = [
        msgspec.to_builtins(protocol.Hello(serial=1, abi=1, backend="b", version="v")) | {"type": "Hello"},
    ]

    @settings(deadline=None, max_examples=150)
    @given(st.lists(st.one_of(_messages, st.sampled_from(sound)), max_size=5))
    def play(messages):
        with Peer(path, hello=False) as peer:
            for message in messages:
                payload = msgspec.msgpack.encode(message)
                try:
                    peer.sock.send(header(size=len(payload)) + payload)
                    if message.get("wait_s") is None and peer.answer() is None:
                        break
                except ConnectionError:
                    break

    with kvreuse.connect(path) as keeper, keeper.attach(manifest(), kvreuse.Rank(), blocks=8, group="mine") as part:
        play()
        assert part.match([]) == 0
        assert keeper.group("mine").readiness().ready


def test_garbage_is_answered_and_closes_only_that_connection(path, client):
    """S2."""
    with Peer(path) as bad:
        bad.sock.send(b"garbage")
        answer = bad.answer()
        assert isinstance(answer, protocol.Failed)
        assert "no kvreuse frame" in answer.text
        assert bad.answer() is None
    assert client.status()["parts"] == []


def test_fds_that_were_not_asked_for_keep_the_connection(path):
    """S3: on the keeper's side too."""
    with Peer(path) as peer, open(os.devnull) as file:
        pid = peer.ask(protocol.GetStatus, first=0).summary["pid"]
        before = fd_count(pid)
        answer = peer.ask(protocol.GetStatus, [file.fileno()] * 2, first=0)
        assert isinstance(answer, protocol.Failed)
        assert "expected 0 fd(s), got 2" in answer.text
        assert isinstance(peer.ask(protocol.GetStatus, first=0), protocol.StatusPage)
        assert fd_count(pid) == before


def test_first_frame_must_be_hello(path):
    with Peer(path, hello=False) as peer:
        assert "first frame must be Hello" in peer.ask(protocol.GetStatus, first=0).text


def test_worker_of_another_abi_is_refused(path, client):
    """C3: abi is named with both values; the connection ends, the service goes on."""
    with Peer(path, hello=False) as peer:
        answer = peer.ask(protocol.Hello, abi=2, backend="core", version="9")
        assert answer.fields == {"abi": [1, 2]}
        with pytest.raises(kvreuse.IncompatibleError, match="ABI version 2") as error:
            protocol.raise_failed(answer)
        assert error.value.fields == {"abi": (1, 2)}
        assert peer.answer() is None
    assert client.status()["parts"] == []
