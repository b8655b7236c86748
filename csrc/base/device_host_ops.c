/* SPDX-License-Identifier: Apache-2.0
 *
 * The operations of device.h that need nothing of a stream but its order, on the CPU: copy, fill, signal and await.
 */
#include <string.h>
#include <time.h>

#include "device_host.h"

enum { SPIN_NS = 20000, SLEEP_NS = 50000, TICK_NS = 100000000 };

struct copy_arg {
    void *dst;
    const void *src;
    size_t bytes;
};
struct fill_arg {
    void *dst;
    size_t bytes;
    unsigned char byte;
};
struct signal_arg {
    uint64_t *counter;
    uint64_t value;
};
struct await_arg {
    const uint64_t *counter;
    uint64_t value;
};

zpp_status zpp_host_pin(zpp_device *device, void *memory, size_t bytes, struct zpp_err *err) {
    (void)device, (void)memory, (void)bytes, (void)err; /* the CPU reads all memory */
    return ZPP_OK;
}

void zpp_host_unpin(zpp_device *device, void *memory) { (void)device, (void)memory; }

static zpp_status copy_op(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native, (void)wait, (void)err;
    const struct copy_arg *copy = arg;
    if (copy->bytes) memcpy(copy->dst, copy->src, copy->bytes);
    return ZPP_OK;
}

zpp_status zpp_host_copy(zpp_stream *stream, void *dst, const void *src, size_t bytes, struct zpp_err *err) {
    const struct copy_arg copy = {dst, src, bytes};
    return zpp_host_launch(stream, copy_op, &copy, sizeof copy, err);
}

static zpp_status fill_op(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native, (void)wait, (void)err;
    const struct fill_arg *fill = arg;
    if (fill->bytes) memset(fill->dst, fill->byte, fill->bytes);
    return ZPP_OK;
}

zpp_status zpp_host_fill(zpp_stream *stream, void *dst, unsigned char byte, size_t bytes, struct zpp_err *err) {
    const struct fill_arg fill = {dst, bytes, byte};
    return zpp_host_launch(stream, fill_op, &fill, sizeof fill, err);
}

static zpp_status signal_op(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native, (void)wait, (void)err;
    const struct signal_arg *signal = arg;
    __atomic_store_n(signal->counter, signal->value, __ATOMIC_RELEASE);
    return ZPP_OK;
}

zpp_status zpp_host_signal(zpp_stream *stream, uint64_t *counter, uint64_t value, struct zpp_err *err) {
    const struct signal_arg signal = {counter, value};
    return zpp_host_launch(stream, signal_op, &signal, sizeof signal, err);
}

static zpp_status too_late(const struct await_arg *await, const struct zpp_wait *wait, struct zpp_err *err) {
    return zpp_fail(err, ZPP_TIMEOUT, "stream: a counter is %llu and did not reach %llu within %.3f s",
                    (unsigned long long)__atomic_load_n(await->counter, __ATOMIC_RELAXED),
                    (unsigned long long)await->value, (double)wait->timeout_ns * 1e-9);
}

/* A peer writes the counter, perhaps from its GPU, so there is nothing to be woken by: look, sleep, look. */
static zpp_status await_op(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native;
    const struct await_arg *await = arg;
    if (zpp_stream_counter_reached(await->counter, await->value)) return ZPP_OK;
    if (!wait) return ZPP_AGAIN;
    const uint64_t start_ns = zpp_now_ns();
    uint64_t tick_ns = start_ns + TICK_NS;
    while (!zpp_stream_counter_reached(await->counter, await->value)) {
        const uint64_t now_ns = zpp_now_ns();
        if (wait->timeout_ns && now_ns - start_ns >= wait->timeout_ns) return too_late(await, wait, err);
        if (now_ns >= tick_ns) {
            tick_ns = now_ns + TICK_NS;
            const zpp_status status = wait->tick ? wait->tick(wait->ctx, err) : ZPP_OK;
            if (status) return status;
        }
        if (now_ns - start_ns > SPIN_NS) nanosleep(&(struct timespec){0, SLEEP_NS}, NULL);
    }
    return ZPP_OK;
}

zpp_status zpp_host_await(zpp_stream *stream, const uint64_t *counter, uint64_t value, const struct zpp_wait *wait,
                          struct zpp_err *err) {
    const struct await_arg await = {counter, value};
    return zpp_host_launch_wait(stream, await_op, &await, sizeof await, wait, err);
}
