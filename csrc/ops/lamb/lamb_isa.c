/* SPDX-License-Identifier: Apache-2.0
 *
 * The two passes of LAMB over elements of one segment, compiled once for each instruction set. lamb_body.h has the
 * arithmetic.
 */
#include "kernels.h"

#include "../element.h"
#include "../streamed.h"

#if ZPP_LANES == 1

static void moments(const struct zpp_lamb_segment *s, const struct zpp_lamb_consts *consts, size_t begin, size_t end,
                    struct zpp_lamb_sums *sums) {
    for (size_t i = begin; i < end; ++i) {
        const float p = s->param[i], g = zpp_element_load(s->grad, s->grad_dtype, i);
        const float u = zpp_lamb_moments(consts, g, p, s->exp_avg + i, s->exp_avg_sq + i);
        sums->params[i % ZPP_LAMB_LANES] += p * p;
        sums->updates[i % ZPP_LAMB_LANES] += u * u;
    }
}

static void move(const struct zpp_lamb_segment *s, const struct zpp_lamb_consts *consts, size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
        s->param[i] = zpp_lamb_moved(consts, s->param[i], s->exp_avg[i], s->exp_avg_sq[i]);
        if (s->param_out) zpp_element_store(s->param_out, s->out_dtype, i, s->param[i]);
    }
}

#else

#define NONE ZPP_DTYPES /* no dtype: nothing is copied out */

LANES_FN size_t moments_turns(const struct zpp_lamb_segment *segment, const struct zpp_lamb_consts *consts,
                              size_t begin, size_t end, struct zpp_lamb_sums *sums, const zpp_dtype grad_dtype) {
    const struct zpp_lamb_segment s = *segment; /* copies: the compiler may not assume that stores leave them alone */
    const struct zpp_lamb_consts c = *consts;
    lanes params = v16_load(sums->params), updates = v16_load(sums->updates);
    size_t i = begin;
    for (; i + V16_LANES <= end; i += V16_LANES) {
        const lanes p = v16_load(s.param + i), g = v16_load_as(s.grad, i, grad_dtype);
        lanes m = v16_load(s.exp_avg + i), v = v16_load(s.exp_avg_sq + i);
        const lanes u = zpp_lamb_moments(&c, g, p, &m, &v);
        v16_store(s.exp_avg + i, m);
        v16_store(s.exp_avg_sq + i, v);
        params = lanes_add(params, lanes_mul(p, p));
        updates = lanes_add(updates, lanes_mul(u, u));
    }
    v16_store(sums->params, params);
    v16_store(sums->updates, updates);
    return i;
}

/* The ends, which are no whole turn, are left to the scalar build. */
static void moments(const struct zpp_lamb_segment *s, const struct zpp_lamb_consts *c, size_t begin, size_t end,
                    struct zpp_lamb_sums *sums) {
    size_t done;
    switch (s->grad_dtype) {
    case ZPP_BF16: done = moments_turns(s, c, begin, end, sums, ZPP_BF16); break;
    case ZPP_F16: done = moments_turns(s, c, begin, end, sums, ZPP_F16); break;
    default: done = moments_turns(s, c, begin, end, sums, ZPP_F32); break;
    }
    if (done < end) zpp_lamb_scalar.moments(s, c, done, end, sums);
}

/* Whole turns from begin; where they end. The copy-out is written past the cache: it is not read before the next
 * forward, and a plain store would first read its lines. param_out + begin is aligned to a line. */
LANES_FN size_t move_turns(const struct zpp_lamb_segment *segment, const struct zpp_lamb_consts *consts, size_t begin,
                           size_t end, const zpp_dtype out_dtype) {
    const struct zpp_lamb_segment s = *segment;
    const struct zpp_lamb_consts c = *consts;
    size_t i = begin;
    for (; i + V16_LANES <= end; i += V16_LANES) {
        const lanes p =
            zpp_lamb_moved(&c, v16_load(s.param + i), v16_load(s.exp_avg + i), v16_load(s.exp_avg_sq + i));
        v16_store(s.param + i, p);
        if (out_dtype != NONE) v16_stream_as(s.param_out, i, out_dtype, p);
    }
    if (out_dtype != NONE) zpp_streamed();
    return i;
}

static void move(const struct zpp_lamb_segment *s, const struct zpp_lamb_consts *c, size_t begin, size_t end) {
    size_t first = begin + (s->param_out ? v16_elems_to_line(s->param_out, begin, s->out_dtype) : 0), done;
    if (first > end) first = end;
    if (begin < first) zpp_lamb_scalar.move(s, c, begin, first);
    switch (s->param_out ? s->out_dtype : NONE) {
    case ZPP_F32: done = move_turns(s, c, first, end, ZPP_F32); break;
    case ZPP_BF16: done = move_turns(s, c, first, end, ZPP_BF16); break;
    case ZPP_F16: done = move_turns(s, c, first, end, ZPP_F16); break;
    default: done = move_turns(s, c, first, end, NONE); break;
    }
    if (done < end) zpp_lamb_scalar.move(s, c, done, end);
}

#endif

const struct zpp_lamb_kernels ZPP_ISA_NAME(zpp_lamb) = { moments, move };
