/* A ping-pong with blocking sockets: what a program does that uses no library. One process asks, another answers.
 * pingpong tcp|unix ASK_BYTES ANSWER_BYTES MILLISECONDS: prints operations, median in us, CPU of both in us per operation. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static double cpu_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static int all(int fd, char *buffer, size_t bytes, int sends) {
    size_t done = 0;
    while (done < bytes) {
        ssize_t n = sends ? send(fd, buffer + done, bytes - done, 0) : recv(fd, buffer + done, bytes - done, 0);
        if (n <= 0) return -1;
        done += n;
    }
    return 0;
}

static int by_time(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static void tcp_pair(int fds[2]) {
    int on = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    if (bind(listener, (struct sockaddr *)&at, len) || listen(listener, 1)) exit(1);
    getsockname(listener, (struct sockaddr *)&at, &len);
    fds[0] = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fds[0], (struct sockaddr *)&at, len)) exit(1);
    fds[1] = accept(listener, 0, 0);
    for (int i = 0; i < 2; i++) setsockopt(fds[i], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    close(listener);
}

int main(int count, char **words) {
    if (count != 5) return 2;
    size_t ask = atol(words[2]), answer = atol(words[3]);
    double end, spent;
    int fds[2];
    if (strcmp(words[1], "tcp") == 0) tcp_pair(fds);
    else if (socketpair(AF_UNIX, SOCK_STREAM, 0, fds)) return 1;
    char *buffer = calloc(1, ask > answer ? ask : answer);
    pid_t child = fork();
    if (child == 0) {
        close(fds[0]);
        while (all(fds[1], buffer, ask, 0) == 0 && all(fds[1], buffer, answer, 1) == 0) {}
        _exit(0);
    }
    close(fds[1]);
    size_t most = 1 << 22, done = 0;
    float *times = malloc(most * sizeof *times);
    spent = cpu_us();
    end = now_us() + atof(words[4]) * 1e3;
    for (double begun = now_us(); begun < end && done < most; done++) {
        if (all(fds[0], buffer, ask, 1) || all(fds[0], buffer, answer, 0)) return 1;
        double over = now_us();
        times[done] = over - begun;
        begun = over;
    }
    spent = cpu_us() - spent;
    close(fds[0]);
    struct rusage usage;
    wait4(child, 0, 0, &usage);
    double theirs = usage.ru_utime.tv_sec * 1e6 + usage.ru_utime.tv_usec + usage.ru_stime.tv_sec * 1e6 +
                    usage.ru_stime.tv_usec;
    qsort(times, done, sizeof *times, by_time);
    printf("%zu %.3f %.3f\n", done, times[done / 2], (spent + theirs) / done);
    return 0;
}
