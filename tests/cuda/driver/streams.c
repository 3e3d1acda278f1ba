/* Streams, events and copies of the fake driver. Work is done when somebody looks (query, synchronize, fake_drain), so that a
 * test decides when bytes land: late (stream_delay_ms), in the reverse order of streams, with an error, or never. */
#define _GNU_SOURCE
#include <cuda.h>

#include <stdint.h>
#include <string.h>
#include <time.h>

#include "driver.h"

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static fake_stream *stream_of(CUstream stream)
{
    int i;
    for (i = 0; i < FAKE_STREAMS_MAX; i++)
        if (stream && fake.streams[i].handle == (uint64_t)(uintptr_t)stream)
            return &fake.streams[i];
    return NULL;
}

static fake_event *event_of(CUevent event)
{
    int i;
    for (i = 0; i < FAKE_STREAMS_MAX; i++)
        if (event && fake.events[i].handle == (uint64_t)(uintptr_t)event)
            return &fake.events[i];
    return NULL;
}

static int has_work(const fake_stream *stream)
{
    int i;
    for (i = 0; i < fake.work_count; i++)
        if (fake.work[i].stream == stream)
            return 1;
    return 0;
}

static int may_run(const fake_work *work, int now_or_never)
{
    int i;
    if (now_or_never)
        return 1;
    if (fake.set.stream_mode == FAKE_STREAM_NEVER || work->due_ns > now())
        return 0;
    if (fake.set.stream_mode == FAKE_STREAM_REVERSE)
        for (i = 0; i < fake.work_count; i++)
            if (fake.work[i].stream->serial > work->stream->serial)
                return 0;
    return 1;
}

static void do_work(fake_work *work)
{
    if (work->event) {
        work->event->pending--;
        work->event->error = work->stream->error;
    } else if (work->dst && !work->stream->error) {
        if (fake.set.stream_error_at && work->serial == fake.set.stream_error_at) {
            work->stream->error = (int32_t)fake.set.stream_error_code;
            if (fake.set.stream_error_is_sticky)
                fake.sticky = work->stream->error;
        } else {
            memcpy(work->dst, work->src, work->size);
        }
    }
}

/* Do what may be done, each stream's in its order. */
static void advance(int now_or_never)
{
    int i, again = 1;
    while (again) {
        again = 0;
        for (i = 0; i < fake.work_count; i++) {
            int first, is_first = 1;
            for (first = 0; first < i; first++)
                is_first = is_first && fake.work[first].stream != fake.work[i].stream;
            if (!is_first || !may_run(&fake.work[i], now_or_never))
                continue;
            do_work(&fake.work[i]);
            memmove(&fake.work[i], &fake.work[i + 1], (size_t)(fake.work_count - i - 1) * sizeof *fake.work);
            fake.work_count--;
            fake.counters.pending--;
            again = 1;
            break;
        }
    }
}

void fake_drain(void)
{
    pthread_mutex_lock(&fake.mutex);
    advance(1);
    pthread_mutex_unlock(&fake.mutex);
}

/* Memory goes away under copies that are not done: they never touch it. */
void fake_copies_lose(const char *base, size_t size)
{
    int i;
    for (i = 0; i < fake.work_count; i++) {
        fake_work *work = &fake.work[i];
        if (work->dst && ((work->dst < base + size && base < work->dst + work->size) ||
                          (work->src < base + size && base < work->src + work->size))) {
            fake_violation("unmap: a copy is still on this memory");
            work->dst = NULL;
        }
    }
}

static int32_t add(fake_stream *stream, fake_event *event, CUdeviceptr dst, CUdeviceptr src, size_t size)
{
    fake_work *work;
    if (fake.work_count == FAKE_WORK_MAX)
        return CUDA_ERROR_OUT_OF_MEMORY;
    work = &fake.work[fake.work_count++];
    memset(work, 0, sizeof *work);
    work->stream = stream;
    work->event = event;
    work->dst = (char *)(uintptr_t)dst;
    work->src = (const char *)(uintptr_t)src;
    work->size = size;
    work->due_ns = now() + fake.set.stream_delay_ms * 1000000;
    work->serial = event ? 0 : ++fake.copy_serial;
    if (event)
        event->pending++;
    fake.counters.pending++;
    return 0;
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
    int i;
    ENTER(FAKE_NEEDS_CONTEXT);
    if (flags > 1)
        REFUSE("stream create: flags");
    for (i = 0; i < FAKE_STREAMS_MAX && fake.streams[i].handle; i++)
        ;
    if (i == FAKE_STREAMS_MAX)
        RETURN(CUDA_ERROR_OUT_OF_MEMORY);
    fake.streams[i] = (fake_stream){.handle = fake_make_handle(2), .serial = (int64_t)fake.serial};
    fake.counters.streams++;
    *stream = (CUstream)(uintptr_t)fake.streams[i].handle;
    RETURN(0);
}

CUresult cuStreamDestroy_v2(CUstream stream)
{
    fake_stream *found;
    ENTER(FAKE_NEEDS_CONTEXT);
    found = stream_of(stream);
    if (!found)
        REFUSE("stream destroy: no such stream");
    if (has_work(found))
        REFUSE("stream destroy: work is pending");
    found->handle = 0;
    fake.counters.streams--;
    RETURN(0);
}

CUresult cuStreamQuery(CUstream stream)
{
    fake_stream *found;
    ENTER(FAKE_NEEDS_CONTEXT);
    found = stream_of(stream);
    if (!found)
        RETURN(CUDA_ERROR_INVALID_HANDLE);
    advance(0);
    RETURN(has_work(found) ? (int32_t)CUDA_ERROR_NOT_READY : found->error);
}

CUresult cuStreamSynchronize(CUstream stream)
{
    fake_stream *found;
    ENTER(FAKE_NEEDS_CONTEXT);
    found = stream_of(stream);
    if (!found)
        RETURN(CUDA_ERROR_INVALID_HANDLE);
    advance(1);
    RETURN(found->error);
}

CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
    int i;
    ENTER(FAKE_NEEDS_CONTEXT);
    if (flags > 7)
        REFUSE("event create: flags");
    for (i = 0; i < FAKE_STREAMS_MAX && fake.events[i].handle; i++)
        ;
    if (i == FAKE_STREAMS_MAX)
        RETURN(CUDA_ERROR_OUT_OF_MEMORY);
    fake.events[i] = (fake_event){.handle = fake_make_handle(4)};
    fake.counters.events++;
    *event = (CUevent)(uintptr_t)fake.events[i].handle;
    RETURN(0);
}

CUresult cuEventDestroy_v2(CUevent event)
{
    fake_event *found;
    ENTER(FAKE_NEEDS_CONTEXT);
    found = event_of(event);
    if (!found || found->pending)
        REFUSE("event destroy: no such event, or not reached");
    found->handle = 0;
    fake.counters.events--;
    RETURN(0);
}

#undef cuEventRecord
CUresult cuEventRecord(CUevent event, CUstream stream)
{
    fake_event *found;
    fake_stream *on;
    ENTER(FAKE_NEEDS_CONTEXT);
    found = event_of(event);
    on = stream_of(stream);
    if (!found || !on)
        RETURN(CUDA_ERROR_INVALID_HANDLE);
    RETURN(add(on, found, 0, 0, 0));
}

CUresult cuEventQuery(CUevent event)
{
    fake_event *found;
    ENTER(FAKE_NEEDS_CONTEXT);
    found = event_of(event);
    if (!found)
        RETURN(CUDA_ERROR_INVALID_HANDLE);
    advance(0);
    RETURN(found->pending ? (int32_t)CUDA_ERROR_NOT_READY : found->error);
}

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t size, CUstream stream)
{
    fake_stream *found;
    ENTER(FAKE_NEEDS_CONTEXT);
    found = stream_of(stream);
    if (!found || !dst || !src)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    RETURN(size ? add(found, NULL, dst, src, size) : 0);
}

static int32_t add_batch(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs,
                         size_t *places, size_t attr_count, CUstream stream)
{
    fake_stream *found = stream_of(stream);
    int32_t code = 0;
    size_t i;
    if (!found || !count || !attr_count || !attrs || !places || places[0])
        return fake_violation("batch copy: count, attributes or stream");
    for (i = 0; i < count; i++)
        if (!dsts[i] || !srcs[i] || !sizes[i])
            return CUDA_ERROR_INVALID_VALUE;
    for (i = 0; i < count && !code; i++)
        code = add(found, NULL, dsts[i], srcs[i], sizes[i]);
    return code;
}

/* 13.0 dropped the ninth parameter. Of the two, cuda.h declares one; the names are the symbols. */
#undef cuMemcpyBatchAsync
CUresult batch_copy_12(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs,
                       size_t *places, size_t attr_count, size_t *fail, CUstream stream) __asm__("cuMemcpyBatchAsync");
CUresult batch_copy_12(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs,
                       size_t *places, size_t attr_count, size_t *fail, CUstream stream)
{
    ENTER(FAKE_NEEDS_CONTEXT);
    (void)fail;
    RETURN(add_batch(dsts, srcs, sizes, count, attrs, places, attr_count, stream));
}

CUresult batch_copy_13(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs,
                       size_t *places, size_t attr_count, CUstream stream) __asm__("cuMemcpyBatchAsync_v2");
CUresult batch_copy_13(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs,
                       size_t *places, size_t attr_count, CUstream stream)
{
    ENTER(FAKE_NEEDS_CONTEXT);
    RETURN(add_batch(dsts, srcs, sizes, count, attrs, places, attr_count, stream));
}
