/* peak BEGIN ALL: maps ALL MiB, fills BEGIN MiB of them, waits until the pager is told of missing pages there (the mapping has the flag `um`
   in smaps), fills the rest as fast as it can, and reads all of it twice. Prints the kernel's count of its most resident memory, in KiB. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHECK(what, ...) do { if (!(what)) { fprintf(stderr, __VA_ARGS__); fprintf(stderr, "\n"); exit(1); } } while (0)

static int is_watched(const void *at) {
    char line[512];
    int is_it = 0, found = 0;
    FILE *file = fopen("/proc/self/smaps", "r");
    CHECK(file, "smaps");
    while (!found && fgets(line, sizeof line, file)) {
        unsigned long start, end;
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2) is_it = start <= (uintptr_t)at && (uintptr_t)at < end;
        found = is_it && !strncmp(line, "VmFlags:", 8) && strstr(line, " um");
    }
    fclose(file);
    return found;
}

static long most_resident(void) {
    char line[256];
    long kib = -1;
    FILE *file = fopen("/proc/self/status", "r");
    CHECK(file, "status");
    while (fgets(line, sizeof line, file)) sscanf(line, "VmHWM: %ld", &kib);
    fclose(file);
    return kib;
}

static void fill(uint64_t *at, size_t from, size_t to) {
    for (size_t word = from / 8; word < to / 8; word++) at[word] = word * 0x9e3779b97f4a7c15;
}

int main(int count, char **arguments) {
    CHECK(count == 3, "peak BEGIN ALL");
    size_t begin = strtoul(arguments[1], NULL, 10) << 20, all = strtoul(arguments[2], NULL, 10) << 20;
    uint64_t *at = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED, "mmap");
    fill(at, 0, begin);
    for (int look = 0; !is_watched(at); look++) {
        CHECK(look < 10000, "the pager does not look");
        usleep(1000);
    }
    fill(at, begin, all);
    for (int turn = 0; turn < 2; turn++)
        for (size_t word = 0; word < all / 8; word++)
            CHECK(at[word] == word * 0x9e3779b97f4a7c15, "word %zu is %lx", word, at[word]);
    printf("%ld\n", most_resident());
    return 0;
}
