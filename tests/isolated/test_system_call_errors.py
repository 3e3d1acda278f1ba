"""An error at every system call of allocate, export, import, map, observe, unmap and close, on both backends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CODE = Path(__file__).with_name("system_call_faults.py").read_text()

# Calls that have to be among those that were failed: a shim that sees nothing would let every test pass.
SEEN = {
    "Allocate": {"memfd_create", "ftruncate", "fcntl", "fstat", "getrandom"},
    "AllocateFile": {"open", "ftruncate", "posix_fallocate", "fstat", "fcntl", "getrandom"},
    "AllocateNamed": {"getrandom", "open", "unlink", "ftruncate", "posix_fallocate"},
    "Export": {"fcntl"},
    "Import": {"fstat", "fcntl"},
    "Map": {"fstat", "mmap"},
    "MapDontFork": {"fstat", "mmap", "madvise"},
    "Observe": {"fstat", "fcntl"},
    "Unmap": {"munmap"},
    "Close": {"close"},
}


@pytest.fixture
def run_faults(fault_shim, run_python, backend_name):
    def run(operation, code=CODE):
        return run_python(code, backend_name, operation, env={"LD_PRELOAD": str(fault_shim)})

    return run


@pytest.mark.parametrize("operation", list(SEEN))
def test_each_system_call_that_fails_is_told_and_leaks_nothing(run_faults, operation):
    """H6, H8: the exception of the errno names the call; nothing is left behind; the next call works."""
    done = run_faults(operation)
    assert done.returncode == 0, f"{done.stdout[-500:]}\n{done.stderr}"
    assert done.stderr == ""
    faults = [json.loads(line) for line in done.stdout.splitlines()]
    assert {name for name, *_ in faults} >= SEEN[operation]
    for name, _, _, error, why in faults:
        assert (error == "NoneType") == bool(why), f"{name} was ignored: {why or 'for no reason that is written'}"


@pytest.mark.parametrize(
    ("good", "bad", "complaint"),
    [
        ("                made = case.run()\n", "                made = case.run(), os.dup(2)\n", "nobody said so"),
        ("                error = caught\n", "                error = caught; os.dup(2)\n", "AssertionError: ('fstat'"),
        ("                error = caught\n", "                error = caught; error.call = 'open'\n", "'call': 'open'"),
        ("                error = caught\n", "                error = caught; error.native_code += 1\n", "native_code"),
        (
            "            finally:\n",
            "                module.host_allocate(1, 1, 'kvreuse-leak', None)\n            finally:\n",
            "regions=2",
        ),
    ],
)
def test_the_check_can_fail(run_faults, good, bad, complaint):
    """Planted: an fd and a region left behind by an error, and errors that name another call or errno."""
    assert CODE.count(good) == 1
    operation = "Close" if complaint == "nobody said so" else "Import"
    code = CODE.replace(good, bad)
    if operation == "Close":
        code = code.replace('    if name == "close":\n        return IGNORED[("close", None, "both")]\n', "")
    done = run_faults(operation, code)
    assert done.returncode != 0
    assert complaint in done.stderr


def test_a_long_munmap_stops_nobody_else(run_python, fault_shim, backends_present):
    """K7: giving back much memory takes long; others use the library meanwhile, and the mapping is gone for them.

    The core only: Python's own mmap.close() of the fallback keeps the GIL.
    """
    if "core" not in backends_present:
        pytest.skip("no extension in this build")
    code = """
import ctypes, os, threading
import kvreuse._core as backend
from kvreuse import errors
shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
region = backend.host_allocate(4096, 1, "n", None).handle
mapping, other = (backend.region_map(region, 3, 0).handle for _ in range(2))
shim.hold_munmap(1)
thread = threading.Thread(target=backend.mapping_unmap, args=(mapping,))
thread.start()
while not shim.munmap_is_held():
    os.sched_yield()
assert backend.region_info(region).mapping_count == 2
assert backend.mapping_info(other).nbytes == 4096
try:
    backend.mapping_info(mapping)
except errors.StaleHandleError:
    pass
else:
    raise AssertionError("it can be used while it goes")
try:
    backend.region_close(region)
except errors.BusyError:
    pass
shim.hold_munmap(0)
thread.join(20)
backend.mapping_unmap(other)
backend.region_close(region)
assert backend.handle_counts() == (0, 0, 0, 0, 0)
print("ok")
"""
    done = run_python(code, env={"LD_PRELOAD": str(fault_shim)})
    assert done.stdout == "ok\n", done.stderr
