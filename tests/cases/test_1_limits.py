"""F7, F8, F16: small file systems, lying peers, other users."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys

import pytest

import kvreuse.testing


def in_mount_namespace(command):
    """Run a shell command with mounts of its own; skips only where mounts are not permitted."""
    probe = subprocess.run(["unshare", "-m", "true"], capture_output=True, timeout=30)
    if probe.returncode:
        pytest.skip("mounts are not permitted here")
    return subprocess.run(["unshare", "-m", "sh", "-ec", command], capture_output=True, text=True, timeout=60)


CODE_F7 = """
import kvreuse, os
profile = kvreuse.Profile.from_dict({"reuse": {"enabled": True}, "handles": {"file_fallback": True}})
from kvreuse._select import backend
try:
    backend.host_allocate(131072, 1, "kvreuse", os.environ["TMPDIR"])
except kvreuse.NoSpaceError as error:
    print("NoSpaceError", error.native_code)
print(backend.handle_counts().fds)
"""


def test_f7_a_full_file_system_is_an_error_not_a_signal(tmp_path, backend_name):
    """F7: a tmpfs of 64 KiB, 128 KiB asked."""
    script = tmp_path / "code.py"
    script.write_text(CODE_F7)
    done = in_mount_namespace(
        f"mkdir {tmp_path}/small && mount -t tmpfs -o size=64k none {tmp_path}/small && "
        f"TMPDIR={tmp_path}/small KVREUSE_BACKEND={backend_name} {sys.executable} {script}"
    )
    assert (done.returncode, done.stdout) == (0, "NoSpaceError 28\n0\n"), done.stderr


def test_f7_an_import_that_declares_too_much_is_refused(backend):
    """F7, H4: 8192 declared of a memfd of 4096."""
    info = backend.host_allocate(4096, 1, "kvreuse", None)
    fd = backend.region_export(info.handle)
    try:
        with pytest.raises(kvreuse.SizeMismatchError, match=r"8192.*4096"):
            backend.region_import(fd, 8192, 8192, info.region_id, info.device, info.inode, 0)
    finally:
        os.close(fd)
        backend.region_close(info.handle)


def test_f7_a_peer_cannot_shrink_what_was_shared(backend):
    """F7, S4: F_SEAL_SHRINK."""
    info = backend.host_allocate(8192, 1, "kvreuse", None)
    fd = backend.region_export(info.handle)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 4096)
    finally:
        os.close(fd)
        backend.region_close(info.handle)


def test_f7_an_unsealed_fd_is_refused_by_default(backend):
    """F7, S4"""
    fd = os.memfd_create("kvreuse-unsealed", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, 4096)
        with pytest.raises(kvreuse.PermissionDeniedError, match="not sealed"):
            backend.region_import(fd, 4096, 4096, bytes(16), 0, 0, 0)
        info = backend.region_import(fd, 4096, 4096, bytes(16), 0, 0, 1)
        backend.region_close(info.handle)
    finally:
        os.close(fd)


CODE_F8 = """
import kvreuse, kvreuse.testing
manifest = kvreuse.Manifest(model="m", weights_id="w", dtype="bfloat16", block_tokens=16, block_bytes=65536, layers=1,
    kv_heads=1, head_dim=1, layout="x", hash_scheme="sglang-sha256", hash_root="r")
with kvreuse.testing.keeper("[reuse]\\nenabled = true\\n") as path, kvreuse.connect(path) as keeper:
    keys = [bytes([i]) for i in range(16)]
    with keeper.attach(manifest, kvreuse.Rank(), blocks=16) as part, part.reserve(keys) as made:
        for i in range(16):
            made.view(i)[:] = bytes([i]) * 65536
        made.commit()
        print(part.match(keys))
"""


def test_f8_a_small_dev_shm_does_not_matter(tmp_path, backend_name):
    """F8, K3: /dev/shm of 64 KiB, a part of 1 MiB."""
    script = tmp_path / "code.py"
    script.write_text(CODE_F8)
    done = in_mount_namespace(
        f"mount -t tmpfs -o size=64k none /dev/shm && KVREUSE_BACKEND={backend_name} {sys.executable} {script} && "
        "ls /dev/shm | wc -l"
    )
    assert done.stdout.split() == ["16", "0"], done.stderr


@pytest.fixture
def keeper(backend_name, monkeypatch):
    monkeypatch.setenv("KVREUSE_BACKEND", backend_name)
    with kvreuse.testing.keeper("[reuse]\nenabled = true\n") as path:
        yield path


def still_up(path):
    with kvreuse.connect(path) as client:
        return client.status()


def test_f16_another_user_is_refused(keeper):
    """F16, S1: even where the file's permissions let it through."""
    if os.geteuid():
        pytest.skip("only root can be another user")
    folder = os.path.dirname(keeper)
    os.chmod(folder, 0o755)
    os.chmod(keeper, 0o666)
    code = """
import os, socket, sys
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.settimeout(10)
sock.connect(sys.argv[1])
sock.send(b"hello")
data = sock.recv(65536)
print(b"uid 65534 may not connect" in data, sock.recv(10) == b"")
"""
    done = subprocess.run([sys.executable, "-c", code, keeper], capture_output=True, text=True, timeout=30)
    assert done.stdout == "True True\n", done.stderr
    assert still_up(keeper)["parts"] == []


@pytest.mark.parametrize("length", [2**31, 2**32 - 1])
def test_f16_a_lying_length_costs_nothing(keeper, length):
    """F16, S2: 2^31 and -1; ProtocolError, memory flat, service up."""
    pid = still_up(keeper)["pid"]

    def resident():
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    before = resident()
    for _ in range(20):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(10)
            sock.connect(keeper)
            sock.send(struct.pack("<4sHHII", b"KVRF", 1, 0, length, 0) + b"x")
            assert str(length).encode() in sock.recv(65536)
    assert resident() - before < 8 << 20
    assert still_up(keeper)["parts"] == []


def test_f16_a_directory_that_everybody_can_write_is_refused(tmp_path):
    """F16, S1: start refused."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    done = subprocess.run(
        [sys.executable, "-m", "kvreuse.keeper", "--socket", str(folder / "k")],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1
    assert "writable by" in done.stderr
    assert "0700" in done.stderr
    assert list(folder.iterdir()) == []
