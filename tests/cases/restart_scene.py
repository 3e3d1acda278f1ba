"""A keeper, two ranks of 8 blocks of 4096 bytes, and workers that are killed: what the restart cases begin with.

Runs in an interpreter of its own (`run_python`), so that KVREUSE_BACKEND chooses the backend of everything in it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys

import kvreuse
import kvreuse.testing

PROFILE = "[reuse]\nenabled = true\n"
KEYS = [bytes([i]) * 32 for i in range(8)]
WORKER = """
import sys
sys.path[:0] = {path!r}
import restart_scene as scene
with scene.kvreuse.connect(sys.argv[1]) as keeper:
    parts = [scene.attach(keeper, int(rank)) for rank in sys.argv[2].split(",")]
    for part in parts:
        scene.fill(part, scene.KEYS)
    print("filled", flush=True)
    sys.stdin.read()
"""

# What children of the cases run.
READ = """
import sys, socket, kvreuse
sock = socket.socket(fileno=int(sys.argv[1]))
shared = kvreuse.SharedHandle.recv(sock)
region = kvreuse.open_provider("host").import_region(shared)
mapping = region.map(kvreuse.Access.READ)
with mapping.buffer as view:
    good = bytes(view) == bytes(range(256)) * 4096
print("read" if good else "wrong", flush=True)
if sys.argv[2] == "exit":
    mapping.close(); region.close(); shared.close(); sock.close()
else:
    sys.stdin.read()
"""
REATTACH = """
import os, sys
sys.path.insert(0, sys.argv[2])
import restart_scene as scene
keeper = scene.kvreuse.connect(sys.argv[1])
part = scene.attach(keeper, 0, block_bytes=131072)
with part.claim(scene.KEYS) as claim:
    good = [bytes(claim.view(i)) for i in range(len(claim))] == [key * 4096 for key in scene.KEYS]
print("read" if good else "wrong", flush=True)
if sys.argv[3] == "exit":
    part.close(); keeper.close()
else:
    sys.stdin.read()
"""
DONATE = """
import os, sys
sys.path.insert(0, sys.argv[2])
import restart_scene as scene
from kvreuse.keeper import client, protocol
send, count = protocol.send, [0]
def counted(sock, message, fds=()):
    if isinstance(message, protocol.Donate):
        count[0] += 1
        if count[0] == 6:
            print("five", flush=True)
            sys.stdin.read()
    return send(sock, message, fds)
protocol.send = counted
provider = scene.kvreuse.open_provider("host")
regions = [provider.allocate(4096) for _ in range(8)]
scene.kvreuse.connect(sys.argv[1]).attach(scene.manifest(), scene.kvreuse.Rank(), blocks=8, group="g", regions=regions)
"""
ATTACH = """
import sys
sys.path.insert(0, sys.argv[2])
import restart_scene as scene
part = scene.attach(scene.kvreuse.connect(sys.argv[1]), 0)
print("sealed", flush=True)
sys.stdin.read()
"""


def manifest(**changes):
    fields = {
        "model": "m",
        "weights_id": "w1",
        "dtype": "bfloat16",
        "block_tokens": 16,
        "block_bytes": 4096,
        "layers": 2,
        "kv_heads": 1,
        "head_dim": 64,
        "layout": "LKHD",
        "hash_scheme": "sglang-sha256",
        "hash_root": "r1",
        "topology": kvreuse.Topology(tp=2),
    }
    return kvreuse.Manifest(**{**fields, **changes})


def attach(keeper, rank, **changes):
    return keeper.attach(manifest(**changes), kvreuse.Rank(tp=rank), blocks=8, group="g")


def content(key: bytes) -> bytes:
    return key * 128


def fill(part, keys) -> None:
    with part.reserve(keys) as reservation:
        for i, key in enumerate(keys):
            reservation.view(i)[:] = content(key)
        reservation.commit()


def check(part, keys=KEYS) -> None:
    """Every block of `keys` is there, with the right bytes."""
    with part.claim(keys) as claim:
        assert len(claim) == len(keys), len(claim)
        for i, key in enumerate(keys):
            assert claim.view(i) == content(key)


@contextlib.contextmanager
def worker(path, ranks="0,1"):
    """A worker process that has filled its parts and waits. It is killed at the end if it still lives."""
    code = WORKER.format(path=[os.path.dirname(os.path.abspath(__file__))])
    process = subprocess.Popen(
        [sys.executable, "-c", code, path, ranks], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "filled\n"
        yield process
    finally:
        kill(process)


def kill(process) -> None:
    process.kill()
    process.wait(30)
    process.stdin.close()
    process.stdout.close()


@contextlib.contextmanager
def dead_worker():
    """A client of a keeper whose two parts were filled by a worker that was then killed."""
    with kvreuse.testing.keeper(PROFILE) as path:
        with worker(path):
            pass
        with kvreuse.connect(path) as keeper:
            yield keeper


def part_memory(keeper, rank, what):
    """Open the memory of a rank's part, as an outsider of the same user would: "table" or "data0"."""
    status = keeper.status()
    part = next(part for part in status["parts"] if part["rank"]["tp"] == rank)
    name = f"memfd:kvreuse:{status['label']}:{part['part_id'][:8]}:{what}"
    folder = f"/proc/{status['pid']}/fd"
    fd = next(fd for fd in os.listdir(folder) if name in os.readlink(f"{folder}/{fd}"))
    file = os.open(f"{folder}/{fd}", os.O_RDWR)
    try:
        return mmap.mmap(file, 0)
    finally:
        os.close(file)


def reason(part) -> str:
    return part.outcome.reason
