"""Part, Reservation, Claim over a real keeper, on both backends."""

from __future__ import annotations

import textwrap

import pytest

HEAD = """
import gc, warnings
import numpy as np
import kvreuse, kvreuse.testing
manifest = kvreuse.Manifest(model="m", weights_id="w", dtype="bfloat16", block_tokens=16, block_bytes=4096, layers=1,
    kv_heads=1, head_dim=1, layout="x", hash_scheme="sglang-sha256", hash_root="r")
KEYS = [bytes([i]) * 32 for i in range(8)]
PROFILE = "[reuse]\\nenabled = true\\n"
def refused(error, call, *arguments, **options):
    try:
        call(*arguments, **options)
    except error as found:
        return found
    raise AssertionError(f"{error.__name__} expected")
def fill(part, keys, **options):
    with part.reserve(keys, **options) as made:
        for i, key in enumerate(keys):
            if made.slots[i] >= 0:
                made.view(i)[:] = content(key)
        made.commit()
        return made
def content(key):
    return (key * 4096)[:4096]
def attach(keeper, blocks=8):
    return keeper.attach(manifest, kvreuse.Rank(), blocks=blocks)
"""


@pytest.fixture
def play(run_python, backend_name):
    def run(code, profile="PROFILE"):
        body = textwrap.indent(textwrap.dedent(code), "    ")
        code = (
            HEAD
            + f"with kvreuse.testing.keeper({profile}) as path, kvreuse.connect(path) as keeper:\n{body}\nprint('ok')\n"
        )
        done = run_python(code, backend=backend_name)
        assert (done.stdout, done.stderr) == ("ok\n", ""), done.stdout + done.stderr

    return run


def test_a_context_that_ends_without_commit_aborts(play):
    play("""
    with attach(keeper) as part:
        with part.reserve(KEYS[:2]) as made:
            made.view(0)[:5] = b"hello"
        assert part.match(KEYS) == 0 and part.stats().free_count == 8
        refused(kvreuse.HandleClosedError, made.view, 0)
        refused(kvreuse.HandleClosedError, made.commit)
        made.abort()
    """)


def test_views_end_at_commit_and_release(play):
    play("""
    with attach(keeper) as part:
        with part.reserve(KEYS[:1]) as made:
            view = made.view(0)
            view[:] = content(KEYS[0])
            made.commit()
        refused(ValueError, lambda: view[0])
        with part.claim(KEYS) as claim:
            assert len(claim) == 1
            view = claim.view(0)
            assert view.readonly and bytes(view) == content(KEYS[0])
            refused(kvreuse.RangeError, claim.view, 1)
            refused(kvreuse.RangeError, claim.view, -1)
        refused(ValueError, lambda: view[0])
        refused(kvreuse.HandleClosedError, claim.view, 0)
        claim.release()
    """)


def test_a_part_does_not_close_under_a_numpy_array(play):
    """R6, H5: its memory may have another writer next."""
    play("""
    part = attach(keeper)
    made = part.reserve(KEYS[:1])
    array = np.frombuffer(made.view(0), np.uint8)
    made.commit()
    error = refused(kvreuse.BusyError, part.close)
    assert "numpy" in str(error) and part.match(KEYS[:1]) == 1
    del array
    part.close()
    part.close()
    refused(kvreuse.HandleClosedError, part.match, KEYS)
    """)


def test_keys_are_bytes_or_one_array(play):
    """H7"""
    play("""
    with attach(keeper) as part:
        fill(part, KEYS[:3])
        array = np.frombuffer(b"".join(KEYS[:3]), np.uint8).reshape(3, 32)
        assert part.match(array) == 3 and part.match(KEYS) == 3 and part.match(tuple(KEYS)) == 3
        mixed = [b"a", b"bb" * 16, b"ccc"]
        fill(part, mixed)
        assert part.match(mixed) == 3 and sorted(part.keys()) == sorted(KEYS[:3] + mixed)
        refused(TypeError, part.match, ["text"])
        refused(TypeError, part.match, b"bytes")
        refused(TypeError, part.match, array.astype(np.int32))
        refused(kvreuse.RangeError, part.match, array[:, ::2])
        refused(kvreuse.RangeError, part.match, [b""])
        refused(kvreuse.RangeError, part.match, [b"x" * 33])
        refused(kvreuse.RangeError, part.match, [b"x", b"x" * 33])
        assert part.match([]) == 0 and len(part.claim([])) == 0
    """)


def test_reserve_is_all_or_nothing(play):
    play("""
    with attach(keeper) as part:
        fill(part, KEYS[:6])
        error = refused(kvreuse.NoSpaceError, part.reserve, [b"a", b"b", b"c"])
        assert (error.needed, error.free, error.evictable) == (3, 2, 6), str(error)
        with part.claim(KEYS[:6]):
            error = refused(kvreuse.NoSpaceError, part.reserve, [b"a", b"b", b"c"], evict=True)
            assert error.evictable == 0
        made = fill(part, [b"a", b"b", b"c", KEYS[5], b"a"], evict=True)
        assert made.evicted == [KEYS[0]]
        assert [slot >= 0 for slot in made.slots] == [True, True, True, False, False]
        with part.reserve([b"d"], evict=True):
            refused(kvreuse.BusyError, part.reserve, [b"d"], evict=True)
    """)


def test_named_slots_and_duplicates(play):
    """O7: the generation changes at every reserve."""
    play("""
    with attach(keeper) as part:
        made = fill(part, [b"a", b"b"], slots=[5, 2])
        assert made.slots.tolist() == [5, 2] and made.generations.tolist() == [1, 1]
        again = fill(part, [b"c"], slots=[5])
        assert again.generations.tolist() == [2] and again.evicted == [b"a"]
        assert part.match([b"a"]) == 0 and part.match([b"c"]) == 1
        with part.claim([b"b"]):
            refused(kvreuse.BusyError, part.reserve, [b"x"], slots=[2])
        refused(kvreuse.RangeError, part.reserve, [b"x"], slots=[8])
        refused(TypeError, part.reserve, [b"x"], slots=[1.0])
        refused(TypeError, part.reserve, [b"x"], slots=[1, 2])
        assert fill(part, [b"b"], duplicate=True).slots[0] >= 0
        assert part.stats().sealed_count == 3
    """)


def test_evict_touch_clear(play):
    play("""
    with attach(keeper) as part:
        fill(part, KEYS)
        assert part.touch([KEYS[0], b"absent"]) == 1
        assert part.evict(2, keep=[KEYS[1]]) == 2
        assert part.match([KEYS[2]]) == part.match([KEYS[3]]) == 0 and part.match([KEYS[0], KEYS[1]]) == 2
        with part.claim([KEYS[0]]) as claim:
            assert part.clear() == kvreuse.ClearResult(removed=5, kept=1)
            assert part.match([KEYS[0]]) == 0
            assert bytes(claim.view(0)) == content(KEYS[0])
        assert len(fill(part, KEYS).slots) == 8 and part.match(KEYS) == 8
    """)


def test_verify_takes_damage_out(play):
    play("""
    with attach(keeper) as part:
        fill(part, KEYS[:4])
        part._view(int(part.claim([KEYS[2]]).slots[0]))[100] ^= 1
        gc.collect()
        for claim in list(part._unended):
            claim.release()
        assert part.verify(KEYS[:2]) == kvreuse.VerifyResult(2, ())
        assert part.verify() == kvreuse.VerifyResult(4, (KEYS[2],))
        assert part.match(KEYS[:4]) == 2 and part.stats().corrupt_total == 1
        assert part.verify() == kvreuse.VerifyResult(3, ())
    """)


def test_policy_always_checks_at_each_claim(play):
    """A damaged block ends the claimed prefix, and is gone."""
    play(
        """
    with attach(keeper) as part:
        fill(part, KEYS[:4])
        with part.claim([KEYS[2]]) as claim:
            slot = int(claim.slots[0])
        part._view(slot)[0] ^= 255
        with part.claim(KEYS[:4]) as claim:
            assert len(claim) == 2
        assert part.match([KEYS[2]]) == 0 and part.stats().claimed_count == 0
    """,
        profile="PROFILE + '[checksum]\\nwhen = \"always\"\\n'",
    )


def test_with_reuse_off_nothing_hits(play):
    """P1"""
    play(
        """
    with attach(keeper) as part:
        assert str(part.outcome) == "EMPTY(reuse is off: no profile was declared)"
        assert not part.reuse.enabled and "no profile" in part.reuse.reason
        fill(part, KEYS)
        assert part.match(KEYS) == 0 and len(part.claim(KEYS)) == 0
    with attach(keeper) as part:
        assert part.stats().sealed_count == 0
    """,
        profile="None",
    )


def test_what_is_dropped_is_given_back_with_a_warning(play):
    play("""
    with attach(keeper) as part, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        part.reserve([b"a"])
        fill(part, [b"b"])
        part.claim([b"b"])
        gc.collect()
        assert [w.category for w in seen] == [ResourceWarning] * 2, [str(w.message) for w in seen]
        stats = part.stats()
        assert (stats.writing_count, stats.claimed_count) == (0, 0)
    """)


def test_an_exception_gives_back_what_was_reserved_and_claimed(play):
    """I3: the error of the body comes through."""
    play("""
    with attach(keeper) as part:
        fill(part, KEYS[:1])
        def body():
            with part.claim(KEYS[:1]) as claim, part.reserve(KEYS[1:3]) as made:
                made.view(0)[:] = content(KEYS[1])
                held.extend([claim, made])
                raise ValueError("body")
        held = []
        refused(ValueError, body)
        stats = part.stats()
        assert (stats.sealed_count, stats.writing_count, stats.claimed_count, stats.free_count) == (1, 0, 0, 7), stats
        for item in held:
            refused(kvreuse.HandleClosedError, item.view, 0)
        with part.reserve(KEYS[1:3]) as made:
            made.commit()
            refused(kvreuse.HandleClosedError, made.commit)
            made.abort()
        assert part.match(KEYS[:3]) == 3
    """)


def test_close_ends_what_is_open(play):
    """H5: reservations are aborted, claims released; the next writer finds only what was sealed."""
    play("""
    part = attach(keeper)
    fill(part, KEYS[:2])
    claim, made = part.claim(KEYS[:2]), part.reserve(KEYS[2:4])
    views = [claim.view(0), made.view(0)]
    part.close()
    for view in views:
        refused(ValueError, lambda: view[0])
    for call in (lambda: claim.view(0), lambda: made.view(0), made.commit, lambda: part.match(KEYS),
                 lambda: part.claim(KEYS), lambda: part.reserve(KEYS), lambda: part.touch(KEYS), lambda: part.evict(1),
                 part.clear, part.verify, part.stats, lambda: list(part.keys())):
        refused(kvreuse.HandleClosedError, call)
    claim.release()
    made.abort()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del claim, made, part
        gc.collect()
    with attach(keeper) as part:
        assert str(part.outcome) == "RESTORED(2)", part.outcome
        stats = part.stats()
        assert (stats.sealed_count, stats.writing_count, stats.claimed_count) == (2, 0, 0), stats
    """)


def test_a_claims_array_is_read_only_and_holds_the_part(play):
    """H5, R6"""
    play("""
    part = attach(keeper)
    fill(part, KEYS[:1])
    claim = part.claim(KEYS[:1])
    array = np.frombuffer(claim.view(0), np.uint8)
    assert not array.flags.writeable and array.tobytes() == content(KEYS[0])
    claim.release()
    refused(kvreuse.BusyError, part.close)
    refused(kvreuse.BusyError, part.__exit__, None, None, None)
    assert part.match(KEYS[:1]) == 1
    kept = array.copy()
    del array
    part.close()
    assert kept.tobytes() == content(KEYS[0])
    """)


def test_policy_attach_takes_damage_out_before_anything_is_found(play):
    """R2: RESTORED counts what is left, and says what is not."""
    play(
        """
    for damaged, outcome in (([2, 5], "RESTORED(6): 2 block(s) with damaged data freed"), ([], "RESTORED(6)")):
        with attach(keeper) as part:
            fill(part, KEYS if damaged else [])
            for i in damaged:
                with part.claim([KEYS[i]]) as claim:
                    slot = int(claim.slots[0])
                part._view(slot)[4095] ^= 1
            # The policy is for attaching: a claim does not look.
            assert len(part.claim(KEYS[:1])) == 1
            for claim in list(part._unended):
                claim.release()
        with attach(keeper) as part:
            assert str(part.outcome) == outcome, part.outcome
            assert [part.match([key]) for key in KEYS] == [1, 1, 0, 1, 1, 0, 1, 1]
            assert part.stats().free_count == 2
    """,
        profile="PROFILE + '[checksum]\\nwhen = \"attach\"\\n'",
    )


def test_policy_off_has_nothing_to_compare(play):
    """A block that was sealed without a checksum is not said to be good."""
    play(
        """
    with attach(keeper) as part:
        fill(part, KEYS)
        assert part.verify() == kvreuse.VerifyResult(0, ())
        assert part.match(KEYS) == 8
    """,
        profile="PROFILE + '[checksum]\\nwhen = \"off\"\\n'",
    )


def test_verify_skips_what_is_replaced_meanwhile(play):
    """O7: the generation tells that the slot is another block's now; all others are compared."""
    play("""
    from kvreuse import parts
    with attach(keeper) as part:
        fill(part, KEYS[:4])
        real = parts._backend.table_claim_slots
        def claim_slots(table, slots, generations):
            if len(slots) == 4:
                parts._backend.table_claim_slots = real
                with part.claim([KEYS[1]]) as claim:
                    slot = int(claim.slots[0])
                fill(part, [b"other"], slots=[slot])
            return real(table, slots, generations)
        parts._backend.table_claim_slots = claim_slots
        assert part.verify() == kvreuse.VerifyResult(3, ())
        assert part.verify() == kvreuse.VerifyResult(4, ())
        assert part.match([b"other"]) == 1 and part.stats().claimed_count == 0
    """)


def test_verify_and_keys_go_on_over_their_pages(play):
    play("""
    from kvreuse import parts
    parts.VERIFY_BATCH_SLOTS = 3
    with attach(keeper) as part:
        fill(part, KEYS)
        assert part.verify() == kvreuse.VerifyResult(8, ()) and list(part.keys()) == KEYS
        assert part.evict(3) == 3
        assert part.verify() == kvreuse.VerifyResult(5, ()) and list(part.keys()) == KEYS[3:]
        assert part.clear() == (5, 0) and list(part.keys()) == [] and part.verify() == (0, ())
    """)
