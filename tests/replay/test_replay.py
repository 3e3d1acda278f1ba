"""`kvreuse replay` as a whole: keeper, workers, kills. `run_replay` checks each time that nothing is left behind."""

from __future__ import annotations

import json
import mmap
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from model import replay_model
from replay_peers import change_data, children, marked, open_part

from kvreuse import cli, replay, replay_trace

KEYS = [
    "requests",
    "block_refs",
    "hit_blocks",
    "hit_rate",
    "evictions",
    "ranks",
    "backends",
    "verified_blocks",
    "corrupt_blocks",
    "lost_sealed_blocks",
    "restarts",
    "keeper_restarts",
    "ready_ms",
    "start_ms",
    "teardown_ms",
    "leaked_bytes",
    "leaked_fds",
    "requests_per_s",
    "bytes_written",
]

# Repeats in a request, requests longer than a small part, holes, an empty one, nothing to write (the fifth).
STRANGE = [
    [1, 2, 3],
    [1, 1, 2, 1, 9],
    [],
    [4, 5, 6, 7, 8, 9, 10, 11, 12],
    [4, 5],
    [1, 2, 3],
    [3, 2, 1],
    [2**63 - 1, 0, 2**63 - 1],
    [6, 1, 6],
    [1, 2, 3, 4, 5, 6, 7, 8],
]


def at(request: int, action):
    """Do something once, after so many requests."""

    def after(done: int) -> None:
        if done == request:
            action()

    return after


def check_counts(result, counts, ranks=2):
    assert list(result) == KEYS
    assert (result["requests"], result["block_refs"]) == (counts.requests, counts.block_refs)
    assert (result["hit_blocks"], result["evictions"]) == (counts.hit_blocks, counts.evictions)
    assert result["hit_rate"] == pytest.approx(counts.hit_blocks / max(1, counts.block_refs), abs=1e-6)
    assert result["ranks"] == len(result["backends"]) == ranks
    for key in ("lost_sealed_blocks", "keeper_restarts", "leaked_bytes", "leaked_fds"):
        assert result[key] == 0
    assert len(result["ready_ms"]) == len(result["start_ms"]) == len(result["teardown_ms"]) == result["restarts"]
    assert all(0 < value < 30000 for key in ("ready_ms", "start_ms", "teardown_ms") for value in result[key])


@pytest.fixture(scope="session")
def conversation(shared_dir):
    return shared_dir / "data" / "conversation_trace.jsonl"


# ---- the counts of the real trace ----


@pytest.mark.parametrize(
    ("blocks", "hits", "evictions"), [(1000, 2218, 51341), (10000, 11409, 33150), (30000, 15692, 8867)]
)
def test_first_2000_requests_reach_the_known_counts(run_replay, conversation, backend_name, blocks, hits, evictions):
    """H8, K6: two ranks of one backend."""
    words = (conversation, "--limit", 2000, "--blocks", blocks, "--backends", backend_name)
    status, result, err = run_replay(*words)
    assert status == 0
    check_counts(result, replay_model.Counts(2000, 54559, hits, evictions))
    assert result["backends"] == [backend_name] * 2
    assert result["verified_blocks"] == 2 * hits
    assert result["bytes_written"] == 2 * 4096 * (evictions + min(blocks, evictions + blocks))
    assert result["corrupt_blocks"] == 0
    assert "reuse is off by default; this run declares its own profile" in err
    assert "enabled = true" in err


def test_one_rank_on_each_backend(run_replay, conversation, backends_present):
    """H8: the ranks of one group may run different backends."""
    backends = backends_present if len(backends_present) == 2 else backends_present * 2
    status, result, _ = run_replay(conversation, "--limit", 2000, "--backends", ",".join(backends))
    assert status == 0
    check_counts(result, replay_model.Counts(2000, 54559, 11409, 33150))
    assert result["backends"] == backends


def test_whole_trace_with_kills_reaches_the_known_counts(run_replay, conversation):
    """K1, R2, R5: two workers are killed half way through a request; no sealed block is lost, no count changes."""
    status, result, err = run_replay(conversation, "--kill", "worker@2000", "--kill", "worker@7000:1")
    assert status == 0
    check_counts(result, replay_model.Counts(12031, 288500, 61046, 217454))
    assert result["verified_blocks"] == 2 * 61046
    assert (result["restarts"], result["corrupt_blocks"]) == (2, 0)
    assert err.count("its replacement is RESTORED") == 2


# ---- what no real trace has, and kills everywhere ----


@pytest.mark.parametrize("blocks", [1, 5, 100])
def test_strange_trace_with_a_kill_at_each_request(run_replay, trace, backend_name, blocks):
    """K1: also the first, the last, an empty one, one with nothing to write; no kill changes a count."""
    kills = [word for k in range(1, len(STRANGE) + 1) for word in ("--kill", f"worker@{k}:{k % 2}")]
    words = (trace(STRANGE), "--blocks", blocks, "--block-bytes", 100, "--backends", backend_name, *kills)
    status, result, _ = run_replay(*words)
    counts = replay_model.play(STRANGE, blocks)
    assert status == 0
    check_counts(result, counts)
    assert result["verified_blocks"] == 2 * counts.hit_blocks
    assert result["restarts"] == len(STRANGE)


def test_kills_at_one_request_are_carried_out_together(run_replay, trace):
    """K1, R4: the group is ready again only when both replacements are."""
    words = (trace(STRANGE), "--blocks", 5, "--ranks", 3, *("--kill", "worker@4:2", "--kill", "worker@4"))
    status, result, err = run_replay(*words)
    assert status == 0
    check_counts(result, replay_model.play(STRANGE, 5), ranks=3)
    assert re.findall(r"rank (\d) was killed", err) == ["0", "2"]


def test_one_rank_alone(run_replay, trace):
    words = (trace(STRANGE), "--blocks", 5, "--ranks", 1, "--kill", "worker@2", "--verify-attach")
    status, result, _ = run_replay(*words)
    assert status == 0
    check_counts(result, replay_model.play(STRANGE, 5), ranks=1)


def test_crash_rate_changes_no_count(run_replay):
    words = ("--limit", 60, "--blocks", 150, "--block-bytes", 64, "--crash-rate", 0.1, "--seed", 3)
    status, result, _ = run_replay(*words)
    assert status == 0
    check_counts(result, replay_model.play([ids.tolist() for ids in replay_trace.generate()[:60]], 150))
    assert result["restarts"] == len(replay.random_kills(60, 2, 0.1, 3)) > 1


# ---- each check can fail ----

SAME = [[1, 2, 3, 4]] * 6


def test_byte_changed_from_outside_is_found(run_replay, trace, backend_name):
    """The damaged blocks are counted and recomputed, the run goes on, no other count changes, the exit status is 1."""
    words = (trace(SAME), "--blocks", 4, "--backends", backend_name)
    status, result, err = run_replay(*words, after=at(2, lambda: change_data(4096)))
    assert status == 1
    check_counts(result, replay_model.play(SAME, 4))
    # Four blocks a rank, each found by one hit only.
    assert result["corrupt_blocks"] == 8
    assert "corrupt_blocks is 8" in err


def test_verification_off_finds_nothing(run_replay, trace):
    status, result, _ = run_replay(
        trace(SAME), "--blocks", 4, "--verify", "off", after=at(2, lambda: change_data(4096))
    )
    assert (status, result["corrupt_blocks"], result["verified_blocks"]) == (0, 0, 0)


def test_byte_changed_from_outside_is_found_at_attach(run_replay, trace):
    """The replacement is not given what the checksum of the commit refutes; it stores it anew."""
    words = (trace(SAME), "--blocks", 4, "--verify-attach", "--verify", "off", "--kill", "worker@4:1")
    status, result, err = run_replay(*words, after=at(3, lambda: change_data(4096)))
    assert status == 1
    assert (result["corrupt_blocks"], result["lost_sealed_blocks"], result["hit_blocks"]) == (4, 0, 20)
    assert "RESTORED(0): 4 block(s) with damaged data freed" in err


def test_lost_block_is_reported(run_replay, trace, monkeypatch):
    """K1: the check itself: a block that was acknowledged and never there."""
    count = replay.Replay._count

    def count_one_more(self, rank, reply):
        count(self, rank, reply)
        self._sealed[rank].add(12345)

    monkeypatch.setattr(replay.Replay, "_count", count_one_more)
    status, result, err = run_replay(trace(SAME), "--blocks", 4, "--kill", "worker@3")
    assert (status, result["lost_sealed_blocks"]) == (1, 1)
    assert "lost_sealed_blocks is 1" in err


def test_different_evictions_are_reported_with_both_numbers(run_replay, trace, monkeypatch):
    ask = replay.Replay._ask

    def ask_and_change(self, worker, message):
        reply = ask(self, worker, message)
        if message["do"] == "finish":
            reply["evictions"] += worker.rank
        return reply

    monkeypatch.setattr(replay.Replay, "_ask", ask_and_change)
    status, result, err = run_replay(trace(SAME), "--blocks", 4)
    assert (status, result["evictions"]) == (1, 0)
    assert "different numbers of blocks: [0, 1]" in err


def test_leaked_memory_is_found(backend_name, backend):
    """K3: the leak check itself: by an fd and a mapping, by a mapping alone, not at all."""
    label = f"planted-{backend_name}"
    region = backend.host_allocate(8192, 1, f"kvreuse:{label}:x", None).handle
    mapping = backend.region_map(region, 3, 0).handle
    fds, nbytes = replay.find_leaks(label)
    assert fds >= 1
    assert nbytes == 8192
    backend.mapping_unmap(mapping)
    assert replay.find_leaks(label)[1] == 8192
    backend.region_close(region)
    assert replay.find_leaks(label) == (0, 0)
    fd = os.memfd_create(f"kvreuse:{label}:y")
    os.truncate(fd, 4096)
    with mmap.mmap(fd, 4096), open(os.devnull) as other:
        # The mmap has a duplicate of the fd: put something else in its place, so that only the mapping is left.
        os.close(fd)
        for entry in Path("/proc/self/fd").iterdir():
            if label in os.path.realpath(entry):
                os.dup2(other.fileno(), int(entry.name))
        assert replay.find_leaks(label) == (0, 4096)
    assert replay.find_leaks(label) == (0, 0)


def test_leak_is_reported(run_replay, trace, monkeypatch):
    monkeypatch.setattr(replay, "find_leaks", lambda label: (1, 4096))
    status, result, err = run_replay(trace(SAME), "--blocks", 4)
    assert (status, result["leaked_fds"], result["leaked_bytes"]) == (1, 1, 4096)
    assert "leaked_bytes is 4096" in err


# ---- what ends in the middle ----


@pytest.mark.parametrize("rank", [0, 1])
def test_worker_that_dies_by_itself_ends_the_run(run_replay, trace, rank):
    def kill():
        worker = children("kvreuse.replay_worker")[rank]
        pidfd = os.pidfd_open(worker)
        os.kill(worker, signal.SIGKILL)
        select.select([pidfd], [], [], 30)
        os.close(pidfd)

    status, result, err = run_replay(trace(SAME), "--blocks", 4, after=at(2, kill))
    assert (status, result) == (1, None)
    assert f"rank {rank}'s worker ended unexpectedly (exit status -9)" in err


def test_keeper_that_dies_is_reported(run_replay, trace):
    """K6: the workers go on without it; the run says at its end that it was gone."""

    def kill():
        (keeper,) = children("kvreuse.keeper")
        pidfd = os.pidfd_open(keeper)
        os.kill(keeper, signal.SIGKILL)
        select.select([pidfd], [], [], 30)
        os.close(pidfd)

    status, result, err = run_replay(trace(SAME), "--blocks", 4, after=at(2, kill))
    assert (status, result) == (1, None)
    assert "the keeper ended unexpectedly (exit status -9)" in err


def test_error_in_a_worker_is_told(run_replay, trace, monkeypatch):
    play = replay.Replay._play_one
    monkeypatch.setattr(
        replay.Replay,
        "_play_one",
        lambda self, ids, data, after, hits, kills: play(self, ids, data, after, hits + 1, kills),
    )
    status, result, err = run_replay(trace(SAME), "--blocks", 4)
    assert (status, result) == (1, None)
    assert re.search(r"rank 0's worker: RuntimeError: matched 1 blocks, but only 0 could be claimed", err)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_leaves_nothing_behind(mark, tmp_path, number):
    """K3: no process, file or memory of the run stays, and no traceback is shown."""
    command = [sys.executable, "-m", "kvreuse", "replay", "--blocks", "1000", "--crash-rate", "0.5"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    def heed():  # a job that a shell put in the background inherits an ignored SIGINT
        signal.signal(number, signal.SIG_DFL)

    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True, preexec_fn=heed, **pipes) as process:
        try:
            said = ""
            while "was killed" not in said:
                line = process.stderr.readline()
                assert line, said
                said += line
            label = re.search(r"label (\w+)", said)[1]
            assert replay.find_leaks(label)[0] > 0
            # To all of its process group, as a terminal does.
            os.killpg(process.pid, number)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert "interrupted" in err
    assert replay.find_leaks(label) == (0, 0)
    assert marked(mark) == []


def test_interrupt_while_it_starts_leaves_nothing_behind(run_replay, trace, monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(replay.Worker, "hello", interrupt)
    status, result, err = run_replay(trace(SAME), "--blocks", 4)
    assert (status, result) == (130, None)
    assert "interrupted" in err


def test_keeper_that_does_not_start_is_told(run_replay, trace, monkeypatch):
    monkeypatch.setattr(replay, "PROFILE", '[reuse]\nenabled = true\ncolour = "{max_bytes}{checksum}"\n')
    status, result, err = run_replay(trace(SAME), "--blocks", 4)
    assert (status, result) == (1, None)
    assert "the keeper did not start" in err
    assert "colour" in err


# ---- what is shown ----


def test_summary_for_people(capfd, mark, trace):
    assert cli.main(["replay", trace(SAME), "--blocks", "4"]) == 0
    out, _ = capfd.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == KEYS
    assert re.search(r"^hit_blocks +20$", out, re.M)


def test_plot_is_drawn(mark, trace, tmp_path):
    # In a process of its own: matplotlib keeps its fonts open.
    path = tmp_path / "curve.png"
    command = [sys.executable, "-m", "kvreuse", "replay", trace(STRANGE), "--blocks", "5", "--kill", "worker@4"]
    done = subprocess.run([*command, "--plot", path], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert f"wrote {path}" in done.stderr


def test_plot_that_cannot_be_written_is_told(run_replay, trace, tmp_path, monkeypatch):
    def draw(*words):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvreuse.replay_plot.draw", draw)
    status, result, err = run_replay(trace(SAME), "--blocks", 4, "--plot", tmp_path / "x.png")
    assert (status, result["hit_blocks"]) == (1, 20)
    assert "No space left on device" in err


def test_curve_marks_restarts(trace, mark):
    options = replay.Options(blocks=5, block_bytes=64, backends=("fallback",), kills=(replay.Kill(4, 1),))
    requests = replay_trace.load(trace(STRANGE))
    result, curve = replay.run(options, requests, lambda text: None, lambda done: None)
    assert result["problems"] == []
    assert curve.restarts == [4]
    assert curve.refs == [len(ids) for ids in STRANGE]
    assert sum(curve.hits) == replay_model.play(STRANGE, 5).hit_blocks
    assert curve.resident_bytes[-1] == 2 * 5 * 64


# ---- the other commands ----


def test_status_release_and_info(capfd, mark):
    import kvreuse
    import kvreuse.testing

    with kvreuse.testing.keeper({"reuse": {"enabled": True}}) as path, kvreuse.connect(path) as keeper:
        part = open_part(keeper, 4)
        assert cli.main(["status", "--socket", path]) == 0
        text = capfd.readouterr().out
        assert "reuse: on" in text
        assert f"{part.part_id.hex()[:8]}  player-" in text
        assert re.search(rf"writer pid {os.getpid()}, [0-9.]+ KiB, connected, attached as EMPTY", text)
        assert cli.main(["status", "--socket", path, "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["parts"][0]["part_id"] == part.part_id.hex()
        assert cli.main(["release", "--socket", path, "--part", part.part_id.hex()[:8]]) == 1  # BusyError
        part.close()
        assert cli.main(["release", "--socket", path, "--part", "zz"]) == 2
        capfd.readouterr()
        assert cli.main(["status", "--socket", path]) == 0
        assert "without a worker for" in capfd.readouterr().out
        assert cli.main(["release", "--socket", path, "--all"]) == 0
        assert "released 1 part(s)" in capfd.readouterr().out
    assert cli.main(["info"]) == 0
    assert "backend:" in capfd.readouterr().out
    assert cli.main(["info", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["backend"] == kvreuse.backend
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capfd.readouterr().out == f"kvreuse {kvreuse.__version__}\n"


def test_version_is_printed_without_numpy(run_python):
    """P1: what needs no array imports no numpy."""
    code = (
        "from kvreuse import cli\ntry: cli.main(['--version'])\nfinally: import sys; assert 'numpy' not in sys.modules"
    )
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")
