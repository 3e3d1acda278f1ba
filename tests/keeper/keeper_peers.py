"""What the keeper's tests share: manifests, raw connections, keepers in a thread, and workers that can be killed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading

import kvreuse
from kvreuse._select import backend as local_backend
from kvreuse.keeper import protocol, server

TIMEOUT_S = 20.0
ON = "[reuse]\nenabled = true\n"


def manifest(**changes):
    fields = {
        "model": "m",
        "weights_id": "w1",
        "dtype": "bfloat16",
        "block_tokens": 16,
        "block_bytes": 4096,
        "layers": 1,
        "kv_heads": 1,
        "head_dim": 1,
        "layout": "bytes",
        "hash_scheme": "test",
        "hash_root": "0",
    }
    return kvreuse.Manifest(**{**fields, **changes})


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def fill(part, numbers) -> None:
    with part.reserve([key(n) for n in numbers]) as reservation:
        for i, n in enumerate(numbers):
            reservation.view(i)[:] = bytes([n % 256]) * part.block_bytes
        reservation.commit()


def fd_count(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


class Peer:
    """A connection that says what it likes."""

    def __init__(self, path: str, hello: bool = True) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(path)
        self.serial = 0
        if hello:
            assert isinstance(self.ask(protocol.Hello, abi=1, backend="test", version="0"), protocol.Welcome)

    def ask(self, message, fds=(), /, **fields):
        self.serial += 1
        protocol.send(self.sock, message(serial=self.serial, **fields), fds)
        return self.answer()

    def answer(self):
        """The next reply; None at the end of the connection. Its fds are closed."""
        got = protocol.recv_reply(self.sock, protocol.FDS_MAX)
        if got is None:
            return None
        protocol.close_fds(got[1])
        return got[0]

    def attach(self, attach_id=bytes(16), **changes):
        fields = {
            "attach_id": attach_id,
            "manifest": manifest().to_dict(),
            "rank": kvreuse.Rank().to_dict(),
            "group": "default",
            "blocks": 8,
            "provider": "host",
            "donate": 0,
        }
        return self.ask(protocol.Attach, **{**fields, **changes})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()


@contextlib.contextmanager
def keeper_thread(path: str, profile: str = ON):
    """A keeper in a thread of this process, so that faults can be planted in it."""
    service = server.Keeper(path, kvreuse.Profile.from_toml(profile), True, "test")
    wake_read, wake_write = os.pipe()
    service._selector.register(wake_read, 1, lambda: None)
    thread = threading.Thread(target=service.serve)
    thread.start()
    try:
        yield service
    finally:
        service.stop()
        os.write(wake_write, b"x")
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
        service.close()
        os.close(wake_read)
        os.close(wake_write)


class FailingBackend:
    """The backend, but its call number `step` (from 0) fails; `calls` counts them. Closing cannot fail."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.calls = 0

    def failed(self) -> bool:
        return self.calls > self.step

    def check(self, name: str) -> None:
        self.calls += 1
        if self.calls == self.step + 1:
            raise kvreuse.NoSpaceError(f"planted in {name}", status=-10, name="NO_SPACE")

    def __getattr__(self, name):
        function = getattr(local_backend, name)
        if name.endswith("_close"):
            return function

        def call(*args):
            self.check(name)
            return function(*args)

        return call


_WORKER = """
import json, sys
import kvreuse

do = json.loads(sys.argv[1])
manifest = kvreuse.Manifest.from_dict(do["manifest"])
rank = kvreuse.Rank.from_dict(do["rank"])
keeper = kvreuse.connect(do["path"], timeout=10)
try:
    part = keeper.attach(manifest, rank, blocks=do["blocks"], group=do["group"], timeout=10)
except kvreuse.KVReuseError as error:
    print(json.dumps({"error": type(error).__name__, "text": str(error)}), flush=True)
    sys.exit()
keys = [n.to_bytes(32, "big") for n in do["store"]]
if keys:
    with part.reserve(keys) as reservation:
        for i, n in enumerate(do["store"]):
            reservation.view(i)[:] = bytes([n % 256]) * part.block_bytes
        reservation.commit()
left = part.reserve([n.to_bytes(32, "big") for n in do["leave"]])
claim = part.claim(keys)
found = part.outcome
print(json.dumps({"kind": found.kind.value, "blocks": found.blocks, "reason": found.reason}), flush=True)
sys.stdin.read()
"""


class Worker:
    """A process that attaches, stores, leaves something unfinished and claimed, and then waits to be killed."""

    def __init__(self, path, *, rank=None, blocks=8, group="default", store=(), leave=(), **changes) -> None:
        do = {
            "path": path,
            "manifest": manifest(**changes).to_dict(),
            "rank": (rank or kvreuse.Rank()).to_dict(),
            "blocks": blocks,
            "group": group,
            "store": list(store),
            "leave": list(leave),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, json.dumps(do)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN | select.POLLHUP)
        line = self.process.stdout.readline() if poll.poll(TIMEOUT_S * 1000) else b""
        if not line:
            self.kill()
            raise AssertionError("the worker said nothing")
        self.said = json.loads(line)

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        self.process.stdin.close()
        self.process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
