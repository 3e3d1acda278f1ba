"""The worker's end: connecting, threads, forks, status, readiness."""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time

import pytest
from keeper_peers import ON, TIMEOUT_S, Peer, Worker, keeper_thread, manifest

import kvreuse
import kvreuse.testing
from kvreuse.keeper import protocol
from kvreuse.keeper.client import default_path

TWO = {"topology": kvreuse.Topology(tp=2)}


def test_no_keeper_names_the_path_and_what_to_do(folder):
    with pytest.raises(kvreuse.KeeperUnavailableError, match=rf"{folder}/k: No such file.*kvreuse keeper --socket"):
        kvreuse.connect(f"{folder}/k")
    assert issubclass(kvreuse.KeeperUnavailableError, ConnectionError)


def test_default_path(monkeypatch):
    monkeypatch.delenv("KVREUSE_SOCKET", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert default_path() == "/run/kvreuse/keeper.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/x")
    assert default_path() == "/x/kvreuse/keeper.sock"
    monkeypatch.setenv("KVREUSE_SOCKET", "/y/s")
    assert default_path() == "/y/s"


def test_stopped_keeper_ends_in_an_error_in_time(path):
    """K7: each wait is bounded; it works again when the keeper does."""
    with kvreuse.connect(path) as client:
        pid = client.status()["pid"]
        client._timeout = 0.2
        os.kill(pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises(kvreuse.KeeperUnavailableError, match="did not answer within"):
                client.status()
            with pytest.raises(kvreuse.KeeperUnavailableError):
                client.attach(manifest(), kvreuse.Rank(), blocks=8, timeout=0.2)
            assert time.monotonic() - started < 5
        finally:
            os.kill(pid, signal.SIGCONT)
        client._timeout = 10
        # The attach that ran out may have been carried out: it was taken back.
        with client.attach(manifest(), kvreuse.Rank(), blocks=8) as part:
            assert part.outcome.kind in (kvreuse.OutcomeKind.EMPTY, kvreuse.OutcomeKind.RESTORED)


def test_part_goes_on_without_its_keeper(folder):
    """A5, K6: what is mapped stays; calls to the keeper say that it is gone."""
    with keeper_thread(f"{folder}/k"):
        client = kvreuse.connect(f"{folder}/k", timeout=0.3)
        with Worker(f"{folder}/k", group="other"):
            part = client.attach(manifest(), kvreuse.Rank(), blocks=8)
            with part.reserve([b"k"]) as reservation:
                reservation.view(0)[:] = b"x" * 4096
                reservation.commit()
            os.rename(f"{folder}/k", f"{folder}/away")
            client._sock.shutdown(2)
            with pytest.raises(kvreuse.KeeperUnavailableError):
                client.status()
            with part.claim([b"k"]) as claim:
                assert bytes(claim.view(0)) == b"x" * 4096
            os.rename(f"{folder}/away", f"{folder}/k")
        client.close()


def test_forked_child_may_not_use_it(path, run_python):
    """And releases nothing of its parent's."""
    code = """
import os, sys, warnings
import kvreuse.parts
warnings.simplefilter("ignore")
with kvreuse.connect(sys.argv[1]) as client:
    pid = os.fork()
    if pid == 0:
        for call in (client.status, client.close, lambda: client.group("g").readiness()):
            try:
                call()
            except kvreuse.ForkedError as error:
                print("refused:", error, flush=True)
        del client
        os._exit(0)
    os.waitpid(pid, 0)
    print(len(client.status()["parts"]))
"""
    done = run_python(code, path)
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["refused"] * 3 + ["0"], done


def test_closed_connection_is_refused(client):
    client.close()
    client.close()
    with pytest.raises(kvreuse.HandleClosedError):
        client.status()


def test_a_connection_that_python_closed_is_a_cut_one(client):
    """At the interpreter's exit the socket may go before what uses it: connected anew, or told, but no other error."""
    part = client.attach(manifest(), kvreuse.Rank(), blocks=8)
    client._sock.close()
    part.close()
    client._sock.close()
    assert client.status()["parts"][0]["state"] == "WAITING"


def test_dropped_connection_warns(path):
    client = kvreuse.connect(path)
    with pytest.warns(ResourceWarning, match="dropped without close"):
        del client


def test_close_closes_its_parts(path):
    with kvreuse.connect(path) as client:
        part = client.attach(manifest(), kvreuse.Rank(), blocks=8)
    with pytest.raises(kvreuse.HandleClosedError):
        part.match([b"k"])
    with kvreuse.connect(path) as client:
        assert client.status()["parts"][0]["state"] == "WAITING"


def test_profile_is_the_keepers():
    text = ON + "[retention]\nttl_s = 5.0\n[table]\nlock_wait_s = 0.5\n[checksum]\nwhen = 'attach'\n"
    with kvreuse.testing.keeper(text) as path, kvreuse.connect(path) as client:
        assert client.profile == kvreuse.Profile.from_toml(text)


def test_threads_share_a_connection(client):
    """Every object may be used from any thread."""
    errors = []

    def work(number):
        try:
            for _ in range(10):
                with client.attach(manifest(), kvreuse.Rank(), blocks=8, group=f"g{number}") as part:
                    assert client.group(f"g{number}").readiness().ready
                    assert part.match([b"k"]) == 0
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert errors == []


def test_status_is_paged(client):
    """S2."""
    parts = [client.attach(manifest(), kvreuse.Rank(), blocks=1, group=f"{'g' * 250}{n}") for n in range(70)]
    try:
        status = client.status()
        assert [part["group"] for part in status["parts"]] == [f"{'g' * 250}{n}" for n in range(70)]
        (session,) = status["parts"][0]["sessions"]
        assert (session["pid"], session["role"], session["outcome"]) == (os.getpid(), "writer", "EMPTY")
    finally:
        for part in parts:
            part.close()


# ---- readiness ----


def test_group_is_ready_when_all_ranks_are(path, client):
    """R4, A1(e): a reason for each rank."""
    group = client.group("default", manifest(**TWO))
    assert "does not exist" in group.readiness().reason
    with client.attach(manifest(**TWO), kvreuse.Rank(tp=0), blocks=8):
        found = group.readiness()
        assert not found
        assert str(found) == "not ready: rank 1: missing"
        assert (found.ranks[0].ready, found.ranks[0].pid, found.ranks[0].blocks) == (True, os.getpid(), 8)
        with Worker(path, rank=kvreuse.Rank(tp=1), **TWO) as worker:
            assert group.readiness().ready
            assert group.readiness().ranks[1].pid == worker.pid
            worker.process.kill()
            worker.process.wait(TIMEOUT_S)
            found = group.readiness()
            assert f"exited: its worker (pid {worker.pid}" in found.ranks[1].reason
        with Worker(path, rank=kvreuse.Rank(tp=1), **TWO):
            rank = group.wait_ready(TIMEOUT_S).ranks[1]
            assert 0 < rank.died_at < rank.ready_at < time.monotonic()


def test_what_the_keeper_answers_readers_find_too(folder):
    """R4, K6: the loop comes to a worker's death later than to a request, so the request notices it."""
    with (
        keeper_thread(f"{folder}/k") as service,
        kvreuse.connect(f"{folder}/k") as client,
        client.group("default") as group,
        Worker(f"{folder}/k") as worker,
    ):
        assert group.match([]) == 0
        assert not group.explain([]).missing
        (watched,) = (item for item in service._watched.values() if item.pid == worker.pid)
        service._selector.modify(watched.pidfd, selectors.EVENT_READ, lambda: None)
        worker.process.kill()
        worker.process.wait(TIMEOUT_S)
        assert f"exited: its worker (pid {worker.pid}" in group.readiness().reason
        assert group.explain([]).missing == (0,)
        assert client.release() == 1


def test_rank_is_ready_only_after_it_was_restored(path, client):
    """R4."""
    with Peer(path) as peer:
        session = peer.attach().session
        assert client.group("default").readiness().reason == "rank 0: attaching"
        peer.ask(protocol.Confirm, session=session, kind="EMPTY", blocks=0, reason="new")
        assert client.group("default").readiness().ready


def test_wait_ready_is_told_at_once(path, client):
    """And keeps nobody else from using the connection."""
    seen = []

    def wait():
        seen.append(client.group("default").wait_ready(TIMEOUT_S))
        seen.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    with client.attach(manifest(), kvreuse.Rank(), blocks=8):
        thread.join(TIMEOUT_S)
    found, when = seen
    assert found.ready
    assert when - found.ranks[0].ready_at < 1.0  # a push: no polling period


def test_wait_ready_ends_in_an_error(client):
    """K7, C8: which rank, and why."""
    with client.attach(manifest(**TWO), kvreuse.Rank(tp=0), blocks=8):
        with pytest.raises(kvreuse.WaitTimeoutError, match=r"did not get ready within 0\.1 s: rank 1") as error:
            client.group("default").wait_ready(0.1)
        assert error.value.readiness.ranks[0].ready
        started = time.monotonic()
        with pytest.raises(kvreuse.WaitTimeoutError, match=r"made no progress within 0\.1 s"):
            client.group("default").wait_ready(TIMEOUT_S, stall_timeout=0.1)
        assert time.monotonic() - started < 5


def test_other_manifest_makes_a_group_unready(client):
    """R3, C11: named with both values, on the asking side too."""
    other = client.group("default", manifest(hash_root="1"))
    with client.attach(manifest(), kvreuse.Rank(), blocks=8):
        assert other.readiness().reason == "the group has another manifest: hash_root: '0' kept, '1' asked"
        with pytest.raises(kvreuse.IncompatibleError, match="hash_root"):
            other.wait_ready(TIMEOUT_S)


def test_readiness_of_many_ranks_is_paged(client):
    """S2."""
    many = {"topology": kvreuse.Topology(tp=8, pp=16, cp=4)}
    with client.attach(manifest(**many), kvreuse.Rank(tp=7, pp=15, cp=3), blocks=8):
        found = client.group("default").readiness()
    assert list(found.ranks) == list(range(512))
    assert [index for index, rank in found.ranks.items() if rank.ready] == [511]
