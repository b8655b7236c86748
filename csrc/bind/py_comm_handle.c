/* SPDX-License-Identifier: Apache-2.0
 *
 * What every file of py_comm stands on: the communicator inside of a Comm, which stays while calls use it, a blocking
 * call, and work that is deferred until a thread has the GIL. And what csrc/comm calls without the GIL:
 * torch.distributed's store, by which ranks meet, and a Python callable as its log.
 */
#include <Python.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "py_comm.h"
#include "raise.h"

PyTypeObject *zpp_py_comm_type;

/* --- deferred until a thread has the GIL -------------------------------------------------------------------------- */

static pthread_mutex_t deferred_lock = PTHREAD_MUTEX_INITIALIZER;
static struct zpp_py_deferred *deferred;

void zpp_py_defer(struct zpp_py_deferred *item) {
    pthread_mutex_lock(&deferred_lock);
    item->next = deferred;
    deferred = item;
    pthread_mutex_unlock(&deferred_lock);
}

void zpp_py_run_deferred(void) {
    pthread_mutex_lock(&deferred_lock);
    struct zpp_py_deferred *list = deferred;
    deferred = NULL;
    pthread_mutex_unlock(&deferred_lock);
    while (list) {
        struct zpp_py_deferred *next = list->next;
        list->run(list);
        list = next;
    }
}

/* --- the communicator --------------------------------------------------------------------------------------------- */

static zpp_comm *closed(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_fail(&err, ZPP_STATE, "comm: this group is closed; make a new one");
    zpp_py_raise(&err);
    return NULL;
}

zpp_comm *zpp_py_comm_get(PyObject *object) {
    if (!PyObject_TypeCheck(object, zpp_py_comm_type)) {
        PyErr_Format(PyExc_TypeError, "wanted a zeropp._C.Comm, not %R", object);
        return NULL;
    }
    const Comm *self = (const Comm *)object;
    return self->comm && !self->closing ? self->comm : closed();
}

zpp_comm *zpp_py_comm_acquire(PyObject *object) {
    zpp_comm *comm = zpp_py_comm_get(object);
    if (comm) ((Comm *)object)->users++;
    return comm;
}

/* Joins the progress thread, which may take the GIL before it ends: so the GIL must be free. */
void zpp_py_comm_destroy(Comm *self) {
    zpp_comm *comm = self->comm;
    if (!comm) return;
    self->comm = NULL;
    zpp_comm_traffic(comm, &self->last);
    PyThreadState *state = PyEval_SaveThread();
    zpp_comm_destroy(comm);
    PyEval_RestoreThread(state);
    zpp_py_run_deferred();
}

static void destroy_if_unused(Comm *self) {
    if (self->closing && !self->users && !self->holders) zpp_py_comm_destroy(self);
}

void zpp_py_comm_release(PyObject *object) {
    Comm *self = (Comm *)object;
    self->users--;
    destroy_if_unused(self);
}

void zpp_py_comm_hold(PyObject *object) { ((Comm *)object)->holders++; }

void zpp_py_comm_drop(PyObject *object) {
    Comm *self = (Comm *)object;
    self->holders--;
    destroy_if_unused(self);
}

/* --- a blocking call ---------------------------------------------------------------------------------------------- */

PyObject *zpp_py_comm_run_within(PyObject *object, const struct zpp_call *call, uint64_t timeout_ns) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait wait;
    zpp_comm *comm = zpp_py_comm_acquire(object);
    if (!comm) return NULL;
    zpp_py_wait_init(&wait, timeout_ns ? timeout_ns : zpp_comm_timeout_ns(comm));
    PyThreadState *state = PyEval_SaveThread();
    const zpp_status status = zpp_comm_call(comm, call, &wait, &err);
    PyEval_RestoreThread(state);
    zpp_py_comm_release(object);
    return zpp_py_result(status, &err);
}

PyObject *zpp_py_comm_run(PyObject *object, const struct zpp_call *call) {
    return zpp_py_comm_run_within(object, call, 0);
}

/* --- the store, and the log --------------------------------------------------------------------------------------- */

/* The pending Python exception as an error. One that a signal handler raised stays set, see raise.h. */
static zpp_status from_exception(const char *doing, const char *key, struct zpp_err *err) {
    if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt))
        return zpp_fail(err, ZPP_INTERRUPTED, "interrupted by a signal while ranks met");
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *words = value ? PyObject_Str(value) : NULL;
    PyObject *bytes = words ? PyUnicode_AsEncodedString(words, "utf-8", "replace") : NULL;
    const char *text = bytes ? PyBytes_AsString(bytes) : NULL;
    const zpp_status status =
        zpp_fail(err, ZPP_PEER, "comm: the store cannot %s \"%s\": %.400s", doing, key, text ? text : "?");
    Py_XDECREF(words);
    Py_XDECREF(bytes);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    PyErr_Clear();
    return status;
}

static zpp_status store_set(void *ctx, const char *key, const void *value, size_t bytes, struct zpp_err *err) {
    PyObject *store = ctx;
    const PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *data = PyBytes_FromStringAndSize(value, (Py_ssize_t)bytes);
    PyObject *name = PyUnicode_FromString(key);
    PyObject *done = data && name ? PyObject_CallMethod(store, "set", "OO", name, data) : NULL;
    const zpp_status status = done ? ZPP_OK : from_exception("set", key, err);
    Py_XDECREF(data);
    Py_XDECREF(name);
    Py_XDECREF(done);
    PyGILState_Release(gil);
    return status;
}

/* 1: the key is there, 0: not yet, -1 with an exception. Signals are looked at here: a store's own wait would not. */
static int store_has(PyObject *store, PyObject *name) {
    if (PyErr_CheckSignals() != 0) return -1;
    PyObject *answer = PyObject_CallMethod(store, "check", "[O]", name);
    const int there = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return there;
}

static zpp_status await_key(PyObject *store, PyObject *name, const char *key, uint64_t timeout_ns,
                            struct zpp_err *err) {
    const uint64_t start_ns = zpp_now_ns();
    long pause_ns = 200000;
    for (;;) {
        const int there = store_has(store, name);
        if (there < 0) return from_exception("look for", key, err);
        if (there) return ZPP_OK;
        if (timeout_ns && zpp_now_ns() - start_ns > timeout_ns)
            return zpp_fail(err, ZPP_TIMEOUT,
                            "comm: nobody put \"%s\" into the store within %.3g s. Timed out waiting %.0fms; did that "
                            "rank start?",
                            key, (double)timeout_ns / 1e9, (double)timeout_ns / 1e6);
        const struct timespec pause = {0, pause_ns};
        PyThreadState *state = PyEval_SaveThread();
        nanosleep(&pause, NULL);
        PyEval_RestoreThread(state);
        if (pause_ns < 20000000) pause_ns *= 2;
    }
}

static zpp_status take_value(PyObject *store, PyObject *name, const char *key, void *value, size_t *bytes,
                             struct zpp_err *err) {
    PyObject *data = PyObject_CallMethod(store, "get", "O", name);
    char *from = NULL;
    Py_ssize_t length = 0;
    zpp_status status = ZPP_OK;
    if (!data || PyBytes_AsStringAndSize(data, &from, &length) != 0)
        status = from_exception("get", key, err);
    else if ((size_t)length > *bytes)
        status =
            zpp_fail(err, ZPP_PEER, "comm: the store has %zd bytes at \"%s\", wanted at most %zu", length, key, *bytes);
    if (status == ZPP_OK) {
        memcpy(value, from, (size_t)length);
        *bytes = (size_t)length;
    }
    Py_XDECREF(data);
    return status;
}

static zpp_status store_get(void *ctx, const char *key, void *value, size_t *bytes, uint64_t timeout_ns,
                            struct zpp_err *err) {
    PyObject *store = ctx;
    const PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *name = PyUnicode_FromString(key);
    zpp_status status = name ? await_key(store, name, key, timeout_ns, err) : from_exception("name", key, err);
    if (status == ZPP_OK) status = take_value(store, name, key, value, bytes, err);
    Py_XDECREF(name);
    PyGILState_Release(gil);
    return status;
}

struct zpp_store zpp_py_store_of(PyObject *store) {
    const struct zpp_store rendezvous = {store, store_set, store_get};
    return rendezvous;
}

void zpp_py_log(void *callable, const char *message) {
    const PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace); /* a signal handler's exception may be waiting in this thread */
    PyObject *answer = PyObject_CallFunction(callable, "s", message);
    if (!answer) PyErr_WriteUnraisable(callable);
    Py_XDECREF(answer);
    PyErr_Restore(type, value, trace);
    PyGILState_Release(gil);
}
