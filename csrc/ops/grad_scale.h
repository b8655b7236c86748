/* SPDX-License-Identifier: Apache-2.0
 *
 * What an optimizer's step multiplies gradients with, and whether it is taken: numbers of the host, or words in memory
 * of the device that steps. With the words, nobody waits for that device: the norm, the clip factor and the check for
 * overflow are computed there (norm/clip.h), and the step's kernels behind them read the words when they run.
 *
 * C and CUDA; grad_scale_cuda.h has what kernels do with it.
 */
#ifndef ZPP_OPS_GRAD_SCALE_H
#define ZPP_OPS_GRAD_SCALE_H

#include <stdint.h>

struct zpp_grad_scale {
    float value;          /* multiplies every gradient where `at` is NULL */
    const float *at;      /* the number that multiplies every gradient, or NULL */
    const uint32_t *skip; /* not 0 there: the step writes nothing. NULL: it is taken */
};

/* The same for gradients in float64. */
struct zpp_grad_scale_f64 {
    double value;
    const double *at;
    const uint32_t *skip;
};

#ifndef __CUDACC__
#include <stdbool.h>

static inline struct zpp_grad_scale zpp_grad_scale_of(float value) { return (struct zpp_grad_scale){value, 0, 0}; }

/* For the constants of a CUDA launch. */
static inline float zpp_grad_scale_on_host(const struct zpp_grad_scale *scale) {
    return scale->at ? 1.0f : scale->value;
}

/* On the CPU, where the words are in its memory: false if the step is skipped, else `value` is what multiplies. */
static inline bool zpp_grad_scale_read(const struct zpp_grad_scale *scale, float *value) {
    if (scale->skip && *scale->skip) return false;
    *value = scale->at ? *scale->at : scale->value;
    return true;
}
#endif

#endif
