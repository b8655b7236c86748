/* SPDX-License-Identifier: Apache-2.0
 *
 * The quantised collectives of the type Comm (csrc/comm/shm/coll_quant.c), blocking and later.
 */
#include "py_comm.h"

static int read_call(PyObject *args, const char *format, struct zpp_call *call, PyObject **keep) {
    long long dst, src, elems, block_elems;
    int coll, dtype, op;
    *call = (struct zpp_call){0};
    if (!PyArg_ParseTuple(args, format, &coll, &dtype, &op, &dst, &src, &elems, &call->bits, &block_elems,
                          &call->node_ranks, keep))
        return -1;
    if (elems < 0 || block_elems < 0)
        return PyErr_Format(PyExc_ValueError, "comm: %lld elements in blocks of %lld", elems, block_elems), -1;
    if (coll < ZPP_COLL_ALL_GATHER_QUANT || coll > ZPP_COLL_ALL_REDUCE_QUANT)
        return PyErr_Format(PyExc_ValueError, "comm: collective %d is not a quantised one", coll), -1;
    call->coll = (enum zpp_coll)coll;
    call->dtype = (zpp_dtype)dtype;
    call->op = (zpp_reduce_op)op;
    call->dst = (void *)(uintptr_t)dst;
    call->src = (const void *)(uintptr_t)src;
    call->elems = (size_t)elems;
    call->block_elems = (size_t)block_elems;
    return 0;
}

PyObject *zpp_py_comm_quant(PyObject *self, PyObject *args) {
    struct zpp_call call;
    PyObject *none;
    return read_call(args, "iiiLLLiLi", &call, &none) == 0 ? zpp_py_comm_run(self, &call) : NULL;
}

PyObject *zpp_py_comm_submit_quant(PyObject *self, PyObject *args) {
    struct zpp_call call;
    PyObject *keep;
    if (read_call(args, "iiiLLLiLiO", &call, &keep) != 0) return NULL;
    Py_INCREF(keep);
    return zpp_py_work_submit(self, &call, keep, NULL);
}
