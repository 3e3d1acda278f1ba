"""Provider cuda:N over the fake driver: classes, processes that exchange memory, missing calls, threads, views."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time

import pytest

PROFILE = 'profile = kvreuse.Profile.from_dict({"reuse": {"enabled": True}, "handles": {"fabric": "allocate"}})\n'
FABRIC = {"fabric_attribute": 1, "fabric_create_result": 0}

_IMPORTER = """
import ctypes, os, socket, sys, time
import kvreuse
out = sys.argv[1]
sock = socket.socket(fileno=0)
p = kvreuse.open_provider("cuda:0")
shared = kvreuse.SharedHandle.recv(sock, 20)
record = shared.to_bytes()
region = p.import_region(shared)
kind = shared.kind
shared.close()
mapping = region.map()
assert ctypes.string_at(mapping.address, 6) == b"from A", ctypes.string_at(mapping.address, 6)
ctypes.memmove(mapping.address + region.nbytes - 6, b"from B", 6)
seen = region.observe()
assert (seen.observed_nbytes, seen.handle_types & int(kind)) == (region.physical_nbytes, int(kind))
sock.sendall(b"seen")
assert sock.recv(1) in (b"", b"x")  # the exporter is gone
said = [kvreuse.backend, ctypes.string_at(mapping.address, 6).decode()]
if kind is kvreuse.HandleKind.FABRIC:
    # Its process may still be there as a zombie for a moment.
    for _ in range(200):
        try:
            p.import_region(kvreuse.SharedHandle.from_bytes(record)).close()
        except kvreuse.DriverError as error:
            said.append(str(error))
            break
        time.sleep(0.05)
mapping.close()
region.close()
sock.close()
with open(out + ".part", "w") as file:
    file.write("|".join(said))
os.rename(out + ".part", out)
"""

_EXPORTER = (
    PROFILE
    + """
import socket, subprocess, time
kind, importer, other, out = sys.argv[1:]
p = kvreuse.open_provider("cuda:0", profile)
region = p.allocate(6912, kind=kvreuse.HandleKind[kind])
mapping = region.map()
ctypes.memmove(mapping.address, b"from A", 6)
ours, theirs = socket.socketpair()
env = {**os.environ, "KVREUSE_BACKEND": other}
child = subprocess.Popen([sys.executable, "-W", "error", "-c", importer, out], stdin=theirs.fileno(), env=env)
theirs.close()
shared = region.export()
shared.send(ours)
assert ours.recv(4) == b"seen"
assert ctypes.string_at(mapping.address + 6906, 6) == b"from B"
print(kvreuse.backend, flush=True)
time.sleep(60)
"""
)


@pytest.mark.parametrize("kind", ["POSIX_FD", "FABRIC"])
@pytest.mark.parametrize("pair", list(itertools.permutations(["core", "fallback"])), ids="-".join)
def test_two_backends_exchange_memory_and_the_exporter_is_killed(
    kind, pair, driver_dir, backends_present, run_cuda, tmp_path
):
    """H3, H6: both see the other's bytes; after SIGKILL an importer reads on; a later fabric import is refused."""
    if set(pair) - set(backends_present):
        pytest.skip("no extension in this build")
    import os

    out = tmp_path / "said"
    head = run_cuda("print('head')", settings=FABRIC)
    assert head.stdout == "head\n", head.stderr
    code = head.args[head.args.index("-c") + 1].removesuffix("print('head')") + _EXPORTER
    environ = {**os.environ, "LD_LIBRARY_PATH": str(driver_dir), "KVREUSE_BACKEND": pair[0]}
    environ["FAKE_CUDA"] = ",".join(f"{key}={value}" for key, value in FABRIC.items())
    command = [sys.executable, "-c", code, kind, _IMPORTER, pair[1], str(out)]
    exporter = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert exporter.stdout.readline() == f"{pair[0]}\n"
        exporter.send_signal(signal.SIGKILL)
        exporter.wait(20)
    finally:
        exporter.kill()
        exporter.wait(20)
        exporter.stdout.close()
    deadline = time.monotonic() + 30
    while not out.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    said = out.read_text().split("|")
    assert said[:2] == [pair[1], "from A"]
    if kind == "FABRIC":
        assert said[2] == (
            "cuMemImportFromShareableHandle failed: CUDA_ERROR_INVALID_HANDLE (CUresult 400): invalid resource handle"
        )
    else:
        assert len(said) == 2


def test_a_fabric_export_keeps_the_region(backend_name, run_cuda):
    """H6: a fabric handle pins nothing, so its region cannot be closed before the shared handle is."""
    code = PROFILE + (
        "region = kvreuse.open_provider('cuda:0', profile).allocate(1, kind=kvreuse.HandleKind.FABRIC)\n"
        "shared, second = region.export(), region.export()\n"
        "assert len(shared.payload) == 64 and shared.to_bytes() == second.to_bytes()\n"
        "assert shared.to_bytes()[-4 - 64 : -4] == shared.payload\n"
        "try: shared.fileno()\n"
        "except errors.InvalidHandleError: pass\n"
        "for each, left in ((shared, 2), (second, 1)):\n"
        "    try: region.close()\n"
        "    except errors.BusyError as error: assert f'still has {left} fabric' in str(error), error\n"
        "    else: raise AssertionError('closed')\n"
        "    each.close(); each.close()\n"
        "region.close()\n"
        "assert fake.live() == {} and not fake.counters()['violations']\n"
        "print('ok')\n"
    )
    done = run_cuda(code, settings=FABRIC, backend=backend_name)
    assert done.stdout == "ok\n", done.stderr


def test_records_have_no_uninitialised_bytes(backend_name, run_cuda):
    """What is not used of a record is zero, whatever lay in memory before."""
    code = (
        "p = kvreuse.open_provider('cuda:0')\n"
        "region = p.allocate(5)\n"
        "junk = [bytes([0xA5]) * 148 for _ in range(1000)]; del junk\n"
        "with region.export() as a, region.export() as b:\n"
        "    assert a.to_bytes() == b.to_bytes() and a.fileno() != b.fileno()\n"
        "    assert a.to_bytes()[-4 - 64 - 16 : -4] == bytes(80)  # st_dev, st_ino, payload: none\n"
        "region.close()\n"
        "print('ok')\n"
    )
    done = run_cuda(code, backend=backend_name)
    assert done.stdout == "ok\n", done.stderr


def test_capabilities_by_trial(backend_name, run_cuda):
    """Each kind is created, exported, and imported by a second process."""
    code = PROFILE + (
        "found = kvreuse.open_provider('cuda:0', profile).capabilities()\n"
        "print({kind.name: found[kind].ok for kind in found})\n"
        "print(found[kvreuse.HandleKind.FABRIC].reason)\n"
        "print(kvreuse.open_provider('cuda:0').capabilities()[kvreuse.HandleKind.FABRIC])\n"
        "assert fake.live() == {}\n"
    )
    done = run_cuda(code, settings=FABRIC, backend=backend_name)
    lines = done.stdout.splitlines()
    assert lines[0] == "{'NONE': True, 'POSIX_FD': True, 'FABRIC': True}", done.stderr
    assert lines[1] == "allocated, exported, and imported and mapped by a second process"
    assert lines[2].startswith("Capability(ok=False, reason='not tried: the profile")


def test_capabilities_when_the_second_process_cannot_import(backend_name, run_cuda):
    code = PROFILE + (
        "os.environ['FAKE_CUDA'] = 'fabric_attribute=1,fabric_create_result=0,import_fabric_result=801'\n"
        "found = kvreuse.open_provider('cuda:0', profile).capabilities()\n"
        "print(found[kvreuse.HandleKind.FABRIC])\n"
    )
    done = run_cuda(code, settings=FABRIC, backend=backend_name)
    assert "ok=False, reason='a second process could not import it: cuMemImportFromShareableHandle" in done.stdout
    assert "(CUresult 801)" in done.stdout


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("cuMemcpyBatchAsync", "batch_copy"),
        ("cuStreamQuery", "stream_query"),
        ("cuMemGetHandleForAddressRange", "address_range_handle"),
    ],
)
def test_a_missing_optional_call_only_disables_its_feature(name, feature, backend_name, run_cuda):
    """dlsym finds it still: a driver that has the symbol has the call. Only where both lack it, it is missing."""
    code = (
        f"fake.hide({name!r})\n"
        "import kvreuse._ctypes_cuda as cu\n"
        "p = kvreuse.open_provider('cuda:0')\n"
        "print({k: v.ok for k, v in p.features().items()}, p.capabilities()[kvreuse.HandleKind.POSIX_FD].ok)\n"
    )
    done = run_cuda(code, settings={"driver_version": 12000}, backend=backend_name)
    assert done.stdout.endswith("True\n"), done.stderr
    assert feature in done.stdout


def test_a_stub_without_an_entry_point_is_told(backend_name, run_python, tmp_path):
    """A library that lacks a required call: its name, no crash; one that lacks the optional ones: features off."""
    source = tmp_path / "stub.c"
    source.write_text("int cuInit(unsigned f) { return f ? 1 : 100; }\n")
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(source), "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run(command, check=True, timeout=60)
    code = (
        "import kvreuse\n"
        "for _ in range(2):\n"
        "    try: kvreuse.open_provider('cuda:0').allocate(1)\n"
        "    except kvreuse.NotSupportedError as error: print(error)\n"
    )
    done = run_python(code, env={"LD_LIBRARY_PATH": str(tmp_path)}, backend=backend_name)
    expected = "the CUDA driver has no entry point cuDriverGetVersion: virtual memory management needs 10.2 or newer\n"
    assert done.stdout == 2 * expected, done.stderr


def test_no_device(backend_name, run_cuda):
    code = (
        "p = kvreuse.open_provider('cuda:0')\n"
        "try: p.allocate(1)\n"
        "except errors.NotSupportedError as error: print(error, error.native_code)\n"
        "fake.set(device_count=1)\n"
        "p.allocate(1).close()\n"  # a driver that comes later is used
    )
    done = run_cuda(code, settings={"device_count": 0}, backend=backend_name)
    assert done.stdout == (
        "cuInit failed: CUDA_ERROR_NO_DEVICE (CUresult 100): no CUDA-capable device is detected 100\n"
    ), done.stderr


def test_a_code_without_a_name_is_told_as_its_number(backend_name, run_cuda):
    code = (
        "p = kvreuse.open_provider('cuda:0')\n"
        "p.allocate(1).close()\n"
        "fake.fail_call('cuMemCreate', 12345)\n"
        "try: p.allocate(1)\n"
        "except errors.DriverError as error: print(error)\n"
    )
    done = run_cuda(code, backend=backend_name)
    assert done.stdout == "cuMemCreate failed: CUresult 12345\n", done.stderr


def test_views_of_a_mapping(backend_name, run_cuda):
    """DLPack and __cuda_array_interface__ name the memory exactly; a capsule keeps the mapping; no host buffer."""
    if backend_name == "fallback":  # a deleter in Python can crash its consumer: not supported
        code = (
            "with kvreuse.open_provider('%s').allocate(10) as r, r.map() as m:\n"
            "    try: m.__dlpack__()\n"
            "    except errors.NotSupportedError as error: assert 'extension' in str(error)\n"
            "    else: raise AssertionError\n"
        )
        done = run_cuda(code % "cuda:0", backend=backend_name)
        assert (done.returncode, done.stderr) == (0, "")
        return
    code = (
        "import gc\n"
        "p = kvreuse.open_provider('cuda:0')\n"
        "region = p.allocate(6912)\n"
        "writable, readable = region.map(), region.map(kvreuse.Access.READ)\n"
        "for m, read_only in ((writable, False), (readable, True)):\n"
        "    cai = m.__cuda_array_interface__\n"
        "    assert cai['shape'] == (6912,) and cai['typestr'] == '|u1' and cai['version'] == 3\n"
        "    assert cai['data'] == (m.address, read_only), cai\n"
        "    assert m.__dlpack_device__() == (2, 0)\n"
        "    try: m.buffer\n"
        "    except errors.NotSupportedError as error: assert 'DLPack' in str(error)\n"
        "    else: raise AssertionError('a host buffer of device memory')\n"
        "get = ctypes.pythonapi.PyCapsule_GetPointer\n"
        "get.argtypes, get.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p\n"
        "capsule = writable.__dlpack__()\n"
        "words = (ctypes.c_int64 * 8).from_address(get(capsule, b'dltensor'))\n"
        "assert words[0] == writable.address and words[1] == 2, list(words)\n"  # data; device type, id 0
        "assert words[2] == 1 | (0x0001_08_01 << 32), hex(words[2])\n"  # ndim 1; code 1, bits 8, lanes 1
        "assert ctypes.c_int64.from_address(words[3]).value == 6912\n"
        "capsule2 = readable.__dlpack__(max_version=(1, 1))\n"
        "words = (ctypes.c_int64 * 8).from_address(get(capsule2, b'dltensor_versioned'))\n"
        "assert words[0] == 1 and words[3] == 1 and words[4] == readable.address\n"  # version 1.0, read-only
        "for wrong in (lambda: readable.__dlpack__(), lambda: writable.__dlpack__(copy=True),\n"
        "              lambda: writable.__dlpack__(dl_device=(1, 0))):\n"
        "    try: wrong()\n"
        "    except BufferError: pass\n"
        "    else: raise AssertionError\n"
        "for m in (writable, readable):\n"
        "    try: m.close()\n"
        "    except errors.BusyError: pass\n"
        "    else: raise AssertionError\n"
        "del capsule, capsule2; gc.collect()\n"
        "writable.close(); readable.close(); region.close()\n"
        "assert fake.live() == {}\n"
        "print('ok')\n"
    )
    done = run_cuda(code, backend=backend_name)
    assert done.stdout == "ok\n", done.stderr


def test_numpy_takes_a_host_mapping_by_dlpack(backend_name, run_python, run_cuda):
    """A consumer that is real: the array shares the bytes, and keeps the mapping until it is gone."""
    if backend_name == "fallback":  # a deleter in Python can crash its consumer: not supported
        code = (
            "with kvreuse.open_provider('%s').allocate(10) as r, r.map() as m:\n"
            "    try: m.__dlpack__()\n"
            "    except errors.NotSupportedError as error: assert 'extension' in str(error)\n"
            "    else: raise AssertionError\n"
        )
        done = run_cuda(code % "host", backend=backend_name)
        assert (done.returncode, done.stderr) == (0, "")
        return
    code = (
        "import gc, kvreuse, numpy as np\n"
        "with kvreuse.open_provider('host').allocate(100) as region:\n"
        "    mapping = region.map()\n"
        "    array = np.from_dlpack(mapping)\n"
        "    array[:3] = 7\n"
        "    assert bytes(mapping.buffer[:4]) == b'\\x07\\x07\\x07\\x00'\n"
        "    try: mapping.close()\n"
        "    except kvreuse.BusyError: pass\n"
        "    else: raise AssertionError\n"
        "    del array; gc.collect()\n"
        "    mapping.close()\n"
        "print('ok')\n"
    )
    done = run_python(code, backend=backend_name)
    assert done.stdout == "ok\n", done.stderr


def test_close_waits_for_nobody_inside_a_call(backend_name, run_cuda):
    """Threads map, observe and close one another's regions: each is closed once, nothing is left."""
    code = (
        "import threading\n"
        "p = kvreuse.open_provider('cuda:0')\n"
        "bad = []\n"
        "def work(n):\n"
        "    try:\n"
        "        for i in range(60):\n"
        "            with p.allocate(1 + n) as r, r.map() as m:\n"
        "                assert r.observe().mapped_base in (m.address,)\n"
        "                with r.export() as s, p.import_region(s) as other: assert other.region_id == r.region_id\n"
        "    except BaseException as error: bad.append(error)\n"
        "threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]\n"
        "[t.start() for t in threads]; [t.join(60) for t in threads]\n"
        "assert not bad, bad\n"
        "assert fake.live() == {}, fake.live()\n"
        "print('ok')\n"
    )
    done = run_cuda(code, backend=backend_name)
    assert done.stdout == "ok\n", done.stderr
