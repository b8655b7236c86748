/* SPDX-License-Identifier: Apache-2.0
 *
 * What the tests of csrc/zero/filed.h share: the file that meets system calls whose failures are planned.
 */
#ifndef ZPP_TESTS_FILED_COMMON_H
#define ZPP_TESTS_FILED_COMMON_H

#include "../../csrc/base/mem.h"
#include "../../csrc/zero/filed.h"
#include "aio_common.h"
#include "planned_io.h"

enum { PAGE = ZPP_PAGE_BYTES };

/* `block_bytes`: of one operation. */
static inline zpp_status open_blocks(zpp_filed *filed, bool make, size_t block_bytes, struct zpp_aio_fault *fault,
                              struct zpp_err *err) {
    const struct zpp_filed_file file = { .path = in_folder("params"), .make = make, .depth = 8,
                                         .block_bytes = block_bytes, .log = count_log, .sys = &sys };
    return zpp_filed_open(filed, &file, fault, err);
}

#endif
