/* SPDX-License-Identifier: Apache-2.0
 *
 * Stray reads of the mapping that the ranks of a host share (unit_file.h, base/stray.h). Each rank opens and closes
 * units in its own mapping of the mapping. A stray read of a closed unit puts private pages of NaN over the shared
 * pages, on this rank alone. Before the unit opens, the shared mapping is restored from the alias: a second mapping of
 * the same pages that nothing reads.
 */
#include <errno.h>
#include <sys/mman.h>

#include "unit_file_internal.h"

static size_t watched_bytes(const zpp_unit_file *unit_file) { return unit_file->mapping_bytes - unit_file->cut_bytes; }

static bool is_hole(const void *ctx, size_t offset_bytes, size_t *begin_bytes, size_t *end_bytes) {
    const zpp_unit_file *unit_file = ctx;
    const struct unit_file_unit *unit = unit_file_unit_at(unit_file, unit_file->cut_bytes + offset_bytes);
    const size_t begin = unit->offset_bytes < unit_file->cut_bytes ? unit_file->cut_bytes : unit->offset_bytes;
    *begin_bytes = begin - unit_file->cut_bytes;
    *end_bytes = unit->offset_bytes + unit->bytes - unit_file->cut_bytes;
    return !unit->open;
}

/* With an old size of 0, mremap makes another mapping of the same shared pages, without access, as the alias is. */
static bool show_shared(const zpp_unit_file *unit_file, size_t offset_bytes, size_t bytes) {
    unsigned char *to = unit_file->mapping + unit_file->cut_bytes + offset_bytes;
    return mremap(unit_file->alias + offset_bytes, 0, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to;
}

static void close_hole(const void *ctx, size_t begin_bytes, size_t end_bytes) {
    (void)show_shared(ctx, begin_bytes, end_bytes - begin_bytes); /* if it fails, NaN stays until the unit opens */
}

zpp_status unit_file_stray_watch(zpp_unit_file *unit_file, struct zpp_err *err) {
    const size_t bytes = watched_bytes(unit_file);
    if (!bytes) return ZPP_OK;
    unsigned char *base = unit_file->mapping + unit_file->cut_bytes;
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

int unit_file_home_open(zpp_unit_file *unit_file, struct unit_file_unit *unit, size_t offset_bytes, size_t bytes) {
    int failed = 0;
    zpp_stray_lock(unit_file->stray);
    const bool covered = zpp_stray_has_pages(unit_file->stray);
    if (covered && !show_shared(unit_file, offset_bytes - unit_file->cut_bytes, bytes)) failed = errno;
    if (!failed && mprotect(unit_file->mapping + offset_bytes, bytes, PROT_READ | PROT_WRITE) != 0) failed = errno;
    unit->open = !failed;
    zpp_stray_unlock(unit_file->stray);
    return failed;
}

int unit_file_home_close(zpp_unit_file *unit_file, struct unit_file_unit *unit, size_t offset_bytes, size_t bytes) {
    zpp_stray_keep_handler();
    zpp_stray_lock(unit_file->stray);
    const int failed = mprotect(unit_file->mapping + offset_bytes, bytes, PROT_NONE) != 0 ? errno : 0;
    unit->open = false;
    zpp_stray_unlock(unit_file->stray);
    return failed;
}
