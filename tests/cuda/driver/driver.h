/* The state of the fake CUDA driver and what tests control it by. */
#ifndef FAKE_DRIVER_H
#define FAKE_DRIVER_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define FAKE_MEMORY_NAME "fake-cuda"
#define FAKE_DEVICES_MAX 8
#define FAKE_HANDLES_MAX 4096
#define FAKE_RANGES_MAX 1024
#define FAKE_NAMES_MAX 256
#define FAKE_LOG_MAX 65536
#define FAKE_STREAMS_MAX 64
#define FAKE_WORK_MAX 8192

/* X(name, default) */
#define FAKE_SETTINGS(X)            \
    X(device_count, 1)              \
    X(driver_version, 13000)        \
    X(granularity_min, 2097152)     \
    X(granularity_recommended, 2097152) \
    X(fabric_granularity, 2097152)  \
    X(vmm_attribute, 1)             \
    X(posix_fd_attribute, 1)        \
    X(fabric_attribute, 0)          \
    X(fabric_create_result, 800)    \
    X(import_fabric_result, 0)      \
    X(wrong_kind_result, 1)         \
    X(memory_total, INT64_C(1) << 40) \
    X(export_cloexec, 0)            \
    X(properties_kinds, -1)         \
    X(properties_location, -1)      \
    X(observed_size, -1)            \
    X(stream_mode, 0)               \
    X(stream_delay_ms, 0)           \
    X(stream_error_at, 0)           \
    X(stream_error_code, 700)       \
    X(stream_error_is_sticky, 0)    \
    X(lean, 0) /* for benchmarks: no system calls; no memory either, and every fd is lean_fd */ \
    X(lean_fd, -1)

/* stream_mode */
#define FAKE_STREAM_NORMAL 0
#define FAKE_STREAM_REVERSE 1 /* a stream waits for all that were made after it */
#define FAKE_STREAM_NEVER 2   /* until the mode is changed */

typedef struct fake_settings {
#define SETTING(name, value) int64_t name;
    FAKE_SETTINGS(SETTING)
#undef SETTING
} fake_settings;

typedef struct fake_counters {
    int64_t handles;
    int64_t allocations;
    int64_t mappings;
    int64_t reservations;
    int64_t fds;
    int64_t contexts;
    int64_t streams;
    int64_t events;
    int64_t pending;
    int64_t calls;
    int64_t v1_calls;
    int64_t violations;
    int64_t exports;
    int64_t imports;
    int64_t stale_fabric_imports;
} fake_counters;

int32_t fake_set(const char *key, int64_t value);
void fake_reset(void); /* settings, injections and counts; what is live stays */
void fake_reset_calls(void); /* the counts of calls and violations only */
void fake_counters_get(fake_counters *out);
void fake_fail_at(int64_t n, int32_t code); /* the n-th call from now */
void fake_fail_call(const char *name, int64_t nth, int32_t code);
void fake_sticky(int32_t code); /* of every call until it is 0 again */
int64_t fake_call_count(const char *name);
void fake_call_log(char *out, int64_t capacity);
void fake_last_violation(char *out, int64_t capacity);
void fake_hide(const char *name, int32_t hidden); /* from cuGetProcAddress_v2 */
void fake_drain(void); /* let all work end now */
void fake_hold(const char *name); /* calls of this name wait, without the driver's mutex, until it is "" */
int32_t fake_held(void); /* how many wait */

/* ---- inside ---- */

#ifdef __cuda_cuda_h__
#define FAKE_BEFORE_INIT 1
#define FAKE_NEEDS_CONTEXT 2

typedef struct fake_call {
    char name[64];
    int64_t count;
    int64_t fail_in;
    int32_t fail_code;
    int32_t hidden;
} fake_call;

typedef struct allocation {
    int fd;
    int references; /* handles and mappings */
    size_t size;
    CUmemAllocationProp prop;
} allocation;

typedef struct fake_handle {
    uint64_t value;
    allocation *allocation;
} fake_handle;

typedef struct range {
    char *base;
    size_t size;
    allocation *allocation;
    int access;
} range;

typedef struct fake_context {
    uint64_t handle;
    int64_t count;
} fake_context;

typedef struct fake_stream {
    uint64_t handle;
    int64_t serial;
    int32_t error;
} fake_stream;

typedef struct fake_event {
    uint64_t handle;
    int64_t pending; /* records that were not reached */
    int32_t error;
} fake_event;

/* One entry of a stream: a copy, or the record of an event. */
typedef struct fake_work {
    fake_stream *stream;
    fake_event *event;
    char *dst;
    const char *src;
    size_t size;
    int64_t due_ns;
    int64_t serial;
} fake_work;

typedef struct fake_state {
    pthread_mutex_t mutex;
    int is_initialised;
    int forked;
    fake_settings set;
    fake_counters counters;
    uint64_t serial;
    int64_t fail_in;
    int32_t fail_code;
    int32_t sticky;
    char violation[256];
    char held_name[64];
    int32_t held;
    fake_call calls[FAKE_NAMES_MAX];
    int call_count;
    fake_call *log[FAKE_LOG_MAX];
    fake_context contexts[FAKE_DEVICES_MAX];
    fake_handle handles[FAKE_HANDLES_MAX];
    int64_t vacant[FAKE_HANDLES_MAX];
    int64_t handle_count;
    int64_t vacant_count;
    range reservations[FAKE_RANGES_MAX];
    range mappings[FAKE_RANGES_MAX];
    fake_stream streams[FAKE_STREAMS_MAX];
    fake_event events[FAKE_STREAMS_MAX];
    fake_work work[FAKE_WORK_MAX];
    int work_count;
    int64_t copy_serial;
} fake_state;

extern fake_state fake;
int32_t fake_enter(fake_call **site, const char *name, int flags);
CUresult fake_leave(int32_t code);
int32_t fake_violation(const char *text);
int fake_context_is_live(uint64_t context);
uint64_t fake_make_handle(uint64_t kind);
void fake_copies_lose(const char *base, size_t size);
void *fake_self(void);

#define ENTER(flags)                                   \
    static fake_call *site;                            \
    int32_t code = fake_enter(&site, __func__, flags); \
    if (code)                                          \
    return fake_leave(code)
#define RETURN(value) return fake_leave((int32_t)(value))
#define REFUSE(text) return fake_leave(fake_violation(text))
#endif

#endif
