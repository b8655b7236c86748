/* SPDX-License-Identifier: Apache-2.0
 *
 * Moments of an optimizer in fewer bits than fp32: bf16, or 8 bits with an fp32 scale a block. A step decodes a tile
 * of them to fp32, which stays in the first-level cache, runs its fp32 kernel there, and encodes them again, so that
 * memory is touched once and the arithmetic is that of fp32 states (docs/design/0022-states-in-fewer-bits.md).
 *
 * Rounding is stochastic: up with a probability of the share of the way up, from 16 random bits, so that its mean is
 * the value. Rounding to nearest would freeze a second moment: beta2 = 0.999 changes it by 1/1000 a step, and bf16's
 * next number is 1/256 to 1/128 away. The bits are a function of (key, place in the tensor) alone, and the key one
 * of (seed, stream, step): every CPU level, CUDA, cut and number of threads gives the same, and so does a run that was
 * resumed.
 *
 *   BF16   two bytes a moment, relative step 2^-8 to 2^-7
 *   INT8   one byte, and an fp32 scale for each block of 256 elements: block-wise dynamic quantisation (Dettmers et al.
 *          2022, "8-bit Optimizers via Block-wise Quantization", sections 2 and 1.3). scale is the block's greatest
 *          magnitude; a code n stands for level(n) * scale. The paper's dynamic tree has seven decades, 2^i equal steps
 *          in the i-th; here each is a factor of 8 in place of 10, so that levels are exact in fp32 and encoding needs
 *          shifts in place of a search:
 *
 *              N = n + 1 = 2^i * f, 1 <= f < 2:   level(n) = 8^(i - K) * (7 f - 6),   level(0) = 0
 *
 *          first moments: K = 7, n is 0..127, the eighth bit is the sign; levels from 3.8e-6 to 1, 1.4 % apart at 1
 *          second moments: K = 8, n is 0..255; levels from 4.8e-7 to 1, 0.7 % apart at 1. What is above zero never
 *          becomes 0, but at least level(1): a 0 below a root would make a step of m / eps.
 *          A linear map would give most second moments level 0; a smaller block confines an outlier better, and costs
 *          more scales: 256 gives 2.03 bytes for both moments of a parameter.
 *
 * Blocks begin at multiples of 256 elements of the *tensor*; a piece of one begins and ends with what it has of them.
 *
 * Not finite: bf16 keeps infinities and NaNs, and the topmost numbers may round to infinity. A block of INT8 with an
 * infinity, a NaN or a magnitude of 2^126 and more gets scale NaN and codes 0: it decodes to NaN, nothing is hidden.
 */
#ifndef ZPP_OPS_MOMENTS_H
#define ZPP_OPS_MOMENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "../../base/cpu.h"

enum zpp_moments_kind { ZPP_MOMENTS_F32, ZPP_MOMENTS_BF16, ZPP_MOMENTS_INT8 };
enum zpp_moments_which { ZPP_MOMENT_FIRST, ZPP_MOMENT_SECOND, ZPP_MOMENT_MAX }; /* the first has signs */
enum {
    ZPP_MOMENTS_BLOCK_ELEMS = 256,
    ZPP_MOMENTS_TILE_ELEMS = 2048, /* what a step decodes at once: 8 KiB a moment */
};

/* One moment of a piece of a tensor; not of F32. */
struct zpp_moment {
    void *codes;   /* [elems]: uint16_t or uint8_t */
    float *scales; /* INT8: [zpp_moments_scales(first_elems, elems)] */
};

/* How a piece's moments are held; all zero: fp32. */
struct zpp_moments {
    enum zpp_moments_kind kind;
    size_t first_elems; /* place of the piece's first element in its tensor */
    uint64_t key;       /* zpp_moments_key */
};

/* Scales of elements [first, first + elems) of a tensor. */
static inline size_t zpp_moments_scales(size_t first_elems, size_t elems) {
    const size_t into = first_elems % ZPP_MOMENTS_BLOCK_ELEMS;
    return elems ? (into + elems - 1) / ZPP_MOMENTS_BLOCK_ELEMS + 1 : 0;
}

/* Bytes that one element of a moment takes, without scales. */
static inline size_t zpp_moments_elem_bytes(enum zpp_moments_kind kind) {
    return kind == ZPP_MOMENTS_F32 ? 4 : kind == ZPP_MOMENTS_BF16 ? 2 : 1;
}

/* Where a tile that begins at element `at` of the piece ends: at a block's border, or at `end`. */
size_t zpp_moments_tile_end(const struct zpp_moments *how, size_t at, size_t end);

/* A cut at element `at` of the piece, moved down to a place where it may be: the start, or a block's border. */
size_t zpp_moments_cut(const struct zpp_moments *how, size_t at);

/* The key of all moments of one tensor in one step. */
uint64_t zpp_moments_key(uint64_t seed, uint64_t stream, uint64_t step);
/* The key with which element i of a piece has the random bits that element first_elems + i has with `key`. */
uint64_t zpp_moments_key_from(uint64_t key, size_t first_elems);

struct zpp_moments_kernels;
/* The version of a level; NULL where this build has none. Whether the machine has it is the caller's question. */
const struct zpp_moments_kernels *zpp_moments_kernels_of(enum zpp_cpu_level level);

/* values[0 ..) = elements [begin, end) of a moment; any thread, no alignment asked for but the elements' own. */
void zpp_moments_load(const struct zpp_moments_kernels *kernels, const struct zpp_moments *how,
                      enum zpp_moments_which which, const struct zpp_moment *from, size_t begin, size_t end,
                      float *values);
/* The other way; with `nearest` to the nearest level in place of stochastically (bf16: ties to even). Of INT8, begin
 * and end are where zpp_moments_cut may cut, or the piece's own. Encoding what was decoded gives the same codes. */
void zpp_moments_store(const struct zpp_moments_kernels *kernels, const struct zpp_moments *how,
                       enum zpp_moments_which which, const struct zpp_moment *to, size_t begin, size_t end,
                       const float *values, bool nearest);

#endif
