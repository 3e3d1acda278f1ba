"""Destinations that overlap are refused however they are found out: sorted, or on a grid of equal blocks."""

from __future__ import annotations

import numpy as np
import pytest

from kvreuse import errors

SPACE = 1 << 16
# (length, step between places, what is added to all): a power of two, a length that is none, room between, no grid.
GRIDS = [(64, 64, 0), (48, 48, 0), (100, 128, 3), (96, 100, 7), (1, 512, 5), (128, 64, 0)]


def _memory(array, writable):
    return np.array([0, array.ctypes.data, array.nbytes, -1, writable], np.int64)


def _has_overlap(starts, lengths):
    order = np.argsort(starts, kind="stable")
    starts, lengths = starts[order], lengths[order]
    return bool(((starts + lengths)[:-1] > starts[1:]).any())


@pytest.mark.parametrize(("nbytes", "step", "base"), GRIDS)
def test_overlaps_of_many_blocks_are_refused(backend, nbytes, step, base):
    """Also one block twice, one that is a byte off, and one that is longer or shorter than the others."""
    draw = np.random.default_rng(nbytes)
    src = draw.integers(0, 256, SPACE, np.uint8)
    none = np.empty(0, np.int64)
    queue = backend.queue_open(1, 0)
    seen = set()
    try:
        for change in range(60):
            dst = np.zeros(SPACE, np.uint8)
            count = int(draw.integers(30, 80))
            to = base + draw.permutation(count * 5 // 4)[:count].astype(np.int64) * step
            since, lengths = draw.permutation(to), np.full(count, nbytes, np.int64)
            one, other = draw.choice(count, 2, replace=False)
            if change % 6 == 1:
                to[one] = to[other]
            elif change % 6 == 2:
                to[one] = to[other] + draw.integers(-1, 2)
            elif change % 6 == 3:
                lengths[one] += draw.integers(1, 2 * step)
            elif change % 6 == 4:
                lengths[one] = draw.integers(0, nbytes + 1)
            elif change % 6 == 5:
                to[one] += draw.integers(1, step + 1)
            is_refused = _has_overlap(to[lengths > 0], lengths[lengths > 0])
            seen.add(is_refused)
            arguments = queue, _memory(dst, 1), _memory(src, 0), to, since, lengths, none
            if is_refused:
                with pytest.raises(errors.RangeError):
                    backend.copy_submit(*arguments)
                assert not dst.any()
                continue
            operation = backend.copy_submit(*arguments)
            assert backend.operation_wait(operation, 10**10)
            backend.operation_release(operation)
            for i in range(count):
                assert (dst[to[i] : to[i] + lengths[i]] == src[since[i] : since[i] + lengths[i]]).all()
    finally:
        backend.queue_close(queue, 10**10)
    assert True in seen
    assert nbytes > step or False in seen
