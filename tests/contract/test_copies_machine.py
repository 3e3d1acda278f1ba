"""Copies in any order, on both backends, against a model of O1 to O7: states, owners, claims, counters, every byte."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import gc
import mmap
import os
import select
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from model import copies as m
from model.table_model import ModelError, TableModel
from part_memory import EVICT, READ_WRITE, READER, WRITER, PartMemory, Session, is_detail, longs

from kvreuse import errors

BOUND_S = 10.0  # of every wait
SLOTS, BLOCK, REGIONS = 5, 64, 2
BUFFER = 4 * BLOCK
FOREIGN, BORROWED, MAPPED = 3, 1, (2, 1)  # buffers; how many mappings each region has
WRITER_ID, READER_ID = 1, 2
KEYS = [bytes([i]) * 8 for i in range(1, 7)]
QUEUE_FAULTS, COMMIT, CHECKSUM, VERIFY, AFTER_FD, AFTER_OPERATION = 1, 1, 2, 4, 1, 2
IN, OUT = 1, 2
TIME = st.integers(0, 255)

# ---- what is drawn ----

_lengths = st.sampled_from([64, 64, 56, 40, 17, 8, 1, 0])
_entry = st.tuples(
    st.integers(0, 3), st.sampled_from([0] * 9 + [5, 8]), st.sampled_from([0, 64, 128, 192, 7, 100, 197]), _lengths
)
_entries = st.lists(_entry, max_size=4, unique_by=lambda entry: entry[0])
_CODES = [errno.EIO, errno.ENOMEM, errno.ENOSPC]
_FAULTS = [m.FAULT_NONE] * 6 + [m.FAULT_PAUSE] * 9 + [m.FAULT_ERRNO, m.FAULT_SHORT] * 2 + [m.FAULT_SUBMIT]
_fault = st.tuples(st.sampled_from(_FAULTS), st.integers(0, 3), st.integers(0, 120))
_after = st.tuples(st.sampled_from([0] * 6 + [1, 1, 2]), TIME, TIME, st.sampled_from([False] * 6 + [True]))
_segments = st.sampled_from(["whole", "halves", "part", "none", "whole", "halves"])
_submit = st.tuples(TIME, TIME, _entries, _fault, _after, st.sampled_from([False, False, False, True]))


def pick(things: Any, number: int) -> Any:
    things = list(things)
    return things[number % len(things)]


def words(place: m.Place, is_writable: bool | None = None) -> list[int]:
    if place.mapping:
        return [place.mapping, 0, 0, 0, 0]
    return [0, place.address, BUFFER, -1, int(place.buffer.is_writable)]


def error_of(call: Any, *arguments: Any) -> errors.KVReuseError:
    try:
        found = call(*arguments)
    except errors.KVReuseError as error:
        return error
    raise AssertionError(f"{call.__name__}{arguments} was not refused: {found!r}")


def refused(status: int, detail: int, values: tuple[int, ...], call: Any, *arguments: Any) -> None:
    error = error_of(call, *arguments)
    assert is_detail(error, status, detail, values), (
        f"{call.__name__}: {error!r}; expected {status}, {detail}, {values}"
    )


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


# What an example leaves behind that failed: native threads may still write into it.
_graveyard: list[Any] = []


def only_if(condition: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A rule that does nothing where it has nothing to do.

    Not a precondition of hypothesis: what has ended by now depends on threads, and a sequence has to be drawn alike
    each time.
    """

    def decorate(rule_body: Any) -> Any:
        @functools.wraps(rule_body)
        def run(self: Any, **drawn: Any) -> None:
            if condition(self):
                rule_body(self, **drawn)

        return run

    return decorate


class Copies(RuleBasedStateMachine):
    """One part with a writer and a reader, buffers of all sorts, up to two queues, and whatever is on its way."""

    backend: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.is_clean = False  # nothing has failed
        b = self.backend
        self.baseline = (b.copy_counts(), b.handle_counts(), open_fds())
        self.part = PartMemory(b, SLOTS, BLOCK, REGIONS)
        self.sessions: dict[int, Session] = {
            WRITER_ID: self.part.open(b, WRITER, WRITER_ID, 0, lock_wait_ns=2 * 10**9),
            READER_ID: self.part.open(b, READER, READER_ID, 1, lock_wait_ns=2 * 10**9),
        }
        self.model = m.CopyModel(TableModel(SLOTS, WRITER_ID))
        per = self.part.slots_per_region
        self.data = [m.Buffer(f"data{i}", np.zeros(per * BLOCK, np.uint8)) for i in range(REGIONS)]
        self.memory: dict[m.Buffer, Any] = {}  # foreign: an mmap; else an fd of the region
        self.regions: list[int] = []
        self.places: list[m.Place] = []
        self.drawn = 0
        for i in range(FOREIGN + BORROWED):
            self.places.append(self.make_foreign(i < FOREIGN))
        for i, mappings in enumerate(MAPPED):
            region = b.host_allocate(BUFFER, 1, f"kvreuse-copies{i}", None).handle
            self.regions.append(region)
            buffer = m.Buffer(f"region{i}", np.zeros(BUFFER, np.uint8))
            self.memory[buffer] = b.region_export(region)
            self.fill(buffer)
            for _ in range(mappings):
                self.places.append(m.Place(buffer, b.region_map(region, READ_WRITE, 0).handle))
        self.region_of = {self.places[-3]: 0, self.places[-2]: 0, self.places[-1]: 1}
        self.reservations: list[tuple[list[int], list[int]]] = []
        self.claims: list[tuple[int, list[int], list[int]]] = []  # session, slots, generations
        self.known: list[tuple[list[int], list[int]]] = []  # what was claimed once
        self.events: list[m.Event] = []
        self.released: list[m.Operation] = []
        self.has_forked = False
        self.has_work = True
        self.is_clean = True

    # ---- memory ----

    def make_foreign(self, is_writable: bool) -> m.Place:
        memory = mmap.mmap(-1, mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        buffer = m.Buffer("foreign", np.zeros(BUFFER, np.uint8), is_writable)
        self.memory[buffer] = memory
        self.fill(buffer)
        return m.Place(buffer, 0, address)

    def fill(self, buffer: m.Buffer) -> None:
        self.drawn += 1
        content = np.random.default_rng(self.drawn).integers(1, 256, BUFFER, np.uint8)
        memory = self.memory[buffer]
        if isinstance(memory, int):
            os.pwrite(memory, content.tobytes(), 0)
        else:
            memory[:BUFFER] = content.tobytes()
        buffer.expected[:] = content

    def read(self, buffer: m.Buffer) -> bytes:
        memory = self.memory[buffer]
        return os.pread(memory, BUFFER, 0) if isinstance(memory, int) else memory[:BUFFER]

    # ---- what the rules choose from ----

    def queues(self) -> list[m.Queue]:
        return [queue for queue in self.model.queues if not queue.is_closed]

    def draw_queue(self, number: int) -> m.Queue:
        """One that takes work, most of the time."""
        good = [queue for queue in self.model.queues if not queue.is_closing]
        return pick(good if good and number % 16 else self.model.queues[-3:], number)

    def draw_writable(self, number: int) -> m.Place:
        """One that can be written, most of the time."""
        good = [place for place in self.places if place.buffer.is_writable]
        return pick(good if number % 16 else self.places, number)

    def start(self) -> None:
        """A rule begins."""
        self.is_clean = False

    def draw_after(self, after: tuple[int, int, int, bool]) -> tuple[list[m.Operation], list[m.Event]]:
        count, *numbers, has_event = after
        # Now and then one that has ended, or whose handle is gone.
        known = self.model.unended() or self.model.operations
        others = [pick(self.released or known if n == 255 else known, n) for n in numbers[:count] if known]
        events = []
        if has_event:
            if not self.events or (self.events[-1].is_set and len(self.events) < 4):
                self.events.append(m.Event(os.eventfd(0)))
            events.append(self.events[-1])
        return list(dict.fromkeys(others)), events

    @contextlib.contextmanager
    def after_words(self, others: list[m.Operation], events: list[m.Event]) -> Any:
        """As the backend takes it; the fds that it is given are closed at once."""
        fds = [os.dup(event.fd) for event in events]
        found: list[int] = []
        for other in others:
            found += [AFTER_OPERATION, other.handle, 0]
        for fd in fds:
            found += [AFTER_FD, fd, 0]
        try:
            yield longs(found)
        finally:
            for fd in fds:
                os.close(fd)

    def set_fault(self, queue: m.Queue, drawn: tuple[int, int, int]) -> None:
        fault, index, value = drawn
        if fault in (m.FAULT_ERRNO, m.FAULT_SUBMIT):
            value = pick(_CODES, value)
        if fault and not queue.is_closed:
            self.backend.queue_fault(queue.handle, fault, index, value)
            queue.fault = (fault, index, value)

    def submit(self, queue: m.Queue, refusals: m.Refusals, call: Any, arguments: tuple[Any, ...], rest: Any) -> Any:
        """Call; the model says what may come of it."""
        others, events = rest[2], rest[3]
        refusals = refusals | self.model.refuse_queue(queue) | self.model.refuse_after(others)
        before = self.backend.copy_counts()
        with self.after_words(others, events) as after:
            if refusals or queue.fault[0] == m.FAULT_SUBMIT:
                error = error_of(call, queue.handle, *arguments, after)
                if refusals:
                    assert any(is_detail(error, *refusal) for refusal in refusals), f"{error!r}; {refusals}"
                else:
                    assert error.native_code == queue.fault[2], repr(error)
                    queue.fault = (m.FAULT_NONE, 0, 0)
                found = self.backend.copy_counts()
                assert found.operations == before.operations, "a submit that was refused left an operation"
                assert found.in_flight <= before.in_flight
                return None
            handle = call(queue.handle, *arguments, after)
        self.has_work = True
        return self.model.take(queue, handle, *rest)

    # ---- queues ----

    @initialize(threads=st.integers(1, 2), blocks=st.integers(0, SLOTS), checksum=st.booleans())
    def begin(self, threads: int, blocks: int, checksum: bool) -> None:
        """A queue, and some blocks that are there."""
        self.open_queue(threads)
        if blocks:
            self.reserve(KEYS[:blocks], 0, None)
            self.commit(0, checksum)
            self.reservations = []

    @rule(
        call=st.sampled_from(["open", "fault", "completed", "completed", "completed", "close"]),
        number=TIME,
        value=st.integers(0, 5),
        fault=_fault,
    )
    def call_queue(self, call: str, number: int, value: int, fault: Any) -> None:
        self.start()
        queue = pick(self.queues(), number)
        if call == "open" and len(self.queues()) < 2:
            self.open_queue(1 + value % 2)
        elif call == "fault":
            self.set_fault(queue, fault)
        elif call == "completed":
            self.drain(queue, value)
        else:
            self.close_queue(number, value < 3)

    def open_queue(self, threads: int) -> None:
        self.start()
        handle = self.backend.queue_open(threads, QUEUE_FAULTS)
        self.model.queues.append(m.Queue(handle, threads))

    @rule(number=TIME)
    @only_if(lambda self: any(o.state == m.RUNNING or o.may_pause for o in self.model.unended()))
    def resume(self, number: int) -> None:
        self.start()
        queue = pick([queue for queue in self.queues() if self.model.unended(queue)], number)
        self.backend.queue_resume(queue.handle)
        self.model.resume(queue)
        self.has_work = True

    def drain(self, queue: m.Queue, capacity: int) -> None:
        """O1: each end is told once, in order; the fd is readable as long as there is something to tell."""
        listed = longs([0] * capacity)
        count = self.backend.queue_completed(queue.handle, listed)
        self.model.list_ended(queue, listed[:count].tolist(), capacity)
        if capacity and not any(queue.unlisted):
            assert not self.is_readable(queue), "the fd is readable although all was told"

    def is_readable(self, queue: m.Queue) -> bool:
        poll = select.poll()
        poll.register(self.backend.queue_info(queue.handle).fd, select.POLLIN)
        return bool(poll.poll(0))

    def close_queue(self, number: int, sure: bool) -> None:
        """O6: closing with operations on their way is refused, and keeps all as it is."""
        queues = [q for q in self.queues() if sure or q.is_closing]
        if not queues:
            return
        queue = pick(queues, number)
        unended = self.model.close(queue)
        if unended:
            values = (queue.handle, unended, 0)
            refused(m.NOT_QUIESCENT, m.QUEUE_NOT_QUIESCENT, values, self.backend.queue_close, queue.handle, 0)
            return
        self.backend.queue_close(queue.handle, 0)
        refused(m.STALE_HANDLE, m.HANDLE_STALE, (queue.handle,), self.backend.queue_info, queue.handle)
        if not self.queues():
            self.open_queue(1 + number % 2)

    # ---- copies ----

    @rule(number=TIME, batches=st.lists(_submit, min_size=1, max_size=3))
    @only_if(lambda self: self.model.queues)
    def copy(self, number: int, batches: list[Any]) -> None:
        """Submit, and now and then cancel at once."""
        self.start()
        queue = self.draw_queue(number)
        for to, since, entries, fault, after, cancels in batches:
            self.set_fault(queue, fault)
            dst, src = self.draw_writable(to), pick(self.places, since)
            others, events = self.draw_after(after)
            pieces = [
                m.Piece(dst.buffer, cell * BLOCK + shift, src.buffer, offset, nbytes, i)
                for i, (cell, shift, offset, nbytes) in enumerate(entries)
            ]
            refusals = (
                self.model.refuse_places((dst, src), (dst,)) | self.model.refuse_pieces(pieces)
            )  # fmt: skip
            arrays = (
                longs(words(dst)),
                longs(words(src)),
                longs(piece.dst_offset for piece in pieces),
                longs(piece.src_offset for piece in pieces),
                longs(piece.nbytes for piece in pieces),
            )
            rest = (pieces, (dst, src), others, events)
            operation = self.submit(queue, refusals, self.backend.copy_submit, arrays, rest)
            if operation is not None and cancels:
                self.backend.operation_cancel(operation.handle)
                self.model.cancel(operation, races=True)

    copy_again = copy_once_more = copy

    def copy_slots(
        self,
        queue: m.Queue,
        slots: m.Slots,
        all_slots: list[int],
        all_generations: list[int],
        segments: str,
        engines: tuple[int, int],
        blocks: list[int],
        fault: Any,
        after: Any,
        flags: int,
    ) -> m.Operation | None:
        session = self.sessions[slots.session]
        draw = self.draw_writable if not slots.is_in else lambda number: pick(self.places, number)
        first, second = (draw(number) for number in engines)
        if first.buffer is second.buffer:
            second = first
        # place, offset of block 0, offset in the slot, bytes
        layout = {
            "whole": [(first, 0, 0, 64)],
            "halves": [(first, 0, 0, 32), (second, 32, 32, 32)],
            "part": [(first, 8, 16, 24)],
            "none": [],
        }[segments]
        blocks = (blocks * len(all_slots))[: len(all_slots)]
        pieces = []
        refusals: m.Refusals = set()
        per = self.part.slots_per_region
        for place, offset, slot_offset, nbytes in layout:
            for entry, slot in zip(slots.entries, slots.slots, strict=True):
                engine_offset = offset + blocks[entry] * BLOCK
                if engine_offset + nbytes > BUFFER:
                    refusals.add((m.RANGE, m.ENGINE_BLOCK_RANGE))
                ours = (self.data[slot // per], slot % per * BLOCK + slot_offset)
                theirs = (place.buffer, engine_offset)
                ends = (*ours, *theirs) if slots.is_in else (*theirs, *ours)
                pieces.append(m.Piece(*ends, nbytes, entry))
        places = [place for place, *_ in layout]
        refusals |= self.model.refuse_places(places, () if slots.is_in else places)
        if not refusals:
            refusals |= self.model.refuse_pieces(pieces)
        if slots.is_in and slots.session == READER_ID:
            refusals.add((m.PERMISSION_DENIED, m.ROLE_FORBIDS))
            refusals.add((m.PERMISSION_DENIED, m.COPY_READ_ONLY))
        self.set_fault(queue, fault)
        others, events = self.draw_after(after)
        slots.stale = self.model.find_stale(slots)
        described: list[int] = []
        for place, offset, slot_offset, nbytes in layout:
            described += [*words(place), offset, BLOCK, slot_offset, nbytes]
        arrays = (
            session.table,
            IN if slots.is_in else OUT,
            longs(session._mappings),
            longs(all_slots),
            longs(all_generations),
            longs(blocks),
            longs(described),
            flags,
        )
        return self.submit(queue, refusals, self.backend.copy_slots, arrays, (pieces, places, others, events, slots))

    @rule(
        numbers=st.tuples(TIME, st.integers(0, 3), TIME, TIME),
        segments=_segments,
        blocks=st.lists(st.sampled_from([0, 1, 2, 3, 0, 1, 2, 3, 4]), min_size=1, max_size=3),
        commit=st.sampled_from([0, COMMIT, COMMIT, COMMIT | CHECKSUM]),
        fault=_fault,
        after=_after,
        session=st.sampled_from([WRITER_ID] * 9 + [READER_ID]),
    )
    @only_if(lambda self: self.model.queues and self.reservations)
    def copy_in(
        self, numbers: Any, segments: str, blocks: list[int], commit: int, fault: Any, after: Any, session: int
    ) -> None:
        """O2, O4, O7: into reserved slots, the last reservation's or an older one's."""
        self.start()
        slots, generations = self.reservations[-1 - numbers[1] % len(self.reservations)]
        self.fill_slots(slots, generations, numbers, segments, blocks, commit, fault, after, session)

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True),
        numbers=st.tuples(TIME, st.just(0), TIME, TIME),
        segments=_segments,
        blocks=st.permutations([0, 1, 2, 3]),
        commit=st.sampled_from([0, 0, COMMIT, COMMIT | CHECKSUM]),
        fault=_fault,
        after=_after,
    )
    @only_if(lambda self: self.model.queues)
    def store(
        self, keys: list[bytes], numbers: Any, segments: str, blocks: list[int], commit: int, fault: Any, after: Any
    ) -> None:
        """O2, O4: reserve and copy in, and commit with it, as Part.store does, or later."""
        self.start()
        before = self.reservations
        self.reserve(keys, EVICT, None)
        if self.reservations is not before:
            self.fill_slots(*self.reservations[-1], numbers, segments, blocks, commit, fault, after, WRITER_ID)

    store_again = store_once_more = store

    def fill_slots(
        self,
        slots: list[int],
        generations: list[int],
        numbers: Any,
        segments: str,
        blocks: list[int],
        commit: int,
        fault: Any,
        after: Any,
        session: int,
    ) -> None:
        queue = self.draw_queue(numbers[0])
        entries = [i for i, slot in enumerate(slots) if slot >= 0]
        named = m.Slots(
            session,
            True,
            [slots[i] for i in entries],
            [generations[i] for i in entries],
            entries,
            bool(commit & COMMIT),
            bool(commit & CHECKSUM),
        )
        self.copy_slots(queue, named, slots, generations, segments, numbers[2:], blocks, fault, after, commit)

    @rule(
        numbers=st.tuples(TIME, st.integers(0, 3), TIME, TIME),
        segments=_segments,
        blocks=st.permutations([0, 1, 2, 3, 0]),
        flags=st.sampled_from([0, 0, VERIFY]),
        fault=_fault,
        after=_after,
        session=st.sampled_from([WRITER_ID, READER_ID]),
        repeats=st.sampled_from([False] * 9 + [True]),
    )
    @only_if(lambda self: self.model.queues and (self.known or self.model.table.inventory()))
    def copy_out(
        self,
        numbers: Any,
        segments: str,
        blocks: list[int],
        flags: int,
        fault: Any,
        after: Any,
        session: int,
        repeats: bool,
    ) -> None:
        """O2, O7: blocks, claimed or not, there or not; the operation claims them for itself."""
        self.start()
        queue = self.draw_queue(numbers[0])
        present = self.model.table.inventory()[: 1 + numbers[1]]
        slots, generations = [slot for slot, *_ in present], [generation for _, generation, _ in present]
        if self.known and (numbers[0] % 2 or not present):
            slots, generations = self.known[-1 - numbers[1] % len(self.known)]
        if repeats:
            slots, generations = slots + slots[:1], generations + generations[:1]
        named = m.Slots(session, False, list(slots), list(generations), list(range(len(slots))))
        self.copy_slots(queue, named, slots, generations, segments, numbers[2:], blocks, fault, after, flags)

    copy_out_again = copy_out

    # ---- operations ----

    @rule(number=TIME)
    @only_if(lambda self: self.model.unended())
    def cancel(self, number: int) -> None:
        """O3: a request; one that stands still at a byte goes on to hold what it names."""
        self.start()
        operation = pick(self.model.operations if number % 8 == 7 else self.model.unended(), number)
        self.backend.operation_cancel(operation.handle)
        self.model.cancel(operation)
        self.has_work = True

    @rule(number=TIME, count=st.integers(1, 4))
    @only_if(lambda self: self.model.operations)
    def look(self, number: int, count: int) -> None:
        """O3: a wait that runs out changes nothing; what has ended can be released, once."""
        self.start()
        operation = pick(self.model.operations, number)
        assert self.backend.operation_wait(operation.handle, 50_000) == operation.has_ended
        for operation in list(self.model.operations)[:count] if count > 1 else [pick(self.model.operations, number)]:
            if operation.has_ended:
                self.backend.operation_release(operation.handle)
                self.model.release(operation)
                self.released.append(operation)
                values = (operation.handle,)
                for call in (self.backend.operation_info, self.backend.operation_cancel):
                    refused(m.STALE_HANDLE, m.HANDLE_STALE, values, call, operation.handle)

    @rule()
    @only_if(lambda self: any(not event.is_set for event in self.events))
    def set_event(self) -> None:
        self.start()
        event = next(event for event in self.events if not event.is_set)
        os.eventfd_write(event.fd, 1)
        event.is_set = self.has_work = True

    # ---- the part ----

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True),
        flags=st.sampled_from([0, EVICT, EVICT]),
        named=st.one_of(st.none(), st.none(), st.lists(st.integers(0, SLOTS - 1), min_size=3, max_size=3, unique=True)),
    )
    def reserve(self, keys: list[bytes], flags: int, named: list[int] | None) -> None:
        """O2, O7: no slot that an operation names is given out, and each has a new generation."""
        self.start()
        named = named and named[: len(keys)]
        try:
            entries, gone = self.model.table.reserve(keys, named, bool(flags & EVICT))
        except ModelError as error:
            refused(
                error.status, error.detail, error.values, self.sessions[WRITER_ID].reserve, keys, flags, named
            )  # fmt: skip
            return
        reserved = self.sessions[WRITER_ID].reserve(keys, flags, named)
        assert reserved.evicted == gone
        assert not self.model.owned_slots() & set(reserved.slots), "a slot that a copy writes into was given out"
        self.model.table.assign(entries, reserved.slots, reserved.generations)
        if any(slot >= 0 for slot in reserved.slots):
            self.reservations = [*self.reservations[-5:], (reserved.slots, reserved.generations)]

    @rule(call=st.sampled_from(["commit", "commit", "abort"]), number=st.integers(0, 3), checksum=st.booleans())
    @only_if(lambda self: self.reservations)
    def end_reservation(self, call: str, number: int, checksum: bool) -> None:
        self.start()
        if call == "commit":
            self.commit(number, checksum)
        else:
            self.abort(number)

    def commit(self, number: int, checksum: bool) -> None:
        """O4: not while a copy writes into a slot, and not after one of it failed or was cancelled."""
        reserved = self.reservations[-1 - number % len(self.reservations)]
        refusals = self.model.refuse_commit(*reserved)
        session = self.sessions[WRITER_ID]
        if refusals:
            error = error_of(session.commit, reserved, int(checksum))
            assert any(is_detail(error, *refusal) for refusal in refusals), f"{error!r}; expected {refusals}"
            return
        session.commit(reserved, int(checksum))
        self.model.commit(*reserved, checksum)

    def abort(self, number: int) -> None:
        """O2: slots that copies write into are not free before these have ended."""
        reserved = self.reservations[-1 - number % len(self.reservations)]
        assert self.sessions[WRITER_ID].abort(reserved) == self.model.abort(*reserved)
        self.has_work = True

    @rule(
        call=st.sampled_from(["evict", "claim", "claim", "release", "release", "clear"]),
        session=st.sampled_from([WRITER_ID, READER_ID]),
        count=st.integers(1, 3),
        keep=st.lists(st.sampled_from(KEYS), max_size=2),
    )
    def call_part(self, call: str, session: int, count: int, keep: list[bytes]) -> None:
        """O2: what operations or callers claim is not evicted, and outlives a clear."""
        self.start()
        if call == "evict":
            assert self.sessions[WRITER_ID].evict(count, keep) == self.model.table.evict(count, keep)
        elif call == "clear":
            assert self.sessions[WRITER_ID].clear() == self.model.table.clear()
        elif call == "claim":
            self.claim(session, count)
        elif self.claims:
            self.give_back(count % len(self.claims))

    def claim(self, session: int, count: int) -> None:
        keys = [key for key in KEYS if self.model.table.find(key)][:count]
        slots, generations = self.sessions[session].claim(keys)
        found = self.model.table.claim(session, keys)
        assert slots == [block.slot for block in found]
        if slots:
            self.claims.append((session, slots, generations))
            self.known = [*self.known[-5:], (slots, generations)]

    def give_back(self, i: int) -> None:
        session, slots, _ = self.claims.pop(i)
        self.sessions[session].release(slots)
        self.model.table.release(session, slots)

    # ---- memory goes ----

    @rule(call=st.sampled_from(["unmap", "unmap", "drop", "drop", "fork"]), number=TIME)
    def call_memory(self, call: str, number: int) -> None:
        self.start()
        if call == "unmap":
            self.unmap(number)
        elif call == "drop":
            self.drop(number % (FOREIGN + BORROWED))
        elif self.model.operations and not self.has_forked:
            self.fork()

    def unmap(self, number: int) -> None:
        """O2: a mapping that no operation names goes, and its handle with it; then the region has another one."""
        place = pick(self.region_of, number)
        if self.model.flights(place)[0]:
            return  # that this is refused is looked at after each step
        self.backend.mapping_unmap(place.mapping)
        place.is_gone = True
        region = self.region_of.pop(place)
        new = m.Place(place.buffer, self.backend.region_map(self.regions[region], READ_WRITE, 0).handle)
        self.region_of[new] = region
        self.places[self.places.index(place)] = new
        # Whoever still has the handle is told so.
        if self.queues():
            one, none = longs([0]), longs([])
            arrays = (longs(words(place)), longs(words(self.places[0])), one, one, longs([1]))
            queue = self.queues()[0]
            refusals = {(m.STALE_HANDLE, m.HANDLE_STALE)} | self.model.refuse_queue(queue)
            error = error_of(self.backend.copy_submit, queue.handle, *arrays, none)
            assert any(is_detail(error, *refusal) for refusal in refusals), repr(error)

    def drop(self, number: int) -> None:
        """O2: memory of the caller's goes when no operation names it any more: a late byte would be a crash."""
        place = self.places[number]
        if self.model.users(place.buffer):
            return
        del self.memory[place.buffer]
        gc.collect(0)
        self.places[number] = self.make_foreign(number < FOREIGN)

    def fork(self) -> None:
        """In a child every call says so, and nothing of the parent's changes."""
        self.has_forked = True
        b, queue, operation = self.backend, self.queues()[0].handle, self.model.operations[0].handle
        place, session = words(self.places[0]), self.sessions[WRITER_ID]
        one, none = longs([0]), longs([])
        calls: list[tuple[Any, ...]] = [
            (b.copy_submit, queue, longs(place), longs(words(self.places[1])), one, one, longs([1]), none),
            (b.copy_slots, queue, session.table, OUT, longs(session._mappings), none, none, none, none, 0, none),
            (b.queue_info, queue),
            (b.queue_completed, queue, longs([0] * 4)),
            (b.queue_resume, queue),
            (b.queue_fault, queue, 0, 0, 0),
            (b.queue_close, queue, 0),
            (b.queue_open, 1, 0),
            (b.operation_info, operation),
            (b.operation_error, operation),
            (b.operation_wait, operation, 10**9),
            (b.operation_cancel, operation),
            (b.operation_release, operation),
            (b.quarantine, longs([0])),
            (b.table_close, session.table),
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads: Python 3.12
            pid = os.fork()
        if not pid:
            found = 99
            try:
                signal.alarm(int(BOUND_S))
                for found, (call, *arguments) in enumerate(calls):  # noqa: B007
                    if not isinstance(error_of(call, *arguments), errors.ForkedError):
                        break
                else:
                    found = 0
            finally:
                os._exit(found)
        _, status = os.waitpid(pid, 0)
        assert not status, f"the child ended with {status:#x}: {calls[(status >> 8) % len(calls)]}"

    # ---- after each step ----

    @invariant()
    def step(self) -> None:
        if self.has_work:
            self.settle()
            self.has_work = False
        self.check()
        self.is_clean = True

    def settle(self) -> None:
        """Wait until everything stands still, and tell the model who has ended."""
        b, model = self.backend, self.model
        deadline = time.monotonic() + BOUND_S
        model.begin_step()
        pending = model.unended()
        ended: dict[m.Operation, m.Seen] = {}
        states: dict[m.Operation, int] = {}
        while True:
            # Read one by one, while threads go on: only what two rounds agree on was so at one time.
            earlier, states = states, {}
            for operation in pending:
                if operation in ended:
                    continue
                info = b.operation_info(operation.handle)
                if info.state >= m.DONE:
                    operation.final = info
                    error = b.operation_error(operation.handle)
                    status, code = (0, 0) if error is None else (error.status, error.native_code)
                    ended[operation] = m.Seen(info.state, info.moved_nbytes, info.failed_index, status, code)
                else:
                    states[operation] = info.state
            now = {**states, **{operation: seen.state for operation, seen in ended.items()}}
            paused = {queue: b.queue_info(queue.handle).paused for queue in self.queues()}
            waited = model.unsettled({o: s for o, s in now.items() if o in states}, now, paused)
            if waited is None and states == earlier:
                break
            assert time.monotonic() < deadline, f"{waited and waited.seq} has not ended in {BOUND_S} s: {states}"
            if waited:
                b.operation_wait(waited.handle, 200_000)
        model.end_step(ended, states, self.recency() if ended else [])

    def recency(self) -> list[int]:
        return [
            int.from_bytes(self.part.read("table", self.part.record_offset(slot) + 40, 8), "little")
            for slot in range(SLOTS)
        ]

    def check(self) -> None:
        b, model = self.backend, self.model
        unended = model.unended()
        for queue in self.queues():
            found = b.queue_info(queue.handle)
            mine = [o for o in unended if o.queue is queue]
            running = sum(o.state == m.RUNNING for o in mine)
            wanted = (queue.submitted, *queue.ends.values(), len(mine) - running, running)
            counts = (found.submitted, found.done, found.failed, found.cancelled, found.queued, found.running)
            assert counts == wanted, f"counters {counts}, expected {wanted}"
            assert found.submitted == sum(counts[1:])
            assert (found.paused, bool(found.is_closing)) == (running, queue.is_closing)
            assert not any(queue.unlisted) or self.is_readable(queue), "an end is not told by the fd"
        counts = b.copy_counts()
        base = self.baseline[0]
        quarantined = [o for o in unended if o.is_quarantined]
        assert counts.queues - base.queues == len(self.queues())
        assert counts.operations - base.operations == len(model.operations)
        assert counts.in_flight - base.in_flight == len(unended)
        assert counts.quarantined - base.quarantined == len(quarantined)
        assert counts.quarantine_nbytes - base.quarantine_nbytes == sum(o.total for o in quarantined)
        assert counts.fds - base.fds == 2 * len(self.queues()) + sum(len(o.events) for o in unended)
        listed = longs([0] * 64)
        number = b.quarantine(listed)
        assert {o.handle for o in quarantined} <= set(listed[:number])
        for operation in model.operations:
            info = b.operation_info(operation.handle)
            if operation.has_ended:
                # O1: never left again; only the queue may go.
                assert info._replace(queue=0) == operation.final._replace(queue=0), "a final state was left"
                assert info.queue == (0 if operation.queue.is_closed else operation.queue.handle)
                continue
            assert (info.state, info.queue) == (operation.state, operation.queue.handle)
            assert (info.total_nbytes, info.quarantine) == (operation.total, int(operation.is_quarantined))
            # The core finds stale slots at the submit, and ends the operation when a thread is free.
            assert info.failed_index in ({-1} | (operation.slots.stale if operation.slots else set()))
            assert info.entry_count == len(operation.pieces)
            values = (operation.handle,)
            refused(m.BUSY, m.OPERATION_RUNNING, values, b.operation_release, operation.handle)
        self.check_part()
        self.check_memory()

    def check_part(self) -> None:
        model, writer = self.model, self.sessions[WRITER_ID]
        for session, opened in self.sessions.items():
            named = len(model.of_session(session))
            assert opened.info().operation_count == named
            if named:
                values = (opened.table, named)
                refused(m.NOT_QUIESCENT, m.TABLE_IN_FLIGHT, values, self.backend.table_close, opened.table)
        found = writer.stats()
        assert found.owned_count == len(model.owned_slots())
        wanted = model.table.counts()
        assert {name: getattr(found, name) for name in wanted} == wanted
        content = model.table.inventory()
        assert writer.inventory() == content, "not exactly what was committed is present"
        if content:
            slots = [slot for slot, *_ in content]
            assert writer.verify(slots) == [0 if model.has_crc[slot] else 2 for slot in slots]

    def check_memory(self) -> None:
        for i, buffer in enumerate(self.data):
            buffer.look(self.part.read(f"data{i}", 0, len(buffer.expected)))
        for buffer in self.memory:
            buffer.look(self.read(buffer))
        for place in self.region_of:
            operations, names = self.model.flights(place)
            if operations:
                error = error_of(self.backend.mapping_unmap, place.mapping)
                # An operation that names it twice, as source and destination say, may count twice.
                assert any(
                    is_detail(error, m.BUSY, m.MAPPING_IN_FLIGHT, (place.mapping, n))
                    for n in range(operations, names + 1)
                ), f"{error!r}; expected {operations}"

    # ---- the end ----

    def teardown(self) -> None:
        if not self.is_clean:
            self.sweep()
            return
        self.is_clean = False
        try:
            self.finish()
            self.is_clean = True
        finally:
            if not self.is_clean:
                self.sweep()

    def let_all_end(self) -> None:
        for event in self.events:
            if not event.is_set:
                os.eventfd_write(event.fd, 1)
                event.is_set = True
        for queue in self.queues():
            self.backend.queue_resume(queue.handle)
            self.model.resume(queue)

    def finish(self) -> None:
        """Resume, wait for all, close all: everything is back to where it was."""
        b, model = self.backend, self.model
        self.let_all_end()
        self.settle()
        assert not model.unended()
        self.check()
        for queue in self.queues():
            self.drain(queue, 64)
            assert not any(queue.unlisted)
            assert model.close(queue) == 0
            b.queue_close(queue.handle, int(BOUND_S * 1e9))
        for operation in list(model.operations):
            b.operation_release(operation.handle)
            model.release(operation)
        while self.claims:
            self.give_back(0)
        slots = [slot for slot, block in model.table.blocks.items() if block.state == m.WRITING]
        generations = [model.table.generations[slot] for slot in slots]
        assert self.sessions[WRITER_ID].abort((slots, generations)) == model.abort(slots, generations) == len(slots)
        self.check_part()
        found = self.sessions[WRITER_ID].stats()
        assert (found.claimed_count, found.owned_count, found.writing_count) == (0, 0, 0)
        for session in self.sessions.values():
            session.close()
        for place, region in self.region_of.items():
            b.mapping_unmap(place.mapping)
            refused(m.STALE_HANDLE, m.HANDLE_STALE, (place.mapping,), b.mapping_info, place.mapping)
            assert region in (0, 1)
        for region in self.regions:
            b.region_close(region)
        for memory in self.memory.values():
            if isinstance(memory, int):
                os.close(memory)
        for event in self.events:
            os.close(event.fd)
        self.part.__exit__()
        after = (b.copy_counts(), b.handle_counts(), open_fds())
        assert after == self.baseline, f"{after}, expected {self.baseline}"

    def sweep(self) -> None:
        """After a failure: as much as can be had; memory that threads may still write into is kept."""
        _graveyard.append((self.memory, self.part))
        with contextlib.suppress(Exception):
            self.let_all_end()
        for queue in self.queues():
            with contextlib.suppress(Exception):
                self.backend.queue_close(queue.handle, 10**9)
        for operation in self.model.operations:
            with contextlib.suppress(Exception):
                self.backend.operation_release(operation.handle)
        with contextlib.suppress(Exception):
            self.part.__exit__()


def play(backend: Any, examples: int, steps: int = 30, **options: Any) -> None:
    machine = type("Copies", (Copies,), {"backend": backend})
    profile = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        **options,
    )
    run_state_machine_as_test(machine, settings=profile)


def test_copies_in_any_order(backend):
    """O1, O2, O3, O4, O6, O7, H8: 300 sequences of 30 steps, the same ones each time."""
    play(backend, 300, derandomize=True)


if os.environ.get("KVREUSE_LONG") == "1":

    def test_copies_in_any_order_over_long_runs(backend):
        """O1, O2, O3, O4, O6, O7: 10 000 sequences, other ones each time. Run it with -o faulthandler_timeout=0."""
        play(backend, 10_000, print_blob=True)
