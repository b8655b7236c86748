/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA kernel of Adam on moments in bf16 and 8 bits, run on a CPU whose threads are its threads (cuda_threads.h):
 * packing, chunks, pieces that begin and end inside a block, barriers and the arithmetic, against the CPU's versions,
 * bit for bit.
 */
#include "harness.h"

#include <math.h>

#include "cuda_threads.h"
#include "scale_words.h"

#include "../../csrc/ops/optim/optim_cuda.cu"
#include "no_master.h"

CUDA_THUNK(zpp_adam_low_cuda, struct zpp_adam_low_cuda_batch)
CUDA_THUNK(zpp_adam_low_no_master_cuda, struct zpp_adam_low_cuda_batch)

static int run(const struct zpp_optim_segment *segments, size_t count) {
    static struct zpp_adam_low_cuda_batch batch;
    int launches = 0;
    for (size_t done = 0; done < count;) {
        unsigned int blocks;
        done += zpp_optim_cuda_fill(segments + done, count - done, scale_as_wanted(0.5f), &batch, &blocks);
        launches += blocks > 0;
        if (count == 0 || blocks == 0) continue;
        const bool barriers = batch.list.at[0].int8;
        void (*thunk)(const void *) = segments[0].param ? zpp_adam_low_cuda_thunk : zpp_adam_low_no_master_cuda_thunk;
        if (barriers) cuda_run(thunk, &batch, blocks, ZPP_LOW_CUDA_THREADS);
        else cuda_loop(thunk, &batch, blocks, ZPP_LOW_CUDA_THREADS);
    }
    return launches;
}

enum { SEGMENTS = 30, LENGTH = 3000, LONG = ZPP_LOW_CUDA_CHUNK_ELEMS + 700, ELEMS = SEGMENTS * LENGTH + LONG,
       SCALES = 20, ALL_SCALES = SEGMENTS * SCALES + 100 };
struct memory {
    float p[ELEMS], grad[ELEMS], out[ELEMS], scales[3][ALL_SCALES];
    uint16_t codes[3][ELEMS];
};

/* Bits that mean finite numbers of every kind: two bf16 or two fp16 in the place of a fp32. */
static void fill(struct memory *memory, bool int8, bool wild) {
    for (size_t i = 0; i < ELEMS; ++i) {
        memory->p[i] = 0.01f * (float)(i % 101) - 0.5f, memory->out[i] = 7.0f;
        memory->grad[i] = __uint_as_float(0x3c003c00u + (uint32_t)(i * 2654435761u % 0x200u) * 0x10001u);
        if (wild && i % 5003 == 77) memory->grad[i] = INFINITY;
        for (int k = 0; k < 3; ++k) {
            const float value = 0.001f * (float)(i % 13) * (k == 0 && i % 2 ? -1.0f : 1.0f);
            memory->codes[k][i] = int8 ? (uint16_t)(i * 40503u >> 3) : zpp_bf16_from_f32(value);
        }
    }
    for (int k = 0; k < 3; ++k) for (size_t i = 0; i < ALL_SCALES; ++i) memory->scales[k][i] = 1e-3f * (float)(i % 7);
}

static void describe(struct zpp_optim_segment *segments, struct memory *memory, bool int8, int flags) {
    static const zpp_dtype kinds[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
    static const size_t firsts[] = { 0, 1, 255, 256, 70300 };
    for (size_t s = 0; s <= SEGMENTS; ++s) {
        const bool last = s == SEGMENTS, out = s % 4 != 0;
        const size_t at = s * LENGTH, elems = last ? LONG : s % 7 ? s * 97 % LENGTH : 0;
        segments[s] = (struct zpp_optim_segment){
            .param = memory->p + at, .grad = memory->grad + at, .grad_dtype = flags & 4 ? ZPP_F32 : kinds[s % 3],
            .param_out = out ? memory->out + at : NULL, .out_dtype = kinds[s % 3], .elems = elems, .step = 1 + s,
            .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.05, .decoupled_decay = flags & 2,
            .how = { int8 ? ZPP_MOMENTS_INT8 : ZPP_MOMENTS_BF16, firsts[s % 5], zpp_moments_key(1, s, 1 + s) } };
        for (int k = 0; k < 2 + (flags & 1); ++k) {
            segments[s].moments[k] = (struct zpp_moment){
                int8 ? (void *)((uint8_t *)memory->codes[k] + at) : (void *)(memory->codes[k] + at),
                memory->scales[k] + s * SCALES };
        }
    }
}

static bool same(const struct memory *a, const struct memory *b) {
    const float *x = a->p, *y = b->p;
    for (size_t i = 0; i < offsetof(struct memory, codes) / sizeof(float); ++i) {
        if (!(isnan(x[i]) && isnan(y[i])) && memcmp(&x[i], &y[i], sizeof(float)) != 0) return false;
    }
    return memcmp(a->codes, b->codes, sizeof a->codes) == 0;
}

static void equals_the_cpu(void) {
    static struct memory want, got;
    static struct zpp_optim_segment segments[SEGMENTS + 1];
    for (int int8 = 0; int8 < 2; ++int8) for (int flags = 0; flags < 8; flags += int8 ? 2 : 1) {
        const int options = int8 && flags == 2 ? 3 : flags; /* amsgrad once: threads cost time */
        fill(&want, int8, options & 4);
        got = want;
        describe(segments, &want, int8, options);
        zpp_optim_step(segments, SEGMENTS + 1, 0.5f, NULL);
        describe(segments, &got, int8, options);
        scale_words.by_address = options & 2;
        CHECK_EQUAL(run(segments, SEGMENTS + 1), 2); /* 26 that are not empty, 25 a launch */
        CHECK(same(&want, &got));
    }
}

/* bf16 parameters without an fp32 copy, in the place of `out`. */
static void no_master(void) {
    static struct memory want, got;
    static struct zpp_optim_segment segments[SEGMENTS + 1];
    for (int int8 = 0; int8 < 2; ++int8) {
        fill(&want, int8, false);
        for (size_t i = 0; i < ELEMS; ++i) want.out[i] = want.grad[i];
        got = want;
        describe(segments, &want, int8, 2);
        without_master(segments, SEGMENTS + 1);
        no_master_on_cpu(segments, SEGMENTS + 1, 0.5f);
        describe(segments, &got, int8, 2);
        without_master(segments, SEGMENTS + 1);
        scale_words.by_address = false;
        CHECK(run(segments, SEGMENTS + 1) > 0);
        CHECK(same(&want, &got));
    }
}

static void skipped(void) {
    static struct memory before, got;
    static struct zpp_optim_segment segments[SEGMENTS + 1];
    scale_words.by_address = scale_words.skip = true;
    for (int int8 = 0; int8 < 2; ++int8) {
        fill(&before, int8, false);
        got = before;
        describe(segments, &got, int8, 0);
        run(segments, SEGMENTS + 1);
        CHECK(memcmp(&before, &got, sizeof got) == 0);
    }
    scale_words.skip = false;
}

static void nothing(void) {
    const struct zpp_optim_segment empty = { .step = 1, .how = { ZPP_MOMENTS_INT8, 0, 0 } };
    CHECK_EQUAL(run(&empty, 1), 0);
    CHECK_EQUAL(run(NULL, 0), 0);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        TEST(equals_the_cpu), TEST(no_master), TEST(skipped), TEST(nothing), {0}};
    return test_main(argc, argv, cases);
}
