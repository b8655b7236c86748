/* SPDX-License-Identifier: Apache-2.0
 *
 * What other files of this folder use of py_aio.c.
 */
#ifndef ZPP_BIND_PY_AIO_H
#define ZPP_BIND_PY_AIO_H

#include <Python.h>

#include "../aio/engine.h"

/* Sets the exception of an I/O call and returns NULL: a TierError with the fields of `fault` (may be NULL) for status
 * TIER, a TimeoutError for TIMEOUT, zeropp.aio.CancelledError for ABORTED, the status's own otherwise. The GIL is held.
 */
PyObject *zpp_py_raise_aio(const struct zpp_err *err, const struct zpp_aio_fault *fault);
/* Names of at most ZPP_AIO_PARTS folders out of a tuple of bytes, which they are borrowed from. False: an exception is
 * set. */
bool zpp_py_aio_folders(PyObject *tuple, const char **out, unsigned *count);

#endif
