"""Makes the leak guard cheap: a thousand tests each collect garbage twice, else over the objects of all modules."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def frozen_modules():
    """What the imports made is no garbage of any test: it is looked at once, here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
