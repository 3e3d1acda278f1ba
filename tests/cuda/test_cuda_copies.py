"""Copies to, from and between CUDA memory, by streams and events: against the fake driver, on both backends."""

from __future__ import annotations

import pytest

HEAD = """
import ctypes, gc, os, threading, time
import numpy as np
import kvreuse.testing
from kvreuse._select import backend
S = kvreuse.OperationState
p = kvreuse.open_provider("cuda:0")
def refused(kind, call, *arguments, **options):
    try:
        call(*arguments, **options)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} expected")
N, SIZE = 16, 4096
def scattered(seed):
    return np.random.default_rng(seed).permutation(N).astype(np.int64) * SIZE
LENGTHS = np.full(N, SIZE, np.int64)
def filled(seed):
    return np.random.default_rng(seed).integers(0, 256, N * SIZE, np.uint8)
def moved(src, to, since):
    out = np.zeros_like(src)
    for a, b in zip(to, since):
        out[a : a + SIZE] = src[b : b + SIZE]
    return out
def bytes_of(mapping):
    return np.frombuffer(ctypes.string_at(mapping.address, N * SIZE), np.uint8)
"""
TAIL = """
gc.collect()
assert backend.copy_counts()[:4] == (0, 0, 0, 0), backend.copy_counts()
assert fake.live() == LEFT, fake.live()
assert not fake.counters()["violations"], fake.violation()
print("ok")
"""


@pytest.fixture
def play(run_cuda, backend_name):
    def run(code, lost=0, **settings):
        """`lost`: streams that are given up, since nobody knows what they are at."""
        left = f"LEFT = {dict.fromkeys(('streams', 'events'), lost) if lost else {}}\n"
        done = run_cuda(HEAD + left + code + TAIL, backend=backend_name, settings=settings)
        assert (done.stdout, done.stderr) == ("ok\n", ""), done.stdout + done.stderr

    return run


@pytest.mark.parametrize(("version", "batches"), [(13000, 3), (12080, 0)])
def test_bytes_arrive_by_one_call_or_many(play, version, batches):
    """O4: to cuda, in it, and back. A batch copy before 13.0 is not used: it takes other arguments."""
    play(
        f"""
src, out = filled(1), np.zeros(N * SIZE, np.uint8)
with p.allocate(N * SIZE) as a, p.allocate(N * SIZE) as b, kvreuse.CopyQueue() as q:
    to, since = scattered(2), scattered(3)
    first = q.submit(a, src, to, since, LENGTHS)
    second = q.submit(b, a, since, to, LENGTHS, after=[first])
    third = q.submit(out, b, to, since, LENGTHS, after=[second])
    assert third.wait(20) is S.DONE and third.moved_nbytes == N * SIZE
    assert (out == moved(moved(moved(src, to, since), since, to), to, since)).all()
    assert p.features()["batch_copy"].ok is {batches > 0}
    del first, second, third
assert fake.count("batch_copy_13") == {batches}, fake.count("batch_copy_13")
assert (fake.count("cuMemcpyAsync") == 0) is {batches > 0}
""",
        driver_version=version,
    )


def test_a_late_stream_keeps_its_memory(play):
    """O2, O3: before its event is reached nothing can be unmapped, and a timeout says nothing."""
    play(
        """
src = filled(4)
with p.allocate(N * SIZE) as a, kvreuse.CopyQueue() as q:
    m = a.map()
    op = q.submit(m, src, scattered(5), scattered(6), LENGTHS)
    refused(errors.WaitTimeoutError, op.wait, 0.05)
    op.cancel()
    assert refused(errors.BusyError, m.close).count == 1
    assert not bytes_of(m).any()
    assert op.wait(20) is S.DONE  # it could not be stopped
    assert (bytes_of(m) == moved(src, scattered(5), scattered(6))).all()
    m.close()
    del op
""",
        stream_delay_ms=400,
    )


def test_streams_that_end_out_of_order(play):
    """O1: two threads have a stream each; what began first ends last."""
    play(
        """
with p.allocate(N * SIZE) as a, p.allocate(N * SIZE) as b, kvreuse.CopyQueue(2) as q:
    src = filled(7)
    fake.set(stream_mode=2)  # never: so that both are on their way
    ops = [q.submit(each, src, scattered(8), scattered(9), LENGTHS) for each in (a, b)]
    deadline = time.monotonic() + 20
    while fake.counters()["pending"] < 2 * (N + 1) and time.monotonic() < deadline:
        os.sched_yield()
    assert q.info().running == 2
    fake.set(stream_mode=1)
    assert [op.wait(20) for op in ops] == [S.DONE, S.DONE]
    for each in (a, b):
        with each.map() as m:
            assert (bytes_of(m) == moved(src, scattered(8), scattered(9))).all()
    del ops
"""
    )


def test_a_stream_that_never_ends(play):
    """O5, O6: quarantine, counted; its memory is kept; past the bound nothing new is taken; it leaves when it ends."""
    play(
        """
src = filled(10)
a = p.allocate(N * SIZE)
q, other = kvreuse.CopyQueue(), kvreuse.CopyQueue()
fake.set(stream_mode=2)
op = q.submit(a, src, scattered(1), scattered(2), LENGTHS)
assert refused(kvreuse.NotQuiescentError, q.close, 0.1).count == 1
(found,) = kvreuse.quarantine()
assert found.operation == op.handle and found.age_s >= 0 and found.total_nbytes == N * SIZE and "closed" in found.reason
refused(errors.BusyError, a.close)
backend.quarantine_limit_set(N * SIZE - 1)
assert str(N * SIZE) in str(refused(kvreuse.NotQuiescentError, other.submit, bytearray(1), b"1", [0], [0], [1]))
fake.set(stream_mode=0)
assert op.wait(20) is S.DONE and kvreuse.quarantine() == []
other.submit(bytearray(1), b"1", [0], [0], [1]).result()
q.close(); other.close(); a.close()
del op, found
"""
    )


def test_a_stream_that_reports_an_error(play):
    """O5: the driver does not tell whether it has ended. Only an operator's decision, who accepts the risk, ends it."""
    play(
        """
src = filled(11)
a = p.allocate(N * SIZE)
q = kvreuse.CopyQueue()
op = q.submit(a, src, scattered(1), scattered(2), LENGTHS)
deadline = time.monotonic() + 20
while not kvreuse.quarantine() and time.monotonic() < deadline:
    os.sched_yield()
(found,) = kvreuse.quarantine()
assert "driver" in found.reason and op.state is S.RUNNING and op.error is None
refused(errors.BusyError, a.close)
refused(kvreuse.NotQuiescentError, q.close, 0.05)
assert "risk" in str(refused(TypeError, found.give_back))
found.give_back(accept_risk=True)
assert op.state is S.FAILED and isinstance(op.error, kvreuse.NotQuiescentError)
refused(errors.BusyError, found.give_back, accept_risk=True)
q.close(); a.close()
del op
""",
        lost=1,
        stream_error_at=3,
    )


def test_a_copy_that_is_refused_in_the_midst(play):
    """O1, O4: what was issued before it is waited for, then it is FAILED(index); the stream serves the next one."""
    play(
        """
src = filled(12)
with p.allocate(N * SIZE) as a, kvreuse.CopyQueue() as q:
    fake.fail_call("cuMemcpyAsync", 2, 4)
    op = q.submit(a, src, scattered(1), scattered(2), LENGTHS)
    refused(errors.WaitTimeoutError, op.wait, 0.05)  # three are on their way
    assert op.wait(20) is S.FAILED and op.failed_index == 3
    assert isinstance(op.error, errors.OutOfMemoryError) and op.error.call == "cuMemcpyAsync"
    assert q.submit(a, src, scattered(1), scattered(2), LENGTHS).wait(20) is S.DONE
    del op
""",
        driver_version=12080,
        stream_delay_ms=300,
    )


@pytest.mark.parametrize(
    ("call", "code", "is_known"),
    [
        ("cuStreamCreate", 2, True),
        ("cuEventCreate", 2, True),
        ("batch_copy_13", 1, True),
        ("cuEventRecord", 400, False),
    ],
)
def test_an_error_at_each_call(play, call, code, is_known):
    """O1, O5: FAILED with the driver's call and code; where the event could not be recorded, quarantine."""
    play(
        f"""
src = filled(13)
a = p.allocate(N * SIZE)
q = kvreuse.CopyQueue()
fake.fail_call({call!r}, {code})
op = q.submit(a, src, scattered(1), scattered(2), LENGTHS)
if {is_known}:
    assert op.wait(20) is S.FAILED
    assert op.error.call == {call.replace("batch_copy_13", "cuMemcpyBatchAsync")!r}
    assert (op.error.native_source, op.error.native_code) == ("cuda", {code})
else:
    deadline = time.monotonic() + 20
    while not kvreuse.quarantine() and time.monotonic() < deadline:
        os.sched_yield()
    (found,) = kvreuse.quarantine()
    fake.drain()
    found.give_back(accept_risk=True)
q.close(); a.close()
del op
""",
        lost=int(not is_known),
    )


def test_a_copy_waits_for_an_event(play):
    """B3: a CUDA event, recorded by the caller on a stream of its own; also before a copy on the host."""
    play(
        """
src, out = filled(14), np.zeros(N * SIZE, np.uint8)
lib = fake.library
stream, event = ctypes.c_void_p(), ctypes.c_void_p()
with p.allocate(N * SIZE) as a, a.map() as m, kvreuse.CopyQueue() as q:
    lib.cuCtxGetCurrent.argtypes = [ctypes.c_void_p]
    context = ctypes.c_void_p()
    lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    lib.cuCtxSetCurrent(context)
    lib.cuStreamCreate(ctypes.byref(stream), 1), lib.cuEventCreate(ctypes.byref(event), 0)
    fake.set(stream_mode=2)
    lib.cuMemcpyAsync.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    assert lib.cuMemcpyAsync(m.address, src.ctypes.data, N * SIZE, stream) == 0
    lib.cuEventRecord.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    assert lib.cuEventRecord(event, stream) == 0
    after = [kvreuse.CudaEvent(event.value, 0)]
    ops = [q.submit(out, m, [0], [0], [N * SIZE], after=after)]
    ops.append(q.submit(bytearray(1), b"1", [0], [0], [1], after=after))
    time.sleep(0.05)
    assert [op.state for op in ops] == [S.QUEUED, S.QUEUED]
    fake.set(stream_mode=0)
    assert [op.wait(20) for op in ops] == [S.DONE, S.DONE] and (out == src).all()
    bad = q.submit(out, m, [0], [0], [1], after=[kvreuse.CudaEvent(12345, 0)])
    assert bad.wait(20) is S.FAILED and bad.error.call == "cuEventQuery"
    lib.cuEventDestroy_v2(event), lib.cuStreamDestroy_v2(stream)
    del ops, bad
"""
    )


def test_blocks_of_a_part_on_the_device(play):
    """O7, B6: store and load between an engine on the host, or on the device, and a part's slots on the device."""
    play(
        """
manifest = kvreuse.Manifest(model="m", weights_id="w", dtype="bfloat16", block_tokens=16, block_bytes=4096, layers=1,
    kv_heads=1, head_dim=8, layout="l", hash_scheme="opaque", hash_root="none", topology=kvreuse.Topology())
KEYS = [bytes([i + 1]) * 32 for i in range(4)]
with kvreuse.testing.keeper("[reuse]\\nenabled = true\\n") as path, kvreuse.connect(path) as k:
    with k.attach(manifest, kvreuse.Rank(), blocks=8, provider="cuda:0") as part, p.allocate(8 * 4096) as region:
        src, out = filled(15), np.zeros(N * SIZE, np.uint8)
        with region.map() as m:
            host, device = (kvreuse.EngineBlocks({"all": (memory, 0, 4096)}) for memory in (src, m))
            assert part.store(KEYS, host, [3, 2, 1, 0]).wait(20) is S.DONE and part.match(KEYS) == 4
            with part.claim(KEYS) as claim:
                assert claim.copy_out(device, [4, 5, 6, 7]).wait(20) is S.DONE
                assert claim.copy_out(kvreuse.EngineBlocks({"all": (out, 64, 4096)}), [0, 1, 2, 3]).wait(20) is S.DONE
            wanted = np.concatenate([src[i * 4096 : (i + 1) * 4096] for i in (3, 2, 1, 0)])
            assert (out[64 : 64 + 4 * 4096] == wanted).all()
            assert ctypes.string_at(m.address + 4 * 4096, 4 * 4096) == wanted.tobytes()
            fake.fail_call("batch_copy_13", 1)
            assert part.store([b"other", b"another"], device, [0, 1]).wait(20) is S.FAILED
            assert part.match([b"other"]) == 0 and part.stats().free_count == 4 and part.stats().owned_count == 0
            del host, device
"""
    )
