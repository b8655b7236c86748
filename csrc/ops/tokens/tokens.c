/* SPDX-License-Identifier: Apache-2.0
 *
 * The moves of tokens.h: picks a version once, splits rows over threads. A run of neighbours is moved as one.
 */
#include "tokens.h"

#include <assert.h>

#include "../streamed.h"
#include "kernels.h"
#include "tokens_body.h"

enum {
    PIECE_BYTES = 128 * 1024,
    STREAM_BYTES = 8 * 1024 * 1024, /* results of this size leave the caches before anybody reads them */
};

const struct zpp_tokens_kernels *zpp_tokens_kernels_at(enum zpp_cpu_level level) {
    return ZPP_ISA_AT(level, zpp_tokens);
}

const struct zpp_tokens_kernels *zpp_tokens_kernels(void) { return zpp_tokens_kernels_at(zpp_cpu_level()); }

zpp_status zpp_tokens_check(const struct zpp_tokens *tokens, struct zpp_err *err) {
    for (size_t b = 0; b < tokens->batch; ++b) {
        const int32_t *kept = tokens->kept + b * tokens->keep;
        int32_t before = -1;
        for (size_t k = 0; k < tokens->keep; before = kept[k++]) {
            if (kept[k] > before && (size_t)kept[k] < tokens->seq) continue;
            return zpp_fail(err, ZPP_INVALID, "kept[%zu][%zu] is %d, wanted more than %d and less than %zu", b, k,
                            (int)kept[k], (int)before, tokens->seq);
        }
    }
    return ZPP_OK;
}

/* --- sample ------------------------------------------------------------------------------------------------------- */
struct sample {
    int32_t *kept;
    size_t seq, keep;
    struct zpp_tokens_key key;
};

static void sample_some(size_t begin, size_t end, void *arg) {
    const struct sample *job = arg;
    for (size_t b = begin; b < end; ++b) {
        zpp_tokens_draw(job->kept + b * job->keep, job->seq, job->keep, job->key.seed, job->key.layer,
                        job->key.first + b);
    }
}

void zpp_tokens_sample(int32_t *kept, size_t batch, size_t seq, size_t keep, struct zpp_tokens_key key,
                       zpp_pool *pool) {
    assert(keep <= seq && seq <= INT32_MAX);
    struct sample job = { kept, seq, keep, key };
    zpp_pool_run(pool, batch, 1 + 8192 / (seq + 1), sample_some, &job);
}

/* --- moves -------------------------------------------------------------------------------------------------------- */
struct move {
    const struct zpp_tokens *tokens;
    const struct zpp_tokens_kernels *kernels;
    const char *full, *part;
    char *out;
    bool stream;
};

static void run(const struct zpp_tokens *tokens, const void *full, const void *part, void *out, size_t rows,
                zpp_range_fn body, zpp_pool *pool) {
    struct move job = { tokens, zpp_tokens_kernels(), full, part, out, rows * tokens->row_bytes >= STREAM_BYTES };
    zpp_pool_run(pool, rows, 1 + PIECE_BYTES / (tokens->row_bytes + 1), body, &job);
}

static void gather_rows(size_t begin, size_t end, void *arg) {
    const struct move *job = arg;
    const struct zpp_tokens *tokens = job->tokens;
    while (begin < end) {
        const size_t b = begin / tokens->keep, stop = (b + 1) * tokens->keep < end ? (b + 1) * tokens->keep : end;
        size_t last = begin + 1;
        while (last < stop && tokens->kept[last] == tokens->kept[last - 1] + 1) ++last;
        const size_t from = b * tokens->seq + (size_t)tokens->kept[begin];
        job->kernels->copy(job->out + begin * tokens->row_bytes, job->full + from * tokens->row_bytes,
                           (last - begin) * tokens->row_bytes, job->stream);
        begin = last;
    }
    if (job->stream) zpp_streamed();
}

static void place(const struct move *job, const char *from, size_t row, size_t first, size_t rows) {
    const size_t row_bytes = job->tokens->row_bytes;
    char *to = job->out + first * row_bytes;
    if (from) job->kernels->copy(to, from + row * row_bytes, rows * row_bytes, job->stream);
    else job->kernels->zero(to, rows * row_bytes, job->stream);
}

static void scatter_rows(size_t begin, size_t end, void *arg) {
    const struct move *job = arg;
    const struct zpp_tokens *tokens = job->tokens;
    while (begin < end) {
        const size_t b = begin / tokens->seq, first = b * tokens->seq;
        const size_t stop = first + tokens->seq < end ? first + tokens->seq : end;
        const int32_t *kept = tokens->kept + b * tokens->keep;
        for (size_t k = zpp_tokens_first(kept, tokens->keep, begin - first); begin < stop;) {
            const size_t next = k < tokens->keep ? first + (size_t)kept[k] : stop; /* the next one that is kept */
            const size_t until = next < stop ? next : stop;
            if (until > begin) place(job, job->full, begin, begin, until - begin);
            begin = until;
            size_t rows = 0;
            while (begin + rows < stop && k + rows < tokens->keep && first + (size_t)kept[k + rows] == begin + rows) {
                ++rows;
            }
            if (rows) place(job, job->part, b * tokens->keep + k, begin, rows);
            begin += rows, k += rows;
        }
    }
    if (job->stream) zpp_streamed();
}

void zpp_tokens_gather(const struct zpp_tokens *tokens, const void *full, void *part, zpp_pool *pool) {
    run(tokens, full, NULL, part, tokens->batch * tokens->keep, gather_rows, pool);
}

void zpp_tokens_scatter(const struct zpp_tokens *tokens, const void *full, const void *part, void *out,
                        zpp_pool *pool) {
    run(tokens, full, part, out, tokens->batch * tokens->seq, scatter_rows, pool);
}
