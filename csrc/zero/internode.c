/* SPDX-License-Identifier: Apache-2.0
 *
 * The coordinator's collectives over several hosts, where no rank can read another's memory: they are submitted in
 * program order (the same on every rank) and run on the communicator's progress thread. Each carries its unit, so that
 * ranks whose paths differ get an error that says so. Bytes on the wire are those of zero.h, or of the quantised
 * collectives (wire.c).
 *
 * What a collective reads and writes is borrowed until it is finished: units stay GATHERING and buckets stay listed
 * until then, as they do on one host until the peers have read them.
 *
 * A unit of a group goes over the communicator of that group's ranks, whose order is the program's too. A group of one
 * rank only copies.
 *
 * A reduction is two collectives: which parameters have gradients, and their sum. In stages 1 to 3 the sum is made as
 * the communicator does it, first inside each host. Gradients of an accelerator are on their way down when both are
 * submitted, and the communicator's thread waits for them.
 */
#include <stdlib.h>
#include <string.h>

#include "grad_path.h"
#include "grad_store.h"
#include "internal.h"

enum { EXCHANGE_OBJECTS = ZPP_OBJECTS / 2 }; /* objects from here on are exchanges, below are units, from 1 on */

uint32_t zpp_internode_object(const zpp_zero *zero, const struct zpp_unit *unit) {
    return zpp_comm_object(zero->number, 1 + (uint32_t)unit->index);
}

static struct zpp_call gather_call(const zpp_zero *zero, const struct zpp_unit *unit) {
    return (struct zpp_call){ .coll = ZPP_COLL_ALL_GATHER,
                              .dtype = unit->dtype,
                              .dst = unit->whole,
                              .src = unit->shard,
                              .elems = unit->shard_elems,
                              .object = zpp_internode_object(zero, unit) };
}

/* Turn a call into the same collective with quantised elements. */
static void quantise_call(struct zpp_call *call, const struct zpp_quant_spec *spec) {
    call->coll = call->coll == ZPP_COLL_ALL_GATHER ? ZPP_COLL_ALL_GATHER_QUANT : ZPP_COLL_REDUCE_SCATTER_QUANT;
    call->bits = spec->bits;
    call->block_elems = spec->block_elems;
}

static void copy_alone(const struct zpp_unit *unit) {
    if (unit->whole != unit->shard) memcpy(unit->whole, unit->shard, zpp_unit_shard_bytes(unit));
}

zpp_status zpp_internode_gather(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_internode_sides *sides,
                                struct zpp_err *err) {
    if (unit->group->ranks == 1) return copy_alone(unit), ZPP_OK;
    struct zpp_call call = gather_call(zero, unit);
    call.before = sides->before;
    call.after = sides->after;
    call.ctx = unit;
    if (sides->to) call.dst = sides->to;
    if (unit->quantised) quantise_call(&call, &zero->wire.params);
    return zpp_comm_submit(unit->group->comm, &call, NULL, NULL, &unit->gather_work, err);
}

zpp_status zpp_internode_gather_now(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait,
                                    struct zpp_err *err) {
    if (unit->group->ranks == 1) return copy_alone(unit), ZPP_OK;
    const struct zpp_call call = gather_call(zero, unit); /* a shard that lies at its place is not copied */
    return zpp_comm_call(unit->group->comm, &call, wait, err);
}

zpp_status zpp_internode_await(zpp_work **work, const struct zpp_wait *wait, struct zpp_err *err) {
    if (!*work) return ZPP_OK;
    if (!wait && !zpp_work_finished(*work)) return ZPP_AGAIN;
    const zpp_status status = zpp_work_wait(*work, wait, err);
    if (!zpp_work_finished(*work)) return status; /* interrupted, or late */
    zpp_work_free(*work);
    *work = NULL;
    return status;
}

zpp_status zpp_internode_gather_wait(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait,
                                     struct zpp_err *err) {
    (void)zero;
    return zpp_internode_await(&unit->gather_work, wait, err);
}

void zpp_internode_drop(zpp_comm *comm, zpp_work **work) {
    struct zpp_err ignored = ZPP_ERR_INIT;
    if (!*work) return;
    if (!zpp_work_finished(*work)) zpp_comm_abort(comm, "left in the middle of a gather or reduction");
    (void)zpp_work_wait(*work, NULL, &ignored);
    zpp_work_free(*work);
    *work = NULL;
}

zpp_status zpp_internode_exchange(zpp_zero *zero, uint64_t kind, const void *mine, size_t bytes, void *all,
                                  const struct zpp_wait *wait, struct zpp_err *err) {
    const struct zpp_call call = { .coll = ZPP_COLL_ALL_GATHER,
                                   .dtype = ZPP_U8,
                                   .dst = all,
                                   .src = mine,
                                   .elems = bytes,
                                   .object = zpp_comm_object(zero->number, EXCHANGE_OBJECTS + (uint32_t)kind) };
    return zpp_comm_call(zero->options.comm, &call, wait, err);
}

/* --- reductions --------------------------------------------------------------------------------------------------- */

/* Memory of one reduction, in wire_dtype: the flags (a byte a parameter: has it a gradient; then a byte for
 * each bit of origin.c), then (stages 1 to 3) the reduced shard, then what is sent where that is not the bucket itself:
 * a narrower copy of it, or the zeros of a rank without a gradient. */
static size_t flags_count(const struct zpp_unit *unit) { return unit->params + ZPP_ORIGIN_BITS; }

static size_t flags_bytes(const struct zpp_unit *unit) { return (flags_count(unit) + 63) & ~(size_t)63; }

static size_t reduced_bytes(const zpp_zero *zero, const struct zpp_unit *unit) {
    return zero->options.stage == 0 ? 0 : zpp_wire_shard_bytes(unit);
}

static bool sends_copy(const zpp_zero *zero, const struct zpp_unit_grad *grad) {
    return zpp_wire_narrows(grad->unit) || (zero->options.stage > 0 && grad->empty);
}

static zpp_status make_memory(const zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    const struct zpp_unit *unit = grad->unit;
    const size_t sent_bytes = sends_copy(zero, grad) ? unit->elems * zpp_dtype_bytes(unit->wire_dtype) : 0;
    const size_t bytes = flags_bytes(unit) + reduced_bytes(zero, unit) + sent_bytes;
    grad->internode_memory = calloc(1, bytes + 1);
    if (grad->internode_memory) return ZPP_OK;
    return zpp_fail(err, ZPP_NOMEM, "zero: no memory to reduce unit %s, %zu bytes", unit->name, bytes);
}

static unsigned char *reduced_shard(const struct zpp_unit_grad *grad) {
    return grad->internode_memory + flags_bytes(grad->unit);
}

/* Return the memory that this rank contributes to the sum, of which `bucket` has the gradients. */
static unsigned char *sent(const zpp_zero *zero, struct zpp_unit_grad *grad, unsigned char *bucket) {
    return sends_copy(zero, grad) ? reduced_shard(grad) + reduced_bytes(zero, grad->unit) : bucket;
}

static zpp_status submit_sum(zpp_zero *zero, struct zpp_unit_grad *grad, unsigned char *bucket, struct zpp_err *err) {
    const struct zpp_unit *unit = grad->unit;
    struct zpp_call call = {.dtype = unit->wire_dtype, .op = ZPP_AVG, .object = zpp_internode_object(zero, unit)};
    if (zero->options.stage == 0) {
        if (grad->empty) memset(grad->shard, 0, unit->elems * grad->elem_bytes);
        call.coll = ZPP_COLL_ALL_REDUCE;
        call.dst = sent(zero, grad, grad->shard);
        call.elems = unit->elems;
    } else {
        call.coll = ZPP_COLL_REDUCE_SCATTER;
        call.dst = reduced_shard(grad);
        call.elems = unit->shard_elems;
        if (zpp_wire_quantises_grads(zero)) quantise_call(&call, &zero->wire.grads);
        call.src = sent(zero, grad, bucket);
    }
    if (unit->group->ranks == 1) {
        if (call.src) memcpy(call.dst, call.src, zpp_wire_shard_bytes(unit));
        return ZPP_OK;
    }
    return zpp_comm_submit(unit->group->comm, &call, NULL, NULL, &grad->internode_sum, err);
}

static unsigned char *origin_flags(const struct zpp_unit_grad *grad) {
    return grad->internode_memory + grad->unit->params;
}

static void flag_origin(const zpp_zero *zero, struct zpp_unit_grad *grad) {
    origin_flags(grad)[zero->rank < ZPP_ORIGIN_BITS ? zero->rank : ZPP_ORIGIN_BITS - 1] = 1;
}

static void join_origins(const zpp_zero *zero, struct zpp_unit_grad *grad) {
    uint64_t origins = 0;
    for (int bit = 0; bit < ZPP_ORIGIN_BITS; bit++) origins |= (uint64_t)(origin_flags(grad)[bit] != 0) << bit;
    zpp_origin_note(zero, grad, origins);
}

static struct zpp_call flags_call(const zpp_zero *zero, const struct zpp_unit_grad *grad, size_t count) {
    return (struct zpp_call){.coll = ZPP_COLL_ALL_REDUCE,
                             .dtype = ZPP_U8,
                             .op = ZPP_MAX,
                             .dst = grad->internode_memory,
                             .elems = count,
                             .object = zpp_internode_object(zero, grad->unit)};
}

zpp_status zpp_internode_submit_flags(zpp_zero *zero, struct zpp_unit_grad *grad, size_t count, struct zpp_err *err) {
    const struct zpp_call call = flags_call(zero, grad, count);
    return zpp_comm_submit(grad->unit->group->comm, &call, NULL, NULL, &grad->internode_flags, err);
}

/* The bucket is complete: make of it what both collectives send. */
static zpp_status fill(void *arg, const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_unit_grad *grad = arg;
    const struct zpp_unit *unit = grad->unit;
    zpp_zero *zero = grad->zero;
    const zpp_status status = zero->path->arrived ? zero->path->arrived(zero, grad, wait, err) : ZPP_OK;
    if (status != ZPP_OK || grad->empty) return status;
    unsigned char *bucket = zpp_bucket_of(zero, unit);
    if (zpp_origin_nonfinite_params(unit, bucket, unit->grad_dtype, 0, unit->elems)) flag_origin(zero, grad);
    if (zpp_wire_quantises_grads(zero)) zpp_wire_clear_gaps(unit, bucket);
    if (sends_copy(zero, grad))
        zpp_convert(sent(zero, grad, bucket), unit->wire_dtype, bucket, unit->grad_dtype, unit->elems);
    return ZPP_OK;
}

/* With an accelerator the communicator's thread waits for the copy down, and the collectives keep their place. */
static zpp_status submit_filled(zpp_zero *zero, struct zpp_unit_grad *grad, struct zpp_err *err) {
    struct zpp_call call = flags_call(zero, grad, flags_count(grad->unit));
    const bool alone = grad->unit->group->ranks == 1;
    zpp_status status = ZPP_OK;
    if (zero->path->arrived && !alone) call.before = fill;
    else status = fill(grad, NULL, err);
    call.ctx = grad;
    if (status != ZPP_OK || alone) return status;
    return zpp_comm_submit(grad->unit->group->comm, &call, NULL, NULL, &grad->internode_flags, err);
}

zpp_status zpp_reduce_net_launch(zpp_zero *zero, struct zpp_unit_grad *grad, const uint8_t *touched,
                                unsigned char *bucket, struct zpp_err *err) {
    const struct zpp_unit *unit = grad->unit;
    zpp_status status = make_memory(zero, grad, err);
    if (status != ZPP_OK) return status;
    if (!grad->empty) memcpy(grad->internode_memory, touched, unit->params);
    status = submit_filled(zero, grad, err);
    return status == ZPP_OK ? submit_sum(zero, grad, bucket, err) : status;
}

/* As add_shards of reduce_shm.c, with the sum made already. */
static void add_shard(zpp_zero *zero, struct zpp_unit_grad *grad) {
    const struct zpp_unit *unit = grad->unit;
    const double factor = zpp_grad_factor(zero, unit, unit->group->divisor / unit->group->ranks); /* it is a mean */
    if (zero->options.stage == 0) {
        const void *source = zpp_wire_narrows(unit) ? reduced_shard(grad) : grad->shard;
        if (source != grad->shard || factor < 1.0 || factor > 1.0)
            zpp_reduce_sources(grad->shard, unit->grad_dtype, false, &source, 1, unit->wire_dtype, unit->elems, factor);
        return;
    }
    const void *source = reduced_shard(grad);
    zpp_reduce_sources(grad->shard, unit->grad_dtype, zpp_reduce_accumulates(zero, grad), &source, 1, unit->wire_dtype,
                       unit->shard_elems, factor);
    zpp_bucket_add_carry(grad, grad->shard);
}

bool zpp_internode_merge_present(struct zpp_unit_grad *grad) {
    const uint8_t *touched = grad->internode_memory;
    bool any = false;
    for (size_t i = 0; i < grad->unit->params; i++) {
        any = any || touched[i];
        grad->present[i] |= touched[i];
    }
    return any;
}

static zpp_status await_sum(zpp_zero *zero, struct zpp_unit_grad *grad, const struct zpp_wait *wait,
                            struct zpp_err *err) {
    const struct zpp_grad_store *store = zero->store;
    /* it is read while the sum is made */
    zpp_status status = store->load ? store->load(zero, grad, wait, err) : ZPP_OK;
    if (status == ZPP_OK) status = zpp_internode_await(&grad->internode_flags, wait, err);
    if (status == ZPP_OK) status = zpp_internode_await(&grad->internode_sum, wait, err);
    return status == ZPP_OK && store->load_wait ? store->load_wait(zero, grad, wait) : status;
}

zpp_status zpp_reduce_net_finish(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native;
    struct zpp_unit_grad *grad = *(struct zpp_unit_grad **)arg;
    zpp_zero *zero = grad->zero;
    const struct zpp_grad_store *store = zero->store;
    zpp_status status = await_sum(zero, grad, wait, err);
    if (status != ZPP_OK) return status;
    if (zpp_internode_merge_present(grad)) {
        status = store->acquire ? store->acquire(zero, grad, err) : ZPP_OK;
        if (status != ZPP_OK) return status;
        add_shard(zero, grad);
        join_origins(zero, grad);
        grad->has = grad->changed = true;
    }
    free(grad->internode_memory);
    grad->internode_memory = NULL;
    return store->complete ? store->complete(zero, grad, err) : ZPP_OK;
}
