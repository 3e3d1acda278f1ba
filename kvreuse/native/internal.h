/* What the C files share. Lock order: a part's lock (in-process mutex, then record lock), then the handle mutex. */
#ifndef KVR_INTERNAL_H
#define KVR_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

#include "kvreuse.h"

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the shared records are little-endian"
#endif

/* Only what the header declares is visible outside of the extension. */
#pragma GCC visibility push(hidden)

/* Every object that a handle names starts with this. */
typedef struct kvr_object {
    int64_t handle;
    int32_t sort;
    int32_t calls;   /* threads inside a call on it, which does not hold the mutex */
    int32_t closing; /* being closed without the mutex: stale to every other call */
    int32_t reserved;
} kvr_object;

typedef struct kvr_region {
    kvr_object object;
    int64_t nbytes;
    int64_t physical_nbytes;
    int32_t fd; /* owned; -1 for CUDA */
    int32_t kind;
    int32_t access;
    int32_t origin;
    int32_t mapping_count;
    int32_t provider; /* KVR_PROVIDER_HOST or a device's ordinal */
    int32_t fabric_count;
    int32_t reserved;
    uint64_t native; /* CUDA: the allocation handle, owned */
    uint64_t device;
    uint64_t inode;
    uint8_t region_id[16];
} kvr_region;

typedef struct kvr_mapping {
    kvr_object object;
    kvr_region *region;
    uint8_t *address;
    int64_t nbytes;
    int32_t access;
    int32_t use_count; /* by kvr_mapping_use: callers may drop these */
    int32_t hold_count; /* buffers given out, bound tables, calls that read it: only their makers drop these */
    int32_t is_unmapped; /* CUDA: only the addresses are left to give back */
    int64_t flight_count; /* operations that name it */
} kvr_mapping;

/* One lock memory in this process. */
typedef struct kvr_lock {
    struct kvr_lock *next;
    uint64_t device;
    uint64_t inode;
    int64_t users;
    int32_t fd;     /* owned */
    int32_t *parked; /* owned, more fds of the same memory, unused: closing any fd of an inode drops its record lock */
    int64_t parked_count;
    pthread_mutex_t mutex;
} kvr_lock;

/* ---- errors (handles.c) ---- */
int32_t kvr_fail(int32_t status, int32_t detail, const char *call, int64_t v0, int64_t v1, int64_t v2, int64_t v3);
int32_t kvr_fail_again(const kvr_error *error); /* what was found before something else had to be done */
int32_t kvr_fail_errno(const char *call, int32_t code);
int32_t kvr_fail_native(int32_t status, int32_t detail, const char *call, int32_t source, int64_t code, int64_t v0);

/* ---- handles (handles.c); all but kvr_forked with the handle mutex held ---- */
void kvr_handles_lock(void);
void kvr_handles_unlock(void);
int32_t kvr_forked(const char *call);
int64_t kvr_now_ns(void); /* CLOCK_MONOTONIC */
int32_t kvr_find(int64_t handle, int32_t sort, const char *call, kvr_object **out);
/* Give an object a handle. object NULL: zeroed memory for a region or a mapping, gone at kvr_unregister. */
int32_t kvr_register(kvr_object *object, int32_t sort, const char *call, kvr_object **out);
void kvr_unregister(kvr_object *object);
/* A call that lets the mutex go works on the object until it says that it is done. */
void kvr_call_begin(kvr_object *object);
void kvr_call_end(kvr_object *object);
/* Find what is to be closed, once no call is on it: others' are waited for, at most KVR_CLOSE_WAIT_NS; not in a forked child. */
int32_t kvr_find_idle(int64_t handle, int32_t sort, const char *call, kvr_object **out);
void kvr_count_fds(int64_t delta);
kvr_mapping *kvr_mapping_of(const kvr_region *region); /* any one, NULL if there is none */
kvr_lock **kvr_locks(void);
int32_t kvr_random_id(uint8_t *out); /* 16 bytes; not in a forked child */

/* ---- memory (host.c) ---- */
int32_t kvr_map_memory(int32_t fd, int64_t nbytes, int64_t offset_bytes, int32_t access, int32_t dontfork, const char *call,
                       uint8_t **out);
int64_t kvr_page_nbytes(void);
/* Give a region a handle; region_id NULL: a new id. Without the handle mutex. */
int32_t kvr_add_region(const kvr_region *made, const uint8_t *region_id, const char *call, kvr_region_info *out);
int32_t kvr_is_host(const kvr_region *region, const char *call); /* KVR_OK, or the error for a call that needs host memory */
/* For the extension's buffers: +1 or -1 view. */
int32_t kvr_mapping_view(int64_t mapping, int32_t delta, kvr_mapping_info *out);
/* A use that only its maker drops: take it with the mapping's description; drop it by kvr_mapping_hold(mapping, -1). */
int32_t kvr_mapping_take(int64_t mapping, const char *call, kvr_mapping_info *out);
void kvr_mapping_hold(int64_t mapping, int32_t delta);

/* ---- DLPack (dlpack.c) ---- */
int32_t kvr_mapping_dlpack(int64_t mapping, int32_t device_type, int32_t device_id, int32_t is_versioned, void **out);
void kvr_dlpack_delete(void *tensor, int32_t is_versioned);

/* ---- CUDA memory (cuda.c); without the handle mutex, on what the caller pinned ---- */
int32_t kvr_cuda_export_fd(kvr_region *region, int32_t *out_fd);
int32_t kvr_cuda_map(const kvr_region *region, int32_t access, const char *call, uint64_t *out);
int32_t kvr_cuda_unmap(kvr_mapping *mapping);
int32_t kvr_cuda_release(const kvr_region *region);

/* ---- the part's lock (lock.c) ---- */
int32_t kvr_lock_open(int32_t fd, kvr_lock **out); /* handle mutex held */
void kvr_lock_close(kvr_lock *lock);               /* handle mutex held */
int32_t kvr_lock_take(kvr_lock *lock, int64_t wait_ns, const char *call);
void kvr_lock_drop(kvr_lock *lock);

/* ---- CRC32C (crc32c.c) ---- */
uint32_t kvr_crc(uint32_t value, const uint8_t *data, int64_t nbytes);

#pragma GCC visibility pop

/* Words that other processes read and write: whole, with acquire and release. */
static inline int64_t kvr_load(const int64_t *word)
{
    return atomic_load_explicit((const _Atomic int64_t *)word, memory_order_acquire);
}

static inline void kvr_store(int64_t *word, int64_t value)
{
    atomic_store_explicit((_Atomic int64_t *)word, value, memory_order_release);
}

/* A counter that only the lock's holder changes, and that others read without it. */
static inline void kvr_add(int64_t *word, int64_t delta) { kvr_store(word, kvr_load(word) + delta); }

/* Nothing that follows may be seen before dirty is. */
static inline void kvr_set_dirty(kvr_words *words)
{
    kvr_store(&words->dirty, 1);
    atomic_thread_fence(memory_order_seq_cst);
}

static inline uint8_t kvr_load_state(const uint8_t *state)
{
    return atomic_load_explicit((const _Atomic uint8_t *)state, memory_order_acquire);
}

static inline void kvr_store_state(uint8_t *state, uint8_t value)
{
    atomic_store_explicit((_Atomic uint8_t *)state, value, memory_order_release);
}

#endif
