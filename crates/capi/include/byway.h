/* Nodes of byway. Made from crates/capi by its tests; not to be edited. */

#ifndef BYWAY_H
#define BYWAY_H

#include <stddef.h>
#include <stdint.h>

// A required pointer is null, a text is not UTF-8 or not an address, or a number is out of range.
#define BYWAY_E_INVALID -1

// The deadline has passed; the operation continues.
#define BYWAY_E_DEADLINE -2

// Too many operations are in flight, or messages wait for credit: wait for some to end.
#define BYWAY_E_BUSY -3

// The session is unknown: the program closed it, or was told of its end.
#define BYWAY_E_NO_SESSION -4

// The session ended.
#define BYWAY_E_ENDED -5

// A range does not lie in its memory or window.
#define BYWAY_E_RANGE -6

// A header, a payload or a list is too long.
#define BYWAY_E_TOO_LONG -7

// The window does not permit the operation.
#define BYWAY_E_RIGHTS -8

// The peer refused: no such window, or the range or right exceeds it.
#define BYWAY_E_REFUSED -9

// The operation was cancelled.
#define BYWAY_E_CANCELLED -10

// The result was taken already.
#define BYWAY_E_TAKEN -11

// This process is a forked child of the one that opened the node, or joined the job: open another node here; call the job in the parent.
#define BYWAY_E_FORKED -12

// The kernel refused: no memory, no descriptors, no such address, or no listener there.
#define BYWAY_E_SYSTEM -13

// A bug of this library.
#define BYWAY_E_BUG -14

// No answer to the call arrived in time.
#define BYWAY_E_EXPIRED -15

// The server answered the call with a status other than 0, which the completion has.
#define BYWAY_E_STATUS -16

// Operations or windows of another node use the memory, or an operation is another's.
#define BYWAY_E_OTHER_NODE -17

// The peer does not serve the protocol of a call, or not in a version that this library supports; or the node does not support
// it.
#define BYWAY_E_UNSUPPORTED -18

// Each page that is far lies at one lender, and is lost with it: its access then ends in SIGBUS.
#define BYWAY_FAR_NONE 0

// Each page that is far lies at a lender, and in a file of this machine.
#define BYWAY_FAR_DISK 1

// Each page that is far lies at two lenders.
#define BYWAY_FAR_MIRROR 2

// Each page that is far lies at one of five lenders, and any four of them can compute it.
#define BYWAY_FAR_PARITY 3

// With one of the others: pages are sealed (AES-256-GCM) before they leave the process, with a key that stays in it.
#define BYWAY_FAR_ENCRYPT 256

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

// The wire is a Unix socket.
#define BYWAY_WIRE_UNIX 2

// The wire is shared memory.
#define BYWAY_WIRE_SHM 3

// The wire is RDMA.
#define BYWAY_WIRE_RDMA 4

// The peer's node takes part in each put and get: its program must drive it.
#define BYWAY_ONE_SIDED_EMULATED 0

// The requester copies directly if the peer has lent the memory; otherwise emulated.
#define BYWAY_ONE_SIDED_WHERE_LENT 1

// Devices move the bytes, without the peer's processor.
#define BYWAY_ONE_SIDED_NATIVE 2

// A process's part in a job. Threads may share it.
struct byway_dsm_job;

// A range of memory of which a part lies at lenders.
struct byway_far;

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

// A received call. It is answered once, by `byway_answer` or `byway_delegate`; freeing it unanswered reports it as abandoned.
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

// A flag that processes wait for (PAUSEDEC). It lies in shared memory.
struct byway_anl_flag {
  // Guards the flag.
  uint32_t lock;
  // Whether it is set.
  uint32_t is_set;
};

// What the pager of a range has done.
struct byway_far_counters {
  // Accesses that waited for a page.
  uint64_t faults;
  // New pages.
  uint64_t zeroed;
  // Pages that came from lenders.
  uint64_t fetched;
  // Of these, pages that no thread waited for yet.
  uint64_t fetched_ahead;
  // Pages that were sent to lenders.
  uint64_t put;
  // Pages that left without being sent, because they had not changed.
  uint64_t unchanged;
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

// The result of an operation; empty if the wait ended without one.
struct byway_completion {
  // The message of a receive, else null. Free it with `byway_message_free`.
  struct byway_message *message;
  // Of a receive from any: the session of the message, or, without a message, the session that has ended. Else 0.
  uint64_t session;
  // Of a call that ended with `BYWAY_E_STATUS`: the server's number. Else 0.
  uint16_t status;
};

// A call's contents. Absent parts may be null with a length of 0.
struct byway_call {
  // The method: the protocol's number.
  uint16_t method;
  // The protocol: 0 for the program's own, or `BYWAY_PROTOCOL_VOLUMES`; docs/wire.md has its methods, arguments and results.
  uint8_t protocol;
  // At most 64 bytes.
  const uint8_t *arguments;
  // How many.
  uintptr_t arguments_bytes;
  // Consecutive descriptors of windows, 32 bytes each, at most 64, which are open to the called session.
  const uint8_t *windows;
  // How many windows.
  uintptr_t windows_count;
  // More bytes; at most 16 KiB with the windows and arguments.
  const uint8_t *payload;
  // How many.
  uintptr_t payload_bytes;
};

// The number of waits, and their duration.
struct byway_waits {
  // Times.
  uint64_t count;
  // Nanoseconds in all.
  uint64_t total_ns;
  // Nanoseconds of the longest.
  uint64_t max_ns;
};

// Measurements of a session's transfers.
struct byway_feedback {
  // Bytes that the peer, or the kernel for it, has accepted since the session began.
  uint64_t sent_bytes;
  // Bytes received from the peer.
  uint64_t received_bytes;
  // Bytes per second that the peer accepts, over about the last second.
  double send_rate;
  // Bytes per second from the peer, over about the last second.
  double receive_rate;
  // From when a message was queued until the last byte of its send was accepted.
  struct byway_waits send_delay;
  // Messages that waited until the peer's program had received others; counted when the wait ends.
  struct byway_waits credit_stalls;
  // Sends for which the peer, or the path, took at least a millisecond; counted when they end.
  struct byway_waits take_stalls;
  // Bytes that wait now to be sent and accepted.
  uint64_t queued_bytes;
  // Nanoseconds that the oldest waiting message or send has waited so far; 0 if nothing waits.
  uint64_t waiting_ns;
  // The path's round trip in nanoseconds, measured by the kernel; 0 if unknown, as over shared memory.
  uint64_t round_trip_ns;
  // Bytes per second that the peer last acknowledged while the path was full; 0 if unknown.
  uint64_t delivery_rate;
};

// The capabilities of a session's transport. Booleans are 0 or 1.
struct byway_capabilities {
  // One of `BYWAY_WIRE_*`, or 0 for a transport that this header does not name.
  uint32_t wire;
  // One of `BYWAY_ONE_SIDED_*`: which end or device moves the bytes of puts and gets.
  uint32_t one_sided;
  // Pieces of memory that one transfer can have; `SIZE_MAX` for any number. A payload with more pieces is sent in several.
  uintptr_t segments_max;
  // All bytes go through TLS.
  uint8_t secure;
  // A hostile peer can only use the windows that are open to it. Otherwise it reaches all of the memory that was lent to it;
  // over shared memory this interface lends none.
  uint8_t window_enforced;
  // Bytes may be sent from the program's memory without a copy.
  uint8_t zero_copy_send;
  // Memory is registered with a device before it is moved.
  uint8_t registers;
  // Payloads to the peer may lie in memory of a device.
  uint8_t device_memory;
};

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Joins the job that this process was started for, and waits for its other processes; once in a process. Reports on standard
// error why it failed. End it with `byway_dsm_finish`.
//
// # Safety
// `job` is writable.
int byway_dsm_init(struct byway_dsm_job **job);

// This process's number, from 0; negative if `job` is null.
//
// # Safety
// `job` is null or of `byway_dsm_init`.
int byway_dsm_rank(const struct byway_dsm_job *job);

// The number of processes of the job; negative if `job` is null.
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

// Waits for a lock. It excludes other processes and other threads of this process.
//
// # Safety
// `job` is of `byway_dsm_init`.
int byway_dsm_lock(const struct byway_dsm_job *job, uint32_t lock);

// Releases a lock that this process holds. Does nothing if the process does not hold it.
//
// # Safety
// `job` is of `byway_dsm_init`.
int byway_dsm_unlock(const struct byway_dsm_job *job, uint32_t lock);

// Waits until every process has reached the barrier, whose number is below 4294967294. One thread of each process calls this.
//
// # Safety
// `job` is of `byway_dsm_init`.
int byway_dsm_barrier(const struct byway_dsm_job *job,
                      uint32_t barrier);

// Orders this process's loads and stores before the fence with those behind it. With release consistency (`byway dsm run --consistency
// rc`) what was stored before is seen behind every fence, of any process, that begins later.
//
// # Safety
// `job` is of `byway_dsm_init`.
int byway_dsm_fence(const struct byway_dsm_job *job);

// Brings bytes of a segment to this process: pages that are not here are asked for at once, where loads would wait for one after the other.
// `BYWAY_E_RANGE`: the bytes do not lie in a segment that this process has mapped.
//
// # Safety
// `job` is of `byway_dsm_init`. `address` may be any.
int byway_dsm_fetch(const struct byway_dsm_job *job,
                    const uint8_t *address,
                    uintptr_t bytes);

// Allocates `bytes` in the segment in which `segment` lies, for all processes: nobody else gets them, and they are never given back. Writes their
// address to `*address`: a multiple of `alignment`, a power of two. With 4096, and `bytes` a multiple too, no other allocation lies on their pages.
// They hold zeroes, unless the program has stored there. The first 64 bytes of the segment say how much is allocated: a program that allocates in a segment
// stores only to what it got. `BYWAY_E_RANGE` if the segment has no room.
//
// # Safety
// `job` is of `byway_dsm_init`; `address` can be written.
int byway_dsm_allocate(const struct byway_dsm_job *job,
                       const uint8_t *segment,
                       uintptr_t bytes,
                       uintptr_t alignment,
                       uint8_t **address);

// Names `bytes` of memory at `address`, such as an array, for `byway dsm run --report` and `byway dsm top`: they show the names of what lies on a
// page that several processes store to. Of a name the last 48 bytes are kept, and of a process the first 1,024 names.
// `BYWAY_E_RANGE` if the bytes do not lie in a segment.
//
// # Safety
// `job` is of `byway_dsm_init`; `name` is a string that ends with a zero.
int byway_dsm_name(const struct byway_dsm_job *job,
                   const uint8_t *address,
                   uintptr_t bytes,
                   const char *name);

// A safe point of a program that computes: with `byway dsm run --pager points`, answers other processes that have asked this one for something.
// Otherwise it does nothing. It costs some 0.5 us when no process has asked; call it every 10 to 100 us.
//
// # Safety
// `job` is of `byway_dsm_init`.
int byway_dsm_poll(const struct byway_dsm_job *job);

// Waits until every process has called this, and writes the contents of all segments to the folder of `byway dsm run --checkpoint`. One thread of
// each process calls this, and no thread stores to a segment until it returns. Gives 1 when the checkpoint is durable, 0 without that
// flag. An error is the same in every process, and reported on standard error: the checkpoint before is still there.
//
// # Safety
// `job` is of `byway_dsm_init`.
int byway_dsm_checkpoint(const struct byway_dsm_job *job);

// 1 if the segments hold what they held at a checkpoint of an earlier job (`byway dsm run --resume`), else 0; negative if `job` is null.
//
// # Safety
// `job` is null or of `byway_dsm_init`.
int byway_dsm_is_resumed(const struct byway_dsm_job *job);

// Writes this process's counters to `*counters`.
//
// # Safety
// `job` is of `byway_dsm_init`; `counters` can be written.
int byway_dsm_statistics(const struct byway_dsm_job *job, struct byway_dsm_counters *counters);

// Waits until every process has called this, leaves the job and frees `job`. A process that ends without this ends the job for
// all.
//
// # Safety
// `job` is of `byway_dsm_init`; neither it nor a segment is used after.
int byway_dsm_finish(struct byway_dsm_job *job);

// The program begins (MAIN_INITENV). Each process of the job runs it from here to CREATE, with memory of its own. Does nothing if the program
// has begun by another call.
void byway_anl_begin(void);

// A number for a lock, a flag or a barrier.
uint32_t byway_anl_number(void);

// Allocates shared memory of zeroes (G_MALLOC), aligned to a page if it has a page or more, else to 64 bytes. `file` and `line` of the caller are its
// name in the reports of `byway dsm run --report` and `byway dsm top`.
//
// # Safety
// `file` is null or a string that ends with a zero.
void *byway_anl_malloc(uintptr_t bytes,
                       const char *file,
                       uint32_t line);

// Creates a process that runs `body` (CREATE), if `count` is 0; otherwise `count - 1` processes, and runs `body` in this one too. In a process
// that is created, this does not return.
//
// # Safety
// `body` is a function without arguments.
void byway_anl_create(void (*body)(void),
                      uint32_t count);

// Waits for the end of all processes (WAIT_FOR_END).
void byway_anl_wait(void);

// The end of the program (MAIN_END). Memory of G_MALLOC is gone then.
void byway_anl_end(void);

// Waits for a lock (LOCK).
void byway_anl_lock(uint32_t lock);

// Releases a lock (UNLOCK).
void byway_anl_unlock(uint32_t lock);

// Waits until all processes are at the barrier (BARRIER). `count` is 0 or the number of processes.
void byway_anl_barrier(uint32_t barrier, uint32_t count);

// Sets or clears a flag (SETPAUSE, CLEARPAUSE).
//
// # Safety
// `flag` is null or a flag of PAUSEDEC that PAUSEINIT has initialised.
void byway_anl_set(struct byway_anl_flag *flag, uint32_t is_set);

// Waits until a flag is set (WAITPAUSE). Looks at it again and again, with pauses of up to 1 ms.
//
// # Safety
// As [`byway_anl_set`].
void byway_anl_wait_for(const struct byway_anl_flag *flag);

// Releases a lock that the caller has, waits until a condition is signalled, and takes the lock again (CONDVARWAIT). Looks again and
// again, with pauses of up to 1 ms.
//
// # Safety
// `condition` is null or of CONDVARDEC, and signalled under the lock.
void byway_anl_wait_signal(const uint32_t *condition,
                           uint32_t lock);

// What a code says, in English; never null, and never freed.
const char *byway_error_text(int code);

// Maps `bytes` (rounded up to pages), zeroes at first, into `*far`, of which at most `resident_bytes` (1 MiB or more, and 2 MiB of buffers
// beside) are on this machine at a time. The rest lies at `count` lenders (`byway serve --lend`), at addresses as for `byway_connect`.
// `class` is one of `BYWAY_FAR_*`, perhaps with `BYWAY_FAR_ENCRYPT`; `folder` is where the file of `BYWAY_FAR_DISK` is made, else it may
// be null. Reports on standard error why it failed. Free it with `byway_far_close`. A forked child does not have the range.
// `madvise(MADV_DONTNEED)` of the range is not supported: pages that are far keep their bytes.
//
// # Safety
// `lenders` has `count` addresses that end with a zero byte; `folder` is null or ends with a zero byte; `far` can be written.
int byway_far_open(const char *const *lenders,
                   uintptr_t count,
                   uintptr_t bytes,
                   uintptr_t resident_bytes,
                   uint32_t class_,
                   const char *folder,
                   struct byway_far **far);

// The start of the range, at a page boundary; null if `far` is. Valid until `byway_far_close`.
//
// # Safety
// `far` is null or of `byway_far_open`.
uint8_t *byway_far_bytes(const struct byway_far *far);

// The size of the range in bytes; 0 if `far` is null.
//
// # Safety
// `far` is null or of `byway_far_open`.
uintptr_t byway_far_len(const struct byway_far *far);

// Writes what the pager has done to `*counters`.
//
// # Safety
// `far` is of `byway_far_open`; `counters` can be written.
int byway_far_statistics(const struct byway_far *far, struct byway_far_counters *counters);

// Unmaps the range, with its contents, and frees `far`. Does nothing for null.
//
// # Safety
// `far` is null or of `byway_far_open`; neither it nor its bytes are used after.
void byway_far_close(struct byway_far *far);

// Opens a node into `*node`. Free it with `byway_node_close`.
//
// # Safety
// `node` can be written.
int byway_node_open(struct byway_node **node);

// The same, for a node that also makes and takes calls (`byway_call_start`, `byway_next_call`). Its peers must be opened in
// the same way.
//
// # Safety
// `node` can be written.
int byway_node_open_for_calls(struct byway_node **node);

// Frees a node. Its sessions end abruptly, and it stops listening, when its operations, windows, groups and requests are freed
// too; close sessions before. Does nothing for null.
//
// # Safety
// `node` is null or of `byway_node_open` or `byway_node_open_for_calls`, and not used after.
void byway_node_close(struct byway_node *node);

// Listens at `tcp://IP:PORT`, `unix://PATH`, `shm://PATH` or `rdma://IP:PORT`. Returns the port (the one that the kernel
// chose, for port 0), or 0 if the address has none.
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

// Waits for a session that a peer begins, at most `timeout_ms`; for ever if negative.
//
// # Safety
// `node` is a node; `session` can be written.
int byway_accept(const struct byway_node *node, int64_t timeout_ms, uint64_t *session);

// Ends a session after its sent messages have gone out. Flush before, if puts must arrive.
//
// # Safety
// `node` is a node.
int byway_session_close(const struct byway_node *node, uint64_t session);

// A descriptor that is readable when `byway_progress` should be called. It belongs to the node: do not close it.
//
// # Safety
// `node` is a node.
int byway_node_descriptor(const struct byway_node *node);

// Does all pending work without waiting. Returns 1 if any operation has ended since the last call, else 0.
//
// # Safety
// `node` is a node.
int byway_progress(const struct byway_node *node);

// Allocates memory of `bytes` (at least 1): zeroes, at a page boundary. While operations or windows of one node use it, other
// nodes are refused (`BYWAY_E_OTHER_NODE`). Free it with `byway_memory_free`.
//
// # Safety
// `node` is a node; `memory` can be written.
int byway_register(const struct byway_node *node,
                   uintptr_t bytes,
                   struct byway_memory **memory);

// The start of the memory; null if `memory` is. The program must not change bytes that an operation uses, and may read mixed
// contents while one writes them; where the peer requires checksums, changing bytes during a put or a peer's get ends the
// session. Valid until the memory is freed.
//
// # Safety
// `memory` is null or of `byway_register`.
uint8_t *byway_memory_bytes(const struct byway_memory *memory);

// The size of the memory in bytes; 0 if `memory` is null.
//
// # Safety
// `memory` is null or of `byway_register`.
uintptr_t byway_memory_len(const struct byway_memory *memory);

// Frees memory. Memory that operations and windows still use is freed when they end. Does nothing for null.
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

// Closes and frees a window, and waits until its peer can no longer reach the memory: at most `timeout_ms`, for ever if
// negative. After `BYWAY_E_DEADLINE` the handle is freed and the window is still closing.
//
// # Safety
// `window` is of `byway_window_open`, and not used after.
int byway_window_close(struct byway_window *window,
                       int64_t timeout_ms);

// Sends a message: a header of at most 64 bytes and a payload of at most 16 KiB. Both are copied. `*op` ends when the message
// is on its way.
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

// Puts the bytes of up to 64 segments into a window of the peer, from `offset` on. `*op` ends when they have arrived there.
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

// Gets bytes of a window of the peer, from `offset` on, into up to 64 segments. `*op` ends when they have arrived.
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

// Waits for an operation and takes its result: at most `timeout_ms`, for ever if negative, without waiting if 0. Returns how
// the operation ended. `completion` may be null: then a message is discarded. The operation must still be freed.
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

// Requests the early end of an operation, which still ends once.
//
// # Safety
// `op` is an operation.
int byway_cancel(const struct byway_op *op);

// Frees an operation. If it has not ended it continues, and its result is dropped; but a receive is cancelled, and a message
// that was not taken goes to the next receive. Does nothing for null.
//
// # Safety
// `op` is null or an operation, and not used after.
void byway_op_free(struct byway_op *op);

// Writes the start of a message's header to `*bytes`, and returns its number of bytes. Valid until the message is freed.
//
// # Safety
// `message` is a message; `bytes` can be written.
int byway_message_header(const struct byway_message *message,
                         const uint8_t **bytes);

// Writes the start of a message's payload to `*bytes`, and returns its number of bytes. Valid until the message is freed.
//
// # Safety
// `message` is a message; `bytes` can be written.
int byway_message_payload(const struct byway_message *message,
                          const uint8_t **bytes);

// Frees a message. Does nothing for null.
//
// # Safety
// `message` is null or a message, and not used after.
void byway_message_free(struct byway_message *message);

// Creates a group of at most `capacity` operations (1 to 65,536). Free it with `byway_group_free`.
//
// # Safety
// `node` is a node; `group` can be written.
int byway_group_new(const struct byway_node *node, uintptr_t capacity, struct byway_group **group);

// Adds an operation and, on success, frees its handle; its completion will carry `context`. If the operation has ended
// already, its completion is available at once. `BYWAY_E_BUSY` if the group is full or the result was taken: then the caller
// keeps the operation unchanged, also if another thread waits for it. On success no thread may use the handle any more.
//
// # Safety
// `group` is a group; `op` is an operation of the same node; if this answers 0 it is in no other call, and not used after.
int byway_group_add(const struct byway_group *group,
                    struct byway_op *op,
                    uint64_t context);

// Waits for one of the group's operations: at most `timeout_ms`, for ever if negative, without waiting if 0. Returns 1 if one
// has ended: `*context` has its context, `*result` how it ended (0, or one of `BYWAY_E_*`), and `*completion`, which may be
// null, its result. Each completion goes to one waiting thread.
//
// # Safety
// `group` is a group; `context` and `result` can be written; `completion` is null or can be written.
int byway_group_wait(const struct byway_group *group,
                     int64_t timeout_ms,
                     uint64_t *context,
                     int *result,
                     struct byway_completion *completion);

// A descriptor that is readable while the group has completions. Operations only end while the node is driven: poll this
// descriptor together with `byway_node_descriptor`. It belongs to the group: do not close it.
//
// # Safety
// `group` is a group.
int byway_group_descriptor(const struct byway_group *group);

// Frees a group, and its operations as `byway_op_free` does. Does nothing for null.
//
// # Safety
// `group` is null or a group, and not used after.
void byway_group_free(struct byway_group *group);

// Calls the node at the other end of a session. `*op` ends with the answer: a message, whose header is the result. With
// `BYWAY_E_STATUS` the server answered another status than 0, which the completion has; with `BYWAY_E_EXPIRED` no answer
// arrived within `timeout_ms` (for ever if negative). Cancelling the operation notifies the server.
//
// # Safety
// `node` is a node, opened for calls; `call` is one, whose pointers have so many bytes as it says; `op` can be written.
int byway_call_start(const struct byway_node *node,
                     uint64_t session,
                     const struct byway_call *call,
                     int64_t timeout_ms,
                     struct byway_op **op);

// Waits for a call, at most `timeout_ms`, for ever if negative. Each call goes to one waiting thread.
//
// # Safety
// `node` is a node, opened for calls; `request` can be written.
int byway_next_call(const struct byway_node *node,
                    int64_t timeout_ms,
                    struct byway_request **request);

// The method number of a call.
//
// # Safety
// `request` is a request.
int byway_request_method(const struct byway_request *request);

// The session that a call came over; 0 if `request` is null. The call's windows belong to this session, unless it was
// delegated.
//
// # Safety
// `request` is null or a request.
uint64_t byway_request_session(const struct byway_request *request);

// Writes the start of a call's arguments to `*bytes`, and returns their number of bytes. Valid until the request is answered,
// delegated or freed.
//
// # Safety
// `request` is a request; `bytes` can be written.
int byway_request_arguments(const struct byway_request *request,
                            const uint8_t **bytes);

// Writes the start of a call's payload to `*bytes`, and returns its number of bytes. Valid as long as the arguments.
//
// # Safety
// `request` is a request; `bytes` can be written.
int byway_request_payload(const struct byway_request *request,
                          const uint8_t **bytes);

// Writes the start of the descriptors of a call's windows, 32 bytes each, to `*bytes`, and returns the number of windows.
// Valid as long as the arguments.
//
// # Safety
// `request` is a request; `bytes` can be written.
int byway_request_windows(const struct byway_request *request,
                          const uint8_t **bytes);

// 1 if the caller of a request no longer waits for the answer, else 0.
//
// # Safety
// `request` is a request.
int byway_request_is_cancelled(const struct byway_request *request);

// Answers a call and frees the request, also if this fails: `status` 0 for success, a result of at most 64 bytes, and a
// payload of at most 16 KiB with it. If the answer cannot be sent, the caller is told, if possible, that its call was
// abandoned.
//
// # Safety
// `request` is a request, and not used after; `result` and `payload` have so many bytes.
int byway_answer(struct byway_request *request,
                 uint16_t status,
                 const uint8_t *result,
                 uintptr_t result_bytes,
                 const uint8_t *payload,
                 uintptr_t payload_bytes);

// Delegates a call to the node at the other end of `third`, which answers the caller instead, and frees the request on
// success. That node receives `call`; its payload is the continuation, which must have everything that the third node needs,
// because no state of the call stays here. The third node can use the windows in it only if they were opened to its session.
// On failure the request is unchanged, also if another thread reads it. On success no thread may use it any more.
//
// # Safety
// `request` is a request; if this answers 0 it is in no other call, and not used after. `call` is one, whose pointers have so many
// bytes as it says.
int byway_delegate(struct byway_request *request,
                   uint64_t third,
                   const struct byway_call *call);

// Frees a request without an answer: its caller is told that it was abandoned. Does nothing for null.
//
// # Safety
// `request` is null or a request, and not used after.
void byway_request_free(struct byway_request *request);

// Writes the current measurements of a session's transfers to `*feedback`. Never waits for the peer.
//
// # Safety
// `node` is a node; `feedback` can be written.
int byway_session_feedback(const struct byway_node *node,
                           uint64_t session,
                           struct byway_feedback *feedback);

// Writes the capabilities of a session's transport to `*capabilities`. They do not change during the session.
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
