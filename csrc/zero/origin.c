/* SPDX-License-Identifier: Apache-2.0
 *
 * Whose gradient was not finite before it was added to those of the other ranks. The sum shows only that one was,
 * and the rank that finds it out is the one that owns the shard.
 *
 * On one host the sum of a shard reports whether it met an infinite value or NaN (zpp_reduce_sources); only then does
 * the shard's owner look at what the sum was made of. Over several hosts the owner never sees that, so each rank looks
 * at its own gradient before it goes out.
 */
#include <stdlib.h>

#include "internal.h"

enum { PIECE_ELEMS = 65536 };

/* An exponent of ones alone means infinite or NaN. Blocks without a way out, so that the compiler makes vectors. */
#define ANY_NONFINITE(name, type, exponent)                                            \
    static bool name(const type *bits, size_t elems) {                                 \
        enum { BLOCK = 1024 };                                                         \
        for (size_t at = 0; at < elems; at += BLOCK) {                                 \
            const size_t end = elems - at < BLOCK ? elems : at + BLOCK;                \
            type bad = 0;                                                              \
            for (size_t i = at; i < end; i++)                                          \
                bad |= (type)((bits[i] & (type)(exponent)) == (type)(exponent));       \
            if (bad) return true;                                                      \
        }                                                                              \
        return false;                                                                  \
    }

ANY_NONFINITE(any_f32, uint32_t, 0x7f800000u)
ANY_NONFINITE(any_f64, uint64_t, 0x7ff0000000000000u)
ANY_NONFINITE(any_bf16, uint16_t, 0x7f80u)
ANY_NONFINITE(any_f16, uint16_t, 0x7c00u)

/* True if any element is infinite or NaN. Elements that are not floating point are finite. */
static bool any_nonfinite(const void *data, zpp_dtype dtype, size_t elems) {
    switch (dtype) {
    case ZPP_F32: return any_f32(data, elems);
    case ZPP_F64: return any_f64(data, elems);
    case ZPP_BF16: return any_bf16(data, elems);
    case ZPP_F16: return any_f16(data, elems);
    default: return false;
    }
}

size_t zpp_origin_first_nonfinite(const void *data, zpp_dtype dtype, size_t elems) {
    const unsigned char *at = data;
    const size_t bytes = zpp_dtype_bytes(dtype);
    size_t first = 0, last = elems; /* it is in [first, last) */
    while (last - first > 1) {
        const size_t half = (last - first) / 2;
        if (any_nonfinite(at + first * bytes, dtype, half)) last = first + half;
        else first += half;
    }
    return first;
}

bool zpp_origin_nonfinite_params(const struct zpp_unit *unit, const void *data, zpp_dtype dtype, size_t begin,
                                 size_t elems) {
    const size_t bytes = zpp_dtype_bytes(dtype);
    for (size_t i = 0; i < unit->params; i++) {
        const size_t first = unit->offset_elems[i] > begin ? unit->offset_elems[i] : begin;
        const size_t end = unit->offset_elems[i] + unit->param_elems[i];
        const size_t last = end < begin + elems ? end : begin + elems;
        if (first < last &&
            any_nonfinite((const unsigned char *)data + (first - begin) * bytes, dtype, last - first))
            return true;
    }
    return false;
}

struct piece {
    size_t begin, elems; /* of the unit */
};

static bool params_nonfinite(const struct zpp_unit *unit, const struct piece *piece, const void *data,
                             zpp_dtype dtype) {
    return zpp_origin_nonfinite_params(unit, data, dtype, piece->begin, piece->elems);
}

static bool piece_nonfinite(const struct zpp_unit *unit, const struct piece *piece, const void *data, zpp_dtype dtype) {
    return any_nonfinite(data, dtype, piece->elems) && params_nonfinite(unit, piece, data, dtype);
}

/* Whether a piece, which `data` has, is infinite or NaN anywhere between parameters. */
static bool gaps_nonfinite(const struct zpp_unit *unit, const struct piece *piece, const void *data, zpp_dtype dtype) {
    const size_t bytes = zpp_dtype_bytes(dtype), end = piece->begin + piece->elems;
    size_t gap = piece->begin;
    for (size_t i = 0; i <= unit->params; i++) {
        const size_t next = i < unit->params && unit->offset_elems[i] < end ? unit->offset_elems[i] : end;
        const unsigned char *from = (const unsigned char *)data + (gap - piece->begin) * bytes;
        if (next > gap && any_nonfinite(from, dtype, next - gap)) return true;
        if (next == end) break;
        const size_t after = unit->offset_elems[i] + unit->param_elems[i];
        if (after > gap) gap = after < end ? after : end;
    }
    return false;
}

/* Every source that is not finite makes the sum so, which the sum itself reports; only then are sources looked at. The
 * one that the sum overwrites is reported with it, but with the gaps between parameters: `look_first` where those are
 * not finite, so that this source has to be looked at before. */
static uint64_t add_piece(const struct zpp_unit *unit, const struct zpp_sources *sources, const struct piece *piece,
                          const void **data, void *to, bool look_first) {
    const bool looked = look_first && params_nonfinite(unit, piece, to, unit->wire_dtype);
    const struct zpp_sum_seen seen =
        zpp_reduce_sources(to, unit->grad_dtype, sources->accumulate, data, sources->count, unit->wire_dtype,
                           piece->elems, sources->factor);
    uint64_t found = 0;
    for (int i = 0; seen.nonfinite && i < sources->count; i++) {
        const bool replaced = look_first ? looked : seen.replaced_nonfinite;
        if (data[i] == to ? replaced : params_nonfinite(unit, piece, data[i], unit->wire_dtype))
            found |= zpp_origin_bit(sources->from[i]);
    }
    return found;
}

/* Quantised copies are opened one by one where their sum is not finite; without memory for that no rank is named. */
static uint64_t add_qcopies(zpp_zero *zero, const struct zpp_unit *unit, const struct zpp_sources *sources, void *to) {
    const size_t elems = unit->shard_elems;
    const struct piece shard = { .begin = (size_t)unit->group->rank * elems, .elems = elems };
    uint64_t found = 0;
    zpp_wire_add(zero, sources->data, sources->count, (float)sources->factor, to, unit->grad_dtype, sources->accumulate,
                 elems);
    if (!piece_nonfinite(unit, &shard, to, unit->grad_dtype)) return 0;
    float *opened = malloc(elems * sizeof *opened);
    for (int i = 0; opened && i < sources->count; i++) {
        zpp_wire_add(zero, &sources->data[i], 1, 1.0f, opened, ZPP_F32, false, elems);
        if (piece_nonfinite(unit, &shard, opened, ZPP_F32)) found |= zpp_origin_bit(sources->from[i]);
    }
    free(opened);
    return found;
}

/* True if the sum overwrites one of its sources, and that has an infinite value or NaN between parameters. */
static bool replaces_gaps(const struct zpp_unit *unit, const struct zpp_sources *sources, const struct piece *shard,
                          const void *to) {
    bool replaces = false;
    for (int i = 0; i < sources->count; i++) replaces |= sources->data[i] == to;
    return replaces && gaps_nonfinite(unit, shard, to, unit->wire_dtype);
}

uint64_t zpp_origin_add(zpp_zero *zero, const struct zpp_unit *unit, const struct zpp_sources *sources, void *to) {
    if (zpp_wire_quantises_grads(zero)) return add_qcopies(zero, unit, sources, to);
    const size_t to_bytes = zpp_dtype_bytes(unit->grad_dtype), from_bytes = zpp_dtype_bytes(unit->wire_dtype);
    const struct piece shard = { .begin = (size_t)unit->group->rank * unit->shard_elems,
                                 .elems = unit->shard_elems };
    const bool look_first = replaces_gaps(unit, sources, &shard, to);
    uint64_t found = 0;
    for (size_t at = 0; at < shard.elems; at += PIECE_ELEMS) {
        const void *data[ZPP_RANKS_MAX];
        const size_t left = shard.elems - at;
        const struct piece piece = { .begin = shard.begin + at, .elems = left < PIECE_ELEMS ? left : PIECE_ELEMS };
        for (int i = 0; i < sources->count; i++)
            data[i] = (const unsigned char *)sources->data[i] + at * from_bytes;
        found |= add_piece(unit, sources, &piece, data, (unsigned char *)to + at * to_bytes, look_first);
    }
    return found;
}

/* Stage 0: a second backward adds to the sum, which all ranks have, so what it finds is known already. */
void zpp_origin_note(const zpp_zero *zero, struct zpp_unit_grad *grad, uint64_t origins) {
    if (!grad->has) grad->origins = origins;
    else if (zero->options.stage > 0 || !grad->origins) grad->origins |= origins;
}

uint64_t zpp_zero_origins(const zpp_zero *zero, int unit) {
    const struct zpp_unit_grad *grad = zero->units[unit]->grad;
    if (zero->ranks == 1) return zpp_origin_bit(0);
    return grad ? grad->origins : 0;
}
