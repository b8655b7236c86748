/* SPDX-License-Identifier: Apache-2.0
 *
 * Units kept in fewer bits (filed.h): how an image is made of a unit at its home, and a unit of an image. The parts of
 * an image follow each other in the order of the unit, each from a multiple of 64 bytes on:
 *
 *   unit    | bytes as they are | span .......... | bytes | span .... |
 *   image   | the same bytes    | scales | codes  | bytes | scales | codes |
 *
 * Images follow each other in the order of the units, and a cut divides them once, at a page: what lies before it is in
 * memory, the rest in the file. So an image may be partly in memory.
 */
#include <stdlib.h>
#include <string.h>

#include "filed_internal.h"

enum { PART_BYTES = 64 };

static size_t round_up(size_t value, size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

/* --- what an image is --------------------------------------------------------------------------------------------- */

enum direction { MEASURE, MAKE, EXPAND };

static void move_exact(enum direction direction, unsigned char *values, unsigned char *image, size_t bytes) {
    if (direction == MAKE) memcpy(image, values, bytes);
    else if (direction == EXPAND) memcpy(values, image, bytes);
}

static void move_span(const struct zpp_quant_spec *spec, const struct filed_span *span, enum direction direction,
                      unsigned char *values, float *scales, unsigned char *codes) {
    if (direction == MAKE) {
        const struct zpp_quant_target target = { codes, scales, NULL };
        zpp_quantise(spec, values, span->dtype, span->elems, &target, NULL);
    } else if (direction == EXPAND) {
        const struct zpp_quant_source source = { codes, scales, NULL };
        zpp_dequantise(spec, &source, values, span->dtype, span->elems, false, NULL);
    }
}

/* Returns the bytes of the image. `values`: the unit; both NULL to measure. */
static size_t walk(const zpp_filed *filed, const struct filed_unit *unit, enum direction direction,
                   unsigned char *values, unsigned char *image) {
    const struct zpp_quant_spec *spec = &filed->images;
    size_t at = 0, done = 0; /* in the image, in the unit */
    for (size_t i = 0; i <= unit->spans_count; i++) {
        const size_t next = i < unit->spans_count ? unit->spans[i].offset_bytes : unit->bytes;
        if (values) move_exact(direction, values + done, image + at, next - done);
        at += round_up(next - done, PART_BYTES);
        if (i == unit->spans_count) break;
        const struct filed_span *span = &unit->spans[i];
        const size_t codes = at + round_up(zpp_quant_blocks(spec, span->elems) * sizeof(float), PART_BYTES);
        if (values)
            move_span(spec, span, direction, values + next, (float *)(void *)(image + at), image + codes);
        at = codes + round_up(zpp_quant_code_bytes(spec, span->elems), PART_BYTES);
        done = next + span->elems * zpp_dtype_bytes(span->dtype);
    }
    return at;
}

/* --- before seal -------------------------------------------------------------------------------------------------- */

zpp_status zpp_filed_set_images(zpp_filed *filed, int bits, size_t block_elems, bool in_memory, struct zpp_err *err) {
    if (filed->sealed || filed->units_count)
        return zpp_fail(err, ZPP_STATE, "params: how they are kept is chosen before units are added");
    if ((bits != 8 && bits != 4) || block_elems < 16 || block_elems % 16)
        return zpp_fail(err, ZPP_INVALID,
                        "params: kept in %d bits and blocks of %zu, wanted 8 or 4 bits and a multiple of 16", bits,
                        block_elems);
    filed->images = (struct zpp_quant_spec){ block_elems, bits, false };
    filed->images_in_memory = in_memory;
    return ZPP_OK;
}

zpp_status zpp_filed_add_span(zpp_filed *filed, int index, size_t offset_bytes, size_t elems, zpp_dtype dtype,
                              struct zpp_err *err) {
    struct filed_unit *unit = &filed->units[index];
    const struct filed_span *last = unit->spans_count ? &unit->spans[unit->spans_count - 1] : NULL;
    const size_t end = last ? last->offset_bytes + last->elems * zpp_dtype_bytes(last->dtype) : 0;
    if (filed->sealed || !filed->images.bits || offset_bytes < end ||
        offset_bytes + elems * zpp_dtype_bytes(dtype) > unit->bytes)
        return zpp_fail(err, ZPP_INVALID, "params: %zu elements at %zu of unit %d cannot be kept in fewer bits", elems,
                        offset_bytes, index);
    struct filed_span *spans = realloc(unit->spans, (unit->spans_count + 1) * sizeof *spans);
    if (!spans) return zpp_fail(err, ZPP_NOMEM, "params: no memory for the matrices of a unit");
    unit->spans = spans;
    spans[unit->spans_count++] = (struct filed_span){ offset_bytes, elems, dtype };
    return ZPP_OK;
}

/* Whole units, the first ones, whose values are held: as many as fit before the cut, and never all. */
static int count_held(const zpp_filed *filed) {
    size_t bytes = 0, done = 0;
    for (int i = 0; i < filed->units_count; i++) bytes += filed->units[i].bytes;
    int held = 0;
    while (held + 1 < filed->units_count) {
        done += filed->units[held].bytes;
        if ((double)done > (1.0 - filed->fraction) * (double)bytes) break;
        held++;
    }
    return held;
}

static zpp_status make_images_memory(zpp_filed *filed, struct zpp_err *err) {
    if (filed->ranks > 1) {
        const zpp_status status =
            zpp_region_create(filed->comm, ZPP_REGION_ONE, filed->images_cut_bytes, &filed->images_region, err);
        if (status == ZPP_OK) filed->images_memory = zpp_region_base(filed->images_region, filed->rank);
        return status;
    }
    void *memory = NULL;
    const zpp_status status = zpp_mem_alloc(filed->images_cut_bytes, ZPP_PAGE_BYTES, &memory, err);
    filed->images_memory = memory;
    return status;
}

zpp_status filed_image_seal(zpp_filed *filed, struct zpp_err *err) {
    if (!filed->images.bits) return ZPP_OK;
    const int held = filed->images_in_memory ? count_held(filed) : 0;
    if (held) filed->cut_bytes = filed->units[held].offset_bytes;
    for (int i = held; i < filed->units_count; i++) {
        struct filed_unit *unit = &filed->units[i];
        unit->image_offset_bytes = filed->images_bytes;
        unit->image_bytes = round_up(walk(filed, unit, MEASURE, NULL, NULL), ZPP_PAGE_BYTES);
        filed->images_bytes += unit->image_bytes;
        if (unit->image_bytes > filed->staging_bytes) filed->staging_bytes = unit->image_bytes;
    }
    filed->images_cut_bytes = filed->images_bytes;
    if (!filed->images_in_memory)
        filed->images_cut_bytes =
            (size_t)((1.0 - filed->fraction) * (double)filed->images_bytes) / ZPP_PAGE_BYTES * ZPP_PAGE_BYTES;
    return filed->images_cut_bytes ? make_images_memory(filed, err) : ZPP_OK;
}

void filed_image_drop(zpp_filed *filed) {
    while (filed->staging) {
        struct filed_staging *staging = filed->staging;
        filed->staging = staging->next;
        zpp_mem_free(staging->memory, filed->staging_bytes);
        free(staging);
    }
    for (int i = 0; i < filed->units_count; i++) free(filed->units[i].spans);
    if (filed->images_region) zpp_region_destroy(filed->images_region);
    else if (filed->images_memory) zpp_mem_free(filed->images_memory, filed->images_cut_bytes);
}

/* --- coming and going --------------------------------------------------------------------------------------------- */

/* Memory for one image; as many are made as are ever under way at once. */
static zpp_status take_staging(zpp_filed *filed, struct filed_staging **out, struct zpp_err *err) {
    struct filed_staging *staging = filed->staging;
    if (staging) {
        filed->staging = staging->next;
    } else {
        void *memory = NULL;
        staging = calloc(1, sizeof *staging);
        if (!staging) return zpp_fail(err, ZPP_NOMEM, "params: no memory for an image on its way");
        const zpp_status status = zpp_mem_alloc(filed->staging_bytes, ZPP_PAGE_BYTES, &memory, err);
        if (status != ZPP_OK) {
            free(staging);
            return status;
        }
        staging->memory = memory;
        filed->stagings++;
    }
    *out = staging;
    return ZPP_OK;
}

static void give_staging(zpp_filed *filed, struct filed_staging *staging) {
    staging->next = filed->staging;
    filed->staging = staging;
}

/* Of an image, the first bytes, which are in memory. */
static size_t held_part(const zpp_filed *filed, const struct filed_unit *unit) {
    const size_t before = filed->images_cut_bytes;
    if (unit->image_offset_bytes >= before) return 0;
    const size_t left = before - unit->image_offset_bytes;
    return left < unit->image_bytes ? left : unit->image_bytes;
}

static unsigned char *held_image(const zpp_filed *filed, const struct filed_unit *unit) {
    return filed->images_memory ? filed->images_memory + unit->image_offset_bytes : NULL;
}

/* The rest of it, which is in the file. */
static zpp_status submit_image(zpp_filed *filed, const struct filed_unit *unit, unsigned char *memory, bool write,
                               zpp_aio_request **out, struct zpp_aio_fault *fault, struct zpp_err *err) {
    if (!filed->aio) return zpp_fail(err, ZPP_STATE, "params: their file is closed with the model; prepare a new one");
    const size_t held = held_part(filed, unit);
    const struct zpp_aio_job job = { .path = filed->path, .memory = memory + held, .bytes = unit->image_bytes - held,
                                     .offset_bytes = unit->image_offset_bytes + held - filed->images_cut_bytes,
                                     .write = write };
    return zpp_aio_submit(filed->aio, &job, out, fault, err);
}

zpp_status filed_image_begin(zpp_filed *filed, struct filed_unit *unit) {
    if (held_part(filed, unit) == unit->image_bytes) return ZPP_OK;
    zpp_status status = take_staging(filed, &unit->staging, &unit->err);
    if (status != ZPP_OK) return status;
    status = submit_image(filed, unit, unit->staging->memory, false, &unit->request, &unit->fault, &unit->err);
    if (status == ZPP_OK) return ZPP_OK;
    give_staging(filed, unit->staging);
    unit->staging = NULL;
    return status;
}

void filed_image_end(zpp_filed *filed, struct filed_unit *unit, zpp_status status) {
    const size_t held = held_part(filed, unit);
    unsigned char *image = held_image(filed, unit);
    if (unit->staging) {
        if (held) memcpy(unit->staging->memory, image, held);
        image = unit->staging->memory;
    }
    if (status == ZPP_OK && unit->image_bytes)
        (void)walk(filed, unit, EXPAND, filed->home + unit->offset_bytes, image);
    if (unit->staging) give_staging(filed, unit->staging);
    unit->staging = NULL;
}

bool zpp_filed_keeps_images(const zpp_filed *filed) {
    return filed->images.bits != 0;
}

/* Of a unit that is held as values, by one who makes an image of it for a moment. */
static zpp_status round_held(const zpp_filed *filed, const struct filed_unit *unit, unsigned char *values,
                             struct zpp_err *err) {
    const size_t bytes = round_up(walk(filed, unit, MEASURE, NULL, NULL), ZPP_PAGE_BYTES);
    void *image = NULL;
    const zpp_status status = zpp_mem_alloc(bytes, ZPP_PAGE_BYTES, &image, err);
    if (status != ZPP_OK) return status;
    (void)walk(filed, unit, MAKE, values, image);
    (void)walk(filed, unit, EXPAND, values, image);
    zpp_mem_free(image, bytes);
    return ZPP_OK;
}

zpp_status zpp_filed_keep_image(zpp_filed *filed, int index, struct zpp_aio_fault *fault, struct zpp_err *err) {
    struct filed_unit *unit = &filed->units[index];
    unsigned char *values = filed->home + unit->offset_bytes;
    if (filed->rank != 0) return ZPP_OK;
    if (zpp_filed_is_held(filed, index)) return round_held(filed, unit, values, err);
    const size_t held = held_part(filed, unit);
    if (held == unit->image_bytes) {
        if (held) (void)walk(filed, unit, MAKE, values, held_image(filed, unit));
        return ZPP_OK;
    }
    struct filed_staging *staging = NULL;
    zpp_status status = take_staging(filed, &staging, err);
    if (status != ZPP_OK) return status;
    zpp_aio_request *request = NULL;
    (void)walk(filed, unit, MAKE, values, staging->memory);
    if (held) memcpy(held_image(filed, unit), staging->memory, held);
    status = submit_image(filed, unit, staging->memory, true, &request, fault, err);
    if (status == ZPP_OK) status = filed_finish(&request, fault, err);
    give_staging(filed, staging);
    return status;
}
