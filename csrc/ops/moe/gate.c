/* SPDX-License-Identifier: Apache-2.0
 *
 * The gate and its backward (formulas: moe.h). Tokens go in blocks of a fixed size, each with its own sums for the
 * losses, which are added in order of blocks: the same bits for any number of threads.
 */
#include "moe.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

enum { BLOCK_TOKENS = ZPP_MOE_GATE_BLOCK_TOKENS };

const struct zpp_moe_kernels *zpp_moe_kernels_at(enum zpp_cpu_level level) {
    return ZPP_ISA_AT(level, zpp_moe);
}

const struct zpp_moe_kernels *zpp_moe_kernels(void) { return zpp_moe_kernels_at(zpp_cpu_level()); }

/* A token's row; ours in whole sixteens. */
struct row {
    const float *logits;
    _Alignas(64) float scores[ZPP_MOE_MAX_EXPERTS];
    float work[ZPP_MOE_MAX_EXPERTS]; /* what the choice is made by; then softmax beside sigmoid */
    struct zpp_moe_row_sums sums;
};

struct gate_job {
    const struct zpp_moe_gate *gate;
    const struct zpp_moe_kernels *kernels;
    float *weights;
    int32_t *chosen;
    double *sums; /* per block: sum of p for each expert, then sum of squares of log sum exp */
};

static void score_row(const struct zpp_moe_gate *gate, const struct zpp_moe_kernels *kernels, size_t token,
                      struct row *row) {
    row->logits = gate->logits + token * gate->experts;
    row->sums = kernels->scores(row->logits, gate->experts, gate->sigmoid, row->scores);
}

/* log sum exp of the logits. For sigmoid scores it takes a softmax of its own, left in `work`. */
static float log_sum_exp(const struct zpp_moe_gate *gate, const struct zpp_moe_kernels *kernels, struct row *row) {
    const struct zpp_moe_row_sums sums =
        gate->sigmoid ? kernels->scores(row->logits, gate->experts, false, row->work) : row->sums;
    return sums.max + logf(sums.sum);
}

static void choose(const struct zpp_moe_gate *gate, const struct zpp_moe_kernels *kernels, size_t token,
                   struct row *row, int32_t *chosen) {
    if (!gate->bias) {
        kernels->choose(row->logits, gate->experts, gate->k, row->work, chosen);
        return;
    }
    const float *bias = gate->bias + (gate->bias_per_token ? token * gate->experts : 0);
    for (size_t e = 0; e < gate->experts; ++e) row->work[e] = row->logits[e] + bias[e];
    kernels->choose(row->work, gate->experts, gate->k, row->work, chosen);
}

static void weigh(const struct zpp_moe_gate *gate, const float *scores, const int32_t *chosen, float *weights) {
    float total = 0.0f;
    for (size_t j = 0; j < gate->k; ++j) {
        weights[j] = scores[chosen[j]];
        total += weights[j];
    }
    for (size_t j = 0; j < gate->k && gate->normalise; ++j) weights[j] /= total;
}

static void gate_block(const struct gate_job *job, size_t block) {
    const struct zpp_moe_gate *gate = job->gate;
    const size_t experts = gate->experts, begin = block * BLOCK_TOKENS;
    const size_t end = begin + BLOCK_TOKENS < gate->tokens ? begin + BLOCK_TOKENS : gate->tokens;
    double *sums = job->sums + block * (experts + 1);
    float shares[ZPP_MOE_MAX_EXPERTS];
    double squares = 0.0;
    struct row row;
    memset(shares, 0, zpp_moe_padded(experts) * sizeof *shares);
    for (size_t t = begin; t < end; ++t) {
        score_row(gate, job->kernels, t, &row);
        choose(gate, job->kernels, t, &row, job->chosen + t * gate->k);
        weigh(gate, row.scores, job->chosen + t * gate->k, job->weights + t * gate->k);
        const double lse = (double)log_sum_exp(gate, job->kernels, &row);
        squares += lse * lse;
        job->kernels->add(shares, row.scores, gate->sigmoid ? 1.0f / row.sums.sum : 1.0f, experts);
    }
    for (size_t e = 0; e < experts; ++e) sums[e] = (double)shares[e];
    sums[experts] = squares;
}

static void gate_blocks(size_t begin, size_t end, void *arg) {
    for (size_t block = begin; block < end; ++block) gate_block(arg, block);
}

static void finish_losses(const struct zpp_moe_gate *gate, double *sums, size_t blocks, const int64_t *counts,
                          float *losses) {
    const size_t row = gate->experts + 1;
    for (size_t block = 1; block < blocks; ++block) {
        for (size_t e = 0; e < row; ++e) sums[e] += sums[block * row + e];
    }
    const double tokens = (double)gate->tokens;
    double balance = 0.0;
    for (size_t e = 0; e < gate->experts; ++e) {
        balance += (double)counts[e] / (tokens * (double)gate->k) * (sums[e] / tokens);
    }
    losses[0] = (float)((double)gate->experts * balance);
    losses[1] = (float)(sums[gate->experts] / tokens);
}

static void check_gate(const struct zpp_moe_gate *gate) {
    assert(gate->experts >= 1 && gate->experts <= ZPP_MOE_MAX_EXPERTS);
    assert(gate->k >= 1 && gate->k <= gate->experts && gate->k <= ZPP_MOE_MAX_CHOICES);
    (void)gate;
}

zpp_status zpp_moe_gate(const struct zpp_moe_gate *gate, float *weights, int32_t *chosen, int64_t *counts,
                        float *losses, zpp_pool *pool, struct zpp_err *err) {
    check_gate(gate);
    const size_t blocks = (gate->tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    double *sums = malloc((blocks + 1) * (gate->experts + 1) * sizeof *sums);
    if (!sums) return zpp_fail(err, ZPP_NOMEM, "moe gate: no memory for the sums of %zu blocks of tokens", blocks);
    struct gate_job job = { gate, zpp_moe_kernels(), weights, chosen, sums };
    zpp_pool_run(pool, blocks, 1, gate_blocks, &job);
    memset(counts, 0, gate->experts * sizeof *counts);
    for (size_t a = 0; a < gate->tokens * gate->k; ++a) counts[chosen[a]]++;
    losses[0] = losses[1] = 0.0f;
    if (blocks) finish_losses(gate, sums, blocks, counts, losses);
    free(sums);
    return ZPP_OK;
}

/* --- backward ----------------------------------------------------------------------------------------------------- */
struct backward_job {
    const struct zpp_moe_gate *gate;
    const struct zpp_moe_kernels *kernels;
    const int32_t *chosen;
    const float *grad_weights;
    float *grad_logits;
    float by_share[ZPP_MOE_MAX_EXPERTS]; /* d loss / d p_te: E f_e / T, times the gradient of the balance loss */
    float by_lse;                        /* d loss / d (log sum exp)^2: the gradient of the z loss / T */
};

/* d loss / d s of the chosen experts: w_j = s_j / S gives (g_j - sum_i g_i w_i) / S. */
static void weights_backward(const struct zpp_moe_gate *gate, const float *scores, const int32_t *chosen,
                             const float *grad, float by_choice[ZPP_MOE_MAX_CHOICES]) {
    float total = 1.0f, mean = 0.0f;
    if (gate->normalise) {
        total = 0.0f;
        for (size_t j = 0; j < gate->k; ++j) total += scores[chosen[j]];
        for (size_t j = 0; j < gate->k; ++j) mean += grad[j] * (scores[chosen[j]] / total);
    }
    for (size_t j = 0; j < gate->k; ++j) by_choice[j] = (grad[j] - mean) / total;
}

/* Through p = s / sum s (the balance loss) in softmax and sigmoid alike: (a_e - sum_i a_i p_i) / sum s. */
static float share_mean(const struct backward_job *job, const float *scores, float per_sum) {
    float mean = 0.0f;
    for (size_t e = 0; e < job->gate->experts; ++e) mean += job->by_share[e] * (scores[e] * per_sum);
    return mean;
}

static void softmax_backward(const struct backward_job *job, const struct row *row, const int32_t *chosen,
                             const float *by_choice, float by_lse, float *out) {
    float mean = share_mean(job, row->scores, 1.0f);
    for (size_t j = 0; j < job->gate->k; ++j) mean += by_choice[j] * row->scores[chosen[j]];
    for (size_t e = 0; e < job->gate->experts; ++e) out[e] = row->scores[e] * (job->by_share[e] - mean + by_lse);
    for (size_t j = 0; j < job->gate->k; ++j) out[chosen[j]] += row->scores[chosen[j]] * by_choice[j];
}

static void sigmoid_backward(const struct backward_job *job, const struct row *row, const int32_t *chosen,
                             const float *by_choice, float by_lse, float *out) {
    const float per_sum = 1.0f / row->sums.sum, mean = share_mean(job, row->scores, per_sum);
    for (size_t e = 0; e < job->gate->experts; ++e) {
        const float s = row->scores[e];
        out[e] = (job->by_share[e] - mean) * per_sum * (s * (1.0f - s)) + by_lse * row->work[e];
    }
    for (size_t j = 0; j < job->gate->k; ++j) {
        const float s = row->scores[chosen[j]];
        out[chosen[j]] += by_choice[j] * (s * (1.0f - s));
    }
}

static void backward_tokens(size_t begin, size_t end, void *arg) {
    const struct backward_job *job = arg;
    const struct zpp_moe_gate *gate = job->gate;
    float by_choice[ZPP_MOE_MAX_CHOICES];
    struct row row;
    for (size_t t = begin; t < end; ++t) {
        const int32_t *chosen = job->chosen + t * gate->k;
        score_row(gate, job->kernels, t, &row);
        const float by_lse = 2.0f * log_sum_exp(gate, job->kernels, &row) * job->by_lse;
        weights_backward(gate, row.scores, chosen, job->grad_weights + t * gate->k, by_choice);
        (gate->sigmoid ? sigmoid_backward : softmax_backward)(job, &row, chosen, by_choice, by_lse,
                                                              job->grad_logits + t * gate->experts);
    }
}

void zpp_moe_gate_backward(const struct zpp_moe_gate *gate, const int32_t *chosen, const int64_t *counts,
                           const float *grad_weights, const float *grad_losses, float *grad_logits, zpp_pool *pool) {
    check_gate(gate);
    const double tokens = (double)gate->tokens;
    struct backward_job job = { .gate = gate, .kernels = zpp_moe_kernels(), .chosen = chosen,
                                .grad_weights = grad_weights, .grad_logits = grad_logits };
    for (size_t e = 0; e < gate->experts && gate->tokens; ++e) {
        const double share = (double)counts[e] / (tokens * (double)gate->k);
        job.by_share[e] = (float)((double)grad_losses[0] * (double)gate->experts * share / tokens);
    }
    if (gate->tokens) job.by_lse = (float)((double)grad_losses[1] / tokens);
    zpp_pool_run(pool, gate->tokens, BLOCK_TOKENS, backward_tokens, &job);
}
