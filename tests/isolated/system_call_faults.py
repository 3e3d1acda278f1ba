"""Run in an interpreter under fault_shim.c: fail each system call of an operation in turn. Prints one line a fault."""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib
import json
import os
import sys
import warnings

from kvreuse import _status, errors

PAGE = os.sysconf("SC_PAGESIZE")
DONTFORK = 1
READ_WRITE = 3
F_GET_SEALS = 1034
ERRNOS = (errno.EMFILE, errno.ENOMEM, errno.EPERM, errno.EIO)

# What the caller does not get to see, with the reason; (call, fcntl command or None, where).
IGNORED = {
    ("close", None, "both"): "after close() the fd's number is free whatever it says (close(2), Linux)",
    ("fcntl", F_GET_SEALS, "observe"): "a file that cannot have seals: seals are -1 in the observation",
    ("fstat", None, "mmap"): "CPython's mmap looks at the size once more; the fallback has looked before",
    ("munmap", None, "fallback"): "CPython's mmap.close() drops munmap's answer; of a whole mapping it cannot fail",
}
# The error carries no errno: it is an answer, not a failure.
F_GET_SEALS_AT_IMPORT = "a file that cannot have seals is refused by the import as unsealed"

shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
shim.arm.argtypes = [ctypes.c_int32, ctypes.c_int32]
shim.arm.restype = None
shim.refuse_tmpfile.argtypes = [ctypes.c_int32]
shim.refuse_tmpfile.restype = None
shim.disarm.argtypes = []
shim.disarm.restype = ctypes.c_int32
shim.call_name.argtypes = shim.call_detail.argtypes = [ctypes.c_int32]
shim.call_name.restype = ctypes.c_char_p
shim.call_detail.restype = ctypes.c_int32


def maps() -> list[str]:
    with open("/proc/self/maps") as lines:
        return [line for line in lines if "memfd:kvreuse" in line or "/#" in line or "(deleted)" in line]


def census(backend) -> tuple:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(maps()), backend.handle_counts()


class Operation:
    """`run` is what fails; `undo` takes back what a good run made; `prepare` and `clean` stand around both."""

    def __init__(self, backend) -> None:
        self.backend = backend
        self.region = backend.host_allocate(PAGE + 1, 1, "kvreuse-fault", None)

    def prepare(self) -> None:
        pass

    def rewind(self) -> None:
        """Before each run: come to a state in which it makes every system call that it can make."""

    def clean(self) -> None:
        self.backend.region_close(self.region.handle)


class Allocate(Operation):
    directory: str | None = None

    def rewind(self) -> None:
        """Random ids are fetched 64 at a time: use up what is left."""
        was_fetched, left = False, 0
        while not was_fetched or left:
            shim.arm(0, 0)
            info = self.backend.host_allocate(1, 1, "kvreuse-fault", None)
            names = [shim.call_name(n) for n in range(1, shim.disarm() + 1)]
            self.backend.region_close(info.handle)
            left = 63 if b"getrandom" in names and not was_fetched else left - was_fetched
            was_fetched = was_fetched or b"getrandom" in names

    def run(self):
        return self.backend.host_allocate(3 * PAGE, 1, "kvreuse-fault", self.directory)

    def undo(self, info) -> None:
        self.backend.region_close(info.handle)


class AllocateFile(Allocate):
    directory = os.getcwd()


class AllocateNamed(AllocateFile):
    """A file system without O_TMPFILE: the file has a name for a moment."""

    def prepare(self) -> None:
        shim.refuse_tmpfile(1)

    def undo(self, info) -> None:
        super().undo(info)
        for name in os.listdir(self.directory):
            # Only an unlink that failed leaves one.
            os.unlink(os.path.join(self.directory, name))
            assert name.startswith(".kvreuse-")


class Export(Operation):
    def run(self):
        return self.backend.region_export(self.region.handle)

    def undo(self, fd) -> None:
        os.close(fd)


class Import(Operation):
    def __init__(self, backend) -> None:
        super().__init__(backend)
        self.fd = backend.region_export(self.region.handle)

    def run(self):
        r = self.region
        return self.backend.region_import(self.fd, r.nbytes, r.physical_nbytes, r.region_id, r.device, r.inode, 0)

    def undo(self, info) -> None:
        self.backend.region_close(info.handle)

    def clean(self) -> None:
        os.close(self.fd)
        super().clean()


class Map(Operation):
    def run(self):
        return self.backend.region_map(self.region.handle, READ_WRITE, 0)

    def undo(self, info) -> None:
        self.backend.mapping_unmap(info.handle)


class MapDontFork(Map):
    def run(self):
        return self.backend.region_map(self.region.handle, READ_WRITE, DONTFORK)


class Observe(Operation):
    def run(self):
        return self.backend.region_observe(self.region.handle)

    def undo(self, seen) -> None:
        assert seen.file_nbytes == 2 * PAGE


class Unmap(Operation):
    def prepare(self) -> None:
        self.mapping = self.backend.region_map(self.region.handle, READ_WRITE, 0)

    def run(self):
        self.backend.mapping_unmap(self.mapping.handle)

    def undo(self, _) -> None:
        self.prepare()

    def clean(self) -> None:
        self.backend.mapping_unmap(self.mapping.handle)
        super().clean()


class Close(Operation):
    """Ends with no region; a good run takes it, and `undo` makes the next."""

    def run(self):
        self.backend.region_close(self.region.handle)

    def undo(self, _) -> None:
        self.region = self.backend.host_allocate(PAGE + 1, 1, "kvreuse-fault", None)


OPERATIONS = {
    cls.__name__: cls
    for cls in (Allocate, AllocateFile, AllocateNamed, Export, Import, Map, MapDontFork, Observe, Unmap, Close)
}


def ignored(name: str, detail: int, operation: str, backend: str, calls: list[str]) -> str:
    if name == "close":
        return IGNORED[("close", None, "both")]
    if (name, detail, operation) == ("fcntl", F_GET_SEALS, "Observe"):
        return IGNORED[("fcntl", F_GET_SEALS, "observe")]
    if backend == "fallback" and name == "munmap":
        return IGNORED[("munmap", None, "fallback")]
    # Only the second fstat of a mapping is mmap's own.
    if backend == "fallback" and operation.startswith("Map") and name == "fstat" and calls.count("fstat") > 1:
        return IGNORED[("fstat", None, "mmap")]
    return ""


def check_error(error, name: str, detail: int, code: int, operation: str, backend: str) -> None:
    if (name, detail, operation) == ("fcntl", F_GET_SEALS, "Import"):
        assert type(error) is errors.PermissionDeniedError, F_GET_SEALS_AT_IMPORT
        assert (error.call, error.native_code) == ("region_import", 0), F_GET_SEALS_AT_IMPORT
        return
    # mmap.mmap dups its fd: Python tells one errno for both.
    call = "mmap" if backend == "fallback" and operation.startswith("Map") and name == "fcntl" else name
    expected = _status.STATUS[_status.ERRNO_STATUS.get(code, -25)][1]
    assert type(error) is expected, (type(error), expected)
    assert (error.call, error.native_source, error.native_code) == (call, "errno", code), vars(error)
    if isinstance(error, OSError):
        assert error.errno == code
    assert errno.errorcode[code] in str(error), error


def main(backend: str, operation: str) -> None:
    module = importlib.import_module(f"kvreuse._{backend}")
    case = OPERATIONS[operation](module)
    case.prepare()
    # Once without: what is made at a first use is no leak.
    case.undo(case.run())
    before = census(module)
    case.rewind()
    shim.arm(0, 0)
    made = case.run()
    count = shim.disarm()
    names = [shim.call_name(n).decode() for n in range(1, count + 1)]
    case.undo(made)
    assert census(module) == before
    for n in range(1, count + 1):
        for code in ERRNOS:
            error = made = None
            case.rewind()
            shim.arm(n, code)
            try:
                made = case.run()
            except errors.KVReuseError as caught:
                error = caught
            finally:
                seen = shim.disarm()
            name, detail = shim.call_name(n).decode(), shim.call_detail(n)
            assert seen >= n
            why = ignored(name, detail, operation, backend, names[:n])
            print(json.dumps([name, detail, code, type(error).__name__, why]))
            if why:
                assert error is None, error
                case.undo(made)
                if name == "munmap":
                    # The planted failure itself left this mapping; nobody has a name for it any more.
                    assert len(maps()) == before[1] + 1
                    before = census(module)
            else:
                assert error is not None, f"{name} failed with {code} and nobody said so"
                check_error(error, name, detail, code, operation, backend)
            del error
            assert census(module) == before, (name, code, before, census(module))
            case.undo(case.run())
            assert census(module) == before
    case.clean()
    assert module.handle_counts()[:4] == (0, 0, 0, 0)


if __name__ == "__main__":
    warnings.simplefilter("error")
    main(*sys.argv[1:])
