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
    return zpp_mem_alloc(bytes, zpp_page_bytes(), out, err);
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
    .stream_create = zpp_host_stream_create,
    ZPP_HOST_DEVICE_FUNCTIONS,
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
