/* SPDX-License-Identifier: Apache-2.0
 *
 * Shard arithmetic, and every move of a unit's life. See unit.h for the pictures.
 *
 *   ahead_bytes   units that are GATHERING or kept, each once; at most prefetch_bytes
 *   full_bytes    units with memory: GATHERING or GATHERED
 */
#include "unit.h"

#include <stdio.h>
#include <string.h>

#include "internal.h"
#include "placement.h"

enum { PARAM_ALIGN_BYTES = 64, LARGE_SHARD_BYTES = 256 * 1024, LARGE_SHARD_ALIGN_BYTES = ZPP_BLOCK_BYTES };
enum { PAGE_ALIGNED_BYTES = 64 * 1024 }; /* units of this size begin at a page */

/* --- layout ------------------------------------------------------------------------------------------------------- */

void zpp_unit_layout(size_t params, const size_t *param_elems, size_t elem_bytes, int ranks, size_t *offset_elems,
                     size_t *elems, size_t *shard_elems) {
    const size_t param_align_elems = PARAM_ALIGN_BYTES / elem_bytes;
    size_t used_elems = 0;
    for (size_t i = 0; i < params; i++) {
        offset_elems[i] = used_elems;
        used_elems += zpp_round_up(param_elems[i], param_align_elems);
    }
    size_t shard_bytes = zpp_round_up(used_elems * elem_bytes, (size_t)ranks) / (size_t)ranks;
    if (shard_bytes == 0) shard_bytes = 1;
    const size_t align_bytes = shard_bytes < LARGE_SHARD_BYTES ? PARAM_ALIGN_BYTES : LARGE_SHARD_ALIGN_BYTES;
    shard_bytes = zpp_round_up(shard_bytes, align_bytes);
    *shard_elems = shard_bytes / elem_bytes;
    *elems = *shard_elems * (size_t)ranks;
}

size_t zpp_unit_next_offset(size_t *used_bytes, size_t bytes) {
    const size_t at = zpp_round_up(*used_bytes, bytes >= PAGE_ALIGNED_BYTES ? zpp_page_bytes() : PARAM_ALIGN_BYTES);
    *used_bytes = at + bytes;
    return at;
}

size_t zpp_unit_pieces(const struct zpp_unit *unit, int rank, struct zpp_piece *pieces) {
    const size_t begin = (size_t)rank * unit->shard_elems, end = begin + unit->shard_elems;
    size_t count = 0;
    for (size_t i = 0; i < unit->params; i++) {
        size_t from = unit->offset_elems[i], to = from + unit->param_elems[i];
        if (from < begin) from = begin;
        if (to > end) to = end;
        if (from >= to) continue;
        pieces[count++] = (struct zpp_piece){ .param = i, .offset_elems = from, .elems = to - from };
    }
    return count;
}

size_t zpp_unit_bytes(const struct zpp_unit *unit) {
    return unit->elems * unit->elem_bytes;
}

size_t zpp_unit_shard_bytes(const struct zpp_unit *unit) {
    return unit->shard_elems * unit->elem_bytes;
}

bool zpp_unit_moves(const struct zpp_unit *unit) {
    return unit->placement->moves;
}

bool zpp_unit_in_file(const struct zpp_unit *unit) {
    return unit->placement->in_file;
}

bool zpp_unit_opens_shard(const struct zpp_unit *unit) {
    return unit->placement->open_shard;
}

enum { WORDS_MODULES = 3 }; /* that a message names, of a unit that several modules share */

const char *zpp_unit_words(const struct zpp_unit *unit, char *text, size_t capacity) {
    if (strcmp(unit->name, "(model)") == 0) {
        snprintf(text, capacity, "the model");
        return text;
    }
    /* Modules are joined by a plus (python/zeropp/zero/model/units.py); a long list is cut off in the name. */
    const bool cut = strlen(unit->name) == sizeof unit->name - 1;
    const char *name = unit->name;
    int used = snprintf(text, capacity, "module%s ", strchr(name, '+') ? "s" : "");
    for (int i = 0; i < WORDS_MODULES && used >= 0 && (size_t)used < capacity; i++) {
        const size_t length = strcspn(name, "+");
        const bool last = name[length] == '\0';
        used += snprintf(text + used, capacity - (size_t)used, "%s'%.*s%s'", i ? ", " : "", (int)length, name,
                         last && cut ? "..." : "");
        if (last) return text;
        name += length + 1;
    }
    if (used >= 0 && (size_t)used < capacity) snprintf(text + used, capacity - (size_t)used, ", ...");
    return text;
}

zpp_status zpp_unit_noticed(const struct zpp_unit *unit, const char *doing, zpp_status status, struct zpp_err *err) {
    char words[ZPP_UNIT_WORDS], at[ZPP_UNIT_WORDS + 8] = "";
    if (status != ZPP_DEVICE || !err) return status;
    const struct zpp_err said = *err;
    if (unit) snprintf(at, sizeof at, "at %s ", zpp_unit_words(unit, words, sizeof words));
    return zpp_fail(err, status,
                    "%s; noticed %sin %s, so what ran on the GPU before is at fault: CUDA_LAUNCH_BLOCKING=1 in the "
                    "environment shows which kernel",
                    said.text, at, doing);
}

bool zpp_unit_words_at(const struct zpp_unit *unit, size_t offset_bytes, char *text, size_t capacity) {
    const size_t elem = offset_bytes / unit->elem_bytes;
    size_t at = 0;
    while (at + 1 < unit->params && unit->offset_elems[at + 1] <= elem) at++; /* the last that begins there or before */
    if (!unit->names || !unit->names[at].text) return false;
    const struct zpp_param_name *name = &unit->names[at];
    if (name->row_elems)
        snprintf(text, capacity, "'%s[%zu]'", name->text,
                 name->first_row + (elem - unit->offset_elems[at]) / name->row_elems);
    else
        snprintf(text, capacity, "'%s'", name->text);
    return true;
}

/* --- memory of the whole unit ------------------------------------------------------------------------------------- */

static zpp_status acquire_memory(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    const zpp_status status = unit->placement->acquire(zero, unit, err);
    if (status != ZPP_OK) return status;
    unit->mapped = true;
    zero->full_bytes += zpp_unit_bytes(unit);
    if (zero->full_bytes > zero->full_peak_bytes) zero->full_peak_bytes = zero->full_bytes;
    return ZPP_OK;
}

static zpp_status release_memory(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    zero->full_bytes -= zpp_unit_bytes(unit);
    return unit->placement->release(zero, unit, err);
}

/* --- kept units, and what is ahead of need ------------------------------------------------------------------------ */

static bool is_ahead(const struct zpp_unit *unit) {
    return unit->state == ZPP_UNIT_GATHERING || unit->kept;
}

bool zpp_unit_fits_ahead(const zpp_zero *zero, const struct zpp_unit *unit) {
    return is_ahead(unit) || zero->ahead_bytes + zpp_unit_bytes(unit) <= zero->options.prefetch_bytes;
}

void zpp_unit_set_kept(zpp_zero *zero, struct zpp_unit *unit, bool kept) {
    const bool was = is_ahead(unit);
    zero->kept_units += kept - unit->kept;
    unit->kept = kept;
    unit->kept_over_step = false;
    if (is_ahead(unit) == was) return;
    if (was) zero->ahead_bytes -= zpp_unit_bytes(unit);
    else zero->ahead_bytes += zpp_unit_bytes(unit);
}

/* --- moves of the parameters -------------------------------------------------------------------------------------- */

zpp_status zpp_unit_gather_begin(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    assert(unit->state == ZPP_UNIT_SHARDED && !zero->stepping);
    zpp_status status = acquire_memory(zero, unit, err);
    if (status != ZPP_OK) return status;
    status = unit->placement->gather(zero, unit, err);
    if (status != ZPP_OK) {
        struct zpp_err ignored = ZPP_ERR_INIT;
        (void)release_memory(zero, unit, &ignored);
        return status;
    }
    unit->state = ZPP_UNIT_GATHERING;
    zero->ahead_bytes += zpp_unit_bytes(unit);
    return ZPP_OK;
}

static zpp_status wait_gather(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait, struct zpp_err *err) {
    if (unit->placement->wait) return unit->placement->wait(zero, unit, wait, err);
    return zpp_stream_wait(zero->compute, unit->ready, wait, err);
}

zpp_status zpp_unit_gather_end(zpp_zero *zero, struct zpp_unit *unit, const struct zpp_wait *wait,
                               struct zpp_err *err) {
    assert(unit->state == ZPP_UNIT_GATHERING);
    const uint64_t began_ns = zpp_span_begin();
    zpp_status status = wait_gather(zero, unit, wait, err);
    if (status != ZPP_OK) return status;
    zpp_span_end(began_ns, ZPP_SPAN_WAIT, "for a gather", 0);
    unit->state = ZPP_UNIT_GATHERED;
    if (!unit->kept) zero->ahead_bytes -= zpp_unit_bytes(unit);
    status = unit->placement->complete ? unit->placement->complete(zero, unit, err) : ZPP_OK;
    if (status == ZPP_OK) return ZPP_OK;
    struct zpp_err ignored = ZPP_ERR_INIT;
    zpp_unit_set_kept(zero, unit, false);
    unit->state = ZPP_UNIT_SHARDED;
    (void)release_memory(zero, unit, &ignored);
    return status;
}

zpp_status zpp_unit_release(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    if (!zpp_unit_moves(unit) || unit->state != ZPP_UNIT_GATHERED || unit->pins || unit->sticky) return ZPP_OK;
    unit->state = unit->kept ? ZPP_UNIT_GATHERING : ZPP_UNIT_SHARDED;
    return unit->kept ? ZPP_OK : release_memory(zero, unit, err);
}

zpp_status zpp_unit_drop_ahead(zpp_zero *zero, struct zpp_unit *unit, struct zpp_err *err) {
    /* A read of a file may be under way. */
    const struct zpp_wait patience = {.timeout_ns = UINT64_C(600000000000), .tick = NULL, .ctx = NULL};
    zpp_unit_set_kept(zero, unit, false);
    const zpp_status status = zpp_unit_gather_end(zero, unit, &patience, err);
    return status == ZPP_OK ? zpp_unit_release(zero, unit, err) : status;
}

zpp_status zpp_zero_release(zpp_zero *zero, int index, struct zpp_err *err) {
    return zpp_unit_release(zero, zero->units[index], err);
}

zpp_status zpp_zero_make_exact(zpp_zero *zero, int index, struct zpp_err *err) {
    struct zpp_unit *unit = zero->units[index];
    if (!unit->quantised || !zpp_unit_is_gathered(unit) || unit->pins) return ZPP_OK;
    unit->quantised = false;
    return unit->placement->make_exact(zero, unit, err);
}

/* --- moves of the shard ------------------------------------------------------------------------------------------- */

zpp_status zpp_zero_keep_shard(zpp_zero *zero, int index, struct zpp_err *err) {
    struct zpp_unit *unit = zero->units[index];
    return unit->placement->keep_shard ? unit->placement->keep_shard(zero, unit, err) : ZPP_OK;
}

zpp_status zpp_zero_publish(zpp_zero *zero, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    for (int i = 0; i < zero->units_count && status == ZPP_OK; i++) {
        struct zpp_unit *unit = zero->units[i];
        if (unit->placement->publish) status = unit->placement->publish(zero, unit, err);
    }
    return status;
}

zpp_status zpp_zero_shard_open(zpp_zero *zero, int index, const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_unit *unit = zero->units[index];
    char words[ZPP_UNIT_WORDS];
    if (!unit->placement->open_shard) return ZPP_OK;
    if (unit->stepping)
        return zpp_fail(err, ZPP_STATE,
                        "zero: the shard of %s is open already; close it with zpp_zero_shard_write_wait",
                        zpp_unit_words(unit, words, sizeof words));
    const zpp_status status = unit->placement->open_shard(zero, unit, wait, err);
    unit->stepping = status == ZPP_OK;
    return status;
}

zpp_status zpp_zero_shard_write_begin(zpp_zero *zero, int index, struct zpp_err *err) {
    struct zpp_unit *unit = zero->units[index];
    return unit->placement->write_begin ? unit->placement->write_begin(zero, unit, err) : ZPP_OK;
}

zpp_status zpp_zero_shard_write_wait(zpp_zero *zero, int index, struct zpp_err *err) {
    struct zpp_unit *unit = zero->units[index];
    const zpp_status status = unit->placement->write_wait ? unit->placement->write_wait(zero, unit, err) : ZPP_OK;
    const bool open = unit->stepping;
    unit->stepping = false;
    if (!open || !unit->placement->close_shard) return status;
    struct zpp_err second = ZPP_ERR_INIT;
    const zpp_status closed = unit->placement->close_shard(zero, unit, status == ZPP_OK ? err : &second);
    return status == ZPP_OK ? closed : status;
}

/* --- moves of the gradient ---------------------------------------------------------------------------------------- */

void zpp_unit_grad_accumulate(struct zpp_unit_grad *grad) {
    assert(grad->state == ZPP_GRAD_EMPTY || grad->state == ZPP_GRAD_REDUCED);
    grad->state = ZPP_GRAD_ACCUMULATING;
}

void zpp_unit_grad_reduce(struct zpp_unit_grad *grad) {
    assert(grad->state != ZPP_GRAD_REDUCING);
    grad->state = ZPP_GRAD_REDUCING;
}

void zpp_unit_grad_reduced(struct zpp_unit_grad *grad) {
    assert(grad->state == ZPP_GRAD_REDUCING);
    grad->state = ZPP_GRAD_REDUCED;
}

void zpp_unit_grad_discard(struct zpp_unit_grad *grad) {
    assert(grad->state == ZPP_GRAD_ACCUMULATING);
    grad->state = ZPP_GRAD_EMPTY;
}
