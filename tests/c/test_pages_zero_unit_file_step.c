/* SPDX-License-Identifier: Apache-2.0
 *
 * test_zero_unit_file_step.c (parameters in files, stepped there) with pages of 64 KiB.
 */
#include "large_pages.h"

#include "test_zero_unit_file_step.c"
