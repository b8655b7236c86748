/* SPDX-License-Identifier: Apache-2.0
 *
 * Reductions over hosts: inside each host in the order of its ranks, then over hosts in that of their lowest ranks,
 *
 *   (r0 + r1 + ...) + (rL + ...) + ...
 *
 * 16-bit elements are rounded once per host and once at the end. Bytes over the network per rank that takes part, H
 * hosts with L ranks each (where hosts have different numbers, only the lowest ranks take part, as if L were 1):
 *
 *   all_reduce       small (SMALL_BYTES): (H - 1) * bytes, every host sums everything;
 *                    else 2 (H - 1) / H * bytes / L: reduce-scatter and all-gather among the ranks of one place, in one
 *                    pass: a piece is sent as soon as it is summed
 *   reduce_scatter   (H - 1) * bytes of dst: each host sends its sum of a rank's shard straight to that rank
 *   reduce           (H - 1) * bytes at the root
 *
 * AVG: the mean of the hosts' means where all hosts have equally many ranks, so that nothing overflows on the way; else
 * the sum, then scaled.
 */
#include <stdlib.h>
#include <string.h>

#include "net.h"
#include "../reduce.h"

enum { SMALL_BYTES = 32 * 1024, STEP_BYTES = 64 * 1024, LINE = ZPP_LINE_BYTES };

/* --- adding received parts ---------------------------------------------------------------------------------------- */

/* A sum into `dst` of the hosts' parts, in the order of hosts. Other hosts' parts are received, through rings or
 * whole; this host's part is local. */
struct adding {
    uint8_t *dst;
    const uint8_t *part[ZPP_RANKS_MAX]; /* by host */
    struct zpp_flow *in[ZPP_RANKS_MAX];
    struct zpp_flow *out[ZPP_RANKS_MAX]; /* receivers of the sum, as it grows */
    int hosts, mine, ins, outs;
    size_t ring_bytes; /* of received parts; 0: they are received whole */
    size_t bytes, added, elem_bytes;
    zpp_dtype dtype;
    zpp_reduce_op op;
};

/* Add `bytes` from adding->added on, which are contiguous in every ring. */
static void add_run(struct adding *adding, size_t bytes) {
    const size_t at = adding->added, in_ring = adding->ring_bytes ? at % adding->ring_bytes : at;
    const void *source[ZPP_RANKS_MAX];
    for (int h = 0; h < adding->hosts; h++) source[h] = adding->part[h] + (h == adding->mine ? at : in_ring);
    zpp_reduce_op_sources(adding->dst + at, adding->op, source, adding->hosts, adding->dtype,
                          bytes / adding->elem_bytes, false);
    adding->added += bytes;
}

static void add_what_came(void *ctx) {
    struct adding *adding = ctx;
    size_t there = adding->bytes;
    for (int i = 0; i < adding->ins; i++)
        if (adding->in[i]->done < there) there = adding->in[i]->done;
    if (there < adding->bytes) {
        there &= ~(size_t)(LINE - 1); /* whole elements, whole lines */
        if (there < adding->added + STEP_BYTES) return;
    }
    while (adding->added < there) {
        size_t run = there - adding->added;
        const size_t ring_left = adding->ring_bytes ? adding->ring_bytes - adding->added % adding->ring_bytes : run;
        add_run(adding, run < ring_left ? run : ring_left);
    }
    for (int i = 0; i < adding->ins; i++) adding->in[i]->taken = adding->added;
    for (int i = 0; i < adding->outs; i++) adding->out[i]->ready = adding->added;
}

static zpp_reduce_op inner_op(const struct zpp_hier *hier) {
    return hier->call->op == ZPP_AVG && !hier->hosts->even ? ZPP_SUM : hier->call->op;
}

/* Scale the sum: the last step of AVG over hosts of different sizes. */
static void scale(const struct zpp_hier *hier, void *data, size_t elems) {
    const zpp_dtype dtype = hier->call->dtype;
    if (hier->call->op != ZPP_AVG || hier->hosts->even) return;
    if (dtype == ZPP_F64) {
        double *at = data;
        for (size_t i = 0; i < elems; i++) at[i] *= 1.0 / hier->comm->ranks;
        return;
    }
    const void *source = data;
    zpp_reduce_sources(data, dtype, false, &source, 1, dtype, elems, 1.0f / (float)hier->comm->ranks);
}

static struct adding adding_of(const struct zpp_hier *hier, uint8_t *dst, size_t bytes) {
    return (struct adding){.dst = dst,
                           .hosts = hier->hosts->hosts,
                           .mine = hier->hosts->mine,
                           .bytes = bytes,
                           .elem_bytes = zpp_dtype_bytes(hier->call->dtype),
                           .dtype = hier->call->dtype,
                           .op = inner_op(hier)};
}

/* Choose how parts are received: short ones whole, long ones through a ring, so that they are still in the cache when
 * they are added. Return the bytes of scratch that each host needs. */
static size_t part_capacity(struct adding *adding, const struct zpp_comm *comm) {
    const size_t ring_bytes = zpp_flow_ring_bytes(comm);
    adding->ring_bytes = adding->bytes > ring_bytes ? ring_bytes : 0;
    return adding->ring_bytes ? ring_bytes : adding->bytes;
}

/* Begin the flow of host `host`'s part, from `rank`, into `buffer`. */
static void add_in(struct adding *adding, struct zpp_flow *flow, int host, int rank, uint32_t part, uint8_t *buffer) {
    *flow = zpp_flow_in(rank, part, buffer, adding->bytes);
    flow->ring_bytes = adding->ring_bytes;
    adding->part[host] = buffer;
    adding->in[adding->ins++] = flow;
}

/* --- all_reduce over one rank a host ----------------------------------------------------------------------------- */

/* Every host sends all its bytes to every other host, and each adds them all. */
static zpp_status exchange_small(struct zpp_hier *hier, uint8_t *data, size_t bytes, uint32_t part,
                                 struct zpp_err *err) {
    const struct zpp_hosts *hosts = hier->hosts;
    struct zpp_flow *flow = NULL;
    struct adding adding = adding_of(hier, data, bytes);
    uint8_t *scratch;
    size_t count = 0;
    zpp_status status = zpp_net_scratch(hier->comm, bytes * (size_t)hosts->hosts, &scratch, err);
    if (status == ZPP_OK) status = zpp_net_flows(hier->comm, 2 * (size_t)hosts->hosts, &flow, err);
    if (status != ZPP_OK) return status;
    for (int h = 0; h < hosts->hosts; h++) {
        uint8_t *buffer = scratch + (size_t)h * bytes;
        const int rank = zpp_rank_at(hosts, h, hier->place);
        adding.part[h] = buffer;
        if (h == hosts->mine) {
            memcpy(buffer, data, bytes); /* a copy: `data` is overwritten while flows still send */
            continue;
        }
        flow[count++] = zpp_flow_out(rank, part, scratch + (size_t)hosts->mine * bytes, bytes);
        flow[count] = zpp_flow_in(rank, part, buffer, bytes);
        adding.in[adding.ins++] = &flow[count++];
    }
    return zpp_flows_run(&hier->internode, flow, count, add_what_came, &adding, err);
}

/* Compute the shard of host `host` of `bytes`: whole lines; the last hosts get less or nothing. */
static void shard_of(size_t bytes, int hosts, int host, size_t *begin, size_t *length) {
    const size_t share = (bytes / (size_t)hosts + LINE) & ~(size_t)(LINE - 1);
    *begin = share * (size_t)host < bytes ? share * (size_t)host : bytes;
    *length = bytes - *begin < share ? bytes - *begin : share;
}

/* Host h adds shard h and sends the sum while later bytes of the parts are still arriving. Sums use connections of
 * their own, so that they, which are in the cache, do not queue behind unsummed parts. A sum overwrites a shard of
 * `data` only after that shard was sent, because its owner needed it for the sum. */
static zpp_status exchange_large(struct zpp_hier *hier, uint8_t *data, size_t bytes, uint32_t part,
                                 struct zpp_err *err) {
    const struct zpp_hosts *hosts = hier->hosts;
    struct zpp_flow *flow = NULL;
    size_t count = 0, begin, length, theirs, their_length;
    uint8_t *scratch;
    shard_of(bytes, hosts->hosts, hosts->mine, &begin, &length);
    struct adding adding = adding_of(hier, data + begin, length);
    const size_t capacity = part_capacity(&adding, hier->comm);
    zpp_status status = zpp_net_scratch(hier->comm, (capacity + 1) * (size_t)hosts->hosts, &scratch, err);
    if (status == ZPP_OK) status = zpp_net_flows(hier->comm, 4 * (size_t)hosts->hosts, &flow, err);
    if (status != ZPP_OK) return status;
    adding.part[hosts->mine] = data + begin;
    for (int k = 1; k < hosts->hosts; k++) {
        const int h = (hosts->mine + k) % hosts->hosts, rank = zpp_rank_at(hosts, h, hier->place);
        shard_of(bytes, hosts->hosts, h, &theirs, &their_length);
        flow[count] = zpp_flow_out(rank, part, data + theirs, their_length);
        flow[count++].links = ZPP_LINKS_FIRST;
        add_in(&adding, &flow[count], h, rank, part, scratch + (size_t)h * capacity);
        flow[count++].links = ZPP_LINKS_FIRST;
    }
    for (int k = 1; k < hosts->hosts; k++) {
        const int h = (hosts->mine + k) % hosts->hosts, rank = zpp_rank_at(hosts, h, hier->place);
        shard_of(bytes, hosts->hosts, h, &theirs, &their_length);
        flow[count] = zpp_flow_out(rank, part + 1, data + begin, length);
        flow[count].links = ZPP_LINKS_REST;
        flow[count].ready = 0;
        adding.out[adding.outs++] = &flow[count++];
        flow[count] = zpp_flow_in(rank, part + 1, data + theirs, their_length);
        flow[count++].links = ZPP_LINKS_REST;
    }
    return zpp_flows_run(&hier->internode, flow, count, add_what_came, &adding, err);
}

/* Sparse: the hosts' parts arrive by zpp_hier_share, then each host adds them all. */
static zpp_status exchange_shared(struct zpp_hier *hier, uint8_t *data, size_t bytes, uint32_t part,
                                  struct zpp_err *err) {
    const int hosts = hier->hosts->hosts, mine = hier->hosts->mine;
    struct adding adding = adding_of(hier, data, bytes);
    uint8_t *scratch;
    zpp_status status = zpp_net_scratch(hier->comm, bytes * (size_t)hosts, &scratch, err);
    if (status != ZPP_OK) return status;
    memcpy(scratch, data, bytes);
    status = zpp_hier_share(hier, scratch, bytes, 32 * part, err);
    for (int h = 0; h < hosts; h++) adding.part[h] = scratch + (size_t)((h + hosts - mine) % hosts) * bytes;
    adding.mine = -1; /* every part, this host's too, lies in scratch */
    if (status == ZPP_OK) add_what_came(&adding);
    return status;
}

static zpp_status exchange(struct zpp_hier *hier, uint8_t *data, size_t bytes, uint32_t part,
                           struct zpp_err *err) {
    if (hier->comm->door && bytes <= ZPP_SHARED_BYTES / (size_t)hier->hosts->hosts)
        return exchange_shared(hier, data, bytes, part, err);
    return bytes <= SMALL_BYTES ? exchange_small(hier, data, bytes, part, err)
                                : exchange_large(hier, data, bytes, part, err);
}

/* --- all_reduce -------------------------------------------------------------------------------------------------- */

static struct zpp_tensor tensor_of(const struct zpp_hier *hier, size_t elems) {
    const zpp_dtype dtype = hier->call->dtype;
    return (struct zpp_tensor){dtype, inner_op(hier), elems, elems * zpp_dtype_bytes(dtype)};
}

/* Every rank has its host's sum. The k-th ranks of all hosts exchange the k-th part, which is then gathered inside
 * each host. All ranks exchange the remainder, which has fewer elements than the host has ranks. */
static zpp_status by_rails(struct zpp_hier *hier, uint8_t *data, size_t elems, size_t elem_bytes,
                           struct zpp_err *err) {
    const size_t share = elems / (size_t)hier->locals, bytes = share * elem_bytes;
    const size_t rest = elems - share * (size_t)hier->locals;
    void *dst[ZPP_RANKS_MAX];
    for (int i = 0; i < hier->locals; i++) dst[i] = data + (size_t)i * bytes;
    zpp_status status = exchange(hier, dst[hier->place], bytes, 2, err);
    if (status == ZPP_OK && rest)
        status = exchange_small(hier, data + (elems - rest) * elem_bytes, rest * elem_bytes, 1, err);
    if (status == ZPP_OK) status = zpp_hier_intranode(&hier->after, err);
    return status == ZPP_OK ? zpp_coll_all_gather(&hier->after, dst, dst[hier->place], bytes, err) : status;
}

zpp_status zpp_hier_all_reduce(struct zpp_hier *hier, struct zpp_err *err) {
    const struct zpp_call *call = hier->call;
    const struct zpp_tensor tensor = tensor_of(hier, call->elems);
    const size_t elem_bytes = zpp_dtype_bytes(call->dtype);
    uint8_t *data = call->dst;
    zpp_status status = zpp_hier_intranode(&hier->before, err);
    if (status != ZPP_OK) return status;
    if (hier->hosts->even) {
        status = zpp_coll_all_reduce(&hier->before, data, &tensor, err);
        if (status != ZPP_OK) return status;
        const bool whole = hier->locals == 1 || tensor.bytes <= SMALL_BYTES;
        return whole ? exchange(hier, data, tensor.bytes, 2, err)
                     : by_rails(hier, data, call->elems, elem_bytes, err);
    }
    status = zpp_coll_reduce(&hier->before, data, &tensor, 0, err);
    if (status == ZPP_OK && hier->place == 0) status = exchange(hier, data, tensor.bytes, 2, err);
    if (status == ZPP_OK && hier->place == 0) scale(hier, data, call->elems);
    if (status == ZPP_OK) status = zpp_hier_intranode(&hier->after, err);
    return status == ZPP_OK ? zpp_coll_broadcast(&hier->after, data, tensor.bytes, 0, err) : status;
}

/* --- reduce ------------------------------------------------------------------------------------------------------ */

/* At the root: add the other hosts' parts to the sum in the caller's tensor. */
static zpp_status add_hosts(struct zpp_hier *hier, struct adding *adding, uint8_t *scratch, size_t part_bytes,
                            struct zpp_err *err) {
    const struct zpp_hosts *hosts = hier->hosts;
    struct zpp_flow *flow = NULL;
    size_t count = 0;
    zpp_status status = zpp_net_flows(hier->comm, (size_t)hosts->hosts, &flow, err);
    for (int h = 0; status == ZPP_OK && h < hosts->hosts; h++)
        if (h != hosts->mine)
            add_in(adding, &flow[count++], h, zpp_rank_at(hosts, h, 0), 0, scratch + (size_t)h * part_bytes);
    if (status == ZPP_OK) status = zpp_flows_run(&hier->internode, flow, count, add_what_came, adding, err);
    if (status == ZPP_OK) scale(hier, hier->call->dst, hier->call->elems);
    return status;
}

/* Return true if this rank holds its host's sum: the root on its host, the lowest rank on others. */
static bool holds_sum(const struct zpp_hier *hier) {
    const int root = hier->call->root;
    const bool root_here = hier->hosts->host_of[root] == hier->hosts->mine;
    return root_here ? hier->me == root : hier->place == 0;
}

static int place_of_sum(const struct zpp_hier *hier) {
    const int root = hier->call->root;
    return hier->hosts->host_of[root] == hier->hosts->mine ? hier->hosts->index_of[root] : 0;
}

zpp_status zpp_hier_reduce(struct zpp_hier *hier, struct zpp_err *err) {
    const struct zpp_call *call = hier->call;
    const size_t hosts = (size_t)hier->hosts->hosts;
    const struct zpp_tensor tensor = tensor_of(hier, call->elems);
    const bool at_root = hier->me == call->root, holder = holds_sum(hier);
    struct adding adding = adding_of(hier, call->dst, tensor.bytes);
    uint8_t *scratch = NULL, *sum = call->dst;
    zpp_status status = ZPP_OK;
    const size_t part_bytes = at_root ? part_capacity(&adding, hier->comm) : 0;
    if (holder) status = zpp_net_scratch(hier->comm, (at_root ? part_bytes * hosts : tensor.bytes) + 1, &scratch, err);
    if (status != ZPP_OK) return status;
    if (holder && !at_root) { /* keep the caller's tensor unchanged */
        memcpy(scratch, call->dst, tensor.bytes);
        sum = scratch;
    }
    status = zpp_hier_intranode(&hier->before, err);
    if (status == ZPP_OK) status = zpp_coll_reduce(&hier->before, sum, &tensor, place_of_sum(hier), err);
    if (status != ZPP_OK || !holder) return status;
    if (!at_root) {
        struct zpp_flow flow = zpp_flow_out(call->root, 0, sum, tensor.bytes);
        return zpp_flows_run(&hier->internode, &flow, 1, NULL, NULL, err);
    }
    adding.part[hier->hosts->mine] = sum;
    return add_hosts(hier, &adding, scratch, part_bytes, err);
}

/* --- reduce_scatter ---------------------------------------------------------------------------------------------- */

/* Return the shards of host `host`'s ranks as one array: in the caller's tensor where they are contiguous, else copied
 * to `scratch`. */
static const uint8_t *shards_of(const struct zpp_hier *hier, int host, size_t bytes, uint8_t *scratch) {
    const struct zpp_hosts *hosts = hier->hosts;
    const uint8_t *src = hier->call->src;
    bool contiguous = true;
    for (int i = 1; i < hosts->count[host]; i++)
        contiguous = contiguous && zpp_rank_at(hosts, host, i) == zpp_rank_at(hosts, host, 0) + i;
    if (contiguous) return src + (size_t)zpp_rank_at(hosts, host, 0) * bytes;
    for (int i = 0; i < hosts->count[host]; i++)
        memcpy(scratch + (size_t)i * bytes, src + (size_t)zpp_rank_at(hosts, host, i) * bytes, bytes);
    return scratch;
}

/* Sum the shards of host `host`'s ranks over the ranks here, one shard to each rank here; `sum` gets this rank's. */
static zpp_status sum_for(struct zpp_hier *hier, int host, const struct zpp_tensor *tensor, uint8_t *scratch,
                          uint8_t *sum, struct zpp_err *err) {
    const uint8_t *shards = shards_of(hier, host, tensor->bytes, scratch);
    const zpp_status status = zpp_hier_intranode(&hier->before, err);
    return status == ZPP_OK ? zpp_coll_reduce_scatter(&hier->before, sum, shards, tensor, err) : status;
}

static zpp_status finish_scatter(struct zpp_hier *hier, struct zpp_flow *flow, size_t count,
                                 struct adding *adding, struct zpp_err *err) {
    const zpp_status status = zpp_flows_run(&hier->internode, flow, count, add_what_came, adding, err);
    if (status == ZPP_OK) scale(hier, adding->dst, adding->bytes / adding->elem_bytes);
    return status;
}

/* Scratch holds the part received from each host; where a host has several ranks, also this rank's sum for each host,
 * and the shards of one host. */
static zpp_status scatter_even(struct zpp_hier *hier, const struct zpp_tensor *tensor, struct zpp_err *err) {
    const struct zpp_hosts *hosts = hier->hosts;
    const size_t bytes = tensor->bytes, internode_bytes = bytes * (size_t)hosts->hosts;
    const bool alone = hier->locals == 1;
    struct zpp_flow *flow = NULL;
    struct adding adding = adding_of(hier, hier->call->dst, bytes);
    uint8_t *scratch;
    size_t count = 0;
    const size_t capacity = part_capacity(&adding, hier->comm), received_bytes = capacity * (size_t)hosts->hosts;
    const size_t more_bytes = alone ? 1 : internode_bytes + bytes * (size_t)hier->locals;
    zpp_status status = zpp_net_scratch(hier->comm, received_bytes + more_bytes, &scratch, err);
    if (status == ZPP_OK) status = zpp_net_flows(hier->comm, 2 * (size_t)hosts->hosts, &flow, err);
    uint8_t *received = scratch, *sums = scratch + received_bytes, *shards = sums + internode_bytes;
    for (int h = 0; status == ZPP_OK && h < hosts->hosts; h++) {
        const int rank = zpp_rank_at(hosts, h, hier->place);
        const uint8_t *mine = (const uint8_t *)hier->call->src + (size_t)rank * bytes;
        if (!alone) {
            status = sum_for(hier, h, tensor, shards, sums + (size_t)h * bytes, err);
            mine = sums + (size_t)h * bytes;
        }
        adding.part[h] = mine;
        if (h == hosts->mine) continue;
        flow[count++] = zpp_flow_out(rank, 0, mine, bytes);
        add_in(&adding, &flow[count++], h, rank, 0, received + (size_t)h * capacity);
    }
    return status == ZPP_OK ? finish_scatter(hier, flow, count, &adding, err) : status;
}

/* One rank of each host, alternating by shard, sums a shard and sends it to its owner. Scratch holds one sum for each
 * rank of the group, and the part received from each host. */
static zpp_status scatter_uneven(struct zpp_hier *hier, const struct zpp_tensor *tensor, struct zpp_err *err) {
    const struct zpp_hosts *hosts = hier->hosts;
    const struct zpp_comm *comm = hier->comm;
    const size_t bytes = tensor->bytes;
    struct zpp_flow *flow = NULL;
    struct adding adding = adding_of(hier, hier->call->dst, bytes);
    uint8_t *scratch;
    size_t count = 0;
    const size_t sums_bytes = bytes * (size_t)comm->ranks, capacity = part_capacity(&adding, comm);
    zpp_status status = zpp_net_flows(hier->comm, (size_t)(hosts->hosts + comm->ranks), &flow, err);
    if (status != ZPP_OK) return status;
    status = zpp_net_scratch(hier->comm, sums_bytes + capacity * (size_t)hosts->hosts, &scratch, err);
    for (int r = 0; status == ZPP_OK && r < comm->ranks; r++) {
        const bool here = hosts->host_of[r] == hosts->mine;
        const int place = here ? hosts->index_of[r] : hosts->index_of[r] % hier->locals;
        uint8_t *sum = scratch + (size_t)r * bytes;
        memcpy(sum, (const uint8_t *)hier->call->src + (size_t)r * bytes, bytes);
        status = zpp_hier_intranode(&hier->before, err);
        if (status == ZPP_OK) status = zpp_coll_reduce(&hier->before, sum, tensor, place, err);
        if (status == ZPP_OK && !here && place == hier->place) flow[count++] = zpp_flow_out(r, 0, sum, bytes);
    }
    if (status != ZPP_OK) return status;
    adding.part[hosts->mine] = scratch + (size_t)hier->me * bytes;
    for (int h = 0; h < hosts->hosts; h++)
        if (h != hosts->mine)
            add_in(&adding, &flow[count++], h, zpp_rank_at(hosts, h, hier->place % hosts->count[h]), 0,
                   scratch + sums_bytes + (size_t)h * capacity);
    return finish_scatter(hier, flow, count, &adding, err);
}

zpp_status zpp_hier_reduce_scatter(struct zpp_hier *hier, struct zpp_err *err) {
    const struct zpp_tensor tensor = tensor_of(hier, hier->call->elems);
    return hier->hosts->even ? scatter_even(hier, &tensor, err) : scatter_uneven(hier, &tensor, err);
}
