"""Copies of scattered blocks: a queue of ours, and the same batch as a loop of memcpy in C, taking turns in one run.

Run as a program, it prints the tables.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

SPACE, BLOCKS = 1 << 30, 1000
SIZES = (4096, 65536, 1 << 20)
ROUNDS = 21
NONE = np.empty(0, np.int64)


def build_floor(folder: Path) -> ctypes.CDLL:
    library = Path(folder) / "floor_copies.so"
    source = Path(__file__).with_name("floor_copies.c")
    command = ["cc", "-O2", "-Wall", "-shared", "-fPIC", "-pthread", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=60)
    loaded = ctypes.CDLL(str(library))
    pointer = ctypes.POINTER(ctypes.c_int64)
    loaded.floor_copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[pointer] * 3, ctypes.c_int64, ctypes.c_int32]
    loaded.floor_copy.restype = ctypes.c_int64
    loaded.floor_hand_over.argtypes, loaded.floor_hand_over.restype = [ctypes.c_int64, pointer], None
    return loaded


def as_pointer(array):
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))


class Scene:
    """Two prefaulted memories of `space` bytes, and BLOCKS places in each, drawn without repeats."""

    def __init__(self, nbytes: int, space: int = SPACE, blocks: int = BLOCKS, seed: int = 1) -> None:
        draw = np.random.default_rng(seed)
        self.nbytes, self.blocks = nbytes, blocks
        self.src = np.full(space, 1, np.uint8)
        self.src[::4096] = draw.integers(0, 256, len(self.src[::4096]), np.uint8)
        self.dst = np.full(space, 2, np.uint8)
        places = space // nbytes
        self.to = draw.permutation(places)[:blocks].astype(np.int64) * nbytes
        self.since = draw.permutation(places)[:blocks].astype(np.int64) * nbytes
        self.lengths = np.full(blocks, nbytes, np.int64)
        self.total = blocks * nbytes

    def check(self) -> None:
        for to, since in zip(self.to[::37], self.since[::37], strict=True):
            assert (self.dst[to : to + self.nbytes] == self.src[since : since + self.nbytes]).all()
        for to in self.to:
            self.dst[to] = 255 - self.dst[to]  # the next one has to write it anew


def words(memory, writable):
    return np.array([0, memory.ctypes.data, memory.nbytes, -1, writable], np.int64)


class Ours:
    """A backend's queue over a scene."""

    def __init__(self, backend, scene: Scene, threads: int = 1) -> None:
        self.backend, self.scene = backend, scene
        self.queue = backend.queue_open(threads, 0)
        self.memories = words(scene.dst, 1), words(scene.src, 0)

    def copy(self) -> int:
        """ns from submit to the end."""
        scene, backend = self.scene, self.backend
        begun = time.perf_counter_ns()
        operation = backend.copy_submit(self.queue, *self.memories, scene.to, scene.since, scene.lengths, NONE)
        assert backend.operation_wait(operation, 60 * 10**9)
        took = time.perf_counter_ns() - begun
        assert backend.operation_info(operation).state == 2
        backend.operation_release(operation)
        return took

    def close(self) -> None:
        self.backend.queue_close(self.queue, 10**10)


def floor_copy(floor, scene: Scene, threads: int) -> int:
    return floor.floor_copy(
        scene.dst.ctypes.data,
        scene.src.ctypes.data,
        as_pointer(scene.to),
        as_pointer(scene.since),
        as_pointer(scene.lengths),
        scene.blocks,
        threads,
    )


def ratios(floor, backend, scene: Scene, threads: int, rounds: int = ROUNDS) -> tuple[float, float, float]:
    """(floor GB/s, our GB/s, ours over the floor), the last as the median of rounds that take turns."""
    ours = Ours(backend, scene, threads)
    floors, times = [], []
    try:
        for i in range(rounds + 1):
            order = [lambda: floors.append(floor_copy(floor, scene, threads)), lambda: times.append(ours.copy())]
            for call in order if i % 2 else order[::-1]:
                call()
                scene.check()
    finally:
        ours.close()
    floors, times = floors[1:], times[1:]  # the first one finds cold memory
    found = statistics.median(a / b for a, b in zip(floors, times, strict=True))
    return scene.total / statistics.median(floors), scene.total / statistics.median(times), found


def per_entry_ns(backend, count: int = 1000, rounds: int = 61) -> float:
    """What an entry costs beside its bytes: batches of `count` entries of one byte, less one of one entry."""
    memory = np.zeros(1 << 20, np.uint8)
    scene = Scene(512, 1 << 20, count)
    scene.lengths[:] = 1
    queue = backend.queue_open(1, 0)
    first = scene.to[:1].copy(), scene.since[:1].copy(), scene.lengths[:1].copy()
    many, one = [], []
    del memory
    for _ in range(rounds):
        for arrays, times in (((scene.to, scene.since, scene.lengths), many), (first, one)):
            begun = time.perf_counter_ns()
            operation = backend.copy_submit(queue, words(scene.dst, 1), words(scene.src, 0), *arrays, NONE)
            backend.operation_wait(operation, 10**9)
            times.append(time.perf_counter_ns() - begun)
            backend.operation_release(operation)
    backend.queue_close(queue, 10**9)
    return (statistics.median(many) - statistics.median(one)) / (count - 1)


def one_block_ns(backend, nbytes: int, rounds: int = 201) -> float:
    """One block, submit to done, after a pause in which threads fall asleep."""
    scene = Scene(nbytes, 1 << 24, 1)
    ours = Ours(backend, scene)
    times = []
    for _ in range(rounds):
        time.sleep(0.0002)
        times.append(ours.copy())
    ours.close()
    return statistics.median(times)


def hand_over_ns(floor, rounds: int = 201) -> float:
    out = np.zeros(rounds, np.int64)
    floor.floor_hand_over(rounds, as_pointer(out))
    return float(np.median(out))


def python_speed(backend, seconds: float = 0.4, rounds: int = 5) -> float:
    """How much of its speed a thread of Python keeps while one thread copies."""
    scene = Scene(1 << 20, 1 << 28, 200)
    ours = Ours(backend, scene)
    kept = []
    for _ in range(rounds):
        speeds = []
        for is_copying in (False, True):
            stop = threading.Event()

            def copy(stop=stop):
                while not stop.is_set():
                    ours.copy()

            thread = threading.Thread(target=copy)
            if is_copying:
                thread.start()
            count, until = 0, time.perf_counter() + seconds
            while time.perf_counter() < until:
                count += 1
            stop.set()
            if is_copying:
                thread.join()
            speeds.append(count)
        kept.append(speeds[1] / speeds[0])
    ours.close()
    return statistics.median(kept)


# ---- tests ----


@pytest.fixture(scope="module")
def floor(tmp_path_factory):
    return build_floor(tmp_path_factory.mktemp("floor"))


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.benchmark(group="copy of 1000 blocks")
def test_scattered_blocks(benchmark, backend, nbytes):
    scene = Scene(nbytes, 1 << 27 if nbytes < 1 << 20 else 1 << 28, 100)
    ours = Ours(backend, scene)
    ours.copy()
    scene.check()
    benchmark(ours.copy)
    ours.close()


@pytest.mark.gate
@pytest.mark.parametrize("nbytes", SIZES)
def test_gate_one_thread_is_as_fast_as_memcpy(floor, nbytes):
    core = pytest.importorskip("kvreuse._core")
    assert ratios(floor, core, Scene(nbytes), 1)[2] >= 0.95


@pytest.mark.gate
@pytest.mark.parametrize("nbytes", SIZES)
def test_gate_two_threads(floor, nbytes):
    core = pytest.importorskip("kvreuse._core")
    assert ratios(floor, core, Scene(nbytes), 2)[2] >= 0.9


@pytest.mark.gate
def test_gate_entries_and_hand_over(floor):
    core = pytest.importorskip("kvreuse._core")
    assert per_entry_ns(core) < 20
    assert one_block_ns(core, 65536) < 2 * hand_over_ns(floor)
    assert one_block_ns(core, 1 << 20) < 2 * hand_over_ns(floor) + 2 * (1 << 20) / 8


@pytest.mark.gate
def test_gate_python_goes_on():
    assert python_speed(pytest.importorskip("kvreuse._core")) >= 0.8


def main() -> None:
    names = [name for name in ("core", "fallback") if importlib.util.find_spec(f"kvreuse._{name}")]
    backends = {name: importlib.import_module(f"kvreuse._{name}") for name in names}
    with tempfile.TemporaryDirectory() as folder:
        floor = build_floor(Path(folder))
        print(f"{BLOCKS} blocks scattered over 1 GiB, prefaulted; GB/s, medians of {ROUNDS} rounds that take turns")
        for nbytes in SIZES:
            scene = Scene(nbytes)
            for threads in (1, 2):
                for name, backend in backends.items():
                    least, ours, ratio = ratios(floor, backend, scene, threads)
                    print(
                        f"  {nbytes:>8} B x {threads}: memcpy {least:5.1f}, {name} {ours:5.1f}"
                        f" ({ratio:.2f} of memcpy, median of the rounds' ratios)"
                    )
            del scene
        for name, backend in backends.items():
            print(f"{name}: an entry costs {per_entry_ns(backend):.1f} ns beside its bytes (1000 entries)")
            for nbytes in (4096, 65536, 1 << 20):
                print(f"{name}: one block of {nbytes} B, submit to done: {one_block_ns(backend, nbytes) / 1000:.1f} us")
            print(
                f"{name}: a thread of Python keeps {python_speed(backend):.0%} of its speed beside one copying thread"
            )
        print(f"a hand-over to a sleeping thread and back, in C: {hand_over_ns(floor) / 1000:.1f} us")


if __name__ == "__main__":
    main()
