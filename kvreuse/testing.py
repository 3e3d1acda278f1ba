"""For tests and examples: a keeper, and copies that go wrong as told."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from ._select import backend as _backend
from .copies import QUEUE_FAULTS, CopyQueue
from .errors import KeeperUnavailableError, WaitTimeoutError
from .profile import Profile

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0


@contextlib.contextmanager
def keeper(profile: Profile | Mapping[str, Any] | str | os.PathLike[str] | None = None) -> Iterator[str]:
    """Run a keeper in a process of its own while the context lasts.

    Parameters
    ----------
    profile : Profile, dict, TOML text or path, optional
        Without one, reuse is off.

    Yields
    ------
    str
        The socket's path, for `kvreuse.connect`.

    Raises
    ------
    ProfileError
        The profile is wrong.
    KeeperUnavailableError
        The keeper did not start; the text is what it said.
    """
    with tempfile.TemporaryDirectory(prefix="kvr-", dir=_short_folder()) as folder:
        path = os.path.join(folder, "k")
        command = [sys.executable, "-m", "kvreuse.keeper", "--socket", path]
        if profile is not None:
            file = Path(folder, "profile.toml")
            file.write_bytes(_toml(profile))
            command += ["--profile", str(file)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert process.stderr is not None
        # What it says later must not fill the pipe.
        reader = threading.Thread(target=_pass_on, args=(process.stderr,), daemon=True)
        try:
            _wait_ready(process, path)
            reader.start()
            yield path
        finally:
            process.terminate()
            try:
                process.wait(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if reader.ident:
                reader.join(STOP_TIMEOUT_S)
            process.stderr.close()


class FaultyQueue(CopyQueue):
    """A CopyQueue whose next operation goes wrong as told. It runs on the queue's threads then, however small it is."""

    def __init__(self, threads: int = 1, profile: Profile | None = None) -> None:
        super().__init__(threads, profile, _flags=QUEUE_FAULTS)

    def pause_at(self, nbytes: int) -> None:
        """Stop the next operation when it has moved `nbytes` bytes, until `resume`; without that it hangs."""
        _backend.queue_fault(self.handle, 1, 0, nbytes)

    def fail_at(self, entry: int, code: int) -> None:
        """Let entry `entry` of the next operation fail with an errno."""
        _backend.queue_fault(self.handle, 2, entry, code)

    def short_at(self, entry: int, nbytes: int) -> None:
        """Let entry `entry` of the next operation move only `nbytes` bytes."""
        _backend.queue_fault(self.handle, 3, entry, nbytes)

    def fail_submit(self, code: int) -> None:
        """Let the next submit fail with an errno, after it took all that it needs."""
        _backend.queue_fault(self.handle, 4, 0, code)

    def resume(self) -> None:
        """Let all operations go on that were submitted so far."""
        _backend.queue_resume(self.handle)

    def wait_paused(self, timeout: float = 10.0) -> None:
        """Wait until an operation has stopped. Raises WaitTimeoutError."""
        deadline = time.monotonic() + timeout
        while not self.info().paused:
            if time.monotonic() > deadline:
                raise WaitTimeoutError(f"nothing has stopped within {timeout:g} s", status=-23, name="WAIT_TIMEOUT")
            time.sleep(0.001)


def _short_folder() -> str | None:
    """Where a socket's path fits in its 107 bytes."""
    return None if len(os.fsencode(tempfile.gettempdir())) < 80 else "/tmp"


def _pass_on(stream: IO[bytes]) -> None:
    for line in stream:
        sys.stderr.write(line.decode(errors="replace"))


def _toml(profile: Profile | Mapping[str, Any] | str | os.PathLike[str]) -> bytes:
    if isinstance(profile, str) and ("\n" in profile or "=" in profile):
        checked = Profile.from_toml(profile)
    elif isinstance(profile, (str, os.PathLike)):
        checked = Profile.load(profile)
    elif isinstance(profile, Profile):
        checked = profile
    else:
        checked = Profile.from_dict(profile)
    lines = []
    for section, values in checked.to_dict().items():
        lines.append(f"[{section}]")
        # JSON's strings, numbers, booleans and flat lists are TOML's.
        lines += [
            f"{key} = {msgspec.json.encode(value).decode()}" for key, value in values.items() if value is not None
        ]
    return ("\n".join(lines) + "\n").encode()


def _wait_ready(process: subprocess.Popen[bytes], path: str) -> None:
    assert process.stderr is not None
    poll = select.poll()
    poll.register(process.stderr, select.POLLIN | select.POLLHUP)
    said, deadline = b"", time.monotonic() + START_TIMEOUT_S
    while b": ready on " not in said or not said.endswith(b"\n"):
        data = (
            os.read(process.stderr.fileno(), 65536) if poll.poll(max(0.0, deadline - time.monotonic()) * 1000) else b""
        )
        if not data:
            raise KeeperUnavailableError(
                f"the keeper did not start on {path}: {said.decode(errors='replace').strip() or 'it said nothing'}",
                status=-17,
                name="KEEPER_UNAVAILABLE",
            )
        said += data
