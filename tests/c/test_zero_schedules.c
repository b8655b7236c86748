/* SPDX-License-Identifier: Apache-2.0
 *
 * The coordinator over many schedules of the simulated device: ranks are threads of this process, every copy, reduction
 * and computation happens late and in any order that streams and events allow, and memory that was given back is
 * poisoned. Some units are frozen, and are unfrozen before a later step or never. Each computation checks every element
 * of the unit it uses; each reduced gradient is compared with the exact sum, and so is the norm. Steps are of all three
 * kinds: after the backward, inside it, and delayed. In half of the schedules some units are of groups, also of two:
 * ranks hold different ones, and those with the same partition them. In some the micro-steps of a step are graphs of
 * one pass: their forwards come in any order before them, and reductions are driven now and then and waited for before
 * the norm.
 *
 * Run: test_zero_schedules [schedules] [first seed]. A failure prints the seed, which repeats it.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../csrc/zero/step_plan.h"
#include "../../csrc/zero/step_delayed.h"
#include "../../csrc/zero/step_in_backward.h"
#include "schedule.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { SCHEDULES = 150 }; /* a sample: each costs several times as much */
#else
enum { SCHEDULES = 1000 };
#endif

#define REQUIRE(condition, ...)                                                                  \
    do {                                                                                         \
        if (!(condition)) {                                                                      \
            fprintf(stderr, "seed %llu: %s:%d: ", (unsigned long long)current_seed, __FILE__, __LINE__); \
            fprintf(stderr, __VA_ARGS__);                                                        \
            fprintf(stderr, "\n");                                                               \
            abort();                                                                             \
        }                                                                                        \
    } while (0)

static uint64_t current_seed;

struct rank_state {
    struct plan *plan;
    int rank;
    uint64_t random;
    zpp_device *device;
    zpp_comm *comm;
    zpp_zero *zero;
    zpp_event *idle;
    float *expected[MAX_UNITS]; /* whole flat buffers */
    double *sums[MAX_UNITS][MAX_RANKS]; /* by part: of its ranks' gradients of this step */
    double *sum[MAX_UNITS];             /* the one of this rank's part */
    double *unpublished[MAX_UNITS]; /* the same of the step before, where that is delayed */
    struct zpp_stepper stepper;
    zpp_step_in_backward *inside;
    zpp_delayed *delayed;
    float *master[MAX_UNITS];   /* where steps are delayed */
    int64_t taken[MAX_UNITS][MAX_PARAMS]; /* steps of a parameter */
    int number;                 /* of the step */
    bool present[MAX_UNITS][MAX_PARAMS];
    void *scratch[1024];        /* gradients that the compute stream still reads */
    size_t scratch_bytes[1024];
    int scratch_count, free_count;
    void *free_blocks[64];      /* memory of gathered units, in the order of the compute stream */
    size_t block_bytes;
    char path[256]; /* of the gradients */
};

static const struct zpp_wait patience = { .timeout_ns = UINT64_C(60000000000), .tick = NULL, .ctx = NULL };

static void must(zpp_status status, const struct zpp_err *err, const char *what) {
    REQUIRE(status == ZPP_OK, "%s: %s (%s)", what, err->text, zpp_status_name(status));
}

/* --- operations of the compute stream ----------------------------------------------------------------------------- */

struct check_args {
    const float *values, *expected;
    size_t offset, elems;
    int unit, rank;
};

static zpp_status check_values(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native, (void)wait, (void)err;
    const struct check_args *args = arg;
    for (size_t i = 0; i < args->elems; i++) {
        const size_t at = args->offset + i;
        REQUIRE(args->values[at] == args->expected[at], "rank %d reads %g from element %zu of unit %d, which is %g",
                args->rank, (double)args->values[at], at, args->unit, (double)args->expected[at]);
    }
    return ZPP_OK;
}

struct make_args {
    float *out;
    size_t offset, elems;
    int rank, unit, step, micro;
};

static zpp_status make_gradient(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native, (void)wait, (void)err;
    const struct make_args *args = arg;
    for (size_t i = 0; i < args->elems; i++)
        args->out[i] = gradient_of(args->rank, args->unit, args->offset + i, args->step, args->micro);
    return ZPP_OK;
}

static zpp_status poison(void *arg, void *native, const struct zpp_wait *wait, struct zpp_err *err) {
    (void)native, (void)wait, (void)err;
    const struct { void *memory; size_t bytes; } *args = arg;
    memset(args->memory, 0xff, args->bytes); /* NaN */
    return ZPP_OK;
}

static zpp_status acquire(void *ctx, const struct zpp_unit *unit, void **memory, struct zpp_err *err) {
    struct rank_state *state = ctx;
    (void)unit;
    if (state->free_count) {
        *memory = state->free_blocks[--state->free_count];
        return ZPP_OK;
    }
    return zpp_device_alloc(state->device, state->block_bytes, memory, err);
}

static void give_back(void *ctx, const struct zpp_unit *unit, void *memory) {
    struct rank_state *state = ctx;
    struct zpp_err err = ZPP_ERR_INIT;
    const struct { void *memory; size_t bytes; } args = { memory, zpp_unit_bytes(unit) };
    must(zpp_stream_launch(zpp_zero_compute(state->zero), poison, &args, sizeof args, &err), &err, "poison");
    state->free_blocks[state->free_count++] = memory;
}

static void settle_compute(struct rank_state *state) {
    struct zpp_err err = ZPP_ERR_INIT;
    must(zpp_event_record(state->idle, zpp_zero_compute(state->zero), &err), &err, "record");
    must(zpp_event_sync(state->idle, &patience, &err), &err, "the compute stream");
}

/* --- one rank ----------------------------------------------------------------------------------------------------- */

static void use_unit(struct rank_state *state, int unit, enum zpp_phase phase) {
    struct zpp_err err = ZPP_ERR_INIT;
    must(zpp_zero_need(state->zero, unit, phase, &patience, &err), &err, "need");
    const struct zpp_unit *core = zpp_zero_unit(state->zero, unit);
    for (size_t i = 0; i < core->params; i++) {
        const struct check_args args = { (const float *)(void *)core->whole,
                                         state->expected[unit],
                                         core->offset_elems[i],
                                         core->param_elems[i],
                                         unit,
                                         state->rank };
        must(zpp_stream_launch(zpp_zero_compute(state->zero), check_values, &args, sizeof args, &err), &err, "check");
    }
}

static void shuffle(struct rank_state *state, int *order, int count) {
    for (int i = 0; i < count; i++) order[i] = i;
    for (int i = count - 1; i > 0; i--) {
        const int j = (int)(next_random(&state->random) % (uint64_t)(i + 1)), kept = order[i];
        order[i] = order[j];
        order[j] = kept;
    }
}

/* Every rank runs its units in an order of its own. */
static void forward(struct rank_state *state) {
    struct zpp_err err = ZPP_ERR_INIT;
    int order[MAX_UNITS];
    shuffle(state, order, state->plan->units);
    if (next_random(&state->random) % 2)
        for (int i = 0; i < state->plan->units; i++) order[i] = i;
    for (int i = 0; i < state->plan->units; i++) {
        use_unit(state, order[i], ZPP_PHASE_FORWARD);
        zpp_zero_count_use(state->zero, order[i], false);
        must(zpp_zero_release(state->zero, order[i], &err), &err, "release");
    }
}

static void give_gradient(struct rank_state *state, int unit, size_t param, int step, int micro) {
    struct zpp_err err = ZPP_ERR_INIT;
    const struct zpp_unit *core = zpp_zero_unit(state->zero, unit);
    const size_t bytes = core->param_elems[param] * sizeof(float);
    void *memory = NULL;
    must(zpp_device_alloc(state->device, bytes, &memory, &err), &err, "gradient memory");
    REQUIRE(state->scratch_count < 1024, "too many gradients");
    state->scratch_bytes[state->scratch_count] = bytes;
    state->scratch[state->scratch_count++] = memory;
    const struct make_args args = {
        memory, core->offset_elems[param], core->param_elems[param], state->rank, unit, step, micro
    };
    must(zpp_stream_launch(zpp_zero_compute(state->zero), make_gradient, &args, sizeof args, &err), &err, "make");
    must(zpp_zero_grad(state->zero, unit, param, memory, false, &patience, &err), &err, "grad");
    if (state->inside)
        must(zpp_step_in_backward_grad(state->inside, unit, param, false, &err), &err, "a step inside the backward");
}

static void give_gradients(struct rank_state *state, int unit, int step, int micro) {
    const struct plan *plan = state->plan;
    for (size_t param = 0; is_trained(plan, unit, step) && param < plan->params[unit]; param++)
        if (has_gradient(plan, state->rank, unit, param, step, micro)) give_gradient(state, unit, param, step, micro);
}

/* From malloc: every parameter is in one group, p = p - g. */
static struct zpp_optim_segment *new_groups(void) {
    struct zpp_optim_segment *groups = calloc(1, sizeof *groups);
    REQUIRE(groups, "no memory");
    groups->optimizer = ZPP_OPTIM_SGD;
    groups->lr = 1.0;
    return groups;
}

static void free_scratch(struct rank_state *state) {
    settle_compute(state);
    while (state->scratch_count) {
        state->scratch_count--;
        zpp_device_free(state->device, state->scratch[state->scratch_count],
                        state->scratch_bytes[state->scratch_count]);
    }
}

/* Compute backward, and give gradients unit by unit or at the end. */
static void run_graph(struct rank_state *state, int step, int micro) {
    struct plan *plan = state->plan;
    struct zpp_err err = ZPP_ERR_INIT;
    int order[MAX_UNITS];
    shuffle(state, order, plan->units);
    for (int i = plan->units - 1; i >= 0; i--) {
        const int unit = plan->backward_step || next_random(&state->random) % 4 ? i : order[i];
        use_unit(state, unit, ZPP_PHASE_BACKWARD);
        must(zpp_zero_release(state->zero, unit, &err), &err, "release");
        if (plan->backward_step) give_gradients(state, unit, step, micro);
    }
    for (int i = plan->units - 1; i >= 0 && !plan->backward_step; i--) give_gradients(state, i, step, micro);
}

/* `steps`: inside it. */
static void backward(struct rank_state *state, int step, int micro, bool reduce, bool steps) {
    struct zpp_err err = ZPP_ERR_INIT;
    must(zpp_zero_backward_begin(state->zero, reduce, &err), &err, "backward begin");
    if (steps) zpp_step_in_backward_begin(state->inside, new_groups(), 1.0);
    run_graph(state, step, micro);
    must(zpp_zero_backward_end(state->zero, &patience, &err), &err, "backward end");
    if (steps) settle_compute(state); /* the host steps the units that are left, only where it computes too */
    if (steps) must(zpp_step_in_backward_close(state->inside, &err), &err, "the steps that are left");
    must(zpp_zero_release_all(state->zero, &err), &err, "release all");
    free_scratch(state);
}

/* Some of the forwards that are left come before the next graph; the last graph needs all. */
static int run_forwards(struct rank_state *state, int done, int micro, int micros) {
    const int least = micro + 1, more = micros - least;
    const int until = least + (more > 0 ? (int)(next_random(&state->random) % (uint64_t)(more + 1)) : 0);
    for (; done < until; done++) forward(state);
    return done;
}

/* Several graphs in one pass, as in a pipeline's schedule. */
static void run_pass(struct rank_state *state, int step, int micros) {
    struct plan *plan = state->plan;
    struct zpp_err err = ZPP_ERR_INIT;
    uint8_t units[MAX_UNITS];
    must(zpp_zero_pass_open(state->zero, true, plan->pass_each, &err), &err, "pass open");
    for (int micro = 0, forwards = 0; micro < micros; micro++) {
        forwards = run_forwards(state, forwards, micro, micros);
        memset(units, micro == micros - 1 ? ZPP_GRAPH_LAST : ZPP_GRAPH_WITH, sizeof units);
        must(zpp_zero_graph_begin(state->zero, units, forwards, &err), &err, "graph begin");
        run_graph(state, step, micro);
        must(zpp_zero_graph_end(state->zero, &patience, &err), &err, "graph end");
        must(zpp_zero_end_pass(state->zero, &err), &err, "release");
        while (next_random(&state->random) % 3 == 0 && zpp_zero_drive(state->zero)) {}
        free_scratch(state);
    }
    must(zpp_zero_pass_close(state->zero, &patience, &err), &err, "pass close");
    must(zpp_zero_release_all(state->zero, &err), &err, "release all");
    while (next_random(&state->random) % 3 && zpp_zero_drive(state->zero)) {}
    if (next_random(&state->random) % 2) forward(state); /* an evaluation, before anything wants the gradients */
    must(zpp_zero_settle(state->zero, &patience, &err), &err, "settle");
    zpp_zero_reset_uses(state->zero);
    /* Where this placement is used a stream that waits is the host, so what an evaluation gathered ahead has ended. */
    must(zpp_zero_release_all(state->zero, &err), &err, "release all");
    free_scratch(state);
}

/* Compute the reduced gradient that is expected from all ranks' gradients of this step so far. */
static void add_expected(struct rank_state *state, int step, int micro) {
    struct plan *plan = state->plan;
    for (int unit = 0; unit < plan->units; unit++) {
        const struct zpp_unit *core = zpp_zero_unit(state->zero, unit);
        if (!is_trained(plan, unit, step)) continue;
        for (int rank = 0; rank < plan->ranks; rank++) {
            for (size_t param = 0; param < core->params; param++) {
                if (!has_gradient(plan, rank, unit, param, step, micro)) continue;
                const int part = rank % parts_of(plan, unit);
                state->present[unit][param] |= part == core->group->part;
                for (size_t i = 0; i < core->param_elems[param]; i++) {
                    const size_t at = core->offset_elems[param] + i;
                    state->sums[unit][part][at] +=
                        (double)gradient_of(rank, unit, at, step, micro) / plan->ranks;
                }
            }
        }
    }
}

static size_t own_begin(const struct rank_state *state, const struct zpp_unit *core) {
    return state->plan->stage == 0 ? 0 : (size_t)core->group->rank * core->shard_elems;
}

static size_t own_elems(const struct rank_state *state, const struct zpp_unit *core) {
    return state->plan->stage == 0 ? core->elems : core->shard_elems;
}

static void check_shard(struct rank_state *state, int unit) {
    const struct zpp_unit *core = zpp_zero_unit(state->zero, unit);
    const uint8_t *present = NULL;
    const float *shard = zpp_zero_grad_shard(state->zero, unit, &present);
    const size_t begin = own_begin(state, core), end = begin + own_elems(state, core);
    for (size_t param = 0; param < core->params; param++) {
        REQUIRE((shard && present[param]) == state->present[unit][param],
                "rank %d: parameter %zu of unit %d has %s gradient", state->rank, param, unit,
                state->present[unit][param] ? "no" : "a");
        for (size_t i = 0; state->present[unit][param] && i < core->param_elems[param]; i++) {
            const size_t at = core->offset_elems[param] + i;
            if (at < begin || at >= end) continue;
            REQUIRE((double)shard[at - begin] == state->sum[unit][at],
                    "rank %d: gradient %g at element %zu of unit %d, not %g", state->rank, (double)shard[at - begin],
                    at, unit, state->sum[unit][at]);
        }
    }
}

static void check_gradient(struct rank_state *state, int unit) {
    struct zpp_err err = ZPP_ERR_INIT;
    must(zpp_zero_grad_open(state->zero, unit, &err), &err, "open a gradient");
    check_shard(state, unit);
}

/* All of them are in their file, where they have one. */
static void settle_gradients(struct rank_state *state) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    must(zpp_zero_grads_settle(state->zero, &fault, &err), &err, "settle gradients");
}

/* Passes compute with the values that a step with `sums` made. */
static void expect_update(struct rank_state *state, int unit, const double *sums) {
    const struct zpp_unit *core = zpp_zero_unit(state->zero, unit);
    for (size_t i = 0; i < core->elems; i++) state->expected[unit][i] -= (float)sums[i];
}

/* --- the three kinds of step -------------------------------------------------------------------------------------- */

/* The update of a caller that brings its own. */
static int update_here(void *ctx, int unit) {
    struct rank_state *state = ctx;
    check_shard(state, unit);
    const struct zpp_unit *core = zpp_zero_unit(state->zero, unit);
    const float *shard = zpp_zero_grad_shard(state->zero, unit, NULL);
    const size_t begin = own_begin(state, core), end = begin + own_elems(state, core);
    float *values = (float *)(void *)core->shard;
    for (size_t param = 0; shard && param < core->params; param++)
        for (size_t i = 0; state->present[unit][param] && i < core->param_elems[param]; i++) {
            const size_t at = core->offset_elems[param] + i;
            if (at >= begin && at < end) values[at - begin] -= shard[at - begin];
        }
    return 0;
}

static int mark_final(void *ctx, int unit) {
    struct rank_state *state = ctx;
    REQUIRE(is_trained(state->plan, unit, state->number), "rank %d: unit %d is final, and frozen", state->rank, unit);
    return 0;
}

static int release_unit(void *ctx, int unit) {
    struct zpp_err err = ZPP_ERR_INIT;
    must(zpp_zero_release(((struct rank_state *)ctx)->zero, unit, &err), &err, "release");
    return 0;
}

static void make_stepper(struct rank_state *state) {
    struct zpp_err err = ZPP_ERR_INIT;
    const struct plan *plan = state->plan;
    const struct zpp_step_caller caller = {
        .ctx = state, .mark_final = mark_final, /* no gradient is local */
        .update = plan->own_update ? update_here : NULL, .release = release_unit, .wait = patience };
    must(zpp_stepper_init(state->zero, NULL, &state->stepper, &err), &err, "stepper");
    for (int unit = 0; unit < plan->units; unit++) {
        struct zpp_unit_states *states = &state->stepper.units[unit].states;
        states->steps = state->taken[unit];
        states->groups = calloc(MAX_PARAMS, sizeof *states->groups);
        REQUIRE(states->groups, "no memory");
    }
    if (plan->backward_step)
        must(zpp_step_in_backward_create(&state->stepper, &caller, &state->inside, &err), &err, "step in backward");
    if (plan->exact_steps < STEPS) must(zpp_delayed_create(state->device, &state->delayed, &err), &err, "delayed");
}

/* The optimizer's own copy, where steps are delayed. */
static void make_master(struct rank_state *state, int unit) {
    const struct zpp_unit *core = zpp_zero_unit(state->zero, unit);
    struct zpp_step_unit *step = &state->stepper.units[unit];
    state->unpublished[unit] = calloc(core->elems, sizeof(double));
    state->master[unit] = malloc(core->shard_elems * sizeof(float));
    REQUIRE(state->unpublished[unit] && state->master[unit], "no memory");
    memcpy(state->master[unit], core->shard, core->shard_elems * sizeof(float));
    step->states.master = state->master[unit];
    step->back_buffer = (unsigned char *)state->master[unit];
}

static void drop_stepper(struct rank_state *state) {
    zpp_delayed_destroy(state->delayed);
    zpp_step_in_backward_destroy(state->inside);
    zpp_stepper_fini(&state->stepper);
    for (int unit = 0; unit < state->plan->units; unit++) {
        free(state->unpublished[unit]);
        free(state->master[unit]);
    }
}

/* Stage 0: every rank steps the whole gradient. */
static void find_local_grads(struct rank_state *state, int unit) {
    const struct zpp_unit *core = zpp_zero_unit(state->zero, unit);
    float *whole = (float *)(void *)zpp_zero_whole_gradient(state->zero, unit);
    for (size_t param = 0; param < core->params; param++)
        state->stepper.units[unit].local_grads[param] =
            state->present[unit][param] ? whole + core->offset_elems[param] : NULL;
}

static void check_norm(struct rank_state *state) {
    const struct plan *plan = state->plan;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_shard_norm norms[MAX_RANKS * MAX_UNITS] = { 0 };
    double wanted = 0.0;
    must(zpp_norm_of_all(&state->stepper, norms, &patience, &err), &err, "norm");
    for (int unit = 0; unit < plan->units; unit++) {
        const size_t elems = zpp_zero_unit(state->zero, unit)->elems;
        for (int part = 0; part < parts_of(plan, unit); part++) {
            const double *sum = state->sums[unit][part];
            for (size_t i = 0; i < elems; i++) wanted += sum[i] * sum[i];
        }
    }
    const double found = zpp_norm_squares_of(&state->stepper, norms);
    REQUIRE(found == wanted, "rank %d: squares %g of the gradients, not %g", state->rank, found, wanted);
}

static void step_after(struct rank_state *state) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    struct zpp_optim_segment *groups = new_groups();
    struct zpp_step_plan plan;
    bool inconsistent;
    must(zpp_step_plan_make(&state->stepper, groups, 1.0, false, &plan, &err), &err, "plan");
    must(zpp_step_plan_run(&plan, NULL, &inconsistent, &fault, &err), &err, "step");
    zpp_step_plan_drop(&plan);
    free(groups);
}

static void end_inside(struct rank_state *state) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_step_in_backward_end end;
    must(zpp_step_in_backward_end(state->inside, &end, &err), &err, "the end of a step inside the backward");
    REQUIRE(!end.inconsistent && !zpp_step_in_backward_is_pending(state->inside), "the step has not ended");
}

/* The last step is over, and passes compute with what it made. */
static void publish(struct rank_state *state) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    must(zpp_delayed_wait(state->delayed, &fault, &err), &err, "a delayed step");
    zpp_delayed_publish(state->delayed, NULL);
}

static void step_delayed(struct rank_state *state) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_optim_segment *groups = new_groups();
    struct zpp_step_plan plan;
    const bool exact = state->number < state->plan->exact_steps;
    publish(state);
    must(zpp_delayed_plan(&state->stepper, groups, 1.0, &plan, &err), &err, "plan of a delayed step");
    must(zpp_delayed_begin(state->delayed, &plan, exact, NULL, &err), &err, "begin of a delayed step");
    if (exact) publish(state);
    free(groups);
}

/* What the next pass computes with. */
static void expect_step(struct rank_state *state, int unit) {
    const size_t bytes = zpp_zero_unit(state->zero, unit)->elems * sizeof(double);
    if (!state->delayed || state->number < state->plan->exact_steps) {
        expect_update(state, unit, state->sum[unit]);
    } else {
        expect_update(state, unit, state->unpublished[unit]);
        memcpy(state->unpublished[unit], state->sum[unit], bytes);
    }
}

static void step(struct rank_state *state) {
    struct plan *plan = state->plan;
    struct zpp_err err = ZPP_ERR_INIT;
    uint64_t votes[MAX_RANKS];
    const int number = state->number;
    settle_gradients(state);
    for (int unit = plan->units - 1; unit >= 0; unit--) {
        if (!is_trained(plan, unit, number) || plan->backward_step) continue;
        check_gradient(state, unit);
        must(zpp_zero_grad_close(state->zero, unit, &err), &err, "close a gradient");
        if (plan->stage == 0) find_local_grads(state, unit);
    }
    if (!plan->backward_step) check_norm(state);
    must(zpp_zero_step_begin(state->zero, (uint64_t)(100 * number + state->rank), votes, &patience, &err), &err,
         "step begin");
    for (int rank = 0; rank < plan->ranks; rank++)
        REQUIRE(votes[rank] == (uint64_t)(100 * number + rank), "vote %llu from rank %d",
                (unsigned long long)votes[rank], rank);
    if (state->inside) end_inside(state);
    else if (state->delayed) step_delayed(state);
    else step_after(state);
    for (int unit = 0; unit < plan->units; unit++) expect_step(state, unit);
    must(zpp_zero_step_end(state->zero, false, &patience, &err), &err, "step end");
    zpp_zero_clear_grads(state->zero);
}

static void train_step(struct rank_state *state, int number) {
    struct plan *plan = state->plan;
    struct zpp_err err = ZPP_ERR_INIT;
    state->number = number;
    for (int unit = 0; unit < plan->units; unit++) {
        for (int part = 0; part < parts_of(plan, unit); part++)
            memset(state->sums[unit][part], 0, zpp_zero_unit(state->zero, unit)->elems * sizeof(double));
        memset(state->present[unit], 0, sizeof state->present[unit]);
        if (number && number == plan->trained_from[unit]) must(zpp_zero_unfreeze(state->zero, unit, &err), &err,
                                                               "unfreeze");
    }
    if (plan->passes) run_pass(state, number, plan->micro_steps[number]);
    for (int micro = 0; micro < plan->micro_steps[number]; micro++) {
        if (plan->passes) {
            add_expected(state, number, micro);
            continue;
        }
        const bool last = micro == plan->micro_steps[number] - 1;
        forward(state);
        if (plan->backward_step) add_expected(state, number, micro);
        /* Alternately: hold the gradients back, or reduce every micro-step and add (with a step inside the backward
         * only to what is in a file). */
        const bool adds = plan->stage > 0 && number % 2 && (!plan->backward_step || plan->grads_fraction > 0.0);
        backward(state, number, micro, last || adds, last && plan->backward_step);
        if (!plan->backward_step) add_expected(state, number, micro);
    }
    step(state);
}

/* The engine opens files by name, so the file is removed at the end, not once it is open. */
static void open_gradients(struct rank_state *state) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    const char *folder = getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp";
    snprintf(state->path, sizeof state->path, "%s/zeropp-grads-%d-%d", folder, (int)getpid(), state->rank);
    (void)unlink(state->path);
    const struct zpp_scratch_options file = { .path = state->path, .depth = 4, .block_bytes = 4096 };
    must(zpp_unit_file_open(zpp_zero_grad_file(state->zero), &file, true, &fault, &err), &err, "the file of gradients");
}

static void add_groups(struct rank_state *state) {
    const struct plan *plan = state->plan;
    struct zpp_err err = ZPP_ERR_INIT;
    for (int group = 1; group < plan->groups; group++) {
        int part_of[MAX_RANKS], index = 0;
        char name[32];
        for (int rank = 0; rank < plan->ranks; rank++) part_of[rank] = rank % plan->parts[group];
        snprintf(name, sizeof name, "experts in %d parts", plan->parts[group]);
        const struct zpp_group_spec spec = { .name = name, .part_of = part_of };
        must(zpp_zero_add_group(state->zero, &spec, &index, &err), &err, "add group");
        REQUIRE(index == group, "group %d has number %d", group, index);
    }
}

static void build(struct rank_state *state) {
    struct plan *plan = state->plan;
    struct zpp_err err = ZPP_ERR_INIT;
    const struct zpp_sim_options sim = { .seed = current_seed * 31 + (uint64_t)state->rank, .max_delay_us = 20 };
    const struct zpp_store store = store_table_of(&plan->store);
    const struct zpp_comm_options options = {
        .rank = state->rank, .ranks = plan->ranks, .timeout_ns = UINT64_C(60000000000), .name = "sim"
    };
    must(zpp_device_sim_create(&sim, &state->device, &err), &err, "device");
    must(zpp_comm_create(&options, &store, &state->comm, &err), &err, "communicator");
    const struct zpp_zero_options zero = { .stage = plan->stage,
                                           .comm = state->comm,
                                           .device = state->device,
                                           .backing = { state, acquire, give_back },
                                           .prefetch_bytes = plan->prefetch_bytes,
                                           .bucket_bytes = plan->bucket_bytes };
    must(zpp_zero_create(&zero, &state->zero, &err), &err, "coordinator");
    must(zpp_event_create(state->device, &state->idle, &err), &err, "event");
    if (plan->grads_fraction > 0.0)
        must(zpp_zero_set_grads_fraction(state->zero, plan->grads_fraction, &err), &err, "gradients in a file");
    if (plan->backward_step) zpp_zero_pool_grads(state->zero);
    if (plan->exact_steps < STEPS) zpp_zero_delay_steps(state->zero);
    add_groups(state);
    for (int unit = 0; unit < plan->units; unit++) {
        char name[32];
        int index = -1;
        snprintf(name, sizeof name, "unit%d", unit);
        const enum zpp_place split = plan->host_copy ? ZPP_PLACE_HOST : ZPP_PLACE_SHARD;
        const struct zpp_unit_spec spec = { .name = name,
                                            .dtype = ZPP_F32,
                                            .params = plan->params[unit],
                                            .param_elems = plan->elems[unit],
                                            .trainable = plan->trained_from[unit] == 0,
                                            .frozen_reserved = plan->grads_fraction <= 0.0,
                                            .place = plan->stage == 3 && plan->ranks > 1 ? split : ZPP_PLACE_WHOLE,
                                            .grad_dtype = ZPP_F32,
                                            .wire_dtype = plan->narrow ? ZPP_BF16 : ZPP_F32,
                                            .group = plan->group[unit] };
        must(zpp_zero_add_unit(state->zero, &spec, &index, &err), &err, "add unit");
    }
    must(zpp_zero_seal(state->zero, &err), &err, "seal");
    if (plan->grads_fraction > 0.0) open_gradients(state);
    make_stepper(state);
}

static void fill(struct rank_state *state) {
    struct zpp_err err = ZPP_ERR_INIT;
    for (int unit = 0; unit < state->plan->units; unit++) {
        struct zpp_unit *core = zpp_zero_unit(state->zero, unit);
        if (zpp_unit_bytes(core) > state->block_bytes) state->block_bytes = zpp_unit_bytes(core);
        state->expected[unit] = calloc(core->elems, sizeof(float));
        for (int part = 0; part < core->group->parts; part++) {
            state->sums[unit][part] = calloc(core->elems, sizeof(double));
            REQUIRE(state->sums[unit][part], "no memory");
        }
        state->sum[unit] = state->sums[unit][core->group->part];
        REQUIRE(state->expected[unit], "no memory");
        for (size_t i = 0; i < core->elems; i++) state->expected[unit][i] = first_value(unit, core->group->part, i);
        memcpy(core->shard, state->expected[unit] + (size_t)core->group->rank * core->shard_elems,
               core->shard_elems * sizeof(float));
        if (core->place == ZPP_PLACE_WHOLE) memcpy(core->whole, state->expected[unit], core->elems * sizeof(float));
        if (state->delayed) make_master(state, unit);
    }
    must(zpp_barrier(state->comm, &patience, &err), &err, "barrier");
}

static void dismantle(struct rank_state *state) {
    struct zpp_err err = ZPP_ERR_INIT;
    must(zpp_barrier(state->comm, &patience, &err), &err, "last barrier");
    settle_compute(state);
    while (state->free_count)
        zpp_device_free(state->device, state->free_blocks[--state->free_count], state->block_bytes);
    for (int unit = 0; unit < state->plan->units; unit++) {
        free(state->expected[unit]);
        for (int part = 0; part < MAX_RANKS; part++) free(state->sums[unit][part]);
    }
    drop_stepper(state);
    zpp_event_destroy(state->idle);
    zpp_zero_destroy(state->zero);
    if (state->path[0]) unlink(state->path);
    zpp_comm_destroy(state->comm);
    zpp_device_destroy(state->device);
}

static void *run_rank(void *arg) {
    struct rank_state *state = arg;
    build(state);
    fill(state);
    for (int number = 0; number < STEPS; number++) train_step(state, number);
    dismantle(state);
    return NULL;
}

/* --- one schedule ------------------------------------------------------------------------------------------------- */

static void run_schedule(uint64_t seed) {
    static struct plan plan;
    struct rank_state *states = calloc(MAX_RANKS, sizeof *states);
    pthread_t threads[MAX_RANKS];
    uint64_t random = seed;
    current_seed = seed;
    REQUIRE(states != NULL, "no memory");
    draw_plan(&plan, &random);
    store_table_init(&plan.store);
    for (int rank = 0; rank < plan.ranks; rank++) {
        states[rank].plan = &plan;
        states[rank].rank = rank;
        states[rank].random = seed * 977 + (uint64_t)rank;
        REQUIRE(pthread_create(&threads[rank], NULL, run_rank, &states[rank]) == 0, "no thread");
    }
    for (int rank = 0; rank < plan.ranks; rank++) pthread_join(threads[rank], NULL);
    store_table_fini(&plan.store);
    free(states);
}

int main(int argc, char **argv) {
    const uint64_t schedules = argc > 1 ? strtoull(argv[1], NULL, 10) : SCHEDULES;
    const uint64_t first = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    for (uint64_t seed = first; seed < first + schedules; seed++) run_schedule(seed);
    printf("%llu schedules from seed %llu\n", (unsigned long long)schedules, (unsigned long long)first);
    return 0;
}
