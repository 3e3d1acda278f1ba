"""Who is at the other end of a socket, and proof that it is gone: pidfds, never a pid alone (S5)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct
from pathlib import Path
from typing import Any

SO_PEERPIDFD = 77  # Linux 6.5, include/uapi/asm-generic/socket.h
_UCRED = struct.Struct("=iII")
_INFO = struct.Struct("=QQ11Ii")
_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, 64 bytes)
_INFO_EXIT = 8


class Process:
    """A peer process, named by its pidfd. Owns the pidfd."""

    def __init__(self, pid: int, pidfd: int, start: int, key: Any = None) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.start_time = start
        if key is None:
            status = os.fstat(pidfd)
            # From Linux 6.9 on a pidfd's inode is its process; before, all share one and pid with start time has to do.
            key = ("inode", status.st_dev, status.st_ino) if _inodes_tell() else ("start", pid, start)
        self.key = key

    def copy(self) -> Process:
        """Give an object of its own for the same process."""
        return Process(self.pid, os.dup(self.pidfd), self.start_time, self.key)

    def gone(self) -> bool:
        """Whether the process has ended."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def how_ended(self) -> str:
        """Say how it ended, as ", killed by signal 9"; "" where it has not, or the kernel does not tell."""
        # PIDFD_GET_INFO with PIDFD_INFO_EXIT: Linux 6.15, include/uapi/linux/pidfd.h; told once the parent has waited.
        info = bytearray(_INFO.pack(_INFO_EXIT, 0, *[0] * 12))
        try:
            fcntl.ioctl(self.pidfd, _PIDFD_GET_INFO, info)
        except OSError:
            return ""
        mask, _, *_, code = _INFO.unpack(info)
        if not mask & _INFO_EXIT:
            return ""
        return f", killed by signal {code & 0x7F}" if code & 0x7F else f", exit status {code >> 8 & 0xFF}"

    def close(self) -> None:
        """Close the pidfd."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _peer(sock: socket.socket) -> tuple[int, int]:
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(pid), int(uid)


def peer_uid(sock: socket.socket) -> int:
    """Return the uid of the process that connected, or that listens."""
    return _peer(sock)[1]


def peer_process(sock: socket.socket) -> Process:
    """Name the peer. Raises OSError where the kernel gives no proof of its end."""
    pid, _ = _peer(sock)
    try:
        pidfd = struct.unpack("=i", sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4))[0]
        start = start_time(pid)
    except OSError:
        if pid <= 0:  # of a pid namespace that we do not see
            raise
        # The pid could be reused between the two steps: the start time before and after must be one process's.
        start = start_time(pid)
        pidfd = os.pidfd_open(pid)
        if not start or start_time(pid) != start:
            os.close(pidfd)
            raise
    try:
        return Process(pid, pidfd, start)
    except BaseException:
        os.close(pidfd)
        raise


def start_time(pid: int) -> int:
    """Return a process's start in clock ticks since boot (field 22 of /proc/PID/stat); 0 if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def _inodes_tell() -> bool:
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int(minor.split("-")[0])) >= (6, 9)
