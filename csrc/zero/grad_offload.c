/* SPDX-License-Identifier: Apache-2.0
 *
 * The gradients of a unit collect in memory of the accelerator, and go down to the unit's bucket in one copy when all
 * came. The reduction begins when the copy has arrived; the host waits for it only where it has nothing else to do.
 *
 * The memory is a few blocks, which are taken in the order of the compute stream: one that was copied down is taken
 * again after that copy, by an event. Gradients that a backward keeps (no_sync) keep their blocks.
 */
#include <stdlib.h>

#include "../base/mem.h"
#include "../comm/stream_sum.h"
#include "grad_path.h"
#include "internal.h"
#include "placement.h"

struct zpp_grad_block {
    unsigned char *memory;
    size_t bytes;
    const struct zpp_unit_grad *sent; /* whose copy down was its last use; NULL: none was copied down */
    bool taken;
};

static zpp_status seal(zpp_zero *zero, struct zpp_err *err) {
    return zpp_stream_create(zero->options.device, ZPP_STREAM_THREAD, "down", &zero->blocks.down, err);
}

static void fini(zpp_zero *zero) {
    struct zpp_grad_blocks *blocks = &zero->blocks;
    zpp_stream_destroy(blocks->down);
    for (size_t i = 0; i < blocks->count; i++) {
        if (blocks->all[i]->memory)
            zpp_device_free(zero->options.device, blocks->all[i]->memory, blocks->all[i]->bytes);
        free(blocks->all[i]);
    }
    free(blocks->all);
    *blocks = (struct zpp_grad_blocks){0};
}

/* --- blocks ------------------------------------------------------------------------------------------------------- */

static zpp_status make_block(zpp_zero *zero, size_t bytes, struct zpp_grad_block **out, struct zpp_err *err) {
    struct zpp_grad_blocks *blocks = &zero->blocks;
    void *grown = zpp_array_reserve(blocks->all, blocks->count, &blocks->capacity, sizeof *blocks->all);
    struct zpp_grad_block *block = grown ? calloc(1, sizeof *block) : NULL;
    if (grown) blocks->all = grown;
    if (!block) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the record of a block of gradients");
    blocks->all[blocks->count++] = block;
    block->bytes = bytes;
    void *memory = NULL;
    const zpp_status status = zpp_device_alloc(zero->options.device, bytes, &memory, err);
    block->memory = memory;
    block->taken = status != ZPP_OK; /* for ever */
    blocks->bytes += status == ZPP_OK ? bytes : 0;
    *out = block;
    return status;
}

/* The smallest free block that fits; NULL: none does. */
static struct zpp_grad_block *find_block(const zpp_zero *zero, size_t bytes) {
    struct zpp_grad_block *found = NULL;
    for (size_t i = 0; i < zero->blocks.count; i++) {
        struct zpp_grad_block *block = zero->blocks.all[i];
        if (!block->taken && block->bytes >= bytes && (!found || block->bytes < found->bytes)) found = block;
    }
    return found;
}

static zpp_status take(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    const size_t bytes = zpp_grad_whole_bytes(grad);
    struct zpp_grad_block *block = find_block(zero, bytes);
    zpp_status status = ZPP_OK;
    if (grad->block) return ZPP_OK;
    if (!block) status = make_block(zero, bytes, &block, err);
    if (status == ZPP_OK && block->sent) status = zpp_stream_wait(zero->compute, block->sent->written, NULL, err);
    if (status != ZPP_OK) return status;
    block->taken = true;
    grad->block = block;
    return ZPP_OK;
}

/* `sent`: false where it was not copied down; then what uses it next comes after what used it, on the compute stream.
 */
static void give_block(struct zpp_unit_grad *grad, bool sent) {
    grad->block->sent = sent ? grad : NULL;
    grad->block->taken = false;
    grad->block = NULL;
}

static void give(zpp_zero *zero, struct zpp_unit_grad *grad) {
    (void)zero;
    if (grad->block) give_block(grad, false);
}

static unsigned char *memory(const zpp_zero *zero, const struct zpp_unit *unit) {
    (void)zero;
    return unit->grad->block ? unit->grad->block->memory : NULL;
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

static zpp_status add(zpp_zero *zero, void *to, const void *from, size_t elems, zpp_dtype dtype, struct zpp_err *err) {
    const void *sources[1] = {from};
    const struct zpp_sum_op sum = {.dst = to,
                                   .src = sources,
                                   .elems = elems,
                                   .scale = 1.0,
                                   .sources = 1,
                                   .dtype = dtype,
                                   .dst_dtype = dtype,
                                   .accumulate = true};
    return zpp_stream_sum(zero->compute, &sum, err);
}

static zpp_status send(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    struct zpp_grad_block *block = grad->block;
    zpp_stream *down = zero->blocks.down;
    if (grad->empty || !block) return ZPP_OK;
    zpp_status status = zpp_event_record(grad->written, zero->compute, err);
    if (status == ZPP_OK) status = zpp_stream_wait(down, grad->written, NULL, err);
    if (status == ZPP_OK)
        status = zpp_stream_copy(down, zpp_bucket_of(zero, grad->unit), block->memory, zpp_grad_whole_bytes(grad), err);
    if (status == ZPP_OK) status = zpp_event_record(grad->written, down, err);
    if (status == ZPP_OK) give_block(grad, true);
    return status;
}

static zpp_status arrived(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait,
                          struct zpp_err *err) {
    const struct zpp_placement *placement = grad->unit->placement;
    if (!grad->empty) return zpp_event_sync(grad->written, wait, err);
    return placement->end_reads ? placement->end_reads(zero, grad->unit, wait, err) : ZPP_OK;
}

const struct zpp_grad_path zpp_grad_path_offload = {
    .name = "offload",
    .seal = seal,
    .fini = fini,
    .take = take,
    .memory = memory,
    .add = add,
    .send = send,
    .arrived = arrived,
    .give = give,
};
