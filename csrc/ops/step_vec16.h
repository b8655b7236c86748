/* SPDX-License-Identifier: Apache-2.0
 *
 * The walk of an optimizer's vector version, given its step on sixteen elements. Included once a file, after
 *
 *     STEP_SEGMENT, STEP_CONSTS                          its structs; the segment has grad_dtype, param_out, out_dtype
 *     STEP_GRAD_DTYPE(const STEP_SEGMENT *)              only where it has no grad_dtype: what is handed on for it
 *     v16 step_sixteen(const STEP_SEGMENT *, const STEP_CONSTS *, size_t i, const zpp_dtype grad_dtype)
 *                                                        works on elements i..i+15; the new parameters
 *     void step_elements(const STEP_SEGMENT *, const STEP_CONSTS *, size_t begin, size_t end)
 *                                                        the same one by one, for the ends
 *
 * It gives step_walk(). The copy-out is written past the cache: nobody reads it before the next forward, and a plain
 * store would first read its lines.
 */
#ifndef ZPP_OPS_STEP_VEC16_H
#define ZPP_OPS_STEP_VEC16_H

#include "vec16.h"

#ifndef STEP_GRAD_DTYPE
#define STEP_GRAD_DTYPE(s) (s)->grad_dtype
#endif
#define STEP_NO_OUT ZPP_DTYPES /* no kind: nothing is copied out */

/* Whole sixteens from begin; where they end. param_out + begin is aligned to 64 bytes where there is one. */
V16_FN size_t step_turns(const STEP_SEGMENT *s, const STEP_CONSTS *consts, size_t begin, size_t end,
                         const zpp_dtype grad_dtype, const zpp_dtype out_dtype) {
    const STEP_SEGMENT segment = *s; /* copies: the compiler may not assume that stores leave *s alone */
    const STEP_CONSTS c = *consts;
    size_t i = begin;
    for (; i + V16_LANES <= end; i += V16_LANES) {
        const v16 p = step_sixteen(&segment, &c, i, grad_dtype);
        if (out_dtype != STEP_NO_OUT) v16_stream_as(segment.param_out, i, out_dtype, p);
    }
    if (out_dtype != STEP_NO_OUT) _mm_sfence(); /* streamed stores are weakly ordered: later flags must not overtake */
    return i;
}

V16_FN size_t step_turns_out(const STEP_SEGMENT *s, const STEP_CONSTS *c, size_t begin, size_t end,
                             const zpp_dtype grad_dtype) {
    switch (s->param_out ? s->out_dtype : STEP_NO_OUT) {
    case ZPP_F32: return step_turns(s, c, begin, end, grad_dtype, ZPP_F32);
    case ZPP_BF16: return step_turns(s, c, begin, end, grad_dtype, ZPP_BF16);
    case ZPP_F16: return step_turns(s, c, begin, end, grad_dtype, ZPP_F16);
    default: return step_turns(s, c, begin, end, grad_dtype, STEP_NO_OUT);
    }
}

static size_t step_all_turns(const STEP_SEGMENT *s, const STEP_CONSTS *c, size_t begin, size_t end) {
    switch (STEP_GRAD_DTYPE(s)) {
    case ZPP_BF16: return step_turns_out(s, c, begin, end, ZPP_BF16);
    case ZPP_F16: return step_turns_out(s, c, begin, end, ZPP_F16);
    default: return step_turns_out(s, c, begin, end, ZPP_F32);
    }
}

/* Elements before param_out + begin reaches a line; 0 where nothing is copied out. */
static size_t step_head_elems(const STEP_SEGMENT *s, size_t begin) {
    if (!s->param_out) return 0;
    const size_t elem_bytes = s->out_dtype == ZPP_F32 ? 4 : 2;
    const uintptr_t at = (uintptr_t)s->param_out + begin * elem_bytes;
    return ((0 - at) & 63u) / elem_bytes;
}

V16_FN void step_walk(const STEP_SEGMENT *s, const STEP_CONSTS *c, size_t begin, size_t end) {
    size_t first = begin + step_head_elems(s, begin);
    if (first > end) first = end;
    step_elements(s, c, begin, first);
    step_elements(s, c, step_all_turns(s, c, first, end), end);
}

#endif
