# Made from include/kvreuse.h by tests/lockstep/capi.py (make capi): do not edit.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "kvreuse.h" nogil:
    const int64_t KVR_ABI_VERSION
    const int64_t KVR_OK
    const int64_t KVR_PENDING
    const int64_t KVR_ERROR_INVALID_HANDLE
    const int64_t KVR_ERROR_STALE_HANDLE
    const int64_t KVR_ERROR_HANDLE_CLOSED
    const int64_t KVR_ERROR_KIND_MISMATCH
    const int64_t KVR_ERROR_SIZE_MISMATCH
    const int64_t KVR_ERROR_RANGE
    const int64_t KVR_ERROR_NOT_SUPPORTED
    const int64_t KVR_ERROR_PERMISSION_DENIED
    const int64_t KVR_ERROR_OUT_OF_MEMORY
    const int64_t KVR_ERROR_NO_SPACE
    const int64_t KVR_ERROR_TOO_MANY_FDS
    const int64_t KVR_ERROR_BUSY
    const int64_t KVR_ERROR_NOT_QUIESCENT
    const int64_t KVR_ERROR_NOT_READY
    const int64_t KVR_ERROR_INCOMPATIBLE
    const int64_t KVR_ERROR_ATTACH_REFUSED
    const int64_t KVR_ERROR_KEEPER_UNAVAILABLE
    const int64_t KVR_ERROR_STALE_EPOCH
    const int64_t KVR_ERROR_STALE_BLOCK
    const int64_t KVR_ERROR_CORRUPT
    const int64_t KVR_ERROR_PROFILE
    const int64_t KVR_ERROR_PROTOCOL
    const int64_t KVR_ERROR_WAIT_TIMEOUT
    const int64_t KVR_ERROR_DRIVER
    const int64_t KVR_ERROR_SYSTEM_CALL
    const int64_t KVR_ERROR_FORKED
    const int64_t KVR_DETAIL_NONE
    const int64_t KVR_DETAIL_SYSTEM_CALL
    const int64_t KVR_DETAIL_NBYTES_RANGE
    const int64_t KVR_DETAIL_HANDLE_NOT_POSITIVE
    const int64_t KVR_DETAIL_HANDLE_UNKNOWN
    const int64_t KVR_DETAIL_HANDLE_STALE
    const int64_t KVR_DETAIL_HANDLE_SORT
    const int64_t KVR_DETAIL_KIND_UNKNOWN
    const int64_t KVR_DETAIL_KIND_NOT_ALLOCATABLE
    const int64_t KVR_DETAIL_KIND_NOT_EXPORTABLE
    const int64_t KVR_DETAIL_ACCESS_UNKNOWN
    const int64_t KVR_DETAIL_ACCESS_READ_ONLY
    const int64_t KVR_DETAIL_FLAGS_UNKNOWN
    const int64_t KVR_DETAIL_REGION_MAPPED
    const int64_t KVR_DETAIL_MAPPING_IN_USE
    const int64_t KVR_DETAIL_IMPORT_SIZE
    const int64_t KVR_DETAIL_IMPORT_NBYTES
    const int64_t KVR_DETAIL_IMPORT_SEALS
    const int64_t KVR_DETAIL_IMPORT_INODE
    const int64_t KVR_DETAIL_FD_NOT_MEMORY
    const int64_t KVR_DETAIL_FD_NEGATIVE
    const int64_t KVR_DETAIL_NAME_TOO_LONG
    const int64_t KVR_DETAIL_FORKED
    const int64_t KVR_DETAIL_HANDLES_EXHAUSTED
    const int64_t KVR_DETAIL_SLOT_COUNT_RANGE
    const int64_t KVR_DETAIL_BLOCK_NBYTES_RANGE
    const int64_t KVR_DETAIL_REGION_COUNT_RANGE
    const int64_t KVR_DETAIL_MANIFEST_NBYTES_RANGE
    const int64_t KVR_DETAIL_TABLE_NBYTES
    const int64_t KVR_DETAIL_TABLE_MAGIC
    const int64_t KVR_DETAIL_TABLE_VERSION
    const int64_t KVR_DETAIL_TABLE_SUPERBLOCK_CRC
    const int64_t KVR_DETAIL_TABLE_GEOMETRY
    const int64_t KVR_DETAIL_TABLE_MANIFEST_CRC
    const int64_t KVR_DETAIL_ROLE_UNKNOWN
    const int64_t KVR_DETAIL_ROLE_FORBIDS
    const int64_t KVR_DETAIL_ROW_RANGE
    const int64_t KVR_DETAIL_SESSION_RANGE
    const int64_t KVR_DETAIL_SESSION_FENCED
    const int64_t KVR_DETAIL_PART_RETIRED
    const int64_t KVR_DETAIL_PART_NOT_SEALED
    const int64_t KVR_DETAIL_PART_DIRTY
    const int64_t KVR_DETAIL_LOCK_TIMEOUT
    const int64_t KVR_DETAIL_KEY_NBYTES
    const int64_t KVR_DETAIL_KEY_STRIDE
    const int64_t KVR_DETAIL_COUNT_RANGE
    const int64_t KVR_DETAIL_SLOT_RANGE
    const int64_t KVR_DETAIL_SLOT_REPEATED
    const int64_t KVR_DETAIL_SLOT_BUSY
    const int64_t KVR_DETAIL_KEY_RESERVED
    const int64_t KVR_DETAIL_NO_FREE_SLOT
    const int64_t KVR_DETAIL_GENERATION
    const int64_t KVR_DETAIL_SLOT_STATE
    const int64_t KVR_DETAIL_NOT_CLAIMED
    const int64_t KVR_DETAIL_CLAIMS_FULL
    const int64_t KVR_DETAIL_DATA_NOT_BOUND
    const int64_t KVR_DETAIL_REGION_INDEX_RANGE
    const int64_t KVR_DETAIL_REGION_BIND_NBYTES
    const int64_t KVR_DETAIL_STATE_RANGE
    const int64_t KVR_DETAIL_TABLE_SEALED
    const int64_t KVR_DETAIL_LAYOUT_NBYTES
    const int64_t KVR_DETAIL_LOCK_IN_USE
    const int64_t KVR_DETAIL_DRIVER_CALL
    const int64_t KVR_DETAIL_DRIVER_MISSING
    const int64_t KVR_DETAIL_DRIVER_ENTRY
    const int64_t KVR_DETAIL_ORDINAL_RANGE
    const int64_t KVR_DETAIL_DEVICE_LACKS_VMM
    const int64_t KVR_DETAIL_FABRIC_NOT_ALLOWED
    const int64_t KVR_DETAIL_FABRIC_GIVEN_OUT
    const int64_t KVR_DETAIL_HANDLE_IN_CALL
    const int64_t KVR_DETAIL_PROVIDER
    const int64_t KVR_DETAIL_CUDA_GRANULARITY
    const int64_t KVR_DETAIL_CUDA_MAPPED_NBYTES
    const int64_t KVR_DETAIL_CUDA_MAP_REFUSED
    const int64_t KVR_DETAIL_CUDA_HANDLE_TYPES
    const int64_t KVR_DETAIL_CUDA_LOCATION
    const int64_t KVR_DETAIL_IMPORT_PHYSICAL
    const int64_t KVR_DETAIL_NO_HOST_ADDRESS
    const int64_t KVR_DETAIL_THREAD_COUNT_RANGE
    const int64_t KVR_DETAIL_COPY_DST_RANGE
    const int64_t KVR_DETAIL_COPY_SRC_RANGE
    const int64_t KVR_DETAIL_COPY_OVERLAP
    const int64_t KVR_DETAIL_COPY_CROSS_OVERLAP
    const int64_t KVR_DETAIL_COPY_READ_ONLY
    const int64_t KVR_DETAIL_QUEUE_CLOSING
    const int64_t KVR_DETAIL_QUEUE_NOT_QUIESCENT
    const int64_t KVR_DETAIL_OPERATION_RUNNING
    const int64_t KVR_DETAIL_AFTER_KIND
    const int64_t KVR_DETAIL_AFTER_FAILED
    const int64_t KVR_DETAIL_QUARANTINE_FULL
    const int64_t KVR_DETAIL_MAPPING_IN_FLIGHT
    const int64_t KVR_DETAIL_SLOT_IN_FLIGHT
    const int64_t KVR_DETAIL_SLOT_SPOILED
    const int64_t KVR_DETAIL_TABLE_IN_FLIGHT
    const int64_t KVR_DETAIL_COPY_SHORT
    const int64_t KVR_DETAIL_BLOCK_CRC
    const int64_t KVR_DETAIL_SLOT_GIVEN_UP
    const int64_t KVR_DETAIL_NOT_QUARANTINED
    const int64_t KVR_DETAIL_NO_FAULTS
    const int64_t KVR_DETAIL_FAULT_UNKNOWN
    const int64_t KVR_DETAIL_OPERATION_ABANDONED
    const int64_t KVR_DETAIL_SEGMENT_RANGE
    const int64_t KVR_DETAIL_ENGINE_BLOCK_RANGE
    const int64_t KVR_DETAIL_DIRECTION_UNKNOWN
    const int64_t KVR_DETAIL_OPERATION_CANCELLED
    const int64_t KVR_DETAIL_STRIDE_RANGE
    const int64_t KVR_DETAIL_ADDRESS_RANGE
    const int64_t KVR_DETAIL_PART_UNREADY
    const int64_t KVR_DETAIL_PERIOD_RANGE
    const int64_t KVR_DETAIL_HEARTBEAT_RUNS
    const int64_t KVR_DETAIL_CONTENT_EPOCH
    const int64_t KVR_SORT_REGION
    const int64_t KVR_SORT_MAPPING
    const int64_t KVR_SORT_LOCK
    const int64_t KVR_SORT_TABLE
    const int64_t KVR_SORT_QUEUE
    const int64_t KVR_SORT_OPERATION
    const int64_t KVR_KIND_NONE
    const int64_t KVR_KIND_POSIX_FD
    const int64_t KVR_KIND_FABRIC
    const int64_t KVR_ACCESS_NONE
    const int64_t KVR_ACCESS_READ
    const int64_t KVR_ACCESS_READ_WRITE
    const int64_t KVR_NATIVE_NONE
    const int64_t KVR_NATIVE_ERRNO
    const int64_t KVR_NATIVE_CUDA
    const int64_t KVR_ORIGIN_ALLOCATED
    const int64_t KVR_ORIGIN_IMPORTED
    const int64_t KVR_MAP_DONTFORK
    const int64_t KVR_IMPORT_ALLOW_UNSEALED
    const int64_t KVR_CLOSE_WAIT_NS
    const int64_t KVR_REGION_NAME_NBYTES
    const int64_t KVR_REGION_ID_NBYTES
    const int64_t KVR_PLACEMENT_COUNT_MAX
    const int64_t KVR_PROVIDER_HOST
    const int64_t KVR_ORDINAL_COUNT_MAX
    const int64_t KVR_FABRIC_NBYTES
    const int64_t KVR_CUDA_ALLOW_FABRIC
    const int64_t KVR_CUDA_HAS_BATCH_COPY
    const int64_t KVR_CUDA_HAS_STREAM_QUERY
    const int64_t KVR_CUDA_HAS_ADDRESS_RANGE_HANDLE
    const int64_t KVR_THREAD_COUNT_MAX
    const int64_t KVR_QUEUE_FAULTS
    const int64_t KVR_COPY_INLINE_NBYTES
    const int64_t KVR_OPERATION_QUEUED
    const int64_t KVR_OPERATION_RUNNING
    const int64_t KVR_OPERATION_DONE
    const int64_t KVR_OPERATION_FAILED
    const int64_t KVR_OPERATION_CANCELLED
    const int64_t KVR_DIRECTION_IN
    const int64_t KVR_DIRECTION_OUT
    const int64_t KVR_SLOTS_COMMIT
    const int64_t KVR_SLOTS_CHECKSUM
    const int64_t KVR_SLOTS_VERIFY
    const int64_t KVR_AFTER_FD
    const int64_t KVR_AFTER_OPERATION
    const int64_t KVR_AFTER_CUDA_EVENT
    const int64_t KVR_QUARANTINE_CLOSE
    const int64_t KVR_QUARANTINE_DRIVER
    const int64_t KVR_FAULT_NONE
    const int64_t KVR_FAULT_PAUSE
    const int64_t KVR_FAULT_ERRNO
    const int64_t KVR_FAULT_SHORT
    const int64_t KVR_FAULT_SUBMIT
    const int64_t KVR_TABLE_MAGIC
    const int64_t KVR_TABLE_VERSION
    const int64_t KVR_KEY_NBYTES
    const int64_t KVR_ROW_COUNT
    const int64_t KVR_WORDS_OFFSET_BYTES
    const int64_t KVR_MANIFEST_OFFSET_BYTES
    const int64_t KVR_MANIFEST_NBYTES_MAX
    const int64_t KVR_SLOT_COUNT_MAX
    const int64_t KVR_REGION_COUNT_MAX
    const int64_t KVR_NBYTES_MAX
    const int64_t KVR_CLAIM_COUNT_BITS
    const int64_t KVR_CLAIM_COUNT_MAX
    const int64_t KVR_BATCH_COUNT_MAX
    const int64_t KVR_SLOT_FREE
    const int64_t KVR_SLOT_WRITING
    const int64_t KVR_SLOT_SEALED
    const int64_t KVR_RECORD_HAS_DATA_CRC
    const int64_t KVR_PART_CREATING
    const int64_t KVR_PART_LAYOUT_SEALED
    const int64_t KVR_PART_RETIRED
    const int64_t KVR_ROLE_READER
    const int64_t KVR_ROLE_WRITER
    const int64_t KVR_ROLE_KEEPER
    const int64_t KVR_RESERVE_EVICT
    const int64_t KVR_RESERVE_DUPLICATE
    const int64_t KVR_COMMIT_CHECKSUM
    const int64_t KVR_WRITER_SESSION_NONE
    const int64_t KVR_BEAT_MIN_NS
    const int64_t KVR_BEAT_MAX_NS

    ctypedef struct kvr_error:
        int32_t status
        int32_t detail
        int32_t native_source
        int32_t reserved0
        int64_t native_code
        int64_t values[4]
        char call[48]

    ctypedef struct kvr_region_info:
        int64_t handle
        int64_t nbytes
        int64_t physical_nbytes
        int32_t kind
        int32_t access
        int32_t origin
        int32_t mapping_count
        uint64_t device
        uint64_t inode
        uint8_t region_id[16]
        int32_t provider
        int32_t fabric_count

    ctypedef struct kvr_mapping_info:
        int64_t handle
        int64_t region
        uint64_t address
        int64_t nbytes
        int32_t access
        int32_t use_count

    ctypedef struct kvr_observation:
        int64_t file_nbytes
        int64_t allocated_nbytes
        uint64_t device
        uint64_t inode
        int64_t file_mode
        int64_t seals
        int64_t access
        int64_t page_nbytes
        int64_t block_nbytes
        int64_t reserved0

    ctypedef struct kvr_cuda_info:
        int32_t ordinal
        int32_t driver_version
        int32_t vmm
        int32_t posix_fd
        int32_t fabric
        uint32_t features
        uint8_t uuid[16]

    ctypedef struct kvr_cuda_observation:
        int64_t handle_types
        int64_t allocation_type
        int64_t location_type
        int64_t location_id
        int64_t granularity_min
        int64_t granularity_recommended
        int64_t mapped_nbytes
        int64_t reserved_nbytes
        int64_t allowed_handle_types
        int64_t access
        uint64_t mapped_base
        int32_t properties_result
        int32_t granularity_result
        int32_t range_result
        int32_t reservation_result
        int32_t allowed_result
        int32_t access_result

    ctypedef struct kvr_memory:
        int64_t mapping
        uint64_t address
        int64_t nbytes
        int64_t device
        int64_t is_writable

    ctypedef struct kvr_segment:
        int64_t mapping
        uint64_t address
        int64_t memory_nbytes
        int64_t device
        int64_t is_writable
        int64_t offset_bytes
        int64_t stride_bytes
        int64_t slot_offset_bytes
        int64_t nbytes

    ctypedef struct kvr_dependency:
        int64_t kind
        int64_t value
        int64_t device

    ctypedef struct kvr_queue_info:
        int64_t handle
        int32_t fd
        int32_t thread_count
        int64_t submitted
        int64_t done
        int64_t failed
        int64_t cancelled
        int64_t queued
        int64_t running
        int32_t is_closing
        int32_t paused

    ctypedef struct kvr_operation_info:
        int64_t handle
        int64_t queue
        int32_t state
        int32_t quarantine
        int64_t entry_count
        int64_t total_nbytes
        int64_t moved_nbytes
        int64_t failed_index
        int64_t quarantine_ns

    ctypedef struct kvr_copy_counts:
        int64_t queues
        int64_t operations
        int64_t in_flight
        int64_t quarantined
        int64_t quarantine_nbytes
        int64_t quarantine_limit
        int64_t fds

    ctypedef struct kvr_handle_counts:
        int64_t regions
        int64_t mappings
        int64_t locks
        int64_t tables
        int64_t fds

    ctypedef struct kvr_superblock:
        int64_t magic
        uint32_t version
        uint32_t superblock_crc
        uint8_t part_id[16]
        int64_t table_nbytes
        int64_t claims_nbytes
        int64_t slot_count
        int64_t block_nbytes
        int64_t region_count
        int64_t slots_per_region
        int64_t manifest_offset_bytes
        int64_t manifest_nbytes
        uint32_t manifest_crc
        uint32_t reserved0
        int64_t record_offset_bytes
        int64_t link_offset_bytes
        int64_t bucket_offset_bytes
        int64_t bucket_count
        int64_t row_nbytes
        int64_t row_count
        int64_t ring_offset_bytes
        int64_t ring_count
        uint8_t reserved1[88]

    ctypedef struct kvr_words:
        int64_t state
        int64_t pad0[7]
        int64_t content_epoch
        int64_t pad1[7]
        int64_t writer_session
        int64_t pad2[7]
        int64_t dirty
        int64_t pad3[7]
        int64_t ring_epoch
        int64_t pad4[7]
        int64_t clock
        int64_t pad5[7]
        int64_t heartbeat
        int64_t pad6[7]
        int64_t free_head
        int64_t lru_oldest
        int64_t lru_newest
        int64_t free_count
        int64_t writing_count
        int64_t sealed_count
        int64_t stale_count
        int64_t pad7
        int64_t stored_total
        int64_t evicted_total
        int64_t replaced_total
        int64_t cleared_total
        int64_t corrupt_total
        int64_t freed_total
        int64_t pad8[2]
        int64_t capacity
        int64_t unready
        int64_t pad9[54]
        int64_t row_session[64]
        int64_t pad10[320]

    ctypedef struct kvr_record:
        uint8_t key[32]
        int64_t generation
        int64_t recency
        uint32_t content_epoch
        uint32_t data_crc
        uint32_t record_crc
        uint8_t key_nbytes
        uint8_t flags
        uint8_t owner_row
        uint8_t state

    ctypedef struct kvr_link:
        int32_t chain_next
        int32_t prev
        int32_t next
        uint32_t key_hash

    ctypedef struct kvr_row_header:
        int64_t last_stamp
        int64_t reserved[7]

    ctypedef struct kvr_table_layout:
        int64_t table_nbytes
        int64_t claims_nbytes
        int64_t record_offset_bytes
        int64_t link_offset_bytes
        int64_t bucket_offset_bytes
        int64_t bucket_count
        int64_t row_nbytes
        int64_t reserved0

    ctypedef struct kvr_table_info:
        uint8_t part_id[16]
        int64_t slot_count
        int64_t block_nbytes
        int64_t region_count
        int64_t slots_per_region
        int64_t manifest_nbytes
        int64_t session
        int32_t role
        int32_t row
        int64_t operation_count
        int64_t content_epoch
        int64_t heartbeat_ns
        int64_t capacity

    ctypedef struct kvr_table_stats:
        int64_t state
        int64_t content_epoch
        int64_t writer_session
        int64_t dirty
        int64_t slot_count
        int64_t free_count
        int64_t writing_count
        int64_t sealed_count
        int64_t stale_count
        int64_t claimed_count
        int64_t stored_total
        int64_t evicted_total
        int64_t replaced_total
        int64_t cleared_total
        int64_t corrupt_total
        int64_t freed_total
        int64_t owned_count

    ctypedef struct kvr_restore_result:
        int64_t sealed_count
        int64_t bad_count
        int64_t freed_count
        int64_t reserved0

    int32_t kvr_abi_version() noexcept
    int32_t kvr_echo(int64_t value, int64_t *out) noexcept
    int32_t kvr_error_get(kvr_error *out) noexcept
    int32_t kvr_crc32c(uint32_t value, const void *data, int64_t nbytes, uint32_t *out) noexcept
    int32_t kvr_handle_counts_get(kvr_handle_counts *out) noexcept
    int32_t kvr_host_allocate(int64_t nbytes, int32_t kind, const char *name, const char *directory, kvr_region_info *out) noexcept
    int32_t kvr_region_info_get(int64_t region, kvr_region_info *out) noexcept
    int32_t kvr_region_export(int64_t region, int32_t *out_fd) noexcept
    int32_t kvr_region_import(int32_t fd, int64_t nbytes, int64_t physical_nbytes, const uint8_t *region_id, uint64_t device, uint64_t inode, uint32_t flags, kvr_region_info *out) noexcept
    int32_t kvr_region_observe(int64_t region, kvr_observation *out) noexcept
    int32_t kvr_region_placement(int64_t region, int64_t capacity, int64_t *nodes, int64_t *out_count) noexcept
    int32_t kvr_region_map(int64_t region, int32_t access, uint32_t flags, kvr_mapping_info *out) noexcept
    int32_t kvr_region_close(int64_t region) noexcept
    int32_t kvr_mapping_info_get(int64_t mapping, kvr_mapping_info *out) noexcept
    int32_t kvr_mapping_use(int64_t mapping, int32_t delta) noexcept
    int32_t kvr_mapping_unmap(int64_t mapping) noexcept
    int32_t kvr_cuda_info_get(int32_t ordinal, kvr_cuda_info *out) noexcept
    int32_t kvr_cuda_allocate(int32_t ordinal, int64_t nbytes, int32_t kind, uint32_t flags, kvr_region_info *out) noexcept
    int32_t kvr_cuda_import(int32_t ordinal, int32_t kind, int32_t fd, const uint8_t *fabric, int64_t nbytes, int64_t physical_nbytes, const uint8_t *region_id, kvr_region_info *out) noexcept
    int32_t kvr_cuda_export_fabric(int64_t region, uint8_t *out_fabric) noexcept
    int32_t kvr_cuda_fabric_done(int64_t region) noexcept
    int32_t kvr_cuda_observe(int64_t region, kvr_cuda_observation *out) noexcept
    int32_t kvr_table_layout_get(int64_t slot_count, int64_t manifest_nbytes, kvr_table_layout *out) noexcept
    int32_t kvr_table_create(int64_t table_region, int64_t claims_region, const uint8_t *part_id, int64_t slot_count, int64_t block_nbytes, int64_t region_count, const uint8_t *manifest, int64_t manifest_nbytes) noexcept
    int32_t kvr_table_open(int64_t table_region, int64_t claims_region, int32_t lock_fd, int32_t role, int64_t session, int32_t row, int64_t lock_wait_ns, int64_t *out_table) noexcept
    int32_t kvr_table_close(int64_t table) noexcept
    int32_t kvr_table_info_get(int64_t table, kvr_table_info *out) noexcept
    int32_t kvr_table_manifest_get(int64_t table, uint8_t *out, int64_t capacity_nbytes, int64_t *out_nbytes) noexcept
    int32_t kvr_table_bind(int64_t table, int64_t index, int64_t mapping) noexcept
    int32_t kvr_table_set_state(int64_t table, int32_t state) noexcept
    int32_t kvr_table_set_unready(int64_t table, int32_t unready) noexcept
    int32_t kvr_table_set_capacity(int64_t table, int64_t capacity) noexcept
    int32_t kvr_table_beat(int64_t table, int64_t period_ns) noexcept
    int32_t kvr_table_admit(int64_t table, int32_t row, int64_t session, int32_t role) noexcept
    int32_t kvr_table_drop(int64_t table, int32_t row, int64_t session) noexcept
    int32_t kvr_table_recover(int64_t table, int64_t *out_freed) noexcept
    int32_t kvr_table_restore(int64_t table, kvr_restore_result *out) noexcept
    int32_t kvr_table_reset(int64_t table) noexcept
    int32_t kvr_table_expire(int64_t table, int64_t *out_removed) noexcept
    int32_t kvr_table_match(int64_t table, const uint8_t *keys, int64_t key_stride_bytes, const uint8_t *key_nbytes, int64_t key_count, int64_t *out_count) noexcept
    int32_t kvr_table_lookup(int64_t table, const uint8_t *keys, int64_t key_stride_bytes, const uint8_t *key_nbytes, int64_t key_count, int64_t *slots, int64_t *generations) noexcept
    int32_t kvr_table_claim(int64_t table, const uint8_t *keys, int64_t key_stride_bytes, const uint8_t *key_nbytes, int64_t key_count, int64_t *slots, int64_t *generations, int64_t *out_count) noexcept
    int32_t kvr_table_claim_slots(int64_t table, const int64_t *slots, const int64_t *generations, int64_t count) noexcept
    int32_t kvr_table_release(int64_t table, const int64_t *slots, int64_t count) noexcept
    int32_t kvr_table_touch(int64_t table, const uint8_t *keys, int64_t key_stride_bytes, const uint8_t *key_nbytes, int64_t key_count, int64_t *out_count) noexcept
    int32_t kvr_table_reserve(int64_t table, const uint8_t *keys, int64_t key_stride_bytes, const uint8_t *key_nbytes, int64_t key_count, const int64_t *named_slots, uint32_t flags, int64_t *slots, int64_t *generations, uint8_t *evicted_keys, uint8_t *evicted_key_nbytes, int64_t *out_evicted) noexcept
    int32_t kvr_table_commit(int64_t table, const int64_t *slots, const int64_t *generations, int64_t count, uint32_t flags) noexcept
    int32_t kvr_table_abort(int64_t table, const int64_t *slots, const int64_t *generations, int64_t count, int64_t *out_count) noexcept
    int32_t kvr_table_evict(int64_t table, int64_t evict_count, const uint8_t *keys, int64_t key_stride_bytes, const uint8_t *key_nbytes, int64_t key_count, int64_t *out_count) noexcept
    int32_t kvr_table_clear(int64_t table, int64_t *out_removed, int64_t *out_kept) noexcept
    int32_t kvr_table_verify(int64_t table, const int64_t *slots, int64_t count, uint8_t *verdicts) noexcept
    int32_t kvr_table_invalidate(int64_t table, const int64_t *slots, const int64_t *generations, int64_t count, int64_t *out_count) noexcept
    int32_t kvr_table_inventory(int64_t table, int64_t first_slot, int64_t capacity, int64_t *slots, int64_t *generations, uint8_t *keys, uint8_t *key_nbytes, int64_t *out_count, int64_t *out_next) noexcept
    int32_t kvr_table_stats_get(int64_t table, kvr_table_stats *out) noexcept
    int32_t kvr_queue_open(int32_t thread_count, uint32_t flags, int64_t *out_queue) noexcept
    int32_t kvr_queue_drain(int64_t queue, int64_t wait_ns) noexcept
    int32_t kvr_queue_close(int64_t queue, int64_t wait_ns) noexcept
    int32_t kvr_queue_info_get(int64_t queue, kvr_queue_info *out) noexcept
    int32_t kvr_queue_completed(int64_t queue, int64_t capacity, int64_t *operations, int64_t *out_count) noexcept
    int32_t kvr_queue_fault(int64_t queue, int32_t fault, int64_t index, int64_t value) noexcept
    int32_t kvr_queue_resume(int64_t queue) noexcept
    int32_t kvr_copy_submit(int64_t queue, const kvr_memory *destination, const kvr_memory *source, const int64_t *destination_offsets, const int64_t *source_offsets, const int64_t *lengths, int64_t count, const kvr_dependency *after, int64_t after_count, int64_t *out_operation) noexcept
    int32_t kvr_copy_slots(int64_t queue, int64_t table, int32_t direction, const int64_t *mappings, int64_t mapping_count, const int64_t *slots, const int64_t *generations, const int64_t *engine_blocks, int64_t count, const kvr_segment *segments, int64_t segment_count, uint32_t flags, const kvr_dependency *after, int64_t after_count, int64_t *out_operation) noexcept
    int32_t kvr_operation_info_get(int64_t operation, kvr_operation_info *out) noexcept
    int32_t kvr_operation_error_get(int64_t operation, kvr_error *out) noexcept
    int32_t kvr_operation_wait(int64_t operation, int64_t wait_ns) noexcept
    int32_t kvr_operation_cancel(int64_t operation) noexcept
    int32_t kvr_operation_release(int64_t operation) noexcept
    int32_t kvr_operation_abandon(int64_t operation) noexcept
    int32_t kvr_quarantine_get(int64_t capacity, int64_t *operations, int64_t *out_count) noexcept
    int32_t kvr_quarantine_limit_set(int64_t limit_nbytes) noexcept
    int32_t kvr_copy_counts_get(kvr_copy_counts *out) noexcept
