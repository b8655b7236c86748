/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA kernels of 1-bit LAMB's fresh variance and norms, run on a CPU (cuda_on_cpu.h): the packing of segments into
 * launches, lanes, blocks and tensors, against the scalar CPU version, bit for bit.
 */
#include "harness.h"

#include "../../csrc/ops/onebit_lamb/kernels.h"

#include "cuda_threads.h"

#include "../../csrc/ops/onebit_lamb/onebit_lamb_cuda.cu"
CUDA_THUNK(zpp_onebit_lamb_cuda_lanes, struct zpp_onebit_lamb_cuda_batch)
CUDA_THUNK(zpp_onebit_lamb_cuda_blocks, struct zpp_onebit_lamb_cuda_batch)
CUDA_THUNK(zpp_onebit_lamb_cuda_tensors, struct zpp_onebit_lamb_cuda_batch)

/* What zpp_onebit_lamb_fresh_cuda does, without a driver; the number of groups. */
static int step(const struct zpp_onebit_lamb_segment *segments, size_t count, double *sums, float *largest) {
    static struct zpp_onebit_lamb_cuda_batch batch;
    const uint64_t threads = ZPP_ONEBIT_LAMB_CUDA_THREADS;
    void *work = aligned_alloc(64, (zpp_onebit_lamb_cuda_work_bytes(segments, count) + 63) / 64 * 64);
    int groups = 0;
    CHECK(work);
    for (size_t done = 0; done < count; ++groups) {
        const size_t taken = zpp_onebit_lamb_cuda_fill(segments + done, count - done, &batch);
        zpp_onebit_lamb_cuda_place(&batch, work, sums + 2 * done, largest + done);
        done += taken;
        cuda_loop(zpp_onebit_lamb_cuda_lanes_thunk, &batch,
                  ((uint64_t)batch.blocks * ZPP_ONEBIT_LAMB_CUDA_LANES + threads - 1) / threads, threads);
        cuda_loop(zpp_onebit_lamb_cuda_blocks_thunk, &batch, (batch.blocks + threads - 1) / threads, threads);
        cuda_loop(zpp_onebit_lamb_cuda_tensors_thunk, &batch, (batch.count + threads - 1) / threads, threads);
    }
    free(work);
    return groups;
}

enum { SEGMENTS = 85, LENGTH = 9000, ELEMS = SEGMENTS * LENGTH };
struct memory {
    float p[ELEMS], m[ELEMS], before[ELEMS], v[ELEMS], fresh[ELEMS];
    double sums[SEGMENTS][2];
    float largest[SEGMENTS];
};
static struct memory want, got;

static struct zpp_onebit_lamb_segment described(struct memory *at, size_t s) {
    static const size_t lengths[] = { 0, 1, 15, 16, 33, 4095, 4096, 4097, LENGTH };
    const size_t from = s * LENGTH;
    return (struct zpp_onebit_lamb_segment){
        .param = at->p + from, .exp_avg = at->m + from, .before = at->before + from, .exp_avg_sq = at->v + from,
        .fresh_sq = at->fresh + from, .elems = lengths[s % 9], .step = 1 + s, .freeze_step = 5,
        .coefficient = 1.0 + (double)(s % 3), .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8,
        .weight_decay = s % 5 ? 0.05 : 0.0 };
}

static void equals_the_cpu(void) {
    static struct zpp_onebit_lamb_segment segments[SEGMENTS];
    struct memory *const both[] = { &want, &got };
    struct zpp_err err = ZPP_ERR_INIT;
    for (size_t i = 0; i < ELEMS; ++i) {
        want.p[i] = 0.01f * (float)(i % 101) - 0.5f, want.m[i] = 0.001f * (float)(i % 13) - 4e-3f;
        want.before[i] = 0.001f * (float)(i % 11) - 5e-3f, want.v[i] = 1e-4f * (float)(i % 17);
        want.fresh[i] = 1e-4f * (float)(i % 19);
    }
    got = want;
    memset(got.sums, 0xa5, sizeof got.sums); /* of tensors without elements, too, something is written */
    for (int k = 0; k < 2; ++k) {
        struct memory *at = both[k];
        for (size_t s = 0; s < SEGMENTS; ++s) segments[s] = described(at, s);
        if (k) CHECK_EQUAL(step(segments, SEGMENTS, at->sums[0], at->largest), 3); /* 40 a group */
        else CHECK_OK(zpp_onebit_lamb_fresh_at(ZPP_CPU_SCALAR, segments, SEGMENTS, at->sums[0], at->largest, NULL,
                                               &err));
    }
    CHECK(memcmp(&want, &got, sizeof got) == 0);
    CHECK(want.sums[8][0] > 0.0 && want.largest[8] > 0.0f && want.sums[0][0] == 0.0);
}

static void nothing(void) { CHECK_EQUAL(step(NULL, 0, NULL, NULL), 0); }

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(equals_the_cpu), TEST(nothing), {0} };
    return test_main(argc, argv, cases);
}
