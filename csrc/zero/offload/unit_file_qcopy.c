/* SPDX-License-Identifier: Apache-2.0
 *
 * Units kept in fewer bits (unit_file.h): how a quantised copy is made of a unit at its mapping, and a unit of a
 * quantised copy. The parts of a quantised copy follow each other in the order of the unit, each from a multiple of 64
 * bytes on:
 *
 *   unit    | bytes as they are | span .......... | bytes | span .... |
 *   quantised copy   | the same bytes    | scales | codes  | bytes | scales | codes |
 *
 * Quantised copies follow each other in the order of the units. The first qcopies_resident_bytes of them, whole pages,
 * stay in memory, the rest is in the file. So a quantised copy may be partly in memory.
 */
#include <stdlib.h>
#include <string.h>

#include "unit_file_internal.h"

enum { PART_BYTES = 64 };

/* --- what a quantised copy is ------------------------------------------------------------------------------------- */

enum direction { MEASURE, MAKE, EXPAND };

static void move_exact(enum direction direction, unsigned char *values, unsigned char *qcopy, size_t bytes) {
    if (direction == MAKE) memcpy(qcopy, values, bytes);
    else if (direction == EXPAND) memcpy(values, qcopy, bytes);
}

static void move_span(const struct zpp_quant_spec *spec, const struct unit_file_span *span, enum direction direction,
                      unsigned char *values, float *scales, unsigned char *codes) {
    if (direction == MAKE) {
        const struct zpp_quant_target target = { codes, scales, NULL };
        zpp_quantise(spec, values, span->dtype, span->elems, &target, NULL);
    } else if (direction == EXPAND) {
        const struct zpp_quant_source source = { codes, scales, NULL };
        zpp_dequantise(spec, &source, values, span->dtype, span->elems, false, NULL);
    }
}

/* Returns the bytes of the quantised copy. `values`: the unit; both NULL to measure. */
static size_t walk(const zpp_unit_file *unit_file, const struct unit_file_unit *unit, enum direction direction,
                   unsigned char *values, unsigned char *qcopy) {
    const struct zpp_quant_spec *spec = &unit_file->quant;
    size_t at = 0, done = 0; /* in the quantised copy, in the unit */
    for (size_t i = 0; i <= unit->spans_count; i++) {
        const size_t next = i < unit->spans_count ? unit->spans[i].offset_bytes : unit->bytes;
        if (values) move_exact(direction, values + done, qcopy + at, next - done);
        at += zpp_round_up(next - done, PART_BYTES);
        if (i == unit->spans_count) break;
        const struct unit_file_span *span = &unit->spans[i];
        const size_t codes = at + zpp_round_up(zpp_quant_blocks(spec, span->elems) * sizeof(float), PART_BYTES);
        if (values)
            move_span(spec, span, direction, values + next, (float *)(void *)(qcopy + at), qcopy + codes);
        at = codes + zpp_round_up(zpp_quant_code_bytes(spec, span->elems), PART_BYTES);
        done = next + span->elems * zpp_dtype_bytes(span->dtype);
    }
    return at;
}

const struct unit_file_span *unit_file_qcopy_find(const zpp_unit_file *unit_file, const struct unit_file_unit *unit,
                                                  size_t offset_bytes, size_t *at_bytes, size_t *codes_bytes) {
    const struct zpp_quant_spec *spec = &unit_file->quant;
    size_t at = 0, done = 0; /* as in walk */
    for (size_t i = 0; i < unit->spans_count && offset_bytes >= unit->spans[i].offset_bytes; i++) {
        const struct unit_file_span *span = &unit->spans[i];
        at += zpp_round_up(span->offset_bytes - done, PART_BYTES);
        *at_bytes = at;
        *codes_bytes = at + zpp_round_up(zpp_quant_blocks(spec, span->elems) * sizeof(float), PART_BYTES);
        done = span->offset_bytes + span->elems * zpp_dtype_bytes(span->dtype);
        if (offset_bytes < done) return span;
        at = *codes_bytes + zpp_round_up(zpp_quant_code_bytes(spec, span->elems), PART_BYTES);
    }
    *at_bytes = at + (offset_bytes - done);
    return NULL;
}

zpp_status unit_file_qcopy_read(zpp_unit_file *unit_file, const struct unit_file_unit *unit, size_t at_bytes,
                                void *memory, size_t bytes, zpp_aio_request **out, struct zpp_aio_fault *fault,
                                struct zpp_err *err) {
    const size_t place = unit->qcopy_offset_bytes + at_bytes, resident = unit_file->qcopies_resident_bytes;
    const size_t left = place < resident ? resident - place : 0, held = bytes < left ? bytes : left;
    *out = NULL;
    if (held) memcpy(memory, unit_file->qcopies_memory + place, held);
    if (held == bytes) return ZPP_OK;
    return zpp_scratch_submit(&unit_file->file, place + held - resident, (unsigned char *)memory + held, bytes - held,
                              false, out, fault, err);
}

/* --- before seal -------------------------------------------------------------------------------------------------- */

zpp_status zpp_unit_file_set_qcopies(zpp_unit_file *unit_file, int bits, size_t block_elems, bool in_memory,
                                     struct zpp_err *err) {
    if (unit_file->sealed || unit_file->units_count)
        return zpp_fail(err, ZPP_STATE, "params: how they are kept is chosen before units are added");
    if ((bits != 8 && bits != 4) || block_elems < 16 || block_elems % 16)
        return zpp_fail(err, ZPP_INVALID,
                        "params: kept in %d bits and blocks of %zu, wanted 8 or 4 bits and a multiple of 16", bits,
                        block_elems);
    unit_file->quant = (struct zpp_quant_spec){ block_elems, bits, false };
    unit_file->qcopies_in_memory = in_memory;
    return ZPP_OK;
}

zpp_status zpp_unit_file_add_span(zpp_unit_file *unit_file, int index, size_t offset_bytes, size_t elems,
                                  zpp_dtype dtype, struct zpp_err *err) {
    struct unit_file_unit *unit = &unit_file->units[index];
    const struct unit_file_span *last = unit->spans_count ? &unit->spans[unit->spans_count - 1] : NULL;
    const size_t end = last ? last->offset_bytes + last->elems * zpp_dtype_bytes(last->dtype) : 0;
    if (unit_file->sealed || !unit_file->quant.bits || offset_bytes < end ||
        offset_bytes + elems * zpp_dtype_bytes(dtype) > unit->bytes)
        return zpp_fail(err, ZPP_INVALID, "params: %zu elements at %zu of unit %d cannot be kept in fewer bits", elems,
                        offset_bytes, index);
    struct unit_file_span *spans = realloc(unit->spans, (unit->spans_count + 1) * sizeof *spans);
    if (!spans) return zpp_fail(err, ZPP_NOMEM, "params: no memory for the matrices of a unit");
    unit->spans = spans;
    spans[unit->spans_count++] = (struct unit_file_span){ offset_bytes, elems, dtype };
    return ZPP_OK;
}

/* Whole units, the first ones, whose values are held: as many as fit into the resident bytes, and never all. */
static int count_held(const zpp_unit_file *unit_file) {
    size_t bytes = 0, done = 0;
    for (int i = 0; i < unit_file->units_count; i++) bytes += unit_file->units[i].bytes;
    int held = 0;
    while (held + 1 < unit_file->units_count) {
        done += unit_file->units[held].bytes;
        if ((double)done > (1.0 - unit_file->fraction) * (double)bytes) break;
        held++;
    }
    return held;
}

static zpp_status make_qcopies_memory(zpp_unit_file *unit_file, struct zpp_err *err) {
    if (unit_file->ranks > 1) {
        const zpp_status status =
            zpp_region_create(unit_file->comm, ZPP_REGION_ONE, unit_file->qcopies_resident_bytes,
                              &unit_file->qcopies_region, err);
        if (status == ZPP_OK) unit_file->qcopies_memory = zpp_region_base(unit_file->qcopies_region, unit_file->rank);
        return status;
    }
    void *memory = NULL;
    const zpp_status status = zpp_mem_alloc(unit_file->qcopies_resident_bytes, zpp_page_bytes(), &memory, err);
    unit_file->qcopies_memory = memory;
    return status;
}

zpp_status unit_file_qcopy_seal(zpp_unit_file *unit_file, struct zpp_err *err) {
    if (!unit_file->quant.bits) return ZPP_OK;
    const int held = unit_file->qcopies_in_memory ? count_held(unit_file) : 0;
    if (held) unit_file->resident_bytes = unit_file->units[held].offset_bytes;
    for (int i = held; i < unit_file->units_count; i++) {
        struct unit_file_unit *unit = &unit_file->units[i];
        unit->qcopy_offset_bytes = unit_file->qcopies_bytes;
        unit->qcopy_bytes = zpp_round_up(walk(unit_file, unit, MEASURE, NULL, NULL), ZPP_BLOCK_BYTES);
        unit_file->qcopies_bytes += unit->qcopy_bytes;
        if (unit->qcopy_bytes > unit_file->staging_bytes) unit_file->staging_bytes = unit->qcopy_bytes;
    }
    unit_file->qcopies_resident_bytes = unit_file->qcopies_bytes;
    if (!unit_file->qcopies_in_memory)
        unit_file->qcopies_resident_bytes =
            (size_t)((1.0 - unit_file->fraction) * (double)unit_file->qcopies_bytes) / ZPP_BLOCK_BYTES *
            ZPP_BLOCK_BYTES;
    return unit_file->qcopies_resident_bytes ? make_qcopies_memory(unit_file, err) : ZPP_OK;
}

void unit_file_qcopy_drop(zpp_unit_file *unit_file) {
    while (unit_file->staging) {
        struct unit_file_staging *staging = unit_file->staging;
        unit_file->staging = staging->next;
        zpp_mem_free(staging->memory, unit_file->staging_bytes);
        free(staging);
    }
    for (int i = 0; i < unit_file->units_count; i++) free(unit_file->units[i].spans);
    if (unit_file->qcopies_region) zpp_region_destroy(unit_file->qcopies_region);
    else if (unit_file->qcopies_memory) zpp_mem_free(unit_file->qcopies_memory, unit_file->qcopies_resident_bytes);
}

/* --- coming and going --------------------------------------------------------------------------------------------- */

/* Memory for one quantised copy; as many are made as are ever under way at once. */
static zpp_status take_staging(zpp_unit_file *unit_file, struct unit_file_staging **out, struct zpp_err *err) {
    struct unit_file_staging *staging = unit_file->staging;
    if (staging) {
        unit_file->staging = staging->next;
    } else {
        void *memory = NULL;
        staging = calloc(1, sizeof *staging);
        if (!staging) return zpp_fail(err, ZPP_NOMEM, "params: no memory for a quantised copy that is being read");
        const zpp_status status = zpp_mem_alloc(unit_file->staging_bytes, zpp_page_bytes(), &memory, err);
        if (status != ZPP_OK) {
            free(staging);
            return status;
        }
        staging->memory = memory;
        unit_file->stagings++;
    }
    *out = staging;
    return ZPP_OK;
}

static void give_staging(zpp_unit_file *unit_file, struct unit_file_staging *staging) {
    staging->next = unit_file->staging;
    unit_file->staging = staging;
}

/* Return how many of the first bytes of a quantised copy are in memory. */
static size_t held_part(const zpp_unit_file *unit_file, const struct unit_file_unit *unit) {
    const size_t before = unit_file->qcopies_resident_bytes;
    if (unit->qcopy_offset_bytes >= before) return 0;
    const size_t left = before - unit->qcopy_offset_bytes;
    return left < unit->qcopy_bytes ? left : unit->qcopy_bytes;
}

static unsigned char *held_qcopy(const zpp_unit_file *unit_file, const struct unit_file_unit *unit) {
    return unit_file->qcopies_memory ? unit_file->qcopies_memory + unit->qcopy_offset_bytes : NULL;
}

/* Return the element of a span whose scale or code is `at_bytes` behind its first scale. */
static size_t elem_at(const struct zpp_quant_spec *spec, const struct unit_file_span *span, size_t at_bytes,
                      size_t codes_bytes) {
    const size_t elem = at_bytes < codes_bytes ? at_bytes / sizeof(float) * spec->block_elems
                                               : (at_bytes - codes_bytes) * 8 / (size_t)spec->bits;
    return elem < span->elems ? elem : span->elems - 1; /* what follows the last one fills up */
}

size_t unit_file_qcopy_value_at(const zpp_unit_file *unit_file, const struct unit_file_unit *unit, size_t into_bytes) {
    const struct zpp_quant_spec *spec = &unit_file->quant;
    const size_t wanted = held_part(unit_file, unit) + into_bytes;
    size_t at = 0, done = 0; /* as in walk */
    for (size_t i = 0; i < unit->spans_count; i++) {
        const struct unit_file_span *span = &unit->spans[i];
        const size_t exact = span->offset_bytes - done, elem_bytes = zpp_dtype_bytes(span->dtype);
        if (wanted < at + exact) break;
        at += zpp_round_up(exact, PART_BYTES);
        const size_t codes = zpp_round_up(zpp_quant_blocks(spec, span->elems) * sizeof(float), PART_BYTES);
        const size_t bytes = codes + zpp_round_up(zpp_quant_code_bytes(spec, span->elems), PART_BYTES);
        if (wanted < at + bytes)
            return span->offset_bytes + (wanted > at ? elem_at(spec, span, wanted - at, codes) * elem_bytes : 0);
        at += bytes;
        done = span->offset_bytes + span->elems * elem_bytes;
    }
    return done + wanted - at < unit->bytes ? done + wanted - at : unit->bytes - 1;
}

/* The rest of it, which is in the file. */
static zpp_status submit_qcopy(zpp_unit_file *unit_file, const struct unit_file_unit *unit, unsigned char *memory,
                               bool write, zpp_aio_request **out, struct zpp_aio_fault *fault, struct zpp_err *err) {
    const size_t held = held_part(unit_file, unit);
    return zpp_scratch_submit(&unit_file->file, unit->qcopy_offset_bytes + held - unit_file->qcopies_resident_bytes,
                              memory + held, unit->qcopy_bytes - held, write, out, fault, err);
}

zpp_status unit_file_qcopy_begin(zpp_unit_file *unit_file, struct unit_file_unit *unit) {
    if (held_part(unit_file, unit) == unit->qcopy_bytes) return ZPP_OK;
    zpp_status status = take_staging(unit_file, &unit->staging, &unit->err);
    if (status != ZPP_OK) return status;
    status = submit_qcopy(unit_file, unit, unit->staging->memory, false, &unit->request, &unit->fault, &unit->err);
    if (status == ZPP_OK) return ZPP_OK;
    give_staging(unit_file, unit->staging);
    unit->staging = NULL;
    return status;
}

void unit_file_qcopy_end(zpp_unit_file *unit_file, struct unit_file_unit *unit, zpp_status status) {
    const size_t held = held_part(unit_file, unit);
    unsigned char *qcopy = held_qcopy(unit_file, unit);
    if (unit->staging) {
        if (held) memcpy(unit->staging->memory, qcopy, held);
        qcopy = unit->staging->memory;
    }
    if (status == ZPP_OK && unit->qcopy_bytes)
        (void)walk(unit_file, unit, EXPAND, unit_file->mapping + unit->offset_bytes, qcopy);
    if (unit->staging) give_staging(unit_file, unit->staging);
    unit->staging = NULL;
}

bool zpp_unit_file_keeps_qcopies(const zpp_unit_file *unit_file) {
    return unit_file->quant.bits != 0;
}

/* Round a unit that is held as values, through a quantised copy that is dropped again. */
static zpp_status round_held(const zpp_unit_file *unit_file, const struct unit_file_unit *unit, unsigned char *values,
                             struct zpp_err *err) {
    const size_t bytes = zpp_round_up(walk(unit_file, unit, MEASURE, NULL, NULL), ZPP_BLOCK_BYTES);
    void *qcopy = NULL;
    const zpp_status status = zpp_mem_alloc(bytes, zpp_page_bytes(), &qcopy, err);
    if (status != ZPP_OK) return status;
    (void)walk(unit_file, unit, MAKE, values, qcopy);
    (void)walk(unit_file, unit, EXPAND, values, qcopy);
    zpp_mem_free(qcopy, bytes);
    return ZPP_OK;
}

zpp_status zpp_unit_file_keep_qcopy(zpp_unit_file *unit_file, int index, bool any_rank, struct zpp_aio_fault *fault,
                                    struct zpp_err *err) {
    struct unit_file_unit *unit = &unit_file->units[index];
    unsigned char *values = unit_file->mapping + unit->offset_bytes;
    if (unit_file->rank != 0 && !any_rank) return ZPP_OK;
    if (zpp_unit_file_is_held(unit_file, index)) return round_held(unit_file, unit, values, err);
    const size_t held = held_part(unit_file, unit);
    if (held == unit->qcopy_bytes) {
        if (held) (void)walk(unit_file, unit, MAKE, values, held_qcopy(unit_file, unit));
        return ZPP_OK;
    }
    struct unit_file_staging *staging = NULL;
    zpp_status status = take_staging(unit_file, &staging, err);
    if (status != ZPP_OK) return status;
    zpp_aio_request *request = NULL;
    (void)walk(unit_file, unit, MAKE, values, staging->memory);
    if (held) memcpy(held_qcopy(unit_file, unit), staging->memory, held);
    status = submit_qcopy(unit_file, unit, staging->memory, true, &request, fault, err);
    if (status == ZPP_OK) status = zpp_scratch_finish(&request, fault, err);
    give_staging(unit_file, staging);
    return status;
}
