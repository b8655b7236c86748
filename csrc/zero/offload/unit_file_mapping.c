/* SPDX-License-Identifier: Apache-2.0
 *
 * Where the units of a unit file are: the part of each that is not resident, its place in the file, and the pages of
 * the mapping.
 *
 * Stray reads of a mapping that the ranks of a host share (base/stray.h): each rank opens and closes units in its own
 * view of the mapping. A stray read of a closed unit puts private pages of NaN over the shared pages, on this rank
 * alone. Before the unit opens, the shared pages are restored from the alias: a second mapping of the same pages that
 * nothing reads.
 */
#include <assert.h>
#include <errno.h>
#include <sys/mman.h>

#include "unit_file_internal.h"

/* --- places ------------------------------------------------------------------------------------------------------- */

bool zpp_unit_file_is_held(const zpp_unit_file *unit_file, int unit) {
    return unit_file->units[unit].offset_bytes + unit_file->units[unit].bytes <= unit_file->resident_bytes;
}

bool unit_file_in_mapping(const zpp_unit_file *unit_file, const void *address) {
    const unsigned char *at = address;
    return at && unit_file->mapping && at >= unit_file->mapping && at < unit_file->mapping + unit_file->mapping_bytes;
}

bool zpp_unit_file_on_disk(const zpp_unit_file *unit_file, const void *address) {
    return unit_file_in_mapping(unit_file, address)
        && (const unsigned char *)address >= unit_file->mapping + unit_file->resident_bytes;
}

size_t zpp_unit_file_run(const zpp_unit_file *unit_file, const void *address, size_t elems, size_t elem_bytes) {
    if (!unit_file_in_mapping(unit_file, address)) return elems;
    const size_t offset = (size_t)((const unsigned char *)address - unit_file->mapping);
    if (offset >= unit_file->resident_bytes) return elems;
    /* Resident bytes are whole pages, which elements divide. */
    const size_t left = (unit_file->resident_bytes - offset) / elem_bytes;
    return left < elems ? left : elems;
}

size_t unit_file_moving_part(const zpp_unit_file *unit_file, const struct unit_file_unit *unit,
                             size_t *offset_bytes) {
    const size_t end = unit->offset_bytes + unit->bytes;
    *offset_bytes = unit->offset_bytes < unit_file->resident_bytes ? unit_file->resident_bytes : unit->offset_bytes;
    return *offset_bytes < end ? end - *offset_bytes : 0;
}

const struct unit_file_unit *unit_file_unit_at(const zpp_unit_file *unit_file, size_t offset_bytes) {
    int low = 0, high = unit_file->units_count - 1;
    while (low < high) { /* the last one that begins there or before */
        const int middle = (low + high + 1) / 2;
        if (unit_file->units[middle].offset_bytes <= offset_bytes) low = middle;
        else high = middle - 1;
    }
    return &unit_file->units[low];
}

static uint64_t place_in_file(const zpp_unit_file *unit_file, size_t offset_bytes, bool next) {
    const struct unit_file_unit *unit = unit_file_unit_at(unit_file, offset_bytes);
    size_t begin_bytes;
    (void)unit_file_moving_part(unit_file, unit, &begin_bytes);
    assert(unit->two || !next);
    const bool second = unit->two && unit->flipped != next;
    return (second ? unit->second_offset_bytes : unit->first_offset_bytes) + (offset_bytes - begin_bytes);
}

zpp_status unit_file_submit(zpp_unit_file *unit_file, size_t offset_bytes, void *memory, size_t bytes, bool write,
                            bool next, zpp_aio_request **out, struct zpp_aio_fault *fault, struct zpp_err *err) {
    assert(offset_bytes >= unit_file->resident_bytes && offset_bytes + bytes <= unit_file->mapping_bytes);
    const uint64_t place = place_in_file(unit_file, offset_bytes, next);
    /* no gap between */
    assert(!bytes || place_in_file(unit_file, offset_bytes + bytes - 1, next) == place + bytes - 1);
    return zpp_scratch_submit(&unit_file->file, place, memory, bytes, write, out, fault, err);
}

zpp_status unit_file_move(zpp_unit_file *unit_file, size_t offset_bytes, void *memory, size_t bytes, bool write,
                          bool next, struct zpp_aio_fault *fault, struct zpp_err *err) {
    zpp_aio_request *request = NULL;
    const zpp_status status =
        unit_file_submit(unit_file, offset_bytes, memory, bytes, write, next, &request, fault, err);
    return status == ZPP_OK ? zpp_scratch_finish(&request, fault, err) : status;
}

void zpp_unit_file_flip(zpp_unit_file *unit_file, int unit) {
    assert(unit_file->units[unit].two);
    unit_file->units[unit].flipped = !unit_file->units[unit].flipped;
}

/* --- stray reads -------------------------------------------------------------------------------------------------- */

static size_t watched_bytes(const zpp_unit_file *unit_file) {
    return unit_file->mapping_bytes - unit_file->resident_bytes;
}

static bool is_hole(const void *ctx, size_t offset_bytes, size_t *begin_bytes, size_t *end_bytes) {
    const zpp_unit_file *unit_file = ctx;
    const struct unit_file_unit *unit = unit_file_unit_at(unit_file, unit_file->resident_bytes + offset_bytes);
    size_t begin;
    const size_t bytes = unit_file_moving_part(unit_file, unit, &begin);
    *begin_bytes = begin - unit_file->resident_bytes;
    *end_bytes = *begin_bytes + bytes;
    return !unit->open;
}

/* With an old size of 0, mremap makes another mapping of the same shared pages, without access, as the alias is. */
static bool show_shared(const zpp_unit_file *unit_file, size_t offset_bytes, size_t bytes) {
    unsigned char *to = unit_file->mapping + unit_file->resident_bytes + offset_bytes;
    return mremap(unit_file->alias + offset_bytes, 0, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to;
}

static void close_hole(const void *ctx, size_t begin_bytes, size_t end_bytes) {
    (void)show_shared(ctx, begin_bytes, end_bytes - begin_bytes); /* if it fails, NaN stays until the unit opens */
}

zpp_status unit_file_stray_watch(zpp_unit_file *unit_file, struct zpp_err *err) {
    const size_t bytes = watched_bytes(unit_file);
    if (!bytes) return ZPP_OK;
    unsigned char *base = unit_file->mapping + unit_file->resident_bytes;
    void *alias = mremap(base, 0, bytes, MREMAP_MAYMOVE);
    if (alias == MAP_FAILED) return zpp_fail_os(err, errno, "params: a second mapping of %zu bytes", bytes);
    unit_file->alias = alias;
    const struct zpp_stray_spec spec = { base, bytes, unit_file, is_hole, close_hole };
    return zpp_stray_watch(&spec, &unit_file->stray, err);
}

void unit_file_stray_unwatch(zpp_unit_file *unit_file) {
    zpp_stray_unwatch(unit_file->stray);
    if (unit_file->alias) munmap(unit_file->alias, watched_bytes(unit_file));
}

int unit_file_open_pages(zpp_unit_file *unit_file, struct unit_file_unit *unit, size_t offset_bytes, size_t bytes) {
    int failed = 0;
    zpp_stray_lock(unit_file->stray);
    const bool covered = zpp_stray_has_pages(unit_file->stray);
    if (covered && !show_shared(unit_file, offset_bytes - unit_file->resident_bytes, bytes)) failed = errno;
    if (!failed && mprotect(unit_file->mapping + offset_bytes, bytes, PROT_READ | PROT_WRITE) != 0) failed = errno;
    unit->open = !failed;
    zpp_stray_unlock(unit_file->stray);
    return failed;
}

int unit_file_close_pages(zpp_unit_file *unit_file, struct unit_file_unit *unit, size_t offset_bytes, size_t bytes) {
    zpp_stray_keep_handler();
    zpp_stray_lock(unit_file->stray);
    const int failed = mprotect(unit_file->mapping + offset_bytes, bytes, PROT_NONE) != 0 ? errno : 0;
    unit->open = false;
    zpp_stray_unlock(unit_file->stray);
    return failed;
}
