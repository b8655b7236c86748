/* SPDX-License-Identifier: Apache-2.0
 *
 * device_probe.h: each probe enqueues all that it does, reads the result once, and compares it with what it wrote.
 */
#include "device_probe.h"

#include <stdlib.h>
#include <string.h>

#include "mem.h"
#include "wrap.h"

enum { BYTES = 1 << 20 };

struct probe {
    zpp_device *device;
    const struct zpp_wait *wait;
    zpp_stream *first, *second;
    zpp_event *event, *done;
    void *memory;        /* BYTES of the device */
    unsigned char *host; /* BYTES, page-locked; then a page with a counter */
    bool pinned;
};

static uint64_t *counter_of(const struct probe *probe) { return (uint64_t *)(void *)(probe->host + BYTES); }

static zpp_status open_probe(struct probe *probe, struct zpp_err *err) {
    const size_t page_bytes = zpp_page_bytes(), host_bytes = BYTES + page_bytes;
    probe->host = aligned_alloc(page_bytes, host_bytes);
    if (!probe->host) return zpp_fail(err, ZPP_NOMEM, "device: no memory of the host for a probe");
    memset(probe->host, 0, host_bytes);
    zpp_status status = zpp_device_pin(probe->device, probe->host, host_bytes, err);
    probe->pinned = status == ZPP_OK;
    if (status == ZPP_OK) status = zpp_device_alloc(probe->device, BYTES, &probe->memory, err);
    if (status == ZPP_OK) status = zpp_stream_create(probe->device, ZPP_STREAM_THREAD, "first", &probe->first, err);
    if (status == ZPP_OK) status = zpp_stream_create(probe->device, ZPP_STREAM_THREAD, "second", &probe->second, err);
    if (status == ZPP_OK) status = zpp_event_create(probe->device, &probe->event, err);
    if (status == ZPP_OK) status = zpp_event_create(probe->device, &probe->done, err);
    return status;
}

static void close_probe(struct probe *probe) {
    zpp_stream_destroy(probe->second);
    zpp_stream_destroy(probe->first);
    zpp_event_destroy(probe->event);
    zpp_event_destroy(probe->done);
    if (probe->memory) zpp_device_free(probe->device, probe->memory, BYTES);
    if (probe->pinned) zpp_device_unpin(probe->device, probe->host);
    free(probe->host);
}

/* Copy `from` to the host on the stream, wait, and compare every byte. */
static zpp_status expect(struct probe *probe, zpp_stream *stream, const void *from, unsigned char wanted,
                         struct zpp_err *err) {
    zpp_status status = zpp_stream_copy(stream, probe->host, from, BYTES, err);
    if (status == ZPP_OK) status = zpp_event_record(probe->done, stream, err);
    if (status == ZPP_OK) status = zpp_event_sync(probe->done, probe->wait, err);
    for (size_t i = 0; i < BYTES && status == ZPP_OK; i++) {
        if (probe->host[i] == wanted) continue;
        status = zpp_fail(err, ZPP_DEVICE, "byte %zu of %d is 0x%02x, wanted 0x%02x", i, BYTES, probe->host[i], wanted);
    }
    return status;
}

static zpp_status probe_memory(struct probe *probe, struct zpp_err *err) {
    zpp_status status = zpp_stream_fill(probe->first, probe->memory, 0x11, BYTES, err);
    if (status == ZPP_OK) status = expect(probe, probe->first, probe->memory, 0x11, err);
    if (status != ZPP_OK) return status;
    memset(probe->host, 0x22, BYTES);
    status = zpp_stream_copy(probe->first, probe->memory, probe->host, BYTES, err);
    if (status == ZPP_OK) status = zpp_event_record(probe->done, probe->first, err);
    if (status == ZPP_OK) status = zpp_event_sync(probe->done, probe->wait, err);
    memset(probe->host, 0, BYTES);
    return status == ZPP_OK ? expect(probe, probe->first, probe->memory, 0x22, err) : status;
}

static zpp_status probe_events(struct probe *probe, struct zpp_err *err) {
    zpp_status status = zpp_stream_fill(probe->first, probe->memory, 0x33, BYTES, err);
    if (status == ZPP_OK) status = zpp_event_record(probe->event, probe->first, err);
    if (status == ZPP_OK) status = zpp_stream_wait(probe->second, probe->event, probe->wait, err);
    return status == ZPP_OK ? expect(probe, probe->second, probe->memory, 0x33, err) : status;
}

/* The signal is enqueued first, so that streams of one hardware queue do not wait for themselves. */
static zpp_status probe_counters(struct probe *probe, struct zpp_err *err) {
    zpp_status status = zpp_stream_fill(probe->first, probe->memory, 0x44, BYTES, err);
    if (status == ZPP_OK) status = zpp_stream_signal(probe->first, counter_of(probe), 7, err);
    if (status == ZPP_OK) status = zpp_stream_await(probe->second, counter_of(probe), 7, probe->wait, err);
    return status == ZPP_OK ? expect(probe, probe->second, probe->memory, 0x44, err) : status;
}

static zpp_status take_and_fill(struct probe *probe, zpp_wrap *wrap, int unit, unsigned char byte,
                                struct zpp_err *err) {
    int blocker;
    zpp_status status = zpp_wrap_take(wrap, unit, probe->first, &blocker, err);
    if (status == ZPP_AGAIN) status = zpp_fail(err, ZPP_DEVICE, "unit %d waits for unit %d", unit, blocker);
    if (status == ZPP_OK) status = zpp_stream_fill(probe->first, zpp_wrap_address(wrap, unit), byte, BYTES, err);
    return status;
}

/* Two units over the memory of one: what is written at the second's address is read at the first's. */
static zpp_status probe_wrapped(struct probe *probe, struct zpp_err *err) {
    static const struct zpp_wrap_unit sizes[] = {{"first", BYTES, false}, {"second", BYTES, false}};
    struct zpp_wrap_unit units[64];
    zpp_wrap *wrap = NULL;
    int last = 0;
    for (int k = 0; k < 64; k++) units[k] = sizes[k != 0];
    const struct zpp_wrap_options options = {probe->device, units, 64, BYTES};
    zpp_status status = zpp_wrap_create(&options, &wrap, err);
    while (status == ZPP_OK && ++last < 64 && !zpp_wrap_meet(wrap, 0, last)) continue;
    if (last == 64) status = zpp_fail(err, ZPP_DEVICE, "no unit of 64 shares the memory of the first");
    if (status == ZPP_OK) status = take_and_fill(probe, wrap, 0, 0x55, err);
    if (status == ZPP_OK) status = zpp_wrap_release(wrap, 0, probe->first, err);
    if (status == ZPP_OK) status = take_and_fill(probe, wrap, last, 0x66, err);
    if (status == ZPP_OK) status = expect(probe, probe->first, zpp_wrap_address(wrap, 0), 0x66, err);
    zpp_wrap_destroy(wrap);
    return status;
}

static const struct {
    const char *name;
    zpp_status (*run)(struct probe *probe, struct zpp_err *err);
} probes[ZPP_DEVICE_PROBES] = {
    [ZPP_PROBE_MEMORY] = {"memory and copies", probe_memory},
    [ZPP_PROBE_EVENTS] = {"waits for events", probe_events},
    [ZPP_PROBE_COUNTERS] = {"waits for counters", probe_counters},
    [ZPP_PROBE_WRAPPED] = {"memory at several addresses", probe_wrapped},
};

const char *zpp_device_probe_name(enum zpp_device_probe probe) { return probes[probe].name; }

zpp_status zpp_device_probe(zpp_device *device, enum zpp_device_probe which, const struct zpp_wait *wait,
                            struct zpp_err *err) {
    struct probe probe = {.device = device, .wait = wait};
    zpp_status status = open_probe(&probe, err);
    if (status == ZPP_OK) status = probes[which].run(&probe, err);
    close_probe(&probe);
    return status;
}
