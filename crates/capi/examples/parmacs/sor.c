/* Red-black successive over-relaxation of a grid: sor PROCESSES SIZE STEPS. Each process has a band of rows. */

MAIN_ENV

struct global {
    LOCKDEC(number_lock)
    BARDEC(meeting)
    int next;
    long began, ended;
};

static struct global *global;
static double *grid;
static int processes, size, steps;

static double begin(int row, int column) {
    int is_edge = row == 0 || row == size - 1 || column == 0 || column == size - 1;
    return is_edge ? row + 2.0 * column : 0.0;
}

/* Half a step: the points of one colour of a row. */
static void relax(int row, int colour) {
    double *here = grid + (size_t)row * size, *above = here - size, *below = here + size;
    for (int column = 1 + (row + 1 + colour) % 2; column < size - 1; column += 2) {
        double around = here[column - 1] + here[column + 1] + above[column] + below[column];
        here[column] += 1.25 * (around / 4.0 - here[column]);
    }
}

static void work(void) {
    LOCK(global->number_lock)
    int me = global->next++;
    UNLOCK(global->number_lock)
    int first = 1 + (int)((long)(size - 2) * me / processes), end = 1 + (int)((long)(size - 2) * (me + 1) / processes);
    /* Memory belongs to the process that writes to it first. */
    for (int row = me == 0 ? 0 : first; row < (me == processes - 1 ? size : end); row++)
        for (int column = 0; column < size; column++)
            grid[(size_t)row * size + column] = begin(row, column);
    for (int step = 0; step <= 2 * steps; step++) {
        BARRIER(global->meeting, processes)
        if (me == 0 && step == 0)
            CLOCK(global->began)
        if (step == 2 * steps)
            break;
        for (int row = first; row < end; row++)
            relax(row, step % 2);
    }
    if (me == 0)
        CLOCK(global->ended)
}

int main(int argc, char **argv) {
    MAIN_INITENV(, 0)
    if (argc != 4)
        return fprintf(stderr, "sor PROCESSES SIZE STEPS\n"), 2;
    processes = atoi(argv[1]);
    size = atoi(argv[2]);
    steps = atoi(argv[3]);
    global = (struct global *)G_MALLOC(sizeof(struct global));
    grid = (double *)G_MALLOC((size_t)size * size * sizeof(double));
    LOCKINIT(global->number_lock)
    BARINIT(global->meeting, processes)
    CREATE(work, processes)
    WAIT_FOR_END(processes)
    double sum = 0.0;
    for (size_t at = 0; at < (size_t)size * size; at++)
        sum += grid[at];
    printf("sor %d %d: %a\n", size, steps, sum);
    printf("%ld us\n", global->ended - global->began);
    MAIN_END
}
