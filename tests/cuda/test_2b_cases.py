"""Cases from the field: C2, E2, E8, E9, E12, E14 (each test's name has its id)."""

from __future__ import annotations

import pytest

import kvreuse
import kvreuse.testing

HEAD = (
    'profile = kvreuse.Profile.from_dict({"reuse": {"enabled": True}, "handles": {"fabric": "allocate"}})\n'
    "p = kvreuse.open_provider('cuda:0', profile)\n"
)
MANIFEST = """
def manifest(**more):
    return kvreuse.Manifest(**{**dict(model="m", weights_id="w", dtype="bfloat16", block_tokens=16, block_bytes=4096,
        layers=1, kv_heads=1, head_dim=8, layout="l", hash_scheme="opaque", hash_root="none",
        topology=kvreuse.Topology(tp=2)), **more})
"""


def test_c2_fabric_descriptor_on_a_host_only_machine(backend_name, run_python):
    """C2: NotSupportedError, and nothing is opened; sizes 0 and -1."""
    code = """
import os, struct
import kvreuse
from kvreuse import handles
p = kvreuse.open_provider("host")
with p.allocate(4096) as region, region.export() as shared:
    fields = list(handles._RECORD.unpack(shared.to_bytes()[:-4]))
def record(kind, nbytes, physical, provider=b"cuda:0"):
    size = 64 if kind == 8 else 0
    made = [*fields[:3], kind, size, nbytes, physical, fields[7], provider, 0, 0, bytes(range(64))]
    body = handles._RECORD.pack(*made)
    return body + struct.pack("<I", handles._backend.crc32c(body))
shared = kvreuse.SharedHandle.from_bytes(record(8, 4096, 4096))
assert shared.kind is kvreuse.HandleKind.FABRIC and shared.payload == bytes(range(64))
fds = os.listdir("/proc/self/fd")
for provider in ("host", "cuda:0"):
    try: kvreuse.open_provider(provider).import_region(shared)
    except kvreuse.NotSupportedError as error: print(error)
assert os.listdir("/proc/self/fd") == fds
for nbytes in (0, -1):
    try: kvreuse.SharedHandle.from_bytes(record(8, nbytes, 4096))
    except (kvreuse.SizeMismatchError, kvreuse.RangeError) as error: print(type(error).__name__)
"""
    done = run_python(code, backend=backend_name)
    lines = done.stdout.splitlines()
    assert lines[0] == "provider host cannot import kind FABRIC: it imports POSIX_FD", done.stderr
    assert lines[1].startswith("libcuda.so.1 cannot be loaded"), lines
    assert lines[2:] == ["SizeMismatchError", "SizeMismatchError"]


def test_c2_one_rank_host_the_other_cuda(backend_name, run_cuda):
    """C2: IncompatibleError names the provider, with both values, while the other rank's worker lives."""
    profile = kvreuse.Profile.from_dict({"reuse": {"enabled": True}})
    code = MANIFEST + (
        "k = kvreuse.connect(sys.argv[1])\n"
        "with k.attach(manifest(), kvreuse.Rank(tp=0), blocks=4) as part:\n"
        "    try: k.attach(manifest(), kvreuse.Rank(tp=1), blocks=4, provider='cuda:0')\n"
        "    except errors.IncompatibleError as error: print(error.fields, error)\n"
        "    assert len(k.status()['parts']) == 1\n"
        "k.close()\n"
        "assert fake.live() == {}\n"
    )
    with kvreuse.testing.keeper(profile=profile) as path:
        done = run_cuda(code, path, backend=backend_name)
    assert done.stdout == (
        "{'provider': ('host', 'cuda:0')} the group's memory is of another provider: "
        "provider: 'host' kept, 'cuda:0' asked\n"
    ), done.stderr


def test_e2_sizes(backend_name, run_cuda):
    """E2: granularity 2 MiB: physical sizes, and what is out of range."""
    code = HEAD + (
        "for nbytes in (6912, 2097152, 2097153):\n"
        "    with p.allocate(nbytes) as region: print(region.nbytes, region.physical_nbytes)\n"
        "for nbytes in (0, -1, 2**63 - 1):\n"
        "    try: p.allocate(nbytes)\n"
        "    except errors.RangeError: print('range')\n"
    )
    done = run_cuda(code, backend=backend_name)
    assert done.stdout.split() == [
        *("6912", "2097152", "2097152", "2097152", "2097153", "4194304"),
        *("range", "range", "range"),
    ], done.stderr


def test_e8_fabric_on_the_host(backend_name, run_python):
    """E8: not at allocation, but with a fallback, under a profile that allows fabric."""
    code = (
        "import kvreuse\nfrom kvreuse import HandleKind\n"
        'profile = kvreuse.Profile.from_dict({"reuse": {"enabled": True}, "handles": {"fabric": "allocate"}})\n'
        "p = kvreuse.open_provider('host', profile)\n"
        "try: p.allocate(1, kind=HandleKind.FABRIC)\n"
        "except kvreuse.NotSupportedError as error: print(type(error).__name__)\n"
        "with p.allocate(1, kind=HandleKind.FABRIC, fallback=(HandleKind.POSIX_FD,)) as region:\n"
        "    print(region.kind.name, region.observe().reasons['kind'])\n"
    )
    done = run_python(code, backend=backend_name)
    lines = done.stdout.splitlines()
    assert lines[0] == "NotSupportedError", done.stderr
    assert lines[1].startswith("POSIX_FD FABRIC was not granted: the host provider cannot allocate kind FABRIC")


@pytest.mark.parametrize("code_of_create", [800, 801])
def test_e9_the_attribute_says_fabric_and_create_does_not(code_of_create, backend_name, run_cuda):
    """E9: only a create that succeeds is evidence; a fallback is granted with the reason."""
    code = HEAD + (
        "from kvreuse import HandleKind\n"
        "assert fake.library and p.capabilities()[HandleKind.POSIX_FD].ok\n"
        "print(p.capabilities()[HandleKind.FABRIC])\n"
        "with p.allocate(1, kind=HandleKind.FABRIC, fallback=(HandleKind.POSIX_FD,)) as region:\n"
        "    seen = region.observe()\n"
        "    print(region.kind.name, seen.fabric_attribute, seen.reasons['kind'])\n"
    )
    settings = {"fabric_attribute": 1, "fabric_create_result": code_of_create}
    done = run_cuda(code, settings=settings, backend=backend_name)
    lines = done.stdout.splitlines()
    assert "ok=False" in lines[0], done.stderr
    assert "cuMemCreate" in lines[0]
    assert str(code_of_create) in lines[0]
    assert lines[1].startswith("POSIX_FD 1 FABRIC was not granted: cuMemCreate failed: CUDA_ERROR_NOT_")


@pytest.mark.parametrize("provider", ["host", "cuda:0"])
def test_e12_fresh_threads_small_stacks_and_exit(provider, backend_name, run_cuda):
    """E12: every call from a fresh thread, from one with a stack of 256 KiB, and at exit."""
    code = (
        "import atexit, threading\n"
        f"p = kvreuse.open_provider({provider!r})\n"
        "bad = []\n"
        "def life():\n"
        "    with p.allocate(10) as r, r.map() as m:\n"
        "        r.observe(); m.__dlpack__()\n"
        "        with r.export() as s, p.import_region(s) as o, o.map(): o.observe()\n"
        "def work():\n"
        "    try: life()\n"
        "    except BaseException as error: bad.append(error)\n"
        "for size in (0, 256 * 1024):\n"
        "    threading.stack_size(size)\n"
        "    threads = [threading.Thread(target=work) for _ in range(4)]\n"
        "    [t.start() for t in threads]; [t.join(30) for t in threads]\n"
        "assert not bad, bad\n"
        "kept = p.allocate(5)\n"
        "kept_mapping = kept.map()\n"
        "def at_exit():\n"
        "    life(); kept_mapping.close(); kept.close(); print('exit', fake.live())\n"
        "atexit.register(at_exit)\n"
        "print('ok')\n"
    )
    done = run_cuda(code, backend=backend_name)
    assert (done.stdout, done.returncode) == ("ok\nexit {}\n", 0), done.stderr


def test_e14_a_hole_is_no_content(backend_name, run_python, tmp_path):
    """E14: a committed block's physical memory is given back: it reads as zeros, and is not taken for the block."""
    code = (
        MANIFEST
        + """
import ctypes, os, sys
import numpy as np
k = kvreuse.connect(sys.argv[1])
part = k.attach(manifest(topology=kvreuse.Topology()), kvreuse.Rank(), blocks=4)
with part.reserve([b"a", b"b"]) as res:
    for i in range(2): np.frombuffer(res.view(i), np.uint8)[:] = 7
    slots = [int(s) for s in res.slots]
    res.commit()
assert part.match([b"a", b"b"]) == 2
with part.claim([b"a"]) as claim:
    address = np.frombuffer(claim.view(0), np.uint8).ctypes.data
libc = ctypes.CDLL(None, use_errno=True)
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
assert libc.madvise(address, 4096, 9) == 0, ctypes.get_errno()  # MADV_REMOVE
with part.claim([b"a", b"b"]) as claim: print(len(claim))
print(part.match([b"a"]), part.match([b"b"]), part.stats().corrupt_total)
part.close(); k.close()
"""
    )
    profile = kvreuse.Profile.from_dict({"reuse": {"enabled": True}, "checksum": {"when": "always"}})
    with kvreuse.testing.keeper(profile=profile) as path:
        done = run_python("import kvreuse\n" + code, path, backend=backend_name)
    assert done.stdout == "0\n0 1 1\n", done.stderr
