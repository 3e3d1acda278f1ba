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
