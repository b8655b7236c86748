/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA kernels of the sum of squares, run on a CPU (cuda_on_cpu.h): packing into launches, blocks, lanes, ends and
 * the order of the additions, against the CPU's versions, bit for bit, and what is not finite counted.
 */
#include "harness.h"

#include <math.h>

#include "../../csrc/ops/norm/kernels.h"

#include "cuda_on_cpu.h"

#include "../../csrc/ops/norm/norm_cuda.cu"

#define RUN(kernel, threads)                                                                              \
    for (blockIdx.x = 0; blockIdx.x * ZPP_NORM_CUDA_THREADS < (threads); ++blockIdx.x) {                  \
        for (threadIdx.x = 0; threadIdx.x < ZPP_NORM_CUDA_THREADS; ++threadIdx.x) kernel(batch);          \
    }

/* What zpp_norm_squares_cuda does, without a driver. */
static void squares(const struct zpp_norm_segment *segments, size_t count, double *sums, uint64_t *nonfinite) {
    static struct zpp_norm_cuda_batch batch;
    double *work = calloc(zpp_norm_cuda_work_elems(segments, count) + 1, sizeof *work);
    CHECK(work);
    memset(nonfinite, 0xa5, count * sizeof *nonfinite);
    for (size_t done = 0; done < count;) {
        batch.lanes = work, batch.sums = sums + done;
        batch.nonfinite = (unsigned long long *)(void *)(nonfinite + done);
        done += zpp_norm_cuda_fill(segments + done, count - done, &batch);
        RUN(zpp_norm_cuda_zero, batch.count)
        RUN(zpp_norm_cuda_lanes, batch.blocks * ZPP_NORM_CUDA_LANES)
        RUN(zpp_norm_cuda_blocks, batch.blocks)
        RUN(zpp_norm_cuda_segments, batch.count)
    }
    free(work);
}

enum { SEGMENTS = 300, ELEMS = 3 * ZPP_NORM_BLOCK_ELEMS + 77 };
static float data[ELEMS + SEGMENTS];
static double want[SEGMENTS], got[SEGMENTS];
static uint64_t want_bad[SEGMENTS], got_bad[SEGMENTS];

static void equals_the_cpu(void) {
    static const zpp_dtype kinds[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
    static const size_t lengths[] = { 1, 0, 31, 32, 33, 4096, 4097, ELEMS, 0, 1000, 8192 };
    static struct zpp_norm_segment segments[SEGMENTS];
    for (int wild = 0; wild < 2; ++wild) {
        for (size_t i = 0; i < ELEMS + SEGMENTS; ++i) { /* finite as every kind: two 16-bit ones in the place of one */
            const uint32_t bits = 0x3c003c00u + (uint32_t)(i * 2654435761u % 0x1ffu) * 0x10001u;
            memcpy(&data[i], wild && i % 1013 == 7 ? &(uint32_t){ 0x7f807c00u } : &bits, sizeof bits);
        }
        for (size_t s = 0; s < SEGMENTS; ++s) {
            segments[s] = (struct zpp_norm_segment){ data + s, kinds[s % 3], lengths[s % 11] };
        }
        for (size_t count = 0; count <= SEGMENTS; count += count < 2 ? 1 : 149) {
            memset(got, 0xa5, sizeof got);
            zpp_norm_squares(segments, count, want, want_bad, NULL);
            squares(segments, count, got, got_bad);
            for (size_t s = 0; s < count; ++s) {
                CHECK(want[s] == got[s] || (isnan(want[s]) && isnan(got[s])));
                CHECK_EQUAL(got_bad[s], want_bad[s]);
            }
        }
    }
    CHECK(want_bad[7] > 0);
}

static void doubles(void) {
    static double wide[ELEMS];
    for (size_t i = 0; i < ELEMS; ++i) wide[i] = (double)(i % 101) / 3.0 * (i % 7 ? 1e200 : 1e-3);
    wide[4200] = INFINITY, wide[5000] = -NAN;
    const struct zpp_norm_segment segments[] = {
        {wide, ZPP_F64, 4100}, {wide + 1, ZPP_F64, ELEMS - 1}, {data, ZPP_F32, 33}, {wide, ZPP_F64, 7}};
    zpp_norm_squares(segments, 4, want, want_bad, NULL);
    squares(segments, 4, got, got_bad);
    for (size_t s = 0; s < 4; ++s) {
        CHECK(want[s] == got[s] || (isnan(want[s]) && isnan(got[s])));
        CHECK_EQUAL(got_bad[s], want_bad[s]);
    }
    CHECK_EQUAL(got_bad[1], 2); /* squares that overflow are counted by neither */
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(equals_the_cpu), TEST(doubles), {0} };
    return test_main(argc, argv, cases);
}
