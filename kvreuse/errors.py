"""Exceptions of kvreuse. Every error that the library raises on purpose is a `KVReuseError`."""

from __future__ import annotations

from typing import Any

__all__ = [
    "AttachRefusedError",
    "BusyError",
    "CorruptError",
    "DriverError",
    "ForkedError",
    "HandleClosedError",
    "IncompatibleError",
    "InvalidHandleError",
    "KVReuseError",
    "KVReuseWarning",
    "KeeperUnavailableError",
    "KindMismatchError",
    "NoSpaceError",
    "NotQuiescentError",
    "NotReadyError",
    "NotSupportedError",
    "OutOfMemoryError",
    "PermissionDeniedError",
    "ProfileError",
    "ProtocolError",
    "RangeError",
    "SizeMismatchError",
    "StaleBlockError",
    "StaleEpochError",
    "StaleHandleError",
    "SystemCallError",
    "TooManyFdsError",
    "WaitTimeoutError",
]


class KVReuseWarning(UserWarning):
    """Something works, but not as well as it could here; the text says what and why."""


class KVReuseError(Exception):
    """Base of all kvreuse errors.

    Attributes
    ----------
    status : int
        The `KVR_ERROR_...` number of include/kvreuse.h; 0 where no native call took part.
    name : str
        The status' name without its prefix, e.g. ``"SIZE_MISMATCH"``.
    call : str
        The backend function, system call or driver call that found it; ``""`` if none.
    native_source : str
        ``""``, ``"errno"`` or ``"cuda"``: what `native_code` is a number of.
    native_code : int
        The errno or CUresult behind the error, 0 if there is none.
    """

    status: int = 0
    name: str = ""
    call: str = ""
    native_source: str = ""
    native_code: int = 0

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args)
        for key, value in fields.items():
            setattr(self, key, value)
        if isinstance(self, OSError) and self.native_source == "errno":
            object.__setattr__(self, "errno", self.native_code)

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else self.__class__.__name__

    def __reduce__(self) -> Any:
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


def _rebuild(cls: type[KVReuseError], args: tuple[Any, ...], fields: dict[str, Any]) -> KVReuseError:
    return cls(*args, **fields)


class InvalidHandleError(KVReuseError):
    """The number is not a handle of the wanted sort in this process."""


class StaleHandleError(KVReuseError):
    """The handle was valid once, or names another region than it claims."""


class HandleClosedError(KVReuseError):
    """The object was closed before this call."""


class KindMismatchError(KVReuseError):
    """The handle kind is not the one that the call or the payload needs."""


class SizeMismatchError(KVReuseError):
    """The observed size does not fit the declared one."""


class RangeError(KVReuseError, ValueError):
    """A number is outside of its range; nothing is truncated or wrapped."""


class NotSupportedError(KVReuseError, NotImplementedError):
    """This build, kernel, driver or kind cannot do it; the text says which."""


class PermissionDeniedError(KVReuseError, PermissionError):
    """The kernel, the peer check or the access mode forbids it."""


class OutOfMemoryError(KVReuseError, MemoryError):
    """The system has no memory for it."""


class NoSpaceError(KVReuseError):
    """No room. For slots: `needed`, `free`, `evictable` (all counts of slots)."""

    needed: int = 0
    free: int = 0
    evictable: int = 0


class TooManyFdsError(KVReuseError):
    """The process has no free file descriptor. `needed`, `soft`, `hard` are counts."""

    needed: int = 0
    soft: int = 0
    hard: int = 0


class BusyError(KVReuseError):
    """Somebody still uses it; nothing changed. `count`: operations in flight that do; None if none of them does."""

    count: int | None = None


class NotQuiescentError(KVReuseError):
    """Native work is still outstanding; the memory is kept. `count`: operations that have not ended."""

    count: int | None = None


class NotReadyError(KVReuseError):
    """The part or group cannot serve now; the text says why."""


class IncompatibleError(KVReuseError):
    """Versions, manifests or providers differ. `fields`: {name: (expected, found)}."""

    fields: dict[str, tuple[Any, Any]]

    def __init__(self, *args: Any, **fields: Any) -> None:
        self.fields = {}
        super().__init__(*args, **fields)


class AttachRefusedError(KVReuseError):
    """The keeper refused the attach. `outcome` says why; `pid` is the holder's, if one is known."""

    outcome: Any = None
    pid: int | None = None


class KeeperUnavailableError(KVReuseError, ConnectionError):
    """No keeper answers on this socket."""


class StaleEpochError(KVReuseError):
    """This session has been replaced or its part retired."""


class StaleBlockError(KVReuseError):
    """The slot has another generation than the one carried."""


class CorruptError(KVReuseError):
    """A checksum does not match."""


class ProfileError(KVReuseError):
    """The profile is wrong, or does not allow this."""


class ProtocolError(KVReuseError):
    """A frame or its file descriptors are not what the protocol says."""

    expected: Any = None
    got: Any = None


class WaitTimeoutError(KVReuseError, TimeoutError):
    """A bounded wait ran out. `holder_pid` is set where a lock's holder is known."""

    holder_pid: int | None = None


class DriverError(KVReuseError):
    """The CUDA driver answered with an error; `native_code` is the CUresult."""


class SystemCallError(KVReuseError, OSError):
    """A system call failed; `errno` and `native_code` are its errno."""


class ForkedError(KVReuseError):
    """The object belongs to the parent process; a forked child may not use it."""
