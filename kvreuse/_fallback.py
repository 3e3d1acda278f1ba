"""The backend in Python: the functions of `_api.Backend`, with the meaning, errors and shared bytes of the core.

Slower than the core, and for machines without a compiler. Its docs are those of _api.py and include/kvreuse.h.
"""

from __future__ import annotations

from typing import Any

from . import _api, _status
from . import _ctypes_structs as c
from . import _fallback_host as _host
from . import _fallback_part as _part
from ._fallback_copies import (
    copy_counts,
    copy_slots,
    copy_submit,
    operation_abandon,
    operation_cancel,
    operation_error,
    operation_info,
    operation_release,
    operation_wait,
    quarantine,
    quarantine_limit_set,
    queue_close,
    queue_completed,
    queue_drain,
    queue_fault,
    queue_info,
    queue_open,
    queue_resume,
)
from ._fallback_cuda import (
    cuda_allocate,
    cuda_export_fabric,
    cuda_fabric_done,
    cuda_import,
    cuda_info,
    cuda_observe,
)
from ._fallback_host import (
    crc32c,
    host_allocate,
    mapping_buffer,
    mapping_dlpack,
    mapping_info,
    mapping_unmap,
    mapping_use,
    region_close,
    region_export,
    region_import,
    region_info,
    region_map,
    region_observe,
    region_placement,
)
from ._fallback_table import (
    table_abort,
    table_admit,
    table_beat,
    table_bind,
    table_claim,
    table_claim_slots,
    table_clear,
    table_close,
    table_commit,
    table_create,
    table_drop,
    table_evict,
    table_expire,
    table_info,
    table_invalidate,
    table_inventory,
    table_layout,
    table_lookup,
    table_manifest,
    table_match,
    table_open,
    table_recover,
    table_release,
    table_reserve,
    table_reset,
    table_restore,
    table_set_capacity,
    table_set_state,
    table_set_unready,
    table_stats,
    table_touch,
    table_verify,
)

__all__ = [
    "abi_version",
    "copy_counts",
    "copy_slots",
    "copy_submit",
    "crc32c",
    "cuda_allocate",
    "cuda_export_fabric",
    "cuda_fabric_done",
    "cuda_import",
    "cuda_info",
    "cuda_observe",
    "echo",
    "handle_counts",
    "host_allocate",
    "mapping_buffer",
    "mapping_dlpack",
    "mapping_info",
    "mapping_unmap",
    "mapping_use",
    "operation_abandon",
    "operation_cancel",
    "operation_error",
    "operation_info",
    "operation_release",
    "operation_wait",
    "quarantine",
    "quarantine_limit_set",
    "queue_close",
    "queue_completed",
    "queue_drain",
    "queue_fault",
    "queue_info",
    "queue_open",
    "queue_resume",
    "region_close",
    "region_export",
    "region_import",
    "region_info",
    "region_map",
    "region_observe",
    "region_placement",
    "table_abort",
    "table_admit",
    "table_beat",
    "table_bind",
    "table_claim",
    "table_claim_slots",
    "table_clear",
    "table_close",
    "table_commit",
    "table_create",
    "table_drop",
    "table_evict",
    "table_expire",
    "table_info",
    "table_invalidate",
    "table_inventory",
    "table_layout",
    "table_lookup",
    "table_manifest",
    "table_match",
    "table_open",
    "table_recover",
    "table_release",
    "table_reserve",
    "table_reset",
    "table_restore",
    "table_set_capacity",
    "table_set_state",
    "table_set_unready",
    "table_stats",
    "table_touch",
    "table_verify",
]


def _struct_nbytes() -> dict[str, int]:
    return c.struct_nbytes()


def abi_version() -> int:
    return c.KVR_ABI_VERSION


def echo(value: Any) -> int:
    return _status.as_integer(value, "value")


def handle_counts() -> _api.HandleCounts:
    with _host.lock:
        counts = _host.counts()
        regions = counts[c.KVR_SORT_REGION]
        # A mapping holds one fd more where this Python's mmap dups it: the core's do not.
        fds = _host.region_fds() + _host.buffer_fds() + _part.lock_fds()
        return _api.HandleCounts(regions, counts[c.KVR_SORT_MAPPING], _part.lock_count(), counts[c.KVR_SORT_TABLE], fds)
