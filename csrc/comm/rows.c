/* SPDX-License-Identifier: Apache-2.0
 *
 * The exchange of rows (rows.h): dispatch, combine and their backwards, in phases of host memory (rows_phase.c) or of
 * device memory (rows_device.c).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ops/element.h"
#include "rows_internal.h"

static bool is_on_device(const struct zpp_rows_by *by) { return by && by->on_device; }
static zpp_pool *pool_of(const struct zpp_rows_by *by) { return by ? by->pool : NULL; }

/* --- descriptors -------------------------------------------------------------------------------------------------- */

/* All of a descriptor's kind is compared between ranks. */
static uint64_t kind_of(enum zpp_row_phase_kind phase, zpp_dtype dtype, size_t k, size_t experts, bool weighted,
                        bool device) {
    return (uint64_t)phase | (uint64_t)dtype << 8 | (uint64_t)k << 16 | (uint64_t)experts << 24 |
           (weighted ? UINT64_C(1) << 40 : 0) | (device ? UINT64_C(1) << 41 : 0);
}

static void describe(void *ctx, const struct zpp_desc *desc, char *text, size_t capacity) {
    static const char *const names[] = {
        "nothing",           "dispatch",           "combine",           "backward of combine",
        "backward of weights", "backward of dispatch", "tokens of dispatch", "set-up of a GPU"};
    const struct zpp_rows *rows = ctx;
    const char *name = desc->object < rows->layers_count ? rows->layers[desc->object].name : "unknown";
    const zpp_dtype dtype = (zpp_dtype)(desc->kind >> 8 & 0xff);
    snprintf(text, capacity, "%s #%llu of layer %llu (%s): rows of %llu %s, %u of %u experts a token%s%s",
             names[desc->kind & 0xff], (unsigned long long)desc->step, (unsigned long long)desc->object, name,
             (unsigned long long)desc->elems, dtype < ZPP_DTYPES ? zpp_dtype_name(dtype) : "?",
             (unsigned)(desc->kind >> 16 & 0xff), (unsigned)(desc->kind >> 24 & 0xffff),
             desc->kind >> 40 & 1 ? ", weighted" : "", desc->kind >> 41 & 1 ? ", on a GPU" : "");
}

static struct zpp_desc desc_of(const int64_t *numbers, enum zpp_row_phase_kind phase, bool weighted, bool device) {
    return (struct zpp_desc){.kind = kind_of(phase, (zpp_dtype)numbers[ZPP_ROWS_DTYPE], (size_t)numbers[ZPP_ROWS_K],
                                             (size_t)numbers[ZPP_ROWS_EXPERTS], weighted, device),
                             .object = (uint64_t)numbers[ZPP_ROWS_LAYER],
                             .step = (uint64_t)numbers[ZPP_ROWS_CALL],
                             .elems = (uint64_t)numbers[ZPP_ROWS_WIDTH]};
}

/* --- a phase ------------------------------------------------------------------------------------------------------ */

static zpp_status phase_begin(struct zpp_rows *rows, struct zpp_row_phase *phase, const struct zpp_row_memory *memory,
                              const struct zpp_rows_by *by, const struct zpp_wait *wait, struct zpp_err *err) {
    phase->first[rows->rank] = memory->first;
    phase->second[rows->rank] = memory->second;
    phase->count[rows->rank] = memory->count;
    if (is_on_device(by)) return zpp_rows_device_begin(rows, phase, memory, by->native, wait, err);
    return zpp_rows_host_begin(rows, phase, memory, pool_of(by), wait, err);
}

static zpp_status phase_end(struct zpp_rows *rows, const struct zpp_row_phase *phase, const struct zpp_rows_by *by,
                            const struct zpp_wait *wait, struct zpp_err *err) {
    if (!is_on_device(by)) return zpp_rows_host_end(rows, phase, wait, err);
    zpp_rows_device_end(rows, phase);
    return ZPP_OK;
}

/* Peers have to publish as many rows as the dispatch found; anything else is a caller's fault on that rank. */
static zpp_status check_counts(struct zpp_rows *rows, const struct zpp_row_phase *phase, const int64_t *wanted,
                               struct zpp_err *err) {
    char doing[200];
    for (size_t r = 0; r < rows->ranks; r++) {
        if (phase->count[r] == (size_t)wanted[r]) continue;
        describe(rows, &phase->desc, doing, sizeof doing);
        const int label = rows->comm ? zpp_label(rows->comm, (int)r) : 0;
        return zpp_fail_rank(err, ZPP_PEER, label, "moe: rank %d has %zu rows in %s, wanted %lld as in its dispatch",
                             label, phase->count[r], doing, (long long)wanted[r]);
    }
    return ZPP_OK;
}

static void count_read(struct zpp_rows *rows, uint64_t bytes) {
    if (rows->comm) zpp_comm_count(rows->comm, ZPP_TRAFFIC_ALL_TO_ALL, bytes);
}

/* `by` is what computes the phase. */
static zpp_status enter_phase(struct zpp_rows *rows, const struct zpp_rows_by *by, struct zpp_err *err) {
    const zpp_status status = zpp_rows_enter_phase(rows, err);
    if (status != ZPP_OK || !is_on_device(by) || rows->device) return status;
    return zpp_rows_leave(rows, zpp_fail(err, ZPP_STATE, "moe: rows of a GPU before zpp_rows_open_device"));
}

/* --- create ------------------------------------------------------------------------------------------------------- */

zpp_status zpp_rows_create(zpp_comm *comm, zpp_rows **out, struct zpp_err *err) {
    if (comm) comm = zpp_comm_here(comm);
    struct zpp_rows *rows = calloc(1, sizeof *rows);
    if (!rows) return zpp_fail(err, ZPP_NOMEM, "moe: no memory for an exchange of rows");
    rows->gathered = true;
    rows->ranks = 1;
    if (comm && comm->ranks > 1) {
        const zpp_status status = zpp_desc_ring_create(comm, "rows", &rows->ring, err);
        if (status != ZPP_OK) {
            free(rows);
            return status;
        }
        rows->comm = comm;
        rows->ranks = (size_t)comm->ranks;
        rows->rank = (size_t)comm->rank;
        zpp_desc_ring_set_describe(rows->ring, describe, rows);
        zpp_desc_ring_set_fatal(rows->ring); /* ranks of other exchanges hear of the late one by the groups' link */
    }
    *out = rows;
    return ZPP_OK;
}

void zpp_rows_destroy(zpp_rows *rows) {
    if (!rows) return;
    zpp_rows_device_destroy(rows->device);
    for (uint32_t i = 0; i < rows->layers_count; i++) free(rows->layers[i].name);
    for (int i = 0; i < 2; i++) zpp_block_free(rows->slots[i].block);
    zpp_desc_ring_destroy(rows->ring);
    free(rows->layers);
    free(rows->counts);
    free(rows);
}

int zpp_rows_ranks(const zpp_rows *rows) { return (int)rows->ranks; }

zpp_status zpp_rows_add_layer(zpp_rows *rows, const char *name, uint32_t *layer, struct zpp_err *err) {
    struct zpp_rows_layer *layers = realloc(rows->layers, (rows->layers_count + 1) * sizeof *layers);
    if (layers) rows->layers = layers;
    char *copy = layers ? strdup(name) : NULL;
    if (!copy) return zpp_fail(err, ZPP_NOMEM, "moe: no memory for layer \"%s\"", name);
    layers[rows->layers_count] = (struct zpp_rows_layer){.name = copy};
    *layer = rows->layers_count++;
    return ZPP_OK;
}

/* --- dispatch ----------------------------------------------------------------------------------------------------- */

static zpp_status check_format(const struct zpp_rows *rows, const struct zpp_rows_dispatch *dispatch,
                               struct zpp_err *err) {
    if (dispatch->layer >= rows->layers_count)
        return zpp_fail(err, ZPP_INVALID, "moe: layer %u, wanted one of the %u that were added", dispatch->layer,
                        rows->layers_count);
    if (dispatch->experts < 1 || dispatch->experts > ZPP_MOE_MAX_EXPERTS || dispatch->experts % rows->ranks)
        return zpp_fail(
            err, ZPP_INVALID, "moe: %zu experts of layer \"%s\" on %zu ranks, wanted a multiple of %zu up to %d",
            dispatch->experts, rows->layers[dispatch->layer].name, rows->ranks, rows->ranks, (int)ZPP_MOE_MAX_EXPERTS);
    if (dispatch->k < 1 || dispatch->k > ZPP_MOE_MAX_CHOICES || dispatch->width_elems < 1)
        return zpp_fail(err, ZPP_INVALID, "moe: k is %zu and the width %zu, wanted k 1 to %d and a width of at least 1",
                        dispatch->k, dispatch->width_elems, (int)ZPP_MOE_MAX_CHOICES);
    if (!zpp_element_is_float(dispatch->dtype))
        return zpp_fail(err, ZPP_INVALID, "moe: rows of dtype %d, wanted float32, bfloat16 or float16",
                        (int)dispatch->dtype);
    if (dispatch->tokens > INT32_MAX / dispatch->k)
        return zpp_fail(err, ZPP_INVALID, "moe: %zu tokens with %zu choices, wanted fewer than 2^31 in all",
                        dispatch->tokens, dispatch->k);
    return ZPP_OK;
}

static zpp_status check_dispatch(struct zpp_rows *rows, const struct zpp_rows_dispatch *dispatch, struct zpp_err *err) {
    const zpp_status status = check_format(rows, dispatch, err);
    if (status != ZPP_OK) return status;
    for (size_t a = 0; a < dispatch->tokens * dispatch->k; a++) {
        const int32_t expert = dispatch->chosen[a];
        if (expert < -1 || expert >= (int64_t)dispatch->experts)
            return zpp_fail(err, ZPP_INVALID, "moe: chosen[%zu] is %d, wanted -1 or an expert 0 to %zu", a, (int)expert,
                            dispatch->experts - 1);
    }
    const size_t wanted = rows->ranks * dispatch->experts;
    if (wanted > rows->counts_capacity) {
        int64_t *counts = realloc(rows->counts, wanted * sizeof *counts);
        if (!counts) return zpp_fail(err, ZPP_NOMEM, "moe: no memory for %zu counts", wanted);
        rows->counts = counts;
        rows->counts_capacity = wanted;
    }
    return ZPP_OK;
}

static struct zpp_moe_choices choices_of(const struct zpp_rows *rows) {
    return (struct zpp_moe_choices){.chosen = rows->chosen,
                                    .tokens = rows->tokens,
                                    .ranks = rows->ranks,
                                    .rank = rows->rank,
                                    .experts = (size_t)(rows->desc.kind >> 24 & 0xffff),
                                    .k = (size_t)(rows->desc.kind >> 16 & 0xff)};
}

/* Keep what the second half needs of the phase, and count. */
static zpp_status count_choices(struct zpp_rows *rows, const struct zpp_row_phase *phase, size_t *rows_here,
                                struct zpp_err *err) {
    rows->desc = phase->desc;
    rows->seq = phase->seq;
    for (size_t r = 0; r < rows->ranks; r++) {
        rows->bases[r] = phase->first[r];
        rows->chosen[r] = phase->second[r];
        rows->tokens[r] = phase->count[r];
    }
    const struct zpp_moe_choices choices = choices_of(rows);
    zpp_moe_choices_count(&choices, rows->counts, rows->rows_of);
    for (size_t r = 0; r < rows->ranks; r++)
        if (rows->rows_of[r] > INT32_MAX)
            return zpp_fail(err, ZPP_INVALID, "moe: %lld rows go to rank %d, wanted fewer than 2^31",
                            (long long)rows->rows_of[r], rows->comm ? zpp_label(rows->comm, (int)r) : 0);
    *rows_here = (size_t)rows->rows_of[rows->rank];
    rows->gathered = false;
    return ZPP_OK;
}

zpp_status zpp_rows_dispatch_begin(zpp_rows *rows, const struct zpp_rows_dispatch *dispatch,
                                   const struct zpp_rows_by *by, const struct zpp_wait *wait, size_t *rows_here,
                                   struct zpp_err *err) {
    const bool device = is_on_device(by);
    zpp_status status = enter_phase(rows, by, err);
    if (status != ZPP_OK) return status;
    status = check_dispatch(rows, dispatch, err);
    if (status != ZPP_OK) return zpp_rows_leave(rows, status);
    struct zpp_row_phase phase = {
        .desc = {.kind = kind_of(ZPP_ROW_DISPATCH, dispatch->dtype, dispatch->k, dispatch->experts, false, device),
                 .object = dispatch->layer,
                 .step = ++rows->layers[dispatch->layer].calls,
                 .elems = dispatch->width_elems}};
    const struct zpp_row_memory memory = {
        .first = device ? NULL : dispatch->x,
        .second = dispatch->chosen,
        .count = dispatch->tokens,
        .first_item_bytes = device ? 0 : dispatch->width_elems * zpp_dtype_bytes(dispatch->dtype),
        .second_item_bytes = dispatch->k * sizeof *dispatch->chosen};
    const struct zpp_rows_by host = {.pool = pool_of(by)};
    status = phase_begin(rows, &phase, &memory, &host, wait, err);
    if (status == ZPP_OK) status = count_choices(rows, &phase, rows_here, err);
    return zpp_rows_leave(rows, status);
}

static void write_numbers(const struct zpp_rows *rows, int64_t *numbers) {
    numbers[ZPP_ROWS_LAYER] = (int64_t)rows->desc.object;
    numbers[ZPP_ROWS_CALL] = (int64_t)rows->desc.step;
    numbers[ZPP_ROWS_EXPERTS] = (int64_t)(rows->desc.kind >> 24 & 0xffff);
    numbers[ZPP_ROWS_K] = (int64_t)(rows->desc.kind >> 16 & 0xff);
    numbers[ZPP_ROWS_WIDTH] = (int64_t)rows->desc.elems;
    numbers[ZPP_ROWS_DTYPE] = (int64_t)(rows->desc.kind >> 8 & 0xff);
}

static int64_t count_foreign(const struct zpp_rows *rows, const int64_t *slots, size_t assignments) {
    int64_t foreign = 0;
    for (size_t a = 0; a < assignments; a++) foreign += slots[a] >= 0 && (size_t)(slots[a] >> 32) != rows->rank;
    return foreign;
}

static int64_t *starts_of(const struct zpp_rows_plan *plan) { return plan->numbers + ZPP_ROWS_NUMBERS; }
static int64_t *tokens_of(const struct zpp_rows *rows, const struct zpp_rows_plan *plan) {
    return starts_of(plan) + rows->ranks + 1;
}
static int64_t *rows_of(const struct zpp_rows *rows, const struct zpp_rows_plan *plan) {
    return tokens_of(rows, plan) + rows->ranks;
}

static struct zpp_moe_peer_rows peer_rows(const struct zpp_rows *rows, const int64_t *numbers,
                                          const void *const *bases) {
    return (struct zpp_moe_peer_rows){.bases = bases,
                                      .ranks = rows->ranks,
                                      .k = (size_t)numbers[ZPP_ROWS_K],
                                      .width_elems = (size_t)numbers[ZPP_ROWS_WIDTH],
                                      .dtype = (zpp_dtype)numbers[ZPP_ROWS_DTYPE]};
}

static size_t most_of(const struct zpp_rows *rows, const int64_t *counts) {
    int64_t most = 0;
    for (size_t r = 0; r < rows->ranks; r++) most = counts[r] > most ? counts[r] : most;
    return (size_t)most;
}

static size_t row_bytes(const int64_t *numbers) {
    return (size_t)numbers[ZPP_ROWS_WIDTH] * zpp_dtype_bytes((zpp_dtype)numbers[ZPP_ROWS_DTYPE]);
}

/* Rows of this rank's buffer that peers own. */
static size_t foreign_rows(const struct zpp_rows *rows, const struct zpp_rows_plan *plan) {
    const int64_t *starts = starts_of(plan);
    return (size_t)(starts[rows->ranks] - (starts[rows->rank + 1] - starts[rows->rank]));
}

/* NULL `scale`: plain copies. */
static zpp_status gather(struct zpp_rows *rows, const struct zpp_rows_plan *plan, const void *const *bases,
                         const struct zpp_moe_peer_scale *scale, void *buffer, const struct zpp_rows_by *by,
                         struct zpp_err *err) {
    const struct zpp_moe_peer_rows peer = peer_rows(rows, plan->numbers, bases);
    count_read(rows, foreign_rows(rows, plan) * row_bytes(plan->numbers));
    if (is_on_device(by)) {
        const struct zpp_moe_peer_cuda on = zpp_rows_device_on(rows, by->native);
        return zpp_moe_peer_gather_cuda(&on, &peer, plan->taken, starts_of(plan), scale, buffer, err);
    }
    zpp_moe_peer_gather_scaled(&peer, plan->taken, starts_of(plan), scale, buffer, pool_of(by));
    return ZPP_OK;
}

zpp_status zpp_rows_dispatch_end(zpp_rows *rows, const struct zpp_rows_plan *plan, void *buffer,
                                 const struct zpp_rows_by *by, struct zpp_err *err) {
    zpp_status status = zpp_rows_enter(rows, err);
    if (status != ZPP_OK) return status;
    if (rows->gathered)
        return zpp_rows_leave(rows, zpp_fail(err, ZPP_STATE, "moe: the second half of a dispatch without a first one"));
    const struct zpp_moe_choices choices = choices_of(rows);
    const struct zpp_moe_peer_plan peer_plan = {plan->ends, plan->taken, starts_of(plan), plan->slots};
    write_numbers(rows, plan->numbers);
    for (size_t r = 0; r < rows->ranks; r++) {
        tokens_of(rows, plan)[r] = (int64_t)rows->tokens[r];
        rows_of(rows, plan)[r] = rows->rows_of[r];
    }
    zpp_moe_peer_plan(&choices, rows->counts, &peer_plan);
    plan->numbers[ZPP_ROWS_FOREIGN] = count_foreign(rows, plan->slots, rows->tokens[rows->rank] * choices.k);
    if (!is_on_device(by)) status = gather(rows, plan, rows->bases, NULL, buffer, by, err);
    rows->gathered = true;
    rows->broken = false;
    if (rows->comm) zpp_desc_ring_ack(rows->ring, rows->seq);
    return zpp_rows_leave(rows, status);
}

/* --- the later phases --------------------------------------------------------------------------------------------- */

/* Gather what the owners of tokens publish: the tokens, or gradients of their sums. */
static zpp_status gather_phase(struct zpp_rows *rows, const struct zpp_rows_plan *plan, enum zpp_row_phase_kind kind,
                               const struct zpp_rows_grads *grads, float *dots, const struct zpp_rows_by *by,
                               const struct zpp_wait *wait, struct zpp_err *err) {
    const int64_t *numbers = plan->numbers;
    const size_t tokens = (size_t)tokens_of(rows, plan)[rows->rank], k = (size_t)numbers[ZPP_ROWS_K];
    const struct zpp_row_memory memory = {.first = grads->grad_y,
                                          .second = tokens ? grads->weights : NULL,
                                          .count = tokens,
                                          .first_item_bytes = row_bytes(numbers),
                                          .second_item_bytes = grads->weights ? k * sizeof(float) : 0,
                                          .most_count = most_of(rows, tokens_of(rows, plan))};
    struct zpp_row_phase phase = {.desc = desc_of(numbers, kind, grads->weights != NULL, is_on_device(by))};
    zpp_status status = phase_begin(rows, &phase, &memory, by, wait, err);
    if (status == ZPP_OK) status = check_counts(rows, &phase, tokens_of(rows, plan), err);
    if (status != ZPP_OK) return status;
    const struct zpp_moe_peer_scale scale = {(const float *const *)phase.second, grads->made, dots};
    status = gather(rows, plan, phase.first, grads->weights ? &scale : NULL, grads->grad_made, by, err);
    return status == ZPP_OK ? phase_end(rows, &phase, by, wait, err) : status;
}

zpp_status zpp_rows_take(zpp_rows *rows, const struct zpp_rows_plan *plan, const void *x, void *buffer,
                         const struct zpp_rows_by *by, const struct zpp_wait *wait, struct zpp_err *err) {
    const struct zpp_rows_grads tokens = {.grad_y = x, .grad_made = buffer};
    const zpp_status status = enter_phase(rows, by, err);
    if (status != ZPP_OK) return status;
    return zpp_rows_leave(rows, gather_phase(rows, plan, ZPP_ROW_TOKENS, &tokens, NULL, by, wait, err));
}

static zpp_status sum(struct zpp_rows *rows, const struct zpp_rows_plan *plan, const void *const *bases,
                      const float *weights, void *y, const struct zpp_rows_by *by, struct zpp_err *err) {
    const size_t tokens = (size_t)tokens_of(rows, plan)[rows->rank];
    const struct zpp_moe_peer_rows peer = peer_rows(rows, plan->numbers, bases);
    count_read(rows, (uint64_t)plan->numbers[ZPP_ROWS_FOREIGN] * row_bytes(plan->numbers));
    if (is_on_device(by)) {
        const struct zpp_moe_peer_cuda on = zpp_rows_device_on(rows, by->native);
        return zpp_moe_peer_sum_cuda(&on, &peer, plan->slots, tokens, weights, y, err);
    }
    zpp_moe_peer_sum(&peer, plan->slots, tokens, weights, y, pool_of(by));
    return ZPP_OK;
}

/* Sum the rows of this rank's tokens out of the buffers of all ranks. */
static zpp_status sum_phase(struct zpp_rows *rows, const struct zpp_rows_plan *plan, enum zpp_row_phase_kind kind,
                            const void *buffer, const float *weights, void *y, const struct zpp_rows_by *by,
                            const struct zpp_wait *wait, struct zpp_err *err) {
    const size_t here = (size_t)rows_of(rows, plan)[rows->rank];
    const struct zpp_row_memory memory = {.first = buffer,
                                          .count = here,
                                          .first_item_bytes = row_bytes(plan->numbers),
                                          .most_count = most_of(rows, rows_of(rows, plan))};
    struct zpp_row_phase phase = {.desc = desc_of(plan->numbers, kind, weights != NULL, is_on_device(by))};
    zpp_status status = enter_phase(rows, by, err);
    if (status != ZPP_OK) return status;
    status = phase_begin(rows, &phase, &memory, by, wait, err);
    if (status == ZPP_OK) status = check_counts(rows, &phase, rows_of(rows, plan), err);
    if (status == ZPP_OK) status = sum(rows, plan, phase.first, weights, y, by, err);
    if (status == ZPP_OK) status = phase_end(rows, &phase, by, wait, err);
    return zpp_rows_leave(rows, status);
}

zpp_status zpp_rows_combine(zpp_rows *rows, const struct zpp_rows_plan *plan, const void *made, const float *weights,
                            void *y, const struct zpp_rows_by *by, const struct zpp_wait *wait, struct zpp_err *err) {
    return sum_phase(rows, plan, ZPP_ROW_COMBINE, made, weights, y, by, wait, err);
}

zpp_status zpp_rows_dispatch_backward(zpp_rows *rows, const struct zpp_rows_plan *plan, const void *grad_buffer,
                                      void *grad_x, const struct zpp_rows_by *by, const struct zpp_wait *wait,
                                      struct zpp_err *err) {
    return sum_phase(rows, plan, ZPP_ROW_DISPATCH_BACKWARD, grad_buffer, NULL, grad_x, by, wait, err);
}

/* The products lie with the experts; the owners of the weights read them there. */
static zpp_status weights_phase(struct zpp_rows *rows, const struct zpp_rows_plan *plan, const float *dots,
                                float *grad_weights, const struct zpp_rows_by *by, const struct zpp_wait *wait,
                                struct zpp_err *err) {
    const size_t here = (size_t)rows_of(rows, plan)[rows->rank];
    const size_t assignments = (size_t)(tokens_of(rows, plan)[rows->rank] * plan->numbers[ZPP_ROWS_K]);
    const struct zpp_row_memory memory = {.first = dots,
                                          .count = here,
                                          .first_item_bytes = sizeof *dots,
                                          .most_count = most_of(rows, rows_of(rows, plan))};
    struct zpp_row_phase phase = {.desc = desc_of(plan->numbers, ZPP_ROW_WEIGHTS_BACKWARD, true, is_on_device(by))};
    zpp_status status = phase_begin(rows, &phase, &memory, by, wait, err);
    if (status == ZPP_OK) status = check_counts(rows, &phase, rows_of(rows, plan), err);
    if (status != ZPP_OK) return status;
    if (is_on_device(by)) {
        const struct zpp_moe_peer_cuda on = zpp_rows_device_on(rows, by->native);
        const struct zpp_moe_peer_rows peer = peer_rows(rows, plan->numbers, phase.first);
        status = zpp_moe_peer_pick_cuda(&on, &peer, plan->slots, assignments, grad_weights, err);
    } else {
        zpp_moe_peer_pick((const float *const *)phase.first, plan->slots, assignments, grad_weights);
    }
    return status == ZPP_OK ? phase_end(rows, &phase, by, wait, err) : status;
}

zpp_status zpp_rows_combine_backward(zpp_rows *rows, const struct zpp_rows_plan *plan,
                                     const struct zpp_rows_grads *grads, const struct zpp_rows_by *by,
                                     const struct zpp_wait *wait, struct zpp_err *err) {
    const bool of_weights = grads->weights && grads->of_weights;
    const size_t here = (size_t)rows_of(rows, plan)[rows->rank];
    float *memory = of_weights && !is_on_device(by) ? malloc((here + 1) * sizeof *memory) : NULL;
    float *dots = of_weights && is_on_device(by) ? grads->dots : memory;
    if (of_weights && !is_on_device(by) && !memory)
        return zpp_fail(err, ZPP_NOMEM, "moe: no memory for the products of %zu rows", here);
    zpp_status status = enter_phase(rows, by, err);
    if (status == ZPP_OK) {
        status = gather_phase(rows, plan, ZPP_ROW_COMBINE_BACKWARD, grads, dots, by, wait, err);
        if (status == ZPP_OK && of_weights)
            status = weights_phase(rows, plan, dots, grads->grad_weights, by, wait, err);
        (void)zpp_rows_leave(rows, status);
    }
    free(memory);
    return status;
}
