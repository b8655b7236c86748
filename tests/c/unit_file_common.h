/* SPDX-License-Identifier: Apache-2.0
 *
 * What the tests of csrc/zero/offload/unit_file.h share: the file that meets system calls whose failures are planned.
 */
#ifndef ZPP_TESTS_UNIT_FILE_COMMON_H
#define ZPP_TESTS_UNIT_FILE_COMMON_H

#include "../../csrc/base/mem.h"
#include "../../csrc/zero/offload/unit_file.h"
#include "aio_common.h"
#include "planned_io.h"

#ifndef TEST_PAGE_BYTES /* run.py and large_pages.h define it where pages are larger */
#define TEST_PAGE_BYTES 4096
#endif
enum { PAGE = TEST_PAGE_BYTES };

/* How files are made from now on; zeros: one file, without checksums. */
static struct {
    unsigned disks;
    size_t stripe_bytes;
    bool checksums;
} spread;

/* `block_bytes`: of one operation. */
static inline zpp_status open_blocks(zpp_unit_file *unit_file, bool make, size_t block_bytes,
                                     struct zpp_aio_fault *fault,
                              struct zpp_err *err) {
    const struct zpp_scratch_options file = { .path = spread.disks ? "params" : in_folder("params"),
                                              .folders = disk_folders(spread.disks), .folders_count = spread.disks,
                                              .stripe_bytes = spread.stripe_bytes, .checksums = spread.checksums,
                                              .depth = 8, .block_bytes = block_bytes, .log = count_log, .sys = &sys };
    return zpp_unit_file_open(unit_file, &file, make, fault, err);
}

static inline void remove_file(void) {
    if (!spread.disks) CHECK_EQUAL(unlink(in_folder("params")), 0);
    for (unsigned disk = 0; disk < spread.disks; disk++) CHECK_EQUAL(unlink(on_disk(disk, "params")), 0);
}

#endif
