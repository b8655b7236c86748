/* SPDX-License-Identifier: Apache-2.0
 *
 * 8-bit floats over arrays: the version for this CPU, and the split over threads.
 */
#include "fp8.h"

#include <assert.h>

#include "../element.h"
#include "fp8_kernels.h"

enum { PIECE_ELEMS = 32 * 1024 }; /* no piece of a thread is smaller, if blocks allow */

const struct zpp_fp8_kernels *zpp_fp8_kernels_at(enum zpp_cpu_level level) {
    return ZPP_ISA_AT(level, zpp_fp8);
}

const struct zpp_fp8_kernels *zpp_fp8_kernels(void) { return zpp_fp8_kernels_at(zpp_cpu_level()); }

struct job {
    const struct zpp_fp8_kernels *kernels;
    const struct zpp_fp8_spec *spec;
    const void *src;
    uint8_t *to_codes;
    float *to_scales;
    const uint8_t *codes;
    const float *scales;
    void *dst;
    zpp_dtype dtype;
    size_t elems;
    bool accumulate;
};

static void run(const struct job *job, zpp_range_fn body, zpp_pool *pool) {
    const size_t block = job->spec->block_elems;
    assert(block >= 16 && block % 16 == 0 && zpp_element_is_float(job->dtype));
    zpp_pool_run(pool, zpp_fp8_blocks(job->spec, job->elems), block < PIECE_ELEMS ? PIECE_ELEMS / block : 1, body,
                 (void *)(uintptr_t)job);
}

static size_t elems_of(const struct job *job, size_t block) {
    const size_t begin = block * job->spec->block_elems;
    return job->elems - begin < job->spec->block_elems ? job->elems - begin : job->spec->block_elems;
}

static void quantise_blocks(size_t begin, size_t end, void *arg) {
    const struct job *job = arg;
    for (size_t block = begin; block < end; ++block) {
        const size_t at = block * job->spec->block_elems;
        job->to_scales[block] = job->kernels->encode(job->spec->format,
                                                     (const char *)job->src + at * zpp_dtype_bytes(job->dtype),
                                                     job->dtype, elems_of(job, block), job->to_codes + at);
    }
}

static void dequantise_blocks(size_t begin, size_t end, void *arg) {
    const struct job *job = arg;
    for (size_t block = begin; block < end; ++block) {
        const size_t at = block * job->spec->block_elems;
        job->kernels->decode(job->spec->format, job->scales[block], job->codes + at, elems_of(job, block),
                             (char *)job->dst + at * zpp_dtype_bytes(job->dtype), job->dtype, job->accumulate);
    }
}

void zpp_fp8_quantise(const struct zpp_fp8_spec *spec, const void *src, zpp_dtype src_dtype, size_t elems,
                      uint8_t *codes, float *scales, zpp_pool *pool) {
    const struct job job = { .kernels = zpp_fp8_kernels(), .spec = spec, .src = src, .to_codes = codes,
                             .to_scales = scales, .dtype = src_dtype, .elems = elems };
    run(&job, quantise_blocks, pool);
}

void zpp_fp8_dequantise(const struct zpp_fp8_spec *spec, const uint8_t *codes, const float *scales, void *dst,
                        zpp_dtype dst_dtype, size_t elems, bool accumulate, zpp_pool *pool) {
    const struct job job = { .kernels = zpp_fp8_kernels(), .spec = spec, .codes = codes, .scales = scales, .dst = dst,
                             .dtype = dst_dtype, .elems = elems, .accumulate = accumulate };
    run(&job, dequantise_blocks, pool);
}
