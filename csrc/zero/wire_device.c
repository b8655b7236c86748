/* SPDX-License-Identifier: Apache-2.0
 *
 * What wire.c does, between GPUs; the bits are the same. A quantised copy is an fp32 scale a block, then the codes.
 *
 *   parameters   Behind its shard each rank has the shard's quantised copy (placement/on_device.c). The compute stream
 *                makes it after the shard was written, and the gather streams of all ranks read it in place. Shards
 *                on the host have the copies of wire.c there, which a copy engine brings to the gather stream
 *                (placement/offloaded.c).
 *   gradients    A bucket (reduce_device.c) has an *area* behind its gradients, shard by shard as they travel. The
 *                compute stream fills it when the bucket goes out, and peers read it in place of the gradients.
 *                  narrow      the elements in wire_dtype
 *                  quantised   quantised copies, each from a multiple of 64 bytes on
 */
#include "../comm/stream_sum.h"
#include "internal.h"
#include "on_device.h"

size_t zpp_wire_device_stride(const zpp_zero *zero, const struct zpp_unit *unit) {
    if (zpp_wire_quantises_grads(zero)) return zpp_round_up(zpp_wire_qcopy_bytes(zero, unit), ZPP_BUCKET_ALIGN_BYTES);
    return zpp_wire_narrows(unit) ? zpp_wire_shard_bytes(unit) : 0;
}

size_t zpp_wire_device_bytes(const zpp_zero *zero, const struct zpp_unit *unit) {
    return zpp_round_up(zpp_wire_device_stride(zero, unit) * (size_t)unit->group->ranks, ZPP_BUCKET_ALIGN_BYTES);
}

/* --- a quantised copy of a shard ---------------------------------------------------------------------------------- */

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

static zpp_status launch_quantise(zpp_zero *zero, const struct quantise_op *op, struct zpp_err *err) {
    return zpp_stream_launch(zero->compute, run_quantise, op, sizeof *op, err);
}

/* Between parameters lies what the memory held before, which must not widen the scale of a block. `memory`: elements
 * [begin, end) of the unit. */
static zpp_status clear_gaps(zpp_zero *zero, const struct zpp_unit *unit, unsigned char *memory, size_t elem_bytes,
                             size_t begin, size_t end, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    for (size_t i = 0; i <= unit->params && status == ZPP_OK; i++) {
        const struct zpp_gap gap = zpp_wire_gap(unit, i, begin, end);
        if (gap.to > gap.from)
            status = zpp_stream_fill(zero->compute, memory + (gap.from - begin) * elem_bytes, 0,
                                     (gap.to - gap.from) * elem_bytes, err);
    }
    return status;
}

/* --- parameters --------------------------------------------------------------------------------------------------- */

zpp_status zpp_wire_device_make_qcopy(zpp_zero *zero, const struct zpp_unit *unit, void *qcopy, struct zpp_err *err) {
    const struct quantise_op op = {zero->options.device, zero->wire.params, unit->shard,
                                   unit->shard_elems,    unit->dtype,       qcopy};
    return launch_quantise(zero, &op, err);
}

zpp_status zpp_wire_device_clear_shard(zpp_zero *zero, const struct zpp_unit *unit, struct zpp_err *err) {
    const size_t begin = (size_t)unit->group->rank * unit->shard_elems;
    return clear_gaps(zero, unit, unit->shard, unit->elem_bytes, begin, begin + unit->shard_elems, err);
}

struct dequantise_op {
    zpp_device *device;
    struct zpp_quant_spec spec;
    const float *scales;
    size_t elems;
    void *values;
    zpp_dtype dtype;
};
_Static_assert(sizeof(struct dequantise_op) <= ZPP_OP_ARG_BYTES, "the argument of one operation");

static zpp_status run_dequantise(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)wait;
    const struct dequantise_op *op = arg;
    const struct zpp_quant_source from = {op->scales + zpp_quant_blocks(&op->spec, op->elems), op->scales, NULL};
    return zpp_dequantise_cuda(op->device, native, &op->spec, &from, op->values, op->dtype, op->elems, false, err);
}

zpp_status zpp_wire_device_read_qcopy(zpp_zero *zero, const struct zpp_unit *unit, const void *qcopy, void *to,
                                      struct zpp_err *err) {
    const struct dequantise_op op = {zero->options.device, zero->wire.params, qcopy,
                                     unit->shard_elems,    to,                unit->dtype};
    return zpp_stream_launch(zero->gather, run_dequantise, &op, sizeof op, err);
}

/* --- filling the area --------------------------------------------------------------------------------------------- */

static zpp_status quantise(zpp_zero *zero, const struct zpp_unit *unit, unsigned char *grads, unsigned char *area,
                           struct zpp_err *err) {
    const size_t stride = zpp_wire_device_stride(zero, unit), shard_bytes = zpp_grad_shard_bytes(unit->grad);
    zpp_status status = clear_gaps(zero, unit, grads, unit->grad->elem_bytes, 0, unit->elems, err);
    for (int rank = 0; rank < unit->group->ranks && status == ZPP_OK; rank++) {
        const struct quantise_op op = {
            .device = zero->options.device,
            .spec = zero->wire.grads,
            .values = grads + (size_t)rank * shard_bytes,
            .elems = unit->shard_elems,
            .dtype = unit->grad_dtype,
            .scales = (float *)(void *)(area + (size_t)rank * stride),
        };
        status = launch_quantise(zero, &op, err);
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
                                      .scale = 1.0,
                                      .dtype = unit->grad_dtype,
                                      .dst_dtype = unit->wire_dtype,
                                      .halt = zero->on_device->halt};
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
    const struct zpp_quant_add add = {sum->dst,        sum->dst_dtype,  sum->elems,
                                      (float)sum->scale, sum->accumulate, sum->halt};
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
