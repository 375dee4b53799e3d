/* Four threads allocate, grow, shrink and free blocks of 16 bytes to 2 MiB, and check what each holds. Prints the file that `malloc` is
   of, and a sum. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 4, SLOTS = 1200, STEPS = 12000 };
#define CHECK(what, ...) do { if (!(what)) { fprintf(stderr, __VA_ARGS__); fprintf(stderr, "\n"); exit(1); } } while (0)

struct block { unsigned char *bytes; size_t size; unsigned char value; };

static uint64_t next(uint64_t *state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state * 0x2545f4914f6cdd1d >> 16;
}

/* Few large blocks, as many bytes of each kind. */
static size_t size(uint64_t *state) {
    uint64_t kind = next(state) % 1000;
    size_t most = kind < 800 ? 2048 : kind < 995 ? 64 << 10 : 2 << 20;
    return 16 + next(state) % (most - 16);
}

static void check(const struct block *block, size_t bytes) {
    for (size_t at = 0; at < bytes; at++)
        CHECK(block->bytes[at] == (unsigned char)(block->value + at), "byte %zu of %zu is %d", at, block->size, block->bytes[at]);
}

static void fill(struct block *block, size_t from) {
    for (size_t at = from; at < block->size; at++) block->bytes[at] = (unsigned char)(block->value + at);
}

static void *work(void *number) {
    struct block *blocks = calloc(SLOTS, sizeof *blocks);
    uint64_t state = (uintptr_t)number * 0x9e3779b97f4a7c15, sum = 0;
    for (int step = 0; step < STEPS; step++) {
        struct block *block = &blocks[next(&state) % SLOTS];
        size_t wanted = size(&state);
        check(block, block->size);
        if (!block->bytes) {
            int cleared = step % 3 == 0;
            *block = (struct block){cleared ? calloc(1, wanted) : malloc(wanted), wanted, (unsigned char)step};
            CHECK(block->bytes, "no memory");
            for (size_t at = 0; cleared && at < wanted; at++) CHECK(!block->bytes[at], "calloc gave %d", block->bytes[at]);
            fill(block, 0);
        } else if (step % 2) {
            size_t before = block->size;
            block->bytes = realloc(block->bytes, wanted);
            CHECK(block->bytes, "no memory");
            block->size = wanted;
            check(block, before < wanted ? before : wanted);
            fill(block, before < wanted ? before : wanted);
        } else {
            sum += block->size * block->value;
            free(block->bytes);
            *block = (struct block){0};
        }
    }
    for (struct block *block = blocks; block < blocks + SLOTS; block++) {
        check(block, block->size);
        sum += block->size;
        free(block->bytes);
    }
    free(blocks);
    return (void *)(uintptr_t)sum;
}

int main(void) {
    pthread_t threads[THREADS];
    uint64_t sum = 0;
    for (uintptr_t number = 0; number < THREADS; number++)
        CHECK(!pthread_create(&threads[number], NULL, work, (void *)(number + 1)), "pthread_create");
    for (int number = 0; number < THREADS; number++) {
        void *part;
        CHECK(!pthread_join(threads[number], &part), "pthread_join");
        sum += (uintptr_t)part;
    }
    Dl_info allocator;
    CHECK(dladdr(dlsym(RTLD_DEFAULT, "malloc"), &allocator), "dladdr");
    printf("%s %lu\n", allocator.dli_fname, sum);
    return 0;
}
