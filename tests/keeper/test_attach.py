"""Attach has one outcome: RESTORED, EMPTY or REFUSED; and what becomes of a part when its writer is gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import keeper_peers
import msgspec
import pytest
from keeper_peers import (
    ON,
    TIMEOUT_S,
    FailingBackend,
    Peer,
    Worker,
    fd_count,
    fill,
    keeper_thread,
    key,
    manifest,
)

import kvreuse
import kvreuse.testing
from kvreuse._select import backend as local_backend
from kvreuse.keeper import accounting, held, processes, protocol, server

RANK = kvreuse.Rank()
EMPTY, RESTORED = kvreuse.OutcomeKind.EMPTY, kvreuse.OutcomeKind.RESTORED


def attach(client, rank=RANK, blocks=8, group="default", **changes):
    return client.attach(manifest(**changes), rank, blocks=blocks, group=group)


def outcome(client, **arguments):
    with attach(client, **arguments) as part:
        return part.outcome


# ---- one writer ----


def test_blocks_come_back_after_goodbye(both):
    """R2."""
    with attach(both) as part:
        assert (part.outcome.kind, part.outcome.reason) == (EMPTY, "new")
        assert part.reuse.enabled
        fill(part, range(5))
    with attach(both) as part:
        assert part.outcome == kvreuse.Outcome(RESTORED, 5, "")
        with part.claim([key(n) for n in range(8)]) as claim:
            assert len(claim) == 5
            assert bytes(claim.view(4)) == bytes([4]) * 4096


def test_blocks_come_back_after_sigkill(both_path, both):
    """K1, A1(a): unfinished slots and claims of the dead are free again, sealed blocks are there."""
    with Worker(both_path, store=range(5), leave=[90, 91]) as worker:
        assert worker.said == {"kind": "EMPTY", "blocks": 0, "reason": "new"}
        os.kill(worker.pid, signal.SIGKILL)
        worker.process.wait(TIMEOUT_S)
        with attach(both) as part:
            assert part.outcome == kvreuse.Outcome(RESTORED, 5, "")
            assert (part.stats().free_count, part.stats().claimed_count) == (3, 0)
            assert part.match([key(n) for n in range(8)]) == 5


def test_living_writer_refuses_another(both_path, both):
    """R6, A1(f): REFUSED with the pid; the writer is untouched. Its own process is no exception."""
    with Worker(both_path, store=[1]) as worker:
        with pytest.raises(kvreuse.AttachRefusedError, match=f"writer alive.*pid {worker.pid}") as error:
            attach(both)
        assert error.value.pid == worker.pid
        assert error.value.outcome.kind is kvreuse.OutcomeKind.REFUSED
        assert both.group("default").readiness().ready
    with attach(both), pytest.raises(kvreuse.AttachRefusedError, match=f"pid {os.getpid()}"):
        attach(both)
    assert outcome(both).kind is RESTORED


def test_stopped_writer_is_alive(path, client):
    """R6: no timeout is proof."""
    with Worker(path) as worker:
        os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(kvreuse.AttachRefusedError, match="writer alive"):
            attach(client)


def test_restore_after_layout_was_sealed_without_a_commit(path, client):
    """A12, second half."""
    with Worker(path):
        pass
    assert outcome(client) == kvreuse.Outcome(RESTORED, 0, "")


def test_sessions_are_never_reused(path):
    """S5."""
    seen = set()
    for number in range(5):
        with Peer(path) as peer:
            attached = peer.attach(attach_id=bytes([number]) * 16)
            seen.add(attached.session)
            assert peer.ask(protocol.Goodbye, attach_id=bytes([number]) * 16).value == 1
    assert len(seen) == 5
    assert all(0 < session < 2**63 for session in seen)


# ---- the profile ----


def test_without_profile_nothing_is_retained():
    """P1: default off, and says why."""
    with kvreuse.testing.keeper() as path, kvreuse.connect(path) as client:
        for _ in range(2):
            with attach(client) as part:
                assert part.outcome.kind is EMPTY
                assert part.outcome.reason == part.reuse.reason == "reuse is off: no profile was declared"
                fill(part, [1])
                assert part.match([key(1)]) == 0
            assert client.status()["parts"] == []
        with Worker(path) as worker:
            worker.kill()
            wait_for(client, lambda status: not status["parts"])


def wait_for(client, condition):
    """The keeper learns of a death by its own event: ask until it has."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        status = client.status()
        if condition(status):
            return status
    raise AssertionError(f"it did not happen: {status}")


def test_part_expires():
    """K4, A11: ttl_s."""
    with kvreuse.testing.keeper(ON + "[retention]\nttl_s = 0.05\n") as path, kvreuse.connect(path) as client:
        with attach(client) as part:
            fill(part, [1])
        wait_for(client, lambda status: not status["parts"])
        assert outcome(client) == kvreuse.Outcome(EMPTY, 0, "expired")
        assert client.status()["last_emptied"][0]["reason"] == "expired"


def test_retention_is_bounded_by_parts():
    """K4: the oldest waiting part makes room; a living one never does."""
    with kvreuse.testing.keeper(ON + "[retention]\nmax_parts = 2\n") as path, kvreuse.connect(path) as client:
        for group in "abc":
            with attach(client, group=group) as part:
                fill(part, [1])
        assert {part["group"] for part in client.status()["parts"]} == {"b", "c"}
        assert outcome(client, group="a").reason == "dropped to make room for another part"
        refused = pytest.raises(kvreuse.AttachRefusedError, match=r"allows 2 part\(s\)")
        with attach(client, group="a"), attach(client, group="b"), refused:
            attach(client, group="c")


def test_retention_is_bounded_by_bytes():
    """K4, F12: never above max_bytes; a part that can never fit is REFUSED and drops nothing."""
    limit = 1 << 20
    with (
        kvreuse.testing.keeper(ON + f"[retention]\nmax_bytes = {limit}\n") as path,
        kvreuse.connect(path) as client,
    ):
        for group in "abc":
            outcome(client, group=group, blocks=100)
        status = client.status()
        assert [part["group"] for part in status["parts"]] == ["b", "c"]
        assert status["bytes"] <= status["max_bytes"] == limit
        with pytest.raises(kvreuse.AttachRefusedError, match="max_bytes is 1048576"):
            attach(client, group="d", blocks=1000)
        with pytest.raises(kvreuse.AttachRefusedError, match="max_bytes"):
            attach(client, group="c", blocks=1000)  # another manifest too: refused before anything is retired
        assert [part["group"] for part in client.status()["parts"]] == ["b", "c"]


# ---- groups ----


def test_other_manifest_empties_and_names_the_fields(both):
    """R3, A1(b): both values of each field."""
    with attach(both) as part:
        fill(part, [1])
    found = outcome(both, block_tokens=32, weights_id="w2")
    assert found.kind is EMPTY
    assert "block_tokens: 16 kept, 32 asked" in found.reason
    assert "weights_id: 'w1' kept, 'w2' asked" in found.reason
    assert outcome(both, block_tokens=32, weights_id="w2").kind is RESTORED
    assert outcome(both, blocks=9, block_tokens=32, weights_id="w2").reason.endswith("blocks: 8 kept, 9 asked")


def test_other_manifest_is_refused_while_any_rank_lives(path, client):
    """R6: and nothing of the group changes."""
    two = {"topology": kvreuse.Topology(tp=2)}
    with Worker(path, rank=kvreuse.Rank(tp=1), store=[1], **two) as worker:
        with attach(client, **two) as part:
            fill(part, [1])
        with pytest.raises(kvreuse.AttachRefusedError, match="layers: 1 kept, 2 asked") as error:
            attach(client, layers=2, **two)
        assert error.value.pid == worker.pid
        assert outcome(client, **two) == kvreuse.Outcome(RESTORED, 1, "")


def test_other_manifest_retires_all_ranks_of_the_group(client):
    """The other ranks are told why too."""
    two = {"topology": kvreuse.Topology(tp=2)}
    for tp in range(2):
        with attach(client, rank=kvreuse.Rank(tp=tp), **two) as part:
            fill(part, [1])
    with attach(client, layers=2, **two):
        assert len(client.status()["parts"]) == 1
        assert "layers: 1 kept, 2 asked" in outcome(client, rank=kvreuse.Rank(tp=1), layers=2, **two).reason
    assert outcome(client, rank=kvreuse.Rank(tp=1), layers=2, **two).kind is RESTORED


def test_ranks_of_other_pp_may_differ_in_block_bytes(client):
    """R3: but the ranks of one pp may not."""
    four = {"topology": kvreuse.Topology(tp=2, pp=2)}
    with (
        attach(client, rank=kvreuse.Rank(pp=0), **four),
        attach(client, rank=kvreuse.Rank(pp=1), block_bytes=8192, **four),
    ):
        with pytest.raises(kvreuse.AttachRefusedError, match="block_bytes: 8192 kept, 4096 asked"):
            attach(client, rank=kvreuse.Rank(tp=1, pp=1), **four)
        with pytest.raises(kvreuse.AttachRefusedError, match="block_bytes: 4096 kept, 8192 asked"):
            attach(client, rank=kvreuse.Rank(tp=1, pp=0), block_bytes=8192, **four)


def test_dp_is_another_group(client):
    two = {"topology": kvreuse.Topology(dp=2)}
    with attach(client, rank=kvreuse.Rank(dp=0), **two), attach(client, rank=kvreuse.Rank(dp=1), **two):
        assert client.group("default", dp=0).readiness().ready
        assert client.group("default", dp=1).readiness().ready


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"rank": kvreuse.Rank(tp=1)}, "rank tp=1 is outside of the topology"),
        ({"rank": kvreuse.Rank(dp=1)}, "rank dp=1 is outside of the topology"),
        ({"blocks": 0}, "blocks must be 1 to"),
        ({"blocks": -1}, "blocks must be 1 to"),
        ({"blocks": 2**31}, "blocks must be 1 to"),
        ({"group": ""}, "a group's name has 1 to 256 bytes"),
        ({"group": "x" * 257}, "a group's name has 1 to 256 bytes"),
        ({"blocks": 2**30, "block_bytes": 2**40}, "more than"),
        ({"topology": kvreuse.Topology(tp=2**40)}, "at most 4096 ranks"),
    ],
)
def test_bad_arguments_are_range_errors(client, arguments, match):
    """H7: and leave nothing."""
    with pytest.raises(kvreuse.RangeError, match=match):
        attach(client, **arguments)
    assert client.status()["parts"] == []
    assert outcome(client).reason == "new"


@pytest.mark.parametrize("blocks", [1.5, True, None, "8"])
def test_blocks_must_be_an_integer(client, blocks):
    """H7."""
    with pytest.raises(TypeError, match="blocks must be an integer"):
        attach(client, blocks=blocks)


def test_other_provider_is_not_supported(client):
    """Unknown words at the keeper; CUDA where there is no driver at the worker, and nothing is left of the attach."""
    for provider in ("shm", "cuda", "cuda:x"):
        with pytest.raises(kvreuse.NotSupportedError, match="is unknown: expected"):
            client.attach(manifest(), RANK, blocks=8, provider=provider)
    with pytest.raises(kvreuse.NotSupportedError, match=r"libcuda\.so\.1"):
        client.attach(manifest(), RANK, blocks=8, provider="cuda:0")
    assert client.status()["parts"] == []


# ---- damage ----


@pytest.mark.parametrize(
    ("offset", "match"),
    [
        (33, "corrupt: the superblock is damaged"),
        (0, "corrupt: this is no part"),
        (8, "incompatible: the part has version"),
    ],
)
def test_damaged_superblock_empties(folder, offset, match):
    """A1(d), C3: found when the part is offered again; what the version says comes before all else."""
    with keeper_thread(f"{folder}/k") as service, kvreuse.connect(f"{folder}/k") as client:
        with attach(client) as part:
            fill(part, [1])
        (held,) = service._parts.values()
        flip(held.memory.table_region.handle, offset)
        found = outcome(client)
        assert found.kind is EMPTY
        assert found.reason.startswith(match)
        assert outcome(client).kind is RESTORED


def flip(region, offset):
    fd = local_backend.region_export(region)
    try:
        os.pwrite(fd, bytes([os.pread(fd, 1, offset)[0] ^ 1]), offset)
    finally:
        os.close(fd)


def test_one_damaged_record_is_freed_and_counted(folder):
    """A1(c): RESTORED(n - 1)."""
    with keeper_thread(f"{folder}/k") as service, kvreuse.connect(f"{folder}/k") as client:
        with attach(client) as part:
            fill(part, range(8))
        (held,) = service._parts.values()
        size = local_backend.table_info(held.memory.table).manifest_nbytes
        flip(held.memory.table_region.handle, local_backend.table_layout(8, size).record_offset_bytes + 3)
        with attach(client) as part:
            assert (part.outcome.kind, part.outcome.blocks) == (RESTORED, 7)
            assert part.stats().corrupt_total == 1


def test_manifest_area_describes_all_that_a_keeper_needs(folder):
    """K2 (later): the keeper's state is rebuildable from the part's fds alone."""
    with keeper_thread(f"{folder}/k") as service, kvreuse.connect(f"{folder}/k") as client, attach(client):
        (held,) = service._parts.values()
        found = msgspec.msgpack.decode(local_backend.table_manifest(held.memory.table))
        assert (found["group"], found["dp"], found["rank"]) == ("default", 0, RANK.to_dict())
        assert kvreuse.Manifest.from_dict(found["manifest"]) == manifest()
        regions = [held.memory.claims_region, held.memory.lock_region, *held.data]
        records = [found["claims"], found["lock"], *found["data"]]
        for region, record in zip(regions, records, strict=True):
            info = local_backend.region_info(region.handle)
            assert record[:3] == [info.nbytes, info.physical_nbytes, info.region_id]
            assert record[3:5] == [info.device, info.inode]
        assert found["table_region_id"] == local_backend.region_info(held.memory.table_region.handle).region_id


# ---- donation ----


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(("blocks", "count"), [(8, 8), (10, 3), (10, 6), (300, 300)])
def test_donated_regions_outlive_the_worker(client, blocks, count):
    """F5: a set of 300 fds arrives complete, in batches; the donor's handles may go at once."""
    each = -(-blocks // count)
    regions = []
    try:
        regions += [kvreuse.open_provider("host").allocate(each * 4096) for _ in range(count)]
        part = client.attach(manifest(), RANK, blocks=blocks, regions=regions)
    finally:
        for region in regions:
            region.close()
    with part:
        assert part.outcome.reason == "new"
        fill(part, range(blocks))
    with attach(client, blocks=blocks) as part:
        assert part.outcome.blocks == blocks
        with part.claim([key(n) for n in range(blocks)]) as claim:
            for n in range(blocks):
                assert bytes(claim.view(n)) == bytes([n % 256]) * 4096


def test_donation_cut_short_leaves_nothing(path, client):
    """A12: a writer killed after 5 of 8 regions; the next attach is EMPTY and the 5 are freed."""
    code = """
import os, signal, sys
import kvreuse
from keeper_peers import manifest
from kvreuse.keeper import client, protocol

send = protocol.send
def counted(sock, message, fds=()):
    if isinstance(message, protocol.Donate) and message.index == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    send(sock, message, fds)
client.protocol.send = counted
provider = kvreuse.open_provider("host")
regions = [provider.allocate(4096) for _ in range(8)]
kvreuse.connect(sys.argv[1]).attach(manifest(), kvreuse.Rank(), blocks=8, regions=regions)
"""
    pid = client.status()["pid"]
    before = fd_count(pid)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(keeper_peers.__file__), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code, path], env=environ, timeout=TIMEOUT_S, check=False)
    assert done.returncode == -signal.SIGKILL
    wait_for(client, lambda status: not status["parts"])
    wait_for(client, lambda status: fd_count(pid) == before)
    assert outcome(client).reason == "new"


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(
    ("sizes", "blocks", "error", "match"),
    [
        ([4096, 4096], 8, kvreuse.SizeMismatchError, "region 0 has 4096 bytes: the part needs 16384"),
        ([32768, 4096], 8, kvreuse.SizeMismatchError, "region 1 has 4096 bytes"),
        ([4096] * 3, 2, kvreuse.RangeError, "takes 1 to 2 regions: got 3"),
    ],
)
def test_bad_donation_is_refused_and_leaves_nothing(client, sizes, blocks, error, match):
    regions = [kvreuse.open_provider("host").allocate(size) for size in sizes]
    with pytest.raises(error, match=match):
        client.attach(manifest(), RANK, blocks=blocks, regions=regions)
    for region in regions:
        region.close()
    assert client.status()["parts"] == []
    assert outcome(client).reason == "new"


def test_unsealed_donation_is_refused(path, client):
    """F7, S4: memory that its donor could cut."""
    fd = os.memfd_create("kvreuse:unsealed", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, 8 * 4096)
        found = os.fstat(fd)
        with Peer(path) as peer:
            need = peer.attach(donate=1)
            assert need.nbytes == [8 * 4096]
            record = (8 * 4096, 8 * 4096, bytes(16), found.st_dev, found.st_ino, False)
            answer = peer.ask(protocol.Donate, [fd], session=need.session, index=0, record=record)
            assert "not sealed" in answer.text
            readiness = client.group("default").readiness()
            assert "layout is not sealed" in readiness.ranks[0].reason
            assert client.status()["parts"][0]["state"] == "CREATING"
            assert peer.ask(protocol.Goodbye, attach_id=bytes(16)).value == 1
    finally:
        os.close(fd)
    assert client.status()["parts"] == []


def test_a_donation_that_starts_again_is_counted_once(path, client):
    """K4: one region more than is needed is given, the connection is cut before the second, and it starts again."""
    expected = accounting.part_nbytes(8, 4096)
    with kvreuse.open_provider("host").allocate(16 * 4096) as region, region.export() as shared:
        record = (shared.nbytes, shared.physical_nbytes, shared.region_id, shared.device, shared.inode, False)
        for _ in range(2):
            with Peer(path) as peer:
                need = peer.attach(donate=2)
                assert client.status()["parts"][0]["bytes"] == expected
                peer.ask(protocol.Donate, [shared.fileno()], session=need.session, index=0, record=record)
                assert client.status()["parts"][0]["bytes"] == expected + 12 * 4096


# ---- sessions ----


def test_attach_is_idempotent_per_process_and_attach_id(path):
    """An answer that was lost: asked again, also on a new connection of the same process."""
    with Peer(path) as peer:
        first = peer.attach()
        assert peer.attach().session == first.session
        assert isinstance(peer.attach(attach_id=b"x" * 16), protocol.Refused)
    with Peer(path) as peer:
        assert peer.attach().session == first.session


def test_cut_connection_of_a_living_process_keeps_the_session(path, client):
    """R6, B10: EOF is no proof; the session is listed as disconnected, and resumed by its process alone."""
    with Peer(path) as peer:
        session = peer.attach().session
        peer.ask(protocol.Confirm, session=session, kind="EMPTY", blocks=0, reason="new")
    status = wait_for(client, lambda status: not status["parts"][0]["sessions"][0]["connected"])
    assert status["parts"][0]["state"] == "LIVE"
    with pytest.raises(kvreuse.AttachRefusedError, match="writer alive"):
        attach(client)
    with Peer(path) as peer:
        answer = peer.ask(protocol.Resume, session=session, attach_id=b"y" * 16)
        assert "another attach id" in answer.text
        assert isinstance(peer.ask(protocol.Resume, session=session, attach_id=bytes(16)), protocol.Done)
        assert client.status()["parts"][0]["sessions"][0]["connected"]


def test_another_process_cannot_resume_or_end_a_session(path, client):
    """S5: a session belongs to its pidfd's process."""
    code = """
import sys
from keeper_peers import Peer
from kvreuse.keeper import protocol
with Peer(sys.argv[1]) as peer:
    print(peer.ask(protocol.Resume, session=int(sys.argv[2]), attach_id=bytes(16)).text)
    print(peer.ask(protocol.Confirm, session=int(sys.argv[2]), kind="EMPTY", blocks=0, reason="").text)
    print(peer.ask(protocol.Goodbye, attach_id=bytes(16)).value)
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(keeper_peers.__file__), *sys.path])}
    with Peer(path) as peer:
        session = peer.attach().session
        command = [sys.executable, "-c", code, path, str(session)]
        done = subprocess.run(command, env=environ, timeout=TIMEOUT_S, check=True, capture_output=True, text=True)
        lines = done.stdout.splitlines()
        assert "another process's" in lines[0]
        assert "another process's" in lines[1]
        assert lines[2] == "0"
        assert isinstance(peer.ask(protocol.Confirm, session=session, kind="EMPTY", blocks=0, reason=""), protocol.Done)


def test_client_resumes_after_its_connection_broke(client):
    """B10: the same session goes on; the call that found out is carried out."""
    with attach(client) as part:
        fill(part, [1])
        client._sock.shutdown(2)
        (held,) = client.status()["parts"]
        assert held["sessions"][0]["connected"]
        assert held["sessions"][0]["session"] == part._attachment.session
        client._sock.shutdown(2)
    assert outcome(client) == kvreuse.Outcome(RESTORED, 1, "")


def test_goodbye_that_could_not_be_said_is_said_later(folder):
    """R6: a part closed while the keeper cannot be reached does not stay held by its living process."""
    with keeper_thread(f"{folder}/k"), kvreuse.connect(f"{folder}/k", timeout=0.2) as client:
        part = attach(client)
        os.rename(f"{folder}/k", f"{folder}/away")
        client._sock.shutdown(2)
        part.close()
        os.rename(f"{folder}/away", f"{folder}/k")
        assert client.status()["parts"][0]["state"] == "WAITING"
        assert outcome(client).kind is RESTORED


def test_goodbye_that_could_not_be_said_is_said_at_close(folder):
    """R6: the next connection of this process gets the part."""
    with keeper_thread(f"{folder}/k"), kvreuse.connect(f"{folder}/k") as other:
        client = kvreuse.connect(f"{folder}/k", timeout=0.2)
        part = attach(client)
        os.rename(f"{folder}/k", f"{folder}/away")
        client._sock.shutdown(2)
        part.close()
        os.rename(f"{folder}/away", f"{folder}/k")
        client.close()
        assert outcome(other).kind is RESTORED


def test_part_dropped_in_the_middle_of_a_call_is_given_back(client, monkeypatch):
    """A finalizer that runs inside of a call of its thread neither waits for it nor disturbs it."""
    held = [attach(client)]
    send = protocol.send

    def drop_and_send(*arguments):
        held.clear()
        send(*arguments)

    monkeypatch.setattr(protocol, "send", drop_and_send)
    started = time.monotonic()
    with pytest.warns(ResourceWarning, match="dropped without close"):
        client.status()
    assert client.status()["parts"][0]["state"] == "WAITING"
    assert time.monotonic() - started < 2


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("free", [2, 0])
def test_attach_with_few_free_fds_can_be_tried_again(client, few_fds, free):
    """F4, S3: the keeper keeps no session for it; the same connection works."""
    with few_fds(free), pytest.raises(kvreuse.ProtocolError) as error:
        attach(client)
    assert (error.value.expected, error.value.got) == (4, free)
    sock = client._sock
    assert outcome(client).kind is RESTORED
    assert client._sock is sock


@pytest.mark.parametrize("inodes_tell", [True, False])
def test_kernel_without_peer_pidfd(folder, monkeypatch, inodes_tell):
    """F1: before Linux 6.5 the pidfd comes by the pid, and the start time tells that it is the same process."""
    monkeypatch.setattr(processes, "SO_PEERPIDFD", 9999)
    monkeypatch.setattr(processes, "_inodes_tell", lambda: inodes_tell)
    with keeper_thread(f"{folder}/k"), kvreuse.connect(f"{folder}/k", timeout=10) as client:
        with Worker(f"{folder}/k", store=[1]) as worker, pytest.raises(kvreuse.AttachRefusedError) as error:
            attach(client)
        assert error.value.pid == worker.pid
        with attach(client) as part:
            assert part.outcome == kvreuse.Outcome(RESTORED, 1, "")
            client._sock.shutdown(2)
            assert client.group("default").readiness().ready


@pytest.mark.usefixtures("no_leaks")
def test_a_pid_that_was_reused_is_no_proof(monkeypatch):
    """S5: between asking for the pid and opening its pidfd, another process got the number."""
    starts = iter([100, 200])
    monkeypatch.setattr(processes, "SO_PEERPIDFD", 9999)
    monkeypatch.setattr(processes, "start_time", lambda pid: next(starts))
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(OSError, match="Protocol not available"):
        processes.peer_process(ours)


def test_kernel_without_proof_of_death_refuses(folder, monkeypatch):
    """F1, R6: without a pidfd nobody becomes a writer; the rest of the service works."""

    def refuse(pid, flags=0):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(processes, "SO_PEERPIDFD", 9999)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    with keeper_thread(f"{folder}/k"), kvreuse.connect(f"{folder}/k") as client:
        with pytest.raises(kvreuse.AttachRefusedError, match="no proof of a process's end"):
            attach(client)
        assert client.status()["parts"] == []


def test_keeper_does_not_wait_for_a_parts_lock(folder):
    """K7: a dead writer's slots are freed as soon as the lock is; until then everything else goes on."""
    hold = "import fcntl, sys; fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX, 1, 0); print(flush=True); sys.stdin.read()"
    with keeper_thread(f"{folder}/k") as service, kvreuse.connect(f"{folder}/k") as client:
        with Worker(f"{folder}/k", store=range(3), leave=[90, 91]):
            (held,) = service._parts.values()
            fd = local_backend.region_export(held.memory.lock_region.handle)
            holder = subprocess.Popen(
                [sys.executable, "-c", hold, str(fd)], pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            os.close(fd)
            assert holder.stdout.readline() == b"\n"
        status = wait_for(client, lambda status: status["parts"][0]["state"] == "WAITING")
        assert status["parts"][0]["free"] == 3
        assert outcome(client, group="other").kind is EMPTY
        holder.communicate(timeout=TIMEOUT_S)
        wait_for(client, lambda status: status["parts"][0]["free"] == 5)


# ---- leaks and faults ----


@pytest.mark.usefixtures("no_leaks")
def test_attach_and_close_leak_nothing(client):
    """H6: neither here nor in the keeper, over restores and fresh parts."""
    pid = client.status()["pid"]
    outcome(client)
    before, here = fd_count(pid), local_backend.handle_counts()
    for number in range(100):
        with attach(client, layers=1 + number // 50) as part:
            part.clear()
            fill(part, [number % 8])
    assert fd_count(pid) == before
    assert local_backend.handle_counts() == here


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("kept", [False, True])
def test_fault_at_any_step_of_the_keeper_leaves_nothing(folder, monkeypatch, kept):
    """R2: an attach that fails anywhere in the keeper is an error, holds nothing, and the next one works."""
    counts = local_backend.handle_counts()
    allocate_named = server.allocate_named
    for step in range(200):
        with keeper_thread(f"{folder}/k") as service, kvreuse.connect(f"{folder}/k") as client:
            if kept:
                with attach(client) as part:
                    fill(part, [1])
            failing = FailingBackend(step)

            def allocate(*arguments, failing=failing):
                failing.check("host_allocate")
                return allocate_named(*arguments)

            with monkeypatch.context() as patch:
                patch.setattr(server, "_backend", failing)
                patch.setattr(accounting, "_backend", failing)
                patch.setattr(held, "_backend", failing)
                patch.setattr(server, "allocate_named", allocate)
                try:
                    attach(client).close()
                    reached = failing.failed()
                except kvreuse.NoSpaceError:
                    reached = True
            assert not service._sessions
            assert all(part.writer is None for part in service._parts.values())
            with attach(client) as part:
                assert part.match([key(1)]) == kept  # a fault of the keeper loses nothing
        assert local_backend.handle_counts() == counts
        if not reached:
            break
    assert 10 < step < 199


@pytest.mark.usefixtures("no_leaks")
def test_fault_in_the_worker_gives_the_part_back(client, monkeypatch):
    """R2: whatever fails while the part is opened."""
    import kvreuse.parts

    outcome(client)
    for step in range(100):
        failing = FailingBackend(step)
        with monkeypatch.context() as patch:
            patch.setattr(kvreuse.parts, "_backend", failing)
            try:
                part = attach(client)
            except kvreuse.NoSpaceError:
                part = None
            finally:
                failing.step = 10**9
            if part is not None:
                part.close()
        assert client.status()["parts"][0]["state"] == "WAITING"
        if part is not None and failing.calls < step:
            break
    assert step > 5


# ---- operators ----


def test_release_gives_back_what_waits(path, client):
    """F12: whole parts, never one with a worker."""
    outcome(client, group="a")
    outcome(client, group="b")
    with attach(client, group="live") as part:
        with pytest.raises(kvreuse.BusyError, match=f"pid {os.getpid()}"):
            client.release(part.part_id)
        assert client.release() == 2
        assert [item["group"] for item in client.status()["parts"]] == ["live"]
    assert client.release(part.part_id) == 1
    with pytest.raises(kvreuse.InvalidHandleError, match="is not here"):
        client.release(part.part_id)
    assert outcome(client, group="a").reason == "released by an operator"


def test_released_part_fences_nobody_else(path, client):
    """R6: a part whose worker said goodbye may be released while that process lives on."""
    part = attach(client)
    part.close()
    assert client.release(part.part_id) == 1
    assert outcome(client).reason == "released by an operator"
