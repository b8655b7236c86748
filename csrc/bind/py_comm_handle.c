/* SPDX-License-Identifier: Apache-2.0
 *
 * What every file of py_comm stands on: the communicator inside of a Comm, which stays while calls use it, a blocking
 * call, and work that is deferred until a thread has the GIL.
 */
#include <pthread.h>

#include "py_comm.h"
#include "pywait.h"
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

/* Joins the progress thread, whose last act may be to ask for the GIL: so it must be free. */
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

void zpp_py_comm_release(PyObject *object) {
    Comm *self = (Comm *)object;
    if (--self->users == 0 && self->closing) zpp_py_comm_destroy(self);
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
    if (status != ZPP_OK) return zpp_py_raise(&err);
    Py_RETURN_NONE;
}

PyObject *zpp_py_comm_run(PyObject *object, const struct zpp_call *call) {
    return zpp_py_comm_run_within(object, call, 0);
}
