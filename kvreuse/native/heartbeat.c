/* A writer's heartbeat: a thread of its own that moves a word of the part's memory as long as the process runs. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include "table.h"

#define STACK_NBYTES (64 * 1024)
#define NS_PER_S INT64_C(1000000000)

struct kvr_heart {
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t over; /* of CLOCK_MONOTONIC */
    int32_t is_over;     /* under the mutex */
    int64_t period_ns;
    int64_t *word;
};

static void *beat(void *argument)
{
    kvr_heart *heart = argument;
    (void)pthread_mutex_lock(&heart->mutex);
    while (!heart->is_over) {
        int64_t now = kvr_now_ns(), next = now + heart->period_ns;
        struct timespec until = {.tv_sec = (time_t)(next / NS_PER_S), .tv_nsec = (long)(next % NS_PER_S)};
        kvr_store(heart->word, now);
        (void)pthread_cond_timedwait(&heart->over, &heart->mutex, &until);
    }
    (void)pthread_mutex_unlock(&heart->mutex);
    return NULL;
}

static void free_heart(kvr_heart *heart)
{
    (void)pthread_cond_destroy(&heart->over);
    (void)pthread_mutex_destroy(&heart->mutex);
    free(heart);
}

int32_t kvr_heart_start(int64_t *word, int64_t period_ns, kvr_heart **out)
{
    kvr_heart *heart = calloc(1, sizeof *heart);
    pthread_condattr_t clock;
    pthread_attr_t attributes;
    sigset_t all, before;
    int32_t code;
    if (!heart)
        return kvr_fail_errno("malloc", ENOMEM);
    heart->word = word;
    heart->period_ns = period_ns;
    (void)pthread_mutex_init(&heart->mutex, NULL);
    (void)pthread_condattr_init(&clock);
    (void)pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    (void)pthread_cond_init(&heart->over, &clock);
    (void)pthread_condattr_destroy(&clock);
    kvr_store(word, kvr_now_ns()); /* at once: the thread may begin later */
    code = pthread_attr_init(&attributes);
    if (!code) {
        (void)pthread_attr_setstacksize(&attributes, STACK_NBYTES);
        /* The caller's signal handlers are for its own threads. */
        (void)sigfillset(&all);
        (void)pthread_sigmask(SIG_SETMASK, &all, &before);
        code = pthread_create(&heart->thread, &attributes, beat, heart);
        (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
        (void)pthread_attr_destroy(&attributes);
    }
    if (code) {
        kvr_store(word, 0);
        free_heart(heart);
        return kvr_fail_errno("pthread_create", code);
    }
    *out = heart;
    return KVR_OK;
}

void kvr_heart_stop(kvr_heart *heart)
{
    if (!heart)
        return;
    (void)pthread_mutex_lock(&heart->mutex);
    heart->is_over = 1;
    (void)pthread_cond_signal(&heart->over);
    (void)pthread_mutex_unlock(&heart->mutex);
    (void)pthread_join(heart->thread, NULL);
    free_heart(heart);
}
