/* SPDX-License-Identifier: Apache-2.0
 *
 * One-bit compression over arrays: the version for this CPU, the split over threads, and the server's sum, which goes
 * through a tile of one block that stays in the first-level cache.
 */
#include "onebit.h"

#include <assert.h>
#include <float.h>
#include <math.h>

#include "../streamed.h"
#include "kernels.h"

enum {
    BLOCK_ELEMS = ZPP_ONEBIT_BLOCK_ELEMS,
    PIECE_ELEMS = 32 * 1024,     /* no piece of a thread is smaller, if chunks allow */
    STREAM_FROM_BYTES = 8 << 20, /* a destination of this size has left the nearer caches before anyone reads it */
};

static const struct zpp_onebit_kernels *kernels_of(enum zpp_cpu_level level) {
    return ZPP_ISA_AT(level, zpp_onebit);
}

static _Thread_local const struct zpp_onebit_kernels *forced;

static const struct zpp_onebit_kernels *kernels(void) { return forced ? forced : kernels_of(zpp_cpu_level()); }

bool zpp_onebit_use_level(enum zpp_cpu_level level) {
    if (level == ZPP_CPU_LEVELS) {
        forced = NULL;
        return true;
    }
    const struct zpp_onebit_kernels *table = kernels_of(level);
    if (!table || level > zpp_cpu_detected()) return false;
    forced = table;
    return true;
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* What is compressed: an array, or the sum of compressed ones. */
struct job {
    const struct zpp_onebit_kernels *kernels;
    size_t chunk_elems, elems;
    const void *src; /* NULL: the sources' sum */
    zpp_dtype dtype;
    const struct zpp_onebit_source *sources;
    size_t sources_count;
    float factor;
    float *error;
    uint8_t *bits;
    float *scales;
};

/* Elements [begin, end) as an array: in memory already, or made in the tile. */
static const void *input(const struct job *job, size_t chunk, size_t begin, size_t end, float *tile) {
    if (job->src) return (const char *)job->src + begin * zpp_dtype_bytes(job->dtype);
    enum zpp_onebit_how how = ZPP_ONEBIT_STORE; /* the first of at least one source; the others are added to it */
    const struct zpp_onebit_source *source = job->sources;
    do {
        job->kernels->decode(source->bits + begin / 8, source->scales[chunk], end - begin, tile, ZPP_F32, how);
        how = ZPP_ONEBIT_ADD;
    } while (++source < job->sources + job->sources_count);
    if (job->factor != 1.0f) {
        for (size_t i = 0; i < end - begin; ++i) tile[i] *= job->factor;
    }
    return tile;
}

static void compress_chunk(const struct job *job, size_t chunk) {
    const size_t begin = chunk * job->chunk_elems, end = least(begin + job->chunk_elems, job->elems);
    float tile[BLOCK_ELEMS];
    const void *block = NULL;
    bool finite = true;
    double sum = 0.0;
    for (size_t at = begin; at < end; at += BLOCK_ELEMS) {
        const size_t next = least(at + BLOCK_ELEMS, end);
        block = input(job, chunk, at, next, tile);
        const float block_sum = job->kernels->sum(block, job->dtype, job->error + at, next - at);
        finite = finite && isfinite(block_sum);
        sum += block_sum;
    }
    if (!finite || sum > FLT_MAX) {
        job->scales[chunk] = NAN;
        memset(job->bits + begin / 8, 0, zpp_onebit_bytes(end - begin));
        return;
    }
    const float scale = (float)(sum / (double)(end - begin));
    job->scales[chunk] = scale;
    for (size_t at = begin; at < end; at += BLOCK_ELEMS) {
        const size_t next = least(at + BLOCK_ELEMS, end);
        if (end - begin > BLOCK_ELEMS) block = input(job, chunk, at, next, tile); /* else the tile still holds it */
        job->kernels->emit(block, job->dtype, job->error + at, next - at, scale, job->bits + at / 8);
    }
}

static void compress_piece(size_t first_chunk, size_t end_chunk, void *arg) {
    for (size_t chunk = first_chunk; chunk < end_chunk; ++chunk) compress_chunk(arg, chunk);
}

static void each_piece(size_t chunk_elems, size_t elems, zpp_range_fn body, void *job, zpp_pool *pool) {
    assert(chunk_elems >= 16 && chunk_elems % 16 == 0);
    const size_t grain = chunk_elems < PIECE_ELEMS ? PIECE_ELEMS / chunk_elems : 1;
    zpp_pool_run(pool, zpp_onebit_chunks(chunk_elems, elems), grain, body, job);
}

void zpp_onebit_compress(size_t chunk_elems, const void *src, zpp_dtype src_dtype, float *error, size_t elems,
                         uint8_t *bits, float *scales, zpp_pool *pool) {
    assert(zpp_element_is_float(src_dtype));
    struct job job = { .kernels = kernels(), .chunk_elems = chunk_elems, .elems = elems, .src = src, .dtype = src_dtype,
                       .error = error, .bits = bits, .scales = scales };
    if (elems) each_piece(chunk_elems, elems, compress_piece, &job, pool);
}

void zpp_onebit_reduce(size_t chunk_elems, const struct zpp_onebit_source *sources, size_t sources_count, float factor,
                       float *error, size_t elems, uint8_t *bits, float *scales, zpp_pool *pool) {
    assert(sources_count >= 1);
    struct job job = { .kernels = kernels(), .chunk_elems = chunk_elems, .elems = elems, .dtype = ZPP_F32,
                       .sources = sources, .sources_count = sources_count, .factor = factor,
                       .error = error, .bits = bits, .scales = scales };
    each_piece(chunk_elems, elems, compress_piece, &job, pool);
}

/* --- decode ------------------------------------------------------------------------------------------------------- */
struct decode_job {
    const struct zpp_onebit_kernels *kernels;
    size_t chunk_elems, elems;
    const struct zpp_onebit_source *from;
    void *dst;
    zpp_dtype dtype;
    enum zpp_onebit_how how;
};

static void decode_piece(size_t first_chunk, size_t end_chunk, void *arg) {
    const struct decode_job *job = arg;
    for (size_t chunk = first_chunk; chunk < end_chunk; ++chunk) {
        const size_t begin = chunk * job->chunk_elems, end = least(begin + job->chunk_elems, job->elems);
        job->kernels->decode(job->from->bits + begin / 8, job->from->scales[chunk], end - begin,
                             (char *)job->dst + begin * zpp_dtype_bytes(job->dtype), job->dtype, job->how);
    }
    if (job->how == ZPP_ONEBIT_STREAM) zpp_streamed();
}

void zpp_onebit_decode(size_t chunk_elems, const struct zpp_onebit_source *from, void *dst, zpp_dtype dst_dtype,
                       size_t elems, bool accumulate, zpp_pool *pool) {
    assert(zpp_element_is_float(dst_dtype));
    const bool stream = elems * zpp_dtype_bytes(dst_dtype) >= STREAM_FROM_BYTES && (uintptr_t)dst % 64 == 0;
    const enum zpp_onebit_how how = accumulate ? ZPP_ONEBIT_ADD : stream ? ZPP_ONEBIT_STREAM : ZPP_ONEBIT_STORE;
    struct decode_job job = { kernels(), chunk_elems, elems, from, dst, dst_dtype, how };
    each_piece(chunk_elems, elems, decode_piece, &job, pool);
}
