/* SPDX-License-Identifier: Apache-2.0
 *
 * The pieces of one Adam step, as py_step.c lists them: for a step at once, and for a delayed one (py_delayed.c).
 */
#ifndef ZPP_BIND_PY_ADAM_H
#define ZPP_BIND_PY_ADAM_H

#include "../ops/adam/adam.h"
#include "../zero/step_delayed.h"
#include "../zero/no_master.h"
#include "py_zero.h"

/* From malloc; end with zpp_py_adam_drop, or hand the arrays over. */
struct zpp_py_adam {
    struct zpp_optim_segment *at; /* stepped in memory */
    size_t count, room;
    struct zpp_optim_file_piece *tiered; /* stepped in the tier */
    size_t tiered_count, tiered_room;
    struct zpp_no_master_piece *masterless; /* in bf16, without an fp32 copy */
    size_t masterless_count, masterless_room;
    struct zpp_adam_f64_segment *f64; /* in float64 */
    size_t f64_count, f64_room;
    bool delayed; /* gradients are taken, new values go to Unit.ahead, and: */
    struct zpp_delayed_copy *copies; /* from there to the shards */
    size_t copies_count, copies_room;
    struct zpp_delayed_rest *rests; /* of units in a file: what is not stepped, */
    size_t rests_count, rests_room;
    int *turns; /* and which of them are */
    size_t turns_count, turns_room;
};

/* What every unit is to be stepped with, by the groups of adam_step(); counts the parameters' steps. 0, or -1 with an
 * error set and nothing in `list`. */
int zpp_py_adam_list(Zero *zero, PyObject *groups, bool delayed, struct zpp_py_adam *list);
void zpp_py_adam_drop(struct zpp_py_adam *list);

/* For a step unit by unit (py_step_in_backward.c). */
/* One unit more in `list`; -1: no memory, or an error is set. */
int zpp_py_adam_unit(Zero *zero, Unit *unit, const struct zpp_optim_segment *groups, struct zpp_py_adam *list);
/* The groups of adam_step(), from malloc; NULL with an error set. */
struct zpp_optim_segment *zpp_py_read_groups(PyObject *groups);
/* The first parameter whose gradient in this rank's shard is not finite; -1: none. Not 0: no memory. */
int zpp_py_unit_norm(const Zero *zero, const Unit *unit, int64_t *bad_param);
/* Local gradients: p.grad is held, until it is forgotten and None. */
int zpp_py_hold_gradients(Unit *unit, bool *any);
int zpp_py_forget_gradients(Unit *unit);

#endif
