/* SPDX-License-Identifier: Apache-2.0
 *
 * An extension for test_pywait.py: waits as the bindings do, with zpp_py_wait_init and zpp_py_raise of the product.
 */
#include <Python.h>

#include <time.h>

#include "../../csrc/bind/raise.h"

/* Something of csrc/comm's kind: sleeps, and ticks every 10 ms, for at most `wait->timeout_ns`. */
static zpp_status wait_for_nothing(const struct zpp_wait *wait, struct zpp_err *err) {
    const uint64_t start_ns = zpp_now_ns();
    while (zpp_now_ns() - start_ns < wait->timeout_ns) {
        nanosleep(&(struct timespec){0, 10000000}, NULL);
        const zpp_status status = wait->tick(wait->ctx, err);
        if (status) return status;
    }
    return zpp_fail_rank(err, ZPP_TIMEOUT, 1, "rank 1 did not come within %.1f s", (double)wait->timeout_ns * 1e-9);
}

static PyObject *wait_some(PyObject *module, PyObject *seconds) {
    (void)module;
    struct zpp_wait wait;
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_py_wait_init(&wait, (uint64_t)(PyFloat_AsDouble(seconds) * 1e9));
    PyThreadState *state = PyEval_SaveThread();
    const zpp_status status = wait_for_nothing(&wait, &err);
    PyEval_RestoreThread(state);
    return status ? zpp_py_raise(&err) : Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {{"wait_some", wait_some, METH_O, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "wait_module", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_wait_module(void);
PyMODINIT_FUNC PyInit_wait_module(void) { return PyModule_Create(&definition); }
