/* SPDX-License-Identifier: Apache-2.0
 *
 * The types Nccl and NcclWork: collectives of a Comm on CUDA memory (csrc/comm/nccl/nccl.h). `stream` is the address of
 * the caller's CUDA stream, `keep` what must live until the work is finished.
 *
 * Nccl(comm, ordinal)
 */
#include <Python.h>

#include "../base/device.h"
#include "../comm/nccl/nccl.h"
#include "../comm/nccl/nccl_api.h"
#include "op_entries.h"
#include "py_comm.h"
#include "raise.h"

enum { MOST_CALLS = 4096 };

typedef struct Nccl {
    PyObject_HEAD zpp_nccl *nccl; /* NULL after close */
    zpp_device *device;
    PyObject *comm; /* owned, and held until close */
    int ranks;
} Nccl;

typedef struct NcclWork {
    PyObject_HEAD zpp_nccl_work *work;
    PyObject *group, *keep; /* owned; the group, for its device */
} NcclWork;

static PyTypeObject *nccl_type, *work_type;

static zpp_nccl *nccl_of(PyObject *object) {
    struct zpp_err err = ZPP_ERR_INIT;
    Nccl *self = (Nccl *)object;
    if (self->nccl) return self->nccl;
    zpp_fail(&err, ZPP_STATE, "comm: this group is closed on GPUs; make a new one");
    zpp_py_raise(&err);
    return NULL;
}

static uint64_t timeout_of(PyObject *comm) {
    const zpp_comm *core = zpp_py_comm_get(comm);
    if (core) return zpp_comm_timeout_ns(core);
    PyErr_Clear();
    return 0;
}

/* --- life --------------------------------------------------------------------------------------------------------- */

static int nccl_init(PyObject *object, PyObject *args, PyObject *kwargs) {
    Nccl *self = (Nccl *)object;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait wait;
    PyObject *comm;
    int ordinal;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "Oi", &comm, &ordinal)) return -1;
    if (self->comm) return PyErr_Format(PyExc_RuntimeError, "Nccl: made once, used for ever"), -1;
    zpp_comm *core = zpp_py_comm_acquire(comm);
    if (!core) return -1;
    zpp_py_wait_init(&wait, zpp_comm_timeout_ns(core));
    self->ranks = zpp_comm_ranks(core);
    PyThreadState *state = PyEval_SaveThread();
    zpp_status status = zpp_device_cuda_create(ordinal, &self->device, &err);
    if (status == ZPP_OK) status = zpp_nccl_create(core, self->device, &wait, &self->nccl, &err);
    PyEval_RestoreThread(state);
    zpp_py_comm_release(comm);
    if (status != ZPP_OK) return zpp_py_raise(&err), -1;
    Py_INCREF(comm);
    zpp_py_comm_hold(comm);
    self->comm = comm;
    return 0;
}

static void end(Nccl *self) {
    zpp_nccl *nccl = self->nccl;
    self->nccl = NULL;
    Py_BEGIN_ALLOW_THREADS
    zpp_nccl_destroy(nccl);
    Py_END_ALLOW_THREADS
    if (nccl && self->comm) zpp_py_comm_drop(self->comm);
}

static PyObject *nccl_close(PyObject *object, PyObject *none) {
    (void)none;
    end((Nccl *)object);
    Py_RETURN_NONE;
}

static void nccl_dealloc(PyObject *object) {
    Nccl *self = (Nccl *)object;
    PyTypeObject *type = Py_TYPE(object);
    end(self);
    Py_BEGIN_ALLOW_THREADS
    zpp_device_destroy(self->device); /* works hold the group, so all their events are gone */
    Py_END_ALLOW_THREADS
    Py_XDECREF(self->comm);
    PyObject_Free(object);
    Py_DECREF(type);
}

/* --- calls -------------------------------------------------------------------------------------------------------- */

static PyObject *work_new(PyObject *group, zpp_nccl_work *work, PyObject *keep) {
    NcclWork *self = PyObject_New(NcclWork, work_type);
    if (!self) {
        zpp_nccl_work_free(work);
        return NULL;
    }
    self->work = work;
    Py_INCREF(group);
    Py_INCREF(keep);
    self->group = group;
    self->keep = keep;
    return (PyObject *)self;
}

static PyObject *run(PyObject *object, const struct zpp_call *calls, size_t count, PyObject *keep,
                     unsigned long long stream) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait wait;
    zpp_nccl_work *work = NULL;
    zpp_nccl *nccl = nccl_of(object);
    if (!nccl) return NULL;
    zpp_py_wait_init(&wait, timeout_of(((Nccl *)object)->comm));
    PyThreadState *state = PyEval_SaveThread();
    const zpp_status status =
        zpp_nccl_submit(nccl, calls, count, (void *)(uintptr_t)stream, &wait, &work, &err);
    PyEval_RestoreThread(state);
    return status == ZPP_OK ? work_new(object, work, keep) : zpp_py_raise(&err);
}

static int read_call(PyObject *tuple, struct zpp_call *call) {
    int coll, dtype, op, root;
    long long dst, src, elems;
    if (!PyArg_ParseTuple(tuple, "iiiiLLL", &coll, &dtype, &op, &root, &dst, &src, &elems)) return -1;
    if (elems < 0) return PyErr_Format(PyExc_ValueError, "submit: %lld elements", elems), -1;
    if (coll >= ZPP_COLL_ALL_TO_ALL && coll <= ZPP_COLL_SCATTER)
        return PyErr_Format(PyExc_ValueError, "submit: collective %d wants submit_exchange", coll), -1;
    *call = (struct zpp_call){.coll = (enum zpp_coll)coll,
                              .dtype = (zpp_dtype)dtype,
                              .op = (zpp_reduce_op)op,
                              .root = root,
                              .dst = (void *)(uintptr_t)dst,
                              .src = (const void *)(uintptr_t)src,
                              .elems = (size_t)elems};
    return 0;
}

/* submit([(coll, dtype, op, root, dst_ptr, src_ptr, elems), ...], keep, stream): all of them as one. */
static PyObject *submit(PyObject *self, PyObject *args) {
    PyObject *list, *keep;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "OOK", &list, &keep, &stream)) return NULL;
    const Py_ssize_t count = PyList_Size(list);
    if (count < 0) return NULL;
    if (count < 1 || count > MOST_CALLS)
        return PyErr_Format(PyExc_ValueError, "submit: %zd calls, wanted 1 to %d", count, (int)MOST_CALLS);
    struct zpp_call *calls = PyMem_Calloc((size_t)count, sizeof *calls);
    if (!calls) return PyErr_NoMemory();
    int failed = 0;
    for (Py_ssize_t i = 0; i < count && !failed; i++) failed = read_call(PyList_GetItem(list, i), &calls[i]);
    PyObject *answer = failed ? NULL : run(self, calls, (size_t)count, keep, stream);
    PyMem_Free(calls);
    return answer;
}

/* (call's arguments..., keep, stream): the first `count`, and the other two. */
static PyObject *first_of(PyObject *args, Py_ssize_t count, PyObject **keep, unsigned long long *stream) {
    if (PyTuple_Size(args) != count + 2)
        return PyErr_Format(PyExc_TypeError, "%zd arguments, wanted %zd", PyTuple_Size(args), count + 2);
    *keep = PyTuple_GetItem(args, count);
    *stream = PyLong_AsUnsignedLongLong(PyTuple_GetItem(args, count + 1));
    return PyErr_Occurred() ? NULL : PyTuple_GetSlice(args, 0, count);
}

static PyObject *submit_pieces(PyObject *object, PyObject *args, Py_ssize_t count,
                               PyObject *(*read)(int ranks, PyObject *args, struct zpp_call *call)) {
    struct zpp_call call;
    PyObject *keep = NULL;
    unsigned long long stream = 0;
    PyObject *first = first_of(args, count, &keep, &stream);
    PyObject *owner = first ? read(((Nccl *)object)->ranks, first, &call) : NULL;
    PyObject *answer = owner && keep ? run(object, &call, 1, keep, stream) : NULL;
    Py_XDECREF(first);
    Py_XDECREF(owner);
    return answer;
}

static PyObject *submit_exchange(PyObject *self, PyObject *args) {
    return submit_pieces(self, args, PyTuple_Size(args) == 8 ? 6 : 5, zpp_py_exchange_call);
}

static PyObject *submit_gather(PyObject *self, PyObject *args) {
    return submit_pieces(self, args, 4, zpp_py_gather_call);
}

static PyObject *transfer(PyObject *object, PyObject *args, bool sends) {
    struct zpp_err err = ZPP_ERR_INIT;
    long long data, bytes;
    int peer;
    PyObject *keep;
    unsigned long long stream;
    zpp_nccl_work *work = NULL;
    zpp_nccl *nccl = nccl_of(object);
    if (!nccl || !PyArg_ParseTuple(args, "LLiOK", &data, &bytes, &peer, &keep, &stream)) return NULL;
    if (bytes < 0) return PyErr_Format(PyExc_ValueError, "comm: a tensor of %lld bytes", bytes);
    void *at = (void *)(uintptr_t)data, *native = (void *)(uintptr_t)stream;
    PyThreadState *state = PyEval_SaveThread();
    const zpp_status status = sends ? zpp_nccl_send(nccl, at, (size_t)bytes, peer, native, &work, &err)
                                    : zpp_nccl_recv(nccl, at, (size_t)bytes, peer, native, &work, &err);
    PyEval_RestoreThread(state);
    return status == ZPP_OK ? work_new(object, work, keep) : zpp_py_raise(&err);
}

static PyObject *send(PyObject *self, PyObject *args) { return transfer(self, args, true); }

static PyObject *recv(PyObject *self, PyObject *args) { return transfer(self, args, false); }

static PyObject *get_stream(PyObject *object, void *closure) {
    (void)closure;
    const zpp_nccl *nccl = nccl_of(object);
    return nccl ? PyLong_FromVoidPtr(zpp_nccl_stream(nccl)) : NULL;
}

static PyMethodDef nccl_methods[] = {
    {"submit", submit, METH_VARARGS,
     "submit(calls, keep, stream, /)\n--\n\nCollectives as one, in order: (coll, dtype, op, root, dst_ptr, src_ptr, "
     "elems); an NcclWork."},
    {"submit_exchange", submit_exchange, METH_VARARGS,
     "submit_exchange(coll, dtype, root, dsts, srcs, [rows,] keep, stream, /)\n--\n\nAll-to-all, gather, scatter; "
     "rows: of what layer, for messages."},
    {"submit_gather", submit_gather, METH_VARARGS,
     "submit_gather(dst_ptrs, src_ptr, src_elems, dtype, keep, stream, /)\n--\n\nall_gather into one tensor a rank."},
    {"send", send, METH_VARARGS, "send(ptr, bytes, to, keep, stream, /)\n--\n\nAn NcclWork."},
    {"recv", recv, METH_VARARGS, "recv(ptr, bytes, source, keep, stream, /)\n--\n\nAn NcclWork."},
    {"close", nccl_close, METH_NOARGS, "close()\n--\n\nWaits for what was submitted; before the Comm is closed."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef nccl_getset[] = {
    {"stream", get_stream, NULL, "The address of the CUDA stream that the collectives run on.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot nccl_slots[] = {
    {Py_tp_doc, "Nccl(comm, ordinal)\n--\n\nCollectives of a Comm on CUDA memory. Collective."},
    {Py_tp_init, nccl_init},
    {Py_tp_methods, nccl_methods},
    {Py_tp_getset, nccl_getset},
    {Py_tp_dealloc, nccl_dealloc},
    {0, NULL},
};
static PyType_Spec nccl_spec = {"zeropp._C.Nccl", sizeof(Nccl), 0, Py_TPFLAGS_DEFAULT, nccl_slots};

/* --- works -------------------------------------------------------------------------------------------------------- */

/* order(stream): what the stream gets from now on runs after the work; the host goes on. */
static PyObject *work_order(PyObject *object, PyObject *args) {
    struct zpp_err err = ZPP_ERR_INIT;
    unsigned long long stream;
    if (!PyArg_ParseTuple(args, "K", &stream)) return NULL;
    zpp_nccl_work *work = ((NcclWork *)object)->work;
    PyThreadState *state = PyEval_SaveThread();
    const zpp_status status = zpp_nccl_work_order(work, (void *)(uintptr_t)stream, &err);
    PyEval_RestoreThread(state);
    return zpp_py_result(status, &err);
}

static PyObject *work_wait(PyObject *object, PyObject *args) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait wait;
    double timeout_s = 0.0;
    if (!PyArg_ParseTuple(args, "|d", &timeout_s)) return NULL;
    zpp_py_wait_init(&wait, timeout_s > 0.0 ? (uint64_t)(timeout_s * 1e9) : 0);
    zpp_nccl_work *work = ((NcclWork *)object)->work;
    PyThreadState *state = PyEval_SaveThread();
    const zpp_status status = zpp_nccl_work_wait(work, &wait, &err);
    PyEval_RestoreThread(state);
    if (status != ZPP_OK) return zpp_py_raise(&err);
    Py_RETURN_TRUE;
}

/* A work that failed is done: its wait raises. */
static PyObject *work_done(PyObject *object, PyObject *none) {
    (void)none;
    zpp_nccl_work *work = ((NcclWork *)object)->work;
    PyThreadState *state = PyEval_SaveThread();
    const zpp_status status = zpp_nccl_work_wait(work, NULL, NULL);
    PyEval_RestoreThread(state);
    return PyBool_FromLong(status != ZPP_AGAIN);
}

static void work_dealloc(PyObject *object) {
    NcclWork *self = (NcclWork *)object;
    PyTypeObject *type = Py_TYPE(object);
    zpp_nccl_work_free(self->work);
    Py_XDECREF(self->keep);
    Py_XDECREF(self->group);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyMethodDef work_methods[] = {
    {"order", work_order, METH_VARARGS, "order(stream, /)\n--\n\nThe stream waits for the work; the host does not."},
    {"wait", work_wait, METH_VARARGS, "wait(timeout_s=0.0, /)\n--\n\nThe host waits: True, or the call's error."},
    {"done", work_done, METH_NOARGS, "done()\n--\n\nWhether the work is finished, well or not."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot work_slots[] = {
    {Py_tp_doc, "A collective on CUDA memory."},
    {Py_tp_methods, work_methods},
    {Py_tp_dealloc, work_dealloc},
    {0, NULL},
};
static PyType_Spec work_spec = {"zeropp._C.NcclWork", sizeof(NcclWork), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, work_slots};

/* --- the module --------------------------------------------------------------------------------------------------- */

static PyObject *version(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    struct zpp_err err = ZPP_ERR_INIT;
    const struct zpp_nccl_api *api = NULL;
    zpp_status status;
    Py_BEGIN_ALLOW_THREADS
    status = zpp_nccl_api(&api, &err);
    Py_END_ALLOW_THREADS
    return status == ZPP_OK ? PyLong_FromLong(api->version) : zpp_py_raise(&err);
}

/* current_stream(type, index): the address of torch's current stream in this thread. */
static PyObject *current_stream(PyObject *module, PyObject *args) {
    (void)module;
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device = NULL;
    void *native = NULL;
    const char *name;
    int32_t type = 0;
    int index;
    if (!PyArg_ParseTuple(args, "si:current_stream", &name, &index)) return NULL;
    zpp_status status = zpp_accelerator_type(name, &type, &err);
    if (status == ZPP_OK) status = zpp_accelerator_current(type, index, &device, &native, &err);
    return status == ZPP_OK ? PyLong_FromVoidPtr(native) : zpp_py_raise(&err);
}

static PyMethodDef functions[] = {
    {"current_stream", current_stream, METH_VARARGS,
     "current_stream(type, index, /)\n--\n\nThe address of torch's current stream of this thread on an accelerator."},
    {"nccl_version", version, METH_NOARGS,
     "nccl_version()\n--\n\nOf the NCCL that collectives on GPUs use, such as 22809 for 2.28.9. Loads it. Raises "
     "NotBuiltError."},
    {NULL, NULL, 0, NULL},
};

int zpp_py_add_nccl(PyObject *module) {
    nccl_type = (PyTypeObject *)PyType_FromSpec(&nccl_spec);
    work_type = (PyTypeObject *)PyType_FromSpec(&work_spec);
    if (!nccl_type || !work_type || PyModule_AddObjectRef(module, "Nccl", (PyObject *)nccl_type) != 0 ||
        PyModule_AddObjectRef(module, "NcclWork", (PyObject *)work_type) != 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
