/* A list that processes make together: byway dsm run -n 3 -- ./list. Each process allocates nodes in a segment and puts them before the list. Pointers
 * mean the same in all processes. */

#include <byway.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { NODES = 1000, LOCK = 7, SEGMENT = 1 << 20 };

struct node {
    struct node *next;
    uint64_t value;
};

static void check(int code, const char *what) {
    if (code < 0) {
        fprintf(stderr, "%s: %s\n", what, byway_error_text(code));
        exit(1);
    }
}

static void must_be(int is_so, const char *what) {
    if (!is_so) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}

int main(void) {
    struct byway_dsm_job *job;
    uint8_t *first, *segment, *memory;
    check(byway_dsm_init(&job), "init");
    check(byway_dsm_segment(job, "first", sizeof(struct node *), &first), "segment");
    check(byway_dsm_segment(job, "nodes", SEGMENT, &segment), "segment");
    struct node **list = (struct node **)first;
    int rank = byway_dsm_rank(job), ranks = byway_dsm_ranks(job);
    for (int i = 0; i < NODES; i++) {
        check(byway_dsm_allocate(job, segment, sizeof(struct node), 16, &memory), "allocate");
        struct node *node = (struct node *)memory;
        must_be(node->next == NULL && node->value == 0, "another process has this node");
        node->value = (uint64_t)rank * NODES + i;
        check(byway_dsm_lock(job, LOCK), "lock");
        node->next = *list;
        *list = node;
        check(byway_dsm_unlock(job, LOCK), "unlock");
    }
    check(byway_dsm_barrier(job, 0), "barrier");
    if (rank == 0) {
        uint64_t count = 0, sum = 0;
        for (struct node *node = *list; node; node = node->next) {
            count++;
            sum += node->value;
        }
        printf("%llu nodes of %d processes, sum %llu\n", (unsigned long long)count, ranks, (unsigned long long)sum);
        check(byway_dsm_allocate(job, segment, 100, 4096, &memory), "allocate");
        must_be((uintptr_t)memory % 4096 == 0 && memory > segment, "memory is not aligned");
        check(byway_dsm_allocate(job, segment, 100, 1 << 18, &memory), "allocate");
        must_be((uintptr_t)memory % (1 << 18) == 0 && memory < segment + SEGMENT, "memory is not aligned beyond a page");
        must_be(byway_dsm_allocate(job, segment, SEGMENT, 1, &memory) == BYWAY_E_RANGE, "more than the segment");
        must_be(byway_dsm_allocate(job, segment, SIZE_MAX, 1, &memory) == BYWAY_E_RANGE, "a size that wraps");
        must_be(byway_dsm_allocate(job, segment, 8, 24, &memory) == BYWAY_E_INVALID, "no power of two");
        must_be(byway_dsm_allocate(job, (uint8_t *)&count, 8, 8, &memory) == BYWAY_E_RANGE, "memory of its own");
        must_be(byway_dsm_lock(job, UINT32_MAX) == BYWAY_E_INVALID, "the lock of allocations");
    }
    check(byway_dsm_finish(job), "finish");
    return 0;
}
