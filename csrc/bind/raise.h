/* SPDX-License-Identifier: Apache-2.0
 *
 * What every call into the C core needs: a wait that Ctrl-C ends, and its status as a Python exception or result.
 *
 *     struct zpp_wait wait;
 *     zpp_py_wait_init(&wait, timeout_ns);
 *     PyThreadState *state = PyEval_SaveThread();
 *     status = zpp_something(..., &wait, &err);
 *     PyEval_RestoreThread(state);
 *     return zpp_py_result(status, &err);
 *
 * Threads: the caller holds the GIL.
 */
#ifndef ZPP_BIND_RAISE_H
#define ZPP_BIND_RAISE_H

#include <Python.h>

#include "../aio/engine.h"
#include "../base/status.h"
#include "../base/wait.h"

/* Set the exception of err->status with err->text, and return NULL. The table is base/status.def; builtins are raised
 * as they are, zeropp.* classes are looked up in zeropp.errors when first needed. CommErrors get `.rank` (None where
 * unknown), OSErrors their errno. INTERRUPTED keeps an exception that is set: what the signal handler raised. */
PyObject *zpp_py_raise(const struct zpp_err *err);
/* Set the exception of an I/O call and return NULL: a TierError with the fields of `fault` (may be NULL) for status
 * TIER, a TimeoutError for TIMEOUT, zeropp.aio.CancelledError for ABORTED, the status's own otherwise. */
PyObject *zpp_py_raise_aio(const struct zpp_err *err, const struct zpp_aio_fault *fault);
/* Return None for OK, or raise as above. */
PyObject *zpp_py_result(zpp_status status, const struct zpp_err *err);
PyObject *zpp_py_result_aio(zpp_status status, const struct zpp_err *err, const struct zpp_aio_fault *fault);

/* The tick of `wait` takes the GIL again and lets Python run its signal handlers. A handler that raises ends the wait
 * with INTERRUPTED, and its exception stays set. Python runs handlers on its main thread only: on other threads the
 * tick does nothing. The caller must be a thread that released the GIL with PyEval_SaveThread, as above. */
void zpp_py_wait_init(struct zpp_wait *wait, uint64_t timeout_ns);

/* py_aio.c: names of at most ZPP_AIO_PARTS folders out of a tuple of bytes, which they are borrowed from. False: an
 * exception is set. */
bool zpp_py_aio_folders(PyObject *tuple, const char **out, unsigned *count);
/* py_aio.c: a DLPack capsule of uint8 [bytes] in an engine's arena, which the engine has to outlive this call only. */
PyObject *zpp_py_aio_tensor(zpp_aio_arena *arena, size_t bytes);

#endif
