/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory for the sums of a norm on a device (step_plan.h). It is kept from one norm to the next: to free memory of a
 * GPU waits for all of its streams, and to copy to memory that is not pinned waits for the copy.
 */
#include <stdlib.h>

#include "step_plan.h"

#include "../base/mem.h"

static void drop_memory(struct zpp_norm_memory *norm) {
    if (norm->memory) zpp_device_free(norm->device, norm->memory, norm->bytes);
    if (norm->host_bytes) zpp_device_unpin(norm->device, norm->host);
    free(norm->host);
    norm->memory = norm->host = NULL;
    norm->bytes = norm->host_bytes = 0;
}

void zpp_norm_memory_free(struct zpp_norm_memory *norm) {
    if (!norm) return;
    drop_memory(norm);
    if (norm->done) zpp_event_destroy(norm->done);
    free(norm);
}

zpp_status zpp_norm_memory_reserve(struct zpp_norm_memory *norm, zpp_device *device, size_t bytes, size_t host_bytes,
                                   struct zpp_err *err) {
    const size_t page_bytes = zpp_page_bytes(); /* what is pinned is whole pages */
    host_bytes = (host_bytes + page_bytes - 1) / page_bytes * page_bytes;
    norm->device = device;
    zpp_status status = norm->done ? ZPP_OK : zpp_event_create(device, &norm->done, err);
    if (status != ZPP_OK || (bytes <= norm->bytes && host_bytes <= norm->host_bytes)) return status;
    drop_memory(norm);
    norm->host = aligned_alloc(page_bytes, host_bytes);
    if (!norm->host) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the sums of a norm");
    status = zpp_device_pin(device, norm->host, host_bytes, err);
    if (status != ZPP_OK) return status;
    norm->host_bytes = host_bytes;
    status = zpp_device_alloc(device, bytes, &norm->memory, err);
    if (status == ZPP_OK) norm->bytes = bytes;
    return status;
}
