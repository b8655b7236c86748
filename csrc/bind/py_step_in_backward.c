/* SPDX-License-Identifier: Apache-2.0
 *
 * The step inside the backward (zero/step_in_backward.h), as backward.c drives it and
 * python/zeropp/zero/step/step_in_backward.py sets it up: Python's callables stand in the table of the caller.
 */
#include <stdlib.h>

#include "raise.h"
#include "py_zero.h"

static Unit *unit_at(void *zero, int index) {
    return (Unit *)PyList_GetItem(((Zero *)zero)->units, index);
}

/* Return the step, whose stepper has the optimizer file of now; NULL where steps are not inside the backward. */
static zpp_step_in_backward *step_of(Zero *zero) {
    zero->stepper.optim_file = zero->optim_file ? zpp_py_optim_file_get(zero->optim_file) : NULL;
    if (zero->optim_file && !zero->stepper.optim_file) PyErr_Clear(); /* closed with the model */
    return zero->backward_step.core;
}

/* 0, or -1 with an error set. */
static int raise_if(zpp_status status, const struct zpp_err *err) {
    if (status == ZPP_OK) return 0;
    zpp_py_raise(err);
    return -1;
}

/* --- the table of the caller -------------------------------------------------------------------------------------- */

static int call_with_unit(PyObject *callable, int unit) {
    PyObject *done = PyObject_CallFunction(callable, "i", unit);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int mark_final(void *zero, int unit) {
    return call_with_unit(((Zero *)zero)->backward_step.mark_final, unit);
}

static int update_in_python(void *zero, int unit) {
    return call_with_unit(((Zero *)zero)->backward_step.step, unit);
}

static int hold_grads(void *zero, int unit, bool *any) {
    return zpp_py_hold_gradients(unit_at(zero, unit), any);
}

static int forget_grads(void *zero, int unit) {
    return zpp_py_forget_gradients(unit_at(zero, unit));
}

static int release(void *zero, int unit) {
    return ((Zero *)zero)->closed ? 0 : zpp_py_release(unit_at(zero, unit)); /* closed: it has no units any more */
}

static void *begin_long(void *zero) {
    (void)zero;
    return PyEval_SaveThread();
}

static void end_long(void *zero, void *thread) {
    (void)zero;
    PyEval_RestoreThread(thread);
}

static int make_core(Zero *zero) {
    struct zpp_step_caller caller = {
        .ctx = zero, .mark_final = mark_final, .hold_grads = hold_grads, .forget_grads = forget_grads,
        .update = zero->backward_step.step ? update_in_python : NULL, .release = release, .begin_long = begin_long,
        .end_long = end_long };
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_py_wait_for(zero, &caller.wait);
    return raise_if(zpp_step_in_backward_create(&zero->stepper, &caller, &zero->backward_step.core, &err), &err);
}

void zpp_py_backward_step_forget(Zero *zero) {
    Py_CLEAR(zero->backward_step.begin);
    Py_CLEAR(zero->backward_step.mark_final);
    Py_CLEAR(zero->backward_step.step);
}

/* --- what passes call --------------------------------------------------------------------------------------------- */

void zpp_py_backward_step_ahead(Zero *zero) {
    zpp_step_in_backward *step = zero->backward_step.core ? step_of(zero) : NULL;
    if (step) zpp_step_in_backward_forward(step);
}

int zpp_py_backward_step_require_ended(const Zero *zero, const char *what) {
    struct zpp_err err = ZPP_ERR_INIT;
    if (!zero->backward_step.core || !zpp_step_in_backward_is_pending(zero->backward_step.core)) return 0;
    zpp_fail(&err, ZPP_STATE,
             "zero: %s between a backward and optimizer.step(): with Config(step_in_backward=True) the backward has "
             "begun the step, and parameters are half new until optimizer.step() ends it; call that first",
             what);
    zpp_py_raise(&err);
    return -1;
}

int zpp_py_backward_step_require_whole(const Unit *unit) {
    const zpp_step_in_backward *step = unit->zero->backward_step.core;
    if (!step || !zpp_step_in_backward_is_final(step, unit->unit->index)) return 0;
    char words[ZPP_UNIT_WORDS];
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_fail(&err, ZPP_STATE,
             "zero: %s is needed again after its gradients were complete, and with Config(step_in_backward=True) "
             "it may be stepped by then; something reads its weights and gives them no gradient (detach?); leave the "
             "option out",
             zpp_unit_words(unit->unit, words, sizeof words));
    zpp_py_raise(&err);
    return -1;
}

int zpp_py_backward_step_begin(Zero *zero) {
    if (!zero->backward_step.begin || !zero->boundary) return 0;
    PyObject *said = PyObject_CallNoArgs(zero->backward_step.begin), *list = NULL;
    double scale;
    struct zpp_optim_segment *groups = NULL;
    if (said && PyArg_ParseTuple(said, "O!d", &PyList_Type, &list, &scale)) groups = zpp_py_read_groups(list);
    Py_XDECREF(said);
    if (!groups) return -1;
    zpp_step_in_backward_begin(step_of(zero), groups, scale);
    return 0;
}

int zpp_py_backward_step_gradient(Unit *unit, Py_ssize_t param, bool partial) {
    zpp_step_in_backward *step = unit->zero->backward_step.core;
    struct zpp_err err = ZPP_ERR_INIT;
    if (!step || !zpp_step_in_backward_is_open(step)) return 0;
    if (zpp_step_in_backward_has_stepped(step, unit->unit->index)) {
        char words[ZPP_PARAM_WORDS];
        zpp_fail(&err, ZPP_STATE,
                 "zero: a gradient of %s came after its unit was stepped; its module ran in a way that the hooks did "
                 "not see; leave out Config(step_in_backward=True), or make it a unit of its own with "
                 "Config(units=...)",
                 zpp_py_param_words(unit, param, words, sizeof words));
        zpp_py_raise(&err);
        return -1;
    }
    step = step_of(unit->zero);
    if (zpp_py_follow(unit->zero)) return -1;
    return raise_if(zpp_step_in_backward_grad(step, unit->unit->index, (size_t)param, partial, &err), &err);
}

int zpp_py_backward_step_drain(Zero *zero) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_step_in_backward *step = step_of(zero);
    return step ? raise_if(zpp_step_in_backward_drain(step, &err), &err) : 0;
}

int zpp_py_backward_step_close(Zero *zero) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_step_in_backward *step = step_of(zero);
    return step ? raise_if(zpp_step_in_backward_close(step, &err), &err) : 0;
}

int zpp_py_backward_step_abort(Zero *zero) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_step_in_backward *step = step_of(zero);
    return step ? raise_if(zpp_step_in_backward_abort(step, &err), &err) : 0;
}

/* --- what the façade calls ---------------------------------------------------------------------------------------- */

/* set_backward_step(begin, mark_final, step | None): steps are inside the backward from now on. begin() -> (groups of
 * adam_step, grad_scale). mark_final(unit): autograd must not read what it saved of the unit's parameters. step(unit):
 * the update of optimizers that are in Python. After seal. */
static PyObject *zero_set_backward_step(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    PyObject *begin, *mark_final, *step;
    if (!PyArg_ParseTuple(args, "OOO", &begin, &mark_final, &step)) return NULL;
    zpp_py_backward_step_forget(zero);
    zpp_step_in_backward_destroy(zero->backward_step.core);
    zero->backward_step.core = NULL;
    zero->backward_step.begin = Py_NewRef(begin);
    zero->backward_step.mark_final = Py_NewRef(mark_final);
    zero->backward_step.step = step == Py_None ? NULL : Py_NewRef(step);
    if (make_core(zero)) return NULL;
    Py_RETURN_NONE;
}

typedef zpp_status (*ending)(zpp_step_in_backward *step, struct zpp_step_in_backward_end *end, struct zpp_err *err);

/* None, or (unit, parameter, element, ranks) whose gradient was not finite, as norm() has it. */
static PyObject *how_it_ended(Zero *zero, ending ended, bool counts) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_step_in_backward_end end;
    const zpp_status status = ended(step_of(zero), &end, &err);
    zero->inconsistent |= end.inconsistent;
    zero->steps += counts && status == ZPP_OK;
    if (status == ZPP_OK) Py_RETURN_NONE;
    if (end.bad_unit < 0 || PyErr_Occurred()) return zpp_py_raise_aio(&err, &end.fault);
    return Py_BuildValue("(innK)", end.bad_unit, (Py_ssize_t)end.bad_param, (Py_ssize_t)end.bad_elem,
                         (unsigned long long)zpp_zero_origins(zero->core, end.bad_unit));
}

/* backward_step_end(): as how_it_ended; raises what else failed. Everything that was stepped is written. */
static PyObject *zero_backward_step_end(PyObject *self, PyObject *unused) {
    (void)unused;
    return zpp_py_follow((Zero *)self) ? NULL : how_it_ended((Zero *)self, zpp_step_in_backward_end, true);
}

/* backward_step_settle(): the same of all steps that an accelerator has not ended yet, for which this rank waits. */
static PyObject *zero_backward_step_settle(PyObject *self, PyObject *unused) {
    (void)unused;
    return zpp_py_follow((Zero *)self) ? NULL : how_it_ended((Zero *)self, zpp_step_in_backward_settle, false);
}

/* backward_step_drop(): the same, and what failed is forgotten: a load replaces all that was stepped. */
static PyObject *zero_backward_step_drop(PyObject *self, PyObject *unused) {
    (void)unused;
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_step_in_backward *step = step_of((Zero *)self);
    if (step && raise_if(zpp_step_in_backward_drop(step, &err), &err)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *zero_backward_step_pending(PyObject *self, PyObject *unused) {
    (void)unused;
    const zpp_step_in_backward *step = ((Zero *)self)->backward_step.core;
    return PyBool_FromLong(step && zpp_step_in_backward_is_pending(step));
}

/* pool_grads(): before seal. */
static PyObject *zero_pool_grads(PyObject *self, PyObject *unused) {
    (void)unused;
    zpp_zero_pool_grads(((Zero *)self)->core);
    Py_RETURN_NONE;
}

PyMethodDef zpp_py_backward_step_methods[] = {
    { "set_backward_step", zero_set_backward_step, METH_VARARGS,
      "set_backward_step(begin, mark_final, step): step inside the backward." },
    { "backward_step_end", zero_backward_step_end, METH_NOARGS,
      "The step that the backward began is over; what failed in it." },
    { "backward_step_settle", zero_backward_step_settle, METH_NOARGS,
      "Wait for the steps that an accelerator has not ended; what failed in them." },
    { "backward_step_drop", zero_backward_step_drop, METH_NOARGS, "The same, and forget what failed." },
    { "backward_step_pending", zero_backward_step_pending, METH_NOARGS,
      "True if a backward has begun a step that was not ended." },
    { "pool_grads", zero_pool_grads, METH_NOARGS, "Gradients have memory until their unit is stepped." },
    { NULL, NULL, 0, NULL },
};
