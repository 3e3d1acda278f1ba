"""What a keeper says about what it holds: bytes of parts, status, ranks. Imports no numpy."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .._select import backend as _backend
from . import protocol

if TYPE_CHECKING:
    from ..manifest import Rank
    from .server import Group, Part, Session


def part_nbytes(blocks: int, block_bytes: int) -> int:
    """Bytes that a part can come to use. The claims are sparse: a part with one writer touches one row."""
    layout = _backend.table_layout(blocks, 0)
    return int(blocks * block_bytes + layout.table_nbytes + layout.row_nbytes)


def region_slots(blocks: int, regions: int) -> list[int]:
    """Slots in each of a part's data regions: ceil(blocks / regions), until there are no more."""
    each = -(-blocks // regions)
    return [min(blocks, (i + 1) * each) - min(blocks, i * each) for i in range(regions)]


def totals(parts: Iterable[Part]) -> dict[str, int]:
    """Sum the bytes of parts, and of those without a worker."""
    held = [(part.nbytes, part.writer is None) for part in parts]
    return {"bytes": sum(size for size, _ in held), "waiting_bytes": sum(size for size, waits in held if waits)}


def describe(part: Part) -> dict[str, Any]:
    """Describe a part for status."""
    session = part.writer
    state = "CREATING" if part.memory is None else "LIVE" if session else "WAITING"
    found = {
        "part_id": part.part_id.hex(),
        "group": part.group.name,
        "dp": part.group.dp,
        "rank": part.rank.to_dict(),
        "state": state,
        "blocks": part.blocks,
        "block_bytes": part.manifest.block_bytes,
        "bytes": part.nbytes,
        "sealed": 0,
        "free": 0,
        "claimed": 0,
        "evicted_total": 0,
        "corrupt_total": 0,
        "waiting_since": 0.0 if session else part.waiting_since,
        "died_at": part.died_at,
        "sessions": [],
    }
    if part.memory is not None:
        stats = _backend.table_stats(part.memory.table)
        found.update(
            sealed=stats.sealed_count,
            free=stats.free_count,
            claimed=stats.claimed_count,
            evicted_total=stats.evicted_total,
            corrupt_total=stats.corrupt_total,
        )
    sessions = [*([session] if session else []), *part.readers.values()]
    found["sessions"] = [_describe_session(item) for item in sessions]
    return found


def _describe_session(session: Session) -> dict[str, Any]:
    """Who holds a part: the process by pid and start time (0: of a pid namespace that is not seen), and how much."""
    is_writer = session.part.writer is session
    return {
        "role": "writer" if is_writer else "reader",
        "session": session.number,
        "pid": session.process.pid,
        "start_time": session.process.start_time,
        "bytes": session.nbytes,
        "connected": session.client is not None,
        "outcome": session.confirmed if is_writer else "",
        "progress": list(session.progress),
        "stalled": session.is_stalled,
    }


def own_use() -> dict[str, int]:
    """Count what this keeper itself has open: its handles' fds and mappings, and all fds of its process."""
    counts = _backend.handle_counts()
    return {
        "keeper_fds": len(os.listdir("/proc/self/fd")) - 1,
        "keeper_memory_fds": counts.fds,
        "keeper_mappings": counts.mappings + 2 * counts.tables,
    }


def rank_state(group: Group, index: int, rank: Rank, reason: str) -> protocol.RankState:
    """Describe one rank of a group; `reason` says why it is not ready."""
    part = group.parts.get(index)
    session = part.writer if part else None
    return protocol.RankState(
        index=index,
        rank=rank.to_dict(),
        ready=not reason,
        reason=reason,
        pid=session.process.pid if session else 0,
        blocks=part.blocks if part else group.refused[index][0] if index in group.refused else 0,
        progress=session.progress if session else (0, 0),
        stalled=session.is_stalled if session else False,
        died_at=part.died_at if part else 0.0,
        ready_at=session.ready_at if session else 0.0,
    )
