/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums of floating point arrays with NEON. The plan of reduce_avx2.c, 32 elements at a time in the lanes of vec16.h:
 * one addition per source, in rank order, then one multiplication, then one rounding. Nothing is written around the
 * cache: these CPUs see by themselves that whole lines are written.
 */
#include "../ops/vec16.h"
#include "reduce.h"

enum { PIECES = 2, BLOCK = PIECES * V16_LANES };

struct largest {
    v16 result, replaced;
};

V16_FN v16 larger(v16 largest, v16 value) { return v16_max_bits(largest, v16_abs(value)); }

/* The dtypes are constants where this is inlined. */
V16_FN void sum_block(const struct zpp_sum *job, size_t i, const zpp_dtype dtype, const zpp_dtype dst_dtype,
                      const bool report, struct largest *largest) {
    v16 sum[PIECES];
    for (size_t k = 0; k < PIECES; k++) sum[k] = v16_load_as(job->src[0], i + k * V16_LANES, dtype);
    for (int r = 1; r < job->sources; r++)
        for (size_t k = 0; k < PIECES; k++)
            sum[k] = v16_add(sum[k], v16_load_as(job->src[r], i + k * V16_LANES, dtype));
    for (size_t k = 0; k < PIECES; k++) {
        const size_t at = i + k * V16_LANES;
        const v16 scaled = v16_mul(sum[k], v16_set1(job->scale));
        const v16 before = v16_load_as(job->dst, at, dst_dtype);
        const v16 value = job->accumulate ? v16_add(before, scaled) : scaled;
        if (report && job->replaces) largest->replaced = larger(largest->replaced, before);
        if (report) largest->result = larger(largest->result, value);
        v16_store_as(job->dst, at, dst_dtype, value);
    }
}

V16_FN struct zpp_sum_seen sum_blocks(const struct zpp_sum *sum, size_t *done, size_t elems, const zpp_dtype dtype,
                                      const zpp_dtype dst_dtype, const bool report) {
    const struct zpp_sum job = *sum; /* a copy, so that the compiler knows that no store changes it */
    struct largest largest = {v16_set1(0.0f), v16_set1(0.0f)};
    size_t i = 0;
    for (; i + BLOCK <= elems; i += BLOCK) sum_block(&job, i, dtype, dst_dtype, report, &largest);
    *done = i;
    return zpp_sum_seen(v16_greatest_bits(largest.result), v16_greatest_bits(largest.replaced));
}

/* The elements after the whole blocks go to the scalar kernel of the same dtype. */
V16_FN struct zpp_sum_seen sum_all(const struct zpp_sum *sum, size_t elems, const zpp_dtype dtype,
                                   const zpp_dtype dst_dtype,
                                   struct zpp_sum_seen (*scalar)(const struct zpp_sum *, size_t)) {
    size_t done;
    const struct zpp_sum_seen seen = sum->report ? sum_blocks(sum, &done, elems, dtype, dst_dtype, true)
                                                 : sum_blocks(sum, &done, elems, dtype, dst_dtype, false);
    const void *src[ZPP_RANKS_MAX];
    struct zpp_sum rest = *sum;
    for (int r = 0; r < sum->sources; r++) src[r] = (const uint8_t *)sum->src[r] + done * zpp_dtype_bytes(dtype);
    rest.src = src;
    rest.dst = (uint8_t *)sum->dst + done * zpp_dtype_bytes(dst_dtype);
    const struct zpp_sum_seen last = scalar(&rest, elems - done);
    return (struct zpp_sum_seen){seen.nonfinite || last.nonfinite,
                                 seen.replaced_nonfinite || last.replaced_nonfinite};
}

static struct zpp_sum_seen sum_f32(const struct zpp_sum *sum, size_t elems) {
    return sum_all(sum, elems, ZPP_F32, ZPP_F32, zpp_sum_scalar.f32);
}

static struct zpp_sum_seen sum_bf16(const struct zpp_sum *sum, size_t elems) {
    return sum->wide ? sum_all(sum, elems, ZPP_BF16, ZPP_F32, zpp_sum_scalar.bf16)
                     : sum_all(sum, elems, ZPP_BF16, ZPP_BF16, zpp_sum_scalar.bf16);
}

static struct zpp_sum_seen sum_f16(const struct zpp_sum *sum, size_t elems) {
    return sum->wide ? sum_all(sum, elems, ZPP_F16, ZPP_F32, zpp_sum_scalar.f16)
                     : sum_all(sum, elems, ZPP_F16, ZPP_F16, zpp_sum_scalar.f16);
}

static void copy(void *dst, const void *src, size_t bytes) { memcpy(dst, src, bytes); }

const struct zpp_sum_kernels zpp_sum_neon = {sum_f32, sum_bf16, sum_f16, copy};
