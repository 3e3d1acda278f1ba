"""Queues of copies, and operations: native work that owns what it names until it has ended (O1-O7).

What an operation keeps in Python (a wrapped buffer, say) is let go by whoever sees its end: `wait`, `poll`, `state`,
`result`, `CopyQueue.completed`. An operation that nobody holds is seen to its end by one thread of this module, which
runs only then.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import enum
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Union

import numpy as np
import numpy.typing as npt

from . import _status
from ._api import OperationInfo, QueueInfo
from ._context import Context
from ._select import backend as _backend
from .errors import (
    ForkedError,
    HandleClosedError,
    KVReuseError,
    NotQuiescentError,
    ProfileError,
    StaleHandleError,
    WaitTimeoutError,
)
from .handles import Region
from .memory import Copyable, as_copyable, memory_words

if TYPE_CHECKING:
    from .profile import Profile

QUEUE_FAULTS = 1  # KVR_QUEUE_FAULTS
AFTER_FD, AFTER_OPERATION, AFTER_CUDA_EVENT = 1, 2, 3  # KVR_AFTER_...
QUARANTINE_REASONS = {  # KVR_QUARANTINE_...
    1: "its queue was to be closed, and it had not ended in time",
    2: "the driver does not tell whether it has ended",
}
# Python's signal handlers run between two of these.
_WAIT_SLICE_S = 0.1
EXIT_WAIT_S = 2.0
COMPLETED_BATCH = 256


class OperationState(enum.IntEnum):
    """How an operation stands. DONE, FAILED and CANCELLED are final."""

    QUEUED = 0
    RUNNING = 1
    DONE = 2
    FAILED = 3
    CANCELLED = 4

    @property
    def is_final(self) -> bool:
        """Whether the operation has ended."""
        return self >= OperationState.DONE


@dataclasses.dataclass(frozen=True)
class CudaEvent:
    """A recorded CUDA event (CUevent, as an integer) of "cuda:ordinal", for `after=`. The caller keeps it alive."""

    event: int
    ordinal: int


After = Union["Operation", CudaEvent, int, Any]


class Operation:
    """A copy on its way. Made by CopyQueue.submit, Part.store, Part.load, Reservation.copy_in and Claim.copy_out.

    It keeps the memory that it names until its native work has ended; a timeout or a cancel changes nothing of that.
    """

    def __init__(self, handle: int, kept: Any, label: str = "copy") -> None:
        self._handle = handle
        self._kept = kept
        self._label = label
        self._pid = os.getpid()
        self._final: OperationState | None = None
        self._error: KVReuseError | None = None
        self._info: OperationInfo | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<kvreuse.Operation {self._label} {self._handle} {'?' if self._final is None else self._final.name}>"

    @property
    def handle(self) -> int:
        """The int64 handle: it names the operation in messages and in the quarantine."""
        return self._handle

    def poll(self) -> OperationState:
        """Look how it stands. What it kept is let go if it has ended.

        Raises
        ------
        ForkedError
            It belongs to the parent process.
        """
        if self._final is None:
            info = self._look()
            if info is not None:
                return OperationState(info.state)
        assert self._final is not None
        return self._final

    def _look(self) -> OperationInfo | None:
        """Give the backend's info while it has not ended; None: it has, and all of it is known here."""
        with self._lock:
            if self._final is not None:
                return None
            info = _backend.operation_info(self._handle)
            state = OperationState(info.state)
            if not state.is_final:
                return info
            self._error = _backend.operation_error(self._handle)
            self._info = info
            self._final = state
            kept, self._kept = self._kept, None
        del kept  # without the lock: it may run the caller's code
        return None

    def _known(self) -> OperationInfo:
        info = self._look() or self._info
        assert info is not None
        return info

    @property
    def state(self) -> OperationState:
        """As `poll`."""
        return self.poll()

    def wait(self, timeout: float = 30.0) -> OperationState:
        """Wait until it has ended.

        Returns
        -------
        OperationState
            DONE, FAILED or CANCELLED.

        Raises
        ------
        WaitTimeoutError
            It has not ended within `timeout` seconds. This proves nothing and frees nothing.
        ForkedError
            It belongs to the parent process.
        """
        deadline = time.monotonic() + timeout
        while self._final is None:
            left = deadline - time.monotonic()
            slice_ns = int(max(0.0, min(left, _WAIT_SLICE_S)) * 1e9)
            if _backend.operation_wait(self._handle, slice_ns):
                return self.poll()
            if left <= 0:
                raise WaitTimeoutError(
                    f"{self._label} {self._handle} has not ended within {timeout:g} s: it goes on",
                    status=-23,
                    name="WAIT_TIMEOUT",
                )
        return self._final

    def cancel(self) -> None:
        """Ask it to end early. Wait for its end all the same: until then it may still write."""
        if self._final is None:
            _backend.operation_cancel(self._handle)

    @property
    def error(self) -> KVReuseError | None:
        """Why it FAILED or was CANCELLED; None otherwise, and before its end."""
        self.poll()
        return self._error

    @property
    def failed_index(self) -> int | None:
        """The entry that FAILED is about; None if it is about none."""
        self.poll()
        found = -1 if self._info is None else self._info.failed_index
        return None if found < 0 else found

    @property
    def moved_nbytes(self) -> int:
        """Bytes moved so far."""
        return self._known().moved_nbytes

    @property
    def total_nbytes(self) -> int:
        """Bytes to move."""
        return self._known().total_nbytes

    def result(self, timeout: float = 30.0) -> int:
        """Wait until it has ended, and raise what FAILED or CANCELLED means.

        Returns
        -------
        int
            Bytes moved.

        Raises
        ------
        WaitTimeoutError
            As `wait`.
        SystemCallError, SizeMismatchError, StaleBlockError, CorruptError, NotReadyError, DriverError, HandleClosedError
            Why it failed; HandleClosedError: it was cancelled. The destination is invalid.
        """
        self.wait(timeout)
        if self._error is not None:
            # Made anew: one that is raised again gathers tracebacks, and they keep what they went through.
            error = _backend.operation_error(self._handle)
            raise error if error is not None else self._error
        return self.moved_nbytes

    def __del__(self) -> None:
        if not getattr(self, "_handle", 0) or self._pid != os.getpid():
            return
        try:
            if self._look() is None:
                _backend.operation_release(self._handle)
                return
        except KVReuseError:
            return
        _reaper.adopt(self._handle, self._kept)


def after_words(after: Iterable[After]) -> tuple[list[int], list[Any]]:
    """Describe dependencies as the backends do (kvr_dependency), with what has to live until the submit is over."""
    words: list[int] = []
    kept: list[Any] = []
    for item in after:
        if isinstance(item, Operation):
            words += [AFTER_OPERATION, item._handle, 0]
        elif isinstance(item, CudaEvent):
            words += [AFTER_CUDA_EVENT, item.event - 2**64 if item.event >= 2**63 else item.event, item.ordinal]
        else:
            fd = item.fileno() if hasattr(item, "fileno") else _status.as_integer(item, "an fd of after", 0, 2**31 - 1)
            words += [AFTER_FD, fd, 0]
        kept.append(item)
    return words, kept


def int64s(values: npt.ArrayLike, name: str) -> npt.NDArray[np.int64]:
    """Give integers as the backends take them: a contiguous int64 array. TypeError for all else (H7)."""
    array = np.asarray(values)
    if array.size == 0 and array.ndim <= 1:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise TypeError(f"{name} must be a 1-D array of integers: got {array.dtype} of shape {array.shape}")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and (array > np.uint64(2**63 - 1)).any():
        raise _status.make_text(-6, f"{name} has a number above {2**63 - 1}")
    return np.ascontiguousarray(array, np.int64)


def submit_words(words: list[int]) -> npt.NDArray[np.int64]:
    """Give words as an int64 array."""
    return np.array(words, np.int64)


class CopyQueue(Context):
    """Copies that run one after the other, or several at once, on native threads of its own.

    Parameters
    ----------
    threads : int
        1 to 64. A large operation is shared by them.
    profile : Profile, optional
        [copies] of it: `quarantine_max_bytes`, for the whole process, and `after`.
    """

    def __init__(self, threads: int = 1, profile: Profile | None = None, *, _flags: int = 0) -> None:
        self._handle = 0
        self._pid = os.getpid()
        self._needs_after = False
        self._lock = threading.RLock()  # an operation that has ended is not listed before its object is there
        self._operations: weakref.WeakValueDictionary[int, Operation] = weakref.WeakValueDictionary()
        if profile is not None:
            self._needs_after = profile.copies.after == "required"
            _backend.quarantine_limit_set(profile.copies.quarantine_max_bytes)
        self._handle = _backend.queue_open(threads, _flags)
        _open_queues.add(self)

    def __repr__(self) -> str:
        return f"<kvreuse.CopyQueue {self._handle or 'closed'}>"

    @property
    def handle(self) -> int:
        """The int64 handle. Raises HandleClosedError after close."""
        if not self._handle:
            raise HandleClosedError("the CopyQueue is closed", status=-3, name="HANDLE_CLOSED")
        return self._handle

    def info(self) -> QueueInfo:
        """Read its counts: submitted is always done + failed + cancelled + queued + running."""
        return _backend.queue_info(self.handle)

    def fileno(self) -> int:
        """An eventfd for poll, asyncio or zmq: readable while `completed` has something to tell. The queue's own."""
        return self.info().fd

    def submit(
        self,
        dst: Any,
        src: Any,
        dst_offsets: npt.ArrayLike,
        src_offsets: npt.ArrayLike,
        lengths: npt.ArrayLike,
        after: Iterable[After] = (),
    ) -> Operation:
        """Submit a batch of copies. It is checked whole first: nothing is copied if one entry is bad.

        Parameters
        ----------
        dst, src : Region, Mapping, Memory, or what Memory.wrap takes
            Host or CUDA memory. A region is mapped once for its copies, and the mapping closed with it.
        dst_offsets, src_offsets, lengths : integers of shape (n,)
            Bytes. Destinations must not overlap one another, nor a source.
        after : sequence, optional
            What to wait for before anything is touched: an fd that polls readable (an eventfd; it is not read), an
            Operation that has to end DONE, a CudaEvent.

        Returns
        -------
        Operation
            Keep it: one that nobody holds is finished and not listed.

        Raises
        ------
        RangeError
            An entry is outside of its memory, or overlaps another: the text names it.
        PermissionDeniedError
            dst can only be read.
        ProfileError
            The profile requires a dependency and none was given.
        NotQuiescentError
            The quarantine is full.
        HandleClosedError
            The queue is closed, or being closed.
        """
        self.check_after(after := tuple(after))
        to, since = _as_memory(dst), _as_memory(src)
        waits, kept = after_words(after)
        arguments = (
            submit_words(memory_words(to)),
            submit_words(memory_words(since)),
            int64s(dst_offsets, "dst_offsets"),
            int64s(src_offsets, "src_offsets"),
            int64s(lengths, "lengths"),
            submit_words(waits),
        )
        return self._take(_backend.copy_submit, arguments, (to, since, kept))

    def check_after(self, after: tuple[After, ...]) -> None:
        """Raise ProfileError where the profile requires a dependency and there is none."""
        if self._needs_after and not after:
            raise ProfileError(
                'the profile says [copies] after = "required": name what the copy depends on (after=)',
                status=-21,
                name="PROFILE",
            )

    def _take(
        self, submit: Callable[..., int], arguments: tuple[Any, ...], kept: Any, label: str = "copy"
    ) -> Operation:
        with self._lock:
            operation = Operation(submit(self.handle, *arguments), kept, label)
            self._operations[operation.handle] = operation
            return operation

    def completed(self) -> list[Operation]:
        """List operations that have ended, in the order of their ends, each once; but for those seen to end before.

        Clears the eventfd.
        """
        found: list[Operation] = []
        listed = np.empty(COMPLETED_BATCH, np.int64)
        while True:
            with self._lock:
                count = _backend.queue_completed(self.handle, listed)
                ended = [self._operations.pop(handle, None) for handle in listed[:count].tolist()]
            for operation in ended:
                if operation is not None and operation._final is None:
                    operation.poll()
                    found.append(operation)
            if count < COMPLETED_BATCH:
                return found

    def close(self, timeout: float = 5.0) -> None:
        """Wait for all operations, then end the threads. From now on nothing more is taken. Closing again does nothing.

        Raises
        ------
        NotQuiescentError
            Some have not ended within `timeout` seconds (the cause): they go into quarantine, all that they name stays
            as it is, and the queue can be closed again.
        """
        if not self._handle:
            return
        if self._pid != os.getpid():
            raise ForkedError("the queue belongs to the parent process", status=-26, name="FORKED")
        deadline = time.monotonic() + timeout
        try:
            while True:
                left = max(0.0, deadline - time.monotonic())
                if _backend.queue_drain(self._handle, int(min(left, _WAIT_SLICE_S) * 1e9)) or not left:
                    break
            _backend.queue_close(self._handle, 0)
        except StaleHandleError:  # another thread has just closed it
            pass
        except NotQuiescentError as error:
            text = f"{error.count} operation(s) have not ended within {timeout:g} s"
            raise error from WaitTimeoutError(text, status=-23, name="WAIT_TIMEOUT")
        self._handle = 0
        _open_queues.discard(self)
        for operation in list(self._operations.values()):
            operation.poll()

    def __enter__(self) -> CopyQueue:
        _ = self.handle
        return self

    def __del__(self) -> None:
        if not getattr(self, "_handle", 0) or self._pid != os.getpid():
            return
        warnings.warn("CopyQueue was dropped without close()", ResourceWarning, stacklevel=2, source=self)
        _reaper.adopt_queue(self._handle)


def _as_memory(obj: Any) -> Copyable:
    return obj._copy_mapping() if isinstance(obj, Region) else as_copyable(obj)


# ---- what nobody holds any more ----


class _Reaper:
    """Sees operations and queues to their end that their holder dropped. Its thread lives only while there are some."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # re-entrant: finalizers run anywhere
        self._operations: list[tuple[int, Any]] = []
        self._queues: list[int] = []
        self._thread: threading.Thread | None = None

    def adopt(self, operation: int, kept: Any) -> None:
        self._add(lambda: self._operations.append((operation, kept)))

    def adopt_queue(self, queue: int) -> None:
        self._add(lambda: self._queues.append(queue))

    def _add(self, add: Any) -> None:
        with self._lock:
            add()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvreuse-reaper", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # Python ends: see leak_all
                    self._thread = None

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._operations and not self._queues:
                    self._thread = None
                    return
                operations, queues = list(self._operations), list(self._queues)
            for item in operations:
                if self._has_ended(item[0]):
                    with self._lock:
                        self._operations.remove(item)
            del operations
            for queue in queues:
                if self._is_closed(queue):
                    with self._lock:
                        self._queues.remove(queue)
            if self._operations:
                with contextlib.suppress(KVReuseError, IndexError):
                    _backend.operation_wait(self._operations[0][0], 20_000_000)
            elif self._queues:
                time.sleep(0.02)

    @staticmethod
    def _has_ended(operation: int) -> bool:
        try:
            if not _backend.operation_wait(operation, 0):
                return False
            _backend.operation_release(operation)
        except KVReuseError:
            pass
        return True

    @staticmethod
    def _is_closed(queue: int) -> bool:
        try:
            _backend.queue_close(queue, 0)
        except NotQuiescentError:
            return False
        except KVReuseError:
            pass
        return True

    def forget(self) -> None:
        """In a forked child: all of it is the parent's."""
        self.__init__()  # type: ignore[misc]

    def kept(self) -> list[Any]:
        with self._lock:
            return [kept for _, kept in self._operations]


_reaper = _Reaper()
_open_queues: weakref.WeakSet[CopyQueue] = weakref.WeakSet()
os.register_at_fork(after_in_child=_reaper.forget)


@atexit.register
def _at_exit() -> None:
    """Wait a little for what is in flight. What stays so keeps its memory: freed, it would be written into (O2)."""
    deadline = time.monotonic() + EXIT_WAIT_S
    left: list[Any] = []
    for queue in list(_open_queues):
        if queue._pid != os.getpid():
            continue
        try:
            queue.close(max(0.0, deadline - time.monotonic()))
        except KVReuseError:
            left += [operation._kept for operation in queue._operations.values()]
            left += list(queue._operations.values())
            left.append(queue)
    left += _reaper.kept()
    if left:
        from ._ctypes_dlpack import keep_for_ever

        keep_for_ever(left)


# ---- quarantine ----


@dataclasses.dataclass(frozen=True)
class QuarantinedOperation:
    """An operation whose end is not proven.

    Attributes
    ----------
    operation, queue : int
        Handles.
    reason : str
        Why it is here.
    age_s : float
        Seconds since it came here.
    total_nbytes, moved_nbytes : int
        Bytes that it was to move, and that it is known to have moved.
    """

    operation: int
    queue: int
    reason: str
    age_s: float
    total_nbytes: int
    moved_nbytes: int

    def give_back(self, *, accept_risk: bool = False) -> None:
        """Give up waiting for its end: the operation is FAILED, and all that it owned can be used and freed again.

        Its native work may still run. It then writes into memory that others use: a block gets another's bytes, or the
        process is killed for touching memory that is gone. Only do it when that cannot be, or no longer matters.

        Raises
        ------
        TypeError
            accept_risk is not True.
        BusyError
            It is not in quarantine any more.
        """
        if accept_risk is not True:
            raise TypeError(
                f"giving operation {self.operation} back risks that it still writes into memory that others "
                "use by then: pass accept_risk=True"
            )
        _backend.operation_abandon(self.operation)


def quarantine() -> list[QuarantinedOperation]:
    """List the operations of this process whose end is not proven; those that end meanwhile leave by themselves."""
    handles = np.empty(64, np.int64)
    while (count := _backend.quarantine(handles)) > len(handles):
        handles = np.empty(2 * count, np.int64)
    found = []
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    for handle in handles[:count].tolist():
        try:
            info = _backend.operation_info(handle)
        except StaleHandleError:
            continue
        if info.quarantine:
            found.append(
                QuarantinedOperation(
                    handle,
                    info.queue,
                    QUARANTINE_REASONS[info.quarantine],
                    (now - info.quarantine_ns) / 1e9,
                    info.total_nbytes,
                    info.moved_nbytes,
                )
            )
    return found


__all__ = [
    "CopyQueue",
    "CudaEvent",
    "Operation",
    "OperationState",
    "QuarantinedOperation",
    "quarantine",
]
