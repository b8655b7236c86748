/* SPDX-License-Identifier: Apache-2.0
 *
 * Dropout of the weights of block-sparse attention, in C and in CUDA. A weight's draw is a function of the seed, its
 * head (of all batches), its query's position and its key's position, so forward and backward, and any number of
 * threads, draw alike, and no mask is stored. Four keys that stand together share 64 bits: a draw has 16.
 */
#ifndef ZPP_OPS_SPARSE_ATTENTION_DROPOUT_H
#define ZPP_OPS_SPARSE_ATTENTION_DROPOUT_H

#include "../random.h"

enum { ZPP_SPARSE_DROP_KEYS = 4 };

/* Draws below this are dropped: `dropout` in steps of 2^-16, never all. */
ZPP_FN uint32_t zpp_sparse_drop_below(float dropout) {
    const float below = ZPP_ADD(ZPP_MUL(dropout, 65536.0f), 0.5f);
    return below < 65535.0f ? (uint32_t)below : 65535u;
}

/* What weights that stay are multiplied by. */
ZPP_FN float zpp_sparse_drop_factor(uint32_t below) { return ZPP_DIV(65536.0f, (float)(65536u - below)); }

/* Of one query of one head. */
ZPP_FN uint64_t zpp_sparse_drop_key(uint64_t seed, uint64_t head, uint64_t query) {
    uint64_t state = seed;
    state = zpp_random_next(&state) ^ head;
    state = zpp_random_next(&state) ^ query;
    return zpp_random_next(&state);
}

/* 16 bits for each of the four keys from `position`, a multiple of four, on; the first one's are the lowest. */
ZPP_FN uint64_t zpp_sparse_drop_draws(uint64_t key, uint64_t position) {
    uint64_t state = key + position / ZPP_SPARSE_DROP_KEYS * 0x9e3779b97f4a7c15u; /* the generator's own step */
    return zpp_random_next(&state);
}

#endif
