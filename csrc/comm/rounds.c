/* SPDX-License-Identifier: Apache-2.0
 *
 * Rounds of staging: a rank fills a slot of its own staging memory, publishes the round, and peers read it. Two slots a
 * track, so filling round k + 1 overlaps the peers' reading of round k; a slot is refilled when all peers have taken
 * it. And phases of in-place collectives, which read the peers' tensors where they lie.
 */
#include "internal.h"

#define TRACK_OFFSET(field, track) \
    (offsetof(struct zpp_control, field) + (size_t)(track) * sizeof(struct zpp_line_word))

zpp_status zpp_stage_begin(struct zpp_turn *turn, int track, uint8_t **slot, struct zpp_err *err) {
    struct zpp_comm *comm = turn->comm;
    const uint32_t round = comm->staged[track];
    const struct zpp_gate gate = zpp_gate_at(comm, TRACK_OFFSET(taken, track), round + 1 - ZPP_STAGE_SLOTS);
    const zpp_status status = zpp_await_all(turn, &gate, err);
    if (status != ZPP_OK) return status;
    *slot = zpp_stage(comm, comm->rank, track, round);
    return ZPP_OK;
}

void zpp_stage_publish(struct zpp_comm *comm, int track) {
    zpp_word_raise(&zpp_control(comm, comm->rank)->staged[track].word, ++comm->staged[track]);
}

zpp_status zpp_take_begin(struct zpp_turn *turn, int track, struct zpp_err *err) {
    struct zpp_comm *comm = turn->comm;
    const struct zpp_gate gate = zpp_gate_at(comm, TRACK_OFFSET(staged, track), comm->taken[track] + 1);
    return zpp_await_all(turn, &gate, err);
}

void zpp_take_end(struct zpp_comm *comm, int track) {
    zpp_word_raise(&zpp_control(comm, comm->rank)->taken[track].word, ++comm->taken[track]);
}

uint32_t zpp_step_pass(struct zpp_comm *comm) {
    zpp_word_raise(&zpp_control(comm, comm->rank)->step.word, ++comm->step);
    return comm->step;
}

zpp_status zpp_step_wait(struct zpp_turn *turn, uint32_t step, struct zpp_err *err) {
    const struct zpp_gate gate = zpp_gate_at(turn->comm, offsetof(struct zpp_control, step), step);
    return zpp_await_all(turn, &gate, err);
}
