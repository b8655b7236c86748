/* SPDX-License-Identifier: Apache-2.0
 *
 * The communicator as an object: creation, end, the counts of what it moved, and its blocking collectives.
 */
#include "comm.h"
#include "../base/mem.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "shm/memfd.h"
#include "tcp/net.h"

enum { SPIN_TURNS = 2000, SPIN_TURNS_CROWDED = 50 };

static bool crowded(int ranks) {
    cpu_set_t cpus;
    const int count = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
    return ranks > count;
}

/* A forked child has the parent's descriptors and mappings, and must touch neither counters nor comm error. The kernel
 * wipes this page in a child, so a check costs one load and needs no global handler. */
static zpp_status make_fork_guard(struct zpp_comm *comm, struct zpp_err *err) {
    void *page = mmap(NULL, zpp_page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return zpp_fail_os(err, errno, "comm: no memory for a group");
    comm->fork_guard = page;
    atomic_store(comm->fork_guard, 1);
    if (madvise(page, zpp_page_bytes(), MADV_WIPEONFORK) != 0)
        return zpp_fail_os(err, errno,
                           "comm: this kernel cannot wipe a page in forked children (Linux 4.14 or newer is wanted)");
    return ZPP_OK;
}

static zpp_status check_options(const struct zpp_comm_options *options, struct zpp_err *err) {
    const char *name = options->name ? options->name : "default";
    if (options->ranks < 1 || options->ranks > ZPP_RANKS_MAX)
        return zpp_fail(err, ZPP_INVALID, "comm: group \"%s\" has %d ranks, wanted 1 to %d", name, options->ranks,
                        (int)ZPP_RANKS_MAX);
    if (options->network.full_ranks < 0)
        return zpp_fail(err, ZPP_INVALID, "comm: ZEROPP_FULL_RANKS is %d, wanted 1 or more",
                        options->network.full_ranks);
    if (options->rank < 0 || options->rank >= options->ranks)
        return zpp_fail(err, ZPP_INVALID, "comm: rank %d is not in 0..%d of group \"%s\"", options->rank,
                        options->ranks - 1, name);
    return ZPP_OK;
}

/* Join the ranks of this host, then those of other hosts, if there are any. */
static zpp_status join_ranks(struct zpp_comm *comm, const struct zpp_comm_options *options,
                             const struct zpp_store *store, struct zpp_err *err) {
    const struct zpp_wait forever = {comm->timeout_ns, NULL, NULL};
    struct zpp_wait wait = options->wait ? *options->wait : forever;
    struct zpp_hosts *hosts = malloc(sizeof *hosts);
    if (!hosts) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for a group of %d ranks", comm->ranks);
    wait.timeout_ns = comm->timeout_ns;
    zpp_status status = zpp_rendezvous(comm, &options->network, store, &wait, hosts, err);
    if (hosts->hosts <= 1) zpp_door_close(comm);
    if (status == ZPP_OK && hosts->hosts > 1) {
        comm->transport = &zpp_transport_tcp;
        status = zpp_net_create(comm, hosts, &options->network, store, &wait, err);
    }
    free(hosts);
    return status;
}

zpp_status zpp_comm_create(const struct zpp_comm_options *options, const struct zpp_store *store, zpp_comm **out,
                           struct zpp_err *err) {
    zpp_status status = check_options(options, err);
    if (status != ZPP_OK) return status;
    struct zpp_comm *comm = calloc(1, sizeof *comm);
    if (!comm) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for a group of %d ranks", options->ranks);
    comm->rank = options->rank;
    comm->ranks = options->ranks;
    comm->transport = &zpp_transport_memory;
    comm->timeout_ns = options->timeout_ns;
    comm->crowded = crowded(options->ranks);
    comm->spin_rounds = comm->crowded ? SPIN_TURNS_CROWDED : SPIN_TURNS; /* spinning may stop a peer */
    comm->log = options->log;
    comm->log_ctx = options->log_ctx;
    comm->base_bytes = sizeof(struct zpp_control) + (size_t)ZPP_PIPELINE_STAGES * ZPP_STAGE_SLOTS * ZPP_STAGE_BYTES;
    snprintf(comm->name, sizeof comm->name, "%s", options->name ? options->name : "default");
    pthread_mutex_init(&comm->message_lock, NULL);
    pthread_mutex_init(&comm->comm_error_lock, NULL);
    pthread_mutex_init(&comm->arena_lock, NULL);
    pthread_mutex_init(&comm->side_lock, NULL);
    for (int r = 0; r < comm->ranks; r++) comm->peer[r].socket = comm->peer[r].pidfd = -1;
    for (int r = 0; r < comm->ranks; r++) comm->job_rank[r] = r;
    status = make_fork_guard(comm, err);
    if (status == ZPP_OK) status = join_ranks(comm, options, store, err);
    if (status != ZPP_OK) {
        zpp_comm_destroy(comm);
        return status;
    }
    comm->joined = true;
    *out = comm;
    return ZPP_OK;
}

static void say_farewell(struct zpp_comm *comm, bool forked) {
    if (forked || atomic_load(&comm->closed)) return;
    if (atomic_load(&comm->linked)) zpp_comm_look_for_dead(comm);
    if (comm->base[comm->rank]) atomic_store(&zpp_control(comm, comm->rank)->left, 1);
    if (comm->net) zpp_net_farewell(comm); /* tells peers the group's error, so `closed` must not be one yet */
    atomic_store(&comm->closed, true);
}

void zpp_comm_leave(zpp_comm *comm) { say_farewell(comm, zpp_comm_forked(comm)); }

void zpp_comm_destroy(zpp_comm *comm) {
    if (!comm) return;
    const bool forked = zpp_comm_forked(comm);
    say_farewell(comm, forked);
    zpp_async_destroy(comm); /* these check for a forked child, which has no thread to join */
    zpp_p2p_destroy(comm);
    if (!forked) zpp_linked_remove(comm);
    zpp_net_destroy(comm, forked);
    zpp_door_close(comm);
    zpp_block_forget(comm->kept);
    zpp_arena_clear(comm);
    zpp_message_clear(comm);
    for (int r = 0; r < comm->ranks; r++) {
        if (comm->peer[r].socket >= 0) close(comm->peer[r].socket);
        if (comm->peer[r].pidfd >= 0) close(comm->peer[r].pidfd);
        zpp_memfd_unmap(comm->base[r], comm->base_bytes);
    }
    if (!forked) zpp_linked_drop(comm); /* no thread of this group is left */
    if (comm->fork_guard) munmap(comm->fork_guard, zpp_page_bytes());
    if (!forked) { /* a forked child may have inherited them locked */
        pthread_mutex_destroy(&comm->message_lock);
        pthread_mutex_destroy(&comm->comm_error_lock);
        pthread_mutex_destroy(&comm->arena_lock);
        pthread_mutex_destroy(&comm->side_lock);
    }
    free(comm);
}

void zpp_comm_set_timeout(zpp_comm *comm, uint64_t timeout_ns) { comm->timeout_ns = timeout_ns; }

void zpp_comm_set_name(zpp_comm *comm, const char *name) {
    snprintf(comm->name, sizeof comm->name, "%s", name);
    if (comm->net) zpp_comm_set_name(comm->net->local, name);
}

void zpp_comm_set_job_ranks(zpp_comm *comm, const int *job_ranks) {
    memcpy(comm->job_rank, job_ranks, (size_t)comm->ranks * sizeof *job_ranks);
}

int zpp_comm_job_rank(const zpp_comm *comm, int rank) { return zpp_label(comm, rank); }

uint32_t zpp_comm_new_owner(zpp_comm *comm) { return comm->owners++ % ZPP_OWNERS; }

int zpp_comm_rank(const zpp_comm *comm) { return comm->rank; }
int zpp_comm_ranks(const zpp_comm *comm) { return comm->ranks; }
int zpp_comm_hosts(const zpp_comm *comm) { return comm->net ? comm->net->hosts.hosts : 1; }
int zpp_comm_host(const zpp_comm *comm, int rank) { return comm->net ? comm->net->hosts.host_of[rank] : 0; }
uint64_t zpp_comm_timeout_ns(const zpp_comm *comm) { return comm->timeout_ns; }

void zpp_comm_traffic(const zpp_comm *comm, struct zpp_traffic *out) {
    for (int kind = 0; kind < ZPP_TRAFFIC_KINDS; kind++) {
        out->bytes[kind] = atomic_load_explicit(&comm->traffic_bytes[kind], memory_order_relaxed);
        out->calls[kind] = atomic_load_explicit(&comm->traffic_calls[kind], memory_order_relaxed);
        out->far_bytes[kind] = atomic_load_explicit(&comm->traffic_far_bytes[kind], memory_order_relaxed);
        out->network_bytes[kind] =
            comm->net ? atomic_load_explicit(&comm->net->network_bytes[kind], memory_order_relaxed) : 0;
    }
}

void zpp_comm_count(zpp_comm *comm, enum zpp_traffic_kind kind, uint64_t bytes) { zpp_count_call(comm, kind, bytes); }

/* --- collectives that block --------------------------------------------------------------------------------------- */

zpp_status zpp_all_reduce(zpp_comm *comm, void *data, size_t elems, zpp_dtype dtype, zpp_reduce_op op,
                          const struct zpp_wait *wait, struct zpp_err *err) {
    const struct zpp_call call = {.coll = ZPP_COLL_ALL_REDUCE, .dtype = dtype, .op = op, .dst = data, .elems = elems};
    return zpp_comm_call(comm, &call, wait, err);
}

zpp_status zpp_all_gather(zpp_comm *comm, void *dst, const void *src, size_t src_bytes, const struct zpp_wait *wait,
                          struct zpp_err *err) {
    const struct zpp_call call = {
        .coll = ZPP_COLL_ALL_GATHER, .dtype = ZPP_U8, .dst = dst, .src = src, .elems = src_bytes};
    return zpp_comm_call(comm, &call, wait, err);
}

zpp_status zpp_reduce_scatter(zpp_comm *comm, void *dst, const void *src, size_t dst_elems, zpp_dtype dtype,
                              zpp_reduce_op op, const struct zpp_wait *wait, struct zpp_err *err) {
    const struct zpp_call call = {
        .coll = ZPP_COLL_REDUCE_SCATTER, .dtype = dtype, .op = op, .dst = dst, .src = src, .elems = dst_elems};
    return zpp_comm_call(comm, &call, wait, err);
}

zpp_status zpp_broadcast(zpp_comm *comm, void *data, size_t bytes, int root, const struct zpp_wait *wait,
                         struct zpp_err *err) {
    const struct zpp_call call = {
        .coll = ZPP_COLL_BROADCAST, .dtype = ZPP_U8, .root = root, .dst = data, .elems = bytes};
    return zpp_comm_call(comm, &call, wait, err);
}

zpp_status zpp_barrier(zpp_comm *comm, const struct zpp_wait *wait, struct zpp_err *err) {
    const struct zpp_call call = {.coll = ZPP_COLL_BARRIER};
    return zpp_comm_call(comm, &call, wait, err);
}
