/* Matrix product: matrix PROCESSES SIZE. The processes take bands of rows of the product, one after the other. */

MAIN_ENV

enum { BAND = 8 };

struct global {
    LOCKDEC(band_lock)
    BARDEC(meeting)
    int next;
    long began, ended;
};

static struct global *global;
static double *left, *right, *product;
static int processes, size;

/* The first row of a band that no process has taken yet. */
static int take_band(void) {
    LOCK(global->band_lock)
    int row = global->next;
    global->next += BAND;
    UNLOCK(global->band_lock)
    return row;
}

static void multiply(int row) {
    double *to = product + (size_t)row * size;
    for (int middle = 0; middle < size; middle++) {
        double factor = left[(size_t)row * size + middle];
        const double *from = right + (size_t)middle * size;
        for (int column = 0; column < size; column++)
            to[column] += factor * from[column];
    }
}

static void work(void) {
    BARRIER(global->meeting, processes)
    for (int first = take_band(); first < size; first = take_band())
        for (int row = first; row < first + BAND && row < size; row++)
            multiply(row);
    BARRIER(global->meeting, processes)
}

int main(int argc, char **argv) {
    MAIN_INITENV(, 0)
    if (argc != 3)
        return fprintf(stderr, "matrix PROCESSES SIZE\n"), 2;
    processes = atoi(argv[1]);
    size = atoi(argv[2]);
    size_t count = (size_t)size * size;
    global = (struct global *)G_MALLOC(sizeof(struct global));
    left = (double *)G_MALLOC(count * sizeof(double));
    right = (double *)G_MALLOC(count * sizeof(double));
    product = (double *)G_MALLOC(count * sizeof(double));
    LOCKINIT(global->band_lock)
    BARINIT(global->meeting, processes)
    for (size_t at = 0; at < count; at++) {
        left[at] = (double)(at % 17) / 16.0;
        right[at] = (double)(at % 23) - 11.0;
    }
    CLOCK(global->began)
    CREATE(work, processes)
    WAIT_FOR_END(processes)
    CLOCK(global->ended)
    double sum = 0.0;
    for (size_t at = 0; at < count; at++)
        sum += product[at] * (double)(1 + at % 7);
    printf("matrix %d: %a\n", size, sum);
    printf("%ld us\n", global->ended - global->began);
    MAIN_END
}
