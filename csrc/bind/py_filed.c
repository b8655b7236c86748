/* SPDX-License-Identifier: Apache-2.0
 *
 * Methods of Zero for parameters in a file (zero/filed.h). When the file is made and goes away is
 * python/zeropp/zero/params_tier.py's to know; the step is called by py_step.c.
 *
 * Warnings of the I/O engine come from its threads, which never take the GIL: the last one is kept until the façade
 * asks.
 */
#include "py_zero.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "py_aio.h"
#include "raise.h"

static pthread_mutex_t warning_lock = PTHREAD_MUTEX_INITIALIZER; /* guards every Zero's `warning` */

static void keep_warning(void *ctx, const char *text) {
    Zero *zero = ctx;
    pthread_mutex_lock(&warning_lock);
    snprintf(zero->warning, sizeof zero->warning, "%s", text);
    pthread_mutex_unlock(&warning_lock);
}

static zpp_filed *filed_of(PyObject *self) {
    zpp_filed *filed = zpp_zero_filed(((Zero *)self)->core);
    if (!filed) PyErr_SetString(PyExc_ValueError, "zero: no parameters are in a file");
    return filed;
}

/* open_params(path, make, depth, block_bytes) -> the engine's warning, or '' */
static PyObject *open_params(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    struct zpp_filed_file file = { .log = keep_warning, .log_ctx = zero };
    int make;
    Py_ssize_t block_bytes;
    zpp_filed *filed = filed_of(self);
    if (!filed || !PyArg_ParseTuple(args, "ypIn", &file.path, &make, &file.depth, &block_bytes)) return NULL;
    file.make = make;
    file.block_bytes = (size_t)block_bytes;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_filed_open(filed, &file, &fault, &err);
    PyEval_RestoreThread(thread);
    if (status != ZPP_OK) return zpp_py_raise_aio(&err, &fault);
    char text[sizeof zero->warning];
    pthread_mutex_lock(&warning_lock);
    snprintf(text, sizeof text, "%s", zero->warning);
    zero->warning[0] = '\0';
    pthread_mutex_unlock(&warning_lock);
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

static PyObject *close_params(PyObject *self, PyObject *unused) {
    (void)unused;
    zpp_filed *filed = filed_of(self);
    if (!filed) return NULL;
    PyThreadState *thread = PyEval_SaveThread();
    zpp_filed_close(filed);
    PyEval_RestoreThread(thread);
    Py_RETURN_NONE;
}

/* copy_params(unit, first, elems, address, write): elements of a unit's flat buffer and memory that the caller keeps
 * alive. */
static PyObject *copy_params(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    int index, write;
    Py_ssize_t first, elems;
    unsigned long long address;
    zpp_filed *filed = filed_of(self);
    if (!filed || !PyArg_ParseTuple(args, "innKp", &index, &first, &elems, &address, &write)) return NULL;
    const bool known = index >= 0 && index < zpp_zero_units(zero->core);
    const struct zpp_unit *unit = known ? zpp_zero_unit(zero->core, index) : NULL;
    if (!unit || unit->place != ZPP_PLACE_FILE || first < 0 || elems < 0 || (size_t)first > unit->elems ||
        (size_t)elems > unit->elems - (size_t)first)
        return PyErr_SetString(PyExc_ValueError, "zero: unit, first or elems is out of range"), NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status =
        zpp_filed_copy(filed, unit->range_offset_bytes + (size_t)first * unit->elem_bytes, (void *)(uintptr_t)address,
                       (size_t)elems * unit->elem_bytes, write, &fault, &err);
    PyEval_RestoreThread(thread);
    if (status != ZPP_OK) return zpp_py_raise_aio(&err, &fault);
    Py_RETURN_NONE;
}

static PyObject *params_figures(PyObject *self, PyObject *unused) {
    (void)unused;
    const zpp_filed *filed = filed_of(self);
    if (!filed) return NULL;
    struct zpp_filed_figures seen;
    zpp_filed_figures(filed, &seen);
    return Py_BuildValue("{s:K,s:n,s:n,s:n,s:n,s:n,s:K,s:K,s:K,s:K,s:K,s:s}", "home_address",
                         (unsigned long long)(uintptr_t)zpp_filed_home(filed), "home_bytes",
                         (Py_ssize_t)seen.home_bytes, "cut_bytes", (Py_ssize_t)seen.cut_bytes, "entered_bytes",
                         (Py_ssize_t)seen.entered_bytes, "entered_peak_bytes", (Py_ssize_t)seen.entered_peak_bytes,
                         "window_bytes", (Py_ssize_t)seen.window_bytes, "read_bytes",
                         (unsigned long long)seen.read_bytes, "written_bytes", (unsigned long long)seen.written_bytes,
                         "loads", (unsigned long long)seen.loads, "load_wait_ns",
                         (unsigned long long)seen.load_wait_ns, "step_wait_ns", (unsigned long long)seen.step_wait_ns,
                         "backend", seen.uring ? "io_uring" : "threads");
}

/* step_state() -> (steps of Adam that succeeded, was one torn by its parameters' file?) */
static PyObject *step_state(PyObject *self, PyObject *unused) {
    (void)unused;
    const Zero *zero = (Zero *)self;
    return Py_BuildValue("(KO)", (unsigned long long)zero->steps, zero->torn ? Py_True : Py_False);
}

static PyObject *mend_params(PyObject *self, PyObject *unused) {
    (void)unused;
    ((Zero *)self)->torn = false;
    Py_RETURN_NONE;
}

PyMethodDef zpp_py_filed_methods[] = {
    { "open_params", open_params, METH_VARARGS, "open_params(path, make, depth, block_bytes) -> warning" },
    { "close_params", close_params, METH_NOARGS, "End the engine; the file stays." },
    { "copy_params", copy_params, METH_VARARGS, "copy_params(unit, first, elems, address, write)" },
    { "params_figures", params_figures, METH_NOARGS, "Bytes and times." },
    { "step_state", step_state, METH_NOARGS, "(steps that succeeded, torn by the file of parameters?)" },
    { "mend_params", mend_params, METH_NOARGS, "All parameters were loaded anew." },
    { NULL, NULL, 0, NULL },
};
