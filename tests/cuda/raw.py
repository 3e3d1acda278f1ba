"""The C functions themselves as a backend module: kvreuse/native compiled without the extension, called by ctypes.

So that a fault planted in the C text can be shown to be found.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvreuse import _api, _status
from kvreuse import _ctypes_structs as c

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "lockstep"))
import header as h  # noqa: E402

TYPES = {
    name: getattr(ctypes, f"c_{name.removesuffix('_t')}")
    for name in ("int32_t", "int64_t", "uint32_t", "uint64_t", "uint8_t")
}


@functools.cache
def _compile(source: bytes, headers: tuple[tuple[str, bytes], ...], folder: Path) -> Path:
    """Compile one file, once for the same text: of a copy with a planted fault all others are as they were."""
    made = folder / hashlib.sha256(repr((source, headers)).encode()).hexdigest()
    made.mkdir(parents=True)
    for name, text in headers:
        (made / name).write_bytes(text)
    (made / "source.c").write_bytes(source)
    command = ["cc", "-std=c11", "-O1", "-g", "-fPIC", "-c", "-fstack-protector-all", "-w", f"-I{ROOT / 'include'}"]
    subprocess.run([*command, "source.c", "-o", "source.o"], check=True, timeout=120, cwd=made)
    return made / "source.o"


def compile_library(native: Path, out: Path, objects: Path) -> Path:
    """Compile the C of a folder like kvreuse/native; `objects` is where the compiled files are kept."""
    headers = tuple((path.name, path.read_bytes()) for path in sorted(native.glob("*.h")))
    files = [str(_compile(path.read_bytes(), headers, objects)) for path in sorted(native.glob("*.c"))]
    subprocess.run(["cc", "-shared", *files, "-pthread", "-ldl", "-o", str(out)], check=True, timeout=120)
    return out


class Raw:
    """The functions of the handle API that tests/cuda/scenario.py uses."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        header = h.parse((ROOT / "include" / "kvreuse.h").read_text())
        self._functions = {}
        for name, parameters in header.functions.items():
            function = self._library[name]
            function.argtypes = [ctypes.c_void_p if p.pointer else TYPES[p.type] for p in parameters]
            function.restype = ctypes.c_int32
            self._functions[name] = function

    def _call(self, name: str, *arguments: Any) -> None:
        passed = [ctypes.byref(a) if isinstance(a, (ctypes.Structure, ctypes.Array)) else a for a in arguments]
        passed = [ctypes.byref(a) if isinstance(a, ctypes._SimpleCData) else a for a in passed]
        if self._functions[f"kvr_{name}"](*passed) < 0:
            error = c.kvr_error()
            self._functions["kvr_error_get"](ctypes.byref(error))
            record = (error.status, error.detail, tuple(error.values), error.call.decode())
            raise _status.make(*record, error.native_source, error.native_code)

    @staticmethod
    def _record(kind: Any, struct: Any) -> Any:
        values = {name: getattr(struct, name) for name in kind._fields}
        return kind(**{n: bytes(v) if isinstance(v, ctypes.Array) else v for n, v in values.items()})

    def cuda_info(self, ordinal):
        out = c.kvr_cuda_info()
        self._call("cuda_info_get", ordinal, out)
        return self._record(_api.CudaInfo, out)

    def cuda_allocate(self, ordinal, nbytes, kind, flags):
        out = c.kvr_region_info()
        self._call("cuda_allocate", ordinal, nbytes, kind, flags, out)
        return self._record(_api.RegionInfo, out)

    def cuda_import(self, ordinal, kind, fd, fabric, nbytes, physical_nbytes, region_id):
        out = c.kvr_region_info()
        self._call("cuda_import", ordinal, kind, fd, fabric, nbytes, physical_nbytes, region_id, out)
        return self._record(_api.RegionInfo, out)

    def cuda_export_fabric(self, region):
        out = (ctypes.c_uint8 * 64)()
        self._call("cuda_export_fabric", region, out)
        return bytes(out)

    def cuda_fabric_done(self, region):
        self._call("cuda_fabric_done", region)

    def cuda_observe(self, region):
        out = c.kvr_cuda_observation()
        self._call("cuda_observe", region, out)
        return self._record(_api.CudaObservation, out)

    def region_info(self, region):
        out = c.kvr_region_info()
        self._call("region_info_get", region, out)
        return self._record(_api.RegionInfo, out)

    def region_export(self, region):
        out = ctypes.c_int32()
        self._call("region_export", region, out)
        return out.value

    def region_map(self, region, access, flags):
        out = c.kvr_mapping_info()
        self._call("region_map", region, access, flags, out)
        return self._record(_api.MappingInfo, out)

    def mapping_info(self, mapping):
        out = c.kvr_mapping_info()
        self._call("mapping_info_get", mapping, out)
        return self._record(_api.MappingInfo, out)

    def mapping_unmap(self, mapping):
        self._call("mapping_unmap", mapping)

    def region_close(self, region):
        self._call("region_close", region)

    def handle_counts(self):
        out = c.kvr_handle_counts()
        self._call("handle_counts_get", out)
        return self._record(_api.HandleCounts, out)
