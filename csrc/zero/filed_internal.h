/* SPDX-License-Identifier: Apache-2.0
 *
 * The state of parameters in a file, shared by filed.c (life, loads, copies) and filed_step.c (windows of the step),
 * and by nobody else.
 */
#ifndef ZPP_ZERO_FILED_INTERNAL_H
#define ZPP_ZERO_FILED_INTERNAL_H

#include <stdatomic.h>

#include "../base/mem.h"
#include "filed.h"

/* What the ranks of a host tell each other of one unit; in shared memory, zeros at first. */
struct filed_board {
    _Atomic int32_t users, contents;
};

struct filed_unit {
    size_t offset_bytes, bytes; /* whole pages */
    zpp_aio_request *request;   /* this rank's read under way */
    zpp_status status;          /* of the last load */
    struct zpp_err err;
    struct zpp_aio_fault fault;
};

/* Neighbouring bytes of the home that one request moves. */
struct filed_run {
    size_t offset_bytes, bytes; /* in the home */
    size_t at_bytes;            /* in the buffer: the same place in a page, so that whole pages move directly */
    bool reads;
    zpp_aio_request *request;
};

struct filed_window {
    unsigned char *memory; /* of the engine's arena */
    size_t room_bytes;
    struct filed_run *runs;
    size_t runs_count, runs_room;
};

struct zpp_filed {
    zpp_comm *comm;
    int rank, ranks;
    double fraction;
    bool sealed;
    struct filed_unit *units;
    int units_count, units_room;
    size_t home_bytes, cut_bytes;
    zpp_range *range;   /* one rank: the home */
    zpp_region *region; /* several: the home, then the board */
    unsigned char *home;
    struct filed_board *board; /* several ranks only */
    char *path;
    zpp_aio *aio; /* NULL before open and after close */
    struct filed_window windows[ZPP_FILED_WINDOWS];
    size_t entered_bytes, entered_peak_bytes;
    uint64_t loads, load_wait_ns, step_wait_ns, closed_read_bytes, closed_written_bytes;
};

/* Submit a read or write of [offset, offset + bytes) of the home, all behind the cut. */
zpp_status filed_submit(zpp_filed *filed, size_t offset_bytes, void *memory, size_t bytes, bool write,
                        zpp_aio_request **out, struct zpp_aio_fault *fault, struct zpp_err *err);
/* Wait for *request (NULL is fine), release it and forget it. */
zpp_status filed_finish(zpp_aio_request **request, struct zpp_aio_fault *fault, struct zpp_err *err);
/* Buffers of the windows; before the engine ends. */
void filed_drop_windows(zpp_filed *filed);

#endif
