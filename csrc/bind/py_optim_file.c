/* SPDX-License-Identifier: Apache-2.0
 *
 * The type OptimFile: optimizer states in a scratch file (zero/offload/optim_file.h). python/zeropp decides what it is
 * for and when the file goes away; the step is called by py_step.c. And the layout of units and such files.
 *
 * Warnings of the I/O engine come from its threads, which never take the GIL: the last one is kept here until the
 * façade fetches it.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "raise.h"
#include "py_zero.h"

typedef struct OptimFile {
    PyObject_HEAD
    zpp_optim_file *optim_file; /* NULL after close */
    pthread_mutex_t lock;       /* guards `warning` */
    bool lock_ready;
    char warning[512];
} OptimFile;

static PyTypeObject *optim_file_type;

static void keep_warning(void *ctx, const char *text) {
    OptimFile *self = ctx;
    pthread_mutex_lock(&self->lock);
    snprintf(self->warning, sizeof self->warning, "%s", text);
    pthread_mutex_unlock(&self->lock);
}

zpp_optim_file *zpp_py_optim_file_get(PyObject *object) {
    if (!PyObject_TypeCheck(object, optim_file_type)) {
        PyErr_SetString(PyExc_TypeError, "optim_file: wanted a zeropp._C.OptimFile");
        return NULL;
    }
    if (!((OptimFile *)object)->optim_file) {
        struct zpp_err err = ZPP_ERR_INIT;
        zpp_fail(&err, ZPP_STATE, "tier: closed with its model; prepare a new one");
        zpp_py_raise(&err);
    }
    return ((OptimFile *)object)->optim_file;
}

/* OptimFile(folders, path, stripe_bytes, fraction, moments, chunk_elems, buffers, depth, block_bytes, checksums,
 * backward_step); 0: chosen. */
static int optim_file_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    OptimFile *optim_file = (OptimFile *)self;
    struct zpp_optim_file_options options = { .file.log = keep_warning, .file.log_ctx = self };
    int checksums, backward_step;
    Py_ssize_t stripe_bytes, chunk_elems, block_bytes;
    PyObject *tuple;
    const char *folders[ZPP_AIO_PARTS];
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!yndInIInpp", &PyTuple_Type, &tuple, &options.file.path, &stripe_bytes,
                          &options.fraction, &options.moments, &chunk_elems, &options.buffers, &options.file.depth,
                          &block_bytes, &checksums, &backward_step) ||
        !zpp_py_aio_folders(tuple, folders, &options.file.folders_count))
        return -1;
    options.file.folders = folders;
    options.file.stripe_bytes = (size_t)stripe_bytes;
    if (optim_file->lock_ready) return PyErr_SetString(PyExc_TypeError, "tier: made twice"), -1;
    options.chunk_elems = (size_t)chunk_elems;
    options.file.block_bytes = (size_t)block_bytes;
    options.file.checksums = checksums;
    options.backward_step = backward_step;
    if (pthread_mutex_init(&optim_file->lock, NULL) != 0) return PyErr_NoMemory(), -1;
    optim_file->lock_ready = true;
    struct zpp_err err = ZPP_ERR_INIT;
    if (zpp_optim_file_create(&options, &optim_file->optim_file, &err) == ZPP_OK) return 0;
    zpp_py_raise(&err);
    return -1;
}

static void end_file(OptimFile *self) {
    zpp_optim_file *optim_file = self->optim_file;
    self->optim_file = NULL;
    PyThreadState *thread = PyEval_SaveThread();
    zpp_optim_file_destroy(optim_file);
    PyEval_RestoreThread(thread);
}

static void optim_file_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    OptimFile *self = (OptimFile *)object;
    end_file(self);
    if (self->lock_ready) pthread_mutex_destroy(&self->lock);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *optim_file_close(PyObject *self, PyObject *unused) {
    (void)unused;
    end_file((OptimFile *)self);
    Py_RETURN_NONE;
}

static PyObject *optim_file_add(PyObject *self, PyObject *args) {
    Py_ssize_t elems;
    int master, shard = -1;
    zpp_optim_file *optim_file = zpp_py_optim_file_get(self);
    if (!optim_file || !PyArg_ParseTuple(args, "np", &elems, &master)) return NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    if (zpp_optim_file_add(optim_file, (size_t)elems, master, &shard, &err) != ZPP_OK) return zpp_py_raise(&err);
    return PyLong_FromLong(shard);
}

static PyObject *optim_file_hold(PyObject *self, PyObject *unused) {
    (void)unused;
    zpp_optim_file *optim_file = zpp_py_optim_file_get(self);
    if (!optim_file) return NULL;
    zpp_optim_file_hold(optim_file);
    Py_RETURN_NONE;
}

static PyObject *optim_file_seal(PyObject *self, PyObject *unused) {
    (void)unused;
    zpp_optim_file *optim_file = zpp_py_optim_file_get(self);
    if (!optim_file) return NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_optim_file_seal(optim_file, &fault, &err);
    PyEval_RestoreThread(thread);
    return zpp_py_result_aio(status, &err, &fault);
}

/* copy(shard, kind, first, elems, address, write): between the optimizer file and float32 memory that the caller keeps
 * alive. */
static PyObject *optim_file_copy(PyObject *self, PyObject *args) {
    int shard, kind, write;
    Py_ssize_t first, elems;
    unsigned long long address;
    zpp_optim_file *optim_file = zpp_py_optim_file_get(self);
    if (!optim_file || !PyArg_ParseTuple(args, "iinnKp", &shard, &kind, &first, &elems, &address, &write)) return NULL;
    if (kind < 0 || kind >= ZPP_TIER_KINDS || first < 0 || elems < 0)
        return PyErr_SetString(PyExc_ValueError, "tier: kind, first or elems is out of range"), NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_optim_file_copy(optim_file, shard, (enum zpp_optim_file_kind)kind, (size_t)first,
                                                  (size_t)elems, (float *)(uintptr_t)address, write, &fault, &err);
    PyEval_RestoreThread(thread);
    return zpp_py_result_aio(status, &err, &fault);
}

static PyObject *by_kind(const size_t bytes[ZPP_TIER_KINDS]) {
    return Py_BuildValue("[nnnn]", (Py_ssize_t)bytes[ZPP_TIER_MASTER], (Py_ssize_t)bytes[ZPP_TIER_EXP_AVG],
                         (Py_ssize_t)bytes[ZPP_TIER_EXP_AVG_SQ], (Py_ssize_t)bytes[ZPP_TIER_MAX_EXP_AVG_SQ]);
}

static PyObject *optim_file_figures(PyObject *self, PyObject *unused) {
    (void)unused;
    zpp_optim_file *optim_file = zpp_py_optim_file_get(self);
    if (!optim_file) return NULL;
    struct zpp_optim_file_figures seen;
    zpp_optim_file_figures(optim_file, &seen);
    return Py_BuildValue("{s:N,s:N,s:n,s:n,s:K,s:K,s:K,s:n,s:K,s:K,s:K,s:s}", "file", by_kind(seen.file_bytes), "held",
                         by_kind(seen.held_bytes), "reserved_bytes", (Py_ssize_t)seen.reserved_bytes, "buffer_bytes",
                         (Py_ssize_t)seen.buffer_bytes, "read_bytes", (unsigned long long)seen.read_bytes,
                         "written_bytes", (unsigned long long)seen.written_bytes, "checked_bytes",
                         (unsigned long long)seen.checked_bytes, "sums_bytes", (Py_ssize_t)seen.sums_bytes, "steps",
                         (unsigned long long)seen.steps, "step_ns", (unsigned long long)seen.step_ns, "waited_ns",
                         (unsigned long long)seen.waited_ns, "backend", seen.uring ? "io_uring" : "threads");
}

static PyObject *optim_file_recovered(PyObject *self, PyObject *unused) {
    (void)unused;
    zpp_optim_file *optim_file = zpp_py_optim_file_get(self);
    if (!optim_file) return NULL;
    zpp_optim_file_recovered(optim_file);
    Py_RETURN_NONE;
}

static PyObject *optim_file_take_warning(PyObject *object, PyObject *unused) {
    (void)unused;
    OptimFile *self = (OptimFile *)object;
    char text[sizeof self->warning];
    pthread_mutex_lock(&self->lock);
    snprintf(text, sizeof text, "%s", self->warning);
    self->warning[0] = '\0';
    pthread_mutex_unlock(&self->lock);
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

static PyObject *optim_file_get_inconsistent(PyObject *self, void *unused) {
    (void)unused;
    const zpp_optim_file *optim_file = ((OptimFile *)self)->optim_file;
    return PyBool_FromLong(optim_file && zpp_optim_file_inconsistent(optim_file));
}

static PyMethodDef optim_file_methods[] = {
    { "add", optim_file_add, METH_VARARGS, "add(elems, master) -> shard" },
    { "hold", optim_file_hold, METH_NOARGS, "All shards so far stay in memory; the fraction is of the next ones." },
    { "seal", optim_file_seal, METH_NOARGS, "Make the file." },
    { "copy", optim_file_copy, METH_VARARGS, "copy(shard, kind, first, elems, address, write)" },
    { "figures", optim_file_figures, METH_NOARGS, "Bytes and times." },
    { "recovered", optim_file_recovered, METH_NOARGS, "All of it was loaded anew." },
    { "take_warning", optim_file_take_warning, METH_NOARGS, "The engine's last warning, once; or ''." },
    { "close", optim_file_close, METH_NOARGS, "End the engine; the file stays." },
    { NULL, NULL, 0, NULL },
};
static PyGetSetDef optim_file_getset[] = {
    { "inconsistent", optim_file_get_inconsistent, NULL, "True if a step failed half-way.", NULL },
    { NULL, NULL, NULL, NULL, NULL },
};
static PyType_Slot optim_file_slots[] = {
    { Py_tp_init, optim_file_init },       { Py_tp_dealloc, optim_file_dealloc }, { Py_tp_methods, optim_file_methods },
    { Py_tp_getset, optim_file_getset },   { 0, NULL },
};
static PyType_Spec optim_file_spec = { "zeropp._C.OptimFile", sizeof(OptimFile), 0, Py_TPFLAGS_DEFAULT,
                                       optim_file_slots };

/* --- layouts ------------------------------------------------------------------------------------------------------ */

/* The arithmetic of units (zero/unit.h) and of states in a file, for zeropp.estimate, which has neither yet. */
static PyObject *unit_layout(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *numels;
    Py_ssize_t elem_bytes;
    int ranks;
    if (!PyArg_ParseTuple(args, "O!ni:unit_layout", &PyList_Type, &numels, &elem_bytes, &ranks)) return NULL;
    if (elem_bytes < 1 || elem_bytes > 64 || ranks < 1) {
        PyErr_Format(PyExc_ValueError, "unit_layout: %zd bytes an element and %d ranks", elem_bytes, ranks);
        return NULL;
    }
    const size_t count = (size_t)PyList_Size(numels);
    size_t *sizes = calloc(2 * count + 1, sizeof *sizes);
    if (!sizes) return PyErr_NoMemory();
    for (size_t i = 0; i < count; ++i) sizes[i] = PyLong_AsSize_t(PyList_GetItem(numels, (Py_ssize_t)i));
    size_t elems = 0, shard_elems = 0;
    if (!PyErr_Occurred())
        zpp_unit_layout(count, sizes, (size_t)elem_bytes, ranks, sizes + count, &elems, &shard_elems);
    free(sizes);
    return PyErr_Occurred() ? NULL : Py_BuildValue("nn", (Py_ssize_t)elems, (Py_ssize_t)shard_elems);
}

static int shard_plan(PyObject *pair, struct zpp_optim_file_shard_plan *out) {
    Py_ssize_t elems;
    int master, held = 0;
    if (!PyArg_ParseTuple(pair, "np|p", &elems, &master, &held)) return -1;
    *out = (struct zpp_optim_file_shard_plan){ .elems = (size_t)elems, .master = master, .held = held };
    return 0;
}

static PyObject *optim_file_plan(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *list;
    struct zpp_optim_file_options options = { 0 };
    int backward_step;
    if (!PyArg_ParseTuple(args, "O!dIp:optim_file_plan", &PyList_Type, &list, &options.fraction, &options.moments,
                          &backward_step))
        return NULL;
    options.backward_step = backward_step;
    const size_t count = (size_t)PyList_Size(list);
    struct zpp_optim_file_shard_plan *shards = calloc(count + 1, sizeof *shards);
    if (!shards) return PyErr_NoMemory();
    int failed = 0;
    for (size_t i = 0; i < count && !failed; i++) failed = shard_plan(PyList_GetItem(list, (Py_ssize_t)i), &shards[i]);
    struct zpp_optim_file_plan plan;
    struct zpp_err err = ZPP_ERR_INIT;
    const zpp_status status = failed ? ZPP_OK : zpp_optim_file_plan(&options, shards, count, &plan, &err);
    free(shards);
    if (failed) return NULL;
    if (status != ZPP_OK) return zpp_py_raise(&err);
    return Py_BuildValue("nn", (Py_ssize_t)plan.buffer_bytes, (Py_ssize_t)plan.chunk_elems);
}

static PyMethodDef layout_functions[] = {
    { "optim_file_plan", optim_file_plan, METH_VARARGS,
      "optim_file_plan(shards, fraction, moments, unit_by_unit, /)\n--\n\n(bytes of a step's buffers, elements of a "
     "record) of states in a file. Shards: [(elements, has a master, stays in memory)]; moments: a bit each."},
    {"unit_layout", unit_layout, METH_VARARGS,
     "unit_layout(numels, elem_bytes, ranks, /)\n--\n\n(elements of the flat buffer, elements of a shard), padding "
     "included."},
    {NULL, NULL, 0, NULL},
};

int zpp_py_add_tier(PyObject *module);

int zpp_py_add_tier(PyObject *module) {
    optim_file_type = (PyTypeObject *)PyType_FromSpec(&optim_file_spec);
    if (!optim_file_type || PyModule_AddFunctions(module, layout_functions)) return -1;
    return PyModule_AddObjectRef(module, "OptimFile", (PyObject *)optim_file_type);
}
