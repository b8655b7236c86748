/* SPDX-License-Identifier: Apache-2.0
 *
 * Quantised collectives (ZeRO++, Wang et al. 2023): blocks of codes of 8 or 4 bits and an fp32 scale a block travel in
 * place of elements (csrc/ops/quant, symmetric). w(E) = bytes of E elements on the wire = E * bits / 8 + 4 a block.
 * Bytes read from peers, per rank of N, E = elements of one rank's shard:
 *
 *   all_gather      (N - 1) w(E)          qwZ, section 3.2. Each rank takes its own shard from its codes, too, so all
 *                                         ranks hold the same bits.
 *   reduce_scatter  (N - 1) w(E)          qgZ, section 3.3, on one node: one hop, one quantisation
 *     on M nodes    (L - 1) M w(E) near   L = N / M ranks a node. First hop in the node: local rank l collects what
 *                   (M - 1) w(E) far      goes to local rank l of each node, adds and quantises again; second hop
 *                                         between the ranks l of all nodes
 *   all_reduce      2 (N - 1) w(E)        E = elems / N: a reduce_scatter and an all_gather within each round, two
 *                                         quantisations; blocks as over the whole tensor, whatever the cut
 *
 * All go through the staging slots in rounds: a rank quantises straight into its slot, peers dequantise, or add,
 * straight out of it, so nothing is allocated and each code is written once and read once a reader. Sums are in fp32,
 * in rank order, nodes in node order; one rounding to the dtype of the destination. A rank reads its own contribution
 * from its own slot, like any other's. With one rank no bytes travel, so values are exact.
 */
#include <assert.h>
#include <string.h>

#include "../../ops/quant/quant.h"
#include "../internal.h"

enum { NODE_RANKS_MAX = 63 };

/* How a slot is cut: `parts` pieces, each with the scales, then the codes, of up to piece_elems elements. */
struct wire {
    struct zpp_quant_spec spec;
    size_t piece_elems, stride_bytes;
};

struct job {
    struct zpp_wait_ctx *wait_ctx;
    struct wire wire;
    const uint8_t *src;
    uint8_t *dst;
    zpp_dtype dtype;
    size_t elem_bytes, elems; /* elems: of one shard; all_reduce: of the tensor */
    float factor;
    int node_ranks; /* L */
};

static size_t block_bytes(const struct zpp_quant_spec *spec) {
    return zpp_quant_code_bytes(spec, spec->block_elems) + sizeof(float);
}

static uint64_t wire_bytes(const struct wire *wire, size_t elems) {
    return zpp_quant_code_bytes(&wire->spec, elems) + sizeof(float) * zpp_quant_blocks(&wire->spec, elems);
}

static size_t stride_of(int parts) { return ZPP_STAGE_BYTES / (size_t)parts & ~(size_t)(ZPP_LINE_BYTES - 1); }

static struct wire wire_of(const struct zpp_call *call, int parts) {
    struct wire wire = {{call->block_elems, call->bits, false}, 0, stride_of(parts)};
    wire.piece_elems = wire.stride_bytes / block_bytes(&wire.spec) * wire.spec.block_elems;
    assert(wire.piece_elems); /* zpp_quant_check */
    return wire;
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* --- pieces of a slot -------------------------------------------------------------------------------------------- */

static float *scales_of(const struct wire *wire, const uint8_t *slot, int part) {
    return (float *)(void *)((uint8_t *)(uintptr_t)slot + (size_t)part * wire->stride_bytes);
}

static uint8_t *codes_of(const struct wire *wire, const uint8_t *slot, int part) {
    return (uint8_t *)(scales_of(wire, slot, part) + wire->piece_elems / wire->spec.block_elems);
}

static struct zpp_quant_target target_of(const struct wire *wire, uint8_t *slot, int part) {
    const struct zpp_quant_target target = {codes_of(wire, slot, part), scales_of(wire, slot, part), NULL};
    return target;
}

static struct zpp_quant_source source_of(const struct wire *wire, const uint8_t *slot, int part) {
    const struct zpp_quant_source source = {codes_of(wire, slot, part), scales_of(wire, slot, part), NULL};
    return source;
}

static void put_piece(const struct job *job, const uint8_t *src, size_t elems, uint8_t *slot, int part) {
    const struct zpp_quant_target to = target_of(&job->wire, slot, part);
    zpp_quantise(&job->wire.spec, src, job->dtype, elems, &to, NULL);
}

static void get_piece(const struct job *job, const uint8_t *slot, int part, size_t elems, uint8_t *dst) {
    const struct zpp_quant_source from = source_of(&job->wire, slot, part);
    zpp_dequantise(&job->wire.spec, &from, dst, job->dtype, elems, false, NULL);
}

static size_t length_at(const struct job *job, size_t at) { return least(job->elems - at, job->wire.piece_elems); }

static size_t rounds_of(const struct job *job) {
    return (job->elems + job->wire.piece_elems - 1) / job->wire.piece_elems;
}

/* --- all-gather -------------------------------------------------------------------------------------------------- */

static uint8_t *gathered(const struct job *job, int rank, size_t at) {
    return job->dst + ((size_t)rank * job->elems + at) * job->elem_bytes;
}

static void gather_fill(const void *ctx, size_t round, uint8_t *slot) {
    const struct job *job = ctx;
    const size_t at = round * job->wire.piece_elems, elems = length_at(job, at);
    put_piece(job, job->src + at * job->elem_bytes, elems, slot, 0);
    /* src may lie here: it has been read */
    get_piece(job, slot, 0, elems, gathered(job, job->wait_ctx->comm->rank, at));
}

static void gather_take(const void *ctx, size_t round, uint32_t staged) {
    const struct job *job = ctx;
    const struct zpp_comm *comm = job->wait_ctx->comm;
    const size_t at = round * job->wire.piece_elems, elems = length_at(job, at);
    for (int k = 1; k < comm->ranks; k++) {
        const int r = (comm->rank + k) % comm->ranks;
        get_piece(job, zpp_stage(comm, r, 0, staged), 0, elems, gathered(job, r, at));
    }
}

static zpp_status all_gather(struct job *job, struct zpp_err *err) {
    struct zpp_comm *comm = job->wait_ctx->comm;
    const struct zpp_pipeline pipeline = {rounds_of(job), job, gather_fill, gather_take, NULL};
    zpp_count_call(comm, ZPP_TRAFFIC_ALL_GATHER, wire_bytes(&job->wire, job->elems) * (uint64_t)(comm->ranks - 1));
    return zpp_pipeline_run(job->wait_ctx, &pipeline, err);
}

/* --- reduce-scatter ---------------------------------------------------------------------------------------------- */

/* A piece of every rank's shard, by rank. */
static void scatter_fill(const void *ctx, size_t round, uint8_t *slot) {
    const struct job *job = ctx;
    const size_t at = round * job->wire.piece_elems, elems = length_at(job, at);
    for (int r = 0; r < job->wait_ctx->comm->ranks; r++)
        put_piece(job, job->src + ((size_t)r * job->elems + at) * job->elem_bytes, elems, slot, r);
}

static void add_pieces(const struct job *job, const struct zpp_quant_source *sources, int count, size_t at) {
    zpp_quant_sum(&job->wire.spec, sources, (size_t)count, job->factor, job->dst + at * job->elem_bytes, job->dtype,
                  length_at(job, at), NULL);
}

static void scatter_take(const void *ctx, size_t round, uint32_t staged) {
    const struct job *job = ctx;
    const struct zpp_comm *comm = job->wait_ctx->comm;
    struct zpp_quant_source sources[ZPP_RANKS_MAX];
    for (int r = 0; r < comm->ranks; r++)
        sources[r] = source_of(&job->wire, zpp_stage(comm, r, 0, staged), comm->rank);
    add_pieces(job, sources, comm->ranks, round * job->wire.piece_elems);
}

/* First hop: take from the ranks of this node their pieces for the ranks with this local number on every node; one sum
 * for each node. */
static void node_pass(const void *ctx, size_t round, uint32_t staged, uint8_t *slot) {
    const struct job *job = ctx;
    const struct zpp_comm *comm = job->wait_ctx->comm;
    const int local = comm->rank % job->node_ranks, first = comm->rank - local;
    struct zpp_quant_source sources[ZPP_RANKS_MAX];
    for (int node = 0; node < comm->ranks / job->node_ranks; node++) {
        const struct zpp_quant_target to = target_of(&job->wire, slot, node);
        for (int r = 0; r < job->node_ranks; r++)
            sources[r] =
                source_of(&job->wire, zpp_stage(comm, first + r, 0, staged), node * job->node_ranks + local);
        zpp_quant_reduce(&job->wire.spec, sources, (size_t)job->node_ranks, 1.0f,
                         length_at(job, round * job->wire.piece_elems), &job->wire.spec, &to, NULL);
    }
}

/* Second hop: take the sums for this node from the ranks with this local number on every node. */
static void node_take(const void *ctx, size_t round, uint32_t staged) {
    const struct job *job = ctx;
    const struct zpp_comm *comm = job->wait_ctx->comm;
    const int local = comm->rank % job->node_ranks, nodes = comm->ranks / job->node_ranks;
    struct zpp_quant_source sources[ZPP_RANKS_MAX];
    for (int node = 0; node < nodes; node++)
        sources[node] = source_of(&job->wire, zpp_stage(comm, node * job->node_ranks + local, 1, staged),
                                  comm->rank / job->node_ranks);
    add_pieces(job, sources, nodes, round * job->wire.piece_elems);
}

static zpp_status reduce_scatter(struct job *job, struct zpp_err *err) {
    struct zpp_comm *comm = job->wait_ctx->comm;
    const int nodes = comm->ranks / job->node_ranks;
    const uint64_t shard = wire_bytes(&job->wire, job->elems);
    const uint64_t far = shard * (uint64_t)(nodes - 1);
    const uint64_t near = shard * (uint64_t)(job->node_ranks - 1) * (uint64_t)nodes;
    const bool one_hop = nodes == 1 || job->node_ranks == 1;
    const struct zpp_pipeline pipeline = {rounds_of(job), job, scatter_fill, one_hop ? scatter_take : node_take,
                                          one_hop ? NULL : node_pass};
    zpp_count_call(comm, ZPP_TRAFFIC_REDUCE_SCATTER, near + far);
    zpp_count_far(comm, ZPP_TRAFFIC_REDUCE_SCATTER, far);
    return zpp_pipeline_run(job->wait_ctx, &pipeline, err);
}

/* --- all-reduce -------------------------------------------------------------------------------------------------- */

/* A round covers one piece of the tensor for each rank; the last round shares out the remainder in whole blocks. */
static size_t round_elems(const struct job *job) { return job->wire.piece_elems * (size_t)job->wait_ctx->comm->ranks; }

static void share_of(const struct job *job, size_t at, int rank, size_t *begin, size_t *elems) {
    const size_t span = least(job->elems - at, round_elems(job)), ranks = (size_t)job->wait_ctx->comm->ranks;
    const size_t share = (zpp_quant_blocks(&job->wire.spec, span) + ranks - 1) / ranks * job->wire.spec.block_elems;
    *begin = least(share * (size_t)rank, span);
    *elems = least(span - *begin, share);
}

static void reduce_fill(const void *ctx, size_t round, uint8_t *slot) {
    const struct job *job = ctx;
    const size_t at = round * round_elems(job);
    for (int r = 0; r < job->wait_ctx->comm->ranks; r++) {
        size_t begin, elems;
        share_of(job, at, r, &begin, &elems);
        put_piece(job, job->dst + (at + begin) * job->elem_bytes, elems, slot, r);
    }
}

static void reduce_pass(const void *ctx, size_t round, uint32_t staged, uint8_t *slot) {
    const struct job *job = ctx;
    const struct zpp_comm *comm = job->wait_ctx->comm;
    const struct zpp_quant_target to = target_of(&job->wire, slot, 0);
    struct zpp_quant_source sources[ZPP_RANKS_MAX];
    size_t begin, elems;
    share_of(job, round * round_elems(job), comm->rank, &begin, &elems);
    for (int r = 0; r < comm->ranks; r++)
        sources[r] = source_of(&job->wire, zpp_stage(comm, r, 0, staged), comm->rank);
    zpp_quant_reduce(&job->wire.spec, sources, (size_t)comm->ranks, job->factor, elems, &job->wire.spec, &to, NULL);
}

static void reduce_take(const void *ctx, size_t round, uint32_t staged) {
    const struct job *job = ctx;
    const struct zpp_comm *comm = job->wait_ctx->comm;
    const size_t at = round * round_elems(job);
    for (int k = 0; k < comm->ranks; k++) {
        const int r = (comm->rank + k) % comm->ranks;
        size_t begin, elems;
        share_of(job, at, r, &begin, &elems);
        get_piece(job, zpp_stage(comm, r, 1, staged), 0, elems, job->dst + (at + begin) * job->elem_bytes);
    }
}

/* Count what this rank reads in the round at element `at`: its share from every peer, then every peer's share. */
static uint64_t reduce_bytes(const struct job *job, size_t at) {
    const struct zpp_comm *comm = job->wait_ctx->comm;
    uint64_t bytes = 0;
    for (int r = 0; r < comm->ranks; r++) {
        size_t begin, elems;
        share_of(job, at, r, &begin, &elems);
        const uint64_t share = wire_bytes(&job->wire, elems);
        bytes += r == comm->rank ? share * (uint64_t)(comm->ranks - 1) : share;
    }
    return bytes;
}

static zpp_status all_reduce(struct job *job, struct zpp_err *err) {
    const size_t whole = job->elems / round_elems(job), rest = job->elems % round_elems(job);
    const struct zpp_pipeline pipeline = {whole + (rest != 0), job, reduce_fill, reduce_take, reduce_pass};
    uint64_t bytes = whole ? whole * reduce_bytes(job, 0) : 0;
    if (rest) bytes += reduce_bytes(job, job->elems - rest);
    zpp_count_call(job->wait_ctx->comm, ZPP_TRAFFIC_ALL_REDUCE, bytes);
    return zpp_pipeline_run(job->wait_ctx, &pipeline, err);
}

/* --- the door (call.c) ------------------------------------------------------------------------------------------- */

static zpp_status check_format(const struct zpp_comm *comm, const struct zpp_call *call, struct zpp_err *err) {
    const int parts = call->coll == ZPP_COLL_ALL_GATHER_QUANT ? 1 : comm->ranks;
    const struct zpp_quant_spec spec = {call->block_elems, call->bits, false};
    if (call->bits != 8 && call->bits != 4)
        return zpp_fail(err, ZPP_INVALID, "comm: a quantised collective with %d bits, wanted 8 or 4", call->bits);
    if (call->block_elems < 16 || call->block_elems % 16)
        return zpp_fail(err, ZPP_INVALID,
                        "comm: a quantised collective in blocks of %zu elements, wanted a multiple of 16",
                        call->block_elems);
    if (call->block_elems > ZPP_STAGE_BYTES || block_bytes(&spec) > stride_of(parts))
        return zpp_fail(err, ZPP_INVALID,
                        "comm: a quantised collective in blocks of %zu elements, more than its buffers hold with %d "
                        "ranks (%zu bytes a block); blocks of a few hundred elements are usual",
                        call->block_elems, comm->ranks, stride_of(parts));
    return ZPP_OK;
}

static zpp_status check_nodes(const struct zpp_comm *comm, const struct zpp_call *call, struct zpp_err *err) {
    if (call->node_ranks < 0 || (call->node_ranks && comm->ranks % call->node_ranks))
        return zpp_fail(err, ZPP_INVALID,
                        "comm: %d ranks a node do not divide the %d ranks of group \"%s\"; 0 means that all are on one",
                        call->node_ranks, comm->ranks, comm->name);
    if (call->node_ranks != comm->ranks && call->node_ranks > NODE_RANKS_MAX) /* the signature has 6 bits for it */
        return zpp_fail(err, ZPP_INVALID, "comm: %d ranks a node of group \"%s\", wanted at most %d; 0 means one node",
                        call->node_ranks, comm->name, (int)NODE_RANKS_MAX);
    return ZPP_OK;
}

zpp_status zpp_quant_check(const struct zpp_comm *comm, const struct zpp_call *call, struct zpp_err *err) {
    if (call->dtype != ZPP_F32 && call->dtype != ZPP_BF16 && call->dtype != ZPP_F16)
        return zpp_fail(err, ZPP_INVALID, "comm: a quantised collective of %s, wanted float32, bfloat16 or float16",
                        zpp_dtype_name(call->dtype));
    const zpp_status status = check_format(comm, call, err);
    if (status != ZPP_OK) return status;
    if (call->elems >= ZPP_QUANT_ELEMS_END)
        return zpp_fail(err, ZPP_INVALID, "comm: a quantised collective of %zu elements, wanted less than 2^40",
                        call->elems);
    if (call->op != ZPP_SUM && call->op != ZPP_AVG)
        return zpp_fail(err, ZPP_INVALID, "comm: a quantised collective with reduce operation %d, wanted sum or avg",
                        (int)call->op);
    return check_nodes(comm, call, err);
}

struct zpp_sig zpp_quant_sig(const struct zpp_comm *comm, const struct zpp_call *call) {
    const bool reduces = call->coll != ZPP_COLL_ALL_GATHER_QUANT;
    struct zpp_sig sig =
        zpp_sig_make(call->coll, call->dtype, reduces ? (unsigned)call->op : ZPP_NO_OP, ZPP_NO_ROOT, call->elems);
    const int node_ranks = call->node_ranks == comm->ranks ? 0 : call->node_ranks;
    sig.what |= (uint64_t)(call->bits == 4) << 40 | (uint64_t)(call->block_elems / 16) << 41;
    sig.what |= (uint64_t)node_ranks << 57;
    sig.elems |= (uint64_t)call->object << 40;
    return sig;
}

zpp_status zpp_coll_quant(struct zpp_wait_ctx *wait_ctx, const struct zpp_call *call, struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    const size_t elem_bytes = zpp_dtype_bytes(call->dtype), bytes = call->elems * elem_bytes;
    if (comm->ranks == 1) {
        if (call->coll != ZPP_COLL_ALL_REDUCE_QUANT && call->dst != call->src && bytes)
            memmove(call->dst, call->src, bytes);
        return ZPP_OK;
    }
    struct job job = {.wait_ctx = wait_ctx,
                      .wire = wire_of(call, call->coll == ZPP_COLL_ALL_GATHER_QUANT ? 1 : comm->ranks),
                      .src = call->src,
                      .dst = call->dst,
                      .dtype = call->dtype,
                      .elem_bytes = elem_bytes,
                      .elems = call->elems,
                      .factor = call->op == ZPP_AVG ? 1.0f / (float)comm->ranks : 1.0f,
                      .node_ranks = call->node_ranks ? call->node_ranks : comm->ranks};
    const zpp_status status = zpp_exchange(wait_ctx, err);
    if (status != ZPP_OK) return status;
    switch (call->coll) {
    case ZPP_COLL_ALL_GATHER_QUANT: return all_gather(&job, err);
    case ZPP_COLL_REDUCE_SCATTER_QUANT: return reduce_scatter(&job, err);
    default: return all_reduce(&job, err);
    }
}
