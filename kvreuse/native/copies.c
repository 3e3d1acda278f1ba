/* Running copies: the threads of a queue, and the way of an operation from its first byte to its end (O1-O7).
 * All state is under the handle mutex, which is let go while bytes move and while a part's lock is taken. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "copies.h"

#define STACK_NBYTES (256 * 1024)
#define POLL_MIN_NS 20000
#define POLL_MAX_NS 500000
#define EVENT_POLL_NS 100000 /* between two looks at CUDA events that operations wait for */
#define THREAD_END_NS INT64_C(1000000000)

/* What a thread takes of an operation. */
typedef struct unit {
    int64_t entry;
    int64_t byte;
    int64_t nbytes;
    int64_t start; /* bytes of the operation before it */
} unit;

/* ---- faults, for tests ---- */

/* Stop at a fault's byte until it is resumed; 0 if the operation was abandoned. */
static int32_t pause_here(kvr_queue *queue, kvr_operation *operation)
{
    int32_t goes_on;
    kvr_handles_lock();
    queue->paused++;
    kvr_tell_ended();
    while (!operation->fault.is_over && !operation->is_abandoned)
        pthread_cond_wait(&queue->work, kvr_handles_mutex());
    goes_on = !operation->is_abandoned;
    queue->paused--;
    kvr_handles_unlock();
    return goes_on;
}

/* Copy one piece with the operation's fault: `start` is its place among all bytes, `offset` in its entry. */
static int32_t copy_faulty(kvr_queue *queue, kvr_operation *operation, const kvr_entry *entry, int64_t offset, int64_t nbytes,
                           int64_t start, int64_t *moved)
{
    const kvr_fault *fault = &operation->fault;
    uint8_t *dst = (uint8_t *)(uintptr_t)entry->dst + offset;
    const uint8_t *src = (const uint8_t *)(uintptr_t)entry->src + offset;
    int64_t first = nbytes;
    if (fault->kind == KVR_FAULT_ERRNO && fault->index == entry->index)
        return kvr_fail_errno("copy", (int32_t)fault->value);
    if (fault->kind == KVR_FAULT_SHORT && fault->index == entry->index && offset + nbytes > fault->value) {
        first = fault->value > offset ? fault->value - offset : 0;
        memcpy(dst, src, (size_t)first);
        *moved += first;
        return kvr_fail(KVR_ERROR_SIZE_MISMATCH, KVR_DETAIL_COPY_SHORT, "copy", entry->index, fault->value, entry->nbytes, 0);
    }
    if (fault->kind == KVR_FAULT_PAUSE && fault->value >= start && fault->value < start + nbytes)
        first = fault->value - start;
    memcpy(dst, src, (size_t)first);
    *moved += first;
    if (first < nbytes) {
        if (!pause_here(queue, operation))
            return kvr_fail(KVR_ERROR_NOT_QUIESCENT, KVR_DETAIL_OPERATION_ABANDONED, "copy", operation->object.handle, 0, 0, 0);
        memcpy(dst + first, src + first, (size_t)(nbytes - first));
        *moved += nbytes - first;
    }
    return KVR_OK;
}

/* ---- moving bytes; without the mutex ---- */

static int32_t copy_unit(kvr_queue *queue, kvr_operation *operation, const unit *taken, int64_t *moved, int64_t *failed_index)
{
    const kvr_entry *entry = &operation->entries[taken->entry];
    int64_t offset = taken->byte, left = taken->nbytes;
    int32_t is_large = operation->total_nbytes >= KVR_LARGE_COPY_NBYTES;
    for (; left > 0; entry++, offset = 0) {
        int64_t nbytes = entry->nbytes - offset < left ? entry->nbytes - offset : left;
        if (__builtin_expect(operation->fault.kind != KVR_FAULT_NONE, 0)) {
            int32_t status = copy_faulty(queue, operation, entry, offset, nbytes, taken->start + taken->nbytes - left, moved);
            if (status) {
                *failed_index = entry->index;
                return status;
            }
        } else {
            if (nbytes < left && nbytes >= KVR_AHEAD_MIN_NBYTES)
                kvr_copy_ahead(entry + 1);
            kvr_copy_bytes((uint8_t *)(uintptr_t)entry->dst + offset, (const uint8_t *)(uintptr_t)entry->src + offset, nbytes,
                           is_large);
            *moved += nbytes;
        }
        left -= nbytes;
    }
    if (is_large)
        kvr_copy_fence();
    return KVR_OK;
}

static void sleep_ns(int64_t ns)
{
    struct timespec pause = {0, ns};
    (void)nanosleep(&pause, NULL);
}

static int32_t is_abandoned(const kvr_operation *operation)
{
    int32_t found;
    kvr_handles_lock();
    found = operation->is_abandoned;
    kvr_handles_unlock();
    return found;
}

/* Copy all entries by a stream, and wait for its end. KVR_PENDING: abandoned, or the driver does not tell; the stream is lost then. */
static int32_t copy_on_device(kvr_operation *operation, kvr_copy_stream *stream, int64_t *failed_index, int32_t *why)
{
    int64_t issued = 0, pause = POLL_MIN_NS;
    kvr_error first;
    int32_t status = kvr_cuda_copy_issue(operation->device, stream, operation->entries, operation->entry_count, &issued);
    int32_t polled = KVR_OK;
    (void)kvr_error_get(&first);
    if (status)
        *failed_index = issued < operation->entry_count ? operation->entries[issued].index : -1;
    /* Also after a failure: what was issued before it still moves. */
    while (issued && (polled = kvr_cuda_copy_poll(operation->device, stream)) == KVR_PENDING) {
        if (is_abandoned(operation))
            break;
        sleep_ns(pause);
        pause = pause * 2 < POLL_MAX_NS ? pause * 2 : POLL_MAX_NS;
    }
    if (polled) {
        *why = polled < 0 ? KVR_QUARANTINE_DRIVER : 0;
        memset(stream, 0, sizeof *stream);
        return KVR_PENDING;
    }
    if (status)
        (void)kvr_fail_again(&first);
    return status;
}

/* ---- the phases ---- */

static void take_failure(kvr_operation *operation, int64_t index)
{
    if (operation->error.status)
        return; /* the first one is told */
    (void)kvr_error_get(&operation->error);
    operation->failed_index = index;
}

static int32_t verify_blocks(const kvr_operation *operation)
{
    int64_t i;
    const kvr_table *table = operation->table;
    for (i = 0; i < operation->slot_count; i++) {
        int64_t slot = operation->slots[i], place = slot % table->super.slots_per_region;
        const kvr_record *record = &table->records[slot];
        const kvr_mapping *mapping = operation->mappings[slot / table->super.slots_per_region];
        uint32_t found;
        if (!(record->flags & KVR_RECORD_HAS_DATA_CRC))
            continue;
        found = kvr_crc(0, mapping->address + place * table->super.block_nbytes, table->super.block_nbytes);
        if (found != record->data_crc)
            return kvr_fail(KVR_ERROR_CORRUPT, KVR_DETAIL_BLOCK_CRC, "copy_slots", operation->places[i], slot, record->data_crc,
                            found);
    }
    return KVR_OK;
}

/* Before the first byte; without the mutex. */
static int32_t start(const kvr_operation *operation)
{
    if (operation->direction == KVR_DIRECTION_IN)
        return kvr_table_check_owned(operation->table, operation->slots, operation->generations, operation->slot_count, "copy_slots");
    if (operation->direction == KVR_DIRECTION_OUT && operation->flags & KVR_SLOTS_VERIFY && operation->device < 0)
        return verify_blocks(operation);
    return KVR_OK;
}

/* Let go of the slots; without the mutex. KVR_OK, or why nothing was committed. */
static int32_t end_slots(kvr_operation *operation, int32_t is_done)
{
    int32_t status = KVR_OK;
    int64_t freed;
    kvr_table *table = operation->table;
    if (operation->direction == KVR_DIRECTION_OUT) {
        if (operation->claims)
            kvr_table_unclaim(table, operation->claims);
        operation->claims = NULL;
        return KVR_OK;
    }
    if (is_done && operation->flags & KVR_SLOTS_COMMIT)
        status = kvr_table_commit_as(table->object.handle, operation->slots, operation->generations, operation->slot_count,
                                     operation->flags & KVR_SLOTS_CHECKSUM ? KVR_COMMIT_CHECKSUM : 0, 1, "table_commit");
    if (operation->is_owner) {
        operation->is_owner = 0;
        if (operation->flags & KVR_SLOTS_COMMIT && (status || !is_done)) {
            kvr_error why;
            (void)kvr_error_get(&why);
            (void)kvr_table_abort(table->object.handle, operation->slots, operation->generations, operation->slot_count, &freed);
            kvr_table_disown(table, operation->slots, operation->generations, operation->slot_count, 1);
            (void)kvr_fail_again(&why);
        } else {
            kvr_table_disown(table, operation->slots, operation->generations, operation->slot_count, !is_done);
        }
    }
    return status;
}

static void leave_quarantine(kvr_operation *operation)
{
    if (!operation->quarantine)
        return;
    operation->quarantine = 0;
    kvr_copies()->quarantined--;
    kvr_copies()->quarantine_nbytes -= operation->total_nbytes;
}

static void enter_quarantine(kvr_operation *operation, int32_t why)
{
    if (operation->quarantine || operation->phase == KVR_PHASE_ENDED)
        return;
    operation->quarantine = why;
    operation->quarantine_ns = kvr_now_ns();
    kvr_copies()->quarantined++;
    kvr_copies()->quarantine_nbytes += operation->total_nbytes;
}

/* All that an operation waits for is let go. */
static void drop_waits(kvr_operation *operation)
{
    int64_t i;
    for (i = 0; i < operation->wait_count; i++) {
        kvr_wait *wait = &operation->waits[i];
        if (wait->fd >= 0) {
            (void)close(wait->fd);
            kvr_copies()->fds--;
        }
        if (!wait->operation)
            continue;
        wait->operation->dependants--;
        if (!--wait->operation->users && wait->operation->is_released && !wait->operation->active)
            kvr_operation_free(wait->operation);
    }
    operation->wait_count = 0;
}

void kvr_operation_let_go(kvr_operation *operation)
{
    int64_t i;
    drop_waits(operation);
    for (i = 0; i < operation->mapping_count; i++)
        if (operation->mappings[i])
            operation->mappings[i]->flight_count--;
    operation->mapping_count = 0;
    if (operation->table)
        operation->table->operation_count--;
    operation->table = NULL;
}

void kvr_operation_free(kvr_operation *operation)
{
    free(operation->entries);
    free(operation->mappings);
    free(operation->waits);
    free(operation->slots);
    free(operation->generations);
    free(operation->places);
    free(operation->claims);
    free(operation);
}

static void unlink_operation(kvr_queue *queue, kvr_operation *operation)
{
    kvr_operation **at = &queue->first, *before = NULL;
    while (*at != operation) {
        before = *at;
        at = &before->next;
    }
    *at = operation->next;
    if (queue->last == operation)
        queue->last = before;
    operation->next = NULL;
}

void kvr_queue_wake(kvr_queue *queue)
{
    uint64_t one = 1;
    pthread_cond_broadcast(&queue->work);
    if (queue->is_polled)
        (void)!write(queue->wake_fd, &one, sizeof one);
}

/* A fault's pause sleeps on the same condition, and would take another thread's signal. */
void kvr_queue_wake_for(kvr_queue *queue, const kvr_operation *operation)
{
    if (queue->is_faulty || queue->is_polled || operation->wait_count || operation->total_nbytes > KVR_COPY_UNIT_NBYTES) {
        kvr_queue_wake(queue);
        return;
    }
    pthread_cond_signal(&queue->work);
}

/* The one place where an operation becomes DONE, FAILED or CANCELLED. The mutex is held. */
static void publish(kvr_queue *queue, kvr_operation *operation, int32_t state)
{
    uint64_t one = 1;
    kvr_queue *other;
    kvr_operation_let_go(operation);
    leave_quarantine(operation);
    if (operation->state == KVR_OPERATION_QUEUED)
        queue->queued--;
    else
        queue->running--;
    queue->done += state == KVR_OPERATION_DONE;
    queue->failed += state == KVR_OPERATION_FAILED;
    queue->cancelled += state == KVR_OPERATION_CANCELLED;
    kvr_copies()->in_flight--;
    unlink_operation(queue, operation);
    operation->phase = KVR_PHASE_ENDED;
    operation->state = state;
    if (queue->ended_last)
        queue->ended_last->next = operation;
    else
        queue->ended_first = operation;
    queue->ended_last = operation;
    operation->is_listed = 1;
    (void)!write(queue->ended_fd, &one, sizeof one);
    kvr_tell_ended();
    if (operation->dependants)
        for (other = *kvr_queues(); other; other = other->next)
            kvr_queue_wake(other);
}

/* The last thread has left: end it. The mutex is held, and let go meanwhile. */
static void end_operation(kvr_queue *queue, kvr_operation *operation)
{
    int32_t status, state, is_done = 0;
    operation->phase = KVR_PHASE_ENDING;
    if (!operation->error.status && operation->moved_nbytes == operation->total_nbytes && operation->is_begun)
        is_done = 1;
    if (operation->table) {
        kvr_handles_unlock();
        status = end_slots(operation, is_done);
        kvr_handles_lock();
        if (is_done && status) {
            is_done = 0;
            take_failure(operation, -1);
        }
    }
    if (is_done) {
        state = KVR_OPERATION_DONE;
    } else if (operation->error.status) {
        state = KVR_OPERATION_FAILED;
    } else {
        state = KVR_OPERATION_CANCELLED;
        (void)kvr_fail(KVR_ERROR_HANDLE_CLOSED, KVR_DETAIL_OPERATION_CANCELLED, "operation_cancel", operation->object.handle, 0, 0, 0);
        (void)kvr_error_get(&operation->error);
    }
    publish(queue, operation, state);
}

/* The operation that failed a dependant, or NULL. */
static const kvr_operation *failed_dependency(const kvr_operation *operation)
{
    int64_t i;
    for (i = 0; i < operation->wait_count; i++) {
        const kvr_operation *other = operation->waits[i].operation;
        if (other && other->phase == KVR_PHASE_ENDED && other->state != KVR_OPERATION_DONE)
            return other;
    }
    return NULL;
}

/* Take the next unit of at most so many bytes; 0 if nothing is left to take. */
static int32_t take_unit(kvr_operation *operation, int64_t most, unit *out)
{
    const kvr_entry *entries = operation->entries;
    int64_t i = operation->next_entry, byte = operation->next_byte, nbytes = 0;
    if (operation->error.status || operation->is_cancelled)
        return 0;
    while (i < operation->entry_count && entries[i].nbytes == byte) {
        i++;
        byte = 0;
    }
    if (i == operation->entry_count) {
        operation->next_entry = i;
        operation->next_byte = 0;
        return 0;
    }
    out->entry = i;
    out->byte = byte;
    out->start = operation->taken_nbytes;
    while (i < operation->entry_count && nbytes < most) {
        int64_t left = entries[i].nbytes - byte, room = most - nbytes;
        if (left > room) {
            byte += room;
            nbytes += room;
        } else {
            nbytes += left;
            byte = 0;
            i++;
        }
    }
    out->nbytes = nbytes;
    operation->next_entry = i;
    operation->next_byte = byte;
    operation->taken_nbytes += nbytes;
    return 1;
}

/* Bytes of it are left that any thread can take. */
static int32_t is_left(const kvr_operation *operation)
{
    return operation->phase == KVR_PHASE_COPYING && operation->device < 0 && !operation->error.status && !operation->is_cancelled &&
           !operation->is_abandoned && operation->next_entry < operation->entry_count;
}

/* Leave an operation; the last thread ends it, unless it is a caller whose time has run out: a thread of the queue goes on then. */
static void leave_operation(kvr_queue *queue, kvr_operation *operation)
{
    operation->active--;
    if (operation->is_abandoned) {
        if (!operation->active && operation->is_released && !operation->users)
            kvr_operation_free(operation);
        return;
    }
    if (operation->active || operation->phase >= KVR_PHASE_ENDING || operation->is_lost)
        return;
    if (is_left(operation)) {
        kvr_queue_wake_for(queue, operation);
        return;
    }
    operation->active = 1;
    end_operation(queue, operation);
    operation->active = 0;
}

/* `until` 0: to the end. */
static void copy_host(kvr_queue *queue, kvr_operation *operation, int64_t until)
{
    unit taken;
    while (!operation->is_abandoned && (!until || kvr_now_ns() < until) &&
           take_unit(operation, until ? KVR_COPY_PIECE_NBYTES : KVR_COPY_UNIT_NBYTES, &taken)) {
        int64_t moved = 0, index = -1;
        int32_t status;
        kvr_handles_unlock();
        status = copy_unit(queue, operation, &taken, &moved, &index);
        kvr_handles_lock();
        operation->moved_nbytes += moved;
        if (status)
            take_failure(operation, index);
    }
}

static void copy_cuda(kvr_operation *operation, kvr_copy_stream *streams)
{
    int64_t index = -1;
    int32_t status, why = 0;
    kvr_copy_stream *stream = streams + operation->device;
    operation->next_entry = operation->entry_count; /* taken whole */
    kvr_handles_unlock();
    status = copy_on_device(operation, stream, &index, &why);
    kvr_handles_lock();
    if (status == KVR_PENDING) {
        operation->is_lost = 1;
        if (why && !operation->is_abandoned) {
            (void)kvr_error_get(&operation->error);
            enter_quarantine(operation, why);
        }
        kvr_tell_ended();
    } else if (status) {
        take_failure(operation, index);
    } else {
        operation->moved_nbytes = operation->total_nbytes;
    }
}

/* Work on an operation that waits or is being copied, by pieces until then if `until` is not 0. `streams`: of this thread, by device. */
static void run(kvr_queue *queue, kvr_operation *operation, kvr_copy_stream *streams, int64_t until)
{
    operation->active++;
    if (operation->phase == KVR_PHASE_WAITING) {
        const kvr_operation *other = failed_dependency(operation);
        int32_t status = KVR_OK;
        if (other) {
            (void)kvr_fail(KVR_ERROR_NOT_READY, KVR_DETAIL_AFTER_FAILED, "operation", other->object.handle, other->state, 0, 0);
            take_failure(operation, -1);
        }
        if (operation->error.status || operation->is_cancelled) {
            leave_operation(queue, operation);
            return;
        }
        operation->phase = KVR_PHASE_STARTING;
        operation->state = KVR_OPERATION_RUNNING;
        queue->queued--;
        queue->running++;
        if (operation->table) {
            kvr_handles_unlock();
            status = start(operation);
            kvr_handles_lock();
        }
        if (status) {
            kvr_error why;
            (void)kvr_error_get(&why);
            take_failure(operation, why.values[0]);
        }
        operation->is_begun = 1;
        operation->phase = KVR_PHASE_COPYING;
        if (!status && operation->device < 0 && operation->total_nbytes > KVR_COPY_UNIT_NBYTES && queue->thread_count > 1)
            pthread_cond_broadcast(&queue->work);
    }
    if (operation->device < 0)
        copy_host(queue, operation, until);
    else if (!operation->error.status && !operation->is_cancelled)
        copy_cuda(operation, streams);
    leave_operation(queue, operation);
}

void kvr_operation_run(kvr_queue *queue, kvr_operation *operation) { run(queue, operation, NULL, 0); }

/* ---- a queue's threads ---- */

/* All that the operation waits for is over. */
static int32_t is_ready(const kvr_operation *operation)
{
    int64_t i;
    for (i = 0; i < operation->wait_count; i++) {
        const kvr_wait *wait = &operation->waits[i];
        if (wait->operation ? wait->operation->phase != KVR_PHASE_ENDED : !wait->is_over)
            return 0;
    }
    return 1;
}

/* Another thread can help: not more than the queue has work on it, callers counted. */
static int32_t is_helpful(const kvr_operation *operation, const kvr_queue *queue)
{
    return operation->active < queue->thread_count && is_left(operation);
}

static kvr_operation *pick(const kvr_queue *queue)
{
    kvr_operation *operation;
    for (operation = queue->first; operation; operation = operation->next) {
        if (operation->phase == KVR_PHASE_WAITING && !operation->active &&
            (operation->is_cancelled || operation->error.status || is_ready(operation) || failed_dependency(operation)))
            return operation;
        if (is_helpful(operation, queue))
            return operation;
    }
    return NULL;
}

/* The waits that have to be looked at: fds, and events. */
static int64_t count_waits(const kvr_queue *queue, int64_t *events)
{
    const kvr_operation *operation;
    int64_t fds = 0, i;
    *events = 0;
    for (operation = queue->first; operation; operation = operation->next)
        for (i = 0; operation->phase == KVR_PHASE_WAITING && i < operation->wait_count; i++) {
            fds += operation->waits[i].kind == KVR_AFTER_FD && !operation->waits[i].is_over;
            *events += operation->waits[i].kind == KVR_AFTER_CUDA_EVENT && !operation->waits[i].is_over;
        }
    return fds;
}

/* Ask the driver for the events that operations wait for. The mutex is held, and let go meanwhile. */
static void look_at_events(kvr_queue *queue, int64_t count)
{
    typedef struct asked {
        int64_t operation;
        int64_t index;
        int32_t device;
        int32_t status;
        uint64_t event;
        kvr_error error;
    } asked;
    asked *all = calloc((size_t)count, sizeof *all);
    kvr_operation *operation;
    kvr_object *object;
    int64_t i, found = 0;
    if (!all)
        return; /* it is asked again soon */
    for (operation = queue->first; operation; operation = operation->next)
        for (i = 0; operation->phase == KVR_PHASE_WAITING && i < operation->wait_count && found < count; i++)
            if (operation->waits[i].kind == KVR_AFTER_CUDA_EVENT && !operation->waits[i].is_over)
                all[found++] = (asked){.operation = operation->object.handle,
                                       .index = i,
                                       .device = operation->waits[i].device,
                                       .event = operation->waits[i].event};
    kvr_handles_unlock();
    for (i = 0; i < found; i++) {
        all[i].status = kvr_cuda_event_poll(all[i].device, all[i].event);
        (void)kvr_error_get(&all[i].error);
    }
    kvr_handles_lock();
    for (i = 0; i < found; i++) {
        if (all[i].status == KVR_PENDING || kvr_find(all[i].operation, KVR_SORT_OPERATION, "operation", &object))
            continue;
        operation = (kvr_operation *)object;
        if (operation->phase != KVR_PHASE_WAITING)
            continue;
        operation->waits[all[i].index].is_over = 1;
        if (all[i].status && !operation->error.status)
            operation->error = all[i].error;
    }
    free(all);
}

/* Wait for fds of operations, for a while if there are events too. The mutex is held, and let go meanwhile. */
static void poll_waits(kvr_queue *queue, int64_t fds, int64_t events)
{
    struct pollfd *polled = malloc((size_t)(fds + 1) * sizeof *polled);
    struct timespec pause = {0, EVENT_POLL_NS};
    kvr_operation *operation;
    int64_t count = 0, i, j;
    uint64_t value;
    if (!polled) { /* look again soon: nothing is lost */
        kvr_handles_unlock();
        sleep_ns(POLL_MAX_NS);
        kvr_handles_lock();
        return;
    }
    for (operation = queue->first; operation; operation = operation->next)
        for (i = 0; operation->phase == KVR_PHASE_WAITING && i < operation->wait_count; i++)
            if (operation->waits[i].kind == KVR_AFTER_FD && !operation->waits[i].is_over && count < fds)
                polled[count++] = (struct pollfd){.fd = operation->waits[i].fd, .events = POLLIN};
    polled[count] = (struct pollfd){.fd = queue->wake_fd, .events = POLLIN};
    queue->is_polled = 1;
    kvr_handles_unlock();
    (void)ppoll(polled, (nfds_t)(count + 1), events ? &pause : NULL, NULL);
    kvr_handles_lock();
    queue->is_polled = 0;
    if (polled[count].revents)
        (void)!read(queue->wake_fd, &value, sizeof value);
    /* An operation may have gone meanwhile, and its fd's number with it: an fd that is found again is looked at again. */
    for (operation = queue->first; operation; operation = operation->next)
        for (i = 0; operation->phase == KVR_PHASE_WAITING && i < operation->wait_count; i++) {
            kvr_wait *wait = &operation->waits[i];
            for (j = 0; wait->kind == KVR_AFTER_FD && !wait->is_over && j < count; j++)
                if (polled[j].fd == wait->fd && polled[j].revents) {
                    struct pollfd again = {.fd = wait->fd, .events = POLLIN};
                    wait->is_over = poll(&again, 1, 0) > 0;
                }
        }
    free(polled);
}

static void wait_for_work(kvr_queue *queue)
{
    int64_t events, fds = count_waits(queue, &events);
    queue->has_waits = fds || events;
    if ((!fds && !events) || queue->is_polled) {
        pthread_cond_wait(&queue->work, kvr_handles_mutex());
        return;
    }
    if (events)
        look_at_events(queue, events);
    if (!pick(queue))
        poll_waits(queue, fds, events);
}

static void free_queue(kvr_queue *queue)
{
    (void)close(queue->ended_fd);
    (void)close(queue->wake_fd);
    (void)pthread_cond_destroy(&queue->work);
    free(queue);
}

static void *work(void *argument)
{
    kvr_queue *queue = argument;
    kvr_copy_stream streams[KVR_ORDINAL_COUNT_MAX];
    int32_t i;
    memset(streams, 0, sizeof streams);
    kvr_handles_lock();
    while (!queue->is_stopping) {
        kvr_operation *operation = pick(queue);
        if (!operation) {
            wait_for_work(queue);
            continue;
        }
        if (queue->has_waits && !queue->is_polled)
            pthread_cond_broadcast(&queue->work); /* another thread has to wait for fds and events now */
        run(queue, operation, streams, 0);
    }
    kvr_handles_unlock();
    for (i = 0; i < KVR_ORDINAL_COUNT_MAX; i++)
        if (streams[i].is_open)
            kvr_cuda_stream_close(&streams[i]);
    kvr_handles_lock();
    if (!--queue->alive && queue->is_orphan)
        free_queue(queue);
    else
        kvr_tell_ended();
    kvr_handles_unlock();
    return NULL;
}

/* A native thread runs no Python and takes no signal. */
static int32_t start_thread(kvr_queue *queue)
{
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    int32_t code = pthread_attr_init(&attributes);
    if (code)
        return kvr_fail_errno("pthread_create", code);
    (void)pthread_attr_setstacksize(&attributes, STACK_NBYTES);
    (void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    code = pthread_create(&thread, &attributes, work, queue);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    (void)pthread_attr_destroy(&attributes);
    if (code)
        return kvr_fail_errno("pthread_create", code);
    return KVR_OK;
}

/* End the threads. Those of abandoned operations may never: the last of them frees the queue. The mutex is held. */
static void stop(kvr_queue *queue)
{
    int64_t until = kvr_now_ns() + THREAD_END_NS;
    queue->is_stopping = 1;
    kvr_queue_wake(queue);
    while (queue->alive && !kvr_wait_ended(until))
        ;
    if (queue->alive)
        queue->is_orphan = 1;
    else
        free_queue(queue);
}

/* ---- queues ---- */

int32_t kvr_queue_open(int32_t thread_count, uint32_t flags, int64_t *out_queue)
{
    static const char call[] = "queue_open";
    pthread_condattr_t clock;
    kvr_object *object;
    kvr_queue *queue;
    int32_t i, status = kvr_forked(call);
    if (status)
        return status;
    if (thread_count < 1 || thread_count > KVR_THREAD_COUNT_MAX)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_THREAD_COUNT_RANGE, call, thread_count, KVR_THREAD_COUNT_MAX, 0, 0);
    if (flags & ~(uint32_t)KVR_QUEUE_FAULTS)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_FLAGS_UNKNOWN, call, flags, KVR_QUEUE_FAULTS, 0, 0);
    queue = calloc(1, sizeof *queue);
    if (!queue)
        return kvr_fail_errno("malloc", ENOMEM);
    queue->thread_count = thread_count;
    queue->is_faulty = (flags & KVR_QUEUE_FAULTS) != 0;
    queue->ended_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    status = queue->ended_fd < 0 ? kvr_fail_errno("eventfd", errno) : KVR_OK;
    if (!status) {
        queue->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (queue->wake_fd < 0) {
            status = kvr_fail_errno("eventfd", errno);
            (void)close(queue->ended_fd);
        }
    }
    if (status) {
        free(queue);
        return status;
    }
    (void)pthread_condattr_init(&clock);
    (void)pthread_cond_init(&queue->work, &clock);
    (void)pthread_condattr_destroy(&clock);
    kvr_handles_lock();
    for (i = 0; i < thread_count && !status; i++) {
        status = start_thread(queue);
        queue->alive += !status;
    }
    if (!status)
        status = kvr_register(&queue->object, KVR_SORT_QUEUE, call, &object);
    if (status) {
        stop(queue);
    } else {
        queue->next = *kvr_queues();
        *kvr_queues() = queue;
        kvr_copies()->fds += 2;
        *out_queue = queue->object.handle;
    }
    kvr_handles_unlock();
    return status;
}

static int64_t count_unended(const kvr_queue *queue) { return queue->queued + queue->running; }

/* Take no more work, and wait. KVR_PENDING: some have not ended. The mutex is held, and let go meanwhile. */
static int32_t drain(int64_t handle, int64_t wait_ns, const char *call, kvr_queue **out)
{
    int64_t until = kvr_now_ns() + (wait_ns < KVR_NBYTES_MAX ? wait_ns : KVR_NBYTES_MAX);
    kvr_object *object;
    if (wait_ns < 0)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_NBYTES_RANGE, call, wait_ns, INT64_MAX, 0, 0);
    do { /* found anew after each wait: another thread may have closed it */
        int32_t status = kvr_find_idle(handle, KVR_SORT_QUEUE, call, &object);
        if (status)
            return status;
        *out = (kvr_queue *)object;
        (*out)->is_closing = 1;
    } while (count_unended(*out) && !kvr_wait_ended(until));
    return count_unended(*out) ? KVR_PENDING : KVR_OK;
}

int32_t kvr_queue_drain(int64_t handle, int64_t wait_ns)
{
    kvr_queue *queue;
    int32_t status;
    kvr_handles_lock();
    status = drain(handle, wait_ns, "queue_drain", &queue);
    kvr_handles_unlock();
    return status;
}

int32_t kvr_queue_close(int64_t handle, int64_t wait_ns)
{
    static const char call[] = "queue_close";
    kvr_queue *queue, **at;
    kvr_operation *operation;
    int32_t status;
    kvr_handles_lock();
    status = drain(handle, wait_ns, call, &queue);
    if (status == KVR_PENDING) {
        for (operation = queue->first; operation; operation = operation->next)
            enter_quarantine(operation, KVR_QUARANTINE_CLOSE);
        status = kvr_fail(KVR_ERROR_NOT_QUIESCENT, KVR_DETAIL_QUEUE_NOT_QUIESCENT, call, handle, count_unended(queue), 0, 0);
    }
    if (status) {
        kvr_handles_unlock();
        return status;
    }
    for (at = kvr_queues(); *at != queue; at = &(*at)->next)
        ;
    *at = queue->next;
    kvr_unregister(&queue->object);
    kvr_copies()->fds -= 2;
    for (operation = queue->ended_first; operation; operation = queue->ended_first) {
        queue->ended_first = operation->next;
        operation->next = NULL;
        operation->is_listed = 0;
    }
    kvr_forget_queue(queue);
    stop(queue);
    kvr_handles_unlock();
    return KVR_OK;
}

static int32_t find_queue(int64_t handle, const char *call, kvr_queue **out)
{
    kvr_object *object;
    int32_t status = kvr_find(handle, KVR_SORT_QUEUE, call, &object);
    if (!status)
        status = kvr_forked(call);
    if (!status)
        *out = (kvr_queue *)object;
    return status;
}

int32_t kvr_queue_info_get(int64_t handle, kvr_queue_info *out)
{
    kvr_queue *queue;
    int32_t status;
    kvr_handles_lock();
    status = find_queue(handle, "queue_info", &queue);
    if (!status)
        *out = (kvr_queue_info){.handle = handle,
                                .fd = queue->ended_fd,
                                .thread_count = queue->thread_count,
                                .submitted = queue->submitted,
                                .done = queue->done,
                                .failed = queue->failed,
                                .cancelled = queue->cancelled,
                                .queued = queue->queued,
                                .running = queue->running,
                                .is_closing = queue->is_closing,
                                .paused = queue->paused};
    kvr_handles_unlock();
    return status;
}

int32_t kvr_queue_completed(int64_t handle, int64_t capacity, int64_t *operations, int64_t *out_count)
{
    static const char call[] = "queue_completed";
    kvr_queue *queue;
    int64_t count = 0;
    uint64_t value;
    int32_t status;
    if (capacity < 0 || capacity > KVR_BATCH_COUNT_MAX)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_COUNT_RANGE, call, capacity, KVR_BATCH_COUNT_MAX, 0, 0);
    kvr_handles_lock();
    status = find_queue(handle, call, &queue);
    if (!status) {
        while (count < capacity && queue->ended_first) {
            kvr_operation *operation = queue->ended_first;
            queue->ended_first = operation->next;
            if (!queue->ended_first)
                queue->ended_last = NULL;
            operation->next = NULL;
            operation->is_listed = 0;
            operations[count++] = operation->object.handle;
        }
        if (!queue->ended_first)
            (void)!read(queue->ended_fd, &value, sizeof value);
        *out_count = count;
    }
    kvr_handles_unlock();
    return status;
}

int32_t kvr_queue_fault(int64_t handle, int32_t fault, int64_t index, int64_t value)
{
    static const char call[] = "queue_fault";
    kvr_queue *queue;
    int32_t status;
    if (fault < KVR_FAULT_NONE || fault > KVR_FAULT_SUBMIT)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_FAULT_UNKNOWN, call, fault, 0, 0, 0);
    if (index < 0 || value < 0)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_COUNT_RANGE, call, index < 0 ? index : value, INT64_MAX, 0, 0);
    kvr_handles_lock();
    status = find_queue(handle, call, &queue);
    if (!status && !queue->is_faulty)
        status = kvr_fail(KVR_ERROR_NOT_SUPPORTED, KVR_DETAIL_NO_FAULTS, call, handle, 0, 0, 0);
    if (!status)
        queue->fault = (kvr_fault){.kind = fault, .index = index, .value = value};
    kvr_handles_unlock();
    return status;
}

int32_t kvr_queue_resume(int64_t handle)
{
    kvr_queue *queue;
    kvr_operation *operation;
    int32_t status;
    kvr_handles_lock();
    status = find_queue(handle, "queue_resume", &queue);
    if (!status) {
        for (operation = queue->first; operation; operation = operation->next)
            operation->fault.is_over = 1;
        kvr_queue_wake(queue);
    }
    kvr_handles_unlock();
    return status;
}

/* ---- operations ---- */

static int32_t find_operation(int64_t handle, const char *call, kvr_operation **out)
{
    kvr_object *object;
    int32_t status = kvr_find(handle, KVR_SORT_OPERATION, call, &object);
    if (!status)
        status = kvr_forked(call);
    if (!status)
        *out = (kvr_operation *)object;
    return status;
}

int32_t kvr_operation_info_get(int64_t handle, kvr_operation_info *out)
{
    kvr_operation *operation;
    int32_t status;
    kvr_handles_lock();
    status = find_operation(handle, "operation_info", &operation);
    if (!status)
        *out = (kvr_operation_info){.handle = handle,
                                    .queue = operation->queue ? operation->queue->object.handle : 0,
                                    .state = operation->state,
                                    .quarantine = operation->quarantine,
                                    .entry_count = operation->entry_count,
                                    .total_nbytes = operation->total_nbytes,
                                    .moved_nbytes = operation->moved_nbytes,
                                    .failed_index = operation->failed_index,
                                    .quarantine_ns = operation->quarantine_ns};
    kvr_handles_unlock();
    return status;
}

int32_t kvr_operation_error_get(int64_t handle, kvr_error *out)
{
    kvr_operation *operation;
    int32_t status;
    kvr_handles_lock();
    status = find_operation(handle, "operation_error", &operation);
    if (!status) {
        memset(out, 0, sizeof *out);
        if (operation->state == KVR_OPERATION_FAILED || operation->state == KVR_OPERATION_CANCELLED)
            *out = operation->error;
    }
    kvr_handles_unlock();
    return status;
}

/* Whether a caller that waits may copy it. Not where slots are let go at its end: their part's lock may take longer than it waits. */
static int32_t is_for_callers(const kvr_operation *operation)
{
    const kvr_queue *queue = operation->queue;
    if (operation->device >= 0 || operation->table || operation->wait_count || operation->fault.kind || operation->quarantine ||
        operation->is_cancelled || operation->error.status)
        return 0;
    if (operation->phase == KVR_PHASE_WAITING)
        return !operation->active && queue->first == operation;
    return is_helpful(operation, queue);
}

int32_t kvr_operation_wait(int64_t handle, int64_t wait_ns)
{
    static const char call[] = "operation_wait";
    int64_t until = kvr_now_ns() + (wait_ns < KVR_NBYTES_MAX ? wait_ns : KVR_NBYTES_MAX);
    kvr_operation *operation;
    int32_t status;
    if (wait_ns < 0)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_NBYTES_RANGE, call, wait_ns, INT64_MAX, 0, 0);
    kvr_handles_lock();
    status = find_operation(handle, call, &operation);
    if (!status) {
        operation->users++; /* another thread may release it meanwhile */
        if (wait_ns && operation->phase != KVR_PHASE_ENDED && is_for_callers(operation))
            run(operation->queue, operation, NULL, until);
        while (operation->phase != KVR_PHASE_ENDED && !status)
            status = kvr_wait_ended(until) ? KVR_PENDING : KVR_OK;
        if (operation->phase == KVR_PHASE_ENDED)
            status = KVR_OK;
        if (!--operation->users && operation->is_released && !operation->active)
            kvr_operation_free(operation);
    }
    kvr_handles_unlock();
    return status;
}

int32_t kvr_operation_cancel(int64_t handle)
{
    kvr_operation *operation;
    int32_t status;
    kvr_handles_lock();
    status = find_operation(handle, "operation_cancel", &operation);
    if (!status && operation->phase != KVR_PHASE_ENDED) {
        operation->is_cancelled = 1;
        /* No thread is in it, as it has not begun or a caller's time has run out: it can end here, whatever the threads are at. */
        if (!operation->active && (operation->phase == KVR_PHASE_WAITING || (operation->phase == KVR_PHASE_COPYING && operation->device < 0)))
            run(operation->queue, operation, NULL, 0);
    }
    kvr_handles_unlock();
    return status;
}

int32_t kvr_operation_release(int64_t handle)
{
    static const char call[] = "operation_release";
    kvr_operation *operation;
    int32_t status;
    kvr_handles_lock();
    status = find_operation(handle, call, &operation);
    if (!status && operation->phase != KVR_PHASE_ENDED)
        status = kvr_fail(KVR_ERROR_BUSY, KVR_DETAIL_OPERATION_RUNNING, call, handle, 0, 0, 0);
    if (!status) {
        if (operation->is_listed) {
            kvr_operation **at = &operation->queue->ended_first, *before = NULL;
            while (*at != operation) {
                before = *at;
                at = &before->next;
            }
            *at = operation->next;
            if (operation->queue->ended_last == operation)
                operation->queue->ended_last = before;
        }
        kvr_unregister(&operation->object);
        operation->is_released = 1;
        if (!operation->users && !operation->active)
            kvr_operation_free(operation);
    }
    kvr_handles_unlock();
    return status;
}

/* ---- quarantine ---- */

int32_t kvr_operation_abandon(int64_t handle)
{
    static const char call[] = "operation_abandon";
    kvr_operation *operation;
    int32_t status;
    kvr_handles_lock();
    status = find_operation(handle, call, &operation);
    if (!status && (!operation->quarantine || (operation->phase != KVR_PHASE_WAITING && operation->phase != KVR_PHASE_COPYING)))
        status = kvr_fail(KVR_ERROR_BUSY, KVR_DETAIL_NOT_QUARANTINED, call, handle, 0, 0, 0);
    if (!status) {
        kvr_queue *queue = operation->queue;
        operation->is_abandoned = 1;
        operation->phase = KVR_PHASE_ENDING; /* no thread takes it up, or ends it, any more */
        memset(&operation->error, 0, sizeof operation->error);
        (void)kvr_fail(KVR_ERROR_NOT_QUIESCENT, KVR_DETAIL_OPERATION_ABANDONED, call, handle, 0, 0, 0);
        take_failure(operation, -1);
        if (operation->table) {
            kvr_handles_unlock();
            (void)end_slots(operation, 0);
            kvr_handles_lock();
        }
        publish(queue, operation, KVR_OPERATION_FAILED);
        kvr_queue_wake(queue); /* a thread that a fault has stopped in it */
    }
    kvr_handles_unlock();
    return status;
}

int32_t kvr_quarantine_get(int64_t capacity, int64_t *operations, int64_t *out_count)
{
    static const char call[] = "quarantine";
    const kvr_queue *queue;
    const kvr_operation *operation;
    int64_t count = 0;
    int32_t status = kvr_forked(call);
    if (!status && (capacity < 0 || capacity > KVR_BATCH_COUNT_MAX))
        status = kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_COUNT_RANGE, call, capacity, KVR_BATCH_COUNT_MAX, 0, 0);
    if (status)
        return status;
    kvr_handles_lock();
    for (queue = *kvr_queues(); queue; queue = queue->next)
        for (operation = queue->first; operation; operation = operation->next)
            if (operation->quarantine) {
                if (count < capacity)
                    operations[count] = operation->object.handle;
                count++;
            }
    *out_count = count;
    kvr_handles_unlock();
    return KVR_OK;
}

int32_t kvr_quarantine_limit_set(int64_t limit_nbytes)
{
    static const char call[] = "quarantine_limit_set";
    int32_t status = kvr_forked(call);
    if (!status && limit_nbytes < 0)
        status = kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_NBYTES_RANGE, call, limit_nbytes, INT64_MAX, 0, 0);
    if (status)
        return status;
    kvr_handles_lock();
    kvr_copies()->quarantine_limit = limit_nbytes;
    kvr_handles_unlock();
    return KVR_OK;
}
