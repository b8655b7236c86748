/* SPDX-License-Identifier: Apache-2.0
 *
 * The loops over one segment, of every optimizer, compiled once for each instruction set. The arithmetic is that of the
 * optimizers' headers, on one element in the scalar build and on sixteen in the others.
 *
 * A turn of a vector loop takes 32 elements: one whole cache line of a 16-bit copy-out, which is written past the cache
 * (it is not read before the next forward, and a plain store would first read the line). The dtypes of gradient and
 * copy-out are constants of each instance of turns(), so the loop has no branch on them. The pass is bound by memory:
 * docs/design/0002-adam-streams.md says what was tried (prefetch, tiles, wider turns) and what it gave.
 */
#include "optim_kernels.h"

#include "../element.h"
#include "../streamed.h"

typedef lanes (*update_fn)(const union zpp_optim_consts *consts, lanes g, lanes p, lanes *x, const uint32_t options);

#define ZPP_OPTIMIZER(NAME, name, first, states, written, usual, varies) \
    LANES_FN lanes update_##name(const union zpp_optim_consts *consts, lanes g, lanes p, lanes *x,                   \
                                 const uint32_t options) {                                                           \
        return zpp_##name##_update(&consts->name, g, p, x, options);                                                 \
    }
#include "optimizers.def"
#undef ZPP_OPTIMIZER

#if ZPP_LANES == 1

LANES_FN void walk(const struct zpp_optim_segment *s, const union zpp_optim_consts *consts, size_t begin, size_t end,
                   const update_fn update, const struct zpp_optim_shape shape, const uint32_t usual,
                   const bool varies) {
    float *const *state = s->state + shape.first;
    const uint32_t options = consts->options;
    (void)usual;
    (void)varies;
    for (size_t i = begin; i < end; ++i) {
        lanes x[ZPP_OPTIM_STATES];
        for (int k = 0; k < shape.states; ++k) x[k] = options >> k & 1 ? state[k][i] : 0.0f;
        const float g = s->grad ? zpp_element_load(s->grad, s->grad_dtype, i) : 0.0f;
        s->param[i] = update(consts, g, s->param[i], x, options);
        for (int k = 0; k < shape.states; ++k) if (options & shape.written & 1u << k) state[k][i] = x[k];
        if (s->param_out) zpp_element_store(s->param_out, s->out_dtype, i, s->param[i]);
    }
}

#else

enum { TURN_ELEMS = 2 * V16_LANES, STREAM_ELEMS = 1024 };
#define NONE ZPP_DTYPES /* no dtype: there is no gradient, or nothing is copied out */

/* Sixteen elements at i; the new parameters. */
LANES_FN lanes sixteen(const struct zpp_optim_segment *s, const union zpp_optim_consts *consts, size_t i,
                       const update_fn update, const struct zpp_optim_shape shape, const uint32_t options,
                       const zpp_dtype grad_dtype) {
    float *const *state = s->state + shape.first;
    lanes x[ZPP_OPTIM_STATES];
    for (int k = 0; k < shape.states; ++k) x[k] = options >> k & 1 ? v16_load(state[k] + i) : v16_set1(0.0f);
    const lanes g = grad_dtype == NONE ? v16_set1(0.0f) : v16_load_as(s->grad, i, grad_dtype);
    const lanes p = update(consts, g, v16_load(s->param + i), x, options);
    for (int k = 0; k < shape.states; ++k) if (options & shape.written & 1u << k) v16_store(state[k] + i, x[k]);
    v16_store(s->param + i, p);
    return p;
}

/* Whole turns from begin; where they end. `stream`: copy out past the cache; param_out + begin is aligned to a line. */
LANES_FN size_t turns(const struct zpp_optim_segment *segment, const union zpp_optim_consts *consts_at, size_t begin,
                      size_t end, const update_fn update, const struct zpp_optim_shape shape, const uint32_t options,
                      const bool stream, const zpp_dtype grad_dtype, const zpp_dtype out_dtype) {
    const struct zpp_optim_segment s = *segment; /* copies: the compiler may not assume that stores leave them alone */
    const union zpp_optim_consts consts = *consts_at;
    size_t i = begin;
    for (; i + TURN_ELEMS <= end; i += TURN_ELEMS) {
        const lanes low = sixteen(&s, &consts, i, update, shape, options, grad_dtype);
        const lanes high = sixteen(&s, &consts, i + V16_LANES, update, shape, options, grad_dtype);
        if (out_dtype == NONE) continue;
        if (stream) {
            v16_stream_pair_as(s.param_out, i, out_dtype, low, high);
        } else {
            v16_store_as(s.param_out, i, out_dtype, low);
            v16_store_as(s.param_out, i + V16_LANES, out_dtype, high);
        }
    }
    if (out_dtype != NONE && stream) zpp_streamed();
    return i;
}

LANES_FN size_t turns_out(const struct zpp_optim_segment *s, const union zpp_optim_consts *consts, size_t begin,
                          size_t end, const update_fn update, const struct zpp_optim_shape shape,
                          const uint32_t options, const bool stream, const zpp_dtype grad_dtype) {
    switch (s->param_out ? s->out_dtype : NONE) {
    case ZPP_F32: return turns(s, consts, begin, end, update, shape, options, stream, grad_dtype, ZPP_F32);
    case ZPP_BF16: return turns(s, consts, begin, end, update, shape, options, stream, grad_dtype, ZPP_BF16);
    case ZPP_F16: return turns(s, consts, begin, end, update, shape, options, stream, grad_dtype, ZPP_F16);
    default: return turns(s, consts, begin, end, update, shape, options, stream, grad_dtype, NONE);
    }
}

LANES_FN size_t all_turns(const struct zpp_optim_segment *s, const union zpp_optim_consts *consts, size_t begin,
                          size_t end, const update_fn update, const struct zpp_optim_shape shape,
                          const uint32_t options, const bool stream) {
    if (shape.written == 0) return turns_out(s, consts, begin, end, update, shape, options, stream, NONE);
    switch (s->grad_dtype) {
    case ZPP_BF16: return turns_out(s, consts, begin, end, update, shape, options, stream, ZPP_BF16);
    case ZPP_F16: return turns_out(s, consts, begin, end, update, shape, options, stream, ZPP_F16);
    default: return turns_out(s, consts, begin, end, update, shape, options, stream, ZPP_F32);
    }
}

/* The ends, which are no whole turn, are left to the scalar build. */
LANES_FN void walk(const struct zpp_optim_segment *s, const union zpp_optim_consts *consts, size_t begin, size_t end,
                   const update_fn update, const struct zpp_optim_shape shape, const uint32_t usual,
                   const bool varies) {
    const zpp_optim_kernel one_by_one = zpp_optim_scalar.step[s->optimizer];
    /* A short piece is copied out through the cache, from any address: its head would cost more than is saved. */
    const bool stream = s->param_out && end - begin >= STREAM_ELEMS;
    const size_t first = stream ? begin + v16_elems_to_line(s->param_out, begin, s->out_dtype) : begin;
    if (first > begin) one_by_one(s, consts, begin, first);
    const size_t last = !varies || (usual && consts->options == usual)
                            ? all_turns(s, consts, first, end, update, shape, usual, stream)
                            : all_turns(s, consts, first, end, update, shape, consts->options, stream);
    if (last < end) one_by_one(s, consts, last, end);
}

#endif

#define ZPP_OPTIMIZER(NAME, name, first, states, written, usual, varies) \
    static void step_##name(const struct zpp_optim_segment *segment, const union zpp_optim_consts *consts,           \
                            size_t begin, size_t end) {                                                              \
        const struct zpp_optim_shape shape = { first, states, written };                                             \
        walk(segment, consts, begin, end, update_##name, shape, usual, varies);                                      \
    }
#include "optimizers.def"
#undef ZPP_OPTIMIZER

const struct zpp_optim_kernels ZPP_ISA_NAME(zpp_optim) = { {
#define ZPP_OPTIMIZER(NAME, name, first, states, written, usual, varies) [ZPP_OPTIM_##NAME] = step_##name,
#include "optimizers.def"
#undef ZPP_OPTIMIZER
} };
