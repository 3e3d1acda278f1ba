/* The floor of bench_calls.py: the same system calls as the handle API makes, and nothing else. Times are ns a call. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define CALLS 400

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* out: allocate, export, import, map, observe, unmap, close, echo */
void floor_calls(double *out)
{
    static int made[CALLS], exported[CALLS], imported[CALLS];
    static void *mapped[CALLS];
    static volatile int64_t sink;
    struct stat found;
    unsigned char id[16];
    int64_t t;
    int i;
    t = now();
    for (i = 0; i < CALLS; i++) {
        made[i] = (int)syscall(SYS_memfd_create, "kvreuse-bench", 3U);
        ftruncate(made[i], 4096);
        fcntl(made[i], 1033, 7);
        fstat(made[i], &found);
        fcntl(made[i], F_GETFL);
        syscall(SYS_getrandom, id, sizeof id, 0);
    }
    out[0] = (double)(now() - t) / CALLS;
    t = now();
    for (i = 0; i < CALLS; i++)
        exported[i] = fcntl(made[i], F_DUPFD_CLOEXEC, 0);
    out[1] = (double)(now() - t) / CALLS;
    t = now();
    for (i = 0; i < CALLS; i++) {
        fstat(exported[i], &found);
        fcntl(exported[i], 1034);
        imported[i] = fcntl(exported[i], F_DUPFD_CLOEXEC, 0);
        fstat(imported[i], &found);
        fcntl(imported[i], F_GETFL);
    }
    out[2] = (double)(now() - t) / CALLS;
    t = now();
    for (i = 0; i < CALLS; i++) {
        fstat(imported[i], &found);
        mapped[i] = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, imported[i], 0);
    }
    out[3] = (double)(now() - t) / CALLS;
    t = now();
    for (i = 0; i < CALLS; i++) {
        fstat(imported[i], &found);
        fcntl(imported[i], F_GETFL);
        fcntl(imported[i], 1034);
    }
    out[4] = (double)(now() - t) / CALLS;
    t = now();
    for (i = 0; i < CALLS; i++)
        munmap(mapped[i], 4096);
    out[5] = (double)(now() - t) / CALLS;
    t = now();
    for (i = 0; i < CALLS; i++)
        close(imported[i]);
    out[6] = (double)(now() - t) / CALLS;
    t = now();
    for (i = 0; i < CALLS; i++)
        sink = i;
    out[7] = (double)(now() - t) / CALLS;
    for (i = 0; i < CALLS; i++) {
        close(exported[i]);
        close(made[i]);
    }
}
