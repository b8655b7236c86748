/* SPDX-License-Identifier: Apache-2.0
 *
 * test_base_mem.c (buffers and reserved address ranges) with pages of 64 KiB.
 */
#include "large_pages.h"

#include "test_base_mem.c"
