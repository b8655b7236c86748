/* SPDX-License-Identifier: Apache-2.0
 *
 * From a status to a Python exception: raise.h.
 */
#include "raise.h"

#include <stdbool.h>
#include <string.h>

static const char own_prefix[] = "zeropp.";

static PyObject *builtin(const char *name) {
    const struct {
        const char *name;
        PyObject *exception;
    } builtins[] = {
        {"ValueError", PyExc_ValueError},
        {"MemoryError", PyExc_MemoryError},
        {"OSError", PyExc_OSError},
        {"KeyboardInterrupt", PyExc_KeyboardInterrupt},
    };
    for (size_t row = 0; row < sizeof builtins / sizeof builtins[0]; ++row) {
        if (strcmp(builtins[row].name, name) == 0) return builtins[row].exception;
    }
    return PyExc_RuntimeError;
}

/* New reference to the class. Where zeropp itself cannot be imported (no torch) it is RuntimeError. */
static PyObject *exception_class(const char *name) {
    const size_t prefix_bytes = sizeof own_prefix - 1;
    if (strncmp(name, own_prefix, prefix_bytes) == 0) {
        PyObject *errors = PyImport_ImportModule("zeropp.errors");
        PyObject *found = errors ? PyObject_GetAttrString(errors, name + prefix_bytes) : NULL;
        Py_XDECREF(errors);
        if (found) return found;
        PyErr_Clear();
    }
    return Py_NewRef(builtin(name));
}

/* New exception object, or NULL with an error set. */
static PyObject *new_exception(PyObject *class, const struct zpp_err *err) {
    /* "replace": a sentence may quote bytes from outside, and may have been cut inside a character. */
    PyObject *text = PyUnicode_DecodeUTF8(err->text, (Py_ssize_t)strlen(err->text), "replace");
    if (!text) return NULL;
    PyObject *made;
    if (err->status == ZPP_OS && err->os_errno) made = PyObject_CallFunction(class, "iO", err->os_errno, text);
    else made = PyObject_CallFunctionObjArgs(class, text, NULL);
    Py_DECREF(text);
    return made;
}

static bool set_rank(PyObject *exception, int rank) {
    PyObject *value = rank == ZPP_NO_RANK ? Py_NewRef(Py_None) : PyLong_FromLong(rank);
    const bool failed = !value || PyObject_SetAttrString(exception, "rank", value) != 0;
    Py_XDECREF(value);
    return !failed;
}

PyObject *zpp_py_raise(const struct zpp_err *err) {
    if (err->status == ZPP_INTERRUPTED && PyErr_Occurred()) return NULL;
    PyErr_Clear();
    PyObject *class = exception_class(zpp_status_exception(err->status));
    PyObject *exception = new_exception(class, err);
    const bool about_a_peer =
        err->status == ZPP_PEER || err->status == ZPP_TIMEOUT || err->status == ZPP_ABORTED || err->rank != ZPP_NO_RANK;
    if (exception && (!about_a_peer || set_rank(exception, err->rank))) {
        PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
    }
    Py_XDECREF(exception);
    Py_DECREF(class);
    return NULL;
}
