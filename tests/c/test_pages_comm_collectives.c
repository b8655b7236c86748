/* SPDX-License-Identifier: Apache-2.0
 *
 * test_comm_collectives.c (regions, arenas and collectives) with pages of 64 KiB.
 */
#include "large_pages.h"

#include "test_comm_collectives.c"
