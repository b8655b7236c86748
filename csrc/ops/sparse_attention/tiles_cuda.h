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
    const void *q, *k, *v, *made_out, *grad_out; /* [heads_all][seq][dim] of dtype, as are the next */
    void *out, *grad_q, *grad_k, *grad_v;
    float *lse, *delta; /* [heads_all][seq] */
    const uint8_t *key_mask; /* [batch][seq]; NULL: all keys are seen */
    const int32_t *starts, *columns;
    uint64_t heads_all, heads, seq, dim, layout_heads, blocks, block, entries; /* heads_all: of all batches */
    float scale;
    uint32_t rows;
    uint8_t dtype, causal; /* dtype: element_cuda.h */
};

/* Floats that a kernel with so many tiles needs. */
#define ZPP_SPARSE_CUDA_FLOATS(tiles, rows, dim) \
    ((uint64_t)(tiles) * (rows) * ((dim) + 1) + 2 * (uint64_t)(rows) * (rows) + 3 * (uint64_t)(rows))

#if defined(__CUDACC__) || defined(ZPP_ON_CPU)
#ifdef ZPP_ON_CPU
static float scratch[ZPP_SPARSE_CUDA_SCRATCH_FLOATS];
#else
extern __shared__ float scratch[];
#endif

/* The strip of this block of threads: its head, its first row, and its block of the layout. */
struct place {
    uint64_t head, first, block;
};
static __device__ __forceinline__ struct place place_of(const struct zpp_sparse_cuda_args *a) {
    const uint64_t strips = (a->seq + a->rows - 1) / a->rows, first = blockIdx.x % strips * a->rows;
    const struct place place = { blockIdx.x / strips, first, first / a->block };
    return place;
}

/* Rows from `first` on of a head; zeros beyond seq. */
static __device__ __forceinline__ void load_tile(const struct zpp_sparse_cuda_args *a, const void *tensor,
                                                 uint64_t head, uint64_t first, float *tile) {
    for (uint64_t at = threadIdx.x; at < a->rows * a->dim; at += ZPP_SPARSE_CUDA_THREADS) {
        const uint64_t r = at / a->dim, d = at % a->dim;
        const uint64_t from = (head * a->seq + first + r) * a->dim + d;
        tile[r * (a->dim + 1) + d] = first + r < a->seq ? zpp_cuda_load(tensor, a->dtype, from) : 0.0f;
    }
}

static __device__ __forceinline__ void zero_tile(const struct zpp_sparse_cuda_args *a, float *tile) {
    for (uint64_t at = threadIdx.x; at < a->rows * (a->dim + 1); at += ZPP_SPARSE_CUDA_THREADS) tile[at] = 0.0f;
}

static __device__ __forceinline__ void store_tile(const struct zpp_sparse_cuda_args *a, const float *tile,
                                                  uint64_t head, uint64_t first, void *tensor) {
    for (uint64_t at = threadIdx.x; at < a->rows * a->dim; at += ZPP_SPARSE_CUDA_THREADS) {
        const uint64_t r = at / a->dim, d = at % a->dim;
        if (first + r >= a->seq) continue;
        zpp_cuda_store(tensor, a->dtype, (head * a->seq + first + r) * a->dim + d, tile[r * (a->dim + 1) + d]);
    }
}

/* <row i of x, row j of y> */
static __device__ __forceinline__ float product(const struct zpp_sparse_cuda_args *a, const float *x, uint64_t i,
                                                const float *y, uint64_t j) {
    float total = 0.0f;
    for (uint64_t d = 0; d < a->dim; ++d) total = fmaf(x[i * (a->dim + 1) + d], y[j * (a->dim + 1) + d], total);
    return total;
}

/* Query i sees key j, both inside the sequence. */
static __device__ __forceinline__ int is_seen(const struct zpp_sparse_cuda_args *a, uint64_t head, uint64_t i,
                                              uint64_t j) {
    if (i >= a->seq || j >= a->seq || (a->causal && j > i)) return 0;
    return !a->key_mask || a->key_mask[head / a->heads * a->seq + j];
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
