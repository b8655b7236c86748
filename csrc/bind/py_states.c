/* SPDX-License-Identifier: Apache-2.0
 *
 * Where the optimizer's states of a unit are, said by the optimizer: in fp32, in fewer bits, or in a tier's file.
 */
#include <stdlib.h>

#include "py_zero.h"

/* New; NULL with an error set. */
static int *group_numbers(const Unit *unit, PyObject *groups) {
    if (PyList_Size(groups) != unit->count) {
        PyErr_Format(PyExc_ValueError, "zero: %zd groups for the %zd parameters of unit %s", PyList_Size(groups),
                     unit->count, unit->unit->name);
        return NULL;
    }
    int *numbers = calloc((size_t)unit->count + 1, sizeof *numbers);
    if (!numbers) PyErr_NoMemory();
    for (Py_ssize_t i = 0; numbers && i < unit->count; i++)
        numbers[i] = (int)PyLong_AsLong(PyList_GetItem(groups, i));
    return numbers;
}

PyObject *zpp_py_set_adam(Unit *unit, PyObject *args) {
    unsigned long long master, exp_avg, exp_avg_sq, max_exp_avg_sq, steps, first_param;
    PyObject *groups;
    if (!PyArg_ParseTuple(args, "KKKKKKO!", &master, &exp_avg, &exp_avg_sq, &max_exp_avg_sq, &steps, &first_param,
                          &PyList_Type, &groups))
        return NULL;
    int *numbers = group_numbers(unit, groups);
    if (!numbers) return NULL;
    free(unit->adam.groups);
    unit->adam = (struct unit_adam){ .master = (float *)(uintptr_t)master, .exp_avg = (float *)(uintptr_t)exp_avg,
                                     .exp_avg_sq = (float *)(uintptr_t)exp_avg_sq,
                                     .max_exp_avg_sq = (float *)(uintptr_t)max_exp_avg_sq,
                                     .first_param = first_param, .steps = (int64_t *)(uintptr_t)steps,
                                     .groups = numbers };
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* (kind, master, steps, number of the first parameter, groups, codes and scales of each moment): addresses, 0: none */
PyObject *zpp_py_set_low_adam(Unit *unit, PyObject *args) {
    unsigned long long master, steps, first_param, codes[3], scales[3];
    int kind;
    PyObject *groups;
    if (!PyArg_ParseTuple(args, "iKKKO!KKKKKK", &kind, &master, &steps, &first_param, &PyList_Type, &groups, &codes[0],
                          &scales[0], &codes[1], &scales[1], &codes[2], &scales[2]))
        return NULL;
    int *numbers = group_numbers(unit, groups);
    if (!numbers) return NULL;
    free(unit->adam.groups);
    unit->adam = (struct unit_adam){ .master = (float *)(uintptr_t)master, .kind = (enum zpp_moments_kind)kind,
                                     .first_param = first_param, .steps = (int64_t *)(uintptr_t)steps,
                                     .groups = numbers };
    for (int k = 0; k < 3; k++)
        unit->adam.moments[k] = (struct zpp_moment){ (void *)(uintptr_t)codes[k], (float *)(uintptr_t)scales[k] };
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

PyObject *zpp_py_set_tiered_adam(Unit *unit, PyObject *args) {
    unsigned long long steps;
    int shard;
    PyObject *groups;
    if (!PyArg_ParseTuple(args, "iKO!", &shard, &steps, &PyList_Type, &groups)) return NULL;
    int *numbers = group_numbers(unit, groups);
    if (!numbers) return NULL;
    free(unit->adam.groups);
    unit->adam = (struct unit_adam){ .steps = (int64_t *)(uintptr_t)steps, .groups = numbers, .tiered = true,
                                     .shard = shard };
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}
