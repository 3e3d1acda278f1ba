/* An open part, and the steps that its calls are made of. */
#ifndef KVR_TABLE_H
#define KVR_TABLE_H

#include "internal.h"

/* A derived structure contradicts itself: dirty stays set, so that the next one who may rebuilds it. */
#define KVR_BROKEN 2
#define KVR_STAMP_MAX (INT64_MAX >> KVR_CLAIM_COUNT_BITS)

#pragma GCC visibility push(hidden)

/* Who in this process writes into a slot beside the caller. */
typedef struct kvr_owner {
    _Atomic int32_t count;    /* operations */
    _Atomic int32_t given_up; /* its reservation was aborted */
    _Atomic int64_t spoiled;  /* the generation of which a copy failed; 0: none */
} kvr_owner;

/* Claims of an operation that has ended while the part's lock could not be had. */
typedef struct kvr_late {
    struct kvr_late *next;
    int64_t count;
    int64_t slots[];
} kvr_late;

typedef struct kvr_heart kvr_heart;

typedef struct kvr_table {
    kvr_object object;
    int32_t role;
    int32_t row;
    int64_t session;
    int64_t wait_ns;
    kvr_lock *lock;
    uint8_t *memory; /* the table memory */
    int64_t memory_nbytes;
    const uint8_t *claims; /* all rows */
    int64_t claims_nbytes;
    uint8_t *own_memory; /* mapping of this session's row, NULL for a keeper */
    int64_t own_memory_nbytes;
    int64_t *own; /* this session's row: header, then a word a slot */
    kvr_superblock super;
    kvr_words *words;
    kvr_record *records;
    kvr_link *links;
    int32_t *buckets;
    kvr_mapping **bound; /* region_count entries */
    int64_t operation_count; /* copies that name its slots; under the handle mutex */
    kvr_heart *heart;        /* under the handle mutex */
    /* Under the part's lock, but for the counters in it: */
    kvr_owner *_Atomic owners; /* an entry a slot; NULL until an operation writes into one */
    int64_t *given_up; /* slots that were aborted while an operation wrote into them; room for all of them */
    int64_t given_up_count;
    kvr_late *_Atomic late; /* claims that could not be given back yet */
} kvr_table;

/* Where each active session's words begin: entry i of a row is slot i's word. */
typedef struct kvr_rows {
    int64_t count;
    const int64_t *words[KVR_ROW_COUNT];
} kvr_rows;

/* A batch of keys. */
typedef struct kvr_keys {
    const uint8_t *data;
    int64_t stride;
    const uint8_t *nbytes; /* NULL: all have stride bytes */
    int64_t count;
} kvr_keys;

static inline const uint8_t *kvr_key(const kvr_keys *keys, int64_t i, uint8_t *nbytes)
{
    /* Checked before; clamped, since another thread of the caller may have changed it. */
    *nbytes = keys->nbytes && keys->nbytes[i] < keys->stride ? keys->nbytes[i] : (uint8_t)keys->stride;
    return keys->data + i * keys->stride;
}

static inline int32_t kvr_is_slot(const kvr_table *table, int64_t slot) { return slot >= 0 && slot < table->super.slot_count; }

static inline int64_t kvr_capacity(const kvr_table *table)
{
    int64_t declared = kvr_load(&table->words->capacity);
    return declared > 0 && declared < table->super.slot_count ? declared : table->super.slot_count;
}

static inline uint32_t kvr_epoch(const kvr_table *table) { return (uint32_t)kvr_load(&table->words->content_epoch); }

/* The one increment that empties a part. Records carry the low 32 bits, of which 0 is never content. */
static inline void kvr_next_epoch(kvr_table *table)
{
    int64_t next = kvr_load(&table->words->content_epoch) + 1;
    kvr_store(&table->words->content_epoch, (uint32_t)next ? next : next + 1);
}

/* ---- entering and leaving a call (table.c) ---- */
int32_t kvr_table_enter(int64_t handle, const char *call, kvr_table **out);
void kvr_table_leave(kvr_table *table);
int32_t kvr_table_require(const kvr_table *table, const char *call, int32_t needed, int32_t also);
/* Take the lock; see that the session holds its place; repair, or report, a change that was cut short. */
int32_t kvr_table_take(kvr_table *table, const char *call, int32_t check, int32_t repair);
int32_t kvr_table_broken(const char *call);

/* ---- the writer's heartbeat (heartbeat.c) ---- */
int32_t kvr_heart_start(int64_t *word, int64_t period_ns, kvr_heart **out);
void kvr_heart_stop(kvr_heart *heart);

/* ---- slots that operations name (table_owners.c) ---- */
/* Become an owner of reserved slots (-1 is skipped), or fail: nothing changed then. */
int32_t kvr_table_own(kvr_table *table, const int64_t *slots, const int64_t *generations, int64_t count, const char *call);
/* The slots are still those that were owned: not given up, not of another generation. Needs no lock. */
int32_t kvr_table_check_owned(const kvr_table *table, const int64_t *slots, const int64_t *generations, int64_t count,
                              const char *call);
/* No operation but `own` writes into the slots, and none has failed to. Needs no lock. */
int32_t kvr_table_check_still(const kvr_table *table, const int64_t *slots, const int64_t *generations, int64_t count, int32_t own,
                              const char *call);
/* Stop being an owner; `is_spoiled`: the bytes are invalid. Slots given up meanwhile are freed now, or by the writer's next call. */
void kvr_table_disown(kvr_table *table, const int64_t *slots, const int64_t *generations, int64_t count, int32_t is_spoiled);
/* Abort reserved slots: those that operations write into are freed when these have ended. */
int32_t kvr_table_give_up(kvr_table *table, const int64_t *slots, const int64_t *generations, int64_t count, int64_t *out_freed);
/* Give claims back and free them now, or where the lock cannot be had, at the session's next call. */
void kvr_table_unclaim(kvr_table *table, kvr_late *claims);
/* What was left to do when the lock could not be had; it is held now. */
int32_t kvr_table_settle(kvr_table *table);
int32_t kvr_check_repeated(const int64_t *slots, int64_t count, const char *call);
int64_t kvr_owned_count(const kvr_table *table);
int32_t kvr_table_commit_as(int64_t handle, const int64_t *given, const int64_t *generations, int64_t count, uint32_t flags, int32_t own,
                            const char *call);

/* ---- the derived structures (table_index.c); the lock is held ---- */
void kvr_rows_get(const kvr_table *table, kvr_rows *out);
int32_t kvr_is_claimed(const kvr_rows *rows, int64_t slot);
int64_t kvr_last_stamp(const kvr_table *table);
uint32_t kvr_record_crc(const kvr_record *record);
int32_t kvr_is_content(const kvr_record *record, uint32_t epoch);
int64_t kvr_look(const kvr_table *table, const uint8_t *key, uint8_t nbytes, int32_t *is_writing);
int32_t kvr_recency_remove(kvr_table *table, int64_t slot);
int32_t kvr_recency_insert(kvr_table *table, int64_t slot, int64_t older);
int32_t kvr_recency_append(kvr_table *table, int64_t slot);
int32_t kvr_recency_sort_in(kvr_table *table, int64_t slot, int64_t recency);
int32_t kvr_free_slot(kvr_table *table, int64_t slot);
int32_t kvr_fill_slot(kvr_table *table, int64_t slot, const uint8_t *key, uint8_t nbytes, int64_t *generation);
void kvr_forget_record(kvr_record *record);
void kvr_layout_links(kvr_link *links, int64_t slot_count);

typedef struct kvr_rebuilt {
    int64_t content;
    int64_t bad;
    int64_t freed;
    int64_t stale_freed;
} kvr_rebuilt;
int32_t kvr_rebuild(kvr_table *table, int32_t keep_writing, kvr_rebuilt *out);

#pragma GCC visibility pop

#endif
