/* Threads that submit, cancel, wait for and release one another's copies, of buffers and of a part's slots; to be run under a sanitizer.
 *
 *     stress_copies ROUNDS
 *
 * The buffers of an operation are freed as soon as it has ended, and not before: what still wrote into them would be reported. A block that
 * was loaded has to be the one that its key names. Prints what is left at the end: nothing. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "kvreuse.h"

#define POOL 12
#define THREADS 4
#define SLOTS 8
#define BLOCK 4096
#define KEYS 24
#define ENTRIES 16

/* An operation and what it needs until it has ended. */
typedef struct job {
    int64_t operation;
    uint8_t *dst;
    uint8_t *src;
    int64_t nbytes;
    int key; /* a load's; -1: none */
    int fd;
} job;

static job *_Atomic pool[POOL];
static int64_t rounds, queue, table, mappings[2];
static uint8_t *engine; /* KEYS blocks: block i is full of the byte i + 1 */
static _Atomic int64_t loaded, stored, failures;

static void fail(const char *what)
{
    kvr_error error;
    (void)kvr_error_get(&error);
    fprintf(stderr, "%s: status %d detail %d in %s\n", what, error.status, error.detail, error.call);
    atomic_fetch_add(&failures, 1);
}

static void finish(job *done)
{
    kvr_operation_info info;
    kvr_error error;
    int64_t i;
    if (kvr_operation_info_get(done->operation, &info))
        fail("info");
    if (info.state < KVR_OPERATION_DONE)
        fail("it has ended, and says that it has not");
    if (info.state == KVR_OPERATION_DONE && done->key >= 0) {
        atomic_fetch_add(&loaded, 1);
        for (i = 0; i < done->nbytes; i++)
            if (done->dst[i] != done->key + 1) {
                fail("another block's bytes");
                break;
            }
    } else if (info.state == KVR_OPERATION_DONE && done->dst && memcmp(done->dst, done->src, (size_t)done->nbytes)) {
        fail("other bytes than were copied");
    }
    if (info.state == KVR_OPERATION_FAILED && (kvr_operation_error_get(done->operation, &error) || error.status == KVR_ERROR_CORRUPT))
        fail("a block that was committed has other bytes");
    if (kvr_operation_release(done->operation))
        fail("release");
    if (done->fd >= 0)
        (void)close(done->fd);
    free(done->dst);
    free(done->src);
    free(done);
}

/* End what is thrown away, whoever submitted it. */
static void end(job *old)
{
    if (!old)
        return;
    if (old->fd >= 0 && eventfd_write(old->fd, 1))
        fail("eventfd");
    if (kvr_operation_wait(old->operation, INT64_C(20000000000)))
        fail("it does not end");
    finish(old);
}

static job *new_job(int key)
{
    job *made = calloc(1, sizeof *made);
    made->key = key;
    made->fd = -1;
    return made;
}

static void put(job *made, unsigned *seed) { end(atomic_exchange(&pool[rand_r(seed) % POOL], made)); }

static void copy_buffers(unsigned *seed)
{
    int64_t to[ENTRIES], from[ENTRIES], lengths[ENTRIES], i, step = rand_r(seed) % 8 ? 512 : 131072;
    job *made = new_job(-1);
    kvr_memory dst = {.device = KVR_PROVIDER_HOST, .is_writable = 1}, src = {.device = KVR_PROVIDER_HOST};
    kvr_dependency after = {.kind = KVR_AFTER_FD};
    made->nbytes = step * ENTRIES;
    made->dst = malloc((size_t)made->nbytes);
    made->src = malloc((size_t)made->nbytes);
    memset(made->src, rand_r(seed) % 256, (size_t)made->nbytes);
    for (i = 0; i < ENTRIES; i++) {
        to[i] = from[i] = (i * 7 % ENTRIES) * step;
        lengths[i] = step;
    }
    dst.address = (uint64_t)(uintptr_t)made->dst;
    src.address = (uint64_t)(uintptr_t)made->src;
    dst.nbytes = src.nbytes = made->nbytes;
    if (!(rand_r(seed) % 4))
        after.value = made->fd = eventfd(0, EFD_CLOEXEC);
    if (rand_r(seed) % 8 == 0)
        (void)kvr_queue_fault(queue, 1 + rand_r(seed) % 3, rand_r(seed) % ENTRIES, rand_r(seed) % step);
    if (kvr_copy_submit(queue, &dst, &src, to, from, lengths, ENTRIES, &after, made->fd >= 0, &made->operation)) {
        fail("submit");
        free(made->dst);
        free(made->src);
        free(made);
        return;
    }
    put(made, seed);
}

static kvr_segment segment(uint8_t *memory, int64_t nbytes)
{
    kvr_segment made = {.address = (uint64_t)(uintptr_t)memory,
                        .memory_nbytes = nbytes,
                        .device = KVR_PROVIDER_HOST,
                        .is_writable = 1,
                        .stride_bytes = BLOCK,
                        .nbytes = BLOCK};
    return made;
}

static void store(unsigned *seed, int is_committed)
{
    int64_t slot, generation, evicted, freed, i, block = rand_r(seed) % KEYS;
    uint8_t key[32] = {(uint8_t)(block + 1)}, gone[32], gone_nbytes;
    kvr_segment slice = segment(engine, KEYS * BLOCK);
    job *made;
    if (kvr_table_reserve(table, key, 32, NULL, 1, NULL, KVR_RESERVE_EVICT, &slot, &generation, gone, &gone_nbytes, &evicted))
        return; /* no space, or another thread stores the same key */
    if (slot < 0)
        return;
    made = new_job(-1);
    /* So that it is still on its way when its slot is given up. */
    if (!is_committed && rand_r(seed) % 2)
        (void)kvr_queue_fault(queue, KVR_FAULT_PAUSE, 0, rand_r(seed) % BLOCK);
    if (kvr_copy_slots(queue, table, KVR_DIRECTION_IN, mappings, 2, &slot, &generation, &block, 1, &slice, 1,
                       is_committed ? KVR_SLOTS_COMMIT | KVR_SLOTS_CHECKSUM : 0, NULL, 0, &made->operation)) {
        fail("store");
        free(made);
        return;
    }
    for (i = 0; !is_committed && i < 100; i++) { /* until it has begun: one that has not would find its slot gone */
        kvr_operation_info info;
        if (kvr_operation_info_get(made->operation, &info) || info.state != KVR_OPERATION_QUEUED)
            break;
        (void)usleep(10);
    }
    if (is_committed)
        atomic_fetch_add(&stored, 1);
    else if (kvr_table_abort(table, &slot, &generation, 1, &freed))
        fail("abort");
    put(made, seed);
}

static void load(unsigned *seed)
{
    int64_t slot, generation, count = 0, none = 0;
    int name = rand_r(seed) % KEYS;
    uint8_t key[32] = {(uint8_t)(name + 1)};
    kvr_segment slice;
    job *made;
    if (kvr_table_claim(table, key, 32, NULL, 1, &slot, &generation, &count) || !count)
        return;
    made = new_job(name);
    made->nbytes = BLOCK;
    made->dst = malloc(BLOCK);
    slice = segment(made->dst, BLOCK);
    if (kvr_copy_slots(queue, table, KVR_DIRECTION_OUT, mappings, 2, &slot, &generation, &none, 1, &slice, 1,
                       rand_r(seed) % 2 ? KVR_SLOTS_VERIFY : 0, NULL, 0, &made->operation)) {
        fail("load");
        free(made->dst);
        free(made);
        made = NULL;
    }
    if (kvr_table_release(table, &slot, 1))
        fail("release of a claim");
    if (made)
        put(made, seed);
}

static void look_at_others(unsigned *seed)
{
    int place = rand_r(seed) % POOL;
    int64_t listed[4], count;
    job *found = atomic_exchange(&pool[place], NULL);
    kvr_operation_info info;
    kvr_queue_info about;
    if (kvr_queue_info_get(queue, &about) || kvr_queue_completed(queue, 4, listed, &count))
        fail("queue");
    if (about.submitted != about.done + about.failed + about.cancelled + about.queued + about.running)
        fail("the counts do not balance");
    if (!found)
        return;
    if (kvr_operation_info_get(found->operation, &info))
        fail("info");
    if (rand_r(seed) % 2)
        (void)kvr_operation_cancel(found->operation);
    if (kvr_operation_wait(found->operation, rand_r(seed) % 100000) == KVR_OK)
        finish(found);
    else
        put(found, seed);
}

static void one_step(unsigned *seed)
{
    uint8_t none[32] = {0};
    int64_t count, kept;
    kvr_table_stats stats;
    switch (rand_r(seed) % 10) {
    case 0:
    case 1:
        copy_buffers(seed);
        break;
    case 2:
    case 3:
    case 4:
        store(seed, 1);
        break;
    case 5:
        store(seed, 0);
        break;
    case 6:
    case 7:
        load(seed);
        break;
    case 8:
        look_at_others(seed);
        break;
    default:
        if (rand_r(seed) % 16 == 0)
            (void)kvr_table_clear(table, &count, &kept);
        else
            (void)kvr_table_evict(table, 1, none, 32, NULL, 0, &count);
        (void)kvr_table_stats_get(table, &stats);
        (void)kvr_queue_resume(queue);
    }
}

static void *work(void *argument)
{
    unsigned seed = (unsigned)(uintptr_t)argument * 7919U + 1U;
    int64_t i;
    for (i = 0; i < rounds; i++)
        one_step(&seed);
    return NULL;
}

/* What paused goes on, for ever. */
static _Atomic int is_over;
static void *resume(void *argument)
{
    (void)argument;
    while (!atomic_load(&is_over)) {
        (void)kvr_queue_resume(queue);
        (void)usleep(1000);
    }
    return NULL;
}

static int64_t allocate(int64_t nbytes)
{
    kvr_region_info info = {0};
    if (kvr_host_allocate(nbytes, KVR_KIND_POSIX_FD, "kvreuse-stress", NULL, &info))
        fail("allocate");
    return info.handle;
}

static int64_t open_table(int64_t memory, int64_t claims, int64_t lock, int32_t role, int64_t session, int32_t row)
{
    int64_t made = 0;
    int32_t fd;
    if (kvr_region_export(lock, &fd) || kvr_table_open(memory, claims, fd, role, session, row, INT64_C(5000000000), &made))
        fail("open");
    return made;
}

int main(int argc, char **argv)
{
    pthread_t threads[THREADS], resumer;
    kvr_table_layout layout;
    kvr_mapping_info mapped;
    kvr_handle_counts left;
    kvr_copy_counts copies;
    kvr_table_stats stats;
    uint8_t part_id[16] = {1};
    int64_t memory, claims, lock, data[2], keeper;
    int i;
    rounds = argc > 1 ? atoll(argv[1]) : 2000;
    engine = malloc(KEYS * BLOCK);
    for (i = 0; i < KEYS; i++)
        memset(engine + i * BLOCK, i + 1, BLOCK);
    (void)kvr_table_layout_get(SLOTS, 0, &layout);
    memory = allocate(layout.table_nbytes);
    claims = allocate(layout.claims_nbytes);
    lock = allocate(4096);
    if (kvr_table_create(memory, claims, part_id, SLOTS, BLOCK, 2, (const uint8_t *)"", 0))
        fail("create");
    keeper = open_table(memory, claims, lock, KVR_ROLE_KEEPER, 0, -1);
    if (kvr_table_set_state(keeper, KVR_PART_LAYOUT_SEALED) || kvr_table_admit(keeper, 0, 7, KVR_ROLE_WRITER))
        fail("admit");
    table = open_table(memory, claims, lock, KVR_ROLE_WRITER, 7, 0);
    if (kvr_table_beat(table, KVR_BEAT_MIN_NS))
        fail("beat");
    for (i = 0; i < 2; i++) {
        data[i] = allocate(SLOTS / 2 * BLOCK);
        if (kvr_region_map(data[i], KVR_ACCESS_READ_WRITE, KVR_MAP_DONTFORK, &mapped) || kvr_table_bind(table, i, mapped.handle))
            fail("map");
        mappings[i] = mapped.handle;
    }
    if (kvr_queue_open(3, KVR_QUEUE_FAULTS, &queue))
        fail("queue");
    if (failures || pthread_create(&resumer, NULL, resume, NULL))
        return 2;
    for (i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)(i + 1)))
            return 2;
    for (i = 0; i < THREADS; i++)
        (void)pthread_join(threads[i], NULL);
    for (i = 0; i < POOL; i++)
        end(atomic_load(&pool[i]));
    if (kvr_queue_close(queue, INT64_C(20000000000)))
        fail("close");
    atomic_store(&is_over, 1);
    (void)pthread_join(resumer, NULL);
    (void)kvr_table_stats_get(table, &stats);
    if (stats.owned_count || stats.claimed_count || stats.writing_count)
        fail("slots have owners, claims or a reservation left");
    if (kvr_table_close(table) || kvr_table_close(keeper))
        fail("close of the tables");
    for (i = 0; i < 2; i++)
        if (kvr_mapping_unmap(mappings[i]) || kvr_region_close(data[i]))
            fail("unmap");
    if (kvr_region_close(memory) || kvr_region_close(claims) || kvr_region_close(lock))
        fail("close of the regions");
    free(engine);
    (void)kvr_handle_counts_get(&left);
    (void)kvr_copy_counts_get(&copies);
    printf("%lld stores, %lld loads; left: %lld regions, %lld mappings, %lld tables, %lld queues, %lld operations, %lld fds\n",
           (long long)stored, (long long)loaded, (long long)left.regions, (long long)left.mappings, (long long)left.tables,
           (long long)copies.queues, (long long)copies.operations, (long long)(left.fds + copies.fds));
    return failures || !stored || !loaded || left.regions || left.mappings || left.tables || copies.queues || copies.operations ||
           left.fds || copies.fds || copies.in_flight;
}
