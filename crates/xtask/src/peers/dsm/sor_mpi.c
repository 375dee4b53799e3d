/* The relaxation of crates/capi/examples/parmacs/sor.c with MPI's one-sided operations: each process has its band of rows in a window, and
 * gets the rows beside it from its neighbours between two fences. */

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int size;

static double begin(int row, int column) {
    int is_edge = row == 0 || row == size - 1 || column == 0 || column == size - 1;
    return is_edge ? row + 2.0 * column : 0.0;
}

static int first_row(int me, int processes) {
    return 1 + (int)((long)(size - 2) * me / processes);
}

int main(int argc, char **argv) {
    int me, processes;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    MPI_Comm_size(MPI_COMM_WORLD, &processes);
    size = atoi(argv[2]);
    int steps = atoi(argv[3]);
    int first = first_row(me, processes), rows = first_row(me + 1, processes) - first;
    /* The window has the band; the rows above and below it are copies. */
    double *band, *above = malloc(size * sizeof(double)), *below = malloc(size * sizeof(double));
    MPI_Win window;
    MPI_Win_allocate((MPI_Aint)rows * size * sizeof(double), sizeof(double), MPI_INFO_NULL, MPI_COMM_WORLD, &band, &window);
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < size; column++)
            band[(size_t)row * size + column] = begin(first + row, column);
    for (int column = 0; column < size; column++) {
        above[column] = begin(0, column);
        below[column] = begin(size - 1, column);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    double began = MPI_Wtime();
    for (int step = 0; step < 2 * steps; step++) {
        MPI_Win_fence(0, window);
        if (me > 0) {
            int its = first - first_row(me - 1, processes);
            MPI_Get(above, size, MPI_DOUBLE, me - 1, (MPI_Aint)(its - 1) * size, size, MPI_DOUBLE, window);
        }
        if (me < processes - 1)
            MPI_Get(below, size, MPI_DOUBLE, me + 1, 0, size, MPI_DOUBLE, window);
        MPI_Win_fence(0, window);
        for (int row = 0; row < rows; row++) {
            double *here = band + (size_t)row * size;
            double *up = row > 0 ? here - size : above, *down = row < rows - 1 ? here + size : below;
            for (int column = 1 + (first + row + 1 + step % 2) % 2; column < size - 1; column += 2) {
                double around = here[column - 1] + here[column + 1] + up[column] + down[column];
                here[column] += 1.25 * (around / 4.0 - here[column]);
            }
        }
    }
    MPI_Barrier(MPI_COMM_WORLD);
    double ended = MPI_Wtime();
    MPI_Win_fence(MPI_MODE_NOSUCCEED, window);
    if (me == 0) {
        double sum = 0.0, *all = malloc((size_t)size * size * sizeof(double));
        for (int column = 0; column < size; column++) {
            all[column] = begin(0, column);
            all[(size_t)(size - 1) * size + column] = begin(size - 1, column);
        }
        for (int other = 0; other < processes; other++) {
            int from = first_row(other, processes), count = (first_row(other + 1, processes) - from) * size;
            MPI_Win_lock(MPI_LOCK_SHARED, other, 0, window);
            MPI_Get(all + (size_t)from * size, count, MPI_DOUBLE, other, 0, count, MPI_DOUBLE, window);
            MPI_Win_unlock(other, window);
        }
        for (size_t at = 0; at < (size_t)size * size; at++)
            sum += all[at];
        printf("sor %d %d: %a\n", size, steps, sum);
        printf("%.0f us\n", (ended - began) * 1e6);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_free(&window);
    MPI_Finalize();
    return 0;
}
