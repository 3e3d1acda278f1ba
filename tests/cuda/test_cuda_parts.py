"""Parts whose data is device memory: the worker donates fds, the keeper has no CUDA; against the fake driver."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import kvreuse.testing
from kvreuse.keeper import processes

PROFILE = kvreuse.Profile.from_dict({"reuse": {"enabled": True}, "checksum": {"when": "always"}})

_HEAD = """
import numpy as np
path = sys.argv[1]
MANIFEST = kvreuse.Manifest(model="m", weights_id="w", dtype="bfloat16", block_tokens=16, block_bytes=4096, layers=1,
    kv_heads=1, head_dim=8, layout="l", hash_scheme="opaque", hash_root="none", topology=kvreuse.Topology())
RANK = kvreuse.Rank()
KEYS = [bytes([i]) * 32 for i in range(8)]
k = kvreuse.connect(path)
"""

_WRITER = (
    _HEAD
    + """
part = k.attach(MANIFEST, RANK, blocks=1000, provider="cuda:0", {more})
print(part.outcome.kind.name, part.outcome.reason)
res = part.reserve(KEYS)
for i in range(8):
    view = res.view(i)
    assert view.nbytes == 4096 and not view.readonly
    assert view.__cuda_array_interface__["data"] == (view.address, False)
    ctypes.memset(view.address, 65 + i, 4096)
res.commit()
try: view.address
except errors.HandleClosedError: pass
else: raise AssertionError("the view did not end")
open_res = part.reserve([b"unfinished"])
assert part.match(KEYS) == 8
assert part.verify() == (0, ()), part.verify()
print("written", flush=True)
sys.stdin.read()
"""
)

_READER = (
    _HEAD
    + """
part = k.attach(MANIFEST, RANK, blocks=1000, provider="cuda:0")
print(part.outcome.kind.name, part.outcome.blocks, part.outcome.reason)
with part.claim(KEYS) as claim:
    print(len(claim), [chr(ctypes.string_at(claim.view(i).address + 4095, 1)[0]) for i in range(len(claim))])
    assert claim.view(0).readonly
part.close()
k.close()
assert fake.live() == {}, fake.live()
assert not fake.counters()["violations"], fake.violation()
"""
)


@pytest.fixture
def keeper_path():
    with kvreuse.testing.keeper(profile=PROFILE) as path:
        yield path


@pytest.fixture
def killed_writer(start_cuda, keeper_path, backend_name):
    """A worker writes 8 blocks, leaves a ninth unfinished, and is SIGKILLed."""

    def kill(more=""):
        writer = start_cuda(_WRITER.replace("{more}", more), keeper_path, backend=backend_name)
        assert [writer.stdout.readline() for _ in range(2)] == ["EMPTY new\n", "written\n"]
        writer.kill()
        writer.wait(20)

    return kill


def keeper_maps(path):
    """What the keeper's process has mapped."""
    with kvreuse.connect(path) as k:
        pid = processes.peer_process(k._sock)
        try:
            return Path(f"/proc/{pid.pid}/maps").read_text()
        finally:
            pid.close()


@pytest.mark.parametrize(
    "more",
    ["", "regions=[kvreuse.open_provider('cuda:0').allocate(250 * 4096) for _ in range(4)]"],
    ids=["own", "given"],
)
def test_a_killed_workers_device_memory_is_restored(more, killed_writer, run_cuda, keeper_path, backend_name):
    """K1, R1: SIGKILL of the worker; the next one finds every sealed block's bytes, and not the unfinished one."""
    killed_writer(more)
    maps = keeper_maps(keeper_path)
    assert "kvreuse" in maps
    assert "libcuda" not in maps
    done = run_cuda(_READER, keeper_path, backend=backend_name)
    assert done.stdout == "RESTORED 8 \n8 ['A', 'B', 'C', 'D', 'E', 'F', 'G', 'H']\n", done.stderr
    assert (done.returncode, done.stderr) == (0, "")


def test_memory_given_back_is_no_content(killed_writer, run_cuda, keeper_path, backend_name):
    """E14: the operator gives the memory back; the next attach is EMPTY, no key is in the inventory."""
    killed_writer()
    with kvreuse.connect(keeper_path) as k:
        released, deadline = 0, time.monotonic() + 20
        while not released and time.monotonic() < deadline:  # until the keeper has learned of the death
            released = k.release()
        assert released == 1
    done = run_cuda(_READER, keeper_path, backend=backend_name)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("EMPTY 0 "), done.stderr
    assert lines[1] == "0 []"


def test_another_provider_empties_the_part(killed_writer, run_cuda, keeper_path, backend_name):
    """C2, R3: device memory is not handed out as host memory."""
    killed_writer()
    code = _HEAD + "with k.attach(MANIFEST, RANK, blocks=1000) as part: print(part.outcome.reason)\nk.close()\n"
    done = run_cuda(code, keeper_path, backend=backend_name)
    assert done.stdout == "the manifest changed: provider: 'cuda:0' kept, 'host' asked\n", done.stderr


def test_fabric_memory_cannot_be_retained(run_cuda, keeper_path, backend_name):
    """A fabric handle pins nothing: REFUSED, and nothing is left at the keeper."""
    code = _HEAD + (
        'profile = kvreuse.Profile.from_dict({"reuse": {"enabled": True}, "handles": {"fabric": "allocate"}})\n'
        "region = kvreuse.open_provider('cuda:0', profile).allocate(4096 * 1000, kind=kvreuse.HandleKind.FABRIC)\n"
        "try: k.attach(MANIFEST, RANK, blocks=1000, provider='cuda:0', regions=[region])\n"
        "except errors.AttachRefusedError as error: print(error.outcome.kind.name, error.outcome.reason)\n"
        "host = kvreuse.open_provider('host').allocate(4096 * 1000)\n"
        "try: k.attach(MANIFEST, RANK, blocks=1000, provider='cuda:0', regions=[host])\n"
        "except errors.IncompatibleError as error: print(error)\n"
        "assert k.status()['parts'] == []\n"
        "region.close(); host.close(); k.close()\n"
    )
    settings = {"fabric_attribute": 1, "fabric_create_result": 0}
    done = run_cuda(code, keeper_path, settings=settings, backend=backend_name)
    assert done.stdout == (
        "REFUSED a region of kind FABRIC cannot be retained\na region of provider host in a part of provider cuda:0\n"
    ), done.stderr


@pytest.mark.parametrize(
    "call", ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
)
def test_an_attach_that_fails_leaves_nothing(call, run_cuda, keeper_path, backend_name):
    """The driver refuses while the part is opened: a clear error, the session ends, and the next attach works."""
    code = _HEAD + (
        f"fake.fail_call({call!r}, 2)\n"
        "try: k.attach(MANIFEST, RANK, blocks=1000, provider='cuda:0')\n"
        "except errors.OutOfMemoryError as error: print(error.call)\n"
        "assert fake.live() == {}, fake.live()\n"
        "with k.attach(MANIFEST, RANK, blocks=1000, provider='cuda:0') as part: print(part.outcome.kind.name)\n"
        "k.close()\n"
        "assert fake.live() == {}, fake.live()\n"
    )
    done = run_cuda(code, keeper_path, backend=backend_name)
    assert done.stdout.splitlines() == [call, "RESTORED"], done.stderr


@pytest.mark.parametrize(("call", "code"), [("cuMemImportFromShareableHandle", 999), ("cuMemMap", 1)])
def test_retained_memory_that_the_driver_refuses_is_given_up(
    call, code, killed_writer, run_cuda, keeper_path, backend_name
):
    """R2: a restore that fails ends EMPTY with the reason, in new memory: the worker need not wait for an operator."""
    killed_writer()
    done = run_cuda(f"fake.fail_call({call!r}, {code})\n" + _READER, keeper_path, backend=backend_name)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("EMPTY 0 restore failed: "), done.stderr
    assert call in lines[0]
    assert lines[1] == "0 []"


def test_retained_memory_is_kept_where_only_the_moment_is_bad(killed_writer, run_cuda, keeper_path, backend_name):
    """K4: lack of memory or fds at the restore is an error, and the content is there for the next try."""
    killed_writer()
    code = _HEAD + (
        "fake.fail_call('cuMemAddressReserve', 2)\n"
        "try: k.attach(MANIFEST, RANK, blocks=1000, provider='cuda:0')\n"
        "except errors.OutOfMemoryError as error: print(error.call)\n"
        "with k.attach(MANIFEST, RANK, blocks=1000, provider='cuda:0') as part: print(part.outcome)\n"
        "k.close()\n"
        "assert fake.live() == {}, fake.live()\n"
    )
    done = run_cuda(code, keeper_path, backend=backend_name)
    assert done.stdout == "cuMemAddressReserve\nRESTORED(8)\n", done.stderr


def test_a_close_that_the_driver_refuses_goes_on_from_there(run_cuda, keeper_path, backend_name):
    """Closing again closes the rest, and only then the part is given back."""
    code = _HEAD + (
        "part = k.attach(MANIFEST, RANK, blocks=1000, provider='cuda:0')\n"
        "fake.fail_call('cuMemUnmap', 999)\n"
        "try: part.close()\n"
        "except errors.DriverError as error: print(error.call)\n"
        "part.close()\n"
        "assert fake.live() == {}, fake.live()\n"
        "k.attach(MANIFEST, RANK, blocks=1000, provider='cuda:0').close()\n"
        "k.close()\n"
    )
    done = run_cuda(code, keeper_path, backend=backend_name)
    assert (done.stdout, done.returncode, done.stderr) == ("cuMemUnmap\n", 0, "")


def test_one_bad_moment_of_the_driver_costs_no_cache(killed_writer, run_cuda, keeper_path, backend_name):
    """K4: an unknown error of the reservation is an error; the content is there for the next try."""
    killed_writer()
    code = _HEAD + (
        "fake.fail_call('cuMemAddressReserve', 999)\n"
        "try: k.attach(MANIFEST, RANK, blocks=1000, provider='cuda:0')\n"
        "except errors.DriverError as error: print(error.call)\n"
        "with k.attach(MANIFEST, RANK, blocks=1000, provider='cuda:0') as part: print(part.outcome)\n"
        "k.close()\n"
    )
    done = run_cuda(code, keeper_path, backend=backend_name)
    assert (done.stdout, done.returncode) == ("cuMemAddressReserve\nRESTORED(8)\n", 0), done.stderr
