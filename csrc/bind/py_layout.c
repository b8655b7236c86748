/* SPDX-License-Identifier: Apache-2.0
 *
 * The arithmetic of units (zero/unit.h) and of states in a file (zero/offload/optim_file.h) for zeropp.estimate, which has
 * neither yet.
 */
#include <Python.h>

#include <stdlib.h>

#include "../zero/offload/optim_file.h"
#include "../zero/unit.h"
#include "raise.h"

static PyObject *unit_layout(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *numels;
    Py_ssize_t elem_bytes;
    int ranks;
    if (!PyArg_ParseTuple(args, "O!ni:unit_layout", &PyList_Type, &numels, &elem_bytes, &ranks)) return NULL;
    if (elem_bytes < 1 || elem_bytes > 64 || ranks < 1) {
        PyErr_Format(PyExc_ValueError, "unit_layout: %zd bytes an element and %d ranks", elem_bytes, ranks);
        return NULL;
    }
    const size_t count = (size_t)PyList_Size(numels);
    size_t *sizes = calloc(2 * count + 1, sizeof *sizes);
    if (!sizes) return PyErr_NoMemory();
    for (size_t i = 0; i < count; ++i) sizes[i] = PyLong_AsSize_t(PyList_GetItem(numels, (Py_ssize_t)i));
    size_t elems = 0, shard_elems = 0;
    if (!PyErr_Occurred())
        zpp_unit_layout(count, sizes, (size_t)elem_bytes, ranks, sizes + count, &elems, &shard_elems);
    free(sizes);
    return PyErr_Occurred() ? NULL : Py_BuildValue("nn", (Py_ssize_t)elems, (Py_ssize_t)shard_elems);
}

static int shard_plan(PyObject *pair, struct zpp_optim_file_shard_plan *out) {
    Py_ssize_t elems;
    int master;
    if (!PyArg_ParseTuple(pair, "np", &elems, &master)) return -1;
    *out = (struct zpp_optim_file_shard_plan){ .elems = (size_t)elems, .master = master };
    return 0;
}

static PyObject *optim_file_plan(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *list;
    struct zpp_optim_file_options options = { 0 };
    int backward_step;
    if (!PyArg_ParseTuple(args, "O!dIp:optim_file_plan", &PyList_Type, &list, &options.fraction, &options.moments,
                          &backward_step))
        return NULL;
    options.backward_step = backward_step;
    const size_t count = (size_t)PyList_Size(list);
    struct zpp_optim_file_shard_plan *shards = calloc(count + 1, sizeof *shards);
    if (!shards) return PyErr_NoMemory();
    int failed = 0;
    for (size_t i = 0; i < count && !failed; i++) failed = shard_plan(PyList_GetItem(list, (Py_ssize_t)i), &shards[i]);
    struct zpp_optim_file_plan plan;
    struct zpp_err err = ZPP_ERR_INIT;
    const zpp_status status = failed ? ZPP_OK : zpp_optim_file_plan(&options, shards, count, &plan, &err);
    free(shards);
    if (failed) return NULL;
    if (status != ZPP_OK) return zpp_py_raise(&err);
    return Py_BuildValue("nn", (Py_ssize_t)plan.buffer_bytes, (Py_ssize_t)plan.chunk_elems);
}

static PyMethodDef methods[] = {
    {"optim_file_plan", optim_file_plan, METH_VARARGS,
     "optim_file_plan(shards, fraction, moments, unit_by_unit, /)\n--\n\n(bytes of a step's buffers, elements of a "
     "record) of states in a file. Shards: [(elements, has a master)]; moments: a bit each."},
    {"unit_layout", unit_layout, METH_VARARGS,
     "unit_layout(numels, elem_bytes, ranks, /)\n--\n\n(elements of the flat buffer, elements of a shard), padding "
     "included."},
    {NULL, NULL, 0, NULL},
};

int zpp_py_add_layout(PyObject *module);
int zpp_py_add_layout(PyObject *module) { return PyModule_AddFunctions(module, methods); }
