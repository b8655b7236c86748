/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels of csrc/ops launched as on a GPU, by name through the device cuda, on the simulated GPU: one with barriers
 * between its threads, one without. The results have the CPU's bits, whatever the schedule.
 */
#include "sim_gpu.h"
#include "sim_stream.h"

#include "../../csrc/base/cuda_images.h"
#include "../../csrc/base/device_cuda.h"
#include "../../csrc/ops/optim/optim.h"
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

/* Adam in float64. Empty segments, more of them than a launch takes, and more than a block. */
enum { DOUBLES = 40000, SEGMENTS = 40 };
struct adam {
    double param[DOUBLES], grad[DOUBLES], exp_avg[DOUBLES], exp_avg_sq[DOUBLES], top[DOUBLES], factor;
    uint32_t skip;
};

static void describe(struct adam *memory, int flags, struct zpp_adam_f64_segment *segments) {
    size_t at = 0;
    for (size_t s = 0; s < SEGMENTS; s++) {
        const size_t elems = s == 7 ? 36000 : s % 5 * 13;
        segments[s] = (struct zpp_adam_f64_segment){
            {.elems = elems, .step = 1 + s, .lr = 1e-2, .beta1 = flags & 1 ? 0.4 : 0.9, .beta2 = 0.99, .eps = 1e-8,
             .weight_decay = 0.05, .decoupled_decay = flags & 2, .maximize = s % 2},
            memory->param + at,  memory->grad + at, memory->exp_avg + at, memory->exp_avg_sq + at,
            flags & 4 ? memory->top + at : NULL};
        at += elems;
    }
    CHECK(at <= DOUBLES);
}

static void adam_in_float64(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct adam *given = calloc(1, sizeof *given), *wanted = calloc(1, sizeof *wanted);
    struct zpp_adam_f64_segment segments[SEGMENTS];
    void *memory;
    CHECK(given && wanted);
    for (size_t i = 0; i < DOUBLES; i++) {
        given->param[i] = (double)(i % 101) / 7.0, given->grad[i] = (double)(i % 13) / 3.0 - 2.0;
        given->exp_avg[i] = (double)(i % 17) / 9.0, given->exp_avg_sq[i] = given->top[i] = (double)(i % 19) / 11.0;
    }
    CHECK_OK(zpp_device_alloc(gpu.device, sizeof *given, &memory, &err));
    struct adam *there = memory;
    for (int flags = 0; flags < 32; flags++) { /* bit 3: the factor is on the device; bit 4: so is a word that skips */
        const double factor = 1.0 / 3.0;
        SIM(sim_set_schedule)(flags % 4, 0);
        given->factor = factor, given->skip = flags >> 4;
        *wanted = *given;
        describe(wanted, flags, segments);
        if (!given->skip) zpp_adam_step_f64(segments, SEGMENTS, factor, NULL);
        CHECK_OK(zpp_stream_copy(gpu.stream, memory, given, sizeof *given, &err));
        describe(there, flags, segments);
        const struct zpp_grad_scale_f64 scale = {flags & 8 ? 1.0 : factor, flags & 8 ? &there->factor : NULL,
                                                 &there->skip};
        CHECK_OK(zpp_adam_step_f64_cuda(gpu.device, gpu.native, segments, SEGMENTS, scale, &err));
        struct adam *found = calloc(1, sizeof *found);
        CHECK_OK(zpp_stream_copy(gpu.stream, found, memory, sizeof *found, &err));
        CHECK_OK(zpp_event_record(gpu.event, gpu.stream, &err));
        CHECK_OK(zpp_event_sync(gpu.event, &ten_seconds, &err));
        CHECK(memcmp(wanted, found, sizeof *found) == 0);
        CHECK(given->skip || memcmp(given->param, found->param, sizeof found->param) != 0);
        free(found);
    }
    zpp_device_free(gpu.device, memory, sizeof *given);
    free(given);
    free(wanted);
}

int main(int argc, char **argv) {
    sim_gpu_load();
    open_gpu();
    static const struct test_case cases[] = {TEST(results_are_those_of_the_cpu), TEST(adam_in_float64), {0}};
    const int result = test_main(argc, argv, cases);
    close_gpu();
    return result;
}
