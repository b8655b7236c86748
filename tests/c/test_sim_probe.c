/* SPDX-License-Identifier: Apache-2.0
 *
 * Probes of a device, on the simulated GPU in every schedule of their two streams, and on the CPU.
 */
#include "../../csrc/base/device_probe.h"
#include "sim_gpu.h"

static const struct zpp_wait ten_seconds = {10000000000u, NULL, NULL};

static void all_of(zpp_device *device) {
    for (int probe = 0; probe < ZPP_DEVICE_PROBES; probe++) {
        struct zpp_err err = ZPP_ERR_INIT;
        CHECK_OK(zpp_device_probe(device, (enum zpp_device_probe)probe, &ten_seconds, &err));
        CHECK(strlen(zpp_device_probe_name((enum zpp_device_probe)probe)) > 5);
    }
}

static void a_gpu(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device;
    for (uint64_t lazy = 0; lazy < 16; lazy += 5) {
        SIM(sim_set_schedule)(lazy, 0);
        CHECK_OK(zpp_device_cuda_create(0, &device, &err));
        all_of(device);
        zpp_device_destroy(device);
    }
}

static void the_cpu(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device;
    CHECK_OK(zpp_device_cpu_create(&device, &err));
    all_of(device);
    zpp_device_destroy(device);
}

int main(int argc, char **argv) {
    sim_gpu_load();
    static const struct test_case cases[] = {TEST(a_gpu), TEST(the_cpu), {0}};
    return test_main(argc, argv, cases);
}
