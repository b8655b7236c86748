/* SPDX-License-Identifier: Apache-2.0
 *
 * Where a rank's reduced gradients live: a table of functions for each way, chosen once before seal. Nothing else in
 * csrc tests where a gradient lives.
 *
 *   store    stages    the shard of a unit is
 *   bucket   0, 1      a part of the unit's bucket, which stays (reduce.h)
 *   memory   2, 3      memory of its own, from seal on
 *   pooled   2, 3      memory from its reduction until its step inside the backward, used again by the next units
 *   device   0 to 3    memory of the device: a part of the bucket at stages 0 and 1, else its own (reduce_device.c)
 *   device_pooled   2, 3   the same as pooled there
 *   nvme     2, 3      in a file, in memory while it is added to or read (grad_file.c)
 *
 * The path of a reduced gradient, of which NULL entries are left out:
 *
 *   load -> load_wait -> acquire -> the sum is added to grad->shard -> complete -> (read by norm and step) -> drop
 *
 * load may be asked again and again before the sum (AGAIN), so that a file is read while other ranks are waited for.
 *
 * Threads: load, load_wait, acquire and complete run where the reduction does; the others on the coordinator's thread,
 * while no reduction is under way. drop may come while other units are reduced.
 */
#ifndef ZPP_ZERO_GRAD_STORE_H
#define ZPP_ZERO_GRAD_STORE_H

#include "reduce.h"

struct zpp_grad_store {
    const char *name;
    bool each_backward; /* see zpp_zero_reduces_each_backward */
    /* Shards are in this file, and are addresses to read between open and close only. NULL: in memory. */
    zpp_unit_file *(*file)(const zpp_zero *zero);
    /* --- seal and destroy --- */
    zpp_status (*seal)(zpp_zero *zero, struct zpp_err *err);                            /* of all units, at once */
    zpp_status (*add)(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err); /* of one, at seal or later */
    void (*free)(zpp_zero *zero, struct zpp_unit_grad *grad);
    void (*count_memory)(const zpp_zero *zero, struct zpp_zero_memory *out); /* adds to `out` */

    /* --- a reduction --- */
    zpp_status (*load)(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait, struct zpp_err *err);
    zpp_status (*load_wait)(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait);
    zpp_status (*acquire)(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err); /* memory at grad->shard */
    zpp_status (*complete)(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err);

    /* --- afterwards --- */
    zpp_status (*drop)(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err); /* it was stepped */
    void (*clear)(zpp_zero *zero, struct zpp_unit_grad *grad, size_t param); /* zeros where that parameter's was */
    void (*clear_all)(zpp_zero *zero);
    /* For a delayed step: what was reduced is at grad->back_shard until the next flip; grad->shard is another place. */
    zpp_status (*flip)(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err);

    /* --- shards in a file, as zero.h has them; the grad exists, and has a gradient but for close and copy --- */
    zpp_status (*open)(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err);
    zpp_status (*close)(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err);
    zpp_status (*settle)(zpp_zero *zero, struct zpp_aio_fault *fault, struct zpp_err *err);
    zpp_status (*copy)(zpp_zero *zero, struct zpp_unit_grad *grad, size_t first, size_t elems, void *memory, bool write,
                       struct zpp_aio_fault *fault, struct zpp_err *err);
    /* For a step inside the backward: this backward keeps what it reduces; such a shard is in memory. */
    void (*keep)(zpp_zero *zero);
    zpp_status (*load_kept)(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_aio_fault *fault,
                            struct zpp_err *err);

    /* --- one rank, whose gradients are not reduced; NULL: they stay in p.grad --- */
    zpp_status (*accumulate)(zpp_zero *zero, struct zpp_unit_grad *grad, size_t param, const void *from,
                             const struct zpp_wait *wait, struct zpp_err *err);
    zpp_status (*end_backward)(zpp_zero *zero, bool aborted, struct zpp_err *err);
};

extern const struct zpp_grad_store zpp_grad_store_bucket, zpp_grad_store_memory, zpp_grad_store_pooled,
    zpp_grad_store_nvme, zpp_grad_store_device, zpp_grad_store_device_pooled;

/* grad_memory.c, for the store nvme: zeros in this rank's shard where one parameter's gradient lies. */
void zpp_grad_zero_param(const zpp_zero *zero, struct zpp_unit_grad *grad, size_t param);
void zpp_grad_memory_count(const zpp_zero *zero, struct zpp_zero_memory *out);

#endif
