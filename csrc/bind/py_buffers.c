/* SPDX-License-Identifier: Apache-2.0
 *
 * Buffers at the start of a forward, for hooks.c (zero/exchange.c). The façade gives their addresses, because a module
 * may put another tensor in the place of one.
 */
#include <stdlib.h>

#include "py_zero.h"
#include "raise.h"

/* set_buffers(where, sizes): where() -> (addresses, 0: not there; what to call afterwards, or None), before forwards;
 * None: no more. sizes: bytes of each buffer. Collective. */
static PyObject *zero_set_buffers(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    PyObject *where, *sizes;
    struct zpp_err err = ZPP_ERR_INIT;
    if (!PyArg_ParseTuple(args, "OO!", &where, &PyList_Type, &sizes)) return NULL;
    const Py_ssize_t count = PyList_Size(sizes);
    size_t *bytes = calloc((size_t)count + 1, sizeof *bytes);
    struct zpp_buffer *buffers = calloc((size_t)count + 1, sizeof *buffers);
    if (!bytes || !buffers) {
        free(bytes);
        free(buffers);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < count; i++) buffers[i].bytes = bytes[i] = PyLong_AsSize_t(PyList_GetItem(sizes, i));
    const zpp_status status =
        PyErr_Occurred() ? ZPP_INVALID : zpp_zero_make_buffers(zero->core, bytes, (size_t)count, &err);
    free(bytes);
    if (status != ZPP_OK) {
        free(buffers);
        return PyErr_Occurred() ? NULL : zpp_py_raise(&err);
    }
    zero->buffers = (struct zpp_py_buffers){ Py_NewRef(where), buffers, count, true };
    Py_RETURN_NONE;
}

void zpp_py_buffers_end(Zero *zero) {
    PyObject *where = zero->buffers.where;
    free(zero->buffers.spans);
    zero->buffers = (struct zpp_py_buffers){ 0 };
    Py_XDECREF(where);
}

static int read_addresses(struct zpp_py_buffers *buffers, PyObject *addresses) {
    if (!PyList_Check(addresses) || PyList_Size(addresses) != buffers->count) {
        PyErr_Format(PyExc_TypeError, "set_buffers: where() gave no list of %zd addresses", buffers->count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < buffers->count; i++)
        buffers->spans[i].data = PyLong_AsVoidPtr(PyList_GetItem(addresses, i));
    return PyErr_Occurred() ? -1 : 0;
}

static int sync_now(Zero *zero) {
    struct zpp_py_buffers *buffers = &zero->buffers;
    struct zpp_wait wait;
    struct zpp_err err = ZPP_ERR_INIT;
    PyObject *addresses, *after, *found = PyObject_CallNoArgs(buffers->where);
    if (!found || !PyArg_ParseTuple(found, "OO", &addresses, &after) || read_addresses(buffers, addresses)) {
        Py_XDECREF(found);
        return -1;
    }
    zpp_py_wait_for(zero, &wait);
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status =
        zpp_zero_sync_buffers(zero->core, buffers->spans, (size_t)buffers->count, &wait, &err);
    PyEval_RestoreThread(thread);
    int failed = status == ZPP_OK ? 0 : -1;
    if (failed) zpp_py_raise(&err);
    else if (after != Py_None) failed = zpp_py_call(after);
    Py_DECREF(found);
    return failed;
}

int zpp_py_sync_buffers(Zero *zero, bool grad) {
    if (zero->buffers.due && sync_now(zero)) return -1;
    zero->buffers.due = grad && zero->sync;
    return 0;
}

PyMethodDef zpp_py_buffers_methods[] = {
    { "set_buffers", zero_set_buffers, METH_VARARGS, "set_buffers(where, sizes): rank 0's to all, before forwards." },
    { NULL, NULL, 0, NULL },
};
