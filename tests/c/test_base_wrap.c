/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory that wraps (wrap.h): on the CPU, on the device sim, and over the simulated GPU in every schedule of its
 * streams. A pass gathers units one after the other, one ahead, and every use sees the unit's own bytes.
 */
#include "sim_gpu.h"

#include "../../csrc/base/device.h"
#include "../../csrc/base/wrap.h"

enum { UNITS = 9, SCHEDULES = 8, PASSES = 4, SEEN_BYTES = 2 * UNITS * 8192 };
static const size_t memories[] = {8192, 16384, 65536}; /* bytes; in the last one no units meet */
static const struct zpp_wait ten_seconds = {10000000000u, NULL, NULL};
static const struct zpp_wrap_unit units[UNITS] = {
    {"u0", 5000, false}, {"u1", 4096, false}, {"u2", 7000, false}, {"u3", 100, false}, {"u4", 8192, false},
    {"u5", 6000, false}, {"u6", 512, false},  {"u7", 0, false},    {"u8", 7777, false}};

static zpp_wrap *new_wrap(zpp_device *device, size_t memory_bytes) {
    struct zpp_err err = ZPP_ERR_INIT;
    const struct zpp_wrap_options options = {device, units, UNITS, memory_bytes};
    zpp_wrap *wrap;
    CHECK_OK(zpp_wrap_create(&options, &wrap, &err));
    return wrap;
}

/* The units whose bytes, one by one, lie at the same place modulo R. */
static bool meet_by_bytes(const zpp_wrap *wrap, int a, int b) {
    const size_t r = zpp_wrap_memory_bytes(wrap);
    const unsigned char *first = zpp_wrap_address(wrap, 0);
    const size_t x = (size_t)((unsigned char *)zpp_wrap_address(wrap, a) - first);
    const size_t y = (size_t)((unsigned char *)zpp_wrap_address(wrap, b) - first);
    for (size_t i = 0; i < units[a].bytes; ++i) {
        const size_t apart = ((x + i) % r + r - y % r) % r;
        if (apart < units[b].bytes) return true;
    }
    return false;
}

static void units_meet_modulo_the_memory(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device;
    CHECK_OK(zpp_device_cpu_create(&device, &err));
    for (size_t memory = 8192; memory <= 65536; memory += 4096) {
        zpp_wrap *wrap = new_wrap(device, memory);
        const unsigned char *first = zpp_wrap_address(wrap, 0);
        for (int a = 0; a < UNITS; ++a) for (int b = 0; b < UNITS; ++b) {
            CHECK_EQUAL(zpp_wrap_meet(wrap, a, b), a != b && meet_by_bytes(wrap, a, b));
        }
        for (int a = 0; a < UNITS; ++a) {
            unsigned char *at = zpp_wrap_address(wrap, a);
            CHECK_EQUAL((size_t)(at - first) % 512, 0);
            memset(at, a + 1, units[a].bytes);
            for (int b = 0; b < a; ++b) { /* memory is shared exactly where units meet */
                const unsigned char *other = zpp_wrap_address(wrap, b);
                bool changed = false;
                for (size_t i = 0; i < units[b].bytes; ++i) changed = changed || (other[i] == a + 1);
                CHECK_EQUAL(changed, zpp_wrap_meet(wrap, a, b) && units[a].bytes > 0);
            }
        }
        zpp_wrap_destroy(wrap);
    }
    zpp_device_destroy(device);
}

struct rig {
    zpp_device *device;
    zpp_stream *gather, *compute;
    zpp_event *ready[UNITS];
    zpp_wrap *wrap;
    unsigned char *seen; /* what the last use of each unit read in even and odd passes; of the device */
};

static struct rig new_rig(zpp_device *device, size_t memory_bytes) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct rig rig = {.device = device};
    CHECK_OK(zpp_stream_create(device, ZPP_STREAM_THREAD, "gather", &rig.gather, &err));
    CHECK_OK(zpp_stream_create(device, ZPP_STREAM_QUEUE, "compute", &rig.compute, &err));
    for (int u = 0; u < UNITS; ++u) CHECK_OK(zpp_event_create(device, &rig.ready[u], &err));
    CHECK_OK(zpp_device_alloc(device, SEEN_BYTES, (void **)&rig.seen, &err));
    rig.wrap = new_wrap(device, memory_bytes);
    return rig;
}

static void end_rig(struct rig *rig) {
    zpp_stream_destroy(rig->gather);
    zpp_stream_destroy(rig->compute);
    zpp_wrap_destroy(rig->wrap);
    for (int u = 0; u < UNITS; ++u) zpp_event_destroy(rig->ready[u]);
    zpp_device_free(rig->device, rig->seen, SEEN_BYTES);
    zpp_device_destroy(rig->device);
}

/* Fill the unit on the stream `gather`. A unit that another one blocks gets memory of its own if it is needed now. */
static bool fetch(struct rig *rig, int u, int pass, bool needed) {
    struct zpp_err err = ZPP_ERR_INIT;
    int blocker = -1;
    zpp_status status = zpp_wrap_take(rig->wrap, u, rig->gather, &blocker, &err);
    if (status == ZPP_AGAIN) {
        CHECK(zpp_wrap_meet(rig->wrap, u, blocker));
        if (!needed) return false;
        CHECK_OK(zpp_wrap_own(rig->wrap, u, &err));
        status = zpp_wrap_take(rig->wrap, u, rig->gather, &blocker, &err);
    }
    CHECK_OK(status);
    CHECK_OK(zpp_stream_fill(rig->gather, zpp_wrap_address(rig->wrap, u), (unsigned char)(16 * pass + u + 1),
                             units[u].bytes, &err));
    CHECK_OK(zpp_event_record(rig->ready[u], rig->gather, &err));
    return true;
}

static unsigned char *seen_at(struct rig *rig, int u, int pass) {
    return rig->seen + 8192 * (UNITS * (pass % 2) + u);
}

static void use_and_release(struct rig *rig, int u, int pass) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_stream_wait(rig->compute, rig->ready[u], NULL, &err));
    CHECK_OK(zpp_stream_copy(rig->compute, seen_at(rig, u, pass), zpp_wrap_address(rig->wrap, u), units[u].bytes,
                             &err));
    CHECK_OK(zpp_wrap_release(rig->wrap, u, rig->compute, &err));
}

static void check_seen(struct rig *rig, int pass) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_event *end;
    CHECK_OK(zpp_event_create(rig->device, &end, &err));
    CHECK_OK(zpp_event_record(end, rig->compute, &err));
    CHECK_OK(zpp_event_sync(end, &ten_seconds, &err));
    for (int u = 0; u < UNITS; ++u) {
        for (size_t i = 0; i < units[u].bytes; ++i) CHECK_EQUAL(seen_at(rig, u, pass)[i], 16 * pass + u + 1);
    }
    zpp_event_destroy(end);
}

static void run_passes(struct rig *rig) {
    for (int pass = 0; pass < PASSES; ++pass) {
        bool whole[UNITS + 1] = {false};
        for (int step = 0; step < UNITS; ++step) {
            const int u = pass % 2 ? UNITS - 1 - step : step, next = pass % 2 ? u - 1 : u + 1;
            if (!whole[u]) fetch(rig, u, pass, true);
            if (next >= 0 && next < UNITS) whole[next] = fetch(rig, next, pass, false);
            use_and_release(rig, u, pass);
        }
        if (pass % 2 == 0) continue; /* the host waits for nothing between forward and backward */
        check_seen(rig, pass - 1);
        check_seen(rig, pass);
    }
}

static void passes_on_the_cpu(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    for (uint64_t seed = 0; seed < 8; ++seed) {
        const struct zpp_sim_options options = {.seed = seed, .max_delay_us = 50};
        zpp_device *device;
        CHECK_OK(seed ? zpp_device_sim_create(&options, &device, &err) : zpp_device_cpu_create(&device, &err));
        struct rig rig = new_rig(device, memories[seed % 3]);
        run_passes(&rig);
        CHECK_EQUAL(zpp_wrap_own_bytes(rig.wrap), 0);
        end_rig(&rig);
    }
}

static void passes_on_the_simulated_gpu(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    for (uint64_t run = 0; run < 3 * SCHEDULES; ++run) {
        const size_t memory = memories[run / SCHEDULES];
        zpp_device *device;
        CHECK_OK(zpp_device_cuda_create(0, &device, &err));
        struct rig rig = new_rig(device, memory);
        SIM(sim_set_schedule)(run % SCHEDULES << 1, 0);
        run_passes(&rig);
        CHECK(zpp_wrap_memory_bytes(rig.wrap) <= memory && zpp_wrap_own_bytes(rig.wrap) <= 8192);
        SIM(sim_set_schedule)(0, 0);
        end_rig(&rig);
        const struct sim_counts counts = sim_gpu_counts();
        CHECK(counts.blocks == 0 && counts.block_bytes == 0 && counts.streams == 0 && counts.events == 0);
    }
}

/* A unit that is kept whole blocks what meets it; the blocked one gets memory of its own, once, and is counted. */
static void a_blocked_unit_gets_memory_of_its_own(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    for (uint64_t lazy = 0; lazy < SCHEDULES; ++lazy) {
        zpp_device *device;
        CHECK_OK(zpp_device_cuda_create(0, &device, &err));
        struct rig rig = new_rig(device, 16384);
        SIM(sim_set_schedule)(lazy << 1, 0);
        run_passes(&rig); /* all units used memory that wraps */
        fetch(&rig, 0, PASSES, true);
        int blocked = 0;
        while (!zpp_wrap_meet(rig.wrap, 0, blocked)) ++blocked;
        int blocker = -1;
        CHECK_EQUAL(zpp_wrap_take(rig.wrap, blocked, rig.gather, &blocker, &err), ZPP_AGAIN);
        CHECK_EQUAL(blocker, 0);
        for (int u = 1; u < UNITS; ++u) {
            fetch(&rig, u, PASSES, true);
            use_and_release(&rig, u, PASSES);
        }
        use_and_release(&rig, 0, PASSES);
        check_seen(&rig, PASSES);
        const size_t own = zpp_wrap_own_bytes(rig.wrap);
        CHECK(own >= units[blocked].bytes && !zpp_wrap_meet(rig.wrap, 0, blocked));
        run_passes(&rig);
        CHECK_EQUAL(zpp_wrap_own_bytes(rig.wrap), own);
        SIM(sim_set_schedule)(0, 0);
        end_rig(&rig);
    }
}

/* A unit that asks for it has memory of its own from the beginning, larger than R, and is in nobody's way. */
static void a_unit_may_begin_with_memory_of_its_own(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    const struct zpp_wrap_unit three[] = {{"a", 8192, false}, {"embedding", 65536, true}, {"b", 8192, false}};
    zpp_device *device;
    zpp_stream *stream;
    zpp_wrap *wrap;
    int blocker;
    CHECK_OK(zpp_device_cuda_create(0, &device, &err));
    CHECK_OK(zpp_stream_create(device, ZPP_STREAM_THREAD, "gather", &stream, &err));
    const struct zpp_wrap_options options = {device, three, 3, 8192};
    CHECK_OK(zpp_wrap_create(&options, &wrap, &err));
    CHECK_EQUAL(zpp_wrap_memory_bytes(wrap), 8192);
    CHECK_EQUAL(zpp_wrap_own_bytes(wrap), 65536);
    CHECK(zpp_wrap_meet(wrap, 0, 2) && !zpp_wrap_meet(wrap, 0, 1) && !zpp_wrap_meet(wrap, 1, 2));
    CHECK_OK(zpp_wrap_take(wrap, 1, stream, &blocker, &err));
    CHECK_OK(zpp_wrap_take(wrap, 0, stream, &blocker, &err));
    CHECK_EQUAL(zpp_wrap_take(wrap, 2, stream, &blocker, &err), ZPP_AGAIN);
    CHECK_EQUAL(blocker, 0);
    CHECK_OK(zpp_wrap_release(wrap, 0, stream, &err));
    CHECK_OK(zpp_wrap_take(wrap, 2, stream, &blocker, &err));
    zpp_wrap_destroy(wrap);
    zpp_stream_destroy(stream);
    zpp_device_destroy(device);
}

static void poison_is_nan_after_a_release(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    setenv("ZEROPP_POISON", "1", 1);
    zpp_device *device;
    CHECK_OK(zpp_device_cpu_create(&device, &err));
    struct rig rig = new_rig(device, 1); /* R does not bound what has memory of its own */
    unsetenv("ZEROPP_POISON");
    run_passes(&rig);
    size_t all = 0;
    for (int u = 0; u < UNITS; ++u) {
        all += units[u].bytes;
        const unsigned char *at = zpp_wrap_address(rig.wrap, u);
        for (size_t i = 0; i < units[u].bytes; ++i) CHECK_EQUAL(at[i], 0xff);
    }
    CHECK_EQUAL(zpp_wrap_own_bytes(rig.wrap), all);
    CHECK_EQUAL(zpp_wrap_memory_bytes(rig.wrap), 0);
    end_rig(&rig);
}

static void errors_are_sentences(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device;
    zpp_wrap *wrap = NULL;
    CHECK_OK(zpp_device_cuda_create(0, &device, &err));
    struct zpp_wrap_options options = {device, units, UNITS, 8000};
    CHECK_FAILS(zpp_wrap_create(&options, &wrap, &err), ZPP_INVALID,
                "wrapped memory: unit u4 has 8192 bytes, wanted at most the 8000 bytes of memory for all units; raise "
                "prefetch_bytes");
    const struct zpp_wrap_unit large = {"large", (size_t)1 << 26, false};
    options = (struct zpp_wrap_options){device, &large, 1, (size_t)1 << 26};
    CHECK_FAILS(zpp_wrap_create(&options, &wrap, &err), ZPP_NOMEM,
                "no room for 67108864 bytes (memory of gathered units)");
    CHECK(wrap == NULL);
    zpp_device_destroy(device);
    const struct sim_counts counts = sim_gpu_counts();
    CHECK(counts.blocks == 0 && counts.events == 0);
}

int main(int argc, char **argv) {
    setenv("SIM_DEVICE_BYTES", "4194304", 1);
    sim_gpu_load();
    static const struct test_case cases[] = {
        TEST(units_meet_modulo_the_memory), TEST(passes_on_the_cpu), TEST(passes_on_the_simulated_gpu),
        TEST(a_blocked_unit_gets_memory_of_its_own), TEST(a_unit_may_begin_with_memory_of_its_own),
        TEST(poison_is_nan_after_a_release), TEST(errors_are_sentences),
        {0},
    };
    return test_main(argc, argv, cases);
}
