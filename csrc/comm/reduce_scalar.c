/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums of floating point arrays in plain C, which define the result of the reduction. See reduce.h.
 */
#include <string.h>

#include "reduce.h"

static uint32_t magnitude(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits & ZPP_SUM_MAGNITUDE;
}

static void keep_largest(uint32_t *largest, float value) {
    if (magnitude(value) > *largest) *largest = magnitude(value);
}

static float sum_at(const struct zpp_sum *sum, size_t i) {
    float total = ((const float *)sum->src[0])[i];
    for (int r = 1; r < sum->sources; r++) total += ((const float *)sum->src[r])[i];
    return total * sum->scale;
}

static struct zpp_sum_seen sum_f32(const struct zpp_sum *sum, size_t elems) {
    float *dst = sum->dst;
    uint32_t largest = 0, replaced = 0;
    for (size_t i = 0; i < elems; i++) {
        float value = sum_at(sum, i);
        if (sum->accumulate) value = dst[i] + value;
        if (sum->report && sum->replaces) keep_largest(&replaced, dst[i]);
        if (sum->report) keep_largest(&largest, value);
        dst[i] = value;
    }
    return zpp_sum_seen(largest, replaced);
}

typedef float (*widen_fn)(uint16_t bits);
typedef uint16_t (*narrow_fn)(float value);

static inline float sum_16_at(const struct zpp_sum *sum, size_t i, widen_fn widen) {
    float total = widen(((const uint16_t *)sum->src[0])[i]);
    for (int r = 1; r < sum->sources; r++) total += widen(((const uint16_t *)sum->src[r])[i]);
    return total * sum->scale;
}

static inline struct zpp_sum_seen sum_16(const struct zpp_sum *sum, size_t elems, widen_fn widen, narrow_fn narrow) {
    float *wide = sum->dst;
    uint16_t *same = sum->dst;
    uint32_t largest = 0, replaced = 0;
    for (size_t i = 0; i < elems; i++) {
        float value = sum_16_at(sum, i, widen);
        if (sum->accumulate) value = (sum->wide ? wide[i] : widen(same[i])) + value;
        if (sum->report && sum->replaces) keep_largest(&replaced, widen(same[i]));
        if (sum->report) keep_largest(&largest, value);
        if (sum->wide)
            wide[i] = value;
        else
            same[i] = narrow(value);
    }
    return zpp_sum_seen(largest, replaced);
}

static struct zpp_sum_seen sum_bf16(const struct zpp_sum *sum, size_t elems) {
    return sum_16(sum, elems, zpp_bf16_to_f32, zpp_bf16_from_f32);
}

static struct zpp_sum_seen sum_f16(const struct zpp_sum *sum, size_t elems) {
    return sum_16(sum, elems, zpp_f16_to_f32, zpp_f16_from_f32);
}

static void copy(void *dst, const void *src, size_t bytes) { memcpy(dst, src, bytes); }

const struct zpp_sum_kernels zpp_sum_scalar = {sum_f32, sum_bf16, sum_f16, copy};
