/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA kernel of the step with a frozen variance, run on a CPU (cuda_on_cpu.h): the packing of segments into
 * launches, the walk over chunks, the ends and the arithmetic, against the scalar CPU version, bit for bit.
 */
#include "harness.h"

#include <math.h>

#include "cuda_threads.h"

#include "../../csrc/ops/optim/optim_cuda.cu"
CUDA_THUNK(zpp_frozen_cuda, struct zpp_frozen_cuda_batch)

/* What zpp_optim_step_cuda does, without a driver; the number of launches. */
static int step(const struct zpp_optim_segment *segments, size_t count) {
    static struct zpp_frozen_cuda_batch batch;
    int launches = 0;
    for (size_t done = 0; done < count;) {
        unsigned int blocks;
        done += zpp_optim_cuda_fill(segments + done, count - done, zpp_grad_scale_of(1.0f), &batch, &blocks);
        launches += blocks > 0;
        cuda_loop(zpp_frozen_cuda_thunk, &batch, blocks, ZPP_OPTIM_CUDA_THREADS);
    }
    return launches;
}

enum { SEGMENTS = 110, LENGTH = 700, LONG = 2 * ZPP_OPTIM_CUDA_CHUNK_ELEMS + 1001, ELEMS = SEGMENTS * LENGTH + LONG };
struct memory { float p[ELEMS], m[ELEMS], v[ELEMS], out[ELEMS]; };
static struct memory want, got;

static struct zpp_optim_segment described(struct memory *at, size_t s) {
    static const zpp_dtype kinds[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
    const size_t from = s * LENGTH, elems = s == SEGMENTS ? LONG : s % 7 ? s * 37 % LENGTH : 0;
    return (struct zpp_optim_segment){
        .param = at->p + from, .exp_avg = at->m + from, .exp_avg_sq = at->v + from,
        .param_out = s % 4 ? at->out + from : NULL, .out_dtype = kinds[s % 3], .elems = elems,
        .optimizer = ZPP_OPTIM_FROZEN, .variance_step = 1 + s,
        .step_size = 1e-2, .decay = s % 5 ? 0.05 : 0.0, .beta2 = 0.99, .eps = 1e-8 };
}

static void equals_the_cpu(void) {
    static struct zpp_optim_segment segments[SEGMENTS + 1];
    struct memory *const both[] = { &want, &got };
    for (size_t i = 0; i < ELEMS; ++i) {
        want.p[i] = 0.01f * (float)(i % 101) - 0.5f, want.m[i] = 0.001f * (float)(i % 13) - 4e-3f;
        want.v[i] = 1e-4f * (float)(i % 17), want.out[i] = 7.0f;
    }
    got = want;
    for (int k = 0; k < 2; ++k) {
        for (size_t s = 0; s <= SEGMENTS; ++s) segments[s] = described(both[k], s);
        if (k) CHECK_EQUAL(step(segments, SEGMENTS + 1), 2); /* 95 that are not empty, 56 a launch */
        else CHECK(zpp_optim_step_at(ZPP_CPU_SCALAR, segments, SEGMENTS + 1, 1.0f, NULL));
    }
    CHECK(memcmp(&want, &got, sizeof got) == 0);
}

static void nothing(void) {
    const struct zpp_optim_segment empty = { .optimizer = ZPP_OPTIM_FROZEN, .variance_step = 1, .beta2 = 0.9 };
    CHECK_EQUAL(step(&empty, 1), 0);
    CHECK_EQUAL(step(NULL, 0), 0);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(equals_the_cpu), TEST(nothing), {0} };
    return test_main(argc, argv, cases);
}
