"""The model that the backends are compared with is compared with what is known from elsewhere."""

from __future__ import annotations

import itertools
import json

import pytest
from model.table_model import ModelError, TableModel

# The first 2000 requests of the conversation trace: (blocks, hit blocks, evictions), counted by another program.
KNOWN = [(1000, 2218, 51341)]


@pytest.mark.parametrize(("blocks", "hits", "evictions"), KNOWN)
def test_model_plays_the_trace_as_known(shared_dir, blocks, hits, evictions):
    """The fixed policy of the replay over the model gives the known counts."""
    trace = shared_dir / "data" / "conversation_trace.jsonl"
    if not trace.exists():
        pytest.skip(f"no trace: {trace}")
    model = TableModel(blocks)
    found = 0
    free = list(range(blocks))
    with trace.open() as lines:
        for line in itertools.islice(lines, 2000):
            ids = [number.to_bytes(8, "little") for number in json.loads(line)["hash_ids"]]
            found += model.match(ids)
            kept = ids[:blocks]
            before = set(model.blocks)
            entries, _ = model.reserve(kept, evict=True)
            free += before - set(model.blocks)
            slots = [-1 if entry is None else free.pop() for entry in entries]
            generations = [0 if slot == -1 else model.generations[slot] + 1 for slot in slots]
            model.assign(entries, slots, generations)
            model.commit(slots, generations)
            model.touch(1, kept)
    assert (found, model.totals["evicted"]) == (hits, evictions)


def test_model_refuses_a_slot_that_was_not_free():
    """What the model is told is checked, too."""
    model = TableModel(2)
    model.assign(model.reserve([b"a"])[0], [0], [1])
    entries, _ = model.reserve([b"b"])
    for slot, generation in ((0, 2), (1, 2), (1, 0)):
        with pytest.raises(AssertionError):
            model.assign(entries, [slot], [generation])
    with pytest.raises(ModelError):
        model.reserve([b"a"])
