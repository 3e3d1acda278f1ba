/* Threads that allocate, map, observe, export and close one another's regions, host and CUDA; to be run under a sanitizer.
 *
 *     stress_handles ROUNDS
 *
 * Prints what is open at the end: nothing. The CUDA calls reach the libcuda.so.1 that is found: the tests' fake driver, or none. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "kvreuse.h"

#define POOL 16
#define THREADS 6

static _Atomic int64_t pool[POOL];
static int64_t rounds;

/* Until it is closed, by whomever: others only work on it for a moment. */
static void close_region(int64_t region)
{
    for (;;) {
        while (!kvr_cuda_fabric_done(region))
            ;
        if (kvr_region_close(region) != KVR_ERROR_BUSY)
            return;
        (void)sched_yield();
    }
}

static void one_step(unsigned *seed)
{
    int place = rand_r(seed) % POOL;
    int64_t region = atomic_load(&pool[place]);
    kvr_region_info info;
    kvr_mapping_info mapping;
    kvr_cuda_observation seen;
    int32_t fd;
    uint8_t token[KVR_FABRIC_NBYTES];
    switch (rand_r(seed) % 8) {
    case 0:
        if (!kvr_cuda_allocate(0, 1 + rand_r(seed) % 100000, rand_r(seed) % 3 ? KVR_KIND_POSIX_FD : KVR_KIND_FABRIC,
                               KVR_CUDA_ALLOW_FABRIC, &info))
            close_region(atomic_exchange(&pool[place], info.handle));
        break;
    case 1:
        if (!kvr_host_allocate(4096, KVR_KIND_POSIX_FD, "kvreuse-stress", NULL, &info))
            close_region(atomic_exchange(&pool[place], info.handle));
        break;
    case 2:
    case 3:
        if (!kvr_region_map(region, KVR_ACCESS_READ_WRITE, 0, &mapping)) {
            (void)kvr_cuda_observe(region, &seen);
            /* Another thread's observe may be looking at it. */
            while (kvr_mapping_unmap(mapping.handle) == KVR_ERROR_BUSY)
                (void)sched_yield();
        }
        break;
    case 4:
        (void)kvr_cuda_observe(region, &seen);
        break;
    case 5:
        if (!kvr_region_export(region, &fd))
            (void)close(fd);
        break;
    case 6:
        if (!kvr_cuda_export_fabric(region, token))
            (void)kvr_cuda_fabric_done(region);
        break;
    default:
        (void)kvr_region_info_get(region, &info);
    }
}

static void *work(void *argument)
{
    unsigned seed = (unsigned)(uintptr_t)argument * 7919U + 1U;
    int64_t i;
    for (i = 0; i < rounds; i++)
        one_step(&seed);
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t threads[THREADS];
    kvr_handle_counts left;
    int i;
    rounds = argc > 1 ? atoll(argv[1]) : 2000;
    for (i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)(i + 1)))
            return 2;
    for (i = 0; i < THREADS; i++)
        (void)pthread_join(threads[i], NULL);
    for (i = 0; i < POOL; i++)
        close_region(atomic_load(&pool[i]));
    (void)kvr_handle_counts_get(&left);
    printf("open at the end: %lld regions, %lld mappings, %lld fds\n", (long long)left.regions, (long long)left.mappings,
           (long long)left.fds);
    return left.regions || left.mappings || left.fds;
}
