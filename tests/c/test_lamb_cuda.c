/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA kernels of LAMB, run on a CPU (cuda_on_cpu.h): the packing of segments into launches, lanes, blocks, norms
 * and the step, against the scalar CPU version, bit for bit.
 */
#include "harness.h"

#include "../../csrc/ops/lamb/kernels.h"

#include "cuda_threads.h"
#include "scale_words.h"

#include "../../csrc/ops/lamb/lamb_cuda.cu"
CUDA_THUNK(zpp_lamb_cuda_moments, struct zpp_lamb_cuda_batch)
CUDA_THUNK(zpp_lamb_cuda_blocks, struct zpp_lamb_cuda_batch)
CUDA_THUNK(zpp_lamb_cuda_rates, struct zpp_lamb_cuda_batch)
CUDA_THUNK(zpp_lamb_cuda_move, struct zpp_lamb_cuda_batch)
CUDA_THUNK(zpp_lamb_cuda_norms, struct zpp_lamb_cuda_batch)

#include "../../csrc/ops/lamb/lamb_low_cuda.cu"
CUDA_THUNK(zpp_lamb_low_cuda_lanes, struct zpp_lamb_low_cuda_batch)
CUDA_THUNK(zpp_lamb_low_cuda_move, struct zpp_lamb_low_cuda_batch)

/* What zpp_lamb_step_cuda does, without a driver; the number of groups. */
static int step(const struct zpp_lamb_segment *segments, size_t count, float grad_scale) {
    static struct zpp_lamb_cuda_batch batch;
    static struct zpp_lamb_low_cuda_batch low;
    const bool is_low = count && segments[0].how.kind != ZPP_MOMENTS_F32;
    void *work = aligned_alloc(64, (zpp_lamb_cuda_work_bytes(segments, count) + 63) / 64 * 64);
    int groups = 0;
    CHECK(work);
    for (size_t done = 0; done < count;) {
        const size_t taken = zpp_lamb_cuda_fill(segments + done, count - done, scale_as_wanted(grad_scale), &batch);
        unsigned int low_blocks = 0;
        zpp_lamb_cuda_place(&batch, work);
        if (is_low) low_blocks = zpp_lamb_low_cuda_fill(segments + done, taken, &batch, &low);
        done += taken;
        groups += batch.blocks > 0;
        const uint64_t threads = ZPP_LAMB_CUDA_THREADS, lane_threads = (uint64_t)batch.blocks * ZPP_LAMB_CUDA_LANES;
        const uint64_t lane_blocks = (lane_threads + threads - 1) / threads;
        if (is_low) cuda_loop(zpp_lamb_low_cuda_lanes_thunk, &low, lane_blocks, ZPP_LAMB_CUDA_THREADS);
        else cuda_loop(zpp_lamb_cuda_moments_thunk, &batch, lane_blocks, ZPP_LAMB_CUDA_THREADS);
        cuda_loop(zpp_lamb_cuda_blocks_thunk, &batch, (2 * batch.blocks + threads - 1) / threads,
                  ZPP_LAMB_CUDA_THREADS);
        cuda_loop(zpp_lamb_cuda_rates_thunk, &batch, (batch.count + threads - 1) / threads, ZPP_LAMB_CUDA_THREADS);
        if (is_low && low.list.count) {
            (low.list.at[0].int8 ? cuda_run : cuda_loop)(zpp_lamb_low_cuda_move_thunk, &low, low_blocks,
                                                         ZPP_LAMB_CUDA_THREADS);
        } else if (!is_low) {
            cuda_loop(zpp_lamb_cuda_move_thunk, &batch, batch.blocks, ZPP_LAMB_CUDA_THREADS);
        }
    }
    free(work);
    return groups;
}

/* What zpp_lamb_norms_cuda does. */
static void moments(const struct zpp_lamb_segment *segments, size_t count, float grad_scale, double *sums) {
    static struct zpp_lamb_cuda_batch batch;
    const unsigned int threads = ZPP_LAMB_CUDA_THREADS;
    void *work = aligned_alloc(64, (zpp_lamb_cuda_work_bytes(segments, count) + 63) / 64 * 64);
    CHECK(work);
    for (size_t done = 0; done < count;) {
        const size_t taken = zpp_lamb_cuda_fill(segments + done, count - done, scale_as_wanted(grad_scale), &batch);
        zpp_lamb_cuda_place(&batch, work);
        batch.norms = sums + 2 * done;
        done += taken;
        cuda_loop(zpp_lamb_cuda_moments_thunk, &batch,
                  ((uint64_t)batch.blocks * ZPP_LAMB_CUDA_LANES + threads - 1) / threads, threads);
        cuda_loop(zpp_lamb_cuda_blocks_thunk, &batch, (2 * batch.blocks + threads - 1) / threads, threads);
        cuda_loop(zpp_lamb_cuda_norms_thunk, &batch, (batch.taken + threads - 1) / threads, threads);
    }
    free(work);
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

/* The first pass alone; of tensors without elements, too, the sums are written. */
static void moments_equal_the_cpu(void) {
    static struct zpp_lamb_segment segments[SEGMENTS];
    static double sums[2][SEGMENTS][2];
    struct memory *const both[] = { &want, &got };
    struct zpp_err err = ZPP_ERR_INIT;
    fill(&want);
    got = want;
    memset(sums, 0xa5, sizeof sums);
    for (int k = 0; k < 2; ++k) {
        for (size_t s = 0; s < SEGMENTS; ++s) segments[s] = described(both[k], s);
        if (k) moments(segments, SEGMENTS, 0.5f, sums[k][0]);
        else CHECK_OK(zpp_lamb_norms_at(ZPP_CPU_SCALAR, segments, SEGMENTS, 0.5f, sums[k][0], NULL, &err));
    }
    CHECK(memcmp(&want, &got, sizeof got) == 0 && memcmp(sums[0], sums[1], sizeof sums[0]) == 0);
    CHECK(sums[0][8][0] > 0.0 && sums[0][8][1] > 0.0 && sums[0][9][0] == 0.0);
}

/* Moments in bf16 and 8 bits. */
enum { LOW_SEGMENTS = 30, SCALES = 20 };
struct low_memory {
    struct memory plain;
    uint16_t codes[2][LOW_SEGMENTS * LENGTH]; /* of 8 bits: the first half */
    float scales[2][LOW_SEGMENTS * SCALES];
};

static void fill_low(struct low_memory *memory, bool int8) {
    fill(&memory->plain);
    for (int k = 0; k < 2; ++k) {
        for (size_t i = 0; i < LOW_SEGMENTS * LENGTH; ++i) {
            memory->codes[k][i] = int8 ? (uint16_t)(i * 40503u >> 3) : zpp_bf16_from_f32(1e-3f * (float)(i % 13));
        }
        for (size_t i = 0; i < LOW_SEGMENTS * SCALES; ++i) memory->scales[k][i] = 1e-3f * (float)(i % 7);
    }
}

static void equals_the_cpu_in_fewer_bits(void) {
    static struct low_memory low_want, low_got;
    static struct zpp_lamb_segment segments[LOW_SEGMENTS];
    struct low_memory *const both[] = { &low_want, &low_got };
    struct zpp_err err = ZPP_ERR_INIT;
    for (int int8 = 0; int8 < 2; ++int8) {
        fill_low(&low_want, int8);
        low_got = low_want;
        for (int k = 0; k < 2; ++k) {
            for (size_t s = 0; s < LOW_SEGMENTS; ++s) {
                segments[s] = described(&both[k]->plain, s);
                segments[s].exp_avg = segments[s].exp_avg_sq = NULL;
                segments[s].how.kind = int8 ? ZPP_MOMENTS_INT8 : ZPP_MOMENTS_BF16;
                segments[s].how.key = zpp_moments_key(1, s, segments[s].step);
                for (int m = 0; m < 2; ++m) {
                    uint16_t *codes = both[k]->codes[m];
                    segments[s].moments[m].codes =
                        int8 ? (void *)((uint8_t *)codes + s * LENGTH) : (void *)(codes + s * LENGTH);
                    segments[s].moments[m].scales = both[k]->scales[m] + s * SCALES;
                }
            }
            if (k) CHECK_EQUAL(step(segments, LOW_SEGMENTS, 0.5f), 2); /* 26 that are not empty, 25 a group */
            else CHECK_OK(zpp_lamb_step_at(ZPP_CPU_SCALAR, segments, LOW_SEGMENTS, 0.5f, NULL, NULL, &err));
        }
        CHECK(memcmp(&low_want, &low_got, sizeof low_got) == 0);
    }
}

static void in_words(void) {
    scale_words.by_address = true;
    equals_the_cpu();
    equals_the_cpu_in_fewer_bits();
    moments_equal_the_cpu();
    scale_words.by_address = false;
}

static void skipped(void) {
    static struct zpp_lamb_segment segments[SEGMENTS];
    static double sums[SEGMENTS][2], zeros[SEGMENTS][2];
    fill(&want);
    got = want;
    for (size_t s = 0; s < SEGMENTS; ++s) segments[s] = described(&got, s);
    memset(sums, 0xa5, sizeof sums);
    scale_words.by_address = scale_words.skip = true;
    step(segments, SEGMENTS, 0.5f);
    moments(segments, SEGMENTS, 0.5f, sums[0]);
    scale_words.by_address = scale_words.skip = false;
    CHECK(memcmp(&want, &got, sizeof got) == 0 && memcmp(sums, zeros, sizeof sums) == 0);
}

static void nothing(void) {
    const struct zpp_lamb_segment empty = { .step = 1 };
    CHECK_EQUAL(step(&empty, 1, 1.0f), 0);
    CHECK_EQUAL(step(NULL, 0, 1.0f), 0);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(equals_the_cpu), TEST(equals_the_cpu_in_fewer_bits),
                                              TEST(moments_equal_the_cpu), TEST(in_words), TEST(skipped),
                                              TEST(nothing), {0} };
    return test_main(argc, argv, cases);
}
