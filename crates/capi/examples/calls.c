/* Three nodes in one process, each in a thread of its own. The client calls the front, which answers sums itself and hands words on to
 * the back; that answers the client. The client waits for all answers as one group, by poll(2).
 * cc calls.c $(pkg-config --cflags --libs byway) -lpthread */
#include <byway.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SOON 20000
#define CALLS 32
#define SUM 1
#define WORD 2
#define STOP 3
#define NO_SUCH_METHOD 404

static void check(int code, const char *what) {
    if (code < 0) {
        fprintf(stderr, "%s: %s\n", what, byway_error_text(code));
        exit(1);
    }
}

struct server {
    struct byway_node *node;
    /* Of the front: where words are known. */
    uint64_t back;
};

static void answer(struct byway_request *request, unsigned status, const void *result, size_t bytes, const char *text) {
    check(byway_answer(request, (uint16_t)status, result, bytes, (const uint8_t *)text, strlen(text)), "answer");
}

static void *serve(void *argument) {
    struct server *server = argument;
    for (;;) {
        struct byway_request *request;
        const uint8_t *arguments;
        check(byway_next_call(server->node, SOON, &request), "next call");
        int bytes = byway_request_arguments(request, &arguments);
        int method = byway_request_method(request);
        if (method == SUM) {
            uint8_t sum = 0;
            for (int at = 0; at < bytes; at++)
                sum = (uint8_t)(sum + arguments[at]);
            answer(request, 0, &sum, 1, "");
        } else if (method == WORD && server->back != 0) {
            struct byway_call call = {.method = WORD, .arguments = arguments, .arguments_bytes = (size_t)bytes};
            check(byway_delegate(request, server->back, &call), "delegate");
        } else if (method == WORD) {
            answer(request, 0, arguments, (size_t)bytes, arguments[0] % 2 == 0 ? "even" : "odd");
        } else if (method == STOP) {
            answer(request, 0, NULL, 0, "");
            return NULL;
        } else {
            answer(request, NO_SUCH_METHOD, NULL, 0, "");
        }
    }
}

/* Takes what the group has; how many. */
static int take(struct byway_group *group) {
    uint64_t context;
    struct byway_completion completion;
    const uint8_t *bytes;
    int result, taken = 0, came;
    while ((came = byway_group_wait(group, 0, &context, &result, &completion)) == 1) {
        if (context == CALLS) {
            if (result != BYWAY_E_STATUS || completion.status != NO_SUCH_METHOD)
                exit(1);
        } else {
            check(result, "call");
            int header = byway_message_header(completion.message, &bytes);
            unsigned wanted = context % 2 == 0 ? 3 * context % 256 : context;
            if (header != 1 || bytes[0] != wanted)
                exit(1);
            const char *word = context % 2 == 0 ? "" : "odd";
            int length = byway_message_payload(completion.message, &bytes);
            if ((size_t)length != strlen(word) || memcmp(bytes, word, strlen(word)) != 0)
                exit(1);
        }
        byway_message_free(completion.message);
        taken++;
    }
    if (came != BYWAY_E_DEADLINE)
        check(came, "group");
    return taken;
}

static uint64_t connect_to(struct byway_node *from, struct byway_node *to) {
    char address[64];
    uint64_t session;
    int port = byway_listen(to, "tcp://127.0.0.1:0");
    check(port, "listen");
    snprintf(address, sizeof address, "tcp://127.0.0.1:%d", port);
    check(byway_connect(from, address, SOON, &session), "connect");
    return session;
}

int main(void) {
    struct server front = {0}, back = {0};
    struct byway_node *client;
    struct byway_op *op;
    pthread_t threads[2];
    check(byway_node_open_for_calls(&client), "open");
    check(byway_node_open_for_calls(&front.node), "open");
    check(byway_node_open_for_calls(&back.node), "open");
    /* Who is connected to must wait meanwhile: the back does, in its thread. */
    pthread_create(&threads[1], NULL, serve, &back);
    front.back = connect_to(front.node, back.node);
    pthread_create(&threads[0], NULL, serve, &front);
    uint64_t session = connect_to(client, front.node);

    struct byway_group *group;
    check(byway_group_new(client, CALLS + 1, &group), "group");
    for (uint64_t number = 0; number <= CALLS; number++) {
        uint8_t arguments[3] = {(uint8_t)number, (uint8_t)number, (uint8_t)number};
        struct byway_call call = {.method = number % 2 == 0 ? SUM : WORD, .arguments = arguments};
        call.arguments_bytes = number % 2 == 0 ? 3 : 1;
        if (number == CALLS)
            call.method = 99;
        check(byway_call_start(client, session, &call, SOON, &op), "call");
        check(byway_group_add(group, op, number), "add");
    }
    for (int left = CALLS + 1; left > 0;) {
        struct pollfd polled[2] = {{byway_node_descriptor(client), POLLIN, 0}, {byway_group_descriptor(group), POLLIN, 0}};
        if (poll(polled, 2, SOON) <= 0)
            return 1;
        check(byway_progress(client), "progress");
        left -= take(group);
    }
    byway_group_free(group);

    struct byway_call stop = {.method = STOP};
    check(byway_call_start(front.node, front.back, &stop, SOON, &op), "stop");
    check(byway_wait(op, SOON, NULL), "stop");
    byway_op_free(op);
    check(byway_call_start(client, session, &stop, SOON, &op), "stop");
    check(byway_wait(op, SOON, NULL), "stop");
    byway_op_free(op);
    for (int at = 0; at < 2; at++)
        pthread_join(threads[at], NULL);
    byway_node_close(front.node);
    byway_node_close(back.node);
    byway_node_close(client);
    puts("all answers came");
    return 0;
}
