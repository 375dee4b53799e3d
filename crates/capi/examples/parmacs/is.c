/* Ranks small integers ten times, as the integer sort of the NAS benchmarks does: is PROCESSES COUNT. The rank of a value is the number of
 * smaller keys. Each process counts its part of the keys, and adds up the counts of its part of the values. */

#include <stdint.h>
#include <string.h>

MAIN_ENV

#define VALUES 4096
#define ROUNDS 10

struct global {
    LOCKDEC(number_lock)
    BARDEC(meeting)
    int next;
    long began, ended;
    uint64_t mixed;
};

static struct global *global;
static int *keys, *ranks;
/* Of each process: its keys of each value, and the keys whose values are in its part. */
static int (*counts)[VALUES];
static int *sums;
static int processes;
static size_t count;

static void rank_keys(int me) {
    size_t first = count * (size_t)me / (size_t)processes, end = count * (size_t)(me + 1) / (size_t)processes;
    int first_value = VALUES * me / processes, end_value = VALUES * (me + 1) / processes, sum = 0, before = 0;
    int own[VALUES];
    memset(own, 0, sizeof own);
    for (size_t at = first; at < end; at++)
        own[keys[at]]++;
    memcpy(counts[me], own, sizeof own);
    BARRIER(global->meeting, processes)
    for (int value = first_value; value < end_value; value++) {
        ranks[value] = sum;
        for (int process = 0; process < processes; process++)
            sum += counts[process][value];
    }
    sums[me * 1024] = sum;
    BARRIER(global->meeting, processes)
    for (int process = 0; process < me; process++)
        before += sums[process * 1024];
    for (int value = first_value; value < end_value; value++)
        ranks[value] += before;
    BARRIER(global->meeting, processes)
}

static void work(void) {
    LOCK(global->number_lock)
    int me = global->next++;
    UNLOCK(global->number_lock)
    BARRIER(global->meeting, processes)
    if (me == 0)
        CLOCK(global->began)
    for (int round = 0; round < ROUNDS; round++) {
        if (me == 0) {
            keys[round] = round;
            keys[round + ROUNDS] = VALUES - 1 - round;
        }
        BARRIER(global->meeting, processes)
        rank_keys(me);
        if (me == 0)
            global->mixed = global->mixed * 31 + (uint64_t)ranks[VALUES / 3 + round];
    }
    if (me == 0)
        CLOCK(global->ended)
}

int main(int argc, char **argv) {
    MAIN_INITENV(, 0)
    count = argc == 3 ? (size_t)atol(argv[2]) : 0;
    if (count < 2 * ROUNDS)
        return fprintf(stderr, "is PROCESSES COUNT (%d or more)\n", 2 * ROUNDS), 2;
    processes = atoi(argv[1]);
    global = (struct global *)G_MALLOC(sizeof(struct global));
    keys = (int *)G_MALLOC(count * sizeof(int));
    ranks = (int *)G_MALLOC(VALUES * sizeof(int));
    counts = G_MALLOC((size_t)processes * sizeof *counts);
    sums = (int *)G_MALLOC((size_t)processes * 1024 * sizeof(int));
    LOCKINIT(global->number_lock)
    BARINIT(global->meeting, processes)
    for (size_t at = 0; at < count; at++)
        keys[at] = (int)((at * UINT64_C(0x9e3779b97f4a7c15) >> 40) % VALUES);
    CREATE(work, processes)
    WAIT_FOR_END(processes)
    /* Keys that are put where their ranks say are in order. */
    int *sorted = calloc(count, sizeof(int)), *place = malloc(VALUES * sizeof(int));
    memcpy(place, ranks, VALUES * sizeof(int));
    for (size_t at = 0; at < count; at++)
        sorted[place[keys[at]]++] = keys[at];
    for (size_t at = 1; at < count; at++)
        if (sorted[at - 1] > sorted[at])
            return fprintf(stderr, "the ranks do not put key %zu in order\n", at), 1;
    printf("is %zu: %016llx\n", count, (unsigned long long)global->mixed);
    printf("%ld us\n", global->ended - global->began);
    MAIN_END
}
