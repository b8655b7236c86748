/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA kernels of sums of quantised arrays, run on a CPU (cuda_threads.h), against the CPU's versions, bit for bit,
 * over formats in and out, numbers of sources, lengths and what is not finite; nothing beyond the ends is written.
 */
#include "harness.h"

#include "../../csrc/ops/quant/quant.h"

#include "cuda_threads.h"

#define zpp_quant_sum_cuda kernel_sum
#define zpp_quant_reduce_cuda kernel_reduce
#include "../../csrc/ops/quant/quant_sum_cuda.cu"
#undef zpp_quant_sum_cuda
#undef zpp_quant_reduce_cuda
CUDA_THUNK(kernel_sum, struct zpp_quant_sum_cuda_args)
CUDA_THUNK(kernel_reduce, struct zpp_quant_sum_cuda_args)

#include "floats.h"

enum { ROOM_ELEMS = 9000, SOURCES = 5, GUARD = 0xa5 };
struct arrays {
    uint8_t floats[4 * ROOM_ELEMS], codes[ROOM_ELEMS];
    float scales[ROOM_ELEMS / 16 + 1], mids[ROOM_ELEMS / 16 + 1];
};
static struct arrays from[SOURCES], want, got;

static void check_reduce(struct zpp_quant_sum_cuda_args *args, const struct zpp_quant_spec *spec,
                         const struct zpp_quant_source *sources, const struct zpp_quant_spec *to_spec, size_t elems) {
    memset(&want, GUARD, sizeof want);
    got = want;
    const struct zpp_quant_target to = { want.codes, want.scales, want.mids };
    zpp_quant_reduce(spec, sources, args->sources_count, args->factor, elems, to_spec, &to, NULL);
    args->to = (struct zpp_quant_cuda_args){
        .codes = got.codes, .scales = got.scales, .mids = to_spec->asymmetric ? got.mids : NULL, .elems = elems,
        .block_elems = to_spec->block_elems, .bits = (uint8_t)to_spec->bits };
    cuda_run(kernel_reduce_thunk, args, zpp_quant_blocks(to_spec, elems), ZPP_QUANT_CUDA_THREADS);
    CHECK(memcmp(want.codes, got.codes, sizeof got.codes) == 0);
    CHECK(same(want.scales, got.scales, ZPP_F32, ROOM_ELEMS / 16));
    CHECK(same(want.mids, got.mids, ZPP_F32, ROOM_ELEMS / 16));
}

static void check_format(const struct zpp_quant_spec *spec, zpp_dtype dtype, size_t elems, size_t count, bool wild) {
    struct zpp_quant_source sources[SOURCES];
    struct zpp_quant_sum_cuda_args args = { .block_elems = spec->block_elems, .bits = (uint8_t)spec->bits,
                                            .factor = count == 1 ? 1.0f : 1.0f / (float)count,
                                            .sources_count = (uint32_t)count };
    for (size_t s = 0; s < count; ++s) {
        for (size_t i = 0; i < elems; ++i) zpp_element_store(want.floats, ZPP_F32, i, random_float(wild, 6, -3));
        const struct zpp_quant_target to = { from[s].codes, from[s].scales, from[s].mids };
        zpp_quantise(spec, want.floats, ZPP_F32, elems, &to, NULL);
        sources[s] = (struct zpp_quant_source){ from[s].codes, from[s].scales, from[s].mids };
        args.sources[s].codes = from[s].codes, args.sources[s].scales = from[s].scales;
        args.sources[s].mids = spec->asymmetric ? from[s].mids : NULL;
    }
    memset(&want, GUARD, sizeof want);
    got = want;
    zpp_quant_sum(spec, sources, count, args.factor, want.floats, dtype, elems, NULL);
    args.to = (struct zpp_quant_cuda_args){ .floats = got.floats, .elems = elems, .dtype = cuda_dtype_of(dtype) };
    cuda_loop(kernel_sum_thunk, &args, (elems + 2 * ZPP_QUANT_CUDA_PAIRS - 1) / (2 * ZPP_QUANT_CUDA_PAIRS),
              ZPP_QUANT_CUDA_THREADS);
    CHECK(same(want.floats, got.floats, dtype, ROOM_ELEMS));
    const struct zpp_quant_spec targets[] = { { 256, 8, false }, { 48, 4, true } };
    for (int t = 0; t < 2; ++t) check_reduce(&args, spec, sources, &targets[t], elems);
}

static void formats(void) {
    static const zpp_dtype kinds[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
    static const size_t lengths[] = { 0, 1, 17, 63, 100, 1001, 8193 };
    for (int l = 0; l < 7; ++l) for (int flags = 0; flags < 8; ++flags) {
        const struct zpp_quant_spec spec = { (size_t)(l % 2 ? 16 : 112), flags & 1 ? 4 : 8, flags & 2 };
        check_format(&spec, kinds[(l + flags) % 3], lengths[l], 1 + (size_t)(l + flags) % SOURCES, flags & 4);
    }
}

/* One more than fit a launch is refused with the number; the driver is not asked for anything before. */
static void too_many(void) {
    static struct zpp_quant_source sources[ZPP_QUANT_CUDA_SOURCES + 1];
    const struct zpp_quant_spec spec = { 16, 8, false };
    struct zpp_err err = ZPP_ERR_INIT;
    float dst;
    CHECK(zpp_quant_sum_cuda(NULL, NULL, &spec, sources, ZPP_QUANT_CUDA_SOURCES + 1, 1.0f, &dst, ZPP_F32, 1, &err) ==
          ZPP_INVALID);
    CHECK(strstr(err.text, "codes has 129 tensors, wanted at most 128") != NULL);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(formats), TEST(too_many), {0} };
    return test_main(argc, argv, cases);
}
