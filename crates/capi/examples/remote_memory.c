/* Two nodes in one process, each in a thread of its own: one opens a window, the other reads and writes it.
 * cc remote_memory.c $(pkg-config --cflags --libs byway) -lpthread */
#include <byway.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SOON 20000
#define BYTES (3 << 20)

static void check(int code, const char *what) {
    if (code < 0) {
        fprintf(stderr, "%s: %s\n", what, byway_error_text(code));
        exit(1);
    }
}

/* Waits for an operation and frees it. */
static struct byway_completion finish(struct byway_op *op, const char *what) {
    struct byway_completion completion;
    check(byway_wait(op, SOON, &completion), what);
    byway_op_free(op);
    return completion;
}

static void *lend(void *argument) {
    struct byway_node *node = argument;
    struct byway_memory *memory;
    struct byway_window *window;
    struct byway_op *op;
    uint64_t session;
    uint8_t descriptor[32];

    check(byway_accept(node, SOON, &session), "accept");
    check(byway_register(node, BYTES, &memory), "register");
    memset(byway_memory_bytes(memory), 'a', BYTES);
    check(byway_window_open(node, session, memory, 0, BYTES, BYWAY_PUT | BYWAY_GET, descriptor, &window), "window");
    check(byway_send(node, session, (const uint8_t *)"window", 6, descriptor, sizeof descriptor, &op), "send");
    finish(op, "send");
    /* Until the other says that it is done, waiting here serves it. */
    check(byway_receive(node, session, &op), "receive");
    struct byway_completion done = finish(op, "receive");
    byway_message_free(done.message);
    check(byway_window_close(window, SOON), "close");
    int good = byway_memory_bytes(memory)[BYTES - 1] == 'b';
    byway_memory_free(memory);
    byway_node_close(node);
    return good ? argument : NULL;
}

int main(void) {
    struct byway_node *lender, *user;
    check(byway_node_open(&lender), "open");
    check(byway_node_open(&user), "open");
    int port = byway_listen(lender, "tcp://127.0.0.1:0");
    check(port, "listen");
    pthread_t thread;
    pthread_create(&thread, NULL, lend, lender);

    char address[64];
    snprintf(address, sizeof address, "tcp://127.0.0.1:%d", port);
    uint64_t session;
    check(byway_connect(user, address, SOON, &session), "connect");
    struct byway_op *op;
    check(byway_receive(user, 0, &op), "receive");
    struct byway_completion came = finish(op, "receive");
    const uint8_t *descriptor;
    if (came.session != session || byway_message_payload(came.message, &descriptor) != 32)
        return 1;

    struct byway_memory *memory;
    check(byway_register(user, BYTES, &memory), "register");
    struct byway_segment halves[2] = {{memory, 0, BYTES / 2}, {memory, BYTES / 2, BYTES / 2}};
    struct byway_op *gets[2];
    for (int half = 0; half < 2; half++)
        check(byway_get(user, session, descriptor, half * (BYTES / 2), &halves[half], 1, &gets[half]), "get");
    for (int left = 2; left > 0; left--) {
        size_t index;
        check(byway_wait_any((const struct byway_op *const *)gets, left, SOON, &index, NULL), "get");
        byway_op_free(gets[index]);
        gets[index] = gets[left - 1];
    }
    uint8_t *bytes = byway_memory_bytes(memory);
    if (bytes[0] != 'a' || bytes[BYTES - 1] != 'a')
        return 1;
    memset(bytes, 'b', BYTES);
    check(byway_put(user, session, halves, 2, descriptor, 0, &op), "put");
    finish(op, "put");
    if (byway_put(user, session, halves, 2, descriptor, 1, &op) != BYWAY_E_RANGE)
        return 1;
    /* What a program knows that has several to choose from. */
    struct byway_feedback feedback;
    struct byway_capabilities wire;
    check(byway_session_feedback(user, session, &feedback), "feedback");
    if (feedback.sent_bytes < BYTES || feedback.received_bytes < BYTES || feedback.round_trip_ns == 0)
        return 1;
    check(byway_session_capabilities(user, session, &wire), "capabilities");
    if (wire.wire != BYWAY_WIRE_TCP || wire.one_sided != BYWAY_ONE_SIDED_EMULATED || !wire.window_enforced)
        return 1;
    byway_message_free(came.message);
    check(byway_send(user, session, NULL, 0, NULL, 0, &op), "send");
    finish(op, "send");

    void *good;
    pthread_join(thread, &good);
    byway_memory_free(memory);
    byway_node_close(user);
    puts(good ? "the same bytes there and here" : "DIFFERENT BYTES");
    return good ? 0 : 1;
}
