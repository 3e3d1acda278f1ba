"""Which processes hold memory of a keeper, as /proc tells by the memfds' names. Imports no numpy."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Container
from pathlib import Path


@dataclasses.dataclass
class Holders:
    """What was found: fds and mappings, the bytes of each distinct memory by inode, and who holds it.

    `unreadable` are processes that could not be looked into: another user's.
    """

    fds: int = 0
    mappings: int = 0
    memory: dict[int, int] = dataclasses.field(default_factory=dict)
    pids: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    unreadable: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of distinct memory."""
        return sum(self.memory.values())

    def nbytes_beside(self, known: Container[int]) -> int:
        """Bytes of memory that a process other than the known pids holds."""
        return sum(size for inode, size in self.memory.items() if any(pid not in known for pid in self.pids[inode]))


def scan(label: str) -> Holders:
    """Look through /proc for memory of the keeper with this label. A region counts as its file's size."""
    needle, found = f"/memfd:kvreuse:{label}:", Holders()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            _scan_process(process, needle, found)
        except PermissionError:
            found.unreadable += 1
        except OSError:
            continue  # it has ended
    return found


def _scan_process(process: Path, needle: str, found: Holders) -> None:
    pid = int(process.name)
    for entry in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(entry).startswith(needle):
                status = os.stat(entry)
                found.fds += 1
                found.memory[status.st_ino] = status.st_size
                found.pids.setdefault(status.st_ino, set()).add(pid)
    for line in (process / "maps").read_text().splitlines():
        if needle not in line:
            continue
        span, _, _, _, inode, *_ = line.split()
        low, high = (int(number, 16) for number in span.split("-"))
        found.mappings += 1
        found.memory.setdefault(int(inode), high - low)
        found.pids.setdefault(int(inode), set()).add(pid)
