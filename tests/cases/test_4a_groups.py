"""C1, C5 to C8, D8 and what a group is: all ranks or nothing (R4, R5). Each on both backends."""

from __future__ import annotations

import pytest


def test_c1_unequal_capacity_is_refused_and_both_are_named(stage):
    """C1, R4: parts of 100 and 63 blocks."""
    stage("""
    with kvreuse.testing.keeper(scene.PROFILE) as path, kvreuse.connect(path) as keeper:
        attach = lambda rank, blocks: keeper.attach(scene.manifest(), kvreuse.Rank(tp=rank), blocks=blocks, group="g")
        with attach(0, 100):
            try:
                attach(1, 63)
            except kvreuse.AttachRefusedError as error:
                assert "blocks" in str(error) and "100" in str(error) and "63" in str(error), error
            else:
                raise AssertionError("attached")
            found = keeper.group("g").readiness()
            assert not found and "{0: 100, 1: 63}" in found.reason, found
            assert [found.ranks[i].blocks for i in (0, 1)] == [100, 63], found
            with attach(1, 100):
                assert keeper.group("g").readiness().ready
    """)


def test_c1_under_min_the_smallest_part_bounds_all(stage):
    """C1, R4: ready with 63; slot 63 is RangeError on both; no rank holds more than 63 blocks."""
    stage("""
    profile = scene.PROFILE + '[group]\\ncapacity = "min"\\n'
    with kvreuse.testing.keeper(profile) as path, kvreuse.connect(path) as keeper:
        attach = lambda rank, blocks: keeper.attach(scene.manifest(), kvreuse.Rank(tp=rank), blocks=blocks, group="g")
        with attach(0, 100) as large, attach(1, 63) as small:
            found = keeper.group("g").wait_ready(5)
            assert found.ready and found.blocks == 63, found
            for part in (large, small):
                try:
                    part.reserve([b"k"], slots=[63])
                except kvreuse.RangeError as error:
                    assert "63" in str(error), error
                else:
                    raise AssertionError("slot 63 was given out")
                part.reserve([b"k"], slots=[62]).abort()
                keys = [i.to_bytes(32, "big") for i in range(64)]
                try:
                    part.reserve(keys)
                except kvreuse.NoSpaceError as error:
                    assert (error.needed, error.free) == (64, 63), vars(error)
                else:
                    raise AssertionError("64 slots of 63")
                scene.fill(part, keys[:63])
                with part.reserve(keys[63:], evict=True) as made:
                    assert made.evicted == [keys[0]]
    """)


def test_c5_a_group_hits_what_every_rank_has(stage):
    """C5, R5: rank 0 lacks block 2, rank 1 lacks block 5 of a chain 0..7."""
    stage("""
    with kvreuse.testing.keeper(scene.PROFILE) as path, kvreuse.connect(path) as keeper:
        with Agent(path) as worker, kvreuse.connect(path) as other, other.group("g", scene.manifest()) as group:
            worker("keeper = kvreuse.connect(path); parts = [scene.attach(keeper, rank) for rank in (0, 1)]")
            worker("scene.fill(parts[0], KEYS[:2] + KEYS[3:]); scene.fill(parts[1], KEYS[:5] + KEYS[6:])")
            assert group.match(KEYS) == 2
            told = group.explain(KEYS)
            assert (told.hits, told.missing, told.matched) == (2, (), {0: 2, 1: 5}), told
            with group.claim(KEYS) as claim:
                assert len(claim) == 2 and not claim.missing
                assert worker("out = [part.stats().claimed_count for part in parts]") == [2, 2]
            assert worker("out = [part.stats().claimed_count for part in parts]") == [0, 0]
            # Repeats count each time; a key beyond the common prefix does not.
            assert group.match([KEYS[0], KEYS[0], KEYS[1], KEYS[5]]) == 3
            worker("scene.fill(parts[0], KEYS[2:3]); scene.fill(parts[1], KEYS[5:6])")
            assert group.match(KEYS) == 8
    """)


def test_a_ticket_is_adopted_by_the_ranks_worker(stage):
    """R5, I1: under a claim of the worker's own; a ticket that is old, damaged or another rank's is refused."""
    stage("""
    with kvreuse.testing.keeper(scene.PROFILE) as path:
        with Agent(path) as worker, kvreuse.connect(path) as keeper, keeper.group("g", scene.manifest()) as group:
            worker("keeper = kvreuse.connect(path); parts = [scene.attach(keeper, rank) for rank in (0, 1)]")
            worker("[scene.fill(part, KEYS) for part in parts]")
            claim = group.claim(KEYS[:6], tag="r1")
            tickets = [claim.ticket(kvreuse.Rank(tp=rank)) for rank in (0, 1)]
            assert tickets == [claim.ticket(0), claim.ticket(1)]
            for rank in (0, 1):
                worker(f"claim = parts[{rank}].adopt({tickets[rank]!r})")
                assert worker("out = len(claim), [claim.view(i) == scene.content(KEYS[i]) for i in range(6)]") == [
                    6, [True] * 6]
                # The worker's own claim holds after the scheduler's has gone.
                if rank:
                    assert group.release("r1") and not group.release("r1")
                assert worker(f"out = parts[{rank}].evict(8)") == 2
                worker("claim.release()")
            for wrong, error in ((tickets[1], "StaleBlockError"), (tickets[0][:-1], "CorruptError"),
                                 (tickets[0][:40] + b"x" + tickets[0][41:], "CorruptError"), (b"", "CorruptError")):
                try:
                    worker(f"parts[0].adopt({wrong!r})")
                except AgentError as found:
                    assert found.name == error, (error, found)
                else:
                    raise AssertionError(error)
            assert worker("out = parts[0].evict(8)") == 6
            worker("scene.fill(parts[0], KEYS)")
            try:
                worker(f"parts[0].adopt({tickets[0]!r})")
            except AgentError as found:
                assert found.name == "StaleBlockError", found
            else:
                raise AssertionError("adopted blocks that were written anew")
            assert worker("out = parts[0].stats().claimed_count") == 0
    """)


def test_a_tag_is_replaced_not_added(stage):
    """I1: asking many times with one tag leaves one claim; another tag adds; closing the group frees all."""
    stage("""
    with kvreuse.testing.keeper(scene.PROFILE) as path:
        with Agent(path) as worker, kvreuse.connect(path) as keeper, keeper.group("g") as group:
            worker("keeper = kvreuse.connect(path); parts = [scene.attach(keeper, rank) for rank in (0, 1)]")
            worker("[scene.fill(part, KEYS) for part in parts]")
            claimed = lambda: worker("out = [part.stats().claimed_count for part in parts]")
            for count in (8, 3, 3, 5):
                assert len(group.claim(KEYS[:count], tag=("request", 1))) == count
                assert claimed() == [count] * 2
            group.claim(KEYS[5:], tag="other")
            assert claimed() == [8, 8]
            assert group.release(("request", 1)) and claimed() == [3, 3]
            assert len(group.claim([b"absent"], tag="other")) == 0 and claimed() == [0, 0]
            group.claim(KEYS, tag="x")
            group.close()
            assert claimed() == [0, 0]
            try:
                group.match(KEYS)
            except kvreuse.HandleClosedError:
                pass
            else:
                raise AssertionError("a closed group answered")
    """)


def test_c6_a_rank_that_stands_still_in_its_lock_is_one_miss_for_all(stage):
    """C6, K7: 4 ranks, rank 2's process stopped inside the table lock: one verdict within lock_wait_s, missing [2]."""
    stage(
        """
    profile = scene.PROFILE + "[table]\\nlock_wait_s = 1.0\\n"
    topology = "scene.manifest(topology=kvreuse.Topology(tp=4))"
    # Holds the lock memory's record lock as a table call would, and is stopped there.
    stop = (
        "import fcntl; fds = [int(fd) for fd in os.listdir('/proc/self/fd')]; "
        "lock = next(fd for fd in fds if os.path.lexists(f'/proc/self/fd/{fd}') and "
        "os.readlink(f'/proc/self/fd/{fd}').split(' ')[0].endswith(':lock')); "
        "fcntl.lockf(lock, fcntl.LOCK_EX, 1)"
    )
    with kvreuse.testing.keeper(profile) as path, kvreuse.connect(path) as keeper:
        workers = [Agent(path) for _ in range(4)]
        for rank, worker in enumerate(workers):
            worker(f"keeper = kvreuse.connect(path); part = keeper.attach({topology}, kvreuse.Rank(tp={rank}), "
                   f"blocks=8, group='g'); scene.fill(part, KEYS)")
        with keeper.group("g") as group:
            assert group.match(KEYS) == 8
            workers[2](stop)
            workers[2].signal(signal.SIGSTOP)
            start = time.monotonic()
            assert group.match(KEYS) == 0
            took = time.monotonic() - start
            assert 0.9 < took < 2.0, took
            with group.claim(KEYS) as claim:
                assert len(claim) == 0 and list(claim.missing) == [2], claim.missing
            told = group.explain(KEYS)
            assert told.missing == (2,) and told.hits == 0 and told.matched == {0: 8, 1: 8, 3: 8}, told
            # Nothing stays claimed on the others.
            assert [workers[i]("out = part.stats().claimed_count") for i in (0, 1, 3)] == [0, 0, 0]
            workers[2].signal(signal.SIGCONT)
            workers[2]("fcntl.lockf(lock, fcntl.LOCK_UN, 1)")
            assert group.match(KEYS) == 8
        for worker in workers:
            worker.kill()
    """,
        timeout=100,
    )


def test_c7_a_killed_and_a_stopped_rank_are_told_apart(stage):
    """C7, R4, R6: not ready within 1 s plus teardown, by signal 9; stalled after stall_s; the keeper serves."""
    stage(
        """
    profile = scene.PROFILE + "[retention]\\nstall_s = 0.5\\n"
    topology = "scene.manifest(topology=kvreuse.Topology(tp=4))"
    with kvreuse.testing.keeper(profile) as path, kvreuse.connect(path) as keeper:
        workers = [Agent(path) for _ in range(4)]
        for rank, worker in enumerate(workers):
            worker(f"keeper = kvreuse.connect(path); part = keeper.attach({topology}, kvreuse.Rank(tp={rank}), "
                   f"blocks=8, group='g'); scene.fill(part, KEYS)")
        with keeper.group("g") as group:
            group.wait_ready(10)
            assert group.match(KEYS) == 8
            start = time.monotonic()
            workers[2].kill()
            workers[1].signal(signal.SIGSTOP)
            found = group.readiness()
            assert not found and time.monotonic() - start < 1.0
            reason = found.ranks[2].reason
            assert reason.startswith("exited") and f"pid {workers[2].pid}" in reason, reason
            major, minor = map(int, os.uname().release.split(".")[:2])
            if (major, minor) >= (6, 15):
                assert "killed by signal 9" in reason, reason
            scene.until(lambda: group.readiness().ranks[1].stalled)
            took = time.monotonic() - start
            assert 0.4 < took < 5, took
            found = group.readiness()
            assert found.ranks[1].reason.startswith("stalled") and "pid" in found.ranks[1].reason, found
            assert found.ranks[0].ready and found.ranks[3].ready and group.match(KEYS) == 0
            # Reversible: nothing was fenced.
            workers[1].signal(signal.SIGCONT)
            scene.until(lambda: group.readiness().ranks[1].ready)
            assert workers[1]("out = part.match(KEYS)") == 8
            with Agent(path) as worker:
                worker(f"keeper = kvreuse.connect(path); part = keeper.attach({topology}, kvreuse.Rank(tp=2), "
                       "blocks=8, group='g')")
                assert worker("out = str(part.outcome)") == "RESTORED(8)"
                assert group.wait_ready(10).ready and group.match(KEYS) == 8
        for worker in workers:
            worker.kill()
    """,
        timeout=100,
    )


def test_on_stall_kill_lets_the_keeper_kill(stage):
    """R6, K7: the stalled worker is killed, and its place is free then."""
    stage(
        """
    profile = scene.PROFILE + '[retention]\\nstall_s = 0.3\\non_stall = "kill"\\n'
    with kvreuse.testing.keeper(profile) as path, kvreuse.connect(path) as keeper, Agent(path) as worker:
        worker("keeper = kvreuse.connect(path); part = scene.attach(keeper, 0); scene.fill(part, KEYS)")
        time.sleep(0.5)
        assert worker("out = part.match(KEYS)") == 8  # one that moves is left alone
        worker.signal(signal.SIGSTOP)
        assert worker.process.wait(10) == -9
        with scene.attach(keeper, 0) as part:
            assert str(part.outcome) == "RESTORED(8)"
    """,
        timeout=100,
        said="is stalled: killed",
    )


def test_c8_progress_keeps_a_wait_alive(stage):
    """C8: a rank that reports progress each 0.5 s for 3 s under a stall bound of 1 s; then one that reports none."""
    stage(
        """
    topology = "scene.manifest(topology=kvreuse.Topology(tp=4))"
    with kvreuse.testing.keeper(scene.PROFILE) as path, kvreuse.connect(path) as keeper:
        workers = [Agent(path) for _ in range(4)]
        for rank, worker in enumerate(workers):
            worker(f"keeper = kvreuse.connect(path); part = keeper.attach({topology}, kvreuse.Rank(tp={rank}), "
                   f"blocks=8, group='g')")
        group = keeper.group("g")
        workers[3]("part.progress(0, 6)")
        found = group.readiness()
        assert not found and found.ranks[3].progress == (0, 6) and "0 of 6" in found.ranks[3].reason, found
        workers[3].send("for i in range(1, 7): time.sleep(0.5); part.progress(i, 6)")
        start = time.monotonic()
        assert group.wait_ready(20, stall_timeout=1.0).ready
        assert 2.5 < time.monotonic() - start < 8
        workers[3].answer()
        workers[1]("part.progress(2, 5)")
        start = time.monotonic()
        try:
            group.wait_ready(20, stall_timeout=1.0)
        except kvreuse.WaitTimeoutError as error:
            assert 0.9 < time.monotonic() - start < 5
            assert "rank 1" in str(error) and "2 of 5" in str(error), error
            assert error.readiness.ranks[1].progress == (2, 5) and error.readiness.ranks[0].ready
        else:
            raise AssertionError("ready")
        for wrong in ("part.progress(-1, 5)", "part.progress(6, 5)"):
            try:
                workers[1](wrong)
            except AgentError as error:
                assert error.name == "RangeError", error
            else:
                raise AssertionError(wrong)
        workers[1]("part.progress(5, 5)")
        assert group.readiness().ready
        for worker in workers:
            worker.kill()
    """,
        timeout=100,
    )


def test_d8_another_weights_id_empties_and_setting_it_back_restores_nothing(stage):
    """D8, I4: 4 blocks with w1; set w2; set w1 again. What was reserved before is not published after."""
    stage("""
    with kvreuse.testing.keeper(scene.PROFILE) as path, kvreuse.connect(path) as keeper:
        group = keeper.group("g", scene.manifest())
        with Agent(path) as worker:
            worker("keeper = kvreuse.connect(path); parts = [scene.attach(keeper, rank) for rank in (0, 1)]")
            worker("[scene.fill(part, KEYS[:4]) for part in parts]")
            assert group.match(KEYS) == 4
            worker("made = parts[0].reserve(KEYS[4:5])")
            found = group.set_weights_id("w2")
            assert found.removed == 8 and not found.failed, found
            assert group.manifest.weights_id == "w2" and group.match(KEYS) == 0
            assert worker("out = [part.match(KEYS) for part in parts]") == [0, 0]
            try:
                worker("made.commit()")
            except AgentError as error:
                assert error.name == "StaleBlockError", error
            else:
                raise AssertionError("bytes of the old weights were published")
            worker("made.abort()")
            assert worker("out = [part.stats().free_count for part in parts]") == [8, 8]
            assert group.set_weights_id("w2").removed == 0  # as it is
            worker("[scene.fill(part, KEYS[4:]) for part in parts]")
            assert group.match(KEYS[4:]) == 4
            assert keeper.group("g", scene.manifest()).match(KEYS[4:]) == 0  # whoever expects w1 gets nothing of w2
            found = group.set_weights_id("w1")
            assert found.removed == 8 and group.match(KEYS[4:]) == 0 == group.match(KEYS), found
            assert group.readiness().ready
            group.set_weights_id("w2")
            worker("[scene.fill(part, KEYS[:4]) for part in parts]")
        # The worker is gone. A replacement with the weights that the content is of is restored, another is not.
        with scene.attach(keeper, 0, weights_id="w2") as part:
            assert str(part.outcome) == "RESTORED(4)", part.outcome
        with scene.attach(keeper, 0) as part:
            assert part.outcome.kind is kvreuse.OutcomeKind.EMPTY, part.outcome
            assert "weights_id" in part.outcome.reason and "'w2'" in part.outcome.reason, part.outcome
    """)


def test_another_process_that_changes_the_weights_is_noticed(stage):
    """I4, R3: a scheduler that expects w1 gets no hit of w2, however it was opened."""
    stage("""
    with kvreuse.testing.keeper(scene.PROFILE) as path, kvreuse.connect(path) as keeper, Agent(path) as worker:
        worker("keeper = kvreuse.connect(path); parts = [scene.attach(keeper, rank) for rank in (0, 1)]")
        worker("[scene.fill(part, KEYS[:4]) for part in parts]")
        group, anyone = keeper.group("g", scene.manifest()), keeper.group("g")
        assert group.match(KEYS) == 4 == anyone.match(KEYS)
        with Agent(path) as operator:
            operator("keeper = kvreuse.connect(path); group = keeper.group('g'); group.set_weights_id('w2')")
        worker("[scene.fill(part, KEYS[:3]) for part in parts]")
        assert group.match(KEYS) == 0 and anyone.match(KEYS) == 3
        told = group.explain(KEYS)
        assert told.hits == 0 and "weights_id" in str(told), told
        with group.claim(KEYS) as claim:
            assert len(claim) == 0
        assert worker("out = [part.stats().claimed_count for part in parts]") == [0, 0]
    """)


def test_clear_from_a_scheduler(stage):
    """D7, R5: claimed blocks keep their memory until they are released, and are no hits."""
    stage("""
    with kvreuse.testing.keeper(scene.PROFILE) as path, kvreuse.connect(path) as keeper, Agent(path) as worker:
        worker("keeper = kvreuse.connect(path); parts = [scene.attach(keeper, rank) for rank in (0, 1)]")
        worker("[scene.fill(part, KEYS) for part in parts]")
        with keeper.group("g", read_data=True) as group:
            claim = group.claim(KEYS[:3])
            assert claim.view(1, 2) == scene.content(KEYS[2])
            assert group.clear().removed == 16 and group.match(KEYS) == 0
            worker("out = [part.match(KEYS) for part in parts]")
            assert claim.view(0, 0) == scene.content(KEYS[0])
            counts = worker("out = [(one.free_count, one.stale_count) for one in (part.stats() for part in parts)]")
            assert counts == [[5, 3]] * 2, counts
            claim.release()
            worker("[scene.fill(part, KEYS) for part in parts]")
            assert group.match(KEYS) == 8
            stats = group.stats()
            assert sorted(stats) == [0, 1] and stats[1].sealed_count == 8
            assert group.touch(KEYS[:2]) == 2
            assert worker("parts[0].evict(6); out = [k in KEYS[:2] for k in parts[0].keys()]") == [True, True]
        # A part without a worker is emptied as well.
    """)


def test_readers_get_nothing_that_they_can_write(stage):
    """S4: table and data are read-only for a reader; a write is refused by the kernel."""
    stage("""
    import mmap
    with kvreuse.testing.keeper(scene.PROFILE) as path, kvreuse.connect(path) as keeper, Agent(path) as worker:
        worker("keeper = kvreuse.connect(path); parts = [scene.attach(keeper, rank) for rank in (0, 1)]")
        worker("[scene.fill(part, KEYS) for part in parts]")
        with keeper.group("g", read_data=True) as group, group.claim(KEYS) as claim:
            view = claim.view(0, 0)
            assert view.readonly
            names = {}
            for fd in os.listdir("/proc/self/fd"):
                try:
                    name = os.readlink(f"/proc/self/fd/{fd}").split(" ")[0].rpartition(":")[2]
                except OSError:
                    continue
                if name in ("table", "data0"):
                    names[int(fd)] = name
            assert set(names.values()) == {"data0", "table"}, names
            for fd in names:
                try:
                    mmap.mmap(fd, 4096)
                except PermissionError:
                    continue
                raise AssertionError(f"{names[fd]} can be mapped writable")
        with keeper.group("g") as group, group.claim(KEYS) as claim:
            try:
                claim.view(0, 0)
            except kvreuse.NotSupportedError as error:
                assert "read_data" in str(error)
            else:
                raise AssertionError("data without being asked for")
    """)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("topology=kvreuse.Topology(tp=4)", ("topology", "4", "2")),
        ("dtype='float16'", ("dtype", "bfloat16", "float16")),
        ("weights_id='w2'", ("weights_id", "w1", "w2")),
        ("block_tokens=32", ("block_tokens", "16", "32")),
    ],
)
def test_another_manifest_is_refused_while_a_worker_lives_and_empties_afterwards(stage, change, words):
    """R3, R6, design section 5: tp 2 to 4, another dtype, other weights, another block size; old and new mixed."""
    stage(f"""
    words = {words!r}
    with kvreuse.testing.keeper(scene.PROFILE) as path, kvreuse.connect(path) as keeper:
        with Agent(path) as worker:
            worker("keeper = kvreuse.connect(path); parts = [scene.attach(keeper, rank) for rank in (0, 1)]")
            worker("[scene.fill(part, KEYS) for part in parts]")
            try:
                scene.attach(keeper, 1, {change})
            except kvreuse.AttachRefusedError as error:
                assert all(word in str(error) for word in words) and error.pid == worker.pid, error
            else:
                raise AssertionError("mixed")
            group = keeper.group("g")
            assert group.readiness().ready and group.match(KEYS) == 8
            old = keeper.group("g", scene.manifest({change}))
            assert old.match(KEYS) == 0 and all(word in str(old.readiness()) for word in words), old.readiness()
        with scene.attach(keeper, 0, {change}) as part:
            assert part.outcome.kind is kvreuse.OutcomeKind.EMPTY
            assert all(word in part.outcome.reason for word in words), part.outcome
            # Rank 1's old part went with it: the old rank is no part of the new group.
            try:
                scene.attach(keeper, 1)
            except kvreuse.AttachRefusedError as error:
                assert all(word in str(error) for word in words), error
            else:
                raise AssertionError("old and new ranks mixed")
            assert not group.readiness() and group.match(KEYS) == 0
            assert len(keeper.status()["parts"]) == 1
    """)


def test_a_rank_twice_and_a_rank_outside(stage):
    """R4, R6: the second writer of a rank is refused; a rank outside of the topology is RangeError."""
    stage("""
    with kvreuse.testing.keeper(scene.PROFILE) as path, kvreuse.connect(path) as keeper, Agent(path) as worker:
        worker("keeper = kvreuse.connect(path); part = scene.attach(keeper, 0)")
        for who in (keeper.attach, lambda *a, **k: worker("scene.attach(keeper, 0)")):
            try:
                who(scene.manifest(), kvreuse.Rank(tp=0), blocks=8, group="g")
            except (kvreuse.AttachRefusedError, AgentError) as error:
                assert "writer alive" in str(error) and str(worker.pid) in str(error), error
            else:
                raise AssertionError("two writers of one rank")
        for rank in (kvreuse.Rank(tp=2), kvreuse.Rank(pp=1), kvreuse.Rank(cp=1)):
            try:
                keeper.attach(scene.manifest(), rank, blocks=8, group="g")
            except kvreuse.RangeError as error:
                assert "topology" in str(error), error
            else:
                raise AssertionError(rank)
        # dp is part of the group's identity, no rank of it.
        with keeper.attach(scene.manifest(topology=kvreuse.Topology(tp=2, dp=2)), kvreuse.Rank(dp=1), blocks=8,
                           group="g") as part:
            assert str(part.outcome) == "EMPTY(new)", part.outcome
    """)


def test_a_group_finds_the_replacement_by_itself(stage):
    """R4, R5: a scheduler that lives on through its workers' deaths, with the same parts and with new ones."""
    stage("""
    with kvreuse.testing.keeper(scene.PROFILE) as path, kvreuse.connect(path) as keeper:
        group = keeper.group("g", scene.manifest())
        assert group.match(KEYS) == 0 and "does not exist" in str(group.explain(KEYS))
        start = "keeper = kvreuse.connect(path); parts = [scene.attach(keeper, rank) for rank in (0, 1)]"
        with Agent(path) as worker:
            worker("keeper = kvreuse.connect(path); parts = [scene.attach(keeper, 0)]")
            assert group.match(KEYS) == 0 and group.explain(KEYS).missing == (1,)
            worker("parts.append(scene.attach(keeper, 1)); [scene.fill(part, KEYS) for part in parts]")
            assert group.match(KEYS) == 8
            held = group.claim(KEYS[:2], tag="t")
        scene.until(lambda: not group.readiness())
        assert group.match(KEYS) == 0 and "exited" in str(group.explain(KEYS)), group.explain(KEYS)
        with Agent(path) as worker:
            worker(start)
            assert group.match(KEYS) == 8
            # The scheduler's claims went on: the blocks could not be evicted meanwhile.
            assert worker("out = [part.evict(8) for part in parts]") == [6, 6]
            assert worker(f"out = len(parts[0].adopt({held.ticket(0)!r}))") == 2
        group.release("t")
        scene.until(lambda: not group.readiness())
        assert keeper.release() == 2
        assert group.match(KEYS) == 0
        with Agent(path) as worker:
            worker(start)
            worker("[scene.fill(part, KEYS[:5]) for part in parts]")
            assert group.match(KEYS) == 5
    """)
