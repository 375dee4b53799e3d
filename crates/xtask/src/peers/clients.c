/* What `byway bench fabric` does where the server drives, with epoll and sockets by hand: clients have blocks of 64 KiB to write, a
 * server with few frames asks for a block when it has one, looks at every word, and copies it into a file in memory.
 * clients CLIENTS PROCESSES FRAMES AHEAD MILLISECONDS: prints blocks, seconds, CPU in us of the server and of all clients, and
 * Jain's index of fairness. Two connections for each client, for messages and for payloads; one process for the server. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK = 64 << 10, PAGE = 4096, CLIENTS_MAX = 1024, PROCESSES_MAX = 16, EVENTS = 16 };
static const uint64_t STEP = 0x9e3779b97f4a7c15ULL, DATA = 128 << 20, FILE_BYTES = 64 << 20, WARM_UP_US = 500000;

/* Of one client, at either end. */
struct client {
    int control, data;
    uint64_t number, sequence;
    size_t got;   /* Of the block that is under way. */
    char *block;  /* Null where none is. */
    char message[16];
    size_t message_got;
};

/* What all processes see. */
struct shared {
    volatile int ready, begun;
    volatile uint64_t blocks[CLIENTS_MAX];
};

static struct shared *shared;
static uint64_t blocks_each;

static void fail(const char *what) {
    perror(what);
    _exit(1);
}

static uint64_t seed(uint64_t client, uint64_t number) {
    uint64_t word = ((client << 40) ^ number) + STEP;
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9ULL;
    word = (word ^ word >> 27) * 0x94d049bb133111ebULL;
    return word ^ word >> 31;
}

static void fill(char *block, uint64_t client, uint64_t place) {
    uint64_t word = seed(client, place), *words = (uint64_t *)block;
    for (size_t i = 0; i < BLOCK / 8; i++, word += STEP) words[i] = word;
}

static void stamp(char *block, uint64_t client, uint64_t sequence) {
    for (size_t page = 0; page < BLOCK / PAGE; page++) *(uint64_t *)(block + page * PAGE) = seed(~client, sequence) ^ page;
}

static int is_intact(const char *block, uint64_t client, uint64_t sequence) {
    uint64_t word = seed(client, sequence % blocks_each), first = seed(~client, sequence), wrong = 0;
    for (size_t page = 0; page < BLOCK / PAGE; page++) {
        const uint64_t *words = (const uint64_t *)(block + page * PAGE);
        wrong |= words[0] ^ first ^ page;
        word += STEP;
        for (size_t i = 1; i < PAGE / 8; i++, word += STEP) wrong |= words[i] ^ word;
    }
    return wrong == 0;
}

static void watch(int epoll, int fd, uint32_t events, uint64_t tag, int change) {
    struct epoll_event event = {.events = events, .data.u64 = tag};
    if (epoll_ctl(epoll, change ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event)) fail("epoll_ctl");
}

static void say(int fd, uint64_t first, uint64_t second) {
    uint64_t message[2] = {first, second};
    if (send(fd, message, sizeof message, MSG_NOSIGNAL) != sizeof message) fail("send");
}

/* A whole message, or nothing yet. */
static int hear(struct client *client, uint64_t message[2]) {
    ssize_t n = recv(client->control, client->message + client->message_got, 16 - client->message_got, MSG_DONTWAIT);
    if (n == 0) _exit(0);
    if (n < 0 && errno != EAGAIN) fail("recv");
    if (n < 0 || (client->message_got += n) < 16) return 0;
    memcpy(message, client->message, 16);
    client->message_got = 0;
    return 1;
}

/* The server: each client's tag is its index twice, and one more for the payload. */
static void serve(int listener, size_t count, size_t frames, size_t ahead) {
    static struct client clients[CLIENTS_MAX];
    char **free_frames = malloc(frames * sizeof *free_frames), *memory = 0;
    size_t *waiting = malloc(count * sizeof *waiting), first = 0, queued = 0, getting = 0;
    if (posix_memalign((void **)&memory, PAGE, frames * BLOCK)) fail("memory");
    for (size_t i = 0; i < frames; i++) free_frames[i] = memset(memory + i * BLOCK, 0, BLOCK);
    int file = memfd_create("clients", 0), on = 1, epoll = epoll_create1(0);
    uint64_t at = 0;
    for (uint64_t done = 0; done < FILE_BYTES; done += BLOCK)
        if (pwrite(file, memory, BLOCK, done) != BLOCK) fail("pwrite");
    for (size_t i = 0; i < 2 * count; i++) {
        uint64_t hello[2];
        int fd = accept(listener, 0, 0);
        if (fd < 0 || recv(fd, hello, sizeof hello, MSG_WAITALL) != sizeof hello) fail("accept");
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        struct client *client = &clients[hello[0]];
        client->number = hello[0];
        if (hello[1]) client->data = fd;
        else client->control = fd;
        watch(epoll, fd, EPOLLIN, hello[0] * 2 + hello[1], 0);
    }
    __sync_fetch_and_add(&shared->ready, 1);
    for (;;) {
        struct epoll_event events[EVENTS];
        int n = epoll_wait(epoll, events, EVENTS, -1);
        for (int i = 0; i < n; i++) {
            struct client *client = &clients[events[i].data.u64 / 2];
            if (events[i].data.u64 % 2 == 0) {
                uint64_t ask[2];
                if (!hear(client, ask)) continue;
                client->sequence = ask[1];
                waiting[(first + queued++) % count] = client->number;
                continue;
            }
            if (!client->block) _exit(0); /* It has gone. */
            ssize_t bytes = recv(client->data, client->block + client->got, BLOCK - client->got, MSG_DONTWAIT);
            if (bytes == 0) _exit(0);
            if (bytes < 0 && errno != EAGAIN) fail("recv");
            if (bytes < 0 || (client->got += bytes) < BLOCK) continue;
            if (!is_intact(client->block, client->number, client->sequence)) fail("a block is damaged");
            if (pwrite(file, client->block, BLOCK, at) != BLOCK) fail("pwrite");
            at = at + 2 * BLOCK > FILE_BYTES ? 0 : at + BLOCK;
            free_frames[frames++] = client->block;
            client->block = 0;
            getting--;
            say(client->control, 1, client->sequence);
        }
        while (queued && frames && getting < ahead) {
            struct client *client = &clients[waiting[first]];
            first = (first + 1) % count;
            queued--;
            getting++;
            client->block = free_frames[--frames];
            client->got = 0;
            say(client->control, 0, client->sequence);
        }
    }
}

/* Writes what the server has asked for; 1 if all of it was taken. */
static int give(struct client *client) {
    while (client->got < BLOCK) {
        ssize_t n = send(client->data, client->block + client->got, BLOCK - client->got, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EAGAIN) return 0;
        if (n <= 0) fail("send");
        client->got += n;
    }
    return 1;
}

static void ask(struct client *client, char *blocks) {
    client->sequence++;
    client->block = blocks + client->sequence % blocks_each * BLOCK;
    stamp(client->block, client->number, client->sequence);
    say(client->control, client->number, client->sequence);
}

/* The clients of one process. */
static void write_blocks(struct sockaddr_in at, size_t from, size_t count) {
    struct client *clients = calloc(count, sizeof *clients);
    int on = 1, epoll = epoll_create1(0);
    char *memory;
    if (posix_memalign((void **)&memory, PAGE, count * blocks_each * BLOCK)) fail("memory");
    for (size_t i = 0; i < count; i++) {
        clients[i].number = from + i;
        for (uint64_t place = 0; place < blocks_each; place++)
            fill(memory + (i * blocks_each + place) * BLOCK, from + i, place);
        for (int which = 0; which < 2; which++) {
            int fd = socket(AF_INET, SOCK_STREAM, 0);
            if (connect(fd, (struct sockaddr *)&at, sizeof at)) fail("connect");
            setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
            say(fd, from + i, which);
            if (which) clients[i].data = fd;
            else clients[i].control = fd;
            watch(epoll, fd, which ? 0 : EPOLLIN, i * 2 + which, 0);
        }
    }
    __sync_fetch_and_add(&shared->ready, 1);
    while (!shared->begun) usleep(1000);
    for (size_t i = 0; i < count; i++) ask(&clients[i], memory + i * blocks_each * BLOCK);
    for (;;) {
        struct epoll_event events[EVENTS];
        int n = epoll_wait(epoll, events, EVENTS, -1);
        for (int j = 0; j < n; j++) {
            size_t i = events[j].data.u64 / 2;
            struct client *client = &clients[i];
            if (events[j].data.u64 % 2) {
                if (give(client)) watch(epoll, client->data, 0, i * 2 + 1, 1);
                continue;
            }
            uint64_t message[2];
            if (!hear(client, message)) continue;
            if (message[0] == 0) {
                client->got = 0;
                if (!give(client)) watch(epoll, client->data, EPOLLOUT, i * 2 + 1, 1);
                continue;
            }
            shared->blocks[client->number]++;
            ask(client, memory + i * blocks_each * BLOCK);
        }
    }
}

static double microseconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static double cpu_of(pid_t pid) {
    clockid_t clock;
    if (clock_getcpuclockid(pid, &clock)) fail("a process has ended");
    return microseconds(clock);
}

static pid_t start(void) {
    pid_t parent = getpid(), pid = fork();
    if (pid < 0) fail("fork");
    if (pid == 0 && (prctl(PR_SET_PDEATHSIG, SIGKILL) || getppid() != parent)) _exit(1);
    return pid;
}

int main(int words, char **word) {
    if (words != 6) return 2;
    size_t clients = atol(word[1]), processes = atol(word[2]);
    if (clients < 1 || clients > CLIENTS_MAX || processes < 1 || processes > PROCESSES_MAX) return 2;
    if (processes > clients) processes = clients;
    blocks_each = DATA / BLOCK / clients;
    if (blocks_each < 2) blocks_each = 2;
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    shared = mmap(0, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    if (bind(listener, (struct sockaddr *)&at, len) || listen(listener, 1024)) fail("listen");
    getsockname(listener, (struct sockaddr *)&at, &len);
    pid_t server = start(), writers[PROCESSES_MAX];
    if (server == 0) serve(listener, clients, atol(word[3]), atol(word[4]));
    for (size_t i = 0; i < processes; i++) {
        size_t from = clients * i / processes, to = clients * (i + 1) / processes;
        if ((writers[i] = start()) == 0) write_blocks(at, from, to - from);
    }
    while (shared->ready < (int)processes + 1) {
        if (waitpid(-1, 0, WNOHANG) != 0) fail("a process has ended");
        usleep(1000);
    }
    shared->begun = 1;
    usleep(WARM_UP_US);
    uint64_t before[CLIENTS_MAX], blocks = 0;
    double served = cpu_of(server), wrote = 0, began = microseconds(CLOCK_MONOTONIC), squares = 0;
    for (size_t i = 0; i < processes; i++) wrote -= cpu_of(writers[i]);
    for (size_t i = 0; i < clients; i++) before[i] = shared->blocks[i];
    usleep(atol(word[5]) * 1000);
    for (size_t i = 0; i < clients; i++) {
        uint64_t own = shared->blocks[i] - before[i];
        blocks += own;
        squares += (double)own * own;
    }
    double seconds = (microseconds(CLOCK_MONOTONIC) - began) / 1e6;
    served = cpu_of(server) - served;
    for (size_t i = 0; i < processes; i++) wrote += cpu_of(writers[i]);
    if (waitpid(-1, 0, WNOHANG) != 0) fail("a process has ended");
    for (size_t i = 0; i < processes; i++) kill(writers[i], SIGKILL);
    kill(server, SIGKILL);
    while (wait(0) > 0) {}
    printf("%llu %.6f %.0f %.0f %.4f\n", (unsigned long long)blocks, seconds, served, wrote,
           squares > 0 ? (double)blocks * blocks / (clients * squares) : 1);
    return 0;
}
