/* Index, free list and recency list of a part: derived from the records, in memory that other processes can write. So every index is
 * checked and every walk is bounded; what contradicts itself is KVR_BROKEN, and is rebuilt. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "table.h"


void kvr_rows_get(const kvr_table *table, kvr_rows *out)
{
    int64_t i;
    out->count = 0;
    for (i = 0; i < KVR_ROW_COUNT; i++)
        if (kvr_load(&table->words->row_session[i]))
            out->words[out->count++] = (const int64_t *)(const void *)(table->claims + i * table->super.row_nbytes) + 8;
}

int32_t kvr_is_claimed(const kvr_rows *rows, int64_t slot)
{
    int64_t i;
    for (i = 0; i < rows->count; i++)
        if (kvr_load(rows->words[i] + slot) & KVR_CLAIM_COUNT_MAX)
            return 1;
    return 0;
}

int64_t kvr_last_stamp(const kvr_table *table)
{
    kvr_rows rows;
    int64_t i, stamp = kvr_load(&table->words->clock);
    kvr_rows_get(table, &rows);
    for (i = 0; i < rows.count; i++) {
        int64_t last = kvr_load(rows.words[i] - 8);
        if (last > stamp)
            stamp = last;
    }
    return stamp;
}

uint32_t kvr_record_crc(const kvr_record *record)
{
    const uint8_t *bytes = (const uint8_t *)record;
    uint8_t covered[50];
    memcpy(covered, bytes, 40);
    memcpy(covered + 40, bytes + 48, 8);
    memcpy(covered + 48, bytes + 60, 2);
    return kvr_crc(0, covered, sizeof covered);
}

int32_t kvr_is_content(const kvr_record *record, uint32_t epoch)
{
    return kvr_load_state(&record->state) == KVR_SLOT_SEALED && record->content_epoch == epoch && epoch &&
           record->key_nbytes >= 1 && record->key_nbytes <= KVR_KEY_NBYTES && record->record_crc == kvr_record_crc(record);
}

/* The key's newest block that counts, -1 if none; and whether a slot is being written under it. */
int64_t kvr_look(const kvr_table *table, const uint8_t *key, uint8_t nbytes, int32_t *is_writing)
{
    uint32_t hash = kvr_crc(0, key, nbytes), epoch = kvr_epoch(table);
    int64_t best = -1, steps, slot = table->buckets[hash & (uint32_t)(table->super.bucket_count - 1)];
    uint8_t padded[KVR_KEY_NBYTES] = {0};
    memcpy(padded, key, nbytes);
    *is_writing = 0;
    for (steps = 0; steps < table->super.slot_count && kvr_is_slot(table, slot); steps++) {
        const kvr_link *link = &table->links[slot];
        const kvr_record *record = &table->records[slot];
        if (link->key_hash == hash && record->key_nbytes == nbytes && !memcmp(record->key, padded, sizeof padded)) {
            if (kvr_load_state(&record->state) == KVR_SLOT_WRITING)
                *is_writing = 1;
            else if (kvr_is_content(record, epoch) &&
                     (best < 0 || record->recency > table->records[best].recency ||
                      (record->recency == table->records[best].recency && slot > best)))
                best = slot;
        }
        slot = link->chain_next;
    }
    return best;
}

/* ---- changes; the caller has set dirty ---- */

#define NEED(condition)        \
    do {                       \
        if (!(condition))      \
            return KVR_BROKEN; \
    } while (0)

static int32_t is_neighbour(const kvr_table *table, int64_t value) { return value >= -1 && value < table->super.slot_count; }

static int32_t chain_insert(kvr_table *table, int64_t slot, uint32_t hash)
{
    int32_t *bucket = &table->buckets[hash & (uint32_t)(table->super.bucket_count - 1)];
    NEED(is_neighbour(table, *bucket));
    table->links[slot].chain_next = *bucket;
    table->links[slot].key_hash = hash;
    *bucket = (int32_t)slot;
    return KVR_OK;
}

static int32_t chain_remove(kvr_table *table, int64_t slot)
{
    int32_t *link = &table->buckets[table->links[slot].key_hash & (uint32_t)(table->super.bucket_count - 1)];
    int64_t steps;
    for (steps = 0; steps < table->super.slot_count; steps++) {
        int64_t here = *link;
        NEED(kvr_is_slot(table, here));
        if (here == slot) {
            NEED(is_neighbour(table, table->links[slot].chain_next));
            *link = table->links[slot].chain_next;
            return KVR_OK;
        }
        link = &table->links[here].chain_next;
    }
    return KVR_BROKEN;
}

/* Take a slot out of the recency list, or of the free list (which has no word for its end: last NULL). */
static int32_t list_remove(kvr_table *table, int64_t slot, int64_t *first, int64_t *last)
{
    kvr_link *links = table->links;
    int64_t before = links[slot].prev, after = links[slot].next;
    NEED(is_neighbour(table, before) && is_neighbour(table, after));
    NEED((before >= 0 ? links[before].next : *first) == slot);
    NEED(after < 0 || links[after].prev == slot);
    if (before >= 0)
        links[before].next = (int32_t)after;
    else
        *first = after;
    if (after >= 0)
        links[after].prev = (int32_t)before;
    else if (last)
        *last = before;
    return KVR_OK;
}

int32_t kvr_recency_remove(kvr_table *table, int64_t slot)
{
    return list_remove(table, slot, &table->words->lru_oldest, &table->words->lru_newest);
}

/* Put a slot right after `older`, -1: as the oldest. */
int32_t kvr_recency_insert(kvr_table *table, int64_t slot, int64_t older)
{
    kvr_link *links = table->links;
    int64_t newer;
    NEED(is_neighbour(table, older));
    newer = older >= 0 ? links[older].next : table->words->lru_oldest;
    NEED(is_neighbour(table, newer));
    links[slot].prev = (int32_t)older;
    links[slot].next = (int32_t)newer;
    if (older >= 0)
        links[older].next = (int32_t)slot;
    else
        table->words->lru_oldest = slot;
    if (newer >= 0)
        links[newer].prev = (int32_t)slot;
    else
        table->words->lru_newest = slot;
    return KVR_OK;
}

int32_t kvr_recency_append(kvr_table *table, int64_t slot)
{
    return kvr_recency_insert(table, slot, table->words->lru_newest);
}

/* Put a slot where (recency, slot) belongs, looking from the newest. Stale slots stay at the oldest end whatever their recency. */
int32_t kvr_recency_sort_in(kvr_table *table, int64_t slot, int64_t recency)
{
    uint32_t epoch = kvr_epoch(table);
    int64_t steps, older = table->words->lru_newest;
    for (steps = 0; steps <= table->super.slot_count; steps++) {
        NEED(is_neighbour(table, older));
        if (older < 0 || table->records[older].content_epoch != epoch || table->records[older].recency < recency ||
            (table->records[older].recency == recency && older <= slot))
            return kvr_recency_insert(table, slot, older);
        older = table->links[older].prev;
    }
    return KVR_BROKEN;
}

/* SEALED or WRITING -> FREE; the caller counts. */
int32_t kvr_free_slot(kvr_table *table, int64_t slot)
{
    kvr_link *link = &table->links[slot];
    kvr_words *words = table->words;
    int64_t head;
    int32_t status = chain_remove(table, slot);
    if (!status && kvr_load_state(&table->records[slot].state) == KVR_SLOT_SEALED)
        status = kvr_recency_remove(table, slot);
    if (status)
        return status;
    kvr_store_state(&table->records[slot].state, KVR_SLOT_FREE);
    head = words->free_head;
    NEED(is_neighbour(table, head));
    link->chain_next = -1;
    link->prev = -1;
    link->next = (int32_t)head;
    link->key_hash = 0;
    if (head >= 0)
        table->links[head].prev = (int32_t)slot;
    words->free_head = slot;
    kvr_add(&words->free_count, 1);
    return KVR_OK;
}

/* FREE -> WRITING under a key. */
int32_t kvr_fill_slot(kvr_table *table, int64_t slot, const uint8_t *key, uint8_t nbytes, int64_t *generation)
{
    kvr_record *record;
    int32_t status;
    NEED(kvr_is_slot(table, slot));
    record = &table->records[slot];
    NEED(kvr_load_state(&record->state) == KVR_SLOT_FREE);
    status = list_remove(table, slot, &table->words->free_head, NULL);
    if (status)
        return status;
    memset(record->key, 0, sizeof record->key);
    memcpy(record->key, key, nbytes);
    record->generation = record->generation < INT64_MAX && record->generation >= 0 ? record->generation + 1 : 1;
    record->content_epoch = 0;
    record->data_crc = 0;
    record->record_crc = 0;
    record->key_nbytes = nbytes;
    record->flags = 0;
    record->owner_row = (uint8_t)table->row;
    table->links[slot].prev = -1;
    table->links[slot].next = -1;
    status = chain_insert(table, slot, kvr_crc(0, key, nbytes));
    if (status)
        return status;
    /* Late: a slot that was not filled is never taken for the block that it held. */
    record->content_epoch = kvr_epoch(table);
    kvr_add(&table->words->free_count, -1);
    kvr_add(&table->words->writing_count, 1);
    kvr_store_state(&record->state, KVR_SLOT_WRITING);
    *generation = record->generation;
    return KVR_OK;
}

/* Make a record never content. */
void kvr_forget_record(kvr_record *record)
{
    record->content_epoch = 0;
    record->record_crc = kvr_record_crc(record);
}

/* All slots in the free list, in ascending order. */
void kvr_layout_links(kvr_link *links, int64_t slot_count)
{
    int64_t slot;
    for (slot = 0; slot < slot_count; slot++) {
        kvr_link link = {-1, (int32_t)(slot - 1), slot + 1 < slot_count ? (int32_t)(slot + 1) : -1, 0};
        links[slot] = link;
    }
}

/* ---- rebuilding ---- */

typedef struct entry {
    int64_t is_content; /* stale slots come first */
    int64_t recency;
    int64_t slot;
} entry;

static int older_first(const void *left, const void *right)
{
    const entry *a = left, *b = right;
    if (a->is_content != b->is_content)
        return a->is_content < b->is_content ? -1 : 1;
    if (a->recency != b->recency)
        return a->recency < b->recency ? -1 : 1;
    return a->slot < b->slot ? -1 : a->slot > b->slot;
}

static uint32_t hash_of(const kvr_record *record)
{
    return kvr_crc(0, record->key, record->key_nbytes < KVR_KEY_NBYTES ? record->key_nbytes : KVR_KEY_NBYTES);
}

static void chain_rebuilt(kvr_table *table, int64_t slot)
{
    uint32_t hash = hash_of(&table->records[slot]);
    int32_t *bucket = &table->buckets[hash & (uint32_t)(table->super.bucket_count - 1)];
    table->links[slot].chain_next = *bucket;
    table->links[slot].key_hash = hash;
    *bucket = (int32_t)slot;
}

/* Decide what a slot is from its record alone; return the state that it has from now on. */
static uint8_t judge(kvr_table *table, int64_t slot, const kvr_rows *rows, uint32_t epoch, int32_t keep_writing,
                     kvr_rebuilt *out)
{
    kvr_record *record = &table->records[slot];
    uint8_t state = kvr_load_state(&record->state);
    if (state == KVR_SLOT_FREE || (state == KVR_SLOT_WRITING && keep_writing))
        return state;
    if (state == KVR_SLOT_SEALED) {
        int32_t is_bad;
        if (kvr_is_content(record, epoch)) {
            out->content++;
            return state;
        }
        is_bad = record->key_nbytes < 1 || record->key_nbytes > KVR_KEY_NBYTES ||
                 record->record_crc != kvr_record_crc(record);
        out->bad += is_bad;
        if (kvr_is_claimed(rows, slot)) {
            if (is_bad)
                kvr_forget_record(record);
            return state;
        }
        out->stale_freed += !is_bad;
    } else if (state == KVR_SLOT_WRITING) {
        out->freed++;
    } else {
        out->bad++;
    }
    kvr_store_state(&record->state, KVR_SLOT_FREE);
    return KVR_SLOT_FREE;
}

/* Make index, lists and counts anew from the records. */
int32_t kvr_rebuild(kvr_table *table, int32_t keep_writing, kvr_rebuilt *out)
{
    kvr_words *words = table->words;
    kvr_link *links = table->links;
    int64_t slot, i, count = table->super.slot_count, sealed_count = 0, free_count = 0, writing_count = 0, last_free = -1;
    uint32_t epoch = kvr_epoch(table);
    kvr_rows rows;
    entry *sealed = malloc((size_t)count * sizeof *sealed);
    if (!sealed)
        return kvr_fail_errno("malloc", ENOMEM);
    memset(out, 0, sizeof *out);
    kvr_rows_get(table, &rows);
    kvr_set_dirty(words);
    memset(table->buckets, 0xFF, (size_t)table->super.bucket_count * sizeof *table->buckets);
    words->free_head = -1;
    for (slot = 0; slot < count; slot++) {
        kvr_link none = {-1, -1, -1, 0};
        int64_t content = out->content;
        uint8_t state = judge(table, slot, &rows, epoch, keep_writing, out);
        links[slot] = none;
        if (state == KVR_SLOT_FREE) {
            links[slot].prev = (int32_t)last_free;
            if (last_free >= 0)
                links[last_free].next = (int32_t)slot;
            else
                words->free_head = slot;
            last_free = slot;
            free_count++;
        } else if (state == KVR_SLOT_SEALED) {
            entry found = {out->content != content, table->records[slot].recency, slot};
            sealed[sealed_count++] = found;
        } else {
            writing_count++;
        }
    }
    qsort(sealed, (size_t)sealed_count, sizeof *sealed, older_first);
    for (i = 0; i < sealed_count; i++) {
        links[sealed[i].slot].prev = i ? (int32_t)sealed[i - 1].slot : -1;
        links[sealed[i].slot].next = i + 1 < sealed_count ? (int32_t)sealed[i + 1].slot : -1;
        chain_rebuilt(table, sealed[i].slot);
    }
    for (slot = 0; writing_count && slot < count; slot++)
        if (kvr_load_state(&table->records[slot].state) == KVR_SLOT_WRITING)
            chain_rebuilt(table, slot);
    words->lru_oldest = sealed_count ? sealed[0].slot : -1;
    words->lru_newest = sealed_count ? sealed[sealed_count - 1].slot : -1;
    kvr_store(&words->free_count, free_count);
    kvr_store(&words->writing_count, writing_count);
    kvr_store(&words->sealed_count, out->content);
    kvr_store(&words->stale_count, sealed_count - out->content);
    kvr_add(&words->corrupt_total, out->bad);
    free(sealed);
    kvr_store(&words->dirty, 0);
    return KVR_OK;
}
