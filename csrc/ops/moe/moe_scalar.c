/* SPDX-License-Identifier: Apache-2.0
 *
 * The MoE kernels in plain C: their meaning on CPU.
 */
#include "kernels.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "../element.h"
#include "../exp.h"

static float greatest(const float *from, size_t elems) {
    float lanes[ZPP_MOE_LANES];
    for (size_t l = 0; l < ZPP_MOE_LANES; ++l) lanes[l] = l < elems ? from[l] : -INFINITY;
    for (size_t i = ZPP_MOE_LANES; i < zpp_moe_padded(elems); ++i) {
        lanes[i % ZPP_MOE_LANES] = zpp_moe_max(lanes[i % ZPP_MOE_LANES], i < elems ? from[i] : -INFINITY);
    }
    return zpp_moe_lanes_max(lanes);
}

static float sum(const float *from, size_t padded) {
    float lanes[ZPP_MOE_LANES] = { 0 };
    for (size_t i = 0; i < padded; ++i) lanes[i % ZPP_MOE_LANES] += from[i];
    return zpp_moe_lanes_sum(lanes);
}

static struct zpp_moe_row_sums scores_of(const float *logits, size_t experts, bool sigmoid, float *scores) {
    const size_t padded = zpp_moe_padded(experts);
    struct zpp_moe_row_sums sums = { sigmoid ? 0.0f : greatest(logits, experts), 0.0f };
    for (size_t e = 0; e < experts; ++e) {
        if (sigmoid) scores[e] = ZPP_DIV(1.0f, ZPP_ADD(1.0f, zpp_exp(ZPP_SUB(0.0f, logits[e]))));
        else scores[e] = zpp_exp(ZPP_SUB(logits[e], sums.max));
    }
    for (size_t e = experts; e < padded; ++e) scores[e] = 0.0f;
    sums.sum = sum(scores, padded);
    for (size_t e = 0; e < experts && !sigmoid; ++e) scores[e] = ZPP_DIV(scores[e], sums.sum);
    return sums;
}

/* What was taken becomes -inf, below every candidate. */
static void choose(const float *by, size_t experts, size_t k, float *work, int32_t *chosen) {
    for (size_t e = 0; e < experts; ++e) work[e] = zpp_moe_max(by[e], ZPP_MOE_LEAST);
    for (size_t j = 0; j < k; ++j) {
        size_t best = 0;
        for (size_t e = 1; e < experts; ++e) best = work[e] > work[best] ? e : best;
        chosen[j] = (int32_t)best;
        work[best] = -INFINITY;
    }
}

static void add(float *to, const float *from, float by, size_t experts) {
    for (size_t e = 0; e < experts; ++e) to[e] = ZPP_ADD(to[e], ZPP_MUL(from[e], by));
}

static void combine(void *out, const void *const *rows, const float *weights, size_t count, size_t elems,
                    zpp_dtype dtype, bool stream) {
    (void)stream;
    assert(count >= 1);
    for (size_t i = 0; i < elems; ++i) {
        float total = 0.0f;
        for (size_t j = 0; j < count; ++j) {
            const float value = zpp_element_load(rows[j], dtype, i);
            const float part = weights ? ZPP_MUL(weights[j], value) : value;
            total = j ? ZPP_ADD(total, part) : part;
        }
        zpp_element_store(out, dtype, i, total);
    }
}

static void scale(void *out, const void *row, float weight, size_t elems, zpp_dtype dtype, bool stream) {
    (void)stream;
    for (size_t i = 0; i < elems; ++i) {
        zpp_element_store(out, dtype, i, ZPP_MUL(weight, zpp_element_load(row, dtype, i)));
    }
}

static float dot(const void *a, const void *b, size_t elems, zpp_dtype dtype) {
    float lanes[ZPP_MOE_LANES] = { 0 };
    for (size_t i = 0; i < elems; ++i) {
        lanes[i % ZPP_MOE_LANES] += ZPP_MUL(zpp_element_load(a, dtype, i), zpp_element_load(b, dtype, i));
    }
    return zpp_moe_lanes_sum(lanes);
}

static void copy(void *to, const void *from, size_t bytes, bool stream) {
    (void)stream;
    memcpy(to, from, bytes);
}

const struct zpp_moe_kernels zpp_moe_scalar = { scores_of, choose, add, combine, scale, dot, copy };
