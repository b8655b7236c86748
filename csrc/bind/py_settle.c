/* SPDX-License-Identifier: Apache-2.0
 *
 * The end of a pass: its reductions are waited for when something wants their results (zero/pass.c). From pass_open
 * until then, the thread of the pass adds gradients while it waits for messages of other stages.
 */
#include "py_zero.h"

#include "raise.h"

int zpp_py_run_end(Zero *zero, zpp_status (*end)(zpp_zero *, const struct zpp_wait *, struct zpp_err *)) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait wait;
    zpp_py_wait_for(zero, &wait);
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = end(zero->core, &wait, &err);
    PyEval_RestoreThread(thread);
    if (status == ZPP_OK) return 0;
    zpp_py_raise(&err);
    return -1;
}

int zpp_py_show_gradients(Zero *zero) {
    if (!zero->reduces || zero->stage != 0 || zero->ranks == 1) return 0;
    const Py_ssize_t units = PyList_Size(zero->units);
    for (Py_ssize_t at = 0; at < units; at++) {
        Unit *unit = (Unit *)PyList_GetItem(zero->units, at);
        const uint8_t *present = NULL;
        if (!unit->grad_views || !zpp_zero_grad_shard(zero->core, unit->unit->index, &present)) continue;
        for (Py_ssize_t i = 0; i < unit->count; i++)
            if (present[i] && PyObject_SetAttr(unit->params[i], zpp_str_grad, PyList_GetItem(unit->grad_views, i)))
                return -1;
    }
    return 0;
}

/* What this thread drives, which keeps the coordinator alive; NULL: nothing. */
static _Thread_local Zero *driven;

static bool drive(void *zero) { return !((Zero *)zero)->closed && zpp_zero_drive(((Zero *)zero)->core); }

void zpp_py_drive(Zero *zero) {
    Zero *before = driven;
    driven = (Zero *)Py_NewRef((PyObject *)zero);
    zpp_idle_set(drive, zero);
    Py_XDECREF((PyObject *)before);
}

void zpp_py_drive_no_more(const Zero *zero) {
    if (driven != zero) return;
    zpp_idle_set(NULL, NULL);
    Zero *before = driven;
    driven = NULL;
    Py_DECREF((PyObject *)before);
}

int zpp_py_settle(Zero *zero) {
    if (!zero->pass.unsettled) return 0;
    if (zpp_py_follow(zero) || zpp_py_run_end(zero, zpp_zero_settle)) return -1;
    zero->pass.unsettled = false;
    zpp_py_drive_no_more(zero);
    if (zpp_py_show_gradients(zero)) return -1;
    return zero->at_boundary && zero->settled ? zpp_py_call(zero->settled) : 0;
}

void zpp_py_pass_end(Zero *zero) {
    Py_CLEAR(zero->pass.units);
    zero->pass.unsettled = false;
    zpp_py_drive_no_more(zero);
}
