/* A part's lock: a POSIX record lock between processes, under a mutex between this process's threads.
 * Record locks, since a robust mutex admits two holders across pid namespaces and OFD locks outlive their holder in a forked child. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

#define NS_PER_S INT64_C(1000000000)
#define PAUSE_MIN_NS 10000
#define PAUSE_MAX_NS 200000

static struct flock byte0(short type)
{
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
    return lock;
}

int32_t kvr_lock_open(int32_t fd, kvr_lock **out)
{
    struct stat found;
    kvr_lock *lock;
    int32_t *fds;
    if (fstat(fd, &found))
        return kvr_fail_errno("fstat", errno);
    for (lock = *kvr_locks(); lock; lock = lock->next)
        if (lock->device == (uint64_t)found.st_dev && lock->inode == (uint64_t)found.st_ino)
            break;
    if (!lock) {
        lock = calloc(1, sizeof *lock);
        if (!lock)
            return kvr_fail_errno("malloc", ENOMEM);
        lock->device = (uint64_t)found.st_dev;
        lock->inode = (uint64_t)found.st_ino;
        (void)pthread_mutex_init(&lock->mutex, NULL);
    }
    if (lock->users) {
        fds = realloc(lock->parked, (size_t)(lock->parked_count + 1) * sizeof *fds);
        if (!fds)
            return kvr_fail_errno("malloc", ENOMEM);
        lock->parked = fds;
        lock->parked[lock->parked_count++] = fd;
    } else {
        lock->fd = fd;
        lock->next = *kvr_locks();
        *kvr_locks() = lock;
    }
    lock->users++;
    kvr_count_fds(1);
    *out = lock;
    return KVR_OK;
}

void kvr_lock_close(kvr_lock *lock)
{
    kvr_lock **link;
    int64_t i;
    if (--lock->users)
        return;
    for (link = kvr_locks(); *link != lock; link = &(*link)->next)
        ;
    *link = lock->next;
    (void)close(lock->fd);
    for (i = 0; i < lock->parked_count; i++)
        (void)close(lock->parked[i]);
    kvr_count_fds(-1 - lock->parked_count);
    (void)pthread_mutex_destroy(&lock->mutex);
    free(lock->parked);
    free(lock);
}

static int32_t timed_out(int64_t wait_ns, int64_t holder, const char *call)
{
    return kvr_fail(KVR_ERROR_WAIT_TIMEOUT, KVR_DETAIL_LOCK_TIMEOUT, call, wait_ns, holder, 0, 0);
}

static int32_t take_record(kvr_lock *lock, int64_t deadline, int64_t wait_ns, const char *call)
{
    int64_t pause = PAUSE_MIN_NS;
    for (;;) {
        struct flock want = byte0(F_WRLCK), holder = byte0(F_WRLCK);
        struct timespec nap = {.tv_sec = 0, .tv_nsec = (long)pause};
        if (!fcntl(lock->fd, F_SETLK, &want))
            return KVR_OK;
        if (errno != EACCES && errno != EAGAIN && errno != EINTR)
            return kvr_fail_errno("fcntl", errno);
        if (kvr_now_ns() >= deadline) {
            int64_t pid = 0;
            if (!fcntl(lock->fd, F_GETLK, &holder) && holder.l_type != F_UNLCK && holder.l_pid > 0)
                pid = holder.l_pid;
            return timed_out(wait_ns, pid, call);
        }
        (void)nanosleep(&nap, NULL);
        pause = 2 * pause < PAUSE_MAX_NS ? 2 * pause : PAUSE_MAX_NS;
    }
}

/* Wait for the mutex until a moment of CLOCK_MONOTONIC; 0 if it was had. */
static int32_t wait_for_mutex(pthread_mutex_t *mutex, int64_t deadline)
{
#if defined(__SANITIZE_THREAD__) /* that of GCC 12 does not know pthread_mutex_clocklock, and would miss who holds it */
    int32_t code;
    while ((code = pthread_mutex_trylock(mutex)) && kvr_now_ns() < deadline) {
        struct timespec nap = {.tv_nsec = PAUSE_MIN_NS};
        (void)nanosleep(&nap, NULL);
    }
    return code;
#else
    struct timespec until = {.tv_sec = (time_t)(deadline / NS_PER_S), .tv_nsec = (long)(deadline % NS_PER_S)};
    return pthread_mutex_clocklock(mutex, CLOCK_MONOTONIC, &until);
#endif
}

int32_t kvr_lock_take(kvr_lock *lock, int64_t wait_ns, const char *call)
{
    int64_t deadline;
    int32_t status;
    if (__builtin_add_overflow(kvr_now_ns(), wait_ns, &deadline))
        deadline = INT64_MAX;
    if (pthread_mutex_trylock(&lock->mutex) && (!wait_ns || wait_for_mutex(&lock->mutex, deadline)))
        return timed_out(wait_ns, -1, call);
    status = take_record(lock, deadline, wait_ns, call);
    if (status)
        pthread_mutex_unlock(&lock->mutex);
    return status;
}

void kvr_lock_drop(kvr_lock *lock)
{
    struct flock free_it = byte0(F_UNLCK);
    (void)fcntl(lock->fd, F_SETLK, &free_it);
    pthread_mutex_unlock(&lock->mutex);
}
