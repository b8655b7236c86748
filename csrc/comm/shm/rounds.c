/* SPDX-License-Identifier: Apache-2.0
 *
 * Rounds of staging: a rank fills a slot of its own staging memory, publishes the round, and peers take it, that is,
 * read it. A stage has ZPP_STAGE_SLOTS slots; one is filled again when all peers have taken what it held. A rank takes
 * a round as soon as it is published, while it is in the cache, and fills ahead otherwise: ranks with a core each
 * advance in step, and ranks that share cores do several rounds each time they run instead of waiting for each other
 * in every one.
 *
 * This file also has the phases of in-place collectives, which read the peers' tensors where they lie.
 */
#include "../internal.h"

#define TRACK_OFFSET(field, stage) \
    (offsetof(struct zpp_control, field) + (size_t)(stage) * sizeof(struct zpp_line_counter))

static struct zpp_wait_target free_slot(const struct zpp_comm *comm, int stage) {
    return zpp_target_at(comm, TRACK_OFFSET(taken, stage), comm->staged[stage] + 1 - ZPP_STAGE_SLOTS);
}

static struct zpp_wait_target next_round(const struct zpp_comm *comm, int stage) {
    return zpp_target_at(comm, TRACK_OFFSET(staged, stage), comm->taken[stage] + 1);
}

static bool open_now(const struct zpp_comm *comm, struct zpp_wait_target wait_target) {
    for (int r = 0; r < comm->ranks; r++)
        if (r != comm->rank
            && !zpp_counter_reached(zpp_target_counter(&wait_target, r), wait_target.target)) return false;
    return true;
}

static zpp_status wait_for(struct zpp_wait_ctx *wait_ctx, struct zpp_wait_target wait_target, struct zpp_err *err) {
    return zpp_await_all(wait_ctx, &wait_target, err);
}

zpp_status zpp_stage_begin(struct zpp_wait_ctx *wait_ctx, int stage, uint8_t **slot, struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    const zpp_status status = wait_for(wait_ctx, free_slot(comm, stage), err);
    if (status == ZPP_OK) *slot = zpp_stage(comm, comm->rank, stage, comm->staged[stage]);
    return status;
}

void zpp_stage_publish(struct zpp_comm *comm, int stage) {
    zpp_counter_raise(&zpp_control(comm, comm->rank)->staged[stage].counter, ++comm->staged[stage]);
}

zpp_status zpp_take_begin(struct zpp_wait_ctx *wait_ctx, int stage, struct zpp_err *err) {
    return wait_for(wait_ctx, next_round(wait_ctx->comm, stage), err);
}

void zpp_take_end(struct zpp_comm *comm, int stage) {
    zpp_counter_raise(&zpp_control(comm, comm->rank)->taken[stage].counter, ++comm->taken[stage]);
}

/* --- pipelines --------------------------------------------------------------------------------------------------- */

static void do_fill(struct zpp_comm *comm, const struct zpp_pipeline *pipeline, size_t round) {
    pipeline->fill(pipeline->ctx, round, zpp_stage(comm, comm->rank, 0, comm->staged[0]));
    zpp_stage_publish(comm, 0);
}

static void do_take(struct zpp_comm *comm, const struct zpp_pipeline *pipeline, size_t round) {
    pipeline->take(pipeline->ctx, round, comm->taken[0]);
    zpp_take_end(comm, 0);
}

static zpp_status run_once(struct zpp_wait_ctx *wait_ctx, const struct zpp_pipeline *pipeline, struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    size_t filled = 0, taken = 0;
    while (taken < pipeline->rounds) {
        const bool may_take = taken < filled, may_fill = filled < pipeline->rounds && filled - taken < ZPP_STAGE_SLOTS;
        if (may_take && open_now(comm, next_round(comm, 0)))
            do_take(comm, pipeline, taken++);
        else if (may_fill && open_now(comm, free_slot(comm, 0)))
            do_fill(comm, pipeline, filled++);
        else {
            /* This rank's slots are full or all is filled, so it can only take; peers fill without waiting for
             * that. */
            const zpp_status status = wait_for(wait_ctx, may_take ? next_round(comm, 0) : free_slot(comm, 0), err);
            if (status != ZPP_OK) return status;
        }
    }
    return ZPP_OK;
}

static void do_pass(struct zpp_comm *comm, const struct zpp_pipeline *pipeline, size_t round) {
    pipeline->pass(pipeline->ctx, round, comm->taken[0], zpp_stage(comm, comm->rank, 1, comm->staged[1]));
    zpp_take_end(comm, 0);
    zpp_stage_publish(comm, 1);
}

static void do_take_second(struct zpp_comm *comm, const struct zpp_pipeline *pipeline, size_t round) {
    pipeline->take(pipeline->ctx, round, comm->taken[1]);
    zpp_take_end(comm, 1);
}

struct progress {
    size_t filled, passed, taken; /* rounds */
    bool may_take, may_pass, may_fill;
};

/* Run the latest step that is not blocked. Return false if all are. */
static bool step_twice(struct zpp_comm *comm, const struct zpp_pipeline *pipeline, struct progress *at) {
    if (at->may_take && open_now(comm, next_round(comm, 1)))
        do_take_second(comm, pipeline, at->taken++);
    else if (at->may_pass && open_now(comm, next_round(comm, 0)) && open_now(comm, free_slot(comm, 1)))
        do_pass(comm, pipeline, at->passed++);
    else if (at->may_fill && open_now(comm, free_slot(comm, 0)))
        do_fill(comm, pipeline, at->filled++);
    else
        return false;
    return true;
}

static struct zpp_wait_target earliest(const struct zpp_comm *comm, const struct progress *at) {
    if (at->may_take) return next_round(comm, 1);
    return at->may_pass ? next_round(comm, 0) : free_slot(comm, 0);
}

/* Two stages: rounds are filled into stage 0, passed from there into stage 1, taken from there. The latest step that
 * is not blocked runs; if all are blocked, the rank waits for the earliest one, which depends only on steps that peers
 * can always run. */
static zpp_status run_twice(struct zpp_wait_ctx *wait_ctx, const struct zpp_pipeline *pipeline, struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    struct progress at = {0};
    while (at.taken < pipeline->rounds) {
        at.may_take = at.taken < at.passed;
        at.may_pass = at.passed < at.filled && at.passed - at.taken < ZPP_STAGE_SLOTS;
        at.may_fill = at.filled < pipeline->rounds && at.filled - at.passed < ZPP_STAGE_SLOTS;
        if (step_twice(comm, pipeline, &at)) continue;
        const zpp_status status = wait_for(wait_ctx, earliest(comm, &at), err);
        if (status != ZPP_OK) return status;
    }
    return ZPP_OK;
}

zpp_status zpp_pipeline_run(struct zpp_wait_ctx *wait_ctx, const struct zpp_pipeline *pipeline, struct zpp_err *err) {
    const uint64_t start_ns = zpp_now_ns();
    const zpp_status status = pipeline->pass ? run_twice(wait_ctx, pipeline, err) : run_once(wait_ctx, pipeline, err);
    if (status == ZPP_OK) zpp_store_policy_learn(wait_ctx->comm, zpp_now_ns() - start_ns);
    return status;
}

uint32_t zpp_step_pass(struct zpp_comm *comm) {
    zpp_counter_raise(&zpp_control(comm, comm->rank)->step.counter, ++comm->step);
    return comm->step;
}

zpp_status zpp_step_wait(struct zpp_wait_ctx *wait_ctx, uint32_t step, struct zpp_err *err) {
    return wait_for(wait_ctx, zpp_target_at(wait_ctx->comm, offsetof(struct zpp_control, step), step), err);
}

zpp_status zpp_step_last(struct zpp_wait_ctx *wait_ctx, uint64_t start_ns, struct zpp_err *err) {
    const zpp_status status = zpp_step_wait(wait_ctx, zpp_step_pass(wait_ctx->comm), err);
    if (status == ZPP_OK) zpp_store_policy_learn(wait_ctx->comm, zpp_now_ns() - start_ns);
    return status;
}
