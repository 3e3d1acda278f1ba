"""The same random work on core, fallback and the model: equal results, errors, messages and bytes (H8)."""

from __future__ import annotations

import os
import random
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from model.table_model import Block, ModelError, TableModel
from part_memory import (
    CHECKSUM,
    DUPLICATE,
    EVICT,
    KEEPER,
    READER,
    WRITER,
    PartMemory,
    Session,
    backend_modules,
    difference,
    is_detail,
    longs,
)

from kvreuse import errors

MODULES = backend_modules()
SLOTS = 6
KEYS = [bytes([i]) * n for i, n in ((1, 1), (2, 32), (3, 5), (4, 5), (5, 5), (6, 31), (7, 2), (8, 32), (9, 9))]
WRITER_ID, READER_ID = 1, 2
PROFILE = settings(
    max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
)


def outcome(call: Any, *arguments: Any) -> Any:
    """What a call did, comparable across backends: its result, or its exception with everything it says."""
    try:
        return "returned", call(*arguments)
    except errors.KVReuseError as error:
        extra = {k: v for k, v in vars(error).items() if k != "args"}
        return type(error).__name__, str(error), sorted(extra.items(), key=str)
    except (TypeError, ValueError, OverflowError, BufferError) as error:
        return type(error).__name__, str(error)


# ---- sequences of good and bad calls on a part ----

_keys = st.lists(st.sampled_from(KEYS), max_size=5)
_slots = st.lists(st.integers(-2, SLOTS), max_size=4)
_who = st.sampled_from(["writer", "reader"])
_old = st.integers(0, 3)  # which of the last reservations; how far off a generation is

_operation = st.one_of(
    st.tuples(
        st.just("reserve"), _keys, st.sampled_from([0, 0, EVICT, EVICT, DUPLICATE, EVICT | DUPLICATE]), st.none()
    ),
    st.tuples(
        st.just("reserve"),
        _keys,
        st.sampled_from([0, EVICT, DUPLICATE]),
        st.lists(st.integers(0, SLOTS - 1), min_size=5, max_size=5),
    ),
    st.tuples(st.just("commit"), _old, st.booleans()),
    st.tuples(st.just("commit"), _old, st.booleans()),
    st.tuples(st.just("abort"), _old),
    st.tuples(st.just("match"), _who, _keys),
    st.tuples(st.just("lookup"), _who, _keys),
    st.tuples(st.just("claim"), _who, _keys),
    st.tuples(st.just("claim_slots"), _who, _slots, st.integers(-1, 0)),
    st.tuples(st.just("release_held"), _who, st.integers(1, 4)),
    st.tuples(st.just("release"), _who, _slots),
    st.tuples(st.just("touch"), _who, _keys),
    st.tuples(st.just("evict"), st.integers(0, 3), _keys),
    st.tuples(st.just("clear")),
    st.tuples(st.just("invalidate"), st.lists(st.integers(0, SLOTS - 1), max_size=3), st.integers(-1, 0)),
    st.tuples(st.just("inventory"), _who, st.integers(1, 4)),
    st.tuples(st.just("restore")),
    st.tuples(st.just("reset")),
    st.tuples(st.just("recover")),
    st.tuples(st.just("expire")),
    st.tuples(st.just("set_capacity"), st.sampled_from([SLOTS, SLOTS, 0, 1, 2, 3, 4, 5, SLOTS + 1])),
)
_operations = st.lists(_operation, min_size=1, max_size=40)

# How often each happens in a long random run: what empties the part is rare, so that it is full most of the time.
_WEIGHTS = {
    "reserve": 30,
    "commit": 16,
    "abort": 4,
    "match": 5,
    "lookup": 5,
    "claim": 12,
    "claim_slots": 6,
    "release_held": 14,
    "release": 3,
    "touch": 12,
    "evict": 6,
    "invalidate": 5,
    "inventory": 3,
    "clear": 1,
    "restore": 1,
    "reset": 1,
    "recover": 1,
    "expire": 2,
    "set_capacity": 4,
}


def random_operations(rng: random.Random, count: int) -> Iterator[tuple[Any, ...]]:
    """A long run of the same operations; most reservations are committed soon."""

    def keys(most: int = 5) -> list[bytes]:
        return rng.choices(KEYS, k=rng.randint(0, most))

    def slots(low: int = -2, high: int = SLOTS) -> list[int]:
        return [
            rng.randint(low, high) if rng.random() < 0.3 else rng.randrange(SLOTS) for _ in range(rng.randint(0, 3))
        ]

    for name in rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=count):
        who = rng.choice(["writer", "reader"])
        if name == "reserve":
            named = [rng.randrange(SLOTS) for _ in range(5)] if rng.random() < 0.2 else None
            yield name, keys(3 if rng.random() < 0.7 else 5), rng.choice([0, EVICT, EVICT, EVICT, DUPLICATE, 3]), named
            if rng.random() < 0.6:
                yield "commit", 0, rng.random() < 0.5
        elif name == "commit":
            yield name, rng.choice([0, 0, 1, 2, 3]), rng.random() < 0.5
        elif name == "abort":
            yield name, rng.randrange(4)
        elif name in ("match", "lookup", "claim", "touch"):
            yield name, who, keys()
        elif name == "claim_slots":
            yield name, who, slots(), rng.choice([0, 0, 0, -1])
        elif name == "release_held":
            yield name, who, rng.randint(1, 6)
        elif name == "release":
            yield name, who, slots()
        elif name == "evict":
            yield name, rng.randint(0, 3), keys(2)
        elif name == "invalidate":
            yield name, slots(0, SLOTS - 1), rng.choice([0, 0, 0, -1])
        elif name == "inventory":
            yield name, who, rng.randint(1, 4)
        elif name == "set_capacity":
            yield name, rng.choice([SLOTS] * 9 + [0, 1, 2, 3, 4, 5, 5, SLOTS + 1])
        else:
            yield (name,)


class Driver:
    """One part with a writer, a reader and a keeper, and what they hold; plays operations by name."""

    def __init__(self, part: PartMemory, writer: Session, reader: Session, keeper: Session) -> None:
        self.part, self.keeper = part, keeper
        self.sessions = {"writer": writer, "reader": reader}
        self.reservations: list[tuple[list[int], list[int]]] = []
        self.held: dict[str, list[int]] = {"writer": [], "reader": []}
        self.generations = [0] * SLOTS

    def play(self, operation: tuple[Any, ...]) -> Any:
        name, *rest = operation
        return outcome(getattr(self, "_" + name), *rest)

    def arguments(self, operation: tuple[Any, ...]) -> tuple[Any, ...]:
        """The operation with slots and generations filled in, for the model."""
        name, *rest = operation
        if name in ("commit", "abort"):
            return self.old(rest[0])
        if name in ("claim_slots", "invalidate"):
            slots = rest[-2]
            return slots, self.carried(slots, rest[-1])
        return ()

    def old(self, which: int) -> tuple[list[int], list[int]]:
        return self.reservations[-1 - which] if which < len(self.reservations) else ([], [])

    def carried(self, slots: list[int], off: int) -> list[int]:
        return [self.generations[slot] + off if 0 <= slot < SLOTS else 1 for slot in slots]

    def _reserve(self, keys, flags, named):
        reserved = self.sessions["writer"].reserve(keys, flags, named and named[: len(keys)])
        self.reservations.append((reserved.slots, reserved.generations))
        for slot, generation in zip(reserved.slots, reserved.generations, strict=True):
            if slot != -1:
                self.generations[slot] = generation
        return reserved

    def _commit(self, which, checksum):
        return self.sessions["writer"].commit(self.old(which), CHECKSUM * checksum)

    def _abort(self, which):
        return self.sessions["writer"].abort(self.old(which))

    def _match(self, who, keys):
        return self.sessions[who].match(keys)

    def _lookup(self, who, keys):
        return self.sessions[who].lookup(keys)

    def _claim(self, who, keys):
        slots, generations = self.sessions[who].claim(keys)
        self.held[who] += slots
        return slots, generations

    def _claim_slots(self, who, slots, off):
        self.sessions[who].claim_slots(slots, self.carried(slots, off))
        self.held[who] += slots

    def _release_held(self, who, count):
        slots = self.held[who][:count]
        self.sessions[who].release(slots)
        del self.held[who][:count]
        return slots

    def _release(self, who, slots):
        self.sessions[who].release(slots)
        for slot in slots:
            self.held[who].remove(slot)

    def _touch(self, who, keys):
        return self.sessions[who].touch(keys)

    def _evict(self, count, keys):
        return self.sessions["writer"].evict(count, keys)

    def _clear(self):
        return self.sessions["writer"].clear()

    def _invalidate(self, slots, off):
        return self.sessions["writer"].invalidate(slots, self.carried(slots, off))

    def _inventory(self, who, capacity):
        return self.sessions[who].inventory(capacity)

    def _restore(self):
        return tuple(self.sessions["writer"].restore())

    def _reset(self):
        return self.sessions["writer"].backend.table_reset(self.sessions["writer"].table)

    def _recover(self):
        return self.keeper.backend.table_recover(self.keeper.table)

    def _expire(self):
        return self.keeper.backend.table_expire(self.keeper.table)

    def _set_capacity(self, capacity):
        return self.keeper.backend.table_set_capacity(self.keeper.table, capacity)

    def state(self) -> dict[str, int]:
        stats = self.sessions["writer"].stats()._asdict()
        return {
            name: value
            for name, value in stats.items()
            if name not in ("state", "writer_session", "dirty", "owned_count")
        }


SESSION_OF = {"writer": WRITER_ID, "reader": READER_ID}


class Oracle:
    """Plays the same operations on the model; reads from the backend's answer only which slots new blocks got."""

    def __init__(self) -> None:
        self.model = TableModel(SLOTS, WRITER_ID)
        self.held: dict[str, list[int]] = {"writer": [], "reader": []}

    def check(self, operation: tuple[Any, ...], filled: tuple[Any, ...], found: Any) -> None:
        name = operation[0]
        wanted = None
        try:
            expected = getattr(self, "_" + name)(*operation[1:], filled=filled, found=found)
        except ModelError as error:
            wanted = error
        if wanted is not None:
            assert found[0] != "returned", f"{operation}: the model fails with {wanted}, the backend returns {found[1]}"
            exception = getattr(errors, found[0])(found[1], **dict(found[2]))
            assert is_detail(exception, wanted.status, wanted.detail, wanted.values), f"{operation}: {wanted}; {found}"
            return
        assert found[0] == "returned", f"{operation}: {found}; the model allows it"
        if expected is not None:
            assert found[1] == expected, f"{operation}: the model says {expected}"

    @staticmethod
    def _pairs(blocks: list[Block | None], model: TableModel) -> tuple[list[int], list[int]]:
        slots = [-1 if b is None else b.slot for b in blocks]
        return slots, [0 if slot == -1 else model.generations[slot] for slot in slots]

    def _reserve(self, keys, flags, named, *, filled, found):
        named = named and named[: len(keys)]
        entries, gone = self.model.reserve(keys, named, bool(flags & EVICT), bool(flags & DUPLICATE))
        if found[0] != "returned":
            return
        self.model.assign(entries, found[1].slots, found[1].generations)
        assert found[1].evicted == gone

    def _commit(self, which, checksum, *, filled, found):
        self.model.commit(*filled)

    def _abort(self, which, *, filled, found):
        return self.model.abort(*filled)

    def _match(self, who, keys, *, filled, found):
        self.model.enter(SESSION_OF[who])
        return self.model.match(keys)

    def _lookup(self, who, keys, *, filled, found):
        self.model.enter(SESSION_OF[who])
        return self._pairs([self.model.find(key) for key in keys], self.model)

    def _claim(self, who, keys, *, filled, found):
        return self._pairs(self.model.claim(SESSION_OF[who], keys), self.model)

    def _claim_slots(self, who, slots, off, *, filled, found):
        self.model.claim_slots(SESSION_OF[who], *filled)

    def _release_held(self, who, count, *, filled, found):
        self.model.release(SESSION_OF[who], found[1])

    def _release(self, who, slots, *, filled, found):
        self.model.release(SESSION_OF[who], slots)

    def _touch(self, who, keys, *, filled, found):
        return self.model.touch(SESSION_OF[who], keys)

    def _evict(self, count, keys, *, filled, found):
        return self.model.evict(count, keys)

    def _clear(self, *, filled, found):
        return self.model.clear()

    def _invalidate(self, slots, off, *, filled, found):
        return self.model.invalidate(*filled)

    def _inventory(self, who, capacity, *, filled, found):
        self.model.enter(SESSION_OF[who])
        return self.model.inventory()

    def _restore(self, *, filled, found):
        return self.model.restore()

    def _reset(self, *, filled, found):
        self.model.reset()

    def _recover(self, *, filled, found):
        raise ModelError(-12, 38, 0, WRITER_ID)  # a writer is admitted

    def _set_capacity(self, capacity, *, filled, found):
        self.model.set_capacity(capacity)

    def _expire(self, *, filled, found):
        return self.model.expire()


def _open(part: PartMemory, writing: Any, reading: Any) -> Driver:
    keeper = part.open(writing, KEEPER)
    writer = part.open(writing, WRITER, WRITER_ID, 0)
    return Driver(part, writer, part.open(reading, READER, READER_ID, 1), keeper)


def compare(operations: Iterable[tuple[Any, ...]]) -> Counter[tuple[str, str]]:
    """Play on every backend and the model; return how often each operation ended how."""
    seen: Counter[tuple[str, str]] = Counter()
    parts = [PartMemory(module, SLOTS, 64) for module in MODULES]
    try:
        drivers = [_open(part, module, module) for part, module in zip(parts, MODULES, strict=True)]
        oracle = Oracle()
        for operation in operations:
            filled = drivers[0].arguments(operation)
            found = [driver.play(operation) for driver in drivers]
            seen[operation[0], found[0][0]] += 1
            assert all(other == found[0] for other in found), f"{operation}: {found}"
            oracle.check(operation, filled, found[0])
            for driver in drivers:
                assert driver.state() == oracle.model.counts(), operation
            images = [part.image() for part in parts]
            for image in images[1:]:
                assert image == images[0], f"{operation}: {difference(images[0], image)}"
    finally:
        for part in parts:
            part.__exit__()
    return seen


@PROFILE
@given(_operations)
def test_backends_and_model_agree(operations):
    """H8: after every operation equal results, and equal bytes of words, records, links, buckets and claims."""
    compare(operations)


def test_backends_and_model_agree_over_long_runs():
    """H8: the same over a part that is full most of the time; every operation succeeds often and fails in its ways."""
    seen: Counter[tuple[str, str]] = Counter()
    for seed in range(25):
        seen += compare(random_operations(random.Random(seed), 300))
    for name in _WEIGHTS.keys() - {"recover"}:
        assert seen[name, "returned"] >= 8, f"{name} hardly ever succeeded: {seen}"
    for name, error in (
        ("reserve", "NoSpaceError"),
        ("reserve", "BusyError"),
        ("reserve", "RangeError"),
        ("commit", "StaleBlockError"),
        ("claim_slots", "StaleBlockError"),
        ("claim_slots", "RangeError"),
        ("release", "StaleBlockError"),
        ("recover", "BusyError"),
        ("set_capacity", "RangeError"),
    ):
        assert seen[name, error] >= 8, f"{name} hardly ever ended in {error}: {seen}"
    assert sum(count for (_, error), count in seen.items() if error == "NotReadyError") >= 8, seen


def alternate(turns: Iterable[Iterable[tuple[Any, ...]]]) -> None:
    """Each turn another backend writes, and another one reads; a turn ends by goodbye."""
    with PartMemory(MODULES[0], SLOTS, 64) as part:
        oracle = Oracle()
        generations = [0] * SLOTS
        for turn, operations in enumerate(turns):
            writing, reading = MODULES[turn % len(MODULES)], MODULES[(turn + 1) % len(MODULES)]
            driver = _open(part, writing, reading)
            driver.generations = generations
            for operation in operations:
                filled = driver.arguments(operation)
                oracle.check(operation, filled, driver.play(operation))
                assert driver.state() == oracle.model.counts(), operation
            for who, session in driver.sessions.items():
                session.close()
                writing.table_drop(driver.keeper.table, session.row, SESSION_OF[who])
                oracle.model.drop(SESSION_OF[who])
            assert writing.table_recover(driver.keeper.table) == oracle.model.recover()
            driver.keeper.close()
            generations = driver.generations


@settings(PROFILE, max_examples=40)
@given(st.lists(_operations, min_size=2, max_size=4))
def test_backends_alternate_on_one_part(turns):
    """H8, R6: a writer of one backend beside a reader of the other; goodbye; the other way round, on the same bytes."""
    alternate(turns)


def test_backends_alternate_over_long_runs():
    """H8, R6: the same with turns that leave a full part behind."""
    for seed in range(100, 108):
        rng = random.Random(seed)
        alternate([list(random_operations(rng, 60)) for _ in range(5)])


def test_batches_longer_than_one_hold_of_the_lock():
    """H8: the fallback lets the lock go every 256 slots; that changes no result, no byte, nothing for the model."""
    slot_count = 1200
    rng = random.Random(17)
    population = [rng.randbytes(rng.choice([8, 16, 32])) for _ in range(2200)]
    model = TableModel(slot_count, WRITER_ID)
    parts = [PartMemory(module, slot_count, 8) for module in MODULES]
    try:
        writers, readers = (
            [part.open(module, *session) for part, module in zip(parts, MODULES, strict=True)]
            for session in ((WRITER, WRITER_ID, 0), (READER, READER_ID, 1))
        )

        def both(sessions: list[Session], name: str, *arguments: Any) -> Any:
            found = [outcome(getattr(session, name), *arguments) for session in sessions]
            assert all(other == found[0] for other in found), f"{name}: {[str(f)[:500] for f in found]}"
            images = [part.image() for part in parts]
            assert all(image == images[0] for image in images), f"{name}: {difference(images[0], images[-1])}"
            assert found[0][0] == "returned", f"{name}: {found[0]}"
            return found[0][1]

        for _ in range(8):
            keys = rng.sample(population, rng.randint(300, 900))
            keys += rng.choices(keys, k=20)
            entries, gone = model.reserve(keys, evict=True)
            reserved = both(writers, "reserve", keys, EVICT)
            assert reserved.evicted == gone
            model.assign(entries, reserved.slots, reserved.generations)
            model.commit(*reserved[:2])
            both(writers, "commit", reserved, CHECKSUM)
            touched = rng.sample(population, 600)
            assert both(readers, "touch", touched) == model.touch(READER_ID, touched)
            assert both(writers, "touch", keys[:300]) == model.touch(WRITER_ID, keys[:300])
            assert both(readers, "match", keys) == model.match(keys) == len(keys)
            claimed = both(readers, "claim", keys)
            assert claimed[0] == [block.slot for block in model.claim(READER_ID, keys)]
            both(readers, "claim_slots", *claimed)
            model.claim_slots(READER_ID, *claimed)
            assert both(writers, "evict", 200, keys[:50]) == model.evict(200, keys[:50])
            both(readers, "release", claimed[0] * 2)
            model.release(READER_ID, claimed[0] * 2)
            slots, generations = both(writers, "lookup", population[:700])
            found = [(s, g) for s, g in zip(slots, generations, strict=True) if s >= 0][:40]
            bad = ([s for s, _ in found], [g for _, g in found])
            assert both(writers, "invalidate", *bad) == model.invalidate(*bad)
            assert both(readers, "inventory", 333) == model.inventory()
        named = rng.sample(range(slot_count), 600)
        fresh = [b"named%d" % i for i in range(600)]
        entries, gone = model.reserve(fresh, named=named)
        reserved = both(writers, "reserve", fresh, 0, named)
        assert reserved.evicted == gone
        model.assign(entries, reserved.slots, reserved.generations)
        assert both(writers, "abort", reserved) == model.abort(*reserved[:2]) == 600
        both(readers, "claim", population)
        assert both(writers, "clear") == model.clear()
        assert both(writers, "restore").sealed_count == 0
    finally:
        for part in parts:
            part.__exit__()


# ---- bad arguments ----

_bad_integers = [
    1.5,
    True,
    None,
    -1,
    0,
    2**31,
    2**33 - 1,
    2**63,
    -(2**63) - 1,
    "1",
    np.int64(3),
    np.uint64(2**63),
    np.float64(1),
]
_bad_integers += [np.bool_(True), np.int8(-1), 2**62]
_bad_buffers: list[Any] = [
    None,
    1,
    "text",
    b"",
    bytes(7),
    bytes(32),
    bytearray(64),
    longs([]),
    longs([0]),
    longs([-1, 99]),
]
_bad_buffers += [
    array("i", [1]),
    array("d", [1.0]),
    np.zeros(2, np.int64),
    np.zeros(4, np.int64)[::2],
    np.zeros((2, 32), np.uint8),
]
_bad_buffers += [
    np.zeros(2, np.uint64),
    np.zeros((2, 2), np.int64),
    [1, 2],
    np.zeros(2, bool),
    memoryview(bytes(16)).cast("q"),
]
_texts: list[Any] = ["n", "", "a" * 201, None, 1, b"n", "\0", "a\0b"]

# Sorts of parameters: h table handle, r region handle, m mapping handle, i integer, b buffer, t text
SIGNATURES = {
    "echo": "i",
    "crc32c": "bi",
    "host_allocate": "iit",
    "region_info": "r",
    "region_export": "r",
    "region_import": "iiibiii",
    "region_observe": "r",
    "region_map": "rii",
    "region_close": "r",
    "mapping_info": "m",
    "mapping_use": "mi",
    "mapping_unmap": "m",
    "table_layout": "ii",
    "table_create": "rrbiiib",
    "table_open": "rriiiii",
    "table_info": "h",
    "table_manifest": "h",
    "table_bind": "him",
    "table_set_state": "hi",
    "table_set_unready": "hi",
    "table_set_capacity": "hi",
    "table_beat": "hi",
    "table_admit": "hiii",
    "table_drop": "hii",
    "table_recover": "h",
    "table_expire": "h",
    "table_match": "hbib",
    "table_lookup": "hbibbb",
    "table_claim": "hbibbb",
    "table_claim_slots": "hbb",
    "table_release": "hb",
    "table_touch": "hbib",
    "table_reserve": "hbibbibbbb",
    "table_commit": "hbbi",
    "table_abort": "hbb",
    "table_evict": "hibib",
    "table_verify": "hbb",
    "table_invalidate": "hbb",
    "table_inventory": "hibbbb",
    "table_stats": "h",
}


class Handles:
    """The same objects, opened in the same order, of one backend; so handle numbers may differ but roles do not."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.part = PartMemory(module, SLOTS, 64)
        self.writer = self.part.open(module, WRITER, WRITER_ID, 0)
        self.reader = self.part.open(module, READER, READER_ID, 1)
        self.keeper = self.part.open(module, KEEPER)
        self.writer.store([KEYS[1]])
        self.region = module.host_allocate(100, 1, "kvreuse-test", None).handle
        self.mapping = module.region_map(self.region, 1, 0).handle
        closed = module.host_allocate(1, 1, "kvreuse-test", None).handle
        module.region_close(closed)
        self.values = {
            "writer": self.writer.table,
            "reader": self.reader.table,
            "keeper": self.keeper.table,
            "region": self.region,
            "mapping": self.mapping,
            "stale": closed,
        }

    def normal(self, result: Any) -> Any:
        """A result in which numbers that must differ (handles, addresses, inodes, fds) are named or dropped."""
        names = {str(value): f"<{name}>" for name, value in self.values.items()}
        text = repr(result)
        for number, name in names.items():
            text = text.replace(number, name)
        return text

    def close(self) -> None:
        while self.module.mapping_info(self.mapping).use_count:
            self.module.mapping_use(self.mapping, -1)
        self.module.mapping_unmap(self.mapping)
        self.module.region_close(self.region)
        self.part.__exit__()


def _pick(rng: random.Random, sort: str) -> tuple[str, Any]:
    if sort in "hrm":
        good = {"h": ["writer", "writer", "reader"], "r": ["region"], "m": ["mapping"]}[sort]
        if rng.random() < 0.75:
            return "handle", rng.choice(good)
        return (
            ("handle", rng.choice(["stale", "region", "mapping"]))
            if rng.random() < 0.5
            else ("", rng.choice(_bad_integers))
        )
    if sort == "i":
        return "", rng.choice([*range(-1, 4), 32, *(_bad_integers if rng.random() < 0.5 else [])])
    if sort == "b":
        good_buffers = [KEYS[1], bytes(16), longs([0]), longs([1]), bytearray(32), bytearray(1), None]
        return "", rng.choice(good_buffers if rng.random() < 0.6 else _bad_buffers)
    return "", rng.choice(_texts)


def _copy(value: Any) -> Any:
    """A buffer of its own for each backend, since outputs are written."""
    if isinstance(value, (array, bytearray)):
        return value[:]
    return value.copy(order="K") if isinstance(value, np.ndarray) and value.flags.c_contiguous else value


# Their successes hand out handles, fds or numbers of the kernel, which are compared by the tests of their meaning.
_OPENS = {"host_allocate", "region_import", "region_map", "region_export", "table_open"}
_KEEPER_CALLS = {
    "table_set_state",
    "table_set_unready",
    "table_set_capacity",
    "table_admit",
    "table_drop",
    "table_recover",
    "table_expire",
    "table_stats",
}
_NUMBERS = {"region_info", "mapping_info", "region_observe"}


@pytest.mark.parametrize("call", SIGNATURES)
def test_bad_arguments_are_refused_alike(call):
    """H7, H8: the same exception, status, message and written output for any arguments; nothing crashes."""
    rng = random.Random(call)
    sorts = SIGNATURES[call]
    handles = [Handles(module) for module in MODULES]
    try:
        for _ in range(150):
            picks = [_pick(rng, sort) for sort in sorts]
            if call == "mapping_unmap" and picks[0] == ("handle", "mapping"):
                continue  # later rounds need it
            if call in _KEEPER_CALLS and picks[0] == ("handle", "reader"):
                picks[0] = ("handle", "keeper")
            found, written = [], []
            for owner in handles:
                arguments = [owner.values[v] if kind == "handle" else _copy(v) for kind, v in picks]
                if call == "host_allocate":
                    arguments.append(None)
                result = outcome(getattr(owner.module, call), *arguments)
                if result[0] == "returned" and call in _OPENS:
                    _give_back(owner.module, call, result[1])
                    result = ("returned",)
                elif result[0] == "returned" and call in _NUMBERS:
                    result = ("returned",)
                found.append(owner.normal(result))
                written.append([bytes(a) for a in arguments if isinstance(a, (array, bytearray))])
            shown = f"{call}{[v for _, v in picks]}"
            assert all(other == found[0] for other in found[1:]), f"{shown}: {found}"
            if found and found[0].startswith("('returned'"):
                assert all(other == written[0] for other in written[1:]), f"{shown}: {written}"
        images = [owner.part.image() for owner in handles]
        for image in images[1:]:
            assert image == images[0], difference(images[0], image)
    finally:
        for owner in handles:
            owner.close()


def _give_back(module: Any, call: str, result: Any) -> None:
    if call == "region_export":
        os.close(result)
    elif call == "region_map":
        module.mapping_unmap(result.handle)
    elif call == "table_open":
        module.table_close(result)
    else:
        module.region_close(result.handle)


@settings(PROFILE, max_examples=200)
@given(st.binary(max_size=600), st.integers(0, 2**32 - 1), st.integers(0, 16))
def test_crc32c_agrees(data, value, start):
    """H8: any bytes, any start, any value to go on from."""
    view = memoryview(bytes(start) + data)[start:]
    assert len({module.crc32c(view, value) for module in MODULES}) == 1


@PROFILE
@given(st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=3)))
def test_echo_agrees(value):
    """H7, H8"""
    found = [outcome(module.echo, value) for module in MODULES]
    assert all(other == found[0] for other in found)
    if type(value) is int and -(2**63) <= value < 2**63:
        assert found[0] == ("returned", value)


@settings(PROFILE, max_examples=60)
@given(st.integers(-2, 2**30 + 2), st.integers(-2, 2**20 + 2))
def test_layouts_agree(slot_count, manifest_nbytes):
    """H8"""
    found = [outcome(lambda m=module: tuple(m.table_layout(slot_count, manifest_nbytes))) for module in MODULES]
    assert all(other == found[0] for other in found)
    assume(found[0][0] == "returned")


def test_the_oracle_notices_a_lie():
    """The comparison itself can fail: a wrong count, a wrong error and a wrong byte are each reported."""
    oracle = Oracle()
    with pytest.raises(AssertionError):
        oracle.check(("match", "writer", [KEYS[0]]), (), ("returned", 1))
    with pytest.raises(AssertionError):
        oracle.check(("release", "writer", [0]), (), ("returned", None))
    with pytest.raises(AssertionError):
        oracle.check(("match", "writer", [KEYS[0]]), (), ("RangeError", "x", []))
    with pytest.raises(AssertionError):
        oracle.check(
            ("release", "writer", [0]), (), ("StaleBlockError", "another text", [("status", -19), ("call", "")])
        )
    with PartMemory(MODULES[0], SLOTS) as part:
        before = part.image()
        part.flip("table", part.record_offset(3))
        assert difference(before, part.image()) == [f"records[3]: {'00' * 64} 01{'00' * 63}"]
