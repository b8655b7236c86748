/* SPDX-License-Identifier: Apache-2.0
 *
 * Waiting that Ctrl-C ends: pywait.h.
 */
#include <Python.h>

#include "pywait.h"

static zpp_status tick(void *ctx, struct zpp_err *err) {
    (void)ctx;
    /* Finds the thread state that PyEval_SaveThread put aside, so the exception stays in it after the release. */
    const PyGILState_STATE gil = PyGILState_Ensure();
    const int raised = PyErr_CheckSignals();
    PyGILState_Release(gil);
    if (raised == 0) return ZPP_OK;
    return zpp_fail(err, ZPP_INTERRUPTED, "interrupted by a signal while waiting");
}

void zpp_py_wait_init(struct zpp_wait *wait, uint64_t timeout_ns) {
    *wait = (struct zpp_wait){.timeout_ns = timeout_ns, .tick = tick, .ctx = NULL};
}
