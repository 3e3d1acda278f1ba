"""SIGKILL of a worker with copies in flight, at random moments (KVREUSE_LONG=1: 200 times)."""

from __future__ import annotations

import os

TIMES = 200 if os.environ.get("KVREUSE_LONG") == "1" else 25

COMMON = """
import os, random, signal, socket, subprocess, sys, time
import numpy as np
import kvreuse, kvreuse.testing
from kvreuse import errors
BLOCK, SLOTS, SOURCES = 1 << 20, 12, 8
manifest = kvreuse.Manifest(model="m", weights_id="w", dtype="bfloat16", block_tokens=16, block_bytes=BLOCK, layers=1,
    kv_heads=1, head_dim=1, layout="x", hash_scheme="opaque", hash_root="r")
"""
# Stores without end, two on their way at a time, from memory that the parent has too.
WORKER = (
    COMMON
    + """
draw = random.Random()
with socket.socket(fileno=0) as sock:
    source = kvreuse.SharedHandle.recv(sock)
    k = kvreuse.connect(sys.argv[1])
    part = k.attach(manifest, kvreuse.Rank(), blocks=SLOTS)
    mapping = kvreuse.open_provider("host").import_region(source).map(kvreuse.Access.READ)
    engine = kvreuse.EngineBlocks({"all": (mapping, 0, BLOCK)})
    q = kvreuse.CopyQueue(2)
    ops = []
    while True:
        blocks = draw.sample(range(SOURCES), 4)
        keys = [draw.randbytes(15) + bytes([block]) for block in blocks]
        try:
            ops.append(part.store(keys, engine, blocks, evict=True, queue=q))
        except errors.NoSpaceError:
            pass
        if sock is not None:
            sock.send(b"!")
            sock = None
        if len(ops) > 1:
            ops.pop(0).result()
"""
)
CODE = (
    COMMON
    + """
TIMES, WORKER = int(sys.argv[1]), sys.argv[2]
def attach(k):
    deadline = time.monotonic() + 20
    while True:
        try:
            return k.attach(manifest, kvreuse.Rank(), blocks=SLOTS)
        except errors.AttachRefusedError:  # the keeper has not seen the death yet
            assert time.monotonic() < deadline
            time.sleep(0.002)
def fds():
    return len(os.listdir("/proc/self/fd"))
with (
    kvreuse.testing.keeper('[reuse]\\nenabled = true\\n') as path,
    kvreuse.connect(path) as k,
    kvreuse.open_provider("host").allocate(SOURCES * BLOCK) as region,
    region.map() as mapping,
    region.export() as source,
):
    with mapping.buffer as view:
        for i in range(SOURCES):
            view[i * BLOCK : (i + 1) * BLOCK] = bytes([i + 1]) * BLOCK
    draw, kept, open_fds = random.Random(5), 0, None
    for _ in range(TIMES):
        ours, theirs = socket.socketpair()
        with ours:
            worker = subprocess.Popen([sys.executable, "-c", WORKER, path], stdin=theirs)
            theirs.close()
            source.send(ours)
            ours.settimeout(60)
            assert ours.recv(1) == b"!"
            time.sleep(draw.random() * 0.02)
            worker.kill()
            assert worker.wait(20) == -signal.SIGKILL
        part = attach(k)
        found = part.stats()
        assert (found.writing_count, found.owned_count, found.claimed_count) == (0, 0, 0), found
        assert found.free_count + found.sealed_count == SLOTS and part.outcome.blocks == found.sealed_count, found
        assert part.verify().bad == ()
        keys = list(part.keys())
        kept += len(keys)
        with part.claim(keys) as claim:
            assert len(claim) == len(keys)
            for i, key in enumerate(keys):
                block = np.frombuffer(claim.view(i), np.uint8)
                assert (block == key[-1] + 1).all(), "a sealed block has other bytes than its key names"
                del block
        unfinished = part.stats().freed_total
        part.close()
        open_fds = open_fds or fds()
        assert fds() == open_fds
    with mapping.buffer as view:
        found = np.frombuffer(view, np.uint8).reshape(SOURCES, BLOCK)
        assert all((found[i] == i + 1).all() for i in range(SOURCES))
        del found
    assert kept > TIMES and unfinished > TIMES // 4, (kept, unfinished)
print("ok", kept, unfinished)
"""
)


def test_a_killed_worker_seals_no_copy_that_had_not_ended(run_python, backend_name):
    """O4, K1: what was in flight is free again, what is sealed is whole, the sources are as they were."""
    done = run_python(CODE, TIMES, WORKER, backend=backend_name, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ok ")
    print(done.stdout)
