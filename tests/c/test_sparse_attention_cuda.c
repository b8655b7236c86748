/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA kernels of block-sparse attention, run on a CPU (cuda_threads.h), against the CPU's version: forward and
 * backward, causal or not, with masked keys, queries that see nothing, ends inside a block, wide heads, and a layout
 * that is out of range. They step through keys in other groups, so results are equal but for rounding.
 */
#include "harness.h"

#include <math.h>

#include "../../csrc/ops/element.h"
#include "../../csrc/ops/sparse_attention/sparse_attention.h"

#define ZPP_SPARSE_CUDA_THREADS 16
#include "cuda_threads.h"

#define zpp_sparse_attention_cuda forward_kernel
#include "../../csrc/ops/sparse_attention/forward_cuda.cu"
#undef zpp_sparse_attention_cuda
#include "../../csrc/ops/sparse_attention/backward_cuda.cu"
CUDA_THUNK(zpp_sparse_attention_cuda_delta, struct zpp_sparse_cuda_args)
CUDA_THUNK(zpp_sparse_attention_cuda_queries, struct zpp_sparse_cuda_args)
CUDA_THUNK(zpp_sparse_attention_cuda_keys, struct zpp_sparse_cuda_args)
/* CUDA_THUNK by hand: the kernel has the name of the function that launches it */
static void forward_thunk(const void *args) { forward_kernel(*(const struct zpp_sparse_cuda_args *)args); }

enum { HEADS = 2, MOST_SEQ = 75, MOST_DIM = 300, ELEMS = HEADS * MOST_SEQ * MOST_DIM };
struct results {
    float out[ELEMS], lse[HEADS * MOST_SEQ], grad_q[ELEMS], grad_k[ELEMS], grad_v[ELEMS];
};
static struct results want, got;
static float q[ELEMS], k[ELEMS], v[ELEMS], grad_out[ELEMS];

static float random_value(void) {
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)(state >> 40) / 8388608.0f - 1.0f;
}

/* Within a rounding of the sums: fp32 has 2^-24, the sums some hundred terms below 1; and one rounding to the kind. */
static void check_close(const char *name, const void *a, const void *b, zpp_dtype dtype, size_t elems) {
    const float within = dtype == ZPP_F32 ? 2e-5f : dtype == ZPP_BF16 ? 2e-2f : 2e-3f;
    for (size_t i = 0; i < elems; ++i) {
        const float x = zpp_element_load(a, dtype, i), y = zpp_element_load(b, dtype, i);
        if (x == y || fabsf(x - y) <= within * (1.0f + fabsf(x))) continue;
        fprintf(stderr, "%s[%zu] is %g, wanted %g\n", name, i, (double)y, (double)x);
        abort();
    }
}

static struct zpp_sparse_cuda_args args_of(const struct zpp_sparse_attention *at) {
    return (struct zpp_sparse_cuda_args){.q = at->q,
                                         .k = at->k,
                                         .v = at->v,
                                         .key_mask = at->key_mask,
                                         .starts = at->layout.starts,
                                         .columns = at->layout.columns,
                                         .heads_all = at->batch * at->heads,
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
                                         .dtype = at->dtype == ZPP_BF16  ? ZPP_CUDA_BF16
                                                  : at->dtype == ZPP_F16 ? ZPP_CUDA_F16
                                                                         : ZPP_CUDA_F32,
                                         .causal = at->causal};
}

/* Over positions [begin, end) of `heads`, as the launcher does. */
static void run(void (*thunk)(const void *args), struct zpp_sparse_cuda_args *args, unsigned int tiles, uint64_t heads,
                uint64_t begin, uint64_t end) {
    args->rows = zpp_sparse_cuda_rows(tiles, args->dim);
    CHECK(args->rows <= ZPP_SPARSE_CUDA_THREADS);
    const uint64_t strips = (end + args->rows - 1) / args->rows - begin / args->rows;
    cuda_run(thunk, args, heads * strips, ZPP_SPARSE_CUDA_THREADS);
}

static void check_attention(const struct zpp_sparse_attention *at) {
    static float delta[HEADS * MOST_SEQ];
    struct zpp_err err = ZPP_ERR_INIT;
    const size_t queries = at->heads * at->queries, elems = queries * at->dim;
    const size_t keys = at->kv_heads * at->seq * at->dim, end = at->first + at->queries;
    const struct zpp_sparse_attention_grads grads = { want.out, grad_out, want.lse, want.grad_q, want.grad_k,
                                                      want.grad_v };
    memset(&want, 0, sizeof want), memset(&got, 0, sizeof got);
    CHECK_OK(zpp_sparse_attention_forward(at, want.out, want.lse, NULL, &err));
    CHECK_OK(zpp_sparse_attention_backward(at, &grads, NULL, &err));
    struct zpp_sparse_cuda_args args = args_of(at);
    args.out = got.out, args.lse = got.lse;
    run(forward_thunk, &args, ZPP_SPARSE_CUDA_FORWARD_TILES, at->heads, at->first, end);
    check_close("out", want.out, got.out, at->dtype, elems);
    check_close("lse", want.lse, got.lse, ZPP_F32, queries);
    args.made_out = want.out, args.grad_out = grad_out, args.lse = want.lse, args.delta = delta;
    args.grad_q = got.grad_q, args.grad_k = got.grad_k, args.grad_v = got.grad_v;
    cuda_loop(zpp_sparse_attention_cuda_delta_thunk, &args,
              (queries + ZPP_SPARSE_CUDA_THREADS - 1) / ZPP_SPARSE_CUDA_THREADS, ZPP_SPARSE_CUDA_THREADS);
    run(zpp_sparse_attention_cuda_queries_thunk, &args, ZPP_SPARSE_CUDA_QUERY_TILES, at->heads, at->first, end);
    run(zpp_sparse_attention_cuda_keys_thunk, &args, ZPP_SPARSE_CUDA_KEY_TILES, at->kv_heads, 0, at->seq);
    check_close("grad_q", want.grad_q, got.grad_q, at->dtype, elems);
    check_close("grad_k", want.grad_k, got.grad_k, at->dtype, keys);
    check_close("grad_v", want.grad_v, got.grad_v, at->dtype, keys);
}

static void fill(zpp_dtype dtype, size_t elems) {
    float *const all[] = { q, k, v, grad_out };
    for (int t = 0; t < 4; ++t) {
        for (size_t i = 0; i < elems; ++i) zpp_element_store(all[t], dtype, i, random_value());
    }
}

/* Three blocks of 32, a layout a head; the second head's last block of queries sees nothing. */
static const int32_t starts[] = { 0, 2, 4, 6, 6, 7, 9, 9 }, columns[] = { 0, 2, 0, 1, 1, 2, 0, 0, 1 };
static const struct zpp_sparse_layout two_layouts = { starts, columns, 2, 3, 9, 32 };

/* All heads and positions; q, k and v as above. */
static struct zpp_sparse_attention attention(zpp_dtype dtype, size_t heads, size_t seq, size_t dim,
                                             struct zpp_sparse_layout layout) {
    return (struct zpp_sparse_attention){.q = q,
                                         .k = k,
                                         .v = v,
                                         .dtype = dtype,
                                         .batch = 1,
                                         .heads = heads,
                                         .kv_heads = heads,
                                         .seq = seq,
                                         .queries = seq,
                                         .dim = dim,
                                         .layout = layout,
                                         .scale = 0.3f};
}

static void equals_the_cpu(void) {
    static const zpp_dtype kinds[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
    static const int64_t seed = -3;
    static uint8_t mask[MOST_SEQ];
    for (size_t j = 0; j < MOST_SEQ; ++j) mask[j] = j % 5 != 2;
    for (int turn = 0; turn < 8; ++turn) {
        struct zpp_sparse_attention at = attention(kinds[turn % 3], HEADS, MOST_SEQ, 20, two_layouts);
        at.causal = turn & 1, at.key_mask = turn & 2 ? mask : NULL;
        if (turn == 3) at.layout.starts = starts, at.layout.heads = 1, at.layout.entries = 6;
        if (turn >= 4) at.kv_heads = 1, at.seed = &seed, at.dropout = 0.25f; /* both heads look at one of k and v */
        if (turn >= 6) at.first = 37, at.queries = turn == 6 ? 1 : 20;       /* inside of a strip */
        fill(at.dtype, HEADS * at.seq * at.dim);
        check_attention(&at);
    }
}

static void wide_heads(void) {
    static const int32_t one_start[] = { 0, 1, 3 }, one_column[] = { 0, 0, 1 };
    const struct zpp_sparse_layout layout = {one_start, one_column, 1, 2, 3, 16};
    struct zpp_sparse_attention at = attention(ZPP_F32, 1, 19, MOST_DIM, layout);
    at.scale = 0.05f, at.causal = true;
    fill(ZPP_F32, at.seq * at.dim);
    CHECK(zpp_sparse_cuda_rows(ZPP_SPARSE_CUDA_KEY_TILES, 512) == 2);
    check_attention(&at);
}

static void out_of_range(void) {
    static const int32_t wrong_start[] = { 0, 2, 9 }, wrong_column[] = { -1, 0, 7, 1 };
    const struct zpp_sparse_layout wrong = {wrong_start, wrong_column, 1, 2, 4, 16};
    struct zpp_sparse_attention at = attention(ZPP_F32, 1, 19, 4, wrong);
    static const int32_t right_start[] = { 0, 1, 2 }, right_column[] = { 0, 1 };
    struct zpp_err err = ZPP_ERR_INIT;
    fill(ZPP_F32, at.seq * at.dim);
    struct zpp_sparse_cuda_args args = args_of(&at);
    args.out = got.out, args.lse = got.lse;
    run(forward_thunk, &args, ZPP_SPARSE_CUDA_FORWARD_TILES, 1, 0, at.seq);
    at.layout.starts = right_start, at.layout.columns = right_column, at.layout.entries = 2;
    CHECK_OK(zpp_sparse_attention_forward(&at, want.out, want.lse, NULL, &err));
    check_close("out", want.out, got.out, ZPP_F32, at.seq * at.dim);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(equals_the_cpu), TEST(wide_heads), TEST(out_of_range), {0} };
    return test_main(argc, argv, cases);
}
