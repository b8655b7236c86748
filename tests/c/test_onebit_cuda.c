/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA kernels of one-bit compression, run on a CPU (cuda_on_cpu.h), against the CPU's versions, bit for bit:
 * worker and server side, decode, over kinds, chunks, lengths and what is not finite; nothing beyond the ends is
 * written.
 */
#include "floats.h"

#include <math.h>

#include "../../csrc/ops/element.h"
#include "../../csrc/ops/onebit/onebit.h"

#include "cuda_threads.h"

#include "../../csrc/ops/onebit/onebit_cuda.cu"
CUDA_THUNK(zpp_onebit_cuda_lanes, struct zpp_onebit_cuda_args)
CUDA_THUNK(zpp_onebit_cuda_scales, struct zpp_onebit_cuda_args)
CUDA_THUNK(zpp_onebit_cuda_emit, struct zpp_onebit_cuda_args)
CUDA_THUNK(zpp_onebit_cuda_decode, struct zpp_onebit_cuda_args)

enum { ROOM_ELEMS = 20000, GUARD = 0xa5, SOURCES = 3 };
struct arrays {
    uint8_t floats[4 * ROOM_ELEMS], bits[ROOM_ELEMS / 8 + 1];
    float error[ROOM_ELEMS], scales[ROOM_ELEMS / 16 + 1];
};
static struct arrays want, got, from[SOURCES];
static uint8_t src[4 * ROOM_ELEMS];

static uint64_t random_state = 1;
static float random_value(bool wild) {
    static const float special[] = { 0.0f, -0.0f, 1e-40f, 3e38f, INFINITY, -INFINITY, NAN, 3e38f };
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    const uint32_t bits = (uint32_t)(random_state >> 32), kind = bits % 4096;
    if (wild && kind < sizeof special / sizeof special[0]) return special[kind];
    return (float)bits / 4294967296.0f - 0.4f;
}

static struct zpp_onebit_cuda_args args_of(zpp_dtype dtype, size_t chunk_elems, size_t elems) {
    return (struct zpp_onebit_cuda_args){
        .dtype = dtype == ZPP_BF16 ? ZPP_CUDA_BF16 : dtype == ZPP_F16 ? ZPP_CUDA_F16 : ZPP_CUDA_F32,
        .elems = elems, .chunk_elems = chunk_elems, .chunks = zpp_onebit_chunks(chunk_elems, elems),
        .chunk_blocks = (chunk_elems + ZPP_ONEBIT_BLOCK_ELEMS - 1) / ZPP_ONEBIT_BLOCK_ELEMS };
}

static void compress(struct zpp_onebit_cuda_args *args, size_t chunk_elems, size_t elems) {
    const size_t work = zpp_onebit_cuda_work_elems(chunk_elems, elems), threads = ZPP_ONEBIT_CUDA_THREADS;
    args->lanes = malloc((work + 1) * sizeof(float));
    args->error = got.error, args->bits = got.bits, args->scales = got.scales;
    CHECK(args->lanes);
    cuda_loop(zpp_onebit_cuda_lanes_thunk, args, (work + threads - 1) / threads, ZPP_ONEBIT_CUDA_THREADS);
    cuda_loop(zpp_onebit_cuda_scales_thunk, args, (args->chunks + threads - 1) / threads, ZPP_ONEBIT_CUDA_THREADS);
    cuda_loop(zpp_onebit_cuda_emit_thunk, args, (zpp_onebit_bytes(elems) + threads - 1) / threads,
              ZPP_ONEBIT_CUDA_THREADS);
    free(args->lanes);
}

static void start(size_t elems) {
    memset(&want, GUARD, sizeof want);
    for (size_t i = 0; i < elems; ++i) want.error[i] = 0.1f * random_value(false);
    got = want;
}

static void check_equal(void) {
    CHECK(memcmp(want.bits, got.bits, sizeof got.bits) == 0);
    CHECK(same(want.scales, got.scales, ZPP_F32, ROOM_ELEMS / 16));
    CHECK(same(want.error, got.error, ZPP_F32, ROOM_ELEMS));
}

static void check_worker(zpp_dtype dtype, size_t chunk_elems, size_t elems, bool wild) {
    for (size_t i = 0; i < elems; ++i) zpp_element_store(src, dtype, i, random_value(wild));
    start(elems);
    zpp_onebit_compress(chunk_elems, src, dtype, want.error, elems, want.bits, want.scales, NULL);
    struct zpp_onebit_cuda_args args = args_of(dtype, chunk_elems, elems);
    args.floats = src;
    compress(&args, chunk_elems, elems);
    check_equal();
    const struct zpp_onebit_source one = { want.bits, want.scales };
    args.sources[0] = (struct zpp_onebit_cuda_source){ want.bits, want.scales };
    args.floats = got.floats;
    for (int accumulate = 0; accumulate < 2; ++accumulate) {
        zpp_onebit_decode(chunk_elems, &one, want.floats, dtype, elems, accumulate, NULL);
        args.accumulate = (uint8_t)accumulate;
        cuda_loop(zpp_onebit_cuda_decode_thunk, &args,
                  (elems + ZPP_ONEBIT_CUDA_DECODE_ELEMS - 1) / ZPP_ONEBIT_CUDA_DECODE_ELEMS, ZPP_ONEBIT_CUDA_THREADS);
        CHECK(same(want.floats, got.floats, dtype, ROOM_ELEMS));
    }
}

static void check_server(size_t chunk_elems, size_t elems, bool wild) {
    struct zpp_onebit_source sources[SOURCES];
    struct zpp_onebit_cuda_args args = args_of(ZPP_F32, chunk_elems, elems);
    for (int s = 0; s < SOURCES; ++s) {
        for (size_t i = 0; i < elems; ++i) zpp_element_store(src, ZPP_F32, i, random_value(wild && s == 1));
        memset(&from[s], 0, sizeof from[s]);
        zpp_onebit_compress(chunk_elems, src, ZPP_F32, from[s].error, elems, from[s].bits, from[s].scales, NULL);
        sources[s] = (struct zpp_onebit_source){ from[s].bits, from[s].scales };
        args.sources[s] = (struct zpp_onebit_cuda_source){ from[s].bits, from[s].scales };
    }
    for (size_t count = 1; count <= SOURCES; count += 2) {
        start(elems);
        const float factor = count == 1 ? 1.0f : 1.0f / 3.0f;
        zpp_onebit_reduce(chunk_elems, sources, count, factor, want.error, elems, want.bits, want.scales, NULL);
        args.sources_count = (uint32_t)count, args.factor = factor;
        compress(&args, chunk_elems, elems);
        check_equal();
    }
}

static void both_sides(void) {
    static const zpp_dtype kinds[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
    static const struct { size_t elems, chunk; } sizes[] = { { 0, 16 }, { 1, 16 }, { 15, 16 }, { 33, 16 }, { 100, 48 },
                                                             { 4097, 4096 }, { 9000, 4096 }, { 12289, 8208 },
                                                             { ROOM_ELEMS, 19200 } };
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; ++s) {
        for (int wild = 0; wild < 2; ++wild) {
            for (int d = 0; d < 3; ++d) check_worker(kinds[d], sizes[s].chunk, sizes[s].elems, wild);
            check_server(sizes[s].chunk, sizes[s].elems, wild);
        }
    }
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(both_sides), {0} };
    return test_main(argc, argv, cases);
}
