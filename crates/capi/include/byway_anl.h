/* The macros of Argonne National Laboratory (PARMACS) over byway's shared memory, for programs such as those of SPLASH:
 *
 *     cc -include byway_anl.h program.c $(pkg-config --cflags --libs byway) -o program
 *     byway dsm run -n 4 -- ./program ...
 *
 * Sources that are processed by m4 take c.m4.byway, which lies beside this file, as their macro file.
 *
 * Only memory of G_MALLOC is shared; other variables are private to each process, and have the values that they had at CREATE.
 * docs/shared-memory.md has the rules. What fails ends the process with a message, and with it the job. */

#ifndef BYWAY_ANL_H
#define BYWAY_ANL_H

#include <assert.h>
#include <byway.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <unistd.h>

#ifndef PAGE_SIZE
#define PAGE_SIZE 4096
#endif

#define MAIN_ENV
#define EXTERN_ENV

/* The program. Each process of the job runs it up to CREATE. */
#define MAIN_INITENV(...) { byway_anl_begin(); }
#define MAIN_END { byway_anl_end(); exit(0); }

/* CREATE(body): one process more. CREATE(body, n): n processes, one of which is the caller. */
#define CREATE(...) BYWAY_ANL_CREATE(__VA_ARGS__, 0, 0)
#define BYWAY_ANL_CREATE(body, count, ...) { byway_anl_create((void (*)(void))(body), (count)); }
#define WAIT_FOR_END(count) { byway_anl_wait(); }

/* Memory: zeroes at first; never given back. Programs leave out the semicolon behind it. */
#define G_MALLOC(...) BYWAY_ANL_MALLOC(__VA_ARGS__, 0)
#define NU_MALLOC(...) BYWAY_ANL_MALLOC(__VA_ARGS__, 0)
#define BYWAY_ANL_MALLOC(bytes, ...) byway_anl_malloc(bytes, __FILE__, __LINE__);
#define G_FREE(memory) { (void)(memory); }
#define NU_FREE(memory) { (void)(memory); }

/* Locks, barriers and flags lie in shared memory, and are initialised before their use. */
#define LOCKDEC(lock) unsigned int lock;
#define LOCKINIT(lock) { (lock) = byway_anl_number(); }
#define LOCK(lock) { byway_anl_lock(lock); }
#define UNLOCK(lock) { byway_anl_unlock(lock); }

#define ALOCKDEC(locks, count) unsigned int locks[count];
#define ALOCKINIT(locks, count) { int byway_at; for (byway_at = 0; byway_at < (int)(count); byway_at++) (locks)[byway_at] = byway_anl_number(); }
#define ALOCK(locks, at) { byway_anl_lock((locks)[at]); }
#define AGETL(locks, at) ((locks)[at])
#define AULOCK(locks, at) { byway_anl_unlock((locks)[at]); }

/* All processes meet at a barrier. */
#define BARDEC(barrier) unsigned int barrier;
#define BARINIT(...) BYWAY_ANL_BARINIT(__VA_ARGS__, 0)
#define BYWAY_ANL_BARINIT(barrier, ...) { (barrier) = byway_anl_number(); }
#define BARRIER(...) BYWAY_ANL_BARRIER(__VA_ARGS__, 0, 0)
#define BYWAY_ANL_BARRIER(barrier, count, ...) { byway_anl_barrier((barrier), (count)); }

#define PAUSEDEC(flag) struct byway_anl_flag flag;
#define PAUSEINIT(flag) { (flag).lock = byway_anl_number(); (flag).is_set = 0; }
#define SETPAUSE(flag) { byway_anl_set(&(flag), 1); }
#define CLEARPAUSE(flag) { byway_anl_set(&(flag), 0); }
#define WAITPAUSE(flag) { byway_anl_wait_for(&(flag)); }

/* Conditions count their signals, under the lock of those that wait. */
#define CONDVARDEC(condition) unsigned int condition;
#define CONDVARINIT(condition) { (condition) = 0; }
#define CONDVARWAIT(condition, lock) { byway_anl_wait_signal(&(condition), (lock)); }
#define CONDVARSIGNAL(condition) { (condition)++; }
#define CONDVARBCAST(condition) { (condition)++; }

/* Of the processor: with release consistency only locks and barriers order accesses. */
#define RELEASE_FENCE() { atomic_thread_fence(memory_order_release); }
#define ACQUIRE_FENCE() { atomic_thread_fence(memory_order_acquire); }
#define FULL_FENCE() { atomic_thread_fence(memory_order_seq_cst); }

#define SPLASH3_ROI_BEGIN()
#define SPLASH3_ROI_END()

/* Microseconds. */
#define CLOCK(time) { struct timeval byway_now; gettimeofday(&byway_now, 0); (time) = byway_now.tv_sec * 1000000L + byway_now.tv_usec; }

#endif
