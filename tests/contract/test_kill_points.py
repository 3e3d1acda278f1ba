"""Every state that shared memory passes through in a call of the fallback, as a SIGKILL there would leave it (K1).

A trace function looks at the memory before each line of the fallback. Each state that differs from the one before is
written into a second part, which another writer or the keeper then takes over. The core's states cannot be seen line by
line; for it test_table.py kills a real process.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from part_memory import CHECKSUM, DUPLICATE, EVICT, KEEPER, READER, WRITER, PartMemory, Session, backend_modules

from kvreuse import errors

SLOTS = 6
OLD = [b"old%d" % i for i in range(4)]
NEW = [b"new%d" % i for i in range(5)]
PENDING = b"pending"

pytestmark = pytest.mark.usefixtures("no_leaks")


@dataclass
class Step:
    """A call, and what a kill inside of it may change: which old blocks may be gone, which new ones may be there."""

    call: Callable[[Session, object], object]
    may_go: int = 0  # at most so many of the old blocks
    may_come: tuple[bytes, ...] = ()
    may_be_bad: int = 0  # a record that the call makes invalid is two stores
    is_atomic: bool = False  # the old blocks are all there or all gone


# The part has 4 sealed blocks, 1 reservation and 1 free slot.
STEPS = {
    "reserve": Step(lambda w, p: w.reserve(NEW[:1])),
    "reserve_evict": Step(lambda w, p: w.reserve(NEW[:3], EVICT), may_go=2),
    "reserve_evict_all": Step(lambda w, p: w.reserve(NEW[:5], EVICT), may_go=4),
    "reserve_duplicate": Step(lambda w, p: w.reserve(OLD[:1], DUPLICATE)),
    "reserve_named": Step(lambda w, p: w.reserve(NEW[:2], named=[0, 5]), may_go=1),
    "reserve_refused": Step(lambda w, p: w.reserve(NEW)),
    "commit": Step(lambda w, p: w.commit(p, CHECKSUM), may_come=(PENDING,)),
    "abort": Step(lambda w, p: w.abort(p)),
    "touch": Step(lambda w, p: w.touch(OLD)),
    "claim": Step(lambda w, p: w.claim(OLD)),
    "evict": Step(lambda w, p: w.evict(2, OLD[:1]), may_go=2),
    "clear": Step(lambda w, p: w.clear(), may_go=4, is_atomic=True),
    "reset": Step(lambda w, p: w.backend.table_reset(w.table), may_go=4, is_atomic=True),
    "restore": Step(lambda w, p: w.restore()),
    "invalidate": Step(lambda w, p: w.invalidate([1], [1]), may_go=1, may_be_bad=1),
}


def content(key: bytes) -> bytes:
    return (key * 32)[:64]


def states_of(part: PartMemory, step: Step, writer: Session, pending: object) -> list[dict[str, bytes]]:
    """Run the step; return each state of the memory between two lines of the fallback."""
    seen = [part.image()]

    def look(frame, event, argument):
        if "_fallback" not in frame.f_code.co_filename:
            return None
        image = part.image()
        if image != seen[-1]:
            seen.append(image)
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        step.call(writer, pending)
    except Exception as error:
        if type(error).__name__ != "NoSpaceError":
            raise
    finally:
        sys.settrace(before)
    seen.append(part.image())
    return seen


def put(part: PartMemory, image: dict[str, bytes]) -> None:
    part.write("table", 0, b"".join(content for name, content in image.items() if name != "claims"))
    part.write("claims", 0, image["claims"])


def check_takeover(part: PartMemory, step: Step, taker, by_keeper: bool) -> None:
    """A new writer, after the keeper's recover or by its own restore, finds what it must and can use every slot."""
    keeper = part.open(taker, KEEPER)
    taker.table_drop(keeper.table, 0, 1)
    if by_keeper:
        taker.table_recover(keeper.table)
    taker.table_admit(keeper.table, 0, 9, WRITER)
    writer = part.open(taker, WRITER, 9, 0, admit=False)
    if not by_keeper:
        assert writer.restore().bad_count <= step.may_be_bad
    rows = writer.inventory()
    found = [key for _, _, key in rows]
    old = [key for key in found if key in OLD]
    assert set(found) <= {*OLD, *step.may_come}, found
    assert len(set(found)) == len(found), found
    assert len(OLD) - len(old) <= step.may_go, found
    assert not step.is_atomic or len(old) in (0, len(OLD)), found
    assert [writer.match([key]) for key in found] == [1] * len(found)
    assert writer.verify([slot for slot, _, _ in rows]) == [0] * len(rows)
    assert all(part.data(slot) == content(key) for slot, _, key in rows)
    stats = writer.stats()
    assert (stats.writing_count, stats.dirty, stats.claimed_count) == (0, 0, 0)
    assert stats.free_count + stats.sealed_count + stats.stale_count == SLOTS
    assert stats.sealed_count == len(found)
    # Lists and chains are whole: every slot can be given out, then every block found again.
    reserved = writer.reserve([b"after%d" % i for i in range(SLOTS)], EVICT)
    assert sorted(reserved.slots) == list(range(SLOTS))
    assert sorted(reserved.evicted) == sorted(found)
    writer.commit(reserved)
    assert writer.match([b"after%d" % i for i in range(SLOTS)]) == SLOTS
    writer.close()
    keeper.close()


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("by_keeper", [True, False], ids=["keeper", "writer"])
def test_a_kill_between_any_two_lines_loses_nothing(name, by_keeper):
    """K1, R2: sealed blocks stay, but for those that the call was to remove; none is half; every slot is usable."""
    fallback = importlib.import_module("kvreuse._fallback")
    takers = backend_modules()
    step = STEPS[name]
    with PartMemory(fallback, SLOTS, 64) as part, PartMemory(fallback, SLOTS, 64) as copy:
        writer = part.open(fallback, WRITER, 1, 0)
        for slot, key in enumerate([*OLD, PENDING]):
            for memory in (part, copy):
                memory.data(slot, content(key))
        writer.store(OLD, checksum=CHECKSUM)
        pending = writer.reserve([PENDING])
        reader = part.open(fallback, READER, 2, 1)
        reader.touch(OLD[:2])
        reader.close()
        states = states_of(part, step, writer, pending)
        assert len(states) >= 2
        for i, image in enumerate(states):
            put(copy, image)
            check_takeover(copy, step, takers[i % len(takers)], by_keeper)


def test_a_kill_of_the_keeper_within_an_expire_loses_all_or_nothing():
    """K1, R6: the writer goes on; readers see all blocks, or are told to wait for it; nothing comes back later."""
    fallback = importlib.import_module("kvreuse._fallback")
    takers = backend_modules()
    with PartMemory(fallback, SLOTS, 64) as part, PartMemory(fallback, SLOTS, 64) as copy:
        writer = part.open(fallback, WRITER, 1, 0)
        writer.store(OLD, checksum=CHECKSUM)
        pending = writer.reserve([PENDING])
        keeper = part.open(fallback, KEEPER)
        step = Step(lambda w, p: fallback.table_expire(keeper.table), may_go=4, is_atomic=True)
        states = states_of(part, step, writer, pending)
        assert len(states) >= 4
        for i, image in enumerate(states):
            put(copy, image)
            taker = takers[i % len(takers)]
            other, reader = copy.open(taker, WRITER, 1, 0), copy.open(taker, READER, 2, 1)
            try:
                assert reader.match(OLD) == len(OLD)
            except errors.NotReadyError:
                assert other.match(OLD) in (0, len(OLD))
            left = other.match(OLD)
            assert reader.match(OLD) == left
            if left:
                other.commit(pending)
            else:
                with pytest.raises(errors.StaleBlockError):
                    other.commit(pending)
                assert other.abort(pending) == 1
            assert other.reserve([b"a", b"b"], EVICT).slots.count(-1) == 0
            other.close()
            reader.close()


def test_states_between_lines_are_seen():
    """The tracing sees more than the beginning and the end; a damaged state is noticed."""
    fallback = importlib.import_module("kvreuse._fallback")
    with PartMemory(fallback, SLOTS, 64) as part, PartMemory(fallback, SLOTS, 64) as copy:
        writer = part.open(fallback, WRITER, 1, 0)
        for slot, key in enumerate(OLD):
            copy.data(slot, content(key))
            part.data(slot, content(key))
        writer.store(OLD, checksum=CHECKSUM)
        step = STEPS["reserve_evict"]
        states = states_of(part, step, writer, None)
        assert len(states) > 10
        assert any(state["words"][192] for state in states), "no state is dirty"
        put(copy, states[0])
        copy.flip("table", copy.record_offset(0))
        with pytest.raises(AssertionError):
            check_takeover(copy, step, fallback, by_keeper=False)
