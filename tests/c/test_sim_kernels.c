/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels of csrc/ops launched as on a GPU, by name through the device cuda, on the simulated GPU: one with barriers
 * between its threads, one without. The results have the CPU's bits, whatever the schedule.
 */
#include "sim_gpu.h"
#include "sim_stream.h"

#include "../../csrc/base/cuda_images.h"
#include "../../csrc/base/device_cuda.h"
#include "../../csrc/ops/quant/fp8.h"

/* One image, which stands for all: the simulated GPU finds kernels by name. */
const struct zpp_cuda_image zpp_cuda_images[] = {{"all of csrc/ops", "fatbin", 7}, {0, 0, 0}};
const size_t zpp_cuda_images_count = 1;
const int zpp_cuda_images_toolkit = 13000;

enum { ELEMS = 5000, BLOCK_ELEMS = 256, BLOCKS = ELEMS / BLOCK_ELEMS + 1 };

struct memory { /* of the device, or of the host */
    float values[ELEMS], back[ELEMS], scales[BLOCKS];
    uint8_t codes[ELEMS];
};

/* Returns device memory with `host` on its way there. */
static struct memory *to_device(const struct memory *host) {
    struct zpp_err err = ZPP_ERR_INIT;
    void *memory;
    CHECK_OK(zpp_device_alloc(gpu.device, sizeof *host, &memory, &err));
    CHECK_OK(zpp_stream_copy(gpu.stream, memory, host, sizeof *host, &err));
    return memory;
}

static void to_host(struct memory *host, struct memory *memory) {
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_stream_copy(gpu.stream, host, memory, sizeof *host, &err));
    CHECK_OK(zpp_event_record(gpu.event, gpu.stream, &err));
    CHECK_OK(zpp_event_sync(gpu.event, &ten_seconds, &err));
    zpp_device_free(gpu.device, memory, sizeof *host);
}

static void fill(struct memory *memory) {
    memset(memory, 0, sizeof *memory);
    for (int i = 0; i < ELEMS; i++) memory->values[i] = (float)(i * 37 % 1001) / 500 - 1;
}

static void results_are_those_of_the_cpu(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    static struct memory given, wanted, found;
    const struct zpp_fp8_spec spec = {BLOCK_ELEMS, ZPP_FP8_E4M3};
    fill(&given);
    wanted = given;
    zpp_fp8_quantise(&spec, wanted.values, ZPP_F32, ELEMS, wanted.codes, wanted.scales, NULL);
    zpp_fp8_dequantise(&spec, wanted.codes, wanted.scales, wanted.back, ZPP_F32, ELEMS, false, NULL);
    for (uint64_t lazy = 0; lazy < 4; lazy++) {
        SIM(sim_set_schedule)(lazy, 0);
        struct memory *memory = to_device(&given);
        CHECK_OK(zpp_fp8_quantise_cuda(gpu.device, gpu.native, &spec, memory->values, ZPP_F32, ELEMS, memory->codes,
                                       memory->scales, &err));
        CHECK_OK(zpp_fp8_dequantise_cuda(gpu.device, gpu.native, &spec, memory->codes, memory->scales, memory->back,
                                         ZPP_F32, ELEMS, false, &err));
        to_host(&found, memory);
        CHECK(memcmp(&wanted, &found, sizeof found) == 0);
    }
}

int main(int argc, char **argv) {
    sim_gpu_load();
    open_gpu();
    static const struct test_case cases[] = {TEST(results_are_those_of_the_cpu), {0}};
    const int result = test_main(argc, argv, cases);
    close_gpu();
    return result;
}
