/* SPDX-License-Identifier: Apache-2.0
 *
 * csrc/ops/draw for Python: memory comes by address.
 */
#include <Python.h>

#include "../ops/draw/draw.h"
#include "raise.h"

static void *address_of(unsigned long long address) { return (void *)(uintptr_t)address; }

static PyObject *draw_order(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long pool, draw, wanted, order;
    Py_ssize_t samples, steps, batch;
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_status status;
    if (!PyArg_ParseTuple(args, "KnKKnnK:draw_order", &pool, &samples, &draw, &wanted, &steps, &batch, &order))
        return NULL;
    Py_BEGIN_ALLOW_THREADS status =
        zpp_draw_order(address_of(pool), (size_t)samples, address_of(draw), address_of(wanted), (size_t)steps,
                       (size_t)batch, address_of(order), &err);
    Py_END_ALLOW_THREADS return zpp_py_result(status, &err);
}

static PyMethodDef methods[] = {
    {"draw_order", draw_order, METH_VARARGS,
     "draw_order(pool, samples, state, wanted, steps, batch, order, /)\n--\n\nDraw the next steps of a curriculum "
     "(csrc/ops/draw/draw.h). All memory is given by address; state: three 64-bit integers, of which the first is the "
     "seed at the beginning and the others are 0."},
    {NULL, NULL, 0, NULL},
};

int zpp_py_add_draw(PyObject *module);
int zpp_py_add_draw(PyObject *module) { return PyModule_AddFunctions(module, methods); }
