/* Fences and fetches: byway dsm run -n 2 --consistency rc -- ./ranges. Process 0 fills pages and then sets a flag, with a fence behind each and no lock
 * or barrier. Process 1 looks for the flag behind fences of its own, and brings all pages at once. */

#include <byway.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { PAGES = 100, PAGE = 4096 / sizeof(uint64_t), PATIENCE_SECONDS = 60 };

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

/* Waits until the other process has set the flag. Without the fence, a copy of its page may stay as it is for ever. */
static void await(const struct byway_dsm_job *job, const volatile uint64_t *flag) {
    time_t began = time(NULL);
    while (*flag == 0) {
        must_be(time(NULL) - began < PATIENCE_SECONDS, "no fence shows the flag");
        check(byway_dsm_fence(job), "fence");
    }
}

int main(void) {
    struct byway_dsm_job *job;
    uint8_t *data, *segment;
    check(byway_dsm_init(&job), "init");
    check(byway_dsm_segment(job, "data", PAGES * 4096, &data), "segment");
    check(byway_dsm_segment(job, "flag", 4096, &segment), "segment");
    volatile uint64_t *words = (volatile uint64_t *)data, *flag = (volatile uint64_t *)segment;
    int rank = byway_dsm_rank(job);
    /* Process 0 touches all pages first, so it is their home. Then both have copies, which are old soon. */
    if (rank == 1)
        check(byway_dsm_barrier(job, 0), "barrier");
    uint64_t before = *flag;
    for (int page = 0; page < PAGES; page++)
        before += words[page * PAGE];
    must_be(before == 0, "new memory is not zero");
    if (rank == 0)
        check(byway_dsm_barrier(job, 0), "barrier");
    check(byway_dsm_barrier(job, 0), "barrier");
    if (rank == 0) {
        for (int word = 0; word < PAGES * PAGE; word++)
            words[word] = (uint64_t)word + 1;
        check(byway_dsm_fence(job), "fence");
        *flag = 1;
        check(byway_dsm_fence(job), "fence");
    } else {
        await(job, flag);
        check(byway_dsm_fence(job), "fence");
        struct byway_dsm_counters here, fetched, loaded;
        check(byway_dsm_statistics(job, &here), "statistics");
        /* From within the first page to within the last. */
        check(byway_dsm_fetch(job, data + 8, PAGES * 4096 - 16), "fetch");
        check(byway_dsm_statistics(job, &fetched), "statistics");
        uint64_t sum = 0;
        for (int word = 0; word < PAGES * PAGE; word++)
            sum += words[word];
        check(byway_dsm_statistics(job, &loaded), "statistics");
        must_be(fetched.pages_received - here.pages_received == PAGES, "the fetch did not bring all pages");
        must_be(loaded.pages_received == fetched.pages_received && loaded.read_faults == fetched.read_faults,
                "a page was not here behind its fetch");
        printf("sum %llu\n", (unsigned long long)sum);
    }
    check(byway_dsm_barrier(job, 0), "barrier");
    int local;
    must_be(byway_dsm_fetch(job, (const uint8_t *)&local, 4) == BYWAY_E_RANGE, "memory of its own is fetched");
    must_be(byway_dsm_fetch(job, data, PAGES * 4096 + 1) == BYWAY_E_RANGE, "more than the segment is fetched");
    must_be(byway_dsm_fetch(job, data + 8, SIZE_MAX) == BYWAY_E_RANGE, "a range that wraps is fetched");
    must_be(byway_dsm_fetch(job, data, 0) == 0, "a fetch of no bytes fails");
    must_be(byway_dsm_fence(NULL) < 0 && byway_dsm_fetch(NULL, data, 8) < 0, "no job is taken for one");
    check(byway_dsm_finish(job), "finish");
    return 0;
}
