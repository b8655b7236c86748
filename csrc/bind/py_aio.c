/* SPDX-License-Identifier: Apache-2.0
 *
 * The types AioEngine and AioFuture. Tensors come as addresses and bytes; python/zeropp/aio.py checks them. What a
 * request borrows is kept alive here: a future that dies before its request is done leaves request and tensor to the
 * engine's list of orphans, which later calls sweep.
 *
 * Warnings of the engine come from any thread, so they are kept in a list that the façade fetches; no thread of the
 * engine ever takes the GIL.
 */
#define Py_LIMITED_API 0x030a0000
#include <Python.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <unistd.h>

#include "raise.h"

#define SETTLE_NS 60000000000u

struct orphan {
    struct orphan *next;
    zpp_aio_request *request;
    PyObject *keep;
};

struct log_line {
    struct log_line *next;
    char text[];
};

/* Outlives the Python object, as the engine's threads may. */
struct log {
    pthread_mutex_t lock;
    struct log_line *first, **end;
};

typedef struct Engine {
    PyObject_HEAD zpp_aio *aio; /* NULL after close */
    struct orphan *orphans;
    struct log log;
    int users; /* calls in progress without the GIL */
    bool closing;
    bool log_ready;
    long owner;
} Engine;

typedef struct Future {
    PyObject_HEAD Engine *engine; /* owned reference */
    zpp_aio_request *request;
    PyObject *keep; /* what the request borrows; NULL once it is done and waited for */
} Future;

static PyTypeObject *future_type;

static bool usable(Engine *engine) {
    struct zpp_err err = ZPP_ERR_INIT;
    if (engine->aio && !engine->closing) return true;
    zpp_fail(&err, ZPP_STATE, "aio: the engine is closed; make a new one");
    zpp_py_raise(&err);
    return false;
}

/* Seconds or None to nanoseconds, 0 for ever; -1 with an error set. A time-out of 0 s is one nanosecond. */
static int timeout_from(PyObject *seconds, uint64_t *out_ns) {
    *out_ns = 0;
    if (!seconds || seconds == Py_None) return 0;
    const double value = PyFloat_AsDouble(seconds);
    if (value == -1.0 && PyErr_Occurred()) return -1;
    if (!(value >= 0.0)) {
        PyErr_Format(PyExc_ValueError, "aio: timeout is %R, wanted seconds >= 0, or None for no time-out", seconds);
        return -1;
    }
    *out_ns = value > 1e9 ? 0 : (uint64_t)(value * 1e9) + 1;
    return 0;
}

/* --- log --- */

static void keep_log(void *ctx, const char *text) {
    Engine *engine = ctx;
    const size_t bytes = strlen(text) + 1;
    struct log_line *line = malloc(sizeof *line + bytes);
    if (!line) return;
    line->next = NULL;
    memcpy(line->text, text, bytes);
    pthread_mutex_lock(&engine->log.lock);
    *engine->log.end = line;
    engine->log.end = &line->next;
    pthread_mutex_unlock(&engine->log.lock);
}

static struct log_line *fetch_log(Engine *engine) {
    pthread_mutex_lock(&engine->log.lock);
    struct log_line *first = engine->log.first;
    engine->log.first = NULL;
    engine->log.end = &engine->log.first;
    pthread_mutex_unlock(&engine->log.lock);
    return first;
}

static PyObject *engine_take_log(PyObject *self, PyObject *none) {
    (void)none;
    PyObject *lines = PyList_New(0);
    for (struct log_line *line = fetch_log((Engine *)self), *next; line; line = next) {
        next = line->next;
        PyObject *text = PyUnicode_DecodeUTF8(line->text, (Py_ssize_t)strlen(line->text), "replace");
        if (lines && (!text || PyList_Append(lines, text) != 0)) Py_CLEAR(lines);
        Py_XDECREF(text);
        free(line);
    }
    return lines;
}

/* --- orphans --- */

static void drop_orphan(struct orphan *orphan) {
    zpp_aio_release(orphan->request);
    Py_XDECREF(orphan->keep);
    free(orphan);
}

static void sweep(Engine *engine) {
    struct orphan **link = &engine->orphans;
    while (*link) {
        struct orphan *orphan = *link;
        if (zpp_aio_done(orphan->request)) {
            *link = orphan->next;
            drop_orphan(orphan);
            link = &engine->orphans; /* dropping a tensor may run code that changes the list */
        } else {
            link = &orphan->next;
        }
    }
}

/* --- futures --- */

static void future_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Future *future = (Future *)self;
    if (future->request && !zpp_aio_done(future->request)) {
        struct orphan *orphan = malloc(sizeof *orphan);
        if (orphan) {
            *orphan = (struct orphan){future->engine->orphans, future->request, future->keep};
            future->engine->orphans = orphan;
        } /* else: leaking the tensor is better than freeing memory that the disk writes to */
    } else {
        zpp_aio_release(future->request);
        Py_XDECREF(future->keep);
    }
    Py_XDECREF(future->engine);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *future_done(PyObject *self, PyObject *none) {
    (void)none;
    return PyBool_FromLong(zpp_aio_done(((Future *)self)->request));
}

static PyObject *future_cancel(PyObject *self, PyObject *none) {
    (void)none;
    return PyBool_FromLong(zpp_aio_cancel(((Future *)self)->request));
}

static zpp_status wait_without_gil(Future *future, uint64_t timeout_ns, struct zpp_err *err) {
    struct zpp_wait wait;
    zpp_py_wait_init(&wait, timeout_ns);
    PyThreadState *state = PyEval_SaveThread();
    const zpp_status status = zpp_aio_wait(future->request, &wait, err);
    PyEval_RestoreThread(state);
    return status;
}

static PyObject *future_wait(PyObject *self, PyObject *args, PyObject *named) {
    static char *names[] = {"timeout", NULL};
    Future *future = (Future *)self;
    PyObject *timeout = Py_None;
    uint64_t timeout_ns;
    struct zpp_err err = ZPP_ERR_INIT;
    if (!PyArg_ParseTupleAndKeywords(args, named, "|O:wait", names, &timeout) || timeout_from(timeout, &timeout_ns))
        return NULL;
    zpp_status status = zpp_aio_wait(future->request, NULL, &err);
    if (status == ZPP_AGAIN) status = wait_without_gil(future, timeout_ns, &err);
    if (zpp_aio_done(future->request)) Py_CLEAR(future->keep);
    if (status != ZPP_OK) return zpp_py_raise_aio(&err, zpp_aio_request_fault(future->request));
    Py_RETURN_NONE;
}

static PyMethodDef future_methods[] = {
    {"done", future_done, METH_NOARGS, "done()\n--\n\nWhether the request is over: done, failed or cancelled."},
    {"wait", (PyCFunction)(void (*)(void))future_wait, METH_VARARGS | METH_KEYWORDS,
     "wait(timeout=None)\n--\n\nWait for the request and raise its failure. TimeoutError after `timeout` seconds; the "
     "request "
     "then goes on."},
    {"cancel", future_cancel, METH_NOARGS,
     "cancel()\n--\n\nDrop what has not begun; False if the request was over. What is with the disk already is still "
     "waited "
     "for by wait()."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot future_slots[] = {
    {Py_tp_dealloc, (void *)future_dealloc},
    {Py_tp_methods, future_methods},
    {Py_tp_doc, "A read or a write that goes on. Made by Engine.read and Engine.write."},
    {0, NULL},
};
static PyType_Spec future_spec = {"zeropp._C.AioFuture", sizeof(Future), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, future_slots};

/* --- engine --- */

bool zpp_py_aio_folders(PyObject *tuple, const char **out, unsigned *count) {
    const Py_ssize_t length = PyTuple_Size(tuple);
    if (length > ZPP_AIO_PARTS) {
        PyErr_Format(PyExc_ValueError, "aio: %zd paths, wanted at most %d", length, ZPP_AIO_PARTS);
        return false;
    }
    for (Py_ssize_t index = 0; index < length; ++index) {
        out[index] = PyBytes_AsString(PyTuple_GetItem(tuple, index));
        if (!out[index]) return false;
    }
    *count = (unsigned)length;
    return true;
}

static int engine_init(PyObject *self, PyObject *args, PyObject *named) {
    static char *names[] = {"depth",   "block_bytes", "direct",  "sqpoll",       "backend",
                            "threads", "arena_bytes", "stripes", "stripe_bytes", "checksums", NULL};
    Engine *engine = (Engine *)self;
    const char *stripes[ZPP_AIO_PARTS];
    PyObject *stripe_tuple = NULL;
    int direct = 1, sqpoll = 0, checksums = 0, backend = ZPP_AIO_AUTO;
    Py_ssize_t block_bytes = 0, arena_bytes = 0, stripe_bytes = 0;
    struct zpp_aio_config config = {.log = keep_log, .log_ctx = engine};
    struct zpp_err err = ZPP_ERR_INIT;
    if (engine->log_ready) {
        PyErr_SetString(PyExc_RuntimeError, "aio: an engine is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, named, "InppiInO!np", names, &config.depth, &block_bytes, &direct, &sqpoll,
                                     &backend, &config.threads, &arena_bytes, &PyTuple_Type, &stripe_tuple,
                                     &stripe_bytes, &checksums) ||
        !zpp_py_aio_folders(stripe_tuple, stripes, &config.stripes_count)) {
        return -1;
    }
    config.block_bytes = (size_t)block_bytes;
    config.arena_bytes = (size_t)arena_bytes;
    config.stripe_bytes = (size_t)stripe_bytes;
    config.direct = direct;
    config.sqpoll = sqpoll;
    config.checksums = checksums;
    config.backend = (enum zpp_aio_backend)backend;
    config.stripes = stripes;
    pthread_mutex_init(&engine->log.lock, NULL);
    engine->log.end = &engine->log.first;
    engine->log_ready = true;
    engine->owner = (long)getpid();
    if (zpp_aio_create(&config, &engine->aio, &err) == ZPP_OK) return 0;
    zpp_py_raise(&err);
    return -1;
}

/* Ends the engine; a forked child only forgets it. */
static void end(Engine *engine) {
    zpp_aio *aio = engine->aio;
    const bool ours = engine->owner == (long)getpid();
    engine->closing = true;
    if (!aio) return;
    PyThreadState *state = PyEval_SaveThread();
    for (;;) { /* calls of other threads end first; `users` changes under the GIL only */
        PyEval_RestoreThread(state);
        const bool free_now = engine->users == 0;
        if (free_now) engine->aio = NULL;
        state = PyEval_SaveThread();
        if (free_now) break;
        usleep(500);
    }
    zpp_aio_destroy(aio);
    PyEval_RestoreThread(state);
    while (ours && engine->orphans) {
        struct orphan *orphan = engine->orphans;
        engine->orphans = orphan->next;
        drop_orphan(orphan);
    }
}

/* No reference to the engine or a future of it is left: what was begun comes to its end, as with Python's own files. A
 * write that failed is reported as theirs are. */
static void settle(Engine *engine) {
    const struct zpp_wait wait = {.timeout_ns = SETTLE_NS};
    struct zpp_aio_fault fault = {0};
    struct zpp_err err = ZPP_ERR_INIT;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyThreadState *state = PyEval_SaveThread();
    const zpp_status status = zpp_aio_flush(engine->aio, false, &wait, &fault, &err);
    PyEval_RestoreThread(state);
    if (status != ZPP_OK) {
        zpp_py_raise_aio(&err, &fault);
        PyErr_WriteUnraisable((PyObject *)Py_TYPE(engine));
    }
    PyErr_Restore(type, value, trace);
}

static void engine_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Engine *engine = (Engine *)self;
    if (engine->aio && engine->owner == (long)getpid()) settle(engine);
    end(engine);
    for (struct log_line *line = engine->log_ready ? fetch_log(engine) : NULL, *next; line; line = next) {
        next = line->next;
        free(line);
    }
    if (engine->log_ready) pthread_mutex_destroy(&engine->log.lock);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *engine_close(PyObject *self, PyObject *none) {
    (void)none;
    if (!((Engine *)self)->closing) end((Engine *)self);
    Py_RETURN_NONE;
}

static PyObject *engine_submit(PyObject *self, PyObject *args) {
    Engine *engine = (Engine *)self;
    struct zpp_aio_job job = {0};
    struct zpp_aio_fault fault = {0};
    struct zpp_err err = ZPP_ERR_INIT;
    int write, priority;
    unsigned long long address;
    long long offset_bytes;
    Py_ssize_t bytes;
    PyObject *keep;
    if (!PyArg_ParseTuple(args, "pyKnLiO:submit", &write, &job.path, &address, &bytes, &offset_bytes, &priority, &keep))
        return NULL;
    if (!usable(engine)) return NULL;
    if (offset_bytes < 0) {
        PyErr_Format(PyExc_ValueError, "aio: offset_bytes is %lld, wanted >= 0", offset_bytes);
        return NULL;
    }
    sweep(engine);
    Future *future = PyObject_New(Future, future_type);
    if (!future) return NULL;
    future->engine = (Engine *)Py_NewRef(self);
    future->keep = Py_NewRef(keep);
    future->request = NULL;
    job.memory = (void *)(uintptr_t)address;
    job.bytes = (size_t)bytes;
    job.offset_bytes = (uint64_t)offset_bytes;
    job.write = write;
    job.priority = (enum zpp_aio_priority)priority;
    ++engine->users;
    PyThreadState *state = PyEval_SaveThread();
    const zpp_status status = zpp_aio_submit(engine->aio, &job, &future->request, &fault, &err);
    PyEval_RestoreThread(state);
    --engine->users;
    if (status == ZPP_OK) return (PyObject *)future;
    Py_DECREF(future);
    return zpp_py_raise_aio(&err, &fault);
}

static PyObject *engine_flush(PyObject *self, PyObject *args) {
    Engine *engine = (Engine *)self;
    struct zpp_aio_fault fault = {0};
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait wait;
    PyObject *timeout;
    int durable;
    uint64_t timeout_ns;
    if (!PyArg_ParseTuple(args, "pO:flush", &durable, &timeout) || timeout_from(timeout, &timeout_ns) ||
        !usable(engine))
        return NULL;
    zpp_py_wait_init(&wait, timeout_ns);
    ++engine->users;
    PyThreadState *state = PyEval_SaveThread();
    const zpp_status status = zpp_aio_flush(engine->aio, durable, &wait, &fault, &err);
    PyEval_RestoreThread(state);
    --engine->users;
    sweep(engine);
    return zpp_py_result_aio(status, &err, &fault);
}

static PyObject *engine_forget(PyObject *self, PyObject *args) {
    Engine *engine = (Engine *)self;
    const char *path;
    if (!PyArg_ParseTuple(args, "y:forget", &path) || !usable(engine)) return NULL;
    zpp_aio_forget(engine->aio, path);
    Py_RETURN_NONE;
}

static PyObject *engine_figures(PyObject *self, PyObject *none) {
    (void)none;
    Engine *engine = (Engine *)self;
    struct zpp_aio_figures seen;
    if (!usable(engine)) return NULL;
    zpp_aio_figures(engine->aio, &seen);
    return Py_BuildValue(
        "{s:O,s:I,s:I,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K}", "uring", seen.uring ? Py_True : Py_False,
        "depth", seen.depth, "outstanding", seen.outstanding, "block_bytes", (unsigned long long)seen.block_bytes,
        "read_bytes", (unsigned long long)seen.read_bytes, "written_bytes", (unsigned long long)seen.written_bytes,
        "operations", (unsigned long long)seen.operations, "bounced_bytes", (unsigned long long)seen.bounced_bytes,
        "retries", (unsigned long long)seen.retries, "registered_bytes", (unsigned long long)seen.registered_bytes,
        "arena_held_bytes", (unsigned long long)seen.arena_held_bytes, "arena_used_bytes",
        (unsigned long long)seen.arena_used_bytes, "open_files", (unsigned long long)seen.open_files, "checked_bytes",
        (unsigned long long)seen.checked_bytes, "sums_bytes", (unsigned long long)seen.checksums_bytes);
}

/* --- tensors in the arena --- */

/* DLPack's layout (dlpack.h, version 0.x: unversioned "dltensor" capsules), which torch.from_dlpack takes over without
 * a copy. The tensor calls `deleter` when its storage dies, from whatever thread that is, without the GIL. */
struct dl_tensor {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};
struct dl_managed {
    struct dl_tensor tensor;
    void *manager_ctx;
    void (*deleter)(struct dl_managed *self);
};
struct arena_tensor {
    struct dl_managed managed;
    int64_t shape[1], strides[1];
    zpp_aio_arena *arena;
};
enum { DL_CPU = 1, DL_UINT = 1 };

static void free_tensor(struct dl_managed *managed) {
    struct arena_tensor *tensor = (struct arena_tensor *)managed;
    zpp_aio_arena_free(tensor->arena, managed->tensor.data);
    free(tensor);
}

static void free_capsule(PyObject *capsule) {
    if (!PyCapsule_IsValid(capsule, "dltensor")) return; /* the tensor was taken over */
    struct dl_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
    managed->deleter(managed);
}

PyObject *zpp_py_aio_tensor(zpp_aio_arena *arena, size_t bytes) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct arena_tensor *tensor = calloc(1, sizeof *tensor);
    if (!tensor) return PyErr_NoMemory();
    tensor->arena = arena;
    PyThreadState *state = PyEval_SaveThread();
    const zpp_status status = zpp_aio_arena_alloc(arena, bytes, &tensor->managed.tensor.data, &err);
    PyEval_RestoreThread(state);
    if (status != ZPP_OK) {
        free(tensor);
        return zpp_py_raise(&err);
    }
    struct dl_tensor *view = &tensor->managed.tensor;
    view->device.type = DL_CPU;
    view->ndim = 1;
    view->dtype.code = DL_UINT;
    view->dtype.bits = 8;
    view->dtype.lanes = 1;
    tensor->shape[0] = (int64_t)bytes;
    tensor->strides[0] = 1;
    view->shape = tensor->shape;
    view->strides = tensor->strides;
    tensor->managed.deleter = free_tensor;
    PyObject *capsule = PyCapsule_New(&tensor->managed, "dltensor", free_capsule);
    if (!capsule) free_tensor(&tensor->managed);
    return capsule;
}

static PyObject *engine_alloc(PyObject *self, PyObject *args) {
    Engine *engine = (Engine *)self;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "n:alloc", &bytes) || !usable(engine)) return NULL;
    ++engine->users;
    PyObject *capsule = zpp_py_aio_tensor(zpp_aio_get_arena(engine->aio), (size_t)bytes);
    --engine->users;
    return capsule;
}

static PyMethodDef engine_methods[] = {
    {"submit", engine_submit, METH_VARARGS,
     "submit(write, path, address, bytes, offset_bytes, priority, keep, /)\n--\n\nBegin a read or write; its "
     "AioFuture."},
    {"flush", engine_flush, METH_VARARGS, "flush(durable, timeout, /)\n--\n\nWait for everything submitted before."},
    {"forget", engine_forget, METH_VARARGS, "forget(path, /)\n--\n\nClose the descriptors kept for a path."},
    {"alloc", engine_alloc, METH_VARARGS, "alloc(bytes, /)\n--\n\nA DLPack capsule of uint8 in the arena."},
    {"figures", engine_figures, METH_NOARGS, "figures()\n--\n\nCounters and sizes."},
    {"take_log", engine_take_log, METH_NOARGS, "take_log()\n--\n\nWarnings since the last call."},
    {"close", engine_close, METH_NOARGS,
     "close()\n--\n\nCancel what has not begun, wait for what has, end the threads."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot engine_slots[] = {
    {Py_tp_init, (void *)engine_init},
    {Py_tp_dealloc, (void *)engine_dealloc},
    {Py_tp_methods, engine_methods},
    {Py_tp_doc, "The I/O engine of csrc/aio; zeropp.aio.Engine is its door."},
    {0, NULL},
};
static PyType_Spec engine_spec = {"zeropp._C.AioEngine", sizeof(Engine), 0, Py_TPFLAGS_DEFAULT, engine_slots};

int zpp_py_add_aio(PyObject *module); /* called by module.c */
int zpp_py_add_aio(PyObject *module) {
    future_type = (PyTypeObject *)PyType_FromSpec(&future_spec);
    PyObject *engine_type = PyType_FromSpec(&engine_spec);
    if (!future_type || !engine_type) return -1;
    if (PyModule_AddObjectRef(module, "AioFuture", (PyObject *)future_type) != 0) return -1;
    if (PyModule_AddObjectRef(module, "AioEngine", engine_type) != 0) return -1;
    return PyModule_AddIntConstant(module, "AIO_STRIPES_MAX", ZPP_AIO_PARTS);
}
