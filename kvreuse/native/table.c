/* A part as a whole: layout, creating, opening and closing it; what only its keeper does; restoring. */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "table.h"

#define PAGE_NBYTES 4096

static int64_t pages(int64_t nbytes) { return (nbytes + PAGE_NBYTES - 1) / PAGE_NBYTES * PAGE_NBYTES; }

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static void compute_layout(int64_t slot_count, int64_t manifest_nbytes, kvr_table_layout *out)
{
    int64_t bucket_count = 16;
    while (bucket_count < slot_count)
        bucket_count *= 2;
    memset(out, 0, sizeof *out);
    out->record_offset_bytes = KVR_MANIFEST_OFFSET_BYTES + pages(manifest_nbytes);
    out->link_offset_bytes = out->record_offset_bytes + pages(slot_count * (int64_t)sizeof(kvr_record));
    out->bucket_offset_bytes = out->link_offset_bytes + pages(slot_count * (int64_t)sizeof(kvr_link));
    out->bucket_count = bucket_count;
    out->table_nbytes = out->bucket_offset_bytes + pages(bucket_count * (int64_t)sizeof(int32_t));
    out->row_nbytes = pages((int64_t)sizeof(kvr_row_header) + slot_count * (int64_t)sizeof(int64_t));
    out->claims_nbytes = out->row_nbytes * KVR_ROW_COUNT;
}

static int32_t check_slot_count(int64_t slot_count, const char *call)
{
    if (slot_count < 1 || slot_count > KVR_SLOT_COUNT_MAX)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_SLOT_COUNT_RANGE, call, slot_count, KVR_SLOT_COUNT_MAX, 0, 0);
    return KVR_OK;
}

static int32_t check_manifest_nbytes(int64_t nbytes, const char *call)
{
    if (nbytes < 0 || nbytes > KVR_MANIFEST_NBYTES_MAX)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_MANIFEST_NBYTES_RANGE, call, nbytes, KVR_MANIFEST_NBYTES_MAX, 0, 0);
    return KVR_OK;
}

int32_t kvr_table_layout_get(int64_t slot_count, int64_t manifest_nbytes, kvr_table_layout *out)
{
    int32_t status = check_slot_count(slot_count, "table_layout");
    if (!status)
        status = check_manifest_nbytes(manifest_nbytes, "table_layout");
    if (!status)
        compute_layout(slot_count, manifest_nbytes, out);
    return status;
}

/* ---- the superblock ---- */

static uint32_t superblock_crc(const kvr_superblock *super)
{
    kvr_superblock copy = *super;
    copy.superblock_crc = 0;
    return kvr_crc(0, (const uint8_t *)&copy, sizeof copy);
}

/* What the superblock of such a part says, but for part id, manifest CRC and its own CRC. */
static void fill_superblock(const kvr_table_layout *layout, int64_t slot_count, int64_t block_nbytes, int64_t region_count,
                            int64_t manifest_nbytes, kvr_superblock *out)
{
    memset(out, 0, sizeof *out);
    out->magic = KVR_TABLE_MAGIC;
    out->version = KVR_TABLE_VERSION;
    out->table_nbytes = layout->table_nbytes;
    out->claims_nbytes = layout->claims_nbytes;
    out->slot_count = slot_count;
    out->block_nbytes = block_nbytes;
    out->region_count = region_count;
    out->slots_per_region = ceil_div(slot_count, region_count);
    out->manifest_offset_bytes = KVR_MANIFEST_OFFSET_BYTES;
    out->manifest_nbytes = manifest_nbytes;
    out->record_offset_bytes = layout->record_offset_bytes;
    out->link_offset_bytes = layout->link_offset_bytes;
    out->bucket_offset_bytes = layout->bucket_offset_bytes;
    out->bucket_count = layout->bucket_count;
    out->row_nbytes = layout->row_nbytes;
    out->row_count = KVR_ROW_COUNT;
}

static int32_t bad_geometry(size_t offset, int64_t found, int64_t expected, const char *call)
{
    return kvr_fail(KVR_ERROR_CORRUPT, KVR_DETAIL_TABLE_GEOMETRY, call, (int64_t)offset, found, expected, 0);
}

static int32_t check_geometry(const kvr_superblock *super, const char *call)
{
    const struct {
        size_t offset;
        int64_t found, low, high;
    } ranges[] = {
        {offsetof(kvr_superblock, slot_count), super->slot_count, 1, KVR_SLOT_COUNT_MAX},
        {offsetof(kvr_superblock, block_nbytes), super->block_nbytes, 1,
         KVR_NBYTES_MAX / (super->slot_count > 1 ? super->slot_count : 1)},
        {offsetof(kvr_superblock, region_count), super->region_count, 1,
         super->slot_count < KVR_REGION_COUNT_MAX ? super->slot_count : KVR_REGION_COUNT_MAX},
        {offsetof(kvr_superblock, manifest_nbytes), super->manifest_nbytes, 0, KVR_MANIFEST_NBYTES_MAX},
    };
    kvr_table_layout layout;
    kvr_superblock want;
    size_t i;
    for (i = 0; i < sizeof ranges / sizeof *ranges; i++)
        if (ranges[i].found < ranges[i].low || ranges[i].found > ranges[i].high)
            return bad_geometry(ranges[i].offset, ranges[i].found,
                                ranges[i].found < ranges[i].low ? ranges[i].low : ranges[i].high, call);
    compute_layout(super->slot_count, super->manifest_nbytes, &layout);
    fill_superblock(&layout, super->slot_count, super->block_nbytes, super->region_count, super->manifest_nbytes, &want);
#define SAME(field)                                                                                       \
    do {                                                                                                  \
        if ((int64_t)super->field != (int64_t)want.field)                                                 \
            return bad_geometry(offsetof(kvr_superblock, field), (int64_t)super->field, (int64_t)want.field, call); \
    } while (0)
    SAME(table_nbytes);
    SAME(claims_nbytes);
    SAME(slots_per_region);
    SAME(manifest_offset_bytes);
    SAME(reserved0);
    SAME(record_offset_bytes);
    SAME(link_offset_bytes);
    SAME(bucket_offset_bytes);
    SAME(bucket_count);
    SAME(row_nbytes);
    SAME(row_count);
    SAME(ring_offset_bytes);
    SAME(ring_count);
#undef SAME
    return KVR_OK;
}

/* Check all that the superblock says before anything else is read by it. The memory has a page at least. */
static int32_t check_superblock(const uint8_t *memory, int64_t table_nbytes, int64_t claims_nbytes, const char *call,
                                kvr_superblock *out)
{
    uint32_t crc;
    int32_t status;
    memcpy(out, memory, sizeof *out);
    if (out->magic != KVR_TABLE_MAGIC)
        return kvr_fail(KVR_ERROR_CORRUPT, KVR_DETAIL_TABLE_MAGIC, call, out->magic, KVR_TABLE_MAGIC, 0, 0);
    if (out->version != KVR_TABLE_VERSION)
        return kvr_fail(KVR_ERROR_INCOMPATIBLE, KVR_DETAIL_TABLE_VERSION, call, out->version, KVR_TABLE_VERSION, 0, 0);
    crc = superblock_crc(out);
    if (out->superblock_crc != crc)
        return kvr_fail(KVR_ERROR_CORRUPT, KVR_DETAIL_TABLE_SUPERBLOCK_CRC, call, out->superblock_crc, crc, 0, 0);
    status = check_geometry(out, call);
    if (status)
        return status;
    if (table_nbytes < out->table_nbytes)
        return kvr_fail(KVR_ERROR_CORRUPT, KVR_DETAIL_TABLE_NBYTES, call, table_nbytes, out->table_nbytes, 0, 0);
    if (claims_nbytes < out->claims_nbytes)
        return kvr_fail(KVR_ERROR_CORRUPT, KVR_DETAIL_TABLE_NBYTES, call, claims_nbytes, out->claims_nbytes, 0, 0);
    crc = kvr_crc(0, memory + KVR_MANIFEST_OFFSET_BYTES, out->manifest_nbytes);
    if (out->manifest_crc != crc)
        return kvr_fail(KVR_ERROR_CORRUPT, KVR_DETAIL_TABLE_MANIFEST_CRC, call, out->manifest_crc, crc, 0, 0);
    return KVR_OK;
}

/* ---- creating ---- */

static int32_t find_regions(int64_t table_region, int64_t claims_region, const char *call, kvr_region **table,
                            kvr_region **claims)
{
    kvr_object *first, *second;
    int32_t status = kvr_find(table_region, KVR_SORT_REGION, call, &first);
    if (!status)
        status = kvr_find(claims_region, KVR_SORT_REGION, call, &second);
    if (!status)
        status = kvr_is_host((kvr_region *)first, call);
    if (!status)
        status = kvr_is_host((kvr_region *)second, call);
    if (!status)
        status = kvr_forked(call);
    if (!status) {
        *table = (kvr_region *)first;
        *claims = (kvr_region *)second;
    }
    return status;
}

static int32_t check_writable(const kvr_region *region, const char *call)
{
    if (region->access != KVR_ACCESS_READ_WRITE)
        return kvr_fail(KVR_ERROR_PERMISSION_DENIED, KVR_DETAIL_ACCESS_READ_ONLY, call, region->object.handle, 0, 0, 0);
    return KVR_OK;
}

static int32_t check_create(const kvr_region *table, const kvr_region *claims, int64_t slot_count, int64_t block_nbytes,
                            int64_t region_count, int64_t manifest_nbytes, const char *call, kvr_table_layout *layout)
{
    int64_t total, most;
    int32_t status = check_slot_count(slot_count, call);
    if (status)
        return status;
    if (block_nbytes < 1 || block_nbytes > KVR_NBYTES_MAX)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_BLOCK_NBYTES_RANGE, call, block_nbytes, KVR_NBYTES_MAX, 0, 0);
    most = slot_count < KVR_REGION_COUNT_MAX ? slot_count : KVR_REGION_COUNT_MAX;
    if (region_count < 1 || region_count > most)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_REGION_COUNT_RANGE, call, region_count, most, 0, 0);
    status = check_manifest_nbytes(manifest_nbytes, call);
    if (status)
        return status;
    if (__builtin_mul_overflow(slot_count, block_nbytes, &total) || total > KVR_NBYTES_MAX)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_LAYOUT_NBYTES, call, slot_count, 0, 0, 0);
    compute_layout(slot_count, manifest_nbytes, layout);
    if (table->nbytes < layout->table_nbytes)
        return kvr_fail(KVR_ERROR_SIZE_MISMATCH, KVR_DETAIL_TABLE_NBYTES, call, table->nbytes, layout->table_nbytes, 0, 0);
    if (claims->nbytes < layout->claims_nbytes)
        return kvr_fail(KVR_ERROR_SIZE_MISMATCH, KVR_DETAIL_TABLE_NBYTES, call, claims->nbytes, layout->claims_nbytes, 0, 0);
    status = check_writable(table, call);
    return status ? status : check_writable(claims, call);
}

static void write_fresh(uint8_t *memory, const kvr_table_layout *layout, const uint8_t *part_id, int64_t slot_count,
                        int64_t block_nbytes, int64_t region_count, const uint8_t *manifest, int64_t manifest_nbytes)
{
    kvr_words *words = (kvr_words *)(void *)(memory + KVR_WORDS_OFFSET_BYTES);
    kvr_superblock super;
    words->content_epoch = 1;
    words->lru_oldest = -1;
    words->lru_newest = -1;
    kvr_store(&words->free_count, slot_count);
    kvr_layout_links((kvr_link *)(void *)(memory + layout->link_offset_bytes), slot_count);
    memset(memory + layout->bucket_offset_bytes, 0xFF, (size_t)layout->bucket_count * sizeof(int32_t));
    if (manifest_nbytes)
        memcpy(memory + KVR_MANIFEST_OFFSET_BYTES, manifest, (size_t)manifest_nbytes);
    fill_superblock(layout, slot_count, block_nbytes, region_count, manifest_nbytes, &super);
    memcpy(super.part_id, part_id, sizeof super.part_id);
    super.manifest_crc = kvr_crc(0, memory + KVR_MANIFEST_OFFSET_BYTES, manifest_nbytes);
    super.superblock_crc = superblock_crc(&super);
    memcpy(memory + sizeof super.magic, (const uint8_t *)&super + sizeof super.magic, sizeof super - sizeof super.magic);
    /* Last: what was cut short is no part. */
    kvr_store((int64_t *)(void *)memory, super.magic);
}

int32_t kvr_table_create(int64_t table_region, int64_t claims_region, const uint8_t *part_id, int64_t slot_count,
                         int64_t block_nbytes, int64_t region_count, const uint8_t *manifest, int64_t manifest_nbytes)
{
    static const char call[] = "table_create";
    kvr_region *table, *claims;
    kvr_table_layout layout;
    uint8_t *memory = NULL;
    int32_t status;
    kvr_handles_lock();
    status = find_regions(table_region, claims_region, call, &table, &claims);
    if (!status)
        status = check_create(table, claims, slot_count, block_nbytes, region_count, manifest_nbytes, call, &layout);
    if (!status)
        status = kvr_map_memory(table->fd, layout.table_nbytes, 0, KVR_ACCESS_READ_WRITE, 1, call, &memory);
    kvr_handles_unlock();
    if (status)
        return status;
    if (kvr_load((const int64_t *)(const void *)memory) == KVR_TABLE_MAGIC)
        status = kvr_fail(KVR_ERROR_BUSY, KVR_DETAIL_TABLE_SEALED, call,
                          kvr_load((const int64_t *)(const void *)(memory + KVR_WORDS_OFFSET_BYTES)), 0, 0, 0);
    else
        write_fresh(memory, &layout, part_id, slot_count, block_nbytes, region_count, manifest, manifest_nbytes);
    (void)munmap(memory, (size_t)layout.table_nbytes);
    return status;
}

/* ---- opening and closing ---- */

static void free_memory(kvr_table *table)
{
    kvr_late *late;
    kvr_heart_stop(table->heart);
    if (table->memory)
        (void)munmap(table->memory, (size_t)table->memory_nbytes);
    if (table->claims)
        (void)munmap((void *)(uintptr_t)table->claims, (size_t)table->claims_nbytes);
    if (table->own_memory)
        (void)munmap(table->own_memory, (size_t)table->own_memory_nbytes);
    free(table->bound);
    free(table->owners);
    free(table->given_up);
    while ((late = table->late)) {
        table->late = late->next;
        free(late);
    }
    free(table);
}

static int32_t check_open(int32_t lock_fd, int32_t role, int64_t session, int32_t row, int64_t lock_wait_ns,
                          const char *call)
{
    int32_t keeper = role == KVR_ROLE_KEEPER;
    if (role != KVR_ROLE_READER && role != KVR_ROLE_WRITER && !keeper)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_ROLE_UNKNOWN, call, role, 0, 0, 0);
    if (keeper ? session != 0 : session <= 0)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_SESSION_RANGE, call, session, 0, 0, 0);
    if (keeper ? row != -1 : row < 0 || row >= KVR_ROW_COUNT)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_ROW_RANGE, call, row, KVR_ROW_COUNT, 0, 0);
    if (lock_fd < 0)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_FD_NEGATIVE, call, lock_fd, 0, 0, 0);
    if (lock_wait_ns < 0)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_NBYTES_RANGE, call, lock_wait_ns, INT64_MAX, 0, 0);
    return KVR_OK;
}

static int32_t map_claims(kvr_table *table, int32_t claims_fd, const char *call)
{
    int32_t keeper = table->role == KVR_ROLE_KEEPER;
    int64_t start, skipped;
    uint8_t *claims;
    int32_t status;
    table->claims_nbytes = table->super.claims_nbytes;
    status = kvr_map_memory(claims_fd, table->claims_nbytes, 0, keeper ? KVR_ACCESS_READ_WRITE : KVR_ACCESS_READ, 1, call,
                            &claims);
    if (status)
        return status;
    table->claims = claims;
    if (keeper)
        return KVR_OK;
    /* Rows are multiples of 4096 bytes, the kernel's pages may be larger. */
    start = table->row * table->super.row_nbytes;
    skipped = start % kvr_page_nbytes();
    table->own_memory_nbytes = skipped + table->super.row_nbytes;
    status = kvr_map_memory(claims_fd, table->own_memory_nbytes, start - skipped, KVR_ACCESS_READ_WRITE, 1, call,
                            &table->own_memory);
    if (!status)
        table->own = (int64_t *)(void *)(table->own_memory + skipped);
    return status;
}

static int32_t open_memory(kvr_table *table, const kvr_region *region, const kvr_region *claims, const char *call)
{
    int32_t access = table->role == KVR_ROLE_READER ? KVR_ACCESS_READ : KVR_ACCESS_READ_WRITE, status;
    int64_t state;
    table->memory_nbytes = region->physical_nbytes;
    status = kvr_map_memory(region->fd, table->memory_nbytes, 0, access, 1, call, &table->memory);
    if (status)
        return status;
    status = check_superblock(table->memory, region->nbytes, claims->nbytes, call, &table->super);
    if (status)
        return status;
    table->words = (kvr_words *)(void *)(table->memory + KVR_WORDS_OFFSET_BYTES);
    state = kvr_load(&table->words->state);
    if (table->role != KVR_ROLE_KEEPER && state == KVR_PART_RETIRED)
        return kvr_fail(KVR_ERROR_STALE_EPOCH, KVR_DETAIL_PART_RETIRED, call, state, 0, 0, 0);
    if (table->role != KVR_ROLE_KEEPER && state != KVR_PART_LAYOUT_SEALED)
        return kvr_fail(KVR_ERROR_NOT_READY, KVR_DETAIL_PART_NOT_SEALED, call, state, 0, 0, 0);
    table->records = (kvr_record *)(void *)(table->memory + table->super.record_offset_bytes);
    table->links = (kvr_link *)(void *)(table->memory + table->super.link_offset_bytes);
    table->buckets = (int32_t *)(void *)(table->memory + table->super.bucket_offset_bytes);
    table->bound = calloc((size_t)table->super.region_count, sizeof *table->bound);
    if (!table->bound)
        return kvr_fail_errno("malloc", ENOMEM);
    return map_claims(table, claims->fd, call);
}

int32_t kvr_table_open(int64_t table_region, int64_t claims_region, int32_t lock_fd, int32_t role, int64_t session, int32_t row,
                       int64_t lock_wait_ns, int64_t *out_table)
{
    static const char call[] = "table_open";
    kvr_region *region, *claims;
    kvr_table *table = NULL;
    kvr_object *object;
    int32_t status;
    kvr_handles_lock();
    status = find_regions(table_region, claims_region, call, &region, &claims);
    if (!status)
        status = check_open(lock_fd, role, session, row, lock_wait_ns, call);
    if (!status && role != KVR_ROLE_READER)
        status = check_writable(region, call);
    if (!status)
        status = check_writable(claims, call);
    if (!status) {
        table = calloc(1, sizeof *table);
        if (!table)
            status = kvr_fail_errno("malloc", ENOMEM);
    }
    if (!status) {
        table->role = role;
        table->row = row;
        table->session = session;
        table->wait_ns = lock_wait_ns;
        status = open_memory(table, region, claims, call);
    }
    if (!status)
        status = kvr_register(&table->object, KVR_SORT_TABLE, call, &object);
    if (!status) {
        /* Last, since it takes the fd over. */
        status = kvr_lock_open(lock_fd, &table->lock);
        if (status)
            kvr_unregister(&table->object);
        else
            *out_table = table->object.handle;
    }
    kvr_handles_unlock();
    if (status && table)
        free_memory(table);
    return status;
}

int32_t kvr_table_close(int64_t handle)
{
    static const char call[] = "table_close";
    kvr_object *object;
    kvr_table *table = NULL;
    int64_t i;
    int32_t status;
    kvr_handles_lock();
    status = kvr_find(handle, KVR_SORT_TABLE, call, &object);
    if (!status)
        status = kvr_forked(call);
    if (!status && object->calls)
        status = kvr_fail(KVR_ERROR_BUSY, KVR_DETAIL_NONE, call, 0, 0, 0, 0);
    if (!status && ((kvr_table *)object)->operation_count)
        status = kvr_fail(KVR_ERROR_NOT_QUIESCENT, KVR_DETAIL_TABLE_IN_FLIGHT, call, handle, ((kvr_table *)object)->operation_count, 0,
                          0);
    if (!status) {
        table = (kvr_table *)object;
        kvr_unregister(object);
        for (i = 0; i < table->super.region_count; i++)
            if (table->bound[i])
                table->bound[i]->hold_count--;
        kvr_lock_close(table->lock);
    }
    kvr_handles_unlock();
    if (table)
        free_memory(table);
    return status;
}

/* ---- a call ---- */

int32_t kvr_table_enter(int64_t handle, const char *call, kvr_table **out)
{
    kvr_object *object;
    int32_t status;
    kvr_handles_lock();
    status = kvr_find(handle, KVR_SORT_TABLE, call, &object);
    if (!status)
        status = kvr_forked(call);
    if (!status) {
        object->calls++;
        *out = (kvr_table *)object;
    }
    kvr_handles_unlock();
    return status;
}

void kvr_table_leave(kvr_table *table)
{
    kvr_handles_lock();
    table->object.calls--;
    kvr_handles_unlock();
}

int32_t kvr_table_require(const kvr_table *table, const char *call, int32_t needed, int32_t also)
{
    if (table->role == needed || table->role == also)
        return KVR_OK;
    return kvr_fail(KVR_ERROR_PERMISSION_DENIED, KVR_DETAIL_ROLE_FORBIDS, call, table->role, needed, 0, 0);
}

int32_t kvr_table_broken(const char *call)
{
    return kvr_fail(KVR_ERROR_NOT_READY, KVR_DETAIL_PART_DIRTY, call, 0, 0, 0, 0);
}

static int32_t check_place(const kvr_table *table, const char *call)
{
    int64_t state = kvr_load(&table->words->state), holder;
    if (state == KVR_PART_RETIRED)
        return kvr_fail(KVR_ERROR_STALE_EPOCH, KVR_DETAIL_PART_RETIRED, call, state, 0, 0, 0);
    holder = table->role == KVR_ROLE_WRITER ? kvr_load(&table->words->writer_session) : table->session;
    if (holder == table->session)
        holder = kvr_load(&table->words->row_session[table->row]);
    if (holder != table->session)
        return kvr_fail(KVR_ERROR_STALE_EPOCH, KVR_DETAIL_SESSION_FENCED, call, table->session, holder, 0, 0);
    if (table->role == KVR_ROLE_READER && kvr_load(&table->words->unready))
        return kvr_fail(KVR_ERROR_NOT_READY, KVR_DETAIL_PART_UNREADY, call, 0, 0, 0, 0);
    return KVR_OK;
}

int32_t kvr_table_take(kvr_table *table, const char *call, int32_t check, int32_t repair)
{
    int32_t status = kvr_lock_take(table->lock, table->wait_ns, call);
    if (status)
        return status;
    if (check && table->role != KVR_ROLE_KEEPER)
        status = check_place(table, call);
    if (!status && repair && kvr_load(&table->words->dirty)) {
        kvr_rebuilt rebuilt;
        status = table->role == KVR_ROLE_READER ? kvr_table_broken(call) : kvr_rebuild(table, 1, &rebuilt);
    }
    if (!status && check && repair && (table->given_up_count || atomic_load(&table->late)) && kvr_table_settle(table))
        status = kvr_table_broken(call);
    if (status)
        kvr_lock_drop(table->lock);
    return status;
}

/* ---- what a part is ---- */

int32_t kvr_table_info_get(int64_t handle, kvr_table_info *out)
{
    kvr_table *table;
    int32_t status = kvr_table_enter(handle, "table_info", &table);
    if (status)
        return status;
    memset(out, 0, sizeof *out);
    memcpy(out->part_id, table->super.part_id, sizeof out->part_id);
    out->slot_count = table->super.slot_count;
    out->block_nbytes = table->super.block_nbytes;
    out->region_count = table->super.region_count;
    out->slots_per_region = table->super.slots_per_region;
    out->manifest_nbytes = table->super.manifest_nbytes;
    kvr_handles_lock();
    out->operation_count = table->operation_count;
    kvr_handles_unlock();
    out->content_epoch = kvr_load(&table->words->content_epoch);
    out->heartbeat_ns = kvr_load(&table->words->heartbeat);
    out->capacity = kvr_capacity(table);
    out->session = table->session;
    out->role = table->role;
    out->row = table->row;
    kvr_table_leave(table);
    return KVR_OK;
}

int32_t kvr_table_manifest_get(int64_t handle, uint8_t *out, int64_t capacity_nbytes, int64_t *out_nbytes)
{
    static const char call[] = "table_manifest";
    kvr_table *table;
    int32_t status = kvr_table_enter(handle, call, &table);
    if (status)
        return status;
    if (capacity_nbytes < 0) {
        status = kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_COUNT_RANGE, call, capacity_nbytes, INT64_MAX, 0, 0);
    } else {
        *out_nbytes = table->super.manifest_nbytes;
        if (*out_nbytes && capacity_nbytes >= *out_nbytes)
            memcpy(out, table->memory + KVR_MANIFEST_OFFSET_BYTES, (size_t)*out_nbytes);
    }
    kvr_table_leave(table);
    return status;
}

int32_t kvr_table_bind(int64_t handle, int64_t index, int64_t mapping_handle)
{
    static const char call[] = "table_bind";
    kvr_table *table;
    kvr_object *object;
    int32_t status = kvr_table_enter(handle, call, &table);
    if (status)
        return status;
    kvr_handles_lock();
    status = kvr_find(mapping_handle, KVR_SORT_MAPPING, call, &object);
    if (!status && (index < 0 || index >= table->super.region_count))
        status = kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_REGION_INDEX_RANGE, call, index, table->super.region_count, 0, 0);
    if (!status && ((kvr_mapping *)object)->region->provider != KVR_PROVIDER_HOST)
        status = kvr_fail(KVR_ERROR_NOT_SUPPORTED, KVR_DETAIL_NO_HOST_ADDRESS, call, mapping_handle, 0, 0, 0);
    if (!status) {
        kvr_mapping *mapping = (kvr_mapping *)object;
        int64_t slots = table->super.slot_count - index * table->super.slots_per_region, needed;
        slots = slots < 0 ? 0 : slots < table->super.slots_per_region ? slots : table->super.slots_per_region;
        needed = slots * table->super.block_nbytes;
        if (mapping->nbytes < needed) {
            status = kvr_fail(KVR_ERROR_SIZE_MISMATCH, KVR_DETAIL_REGION_BIND_NBYTES, call, mapping->nbytes, needed, 0, 0);
        } else {
            mapping->hold_count++;
            if (table->bound[index])
                table->bound[index]->hold_count--;
            table->bound[index] = mapping;
        }
    }
    kvr_handles_unlock();
    kvr_table_leave(table);
    return status;
}

/* ---- what only the keeper does ---- */

int32_t kvr_table_set_state(int64_t handle, int32_t state)
{
    static const char call[] = "table_set_state";
    kvr_table *table;
    int32_t status = kvr_table_enter(handle, call, &table);
    if (status)
        return status;
    status = kvr_table_require(table, call, KVR_ROLE_KEEPER, KVR_ROLE_KEEPER);
    if (!status && (state < KVR_PART_CREATING || state > KVR_PART_RETIRED))
        status = kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_STATE_RANGE, call, state, 0, 0, 0);
    if (!status)
        kvr_store(&table->words->state, state);
    kvr_table_leave(table);
    return status;
}

int32_t kvr_table_set_unready(int64_t handle, int32_t unready)
{
    static const char call[] = "table_set_unready";
    kvr_table *table;
    int32_t status = kvr_table_enter(handle, call, &table);
    if (status)
        return status;
    status = kvr_table_require(table, call, KVR_ROLE_KEEPER, KVR_ROLE_KEEPER);
    if (!status)
        kvr_store(&table->words->unready, unready != 0);
    kvr_table_leave(table);
    return status;
}

int32_t kvr_table_set_capacity(int64_t handle, int64_t capacity)
{
    static const char call[] = "table_set_capacity";
    kvr_table *table;
    int32_t status = kvr_table_enter(handle, call, &table);
    if (status)
        return status;
    status = kvr_table_require(table, call, KVR_ROLE_KEEPER, KVR_ROLE_KEEPER);
    if (!status && (capacity < 1 || capacity > table->super.slot_count))
        status = kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_SLOT_COUNT_RANGE, call, capacity, table->super.slot_count, 0, 0);
    if (!status)
        kvr_store(&table->words->capacity, capacity);
    kvr_table_leave(table);
    return status;
}

int32_t kvr_table_beat(int64_t handle, int64_t period_ns)
{
    static const char call[] = "table_beat";
    kvr_table *table;
    int32_t status = kvr_table_enter(handle, call, &table);
    if (status)
        return status;
    status = kvr_table_require(table, call, KVR_ROLE_WRITER, KVR_ROLE_WRITER);
    if (!status && (period_ns < KVR_BEAT_MIN_NS || period_ns > KVR_BEAT_MAX_NS))
        status = kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_PERIOD_RANGE, call, period_ns, KVR_BEAT_MIN_NS, KVR_BEAT_MAX_NS, 0);
    kvr_handles_lock();
    if (!status && table->heart)
        status = kvr_fail(KVR_ERROR_BUSY, KVR_DETAIL_HEARTBEAT_RUNS, call, handle, 0, 0, 0);
    if (!status)
        status = kvr_heart_start(&table->words->heartbeat, period_ns, &table->heart);
    kvr_handles_unlock();
    kvr_table_leave(table);
    return status;
}

static int32_t check_row(const kvr_table *table, int32_t row, int64_t session, const char *call)
{
    int32_t status = kvr_table_require(table, call, KVR_ROLE_KEEPER, KVR_ROLE_KEEPER);
    if (status)
        return status;
    if (row < 0 || row >= KVR_ROW_COUNT)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_ROW_RANGE, call, row, KVR_ROW_COUNT, 0, 0);
    if (session <= 0)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_SESSION_RANGE, call, session, 0, 0, 0);
    return KVR_OK;
}

static void zero_row(const kvr_table *table, int32_t row)
{
    /* A keeper's mapping of the claims is writable. */
    memset((void *)(uintptr_t)(table->claims + row * table->super.row_nbytes), 0, (size_t)table->super.row_nbytes);
}

int32_t kvr_table_admit(int64_t handle, int32_t row, int64_t session, int32_t role)
{
    static const char call[] = "table_admit";
    kvr_table *table;
    int32_t status = kvr_table_enter(handle, call, &table);
    if (status)
        return status;
    status = check_row(table, row, session, call);
    if (!status && role != KVR_ROLE_READER && role != KVR_ROLE_WRITER)
        status = kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_ROLE_UNKNOWN, call, role, 0, 0, 0);
    if (!status) {
        zero_row(table, row);
        kvr_store(&table->words->row_session[row], session);
        if (role == KVR_ROLE_WRITER) {
            kvr_store(&table->words->heartbeat, 0);
            kvr_store(&table->words->writer_session, session);
        }
    }
    kvr_table_leave(table);
    return status;
}

int32_t kvr_table_drop(int64_t handle, int32_t row, int64_t session)
{
    static const char call[] = "table_drop";
    kvr_table *table;
    int32_t status = kvr_table_enter(handle, call, &table);
    if (status)
        return status;
    status = check_row(table, row, session, call);
    if (!status) {
        if (kvr_load(&table->words->writer_session) == session)
            kvr_store(&table->words->writer_session, KVR_WRITER_SESSION_NONE);
        if (kvr_load(&table->words->row_session[row]) == session) {
            kvr_store(&table->words->row_session[row], 0);
            zero_row(table, row);
        }
    }
    kvr_table_leave(table);
    return status;
}

/* One mutator: a keeper changes a table only while no writer is admitted. */
static int32_t check_no_writer(const kvr_table *table, const char *call)
{
    int64_t writer = kvr_load(&table->words->writer_session);
    if (table->role == KVR_ROLE_KEEPER && writer != KVR_WRITER_SESSION_NONE)
        return kvr_fail(KVR_ERROR_BUSY, KVR_DETAIL_SESSION_FENCED, call, 0, writer, 0, 0);
    return KVR_OK;
}

static int32_t recover(kvr_table *table, const char *call, int64_t *out_freed)
{
    kvr_words *words = table->words;
    int64_t slot, freed = 0;
    if (kvr_load(&words->dirty)) {
        kvr_rebuilt rebuilt;
        int32_t status = kvr_rebuild(table, 0, &rebuilt);
        if (status)
            return status;
        kvr_add(&words->freed_total, rebuilt.freed);
        *out_freed = rebuilt.freed;
        return KVR_OK;
    }
    for (slot = 0; slot < table->super.slot_count; slot++) {
        if (kvr_load_state(&table->records[slot].state) != KVR_SLOT_WRITING)
            continue;
        kvr_set_dirty(words);
        if (kvr_free_slot(table, slot))
            return kvr_table_broken(call);
        kvr_add(&words->writing_count, -1);
        kvr_add(&words->freed_total, 1);
        freed++;
    }
    kvr_store(&words->dirty, 0);
    *out_freed = freed;
    return KVR_OK;
}

int32_t kvr_table_recover(int64_t handle, int64_t *out_freed)
{
    static const char call[] = "table_recover";
    kvr_table *table;
    int32_t status = kvr_table_enter(handle, call, &table);
    if (status)
        return status;
    status = kvr_table_require(table, call, KVR_ROLE_KEEPER, KVR_ROLE_KEEPER);
    if (!status)
        status = kvr_table_take(table, call, 1, 0);
    if (!status) {
        status = check_no_writer(table, call);
        if (!status)
            status = recover(table, call, out_freed);
        kvr_lock_drop(table->lock);
    }
    kvr_table_leave(table);
    return status;
}

/* ---- restoring ---- */

int32_t kvr_table_restore(int64_t handle, kvr_restore_result *out)
{
    static const char call[] = "table_restore";
    kvr_table *table;
    kvr_rebuilt rebuilt;
    int32_t status = kvr_table_enter(handle, call, &table);
    if (status)
        return status;
    status = kvr_table_require(table, call, KVR_ROLE_WRITER, KVR_ROLE_KEEPER);
    if (!status)
        status = kvr_table_take(table, call, 1, 0);
    if (!status) {
        status = check_no_writer(table, call);
        if (!status)
            status = kvr_rebuild(table, 0, &rebuilt);
        if (!status) {
            kvr_add(&table->words->freed_total, rebuilt.freed);
            memset(out, 0, sizeof *out);
            out->sealed_count = rebuilt.content;
            out->bad_count = rebuilt.bad;
            out->freed_count = rebuilt.freed + rebuilt.stale_freed;
        }
        kvr_lock_drop(table->lock);
    }
    kvr_table_leave(table);
    return status;
}

static int64_t count_content(const kvr_table *table)
{
    uint32_t epoch = kvr_epoch(table);
    int64_t slot, content = 0;
    for (slot = 0; slot < table->super.slot_count; slot++)
        content += kvr_is_content(&table->records[slot], epoch);
    return content;
}

int32_t kvr_table_reset(int64_t handle)
{
    static const char call[] = "table_reset";
    kvr_table *table;
    kvr_rebuilt rebuilt;
    int32_t status = kvr_table_enter(handle, call, &table);
    if (status)
        return status;
    status = kvr_table_require(table, call, KVR_ROLE_WRITER, KVR_ROLE_KEEPER);
    if (!status)
        status = kvr_table_take(table, call, 1, 0);
    if (!status) {
        status = check_no_writer(table, call);
        if (status)
            kvr_lock_drop(table->lock);
    }
    if (!status) {
        kvr_words *words = table->words;
        int64_t content = count_content(table);
        kvr_set_dirty(words);
        kvr_next_epoch(table);
        status = kvr_rebuild(table, 0, &rebuilt);
        if (!status) {
            kvr_add(&words->cleared_total, content);
            kvr_add(&words->freed_total, rebuilt.freed);
        }
        kvr_lock_drop(table->lock);
    }
    kvr_table_leave(table);
    return status;
}

int32_t kvr_table_expire(int64_t handle, int64_t *out_removed)
{
    static const char call[] = "table_expire";
    kvr_table *table;
    int32_t status = kvr_table_enter(handle, call, &table);
    if (status)
        return status;
    status = kvr_table_require(table, call, KVR_ROLE_KEEPER, KVR_ROLE_KEEPER);
    if (!status)
        status = kvr_table_take(table, call, 0, 0);
    if (!status) {
        int64_t content = count_content(table);
        kvr_words *words = table->words;
        /* A writer may be admitted: lists and index stay its own, and it makes them and the counts anew. */
        kvr_set_dirty(words);
        kvr_next_epoch(table);
        kvr_add(&words->stale_count, kvr_load(&words->sealed_count));
        kvr_store(&words->sealed_count, 0);
        kvr_add(&table->words->cleared_total, content);
        *out_removed = content;
        kvr_lock_drop(table->lock);
    }
    kvr_table_leave(table);
    return status;
}

int32_t kvr_table_stats_get(int64_t handle, kvr_table_stats *out)
{
    kvr_table *table;
    kvr_words *words;
    kvr_rows rows;
    int64_t slot;
    int32_t status = kvr_table_enter(handle, "table_stats", &table);
    if (status)
        return status;
    words = table->words;
    memset(out, 0, sizeof *out);
    out->state = kvr_load(&words->state);
    out->content_epoch = kvr_load(&words->content_epoch);
    out->writer_session = kvr_load(&words->writer_session);
    out->dirty = kvr_load(&words->dirty);
    out->slot_count = table->super.slot_count;
    out->free_count = kvr_load(&words->free_count);
    out->writing_count = kvr_load(&words->writing_count);
    out->sealed_count = kvr_load(&words->sealed_count);
    out->stale_count = kvr_load(&words->stale_count);
    kvr_rows_get(table, &rows);
    for (slot = 0; slot < table->super.slot_count; slot++)
        out->claimed_count += kvr_is_claimed(&rows, slot);
    out->stored_total = kvr_load(&words->stored_total);
    out->evicted_total = kvr_load(&words->evicted_total);
    out->replaced_total = kvr_load(&words->replaced_total);
    out->cleared_total = kvr_load(&words->cleared_total);
    out->corrupt_total = kvr_load(&words->corrupt_total);
    out->freed_total = kvr_load(&words->freed_total);
    out->owned_count = kvr_owned_count(table);
    kvr_table_leave(table);
    return KVR_OK;
}
