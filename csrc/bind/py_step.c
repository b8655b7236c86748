/* SPDX-License-Identifier: Apache-2.0
 *
 * What the optimizer calls: where the gradients lie, their norm, the step.
 *
 * Gradients are *local* (p.grad itself: one rank, and stage 0 after its all-reduce) or *sliced* (this rank's reduced
 * shard). Everything below walks pieces: a parameter's part in a shard. The norm is summed per unit and shard, in
 * double, in that order, so that it has the same bits in every stage at equal world size.
 */
#include <math.h>
#include <stdlib.h>

#include "../ops/norm/norm.h"
#include "py_adam.h"
#include "py_aio.h"
#include "py_optim_file.h"
#include "py_zero.h"
#include "raise.h"

static bool is_local(const Zero *zero) {
    return zpp_py_is_local(zero);
}

bool zpp_py_is_local(const Zero *zero) {
    return (zero->ranks == 1 && !zpp_zero_grad_file(zero->core)) || zero->stage == 0;
}

static Unit *unit_at(const Zero *zero, Py_ssize_t index) {
    return (Unit *)PyList_GetItem(zero->units, index);
}

/* --- local gradients ---------------------------------------------------------------------------------------------- */

void zpp_py_drop_grads(Unit *unit) {
    for (Py_ssize_t i = 0; unit->grad_refs && i < unit->count; i++) {
        Py_CLEAR(unit->grad_refs[i]);
        unit->grads[i] = NULL;
    }
}

/* Hold p.grad of one parameter: dense, contiguous, of the parameter's kind. 1: it has one, 0: none, -1: error. */
static int hold_gradient(Unit *unit, Py_ssize_t i) {
    PyObject *grad = PyObject_GetAttr(unit->params[i], zpp_str_grad);
    if (!grad) return -1;
    if (grad == Py_None) {
        Py_DECREF(grad);
        return 0;
    }
    PyObject *dense = PyObject_CallMethodObjArgs(grad, zpp_str_contiguous, NULL);
    Py_DECREF(grad);
    if (!dense) return zpp_py_refuse_sparse(unit, i), -1;
    PyObject *address = PyObject_CallMethodObjArgs(dense, zpp_str_data_ptr, NULL);
    if (!address) {
        Py_DECREF(dense);
        return -1;
    }
    unit->grad_refs[i] = dense;
    unit->grads[i] = PyLong_AsVoidPtr(address);
    Py_DECREF(address);
    return 1;
}

int zpp_py_hold_gradients(Unit *unit, bool *any) {
    const bool was_plain = unit->is_plain;
    zpp_py_drop_grads(unit);
    if (zpp_py_swap(unit, true)) return -1;
    for (Py_ssize_t i = 0; i < unit->count; i++) {
        const int held = hold_gradient(unit, i);
        if (held < 0) return -1;
        *any |= held;
    }
    return was_plain ? 0 : zpp_py_swap(unit, false);
}

/* collect_grads() -> bool: is there a gradient to step with? Local ones are held until the next clear_grads. */
static PyObject *zero_collect_grads(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    if (!is_local(zero)) return PyBool_FromLong(zpp_zero_has_grad(zero->core));
    bool any = false;
    const Py_ssize_t count = PyList_Size(zero->units);
    for (Py_ssize_t i = 0; i < count; i++)
        if (unit_at(zero, i)->unit->trainable && zpp_py_hold_gradients(unit_at(zero, i), &any)) return NULL;
    return PyBool_FromLong(any);
}

int zpp_py_forget_gradients(Unit *unit) {
    const bool was_plain = unit->is_plain;
    zpp_py_drop_grads(unit);
    if (zpp_py_swap(unit, true)) return -1;
    for (Py_ssize_t i = 0; i < unit->count; i++)
        if (PyObject_SetAttr(unit->params[i], zpp_str_grad, Py_None)) return -1;
    return was_plain ? 0 : zpp_py_swap(unit, false);
}

static PyObject *zero_clear_grads(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    const Py_ssize_t count = PyList_Size(zero->units);
    for (Py_ssize_t i = 0; i < count && is_local(zero); i++)
        if (unit_at(zero, i)->unit->trainable && zpp_py_forget_gradients(unit_at(zero, i))) return NULL;
    zpp_zero_clear_grads(zero->core);
    Py_RETURN_NONE;
}

/* Gradients that this rank holds back (no_sync), not reduced yet. */
static PyObject *zero_grads_pending(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    return PyBool_FromLong(!is_local(zero) && zpp_zero_grads_pending(zero->core));
}

/* --- pieces ------------------------------------------------------------------------------------------------------- */

/* The shard that this rank steps: its own, or everything where gradients are local. */
struct own_shard {
    struct zpp_unit shape;  /* a copy whose shards are cut that way */
    int rank;
    size_t begin_elems;
    unsigned char *values;
    const unsigned char *grads; /* sliced only */
    const uint8_t *present;     /* sliced only */
    zpp_dtype grad_dtype;
};

/* false: the unit has no gradient. */
static bool own_shard(const Zero *zero, const Unit *unit, struct own_shard *out) {
    *out = (struct own_shard) { .shape = *unit->unit,
                                .rank = zpp_zero_rank(zero->core),
                                .grad_dtype = unit->unit->grad_dtype };
    if (is_local(zero)) {
        out->shape.shard_elems = out->shape.elems;
        out->rank = 0;
        out->values = unit->unit->whole;
        return true;
    }
    out->begin_elems = (size_t)out->rank * out->shape.shard_elems;
    out->values = unit->unit->shard;
    out->grads = zpp_zero_grad_shard(zero->core, unit->unit->index, &out->present);
    return out->grads != NULL;
}

/* Where a piece's gradient lies; NULL: its parameter has none. */
static const void *piece_gradient(const Unit *unit, const struct own_shard *shard, const struct zpp_piece *piece) {
    const size_t bytes = zpp_dtype_bytes(shard->grad_dtype);
    if (shard->grads)
        return shard->present[piece->param] ? shard->grads + (piece->offset_elems - shard->begin_elems) * bytes : NULL;
    const unsigned char *grad = unit->grads[piece->param];
    return grad ? grad + (piece->offset_elems - unit->unit->offset_elems[piece->param]) * bytes : NULL;
}

/* --- norm --------------------------------------------------------------------------------------------------------- */

struct shard_norm {
    double squares;
    int64_t bad_param; /* the first that is not finite; -1: none */
    uint64_t origins;  /* then: on which ranks the unit's gradient was not finite before the sum (zero/origin.h) */
};

/* One shard of one unit. `shape` decides how the unit is cut. */
static int norm_of_shard(const Zero *zero, const Unit *unit, const struct own_shard *shard, int rank,
                         struct shard_norm *out) {
    *out = (struct shard_norm){ 0.0, -1, 0 };
    const size_t room = shard->shape.params + 1;
    struct zpp_piece *pieces = calloc(room, sizeof *pieces);
    struct zpp_norm_segment *segments = calloc(room, sizeof *segments);
    double *sums = calloc(room, sizeof *sums);
    uint64_t *bad = calloc(room, sizeof *bad);
    size_t *params = calloc(room, sizeof *params);
    size_t count = 0;
    const bool memory = pieces && segments && sums && bad && params;
    if (memory) {
        struct zpp_unit cut = *unit->unit;
        const size_t found = zpp_unit_pieces(&cut, rank, pieces);
        for (size_t i = 0; i < found; i++) {
            const void *grad = piece_gradient(unit, shard, &pieces[i]);
            if (!grad) continue;
            params[count] = pieces[i].param;
            segments[count++] = (struct zpp_norm_segment){ grad, shard->grad_dtype, pieces[i].elems };
        }
        zpp_norm_squares(segments, count, sums, bad, zero->pool);
    }
    for (size_t i = 0; i < count; i++) {
        out->squares += sums[i];
        if (bad[i] && out->bad_param < 0) out->bad_param = (int64_t)params[i];
    }
    if (out->bad_param >= 0) out->origins = zpp_zero_origins(zero->core, unit->unit->index);
    free(pieces);
    free(segments);
    free(sums);
    free(bad);
    free(params);
    return memory ? 0 : -1;
}

int zpp_py_unit_norm(const Zero *zero, const Unit *unit, int64_t *bad_param) {
    struct own_shard shard;
    struct shard_norm norm = { 0.0, -1, 0 };
    if (own_shard(zero, unit, &shard) && norm_of_shard(zero, unit, &shard, shard.rank, &norm)) return -1;
    *bad_param = norm.bad_param;
    return 0;
}

/* Where gradients are in a file, this is when they are read. 0, or -1 with an error set. */
static int open_gradient(const Zero *zero, int unit) {
    struct zpp_err err = ZPP_ERR_INIT;
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_zero_grad_open(zero->core, unit, &err);
    PyEval_RestoreThread(thread);
    if (status == ZPP_OK) return 0;
    zpp_py_raise(&err);
    return -1;
}

static int close_gradient(const Zero *zero, int unit) {
    struct zpp_err err = ZPP_ERR_INIT;
    if (zpp_zero_grad_close(zero->core, unit, &err) == ZPP_OK) return 0;
    zpp_py_raise(&err);
    return -1;
}

/* norms[rank * units + unit]; sliced gradients fill this rank's row only. From the last unit to the first: the order in
 * which gradients in a file are read ahead. */
static int fill_norms(const Zero *zero, struct shard_norm *norms) {
    const Py_ssize_t units = PyList_Size(zero->units);
    const int first = is_local(zero) ? 0 : zpp_zero_rank(zero->core);
    const int last = is_local(zero) ? zero->ranks - 1 : first;
    for (int rank = first; rank <= last; rank++) {
        for (Py_ssize_t u = units - 1; u >= 0; u--) {
            const Unit *unit = unit_at(zero, u);
            struct shard_norm *norm = &norms[(size_t)rank * (size_t)units + (size_t)u];
            struct own_shard shard;
            *norm = (struct shard_norm){ 0.0, -1, 0 };
            if (!unit->unit->trainable || !own_shard(zero, unit, &shard)) continue;
            if (open_gradient(zero, (int)u) || norm_of_shard(zero, unit, &shard, rank, norm)) return -1;
            if (close_gradient(zero, (int)u)) return -1;
        }
    }
    return 0;
}

/* norm() -> (sum of squares over all ranks, [(unit, parameter, ranks) that is not finite, ...]); collective.
 * ranks: a bit for each rank whose gradient of the unit was not finite before the sum. */
static PyObject *zero_norm(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    const size_t units = (size_t)PyList_Size(zero->units), cells = units * (size_t)zero->ranks;
    struct shard_norm *norms = calloc(cells + 1, sizeof *norms), *row = calloc(units + 1, sizeof *row);
    zpp_status status = ZPP_OK;
    struct zpp_err err = ZPP_ERR_INIT;
    int failed = !norms || !row || fill_norms(zero, norms);
    if (!failed && !is_local(zero) && units) {
        struct zpp_wait wait;
        zpp_py_wait_for(zero, &wait);
        for (size_t u = 0; u < units; u++) row[u] = norms[(size_t)zpp_zero_rank(zero->core) * units + u];
        PyThreadState *thread = PyEval_SaveThread();
        status = zpp_zero_gather_norms(zero->core, row, units * sizeof *row, norms, &wait, &err);
        PyEval_RestoreThread(thread);
    }
    double squares = 0.0;
    PyObject *bad = failed || status != ZPP_OK ? NULL : PyList_New(0);
    for (size_t u = 0; bad && u < units; u++) {
        for (size_t rank = 0; rank < (size_t)zero->ranks; rank++) {
            const struct shard_norm *norm = &norms[rank * units + u];
            squares += norm->squares;
            if (norm->bad_param < 0) continue;
            PyObject *where = Py_BuildValue("(nnK)", (Py_ssize_t)u, (Py_ssize_t)norm->bad_param,
                                            (unsigned long long)norm->origins);
            if (!where || PyList_Append(bad, where)) failed = 1;
            Py_XDECREF(where);
        }
    }
    free(norms);
    free(row);
    if (status != ZPP_OK) return zpp_py_raise(&err);
    if (!bad || failed) {
        Py_XDECREF(bad);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    return Py_BuildValue("(dN)", squares, bad);
}

/* --- step --------------------------------------------------------------------------------------------------------- */

/* step_begin(vote) -> every rank's vote; nobody reads parameters any more. */
static PyObject *zero_step_begin(PyObject *self, PyObject *arg) {
    Zero *zero = (Zero *)self;
    const uint64_t vote = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred() || zpp_py_release_all(zero)) return NULL;
    zero->builds_loss = false;
    uint64_t *votes = calloc((size_t)zero->ranks, sizeof *votes);
    if (!votes) return PyErr_NoMemory();
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait wait;
    zpp_py_wait_for(zero, &wait);
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_zero_step_begin(zero->core, vote, votes, &wait, &err);
    PyEval_RestoreThread(thread);
    PyObject *list = status == ZPP_OK ? PyList_New(zero->ranks) : NULL;
    for (int rank = 0; list && rank < zero->ranks; rank++)
        if (PyList_SetItem(list, rank, PyLong_FromUnsignedLongLong(votes[rank]))) Py_CLEAR(list);
    free(votes);
    return status == ZPP_OK ? list : zpp_py_raise(&err);
}

/* step_end(): every shard is written, on every rank. */
static PyObject *zero_step_end(PyObject *self, PyObject *unused) {
    (void)unused;
    Zero *zero = (Zero *)self;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_wait wait;
    zpp_py_wait_for(zero, &wait);
    PyThreadState *thread = PyEval_SaveThread();
    const zpp_status status = zpp_zero_step_end(zero->core, &wait, &err);
    PyEval_RestoreThread(thread);
    for (Py_ssize_t i = 0; i < PyList_Size(zero->units); i++) zpp_py_drop_grads(unit_at(zero, i));
    if (status != ZPP_OK) return zpp_py_raise(&err);
    Py_RETURN_NONE;
}

/* set_tier(Tier): where the states of tiered units are. */
static PyObject *zero_set_tier(PyObject *self, PyObject *optim_file) {
    Zero *zero = (Zero *)self;
    if (!zpp_py_optim_file_get(optim_file)) return NULL;
    Py_XDECREF(zero->optim_file);
    zero->optim_file = Py_NewRef(optim_file);
    Py_RETURN_NONE;
}

/* Room for one more of `count` things; NULL: no memory. */
static void *one_more(void *at, size_t count, size_t *room, size_t bytes) {
    if (count < *room) return at;
    const size_t wanted = *room ? 2 * *room : 256;
    void *grown = realloc(at, wanted * bytes);
    if (grown) *room = wanted;
    return grown;
}

static struct zpp_optim_segment *next_segment(struct zpp_py_adam *list) {
    struct zpp_optim_segment *at = one_more(list->at, list->count, &list->room, sizeof *at);
    if (!at) return NULL;
    list->at = at;
    return &list->at[list->count++];
}

static struct zpp_optim_segment *next_tiered(struct zpp_py_adam *list, int shard, size_t first) {
    struct zpp_optim_file_piece *at = one_more(list->tiered, list->tiered_count, &list->tiered_room, sizeof *at);
    if (!at) return NULL;
    list->tiered = at;
    struct zpp_optim_file_piece *piece = &list->tiered[list->tiered_count++];
    piece->shard = shard;
    piece->first = first;
    return &piece->segment;
}

static struct zpp_optim_segment *next_masterless(struct zpp_py_adam *list, const Unit *unit,
                                                const struct zpp_piece *piece) {
    struct zpp_no_master_piece *at =
        one_more(list->masterless, list->masterless_count, &list->masterless_room, sizeof *at);
    if (!at) return NULL;
    list->masterless = at;
    at += list->masterless_count++;
    at->stream = unit->adam.first_param + piece->param;
    at->first_elems = piece->offset_elems - unit->unit->offset_elems[piece->param];
    return &at->segment;
}

/* A piece in float64: its values begin at element `at` of the shard. `rates`: of its group. */
static int add_f64(const Unit *unit, const struct own_shard *shard, const struct zpp_piece *piece, const void *grad,
                   const struct zpp_optim_segment *rates, struct zpp_py_adam *list) {
    const size_t at = piece->offset_elems - shard->begin_elems;
    const struct unit_adam *adam = &unit->adam;
    struct zpp_adam_f64_segment *segments = one_more(list->f64, list->f64_count, &list->f64_room, sizeof *segments);
    if (!segments) return -1;
    list->f64 = segments;
    segments += list->f64_count++;
    *segments = (struct zpp_adam_f64_segment){ .rates = *rates,
                                               .param = (double *)(void *)shard->values + at,
                                               .grad = grad,
                                               .exp_avg = (double *)(void *)adam->exp_avg + at,
                                               .exp_avg_sq = (double *)(void *)adam->exp_avg_sq + at };
    if (rates->max_exp_avg_sq) segments->max_exp_avg_sq = (double *)(void *)adam->max_exp_avg_sq + at;
    segments->rates.elems = piece->elems;
    segments->rates.step = (uint64_t)adam->steps[piece->param];
    return 0;
}

/* Elements of a piece that lie together: all of them, unless its unit or its gradient is partly in a file. */
static size_t run_of(const Zero *zero, const Unit *unit, const struct own_shard *shard, const struct zpp_piece *piece) {
    const zpp_unit_file *params = zpp_zero_param_file(zero->core), *grads = zpp_zero_grad_file(zero->core);
    const size_t at = piece->offset_elems - shard->begin_elems, grad_bytes = zpp_dtype_bytes(shard->grad_dtype);
    size_t run = piece->elems;
    if (params && unit->unit->place == ZPP_PLACE_FILE)
        run = zpp_unit_file_run(params, shard->values + at * unit->unit->elem_bytes, run, unit->unit->elem_bytes);
    return grads ? zpp_unit_file_run(grads, shard->grads + at * grad_bytes, run, grad_bytes) : run;
}

/* The moments of a piece that begins at element `at` of the shard, and whose scales begin at `scale`. */
static void bind_low(const Unit *unit, const struct zpp_piece *piece, size_t at, size_t scale,
                     struct zpp_optim_segment *segment) {
    const struct unit_adam *adam = &unit->adam;
    const bool amsgrad = segment->max_exp_avg_sq;
    segment->exp_avg = segment->exp_avg_sq = segment->max_exp_avg_sq = NULL;
    segment->how = (struct zpp_moments){
        .kind = adam->kind, .first_elems = piece->offset_elems - unit->unit->offset_elems[piece->param],
        .key = zpp_moments_key(0, adam->first_param + piece->param, segment->step) };
    for (int k = 0; k < 2 + amsgrad; k++) {
        segment->moments[k].codes = (unsigned char *)adam->moments[k].codes + at * zpp_moments_elem_bytes(adam->kind);
        if (adam->moments[k].scales) segment->moments[k].scales = adam->moments[k].scales + scale;
    }
}

static size_t scales_of(const Unit *unit, const struct zpp_piece *piece) {
    return zpp_moments_scales(piece->offset_elems - unit->unit->offset_elems[piece->param], piece->elems);
}

/* Its values are the same after a step that steps others of its unit. */
static bool leave_alone(const Unit *unit, const struct own_shard *shard, size_t at, size_t elems,
                        struct zpp_py_adam *list) {
    struct zpp_delayed_rest *rests = one_more(list->rests, list->rests_count, &list->rests_room, sizeof *rests);
    if (!rests) return false;
    list->rests = rests;
    rests[list->rests_count++] = (struct zpp_delayed_rest){ shard->values + at * unit->unit->elem_bytes,
                                                            elems * unit->unit->elem_bytes };
    return true;
}

/* On every rank, whether it has a piece of what is stepped or not. */
static bool add_turn(const Unit *unit, struct zpp_py_adam *list) {
    int *turns = one_more(list->turns, list->turns_count, &list->turns_room, sizeof *turns);
    if (!turns) return false;
    list->turns = turns;
    turns[list->turns_count++] = unit->unit->file_index;
    return true;
}

/* The new values of a segment go aside, and from there, later, to where they are read. The master of fp32 is aside, but
 * for units in a file, of which some are in memory: there it is the shard. */
static bool set_aside(const Unit *unit, const struct own_shard *shard, size_t at, struct zpp_optim_segment *segment,
                      struct zpp_py_adam *list) {
    const size_t bytes = unit->unit->elem_bytes;
    unsigned char *ahead = unit->ahead + at * bytes;
    struct zpp_delayed_copy *copies = one_more(list->copies, list->copies_count, &list->copies_room, sizeof *copies);
    if (!copies) return false;
    list->copies = copies;
    copies[list->copies_count++] =
        (struct zpp_delayed_copy){ shard->values + at * bytes, ahead, segment->elems * bytes,
                                   unit->unit->place == ZPP_PLACE_FILE && unit->unit->dtype == ZPP_F32 };
    if (unit->unit->dtype == ZPP_F32) segment->param = (float *)(void *)ahead;
    segment->param_out = unit->unit->dtype == ZPP_F32 ? NULL : ahead;
    return true;
}

/* Gradients of this shard are not touched by the next backward. */
static int take_gradients(Zero *zero, Unit *unit, struct own_shard *shard) {
    struct zpp_err err = ZPP_ERR_INIT;
    for (Py_ssize_t i = 0; !shard->grads && i < unit->count; i++)
        if (unit->grad_refs[i] && PyList_Append(zero->delayed_grads, unit->grad_refs[i])) return -1;
    const void *taken = shard->grads;
    if (shard->grads && zpp_zero_grad_take(zero->core, unit->unit->index, &taken, &err) != ZPP_OK)
        return zpp_py_raise(&err), -1;
    shard->grads = taken;
    return 0;
}

int zpp_py_adam_unit(Zero *zero, Unit *unit, const struct zpp_optim_segment *groups, struct zpp_py_adam *list) {
    struct own_shard shard;
    const bool tiered = unit->adam.tiered;
    const bool low = unit->adam.kind != ZPP_MOMENTS_F32; /* never of a unit in a file: its pieces are not cut */
    if (!unit->unit->trainable || !unit->adam.steps || !own_shard(zero, unit, &shard)) return 0;
    if (list->delayed && take_gradients(zero, unit, &shard)) return -1;
    struct zpp_piece *pieces = calloc(shard.shape.params + 1, sizeof *pieces);
    if (!pieces) return -1;
    const size_t count = zpp_unit_pieces(&shard.shape, shard.rank, pieces);
    bool stepped = false;
    for (Py_ssize_t i = 0; i < unit->count; i++) { /* one step more on every rank that may hold a piece of it */
        const bool has = (shard.grads ? shard.present[i] : unit->grads[i] != NULL) && unit->adam.groups[i] >= 0;
        unit->adam.steps[i] += has;
        stepped |= has;
    }
    const bool turns = list->delayed && stepped && unit->unit->place == ZPP_PLACE_FILE;
    int failed = turns && !add_turn(unit, list);
    size_t next_scale = 0;
    for (size_t i = 0; i < count && !failed; i++) {
        const size_t scale = next_scale;
        next_scale += scales_of(unit, &pieces[i]);
        const size_t run = run_of(zero, unit, &shard, &pieces[i]);
        struct zpp_piece one = pieces[i], *piece = &one;
        if (run < one.elems) { /* a cut between memory and file goes through it: the rest is a piece of its own */
            pieces[i].offset_elems += run;
            pieces[i].elems -= run;
            one.elems = run;
            i--;
        }
        const int group = unit->adam.groups[piece->param];
        const void *grad = piece_gradient(unit, &shard, piece);
        const size_t at = piece->offset_elems - shard.begin_elems;
        const bool unit_file = turns && zpp_unit_file_on_disk(zpp_zero_param_file(zero->core),
                                                              shard.values + at * unit->unit->elem_bytes);
        if (!grad || group < 0) {
            failed = unit_file && !leave_alone(unit, &shard, at, piece->elems, list);
            continue;
        }
        if (unit->unit->dtype == ZPP_F64) { /* never delayed, nor in a file or in fewer bits */
            failed = add_f64(unit, &shard, piece, grad, &groups[group], list);
            continue;
        }
        const bool masterless = !tiered && !unit->adam.master && unit->unit->dtype == ZPP_BF16;
        struct zpp_optim_segment *segment = tiered     ? next_tiered(list, unit->adam.shard, at)
                                         : masterless ? next_masterless(list, unit, piece)
                                                      : next_segment(list);
        failed = !segment;
        if (failed) break;
        const bool master = tiered ? unit->unit->dtype != ZPP_F32 : unit->adam.master != NULL;
        *segment = groups[group];
        segment->param = unit->adam.master ? unit->adam.master + at : (float *)(void *)shard.values + at;
        if ((tiered && master) || masterless) segment->param = NULL; /* the tier knows, or there is none */
        segment->param_out = master || masterless ? shard.values + at * unit->unit->elem_bytes : NULL;
        segment->out_dtype = unit->unit->dtype;
        segment->grad = grad;
        segment->grad_dtype = shard.grad_dtype;
        segment->elems = piece->elems;
        segment->step = (uint64_t)unit->adam.steps[piece->param];
        failed = list->delayed && !unit_file && !set_aside(unit, &shard, at, segment, list);
        if (low) bind_low(unit, piece, at, scale, segment);
        if (tiered || low) continue;
        if (segment->exp_avg) segment->exp_avg = unit->adam.exp_avg + at;
        if (segment->exp_avg_sq) segment->exp_avg_sq = unit->adam.exp_avg_sq + at;
        if (segment->max_exp_avg_sq) segment->max_exp_avg_sq = unit->adam.max_exp_avg_sq + at;
    }
    free(pieces);
    return failed ? -1 : 0;
}

/* Set the optimizer of a group and its rates from the five numbers that python/zeropp/zero/updates.py gives: `beta1` is
 * also Adagrad's lr_decay and SGD's momentum, `beta2` also Adagrad's initial sum and SGD's dampening. */
static bool set_optimizer(struct zpp_optim_segment *group, unsigned char update) {
    enum { NESTEROV = ZPP_OPTIM_SGD + 1 };
    if (update > NESTEROV) {
        PyErr_Format(PyExc_ValueError, "no optimizer has the number %d", (int)update);
        return false;
    }
    group->nesterov = update == NESTEROV;
    group->optimizer = group->nesterov ? ZPP_OPTIM_SGD : update;
    group->init_sum = true;
    group->lr_decay = group->momentum = group->beta1;
    group->initial_sum = group->dampening = group->beta2;
    return true;
}

/* (update, lr, beta1, beta2, eps, weight_decay, decoupled, maximize, moments) per parameter group: fields of a segment,
 * and which moments it has, bit by bit. */
struct zpp_optim_segment *zpp_py_read_groups(PyObject *list) {
    const Py_ssize_t count = PyList_Size(list);
    struct zpp_optim_segment *groups = calloc((size_t)count + 1, sizeof *groups);
    if (!groups) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        int decoupled, maximize;
        unsigned moments;
        unsigned char update;
        struct zpp_optim_segment *group = &groups[i];
        if (!PyArg_ParseTuple(PyList_GetItem(list, i), "bdddddppI", &update, &group->lr, &group->beta1,
                              &group->beta2, &group->eps, &group->weight_decay, &decoupled, &maximize, &moments) ||
            !set_optimizer(group, update)) {
            free(groups);
            return NULL;
        }
        group->decoupled_decay = decoupled;
        group->maximize = maximize;
        static float mark; /* replaced by the unit's own memory */
        group->exp_avg = moments & 1 ? &mark : NULL;
        group->exp_avg_sq = moments & 2 ? &mark : NULL;
        group->max_exp_avg_sq = moments & 4 ? &mark : NULL;
    }
    return groups;
}

void zpp_py_adam_drop(struct zpp_py_adam *list) {
    free(list->at);
    free(list->tiered);
    free(list->masterless);
    free(list->f64);
    free(list->copies);
    free(list->rests);
    free(list->turns);
    *list = (struct zpp_py_adam){ 0 };
}

int zpp_py_adam_list(Zero *zero, PyObject *group_list, bool delayed, struct zpp_py_adam *list) {
    *list = (struct zpp_py_adam){ .delayed = delayed };
    struct zpp_optim_segment *groups = zpp_py_read_groups(group_list);
    if (!groups) return -1;
    int failed = 0;
    for (Py_ssize_t u = 0; u < PyList_Size(zero->units) && !failed; u++)
        failed = zpp_py_adam_unit(zero, unit_at(zero, u), groups, list);
    free(groups);
    if (!failed && !PyErr_Occurred()) return 0;
    zpp_py_adam_drop(list);
    if (!PyErr_Occurred()) PyErr_NoMemory();
    return -1;
}

/* adam_step(groups, grad_scale): between step_begin and step_end. */
static PyObject *zero_adam_step(PyObject *self, PyObject *args) {
    Zero *zero = (Zero *)self;
    PyObject *groups;
    double scale;
    if (!PyArg_ParseTuple(args, "O!d", &PyList_Type, &groups, &scale)) return NULL;
    struct zpp_py_adam list;
    if (zpp_py_adam_list(zero, groups, false, &list)) return NULL;
    zpp_optim_file *optim_file = zero->optim_file ? zpp_py_optim_file_get(zero->optim_file) : NULL;
    zpp_status status = ZPP_OK;
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_aio_fault fault;
    if (!PyErr_Occurred()) {
        const struct zpp_step_files files = { zpp_zero_param_file(zero->core), zpp_zero_grad_file(zero->core), false };
        PyThreadState *thread = PyEval_SaveThread();
        status = zpp_unit_file_step(&files, list.at, list.count, (float)scale, zero->pool, &zero->torn, &fault, &err);
        zpp_no_master_step(list.masterless, list.masterless_count, (float)scale, zero->pool);
        zpp_adam_step_f64(list.f64, list.f64_count, scale, zero->pool);
        if (optim_file && status == ZPP_OK)
            status =
                zpp_optim_file_step(optim_file, list.tiered, list.tiered_count, &files, (float)scale, zero->pool,
                                    &fault, &err);
        zero->steps += status == ZPP_OK;
        PyEval_RestoreThread(thread);
    }
    zpp_py_adam_drop(&list);
    if (status != ZPP_OK) return zpp_py_raise_aio(&err, &fault);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* reset_uses(): a step was taken, so forwards before it lead to no backward any more. */
static PyObject *zero_reset_uses(PyObject *self, PyObject *unused) {
    (void)unused;
    zpp_zero_reset_uses(((Zero *)self)->core);
    Py_RETURN_NONE;
}

/* restart_step(): the next backward is the first of `accumulate`. */
static PyObject *zero_restart_step(PyObject *self, PyObject *unused) {
    (void)unused;
    ((Zero *)self)->micro = 0;
    Py_RETURN_NONE;
}

PyMethodDef zpp_py_step_methods[] = {
    { "collect_grads", zero_collect_grads, METH_NOARGS, "Find the gradients to step with; is there one?" },
    { "clear_grads", zero_clear_grads, METH_NOARGS, "Forget all gradients." },
    { "grads_pending", zero_grads_pending, METH_NOARGS, "Are there gradients that no_sync held back?" },
    { "norm", zero_norm, METH_NOARGS, "(sum of squares, parameters that are not finite); collective." },
    { "step_begin", zero_step_begin, METH_O, "step_begin(vote) -> votes; collective." },
    { "step_end", zero_step_end, METH_NOARGS, "Every shard is written; collective." },
    { "set_tier", zero_set_tier, METH_O, "Where the states of tiered units are." },
    { "adam_step", zero_adam_step, METH_VARARGS, "adam_step(groups, grad_scale)" },
    { "reset_uses", zero_reset_uses, METH_NOARGS, "Forget forwards that no backward followed." },
    { "restart_step", zero_restart_step, METH_NOARGS, "The next backward is the first of a step." },
    { NULL, NULL, 0, NULL },
};
