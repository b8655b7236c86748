/* SPDX-License-Identifier: Apache-2.0
 *
 * The order in which a curriculum draws samples: at random, without replacement, from a pool that grows.
 *
 * The pool is one array. A position below `left` holds a sample that this round has not drawn yet, one from `left` to
 * below `admitted` a sample that it has drawn, and one from `admitted` on a sample that no step may draw yet, in the
 * order of admission. A draw takes a random position below `left`, and swaps its sample with the last one there
 * (Durstenfeld 1964, "Algorithm 235"). An admitted sample takes the place of the first drawn one. Where nothing is
 * left, a round ends, and the next one begins with all that is admitted. So no sample is drawn twice before every
 * admitted one was drawn.
 */
#ifndef ZPP_OPS_DRAW_H
#define ZPP_OPS_DRAW_H

#include <stddef.h>
#include <stdint.h>
#include "../../base/device.h"

struct zpp_draw {
    uint64_t random;         /* the generator's state: at first, the seed */
    uint64_t admitted, left; /* at first 0 */
};

/* Draw `batch` samples for each of `steps` steps. `order` is [steps][batch]. At step t the first wanted[t] samples of
 * the order of admission are admitted. The state goes on from call to call: the order is the same however many calls
 * make it. INVALID, with the step, and no state changed: wanted[t] is 0, above `samples`, or below the step before. */
zpp_status zpp_draw_order(int32_t *pool, size_t samples, struct zpp_draw *draw, const int64_t *wanted, size_t steps,
                          size_t batch, int32_t *order, struct zpp_err *err);

#endif
