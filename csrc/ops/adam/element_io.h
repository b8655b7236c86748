/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of csrc/ops/adam: one element in and out, for the scalar version and for the ends of the vector versions.
 */
#ifndef ZPP_OPS_ADAM_ELEMENT_IO_H
#define ZPP_OPS_ADAM_ELEMENT_IO_H

#include "adam.h"
#include "adam_body.h"

static inline float zpp_adam_grad_at(const struct zpp_optim_segment *segment, size_t i) {
    switch (segment->grad_dtype) {
    case ZPP_BF16: return zpp_bf16_to_f32(((const uint16_t *)segment->grad)[i]);
    case ZPP_F16: return zpp_f16_to_f32(((const uint16_t *)segment->grad)[i]);
    default: return ((const float *)segment->grad)[i];
    }
}

static inline void zpp_adam_out_at(const struct zpp_optim_segment *segment, size_t i) {
    if (!segment->param_out) return;
    switch (segment->out_dtype) {
    case ZPP_BF16: ((uint16_t *)segment->param_out)[i] = zpp_bf16_from_f32(segment->param[i]); return;
    case ZPP_F16: ((uint16_t *)segment->param_out)[i] = zpp_f16_from_f32(segment->param[i]); return;
    default: ((float *)segment->param_out)[i] = segment->param[i]; return;
    }
}

static inline void zpp_adam_elements(const struct zpp_optim_segment *segment, const struct zpp_adam_consts *consts,
                                     size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
        zpp_adam_element(consts, zpp_adam_grad_at(segment, i), segment->param + i, segment->exp_avg + i,
                         segment->exp_avg_sq + i, segment->max_exp_avg_sq ? segment->max_exp_avg_sq + i : NULL);
        zpp_adam_out_at(segment, i);
    }
}

#endif
