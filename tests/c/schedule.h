/* SPDX-License-Identifier: Apache-2.0
 *
 * What is drawn for one schedule of test_zero_schedules.c: the same on all ranks, and a function of the seed alone.
 */
#ifndef ZPP_TESTS_SCHEDULE_H
#define ZPP_TESTS_SCHEDULE_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "store_table.h"

enum { MAX_RANKS = 4, MAX_UNITS = 6, MAX_PARAMS = 4, STEPS = 3, MAX_GROUPS = 3 };

static uint64_t next_random(uint64_t *state) { /* splitmix64 */
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* What all ranks agree on. */
struct plan {
    int ranks, stage, units;
    bool host_copy;
    bool backward_step;  /* units are stepped inside the backward, */
    bool own_update;     /* and by an update of the caller's, as an optimizer in Python has one */
    int exact_steps;     /* then steps are delayed; STEPS: they never are */
    bool narrow; /* gradients travel in bf16, which holds these exactly */
    double grads_fraction; /* of the reduced gradients in a file; 0: none */
    size_t prefetch_bytes, bucket_bytes;
    size_t params[MAX_UNITS], elems[MAX_UNITS][MAX_PARAMS];
    int trained_from[MAX_UNITS]; /* the step with which a unit begins to be trained; STEPS: it never is */
    int micro_steps[STEPS];
    bool passes;             /* the micro-steps of a step are graphs of one pass (zero/pass.c), */
    bool pass_each;          /* each of which is reduced */
    int groups, parts[MAX_GROUPS]; /* rank r holds part r % parts of a group's units; all ranks hold group 0 alike */
    int group[MAX_UNITS];
    struct store_table store;
};

static int parts_of(const struct plan *plan, int unit) { return plan->parts[plan->group[unit]]; }

/* Half of the plans have a group of one rank a part, on four ranks also of two, or both of them. */
static void draw_groups(struct plan *plan, uint64_t *random) {
    plan->groups = plan->parts[0] = 1;
    if (next_random(random) % 2 && plan->ranks > 1) {
        const uint64_t which = plan->ranks == 4 ? next_random(random) % 4 : 0;
        if (which != 1) plan->parts[plan->groups++] = plan->ranks;
        if (which) plan->parts[plan->groups++] = 2;
    }
    for (int unit = 0; unit < plan->units; unit++)
        plan->group[unit] = (int)(next_random(random) % (uint64_t)plan->groups);
}

static void draw_plan(struct plan *plan, uint64_t *random) {
    static const size_t prefetch[] = { 0, 4096, 1 << 20 }, buckets[] = { 0, 4096, 1 << 16 };
    memset(plan, 0, sizeof *plan);
    plan->ranks = 2 + (int)(next_random(random) % (MAX_RANKS - 1));
    plan->stage = (int)(next_random(random) % 6);
    plan->host_copy = plan->stage == 5;
    if (plan->stage > 3) plan->stage = 3; /* stage 3 is drawn half of the time */
    plan->units = 2 + (int)(next_random(random) % (MAX_UNITS - 1));
    plan->prefetch_bytes = prefetch[next_random(random) % 3];
    plan->bucket_bytes = buckets[next_random(random) % 3];
    for (int unit = 0; unit < plan->units; unit++) {
        plan->params[unit] = 1 + (size_t)(next_random(random) % MAX_PARAMS);
        plan->trained_from[unit] = next_random(random) % 4 ? 0 : 1 + (int)(next_random(random) % STEPS);
        for (size_t i = 0; i < plan->params[unit]; i++) plan->elems[unit][i] = (size_t)(next_random(random) % 700);
    }
    if (plan->stage >= 2 && next_random(random) % 24 == 0) { /* an engine each: slow to make */
        plan->grads_fraction = next_random(random) % 2 ? 1.0 : 0.5;
        if (next_random(random) % 3 == 0) plan->ranks = 1;
        for (int unit = 0; unit < plan->units; unit++) /* units are not unfrozen there */
            if (plan->trained_from[unit]) plan->trained_from[unit] = STEPS;
    }
    plan->narrow = next_random(random) % 3 == 0;
    const bool rarely = plan->grads_fraction <= 0.0; /* seldom drawn, and shared between threads then */
    plan->backward_step = plan->stage > 0 && (next_random(random) % 3 == 0) == rarely;
    plan->own_update = next_random(random) % 3 == 0;
    plan->exact_steps = STEPS;
    if (plan->stage > 0 && !plan->backward_step && next_random(random) % 2)
        plan->exact_steps = (int)(next_random(random) % 2);
    draw_groups(plan, random);
    for (int i = 0; i < STEPS; i++) plan->micro_steps[i] = plan->stage == 0 ? 1 : 1 + (int)(next_random(random) % 2);
    plan->passes = !plan->backward_step && plan->grads_fraction <= 0.0 && next_random(random) % 2;
    plan->pass_each = plan->stage > 0 && next_random(random) % 3 == 0;
    for (int i = 0; i < STEPS && plan->passes && plan->stage > 0; i++)
        plan->micro_steps[i] += (int)(next_random(random) % 3);
}

/* --- values: functions of the plan, so that every rank knows those of all --- */

static float first_value(int unit, int part, size_t elem) {
    return (float)((unit * 1009 + part * 501 + (int)(elem % 997)) % 4096);
}

/* A multiple of 12, so that the mean over 1..4 ranks is exact. Zero where this rank has no gradient. */
static float gradient_of(int rank, int unit, size_t elem, int step, int micro) {
    return (float)(12 * ((rank * 7 + unit * 5 + (int)(elem % 13) + step * 3 + micro) % 11 - 5));
}

static bool has_gradient(const struct plan *plan, int rank, int unit, size_t param, int step, int micro) {
    if (plan->backward_step && unit % 3) return true; /* the others come at the end of the backward */
    return (rank * 3 + unit * 5 + (int)param * 7 + step * 11 + micro * 13) % 4 != 0;
}

static bool is_trained(const struct plan *plan, int unit, int step) {
    return step >= plan->trained_from[unit];
}

#endif
