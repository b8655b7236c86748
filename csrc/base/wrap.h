/* SPDX-License-Identifier: Apache-2.0
 *
 * Addresses for the gathered units of a model over the memory of a few: memory of R bytes is mapped end to end, again
 * and again, over a range of addresses (docs/design/0037-device-interface.md).
 *
 *   addresses   | u0 | u1 | u2 | u3 | u4 | u5 | ...        fixed: views and CUDA graphs stay valid
 *   memory      |<---- R ----->|<---- R ----->|...          the byte at offset a lies at a mod R
 *
 * Two units meet if their bytes overlap modulo R. To take a unit orders a stream after the release of all that it
 * meets, and after its own last use; nothing is mapped or allocated, and the host does not wait. If a unit that it
 * meets is still whole, nothing is taken: the caller waits until that one is released, or gives the unit memory of its
 * own.
 *
 * With ZEROPP_POISON=1 in the environment, every unit has memory of its own, filled with NaN when it is released.
 *
 * Threads: one at a time.
 */
#ifndef ZPP_BASE_WRAP_H
#define ZPP_BASE_WRAP_H

#include <stdbool.h>

#include "device.h"

typedef struct zpp_wrap zpp_wrap;
struct zpp_wrap_unit {
    const char *name; /* for messages; borrowed for the life of the wrap */
    size_t bytes;
    bool own;         /* it has memory of its own from the beginning, beside the R bytes */
};
struct zpp_wrap_options {
    zpp_device *device;                /* borrowed until destroy */
    const struct zpp_wrap_unit *units; /* in the order in which they are gathered; borrowed for the call */
    int units_count;
    size_t memory_bytes; /* R; at least the largest of the others; rounded up to the device's granularity */
};
/* New; free with zpp_wrap_destroy, after all work on it. INVALID where R is less than a unit, NOT_BUILT where the
 * device cannot map memory twice (container, old driver), NOMEM with who holds what. */
zpp_status zpp_wrap_create(const struct zpp_wrap_options *options, zpp_wrap **out, struct zpp_err *err);
void zpp_wrap_destroy(zpp_wrap *wrap); /* NULL is fine */

void *zpp_wrap_address(const zpp_wrap *wrap, int unit); /* aligned to 512 bytes; changes in zpp_wrap_own alone */
size_t zpp_wrap_memory_bytes(const zpp_wrap *wrap);     /* R as it is; 0 under ZEROPP_POISON */
size_t zpp_wrap_own_bytes(const zpp_wrap *wrap);        /* of units with memory of their own: the plan counts them */
bool zpp_wrap_meet(const zpp_wrap *wrap, int a, int b);

/* Order `stream`, which will write the unit, after all that used its memory. A unit that is whole already is taken
 * again at no cost. AGAIN: it was not taken. Unit `*blocker` is whole and meets it; or `*blocker` is -1, and an earlier
 * release is not enqueued yet (HOST streams of cpu: not complete): poll the stream that released, then try again. */
zpp_status zpp_wrap_take(zpp_wrap *wrap, int unit, zpp_stream *stream, int *blocker, struct zpp_err *err);
/* Record that the operations of `stream` so far are the last that use the unit. */
zpp_status zpp_wrap_release(zpp_wrap *wrap, int unit, zpp_stream *stream, struct zpp_err *err);
/* Give a unit that is not whole memory of its own, for good: its address changes, once. Nothing may refer to the old
 * one. Again is free. */
zpp_status zpp_wrap_own(zpp_wrap *wrap, int unit, struct zpp_err *err);

#endif
