/* SPDX-License-Identifier: Apache-2.0
 *
 * The version, once: setup.py reads it from here, Python from zeropp._C.version().
 */
#ifndef ZPP_BIND_VERSION_H
#define ZPP_BIND_VERSION_H

#define ZPP_VERSION "0.1.0"

#endif
