/* SPDX-License-Identifier: Apache-2.0
 *
 * The arithmetic of units (zero/unit.h) for zeropp.estimate, which has no units yet.
 */
#include <Python.h>

#include <stdlib.h>

#include "../zero/unit.h"

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

static PyMethodDef methods[] = {
    {"unit_layout", unit_layout, METH_VARARGS,
     "unit_layout(numels, elem_bytes, ranks, /)\n--\n\n(elements of the flat buffer, elements of a slice), padding "
     "included."},
    {NULL, NULL, 0, NULL},
};

int zpp_py_add_layout(PyObject *module);
int zpp_py_add_layout(PyObject *module) { return PyModule_AddFunctions(module, methods); }
