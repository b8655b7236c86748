/* SPDX-License-Identifier: Apache-2.0
 *
 * Bytes from one place to another, or zeros to one, through the cache or past it (then the caller ends with
 * zpp_streamed(), once for many). Included by files of one instruction set only.
 */
#ifndef ZPP_OPS_COPY_VEC16_H
#define ZPP_OPS_COPY_VEC16_H

#include <stdbool.h>
#include <string.h>

#include "vec16.h"

/* Bytes as floats: no arithmetic touches them. */
V16_FN void v16_copy(void *to, const void *from, size_t bytes, bool stream) {
    size_t at = (0 - (uintptr_t)to) & 63u;
    if (!stream || bytes < at + 64) {
        memcpy(to, from, bytes);
        return;
    }
    memcpy(to, from, at);
    for (; at + 64 <= bytes; at += 64) {
        v16_stream((float *)(void *)((char *)to + at),
                   v16_load((const float *)(const void *)((const char *)from + at)));
    }
    memcpy((char *)to + at, (const char *)from + at, bytes - at);
}

V16_FN void v16_zero(void *to, size_t bytes, bool stream) {
    size_t at = (0 - (uintptr_t)to) & 63u;
    if (!stream || bytes < at + 64) {
        memset(to, 0, bytes);
        return;
    }
    memset(to, 0, at);
    for (; at + 64 <= bytes; at += 64) v16_stream((float *)(void *)((char *)to + at), v16_set1(0.0f));
    memset((char *)to + at, 0, bytes - at);
}

#endif
