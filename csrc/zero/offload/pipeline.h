/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of optimizer states, parameters and gradients have in common: the I/O engine on one scratch file, its
 * requests, and the pipeline that streams windows of a file through a few buffers:
 *
 *   read     k+1 .. k+buffers-2   begun before window k is stepped
 *   step     k
 *   write    k-1                  its buffer is read into again only when that is done
 *
 * Threads: those of the file that it belongs to.
 */
#ifndef ZPP_ZERO_OFFLOAD_PIPELINE_H
#define ZPP_ZERO_OFFLOAD_PIPELINE_H

#include "../../aio/engine.h"

/* --- the file ----------------------------------------------------------------------------------------------------- */

/* All zero: closed. */
struct zpp_scratch_file {
    char *path;   /* relative where there are folders that the file is striped over */
    zpp_aio *aio;
};

struct zpp_scratch_options {
    const char *path;           /* copied; relative where there are folders */
    const char *const *folders; /* one for each disk, that the file is striped over; borrowed during the call */
    unsigned folders_count;     /* 0: none, at most ZPP_AIO_PARTS */
    size_t stripe_bytes;        /* a multiple of 4096; 0: ZPP_AIO_STRIPE_BYTES */
    unsigned depth;             /* as struct zpp_aio_config; 0: 32 a folder */
    size_t block_bytes;         /* the same; 0: 1 MiB */
    bool checksums;             /* the same */
    void (*log)(void *log_ctx, const char *text); /* the same */
    void *log_ctx;
    const struct zpp_aio_sys *sys; /* copied; NULL: the real calls */
};
/* Start an engine on a file, whose owner removes it; end with zpp_scratch_file_close, also after an error. */
zpp_status zpp_scratch_file_open(struct zpp_scratch_file *file, const struct zpp_scratch_options *options,
                                 struct zpp_err *err);
void zpp_scratch_file_close(struct zpp_scratch_file *file);

/* --- requests ----------------------------------------------------------------------------------------------------- */

/* Begin one read or write. `fault` is written on status TIER only, here and below. */
zpp_status zpp_scratch_submit(const struct zpp_scratch_file *file, uint64_t offset_bytes, void *memory, size_t bytes,
                              bool write, zpp_aio_request **out, struct zpp_aio_fault *fault, struct zpp_err *err);
/* Wait for *request (NULL is fine), release it and forget it. No timeout and no tick: the kernel ends every request on
 * a file, and a step cannot stop half-way. `fault` may be NULL. */
zpp_status zpp_scratch_finish(zpp_aio_request **request, struct zpp_aio_fault *fault, struct zpp_err *err);
/* The same after `status`: return that where it is a failure, else how the request ended. */
zpp_status zpp_scratch_finish_after(zpp_status status, zpp_aio_request **request, struct zpp_aio_fault *fault,
                                    struct zpp_err *err);

/* --- the pipeline ------------------------------------------------------------------------------------------------- */

struct zpp_offload_pipeline {
    size_t windows; /* in order: window k uses buffer k % buffers */
    size_t buffers;
    size_t next;    /* the first window whose read has not begun */
    void *ctx;
    /* Wait until the buffer's last write has ended, and begin to read the window. */
    zpp_status (*read)(void *ctx, size_t window, struct zpp_aio_fault *fault, struct zpp_err *err);
    /* Wait for that read, step the window, and begin to write it. */
    zpp_status (*step)(void *ctx, size_t window, struct zpp_aio_fault *fault, struct zpp_err *err);
};

/* Begin to read into every buffer. */
zpp_status zpp_offload_fill(struct zpp_offload_pipeline *pipeline, struct zpp_aio_fault *fault, struct zpp_err *err);
/* After fill: step all windows. Requests may be under way afterwards, on failures of every kind. */
zpp_status zpp_offload_run(struct zpp_offload_pipeline *pipeline, struct zpp_aio_fault *fault, struct zpp_err *err);

#endif
