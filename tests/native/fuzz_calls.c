/* Random calls with random arguments on the whole C API, to be run under AddressSanitizer and UndefinedBehaviorSanitizer.
 *
 *     fuzz_calls CALLS SEED
 *
 * The CUDA calls reach the libcuda.so.1 that is found: the tests' fake driver, or none. Handles are live, closed or made up; numbers are often at their limits; the shared memory of parts is scribbled on now and then. Whatever
 * comes, a call ends in a status. At the end everything is closed, and nothing may be open.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kvreuse.h"

#define POOL 64
#define FIXED 8 /* first places of the pool: the part's own handles */
#define BATCH 40
#define FUNCTIONS 48

static uint64_t state;
static int64_t handles[POOL];
static int64_t calls_ok, calls_failed;

static uint64_t random64(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state * UINT64_C(2685821657736338717);
}

static int64_t below(int64_t limit) { return (int64_t)(random64() >> 1) % limit; }

static int64_t number(void)
{
    static const int64_t edges[] = {0, 1, -1, 2, 16, 31, 32, 33, 63, 64, 4095, 4096, 4097, 8192, INT32_MAX, (int64_t)INT32_MAX + 1,
                                    INT32_MIN, INT64_C(0x100000005), INT64_MAX, INT64_MIN, KVR_NBYTES_MAX, KVR_NBYTES_MAX + 1,
                                    KVR_SLOT_COUNT_MAX, KVR_BATCH_COUNT_MAX + 1};
    switch (below(4)) {
    case 0:
        return edges[below((int64_t)(sizeof edges / sizeof *edges))];
    case 1:
        return (int64_t)random64();
    default:
        return below(70000);
    }
}

static int64_t small(int64_t limit) { return below(12) ? below(limit) : number(); }

static int64_t handle(void)
{
    switch (below(16)) {
    case 0:
        return number();
    case 1:
        return handles[below(POOL)] ^ (INT64_C(1) << below(63)); /* one bit beside a real one */
    default:
        return handles[below(POOL)];
    }
}

/* Put a new handle into the pool; what it replaces is closed, or if that is mapped, the new one. */
static void keep(int64_t made)
{
    int64_t place = FIXED + below(POOL - FIXED), old = handles[place];
    int32_t status = kvr_mapping_unmap(old);
    if (status && status != KVR_ERROR_BUSY)
        status = kvr_region_close(old);
    if (status == KVR_ERROR_BUSY) {
        if (kvr_mapping_unmap(made) && kvr_region_close(made))
            abort();
        return;
    }
    handles[place] = made;
}

static void count(int32_t status)
{
    kvr_error error;
    if (status >= 0) {
        calls_ok++;
        return;
    }
    calls_failed++;
    (void)kvr_error_get(&error);
    if (error.status != status || status < KVR_ERROR_FORKED || !memchr(error.call, 0, sizeof error.call)) {
        fprintf(stderr, "status %d, error record %d\n", status, error.status);
        abort();
    }
}

/* An open part: what its functions are mostly called on. */
static int64_t table_region, claims_region, lock_region, data_region, data_mapping, part_tables[3];
static uint8_t *scribble;
static int64_t scribble_nbytes;

static int64_t table(void) { return below(8) ? part_tables[below(3)] : handle(); }

static int64_t must(int32_t status, int64_t made)
{
    if (status) {
        fprintf(stderr, "setting a part up failed: %d\n", status);
        abort();
    }
    return made;
}

static int64_t region_of(int64_t nbytes)
{
    kvr_region_info info;
    int32_t status = kvr_host_allocate(nbytes, KVR_KIND_POSIX_FD, "kvreuse-fuzz", NULL, &info);
    return must(status, info.handle);
}

static int32_t fd_of(int64_t region)
{
    int32_t fd = -1;
    must(kvr_region_export(region, &fd), 0);
    return fd;
}

static void open_part(void)
{
    static const uint8_t part_id[16] = {1};
    int64_t slots = 1 + below(40), regions = 1 + below(slots < 3 ? slots : 3), i;
    kvr_table_layout layout;
    kvr_mapping_info mapping;
    int32_t fd;
    must(kvr_table_layout_get(slots, 5, &layout), 0);
    table_region = region_of(layout.table_nbytes);
    claims_region = region_of(layout.claims_nbytes);
    lock_region = region_of(1);
    data_region = region_of(64 * 40);
    must(kvr_region_map(data_region, KVR_ACCESS_READ_WRITE, KVR_MAP_DONTFORK, &mapping), 0);
    data_mapping = mapping.handle;
    must(kvr_table_create(table_region, claims_region, part_id, slots, 64, regions, (const uint8_t *)"hello", 5), 0);
    must(kvr_table_open(table_region, claims_region, fd_of(lock_region), KVR_ROLE_KEEPER, 0, -1, 0, &part_tables[0]), 0);
    must(kvr_table_set_state(part_tables[0], KVR_PART_LAYOUT_SEALED), 0);
    must(kvr_table_admit(part_tables[0], 0, 7, KVR_ROLE_WRITER), 0);
    must(kvr_table_admit(part_tables[0], 1, 8, KVR_ROLE_READER), 0);
    must(kvr_table_open(table_region, claims_region, fd_of(lock_region), KVR_ROLE_WRITER, 7, 0, 0, &part_tables[1]), 0);
    must(kvr_table_open(table_region, claims_region, fd_of(lock_region), KVR_ROLE_READER, 8, 1, 0, &part_tables[2]), 0);
    for (i = 0; i < regions; i++)
        must(kvr_table_bind(part_tables[1], i, data_mapping), 0);
    fd = fd_of(table_region);
    scribble_nbytes = layout.table_nbytes;
    scribble = mmap(NULL, (size_t)scribble_nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    (void)close(fd);
    if (scribble == MAP_FAILED)
        abort();
    handles[0] = table_region;
    handles[1] = claims_region;
    handles[2] = lock_region;
    handles[3] = data_region;
    handles[4] = data_mapping;
    memcpy(&handles[5], part_tables, sizeof part_tables);
}

static void close_part(void)
{
    int64_t i;
    for (i = 0; i < 3; i++)
        (void)kvr_table_close(part_tables[i]); /* a random call may have closed it */
    for (i = FIXED; i < POOL; i++) /* some may be of the part's regions */
        (void)kvr_mapping_unmap(handles[i]);
    while (kvr_mapping_unmap(data_mapping) == KVR_ERROR_BUSY)
        must(kvr_mapping_use(data_mapping, -1), 0); /* uses that random calls added */
    (void)kvr_region_close(data_region);
    (void)kvr_region_close(table_region);
    (void)kvr_region_close(claims_region);
    (void)kvr_region_close(lock_region);
    (void)munmap(scribble, (size_t)scribble_nbytes);
}

/* Damage what is derived or a record; never the superblock, which is checked once, at open. */
static void damage(void)
{
    int64_t offset = KVR_WORDS_OFFSET_BYTES + below(scribble_nbytes - KVR_WORDS_OFFSET_BYTES);
    switch (below(3)) {
    case 0:
        scribble[offset] = (uint8_t)random64();
        break;
    case 1:
        offset = offset / 8 * 8;
        *(int64_t *)(void *)(scribble + offset) = number();
        break;
    default:
        offset = offset / 4 * 4;
        *(int32_t *)(void *)(scribble + offset) = (int32_t)small(50);
    }
}

typedef struct batch {
    uint8_t keys[BATCH * 32];
    uint8_t key_nbytes[BATCH];
    int64_t slots[BATCH];
    int64_t generations[BATCH];
    int64_t count;
    int64_t stride;
    const uint8_t *sizes;
} batch;

static void fill_batch(batch *b)
{
    int64_t i;
    b->count = below(BATCH + 1);
    b->stride = below(10) ? 1 + below(32) : number();
    for (i = 0; i < (int64_t)sizeof b->keys; i++)
        b->keys[i] = (uint8_t)below(3);
    for (i = 0; i < BATCH; i++) {
        b->key_nbytes[i] = (uint8_t)(below(20) ? 1 + below(b->stride > 0 && b->stride < 33 ? b->stride : 32) : below(256));
        b->slots[i] = below(20) ? below(42) - 1 : number();
        b->generations[i] = below(3) ? 1 + below(4) : number();
    }
    b->sizes = below(2) ? b->key_nbytes : NULL;
    if (below(200) == 0)
        b->count = -1 - below(5);
}

static int32_t kind(void)
{
    static const int32_t kinds[] = {KVR_KIND_NONE, KVR_KIND_POSIX_FD, KVR_KIND_FABRIC};
    return below(10) ? kinds[below(3)] : (int32_t)small(10);
}

static void one_call(void)
{
    static batch b, out;
    static uint8_t bytes[BATCH * 32], bytes_nbytes[BATCH];
    kvr_region_info region;
    kvr_mapping_info mapping;
    kvr_observation seen;
    kvr_table_info info;
    kvr_table_stats stats;
    kvr_table_layout layout;
    kvr_restore_result restored;
    kvr_handle_counts counts;
    kvr_cuda_info device;
    kvr_cuda_observation looked;
    uint8_t token[KVR_FABRIC_NBYTES];
    int64_t a = 0, c = 0, made = 0;
    uint32_t crc = 0;
    int32_t fd = -1, status;
    fill_batch(&b);
    if (below(300) == 0)
        damage();
    switch (below(FUNCTIONS)) {
    case 0:
        count(kvr_echo(number(), &a));
        break;
    case 1:
        count(kvr_crc32c((uint32_t)random64(), b.keys, below(30) ? below((int64_t)sizeof b.keys) : -1 - below(9), &crc));
        break;
    case 2:
        count(kvr_handle_counts_get(&counts));
        break;
    case 3:
    case 4:
        /* Sparse memory: any size up to the kernel's limit costs nothing. */
        status = kvr_host_allocate(number(), (int32_t)small(10), "kvreuse-fuzz", below(30) ? NULL : "/nonexistent", &region);
        count(status);
        if (!status)
            keep(region.handle);
        break;
    case 5:
        count(kvr_region_info_get(handle(), &region));
        break;
    case 6:
        status = kvr_region_export(handle(), &fd);
        count(status);
        if (!status)
            (void)close(fd);
        break;
    case 7: {
        int64_t source = handle(), nbytes, physical;
        if (kvr_region_info_get(source, &region) || kvr_region_export(source, &fd)) {
            count(kvr_region_import((int32_t)(uint32_t)((uint32_t)small(400) + 300U), number(), number(), b.keys, random64(), random64(),
                                    (uint32_t)small(3), &region));
            break;
        }
        nbytes = below(4) ? region.nbytes : number();
        physical = below(4) ? region.physical_nbytes : number();
        status = kvr_region_import(fd, nbytes, physical, region.region_id, below(4) ? region.device : random64(),
                                   region.inode, (uint32_t)small(2), &region);
        count(status);
        (void)close(fd);
        if (!status && kvr_region_close(region.handle))
            abort();
        break;
    }
    case 8:
        count(kvr_region_observe(handle(), &seen));
        break;
    case 9:
        count(kvr_region_placement(handle(), below(3) ? 1 + below(BATCH) : -below(9), out.slots, &a));
        break;
    case 10: {
        int64_t source = handle();
        /* Only what an address space can hold many of. */
        if (!kvr_region_info_get(source, &region) && region.nbytes > (1 << 20))
            break;
        status = kvr_region_map(source, (int32_t)small(4), (uint32_t)small(3), &mapping);
        count(status);
        if (!status && below(2))
            keep(mapping.handle);
        else if (!status && kvr_mapping_unmap(mapping.handle))
            abort();
        break;
    }
    case 11:
        count(kvr_mapping_info_get(handle(), &mapping));
        break;
    case 12: {
        int64_t which = handle();
        int32_t delta = below(9) ? (int32_t)below(3) - 1 : (int32_t)(random64() & 0x7FFFFFFF);
        if (which != data_mapping) { /* whose uses the part needs */
            status = kvr_mapping_use(which, delta);
            count(status);
            if (!status && delta > 0)
                count(kvr_mapping_use(which, -1));
        }
        break;
    }
    case 13: {
        int64_t which = handle();
        if (which != data_mapping)
            count(kvr_mapping_unmap(which));
        break;
    }
    case 14: {
        int64_t which = handle();
        if (which != table_region && which != claims_region && which != lock_region && which != data_region)
            count(kvr_region_close(which));
        break;
    }
    case 15:
        count(kvr_table_layout_get(number(), number(), &layout));
        break;
    case 16:
        count(kvr_table_create(handle(), handle(), b.keys, small(40), small(100), small(3), b.keys, below(BATCH)));
        break;
    case 17:
        fd = below(3) ? fd_of(lock_region) : -1;
        status = kvr_table_open(below(2) ? table_region : handle(), below(2) ? claims_region : handle(), fd,
                                (int32_t)small(4), small(9), (int32_t)(below(66) - 1), small(2), &made);
        count(status);
        if (!status && kvr_table_close(made))
            abort();
        if (status && fd >= 0)
            (void)close(fd);
        break;
    case 18: {
        int64_t which = handle();
        if (which != part_tables[0] && which != part_tables[1] && which != part_tables[2])
            count(kvr_table_close(which));
        break;
    }
    case 19:
        count(kvr_table_info_get(table(), &info));
        break;
    case 20:
        count(kvr_table_manifest_get(table(), bytes, below(3) ? BATCH : -1, &a));
        break;
    case 21:
        count(kvr_table_bind(table(), small(4), below(2) ? data_mapping : handle()));
        break;
    case 22:
        count(kvr_table_set_state(table(), below(20) ? KVR_PART_LAYOUT_SEALED : (int32_t)small(4)));
        count(kvr_table_set_unready(table(), below(4) ? 1 : 0));
        count(kvr_table_set_capacity(table(), below(3) ? small(20) : INT64_MAX));
        count(kvr_table_beat(table(), below(3) ? KVR_BEAT_MIN_NS : small(20)));
        break;
    case 23:
        count(kvr_table_admit(part_tables[0], below(4) ? 0 : (int32_t)small(64), below(4) ? 7 : small(20),
                              (int32_t)(1 + below(3))));
        break;
    case 24:
        if (below(10) == 0)
            count(kvr_table_drop(table(), (int32_t)small(64), small(20)));
        break;
    case 25:
        count(kvr_table_recover(table(), &a));
        break;
    case 26:
        count(kvr_table_restore(table(), &restored));
        break;
    case 27:
        if (below(10) == 0)
            count(kvr_table_reset(table()));
        break;
    case 28:
        count(kvr_table_match(table(), b.keys, b.stride, b.sizes, b.count, &a));
        break;
    case 29:
        count(kvr_table_lookup(table(), b.keys, b.stride, b.sizes, b.count, out.slots, out.generations));
        break;
    case 30:
        count(kvr_table_claim(table(), b.keys, b.stride, b.sizes, b.count, out.slots, out.generations, &a));
        break;
    case 31:
        count(kvr_table_claim_slots(table(), b.slots, b.generations, b.count));
        break;
    case 32:
        count(kvr_table_release(table(), b.slots, b.count));
        break;
    case 33:
        count(kvr_table_touch(table(), b.keys, b.stride, b.sizes, b.count, &a));
        break;
    case 34:
    case 35:
    case 36: {
        int64_t which = below(2) ? part_tables[1] : table();
        b.count = b.count > 12 ? 12 : b.count; /* small ones succeed more often */
        status = kvr_table_reserve(which, b.keys, b.stride, b.sizes, b.count, below(4) ? NULL : b.slots, (uint32_t)small(4),
                                   out.slots, out.generations, bytes, bytes_nbytes, &a);
        count(status);
        if (!status && below(4))
            count(kvr_table_commit(which, out.slots, out.generations, b.count, (uint32_t)small(2)));
        else if (!status)
            count(kvr_table_abort(which, out.slots, out.generations, b.count, &c));
        break;
    }
    case 37:
        count(kvr_table_evict(table(), small(5), b.keys, b.stride, b.sizes, b.count, &a));
        break;
    case 38:
        count(below(4) ? kvr_table_invalidate(table(), b.slots, b.generations, b.count, &a) : kvr_table_clear(table(), &a, &c));
        break;
    case 39:
        count(kvr_table_verify(table(), b.slots, b.count, bytes));
        break;
    case 40:
        count(kvr_cuda_info_get((int32_t)small(3), &device));
        break;
    case 41:
    case 42:
        status = kvr_cuda_allocate((int32_t)small(2), below(3) ? 1 + below(5 << 20) : number(), kind(), (uint32_t)small(2), &region);
        count(status);
        if (!status)
            keep(region.handle);
        break;
    case 43:
    case 44: {
        int64_t source = handle();
        int32_t wanted = KVR_KIND_POSIX_FD;
        memcpy(token, b.keys, sizeof token);
        region.nbytes = region.physical_nbytes = number();
        memcpy(region.region_id, b.keys, sizeof region.region_id);
        if (!kvr_region_info_get(source, &region) && kvr_region_export(source, &fd)) {
            wanted = KVR_KIND_FABRIC;
            if (!kvr_cuda_export_fabric(source, token) && kvr_cuda_fabric_done(source))
                abort();
        }
        if (!below(5))
            wanted = kind();
        if (!below(5))
            token[below(64)] ^= (uint8_t)(1 << below(8));
        status = kvr_cuda_import((int32_t)small(2), wanted, fd, token, below(5) ? region.nbytes : number(),
                                 below(5) ? region.physical_nbytes : number(), region.region_id, &region);
        count(status);
        if (fd >= 0)
            (void)close(fd);
        if (!status)
            keep(region.handle);
        break;
    }
    case 45:
        count(kvr_cuda_export_fabric(handle(), token));
        break;
    case 46:
        count(kvr_cuda_fabric_done(handle()));
        break;
    case 47:
        count(kvr_cuda_observe(handle(), &looked));
        break;
    default:
        count(below(2) ? kvr_table_inventory(table(), small(40), BATCH, out.slots, out.generations, bytes, bytes_nbytes, &a, &c)
                       : kvr_table_stats_get(table(), &stats));
    }
}

int main(int argc, char **argv)
{
    int64_t calls = argc > 1 ? atoll(argv[1]) : 20000, i;
    kvr_handle_counts left;
    state = argc > 2 ? (uint64_t)atoll(argv[2]) * UINT64_C(0x9E3779B97F4A7C15) + 1 : 1;
    open_part();
    for (i = 0; i < calls; i++) {
        if (i % 20000 == 19999) {
            close_part();
            open_part();
        }
        one_call();
    }
    close_part();
    for (i = FIXED; i < POOL; i++)
        (void)kvr_mapping_unmap(handles[i]);
    for (i = FIXED; i < POOL; i++) {
        while (!kvr_cuda_fabric_done(handles[i]))
            ;
        (void)kvr_region_close(handles[i]);
    }
    (void)kvr_handle_counts_get(&left);
    printf("%lld calls: %lld ok, %lld refused; open at the end: %lld regions, %lld mappings, %lld tables, %lld locks, %lld fds\n",
           (long long)calls, (long long)calls_ok, (long long)calls_failed, (long long)left.regions, (long long)left.mappings,
           (long long)left.tables, (long long)left.locks, (long long)left.fds);
    return left.regions || left.mappings || left.tables || left.locks || left.fds;
}
