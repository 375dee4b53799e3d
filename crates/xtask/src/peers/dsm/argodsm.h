/* The macros of byway_anl.h over ArgoDSM: each node runs the whole program, and prepares the same memory before CREATE. */

#ifndef ARGODSM_H
#define ARGODSM_H

#include <argo.hpp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <sys/time.h>

using argo_lock = argo::globallock::global_tas_lock;

/* Locks by their fields in shared memory; the objects are each node's own. */
static std::map<void *, std::unique_ptr<argo_lock>> argo_locks;

#define MAIN_ENV
#define MAIN_INITENV(...) argo::init(256UL << 20, 256UL << 20);
#define MAIN_END { argo::finalize(); exit(0); }

#define CREATE(body, count) { argo::barrier(); (body)(); }
#define WAIT_FOR_END(count) { argo::barrier(); }

/* Converts to any pointer, as void * does in C. */
struct argo_memory {
    char *bytes;
    template <typename T> operator T *() const { return reinterpret_cast<T *>(bytes); }
};
#define G_MALLOC(bytes) argo_memory{argo::conew_array<char>(bytes)}

#define LOCKDEC(it) argo_lock::internal_field_type it;
#define LOCKINIT(it) { argo_locks[&(it)] = std::make_unique<argo_lock>(&(it)); }
#define LOCK(it) { argo_locks.at(&(it))->lock(); }
#define UNLOCK(it) { argo_locks.at(&(it))->unlock(); }

#define BARDEC(it) char it;
#define BARINIT(it, count) {}
#define BARRIER(it, count) { argo::barrier(); }

#define CLOCK(it) { struct timeval now; gettimeofday(&now, NULL); (it) = now.tv_sec * 1000000L + now.tv_usec; }

/* The first node prints. */
#define printf(...) (argo::node_id() == 0 ? printf(__VA_ARGS__) : 0)

#endif
