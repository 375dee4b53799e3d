/* Says whether the kernel started this program with AT_SECURE, and fills 24 MiB. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>

int main(void) {
    size_t bytes = 24 << 20;
    char *filled = malloc(bytes);
    if (!filled) return 1;
    memset(filled, 7, bytes);
    for (size_t at = 0; at < bytes; at += 4096)
        if (filled[at] != 7) return 2;
    printf("secure %lu\n", getauxval(AT_SECURE));
    return 0;
}
