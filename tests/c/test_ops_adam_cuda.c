/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA kernel of Adam, run on a CPU: adam_cuda.cu is C as well, once its keywords are defined away, and its blocks
 * and threads are loops. So the packing of segments into launches, the walk over chunks, the ends and the arithmetic
 * are tested without a GPU.
 */
#include "harness.h"

#include <math.h>

#include "cuda_threads.h"
#include "scale_words.h"

#include "../../csrc/ops/optim/optim_cuda.cu"
#include "no_master.h"

/* What zpp_optim_step_cuda does, without a driver. */
static int step(const struct zpp_optim_segment *segments, size_t count, float grad_scale) {
    static struct zpp_adam_cuda_batch batch;
    int launches = 0;
    for (size_t done = 0; done < count;) {
        unsigned int blocks;
        done += zpp_optim_cuda_fill(segments + done, count - done, scale_as_wanted(grad_scale), &batch, &blocks);
        launches += blocks > 0;
        for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
            for (threadIdx.x = 0; threadIdx.x < ZPP_OPTIM_CUDA_THREADS; ++threadIdx.x) {
                if (segments[0].param) zpp_adam_cuda(batch);
                else zpp_adam_no_master_cuda(batch);
            }
        }
    }
    return launches;
}

enum { SEGMENTS = 70, LENGTH = 3000, ELEMS = SEGMENTS * LENGTH };
struct memory { float p[ELEMS], m[ELEMS], v[ELEMS], top[ELEMS], grad[ELEMS], out[ELEMS]; };

static void describe(struct zpp_optim_segment *segments, struct memory *memory, int flags) {
    static const zpp_dtype kinds[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
    for (size_t s = 0; s < SEGMENTS; ++s) {
        const size_t at = s * LENGTH;
        const bool out = s % 4 != 0;
        segments[s] = (struct zpp_optim_segment){
            .param = memory->p + at, .exp_avg = memory->m + at, .exp_avg_sq = memory->v + at,
            .max_exp_avg_sq = flags & 1 ? memory->top + at : NULL,
            .grad = memory->grad + at, .grad_dtype = kinds[s % 3],
            .param_out = out ? memory->out + at : NULL, .out_dtype = kinds[s % 4 ? s % 4 - 1 : 0],
            .elems = s % 7 ? s * 37 % LENGTH : 0, .step = 1 + s, .lr = 1e-2, .beta1 = flags & 2 ? 0.4 : 0.9,
            .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.05, .decoupled_decay = flags & 4, .maximize = s % 2 };
    }
}

static void many_segments(void) {
    static struct memory want, got;
    static struct zpp_optim_segment segments[SEGMENTS];
    for (int flags = 0; flags < 8; ++flags) {
        for (size_t i = 0; i < ELEMS; ++i) {
            want.p[i] = 0.01f * (float)(i % 101) - 0.5f, want.m[i] = 0.001f * (float)(i % 13);
            want.v[i] = want.top[i] = 1e-4f * (float)(i % 17), want.out[i] = 7.0f;
            /* Bits that mean finite numbers of every kind: two bf16 or two fp16 in the place of a fp32. */
            const uint32_t bits = 0x3c003c00u + (uint32_t)(i * 2654435761u % 0x200u) * 0x10001u;
            want.grad[i] = __uint_as_float(bits);
        }
        got = want;
        describe(segments, &want, flags);
        CHECK(zpp_optim_step_at(ZPP_CPU_SCALAR, segments, SEGMENTS, 0.5f, NULL));
        describe(segments, &got, flags);
        scale_words.by_address = flags & 2;
        CHECK_EQUAL(step(segments, SEGMENTS, 0.5f), 2); /* 60 that are not empty, 35 a launch */
        CHECK(memcmp(&want, &got, sizeof got) == 0);
    }
}

/* bf16 parameters without an fp32 copy, in the place of `out`. */
static void no_master(void) {
    static struct memory want, got;
    static struct zpp_optim_segment segments[SEGMENTS];
    for (size_t i = 0; i < ELEMS; ++i) {
        want.m[i] = 0.001f * (float)(i % 13), want.v[i] = want.top[i] = 1e-4f * (float)(i % 17);
        want.out[i] = want.grad[i] = __uint_as_float(0x3c003c00u + (uint32_t)(i * 2654435761u % 0x200u) * 0x10001u);
    }
    got = want;
    describe(segments, &want, 5);
    without_master(segments, SEGMENTS);
    no_master_on_cpu(segments, SEGMENTS, 0.5f);
    describe(segments, &got, 5);
    without_master(segments, SEGMENTS);
    scale_words.by_address = false;
    CHECK_EQUAL(step(segments, SEGMENTS, 0.5f), 2);
    CHECK(memcmp(&want, &got, sizeof got) == 0);
}

/* Several chunks, and an end inside one. */
static void long_segment(void) {
    const size_t elems = 3u * ZPP_OPTIM_CUDA_CHUNK_ELEMS + 1001;
    float *memory = calloc(8 * elems, sizeof *memory);
    for (int copy = 0; copy < 2; ++copy) {
        float *p = memory + 4 * elems * (size_t)copy;
        for (size_t i = 0; i < 4 * elems; ++i) p[i] = 0.25f + 0.001f * (float)(i % 977);
        const struct zpp_optim_segment segment = {
            .param = p, .exp_avg = p + elems, .exp_avg_sq = p + 2 * elems, .grad = p + 3 * elems, .elems = elems,
            .step = 4, .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8 };
        if (copy) CHECK_EQUAL(step(&segment, 1, 1.0f), 1);
        else zpp_optim_step(&segment, 1, 1.0f, NULL);
    }
    CHECK(memcmp(memory, memory + 4 * elems, 4 * elems * sizeof *memory) == 0);
    free(memory);
}

static void skipped(void) {
    static struct memory before, got;
    static struct zpp_optim_segment segments[SEGMENTS];
    for (size_t i = 0; i < ELEMS; ++i) before.p[i] = before.m[i] = before.v[i] = before.grad[i] = 1.0f;
    got = before;
    describe(segments, &got, 0);
    scale_words.by_address = scale_words.skip = true;
    step(segments, SEGMENTS, NAN);
    CHECK(memcmp(&before, &got, sizeof got) == 0);
    scale_words.skip = false;
    step(segments, SEGMENTS, 0.5f);
    CHECK(memcmp(&before, &got, sizeof got) != 0);
}

static void nothing(void) {
    const struct zpp_optim_segment empty = { .step = 1 };
    CHECK_EQUAL(step(&empty, 1, 1.0f), 0);
    CHECK_EQUAL(step(NULL, 0, 1.0f), 0);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        TEST(many_segments), TEST(no_master), TEST(long_segment), TEST(skipped), TEST(nothing), {0}};
    return test_main(argc, argv, cases);
}
