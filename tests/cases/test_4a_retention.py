"""A8, A10, F5, F12 and accounting: what is kept, for how long, and who holds it (K4, K5, K7). Each on both backends."""

from __future__ import annotations

SLOW = """
import sys, time
from kvreuse.keeper import reclaim
real = reclaim.close_all
def slow(item):
    time.sleep(2)
    real(item)
reclaim.close_all = slow
from kvreuse.keeper.server import main
sys.exit(main(["--socket", sys.argv[1], "--profile", sys.argv[2]]))
"""


def test_a8_admission_does_not_wait_for_reclaim(stage):
    """A8, K7: releasing takes 2 s; a new writer is admitted in under 200 ms; pending_reclaim is told, then 0."""
    stage(f"""
    import tempfile
    with tempfile.TemporaryDirectory(prefix="kvr-", dir="/tmp") as folder:
        path, profile = os.path.join(folder, "k"), os.path.join(folder, "p")
        open(profile, "w").write(scene.PROFILE)
        service = subprocess.Popen([sys.executable, "-c", {SLOW!r}, path, profile], stderr=subprocess.PIPE)
        try:
            assert b"ready" in service.stderr.readline()
            with kvreuse.connect(path) as keeper:
                with scene.attach(keeper, 0) as part:
                    scene.fill(part, KEYS)
                held = keeper.status()["bytes"]
                start = time.monotonic()
                with scene.attach(keeper, 0, dtype="float16") as part:
                    took = time.monotonic() - start
                    assert part.outcome.kind is kvreuse.OutcomeKind.EMPTY and took < 0.2, (took, part.outcome)
                    status = keeper.status()
                    assert status["pending_reclaim"] == held, status
                    assert time.monotonic() - start < 1.5
                    scene.wait_status(keeper, lambda status: status["pending_reclaim"] == 0)
                    assert 1.5 < time.monotonic() - start < 6
        finally:
            service.terminate()
            service.communicate(timeout=20)
    """)


def test_k4_what_is_pending_counts_and_an_attach_waits_for_it_only_at_the_cap(stage):
    """K4, F12: with room for one part only, the next one is admitted when the old one's memory is back."""
    stage(f"""
    import tempfile
    with tempfile.TemporaryDirectory(prefix="kvr-", dir="/tmp") as folder:
        path, profile = os.path.join(folder, "k"), os.path.join(folder, "p")
        open(profile, "w").write(scene.PROFILE + "[retention]\\nmax_bytes = 100000\\n")
        service = subprocess.Popen([sys.executable, "-c", {SLOW!r}, path, profile], stderr=subprocess.PIPE)
        try:
            assert b"ready" in service.stderr.readline()
            with kvreuse.connect(path) as keeper:
                with scene.attach(keeper, 0) as part:
                    scene.fill(part, KEYS)
                    assert part.blocks * part.block_bytes * 3 > 90000 > keeper.status()["bytes"] > 50000 // 2
                    limit = keeper.status()["max_bytes"]
                start, seen = time.monotonic(), []
                done = threading.Event()
                def watch():
                    with kvreuse.connect(path) as watcher:
                        while not done.wait(0.02):
                            status = watcher.status()
                            seen.append(status["bytes"] + status["pending_reclaim"])
                thread = threading.Thread(target=watch)
                thread.start()
                # Twice the size of the first: they do not fit together.
                with keeper.attach(scene.manifest(), kvreuse.Rank(), blocks=14, group="other", timeout=10) as part:
                    took = time.monotonic() - start
                    assert 1.5 < took < 6, took
                done.set()
                thread.join()
                assert len(seen) > 20 and max(seen) <= limit, (max(seen), limit)
        finally:
            service.terminate()
            service.communicate(timeout=20)
    """)


def test_a10_a_wiped_index_is_rebuilt_from_the_records(stage):
    """A10: 8 slots, 3 SEALED and claimed, 5 FREE; the derived index is wiped: 5 can be reserved, then NoSpaceError."""
    stage("""
    import restart_scene
    with kvreuse.testing.keeper(scene.PROFILE) as path, kvreuse.connect(path) as keeper, Agent(path) as reader:
        manifest = scene.manifest(topology=kvreuse.Topology())
        def check(part):
            assert part.match(KEYS) == 3
            made = part.reserve([b"%d" % i for i in range(5)], evict=True)
            taken = sorted(made.slots.tolist())
            assert len(set(taken)) == 5 and made.evicted == []
            try:
                part.reserve([b"one more"], evict=True)
            except kvreuse.NoSpaceError as error:
                assert (error.needed, error.free, error.evictable) == (1, 0, 0), vars(error)
            else:
                raise AssertionError("free because unknown")
            scene.check(part, KEYS[:3])
            made.abort()
        part = keeper.attach(manifest, kvreuse.Rank(), blocks=8)
        scene.fill(part, KEYS[:3])
        reader("keeper = kvreuse.connect(path); claim = keeper.group().claim(KEYS); out = len(claim)")
        with restart_scene.part_memory(keeper, 0, "table") as table:
            # Links and buckets are the last pages; the words' list heads follow the heartbeat. A mutator had begun.
            for wiped in (0x00, 0xFF):
                links = len(table) - 8192
                table[links:] = bytes([wiped]) * 8192
                table[4096 + 192 : 4096 + 200] = (1).to_bytes(8, "little")
                check(part)
        # And where the writer died over it.
        with Agent(path) as worker:
            part.close()
            worker("keeper = kvreuse.connect(path); part = keeper.attach(scene.manifest(topology=kvreuse.Topology()), "
                   "kvreuse.Rank(), blocks=8)")
            with restart_scene.part_memory(keeper, 0, "table") as table:
                table[len(table) - 8192 :] = bytes(8192)
                table[4096 + 192 : 4096 + 200] = (1).to_bytes(8, "little")
        with keeper.attach(manifest, kvreuse.Rank(), blocks=8) as part:
            assert str(part.outcome) == "RESTORED(3)", part.outcome
            check(part)
    """)


def test_f5_a_part_of_300_regions_comes_in_batches(stage):
    """F5, S3: complete, for a worker and for a reader."""
    stage("""
    with kvreuse.testing.keeper(scene.PROFILE) as path, kvreuse.connect(path, timeout=20) as keeper:
        provider = kvreuse.open_provider("host")
        regions = [provider.allocate(4096) for _ in range(300)]
        manifest = scene.manifest(topology=kvreuse.Topology())
        keys = [i.to_bytes(32, "big") for i in range(300)]
        part = keeper.attach(manifest, kvreuse.Rank(), blocks=300, regions=regions, timeout=20)
        scene.fill(part, keys)
        for region in regions:
            region.close()
        with keeper.group(read_data=True) as group, group.claim(keys) as claim:
            assert len(claim) == 300
            assert all(claim.view(0, i) == scene.content(keys[i]) for i in range(300))
        part.close()
        with keeper.attach(manifest, kvreuse.Rank(), blocks=300, timeout=20) as part:
            assert str(part.outcome) == "RESTORED(300)"
            scene.check(part, keys)
    """)


def test_f12_the_oldest_waiting_part_goes_and_the_cap_holds(stage):
    """F12, K4: cap 1 MiB, 2 MiB committed; then `kvreuse release --all` with no worker frees everything."""
    stage("""
    with kvreuse.testing.keeper(scene.PROFILE + "[retention]\\nmax_bytes = 1048576\\n") as path:
        with kvreuse.connect(path, timeout=10) as keeper:
            seen, done = [], threading.Event()
            def watch():
                with kvreuse.connect(path) as watcher:
                    while not done.wait(0.002):
                        status = watcher.status()
                        seen.append(status["bytes"] + status["pending_reclaim"])
            thread = threading.Thread(target=watch)
            thread.start()
            committed = 0
            for name in "abcde":
                with keeper.attach(scene.manifest(block_bytes=65536), kvreuse.Rank(), blocks=7, group=name) as part:
                    keys = KEYS[:7]
                    with part.reserve(keys) as made:
                        for i in range(7):
                            made.view(i)[:] = keys[i] * 2048
                        made.commit()
                    committed += 7 * 65536
                time.sleep(0.02)
            done.set()
            thread.join()
            assert committed > 2 << 20 and max(seen) <= 1 << 20, (committed, max(seen))
            status = keeper.status()
            assert [part["group"] for part in status["parts"]] == ["d", "e"], status
            reasons = [(entry["group"], entry["reason"]) for entry in status["last_emptied"]]
            assert reasons == [(name, "dropped to make room for another part") for name in "abc"], reasons
            # A reader that still has a part keeps no more than its table, and no other process's.
        gone = subprocess.run([sys.executable, "-m", "kvreuse", "release", "--all", "--socket", path],
                              capture_output=True, text=True, timeout=30)
        assert gone.returncode == 0 and "2" in gone.stdout, gone
        with kvreuse.connect(path) as keeper:
            status = scene.wait_status(keeper, lambda status: not status["pending_reclaim"])
            assert status["bytes"] == 0 and status["parts"] == []
            from kvreuse.keeper.holders import scan
            assert scan(status["label"]).nbytes == 0
    """)


def test_k5_status_names_every_holder(stage):
    """K5, S5: sessions by role, pid and start time with their bytes; what else pins memory is one number."""
    stage("""
    def start_time(pid):
        return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[19])
    with kvreuse.testing.keeper(scene.PROFILE) as path, kvreuse.connect(path) as keeper:
        with Agent(path) as worker, Agent(path) as reader:
            worker("keeper = kvreuse.connect(path); parts = [scene.attach(keeper, rank) for rank in (0, 1)]")
            worker("[scene.fill(part, KEYS) for part in parts]")
            reader("keeper = kvreuse.connect(path); claim = keeper.group('g', read_data=True).claim(KEYS)")
            with keeper.group("g") as group:
                assert group.match(KEYS) == 8
                status = keeper.status(scan=True)
                for part in status["parts"]:
                    found = {(s["role"], s["pid"], s["start_time"]) for s in part["sessions"]}
                    assert found == {("writer", worker.pid, start_time(worker.pid)),
                                     ("reader", reader.pid, start_time(reader.pid)),
                                     ("reader", os.getpid(), start_time(os.getpid()))}, found
                    sizes = {s["pid"]: s["bytes"] for s in part["sessions"]}
                    assert sizes[worker.pid] == sizes[reader.pid] == part["bytes"]
                    assert sizes[os.getpid()] == part["bytes"] - 8 * 4096
                assert status["unattributed_bytes"] == 0, status
                # 4 memories a part and the lock's name: table, claims, lock, data.
                assert status["keeper_memory_fds"] >= 8 and status["keeper_mappings"] == 4, status
            # A process that has no session keeps a dup of the data: one number, no name.
            with Agent(path) as thief:
                thief(f"import os; fds = [os.open('/proc/{keeper.status()['pid']}/fd/' + fd, os.O_RDWR) for fd in "
                      f"os.listdir('/proc/{keeper.status()['pid']}/fd') if os.readlink('/proc/{keeper.status()['pid']}"
                      "/fd/' + fd).startswith('/memfd:kvreuse:') and 'data0' in os.readlink("
                      f"'/proc/{keeper.status()['pid']}/fd/' + fd)]; out = len(fds)")
                status = keeper.status(scan=True)
                assert status["unattributed_bytes"] == 2 * 8 * 4096, status["unattributed_bytes"]
                text = subprocess.run([sys.executable, "-m", "kvreuse", "status", "--socket", path],
                                      capture_output=True, text=True, timeout=30).stdout
                assert "unattributed" in text and "64.0 KiB" in text, text
        # A reader of a part that was given back pins its memory: that is pending until it lets go.
        with Agent(path) as reader:
            scene.wait_status(keeper, lambda status: not any(part["sessions"] for part in status["parts"]))
            scene.attach(keeper, 0).close()
            reader("keeper = kvreuse.connect(path); group = keeper.group('g'); out = str(group.explain(KEYS))")
            assert keeper.release() == 2
            status = keeper.status()
            assert status["bytes"] == 0
    """)


def test_k5_a_reader_of_a_released_part_keeps_it_pending(stage):
    """K5, K4: it is told, counted, and over when the reader closes."""
    stage("""
    with kvreuse.testing.keeper(scene.PROFILE) as path, kvreuse.connect(path) as keeper, Agent(path) as reader:
        manifest = scene.manifest(topology=kvreuse.Topology())
        part = keeper.attach(manifest, kvreuse.Rank(), blocks=8)
        scene.fill(part, KEYS)
        size = keeper.status()["bytes"]
        reader("keeper = kvreuse.connect(path); group = keeper.group(read_data=True); claim = group.claim(KEYS); "
               "view = claim.view(0, 3)")
        part.close()
        assert keeper.release() == 1
        status = scene.wait_status(keeper, lambda status: status["retired"])
        assert status["bytes"] == 0 and status["pending_reclaim"] == size, status
        # Its mapping stays readable.
        assert reader("out = bytes(view) == scene.content(KEYS[3])") is True
        assert reader("out = group.match(KEYS)") == 0
        reader("view.release(); claim.release(); group.close()")
        scene.wait_status(keeper, lambda status: status["pending_reclaim"] == 0)
    """)
