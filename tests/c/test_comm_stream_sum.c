/* SPDX-License-Identifier: Apache-2.0
 *
 * The sum as an operation of a stream: the CPU's, and the CUDA kernel run on a CPU (cuda_threads.h), which gives the
 * same bits over dtypes, numbers of sources, lengths, alignments and what is not finite. Nothing beyond the ends is
 * written, and nothing at all once the group has failed.
 */
#include "harness.h"

#include "../../csrc/comm/comm.h"
#include "../../csrc/comm/reduce_cuda.h"

#include "cuda_threads.h"

#define zpp_sum_cuda_kernel kernel
#include "../../csrc/comm/reduce_cuda.cu"
#undef zpp_sum_cuda_kernel
CUDA_THUNK(kernel, struct zpp_sum_cuda_args)
CUDA_THUNK(zpp_sum_f64_cuda_kernel, struct zpp_sum_cuda_args)

#include "floats.h"

enum { MOST_ELEMS = 9001, SOURCES = 9, GUARD = 0xa5 };
static _Alignas(64) uint8_t from[SOURCES][4 * MOST_ELEMS + 64], want[4 * MOST_ELEMS + 64], got[4 * MOST_ELEMS + 64];

static zpp_device *new_cpu(zpp_stream **stream) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_device *device;
    CHECK_OK(zpp_device_cpu_create(&device, &err));
    CHECK_OK(zpp_stream_create(device, ZPP_STREAM_QUEUE, "reduce", stream, &err));
    return device;
}

static void run_kernel(const struct zpp_sum_op *sum) {
    struct zpp_sum_cuda_args args;
    zpp_sum_cuda_fill(sum, &args);
    cuda_loop(sum->dtype == ZPP_F64 ? zpp_sum_f64_cuda_kernel_thunk : kernel_thunk, &args, args.blocks,
              ZPP_SUM_CUDA_THREADS);
}

static void fill_arrays(const struct zpp_sum_op *sum, bool wild) {
    memset(want, GUARD, sizeof want);
    for (int r = 0; r < sum->sources; ++r) {
        void *to = (void *)(uintptr_t)sum->src[r];
        for (size_t i = 0; i < sum->elems; ++i) zpp_element_store(to, sum->dtype, i, random_float(wild, 8, -4));
    }
    for (size_t i = 0; sum->accumulate && i < sum->elems; ++i) {
        zpp_element_store(sum->dst, sum->dst_dtype, i, random_float(false, 8, -4));
    }
    memcpy(got, want, sizeof got);
}

static void compare(zpp_stream *stream, struct zpp_sum_op sum, size_t offset_bytes, bool wild) {
    struct zpp_err err = ZPP_ERR_INIT;
    const void *list[SOURCES];
    uint32_t nonfinite[2] = {0, 0};
    for (int r = 0; r < sum.sources; ++r) list[r] = from[r] + (r % 2 ? offset_bytes : 0);
    sum.src = list;
    sum.dst = want + offset_bytes;
    sum.nonfinite = &nonfinite[0];
    fill_arrays(&sum, wild);
    CHECK_OK(zpp_stream_sum(stream, &sum, &err));
    sum.dst = got + offset_bytes;
    sum.nonfinite = &nonfinite[1];
    run_kernel(&sum);
    CHECK(same(want + offset_bytes, got + offset_bytes, sum.dst_dtype, sum.elems));
    const size_t end = offset_bytes + sum.elems * zpp_dtype_bytes(sum.dst_dtype);
    for (size_t at = end; at < sizeof got; ++at) CHECK(want[at] == GUARD && got[at] == GUARD);
    CHECK_EQUAL(nonfinite[0], nonfinite[1]);
    if (!wild) CHECK_EQUAL(nonfinite[0], 0);
}

static void bits_agree(void) {
    static const zpp_dtype kinds[] = {ZPP_F32, ZPP_BF16, ZPP_F16};
    static const size_t lengths[] = {0, 1, 7, 8, 9, 2047, 2049, 9000};
    zpp_stream *stream;
    zpp_device *device = new_cpu(&stream);
    for (int k = 0; k < 3; ++k) for (int l = 0; l < 8; ++l) for (int flags = 0; flags < 16; ++flags) {
        const int sources = 1 + (l + flags) % SOURCES;
        const struct zpp_sum_op sum = {
            .elems = lengths[l], .scale = flags & 1 ? 1.0f / 3.0f : 1.0f, .sources = sources, .dtype = kinds[k],
            .dst_dtype = flags & 2 ? ZPP_F32 : kinds[k], .accumulate = flags & 4};
        compare(stream, sum, flags & 8 ? 4 : 0, l % 2);
    }
    zpp_stream_destroy(stream);
    zpp_device_destroy(device);
}

/* Float64: a third is none of fp32's, and neither are the sums. */
static void doubles(void) {
    enum { ELEMS = 3001 };
    static double sources[3][ELEMS], wanted[ELEMS], found[ELEMS];
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_stream *stream;
    zpp_device *device = new_cpu(&stream);
    const void *list[] = {sources[0], sources[1], sources[2]};
    for (int bad = 0; bad < 2; ++bad) for (int accumulate = 0; accumulate < 2; ++accumulate) {
        uint32_t nonfinite[2] = {0, 0};
        for (size_t i = 0; i < ELEMS; ++i) {
            for (int r = 0; r < 3; ++r) sources[r][i] = (double)(i % 97 + (size_t)r) / 7.0;
            wanted[i] = found[i] = (double)i / 11.0;
        }
        if (bad) sources[1][2999] = -INFINITY;
        struct zpp_sum_op sum = {.dst = wanted, .src = list, .elems = ELEMS, .nonfinite = &nonfinite[0],
                                 .scale = 1.0 / 3.0, .sources = 3, .dtype = ZPP_F64, .dst_dtype = ZPP_F64,
                                 .accumulate = accumulate};
        CHECK_OK(zpp_stream_sum(stream, &sum, &err));
        sum.dst = found, sum.nonfinite = &nonfinite[1];
        run_kernel(&sum);
        CHECK(memcmp(wanted, found, sizeof found) == 0);
        CHECK(nonfinite[0] == (uint32_t)bad && nonfinite[1] == (uint32_t)bad);
        const double first = accumulate ? 0.0 : (sources[0][0] + sources[1][0] + sources[2][0]) * (1.0 / 3.0);
        CHECK(accumulate || found[0] == first);
    }
    zpp_stream_destroy(stream);
    zpp_device_destroy(device);
}

/* The kernel's loop: a thread takes more than one piece. The sum goes over its own source. */
static void large_arrays_in_place(void) {
    enum { ELEMS = ZPP_SUM_CUDA_BLOCKS * ZPP_SUM_CUDA_THREADS * ZPP_SUM_CUDA_WIDTH + 21 };
    uint16_t *one = aligned_alloc(64, (2 * (size_t)ELEMS + 63) / 64 * 64), *two;
    two = aligned_alloc(64, (2 * (size_t)ELEMS + 63) / 64 * 64);
    for (size_t i = 0; i < ELEMS; ++i) one[i] = zpp_bf16_from_f32((float)(i % 97)), two[i] = zpp_bf16_from_f32(3);
    const void *list[] = {one, two};
    const struct zpp_sum_op sum = {.dst = one, .src = list, .elems = ELEMS, .scale = 0.5f, .sources = 2,
                                       .dtype = ZPP_BF16, .dst_dtype = ZPP_BF16};
    run_kernel(&sum);
    for (size_t i = 0; i < ELEMS; ++i) CHECK(zpp_bf16_to_f32(one[i]) == (float)(i % 97 + 3) / 2);
    free(one);
    free(two);
}

static void a_failed_group_writes_nothing(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_stream *stream;
    zpp_device *device = new_cpu(&stream);
    uint64_t halt = 1;
    float source[10] = {1}, dst[10] = {5};
    const void *list[] = {source};
    const struct zpp_sum_op sum = {.dst = dst, .src = list, .elems = 10, .halt = &halt, .scale = 1, .sources = 1};
    CHECK_OK(zpp_stream_sum(stream, &sum, &err));
    run_kernel(&sum);
    CHECK(dst[0] == 5);
    halt = 0;
    run_kernel(&sum);
    CHECK(dst[0] == 1);
    zpp_stream_destroy(stream);
    zpp_device_destroy(device);
}

static void bad_sums_are_refused(void) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_stream *stream;
    zpp_device *device = new_cpu(&stream);
    struct zpp_sum_op sum = {.elems = 1, .sources = 65, .scale = 1};
    CHECK_FAILS(zpp_stream_sum(stream, &sum, &err), ZPP_INVALID, "sum: 65 sources, wanted 1 to 64");
    sum.sources = 0;
    CHECK_FAILS(zpp_stream_sum(stream, &sum, &err), ZPP_INVALID, "sum: 0 sources, wanted 1 to 64");
    sum.sources = 1, sum.dtype = ZPP_I32;
    CHECK_FAILS(zpp_stream_sum(stream, &sum, &err), ZPP_INVALID, "sum: int32 elements to float32, wanted float32,");
    sum.dtype = ZPP_BF16, sum.dst_dtype = ZPP_F16;
    CHECK_FAILS(zpp_stream_sum(stream, &sum, &err), ZPP_INVALID, "sum: bfloat16 elements to float16");
    sum.dtype = ZPP_F64, sum.dst_dtype = ZPP_F32;
    CHECK_FAILS(zpp_stream_sum(stream, &sum, &err), ZPP_INVALID, "sum: float64 elements to float32");
    sum.elems = 0, sum.dtype = ZPP_BF16;
    CHECK_OK(zpp_stream_sum(stream, &sum, &err)); /* nothing to add */
    zpp_stream_destroy(stream);
    zpp_device_destroy(device);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        TEST(bits_agree), TEST(doubles), TEST(large_arrays_in_place), TEST(a_failed_group_writes_nothing),
        TEST(bad_sums_are_refused),
        {0},
    };
    return test_main(argc, argv, cases);
}
