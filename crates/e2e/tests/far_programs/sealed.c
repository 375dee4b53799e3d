/* sealed ADDRESS ENCRYPT: fills 16 MiB, of which 2 MiB are here; prints "filled" when most of them are at the lender, and checks them when
   its input ends. */
#include <byway.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PAGE = 4096, PAGES = 4096, RESIDENT = 2 << 20 };
static const char SECRET[] = "of the program! ";

static void check(int is_so, const char *what) {
    if (!is_so) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}

int main(int count, char **arguments) {
    check(count == 3, "sealed ADDRESS ENCRYPT");
    const char *lenders[] = {arguments[1]};
    uint32_t class = BYWAY_FAR_NONE | (atoi(arguments[2]) ? BYWAY_FAR_ENCRYPT : 0);
    struct byway_far *far;
    check(byway_far_open(lenders, 1, PAGES * PAGE, RESIDENT, class, NULL, &far) == 0, "byway_far_open");
    check(byway_far_open(lenders, 1, PAGES * PAGE, RESIDENT, 4, NULL, &far) == BYWAY_E_INVALID, "a class that there is not");
    char *bytes = (char *)byway_far_bytes(far);
    for (uint64_t page = 0; page < PAGES; page++) {
        for (size_t at = 0; at < PAGE; at += 16) memcpy(bytes + page * PAGE + at, SECRET, 16);
        memcpy(bytes + page * PAGE, &page, sizeof page);
    }
    struct byway_far_counters counters = {0};
    while (counters.put < PAGES * 3 / 4) check(byway_far_statistics(far, &counters) == 0, "byway_far_statistics");
    printf("filled\n");
    fflush(stdout);
    while (getchar() != EOF) {}
    for (uint64_t page = 0; page < PAGES; page++) {
        check(!memcmp(bytes + page * PAGE, &page, sizeof page), "a page is another one");
        for (size_t at = 16; at < PAGE; at += 16) check(!memcmp(bytes + page * PAGE + at, SECRET, 16), "other bytes");
    }
    byway_far_close(far);
    return 0;
}
