"""Build the fake CUDA driver (tests/cuda/driver) and control it from Python."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import tempfile
import time
from ctypes import c_char_p, c_int32, c_int64
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "driver"
SOURCES = [FOLDER / "libcuda.c", FOLDER / "streams.c"]
# Where the PyPI packages nvidia-cuda-runtime-cu12 and nvidia-cuda-runtime (13.x) have cuda.h.
HEADERS = {"12": "nvidia/cuda_runtime/include", "13": "nvidia/cu13/include"}


def cuda_headers() -> dict[str, Path]:
    """Return the folders of the real cuda.h that are installed, by major version."""
    found: dict[str, Path] = {}
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for major, folder in HEADERS.items():
            path = Path(root).parent / folder
            if (path / "cuda.h").exists():
                found.setdefault(major, path)
    return found


def build(major: str | None = None) -> Path:
    """Compile it against one of the headers (the newest if None); return the folder of libcuda.so.1."""
    headers = cuda_headers()
    include = headers[major or max(headers)]
    text = b"".join(path.read_bytes() for path in [*SOURCES, FOLDER / "driver.h", include / "cuda.h"])
    name = f"kvreuse-fake-cuda-{os.getuid()}-{hashlib.sha256(text).hexdigest()[:16]}"
    folder = Path(tempfile.gettempdir(), name)
    library = folder / "libcuda.so.1"
    if not library.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch, "libcuda.so.1")
            command = ["cc", "-std=c11", "-O2", "-g", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-fPIC", "-shared"]
            command += ["-isystem", str(include), f"-I{FOLDER}", *map(str, SOURCES)]
            command += ["-Wl,-soname,libcuda.so.1", "-pthread", "-ldl", "-o", str(made)]
            subprocess.run(command, check=True, timeout=120)
            made.replace(library)
    return folder


class Counters(ctypes.Structure):
    """fake_counters of driver.h."""

    _fields_ = [
        (name, c_int64)
        for name in [
            "handles",
            "allocations",
            "mappings",
            "reservations",
            "fds",
            "contexts",
            "streams",
            "events",
            "pending",
            "calls",
            "v1_calls",
            "violations",
            "exports",
            "imports",
            "stale_fabric_imports",
        ]
    ]


LIVE = ("handles", "allocations", "mappings", "reservations", "fds", "streams", "events", "pending")


class Fake:
    """The fake driver of this process. Loading it first makes it the libcuda.so.1 that the library finds."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "libcuda.so.1")
        self.library = ctypes.CDLL(self.path, mode=ctypes.RTLD_GLOBAL)
        for name, result, arguments in (
            ("fake_set", c_int32, [c_char_p, c_int64]),
            ("fake_reset", None, []),
            ("fake_counters_get", None, [ctypes.POINTER(Counters)]),
            ("fake_fail_at", None, [c_int64, c_int32]),
            ("fake_fail_call", None, [c_char_p, c_int64, c_int32]),
            ("fake_sticky", None, [c_int32]),
            ("fake_call_count", c_int64, [c_char_p]),
            ("fake_call_log", None, [c_char_p, c_int64]),
            ("fake_last_violation", None, [c_char_p, c_int64]),
            ("fake_hide", None, [c_char_p, c_int32]),
            ("fake_drain", None, []),
            ("fake_hold", None, [c_char_p]),
            ("fake_held", c_int32, []),
            ("fake_reset_calls", None, []),
            ("cuCtxSetCurrent", c_int32, [ctypes.c_void_p]),
        ):
            function = self.library[name]
            function.restype, function.argtypes = result, arguments
            setattr(self, f"_{name}", function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def set(self, **settings: int) -> None:
        for key, value in settings.items():
            if self._fake_set(key.encode(), value):
                raise KeyError(key)

    def reset(self) -> None:
        self._fake_reset()

    def reset_calls(self) -> None:
        """Forget the calls so far, but not the settings."""
        self._fake_reset_calls()

    def counters(self) -> dict[str, int]:
        out = Counters()
        self._fake_counters_get(ctypes.byref(out))
        return {name: getattr(out, name) for name, _ in Counters._fields_}

    def live(self) -> dict[str, int]:
        """Return what is open in the driver, without the primary contexts, which are kept."""
        found = self.counters()
        return {name: found[name] for name in LIVE if found[name]}

    def fail_at(self, n: int, code: int) -> None:
        self._fake_fail_at(n, code)

    def fail_call(self, name: str, code: int, nth: int = 1) -> None:
        self._fake_fail_call(name.encode(), nth, code)

    def sticky(self, code: int) -> None:
        self._fake_sticky(code)

    def count(self, name: str) -> int:
        return int(self._fake_call_count(name.encode()))

    def log(self) -> list[str]:
        out = ctypes.create_string_buffer(1 << 20)
        self._fake_call_log(out, len(out))
        return out.value.decode().split()

    def violation(self) -> str:
        out = ctypes.create_string_buffer(256)
        self._fake_last_violation(out, len(out))
        return out.value.decode()

    def hide(self, name: str, hidden: bool = True) -> None:
        self._fake_hide(name.encode(), hidden)

    def hold(self, name: str) -> None:
        """Make calls of this name wait in the driver; "": let them go."""
        self._fake_hold(name.encode())

    def wait_held(self, timeout: float = 20.0) -> None:
        """Wait until a call is held."""
        deadline = time.monotonic() + timeout
        while not self._fake_held():
            assert time.monotonic() < deadline, "no call came"
            os.sched_yield()

    def drain(self) -> None:
        self._fake_drain()
