/* SPDX-License-Identifier: Apache-2.0
 *
 * Shards and buckets in 8 or 4 bits (ZeRO++, Wang et al. 2023), read in place by the peers like the exact ones;
 * blocks, scales and errors: ops/quant/quant.h, symmetric. A quantised copy of E elements: an fp32 scale a block, then
 * the codes, w(E) = E * bits / 8 + 4 a block. Decisions: docs/design/0015.
 *
 *   parameters (qwZ)  Beside its shard each rank keeps the shard's quantised copy, written where shards are written
 *   (the step),
 *                     so a step quantises once for its two gathers. A gather reads quantised copies, its own too: every
 *                     rank computes with the same bits. The shards, which the optimizer updates, stay exact.
 *   gradients (qgZ)   A bucket is quantised shard by shard, in place, before its descriptor is posted; rank r adds the
 *                     quantised copies of shard r in fp32, in rank order: one quantisation, because one host is one
 *                     hop.
 *
 * Bytes read per rank and step: (N - 1) w(shard) a gather and a reduction, in place of (N - 1) * shard bytes.
 *
 * Gradients that add in fp32 and travel in 16 bits (a unit's wire_dtype) are rounded to nearest in place in the same
 * manner, and added in fp32. Over several hosts they are rounded to a copy (internode.c).
 *
 * Over several hosts both are the quantised collectives of the communicator (comm/tcp/hier_quant.c), which quantise
 * at each gather and add as qgZ does: inside each host, quantised again, then over hosts. With one rank a host the bits
 * are the same as here.
 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { TILE_ELEMS = 4096 }; /* added in fp32 before they are rounded into a shard that accumulates */

static size_t qcopy_bytes(const struct zpp_quant_spec *spec, size_t elems) {
    return zpp_quant_blocks(spec, elems) * sizeof(float) + zpp_quant_code_bytes(spec, elems);
}

/* The parts of a quantised copy from element `first` on, which begins a block. */
static struct zpp_quant_source source_at(const struct zpp_quant_spec *spec, const void *qcopy, size_t elems,
                                         size_t first) {
    const float *scales = qcopy;
    const uint8_t *codes = (const uint8_t *)(scales + zpp_quant_blocks(spec, elems));
    const struct zpp_quant_source source = { codes + zpp_quant_code_bytes(spec, first),
                                             scales + first / spec->block_elems, NULL };
    return source;
}

static void quantise(const struct zpp_quant_spec *spec, const void *values, zpp_dtype dtype, size_t elems,
                       void *qcopy) {
    float *scales = qcopy;
    const struct zpp_quant_target target = { scales + zpp_quant_blocks(spec, elems), scales, NULL };
    zpp_quantise(spec, values, dtype, elems, &target, NULL);
}

/* --- life --------------------------------------------------------------------------------------------------------- */

static zpp_status check_bits(const char *of, int bits, struct zpp_err *err) {
    if (bits == 0 || bits == 4 || bits == 8) return ZPP_OK;
    return zpp_fail(err, ZPP_INVALID, "zero: %s in %d bits, wanted 8, 4, or 0 for exactly", of, bits);
}

static zpp_status check_stage(int stage, int params_bits, int grads_bits, struct zpp_err *err) {
    if (params_bits && stage < 3)
        return zpp_fail(err, ZPP_INVALID, "zero: stage %d gathers no parameters that could be quantised, stage 3 does",
                        stage);
    if (grads_bits && stage < 2)
        return zpp_fail(err, ZPP_INVALID, "zero: gradients are quantised at stages 2 and 3, not yet at stage %d",
                        stage);
    return ZPP_OK;
}

zpp_status zpp_zero_set_wire(zpp_zero *zero, int params_bits, int grads_bits, size_t block_elems, struct zpp_err *err) {
    zpp_status status = check_bits("parameters", params_bits, err);
    if (status == ZPP_OK) status = check_bits("gradients", grads_bits, err);
    if (status != ZPP_OK) return status;
    if (zero->sealed || zero->units_count)
        return zpp_fail(err, ZPP_STATE, "zero: what travels is chosen before units are added");
    if (block_elems < 16 || block_elems % 16 || block_elems > TILE_ELEMS)
        return zpp_fail(err, ZPP_INVALID, "zero: blocks of %zu elements, wanted a multiple of 16, at most %d",
                        block_elems, (int)TILE_ELEMS);
    status = check_stage(zero->options.stage, params_bits, grads_bits, err);
    if (status != ZPP_OK) return status;
    zero->wire.params = (struct zpp_quant_spec) { block_elems, params_bits, false };
    zero->wire.grads = (struct zpp_quant_spec) { block_elems, grads_bits, false };
    return ZPP_OK;
}

zpp_status zpp_wire_check_unit(const struct zpp_unit *unit, struct zpp_err *err) {
    if (unit->dtype == ZPP_F32 || unit->dtype == ZPP_BF16 || unit->dtype == ZPP_F16) return ZPP_OK;
    return zpp_fail(err, ZPP_INVALID,
                    "zero: unit %s has %s elements, which cannot be quantised; wanted float32, bfloat16 or float16",
                    unit->name, zpp_dtype_name(unit->dtype));
}

zpp_status zpp_wire_add_qcopy(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    struct zpp_wire *wire = &zero->wire;
    const zpp_status status = zpp_wire_check_unit(unit, err);
    if (status != ZPP_OK) return status;
    unit->qcopy_offset_bytes = wire->qcopies_bytes;
    wire->qcopies_bytes += (zpp_wire_param_qcopy_bytes(zero, unit) + 63) / 64 * 64;
    return ZPP_OK;
}

/* Make scratch large enough for one shard as it travels. */
static void want_scratch(struct zpp_wire *wire, size_t bytes) {
    if (bytes > wire->scratch_bytes) wire->scratch_bytes = bytes;
}

static zpp_status plan_gradient(zpp_zero *zero, const struct zpp_unit *unit, struct zpp_err *err) {
    struct zpp_wire *wire = &zero->wire;
    if (zero->options.stage <= 1 && zpp_wire_narrows(unit) && !zero->on_device)
        want_scratch(wire, zpp_wire_shard_bytes(unit));
    if (!zpp_wire_quantises_grads(zero)) return ZPP_OK;
    /* Over several hosts the collectives make quantised copies of their own; GPUs have them behind the buckets. */
    const bool in_place = zero->ring && !zero->on_device;
    if (in_place) want_scratch(wire, qcopy_bytes(&wire->grads, unit->shard_elems));
    return zpp_wire_check_unit(unit, err);
}

zpp_status zpp_wire_seal(zpp_zero *zero, struct zpp_err *err) {
    struct zpp_wire *wire = &zero->wire;
    zpp_status status = ZPP_OK;
    for (int i = 0; i < zero->units_count && zero->ranks > 1 && status == ZPP_OK; i++)
        if (zero->units[i]->grad) status = plan_gradient(zero, zero->units[i], err);
    if (status != ZPP_OK) return status;
    if (wire->scratch_bytes && !(wire->scratch = malloc(wire->scratch_bytes)))
        return zpp_fail(err, ZPP_NOMEM, "zero: no memory for %zu bytes of a gradient on its way", wire->scratch_bytes);
    if (!wire->qcopies_bytes) return ZPP_OK;
    status = zpp_region_create(zero->options.comm, ZPP_REGION_PER_RANK, wire->qcopies_bytes, &wire->qcopies, err);
    for (int rank = 0; rank < zero->ranks && status == ZPP_OK; rank++) /* a GPU copies those of all ranks up */
        status = zpp_pin(zero, zpp_region_base(wire->qcopies, rank), wire->qcopies_bytes, err);
    return status;
}

void zpp_wire_fini(zpp_zero *zero) {
    zpp_region_destroy(zero->wire.qcopies);
    free(zero->wire.scratch);
}

/* --- parameters --------------------------------------------------------------------------------------------------- */

struct zpp_gap zpp_wire_gap(const struct zpp_unit *unit, size_t index, size_t begin, size_t end) {
    size_t from = index ? unit->offset_elems[index - 1] + unit->param_elems[index - 1] : 0;
    size_t to = index < unit->params ? unit->offset_elems[index] : unit->elems;
    if (from < begin) from = begin;
    if (to > end) to = end;
    return (struct zpp_gap) { from, from < to ? to : from };
}

void zpp_wire_clear_shard(const struct zpp_unit *unit) {
    const size_t begin = (size_t)unit->group->rank * unit->shard_elems, bytes = unit->elem_bytes;
    for (size_t i = 0; i <= unit->params; i++) {
        const struct zpp_gap gap = zpp_wire_gap(unit, i, begin, begin + unit->shard_elems);
        if (gap.from < gap.to) memset(unit->shard + (gap.from - begin) * bytes, 0, (gap.to - gap.from) * bytes);
    }
}

bool zpp_wire_quantises_params(const zpp_zero *zero) {
    return zero->wire.params.bits != 0;
}

size_t zpp_wire_param_qcopy_bytes(const zpp_zero *zero, const struct zpp_unit *unit) {
    return qcopy_bytes(&zero->wire.params, unit->shard_elems);
}

unsigned char *zpp_wire_qcopy_of(const zpp_zero *zero, const struct zpp_unit *unit, int rank) {
    return (unsigned char *)zpp_region_base(zero->wire.qcopies, rank) + unit->qcopy_offset_bytes;
}

void zpp_wire_make_qcopy(zpp_zero *zero, const struct zpp_unit *unit) {
    quantise(&zero->wire.params, unit->shard, unit->dtype, unit->shard_elems,
             zpp_wire_qcopy_of(zero, unit, zero->rank));
}

void zpp_wire_gather(zpp_zero *zero, const struct zpp_unit *unit, unsigned char *memory) {
    const struct zpp_quant_spec *spec = &zero->wire.params;
    for (int at = 0; at < unit->group->ranks; at++) {
        const unsigned char *qcopy = zpp_wire_qcopy_of(zero, unit, unit->group->members[at]);
        const struct zpp_quant_source source = source_at(spec, qcopy, unit->shard_elems, 0);
        zpp_dequantise(spec, &source, memory + (size_t)at * zpp_unit_shard_bytes(unit), unit->dtype,
                       unit->shard_elems, false, NULL);
    }
    zpp_comm_count(zero->options.comm, ZPP_TRAFFIC_ALL_GATHER,
                   zpp_wire_param_qcopy_bytes(zero, unit) * (size_t)(unit->group->ranks - 1));
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

bool zpp_wire_quantises_grads(const zpp_zero *zero) {
    return zero->wire.grads.bits != 0;
}

void zpp_wire_clear_gaps(const struct zpp_unit *unit, unsigned char *bucket) {
    const size_t bytes = zpp_dtype_bytes(unit->grad_dtype);
    for (size_t i = 0; i <= unit->params; i++) {
        const struct zpp_gap gap = zpp_wire_gap(unit, i, 0, unit->elems);
        memset(bucket + gap.from * bytes, 0, (gap.to - gap.from) * bytes);
    }
}

void zpp_wire_quantise_bucket(zpp_zero *zero, const struct zpp_unit *unit, unsigned char *bucket) {
    const struct zpp_quant_spec *spec = &zero->wire.grads;
    zpp_wire_clear_gaps(unit, bucket);
    for (int rank = 0; rank < unit->group->ranks; rank++) {
        unsigned char *shard = bucket + (size_t)rank * zpp_grad_shard_bytes(unit->grad);
        quantise(spec, shard, unit->grad_dtype, unit->shard_elems, zero->wire.scratch);
        memcpy(shard, zero->wire.scratch, qcopy_bytes(spec, unit->shard_elems)); /* always shorter than the shard */
    }
}

void zpp_wire_narrow(const zpp_zero *zero, const struct zpp_unit *unit, unsigned char *bucket) {
    (void)zero;
    unsigned char tile[2 * TILE_ELEMS];
    const size_t wide = zpp_dtype_bytes(unit->grad_dtype), narrow = zpp_dtype_bytes(unit->wire_dtype);
    for (int rank = 0; rank < unit->group->ranks; rank++) {
        unsigned char *shard = bucket + (size_t)rank * zpp_grad_shard_bytes(unit->grad);
        for (size_t first = 0; first < unit->shard_elems; first += TILE_ELEMS) {
            const size_t left = unit->shard_elems - first, elems = left < TILE_ELEMS ? left : TILE_ELEMS;
            zpp_convert(tile, unit->wire_dtype, shard + first * wide, unit->grad_dtype, elems);
            memcpy(shard + first * narrow, tile, elems * narrow); /* always behind what is read next */
        }
    }
}

const void *zpp_wire_aside(zpp_zero *zero, const struct zpp_unit *unit, const void *shard) {
    return memcpy(zero->wire.scratch, shard, zpp_wire_shard_bytes(unit));
}

static void add_tile(const struct zpp_quant_spec *spec, const struct zpp_quant_source *sources, int count, float factor,
                     unsigned char *to, zpp_dtype dtype, size_t elems) {
    float sum[TILE_ELEMS], before[TILE_ELEMS];
    zpp_quant_sum(spec, sources, (size_t)count, factor, sum, ZPP_F32, elems, NULL);
    zpp_convert(before, ZPP_F32, to, dtype, elems);
    for (size_t i = 0; i < elems; i++) sum[i] += before[i];
    zpp_convert(to, dtype, sum, ZPP_F32, elems);
}

size_t zpp_wire_qcopy_bytes(const zpp_zero *zero, const struct zpp_unit *unit) {
    return qcopy_bytes(&zero->wire.grads, unit->shard_elems);
}

void zpp_wire_add(zpp_zero *zero, const void *const *qcopies, int count, float factor, void *to, zpp_dtype dtype,
                  bool accumulate, size_t elems) {
    const struct zpp_quant_spec *spec = &zero->wire.grads;
    struct zpp_quant_source sources[ZPP_RANKS_MAX];
    assert(count <= ZPP_RANKS_MAX);
    const size_t tile = TILE_ELEMS / spec->block_elems * spec->block_elems; /* a tile begins at a block */
    if (!accumulate) {
        for (int i = 0; i < count; i++) sources[i] = source_at(spec, qcopies[i], elems, 0);
        zpp_quant_sum(spec, sources, (size_t)count, factor, to, dtype, elems, NULL);
        return;
    }
    for (size_t first = 0; first < elems; first += tile) {
        const size_t length = elems - first < tile ? elems - first : tile;
        for (int i = 0; i < count; i++) sources[i] = source_at(spec, qcopies[i], elems, first);
        add_tile(spec, sources, count, factor, (unsigned char *)to + first * zpp_dtype_bytes(dtype), dtype, length);
    }
}
