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
    void **grown = zpp_array_reserve(pinned->memory, pinned->count, &pinned->capacity, sizeof *grown);
    if (!grown) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the list of page-locked memory");
    pinned->memory = grown;
    struct zpp_err failure = ZPP_ERR_INIT;
    const zpp_status status = zpp_device_pin(zero->options.device, memory, bytes, &failure);
    if (status != ZPP_OK) return tell_who_holds(pinned, &failure, err);
    pinned->memory[pinned->count++] = memory;
    pinned->bytes += bytes;
    return ZPP_OK;
}

void zpp_unpin_all(zpp_zero *zero) {
    struct zpp_pinned *pinned = &zero->pinned;
    while (pinned->count) zpp_device_unpin(zero->options.device, pinned->memory[--pinned->count]);
    free(pinned->memory);
    *pinned = (struct zpp_pinned){0};
}
