/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums of floating point arrays, plain version: the meaning of the reduction. See reduce.h.
 */
#include <string.h>

#include "reduce.h"

static float sum_at(const void *const *src, int sources, size_t i) {
    float sum = ((const float *)src[0])[i];
    for (int r = 1; r < sources; r++) sum += ((const float *)src[r])[i];
    return sum;
}

static void sum_f32(float *dst, bool accumulate, const void *const *src, int sources, size_t elems, float scale,
                    bool stream) {
    (void)stream;
    for (size_t i = 0; i < elems; i++) {
        const float value = sum_at(src, sources, i) * scale;
        dst[i] = accumulate ? dst[i] + value : value;
    }
}

typedef float (*widen_fn)(uint16_t bits);
typedef uint16_t (*narrow_fn)(float value);

static inline void sum_16(void *dst, bool wide, bool accumulate, const void *const *src, int sources, size_t elems,
                          float scale, widen_fn widen, narrow_fn narrow) {
    for (size_t i = 0; i < elems; i++) {
        float sum = widen(((const uint16_t *)src[0])[i]);
        for (int r = 1; r < sources; r++) sum += widen(((const uint16_t *)src[r])[i]);
        sum *= scale;
        if (wide)
            ((float *)dst)[i] = accumulate ? ((const float *)dst)[i] + sum : sum;
        else
            ((uint16_t *)dst)[i] = narrow(accumulate ? widen(((const uint16_t *)dst)[i]) + sum : sum);
    }
}

static void sum_bf16(void *dst, bool wide, bool accumulate, const void *const *src, int sources, size_t elems,
                     float scale) {
    sum_16(dst, wide, accumulate, src, sources, elems, scale, zpp_bf16_to_f32, zpp_bf16_from_f32);
}

static void sum_f16(void *dst, bool wide, bool accumulate, const void *const *src, int sources, size_t elems,
                    float scale) {
    sum_16(dst, wide, accumulate, src, sources, elems, scale, zpp_f16_to_f32, zpp_f16_from_f32);
}

static void copy(void *dst, const void *src, size_t bytes) { memcpy(dst, src, bytes); }

const struct zpp_sum_kernels zpp_sum_scalar = {sum_f32, sum_bf16, sum_f16, copy};
