/* SPDX-License-Identifier: Apache-2.0
 *
 * See step_plan.h.
 */
#include "step_plan.h"

#include <stdlib.h>

#include "../base/mem.h"
#include "internal.h"

/* Random bits of moments have the parameters' numbers as streams; those of bf16 parameters without a master these. */
#define STREAM_OF_PARAMS (UINT64_C(1) << 32)

/* --- the stepper -------------------------------------------------------------------------------------------------- */

zpp_status zpp_stepper_init(zpp_zero *zero, zpp_pool *pool, struct zpp_stepper *out, struct zpp_err *err) {
    const int count = zpp_zero_units(zero);
    *out = (struct zpp_stepper){.zero = zero,
                                .pool = pool,
                                .units_count = count,
                                .units = calloc((size_t)count + 1, sizeof *out->units),
                                .norm = calloc(1, sizeof *out->norm)};
    bool memory = out->units && out->norm;
    for (int i = 0; i < count && memory; i++) {
        struct zpp_step_unit *unit = &out->units[i];
        unit->unit = zpp_zero_unit(zero, i);
        unit->local_grads = calloc(unit->unit->params + 1, sizeof *unit->local_grads);
        memory = unit->local_grads;
    }
    if (memory) return ZPP_OK;
    zpp_stepper_fini(out);
    return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the optimizer states of %d units", count);
}

void zpp_stepper_fini(struct zpp_stepper *stepper) {
    for (int i = 0; stepper->units && i < stepper->units_count; i++) {
        free(stepper->units[i].local_grads);
        free(stepper->units[i].states.groups);
    }
    free(stepper->units);
    zpp_norm_memory_free(stepper->norm);
    *stepper = (struct zpp_stepper){ 0 };
}

bool zpp_zero_grads_are_local(const zpp_zero *zero) {
    return zero->options.stage == 0 || !zpp_zero_takes_grads(zero);
}

/* --- shards ------------------------------------------------------------------------------------------------------- */

bool zpp_step_shard_of(const struct zpp_stepper *stepper, int unit, bool delayed, struct zpp_step_shard *out) {
    const struct zpp_step_unit *owner = &stepper->units[unit];
    const zpp_zero *zero = stepper->zero;
    *out = (struct zpp_step_shard){ .owner = owner, .shape = *owner->unit, .rank = owner->unit->group->rank };
    if (zpp_zero_grads_are_local(zero)) {
        out->shape.shard_elems = out->shape.elems;
        out->rank = 0;
        out->values = owner->unit->whole;
        return true;
    }
    out->begin_elems = (size_t)out->rank * out->shape.shard_elems;
    out->values = owner->unit->shard;
    out->grads = zpp_zero_grad_shard(zero, unit, &out->present);
    if (out->grads && delayed) out->grads = owner->unit->grad->back_shard;
    return out->grads != NULL;
}

const void *zpp_step_shard_grad(const struct zpp_step_shard *shard, const struct zpp_piece *piece) {
    const size_t bytes = zpp_dtype_bytes(shard->shape.grad_dtype);
    if (shard->grads)
        return shard->present[piece->param] ? shard->grads + (piece->offset_elems - shard->begin_elems) * bytes : NULL;
    const unsigned char *grad = shard->owner->local_grads[piece->param];
    return grad ? grad + (piece->offset_elems - shard->shape.offset_elems[piece->param]) * bytes : NULL;
}

/* --- pieces ------------------------------------------------------------------------------------------------------- */

/* The arguments that all pieces of a unit have in common. */
struct planning {
    const struct zpp_stepper *stepper;
    const struct zpp_optim_segment *groups;
    struct zpp_step_shard shard;
    struct zpp_step_plan *plan;
    bool flips; /* a delayed step of a unit in a file: its other copy there gets the new values */
};

/* A piece without a border between memory and file. */
struct part {
    struct zpp_piece piece;
    size_t at;                            /* of the shard */
    size_t first_elems;                   /* of the parameter */
    size_t scale;                         /* its first scale, of 8-bit moments */
    const void *grad;
    const struct zpp_optim_segment *rates; /* of its group */
    bool on_disk;                         /* only where the unit flips */
};

static unsigned char *values_of(const struct planning *planning, const struct part *part) {
    return planning->shard.values + part->at * planning->shard.shape.elem_bytes;
}

static zpp_status no_memory(const struct planning *planning, struct zpp_err *err) {
    return zpp_fail(err, ZPP_NOMEM, "zero: no memory for the plan of a step of unit %s", planning->shard.shape.name);
}

static struct zpp_optim_segment *next_segment(struct zpp_step_plan *plan) {
    struct zpp_optim_segment *list =
        zpp_array_reserve(plan->segments, plan->segments_count, &plan->segments_capacity, sizeof *list);
    if (!list) return NULL;
    plan->segments = list;
    return &list[plan->segments_count++];
}

static struct zpp_optim_segment *next_in_file(struct zpp_step_plan *plan, int shard, size_t first) {
    struct zpp_optim_file_piece *list =
        zpp_array_reserve(plan->file_pieces, plan->file_pieces_count, &plan->file_pieces_capacity, sizeof *list);
    if (!list) return NULL;
    plan->file_pieces = list;
    struct zpp_optim_file_piece *piece = &list[plan->file_pieces_count++];
    piece->shard = shard;
    piece->first = first;
    return &piece->segment;
}

static struct zpp_optim_segment *next_no_master(struct zpp_step_plan *plan, uint64_t stream, size_t first_elems) {
    struct zpp_no_master_piece *list =
        zpp_array_reserve(plan->no_master, plan->no_master_count, &plan->no_master_capacity, sizeof *list);
    if (!list) return NULL;
    plan->no_master = list;
    struct zpp_no_master_piece *piece = &list[plan->no_master_count++];
    piece->stream = stream;
    piece->first_elems = first_elems;
    return &piece->segment;
}

static bool add_f64(const struct planning *planning, const struct part *part) {
    struct zpp_step_plan *plan = planning->plan;
    const struct zpp_unit_states *states = &planning->shard.owner->states;
    struct zpp_adam_f64_segment *list =
        zpp_array_reserve(plan->f64, plan->f64_count, &plan->f64_capacity, sizeof *list);
    if (!list) return false;
    plan->f64 = list;
    double *const moments[] = { states->moments[ZPP_MOMENT_FIRST].codes, states->moments[ZPP_MOMENT_SECOND].codes,
                                states->moments[ZPP_MOMENT_MAX].codes };
    struct zpp_adam_f64_segment *segment = &list[plan->f64_count++];
    *segment = (struct zpp_adam_f64_segment){
        .rates = *part->rates, .param = (double *)(void *)values_of(planning, part), .grad = part->grad,
        .exp_avg = moments[ZPP_MOMENT_FIRST] + part->at, .exp_avg_sq = moments[ZPP_MOMENT_SECOND] + part->at };
    if (part->rates->max_exp_avg_sq) segment->max_exp_avg_sq = moments[ZPP_MOMENT_MAX] + part->at;
    segment->rates.elems = part->piece.elems;
    segment->rates.step = (uint64_t)states->steps[part->piece.param];
    return true;
}

/* On a device a kernel rounds bf16 parameters without a master; a step on the host has zpp_no_master_step. */
static void bind_no_master_key(const struct zpp_unit_states *states, const struct part *part,
                               struct zpp_optim_segment *segment) {
    const uint64_t key =
        zpp_moments_key(0, STREAM_OF_PARAMS + states->first_param + part->piece.param, segment->step);
    segment->param_key = zpp_moments_key_from(key, part->first_elems);
}

/* fp32 moments of the segment, of those that the update has. */
static void bind_moments(const struct zpp_unit_states *states, size_t at, struct zpp_optim_segment *segment) {
    for (int k = 0; k < 3; k++)
        if (segment->state[k]) segment->state[k] = (float *)states->moments[k].codes + at;
}

/* Moments in fewer bits. They are never of a unit in a file, so a part is a whole piece. */
static void bind_low_precision_moments(const struct zpp_unit_states *states, const struct part *part,
                                       struct zpp_optim_segment *segment) {
    const int moments = segment->max_exp_avg_sq ? 3 : 2;
    segment->exp_avg = segment->exp_avg_sq = segment->max_exp_avg_sq = NULL;
    segment->how = (struct zpp_moments){
        .kind = states->kind, .first_elems = part->first_elems,
        .key = zpp_moments_key(0, states->first_param + part->piece.param, segment->step) };
    for (int k = 0; k < moments; k++) {
        const struct zpp_moment *whole = &states->moments[k];
        segment->moments[k].codes = (unsigned char *)whole->codes + part->at * zpp_moments_elem_bytes(states->kind);
        if (whole->scales) segment->moments[k].scales = whole->scales + part->scale;
    }
}

/* --- delayed steps ------------------------------------------------------------------------------------------------ */

/* The file has two copies of the unit: what is not stepped is copied from one to the other. */
static bool add_rest(const struct planning *planning, const struct part *part) {
    struct zpp_step_plan *plan = planning->plan;
    struct zpp_delayed_rest *list =
        zpp_array_reserve(plan->rests, plan->rests_count, &plan->rests_capacity, sizeof *list);
    if (!list) return false;
    plan->rests = list;
    list[plan->rests_count++] = (struct zpp_delayed_rest){ values_of(planning, part),
                                                           part->piece.elems * planning->shard.shape.elem_bytes };
    return true;
}

static bool add_flip(struct zpp_step_plan *plan, int file_index) {
    int *list =
        zpp_array_reserve(plan->flips, plan->flips_count, &plan->flips_capacity, sizeof *list);
    if (!list) return false;
    plan->flips = list;
    list[plan->flips_count++] = file_index;
    return true;
}

/* New values go to the back buffer, and are published from there. The back buffer of fp32 is the master, which has the
 * values already; but for a unit that is partly in a file, whose part in memory has no other master than the shard. */
static bool use_back_buffer(const struct planning *planning, const struct part *part,
                            struct zpp_optim_segment *segment) {
    struct zpp_step_plan *plan = planning->plan;
    const struct zpp_unit *unit = planning->shard.owner->unit;
    struct zpp_delayed_copy *list =
        zpp_array_reserve(plan->copies, plan->copies_count, &plan->copies_capacity, sizeof *list);
    if (!list) return false;
    plan->copies = list;
    unsigned char *back = planning->shard.owner->back_buffer + part->at * unit->elem_bytes;
    const bool is_f32 = unit->dtype == ZPP_F32;
    list[plan->copies_count++] = (struct zpp_delayed_copy){
        .to = values_of(planning, part), .from = back, .bytes = part->piece.elems * unit->elem_bytes,
        .fill = is_f32 && zpp_unit_in_file(unit) };
    if (is_f32) segment->param = (float *)(void *)back;
    segment->param_out = is_f32 ? NULL : back;
    return true;
}

/* --- one unit ----------------------------------------------------------------------------------------------------- */

/* `param` of a segment: the fp32 master, or NULL where the optimizer file has it, or there is none. */
static void bind_values(const struct planning *planning, const struct part *part, bool no_master,
                        struct zpp_optim_segment *segment) {
    const struct zpp_unit_states *states = &planning->shard.owner->states;
    const zpp_dtype dtype = planning->shard.shape.dtype;
    unsigned char *values = values_of(planning, part);
    const bool apart = states->in_file ? dtype != ZPP_F32 : states->master || no_master;
    segment->param_out = apart ? values : NULL;
    segment->out_dtype = dtype;
    if (states->master) segment->param = states->master + part->at;
    else segment->param = apart ? NULL : (float *)(void *)values;
}

/* A segment in the list of its kind. */
static struct zpp_optim_segment *next_of(const struct planning *planning, const struct part *part, bool no_master) {
    struct zpp_step_plan *plan = planning->plan;
    const struct zpp_unit_states *states = &planning->shard.owner->states;
    if (states->in_file) return next_in_file(plan, states->file_shard, part->at);
    if (!no_master || zpp_zero_shards_on_device(planning->stepper->zero)) return next_segment(plan);
    return next_no_master(plan, states->first_param + part->piece.param, part->first_elems);
}

static bool add_segment(const struct planning *planning, const struct part *part) {
    const struct zpp_step_plan *plan = planning->plan;
    const struct zpp_unit_states *states = &planning->shard.owner->states;
    const bool no_master = !states->in_file && !states->master && planning->shard.shape.dtype == ZPP_BF16;
    struct zpp_optim_segment *segment = next_of(planning, part, no_master);
    if (!segment) return false;
    *segment = *part->rates;
    bind_values(planning, part, no_master, segment);
    segment->grad = part->grad;
    segment->grad_dtype = planning->shard.shape.grad_dtype;
    segment->elems = part->piece.elems;
    segment->step = (uint64_t)states->steps[part->piece.param];
    if (no_master) bind_no_master_key(states, part, segment);
    if (plan->delayed && !part->on_disk && !use_back_buffer(planning, part, segment)) return false;
    if (states->kind != ZPP_MOMENTS_F32) bind_low_precision_moments(states, part, segment);
    else if (!states->in_file) bind_moments(states, part->at, segment);
    return true;
}

static bool add_part(const struct planning *planning, const struct part *part) {
    if (!part->grad || !part->rates) return !part->on_disk || add_rest(planning, part);
    /* fp64 is never delayed, in a file or in fewer bits. */
    return planning->shard.shape.dtype == ZPP_F64 ? add_f64(planning, part) : add_segment(planning, part);
}

/* Return how many elements from `at` of the shard on lie together: `elems`, or less where a border between memory and
 * file comes first. */
static size_t run_of(const struct planning *planning, size_t at, size_t elems) {
    const struct zpp_step_shard *shard = &planning->shard;
    const zpp_unit_file *params = planning->plan->files.params, *grads = planning->plan->files.grads;
    const size_t bytes = shard->shape.elem_bytes, grad_bytes = zpp_dtype_bytes(shard->shape.grad_dtype);
    if (params) elems = zpp_unit_file_run(params, shard->values + at * bytes, elems, bytes);
    return grads ? zpp_unit_file_run(grads, shard->grads + at * grad_bytes, elems, grad_bytes) : elems;
}

static bool add_piece(const struct planning *planning, struct zpp_piece piece, size_t scale) {
    const struct zpp_step_shard *shard = &planning->shard;
    const int group = shard->owner->states.groups[piece.param];
    for (size_t left = piece.elems; left; left -= piece.elems) {
        struct part part = { .at = piece.offset_elems - shard->begin_elems, .scale = scale,
                             .first_elems = piece.offset_elems - shard->shape.offset_elems[piece.param],
                             .grad = zpp_step_shard_grad(shard, &piece),
                             .rates = group < 0 ? NULL : &planning->groups[group] };
        piece.elems = run_of(planning, part.at, left);
        part.piece = piece;
        part.on_disk = planning->flips
            && zpp_unit_file_on_disk(planning->plan->files.params, values_of(planning, &part));
        if (!add_part(planning, &part)) return false;
        piece.offset_elems += piece.elems;
    }
    return true;
}

/* Count a step of each parameter that has a gradient, on every rank that may hold a piece of it. Return true if there
 * is one. */
static bool count_steps(const struct zpp_step_shard *shard) {
    const struct zpp_step_unit *owner = shard->owner;
    bool any = false;
    for (size_t i = 0; i < owner->unit->params; i++) {
        const bool has = shard->grads ? shard->present[i] : owner->local_grads[i] != NULL;
        const bool steps = has && owner->states.groups[i] >= 0;
        owner->states.steps[i] += steps;
        any |= steps;
    }
    return any;
}

static bool add_pieces(const struct planning *planning) {
    const struct zpp_step_shard *shard = &planning->shard;
    struct zpp_piece *pieces = calloc(shard->shape.params + 1, sizeof *pieces);
    if (!pieces) return false;
    const size_t count = zpp_unit_pieces(&shard->shape, shard->rank, pieces);
    bool memory = true;
    for (size_t i = 0, scale = 0; i < count && memory; i++) {
        const size_t first_elems = pieces[i].offset_elems - shard->shape.offset_elems[pieces[i].param];
        memory = add_piece(planning, pieces[i], scale);
        scale += zpp_moments_scales(first_elems, pieces[i].elems);
    }
    free(pieces);
    return memory;
}

zpp_status zpp_step_plan_add(const struct zpp_stepper *stepper, int unit, const struct zpp_optim_segment *groups,
                             struct zpp_step_plan *plan, struct zpp_err *err) {
    const struct zpp_step_unit *owner = &stepper->units[unit];
    struct planning planning = { .stepper = stepper, .groups = groups, .plan = plan };
    if (!owner->unit->trainable || !owner->states.steps) return ZPP_OK;
    if (!zpp_step_shard_of(stepper, unit, plan->delayed, &planning.shard)) return ZPP_OK;
    planning.flips = count_steps(&planning.shard) && plan->delayed && zpp_unit_in_file(owner->unit);
    /* On every rank, whether it has a piece of what is stepped or not. */
    if (planning.flips && !add_flip(plan, owner->unit->file_index)) return no_memory(&planning, err);
    return add_pieces(&planning) ? ZPP_OK : no_memory(&planning, err);
}

/* --- bf16 without a master ---------------------------------------------------------------------------------------- */

/* A tile of the parameters is decoded to fp32, stepped by the kernel of ops/optim with its moments and gradient, and
 * rounded stochastically (ops/moments: up with a probability of the share of the way up). So an element becomes one of
 * the two bf16 numbers around what fp32 Adam makes of it, and its mean is that; rounded to nearest, it would keep no
 * change below 1/256 of it. The random bits are a function of (parameter, step, place in the parameter): every stage,
 * number of ranks and threads, and a resumed run, gives the same. Tiles begin at multiples of their length in the
 * *parameter*, which are borders of 8-bit moments' blocks too. Bytes touched per parameter: 4 (read and written), its
 * gradient, and its moments. */

enum { TILE_ELEMS = ZPP_MOMENTS_TILE_ELEMS };

struct no_master_job {
    const struct zpp_no_master_piece *piece;
    const struct zpp_moments_kernels *kernels;
    struct zpp_moments how; /* of the parameter itself */
    float grad_scale;
};

static void step_tiles(size_t first_tile, size_t last_tile, void *arg) {
    const struct no_master_job *job = arg;
    const struct zpp_optim_segment *whole = &job->piece->segment;
    const struct zpp_moment param = { whole->param_out, NULL };
    const size_t into = job->piece->first_elems % TILE_ELEMS;
    float values[TILE_ELEMS];
    for (size_t tile = first_tile; tile < last_tile; tile++) {
        const size_t begin = tile ? tile * TILE_ELEMS - into : 0, next = (tile + 1) * TILE_ELEMS - into;
        const size_t end = next < whole->elems ? next : whole->elems;
        struct zpp_optim_segment part = zpp_optim_part_with_states(whole, begin, end - begin);
        part.param_out = NULL;
        zpp_moments_load(job->kernels, &job->how, ZPP_MOMENT_FIRST, &param, begin, end, values);
        part.param = values;
        zpp_optim_step(&part, 1, job->grad_scale, NULL);
        zpp_moments_store(job->kernels, &job->how, ZPP_MOMENT_FIRST, &param, begin, end, values, false);
    }
}

void zpp_no_master_step(const struct zpp_no_master_piece *pieces, size_t count, float grad_scale, zpp_pool *pool) {
    const struct zpp_moments_kernels *kernels = zpp_moments_kernels_of(zpp_cpu_level());
    for (size_t i = 0; i < count; i++) {
        const struct zpp_no_master_piece *piece = &pieces[i];
        const uint64_t key = zpp_moments_key(0, STREAM_OF_PARAMS + piece->stream, piece->segment.step);
        struct no_master_job job = { piece, kernels, { ZPP_MOMENTS_BF16, piece->first_elems, key }, grad_scale };
        const size_t elems = piece->first_elems % TILE_ELEMS + piece->segment.elems;
        zpp_pool_run(pool, (elems + TILE_ELEMS - 1) / TILE_ELEMS, 1, step_tiles, &job);
    }
}

/* --- plans -------------------------------------------------------------------------------------------------------- */

struct zpp_step_files zpp_step_files_of(zpp_zero *zero, bool next) {
    return (struct zpp_step_files){ zpp_zero_param_file(zero), zpp_zero_grad_file(zero), next };
}

zpp_status zpp_step_plan_make(const struct zpp_stepper *stepper, const struct zpp_optim_segment *groups,
                              double grad_scale, bool delayed, struct zpp_step_plan *plan, struct zpp_err *err) {
    *plan = (struct zpp_step_plan){
        .delayed = delayed, .grad_scale = grad_scale, .optim_file = stepper->optim_file,
        .files = zpp_step_files_of(stepper->zero, delayed) };
    zpp_status status = ZPP_OK;
    for (int i = 0; i < stepper->units_count && status == ZPP_OK; i++)
        status = zpp_step_plan_add(stepper, i, groups, plan, err);
    if (status != ZPP_OK) zpp_step_plan_drop(plan);
    return status;
}

void zpp_step_plan_drop(struct zpp_step_plan *plan) {
    free(plan->segments);
    free(plan->file_pieces);
    free(plan->no_master);
    free(plan->f64);
    free(plan->copies);
    free(plan->rests);
    free(plan->flips);
    *plan = (struct zpp_step_plan){ 0 };
}

/* Step the pieces that are neither in a file nor beside one. */
static void run_rest(const struct zpp_step_plan *plan, zpp_pool *pool) {
    zpp_no_master_step(plan->no_master, plan->no_master_count, (float)plan->grad_scale, pool);
    zpp_adam_step_f64(plan->f64, plan->f64_count, plan->grad_scale, pool);
}

zpp_status zpp_step_plan_run(struct zpp_step_plan *plan, zpp_pool *pool, bool *inconsistent,
                             struct zpp_aio_fault *fault, struct zpp_err *err) {
    const float scale = (float)plan->grad_scale;
    zpp_status status = zpp_unit_file_step(&plan->files, plan->segments, plan->segments_count, scale, pool,
                                           inconsistent, fault, err);
    run_rest(plan, pool);
    if (plan->optim_file && status == ZPP_OK)
        status = zpp_optim_file_step(plan->optim_file, plan->file_pieces, plan->file_pieces_count, &plan->files, scale,
                                     pool, fault, err);
    return status;
}

zpp_status zpp_step_plan_run_unit(struct zpp_step_plan *plan, zpp_pool *pool, struct zpp_aio_fault *fault,
                                  struct zpp_err *err) {
    const float scale = (float)plan->grad_scale;
    zpp_optim_step(plan->segments, plan->segments_count, scale, pool);
    run_rest(plan, pool);
    if (!plan->optim_file) return ZPP_OK;
    return zpp_optim_file_backward_step_unit(plan->optim_file, plan->file_pieces, plan->file_pieces_count, scale, pool,
                                             fault, err);
}
