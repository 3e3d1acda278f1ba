/* Taking copies in: what a batch names is checked whole, held, and turned into addresses, before one byte moves. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "copies.h"

/* Memory as it is known while it is held. */
typedef struct place {
    uint64_t address;
    int64_t nbytes;
    int32_t device;
    int32_t is_writable;
    int64_t mapping;
    const kvr_region *region; /* NULL: foreign */
} place;

/* ---- memory ---- */

/* Find a mapping and count the operation on it. The mutex is held. */
static int32_t hold_mapping(kvr_operation *operation, int64_t handle, const char *call, kvr_mapping **out)
{
    kvr_object *object;
    kvr_mapping *mapping;
    int32_t status = kvr_find(handle, KVR_SORT_MAPPING, call, &object);
    if (status)
        return status;
    mapping = (kvr_mapping *)object;
    if (mapping->is_unmapped)
        return kvr_fail(KVR_ERROR_STALE_HANDLE, KVR_DETAIL_HANDLE_STALE, call, handle, 0, 0, 0);
    mapping->flight_count++;
    operation->mappings[operation->mapping_count++] = mapping;
    *out = mapping;
    return KVR_OK;
}

static int32_t hold_memory(kvr_operation *operation, const kvr_memory *memory, const char *call, place *out)
{
    kvr_mapping *mapping;
    int32_t status;
    if (!memory->mapping) {
        if (memory->nbytes < 0 || memory->nbytes > KVR_NBYTES_MAX || memory->address > UINT64_MAX - (uint64_t)memory->nbytes ||
            (!memory->address && memory->nbytes))
            return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_ADDRESS_RANGE, call, (int64_t)memory->address, memory->nbytes, 0, 0);
        if (memory->device < KVR_PROVIDER_HOST || memory->device >= KVR_ORDINAL_COUNT_MAX)
            return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_ORDINAL_RANGE, call, memory->device, KVR_ORDINAL_COUNT_MAX, 0, 0);
        *out = (place){memory->address, memory->nbytes, (int32_t)memory->device, memory->is_writable != 0, 0, NULL};
        return KVR_OK;
    }
    status = hold_mapping(operation, memory->mapping, call, &mapping);
    if (!status)
        *out = (place){(uint64_t)(uintptr_t)mapping->address,
                       mapping->region->nbytes,
                       mapping->region->provider,
                       mapping->access == KVR_ACCESS_READ_WRITE,
                       memory->mapping,
                       mapping->region};
    return status;
}

static int32_t check_writable(const place *memory, const char *call)
{
    if (memory->is_writable)
        return KVR_OK;
    return kvr_fail(KVR_ERROR_PERMISSION_DENIED, KVR_DETAIL_COPY_READ_ONLY, call, memory->mapping, 0, 0, 0);
}

/* Which device's context copies between the two; KVR_PROVIDER_HOST: the CPU does. */
static int32_t copier(int32_t dst, int32_t src) { return dst >= 0 ? dst : src; }

/* ---- overlaps ---- */

typedef struct interval {
    uint64_t start;
    int64_t entry;
} interval;

#define DIGIT_BITS 11

/* Sort by start, some bits at a time from the lowest one that is not equal in all. Returns the one of the two arrays that holds the result. */
static interval *sort_intervals(interval *from, interval *to, int64_t count)
{
    uint32_t places[1 << DIGIT_BITS];
    /* A few entries are not worth looking at many counters. */
    int32_t bits = count < 256 ? 8 : DIGIT_BITS, shift;
    uint64_t mask = (UINT64_C(1) << bits) - 1, differing = 0;
    int64_t i;
    for (i = 1; i < count; i++)
        differing |= from[i].start ^ from[0].start;
    for (shift = differing ? __builtin_ctzll(differing) : 64; shift < 64 && differing >> shift; shift += bits) {
        interval *kept = from;
        uint32_t sum = 0;
        memset(places, 0, (size_t)(mask + 1) * sizeof places[0]);
        for (i = 0; i < count; i++)
            places[from[i].start >> shift & mask]++;
        for (i = 0; i <= (int64_t)mask; i++) {
            uint32_t n = places[i];
            places[i] = sum;
            sum += n;
        }
        for (i = 0; i < count; i++)
            to[places[from[i].start >> shift & mask]++] = from[i];
        from = to;
        to = kept;
    }
    return from;
}

static int32_t overlap(int32_t detail, int64_t a, int64_t b, const char *call)
{
    if (detail == KVR_DETAIL_COPY_OVERLAP && a > b) {
        int64_t kept = a;
        a = b;
        b = kept;
    }
    return kvr_fail(KVR_ERROR_RANGE, detail, call, a, b, 0, 0);
}

/* Ascending without overlaps, as most batches are. */
static int32_t is_ascending(const kvr_entry *entries, int64_t count)
{
    int64_t i;
    uint64_t end = 0;
    for (i = 0; i < count; i++) {
        if (entries[i].dst < end)
            return 0;
        end = entries[i].dst + (uint64_t)entries[i].nbytes;
    }
    return 1;
}

#define GRID_COUNT_MIN 32        /* fewer entries are sorted sooner than many bits are cleared */
#define GRID_PLACES_AN_ENTRY 256 /* a bit each: less than sorting would need */

/* Every destination begins at another multiple of a unit and is no longer than it, as blocks of a cache do: the unit is a power of two, or
 * the length of the first. 0: they may overlap or not, and have to be sorted. */
static int32_t is_on_grid(const kvr_entry *entries, int64_t count, uint64_t low, uint64_t high)
{
    uint64_t unit, starts = 0, *taken;
    int64_t i, longest = 0;
    int32_t shift, is_power, is_good = 1;
    if (count < GRID_COUNT_MIN)
        return 0;
    for (i = 0; i < count; i++) {
        starts |= entries[i].dst - low;
        longest = entries[i].nbytes > longest ? entries[i].nbytes : longest;
    }
    unit = starts & -starts;
    is_power = unit >= (uint64_t)longest;
    if (!is_power)
        unit = (uint64_t)entries[0].nbytes;
    if (unit < (uint64_t)longest || (high - low) / unit >= (uint64_t)count * GRID_PLACES_AN_ENTRY)
        return 0;
    taken = calloc((size_t)((high - low) / unit / 64 + 1), sizeof *taken);
    if (!taken)
        return 0;
    shift = __builtin_ctzll(unit);
    for (i = 0; i < count && is_good; i++) {
        uint64_t at = entries[i].dst - low, place = is_power ? at >> shift : at / unit, bit = UINT64_C(1) << (place & 63);
        is_good = place * unit == at && !(taken[place / 64] & bit);
        taken[place / 64] |= bit;
    }
    free(taken);
    return is_good;
}

/* Destinations, sorted and free of overlaps, against sorted sources. Entries have bytes. */
static int32_t check_crossing(const kvr_entry *entries, const interval *dsts, const interval *srcs, int64_t count, const char *call)
{
    int64_t i, j = 0;
    uint64_t reach = 0; /* sources may overlap one another: the farthest end so far, and whose it is */
    int64_t reacher = -1;
    for (i = 0; i < count; i++) {
        uint64_t start = dsts[i].start, end = start + (uint64_t)entries[dsts[i].entry].nbytes;
        for (; j < count && srcs[j].start < end; j++) {
            uint64_t source_end = srcs[j].start + (uint64_t)entries[srcs[j].entry].nbytes;
            if (source_end > reach) {
                reach = source_end;
                reacher = srcs[j].entry;
            }
        }
        if (reach > start)
            return overlap(KVR_DETAIL_COPY_CROSS_OVERLAP, entries[dsts[i].entry].index, entries[reacher].index, call);
    }
    return KVR_OK;
}

/* Destinations must not overlap, nor be read by the same batch. `shift`: what to add to a source's address to compare it with those of
 * destinations, where both are mappings of the same memory. */
static int32_t check_overlaps(const kvr_entry *entries, int64_t count, uint64_t shift, const char *call)
{
    uint64_t low = UINT64_MAX, high = 0, source_low = UINT64_MAX, source_high = 0;
    int64_t i;
    interval *memory, *dsts, *srcs, *spare;
    int32_t status = KVR_OK, is_crossing;
    for (i = 0; i < count; i++) {
        uint64_t dst = entries[i].dst, src = entries[i].src + shift, nbytes = (uint64_t)entries[i].nbytes;
        low = dst < low ? dst : low;
        high = dst + nbytes > high ? dst + nbytes : high;
        source_low = src < source_low ? src : source_low;
        source_high = src + nbytes > source_high ? src + nbytes : source_high;
    }
    is_crossing = low < source_high && source_low < high;
    if (!is_crossing && (is_ascending(entries, count) || is_on_grid(entries, count, low, high)))
        return KVR_OK;
    memory = malloc((size_t)count * 3 * sizeof *memory);
    if (!memory)
        return kvr_fail_errno("malloc", ENOMEM);
    dsts = memory;
    srcs = memory + count;
    spare = memory + 2 * count;
    low = is_crossing && source_low < low ? source_low : low;
    for (i = 0; i < count; i++) {
        dsts[i] = (interval){entries[i].dst - low, i};
        if (is_crossing)
            srcs[i] = (interval){entries[i].src + shift - low, i};
    }
    if (is_crossing) {
        interval *sorted = sort_intervals(srcs, spare, count);
        if (sorted == spare)
            spare = srcs;
        srcs = sorted;
    }
    dsts = sort_intervals(dsts, spare, count);
    for (i = 1; i < count && !status; i++)
        if (dsts[i - 1].start + (uint64_t)entries[dsts[i - 1].entry].nbytes > dsts[i].start)
            status = overlap(KVR_DETAIL_COPY_OVERLAP, entries[dsts[i - 1].entry].index, entries[dsts[i].entry].index, call);
    if (!status && is_crossing)
        status = check_crossing(entries, dsts, srcs, count, call);
    free(memory);
    return status;
}

/* ---- dependencies ---- */

/* The mutex is held. */
static int32_t add_wait(kvr_operation *operation, int64_t index, const kvr_dependency *after, const char *call)
{
    kvr_wait *wait = &operation->waits[operation->wait_count];
    kvr_object *object;
    int32_t status;
    *wait = (kvr_wait){.kind = (int32_t)after->kind, .fd = -1};
    switch (after->kind) {
    case KVR_AFTER_FD:
        if (after->value < 0 || after->value > INT32_MAX)
            return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_FD_NEGATIVE, call, after->value, 0, 0, 0);
        wait->fd = fcntl((int)after->value, F_DUPFD_CLOEXEC, 0);
        if (wait->fd < 0)
            return kvr_fail_errno("fcntl", errno);
        kvr_copies()->fds++;
        break;
    case KVR_AFTER_OPERATION:
        status = kvr_find(after->value, KVR_SORT_OPERATION, call, &object);
        if (status)
            return status;
        wait->operation = (kvr_operation *)object;
        wait->operation->users++;
        wait->operation->dependants++;
        break;
    case KVR_AFTER_CUDA_EVENT:
        if (after->device < 0 || after->device >= KVR_ORDINAL_COUNT_MAX)
            return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_ORDINAL_RANGE, call, after->device, KVR_ORDINAL_COUNT_MAX, 0, 0);
        wait->device = (int32_t)after->device;
        wait->event = (uint64_t)after->value;
        break;
    default:
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_AFTER_KIND, call, index, after->kind, 0, 0);
    }
    operation->wait_count++;
    return KVR_OK;
}

/* ---- an operation in the making ---- */

static int32_t check_counts(int64_t count, int64_t after_count, const char *call)
{
    if (count < 0 || count > KVR_BATCH_COUNT_MAX)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_COUNT_RANGE, call, count, KVR_BATCH_COUNT_MAX, 0, 0);
    if (after_count < 0 || after_count > KVR_AFTER_COUNT_MAX)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_COUNT_RANGE, call, after_count, KVR_AFTER_COUNT_MAX, 0, 0);
    return KVR_OK;
}

static kvr_operation *make_operation(int64_t entry_count, int64_t mapping_count, int64_t after_count)
{
    kvr_operation *made = calloc(1, sizeof *made);
    if (!made)
        return NULL;
    made->device = KVR_PROVIDER_HOST;
    made->failed_index = -1;
    made->entry_count = entry_count;
    made->entries = malloc((size_t)(entry_count + 1) * sizeof *made->entries);
    made->mappings = calloc((size_t)mapping_count + 1, sizeof *made->mappings);
    made->waits = calloc((size_t)after_count + 1, sizeof *made->waits);
    if (made->entries && made->mappings && made->waits)
        return made;
    kvr_operation_free(made);
    return NULL;
}

/* Find the queue and see that it takes work; it is pinned then. The mutex is held. */
static int32_t enter_queue(int64_t handle, const char *call, kvr_queue **out)
{
    kvr_object *object;
    kvr_queue *queue;
    int32_t status = kvr_find(handle, KVR_SORT_QUEUE, call, &object);
    if (!status)
        status = kvr_forked(call);
    if (status)
        return status;
    queue = (kvr_queue *)object;
    if (queue->is_closing)
        return kvr_fail(KVR_ERROR_HANDLE_CLOSED, KVR_DETAIL_QUEUE_CLOSING, call, handle, 0, 0, 0);
    if (kvr_copies()->quarantine_nbytes > kvr_copies()->quarantine_limit)
        return kvr_fail(KVR_ERROR_NOT_QUIESCENT, KVR_DETAIL_QUARANTINE_FULL, call, kvr_copies()->quarantine_nbytes,
                        kvr_copies()->quarantine_limit, 0, 0);
    kvr_call_begin(&queue->object);
    *out = queue;
    return KVR_OK;
}

static int32_t add_waits(kvr_operation *operation, const kvr_dependency *after, int64_t after_count, const char *call)
{
    int64_t i;
    int32_t status = KVR_OK;
    for (i = 0; i < after_count && !status; i++)
        status = add_wait(operation, i, &after[i], call);
    return status;
}

/* Whether the submitting thread should copy it: a hand-over to another thread takes longer than so many bytes do. */
static int32_t is_small(const kvr_queue *queue, const kvr_operation *operation)
{
    return operation->device < 0 && operation->total_nbytes <= KVR_COPY_INLINE_NBYTES && !operation->wait_count &&
           !operation->fault.kind && !queue->first;
}

/* The last step: the queue takes the operation. The mutex is held. */
static int32_t accept(kvr_queue *queue, kvr_operation *operation, const char *call, int64_t *out)
{
    kvr_object *object;
    int32_t status;
    operation->fault = queue->fault;
    queue->fault = (kvr_fault){.kind = KVR_FAULT_NONE};
    if (operation->fault.kind == KVR_FAULT_SUBMIT)
        return kvr_fail_errno("submit", (int32_t)operation->fault.value);
    status = kvr_register(&operation->object, KVR_SORT_OPERATION, call, &object);
    if (status)
        return status;
    operation->queue = queue;
    queue->submitted++;
    queue->queued++;
    kvr_copies()->in_flight++;
    *out = operation->object.handle;
    if (is_small(queue, operation)) {
        queue->first = queue->last = operation;
        kvr_operation_run(queue, operation);
        return KVR_OK;
    }
    if (queue->last)
        queue->last->next = operation;
    else
        queue->first = operation;
    queue->last = operation;
    queue->has_waits = queue->has_waits || operation->wait_count;
    kvr_queue_wake_for(queue, operation);
    return KVR_OK;
}

/* ---- copies between two memories ---- */

/* Bounds of every entry, in one pass. */
static int32_t fill_entries(kvr_operation *operation, const place *dst, const place *src, const int64_t *dst_offsets,
                            const int64_t *src_offsets, const int64_t *lengths, const char *call)
{
    kvr_entry *entry = operation->entries;
    int64_t i, total = 0;
    for (i = 0; i < operation->entry_count; i++) {
        int64_t to = dst_offsets[i], from = src_offsets[i], nbytes = lengths[i];
        if (nbytes < 0 || to < 0 || nbytes > dst->nbytes || to > dst->nbytes - nbytes)
            return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_COPY_DST_RANGE, call, i, to, nbytes, dst->nbytes);
        if (from < 0 || nbytes > src->nbytes || from > src->nbytes - nbytes)
            return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_COPY_SRC_RANGE, call, i, from, nbytes, src->nbytes);
        if (!nbytes)
            continue;
        *entry++ = (kvr_entry){dst->address + (uint64_t)to, src->address + (uint64_t)from, nbytes, i};
        /* Destinations do not overlap, so that the sum cannot be larger than their memory. */
        total = total > KVR_NBYTES_MAX - nbytes ? KVR_NBYTES_MAX : total + nbytes;
    }
    operation->entry_count = entry - operation->entries;
    operation->total_nbytes = total;
    return KVR_OK;
}

int32_t kvr_copy_submit(int64_t queue_handle, const kvr_memory *destination, const kvr_memory *source,
                        const int64_t *destination_offsets, const int64_t *source_offsets, const int64_t *lengths, int64_t count,
                        const kvr_dependency *after, int64_t after_count, int64_t *out_operation)
{
    static const char call[] = "copy_submit";
    kvr_operation *operation;
    kvr_queue *queue;
    place dst, src;
    int32_t status = check_counts(count, after_count, call);
    if (status)
        return status;
    operation = make_operation(count, 2, after_count);
    if (!operation)
        return kvr_fail_errno("malloc", ENOMEM);
    kvr_handles_lock();
    status = enter_queue(queue_handle, call, &queue);
    if (status) {
        kvr_handles_unlock();
        kvr_operation_free(operation);
        return status;
    }
    status = hold_memory(operation, destination, call, &dst);
    if (!status)
        status = hold_memory(operation, source, call, &src);
    if (!status)
        status = check_writable(&dst, call);
    if (!status)
        status = add_waits(operation, after, after_count, call);
    kvr_handles_unlock();
    if (!status)
        status = fill_entries(operation, &dst, &src, destination_offsets, source_offsets, lengths, call);
    if (!status)
        status = check_overlaps(operation->entries, operation->entry_count,
                                dst.region && dst.region == src.region ? dst.address - src.address : 0, call);
    if (!status) {
        operation->device = copier(dst.device, src.device);
        if (operation->device >= 0)
            status = kvr_cuda_ready(operation->device, call);
    }
    kvr_handles_lock();
    if (!status)
        status = accept(queue, operation, call, out_operation);
    if (status)
        kvr_operation_let_go(operation);
    kvr_call_end(&queue->object);
    kvr_handles_unlock();
    if (status)
        kvr_operation_free(operation);
    return status;
}

/* ---- copies of slots ---- */

typedef struct batch {
    int32_t direction;
    const int64_t *mappings;
    int64_t mapping_count;
    const int64_t *slots;
    const int64_t *generations;
    const int64_t *engine_blocks;
    int64_t count;
    const kvr_segment *segments;
    int64_t segment_count;
    uint32_t flags;
} batch;

static int32_t check_batch(const batch *given, const char *call)
{
    uint32_t known = given->direction == KVR_DIRECTION_IN ? KVR_SLOTS_COMMIT | KVR_SLOTS_CHECKSUM : KVR_SLOTS_VERIFY;
    if (given->direction != KVR_DIRECTION_IN && given->direction != KVR_DIRECTION_OUT)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_DIRECTION_UNKNOWN, call, given->direction, 0, 0, 0);
    if (given->flags & ~known)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_FLAGS_UNKNOWN, call, given->flags, known, 0, 0);
    if (given->segment_count < 0 || given->segment_count > KVR_BATCH_COUNT_MAX)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_COUNT_RANGE, call, given->segment_count, KVR_BATCH_COUNT_MAX, 0, 0);
    if (given->count && given->segment_count > KVR_BATCH_COUNT_MAX / given->count)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_COUNT_RANGE, call, given->count, KVR_BATCH_COUNT_MAX / given->segment_count, 0, 0);
    return KVR_OK;
}

/* Hold the data regions' mappings, which have to be this part's size. The mutex is held. */
static int32_t hold_data(kvr_operation *operation, const kvr_table *table, const batch *given, const char *call)
{
    const kvr_superblock *super = &table->super;
    int64_t i;
    if (given->mapping_count != super->region_count)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_REGION_INDEX_RANGE, call, given->mapping_count, super->region_count, 0, 0);
    for (i = 0; i < given->mapping_count; i++) {
        int64_t first = i * super->slots_per_region, last = first + super->slots_per_region, needed;
        kvr_mapping *mapping;
        int32_t status = hold_mapping(operation, given->mappings[i], call, &mapping);
        if (status)
            return status;
        needed = ((last < super->slot_count ? last : super->slot_count) - first) * super->block_nbytes;
        if (mapping->region->nbytes < needed)
            return kvr_fail(KVR_ERROR_SIZE_MISMATCH, KVR_DETAIL_REGION_BIND_NBYTES, call, mapping->region->nbytes, needed, 0, 0);
        if (given->direction == KVR_DIRECTION_IN && mapping->access != KVR_ACCESS_READ_WRITE)
            return kvr_fail(KVR_ERROR_PERMISSION_DENIED, KVR_DETAIL_COPY_READ_ONLY, call, given->mappings[i], 0, 0, 0);
        operation->device = copier(operation->device, mapping->region->provider);
    }
    return KVR_OK;
}

static int32_t hold_segments(kvr_operation *operation, const kvr_table *table, const batch *given, place *places, const char *call)
{
    int64_t block = table->super.block_nbytes, i;
    for (i = 0; i < given->segment_count; i++) {
        const kvr_segment *segment = &given->segments[i];
        kvr_memory memory = {segment->mapping, segment->address, segment->memory_nbytes, segment->device, segment->is_writable};
        int32_t status = hold_memory(operation, &memory, call, &places[i]);
        if (!status && given->direction == KVR_DIRECTION_OUT)
            status = check_writable(&places[i], call);
        if (status)
            return status;
        if (segment->nbytes < 0 || segment->slot_offset_bytes < 0 || segment->nbytes > block ||
            segment->slot_offset_bytes > block - segment->nbytes)
            return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_SEGMENT_RANGE, call, i, segment->slot_offset_bytes, segment->nbytes, block);
        if (segment->offset_bytes < 0 || segment->stride_bytes < segment->nbytes)
            return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_STRIDE_RANGE, call, i, segment->offset_bytes, segment->stride_bytes,
                            segment->nbytes);
        operation->device = copier(operation->device, places[i].device);
    }
    return KVR_OK;
}

/* Blocks 0..out-1 of a segment lie in its memory. */
static int64_t blocks_of(const kvr_segment *segment, const place *memory)
{
    int64_t room = memory->nbytes - segment->nbytes;
    if (segment->offset_bytes > room)
        return 0;
    return segment->stride_bytes ? (room - segment->offset_bytes) / segment->stride_bytes + 1 : KVR_BATCH_COUNT_MAX;
}

static int32_t fill_slots(kvr_operation *operation, const kvr_table *table, const batch *given, const place *places, const char *call)
{
    const kvr_superblock *super = &table->super;
    kvr_entry *entry = operation->entries;
    int64_t i, s, total = 0;
    for (s = 0; s < given->segment_count; s++) {
        const kvr_segment *segment = &given->segments[s];
        int64_t blocks = blocks_of(segment, &places[s]);
        for (i = 0; i < given->count; i++) {
            int64_t slot = operation->slots[i], block = given->engine_blocks[i];
            uint64_t engine, part;
            if (slot < 0 || !segment->nbytes)
                continue;
            if (block < 0 || block >= blocks)
                return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_ENGINE_BLOCK_RANGE, call, i, block, s, places[s].nbytes);
            engine = places[s].address + (uint64_t)(segment->offset_bytes + block * segment->stride_bytes);
            part = (uint64_t)(uintptr_t)operation->mappings[slot / super->slots_per_region]->address +
                   (uint64_t)(slot % super->slots_per_region * super->block_nbytes + segment->slot_offset_bytes);
            *entry++ = given->direction == KVR_DIRECTION_IN ? (kvr_entry){part, engine, segment->nbytes, i}
                                                            : (kvr_entry){engine, part, segment->nbytes, i};
            total = total > KVR_NBYTES_MAX - segment->nbytes ? KVR_NBYTES_MAX : total + segment->nbytes;
        }
    }
    operation->entry_count = entry - operation->entries;
    operation->total_nbytes = total;
    return KVR_OK;
}

/* Copy the caller's slots, and check the copy. */
static int32_t copy_slot_arrays(kvr_operation *operation, const kvr_table *table, const batch *given, const char *call)
{
    size_t nbytes = (size_t)(given->count + 1) * sizeof(int64_t);
    int64_t i;
    operation->slots = malloc(nbytes);
    operation->generations = malloc(nbytes);
    operation->places = malloc(nbytes);
    if (!operation->slots || !operation->generations || !operation->places)
        return kvr_fail_errno("malloc", ENOMEM);
    if (given->count) {
        memcpy(operation->slots, given->slots, (size_t)given->count * sizeof(int64_t));
        memcpy(operation->generations, given->generations, (size_t)given->count * sizeof(int64_t));
    }
    operation->slot_count = given->count;
    for (i = 0; i < given->count; i++)
        if (operation->slots[i] < -1 || operation->slots[i] >= table->super.slot_count)
            return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_SLOT_RANGE, call, i, operation->slots[i], table->super.slot_count, 0);
    return given->direction == KVR_DIRECTION_IN ? kvr_check_repeated(operation->slots, given->count, call) : KVR_OK;
}

/* Claim the slots for the operation itself: only those that are there, in the order of entries. */
static int32_t claim_slots(kvr_operation *operation, int64_t table_handle)
{
    int64_t i, count = 0;
    int32_t status;
    kvr_late *claims;
    for (i = 0; i < operation->slot_count; i++)
        if (operation->slots[i] >= 0) {
            operation->slots[count] = operation->slots[i];
            operation->generations[count] = operation->generations[i];
            operation->places[count++] = i;
        }
    operation->slot_count = count;
    claims = malloc(sizeof *claims + (size_t)count * sizeof claims->slots[0]);
    if (!claims)
        return kvr_fail_errno("malloc", ENOMEM);
    claims->count = count;
    if (count)
        memcpy(claims->slots, operation->slots, (size_t)count * sizeof claims->slots[0]);
    status = kvr_table_claim_slots(table_handle, operation->slots, operation->generations, count);
    if (status)
        free(claims);
    else
        operation->claims = claims;
    return status;
}

/* Own or claim the slots. Blocks that are gone are the operation's failure, not the call's. */
static int32_t take_slots(kvr_operation *operation, kvr_table *table, const char *call)
{
    int32_t status;
    if (operation->direction == KVR_DIRECTION_IN) {
        status = kvr_table_own(table, operation->slots, operation->generations, operation->slot_count, call);
        operation->is_owner = !status;
    } else {
        status = claim_slots(operation, table->object.handle);
    }
    if (status != KVR_ERROR_STALE_BLOCK)
        return status;
    (void)kvr_error_get(&operation->error);
    operation->failed_index = operation->error.values[0];
    if (operation->direction == KVR_DIRECTION_OUT)
        operation->failed_index = operation->error.values[0] = operation->places[operation->error.values[0]];
    return KVR_OK;
}

/* Let go of slots that were taken for an operation that is not accepted. */
static void untake_slots(kvr_operation *operation, kvr_table *table)
{
    if (operation->is_owner)
        kvr_table_disown(table, operation->slots, operation->generations, operation->slot_count, 0);
    operation->is_owner = 0;
    if (operation->claims)
        kvr_table_unclaim(table, operation->claims);
    operation->claims = NULL;
}

static int32_t submit_slots(kvr_queue *queue, kvr_operation *operation, kvr_table *table, const batch *given, const char *call,
                            int64_t *out)
{
    kvr_error why;
    int32_t status;
    place *places = malloc((size_t)(given->segment_count + 1) * sizeof *places);
    if (!places)
        return kvr_fail_errno("malloc", ENOMEM);
    status = copy_slot_arrays(operation, table, given, call);
    if (!status) {
        kvr_handles_lock();
        status = hold_data(operation, table, given, call);
        if (!status)
            status = hold_segments(operation, table, given, places, call);
        kvr_handles_unlock();
    }
    if (!status)
        status = fill_slots(operation, table, given, places, call);
    free(places);
    if (!status)
        status = check_overlaps(operation->entries, operation->entry_count, 0, call);
    if (!status && operation->device >= 0)
        status = kvr_cuda_ready(operation->device, call);
    if (!status)
        status = take_slots(operation, table, call);
    if (status)
        return status;
    kvr_handles_lock();
    operation->table = table;
    table->operation_count++;
    status = accept(queue, operation, call, out);
    kvr_handles_unlock();
    if (status) {
        (void)kvr_error_get(&why);
        untake_slots(operation, table);
        (void)kvr_fail_again(&why);
    }
    return status;
}

int32_t kvr_copy_slots(int64_t queue_handle, int64_t table_handle, int32_t direction, const int64_t *mappings, int64_t mapping_count,
                       const int64_t *slots, const int64_t *generations, const int64_t *engine_blocks, int64_t count,
                       const kvr_segment *segments, int64_t segment_count, uint32_t flags, const kvr_dependency *after,
                       int64_t after_count, int64_t *out_operation)
{
    static const char call[] = "copy_slots";
    const batch given = {direction, mappings, mapping_count, slots, generations, engine_blocks, count, segments, segment_count, flags};
    kvr_operation *operation;
    kvr_queue *queue = NULL;
    kvr_table *table;
    int32_t status = check_counts(count, after_count, call);
    if (!status)
        status = check_batch(&given, call);
    if (!status)
        status = kvr_table_enter(table_handle, call, &table);
    if (status)
        return status;
    status = direction == KVR_DIRECTION_IN ? kvr_table_require(table, call, KVR_ROLE_WRITER, KVR_ROLE_WRITER)
                                           : kvr_table_require(table, call, KVR_ROLE_READER, KVR_ROLE_WRITER);
    operation = status ? NULL : make_operation(count * segment_count, table->super.region_count + segment_count, after_count);
    if (!status && !operation)
        status = kvr_fail_errno("malloc", ENOMEM);
    if (!status) {
        operation->direction = direction;
        operation->flags = flags;
        kvr_handles_lock();
        status = enter_queue(queue_handle, call, &queue);
        if (!status)
            status = add_waits(operation, after, after_count, call);
        kvr_handles_unlock();
    }
    if (!status)
        status = submit_slots(queue, operation, table, &given, call, out_operation);
    kvr_handles_lock();
    if (status && operation)
        kvr_operation_let_go(operation);
    if (queue)
        kvr_call_end(&queue->object);
    kvr_handles_unlock();
    if (status && operation)
        kvr_operation_free(operation);
    kvr_table_leave(table);
    return status;
}
