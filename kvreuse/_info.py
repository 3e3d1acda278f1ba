"""backend_info(): what a bug report needs."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

from . import _ctypes_cuda, _select, _version


def get_include() -> str:
    """Return the folder of kvreuse.h, for C and Cython code that calls the native functions.

    Raises
    ------
    FileNotFoundError
        The install has no header.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "include", package.parent / "include"):  # installed; beside an editable tree
        if (folder / "kvreuse.h").is_file():
            return str(folder)
    raise FileNotFoundError(f"kvreuse.h is neither in {package / 'include'} nor in {package.parent / 'include'}")


def backend_info() -> dict[str, Any]:
    """Tell which backend runs, why, and what it can do.

    Returns
    -------
    dict
        backend : "core" or "fallback"; reason : why this one; version; abi_version : of the backend;
        features : {name: "on" or "off: REASON"}; extension_path : file of the backend module; python; libc; machine.
    """
    missing = _ctypes_cuda.missing_reason()
    cuda = f"off: {missing}" if missing else "on: Provider('cuda:N').capabilities() says what works"
    return {
        "backend": _select.backend_name,
        "reason": _select.reason,
        "version": _version.__version__,
        "abi_version": _select.backend.abi_version(),
        "features": {"host": "on", "posix_fd": "on", "cuda": cuda, "fabric": cuda},
        "extension_path": _select.module.__file__,
        "python": sys.version.split()[0],
        "libc": " ".join(platform.libc_ver()),
        "machine": platform.machine(),
    }
