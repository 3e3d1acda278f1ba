"""A1, A2, A12: what a replacement is given. Each runs on both backends, in an interpreter of its own."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

HERE = str(Path(__file__).resolve().parent)
HEAD = f"""
import sys
sys.path.insert(0, {HERE!r})
import kvreuse, kvreuse.testing
import restart_scene as scene
"""


@pytest.fixture
def play(run_python, backend_name):
    """Run a case's code after HEAD; it must print "ok"."""

    def run(code, **options):
        done = run_python(HEAD + textwrap.dedent(code) + "\nprint('ok')\n", backend=backend_name, **options)
        assert (done.stdout, done.stderr) == ("ok\n", ""), done.stdout + done.stderr

    return run


def test_a1a_the_same_manifest_is_restored(play):
    """A1(a), R2, K1."""
    play("""
    with scene.dead_worker() as keeper:
        for rank in (0, 1):
            with scene.attach(keeper, rank) as part:
                assert str(part.outcome) == "RESTORED(8)", part.outcome
                scene.check(part)
    """)


def test_a1b_another_block_size_is_empty_and_names_it(play):
    """A1(b), R3."""
    play("""
    with scene.dead_worker() as keeper, scene.attach(keeper, 0, block_tokens=32) as part:
        assert part.outcome.kind is kvreuse.OutcomeKind.EMPTY
        for word in ("block_tokens", "16", "32"):
            assert word in part.outcome.reason, part.outcome
        assert part.match(scene.KEYS) == 0
    """)


def test_a1c_a_damaged_record_is_freed_and_counted(play):
    """A1(c), R1: one byte of one record that its CRC covers, or of the CRC itself."""
    play("""
    with kvreuse.testing.keeper(scene.PROFILE) as path, kvreuse.connect(path) as keeper:
        for offset in (0, 31, 32, 48, 52, 56, 60, 61):
            with scene.worker(path, "0"):
                pass
            with scene.part_memory(keeper, 0, "table") as table:
                # Records follow the manifest's pages: the record is found by its key, which it begins with.
                table[table.find(scene.KEYS[3]) + offset] ^= 1
            with scene.attach(keeper, 0) as part:
                assert part.outcome.kind is kvreuse.OutcomeKind.RESTORED and part.outcome.blocks == 7, part.outcome
                assert "1 damaged record" in part.outcome.reason, (offset, part.outcome)
                stats = part.stats()
                assert (stats.sealed_count, stats.free_count, stats.corrupt_total) == (7, 1, 1), (offset, stats)
                scene.check(part, scene.KEYS[:3])
                scene.check(part, scene.KEYS[4:])
                assert part.match([scene.KEYS[3]]) == 0
            assert keeper.release() == 1
    """)


@pytest.mark.parametrize("offset", [12, 16, 48, 200])
def test_a1d_a_damaged_superblock_is_empty(play, offset):
    """A1(d), R2: a byte that the superblock's CRC covers."""
    play(f"""
    with scene.dead_worker() as keeper:
        with scene.part_memory(keeper, 0, "table") as table:
            table[{offset}] ^= 1
        with scene.attach(keeper, 0) as part:
            assert part.outcome.kind is kvreuse.OutcomeKind.EMPTY, part.outcome
            assert "corrupt" in part.outcome.reason, part.outcome
            assert part.match(scene.KEYS) == 0
    """)


def test_a1e_a_group_waits_for_its_missing_rank(play):
    """A1(e), R4: only rank 0 attached again: not ready, rank 1 missing; ready once it has attached."""
    play("""
    with scene.dead_worker() as keeper:
        group = keeper.group("g", scene.manifest())
        with scene.attach(keeper, 0) as part:
            assert str(part.outcome) == "RESTORED(8)", part.outcome
            found = group.readiness()
            assert not found and found.ranks[0].ready and not found.ranks[1].ready, found
            # Alone in the text; why it is missing is known here.
            assert found.reason.startswith("rank 1: ") and "rank 0" not in found.reason, found
            assert "its worker (pid " in found.ranks[1].reason, found
            with scene.attach(keeper, 1) as other:
                assert str(other.outcome) == "RESTORED(8)" and group.readiness().ready
    with kvreuse.testing.keeper(scene.PROFILE) as path, kvreuse.connect(path) as keeper:
        with scene.attach(keeper, 0):
            assert str(keeper.group("g").readiness()) == "not ready: rank 1: missing"
    """)


def test_a1f_a_living_writer_refuses_another(play):
    """A1(f), R6: with its pid."""
    play("""
    with kvreuse.testing.keeper(scene.PROFILE) as path, scene.worker(path) as other, kvreuse.connect(path) as keeper:
        try:
            scene.attach(keeper, 0)
        except kvreuse.AttachRefusedError as error:
            assert error.outcome.kind is kvreuse.OutcomeKind.REFUSED
            assert error.pid == other.pid and str(other.pid) in str(error) and "writer alive" in str(error), error
        else:
            raise AssertionError("two writers")
    """)


def test_a1g_a_fault_in_the_middle_of_a_restore_is_empty(play):
    """A1(g), R2: after 3 of 8 records; nothing is there, not 3."""
    play("""
    import errno
    from kvreuse import _status, parts
    with kvreuse.testing.keeper(scene.PROFILE + '[checksum]\\nwhen = "attach"\\n') as path:
        with scene.worker(path):
            pass
        parts.VERIFY_BATCH_SLOTS = 1
        real, calls = parts._backend.table_verify, []
        def verify(table, slots, verdicts):
            calls.append(1)
            if len(calls) == 4:
                raise _status.from_errno("read", errno.EIO)
            return real(table, slots, verdicts)
        with kvreuse.connect(path) as keeper:
            parts._backend.table_verify = verify
            with scene.attach(keeper, 0) as part:
                assert part.outcome.kind is kvreuse.OutcomeKind.EMPTY and "EIO" in part.outcome.reason, part.outcome
                assert len(calls) == 4
                assert list(part.keys()) == [] and part.match(scene.KEYS[:3]) == 0
                stats = part.stats()
                assert (stats.sealed_count, stats.free_count) == (0, 8), stats
            parts._backend.table_verify = real
            with scene.attach(keeper, 0) as part:
                assert str(part.outcome) == "RESTORED(0)", part.outcome
    """)


def test_a2_a_keepers_memory_outlives_its_importers(play):
    """A2, H6: a process imports 1 MiB, reads, exits; another is killed; a fresh import sees the same bytes."""
    play("""
    import socket, subprocess
    def importer(region, end):
        mine, theirs = socket.socketpair()
        with mine, region.export() as shared:
            child = subprocess.Popen([sys.executable, "-c", scene.READ, str(theirs.fileno()), end],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()], text=True)
            theirs.close()
            shared.send(mine)
            assert child.stdout.readline() == "read\\n", child.stderr.read()
            if end == "kill":
                child.kill()
            out, err = child.communicate(timeout=30)
            assert (out, err) == ("", ""), err
    provider = kvreuse.open_provider("host")
    with provider.allocate(1 << 20) as region:
        with region.map() as mapping, mapping.buffer as view:
            view[:] = bytes(range(256)) * 4096
        for end in ("exit", "kill", "exit"):
            importer(region, end)
    """)


def test_a2_a_keepers_part_outlives_its_workers(play):
    """A2, K1: a keeper holds 1 MiB; a worker attaches, reads, exits; another is killed; the same memory and bytes."""
    play("""
    import subprocess
    SIZE = {"block_bytes": 131072}
    def identity():
        folder = f"/proc/{keeper.status()['pid']}/fd"
        files = [f"{folder}/{fd}" for fd in os.listdir(folder)]
        data = [file for file in files if os.path.lexists(file) and "data0" in os.readlink(file)]
        return [(os.stat(file).st_ino, os.stat(file).st_size) for file in data]
    def reads():
        with scene.attach(keeper, 0, **SIZE) as part:
            assert str(part.outcome) == "RESTORED(8)", part.outcome
            with part.claim(scene.KEYS) as claim:
                return [bytes(claim.view(i)) for i in range(len(claim))]
    import os
    expected = [key * 4096 for key in scene.KEYS]
    with kvreuse.testing.keeper(scene.PROFILE) as path, kvreuse.connect(path) as keeper:
        with scene.attach(keeper, 0, **SIZE) as part, part.reserve(scene.KEYS) as made:
            for i, data in enumerate(expected):
                made.view(i)[:] = data
            made.commit()
        first = identity()
        assert [size for _, size in first] == [1 << 20], first
        for end in ("exit", "kill"):
            child = subprocess.Popen([sys.executable, "-c", scene.REATTACH, path, sys.path[0], end],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            assert child.stdout.readline() == "read\\n", child.stderr.read()
            if end == "kill":
                child.kill()
            out, err = child.communicate(timeout=30)
            assert (out, err, child.returncode) == ("", "", 0 if end == "exit" else -9), err
            assert reads() == expected and identity() == first
    """)


def test_a12_a_part_is_only_what_was_sealed(play):
    """A12, R1: killed after 5 of 8 regions: EMPTY, the 5 are freed; after the layout was sealed: RESTORED(0)."""
    play("""
    import os, subprocess
    def killed(code, word):
        child = subprocess.Popen([sys.executable, "-c", code, path, sys.path[0]], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == word + "\\n"
        scene.kill(child)
    with kvreuse.testing.keeper(scene.PROFILE) as path:
        killed(scene.DONATE, "five")
        with kvreuse.connect(path) as keeper:
            with scene.attach(keeper, 0) as part:
                assert str(part.outcome) == "EMPTY(new)", part.outcome
                status = keeper.status()
                folder = f"/proc/{status['pid']}/fd"
                paths = [f"{folder}/{fd}" for fd in os.listdir(folder)]
                names = [os.readlink(file) for file in paths if os.path.lexists(file)]
                assert len(status["parts"]) == 1
                # What the donor made is called memfd:kvreuse; what the keeper makes has its label.
                assert not [name for name in names if name.startswith("/memfd:kvreuse (")], names
            keeper.release()
            killed(scene.ATTACH, "sealed")
            with scene.attach(keeper, 0) as part:
                assert str(part.outcome) == "RESTORED(0)", part.outcome
    """)
