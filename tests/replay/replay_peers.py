"""What the replay's tests share: which processes and memory a run has, and parts to play on."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import re
from pathlib import Path

import kvreuse

BLOCK_BYTES = 24
_numbers = itertools.count()


def marked(mark: str) -> list[str]:
    """List the processes that carry the mark in their environment, but for this one: pid and command."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark.encode() in (process / "environ").read_bytes():
                    found.append(f"{process.name} {(process / 'cmdline').read_bytes()!r}")
    return found


def children(word: str) -> list[int]:
    """List this process's children with a word in their command line."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1]) if process.name.isdigit() else 0
            if parent == os.getpid() and word.encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return sorted(found)


def change_data(every: int) -> int:
    """Change every so-many-th byte of the data memory of this process's keeper, from outside; return how many."""
    (keeper,) = children("kvreuse.keeper")
    changed = 0
    for entry in Path(f"/proc/{keeper}/fd").iterdir():
        if re.search(r"memfd:kvreuse:\w+:\w+:data", os.readlink(entry)):
            with open(entry, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                for i in range(0, len(memory), every):
                    memory[i] ^= 0xFF
                    changed += 1
    assert changed
    return changed


def open_part(keeper, blocks):
    manifest = kvreuse.Manifest(
        model="m",
        weights_id="w",
        dtype="uint8",
        block_tokens=1,
        block_bytes=BLOCK_BYTES,
        layers=1,
        kv_heads=1,
        head_dim=1,
        layout="bytes",
        hash_scheme="h",
        hash_root="r",
        topology=kvreuse.Topology(),
    )
    return keeper.attach(manifest, kvreuse.Rank(), blocks=blocks, group=f"player-{next(_numbers)}", timeout=20)
