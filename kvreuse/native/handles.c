/* The one global state: the table of handles with its mutex, the list of locks and the fork flag; and a thread's last error. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "copies.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, nbytes) ((void)(address))
#define ASAN_UNPOISON_MEMORY_REGION(address, nbytes) ((void)(address))
#endif

#define GENERATION_MAX INT32_MAX
#define STORAGE_NBYTES 176
#define CHUNK_SLOTS 64
#define ID_BATCH 64

/* Three cache lines. Regions and mappings live in their slot, so that finding one touches no other memory. */
typedef struct slot {
    int32_t generation;
    int32_t reserved;
    kvr_object *object; /* NULL: closed; else in storage, or memory of its maker (a table) */
    _Alignas(8) uint8_t storage[STORAGE_NBYTES];
} slot;

_Static_assert(sizeof(slot) == 192, "three cache lines");
_Static_assert(sizeof(kvr_region) <= STORAGE_NBYTES && sizeof(kvr_mapping) <= STORAGE_NBYTES, "they live in their slot");

/* What every call reads comes first, in one cache line. Slots never move and are never freed: 192 bytes for each handle
 * that was open at the same time. */
static struct {
    pthread_mutex_t mutex;
    _Atomic int32_t forked;
    int32_t reserved;
    slot **chunks; /* CHUNK_SLOTS each */
    int64_t slot_count;
    int64_t *vacant; /* slots to use again, the last first; as many as the chunks have */
    int64_t vacant_count;
    int64_t counts[7]; /* by sort */
    int64_t fds;
    int64_t capacity;
    kvr_lock *locks;
    int64_t owner_pid;
    pthread_cond_t idle; /* the last call on something has ended */
    int64_t waiting;
    kvr_queue *queues;
    pthread_cond_t ended; /* an operation has, or a thread of a queue */
    kvr_copy_counts copies;
    int64_t ids_left;
    uint64_t id_state[2]; /* of region ids: a forked child makes none */
} process __attribute__((aligned(64))) = {.mutex = PTHREAD_MUTEX_INITIALIZER, .copies.quarantine_limit = INT64_C(1) << 30};

static _Thread_local kvr_error last_error;

/* ---- fork: the child owns nothing of this ---- */

static void before_fork(void) { pthread_mutex_lock(&process.mutex); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&process.mutex); }

static void after_fork_in_child(void)
{
    atomic_store(&process.forked, 1);
    pthread_mutex_unlock(&process.mutex);
}

__attribute__((constructor)) static void start(void)
{
    pthread_condattr_t clock;
    process.owner_pid = getpid();
    (void)pthread_condattr_init(&clock);
    (void)pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    (void)pthread_cond_init(&process.idle, &clock);
    (void)pthread_cond_init(&process.ended, &clock);
    (void)pthread_condattr_destroy(&clock);
    (void)pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

int32_t kvr_forked(const char *call)
{
    if (!atomic_load_explicit(&process.forked, memory_order_relaxed))
        return KVR_OK;
    return kvr_fail(KVR_ERROR_FORKED, KVR_DETAIL_FORKED, call, process.owner_pid, getpid(), 0, 0);
}

/* ---- errors ---- */

static int32_t fill_error(int32_t status, int32_t detail, const char *call, int32_t source, int64_t code)
{
    memset(&last_error, 0, sizeof last_error);
    last_error.status = status;
    last_error.detail = detail;
    last_error.native_source = source;
    last_error.native_code = code;
    strncpy(last_error.call, call, sizeof last_error.call - 1);
    return status;
}

int32_t kvr_fail(int32_t status, int32_t detail, const char *call, int64_t v0, int64_t v1, int64_t v2, int64_t v3)
{
    (void)fill_error(status, detail, call, KVR_NATIVE_NONE, 0);
    last_error.values[0] = v0;
    last_error.values[1] = v1;
    last_error.values[2] = v2;
    last_error.values[3] = v3;
    return status;
}

/* _status.ERRNO_STATUS holds the same rule. */
static int32_t status_of(int32_t code)
{
    switch (code) {
    case EMFILE:
    case ENFILE:
        return KVR_ERROR_TOO_MANY_FDS;
    case ENOMEM:
        return KVR_ERROR_OUT_OF_MEMORY;
    case ENOSPC:
        return KVR_ERROR_NO_SPACE;
    case EPERM:
    case EACCES:
        return KVR_ERROR_PERMISSION_DENIED;
    case ENOSYS:
        return KVR_ERROR_NOT_SUPPORTED;
    default:
        return KVR_ERROR_SYSTEM_CALL;
    }
}

int32_t kvr_fail_errno(const char *call, int32_t code)
{
    return fill_error(status_of(code), KVR_DETAIL_SYSTEM_CALL, call, KVR_NATIVE_ERRNO, code);
}

int32_t kvr_fail_native(int32_t status, int32_t detail, const char *call, int32_t source, int64_t code, int64_t v0)
{
    (void)fill_error(status, detail, call, source, code);
    last_error.values[0] = v0;
    return status;
}

int32_t kvr_fail_again(const kvr_error *error)
{
    last_error = *error;
    return error->status;
}

int32_t kvr_error_get(kvr_error *out)
{
    *out = last_error;
    return KVR_OK;
}

/* ---- handles ---- */

void kvr_handles_lock(void) { pthread_mutex_lock(&process.mutex); }
void kvr_handles_unlock(void) { pthread_mutex_unlock(&process.mutex); }
void kvr_count_fds(int64_t delta) { process.fds += delta; }
kvr_lock **kvr_locks(void) { return &process.locks; }
kvr_queue **kvr_queues(void) { return &process.queues; }
kvr_copy_counts *kvr_copies(void) { return &process.copies; }
pthread_mutex_t *kvr_handles_mutex(void) { return &process.mutex; }
void kvr_tell_ended(void) { pthread_cond_broadcast(&process.ended); }

int64_t kvr_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int32_t kvr_wait_ended(int64_t until_ns)
{
    struct timespec until = {until_ns / 1000000000, until_ns % 1000000000};
    return pthread_cond_timedwait(&process.ended, &process.mutex, &until);
}

static slot *slot_at(int64_t index) { return &process.chunks[index / CHUNK_SLOTS][index % CHUNK_SLOTS]; }

void kvr_forget_queue(const kvr_queue *queue)
{
    int64_t i;
    for (i = 0; i < process.slot_count; i++) {
        kvr_object *object = slot_at(i)->object;
        if (object && object->sort == KVR_SORT_OPERATION && ((kvr_operation *)object)->queue == queue)
            ((kvr_operation *)object)->queue = NULL;
    }
}

static int32_t grow(const char *call)
{
    int64_t capacity = process.capacity + CHUNK_SLOTS;
    slot **chunks, *chunk;
    int64_t *vacant;
    if (capacity > INT32_MAX)
        return kvr_fail(KVR_ERROR_OUT_OF_MEMORY, KVR_DETAIL_HANDLES_EXHAUSTED, call, process.slot_count, 0, 0, 0);
    chunks = realloc(process.chunks, (size_t)(capacity / CHUNK_SLOTS) * sizeof(slot *));
    if (!chunks)
        return kvr_fail_errno("malloc", ENOMEM);
    process.chunks = chunks;
    vacant = realloc(process.vacant, (size_t)capacity * sizeof *vacant);
    if (!vacant)
        return kvr_fail_errno("malloc", ENOMEM);
    process.vacant = vacant;
    chunk = aligned_alloc(64, CHUNK_SLOTS * sizeof(slot));
    if (!chunk)
        return kvr_fail_errno("malloc", ENOMEM);
    memset(chunk, 0, CHUNK_SLOTS * sizeof(slot));
    process.chunks[process.capacity / CHUNK_SLOTS] = chunk;
    process.capacity = capacity;
    return KVR_OK;
}

int32_t kvr_register(kvr_object *object, int32_t sort, const char *call, kvr_object **out)
{
    slot *place;
    int64_t index;
    if (process.vacant_count) {
        index = process.vacant[--process.vacant_count];
    } else {
        if (process.slot_count == process.capacity) {
            int32_t status = grow(call);
            if (status)
                return status;
        }
        index = process.slot_count++;
    }
    place = slot_at(index);
    if (!object) {
        ASAN_UNPOISON_MEMORY_REGION(place->storage, STORAGE_NBYTES);
        memset(place->storage, 0, STORAGE_NBYTES);
        object = (kvr_object *)(void *)place->storage;
    }
    place->generation++;
    place->object = object;
    process.counts[sort]++;
    object->sort = sort;
    object->handle = (int64_t)place->generation << 32 | index;
    *out = object;
    return KVR_OK;
}

void kvr_unregister(kvr_object *object)
{
    int64_t index = object->handle & 0xFFFFFFFF;
    slot *place = slot_at(index);
    place->object = NULL;
    process.counts[object->sort]--;
    /* An exhausted generation retires its slot: numbers are never reused. */
    if (place->generation < GENERATION_MAX)
        process.vacant[process.vacant_count++] = index;
    if ((void *)object == (void *)place->storage)
        ASAN_POISON_MEMORY_REGION(place->storage, STORAGE_NBYTES);
}

/* The next of a sequence that visits every number once (SplitMix64, Steele and others, OOPSLA 2014). */
static uint64_t next_random(uint64_t *state)
{
    uint64_t mixed = *state += UINT64_C(0x9E3779B97F4A7C15);
    mixed = (mixed ^ mixed >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    mixed = (mixed ^ mixed >> 27) * UINT64_C(0x94D049BB133111EB);
    return mixed ^ mixed >> 31;
}

/* The kernel's random bytes cost more than all else of an allocation's bookkeeping: they start every 64 ids anew. */
int32_t kvr_random_id(uint8_t *out)
{
    uint64_t made[2];
    size_t done = 0;
    _Static_assert(sizeof made == KVR_REGION_ID_NBYTES, "two numbers are an id");
    while (!process.ids_left && done < sizeof process.id_state) {
        long got = syscall(SYS_getrandom, (uint8_t *)process.id_state + done, sizeof process.id_state - done, 0);
        if (got < 0 && errno != EINTR)
            return kvr_fail_errno("getrandom", errno);
        if (got > 0)
            done += (size_t)got;
    }
    process.ids_left = (process.ids_left ? process.ids_left : ID_BATCH) - 1;
    made[0] = next_random(&process.id_state[0]);
    made[1] = next_random(&process.id_state[1]);
    memcpy(out, made, sizeof made);
    return KVR_OK;
}

int32_t kvr_find(int64_t handle, int32_t sort, const char *call, kvr_object **out)
{
    int64_t index = handle & 0xFFFFFFFF, generation = handle >> 32;
    kvr_object *object;
    const slot *place;
    if (handle <= 0)
        return kvr_fail(KVR_ERROR_INVALID_HANDLE, KVR_DETAIL_HANDLE_NOT_POSITIVE, call, handle, 0, 0, 0);
    place = index < process.slot_count ? slot_at(index) : NULL;
    if (!place || generation == 0 || generation > place->generation)
        return kvr_fail(KVR_ERROR_INVALID_HANDLE, KVR_DETAIL_HANDLE_UNKNOWN, call, handle, 0, 0, 0);
    object = place->object;
    if (!object || object->closing || generation < place->generation)
        return kvr_fail(KVR_ERROR_STALE_HANDLE, KVR_DETAIL_HANDLE_STALE, call, handle, 0, 0, 0);
    if (object->sort != sort)
        return kvr_fail(KVR_ERROR_INVALID_HANDLE, KVR_DETAIL_HANDLE_SORT, call, handle, object->sort, sort, 0);
    *out = object;
    return KVR_OK;
}

kvr_mapping *kvr_mapping_of(const kvr_region *region)
{
    int64_t i;
    for (i = 0; i < process.slot_count && region->mapping_count; i++) {
        kvr_object *object = slot_at(i)->object;
        const kvr_mapping *mapping = (const kvr_mapping *)object;
        if (object && object->sort == KVR_SORT_MAPPING && !object->closing && mapping->region == region && !mapping->is_unmapped)
            return (kvr_mapping *)object;
    }
    return NULL;
}

void kvr_call_begin(kvr_object *object) { object->calls++; }

void kvr_call_end(kvr_object *object)
{
    if (!--object->calls && process.waiting)
        pthread_cond_broadcast(&process.idle);
}

int32_t kvr_find_idle(int64_t handle, int32_t sort, const char *call, kvr_object **out)
{
    struct timespec until = {0, 0};
    for (;;) {
        int32_t status = kvr_find(handle, sort, call, out);
        if (!status)
            status = kvr_forked(call);
        if (status || !(*out)->calls)
            return status;
        if (!until.tv_sec) {
            clock_gettime(CLOCK_MONOTONIC, &until);
            until.tv_sec += KVR_CLOSE_WAIT_NS / 1000000000;
        }
        process.waiting++;
        status = pthread_cond_timedwait(&process.idle, &process.mutex, &until);
        process.waiting--;
        if (status)
            return kvr_fail(KVR_ERROR_BUSY, KVR_DETAIL_HANDLE_IN_CALL, call, handle, 0, 0, 0);
    }
}

int32_t kvr_handle_counts_get(kvr_handle_counts *out)
{
    kvr_lock *lock;
    kvr_handles_lock();
    memset(out, 0, sizeof *out);
    out->regions = process.counts[KVR_SORT_REGION];
    out->mappings = process.counts[KVR_SORT_MAPPING];
    out->tables = process.counts[KVR_SORT_TABLE];
    for (lock = process.locks; lock; lock = lock->next)
        out->locks++;
    out->fds = process.fds;
    kvr_handles_unlock();
    return KVR_OK;
}

int32_t kvr_copy_counts_get(kvr_copy_counts *out)
{
    kvr_handles_lock();
    *out = process.copies;
    out->queues = process.counts[KVR_SORT_QUEUE];
    out->operations = process.counts[KVR_SORT_OPERATION];
    kvr_handles_unlock();
    return KVR_OK;
}

int32_t kvr_abi_version(void) { return KVR_ABI_VERSION; }

int32_t kvr_echo(int64_t value, int64_t *out)
{
    *out = value;
    return KVR_OK;
}
