/* Processes with descriptors, locks, umasks and threads, on files of a share. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 16, CHILDREN = 40, BYTES = 4096 };

static const char *path;
static pthread_barrier_t ready;

static int fails(const char *what) {
    printf("%s: %s\n", what, strerror(errno));
    fflush(stdout);
    return 1;
}

/* A vfork child has a umask of its own. */
static int masks(void) {
    umask(022);
    int file = open(path, O_WRONLY | O_CREAT, 0666);
    if (file < 0) return fails("open");
    pid_t child = vfork();
    if (child == 0) {
        umask(0);
        _exit(0);
    }
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child) return fails("vfork");
    char second[4096];
    snprintf(second, sizeof second, "%s.second", path);
    struct stat stat;
    if (open(second, O_WRONLY | O_CREAT, 0666) < 0 || lstat(second, &stat) != 0) return fails("second file");
    printf("mode %03o\n", stat.st_mode & 0777);
    return 0;
}

/* close_range releases the process's locks, as each close does. */
static int locks(void) {
    int file = open(path, O_RDWR | O_CREAT, 0600), again = open(path, O_RDWR);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    if (file < 0 || again < 0 || fcntl(file, F_SETLK, &lock) != 0) return fails("lock");
    if (close_range(again, again, 0) != 0) return fails("close_range");
    pid_t child = fork();
    if (child == 0) {
        int mine = open(path, O_RDWR);
        _exit(mine >= 0 && fcntl(mine, F_SETLK, &lock) == 0 ? 0 : 1);
    }
    int status;
    if (waitpid(child, &status, 0) != child) return fails("wait");
    printf("another process gets the lock: %s\n", status == 0 ? "yes" : "no");
    return 0;
}

/* More descriptors than lie below those of the library. */
static int numbers(void) {
    struct rlimit limit = {4096, 4096};
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return fails("setrlimit");
    int last = -1;
    for (int number = 0; number < 3600; number++)
        if ((last = dup(2)) < 0) return fails("dup");
    char bytes[BYTES];
    int file = open(path, O_RDONLY);
    if (file < 0 || pread(file, bytes, sizeof bytes, 0) != BYTES) return fails("first read");
    /* 3, so that the file at the end keeps its number. */
    if (close_range(3, file - 1, 0) != 0 || close_range(file + 1, ~0U, 0) != 0) return fails("close_range");
    if (pread(file, bytes, sizeof bytes, 0) != BYTES) return fails("read after close_range");
    printf("read after close_range, %d descriptors\n", last >= 3600 ? 3600 : last);
    return 0;
}

static void *read_once(void *at) {
    char bytes[BYTES];
    pthread_barrier_wait(&ready);
    int file = open(path, O_RDONLY);
    *(int *)at = file >= 0 && pread(file, bytes, sizeof bytes, 0) == BYTES ? 0 : errno ? errno : -1;
    return NULL;
}

/* A child whose first calls on the share are made by many threads at once. */
static int threads(void) {
    char bytes[BYTES];
    int file = open(path, O_RDONLY), failed = 0;
    if (file < 0 || read(file, bytes, sizeof bytes) != BYTES) return fails("read");
    for (int round = 0; round < CHILDREN; round++) {
        pid_t child = fork();
        if (child == 0) {
            pthread_t thread[THREADS];
            int error[THREADS], sum = 0;
            pthread_barrier_init(&ready, NULL, THREADS);
            for (int n = 0; n < THREADS; n++) pthread_create(&thread[n], NULL, read_once, &error[n]);
            for (int n = 0; n < THREADS; n++) {
                pthread_join(thread[n], NULL);
                sum += error[n] != 0;
            }
            _exit(sum);
        }
        int status;
        if (child < 0 || waitpid(child, &status, 0) != child) return fails("fork");
        failed += status != 0;
    }
    printf("%d children failed\n", failed);
    return 0;
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    path = arguments[2];
    if (strcmp(arguments[1], "masks") == 0) return masks();
    if (strcmp(arguments[1], "locks") == 0) return locks();
    if (strcmp(arguments[1], "numbers") == 0) return numbers();
    return threads();
}
