/* SPDX-License-Identifier: Apache-2.0
 *
 * Block quantisation over arrays: the version for this CPU, the split over threads, and sums of quantised arrays,
 * which go through a tile that stays in the first-level cache.
 */
#include "quant.h"

#include <assert.h>

#include "../element.h"
#include "../streamed.h"
#include "kernels.h"

enum {
    TILE_ELEMS = 2048,           /* 8 KiB of fp32 */
    PIECE_ELEMS = 32 * 1024,     /* no piece of a thread is smaller, if blocks allow */
    STREAM_FROM_BYTES = 8 << 20, /* a destination of this size has left the nearer caches before anyone reads it */
};

static const struct zpp_quant_kernels *kernels_of(enum zpp_cpu_level level) {
    return ZPP_ISA_AT(level, zpp_quant);
}

static _Thread_local const struct zpp_quant_kernels *forced;

static const struct zpp_quant_kernels *kernels(void) { return forced ? forced : kernels_of(zpp_cpu_level()); }

bool zpp_quant_use_level(enum zpp_cpu_level level) {
    if (level == ZPP_CPU_LEVELS) {
        forced = NULL;
        return true;
    }
    const struct zpp_quant_kernels *table = kernels_of(level);
    if (!table || level > zpp_cpu_detected()) return false;
    forced = table;
    return true;
}

static void check_spec(const struct zpp_quant_spec *spec) {
    assert(spec->bits == 8 || spec->bits == 4);
    assert(spec->block_elems >= 16 && spec->block_elems % 16 == 0);
    (void)spec;
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

static void each_piece(const struct zpp_quant_spec *spec, size_t elems, zpp_range_fn body, void *job, zpp_pool *pool) {
    const size_t grain = spec->block_elems < PIECE_ELEMS ? PIECE_ELEMS / spec->block_elems : 1;
    zpp_pool_run(pool, zpp_quant_blocks(spec, elems), grain, body, job);
}

/* --- quantise ----------------------------------------------------------------------------------------------------- */
struct quantise_job {
    const struct zpp_quant_kernels *kernels;
    const struct zpp_quant_spec *spec;
    const void *src;
    zpp_dtype dtype;
    size_t elems;
    const struct zpp_quant_target *to;
};

static void quantise_piece(size_t first_block, size_t end_block, void *arg) {
    const struct quantise_job *job = arg;
    const size_t begin = first_block * job->spec->block_elems;
    const size_t end = least(end_block * job->spec->block_elems, job->elems);
    job->kernels->blocks(job->spec, (const char *)job->src + begin * zpp_dtype_bytes(job->dtype), job->dtype,
                         end - begin, (uint8_t *)job->to->codes + zpp_quant_code_bytes(job->spec, begin),
                         job->to->scales + first_block, job->spec->asymmetric ? job->to->mids + first_block : NULL);
}

void zpp_quantise(const struct zpp_quant_spec *spec, const void *src, zpp_dtype src_dtype, size_t elems,
                  const struct zpp_quant_target *to, zpp_pool *pool) {
    check_spec(spec);
    assert(zpp_element_is_float(src_dtype));
    struct quantise_job job = { kernels(), spec, src, src_dtype, elems, to };
    each_piece(spec, elems, quantise_piece, &job, pool);
}

/* --- dequantise --------------------------------------------------------------------------------------------------- */
/* Elements [begin, end) of a quantised array to dst + 0; begin is a multiple of 16. */
static void decode_elems(const struct zpp_quant_kernels *k, const struct zpp_quant_spec *spec,
                         const struct zpp_quant_source *from, size_t begin, size_t end, void *dst, zpp_dtype dtype,
                         enum zpp_quant_how how) {
    for (size_t at = begin; at < end;) {
        const size_t block = at / spec->block_elems, next = least((block + 1) * spec->block_elems, end);
        k->decode(spec->bits, from->scales[block], spec->asymmetric ? from->mids[block] : 0.0f,
                  (const uint8_t *)from->codes + zpp_quant_code_bytes(spec, at), next - at,
                  (char *)dst + (at - begin) * zpp_dtype_bytes(dtype), dtype, how);
        at = next;
    }
}

struct dequantise_job {
    const struct zpp_quant_kernels *kernels;
    const struct zpp_quant_spec *spec;
    const struct zpp_quant_source *from;
    void *dst;
    zpp_dtype dtype;
    size_t elems;
    enum zpp_quant_how how;
};

static void dequantise_piece(size_t first_block, size_t end_block, void *arg) {
    const struct dequantise_job *job = arg;
    const size_t begin = first_block * job->spec->block_elems;
    const size_t end = least(end_block * job->spec->block_elems, job->elems);
    decode_elems(job->kernels, job->spec, job->from, begin, end,
                 (char *)job->dst + begin * zpp_dtype_bytes(job->dtype), job->dtype, job->how);
    if (job->how == ZPP_QUANT_STREAM) zpp_streamed();
}

static bool streams(const void *dst, zpp_dtype dtype, size_t elems) {
    return elems * zpp_dtype_bytes(dtype) >= STREAM_FROM_BYTES && (uintptr_t)dst % 64 == 0;
}

void zpp_dequantise(const struct zpp_quant_spec *spec, const struct zpp_quant_source *from, void *dst,
                    zpp_dtype dst_dtype, size_t elems, bool accumulate, zpp_pool *pool) {
    check_spec(spec);
    assert(zpp_element_is_float(dst_dtype));
    const enum zpp_quant_how how = accumulate                        ? ZPP_QUANT_ADD
                                   : streams(dst, dst_dtype, elems) ? ZPP_QUANT_STREAM
                                                                    : ZPP_QUANT_STORE;
    struct dequantise_job job = { kernels(), spec, from, dst, dst_dtype, elems, how };
    each_piece(spec, elems, dequantise_piece, &job, pool);
}

/* --- sums --------------------------------------------------------------------------------------------------------- */
struct sum {
    const struct zpp_quant_kernels *kernels;
    const struct zpp_quant_spec *spec;
    const struct zpp_quant_source *sources;
    size_t sources_count;
    float factor;
    size_t elems;
};

/* tile[0 ..) = the sum's elements [begin, end); there is at least one source. */
static void fill_tile(const struct sum *sum, size_t begin, size_t end, float *tile) {
    assert(begin < end);
    decode_elems(sum->kernels, sum->spec, &sum->sources[0], begin, end, tile, ZPP_F32, ZPP_QUANT_STORE);
    for (size_t s = 1; s < sum->sources_count; ++s)
        decode_elems(sum->kernels, sum->spec, &sum->sources[s], begin, end, tile, ZPP_F32, ZPP_QUANT_ADD);
    if (sum->factor == 1.0f) return;
    for (size_t i = 0; i < end - begin; ++i) tile[i] *= sum->factor;
}

struct sum_job {
    struct sum sum;
    void *dst;
    zpp_dtype dtype;
};

static void sum_piece(size_t first_tile, size_t end_tile, void *arg) {
    const struct sum_job *job = arg;
    float tile[TILE_ELEMS];
    for (size_t t = first_tile; t < end_tile; ++t) {
        const size_t begin = t * TILE_ELEMS, end = least(begin + TILE_ELEMS, job->sum.elems);
        void *dst = (char *)job->dst + begin * zpp_dtype_bytes(job->dtype);
        if (job->dtype == ZPP_F32) {
            fill_tile(&job->sum, begin, end, dst);
        } else {
            fill_tile(&job->sum, begin, end, tile);
            zpp_convert(dst, job->dtype, tile, ZPP_F32, end - begin);
        }
    }
}

void zpp_quant_sum(const struct zpp_quant_spec *spec, const struct zpp_quant_source *sources, size_t sources_count,
                   float factor, void *dst, zpp_dtype dst_dtype, size_t elems, zpp_pool *pool) {
    check_spec(spec);
    assert(sources_count >= 1 && zpp_element_is_float(dst_dtype));
    struct sum_job job = { { kernels(), spec, sources, sources_count, factor, elems }, dst, dst_dtype };
    zpp_pool_run(pool, elems / TILE_ELEMS + (elems % TILE_ELEMS != 0), PIECE_ELEMS / TILE_ELEMS, sum_piece, &job);
}

struct reduce_job {
    struct sum sum;
    const struct zpp_quant_spec *to_spec;
    const struct zpp_quant_target *to;
};

/* One block of the result. Where it does not fit the tile, its sum is computed a second time for the codes. */
static void reduce_block(const struct reduce_job *job, size_t block) {
    const struct zpp_quant_spec *spec = job->to_spec;
    const struct zpp_quant_kernels *k = job->sum.kernels;
    const size_t begin = block * spec->block_elems, end = least(begin + spec->block_elems, job->sum.elems);
    float tile[TILE_ELEMS];
    struct zpp_quant_span span = ZPP_QUANT_EMPTY_SPAN;
    struct zpp_quant_consts consts;
    for (size_t at = begin; at < end; at += TILE_ELEMS) {
        const size_t next = least(at + TILE_ELEMS, end);
        fill_tile(&job->sum, at, next, tile);
        k->span(tile, ZPP_F32, next - at, &span);
    }
    const int finite = zpp_quant_consts_of(&span, spec->bits, spec->asymmetric, &consts);
    job->to->scales[block] = consts.scale;
    if (spec->asymmetric) job->to->mids[block] = consts.mid;
    uint8_t *codes = (uint8_t *)job->to->codes + zpp_quant_code_bytes(spec, begin);
    if (!finite) {
        memset(codes, 0, zpp_quant_code_bytes(spec, end - begin));
        return;
    }
    for (size_t at = begin; at < end; at += TILE_ELEMS) {
        const size_t next = least(at + TILE_ELEMS, end);
        if (end - begin > TILE_ELEMS) fill_tile(&job->sum, at, next, tile);
        k->encode(spec->bits, &consts, tile, ZPP_F32, next - at, codes + zpp_quant_code_bytes(spec, at - begin));
    }
}

static void reduce_piece(size_t first_block, size_t end_block, void *arg) {
    for (size_t block = first_block; block < end_block; ++block) reduce_block(arg, block);
}

void zpp_quant_reduce(const struct zpp_quant_spec *spec, const struct zpp_quant_source *sources, size_t sources_count,
                      float factor, size_t elems, const struct zpp_quant_spec *to_spec,
                      const struct zpp_quant_target *to, zpp_pool *pool) {
    check_spec(spec);
    check_spec(to_spec);
    assert(sources_count >= 1);
    struct reduce_job job = { { kernels(), spec, sources, sources_count, factor, elems }, to_spec, to };
    each_piece(to_spec, elems, reduce_piece, &job, pool);
}
