/* Writes a pattern over the start of a volume of `byway serve`, flushes, and reads it back: volume ADDRESS NAME, for example
 * volume tcp://127.0.0.1:4711 disk
 * cc -o volume volume.c $(pkg-config --cflags --libs byway) -lpthread */
#include <byway.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SOON 20000
#define BYTES (1 << 20)
/* Methods of volumes (docs/wire.md, "Block"). */
#define OPEN 1
#define READ 2
#define WRITE 3
#define FLUSH 4

static void check(int code, const char *what) {
    if (code < 0) {
        fprintf(stderr, "%s: %s\n", what, byway_error_text(code));
        exit(1);
    }
}

static void put_le(uint8_t *at, uint64_t value, int bytes) {
    for (int byte = 0; byte < bytes; byte++)
        at[byte] = (uint8_t)(value >> (8 * byte));
}

/* Calls the server of volumes; the first 4 bytes of the result. */
static uint32_t ask(struct byway_node *node, uint64_t session, struct byway_call call, const char *what) {
    call.protocol = BYWAY_PROTOCOL_VOLUMES;
    struct byway_op *op;
    struct byway_completion answer = {0};
    check(byway_call_start(node, session, &call, SOON, &op), what);
    int code = byway_wait(op, SOON, &answer);
    if (code == BYWAY_E_STATUS) {
        fprintf(stderr, "%s: the server says %u\n", what, (unsigned)answer.status);
        exit(1);
    }
    check(code, what);
    byway_op_free(op);
    const uint8_t *result;
    uint32_t number = 0;
    for (int at = byway_message_header(answer.message, &result) < 4 ? 0 : 4; at > 0; at--)
        number = number << 8 | result[at - 1];
    byway_message_free(answer.message);
    return number;
}

/* Reads or writes the start of a volume by a window of `memory`. */
static void transfer(struct byway_node *node, uint64_t session, uint32_t handle, struct byway_memory *memory, int method) {
    uint8_t arguments[64] = {0}, descriptor[32];
    struct byway_window *window;
    int rights = method == READ ? BYWAY_PUT : BYWAY_GET;
    check(byway_window_open(node, session, memory, 0, BYTES, rights, descriptor, &window), "window");
    put_le(arguments, handle, 4);
    put_le(arguments + 16, BYTES, 8);
    struct byway_call call = {.method = (uint16_t)method, .arguments = arguments, .arguments_bytes = sizeof arguments};
    call.windows = descriptor;
    call.windows_count = 1;
    ask(node, session, call, method == READ ? "read" : "write");
    check(byway_window_close(window, SOON), "close");
}

int main(int count, char **words) {
    if (count != 3) {
        fprintf(stderr, "usage: volume ADDRESS NAME, for example volume tcp://127.0.0.1:4711 disk\n");
        return 2;
    }
    struct byway_node *node;
    uint64_t session;
    check(byway_node_open_for_calls(&node), "node");
    check(byway_connect(node, words[1], SOON, &session), "connect");

    uint8_t arguments[64] = {0};
    struct byway_call open = {.method = OPEN, .arguments = arguments, .arguments_bytes = sizeof arguments};
    open.payload = (const uint8_t *)words[2];
    open.payload_bytes = strlen(words[2]);
    uint32_t handle = ask(node, session, open, "open");

    struct byway_memory *out, *in;
    check(byway_register(node, BYTES, &out), "register");
    check(byway_register(node, BYTES, &in), "register");
    for (int at = 0; at < BYTES; at++)
        byway_memory_bytes(out)[at] = (uint8_t)(at % 251);
    transfer(node, session, handle, out, WRITE);
    put_le(arguments, handle, 4);
    struct byway_call flush = {.method = FLUSH, .arguments = arguments, .arguments_bytes = sizeof arguments};
    ask(node, session, flush, "flush");
    transfer(node, session, handle, in, READ);
    if (memcmp(byway_memory_bytes(in), byway_memory_bytes(out), BYTES) != 0) {
        fprintf(stderr, "other bytes came back\n");
        return 1;
    }
    printf("%d bytes came back as they were written\n", BYTES);
    byway_memory_free(in);
    byway_memory_free(out);
    check(byway_session_close(node, session), "close");
    byway_node_close(node);
    return 0;
}
