"""Benchmarks run on every backend that is present, in one run, so that ratios compare the same moment."""

from __future__ import annotations

import importlib
import importlib.util

import pytest

_NAMES = [name for name in ("core", "fallback") if importlib.util.find_spec(f"kvreuse._{name}")]


@pytest.fixture(params=_NAMES)
def backend_name(request):
    return request.param


@pytest.fixture
def backend(backend_name):
    return importlib.import_module(f"kvreuse._{backend_name}")


def median_seconds(function, repeat: int = 7, number: int = 200) -> float:
    """Median over `repeat` runs of the mean of `number` calls, seconds."""
    import statistics
    import timeit

    return statistics.median(timeit.repeat(function, repeat=repeat, number=number)) / number
