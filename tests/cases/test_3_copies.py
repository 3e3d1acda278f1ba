"""Cases A14, B1, B2, B3, B4, B6, B7, B8, B11, B12, B13 and C9: copies that own their memory until quiescence."""

from __future__ import annotations

from copies_scene import *  # noqa: F403


def test_a14_a_buffer_outlives_its_names(play):
    """A14, O2, O3, O6: close(0.1) of a blocked copy: NotQuiescentError, its cause the timeout; nothing is freed."""
    play("""
    class Owner(bytearray): pass
    q = FaultyQueue()
    dst, src = Owner(8192), b"x" * 8192
    gone = weakref.ref(dst)
    memory = kvreuse.Memory.wrap(dst)
    q.pause_at(5000)
    op = q.submit(memory, src, [0], [0], [8192])
    q.wait_paused()
    error = refused(kvreuse.NotQuiescentError, q.close, 0.1)
    assert error.count == 1 and isinstance(error.__cause__, errors.WaitTimeoutError), error
    address = memory.address
    del dst, memory, error
    gc.collect()
    assert gone() is not None and ctypes.string_at(address, 5001) == b"x" * 5000 + b"\\0"
    assert [entry.operation for entry in kvreuse.quarantine()] == [op.handle]
    # Not even where nobody holds the operation and the queue.
    del op
    gc.collect()
    assert gone() is not None
    q.resume()
    deadline = time.monotonic() + 20
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.005)
        gc.collect()
    assert gone() is None and kvreuse.quarantine() == []
    q.close()
    deadline = time.monotonic() + 20
    while counts()[1] and time.monotonic() < deadline:
        time.sleep(0.005)
    """)


def test_a14_a_mapping_outlives_its_names(play):
    """A14, O2: the same with memory of this library."""
    play("""
    q = FaultyQueue()
    region = host.allocate(8192)
    q.pause_at(0)
    op = q.submit(region, b"y" * 8192, [0], [0], [8192])
    q.wait_paused()
    error = refused(kvreuse.NotQuiescentError, q.close, 0.1)
    assert isinstance(error.__cause__, TimeoutError)
    assert refused(errors.BusyError, region.close).count == 1
    q.resume()
    assert op.wait(10) is S.DONE
    with region.map() as mapping, mapping.buffer as view:
        assert bytes(view) == b"y" * 8192
    region.close()
    q.close()
    assert backend.handle_counts() == (0, 0, 0, 0, 0)
    del op
    """)


def test_b1_release_while_running(play):
    """B1: BusyError; another operation is right meanwhile; DONE; a second release is StaleHandleError."""
    play("""
    q = FaultyQueue(2)
    a, b = bytearray(8192), bytearray(8192)
    def words(memory, writable):
        return np.array([0, memory.address, memory.nbytes, -1, writable], np.int64)
    into, source = kvreuse.Memory.wrap(a), kvreuse.Memory.wrap(b"1" * 8192)
    zero, none = np.zeros(1, np.int64), np.empty(0, np.int64)
    q.pause_at(100)
    slow = backend.copy_submit(q.handle, words(into, 1), words(source, 0), zero, zero, np.array([8192]), none)
    q.wait_paused()
    error = refused(errors.BusyError, backend.operation_release, slow)
    assert str(slow) in str(error)
    other = q.submit(b, b"2" * 8192, [0], [0], [8192])
    assert other.wait(10) is S.DONE and b == b"2" * 8192 and other.poll() is S.DONE
    assert backend.operation_info(slow).state == S.RUNNING
    q.resume()
    assert backend.operation_wait(slow, 10**10) and backend.operation_info(slow).state == S.DONE
    assert a == b"1" * 8192
    backend.operation_release(slow)
    refused(errors.StaleHandleError, backend.operation_release, slow)
    refused(errors.StaleHandleError, backend.operation_info, slow)
    del other
    q.close()
    """)


def test_b2_a_slot_is_not_given_out_under_a_copy(play):
    """B2, O2, O3: cancel frees nothing: NoSpaceError until the copy has ended; then no byte of it shows in the slot."""
    play(
        """
    with attach(keeper, 1) as part, FaultyQueue() as q:
        engine = Engine(2, seed=1)
        res = part.reserve(KEYS[:1])
        q.pause_at(5000)
        op = res.copy_in(engine.view, [0], queue=q)
        q.wait_paused()
        op.cancel()
        res.abort()
        for evict in (False, True):
            error = refused(errors.NoSpaceError, part.reserve, KEYS[1:2], evict=evict)
            assert (error.needed, error.free, error.evictable) == (1, 0, 0)
        refused(errors.BusyError, part.reserve, KEYS[1:2], slots=[0])
        assert owners(part) == (0, 1) and part.stats().writing_count == 1
        q.resume()
        assert op.wait(10) in (S.CANCELLED, S.DONE)
        assert owners(part) == (0, 0)
        with part.reserve(KEYS[1:2]) as again:
            assert again.slots.tolist() == [0] and again.generations[0] == 2
            again.view(0)[:] = b"n" * BLOCK
            again.commit()
        assert content(part, KEYS[1:2]) == [b"n" * BLOCK] and part.match(KEYS[:1]) == 0
        del op
    """,
        keeper=True,
    )


def test_b3_a_copy_waits_for_what_fills_its_source(play):
    """B3: the final bytes; and where the profile requires a dependency, none is an error before anything is copied."""
    play("""
    profile = kvreuse.Profile.from_toml('[reuse]\\nenabled = true\\n[copies]\\nafter = "required"\\n')
    with kvreuse.CopyQueue(1, profile) as q:
        source, into = bytearray(1 << 20), bytearray(1 << 20)
        event = os.eventfd(0)
        def fill():
            time.sleep(0.1)
            source[:] = b"f" * len(source)
            os.eventfd_write(event, 1)
        thread = threading.Thread(target=fill)
        thread.start()
        error = refused(errors.ProfileError, q.submit, into, source, [0], [0], [1 << 20])
        assert "after=" in str(error)
        assert q.info().submitted == 0 and not any(into)
        op = q.submit(into, source, [0], [0], [1 << 20], after=[event])
        assert op.state is S.QUEUED
        assert op.wait(10) is S.DONE and into == b"f" * len(into)
        thread.join()
        assert os.eventfd_read(event) == 1  # it was not read
        os.close(event)
        del op
    """)


def test_b4_a_block_that_is_copied_out_is_not_evicted(play):
    """B4, O2: evict(2) takes only the other block; claims and owners are 0 again on every path, a failed submit too."""
    play(
        """
    with attach(keeper, 2) as part, FaultyQueue() as q:
        engine, out = Engine(2, seed=3), Engine(2)
        assert part.store(KEYS[:2], engine.view, [0, 1]).wait(10) is S.DONE
        claim = part.claim(KEYS[:1])
        q.pause_at(0)
        op = part.load(claim, out.view, [1], queue=q)
        claim.release()
        q.wait_paused()
        assert owners(part) == (1, 0)
        assert part.evict(2) == 1 and part.match(KEYS[:2]) == 1
        assert part.clear() == (0, 1)
        refused(errors.NotQuiescentError, part.close)
        q.resume()
        assert op.wait(10) is S.DONE and out.block(1) == engine.block(0) and owners(part) == (0, 0)
        # What is refused, and what fails in submit, leaves nothing.
        with part.reserve(KEYS[:2]) as res:
            refused(errors.RangeError, res.copy_in, engine.view, [0, 2], queue=q)
            refused(TypeError, res.copy_in, engine.view, [0.5, 1.0], queue=q)
            q.fail_submit(errno.EIO)
            assert refused(errors.SystemCallError, res.copy_in, engine.view, [0, 1], queue=q).errno == errno.EIO
            assert owners(part) == (0, 0)
            res.copy_in(engine.view, [0, 1], queue=q).result()
            res.commit()
        with part.claim(KEYS[:2]) as claim:
            assert owners(part) == (2, 0)
            refused(errors.RangeError, claim.copy_out, out.view, [0, 0], queue=q)
            refused(errors.RangeError, claim.copy_out, out.view, [0, -1], queue=q)
            q.fail_submit(errno.ENOMEM)
            refused(errors.OutOfMemoryError, claim.copy_out, out.view, [0, 1], queue=q)
            q.fail_at(1, errno.EIO)
            assert claim.copy_out(out.view, [0, 1], queue=q).wait(10) is S.FAILED
        assert owners(part) == (0, 0)
        q.fail_submit(errno.EIO)
        refused(errors.SystemCallError, part.store, KEYS[2:4], engine.view, [0, 1], evict=True, queue=q)
        assert part.stats().writing_count == 0 and part.evict(9) == 0 and part.stats().free_count == 2
        del op
    """,
        keeper=True,
    )


def test_b6_a_failed_copy_is_not_committed(play):
    """B6, O4: EIO on copy 2 of 4 is FAILED(1, EIO), a short copy FAILED; nothing of either is committed or matched."""
    play(
        """
    with attach(keeper) as part, FaultyQueue() as q:
        engine = Engine(4, seed=4)
        q.fail_at(1, errno.EIO)
        op = part.store(KEYS[:4], engine.view, [0, 1, 2, 3], queue=q)
        assert op.wait(10) is S.FAILED and op.failed_index == 1
        assert (op.error.native_source, op.error.native_code, op.error.errno) == ("errno", errno.EIO, errno.EIO)
        assert refused(errors.SystemCallError, op.result).errno == errno.EIO
        assert part.match(KEYS[:4]) == 0 and part.stats().free_count == 8 and part.stats().stored_total == 0
        q.short_at(2, 4095)
        op = part.store(KEYS[:4], engine.view, [0, 1, 2, 3], queue=q)
        error = refused(errors.SizeMismatchError, op.result)
        assert op.state is S.FAILED and op.failed_index == 2 and "4095 of 4096" in str(error), error
        assert part.match(KEYS[:4]) == 0 and owners(part) == (0, 0)
        # In steps: what failed cannot be committed, at once or after it.
        with part.reserve(KEYS[:4]) as res:
            q.fail_at(1, errno.EIO)
            op = res.copy_in(engine.view, [0, 1, 2, 3], queue=q)
            assert op.wait(10) is S.FAILED
            assert "invalid" in str(refused(errors.CorruptError, res.commit))
            done = res.commit(after=[op])
            assert done.wait(10) is S.FAILED and isinstance(done.error, errors.NotReadyError)
        assert part.match(KEYS[:4]) == 0 and part.stats().free_count == 8
        # Before its end it can be committed only after it.
        with part.reserve(KEYS[:4]) as res:
            q.pause_at(100)
            op = res.copy_in(engine.view, [0, 1, 2, 3], queue=q)
            q.wait_paused()
            assert refused(errors.BusyError, res.commit).count == 1
            done = res.commit(after=[op])
            assert part.match(KEYS[:4]) == 0
            q.resume()
            assert done.wait(10) is S.DONE and part.match(KEYS[:4]) == 4
        assert content(part, KEYS[:4]) == [engine.block(i) for i in range(4)]
        assert part.verify() == (4, ())
        del op, done, error
    """,
        keeper=True,
    )


def test_b7_a_failure_is_told_at_once(play):
    """B7: FAILED long before the timeout, and no timeout; the key can be reserved and stored again."""
    play(
        """
    with attach(keeper) as part, FaultyQueue() as q:
        engine = Engine(1, seed=5)
        q.fail_at(0, errno.EIO)
        before = time.monotonic()
        assert part.store(KEYS[:1], engine.view, [0], queue=q).wait(5) is S.FAILED
        assert time.monotonic() - before < 1
        assert part.store(KEYS[:1], engine.view, [0], queue=q).wait(5) is S.DONE
        assert content(part, KEYS[:1]) == [engine.block(0)]
    """,
        keeper=True,
    )


def test_b8_the_counts_balance(play):
    """B8, O1: 1000 operations with random faults, at submit too: submitted == done + failed + cancelled."""
    play("""
    import random
    draw = random.Random(7)
    q = FaultyQueue(2)
    src, dst = host.allocate(1 << 20), host.allocate(1 << 20)
    ends, refusals, ops = [], 0, []
    offsets, lengths = steps(16, 65536)
    for i in range(1000):
        fault = draw.randrange(6)
        if fault == 1: q.fail_at(draw.randrange(16), errno.EIO)
        if fault == 2: q.short_at(draw.randrange(16), draw.randrange(65536))
        if fault == 3: q.fail_submit(errno.EIO)
        if fault == 4: q.pause_at(draw.randrange(1 << 20))
        try:
            op = q.submit(dst, src, offsets, offsets, lengths)
        except errors.SystemCallError:
            assert fault == 3
            refusals += 1
            continue
        assert fault != 3
        ops.append((fault, op))
        if draw.random() < 0.3: op.cancel()
        if draw.random() < 0.5 or fault == 4: q.resume()
    q.resume()
    for fault, op in ops:
        state = op.wait(20)
        ends.append(state)
        assert state is not S.FAILED or fault in (1, 2)
    found = q.info()
    assert found.submitted == len(ops) == 1000 - refusals and refusals > 100
    assert (found.done, found.failed, found.cancelled) == tuple(map(ends.count, (S.DONE, S.FAILED, S.CANCELLED)))
    assert min(found.done, found.failed, found.cancelled) > 10
    assert (found.queued, found.running, found.paused, backend.copy_counts().in_flight) == (0, 0, 0, 0)
    del op, ops
    q.close(); src.close(); dst.close()
    assert backend.handle_counts() == (0, 0, 0, 0, 0)
    """)


def test_b11_closing_while_it_runs(play):
    """B11, O2, O6: 64 MiB in 4 KiB steps, paused after 8192: BusyError(1), NotQuiescentError; drained, both succeed."""
    play("""
    size = 64 << 20
    q = FaultyQueue()
    src, dst = host.allocate(size), host.allocate(size)
    with src.map() as mapping, mapping.buffer as view:
        np.frombuffer(view, np.uint8)[:] = np.arange(size, dtype=np.uint32).astype(np.uint8)
    offsets, lengths = steps(size // 4096, 4096)
    q.pause_at(8192)
    op = q.submit(dst, src, offsets[::-1].copy(), offsets, lengths)
    q.wait_paused()
    assert refused(errors.BusyError, dst.close).count == 1
    assert refused(errors.BusyError, src.close).count == 1
    error = refused(errors.NotQuiescentError, q.close, 0.05)
    assert error.count == 1
    refused(errors.HandleClosedError, q.submit, dst, src, [0], [0], [1])
    q.resume()
    assert op.wait(20) is S.DONE and op.moved_nbytes == size
    with dst.map() as mapping, mapping.buffer as view, src.map() as other, other.buffer as wanted:
        a, b = np.frombuffer(view, np.uint8).reshape(-1, 4096), np.frombuffer(wanted, np.uint8).reshape(-1, 4096)
        assert (a[::-1] == b).all()
        del a, b
    dst.close(); src.close(); q.close()
    assert backend.handle_counts() == (0, 0, 0, 0, 0)
    del op
    """)


def test_b12_an_operation_with_an_old_generation(play):
    """B12, O7: a queued copy whose slot's reservation ends before it begins is FAILED(STALE_BLOCK), 0 bytes."""
    play(
        """
    with attach(keeper, 3) as part, FaultyQueue() as q:
        engine = Engine(3, seed=6)
        for _ in range(4):
            part.reserve(KEYS[:1], slots=[2]).abort()
        res = part.reserve(KEYS[:1], slots=[2])
        assert (res.slots[0], res.generations[0]) == (2, 5)
        blocker = part.reserve(KEYS[1:2])
        q.pause_at(0)
        first = blocker.copy_in(engine.view, [1], queue=q)
        q.wait_paused()
        op = res.copy_in(engine.view, [0], queue=q)
        slots, generations = res.slots.copy(), res.generations.copy()
        res.abort()
        refused(errors.BusyError, part.reserve, KEYS[2:3], slots=[2])  # not before the copy has ended
        q.resume()
        assert op.wait(10) is S.FAILED and isinstance(op.error, errors.StaleBlockError) and op.moved_nbytes == 0
        assert first.wait(10) is S.DONE
        blocker.abort()
        with part.reserve(KEYS[2:3], slots=[2]) as again:
            assert again.generations[0] == 6
            again.view(0)[:] = b"g" * BLOCK
            # A copy that still carries generation 5, although the slot is another's by now.
            segments, kept = engine.view.words([("layers.0", 0, 4096), ("layers.1", 4096, 4096)])
            late = backend.copy_slots(q.handle, part._table, 1, np.array(part._mappings), slots, generations,
                np.zeros(1, np.int64), np.array(segments), 1, np.empty(0, np.int64))
            assert backend.operation_wait(late, 10**10)
            info, error = backend.operation_info(late), backend.operation_error(late)
            assert (info.state, info.failed_index, info.moved_nbytes) == (S.FAILED, 0, 0)
            assert isinstance(error, errors.StaleBlockError) and "generation 6" in str(error), error
            backend.operation_release(late)
            again.commit()
        assert content(part, KEYS[2:3]) == [b"g" * BLOCK] and owners(part) == (0, 0)
        # The same for a block that is read.
        with part.claim(KEYS[2:3]) as claim:
            old_slots, old = claim.slots.copy(), claim.generations.copy()
        assert part.evict(1) == 1
        out = Engine(3)
        segments, kept = out.view.words([("layers.0", 0, 4096)])
        late = backend.copy_slots(q.handle, part._table, 2, np.array(part._mappings), old_slots, old,
            np.zeros(1, np.int64), np.array(segments), 0, np.empty(0, np.int64))
        assert backend.operation_wait(late, 10**10)
        assert isinstance(backend.operation_error(late), errors.StaleBlockError) and not out.layers[0].any()
        backend.operation_release(late)
        del op, first
    """,
        keeper=True,
    )


def test_b13_a_source_whose_names_are_dropped(play):
    """B13: a bytearray that is in flight cannot be resized (BufferError), and lives until the copy has ended."""
    play("""
    with FaultyQueue() as q:
        source, into = bytearray(b"s" * 65536), bytearray(65536)
        q.pause_at(10)
        op = q.submit(into, source, [0], [0], [65536])
        q.wait_paused()
        refused(BufferError, source.extend, b"more")
        refused(BufferError, into.clear)
        del source
        gc.collect()
        junk = [bytearray(65536) for _ in range(64)]
        q.resume()
        assert op.wait(10) is S.DONE and into == b"s" * 65536
        into.extend(b"it is free again")
        del op
    """)


def test_b3_who_waits_for_fds_is_replaced_when_it_has_work(play):
    """B3: of two threads one waits for fds; when it goes off with a long copy, the other one waits for the rest."""
    play("""
    with FaultyQueue(2) as q:
        first, second = os.eventfd(0), os.eventfd(0)
        slow_into, into = bytearray(1 << 20), bytearray(8)
        q.pause_at(5)
        slow = q.submit(slow_into, b"s" * (1 << 20), [0], [0], [1 << 20], after=[first])
        quick = q.submit(into, b"12345678", [0], [0], [8], after=[second])
        os.eventfd_write(first, 1)
        q.wait_paused()
        os.eventfd_write(second, 1)
        assert quick.wait(10) is S.DONE and bytes(into) == b"12345678" and slow.state is S.RUNNING
        q.resume()
        assert slow.wait(10) is S.DONE
        os.close(first), os.close(second)
        del slow, quick
    """)


def test_operations_that_end_at_once_are_listed(play):
    """O1: one thread submits, another lists: each operation that is held is listed once, in the order of the ends."""
    play("""
    q = kvreuse.CopyQueue()
    held, listed, into = [], [], bytearray(8)
    def submit():
        for _ in range(3000):
            held.append(q.submit(into, b"12345678", [0], [0], [8]))
    thread = threading.Thread(target=submit)
    thread.start()
    poll = select.poll()
    poll.register(q, select.POLLIN)
    while len(listed) < 3000:
        assert poll.poll(10000), len(listed)
        listed += q.completed()
    thread.join()
    assert listed == held and q.completed() == [] and not poll.poll(0)
    del held[:], listed[:]
    q.close()
    """)


def test_closing_waits_before_it_puts_in_quarantine(play):
    """O5: nothing is in quarantine while a close still waits."""
    play("""
    q = FaultyQueue()
    q.pause_at(0)
    op = q.submit(bytearray(8), b"12345678", [0], [0], [8])
    q.wait_paused()
    thread = threading.Thread(target=q.close, args=(20,))
    thread.start()
    while not q.info().is_closing:
        time.sleep(0.001)
    time.sleep(0.3)
    assert kvreuse.quarantine() == []
    q.resume()
    thread.join(20)
    assert op.state is S.DONE
    del op
    """)


def test_c9_waits_leave_python_running(play):
    """C9: a blocking wait in one thread, a counter in another: it passes 1000 in 0.5 s; every wait has its bound."""
    play("""
    q = FaultyQueue()
    q.pause_at(0)
    op = q.submit(bytearray(8192), b"w" * 8192, [0], [0], [8192])
    q.wait_paused()
    for wait in (lambda: op.wait(0.5), lambda: q.close(0.5)):
        found = []
        def blocked():
            before = time.monotonic()
            error = refused((errors.WaitTimeoutError, errors.NotQuiescentError), wait)
            found.append(time.monotonic() - before)
        thread = threading.Thread(target=blocked)
        thread.start()
        count, until = 0, time.monotonic() + 0.5
        while time.monotonic() < until:
            count += 1
        thread.join(20)
        assert count > 1000, count
        assert 0.4 < found[0] < 5, found
    q.resume()
    assert op.wait(10) is S.DONE
    q.close()
    del op
    """)
