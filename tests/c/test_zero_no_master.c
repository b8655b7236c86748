/* SPDX-License-Identifier: Apache-2.0
 *
 * Adam on bf16 parameters without an fp32 copy: each becomes one of the two bf16 numbers around what fp32 Adam makes of
 * it, never the same one always, and cuts change no bit, with moments of every kind.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/zero/step_plan.h"

enum { ELEMS = 5000, CUT = 5 * ZPP_MOMENTS_BLOCK_ELEMS, STEPS = 4 };

#define REQUIRE(condition, ...)                            \
    do {                                                   \
        if (!(condition)) {                                \
            fprintf(stderr, "%s:%d: ", __FILE__, __LINE__); \
            fprintf(stderr, __VA_ARGS__);                  \
            fprintf(stderr, "\n");                         \
            abort();                                       \
        }                                                  \
    } while (0)

/* One tensor's values, as its moments have them. */
struct tensor {
    uint16_t param[ELEMS];
    float grad[ELEMS], fine[2][ELEMS];                    /* moments in fp32 */
    uint16_t half[2][ELEMS];                              /* in bf16 */
    uint8_t byte[2][ELEMS];                               /* in 8 bits, */
    float scales[2][ELEMS / ZPP_MOMENTS_BLOCK_ELEMS + 1]; /* with these */
};

static void fill(struct tensor *tensor) {
    memset(tensor, 0, sizeof *tensor);
    for (size_t i = 0; i < ELEMS; i++) {
        const float value = (float)((i * 7919) % 1000) / 500.0f - 1.0f;
        zpp_convert(&tensor->param[i], ZPP_BF16, &value, ZPP_F32, 1);
        tensor->grad[i] = (float)((i * 104729) % 997) / 997.0f - 0.5f;
    }
}

/* Elements [begin, end) in step `step`. */
static struct zpp_no_master_piece piece_of(struct tensor *tensor, enum zpp_moments_kind kind, size_t begin, size_t end,
                                            uint64_t step) {
    struct zpp_no_master_piece piece = {
        .segment = { .grad = tensor->grad + begin, .param_out = tensor->param + begin, .elems = end - begin,
                     .grad_dtype = ZPP_F32, .out_dtype = ZPP_BF16, .step = step, .lr = 1e-4, .beta1 = 0.9,
                     .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01, .decoupled_decay = true },
        .stream = 3, .first_elems = begin };
    struct zpp_optim_segment *segment = &piece.segment;
    if (kind == ZPP_MOMENTS_F32) {
        segment->exp_avg = tensor->fine[0] + begin;
        segment->exp_avg_sq = tensor->fine[1] + begin;
        return piece;
    }
    segment->how = (struct zpp_moments){ kind, begin, zpp_moments_key(0, 3, step) };
    for (int k = 0; k < 2; k++) {
        void *codes = kind == ZPP_MOMENTS_BF16 ? (void *)(tensor->half[k] + begin) : (void *)(tensor->byte[k] + begin);
        segment->moments[k] = (struct zpp_moment){ codes, tensor->scales[k] + begin / ZPP_MOMENTS_BLOCK_ELEMS };
    }
    return piece;
}

/* How many elements changed; each is a neighbour of what fp32 says. */
static size_t check_step(const struct tensor *before, const struct tensor *after, const float *exact) {
    size_t changed = 0;
    for (size_t i = 0; i < ELEMS; i++) {
        float found;
        zpp_convert(&found, ZPP_F32, &after->param[i], ZPP_BF16, 1);
        REQUIRE(fabsf(found - exact[i]) <= 0x1p-7f * fabsf(exact[i]) + 1e-30f, "element %zu is %g, fp32 says %g", i,
                (double)found, (double)exact[i]);
        changed += before->param[i] != after->param[i];
    }
    return changed;
}

static void run(enum zpp_moments_kind kind) {
    static struct tensor whole, cut, before, reference;
    static float exact[ELEMS];
    fill(&whole);
    fill(&cut);
    size_t changed = 0;
    for (uint64_t step = 1; step <= STEPS; step++) {
        before = reference = whole;
        struct zpp_optim_segment fp32 = piece_of(&reference, kind, 0, ELEMS, step).segment;
        zpp_convert(exact, ZPP_F32, before.param, ZPP_BF16, ELEMS);
        fp32.param = exact;
        fp32.param_out = NULL;
        zpp_optim_step(&fp32, 1, 0.5f, NULL);
        const struct zpp_no_master_piece all = piece_of(&whole, kind, 0, ELEMS, step);
        const struct zpp_no_master_piece two[] = { piece_of(&cut, kind, 0, CUT, step),
                                                    piece_of(&cut, kind, CUT, ELEMS, step) };
        zpp_no_master_step(&all, 1, 0.5f, NULL);
        zpp_no_master_step(two, 2, 0.5f, NULL);
        REQUIRE(!memcmp(&whole, &cut, sizeof whole), "kind %d: a cut changes bits in step %d", (int)kind, (int)step);
        changed += check_step(&before, &whole, exact);
    }
    /* A change of 1e-4 is below half of bf16's step for most of them: to nearest, they would never move. */
    REQUIRE(changed > STEPS * ELEMS / 100 && changed < STEPS * ELEMS / 2, "%zu changes of %d", changed, STEPS * ELEMS);
}

int main(void) {
    run(ZPP_MOMENTS_F32);
    run(ZPP_MOMENTS_BF16);
    run(ZPP_MOMENTS_INT8);
    puts("no master: 3 kinds of moments");
    return 0;
}
