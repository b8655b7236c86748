/* SPDX-License-Identifier: Apache-2.0
 *
 * The state of parameters in a file, shared by filed.c (life, loads, copies) and filed_step.c (windows of the step),
 * and by nobody else.
 */
#ifndef ZPP_ZERO_FILED_INTERNAL_H
#define ZPP_ZERO_FILED_INTERNAL_H

#include <stdatomic.h>

#include "../base/mem.h"
#include "../base/stray.h"
#include "../ops/quant/quant.h"
#include "filed.h"

/* Elements of a unit that are kept in fewer bits. */
struct filed_span {
    size_t offset_bytes, elems; /* in the unit */
    zpp_dtype dtype;
};

/* Memory for an image on its way, of the largest one's size. */
struct filed_staging {
    struct filed_staging *next;
    unsigned char *memory;
};

/* What the ranks of a host tell each other of one unit; in shared memory, zeros at first. */
struct filed_board {
    _Atomic int32_t users, contents;
};

struct filed_unit {
    size_t offset_bytes, bytes; /* whole pages */
    bool open; /* in a shared home: this rank can read it */
    bool two, turned;           /* has it a second copy, and is that the one that is now? */
    uint64_t first_offset_bytes, second_offset_bytes; /* in the file, of what moves of it */
    zpp_aio_request *request;   /* this rank's read under way */
    zpp_aio_request *sending;   /* this rank's write of its slice under way */
    zpp_status status;          /* of the last load */
    struct zpp_err err;
    struct zpp_aio_fault fault;
    /* kept in fewer bits: see filed_image.c */
    struct filed_span *spans;
    size_t spans_count;
    size_t image_offset_bytes, image_bytes; /* whole pages */
    struct filed_staging *staging;          /* of the read under way */
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
    _Atomic size_t room_bytes; /* figures are asked for while a delayed step runs */
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
    uint64_t file_bytes; /* first copies and second ones */
    size_t second_bytes; /* of second copies, in the file */
    bool keeps_two;      /* some unit does */
    zpp_range *range;   /* one rank: the home */
    zpp_region *region; /* several: the home, then the board */
    unsigned char *home;
    unsigned char *alias;   /* in a shared home: see filed_stray.c */
    zpp_stray_area *stray;
    struct filed_board *board; /* several ranks only */
    void *sums_room;           /* for shared checksums; the same */
    char *path;
    zpp_aio *aio; /* NULL before open and after close */
    struct filed_window windows[ZPP_FILED_WINDOWS];
    size_t entered_bytes, entered_peak_bytes;
    _Atomic uint64_t load_wait_ns; /* over several hosts the communicator's thread waits (rank_file.h) */
    _Atomic uint64_t step_wait_ns; /* a delayed step's thread waits */
    uint64_t loads, closed_read_bytes, closed_written_bytes, closed_checked_bytes;
    struct zpp_quant_spec images; /* bits 0: units are kept as they are */
    bool images_in_memory;
    size_t images_bytes, images_cut_bytes; /* of all units; what lies before the cut is in memory */
    zpp_region *images_region;
    unsigned char *images_memory;  /* of the region, or of one rank */
    struct filed_staging *staging; /* not in use */
    size_t staging_bytes, stagings;
};

/* The unit that has that place of the home. */
const struct filed_unit *filed_unit_at(const zpp_filed *filed, size_t offset_bytes);
/* Submit a read or write of [offset, offset + bytes) of the home, all behind the cut, and of one unit where some have
 * two copies. `next`: of the copy that is next. */
zpp_status filed_submit(zpp_filed *filed, size_t offset_bytes, void *memory, size_t bytes, bool write, bool next,
                        zpp_aio_request **out, struct zpp_aio_fault *fault, struct zpp_err *err);
/* Wait for *request (NULL is fine), release it and forget it. */
zpp_status filed_finish(zpp_aio_request **request, struct zpp_aio_fault *fault, struct zpp_err *err);
/* Part of seal and destroy. */
zpp_status filed_image_seal(zpp_filed *filed, struct zpp_err *err);
void filed_image_drop(zpp_filed *filed);
/* Begin to read a unit's image: unit->request is NULL where it is in memory; `unit->err` is written where it fails. */
zpp_status filed_image_begin(zpp_filed *filed, struct filed_unit *unit);
/* The read ended with `status`: where that is OK, the values are at home. */
void filed_image_end(zpp_filed *filed, struct filed_unit *unit, zpp_status status);
/* Stray reads of a home that ranks share (filed_stray.c). unwatch accepts a home that is not watched. open and close
 * change this rank's mapping, and return 0 or errno. */
zpp_status filed_stray_watch(zpp_filed *filed, struct zpp_err *err);
void filed_stray_unwatch(zpp_filed *filed);
int filed_home_open(zpp_filed *filed, struct filed_unit *unit, size_t offset_bytes, size_t bytes);
int filed_home_close(zpp_filed *filed, struct filed_unit *unit, size_t offset_bytes, size_t bytes);
/* Buffers of the windows; before the engine ends. */
void filed_drop_windows(zpp_filed *filed);

#endif
