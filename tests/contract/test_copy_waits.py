"""Waiting for copies burns no CPU, and ends in time."""

from __future__ import annotations

import time

import numpy as np
import pytest

QUEUE_FAULTS, FAULT_PAUSE = 1, 1
NONE = np.empty(0, np.int64)
WAIT_S = 0.4
BURNT_S = 0.1  # what else the call costs on a busy machine


def _memory(array, writable):
    return np.array([0, array.ctypes.data, array.nbytes, -1, writable], np.int64)


@pytest.fixture
def stopped(backend):
    """(queue, operation): a small copy that a fault has stopped near its end."""
    dst, src = np.zeros(1 << 17, np.uint8), np.ones(1 << 17, np.uint8)
    zero, length = np.zeros(1, np.int64), np.array([1 << 17])
    queue = backend.queue_open(2, QUEUE_FAULTS)
    backend.queue_fault(queue, FAULT_PAUSE, 0, (1 << 17) - 1)
    operation = backend.copy_submit(queue, _memory(dst, 1), _memory(src, 0), zero, zero, length, NONE)
    yield queue, operation
    backend.queue_resume(queue)
    assert backend.operation_wait(operation, 10**10)
    assert dst.all()
    backend.operation_release(operation)
    backend.queue_close(queue, 10**10)


def test_a_wait_sleeps(backend, stopped):
    """Its time is kept, and is not spent on looking."""
    begun, burnt = time.monotonic(), time.thread_time()
    assert not backend.operation_wait(stopped[1], int(WAIT_S * 1e9))
    assert time.thread_time() - burnt < BURNT_S
    assert time.monotonic() - begun >= WAIT_S


def test_short_waits_are_short(backend, stopped):
    """A thousand waits of no time, and a hundred of a microsecond."""
    for wait_ns, count in ((0, 1000), (1000, 100)):
        begun = time.thread_time()
        for _ in range(count):
            assert not backend.operation_wait(stopped[1], wait_ns)
        assert time.thread_time() - begun < 0.5


def test_idle_threads_sleep(backend, stopped):
    """Neither the stopped thread nor the one without work burns CPU while nobody calls."""
    time.sleep(0.01)
    burnt = time.process_time()
    time.sleep(WAIT_S)
    assert time.process_time() - burnt < BURNT_S


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_a_waiter_leaves_goes_on(backend, is_cancelled):
    """O1: a caller whose time runs out midway leaves the rest to the queue, or to a cancel: both reach an end."""
    nbytes = 8 << 20
    dst, src = np.zeros(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    zero, length = np.zeros(1, np.int64), np.array([nbytes])
    queue = backend.queue_open(1, 0)
    for _ in range(30):
        dst[:] = 0
        operation = backend.copy_submit(queue, _memory(dst, 1), _memory(src, 0), zero, zero, length, NONE)
        backend.operation_wait(operation, 1000)
        if is_cancelled:
            backend.operation_cancel(operation)
        deadline = time.monotonic() + 20
        while (info := backend.operation_info(operation)).state < 2:
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        assert info.state == 2 or (is_cancelled and info.state == 4)
        assert info.state != 2 or dst.all()
        backend.operation_release(operation)
    backend.queue_close(queue, 10**10)
