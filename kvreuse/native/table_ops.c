/* The calls of a part's sessions: match, claim, reserve, commit and the rest. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "table.h"

/* ---- what comes in ---- */

static int32_t check_keys(const kvr_keys *keys, const char *call)
{
    int64_t i;
    if (keys->stride < 1 || keys->stride > KVR_KEY_NBYTES)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_KEY_STRIDE, call, keys->stride, KVR_KEY_NBYTES, 0, 0);
    if (keys->count < 0 || keys->count > KVR_BATCH_COUNT_MAX)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_COUNT_RANGE, call, keys->count, KVR_BATCH_COUNT_MAX, 0, 0);
    for (i = 0; keys->nbytes && i < keys->count; i++)
        if (keys->nbytes[i] < 1 || keys->nbytes[i] > keys->stride)
            return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_KEY_NBYTES, call, i, keys->nbytes[i], keys->stride, 0);
    return KVR_OK;
}

/* Copy the caller's slots and check the copy: another of its threads may change the array meanwhile. The copy is the caller's to
 * free, NULL after a failure. */
static int32_t take_slots_below(const int64_t *slots, int64_t count, int64_t low, int64_t end, const char *call, int64_t **out)
{
    int64_t *copy, i;
    *out = NULL;
    if (count < 0 || count > KVR_BATCH_COUNT_MAX)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_COUNT_RANGE, call, count, KVR_BATCH_COUNT_MAX, 0, 0);
    copy = malloc((size_t)(count + 1) * sizeof *copy);
    if (!copy)
        return kvr_fail_errno("malloc", ENOMEM);
    if (count)
        memcpy(copy, slots, (size_t)count * sizeof *copy);
    for (i = 0; i < count; i++)
        if (copy[i] < low || copy[i] >= end) {
            int32_t status = kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_SLOT_RANGE, call, i, copy[i], end, 0);
            free(copy);
            return status;
        }
    *out = copy;
    return KVR_OK;
}

static int32_t take_slots(const kvr_table *table, const int64_t *slots, int64_t count, int64_t low, const char *call, int64_t **out)
{
    return take_slots_below(slots, count, low, table->super.slot_count, call, out);
}

static int32_t check_flags(uint32_t flags, uint32_t known, const char *call)
{
    if (flags & ~known)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_FLAGS_UNKNOWN, call, flags, known, 0, 0);
    return KVR_OK;
}

/* Enter a call that any session makes with keys, take the lock. After KVR_OK: finish(). */
static int32_t begin(int64_t handle, const kvr_keys *keys, int32_t needed, int32_t also, const char *call, kvr_table **out)
{
    int32_t status = kvr_table_enter(handle, call, out);
    if (status)
        return status;
    status = needed ? kvr_table_require(*out, call, needed, also) : KVR_OK;
    if (!status && keys)
        status = check_keys(keys, call);
    if (!status)
        status = kvr_table_take(*out, call, 1, 1);
    if (status)
        kvr_table_leave(*out);
    return status;
}

static void finish(kvr_table *table)
{
    kvr_lock_drop(table->lock);
    kvr_table_leave(table);
}

/* ---- sets of what a call names ---- */

typedef struct key_set {
    const kvr_keys *keys;
    int32_t *places; /* index of a key + 1, 0: empty */
    uint32_t mask;
} key_set;

static uint32_t places_for(int64_t count)
{
    uint32_t places = 16;
    while (places < 2 * count)
        places *= 2;
    return places;
}

static int32_t key_set_make(key_set *set, const kvr_keys *keys)
{
    uint32_t places = places_for(keys->count);
    set->keys = keys;
    set->mask = places - 1;
    set->places = calloc(places, sizeof *set->places);
    return set->places ? KVR_OK : kvr_fail_errno("malloc", ENOMEM);
}

static int32_t *key_set_place(const key_set *set, const uint8_t *key, uint8_t nbytes)
{
    uint32_t place = kvr_crc(0, key, nbytes) & set->mask;
    for (; set->places[place]; place = (place + 1) & set->mask) {
        uint8_t other_nbytes;
        const uint8_t *other = kvr_key(set->keys, set->places[place] - 1, &other_nbytes);
        if (other_nbytes == nbytes && !memcmp(other, key, nbytes))
            break;
    }
    return &set->places[place];
}

/* Add key i; 0 if an equal one was there. */
static int32_t key_set_add(key_set *set, int64_t i)
{
    uint8_t nbytes;
    const uint8_t *key = kvr_key(set->keys, i, &nbytes);
    int32_t *place = key_set_place(set, key, nbytes);
    if (*place)
        return 0;
    *place = (int32_t)(i + 1);
    return 1;
}

static uint8_t record_key_nbytes(const kvr_record *record)
{
    return record->key_nbytes < KVR_KEY_NBYTES ? record->key_nbytes : KVR_KEY_NBYTES;
}

static int32_t key_set_has(const key_set *set, const kvr_record *record)
{
    return *key_set_place(set, record->key, record_key_nbytes(record)) != 0;
}

typedef struct slot_set {
    int32_t *places; /* slot + 1, 0: empty */
    uint32_t mask;
} slot_set;

static int32_t slot_set_make(slot_set *set, int64_t count)
{
    uint32_t places = places_for(count);
    set->mask = places - 1;
    set->places = calloc(places, sizeof *set->places);
    return set->places ? KVR_OK : kvr_fail_errno("malloc", ENOMEM);
}

/* Add a slot; 0 if it was there. */
static int32_t slot_set_add(slot_set *set, int64_t slot)
{
    uint32_t place = ((uint32_t)slot * 2654435761U) >> 7 & set->mask;
    while (set->places[place]) {
        if (set->places[place] == slot + 1)
            return 0;
        place = (place + 1) & set->mask;
    }
    set->places[place] = (int32_t)(slot + 1);
    return 1;
}

/* ---- looking ---- */

static int64_t find(const kvr_table *table, const kvr_keys *keys, int64_t i)
{
    uint8_t nbytes;
    int32_t is_writing;
    const uint8_t *key = kvr_key(keys, i, &nbytes);
    return kvr_look(table, key, nbytes, &is_writing);
}

int32_t kvr_table_match(int64_t handle, const uint8_t *keys, int64_t key_stride_bytes, const uint8_t *key_nbytes,
                        int64_t key_count, int64_t *out_count)
{
    kvr_keys batch = {keys, key_stride_bytes, key_nbytes, key_count};
    kvr_table *table;
    int64_t i;
    int32_t status = begin(handle, &batch, 0, 0, "table_match", &table);
    if (status)
        return status;
    for (i = 0; i < key_count && find(table, &batch, i) >= 0; i++)
        ;
    *out_count = i;
    finish(table);
    return KVR_OK;
}

int32_t kvr_table_lookup(int64_t handle, const uint8_t *keys, int64_t key_stride_bytes, const uint8_t *key_nbytes,
                         int64_t key_count, int64_t *slots, int64_t *generations)
{
    kvr_keys batch = {keys, key_stride_bytes, key_nbytes, key_count};
    kvr_table *table;
    int64_t i;
    int32_t status = begin(handle, &batch, 0, 0, "table_lookup", &table);
    if (status)
        return status;
    for (i = 0; i < key_count; i++) {
        slots[i] = find(table, &batch, i);
        generations[i] = slots[i] >= 0 ? table->records[slots[i]].generation : 0;
    }
    finish(table);
    return KVR_OK;
}

int32_t kvr_table_inventory(int64_t handle, int64_t first_slot, int64_t capacity, int64_t *slots, int64_t *generations,
                            uint8_t *keys, uint8_t *key_nbytes, int64_t *out_count, int64_t *out_next)
{
    static const char call[] = "table_inventory";
    kvr_table *table;
    int64_t slot, count = 0;
    uint32_t epoch;
    int32_t status = kvr_table_enter(handle, call, &table);
    if (status)
        return status;
    if (capacity < 0 || capacity > KVR_BATCH_COUNT_MAX)
        status = kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_COUNT_RANGE, call, capacity, KVR_BATCH_COUNT_MAX, 0, 0);
    else if (first_slot < 0)
        status = kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_SLOT_RANGE, call, 0, first_slot, table->super.slot_count, 0);
    if (!status)
        status = kvr_table_take(table, call, 1, 1);
    if (status) {
        kvr_table_leave(table);
        return status;
    }
    epoch = kvr_epoch(table);
    for (slot = first_slot; slot < table->super.slot_count && count < capacity; slot++) {
        const kvr_record *record = &table->records[slot];
        if (!kvr_is_content(record, epoch))
            continue;
        slots[count] = slot;
        generations[count] = record->generation;
        memcpy(keys + KVR_KEY_NBYTES * count, record->key, KVR_KEY_NBYTES);
        key_nbytes[count++] = record->key_nbytes;
    }
    *out_count = count;
    *out_next = slot < table->super.slot_count ? slot : -1;
    finish(table);
    return KVR_OK;
}

/* ---- claims and touches ---- */

static void add_to_claim(kvr_table *table, int64_t slot, int64_t delta)
{
    int64_t *word = table->own + 8 + slot;
    kvr_store(word, kvr_load(word) + delta);
}

static int32_t add_claim(kvr_table *table, int64_t i, int64_t slot, const char *call)
{
    if ((kvr_load(table->own + 8 + slot) & KVR_CLAIM_COUNT_MAX) == KVR_CLAIM_COUNT_MAX)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_CLAIMS_FULL, call, i, slot, KVR_CLAIM_COUNT_MAX, 0);
    add_to_claim(table, slot, 1);
    return KVR_OK;
}

int32_t kvr_table_claim(int64_t handle, const uint8_t *keys, int64_t key_stride_bytes, const uint8_t *key_nbytes,
                        int64_t key_count, int64_t *slots, int64_t *generations, int64_t *out_count)
{
    static const char call[] = "table_claim";
    kvr_keys batch = {keys, key_stride_bytes, key_nbytes, key_count};
    kvr_table *table;
    int64_t count, *claimed;
    int32_t status = begin(handle, &batch, KVR_ROLE_READER, KVR_ROLE_WRITER, call, &table);
    if (status)
        return status;
    claimed = malloc((size_t)(key_count + 1) * sizeof *claimed);
    if (!claimed)
        status = kvr_fail_errno("malloc", ENOMEM);
    for (count = 0; !status && count < key_count; count++) {
        claimed[count] = find(table, &batch, count);
        if (claimed[count] < 0)
            break;
        status = add_claim(table, count, claimed[count], call);
        if (status)
            break;
        slots[count] = claimed[count];
        generations[count] = table->records[claimed[count]].generation;
    }
    if (!status)
        *out_count = count;
    else
        while (count--)
            add_to_claim(table, claimed[count], -1);
    free(claimed);
    finish(table);
    return status;
}

static int32_t check_generation(const kvr_table *table, int64_t i, int64_t slot, int64_t carried, const char *call)
{
    int64_t found = table->records[slot].generation;
    if (found != carried)
        return kvr_fail(KVR_ERROR_STALE_BLOCK, KVR_DETAIL_GENERATION, call, i, slot, carried, found);
    return KVR_OK;
}

int32_t kvr_table_claim_slots(int64_t handle, const int64_t *given, const int64_t *generations, int64_t count)
{
    static const char call[] = "table_claim_slots";
    kvr_table *table;
    int64_t i, *slots = NULL;
    uint32_t epoch;
    int32_t status = kvr_table_enter(handle, call, &table);
    if (status)
        return status;
    status = kvr_table_require(table, call, KVR_ROLE_READER, KVR_ROLE_WRITER);
    if (!status)
        status = take_slots(table, given, count, 0, call, &slots);
    if (!status)
        status = kvr_table_take(table, call, 1, 1);
    if (status) {
        free(slots);
        kvr_table_leave(table);
        return status;
    }
    epoch = kvr_epoch(table);
    for (i = 0; i < count && !status; i++) {
        const kvr_record *record = &table->records[slots[i]];
        status = check_generation(table, i, slots[i], generations[i], call);
        if (!status && !kvr_is_content(record, epoch))
            status = kvr_fail(KVR_ERROR_STALE_BLOCK, KVR_DETAIL_SLOT_STATE, call, i, slots[i],
                              kvr_load_state(&record->state), KVR_SLOT_SEALED);
    }
    for (i = 0; i < count && !status; i++) {
        status = add_claim(table, i, slots[i], call);
        if (status)
            while (i--)
                add_to_claim(table, slots[i], -1);
    }
    free(slots);
    finish(table);
    return status;
}

int32_t kvr_table_release(int64_t handle, const int64_t *given, int64_t count)
{
    static const char call[] = "table_release";
    kvr_table *table;
    int64_t i, *slots = NULL;
    int32_t status = kvr_table_enter(handle, call, &table);
    if (status)
        return status;
    status = kvr_table_require(table, call, KVR_ROLE_READER, KVR_ROLE_WRITER);
    if (!status)
        status = take_slots(table, given, count, 0, call, &slots);
    /* A fenced session may release: it changes its own row, as long as that is its own. */
    if (!status)
        status = kvr_table_take(table, call, 0, 0);
    if (status) {
        free(slots);
        kvr_table_leave(table);
        return status;
    }
    if (kvr_load(&table->words->row_session[table->row]) == table->session) {
        for (i = 0; i < count && !status; i++) {
            if (!(kvr_load(table->own + 8 + slots[i]) & KVR_CLAIM_COUNT_MAX)) {
                status = kvr_fail(KVR_ERROR_STALE_BLOCK, KVR_DETAIL_NOT_CLAIMED, call, i, slots[i], 0, 0);
                while (i--)
                    add_to_claim(table, slots[i], 1);
                break;
            }
            add_to_claim(table, slots[i], -1);
        }
    }
    free(slots);
    finish(table);
    return status;
}

static int64_t next_stamp(int64_t stamp) { return stamp < KVR_STAMP_MAX ? stamp + 1 : KVR_STAMP_MAX; }

int32_t kvr_table_touch(int64_t handle, const uint8_t *keys, int64_t key_stride_bytes, const uint8_t *key_nbytes,
                        int64_t key_count, int64_t *out_count)
{
    static const char call[] = "table_touch";
    kvr_keys batch = {keys, key_stride_bytes, key_nbytes, key_count};
    kvr_table *table;
    int64_t i, stamp, count = 0;
    int32_t status = begin(handle, &batch, KVR_ROLE_READER, KVR_ROLE_WRITER, call, &table);
    if (status)
        return status;
    stamp = kvr_last_stamp(table);
    for (i = key_count - 1; i >= 0 && !status; i--) {
        int64_t slot = find(table, &batch, i);
        if (slot < 0)
            continue;
        count++;
        stamp = next_stamp(stamp);
        if (table->role == KVR_ROLE_WRITER) {
            kvr_set_dirty(table->words);
            kvr_store(&table->words->clock, stamp);
            status = kvr_recency_remove(table, slot);
            table->records[slot].recency = stamp;
            if (!status)
                status = kvr_recency_append(table, slot);
        } else {
            int64_t *word = table->own + 8 + slot;
            kvr_store(table->own, stamp);
            kvr_store(word, (stamp << KVR_CLAIM_COUNT_BITS) | (kvr_load(word) & KVR_CLAIM_COUNT_MAX));
        }
    }
    if (status)
        status = kvr_table_broken(call);
    else if (table->role == KVR_ROLE_WRITER)
        kvr_store(&table->words->dirty, 0);
    if (!status)
        *out_count = count;
    finish(table);
    return status;
}

/* ---- making room; dirty is set by the caller of evict and replace ---- */

/* Free stale slots that nobody claims any more, oldest first. */
static int32_t sweep(kvr_table *table, const char *call)
{
    kvr_words *words = table->words;
    int64_t left = words->stale_count, slot = words->lru_oldest, steps;
    uint32_t epoch = kvr_epoch(table);
    kvr_rows rows;
    if (left <= 0)
        return KVR_OK;
    kvr_rows_get(table, &rows);
    kvr_set_dirty(words);
    for (steps = 0; steps < table->super.slot_count && left > 0 && kvr_is_slot(table, slot); steps++) {
        int64_t following = table->links[slot].next;
        if (table->records[slot].content_epoch != epoch) {
            left--;
            if (!kvr_is_claimed(&rows, slot)) {
                if (kvr_free_slot(table, slot))
                    return kvr_table_broken(call);
                kvr_add(&words->stale_count, -1);
            }
        }
        slot = following;
    }
    kvr_store(&words->dirty, 0);
    return KVR_OK;
}

static int32_t is_candidate(const kvr_table *table, int64_t slot, uint32_t epoch)
{
    return table->records[slot].content_epoch == epoch &&
           kvr_load_state(&table->records[slot].state) == KVR_SLOT_SEALED;
}

/* Count blocks that could be evicted, up to a limit; changes nothing. */
static int64_t count_evictable(const kvr_table *table, const key_set *keep, int64_t limit)
{
    uint32_t epoch = kvr_epoch(table);
    int64_t found = 0, steps, slot = table->words->lru_oldest;
    kvr_rows rows;
    kvr_rows_get(table, &rows);
    for (steps = 0; steps < table->super.slot_count && found < limit && kvr_is_slot(table, slot); steps++) {
        if (is_candidate(table, slot, epoch) && !kvr_is_claimed(&rows, slot) && !key_set_has(keep, &table->records[slot]))
            found++;
        slot = table->links[slot].next;
    }
    return found;
}

/* What a reserve or evict took out; room for as many as were wanted. */
typedef struct evicted {
    int64_t *slots;      /* may be NULL */
    uint8_t *keys;       /* 32 bytes each; may be NULL */
    uint8_t *key_nbytes; /* may be NULL */
    int64_t count;
} evicted;

static int32_t take_out(kvr_table *table, int64_t slot, evicted *out)
{
    const kvr_record *record = &table->records[slot];
    int32_t status;
    if (out->slots)
        out->slots[out->count] = slot;
    if (out->keys)
        memcpy(out->keys + KVR_KEY_NBYTES * out->count, record->key, KVR_KEY_NBYTES);
    if (out->key_nbytes)
        out->key_nbytes[out->count] = record_key_nbytes(record);
    status = kvr_free_slot(table, slot);
    out->count++;
    return status;
}

/* Free up to `wanted` least recent blocks. One that a reader touched since is first moved to where its stamp belongs. */
static int32_t evict(kvr_table *table, int64_t wanted, const key_set *keep, evicted *out)
{
    uint32_t epoch = kvr_epoch(table);
    kvr_words *words = table->words;
    int64_t slot = words->lru_oldest, steps, i;
    kvr_rows rows;
    kvr_rows_get(table, &rows);
    /* Each block is looked at once more at most, after it was moved. */
    for (steps = 0; steps < 2 * table->super.slot_count; steps++) {
        int64_t following, stamp = 0;
        int32_t claimed = 0;
        if (out->count >= wanted || !kvr_is_slot(table, slot))
            return KVR_OK;
        following = table->links[slot].next;
        if (is_candidate(table, slot, epoch)) {
            kvr_record *record = &table->records[slot];
            for (i = 0; i < rows.count && !claimed; i++) {
                int64_t word = kvr_load(rows.words[i] + slot);
                claimed = (word & KVR_CLAIM_COUNT_MAX) != 0;
                if (word >> KVR_CLAIM_COUNT_BITS > stamp)
                    stamp = word >> KVR_CLAIM_COUNT_BITS;
            }
            if (!claimed && !key_set_has(keep, record)) {
                int32_t status;
                if (stamp > record->recency) {
                    int64_t before = table->links[slot].prev;
                    /* The reader's row may be zeroed next: later stamps must still be newer than this one. */
                    if (stamp > kvr_load(&words->clock))
                        kvr_store(&words->clock, stamp);
                    status = kvr_recency_remove(table, slot);
                    record->recency = stamp;
                    if (!status)
                        status = kvr_recency_sort_in(table, slot, stamp);
                    /* Whoever stands there now is the next in order; it may be the same slot. */
                    following = before >= 0 ? table->links[before].next : words->lru_oldest;
                } else {
                    status = take_out(table, slot, out);
                    kvr_add(&words->sealed_count, -1);
                }
                if (status)
                    return status;
            }
        }
        slot = following;
    }
    return KVR_BROKEN;
}

int32_t kvr_table_evict(int64_t handle, int64_t evict_count, const uint8_t *keys, int64_t key_stride_bytes,
                        const uint8_t *key_nbytes, int64_t key_count, int64_t *out_count)
{
    static const char call[] = "table_evict";
    kvr_keys batch = {keys, key_stride_bytes, key_nbytes, key_count};
    evicted gone = {NULL, NULL, NULL, 0};
    key_set keep = {0};
    kvr_table *table;
    int64_t i;
    int32_t status = kvr_table_enter(handle, call, &table);
    if (status)
        return status;
    status = kvr_table_require(table, call, KVR_ROLE_WRITER, KVR_ROLE_WRITER);
    if (!status)
        status = check_keys(&batch, call);
    if (!status && evict_count < 0)
        status = kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_COUNT_RANGE, call, evict_count, INT64_MAX, 0, 0);
    if (!status)
        status = key_set_make(&keep, &batch);
    if (!status) {
        for (i = 0; i < key_count; i++)
            (void)key_set_add(&keep, i);
        status = kvr_table_take(table, call, 1, 1);
    }
    if (!status) {
        status = sweep(table, call);
        if (!status && evict_count) {
            kvr_set_dirty(table->words);
            if (evict(table, evict_count, &keep, &gone))
                status = kvr_table_broken(call);
            /* What went has gone, also if the rest was cut short. */
            kvr_add(&table->words->evicted_total, gone.count);
            if (!status)
                kvr_store(&table->words->dirty, 0);
        }
        if (!status)
            *out_count = gone.count;
        kvr_lock_drop(table->lock);
    }
    free(keep.places);
    kvr_table_leave(table);
    return status;
}

/* ---- reserve ---- */

typedef struct plan {
    int64_t *entries; /* indexes of the keys that need a slot */
    int64_t count;
    int64_t *freed;   /* slots that hold a block now and will not any more */
    int64_t replaced; /* so many of `freed` are named slots */
    int64_t *slots;   /* what the entries were given */
    int64_t filled;   /* so many of `entries` and `slots` */
} plan;

static int32_t check_named(const kvr_table *table, const kvr_rows *rows, slot_set *taken, int64_t i, int64_t slot, plan *out,
                           const char *call)
{
    uint8_t state = kvr_load_state(&table->records[slot].state);
    if (!slot_set_add(taken, slot))
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_SLOT_REPEATED, call, i, slot, 0, 0);
    if (state != KVR_SLOT_FREE && (state != KVR_SLOT_SEALED || kvr_is_claimed(rows, slot)))
        return kvr_fail(KVR_ERROR_BUSY, KVR_DETAIL_SLOT_BUSY, call, i, slot, 0, 0);
    if (state == KVR_SLOT_SEALED)
        out->freed[out->replaced++] = slot;
    return KVR_OK;
}

/* Find which entries need a slot, and which named slots hold a block; changes nothing. Adds all keys to `seen`. */
static int32_t make_plan(const kvr_table *table, const kvr_keys *keys, const int64_t *named, int32_t duplicate, key_set *seen,
                         slot_set *taken, plan *out, const char *call)
{
    kvr_rows rows;
    int64_t i;
    int32_t status = KVR_OK;
    kvr_rows_get(table, &rows);
    for (i = 0; i < keys->count && !status; i++) {
        uint8_t nbytes;
        int32_t is_writing;
        const uint8_t *key = kvr_key(keys, i, &nbytes);
        int64_t present;
        if (!key_set_add(seen, i))
            continue;
        present = kvr_look(table, key, nbytes, &is_writing);
        if (present >= 0 && !duplicate)
            continue;
        if (is_writing)
            return kvr_fail(KVR_ERROR_BUSY, KVR_DETAIL_KEY_RESERVED, call, i, 0, 0, 0);
        if (named)
            status = check_named(table, &rows, taken, i, named[i], out, call);
        out->entries[out->count++] = i;
    }
    return status;
}

static int32_t older_slot_first(const kvr_table *table, int64_t a, int64_t b)
{
    int64_t left = table->records[a].recency, right = table->records[b].recency;
    return left < right || (left == right && a < b);
}

/* Sort the replaced slots by (recency, slot): a heap sort, since qsort has no argument for the table. */
static void sift(const kvr_table *table, int64_t *slots, int64_t root, int64_t count)
{
    for (;;) {
        int64_t child = 2 * root + 1, kept;
        if (child >= count)
            return;
        if (child + 1 < count && older_slot_first(table, slots[child], slots[child + 1]))
            child++;
        if (!older_slot_first(table, slots[root], slots[child]))
            return;
        kept = slots[root];
        slots[root] = slots[child];
        slots[child] = kept;
        root = child;
    }
}

static void sort_slots(const kvr_table *table, int64_t *slots, int64_t count)
{
    int64_t i;
    for (i = count / 2 - 1; i >= 0; i--)
        sift(table, slots, i, count);
    for (i = count - 1; i > 0; i--) {
        int64_t kept = slots[0];
        slots[0] = slots[i];
        slots[i] = kept;
        sift(table, slots, 0, i);
    }
}

/* Free the blocks that named slots hold, oldest first. */
static int32_t replace(kvr_table *table, plan *planned, evicted *out)
{
    uint32_t epoch = kvr_epoch(table);
    int64_t i;
    sort_slots(table, planned->freed, planned->replaced);
    for (i = 0; i < planned->replaced; i++) {
        int64_t slot = planned->freed[i];
        int32_t status, is_stale = table->records[slot].content_epoch != epoch;
        status = take_out(table, slot, out);
        if (status)
            return status;
        if (is_stale)
            kvr_add(&table->words->stale_count, -1);
        else
            kvr_add(&table->words->sealed_count, -1);
    }
    return KVR_OK;
}

static int32_t fill_all(kvr_table *table, const kvr_keys *keys, const int64_t *named, plan *planned, int64_t *slots,
                        int64_t *generations)
{
    for (; planned->filled < planned->count; planned->filled++) {
        int64_t i = planned->entries[planned->filled];
        int64_t slot = named ? named[i] : table->words->free_head;
        uint8_t nbytes;
        const uint8_t *key = kvr_key(keys, i, &nbytes);
        int32_t status = kvr_fill_slot(table, slot, key, nbytes, &generations[i]);
        if (status)
            return status;
        planned->slots[planned->filled] = slot;
        slots[i] = slot;
    }
    return KVR_OK;
}

/* Take a reserve back that found the lists broken. Its records say FREE or SEALED again; dirty stays set and the rest is rebuilt. */
static void undo(kvr_table *table, const plan *planned, const evicted *gone)
{
    uint32_t epoch = kvr_epoch(table);
    int64_t i;
    for (i = 0; i < planned->filled; i++) {
        kvr_record *record = &table->records[planned->slots[i]];
        kvr_store_state(&record->state, KVR_SLOT_FREE);
        record->content_epoch = 0;
    }
    for (i = 0; i < gone->count; i++) {
        kvr_record *record = &table->records[gone->slots[i]];
        /* What was not yet filled anew is still whole. */
        if (kvr_load_state(&record->state) == KVR_SLOT_FREE && record->content_epoch == epoch &&
            record->record_crc == kvr_record_crc(record))
            kvr_store_state(&record->state, KVR_SLOT_SEALED);
    }
}

static int32_t reserve(kvr_table *table, const kvr_keys *keys, const int64_t *named, uint32_t flags, key_set *seen,
                       slot_set *taken, plan *planned, evicted *gone, int64_t *slots, int64_t *generations, const char *call)
{
    kvr_words *words = table->words;
    int64_t missing = 0, i, room;
    int32_t status = sweep(table, call);
    if (!status)
        status = make_plan(table, keys, named, (flags & KVR_RESERVE_DUPLICATE) != 0, seen, taken, planned, call);
    if (status)
        return status;
    room = words->free_count - (table->super.slot_count - kvr_capacity(table));
    if (room < 0) /* it holds more than its capacity became: that must not grow */
        room = 0;
    if (!named && planned->count > room)
        missing = planned->count - room;
    if (missing && (!(flags & KVR_RESERVE_EVICT) || count_evictable(table, seen, missing) < missing))
        return kvr_fail(KVR_ERROR_NO_SPACE, KVR_DETAIL_NO_FREE_SLOT, call, planned->count, room,
                        count_evictable(table, seen, table->super.slot_count), 0);
    for (i = 0; i < keys->count; i++) {
        slots[i] = -1;
        generations[i] = 0;
    }
    kvr_set_dirty(words);
    if (planned->replaced)
        status = replace(table, planned, gone);
    else if (missing)
        status = evict(table, missing, seen, gone);
    if (!status)
        status = fill_all(table, keys, named, planned, slots, generations);
    if (status) {
        undo(table, planned, gone);
        return kvr_table_broken(call);
    }
    if (planned->replaced)
        kvr_add(&words->replaced_total, gone->count);
    else
        kvr_add(&words->evicted_total, gone->count);
    kvr_store(&words->dirty, 0);
    return KVR_OK;
}

int32_t kvr_table_reserve(int64_t handle, const uint8_t *keys, int64_t key_stride_bytes, const uint8_t *key_nbytes,
                          int64_t key_count, const int64_t *named_slots, uint32_t flags, int64_t *slots, int64_t *generations,
                          uint8_t *evicted_keys, uint8_t *evicted_key_nbytes, int64_t *out_evicted)
{
    static const char call[] = "table_reserve";
    kvr_keys batch = {keys, key_stride_bytes, key_nbytes, key_count};
    evicted gone = {NULL, evicted_keys, evicted_key_nbytes, 0};
    key_set seen = {0};
    slot_set taken = {0};
    plan planned = {0};
    int64_t *named = NULL;
    kvr_table *table;
    int32_t status = kvr_table_enter(handle, call, &table);
    if (status)
        return status;
    status = kvr_table_require(table, call, KVR_ROLE_WRITER, KVR_ROLE_WRITER);
    if (!status)
        status = check_flags(flags, KVR_RESERVE_EVICT | KVR_RESERVE_DUPLICATE, call);
    if (!status)
        status = check_keys(&batch, call);
    if (!status && named_slots)
        status = take_slots_below(named_slots, key_count, 0, kvr_capacity(table), call, &named);
    if (!status)
        status = key_set_make(&seen, &batch);
    if (!status && named_slots)
        status = slot_set_make(&taken, key_count);
    if (!status && key_count) {
        /* Four arrays in one: entries, freed, slots, slots taken out. */
        planned.entries = malloc(4 * (size_t)key_count * sizeof *planned.entries);
        if (!planned.entries) {
            status = kvr_fail_errno("malloc", ENOMEM);
        } else {
            planned.freed = planned.entries + key_count;
            planned.slots = planned.freed + key_count;
            gone.slots = planned.slots + key_count;
        }
    }
    if (!status)
        status = kvr_table_take(table, call, 1, 1);
    if (!status) {
        status = reserve(table, &batch, named, flags, &seen, &taken, &planned, &gone, slots, generations, call);
        if (!status)
            *out_evicted = gone.count;
        kvr_lock_drop(table->lock);
    }
    free(named);
    free(planned.entries);
    free(taken.places);
    free(seen.places);
    kvr_table_leave(table);
    return status;
}

/* ---- the slots' bytes ---- */

/* Pin the mappings of the regions that the slots are in; `pinned` has region_count zeros. */
static int32_t pin(kvr_table *table, const int64_t *slots, int64_t count, kvr_mapping **pinned, const char *call)
{
    int64_t i;
    int32_t status = KVR_OK;
    kvr_handles_lock();
    for (i = 0; i < count && !status; i++)
        if (slots[i] >= 0 && !table->bound[slots[i] / table->super.slots_per_region])
            status = kvr_fail(KVR_ERROR_NOT_READY, KVR_DETAIL_DATA_NOT_BOUND, call, slots[i], 0, 0, 0);
    for (i = 0; i < count && !status; i++) {
        int64_t index = slots[i] >= 0 ? slots[i] / table->super.slots_per_region : -1;
        if (index >= 0 && !pinned[index]) {
            pinned[index] = table->bound[index];
            pinned[index]->hold_count++;
        }
    }
    kvr_handles_unlock();
    return status;
}

static void unpin(const kvr_table *table, kvr_mapping **pinned)
{
    int64_t i;
    kvr_handles_lock();
    for (i = 0; i < table->super.region_count; i++)
        if (pinned[i])
            pinned[i]->hold_count--;
    kvr_handles_unlock();
}

static uint32_t data_crc(const kvr_table *table, kvr_mapping **pinned, int64_t slot)
{
    int64_t index = slot / table->super.slots_per_region, place = slot % table->super.slots_per_region;
    return kvr_crc(0, pinned[index]->address + place * table->super.block_nbytes, table->super.block_nbytes);
}

int32_t kvr_table_verify(int64_t handle, const int64_t *given, int64_t count, uint8_t *verdicts)
{
    static const char call[] = "table_verify";
    kvr_mapping **pinned = NULL;
    kvr_table *table;
    int64_t i, *slots;
    int32_t status = kvr_table_enter(handle, call, &table);
    if (status)
        return status;
    status = take_slots(table, given, count, 0, call, &slots);
    if (!status) {
        pinned = calloc((size_t)table->super.region_count, sizeof *pinned);
        status = pinned ? pin(table, slots, count, pinned, call) : kvr_fail_errno("malloc", ENOMEM);
    }
    if (!status) {
        for (i = 0; i < count; i++) {
            const kvr_record *record = &table->records[slots[i]];
            verdicts[i] = 2;
            if (record->flags & KVR_RECORD_HAS_DATA_CRC)
                verdicts[i] = data_crc(table, pinned, slots[i]) != record->data_crc;
        }
        unpin(table, pinned);
    }
    free(pinned);
    free(slots);
    kvr_table_leave(table);
    return status;
}

/* ---- commit and abort ---- */

int32_t kvr_check_repeated(const int64_t *slots, int64_t count, const char *call)
{
    slot_set seen;
    int64_t i;
    int32_t status = slot_set_make(&seen, count);
    for (i = 0; i < count && !status; i++)
        if (slots[i] >= 0 && !slot_set_add(&seen, slots[i]))
            status = kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_SLOT_REPEATED, call, i, slots[i], 0, 0);
    free(seen.places);
    return status;
}

static int32_t check_reserved(const kvr_table *table, const int64_t *slots, const int64_t *generations, int64_t count,
                              const char *call)
{
    uint32_t epoch = kvr_epoch(table);
    int64_t i;
    for (i = 0; i < count; i++) {
        int32_t status;
        uint8_t state;
        if (slots[i] < 0)
            continue;
        status = check_generation(table, i, slots[i], generations[i], call);
        if (status)
            return status;
        state = kvr_load_state(&table->records[slots[i]].state);
        if (state != KVR_SLOT_WRITING)
            return kvr_fail(KVR_ERROR_STALE_BLOCK, KVR_DETAIL_SLOT_STATE, call, i, slots[i], state, KVR_SLOT_WRITING);
        if (table->records[slots[i]].content_epoch != epoch)
            return kvr_fail(KVR_ERROR_STALE_BLOCK, KVR_DETAIL_CONTENT_EPOCH, call, i, slots[i],
                            table->records[slots[i]].content_epoch, epoch);
    }
    return KVR_OK;
}

static int32_t seal_all(kvr_table *table, const int64_t *slots, int64_t count, const uint32_t *crcs)
{
    kvr_words *words = table->words;
    uint32_t epoch = kvr_epoch(table);
    int64_t i, stamp = kvr_last_stamp(table);
    kvr_set_dirty(words);
    for (i = 0; i < count; i++) {
        kvr_record *record;
        int32_t status;
        if (slots[i] < 0)
            continue;
        record = &table->records[slots[i]];
        stamp = next_stamp(stamp);
        kvr_store(&words->clock, stamp);
        record->recency = stamp;
        record->content_epoch = epoch;
        record->data_crc = crcs ? crcs[i] : 0;
        record->flags = crcs ? KVR_RECORD_HAS_DATA_CRC : 0;
        record->record_crc = kvr_record_crc(record);
        status = kvr_recency_append(table, slots[i]);
        if (status)
            return status;
        kvr_add(&words->writing_count, -1);
        kvr_add(&words->sealed_count, 1);
        kvr_add(&words->stored_total, 1);
        /* Last: from here on the block counts. */
        kvr_store_state(&record->state, KVR_SLOT_SEALED);
    }
    kvr_store(&words->dirty, 0);
    return KVR_OK;
}

static int32_t compute_crcs(kvr_table *table, const int64_t *slots, int64_t count, uint32_t *crcs, const char *call)
{
    int64_t i;
    int32_t status;
    kvr_mapping **pinned = calloc((size_t)table->super.region_count, sizeof *pinned);
    if (!pinned)
        return kvr_fail_errno("malloc", ENOMEM);
    status = pin(table, slots, count, pinned, call);
    if (!status) {
        for (i = 0; i < count; i++)
            if (slots[i] >= 0)
                crcs[i] = data_crc(table, pinned, slots[i]);
        unpin(table, pinned);
    }
    free(pinned);
    return status;
}

int32_t kvr_table_commit(int64_t handle, const int64_t *given, const int64_t *generations, int64_t count, uint32_t flags)
{
    return kvr_table_commit_as(handle, given, generations, count, flags, 0, "table_commit");
}

int32_t kvr_table_commit_as(int64_t handle, const int64_t *given, const int64_t *generations, int64_t count, uint32_t flags, int32_t own,
                            const char *call)
{
    int64_t *slots = NULL;
    uint32_t *crcs = NULL;
    kvr_table *table;
    int32_t status = kvr_table_enter(handle, call, &table);
    if (status)
        return status;
    status = kvr_table_require(table, call, KVR_ROLE_WRITER, KVR_ROLE_WRITER);
    if (!status)
        status = check_flags(flags, KVR_COMMIT_CHECKSUM, call);
    if (!status)
        status = take_slots(table, given, count, -1, call, &slots);
    if (!status)
        status = kvr_check_repeated(slots, count, call);
    /* Before a CRC is taken of what is still written, and again under the lock. */
    if (!status)
        status = kvr_table_check_still(table, slots, generations, count, own, call);
    if (!status && count && flags & KVR_COMMIT_CHECKSUM) {
        crcs = calloc((size_t)count, sizeof *crcs);
        status = crcs ? compute_crcs(table, slots, count, crcs, call) : kvr_fail_errno("malloc", ENOMEM);
    }
    if (!status)
        status = kvr_table_take(table, call, 1, 1);
    if (!status) {
        status = check_reserved(table, slots, generations, count, call);
        if (!status)
            status = kvr_table_check_still(table, slots, generations, count, own, call);
        if (!status && seal_all(table, slots, count, crcs))
            status = kvr_table_broken(call);
        kvr_lock_drop(table->lock);
    }
    free(crcs);
    free(slots);
    kvr_table_leave(table);
    return status;
}

/* Enter a writer's call on slots, and take the lock. After KVR_OK: finish(), and *slots is the caller's to free. */
static int32_t begin_slots(int64_t handle, const int64_t *given, int64_t count, int64_t low, const char *call, kvr_table **out,
                           int64_t **slots)
{
    int32_t status = kvr_table_enter(handle, call, out);
    if (status)
        return status;
    status = kvr_table_require(*out, call, KVR_ROLE_WRITER, KVR_ROLE_WRITER);
    if (!status)
        status = take_slots(*out, given, count, low, call, slots);
    if (!status) {
        status = kvr_table_take(*out, call, 1, 1);
        if (status)
            free(*slots);
    }
    if (status)
        kvr_table_leave(*out);
    return status;
}

int32_t kvr_table_abort(int64_t handle, const int64_t *given, const int64_t *generations, int64_t count, int64_t *out_count)
{
    static const char call[] = "table_abort";
    kvr_table *table;
    int64_t freed, *slots;
    int32_t status = begin_slots(handle, given, count, -1, call, &table, &slots);
    if (status)
        return status;
    if (kvr_table_give_up(table, slots, generations, count, &freed))
        status = kvr_table_broken(call);
    else
        *out_count = freed;
    free(slots);
    finish(table);
    return status;
}

/* ---- forgetting ---- */

int32_t kvr_table_clear(int64_t handle, int64_t *out_removed, int64_t *out_kept)
{
    static const char call[] = "table_clear";
    kvr_table *table;
    kvr_words *words;
    kvr_rows rows;
    uint32_t old;
    int64_t slot, steps, removed = 0, kept = 0, *none;
    int32_t status = begin_slots(handle, NULL, 0, 0, call, &table, &none);
    if (status)
        return status;
    free(none);
    status = sweep(table, call);
    if (status) {
        finish(table);
        return status;
    }
    words = table->words;
    old = kvr_epoch(table);
    kvr_rows_get(table, &rows);
    kvr_set_dirty(words);
    kvr_next_epoch(table);
    kvr_add(&words->stale_count, words->sealed_count);
    kvr_store(&words->sealed_count, 0);
    slot = words->lru_oldest;
    for (steps = 0; steps < table->super.slot_count && kvr_is_slot(table, slot) && !status; steps++) {
        int64_t following = table->links[slot].next;
        if (table->records[slot].content_epoch == old) {
            if (kvr_is_claimed(&rows, slot)) {
                kept++;
            } else {
                status = kvr_free_slot(table, slot);
                kvr_add(&words->stale_count, -1);
                removed++;
            }
        }
        slot = following;
    }
    if (status) {
        status = kvr_table_broken(call);
    } else {
        kvr_add(&words->cleared_total, removed + kept);
        kvr_store(&words->dirty, 0);
        *out_removed = removed;
        *out_kept = kept;
    }
    finish(table);
    return status;
}

int32_t kvr_table_invalidate(int64_t handle, const int64_t *given, const int64_t *generations, int64_t count,
                             int64_t *out_count)
{
    static const char call[] = "table_invalidate";
    kvr_table *table;
    kvr_words *words;
    kvr_rows rows;
    uint32_t epoch;
    int64_t i, taken = 0, *slots;
    int32_t status = begin_slots(handle, given, count, 0, call, &table, &slots);
    if (status)
        return status;
    words = table->words;
    epoch = kvr_epoch(table);
    kvr_rows_get(table, &rows);
    for (i = 0; i < count && !status; i++) {
        kvr_record *record = &table->records[slots[i]];
        if (kvr_load_state(&record->state) != KVR_SLOT_SEALED || record->generation != generations[i] ||
            record->content_epoch != epoch)
            continue;
        kvr_set_dirty(words);
        kvr_forget_record(record);
        taken++;
        kvr_add(&words->sealed_count, -1);
        kvr_add(&words->corrupt_total, 1);
        if (kvr_is_claimed(&rows, slots[i])) {
            kvr_add(&words->stale_count, 1);
            status = kvr_recency_remove(table, slots[i]);
            if (!status)
                status = kvr_recency_insert(table, slots[i], -1);
        } else {
            status = kvr_free_slot(table, slots[i]);
        }
        if (!status)
            kvr_store(&words->dirty, 0);
    }
    if (status)
        status = kvr_table_broken(call);
    else
        *out_count = taken;
    free(slots);
    finish(table);
    return status;
}
