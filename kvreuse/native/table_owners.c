/* Slots that copies write into have an owner beside the caller: they are not freed, nor sealed, before both have let go (O2, O4). */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>

#include "table.h"

static kvr_owner *owner_of(const kvr_table *table, int64_t slot) { return &table->owners[slot]; }

static int32_t make_owners(kvr_table *table)
{
    size_t count = (size_t)table->super.slot_count;
    if (!table->given_up)
        table->given_up = calloc(count, sizeof *table->given_up);
    if (table->given_up && !table->owners)
        atomic_store(&table->owners, calloc(count, sizeof *table->owners));
    return table->owners ? KVR_OK : kvr_fail_errno("malloc", ENOMEM);
}

/* The slot is reserved under that generation, and not given up. */
static int32_t check_reserved(const kvr_table *table, int64_t i, int64_t slot, int64_t generation, const char *call)
{
    const kvr_record *record = &table->records[slot];
    int64_t found = kvr_load(&record->generation);
    uint8_t state = kvr_load_state(&record->state);
    if (found != generation)
        return kvr_fail(KVR_ERROR_STALE_BLOCK, KVR_DETAIL_GENERATION, call, i, slot, generation, found);
    if (state != KVR_SLOT_WRITING)
        return kvr_fail(KVR_ERROR_STALE_BLOCK, KVR_DETAIL_SLOT_STATE, call, i, slot, state, KVR_SLOT_WRITING);
    if (atomic_load(&owner_of(table, slot)->given_up))
        return kvr_fail(KVR_ERROR_STALE_BLOCK, KVR_DETAIL_SLOT_GIVEN_UP, call, i, slot, 0, 0);
    return KVR_OK;
}

int32_t kvr_table_own(kvr_table *table, const int64_t *slots, const int64_t *generations, int64_t count, const char *call)
{
    int64_t i;
    int32_t status = kvr_table_take(table, call, 1, 1);
    if (status)
        return status;
    status = make_owners(table);
    for (i = 0; i < count && !status; i++)
        if (slots[i] >= 0)
            status = check_reserved(table, i, slots[i], generations[i], call);
    for (i = 0; i < count && !status; i++)
        if (slots[i] >= 0)
            atomic_fetch_add(&owner_of(table, slots[i])->count, 1);
    kvr_lock_drop(table->lock);
    return status;
}

int32_t kvr_table_check_owned(const kvr_table *table, const int64_t *slots, const int64_t *generations, int64_t count,
                              const char *call)
{
    int64_t i;
    int32_t status = KVR_OK;
    for (i = 0; i < count && !status; i++)
        if (slots[i] >= 0)
            status = check_reserved(table, i, slots[i], generations[i], call);
    return status;
}

int32_t kvr_table_check_still(const kvr_table *table, const int64_t *slots, const int64_t *generations, int64_t count, int32_t own,
                              const char *call)
{
    int64_t i;
    for (i = 0; table->owners && i < count; i++) {
        const kvr_owner *owner;
        int32_t others;
        if (slots[i] < 0)
            continue;
        owner = owner_of(table, slots[i]);
        others = atomic_load(&owner->count) - own;
        if (others > 0)
            return kvr_fail(KVR_ERROR_BUSY, KVR_DETAIL_SLOT_IN_FLIGHT, call, i, slots[i], others, 0);
        if (atomic_load(&owner->given_up))
            return kvr_fail(KVR_ERROR_STALE_BLOCK, KVR_DETAIL_SLOT_GIVEN_UP, call, i, slots[i], 0, 0);
        if (generations[i] && atomic_load(&owner->spoiled) == generations[i])
            return kvr_fail(KVR_ERROR_CORRUPT, KVR_DETAIL_SLOT_SPOILED, call, i, slots[i], 0, 0);
    }
    return KVR_OK;
}

void kvr_table_disown(kvr_table *table, const int64_t *slots, const int64_t *generations, int64_t count, int32_t is_spoiled)
{
    int64_t i;
    int32_t is_last = 0;
    for (i = 0; i < count; i++) {
        kvr_owner *owner;
        if (slots[i] < 0)
            continue;
        owner = owner_of(table, slots[i]);
        if (is_spoiled)
            atomic_store(&owner->spoiled, generations[i]);
        if (atomic_fetch_sub(&owner->count, 1) == 1 && atomic_load(&owner->given_up))
            is_last = 1;
    }
    /* If the lock cannot be had now, the writer's next call frees them. */
    if (is_last && kvr_table_take(table, "table_abort", 1, 1) == KVR_OK)
        kvr_lock_drop(table->lock);
}

/* Free a reserved slot; dirty is 0 before and after, unless this fails. */
static int32_t free_reserved(kvr_table *table, int64_t slot)
{
    kvr_set_dirty(table->words);
    if (kvr_free_slot(table, slot))
        return KVR_BROKEN;
    kvr_add(&table->words->writing_count, -1);
    kvr_store(&table->words->dirty, 0);
    return KVR_OK;
}

int32_t kvr_table_give_up(kvr_table *table, const int64_t *slots, const int64_t *generations, int64_t count, int64_t *out_freed)
{
    int64_t i;
    *out_freed = 0;
    for (i = 0; i < count; i++) {
        int64_t slot = slots[i];
        if (slot < 0 || kvr_load_state(&table->records[slot].state) != KVR_SLOT_WRITING ||
            table->records[slot].generation != generations[i])
            continue;
        if (table->owners) {
            kvr_owner *owner = owner_of(table, slot);
            if (atomic_load(&owner->given_up))
                continue;
            /* Said before it is looked: an operation that ends now sees the one, or this the other. */
            atomic_store(&owner->given_up, 1);
            if (atomic_load(&owner->count)) {
                table->given_up[table->given_up_count++] = slot;
                continue;
            }
            atomic_store(&owner->given_up, 0);
        }
        if (free_reserved(table, slot))
            return KVR_BROKEN;
        (*out_freed)++;
    }
    return KVR_OK;
}

static int32_t settle_given_up(kvr_table *table)
{
    int64_t i, kept = 0;
    for (i = 0; i < table->given_up_count; i++) {
        int64_t slot = table->given_up[i];
        kvr_owner *owner = owner_of(table, slot);
        if (atomic_load(&owner->count)) {
            table->given_up[kept++] = slot;
            continue;
        }
        atomic_store(&owner->given_up, 0);
        if (kvr_load_state(&table->records[slot].state) == KVR_SLOT_WRITING && free_reserved(table, slot))
            return KVR_BROKEN;
    }
    table->given_up_count = kept;
    return KVR_OK;
}

static void give_back(const kvr_table *table, const int64_t *slots, int64_t count)
{
    int64_t i;
    if (kvr_load(&table->words->row_session[table->row]) != table->session)
        return; /* the row was zeroed, and may be another's */
    for (i = 0; i < count; i++) {
        int64_t *word = table->own + 8 + slots[i];
        int64_t found = kvr_load(word);
        if (found & KVR_CLAIM_COUNT_MAX)
            kvr_store(word, found - 1);
    }
}

static void give_back_all(kvr_table *table)
{
    kvr_late *late = atomic_exchange(&table->late, NULL);
    while (late) {
        kvr_late *next = late->next;
        give_back(table, late->slots, late->count);
        free(late);
        late = next;
    }
}

int32_t kvr_table_settle(kvr_table *table)
{
    give_back_all(table);
    return table->given_up_count ? settle_given_up(table) : KVR_OK;
}

void kvr_table_unclaim(kvr_table *table, kvr_late *claims)
{
    kvr_late *next = atomic_load(&table->late);
    do
        claims->next = next;
    while (!atomic_compare_exchange_weak(&table->late, &next, claims));
    if (kvr_table_take(table, "table_release", 0, 0) == KVR_OK) {
        /* A fenced session may do this: it changes its own row only. */
        give_back_all(table);
        kvr_lock_drop(table->lock);
    }
}

int64_t kvr_owned_count(const kvr_table *table)
{
    int64_t slot, count = 0;
    kvr_owner *owners = atomic_load(&table->owners);
    for (slot = 0; owners && slot < table->super.slot_count; slot++)
        count += atomic_load(&owners[slot].count) > 0;
    return count;
}
