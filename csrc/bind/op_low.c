/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks of op_low.h.
 */
#include "op_low.h"

#include <stdio.h>

#include "op_checks.h"

enum { LABEL_BYTES = 64, OF_BYTES = 96 };

unsigned zpp_op_low_dtypes(struct zpp_op_low *low, const struct zpp_tensors *codes) {
    const zpp_dtype first = codes->count ? codes->at[0].dtype : ZPP_BF16;
    low->kind = first == ZPP_U8 ? ZPP_MOMENTS_INT8 : ZPP_MOMENTS_BF16;
    return first == ZPP_U8 || first == ZPP_BF16 ? 1u << first : 1u << ZPP_BF16 | 1u << ZPP_U8;
}

int64_t zpp_op_low_place(const struct zpp_op_low *low, size_t param, int which) {
    return low->places ? low->places->at[param * ZPP_OP_LOW_PLACE + (size_t)which] : 0;
}

bool zpp_op_low_check_scales(struct zpp_boxed *args, const struct zpp_op_low *low, const struct zpp_tensors *params,
                             size_t moments) {
    const size_t wanted = low->kind == ZPP_MOMENTS_INT8 ? moments * params->count : 0;
    if (!zpp_boxed_ok(args)) return false;
    if (low->scales->count != wanted) {
        return zpp_boxed_fail(args, "scales has %zu tensors, wanted %zu: %s", low->scales->count, wanted,
                              wanted ? "one for each moment of each parameter" : "bf16 has none");
    }
    for (size_t i = 0; i < wanted; ++i) {
        char label[LABEL_BYTES], of[OF_BYTES];
        const size_t elems = params->at[i % params->count].elems;
        const size_t first = (size_t)zpp_op_low_place(low, i % params->count, ZPP_OP_LOW_FIRST);
        snprintf(label, sizeof label, "scales[%zu]", i);
        snprintf(of, sizeof of, "%zu elements from %zu on in blocks of %d", elems, first,
                 (int)ZPP_MOMENTS_BLOCK_ELEMS);
        if (!zpp_op_check_elems(args, label, &low->scales->at[i], 1u << ZPP_F32, zpp_moments_scales(first, elems),
                                of)) return false;
    }
    return true;
}

bool zpp_op_low_check_places(struct zpp_boxed *args, const struct zpp_op_low *low, const struct zpp_tensors *params) {
    static const char *const names[] = { "steps", "streams", "firsts" };
    if (!zpp_boxed_ok(args)) return false;
    if (low->places->count != ZPP_OP_LOW_PLACE * params->count) {
        return zpp_boxed_fail(args, "places has %zu numbers, wanted %zu: step, stream and first of each of params",
                              low->places->count, ZPP_OP_LOW_PLACE * params->count);
    }
    for (size_t i = 0; i < low->places->count; ++i) {
        const size_t which = i % ZPP_OP_LOW_PLACE;
        if (low->places->at[i] >= (which == ZPP_OP_LOW_STEP)) continue;
        return zpp_boxed_fail(args, "%s[%zu] is %lld, wanted %s", names[which], i / ZPP_OP_LOW_PLACE,
                              (long long)low->places->at[i],
                              which == ZPP_OP_LOW_STEP ? "the number of this update, counted from 1" : "at least 0");
    }
    return true;
}

struct zpp_moments zpp_op_low_how(const struct zpp_op_low *low, size_t param) {
    return (struct zpp_moments){
        .kind = low->kind, .first_elems = (size_t)zpp_op_low_place(low, param, ZPP_OP_LOW_FIRST),
        .key = zpp_moments_key(low->seed, (uint64_t)zpp_op_low_place(low, param, ZPP_OP_LOW_STREAM),
                               (uint64_t)zpp_op_low_place(low, param, ZPP_OP_LOW_STEP)) };
}
