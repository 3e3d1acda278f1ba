/* The floor of bench_cuda.py: the driver's own functions in a loop, and nothing else. Times are ns a call. */
#include <stdint.h>
#include <string.h>
#include <time.h>

#define CALLS 100

typedef struct prop { /* CUmemAllocationProp */
    int32_t type, handle_types, location_type, location_id;
    void *meta;
    uint8_t flags[8];
} prop;

extern int cuMemCreate(uint64_t *handle, size_t size, const prop *properties, uint64_t flags);
extern int cuMemExportToShareableHandle(void *out, uint64_t handle, int kind, uint64_t flags);
extern int cuMemImportFromShareableHandle(uint64_t *handle, void *os_handle, int kind);
extern int cuMemGetAllocationPropertiesFromHandle(prop *out, uint64_t handle);
extern int cuMemRelease(uint64_t handle);

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* out: create, export, import, properties, release; returns the sum of the results, 0 if all went well */
int floor_cuda(double *out)
{
    static uint64_t made[CALLS], imported[CALLS];
    prop properties = {1, 1, 1, 0, NULL, {0}}, seen;
    int fd[16], sum = 0;
    int64_t t;
    int i;
#define TIME(index, call)                    \
    t = now();                               \
    for (i = 0; i < CALLS; i++)              \
        sum += call;                         \
    out[index] = (double)(now() - t) / CALLS
    TIME(0, cuMemCreate(&made[i], 2 << 20, &properties, 0));
    TIME(1, cuMemExportToShareableHandle(fd, made[i], 1, 0));
    TIME(2, cuMemImportFromShareableHandle(&imported[i], (void *)(intptr_t)fd[0], 1));
    TIME(3, cuMemGetAllocationPropertiesFromHandle(&seen, imported[i]));
    TIME(4, cuMemRelease(imported[i]));
    for (i = 0; i < CALLS; i++)
        sum += cuMemRelease(made[i]);
    return sum;
}
