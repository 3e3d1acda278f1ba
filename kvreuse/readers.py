"""Another process's part, for reading (S4): its table, a claims row of its own, its data where that is asked for."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ._api import TableStats
from ._context import Context
from ._select import backend as _backend
from .errors import KVReuseError, NotSupportedError
from .handles import IMPORT_ALLOW_UNSEALED, MAP_DONTFORK, Access
from .parts import PackedKeys

if TYPE_CHECKING:
    from .keeper.client import Attachment

Int64Array = npt.NDArray[np.int64]
ROLE_READER = 1


class PartReader(Context):
    """A reader's session of one rank's part. Made by Group; what its calls raise is in Part's docstrings.

    Attributes
    ----------
    part_id : bytes
    epoch : int
        The content epoch that its Group has checked.
    """

    def __init__(self, attachment: Attachment) -> None:
        """Take over the attachment's fds, in every case."""
        self._attachment = attachment
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._table = 0
        self._regions: list[int] = []
        self._mappings: list[int] = []
        self._exporters: list[Any] = []
        self.part_id = attachment.part_id
        self.block_bytes = attachment.block_bytes
        self.reuse_enabled = attachment.reuse_enabled
        self.epoch = 0
        try:
            self._open(attachment)
        except BaseException:
            with contextlib.suppress(KVReuseError):  # the first error is the one to tell
                self.close()
            raise

    def _open(self, attachment: Attachment) -> None:
        fds = [attachment.table_fd, attachment.claims_fd, *attachment.data_fds]
        lock_fd = attachment.lock_fd
        try:
            for fd, record in zip(fds, attachment.records, strict=True):
                nbytes, physical_nbytes, region_id, device, inode, unsealed = record
                flags = IMPORT_ALLOW_UNSEALED if unsealed else 0
                info = _backend.region_import(fd, nbytes, physical_nbytes, region_id, device, inode, flags)
                self._regions.append(info.handle)
            self._table = _backend.table_open(
                self._regions[0],
                self._regions[1],
                lock_fd,
                ROLE_READER,
                attachment.session,
                attachment.row,
                attachment.lock_wait_ns,
            )
            lock_fd = -1  # consumed
            table = _backend.table_info(self._table)
            self.epoch = table.content_epoch
            self._slots_per_region = table.slots_per_region
        finally:
            for fd in (*fds, lock_fd):
                if fd >= 0:
                    with contextlib.suppress(OSError):
                        os.close(fd)

    def content_epoch(self) -> int:
        """Read the epoch: it moves when the part is emptied."""
        return int(_backend.table_info(self._table).content_epoch)

    def match(self, packed: PackedKeys) -> int:
        return int(_backend.table_match(self._table, packed.data, packed.stride, packed.nbytes))

    def claim(self, packed: PackedKeys) -> tuple[Int64Array, Int64Array]:
        """Claim the leading keys that are present: (slots, generations)."""
        slots, generations = np.empty(packed.count, np.int64), np.empty(packed.count, np.int64)
        count = _backend.table_claim(self._table, packed.data, packed.stride, packed.nbytes, slots, generations)
        return slots[:count], generations[:count]

    def release(self, slots: Int64Array) -> None:
        if len(slots):
            _backend.table_release(self._table, np.ascontiguousarray(slots))

    def touch(self, packed: PackedKeys) -> int:
        return int(_backend.table_touch(self._table, packed.data, packed.stride, packed.nbytes))

    def stats(self) -> TableStats:
        return _backend.table_stats(self._table)

    def view(self, slot: int) -> memoryview:
        """Give the read-only bytes of a slot; a numpy array made of it keeps the part's memory from being closed."""
        with self._lock:
            if not self._exporters:
                if len(self._regions) < 3:
                    raise NotSupportedError(
                        "the group was opened without its data: use Keeper.group(..., read_data=True)",
                        status=-7,
                        name="NOT_SUPPORTED",
                    )
                for region in self._regions[2:]:
                    mapped = _backend.region_map(region, int(Access.READ), MAP_DONTFORK)
                    self._mappings.append(mapped.handle)
                    self._exporters.append(_backend.mapping_buffer(mapped.handle))
        region, index = divmod(slot, self._slots_per_region)
        offset = index * self.block_bytes
        return memoryview(self._exporters[region])[offset : offset + self.block_bytes].toreadonly()

    def close(self) -> None:
        """Say goodbye: its claims go. Raises BusyError while a view is used; closing again goes on from there."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._exporters.clear()
            if self._table:
                _backend.table_close(self._table)
                self._table = 0
            while self._mappings:
                _backend.mapping_unmap(self._mappings[-1])
                self._mappings.pop()
            while self._regions:
                _backend.region_close(self._regions[-1])
                self._regions.pop()
        with contextlib.suppress(KVReuseError):
            # The keeper may be gone; it learns of the end from the process then.
            self._attachment.keeper._goodbye(self.part_id, self._attachment.session)


__all__ = ["PartReader"]
