/* SPDX-License-Identifier: Apache-2.0
 *
 * Shard arithmetic. See unit.h for the picture.
 */
#include "unit.h"

enum { PARAM_ALIGN_BYTES = 64, LARGE_SHARD_BYTES = 256 * 1024, LARGE_SHARD_ALIGN_BYTES = 4096 };

static size_t round_up(size_t value, size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

void zpp_unit_layout(size_t params, const size_t *param_elems, size_t elem_bytes, int ranks, size_t *offset_elems,
                     size_t *elems, size_t *shard_elems) {
    const size_t param_align_elems = PARAM_ALIGN_BYTES / elem_bytes;
    size_t used_elems = 0;
    for (size_t i = 0; i < params; i++) {
        offset_elems[i] = used_elems;
        used_elems += round_up(param_elems[i], param_align_elems);
    }
    size_t shard_bytes = round_up(used_elems * elem_bytes, (size_t)ranks) / (size_t)ranks;
    if (shard_bytes == 0) shard_bytes = 1;
    shard_bytes = round_up(shard_bytes, shard_bytes < LARGE_SHARD_BYTES ? PARAM_ALIGN_BYTES : LARGE_SHARD_ALIGN_BYTES);
    *shard_elems = shard_bytes / elem_bytes;
    *elems = *shard_elems * (size_t)ranks;
}

size_t zpp_unit_pieces(const struct zpp_unit *unit, int rank, struct zpp_piece *pieces) {
    const size_t begin = (size_t)rank * unit->shard_elems, end = begin + unit->shard_elems;
    size_t count = 0;
    for (size_t i = 0; i < unit->params; i++) {
        size_t from = unit->offset_elems[i], to = from + unit->param_elems[i];
        if (from < begin) from = begin;
        if (to > end) to = end;
        if (from >= to) continue;
        pieces[count++] = (struct zpp_piece){ .param = i, .offset_elems = from, .elems = to - from };
    }
    return count;
}

size_t zpp_unit_bytes(const struct zpp_unit *unit) {
    return unit->elems * unit->elem_bytes;
}

size_t zpp_unit_shard_bytes(const struct zpp_unit *unit) {
    return unit->shard_elems * unit->elem_bytes;
}
