/* SPDX-License-Identifier: Apache-2.0
 *
 * The device sim, for tests: it shows a missing event, as a GPU would. Every stream is a thread (HOST streams too), and
 * each operation starts after a seeded random delay. Fresh memory reads as NaN. Freed memory reads as another NaN and
 * is kept for a while, so that writes to it are counted. Operations have the order that streams and events promise, and
 * no other.
 *
 * device_host.c implements the streams.
 */
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "device_host.h"
#include "mem.h"

/* Both patterns are NaN as float32, bfloat16 and float16, and differ, so that a debugger tells fresh from freed. */
enum { FRESH = 0xffff, FREED = 0x7fc1 };
enum { GRAVES = 64, GRAVES_BYTES = 16 << 20 };

struct grave {
    void *memory;
    size_t bytes;
};

struct sim_device {
    struct zpp_host_device host;
    uint32_t max_delay_us;
    /* Freed blocks that are not returned to the system yet, oldest first; guarded by host.lock. */
    struct grave graves[GRAVES];
    size_t graves_count, graves_bytes, late_bytes;
};

static void fill_pattern(void *memory, size_t bytes, uint16_t pattern) {
    uint16_t *words = memory;
    for (size_t word = 0; word < bytes / 2; ++word) words[word] = pattern;
    if (bytes % 2) ((unsigned char *)memory)[bytes - 1] = (unsigned char)(pattern & 0xff);
}

static size_t changed_bytes(const struct grave *grave) {
    const unsigned char *bytes = grave->memory;
    const unsigned char wanted[2] = {FREED & 0xff, FREED >> 8};
    size_t changed = 0;
    for (size_t byte = 0; byte < grave->bytes; ++byte) changed += bytes[byte] != wanted[byte % 2];
    return changed;
}

static void open_oldest_grave(struct sim_device *sim) {
    struct grave oldest = sim->graves[0];
    sim->late_bytes += changed_bytes(&oldest);
    sim->graves_bytes -= oldest.bytes;
    sim->graves_count -= 1;
    memmove(sim->graves, sim->graves + 1, sim->graves_count * sizeof oldest);
    zpp_mem_free(oldest.memory, oldest.bytes);
}

static void sim_destroy(zpp_device *device) {
    struct sim_device *sim = (struct sim_device *)device;
    while (sim->graves_count) open_oldest_grave(sim);
    zpp_host_device_fini(&sim->host);
    free(sim);
}

static zpp_status sim_alloc(zpp_device *device, size_t bytes, void **out, struct zpp_err *err) {
    (void)device;
    const zpp_status status = zpp_mem_alloc(bytes, zpp_page_bytes(), out, err);
    if (!status) fill_pattern(*out, bytes, FRESH);
    return status;
}

static void sim_free(zpp_device *device, void *memory, size_t bytes) {
    struct sim_device *sim = (struct sim_device *)device;
    fill_pattern(memory, bytes, FREED);
    pthread_mutex_lock(&sim->host.lock);
    while (sim->graves_count && (sim->graves_count == GRAVES || sim->graves_bytes + bytes > GRAVES_BYTES)) {
        open_oldest_grave(sim);
    }
    sim->graves[sim->graves_count++] = (struct grave){memory, bytes};
    sim->graves_bytes += bytes;
    pthread_mutex_unlock(&sim->host.lock);
}

size_t zpp_device_sim_late_bytes(zpp_device *device) {
    struct sim_device *sim = (struct sim_device *)device;
    pthread_mutex_lock(&sim->host.lock);
    size_t late_bytes = sim->late_bytes;
    for (size_t index = 0; index < sim->graves_count; ++index) late_bytes += changed_bytes(&sim->graves[index]);
    pthread_mutex_unlock(&sim->host.lock);
    return late_bytes;
}

static uint64_t next_random(uint64_t *state) { /* xorshift64* */
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1du;
}

static void delay(struct zpp_host_device *device, uint64_t *random_state) {
    const uint32_t max_delay_us = ((struct sim_device *)device)->max_delay_us;
    const uint64_t drawn = next_random(random_state) >> 33;
    const uint32_t delay_us = max_delay_us ? (uint32_t)(drawn % (max_delay_us + 1)) : 0;
    if (delay_us) {
        const struct timespec length = {delay_us / 1000000, (long)(delay_us % 1000000) * 1000};
        nanosleep(&length, NULL);
    } else {
        for (uint64_t yields = drawn % 4; yields; --yields) sched_yield();
    }
}

static zpp_status sim_stream_create(zpp_device *device, enum zpp_stream_kind kind, enum zpp_stream_priority priority,
                                    const char *name, zpp_stream **out, struct zpp_err *err) {
    /* Threads inherit the timer slack. With the usual 50 us all short delays would be equal. */
    const int slack_ns = prctl(PR_GET_TIMERSLACK);
    prctl(PR_SET_TIMERSLACK, 1000ul);
    const zpp_status status = zpp_host_stream_create(device, kind, priority, name, out, err);
    if (slack_ns > 0) prctl(PR_SET_TIMERSLACK, (unsigned long)slack_ns);
    return status;
}

static const struct zpp_device_fill sim_fill = {
    .name = "sim",
    .kind = ZPP_DEVICE_HOST,
    .destroy = sim_destroy,
    .alloc = sim_alloc,
    .free = sim_free,
    .stream_create = sim_stream_create,
    ZPP_HOST_DEVICE_FUNCTIONS,
};

zpp_status zpp_device_sim_create(const struct zpp_sim_options *options, zpp_device **out, struct zpp_err *err) {
    struct sim_device *sim = calloc(1, sizeof *sim);
    if (!sim) return zpp_fail(err, ZPP_NOMEM, "device sim: no memory for its record");
    zpp_host_device_init(&sim->host, &sim_fill);
    for (int kind = 0; kind < 3; ++kind) sim->host.modes[kind] = ZPP_HOST_THREAD;
    sim->host.before = delay;
    sim->host.seed = options->seed;
    sim->max_delay_us = options->max_delay_us;
    *out = &sim->host.base;
    return ZPP_OK;
}
