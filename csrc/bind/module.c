/* SPDX-License-Identifier: Apache-2.0
 *
 * The module zeropp._C. What it offers is added by one function an area (areas[] below); here stand only the
 * version and the table of statuses. Importing it needs no torch, starts no thread and loads no CUDA.
 */
#include <Python.h>

#include "../base/cpu.h"
#include "raise.h"
#include "version.h"

/* Each adds its functions and types to the module: 0, or -1 with a Python error set. */
int zpp_py_add_base(PyObject *module);
int zpp_py_add_memory(PyObject *module);
int zpp_py_add_ops(PyObject *module);
int zpp_py_add_comm(PyObject *module);
int zpp_py_add_zero(PyObject *module);
int zpp_py_add_aio(PyObject *module);
int zpp_py_add_tier(PyObject *module);
int zpp_py_add_draw(PyObject *module);

static PyObject *version(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    return PyUnicode_FromString(ZPP_VERSION);
}

static PyObject *status_table(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    static const struct {
        const char *name;
        int value;
        const char *sentence, *exception;
    } rows[] = {
#define ZPP_STATUS(name, value, sentence, exception) {#name, value, sentence, exception},
#include "../base/status.def"
#undef ZPP_STATUS
    };
    const size_t count = sizeof rows / sizeof rows[0];
    PyObject *table = PyList_New((Py_ssize_t)count);
    for (size_t row = 0; table && row < count; ++row) {
        PyObject *item =
            Py_BuildValue("siss", rows[row].name, rows[row].value, rows[row].sentence, rows[row].exception);
        if (!item || PyList_SetItem(table, (Py_ssize_t)row, item) != 0) Py_CLEAR(table);
    }
    return table;
}

static PyObject *raise_status(PyObject *module, PyObject *args) {
    (void)module;
    struct zpp_err err = ZPP_ERR_INIT;
    int status = 0;
    const char *text = NULL;
    err.rank = ZPP_NO_RANK;
    if (!PyArg_ParseTuple(args, "is|ii", &status, &text, &err.rank, &err.os_errno)) return NULL;
    const int rank = err.rank, os_errno = err.os_errno;
    if (status >= 0) Py_RETURN_NONE;
    zpp_fail(&err, (zpp_status)status, "%s", text);
    err.rank = rank;
    err.os_errno = os_errno;
    return zpp_py_raise(&err);
}

static PyMethodDef methods[] = {
    {"version", version, METH_NOARGS, "version()\n--\n\nThe version of zeropp."},
    {"status_table", status_table, METH_NOARGS,
     "status_table()\n--\n\nEvery status of the C core: (name, value, sentence, exception)."},
    {"raise_status", raise_status, METH_VARARGS,
     "raise_status(status, text, rank=-1, errno=0, /)\n--\n\nRaise what the C core would raise for a negative status; "
     "None for others."},
    {NULL, NULL, 0, NULL},
};

static int fill_module(PyObject *module) {
    struct zpp_err err = ZPP_ERR_INIT;
    if (zpp_cpu_check(&err) != ZPP_OK) {
        zpp_py_raise(&err);
        return -1;
    }
    int (*const areas[])(PyObject *) = { zpp_py_add_base, zpp_py_add_memory, zpp_py_add_ops, zpp_py_add_comm,
                                         zpp_py_add_zero, zpp_py_add_aio,    zpp_py_add_tier,   zpp_py_add_draw };
    for (size_t area = 0; area < sizeof areas / sizeof areas[0]; ++area) {
        if (areas[area](module) != 0) return -1;
    }
    return 0;
}

/* Single-phase: the types of the areas are globals, so there is one module a process; a subinterpreter is refused by
 * Python itself. */
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "zeropp._C", "The C core of zeropp.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__C(void); /* what Python looks up */
PyMODINIT_FUNC PyInit__C(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module && fill_module(module) != 0) Py_CLEAR(module);
    return module;
}
