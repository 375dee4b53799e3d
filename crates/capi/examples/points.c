/* A computation that answers other processes at its safe points: byway dsm run -n 2 --pager points -- ./points. Process 1 computes until process 0,
 * which needs pages of it meanwhile, tells it to end. */

#include <byway.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { PAGE = 4096 / sizeof(uint64_t) };

static void check(int code, const char *what) {
    if (code < 0) {
        fprintf(stderr, "%s: %s\n", what, byway_error_text(code));
        exit(1);
    }
}

/* Computes until the flag is set. Gives what it has computed. */
static double compute(const struct byway_dsm_job *job, const volatile uint64_t *is_done) {
    double sum = 0;
    for (uint64_t step = 1; *is_done == 0; step++) {
        sum += 1.0 / (double)(step * step);
        if (step % 10000 == 0)
            check(byway_dsm_poll(job), "poll");
    }
    return sum;
}

int main(void) {
    struct byway_dsm_job *job;
    uint8_t *segment;
    check(byway_dsm_init(&job), "init");
    check(byway_dsm_segment(job, "pages", 2 * 4096, &segment), "segment");
    volatile uint64_t *words = (volatile uint64_t *)segment, *is_done = words + PAGE;
    int rank = byway_dsm_rank(job);
    if (rank == 1)
        words[0] = 42;
    /* Process 1 has a copy of the flag's page, too. */
    uint64_t before = *is_done;
    check(byway_dsm_barrier(job, 0), "barrier");
    if (rank == 1 && compute(job, is_done) <= 1)
        return 1;
    if (rank == 0) {
        printf("%llu\n", (unsigned long long)(words[0] + before));
        *is_done = 1;
    }
    check(byway_dsm_finish(job), "finish");
    return 0;
}
