/* SPDX-License-Identifier: Apache-2.0
 *
 * Stray reads of the home that the ranks of a host share (filed.h, base/stray.h). Each rank opens and closes units in
 * its own mapping of the home. A stray read of a closed unit puts private pages of NaN over the shared pages, on this
 * rank alone. Before the unit opens, the shared mapping is restored from the alias: a second mapping of the same pages
 * that nothing reads.
 */
#include <errno.h>
#include <sys/mman.h>

#include "filed_internal.h"

static size_t watched_bytes(const zpp_filed *filed) { return filed->home_bytes - filed->cut_bytes; }

static bool is_hole(const void *ctx, size_t offset_bytes, size_t *begin_bytes, size_t *end_bytes) {
    const zpp_filed *filed = ctx;
    const struct filed_unit *unit = filed_unit_at(filed, filed->cut_bytes + offset_bytes);
    const size_t begin = unit->offset_bytes < filed->cut_bytes ? filed->cut_bytes : unit->offset_bytes;
    *begin_bytes = begin - filed->cut_bytes;
    *end_bytes = unit->offset_bytes + unit->bytes - filed->cut_bytes;
    return !unit->open;
}

/* With an old size of 0, mremap makes another mapping of the same shared pages, without access, as the alias is. */
static bool show_shared(const zpp_filed *filed, size_t offset_bytes, size_t bytes) {
    unsigned char *to = filed->home + filed->cut_bytes + offset_bytes;
    return mremap(filed->alias + offset_bytes, 0, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to;
}

static void close_hole(const void *ctx, size_t begin_bytes, size_t end_bytes) {
    (void)show_shared(ctx, begin_bytes, end_bytes - begin_bytes); /* if it fails, NaN stays until the unit opens */
}

zpp_status filed_stray_watch(zpp_filed *filed, struct zpp_err *err) {
    const size_t bytes = watched_bytes(filed);
    if (!bytes) return ZPP_OK;
    unsigned char *base = filed->home + filed->cut_bytes;
    void *alias = mremap(base, 0, bytes, MREMAP_MAYMOVE);
    if (alias == MAP_FAILED) return zpp_fail_os(err, errno, "params: a second mapping of %zu bytes", bytes);
    filed->alias = alias;
    const struct zpp_stray_spec spec = { base, bytes, filed, is_hole, close_hole };
    return zpp_stray_watch(&spec, &filed->stray, err);
}

void filed_stray_unwatch(zpp_filed *filed) {
    zpp_stray_unwatch(filed->stray);
    if (filed->alias) munmap(filed->alias, watched_bytes(filed));
}

int filed_home_open(zpp_filed *filed, struct filed_unit *unit, size_t offset_bytes, size_t bytes) {
    int failed = 0;
    zpp_stray_lock(filed->stray);
    const bool covered = zpp_stray_has_pages(filed->stray);
    if (covered && !show_shared(filed, offset_bytes - filed->cut_bytes, bytes)) failed = errno;
    if (!failed && mprotect(filed->home + offset_bytes, bytes, PROT_READ | PROT_WRITE) != 0) failed = errno;
    unit->open = !failed;
    zpp_stray_unlock(filed->stray);
    return failed;
}

int filed_home_close(zpp_filed *filed, struct filed_unit *unit, size_t offset_bytes, size_t bytes) {
    zpp_stray_keep_handler();
    zpp_stray_lock(filed->stray);
    const int failed = mprotect(filed->home + offset_bytes, bytes, PROT_NONE) != 0 ? errno : 0;
    unit->open = false;
    zpp_stray_unlock(filed->stray);
    return failed;
}
