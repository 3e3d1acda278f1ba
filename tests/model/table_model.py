"""A model of a part, in plain Python, written from include/kvreuse.h and DESIGN.md and from nothing else.

It predicts counts, keys, errors and which blocks go, but not which free slot a new block gets: the driver tells it with
`assign`, and the model checks that such a slot was free and that its generation went up by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

FREE, WRITING, SEALED = 0, 1, 2
BUSY, NO_SPACE, NOT_READY, RANGE, STALE_BLOCK = -12, -10, -14, -6, -19
SLOT_RANGE, SLOT_REPEATED, SLOT_BUSY, KEY_RESERVED, NO_FREE_SLOT = 46, 47, 48, 49, 50
GENERATION, SLOT_STATE, NOT_CLAIMED = 51, 52, 53
PART_DIRTY, CONTENT_EPOCH, SLOT_COUNT_RANGE = 41, 107, 24
NEVER_CONTENT = -1


class ModelError(Exception):
    """The call fails: `status`, `detail` and the detail's `values`, as of kvr_error."""

    def __init__(self, status: int, detail: int, *values: int) -> None:
        super().__init__(status, detail, values)
        self.status, self.detail, self.values = status, detail, values


@dataclass(eq=False)
class Block:
    """A slot that is not free."""

    key: bytes
    slot: int = -1
    state: int = WRITING
    epoch: int = NEVER_CONTENT  # of the part at the reserve, which the commit needs
    recency: int = 0
    claims: Counter[int] = field(default_factory=Counter)  # session -> count
    stamps: dict[int, int] = field(default_factory=dict)  # reader session -> stamp that the writer has not looked at

    @property
    def claimed(self) -> bool:
        return any(self.claims.values())


class TableModel:
    """One part with `slot_count` slots; `writer` is the writer's session id, every other session is a reader."""

    def __init__(self, slot_count: int, writer: int = 1) -> None:
        self.slot_count = slot_count
        self.capacity = slot_count
        self.writer = writer
        self.epoch = 1
        self.clock = 0
        self.blocks: dict[int, Block] = {}  # by slot
        self.by_key: dict[bytes, list[Block]] = {}
        self.generations = [0] * slot_count
        self.totals: Counter[str] = Counter()
        self.new: list[Block] = []  # reserved, not yet assigned to slots
        self.untold: dict[str, int] = {}  # since an expire: the counts as they stay until the writer's next call

    # ---- what there is ----

    def _content(self, block: Block) -> bool:
        return block.state == SEALED and block.epoch == self.epoch

    def find(self, key: bytes) -> Block | None:
        """The newest block of a key that counts."""
        found = [b for b in self.by_key.get(key, ()) if self._content(b)]
        return max(found, key=lambda b: b.recency, default=None)

    def counts(self) -> dict[str, int]:
        """The fields of kvr_table_stats that are content, by name."""
        blocks = self.blocks.values()
        return {
            "content_epoch": self.epoch,
            "slot_count": self.slot_count,
            **(self.untold or self._slot_counts()),
            "claimed_count": sum(b.claimed for b in blocks),
            **{
                f"{name}_total": self.totals[name]
                for name in ("stored", "evicted", "replaced", "cleared", "corrupt", "freed")
            },
        }

    def _slot_counts(self) -> dict[str, int]:
        blocks = self.blocks.values()
        return {
            "free_count": self.slot_count - len(self.blocks),
            "writing_count": sum(b.state == WRITING for b in blocks),
            "sealed_count": sum(self._content(b) for b in blocks),
            "stale_count": sum(b.state == SEALED and not self._content(b) for b in blocks),
        }

    def inventory(self) -> list[tuple[int, int, bytes]]:
        """(slot, generation, key) of every block that counts, by slot."""
        return sorted((b.slot, self.generations[b.slot], b.key) for b in self.blocks.values() if self._content(b))

    # ---- small steps ----

    def _stamp(self) -> int:
        self.clock += 1
        return self.clock

    def _free(self, block: Block) -> None:
        del self.blocks[block.slot]
        self.by_key[block.key].remove(block)

    def _sweep(self) -> None:
        for block in list(self.blocks.values()):
            if block.state == SEALED and not self._content(block) and not block.claimed:
                self._free(block)

    def _evictable(self, keep: Iterable[bytes]) -> list[Block]:
        """Content that nobody claims and that is not kept, as the writer last ordered it: oldest first."""
        kept = set(keep)
        blocks = [b for b in self.blocks.values() if self._content(b) and not b.claimed and b.key not in kept]
        return sorted(blocks, key=lambda b: b.recency)

    def _take_oldest(self, count: int, keep: Iterable[bytes]) -> list[Block]:
        """Evict up to `count`. A block with a newer touch of a reader is moved to where that puts it instead."""
        queue, gone = self._evictable(keep), []
        while queue and len(gone) < count:
            block = queue.pop(0)
            newest = max(block.stamps.values(), default=0)
            if newest > block.recency:
                block.recency = newest
                queue = sorted([*queue, block], key=lambda b: b.recency)
            else:
                gone.append(block)
        for block in gone:
            self._free(block)
        self.totals["evicted"] += len(gone)
        return gone

    def _check_slots(self, slots: Sequence[int], skip_negative: bool = False, end: int | None = None) -> None:
        end = self.slot_count if end is None else end
        for i, slot in enumerate(slots):
            if skip_negative and slot == -1:
                continue
            if not 0 <= slot < end:
                raise ModelError(RANGE, SLOT_RANGE, i, slot, end)

    def enter(self, session: int) -> None:
        """What comes first in most calls: after an expire the writer repairs, and readers are told to wait for that."""
        if self.untold:
            if session != self.writer:
                raise ModelError(NOT_READY, PART_DIRTY)
            self._sweep()
            self.untold = {}

    # ---- calls of any session ----

    def match(self, keys: Sequence[bytes]) -> int:
        return len(self._prefix(keys))

    def _prefix(self, keys: Sequence[bytes]) -> list[Block]:
        found = []
        for key in keys:
            block = self.find(key)
            if block is None:
                break
            found.append(block)
        return found

    def claim(self, session: int, keys: Sequence[bytes]) -> list[Block]:
        self.enter(session)
        found = self._prefix(keys)
        for block in found:
            block.claims[session] += 1
        return found

    def claim_slots(self, session: int, slots: Sequence[int], generations: Sequence[int]) -> None:
        self._check_slots(slots)
        self.enter(session)
        for i, (slot, generation) in enumerate(zip(slots, generations, strict=True)):
            if self.generations[slot] != generation:
                raise ModelError(STALE_BLOCK, GENERATION, i, slot, generation, self.generations[slot])
            block = self.blocks.get(slot)
            if block is None or not self._content(block):
                raise ModelError(STALE_BLOCK, SLOT_STATE, i, slot, block.state if block else FREE, SEALED)
        for slot in slots:
            self.blocks[slot].claims[session] += 1

    def release(self, session: int, slots: Sequence[int]) -> None:
        self._check_slots(slots)
        wanted: Counter[int] = Counter()
        for i, slot in enumerate(slots):
            wanted[slot] += 1
            held = self.blocks[slot].claims[session] if slot in self.blocks else 0
            if wanted[slot] > held:
                raise ModelError(STALE_BLOCK, NOT_CLAIMED, i, slot)
        for slot in slots:
            self.blocks[slot].claims[session] -= 1

    def touch(self, session: int, keys: Sequence[bytes]) -> int:
        self.enter(session)
        touched = 0
        for key in reversed(keys):
            block = self.find(key)
            if block is None:
                continue
            touched += 1
            if session == self.writer:
                block.recency = self._stamp()
            else:
                block.stamps[session] = self._stamp()
        return touched

    def drop(self, session: int) -> None:
        """The session is gone: its claims are void, and so are touches that the writer has not looked at."""
        for block in self.blocks.values():
            block.claims.pop(session, None)
            block.stamps.pop(session, None)

    # ---- calls of the writer ----

    def reserve(
        self, keys: Sequence[bytes], named: Sequence[int] | None = None, evict: bool = False, duplicate: bool = False
    ) -> tuple[list[Block | None], list[bytes]]:
        """Blocks to be written, one an entry, and the keys that went, oldest first. `assign` must follow."""
        if named is not None:
            self._check_slots(named, end=self.capacity)
        self.enter(self.writer)
        self._sweep()
        writing = {b.key for b in self.blocks.values() if b.state == WRITING}
        entries: list[Block | None] = []
        seen: set[bytes] = set()
        taken: set[int] = set()
        replaced: list[Block] = []
        for i, key in enumerate(keys):
            if key in seen or (not duplicate and self.find(key) is not None):
                entries.append(None)
                seen.add(key)
                continue
            if key in writing:
                raise ModelError(BUSY, KEY_RESERVED, i)
            seen.add(key)
            block = Block(key, epoch=self.epoch)
            if named is not None:
                slot = named[i]
                if slot in taken:
                    raise ModelError(RANGE, SLOT_REPEATED, i, slot)
                taken.add(slot)
                old = self.blocks.get(slot)
                if old is not None:
                    if old.state == WRITING or old.claimed:
                        raise ModelError(BUSY, SLOT_BUSY, i, slot)
                    replaced.append(old)
                block.slot = slot
            entries.append(block)
        self.new = [b for b in entries if b is not None]
        if named is not None:
            for old in replaced:
                self._free(old)
            self.totals["replaced"] += len(replaced)
            gone = sorted(replaced, key=lambda b: b.recency)
        else:
            gone = []
            needed, used = len(self.new), len(self.blocks)
            free = max(self.capacity - used, 0)
            missing = needed - free
            if missing > 0:
                evictable = self._evictable(keys)
                if not evict or missing > len(evictable):
                    self.new = []
                    raise ModelError(NO_SPACE, NO_FREE_SLOT, needed, free, len(evictable))
                gone = self._take_oldest(missing, keys)
                assert len(self.blocks) + needed <= max(self.capacity, used)
        return entries, [b.key for b in gone]

    def assign(self, entries: Sequence[Block | None], slots: Sequence[int], generations: Sequence[int]) -> None:
        """Learn which slots the new blocks got, and check that they could be given."""
        for block, slot, generation in zip(entries, slots, generations, strict=True):
            if block is None:
                assert (slot, generation) == (-1, 0), "an entry that needs no slot got one"
                continue
            assert block.slot in (-1, slot), "a named slot was not used"
            assert slot not in self.blocks, f"slot {slot} was not free"
            self.generations[slot] += 1
            assert generation == self.generations[slot], "the generation does not go up by one at a reserve"
            block.slot = slot
            self.blocks[slot] = block
            self.by_key.setdefault(block.key, []).append(block)
        self.new = []

    def commit(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        self._check_slots(slots, skip_negative=True)
        seen = set()
        for i, slot in enumerate(slots):
            if slot != -1 and slot in seen:
                raise ModelError(RANGE, SLOT_REPEATED, i, slot)
            seen.add(slot)
        self.enter(self.writer)
        for i, (slot, generation) in enumerate(zip(slots, generations, strict=True)):
            if slot == -1:
                continue
            if self.generations[slot] != generation:
                raise ModelError(STALE_BLOCK, GENERATION, i, slot, generation, self.generations[slot])
            state = self.blocks[slot].state if slot in self.blocks else FREE
            if state != WRITING:
                raise ModelError(STALE_BLOCK, SLOT_STATE, i, slot, state, WRITING)
            self.check_epoch(i, slot)
        for slot in slots:
            if slot != -1:
                block = self.blocks[slot]
                block.state, block.recency = SEALED, self._stamp()
                self.totals["stored"] += 1

    def check_epoch(self, i: int, slot: int) -> None:
        """What was reserved before the part was emptied must not count after it."""
        if self.blocks[slot].epoch != self.epoch:
            raise ModelError(STALE_BLOCK, CONTENT_EPOCH, i, slot, self.blocks[slot].epoch, self.epoch)

    def abort(self, slots: Sequence[int], generations: Sequence[int]) -> int:
        self._check_slots(slots, skip_negative=True)
        self.enter(self.writer)
        count = 0
        for slot, generation in zip(slots, generations, strict=True):
            block = self.blocks.get(slot)
            if block is not None and block.state == WRITING and self.generations[slot] == generation:
                self._free(block)
                count += 1
        return count

    def evict(self, count: int, keep: Sequence[bytes]) -> int:
        self.enter(self.writer)
        self._sweep()
        return len(self._take_oldest(count, keep))

    def clear(self) -> tuple[int, int]:
        self.enter(self.writer)
        self._sweep()
        content = [b for b in self.blocks.values() if self._content(b)]
        self.epoch += 1
        self.totals["cleared"] += len(content)
        kept = sum(b.claimed for b in content)
        self._sweep()
        return len(content) - kept, kept

    def invalidate(self, slots: Sequence[int], generations: Sequence[int]) -> int:
        self._check_slots(slots)
        self.enter(self.writer)
        count = 0
        for slot, generation in zip(slots, generations, strict=True):
            block = self.blocks.get(slot)
            if block is None or not self._content(block) or self.generations[slot] != generation:
                continue
            block.epoch = NEVER_CONTENT
            count += 1
            if not block.claimed:
                self._free(block)
        self.totals["corrupt"] += count
        return count

    def recover(self) -> int:
        """The keeper's step after a writer's death."""
        self.enter(self.writer)
        gone = [b for b in self.blocks.values() if b.state == WRITING]
        for block in gone:
            self._free(block)
        self.totals["freed"] += len(gone)
        return len(gone)

    def restore(self) -> tuple[int, int, int]:
        """(sealed, bad, freed). No record is bad here: the model knows no damage."""
        freed = self.recover()
        before = len(self.blocks)
        self._sweep()
        return sum(self._content(b) for b in self.blocks.values()), 0, freed + before - len(self.blocks)

    def expire(self) -> int:
        """The keeper empties the part beside the writer: nothing but the epoch and counts change."""
        content = sum(self._content(b) for b in self.blocks.values())
        self.epoch += 1
        self.untold = self.untold or self._slot_counts()
        self.totals["cleared"] += content
        return content

    def set_capacity(self, capacity: int) -> None:
        if not 1 <= capacity <= self.slot_count:
            raise ModelError(RANGE, SLOT_COUNT_RANGE, capacity, self.slot_count)
        self.capacity = capacity

    def reset(self) -> None:
        self.totals["cleared"] += sum(self._content(b) for b in self.blocks.values())
        self.recover()
        self.epoch += 1
        self._sweep()
