/* Far memory: ./far tcp://LENDER:4711. Of 64 MiB, 8 MiB are on this machine; byway serve --lend 1G lends the rest, and sees ciphertext. */

#include <byway.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { BYTES = 64 << 20, RESIDENT = 8 << 20 };

static void check(int code, const char *what) {
    if (code < 0) {
        fprintf(stderr, "%s: %s\n", what, byway_error_text(code));
        exit(1);
    }
}

int main(int count, char **arguments) {
    if (count != 2) {
        fprintf(stderr, "usage: far ADDRESS\n");
        return 2;
    }
    const char *lenders[] = {arguments[1]};
    struct byway_far *far;
    check(byway_far_open(lenders, 1, BYTES, RESIDENT, BYWAY_FAR_NONE | BYWAY_FAR_ENCRYPT, NULL, &far), "open");
    uint64_t *words = (uint64_t *)byway_far_bytes(far);
    size_t all = byway_far_len(far) / sizeof *words;
    for (size_t at = 0; at < all; at++)
        words[at] = at * 2654435761u;
    for (int turn = 0; turn < 2; turn++)
        for (size_t at = 0; at < all; at++)
            if (words[at] != at * 2654435761u) {
                fprintf(stderr, "word %zu has other bits\n", at);
                return 1;
            }
    struct byway_far_counters counters;
    check(byway_far_statistics(far, &counters), "statistics");
    fprintf(stderr, "%llu pages fetched, %llu put, %llu unchanged\n", (unsigned long long)counters.fetched,
            (unsigned long long)counters.put, (unsigned long long)counters.unchanged);
    printf("%s\n", counters.fetched > 0 ? "64 MiB came back as they were written" : "nothing was far");
    byway_far_close(far);
    return 0;
}
