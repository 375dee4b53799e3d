/* Copies a file to standard output; says which call failed. Linked statically, it loads no library of others. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <errno.h>
#include <unistd.h>

int main(int count, char **arguments)
{
    char bytes[4096];
    int file = open(arguments[count - 1], O_RDONLY);
    if (file < 0) {
        fprintf(stderr, "open: %s\n", strerror(errno));
        return 1;
    }
    ssize_t len;
    while ((len = read(file, bytes, sizeof bytes)) > 0)
        if (write(1, bytes, len) != len) {
            fprintf(stderr, "write: %s\n", strerror(errno));
            return 2;
        }
    return 0;
}
