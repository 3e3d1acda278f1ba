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
    # Beyond the cut nothing is stored: the second time 1 and 2 hit, 3 does not.
    assert replay_model.play([[1, 2, 3], [1, 2, 3]], 2) == replay_model.Counts(2, 6, 2, 0, 2)
    # A tail is older than its head: 9 takes the place of 2, not of 1.
    assert replay_model.play([[1, 2], [9], [1]], 2) == replay_model.Counts(3, 4, 1, 1, 3)
    # A hole: 4 takes the place of 2; then 3, behind the hole, is no hit, and neither evicted nor written.
    assert replay_model.play([[1, 2, 3], [3], [4], [1, 2, 3]], 3) == replay_model.Counts(4, 8, 2, 2, 5)
    # One block.
    assert replay_model.play([[1], [2], [2, 1], [1]], 1) == replay_model.Counts(4, 5, 1, 2, 3)
