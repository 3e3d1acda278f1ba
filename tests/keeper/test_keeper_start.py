"""Where a keeper starts, where it refuses to, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys

import pytest
from keeper_peers import ON, TIMEOUT_S, Peer, Worker, manifest

import kvreuse
import kvreuse.testing


def start(*arguments, **options):
    command = [sys.executable, "-m", "kvreuse.keeper", *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)


def refused(*arguments):
    process = start(*arguments)
    _, said = process.communicate(timeout=TIMEOUT_S)
    assert "Traceback" not in said
    return process.returncode, said


def end(process, number=signal.SIGTERM):
    process.send_signal(number)
    _, said = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, said


@pytest.fixture
def running(folder):
    process = start("--socket", f"{folder}/k", "--label", "one")
    assert f"ready on {folder}/k (pid {process.pid}, label one)" in process.stderr.readline()
    yield f"{folder}/k", process
    if process.poll() is None:
        end(process, signal.SIGKILL)
    process.stderr.close()


def test_long_socket_path_is_refused(folder):
    """A path over 107 bytes; nothing is made."""
    code, said = refused("--socket", folder + "/" + "x" * 107)
    assert code == 2
    assert "at most 107 fit" in said
    assert os.listdir(folder) == []
    with pytest.raises(kvreuse.RangeError, match="at most 107 fit"):
        kvreuse.connect(folder + "/" + "x" * 107)


def test_107_bytes_are_enough(folder):
    path = folder + "/" + "x" * (106 - len(folder))
    process = start("--socket", path)
    assert "ready" in process.stderr.readline()
    kvreuse.connect(path).close()
    assert end(process)[0] == 0


def test_world_writable_directory_is_refused(folder):
    """S1, F16."""
    os.chmod(folder, 0o777)
    code, said = refused("--socket", f"{folder}/k")
    assert code == 1
    assert "writable by everybody (mode 777)" in said
    assert os.listdir(folder) == []


def test_directory_and_socket_are_private(folder):
    """S1."""
    process = start("--socket", f"{folder}/new/k", umask=0)
    assert "ready" in process.stderr.readline()
    assert stat.S_IMODE(os.stat(f"{folder}/new").st_mode) == 0o700
    assert stat.S_IMODE(os.stat(f"{folder}/new/k").st_mode) == 0o600
    assert end(process)[0] == 0
    assert os.listdir(f"{folder}/new") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_it_and_removes_the_socket(running, number):
    path, process = running
    assert end(process, number) == (0, "")
    assert os.listdir(os.path.dirname(path)) == []


def test_second_keeper_on_a_live_socket_is_refused(running):
    path, _ = running
    code, said = refused("--socket", path)
    assert code == 1
    assert f"a keeper is running on {path}" in said
    kvreuse.connect(path).close()


def test_stale_socket_is_replaced(running):
    path, process = running
    end(process, signal.SIGKILL)
    assert os.path.exists(path)
    other = start("--socket", path)
    assert "ready" in other.stderr.readline()
    kvreuse.connect(path).close()
    assert end(other)[0] == 0


def test_file_in_the_sockets_place_is_not_removed(folder):
    with open(f"{folder}/k", "w") as file:
        file.write("mine")
    code, said = refused("--socket", f"{folder}/k")
    assert code == 1
    assert "is no socket" in said
    assert os.listdir(folder) == ["k"]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[reuse]\nenabled = true\n[retention]\nttl = 1\n", "unknown key 'ttl' in [retention]: did you mean 'ttl_s'?"),
        ("[reuse\n", "no TOML"),
        ("[retention]\nttl_s = 1.0\n", "reuse"),
    ],
)
def test_bad_profile_is_refused(folder, text, match):
    """P2."""
    with open(f"{folder}/p.toml", "w") as file:
        file.write(text)
    code, said = refused("--socket", f"{folder}/k", "--profile", f"{folder}/p.toml")
    assert code == 2
    assert match in said
    assert os.listdir(folder) == ["p.toml"]


@pytest.mark.parametrize("label", ["a/b", "", "x" * 65, "a:b"])
def test_bad_label_is_refused(folder, label):
    assert refused("--socket", f"{folder}/k", "--label", label)[0] == 2


def test_two_keepers_of_one_label(folder):
    """F14: both work; the other is unaffected when one stops."""
    one, two = (start("--socket", f"{folder}/{name}", "--label", "same") for name in "ab")
    for process in (one, two):
        assert "ready" in process.stderr.readline()
    with kvreuse.connect(f"{folder}/b") as keeper, keeper.attach(manifest(), kvreuse.Rank(), blocks=8) as part:
        assert end(one)[0] == 0
        assert part.outcome.kind is kvreuse.OutcomeKind.EMPTY
        assert len(keeper.status()["parts"]) == 1
    assert end(two)[0] == 0


def test_keeper_imports_no_numpy(run_python):
    """DESIGN 4: server imports no numpy (and with it no BLAS thread)."""
    code = "import sys, kvreuse.keeper.server; print([m for m in sys.modules if m.startswith('numpy')])"
    done = run_python(code)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_running_keeper_has_one_thread_and_no_numpy(path, client):
    with client.attach(manifest(), kvreuse.Rank(), blocks=8):
        pid = client.status()["pid"]
        assert len(os.listdir(f"/proc/{pid}/task")) == 1
        with open(f"/proc/{pid}/maps") as maps:
            assert "numpy" not in maps.read()


def test_idle_keeper_exits(folder):
    """idle_exit_s counts from when nothing is held any more."""
    with open(f"{folder}/p.toml", "w") as file:
        file.write("[reuse]\nenabled = true\n[retention]\nttl_s = 0.1\nidle_exit_s = 0.2\n")
    process = start("--socket", f"{folder}/k", "--profile", f"{folder}/p.toml")
    assert "ready" in process.stderr.readline()
    goes_on = pytest.raises(subprocess.TimeoutExpired)
    with kvreuse.connect(f"{folder}/k") as keeper, keeper.attach(manifest(), kvreuse.Rank(), blocks=8), goes_on:
        process.wait(0.5)
    _, said = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, said) == (0, "")
    assert os.listdir(folder) == ["p.toml"]


def test_memory_ends_with_the_last_holder(folder):
    """K3: nothing has a name; SIGKILL of keeper and worker leaves only the socket's files."""
    process = start("--socket", f"{folder}/k", "--label", "gone")
    assert "ready" in process.stderr.readline()
    with Worker(f"{folder}/k", store=[1, 2]) as worker:
        end(process, signal.SIGKILL)
        assert memory_of("gone") == {str(worker.pid)}
    assert memory_of("gone") == set()


def memory_of(label):
    """Pids that hold memory of a keeper, by fd or mapping."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/maps") as maps:
                names = maps.read()
            for fd in os.listdir(f"/proc/{pid}/fd"):
                names += os.readlink(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue
        if f"kvreuse:{label}:" in names:
            found.add(pid)
    return found


ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
NOBODY = 65534


@ROOT
def test_another_uid_is_refused(running, run_python):
    """S1, F16: by the keeper, whatever the file's mode; the answer says why."""
    path, _ = running
    os.chmod(os.path.dirname(path), 0o755)
    os.chmod(path, 0o666)
    code = f"""
import os, sys, kvreuse.keeper.client, kvreuse.parts
os.setuid({NOBODY})
try:
    kvreuse.connect(sys.argv[1])
except kvreuse.PermissionDeniedError as error:
    print(error)
"""
    done = run_python(code, path)
    assert f"uid {NOBODY} may not connect" in done.stdout, done
    kvreuse.connect(path).close()


@ROOT
def test_keeper_of_another_uid_is_refused(folder, run_python):
    """S1: a worker does not take memory from anybody; nothing is sent to that keeper."""
    os.chmod(folder, 0o777)
    code = f"""
import os, socket, sys
os.setuid({NOBODY})
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.bind(sys.argv[1])
s.listen()
print("ready", flush=True)
a, _ = s.accept()
print(a.recv(100))
"""
    process = subprocess.Popen([sys.executable, "-c", code, f"{folder}/k"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    with pytest.raises(kvreuse.PermissionDeniedError, match=f"runs as uid {NOBODY}"):
        kvreuse.connect(f"{folder}/k")
    said, _ = process.communicate(timeout=TIMEOUT_S)
    assert said == "b''\n"


def test_keeper_without_free_fds_goes_on_when_it_has_some(folder):
    """E1, K7: no fd for a connection is no end of the service, and no busy loop."""
    limited = f"ulimit -n 24; exec {sys.executable} -m kvreuse.keeper --socket {folder}/k"
    process = subprocess.Popen(["bash", "-c", limited], stderr=subprocess.PIPE, text=True)
    assert "ready" in process.stderr.readline()
    peers = []
    for _ in range(30):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(f"{folder}/k")
        peers.append(sock)
    with pytest.raises(kvreuse.KeeperUnavailableError):
        kvreuse.connect(f"{folder}/k", timeout=0.3)
    for sock in peers:
        sock.close()
    with Peer(f"{folder}/k"):
        pass
    assert end(process)[0] == 0


def test_testing_keeper_takes_all_forms_of_a_profile(folder):
    forms = [None, ON, {"reuse": {"enabled": True}}, kvreuse.Profile.from_toml(ON), f"{folder}/p.toml"]
    with open(f"{folder}/p.toml", "w") as file:
        file.write(ON)
    for form in forms:
        with kvreuse.testing.keeper(form) as path, kvreuse.connect(path) as keeper:
            assert keeper.profile.reuse.enabled is (form is not None)
        assert not os.path.exists(path)
    with pytest.raises(kvreuse.ProfileError), kvreuse.testing.keeper("[reuse]\nenabled = 3\n"):
        pass
