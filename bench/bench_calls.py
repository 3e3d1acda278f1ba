"""Calls of the handle API: core, fallback, a hand-written checked ctypes call, the same system calls in C, in one run.

Run as a program, it prints the table.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import peer_ctypes
from rounds import CALLS, take_turns, timed

NAMES = ("allocate", "export", "import", "map", "observe", "unmap", "close", "echo")
EXTRA_NS = 100  # a core call may cost so much more than its system calls


def build_floor(folder: Path):
    """Compile the floor and import it."""
    library = folder / f"floor_calls{sysconfig.get_config_var('EXT_SUFFIX')}"
    source = Path(__file__).with_name("floor_calls.c")
    include = f"-I{sysconfig.get_path('include')}"
    command = ["cc", "-O2", "-w", "-shared", "-fPIC", include, str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=60)
    spec = importlib.util.spec_from_file_location("floor_calls", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure_floor(floor) -> dict[str, float]:
    """Times of the same system calls, each called from Python with the arguments that the API's function takes."""
    times: dict[str, float] = {}
    ones, zeros, sizes = [1] * CALLS, [0] * CALLS, [4096] * CALLS
    times["allocate"], made = timed(
        floor.host_allocate, sizes, ones, itertools.repeat("kvreuse-bench"), itertools.repeat(None)
    )
    times["export"], fds = timed(floor.region_export, made)
    times["import"], imported = timed(floor.region_import, fds, sizes, sizes, sizes, sizes, sizes, zeros)
    times["map"], mapped = timed(floor.region_map, imported, ones, zeros)
    times["observe"], _ = timed(floor.region_observe, imported)
    times["unmap"], _ = timed(floor.mapping_unmap, mapped)
    times["close"], _ = timed(floor.region_close, imported)
    times["echo"], _ = timed(floor.echo, range(CALLS))
    for fd in (*fds, *made):
        os.close(fd)
    return times


def measure_calls(calls) -> dict[str, float]:
    """Times of one set of functions with the backends' signatures (a module or a namespace)."""
    times: dict[str, float] = {}
    repeat = itertools.repeat
    sizes, zeros, ids = [4096] * CALLS, [0] * CALLS, range(CALLS)
    times["allocate"], made = timed(calls.host_allocate, sizes, [1] * CALLS, repeat("kvreuse-bench"), repeat(None))
    owners = [info.handle for info in made]
    identity = ([i.region_id for i in made], [i.device for i in made], [i.inode for i in made])
    times["export"], fds = timed(calls.region_export, owners)
    times["import"], imported = timed(calls.region_import, fds, sizes, sizes, *identity, zeros)
    handles = [info.handle for info in imported]
    times["map"], mapped = timed(calls.region_map, handles, [3] * CALLS, zeros)
    times["observe"], seen = timed(calls.region_observe, handles)
    assert [one.inode for one in seen] == identity[2]
    mappings = [info.handle for info in mapped]
    times["unmap"], _ = timed(calls.mapping_unmap, mappings)
    times["close"], _ = timed(calls.region_close, handles)
    times["echo"], echoed = timed(calls.echo, ids)
    assert echoed == list(ids)
    for fd in fds:
        os.close(fd)
    for handle in owners:
        calls.region_close(handle)
    return times


def measure() -> dict[str, dict[str, float]]:
    """Medians over ROUNDS, all of them in turn within each round: {who: {call: ns}}."""
    with tempfile.TemporaryDirectory() as folder:
        floor = build_floor(Path(folder))
        sources = {
            "loop": lambda: dict(zip(NAMES, floor.loop(), strict=True)),
            "floor": lambda: measure_floor(floor),
            "ctypes": lambda: measure_calls(peer_ctypes),
        }
        for name in ("core", "fallback"):
            if importlib.util.find_spec(f"kvreuse._{name}"):
                backend = importlib.import_module(f"kvreuse._{name}")
                sources[name] = lambda backend=backend: measure_calls(backend)
        rounds = take_turns(sources)
    found = {
        name: {call: statistics.median(one[call] for one in each) for call in NAMES} for name, each in rounds.items()
    }
    # Of one round each, since what else this machine does changes both.
    for name, over, wanted in (("core-floor", "core", "floor"), ("core-loop", "core", "loop")):
        if over in rounds:
            pairs = list(zip(rounds[over], rounds[wanted], strict=True))
            found[name] = {call: statistics.median(one[call] - other[call] for one, other in pairs) for call in NAMES}
    pairs = list(zip(rounds["fallback"], rounds["ctypes"], strict=True))
    found["fallback/ctypes"] = {
        call: statistics.median(one[call] / other[call] for one, other in pairs) for call in NAMES
    }
    return found


@pytest.fixture(scope="module")
def table():
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    return measure()


@pytest.mark.gate
@pytest.mark.parametrize("call", NAMES)
def test_core_is_near_its_system_calls(table, call):
    """A call costs at most EXTRA_NS more than its system calls in C, called from Python."""
    assert table["core-floor"][call] <= EXTRA_NS


@pytest.mark.gate
@pytest.mark.parametrize("call", NAMES)
def test_fallback_is_near_a_checked_ctypes_call(table, call):
    assert table["fallback/ctypes"][call] <= 1.3


def test_every_call_is_measured(table):
    assert set(table["core"]) == set(table["floor"]) == set(NAMES)


if __name__ == "__main__":
    found = measure()
    print(f"{'ns a call':<10}" + "".join(f"{who:>16}" for who in found))
    for name in NAMES:
        figures = (f"{each[name]:>16.{2 if '/' in who else 0}f}" for who, each in found.items())
        print(f"{name:<10}" + "".join(figures))
