/* SPDX-License-Identifier: Apache-2.0
 *
 * Rounds of staging: a rank fills a slot of its own staging memory, publishes the round, and peers take it, that is,
 * read it. A track has ZPP_STAGE_SLOTS slots; one is filled again when all peers have taken what it held. A rank takes
 * a round as soon as it is there, while it is in the cache, and fills ahead otherwise: with a core for each rank they
 * go in step, and ranks that share cores do several rounds each time they run instead of waiting for each other in
 * every one.
 *
 * And phases of in-place collectives, which read the peers' tensors where they lie.
 */
#include "internal.h"

#define TRACK_OFFSET(field, track) \
    (offsetof(struct zpp_control, field) + (size_t)(track) * sizeof(struct zpp_line_word))

static struct zpp_gate free_slot(const struct zpp_comm *comm, int track) {
    return zpp_gate_at(comm, TRACK_OFFSET(taken, track), comm->staged[track] + 1 - ZPP_STAGE_SLOTS);
}

static struct zpp_gate next_round(const struct zpp_comm *comm, int track) {
    return zpp_gate_at(comm, TRACK_OFFSET(staged, track), comm->taken[track] + 1);
}

static bool open_now(const struct zpp_comm *comm, struct zpp_gate gate) {
    for (int r = 0; r < comm->ranks; r++)
        if (r != comm->rank && !zpp_word_reached(zpp_gate_word(&gate, r), gate.target)) return false;
    return true;
}

static zpp_status wait_for(struct zpp_turn *turn, struct zpp_gate gate, struct zpp_err *err) {
    return zpp_await_all(turn, &gate, err);
}

zpp_status zpp_stage_begin(struct zpp_turn *turn, int track, uint8_t **slot, struct zpp_err *err) {
    struct zpp_comm *comm = turn->comm;
    const zpp_status status = wait_for(turn, free_slot(comm, track), err);
    if (status == ZPP_OK) *slot = zpp_stage(comm, comm->rank, track, comm->staged[track]);
    return status;
}

void zpp_stage_publish(struct zpp_comm *comm, int track) {
    zpp_word_raise(&zpp_control(comm, comm->rank)->staged[track].word, ++comm->staged[track]);
}

zpp_status zpp_take_begin(struct zpp_turn *turn, int track, struct zpp_err *err) {
    return wait_for(turn, next_round(turn->comm, track), err);
}

void zpp_take_end(struct zpp_comm *comm, int track) {
    zpp_word_raise(&zpp_control(comm, comm->rank)->taken[track].word, ++comm->taken[track]);
}

/* --- pumps ------------------------------------------------------------------------------------------------------- */

static void do_fill(struct zpp_comm *comm, const struct zpp_pump *pump, size_t round) {
    pump->fill(pump->ctx, round, zpp_stage(comm, comm->rank, 0, comm->staged[0]));
    zpp_stage_publish(comm, 0);
}

static void do_take(struct zpp_comm *comm, const struct zpp_pump *pump, size_t round) {
    pump->take(pump->ctx, round, comm->taken[0]);
    zpp_take_end(comm, 0);
}

static zpp_status run_once(struct zpp_turn *turn, const struct zpp_pump *pump, struct zpp_err *err) {
    struct zpp_comm *comm = turn->comm;
    size_t filled = 0, taken = 0;
    while (taken < pump->rounds) {
        const bool may_take = taken < filled, may_fill = filled < pump->rounds && filled - taken < ZPP_STAGE_SLOTS;
        if (may_take && open_now(comm, next_round(comm, 0)))
            do_take(comm, pump, taken++);
        else if (may_fill && open_now(comm, free_slot(comm, 0)))
            do_fill(comm, pump, filled++);
        else {
            /* My slots are full or all is filled, so what is left is to take; peers fill without waiting for that. */
            const zpp_status status = wait_for(turn, may_take ? next_round(comm, 0) : free_slot(comm, 0), err);
            if (status != ZPP_OK) return status;
        }
    }
    return ZPP_OK;
}

static void do_pass(struct zpp_comm *comm, const struct zpp_pump *pump, size_t round) {
    pump->pass(pump->ctx, round, comm->taken[0], zpp_stage(comm, comm->rank, 1, comm->staged[1]));
    zpp_take_end(comm, 0);
    zpp_stage_publish(comm, 1);
}

static void do_take_second(struct zpp_comm *comm, const struct zpp_pump *pump, size_t round) {
    pump->take(pump->ctx, round, comm->taken[1]);
    zpp_take_end(comm, 1);
}

/* Two tracks: rounds are filled into track 0, passed from there into track 1, taken from there. The latest stage that
 * can go on does; if none can, wait for the earliest reason: peers always can do what that stage needs, because it
 * needs only what they do before the stage this rank is at. */
static zpp_status run_twice(struct zpp_turn *turn, const struct zpp_pump *pump, struct zpp_err *err) {
    struct zpp_comm *comm = turn->comm;
    size_t filled = 0, passed = 0, taken = 0;
    while (taken < pump->rounds) {
        const bool may_take = taken < passed, may_pass = passed < filled && passed - taken < ZPP_STAGE_SLOTS;
        const bool may_fill = filled < pump->rounds && filled - passed < ZPP_STAGE_SLOTS;
        if (may_take && open_now(comm, next_round(comm, 1)))
            do_take_second(comm, pump, taken++);
        else if (may_pass && open_now(comm, next_round(comm, 0)) && open_now(comm, free_slot(comm, 1)))
            do_pass(comm, pump, passed++);
        else if (may_fill && open_now(comm, free_slot(comm, 0)))
            do_fill(comm, pump, filled++);
        else {
            const zpp_status status = wait_for(turn,
                                               may_take   ? next_round(comm, 1)
                                               : may_pass ? next_round(comm, 0)
                                                          : free_slot(comm, 0),
                                               err);
            if (status != ZPP_OK) return status;
        }
    }
    return ZPP_OK;
}

zpp_status zpp_pump_run(struct zpp_turn *turn, const struct zpp_pump *pump, struct zpp_err *err) {
    const uint64_t start_ns = zpp_now_ns();
    const zpp_status status = pump->pass ? run_twice(turn, pump, err) : run_once(turn, pump, err);
    if (status == ZPP_OK) zpp_route_learn(turn->comm, zpp_now_ns() - start_ns);
    return status;
}

uint32_t zpp_step_pass(struct zpp_comm *comm) {
    zpp_word_raise(&zpp_control(comm, comm->rank)->step.word, ++comm->step);
    return comm->step;
}

zpp_status zpp_step_wait(struct zpp_turn *turn, uint32_t step, struct zpp_err *err) {
    return wait_for(turn, zpp_gate_at(turn->comm, offsetof(struct zpp_control, step), step), err);
}

zpp_status zpp_step_last(struct zpp_turn *turn, uint64_t start_ns, struct zpp_err *err) {
    const zpp_status status = zpp_step_wait(turn, zpp_step_pass(turn->comm), err);
    if (status == ZPP_OK) zpp_route_learn(turn->comm, zpp_now_ns() - start_ns);
    return status;
}
