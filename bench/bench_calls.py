"""Calls of the handle API: core, fallback, a hand-written checked ctypes call, the same system calls in C, in one run.

Run as a program, it prints the table.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

CALLS, ROUNDS = 400, 15
NAMES = ("allocate", "export", "import", "map", "observe", "unmap", "close", "echo")
EXTRA_NS = 100  # a core call may cost so much more than its system calls


def build_floor(folder: Path):
    """Compile the floor; return a function that gives ns a call by name."""
    library = folder / "floor_calls.so"
    source = Path(__file__).with_name("floor_calls.c")
    subprocess.run(["cc", "-O2", "-w", "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=60)
    function = ctypes.CDLL(str(library)).floor_calls
    function.argtypes, function.restype = [ctypes.POINTER(ctypes.c_double)], None

    def measure() -> dict[str, float]:
        out = (ctypes.c_double * len(NAMES))()
        function(out)
        return dict(zip(NAMES, out, strict=True))

    return measure


def timed(function, arguments) -> tuple[float, list]:
    """ns a call over a list of argument tuples, and the results."""
    begun = time.perf_counter_ns()
    results = [function(*each) for each in arguments]
    return (time.perf_counter_ns() - begun) / len(arguments), results


def measure_backend(backend) -> dict[str, float]:
    times: dict[str, float] = {}
    times["allocate"], made = timed(backend.host_allocate, [(4096, 1, "kvreuse-bench", None)] * CALLS)
    times["export"], fds = timed(backend.region_export, [(info.handle,) for info in made])
    times["import"], imported = timed(
        backend.region_import,
        [(fd, 4096, 4096, info.region_id, info.device, info.inode, 0) for fd, info in zip(fds, made, strict=True)],
    )
    handles = [(info.handle,) for info in imported]
    times["map"], mapped = timed(backend.region_map, [(info.handle, 3, 0) for info in imported])
    times["observe"], seen = timed(backend.region_observe, handles)
    assert [one.inode for one in seen] == [info.inode for info in made]
    times["unmap"], _ = timed(backend.mapping_unmap, [(info.handle,) for info in mapped])
    times["close"], _ = timed(backend.region_close, handles)
    times["echo"], echoed = timed(backend.echo, [(i,) for i in range(CALLS)])
    assert echoed == list(range(CALLS))
    for fd in fds:
        os.close(fd)
    for info in made:
        backend.region_close(info.handle)
    return times


def measure_ctypes() -> dict[str, float]:
    """What a careful person writes by hand: complete argtypes, the one integer rule, a status check."""
    from kvreuse import _status

    libc = ctypes.CDLL(None, use_errno=True)
    dup = libc["fcntl"]
    dup.argtypes, dup.restype = [ctypes.c_int, ctypes.c_int, ctypes.c_long], ctypes.c_int

    def export(fd):
        number = dup(_status.as_integer(fd, "fd", 0, 2**31 - 1), 1030, 0)
        if number < 0:
            raise _status.from_errno("fcntl", ctypes.get_errno())
        return number

    memory = os.memfd_create("kvreuse-bench")
    cost, fds = timed(export, [(memory,)] * CALLS)
    for fd in (*fds, memory):
        os.close(fd)
    return {"export": cost}


def measure() -> dict[str, dict[str, float]]:
    """Medians over ROUNDS, all of them in turn within each round: {who: {call: ns}}."""
    with tempfile.TemporaryDirectory() as folder:
        sources = {"floor": build_floor(Path(folder)), "ctypes": measure_ctypes}
        for name in ("core", "fallback"):
            if importlib.util.find_spec(f"kvreuse._{name}"):
                backend = importlib.import_module(f"kvreuse._{name}")
                sources[name] = lambda backend=backend: measure_backend(backend)
        rounds = {name: [] for name in sources}
        for _ in range(ROUNDS):
            for name, source in sources.items():
                rounds[name].append(source())
    return {
        name: {call: statistics.median(one[call] for one in found) for call in found[0]}
        for name, found in rounds.items()
    }


@pytest.fixture(scope="module")
def table():
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    return measure()


@pytest.mark.gate
@pytest.mark.parametrize("call", NAMES)
def test_core_is_near_its_system_calls(table, call):
    """A call costs at most EXTRA_NS more than its system calls in C."""
    found, floor = table["core"][call], table["floor"][call]
    assert found <= floor + EXTRA_NS, f"{call}: core {found:.0f} ns, floor {floor:.0f} ns"


@pytest.mark.gate
def test_fallback_is_near_a_checked_ctypes_call(table):
    found, peer = table["fallback"]["export"], table["ctypes"]["export"]
    assert found <= 1.3 * peer, f"export: fallback {found:.0f} ns, ctypes {peer:.0f} ns"


def test_every_call_is_measured(table):
    assert set(table["core"]) == set(table["floor"]) == set(NAMES)


if __name__ == "__main__":
    found = measure()
    print(f"{'ns a call':<10}" + "".join(f"{who:>10}" for who in found) + f"{'core-floor':>12}")
    for name in NAMES:
        row = "".join(f"{found[who].get(name, float('nan')):>10.0f}" for who in found)
        print(f"{name:<10}{row}{found['core'][name] - found['floor'][name]:>12.0f}")
