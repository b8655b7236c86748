/* SPDX-License-Identifier: Apache-2.0
 *
 * All-gather: dst[r] = src of rank r. Each rank reads (N - 1) * bytes from its peers, whatever the
 * way:
 *
 *   small     payload beside the signature; one publication, one round of reads
 *   in place  every src lies in an arena: peers copy it from there; one copy a byte, one final phase (until it is
 * passed, src is being read) staged    rounds of ZPP_STAGE_BYTES: fill my slot, copy out of the peers' slots of the
 * round before
 */
#include <string.h>

#include "internal.h"
#include "reduce.h"

static void copy_own(void *dst, const void *src, size_t bytes, bool stream) {
    if (dst != src && bytes) zpp_copy(dst, src, bytes, stream);
}

static zpp_status small(struct zpp_turn *turn, void *const *dst, const void *src, size_t bytes, struct zpp_err *err) {
    struct zpp_comm *comm = turn->comm;
    const zpp_status status = zpp_exchange_small(turn, src, bytes, err);
    if (status != ZPP_OK) return status;
    for (int r = 0; r < comm->ranks; r++) {
        if (r != comm->rank)
            memcpy(dst[r], zpp_payload(comm, r, bytes), bytes);
        else
            copy_own(dst[r], src, bytes, false);
    }
    return ZPP_OK;
}

static zpp_status in_place(struct zpp_turn *turn, void *const *dst, const uint8_t *const *src, size_t bytes,
                           bool stream, struct zpp_err *err) {
    struct zpp_comm *comm = turn->comm;
    for (int k = 0; k < comm->ranks; k++) { /* each rank begins with itself, so that readers spread over the sources */
        const int r = (comm->rank + k) % comm->ranks;
        copy_own(dst[r], src[r], bytes, stream);
    }
    return zpp_step_wait(turn, zpp_step_pass(comm), err);
}

static zpp_status take(struct zpp_turn *turn, void *const *dst, size_t at, size_t chunk, bool stream,
                       struct zpp_err *err) {
    struct zpp_comm *comm = turn->comm;
    const zpp_status status = zpp_take_begin(turn, 0, err);
    if (status != ZPP_OK) return status;
    for (int k = 1; k < comm->ranks; k++) {
        const int r = (comm->rank + k) % comm->ranks;
        zpp_copy((uint8_t *)dst[r] + at, zpp_stage(comm, r, 0, comm->taken[0]), chunk, stream);
    }
    zpp_take_end(comm, 0);
    return ZPP_OK;
}

static size_t chunk_at(size_t bytes, size_t at) { return bytes - at < ZPP_STAGE_BYTES ? bytes - at : ZPP_STAGE_BYTES; }

static zpp_status staged(struct zpp_turn *turn, void *const *dst, const uint8_t *src, size_t bytes, bool stream,
                         struct zpp_err *err) {
    struct zpp_comm *comm = turn->comm;
    zpp_status status = ZPP_OK;
    for (size_t at = 0; at < bytes; at += ZPP_STAGE_BYTES) {
        uint8_t *slot = NULL;
        status = zpp_stage_begin(turn, 0, &slot, err);
        if (status != ZPP_OK) return status;
        memcpy(slot, src + at, chunk_at(bytes, at));
        zpp_stage_publish(comm, 0);
        copy_own((uint8_t *)dst[comm->rank] + at, src + at, chunk_at(bytes, at), stream); /* from the cache */
        if (at) status = take(turn, dst, at - ZPP_STAGE_BYTES, ZPP_STAGE_BYTES, stream, err);
        if (status != ZPP_OK) return status;
    }
    const size_t last = (bytes - 1) / ZPP_STAGE_BYTES * ZPP_STAGE_BYTES;
    return take(turn, dst, last, bytes - last, stream, err);
}

zpp_status zpp_coll_all_gather(struct zpp_turn *turn, void *const *dst, const void *src, size_t bytes,
                               struct zpp_err *err) {
    struct zpp_comm *comm = turn->comm;
    const bool stream = bytes * (size_t)comm->ranks >= ZPP_STREAM_BYTES;
    const uint8_t *tensor[ZPP_RANKS_MAX];
    bool all_in_arenas = false;
    zpp_count_call(comm, ZPP_TRAFFIC_ALL_GATHER, bytes * (uint64_t)(comm->ranks - 1));
    if (comm->ranks == 1) {
        copy_own(dst[0], src, bytes, stream);
        return ZPP_OK;
    }
    if (bytes <= ZPP_SMALL_BYTES) return small(turn, dst, src, bytes, err);
    const zpp_status status = zpp_exchange_place(turn, src, bytes, &all_in_arenas, tensor, err);
    if (status != ZPP_OK) return status;
    return all_in_arenas ? in_place(turn, dst, tensor, bytes, stream, err) : staged(turn, dst, src, bytes, stream, err);
}
