/* SPDX-License-Identifier: Apache-2.0
 *
 * The delayed parameter update (zero/step_delayed.h), as python/zeropp/zero/delayed.py drives it: the thread that steps
 * knows neither Python's lock nor its objects, so what was p.grad is kept in a list until the step is over.
 */
#include "py_adam.h"
#include "py_aio.h"
#include "py_optim_file.h"
#include "raise.h"

/* end, without errors: the model or the process goes. */
void zpp_py_delayed_end(Zero *zero) {
    zpp_delayed *delayed = zero->delayed;
    zero->delayed = NULL;
    PyThreadState *thread = PyEval_SaveThread();
    zpp_delayed_destroy(delayed);
    PyEval_RestoreThread(thread);
    Py_CLEAR(zero->delayed_grads);
}

static int make_delayed(Zero *zero) {
    struct zpp_err err = ZPP_ERR_INIT;
    if (!zero->delayed_grads && !(zero->delayed_grads = PyList_New(0))) return -1;
    if (zero->delayed || zpp_delayed_create(zero->device, &zero->delayed, &err) == ZPP_OK) return 0;
    zpp_py_raise(&err);
    return -1;
}

/* delayed_begin(groups, grad_scale, here): between step_begin and step_end, after delayed_wait and delayed_publish. */
static PyObject *zero_delayed_begin(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    PyObject *groups;
    double scale;
    int here;
    if (!PyArg_ParseTuple(args, "O!dp", &PyList_Type, &groups, &scale, &here)) return NULL;
    zpp_optim_file *optim_file = zero->optim_file ? zpp_py_optim_file_get(zero->optim_file) : NULL;
    struct zpp_py_adam list;
    if (PyErr_Occurred() || make_delayed(zero) || zpp_py_adam_list(zero, groups, true, &list)) return NULL;
    const struct zpp_delayed_step step = {
        .segments = list.at, .segments_count = list.count, .pieces = list.tiered, .pieces_count = list.tiered_count,
        .copies = list.copies, .copies_count = list.copies_count, .rests = list.rests, .rests_count = list.rests_count,
        .turns = list.turns, .turns_count = list.turns_count,
        .files = { .params = zpp_zero_param_file(zero->core), .grads = zpp_zero_grad_file(zero->core), .next = true },
        .optim_file = optim_file, .grad_scale = (float)scale };
    struct zpp_err err = ZPP_ERR_INIT;
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_delayed_begin(zero->delayed, &step, here, zero->pool, &err);
    PyEval_RestoreThread(thread);
    zero->steps += status == ZPP_OK;
    if (status != ZPP_OK) return zpp_py_raise(&err);
    Py_RETURN_NONE;
}

/* delayed_wait(): the step under way is over; raises what it came to, once. */
static PyObject *zero_delayed_wait(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    if (!zero->delayed) Py_RETURN_NONE;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_delayed_wait(zero->delayed, &fault, &err);
    PyEval_RestoreThread(thread);
    Py_CLEAR(zero->delayed_grads);
    zero->torn |= status != ZPP_OK;
    if (status != ZPP_OK) return zpp_py_raise_aio(&err, &fault);
    Py_RETURN_NONE;
}

/* delayed_publish(): between step_begin and step_end. */
static PyObject *zero_delayed_publish(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    if (!zero->delayed) Py_RETURN_NONE;
    PyThreadState *thread = PyEval_SaveThread();
    zpp_delayed_publish(zero->delayed, zero->pool);
    PyEval_RestoreThread(thread);
    Py_RETURN_NONE;
}

/* delay_steps(): before units are added. */
static PyObject *zero_delay_steps(PyObject *self, PyObject *unused) {
    (void)unused;
    zpp_zero_delay_steps(((Zero *)self)->core);
    Py_RETURN_NONE;
}

/* delayed_failed(): after delayed_finish. */
static PyObject *zero_delayed_failed(PyObject *self, PyObject *unused) {
    (void)unused;
    const Zero *zero = (Zero *)self;
    return PyBool_FromLong(zero->delayed && zpp_delayed_failed(zero->delayed));
}

static PyObject *unlocked(Zero *zero, void (*call)(zpp_delayed *)) {
    if (!zero->delayed) Py_RETURN_NONE;
    PyThreadState *thread = PyEval_SaveThread();
    call(zero->delayed);
    PyEval_RestoreThread(thread);
    Py_RETURN_NONE;
}

static PyObject *zero_delayed_finish(PyObject *self, PyObject *unused) {
    (void)unused;
    return unlocked((Zero *)self, zpp_delayed_finish);
}

static PyObject *zero_delayed_drop(PyObject *self, PyObject *unused) {
    (void)unused;
    return unlocked((Zero *)self, zpp_delayed_drop);
}

static PyObject *zero_delayed_pending(PyObject *self, PyObject *unused) {
    (void)unused;
    const Zero *zero = (Zero *)self;
    return PyBool_FromLong(zero->delayed && zpp_delayed_pending(zero->delayed));
}

static PyObject *zero_delayed_figures(PyObject *self, PyObject *unused) {
    (void)unused;
    const Zero *zero = (Zero *)self;
    struct zpp_delayed_figures seen = { 0 };
    if (zero->delayed) zpp_delayed_figures(zero->delayed, &seen);
    return Py_BuildValue("{s:K,s:K,s:K,s:n}", "steps", (unsigned long long)seen.steps, "step_ns",
                         (unsigned long long)seen.step_ns, "waited_ns", (unsigned long long)seen.waited_ns,
                         "taken_bytes", (Py_ssize_t)zpp_zero_taken_bytes(zero->core));
}

static PyObject *zero_delayed_end(PyObject *self, PyObject *unused) {
    (void)unused;
    zpp_py_delayed_end((Zero *)self);
    Py_RETURN_NONE;
}

PyMethodDef zpp_py_delayed_methods[] = {
    { "delay_steps", zero_delay_steps, METH_NOARGS, "Files have two places for what a step touches; before units." },
    { "delayed_failed", zero_delayed_failed, METH_NOARGS, "After delayed_finish: will delayed_wait raise?" },
    { "delayed_begin", zero_delayed_begin, METH_VARARGS, "delayed_begin(groups, grad_scale, here)" },
    { "delayed_wait", zero_delayed_wait, METH_NOARGS, "Wait for the delayed step under way." },
    { "delayed_publish", zero_delayed_publish, METH_NOARGS, "Its new values go to their shards." },
    { "delayed_finish", zero_delayed_finish, METH_NOARGS, "No step runs any more; the shards are as before." },
    { "delayed_drop", zero_delayed_drop, METH_NOARGS, "The same, and forget it." },
    { "delayed_pending", zero_delayed_pending, METH_NOARGS, "Are there values that the shards do not have?" },
    { "delayed_figures", zero_delayed_figures, METH_NOARGS, "Counts and times." },
    { "delayed_end", zero_delayed_end, METH_NOARGS, "Wait for the step under way, and end its thread." },
    { NULL, NULL, 0, NULL },
};
