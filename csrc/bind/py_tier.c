/* SPDX-License-Identifier: Apache-2.0
 *
 * The type Tier: optimizer states in a scratch file (zero/tier.h). What it is for, and when the file goes away, is
 * python/zeropp/zero/offload.py's to know; the step is called by py_step.c.
 *
 * Warnings of the I/O engine come from its threads, which never take the GIL: the last one is kept here until the
 * façade asks.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030a0000
#include <Python.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "py_aio.h"
#include "py_tier.h"
#include "raise.h"

typedef struct Tier {
    PyObject_HEAD
    zpp_tier *tier; /* NULL after close */
    pthread_mutex_t lock; /* guards `warning` */
    bool lock_ready;
    char warning[512];
} Tier;

static PyTypeObject *tier_type;

static void keep_warning(void *ctx, const char *text) {
    Tier *self = ctx;
    pthread_mutex_lock(&self->lock);
    snprintf(self->warning, sizeof self->warning, "%s", text);
    pthread_mutex_unlock(&self->lock);
}

zpp_tier *zpp_py_tier_get(PyObject *object) {
    if (!PyObject_TypeCheck(object, tier_type)) {
        PyErr_SetString(PyExc_TypeError, "tier: wanted a zeropp._C.Tier");
        return NULL;
    }
    if (!((Tier *)object)->tier) {
        struct zpp_err err = ZPP_ERR_INIT;
        zpp_fail(&err, ZPP_STATE, "tier: closed with its model; prepare a new one");
        zpp_py_raise(&err);
    }
    return ((Tier *)object)->tier;
}

/* Tier(folders, path, stripe_bytes, fraction, moments, chunk_elems, buffers, depth, block_bytes, checksums, early); 0:
 * chosen. */
static int tier_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    Tier *tier = (Tier *)self;
    struct zpp_tier_options options = { .log = keep_warning, .log_ctx = self };
    int checksums, backward_step;
    unsigned buffers, depth;
    Py_ssize_t stripe_bytes, chunk_elems, block_bytes;
    PyObject *tuple;
    const char *folders[ZPP_AIO_PARTS];
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!yndInIInpp", &PyTuple_Type, &tuple, &options.path, &stripe_bytes, &options.fraction,
                          &options.moments, &chunk_elems, &buffers, &depth, &block_bytes, &checksums, &backward_step) ||
        !zpp_py_aio_folders(tuple, folders, &options.folders_count))
        return -1;
    options.folders = folders;
    options.stripe_bytes = (size_t)stripe_bytes;
    if (tier->lock_ready) return PyErr_SetString(PyExc_TypeError, "tier: made twice"), -1;
    options.chunk_elems = (size_t)chunk_elems;
    options.buffers = buffers;
    options.depth = depth;
    options.block_bytes = (size_t)block_bytes;
    options.checksums = checksums;
    options.backward_step = backward_step;
    if (pthread_mutex_init(&tier->lock, NULL) != 0) return PyErr_NoMemory(), -1;
    tier->lock_ready = true;
    struct zpp_err err = ZPP_ERR_INIT;
    if (zpp_tier_create(&options, &tier->tier, &err) == ZPP_OK) return 0;
    zpp_py_raise(&err);
    return -1;
}

static void end_tier(Tier *self) {
    zpp_tier *tier = self->tier;
    self->tier = NULL;
    PyThreadState *thread = PyEval_SaveThread();
    zpp_tier_destroy(tier);
    PyEval_RestoreThread(thread);
}

static void tier_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    Tier *self = (Tier *)object;
    end_tier(self);
    if (self->lock_ready) pthread_mutex_destroy(&self->lock);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *tier_close(PyObject *self, PyObject *unused) {
    (void)unused;
    end_tier((Tier *)self);
    Py_RETURN_NONE;
}

static PyObject *tier_add(PyObject *self, PyObject *args) {
    Py_ssize_t elems;
    int master, slice = -1;
    zpp_tier *tier = zpp_py_tier_get(self);
    if (!tier || !PyArg_ParseTuple(args, "np", &elems, &master)) return NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    if (zpp_tier_add(tier, (size_t)elems, master, &slice, &err) != ZPP_OK) return zpp_py_raise(&err);
    return PyLong_FromLong(slice);
}

static PyObject *tier_seal(PyObject *self, PyObject *unused) {
    (void)unused;
    zpp_tier *tier = zpp_py_tier_get(self);
    if (!tier) return NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_tier_seal(tier, &fault, &err);
    PyEval_RestoreThread(thread);
    if (status != ZPP_OK) return zpp_py_raise_aio(&err, &fault);
    Py_RETURN_NONE;
}

/* copy(slice, kind, first, elems, address, write): between the tier and float32 memory that the caller keeps alive. */
static PyObject *tier_copy(PyObject *self, PyObject *args) {
    int slice, kind, write;
    Py_ssize_t first, elems;
    unsigned long long address;
    zpp_tier *tier = zpp_py_tier_get(self);
    if (!tier || !PyArg_ParseTuple(args, "iinnKp", &slice, &kind, &first, &elems, &address, &write)) return NULL;
    if (kind < 0 || kind >= ZPP_TIER_KINDS || first < 0 || elems < 0)
        return PyErr_SetString(PyExc_ValueError, "tier: kind, first or elems is out of range"), NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_tier_copy(tier, slice, (enum zpp_tier_kind)kind, (size_t)first, (size_t)elems,
                                            (float *)(uintptr_t)address, write, &fault, &err);
    PyEval_RestoreThread(thread);
    if (status != ZPP_OK) return zpp_py_raise_aio(&err, &fault);
    Py_RETURN_NONE;
}

static PyObject *by_kind(const size_t bytes[ZPP_TIER_KINDS]) {
    return Py_BuildValue("[nnnn]", (Py_ssize_t)bytes[ZPP_TIER_MASTER], (Py_ssize_t)bytes[ZPP_TIER_EXP_AVG],
                         (Py_ssize_t)bytes[ZPP_TIER_EXP_AVG_SQ], (Py_ssize_t)bytes[ZPP_TIER_MAX_EXP_AVG_SQ]);
}

static PyObject *tier_figures(PyObject *self, PyObject *unused) {
    (void)unused;
    zpp_tier *tier = zpp_py_tier_get(self);
    if (!tier) return NULL;
    struct zpp_tier_figures seen;
    zpp_tier_figures(tier, &seen);
    return Py_BuildValue("{s:N,s:N,s:n,s:n,s:K,s:K,s:K,s:n,s:K,s:K,s:K,s:s}", "file", by_kind(seen.file_bytes), "held",
                         by_kind(seen.held_bytes), "reserved_bytes", (Py_ssize_t)seen.reserved_bytes, "buffer_bytes",
                         (Py_ssize_t)seen.buffer_bytes, "read_bytes", (unsigned long long)seen.read_bytes,
                         "written_bytes", (unsigned long long)seen.written_bytes, "checked_bytes",
                         (unsigned long long)seen.checked_bytes, "sums_bytes", (Py_ssize_t)seen.sums_bytes, "steps",
                         (unsigned long long)seen.steps, "step_ns", (unsigned long long)seen.step_ns, "waited_ns",
                         (unsigned long long)seen.waited_ns, "backend", seen.uring ? "io_uring" : "threads");
}

static PyObject *tier_mend(PyObject *self, PyObject *unused) {
    (void)unused;
    zpp_tier *tier = zpp_py_tier_get(self);
    if (!tier) return NULL;
    zpp_tier_mend(tier);
    Py_RETURN_NONE;
}

static PyObject *tier_take_warning(PyObject *object, PyObject *unused) {
    (void)unused;
    Tier *self = (Tier *)object;
    char text[sizeof self->warning];
    pthread_mutex_lock(&self->lock);
    snprintf(text, sizeof text, "%s", self->warning);
    self->warning[0] = '\0';
    pthread_mutex_unlock(&self->lock);
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

static PyObject *tier_get_torn(PyObject *self, void *unused) {
    (void)unused;
    const zpp_tier *tier = ((Tier *)self)->tier;
    return PyBool_FromLong(tier && zpp_tier_torn(tier));
}

static PyMethodDef tier_methods[] = {
    { "add", tier_add, METH_VARARGS, "add(elems, master) -> slice" },
    { "seal", tier_seal, METH_NOARGS, "Make the file." },
    { "copy", tier_copy, METH_VARARGS, "copy(slice, kind, first, elems, address, write)" },
    { "figures", tier_figures, METH_NOARGS, "Bytes and times." },
    { "mend", tier_mend, METH_NOARGS, "All of it was loaded anew." },
    { "take_warning", tier_take_warning, METH_NOARGS, "The engine's last warning, once; or ''." },
    { "close", tier_close, METH_NOARGS, "End the engine; the file stays." },
    { NULL, NULL, 0, NULL },
};
static PyGetSetDef tier_getset[] = {
    { "torn", tier_get_torn, NULL, "did a step fail half-way?", NULL },
    { NULL, NULL, NULL, NULL, NULL },
};
static PyType_Slot tier_slots[] = {
    { Py_tp_init, tier_init },       { Py_tp_dealloc, tier_dealloc }, { Py_tp_methods, tier_methods },
    { Py_tp_getset, tier_getset },   { 0, NULL },
};
static PyType_Spec tier_spec = { "zeropp._C.Tier", sizeof(Tier), 0, Py_TPFLAGS_DEFAULT, tier_slots };

int zpp_py_add_tier(PyObject *module);

int zpp_py_add_tier(PyObject *module) {
    tier_type = (PyTypeObject *)PyType_FromSpec(&tier_spec);
    return tier_type ? PyModule_AddObjectRef(module, "Tier", (PyObject *)tier_type) : -1;
}
