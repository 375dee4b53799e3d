/* System calls that no library stands before, on a file of a share; and mappings of it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static const char *name(long result) {
    if (result >= 0) return "success";
    switch (errno) {
    case EBADF: return "EBADF";
    case EPERM: return "EPERM";
    case ENODEV: return "ENODEV";
    default: return "another error";
    }
}

int main(int count, char **arguments) {
    char bytes[16];
    int file = open(arguments[1], O_RDWR | O_CREAT, 0600);
    if (count != 2 || file < 0 || write(file, "hello", 5) != 5) return 1;
    printf("read %s\n", name(syscall(SYS_read, file, bytes, sizeof bytes)));
    printf("write %s\n", name(syscall(SYS_write, file, "lost", 4)));
    void *shared = mmap(NULL, 5, PROT_READ, MAP_SHARED, file, 0);
    printf("shared mmap %s\n", shared == MAP_FAILED ? name(-1) : "success");
    char *private = mmap(NULL, 5, PROT_READ, MAP_PRIVATE, file, 0);
    if (private == MAP_FAILED) return 2;
    printf("private mmap %.5s\n", private);
    char *anonymous = mmap(NULL, 5, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, file, 0);
    if (anonymous == MAP_FAILED) return 4;
    printf("anonymous mmap %d\n", anonymous[0]);
    if (close(file) != 0) return 3;
    printf("closed %s\n", name(read(file, bytes, 1)));
    return 0;
}
