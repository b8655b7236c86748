/* SPDX-License-Identifier: Apache-2.0
 *
 * The arithmetic of clip.h, for the CPU and CUDA.
 */
#ifndef ZPP_OPS_NORM_CLIP_BODY_H
#define ZPP_OPS_NORM_CLIP_BODY_H

#include <math.h>
#include <stdint.h>

#include "../round.h"

/* So many steps may be enqueued before the host knows which of them were skipped. */
enum { ZPP_CLIP_AHEAD = 8 };

/* In memory of the device that steps. */
struct zpp_clip_record {
    double norm;                    /* of all gradients before clipping, unscaled; what clip_grad_norm_ returns */
    double loss_scale;              /* of the next backward; 1 without fp16 */
    float norm_f32, loss_scale_f32; /* the same, rounded */
    float grad_scale;               /* multiplies every gradient in the step */
    uint32_t skip;                  /* 1: the step writes nothing */
    uint64_t good_steps;            /* in a row, since the loss scale changed */
    uint64_t skipped;               /* steps so far */
    uint32_t skip_at[ZPP_CLIP_AHEAD]; /* [k]: 0 if the step is taken, and k steps since `settled` were skipped */
    double grad_scale_f64;            /* grad_scale before it is rounded, for gradients in float64 */
};

enum {
    ZPP_CLIP_MEASURE = 1, /* norm and skip from the sums; grad_scale is unscale */
    ZPP_CLIP_LIMIT = 2,   /* grad_scale by max_norm */
    ZPP_CLIP_SETTLE = 4,  /* skip_at, and the loss scale of the next backward */
    ZPP_CLIP_FINITE = 8,  /* skip is set where the sums are not finite, and stays where it was set */
};

struct zpp_clip_rule {
    uint32_t parts;                /* bits of the above, done in this order */
    double scale;                  /* of the gradients as they are held, but for the loss scale: 1, or 1 / accumulate */
    double max_norm;               /* INFINITY: no limit */
    double growth, backoff, least; /* growth 1 and backoff 1: the loss scale is fixed */
    uint64_t interval;
    double factor;    /* of LIMIT, besides max_norm: 1, or what the host found by a norm of its own */
    uint64_t settled; /* `skipped` as the host knows it */
};

ZPP_FN void zpp_clip_measure(struct zpp_clip_record *record, const struct zpp_clip_rule *rule, double squares) {
    const double unscale = rule->scale / record->loss_scale;
    record->norm = sqrt(squares) * unscale;
    record->norm_f32 = (float)record->norm;
    record->grad_scale_f64 = unscale;
    record->grad_scale = (float)unscale;
    record->skip = !(squares < INFINITY);
}

ZPP_FN void zpp_clip_limit(struct zpp_clip_record *record, const struct zpp_clip_rule *rule) {
    const double unscale = rule->scale / record->loss_scale, limit = rule->max_norm / (record->norm + 1e-6);
    record->grad_scale_f64 = (limit < 1.0 ? limit : 1.0) * rule->factor * unscale;
    record->grad_scale = (float)record->grad_scale_f64;
}

ZPP_FN void zpp_clip_settle(struct zpp_clip_record *record, const struct zpp_clip_rule *rule) {
    const double lower = record->loss_scale * rule->backoff, higher = record->loss_scale * rule->growth;
    const uint64_t behind = record->skipped - rule->settled;
    for (uint64_t k = 0; k < ZPP_CLIP_AHEAD; ++k) record->skip_at[k] = record->skip || behind != k;
    record->skipped += record->skip;
    record->good_steps = record->skip ? 0 : record->good_steps + 1;
    if (record->skip) record->loss_scale = lower > rule->least ? lower : rule->least;
    if (record->good_steps >= rule->interval) {
        record->good_steps = 0;
        if (higher < 0x1p127) record->loss_scale = higher;
    }
    record->loss_scale_f32 = (float)record->loss_scale;
}

ZPP_FN void zpp_clip_parts(struct zpp_clip_record *record, const struct zpp_clip_rule *rule, double squares,
                           int halted) {
    if (rule->parts & ZPP_CLIP_MEASURE) zpp_clip_measure(record, rule, squares);
    if (halted || (rule->parts & ZPP_CLIP_FINITE && !(squares < INFINITY))) record->skip = 1;
    if (rule->parts & ZPP_CLIP_LIMIT) zpp_clip_limit(record, rule);
    if (rule->parts & ZPP_CLIP_SETTLE) zpp_clip_settle(record, rule);
}

#endif
