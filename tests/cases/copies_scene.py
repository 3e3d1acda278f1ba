"""What the cases of copies share: a script on the public layer over one backend, with or without a keeper."""

from __future__ import annotations

import textwrap

import pytest

HEAD = """
import ctypes, errno, gc, os, select, sys, threading, time, warnings, weakref
import numpy as np
import kvreuse, kvreuse.testing
from kvreuse import errors
from kvreuse._select import backend
from kvreuse.testing import FaultyQueue
warnings.simplefilter("error")
S = kvreuse.OperationState
def refused(kind, call, *arguments, **options):
    try:
        call(*arguments, **options)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} expected")
def steps(count, nbytes):
    return np.arange(count, dtype=np.int64) * nbytes, np.full(count, nbytes, np.int64)
host = kvreuse.open_provider("host")
def counts():
    gc.collect()
    found = backend.copy_counts()
    return found.queues, found.operations, found.in_flight, found.quarantined, found.fds
"""
KEEPER = """
PROFILE = "[reuse]\\nenabled = true\\n"
BLOCK = 8192
manifest = kvreuse.Manifest(model="m", weights_id="w", dtype="bfloat16", block_tokens=16, block_bytes=BLOCK, layers=2,
    kv_heads=1, head_dim=1, layout="x", hash_scheme="sglang-sha256", hash_root="r",
    segments=(("layers.0", 4096), ("layers.1", 4096)))
KEYS = [bytes([i]) * 32 for i in range(1, 9)]
def attach(keeper, blocks=8):
    return keeper.attach(manifest, kvreuse.Rank(), blocks=blocks)
class Engine:
    # Two layers, 64 bytes after an address that is a multiple of 4096, as a real engine's are.
    def __init__(self, blocks, seed=0):
        self.blocks = blocks
        self.layers = []
        for layer in range(2):
            memory = np.zeros(blocks * 4096 + 4096 + 64, np.uint8)
            start = -memory.ctypes.data % 4096 + 64
            self.layers.append(memory[start : start + blocks * 4096].reshape(blocks, 4096))
            if seed:
                self.layers[-1][:] = np.random.default_rng(seed + layer).integers(0, 256, (blocks, 4096), np.uint8)
        self.view = kvreuse.EngineBlocks({f"layers.{i}": (self.layers[i], 0, 4096) for i in range(2)})
    def block(self, i):
        return self.layers[0][i].tobytes() + self.layers[1][i].tobytes()
def content(part, keys):
    with part.claim(keys) as claim:
        return [bytes(claim.view(i)) for i in range(len(claim))]
def owners(part):
    found = part.stats()
    return found.claimed_count, found.owned_count
"""


@pytest.fixture
def play(run_python, backend_name):
    """Run a script: it ends well, and prints nothing else. With ``keeper=True`` it has `path` and `keeper`."""

    def run(code, keeper=False, profile="PROFILE", timeout=60.0):
        code = textwrap.dedent(code)
        if keeper:
            body = textwrap.indent(code, "    ")
            code = KEEPER + f"with kvreuse.testing.keeper({profile}) as path, kvreuse.connect(path) as keeper:\n{body}"
        code = f"{HEAD}{code}\nassert counts() == (0, 0, 0, 0, 0), counts()\nprint('ok')\n"
        done = run_python(code, backend=backend_name, timeout=timeout)
        assert (done.stdout, done.stderr) == ("ok\n", ""), done.stdout + done.stderr

    return run
