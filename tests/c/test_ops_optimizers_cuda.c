/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA kernels of Lion, Adagrad and SGD, run on a CPU (cuda_on_cpu.h): the packing of segments into launches, the
 * walk over chunks, the ends and the arithmetic, against the scalar CPU versions, bit for bit.
 */
#include "harness.h"

#include <math.h>

#include "../../csrc/ops/adagrad/kernels.h"
#include "../../csrc/ops/lion/kernels.h"
#include "../../csrc/ops/sgd/kernels.h"

#include "cuda_on_cpu.h"

#define walk lion_walk
#define walk_chunk lion_walk_chunk
#include "../../csrc/ops/lion/lion_cuda.cu"

#undef ZPP_OPS_LIST_WALK_CUDA_H
#undef WALK_CONSTS
#undef walk_element
#undef walk
#undef walk_chunk
#define walk adagrad_walk
#define walk_chunk adagrad_walk_chunk
#include "../../csrc/ops/adagrad/adagrad_cuda.cu"

#undef ZPP_OPS_LIST_WALK_CUDA_H
#undef WALK_CONSTS
#undef walk_element
#undef walk
#undef walk_chunk
#define walk sgd_walk
#define walk_chunk sgd_walk_chunk
#include "../../csrc/ops/sgd/sgd_cuda.cu"

/* What zpp_list_cuda_run does, without a driver; the number of launches. */
#define STEP(op)                                                                                          \
    static int op##_step(const struct zpp_##op##_segment *segments, size_t count, float grad_scale) {     \
        static struct zpp_##op##_cuda_batch batch;                                                        \
        int launches = 0;                                                                                 \
        for (size_t done = 0; done < count;) {                                                            \
            unsigned int blocks;                                                                          \
            done += zpp_##op##_cuda_fill(segments + done, count - done, grad_scale, &batch, &blocks);     \
            launches += blocks > 0;                                                                       \
            for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {                                     \
                for (threadIdx.x = 0; threadIdx.x < ZPP_LIST_CUDA_THREADS; ++threadIdx.x) {               \
                    zpp_##op##_cuda(batch);                                                               \
                }                                                                                         \
            }                                                                                             \
        }                                                                                                 \
        return launches;                                                                                  \
    }
STEP(lion)
STEP(adagrad)
STEP(sgd)

enum { SEGMENTS = 110, LENGTH = 700, ELEMS = SEGMENTS * LENGTH, LONG = 2 * ZPP_LIST_CUDA_CHUNK_ELEMS + 1001 };
struct memory { float p[ELEMS], m[ELEMS], grad[ELEMS], out[ELEMS]; };
static struct memory want, got;

/* Bits that mean finite numbers of every kind: two bf16 or two fp16 in the place of a fp32. */
static void fill(struct memory *memory) {
    for (size_t i = 0; i < ELEMS; ++i) {
        memory->p[i] = 0.01f * (float)(i % 101) - 0.5f, memory->m[i] = 0.001f * (float)(i % 13) + 1e-4f;
        memory->out[i] = 7.0f;
        memory->grad[i] = __uint_as_float(0x3c003c00u + (uint32_t)(i * 2654435761u % 0x200u) * 0x10001u);
    }
}

/* Fields that all kinds of segment have; every seventh is empty. */
#define SEGMENT(memory, s)                                                                                     \
    .param = (memory)->p + (s) * LENGTH, .grad = (memory)->grad + (s) * LENGTH, .grad_dtype = kinds[(s) % 3],  \
    .param_out = (s) % 4 ? (memory)->out + (s) * LENGTH : NULL, .out_dtype = kinds[(s) % 4 ? (s) % 4 - 1 : 0], \
    .elems = (s) % 7 ? (s) * 37 % LENGTH : 0, .lr = 1e-2, .weight_decay = (s) % 5 ? 0.05 : 0.0, .maximize = (s) % 2

static const zpp_dtype kinds[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
static const int LAUNCHES = 2; /* 94 that are not empty, 48 a launch */

#define CHECK_MANY(op, description)                                                                       \
    do {                                                                                                  \
        static struct zpp_##op##_segment segments[SEGMENTS];                                              \
        struct memory *const both[] = { &want, &got };                                                    \
        fill(&want);                                                                                      \
        got = want;                                                                                       \
        for (int k = 0; k < 2; ++k) {                                                                     \
            struct memory *at = both[k];                                                                  \
            for (size_t s = 0; s < SEGMENTS; ++s) segments[s] = (struct zpp_##op##_segment)description;   \
            if (k) CHECK_EQUAL(op##_step(segments, SEGMENTS, 0.5f), LAUNCHES);                            \
            else CHECK(zpp_##op##_step_at(ZPP_CPU_SCALAR, segments, SEGMENTS, 0.5f, NULL));               \
        }                                                                                                 \
        CHECK(memcmp(&want, &got, sizeof got) == 0);                                                      \
    } while (0)
#define WITH(...) { __VA_ARGS__ }

static void many_segments(void) {
    CHECK_MANY(lion, WITH(SEGMENT(at, s), .exp_avg = at->m + s * LENGTH, .beta1 = 0.9, .beta2 = 0.99));
    CHECK_MANY(adagrad, WITH(SEGMENT(at, s), .sum = at->m + s * LENGTH, .step = 1 + s, .lr_decay = 0.01,
                                .eps = 1e-10));
    for (int flags = 0; flags < 8; ++flags) {
        CHECK_MANY(sgd, WITH(SEGMENT(at, s), .momentum_buffer = flags & 4 ? NULL : at->m + s * LENGTH,
                                .momentum = 0.9, .dampening = flags & 1 ? 0.0 : 0.25, .nesterov = flags & 1,
                                .first = (flags & 2) && s % 3 == 0));
    }
}

/* Several chunks, and an end inside one. */
static void long_segment(void) {
    float *memory = calloc(6 * (size_t)LONG, sizeof *memory);
    CHECK(memory);
    for (int copy = 0; copy < 2; ++copy) {
        float *p = memory + 3 * (size_t)LONG * (size_t)copy;
        for (size_t i = 0; i < 3 * (size_t)LONG; ++i) p[i] = 0.25f + 0.001f * (float)(i % 977);
        const struct zpp_sgd_segment segment = { .param = p, .momentum_buffer = p + LONG, .grad = p + 2 * LONG,
                                                 .elems = LONG, .lr = 1e-3, .momentum = 0.9 };
        if (copy) CHECK_EQUAL(sgd_step(&segment, 1, 1.0f), 1);
        else zpp_sgd_step(&segment, 1, 1.0f, NULL);
    }
    CHECK(memcmp(memory, memory + 3 * LONG, 3 * (size_t)LONG * sizeof *memory) == 0);
    free(memory);
}

static void nothing(void) {
    const struct zpp_lion_segment empty = { .lr = 1.0 };
    CHECK_EQUAL(lion_step(&empty, 1, 1.0f), 0);
    CHECK_EQUAL(sgd_step(NULL, 0, 1.0f), 0);
    CHECK_EQUAL(adagrad_step(NULL, 0, 1.0f), 0);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(many_segments), TEST(long_segment), TEST(nothing), {0} };
    return test_main(argc, argv, cases);
}
