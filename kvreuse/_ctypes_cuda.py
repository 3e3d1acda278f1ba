"""What can be said of the CUDA driver library without using it. Nothing links to libcuda; it is opened on demand."""

from __future__ import annotations

import ctypes

LIBRARY = "libcuda.so.1"


def missing_reason() -> str:
    """Return "" where libcuda.so.1 can be loaded, else why not."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        return f"{LIBRARY} cannot be loaded: {error}"
    return ""
