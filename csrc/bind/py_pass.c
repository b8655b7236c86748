/* SPDX-License-Identifier: Apache-2.0
 *
 * One pass of several backwards (zero/pass.c): python/zeropp/parallel/pipeline.py opens it, says before each backward
 * whose gradients come, and closes it. A backward that was not announced gives no gradients: torch runs one to find out
 * shapes, and one for the inputs alone where it splits a backward into two.
 */
#include "py_zero.h"

#include "raise.h"

static int raise_state(const char *sentence) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_fail(&err, ZPP_STATE, "%s", sentence);
    zpp_py_raise(&err);
    return -1;
}

/* --- what the façade calls ---------------------------------------------------------------------------------------- */

/* require_pass(): no backward is a pass of its own from now on. */
static PyObject *zero_require_pass(PyObject *self, PyObject *unused) {
    (void)unused;
    ((Zero *)self)->pass.required = true;
    Py_RETURN_NONE;
}

/* pass_open(each, parts): the mean over `parts` micro-batches; each: reduce at the end of every graph. */
static PyObject *zero_pass_open(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    int each, parts;
    if (!PyArg_ParseTuple(args, "pi", &each, &parts)) return NULL;
    if (zero->pass.open || zero->in_backward)
        return raise_state("zero: a pass opens inside a backward or a pass"), NULL;
    if (zero->micro && parts != zero->pass.parts) {
        PyErr_Format(PyExc_ValueError,
                     "zero: a step of %d micro-batches after one of %d, within Config(accumulate=%d); wanted as many "
                     "in each", parts, zero->pass.parts, zero->accumulate);
        return NULL;
    }
    if (zpp_py_settle(zero)) return NULL;
    const bool required = zero->pass.required;
    zero->pass = (struct zpp_py_pass){.required = required, .open = true, .each = each, .parts = parts};
    zpp_zero_set_grad_scale(zero->core, 1.0 / (zero->accumulate * parts));
    zpp_py_drive(zero);
    Py_RETURN_NONE;
}

/* pass_graph(units, forwards): the next backward has gradients of these units: bytes, an enum of zero.h for each. */
static PyObject *zero_pass_graph(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    PyObject *units;
    int forwards;
    if (!PyArg_ParseTuple(args, "Si", &units, &forwards)) return NULL;
    if (PyBytes_Size(units) != PyList_Size(zero->units)) {
        PyErr_SetString(PyExc_ValueError, "pass_graph: wanted one byte for each unit");
        return NULL;
    }
    if (!zero->pass.open) return raise_state("zero: a graph is announced, and no pass is open"), NULL;
    Py_XDECREF(zero->pass.units);
    zero->pass.units = Py_NewRef(units);
    zero->pass.forwards = forwards;
    Py_RETURN_NONE;
}

/* pass_take(): the gradients that torch has put into p.grad, of the units of pass_graph, as if a backward had brought
 * them. */
static PyObject *zero_pass_take(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    if (!zero->pass.units) return raise_state("zero: gradients are taken of a graph that was not announced"), NULL;
    if (zpp_py_follow(zero) || zpp_py_graph_begin(zero)) return NULL;
    const char *units = PyBytes_AsString(zero->pass.units);
    for (Py_ssize_t at = 0; at < PyList_Size(zero->units); at++) {
        Unit *unit = (Unit *)PyList_GetItem(zero->units, at);
        if (units[at] == ZPP_GRAPH_WITHOUT || !unit->unit->trainable) continue;
        unit->got = 0;
        for (Py_ssize_t i = 0; i < unit->count; i++)
            if (zpp_zero_takes_grads(zero->core) && zpp_py_take_from_param(unit, i)) return NULL;
    }
    if (zpp_py_graph_end(zero)) return NULL;
    Py_RETURN_NONE;
}

static int gather(Unit *unit) { return zpp_py_need(unit, ZPP_PHASE_BACKWARD); }

static int pin(Unit *unit) {
    unit->unit->pins++;
    return 0;
}

static int unpin(Unit *unit) {
    unit->unit->pins--;
    return 0;
}

/* Call `each` for the units of a graph until one fails; 0, or -1 with an error set. */
static int for_units(Zero *zero, PyObject *units, int (*each)(Unit *)) {
    int failed = 0;
    for (Py_ssize_t at = 0; !failed && at < PyList_Size(zero->units) && at < PyBytes_Size(units); at++)
        if (PyBytes_AsString(units)[at] != ZPP_GRAPH_WITHOUT) failed = each((Unit *)PyList_GetItem(zero->units, at));
    return failed;
}

/* pass_hold(units, by): +1 keeps units whole, and their parameters plain tensors, until -1. An error leaves no unit
 * held. */
static PyObject *zero_pass_hold(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    PyObject *units;
    int by;
    if (!PyArg_ParseTuple(args, "Si", &units, &by)) return NULL;
    int failed = by > 0 ? for_units(zero, units, gather) : for_units(zero, units, unpin);
    if (!failed) failed = by > 0 ? for_units(zero, units, pin) : for_units(zero, units, zpp_py_release);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

/* Results have to be there at once where no reduction is left to others' waits (one rank), where p.grad shows them
 * (stage 0), and where a GPU has them. */
static bool settles_at_once(const Zero *zero) { return zero->stage == 0 || zero->ranks == 1 || zero->accelerator; }

/* pass_close(): no backward of the pass follows. zpp_py_settle waits for its reductions. */
static PyObject *zero_pass_close(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    struct zpp_py_pass *pass = &zero->pass;
    Py_CLEAR(pass->units);
    if (pass->begun) {
        if (zpp_py_follow(zero) || zpp_py_run_end(zero, zpp_zero_pass_close)) return NULL;
        pass->unsettled = true;
        zero->backwards++;
        zero->at_boundary = zero->boundary;
    } else {
        zpp_py_drive_no_more(zero);
    }
    pass->open = pass->begun = false;
    zero->builds_loss = false;
    if ((settles_at_once(zero) && zpp_py_settle(zero)) || zpp_py_end_pass(zero)) return NULL;
    Py_RETURN_NONE;
}

/* set_settled(callable): called when a pass at a boundary was reduced, before anything reads its gradients. */
static PyObject *zero_set_settled(PyObject *self, PyObject *callable) {
    Zero *zero = (Zero *)self;
    Py_XDECREF(zero->settled);
    zero->settled = Py_NewRef(callable);
    Py_RETURN_NONE;
}

/* pass_abort(): the schedule ended by an exception. */
static PyObject *zero_pass_abort(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    zpp_py_pass_end(zero);
    zero->pass.open = zero->pass.begun = false;
    zero->in_backward = zero->builds_loss = false;
    zpp_zero_backward_abort(zero->core);
    if (zpp_py_release_all(zero)) return NULL;
    Py_RETURN_NONE;
}

PyMethodDef zpp_py_pass_methods[] = {
    { "require_pass", zero_require_pass, METH_NOARGS, "No backward is a pass of its own from now on." },
    { "pass_open", zero_pass_open, METH_VARARGS, "pass_open(each, parts): the backwards of a schedule's step begin." },
    { "pass_graph", zero_pass_graph, METH_VARARGS, "pass_graph(units, forwards): whose gradients come next." },
    { "pass_take", zero_pass_take, METH_NOARGS, "Take the gradients of these units out of p.grad." },
    { "pass_hold", zero_pass_hold, METH_VARARGS, "pass_hold(units, by): keep units whole, +1, until -1." },
    { "pass_close", zero_pass_close, METH_NOARGS, "No backward of the pass follows." },
    { "set_settled", zero_set_settled, METH_O, "set_settled(callable): called when a pass was reduced." },
    { "pass_abort", zero_pass_abort, METH_NOARGS, "The schedule ended by an exception." },
    { NULL, NULL, 0, NULL },
};
