/* SPDX-License-Identifier: Apache-2.0
 *
 * Parts of units (unit_file.h): a few bytes of a unit are read to memory of the caller, and the unit stays where it is.
 * So a mixture of experts that is only evaluated reads the experts that its tokens chose
 * (python/zeropp/moe/on_demand.py).
 *
 * Of a matrix that is kept in fewer bits a part has a run of scales and a run of codes, which are read to one buffer:
 *
 *   buffer   | scales of the blocks | codes of the blocks |      each run begins at a page
 */
#include <stdlib.h>
#include <string.h>

#include "unit_file_internal.h"

struct zpp_unit_file_part {
    zpp_aio_request *requests[2]; /* of the values, or of scales and codes; NULL: they were in memory */
    unsigned char *staging;       /* NULL: values come to memory as they are */
    size_t staging_bytes, codes_bytes; /* codes_bytes: where the codes begin in it */
    struct zpp_quant_spec quant;
    void *memory;
    size_t elems;
    zpp_dtype dtype;
};

/* Values as the file has them, or memory. */
static zpp_status begin_exact(zpp_unit_file *unit_file, const struct unit_file_unit *unit, size_t offset_bytes,
                              size_t bytes, zpp_unit_file_part *part, struct zpp_aio_fault *fault,
                              struct zpp_err *err) {
    const size_t at = unit->offset_bytes + offset_bytes;
    const size_t left = at < unit_file->resident_bytes ? unit_file->resident_bytes - at : 0;
    const size_t held = bytes < left ? bytes : left;
    if (held) memcpy(part->memory, unit_file->mapping + at, held);
    if (held == bytes) return ZPP_OK;
    return unit_file_submit(unit_file, at + held, (unsigned char *)part->memory + held, bytes - held, false, false,
                            &part->requests[0], fault, err);
}

/* Scales and codes of whole blocks of a span, of which `first` elements come before the part. */
static zpp_status begin_span(zpp_unit_file *unit_file, const struct unit_file_unit *unit,
                             const struct unit_file_span *span, size_t first, size_t scales_at, size_t codes_at,
                             zpp_unit_file_part *part, struct zpp_aio_fault *fault, struct zpp_err *err) {
    const struct zpp_quant_spec *spec = &unit_file->quant;
    if (first % spec->block_elems || (part->elems % spec->block_elems && first + part->elems != span->elems))
        return zpp_fail(err, ZPP_INVALID, "params: elements %zu to %zu of a matrix are no whole blocks of %zu", first,
                        first + part->elems, spec->block_elems);
    const size_t scales_bytes = zpp_quant_blocks(spec, part->elems) * sizeof(float);
    const size_t codes_bytes = zpp_quant_code_bytes(spec, part->elems);
    part->codes_bytes = zpp_round_up(scales_bytes, zpp_page_bytes());
    part->staging_bytes = part->codes_bytes + zpp_round_up(codes_bytes, zpp_page_bytes());
    void *memory = NULL;
    zpp_status status = zpp_mem_alloc(part->staging_bytes, zpp_page_bytes(), &memory, err);
    if (status != ZPP_OK) return status;
    part->staging = memory;
    part->dtype = span->dtype;
    part->quant = *spec;
    status = unit_file_qcopy_read(unit_file, unit, scales_at + zpp_quant_blocks(spec, first) * sizeof(float),
                                  part->staging, scales_bytes, &part->requests[0], fault, err);
    if (status != ZPP_OK) return status;
    return unit_file_qcopy_read(unit_file, unit, codes_at + zpp_quant_code_bytes(spec, first),
                                part->staging + part->codes_bytes, codes_bytes, &part->requests[1], fault, err);
}

static zpp_status begin_qcopy(zpp_unit_file *unit_file, const struct unit_file_unit *unit, size_t offset_bytes,
                              size_t bytes, zpp_unit_file_part *part, struct zpp_aio_fault *fault,
                              struct zpp_err *err) {
    size_t at, codes = 0;
    const struct unit_file_span *span = unit_file_qcopy_find(unit_file, unit, offset_bytes, &at, &codes);
    if (!span)
        return unit_file_qcopy_read(unit_file, unit, at, part->memory, bytes, &part->requests[0], fault, err);
    const size_t elem_bytes = zpp_dtype_bytes(span->dtype), first = (offset_bytes - span->offset_bytes) / elem_bytes;
    part->elems = bytes / elem_bytes;
    if (first + part->elems > span->elems)
        return zpp_fail(err, ZPP_INVALID, "params: elements %zu to %zu of a matrix of %zu are read", first,
                        first + part->elems, span->elems);
    return begin_span(unit_file, unit, span, first, at, codes, part, fault, err);
}

zpp_status zpp_unit_file_part_begin(zpp_unit_file *unit_file, int index, size_t offset_bytes, void *memory,
                                    size_t bytes, zpp_unit_file_part **out, struct zpp_aio_fault *fault,
                                    struct zpp_err *err) {
    const struct unit_file_unit *unit = &unit_file->units[index];
    if (offset_bytes > unit->bytes || bytes > unit->bytes - offset_bytes)
        return zpp_fail(err, ZPP_INVALID, "params: bytes %zu to %zu of a unit of %zu are read", offset_bytes,
                        offset_bytes + bytes, unit->bytes);
    zpp_unit_file_part *part = calloc(1, sizeof *part);
    if (!part) return zpp_fail(err, ZPP_NOMEM, "params: no memory for a part of a unit");
    part->memory = memory;
    const bool exact = !unit_file->quant.bits || zpp_unit_file_is_held(unit_file, index);
    const zpp_status status = exact ? begin_exact(unit_file, unit, offset_bytes, bytes, part, fault, err)
        : begin_qcopy(unit_file, unit, offset_bytes, bytes, part, fault, err);
    if (status == ZPP_OK) {
        *out = part;
        return ZPP_OK;
    }
    struct zpp_err ignored = ZPP_ERR_INIT;
    (void)zpp_unit_file_part_end(part, NULL, &ignored);
    return status;
}

zpp_aio_arena *zpp_unit_file_part_arena(const zpp_unit_file *unit_file) {
    return unit_file->file.aio ? zpp_aio_get_arena(unit_file->file.aio) : NULL;
}

zpp_status zpp_unit_file_part_end(zpp_unit_file_part *part, struct zpp_aio_fault *fault, struct zpp_err *err) {
    if (!part) return ZPP_OK;
    zpp_status status = zpp_scratch_finish(&part->requests[0], fault, err);
    status = zpp_scratch_finish_after(status, &part->requests[1], fault, err);
    if (part->staging) {
        const struct zpp_quant_source source = {
            part->staging + part->codes_bytes, (float *)(void *)part->staging, NULL };
        if (status == ZPP_OK)
            zpp_dequantise(&part->quant, &source, part->memory, part->dtype, part->elems, false, NULL);
        zpp_mem_free(part->staging, part->staging_bytes);
    }
    free(part);
    return status;
}
