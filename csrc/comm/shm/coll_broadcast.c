/* SPDX-License-Identifier: Apache-2.0
 *
 * Broadcast: every rank's data = the root's. Every rank but the root reads `bytes` from the root:
 *
 *   small     payload beside the root's signature
 *   in place  the root's tensor lies in an arena: one copy a byte, then one final phase
 *   staged    rounds of ZPP_STAGE_BYTES through the root's slots. The others publish empty rounds, and the root takes
 *             those, so that all counters stay equal.
 */
#include <string.h>

#include "../internal.h"
#include "../reduce.h"

static zpp_status small(struct zpp_wait_ctx *wait_ctx, void *data, size_t bytes, int root, struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    const bool sender = comm->rank == root;
    const zpp_status status = zpp_exchange_small(wait_ctx, data, sender ? bytes : 0, err);
    if (status == ZPP_OK && !sender) memcpy(data, zpp_payload(comm, root, bytes), bytes);
    return status;
}

static size_t chunk_at(size_t bytes, size_t at) { return bytes - at < ZPP_STAGE_BYTES ? bytes - at : ZPP_STAGE_BYTES; }

static zpp_status send(struct zpp_wait_ctx *wait_ctx, const uint8_t *data, size_t bytes, struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    for (size_t at = 0; at < bytes; at += ZPP_STAGE_BYTES) {
        uint8_t *slot = NULL;
        const zpp_status status = zpp_stage_begin(wait_ctx, 0, &slot, err);
        if (status != ZPP_OK) return status;
        zpp_stage_copy(comm, slot, data + at, chunk_at(bytes, at));
        zpp_stage_publish(comm, 0);
        zpp_take_end(comm, 0);
    }
    return ZPP_OK;
}

static zpp_status receive(struct zpp_wait_ctx *wait_ctx, uint8_t *data, size_t bytes, int root, struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    for (size_t at = 0; at < bytes; at += ZPP_STAGE_BYTES) {
        zpp_stage_publish(comm, 0);
        const zpp_status status = zpp_take_begin(wait_ctx, 0, err);
        if (status != ZPP_OK) return status;
        zpp_copy(data + at, zpp_stage(comm, root, 0, comm->taken[0]), chunk_at(bytes, at), zpp_own_nontemporal(comm));
        zpp_take_end(comm, 0);
    }
    return ZPP_OK;
}

zpp_status zpp_coll_broadcast(struct zpp_wait_ctx *wait_ctx, void *data, size_t bytes, int root, struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    const bool sender = comm->rank == root;
    const uint8_t *tensor = NULL;
    bool in_arena = false;
    zpp_count_call(comm, ZPP_TRAFFIC_BROADCAST, sender ? 0 : bytes);
    if (comm->ranks == 1) return ZPP_OK;
    if (bytes <= ZPP_SMALL_BYTES) return small(wait_ctx, data, bytes, root, err);
    zpp_status status = zpp_exchange_place_of(wait_ctx, root, data, bytes, &in_arena, &tensor, err);
    if (status != ZPP_OK) return status;
    const uint64_t start_ns = zpp_now_ns();
    if (in_arena) {
        if (!sender) zpp_copy(data, tensor, bytes, zpp_own_nontemporal(comm));
        return zpp_step_last(wait_ctx, start_ns, err);
    }
    status = sender ? send(wait_ctx, data, bytes, err) : receive(wait_ctx, data, bytes, root, err);
    if (status == ZPP_OK) zpp_store_policy_learn(comm, zpp_now_ns() - start_ns);
    return status;
}
