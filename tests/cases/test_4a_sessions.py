"""A3, A6, A9, A11, A15, B10, E7, F1, F3, F14: whose a part is, and how a session ends (R6). Each on both backends."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


def test_a3_a_killed_donor_leaves_nothing(stage):
    """A3, K5, H6: 20 workers that donate 64 MiB and are killed, each second one right after the ack."""
    stage(
        """
    def shmem():
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("Shmem:")) << 10
    give = ("keeper = kvreuse.connect(path); region = kvreuse.open_provider('host').allocate(64 << 20); "
            "m = region.map(); m.buffer[::4096] = bytes(len(m.buffer[::4096])); "
            "manifest = scene.manifest(block_bytes=1 << 20, topology=kvreuse.Topology());")
    take = "keeper.attach(manifest, kvreuse.Rank(), blocks=64, regions=[region])"
    with kvreuse.testing.keeper(scene.PROFILE) as path, kvreuse.connect(path) as keeper:
        fds = None
        for i in range(20):
            with Agent(path, give) as donor:
                donor.send("part = " + take)
                if i % 2:
                    scene.wait_status(keeper, lambda status: status["parts"])
                else:
                    donor.answer()
                status = keeper.status()
                assert [s["pid"] for part in status["parts"] for s in part["sessions"]] == [donor.pid], status
            # Within the bound: the process is torn down first (about 3 ms for 64 MiB).
            scene.wait_status(keeper, lambda status: not any(part["sessions"] for part in status["parts"]))
            keeper.release()
            status = scene.wait_status(keeper, lambda status: not status["pending_reclaim"])
            assert status["bytes"] == 0 and not status["parts"]
            if i == 1:
                fds, before = status["keeper_fds"], shmem()
        assert status["keeper_fds"] == fds, (status["keeper_fds"], fds)
        assert shmem() < before + (64 << 20), (shmem(), before)
    """,
        timeout=120,
    )


def test_a6_doing_nothing_is_not_being_gone(stage):
    """A6, R6: three times the idle bound without a call."""
    stage("""
    with kvreuse.testing.keeper(scene.PROFILE + "[retention]\\nidle_exit_s = 0.5\\nttl_s = 0.5\\n") as path:
        with kvreuse.connect(path) as waiting, Agent(path) as worker:
            worker("keeper = kvreuse.connect(path); part = scene.attach(keeper, 0); scene.fill(part, KEYS)")
            waiting.close()  # it held the keeper until the worker was there
            time.sleep(1.6)
            assert worker("out = part.match(KEYS)") == 8
            assert worker("out = keeper.status()['parts'][0]['sessions'][0]['connected']") is True
    """)


def test_a9_a_forked_helper_cannot_write_and_holds_nothing_up(stage):
    """A9, R6, K3: SIGKILL of a worker whose forked child lives on; afterwards the keeper exits and memory is back."""
    stage(
        """
    helper = '''
    import ctypes
    keeper = kvreuse.connect(path); part = scene.attach(keeper, 0); scene.fill(part, KEYS[:4])
    made = part.reserve(KEYS[4:5]); view = made.view(0)
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    child = os.fork()
    if not child:
        while os.getppid() == worker_pid:
            time.sleep(0.01)
        try:
            part.reserve([b"child"])
        except kvreuse.KVReuseError as error:
            open(report, "w").write(type(error).__name__ + chr(10))
        ctypes.memset(address, 0xEE, 4096)  # not there: SIGSEGV
        open(report, "a").write("wrote")
        time.sleep(60)
    out = child
    '''
    import tempfile, textwrap
    with kvreuse.testing.keeper(scene.PROFILE + "[retention]\\nttl_s = 2\\nidle_exit_s = 1\\n") as path:
        keeper = kvreuse.connect(path)
        report = os.path.join(os.path.dirname(path), "report")
        with Agent(path) as worker:
            worker(f"report = {report!r}; worker_pid = os.getpid()")
            child = worker(textwrap.dedent(helper))
        gone = lambda: not os.path.exists(f"/proc/{child}") or open(f"/proc/{child}/stat").read().split()[2] == "Z"
        scene.wait_status(keeper, lambda status: status["parts"][0]["state"] == "WAITING")
        with scene.attach(keeper, 0) as part:
            assert str(part.outcome) == "RESTORED(4)", part.outcome
            scene.fill(part, KEYS[4:])
            scene.until(gone)  # it died of its write, or was never there to write
            assert open(report).read() == "ForkedError\\n", open(report).read()
            scene.check(part, KEYS)
        label, pid = keeper.status()["label"], keeper.status()["pid"]
        keeper.close()
        scene.until(lambda: not os.path.exists(f"/proc/{pid}") or
                    open(f"/proc/{pid}/stat").read().split()[2] == "Z", 20)
        from kvreuse.keeper.holders import scan
        assert scan(label).nbytes == 0
    """,
        timeout=100,
    )


def test_a11_a_part_waits_for_its_ttl(stage):
    """A11, K4: back after 1 s; after 3 s, with ttl_s 2."""
    stage("""
    with kvreuse.testing.keeper(scene.PROFILE + "[retention]\\nttl_s = 2\\n") as path, kvreuse.connect(path) as keeper:
        for pause, outcome in ((1, "RESTORED(8)"), (3, "EMPTY(expired)")):
            with Agent(path) as worker:
                worker("keeper = kvreuse.connect(path); part = scene.attach(keeper, 0)")
                worker("part.match(KEYS) or scene.fill(part, KEYS)")
            time.sleep(pause)
            with scene.attach(keeper, 0) as part:
                assert str(part.outcome) == outcome, part.outcome
    """)


def test_a15_a_stopped_worker_is_reported_and_never_writes_beside_another(stage):
    """A15, R6: SIGSTOP past the stall bound is reported; only a proven death fences; SIGCONT and it goes on."""
    stage("""
    profile = scene.PROFILE + "[retention]\\nstall_s = 0.3\\n[table]\\nlock_wait_s = 0.5\\n"
    with kvreuse.testing.keeper(profile) as path, kvreuse.connect(path) as keeper, Agent(path) as worker:
        worker("keeper = kvreuse.connect(path); parts = [scene.attach(keeper, rank) for rank in (0, 1)]")
        worker("[scene.fill(part, KEYS) for part in parts]; made = parts[0].reserve([b'new'], evict=True)")
        group = keeper.group("g")
        group.wait_ready(5)
        worker.signal(signal.SIGSTOP)
        scene.until(lambda: all(rank.stalled for rank in group.readiness().ranks.values()))
        # Each part's last heartbeat has its own age: the keeper's list says so of the later one a little later.
        scene.wait_status(
            keeper, lambda status: all(session["stalled"] for part in status["parts"] for session in part["sessions"])
        )
        try:
            scene.attach(keeper, 0)
        except kvreuse.AttachRefusedError as error:
            assert error.pid == worker.pid
        else:
            raise AssertionError("a stopped writer was replaced")
        worker.signal(signal.SIGCONT)
        worker("made.view(0)[:] = bytes([7]) * 4096; made.commit()")
        scene.until(lambda: group.readiness().ready)
        assert group.match([b"new"]) == 0 and worker("out = parts[0].match([b'new'])") == 1
        # Proven dead, it is replaced.
        worker.signal(signal.SIGSTOP)
        worker.kill()
        with scene.attach(keeper, 0) as part:
            assert str(part.outcome) == "RESTORED(8)", part.outcome
            assert part.match([b"new"]) == 1
    """)


def test_b10_claims_end_with_their_client_but_not_with_its_socket(stage):
    """B10, R6: abandoned, its client closed, its process killed: free at once; its socket cut: kept, resumed."""
    stage("""
    with kvreuse.testing.keeper(scene.PROFILE) as path, kvreuse.connect(path) as keeper, Agent(path) as worker:
        worker("keeper = kvreuse.connect(path); parts = [scene.attach(keeper, rank) for rank in (0, 1)]")
        worker("[scene.fill(part, KEYS) for part in parts]")
        claimed = lambda: worker("out = [part.stats().claimed_count for part in parts]")
        take = "keeper = kvreuse.connect(path); group = keeper.group('g'); claim = group.claim(KEYS)"
        with Agent(path, take) as reader:
            assert claimed() == [8, 8]
            reader("import gc, warnings; warnings.simplefilter('ignore'); del claim; gc.collect()")
            assert claimed() == [0, 0]
            reader("claim = group.claim(KEYS)")
            assert claimed() == [8, 8]
            reader("keeper.close()")
            assert claimed() == [0, 0]
        with Agent(path, take) as reader:
            assert claimed() == [8, 8]
        scene.until(lambda: claimed() == [0, 0])
        with Agent(path, take) as reader:
            reader("import socket; socket.socket(fileno=os.dup(keeper._sock.fileno())).shutdown(2)")
            sessions = lambda: [session for part in keeper.status()["parts"] for session in part["sessions"]]
            found = scene.until(lambda: [s for s in sessions() if not s["connected"]])
            assert len(found) == 2 and {s["role"] for s in found} == {"reader"}, found
            assert {s["pid"] for s in found} == {reader.pid}
            time.sleep(0.2)
            assert claimed() == [8, 8] and reader("out = group.match(KEYS)") == 8
            assert worker("out = parts[0].evict(8)") == 0
            reader("keeper.status()")  # reconnects, and resumes
            assert all(session["connected"] for session in sessions()) and claimed() == [8, 8]
            reader("claim.release()")
            assert claimed() == [0, 0]
        # A writer's cut socket is no end either.
        worker("import socket; socket.socket(fileno=os.dup(keeper._sock.fileno())).shutdown(2)")
        scene.wait_status(keeper, lambda status: not status["parts"][0]["sessions"][0]["connected"])
        try:
            scene.attach(keeper, 0)
        except kvreuse.AttachRefusedError as error:
            assert error.pid == worker.pid
        else:
            raise AssertionError("an EOF was taken for a death")
        worker("scene.fill(parts[0], [b'more' * 8]) if parts[0].evict(1) else 0; keeper.status()")
        assert keeper.status()["parts"][0]["sessions"][0]["connected"]
    """)


def test_e7_another_process_claims_and_a_failed_step_gives_all_back(stage):
    """E7: 8 slots, 5 taken by another process; reserve 4; a fault at step 3 of 3."""
    stage("""
    import errno
    from kvreuse.testing import FaultyQueue
    with kvreuse.testing.keeper(scene.PROFILE) as path, kvreuse.connect(path) as keeper:
        manifest = scene.manifest(topology=kvreuse.Topology())
        with keeper.attach(manifest, kvreuse.Rank(), blocks=8) as part, Agent(path) as other:
            scene.fill(part, KEYS[:5])
            other("keeper = kvreuse.connect(path); claim = keeper.group().claim(KEYS)")
            for evict in (False, True):
                try:
                    part.reserve([b"%d" % i for i in range(4)], evict=evict)
                except kvreuse.NoSpaceError as error:
                    assert (error.needed, error.free, error.evictable) == (4, 3, 0), vars(error)
                else:
                    raise AssertionError("4 of 3")
                assert part.stats().free_count == 3
            source = kvreuse.Memory.wrap(bytearray(3 * 4096))
            blocks = kvreuse.EngineBlocks({"all": (source, 0, 4096)})
            with FaultyQueue() as queue:
                queue.fail_at(2, errno.EIO)
                operation = part.store([b"x", b"y", b"z"], blocks, [0, 1, 2], queue=queue)
                assert operation.wait(10) is kvreuse.OperationState.FAILED
            stats = part.stats()
            assert (stats.free_count, stats.writing_count, stats.owned_count) == (3, 0, 0), stats
            assert part.match([b"x"]) == 0
    """)


PLANTED = """
import os, sys
import kvreuse.keeper.processes as processes
def refuse(*_):
    raise PermissionError(1, "planted")
os.pidfd_open = refuse
if sys.argv[1] == "none":
    processes.SO_PEERPIDFD = 9999  # as a kernel before 6.5
from kvreuse.keeper.server import main
sys.exit(main(["--socket", sys.argv[2], "--profile", sys.argv[3]]))
"""


@pytest.mark.parametrize("proof", ["peerpidfd", "none"])
def test_f1_without_pidfd_open(stage, proof):
    """F1, R6: the proof comes by SO_PEERPIDFD, or attach is REFUSED with the reason, within a second; status works."""
    if proof == "peerpidfd" and tuple(map(int, os.uname().release.split(".")[:2])) < (6, 5):
        pytest.skip("this kernel has no SO_PEERPIDFD")
    stage(f"""
    import tempfile
    code, proof = {PLANTED!r}, {proof!r}
    with tempfile.TemporaryDirectory(prefix="kvr-", dir="/tmp") as folder:
        path, profile = os.path.join(folder, "k"), os.path.join(folder, "p")
        open(profile, "w").write(scene.PROFILE)
        service = subprocess.Popen([sys.executable, "-c", code, proof, path, profile], stderr=subprocess.PIPE)
        try:
            assert b"ready" in service.stderr.readline()
            with kvreuse.connect(path) as keeper:
                start = time.monotonic()
                try:
                    with scene.attach(keeper, 0) as part:
                        scene.fill(part, KEYS)
                        assert proof == "peerpidfd"
                        assert keeper.group("g").explain(KEYS).matched == {{0: 8}}
                except kvreuse.AttachRefusedError as error:
                    assert proof == "none" and "pidfd" in str(error), error
                    assert time.monotonic() - start < 1
                assert keeper.status()["clients"] == 1
        finally:
            service.terminate()
            service.communicate(timeout=10)
    """)


def _can_unshare() -> bool:
    tool = shutil.which("unshare")
    return (
        bool(tool)
        and subprocess.run([tool, "--pid", "--fork", "true"], capture_output=True, check=False).returncode == 0
    )


def test_f3_two_clients_that_are_both_pid_1(stage):
    """F3, S5, R6: of pid namespaces of their own; two sessions; each one's death ends its own only."""
    if not _can_unshare():
        pytest.skip("this user may make no pid namespace (unshare)")
    stage("""
    prefix = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with kvreuse.testing.keeper(scene.PROFILE) as path, kvreuse.connect(path) as keeper:
        one, two = (Agent(path, prefix=prefix) for _ in range(2))
        for rank, worker in enumerate((one, two)):
            assert worker("out = os.getpid()") == 1
            worker(f"keeper = kvreuse.connect(path); part = scene.attach(keeper, {rank}); scene.fill(part, KEYS)")
        status = keeper.status()
        sessions = [session for part in status["parts"] for session in part["sessions"]]
        assert len({(s["pid"], s["start_time"]) for s in sessions}) == 2 and len(sessions) == 2, sessions
        with keeper.group("g") as group:
            assert group.wait_ready(5).ready and group.match(KEYS) == 8
            # A reader that is pid 1, too, beside both.
            take = "keeper = kvreuse.connect(path); claim = keeper.group('g').claim(KEYS)"
            with Agent(path, take, prefix=prefix) as reader:
                assert reader("out = len(claim), os.getpid()") == [8, 1]
                one.kill()
                scene.until(lambda: not group.readiness())
                assert "rank 0: exited" in group.readiness().reason and group.readiness().ranks[1].ready
                try:
                    scene.attach(keeper, 1)
                except kvreuse.AttachRefusedError as error:
                    assert "writer alive" in str(error)
                else:
                    raise AssertionError("the other pid 1 was taken for the dead one")
                with scene.attach(keeper, 0) as part:
                    assert str(part.outcome) == "RESTORED(8)"
                    assert part.evict(8) == 0, "the reader's claims went with another process of its pid"
        two.kill()
    """)


def test_f3_a_keeper_that_sees_no_pid_of_its_clients(stage):
    """F3, S5: the keeper in a pid namespace of its own: pids are 0 there, processes are told apart all the same."""
    if not _can_unshare():
        pytest.skip("this user may make no pid namespace (unshare)")
    stage("""
    import tempfile
    with tempfile.TemporaryDirectory(prefix="kvr-", dir="/tmp") as folder:
        path, profile = os.path.join(folder, "k"), os.path.join(folder, "p")
        open(profile, "w").write(scene.PROFILE)
        service = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-m", "kvreuse.keeper", "--socket", path,
             "--profile", profile], stderr=subprocess.PIPE)
        try:
            assert b"ready" in service.stderr.readline()
            with kvreuse.connect(path) as keeper:
                with Agent(path) as one, Agent(path) as two:
                    for rank, worker in enumerate((one, two)):
                        worker(f"keeper = kvreuse.connect(path); part = scene.attach(keeper, {rank})")
                        worker("scene.fill(part, KEYS)")
                    one.kill()
                    scene.until(lambda: not keeper.group("g").readiness().ranks[0].ready)
                    assert keeper.group("g").readiness().ranks[1].ready
                    try:
                        scene.attach(keeper, 1)
                    except kvreuse.AttachRefusedError:
                        pass
                    else:
                        raise AssertionError("two writers")
                    with scene.attach(keeper, 0) as part:
                        assert str(part.outcome) == "RESTORED(8)"
        finally:
            service.kill()
            service.communicate(timeout=10)
    """)


def test_f14_two_keepers_with_one_label(stage):
    """F14, S5: both work; stopping one leaves the other's parts alone."""
    stage("""
    import tempfile
    with tempfile.TemporaryDirectory(prefix="kvr-", dir="/tmp") as folder:
        profile = os.path.join(folder, "p")
        open(profile, "w").write(scene.PROFILE)
        paths = [os.path.join(folder, name) for name in "ab"]
        services = [
            subprocess.Popen([sys.executable, "-m", "kvreuse.keeper", "--socket", path, "--profile", profile,
                              "--label", "same"], stderr=subprocess.PIPE)
            for path in paths
        ]
        try:
            for service in services:
                assert b"ready" in service.stderr.readline()
            keepers = [kvreuse.connect(path) for path in paths]
            assert [keeper.status()["label"] for keeper in keepers] == ["same"] * 2
            parts = [scene.attach(keeper, 0) for keeper in keepers]
            scene.fill(parts[0], KEYS[:3])
            scene.fill(parts[1], KEYS)
            services[0].terminate()
            assert services[0].wait(10) == 0
            scene.check(parts[1], KEYS)
            parts[1].close()
            with scene.attach(keepers[1], 0) as part:
                assert str(part.outcome) == "RESTORED(8)"
            try:
                parts[0].match(KEYS)
            except kvreuse.StaleEpochError:
                pass
            else:
                raise AssertionError("a part of a stopped keeper goes on")
            parts[0].close()
            for keeper in keepers:
                keeper.close()
        finally:
            for service in services:
                service.terminate()
                service.communicate(timeout=10)
    """)
