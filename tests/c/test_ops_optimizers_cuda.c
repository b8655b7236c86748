/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA kernels of Lion, Adagrad and SGD, run on a CPU (cuda_on_cpu.h): the packing of segments into launches, the
 * walk over chunks, the ends and the arithmetic, against the scalar CPU versions, bit for bit; with states in fp32, and
 * in bf16 and 8 bits (cuda_threads.h).
 */
#include "harness.h"

#include <math.h>

#include "cuda_threads.h"
#include "scale_words.h"

#include "../../csrc/ops/optim/optim_cuda.cu"

/* What zpp_optim_step_cuda does, without a driver; the number of launches. */
#define STEP(op)                                                                                          \
    static int op##_step(const struct zpp_optim_segment *segments, size_t count, float grad_scale) {     \
        static struct zpp_##op##_cuda_batch batch;                                                        \
        int launches = 0;                                                                                 \
        for (size_t done = 0; done < count;) {                                                            \
            unsigned int blocks;                                                                          \
            done += zpp_optim_cuda_fill(segments + done, count - done, scale_as_wanted(grad_scale), &batch, &blocks); \
            launches += blocks > 0;                                                                       \
            for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {                                     \
                for (threadIdx.x = 0; threadIdx.x < ZPP_OPTIM_CUDA_THREADS; ++threadIdx.x) {               \
                    zpp_##op##_cuda(batch);                                                               \
                }                                                                                         \
            }                                                                                             \
        }                                                                                                 \
        return launches;                                                                                  \
    }
STEP(lion)
STEP(adagrad)
STEP(sgd)

/* The same for states that are not fp32; blocks of 8 bits have barriers. */
#define STEP_LOW(op)                                                                                          \
    CUDA_THUNK(zpp_##op##_low_cuda, struct zpp_##op##_low_cuda_batch)                                         \
    static int op##_step_in_fewer_bits(const struct zpp_optim_segment *segments, size_t count, float scale) { \
        static struct zpp_##op##_low_cuda_batch batch;                                                        \
        int launches = 0;                                                                                     \
        for (size_t done = 0; done < count;) {                                                                \
            unsigned int blocks;                                                                              \
            done += zpp_optim_cuda_fill(segments + done, count - done, scale_as_wanted(scale), &batch, &blocks); \
            launches += blocks > 0;                                                                           \
            (batch.list.at[0].int8 ? cuda_run : cuda_loop)(zpp_##op##_low_cuda_thunk, &batch, blocks,         \
                                                           ZPP_LOW_CUDA_THREADS);                             \
        }                                                                                                     \
        return launches;                                                                                      \
    }
STEP_LOW(lion)
STEP_LOW(adagrad)
STEP_LOW(sgd)

enum { SEGMENTS = 110, LENGTH = 700, ELEMS = SEGMENTS * LENGTH, LONG = 2 * ZPP_OPTIM_CUDA_CHUNK_ELEMS + 1001 };
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
static const int LAUNCHES = 2; /* 94 that are not empty, 53 or more a launch */

#define CHECK_MANY(op, description)                                                                       \
    do {                                                                                                  \
        static struct zpp_optim_segment segments[SEGMENTS];                                              \
        struct memory *const both[] = { &want, &got };                                                    \
        fill(&want);                                                                                      \
        got = want;                                                                                       \
        for (int k = 0; k < 2; ++k) {                                                                     \
            struct memory *at = both[k];                                                                  \
            for (size_t s = 0; s < SEGMENTS; ++s) segments[s] = (struct zpp_optim_segment)description;   \
            if (k) CHECK_EQUAL(op##_step(segments, SEGMENTS, 0.5f), LAUNCHES);                            \
            else CHECK(zpp_optim_step_at(ZPP_CPU_SCALAR, segments, SEGMENTS, 0.5f, NULL));               \
        }                                                                                                 \
        CHECK(memcmp(&want, &got, sizeof got) == 0);                                                      \
    } while (0)
#define WITH(...) { __VA_ARGS__ }

static void many_segments(void) {
    CHECK_MANY(lion, WITH(SEGMENT(at, s), .optimizer = ZPP_OPTIM_LION, .exp_avg = at->m + s * LENGTH, .beta1 = 0.9,
                          .beta2 = 0.99));
    CHECK_MANY(adagrad, WITH(SEGMENT(at, s), .optimizer = ZPP_OPTIM_ADAGRAD,
                                .sum = at->m + s * LENGTH, .step = 1 + s, .lr_decay = 0.01,
                                .eps = 1e-10));
    for (int flags = 0; flags < 8; ++flags) {
        CHECK_MANY(sgd, WITH(SEGMENT(at, s), .optimizer = ZPP_OPTIM_SGD,
                                .momentum_buffer = flags & 4 ? NULL : at->m + s * LENGTH,
                                .momentum = 0.9, .dampening = flags & 1 ? 0.0 : 0.25, .nesterov = flags & 1,
                                .step = (flags & 2) && s % 3 == 0 ? 1 : 2));
    }
}

/* --- states in fewer bits ----------------------------------------------------------------------------------------- */
enum { LOW_SEGMENTS = 30, LOW_SCALES = 8 };
struct low_memory {
    struct memory plain;
    uint16_t codes[ELEMS]; /* of 8 bits: the first half */
    float scales[LOW_SEGMENTS * LOW_SCALES];
};
static struct low_memory low_want, low_got;

static void fill_low(struct low_memory *memory, bool int8) {
    fill(&memory->plain);
    for (size_t i = 0; i < ELEMS; ++i) {
        memory->codes[i] = int8 ? (uint16_t)(i * 40503u >> 3) : zpp_bf16_from_f32(1e-3f * (float)(i % 13) + 1e-4f);
    }
    for (size_t i = 0; i < LOW_SEGMENTS * LOW_SCALES; ++i) memory->scales[i] = 1e-3f * (float)(i % 7);
}

static struct zpp_moments low_how(bool int8, size_t s) {
    static const size_t firsts[] = { 0, 1, 255, 256, 70300 };
    return (struct zpp_moments){ int8 ? ZPP_MOMENTS_INT8 : ZPP_MOMENTS_BF16, firsts[s % 5], zpp_moments_key(1, s, 3) };
}

static struct zpp_moment low_moment(struct low_memory *memory, bool int8, size_t s) {
    void *codes = int8 ? (void *)((uint8_t *)memory->codes + s * LENGTH) : (void *)(memory->codes + s * LENGTH);
    return (struct zpp_moment){ codes, memory->scales + s * LOW_SCALES };
}

#define CHECK_LOW(op, description)                                                                             \
    for (int int8 = 0; int8 < 2; ++int8) {                                                                     \
        static struct zpp_optim_segment segments[LOW_SEGMENTS];                                               \
        struct low_memory *const both[] = { &low_want, &low_got };                                             \
        fill_low(&low_want, int8);                                                                             \
        low_got = low_want;                                                                                    \
        for (int k = 0; k < 2; ++k) {                                                                          \
            struct low_memory *at = both[k];                                                                   \
            for (size_t s = 0; s < LOW_SEGMENTS; ++s) segments[s] = (struct zpp_optim_segment)description;    \
            if (k) CHECK_EQUAL(op##_step_in_fewer_bits(segments, LOW_SEGMENTS, 0.5f), 1);                      \
            else CHECK(zpp_optim_step_at(ZPP_CPU_SCALAR, segments, LOW_SEGMENTS, 0.5f, NULL));                \
        }                                                                                                      \
        CHECK(memcmp(&low_want, &low_got, sizeof low_got) == 0);                                               \
    }
#define HELD(s, which) .how = low_how(int8, s), .moments[ZPP_MOMENT_##which] = low_moment(at, int8, s)

static void fewer_bits(void) {
    CHECK_LOW(lion, WITH(SEGMENT(&at->plain, s), HELD(s, FIRST), .optimizer = ZPP_OPTIM_LION,
                         .beta1 = 0.9, .beta2 = 0.99))
    CHECK_LOW(adagrad, WITH(SEGMENT(&at->plain, s), HELD(s, SECOND), .optimizer = ZPP_OPTIM_ADAGRAD,
                            .step = 1 + s, .lr_decay = 0.01, .eps = 1e-10))
    CHECK_LOW(sgd, WITH(SEGMENT(&at->plain, s), HELD(s, FIRST), .optimizer = ZPP_OPTIM_SGD,
                        .momentum = 0.9, .step = s % 3 == 0 ? 1 : 2))
}

/* Several chunks, and an end inside one. */
static void long_segment(void) {
    float *memory = calloc(6 * (size_t)LONG, sizeof *memory);
    CHECK(memory);
    for (int copy = 0; copy < 2; ++copy) {
        float *p = memory + 3 * (size_t)LONG * (size_t)copy;
        for (size_t i = 0; i < 3 * (size_t)LONG; ++i) p[i] = 0.25f + 0.001f * (float)(i % 977);
        const struct zpp_optim_segment segment = { .param = p, .momentum_buffer = p + LONG, .grad = p + 2 * LONG,
                                                   .optimizer = ZPP_OPTIM_SGD, .step = 2, .elems = LONG, .lr = 1e-3,
                                                   .momentum = 0.9 };
        if (copy) CHECK_EQUAL(sgd_step(&segment, 1, 1.0f), 1);
        else zpp_optim_step(&segment, 1, 1.0f, NULL);
    }
    CHECK(memcmp(memory, memory + 3 * LONG, 3 * (size_t)LONG * sizeof *memory) == 0);
    free(memory);
}

static void in_words(void) {
    scale_words.by_address = true;
    many_segments();
    fewer_bits();
    scale_words.by_address = false;
}

static void nothing(void) {
    const struct zpp_optim_segment empty = { .optimizer = ZPP_OPTIM_LION, .lr = 1.0 };
    CHECK_EQUAL(lion_step(&empty, 1, 1.0f), 0);
    CHECK_EQUAL(sgd_step(NULL, 0, 1.0f), 0);
    CHECK_EQUAL(adagrad_step(NULL, 0, 1.0f), 0);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(many_segments), TEST(fewer_bits), TEST(long_segment), TEST(in_words),
                                              TEST(nothing), {0} };
    return test_main(argc, argv, cases);
}
