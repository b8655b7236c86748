/* SPDX-License-Identifier: Apache-2.0
 *
 * What wire.c does, between GPUs (reduce_device.c): gradients that travel in fewer bits than they add in. A bucket
 * there has an *area* behind its gradients, shard by shard as they travel:
 *
 *   narrow      the elements in wire_dtype
 *   quantised   a quantised copy: an fp32 scale a block, then the codes; each begins at a multiple of 64 bytes
 *
 * This rank's stream fills the area when the bucket goes out, and peers read it in place of the gradients. The bits are
 * those of wire.c.
 */
#include "../comm/stream_sum.h"
#include "internal.h"
#include "on_device.h"

static size_t rounded(size_t bytes) {
    return (bytes + ZPP_BUCKET_ALIGN_BYTES - 1) / ZPP_BUCKET_ALIGN_BYTES * ZPP_BUCKET_ALIGN_BYTES;
}

size_t zpp_wire_device_stride(const zpp_zero *zero, const struct zpp_unit *unit) {
    if (zpp_wire_quantises_grads(zero)) return rounded(zpp_wire_qcopy_bytes(zero, unit));
    return zpp_wire_narrows(unit) ? zpp_wire_shard_bytes(unit) : 0;
}

size_t zpp_wire_device_bytes(const zpp_zero *zero, const struct zpp_unit *unit) {
    return rounded(zpp_wire_device_stride(zero, unit) * (size_t)unit->group->ranks);
}

/* --- filling the area --------------------------------------------------------------------------------------------- */

struct quantise_op {
    zpp_device *device;
    struct zpp_quant_spec spec;
    const void *values;
    size_t elems;
    zpp_dtype dtype;
    float *scales; /* the codes lie behind them */
};
_Static_assert(sizeof(struct quantise_op) <= ZPP_OP_ARG_BYTES, "the argument of one operation");

static zpp_status run_quantise(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)wait;
    const struct quantise_op *op = arg;
    const struct zpp_quant_target to = {op->scales + zpp_quant_blocks(&op->spec, op->elems), op->scales, NULL};
    return zpp_quantise_cuda(op->device, native, &op->spec, op->values, op->dtype, op->elems, &to, err);
}

/* Between parameters lies what the memory held before, which must not widen the scale of a block. */
static zpp_status clear_gaps(zpp_zero *zero, const struct zpp_unit *unit, unsigned char *grads, struct zpp_err *err) {
    const size_t bytes = zpp_dtype_bytes(unit->grad_dtype);
    zpp_status status = ZPP_OK;
    for (size_t i = 0; i <= unit->params && status == ZPP_OK; i++) {
        const size_t from = i ? unit->offset_elems[i - 1] + unit->param_elems[i - 1] : 0;
        const size_t to = i < unit->params ? unit->offset_elems[i] : unit->elems;
        if (to > from) status = zpp_stream_fill(zero->compute, grads + from * bytes, 0, (to - from) * bytes, err);
    }
    return status;
}

static zpp_status quantise(zpp_zero *zero, const struct zpp_unit *unit, unsigned char *grads, unsigned char *area,
                           struct zpp_err *err) {
    const size_t stride = zpp_wire_device_stride(zero, unit), shard_bytes = zpp_grad_shard_bytes(unit->grad);
    zpp_status status = clear_gaps(zero, unit, grads, err);
    for (int rank = 0; rank < unit->group->ranks && status == ZPP_OK; rank++) {
        const struct quantise_op op = {
            .device = zero->options.device,
            .spec = zero->wire.grads,
            .values = grads + (size_t)rank * shard_bytes,
            .elems = unit->shard_elems,
            .dtype = unit->grad_dtype,
            .scales = (float *)(void *)(area + (size_t)rank * stride),
        };
        status = zpp_stream_launch(zero->compute, run_quantise, &op, sizeof op, err);
    }
    return status;
}

zpp_status zpp_wire_device_pack(zpp_zero *zero, const struct zpp_unit *unit, unsigned char *grads, unsigned char *area,
                                struct zpp_err *err) {
    const void *source = grads;
    if (zpp_wire_quantises_grads(zero)) return quantise(zero, unit, grads, area, err);
    const struct zpp_sum_op narrow = {.dst = area,
                                      .src = &source,
                                      .sources = 1,
                                      .elems = unit->elems,
                                      .scale = 1.0f,
                                      .dtype = unit->grad_dtype,
                                      .dst_dtype = unit->wire_dtype,
                                      .halt = zpp_counters_halt(zero->on_device->counters)};
    return zpp_stream_sum(zero->compute, &narrow, err);
}

/* --- adding what the ranks sent ----------------------------------------------------------------------------------- */

struct quant_sum_op {
    zpp_device *device;
    const struct zpp_zero *zero;
    const struct zpp_sum_op *sum;
};

/* The stream has no queue, so this runs inside the launch, and what it points to is still there. */
static zpp_status run_quant_sum(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)wait;
    const struct quant_sum_op *op = arg;
    const struct zpp_sum_op *sum = op->sum;
    const struct zpp_quant_spec *spec = &op->zero->wire.grads;
    struct zpp_quant_source sources[ZPP_STREAM_SUM_SOURCES];
    for (int i = 0; i < sum->sources; i++) {
        const float *scales = sum->src[i];
        sources[i] = (struct zpp_quant_source){scales + zpp_quant_blocks(spec, sum->elems), scales, NULL};
    }
    const struct zpp_quant_add add = {sum->dst, sum->dst_dtype, sum->elems, sum->scale, sum->accumulate, sum->halt};
    return zpp_quant_add_cuda(op->device, native, spec, sources, (size_t)sum->sources, &add, err);
}

zpp_status zpp_wire_device_sum(zpp_zero *zero, const struct zpp_unit *unit, struct zpp_sum_op *sum,
                               struct zpp_err *err) {
    sum->dtype = unit->wire_dtype;
    if (!zpp_wire_quantises_grads(zero)) return zpp_stream_sum(zero->on_device->sums, sum, err);
    if (sum->sources > ZPP_STREAM_SUM_SOURCES)
        return zpp_fail(err, ZPP_INVALID, "zero: %d ranks send quantised gradients, wanted at most %d", sum->sources,
                        (int)ZPP_STREAM_SUM_SOURCES);
    const struct quant_sum_op op = {zero->options.device, zero, sum};
    return zpp_stream_launch(zero->on_device->sums, run_quant_sum, &op, sizeof op, err);
}
