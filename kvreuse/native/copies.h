/* Queues and operations: what copies.c (running them) and copies_submit.c (taking them in) share. */
#ifndef KVR_COPIES_H
#define KVR_COPIES_H

#include "table.h"

#pragma GCC visibility push(hidden)

/* One thread takes so much of an operation at a time: others can help, and a cancel is seen in between. */
#define KVR_COPY_UNIT_NBYTES (INT64_C(1) << 20)
/* A caller that waits takes so much: between two pieces it looks at its time. */
#define KVR_COPY_PIECE_NBYTES (INT64_C(256) << 10)
#define KVR_AFTER_COUNT_MAX 64
#define KVR_LARGE_COPY_NBYTES (INT64_C(2) << 20) /* from here on bytes are stored past the caches (bytes.c) */

/* An operation's way: each phase is entered once, in this order. */
enum { KVR_PHASE_WAITING, KVR_PHASE_STARTING, KVR_PHASE_COPYING, KVR_PHASE_ENDING, KVR_PHASE_ENDED };

typedef struct kvr_entry {
    uint64_t dst;
    uint64_t src;
    int64_t nbytes;
    int64_t index; /* of the caller's entry */
} kvr_entry;

typedef struct kvr_wait {
    int32_t kind;
    int32_t is_over;
    int32_t fd;     /* owned */
    int32_t device; /* of the event */
    uint64_t event;
    struct kvr_operation *operation; /* counted in its `users` */
} kvr_wait;

typedef struct kvr_fault {
    int32_t kind;
    int32_t is_over; /* a pause that was resumed */
    int64_t index;
    int64_t value;
} kvr_fault;

typedef struct kvr_operation {
    kvr_object object;
    struct kvr_queue *queue; /* NULL once it is closed */
    struct kvr_operation *next;
    int32_t phase;
    int32_t state;
    int32_t is_cancelled; /* asked for */
    int32_t is_abandoned;
    int32_t is_released;
    int32_t is_listed; /* in the queue's list of ended ones */
    int32_t active;    /* threads in it */
    int32_t users;     /* operations that wait for it, and callers that do */
    int32_t dependants; /* of these, the operations */
    int32_t quarantine;
    int32_t device; /* KVR_PROVIDER_HOST, or whose context copies it */
    int32_t is_begun; /* what was checked before the first byte was good */
    int32_t is_lost;  /* its last thread left without knowing whether it has ended */
    int32_t is_owner; /* of its slots */
    int32_t reserved[2];
    int64_t quarantine_ns;
    kvr_entry *entries; /* owned */
    int64_t entry_count;
    int64_t total_nbytes;
    int64_t moved_nbytes;
    int64_t next_entry; /* what no thread has taken yet begins here */
    int64_t next_byte;
    int64_t taken_nbytes;
    int64_t failed_index;
    kvr_error error;
    kvr_mapping **mappings; /* owned array; each counted in its flight_count; a part's data regions come first */
    int64_t mapping_count;
    kvr_wait *waits; /* owned */
    int64_t wait_count;
    /* Copies of slots. */
    kvr_table *table; /* counted in its operation_count; NULL: none */
    int64_t *slots;   /* owned; IN: as given, OUT: those that were claimed */
    int64_t *generations;
    int64_t *places; /* OUT: the caller's entry of each slot */
    int64_t slot_count;
    kvr_late *claims; /* owned; OUT: what to give back */
    int32_t direction;
    uint32_t flags;
    kvr_fault fault;
} kvr_operation;

typedef struct kvr_queue {
    kvr_object object;
    struct kvr_queue *next; /* of all queues */
    pthread_cond_t work;
    int32_t ended_fd; /* owned; told to callers */
    int32_t wake_fd;  /* owned; wakes the thread that polls */
    int32_t thread_count;
    int32_t alive; /* threads; the last one frees a queue that nobody waits for */
    int32_t is_faulty;
    int32_t is_closing;
    int32_t is_stopping;
    int32_t is_orphan;
    int32_t is_polled; /* a thread waits for fds and events */
    int32_t has_waits; /* there may be some to wait for */
    int32_t paused;
    int64_t submitted;
    int64_t done;
    int64_t failed;
    int64_t cancelled;
    int64_t running;
    int64_t queued;
    kvr_operation *first, *last;             /* not ended, in the order of submission */
    kvr_operation *ended_first, *ended_last; /* ended and not listed yet */
    kvr_fault fault;                         /* for the next operation */
} kvr_queue;

/* ---- with the handle mutex held ---- */
kvr_queue **kvr_queues(void); /* handles.c */
void kvr_forget_queue(const kvr_queue *queue); /* its operations have none any more */
kvr_copy_counts *kvr_copies(void);
pthread_mutex_t *kvr_handles_mutex(void);
/* Wait until something has ended or `until` (CLOCK_MONOTONIC ns) is there: 0, or ETIMEDOUT. */
int32_t kvr_wait_ended(int64_t until_ns);
void kvr_tell_ended(void);

/* ---- copies.c ---- */
/* Run a waiting operation in this thread, to its end as far as this thread can bring it. The mutex is held, and let go meanwhile. */
void kvr_operation_run(kvr_queue *queue, kvr_operation *operation);
/* Drop all that an operation holds. The mutex is held. */
void kvr_operation_let_go(kvr_operation *operation);
/* Free an operation of which nothing is registered or held any more. */
void kvr_operation_free(kvr_operation *operation);
void kvr_queue_wake(kvr_queue *queue);
/* Wake as many threads as the operation that was just added needs. */
void kvr_queue_wake_for(kvr_queue *queue, const kvr_operation *operation);

/* ---- bytes.c ---- */
/* Copy; `is_large`: more than the caches hold is on its way, so that what is written is better not kept in them. */
void kvr_copy_bytes(void *dst, const void *src, int64_t nbytes, int32_t is_large);
#define KVR_AHEAD_MIN_NBYTES 512 /* of smaller entries the CPU has several on their way by itself */
void kvr_copy_ahead(const kvr_entry *next); /* ask for what the next entry begins with */
void kvr_copy_fence(void); /* after a thread's last bytes, before it tells of them */

/* ---- cuda.c: a thread's stream on a device ---- */
typedef struct kvr_copy_stream {
    void *stream;
    void *event;
    int32_t device;
    int32_t is_open;
} kvr_copy_stream;
int32_t kvr_cuda_ready(int32_t ordinal, const char *call);
/* Issue all; *out_issued: so many are on their way, also after a failure. */
int32_t kvr_cuda_copy_issue(int32_t ordinal, kvr_copy_stream *stream, const kvr_entry *entries, int64_t count, int64_t *out_issued);
/* KVR_OK: all that was issued has ended well; KVR_PENDING: not yet; an error: the driver does not tell. */
int32_t kvr_cuda_copy_poll(int32_t ordinal, const kvr_copy_stream *stream);
int32_t kvr_cuda_event_poll(int32_t ordinal, uint64_t event);
void kvr_cuda_stream_close(kvr_copy_stream *stream);

#pragma GCC visibility pop

#endif
