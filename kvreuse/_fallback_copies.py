"""Copies of the fallback: queues, their threads, and the way of an operation. native/copies*.c is the twin.

All state is under `_fallback_host.lock`, which is let go while bytes move and while a part's lock is taken. Counts are
taken of what there is, where they can be: a signal handler that raises cannot leave them wrong.
Meanings, checks and their order: include/kvreuse.h.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import errno
import fcntl
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from . import _api, _status, errors
from . import _ctypes_libc as libc
from . import _ctypes_structs as c
from . import _fallback_cuda as cuda
from . import _fallback_host as host
from . import _fallback_owners as owners
from . import _fallback_table as tables
from ._fallback_host import INT32, UINT32, Mapping, Region, check_length, crc, int64_view
from ._fallback_part import READER, U32, WRITER, Call, Table, run

UNIT_NBYTES = 1 << 20  # one thread takes so much at a time: others can help, and a cancel is seen in between
AFTER_COUNT_MAX = 64
_POLL_MIN_S, _POLL_MAX_S = 20e-6, 500e-6
_EVENT_POLL_MS = 1  # between two looks at CUDA events that operations wait for
_THREAD_END_S = 1.0
_MASK = 2**64 - 1
_DONE, _FAILED, _CANCELLED = c.KVR_OPERATION_DONE, c.KVR_OPERATION_FAILED, c.KVR_OPERATION_CANCELLED
_IN, _OUT = c.KVR_DIRECTION_IN, c.KVR_DIRECTION_OUT

# An operation's way: each phase is entered once, in this order.
_WAITING, _STARTING, _COPYING, _ENDING, _ENDED = range(5)

Entry = tuple[int, int, int, int]  # destination, source, bytes, index of the caller's entry


class Fault:
    """What goes wrong in an operation, for tests."""

    __slots__ = ("index", "is_over", "kind", "value")

    def __init__(self, kind: int = c.KVR_FAULT_NONE, index: int = 0, value: int = 0) -> None:
        self.kind, self.index, self.value = kind, index, value
        self.is_over = False  # a pause that was resumed


class Wait:
    """What an operation waits for."""

    __slots__ = ("device", "event", "fds", "is_over", "kind", "operation")

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.is_over = False
        self.fds: list[int] = []  # one at most, owned
        self.device, self.event = 0, 0
        self.operation: Operation | None = None


class Operation:
    """A batch of copies."""

    sort = c.KVR_SORT_OPERATION

    def __init__(self, direction: int = 0, flags: int = 0) -> None:
        self.handle = 0
        self.calls = 0
        self.closing = False
        self.queue: Queue | None = None  # None once it is closed
        self.phase = _WAITING
        self.state = c.KVR_OPERATION_QUEUED
        self.is_accepted = False
        self.is_small = False  # the thread that submits it runs it
        self.is_cancelled = False  # asked for
        self.is_abandoned = False
        self.is_dropped = False  # nobody got its handle: it is gone when it ends
        self.is_begun = False  # what was checked before the first byte was good
        self.is_lost = False  # its last thread left without knowing whether it has ended
        self.has_dependants = False
        self.active = 0  # threads in it
        self.quarantine, self.quarantine_ns = 0, 0
        self.device = c.KVR_PROVIDER_HOST  # or whose context copies it
        self.entries: list[Entry] = []
        self.entry_count = 0
        self.total_nbytes, self.moved_nbytes = 0, 0
        self.next_entry, self.next_byte, self.taken_nbytes = 0, 0, 0  # what no thread has taken yet begins here
        self.failed_index = -1
        self.error: errors.KVReuseError | None = None
        self.mappings: list[Mapping] = []  # each counted in its `flights`; a part's data regions come first
        self.waits: list[Wait] = []
        self.fault = Fault()
        # Copies of slots.
        self.table: Table | None = None  # counted in its `operations`
        self.direction, self.flags = direction, flags
        self.slots: list[int] = []  # IN: as given, OUT: those that were claimed
        self.generations: list[int] = []
        self.places: list[int] = []  # OUT: the caller's entry of each slot
        self.claims: list[int] = []  # OUT: what to give back

    def info(self) -> _api.OperationInfo:
        return _api.OperationInfo(
            self.handle,
            self.queue.handle if self.queue is not None else 0,
            self.state,
            self.quarantine,
            self.entry_count,
            self.total_nbytes,
            self.moved_nbytes,
            self.failed_index,
            self.quarantine_ns,
        )

    def fail(self, error: BaseException, index: int) -> None:
        """Take a failure; the first one is told."""
        if self.error is None:
            # With a traceback it would keep frames alive, and with them this operation.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            if not isinstance(error, errors.KVReuseError):
                error = _status.from_errno("malloc", errno.ENOMEM)
            self.error, self.failed_index = error, index


class Queue:
    """A queue with its threads."""

    sort = c.KVR_SORT_QUEUE

    def __init__(self, thread_count: int, is_faulty: bool) -> None:
        self.handle = 0
        self.calls = 0  # submits
        self.closing = False
        self.thread_count, self.is_faulty = thread_count, is_faulty
        self.work = threading.Condition(host.lock)
        self.ended_fd = self.wake_fd = -1
        self.alive = 0  # threads
        self.is_closing = self.is_stopping = False
        self.is_polled = False  # a thread waits for fds and events
        self.has_waits = False  # there may be some to wait for
        self.paused = 0
        self.operations: dict[Operation, None] = {}  # not ended, in the order of submission
        self.ended: dict[Operation, None] = {}  # ended and not listed yet
        self.ended_counts = {_DONE: 0, _FAILED: 0, _CANCELLED: 0}
        self.fault = Fault()  # for the next operation

    def info(self) -> _api.QueueInfo:
        queued = sum(operation.state == c.KVR_OPERATION_QUEUED for operation in self.operations)
        done, failed, cancelled = self.ended_counts.values()
        return _api.QueueInfo(
            self.handle,
            self.ended_fd,
            self.thread_count,
            done + failed + cancelled + len(self.operations),
            done,
            failed,
            cancelled,
            queued,
            len(self.operations) - queued,
            int(self.is_closing),
            self.paused,
        )

    def wake(self) -> None:
        self.work.notify_all()
        if self.is_polled:
            _tell(self.wake_fd)

    def open_fds(self) -> None:
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        self.ended_fd = host.step("eventfd", os.eventfd, 0, flags)
        self.wake_fd = host.step("eventfd", os.eventfd, 0, flags)

    def close_fds(self) -> None:
        for fd in (self.ended_fd, self.wake_fd):
            if fd >= 0:
                os.close(fd)
        self.ended_fd = self.wake_fd = -1


class _Ended:
    """What tells callers that an operation has ended, or a thread of a queue.

    Not a Condition: a signal handler that raises in the midst of its wait leaves the lock free where it has to be held.
    """

    def __init__(self) -> None:
        self.waiters: list[Any] = []

    def notify_all(self) -> None:
        """Wake all. The caller holds `lock`."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter.release()

    def waiter(self) -> Any:
        """Say that this thread will `wait`. The caller holds `lock`, and lets it go before."""
        waiter = threading.Lock()
        waiter.acquire()
        self.waiters.append(waiter)
        return waiter

    def wait(self, waiter: Any, seconds: float) -> None:
        try:
            waiter.acquire(timeout=min(max(seconds, 0.0), threading.TIMEOUT_MAX))
        finally:
            with host.lock, contextlib.suppress(ValueError):
                self.waiters.remove(waiter)


_ended = _Ended()
_queues: list[Queue] = []
_quarantined: dict[Operation, None] = {}
_quarantine_limit = 1 << 30
_busy = 0  # threads of queues that are at something which the end of the interpreter must not cut
_is_exiting = False


def _tell(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.eventfd_write(fd, 1)


def _hear(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.eventfd_read(fd)


def _is_inside() -> bool:
    """Whether a finalizer or signal handler runs inside of another call's locked part: waiting would let go of it."""
    return bool(host.lock._is_owned())


# ---- the end of the interpreter: threads are cut off, and memory goes, whatever they are at ----


def _at_exit() -> None:
    global _is_exiting
    if host.is_forked():
        return
    with host.lock:
        _is_exiting = True
        for queue in _queues:
            for operation in queue.operations:
                for mapping in operation.mappings:
                    if mapping.buffer is not None:
                        libc.keep_for_ever(mapping.buffer)
    until = time.monotonic() + _THREAD_END_S
    while (left := until - time.monotonic()) > 0:
        with host.lock:
            if _busy <= 0:
                return
            waiter = _ended.waiter()
        _ended.wait(waiter, left)


atexit.register(_at_exit)


def _set_busy(delta: int) -> None:
    global _busy
    _busy += delta
    _ended.notify_all()


def _park(queue: Queue) -> None:
    """Do nothing any more: the interpreter ends. The caller holds `lock`, and is counted as busy."""
    _set_busy(-1)
    while True:
        queue.work.wait()


# ---- letting go ----


def _let_go(operation: Operation) -> None:
    """Drop all that an operation holds. The caller holds `lock`."""
    while operation.waits:
        wait = operation.waits[-1]
        while wait.fds:
            fd = wait.fds[-1]
            del wait.fds[-1]
            os.close(fd)
        del operation.waits[-1]
    while operation.mappings:
        operation.mappings[-1].flights -= 1
        del operation.mappings[-1]
    if operation.table is not None:
        operation.table.operations -= 1
        operation.table = None


def _end_slots(operation: Operation, table: Table, is_done: bool) -> None:
    """Let go of the slots; raises why nothing was committed. The caller does not hold `lock`."""
    if operation.direction == _OUT:
        _unclaim(operation, table)
        return
    slots, generations = operation.slots, operation.generations
    is_owner = operation in table.owners
    try:
        if is_done and operation.flags & c.KVR_SLOTS_COMMIT:
            is_done = False
            flags = c.KVR_COMMIT_CHECKSUM if operation.flags & c.KVR_SLOTS_CHECKSUM else 0
            run("table_commit", table.handle, tables.commit_slots, slots, generations, flags, 1)
            is_done = True
    finally:
        if is_owner:
            if operation.flags & c.KVR_SLOTS_COMMIT and not is_done:
                with contextlib.suppress(errors.KVReuseError):
                    run("table_abort", table.handle, tables.abort_slots, slots, generations)
            owners.disown(table, operation, slots, generations, not is_done)


def _unclaim(operation: Operation, table: Table) -> None:
    if operation.claims:
        table.late += [operation.claims]
        operation.claims = []
        owners.unclaim(table)


def _enter_quarantine(operation: Operation, why: int) -> None:
    if operation.quarantine or operation.phase == _ENDED:
        return
    operation.quarantine, operation.quarantine_ns = why, time.monotonic_ns()
    _quarantined[operation] = None


def _quarantine_nbytes() -> int:
    return sum(operation.total_nbytes for operation in _quarantined)


def _publish(queue: Queue, operation: Operation, state: int) -> None:
    """The one place where an operation becomes DONE, FAILED or CANCELLED. The caller holds `lock`."""
    _let_go(operation)
    operation.quarantine = 0
    _quarantined.pop(operation, None)
    if operation in queue.operations:
        operation.state, operation.phase = state, _ENDED
        operation.entries = []
        queue.ended_counts[state] += 1
        del queue.operations[operation]
        if operation.is_dropped:
            _release(operation)
        else:
            queue.ended[operation] = None
            _tell(queue.ended_fd)
    _ended.notify_all()
    if operation.has_dependants:
        for other in _queues:
            other.wake()


def _end(queue: Queue, operation: Operation) -> None:
    """End an operation that its last thread has left, and whose phase is ENDING."""
    is_done = operation.error is None and operation.moved_nbytes == operation.total_nbytes and operation.is_begun
    if operation.table is not None:
        try:
            _end_slots(operation, operation.table, is_done)
        except (errors.KVReuseError, MemoryError) as error:
            is_done = False
            operation.fail(error, -1)
    with host.lock:
        if is_done:
            state = _DONE
        elif operation.error is not None:
            state = _FAILED
        else:
            state = _CANCELLED
            values = (operation.handle,)
            operation.fail(
                _status.make(c.KVR_ERROR_HANDLE_CLOSED, c.KVR_DETAIL_OPERATION_CANCELLED, values, "operation_cancel"),
                -1,
            )
        _publish(queue, operation, state)


def _leave(queue: Queue, operation: Operation) -> None:
    """Leave an operation; the last thread ends it."""
    with host.lock:
        operation.active -= 1
        if operation.active or operation.is_abandoned or operation.phase >= _ENDING or operation.is_lost:
            return
        operation.phase = _ENDING
    _end(queue, operation)


# ---- moving bytes; without the lock ----


class Unit(NamedTuple):
    """What a thread takes of an operation."""

    entry: int
    byte: int
    nbytes: int
    start: int  # bytes of the operation before it


def _pause_here(queue: Queue, operation: Operation) -> bool:
    """Stop at a fault's byte until it is resumed; False if the operation was abandoned."""
    with host.lock:
        queue.paused += 1
        _set_busy(-1)
        while not operation.fault.is_over and not operation.is_abandoned:
            queue.work.wait()
        _set_busy(1)
        if _is_exiting:
            _park(queue)
        queue.paused -= 1
        return not operation.is_abandoned


def _int32_of(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def _copy_faulty(
    queue: Queue, operation: Operation, entry: Entry, offset: int, nbytes: int, start: int
) -> tuple[int, errors.KVReuseError | None]:
    """Copy a piece with the operation's fault: `start` is its place among all bytes, `offset` in its entry."""
    fault, index = operation.fault, entry[3]
    dst, src = entry[0] + offset, entry[1] + offset
    first = nbytes
    if fault.kind == c.KVR_FAULT_ERRNO and fault.index == index:
        return 0, _status.from_errno("copy", _int32_of(fault.value))
    if fault.kind == c.KVR_FAULT_SHORT and fault.index == index and offset + nbytes > fault.value:
        first = max(fault.value - offset, 0)
        libc.memmove(dst, src, first)
        values: tuple[int, ...] = (index, fault.value, entry[2])
        return first, _status.make(c.KVR_ERROR_SIZE_MISMATCH, c.KVR_DETAIL_COPY_SHORT, values, "copy")
    if fault.kind == c.KVR_FAULT_PAUSE and start <= fault.value < start + nbytes:
        first = fault.value - start
    libc.memmove(dst, src, first)
    if first < nbytes:
        if not _pause_here(queue, operation):
            values = (operation.handle,)
            return first, _status.make(c.KVR_ERROR_NOT_QUIESCENT, c.KVR_DETAIL_OPERATION_ABANDONED, values, "copy")
        libc.memmove(dst + first, src + first, nbytes - first)
    return nbytes, None


def _copy_unit(
    queue: Queue, operation: Operation, entries: Sequence[Entry], unit: Unit
) -> tuple[int, errors.KVReuseError | None, int]:
    """Copy a unit; return the bytes moved, and the failure with its entry."""
    move, is_faulty = libc.memmove, operation.fault.kind != c.KVR_FAULT_NONE
    at, offset, left, moved = unit.entry, unit.byte, unit.nbytes, 0
    while left > 0:
        entry = entries[at]
        nbytes = min(entry[2] - offset, left)
        if is_faulty:
            done, error = _copy_faulty(queue, operation, entry, offset, nbytes, unit.start + unit.nbytes - left)
            moved += done
            if error is not None:
                return moved, error, entry[3]
        else:
            move(entry[0] + offset, entry[1] + offset, nbytes)
            moved += nbytes
        left -= nbytes
        at += 1
        offset = 0
    return moved, None, -1


def _take_unit(operation: Operation) -> Unit | None:
    """Take the next unit. The caller holds `lock`."""
    if operation.error is not None or operation.is_cancelled or operation.is_abandoned:
        return None
    entries, count = operation.entries, operation.entry_count
    i, byte, nbytes = operation.next_entry, operation.next_byte, 0
    if i >= count:
        return None
    unit = (i, byte)
    while i < count and nbytes < UNIT_NBYTES:
        left, room = entries[i][2] - byte, UNIT_NBYTES - nbytes
        if left > room:
            byte += room
            nbytes += room
        else:
            nbytes += left
            byte = 0
            i += 1
    start = operation.taken_nbytes
    operation.next_entry, operation.next_byte = i, byte
    operation.taken_nbytes += nbytes
    return Unit(*unit, nbytes, start)


def _copy_host(queue: Queue, operation: Operation, is_worker: bool) -> None:
    entries = operation.entries
    while True:
        with host.lock:
            if _is_exiting and is_worker:
                _park(queue)
            unit = _take_unit(operation)
        if unit is None:
            return
        moved, error, index = _copy_unit(queue, operation, entries, unit)
        with host.lock:
            operation.moved_nbytes += moved
            if error is not None:
                operation.fail(error, index)


def _copy_cuda(queue: Queue, operation: Operation, streams: dict[int, cuda.CopyStream]) -> None:
    """Copy all entries by this thread's stream, and wait for their end."""
    device, entries = operation.device, operation.entries
    issued, is_recorded, failure = cuda.copy_issue(device, streams, entries)
    index = entries[issued][3] if failure is not None and issued < len(entries) else -1
    lost = None if is_recorded else failure
    is_known = is_recorded
    pause = _POLL_MIN_S
    # Also after a failure: what was issued before it still moves.
    while issued and is_known:
        try:
            if cuda.event_poll(device, streams[device].event):
                break
        except errors.KVReuseError as error:
            lost, is_known = error, False
            break
        with host.lock:
            if _is_exiting:
                _park(queue)
            is_known = not operation.is_abandoned
        if is_known:
            time.sleep(pause)
            pause = min(2 * pause, _POLL_MAX_S)
    if not is_known:
        streams.pop(device, None)  # the driver may still be at it
    with host.lock:
        if not is_known:
            operation.is_lost = True
            if lost is not None and not operation.is_abandoned:
                operation.fail(lost, operation.failed_index)
                _enter_quarantine(operation, c.KVR_QUARANTINE_DRIVER)
            _ended.notify_all()
        elif failure is not None:
            operation.fail(failure, index)
        else:
            operation.moved_nbytes = operation.total_nbytes


# ---- the phases ----


def _verify_blocks(operation: Operation, table: Table) -> tuple[int, Exception] | None:
    """Compare whole blocks with the CRC of their commit."""
    for i, slot in enumerate(operation.slots):
        record = table.record(slot)
        if not record[61] & c.KVR_RECORD_HAS_DATA_CRC:
            continue
        region, place = divmod(slot, table.slots_per_region)
        found = crc(table.block_type.from_address(operation.mappings[region].address + place * table.block_nbytes))
        stored = U32.unpack_from(record, 52)[0]
        if found != stored:
            values = (operation.places[i], slot, stored, found)
            return values[0], _status.make(c.KVR_ERROR_CORRUPT, c.KVR_DETAIL_BLOCK_CRC, values, "copy_slots")
    return None


def _start(operation: Operation) -> tuple[int, Exception] | None:
    """Check what has to be right before the first byte moves; return the entry and the failure."""
    table = operation.table
    if table is None:
        return None
    if operation.direction == _IN:
        return owners.check_owned(Call("copy_slots"), table, operation.slots, operation.generations)
    if operation.flags & c.KVR_SLOTS_VERIFY and operation.device < 0:
        return _verify_blocks(operation, table)
    return None


def _failed_dependency(operation: Operation) -> Operation | None:
    for wait in operation.waits:
        other = wait.operation
        if other is not None and other.phase == _ENDED and other.state != _DONE:
            return other
    return None


def _advance(queue: Queue, operation: Operation, streams: dict[int, cuda.CopyStream] | None) -> None:
    """Work on an operation that waits or is being copied. `streams`: of this thread of the queue, None: of another."""
    with host.lock:
        is_new = operation.phase == _WAITING
        if is_new:
            other = _failed_dependency(operation)
            if other is not None:
                values = (other.handle, other.state)
                operation.fail(_status.make(c.KVR_ERROR_NOT_READY, c.KVR_DETAIL_AFTER_FAILED, values, "operation"), -1)
            if operation.error is not None or operation.is_cancelled:
                return
            operation.phase, operation.state = _STARTING, c.KVR_OPERATION_RUNNING
    if is_new:
        failure = _start(operation)
        with host.lock:
            if failure is not None:
                operation.fail(failure[1], failure[0])
            operation.is_begun, operation.phase = True, _COPYING
            if operation.device < 0 and operation.total_nbytes > UNIT_NBYTES and queue.thread_count > 1:
                queue.work.notify_all()
    if operation.device < 0:
        _copy_host(queue, operation, streams is not None)
    elif operation.error is None and not operation.is_cancelled and streams is not None:
        with host.lock:
            operation.next_entry = operation.entry_count  # taken whole
        _copy_cuda(queue, operation, streams)


def _run_here(queue: Queue, operation: Operation) -> None:
    """Run a waiting operation in the caller's thread, where a signal handler may raise.

    The caller has made it active, so that no other thread is in it.
    """
    _advance(queue, operation, None)
    _leave(queue, operation)


def _cut_short(queue: Queue, operation: Operation) -> None:
    """End an operation that is this thread's alone, and was cut short by a signal handler at any place."""
    with host.lock:
        operation.is_cancelled = True
        operation.active = 0
        operation.phase = max(operation.phase, _ENDING)
        is_over = operation not in queue.operations
    if not is_over:
        _end(queue, operation)


# ---- a queue's threads ----


def _is_ready(operation: Operation) -> bool:
    """Whether all that the operation waits for is over."""
    return all(wait.is_over if wait.operation is None else wait.operation.phase == _ENDED for wait in operation.waits)


def _is_helpful(operation: Operation) -> bool:
    return (
        operation.phase == _COPYING
        and operation.device < 0
        and operation.error is None
        and not operation.is_cancelled
        and not operation.is_abandoned
        and operation.next_entry < operation.entry_count
    )


def _pick(queue: Queue) -> Operation | None:
    for operation in list(queue.operations):
        if operation.phase == _WAITING:
            if not operation.active and (
                operation.is_cancelled
                or operation.error is not None
                or _is_ready(operation)
                or _failed_dependency(operation) is not None
            ):
                return operation
        elif _is_helpful(operation):
            return operation
    return None


def _pollable(queue: Queue) -> tuple[list[tuple[int, Wait]], list[tuple[Operation, Wait]]]:
    """What has to be looked at: fds, and CUDA events."""
    fds: list[tuple[int, Wait]] = []
    events: list[tuple[Operation, Wait]] = []
    for operation in queue.operations:
        if operation.phase == _WAITING:
            for wait in operation.waits:
                if wait.is_over:
                    continue
                if wait.kind == c.KVR_AFTER_FD:
                    fds += [(fd, wait) for fd in wait.fds]
                elif wait.kind == c.KVR_AFTER_CUDA_EVENT:
                    events.append((operation, wait))
    return fds, events


def _look_at_events(events: Sequence[tuple[Operation, Wait]]) -> bool:
    """Ask the driver for events that operations wait for; return whether one is over."""
    is_any = False
    for operation, wait in events:
        failure: errors.KVReuseError | None = None
        try:
            is_over = cuda.event_poll(wait.device, wait.event)
        except errors.KVReuseError as error:
            is_over, failure = True, error
        with host.lock:
            if is_over and operation.phase == _WAITING:
                is_any = wait.is_over = True
                if failure is not None:
                    operation.fail(failure, -1)
    return is_any


def _poll(queue: Queue, fds: Sequence[tuple[int, Wait]], timeout_ms: int | None) -> None:
    polled = select.poll()
    for fd, _ in fds:
        polled.register(fd, select.POLLIN)
    polled.register(queue.wake_fd, select.POLLIN)
    found = {fd for fd, _ in polled.poll(timeout_ms)}
    if queue.wake_fd in found:
        _hear(queue.wake_fd)
    with host.lock:
        for fd, wait in fds:
            # An operation may have gone meanwhile, and its fd's number with it.
            if fd in found and fd in wait.fds:
                wait.is_over = True


def _next(queue: Queue) -> Operation | None:
    """Wait for an operation to work on, and be active in it; None: the queue ends."""
    while True:
        with host.lock:
            if _is_exiting:
                _set_busy(1)
                _park(queue)
            if queue.is_stopping:
                return None
            operation = _pick(queue)
            if operation is not None:
                operation.active += 1
                _set_busy(1)
                if queue.has_waits and not queue.is_polled:
                    queue.work.notify()  # somebody else has to look at fds and events now
                return operation
            fds, events = _pollable(queue)
            queue.has_waits = bool(fds or events)
            if not queue.has_waits or queue.is_polled:
                queue.work.wait()
                continue
            queue.is_polled = True
        try:
            is_any = _look_at_events(events)
            _poll(queue, fds, 0 if is_any else _EVENT_POLL_MS if events else None)
        finally:
            with host.lock:
                queue.is_polled = False
        del fds, events


def _work_once(queue: Queue, streams: dict[int, cuda.CopyStream]) -> bool:
    operation = _next(queue)
    if operation is None:
        return False
    try:
        try:
            _advance(queue, operation, streams)
        except Exception as error:
            with host.lock:
                operation.fail(error, -1)
        _leave(queue, operation)
    finally:
        with host.lock:
            _set_busy(-1)
    return True


def _work(queue: Queue) -> None:
    streams: dict[int, cuda.CopyStream] = {}
    try:
        # Whatever a round has found is gone at its end: this loop keeps no operation alive.
        while _work_once(queue, streams):
            pass
        for stream in streams.values():
            stream.close()
    finally:
        with host.lock:
            queue.alive -= 1
            if not queue.alive and queue.is_stopping:
                queue.close_fds()
            _ended.notify_all()


def _start_threads(queue: Queue) -> None:
    for _ in range(queue.thread_count):
        thread = threading.Thread(target=_work, args=(queue,), name="kvreuse-copy", daemon=True)
        queue.alive += 1
        try:
            thread.start()
        except RuntimeError:
            with host.lock:
                queue.alive -= 1
            raise _status.from_errno("pthread_create", errno.EAGAIN) from None


def _stop(queue: Queue) -> None:
    """End the threads, the last of which closes the fds. Those of abandoned operations may never end."""
    is_inside = _is_inside()
    until = time.monotonic() + _THREAD_END_S
    with host.lock:
        queue.is_stopping = True
        queue.wake()
        if not queue.alive:
            queue.close_fds()
    while not is_inside and (left := until - time.monotonic()) > 0:
        with host.lock:
            if not queue.alive:
                return
            waiter = _ended.waiter()
        _ended.wait(waiter, left)


# ---- queues ----


def queue_open(thread_count: Any, flags: Any) -> int:
    call = "queue_open"
    thread_count = _status.as_integer(thread_count, "thread_count", *INT32)
    flags = _status.as_integer(flags, "flags", *UINT32)
    host.check_fork(call)
    values: tuple[int, ...]
    if not 1 <= thread_count <= c.KVR_THREAD_COUNT_MAX:
        values = (thread_count, c.KVR_THREAD_COUNT_MAX)
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_THREAD_COUNT_RANGE, values, call)
    if flags & ~c.KVR_QUEUE_FAULTS:
        values = (flags, c.KVR_QUEUE_FAULTS)
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_FLAGS_UNKNOWN, values, call)
    queue = Queue(thread_count, bool(flags & c.KVR_QUEUE_FAULTS))
    try:
        queue.open_fds()
        _start_threads(queue)
        with host.lock:
            handle = host.register(queue)
            _queues.insert(0, queue)  # the newest first
        return handle
    except BaseException:
        with host.lock:
            if queue in _queues:
                _queues.remove(queue)
            if queue.handle:
                host.unregister(queue)
        _stop(queue)
        raise


def _until(wait_ns: int, call: str) -> float:
    if wait_ns < 0:
        values = (wait_ns, _status.INT64_MAX)
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_NBYTES_RANGE, values, call)
    return time.monotonic() + min(wait_ns / 1e9, threading.TIMEOUT_MAX / 2)


def _drain(handle: int, wait_ns: int, call: str, finish: Callable[[Queue], None] | None) -> bool:
    """Take no more work, and wait; then `finish`, in the same step. Return whether all have ended.

    Where some have not, `finish` gets the queue all the same: it looks at `operations`.
    """
    until = _until(wait_ns, call)
    is_inside = _is_inside()
    while True:
        with host.lock:
            # Found anew after each wait: another thread may have closed it.
            thing = host.find_idle(handle, Queue, call)
            thing.is_closing = True
            left = until - time.monotonic()
            if not thing.operations or is_inside or left <= 0:
                if finish is not None:
                    finish(thing)
                return not thing.operations
            waiter = _ended.waiter()
        _ended.wait(waiter, left)


def queue_drain(queue: Any, wait_ns: Any) -> bool:
    handle = _status.as_integer(queue, "queue")
    return _drain(handle, _status.as_integer(wait_ns, "wait_ns"), "queue_drain", None)


def queue_close(queue: Any, wait_ns: Any) -> None:
    call = "queue_close"
    handle = _status.as_integer(queue, "queue")
    closed: list[Queue] = []

    def finish(thing: Queue) -> None:
        if thing.operations:
            for operation in thing.operations:
                _enter_quarantine(operation, c.KVR_QUARANTINE_CLOSE)
            values = (handle, len(thing.operations))
            raise _status.make(c.KVR_ERROR_NOT_QUIESCENT, c.KVR_DETAIL_QUEUE_NOT_QUIESCENT, values, call)
        _close(thing)
        closed.append(thing)

    _drain(handle, _status.as_integer(wait_ns, "wait_ns"), call, finish)
    _stop(closed[0])


def _close(queue: Queue) -> None:
    """Forget a queue without operations. The caller holds `lock`."""
    _queues.remove(queue)
    host.unregister(queue)
    queue.ended.clear()
    for operation in host.things(Operation):
        if operation.queue is queue:
            operation.queue = None


def _find_queue(handle: int, call: str) -> Queue:
    queue = host.find(handle, Queue, call)
    host.check_fork(call)
    return queue


def queue_info(queue: Any) -> _api.QueueInfo:
    handle = _status.as_integer(queue, "queue")
    with host.lock:
        return _find_queue(handle, "queue_info").info()


def _check_capacity(capacity: int, call: str) -> None:
    if capacity > c.KVR_BATCH_COUNT_MAX:
        values = (capacity, c.KVR_BATCH_COUNT_MAX)
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_COUNT_RANGE, values, call)


def queue_completed(queue: Any, operations: Any) -> int:
    call = "queue_completed"
    handle = _status.as_integer(queue, "queue")
    out = int64_view(operations, "operations", True)
    _check_capacity(len(out), call)
    with host.lock:
        thing = _find_queue(handle, call)
        found = [operation for operation, _ in zip(thing.ended, range(len(out)), strict=False)]
        for i, operation in enumerate(found):
            out[i] = operation.handle
            del thing.ended[operation]
        if not thing.ended:
            _hear(thing.ended_fd)
        return len(found)


def queue_fault(queue: Any, fault: Any, index: Any, value: Any) -> None:
    call = "queue_fault"
    handle = _status.as_integer(queue, "queue")
    fault = _status.as_integer(fault, "fault", *INT32)
    index = _status.as_integer(index, "index")
    value = _status.as_integer(value, "value")
    if not c.KVR_FAULT_NONE <= fault <= c.KVR_FAULT_SUBMIT:
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_FAULT_UNKNOWN, (fault,), call)
    if index < 0 or value < 0:
        values = (index if index < 0 else value, _status.INT64_MAX)
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_COUNT_RANGE, values, call)
    with host.lock:
        thing = _find_queue(handle, call)
        if not thing.is_faulty:
            raise _status.make(c.KVR_ERROR_NOT_SUPPORTED, c.KVR_DETAIL_NO_FAULTS, (handle,), call)
        thing.fault = Fault(fault, index, value)


def queue_resume(queue: Any) -> None:
    handle = _status.as_integer(queue, "queue")
    with host.lock:
        thing = _find_queue(handle, "queue_resume")
        for operation in thing.operations:
            operation.fault.is_over = True
        thing.wake()


# ---- operations ----


def _find_operation(handle: int, call: str) -> Operation:
    operation = host.find(handle, Operation, call)
    host.check_fork(call)
    return operation


def operation_info(operation: Any) -> _api.OperationInfo:
    handle = _status.as_integer(operation, "operation")
    with host.lock:
        return _find_operation(handle, "operation_info").info()


def operation_error(operation: Any) -> errors.KVReuseError | None:
    handle = _status.as_integer(operation, "operation")
    with host.lock:
        thing = _find_operation(handle, "operation_error")
        return copy.copy(thing.error) if thing.state in (_FAILED, _CANCELLED) else None


def operation_wait(operation: Any, wait_ns: Any) -> bool:
    call = "operation_wait"
    handle = _status.as_integer(operation, "operation")
    wait_ns = _status.as_integer(wait_ns, "wait_ns")
    until = _until(wait_ns, call)
    is_inside = _is_inside()
    thing: Operation | None = None
    while True:
        with host.lock:
            if thing is None:  # afterwards another thread may release it
                thing = _find_operation(handle, call)
            left = until - time.monotonic()
            if thing.phase == _ENDED:
                return True
            if is_inside or left <= 0:
                return False
            waiter = _ended.waiter()
        _ended.wait(waiter, left)


def operation_cancel(operation: Any) -> None:
    handle = _status.as_integer(operation, "operation")
    queue: Queue | None = None  # once this thread is in the operation
    try:
        with host.lock:
            thing = _find_operation(handle, "operation_cancel")
            if thing.phase == _ENDED:
                return
            thing.is_cancelled = True
            # Nothing of it has begun: it can end here, whatever the threads are at.
            if thing.phase != _WAITING or thing.active or thing.queue is None:
                return
            thing.active += 1
            queue = thing.queue
        _run_here(queue, thing)
    except BaseException:
        if queue is not None:
            _cut_short(queue, thing)
        raise


def _release(operation: Operation) -> None:
    """Give up the handle of an operation that has ended. The caller holds `lock`."""
    if operation.queue is not None:
        operation.queue.ended.pop(operation, None)
    if host.is_registered(operation):
        host.unregister(operation)


def operation_release(operation: Any) -> None:
    call = "operation_release"
    handle = _status.as_integer(operation, "operation")
    with host.lock:
        thing = _find_operation(handle, call)
        if thing.phase != _ENDED:
            raise _status.make(c.KVR_ERROR_BUSY, c.KVR_DETAIL_OPERATION_RUNNING, (handle,), call)
        _release(thing)


# ---- quarantine ----


def operation_abandon(operation: Any) -> None:
    call = "operation_abandon"
    handle = _status.as_integer(operation, "operation")
    with host.lock:
        thing = _find_operation(handle, call)
        queue = thing.queue
        if not thing.quarantine or thing.phase not in (_WAITING, _COPYING) or queue is None:
            raise _status.make(c.KVR_ERROR_BUSY, c.KVR_DETAIL_NOT_QUARANTINED, (handle,), call)
        thing.is_abandoned = True
        thing.phase = _ENDING  # no thread takes it up, or ends it, any more
        thing.error = None
        values = (handle,)
        thing.fail(_status.make(c.KVR_ERROR_NOT_QUIESCENT, c.KVR_DETAIL_OPERATION_ABANDONED, values, call), -1)
    try:
        if thing.table is not None:
            with contextlib.suppress(errors.KVReuseError):
                _end_slots(thing, thing.table, False)
    finally:
        with host.lock:
            _publish(queue, thing, _FAILED)
            queue.wake()  # a thread that a fault has stopped in it


def quarantine(operations: Any) -> int:
    call = "quarantine"
    out = int64_view(operations, "operations", True)
    host.check_fork(call)
    _check_capacity(len(out), call)
    with host.lock:
        found = [operation for queue in _queues for operation in queue.operations if operation.quarantine]
    for i, operation in enumerate(found[: len(out)]):
        out[i] = operation.handle
    return len(found)


def quarantine_limit_set(limit_nbytes: Any) -> None:
    global _quarantine_limit
    call = "quarantine_limit_set"
    limit_nbytes = _status.as_integer(limit_nbytes, "limit_nbytes")
    host.check_fork(call)
    if limit_nbytes < 0:
        values = (limit_nbytes, _status.INT64_MAX)
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_NBYTES_RANGE, values, call)
    with host.lock:
        _quarantine_limit = limit_nbytes


def copy_counts() -> _api.CopyCounts:
    with host.lock:
        counts = host.counts()
        running = [operation for queue in _queues for operation in queue.operations]
        return _api.CopyCounts(
            counts[c.KVR_SORT_QUEUE],
            counts[c.KVR_SORT_OPERATION],
            len(running),
            len(_quarantined),
            _quarantine_nbytes(),
            _quarantine_limit,
            2 * len(_queues) + sum(len(wait.fds) for operation in running for wait in operation.waits),
        )


# ---- taking copies in: what a batch names is checked whole, held, and turned into addresses ----


class Place(NamedTuple):
    """Memory as it is known while it is held."""

    address: int
    nbytes: int
    device: int
    is_writable: bool
    mapping: int
    region: Region | None  # None: foreign


def _hold_mapping(operation: Operation, handle: int, call: str) -> Mapping:
    """Find a mapping and count the operation on it. The caller holds `lock`."""
    mapping = host.find(handle, Mapping, call)
    if mapping.is_unmapped:
        raise _status.make(c.KVR_ERROR_STALE_HANDLE, c.KVR_DETAIL_HANDLE_STALE, (handle,), call)
    mapping.flights += 1
    operation.mappings.append(mapping)
    return mapping


def _hold_memory(operation: Operation, words: Sequence[int], call: str) -> Place:
    """Hold what a kvr_memory names. The caller holds `lock`."""
    handle, word, nbytes, device, is_writable = words
    if handle:
        mapping = _hold_mapping(operation, handle, call)
        region = mapping.region
        is_written = mapping.access == c.KVR_ACCESS_READ_WRITE
        return Place(mapping.address, region.nbytes, region.provider, is_written, handle, region)
    address = word & _MASK
    if not 0 <= nbytes <= c.KVR_NBYTES_MAX or address > _MASK - nbytes or (not address and nbytes):
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_ADDRESS_RANGE, (word, nbytes), call)
    if not c.KVR_PROVIDER_HOST <= device < c.KVR_ORDINAL_COUNT_MAX:
        values = (device, c.KVR_ORDINAL_COUNT_MAX)
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_ORDINAL_RANGE, values, call)
    return Place(address, nbytes, device, is_writable != 0, 0, None)


def _check_writable(place: Place, call: str) -> None:
    if not place.is_writable:
        values = (place.mapping,)
        raise _status.make(c.KVR_ERROR_PERMISSION_DENIED, c.KVR_DETAIL_COPY_READ_ONLY, values, call)


def _copier(dst: int, src: int) -> int:
    """Which device's context copies between the two; KVR_PROVIDER_HOST: the CPU does."""
    return dst if dst >= 0 else src


# ---- overlaps ----


def _overlap(detail: int, a: int, b: int, call: str) -> Exception:
    values = (min(a, b), max(a, b)) if detail == c.KVR_DETAIL_COPY_OVERLAP else (a, b)
    return _status.make(c.KVR_ERROR_RANGE, detail, values, call)


def _check_crossing(dsts: Sequence[Entry], srcs: Sequence[tuple[int, int, int]], call: str) -> None:
    """Check destinations, sorted and free of overlaps, against sorted sources (start, bytes, index)."""
    j, count = 0, len(srcs)
    reach, reacher = 0, -1  # sources may overlap one another: the farthest end so far, and whose it is
    for start, _, nbytes, index in dsts:
        end = start + nbytes
        while j < count and srcs[j][0] < end:
            source_end = srcs[j][0] + srcs[j][1]
            if source_end > reach:
                reach, reacher = source_end, srcs[j][2]
            j += 1
        if reach > start:
            raise _overlap(c.KVR_DETAIL_COPY_CROSS_OVERLAP, index, reacher, call)


def _check_overlaps(entries: Sequence[Entry], shift: int, call: str) -> None:
    """Refuse destinations that overlap, or that the same batch reads.

    `shift`: what to add to a source's address to compare it with those of destinations, where both are mappings of the
    same memory.
    """
    if not entries:
        return
    low, high = min(entry[0] for entry in entries), max(entry[0] + entry[2] for entry in entries)
    source_low = min(entry[1] for entry in entries) + shift
    source_high = max(entry[1] + entry[2] for entry in entries) + shift
    dsts = sorted(entries, key=_destination_of)
    end, before = 0, -1
    for dst, _, nbytes, index in dsts:
        if dst < end:
            raise _overlap(c.KVR_DETAIL_COPY_OVERLAP, before, index, call)
        end, before = dst + nbytes, index
    if low < source_high and source_low < high:
        srcs = sorted(((entry[1] + shift, entry[2], entry[3]) for entry in entries), key=_destination_of)
        _check_crossing(dsts, srcs, call)


def _destination_of(entry: tuple[int, ...]) -> int:
    return entry[0]


# ---- dependencies ----


def _add_wait(operation: Operation, index: int, words: Sequence[int], call: str) -> None:
    """Add what a kvr_dependency names. The caller holds `lock`."""
    kind, value, device = words
    wait = Wait(kind)
    if kind == c.KVR_AFTER_FD:
        if not 0 <= value < 2**31:
            raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_FD_NEGATIVE, (value,), call)
        operation.waits.append(wait)
        try:
            # In one step: a signal handler that raises finds the fd in the list, or none was made.
            wait.fds.extend(map(fcntl.fcntl, (value,), (fcntl.F_DUPFD_CLOEXEC,), (0,)))
        except OSError as error:
            raise _status.from_errno("fcntl", error.errno or 0) from None
        return
    if kind == c.KVR_AFTER_OPERATION:
        wait.operation = host.find(value, Operation, call)
        wait.operation.has_dependants = True
    elif kind == c.KVR_AFTER_CUDA_EVENT:
        if not 0 <= device < c.KVR_ORDINAL_COUNT_MAX:
            values = (device, c.KVR_ORDINAL_COUNT_MAX)
            raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_ORDINAL_RANGE, values, call)
        wait.device, wait.event = device, value & _MASK
    else:
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_AFTER_KIND, (index, kind), call)
    operation.waits.append(wait)


def _add_waits(operation: Operation, after: Sequence[int], call: str) -> None:
    for index, start in enumerate(range(0, len(after), 3)):
        _add_wait(operation, index, after[start : start + 3], call)


# ---- an operation in the making ----


def _words_of(value: Any, name: str, words: int, many: bool) -> list[int]:
    """Take an int64 array that holds one record of so many words, or any number of them."""
    found = int64_view(value, name)
    count = len(found)
    if not many:
        check_length(name, count, words, "entries")
    elif count % words:
        check_length(name, count, (count // words + 1) * words, "entries")
    return found.tolist()


def _check_counts(count: int, after_count: int, call: str) -> None:
    for found, most in ((count, c.KVR_BATCH_COUNT_MAX), (after_count, AFTER_COUNT_MAX)):
        if found > most:
            raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_COUNT_RANGE, (found, most), call)


def _find_open_queue(handle: int, call: str) -> Queue:
    """Find the queue and see that it takes work. The caller holds `lock`."""
    queue = _find_queue(handle, call)
    if queue.is_closing:
        raise _status.make(c.KVR_ERROR_HANDLE_CLOSED, c.KVR_DETAIL_QUEUE_CLOSING, (handle,), call)
    nbytes = _quarantine_nbytes()
    if nbytes > _quarantine_limit:
        values = (nbytes, _quarantine_limit)
        raise _status.make(c.KVR_ERROR_NOT_QUIESCENT, c.KVR_DETAIL_QUARANTINE_FULL, values, call)
    return queue


class _Entry:
    """A submit that is in a queue, which is not closed meanwhile."""

    queue: Queue | None = None

    def __enter__(self) -> _Entry:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._leave()
        finally:
            self._leave()  # a signal handler may have raised inside of the first

    def _leave(self) -> None:
        with host.lock:
            queue = self.queue
            if queue is not None:
                queue.calls -= 1
                self.queue = None
        host.tell_idle()


def _accept(queue: Queue, operation: Operation) -> None:
    """Give the operation to the queue, as the last step; if it is small, the caller has to run it.

    The caller holds `lock`.
    """
    operation.fault, queue.fault = queue.fault, Fault()
    if operation.fault.kind == c.KVR_FAULT_SUBMIT:
        raise _status.from_errno("submit", _int32_of(operation.fault.value))
    # A hand-over to another thread takes longer than so many bytes do.
    operation.is_small = (
        operation.device < 0
        and operation.total_nbytes <= c.KVR_COPY_INLINE_NBYTES
        and not operation.waits
        and not operation.fault.kind
        and not queue.operations
    )
    host.register(operation)
    operation.queue = queue
    operation.active = int(operation.is_small)
    operation.is_accepted = True
    queue.operations[operation] = None
    if not operation.is_small:
        queue.has_waits = queue.has_waits or bool(operation.waits)
        queue.wake()


def _undo(operation: Operation, table: Table | None) -> None:
    """Take a submit back that failed, or was cut short by a signal handler."""
    if table is not None and not operation.is_accepted:
        if operation in table.owners:
            owners.disown(table, operation, operation.slots, operation.generations, False)
        _unclaim(operation, table)
    with host.lock:
        queue = operation.queue
        if not operation.is_accepted or queue is None:
            if host.is_registered(operation):
                host.unregister(operation)
            _let_go(operation)
        else:
            operation.is_cancelled = operation.is_dropped = True
            queue.wake()
    if queue is not None and operation.is_accepted and operation.is_small:
        _cut_short(queue, operation)
    with host.lock:
        if operation.phase == _ENDED:
            _release(operation)


# ---- copies between two memories ----


def _fill_entries(
    operation: Operation,
    dst: Place,
    src: Place,
    dst_offsets: Sequence[int],
    src_offsets: Sequence[int],
    lengths: Sequence[int],
    call: str,
) -> None:
    """Check the bounds of every entry, and keep those that have bytes."""
    dst_room, src_room, entries, total = dst.nbytes, src.nbytes, operation.entries, 0
    for i, (to, since, nbytes) in enumerate(zip(dst_offsets, src_offsets, lengths, strict=True)):
        if nbytes < 0 or to < 0 or to + nbytes > dst_room:
            values = (i, to, nbytes, dst_room)
            raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_COPY_DST_RANGE, values, call)
        if since < 0 or since + nbytes > src_room:
            values = (i, since, nbytes, src_room)
            raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_COPY_SRC_RANGE, values, call)
        if nbytes:
            entries.append((dst.address + to, src.address + since, nbytes, i))
            total += nbytes
    operation.entry_count, operation.total_nbytes = len(entries), min(total, c.KVR_NBYTES_MAX)


def copy_submit(
    queue: Any,
    destination: Any,
    source: Any,
    destination_offsets: Any,
    source_offsets: Any,
    lengths: Any,
    after: Any,
) -> int:
    call = "copy_submit"
    handle = _status.as_integer(queue, "queue")
    dst_words = _words_of(destination, "destination", 5, False)
    src_words = _words_of(source, "source", 5, False)
    dst_offsets = int64_view(destination_offsets, "destination_offsets")
    src_offsets = int64_view(source_offsets, "source_offsets")
    nbytes = int64_view(lengths, "lengths")
    waits = _words_of(after, "after", 3, True)
    check_length("destination_offsets", len(dst_offsets), len(nbytes), "entries")
    check_length("source_offsets", len(src_offsets), len(nbytes), "entries")
    _check_counts(len(nbytes), len(waits) // 3, call)
    operation = Operation()
    with _Entry() as entry:
        try:
            with host.lock:
                found = _find_open_queue(handle, call)
                found.calls += 1
                entry.queue = found
                dst = _hold_memory(operation, dst_words, call)
                src = _hold_memory(operation, src_words, call)
                _check_writable(dst, call)
                _add_waits(operation, waits, call)
            _fill_entries(operation, dst, src, dst_offsets.tolist(), src_offsets.tolist(), nbytes.tolist(), call)
            is_same = dst.region is not None and dst.region is src.region
            _check_overlaps(operation.entries, dst.address - src.address if is_same else 0, call)
            operation.device = _copier(dst.device, src.device)
            if operation.device >= 0:
                cuda.copy_ready(operation.device, call)
            with host.lock:
                _accept(found, operation)
            if operation.is_small:
                _run_here(found, operation)
            return operation.handle
        except BaseException:
            _undo(operation, None)
            raise


# ---- copies of slots ----


class Batch(NamedTuple):
    """What copy_slots was given."""

    direction: int
    mappings: list[int]
    slots: list[int]
    generations: list[int]
    engine_blocks: list[int]
    segments: list[list[int]]  # of a kvr_segment's words
    flags: int
    after: list[int]


def _check_batch(given: Batch, call: str) -> None:
    values: tuple[int, ...]
    if given.direction not in (_IN, _OUT):
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_DIRECTION_UNKNOWN, (given.direction,), call)
    known = c.KVR_SLOTS_COMMIT | c.KVR_SLOTS_CHECKSUM if given.direction == _IN else c.KVR_SLOTS_VERIFY
    if given.flags & ~known:
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_FLAGS_UNKNOWN, (given.flags, known), call)
    count, segment_count = len(given.slots), len(given.segments)
    if segment_count > c.KVR_BATCH_COUNT_MAX:
        values = (segment_count, c.KVR_BATCH_COUNT_MAX)
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_COUNT_RANGE, values, call)
    if count and segment_count > c.KVR_BATCH_COUNT_MAX // count:
        values = (count, c.KVR_BATCH_COUNT_MAX // segment_count)
        raise _status.make(c.KVR_ERROR_RANGE, c.KVR_DETAIL_COUNT_RANGE, values, call)


def _hold_data(operation: Operation, table: Table, given: Batch, call: Call) -> None:
    """Hold the data regions' mappings, which have to be this part's size. The caller holds `lock`."""
    if len(given.mappings) != table.region_count:
        raise call.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_REGION_INDEX_RANGE, len(given.mappings), table.region_count)
    for i, handle in enumerate(given.mappings):
        mapping = _hold_mapping(operation, handle, call.name)
        first = i * table.slots_per_region
        needed = (min(first + table.slots_per_region, table.slot_count) - first) * table.block_nbytes
        if mapping.nbytes < needed:
            raise call.error(c.KVR_ERROR_SIZE_MISMATCH, c.KVR_DETAIL_REGION_BIND_NBYTES, mapping.nbytes, needed)
        if given.direction == _IN and mapping.access != c.KVR_ACCESS_READ_WRITE:
            raise call.error(c.KVR_ERROR_PERMISSION_DENIED, c.KVR_DETAIL_COPY_READ_ONLY, handle)
        operation.device = _copier(operation.device, mapping.region.provider)


def _hold_segments(operation: Operation, table: Table, given: Batch, call: Call) -> list[Place]:
    """Hold the engine's memory. The caller holds `lock`."""
    block, places = table.block_nbytes, []
    for i, words in enumerate(given.segments):
        offset, stride, slot_offset, nbytes = words[5:]
        place = _hold_memory(operation, words[:5], call.name)
        if given.direction == _OUT:
            _check_writable(place, call.name)
        if nbytes < 0 or slot_offset < 0 or slot_offset + nbytes > block:
            raise call.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_SEGMENT_RANGE, i, slot_offset, nbytes, block)
        if offset < 0 or stride < nbytes:
            raise call.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_STRIDE_RANGE, i, offset, stride, nbytes)
        operation.device = _copier(operation.device, place.device)
        places.append(place)
    return places


def _blocks_of(words: Sequence[int], place: Place) -> int:
    """Count the blocks of a segment that lie in its memory."""
    offset, stride, _, nbytes = words[5:]
    room = place.nbytes - nbytes
    if offset > room:
        return 0
    return (room - offset) // stride + 1 if stride else c.KVR_BATCH_COUNT_MAX


def _fill_slots(operation: Operation, table: Table, given: Batch, places: Sequence[Place], call: Call) -> None:
    entries, total = operation.entries, 0
    for s, words in enumerate(given.segments):
        offset, stride, slot_offset, nbytes = words[5:]
        place, blocks = places[s], _blocks_of(words, places[s])
        for i, slot in enumerate(operation.slots):
            if slot < 0 or not nbytes:
                continue
            block = given.engine_blocks[i]
            if not 0 <= block < blocks:
                values = (i, block, s, place.nbytes)
                raise call.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_ENGINE_BLOCK_RANGE, *values)
            engine = place.address + offset + block * stride
            region, index = divmod(slot, table.slots_per_region)
            part = operation.mappings[region].address + index * table.block_nbytes + slot_offset
            entries.append((part, engine, nbytes, i) if given.direction == _IN else (engine, part, nbytes, i))
            total += nbytes
    operation.entry_count, operation.total_nbytes = len(entries), min(total, c.KVR_NBYTES_MAX)


def _check_slots(operation: Operation, table: Table, given: Batch, call: Call) -> None:
    seen: set[int] = set()
    operation.slots, operation.generations = given.slots, given.generations
    for i, slot in enumerate(given.slots):
        if not -1 <= slot < table.slot_count:
            raise call.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_SLOT_RANGE, i, slot, table.slot_count)
    for i, slot in enumerate(given.slots):
        if given.direction == _IN and slot >= 0 and slot in seen:
            raise call.error(c.KVR_ERROR_RANGE, c.KVR_DETAIL_SLOT_REPEATED, i, slot)
        seen.add(slot)


def _claim_slots(call: Call, table: Table, operation: Operation) -> None:
    """Claim the slots for the operation itself: only those that are there, in the order of entries."""
    operation.places = [i for i, slot in enumerate(operation.slots) if slot >= 0]
    operation.generations = [operation.generations[i] for i in operation.places]
    operation.slots = [operation.slots[i] for i in operation.places]
    try:
        tables.claim_all(call, table, operation.slots, operation.generations, operation.claims)
    except tables.StaleSlotError as stale:
        index = operation.places[stale.index]
        operation.fail(call.error(c.KVR_ERROR_STALE_BLOCK, stale.detail, index, *stale.values), index)


def _take_slots(operation: Operation, table: Table, call: Call) -> None:
    """Own or claim the slots. Blocks that are gone are the operation's failure, not the call's."""
    if operation.direction == _OUT:
        run("table_claim_slots", table.handle, _claim_slots, operation)
        return
    stale = run(call.name, table.handle, owners.own, operation, operation.slots, operation.generations)
    if stale is not None:
        operation.fail(stale[1], stale[0])


def copy_slots(
    queue: Any,
    table: Any,
    direction: Any,
    mappings: Any,
    slots: Any,
    generations: Any,
    engine_blocks: Any,
    segments: Any,
    flags: Any,
    after: Any,
) -> int:
    call = "copy_slots"
    handle = _status.as_integer(queue, "queue")
    part = _status.as_integer(table, "table")
    direction = _status.as_integer(direction, "direction", *INT32)
    regions, places = int64_view(mappings, "mappings"), int64_view(slots, "slots")
    numbers, blocks = int64_view(generations, "generations"), int64_view(engine_blocks, "engine_blocks")
    words = _words_of(segments, "segments", 9, True)
    flags = _status.as_integer(flags, "flags", *UINT32)
    waits = _words_of(after, "after", 3, True)
    check_length("generations", len(numbers), len(places), "entries")
    check_length("engine_blocks", len(blocks), len(places), "entries")
    _check_counts(len(places), len(waits) // 3, call)
    slices = [words[start : start + 9] for start in range(0, len(words), 9)]
    given = Batch(
        direction,
        regions.tolist(),
        places.tolist(),
        numbers.tolist(),
        blocks.tolist(),
        slices,
        flags,
        waits,
    )
    _check_batch(given, call)
    return run(call, part, _copy_slots, handle, given)  # type: ignore[no-any-return]


def _copy_slots(call: Call, table: Table, handle: int, given: Batch) -> int:
    if given.direction == _IN:
        call.require(table, WRITER)
    else:
        call.require(table, READER, WRITER)
    operation = Operation(given.direction, given.flags)
    with _Entry() as entry:
        try:
            with host.lock:
                found = _find_open_queue(handle, call.name)
                found.calls += 1
                entry.queue = found
                _add_waits(operation, given.after, call.name)
            _check_slots(operation, table, given, call)
            with host.lock:
                _hold_data(operation, table, given, call)
                places = _hold_segments(operation, table, given, call)
            _fill_slots(operation, table, given, places, call)
            _check_overlaps(operation.entries, 0, call.name)
            if operation.device >= 0:
                cuda.copy_ready(operation.device, call.name)
            _take_slots(operation, table, call)
            with host.lock:
                table.operations += 1
                operation.table = table
                _accept(found, operation)
            if operation.is_small:
                _run_here(found, operation)
            return operation.handle
        except BaseException:
            _undo(operation, table)
            raise
