/* The macros of byway_anl.h over threads of one process: the same programs without shared memory between processes, to compare with. */

#ifndef THREADS_H
#define THREADS_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>

#define THREADS_MAX 64

static pthread_t threads[THREADS_MAX];

static void *start(void *body) {
    (*(void (**)(void))body)();
    return NULL;
}

static void *zeroes(size_t bytes) {
    size_t whole = (bytes + 4095) / 4096 * 4096;
    void *memory = aligned_alloc(4096, whole);
    if (memory == NULL)
        exit(1);
    return memset(memory, 0, whole);
}

#define MAIN_ENV
#define MAIN_INITENV(...)
#define MAIN_END { exit(0); }

#define CREATE(body, count) { \
    static void (*threads_body)(void) = (body); \
    for (int at = 1; at < (count); at++) \
        if (pthread_create(&threads[at], NULL, start, &threads_body) != 0) \
            exit(1); \
    (body)(); \
}
#define WAIT_FOR_END(count) { for (int at = 1; at < (count); at++) pthread_join(threads[at], NULL); }

#define G_MALLOC(bytes) zeroes(bytes);

#define LOCKDEC(lock) pthread_mutex_t lock;
#define LOCKINIT(lock) { pthread_mutex_init(&(lock), NULL); }
#define LOCK(lock) { pthread_mutex_lock(&(lock)); }
#define UNLOCK(lock) { pthread_mutex_unlock(&(lock)); }

#define BARDEC(barrier) pthread_barrier_t barrier;
#define BARINIT(barrier, count) { pthread_barrier_init(&(barrier), NULL, (count)); }
#define BARRIER(barrier, count) { pthread_barrier_wait(&(barrier)); }

#define CLOCK(time) { struct timeval now; gettimeofday(&now, NULL); (time) = now.tv_sec * 1000000L + now.tv_usec; }

#endif
