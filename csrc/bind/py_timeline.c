/* SPDX-License-Identifier: Apache-2.0
 *
 * zeropp.trace for Python: base/timeline.h.
 */
#include <Python.h>

#include <stdlib.h>

#include "../base/timeline.h"
#include "raise.h"

static const char *const kinds[ZPP_SPAN_KINDS] = {
    [ZPP_SPAN_FORWARD] = "forward", [ZPP_SPAN_BACKWARD] = "backward", [ZPP_SPAN_STEP] = "step",
    [ZPP_SPAN_GATHER] = "gather",   [ZPP_SPAN_REDUCE] = "reduce",     [ZPP_SPAN_WAIT] = "wait",
    [ZPP_SPAN_READ] = "read",       [ZPP_SPAN_WRITE] = "write",
};

static PyObject *timeline_start(PyObject *module, PyObject *args) {
    (void)module;
    Py_ssize_t capacity;
    struct zpp_err err = ZPP_ERR_INIT;
    if (!PyArg_ParseTuple(args, "n:timeline_start", &capacity)) return NULL;
    if (zpp_timeline_start((size_t)capacity, &err) != ZPP_OK) return zpp_py_raise(&err);
    Py_RETURN_NONE;
}

static PyObject *timeline_stop(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_span *spans = NULL;
    size_t count = 0, dropped = 0;
    if (zpp_timeline_stop(&spans, &count, &dropped, &err) != ZPP_OK) return zpp_py_raise(&err);
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; ++i) {
        const struct zpp_span *span = &spans[i];
        PyObject *row = Py_BuildValue("ssiKKK", kinds[span->kind], span->name, span->thread,
                                      (unsigned long long)span->began_ns, (unsigned long long)span->ended_ns,
                                      (unsigned long long)span->bytes);
        if (!row || PyList_SetItem(list, (Py_ssize_t)i, row) != 0) Py_CLEAR(list);
    }
    free(spans);
    return list ? Py_BuildValue("Nn", list, (Py_ssize_t)dropped) : NULL;
}

static PyMethodDef methods[] = {
    {"timeline_start", timeline_start, METH_VARARGS,
     "timeline_start(capacity, /)\n--\n\nKeep spans of time from now on, so many at most."},
    {"timeline_stop", timeline_stop, METH_NOARGS,
     "timeline_stop()\n--\n\n([(kind, name, thread, began_ns, ended_ns, bytes)], how many had no room)."},
    {NULL, NULL, 0, NULL},
};

int zpp_py_add_timeline(PyObject *module);
int zpp_py_add_timeline(PyObject *module) { return PyModule_AddFunctions(module, methods); }
