/* SPDX-License-Identifier: Apache-2.0
 *
 * The types Work and Transfer: an asynchronous collective, and a send or receive, as Python objects.
 *
 * The call borrows tensors until it is finished, whether or not the Work is kept, so a `struct pending` holds
 * them. It is finished on the progress thread, which should not queue for the GIL between two collectives: it only
 * defers dropping the pending until a thread has the GIL (submit, wait). Only a callback asked for by on_done() takes
 * the GIL at once.
 */
#include <Python.h>
#include <pthread.h>
#include <stdlib.h>

#include "py_comm.h"
#include "raise.h"

struct pending {
    struct zpp_py_deferred later;
    PyObject *keep, *callback; /* owned; callback NULL until on_done */
    PyObject *memory_owner;    /* owned; a bytes object that has the arrays of the call */
    bool finished;             /* guarded by finished_lock, like `callback` */
    int holders;               /* the call and the Work; changed with the GIL held */
};

typedef struct Work {
    PyObject_HEAD zpp_work *work;
    struct pending *pending;
} Work;

static PyTypeObject *work_type;
static pthread_mutex_t finished_lock = PTHREAD_MUTEX_INITIALIZER;

static void pending_drop(struct pending *pending) {
    if (--pending->holders) return;
    Py_XDECREF(pending->callback);
    free(pending);
}

/* With the GIL: the call no longer needs its tensors. */
static void pending_release(struct pending *pending) {
    Py_CLEAR(pending->keep);
    Py_CLEAR(pending->memory_owner);
    pending_drop(pending);
}

static void drop_held(struct zpp_py_deferred *item) { pending_release((struct pending *)item); }

static void call_back(PyObject *callback) {
    PyObject *answer = PyObject_CallNoArgs(callback);
    if (!answer) PyErr_WriteUnraisable(callback);
    Py_XDECREF(answer);
}

/* On the progress thread, without the GIL. */
static void finished(void *ctx, zpp_status status, const struct zpp_err *err) {
    struct pending *pending = ctx;
    (void)status, (void)err;
    pthread_mutex_lock(&finished_lock);
    pending->finished = true;
    const bool wanted = pending->callback != NULL;
    pthread_mutex_unlock(&finished_lock);
    if (!wanted) {
        zpp_py_defer(&pending->later);
        return;
    }
    const PyGILState_STATE gil = PyGILState_Ensure();
    call_back(pending->callback);
    pending_release(pending);
    PyGILState_Release(gil);
}

PyObject *zpp_py_work_submit(PyObject *comm, const struct zpp_call *call, PyObject *keep, PyObject *memory_owner) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_comm *c = zpp_py_comm_acquire(comm);
    Work *self = c ? PyObject_New(Work, work_type) : NULL;
    struct pending *pending = self ? calloc(1, sizeof *pending) : NULL;
    zpp_status status = ZPP_OK;
    zpp_py_run_deferred();
    if (self) {
        self->work = NULL;
        self->pending = pending;
    }
    if (pending) {
        *pending = (struct pending){
            .later.run = drop_held, .keep = keep, .memory_owner = memory_owner, .holders = 2};
        status = zpp_comm_submit(c, call, finished, pending, &self->work, &err);
    } else if (self) {
        status = zpp_fail(&err, ZPP_NOMEM, "comm: no memory for an asynchronous call");
    }
    if (c) zpp_py_comm_release(comm);
    if (self && status == ZPP_OK) return (PyObject *)self;
    if (pending)
        pending_release(pending);
    else {
        Py_XDECREF(keep);
        Py_XDECREF(memory_owner);
    }
    Py_XDECREF(self);
    return status != ZPP_OK ? zpp_py_raise(&err) : NULL;
}

/* wait(timeout_s=0.0): True, or the call's error. 0: no limit. */
static PyObject *work_wait(PyObject *object, PyObject *args) {
    Work *self = (Work *)object;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait wait;
    double timeout_s = 0.0;
    if (!PyArg_ParseTuple(args, "|d", &timeout_s)) return NULL;
    zpp_py_wait_init(&wait, timeout_s > 0.0 ? (uint64_t)(timeout_s * 1e9) : 0);
    PyThreadState *state = PyEval_SaveThread();
    const zpp_status status = zpp_work_wait(self->work, &wait, &err);
    PyEval_RestoreThread(state);
    zpp_py_run_deferred();
    if (status != ZPP_OK) return zpp_py_raise(&err);
    Py_RETURN_TRUE;
}

static PyObject *work_done(PyObject *object, PyObject *none) {
    (void)none;
    return PyBool_FromLong(zpp_work_finished(((Work *)object)->work));
}

static PyObject *work_on_done(PyObject *object, PyObject *callback) {
    struct pending *pending = ((Work *)object)->pending;
    if (!PyCallable_Check(callback)) return PyErr_Format(PyExc_TypeError, "on_done: %R is not callable", callback);
    if (pending->callback) return PyErr_Format(PyExc_RuntimeError, "on_done: this work has a callback already");
    pthread_mutex_lock(&finished_lock);
    const bool late = pending->finished;
    if (!late) {
        Py_INCREF(callback);
        pending->callback = callback;
    }
    pthread_mutex_unlock(&finished_lock);
    if (late) call_back(callback);
    Py_RETURN_NONE;
}

static void work_dealloc(PyObject *object) {
    Work *self = (Work *)object;
    PyTypeObject *type = Py_TYPE(object);
    zpp_work_free(self->work);
    if (self->pending) pending_drop(self->pending);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyMethodDef work_methods[] = {
    {"wait", work_wait, METH_VARARGS,
     "wait(timeout_s=0.0, /)\n--\n\nTrue when the call is finished, or its error. 0: no limit."},
    {"done", work_done, METH_NOARGS, "done()\n--\n\nWhether the call is finished, well or not."},
    {"on_done", work_on_done, METH_O,
     "on_done(callback, /)\n--\n\nCall `callback()` when the call is finished, on the progress thread; at once if it "
     "is."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot work_slots[] = {
    {Py_tp_doc, "An asynchronous collective."},
    {Py_tp_methods, work_methods},
    {Py_tp_dealloc, work_dealloc},
    {0, NULL},
};
static PyType_Spec work_spec = {"zeropp._C.Work", sizeof(Work), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, work_slots};

/* --- Transfer ----------------------------------------------------------------------------------------------------- */

/* A transfer borrows its tensor until it is finished. One whose object dies before goes into a list, with the tensor,
 * and is freed when a later send or receive finds it finished. */
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
    {"source_rank", transfer_source, METH_NOARGS, "source_rank()\n--\n\nThe rank that sent it; -1 until it is known."},
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

int zpp_py_add_comm_work(PyObject *module) {
    work_type = (PyTypeObject *)PyType_FromSpec(&work_spec);
    transfer_type = (PyTypeObject *)PyType_FromSpec(&transfer_spec);
    if (!work_type || !transfer_type || PyModule_AddObjectRef(module, "Work", (PyObject *)work_type) != 0) return -1;
    return PyModule_AddObjectRef(module, "Transfer", (PyObject *)transfer_type);
}
