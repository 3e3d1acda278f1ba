"""The independent model of the policy reaches the counts that were counted elsewhere."""

from __future__ import annotations

import json

import pytest
from model import replay_model

# (limit, block_refs), blocks -> (hit_blocks, evictions)
KNOWN = {
    (None, 288500): {1000: (12847, 274653), 10000: (61046, 217454), 30000: (93978, 164522)},
    (2000, 54559): {1000: (2218, 51341), 10000: (11409, 33150), 30000: (15692, 8867)},
}


@pytest.mark.parametrize(("limit", "refs"), KNOWN)
def test_model_reaches_the_known_counts(shared_dir, limit, refs):
    lines = (shared_dir / "data" / "conversation_trace.jsonl").read_text().splitlines()
    requests = [json.loads(line)["hash_ids"] for line in lines[:limit]]
    for blocks, (hits, evictions) in KNOWN[limit, refs].items():
        counts = replay_model.play(requests, blocks)
        assert (counts.block_refs, counts.hit_blocks, counts.evictions) == (refs, hits, evictions)


def test_model_by_hand():
    """What no real trace has: each step counted on paper."""
    # A repeated id is stored once and, once there, counts each time it is asked for.
    assert replay_model.play([[1, 1, 2], [1, 1, 1]], 4) == replay_model.Counts(2, 6, 3, 0, 2)
    # Beyond the cut nothing is stored; 3 is not, so only 1 and 2 hit.
    assert replay_model.play([[1, 2, 3], [1, 2, 3]], 2) == replay_model.Counts(2, 6, 4, 0, 2)
    # A hole: 2 is evicted by 9 before 1 is (the tail is older), so [1, 2, 3] hits 1 only, though 3 ... was older still.
    assert replay_model.play([[1, 2], [1, 9], [1, 2, 9]], 2) == replay_model.Counts(3, 7, 2, 2, 4)
    # One block.
    assert replay_model.play([[1], [2], [2, 1], [1]], 1) == replay_model.Counts(4, 5, 1, 2, 3)
