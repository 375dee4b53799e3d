/* Threads write words of a file's pages by pwrite(2), another one stores to words of the same pages through a shared mapping.
 * Usage: mapped_writes FILE PAGES ROUNDS. Says what is missing then, in the mapping or in the file. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, WRITERS = 2 };

static int file;
static long pages;
static char *map;
static uint64_t round_number;
/* The page that the calls are about to write: stores keep up with them. */
static _Atomic long reached;

static void check(int is_good, const char *what) {
    if (!is_good) {
        perror(what);
        exit(2);
    }
}

static long place(long page, long writer) { return page * PAGE + 1024 + writer * 512; }

static void *write_by_calls(void *writer) {
    for (long page = 0; page < pages; page++) {
        if ((long)writer == 0)
            reached = page;
        check(pwrite(file, &round_number, 8, place(page, (long)writer)) == 8, "pwrite");
    }
    return NULL;
}

static void *store(void *unused) {
    for (long page = 0; page < pages; page++) {
        while (reached < page)
            sched_yield();
        *(volatile uint64_t *)(map + page * PAGE) = round_number;
    }
    return unused;
}

static long missing(const char *where, const char *bytes) {
    long count = 0;
    for (long page = 0; page < pages; page++) {
        if (*(uint64_t *)(bytes + page * PAGE) != round_number) {
            printf("round %lu, page %ld: a store is missing in the %s\n", round_number, page, where);
            count++;
        }
        for (long writer = 0; writer < WRITERS; writer++)
            if (*(uint64_t *)(bytes + place(page, writer)) != round_number) {
                printf("round %lu, page %ld: a write is missing in the %s\n", round_number, page, where);
                count++;
            }
    }
    return count;
}

int main(int count, char **arguments) {
    check(count == 4, "FILE PAGES ROUNDS");
    pages = atol(arguments[2]);
    long rounds = atol(arguments[3]), lost = 0;
    size_t size = pages * PAGE;
    file = open(arguments[1], O_RDWR | O_CREAT | O_TRUNC, 0644);
    check(file >= 0, "open");
    char *copy = malloc(size);
    for (round_number = 1; round_number <= (uint64_t)rounds; round_number++) {
        check(!ftruncate(file, 0) && !ftruncate(file, size), "ftruncate");
        map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        check(map != MAP_FAILED, "mmap");
        reached = 0;
        pthread_t threads[WRITERS + 1];
        for (long writer = 0; writer < WRITERS; writer++)
            pthread_create(&threads[writer], NULL, write_by_calls, (void *)writer);
        pthread_create(&threads[WRITERS], NULL, store, NULL);
        for (int thread = 0; thread <= WRITERS; thread++)
            pthread_join(threads[thread], NULL);
        lost += missing("mapping", map);
        check(!msync(map, size, MS_SYNC) && !munmap(map, size), "msync");
        check(pread(file, copy, size, 0) == (ssize_t)size, "pread");
        lost += missing("file", copy);
    }
    return lost != 0;
}
