"""8 processes on one part: a writer, readers, one killed each second, one stopped at times (K1, R6, K7).

KVREUSE_LONG=1 runs it for 60 s, else for some seconds. What is checked is in hammer.py, in each process and throughout.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from hammer import BLOCKS, check_restored, manifest

import kvreuse
import kvreuse.testing

PROCESSES = 8
SECONDS = 60 if os.environ.get("KVREUSE_LONG") == "1" else 6
ALONE_S = SECONDS / 10
PROFILE = "[reuse]\nenabled = true\n[table]\nlock_wait_s = 10.0\n"
HAMMER = str(Path(__file__).with_name("hammer.py"))


class Crew:
    def __init__(self, path, folder, backend_name) -> None:
        self.path, self.folder = path, folder
        self.env = {**os.environ, "KVREUSE_BACKEND": backend_name}
        self.counts = folder / "counts"
        self.counts.write_bytes(bytes(8 * PROCESSES))
        self.journal = folder / "journal"
        self.journal.write_text("")
        self.members: dict[int, subprocess.Popen[str]] = {}
        self.seeds = iter(range(1, 100000))

    def start(self, index: int) -> None:
        role = "writer" if index == 0 else "reader"
        command = [sys.executable, HAMMER, role, self.path, self.counts, index, self.journal, next(self.seeds)]
        process = subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.env
        )
        self.members[index] = process

    def check(self) -> None:
        """Nobody has ended by itself."""
        for index, process in self.members.items():
            if process.poll() is not None:
                raise AssertionError(f"process {index} ended with {process.returncode}: {process.communicate()[1]}")

    def kill(self, index: int) -> None:
        process = self.members.pop(index)
        process.send_signal(signal.SIGCONT)
        process.kill()
        _, said = process.communicate(timeout=30)
        assert (process.returncode, said) == (-9, ""), said

    def total(self) -> int:
        data = self.counts.read_bytes()
        return sum(int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8))

    def close(self) -> None:
        for process in self.members.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.communicate(timeout=30)


def test_eight_processes_hammer_one_part(backend_name, monkeypatch, tmp_path):
    """K1, R6, K7, S4, B10: an independent model holds throughout; at the end counts balance and nothing is held."""
    monkeypatch.setenv("KVREUSE_BACKEND", backend_name)
    draw = random.Random(7)
    with kvreuse.testing.keeper(PROFILE) as path:
        crew = Crew(path, tmp_path, backend_name)
        try:
            crew.start(0)
            assert crew.members[0].stdout.readline() == "ready\n", crew.members[0].communicate()[1]
            # One process alone: the writer.
            before, start = crew.total(), time.monotonic()
            time.sleep(ALONE_S)
            alone = (crew.total() - before) / (time.monotonic() - start)
            for index in range(1, PROCESSES):
                crew.start(index)
            for index in range(1, PROCESSES):
                assert crew.members[index].stdout.readline() == "ready\n"
            before, start, killed = crew.total(), time.monotonic(), 0
            stopped: tuple[int, float] | None = None
            next_kill = start + 1
            while time.monotonic() < start + SECONDS:
                time.sleep(0.02)
                crew.check()
                now = time.monotonic()
                if stopped and now > stopped[1]:
                    if stopped[0] in crew.members:
                        crew.members[stopped[0]].send_signal(signal.SIGCONT)
                    stopped = None
                if now > next_kill:
                    next_kill = now + 1
                    victim = draw.randrange(PROCESSES) if killed % 3 else 0
                    crew.kill(victim)
                    crew.start(victim)
                    killed += 1
                    if stopped is None and killed % 2:
                        stopped = (draw.randrange(PROCESSES), now + 1)
                        crew.members[stopped[0]].send_signal(signal.SIGSTOP)
            together = (crew.total() - before) / (time.monotonic() - start)
            if stopped and stopped[0] in crew.members:
                crew.members[stopped[0]].send_signal(signal.SIGCONT)
            crew.check()
            for index in range(PROCESSES):
                crew.kill(index)
        finally:
            crew.close()
        print(
            f"{backend_name}: {killed} kills in {SECONDS} s; one process alone {alone:.0f} rounds/s, "
            f"{PROCESSES} together {together:.0f} ({together / alone:.2f})"
        )
        assert killed >= SECONDS // 2
        assert together > 0
        with kvreuse.connect(path, timeout=20) as keeper:
            with keeper.attach(manifest(), kvreuse.Rank(), blocks=BLOCKS, timeout=20) as part:
                check_restored(part, str(crew.journal))
                stats = part.stats()
                assert (stats.claimed_count, stats.writing_count, stats.stale_count) == (0, 0, 0), stats
                assert stats.free_count + stats.sealed_count == BLOCKS, stats
                assert part.evict(BLOCKS) == stats.sealed_count
            status = keeper.status()
            assert [len(item["sessions"]) for item in status["parts"]] == [0]
