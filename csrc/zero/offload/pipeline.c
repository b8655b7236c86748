/* SPDX-License-Identifier: Apache-2.0
 *
 * See pipeline.h.
 */
#include "pipeline.h"

#include <stdlib.h>
#include <string.h>

enum {
    DEPTH = 32, /* of each folder */
    BLOCK_BYTES = 1 << 20,
    FLIGHT_BYTES = 8 << 20, /* of each folder; what is needed first is read first */
};

/* --- the file ----------------------------------------------------------------------------------------------------- */

zpp_status zpp_scratch_file_open(struct zpp_scratch_file *file, const struct zpp_scratch_options *options,
                                 struct zpp_err *err) {
    const unsigned disks = options->folders_count ? options->folders_count : 1;
    const struct zpp_aio_config config = {
        .depth = options->depth ? options->depth : DEPTH * disks,
        .block_bytes = options->block_bytes ? options->block_bytes : (size_t)BLOCK_BYTES,
        .stripes = options->folders, .stripes_count = options->folders_count,
        .stripe_bytes = options->stripe_bytes ? options->stripe_bytes : (size_t)ZPP_AIO_STRIPE_BYTES,
        .flight_bytes = (size_t)FLIGHT_BYTES * disks, .direct = true, .backend = ZPP_AIO_AUTO,
        .checksums = options->checksums, .log = options->log, .log_ctx = options->log_ctx, .sys = options->sys };
    file->path = strdup(options->path);
    if (!file->path) return zpp_fail(err, ZPP_NOMEM, "tier: no memory for the path");
    return zpp_aio_create(&config, &file->aio, err);
}

void zpp_scratch_file_close(struct zpp_scratch_file *file) {
    zpp_aio_destroy(file->aio);
    free(file->path);
    *file = (struct zpp_scratch_file){ 0 };
}

/* --- requests ----------------------------------------------------------------------------------------------------- */

zpp_status zpp_scratch_submit(const struct zpp_scratch_file *file, uint64_t offset_bytes, void *memory, size_t bytes,
                              bool write, zpp_aio_request **out, struct zpp_aio_fault *fault, struct zpp_err *err) {
    const struct zpp_aio_job job = {
        .path = file->path, .memory = memory, .bytes = bytes, .offset_bytes = offset_bytes, .write = write };
    if (!file->aio) return zpp_fail(err, ZPP_STATE, "params: their file is closed with the model; prepare a new one");
    return zpp_aio_submit(file->aio, &job, out, fault, err);
}

zpp_status zpp_scratch_finish(zpp_aio_request **request, struct zpp_aio_fault *fault, struct zpp_err *err) {
    if (!*request) return ZPP_OK;
    const struct zpp_wait patience = { 0, NULL, NULL };
    const zpp_status status = zpp_aio_wait(*request, &patience, err);
    const struct zpp_aio_fault *seen = zpp_aio_request_fault(*request);
    if (status == ZPP_TIER && seen && fault) *fault = *seen;
    zpp_aio_release(*request);
    *request = NULL;
    return status;
}

zpp_status zpp_scratch_finish_after(zpp_status status, zpp_aio_request **request, struct zpp_aio_fault *fault,
                                    struct zpp_err *err) {
    struct zpp_err ignored = ZPP_ERR_INIT;
    if (status == ZPP_OK) return zpp_scratch_finish(request, fault, err);
    (void)zpp_scratch_finish(request, NULL, &ignored);
    return status;
}

/* --- the pipeline ------------------------------------------------------------------------------------------------- */

static zpp_status read_until(struct zpp_offload_pipeline *pipeline, size_t end, struct zpp_aio_fault *fault,
                             struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    if (end > pipeline->windows) end = pipeline->windows;
    while (pipeline->next < end && status == ZPP_OK)
        status = pipeline->read(pipeline->ctx, pipeline->next++, fault, err);
    return status;
}

zpp_status zpp_offload_fill(struct zpp_offload_pipeline *pipeline, struct zpp_aio_fault *fault, struct zpp_err *err) {
    return read_until(pipeline, pipeline->buffers, fault, err);
}

zpp_status zpp_offload_run(struct zpp_offload_pipeline *pipeline, struct zpp_aio_fault *fault, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    for (size_t at = 0; at < pipeline->windows && status == ZPP_OK; at++) {
        status = pipeline->step(pipeline->ctx, at, fault, err);
        if (status == ZPP_OK) status = read_until(pipeline, at + pipeline->buffers, fault, err);
    }
    return status;
}
