"""CUDA handle calls: core, fallback, cuda.bindings (driver and _v2), the C floor, in one run over one fake driver.

The fake driver is in its lean setting: it makes no memory and no system call, so that what is left is the cost of the
callers. Run as a program, it prints the table.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "tests" / "cuda")]
import fakedriver  # noqa: E402
from rounds import CALLS, take_turns, timed  # noqa: E402

NAMES = ("create", "export", "import", "properties", "release")
NBYTES = 2 << 20


def build_floor(folder: Path, driver: Path):
    library = folder / "floor_cuda.so"
    source = Path(__file__).with_name("floor_cuda.c")
    command = ["cc", "-O2", "-w", "-shared", "-fPIC", str(source), str(driver / "libcuda.so.1"), "-o", str(library)]
    subprocess.run(command, check=True, timeout=60)
    function = ctypes.CDLL(str(library)).floor_cuda
    function.argtypes, function.restype = [ctypes.POINTER(ctypes.c_double)], ctypes.c_int

    def measure():
        out = (ctypes.c_double * len(NAMES))()
        assert function(out) == 0
        return dict(zip(NAMES, out, strict=True))

    return measure


def measure_ours(backend):
    times = {}
    zeros, ones = [0] * CALLS, [1] * CALLS
    times["create"], made = timed(backend.cuda_allocate, zeros, [NBYTES] * CALLS, ones, zeros)
    handles, ids = [info.handle for info in made], [info.region_id for info in made]
    times["export"], fds = timed(backend.region_export, handles)
    sizes, none = [NBYTES] * CALLS, [bytes(64)] * CALLS
    times["import"], other = timed(backend.cuda_import, zeros, ones, fds, none, sizes, sizes, ids)
    others = [info.handle for info in other]
    times["properties"], seen = timed(backend.cuda_observe, others)
    assert {one.handle_types for one in seen} == {1}
    times["release"], _ = timed(backend.region_close, others)
    for handle in handles:
        backend.region_close(handle)
    return times


def driver_calls():
    from cuda.bindings import driver as d

    kind = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    prop = d.CUmemAllocationProp()
    prop.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.requestedHandleTypes = kind
    prop.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = 0
    calls = (
        d.cuMemCreate,
        d.cuMemExportToShareableHandle,
        d.cuMemImportFromShareableHandle,
        d.cuMemGetAllocationPropertiesFromHandle,
        d.cuMemRelease,
    )

    def value(result):
        assert int(result[0]) == 0
        return result[1]

    return calls, prop, kind, value


def v2_calls():
    from cuda.bindings._v2 import driver as v

    prop = v.MemAllocationProp_v1()
    prop.type, prop.requested_handle_types = 1, 1
    location = prop.location
    location.type, location.id = 1, 0
    prop.location = location
    calls = (
        v.mem_create,
        v.mem_export_to_shareable_handle,
        v.mem_import_from_shareable_handle,
        v.mem_get_allocation_properties_from_handle,
        v.mem_release,
    )
    return calls, prop, 1, lambda result: result


def measure_peer(calls, prop, kind, value):
    create, export, import_, properties, release = calls
    times = {}
    zeros, kinds = [0] * CALLS, [kind] * CALLS
    times["create"], made = timed(create, [NBYTES] * CALLS, [prop] * CALLS, zeros)
    handles = [value(one) for one in made]
    times["export"], fds = timed(export, handles, kinds, zeros)
    times["import"], other = timed(import_, [value(one) for one in fds], kinds)
    others = [value(one) for one in other]
    times["properties"], seen = timed(properties, others)
    assert len(seen) == CALLS
    times["release"], _ = timed(release, others)
    for handle in handles:
        release(handle)
    return times


def measure():
    """Medians over ROUNDS of {who: {call: ns}}; the order changes from round to round."""
    fake = fakedriver.Fake(fakedriver.build())
    with tempfile.TemporaryDirectory() as folder, open(os.devnull) as file:
        # Any open fd: in the lean setting nobody uses it.
        fake.set(lean=1, lean_fd=file.fileno())
        sources = {}
        for name in ("core", "fallback"):
            if importlib.util.find_spec(f"kvreuse._{name}"):
                backend = importlib.import_module(f"kvreuse._{name}")
                backend.cuda_info(0)
                sources[name] = lambda backend=backend: measure_ours(backend)
        # The peers need a context that is current; ours find it so.
        library, context = fake.library, ctypes.c_void_p()
        library.cuDevicePrimaryCtxRetain.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int]
        assert library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert library.cuCtxSetCurrent(context) == 0
        sources["floor"] = build_floor(Path(folder), Path(fake.path).parent)
        if importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings"):
            for name, peer in (("driver", driver_calls()), ("_v2", v2_calls())):
                sources[name] = lambda peer=peer: measure_peer(*peer)
        rounds = take_turns(sources)
        library.cuCtxSetCurrent(None)
        counters = fake.counters()
        fake.reset()
    assert counters["violations"] == 0, fake.violation()
    found = {
        name: {call: statistics.median(one[call] for one in each) for call in NAMES} for name, each in rounds.items()
    }
    for each in found.values():
        each["sum"] = sum(each.values())
    return found


@pytest.fixture(scope="module")
def table():
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    if not fakedriver.cuda_headers():
        pytest.skip("no cuda.h: install nvidia-cuda-runtime")
    return measure()


def test_every_call_is_measured(table):
    for each in table.values():
        assert set(each) == {*NAMES, "sum"}


@pytest.mark.gate
def test_core_against_cuda_bindings(table):
    """At most half of the driver module's sum, 1.2 times _v2's, and 1.5 times it on any one call."""
    core = table["core"]
    assert core["sum"] <= 0.5 * table["driver"]["sum"]
    assert core["sum"] <= 1.2 * table["_v2"]["sum"]
    for name in NAMES:
        assert core[name] <= 1.5 * table["_v2"][name], name


if __name__ == "__main__":
    found = measure()
    print(f"{'ns a call':<12}" + "".join(f"{who:>10}" for who in found))
    for name in (*NAMES, "sum"):
        print(f"{name:<12}" + "".join(f"{each[name]:>10.0f}" for each in found.values()))
