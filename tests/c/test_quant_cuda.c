/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA kernels of block quantisation, run on a CPU (cuda_on_cpu.h): blocks, pairs, ends and the arithmetic,
 * against the CPU's versions, bit for bit, over formats, kinds, lengths and what is not finite. What stands between two
 * barriers is run for all threads before what comes after.
 */
#include "harness.h"

#include "../../csrc/ops/quant/quant.h"

#include "cuda_on_cpu.h"

#define __shared__ static
#define __syncthreads() ((void)0)
#pragma GCC diagnostic ignored "-Wunused-function" /* the kernel that has the barrier: its two halves are run here */
#define zpp_quantise_cuda kernel_quantise
#define zpp_dequantise_cuda kernel_dequantise
#include "../../csrc/ops/quant/quant_cuda.cu"
#undef zpp_quantise_cuda
#undef zpp_dequantise_cuda

#include "floats.h"

static void quantise(const struct zpp_quant_cuda_args *args) {
    static span_of_threads spans;
    const uint64_t blocks = (args->elems + args->block_elems - 1) / args->block_elems;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        for (threadIdx.x = 0; threadIdx.x < ZPP_QUANT_CUDA_THREADS; ++threadIdx.x) find_span(args, args, spans);
        for (threadIdx.x = 0; threadIdx.x < ZPP_QUANT_CUDA_THREADS; ++threadIdx.x) write_codes(args, args, spans);
    }
}

static void dequantise(const struct zpp_quant_cuda_args *args) {
    for (blockIdx.x = 0; (uint64_t)blockIdx.x * ZPP_QUANT_CUDA_PAIRS * 2 < args->elems; ++blockIdx.x) {
        for (threadIdx.x = 0; threadIdx.x < ZPP_QUANT_CUDA_THREADS; ++threadIdx.x) kernel_dequantise(*args);
    }
}

enum { ROOM_ELEMS = 20000, GUARD = 0xa5 };
struct arrays {
    uint8_t floats[4 * ROOM_ELEMS], codes[ROOM_ELEMS];
    float scales[ROOM_ELEMS / 16 + 1], mids[ROOM_ELEMS / 16 + 1];
};
static struct arrays want, got;
static uint8_t src[4 * ROOM_ELEMS];

static void check_format(const struct zpp_quant_spec *spec, zpp_dtype dtype, size_t elems, bool wild) {
    struct arrays *const both[] = { &want, &got };
    for (size_t i = 0; i < elems; ++i) zpp_element_store(src, dtype, i, random_float(wild, 6, -3));
    for (int k = 0; k < 2; ++k) memset(both[k], GUARD, sizeof *both[k]);
    const struct zpp_quant_target to = { want.codes, want.scales, want.mids };
    zpp_quantise(spec, src, dtype, elems, &to, NULL);
    struct zpp_quant_cuda_args args = {
        .floats = src, .codes = got.codes, .scales = got.scales, .mids = spec->asymmetric ? got.mids : NULL,
        .elems = elems, .block_elems = spec->block_elems, .dtype = cuda_dtype_of(dtype), .bits = (uint8_t)spec->bits };
    quantise(&args);
    CHECK(memcmp(want.codes, got.codes, sizeof got.codes) == 0); /* what lies behind them, too */
    CHECK(same(want.scales, got.scales, ZPP_F32, ROOM_ELEMS / 16));
    CHECK(same(want.mids, got.mids, ZPP_F32, ROOM_ELEMS / 16));
    const struct zpp_quant_source from = { want.codes, want.scales, want.mids };
    args.floats = got.floats;
    for (int accumulate = 0; accumulate < 2; ++accumulate) {
        zpp_dequantise(spec, &from, want.floats, dtype, elems, accumulate, NULL);
        args.accumulate = (uint8_t)accumulate;
        dequantise(&args);
        CHECK(same(want.floats, got.floats, dtype, ROOM_ELEMS));
    }
}

static void formats(void) {
    static const zpp_dtype kinds[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
    static const size_t lengths[] = { 0, 1, 2, 15, 16, 17, 63, 100, 1001, 8192, 8193, ROOM_ELEMS };
    static const size_t blocks[] = { 16, 48, 256, 4096 };
    for (int d = 0; d < 3; ++d) for (int l = 0; l < 12; ++l) for (int b = 0; b < 4; ++b)
    for (int flags = 0; flags < 8; ++flags) {
        const struct zpp_quant_spec spec = { blocks[b], flags & 1 ? 4 : 8, flags & 2 };
        check_format(&spec, kinds[d], lengths[l], flags & 4);
    }
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(formats), {0} };
    return test_main(argc, argv, cases);
}
