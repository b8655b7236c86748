/* SPDX-License-Identifier: Apache-2.0
 *
 * The type Tier, for py_step.c.
 */
#ifndef ZPP_BIND_PY_TIER_H
#define ZPP_BIND_PY_TIER_H

#include <Python.h>

#include "../zero/tier.h"

/* Borrowed; NULL with an error set: not a Tier, or a closed one. */
zpp_tier *zpp_py_tier_get(PyObject *object);

#endif
