/* SPDX-License-Identifier: Apache-2.0
 *
 * The ranks of this host as a group of their own, on the control memory that the whole group exchanged, so that the
 * code for one host runs inside a host. The local group uses the counters in that memory, which the whole group does
 * not. Its comm error, dead ranks and messages are those of the whole group (comm_error.c, zpp_label).
 */
#include <stdlib.h>

#include "net.h"

zpp_status zpp_local_create(struct zpp_comm *comm, struct zpp_comm **out, struct zpp_err *err) {
    const struct zpp_hosts *hosts = &comm->net->hosts;
    struct zpp_comm *local = calloc(1, sizeof *local);
    if (!local) return zpp_fail(err, ZPP_NOMEM, "comm: no memory for the ranks of this host");
    *local = *comm;
    local->net = NULL;
    local->transport = &zpp_transport_memory;
    local->outer = comm;
    local->rank = hosts->index_of[comm->rank];
    local->ranks = hosts->count[hosts->mine];
    local->first_here = 0;
    local->arenas = NULL;
    local->async = NULL;
    local->p2p = NULL;
    local->door = NULL;
    for (int k = 0; k < ZPP_RANKS_MAX; k++) {
        const int rank = k < local->ranks ? zpp_rank_at(hosts, hosts->mine, k) : -1;
        local->outer_rank[k] = rank;
        local->base[k] = rank >= 0 ? comm->base[rank] : NULL;
        local->peer[k] = (struct zpp_peer){-1, -1, rank >= 0 ? comm->peer[rank].pid : 0, NULL};
    }
    pthread_mutex_init(&local->message_lock, NULL);
    pthread_mutex_init(&local->comm_error_lock, NULL);
    pthread_mutex_init(&local->arena_lock, NULL);
    pthread_mutex_init(&local->side_lock, NULL);
    *out = local;
    return ZPP_OK;
}

void zpp_local_destroy(struct zpp_comm *local, bool forked) {
    if (!local) return;
    zpp_arena_clear(local);
    if (!forked) {
        pthread_mutex_destroy(&local->message_lock);
        pthread_mutex_destroy(&local->comm_error_lock);
        pthread_mutex_destroy(&local->arena_lock);
        pthread_mutex_destroy(&local->side_lock);
    }
    free(local);
}

zpp_comm *zpp_comm_here(zpp_comm *comm) { return comm->net ? comm->net->local : comm; }

zpp_status zpp_hier_intranode(struct zpp_wait_ctx *inside, struct zpp_err *err) {
    struct zpp_comm *local = inside->comm;
    const struct zpp_wait_ctx like = *inside; /* describes the whole collective */
    const zpp_status status = zpp_enter(local, local->outer->now, like.wait, inside, err);
    inside->describe = like.describe;
    inside->ctx = like.ctx;
    return status;
}
