"""The block checksum against memmove of the same bytes."""

from __future__ import annotations

import ctypes

import google_crc32c
import numpy as np
import pytest
from conftest import median_seconds

SIZES = [4096, 1 << 20]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.benchmark(group="crc32c")
def test_crc32c(benchmark, backend, nbytes):
    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    assert backend.crc32c(data) == google_crc32c.value(data.tobytes())
    benchmark(backend.crc32c, data)


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.benchmark(group="crc32c")
def test_floor_memmove(benchmark, nbytes):
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    benchmark(ctypes.memmove, target.ctypes.data, source.ctypes.data, nbytes)
    assert (target == source).all()


@pytest.mark.gate
@pytest.mark.parametrize("nbytes", SIZES)
def test_core_checksum_is_within_four_times_memmove(nbytes):
    core = pytest.importorskip("kvreuse._core")
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    number = max(20, (64 << 20) // nbytes // 8)
    move = median_seconds(lambda: ctypes.memmove(target.ctypes.data, source.ctypes.data, nbytes), number=number)
    crc = median_seconds(lambda: core.crc32c(source), number=number)
    assert crc <= 4 * move, f"crc32c {crc * 1e6:.2f} us, memmove {move * 1e6:.2f} us"
