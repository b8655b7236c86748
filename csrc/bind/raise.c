/* SPDX-License-Identifier: Apache-2.0
 *
 * Waits, exceptions and results of calls into the C core: raise.h.
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

/* New reference, or NULL with an error set. */
static PyObject *class_of(const char *module_name, const char *name) {
    PyObject *module = PyImport_ImportModule(module_name);
    PyObject *found = module ? PyObject_GetAttrString(module, name) : NULL;
    Py_XDECREF(module);
    return found;
}

/* New reference to the class. Where zeropp itself cannot be imported (no torch) it is RuntimeError. */
static PyObject *exception_class(const char *name) {
    const size_t prefix_bytes = sizeof own_prefix - 1;
    if (strncmp(name, own_prefix, prefix_bytes) == 0) {
        PyObject *found = class_of("zeropp.errors", name + prefix_bytes);
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

/* --- exceptions of I/O -------------------------------------------------------------------------------------------- */

static bool set_item(PyObject *mapping, const char *key, PyObject *value) {
    const bool failed = !value || PyDict_SetItemString(mapping, key, value) != 0;
    Py_XDECREF(value);
    return !failed;
}

static bool fill_fields(PyObject *fields, const struct zpp_aio_fault *fault) {
    if (!set_item(fields, "path", PyUnicode_DecodeFSDefault(fault->path))) return false;
    if (!set_item(fields, "offset_bytes", PyLong_FromUnsignedLongLong(fault->offset_bytes))) return false;
    PyObject *const wanted = fault->wanted_bytes ? PyLong_FromUnsignedLongLong(fault->wanted_bytes) : NULL;
    if (fault->wanted_bytes && !set_item(fields, "bytes_wanted", wanted)) return false;
    PyObject *const available = fault->has_free ? PyLong_FromUnsignedLongLong(fault->free_bytes) : NULL;
    if (fault->has_free && !set_item(fields, "bytes_free", available)) return false;
    return !fault->os_errno || set_item(fields, "errno", PyLong_FromLong(fault->os_errno));
}

static PyObject *raise_tier(const struct zpp_err *err, const struct zpp_aio_fault *fault) {
    PyObject *class = class_of("zeropp.errors", "TierError");
    PyObject *fields = PyDict_New();
    PyObject *text = Py_BuildValue("(N)", PyUnicode_DecodeUTF8(err->text, (Py_ssize_t)strlen(err->text), "replace"));
    const bool filled = class && fields && text && fill_fields(fields, fault);
    PyObject *exception = filled ? PyObject_Call(class, text, fields) : NULL;
    if (exception) PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
    Py_XDECREF(exception);
    Py_XDECREF(text);
    Py_XDECREF(fields);
    Py_XDECREF(class);
    return NULL;
}

PyObject *zpp_py_raise_aio(const struct zpp_err *err, const struct zpp_aio_fault *fault) {
    if (err->status == ZPP_TIER && fault) return raise_tier(err, fault);
    if (err->status == ZPP_TIMEOUT) {
        PyErr_SetString(PyExc_TimeoutError, err->text);
        return NULL;
    }
    if (err->status == ZPP_ABORTED) {
        PyObject *class = class_of("zeropp.aio", "CancelledError");
        if (class) PyErr_SetString(class, err->text);
        Py_XDECREF(class);
        return NULL;
    }
    return zpp_py_raise(err);
}

/* --- results ------------------------------------------------------------------------------------------------------ */

PyObject *zpp_py_result(zpp_status status, const struct zpp_err *err) {
    if (status != ZPP_OK) return zpp_py_raise(err);
    Py_RETURN_NONE;
}

PyObject *zpp_py_result_aio(zpp_status status, const struct zpp_err *err, const struct zpp_aio_fault *fault) {
    if (status != ZPP_OK) return zpp_py_raise_aio(err, fault);
    Py_RETURN_NONE;
}

/* --- waits -------------------------------------------------------------------------------------------------------- */

static zpp_status tick(void *ctx, struct zpp_err *err) {
    (void)ctx;
    /* Finds the thread state that PyEval_SaveThread put aside, so the exception stays in it after the release. */
    const PyGILState_STATE gil = PyGILState_Ensure();
    const int raised = PyErr_CheckSignals();
    PyGILState_Release(gil);
    if (raised == 0) return ZPP_OK;
    return zpp_fail(err, ZPP_INTERRUPTED, "interrupted by a signal while waiting");
}

void zpp_py_wait_init(struct zpp_wait *wait, uint64_t timeout_ns) {
    *wait = (struct zpp_wait){.timeout_ns = timeout_ns, .tick = tick, .ctx = NULL};
}
