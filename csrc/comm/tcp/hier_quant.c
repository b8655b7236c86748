/* SPDX-License-Identifier: Apache-2.0
 *
 * Quantised collectives over hosts (ZeRO++, Wang et al. 2023). Ranks exchange images: for E elements the fp32 scales
 * of their blocks, then the codes, w(E) = 4 * blocks + E * bits / 8, padded to 4 bytes; they move as bytes, by the
 * exact collectives of hier_move.c. Bytes over the network per rank, H hosts with L ranks each, shards of E elements:
 *
 *   all_gather       (H - 1) w(E), as the exact one, with images in place of values; then dequantised
 *   reduce_scatter   one rank a host, or hosts of different sizes: images go straight to their owners, which add them
 *                    in rank order: w(E) from each rank elsewhere
 *                    else the two hops of qgZ: an all-to-all inside each host, whose sums are quantised again and go to
 *                    the rank at the same place of their host: (H - 1) w(E)
 *   all_reduce       both, on one block-aligned share a rank
 *
 * Blocks begin where they begin on one host, so with one rank a host the bits are those of one host; with more they
 * are those of `node_ranks` ranks a node. Long tensors go in pieces, which bounds the memory to BUFFER_BYTES of
 * outgoing images and as much of incoming ones.
 */
#include <string.h>

#include "../../ops/quant/quant.h"
#include "net.h"
#include "../reduce.h"

enum { BUFFER_BYTES = 4 * 1024 * 1024, PAD_BYTES = 4 };

struct job {
    struct zpp_hier *hier;
    const struct zpp_call *call;
    struct zpp_quant_spec spec;
    const struct zpp_hosts *hosts;
    int ranks, locals;
    bool two_hops;
    size_t elem_bytes, piece_elems; /* of one shard */
    /* images of the piece in progress: one for each rank; one from each rank, or from each rank here for each host;
     * one to each host; one from each host */
    uint8_t *outgoing, *incoming, *sums, *received;
    size_t shard_elems, image_bytes; /* of the piece in progress */
};

static size_t image_bytes(const struct zpp_quant_spec *spec, size_t elems) {
    const size_t bytes = zpp_quant_blocks(spec, elems) * sizeof(float) + zpp_quant_code_bytes(spec, elems);
    return (bytes + PAD_BYTES - 1) / PAD_BYTES * PAD_BYTES;
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* Images are ordered by place, then host, so that all images for one rank here are contiguous in the first hop. */
static uint8_t *image_for(const struct job *job, uint8_t *images, int rank) {
    const int at = job->two_hops ? job->hosts->index_of[rank] * job->hosts->hosts + job->hosts->host_of[rank] : rank;
    return images + (size_t)at * job->image_bytes;
}

static struct zpp_quant_source source_of(const struct job *job, const uint8_t *image) {
    const float *scales = (const float *)(const void *)image;
    return (struct zpp_quant_source){scales + zpp_quant_blocks(&job->spec, job->shard_elems), scales, NULL};
}

static struct zpp_quant_target target_of(const struct job *job, uint8_t *image) {
    float *scales = (float *)(void *)image;
    return (struct zpp_quant_target){scales + zpp_quant_blocks(&job->spec, job->shard_elems), scales, NULL};
}

/* Quantise `elems`, which may be less than a shard; the rest of the image is zero, so its bytes are a function of the
 * values. */
static void make_image(const struct job *job, const uint8_t *values, size_t elems, uint8_t *image) {
    const struct zpp_quant_target to = target_of(job, image);
    memset(image, 0, elems < job->shard_elems ? job->image_bytes : 0);
    memset(image + job->image_bytes - PAD_BYTES, 0, PAD_BYTES);
    zpp_quantise(&job->spec, values, job->call->dtype, elems, &to, NULL);
}

static void set_piece(struct job *job, size_t shard_elems) {
    job->shard_elems = shard_elems;
    job->image_bytes = image_bytes(&job->spec, shard_elems);
}

static zpp_status make_buffers(struct job *job, struct zpp_err *err) {
    const size_t block_bytes = image_bytes(&job->spec, job->spec.block_elems), ranks = (size_t)job->ranks;
    const size_t blocks = BUFFER_BYTES / ranks / block_bytes, hosts = (size_t)job->hosts->hosts;
    const size_t longest = zpp_quant_blocks(&job->spec, job->call->elems) * job->spec.block_elems;
    job->piece_elems = (blocks ? blocks : 1) * job->spec.block_elems;
    if (job->piece_elems > longest) job->piece_elems = longest ? longest : job->spec.block_elems;
    const size_t bytes = image_bytes(&job->spec, job->piece_elems);
    uint8_t *scratch;
    const zpp_status status = zpp_net_scratch(job->hier->comm, 2 * (ranks + hosts) * bytes, &scratch, err);
    if (status != ZPP_OK) return status;
    job->outgoing = scratch;
    job->incoming = job->outgoing + ranks * bytes;
    job->sums = job->incoming + ranks * bytes;
    job->received = job->sums + hosts * bytes;
    return ZPP_OK;
}

/* Return the state for an exact collective that moves the images as bytes. */
static struct zpp_hier as_bytes(const struct job *job, const struct zpp_call *call) {
    struct zpp_hier hier = *job->hier;
    hier.call = call;
    return hier;
}

/* --- images of all ranks for this one ----------------------------------------------------------------------------- */

/* One hop: receive the image of every rank for this one into `incoming`. */
static zpp_status exchange_all(struct job *job, struct zpp_quant_source *sources, struct zpp_err *err) {
    void *dsts[ZPP_RANKS_MAX];
    const void *srcs[ZPP_RANKS_MAX];
    size_t bytes[ZPP_RANKS_MAX];
    for (int r = 0; r < job->ranks; r++) {
        srcs[r] = image_for(job, job->outgoing, r);
        dsts[r] = image_for(job, job->incoming, r);
        bytes[r] = job->image_bytes;
        sources[r] = source_of(job, dsts[r]);
    }
    const struct zpp_call call = {.coll = ZPP_COLL_ALL_TO_ALL, .dtype = ZPP_U8, .dsts = dsts, .srcs = srcs,
                                  .dst_bytes = bytes, .src_bytes = bytes};
    struct zpp_hier hier = as_bytes(job, &call);
    return zpp_hier_all_to_all(&hier, err);
}

/* First hop: send each rank here the images for the ranks at its place on every host. */
static zpp_status exchange_intranode(struct job *job, struct zpp_err *err) {
    void *dsts[ZPP_RANKS_MAX];
    const void *srcs[ZPP_RANKS_MAX];
    size_t bytes[ZPP_RANKS_MAX];
    for (int i = 0; i < job->locals; i++) {
        bytes[i] = job->image_bytes * (size_t)job->hosts->hosts;
        srcs[i] = job->outgoing + (size_t)i * bytes[i];
        dsts[i] = job->incoming + (size_t)i * bytes[i];
    }
    const struct zpp_call call = {.coll = ZPP_COLL_ALL_TO_ALL, .dtype = ZPP_U8, .dsts = dsts, .srcs = srcs,
                                  .dst_bytes = bytes, .src_bytes = bytes};
    struct zpp_hier hier = as_bytes(job, &call);
    const zpp_status status = zpp_hier_intranode(&hier.before, err);
    return status == ZPP_OK ? zpp_coll_all_to_all(&hier.before, &call, err) : status;
}

static void sum_intranode(struct job *job, size_t elems) {
    const size_t hosts = (size_t)job->hosts->hosts;
    struct zpp_quant_source sources[ZPP_RANKS_MAX];
    for (size_t h = 0; h < hosts; h++) {
        uint8_t *sum = job->sums + h * job->image_bytes;
        const struct zpp_quant_target to = target_of(job, sum);
        for (size_t i = 0; i < (size_t)job->locals; i++)
            sources[i] = source_of(job, job->incoming + (i * hosts + h) * job->image_bytes);
        memset(sum, 0, elems < job->shard_elems ? job->image_bytes : 0);
        memset(sum + job->image_bytes - PAD_BYTES, 0, PAD_BYTES);
        zpp_quant_reduce(&job->spec, sources, (size_t)job->locals, 1.0f, elems, &job->spec, &to, NULL);
    }
}

/* Second hop: receive the sums for this rank's shard from the ranks at the same place. */
static zpp_status exchange_internode(struct job *job, struct zpp_quant_source *sources, struct zpp_err *err) {
    struct zpp_hier hier = as_bytes(job, job->call);
    const struct zpp_hosts *hosts = job->hosts;
    struct zpp_flow *flow = NULL;
    size_t count = 0;
    const zpp_status status = zpp_net_flows(hier.comm, 2 * (size_t)hosts->hosts, &flow, err);
    if (status != ZPP_OK) return status;
    for (int h = 0; h < hosts->hosts; h++) {
        uint8_t *sum = job->sums + (size_t)h * job->image_bytes,
                *received = job->received + (size_t)h * job->image_bytes;
        const int rank = zpp_rank_at(hosts, h, hier.place);
        sources[h] = source_of(job, h == hosts->mine ? sum : received);
        if (h == hosts->mine) continue;
        flow[count++] = zpp_flow_out(rank, 0, sum, job->image_bytes);
        flow[count++] = zpp_flow_in(rank, 0, received, job->image_bytes);
    }
    return zpp_flows_run(&hier.internode, flow, count, NULL, NULL, err);
}

/* Collect the images, or sums, of this rank's shard. `longest`: the largest number of valid elements of any rank. */
static zpp_status gather_sources(struct job *job, size_t longest, struct zpp_quant_source *sources, size_t *count,
                                 struct zpp_err *err) {
    *count = (size_t)(job->two_hops ? job->hosts->hosts : job->ranks);
    if (!job->two_hops) return exchange_all(job, sources, err);
    const zpp_status status = exchange_intranode(job, err);
    if (status != ZPP_OK) return status;
    sum_intranode(job, longest);
    return exchange_internode(job, sources, err);
}

static float factor_of(const struct job *job) {
    return job->call->op == ZPP_AVG ? 1.0f / (float)job->ranks : 1.0f;
}

/* --- the collectives --------------------------------------------------------------------------------------------- */

/* Gather every rank's image on every rank, at its place in `outgoing`. */
static zpp_status gather_images(struct job *job, struct zpp_err *err) {
    void *dsts[ZPP_RANKS_MAX];
    for (int r = 0; r < job->ranks; r++) dsts[r] = image_for(job, job->outgoing, r);
    const struct zpp_call call = {.coll = ZPP_COLL_ALL_GATHER, .dtype = ZPP_U8, .dsts = dsts,
                                  .src = dsts[job->hier->me], .elems = job->image_bytes};
    struct zpp_hier hier = as_bytes(job, &call);
    return zpp_hier_all_gather(&hier, err);
}

static void read_image(const struct job *job, int rank, size_t elems, uint8_t *dst) {
    const struct zpp_quant_source from = source_of(job, image_for(job, job->outgoing, rank));
    zpp_dequantise(&job->spec, &from, dst, job->call->dtype, elems, false, NULL);
}

static zpp_status all_gather(struct job *job, struct zpp_err *err) {
    const struct zpp_call *call = job->call;
    uint8_t *dst = call->dst;
    zpp_status status = ZPP_OK;
    for (size_t at = 0; status == ZPP_OK && at < call->elems; at += job->piece_elems) {
        set_piece(job, least(call->elems - at, job->piece_elems));
        make_image(job, (const uint8_t *)call->src + at * job->elem_bytes, job->shard_elems,
                   image_for(job, job->outgoing, job->hier->me));
        status = gather_images(job, err);
        for (int r = 0; status == ZPP_OK && r < job->ranks; r++)
            read_image(job, r, job->shard_elems, dst + ((size_t)r * call->elems + at) * job->elem_bytes);
    }
    return status;
}

static zpp_status reduce_scatter(struct job *job, struct zpp_err *err) {
    const struct zpp_call *call = job->call;
    const uint8_t *src = call->src;
    struct zpp_quant_source sources[ZPP_RANKS_MAX];
    zpp_status status = ZPP_OK;
    for (size_t at = 0; status == ZPP_OK && at < call->elems; at += job->piece_elems) {
        size_t count = 0;
        set_piece(job, least(call->elems - at, job->piece_elems));
        for (int r = 0; r < job->ranks; r++)
            make_image(job, src + ((size_t)r * call->elems + at) * job->elem_bytes, job->shard_elems,
                       image_for(job, job->outgoing, r));
        status = gather_sources(job, job->shard_elems, sources, &count, err);
        if (status != ZPP_OK) return status;
        zpp_quant_sum(&job->spec, sources, count, factor_of(job), (uint8_t *)call->dst + at * job->elem_bytes,
                      call->dtype, job->shard_elems, NULL);
    }
    return status;
}

/* Return how many of `span` elements rank `rank` owns: whole blocks; the last ranks get less or nothing. */
static size_t valid_elems(const struct job *job, size_t span, int rank) {
    const size_t begin = least(job->shard_elems * (size_t)rank, span);
    return least(span - begin, job->shard_elems);
}

/* Reduce one piece: the first `span` elements of `data`. */
static zpp_status all_reduce_piece(struct job *job, uint8_t *data, size_t span, struct zpp_err *err) {
    struct zpp_quant_source sources[ZPP_RANKS_MAX];
    const size_t stride_bytes = job->shard_elems * job->elem_bytes, longest = valid_elems(job, span, 0);
    const int me = job->hier->me;
    size_t count = 0;
    for (int r = 0; r < job->ranks; r++)
        make_image(job, data + (size_t)r * stride_bytes, valid_elems(job, span, r), image_for(job, job->outgoing, r));
    zpp_status status = gather_sources(job, longest, sources, &count, err);
    if (status != ZPP_OK) return status;
    uint8_t *mine = image_for(job, job->outgoing, me);
    const struct zpp_quant_target to = target_of(job, mine);
    memset(mine, 0, job->image_bytes);
    zpp_quant_reduce(&job->spec, sources, count, factor_of(job), valid_elems(job, span, me), &job->spec, &to, NULL);
    status = gather_images(job, err);
    for (int r = 0; status == ZPP_OK && r < job->ranks; r++) {
        const size_t elems = valid_elems(job, span, r);
        if (elems) read_image(job, r, elems, data + (size_t)r * stride_bytes);
    }
    return status;
}

static zpp_status all_reduce(struct job *job, struct zpp_err *err) {
    const struct zpp_call *call = job->call;
    const size_t ranks = (size_t)job->ranks, most = job->piece_elems * ranks;
    zpp_status status = ZPP_OK;
    for (size_t at = 0; status == ZPP_OK && at < call->elems; at += most) {
        const size_t span = least(call->elems - at, most);
        set_piece(job, (zpp_quant_blocks(&job->spec, span) + ranks - 1) / ranks * job->spec.block_elems);
        status = all_reduce_piece(job, (uint8_t *)call->dst + at * job->elem_bytes, span, err);
    }
    return status;
}

static zpp_status check_nodes(const struct job *job, struct zpp_err *err) {
    const int asked = job->call->node_ranks;
    if (!asked || asked == job->ranks || (job->hosts->even && asked == job->locals)) return ZPP_OK;
    return zpp_fail(err, ZPP_INVALID,
                    "comm: %d ranks a node asked of group \"%s\", which is on %d hosts with %d ranks here; over "
                    "several hosts these are the nodes, so leave it at 0",
                    asked, job->hier->comm->name, job->hosts->hosts, job->locals);
}

zpp_status zpp_hier_quant(struct zpp_hier *hier, struct zpp_err *err) {
    const struct zpp_call *call = hier->call;
    struct job job = {.hier = hier,
                      .call = call,
                      .spec = {call->block_elems, call->bits, false},
                      .hosts = hier->hosts,
                      .ranks = hier->comm->ranks,
                      .locals = hier->locals,
                      .two_hops = hier->hosts->even && hier->locals > 1,
                      .elem_bytes = zpp_dtype_bytes(call->dtype)};
    zpp_status status = check_nodes(&job, err);
    if (status == ZPP_OK) status = make_buffers(&job, err);
    if (status != ZPP_OK) return status;
    switch (call->coll) {
    case ZPP_COLL_ALL_GATHER_QUANT: return all_gather(&job, err);
    case ZPP_COLL_REDUCE_SCATTER_QUANT: return reduce_scatter(&job, err);
    default: return all_reduce(&job, err);
    }
}
