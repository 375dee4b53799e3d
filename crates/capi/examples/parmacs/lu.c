/* Factors a dense matrix into L and U, without pivots: lu PROCESSES SIZE. The matrix lies in blocks of 32 x 32 numbers, two pages each, which
 * the processes own by turns in both dimensions. */

MAIN_ENV

#define BLOCK 32
#define NUMBERS (BLOCK * BLOCK)

struct global {
    LOCKDEC(number_lock)
    BARDEC(meeting)
    int next;
    long began, ended;
};

static struct global *global;
static double *matrix;
static int processes, blocks, wide;

static double *block(int row, int column) {
    return matrix + ((size_t)row * blocks + column) * NUMBERS;
}

static int owner(int row, int column) {
    return row % (processes / wide) * wide + column % wide;
}

/* Diagonally dominant: no pivots are needed. */
static double begin(int row, int column, int size) {
    return row == column ? 2.0 * size : ((row * 31L + column * 17L) % 1000) / 1000.0;
}

static void factor(double *a) {
    for (int k = 0; k < BLOCK; k++)
        for (int i = k + 1; i < BLOCK; i++) {
            double of = a[i * BLOCK + k] /= a[k * BLOCK + k];
            for (int j = k + 1; j < BLOCK; j++)
                a[i * BLOCK + j] -= of * a[k * BLOCK + j];
        }
}

/* A block right of the diagonal: L of the diagonal's block divides it. */
static void divide_row(double *a, const double *diagonal) {
    for (int k = 0; k < BLOCK; k++)
        for (int i = k + 1; i < BLOCK; i++) {
            double of = diagonal[i * BLOCK + k];
            for (int j = 0; j < BLOCK; j++)
                a[i * BLOCK + j] -= of * a[k * BLOCK + j];
        }
}

/* A block below: U does. */
static void divide_column(double *a, const double *diagonal) {
    for (int i = 0; i < BLOCK; i++)
        for (int k = 0; k < BLOCK; k++) {
            double of = a[i * BLOCK + k] /= diagonal[k * BLOCK + k];
            for (int j = k + 1; j < BLOCK; j++)
                a[i * BLOCK + j] -= of * diagonal[k * BLOCK + j];
        }
}

static void subtract_product(double *a, const double *left, const double *upper) {
    for (int i = 0; i < BLOCK; i++)
        for (int k = 0; k < BLOCK; k++) {
            double of = left[i * BLOCK + k];
            for (int j = 0; j < BLOCK; j++)
                a[i * BLOCK + j] -= of * upper[k * BLOCK + j];
        }
}

static void fill(int row, int column) {
    for (int at = 0; at < NUMBERS; at++)
        block(row, column)[at] = begin(row * BLOCK + at / BLOCK, column * BLOCK + at % BLOCK, blocks * BLOCK);
}

static void work(void) {
    LOCK(global->number_lock)
    int me = global->next++;
    UNLOCK(global->number_lock)
    /* Memory belongs to the process that writes to it first. */
    for (int at = 0; at < blocks * blocks; at++)
        if (owner(at / blocks, at % blocks) == me)
            fill(at / blocks, at % blocks);
    BARRIER(global->meeting, processes)
    if (me == 0)
        CLOCK(global->began)
    for (int k = 0; k < blocks; k++) {
        if (owner(k, k) == me)
            factor(block(k, k));
        BARRIER(global->meeting, processes)
        for (int at = k + 1; at < blocks; at++) {
            if (owner(k, at) == me)
                divide_row(block(k, at), block(k, k));
            if (owner(at, k) == me)
                divide_column(block(at, k), block(k, k));
        }
        BARRIER(global->meeting, processes)
        for (int row = k + 1; row < blocks; row++)
            for (int column = k + 1; column < blocks; column++)
                if (owner(row, column) == me)
                    subtract_product(block(row, column), block(row, k), block(k, column));
    }
    BARRIER(global->meeting, processes)
    if (me == 0)
        CLOCK(global->ended)
}

static double at(int row, int column) {
    return block(row / BLOCK, column / BLOCK)[row % BLOCK * BLOCK + column % BLOCK];
}

int main(int argc, char **argv) {
    MAIN_INITENV(, 0)
    int size = argc == 3 ? atoi(argv[2]) : 0;
    if (size < BLOCK || size % BLOCK != 0)
        return fprintf(stderr, "lu PROCESSES SIZE (a multiple of %d)\n", BLOCK), 2;
    processes = atoi(argv[1]);
    blocks = size / BLOCK;
    for (wide = 1; wide * wide * 4 <= processes && processes % (wide * 2) == 0; wide *= 2) {}
    global = (struct global *)G_MALLOC(sizeof(struct global));
    matrix = (double *)G_MALLOC((size_t)size * size * sizeof(double));
    LOCKINIT(global->number_lock)
    BARINIT(global->meeting, processes)
    CREATE(work, processes)
    WAIT_FOR_END(processes)
    double sum = 0.0, error = 0.0;
    for (size_t number = 0; number < (size_t)size * size; number++)
        sum += matrix[number];
    /* L times U is the matrix: some of its numbers. */
    for (int test = 0; test < 100; test++) {
        int row = test * 7919 % size, column = test * 104729 % size;
        double product = row <= column ? at(row, column) : 0.0;
        for (int k = 0; k < row && k <= column; k++)
            product += at(row, k) * at(k, column);
        double off = product - begin(row, column, size);
        error = off * off > error ? off * off : error;
    }
    if (!(error < 1e-12))
        return fprintf(stderr, "L U differs from the matrix by %g squared\n", error), 1;
    printf("lu %d: %a\n", size, sum);
    printf("%ld us\n", global->ended - global->began);
    MAIN_END
}
