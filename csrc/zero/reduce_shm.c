/* SPDX-License-Identifier: Apache-2.0
 *
 * Reductions on one host: each is one operation on the reduce stream that remembers how far it came (`round`), because
 * on cpu it is asked again and again until the slowest rank has posted. The rings' descriptors carry unit, pass and
 * length: where ranks disagree, nothing is added, and the error on both has what both sides did.
 *
 *   arrived the bucket has what the accelerator computed (grad_path.h)
 *   pack    the bucket in fewer bits, where gradients travel so (wire.c)
 *   post    this rank's descriptor: the peers may read the bucket
 *   load    the shard's memory, with what it has so far (grad_store.h)
 *   add     shard r of all ranks' buckets, in rank order
 *   post_shard, copy   stage 0: this rank's shard is made, and then those of the others are copied
 *
 * In a pass, add and copy wait until the thread waits anyway (is_deferred).
 */
#include "reduce.h"

#include <string.h>

#include "grad_path.h"
#include "grad_store.h"
#include "internal.h"

struct zpp_desc zpp_reduce_desc(const struct zpp_unit_grad *grad, uint64_t kind) {
    return (struct zpp_desc){
        .kind = kind,
        .object = (uint64_t)grad->unit->index,
        .step = grad->pass,
        .elems = grad->unit->elems,
        .offset_bytes = grad->empty ? ZPP_NO_BUCKET : grad->bucket_offset_bytes,
    };
}

zpp_status zpp_reduce_read_peers(zpp_zero *zero, struct zpp_unit_grad *grad, zpp_desc_ring *ring, uint64_t kind,
                                 uint64_t seq, const struct zpp_wait *wait, struct zpp_err *err) {
    const struct zpp_desc expect = zpp_reduce_desc(grad, kind);
    const struct zpp_group *group = grad->unit->group;
    (void)zero;
    if (!ring) grad->peer_offsets[0] = expect.offset_bytes; /* one rank */
    for (int at = 0; ring && at < group->ranks; at++) {
        struct zpp_desc desc;
        const zpp_status status = zpp_desc_ring_read(ring, group->members[at], seq, &expect, wait, &desc, err);
        if (status != ZPP_OK) return status;
        grad->peer_offsets[at] = desc.offset_bytes;
    }
    return ZPP_OK;
}

/* Note which parameters have a gradient on any member of the unit's group. Return the number of sources, and fill
 * `sources` for this rank's shard, and `from`, whose they are. */
static int collect_sources(zpp_zero *zero, struct zpp_unit_grad *grad, const void **sources, int *from) {
    const struct zpp_unit *unit = grad->unit;
    const struct zpp_group *group = unit->group;
    int count = 0;
    for (int at = 0; at < group->ranks; at++) {
        if (grad->peer_offsets[at] == ZPP_NO_BUCKET) continue;
        const unsigned char *bucket = zpp_grads_of_rank(zero, group->members[at]) + grad->peer_offsets[at];
        const uint8_t *touched = bucket + zpp_grad_whole_bytes(grad);
        for (size_t i = 0; i < unit->params; i++) grad->present[i] |= touched[i];
        from[count] = group->members[at];
        sources[count++] = bucket + (size_t)group->rank * zpp_grad_shard_bytes(grad);
        /* Where the bucket keeps the result, the result would overwrite what is still to be read of it. */
        if (at == group->rank && zpp_keeps_buckets(zero) && zpp_wire_narrows(unit))
            sources[count - 1] = zpp_wire_aside(zero, unit, sources[count - 1]);
    }
    return count;
}

void zpp_reduce_count_traffic(const zpp_zero *zero, const struct zpp_unit_grad *grad) {
    const struct zpp_unit *unit = grad->unit;
    const size_t source_bytes =
        zpp_wire_quantises_grads(zero) ? zpp_wire_qcopy_bytes(zero, unit) : zpp_wire_shard_bytes(unit);
    int read = 0;
    if (unit->group->ranks == 1) return;
    for (int at = 0; at < unit->group->ranks; at++)
        read += at != unit->group->rank && grad->peer_offsets[at] != ZPP_NO_BUCKET;
    zpp_comm_count(zero->options.comm, zero->options.stage == 0 ? ZPP_TRAFFIC_ALL_REDUCE : ZPP_TRAFFIC_REDUCE_SCATTER,
                   (uint64_t)read * source_bytes);
}

static zpp_status add_shards(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    const struct zpp_unit *unit = grad->unit;
    const void *sources[ZPP_RANKS_MAX];
    int from[ZPP_RANKS_MAX];
    const int count = collect_sources(zero, grad, sources, from);
    if (count == 0) return ZPP_OK;
    const zpp_status status = zero->store->acquire ? zero->store->acquire(zero, grad, err) : ZPP_OK;
    if (status != ZPP_OK) return status;
    unsigned char *to = grad->shard;
    if (zero->options.stage == 0) to += (size_t)unit->group->rank * zpp_grad_shard_bytes(grad);
    const struct zpp_sources all = { sources, from, count, zpp_grad_factor(zero, unit, unit->group->divisor),
                                     zpp_reduce_accumulates(zero, grad) };
    zpp_origin_note(zero, grad, zpp_origin_add(zero, unit, &all, to));
    zpp_bucket_add_carry(grad, to);
    grad->has = grad->changed = true;
    zpp_reduce_count_traffic(zero, grad);
    return ZPP_OK;
}

/* Stage 0: rank r has finished shard r, so no rank reads shard r of this bucket any more, and it may be overwritten. */
static void copy_shards(zpp_zero *zero, struct zpp_unit_grad *grad) {
    const size_t bytes = zpp_grad_shard_bytes(grad);
    const struct zpp_group *group = grad->unit->group;
    uint64_t copied_bytes = 0;
    for (int at = 0; at < group->ranks && grad->has; at++) {
        if (at == group->rank) continue;
        const unsigned char *made =
            (const unsigned char *)zpp_region_base(zero->grads, group->members[at]) + grad->mapping_offset_bytes;
        memcpy(grad->shard + (size_t)at * bytes, made + (size_t)at * bytes, bytes);
        copied_bytes += bytes;
    }
    zpp_comm_count(zero->options.comm, ZPP_TRAFFIC_ALL_REDUCE, copied_bytes);
}

/* --- its rounds: each returns OK when it is over; AGAIN and errors leave the reduction in it ---------------------- */

static zpp_status arrived(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait,
                          struct zpp_err *err) {
    return zero->path->arrived ? zero->path->arrived(zero, grad, wait, err) : ZPP_OK;
}

static zpp_status pack(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)wait, (void)err;
    unsigned char *bucket = grad->empty ? NULL : zpp_bucket_of(zero, grad->unit);
    if (bucket && zpp_wire_quantises_grads(zero)) zpp_wire_quantise_bucket(zero, grad->unit, bucket);
    else if (bucket && zpp_wire_narrows(grad->unit)) zpp_wire_narrow(zero, grad->unit, bucket);
    return ZPP_OK;
}

static zpp_status post(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait, struct zpp_err *err) {
    const struct zpp_desc desc = zpp_reduce_desc(grad, ZPP_DESC_REDUCE);
    if (!zero->ring) return ZPP_OK;
    return zpp_desc_ring_post(zero->ring, &desc, wait, &grad->seq, err);
}

static zpp_status load(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait, struct zpp_err *err) {
    return zero->store->load ? zero->store->load(zero, grad, wait, err) : ZPP_OK;
}

/* In a pass of many backwards (pass.c) a sum that nobody waits for would delay the gradient for the stage before. */
static bool is_deferred(const zpp_zero *zero, const struct zpp_wait *wait) {
    return zero->defers && !zero->may_sum && !wait;
}

static zpp_status add(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait, struct zpp_err *err) {
    const struct zpp_grad_store *store = zero->store;
    if (is_deferred(zero, wait)) return ZPP_AGAIN;
    zpp_status status = zpp_reduce_read_peers(zero, grad, zero->ring, ZPP_DESC_REDUCE, grad->seq, wait, err);
    if (status == ZPP_OK && store->load_wait) status = store->load_wait(zero, grad, wait);
    const uint64_t began_ns = zpp_span_begin();
    if (status == ZPP_OK) status = add_shards(zero, grad, err);
    if (status != ZPP_OK) return status;
    zpp_span_end(began_ns, ZPP_SPAN_REDUCE, grad->unit->name, zpp_grad_shard_bytes(grad));
    if (zero->ring) zpp_desc_ring_ack(zero->ring, grad->seq);
    zero->may_sum = false;
    return store->complete ? store->complete(zero, grad, err) : ZPP_OK;
}

static zpp_status post_shard(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait,
                             struct zpp_err *err) {
    struct zpp_desc desc = zpp_reduce_desc(grad, ZPP_DESC_COPY);
    if (!zero->copy_ring) return ZPP_OK;
    desc.offset_bytes = grad->origins; /* of my shard: where that lies is known */
    return zpp_desc_ring_post(zero->copy_ring, &desc, wait, &grad->copy_seq, err);
}

static zpp_status copy(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait, struct zpp_err *err) {
    if (!zero->copy_ring) return ZPP_OK;
    if (is_deferred(zero, wait)) return ZPP_AGAIN;
    const zpp_status status =
        zpp_reduce_read_peers(zero, grad, zero->copy_ring, ZPP_DESC_COPY, grad->copy_seq, wait, err);
    if (status != ZPP_OK) return status;
    copy_shards(zero, grad);
    for (int at = 0; at < grad->unit->group->ranks; at++) grad->origins |= grad->peer_offsets[at];
    zpp_desc_ring_ack(zero->copy_ring, grad->copy_seq);
    return ZPP_OK;
}

static const zpp_reduce_round rounds[] = {arrived, pack, post, load, add, post_shard, copy, NULL};

zpp_status zpp_reduce_run_rounds(const zpp_reduce_round *all, struct zpp_unit_grad *grad, const struct zpp_wait *wait,
                                 struct zpp_err *err) {
    for (; all[grad->round]; grad->round++) {
        const zpp_status status = all[grad->round](grad->zero, grad, wait, err);
        if (status != ZPP_OK) return status;
    }
    return ZPP_OK;
}

zpp_status zpp_reduce_shm(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native;
    return zpp_reduce_run_rounds(rounds, *(struct zpp_unit_grad **)arg, wait, err);
}
