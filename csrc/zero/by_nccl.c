/* SPDX-License-Identifier: Apache-2.0
 *
 * Shards on the device where a rank cannot map the memory of all others: on several hosts, or where GPUs are no peers
 * (docs/design/0052-gpus-of-several-hosts.md). NCCL moves the bytes, and only moves them: an all-gather has the shards
 * of a unit, and an exchange gives each rank its shard of every bucket, which the kernel of one host then adds in rank
 * order. So the bits are those of one host.
 *
 * Calls of NCCL have to come in one order on all ranks. So they are enqueued where the program is the same on all of
 * them (a unit is needed; a bucket goes out), and never when something has arrived. The host therefore does not know
 * yet which ranks have gradients: one that has none sends zeros. Which parameters have a gradient anywhere is a
 * collective of the communicator beside that, and the end of the reduction for the host.
 */
#include <stdlib.h>
#include <string.h>

#include "../comm/stream_sum.h"
#include "grad_path.h"
#include "grad_store.h"
#include "internal.h"
#include "on_device.h"

/* --- calls -------------------------------------------------------------------------------------------------------- */

zpp_status zpp_by_nccl_all_gather(const struct zpp_group *group, zpp_stream *stream, uint32_t object, void *dst,
                                  const void *src, size_t bytes, struct zpp_err *err) {
    const struct zpp_call call = {
        .coll = ZPP_COLL_ALL_GATHER, .dtype = ZPP_U8, .dst = dst, .src = src, .elems = bytes, .object = object};
    return zpp_nccl_order(group->nccl, &call, 1, stream, err);
}

/* --- reductions --------------------------------------------------------------------------------------------------- */

/* The shard of each rank of the group in this rank's bucket, and where those of this rank come. Own: not sent, because
 * it is here. */
struct exchange {
    const void *srcs[ZPP_STREAM_SUM_SOURCES];
    void *dsts[ZPP_STREAM_SUM_SOURCES];
    size_t bytes[ZPP_STREAM_SUM_SOURCES];
};

static void lay_out(const zpp_zero *zero, const struct zpp_unit_grad *grad, struct exchange *out) {
    const struct zpp_by_nccl *by = &zero->by_nccl;
    const struct zpp_group *group = grad->unit->group;
    const size_t stride = zpp_device_stride(zero, grad->unit);
    for (int rank = 0; rank < group->ranks; rank++) {
        const size_t offset = (size_t)rank * stride;
        out->srcs[rank] = grad->empty ? by->zeros : zpp_device_place(zero, grad) + offset;
        out->dsts[rank] = by->received + offset;
        out->bytes[rank] = rank == group->rank ? 0 : stride;
    }
}

/* The exchange, and the sum of what came in order of ranks. A group of one rank exchanges nothing. */
static zpp_status add(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    const struct zpp_group *group = grad->unit->group;
    struct exchange exchange;
    const void *sources[ZPP_STREAM_SUM_SOURCES];
    int count = 0;
    lay_out(zero, grad, &exchange);
    for (int rank = 0; rank < group->ranks; rank++) {
        if (rank != group->rank) sources[count++] = exchange.dsts[rank];
        else if (!grad->empty) sources[count++] = exchange.srcs[rank];
    }
    if (count == 0) return ZPP_OK;
    const struct zpp_call call = {.coll = ZPP_COLL_ALL_TO_ALL,
                                  .dtype = grad->unit->wire_dtype,
                                  .object = zpp_internode_object(zero, grad->unit),
                                  .dsts = exchange.dsts,
                                  .srcs = exchange.srcs,
                                  .dst_bytes = exchange.bytes,
                                  .src_bytes = exchange.bytes};
    const zpp_status status =
        group->nccl ? zpp_nccl_order(group->nccl, &call, 1, zero->on_device->sums, err) : ZPP_OK;
    return status == ZPP_OK ? zpp_device_add(zero, grad, sources, count, err) : status;
}

/* Stage 0: the sums of all ranks, in place. */
static zpp_status share_sums(zpp_zero *zero, const struct zpp_unit_grad *grad, struct zpp_err *err) {
    const struct zpp_group *group = grad->unit->group;
    const size_t bytes = zpp_grad_shard_bytes(grad);
    if (!group->nccl) return ZPP_OK;
    zpp_comm_count(zero->options.comm, ZPP_TRAFFIC_ALL_REDUCE, bytes * (size_t)(group->ranks - 1));
    return zpp_by_nccl_all_gather(group, zero->on_device->sums, zpp_internode_object(zero, grad->unit), grad->shard,
                                  grad->shard + (size_t)group->rank * bytes, bytes, err);
}

/* Which parameters have a gradient on any rank. */
static zpp_status submit_flags(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    const size_t params = grad->unit->params;
    grad->internode_memory = calloc(1, params + 1);
    if (!grad->internode_memory)
        return zpp_fail(err, ZPP_NOMEM, "zero: no memory for %zu flags of unit %s", params, grad->unit->name);
    if (!grad->empty) memcpy(grad->internode_memory, zpp_bucket_flags(zero, grad->unit), params);
    return grad->unit->group->nccl ? zpp_internode_submit_flags(zero, grad, params, err) : ZPP_OK;
}

static bool settled(const zpp_zero *zero, const struct zpp_unit_grad *grad) {
    return grad->number <= zero->on_device->settled;
}

static zpp_status settle(zpp_zero *zero, const struct zpp_unit_grad *grad, struct zpp_err *err) {
    struct zpp_on_device *on = zero->on_device;
    if (settled(zero, grad)) return ZPP_OK;
    const zpp_status status = zpp_stream_wait(zero->compute, grad->written, NULL, err);
    if (status == ZPP_OK) on->settled = grad->number;
    return status;
}

/* What is sent is in its place, which may still be read by the exchange before, if units have one place together. */
static zpp_status put(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    const struct zpp_unit_grad *sent = zero->on_device->sent;
    if (grad->empty) return ZPP_OK;
    const zpp_status status = sent && grad->at_mapping ? settle(zero, sent, err) : ZPP_OK;
    return status == ZPP_OK ? zpp_device_put(zero, grad, err) : status;
}

/* All is enqueued here. `written` is reached when the bucket may be filled again. */
static zpp_status send(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    struct zpp_on_device *on = zero->on_device;
    zpp_status status = put(zero, grad, err);
    grad->number = ++on->reductions;
    if (status == ZPP_OK) status = zpp_event_record(grad->written, zero->compute, err);
    if (status == ZPP_OK) status = zpp_stream_wait(on->sums, grad->written, NULL, err);
    if (status == ZPP_OK) status = add(zero, grad, err);
    if (status == ZPP_OK && zero->options.stage == 0) status = share_sums(zero, grad, err);
    if (status == ZPP_OK) status = zpp_event_record(grad->written, on->sums, err);
    return status == ZPP_OK ? submit_flags(zero, grad, err) : status;
}

/* On the host's stream of reductions. */
static zpp_status end_reduction(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native;
    struct zpp_unit_grad *grad = *(struct zpp_unit_grad **)arg;
    zpp_zero *zero = grad->zero;
    const zpp_status status = zpp_internode_await(&grad->internode_flags, wait, err);
    if (status != ZPP_OK) return status;
    if (zpp_internode_merge_present(grad)) {
        zpp_origin_note(zero, grad, 0);
        grad->has = grad->changed = true;
        zpp_reduce_count_traffic(zero, grad);
    }
    free(grad->internode_memory);
    grad->internode_memory = NULL;
    return zero->store->complete ? zero->store->complete(zero, grad, err) : ZPP_OK;
}

static zpp_status finish(zpp_zero *zero, struct zpp_err *err) {
    struct zpp_on_device *on = zero->on_device;
    zpp_status status = zpp_event_record(on->summed, on->sums, err);
    if (status == ZPP_OK) status = zpp_stream_wait(zero->compute, on->summed, NULL, err);
    if (status == ZPP_OK) on->settled = on->reductions;
    return status;
}

/* --- life --------------------------------------------------------------------------------------------------------- */

/* One page of halt words: kernels read the first. */
static zpp_status make_halt(zpp_zero *zero, struct zpp_err *err) {
    const size_t page = zpp_page_bytes();
    uint64_t *halt = aligned_alloc(page, page);
    if (!halt) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the word that ends kernels");
    memset(halt, 0, page);
    const zpp_status status = zpp_device_pin(zero->options.device, halt, page, err);
    if (status == ZPP_OK) zero->by_nccl.halt = halt;
    else free(halt);
    return status;
}

static zpp_status check_ranks(const zpp_zero *zero, struct zpp_err *err) {
    if (zero->ranks <= ZPP_STREAM_SUM_SOURCES) return ZPP_OK;
    return zpp_fail(err, ZPP_NOT_BUILT,
                    "zero: %d ranks partition a model on GPUs by NCCL, more than %d are not supported yet; use fewer",
                    zero->ranks, (int)ZPP_STREAM_SUM_SOURCES);
}

/* Buckets and what goes on inside a rank are as where ranks copy. */
static void take_path(zpp_zero *zero) {
    struct zpp_grad_path *path = &zero->on_device->by_nccl;
    *path = zpp_grad_path_device;
    path->name = "nccl";
    path->send = send;
    path->prepare = NULL;
    path->settled = settled;
    path->settle = settle;
    path->reduce = end_reduction;
    path->finish = finish;
    zero->path = path;
}

static zpp_status join_nccl(zpp_zero *zero, struct zpp_err *err) {
    struct zpp_by_nccl *by = &zero->by_nccl;
    zpp_status status = check_ranks(zero, err);
    if (status == ZPP_OK) status = make_halt(zero, err);
    if (status == ZPP_OK) status = zpp_event_create(zero->options.device, &zero->on_device->stepped, err);
    if (status == ZPP_OK) status = zpp_nccl_create(zero->options.comm, zero->options.device, NULL, &by->nccl, err);
    if (status != ZPP_OK) return status;
    zpp_nccl_set_halt(by->nccl, by->halt);
    zero->on_device->halt = by->halt;
    zero->groups[0]->nccl = by->nccl;
    take_path(zero);
    return ZPP_OK;
}

/* The calls of all groups are on one stream, in the order of the program, which is the same on all data ranks. So the
 * earliest call that has not ended is at the head of the stream of each of its ranks, or will be, and can end. */
zpp_status zpp_zero_set_group_comm(zpp_zero *zero, int index, zpp_comm *comm, struct zpp_err *err) {
    struct zpp_group *group = zero->groups[index];
    const struct zpp_by_nccl *by = &zero->by_nccl;
    group->comm = comm;
    if (!by->nccl) return ZPP_OK;
    const zpp_status status = zpp_nccl_create_behind(by->nccl, comm, NULL, &group->nccl, err);
    if (status == ZPP_OK) zpp_nccl_set_halt(group->nccl, by->halt);
    return status;
}

/* True if all ranks of this host map a page of every GPU; else by->no_map says why not, on every rank. */
static bool maps_peers(zpp_zero *zero) {
    zpp_device_region *page = NULL;
    struct zpp_err *why = &zero->by_nccl.no_map;
    const bool maps =
        zpp_device_region_create(zero->options.comm, zero->options.device, zpp_page_bytes(), &page, why) == ZPP_OK;
    zpp_device_region_destroy(page);
    return maps;
}

/* With AUTO, the reason why GPUs are no peers is what counts, if there is no NCCL either. */
static zpp_status join_auto(zpp_zero *zero, struct zpp_err *err) {
    struct zpp_err ignored = ZPP_ERR_INIT;
    const zpp_status status = join_nccl(zero, &ignored);
    if (status == ZPP_OK) return ZPP_OK;
    const struct zpp_err *no_map = &zero->by_nccl.no_map;
    return zpp_fail_rank(err, no_map->status, no_map->rank, "%s; and NCCL cannot do it: %.300s", no_map->text,
                         ignored.text);
}

static zpp_status refuse_copies(const zpp_zero *zero, struct zpp_err *err) {
    return zpp_fail(err, ZPP_INVALID,
                    "zero: gather 'copy' between the GPUs of %d hosts, which cannot map each other's memory; use "
                    "'nccl' or 'auto'",
                    zpp_comm_hosts(zero->options.comm));
}

zpp_status zpp_on_device_join(zpp_zero *zero, const char *const *doing, struct zpp_err *err) {
    const enum zpp_gather gather = zero->options.gather;
    const bool internode = zpp_internode(zero->options.comm);
    if (zero->ranks == 1) return ZPP_OK;
    if (internode && gather == ZPP_GATHER_COPY) return refuse_copies(zero, err);
    if (internode || gather == ZPP_GATHER_NCCL) return join_nccl(zero, err);
    if (gather == ZPP_GATHER_AUTO && !maps_peers(zero)) return join_auto(zero, err);
    struct zpp_on_device *on = zero->on_device;
    const zpp_status status =
        zpp_counters_create(zero->options.comm, zero->options.device, doing, ZPP_COUNTERS, &on->counters, err);
    if (status == ZPP_OK) on->halt = zpp_counters_halt(on->counters);
    return status;
}

void zpp_on_device_leave(zpp_zero *zero) {
    struct zpp_on_device *on = zero->on_device;
    struct zpp_by_nccl *by = &zero->by_nccl;
    for (int i = zero->groups_count; i-- > 1;) zpp_nccl_destroy(zero->groups[i]->nccl);
    zpp_nccl_destroy(by->nccl);
    by->nccl = NULL;
    zpp_event_destroy(on->stepped);
    if (on->buckets) zpp_device_free(zero->options.device, on->buckets, on->buckets_bytes);
    if (by->halt) zpp_device_unpin(zero->options.device, by->halt);
    free(by->halt);
    by->halt = NULL;
    zpp_counters_destroy(on->counters);
}

enum zpp_gather zpp_zero_gather_way(const zpp_zero *zero, const char **why) {
    const struct zpp_by_nccl *by = &zero->by_nccl;
    const char *reason = "the GPUs of all ranks map each other's memory";
    if (!zero->on_device || zero->ranks == 1) return ZPP_GATHER_AUTO;
    if (by->nccl) reason = by->no_map.status == ZPP_OK ? "the ranks are on several hosts" : by->no_map.text;
    if (zero->options.gather != ZPP_GATHER_AUTO) reason = "Comm(gather=) says so";
    if (why) *why = reason;
    return by->nccl ? ZPP_GATHER_NCCL : ZPP_GATHER_COPY;
}
