/* SPDX-License-Identifier: Apache-2.0
 *
 * The type Tier, for py_step.c.
 */
#ifndef ZPP_BIND_PY_OPTIM_FILE_H
#define ZPP_BIND_PY_OPTIM_FILE_H

#include <Python.h>

#include "../zero/optim_file.h"

/* Borrowed; NULL with an error set: not a Tier, or a closed one. */
zpp_optim_file *zpp_py_optim_file_get(PyObject *object);

#endif
