/* SPDX-License-Identifier: Apache-2.0
 *
 * Pages of 64 KiB, as some aarch64 kernels have, for programs that run a whole test with them: this takes the place of
 * csrc/base/page.c. The machine's own pages are smaller and divide these, so what is right for 64 KiB maps here, too.
 */
#ifndef ZPP_TESTS_LARGE_PAGES_H
#define ZPP_TESTS_LARGE_PAGES_H

#include "../../csrc/base/mem.h"

#undef TEST_PAGE_BYTES
#define TEST_PAGE_BYTES 65536
size_t zpp_page_bytes(void) { return TEST_PAGE_BYTES; }

#endif
