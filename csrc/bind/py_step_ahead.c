/* SPDX-License-Identifier: Apache-2.0
 *
 * Steps that the host enqueues ahead of a GPU (zero/step_ahead.h), for python/zeropp/zero/step/ahead.py.
 */
#include <stddef.h>
#include <stdlib.h>

#include "py_zero.h"
#include "raise.h"

/* ahead_works() -> bool */
static PyObject *zero_ahead_works(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyBool_FromLong(zpp_step_ahead_works(((Zero *)self)->core));
}

/* ahead_open(loss_scale, good_steps) -> addresses of the norm and of the loss scale, each an fp32 number of the device,
 * and of the norm in float64; collective. What was open before is closed. */
static PyObject *zero_ahead_open(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    double loss_scale;
    unsigned long long good_steps;
    if (!PyArg_ParseTuple(args, "dK", &loss_scale, &good_steps) || zpp_py_follow(zero)) return NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait wait;
    zpp_py_wait_for(zero, &wait);
    PyThreadState *thread = PyEval_SaveThread();
    zpp_step_ahead_destroy(zero->ahead);
    zero->ahead = NULL;
    const zpp_status status =
        zpp_step_ahead_create(&zero->stepper, loss_scale, good_steps, &wait, &zero->ahead, &err);
    PyEval_RestoreThread(thread);
    if (status != ZPP_OK) return zpp_py_raise(&err);
    const uintptr_t record = (uintptr_t)zpp_step_ahead_record(zero->ahead);
    return Py_BuildValue("(KKK)", (unsigned long long)(record + offsetof(struct zpp_clip_record, norm_f32)),
                         (unsigned long long)(record + offsetof(struct zpp_clip_record, loss_scale_f32)),
                         (unsigned long long)(record + offsetof(struct zpp_clip_record, norm)));
}

/* 0, or -1 with an error set. The core's stream follows torch's. */
static int enter(Zero *zero) {
    if (zero->ahead) return zpp_py_follow(zero);
    PyErr_SetString(PyExc_RuntimeError, "zero: ahead_open was not called");
    return -1;
}

static struct zpp_clip_rule rule_of(double scale, double max_norm, double factor) {
    return (struct zpp_clip_rule){.scale = scale,
                                  .max_norm = max_norm,
                                  .growth = 1.0,
                                  .backoff = 1.0,
                                  .least = 0.0,
                                  .interval = UINT64_MAX,
                                  .factor = factor};
}

/* ahead_measure(scale): enqueue the norm; collective. `scale` makes a held gradient that of the scaled loss. */
static PyObject *zero_ahead_measure(PyObject *self, PyObject *arg) {
    Zero *zero = (Zero *)self;
    const struct zpp_clip_rule rule = rule_of(PyFloat_AsDouble(arg), 0.0, 1.0);
    if (PyErr_Occurred() || enter(zero)) return NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait wait;
    zpp_py_wait_for(zero, &wait);
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_step_ahead_measure(zero->ahead, &rule, &wait, &err);
    PyEval_RestoreThread(thread);
    return zpp_py_result(status, &err);
}

/* ahead_limit(scale, max_norm, factor): enqueue the factor of clipping. */
static PyObject *zero_ahead_limit(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    double scale, max_norm, factor;
    if (!PyArg_ParseTuple(args, "ddd", &scale, &max_norm, &factor) || enter(zero)) return NULL;
    const struct zpp_clip_rule rule = rule_of(scale, max_norm, factor);
    struct zpp_err err = ZPP_ERR_INIT;
    return zpp_py_result(zpp_step_ahead_limit(zero->ahead, &rule, &err), &err);
}

/* ahead_step(groups, growth, backoff, least, interval): between step_begin and step_end, enqueue the step. */
static PyObject *zero_ahead_step(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    PyObject *list;
    struct zpp_clip_rule rule = rule_of(1.0, 0.0, 1.0);
    unsigned long long interval;
    if (!PyArg_ParseTuple(args, "O!dddK", &PyList_Type, &list, &rule.growth, &rule.backoff, &rule.least, &interval))
        return NULL;
    rule.interval = interval;
    if (enter(zero)) return NULL;
    struct zpp_optim_segment *groups = zpp_py_read_groups(list);
    if (!groups) return NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_step_ahead_run(zero->ahead, groups, &rule, &err);
    PyEval_RestoreThread(thread);
    zero->steps += status == ZPP_OK;
    free(groups);
    return zpp_py_result(status, &err);
}

/* ahead_settle(): wait for all steps under way; called by all ranks. */
static PyObject *zero_ahead_settle(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait wait;
    if (enter(zero)) return NULL;
    zpp_py_wait_for(zero, &wait);
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_step_ahead_settle(zero->ahead, &wait, &err);
    PyEval_RestoreThread(thread);
    return zpp_py_result(status, &err);
}

/* (skipped, norm, loss scale after it, [(unit, parameter), ...] that are not finite) */
static PyObject *tuple_of(const struct zpp_step_outcome *outcome) {
    PyObject *bad = PyList_New(0);
    for (size_t k = 0; bad && k < outcome->bad_count; k++) {
        PyObject *name = Py_BuildValue("(II)", outcome->bad[k].unit, outcome->bad[k].param);
        if (!name || PyList_Append(bad, name)) Py_CLEAR(bad);
        Py_XDECREF(name);
    }
    if (!bad) return NULL;
    return Py_BuildValue("(NddN)", PyBool_FromLong(outcome->record.skip), outcome->record.norm,
                         outcome->record.loss_scale, bad);
}

/* ahead_take() -> the oldest outcome that is ready on all ranks, or None */
static PyObject *zero_ahead_take(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    if (enter(zero)) return NULL;
    const struct zpp_step_outcome *outcome = zpp_step_ahead_take(zero->ahead);
    if (outcome) return tuple_of(outcome);
    Py_RETURN_NONE;
}

/* ahead_newest() -> the newest outcome, for which this rank waits, or None where every outcome was taken */
static PyObject *zero_ahead_newest(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    const struct zpp_step_outcome *outcome = NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait wait;
    if (enter(zero)) return NULL;
    zpp_py_wait_for(zero, &wait);
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_step_ahead_newest(zero->ahead, &wait, &outcome, &err);
    PyEval_RestoreThread(thread);
    if (status != ZPP_OK) return zpp_py_raise(&err);
    if (outcome) return tuple_of(outcome);
    Py_RETURN_NONE;
}

PyMethodDef zpp_py_step_ahead_methods[] = {
    {"ahead_works", zero_ahead_works, METH_NOARGS, "True if the host can enqueue steps ahead of the device."},
    {"ahead_open", zero_ahead_open, METH_VARARGS,
     "ahead_open(loss_scale, good_steps) -> addresses of the norm, the loss scale, the norm in float64; collective."},
    {"ahead_measure", zero_ahead_measure, METH_O, "ahead_measure(scale): enqueue the norm; collective."},
    {"ahead_limit", zero_ahead_limit, METH_VARARGS, "ahead_limit(scale, max_norm, factor): enqueue clipping."},
    {"ahead_step", zero_ahead_step, METH_VARARGS,
     "ahead_step(groups, growth, backoff, least, interval): enqueue the step."},
    {"ahead_settle", zero_ahead_settle, METH_NOARGS, "Wait for all steps under way; called by all ranks."},
    {"ahead_take", zero_ahead_take, METH_NOARGS, "The oldest outcome that all ranks have seen, or None."},
    {"ahead_newest", zero_ahead_newest, METH_NOARGS, "Wait for the newest outcome and return it, or None."},
    {NULL, NULL, 0, NULL},
};
