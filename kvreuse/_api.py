"""The backend's functions, types and documentation, once. `_core` and `_fallback` both provide exactly these.

A backend is a flat set of functions over int64 handles. The meaning, owners, errors, thread rules and order of checks
of each stand in include/kvreuse.h under the same name with the prefix `kvr_`; here are the Python forms. Integer
arguments go through `_status.as_integer` (any `__index__`, no bool, no float; int32 and uint32 parameters are
range-checked to their width).

Buffers: "bytes buffer" is any C-contiguous buffer, read as unsigned bytes; "int64 array" is a C-contiguous 1-D buffer
of format ``q`` or ``l``; outputs must be writable. A wrong buffer is TypeError, a wrong length RangeError. `keys` is a
bytes buffer of ``count * key_stride`` bytes; `key_nbytes` is None (all keys have key_stride bytes) or a bytes buffer of
`count`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from .errors import KVReuseError

ABI_VERSION = 1  # KVR_ABI_VERSION
# Bytes of the header's records. A backend's `_struct_nbytes()` says what it was built with; _select compares.
STRUCT_NBYTES = {
    "kvr_error": 104,
    "kvr_region_info": 80,
    "kvr_mapping_info": 40,
    "kvr_observation": 80,
    "kvr_cuda_info": 40,
    "kvr_cuda_observation": 112,
    "kvr_handle_counts": 40,
    "kvr_superblock": 256,
    "kvr_words": 4096,
    "kvr_record": 64,
    "kvr_link": 16,
    "kvr_row_header": 64,
    "kvr_table_layout": 64,
    "kvr_table_info": 104,
    "kvr_table_stats": 136,
    "kvr_restore_result": 32,
    "kvr_memory": 40,
    "kvr_segment": 72,
    "kvr_dependency": 24,
    "kvr_queue_info": 72,
    "kvr_operation_info": 64,
    "kvr_copy_counts": 56,
}


class HandleCounts(NamedTuple):
    """Open handles of this process and the fds that they own (kvr_handle_counts)."""

    regions: int
    mappings: int
    locks: int
    tables: int
    fds: int


class RegionInfo(NamedTuple):
    """What is kept about a region (kvr_region_info)."""

    handle: int
    nbytes: int
    physical_nbytes: int
    kind: int
    access: int
    origin: int
    mapping_count: int
    device: int
    inode: int
    region_id: bytes
    provider: int
    fabric_count: int


class MappingInfo(NamedTuple):
    """What is kept about a mapping (kvr_mapping_info)."""

    handle: int
    region: int
    address: int
    nbytes: int
    access: int
    use_count: int


class HostObservation(NamedTuple):
    """What the kernel says of a host region now (kvr_observation); -1 where it cannot say."""

    file_nbytes: int
    allocated_nbytes: int
    device: int
    inode: int
    file_mode: int
    seals: int
    access: int
    page_nbytes: int
    block_nbytes: int


class CudaInfo(NamedTuple):
    """A CUDA device and its driver, as the driver reports them (kvr_cuda_info)."""

    ordinal: int
    driver_version: int
    vmm: int
    posix_fd: int
    fabric: int
    features: int
    uuid: bytes


class CudaObservation(NamedTuple):
    """What the driver says of a region now (kvr_cuda_observation); -1 where it cannot say."""

    handle_types: int
    allocation_type: int
    location_type: int
    location_id: int
    granularity_min: int
    granularity_recommended: int
    mapped_nbytes: int
    reserved_nbytes: int
    allowed_handle_types: int
    access: int
    mapped_base: int
    properties_result: int
    granularity_result: int
    range_result: int
    reservation_result: int
    allowed_result: int
    access_result: int


class TableLayout(NamedTuple):
    """Where things lie in a part's memory, in bytes (kvr_table_layout)."""

    table_nbytes: int
    claims_nbytes: int
    record_offset_bytes: int
    link_offset_bytes: int
    bucket_offset_bytes: int
    bucket_count: int
    row_nbytes: int


class TableInfo(NamedTuple):
    """What a part is (kvr_table_info)."""

    part_id: bytes
    slot_count: int
    block_nbytes: int
    region_count: int
    slots_per_region: int
    manifest_nbytes: int
    session: int
    role: int
    row: int
    operation_count: int
    content_epoch: int
    heartbeat_ns: int
    capacity: int


class TableStats(NamedTuple):
    """Counts and words of a part (kvr_table_stats)."""

    state: int
    content_epoch: int
    writer_session: int
    dirty: int
    slot_count: int
    free_count: int
    writing_count: int
    sealed_count: int
    stale_count: int
    claimed_count: int
    stored_total: int
    evicted_total: int
    replaced_total: int
    cleared_total: int
    corrupt_total: int
    freed_total: int
    owned_count: int


class RestoreResult(NamedTuple):
    """What a restore found (kvr_restore_result), in slots."""

    sealed_count: int
    bad_count: int
    freed_count: int


class QueueInfo(NamedTuple):
    """What is kept about a queue of copies (kvr_queue_info)."""

    handle: int
    fd: int
    thread_count: int
    submitted: int
    done: int
    failed: int
    cancelled: int
    queued: int
    running: int
    is_closing: int
    paused: int


class OperationInfo(NamedTuple):
    """How an operation stands (kvr_operation_info)."""

    handle: int
    queue: int
    state: int
    quarantine: int
    entry_count: int
    total_nbytes: int
    moved_nbytes: int
    failed_index: int
    quarantine_ns: int


class CopyCounts(NamedTuple):
    """Copies of this process (kvr_copy_counts)."""

    queues: int
    operations: int
    in_flight: int
    quarantined: int
    quarantine_nbytes: int
    quarantine_limit: int
    fds: int


class Backend(Protocol):
    """The functions of a backend module."""

    def abi_version(self) -> int: ...
    def echo(self, value: Any) -> int: ...
    def crc32c(self, data: Any, value: Any = 0) -> int:
        """CRC32C of a bytes buffer, going on from `value` (0 to 2^32-1)."""
        ...

    def handle_counts(self) -> HandleCounts: ...
    def host_allocate(self, nbytes: Any, kind: Any, name: str, directory: str | None) -> RegionInfo: ...
    def region_info(self, region: Any) -> RegionInfo: ...
    def region_export(self, region: Any) -> int: ...
    def region_import(
        self,
        fd: Any,
        nbytes: Any,
        physical_nbytes: Any,
        region_id: bytes,
        device: Any,
        inode: Any,
        flags: Any,
    ) -> RegionInfo:
        """`region_id` is exactly 16 bytes; device and inode are 0 to 2^64-1."""
        ...

    def region_observe(self, region: Any) -> HostObservation: ...
    def region_placement(self, region: Any, nodes: Any) -> int:
        """`nodes` is an int64 array of the capacity; returns how many entries were written."""
        ...

    def region_map(self, region: Any, access: Any, flags: Any) -> MappingInfo: ...
    def region_close(self, region: Any) -> None: ...
    def mapping_info(self, mapping: Any) -> MappingInfo: ...
    def mapping_buffer(self, mapping: Any) -> Any:
        """Give an object that exports the mapping as a 1-D buffer of format "B" (read-only if the mapping is).

        Only in Python. Each buffer taken from it is a use: the mapping cannot be unmapped until all are released.
        After the unmap, taking a buffer raises StaleHandleError (core) or ValueError (fallback: a closed mmap).
        """
        ...

    def mapping_dlpack(self, mapping: Any, device_type: Any, device_id: Any, is_versioned: Any) -> Any:
        """Give a DLPack capsule of the mapping as 1-D uint8, of DLPack 1.0 if `is_versioned`.

        Only in Python. It is a use of the mapping until its deleter has run.
        """
        ...

    def mapping_use(self, mapping: Any, delta: Any) -> None: ...
    def mapping_unmap(self, mapping: Any) -> None: ...
    def cuda_info(self, ordinal: Any) -> CudaInfo: ...
    def cuda_allocate(self, ordinal: Any, nbytes: Any, kind: Any, flags: Any) -> RegionInfo: ...
    def cuda_import(
        self,
        ordinal: Any,
        kind: Any,
        fd: Any,
        fabric: bytes,
        nbytes: Any,
        physical_nbytes: Any,
        region_id: bytes,
    ) -> RegionInfo:
        """`fabric` is exactly 64 bytes, whatever the kind; `region_id` exactly 16."""
        ...

    def cuda_export_fabric(self, region: Any) -> bytes:
        """Return 64 bytes."""
        ...

    def cuda_fabric_done(self, region: Any) -> None: ...
    def cuda_observe(self, region: Any) -> CudaObservation: ...
    def table_layout(self, slot_count: Any, manifest_nbytes: Any) -> TableLayout: ...
    def table_create(
        self,
        table_region: Any,
        claims_region: Any,
        part_id: bytes,
        slot_count: Any,
        block_nbytes: Any,
        region_count: Any,
        manifest: Any,
    ) -> None:
        """`part_id` is exactly 16 bytes; `manifest` a bytes buffer."""
        ...

    def table_open(
        self,
        table_region: Any,
        claims_region: Any,
        lock_fd: Any,
        role: Any,
        session: Any,
        row: Any,
        lock_wait_ns: Any,
    ) -> int: ...
    def table_close(self, table: Any) -> None: ...
    def table_info(self, table: Any) -> TableInfo: ...
    def table_manifest(self, table: Any) -> bytes: ...
    def table_bind(self, table: Any, index: Any, mapping: Any) -> None: ...
    def table_set_state(self, table: Any, state: Any) -> None: ...
    def table_set_unready(self, table: Any, unready: Any) -> None: ...
    def table_set_capacity(self, table: Any, capacity: Any) -> None: ...
    def table_beat(self, table: Any, period_ns: Any) -> None: ...
    def table_admit(self, table: Any, row: Any, session: Any, role: Any) -> None: ...
    def table_drop(self, table: Any, row: Any, session: Any) -> None: ...
    def table_recover(self, table: Any) -> int: ...
    def table_restore(self, table: Any) -> RestoreResult: ...
    def table_reset(self, table: Any) -> None: ...
    def table_expire(self, table: Any) -> int: ...
    def table_match(self, table: Any, keys: Any, key_stride: Any, key_nbytes: Any) -> int: ...
    def table_lookup(
        self, table: Any, keys: Any, key_stride: Any, key_nbytes: Any, slots: Any, generations: Any
    ) -> None:
        """`slots` and `generations` are int64 arrays of `count`, written."""
        ...

    def table_claim(self, table: Any, keys: Any, key_stride: Any, key_nbytes: Any, slots: Any, generations: Any) -> int:
        """`slots` and `generations` are int64 arrays of `count`; the first n entries are written, n returned."""
        ...

    def table_claim_slots(self, table: Any, slots: Any, generations: Any) -> None: ...
    def table_release(self, table: Any, slots: Any) -> None: ...
    def table_touch(self, table: Any, keys: Any, key_stride: Any, key_nbytes: Any) -> int: ...
    def table_reserve(
        self,
        table: Any,
        keys: Any,
        key_stride: Any,
        key_nbytes: Any,
        named_slots: Any,
        flags: Any,
        slots: Any,
        generations: Any,
        evicted_keys: Any,
        evicted_key_nbytes: Any,
    ) -> int:
        """`named_slots` is None or an int64 array of `count`; `evicted_keys` has 32 bytes each; returns how many."""
        ...

    def table_commit(self, table: Any, slots: Any, generations: Any, flags: Any) -> None: ...
    def table_abort(self, table: Any, slots: Any, generations: Any) -> int: ...
    def table_evict(self, table: Any, evict_count: Any, keys: Any, key_stride: Any, key_nbytes: Any) -> int: ...
    def table_clear(self, table: Any) -> tuple[int, int]:
        """Return (removed, kept)."""
        ...

    def table_verify(self, table: Any, slots: Any, verdicts: Any) -> None:
        """`verdicts` is a writable bytes buffer of `count`."""
        ...

    def table_invalidate(self, table: Any, slots: Any, generations: Any) -> int: ...
    def table_inventory(
        self, table: Any, first_slot: Any, slots: Any, generations: Any, keys: Any, key_nbytes: Any
    ) -> tuple[int, int]:
        """`slots`, `generations` are int64 arrays of the capacity, `keys` has 32 bytes each; returns (count, next)."""
        ...

    def table_stats(self, table: Any) -> TableStats: ...
    def queue_open(self, thread_count: Any, flags: Any) -> int: ...
    def queue_drain(self, queue: Any, wait_ns: Any) -> bool:
        """Return whether all have ended."""
        ...

    def queue_close(self, queue: Any, wait_ns: Any) -> None: ...
    def queue_info(self, queue: Any) -> QueueInfo: ...
    def queue_completed(self, queue: Any, operations: Any) -> int:
        """`operations` is an int64 array of the capacity; returns how many entries were written."""
        ...

    def queue_fault(self, queue: Any, fault: Any, index: Any, value: Any) -> None: ...
    def queue_resume(self, queue: Any) -> None: ...
    def copy_submit(
        self,
        queue: Any,
        destination: Any,
        source: Any,
        destination_offsets: Any,
        source_offsets: Any,
        lengths: Any,
        after: Any,
    ) -> int:
        """All are int64 arrays: a kvr_memory of 5 words twice, three of `count`, and `after`, 3 words a dependency.

        An address above 2^63 is its word of equal bits. Foreign memory must stay until the operation has ended.
        """
        ...

    def copy_slots(
        self,
        queue: Any,
        table: Any,
        direction: Any,
        mappings: Any,
        slots: Any,
        generations: Any,
        engine_blocks: Any,
        segments: Any,
        flags: Any,
        after: Any,
    ) -> int:
        """Arrays are of int64: `segments` has the 9 words of a kvr_segment each, `after` as in copy_submit."""
        ...

    def operation_info(self, operation: Any) -> OperationInfo: ...
    def operation_error(self, operation: Any) -> KVReuseError | None:
        """Return the exception of a FAILED or CANCELLED operation; made anew each time."""
        ...

    def operation_wait(self, operation: Any, wait_ns: Any) -> bool:
        """Return whether it has ended."""
        ...

    def operation_cancel(self, operation: Any) -> None: ...
    def operation_release(self, operation: Any) -> None: ...
    def operation_abandon(self, operation: Any) -> None: ...
    def quarantine(self, operations: Any) -> int:
        """`operations` is an int64 array of the capacity; returns how many there are, written or not."""
        ...

    def quarantine_limit_set(self, limit_nbytes: Any) -> None: ...
    def copy_counts(self) -> CopyCounts: ...


# Names that have no C twin, with the reason.
PYTHON_ONLY = {
    "mapping_buffer": "before Python 3.12 a buffer must come from a C type",
    "mapping_dlpack": "a capsule is a Python object",
}
# C names whose Python form drops the suffix `_get` (a C function may not share its struct's name).
FUNCTIONS: tuple[str, ...] = tuple(name for name in vars(Backend) if not name.startswith("_"))
