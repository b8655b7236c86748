/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of gates and rows: first in plain C, which is their meaning on CPU, then sixteen lanes at once,
 * operation by operation in the same order.
 */
#include "kernels.h"

#include "../element.h"
#include "../exp.h"
#include "../round.h"

/* Elements [begin, end) one by one. */
static void combine_elements(void *out, const void *const *rows, const float *weights, size_t count, size_t begin,
                             size_t end, zpp_dtype dtype) {
    for (size_t i = begin; i < end; ++i) {
        float total = 0.0f;
        for (size_t j = 0; j < count; ++j) {
            const float value = zpp_element_load(rows[j], dtype, i);
            const float part = weights ? ZPP_MUL(weights[j], value) : value;
            total = j ? ZPP_ADD(total, part) : part;
        }
        zpp_element_store(out, dtype, i, total);
    }
}

/* s = 1 / (1 + e^-g): the sigmoid of SwiGLU (moe.h). */
static float sigmoid_of(float g) { return ZPP_DIV(1.0f, ZPP_ADD(1.0f, zpp_exp(ZPP_SUB(0.0f, g)))); }

static void swiglu_elements(void *out, const void *gate, const void *up, size_t begin, size_t end, zpp_dtype dtype) {
    for (size_t i = begin; i < end; ++i) {
        const float g = zpp_element_load(gate, dtype, i);
        zpp_element_store(out, dtype, i, ZPP_MUL(ZPP_MUL(g, sigmoid_of(g)), zpp_element_load(up, dtype, i)));
    }
}

static void swiglu_backward_elements(const struct zpp_moe_swiglu_row *row, size_t begin, size_t end, zpp_dtype dtype) {
    for (size_t i = begin; i < end; ++i) {
        const float g = zpp_element_load(row->gate, dtype, i), u = zpp_element_load(row->up, dtype, i);
        const float grad = zpp_element_load(row->grad, dtype, i), s = sigmoid_of(g), silu = ZPP_MUL(g, s);
        const float slope = ZPP_ADD(s, ZPP_MUL(silu, ZPP_SUB(1.0f, s)));
        zpp_element_store(row->out, dtype, i, ZPP_MUL(silu, u));
        zpp_element_store(row->grad_gate, dtype, i, ZPP_MUL(ZPP_MUL(grad, u), slope));
        zpp_element_store(row->grad_up, dtype, i, ZPP_MUL(grad, silu));
    }
}

#if ZPP_LANES == 1

#include <assert.h>
#include <math.h>
#include <string.h>

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
    combine_elements(out, rows, weights, count, 0, elems, dtype);
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

static void swiglu(void *out, const void *gate, const void *up, size_t elems, zpp_dtype dtype) {
    swiglu_elements(out, gate, up, 0, elems, dtype);
}

static void swiglu_backward(const struct zpp_moe_swiglu_row *row, size_t elems, zpp_dtype dtype) {
    swiglu_backward_elements(row, 0, elems, dtype);
}

#else

#include <assert.h>
#include <math.h>
#include <string.h>

#include "../copy_vec16.h"
#include "../exp_vec16.h"
#include "../vec16.h"

V16_FN v16 greatest_lanes(const float *from, size_t elems) {
    const v16 none = v16_set1(-INFINITY);
    v16 most = v16_load_first(from, elems, none);
    for (size_t i = V16_LANES; i < elems; i += V16_LANES) {
        most = v16_max(most, v16_load_first(from + i, elems - i, none));
    }
    return v16_max_tree(most);
}

static struct zpp_moe_row_sums scores_of(const float *logits, size_t experts, bool sigmoid, float *scores) {
    const v16 one = v16_set1(1.0f), zero = v16_set1(0.0f);
    const float max = sigmoid ? 0.0f : v16_lane0(greatest_lanes(logits, experts));
    v16 total = zero;
    for (size_t e = 0; e < experts; e += V16_LANES) {
        const v16 x = v16_load_first(logits + e, experts - e, zero);
        const v16 value = sigmoid ? v16_div(one, v16_add(one, v16_exp(v16_sub(zero, x))))
                                  : v16_exp(v16_sub(x, v16_set1(max)));
        const v16 score = v16_first(value, experts - e);
        total = v16_add(total, score);
        v16_store(scores + e, score);
    }
    const struct zpp_moe_row_sums sums = { max, v16_lane0(v16_add_tree(total)) };
    if (sigmoid) return sums;
    for (size_t e = 0; e < experts; e += V16_LANES) { /* beyond the end 0 / NaN is none, so zeroed again */
        v16_store(scores + e, v16_first(v16_div(v16_load(scores + e), v16_set1(sums.sum)), experts - e));
    }
    return sums;
}

/* The first that equals `best`, which is one of them. */
V16_FN size_t first_equal(const float *from, v16 best) {
    for (size_t i = 0;; i += V16_LANES) {
        const uint16_t equal = v16_equal(v16_load(from + i), best);
        if (equal) return i + (size_t)__builtin_ctz(equal);
    }
}

/* Lanes beyond the end are as little as a candidate can be, and come after all of them: no tie is theirs. */
static void choose(const float *by, size_t experts, size_t k, float *work, int32_t *chosen) {
    const v16 least = v16_set1(ZPP_MOE_LEAST);
    v16 most = least;
    for (size_t e = 0; e < experts; e += V16_LANES) {
        const v16 candidates = v16_max(v16_load_first(by + e, experts - e, least), least); /* NaN: the second */
        v16_store(work + e, candidates);
        most = v16_max(most, candidates);
    }
    for (size_t j = 0;;) {
        const size_t best = first_equal(work, v16_set1(v16_greatest(most)));
        chosen[j] = (int32_t)best;
        if (++j == k) break;
        /* A store of one lane would keep the loads of all of them waiting. */
        float *around = work + best / V16_LANES * V16_LANES;
        v16_store(around, v16_without(v16_load(around), best % V16_LANES));
        most = v16_load(work);
        for (size_t e = V16_LANES; e < experts; e += V16_LANES) most = v16_max(most, v16_load(work + e));
    }
}

static void add(float *to, const float *from, float by, size_t experts) {
    for (size_t e = 0; e < experts; e += V16_LANES) {
        v16_store(to + e, v16_add(v16_load(to + e), v16_mul(v16_load(from + e), v16_set1(by))));
    }
}

/* Elements before `to` is aligned for streamed stores of sixteen. */
static size_t head_elems(const void *to, zpp_dtype dtype, size_t elems) {
    const size_t head = ((0 - (uintptr_t)to) & 63u) / zpp_dtype_bytes(dtype);
    return head < elems ? head : elems;
}

V16_FN v16 combined(const void *const *rows, const float *weights, size_t count, size_t i, const zpp_dtype dtype,
                    const bool weighted) {
    v16 total = v16_load_as(rows[0], i, dtype);
    if (weighted) total = v16_mul(v16_set1(weights[0]), total);
    for (size_t j = 1; j < count; ++j) {
        const v16 value = v16_load_as(rows[j], i, dtype);
        total = v16_add(total, weighted ? v16_mul(v16_set1(weights[j]), value) : value);
    }
    return total;
}

V16_FN size_t combine_turns(void *out, const void *const *rows, const float *weights, size_t count, size_t begin,
                            size_t elems, const zpp_dtype dtype, const bool weighted, const bool stream) {
    size_t i = begin;
    for (; i + V16_LANES <= elems; i += V16_LANES) {
        const v16 total = combined(rows, weights, count, i, dtype, weighted);
        if (stream) v16_stream_as(out, i, dtype, total);
        else v16_store_as(out, i, dtype, total);
    }
    return i;
}

V16_FN size_t combine_some(void *out, const void *const *rows, const float *weights, size_t count, size_t begin,
                           size_t elems, const zpp_dtype dtype, const bool stream) {
    if (!weights) return combine_turns(out, rows, weights, count, begin, elems, dtype, false, stream);
    switch (count) { /* constants, so that rows and weights stay in registers */
    case 1: return combine_turns(out, rows, weights, 1, begin, elems, dtype, true, stream);
    case 2: return combine_turns(out, rows, weights, 2, begin, elems, dtype, true, stream);
    default: return combine_turns(out, rows, weights, count, begin, elems, dtype, true, stream);
    }
}

/* Streaming wants an address that whole elements can align: one that elements do not divide is stored plainly. */
static void combine(void *out, const void *const *rows, const float *weights, size_t count, size_t elems,
                    zpp_dtype dtype, bool stream) {
    assert(count >= 1);
    stream = stream && (uintptr_t)out % zpp_dtype_bytes(dtype) == 0;
    const size_t head = stream ? head_elems(out, dtype, elems) : 0;
    size_t done;
    combine_elements(out, rows, weights, count, 0, head, dtype);
#define COMBINE(dtype) \
    (stream ? combine_some(out, rows, weights, count, head, elems, dtype, true) \
            : combine_some(out, rows, weights, count, head, elems, dtype, false))
    switch (dtype) {
    case ZPP_BF16: done = COMBINE(ZPP_BF16); break;
    case ZPP_F16: done = COMBINE(ZPP_F16); break;
    default: done = COMBINE(ZPP_F32); break;
    }
#undef COMBINE
    combine_elements(out, rows, weights, count, done, elems, dtype);
}

static void scale(void *out, const void *row, float weight, size_t elems, zpp_dtype dtype, bool stream) {
    combine(out, &row, &weight, 1, elems, dtype, stream);
}

V16_FN float dot_as(const void *a, const void *b, size_t elems, const zpp_dtype dtype) {
    v16 total = v16_set1(0.0f);
    size_t i = 0;
    for (; i + V16_LANES <= elems; i += V16_LANES) {
        total = v16_add(total, v16_mul(v16_load_as(a, i, dtype), v16_load_as(b, i, dtype)));
    }
    float lanes[V16_LANES];
    v16_store(lanes, total);
    for (size_t l = 0; i + l < elems; ++l) {
        lanes[l] += ZPP_MUL(zpp_element_load(a, dtype, i + l), zpp_element_load(b, dtype, i + l));
    }
    return zpp_moe_lanes_sum(lanes);
}

static float dot(const void *a, const void *b, size_t elems, zpp_dtype dtype) {
    switch (dtype) {
    case ZPP_BF16: return dot_as(a, b, elems, ZPP_BF16);
    case ZPP_F16: return dot_as(a, b, elems, ZPP_F16);
    default: return dot_as(a, b, elems, ZPP_F32);
    }
}

static void copy(void *to, const void *from, size_t bytes, bool stream) { v16_copy(to, from, bytes, stream); }

V16_FN v16 sigmoid16(v16 g) {
    const v16 one = v16_set1(1.0f);
    return v16_div(one, v16_add(one, v16_exp(v16_sub(v16_set1(0.0f), g))));
}

V16_FN size_t swiglu_as(void *out, const void *gate, const void *up, size_t elems, const zpp_dtype dtype) {
    size_t i = 0;
    for (; i + V16_LANES <= elems; i += V16_LANES) {
        const v16 g = v16_load_as(gate, i, dtype);
        v16_store_as(out, i, dtype, v16_mul(v16_mul(g, sigmoid16(g)), v16_load_as(up, i, dtype)));
    }
    return i;
}

V16_FN size_t swiglu_backward_as(const struct zpp_moe_swiglu_row *row, size_t elems, const zpp_dtype dtype) {
    size_t i = 0;
    for (; i + V16_LANES <= elems; i += V16_LANES) {
        const v16 g = v16_load_as(row->gate, i, dtype), u = v16_load_as(row->up, i, dtype);
        const v16 grad = v16_load_as(row->grad, i, dtype), s = sigmoid16(g), silu = v16_mul(g, s);
        const v16 slope = v16_add(s, v16_mul(silu, v16_sub(v16_set1(1.0f), s)));
        v16_store_as(row->out, i, dtype, v16_mul(silu, u));
        v16_store_as(row->grad_gate, i, dtype, v16_mul(v16_mul(grad, u), slope));
        v16_store_as(row->grad_up, i, dtype, v16_mul(grad, silu));
    }
    return i;
}

static void swiglu(void *out, const void *gate, const void *up, size_t elems, zpp_dtype dtype) {
    size_t done;
    switch (dtype) {
    case ZPP_BF16: done = swiglu_as(out, gate, up, elems, ZPP_BF16); break;
    case ZPP_F16: done = swiglu_as(out, gate, up, elems, ZPP_F16); break;
    default: done = swiglu_as(out, gate, up, elems, ZPP_F32); break;
    }
    swiglu_elements(out, gate, up, done, elems, dtype);
}

static void swiglu_backward(const struct zpp_moe_swiglu_row *row, size_t elems, zpp_dtype dtype) {
    size_t done;
    switch (dtype) {
    case ZPP_BF16: done = swiglu_backward_as(row, elems, ZPP_BF16); break;
    case ZPP_F16: done = swiglu_backward_as(row, elems, ZPP_F16); break;
    default: done = swiglu_backward_as(row, elems, ZPP_F32); break;
    }
    swiglu_backward_elements(row, done, elems, dtype);
}

#endif

const struct zpp_moe_kernels ZPP_ISA_NAME(zpp_moe) = { scores_of, choose, add, combine, scale,
                                                         dot, copy, swiglu, swiglu_backward };
