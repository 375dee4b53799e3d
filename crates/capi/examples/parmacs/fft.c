/* The Fourier transform of SIZE x SIZE complex numbers in one row, in six steps: fft PROCESSES SIZE (a power of 2). Each process transforms rows
 * of a square, whose transposition moves all numbers between the processes. */

#include <math.h>

MAIN_ENV

struct number {
    double re, im;
};

struct global {
    LOCKDEC(number_lock)
    BARDEC(meeting)
    int next;
    long began, ended;
};

static struct global *global;
static struct number *numbers, *turned;
static int processes, size;

static struct number times(struct number a, struct number b) {
    struct number product = {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
    return product;
}

/* The root of unity to the power of part / whole. */
static struct number root(double part, double whole) {
    double angle = -2.0 * acos(-1.0) * part / whole;
    struct number power = {cos(angle), sin(angle)};
    return power;
}

static void transform(struct number *row) {
    for (int at = 0, other = 0; at < size; at++) {
        if (at < other) {
            struct number swapped = row[at];
            row[at] = row[other];
            row[other] = swapped;
        }
        int bit = size / 2;
        while (bit > 0 && other & bit) {
            other ^= bit;
            bit /= 2;
        }
        other |= bit;
    }
    for (int half = 1; half < size; half *= 2)
        for (int k = 0; k < half; k++) {
            struct number turn = root(k, 2.0 * half);
            for (int at = k; at < size; at += 2 * half) {
                struct number low = row[at], high = times(row[at + half], turn);
                row[at].re = low.re + high.re;
                row[at].im = low.im + high.im;
                row[at + half].re = low.re - high.re;
                row[at + half].im = low.im - high.im;
            }
        }
}

/* Rows first to end of to are columns of from, which is read in pieces of its rows. */
static void transpose(const struct number *from, struct number *to, int first, int end) {
    enum { PIECE = 8 };
    for (int column = first; column < end; column += PIECE)
        for (int row = 0; row < size; row++)
            for (int at = column; at < column + PIECE && at < end; at++)
                to[(size_t)at * size + row] = from[(size_t)row * size + at];
}

static struct number begin(size_t at) {
    struct number first = {(double)(at * 7919 % 1000) / 1000.0, (double)(at * 104729 % 1000) / 1000.0};
    return first;
}

static void work(void) {
    LOCK(global->number_lock)
    int me = global->next++;
    UNLOCK(global->number_lock)
    int first = size * me / processes, end = size * (me + 1) / processes;
    /* Memory belongs to the process that writes to it first. */
    for (size_t at = (size_t)first * size; at < (size_t)end * size; at++)
        numbers[at] = begin(at);
    BARRIER(global->meeting, processes)
    if (me == 0)
        CLOCK(global->began)
    transpose(numbers, turned, first, end);
    for (int row = first; row < end; row++) {
        struct number *own = turned + (size_t)row * size;
        transform(own);
        for (int column = 0; column < size; column++)
            own[column] = times(own[column], root((double)row * column, (double)size * size));
    }
    BARRIER(global->meeting, processes)
    transpose(turned, numbers, first, end);
    for (int row = first; row < end; row++)
        transform(numbers + (size_t)row * size);
    BARRIER(global->meeting, processes)
    transpose(numbers, turned, first, end);
    BARRIER(global->meeting, processes)
    if (me == 0)
        CLOCK(global->ended)
}

/* Whether one number of the result is right, by the sum that defines it. */
static int is_right(size_t place) {
    size_t count = (size_t)size * size;
    struct number sum = {0.0, 0.0};
    for (size_t at = 0; at < count; at++) {
        struct number part = times(begin(at), root((double)(at * place % count), (double)count));
        sum.re += part.re;
        sum.im += part.im;
    }
    return fabs(sum.re - turned[place].re) < 1e-6 && fabs(sum.im - turned[place].im) < 1e-6;
}

int main(int argc, char **argv) {
    MAIN_INITENV(, 0)
    size = argc == 3 ? atoi(argv[2]) : 0;
    if (size < 2 || (size & (size - 1)) != 0)
        return fprintf(stderr, "fft PROCESSES SIZE (a power of 2)\n"), 2;
    processes = atoi(argv[1]);
    size_t count = (size_t)size * size;
    global = (struct global *)G_MALLOC(sizeof(struct global));
    numbers = (struct number *)G_MALLOC(count * sizeof(struct number));
    turned = (struct number *)G_MALLOC(count * sizeof(struct number));
    LOCKINIT(global->number_lock)
    BARINIT(global->meeting, processes)
    CREATE(work, processes)
    WAIT_FOR_END(processes)
    struct number sum = {0.0, 0.0};
    for (size_t at = 0; at < count; at++) {
        sum.re += fabs(turned[at].re);
        sum.im += fabs(turned[at].im);
    }
    for (size_t place = 1; place < count; place = place * 5 + 3)
        if (!is_right(place))
            return fprintf(stderr, "number %zu of the transform is wrong\n", place), 1;
    printf("fft %d: %a %a\n", size, sum.re, sum.im);
    printf("%ld us\n", global->ended - global->began);
    MAIN_END
}
