/* SPDX-License-Identifier: Apache-2.0
 *
 * From a status to a Python exception. The table is base/status.def; builtins are raised as they are, zeropp.* classes
 * are looked up in zeropp.errors when first needed.
 *
 * Threads: the caller holds the GIL.
 */
#ifndef ZPP_BIND_RAISE_H
#define ZPP_BIND_RAISE_H

#include <Python.h>

#include "../base/status.h"

/* Sets the exception of err->status with err->text, and returns NULL. CommErrors get `.rank` (None where unknown),
 * OSErrors their errno. INTERRUPTED with an exception set already (pywait.h: what the signal handler raised) keeps that
 * one. */
PyObject *zpp_py_raise(const struct zpp_err *err);

#endif
