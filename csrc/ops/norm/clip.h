/* SPDX-License-Identifier: Apache-2.0
 *
 * From sums of squares to what a step needs, without the host: the global norm, the factor of clipping, whether the
 * step is skipped, and the loss scale of fp16. All of it is one small record in memory of the device, which the kernels
 * of the step read (grad_scale.h). The record is the same on all ranks, because all add the same sums in one order.
 *
 *   norm        sqrt(sum over units, and in a unit over ranks in rank order, of the sums) * unscale
 *   unscale     scale / loss_scale
 *   skip        1 if the norm is not finite, or the group has failed, else 0
 *   skip_at     for steps that are enqueued ahead: the host launches a step once for each number k of steps that may
 *               have been skipped unknown to it, with the counts of that case, and the words let one of them write
 *   grad_scale  unscale * factor * min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_; never scales up
 *   loss_scale  skipped: max(least, loss_scale * backoff), and the count of good steps begins anew; else after
 *               `interval` good steps in a row loss_scale * growth, if that is below 2^127: torch.amp.GradScaler's rule
 *
 * All of it is computed in double, each operation rounded once, so the device has the CPU's bits.
 */
#ifndef ZPP_OPS_NORM_CLIP_H
#define ZPP_OPS_NORM_CLIP_H

#include <stdbool.h>
#include <stddef.h>
#include "../grad_scale.h"
#include "clip_body.h"
#include "norm.h"

/* Fill in a record that says: scale by `unscale`, no loss scale but `loss_scale` (1: none). Copy it to the device. */
struct zpp_clip_record zpp_clip_record_of(double loss_scale);

/* The record's words for the kernels of a step that is taken if `behind` steps since `settled` were skipped; `record`
 * is an address of the device. */
static inline struct zpp_grad_scale zpp_clip_scale(const struct zpp_clip_record *record, size_t behind) {
    return (struct zpp_grad_scale){1.0f, &record->grad_scale, &record->skip_at[behind]};
}
static inline struct zpp_grad_scale_f64 zpp_clip_scale_f64(const struct zpp_clip_record *record, size_t behind) {
    return (struct zpp_grad_scale_f64){1.0, &record->grad_scale_f64, &record->skip_at[behind]};
}

/* What is done of it; `record` is read and written. */
struct zpp_clip {
    struct zpp_clip_record *record;
    const double *const
        *sums; /* [ranks], an array of the host; sums[rank] has `units` numbers in the device's memory */
    size_t ranks, units;
    const uint64_t *halt; /* NULL, or a word that is not 0 once the group has failed: the step is skipped then */
    struct zpp_clip_rule rule;
};

/* At once, on the CPU. */
void zpp_clip(const struct zpp_clip *clip);
/* Enqueued on `native`; all pointers but `clip` and `sums` themselves are the device's, or pinned on it. INVALID for
 * more than ZPP_CLIP_CUDA_RANKS ranks, NOT_BUILT without the kernel, DEVICE if the launch fails. */
zpp_status zpp_clip_cuda(zpp_device *device, void *native, const struct zpp_clip *clip, struct zpp_err *err);

/* Sums of squares of groups of segments, such as the pieces of a unit's shard: group g has the segments from firsts[g]
 * up to firsts[g + 1], and its sum adds theirs in order; 0 without any. `firsts` has groups_count + 1 numbers. The CPU
 * adds in the same order (csrc/zero/norm.c). Enqueued on `native`; `work` has zpp_norm_groups_work_elems(...) doubles
 * of device memory, and begins with the sum of each segment afterwards. Errors are those of
 * zpp_norm_squares_cuda. */
size_t zpp_norm_groups_work_elems(const struct zpp_norm_segment *segments, size_t segments_count);
zpp_status zpp_norm_groups_cuda(zpp_device *device, void *native, const struct zpp_norm_segment *segments,
                                const size_t *firsts, size_t groups_count, double *work, double *sums,
                                struct zpp_err *err);

#endif
