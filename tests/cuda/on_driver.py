"""The life of CUDA memory on whatever libcuda.so.1 this process finds, and the answers to what no header says.

    python tests/cuda/on_driver.py core | fallback

Prints one line an answer. Run by test_cuda_gpu.py: on the real driver where there is one, else on the fake one.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import os
import sys

from kvreuse import errors

FABRIC, POSIX_FD = 8, 1
NBYTES = 3 * 1000 * 1000


def tell(question: str, answer: object) -> None:
    print(f"{question}: {answer}")


def outcome(call) -> str:
    try:
        call()
    except errors.KVReuseError as error:
        return f"{type(error).__name__} {error.call} {error.native_code}"
    return "no error"


class Copies:
    """Bytes in and out of device memory by the driver's own synchronous copies."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._to, self._from = library.cuMemcpyHtoD_v2, library.cuMemcpyDtoH_v2
        self._to.argtypes = [ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t]
        self._from.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_size_t]
        self._retain, self._set = library.cuDevicePrimaryCtxRetain, library.cuCtxSetCurrent
        self._retain.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int]
        self._set.argtypes = [ctypes.c_void_p]
        context = ctypes.c_void_p()
        assert self._retain(ctypes.byref(context), 0) == 0
        assert self._set(context) == 0

    def write(self, address: int, data: bytes) -> None:
        assert self._to(address, data, len(data)) == 0

    def read(self, address: int, nbytes: int) -> bytes:
        out = ctypes.create_string_buffer(nbytes)
        assert self._from(out, address, nbytes) == 0
        return out.raw


def main(name: str) -> None:
    backend = importlib.import_module(f"kvreuse._{name}")
    info = backend.cuda_info(0)
    tell(
        "driver, attributes 102 103 128, features",
        (info.driver_version, info.vmm, info.posix_fd, info.fabric, info.features),
    )
    copies = Copies()
    fds = len(os.listdir("/proc/self/fd"))

    region = backend.cuda_allocate(0, NBYTES, POSIX_FD, 0)
    seen = backend.cuda_observe(region.handle)
    tell("granularity of POSIX_FD, minimum and recommended", (seen.granularity_min, seen.granularity_recommended))
    assert region.physical_nbytes % seen.granularity_min == 0
    assert 0 <= region.physical_nbytes - NBYTES < seen.granularity_min
    mapping = backend.region_map(region.handle, 3, 0)
    copies.write(mapping.address + NBYTES - 4, b"last")
    fd = backend.region_export(region.handle)
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    other = backend.cuda_import(0, POSIX_FD, fd, bytes(64), NBYTES, region.physical_nbytes, region.region_id)
    view = backend.region_map(other.handle, 1, 0)
    assert copies.read(view.address + NBYTES - 4, 4) == b"last"
    looked = backend.cuda_observe(other.handle)
    assert (looked.mapped_base, looked.mapped_nbytes) == (view.address, region.physical_nbytes)
    assert looked.access == 1
    groups = ("properties", "granularity", "range", "reservation", "allowed", "access")
    tell("results of what is observed", {group: getattr(looked, f"{group}_result") for group in groups})
    tell("address reservation of the mapping", looked.reserved_nbytes)

    larger = backend.cuda_import(0, POSIX_FD, fd, bytes(64), NBYTES, 4 * region.physical_nbytes, region.region_id)
    tell("a map larger than the allocation", outcome(lambda: backend.region_map(larger.handle, 3, 0)))
    smaller = backend.cuda_import(0, POSIX_FD, fd, bytes(64), 1, seen.granularity_min, region.region_id)
    tell(
        "a map smaller than the allocation",
        outcome(lambda: backend.mapping_unmap(backend.region_map(smaller.handle, 3, 0).handle)),
    )
    null = os.open("/dev/null", os.O_RDONLY)
    tell(
        "an fd that is no CUDA memory",
        outcome(lambda: backend.cuda_import(0, POSIX_FD, null, bytes(64), 1, seen.granularity_min, bytes(16))),
    )
    tell(
        "64 zero bytes as a fabric handle",
        outcome(lambda: backend.cuda_import(0, FABRIC, -1, bytes(64), 1, seen.granularity_min, bytes(16))),
    )
    tell("a fabric allocation", outcome(lambda: backend.region_close(backend.cuda_allocate(0, 1, FABRIC, 1).handle)))

    backend.mapping_unmap(mapping.handle)
    backend.region_close(region.handle)
    assert copies.read(view.address + NBYTES - 4, 4) == b"last"
    tell("after the exporter's release", "the importer reads on")
    for mapped in (view,):
        backend.mapping_unmap(mapped.handle)
    for imported in (other, larger, smaller):
        backend.region_close(imported.handle)
    os.close(fd)
    os.close(null)
    assert backend.handle_counts()[:2] == (0, 0)
    tell("fds left", len(os.listdir("/proc/self/fd")) - fds)
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1])
