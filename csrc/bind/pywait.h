/* SPDX-License-Identifier: Apache-2.0
 *
 * Waiting that Ctrl-C ends: the tick of struct zpp_wait for calls that come from Python.
 *
 *     struct zpp_wait wait;
 *     zpp_py_wait_init(&wait, timeout_ns);
 *     PyThreadState *state = PyEval_SaveThread();
 *     status = zpp_something(..., &wait, &err);
 *     PyEval_RestoreThread(state);
 *     if (status) return zpp_py_raise(&err);
 *
 * Each tick takes the GIL again and lets Python run its signal handlers. A handler that raises ends the wait with
 * INTERRUPTED, its exception stays set, and zpp_py_raise keeps it. Python runs handlers on its main thread only: on
 * other threads the tick does nothing.
 */
#ifndef ZPP_BIND_PYWAIT_H
#define ZPP_BIND_PYWAIT_H

#include "../base/wait.h"

/* The caller must be a thread that released the GIL with PyEval_SaveThread, as above. */
void zpp_py_wait_init(struct zpp_wait *wait, uint64_t timeout_ns);

#endif
