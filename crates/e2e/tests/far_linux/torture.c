/* What Linux lets a program do with its memory, done to memory of which most is far. Each case fills pages with values of their own, does what
 * it is named for, and looks whether every page has the version that was written last. It prints "good", or what is wrong.
 *
 * torture CASE: the case. The memory is 24 MiB; run it with less. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096ul
#define PAGES 6144ul
#define FAIL(...) (printf(__VA_ARGS__), printf(" (errno %d)\n", errno), fflush(stdout), _exit(1))
#define CHECK(condition, ...) do { if (!(condition)) FAIL(__VA_ARGS__); } while (0)

extern char **environ;

static uint64_t value(uint64_t page, uint64_t version) { return (version << 40 | page) * 0x9e3779b97f4a7c15ull | 1; }

static void fill(char *at, uint64_t first, uint64_t count, uint64_t version) {
    for (uint64_t page = first; page < first + count; page++)
        for (unsigned word = 0; word < 512; word += 73)
            ((volatile uint64_t *)(at + page * PAGE))[word] = value(page, version) + word;
}

static void check(const char *at, uint64_t first, uint64_t count, uint64_t version, const char *what) {
    for (uint64_t page = first; page < first + count; page++)
        for (unsigned word = 0; word < 512; word += 73) {
            uint64_t got = ((const volatile uint64_t *)(at + page * PAGE))[word], want = value(page, version) + word;
            CHECK(got == want, "%s: page %lu word %u: %lx instead of %lx", what, page, word, got, want);
        }
}

static void check_zeroes(const char *at, uint64_t first, uint64_t count, const char *what) {
    for (uint64_t page = first; page < first + count; page++)
        for (unsigned word = 0; word < 512; word++)
            CHECK(!((const volatile uint64_t *)(at + page * PAGE))[word], "%s: page %lu is not zeroes", what, page);
}

static char *map(uint64_t bytes) {
    char *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(at != MAP_FAILED, "mmap");
    return at;
}

/* More than the limit: waits, 10 s at most, until the pager has seen so and moved pages out, which takes it longer on a busy machine. */
static char *filled(void) {
    char *at = map(PAGES * PAGE);
    fill(at, 0, PAGES, 1);
    unsigned char here[PAGES];
    for (int look = 0; look < 10000; look++) {
        CHECK(mincore(at, PAGES * PAGE, here) == 0, "mincore");
        if (memchr(here, 0, PAGES)) break;
        usleep(1000);
    }
    return at;
}

static void join(pid_t child, const char *what) {
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: status %x", what, status);
}

static void forks(void) {
    char *at = filled();
    for (int turn = 0; turn < 3; turn++) {
        pid_t child = fork();
        if (!child) {
            check(at, 0, PAGES / 2, turn + 1, "child");
            fill(at, 0, 500, 77);
            pid_t grandchild = fork();
            if (!grandchild) {
                check(at, 0, 500, 77, "grandchild");
                check(at, 500, PAGES - 500, turn + 1, "grandchild");
                _exit(0);
            }
            fill(at, 0, 500, 78);
            join(grandchild, "grandchild");
            check(at, 0, 500, 78, "child after");
            check(at, 500, PAGES - 500, turn + 1, "child after");
            _exit(0);
        }
        fill(at, 0, PAGES, turn + 2);
        join(child, "child");
        check(at, 0, PAGES, turn + 2, "parent");
    }
}

static void wiped(void) {
    char *at = filled();
    CHECK(madvise(at, PAGES / 2 * PAGE, MADV_WIPEONFORK) == 0, "MADV_WIPEONFORK");
    pid_t child = fork();
    if (!child) {
        check_zeroes(at, 0, PAGES / 2, "child");
        check(at, PAGES / 2, PAGES / 2, 1, "child");
        pid_t grandchild = fork();
        if (!grandchild) {
            check_zeroes(at, 0, PAGES / 2, "grandchild");
            check(at, PAGES / 2, PAGES / 2, 1, "grandchild");
            _exit(0);
        }
        join(grandchild, "grandchild");
        _exit(0);
    }
    join(child, "child");
    check(at, 0, PAGES, 1, "parent");
    CHECK(madvise(at, PAGES / 2 * PAGE, MADV_KEEPONFORK) == 0, "MADV_KEEPONFORK");
    CHECK(madvise(at, 100 * PAGE, MADV_DONTFORK) == 0, "MADV_DONTFORK");
    child = fork();
    if (!child) {
        check(at, 100, PAGES - 100, 1, "child with all");
        _exit(0);
    }
    join(child, "child with all");
    check(at, 0, PAGES, 1, "parent");
}

/* A child in a PID namespace of its own, where its number is that of another process outside. 77: the kernel refuses the namespace. */
static void namespaces(void) {
    char *at = filled();
    if (unshare(CLONE_NEWPID)) {
        fprintf(stderr, "no PID namespace can be made\n");
        exit(77);
    }
    pid_t child = fork();
    if (!child) {
        check(at, 0, 10, 1, "child");
        CHECK(madvise(at, PAGES / 2 * PAGE, MADV_WIPEONFORK) == 0, "MADV_WIPEONFORK");
        pid_t grandchild = fork();
        if (!grandchild) {
            check_zeroes(at, 0, PAGES / 2, "grandchild");
            check(at, PAGES / 2, PAGES / 2, 1, "grandchild");
            _exit(0);
        }
        join(grandchild, "grandchild");
        check(at, 0, PAGES, 1, "child");
        _exit(0);
    }
    join(child, "child");
    check(at, 0, PAGES, 1, "parent");
}

/* The arguments of the program that is executed lie in far memory. */
static void spawns(const char *self) {
    char *at = filled(), *text = at + 5 * PAGE;
    char *arguments[] = {at + 7 * PAGE, at + 8 * PAGE, at + 9 * PAGE, NULL};
    strcpy(text, self);
    strcpy(arguments[0], self);
    strcpy(arguments[1], "said");
    memset(arguments[2], 'x', 3000);
    arguments[2][3000] = 0;
    fill(at, 10, PAGES - 10, 2);
    pid_t child;
    CHECK(posix_spawn(&child, text, NULL, NULL, arguments, environ) == 0, "posix_spawn");
    join(child, "spawned");
    fill(at, 10, PAGES - 10, 3);
    child = vfork();
    if (!child) {
        execve(text, arguments, environ);
        _exit(9);
    }
    join(child, "after vfork");
    check(at, 10, PAGES - 10, 3, "parent");
    strcpy(arguments[1], "last");
    fill(at, 10, PAGES - 10, 4);
    execve(text, arguments, environ);
    FAIL("execve");
}

static void remaps(void) {
    char *at = filled(), *to = map(2 * PAGES * PAGE);
    char *grown = mremap(at, PAGES * PAGE, (PAGES + 500) * PAGE, MREMAP_MAYMOVE);
    CHECK(grown != MAP_FAILED, "mremap to grow");
    check(grown, 0, PAGES, 1, "grown");
    check_zeroes(grown, PAGES, 500, "grown");
    fill(grown, 0, PAGES, 2);
    char *moved = mremap(grown, PAGES * PAGE, PAGES * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to + 10 * PAGE);
    CHECK(moved == to + 10 * PAGE, "mremap to a place");
    check(moved, 0, PAGES, 2, "moved");
    char *shrunk = mremap(moved, PAGES * PAGE, (PAGES - 3000) * PAGE, 0);
    CHECK(shrunk == moved, "mremap to shrink");
    check(shrunk, 0, PAGES - 3000, 2, "shrunk");
    char *taken = mremap(shrunk, (PAGES - 3000) * PAGE, (PAGES - 3000) * PAGE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
    CHECK(taken != MAP_FAILED, "mremap that leaves the mapping");
    check(taken, 0, PAGES - 3000, 2, "taken");
    check_zeroes(shrunk, 0, PAGES - 3000, "left");
    fill(shrunk, 0, PAGES - 3000, 3);
    check(taken, 0, PAGES - 3000, 2, "taken later");
    check(shrunk, 0, PAGES - 3000, 3, "left later");
}

static void advises(void) {
    char *at = filled();
    int keeps[] = {MADV_COLD, MADV_PAGEOUT, MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_RANDOM, MADV_SEQUENTIAL, MADV_WILLNEED, MADV_MERGEABLE, MADV_DONTDUMP};
    for (unsigned index = 0; index < sizeof keeps / sizeof *keeps; index++) {
        (void)madvise(at, PAGES * PAGE, keeps[index]);
        check(at, index * 600, 600, 1, "advice that keeps");
    }
    check(at, 0, PAGES, 1, "advice that keeps");
    fill(at, 0, PAGES, 50);
    for (uint64_t page = 0; page < PAGES; page += 7) {
        CHECK(madvise(at + page * PAGE, 3 * PAGE <= (PAGES - page) * PAGE ? 3 * PAGE : PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED");
        check_zeroes(at, page, 1, "dropped");
    }
    for (uint64_t page = 3; page + 4 < PAGES; page += 7) check(at, page, 4, 50, "kept between");
    fill(at, 0, PAGES, 51);
    CHECK(madvise(at, PAGES / 2 * PAGE, MADV_FREE) == 0, "MADV_FREE");
    for (uint64_t page = 0; page < PAGES / 2; page++) {
        uint64_t got = *(volatile uint64_t *)(at + page * PAGE);
        CHECK(got == 0 || got == value(page, 51), "freed: page %lu has %lx", page, got);
    }
    fill(at, 0, PAGES / 2, 52);
    check(at, 0, PAGES / 2, 52, "used again");
    check(at, PAGES / 2, PAGES / 2, 51, "not freed");
}

/* Pages that are freed, and used again without a fault, count toward the limit: waits until no more than 18 MiB are here, 10 s at most. */
static void frees(void) {
    char *at = filled(), *reused = map(PAGES * PAGE);
    for (uint64_t first = 0; first < PAGES; first += 512) {
        fill(reused, first, 512, 1);
        CHECK(madvise(reused + first * PAGE, 512 * PAGE, MADV_FREE) == 0, "MADV_FREE");
        fill(reused, first, 512, 2);
    }
    unsigned long resident = 0;
    for (int look = 0; look < 10000; look++) {
        FILE *statm = fopen("/proc/self/statm", "r");
        CHECK(statm && fscanf(statm, "%*u %lu", &resident) == 1, "statm");
        fclose(statm);
        if (resident <= (18 << 20) / PAGE) break;
        usleep(1000);
    }
    CHECK(resident <= (18 << 20) / PAGE, "%lu pages stay", resident);
    check(reused, 0, PAGES, 2, "used again");
    check(at, 0, PAGES, 1, "beside it");
}

static void protects(void) {
    char *at = filled();
    CHECK(mprotect(at, PAGES * PAGE, PROT_READ) == 0, "mprotect");
    check(at, 0, PAGES, 1, "read-only");
    CHECK(mprotect(at, PAGES * PAGE, PROT_NONE) == 0, "mprotect");
    fill(map(PAGES * PAGE), 0, PAGES, 9);
    CHECK(mprotect(at, PAGES * PAGE, PROT_READ | PROT_WRITE) == 0, "mprotect");
    check(at, 0, PAGES, 1, "given back");
    for (uint64_t page = 0; page < PAGES; page += 64) CHECK(mprotect(at + page * PAGE, 32 * PAGE, PROT_READ) == 0, "mprotect");
    check(at, 0, PAGES, 1, "in parts");
    CHECK(mprotect(at, PAGES * PAGE, PROT_READ | PROT_WRITE) == 0, "mprotect");
    fill(at, 0, PAGES, 2);
    check(at, 0, PAGES, 2, "written after");
}

static void locks(void) {
    char *at = filled();
    struct rlimit all = {RLIM_INFINITY, RLIM_INFINITY};
    (void)setrlimit(RLIMIT_MEMLOCK, &all);
    CHECK(mlock(at, 500 * PAGE) == 0, "mlock");
    check(at, 0, PAGES, 1, "locked");
    unsigned char here[500];
    CHECK(mincore(at, 500 * PAGE, here) == 0, "mincore");
    for (int page = 0; page < 500; page++) CHECK(here[page] & 1, "locked page %d is not here", page);
    CHECK(munlock(at, 500 * PAGE) == 0, "munlock");
    fill(at, 0, PAGES, 2);
    check(at, 0, PAGES, 2, "unlocked");
}

static char *signalled;
static atomic_int signals;

static void on_signal(int signal, siginfo_t *info, void *context) {
    (void)context;
    uint64_t page = signal == SIGSEGV ? (uint64_t)((char *)info->si_addr - signalled) / PAGE : signals * 37 % PAGES;
    if (signal == SIGSEGV) mprotect(signalled + page * PAGE, PAGE, PROT_READ | PROT_WRITE);
    check(signalled, page, 1, 1, "in a handler");
    signals++;
}

static void handles(void) {
    signalled = filled();
    stack_t stack = {.ss_sp = map(64 * PAGE), .ss_size = 64 * PAGE};
    struct sigaction action = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    CHECK(sigaltstack(&stack, NULL) == 0 && sigaction(SIGUSR1, &action, NULL) == 0 && sigaction(SIGSEGV, &action, NULL) == 0, "sigaction");
    for (int turn = 0; turn < 500; turn++) {
        check(signalled, turn * 20 % (PAGES - 20), 20, 1, "between");
        raise(SIGUSR1);
    }
    CHECK(mprotect(signalled, PAGES * PAGE, PROT_NONE) == 0, "mprotect");
    for (uint64_t page = 0; page < PAGES; page += 25) check(signalled, page, 1, 1, "after a fault");
    CHECK(signals >= 740, "%d signals", signals);
}

static void others(void) {
    char *at = filled();
    int told[2];
    CHECK(pipe(told) == 0, "pipe");
    pid_t child = fork();
    if (!child) {
        char path[64], *got = map(PAGES * PAGE);
        sprintf(path, "/proc/%d/mem", getppid());
        int memory = open(path, O_RDWR);
        CHECK(memory >= 0, "%s", path);
        /* The kernel waits for no page on this way: what is far is refused. */
        for (uint64_t page = 0; page < PAGES; page++)
            if (pread(memory, got + page * PAGE, PAGE, (off_t)(uintptr_t)(at + page * PAGE)) == (ssize_t)PAGE)
                check(got, page, 1, 1, "/proc/PID/mem");
            else
                CHECK(errno == EIO, "read of /proc/PID/mem");
        struct iovec into = {got, PAGES * PAGE}, from = {at, PAGES * PAGE};
        memset(got, 0, PAGES * PAGE);
        CHECK(process_vm_readv(getppid(), &into, 1, &from, 1, 0) == (ssize_t)(PAGES * PAGE), "process_vm_readv");
        check(got, 0, PAGES, 1, "process_vm_readv");
        fill(got, 0, PAGES, 2);
        CHECK(process_vm_writev(getppid(), &into, 1, &from, 1, 0) == (ssize_t)(PAGES * PAGE), "process_vm_writev");
        _exit(0);
    }
    join(child, "reader");
    check(at, 0, PAGES, 2, "written by another process");
}

/* A tracer gets EIO where a page is far, for reads and writes, and the page is left as it is. */
static void traced(void) {
    char *at = filled();
    pid_t parent = getpid(), child = fork();
    if (!child) {
        unsigned read = 0, refused = 0;
        int status;
        CHECK(ptrace(PTRACE_SEIZE, parent, 0, 0) == 0 && ptrace(PTRACE_INTERRUPT, parent, 0, 0) == 0, "attach");
        CHECK(waitpid(parent, &status, __WALL) == parent && WIFSTOPPED(status), "stop");
        for (uint64_t page = 0; page < PAGES; page++) {
            errno = 0;
            uint64_t got = (uint64_t)ptrace(PTRACE_PEEKDATA, parent, at + page * PAGE, 0);
            if (errno) {
                CHECK(errno == EIO, "PTRACE_PEEKDATA");
                CHECK(ptrace(PTRACE_POKEDATA, parent, at + page * PAGE, 7) == -1 && errno == EIO, "PTRACE_POKEDATA");
                refused++;
            } else {
                CHECK(got == value(page, 1), "page %lu: %lx for the tracer", page, got);
                read++;
            }
        }
        CHECK(ptrace(PTRACE_DETACH, parent, 0, 0) == 0, "detach");
        CHECK(read > 0 && refused > 0, "%u pages read, %u refused", read, refused);
        _exit(0);
    }
    join(child, "tracer");
    check(at, 0, PAGES, 1, "traced");
}

/* Ends with a core file; says where its pages are. */
static void dumps(const char *folder) {
    char *at = filled();
    struct rlimit all = {RLIM_INFINITY, RLIM_INFINITY};
    CHECK(setrlimit(RLIMIT_CORE, &all) == 0, "RLIMIT_CORE");
    CHECK(chdir(folder) == 0, "%s", folder);
    printf("%lx %lu\n", (unsigned long)at, PAGES);
    fflush(stdout);
    abort();
}

static void directs(const char *folder) {
    char path[4096], *at = filled();
    snprintf(path, sizeof path, "%s/direct", folder);
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_DIRECT, 0600);
    CHECK(file >= 0, "open with O_DIRECT");
    for (uint64_t page = 0; page < PAGES; page += 512)
        CHECK(pwrite(file, at + page * PAGE, 512 * PAGE, (off_t)(page * PAGE)) == 512 * PAGE, "direct write");
    fill(at, 0, PAGES, 2);
    for (uint64_t page = 0; page < PAGES; page += 512)
        CHECK(pread(file, at + page * PAGE, 512 * PAGE, (off_t)(page * PAGE)) == 512 * PAGE, "direct read");
    check(at, 0, PAGES, 1, "read directly");
}

/* io_uring by hand: reads of a file into far memory, also by registered (pinned) buffers. 77: the kernel refuses io_uring. */
static void rings(const char *folder) {
    char path[4096], *at = filled();
    snprintf(path, sizeof path, "%s/ring", folder);
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(file >= 0 && write(file, at, PAGES * PAGE) == (ssize_t)(PAGES * PAGE), "write");
    struct io_uring_params about = {0};
    int ring = (int)syscall(__NR_io_uring_setup, 64, &about);
    if (ring < 0) _exit(77);
    size_t bytes = about.sq_off.array + about.sq_entries * 4, completed = about.cq_off.cqes + about.cq_entries * sizeof(struct io_uring_cqe);
    char *sq = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
    char *cq = mmap(NULL, completed, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_CQ_RING);
    struct io_uring_sqe *entries = mmap(NULL, about.sq_entries * sizeof *entries, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);
    struct iovec fixed = {at, 2048 * PAGE};
    CHECK(syscall(__NR_io_uring_register, ring, IORING_REGISTER_BUFFERS, &fixed, 1) == 0, "registered buffers");
    for (uint64_t version = 2; version < 4; version++) {
        fill(at, 0, PAGES, version);
        for (uint64_t page = 0; page < PAGES; page += 128) {
            unsigned tail = *(volatile unsigned *)(sq + about.sq_off.tail), slot = tail & (about.sq_entries - 1);
            int is_fixed = page + 128 <= 2048;
            entries[slot] = (struct io_uring_sqe){.opcode = is_fixed ? IORING_OP_READ_FIXED : IORING_OP_READ, .fd = file,
                .off = page * PAGE, .addr = (uintptr_t)(at + page * PAGE), .len = 128 * PAGE, .flags = version == 3 ? IOSQE_ASYNC : 0};
            ((unsigned *)(sq + about.sq_off.array))[slot] = slot;
            __atomic_store_n((unsigned *)(sq + about.sq_off.tail), tail + 1, __ATOMIC_RELEASE);
            CHECK(syscall(__NR_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 1, "io_uring_enter");
            unsigned head = *(volatile unsigned *)(cq + about.cq_off.head);
            struct io_uring_cqe *done = &((struct io_uring_cqe *)(cq + about.cq_off.cqes))[head & (about.cq_entries - 1)];
            CHECK(done->res == 128 * (int)PAGE, "a ring's read gave %d", done->res);
            __atomic_store_n((unsigned *)(cq + about.cq_off.head), head + 1, __ATOMIC_RELEASE);
        }
        check(at, 0, PAGES, 1, "read by a ring");
    }
}

static char *shared;

/* Pages that came back to be read are written in each way that there is: none of these writes is lost when the pages leave again. */
static void rewrites(const char *folder) {
    enum { BLOCK = 32 };
    char *at = filled(), name[4096], *other = map(BLOCK * PAGE);
    snprintf(name, sizeof name, "%s/pages", folder);
    int file = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(file >= 0, "open");
    for (uint64_t version = 2; version < 6; version++) {
        check(at, 0, PAGES, version - 1, "read once");
        for (uint64_t first = 0; first < PAGES; first += BLOCK) {
            check(at, first, BLOCK, version - 1, "read again");
            char *block = at + first * PAGE, *moved;
            switch ((first / BLOCK + version) % 5) {
            case 0:
                fill(at, first, BLOCK, version);
                break;
            case 1:
                fill(other - first * PAGE, first, BLOCK, version);
                CHECK(pwrite(file, other, BLOCK * PAGE, 0) == BLOCK * PAGE, "pwrite");
                CHECK(pread(file, block, BLOCK * PAGE, 0) == BLOCK * PAGE, "pread");
                break;
            case 2: {
                pid_t child = fork();
                if (!child) {
                    fill(at, first, BLOCK, 99);
                    check(at, first, BLOCK, 99, "child");
                    _exit(0);
                }
                fill(at, first, BLOCK, version);
                join(child, "child");
                break;
            }
            case 3:
                moved = mremap(block, BLOCK * PAGE, BLOCK * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, other);
                CHECK(moved == other, "mremap");
                fill(other - first * PAGE, first, BLOCK, version);
                CHECK(mremap(other, BLOCK * PAGE, BLOCK * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, block) == block, "mremap back");
                other = map(BLOCK * PAGE);
                break;
            default:
                CHECK(mprotect(block, BLOCK * PAGE, PROT_READ) == 0, "mprotect");
                check(at, first, BLOCK, version - 1, "read alone");
                CHECK(mprotect(block, BLOCK * PAGE, PROT_READ | PROT_WRITE) == 0, "mprotect");
                fill(at, first, BLOCK, version);
            }
        }
    }
    check(at, 0, PAGES, 5, "at last");
}

static void *checks_some(void *number) {
    uint64_t first = (uint64_t)(uintptr_t)number * 40 % (PAGES - 40);
    char on_stack[8 * PAGE];
    memset(on_stack, 5, sizeof on_stack);
    check(shared, first, 40, 1, "thread");
    for (unsigned at = 0; at < sizeof on_stack; at += 100) CHECK(((volatile char *)on_stack)[at] == 5, "a stack");
    return NULL;
}

/* Stacks of each kind: the C library's own, and one behind a guard that is no mapping of its own. */
static void threads(void) {
    shared = filled();
    for (uintptr_t turn = 0; turn < 60; turn++) {
        pthread_t running[8];
        char *stacks = map(8 * 64 * PAGE);
        for (int index = 0; index < 8; index++) {
            pthread_attr_t attributes;
            pthread_attr_init(&attributes);
            if (turn % 2) {
                char *stack = stacks + index * 64 * PAGE;
                (void)madvise(stack, PAGE, 102 /* MADV_GUARD_INSTALL */);
                CHECK(pthread_attr_setstack(&attributes, stack + PAGE, 63 * PAGE) == 0, "stack");
            }
            CHECK(pthread_create(&running[index], &attributes, checks_some, (void *)(turn * 8 + index)) == 0, "pthread_create");
        }
        for (int index = 0; index < 8; index++) CHECK(pthread_join(running[index], NULL) == 0, "pthread_join");
        munmap(stacks, 8 * 64 * PAGE);
    }
    check(shared, 0, PAGES, 1, "at the end");
}

/* A program may close whatever it did not open, and use the numbers: nothing but its own bytes are in its files. */
static void descriptors(const char *folder) {
    char path[4096], *at = filled();
    for (int fd = 3; fd < 1024; fd++) {
        char name[64], to[64] = "";
        snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
        CHECK(readlink(name, to, sizeof to - 1) < 0 || !strstr(to, "userfaultfd"), "descriptor %d is the helper's", fd);
    }
    CHECK(syscall(__NR_close_range, 3, ~0u, 0) == 0, "close_range");
    snprintf(path, sizeof path, "%s/own", folder);
    int own = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600), pipes[2];
    CHECK(own >= 0 && write(own, "own", 3) == 3 && pipe(pipes) == 0, "own file");
    struct rlimit many = {2048, 2048};
    (void)setrlimit(RLIMIT_NOFILE, &many);
    for (int fd = 10; fd < 1000; fd++) CHECK(dup2(fd % 2 ? own : pipes[fd / 2 % 2], fd) == fd, "dup2");
    for (uint64_t version = 2; version < 4; version++) {
        check(at, 0, PAGES, version - 1, "after the descriptors have gone");
        fill(at, 0, PAGES, version);
    }
    CHECK(lseek(own, 0, SEEK_END) == 3, "somebody wrote to the program's file");
    fcntl(pipes[0], F_SETFL, O_NONBLOCK);
    char byte;
    CHECK(read(pipes[0], &byte, 1) < 0 && errno == EAGAIN, "somebody wrote to the program's pipe");
}

static void tebibyte(void) {
    char *at = map(1ul << 40), *before = filled();
    for (uint64_t part = 0; part < 64; part++) fill(at + (part << 34), 0, 50, part + 1);
    check(before, 0, PAGES, 1, "beside it");
    for (uint64_t part = 0; part < 64; part++) check(at + (part << 34), 0, 50, part + 1, "of a tebibyte");
    CHECK(madvise(at, 1ul << 40, MADV_DONTNEED) == 0, "MADV_DONTNEED");
    for (uint64_t part = 0; part < 64; part++) check_zeroes(at + (part << 34), 0, 50, "of a tebibyte, dropped");
    CHECK(munmap(at, 1ul << 40) == 0, "munmap");
    check(before, 0, PAGES, 1, "beside it");
}

/* A child that lives on alone: prints "filled", waits until its input ends, checks. For tests that end the pager meanwhile. */
static void waits(void) {
    char *at = filled(), byte;
    pid_t child = fork();
    if (!child) {
        close(STDOUT_FILENO);
        CHECK(dup2(STDERR_FILENO, STDOUT_FILENO) == STDOUT_FILENO, "dup2");
    }
    if (child) {
        printf("filled\n");
        fflush(stdout);
    }
    CHECK(read(STDIN_FILENO, &byte, 1) >= 0, "read");
    check(at, 0, PAGES, 1, child ? "parent" : "child");
    if (!child) _exit(0);
    join(child, "child");
}

int main(int count, char **arguments) {
    const char *name = count > 1 ? arguments[1] : "", *folder = count > 2 ? arguments[2] : ".";
    if (!strcmp(name, "said") || !strcmp(name, "last")) {
        CHECK(count == 3 && strlen(folder) == 3000 && strspn(folder, "x") == 3000, "arguments");
        check(filled(), 0, PAGES, 1, "executed");
        if (!strcmp(name, "last")) printf("good\n");
        return 0;
    }
    const struct { const char *name; void (*plain)(void); void (*with)(const char *); const char *argument; } cases[] = {
        {"forks", forks, NULL, NULL}, {"wiped", wiped, NULL, NULL}, {"namespaces", namespaces, NULL, NULL}, {"spawns", NULL, spawns, arguments[0]}, {"remaps", remaps, NULL, NULL},
        {"advises", advises, NULL, NULL}, {"frees", frees, NULL, NULL}, {"protects", protects, NULL, NULL}, {"locks", locks, NULL, NULL}, {"handles", handles, NULL, NULL},
        {"others", others, NULL, NULL}, {"directs", NULL, directs, folder}, {"rings", NULL, rings, folder}, {"rewrites", NULL, rewrites, folder}, {"threads", threads, NULL, NULL},
        {"descriptors", NULL, descriptors, folder}, {"tebibyte", tebibyte, NULL, NULL}, {"waits", waits, NULL, NULL},
        {"traced", traced, NULL, NULL}, {"dumps", NULL, dumps, folder},
    };
    for (unsigned index = 0; index < sizeof cases / sizeof *cases; index++)
        if (!strcmp(name, cases[index].name)) {
            if (cases[index].plain) cases[index].plain(); else cases[index].with(cases[index].argument);
            printf("good\n");
            return 0;
        }
    fprintf(stderr, "no such case: %s\n", name);
    return 2;
}
