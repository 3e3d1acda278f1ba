"""Which backend this process uses, and why. Decided once, at import, by KVREUSE_BACKEND=auto|core|fallback."""

from __future__ import annotations

import importlib
import os
import warnings
from types import ModuleType
from typing import cast

from . import _api
from .errors import KVReuseWarning

VARIABLE = "KVREUSE_BACKEND"
WORDS = ("auto", "core", "fallback")
_CORE = f"{__package__}._core"


def load(word: str) -> tuple[ModuleType, str, str]:
    """Load the backend that `word` asks for; return (module, name, reason).

    `auto` falls back only where the extension does not exist. One that exists but cannot be imported, or was built for
    another ABI, is an error: taking the fallback then would hide a broken install.

    Raises
    ------
    ImportError
        Unknown word; extension wanted and absent; extension of another ABI version, or with records of other sizes.
    """
    if word not in WORDS:
        raise ImportError(f"{VARIABLE}={word!r} is unknown: expected one of {', '.join(WORDS)}")
    if word == "fallback":
        return _check(importlib.import_module("._fallback", __package__)), "fallback", f"{VARIABLE}=fallback"
    try:
        core = importlib.import_module(_CORE)
    except ModuleNotFoundError as error:
        if error.name != _CORE:
            raise
        if word == "core":
            raise ImportError(
                f"{VARIABLE}=core, but the extension {_CORE} is not installed: build with KVREUSE_BUILD=native"
            ) from error
        fallback = _check(importlib.import_module("._fallback", __package__))
        _warn_on_gpu_machine()
        return fallback, "fallback", f"the extension {_CORE} is not installed"
    return _check(core), "core", f"{VARIABLE}={word}" if word == "core" else "the extension is installed"


def _check(module: ModuleType) -> ModuleType:
    found = module.abi_version()
    if found != _api.ABI_VERSION:
        raise ImportError(
            f"{module.__file__} has ABI version {found}, {__file__} needs {_api.ABI_VERSION}: "
            "they are of different installs; reinstall kvreuse"
        )
    sizes: dict[str, int] = getattr(module, "_struct_nbytes", dict)()
    if sizes != _api.STRUCT_NBYTES:
        wrong = [
            f"{name} of {sizes.get(name, 'no')} bytes, expected {_api.STRUCT_NBYTES.get(name, 'none')}"
            for name in sorted({*sizes, *_api.STRUCT_NBYTES})
            if sizes.get(name) != _api.STRUCT_NBYTES.get(name)
        ]
        raise ImportError(
            f"{module.__file__} (ABI version {found}) has {'; '.join(wrong)} in {__file__} (ABI version "
            f"{_api.ABI_VERSION}): they are of different installs; reinstall kvreuse"
        )
    return module


def _warn_on_gpu_machine() -> None:
    from . import _ctypes_cuda

    if not _ctypes_cuda.missing_reason():
        warnings.warn(
            "kvreuse uses its pure-Python fallback although this machine has a CUDA driver: "
            "install it with KVREUSE_BUILD=native for the compiled core",
            KVReuseWarning,
            stacklevel=2,
        )


module, backend_name, reason = load(os.environ.get(VARIABLE, "auto"))
backend = cast(_api.Backend, module)
