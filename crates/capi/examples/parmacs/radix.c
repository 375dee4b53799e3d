/* Sorts numbers of 32 bits by 8 bits at a time: radix PROCESSES COUNT. Each process puts its part of the numbers into the places that the counts
 * of all processes give. */

#include <stdint.h>
#include <string.h>

MAIN_ENV

#define DIGITS 256

struct global {
    LOCKDEC(number_lock)
    BARDEC(meeting)
    int next;
    long began, ended;
};

static struct global *global;
static uint32_t *keys, *other;
/* Of each process. */
static size_t (*counts)[DIGITS * 2];
static int processes;
static size_t count;

static void work(void) {
    LOCK(global->number_lock)
    int me = global->next++;
    UNLOCK(global->number_lock)
    size_t first = count * (size_t)me / (size_t)processes, end = count * (size_t)(me + 1) / (size_t)processes;
    uint32_t *from = keys, *to = other;
    BARRIER(global->meeting, processes)
    if (me == 0)
        CLOCK(global->began)
    for (int shift = 0; shift < 32; shift += 8) {
        size_t own[DIGITS] = {0}, places[DIGITS];
        for (size_t at = first; at < end; at++)
            own[from[at] >> shift & (DIGITS - 1)]++;
        memcpy(counts[me], own, sizeof own);
        BARRIER(global->meeting, processes)
        size_t place = 0;
        for (int digit = 0; digit < DIGITS; digit++)
            for (int process = 0; process < processes; process++) {
                if (process == me)
                    places[digit] = place;
                place += counts[process][digit];
            }
        for (size_t at = first; at < end; at++)
            to[places[from[at] >> shift & (DIGITS - 1)]++] = from[at];
        BARRIER(global->meeting, processes)
        uint32_t *swapped = from;
        from = to;
        to = swapped;
    }
    if (me == 0)
        CLOCK(global->ended)
}

static uint32_t begin(size_t at) {
    uint64_t mixed = (at + 1) * UINT64_C(0x9e3779b97f4a7c15);
    return (uint32_t)((mixed ^ mixed >> 29) * UINT64_C(0xbf58476d1ce4e5b9) >> 32);
}

int main(int argc, char **argv) {
    MAIN_INITENV(, 0)
    if (argc != 3)
        return fprintf(stderr, "radix PROCESSES COUNT\n"), 2;
    processes = atoi(argv[1]);
    count = (size_t)atol(argv[2]);
    global = (struct global *)G_MALLOC(sizeof(struct global));
    keys = (uint32_t *)G_MALLOC(count * sizeof *keys);
    other = (uint32_t *)G_MALLOC(count * sizeof *other);
    counts = G_MALLOC((size_t)processes * sizeof *counts);
    LOCKINIT(global->number_lock)
    BARINIT(global->meeting, processes)
    uint64_t before = 0, after = 0, mixed = 0;
    for (size_t at = 0; at < count; at++)
        before += keys[at] = begin(at);
    CREATE(work, processes)
    WAIT_FOR_END(processes)
    for (size_t at = 0; at < count; at++) {
        if (at > 0 && keys[at - 1] > keys[at])
            return fprintf(stderr, "the numbers are not in order at %zu\n", at), 1;
        after += keys[at];
        mixed = mixed * 31 + keys[at];
    }
    if (before != after)
        return fprintf(stderr, "numbers are lost\n"), 1;
    printf("radix %zu: %016llx\n", count, (unsigned long long)mixed);
    printf("%ld us\n", global->ended - global->began);
    MAIN_END
}
