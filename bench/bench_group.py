"""Claims on one part by one process and by eight: what its lock costs when all want it. Run it, and it prints that."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

import pytest

import kvreuse
import kvreuse.testing

PROCESSES = 8
SECONDS = 1.0
ROUNDS = 5
WANTED = 0.5
PROFILE = "[reuse]\nenabled = true\n[table]\nlock_wait_s = 30.0\n"
_MANIFEST = """
manifest = kvreuse.Manifest(model="m", weights_id="w", dtype="bfloat16", block_tokens=16, block_bytes=4096, layers=1,
    kv_heads=1, head_dim=1, layout="bytes", hash_scheme="test", hash_root="0")
"""
_READER = f"""
import sys, time
import kvreuse
{_MANIFEST}
keys = [i.to_bytes(32, "big") for i in range(4)]
keeper = kvreuse.connect(sys.argv[1], timeout=60)
group = keeper.group(manifest=manifest)
assert group.match(keys) == 4
print("ready", flush=True)
for line in sys.stdin:
    until, count = time.monotonic() + float(line), 0
    while time.monotonic() < until:
        with group.claim(keys) as claim:
            count += len(claim) == 4
    print(count, flush=True)
"""


def measure(rounds: int = ROUNDS, seconds: float = SECONDS) -> tuple[float, float]:
    """Claims and releases of 4 keys a second: (one process, all together), medians of rounds that take turns."""
    names: dict[str, object] = {"kvreuse": kvreuse}
    exec(_MANIFEST, names)
    keys = [i.to_bytes(32, "big") for i in range(4)]
    alone, together = [], []
    with kvreuse.testing.keeper(PROFILE) as path, kvreuse.connect(path) as keeper:
        manifest = names["manifest"]
        with keeper.attach(manifest, kvreuse.Rank(), blocks=64) as part:
            with part.reserve(keys) as made:
                made.commit()
            command = [sys.executable, "-c", _READER, path]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            readers = [subprocess.Popen(command, **pipes) for _ in range(PROCESSES)]
            try:
                for reader in readers:
                    assert reader.stdout.readline() == "ready\n"
                for _ in range(rounds):
                    alone.append(_run(readers[:1], seconds))
                    together.append(_run(readers, seconds))
            finally:
                for reader in readers:
                    reader.kill()
                    reader.communicate()
    return statistics.median(alone), statistics.median(together)


def _run(readers: list[subprocess.Popen[str]], seconds: float) -> float:
    for reader in readers:
        reader.stdin.write(f"{seconds}\n")
        reader.stdin.flush()
    return sum(int(reader.stdout.readline()) for reader in readers) / seconds


@pytest.mark.gate
def test_eight_processes_keep_half_of_ones_throughput():
    alone, together = measure()
    assert together >= WANTED * alone, f"{PROCESSES} processes {together:.0f}/s, one {alone:.0f}/s"


def test_all_get_their_claims():
    """Once, untimed, so that it cannot rot."""
    assert min(measure(1, 0.1)) > 0


def main() -> None:
    alone, together = measure()
    print(
        f"claim and release of 4 keys: one process {alone:.0f}/s, {PROCESSES} together {together:.0f}/s: "
        f"{together / alone:.2f} (wanted {WANTED}; {os.cpu_count()} CPUs, backend {kvreuse.backend})"
    )


if __name__ == "__main__":
    main()
