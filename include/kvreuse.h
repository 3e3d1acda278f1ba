/* kvreuse.h: the contract of kvreuse.
 *
 * Types, units, owners, statuses, shared-memory records and the ABI version. The Cython core implements these functions in C;
 * the fallback implements the same ones in Python over ctypes. Tests compare both with this file mechanically.
 *
 * Conventions
 *   Every integer has a fixed width. Sizes, counts and offsets are int64_t; a name ends in its unit (_nbytes, _bytes, _count,
 *   _ns). A function returns an int32_t status: 0 done, positive pending, negative error. After a negative status the calling
 *   thread can ask kvr_error_get() what was expected and found; output parameters are then unchanged unless the comment says
 *   otherwise. A handle is a positive int64_t: generation in the upper 31 bits, slot in the lower 32; numbers are never reused.
 *   Pointers are borrowed for the duration of the call. Arrays are contiguous; (pointer, count) may be (NULL, 0).
 *   fds are CLOEXEC. No function calls Python, prints, or sets errno for its caller.
 *
 * Global state: one table of handles with its mutex, a fork flag and the list of queues (native/handles.c), the CUDA driver's entry points and devices
 * (native/cuda.c: filled at the first call for one, then only read), and one error record a thread.
 */
#ifndef KVREUSE_H
#define KVREUSE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVR_ABI_VERSION 1

/* ---- statuses: numbered explicitly, never renumbered ---- */
#define KVR_OK 0
#define KVR_PENDING 1
#define KVR_ERROR_INVALID_HANDLE (-1)
#define KVR_ERROR_STALE_HANDLE (-2)
#define KVR_ERROR_HANDLE_CLOSED (-3)
#define KVR_ERROR_KIND_MISMATCH (-4)
#define KVR_ERROR_SIZE_MISMATCH (-5)
#define KVR_ERROR_RANGE (-6)
#define KVR_ERROR_NOT_SUPPORTED (-7)
#define KVR_ERROR_PERMISSION_DENIED (-8)
#define KVR_ERROR_OUT_OF_MEMORY (-9)
#define KVR_ERROR_NO_SPACE (-10)
#define KVR_ERROR_TOO_MANY_FDS (-11)
#define KVR_ERROR_BUSY (-12)
#define KVR_ERROR_NOT_QUIESCENT (-13)
#define KVR_ERROR_NOT_READY (-14)
#define KVR_ERROR_INCOMPATIBLE (-15)
#define KVR_ERROR_ATTACH_REFUSED (-16)
#define KVR_ERROR_KEEPER_UNAVAILABLE (-17)
#define KVR_ERROR_STALE_EPOCH (-18)
#define KVR_ERROR_STALE_BLOCK (-19)
#define KVR_ERROR_CORRUPT (-20)
#define KVR_ERROR_PROFILE (-21)
#define KVR_ERROR_PROTOCOL (-22)
#define KVR_ERROR_WAIT_TIMEOUT (-23)
#define KVR_ERROR_DRIVER (-24)
#define KVR_ERROR_SYSTEM_CALL (-25)
#define KVR_ERROR_FORKED (-26)

/* ---- details: which check failed; kvreuse/_status.py holds the text of each; v0..v3 are kvr_error.values ---- */
#define KVR_DETAIL_NONE 0
#define KVR_DETAIL_SYSTEM_CALL 1            /* a system call failed: errno in native_code, its name in call */
#define KVR_DETAIL_NBYTES_RANGE 2           /* v0 nbytes asked, v1 largest allowed */
#define KVR_DETAIL_HANDLE_NOT_POSITIVE 3    /* v0 handle */
#define KVR_DETAIL_HANDLE_UNKNOWN 4         /* v0 handle: its slot was never given out */
#define KVR_DETAIL_HANDLE_STALE 5           /* v0 handle: closed before */
#define KVR_DETAIL_HANDLE_SORT 6            /* v0 handle, v1 sort found, v2 sort expected (KVR_SORT_...) */
#define KVR_DETAIL_KIND_UNKNOWN 7           /* v0 kind */
#define KVR_DETAIL_KIND_NOT_ALLOCATABLE 8   /* v0 kind: this provider cannot allocate it */
#define KVR_DETAIL_KIND_NOT_EXPORTABLE 9    /* v0 kind of the region */
#define KVR_DETAIL_ACCESS_UNKNOWN 10        /* v0 access */
#define KVR_DETAIL_ACCESS_READ_ONLY 11      /* v0 handle: the fd is open for reading only */
#define KVR_DETAIL_FLAGS_UNKNOWN 12         /* v0 flags, v1 known flags */
#define KVR_DETAIL_REGION_MAPPED 13         /* v0 handle, v1 mappings that still exist */
#define KVR_DETAIL_MAPPING_IN_USE 14        /* v0 handle: views or a part still use it */
#define KVR_DETAIL_IMPORT_SIZE 15           /* v0 declared physical bytes, v1 observed bytes */
#define KVR_DETAIL_IMPORT_NBYTES 16         /* v0 nbytes declared, v1 physical bytes declared, v2 page bytes */
#define KVR_DETAIL_IMPORT_SEALS 17          /* v0 seals found, v1 seals required */
#define KVR_DETAIL_IMPORT_INODE 18          /* v0, v1 declared st_dev, st_ino; v2, v3 observed */
#define KVR_DETAIL_FD_NOT_MEMORY 19         /* v0 fd, v1 st_mode: neither a memfd nor a regular file */
#define KVR_DETAIL_FD_NEGATIVE 20           /* v0 fd */
#define KVR_DETAIL_NAME_TOO_LONG 21         /* v0 bytes of the name, v1 largest allowed */
#define KVR_DETAIL_FORKED 22                /* v0 pid that owns the library state, v1 this pid */
#define KVR_DETAIL_HANDLES_EXHAUSTED 23     /* v0 handles open */
#define KVR_DETAIL_SLOT_COUNT_RANGE 24      /* v0 asked, v1 largest allowed */
#define KVR_DETAIL_BLOCK_NBYTES_RANGE 25    /* v0 asked, v1 largest allowed */
#define KVR_DETAIL_REGION_COUNT_RANGE 26    /* v0 asked, v1 largest allowed */
#define KVR_DETAIL_MANIFEST_NBYTES_RANGE 27 /* v0 given, v1 largest allowed */
#define KVR_DETAIL_TABLE_NBYTES 28          /* v0 bytes of the memory, v1 bytes that the layout needs */
#define KVR_DETAIL_TABLE_MAGIC 29           /* v0 found, v1 expected */
#define KVR_DETAIL_TABLE_VERSION 30         /* v0 found, v1 expected */
#define KVR_DETAIL_TABLE_SUPERBLOCK_CRC 31  /* v0 stored, v1 computed */
#define KVR_DETAIL_TABLE_GEOMETRY 32        /* v0 offset in the superblock of the field that disagrees, v1 found, v2 expected */
#define KVR_DETAIL_TABLE_MANIFEST_CRC 33    /* v0 stored, v1 computed */
#define KVR_DETAIL_ROLE_UNKNOWN 34          /* v0 role */
#define KVR_DETAIL_ROLE_FORBIDS 35          /* v0 role of the session, v1 role needed */
#define KVR_DETAIL_ROW_RANGE 36             /* v0 row, v1 rows */
#define KVR_DETAIL_SESSION_RANGE 37         /* v0 session */
#define KVR_DETAIL_SESSION_FENCED 38        /* v0 this session, v1 the session that holds the place now */
#define KVR_DETAIL_PART_RETIRED 39          /* v0 state word */
#define KVR_DETAIL_PART_NOT_SEALED 40       /* v0 state word */
#define KVR_DETAIL_PART_DIRTY 41            /* a change was cut short and this session may not repair it */
#define KVR_DETAIL_LOCK_TIMEOUT 42          /* v0 waited ns, v1 pid of the holder, 0 if unknown, -1 if a thread of this process */
#define KVR_DETAIL_KEY_NBYTES 43            /* v0 index, v1 bytes, v2 largest allowed */
#define KVR_DETAIL_KEY_STRIDE 44            /* v0 stride, v1 largest allowed */
#define KVR_DETAIL_COUNT_RANGE 45           /* v0 count, v1 largest allowed */
#define KVR_DETAIL_SLOT_RANGE 46            /* v0 index, v1 slot, v2 slots of the part; at a reserve its capacity */
#define KVR_DETAIL_SLOT_REPEATED 47         /* v0 index, v1 slot */
#define KVR_DETAIL_SLOT_BUSY 48             /* v0 index, v1 slot: claimed or being written */
#define KVR_DETAIL_KEY_RESERVED 49          /* v0 index: its key is under another open reservation */
#define KVR_DETAIL_NO_FREE_SLOT 50          /* v0 needed, v1 free, v2 evictable */
#define KVR_DETAIL_GENERATION 51            /* v0 index, v1 slot, v2 generation carried, v3 generation found */
#define KVR_DETAIL_SLOT_STATE 52            /* v0 index, v1 slot, v2 state found, v3 state expected */
#define KVR_DETAIL_NOT_CLAIMED 53           /* v0 index, v1 slot: this session has no claim on it */
#define KVR_DETAIL_CLAIMS_FULL 54           /* v0 index, v1 slot, v2 largest claim count */
#define KVR_DETAIL_DATA_NOT_BOUND 55        /* v0 slot: the data region that holds it is not bound */
#define KVR_DETAIL_REGION_INDEX_RANGE 56    /* v0 index, v1 regions */
#define KVR_DETAIL_REGION_BIND_NBYTES 57    /* v0 bytes of the mapping, v1 bytes needed */
#define KVR_DETAIL_STATE_RANGE 58           /* v0 state asked */
#define KVR_DETAIL_TABLE_SEALED 59          /* v0 state word: only a fresh table can be created */
#define KVR_DETAIL_LAYOUT_NBYTES 60         /* the layout of v0 slots does not fit an int64 */
#define KVR_DETAIL_LOCK_IN_USE 61           /* v0 fd: the same lock memory is open under another fd of this process */
#define KVR_DETAIL_DRIVER_CALL 62           /* a driver call failed: CUresult in native_code, its name in call */
#define KVR_DETAIL_DRIVER_MISSING 63        /* libcuda.so.1 cannot be loaded */
#define KVR_DETAIL_DRIVER_ENTRY 64          /* the driver lacks the entry point in call */
#define KVR_DETAIL_ORDINAL_RANGE 65         /* v0 device ordinal, v1 devices */
#define KVR_DETAIL_DEVICE_LACKS_VMM 66      /* v0 device ordinal: its attribute 102 is 0 */
#define KVR_DETAIL_FABRIC_NOT_ALLOWED 67    /* the caller did not pass KVR_CUDA_ALLOW_FABRIC */
#define KVR_DETAIL_FABRIC_GIVEN_OUT 68      /* v0 region, v1 fabric handles given out and not declared done */
#define KVR_DETAIL_HANDLE_IN_CALL 69        /* v0 handle: another thread is in a call on it */
#define KVR_DETAIL_PROVIDER 70              /* v0 region, v1 its provider: the call is for the other kind of provider */
#define KVR_DETAIL_CUDA_GRANULARITY 71      /* v0 physical nbytes declared, v1 granularity of that allocation */
#define KVR_DETAIL_CUDA_MAPPED_NBYTES 72    /* v0 nbytes declared, v1 nbytes that the driver mapped */
#define KVR_DETAIL_CUDA_MAP_REFUSED 73      /* v0 nbytes declared: more than the allocation has */
#define KVR_DETAIL_CUDA_HANDLE_TYPES 74     /* v0 kind declared, v1 kinds that the allocation was made with (bits) */
#define KVR_DETAIL_CUDA_LOCATION 75         /* v0 device ordinal expected, v1 location type, v2 location id */
#define KVR_DETAIL_IMPORT_PHYSICAL 76       /* v0 nbytes, v1 physical nbytes: fewer */
#define KVR_DETAIL_NO_HOST_ADDRESS 77       /* v0 mapping: device memory, which the CPU cannot read */
#define KVR_DETAIL_THREAD_COUNT_RANGE 78    /* v0 threads asked, v1 largest allowed */
#define KVR_DETAIL_COPY_DST_RANGE 79        /* v0 index, v1 offset, v2 length, v3 bytes of the destination */
#define KVR_DETAIL_COPY_SRC_RANGE 80        /* v0 index, v1 offset, v2 length, v3 bytes of the source */
#define KVR_DETAIL_COPY_OVERLAP 81          /* v0, v1 entries whose destinations overlap */
#define KVR_DETAIL_COPY_CROSS_OVERLAP 82    /* v0 entry whose destination overlaps the source of entry v1 */
#define KVR_DETAIL_COPY_READ_ONLY 83        /* v0 mapping of the destination, 0 if it is foreign memory */
#define KVR_DETAIL_QUEUE_CLOSING 84         /* v0 queue: it takes no more work */
#define KVR_DETAIL_QUEUE_NOT_QUIESCENT 85   /* v0 queue, v1 operations that have not ended */
#define KVR_DETAIL_OPERATION_RUNNING 86     /* v0 operation: it has not ended */
#define KVR_DETAIL_AFTER_KIND 87            /* v0 index, v1 kind of a dependency: unknown */
#define KVR_DETAIL_AFTER_FAILED 88          /* v0 operation waited for, v1 its state */
#define KVR_DETAIL_QUARANTINE_FULL 89       /* v0 bytes in quarantine, v1 the limit */
#define KVR_DETAIL_MAPPING_IN_FLIGHT 90     /* v0 mapping, v1 operations that name it */
#define KVR_DETAIL_SLOT_IN_FLIGHT 91        /* v0 index, v1 slot, v2 operations that name it */
#define KVR_DETAIL_SLOT_SPOILED 92          /* v0 index, v1 slot: a copy into it failed or was cancelled */
#define KVR_DETAIL_TABLE_IN_FLIGHT 93       /* v0 table, v1 operations that name its slots */
#define KVR_DETAIL_COPY_SHORT 94            /* v0 index, v1 bytes moved, v2 bytes asked */
#define KVR_DETAIL_BLOCK_CRC 95             /* v0 index, v1 slot, v2 CRC at commit, v3 CRC found */
#define KVR_DETAIL_SLOT_GIVEN_UP 96         /* v0 index, v1 slot: its reservation was aborted */
#define KVR_DETAIL_NOT_QUARANTINED 97       /* v0 operation */
#define KVR_DETAIL_NO_FAULTS 98             /* v0 queue: it was not opened with KVR_QUEUE_FAULTS */
#define KVR_DETAIL_FAULT_UNKNOWN 99         /* v0 fault */
#define KVR_DETAIL_OPERATION_ABANDONED 100  /* v0 operation: an operator gave its memory back */
#define KVR_DETAIL_SEGMENT_RANGE 101        /* v0 segment, v1 offset in the slot, v2 bytes, v3 bytes of a slot */
#define KVR_DETAIL_ENGINE_BLOCK_RANGE 102   /* v0 index, v1 engine block, v2 segment, v3 bytes of its memory */
#define KVR_DETAIL_DIRECTION_UNKNOWN 103    /* v0 direction */
#define KVR_DETAIL_OPERATION_CANCELLED 104  /* v0 operation */
#define KVR_DETAIL_STRIDE_RANGE 105         /* v0 segment, v1 offset, v2 stride, v3 bytes of a block */
#define KVR_DETAIL_ADDRESS_RANGE 106        /* v0 address, v1 bytes */
#define KVR_DETAIL_PART_UNREADY 108         /* the keeper says that no live writer stands behind the part */
#define KVR_DETAIL_PERIOD_RANGE 109         /* v0 ns asked, v1 least, v2 most allowed */
#define KVR_DETAIL_HEARTBEAT_RUNS 110       /* v0 table: it has one */
#define KVR_DETAIL_CONTENT_EPOCH 107        /* v0 index, v1 slot, v2 low 32 bits of the content epoch at its reserve, v3 of that now */

/* ---- sorts of handles ---- */
#define KVR_SORT_REGION 1
#define KVR_SORT_MAPPING 2
#define KVR_SORT_LOCK 3
#define KVR_SORT_TABLE 4
#define KVR_SORT_QUEUE 5
#define KVR_SORT_OPERATION 6

/* ---- kinds and access: the numbers are CUDA's (cuda.h, CUmemAllocationHandleType and CUmemAccess_flags) ---- */
#define KVR_KIND_NONE 0
#define KVR_KIND_POSIX_FD 1
#define KVR_KIND_FABRIC 8
#define KVR_ACCESS_NONE 0
#define KVR_ACCESS_READ 1
#define KVR_ACCESS_READ_WRITE 3

#define KVR_NATIVE_NONE 0
#define KVR_NATIVE_ERRNO 1
#define KVR_NATIVE_CUDA 2

#define KVR_ORIGIN_ALLOCATED 1
#define KVR_ORIGIN_IMPORTED 2

#define KVR_MAP_DONTFORK 1          /* a forked child does not get this mapping (madvise MADV_DONTFORK) */
#define KVR_IMPORT_ALLOW_UNSEALED 1 /* accept memory whose size the peer could change (file fallback) */
#define KVR_CLOSE_WAIT_NS 1000000000 /* how long closing waits for other threads' calls on the same thing */
#define KVR_REGION_NAME_NBYTES 200  /* largest name of a memfd, without the final NUL */
#define KVR_REGION_ID_NBYTES 16
#define KVR_PLACEMENT_COUNT_MAX 1024

#define KVR_PROVIDER_HOST (-1) /* a region's provider: this, or the ordinal of its CUDA device */
#define KVR_ORDINAL_COUNT_MAX 64
#define KVR_FABRIC_NBYTES 64
#define KVR_CUDA_ALLOW_FABRIC 1 /* the profile allows fabric allocations */
/* Optional entry points that this driver has. */
#define KVR_CUDA_HAS_BATCH_COPY 1
#define KVR_CUDA_HAS_STREAM_QUERY 2
#define KVR_CUDA_HAS_ADDRESS_RANGE_HANDLE 4

/* ---- copies ---- */
#define KVR_THREAD_COUNT_MAX 64
#define KVR_QUEUE_FAULTS 1         /* kvr_queue_fault may be used: for tests */
#define KVR_COPY_INLINE_NBYTES 65536 /* a batch of host memory up to this size is copied by the thread that submits it */

#define KVR_OPERATION_QUEUED 0
#define KVR_OPERATION_RUNNING 1
#define KVR_OPERATION_DONE 2       /* every byte moved, and what was to be committed is */
#define KVR_OPERATION_FAILED 3
#define KVR_OPERATION_CANCELLED 4

#define KVR_DIRECTION_IN 1         /* engine memory to slots */
#define KVR_DIRECTION_OUT 2        /* slots to engine memory */
#define KVR_SLOTS_COMMIT 1         /* IN: commit the slots when all bytes have moved; abort them when the operation ends otherwise */
#define KVR_SLOTS_CHECKSUM 2       /* with COMMIT: as KVR_COMMIT_CHECKSUM */
#define KVR_SLOTS_VERIFY 4         /* OUT: compare whole blocks with the CRC of their commit before the first byte moves */

#define KVR_AFTER_FD 1             /* value: an fd that polls readable when the wait is over (an eventfd); it is not read */
#define KVR_AFTER_OPERATION 2      /* value: an operation that has to end DONE */
#define KVR_AFTER_CUDA_EVENT 3     /* value: a recorded CUevent of the device in `device` */

#define KVR_QUARANTINE_CLOSE 1     /* why: its queue was to be closed, and it did not end in time */
#define KVR_QUARANTINE_DRIVER 2    /* why: the driver does not tell whether it has ended */

#define KVR_FAULT_NONE 0
#define KVR_FAULT_PAUSE 1          /* stop at byte `value` of the operation until kvr_queue_resume() */
#define KVR_FAULT_ERRNO 2          /* entry `index` fails with errno `value` */
#define KVR_FAULT_SHORT 3          /* entry `index` moves only `value` bytes */
#define KVR_FAULT_SUBMIT 4         /* the submit itself fails with errno `value`, after all else */

/* What went wrong in this thread's last failed call. */
typedef struct kvr_error {
    int32_t status;        /* KVR_ERROR_... */
    int32_t detail;        /* KVR_DETAIL_... */
    int32_t native_source; /* KVR_NATIVE_... */
    int32_t reserved0;     /* zero */
    int64_t native_code;   /* errno or CUresult */
    int64_t values[4];     /* meaning by detail */
    char call[48];         /* the system or driver call, else the function without kvr_; NUL-terminated */
} kvr_error;

/* What this library keeps about a region. Not an observation: see kvr_observation. */
typedef struct kvr_region_info {
    int64_t handle;
    int64_t nbytes;          /* as asked */
    int64_t physical_nbytes; /* rounded up to pages; CUDA: to the granularity of this allocation */
    int32_t kind;            /* KVR_KIND_... */
    int32_t access;          /* largest access that its fd allows; CUDA: READ_WRITE */
    int32_t origin;          /* KVR_ORIGIN_... */
    int32_t mapping_count;   /* mappings of it in this process */
    uint64_t device;         /* st_dev of its memory; 0 for CUDA */
    uint64_t inode;          /* st_ino of its memory; 0 for CUDA */
    uint8_t region_id[16];
    int32_t provider;        /* KVR_PROVIDER_HOST, or the device's ordinal */
    int32_t fabric_count;    /* fabric handles given out and not declared done */
} kvr_region_info;

typedef struct kvr_mapping_info {
    int64_t handle;
    int64_t region;      /* handle of the region */
    uint64_t address;    /* first byte in this process; CUDA: a device address, 0 after an unmap that failed half-way */
    int64_t nbytes;      /* bytes that a view may use: the region's nbytes */
    int32_t access;      /* KVR_ACCESS_... */
    int32_t use_count;   /* views and parts that use it */
} kvr_mapping_info;

/* What the kernel says of a host region now. A field that it cannot say is -1. */
typedef struct kvr_observation {
    int64_t file_nbytes;      /* fstat: st_size */
    int64_t allocated_nbytes; /* fstat: st_blocks * 512 */
    uint64_t device;          /* fstat: st_dev */
    uint64_t inode;           /* fstat: st_ino */
    int64_t file_mode;        /* fstat: st_mode */
    int64_t seals;            /* fcntl F_GET_SEALS; -1 where the file cannot have seals */
    int64_t access;           /* fcntl F_GETFL, as KVR_ACCESS_... */
    int64_t page_nbytes;      /* sysconf(_SC_PAGESIZE) */
    int64_t block_nbytes;     /* fstat: st_blksize */
    int64_t reserved0;        /* zero */
} kvr_observation;

/* A CUDA device and its driver, as the driver reports them. */
typedef struct kvr_cuda_info {
    int32_t ordinal;
    int32_t driver_version; /* cuDriverGetVersion */
    int32_t vmm;            /* device attribute 102 */
    int32_t posix_fd;       /* device attribute 103 */
    int32_t fabric;         /* device attribute 128; 1 does not mean that a create succeeds */
    uint32_t features;      /* KVR_CUDA_HAS_... */
    uint8_t uuid[16];       /* cuDeviceGetUuid_v2 */
} kvr_cuda_info;

/* What the driver says of a region now. Of each group that it would not tell, the fields are -1 and the result says why. */
typedef struct kvr_cuda_observation {
    int64_t handle_types;         /* cuMemGetAllocationPropertiesFromHandle: kinds it was made with (bits) */
    int64_t allocation_type;      /* PINNED 1 */
    int64_t location_type;        /* DEVICE 1, HOST 2, HOST_NUMA 3 */
    int64_t location_id;
    int64_t granularity_min;      /* cuMemGetAllocationGranularity of these properties, bytes */
    int64_t granularity_recommended;
    int64_t mapped_nbytes;        /* of one mapping in this process: cuMemGetAddressRange_v2; it has no size of unmapped memory */
    int64_t reserved_nbytes;      /* cuPointerGetAttribute 12: the address reservation */
    int64_t allowed_handle_types; /* cuPointerGetAttribute 14 */
    int64_t access;               /* cuMemGetAccess of this device */
    uint64_t mapped_base;         /* cuMemGetAddressRange_v2; 0 if not mapped here */
    int32_t properties_result;    /* CUresult of each group of calls, 0: told; -1: not asked, the region is not mapped */
    int32_t granularity_result;
    int32_t range_result;
    int32_t reservation_result;
    int32_t allowed_result;
    int32_t access_result;
} kvr_cuda_observation;

/* Memory that a copy names: a mapping of this library, or foreign memory that the caller keeps alive until the operation has ended. */
typedef struct kvr_memory {
    int64_t mapping;     /* its handle; 0: foreign */
    uint64_t address;    /* foreign: the first byte */
    int64_t nbytes;      /* foreign: bytes from there */
    int64_t device;      /* foreign: KVR_PROVIDER_HOST, or the ordinal of the CUDA device that the address is of */
    int64_t is_writable; /* foreign: 0 or 1 */
} kvr_memory;

/* A slice of every block: where an engine keeps it, and where in a slot it lies. Engine block i is at offset + i * stride. */
typedef struct kvr_segment {
    int64_t mapping; /* the engine's memory, as in kvr_memory */
    uint64_t address;
    int64_t memory_nbytes;
    int64_t device;
    int64_t is_writable;
    int64_t offset_bytes;      /* of engine block 0 */
    int64_t stride_bytes;      /* from one engine block to the next, at least nbytes */
    int64_t slot_offset_bytes; /* in the slot */
    int64_t nbytes;            /* of one block */
} kvr_segment;

/* What an operation waits for before it touches any memory. */
typedef struct kvr_dependency {
    int64_t kind;   /* KVR_AFTER_... */
    int64_t value;
    int64_t device; /* of a CUDA event; else 0 */
} kvr_dependency;

typedef struct kvr_queue_info {
    int64_t handle;
    int32_t fd;           /* an eventfd: readable while kvr_queue_completed() has something to tell; the queue's */
    int32_t thread_count;
    int64_t submitted;    /* operations accepted; always the sum of the five below */
    int64_t done;
    int64_t failed;
    int64_t cancelled;
    int64_t queued;
    int64_t running;
    int32_t is_closing;
    int32_t paused;       /* threads that a fault has stopped */
} kvr_queue_info;

typedef struct kvr_operation_info {
    int64_t handle;
    int64_t queue;            /* 0 once its queue is closed */
    int32_t state;            /* KVR_OPERATION_... */
    int32_t quarantine;       /* KVR_QUARANTINE_..., 0: not in quarantine */
    int64_t entry_count;      /* entries that have bytes */
    int64_t total_nbytes;
    int64_t moved_nbytes;
    int64_t failed_index;     /* FAILED: the entry, -1 if it is not about one */
    int64_t quarantine_ns;    /* CLOCK_MONOTONIC at which it came into quarantine */
} kvr_operation_info;

/* Copies of this process. */
typedef struct kvr_copy_counts {
    int64_t queues;
    int64_t operations;        /* handles not yet released */
    int64_t in_flight;         /* operations that have not ended */
    int64_t quarantined;       /* so many of them are in quarantine */
    int64_t quarantine_nbytes; /* bytes that these were to move */
    int64_t quarantine_limit;  /* above it no new work is accepted */
    int64_t fds;               /* file descriptors that queues and operations own */
} kvr_copy_counts;

/* Open handles of this process. */
typedef struct kvr_handle_counts {
    int64_t regions;
    int64_t mappings;
    int64_t locks;
    int64_t tables;
    int64_t fds; /* file descriptors that they own */
} kvr_handle_counts;

/* ---- the part: shared-memory records; little-endian machines only ---- */
#define KVR_TABLE_MAGIC INT64_C(0x314553554552564B) /* the bytes "KVREUSE1" */
#define KVR_TABLE_VERSION 1
#define KVR_KEY_NBYTES 32
#define KVR_ROW_COUNT 64
#define KVR_WORDS_OFFSET_BYTES 4096
#define KVR_MANIFEST_OFFSET_BYTES 8192
#define KVR_MANIFEST_NBYTES_MAX 1048576
#define KVR_SLOT_COUNT_MAX 1073741824
#define KVR_REGION_COUNT_MAX 4096
#define KVR_NBYTES_MAX INT64_C(0x3FFFFFFFFFFFFFFF)
#define KVR_CLAIM_COUNT_BITS 20 /* low bits of a claims word: count; the rest: touch stamp */
#define KVR_CLAIM_COUNT_MAX 1048575
#define KVR_BATCH_COUNT_MAX 16777216

#define KVR_SLOT_FREE 0
#define KVR_SLOT_WRITING 1
#define KVR_SLOT_SEALED 2
#define KVR_RECORD_HAS_DATA_CRC 1 /* flag: data_crc was computed at commit */

#define KVR_PART_CREATING 0
#define KVR_PART_LAYOUT_SEALED 1
#define KVR_PART_RETIRED 2

#define KVR_ROLE_READER 1
#define KVR_ROLE_WRITER 2
#define KVR_ROLE_KEEPER 3

#define KVR_RESERVE_EVICT 1
#define KVR_RESERVE_DUPLICATE 2
#define KVR_COMMIT_CHECKSUM 1
#define KVR_WRITER_SESSION_NONE 0
#define KVR_BEAT_MIN_NS 1000000
#define KVR_BEAT_MAX_NS INT64_C(3600000000000)

/* First page of the table memory. Immutable once the part is sealed. The version is read before anything after it. */
typedef struct kvr_superblock {
    int64_t magic;                 /* KVR_TABLE_MAGIC */
    uint32_t version;              /* KVR_TABLE_VERSION */
    uint32_t superblock_crc;       /* CRC32C of these 256 bytes with this field zero */
    uint8_t part_id[16];
    int64_t table_nbytes;          /* bytes of the table memory, whole pages */
    int64_t claims_nbytes;         /* bytes of the claims memory: row_count * row_nbytes */
    int64_t slot_count;
    int64_t block_nbytes;          /* a slot's bytes; slots lie without gaps in their region */
    int64_t region_count;          /* data regions */
    int64_t slots_per_region;      /* ceil(slot_count / region_count): slot s is in region s / slots_per_region */
    int64_t manifest_offset_bytes; /* KVR_MANIFEST_OFFSET_BYTES */
    int64_t manifest_nbytes;
    uint32_t manifest_crc;         /* CRC32C of the manifest's bytes */
    uint32_t reserved0;            /* zero */
    int64_t record_offset_bytes;
    int64_t link_offset_bytes;
    int64_t bucket_offset_bytes;
    int64_t bucket_count;          /* a power of two */
    int64_t row_nbytes;
    int64_t row_count;             /* KVR_ROW_COUNT */
    int64_t ring_offset_bytes;     /* zero: no change ring in this version */
    int64_t ring_count;            /* zero */
    uint8_t reserved1[88];         /* zero */
} kvr_superblock;

/* Second page: the words that change. Each is stored whole; shared ones have a cache line of their own. */
typedef struct kvr_words {
    int64_t state;          /* KVR_PART_... */
    int64_t pad0[7];
    int64_t content_epoch;  /* from 1; a record counts only if its epoch is this one */
    int64_t pad1[7];
    int64_t writer_session; /* the session that may change the table; KVR_WRITER_SESSION_NONE */
    int64_t pad2[7];
    int64_t dirty;          /* 1 while the derived structures may disagree with the records */
    int64_t pad3[7];
    int64_t ring_epoch;     /* zero in this version */
    int64_t pad4[7];
    int64_t clock;          /* the last recency stamp given out by the writer */
    int64_t pad5[7];
    int64_t heartbeat;      /* CLOCK_MONOTONIC ns at which the writer's thread last stored it; 0: it has none */
    int64_t pad6[7];
    int64_t free_head;      /* derived from here: slot or -1 */
    int64_t lru_oldest;     /* slot or -1 */
    int64_t lru_newest;     /* slot or -1 */
    int64_t free_count;
    int64_t writing_count;
    int64_t sealed_count;   /* SEALED and of the content epoch */
    int64_t stale_count;    /* SEALED of an older epoch: not content, kept only while claimed */
    int64_t pad7;
    int64_t stored_total;   /* counters since the part was created: commits */
    int64_t evicted_total;  /* by capacity: reserve with KVR_RESERVE_EVICT, evict */
    int64_t replaced_total; /* overwritten by a reserve with named slots */
    int64_t cleared_total;  /* by clear, reset, expire */
    int64_t corrupt_total;  /* records or data found bad */
    int64_t freed_total;    /* unfinished slots of a dead writer */
    int64_t pad8[2];
    int64_t capacity;       /* so many slots may be other than FREE; 0: all of them */
    int64_t unready;        /* 1: readers find nothing, since the keeper knows of no live, confirmed writer */
    int64_t pad9[54];
    int64_t row_session[64]; /* session that owns claims row i, 0 if none; written by the keeper */
    int64_t pad10[320];
} kvr_words;

/* One slot: the truth. The state is stored last, with release order. 64 bytes, one cache line. */
typedef struct kvr_record {
    uint8_t key[32];        /* the first key_nbytes count, the rest is zero */
    int64_t generation;     /* +1 at every reserve */
    int64_t recency;        /* stamp; larger is newer; not covered by record_crc */
    uint32_t content_epoch; /* low 32 bits of the epoch at reserve, which commit needs to be the same; 0: never content */
    uint32_t data_crc;      /* CRC32C of the slot's bytes, if flags say so */
    uint32_t record_crc;    /* CRC32C of bytes 0..39, 48..55 and 60..61 in this order */
    uint8_t key_nbytes;     /* 1 to 32 */
    uint8_t flags;          /* KVR_RECORD_... */
    uint8_t owner_row;      /* claims row of the session that reserved it */
    uint8_t state;          /* KVR_SLOT_... */
} kvr_record;

/* Derived, one a slot: rebuilt from the records when dirty. prev and next serve the free list (FREE) or recency (SEALED). */
typedef struct kvr_link {
    int32_t chain_next; /* next slot in the same bucket, -1 at the end; WRITING and SEALED slots are in a chain */
    int32_t prev;       /* recency: next older; free list: previous; -1 */
    int32_t next;       /* recency: next newer; free list: next; -1 */
    uint32_t key_hash;  /* CRC32C of the key's bytes; bucket = key_hash & (bucket_count - 1) */
} kvr_link;

/* First bytes of a claims row; 8 bytes a slot follow, each (stamp << KVR_CLAIM_COUNT_BITS) | count. */
typedef struct kvr_row_header {
    int64_t last_stamp; /* largest stamp that this session gave out */
    int64_t reserved[7];
} kvr_row_header;

typedef struct kvr_table_layout {
    int64_t table_nbytes;
    int64_t claims_nbytes;
    int64_t record_offset_bytes;
    int64_t link_offset_bytes;
    int64_t bucket_offset_bytes;
    int64_t bucket_count;
    int64_t row_nbytes;
    int64_t reserved0; /* zero */
} kvr_table_layout;

/* What a part is, read from its superblock. */
typedef struct kvr_table_info {
    uint8_t part_id[16];
    int64_t slot_count;
    int64_t block_nbytes;
    int64_t region_count;
    int64_t slots_per_region;
    int64_t manifest_nbytes;
    int64_t session;
    int32_t role;
    int32_t row;
    int64_t operation_count; /* operations of this process that name its slots and have not ended */
    int64_t content_epoch;   /* it moves when the part is emptied */
    int64_t heartbeat_ns;    /* the writer's last heartbeat, CLOCK_MONOTONIC; 0: it has none */
    int64_t capacity;        /* so many slots may be other than FREE */
} kvr_table_info;

typedef struct kvr_table_stats {
    int64_t state;
    int64_t content_epoch;
    int64_t writer_session;
    int64_t dirty;
    int64_t slot_count;
    int64_t free_count;
    int64_t writing_count;
    int64_t sealed_count;
    int64_t stale_count;
    int64_t claimed_count; /* slots with a claim of any session */
    int64_t stored_total;
    int64_t evicted_total;
    int64_t replaced_total;
    int64_t cleared_total;
    int64_t corrupt_total;
    int64_t freed_total;
    int64_t owned_count; /* slots that operations of this process write into */
} kvr_table_stats;

typedef struct kvr_restore_result {
    int64_t sealed_count; /* blocks that count */
    int64_t bad_count;    /* records whose checksum failed: freed */
    int64_t freed_count;  /* unfinished or stale slots: freed */
    int64_t reserved0;    /* zero */
} kvr_restore_result;

/* ==== library ==== */

/* Tell the ABI version that this library was built with.
 * In: nothing.  Out: the version.  Owner: none.  After failure: cannot fail.  Errors: none.
 * Threads: any; does not block.  Since: 1 */
int32_t kvr_abi_version(void);

/* Copy a number through the boundary unchanged, to prove its width.
 * In: value, any.  Out: *out.  Owner: none.  After failure: cannot fail.  Errors: none.
 * Threads: any; does not block.  Since: 1 */
int32_t kvr_echo(int64_t value, int64_t *out);

/* Read what this thread's last failed call found.
 * In: nothing.  Out: *out, zeroed if no call of this thread failed yet.  Owner: the caller owns *out.
 * After failure: cannot fail.  Errors: none.  Threads: any; does not block.  Since: 1 */
int32_t kvr_error_get(kvr_error *out);

/* Compute CRC32C (Castagnoli, reflected, as in RFC 3720) by the CPU's instruction, portable otherwise.
 * In: value, the CRC of the bytes before (0 to start); data, nbytes >= 0.  Out: *out.  Owner: data borrowed.
 * After failure: *out unchanged.  Errors: RANGE(NBYTES_RANGE).  Threads: any; takes time by nbytes, no lock.  Since: 1 */
int32_t kvr_crc32c(uint32_t value, const void *data, int64_t nbytes, uint32_t *out);

/* Count the open handles and the fds that they own.
 * In: nothing.  Out: *out.  Owner: the caller owns *out.  After failure: cannot fail.  Errors: none.
 * Threads: any; takes the handle mutex.  Since: 1 */
int32_t kvr_handle_counts_get(kvr_handle_counts *out);

/* ==== regions and mappings ==== */

/* Allocate anonymous memory that other processes can map.
 * In: nbytes 1..KVR_NBYTES_MAX; kind NONE or POSIX_FD; name, NUL-terminated, shown as /memfd:NAME; directory NULL for a
 *   memfd, else a folder in which an unnamed file is made and its blocks are allocated at once.
 * Out: *out; the memory reads as zeros; memfds carry F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_SEAL.
 * Owner: the handle is owned by the caller: kvr_region_close().  After failure: nothing is left open.
 * Errors: RANGE(NBYTES_RANGE, NAME_TOO_LONG), NOT_SUPPORTED(KIND_NOT_ALLOCATABLE: FABRIC), RANGE(KIND_UNKNOWN), FORKED;
 *   TOO_MANY_FDS, NO_SPACE, OUT_OF_MEMORY, PERMISSION_DENIED, NOT_SUPPORTED or SYSTEM_CALL by errno (SYSTEM_CALL detail).
 * Threads: any; may block in the kernel.  Since: 1 */
int32_t kvr_host_allocate(int64_t nbytes, int32_t kind, const char *name, const char *directory, kvr_region_info *out);

/* Tell what is kept about a region.
 * In: region.  Out: *out.  Owner: the caller owns *out.  After failure: nothing changed.
 * Errors: INVALID_HANDLE, STALE_HANDLE.  Threads: any; takes the handle mutex.  Since: 1 */
int32_t kvr_region_info_get(int64_t region, kvr_region_info *out);

/* Give a new fd of the region's memory.
 * In: region of kind POSIX_FD.  Out: *out_fd.  Owner: the fd is owned by the caller, who closes it; while open it pins the
 *   memory.  After failure: no fd is left.  Errors: INVALID_HANDLE, STALE_HANDLE, NOT_SUPPORTED(KIND_NOT_EXPORTABLE), FORKED,
 *   TOO_MANY_FDS or SYSTEM_CALL; CUDA: by the driver.  Threads: any; does not block.  Since: 1 */
int32_t kvr_region_export(int64_t region, int32_t *out_fd);

/* Make a region of memory that another process gave as an fd, after observing that it is what was declared.
 * In: fd, borrowed (dup'ed); nbytes 1..physical_nbytes; physical_nbytes = nbytes rounded up to pages; region_id, 16 bytes;
 *   device and inode as declared, both 0 if none were; flags KVR_IMPORT_....
 * Out: *out.  Owner: the handle by the caller; the fd stays the caller's.  After failure: nothing is left open.
 * Errors, in this order of checks: RANGE(FLAGS_UNKNOWN, FD_NEGATIVE, NBYTES_RANGE), SIZE_MISMATCH(IMPORT_NBYTES: not nbytes
 *   rounded up to pages), SYSTEM_CALL(fstat EBADF), KIND_MISMATCH(FD_NOT_MEMORY), STALE_HANDLE(IMPORT_INODE),
 *   SIZE_MISMATCH(IMPORT_SIZE), PERMISSION_DENIED(IMPORT_SEALS: F_SEAL_SHRINK is missing and flags do not allow it),
 *   FORKED, TOO_MANY_FDS.  Threads: any; does not block.  Since: 1 */
int32_t kvr_region_import(int32_t fd, int64_t nbytes, int64_t physical_nbytes, const uint8_t *region_id, uint64_t device,
                          uint64_t inode, uint32_t flags, kvr_region_info *out);

/* Ask the kernel what the region's memory is now.
 * In: region.  Out: *out.  Owner: the caller owns *out.  After failure: nothing changed.
 * Errors: INVALID_HANDLE, STALE_HANDLE, SYSTEM_CALL.  Threads: any; does not block.  Since: 1 */
int32_t kvr_region_observe(int64_t region, kvr_observation *out);

/* Ask the kernel on which NUMA nodes a sample of the region's pages lies, through a mapping of it in this process.
 * In: region; capacity 1..KVR_PLACEMENT_COUNT_MAX, the pages to look at, spread evenly from the first to the last.
 * Out: *out_count = min(capacity, pages of the region), 0 if this process has no mapping of it; nodes[i] the node, or a negative
 *   errno: -2 (ENOENT) where nothing was touched yet, through this mapping or at all.
 * Owner: the array is the caller's.  After failure: nothing changed.
 * Errors: INVALID_HANDLE, STALE_HANDLE, RANGE(COUNT_RANGE), FORKED; SYSTEM_CALL, PERMISSION_DENIED or NOT_SUPPORTED by move_pages(2).
 * Threads: any; takes the handle mutex for the call.  Since: 1 */
int32_t kvr_region_placement(int64_t region, int64_t capacity, int64_t *nodes, int64_t *out_count);

/* Map a region whole. Each call makes one more mapping, at an address of its own. CUDA memory is mapped for its own device, and
 *   the size that the driver reports of the mapping is compared with the declared one.
 * In: region; access READ or READ_WRITE; flags KVR_MAP_... (DONTFORK is always so for CUDA memory).
 * Out: *out.  Owner: the mapping by the caller: kvr_mapping_unmap().  After failure: nothing is left mapped.
 * Errors: INVALID_HANDLE, STALE_HANDLE, RANGE(ACCESS_UNKNOWN, FLAGS_UNKNOWN), PERMISSION_DENIED(ACCESS_READ_ONLY), FORKED,
 *   OUT_OF_MEMORY or SYSTEM_CALL; CUDA: SIZE_MISMATCH(CUDA_MAP_REFUSED, CUDA_MAPPED_NBYTES), or by the driver.
 * Threads: any; may block in the kernel.  Since: 1 */
int32_t kvr_region_map(int64_t region, int32_t access, uint32_t flags, kvr_mapping_info *out);

/* Close a region: its fd is closed, or its driver handle released; its handle is never valid again. Memory goes when nobody
 *   holds it.
 * In: region without mappings, and of which every fabric handle given out is done.
 * Out: nothing.  Owner: the handle is consumed.  After failure: still open.
 * Errors: INVALID_HANDLE, STALE_HANDLE, BUSY(REGION_MAPPED, FABRIC_GIVEN_OUT, HANDLE_IN_CALL), FORKED; CUDA: by the driver.
 * Threads: any; may block in the kernel; waits up to KVR_CLOSE_WAIT_NS for calls of other threads on it.  Since: 1 */
int32_t kvr_region_close(int64_t region);

/* Tell what is kept about a mapping.
 * In: mapping.  Out: *out.  Owner: the caller owns *out.  After failure: nothing changed.
 * Errors: INVALID_HANDLE, STALE_HANDLE.  Threads: any; takes the handle mutex.  Since: 1 */
int32_t kvr_mapping_info_get(int64_t mapping, kvr_mapping_info *out);

/* Add (+1) or drop (-1) a use of a mapping. Uses of views and of tables that are bound to it cannot be dropped so.
 * In: mapping; delta 1 or -1.  Out: nothing.  Owner: a used mapping cannot be unmapped.  After failure: nothing changed.
 * Errors: INVALID_HANDLE, STALE_HANDLE, RANGE(COUNT_RANGE).  Threads: any; takes the handle mutex.  Since: 1 */
int32_t kvr_mapping_use(int64_t mapping, int32_t delta);

/* Unmap.
 * In: mapping that nothing uses.  Out: nothing.  Owner: the handle is consumed.  After failure: still mapped; CUDA: or, where
 *   only giving back the addresses failed, unmapped, with the handle there for another try.
 * Errors: INVALID_HANDLE, STALE_HANDLE, BUSY(MAPPING_IN_USE, HANDLE_IN_CALL), FORKED, SYSTEM_CALL; CUDA: by the driver.
 * Threads: any; may block; waits up to KVR_CLOSE_WAIT_NS for calls of other threads on it.  Since: 1 */
int32_t kvr_mapping_unmap(int64_t mapping);

/* ==== CUDA memory: libcuda.so.1 is loaded at the first call; nothing links to it ====
 * A driver error is a status by its CUresult: 2 OUT_OF_MEMORY, 100 and 801 NOT_SUPPORTED, 800 PERMISSION_DENIED, else DRIVER, all with
 * the detail DRIVER_CALL. Each call sets the device's primary context, which is retained at the first one and kept for the life
 * of the process, and sets back the thread's own one. */

/* Load the driver, take a device, and tell what they are.
 * In: ordinal 0..devices-1.  Out: *out.  Owner: the caller owns *out.  After failure: what was loaded stays for the next try.
 * Errors: NOT_SUPPORTED(DRIVER_MISSING, DRIVER_ENTRY), RANGE(ORDINAL_RANGE), FORKED, or by the driver.
 * Threads: any; may block in the driver.  Since: 1 */
int32_t kvr_cuda_info_get(int32_t ordinal, kvr_cuda_info *out);

/* Allocate device memory that other processes can import.
 * In: ordinal as above; nbytes 1..KVR_NBYTES_MAX; kind NONE, POSIX_FD or, with KVR_CUDA_ALLOW_FABRIC in flags, FABRIC.
 * Out: *out; physical_nbytes is nbytes rounded up to the minimum granularity of this very allocation.
 * Owner: the handle is owned by the caller: kvr_region_close().  After failure: nothing is left allocated.
 * Errors: RANGE(NBYTES_RANGE, KIND_UNKNOWN, FLAGS_UNKNOWN), PROFILE(FABRIC_NOT_ALLOWED), NOT_SUPPORTED(DEVICE_LACKS_VMM), those of
 *   kvr_cuda_info_get(), or by the driver.  Threads: any; may block in the driver.  Since: 1 */
int32_t kvr_cuda_allocate(int32_t ordinal, int64_t nbytes, int32_t kind, uint32_t flags, kvr_region_info *out);

/* Import device memory that another process exported.
 * In: ordinal; kind POSIX_FD with fd, or FABRIC with 64 bytes at fabric (the other one is ignored); nbytes and physical_nbytes as
 *   the exporter declared them; region_id 16 bytes.
 * Out: *out. No driver call tells the size of unmapped memory: it is checked by kvr_region_map().
 * Owner: the handle is owned by the caller; fd stays the caller's, to close after the import.  After failure: nothing is left imported.
 * Errors: RANGE(NBYTES_RANGE, KIND_UNKNOWN, FD_NEGATIVE), SIZE_MISMATCH(IMPORT_PHYSICAL, CUDA_GRANULARITY), KIND_MISMATCH(
 *   CUDA_HANDLE_TYPES), INCOMPATIBLE(CUDA_LOCATION), SYSTEM_CALL for an fd that is not open, those of kvr_cuda_info_get(), or by the driver.
 * Threads: any; may block in the driver.  Since: 1 */
int32_t kvr_cuda_import(int32_t ordinal, int32_t kind, int32_t fd, const uint8_t *fabric, int64_t nbytes, int64_t physical_nbytes,
                        const uint8_t *region_id, kvr_region_info *out);

/* Give a fabric handle of a region. It pins nothing: the region cannot be closed until kvr_cuda_fabric_done() was called as often.
 * In: region of kind FABRIC.  Out: 64 bytes at out_fabric.  Owner: bytes, owned by nobody.  After failure: nothing was given out.
 * Errors: INVALID_HANDLE, STALE_HANDLE, NOT_SUPPORTED(KIND_NOT_EXPORTABLE), FORKED, or by the driver.
 * Threads: any; may block in the driver.  Since: 1 */
int32_t kvr_cuda_export_fabric(int64_t region, uint8_t *out_fabric);

/* Declare that one fabric handle of a region was imported by all who will import it, or will not be used.
 * In: region.  Out: nothing.  Owner: none.  After failure: nothing changed.
 * Errors: INVALID_HANDLE, STALE_HANDLE, RANGE(COUNT_RANGE: none is out).  Threads: any; takes the handle mutex.  Since: 1 */
int32_t kvr_cuda_fabric_done(int64_t region);

/* Ask the driver what a region is now.
 * In: region of a CUDA device.  Out: *out.  Owner: the caller owns *out.  After failure: nothing changed.
 * Errors: INVALID_HANDLE, STALE_HANDLE, NOT_SUPPORTED(PROVIDER), FORKED, or by the driver where it tells nothing at all.
 * Threads: any; may block in the driver.  Since: 1 */
int32_t kvr_cuda_observe(int64_t region, kvr_cuda_observation *out);

/* ==== the part's table ==== */

/* Compute where things lie in a part's table and claims memory.
 * In: slot_count 1..KVR_SLOT_COUNT_MAX; manifest_nbytes 0..KVR_MANIFEST_NBYTES_MAX.
 * Out: *out. All offsets are multiples of 4096, in the order manifest, records, links, buckets; bucket_count is the smallest
 *   power of two >= max(slot_count, 16); row_nbytes = 64 + 8 * slot_count rounded up to 4096.
 * Owner: the caller owns *out.  After failure: nothing changed.  Errors: RANGE(SLOT_COUNT_RANGE, MANIFEST_NBYTES_RANGE).
 * Threads: any; does not block.  Since: 1 */
int32_t kvr_table_layout_get(int64_t slot_count, int64_t manifest_nbytes, kvr_table_layout *out);

/* Write a fresh part into zeroed table and claims memory: superblock, manifest, free records, empty index.
 * In: table_region, claims_region of at least the layout's bytes; part_id, 16 bytes; geometry; manifest bytes (opaque here).
 * Out: nothing; state CREATING, content_epoch 1, every slot FREE, the free list in ascending order of slots.
 * Owner: regions stay the caller's.  After failure: the memory's content is undefined, the part is not usable.
 * Errors: handle errors, RANGE(SLOT_COUNT_RANGE, BLOCK_NBYTES_RANGE, REGION_COUNT_RANGE: 1..min(slot_count, KVR_REGION_COUNT_MAX),
 *   MANIFEST_NBYTES_RANGE, LAYOUT_NBYTES: slot_count * block_nbytes over KVR_NBYTES_MAX), SIZE_MISMATCH(TABLE_NBYTES),
 *   BUSY(TABLE_SEALED: the memory already holds a part), mapping errors.  Threads: any; may block.  Since: 1 */
int32_t kvr_table_create(int64_t table_region, int64_t claims_region, const uint8_t *part_id, int64_t slot_count,
                         int64_t block_nbytes, int64_t region_count, const uint8_t *manifest, int64_t manifest_nbytes);

/* Open a part. Its superblock is checked; records are not (kvr_table_restore).
 * In: table_region, claims_region; lock_fd, the part's lock memory; role; session > 0 and row 0..63 (keeper: session 0, row
 *   -1); lock_wait_ns >= 0, the bound of every wait for the lock (0: one try).
 *   The table is mapped writable by writer and keeper, read-only by readers; of the claims, a session's own row is writable
 *   (keeper: all). All mappings are MADV_DONTFORK.
 * Out: *out_table.  Owner: lock_fd is consumed on success. If this process has the same lock memory open already, the older fd is
 *   used and this one stays open unused until the last table on it closes: closing any fd of an inode drops a POSIX lock.
 *   The regions stay the caller's and may be closed.  After failure: nothing is left open; lock_fd is still the caller's.
 * Errors, in this order: handle errors, RANGE(ROLE_UNKNOWN, SESSION_RANGE, ROW_RANGE, FD_NEGATIVE, NBYTES_RANGE for lock_wait_ns),
 *   PERMISSION_DENIED(ACCESS_READ_ONLY), CORRUPT(TABLE_MAGIC), INCOMPATIBLE(TABLE_VERSION), CORRUPT(TABLE_SUPERBLOCK_CRC,
 *   TABLE_GEOMETRY, TABLE_NBYTES, TABLE_MANIFEST_CRC), STALE_EPOCH(PART_RETIRED), SYSTEM_CALL, FORKED.
 *   A keeper may open a part in any state; others need LAYOUT_SEALED: NOT_READY(PART_NOT_SEALED).
 * Threads: any; may block in the kernel.  Since: 1 */
int32_t kvr_table_open(int64_t table_region, int64_t claims_region, int32_t lock_fd, int32_t role, int64_t session, int32_t row,
                       int64_t lock_wait_ns, int64_t *out_table);

/* Close a part: mappings, lock and bound uses go. Claims and reservations stay as they are in the shared memory.
 * In: table.  Out: nothing.  Owner: the handle is consumed.  After failure: still open.
 * Errors: INVALID_HANDLE, STALE_HANDLE, BUSY (another thread is inside a call on it), FORKED.
 * Threads: any; does not block.  Since: 1 */
int32_t kvr_table_close(int64_t table);

/* Read what the part is.
 * In: table.  Out: *out.  Owner: the caller owns *out.  After failure: nothing changed.
 * Errors: INVALID_HANDLE, STALE_HANDLE.  Threads: any; does not block.  Since: 1 */
int32_t kvr_table_info_get(int64_t table, kvr_table_info *out);

/* Copy the manifest's bytes out.
 * In: table; capacity_nbytes.  Out: *out_nbytes, the manifest's size; out filled if capacity suffices, else untouched.
 * Owner: out is the caller's.  After failure: nothing changed.  Errors: handle errors, RANGE(COUNT_RANGE: capacity < 0).
 * Threads: any; does not block.  Since: 1 */
int32_t kvr_table_manifest_get(int64_t table, uint8_t *out, int64_t capacity_nbytes, int64_t *out_nbytes);

/* Bind one data region, so that commit and verify can read the slots' bytes.
 * In: table; index 0..region_count-1; mapping of at least that region's bytes. Binding an index again replaces it.
 * Out: nothing.  Owner: the table uses the mapping until it is closed.  After failure: nothing changed.
 * Errors: handle errors, RANGE(REGION_INDEX_RANGE), SIZE_MISMATCH(REGION_BIND_NBYTES).  Threads: any; does not block.  Since: 1 */
int32_t kvr_table_bind(int64_t table, int64_t index, int64_t mapping);

/* Set the part's state word (one aligned store).
 * In: table of the keeper; state KVR_PART_....  Out: nothing.  Owner: none.  After failure: nothing changed.
 * Errors: handle errors, PERMISSION_DENIED(ROLE_FORBIDS), RANGE(STATE_RANGE).  Threads: any; does not block.  Since: 1 */
int32_t kvr_table_set_state(int64_t table, int32_t state);

/* Say whether a live writer stands behind the part; a part that was just created has none. While unready is not 0 readers' calls are
 *   NOT_READY(PART_UNREADY), but for release: so they need not ask the keeper.
 * In: table of the keeper; unready.  Out: nothing.  Owner: none.  After failure: nothing changed.
 * Errors: handle errors, PERMISSION_DENIED(ROLE_FORBIDS).  Threads: any; does not block.  Since: 1 */
int32_t kvr_table_set_unready(int64_t table, int32_t unready);

/* Bound how many slots of a part may be other than FREE: the ranks of a group hold as many blocks as the smallest of them can. What is
 *   above the bound already stays until it is evicted.
 * In: table of the keeper; capacity 1..slot_count.  Out: nothing.  Owner: none.  After failure: nothing changed.
 * Errors: handle errors, PERMISSION_DENIED(ROLE_FORBIDS), RANGE(SLOT_COUNT_RANGE).  Threads: any; does not block.  Since: 1 */
int32_t kvr_table_set_capacity(int64_t table, int64_t capacity);

/* Start the writer's heartbeat: a native thread stores CLOCK_MONOTONIC ns into the part's memory at once and every period, until
 *   kvr_table_close(). It says that the process runs, not that it gets on.
 * In: table of the writer; period_ns KVR_BEAT_MIN_NS..KVR_BEAT_MAX_NS.  Out: nothing.  Owner: the table owns the thread.
 * After failure: there is none.  Errors: handle errors, PERMISSION_DENIED(ROLE_FORBIDS), RANGE(PERIOD_RANGE),
 *   BUSY(HEARTBEAT_RUNS), OUT_OF_MEMORY, SYSTEM_CALL(pthread_create).  Threads: any; does not block.  Since: 1 */
int32_t kvr_table_beat(int64_t table, int64_t period_ns);

/* Admit a session: its claims row is zeroed, then its id stored; for a writer, writer_session last.
 * A writer's heartbeat word is zeroed.
 * In: table of the keeper; row 0..63; session > 0; role READER or WRITER. The caller has proof that the row's and, for a
 *   writer, the part's former owner is gone.
 * Out: nothing.  Owner: none.  After failure: nothing changed.
 * Errors: handle errors, PERMISSION_DENIED(ROLE_FORBIDS), RANGE(ROW_RANGE, SESSION_RANGE, ROLE_UNKNOWN).
 * Threads: any; takes no lock, does not wait.  Since: 1 */
int32_t kvr_table_admit(int64_t table, int32_t row, int64_t session, int32_t role);

/* Drop a session that is gone: writer_session first if it is the writer, then its row's id and counts are zeroed.
 * In: table of the keeper; row; session. If the row belongs to another session, only writer_session is looked at.
 * Out: nothing.  Owner: its claims are void.  After failure: nothing changed.
 * Errors: handle errors, PERMISSION_DENIED(ROLE_FORBIDS), RANGE(ROW_RANGE, SESSION_RANGE).
 * Threads: any; takes no lock, does not wait.  Since: 1 */
int32_t kvr_table_drop(int64_t table, int32_t row, int64_t session);

/* Free what a gone writer left unfinished: WRITING -> FREE; derived structures are rebuilt if dirty.
 * In: table of the keeper, while no writer is admitted.  Out: *out_freed, slots freed.  Owner: none.
 * After failure: nothing changed; a new writer's restore does the same.
 * Errors: handle errors, PERMISSION_DENIED(ROLE_FORBIDS), BUSY(SESSION_FENCED: a writer is admitted), WAIT_TIMEOUT.
 * Threads: any; holds the part's lock, waits at most lock_wait_ns.  Since: 1 */
int32_t kvr_table_recover(int64_t table, int64_t *out_freed);

/* Check every record and rebuild: SEALED, intact and of the content epoch stays; all else is freed (but a claimed slot stays as
 * stale), WRITING too. The free list is then in ascending order, recency as stamped (equal stamps: by slot).
 * In: table of the writer or keeper.  Out: *out.  Owner: none.  After failure: dirty stays set: restore again or reset.
 * Errors: handle errors, PERMISSION_DENIED(ROLE_FORBIDS), STALE_EPOCH, BUSY(SESSION_FENCED: a keeper, while a writer is admitted),
 *   WAIT_TIMEOUT, OUT_OF_MEMORY.
 * Threads: any; holds the part's lock; time by slot_count.  Since: 1 */
int32_t kvr_table_restore(int64_t table, kvr_restore_result *out);

/* Empty the part in one step: content_epoch + 1, then unclaimed slots are freed, WRITING ones too.
 * In: table of the writer or keeper.  Out: nothing.  Owner: none.  After failure: dirty stays set.
 * Errors: as kvr_table_restore.  Threads: any; holds the part's lock; time by slot_count.  Since: 1 */
int32_t kvr_table_reset(int64_t table);

/* Empty the part in one step, while a writer goes on with it: a group-wide clear, or a change of weights, comes from another process.
 *   Only words are written: dirty, then content_epoch + 1, then counts. No block counts from here on; readers are told
 *   NOT_READY(PART_DIRTY) until the writer's next call, which rebuilds: what nobody claims is free then, reservations stay (their commit
 *   is refused).
 * In: table of the keeper.  Out: *out_removed, blocks that counted.  Owner: none.  After failure: nothing changed.
 * Errors: handle errors, PERMISSION_DENIED(ROLE_FORBIDS), WAIT_TIMEOUT(LOCK_TIMEOUT).
 * Threads: any; holds the part's lock, waits at most lock_wait_ns; time by slot_count.  Since: 1 */
int32_t kvr_table_expire(int64_t table, int64_t *out_removed);

/* Keys, for all functions below: key i is key_nbytes[i] bytes at keys + i * key_stride_bytes; key_nbytes NULL: all have
 * key_stride_bytes bytes. key_stride_bytes 1..32, each key_nbytes[i] 1..key_stride_bytes (RANGE(KEY_STRIDE, KEY_NBYTES)), key_count
 * 0..KVR_BATCH_COUNT_MAX (RANGE(COUNT_RANGE)). A key counts as present where its newest record is SEALED, intact and of the content
 * epoch. All take the part's lock and wait at most lock_wait_ns (WAIT_TIMEOUT(LOCK_TIMEOUT)), check that the session still
 * holds its place (STALE_EPOCH(SESSION_FENCED, PART_RETIRED)), a reader whether the part is live (NOT_READY(PART_UNREADY)), and first repair (writer) or report (reader: NOT_READY(PART_DIRTY))
 * a change that was cut short. */

/* Count the leading keys that are present. Advisory: reserves nothing, changes no recency.
 * In: table; keys.  Out: *out_count.  Owner: none.  After failure: nothing changed.
 * Errors: handle errors, key errors, lock and session errors.  Threads: any; holds the part's lock.  Since: 1 */
int32_t kvr_table_match(int64_t table, const uint8_t *keys, int64_t key_stride_bytes, const uint8_t *key_nbytes,
                        int64_t key_count, int64_t *out_count);

/* Find each key's slot. Advisory.
 * In: table; keys.  Out: slots[i] or -1, generations[i] or 0, one each a key.  Owner: none.  After failure: arrays undefined.
 * Errors: as kvr_table_match.  Threads: any; holds the part's lock.  Since: 1 */
int32_t kvr_table_lookup(int64_t table, const uint8_t *keys, int64_t key_stride_bytes, const uint8_t *key_nbytes,
                         int64_t key_count, int64_t *slots, int64_t *generations);

/* Claim the leading keys that are present: +1 in this session's row for each entry, repeats included.
 * In: table of the writer or a reader; keys.  Out: *out_count entries of slots and generations.
 * Owner: the session owns the claims until kvr_table_release().  After failure: nothing is claimed.
 * Errors: as kvr_table_match, RANGE(CLAIMS_FULL), PERMISSION_DENIED(ROLE_FORBIDS).  Threads: any; holds the part's lock.  Since: 1 */
int32_t kvr_table_claim(int64_t table, const uint8_t *keys, int64_t key_stride_bytes, const uint8_t *key_nbytes,
                        int64_t key_count, int64_t *slots, int64_t *generations, int64_t *out_count);

/* Claim named slots, all or none.
 * In: table of the writer or a reader; slots and generations, count 0..KVR_BATCH_COUNT_MAX.  Out: nothing.
 * Owner: as kvr_table_claim.  After failure: nothing is claimed.
 * Errors: lock and session errors, RANGE(SLOT_RANGE, COUNT_RANGE, CLAIMS_FULL), STALE_BLOCK(GENERATION, SLOT_STATE: not SEALED, intact
 *   and of the content epoch), PERMISSION_DENIED(ROLE_FORBIDS).  Threads: any; holds the part's lock.  Since: 1 */
int32_t kvr_table_claim_slots(int64_t table, const int64_t *slots, const int64_t *generations, int64_t count);

/* Release claims: -1 for each entry. Possible for a fenced session too (it changes only its own row; if the row is another's
 * by then, nothing is done).
 * In: table; slots, count.  Out: nothing.  Owner: claims are given back.  After failure: nothing changed.
 * Errors: RANGE(SLOT_RANGE, COUNT_RANGE), STALE_BLOCK(NOT_CLAIMED), WAIT_TIMEOUT, PERMISSION_DENIED(ROLE_FORBIDS).
 * Threads: any; holds the part's lock.  Since: 1 */
int32_t kvr_table_release(int64_t table, const int64_t *slots, int64_t count);

/* Make present keys the most recent, from the last key to the first; absent ones are skipped. A writer moves them in the recency
 * order; a reader stamps its row, and the writer looks at the stamps before it evicts.
 * In: table of the writer or a reader; keys.  Out: *out_count, keys touched.  Owner: none.  After failure: some may be touched.
 * Errors: as kvr_table_match, PERMISSION_DENIED(ROLE_FORBIDS).  Threads: any; holds the part's lock.  Since: 1 */
int32_t kvr_table_touch(int64_t table, const uint8_t *keys, int64_t key_stride_bytes, const uint8_t *key_nbytes,
                        int64_t key_count, int64_t *out_count);

/* Reserve a slot for each key that is to be written; all or nothing. Stale unclaimed slots are freed first.
 * In: table of the writer; keys; named_slots NULL, or one slot a key; flags KVR_RESERVE_....
 *   Entry i needs no slot (slots[i] = -1) where its key is present (unless DUPLICATE), or repeated earlier in keys.
 *   Without named_slots, slots come from the free list's head; with EVICT, as many as are missing are freed first: the least recent
 *   SEALED, unclaimed blocks whose key is not among keys.
 *   No more than the part's capacity is other than FREE afterwards, or than before where it was more: only as many slots count as free.
 *   With named_slots, all below the capacity, the named slot of an entry that needs one must be FREE, or SEALED and unclaimed (its key is then removed,
 *   replaced_total + 1).
 * Out: slots[i], generations[i] (0 where -1); evicted_keys: room for key_count entries of 32 zero-padded bytes, evicted_key_nbytes
 *   one each; *out_evicted, entries used (by EVICT or replaced), oldest first.
 * Owner: the session owns WRITING slots until commit or abort.  After failure: nothing changed (arrays undefined).
 * Errors: as kvr_table_match, PERMISSION_DENIED(ROLE_FORBIDS), RANGE(FLAGS_UNKNOWN, SLOT_RANGE, SLOT_REPEATED), BUSY(KEY_RESERVED,
 *   SLOT_BUSY), NO_SPACE(NO_FREE_SLOT), OUT_OF_MEMORY.  Threads: any; holds the part's lock.  Since: 1 */
int32_t kvr_table_reserve(int64_t table, const uint8_t *keys, int64_t key_stride_bytes, const uint8_t *key_nbytes,
                          int64_t key_count, const int64_t *named_slots, uint32_t flags, int64_t *slots, int64_t *generations,
                          uint8_t *evicted_keys, uint8_t *evicted_key_nbytes, int64_t *out_evicted);

/* Seal reserved slots in the order given; each becomes the most recent. With CHECKSUM the data CRC is computed first, without
 * the lock. All entries are checked before the first is sealed.
 * In: table of the writer; slots and generations from kvr_table_reserve (-1 entries are skipped); count; flags KVR_COMMIT_....
 * Out: nothing.  Owner: the slots belong to the part.  After failure: nothing is sealed.
 * Errors: lock and session errors, PERMISSION_DENIED(ROLE_FORBIDS), RANGE(SLOT_RANGE, COUNT_RANGE, FLAGS_UNKNOWN, SLOT_REPEATED),
 *   STALE_BLOCK(GENERATION, SLOT_STATE, CONTENT_EPOCH: the part was emptied since the reserve, so that the bytes may be of what was
 *   forgotten), NOT_READY(DATA_NOT_BOUND), OUT_OF_MEMORY.  Threads: any; holds the part's lock.  Since: 1 */
int32_t kvr_table_commit(int64_t table, const int64_t *slots, const int64_t *generations, int64_t count, uint32_t flags);

/* Give reserved slots back: WRITING -> FREE. Entries that are -1, or whose slot is not WRITING of that generation, are skipped.
 * In: table of the writer; slots and generations; count.  Out: *out_count, slots freed.  Owner: given back.
 * After failure: nothing changed.  Errors: lock and session errors, RANGE(SLOT_RANGE, COUNT_RANGE), PERMISSION_DENIED(ROLE_FORBIDS).
 * Threads: any; holds the part's lock.  Since: 1 */
int32_t kvr_table_abort(int64_t table, const int64_t *slots, const int64_t *generations, int64_t count, int64_t *out_count);

/* Evict up to evict_count least recent, unclaimed blocks whose key is not among keys.
 * In: table of the writer; evict_count >= 0; keys to keep.  Out: *out_count, blocks evicted.  Owner: slots become FREE.
 * After failure: nothing changed.  Errors: as kvr_table_match, RANGE(COUNT_RANGE), PERMISSION_DENIED(ROLE_FORBIDS), OUT_OF_MEMORY.
 * Threads: any; holds the part's lock.  Since: 1 */
int32_t kvr_table_evict(int64_t table, int64_t evict_count, const uint8_t *keys, int64_t key_stride_bytes,
                        const uint8_t *key_nbytes, int64_t key_count, int64_t *out_count);

/* Forget all content: content_epoch + 1 first, then unclaimed blocks are freed. WRITING slots stay with their reservation, which can
 * only be aborted now. Claimed slots stay as stale until their claims go.
 * In: table of the writer.  Out: *out_removed, blocks freed; *out_kept, claimed ones.  Owner: none.  After failure: dirty stays set.
 * Errors: lock and session errors, PERMISSION_DENIED(ROLE_FORBIDS).  Threads: any; holds the part's lock.  Since: 1 */
int32_t kvr_table_clear(int64_t table, int64_t *out_removed, int64_t *out_kept);

/* Compare the slots' bytes with the CRC that their commit stored. The caller holds claims on them. Takes no lock.
 * In: table; slots, count.  Out: verdicts[i]: 0 equal, 1 bad, 2 the record has no data CRC.  Owner: none.
 * After failure: verdicts undefined.  Errors: handle errors, RANGE(SLOT_RANGE, COUNT_RANGE), NOT_READY(DATA_NOT_BOUND), FORKED.
 * Threads: any; time by bytes.  Since: 1 */
int32_t kvr_table_verify(int64_t table, const int64_t *slots, int64_t count, uint8_t *verdicts);

/* Make blocks no content: their epoch becomes 0. They are freed as soon as nobody claims them. corrupt_total + 1 each.
 * In: table of the writer; slots and generations; count. Entries of another generation or not SEALED are skipped.
 * Out: *out_count, blocks taken out.  Owner: none.  After failure: some may be taken out.
 * Errors: lock and session errors, PERMISSION_DENIED(ROLE_FORBIDS), RANGE(SLOT_RANGE, COUNT_RANGE).
 * Threads: any; holds the part's lock.  Since: 1 */
int32_t kvr_table_invalidate(int64_t table, const int64_t *slots, const int64_t *generations, int64_t count,
                             int64_t *out_count);

/* List blocks that count, in ascending order of slots, a page at a time.
 * In: table; first_slot >= 0; capacity 0..KVR_BATCH_COUNT_MAX.
 * Out: *out_count entries of slots, generations, keys (32 zero-padded bytes each), key_nbytes; *out_next, the slot to go on from, or -1.
 * Owner: arrays are the caller's.  After failure: arrays undefined.
 * Errors: lock and session errors, RANGE(SLOT_RANGE, COUNT_RANGE).  Threads: any; holds the part's lock.  Since: 1 */
int32_t kvr_table_inventory(int64_t table, int64_t first_slot, int64_t capacity, int64_t *slots, int64_t *generations,
                            uint8_t *keys, uint8_t *key_nbytes, int64_t *out_count, int64_t *out_next);

/* Read counts and words. Not under the lock: each number is right, together they may be of different moments.
 * In: table.  Out: *out.  Owner: the caller owns *out.  After failure: nothing changed.
 * Errors: INVALID_HANDLE, STALE_HANDLE, FORKED.  Threads: any; does not block; claimed_count takes time by slots.  Since: 1 */
int32_t kvr_table_stats_get(int64_t table, kvr_table_stats *out);

/* ==== copies ====
 * An operation owns what it names until its native work has ended: mappings cannot be unmapped, slots are not given out, a table cannot
 * be closed. It reaches exactly one of DONE, FAILED and CANCELLED, after it has let go of all that. Foreign memory is the caller's to
 * keep alive until then. A timeout and a request to cancel free nothing. The order in which operations of a queue run is that of their
 * submission as far as their dependencies allow; several may run at once. */

/* Open a queue with its threads, which block all signals.
 * In: thread_count 1..KVR_THREAD_COUNT_MAX; flags KVR_QUEUE_....  Out: *out_queue.
 * Owner: the handle is owned by the caller: kvr_queue_close().  After failure: nothing is left open, no thread runs.
 * Errors: RANGE(THREAD_COUNT_RANGE, FLAGS_UNKNOWN), FORKED, TOO_MANY_FDS, OUT_OF_MEMORY or SYSTEM_CALL by errno.
 * Threads: any; does not block.  Since: 1 */
int32_t kvr_queue_open(int32_t thread_count, uint32_t flags, int64_t *out_queue);

/* Take no more work, and wait until all operations of a queue have ended.
 * In: queue; wait_ns >= 0.  Out: nothing; KVR_PENDING if some have not ended by then.  Owner: none.  After failure: nothing changed.
 * Errors: INVALID_HANDLE, STALE_HANDLE, RANGE(NBYTES_RANGE for wait_ns), FORKED.  Threads: any; blocks up to wait_ns.  Since: 1 */
int32_t kvr_queue_drain(int64_t queue, int64_t wait_ns);

/* Wait until all operations of a queue have ended, then end its threads. From the call on the queue takes no more work.
 * In: queue; wait_ns >= 0.  Out: nothing.
 * Owner: the handle is consumed; operations stay to be looked at and released.  After failure: still open, and what has not ended is in
 *   quarantine until it ends; call again.
 * Errors: INVALID_HANDLE, STALE_HANDLE, RANGE(NBYTES_RANGE for wait_ns), NOT_QUIESCENT(QUEUE_NOT_QUIESCENT), FORKED.
 * Threads: any; blocks up to wait_ns.  Since: 1 */
int32_t kvr_queue_close(int64_t queue, int64_t wait_ns);

/* Tell what is kept about a queue.
 * In: queue.  Out: *out.  Owner: the caller owns *out; the fd stays the queue's.  After failure: nothing changed.
 * Errors: INVALID_HANDLE, STALE_HANDLE, FORKED.  Threads: any; takes the handle mutex.  Since: 1 */
int32_t kvr_queue_info_get(int64_t queue, kvr_queue_info *out);

/* List operations that have ended and were not listed before, in the order of their ends.
 * In: queue; capacity 0..KVR_BATCH_COUNT_MAX.  Out: *out_count entries of operations.
 * Owner: the array is the caller's.  After failure: nothing changed.
 * Errors: INVALID_HANDLE, STALE_HANDLE, RANGE(COUNT_RANGE), FORKED.  Threads: any; takes the handle mutex.  Since: 1 */
int32_t kvr_queue_completed(int64_t queue, int64_t capacity, int64_t *operations, int64_t *out_count);

/* Give the next operation that is submitted a fault; it then runs on a thread of the queue, whatever its size.
 * In: queue opened with KVR_QUEUE_FAULTS; fault KVR_FAULT_...; index, value by fault, >= 0.  Out: nothing.  Owner: none.
 * After failure: nothing changed.  Errors: INVALID_HANDLE, STALE_HANDLE, NOT_SUPPORTED(NO_FAULTS), RANGE(FAULT_UNKNOWN, COUNT_RANGE), FORKED.
 * Threads: any; takes the handle mutex.  Since: 1 */
int32_t kvr_queue_fault(int64_t queue, int32_t fault, int64_t index, int64_t value);

/* Let all threads go on that a fault has stopped, and all that it would stop later in operations submitted so far.
 * In: queue.  Out: nothing.  Owner: none.  After failure: nothing changed.
 * Errors: INVALID_HANDLE, STALE_HANDLE, FORKED.  Threads: any; takes the handle mutex.  Since: 1 */
int32_t kvr_queue_resume(int64_t queue);

/* Submit a batch of copies. It is checked whole first: nothing is copied if one entry is bad.
 * In: queue; destination, source, which lie on the host or on CUDA devices; count 0..KVR_BATCH_COUNT_MAX entries, each length bytes, may be 0;
 *   after_count 0..64 dependencies. Entries of one destination must not overlap one another, nor any source of the batch.
 * Out: *out_operation. A batch without bytes and dependencies has ended already; so may a small one.
 * Owner: the operation's handle is the caller's: kvr_operation_release(). The arrays and fds stay the caller's (copied, dup'ed).
 * After failure: nothing was accepted, all is as before.
 * Errors: handle errors of all that is named, RANGE(COUNT_RANGE, ADDRESS_RANGE, COPY_DST_RANGE, COPY_SRC_RANGE, COPY_OVERLAP,
 *   COPY_CROSS_OVERLAP, AFTER_KIND, FD_NEGATIVE), PERMISSION_DENIED(COPY_READ_ONLY), HANDLE_CLOSED(QUEUE_CLOSING), NOT_QUIESCENT(QUARANTINE_FULL),
 *   FORKED, OUT_OF_MEMORY, TOO_MANY_FDS, SYSTEM_CALL; CUDA: those of kvr_cuda_info_get().
 * Threads: any; blocks only while it copies a small batch itself.  Since: 1 */
int32_t kvr_copy_submit(int64_t queue, const kvr_memory *destination, const kvr_memory *source, const int64_t *destination_offsets,
                        const int64_t *source_offsets, const int64_t *lengths, int64_t count, const kvr_dependency *after,
                        int64_t after_count, int64_t *out_operation);

/* Submit copies between an engine's blocks and slots of a part, for each segment of each entry; segment by segment.
 * In: queue; table, as its writer (IN) or as any session (OUT); direction; mappings of the part's data regions, in order;
 *   slots, generations as reserved or claimed, count entries, slot -1: the entry is skipped; segments; engine_blocks, one an entry;
 *   flags KVR_SLOTS_...; dependencies as above.
 * Out: *out_operation. IN: slots whose reservation is gone, or OUT: blocks that are gone, give an operation that has ended FAILED(STALE_BLOCK).
 * Owner: as above. OUT: the operation claims the slots for itself. IN: it owns them: an abort frees them only when it has ended, a
 *   commit is refused until then, and after FAILED or CANCELLED.
 * After failure: nothing was accepted; with KVR_SLOTS_COMMIT the slots are still reserved.
 * Errors: those of kvr_copy_submit(), lock and session errors, RANGE(DIRECTION_UNKNOWN, FLAGS_UNKNOWN, SLOT_RANGE, SLOT_REPEATED: IN,
 *   REGION_INDEX_RANGE: v1 mappings needed, SEGMENT_RANGE, STRIDE_RANGE, ENGINE_BLOCK_RANGE), SIZE_MISMATCH(REGION_BIND_NBYTES),
 *   PERMISSION_DENIED(ROLE_FORBIDS).
 * Threads: any; takes the part's lock.  Since: 1 */
int32_t kvr_copy_slots(int64_t queue, int64_t table, int32_t direction, const int64_t *mappings, int64_t mapping_count,
                       const int64_t *slots, const int64_t *generations, const int64_t *engine_blocks, int64_t count,
                       const kvr_segment *segments, int64_t segment_count, uint32_t flags, const kvr_dependency *after,
                       int64_t after_count, int64_t *out_operation);

/* Tell how an operation stands.
 * In: operation.  Out: *out.  Owner: the caller owns *out.  After failure: nothing changed.
 * Errors: INVALID_HANDLE, STALE_HANDLE, FORKED.  Threads: any; takes the handle mutex.  Since: 1 */
int32_t kvr_operation_info_get(int64_t operation, kvr_operation_info *out);

/* Tell why an operation FAILED or was CANCELLED.
 * In: operation.  Out: *out, zeroed if it did not.  Owner: the caller owns *out.  After failure: nothing changed.
 * Errors: INVALID_HANDLE, STALE_HANDLE, FORKED.  Threads: any; takes the handle mutex.  Since: 1 */
int32_t kvr_operation_error_get(int64_t operation, kvr_error *out);

/* Wait until an operation has ended. Copies between host memories without slots and dependencies, which no thread of the queue has begun or
 *   which have room for one more, the caller copies itself meanwhile, by pieces of 256 KiB: it looks at its time in between.
 * In: operation; wait_ns >= 0.  Out: nothing; KVR_PENDING if it has not ended by then, which proves nothing and frees nothing.
 * Owner: none.  After failure: nothing changed.  Errors: INVALID_HANDLE, STALE_HANDLE, RANGE(NBYTES_RANGE for wait_ns), FORKED.
 * Threads: any; blocks up to wait_ns and as long as one piece takes; wait_ns 0: copies nothing.  Since: 1 */
int32_t kvr_operation_wait(int64_t operation, int64_t wait_ns);

/* Ask that an operation ends early. One that has not begun ends CANCELLED; one that runs ends CANCELLED where it still can, between two
 *   pieces, or else as it would have.
 * In: operation.  Out: nothing.  Owner: none; nothing is freed before the operation has ended.  After failure: nothing changed.
 * Errors: INVALID_HANDLE, STALE_HANDLE, FORKED.  Threads: any; may take the part's lock.  Since: 1 */
int32_t kvr_operation_cancel(int64_t operation);

/* Give an operation's handle back.
 * In: operation that has ended.  Out: nothing.  Owner: the handle is consumed.  After failure: nothing changed.
 * Errors: INVALID_HANDLE, STALE_HANDLE, BUSY(OPERATION_RUNNING), FORKED.  Threads: any; takes the handle mutex.  Since: 1 */
int32_t kvr_operation_release(int64_t operation);

/* Take an operation out of quarantine by decision of an operator: it ends FAILED(OPERATION_ABANDONED) and lets go of all it owns. If its
 *   native work still runs, it will go on writing into memory that others use by then.
 * In: operation in quarantine.  Out: nothing.  Owner: none.  After failure: nothing changed.
 * Errors: INVALID_HANDLE, STALE_HANDLE, BUSY(NOT_QUARANTINED), FORKED.  Threads: any; may take the part's lock.  Since: 1 */
int32_t kvr_operation_abandon(int64_t operation);

/* List the operations in quarantine.
 * In: capacity 0..KVR_BATCH_COUNT_MAX.  Out: *out_count = all of them, of which up to capacity are written.
 * Owner: the array is the caller's.  After failure: nothing changed.  Errors: RANGE(COUNT_RANGE), FORKED.
 * Threads: any; takes the handle mutex.  Since: 1 */
int32_t kvr_quarantine_get(int64_t capacity, int64_t *operations, int64_t *out_count);

/* Bound the quarantine of this process.
 * In: limit_nbytes >= 0.  Out: nothing.  Owner: none.  After failure: nothing changed.  Errors: RANGE(NBYTES_RANGE), FORKED.
 * Threads: any; takes the handle mutex.  Since: 1 */
int32_t kvr_quarantine_limit_set(int64_t limit_nbytes);

/* Count the copies of this process.
 * In: nothing.  Out: *out.  Owner: the caller owns *out.  After failure: cannot fail.  Errors: none.
 * Threads: any; takes the handle mutex.  Since: 1 */
int32_t kvr_copy_counts_get(kvr_copy_counts *out);

/* ---- sizes and offsets, checked by every C compiler that reads this ---- */
#ifndef __cplusplus
#include <stddef.h>
_Static_assert(sizeof(kvr_error) == 104, "kvr_error");
_Static_assert(offsetof(kvr_error, status) == 0, "kvr_error.status");
_Static_assert(offsetof(kvr_error, detail) == 4, "kvr_error.detail");
_Static_assert(offsetof(kvr_error, native_source) == 8, "kvr_error.native_source");
_Static_assert(offsetof(kvr_error, native_code) == 16, "kvr_error.native_code");
_Static_assert(offsetof(kvr_error, values) == 24, "kvr_error.values");
_Static_assert(offsetof(kvr_error, call) == 56, "kvr_error.call");
_Static_assert(sizeof(kvr_region_info) == 80, "kvr_region_info");
_Static_assert(offsetof(kvr_region_info, handle) == 0, "kvr_region_info.handle");
_Static_assert(offsetof(kvr_region_info, nbytes) == 8, "kvr_region_info.nbytes");
_Static_assert(offsetof(kvr_region_info, physical_nbytes) == 16, "kvr_region_info.physical_nbytes");
_Static_assert(offsetof(kvr_region_info, kind) == 24, "kvr_region_info.kind");
_Static_assert(offsetof(kvr_region_info, access) == 28, "kvr_region_info.access");
_Static_assert(offsetof(kvr_region_info, origin) == 32, "kvr_region_info.origin");
_Static_assert(offsetof(kvr_region_info, mapping_count) == 36, "kvr_region_info.mapping_count");
_Static_assert(offsetof(kvr_region_info, device) == 40, "kvr_region_info.device");
_Static_assert(offsetof(kvr_region_info, inode) == 48, "kvr_region_info.inode");
_Static_assert(offsetof(kvr_region_info, region_id) == 56, "kvr_region_info.region_id");
_Static_assert(offsetof(kvr_region_info, provider) == 72, "kvr_region_info.provider");
_Static_assert(offsetof(kvr_region_info, fabric_count) == 76, "kvr_region_info.fabric_count");
_Static_assert(sizeof(kvr_mapping_info) == 40, "kvr_mapping_info");
_Static_assert(offsetof(kvr_mapping_info, handle) == 0, "kvr_mapping_info.handle");
_Static_assert(offsetof(kvr_mapping_info, region) == 8, "kvr_mapping_info.region");
_Static_assert(offsetof(kvr_mapping_info, address) == 16, "kvr_mapping_info.address");
_Static_assert(offsetof(kvr_mapping_info, nbytes) == 24, "kvr_mapping_info.nbytes");
_Static_assert(offsetof(kvr_mapping_info, access) == 32, "kvr_mapping_info.access");
_Static_assert(offsetof(kvr_mapping_info, use_count) == 36, "kvr_mapping_info.use_count");
_Static_assert(sizeof(kvr_observation) == 80, "kvr_observation");
_Static_assert(offsetof(kvr_observation, file_nbytes) == 0, "kvr_observation.file_nbytes");
_Static_assert(offsetof(kvr_observation, allocated_nbytes) == 8, "kvr_observation.allocated_nbytes");
_Static_assert(offsetof(kvr_observation, device) == 16, "kvr_observation.device");
_Static_assert(offsetof(kvr_observation, inode) == 24, "kvr_observation.inode");
_Static_assert(offsetof(kvr_observation, file_mode) == 32, "kvr_observation.file_mode");
_Static_assert(offsetof(kvr_observation, seals) == 40, "kvr_observation.seals");
_Static_assert(offsetof(kvr_observation, access) == 48, "kvr_observation.access");
_Static_assert(offsetof(kvr_observation, page_nbytes) == 56, "kvr_observation.page_nbytes");
_Static_assert(offsetof(kvr_observation, block_nbytes) == 64, "kvr_observation.block_nbytes");
_Static_assert(sizeof(kvr_cuda_info) == 40, "kvr_cuda_info");
_Static_assert(offsetof(kvr_cuda_info, ordinal) == 0, "kvr_cuda_info.ordinal");
_Static_assert(offsetof(kvr_cuda_info, driver_version) == 4, "kvr_cuda_info.driver_version");
_Static_assert(offsetof(kvr_cuda_info, vmm) == 8, "kvr_cuda_info.vmm");
_Static_assert(offsetof(kvr_cuda_info, posix_fd) == 12, "kvr_cuda_info.posix_fd");
_Static_assert(offsetof(kvr_cuda_info, fabric) == 16, "kvr_cuda_info.fabric");
_Static_assert(offsetof(kvr_cuda_info, features) == 20, "kvr_cuda_info.features");
_Static_assert(offsetof(kvr_cuda_info, uuid) == 24, "kvr_cuda_info.uuid");
_Static_assert(sizeof(kvr_cuda_observation) == 112, "kvr_cuda_observation");
_Static_assert(offsetof(kvr_cuda_observation, handle_types) == 0, "kvr_cuda_observation.handle_types");
_Static_assert(offsetof(kvr_cuda_observation, allocation_type) == 8, "kvr_cuda_observation.allocation_type");
_Static_assert(offsetof(kvr_cuda_observation, location_type) == 16, "kvr_cuda_observation.location_type");
_Static_assert(offsetof(kvr_cuda_observation, location_id) == 24, "kvr_cuda_observation.location_id");
_Static_assert(offsetof(kvr_cuda_observation, granularity_min) == 32, "kvr_cuda_observation.granularity_min");
_Static_assert(offsetof(kvr_cuda_observation, granularity_recommended) == 40, "kvr_cuda_observation.granularity_recommended");
_Static_assert(offsetof(kvr_cuda_observation, mapped_nbytes) == 48, "kvr_cuda_observation.mapped_nbytes");
_Static_assert(offsetof(kvr_cuda_observation, reserved_nbytes) == 56, "kvr_cuda_observation.reserved_nbytes");
_Static_assert(offsetof(kvr_cuda_observation, allowed_handle_types) == 64, "kvr_cuda_observation.allowed_handle_types");
_Static_assert(offsetof(kvr_cuda_observation, access) == 72, "kvr_cuda_observation.access");
_Static_assert(offsetof(kvr_cuda_observation, mapped_base) == 80, "kvr_cuda_observation.mapped_base");
_Static_assert(offsetof(kvr_cuda_observation, properties_result) == 88, "kvr_cuda_observation.properties_result");
_Static_assert(offsetof(kvr_cuda_observation, granularity_result) == 92, "kvr_cuda_observation.granularity_result");
_Static_assert(offsetof(kvr_cuda_observation, range_result) == 96, "kvr_cuda_observation.range_result");
_Static_assert(offsetof(kvr_cuda_observation, reservation_result) == 100, "kvr_cuda_observation.reservation_result");
_Static_assert(offsetof(kvr_cuda_observation, allowed_result) == 104, "kvr_cuda_observation.allowed_result");
_Static_assert(offsetof(kvr_cuda_observation, access_result) == 108, "kvr_cuda_observation.access_result");
_Static_assert(sizeof(kvr_handle_counts) == 40, "kvr_handle_counts");
_Static_assert(offsetof(kvr_handle_counts, regions) == 0, "kvr_handle_counts.regions");
_Static_assert(offsetof(kvr_handle_counts, mappings) == 8, "kvr_handle_counts.mappings");
_Static_assert(offsetof(kvr_handle_counts, locks) == 16, "kvr_handle_counts.locks");
_Static_assert(offsetof(kvr_handle_counts, tables) == 24, "kvr_handle_counts.tables");
_Static_assert(offsetof(kvr_handle_counts, fds) == 32, "kvr_handle_counts.fds");
_Static_assert(sizeof(kvr_superblock) == 256, "kvr_superblock");
_Static_assert(offsetof(kvr_superblock, magic) == 0, "kvr_superblock.magic");
_Static_assert(offsetof(kvr_superblock, version) == 8, "kvr_superblock.version");
_Static_assert(offsetof(kvr_superblock, superblock_crc) == 12, "kvr_superblock.superblock_crc");
_Static_assert(offsetof(kvr_superblock, part_id) == 16, "kvr_superblock.part_id");
_Static_assert(offsetof(kvr_superblock, table_nbytes) == 32, "kvr_superblock.table_nbytes");
_Static_assert(offsetof(kvr_superblock, claims_nbytes) == 40, "kvr_superblock.claims_nbytes");
_Static_assert(offsetof(kvr_superblock, slot_count) == 48, "kvr_superblock.slot_count");
_Static_assert(offsetof(kvr_superblock, block_nbytes) == 56, "kvr_superblock.block_nbytes");
_Static_assert(offsetof(kvr_superblock, region_count) == 64, "kvr_superblock.region_count");
_Static_assert(offsetof(kvr_superblock, slots_per_region) == 72, "kvr_superblock.slots_per_region");
_Static_assert(offsetof(kvr_superblock, manifest_offset_bytes) == 80, "kvr_superblock.manifest_offset_bytes");
_Static_assert(offsetof(kvr_superblock, manifest_nbytes) == 88, "kvr_superblock.manifest_nbytes");
_Static_assert(offsetof(kvr_superblock, manifest_crc) == 96, "kvr_superblock.manifest_crc");
_Static_assert(offsetof(kvr_superblock, record_offset_bytes) == 104, "kvr_superblock.record_offset_bytes");
_Static_assert(offsetof(kvr_superblock, link_offset_bytes) == 112, "kvr_superblock.link_offset_bytes");
_Static_assert(offsetof(kvr_superblock, bucket_offset_bytes) == 120, "kvr_superblock.bucket_offset_bytes");
_Static_assert(offsetof(kvr_superblock, bucket_count) == 128, "kvr_superblock.bucket_count");
_Static_assert(offsetof(kvr_superblock, row_nbytes) == 136, "kvr_superblock.row_nbytes");
_Static_assert(offsetof(kvr_superblock, row_count) == 144, "kvr_superblock.row_count");
_Static_assert(offsetof(kvr_superblock, ring_offset_bytes) == 152, "kvr_superblock.ring_offset_bytes");
_Static_assert(offsetof(kvr_superblock, ring_count) == 160, "kvr_superblock.ring_count");
_Static_assert(sizeof(kvr_words) == 4096, "kvr_words");
_Static_assert(offsetof(kvr_words, state) == 0, "kvr_words.state");
_Static_assert(offsetof(kvr_words, content_epoch) == 64, "kvr_words.content_epoch");
_Static_assert(offsetof(kvr_words, writer_session) == 128, "kvr_words.writer_session");
_Static_assert(offsetof(kvr_words, dirty) == 192, "kvr_words.dirty");
_Static_assert(offsetof(kvr_words, ring_epoch) == 256, "kvr_words.ring_epoch");
_Static_assert(offsetof(kvr_words, clock) == 320, "kvr_words.clock");
_Static_assert(offsetof(kvr_words, heartbeat) == 384, "kvr_words.heartbeat");
_Static_assert(offsetof(kvr_words, free_head) == 448, "kvr_words.free_head");
_Static_assert(offsetof(kvr_words, lru_oldest) == 456, "kvr_words.lru_oldest");
_Static_assert(offsetof(kvr_words, lru_newest) == 464, "kvr_words.lru_newest");
_Static_assert(offsetof(kvr_words, free_count) == 472, "kvr_words.free_count");
_Static_assert(offsetof(kvr_words, writing_count) == 480, "kvr_words.writing_count");
_Static_assert(offsetof(kvr_words, sealed_count) == 488, "kvr_words.sealed_count");
_Static_assert(offsetof(kvr_words, stale_count) == 496, "kvr_words.stale_count");
_Static_assert(offsetof(kvr_words, stored_total) == 512, "kvr_words.stored_total");
_Static_assert(offsetof(kvr_words, evicted_total) == 520, "kvr_words.evicted_total");
_Static_assert(offsetof(kvr_words, replaced_total) == 528, "kvr_words.replaced_total");
_Static_assert(offsetof(kvr_words, cleared_total) == 536, "kvr_words.cleared_total");
_Static_assert(offsetof(kvr_words, corrupt_total) == 544, "kvr_words.corrupt_total");
_Static_assert(offsetof(kvr_words, freed_total) == 552, "kvr_words.freed_total");
_Static_assert(offsetof(kvr_words, capacity) == 576, "kvr_words.capacity");
_Static_assert(offsetof(kvr_words, unready) == 584, "kvr_words.unready");
_Static_assert(offsetof(kvr_words, row_session) == 1024, "kvr_words.row_session");
_Static_assert(sizeof(kvr_record) == 64, "kvr_record");
_Static_assert(offsetof(kvr_record, key) == 0, "kvr_record.key");
_Static_assert(offsetof(kvr_record, generation) == 32, "kvr_record.generation");
_Static_assert(offsetof(kvr_record, recency) == 40, "kvr_record.recency");
_Static_assert(offsetof(kvr_record, content_epoch) == 48, "kvr_record.content_epoch");
_Static_assert(offsetof(kvr_record, data_crc) == 52, "kvr_record.data_crc");
_Static_assert(offsetof(kvr_record, record_crc) == 56, "kvr_record.record_crc");
_Static_assert(offsetof(kvr_record, key_nbytes) == 60, "kvr_record.key_nbytes");
_Static_assert(offsetof(kvr_record, flags) == 61, "kvr_record.flags");
_Static_assert(offsetof(kvr_record, owner_row) == 62, "kvr_record.owner_row");
_Static_assert(offsetof(kvr_record, state) == 63, "kvr_record.state");
_Static_assert(sizeof(kvr_link) == 16, "kvr_link");
_Static_assert(offsetof(kvr_link, chain_next) == 0, "kvr_link.chain_next");
_Static_assert(offsetof(kvr_link, prev) == 4, "kvr_link.prev");
_Static_assert(offsetof(kvr_link, next) == 8, "kvr_link.next");
_Static_assert(offsetof(kvr_link, key_hash) == 12, "kvr_link.key_hash");
_Static_assert(sizeof(kvr_row_header) == 64, "kvr_row_header");
_Static_assert(offsetof(kvr_row_header, last_stamp) == 0, "kvr_row_header.last_stamp");
_Static_assert(sizeof(kvr_table_layout) == 64, "kvr_table_layout");
_Static_assert(offsetof(kvr_table_layout, table_nbytes) == 0, "kvr_table_layout.table_nbytes");
_Static_assert(offsetof(kvr_table_layout, claims_nbytes) == 8, "kvr_table_layout.claims_nbytes");
_Static_assert(offsetof(kvr_table_layout, record_offset_bytes) == 16, "kvr_table_layout.record_offset_bytes");
_Static_assert(offsetof(kvr_table_layout, link_offset_bytes) == 24, "kvr_table_layout.link_offset_bytes");
_Static_assert(offsetof(kvr_table_layout, bucket_offset_bytes) == 32, "kvr_table_layout.bucket_offset_bytes");
_Static_assert(offsetof(kvr_table_layout, bucket_count) == 40, "kvr_table_layout.bucket_count");
_Static_assert(offsetof(kvr_table_layout, row_nbytes) == 48, "kvr_table_layout.row_nbytes");
_Static_assert(sizeof(kvr_table_info) == 104, "kvr_table_info");
_Static_assert(offsetof(kvr_table_info, part_id) == 0, "kvr_table_info.part_id");
_Static_assert(offsetof(kvr_table_info, slot_count) == 16, "kvr_table_info.slot_count");
_Static_assert(offsetof(kvr_table_info, block_nbytes) == 24, "kvr_table_info.block_nbytes");
_Static_assert(offsetof(kvr_table_info, region_count) == 32, "kvr_table_info.region_count");
_Static_assert(offsetof(kvr_table_info, slots_per_region) == 40, "kvr_table_info.slots_per_region");
_Static_assert(offsetof(kvr_table_info, manifest_nbytes) == 48, "kvr_table_info.manifest_nbytes");
_Static_assert(offsetof(kvr_table_info, session) == 56, "kvr_table_info.session");
_Static_assert(offsetof(kvr_table_info, role) == 64, "kvr_table_info.role");
_Static_assert(offsetof(kvr_table_info, row) == 68, "kvr_table_info.row");
_Static_assert(offsetof(kvr_table_info, operation_count) == 72, "kvr_table_info.operation_count");
_Static_assert(offsetof(kvr_table_info, content_epoch) == 80, "kvr_table_info.content_epoch");
_Static_assert(offsetof(kvr_table_info, heartbeat_ns) == 88, "kvr_table_info.heartbeat_ns");
_Static_assert(offsetof(kvr_table_info, capacity) == 96, "kvr_table_info.capacity");
_Static_assert(sizeof(kvr_table_stats) == 136, "kvr_table_stats");
_Static_assert(offsetof(kvr_table_stats, state) == 0, "kvr_table_stats.state");
_Static_assert(offsetof(kvr_table_stats, content_epoch) == 8, "kvr_table_stats.content_epoch");
_Static_assert(offsetof(kvr_table_stats, writer_session) == 16, "kvr_table_stats.writer_session");
_Static_assert(offsetof(kvr_table_stats, dirty) == 24, "kvr_table_stats.dirty");
_Static_assert(offsetof(kvr_table_stats, slot_count) == 32, "kvr_table_stats.slot_count");
_Static_assert(offsetof(kvr_table_stats, free_count) == 40, "kvr_table_stats.free_count");
_Static_assert(offsetof(kvr_table_stats, writing_count) == 48, "kvr_table_stats.writing_count");
_Static_assert(offsetof(kvr_table_stats, sealed_count) == 56, "kvr_table_stats.sealed_count");
_Static_assert(offsetof(kvr_table_stats, stale_count) == 64, "kvr_table_stats.stale_count");
_Static_assert(offsetof(kvr_table_stats, claimed_count) == 72, "kvr_table_stats.claimed_count");
_Static_assert(offsetof(kvr_table_stats, stored_total) == 80, "kvr_table_stats.stored_total");
_Static_assert(offsetof(kvr_table_stats, evicted_total) == 88, "kvr_table_stats.evicted_total");
_Static_assert(offsetof(kvr_table_stats, replaced_total) == 96, "kvr_table_stats.replaced_total");
_Static_assert(offsetof(kvr_table_stats, cleared_total) == 104, "kvr_table_stats.cleared_total");
_Static_assert(offsetof(kvr_table_stats, corrupt_total) == 112, "kvr_table_stats.corrupt_total");
_Static_assert(offsetof(kvr_table_stats, freed_total) == 120, "kvr_table_stats.freed_total");
_Static_assert(offsetof(kvr_table_stats, owned_count) == 128, "kvr_table_stats.owned_count");
_Static_assert(sizeof(kvr_memory) == 40, "kvr_memory");
_Static_assert(offsetof(kvr_memory, mapping) == 0, "kvr_memory.mapping");
_Static_assert(offsetof(kvr_memory, address) == 8, "kvr_memory.address");
_Static_assert(offsetof(kvr_memory, nbytes) == 16, "kvr_memory.nbytes");
_Static_assert(offsetof(kvr_memory, device) == 24, "kvr_memory.device");
_Static_assert(offsetof(kvr_memory, is_writable) == 32, "kvr_memory.is_writable");
_Static_assert(sizeof(kvr_segment) == 72, "kvr_segment");
_Static_assert(offsetof(kvr_segment, mapping) == 0, "kvr_segment.mapping");
_Static_assert(offsetof(kvr_segment, address) == 8, "kvr_segment.address");
_Static_assert(offsetof(kvr_segment, memory_nbytes) == 16, "kvr_segment.memory_nbytes");
_Static_assert(offsetof(kvr_segment, device) == 24, "kvr_segment.device");
_Static_assert(offsetof(kvr_segment, is_writable) == 32, "kvr_segment.is_writable");
_Static_assert(offsetof(kvr_segment, offset_bytes) == 40, "kvr_segment.offset_bytes");
_Static_assert(offsetof(kvr_segment, stride_bytes) == 48, "kvr_segment.stride_bytes");
_Static_assert(offsetof(kvr_segment, slot_offset_bytes) == 56, "kvr_segment.slot_offset_bytes");
_Static_assert(offsetof(kvr_segment, nbytes) == 64, "kvr_segment.nbytes");
_Static_assert(sizeof(kvr_dependency) == 24, "kvr_dependency");
_Static_assert(offsetof(kvr_dependency, kind) == 0, "kvr_dependency.kind");
_Static_assert(offsetof(kvr_dependency, value) == 8, "kvr_dependency.value");
_Static_assert(offsetof(kvr_dependency, device) == 16, "kvr_dependency.device");
_Static_assert(sizeof(kvr_queue_info) == 72, "kvr_queue_info");
_Static_assert(offsetof(kvr_queue_info, handle) == 0, "kvr_queue_info.handle");
_Static_assert(offsetof(kvr_queue_info, fd) == 8, "kvr_queue_info.fd");
_Static_assert(offsetof(kvr_queue_info, thread_count) == 12, "kvr_queue_info.thread_count");
_Static_assert(offsetof(kvr_queue_info, submitted) == 16, "kvr_queue_info.submitted");
_Static_assert(offsetof(kvr_queue_info, done) == 24, "kvr_queue_info.done");
_Static_assert(offsetof(kvr_queue_info, failed) == 32, "kvr_queue_info.failed");
_Static_assert(offsetof(kvr_queue_info, cancelled) == 40, "kvr_queue_info.cancelled");
_Static_assert(offsetof(kvr_queue_info, queued) == 48, "kvr_queue_info.queued");
_Static_assert(offsetof(kvr_queue_info, running) == 56, "kvr_queue_info.running");
_Static_assert(offsetof(kvr_queue_info, is_closing) == 64, "kvr_queue_info.is_closing");
_Static_assert(offsetof(kvr_queue_info, paused) == 68, "kvr_queue_info.paused");
_Static_assert(sizeof(kvr_operation_info) == 64, "kvr_operation_info");
_Static_assert(offsetof(kvr_operation_info, handle) == 0, "kvr_operation_info.handle");
_Static_assert(offsetof(kvr_operation_info, queue) == 8, "kvr_operation_info.queue");
_Static_assert(offsetof(kvr_operation_info, state) == 16, "kvr_operation_info.state");
_Static_assert(offsetof(kvr_operation_info, quarantine) == 20, "kvr_operation_info.quarantine");
_Static_assert(offsetof(kvr_operation_info, entry_count) == 24, "kvr_operation_info.entry_count");
_Static_assert(offsetof(kvr_operation_info, total_nbytes) == 32, "kvr_operation_info.total_nbytes");
_Static_assert(offsetof(kvr_operation_info, moved_nbytes) == 40, "kvr_operation_info.moved_nbytes");
_Static_assert(offsetof(kvr_operation_info, failed_index) == 48, "kvr_operation_info.failed_index");
_Static_assert(offsetof(kvr_operation_info, quarantine_ns) == 56, "kvr_operation_info.quarantine_ns");
_Static_assert(sizeof(kvr_copy_counts) == 56, "kvr_copy_counts");
_Static_assert(offsetof(kvr_copy_counts, queues) == 0, "kvr_copy_counts.queues");
_Static_assert(offsetof(kvr_copy_counts, operations) == 8, "kvr_copy_counts.operations");
_Static_assert(offsetof(kvr_copy_counts, in_flight) == 16, "kvr_copy_counts.in_flight");
_Static_assert(offsetof(kvr_copy_counts, quarantined) == 24, "kvr_copy_counts.quarantined");
_Static_assert(offsetof(kvr_copy_counts, quarantine_nbytes) == 32, "kvr_copy_counts.quarantine_nbytes");
_Static_assert(offsetof(kvr_copy_counts, quarantine_limit) == 40, "kvr_copy_counts.quarantine_limit");
_Static_assert(offsetof(kvr_copy_counts, fds) == 48, "kvr_copy_counts.fds");
_Static_assert(sizeof(kvr_restore_result) == 32, "kvr_restore_result");
_Static_assert(offsetof(kvr_restore_result, sealed_count) == 0, "kvr_restore_result.sealed_count");
_Static_assert(offsetof(kvr_restore_result, bad_count) == 8, "kvr_restore_result.bad_count");
_Static_assert(offsetof(kvr_restore_result, freed_count) == 16, "kvr_restore_result.freed_count");
#endif

#ifdef __cplusplus
}
#endif
#endif
