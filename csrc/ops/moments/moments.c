/* SPDX-License-Identifier: Apache-2.0
 *
 * Moments in fewer bits: the version for a CPU, where pieces may be cut, and the walk over the blocks of a tile.
 */
#include "moments.h"

#include <assert.h>

#include "../random.h"
#include "kernels.h"

enum { CUT_ELEMS = 32 };

const struct zpp_moments_kernels *zpp_moments_kernels_of(enum zpp_cpu_level level) {
    return ZPP_ISA_AT(level, zpp_moments);
}

uint64_t zpp_moments_key(uint64_t seed, uint64_t stream, uint64_t step) {
    uint64_t state = seed;
    state = zpp_random_next(&state) ^ stream;
    state = zpp_random_next(&state) ^ step;
    return zpp_random_next(&state);
}

/* zpp_moments_random adds the element's number to the lower half. */
uint64_t zpp_moments_key_from(uint64_t key, size_t first_elems) {
    return (key & ~(uint64_t)UINT32_MAX) | (uint32_t)(key + first_elems);
}

size_t zpp_moments_cut(const struct zpp_moments *how, size_t at) {
    const size_t unit = how->kind == ZPP_MOMENTS_INT8 ? ZPP_MOMENTS_BLOCK_ELEMS : CUT_ELEMS;
    const size_t into = how->kind == ZPP_MOMENTS_INT8 ? how->first_elems % unit : 0;
    const size_t border = (into + at) / unit * unit;
    return border > into ? border - into : 0;
}

size_t zpp_moments_tile_end(const struct zpp_moments *how, size_t at, size_t end) {
    const size_t next = zpp_moments_cut(how, at + ZPP_MOMENTS_TILE_ELEMS);
    return next < end ? next : end;
}

/* Elements from `at` on that lie in one block. */
static size_t block_end(const struct zpp_moments *how, size_t at, size_t end) {
    const size_t left = ZPP_MOMENTS_BLOCK_ELEMS - (how->first_elems + at) % ZPP_MOMENTS_BLOCK_ELEMS;
    return left < end - at ? at + left : end;
}

static float *scale_at(const struct zpp_moments *how, const struct zpp_moment *moment, size_t at) {
    const size_t first_block = how->first_elems / ZPP_MOMENTS_BLOCK_ELEMS;
    return moment->scales + (how->first_elems + at) / ZPP_MOMENTS_BLOCK_ELEMS - first_block;
}

static uint32_t k_of(enum zpp_moments_which which) { return which == ZPP_MOMENT_FIRST ? 7 : 8; }

void zpp_moments_load(const struct zpp_moments_kernels *kernels, const struct zpp_moments *how,
                      enum zpp_moments_which which, const struct zpp_moment *from, size_t begin, size_t end,
                      float *values) {
    assert(how->kind != ZPP_MOMENTS_F32);
    if (how->kind == ZPP_MOMENTS_BF16) {
        kernels->decode_bf16((const uint16_t *)from->codes + begin, values, end - begin);
        return;
    }
    for (size_t at = begin; at < end;) {
        const size_t next = block_end(how, at, end);
        kernels->decode_int8((const uint8_t *)from->codes + at, *scale_at(how, from, at), k_of(which),
                             values + (at - begin), next - at);
        at = next;
    }
}

void zpp_moments_store(const struct zpp_moments_kernels *kernels, const struct zpp_moments *how,
                       enum zpp_moments_which which, const struct zpp_moment *to, size_t begin, size_t end,
                       const float *values, bool nearest) {
    assert(how->kind != ZPP_MOMENTS_F32);
    struct zpp_moments_dice dice = { how->key + (uint64_t)which * ZPP_MOMENTS_WHICH_KEY,
                                     (uint32_t)(how->first_elems + begin), nearest };
    if (how->kind == ZPP_MOMENTS_BF16) {
        kernels->encode_bf16(values, (uint16_t *)to->codes + begin, end - begin, dice);
        return;
    }
    for (size_t at = begin; at < end;) {
        const size_t next = block_end(how, at, end);
        dice.index = (uint32_t)(how->first_elems + at);
        kernels->encode_int8(values + (at - begin), (uint8_t *)to->codes + at, scale_at(how, to, at), k_of(which),
                             next - at, dice);
        at = next;
    }
}
