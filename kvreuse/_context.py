"""The end of a `with`, once for all that is closed by it."""

from __future__ import annotations

from types import TracebackType

from .errors import KVReuseError


class Context:
    """What a `with` closes. A failure of that never hides the body's: it becomes a note of it."""

    def close(self) -> None:
        raise NotImplementedError

    def _end_context(self) -> None:
        self.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._end_context()
        except KVReuseError as second:
            if error is None:
                raise
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"closing the {type(self).__name__} failed too: {second}")
