/* SPDX-License-Identifier: Apache-2.0
 *
 * The state of a unit file, for unit_file.c (life, loads, copies) and what it calls: unit_file_step.c (windows of the
 * step), unit_file_qcopy.c (units in fewer bits) and, below all of them, unit_file_mapping.c (places and pages).
 */
#ifndef ZPP_ZERO_UNIT_FILE_INTERNAL_H
#define ZPP_ZERO_UNIT_FILE_INTERNAL_H

#include <stdatomic.h>

#include "../../base/mem.h"
#include "../../base/stray.h"
#include "../../ops/quant/quant.h"
#include "pipeline.h"
#include "unit_file.h"

/* Elements of a unit that are kept in fewer bits. */
struct unit_file_span {
    size_t offset_bytes, elems; /* in the unit */
    zpp_dtype dtype;
};

/* Memory for a quantised copy on its way, of the largest one's size. */
struct unit_file_staging {
    struct unit_file_staging *next;
    unsigned char *memory;
};

/* The state of one unit that the ranks of a host share; in shared memory, zeros at first. */
struct unit_file_board {
    _Atomic int32_t users, contents;
};

struct unit_file_unit {
    size_t offset_bytes, bytes; /* whole pages */
    bool open; /* in a shared mapping: this rank can read it */
    bool two, flipped;           /* it has a second copy; that is the current one */
    uint64_t first_offset_bytes, second_offset_bytes; /* in the file, of what moves of it */
    zpp_aio_request *request;   /* this rank's read under way */
    zpp_aio_request *write_request;   /* this rank's write of its shard under way */
    zpp_status status;          /* of the last load */
    struct zpp_err err;
    struct zpp_aio_fault fault;
    /* kept in fewer bits: see unit_file_qcopy.c */
    struct unit_file_span *spans;
    size_t spans_count;
    size_t qcopy_offset_bytes, qcopy_bytes; /* whole pages */
    struct unit_file_staging *staging;          /* of the read under way */
};

/* Neighbouring bytes of the mapping that one request moves. */
struct unit_file_run {
    size_t offset_bytes, bytes; /* in the mapping */
    size_t at_bytes;            /* in the buffer: the same place in a page, so that whole pages move directly */
    bool reads;
    zpp_aio_request *request;
};

struct unit_file_window {
    unsigned char *memory; /* of the engine's arena */
    _Atomic size_t capacity_bytes; /* figures are asked for while a delayed step runs */
    struct unit_file_run *runs;
    size_t runs_count, runs_capacity;
};

struct zpp_unit_file {
    zpp_comm *comm;
    int rank, ranks;
    double fraction;
    bool sealed;
    struct unit_file_unit *units;
    int units_count;
    size_t units_capacity;
    size_t mapping_bytes, resident_bytes;
    size_t hold_bytes; /* of the mapping's first units, all of which stay in memory */
    uint64_t file_bytes; /* first copies and second ones */
    size_t second_bytes; /* of second copies, in the file */
    bool keeps_two;      /* some unit does */
    zpp_range *range;   /* one rank: the mapping */
    zpp_region *region; /* several: the mapping, then the board */
    unsigned char *mapping;
    unsigned char *alias;   /* in a shared mapping: see unit_file_mapping.c */
    zpp_stray_area *stray;
    struct unit_file_board *board; /* several ranks only */
    void *sums_memory;             /* for shared checksums; several ranks only */
    bool opened; /* once */
    struct zpp_scratch_file file; /* aio NULL before open and after close */
    struct unit_file_window windows[ZPP_UNIT_FILE_WINDOWS];
    size_t acquired_bytes, acquired_peak_bytes;
    _Atomic uint64_t load_wait_ns; /* over several hosts the communicator's thread waits (nvme_net.c) */
    _Atomic uint64_t step_wait_ns; /* a delayed step's thread waits */
    uint64_t loads, closed_read_bytes, closed_written_bytes, closed_checked_bytes;
    struct zpp_quant_spec quant; /* bits 0: units are kept as they are */
    bool qcopies_in_memory;
    size_t qcopies_bytes, qcopies_resident_bytes; /* of all units; the first ones are in memory */
    zpp_region *qcopies_region;
    unsigned char *qcopies_memory;  /* of the region, or of one rank */
    struct unit_file_staging *staging; /* not in use */
    size_t staging_bytes, stagings;
};

/* The unit that has that place of the mapping. */
const struct unit_file_unit *unit_file_unit_at(const zpp_unit_file *unit_file, size_t offset_bytes);
/* The part of a unit that is not resident: its bytes, from *offset_bytes of the mapping on. */
size_t unit_file_moving_part(const zpp_unit_file *unit_file, const struct unit_file_unit *unit, size_t *offset_bytes);
bool unit_file_in_mapping(const zpp_unit_file *unit_file, const void *address);
/* Begin to read or write [offset, offset + bytes) of the mapping, all behind the resident part, and of one unit where
 * some have two copies. `next`: of the copy that is next. */
zpp_status unit_file_submit(zpp_unit_file *unit_file, size_t offset_bytes, void *memory, size_t bytes, bool write,
                            bool next, zpp_aio_request **out, struct zpp_aio_fault *fault, struct zpp_err *err);
/* The same, and wait for it. */
zpp_status unit_file_move(zpp_unit_file *unit_file, size_t offset_bytes, void *memory, size_t bytes, bool write,
                          bool next, struct zpp_aio_fault *fault, struct zpp_err *err);
/* Part of seal and destroy. */
zpp_status unit_file_qcopy_seal(zpp_unit_file *unit_file, struct zpp_err *err);
void unit_file_qcopy_drop(zpp_unit_file *unit_file);
/* Begin to read a unit's quantised copy: unit->request is NULL where it is in memory; `unit->err` is written where it
 * fails. */
zpp_status unit_file_qcopy_begin(zpp_unit_file *unit_file, struct unit_file_unit *unit);
/* The read ended with `status`: where that is OK, the values are at mapping. */
void unit_file_qcopy_end(zpp_unit_file *unit_file, struct unit_file_unit *unit, zpp_status status);
/* Find bytes of a unit in its quantised copy: return the span that they are in, *at_bytes of its scales and
 * *codes_bytes of its codes; or NULL for bytes that are kept as they are, and *at_bytes of these. */
const struct unit_file_span *unit_file_qcopy_find(const zpp_unit_file *unit_file, const struct unit_file_unit *unit,
                                                  size_t offset_bytes, size_t *at_bytes, size_t *codes_bytes);
/* The same the other way: zpp_unit_file_value_at of a quantised copy. */
size_t unit_file_qcopy_value_at(const zpp_unit_file *unit_file, const struct unit_file_unit *unit, size_t into_bytes);
/* Begin to read `bytes` of a unit's quantised copy from `at_bytes` on; *out is NULL where all are in memory. */
zpp_status unit_file_qcopy_read(zpp_unit_file *unit_file, const struct unit_file_unit *unit, size_t at_bytes,
                                void *memory, size_t bytes, zpp_aio_request **out, struct zpp_aio_fault *fault,
                                struct zpp_err *err);
/* Stray reads of a mapping that ranks share (unit_file_mapping.c). unwatch accepts a mapping that is not watched. open
 * and close change this rank's mapping, and return 0 or errno. */
zpp_status unit_file_stray_watch(zpp_unit_file *unit_file, struct zpp_err *err);
void unit_file_stray_unwatch(zpp_unit_file *unit_file);
int unit_file_open_pages(zpp_unit_file *unit_file, struct unit_file_unit *unit, size_t offset_bytes, size_t bytes);
int unit_file_close_pages(zpp_unit_file *unit_file, struct unit_file_unit *unit, size_t offset_bytes, size_t bytes);
/* Buffers of the windows; before the engine ends. */
void unit_file_drop_windows(zpp_unit_file *unit_file);

#endif
