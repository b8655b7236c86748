/* SPDX-License-Identifier: Apache-2.0
 *
 * The type Transfer: a send or a receive as a Python object.
 *
 * A transfer borrows its tensor until it is finished. One that nobody keeps goes into a list, with the tensor, and is
 * let go when it is found finished by a later send or receive.
 */
#include <Python.h>
#include <stdlib.h>

#include "py_comm.h"
#include "pywait.h"
#include "raise.h"

struct orphan {
    struct orphan *next;
    zpp_transfer *transfer;
    PyObject *keep;
};

typedef struct Transfer {
    PyObject_HEAD PyObject *comm, *keep; /* owned */
    zpp_transfer *transfer;
} Transfer;

static PyTypeObject *transfer_type;
static struct orphan *orphans; /* guarded by the GIL */

static void sweep(void) {
    for (struct orphan **at = &orphans; *at;) {
        struct orphan *orphan = *at;
        if (!zpp_transfer_finished(orphan->transfer)) {
            at = &orphan->next;
            continue;
        }
        *at = orphan->next;
        zpp_transfer_free(orphan->transfer);
        Py_DECREF(orphan->keep);
        free(orphan);
    }
}

PyObject *zpp_py_transfer(PyObject *comm, PyObject *args, bool is_send) {
    struct zpp_err err = ZPP_ERR_INIT;
    long long ptr, tag;
    Py_ssize_t bytes;
    int rank;
    PyObject *keep;
    if (!PyArg_ParseTuple(args, "LniLO", &ptr, &bytes, &rank, &tag, &keep)) return NULL;
    if (bytes < 0) return PyErr_Format(PyExc_ValueError, "comm: %zd bytes", bytes);
    sweep();
    zpp_comm *c = zpp_py_comm_acquire(comm);
    Transfer *self = c ? PyObject_New(Transfer, transfer_type) : NULL;
    if (!self) {
        if (c) zpp_py_comm_release(comm);
        return NULL;
    }
    self->transfer = NULL;
    self->comm = Py_NewRef(comm);
    self->keep = Py_NewRef(keep);
    void *data = (void *)(uintptr_t)ptr;
    const zpp_status status = is_send
                                  ? zpp_comm_send(c, data, (size_t)bytes, rank, (uint64_t)tag, &self->transfer, &err)
                                  : zpp_comm_recv(c, data, (size_t)bytes, rank, (uint64_t)tag, &self->transfer, &err);
    zpp_py_comm_release(comm);
    if (status == ZPP_OK) return (PyObject *)self;
    Py_DECREF(self);
    return zpp_py_raise(&err);
}

static PyObject *transfer_wait(PyObject *object, PyObject *args) {
    Transfer *self = (Transfer *)object;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait wait;
    double timeout_s = 0.0;
    if (!PyArg_ParseTuple(args, "|d", &timeout_s)) return NULL;
    const zpp_comm *comm = zpp_py_comm_acquire(self->comm);
    if (!comm) return NULL;
    zpp_py_wait_init(&wait, timeout_s > 0.0 ? (uint64_t)(timeout_s * 1e9) : zpp_comm_timeout_ns(comm));
    PyThreadState *state = PyEval_SaveThread();
    const zpp_status status = zpp_transfer_wait(self->transfer, &wait, &err);
    PyEval_RestoreThread(state);
    zpp_py_comm_release(self->comm);
    if (status != ZPP_OK) return zpp_py_raise(&err);
    Py_RETURN_TRUE;
}

static PyObject *transfer_done(PyObject *object, PyObject *none) {
    (void)none;
    return PyBool_FromLong(zpp_transfer_finished(((Transfer *)object)->transfer));
}

static PyObject *transfer_source(PyObject *object, PyObject *none) {
    (void)none;
    return PyLong_FromLong(zpp_transfer_peer(((Transfer *)object)->transfer));
}

static void transfer_dealloc(PyObject *object) {
    Transfer *self = (Transfer *)object;
    PyTypeObject *type = Py_TYPE(object);
    struct orphan *orphan = NULL;
    if (self->transfer && !zpp_transfer_finished(self->transfer)) orphan = malloc(sizeof *orphan);
    if (orphan) {
        *orphan = (struct orphan){orphans, self->transfer, Py_NewRef(self->keep)};
        orphans = orphan;
    } else {
        zpp_transfer_free(self->transfer);
    }
    Py_DECREF(self->comm);
    Py_DECREF(self->keep);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyMethodDef transfer_methods[] = {
    {"wait", transfer_wait, METH_VARARGS,
     "wait(timeout_s=0.0, /)\n--\n\nTrue when the transfer is finished, or its error. 0: the group's timeout."},
    {"done", transfer_done, METH_NOARGS, "done()\n--\n\nWhether the transfer is finished, well or not."},
    {"source_rank", transfer_source, METH_NOARGS, "source_rank()\n--\n\nWho sent it; -1 while that is open."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot transfer_slots[] = {
    {Py_tp_doc, "A send or a receive."},
    {Py_tp_methods, transfer_methods},
    {Py_tp_dealloc, transfer_dealloc},
    {0, NULL},
};
static PyType_Spec transfer_spec = {"zeropp._C.Transfer", sizeof(Transfer), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, transfer_slots};

int zpp_py_add_comm_p2p(PyObject *module) {
    transfer_type = (PyTypeObject *)PyType_FromSpec(&transfer_spec);
    return transfer_type ? PyModule_AddObjectRef(module, "Transfer", (PyObject *)transfer_type) : -1;
}
