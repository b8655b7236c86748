/* SPDX-License-Identifier: Apache-2.0
 *
 * One device of the simulated driver with a stream whose native handle is known, for programs that launch kernels.
 */
#ifndef ZPP_TESTS_SIM_STREAM_H
#define ZPP_TESTS_SIM_STREAM_H

#include "../../csrc/base/device_cuda.h"
#include "harness.h"

static const struct zpp_wait ten_seconds = {10000000000u, NULL, NULL};

static struct {
    zpp_device *device;
    zpp_stream *stream;
    zpp_event *event;
    void *native;
} gpu;

static zpp_status see_native(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)wait, (void)err;
    **(void ***)arg = native;
    return ZPP_OK;
}

/* Wait for all that was launched. */
static void finish(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_event_record(gpu.event, gpu.stream, &err));
    CHECK_OK(zpp_event_sync(gpu.event, &ten_seconds, &err));
}

static void open_gpu(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    void **where = &gpu.native;
    CHECK_OK(zpp_device_cuda_create(0, &gpu.device, &err));
    CHECK_OK(zpp_stream_create(gpu.device, ZPP_STREAM_THREAD, "kernels", &gpu.stream, &err));
    CHECK_OK(zpp_event_create(gpu.device, &gpu.event, &err));
    CHECK_OK(zpp_stream_launch(gpu.stream, see_native, &where, sizeof where, &err));
    finish();
}

static void close_gpu(void) {
    zpp_event_destroy(gpu.event);
    zpp_stream_destroy(gpu.stream);
    zpp_device_destroy(gpu.device);
}

#endif
