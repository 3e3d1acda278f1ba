"""The policy of `kvreuse replay` (DESIGN.md, section 7) over again, without memory, parts or processes."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Sequence


@dataclasses.dataclass
class Counts:
    """What a replay must reach."""

    requests: int = 0
    block_refs: int = 0
    hit_blocks: int = 0
    evictions: int = 0
    stored: int = 0


class Cache:
    """One rank's blocks: ids from the least to the most recent."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.ids: OrderedDict[int, None] = OrderedDict()

    def leading(self, ids: Sequence[int]) -> int:
        """Count the leading ids that are present; a repeated one counts each time."""
        for count, block in enumerate(ids):
            if block not in self.ids:
                return count
        return len(ids)

    def play(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Play one request; return the ids stored, head to tail, and the ids evicted, oldest first."""
        keep = ids[: self.blocks]
        protected = set(keep)
        stored: list[int] = []
        evicted: list[int] = []
        missing = [block for block in dict.fromkeys(keep) if block not in self.ids]
        for block in missing:
            if len(self.ids) == self.blocks:
                victim = next(other for other in self.ids if other not in protected)
                del self.ids[victim]
                evicted.append(victim)
            self.ids[block] = None
            stored.append(block)
        for block in reversed(keep):
            self.ids.move_to_end(block)
        return stored, evicted


def play(requests: Iterable[Sequence[int]], blocks: int) -> Counts:
    """Play a trace; all ranks do the same, so one stands for them."""
    cache, counts = Cache(blocks), Counts()
    for ids in requests:
        counts.requests += 1
        counts.block_refs += len(ids)
        counts.hit_blocks += cache.leading(ids)
        stored, evicted = cache.play(ids)
        counts.stored += len(stored)
        counts.evictions += len(evicted)
    return counts
