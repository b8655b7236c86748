/* SPDX-License-Identifier: Apache-2.0
 *
 * The pieces of one Adam step, as py_step.c lists them: for a step at once, and for a delayed one (py_delayed.c).
 */
#ifndef ZPP_BIND_PY_ADAM_H
#define ZPP_BIND_PY_ADAM_H

#include "../zero/delayed.h"
#include "../zero/masterless.h"
#include "py_zero.h"

/* From malloc; end with zpp_py_adam_drop, or hand the arrays over. */
struct zpp_py_adam {
    struct zpp_adam_segment *at; /* stepped in memory */
    size_t count, room;
    struct zpp_tier_piece *tiered; /* stepped in the tier */
    size_t tiered_count, tiered_room;
    struct zpp_masterless_piece *masterless; /* in bf16, without an fp32 copy */
    size_t masterless_count, masterless_room;
    struct zpp_adam_f64_segment *f64; /* in float64 */
    size_t f64_count, f64_room;
    bool delayed; /* gradients are taken, new values go to Unit.ahead, and: */
    struct zpp_delayed_copy *copies; /* from there to the slices */
    size_t copies_count, copies_room;
};

/* What every unit is to be stepped with, by the groups of adam_step(); counts the parameters' steps. 0, or -1 with an
 * error set and nothing in `list`. */
int zpp_py_adam_list(Zero *zero, PyObject *groups, bool delayed, struct zpp_py_adam *list);
void zpp_py_adam_drop(struct zpp_py_adam *list);

#endif
