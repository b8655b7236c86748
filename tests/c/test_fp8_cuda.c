/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA kernels of 8-bit floats, run on a CPU (cuda_threads.h), against the scalar version, bit for bit, over
 * formats, kinds, lengths, blocks and what is not finite; nothing beyond the ends is written.
 */
#include "harness.h"

#include "../../csrc/ops/quant/fp8_kernels.h"

#include "cuda_threads.h"

#define zpp_fp8_quantise_cuda kernel_quantise
#define zpp_fp8_dequantise_cuda kernel_dequantise
#include "../../csrc/ops/quant/fp8_cuda.cu"
#undef zpp_fp8_quantise_cuda
#undef zpp_fp8_dequantise_cuda

#include "floats.h"

CUDA_THUNK(kernel_quantise, struct zpp_fp8_cuda_args)
CUDA_THUNK(kernel_dequantise, struct zpp_fp8_cuda_args)

enum { ROOM_ELEMS = 9000, GUARD = 0xa5 };
struct arrays {
    uint8_t floats[4 * ROOM_ELEMS], codes[ROOM_ELEMS];
    float scales[ROOM_ELEMS / 16 + 1];
};
static struct arrays want, got;
static uint8_t src[4 * ROOM_ELEMS];

static void check(const struct zpp_fp8_spec *spec, zpp_dtype dtype, size_t elems, bool wild) {
    for (size_t i = 0; i < elems; ++i) zpp_element_store(src, dtype, i, random_float(wild, 24, -20));
    memset(&want, GUARD, sizeof want);
    got = want;
    zpp_fp8_quantise(spec, src, dtype, elems, want.codes, want.scales, NULL);
    struct zpp_fp8_cuda_args args = { .floats = src, .codes = got.codes, .scales = got.scales, .elems = elems,
                                      .block_elems = spec->block_elems, .dtype = cuda_dtype_of(dtype),
                                      .format = (uint8_t)spec->format };
    cuda_run(kernel_quantise_thunk, &args, zpp_fp8_blocks(spec, elems), ZPP_FP8_CUDA_THREADS);
    CHECK(memcmp(want.codes, got.codes, sizeof got.codes) == 0);
    CHECK(same(want.scales, got.scales, ZPP_F32, ROOM_ELEMS / 16));
    args.floats = got.floats;
    for (int accumulate = 0; accumulate < 2; ++accumulate) {
        zpp_fp8_dequantise(spec, want.codes, want.scales, want.floats, dtype, elems, accumulate, NULL);
        args.accumulate = (uint8_t)accumulate;
        cuda_loop(kernel_dequantise_thunk, &args, (elems + ZPP_FP8_CUDA_ELEMS - 1) / ZPP_FP8_CUDA_ELEMS,
                  ZPP_FP8_CUDA_THREADS);
        CHECK(same(want.floats, got.floats, dtype, ROOM_ELEMS));
    }
}

static void formats(void) {
    static const zpp_dtype kinds[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
    static const struct { size_t elems, block; } sizes[] = { { 0, 16 }, { 1, 16 }, { 17, 16 }, { 63, 48 }, { 100, 48 },
                                                             { 1001, 256 }, { 4096, 4096 }, { 4097, 2048 },
                                                             { ROOM_ELEMS, 1024 } };
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; ++s) {
        for (int flags = 0; flags < 4; ++flags) {
            const struct zpp_fp8_spec spec = { sizes[s].block, flags & 1 ? ZPP_FP8_E5M2 : ZPP_FP8_E4M3 };
            check(&spec, kinds[(s + (size_t)flags) % 3], sizes[s].elems, flags & 2);
        }
    }
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(formats), {0} };
    return test_main(argc, argv, cases);
}
