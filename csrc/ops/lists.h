/* SPDX-License-Identifier: Apache-2.0
 *
 * Work over a list of arrays, split over threads in pieces of equal bytes whatever the arrays' lengths, so that a
 * thousand small tensors and one large one are both one call. A cut inside an array falls on a multiple of 32 elements,
 * or where the array's moments may be cut.
 */
#ifndef ZPP_OPS_LISTS_H
#define ZPP_OPS_LISTS_H

#include <stddef.h>
#include "../base/pool.h"
#include "moments/moments.h"

struct zpp_list_item {
    size_t elems, elem_bytes; /* bytes that the work moves for one element: what the split balances */
    struct zpp_moments how;   /* all zero: in fp32, or none */
};

/* Asked once an item and call, in the caller's thread. */
typedef struct zpp_list_item (*zpp_list_item_fn)(size_t index, const void *arg);
/* Elements [begin_elems, end_elems) of item `index`; any thread. */
typedef void (*zpp_list_body_fn)(size_t index, size_t begin_elems, size_t end_elems, const void *arg);

/* pool may be NULL. Never fails. */
void zpp_list_run(size_t items_count, zpp_list_item_fn item_of, zpp_list_body_fn body, const void *arg, zpp_pool *pool);

#endif
