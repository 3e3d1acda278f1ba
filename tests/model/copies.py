"""A model of copies, in plain Python, written from O1 to O7 of DESIGN.md and include/kvreuse.h, and nothing else.

It does not predict when threads run, only what they may do: the driver tells it which operations have ended, which have
stopped at a pause and how, and the model says whether that was allowed, what it means for slots, claims,
mappings, and which bytes are where. Bytes that the rules leave open (a failed copy's destination, two copies at once
into the same place) are marked unknown, and only those.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .table_model import ModelError, TableModel

QUEUED, RUNNING, DONE, FAILED, CANCELLED = range(5)
FAULT_NONE, FAULT_PAUSE, FAULT_ERRNO, FAULT_SHORT, FAULT_SUBMIT = range(5)
WRITING, SEALED = 1, 2

STALE_HANDLE, HANDLE_CLOSED, SIZE_MISMATCH, RANGE, PERMISSION_DENIED = -2, -3, -5, -6, -8
BUSY, NOT_QUIESCENT, NOT_READY, STALE_BLOCK, CORRUPT = -12, -13, -14, -19, -20

HANDLE_STALE, ROLE_FORBIDS, GENERATION, SLOT_STATE, CONTENT_EPOCH = 5, 35, 51, 52, 107
COPY_DST_RANGE, COPY_SRC_RANGE, COPY_OVERLAP, COPY_CROSS_OVERLAP, COPY_READ_ONLY, QUEUE_CLOSING = range(79, 85)
QUEUE_NOT_QUIESCENT, OPERATION_RUNNING, AFTER_FAILED, MAPPING_IN_FLIGHT, SLOT_IN_FLIGHT = 85, 86, 88, 90, 91
SLOT_SPOILED, TABLE_IN_FLIGHT, COPY_SHORT, SLOT_GIVEN_UP, ENGINE_BLOCK_RANGE, OPERATION_CANCELLED = (
    92,
    93,
    94,
    96,
    102,
    104,
)

Refusals = set[tuple[int, int]]


@dataclass(eq=False)
class Buffer:
    """Bytes, as they have to be; `unknown` ones may be any until they are looked at."""

    name: str
    expected: np.ndarray[Any, np.dtype[np.uint8]]
    is_writable: bool = True
    unknown: np.ndarray[Any, np.dtype[np.bool_]] = field(init=False)

    def __post_init__(self) -> None:
        self.unknown = np.zeros(len(self.expected), bool)

    def look(self, actual: bytes) -> None:
        """Compare. What was unknown is known from now on: nobody may change it any more without a copy."""
        found = np.frombuffer(actual, np.uint8)
        wrong = (found != self.expected) & ~self.unknown
        if wrong.any():
            i = int(wrong.argmax())
            raise AssertionError(
                f"{self.name}: {wrong.sum()} bytes are wrong, first byte {i}: {found[i]}, expected {self.expected[i]}"
            )
        self.expected[:] = found
        self.unknown[:] = False


@dataclass(eq=False)
class Place:
    """A way to name a buffer: a mapping of it, or its address (mapping 0)."""

    buffer: Buffer
    mapping: int = 0
    address: int = 0
    is_gone: bool = False


class Piece(NamedTuple):
    """One entry's bytes, or a part of them."""

    dst: Buffer
    dst_offset: int
    src: Buffer
    src_offset: int
    nbytes: int
    index: int


@dataclass(eq=False)
class Event:
    """An eventfd that copies wait for."""

    fd: int
    is_set: bool = False


@dataclass(eq=False)
class Queue:
    handle: int
    threads: int
    fault: tuple[int, int, int] = (FAULT_NONE, 0, 0)  # for the next operation
    is_closing: bool = False
    is_closed: bool = False
    submitted: int = 0
    ends: dict[int, int] = field(default_factory=lambda: dict.fromkeys((DONE, FAILED, CANCELLED), 0))
    unlisted: list[set[Operation]] = field(default_factory=list)  # ended, by the step in which they did


@dataclass(eq=False)
class Slots:
    """What an operation has to do with slots of the part."""

    session: int
    is_in: bool
    slots: list[int]  # those that it names
    generations: list[int]
    entries: list[int]  # the caller's index of each
    commits: bool = False
    has_crc: bool = False
    stale: set[int] = field(default_factory=set)  # entries that were gone at the submit
    holds: bool = False  # IN: owns its slots; OUT: has a claim on each


@dataclass(eq=False)
class Operation:
    seq: int
    handle: int
    queue: Queue
    pieces: list[Piece]
    places: list[Place]
    after: list[Operation]
    events: list[Event]
    fault: tuple[int, int, int]
    slots: Slots | None = None
    state: int = QUEUED
    moved: int = 0  # bytes that surely are moved
    pause_is_over: bool = False
    is_cancelled: bool = False
    cancel_races: bool = False  # it may have begun when the cancel came
    is_quarantined: bool = False
    is_released: bool = False
    final: Any = None  # what the backend said of its end
    ancestors: set[Operation] = field(default_factory=set)

    @property
    def total(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def has_ended(self) -> bool:
        return self.state >= DONE

    @property
    def may_pause(self) -> bool:
        kind, _, value = self.fault
        return kind == FAULT_PAUSE and value < self.total and not self.pause_is_over

    @property
    def waits(self) -> bool:
        return bool(self.after or self.events)

    def between(self, first: int, last: int) -> list[Piece]:
        """The pieces of bytes first..last-1 of the operation."""
        found, start = [], 0
        for piece in self.pieces:
            low, high = max(first - start, 0), min(last - start, piece.nbytes)
            if low < high:
                found.append(
                    Piece(piece.dst, piece.dst_offset + low, piece.src, piece.src_offset + low, high - low, piece.index)
                )
            start += piece.nbytes
        return found


class Outcome(NamedTuple):
    """How an operation may end. Bytes: `none` of them was moved, `all` were, or `some`, nobody knows which."""

    state: int
    bytes: str
    status: int = 0
    detail: int = 0
    indexes: frozenset[int] = frozenset([-1])
    errno: int = 0


class Seen(NamedTuple):
    """How an operation has ended, as the backend says."""

    state: int
    moved: int
    failed_index: int
    status: int
    errno: int


class Work(NamedTuple):
    """Bytes first..last-1 of an operation, moved in this step; not `exact`: or some of them."""

    operation: Operation
    first: int
    last: int
    exact: bool = True


def _overlap(a: int, a_nbytes: int, b: int, b_nbytes: int) -> bool:
    return bool(a_nbytes and b_nbytes) and a < b + b_nbytes and b < a + a_nbytes


def _errno_status(code: int) -> int:
    return {12: -9, 28: -10}.get(code, -25)


class CopyModel:
    """Queues, operations, buffers and one part; `writer` and every other session are ids as of the table model."""

    def __init__(self, table: TableModel) -> None:
        self.table = table
        self.queues: list[Queue] = []
        self.operations: list[Operation] = []  # not released, or not ended
        self.given_up: set[int] = set()
        self.spoiled: dict[int, int] = {}  # slot: generation of which a copy failed
        self.has_crc: dict[int, bool] = {}  # of sealed slots
        self._seq = 0
        self._given_up_before: set[int] = set()
        self._owners_before: dict[int, list[Operation]] = {}

    # ---- who holds what ----

    def unended(self, queue: Queue | None = None) -> list[Operation]:
        return [o for o in self.operations if not o.has_ended and queue in (None, o.queue)]

    def owners(self, slot: int) -> list[Operation]:
        return [o for o in self.unended() if o.slots and o.slots.is_in and o.slots.holds and slot in o.slots.slots]

    def owned_slots(self) -> set[int]:
        return {s for o in self.unended() if o.slots and o.slots.is_in and o.slots.holds for s in o.slots.slots}

    def flights(self, place: Place) -> tuple[int, int]:
        """Operations that name a mapping, and how often they do."""
        named = [o.places.count(place) for o in self.unended()]
        return sum(n > 0 for n in named), sum(named)

    def users(self, buffer: Buffer) -> list[Operation]:
        return [o for o in self.unended() if any(place.buffer is buffer for place in o.places)]

    def of_session(self, session: int) -> list[Operation]:
        return [o for o in self.unended() if o.slots and o.slots.session == session]

    # ---- what a submit may refuse; an empty set: it must be taken ----

    def refuse_queue(self, queue: Queue) -> Refusals:
        if queue.is_closed:
            return {(STALE_HANDLE, HANDLE_STALE)}
        return {(HANDLE_CLOSED, QUEUE_CLOSING)} if queue.is_closing else set()

    def refuse_places(self, places: Iterable[Place], written: Iterable[Place]) -> Refusals:
        found: Refusals = {(STALE_HANDLE, HANDLE_STALE) for place in places if place.is_gone}
        return found | {(PERMISSION_DENIED, COPY_READ_ONLY) for place in written if not place.buffer.is_writable}

    def refuse_after(self, after: Iterable[Operation]) -> Refusals:
        return {(STALE_HANDLE, HANDLE_STALE) for operation in after if operation.is_released}

    def refuse_pieces(self, pieces: Sequence[Piece]) -> Refusals:
        found: Refusals = set()
        for piece in pieces:
            if piece.dst_offset < 0 or piece.dst_offset + piece.nbytes > len(piece.dst.expected):
                found.add((RANGE, COPY_DST_RANGE))
            if piece.src_offset < 0 or piece.src_offset + piece.nbytes > len(piece.src.expected):
                found.add((RANGE, COPY_SRC_RANGE))
        for i, a in enumerate(pieces):
            for j, b in enumerate(pieces):
                if i < j and a.dst is b.dst and _overlap(a.dst_offset, a.nbytes, b.dst_offset, b.nbytes):
                    found.add((RANGE, COPY_OVERLAP))
                if a.dst is b.src and _overlap(a.dst_offset, a.nbytes, b.src_offset, b.nbytes):
                    found.add((RANGE, COPY_CROSS_OVERLAP))
        return found

    def find_stale(self, slots: Slots) -> set[int]:
        """Entries whose slot is not as the caller carries it."""
        return {
            entry
            for entry, slot, generation in zip(slots.entries, slots.slots, slots.generations, strict=True)
            if generation != self.table.generations[slot]
            or not (self._is_writing(slot) and slot not in self.given_up if slots.is_in else self.is_content(slot))
        }

    def is_content(self, slot: int) -> bool:
        block = self.table.blocks.get(slot)
        return block is not None and block.state == SEALED and block.epoch == self.table.epoch

    def _is_writing(self, slot: int) -> bool:
        return slot in self.table.blocks and self.table.blocks[slot].state == WRITING

    def take(
        self,
        queue: Queue,
        handle: int,
        pieces: Sequence[Piece],
        places: Sequence[Place],
        after: Sequence[Operation],
        events: Sequence[Event],
        slots: Slots | None = None,
    ) -> Operation:
        """The operation was accepted."""
        fault, queue.fault = queue.fault, (FAULT_NONE, 0, 0)
        pieces = [piece for piece in pieces if piece.nbytes]
        operation = Operation(self._seq, handle, queue, pieces, list(places), list(after), list(events), fault, slots)
        self._seq += 1
        operation.ancestors = set(after).union(*(other.ancestors for other in after))
        queue.submitted += 1
        if slots and not slots.stale:
            slots.holds = True
            if not slots.is_in:
                self.table.claim_slots(slots.session, slots.slots, slots.generations)
        self.operations.append(operation)
        return operation

    # ---- what is done to operations ----

    def cancel(self, operation: Operation, races: bool = False) -> None:
        if not operation.has_ended:
            operation.is_cancelled = True
            operation.cancel_races = operation.cancel_races or races

    def resume(self, queue: Queue) -> None:
        for operation in self.unended(queue):
            operation.pause_is_over = True

    def close(self, queue: Queue) -> int:
        """Close with no time to wait: so many operations are in the way."""
        queue.is_closing = True
        found = self.unended(queue)
        for operation in found:
            operation.is_quarantined = True
        queue.is_closed = not found
        if queue.is_closed:
            queue.unlisted = []
        return len(found)

    def release(self, operation: Operation) -> None:
        assert operation.has_ended
        operation.is_released = True
        for step in operation.queue.unlisted:
            step.discard(operation)
        self.operations.remove(operation)

    def list_ended(self, queue: Queue, listed: Sequence[int], capacity: int) -> None:
        """Check an answer of queue_completed(): each once, none lost, ends of earlier steps first."""
        queue.unlisted = [step for step in queue.unlisted if step]
        assert len(listed) == min(capacity, sum(map(len, queue.unlisted))), "lost, or listed twice"
        for handle in listed:
            while not queue.unlisted[0]:
                queue.unlisted.pop(0)
            found = [o for o in queue.unlisted[0] if o.handle == handle]
            assert len(found) == 1, f"operation {handle} is listed, but it did not end next"
            queue.unlisted[0].discard(found[0])

    # ---- when everything stands still ----

    def is_ready(self, operation: Operation, states: dict[Operation, int]) -> bool:
        """A thread that is free has to take it up."""
        found = [states.get(other, other.state) for other in operation.after]
        if operation.is_cancelled or any(state in (FAILED, CANCELLED) for state in found):
            return True
        if operation.slots and operation.slots.stale:
            return True
        return all(state == DONE for state in found) and all(event.is_set for event in operation.events)

    def unsettled(
        self, states: dict[Operation, int], known: dict[Operation, int], paused: dict[Queue, int]
    ) -> Operation | None:
        """An operation that has something to do now, if nothing else happens; None: all stand still.

        `states`: of those that have not ended; `known`: of those that have in this step, too.
        """
        for queue in {o.queue for o in states}:
            mine = sorted((o for o in states if o.queue is queue), key=lambda o: o.seq)
            running = [o for o in mine if states[o] == RUNNING]
            for operation in running:
                if not operation.may_pause:
                    return operation
            for operation in mine:
                if states[operation] == QUEUED and (
                    operation.is_cancelled or (len(running) < queue.threads and self.is_ready(operation, known))
                ):
                    return operation
            if paused[queue] != len(running):
                return (running or mine)[0]
        return None

    # ---- a step: what was submitted, set, resumed or cancelled has taken its effect ----

    def begin_step(self) -> None:
        """Before the driver asks who has ended: what was so before that."""
        self._given_up_before = set(self.given_up)
        self._owners_before = {slot: self.owners(slot) for slot in self.owned_slots()}

    def end_step(self, ended: dict[Operation, Seen], states: dict[Operation, int], recency: Sequence[int]) -> None:
        """Learn who has ended, how all others stand, and how recent each slot is: in that order commits were made."""
        spoiled = {
            (o, slot)
            for o, seen in ended.items()
            if seen.state != DONE and o.slots and o.slots.is_in and o.slots.holds
            for slot in o.slots.slots
        }
        after = {**{o: seen.state for o, seen in ended.items()}, **states}
        work: list[Work] = []
        for operation, seen in ended.items():
            work += self._check_end(operation, seen, after, spoiled)
        for operation, state in states.items():
            if state == RUNNING and operation.state == QUEUED:
                work.append(self._check_begin(operation, after))
            assert not (state == QUEUED and operation.state == RUNNING), "an operation went back to QUEUED"
        self._move(work)
        for operation, seen in ended.items():
            operation.state, operation.is_quarantined = seen.state, False
            operation.queue.ends[seen.state] += 1
        for operation, state in states.items():
            operation.state = state
        for queue in {o.queue for o in ended}:
            queue.unlisted.append({o for o in ended if o.queue is queue})
        self._let_go(ended, recency)

    def _check_begin(self, operation: Operation, states: dict[Operation, int]) -> Work:
        """It has stopped at its pause, so it has begun."""
        assert operation.may_pause, "it runs without an end"
        assert not operation.is_cancelled or operation.cancel_races, "it began after its cancel"
        self._check_may_begin(operation, states)
        operation.moved = operation.fault[2]
        return Work(operation, 0, operation.fault[2])

    def _check_may_begin(self, operation: Operation, states: dict[Operation, int]) -> None:
        assert all(event.is_set for event in operation.events), "it began before its event"
        for other in operation.after:
            assert states.get(other, other.state) == DONE, "it began before what it waits for was DONE"
        slots = operation.slots
        if slots:
            assert not slots.stale, "it began with stale blocks"
            assert not (slots.is_in and self._given_up_before & set(slots.slots)), "it began after the abort"

    def _outcomes(
        self, operation: Operation, states: dict[Operation, int], spoiled: set[tuple[Operation, int]]
    ) -> list[Outcome]:
        """All ways in which it may have ended in this step."""
        slots = operation.slots
        found: list[Outcome] = []
        cancelled = Outcome(CANCELLED, "none", HANDLE_CLOSED, OPERATION_CANCELLED)
        if operation.state == QUEUED:
            if operation.is_cancelled:
                found.append(cancelled)
            never = []
            if any(states.get(other, other.state) in (FAILED, CANCELLED) for other in operation.after):
                never.append(Outcome(FAILED, "none", NOT_READY, AFTER_FAILED))
            if slots and slots.stale:
                never.append(Outcome(FAILED, "none", STALE_BLOCK, 0, frozenset(slots.stale)))
            if never or (operation.is_cancelled and not operation.cancel_races):
                return found + never
            if slots and slots.is_in:
                gone = self._entries_of(slots, self._given_up_before)
                if gone:
                    return [*found, Outcome(FAILED, "none", STALE_BLOCK, 0, gone)]
                gone = self._entries_of(slots, {slot for o, slot in spoiled if o is not operation})
                if gone:
                    found.append(Outcome(FAILED, "none", STALE_BLOCK, 0, gone))
            if any(not event.is_set for event in operation.events) or any(
                states.get(other, other.state) != DONE for other in operation.after
            ):
                return found
        elif operation.is_cancelled:
            found.append(cancelled._replace(bytes="some"))
        fault, index, value = operation.fault
        hit = {piece.index: piece.nbytes for piece in operation.pieces}.get(index)
        if fault == FAULT_ERRNO and hit is not None:
            return [*found, Outcome(FAILED, "some", _errno_status(value), 1, frozenset([index]), value)]
        if fault == FAULT_SHORT and hit is not None and value < hit:
            return [*found, Outcome(FAILED, "some", SIZE_MISMATCH, COPY_SHORT, frozenset([index]))]
        if slots and slots.commits:
            return found + self._commit_outcomes(operation, slots, states, spoiled)
        return [*found, Outcome(DONE, "all")]

    def _commit_outcomes(
        self,
        operation: Operation,
        slots: Slots,
        states: dict[Operation, int],
        spoiled: set[tuple[Operation, int]],
    ) -> list[Outcome]:
        found, may_be_done = [], True
        for slot, generation in zip(slots.slots, slots.generations, strict=True):
            others = [o for o in self._owners_before.get(slot, []) if o is not operation]
            if others:
                found.append(Outcome(FAILED, "all", BUSY, SLOT_IN_FLIGHT))
            if slot in self._given_up_before:
                found.append(Outcome(FAILED, "all", STALE_BLOCK, SLOT_GIVEN_UP))
            if any((o, slot) in spoiled for o in others):
                found.append(Outcome(FAILED, "all", STALE_BLOCK, SLOT_GIVEN_UP))
                found.append(Outcome(FAILED, "all", CORRUPT, SLOT_SPOILED))
            if self.spoiled.get(slot) == generation:
                found.append(Outcome(FAILED, "all", CORRUPT, SLOT_SPOILED))
            is_late = self._is_writing(slot) and self.table.blocks[slot].epoch != self.table.epoch
            if is_late:
                found.append(Outcome(FAILED, "all", STALE_BLOCK, CONTENT_EPOCH))
            # Others may have ended before it, but only well (O4).
            if (
                slot in self._given_up_before
                or is_late
                or self.spoiled.get(slot) == generation
                or any(states.get(o, o.state) != DONE for o in others)
            ):
                may_be_done = False
        return [*found, Outcome(DONE, "all")] if may_be_done else found

    @staticmethod
    def _entries_of(slots: Slots, gone: set[int]) -> frozenset[int]:
        return frozenset(i for i, slot in zip(slots.entries, slots.slots, strict=True) if slot in gone)

    def _check_end(
        self,
        operation: Operation,
        seen: Seen,
        states: dict[Operation, int],
        spoiled: set[tuple[Operation, int]],
    ) -> list[Work]:
        assert not operation.has_ended, "it ended twice"
        outcomes = self._outcomes(operation, states, spoiled)
        for outcome in outcomes:
            if (
                (outcome.state, outcome.status, outcome.errno) == (seen.state, seen.status, seen.errno)
                and seen.failed_index in outcome.indexes
                and (outcome.bytes != "none" or seen.moved == 0)
                and (outcome.bytes != "all" or seen.moved == operation.total)
                and seen.moved <= operation.total
            ):
                break
        else:
            raise AssertionError(f"operation {operation.seq} ended as {seen}; allowed: {outcomes}")
        if outcome.bytes == "none":
            return []
        if operation.state == QUEUED:
            self._check_may_begin(operation, states)
        operation.moved, first = operation.total, operation.moved
        return [Work(operation, first, operation.total, outcome.bytes == "all")]

    # ---- bytes ----

    @staticmethod
    def _is_ordered(a: Operation, b: Operation) -> bool:
        """All of `a` was moved before `b` began."""
        if a in b.ancestors:
            return True
        return a.queue is b.queue and a.queue.threads == 1 and not (a.waits or b.waits)

    def _move(self, work: list[Work]) -> None:
        work.sort(key=lambda w: w.operation.seq)
        pieces = [w.operation.between(w.first, w.last) for w in work]
        fuzzy = {i for i, w in enumerate(work) if not w.exact}
        for i, a in enumerate(pieces):
            for j in range(i + 1, len(pieces)):
                if self._is_ordered(work[i].operation, work[j].operation):
                    continue
                for x in a:
                    for y in pieces[j]:
                        for one, start, other, begin in (
                            (x.dst, x.dst_offset, y.dst, y.dst_offset),
                            (x.dst, x.dst_offset, y.src, y.src_offset),
                            (x.src, x.src_offset, y.dst, y.dst_offset),
                        ):
                            if one is other and _overlap(start, x.nbytes, begin, y.nbytes):
                                fuzzy |= {i, j}
        for i, moved in enumerate(pieces):
            for piece in moved:
                to = slice(piece.dst_offset, piece.dst_offset + piece.nbytes)
                since = slice(piece.src_offset, piece.src_offset + piece.nbytes)
                piece.dst.expected[to] = piece.src.expected[since]
                piece.dst.unknown[to] = True if i in fuzzy else piece.src.unknown[since]

    # ---- slots ----

    def _let_go(self, ended: dict[Operation, Seen], recency: Sequence[int]) -> None:
        commits = []
        for operation, seen in ended.items():
            slots = operation.slots
            if not slots or not slots.holds:
                continue
            slots.holds = False
            if not slots.is_in:
                self.table.release(slots.session, slots.slots)
            elif seen.state != DONE:
                self.spoiled.update(zip(slots.slots, slots.generations, strict=True))
                if slots.commits:
                    self.given_up |= {slot for slot in slots.slots if self._is_writing(slot)}
            elif slots.commits and slots.slots:
                commits.append(slots)
        for slots in sorted(commits, key=lambda s: recency[s.slots[0]]):
            self.table.commit(slots.slots, slots.generations)
            self.has_crc.update(dict.fromkeys(slots.slots, slots.has_crc))
        self._free_given_up()

    def _free_given_up(self) -> None:
        for slot in list(self.given_up):
            if not self.owners(slot):
                self.given_up.discard(slot)
                assert self.table.abort([slot], [self.table.generations[slot]]) == 1

    # ---- calls on the part ----

    def abort(self, slots: Sequence[int], generations: Sequence[int]) -> int:
        """So many are free at once. Those that copies write into are freed when these have ended."""
        count = 0
        for slot, generation in zip(slots, generations, strict=True):
            if slot < 0 or slot in self.given_up or not self._is_writing(slot):
                continue
            if self.table.generations[slot] != generation:
                continue
            if self.owners(slot):
                self.given_up.add(slot)
            else:
                count += self.table.abort([slot], [generation])
        return count

    def refuse_commit(self, slots: Sequence[int], generations: Sequence[int]) -> set[tuple[int, int, tuple[int, ...]]]:
        """(status, detail, values) of everything that is in the way of a commit."""
        found: set[tuple[int, int, tuple[int, ...]]] = set()
        for i, (slot, generation) in enumerate(zip(slots, generations, strict=True)):
            if slot < 0:
                continue
            owners = len(self.owners(slot))
            if owners:
                found.add((BUSY, SLOT_IN_FLIGHT, (i, slot, owners)))
            if slot in self.given_up:
                found.add((STALE_BLOCK, SLOT_GIVEN_UP, (i, slot)))
            if self.spoiled.get(slot) == generation:
                found.add((CORRUPT, SLOT_SPOILED, (i, slot)))
            try:
                # The table's model knows no owners; only what it says of this one slot.
                self._check_reserved(i, slot, generation)
            except ModelError as error:
                found.add((error.status, error.detail, error.values))
        return found

    def _check_reserved(self, i: int, slot: int, generation: int) -> None:
        if self.table.generations[slot] != generation:
            raise ModelError(STALE_BLOCK, GENERATION, i, slot, generation, self.table.generations[slot])
        if not self._is_writing(slot):
            state = self.table.blocks[slot].state if slot in self.table.blocks else 0
            raise ModelError(STALE_BLOCK, SLOT_STATE, i, slot, state, WRITING)
        self.table.check_epoch(i, slot)

    def commit(self, slots: Sequence[int], generations: Sequence[int], has_crc: bool) -> None:
        self.table.commit(slots, generations)
        self.has_crc.update({slot: has_crc for slot in slots if slot >= 0})
