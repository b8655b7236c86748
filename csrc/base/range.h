/* SPDX-License-Identifier: Apache-2.0
 *
 * Internals of range.c for its tests: how released pages are kept.
 */
#ifndef ZPP_BASE_RANGE_H
#define ZPP_BASE_RANGE_H

#include "mem.h"

/* True where the kernel can move pages out of a range and leave the hole mapped (Linux 5.7; gVisor cannot). */
bool zpp_range_moves(const zpp_range *range);
/* Return released pages to the system from now on, as on a kernel that cannot move them. Call it only while nothing is
 * mapped. */
void zpp_range_forbid_moves(zpp_range *range);

#endif
