/* SPDX-License-Identifier: Apache-2.0
 *
 * Host memory of the coordinator that streams of the accelerator copy from and to: page-locked from seal to destroy.
 */
#include <stdlib.h>

#include "../base/mem.h"
#include "internal.h"

static zpp_status tell_who_holds(const struct zpp_pinned *pinned, const struct zpp_err *failure, struct zpp_err *err) {
    return zpp_fail(err, failure->status,
                    "%s; this rank page-locked %zu bytes of shards and buckets before; lower Config(bucket_bytes=), "
                    "start fewer ranks on this host, or keep shards on the device (leave Offload out)",
                    failure->text, pinned->bytes);
}

zpp_status zpp_pin(zpp_zero *zero, void *memory, size_t bytes, struct zpp_err *err) {
    struct zpp_pinned *pinned = &zero->pinned;
    if (!zero->options.host || !bytes) return ZPP_OK;
    struct zpp_pinned_memory *grown =
        zpp_array_reserve(pinned->all, pinned->count, &pinned->capacity, sizeof *grown);
    if (!grown) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the list of page-locked memory");
    pinned->all = grown;
    struct zpp_err failure = ZPP_ERR_INIT;
    const zpp_status status = zpp_device_pin(zero->options.device, memory, bytes, &failure);
    if (status != ZPP_OK) return tell_who_holds(pinned, &failure, err);
    pinned->all[pinned->count++] = (struct zpp_pinned_memory){memory, 0};
    pinned->bytes += bytes;
    return ZPP_OK;
}

zpp_status zpp_zero_page_locked(zpp_zero *zero, size_t bytes, void **out, struct zpp_err *err) {
    if (!zero->options.host || !bytes)
        return zpp_fail(err, ZPP_INVALID, "zero: %zu bytes of page-locked memory, wanted some, and an accelerator",
                        bytes);
    zpp_status status = zpp_mem_alloc(bytes, zpp_page_bytes(), out, err);
    if (status != ZPP_OK) return status;
    status = zpp_pin(zero, *out, bytes, err);
    if (status == ZPP_OK) zero->pinned.all[zero->pinned.count - 1].owned_bytes = bytes;
    else zpp_mem_free(*out, bytes);
    return status;
}

void zpp_unpin_all(zpp_zero *zero) {
    struct zpp_pinned *pinned = &zero->pinned;
    while (pinned->count) {
        const struct zpp_pinned_memory *last = &pinned->all[--pinned->count];
        zpp_device_unpin(zero->options.device, last->memory);
        if (last->owned_bytes) zpp_mem_free(last->memory, last->owned_bytes);
    }
    free(pinned->all);
    *pinned = (struct zpp_pinned){0};
}

/* --- stagings ----------------------------------------------------------------------------------------------------- */

zpp_status zpp_staging_make(zpp_zero *zero, size_t bytes, struct zpp_err *err) {
    struct zpp_staging *staging = &zero->staging;
    zpp_status status = ZPP_OK;
    staging->bytes = bytes;
    for (int i = 0; i < ZPP_STAGINGS && bytes && status == ZPP_OK; i++) {
        void *memory = NULL;
        status = zpp_mem_alloc(bytes, zpp_page_bytes(), &memory, err);
        staging->memory[i] = memory;
        if (status == ZPP_OK) status = zpp_pin(zero, memory, bytes, err);
        if (status == ZPP_OK) status = zpp_event_create(zero->options.device, &staging->copied[i], err);
    }
    return status;
}

void zpp_staging_free(zpp_zero *zero) {
    struct zpp_staging *staging = &zero->staging;
    for (int i = 0; i < ZPP_STAGINGS; i++) {
        zpp_event_destroy(staging->copied[i]);
        zpp_mem_free(staging->memory[i], staging->bytes);
    }
    *staging = (struct zpp_staging){0};
}
