/* SPDX-License-Identifier: Apache-2.0
 *
 * Block-sparse attention on CUDA: the argument of its kernels, shared by forward_cuda.cu, backward_cuda.cu and their
 * launcher sparse_attention_cuda.c, and the tiles that they work on.
 *
 * A block of threads works on a strip of `rows` queries or keys, which goes through the other side in steps of as many.
 * Its tiles lie in shared memory, whose size is given with the launch; their rows are dim + 1 apart, so that a column
 * of a tile lies in as many banks as it has rows.
 */
#ifndef ZPP_OPS_SPARSE_ATTENTION_TILES_CUDA_H
#define ZPP_OPS_SPARSE_ATTENTION_TILES_CUDA_H

#include <stdint.h>

#ifndef ZPP_SPARSE_CUDA_THREADS /* at least as many as rows; a test on a CPU takes fewer */
#define ZPP_SPARSE_CUDA_THREADS 128
#endif

enum {
    ZPP_SPARSE_CUDA_SCRATCH_FLOATS = 12 * 1024, /* the shared memory that every GPU gives without being asked: 48 KiB */
    ZPP_SPARSE_CUDA_MOST_ROWS = 16,          /* divides every block */
    ZPP_SPARSE_CUDA_FORWARD_TILES = 3,
    ZPP_SPARSE_CUDA_QUERY_TILES = 5,
    ZPP_SPARSE_CUDA_KEY_TILES = 6,
};

struct zpp_sparse_cuda_args {
    const void *q, *k, *v, *made_out, *grad_out; /* of dtype, as are the next; shapes: sparse_attention.h */
    void *out, *grad_q, *grad_k, *grad_v;
    float *lse, *delta;      /* [heads_all][queries] */
    const uint8_t *key_mask; /* [batch][seq]; NULL: all keys are seen */
    const int32_t *starts, *columns;
    const int64_t *seed;
    uint64_t heads_all, heads, seq, dim, layout_heads, blocks, block, entries; /* heads_all: of all batches */
    uint64_t group, first, queries; /* group: heads of q that look at one head of k and v */
    float scale, dropout;
    uint32_t rows;
    uint8_t dtype, causal; /* dtype: element_cuda.h */
};

/* Floats that a kernel with so many tiles needs. */
#define ZPP_SPARSE_CUDA_FLOATS(tiles, rows, dim) \
    ((uint64_t)(tiles) * (rows) * ((dim) + 1) + 2 * (uint64_t)(rows) * (rows) + 3 * (uint64_t)(rows))

#if defined(__CUDACC__) || defined(ZPP_ON_CPU)
#include "dropout.h"

#ifdef ZPP_ON_CPU
static float scratch[ZPP_SPARSE_CUDA_SCRATCH_FLOATS];
#else
extern __shared__ float scratch[];
#endif

/* The strip of this block of threads: its head, its first position in the sequence, and its block of the layout. Strips
 * begin at multiples of `rows`, so that each lies in one block; the first and the last may reach beyond the queries. */
struct place {
    uint64_t head, first, block;
};
static __device__ __forceinline__ struct place place_of(const struct zpp_sparse_cuda_args *a, uint64_t begin,
                                                        uint64_t end) {
    const uint64_t before = begin / a->rows, strips = (end + a->rows - 1) / a->rows - before;
    const uint64_t first = (before + blockIdx.x % strips) * a->rows;
    const struct place place = { blockIdx.x / strips, first, first / a->block };
    return place;
}

/* A tensor's heads, and the positions of the sequence that it has of each. */
struct source {
    const void *tensor;
    uint64_t head, begin, count;
};
static __device__ __forceinline__ struct source of_queries(const struct zpp_sparse_cuda_args *a, const void *tensor,
                                                           uint64_t head) {
    const struct source source = {tensor, head, a->first, a->queries};
    return source;
}
static __device__ __forceinline__ struct source of_keys(const struct zpp_sparse_cuda_args *a, const void *tensor,
                                                        uint64_t kv_head) {
    const struct source source = {tensor, kv_head, 0, a->seq};
    return source;
}

static __device__ __forceinline__ int is_inside(const struct source *source, uint64_t position) {
    return position >= source->begin && position - source->begin < source->count;
}

/* Rows from `first` on of a head; zeros beyond what the tensor has. */
static __device__ __forceinline__ void load_tile(const struct zpp_sparse_cuda_args *a, struct source source,
                                                 uint64_t first, float *tile) {
    for (uint64_t at = threadIdx.x; at < a->rows * a->dim; at += ZPP_SPARSE_CUDA_THREADS) {
        const uint64_t r = at / a->dim, d = at % a->dim;
        const uint64_t from = (source.head * source.count + first + r - source.begin) * a->dim + d;
        tile[r * (a->dim + 1) + d] =
            is_inside(&source, first + r) ? zpp_cuda_load(source.tensor, a->dtype, from) : 0.0f;
    }
}

static __device__ __forceinline__ void zero_tile(const struct zpp_sparse_cuda_args *a, float *tile) {
    for (uint64_t at = threadIdx.x; at < a->rows * (a->dim + 1); at += ZPP_SPARSE_CUDA_THREADS) tile[at] = 0.0f;
}

static __device__ __forceinline__ void store_tile(const struct zpp_sparse_cuda_args *a, const float *tile,
                                                  struct source source, uint64_t first, void *to) {
    for (uint64_t at = threadIdx.x; at < a->rows * a->dim; at += ZPP_SPARSE_CUDA_THREADS) {
        const uint64_t r = at / a->dim, d = at % a->dim;
        if (!is_inside(&source, first + r)) continue;
        zpp_cuda_store(to, a->dtype, (source.head * source.count + first + r - source.begin) * a->dim + d,
                       tile[r * (a->dim + 1) + d]);
    }
}

/* <row i of x, row j of y> */
static __device__ __forceinline__ float product(const struct zpp_sparse_cuda_args *a, const float *x, uint64_t i,
                                                const float *y, uint64_t j) {
    float total = 0.0f;
    for (uint64_t d = 0; d < a->dim; ++d) total = fmaf(x[i * (a->dim + 1) + d], y[j * (a->dim + 1) + d], total);
    return total;
}

/* Query i, at a position that q has, sees key j. */
static __device__ __forceinline__ int is_seen(const struct zpp_sparse_cuda_args *a, uint64_t head, uint64_t i,
                                              uint64_t j) {
    if (i < a->first || i - a->first >= a->queries || j >= a->seq || (a->causal && j > i)) return 0;
    return !a->key_mask || a->key_mask[head / a->heads * a->seq + j];
}

/* The factor of dropout of query i and key j: 0, or what makes up for those. */
static __device__ __forceinline__ float keep_of(const struct zpp_sparse_cuda_args *a, uint64_t head, uint64_t i,
                                                uint64_t j) {
    const uint32_t below = zpp_sparse_drop_below(a->dropout);
    const uint64_t draws = zpp_sparse_drop_draws(zpp_sparse_drop_key((uint64_t)*a->seed, head, i), j);
    const uint32_t draw = (uint32_t)(draws >> 16 * (j % ZPP_SPARSE_DROP_KEYS)) & 0xffff;
    return draw < below ? 0.0f : zpp_sparse_drop_factor(below);
}

/* Entries [begin, end) of a row of a head's layout, held inside the layout, which is checked on the CPU only. */
struct span {
    uint64_t begin, end;
};
static __device__ __forceinline__ struct span span_of(const struct zpp_sparse_cuda_args *a, uint64_t head,
                                                      uint64_t row) {
    const uint64_t line = (a->layout_heads == 1 ? 0 : head % a->heads) * (a->blocks + 1) + row;
    struct span span = { (uint64_t)(uint32_t)a->starts[line], (uint64_t)(uint32_t)a->starts[line + 1] };
    if (span.end > a->entries) span.end = a->entries;
    return span;
}
#endif

#endif
