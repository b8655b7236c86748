/* SPDX-License-Identifier: Apache-2.0
 *
 * step_ahead.h. Outcomes lie in a ring by the numbers of their steps:
 *
 *   taken  <=  ready  <=  seen  <=  sent        sent - taken <= ZPP_CLIP_AHEAD
 *
 * A board has more places than steps can be under way, so that a rank never writes one that a peer may still read.
 *
 * Where NCCL moves what GPUs exchange, each rank has boards of all ranks, and fills those of the others: places go up
 * to `staging`, an all-gather follows, and places of the peers go down.
 */
#include "step_ahead.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../base/mem.h"
#include "internal.h"
#include "on_device.h"

enum { PLACES = 2 * ZPP_CLIP_AHEAD };

struct zpp_step_ahead {
    const struct zpp_stepper *stepper;
    zpp_step_device *step;
    zpp_device *device;
    /* boards */
    zpp_region *region; /* of several ranks; NULL: `alone` */
    void *alone;
    unsigned char *staging; /* NCCL: a place of each rank, in memory of the device */
    int pinned;           /* parts of so many ranks */
    size_t groups, names; /* sums of units, and the most pieces of one rank */
    size_t place_bytes;
    /* the ring */
    struct zpp_step_outcome outcomes[ZPP_CLIP_AHEAD];
    uint64_t taken, ready, seen, sent;
    uint64_t measured; /* norms so far */
    uint64_t skipped;  /* steps among those that were taken from here */
    /* of the call at hand */
    const struct zpp_wait *wait;
    uint8_t *counting; /* [params] */
    size_t params;     /* of all units */
};

/* --- boards ------------------------------------------------------------------------------------------------------- */

/* One place: how many pieces, their names, the sums of units, and those of pieces. */
struct place {
    uint64_t *count;
    struct zpp_step_name *names;
    double *sums; /* [groups], then [names] */
};

static size_t part_bytes(const zpp_step_ahead *ahead) {
    const size_t page = zpp_page_bytes();
    return (PLACES * ahead->place_bytes + page - 1) / page * page;
}

static void *part_of(const zpp_step_ahead *ahead, int rank) {
    if (ahead->region) return zpp_region_base(ahead->region, rank);
    return ahead->staging ? (unsigned char *)ahead->alone + (size_t)rank * part_bytes(ahead) : ahead->alone;
}

static struct place place_of(const zpp_step_ahead *ahead, int rank, uint64_t measured) {
    unsigned char *at = (unsigned char *)part_of(ahead, rank) + measured % PLACES * ahead->place_bytes;
    uint64_t *count = (uint64_t *)(void *)at;
    struct zpp_step_name *names = (struct zpp_step_name *)(void *)(count + 1);
    return (struct place){count, names, (double *)(void *)(names + ahead->names)};
}

static int boards(const zpp_step_ahead *ahead) {
    return ahead->region || ahead->staging ? zpp_zero_ranks(ahead->stepper->zero) : 1;
}

/* The regions of ranks know nothing of reductions: a rank that still reduces would let the others wait in the call for
 * the timeout. The ring of descriptors is asked first, because it names both sides at once. */
static zpp_status meet(zpp_zero *zero, uint64_t bytes, const struct zpp_wait *wait, struct zpp_err *err) {
    uint64_t *all = calloc((size_t)zpp_zero_ranks(zero), sizeof *all);
    if (!all) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the votes of %d ranks", zpp_zero_ranks(zero));
    const zpp_status status = zpp_zero_agree(zero, &bytes, sizeof bytes, all, wait, err);
    free(all);
    return status;
}

static size_t staging_bytes(const zpp_step_ahead *ahead) {
    return (size_t)zpp_zero_ranks(ahead->stepper->zero) * ahead->place_bytes;
}

static zpp_status make_staging(zpp_step_ahead *ahead, struct zpp_err *err) {
    void *memory = NULL;
    if (!zpp_zero_by_nccl(ahead->stepper->zero)) return ZPP_OK;
    const zpp_status status = zpp_device_alloc(ahead->device, staging_bytes(ahead), &memory, err);
    ahead->staging = memory;
    return status;
}

static zpp_status make_boards(zpp_step_ahead *ahead, const struct zpp_wait *wait, struct zpp_err *err) {
    zpp_zero *zero = ahead->stepper->zero;
    const bool local = zpp_zero_grads_are_local(zero);
    const size_t times = local ? (size_t)zpp_zero_ranks(zero) : 1;
    ahead->groups = (size_t)ahead->stepper->units_count * times;
    ahead->names = ahead->params * times;
    ahead->place_bytes = sizeof(uint64_t) + ahead->names * sizeof(struct zpp_step_name) +
                         (ahead->groups + ahead->names) * sizeof(double);
    zpp_status status = meet(zero, part_bytes(ahead), wait, err);
    if (status == ZPP_OK) status = make_staging(ahead, err);
    if (status != ZPP_OK) return status;
    if (zpp_zero_ranks(zero) > 1 && !ahead->staging)
        status = zpp_region_create(zero->options.comm, ZPP_REGION_PER_RANK, part_bytes(ahead), &ahead->region, err);
    else if (!(ahead->alone = aligned_alloc(zpp_page_bytes(), (size_t)boards(ahead) * part_bytes(ahead))))
        status = zpp_fail(err, ZPP_NOMEM, "zero: no memory for the sums of %zu units", ahead->groups);
    while (status == ZPP_OK && ahead->pinned < boards(ahead)) {
        status = zpp_device_pin(ahead->device, part_of(ahead, ahead->pinned), part_bytes(ahead), err);
        if (status == ZPP_OK) ahead->pinned++;
    }
    return status;
}

static void write_names(zpp_step_ahead *ahead, const struct zpp_norm_pieces *pieces) {
    const struct place place = place_of(ahead, zpp_zero_rank(ahead->stepper->zero), ahead->measured);
    const size_t units = (size_t)ahead->stepper->units_count;
    *place.count = pieces->firsts[pieces->groups];
    for (size_t g = 0; g < pieces->groups; g++)
        for (size_t k = pieces->firsts[g]; k < pieces->firsts[g + 1]; k++)
            place.names[k] = (struct zpp_step_name){(uint32_t)(g % units), (uint32_t)pieces->params[k]};
}

/* Every rank says how many outcomes it has seen, and the least of these are ready. Hosts meet here after they enqueued
 * their signals and before the awaits that these answer. */
static zpp_status agree(zpp_step_ahead *ahead, struct zpp_err *err) {
    zpp_zero *zero = ahead->stepper->zero;
    const int ranks = zpp_zero_ranks(zero);
    uint64_t *all = calloc((size_t)ranks, sizeof *all);
    if (!all) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the votes of %d ranks", ranks);
    const zpp_status status = zpp_zero_agree(zero, &ahead->seen, sizeof ahead->seen, all, ahead->wait, err);
    uint64_t least = ahead->seen;
    for (int rank = 0; rank < ranks; rank++) least = all[rank] < least ? all[rank] : least;
    if (status == ZPP_OK) ahead->ready = least;
    free(all);
    return status;
}

/* The place of this rank goes to all, and those of the others come, sums for kernels and names for the host. */
static zpp_status exchange(zpp_step_ahead *ahead, zpp_stream *stream, const double **all, struct zpp_err *err) {
    zpp_zero *zero = ahead->stepper->zero;
    const int ranks = zpp_zero_ranks(zero), own = zpp_zero_rank(zero);
    const size_t bytes = ahead->place_bytes;
    unsigned char *mine = ahead->staging + (size_t)own * bytes;
    zpp_status status = zpp_stream_copy(stream, mine, place_of(ahead, own, ahead->measured).count, bytes, err);
    if (status == ZPP_OK) status = zpp_by_nccl_all_gather(zero->groups[0], stream, 0, ahead->staging, mine, bytes, err);
    for (int rank = 0; rank < ranks && status == ZPP_OK; rank++) {
        const struct place place = place_of(ahead, rank, ahead->measured);
        const unsigned char *came = ahead->staging + (size_t)rank * bytes;
        const size_t sums_offset = (size_t)((unsigned char *)place.sums - (unsigned char *)place.count);
        all[rank] = (const double *)(const void *)(came + sums_offset);
        if (rank != own) status = zpp_stream_copy(stream, place.count, came, bytes, err);
    }
    return status;
}

static zpp_status share_boards(zpp_step_ahead *ahead, zpp_stream *stream, const double **all, struct zpp_err *err) {
    zpp_zero *zero = ahead->stepper->zero;
    zpp_counters *counters = zero->on_device->counters;
    const uint64_t n = ahead->measured;
    zpp_status status = zpp_counters_signal(counters, stream, ZPP_COUNTER_MEASURED, n, err);
    if (status == ZPP_OK) status = agree(ahead, err);
    if (status == ZPP_OK) status = zpp_counters_await(counters, stream, ZPP_COUNTER_MEASURED, n, err);
    for (int rank = 0; rank < zpp_zero_ranks(zero); rank++) all[rank] = place_of(ahead, rank, n).sums;
    return status;
}

static zpp_status share(void *arg, zpp_stream *stream, const struct zpp_norm_pieces *pieces, const double *own,
                        const double **all, struct zpp_err *err) {
    zpp_step_ahead *ahead = arg;
    zpp_zero *zero = ahead->stepper->zero;
    const uint64_t n = ahead->measured;
    const bool shares = zpp_zero_ranks(zero) > 1 && !zpp_zero_grads_are_local(zero);
    const size_t count = pieces->groups + pieces->firsts[pieces->groups];
    write_names(ahead, pieces);
    zpp_status status =
        zpp_stream_copy(stream, place_of(ahead, zpp_zero_rank(zero), n).sums, own, count * sizeof(double), err);
    if (status != ZPP_OK) return status;
    if (!shares) return agree(ahead, err);
    if (ahead->staging) {
        status = exchange(ahead, stream, all, err);
        if (status == ZPP_OK) status = agree(ahead, err);
    } else {
        status = share_boards(ahead, stream, all, err);
    }
    zpp_comm_count(zero->options.comm, ZPP_TRAFFIC_ALL_GATHER,
                   pieces->groups * sizeof(double) * (size_t)(zpp_zero_ranks(zero) - 1));
    return status;
}

/* --- life --------------------------------------------------------------------------------------------------------- */

bool zpp_step_ahead_works(const zpp_zero *zero) {
    return zpp_zero_shards_on_device(zero) && zero->groups_count <= 1 && !zpp_zero_has_job(zero);
}

static zpp_status make(zpp_step_ahead *ahead, double loss_scale, uint64_t good_steps, const struct zpp_wait *wait,
                       struct zpp_err *err) {
    zpp_zero *zero = ahead->stepper->zero;
    const struct zpp_step_device_options options = {.stream = zpp_zero_compute(zero),
                                                    .loss_scale = loss_scale,
                                                    .good_steps = good_steps,
                                                    .halt = zero->on_device->halt,
                                                    .share = share,
                                                    .share_arg = ahead};
    ahead->device = zpp_stream_device(options.stream);
    for (int u = 0; u < ahead->stepper->units_count; u++) ahead->params += ahead->stepper->units[u].unit->params;
    ahead->counting = calloc(ahead->params + 1, sizeof *ahead->counting);
    bool memory = ahead->counting;
    for (int at = 0; at < ZPP_CLIP_AHEAD && memory; at++) {
        ahead->outcomes[at].counted = calloc(ahead->params + 1, sizeof *ahead->outcomes[at].counted);
        memory = ahead->outcomes[at].counted;
    }
    if (!memory) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for steps of %zu parameters", ahead->params);
    const zpp_status status = make_boards(ahead, wait, err);
    return status == ZPP_OK ? zpp_step_device_create(&options, &ahead->step, err) : status;
}

zpp_status zpp_step_ahead_create(const struct zpp_stepper *stepper, double loss_scale, uint64_t good_steps,
                                 const struct zpp_wait *wait, zpp_step_ahead **out, struct zpp_err *err) {
    zpp_step_ahead *ahead = calloc(1, sizeof *ahead);
    if (!ahead) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for steps ahead of the device");
    ahead->stepper = stepper;
    const zpp_status status = make(ahead, loss_scale, good_steps, wait, err);
    if (status != ZPP_OK) zpp_step_ahead_destroy(ahead);
    else *out = ahead;
    return status;
}

void zpp_step_ahead_destroy(zpp_step_ahead *ahead) {
    if (!ahead) return;
    zpp_step_device_destroy(ahead->step); /* waits */
    while (ahead->pinned > 0) zpp_device_unpin(ahead->device, part_of(ahead, --ahead->pinned));
    if (ahead->staging) zpp_device_free(ahead->device, ahead->staging, staging_bytes(ahead));
    zpp_region_destroy(ahead->region);
    free(ahead->alone);
    for (int at = 0; at < ZPP_CLIP_AHEAD; at++) {
        free(ahead->outcomes[at].counted);
        free(ahead->outcomes[at].bad);
    }
    free(ahead->counting);
    free(ahead);
}

struct zpp_clip_record *zpp_step_ahead_record(const zpp_step_ahead *ahead) {
    return zpp_step_device_record(ahead->step);
}

/* --- outcomes ----------------------------------------------------------------------------------------------------- */

static struct zpp_step_outcome *outcome_of(zpp_step_ahead *ahead, uint64_t number) {
    return &ahead->outcomes[number % ZPP_CLIP_AHEAD];
}

/* The names of one rank's pieces that are not finite. */
static bool append_bad(const struct zpp_step_ahead *ahead, int rank, struct zpp_step_outcome *outcome) {
    const struct place place = place_of(ahead, rank, outcome->measured);
    struct zpp_step_name *bad = realloc(outcome->bad, (outcome->bad_count + *place.count + 1) * sizeof *outcome->bad);
    if (!bad) return false;
    outcome->bad = bad;
    for (size_t k = 0; k < *place.count; k++)
        if (!isfinite(place.sums[ahead->groups + k])) bad[outcome->bad_count++] = place.names[k];
    return true;
}

/* See the next outcome. A step that was skipped gets its names while the boards have them. */
static zpp_status see(zpp_step_ahead *ahead, const struct zpp_wait *wait, struct zpp_err *err) {
    struct zpp_step_outcome *outcome = outcome_of(ahead, ahead->seen);
    const zpp_status status =
        zpp_step_device_look(ahead->step, ahead->seen % ZPP_CLIP_AHEAD, wait, &outcome->record, err);
    if (status != ZPP_OK) return status;
    outcome->bad_count = 0;
    const int own = zpp_zero_rank(ahead->stepper->zero);
    const bool local = zpp_zero_grads_are_local(ahead->stepper->zero);
    bool memory = true;
    for (int rank = 0; rank < boards(ahead) && outcome->record.skip && memory; rank++)
        if (!local || rank == own || boards(ahead) == 1) memory = append_bad(ahead, rank, outcome);
    if (!memory) return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the names of gradients that are not finite");
    ahead->seen++;
    return ZPP_OK;
}

/* See what is there, and wait for all up to number `until`. */
static zpp_status see_until(zpp_step_ahead *ahead, uint64_t until, const struct zpp_wait *wait, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    while (ahead->seen < ahead->sent && status == ZPP_OK) status = see(ahead, ahead->seen < until ? wait : NULL, err);
    return status == ZPP_AGAIN ? ZPP_OK : status;
}

/* Count steps up or down. */
static void count(zpp_step_ahead *ahead, const uint8_t *counted, int64_t by) {
    for (int u = 0; u < ahead->stepper->units_count; u++) {
        const struct zpp_step_unit *owner = &ahead->stepper->units[u];
        for (size_t i = 0; i < owner->unit->params; i++, counted++)
            if (*counted) owner->states.steps[i] += by;
    }
}

const struct zpp_step_outcome *zpp_step_ahead_take(zpp_step_ahead *ahead) {
    if (ahead->taken == ahead->ready) return NULL;
    struct zpp_step_outcome *outcome = outcome_of(ahead, ahead->taken++);
    if (outcome->record.skip) count(ahead, outcome->counted, -1);
    ahead->skipped += outcome->record.skip;
    return outcome;
}

zpp_status zpp_step_ahead_settle(zpp_step_ahead *ahead, const struct zpp_wait *wait, struct zpp_err *err) {
    const zpp_status status = see_until(ahead, ahead->sent, wait, err);
    if (status == ZPP_OK) ahead->ready = ahead->sent;
    return status;
}

zpp_status zpp_step_ahead_newest(zpp_step_ahead *ahead, const struct zpp_wait *wait,
                                 const struct zpp_step_outcome **out, struct zpp_err *err) {
    const zpp_status status = see_until(ahead, ahead->sent, wait, err);
    if (status == ZPP_OK) *out = ahead->taken < ahead->sent ? outcome_of(ahead, ahead->sent - 1) : NULL;
    return status;
}

/* --- steps -------------------------------------------------------------------------------------------------------- */

/* Which parameters the next step counts. */
static void mark_counted(zpp_step_ahead *ahead) {
    uint8_t *counted = ahead->counting;
    for (int u = 0; u < ahead->stepper->units_count; u++) {
        const struct zpp_step_unit *owner = &ahead->stepper->units[u];
        struct zpp_step_shard shard;
        const bool steps =
            owner->unit->trainable && owner->states.steps && zpp_step_shard_of(ahead->stepper, u, false, &shard);
        for (size_t i = 0; i < owner->unit->params; i++) {
            const bool has = steps && (shard.grads ? shard.present[i] : owner->local_grads[i] != NULL);
            *counted++ = has && owner->states.groups[i] >= 0;
        }
    }
}

/* Up to which outcome the host has to wait before the next norm: all, if the next step counts other parameters than one
 * under way, or the boards have no place left; the oldest, if too many are under way. Equal on all ranks. */
static uint64_t needed(zpp_step_ahead *ahead) {
    mark_counted(ahead);
    for (uint64_t number = ahead->taken; number < ahead->sent; number++) {
        const struct zpp_step_outcome *outcome = outcome_of(ahead, number);
        if (memcmp(outcome->counted, ahead->counting, ahead->params)) return ahead->sent;
        if (ahead->measured + 1 - outcome->measured >= PLACES - 2) return ahead->sent;
    }
    return ahead->sent - ahead->taken == ZPP_CLIP_AHEAD ? ahead->taken + 1 : 0;
}

zpp_status zpp_step_ahead_measure(zpp_step_ahead *ahead, const struct zpp_clip_rule *rule, const struct zpp_wait *wait,
                                  struct zpp_err *err) {
    struct zpp_clip_rule one = *rule;
    zpp_status status = see_until(ahead, needed(ahead), wait, err);
    if (status != ZPP_OK) return status;
    one.parts = ZPP_CLIP_MEASURE;
    ahead->measured++;
    ahead->wait = wait;
    status = zpp_step_device_measure(ahead->step, ahead->stepper, &one, err);
    ahead->wait = NULL;
    return status;
}

zpp_status zpp_step_ahead_limit(zpp_step_ahead *ahead, const struct zpp_clip_rule *rule, struct zpp_err *err) {
    struct zpp_clip_rule one = *rule;
    one.parts = ZPP_CLIP_LIMIT;
    return zpp_step_device_clip(ahead->step, &one, err);
}

/* Launch the step as it is if `behind` steps under way were skipped: with counts that are so much lower. */
static zpp_status launch(zpp_step_ahead *ahead, const struct zpp_optim_segment *groups, uint64_t behind,
                         struct zpp_err *err) {
    struct zpp_step_plan plan;
    count(ahead, ahead->counting, -(int64_t)behind);
    zpp_status status = zpp_step_plan_make(ahead->stepper, groups, 1.0, false, &plan, err);
    if (status == ZPP_OK) {
        status = zpp_step_device_launch(ahead->step, &plan, behind, err);
        zpp_step_plan_drop(&plan);
        count(ahead, ahead->counting, -1);
    }
    count(ahead, ahead->counting, (int64_t)behind);
    return status;
}

zpp_status zpp_step_ahead_run(zpp_step_ahead *ahead, const struct zpp_optim_segment *groups,
                              const struct zpp_clip_rule *rule, struct zpp_err *err) {
    struct zpp_step_outcome *outcome = outcome_of(ahead, ahead->sent);
    struct zpp_clip_rule one = *rule;
    const uint64_t under_way = ahead->sent - ahead->taken;
    if (under_way == ZPP_CLIP_AHEAD)
        return zpp_fail(err, ZPP_STATE, "zero: %d steps are under way, and no outcome was taken", ZPP_CLIP_AHEAD);
    one.parts = ZPP_CLIP_SETTLE;
    one.settled = ahead->skipped;
    mark_counted(ahead);
    zpp_status status = zpp_step_device_clip(ahead->step, &one, err);
    for (uint64_t behind = 0; behind <= under_way && status == ZPP_OK; behind++)
        status = launch(ahead, groups, behind, err);
    if (status == ZPP_OK) status = zpp_step_device_send(ahead->step, ahead->sent % ZPP_CLIP_AHEAD, err);
    if (status != ZPP_OK) return status;
    outcome->measured = ahead->measured;
    memcpy(outcome->counted, ahead->counting, ahead->params);
    count(ahead, ahead->counting, 1);
    ahead->sent++;
    return ZPP_OK;
}
