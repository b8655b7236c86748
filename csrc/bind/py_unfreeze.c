/* SPDX-License-Identifier: Apache-2.0
 *
 * Parameters that are frozen and unfrozen: what the facade calls, and is asked (docs/design/0034).
 */
#include "py_zero.h"
#include "raise.h"

/* wake(unit): it gets gradients from now on. */
static PyObject *zero_unfreeze(PyObject *self, PyObject *arg) {
    Zero *zero = (Zero *)self;
    struct zpp_err err = ZPP_ERR_INIT;
    long task = -1;
    const long unit = PyLong_AsLong(arg);
    if (unit == -1 && PyErr_Occurred()) return NULL;
    const bool runs = zpp_py_backward_runs(zero, &task);
    if (PyErr_Occurred() || (!runs && zero->in_backward && zpp_py_forget_dead_backward(zero))) return NULL;
    if (zpp_zero_unfreeze(zero->core, (int)unit, &err) != ZPP_OK) return zpp_py_raise(&err);
    Py_RETURN_NONE;
}

/* skip(unit, parameter): frozen, so in the backward that has just begun the reduction does not wait for its gradient.
 * (To let go of the unit does wait: frozen weights may be read when all gradients are in.) */
static PyObject *zero_skip(PyObject *self, PyObject *args) {
    int unit;
    Py_ssize_t param;
    if (!PyArg_ParseTuple(args, "in", &unit, &param)) return NULL;
    zpp_zero_skip(((Zero *)self)->core, unit, (size_t)param);
    Py_RETURN_NONE;
}

static void replace(PyObject **at, PyObject *callable) {
    PyObject *old = *at;
    *at = callable == Py_None ? NULL : Py_NewRef(callable);
    Py_XDECREF(old);
}

/* set_look(before a forward that builds a graph, when a backward begins): callables without arguments, or None. */
static PyObject *zero_set_look(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    PyObject *look, *skipped;
    if (!PyArg_ParseTuple(args, "OO", &look, &skipped)) return NULL;
    replace(&zero->look, look);
    replace(&zero->skipped, skipped);
    Py_RETURN_NONE;
}

PyMethodDef zpp_py_unfreeze_methods[] = {
    { "unfreeze", zero_unfreeze, METH_O, "unfreeze(unit): enable gradients of a unit that was frozen at prepare." },
    { "skip", zero_skip, METH_VARARGS, "skip(unit, i): no gradient of parameter i comes in this backward." },
    { "set_look", zero_set_look, METH_VARARGS, "set_look(before forwards that build a graph, as backwards begin)" },
    { NULL, NULL, 0, NULL },
};
