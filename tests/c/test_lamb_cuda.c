/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA kernels of LAMB, run on a CPU (cuda_on_cpu.h): the packing of segments into launches, lanes, blocks, norms
 * and the step, against the scalar CPU version, bit for bit.
 */
#include "harness.h"

#include "../../csrc/ops/lamb/kernels.h"

#include "cuda_threads.h"

#include "../../csrc/ops/lamb/lamb_cuda.cu"
CUDA_THUNK(zpp_lamb_cuda_moments, struct zpp_lamb_cuda_batch)
CUDA_THUNK(zpp_lamb_cuda_blocks, struct zpp_lamb_cuda_batch)
CUDA_THUNK(zpp_lamb_cuda_rates, struct zpp_lamb_cuda_batch)
CUDA_THUNK(zpp_lamb_cuda_move, struct zpp_lamb_cuda_batch)

/* What zpp_lamb_step_cuda does, without a driver; the number of groups. */
static int step(const struct zpp_lamb_segment *segments, size_t count, float grad_scale) {
    static struct zpp_lamb_cuda_batch batch;
    void *work = aligned_alloc(64, (zpp_lamb_cuda_work_bytes(segments, count) + 63) / 64 * 64);
    int groups = 0;
    CHECK(work);
    for (size_t done = 0; done < count;) {
        done += zpp_lamb_cuda_fill(segments + done, count - done, grad_scale, &batch);
        zpp_lamb_cuda_place(&batch, work);
        groups += batch.blocks > 0;
        const uint64_t threads = ZPP_LAMB_CUDA_THREADS, lanes = (uint64_t)batch.blocks * ZPP_LAMB_CUDA_LANES;
        cuda_loop(zpp_lamb_cuda_moments_thunk, &batch, (lanes + threads - 1) / threads, ZPP_LAMB_CUDA_THREADS);
        cuda_loop(zpp_lamb_cuda_blocks_thunk, &batch, (2 * batch.blocks + threads - 1) / threads,
                  ZPP_LAMB_CUDA_THREADS);
        cuda_loop(zpp_lamb_cuda_rates_thunk, &batch, (batch.count + threads - 1) / threads, ZPP_LAMB_CUDA_THREADS);
        cuda_loop(zpp_lamb_cuda_move_thunk, &batch, batch.blocks, ZPP_LAMB_CUDA_THREADS);
    }
    free(work);
    return groups;
}

enum { SEGMENTS = 75, LENGTH = 5000, ELEMS = SEGMENTS * LENGTH };
struct memory { float p[ELEMS], m[ELEMS], v[ELEMS], grad[ELEMS], out[ELEMS]; };
static struct memory want, got;

static void fill(struct memory *memory) {
    for (size_t i = 0; i < ELEMS; ++i) {
        memory->p[i] = 0.01f * (float)(i % 101) - 0.5f, memory->m[i] = 0.001f * (float)(i % 13) - 4e-3f;
        memory->v[i] = 1e-4f * (float)(i % 17), memory->out[i] = 7.0f;
        memory->grad[i] = __uint_as_float(0x3c003c00u + (uint32_t)(i * 2654435761u % 0x200u) * 0x10001u);
    }
}

static struct zpp_lamb_segment described(struct memory *at, size_t s) {
    static const zpp_dtype kinds[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
    static const size_t lengths[] = { 0, 1, 15, 16, 33, 4095, 4096, 4097, LENGTH };
    const size_t from = s * LENGTH;
    return (struct zpp_lamb_segment){
        .param = at->p + from, .grad = at->grad + from, .exp_avg = at->m + from, .exp_avg_sq = at->v + from,
        .param_out = s % 4 ? at->out + from : NULL, .elems = lengths[s % 9], .grad_dtype = kinds[s % 3],
        .out_dtype = kinds[s % 4 ? s % 4 - 1 : 0], .step = 1 + s, .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.99,
        .eps = 1e-6, .weight_decay = s % 5 ? 0.05 : 0.0, .trust_least = s % 6 ? 0.0 : 3.0,
        .trust_most = s % 7 ? 10.0 : 3.5, .maximize = s % 2 };
}

static void equals_the_cpu(void) {
    static struct zpp_lamb_segment segments[SEGMENTS];
    struct memory *const both[] = { &want, &got };
    struct zpp_err err = ZPP_ERR_INIT;
    fill(&want);
    memset(want.p + 5 * LENGTH, 0, LENGTH * sizeof *want.p); /* a norm of zero */
    got = want;
    for (int k = 0; k < 2; ++k) {
        for (size_t s = 0; s < SEGMENTS; ++s) segments[s] = described(both[k], s);
        if (k) CHECK_EQUAL(step(segments, SEGMENTS, 0.5f), 3); /* 66 that are not empty, 32 a group */
        else CHECK_OK(zpp_lamb_step_at(ZPP_CPU_SCALAR, segments, SEGMENTS, 0.5f, NULL, NULL, &err));
    }
    CHECK(memcmp(&want, &got, sizeof got) == 0);
}

static void nothing(void) {
    const struct zpp_lamb_segment empty = { .step = 1 };
    CHECK_EQUAL(step(&empty, 1, 1.0f), 0);
    CHECK_EQUAL(step(NULL, 0, 1.0f), 0);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(equals_the_cpu), TEST(nothing), {0} };
    return test_main(argc, argv, cases);
}
