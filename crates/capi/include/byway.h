/* Nodes of byway. Made from crates/capi by its tests; not to be edited. */

#ifndef BYWAY_H
#define BYWAY_H

#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

// A pointer is null that must not be, a text is not UTF-8 or no address, or a number is out of range.
#define BYWAY_E_INVALID -1

// The deadline has passed; the operation goes on.
#define BYWAY_E_DEADLINE -2

// Too many operations are under way, or messages wait for credit: wait for some to end.
#define BYWAY_E_BUSY -3

// The session is gone.
#define BYWAY_E_NO_SESSION -4

// The session ended.
#define BYWAY_E_ENDED -5

// A range does not lie in its memory or window.
#define BYWAY_E_RANGE -6

// A header, a payload or a list is too long.
#define BYWAY_E_TOO_LONG -7

// The window is not open for that.
#define BYWAY_E_RIGHTS -8

// The peer refused: no such window, or not so much of it, or not for that.
#define BYWAY_E_REFUSED -9

// It was cancelled.
#define BYWAY_E_CANCELLED -10

// The result was taken already.
#define BYWAY_E_TAKEN -11

// This process is the child of the one that opened the node: open another node.
#define BYWAY_E_FORKED -12

// The kernel refused: no memory, no descriptors, no such address, nobody there.
#define BYWAY_E_SYSTEM -13

// A bug of this library.
#define BYWAY_E_BUG -14

// No answer to the call came in time.
#define BYWAY_E_EXPIRED -15

// The server did not do what it was called for; the completion has its number.
#define BYWAY_E_STATUS -16

// Operations or windows of another node use the memory, or an operation is another's.
#define BYWAY_E_OTHER_NODE -17

// The peer does not serve the protocol of a call, or not in a version that this library speaks; or the node does not speak it.
#define BYWAY_E_UNSUPPORTED -18

// The peer may write.
#define BYWAY_PUT 1

// The peer may read.
#define BYWAY_GET 2

// The window can be used once, and has at most 1 MiB.
#define BYWAY_ONCE 4

// The protocol of block volumes: of `byway serve`.
#define BYWAY_PROTOCOL_VOLUMES 1

// The wire is TCP.
#define BYWAY_WIRE_TCP 1

// The wire is a unix socket.
#define BYWAY_WIRE_UNIX 2

// The wire is shared memory.
#define BYWAY_WIRE_SHM 3

// The wire is RDMA.
#define BYWAY_WIRE_RDMA 4

// The peer's node has a part in each put and get: its program must turn it.
#define BYWAY_ONE_SIDED_EMULATED 0

// Who asks copies by himself, where the peer has lent the memory; elsewhere emulated.
#define BYWAY_ONE_SIDED_WHERE_LENT 1

// Devices move the bytes; the peer's processor has no part in it.
#define BYWAY_ONE_SIDED_NATIVE 2

// A process's part in a job. Threads may share it.
struct byway_dsm_job;

// Completions of the operations that were added to it.
struct byway_group;

// Memory that operations and windows can use.
struct byway_memory;

// A message that came.
struct byway_message;

// A node.
struct byway_node;

// An operation.
struct byway_op;

// A call that came. It is answered once: by `byway_answer` or `byway_delegate`, else by being freed, as abandoned.
struct byway_request;

// A window that is open to a peer.
struct byway_window;

// What a process has counted.
struct byway_dsm_counters {
  // Faults by loads.
  uint64_t read_faults;
  // Faults by stores.
  uint64_t write_faults;
  // Pages that came from other processes.
  uint64_t pages_received;
  // Pages that were sent to other processes.
  uint64_t pages_sent;
  // Copies that were given up for another process's store.
  uint64_t invalidations;
  // Messages to other processes, pages included.
  uint64_t messages;
  // Pages that left late, because direct I/O or a ring had them pinned.
  uint64_t pin_waits;
};

// A range of memory.
struct byway_segment {
  // The memory.
  const struct byway_memory *memory;
  // First byte.
  uintptr_t offset;
  // Bytes.
  uintptr_t len;
};

// What an operation brought. Whoever waits in vain finds it empty.
struct byway_completion {
  // A receive's message, else null. Free it with `byway_message_free`.
  struct byway_message *message;
  // Of a receive from any: the session of the message, or, without a message, the session that has ended. Else 0.
  uint64_t session;
  // Of a call that ended with `BYWAY_E_STATUS`: the server's number. Else 0.
  uint16_t status;
};

// What a caller asks. What it has none of may be null with a length of 0.
struct byway_call {
  // The method: the protocol's number.
  uint16_t method;
  // The protocol: 0 for that of programs, or `BYWAY_PROTOCOL_VOLUMES`, whose methods, arguments and results docs/wire.md has.
  uint8_t protocol;
  // At most 64 bytes.
  const uint8_t *arguments;
  // How many.
  uintptr_t arguments_bytes;
  // Descriptors of windows, 32 bytes each, one behind the other, at most 64: opened to the session that is called.
  const uint8_t *windows;
  // How many windows.
  uintptr_t windows_count;
  // More bytes; at most 16 KiB with the windows and arguments.
  const uint8_t *payload;
  // How many.
  uintptr_t payload_bytes;
};

// How often something waited, and for how long.
struct byway_waits {
  // Times.
  uint64_t count;
  // Nanoseconds in all.
  uint64_t total_ns;
  // Nanoseconds of the longest.
  uint64_t max_ns;
};

// What the transfers of a session are like.
struct byway_feedback {
  // Bytes that the peer, or the kernel for it, has taken since the session began.
  uint64_t sent_bytes;
  // Bytes that came from it.
  uint64_t received_bytes;
  // Bytes a second that it takes, over about the last second.
  double send_rate;
  // Bytes a second that come from it.
  double receive_rate;
  // From when a message was queued to when the last byte of what it was sent with was taken.
  struct byway_waits send_delay;
  // Messages that had to wait for the peer's program to take others; counted when that is over.
  struct byway_waits credit_stalls;
  // Sends for which the peer, or the path, took at least a millisecond; counted when that is over.
  struct byway_waits take_stalls;
  // Bytes that wait now to be taken.
  uint64_t queued_bytes;
  // Nanoseconds for which what has waited longest now has waited already; 0 if nothing waits.
  uint64_t waiting_ns;
  // The path's round trip in nanoseconds, as the kernel says; 0 where nobody says, as over shared memory.
  uint64_t round_trip_ns;
  // Bytes a second that the peer last acknowledged while the path was full; 0 where nobody says.
  uint64_t delivery_rate;
};

// What the wire of a session can do. Truths are 0 or 1.
struct byway_capabilities {
  // One of `BYWAY_WIRE_*`, or 0 for one that this header does not know.
  uint32_t wire;
  // One of `BYWAY_ONE_SIDED_*`: who moves the bytes of puts and gets.
  uint32_t one_sided;
  // Pieces of memory that the wire takes at a time; `SIZE_MAX` for any number. A payload of more goes in several.
  uintptr_t segments_max;
  // All of it goes through TLS.
  uint8_t secure;
  // A peer that means harm is kept to the windows that are open to it. Else it reaches all of a memory that was lent to it; over
  // shared memory C lends none.
  uint8_t window_enforced;
  // What is sent may go from where it lies, without a copy.
  uint8_t zero_copy_send;
  // Memory is registered with a device before it is moved.
  uint8_t registers;
  // Payloads to the peer may lie in memory of a device.
  uint8_t device_memory;
};

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Joins the job that this process was started for, and waits for its other processes; once in a process. Says on standard error why
// it could not. End it with `byway_dsm_finish`.
//
// # Safety
// `job` can be written.
int byway_dsm_init(struct byway_dsm_job **job);

// This process's number, from 0; negative if `job` is null.
//
// # Safety
// `job` is null or of `byway_dsm_init`.
int byway_dsm_rank(const struct byway_dsm_job *job);

// How many processes the job has; negative if `job` is null.
//
// # Safety
// `job` is null or of `byway_dsm_init`.
int byway_dsm_ranks(const struct byway_dsm_job *job);

// Maps the segment of this name (1 to 64 bytes), zeroes at first, at the same address in every process, and gives the address. All processes
// give the same size. It stays until `byway_dsm_finish`. `BYWAY_E_RANGE`: it has another size, or does not fit.
//
// # Safety
// `job` is of `byway_dsm_init`; `name` ends with a zero byte; `address` can be written.
int byway_dsm_segment(const struct byway_dsm_job *job,
                      const char *name,
                      uintptr_t bytes,
                      uint8_t **address);

// Waits for a lock. Processes, and threads of one process, have it one after the other.
//
// # Safety
// `job` is of `byway_dsm_init`.
int byway_dsm_lock(const struct byway_dsm_job *job, uint32_t lock);

// Gives a lock back that this process has. One that it does not have is left alone.
//
// # Safety
// `job` is of `byway_dsm_init`.
int byway_dsm_unlock(const struct byway_dsm_job *job, uint32_t lock);

// Waits until every process has reached the barrier, whose number is below 4294967294. One thread of each process does.
//
// # Safety
// `job` is of `byway_dsm_init`.
int byway_dsm_barrier(const struct byway_dsm_job *job,
                      uint32_t barrier);

// What this process has counted.
//
// # Safety
// `job` is of `byway_dsm_init`; `counters` can be written.
int byway_dsm_statistics(const struct byway_dsm_job *job, struct byway_dsm_counters *counters);

// Waits until every process is here, leaves the job and frees `job`. A process that ends without this ends the job for all.
//
// # Safety
// `job` is of `byway_dsm_init`; neither it nor a segment is used after.
int byway_dsm_finish(struct byway_dsm_job *job);

// What a code says, in English; never null, and never freed.
const char *byway_error_text(int code);

// Opens a node into `*node`. Free it with `byway_node_close`.
//
// # Safety
// `node` can be written.
int byway_node_open(struct byway_node **node);

// The same, for `byway_call_start` and `byway_next_call` too. Its peers must be opened so as well.
//
// # Safety
// `node` can be written.
int byway_node_open_for_calls(struct byway_node **node);

// Frees a node. Its sessions are cut, and it listens no more, when its operations, windows, groups and requests are freed too; close
// sessions before. Null is nothing.
//
// # Safety
// `node` is null or of `byway_node_open` or `byway_node_open_for_calls`, and not used after.
void byway_node_close(struct byway_node *node);

// Listens at `tcp://IP:PORT`, `unix://PATH`, `shm://PATH` or `rdma://IP:PORT`. Gives the port, if it has one (that the kernel chose, if
// 0 was asked for), else 0.
//
// # Safety
// `node` is a node; `at` ends with a zero byte.
int byway_listen(const struct byway_node *node,
                 const char *at);

// Connects, and writes the session's number to `*session`. Waits at most `timeout_ms`, after which nothing of the connection stays; for
// ever if negative.
//
// # Safety
// `node` is a node; `to` ends with a zero byte; `session` can be written.
int byway_connect(const struct byway_node *node,
                  const char *to,
                  int64_t timeout_ms,
                  uint64_t *session);

// Waits for a session that somebody else begins, at most `timeout_ms`; for ever if negative.
//
// # Safety
// `node` is a node; `session` can be written.
int byway_accept(const struct byway_node *node, int64_t timeout_ms, uint64_t *session);

// Ends a session, when the messages that were sent have gone out. Flush before, if puts are to arrive.
//
// # Safety
// `node` is a node.
int byway_session_close(const struct byway_node *node,
                        uint64_t session);

// A descriptor that is readable when `byway_progress` should be called. It is the node's: not to be closed.
//
// # Safety
// `node` is a node.
int byway_node_descriptor(const struct byway_node *node);

// Does what there is to do, and never waits. 1 if any operation has ended since the last call, else 0.
//
// # Safety
// `node` is a node.
int byway_progress(const struct byway_node *node);

// Makes memory of `bytes` (at least 1): zeroes, at a page. While operations or windows of one node use it, other
// nodes are refused (`BYWAY_E_OTHER_NODE`). Free it with `byway_memory_free`.
//
// # Safety
// `node` is a node; `memory` can be written.
int byway_register(const struct byway_node *node,
                   uintptr_t bytes,
                   struct byway_memory **memory);

// Where it begins; null if `memory` is. The program sees to it that it leaves bytes alone that an operation works on, or
// that it can live with what it reads; where the peer requires checksums, changing what is put or got from ends the session. Valid
// until the memory is freed.
//
// # Safety
// `memory` is null or of `byway_register`.
uint8_t *byway_memory_bytes(const struct byway_memory *memory);

// Bytes of it; 0 if `memory` is null.
//
// # Safety
// `memory` is null or of `byway_register`.
uintptr_t byway_memory_len(const struct byway_memory *memory);

// Frees memory. What operations and windows still use stays for them. Null is nothing.
//
// # Safety
// `memory` is null or of `byway_register`, and neither it nor its bytes are used after.
void byway_memory_free(struct byway_memory *memory);

// Opens `len` bytes of memory, from `offset` on, to the peer of a session. `rights` are `BYWAY_PUT`, `BYWAY_GET` or both, perhaps with
// `BYWAY_ONCE`. Writes the 32 bytes that the peer needs to `descriptor`. Close it with `byway_window_close`.
//
// # Safety
// `node` and `memory` are what their names say; `descriptor` has room for 32 bytes; `window` can be written.
int byway_window_open(const struct byway_node *node,
                      uint64_t session,
                      const struct byway_memory *memory,
                      uintptr_t offset,
                      uintptr_t len,
                      uint32_t rights,
                      uint8_t *descriptor,
                      struct byway_window **window);

// Closes and frees a window, and waits until its peer can no longer reach the memory: at most `timeout_ms`, for ever if negative. After
// `BYWAY_E_DEADLINE` it is closing and freed too.
//
// # Safety
// `window` is of `byway_window_open`, and not used after.
int byway_window_close(struct byway_window *window,
                       int64_t timeout_ms);

// Sends a message: a header of at most 64 bytes and a payload of at most 16 KiB. Both are copied. `*op` ends when it is on its way.
//
// # Safety
// `node` is a node; `header` and `payload` have so many bytes; `op` can be written.
int byway_send(const struct byway_node *node,
               uint64_t session,
               const uint8_t *header,
               uintptr_t header_bytes,
               const uint8_t *payload,
               uintptr_t payload_bytes,
               struct byway_op **op);

// Receives the next message of a session; of any, if `session` is 0.
//
// # Safety
// `node` is a node; `op` can be written.
int byway_receive(const struct byway_node *node, uint64_t session, struct byway_op **op);

// Puts the bytes of up to 64 segments into a window of the peer, from `offset` on. `*op` ends when they lie there.
//
// # Safety
// `node` is a node; `list` has `count` segments, each of memory; `to` has the 32 bytes of a descriptor; `op` can be written.
int byway_put(const struct byway_node *node,
              uint64_t session,
              const struct byway_segment *list,
              uintptr_t count,
              const uint8_t *to,
              uint64_t offset,
              struct byway_op **op);

// Gets bytes of a window of the peer, from `offset` on, into up to 64 segments. `*op` ends when they are here.
//
// # Safety
// As for `byway_put`.
int byway_get(const struct byway_node *node,
              uint64_t session,
              const uint8_t *from,
              uint64_t offset,
              const struct byway_segment *list,
              uintptr_t count,
              struct byway_op **op);

// Ends when all puts of a session that were begun before have ended.
//
// # Safety
// `node` is a node; `op` can be written.
int byway_flush(const struct byway_node *node, uint64_t session, struct byway_op **op);

// Waits for an operation and takes what it brought, at most `timeout_ms`, for ever if negative, a look if 0. Answers how the
// operation ended. `completion` may be null: then a message is thrown away. The operation is still to be freed.
//
// # Safety
// `op` is an operation; `completion` is null or can be written.
int byway_wait(const struct byway_op *op,
               int64_t timeout_ms,
               struct byway_completion *completion);

// Waits for one of `count` operations, all of one node, as `byway_wait` does. Writes its place to `*index`, if one has ended, well or
// not. Without a place for that (`BYWAY_E_INVALID`) nothing is taken.
//
// # Safety
// `ops` has `count` operations; `index` can be written; `completion` is null or can be written.
int byway_wait_any(const struct byway_op *const *ops,
                   uintptr_t count,
                   int64_t timeout_ms,
                   uintptr_t *index,
                   struct byway_completion *completion);

// Asks for the early end of an operation, which still ends once.
//
// # Safety
// `op` is an operation.
int byway_cancel(const struct byway_op *op);

// Frees an operation. One that has not ended goes on, and what it brings is nobody's; but a receive is cancelled, and what it has brought
// and nobody took goes to the next. Null is nothing.
//
// # Safety
// `op` is null or an operation, and not used after.
void byway_op_free(struct byway_op *op);

// Where a message's header begins; answers how many bytes it has. Valid until the message is freed.
//
// # Safety
// `message` is a message; `bytes` can be written.
int byway_message_header(const struct byway_message *message, const uint8_t **bytes);

// Where a message's payload begins; answers how many bytes it has. Valid until the message is freed.
//
// # Safety
// `message` is a message; `bytes` can be written.
int byway_message_payload(const struct byway_message *message,
                          const uint8_t **bytes);

// Frees a message. Null is nothing.
//
// # Safety
// `message` is null or a message, and not used after.
void byway_message_free(struct byway_message *message);

// Makes a group of at most `capacity` operations (1 to 65,536). Free it with `byway_group_free`.
//
// # Safety
// `node` is a node; `group` can be written.
int byway_group_new(const struct byway_node *node, uintptr_t capacity, struct byway_group **group);

// Adds an operation, which is freed by that if it went well; `context` is what its completion will be called. If it has ended
// already, its completion is there at once. `BYWAY_E_BUSY` if the group holds as many as it was made for, or the result was taken:
// then the operation is the caller's still, as it was, whoever waits for it meanwhile. But nobody may use it when this succeeds,
// since that frees it.
//
// # Safety
// `group` is a group; `op` is an operation of the same node; if this answers 0 it is in no other call, and not used after.
int byway_group_add(const struct byway_group *group,
                    struct byway_op *op,
                    uint64_t context);

// Waits for one of the group's operations, at most `timeout_ms`, for ever if negative, a look if 0. Answers 1 if one has ended: its
// context is in `*context`, how it ended in `*result` (0, or one of `BYWAY_E_*`), and what it brought in `*completion`, which may be
// null. Each completion goes to one of the threads that wait.
//
// # Safety
// `group` is a group; `context` and `result` can be written; `completion` is null or can be written.
int byway_group_wait(const struct byway_group *group,
                     int64_t timeout_ms,
                     uint64_t *context,
                     int *result,
                     struct byway_completion *completion);

// A descriptor that is readable while the group has completions. Somebody must make them: poll it together with
// `byway_node_descriptor`. It is the group's: not to be closed.
//
// # Safety
// `group` is a group.
int byway_group_descriptor(const struct byway_group *group);

// Frees a group, and what is in it as `byway_op_free` does. Null is nothing.
//
// # Safety
// `group` is null or a group, and not used after.
void byway_group_free(struct byway_group *group);

// Calls the node at the other end of a session. `*op` ends with the answer: a message, whose header is the result. With
// `BYWAY_E_STATUS` the server did not do it, and the completion has its number; with `BYWAY_E_EXPIRED` no answer came within
// `timeout_ms` (for ever if negative). Cancelling it tells the server.
//
// # Safety
// `node` is a node, opened for calls; `call` is one, whose pointers have so many bytes as it says; `op` can be written.
int byway_call_start(const struct byway_node *node,
                     uint64_t session,
                     const struct byway_call *call,
                     int64_t timeout_ms,
                     struct byway_op **op);

// Waits for a call, at most `timeout_ms`, for ever if negative. Each call goes to one of the threads that wait.
//
// # Safety
// `node` is a node, opened for calls; `request` can be written.
int byway_next_call(const struct byway_node *node,
                    int64_t timeout_ms,
                    struct byway_request **request);

// What a call is for: the caller's number of the method.
//
// # Safety
// `request` is a request.
int byway_request_method(const struct byway_request *request);

// Over which session a call came: 0 if `request` is null. The windows of the call are this session's, unless it was handed on.
//
// # Safety
// `request` is null or a request.
uint64_t byway_request_session(const struct byway_request *request);

// Where a call's arguments begin; answers how many bytes they have. Valid until the request is answered, handed on or freed.
//
// # Safety
// `request` is a request; `bytes` can be written.
int byway_request_arguments(const struct byway_request *request,
                            const uint8_t **bytes);

// Where a call's payload begins; answers how many bytes it has. Valid as its arguments are.
//
// # Safety
// `request` is a request; `bytes` can be written.
int byway_request_payload(const struct byway_request *request, const uint8_t **bytes);

// Where the descriptors of a call's windows begin, 32 bytes each; answers how many windows there are. Valid as its arguments are.
//
// # Safety
// `request` is a request; `bytes` can be written.
int byway_request_windows(const struct byway_request *request,
                          const uint8_t **bytes);

// 1 if the caller of a request waits for no answer any more, else 0.
//
// # Safety
// `request` is a request.
int byway_request_is_cancelled(const struct byway_request *request);

// Answers a call and frees the request, whatever comes of it: `status` 0 if it went well, a result of at most 64 bytes, a payload of at
// most 16 KiB with it. Where the answer could not be sent, the caller is told that its call was given up, if there is a way.
//
// # Safety
// `request` is a request, and not used after; `result` and `payload` have so many bytes.
int byway_answer(struct byway_request *request,
                 uint16_t status,
                 const uint8_t *result,
                 uintptr_t result_bytes,
                 const uint8_t *payload,
                 uintptr_t payload_bytes);

// Hands a call on to the node at the other end of `third`, which answers the caller instead, and frees the request if that went
// well. `call` is what it gets: its payload is the continuation, all that the third must know to carry on, as nothing of the call
// stays here. The windows in it are of use to the third only if they were opened to its session. If it fails the request
// is as it was, whoever looks at it meanwhile. But nobody may use it when this succeeds, since that frees it.
//
// # Safety
// `request` is a request; if this answers 0 it is in no other call, and not used after. `call` is one, whose pointers have so many
// bytes as it says.
int byway_delegate(struct byway_request *request,
                   uint64_t third,
                   const struct byway_call *call);

// Frees a request that is not to be answered: its caller is told that it was given up. Null is nothing.
//
// # Safety
// `request` is null or a request, and not used after.
void byway_request_free(struct byway_request *request);

// Writes what the transfers of a session are like now to `*feedback`. Never waits for the peer.
//
// # Safety
// `node` is a node; `feedback` can be written.
int byway_session_feedback(const struct byway_node *node,
                           uint64_t session,
                           struct byway_feedback *feedback);

// Writes what the wire of a session can do to `*capabilities`: the same as long as the session lasts.
//
// # Safety
// `node` is a node; `capabilities` can be written.
int byway_session_capabilities(const struct byway_node *node,
                               uint64_t session,
                               struct byway_capabilities *capabilities);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* BYWAY_H */
