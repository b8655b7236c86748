/* SPDX-License-Identifier: Apache-2.0
 *
 * Plan, gather and sum over the memory of several ranks (peers.h). A gather walks the owners' tokens, not the rows of
 * the buffer, so that a token is read once from memory however many of this rank's experts take it.
 */
#include "peers.h"

#include <assert.h>
#include <string.h>

#include "../element.h"
#include "../streamed.h"
#include "kernels.h"

enum {
    PIECE_BYTES = 128 * 1024,
    STREAM_BYTES = 8 * 1024 * 1024, /* results of this size leave the caches before anybody reads them */
};

/* --- plan --------------------------------------------------------------------------------------------------------- */
void zpp_moe_choices_count(const struct zpp_moe_choices *choices, int64_t *counts, int64_t *rows) {
    const size_t experts = choices->experts, here = experts / choices->ranks;
    memset(counts, 0, choices->ranks * experts * sizeof *counts);
    memset(rows, 0, choices->ranks * sizeof *rows);
    for (size_t r = 0; r < choices->ranks; ++r) {
        for (size_t a = 0; a < choices->tokens[r] * choices->k; ++a) {
            const uint32_t expert = (uint32_t)choices->chosen[r][a];
            if (expert < experts) counts[r * experts + expert]++;
        }
        for (size_t e = 0; e < experts; ++e) rows[e / here] += counts[r * experts + e];
    }
}

/* Turn counts into the first row of each rank's assignments to each expert. */
static void first_rows(const struct zpp_moe_choices *choices, int64_t *counts, int32_t *ends) {
    const size_t experts = choices->experts, here = experts / choices->ranks;
    int64_t row = 0;
    for (size_t e = 0; e < experts; ++e) {
        if (e % here == 0) row = 0;
        for (size_t r = 0; r < choices->ranks; ++r) {
            const int64_t count = counts[r * experts + e];
            counts[r * experts + e] = row;
            row += count;
        }
        if (e / here == choices->rank) ends[e % here] = (int32_t)row;
    }
}

/* The rows of this rank's own assignments, on whichever rank they lie. */
static void place_own(const struct zpp_moe_choices *choices, const int64_t *first, int64_t *slots) {
    const size_t here = choices->experts / choices->ranks;
    int64_t next[ZPP_MOE_MAX_EXPERTS];
    for (size_t e = 0; e < choices->experts; ++e) next[e] = (int64_t)(e / here) << 32 | first[e];
    for (size_t a = 0; a < choices->tokens[choices->rank] * choices->k; ++a) {
        const uint32_t expert = (uint32_t)choices->chosen[choices->rank][a];
        slots[a] = expert < choices->experts ? next[expert]++ : -1;
    }
}

void zpp_moe_peer_plan(const struct zpp_moe_choices *choices, int64_t *counts, const struct zpp_moe_peer_plan *plan) {
    assert(choices->experts <= ZPP_MOE_MAX_EXPERTS && choices->experts % choices->ranks == 0);
    const size_t experts = choices->experts, here = experts / choices->ranks;
    const uint32_t first = (uint32_t)(choices->rank * here);
    int64_t at = 0;
    first_rows(choices, counts, plan->ends);
    place_own(choices, counts + choices->rank * experts, plan->slots);
    for (size_t r = 0; r < choices->ranks; ++r) {
        int64_t *next = counts + r * experts + first;
        plan->starts[r] = at;
        for (size_t a = 0; a < choices->tokens[r] * choices->k; ++a) {
            const uint32_t expert = (uint32_t)choices->chosen[r][a] - first;
            if (expert < here) plan->taken[at++] = (struct zpp_moe_taken){(int32_t)a, (int32_t)next[expert]++};
        }
    }
    plan->starts[choices->ranks] = at;
}

/* --- gather ------------------------------------------------------------------------------------------------------- */
struct gather {
    const struct zpp_moe_peer_rows *rows;
    const struct zpp_moe_kernels *kernels;
    const struct zpp_moe_taken *taken;
    const int64_t *starts;
    const struct zpp_moe_peer_scale *scale; /* NULL: plain copies */
    char *buffer;
    size_t row_bytes;
    bool stream;
};

static void take_row(const struct gather *job, size_t owner, const struct zpp_moe_taken *taken) {
    const struct zpp_moe_peer_rows *rows = job->rows;
    const struct zpp_moe_peer_scale *scale = job->scale;
    const char *from = (const char *)rows->bases[owner] + (size_t)taken->assignment / rows->k * job->row_bytes;
    const size_t at = (size_t)taken->row * job->row_bytes;
    if (!scale) {
        job->kernels->copy(job->buffer + at, from, job->row_bytes, job->stream);
        return;
    }
    if (scale->dots)
        scale->dots[taken->row] =
            job->kernels->dot((const char *)scale->made + at, from, rows->width_elems, rows->dtype);
    job->kernels->scale(job->buffer + at, from, scale->weights[owner][taken->assignment], rows->width_elems,
                        rows->dtype, job->stream);
}

static void take_rows(size_t begin, size_t end, void *arg) {
    const struct gather *job = arg;
    size_t owner = 0;
    for (size_t i = begin; i < end; ++i) {
        while ((size_t)job->starts[owner + 1] <= i) ++owner;
        take_row(job, owner, &job->taken[i]);
    }
    if (job->stream) zpp_streamed();
}

static size_t grain_of(size_t bytes_an_item) {
    return bytes_an_item < PIECE_BYTES ? PIECE_BYTES / (bytes_an_item + 1) : 1;
}

void zpp_moe_peer_gather_scaled(const struct zpp_moe_peer_rows *rows, const struct zpp_moe_taken *taken,
                                const int64_t *starts, const struct zpp_moe_peer_scale *scale, void *buffer,
                                zpp_pool *pool) {
    assert(zpp_element_is_float(rows->dtype) && rows->k >= 1 && rows->k <= ZPP_MOE_MAX_CHOICES);
    const size_t count = (size_t)starts[rows->ranks];
    struct gather job = {rows, zpp_moe_kernels(), taken, starts, scale, buffer, 0, false};
    job.row_bytes = rows->width_elems * zpp_dtype_bytes(rows->dtype);
    job.stream = count * job.row_bytes >= STREAM_BYTES;
    zpp_pool_run(pool, count, grain_of(2 * job.row_bytes), take_rows, &job);
}

void zpp_moe_peer_gather(const struct zpp_moe_peer_rows *rows, const struct zpp_moe_taken *taken, const int64_t *starts,
                         void *buffer, zpp_pool *pool) {
    zpp_moe_peer_gather_scaled(rows, taken, starts, NULL, buffer, pool);
}

/* --- sum ---------------------------------------------------------------------------------------------------------- */
struct sum {
    const struct zpp_moe_peer_rows *rows;
    const struct zpp_moe_kernels *kernels;
    const int64_t *slots;
    const float *weights;
    char *y;
    size_t row_bytes;
    bool stream;
};

static void sum_tokens(size_t begin, size_t end, void *arg) {
    const struct sum *job = arg;
    const struct zpp_moe_peer_rows *rows = job->rows;
    for (size_t t = begin; t < end; ++t) {
        const void *from[ZPP_MOE_MAX_CHOICES];
        float weights[ZPP_MOE_MAX_CHOICES];
        size_t count = 0;
        for (size_t a = t * rows->k; a < (t + 1) * rows->k; ++a) {
            const int64_t slot = job->slots[a];
            if (slot < 0) continue;
            weights[count] = job->weights ? job->weights[a] : 1.0f;
            from[count++] = (const char *)rows->bases[slot >> 32] + (size_t)(uint32_t)slot * job->row_bytes;
        }
        char *to = job->y + t * job->row_bytes;
        if (count)
            job->kernels->combine(to, from, job->weights ? weights : NULL, count, rows->width_elems, rows->dtype,
                                  job->stream);
        else memset(to, 0, job->row_bytes);
    }
    if (job->stream) zpp_streamed();
}

void zpp_moe_peer_sum(const struct zpp_moe_peer_rows *rows, const int64_t *slots, size_t tokens, const float *weights,
                      void *y, zpp_pool *pool) {
    assert(zpp_element_is_float(rows->dtype) && rows->k >= 1 && rows->k <= ZPP_MOE_MAX_CHOICES);
    struct sum job = {rows, zpp_moe_kernels(), slots, weights, y, 0, false};
    job.row_bytes = rows->width_elems * zpp_dtype_bytes(rows->dtype);
    job.stream = tokens * job.row_bytes >= STREAM_BYTES;
    zpp_pool_run(pool, tokens, grain_of(job.row_bytes * (rows->k + 1)), sum_tokens, &job);
}

struct copy {
    char *to;
    const char *from;
    const struct zpp_moe_kernels *kernels;
    bool stream;
};

static void copy_piece(size_t begin, size_t end, void *arg) {
    const struct copy *job = arg;
    job->kernels->copy(job->to + begin, job->from + begin, end - begin, job->stream);
    if (job->stream) zpp_streamed();
}

void zpp_moe_peer_copy(void *to, const void *from, size_t bytes, zpp_pool *pool) {
    struct copy job = {to, from, zpp_moe_kernels(), bytes >= STREAM_BYTES};
    zpp_pool_run(pool, bytes, PIECE_BYTES, copy_piece, &job);
}

void zpp_moe_peer_pick(const float *const *bases, const int64_t *slots, size_t assignments, float *values) {
    for (size_t a = 0; a < assignments; ++a)
        values[a] = slots[a] < 0 ? 0.0f : bases[slots[a] >> 32][(uint32_t)slots[a]];
}
