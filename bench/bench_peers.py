"""1000 blocks of 64 KiB scattered over 1 GiB: the loop of memcpy, ours, and what others need, taking turns in one run.

    python bench/bench_peers.py

Peers are measured where they are installed: numpy's fancy indexing, and nixl (local DRAM by UCX, prepared beforehand).
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import kvreuse._core as core
from bench_copies import Ours, Scene, build_floor, floor_copy

NBYTES, ROUNDS = 65536, 15


def numpy_copy(scene: Scene):
    dst, src = (memory.reshape(-1, NBYTES) for memory in (scene.dst, scene.src))
    to, since = scene.to // NBYTES, scene.since // NBYTES

    def copy() -> int:
        begun = time.perf_counter_ns()
        dst[to] = src[since]
        return time.perf_counter_ns() - begun

    return copy


def nixl_copy(scene: Scene):
    """One prepared transfer; only starting it and its end count."""
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("kvreuse-bench", nixl_agent_config(backends=["UCX"]))
    whole = [(memory.ctypes.data, memory.nbytes, 0, "") for memory in (scene.src, scene.dst)]
    agent.register_memory(whole, "DRAM")
    places = [
        agent.get_xfer_descs([(memory.ctypes.data + int(place), NBYTES, 0) for place in offsets], "DRAM")
        for memory, offsets in ((scene.src, scene.since), (scene.dst, scene.to))
    ]
    transfer = agent.initialize_xfer("WRITE", *places, "kvreuse-bench", b"")

    def copy() -> int:
        begun = time.perf_counter_ns()
        state = agent.transfer(transfer)
        while state == "PROC":
            state = agent.check_xfer_state(transfer)
        took = time.perf_counter_ns() - begun
        assert state == "DONE", state
        return took

    return copy


def main() -> None:
    scene = Scene(NBYTES)
    queues = {threads: Ours(core, scene, threads) for threads in (1, 2)}
    with tempfile.TemporaryDirectory() as folder:
        floor = build_floor(Path(folder))
    ways = {
        "memcpy x 1": lambda: floor_copy(floor, scene, 1),
        "memcpy x 2": lambda: floor_copy(floor, scene, 2),
        "kvreuse x 1": queues[1].copy,
        "kvreuse x 2": queues[2].copy,
        "numpy": numpy_copy(scene),
    }
    if importlib.util.find_spec("nixl"):
        ways["nixl"] = nixl_copy(scene)
    times: dict[str, list[int]] = {name: [] for name in ways}
    order = np.random.default_rng(0)
    for _ in range(ROUNDS + 1):
        for name in order.permutation(list(ways)).tolist():
            times[name].append(ways[name]())
            scene.check()
    for queue in queues.values():
        queue.close()
    print(f"{scene.blocks} blocks of {NBYTES} B scattered over 1 GiB; GB/s, medians of {ROUNDS} rounds in one run")
    for name, found in times.items():
        print(f"  {name:12} {scene.total / statistics.median(found[1:]):5.1f}")


if __name__ == "__main__":
    main()
