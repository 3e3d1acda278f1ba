/* The floor of copies: the same batch as a loop of memcpy, on one thread or two; and a hand-over of work between two threads. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef struct job {
    char *dst;
    const char *src;
    const int64_t *to, *from, *lengths;
    int64_t first, last;
} job;

static void *loop(void *argument)
{
    const job *todo = argument;
    int64_t i;
    for (i = todo->first; i < todo->last; i++)
        memcpy(todo->dst + todo->to[i], todo->src + todo->from[i], (size_t)todo->lengths[i]);
    return NULL;
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ns of the whole loop, its second half on another thread if `threads` is 2. */
int64_t floor_copy(char *dst, const char *src, const int64_t *to, const int64_t *from, const int64_t *lengths, int64_t count,
                   int32_t threads)
{
    int64_t begun = now_ns();
    job all = {dst, src, to, from, lengths, 0, count};
    if (threads == 2) {
        job half = {dst, src, to, from, lengths, count / 2, count};
        pthread_t other;
        all.last = count / 2;
        pthread_create(&other, NULL, loop, &half);
        loop(&all);
        pthread_join(other, NULL);
    } else {
        loop(&all);
    }
    return now_ns() - begun;
}

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t asked = PTHREAD_COND_INITIALIZER, answered = PTHREAD_COND_INITIALIZER;
static int32_t state;

static void *answer(void *argument)
{
    int64_t left = *(const int64_t *)argument;
    pthread_mutex_lock(&mutex);
    for (; left; left--) {
        while (state != 1)
            pthread_cond_wait(&asked, &mutex);
        state = 2;
        pthread_cond_signal(&answered);
    }
    pthread_mutex_unlock(&mutex);
    return NULL;
}

/* ns from asking another thread, which sleeps, to its answer: out[count]. */
void floor_hand_over(int64_t count, int64_t *out)
{
    pthread_t other;
    int64_t i;
    pthread_create(&other, NULL, answer, &count);
    for (i = 0; i < count; i++) {
        struct timespec pause = {0, 200000};
        int64_t begun;
        nanosleep(&pause, NULL);
        begun = now_ns();
        pthread_mutex_lock(&mutex);
        state = 1;
        pthread_cond_signal(&asked);
        while (state != 2)
            pthread_cond_wait(&answered, &mutex);
        state = 0;
        pthread_mutex_unlock(&mutex);
        out[i] = now_ns() - begun;
    }
    pthread_join(other, NULL);
}
