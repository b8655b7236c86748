/* SPDX-License-Identifier: Apache-2.0
 *
 * Stray reads (base/stray.h) for python/zeropp/zero/model/parameter.py, which raises the error.
 */
#include "../base/stray.h"
#include "py_zero.h"

/* stray_seen() -> bool: True if a released unit's memory was read since the last stray_take(). */
static PyObject *stray_seen(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyBool_FromLong(zpp_stray_is_seen());
}

/* stray_take() -> addresses of the first such reads. Later reads of the same memory are recorded again. */
static PyObject *stray_take(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    uintptr_t addresses[ZPP_STRAY_ADDRESSES];
    const size_t count = zpp_stray_take(addresses);
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++)
        if (PyList_SetItem(list, (Py_ssize_t)i, PyLong_FromUnsignedLongLong(addresses[i]))) Py_CLEAR(list);
    return list;
}

static PyMethodDef methods[] = {
    { "stray_seen", stray_seen, METH_NOARGS, "True if a released unit's memory was read since the last stray_take()." },
    { "stray_take", stray_take, METH_NOARGS, "Addresses of those reads; the list is cleared." },
    { NULL, NULL, 0, NULL },
};

int zpp_py_add_stray(PyObject *module);
int zpp_py_add_stray(PyObject *module) {
    return PyModule_AddFunctions(module, methods);
}
