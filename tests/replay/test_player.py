"""What a worker does with each request, in this process on real parts of both backends, against the model."""

from __future__ import annotations

import contextlib
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model import replay_model
from replay_peers import BLOCK_BYTES, open_part

import kvreuse
import kvreuse.parts
import kvreuse.testing
from kvreuse.replay_worker import Pattern, Player, id_of, keys_of


@pytest.fixture(scope="module")
def keeper():
    with (
        kvreuse.testing.keeper({"reuse": {"enabled": True}}) as path,
        kvreuse.connect(path, timeout=20) as connection,
    ):
        yield connection


@pytest.fixture
def player_of(backend, keeper):
    """``with player_of(blocks) as (part, player):`` on the backend under test."""

    @contextlib.contextmanager
    def make(blocks, verify="all"):
        with mock.patch.object(kvreuse.parts, "_backend", backend):
            with open_part(keeper, blocks) as part:
                yield part, Player(part, Pattern(0, BLOCK_BYTES), blocks, verify)
            keeper.release(part.part_id)

    return make


def ids_of(values):
    return np.array(values, np.int64)


def play_all(part, player, requests, blocks):
    """Play on the part and on the model; every step must be the same."""
    cache = replay_model.Cache(blocks)
    for request in requests:
        ids = ids_of(request)
        hits = player.match(ids)
        assert hits == cache.leading(request)
        done = player.play(ids, hits)
        stored, evicted = cache.play(request)
        assert (done["stored"], done["evicted"]) == (stored, evicted)
        assert (done["verified"], done["corrupt"]) == (hits, 0)
        assert done["bytes_written"] == len(stored) * BLOCK_BYTES
        assert {id_of(key) for key in part.keys()} == set(cache.ids)  # noqa: SIM118
    assert part.stats().claimed_count == part.stats().writing_count == 0


# Few ids, so that they repeat, are evicted and come back: holes in chains come of it.
REQUESTS = st.lists(st.lists(st.integers(0, 12), max_size=14), min_size=1, max_size=25)


def test_part_and_model_agree_step_by_step(backend, keeper):
    """R1, I1: hits, and blocks stored and evicted, in their order: repeats, holes, long requests, one block."""

    @settings(max_examples=60, deadline=None, database=None)
    @given(REQUESTS, st.integers(1, 10))
    def agree(requests, blocks):
        with mock.patch.object(kvreuse.parts, "_backend", backend):
            with open_part(keeper, blocks) as part:
                play_all(part, Player(part, Pattern(0, BLOCK_BYTES), blocks, "all"), requests, blocks)
            keeper.release(part.part_id)

    agree()


@pytest.mark.parametrize(
    ("blocks", "requests"),
    [
        (8, [[1, 1, 2, 1], [2, 2, 2], [1, 2, 1, 2, 3, 3]]),
        (3, [[1, 2, 3, 4, 5, 6], [4, 5, 6, 1], [1, 2, 3, 4]]),
        (4, [[1, 2, 3, 4], [7, 8], [1, 2, 3, 4], [2, 3]]),
        (1, [[1], [1, 1], [2, 1], [1, 2], [], [1]]),
        (2, [[0, 2**63 - 1], [2**63 - 1], [2**62, 0]]),
    ],
    ids=["repeats", "longer than the part", "holes", "one block", "ids at the ends of the range"],
)
def test_traces_that_no_real_trace_has(player_of, blocks, requests):
    with player_of(blocks) as (part, player):
        play_all(part, player, requests, blocks)


def test_damaged_block_is_counted_and_rewritten_in_place(player_of):
    """A byte changed from outside is found by the next hit, and the block is right again: no eviction, no lost hit."""
    with player_of(4) as (part, player):
        player.play(ids_of([1, 2, 3, 4]), 0)
        with part.claim(keys_of(ids_of([2]))) as claim:
            damage = part._view(int(claim.slots[0]))
            damage[BLOCK_BYTES - 1] ^= 1
            damage.release()
        done = player.play(ids_of([1, 2, 2, 3]), 4)
        assert (done["corrupt"], done["evicted"], done["stored"]) == (1, [], [])
        done = player.play(ids_of([1, 2, 3, 4]), player.match(ids_of([1, 2, 3, 4])))
        assert (done["verified"], done["corrupt"]) == (4, 0)
        assert part.stats().evicted_total == 0


def test_verification_looks_at_what_it_is_told(player_of):
    for verify, expected in (("all", 20), ("sample", 2), ("off", 0)):
        with player_of(20, verify) as (_, player):
            ids = ids_of(range(20))
            player.play(ids, 0)
            assert player.play(ids, 20)["verified"] == expected


def test_stop_leaves_half_of_the_bytes(player_of):
    """K1: the moment of --kill: slots reserved, half of the bytes written, nothing published."""
    with player_of(8) as (part, player):
        player.play(ids_of([1, 2, 3]), 0)
        done = player.play(ids_of([1, 2, 3, 10, 11, 12]), 3, stop=True)
        assert (done["stored"], done["bytes_written"]) == ([], 3 * BLOCK_BYTES // 2)
        stats = part.stats()
        assert (stats.writing_count, stats.claimed_count, stats.sealed_count) == (3, 3, 3)
        claim, reservation = player._held
        pattern = Pattern(0, BLOCK_BYTES)
        assert bytes(reservation.view(3)) == pattern.of(10).tobytes()
        assert bytes(reservation.view(4))[: BLOCK_BYTES // 2] == pattern.of(11).tobytes()[: BLOCK_BYTES // 2]
        assert not any(bytes(reservation.view(5)))
        reservation.abort()
        claim.release()
        # Nothing to write: the claim alone is held.
        player.play(ids_of([1, 2, 3]), 3, stop=True)
        assert (part.stats().writing_count, part.stats().claimed_count) == (0, 3)
        for held in player._held:
            held.__exit__(None, None, None)


def test_hit_that_cannot_be_claimed_is_an_error(player_of):
    """I1: a rank that has less than the matches of all ranks said is an error, but after a restart."""
    with player_of(4) as (_, player):
        player.play(ids_of([1]), 0)
        with pytest.raises(RuntimeError, match="matched 2 blocks, but only 1"):
            player.play(ids_of([1, 2]), 2)
        assert player.play(ids_of([1, 2]), 2, again=True)["stored"] == [2]


def test_pattern_differs_by_block_rank_and_word():
    blocks = [Pattern(rank, 4096).of(i).tobytes() for rank in range(2) for i in (0, 1, 2**63 - 1)]
    words = [block[i : i + 8] for block in blocks for i in range(0, 4096, 8)]
    assert len(set(words)) == len(words)
    assert len(Pattern(0, 13).of(5)) == 13
