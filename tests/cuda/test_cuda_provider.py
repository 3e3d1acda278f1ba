"""Provider cuda:N over the fake driver: classes, processes that exchange memory, missing calls, threads, views."""

from __future__ import annotations

import subprocess

import pytest

PROFILE = 'profile = kvreuse.Profile.from_dict({"reuse": {"enabled": True}, "handles": {"fabric": "allocate"}})\n'
FABRIC = {"fabric_attribute": 1, "fabric_create_result": 0}

_IMPORTER = """
import ctypes, socket
import kvreuse
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
assert sock.recv(1) == b""  # the exporter is gone, and its fds with it
print(kvreuse.backend, ctypes.string_at(mapping.address, 6).decode())
if kind is kvreuse.HandleKind.FABRIC:
    try:
        p.import_region(kvreuse.SharedHandle.from_bytes(record))
    except kvreuse.DriverError as error:
        print(error)
mapping.close()
region.close()
sock.close()
"""

_EXPORTER = (
    PROFILE
    + """
import socket, subprocess
kind, importer, other = sys.argv[1:]
p = kvreuse.open_provider("cuda:0", profile)
region = p.allocate(6912, kind=kvreuse.HandleKind[kind])
mapping = region.map()
ctypes.memmove(mapping.address, b"from A", 6)
ours, theirs = socket.socketpair()
env = {**os.environ, "KVREUSE_BACKEND": other}
child = subprocess.Popen([sys.executable, "-W", "error", "-c", importer], stdin=theirs.fileno(), env=env)
theirs.close()
shared = region.export()
shared.send(ours)
assert ours.recv(4) == b"seen"
assert ctypes.string_at(mapping.address + 6906, 6) == b"from B"
print(kvreuse.backend, flush=True)
sys.stdin.read()
"""
)


@pytest.mark.parametrize("kind", ["POSIX_FD", "FABRIC"])
def test_two_backends_exchange_memory_and_the_exporter_is_killed(kind, backend_name, backends_present, start_cuda):
    """H3, H6: both see the other's bytes; after SIGKILL an importer reads on; a later fabric import is refused."""
    other = next((name for name in backends_present if name != backend_name), backend_name)
    exporter = start_cuda(_EXPORTER, kind, _IMPORTER, other, backend=backend_name, settings=FABRIC)
    assert exporter.stdout.readline() == f"{backend_name}\n"
    exporter.kill()
    # Its stdout is the importer's too: it ends with that.
    said, _ = exporter.communicate(timeout=30)
    expected = f"{other} from A\n"
    if kind == "FABRIC":
        expected += (
            "cuMemImportFromShareableHandle failed: CUDA_ERROR_INVALID_HANDLE (CUresult 400): invalid resource handle\n"
        )
    assert said == expected


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


def test_numpy_takes_a_host_mapping_by_dlpack(backend_name, run_python):
    """A consumer that is real: the array shares the bytes, and keeps the mapping until it is gone."""
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


def test_a_capsule_is_dropped_whatever_goes_on(backend_name, run_cuda):
    """A consumer drops a capsule, or its tensor, while an exception is set: that comes through, and the hold ends."""
    code = (
        "import gc, numpy as np\n"
        "def use(thing, other): pass\n"
        "host, cuda = kvreuse.open_provider('host').allocate(64), kvreuse.open_provider('cuda:0').allocate(64)\n"
        "capsule = kvreuse.Mapping.__dlpack__\n"
        "for region, make in ((host, np.from_dlpack), (host, capsule), (cuda, capsule)):\n"
        "    with region.map() as mapping:\n"
        "        for _ in range(3):\n"
        "            try: use(make(mapping), 1 / 0)\n"
        "            except ZeroDivisionError: pass\n"
        "            else: raise AssertionError\n"
        "        gc.collect()\n"
        "with cuda.map() as mapping:\n"
        "    try: np.from_dlpack(mapping)\n"
        "    except (RuntimeError, BufferError) as error: assert type(error) is not SystemError, error\n"
        "    else: raise AssertionError('numpy took device memory')\n"
        "    gc.collect()\n"
        "host.close(); cuda.close()\n"
        "assert fake.live() == {}\n"
        "print('ok')\n"
    )
    done = run_cuda(code, backend=backend_name)
    assert (done.stdout, done.returncode) == ("ok\n", 0), done.stderr


_CONSUMER = """
#include <stdint.h>
#include <stdlib.h>
typedef struct managed { uint64_t tensor[6]; void *context; void (*deleter)(struct managed *); } managed;
static managed *kept;
static void at_end(void) { kept->deleter(kept); }
void keep(managed *tensor) { kept = tensor; atexit(at_end); }
"""


def test_a_consumer_lets_go_after_pythons_end(backend_name, run_cuda, tmp_path):
    """A tensor in a C++ static is deleted when Python is gone: no crash."""
    (tmp_path / "consumer.c").write_text(_CONSUMER)
    library = tmp_path / "consumer.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(tmp_path / "consumer.c"), "-o", str(library)], check=True, timeout=60)
    code = (
        "region = kvreuse.open_provider('host').allocate(64)\n"
        "mapping = region.map()\n"
        "library = ctypes.CDLL(sys.argv[1])\n"
        "get, rename = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_SetName\n"
        "get.argtypes, get.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p\n"
        "rename.argtypes = [ctypes.py_object, ctypes.c_char_p]\n"
        "capsule, name = mapping.__dlpack__(), ctypes.create_string_buffer(b'used_dltensor')\n"
        "library.keep.argtypes = [ctypes.c_void_p]\n"
        "library.keep(get(capsule, b'dltensor'))\n"
        "rename(capsule, b'used_dltensor')\n"
        "sys.modules['kept'] = (region, mapping)\n"
        "print('ok', flush=True)\n"
    )
    done = run_cuda(code, library, backend=backend_name)
    assert (done.stdout, done.returncode) == ("ok\n", 0), done.stderr


def test_ordinals_above_0(backend_name, run_cuda):
    """H4: an allocation is imported on its own device only, and both devices are named where it is another."""
    code = PROFILE + (
        "p0, p1 = (kvreuse.open_provider(f'cuda:{n}', profile) for n in range(2))\n"
        "for kind in (kvreuse.HandleKind.POSIX_FD, kvreuse.HandleKind.FABRIC):\n"
        "    with p1.allocate(4096, kind=kind) as region, region.export() as shared:\n"
        "        with p1.import_region(shared) as other, other.map() as mapping:\n"
        "            seen = other.observe()\n"
        "            assert (seen.location_id, mapping.__dlpack_device__()) == (1, (2, 1)), seen\n"
        "        try: p0.import_region(shared)\n"
        "        except errors.IncompatibleError as error: print(error)\n"
        "try: kvreuse.open_provider('cuda:2').allocate(1)\n"
        "except errors.RangeError as error: print(error)\n"
        "assert fake.live() == {}\n"
    )
    done = run_cuda(code, settings={**FABRIC, "device_count": 2}, backend=backend_name)
    other_device = "the allocation is at location type 1, id 1: expected device 0 (type 1)\n"
    assert done.stdout == 2 * other_device + (
        "device 2 does not exist: the driver has 2 device(s), counted from 0\n"
    ), done.stderr


def test_closing_waits_for_who_looks(backend_name, run_cuda):
    """Closing a mapping that another thread's observe() looks at waits for that, and is no error."""
    code = (
        "import threading\n"
        "region = kvreuse.open_provider('cuda:0').allocate(4096)\n"
        "mapping, bad = region.map(), []\n"
        "def run(call):\n"
        "    try: call()\n"
        "    except BaseException as error: bad.append(error)\n"
        "fake.hold('cuMemGetAccess')\n"
        "threads = [threading.Thread(target=run, args=(call,)) for call in (region.observe, mapping.close)]\n"
        "threads[0].start()\n"
        "fake.wait_held()\n"
        "threads[1].start()\n"
        "threads[1].join(0.3)\n"  # time enough to fail; it is waiting
        "assert threads[1].is_alive() and not bad, bad\n"
        "fake.hold('')\n"
        "[t.join(20) for t in threads]\n"
        "assert not bad and mapping.closed, bad\n"
        "region.close()\n"
        "assert fake.live() == {}\n"
        "print('ok')\n"
    )
    done = run_cuda(code, backend=backend_name)
    assert done.stdout == "ok\n", done.stderr


def test_closing_does_not_wait_for_ever(backend_name, run_cuda):
    """K7: a driver call that hangs on a region makes closing it BusyError after a second, not a hang."""
    code = (
        "import threading, time\n"
        "region = kvreuse.open_provider('cuda:0').allocate(4096)\n"
        "fake.hold('cuMemExportToShareableHandle')\n"
        "thread = threading.Thread(target=lambda: region.export().close())\n"
        "thread.start()\n"
        "fake.wait_held()\n"
        "assert kvreuse._select.backend.region_info(region.handle).nbytes == 4096  # nobody else waits\n"
        "begun = time.monotonic()\n"
        "try: region.close()\n"
        "except errors.BusyError as error: assert 'inside a call of another thread' in str(error), error\n"
        "else: raise AssertionError('closed under a call')\n"
        "assert 0.5 < time.monotonic() - begun < 20\n"
        "fake.hold('')\n"
        "thread.join(20)\n"
        "region.close()\n"
        "assert fake.live() == {}\n"
        "print('ok')\n"
    )
    done = run_cuda(code, backend=backend_name)
    assert done.stdout == "ok\n", done.stderr


def test_a_mapping_that_is_half_unmapped_gives_nothing(backend_name, run_cuda):
    """The memory is gone, only the addresses are left: no address, no tensor; closing again ends it."""
    code = (
        "region = kvreuse.open_provider('cuda:0').allocate(4096)\n"
        "mapping = region.map()\n"
        "fake.fail_call('cuMemAddressFree', 999)\n"
        "try: mapping.close()\n"
        "except errors.DriverError as error: assert error.call == 'cuMemAddressFree'\n"
        "for name in ('address', '__cuda_array_interface__', '__dlpack__'):\n"
        "    try:\n"
        "        found = getattr(mapping, name)\n"
        "        found()\n"
        "    except (errors.HandleClosedError, errors.StaleHandleError): pass\n"
        "    else: raise AssertionError('it gave the address of nothing')\n"
        "assert region.observe().mapped_base is None\n"
        "mapping.close(); region.close()\n"
        "assert fake.live() == {} and not fake.counters()['violations']\n"
        "print('ok')\n"
    )
    done = run_cuda(code, backend=backend_name)
    assert done.stdout == "ok\n", done.stderr


@pytest.mark.parametrize("provider", ["host", "cuda:0"])
def test_closing_from_many_threads(provider, backend_name, run_cuda):
    """E6, G4: one of them closes, the others find it closed: no error."""
    code = (
        "import threading\n"
        f"p = kvreuse.open_provider({provider!r})\n"
        "bad = []\n"
        "def close(thing, start):\n"
        "    try: start.wait(20); thing.close()\n"
        "    except BaseException as error: bad.append(error)\n"
        "for _ in range(100):\n"
        "    region = p.allocate(4096)\n"
        "    for thing in (region.map(), region):\n"
        "        start = threading.Barrier(3)\n"
        "        threads = [threading.Thread(target=close, args=(thing, start)) for _ in range(3)]\n"
        "        [t.start() for t in threads]; [t.join(20) for t in threads]\n"
        "        assert thing.closed\n"
        "assert not bad, bad\n"
        "assert fake.live() == {}\n"
        "print('ok')\n"
    )
    done = run_cuda(code, backend=backend_name)
    assert done.stdout == "ok\n", done.stderr


def test_a_shared_handle_closed_during_its_import(backend_name, run_cuda):
    """S5: the fd is closed when the import has ended: else its number may be other memory's by then."""
    code = (
        "from kvreuse import handles\n"
        "import os\n"
        "fds = lambda: len(os.listdir('/proc/self/fd'))\n"
        "with kvreuse.open_provider('cuda:0').allocate(4096): before = fds()\n"
        "p = kvreuse.open_provider('cuda:0')\n"
        "regions = [p.allocate(4096) for _ in range(2)]\n"
        "for region, byte in zip(regions, b'AB'):\n"
        "    with region.map() as m: ctypes.memset(m.address, byte, 1)\n"
        "shared, backend, made = regions[0].export(), handles._backend, []\n"
        "class Racing:\n"
        "    def __getattr__(self, name): return getattr(backend, name)\n"
        "    def cuda_import(self, *arguments):\n"
        "        shared.close()\n"  # another thread closes it just now
        "        made.append(regions[1].export())\n"  # and its number is given out again
        "        return backend.cuda_import(*arguments)\n"
        "handles._backend = Racing()\n"
        "other = p.import_region(shared)\n"
        "with other.map() as m: print(ctypes.string_at(m.address, 1))\n"
        "assert shared._fd == -1\n"
        "for each in (other, *made, *regions): each.close()\n"
        "assert fake.live() == {} and fds() == before - 1, (fds(), before)\n"
    )
    done = run_cuda(code, backend=backend_name)
    assert done.stdout == "b'A'\n", done.stderr


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("kvreuse.open_provider(5)", "TypeError"),
        ("kvreuse.open_provider(None)", "TypeError"),
        ("kvreuse.open_provider('cuda:' + '1' * 5000)", "NotSupportedError"),
        ("kvreuse.open_provider('cuda:9999999999').allocate(1)", "RangeError"),
        ("kvreuse.open_provider('cuda:0').import_region(None)", "TypeError"),
        ("kvreuse.open_provider('cuda:0').allocate('1')", "TypeError"),
    ],
)
def test_wrong_arguments(call, error, backend_name, run_cuda):
    done = run_cuda(f"try: {call}\nexcept Exception as error: print(type(error).__name__)\n", backend=backend_name)
    assert done.stdout == f"{error}\n", done.stderr


def test_a_process_without_an_interpreter_to_start(backend_name, run_cuda):
    code = "sys.executable = None\nprint(kvreuse.open_provider('cuda:0').capabilities()[kvreuse.HandleKind.POSIX_FD])\n"
    done = run_cuda(code, backend=backend_name)
    assert "ok=False, reason='there is no interpreter to start a second process with'" in done.stdout, done.stderr


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemGetAllocationGranularity"])
@pytest.mark.parametrize("result", [800, 801])
def test_a_fallback_is_taken_wherever_the_driver_refuses_the_kind(call, result, backend_name, run_cuda):
    """E8, E9."""
    code = PROFILE + (
        f"fake.fail_call({call!r}, {result})\n"
        "K = kvreuse.HandleKind\n"
        "with kvreuse.open_provider('cuda:0', profile).allocate(1, kind=K.FABRIC, fallback=(K.POSIX_FD,)) as region:\n"
        "    print(region.kind.name, region.observe().reasons['kind'])\n"
    )
    done = run_cuda(code, settings=FABRIC, backend=backend_name)
    assert done.stdout.startswith(f"POSIX_FD FABRIC was not granted: {call} failed: "), done.stderr
