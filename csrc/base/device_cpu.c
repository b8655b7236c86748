/* SPDX-License-Identifier: Apache-2.0
 *
 * The device cpu: HOST streams run in the caller, QUEUE streams are driven by callers, THREAD streams have a thread.
 * device_host.c implements the streams.
 */
#include <stdlib.h>

#include "device_host.h"
#include "mem.h"

static void cpu_destroy(zpp_device *device) {
    zpp_host_device_fini((struct zpp_host_device *)device);
    free(device);
}

static zpp_status cpu_alloc(zpp_device *device, size_t bytes, void **out, struct zpp_err *err) {
    (void)device;
    return zpp_mem_alloc(bytes, ZPP_PAGE_BYTES, out, err);
}

static void cpu_free(zpp_device *device, void *memory, size_t bytes) {
    (void)device;
    zpp_mem_free(memory, bytes);
}

static const struct zpp_device_fill cpu_fill = {
    .name = "cpu",
    .kind = ZPP_DEVICE_HOST,
    .destroy = cpu_destroy,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .pin = zpp_host_pin,
    .unpin = zpp_host_unpin,
    .map_grain = zpp_host_map_grain,
    .map_wrapped = zpp_host_map_wrapped,
    .unmap_wrapped = zpp_host_unmap_wrapped,
    .stream_create = zpp_host_stream_create,
    .stream_destroy = zpp_host_stream_destroy,
    .stream_adopt = zpp_host_stream_adopt,
    .stream_follow = zpp_host_stream_follow,
    .launch = zpp_host_launch,
    .copy = zpp_host_copy,
    .fill = zpp_host_fill,
    .signal = zpp_host_signal,
    .await = zpp_host_await,
    .poll = zpp_host_poll,
    .event_create = zpp_host_event_create,
    .event_destroy = zpp_host_event_destroy,
    .record = zpp_host_record,
    .wait = zpp_host_wait,
    .sync = zpp_host_sync,
};

zpp_status zpp_device_cpu_create(zpp_device **out, struct zpp_err *err) {
    struct zpp_host_device *device = calloc(1, sizeof *device);
    if (!device) return zpp_fail(err, ZPP_NOMEM, "device cpu: no memory for its record");
    zpp_host_device_init(device, &cpu_fill);
    device->modes[ZPP_STREAM_HOST] = ZPP_HOST_INLINE;
    device->modes[ZPP_STREAM_QUEUE] = ZPP_HOST_DRIVEN;
    device->modes[ZPP_STREAM_THREAD] = ZPP_HOST_THREAD;
    *out = &device->base;
    return ZPP_OK;
}
