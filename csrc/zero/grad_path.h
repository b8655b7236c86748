/* SPDX-License-Identifier: Apache-2.0
 *
 * How a gradient gets from the computation to the bucket that the ranks reduce: a table of functions for each way,
 * chosen once at create. NULL entries are left out.
 *
 *   path      gradients collect in                        and then
 *   direct    the bucket (the computation is on the host) nothing
 *   offload   memory of the accelerator (grad_offload.c)  one copy to the bucket, when the unit is complete
 *   device    the bucket, in memory of the accelerator that all ranks map (reduce_device.c)   nothing
 *   nccl      the bucket, in memory of the accelerator                    an exchange of shards (by_nccl.c)
 *
 * Threads: the coordinator's; arrived and reduce: where the reduction runs.
 */
#ifndef ZPP_ZERO_GRAD_PATH_H
#define ZPP_ZERO_GRAD_PATH_H

#include "reduce.h"

struct zpp_grad_path {
    const char *name;
    zpp_status (*seal)(zpp_zero *zero, struct zpp_err *err);
    void (*fini)(zpp_zero *zero);
    /* A backward begins to fill the unit's bucket; it was taken. */
    zpp_status (*take)(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err);
    unsigned char *(*memory)(const zpp_zero *zero, const struct zpp_unit *unit); /* where the gradients collect */
    /* to[elems] += from[elems], in order on zero->compute */
    zpp_status (*add)(zpp_zero *zero, void *to, const void *from, size_t elems, zpp_dtype dtype, struct zpp_err *err);
    /* The unit is complete: it goes to the bucket, and what zero->reduce does next comes after that. */
    zpp_status (*send)(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err);
    /* Asked first by the reduction: it is in the bucket. AGAIN: `wait` is NULL, and not yet. */
    zpp_status (*arrived)(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait, struct zpp_err *err);
    void (*give)(zpp_zero *zero, struct zpp_unit_grad *grad); /* the bucket is given back, sent or not */

    /* --- buckets that are not in memory of the host --------------------------------------------------------------- */
    /* add_unit: bytes of a bucket behind the gradients, for what peers read in place of them. */
    size_t (*area_bytes)(const zpp_zero *zero, const struct zpp_unit *unit);
    /* seal: memory of all buckets. `mappings_bytes`: of the places that mapping_offset_bytes counts from 0. */
    zpp_status (*make_buckets)(zpp_zero *zero, size_t mappings_bytes, size_t board_bytes, struct zpp_err *err);
    void (*drop_unit)(zpp_zero *zero, struct zpp_unit_grad *grad); /* destroy */
    uint8_t *(*flags)(const zpp_zero *zero, const struct zpp_unit_grad *grad);
    /* The arena is full: memory for this bucket elsewhere. NULL: its mapping. */
    zpp_status (*make_own)(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err);
    /* A bucket whose reduction is over between the hosts: no stream of any rank reads it, seen from the compute stream;
     * and make it so. */
    bool (*settled)(const zpp_zero *zero, const struct zpp_unit_grad *grad);
    zpp_status (*settle)(zpp_zero *zero, const struct zpp_unit_grad *grad, struct zpp_err *err);
    /* Before send. AGAIN: `wait` is NULL, and the way is not free yet. */
    zpp_status (*prepare)(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait, struct zpp_err *err);
    zpp_op_fn reduce; /* the reduction, as one operation on zero->reduce; as zpp_reduce_shm */
    /* All reductions of a backward are over on zero->reduce: the compute stream runs after them. */
    zpp_status (*finish)(zpp_zero *zero, struct zpp_err *err);
    bool keeps_carry; /* the memory of a carry stays, because streams may still use it */
};

extern const struct zpp_grad_path zpp_grad_path_direct, zpp_grad_path_offload, zpp_grad_path_device;

#endif
