"""What is about the fallback alone: long batches, signals, a poor Python. The rest is in tests/contract."""

from __future__ import annotations

import errno
import os
import random
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from part_memory import EVICT, KEEPER, READER, WRITER, PartMemory, fails

from kvreuse import _ctypes_libc, _fallback, _fallback_host, _fallback_part, _fallback_table, errors

pytestmark = pytest.mark.usefixtures("no_leaks")


def keys_of(numbers):
    return [number.to_bytes(8, "little") for number in numbers]


@pytest.fixture
def hold_slots(monkeypatch):
    """Set how many slots one hold of the lock is for."""

    def set_to(count):
        for module in (_fallback_part, _fallback_table):
            monkeypatch.setattr(module, "HOLD_SLOTS", count)

    monkeypatch.setattr(_fallback_part, "WAIT_MAX_S", 0.0)
    return set_to


# ---- long batches ----


def _random_work(part, rng, rounds, before_each):
    """Drive a writer and a reader; return everything that they answered."""
    writer, reader = part.open(_fallback, WRITER, 1, 0), part.open(_fallback, READER, 2, 1)
    answers, held, last = [], [], None

    def do(function, *arguments):
        before_each()
        try:
            answers.append(function(*arguments))
        except errors.KVReuseError as error:
            answers.append(str(error))
            return None
        return answers[-1]

    for _ in range(rounds):
        keys = keys_of(rng.choices(range(40), k=rng.randrange(1, 12)))
        choice = rng.randrange(10)
        if choice < 3:
            last = do(writer.reserve, keys, rng.choice([0, EVICT, EVICT, 2, 3])) or last
        elif choice == 3 and last:
            do(writer.commit, last)
        elif choice == 4 and last:
            do(writer.abort, last)
        elif choice == 5:
            claimed = do(reader.claim, keys)
            held += claimed[0] if claimed else []
        elif choice == 6 and held:
            do(reader.release, [held.pop() for _ in range(rng.randrange(1, len(held) + 1))])
        elif choice == 7:
            do(rng.choice([reader, writer]).touch, keys)
        elif choice == 8:
            do(writer.evict, rng.randrange(4), keys[:2])
        elif rng.random() < 0.1:
            do(writer.clear)
        else:
            do(writer.lookup, keys)
            do(writer.match, keys)
            do(writer.inventory, 5)
            do(writer.claim_slots, [rng.randrange(24)], [rng.randrange(4)])
            do(writer.invalidate, [rng.randrange(24)], [rng.randrange(4)])
    return answers


@pytest.mark.parametrize("seed", range(4))
def test_pauses_of_the_lock_change_nothing(seed, hold_slots):
    """H8: a batch that gives the lock away in between leaves the same answers and bytes as one that does not."""
    rng, results = random.Random(seed), []
    state = rng.getstate()
    for count in (256, 1, 3):
        rng.setstate(state)
        with PartMemory(_fallback, slot_count=24) as part:
            answers = _random_work(part, rng, 250, lambda count=count: hold_slots(count))
            results.append((answers, part.image()))
    assert results[1] == results[0]
    assert results[2] == results[0]


def test_no_batch_holds_the_lock_for_more_than_256_slots(monkeypatch):
    """K7: between any two tries for the lock at most 256 slots are looked at."""
    looked_at, most = 0, 0
    look, lock_try = _fallback_part.Table.look, _ctypes_libc.lock_try

    def counted_look(table, key):
        nonlocal looked_at, most
        looked_at += 1
        most = max(most, looked_at)
        return look(table, key)

    def counted_try(fd):
        nonlocal looked_at
        looked_at = 0
        return lock_try(fd)

    monkeypatch.setattr(_fallback_part.Table, "look", counted_look)
    monkeypatch.setattr(_ctypes_libc, "lock_try", counted_try)
    with PartMemory(_fallback, slot_count=1000) as part:
        writer = part.open(_fallback)
        keys = keys_of(range(1000))
        writer.store(keys)
        assert writer.match(keys) == 1000
        slots, _ = writer.claim(keys)
        writer.lookup(keys)
        writer.touch(keys)
        writer.release(slots)
    assert most == 256


def test_a_claim_that_is_fenced_in_the_midst_claims_nothing(monkeypatch, hold_slots):
    """R6: the lock is taken again, the place is lost; what was claimed before is given back."""
    hold_slots(4)
    with PartMemory(_fallback, slot_count=16) as part:
        writer = part.open(_fallback, WRITER, 1, 0)
        writer.store(keys_of(range(16)))
        reader = part.open(_fallback, READER, 2, 1)
        lock_drop = _ctypes_libc.lock_drop

        def drop_and_retire(fd):
            lock_drop(fd)
            part.word(0, 2)

        monkeypatch.setattr(_ctypes_libc, "lock_drop", drop_and_retire)
        with fails(-18, 39, 2, call="table_claim"):
            reader.claim(keys_of(range(16)))
        monkeypatch.undo()
        assert writer.stats().claimed_count == 0


class _Expirer:
    """Empties the part, as a keeper of another process does, the nth time that the lock is let go in a batch."""

    def __init__(self, monkeypatch, part):
        self.part, self.left = part, 0
        sleep = _fallback_part.time.sleep
        monkeypatch.setattr(_fallback_part.time, "sleep", lambda seconds: (self.look(), sleep(seconds)))

    def look(self):
        self.left -= 1
        if self.left == 0:
            self.part.word(192, 1)
            self.part.word(64, self.part.word(64) + 1)


def _whole(writer, slot_count):
    """Every slot is free, claimed or reserved, and the free ones can all be given out."""
    stats = writer.stats()
    assert stats.dirty == 0
    assert stats.free_count + stats.writing_count + stats.sealed_count + stats.stale_count == slot_count
    assert stats.sealed_count == len(writer.inventory())
    free = writer.reserve([b"free%d" % i for i in range(stats.free_count)])
    assert len(set(free.slots) - {-1}) == stats.free_count
    writer.commit(free)
    assert writer.match([b"free%d" % i for i in range(stats.free_count)]) == stats.free_count


@pytest.mark.parametrize("nth", range(1, 12))
@pytest.mark.parametrize("what", ["reserve", "evicting", "named", "evict", "clear", "sweep", "invalidate", "claim"])
def test_a_part_that_is_emptied_in_the_midst_of_a_batch(monkeypatch, hold_slots, nth, what):
    """K7, I4, R6: the call goes on with the lists as they are then; no reservation is of both epochs."""
    hold_slots(4)
    with PartMemory(_fallback, slot_count=32) as part:
        writer = part.open(_fallback, WRITER, 1, 0)
        reader = part.open(_fallback, READER, 2, 1)
        old = keys_of(range(24))
        writer.store(old)
        claimed = reader.claim(old[:6])[0]
        if what == "sweep":
            writer.clear()
            writer.store(old)
            reader.release(claimed)
        expirer = _Expirer(monkeypatch, part)
        expirer.left = nth
        new = keys_of(range(100, 120))
        if what in ("reserve", "evicting", "sweep", "named"):
            if what == "reserve":
                new = new[:8]
            named = list(range(8, 28)) if what == "named" else None
            reserved = writer.reserve(new, EVICT, named)
            assert len(set(reserved.slots)) == len(new)
            assert not set(reserved.slots) & set(claimed if what != "sweep" else ())
            assert expirer.left <= 0 or what == "reserve" or nth > 6
            expirer.left = 0
            epochs = {part.read("table", part.record_offset(slot) + 48, 4) for slot in reserved.slots}
            assert len(epochs) == 1
            if epochs == {part.word(64).to_bytes(8, "little")[:4]}:
                writer.commit(reserved)
                assert reader.match(new) == len(new)
            else:
                with pytest.raises(errors.StaleBlockError, match="content epoch"):
                    writer.commit(reserved)
                assert writer.abort(reserved) == len(new)
        elif what == "evict":
            assert writer.evict(20) <= 18
        elif what == "clear":
            assert writer.clear() == (18, 6)
        elif what == "invalidate":
            expirer.left = 0
            slots, generations = writer.lookup(old)
            expirer.left = nth
            assert 0 <= writer.invalidate(slots, generations) <= 24
        else:
            assert len(writer.claim(old)[0]) <= 24
        expirer.left = 0
        writer.match(old)
        _whole(writer, 32)


@pytest.mark.parametrize("nth", range(1, 12))
def test_a_commit_in_the_midst_of_which_the_part_is_emptied_leaves_no_content(monkeypatch, hold_slots, nth):
    """I4, R1: what was sealed of the batch before is no content any more, and the rest is not sealed."""
    hold_slots(4)
    with PartMemory(_fallback, slot_count=32) as part:
        writer = part.open(_fallback, WRITER, 1, 0)
        keys = keys_of(range(20))
        reserved = writer.reserve(keys)
        expirer = _Expirer(monkeypatch, part)
        expirer.left = nth
        if nth <= 9:  # 4 pauses while all are checked, one between, 4 while they are sealed
            with fails(-19, 107, call="table_commit"):
                writer.commit(reserved)
            assert writer.inventory() == []
            assert writer.abort(reserved) == (20 if nth <= 5 else 20 - 4 * (nth - 5))
        else:
            writer.commit(reserved)
            expirer.left = 0
            assert writer.match(keys) == 20
        expirer.left = 0
        writer.match(keys)
        _whole(writer, 32)


@pytest.mark.parametrize("cut_at", range(6))
@pytest.mark.parametrize("step", ["fill", "free"])
def test_a_reserve_that_is_cut_short_changes_nothing(monkeypatch, step, cut_at):
    """E7, K1: an exception out of a signal handler at any step: the same blocks, and the next call repairs."""
    with PartMemory(_fallback, slot_count=8) as part:
        writer = part.open(_fallback)
        writer.store(keys_of(range(6)))
        before, stats = writer.inventory(), writer.stats()
        original, calls = getattr(_fallback_part.Table, step), 0

        def cut(table, *arguments):
            nonlocal calls
            calls += 1
            if calls > cut_at:
                raise KeyboardInterrupt
            return original(table, *arguments)

        monkeypatch.setattr(_fallback_part.Table, step, cut)
        try:
            reserved = writer.reserve(keys_of(range(10, 15)), EVICT)
        except KeyboardInterrupt:
            monkeypatch.undo()
            if step == "free" or cut_at == 0:
                assert writer.inventory() == before
                assert writer.stats() == stats
            else:
                # The bytes of slots that were filled again are gone; they are free, and nothing else is.
                assert set(writer.inventory()) <= set(before)
            now = writer.stats()
            assert (now.writing_count, now.free_count + now.sealed_count, now.dirty) == (0, 8, 0)
        else:
            monkeypatch.undo()
            writer.commit(reserved)
        assert len(writer.store(keys_of(range(20, 28)), EVICT).slots) == 8


def test_a_call_inside_of_a_call_ends(monkeypatch):
    """K7: a finalizer or signal handler that calls into the part it interrupts gets an error, never a deadlock."""
    with PartMemory(_fallback) as part:
        writer = part.open(_fallback, lock_wait_ns=10**12)
        look, found = _fallback_part.Table.look, []

        def nested(table, key):
            monkeypatch.setattr(_fallback_part.Table, "look", look)
            with fails(-23, 42, 10**12, -1, call="table_match"):
                writer.match([key])
            found.append(True)
            with fails(-12, 0, call="table_close"):
                _fallback.table_close(writer.table)
            return look(table, key)

        monkeypatch.setattr(_fallback_part.Table, "look", nested)
        assert writer.match([b"a"]) == 0
        assert found == [True]
        assert writer.store([b"a"]).slots == [0]


_SIGNALS = """
import random, signal, sys, time
sys.path.insert(0, sys.argv[1])
from part_memory import *
from kvreuse import _fallback, _fallback_host, _fallback_part as _part, errors
class Stop(Exception): pass
armed = False
def handler(*_):
    global armed
    if armed:
        armed = False
        raise Stop
signal.signal(signal.SIGALRM, handler)
rng = random.Random(1)
with PartMemory(_fallback, slot_count=32) as part:
    writer = part.open(_fallback)
    end = time.monotonic() + 3
    stops = 0
    while time.monotonic() < end:
        try:
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(20e-6, 400e-6))
                while True:
                    keys = [bytes([rng.randrange(64)]) for _ in range(8)]
                    reserved = writer.reserve(keys, EVICT)
                    writer.commit(reserved) if rng.random() < 0.7 else writer.abort(reserved)
                    writer.touch(keys)
                    writer.release(writer.claim(keys)[0])
            finally:
                armed = False
        except Stop:
            stops += 1
        except (errors.NoSpaceError, errors.BusyError):
            _fallback.table_reset(writer.table)  # reservations whose names were lost
            row = part.read("claims", 64, 8 * 32)
            writer.release([slot for slot in range(32) for _ in range(row[8 * slot])])
        lock = next(iter(_part._locks.values()))
        assert not lock.mutex._is_owned(), "the in-process lock is held after a call"
        assert _fallback_host.find(writer.table, _part.Table, "").calls == 0, "a call is counted that has ended"
    writer.restore()
    stats = writer.stats()
    assert stats.free_count + stats.sealed_count == 32, stats
    assert stats.sealed_count == len(writer.inventory())
    assert stops > 100, stops
print("ok")
"""


def test_a_raising_signal_handler_never_leaves_the_lock_held(run_python):
    """K7: hundreds of exceptions at any instruction; after each one the lock is free and the part can be used."""
    done = run_python(_SIGNALS, Path(__file__).parents[1] / "contract")
    assert (done.stdout, done.stderr) == ("ok\n", "")


# ---- handles ----


def test_an_exhausted_generation_retires_its_slot():
    """H2: numbers are never used again, also after 2^31 uses of a place."""
    first = _fallback.host_allocate(1, 1, "n", None).handle
    slot = first & 0xFFFFFFFF
    _fallback.region_close(first)
    _fallback_host._generations[slot] = 2**31 - 2
    last = _fallback.host_allocate(1, 1, "n", None).handle
    assert last == (2**31 - 1) << 32 | slot
    _fallback.region_close(last)
    another = _fallback.host_allocate(1, 1, "n", None).handle
    assert another & 0xFFFFFFFF != slot
    with fails(-2, 5, last):
        _fallback.region_info(last)
    _fallback.region_close(another)


def test_small_numbers_were_never_given_out():
    """H2: generation 0 is nobody's."""
    info = _fallback.host_allocate(1, 1, "n", None)
    with fails(-1, 4, (info.handle & 0xFFFFFFFF) or 2**32 - 1):
        _fallback.region_info((info.handle & 0xFFFFFFFF) or 2**32 - 1)
    _fallback.region_close(info.handle)


# ---- the system under it ----


@pytest.mark.parametrize(
    ("code", "exception"),
    [
        (errno.EPERM, errors.PermissionDeniedError),
        (errno.ENOSYS, errors.NotSupportedError),
        (errno.EINVAL, errors.SystemCallError),
    ],
)
def test_a_refused_memfd_says_why(monkeypatch, code, exception):
    """F10: three distinct reasons, each naming the call and its errno."""

    def refuse(name, flags):
        raise OSError(code, "memfd_create")

    monkeypatch.setattr(_ctypes_libc, "memfd_create", refuse)
    with pytest.raises(exception, match=f"memfd_create failed: .*errno {code}") as caught:
        _fallback.host_allocate(1, 1, "n", None)
    assert (caught.value.call, caught.value.native_code) == ("memfd_create", code)


def test_a_file_system_without_o_tmpfile(monkeypatch, tmp_path):
    """K3: the file has a name for a moment only, and none if unlinking fails."""
    real_open = os.open

    def refuse(path, flags, mode=0o777):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "open")
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    info = _fallback.host_allocate(5000, 1, "n", str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    _fallback.region_close(info.handle)


def test_a_seal_that_fails_leaves_nothing_open(monkeypatch):
    """H6: every step after the first one that opened something."""
    for step in ("ftruncate", "getrandom"):

        def fail(*arguments):
            raise OSError(errno.EIO, "planted")

        with monkeypatch.context() as patch:
            patch.setattr(os, step, fail)
            patch.setattr(_fallback._host, "_ids", [])  # else it needs no random bytes
            before = len(os.listdir("/proc/self/fd"))
            with pytest.raises(OSError, match=r"planted|Input/output"):
                _fallback.host_allocate(1, 1, "n", None)
            assert len(os.listdir("/proc/self/fd")) == before


def test_a_python_built_on_an_old_libc(run_python):
    """F9: os.memfd_create and the seal constants are missing."""
    code = """
import fcntl, os
del os.memfd_create, os.MFD_CLOEXEC, os.MFD_ALLOW_SEALING
for name in [name for name in dir(fcntl) if "SEAL" in name]:
    delattr(fcntl, name)
from kvreuse import _fallback
info = _fallback.host_allocate(1, 1, "n", None)
print(_fallback.region_observe(info.handle).seals)
_fallback.region_close(info.handle)
"""
    done = run_python(code, backend="fallback")
    assert (done.stdout, done.stderr) == ("7\n", "")


def test_no_warning_and_the_same_sums_without_the_crc_extension(run_python):
    """H8: google-crc32c in its Python form is slower, not different; a keeper's stderr stays empty."""
    code = """
import sys
sys.modules["google_crc32c._crc32c"] = None
sys.path.insert(0, sys.argv[1])
from kvreuse import _fallback
from part_memory import *
print(_fallback.crc32c(b"123456789"), _fallback.crc32c(b"6789", _fallback.crc32c(b"12345")))
with PartMemory(_fallback) as part:
    writer = part.open(_fallback)
    part.data(0, b"content")
    writer.store([b"key"], checksum=CHECKSUM)
    print(writer.match([b"key"]), writer.verify([0]), "numpy" in sys.modules)
"""
    done = run_python(code, Path(__file__).parents[1] / "contract", backend="fallback")
    assert (done.stdout, done.stderr) == ("3808858755 3808858755\n1 [0] False\n", "")


def test_views_are_counted_or_at_least_respected(monkeypatch):
    """O2: on a Python whose mmap lies otherwise in memory the count is 0, and the mapping still cannot be unmapped."""
    info = _fallback.host_allocate(1, 1, "n", None)
    mapping = _fallback.region_map(info.handle, 3, 0).handle
    with memoryview(_fallback.mapping_buffer(mapping)):
        assert _fallback.mapping_info(mapping).use_count == 1
        monkeypatch.setattr(_ctypes_libc, "_CAN_PEEK", False)
        assert _fallback.mapping_info(mapping).use_count == 0
        with fails(-12, 14, mapping):
            _fallback.mapping_unmap(mapping)
    _fallback.mapping_unmap(mapping)
    _fallback.region_close(info.handle)


def test_memory_that_was_cut_after_the_import_is_not_mapped(tmp_path):
    """H4: unsealed memory that shrank is an error, not a SIGBUS."""
    path = tmp_path / "memory"
    path.write_bytes(bytes(8192))
    fd = os.open(path, os.O_RDWR)
    info = _fallback.region_import(fd, 8192, 8192, bytes(16), 0, 0, 1)
    os.ftruncate(fd, 4096)
    os.close(fd)
    with fails(-5, 15, 8192, 4096, call="region_map"):
        _fallback.region_map(info.handle, 1, 0)
    assert _fallback.region_info(info.handle).mapping_count == 0
    _fallback.region_close(info.handle)


def test_a_keeper_never_waits_for_a_thread_of_its_own():
    """K7: with a bound of 0 one try is made; the holder is named as a thread of this process."""
    with PartMemory(_fallback) as part:
        keeper = part.open(_fallback, KEEPER, lock_wait_ns=0)
        lock = _fallback_host.find(keeper.table, _fallback_part.Table, "").lock
        held, done = threading.Event(), threading.Event()

        def hold():
            with lock.mutex:
                held.set()
                done.wait(20)

        thread = threading.Thread(target=hold)
        thread.start()
        try:
            assert held.wait(20)
            with fails(-23, 42, 0, -1, call="table_match"):
                keeper.match([b"a"])
        finally:
            done.set()
            thread.join(20)
        assert keeper.match([b"a"]) == 0
