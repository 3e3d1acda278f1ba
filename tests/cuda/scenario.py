"""The life of CUDA memory in one process against the fake driver, every step looked at. Run in a process of its own:

    python tests/cuda/scenario.py core | fallback | FILE.so (the C functions, see raw.py)

Exit 0, or a traceback that says what was wrong. test_cuda_patterns.py runs it over code with planted faults: it has to
fail then.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import fakedriver

from kvreuse import errors

MIB = 1 << 20
POSIX_FD, FABRIC = 1, 8
KINDS = (POSIX_FD, FABRIC)
ALLOW_FABRIC = 1
GRANULARITY = {POSIX_FD: 2 * MIB, FABRIC: 4 * MIB}


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


class Scenario:
    def __init__(self, backend: Any, fake: Any) -> None:
        self.backend, self.fake = backend, fake

    def prepare(self) -> None:
        self.fake.reset()
        self.fake.set(fabric_attribute=1, fabric_create_result=0, fabric_granularity=4 * MIB)
        # Where setting it back was made to fail, this thread was left with the library's context.
        self.fake.library.cuCtxSetCurrent(None)
        self.fake.reset_calls()

    def share(self, region: Any, kind: int) -> tuple[int, bytes]:
        """Return (fd, fabric): one is -1 or zeros."""
        if kind == POSIX_FD:
            return self.backend.region_export(region.handle), bytes(64)
        return -1, self.backend.cuda_export_fabric(region.handle)

    def life(self, kind: int, nbytes: int = 6912) -> None:
        """Allocate, map, export, import, map, write, read, observe, close everything."""
        backend = self.backend
        opened: list[Any] = []  # what to undo, the last first
        try:
            region = backend.cuda_allocate(0, nbytes, kind, ALLOW_FABRIC)
            opened.append((backend.region_close, region.handle))
            physical = -(-nbytes // GRANULARITY[kind]) * GRANULARITY[kind]
            assert (region.nbytes, region.physical_nbytes, region.kind) == (nbytes, physical, kind)
            assert (region.provider, region.access, region.device, region.inode) == (0, 3, 0, 0)
            mapping = backend.region_map(region.handle, 3, 0)
            opened.append((backend.mapping_unmap, mapping.handle))
            assert mapping.nbytes == nbytes
            fd, token = self.share(region, kind)
            if kind == POSIX_FD:
                opened.append((os.close, fd))
                assert not os.get_inheritable(fd)
            else:
                opened.append((backend.cuda_fabric_done, region.handle))
                assert (len(token), token[:8]) == (64, b"FAKEFAB1")
            other = backend.cuda_import(0, kind, fd, token, nbytes, physical, region.region_id)
            opened.append((backend.region_close, other.handle))
            assert (other.nbytes, other.physical_nbytes, other.kind) == (nbytes, physical, kind)
            assert other.region_id == region.region_id
            view = backend.region_map(other.handle, 1, 0)
            opened.append((backend.mapping_unmap, view.handle))
            assert view.address != mapping.address
            # Both ends of the memory.
            for offset in (0, nbytes - 4, physical - 4):
                ctypes.memmove(mapping.address + offset, b"kv%02x" % (offset & 255), 4)
                assert ctypes.string_at(view.address + offset, 4) == b"kv%02x" % (offset & 255)
            self.look(backend.cuda_observe(other.handle), kind, physical, view.address)
        finally:
            while opened:
                undo, handle = opened.pop()
                undo(handle)

    def look(self, seen: Any, kind: int, physical: int, address: int) -> None:
        """Each group of fields is what the driver said, or -1 with its CUresult."""
        granularity = GRANULARITY[kind]
        groups = (
            ("properties", ("handle_types", "allocation_type", "location_type", "location_id"), (kind, 1, 1, 0)),
            ("granularity", ("granularity_min", "granularity_recommended"), (granularity, 2 * MIB)),
            ("range", ("mapped_nbytes", "mapped_base"), (physical, address)),
            ("reservation", ("reserved_nbytes",), (physical,)),
            ("allowed", ("allowed_handle_types",), (kind,)),
            ("access", ("access",), (1,)),
        )
        for name, fields, values in groups:
            result = getattr(seen, f"{name}_result")
            found = tuple(getattr(seen, field) for field in fields)
            if result == 0:
                assert found == values, (name, found)
            else:
                assert result in (999, 2) or (result == -1 and seen.properties_result), (name, result)
                assert found in ((-1,) * len(fields), (-1, 0)), (name, found)
                self.untold += 1

    untold = 0  # groups that the driver would not tell

    def check_empty(self, fds: int) -> None:
        assert self.fake.live() == {}, self.fake.live()
        assert self.fake.counters()["violations"] == 0, self.fake.violation()
        assert self.fake.counters()["v1_calls"] == 0
        assert open_fds() == fds, "fds"
        assert self.backend.handle_counts() == (0, 0, 0, 0, 0)

    # ---- the parts of it ----

    def good(self) -> None:
        self.prepare()
        self.backend.cuda_info(0)
        fds = open_fds()
        for kind in KINDS:
            for nbytes in (6912, 2 * MIB, 2 * MIB + 1):
                self.life(kind, nbytes)
                self.check_empty(fds)
        assert not self.untold

    def contexts(self) -> None:
        """A thread's own context is current again after each call."""
        self.prepare()
        get, put = self.fake.library.cuCtxGetCurrent, self.fake.library.cuCtxSetCurrent
        get.argtypes, put.argtypes = [ctypes.POINTER(ctypes.c_void_p)], [ctypes.c_void_p]
        found = ctypes.c_void_p()
        assert (get(ctypes.byref(found)), found.value) == (0, None)
        region = self.backend.cuda_allocate(0, 1, POSIX_FD, 0)
        assert (get(ctypes.byref(found)), found.value) == (0, None)
        self.backend.region_close(region.handle)

    def failing(self) -> None:
        """Every driver call fails once: the right exception, and nothing is left of what the call had done."""
        backend, fds = self.backend, open_fds()
        for kind in KINDS:
            self.prepare()
            self.life(kind)
            calls = [name for name in self.fake.log() if not name.startswith("cuGet")]
            for n, name in enumerate(calls, 1):
                for code, kinds in ((999, errors.DriverError), (2, errors.OutOfMemoryError)):
                    self.prepare()
                    self.fake.fail_at(n, code)
                    try:
                        self.steps(kind)
                    except errors.KVReuseError as error:
                        assert isinstance(error, kinds), repr(error)
                        assert (error.native_source, error.native_code) == ("cuda", code), repr(error)
                        assert name.startswith(error.call), (name, error.call)
                        assert f"CUresult {code}" in str(error)
                        assert ("CUDA_ERROR_UNKNOWN" in str(error)) == (code == 999)
                    else:
                        # The thread's own context is set back after the work is done; and what is only looked at says
                        # why in the observation.
                        assert name == "cuCtxSetCurrent" or self.untold, (n, name)
                    self.untold = 0
                    self.fake.fail_at(0, 0)
                    # The driver's code is of that call only.
                    try:
                        backend.cuda_allocate(0, 0, kind, ALLOW_FABRIC)
                    except errors.RangeError as error:
                        assert (error.native_source, error.native_code) == ("", 0)
                    else:
                        raise AssertionError("0 bytes were allocated")
                    self.life(kind)
                    self.check_empty(fds)

    def steps(self, kind: int) -> None:
        """`life`, but after a failure each close is tried again: it has to succeed then."""
        backend = self.backend

        class Retried:
            def __getattr__(self, name: str) -> Any:
                function = getattr(backend, name)
                if name not in ("region_close", "mapping_unmap", "cuda_fabric_done"):
                    return function

                def twice(handle: int) -> None:
                    try:
                        function(handle)
                    except errors.KVReuseError as error:
                        if error.native_source != "cuda":
                            raise
                        failures.append(error)
                        function(handle)

                return twice

        failures: list[errors.KVReuseError] = []
        self.backend = Retried()
        try:
            self.life(kind)
        finally:
            self.backend = backend
        if failures:
            raise failures[0]

    def mistakes(self) -> None:
        """What a caller does wrong is refused before the driver hears of it."""
        backend, fake = self.backend, self.fake
        self.prepare()
        region = backend.cuda_allocate(0, 1, POSIX_FD, 0)
        before = fake.counters()["calls"]
        for wrong, error in (
            (lambda: backend.cuda_export_fabric(region.handle), errors.NotSupportedError),
            (lambda: backend.cuda_fabric_done(region.handle), errors.RangeError),
            (lambda: backend.cuda_allocate(0, 1, FABRIC, 0), errors.ProfileError),
            (lambda: backend.cuda_allocate(0, 1, 2, 0), errors.RangeError),
            (lambda: backend.cuda_allocate(0, 2**62, POSIX_FD, 0), errors.RangeError),
            (lambda: backend.cuda_allocate(0, -1, POSIX_FD, 0), errors.RangeError),
            (lambda: backend.cuda_allocate(8, 1, POSIX_FD, 0), errors.RangeError),
            (lambda: backend.cuda_allocate(-1, 1, POSIX_FD, 0), errors.RangeError),
            (lambda: backend.cuda_import(0, POSIX_FD, -1, bytes(64), 1, 1, bytes(16)), errors.RangeError),
            (lambda: backend.cuda_import(0, 0, 0, bytes(64), 1, 1, bytes(16)), errors.RangeError),
            (lambda: backend.cuda_import(0, POSIX_FD, 0, bytes(64), 2, 1, bytes(16)), errors.SizeMismatchError),
        ):
            self.refused(wrong, error)
        assert fake.counters()["calls"] == before
        self.refused(lambda: backend.cuda_import(0, POSIX_FD, 9999, bytes(64), 1, 1, bytes(16)), errors.SystemCallError)
        fake.reset_calls()
        before = 0
        backend.region_close(region.handle)
        self.refused(lambda: backend.region_close(region.handle), errors.StaleHandleError)
        assert fake.counters()["calls"] == before + 4  # get, set, release, set
        assert fake.counters()["violations"] == 0
        # A granted kind is of the allocation, not of the record.
        region = backend.cuda_allocate(0, 1, POSIX_FD, 0)
        fd = backend.region_export(region.handle)
        sizes = (1, region.physical_nbytes, region.region_id)
        for setting, error in (
            ({"properties_kinds": FABRIC}, errors.KindMismatchError),
            ({"properties_location": 3}, errors.IncompatibleError),
        ):
            fake.set(**setting)
            self.refused(lambda: backend.cuda_import(0, POSIX_FD, fd, bytes(64), *sizes), error)
            fake.set(properties_kinds=-1, properties_location=-1)
        # Sizes: no multiple of the granularity; more than there is; another one than the driver mapped.
        self.refused(
            lambda: backend.cuda_import(0, POSIX_FD, fd, bytes(64), 1, 4096, region.region_id),
            errors.SizeMismatchError,
        )
        larger = backend.cuda_import(0, POSIX_FD, fd, bytes(64), 1, 8 * MIB, region.region_id)
        error = self.refused(lambda: backend.region_map(larger.handle, 3, 0), errors.SizeMismatchError)
        assert (error.call, error.native_code) == ("cuMemMap", 1)
        fake.set(observed_size=MIB)
        self.refused(lambda: backend.region_map(region.handle, 3, 0), errors.SizeMismatchError)
        fake.set(observed_size=-1)
        backend.region_close(larger.handle)
        # An fd that is no CUDA memory.
        other = os.open("/dev/null", os.O_RDONLY)
        self.refused(lambda: backend.cuda_import(0, POSIX_FD, other, bytes(64), *sizes), errors.DriverError)
        # A fabric handle that is none: no fd is touched.
        self.refused(lambda: backend.cuda_import(0, FABRIC, fd, bytes(64), *sizes), errors.DriverError)
        os.fstat(fd)
        for opened in (other, fd):
            os.close(opened)
        backend.region_close(region.handle)
        assert fake.live() == {}

    def importer_outlives_exporter(self) -> None:
        """The exporter closes first: an fd importer reads on; a fabric exporter has to wait for its importers."""
        backend, fake = self.backend, self.fake
        self.prepare()
        region = backend.cuda_allocate(0, 1, POSIX_FD, 0)
        mapping = backend.region_map(region.handle, 3, 0)
        ctypes.memmove(mapping.address, b"kept", 4)
        fd = backend.region_export(region.handle)
        other = backend.cuda_import(0, POSIX_FD, fd, bytes(64), 1, region.physical_nbytes, region.region_id)
        os.close(fd)
        view = backend.region_map(other.handle, 1, 0)
        backend.mapping_unmap(mapping.handle)
        backend.region_close(region.handle)
        assert ctypes.string_at(view.address, 4) == b"kept"
        backend.mapping_unmap(view.handle)
        backend.region_close(other.handle)
        # The same addresses and fd numbers, other memory: what was imported before is not given again.
        for _ in range(3):
            region = backend.cuda_allocate(0, 1, POSIX_FD, 0)
            mapping = backend.region_map(region.handle, 3, 0)
            text = os.urandom(8)
            ctypes.memmove(mapping.address, text, 8)
            fd = backend.region_export(region.handle)
            other = backend.cuda_import(0, POSIX_FD, fd, bytes(64), 1, region.physical_nbytes, region.region_id)
            view = backend.region_map(other.handle, 1, 0)
            assert ctypes.string_at(view.address, 8) == text
            assert backend.region_info(other.handle).region_id == region.region_id
            for mapped in (view, mapping):
                backend.mapping_unmap(mapped.handle)
            for each in (other, region):
                backend.region_close(each.handle)
            os.close(fd)
        region = backend.cuda_allocate(0, 1, FABRIC, ALLOW_FABRIC)
        token = backend.cuda_export_fabric(region.handle)
        self.refused(lambda: backend.region_close(region.handle), errors.BusyError)
        other = backend.cuda_import(0, FABRIC, -1, token, 1, region.physical_nbytes, region.region_id)
        backend.cuda_fabric_done(region.handle)
        backend.region_close(region.handle)
        backend.region_close(other.handle)
        # After that the handle names nothing.
        error = self.refused(
            lambda: backend.cuda_import(0, FABRIC, -1, token, 1, 4 * MIB, region.region_id), errors.DriverError
        )
        assert error.native_code == 400
        assert fake.live() == {}

    @staticmethod
    def refused(call: Any, kind: type[Exception]) -> Any:
        try:
            call()
        except kind as error:
            return error
        raise AssertionError(f"no {kind.__name__}")


def main(name: str) -> None:
    os.environ.pop("FAKE_CUDA", None)
    print(f"over {errors.__file__}", file=sys.stderr)
    assert errno  # the names of errno are needed after the fd limit
    fake = fakedriver.Fake(fakedriver.build())
    if name.endswith(".so"):
        import raw

        backend: Any = raw.Raw(Path(name))
    else:
        backend = importlib.import_module(f"kvreuse._{name}")
    scenario = Scenario(backend, fake)
    scenario.good()
    scenario.contexts()
    scenario.mistakes()
    scenario.importer_outlives_exporter()
    scenario.failing()
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1])
