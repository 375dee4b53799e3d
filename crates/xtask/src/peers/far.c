// The program of `peers far`: touches memory, and says what that took. Every page is checked.
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef UFFDIO_MOVE
struct uffdio_move {
    __u64 dst, src, len, mode;
    __s64 move;
};
#define UFFDIO_MOVE _IOWR(UFFDIO, 0x05, struct uffdio_move)
#define UFFD_FEATURE_MOVE (1 << 16)
#endif

enum { PAGE = 4096, WORDS = PAGE / 8, SAMPLES = 1 << 20 };

// A touch that takes longer was a fault.
static const double FAULT_US = 3;

static volatile unsigned long *pages;
static size_t count;

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void *map(size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) fail("mmap");
    madvise(at, bytes, MADV_NOHUGEPAGE);
    return at;
}

static void check(size_t page) {
    if (pages[page * WORDS] != page + 1 || pages[page * WORDS + WORDS - 1] != ~page) {
        fprintf(stderr, "page %zu has other bytes than were written\n", page);
        exit(2);
    }
}

static void write_all(void) {
    for (size_t page = 0; page < count; page++) {
        pages[page * WORDS] = page + 1;
        pages[page * WORDS + WORDS - 1] = ~page;
    }
}

static unsigned long next(unsigned long *state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

static int by_size(const void *a, const void *b) {
    double one = *(const double *)a, other = *(const double *)b;
    return one < other ? -1 : one > other;
}

static void print_percentiles(double *samples, size_t taken) {
    if (taken == 0) fail("no touch was a fault");
    qsort(samples, taken, sizeof(double), by_size);
    printf("%.2f %.2f\n", samples[taken / 2], samples[taken * 99 / 100]);
}

// The second scan in order: bytes per microsecond.
static void scan(void) {
    double began = 0;
    for (int turn = 0; turn < 2; turn++) {
        began = now_us();
        for (size_t page = 0; page < count; page++) check(page);
    }
    printf("%.2f 0\n", count * PAGE / (now_us() - began));
}

static double end_us;

// Touches of pages at random, each of which is then written to if `writes`.
static void sample(int writes, unsigned long state, double *samples, size_t *taken) {
    while (now_us() < end_us && *taken < SAMPLES) {
        size_t page = next(&state) % count;
        double began = now_us();
        if (writes) pages[page * WORDS + 1 + state % (WORDS - 2)] = state;
        check(page);
        double took = now_us() - began;
        if (took > FAULT_US) samples[(*taken)++] = took;
    }
}

static void faults(double seconds) {
    static double samples[SAMPLES];
    size_t taken = 0;
    end_us = now_us() + seconds * 1e6;
    sample(0, 88172645463325252ul, samples, &taken);
    print_percentiles(samples, taken);
}

static void *write_on(void *seed) {
    static double samples[SAMPLES];
    for (size_t taken = 0; now_us() < end_us; taken = 0) sample(1, (unsigned long)seed, samples, &taken);
    return NULL;
}

// Faults of a thread that writes, beside one that does the same: each page that comes sends a changed one away, as fast as that goes.
static void writes(double seconds) {
    static double samples[SAMPLES];
    size_t taken = 0;
    pthread_t other;
    end_us = now_us() + seconds * 1e6;
    if (pthread_create(&other, NULL, write_on, (void *)7919l)) fail("pthread_create");
    sample(1, 88172645463325252ul, samples, &taken);
    pthread_join(other, NULL);
    print_percentiles(samples, taken);
}

static void *touch(void *seed) {
    unsigned long state = (unsigned long)seed, touched = 0;
    for (; now_us() < end_us; touched++) check(next(&state) % count);
    return (void *)touched;
}

// Touches at random by so many threads: a second.
static void threads(int number, double seconds) {
    pthread_t all[64];
    unsigned long sum = 0;
    end_us = now_us() + seconds * 1e6;
    for (long i = 0; i < number; i++)
        if (pthread_create(&all[i], NULL, touch, (void *)(i * 7919 + 88172645463325252l))) fail("pthread_create");
    for (int i = 0; i < number; i++) {
        void *touched;
        pthread_join(all[i], &touched);
        sum += (unsigned long)touched;
    }
    printf("%.0f 0\n", sum / seconds);
}

static int userfault;
static char *away, *home;

// Answers faults by moving pages in, and never sleeps.
static void *answer(void *nothing) {
    while (!nothing) {
        struct uffd_msg message;
        if (read(userfault, &message, sizeof message) != sizeof message) continue;
        unsigned long at = message.arg.pagefault.address & ~(PAGE - 1ul);
        struct uffdio_move move = {.dst = at, .src = (unsigned long)away + (at - (unsigned long)home), .len = PAGE};
        if (ioctl(userfault, UFFDIO_MOVE, &move)) fail("UFFDIO_MOVE");
    }
    return nothing;
}

// Faults that another thread of the process answers from its own memory.
static void local(void) {
    static double samples[SAMPLES];
    size_t bytes = 4096ul * PAGE, taken = 0;
    pthread_t thread;
    userfault = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    struct uffdio_api api = {.api = UFFD_API, .features = UFFD_FEATURE_MOVE};
    if (userfault < 0 || ioctl(userfault, UFFDIO_API, &api)) fail("userfaultfd");
    away = map(bytes), home = map(bytes);
    memset(away, 1, bytes);
    struct uffdio_register watched = {.range = {(unsigned long)home, bytes}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    if (ioctl(userfault, UFFDIO_REGISTER, &watched)) fail("UFFDIO_REGISTER");
    if (pthread_create(&thread, NULL, answer, NULL)) fail("pthread_create");
    for (size_t page = 0; page < 4096; page++) {
        double began = now_us();
        if (((volatile char *)home)[page * PAGE] != 1) fail("other bytes");
        samples[taken++] = now_us() - began;
    }
    print_percentiles(samples, taken);
}

int main(int arguments, char **words) {
    if (arguments == 2 && !strcmp(words[1], "local")) return local(), 0;
    if (arguments != 5) return fprintf(stderr, "local, or scan|faults|writes|threads MIB THREADS SECONDS\n"), 1;
    count = strtoul(words[2], NULL, 10) << 8;
    pages = map(count * PAGE);
    write_all();
    double seconds = strtod(words[4], NULL);
    if (!strcmp(words[1], "scan")) scan();
    if (!strcmp(words[1], "faults")) faults(seconds);
    if (!strcmp(words[1], "writes")) writes(seconds);
    if (!strcmp(words[1], "threads")) threads(atoi(words[3]), seconds);
    return 0;
}
