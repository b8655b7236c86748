/* SPDX-License-Identifier: Apache-2.0
 *
 * Regions in the memory of devices (device_region.h), on the CPU and over the simulated GPU: every rank reads every
 * part by copies of its own stream; a region is there on all ranks or on none; the group goes on after one that cannot
 * be made.
 */
#include "../../csrc/comm/comm.h"
#include "../../csrc/comm/device_region.h"

#include "ranks.h"
#include "sim_gpu.h"

enum { RANKS = 3, BYTES = 10000, LARGE_BYTES = 3 << 20 };
static const struct zpp_wait ten_seconds = {10000000000u, NULL, NULL};

struct rig {
    zpp_device *device;
    zpp_stream *stream;
    zpp_event *event;
};

static struct rig new_rig(const struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct rig rig;
    const bool on_cpu = me->arg != NULL;
    CHECK_OK(on_cpu ? zpp_device_cpu_create(&rig.device, &err) : zpp_device_cuda_create(0, &rig.device, &err));
    CHECK_OK(zpp_stream_create(rig.device, ZPP_STREAM_THREAD, "gather", &rig.stream, &err));
    CHECK_OK(zpp_event_create(rig.device, &rig.event, &err));
    return rig;
}

static void end_rig(struct rig *rig) {
    zpp_event_destroy(rig->event);
    zpp_stream_destroy(rig->stream);
    zpp_device_destroy(rig->device);
}

static void finish(struct rig *rig) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_event_record(rig->event, rig->stream, &err));
    CHECK_OK(zpp_event_sync(rig->event, &ten_seconds, &err));
}

static void read_all(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct rig rig = new_rig(me);
    zpp_device_region *region;
    void *copy;
    CHECK_OK(zpp_device_region_create(me->comm, rig.device, BYTES, &region, &err));
    CHECK_EQUAL(zpp_device_region_bytes(region) % 4096, 0);
    CHECK(zpp_device_region_bytes(region) >= BYTES);
    CHECK_OK(zpp_device_alloc(rig.device, BYTES, &copy, &err));
    for (int round = 0; round < 4; ++round) {
        CHECK_OK(zpp_stream_fill(rig.stream, zpp_device_region_base(region, me->rank),
                                 (unsigned char)(16 * round + me->rank + 1), BYTES, &err));
        finish(&rig);
        CHECK_OK(zpp_barrier(me->comm, NULL, &err));
        for (int r = 0; r < me->ranks; ++r) {
            CHECK_OK(zpp_stream_copy(rig.stream, copy, zpp_device_region_base(region, r), BYTES, &err));
            finish(&rig);
            for (size_t i = 0; i < BYTES; ++i) CHECK_EQUAL(((unsigned char *)copy)[i], 16 * round + r + 1);
        }
        CHECK_OK(zpp_barrier(me->comm, NULL, &err));
    }
    zpp_device_free(rig.device, copy, BYTES);
    zpp_device_region_destroy(region);
    end_rig(&rig);
}

static void parts_are_read_by_all(void) {
    static int on_cpu;
    for (int gpu = 0; gpu < 2; ++gpu) {
        run_ranks(RANKS, read_all, gpu ? NULL : &on_cpu);
    }
    const struct sim_counts counts = sim_gpu_counts();
    CHECK(counts.blocks == 0 && counts.block_bytes == 0 && counts.streams == 0 && counts.events == 0);
}

/* One rank finds no memory; the other says which one that is; then both make a smaller region. */
static void run_out(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct rig rig = new_rig(me);
    zpp_device_region *region = NULL;
    const zpp_status status = zpp_device_region_create(me->comm, rig.device, LARGE_BYTES, &region, &err);
    CHECK(region == NULL && err.status == status);
    if (status == ZPP_NOMEM) {
        CHECK(strstr(err.text, "no room for 3145728 bytes (memory that ranks share)"));
    } else {
        CHECK_EQUAL(status, ZPP_NOT_BUILT);
        CHECK_EQUAL(err.rank, 1 - me->rank);
        CHECK(strstr(err.text, "has no memory left on its GPU or cannot map its peers'"));
    }
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
    CHECK_OK(zpp_device_region_create(me->comm, rig.device, BYTES, &region, &err));
    CHECK_OK(zpp_barrier(me->comm, NULL, &err));
    zpp_device_region_destroy(region);
    end_rig(&rig);
}

static void all_get_a_region_or_none(void) {
    run_ranks(2, run_out, NULL);
}

static void diverge(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct rig rig = new_rig(me);
    zpp_device_region *region = NULL;
    const zpp_status status =
        zpp_device_region_create(me->comm, rig.device, me->rank ? BYTES : BYTES + 1, &region, &err);
    CHECK_EQUAL(status, ZPP_PEER);
    CHECK(strstr(err.text, "device_region_create(10000 bytes) #1") || strstr(err.text, "device_region_create(10001"));
    test_join(me);
    end_rig(&rig);
}

static void other_sizes_are_named(void) {
    run_ranks(2, diverge, NULL);
}

static void over_hosts(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct rig rig = new_rig(me);
    zpp_device_region *region = NULL;
    CHECK_FAILS(zpp_device_region_create(me->comm, rig.device, BYTES, &region, &err), ZPP_NOT_BUILT,
                "which are on 2 hosts; memory is shared within one host only; use NCCL's collectives");
    CHECK_FAILS(zpp_device_region_create(me->comm, rig.device, 0, &region, &err), ZPP_INVALID,
                "a device region of 0 bytes, wanted at least 1");
    test_join(me);
    end_rig(&rig);
}

static void hosts_share_nothing(void) {
    run_hosts("ab", over_hosts, NULL);
}

int main(int argc, char **argv) {
    setenv("SIM_DEVICE_BYTES", "4194304", 1);
    sim_gpu_load();
    static const struct test_case cases[] = {
        TEST(parts_are_read_by_all), TEST(all_get_a_region_or_none), TEST(other_sizes_are_named),
        TEST(hosts_share_nothing), {0},
    };
    return test_main(argc, argv, cases);
}
