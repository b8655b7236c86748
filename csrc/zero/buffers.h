/* SPDX-License-Identifier: Apache-2.0
 *
 * The model's buffers (running statistics, ...) from rank 0 to all, at the start of a forward, as
 * DistributedDataParallel does it: all of them in one message. A board of fixed layout, made once:
 *
 *   one host       rank 0's part of a region: rank 0 writes it and goes on, the others read it in place, on the
 *   descriptor ring
 *   that
 *                  reductions use, so that a rank in another forward than its peers is noticed
 *   several hosts  memory of each rank, and a broadcast of it
 *
 * What differs is written over; what is equal is only read.
 */
#ifndef ZPP_ZERO_BUFFERS_H
#define ZPP_ZERO_BUFFERS_H

#include "zero.h"

struct zpp_buffers_board {
    zpp_zero *zero;
    zpp_region *region;    /* one host */
    unsigned char *memory; /* several hosts, or nothing is reduced; else NULL */
    size_t bytes;
    uint64_t count, seq;   /* of messages; the last descriptor of mine */
    bool posted;
    zpp_event *done;
};

/* Part of destroy. */
void zpp_buffers_fini(zpp_zero *zero);

#endif
