/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls with a tensor a rank, from lists of addresses: the arrays that such a call points at lie in a bytes object,
 * which lives as long as the call.
 */
#include <Python.h>

#include "py_comm.h"

struct pieces {
    void *dsts[64];
    const void *srcs[64];
    size_t dst_bytes[64], src_bytes[64];
};

static int read_pieces(PyObject *list, int ranks, void **pointers, size_t *bytes) {
    const Py_ssize_t length = PySequence_Size(list);
    if (length < 0) return -1;
    if (length != ranks)
        return PyErr_Format(PyExc_ValueError, "comm: %zd pieces, wanted one a rank, %d", length, ranks), -1;
    for (Py_ssize_t r = 0; r < length; r++) {
        PyObject *pair = PySequence_GetItem(list, r);
        PyObject *at = pair ? PySequence_GetItem(pair, 0) : NULL, *size = at ? PySequence_GetItem(pair, 1) : NULL;
        const Py_ssize_t piece_bytes = size ? PyLong_AsSsize_t(size) : -1;
        pointers[r] = size ? PyLong_AsVoidPtr(at) : NULL;
        bytes[r] = (size_t)piece_bytes;
        Py_XDECREF(pair);
        Py_XDECREF(at);
        Py_XDECREF(size);
        if (PyErr_Occurred()) return -1;
        if (piece_bytes < 0) return PyErr_Format(PyExc_ValueError, "comm: a piece of %zd bytes", piece_bytes), -1;
    }
    return 0;
}

PyObject *zpp_py_exchange_call(int ranks, PyObject *args, struct zpp_call *call) {
    PyObject *dsts, *srcs;
    int coll, dtype, root;
    if (!PyArg_ParseTuple(args, "iiiOO", &coll, &dtype, &root, &dsts, &srcs)) return NULL;
    PyObject *owner = PyBytes_FromStringAndSize(NULL, sizeof(struct pieces));
    if (!owner) return NULL;
    struct pieces *pieces = (struct pieces *)(void *)PyBytes_AsString(owner);
    if (read_pieces(dsts, ranks, pieces->dsts, pieces->dst_bytes) != 0 ||
        read_pieces(srcs, ranks, (void **)pieces->srcs, pieces->src_bytes) != 0) {
        Py_DECREF(owner);
        return NULL;
    }
    *call = (struct zpp_call){.coll = (enum zpp_coll)coll,
                              .dtype = (zpp_dtype)dtype,
                              .root = root,
                              .dsts = pieces->dsts,
                              .srcs = pieces->srcs,
                              .dst_bytes = pieces->dst_bytes,
                              .src_bytes = pieces->src_bytes};
    return owner;
}

/* Gather into one tensor a rank: dsts is a list of addresses. */
PyObject *zpp_py_gather_call(int ranks, PyObject *args, struct zpp_call *call) {
    PyObject *dsts;
    long long src;
    Py_ssize_t elems;
    int dtype;
    if (!PyArg_ParseTuple(args, "OLni", &dsts, &src, &elems, &dtype)) return NULL;
    const Py_ssize_t length = PySequence_Size(dsts);
    if (length < 0) return NULL;
    if (length != ranks || elems < 0)
        return PyErr_Format(PyExc_ValueError, "comm: %zd destinations of %zd elements, wanted one a rank, %d", length,
                            elems, ranks);
    PyObject *owner = PyBytes_FromStringAndSize(NULL, sizeof(struct pieces));
    if (!owner) return NULL;
    struct pieces *pieces = (struct pieces *)(void *)PyBytes_AsString(owner);
    for (Py_ssize_t r = 0; r < length; r++) {
        PyObject *at = PySequence_GetItem(dsts, r);
        pieces->dsts[r] = at ? PyLong_AsVoidPtr(at) : NULL;
        Py_XDECREF(at);
        if (PyErr_Occurred()) {
            Py_DECREF(owner);
            return NULL;
        }
    }
    *call = (struct zpp_call){.coll = ZPP_COLL_ALL_GATHER,
                              .dtype = (zpp_dtype)dtype,
                              .dsts = pieces->dsts,
                              .src = (void *)(uintptr_t)src,
                              .elems = (size_t)elems};
    return owner;
}
