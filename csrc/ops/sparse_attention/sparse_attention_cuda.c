/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches block-sparse attention on CUDA (forward_cuda.cu, backward_cuda.cu).
 */
#include "sparse_attention.h"

#include "../element_cuda.h"
#include "../launch_cuda.h"
#include "tiles_cuda.h"

_Static_assert(ZPP_SPARSE_CUDA_MOST_ROWS <= (int)ZPP_SPARSE_ATTENTION_LEAST_BLOCK, "strips lie inside blocks");
_Static_assert(ZPP_SPARSE_CUDA_FLOATS(ZPP_SPARSE_CUDA_KEY_TILES, 2, ZPP_SPARSE_ATTENTION_MOST_DIM) <=
                   ZPP_SPARSE_CUDA_SCRATCH_FLOATS, "the widest heads must fit in strips of two");

static struct zpp_sparse_cuda_args args_of(const struct zpp_sparse_attention *at) {
    return (struct zpp_sparse_cuda_args){.q = at->q,
                                         .k = at->k,
                                         .v = at->v,
                                         .key_mask = at->key_mask,
                                         .starts = at->layout.starts,
                                         .columns = at->layout.columns,
                                         .heads_all = (uint64_t)at->batch * at->heads,
                                         .heads = at->heads,
                                         .seq = at->seq,
                                         .dim = at->dim,
                                         .layout_heads = at->layout.heads,
                                         .blocks = at->layout.blocks,
                                         .block = at->layout.block_elems,
                                         .entries = at->layout.entries,
                                         .group = at->heads / at->kv_heads,
                                         .first = at->first,
                                         .queries = at->queries,
                                         .seed = at->seed,
                                         .scale = at->scale,
                                         .dropout = at->dropout,
                                         .dtype = zpp_cuda_dtype_of(at->dtype),
                                         .causal = at->causal};
}

uint32_t zpp_sparse_cuda_rows(unsigned int tiles, size_t dim) {
    uint32_t rows = ZPP_SPARSE_CUDA_MOST_ROWS;
    while (ZPP_SPARSE_CUDA_FLOATS(tiles, rows, dim) > ZPP_SPARSE_CUDA_SCRATCH_FLOATS) rows /= 2;
    return rows;
}

/* A strip a block of threads, for each of `heads` the strips of positions [begin, end). */
static zpp_status launch(zpp_device *device, void *native, const char *kernel, unsigned int tiles, uint64_t heads,
                         uint64_t begin, uint64_t end, struct zpp_sparse_cuda_args *args, struct zpp_err *err) {
    args->rows = zpp_sparse_cuda_rows(tiles, args->dim);
    const uint64_t strips = (end + args->rows - 1) / args->rows - begin / args->rows;
    const struct zpp_launch_cuda launch = {
        kernel, heads * strips, ZPP_SPARSE_CUDA_THREADS,
        (unsigned int)(ZPP_SPARSE_CUDA_FLOATS(tiles, args->rows, args->dim) * sizeof(float))};
    return zpp_launch_cuda(device, native, &launch, args, err);
}

zpp_status zpp_sparse_attention_cuda(zpp_device *device, void *native, const struct zpp_sparse_attention *at, void *out,
                                     float *lse, struct zpp_err *err) {
    struct zpp_sparse_cuda_args args = args_of(at);
    args.out = out;
    args.lse = lse;
    return launch(device, native, "zpp_sparse_attention_cuda", ZPP_SPARSE_CUDA_FORWARD_TILES, args.heads_all, at->first,
                  at->first + at->queries, &args, err);
}

zpp_status zpp_sparse_attention_backward_cuda(zpp_device *device, void *native, const struct zpp_sparse_attention *at,
                                              const struct zpp_sparse_attention_grads *grads, float *delta,
                                              struct zpp_err *err) {
    struct zpp_sparse_cuda_args args = args_of(at);
    args.made_out = grads->out;
    args.grad_out = grads->grad_out;
    args.lse = (float *)(uintptr_t)grads->lse;
    args.delta = delta;
    args.grad_q = grads->grad_q, args.grad_k = grads->grad_k, args.grad_v = grads->grad_v;
    const struct zpp_launch_cuda first = {
        "zpp_sparse_attention_cuda_delta",
        zpp_launch_cuda_blocks(args.heads_all * args.queries, ZPP_SPARSE_CUDA_THREADS), ZPP_SPARSE_CUDA_THREADS, 0};
    zpp_status status = zpp_launch_cuda(device, native, &first, &args, err);
    if (!status) {
        status = launch(device, native, "zpp_sparse_attention_cuda_queries", ZPP_SPARSE_CUDA_QUERY_TILES,
                        args.heads_all, at->first, at->first + at->queries, &args, err);
    }
    if (!status) {
        status = launch(device, native, "zpp_sparse_attention_cuda_keys", ZPP_SPARSE_CUDA_KEY_TILES,
                        args.heads_all / args.group, 0, at->seq, &args, err);
    }
    return status;
}
