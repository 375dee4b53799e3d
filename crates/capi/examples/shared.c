/* Shared memory between processes: byway dsm run -n 2 -- ./shared. Each process adds 1 to a counter 100 times, under a lock.
 * With --checkpoint DIR, a job that is started again with --resume goes on from the count that the last one has reached. */

#include <byway.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static void check(int code, const char *what) {
    if (code < 0) {
        fprintf(stderr, "%s: %s\n", what, byway_error_text(code));
        exit(1);
    }
}

int main(void) {
    struct byway_dsm_job *job;
    uint8_t *segment;
    check(byway_dsm_init(&job), "init");
    check(byway_dsm_segment(job, "counter", sizeof(uint64_t), &segment), "segment");
    volatile uint64_t *counter = (volatile uint64_t *)segment;
    uint64_t before = *counter;
    if (before != 0 && byway_dsm_is_resumed(job) != 1)
        return 1;
    check(byway_dsm_barrier(job, 0), "barrier");
    for (int i = 0; i < 100; i++) {
        check(byway_dsm_lock(job, 3), "lock");
        *counter = *counter + 1;
        check(byway_dsm_unlock(job, 3), "unlock");
    }
    check(byway_dsm_barrier(job, 0), "barrier");
    int rank = byway_dsm_rank(job), ranks = byway_dsm_ranks(job);
    struct byway_dsm_counters counters;
    check(byway_dsm_statistics(job, &counters), "statistics");
    if (*counter != before + (uint64_t)ranks * 100) {
        fprintf(stderr, "%llu\n", (unsigned long long)*counter);
        return 1;
    }
    if (rank == 0)
        printf("%d processes counted to %llu\n", ranks, (unsigned long long)*counter);
    /* Of all segments; without --checkpoint a barrier. */
    check(byway_dsm_checkpoint(job), "checkpoint");
    check(byway_dsm_finish(job), "finish");
    return 0;
}
