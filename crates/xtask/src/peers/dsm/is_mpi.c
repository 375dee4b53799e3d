/* The integer sort of crates/capi/examples/parmacs/is.c with MPI's one-sided operations: each process has its part of the keys, puts its counts of each
 * other's values into that one's window between two fences, and then the sum of its values' counts into the windows of those behind it. */

#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define VALUES 4096
#define ROUNDS 10

static int me, processes;

static int first_value(int process) { return VALUES * process / processes; }

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    MPI_Comm_size(MPI_COMM_WORLD, &processes);
    size_t count = argc == 3 ? (size_t)atol(argv[2]) : 0;
    if (count < 2 * ROUNDS * (size_t)processes)
        return fprintf(stderr, "is_mpi PROCESSES COUNT (%d or more for each process)\n", 2 * ROUNDS), 2;
    size_t first = count * (size_t)me / (size_t)processes, end = count * (size_t)(me + 1) / (size_t)processes;
    int *keys = malloc((end - first) * sizeof(int));
    for (size_t at = first; at < end; at++)
        keys[at - first] = (int)((at * UINT64_C(0x9e3779b97f4a7c15) >> 40) % VALUES);
    /* The window: the ranks of this process's values, the sums of all processes, and their counts of each value. */
    int *window_base, own[VALUES], from = first_value(me), until = first_value(me + 1);
    MPI_Aint ints = VALUES + processes + (MPI_Aint)processes * VALUES;
    MPI_Win window;
    MPI_Win_allocate(ints * (MPI_Aint)sizeof(int), sizeof(int), MPI_INFO_NULL, MPI_COMM_WORLD, &window_base, &window);
    int *ranks = window_base, *sums = ranks + VALUES, *counts = sums + processes;
    memset(window_base, 0, (size_t)ints * sizeof(int));
    uint64_t mixed = 0;
    MPI_Barrier(MPI_COMM_WORLD);
    double began = MPI_Wtime();
    for (int round = 0; round < ROUNDS; round++) {
        if (me == 0) {
            keys[round] = round;
            keys[round + ROUNDS] = VALUES - 1 - round;
        }
        memset(own, 0, sizeof own);
        for (size_t at = 0; at < end - first; at++)
            own[keys[at]]++;
        MPI_Win_fence(0, window);
        for (int to = 0; to < processes; to++) {
            int begin = first_value(to), length = first_value(to + 1) - begin;
            MPI_Aint place = VALUES + processes + (MPI_Aint)me * VALUES + begin;
            MPI_Put(own + begin, length, MPI_INT, to, place, length, MPI_INT, window);
        }
        MPI_Win_fence(0, window);
        int sum = 0, before = 0, seen = 0, wanted = VALUES / 3 + round, owner = 0;
        for (int value = from; value < until; value++) {
            ranks[value] = sum;
            for (int process = 0; process < processes; process++)
                sum += counts[process * VALUES + value];
        }
        MPI_Win_fence(0, window);
        for (int to = me + 1; to < processes; to++)
            MPI_Put(&sum, 1, MPI_INT, to, VALUES + me, 1, MPI_INT, window);
        MPI_Win_fence(0, window);
        for (int process = 0; process < me; process++)
            before += sums[process];
        for (int value = from; value < until; value++)
            ranks[value] += before;
        while (first_value(owner + 1) <= wanted)
            owner++;
        MPI_Win_fence(0, window);
        if (me == 0)
            MPI_Get(&seen, 1, MPI_INT, owner, wanted, 1, MPI_INT, window);
        MPI_Win_fence(0, window);
        mixed = mixed * 31 + (uint64_t)seen;
    }
    double ended = MPI_Wtime();
    if (me == 0) {
        printf("is %zu: %016llx\n", count, (unsigned long long)mixed);
        printf("%.0f us\n", (ended - began) * 1e6);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_free(&window);
    MPI_Finalize();
    return 0;
}
