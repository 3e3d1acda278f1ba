"""Constants and structs of include/kvreuse.h, for Python. tests/lockstep compares every one with the header."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_uint8, c_uint32, c_uint64

KVR_ABI_VERSION = 1
KVR_OK = 0
KVR_PENDING = 1
KVR_ERROR_INVALID_HANDLE = -1
KVR_ERROR_STALE_HANDLE = -2
KVR_ERROR_HANDLE_CLOSED = -3
KVR_ERROR_KIND_MISMATCH = -4
KVR_ERROR_SIZE_MISMATCH = -5
KVR_ERROR_RANGE = -6
KVR_ERROR_NOT_SUPPORTED = -7
KVR_ERROR_PERMISSION_DENIED = -8
KVR_ERROR_OUT_OF_MEMORY = -9
KVR_ERROR_NO_SPACE = -10
KVR_ERROR_TOO_MANY_FDS = -11
KVR_ERROR_BUSY = -12
KVR_ERROR_NOT_QUIESCENT = -13
KVR_ERROR_NOT_READY = -14
KVR_ERROR_INCOMPATIBLE = -15
KVR_ERROR_ATTACH_REFUSED = -16
KVR_ERROR_KEEPER_UNAVAILABLE = -17
KVR_ERROR_STALE_EPOCH = -18
KVR_ERROR_STALE_BLOCK = -19
KVR_ERROR_CORRUPT = -20
KVR_ERROR_PROFILE = -21
KVR_ERROR_PROTOCOL = -22
KVR_ERROR_WAIT_TIMEOUT = -23
KVR_ERROR_DRIVER = -24
KVR_ERROR_SYSTEM_CALL = -25
KVR_ERROR_FORKED = -26
KVR_DETAIL_NONE = 0
KVR_DETAIL_SYSTEM_CALL = 1
KVR_DETAIL_NBYTES_RANGE = 2
KVR_DETAIL_HANDLE_NOT_POSITIVE = 3
KVR_DETAIL_HANDLE_UNKNOWN = 4
KVR_DETAIL_HANDLE_STALE = 5
KVR_DETAIL_HANDLE_SORT = 6
KVR_DETAIL_KIND_UNKNOWN = 7
KVR_DETAIL_KIND_NOT_ALLOCATABLE = 8
KVR_DETAIL_KIND_NOT_EXPORTABLE = 9
KVR_DETAIL_ACCESS_UNKNOWN = 10
KVR_DETAIL_ACCESS_READ_ONLY = 11
KVR_DETAIL_FLAGS_UNKNOWN = 12
KVR_DETAIL_REGION_MAPPED = 13
KVR_DETAIL_MAPPING_IN_USE = 14
KVR_DETAIL_IMPORT_SIZE = 15
KVR_DETAIL_IMPORT_NBYTES = 16
KVR_DETAIL_IMPORT_SEALS = 17
KVR_DETAIL_IMPORT_INODE = 18
KVR_DETAIL_FD_NOT_MEMORY = 19
KVR_DETAIL_FD_NEGATIVE = 20
KVR_DETAIL_NAME_TOO_LONG = 21
KVR_DETAIL_FORKED = 22
KVR_DETAIL_HANDLES_EXHAUSTED = 23
KVR_DETAIL_SLOT_COUNT_RANGE = 24
KVR_DETAIL_BLOCK_NBYTES_RANGE = 25
KVR_DETAIL_REGION_COUNT_RANGE = 26
KVR_DETAIL_MANIFEST_NBYTES_RANGE = 27
KVR_DETAIL_TABLE_NBYTES = 28
KVR_DETAIL_TABLE_MAGIC = 29
KVR_DETAIL_TABLE_VERSION = 30
KVR_DETAIL_TABLE_SUPERBLOCK_CRC = 31
KVR_DETAIL_TABLE_GEOMETRY = 32
KVR_DETAIL_TABLE_MANIFEST_CRC = 33
KVR_DETAIL_ROLE_UNKNOWN = 34
KVR_DETAIL_ROLE_FORBIDS = 35
KVR_DETAIL_ROW_RANGE = 36
KVR_DETAIL_SESSION_RANGE = 37
KVR_DETAIL_SESSION_FENCED = 38
KVR_DETAIL_PART_RETIRED = 39
KVR_DETAIL_PART_NOT_SEALED = 40
KVR_DETAIL_PART_DIRTY = 41
KVR_DETAIL_LOCK_TIMEOUT = 42
KVR_DETAIL_KEY_NBYTES = 43
KVR_DETAIL_KEY_STRIDE = 44
KVR_DETAIL_COUNT_RANGE = 45
KVR_DETAIL_SLOT_RANGE = 46
KVR_DETAIL_SLOT_REPEATED = 47
KVR_DETAIL_SLOT_BUSY = 48
KVR_DETAIL_KEY_RESERVED = 49
KVR_DETAIL_NO_FREE_SLOT = 50
KVR_DETAIL_GENERATION = 51
KVR_DETAIL_SLOT_STATE = 52
KVR_DETAIL_NOT_CLAIMED = 53
KVR_DETAIL_CLAIMS_FULL = 54
KVR_DETAIL_DATA_NOT_BOUND = 55
KVR_DETAIL_REGION_INDEX_RANGE = 56
KVR_DETAIL_REGION_BIND_NBYTES = 57
KVR_DETAIL_STATE_RANGE = 58
KVR_DETAIL_TABLE_SEALED = 59
KVR_DETAIL_LAYOUT_NBYTES = 60
KVR_DETAIL_LOCK_IN_USE = 61
KVR_DETAIL_DRIVER_CALL = 62
KVR_DETAIL_DRIVER_MISSING = 63
KVR_DETAIL_DRIVER_ENTRY = 64
KVR_DETAIL_ORDINAL_RANGE = 65
KVR_DETAIL_DEVICE_LACKS_VMM = 66
KVR_DETAIL_FABRIC_NOT_ALLOWED = 67
KVR_DETAIL_FABRIC_GIVEN_OUT = 68
KVR_DETAIL_HANDLE_IN_CALL = 69
KVR_DETAIL_PROVIDER = 70
KVR_DETAIL_CUDA_GRANULARITY = 71
KVR_DETAIL_CUDA_MAPPED_NBYTES = 72
KVR_DETAIL_CUDA_MAP_REFUSED = 73
KVR_DETAIL_CUDA_HANDLE_TYPES = 74
KVR_DETAIL_CUDA_LOCATION = 75
KVR_DETAIL_IMPORT_PHYSICAL = 76
KVR_DETAIL_NO_HOST_ADDRESS = 77
KVR_SORT_REGION = 1
KVR_SORT_MAPPING = 2
KVR_SORT_LOCK = 3
KVR_SORT_TABLE = 4
KVR_KIND_NONE = 0
KVR_KIND_POSIX_FD = 1
KVR_KIND_FABRIC = 8
KVR_ACCESS_NONE = 0
KVR_ACCESS_READ = 1
KVR_ACCESS_READ_WRITE = 3
KVR_NATIVE_NONE = 0
KVR_NATIVE_ERRNO = 1
KVR_NATIVE_CUDA = 2
KVR_ORIGIN_ALLOCATED = 1
KVR_ORIGIN_IMPORTED = 2
KVR_MAP_DONTFORK = 1
KVR_IMPORT_ALLOW_UNSEALED = 1
KVR_CLOSE_WAIT_NS = 1000000000
KVR_REGION_NAME_NBYTES = 200
KVR_REGION_ID_NBYTES = 16
KVR_PLACEMENT_COUNT_MAX = 1024
KVR_PROVIDER_HOST = -1
KVR_ORDINAL_COUNT_MAX = 64
KVR_FABRIC_NBYTES = 64
KVR_CUDA_ALLOW_FABRIC = 1
KVR_CUDA_HAS_BATCH_COPY = 1
KVR_CUDA_HAS_STREAM_QUERY = 2
KVR_CUDA_HAS_ADDRESS_RANGE_HANDLE = 4
KVR_TABLE_MAGIC = 0x314553554552564B
KVR_TABLE_VERSION = 1
KVR_KEY_NBYTES = 32
KVR_ROW_COUNT = 64
KVR_WORDS_OFFSET_BYTES = 4096
KVR_MANIFEST_OFFSET_BYTES = 8192
KVR_MANIFEST_NBYTES_MAX = 1048576
KVR_SLOT_COUNT_MAX = 1073741824
KVR_REGION_COUNT_MAX = 4096
KVR_NBYTES_MAX = 0x3FFFFFFFFFFFFFFF
KVR_CLAIM_COUNT_BITS = 20
KVR_CLAIM_COUNT_MAX = 1048575
KVR_BATCH_COUNT_MAX = 16777216
KVR_SLOT_FREE = 0
KVR_SLOT_WRITING = 1
KVR_SLOT_SEALED = 2
KVR_RECORD_HAS_DATA_CRC = 1
KVR_PART_CREATING = 0
KVR_PART_LAYOUT_SEALED = 1
KVR_PART_RETIRED = 2
KVR_ROLE_READER = 1
KVR_ROLE_WRITER = 2
KVR_ROLE_KEEPER = 3
KVR_RESERVE_EVICT = 1
KVR_RESERVE_DUPLICATE = 2
KVR_COMMIT_CHECKSUM = 1
KVR_WRITER_SESSION_NONE = 0
KVR_DETAIL_THREAD_COUNT_RANGE = 78
KVR_DETAIL_COPY_DST_RANGE = 79
KVR_DETAIL_COPY_SRC_RANGE = 80
KVR_DETAIL_COPY_OVERLAP = 81
KVR_DETAIL_COPY_CROSS_OVERLAP = 82
KVR_DETAIL_COPY_READ_ONLY = 83
KVR_DETAIL_QUEUE_CLOSING = 84
KVR_DETAIL_QUEUE_NOT_QUIESCENT = 85
KVR_DETAIL_OPERATION_RUNNING = 86
KVR_DETAIL_AFTER_KIND = 87
KVR_DETAIL_AFTER_FAILED = 88
KVR_DETAIL_QUARANTINE_FULL = 89
KVR_DETAIL_MAPPING_IN_FLIGHT = 90
KVR_DETAIL_SLOT_IN_FLIGHT = 91
KVR_DETAIL_SLOT_SPOILED = 92
KVR_DETAIL_TABLE_IN_FLIGHT = 93
KVR_DETAIL_COPY_SHORT = 94
KVR_DETAIL_BLOCK_CRC = 95
KVR_DETAIL_SLOT_GIVEN_UP = 96
KVR_DETAIL_NOT_QUARANTINED = 97
KVR_DETAIL_NO_FAULTS = 98
KVR_DETAIL_FAULT_UNKNOWN = 99
KVR_DETAIL_OPERATION_ABANDONED = 100
KVR_DETAIL_SEGMENT_RANGE = 101
KVR_DETAIL_ENGINE_BLOCK_RANGE = 102
KVR_DETAIL_DIRECTION_UNKNOWN = 103
KVR_DETAIL_OPERATION_CANCELLED = 104
KVR_DETAIL_STRIDE_RANGE = 105
KVR_DETAIL_ADDRESS_RANGE = 106
KVR_DETAIL_CONTENT_EPOCH = 107
KVR_DETAIL_PART_UNREADY = 108
KVR_DETAIL_PERIOD_RANGE = 109
KVR_DETAIL_HEARTBEAT_RUNS = 110
KVR_BEAT_MIN_NS = 1000000
KVR_BEAT_MAX_NS = 3600000000000
KVR_SORT_QUEUE = 5
KVR_SORT_OPERATION = 6
KVR_THREAD_COUNT_MAX = 64
KVR_QUEUE_FAULTS = 1
KVR_COPY_INLINE_NBYTES = 65536
KVR_OPERATION_QUEUED = 0
KVR_OPERATION_RUNNING = 1
KVR_OPERATION_DONE = 2
KVR_OPERATION_FAILED = 3
KVR_OPERATION_CANCELLED = 4
KVR_DIRECTION_IN = 1
KVR_DIRECTION_OUT = 2
KVR_SLOTS_COMMIT = 1
KVR_SLOTS_CHECKSUM = 2
KVR_SLOTS_VERIFY = 4
KVR_AFTER_FD = 1
KVR_AFTER_OPERATION = 2
KVR_AFTER_CUDA_EVENT = 3
KVR_QUARANTINE_CLOSE = 1
KVR_QUARANTINE_DRIVER = 2
KVR_FAULT_NONE = 0
KVR_FAULT_PAUSE = 1
KVR_FAULT_ERRNO = 2
KVR_FAULT_SHORT = 3
KVR_FAULT_SUBMIT = 4


class kvr_error(ctypes.Structure):
    _fields_ = [
        ("status", c_int32),
        ("detail", c_int32),
        ("native_source", c_int32),
        ("reserved0", c_int32),
        ("native_code", c_int64),
        ("values", c_int64 * 4),
        ("call", ctypes.c_char * 48),
    ]


class kvr_region_info(ctypes.Structure):
    _fields_ = [
        ("handle", c_int64),
        ("nbytes", c_int64),
        ("physical_nbytes", c_int64),
        ("kind", c_int32),
        ("access", c_int32),
        ("origin", c_int32),
        ("mapping_count", c_int32),
        ("device", c_uint64),
        ("inode", c_uint64),
        ("region_id", c_uint8 * 16),
        ("provider", c_int32),
        ("fabric_count", c_int32),
    ]


class kvr_mapping_info(ctypes.Structure):
    _fields_ = [
        ("handle", c_int64),
        ("region", c_int64),
        ("address", c_uint64),
        ("nbytes", c_int64),
        ("access", c_int32),
        ("use_count", c_int32),
    ]


class kvr_observation(ctypes.Structure):
    _fields_ = [
        ("file_nbytes", c_int64),
        ("allocated_nbytes", c_int64),
        ("device", c_uint64),
        ("inode", c_uint64),
        ("file_mode", c_int64),
        ("seals", c_int64),
        ("access", c_int64),
        ("page_nbytes", c_int64),
        ("block_nbytes", c_int64),
        ("reserved0", c_int64),
    ]


class kvr_cuda_info(ctypes.Structure):
    _fields_ = [
        ("ordinal", c_int32),
        ("driver_version", c_int32),
        ("vmm", c_int32),
        ("posix_fd", c_int32),
        ("fabric", c_int32),
        ("features", c_uint32),
        ("uuid", c_uint8 * 16),
    ]


class kvr_cuda_observation(ctypes.Structure):
    _fields_ = [
        ("handle_types", c_int64),
        ("allocation_type", c_int64),
        ("location_type", c_int64),
        ("location_id", c_int64),
        ("granularity_min", c_int64),
        ("granularity_recommended", c_int64),
        ("mapped_nbytes", c_int64),
        ("reserved_nbytes", c_int64),
        ("allowed_handle_types", c_int64),
        ("access", c_int64),
        ("mapped_base", c_uint64),
        ("properties_result", c_int32),
        ("granularity_result", c_int32),
        ("range_result", c_int32),
        ("reservation_result", c_int32),
        ("allowed_result", c_int32),
        ("access_result", c_int32),
    ]


class kvr_handle_counts(ctypes.Structure):
    _fields_ = [
        ("regions", c_int64),
        ("mappings", c_int64),
        ("locks", c_int64),
        ("tables", c_int64),
        ("fds", c_int64),
    ]


class kvr_superblock(ctypes.Structure):
    _fields_ = [
        ("magic", c_int64),
        ("version", c_uint32),
        ("superblock_crc", c_uint32),
        ("part_id", c_uint8 * 16),
        ("table_nbytes", c_int64),
        ("claims_nbytes", c_int64),
        ("slot_count", c_int64),
        ("block_nbytes", c_int64),
        ("region_count", c_int64),
        ("slots_per_region", c_int64),
        ("manifest_offset_bytes", c_int64),
        ("manifest_nbytes", c_int64),
        ("manifest_crc", c_uint32),
        ("reserved0", c_uint32),
        ("record_offset_bytes", c_int64),
        ("link_offset_bytes", c_int64),
        ("bucket_offset_bytes", c_int64),
        ("bucket_count", c_int64),
        ("row_nbytes", c_int64),
        ("row_count", c_int64),
        ("ring_offset_bytes", c_int64),
        ("ring_count", c_int64),
        ("reserved1", c_uint8 * 88),
    ]


class kvr_words(ctypes.Structure):
    _fields_ = [
        ("state", c_int64),
        ("pad0", c_int64 * 7),
        ("content_epoch", c_int64),
        ("pad1", c_int64 * 7),
        ("writer_session", c_int64),
        ("pad2", c_int64 * 7),
        ("dirty", c_int64),
        ("pad3", c_int64 * 7),
        ("ring_epoch", c_int64),
        ("pad4", c_int64 * 7),
        ("clock", c_int64),
        ("pad5", c_int64 * 7),
        ("heartbeat", c_int64),
        ("pad6", c_int64 * 7),
        ("free_head", c_int64),
        ("lru_oldest", c_int64),
        ("lru_newest", c_int64),
        ("free_count", c_int64),
        ("writing_count", c_int64),
        ("sealed_count", c_int64),
        ("stale_count", c_int64),
        ("pad7", c_int64),
        ("stored_total", c_int64),
        ("evicted_total", c_int64),
        ("replaced_total", c_int64),
        ("cleared_total", c_int64),
        ("corrupt_total", c_int64),
        ("freed_total", c_int64),
        ("pad8", c_int64 * 2),
        ("capacity", c_int64),
        ("unready", c_int64),
        ("pad9", c_int64 * 54),
        ("row_session", c_int64 * 64),
        ("pad10", c_int64 * 320),
    ]


class kvr_record(ctypes.Structure):
    _fields_ = [
        ("key", c_uint8 * 32),
        ("generation", c_int64),
        ("recency", c_int64),
        ("content_epoch", c_uint32),
        ("data_crc", c_uint32),
        ("record_crc", c_uint32),
        ("key_nbytes", c_uint8),
        ("flags", c_uint8),
        ("owner_row", c_uint8),
        ("state", c_uint8),
    ]


class kvr_link(ctypes.Structure):
    _fields_ = [
        ("chain_next", c_int32),
        ("prev", c_int32),
        ("next", c_int32),
        ("key_hash", c_uint32),
    ]


class kvr_row_header(ctypes.Structure):
    _fields_ = [
        ("last_stamp", c_int64),
        ("reserved", c_int64 * 7),
    ]


class kvr_table_layout(ctypes.Structure):
    _fields_ = [
        ("table_nbytes", c_int64),
        ("claims_nbytes", c_int64),
        ("record_offset_bytes", c_int64),
        ("link_offset_bytes", c_int64),
        ("bucket_offset_bytes", c_int64),
        ("bucket_count", c_int64),
        ("row_nbytes", c_int64),
        ("reserved0", c_int64),
    ]


class kvr_table_info(ctypes.Structure):
    _fields_ = [
        ("part_id", c_uint8 * 16),
        ("slot_count", c_int64),
        ("block_nbytes", c_int64),
        ("region_count", c_int64),
        ("slots_per_region", c_int64),
        ("manifest_nbytes", c_int64),
        ("session", c_int64),
        ("role", c_int32),
        ("row", c_int32),
        ("operation_count", c_int64),
        ("content_epoch", c_int64),
        ("heartbeat_ns", c_int64),
        ("capacity", c_int64),
    ]


class kvr_table_stats(ctypes.Structure):
    _fields_ = [
        ("state", c_int64),
        ("content_epoch", c_int64),
        ("writer_session", c_int64),
        ("dirty", c_int64),
        ("slot_count", c_int64),
        ("free_count", c_int64),
        ("writing_count", c_int64),
        ("sealed_count", c_int64),
        ("stale_count", c_int64),
        ("claimed_count", c_int64),
        ("stored_total", c_int64),
        ("evicted_total", c_int64),
        ("replaced_total", c_int64),
        ("cleared_total", c_int64),
        ("corrupt_total", c_int64),
        ("freed_total", c_int64),
        ("owned_count", c_int64),
    ]


class kvr_restore_result(ctypes.Structure):
    _fields_ = [
        ("sealed_count", c_int64),
        ("bad_count", c_int64),
        ("freed_count", c_int64),
        ("reserved0", c_int64),
    ]


class kvr_memory(ctypes.Structure):
    _fields_ = [
        ("mapping", c_int64),
        ("address", c_uint64),
        ("nbytes", c_int64),
        ("device", c_int64),
        ("is_writable", c_int64),
    ]


class kvr_segment(ctypes.Structure):
    _fields_ = [
        ("mapping", c_int64),
        ("address", c_uint64),
        ("memory_nbytes", c_int64),
        ("device", c_int64),
        ("is_writable", c_int64),
        ("offset_bytes", c_int64),
        ("stride_bytes", c_int64),
        ("slot_offset_bytes", c_int64),
        ("nbytes", c_int64),
    ]


class kvr_dependency(ctypes.Structure):
    _fields_ = [
        ("kind", c_int64),
        ("value", c_int64),
        ("device", c_int64),
    ]


class kvr_queue_info(ctypes.Structure):
    _fields_ = [
        ("handle", c_int64),
        ("fd", c_int32),
        ("thread_count", c_int32),
        ("submitted", c_int64),
        ("done", c_int64),
        ("failed", c_int64),
        ("cancelled", c_int64),
        ("queued", c_int64),
        ("running", c_int64),
        ("is_closing", c_int32),
        ("paused", c_int32),
    ]


class kvr_operation_info(ctypes.Structure):
    _fields_ = [
        ("handle", c_int64),
        ("queue", c_int64),
        ("state", c_int32),
        ("quarantine", c_int32),
        ("entry_count", c_int64),
        ("total_nbytes", c_int64),
        ("moved_nbytes", c_int64),
        ("failed_index", c_int64),
        ("quarantine_ns", c_int64),
    ]


class kvr_copy_counts(ctypes.Structure):
    _fields_ = [
        ("queues", c_int64),
        ("operations", c_int64),
        ("in_flight", c_int64),
        ("quarantined", c_int64),
        ("quarantine_nbytes", c_int64),
        ("quarantine_limit", c_int64),
        ("fds", c_int64),
    ]


def struct_nbytes() -> dict[str, int]:
    """Return the size of every struct."""
    return {name: ctypes.sizeof(kind) for name, kind in globals().items() if name.startswith("kvr_")}
