/* SPDX-License-Identifier: Apache-2.0
 *
 * The exchange of rows (rows.h): phases over one descriptor ring, with published memory in arenas of any size.
 *
 * What is published alternates between two blocks. Waiting for a block is rare: a rank posts phase s + 2 after it has
 * read all peers' s + 1, which a peer posts after it has acknowledged s.
 */
#include "rows.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../ops/element.h"
#include "internal.h"

enum phase_kind { DISPATCH = 1, COMBINE, COMBINE_BACKWARD, WEIGHTS_BACKWARD, DISPATCH_BACKWARD };

struct slot {
    zpp_block *block;
    uint64_t seq; /* of the phase that it was published for */
};

struct layer {
    char *name;
    uint64_t calls;
};

struct zpp_rows {
    struct zpp_comm *comm; /* NULL: one rank */
    size_t ranks, rank;
    zpp_desc_ring *ring;
    struct slot slots[2];
    struct layer *layers;
    uint32_t layers_count;
    _Atomic bool busy;
    bool broken;   /* a phase failed: the ranks' numbers may differ from now on */
    bool gathered; /* no dispatch is half done */
    /* The dispatch in progress. */
    struct zpp_desc desc;
    uint64_t seq;
    const void *bases[ZPP_RANKS_MAX];
    const int32_t *chosen[ZPP_RANKS_MAX];
    size_t tokens[ZPP_RANKS_MAX];
    int64_t rows_of[ZPP_RANKS_MAX], *counts;
    size_t counts_capacity;
};

/* --- descriptors -------------------------------------------------------------------------------------------------- */

/* What a rank published, in the mask of its descriptor: rows first, and a second array behind them. */
struct published {
    uint64_t arena; /* 0: nothing */
    uint64_t count; /* rows of the first array */
    uint64_t second_offset_bytes, bytes;
};
_Static_assert(sizeof(struct published) <= ZPP_LANE_MASK_BYTES, "fits into a descriptor");

/* All of a descriptor's kind is compared between ranks. */
static uint64_t kind_of(enum phase_kind phase, zpp_dtype dtype, size_t k, size_t experts, bool weighted) {
    return (uint64_t)phase | (uint64_t)dtype << 8 | (uint64_t)k << 16 | (uint64_t)experts << 24 |
           (uint64_t)weighted << 40;
}

static void describe(void *ctx, const struct zpp_desc *desc, char *text, size_t capacity) {
    static const char *const names[] = {
        "nothing", "dispatch", "combine", "backward of combine", "backward of weights", "backward of dispatch"};
    const struct zpp_rows *rows = ctx;
    const char *name = desc->object < rows->layers_count ? rows->layers[desc->object].name : "unknown";
    const zpp_dtype dtype = (zpp_dtype)(desc->kind >> 8 & 0xff);
    snprintf(text, capacity, "%s #%llu of layer %llu (%s): rows of %llu %s, %u of %u experts a token%s",
             names[desc->kind & 0xff], (unsigned long long)desc->step, (unsigned long long)desc->object, name,
             (unsigned long long)desc->elems, dtype < ZPP_DTYPES ? zpp_dtype_name(dtype) : "?",
             (unsigned)(desc->kind >> 16 & 0xff), (unsigned)(desc->kind >> 24 & 0xffff),
             desc->kind >> 40 & 1 ? ", weighted" : "");
}

static struct zpp_desc desc_of(const int64_t *numbers, enum phase_kind phase, bool weighted) {
    return (struct zpp_desc){.kind = kind_of(phase, (zpp_dtype)numbers[ZPP_ROWS_DTYPE], (size_t)numbers[ZPP_ROWS_K],
                                             (size_t)numbers[ZPP_ROWS_EXPERTS], weighted),
                             .object = (uint64_t)numbers[ZPP_ROWS_LAYER],
                             .step = (uint64_t)numbers[ZPP_ROWS_CALL],
                             .elems = (uint64_t)numbers[ZPP_ROWS_WIDTH]};
}

/* --- a phase ------------------------------------------------------------------------------------------------------ */

/* One rank's memory of a phase, before it is published. */
struct memory {
    const void *first, *second;
    size_t count, first_bytes, second_bytes;
};

struct phase {
    struct zpp_desc desc;
    uint64_t seq;
    bool in_place; /* peers read the caller's own memory */
    const void *first[ZPP_RANKS_MAX], *second[ZPP_RANKS_MAX];
    size_t count[ZPP_RANKS_MAX];
};

static size_t whole_lines(size_t bytes) { return (bytes + ZPP_LINE_BYTES - 1) & ~(size_t)(ZPP_LINE_BYTES - 1); }

/* Memory for the next phase, which no peer reads any more. */
static zpp_status take_slot(struct zpp_rows *rows, size_t bytes, const struct zpp_wait *wait, struct slot **out,
                            struct zpp_err *err) {
    struct slot *slot = &rows->slots[(rows->seq + 1) % 2];
    zpp_status status = slot->seq ? zpp_desc_ring_wait_acked(rows->ring, slot->seq, wait, err) : ZPP_OK;
    if (status != ZPP_OK) return status;
    slot->seq = 0;
    if (!slot->block || zpp_block_bytes(slot->block) < bytes) {
        zpp_block_free(slot->block);
        slot->block = NULL;
        status = zpp_comm_alloc(rows->comm, bytes, &slot->block, err);
    }
    *out = slot;
    return status;
}

/* Bring this rank's memory to where peers can read it, and write that into the descriptor. */
static zpp_status place(struct zpp_rows *rows, struct phase *phase, const struct memory *memory, zpp_pool *pool,
                        const struct zpp_wait *wait, struct slot **slot, struct zpp_err *err) {
    struct published published = {.count = memory->count, .second_offset_bytes = whole_lines(memory->first_bytes)};
    struct zpp_place at = {0};
    published.bytes = memory->second ? published.second_offset_bytes + memory->second_bytes : memory->first_bytes;
    phase->in_place = false;
    *slot = NULL;
    if (published.bytes == 0) {
        memcpy(phase->desc.mask, &published, sizeof published);
        return ZPP_OK;
    }
    if (!memory->second) phase->in_place = zpp_arena_find(rows->comm, memory->first, memory->first_bytes, &at);
    if (!phase->in_place) {
        const zpp_status status = take_slot(rows, published.bytes, wait, slot, err);
        if (status != ZPP_OK) return status;
        uint8_t *to = zpp_block_data((*slot)->block);
        zpp_moe_peer_copy(to, memory->first, memory->first_bytes, pool);
        if (memory->second) memcpy(to + published.second_offset_bytes, memory->second, memory->second_bytes);
        (void)zpp_arena_find(rows->comm, to, published.bytes, &at);
    }
    published.arena = at.arena;
    phase->desc.offset_bytes = at.offset_bytes;
    memcpy(phase->desc.mask, &published, sizeof published);
    return ZPP_OK;
}

static void describe_phase(const void *ctx, char *text, size_t capacity) {
    snprintf(text, capacity, "an exchange of rows of group \"%s\"", ((const struct zpp_rows *)ctx)->comm->name);
}

static zpp_status read_peer(struct zpp_rows *rows, struct phase *phase, int rank, const struct zpp_wait *wait,
                            struct zpp_err *err) {
    struct zpp_wait_ctx wait_ctx = {.comm = rows->comm, .wait = wait, .describe = describe_phase, .ctx = rows};
    struct zpp_desc desc;
    struct published published;
    const uint8_t *data = NULL;
    zpp_status status = zpp_desc_ring_read(rows->ring, rank, phase->seq, &phase->desc, wait, &desc, err);
    if (status != ZPP_OK) return status;
    memcpy(&published, desc.mask, sizeof published);
    const struct zpp_place at = {.arena = published.arena, .offset_bytes = desc.offset_bytes};
    if (published.arena) status = zpp_arena_at(&wait_ctx, rank, &at, published.bytes, &data, err);
    if (status != ZPP_OK) return status;
    phase->count[rank] = published.count;
    phase->first[rank] = data;
    phase->second[rank] =
        data && published.second_offset_bytes <= published.bytes ? data + published.second_offset_bytes : NULL;
    return ZPP_OK;
}

static zpp_status phase_begin(struct zpp_rows *rows, struct phase *phase, const struct memory *memory, zpp_pool *pool,
                              const struct zpp_wait *wait, struct zpp_err *err) {
    struct slot *slot = NULL;
    phase->first[rows->rank] = memory->first;
    phase->second[rows->rank] = memory->second;
    phase->count[rows->rank] = memory->count;
    phase->in_place = false;
    if (!rows->comm) return ZPP_OK;
    rows->broken = true; /* until the phase has ended well */
    zpp_status status = place(rows, phase, memory, pool, wait, &slot, err);
    if (status == ZPP_OK) status = zpp_desc_ring_post(rows->ring, &phase->desc, wait, &phase->seq, err);
    if (status != ZPP_OK) return status;
    rows->seq = phase->seq;
    if (slot) slot->seq = phase->seq;
    for (int r = 0; status == ZPP_OK && r < (int)rows->ranks; r++)
        if (r != (int)rows->rank) status = read_peer(rows, phase, r, wait, err);
    return status;
}

/* This rank has read what it needs. Memory of the caller is not given back before all peers have. */
static zpp_status phase_end(struct zpp_rows *rows, const struct phase *phase, const struct zpp_wait *wait,
                            struct zpp_err *err) {
    if (!rows->comm) return ZPP_OK;
    zpp_desc_ring_ack(rows->ring, phase->seq);
    const zpp_status status = phase->in_place ? zpp_desc_ring_wait_acked(rows->ring, phase->seq, wait, err) : ZPP_OK;
    rows->broken = status != ZPP_OK;
    return status;
}

/* Peers have to publish as many rows as the dispatch found; anything else is a caller's fault on that rank. */
static zpp_status check_counts(struct zpp_rows *rows, const struct phase *phase, const int64_t *wanted,
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

/* --- one caller at a time ----------------------------------------------------------------------------------------- */

static zpp_status enter(struct zpp_rows *rows, struct zpp_err *err) {
    if (atomic_exchange_explicit(&rows->busy, true, memory_order_acquire))
        return zpp_fail(err, ZPP_STATE,
                        "moe: two threads are in one exchange of rows; use one exchange for each thread");
    const zpp_status status = rows->comm ? zpp_comm_health(rows->comm, err) : ZPP_OK;
    if (status != ZPP_OK) atomic_store_explicit(&rows->busy, false, memory_order_release);
    return status;
}

/* For all but the second half of a dispatch. */
static zpp_status enter_phase(struct zpp_rows *rows, struct zpp_err *err) {
    const zpp_status status = enter(rows, err);
    if (status != ZPP_OK || !rows->broken) return status;
    atomic_store_explicit(&rows->busy, false, memory_order_release);
    return zpp_fail(err, ZPP_STATE,
                    "moe: an earlier exchange of rows failed on this rank, so the ranks are no longer at "
                    "the same one; make a new exchange on all ranks");
}

static zpp_status leave(struct zpp_rows *rows, zpp_status status) {
    atomic_store_explicit(&rows->busy, false, memory_order_release);
    return status;
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
    for (uint32_t i = 0; i < rows->layers_count; i++) free(rows->layers[i].name);
    for (int i = 0; i < 2; i++) zpp_block_free(rows->slots[i].block);
    zpp_desc_ring_destroy(rows->ring);
    free(rows->layers);
    free(rows->counts);
    free(rows);
}

int zpp_rows_ranks(const zpp_rows *rows) { return (int)rows->ranks; }

zpp_status zpp_rows_add_layer(zpp_rows *rows, const char *name, uint32_t *layer, struct zpp_err *err) {
    struct layer *layers = realloc(rows->layers, (rows->layers_count + 1) * sizeof *layers);
    if (layers) rows->layers = layers;
    char *copy = layers ? strdup(name) : NULL;
    if (!copy) return zpp_fail(err, ZPP_NOMEM, "moe: no memory for layer \"%s\"", name);
    layers[rows->layers_count] = (struct layer){.name = copy};
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
static zpp_status count_choices(struct zpp_rows *rows, const struct phase *phase, size_t *rows_here,
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

zpp_status zpp_rows_dispatch_begin(zpp_rows *rows, const struct zpp_rows_dispatch *dispatch, zpp_pool *pool,
                                   const struct zpp_wait *wait, size_t *rows_here, struct zpp_err *err) {
    zpp_status status = enter_phase(rows, err);
    if (status != ZPP_OK) return status;
    status = check_dispatch(rows, dispatch, err);
    if (status != ZPP_OK) return leave(rows, status);
    struct phase phase = {.desc = {.kind = kind_of(DISPATCH, dispatch->dtype, dispatch->k, dispatch->experts, false),
                                   .object = dispatch->layer,
                                   .step = ++rows->layers[dispatch->layer].calls,
                                   .elems = dispatch->width_elems}};
    const struct memory memory = {dispatch->x, dispatch->chosen, dispatch->tokens,
                                  dispatch->tokens * dispatch->width_elems * zpp_dtype_bytes(dispatch->dtype),
                                  dispatch->tokens * dispatch->k * sizeof *dispatch->chosen};
    status = phase_begin(rows, &phase, &memory, pool, wait, err);
    if (status == ZPP_OK) status = count_choices(rows, &phase, rows_here, err);
    return leave(rows, status);
}

static void write_numbers(const struct zpp_rows *rows, int64_t *numbers) {
    numbers[ZPP_ROWS_LAYER] = (int64_t)rows->desc.object;
    numbers[ZPP_ROWS_CALL] = (int64_t)rows->desc.step;
    numbers[ZPP_ROWS_EXPERTS] = (int64_t)(rows->desc.kind >> 24 & 0xffff);
    numbers[ZPP_ROWS_K] = (int64_t)(rows->desc.kind >> 16 & 0xff);
    numbers[ZPP_ROWS_WIDTH] = (int64_t)rows->desc.elems;
    numbers[ZPP_ROWS_DTYPE] = (int64_t)(rows->desc.kind >> 8 & 0xff);
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

static size_t row_bytes(const int64_t *numbers) {
    return (size_t)numbers[ZPP_ROWS_WIDTH] * zpp_dtype_bytes((zpp_dtype)numbers[ZPP_ROWS_DTYPE]);
}

/* Rows of this rank's buffer that peers own. */
static size_t foreign_rows(const struct zpp_rows *rows, const struct zpp_rows_plan *plan) {
    const int64_t *starts = starts_of(plan);
    return (size_t)(starts[rows->ranks] - (starts[rows->rank + 1] - starts[rows->rank]));
}

zpp_status zpp_rows_dispatch_end(zpp_rows *rows, const struct zpp_rows_plan *plan, void *buffer, zpp_pool *pool,
                                 struct zpp_err *err) {
    zpp_status status = enter(rows, err);
    if (status != ZPP_OK) return status;
    if (rows->gathered)
        return leave(rows, zpp_fail(err, ZPP_STATE, "moe: the second half of a dispatch without a first one"));
    const struct zpp_moe_choices choices = choices_of(rows);
    const struct zpp_moe_peer_plan peer_plan = {plan->ends, plan->taken, starts_of(plan), plan->slots};
    write_numbers(rows, plan->numbers);
    for (size_t r = 0; r < rows->ranks; r++) {
        tokens_of(rows, plan)[r] = (int64_t)rows->tokens[r];
        rows_of(rows, plan)[r] = rows->rows_of[r];
    }
    zpp_moe_peer_plan(&choices, rows->counts, &peer_plan);
    const struct zpp_moe_peer_rows peer = peer_rows(rows, plan->numbers, rows->bases);
    zpp_moe_peer_gather(&peer, plan->taken, starts_of(plan), buffer, pool);
    count_read(rows, foreign_rows(rows, plan) * row_bytes(plan->numbers));
    rows->gathered = true;
    rows->broken = false;
    if (rows->comm) zpp_desc_ring_ack(rows->ring, rows->seq);
    return leave(rows, ZPP_OK);
}

/* --- the later phases --------------------------------------------------------------------------------------------- */

/* Sum the rows of this rank's tokens out of the buffers of all ranks. */
static zpp_status sum_phase(struct zpp_rows *rows, const struct zpp_rows_plan *plan, enum phase_kind kind,
                            const void *buffer, const float *weights, void *y, zpp_pool *pool,
                            const struct zpp_wait *wait, struct zpp_err *err) {
    const int64_t *numbers = plan->numbers;
    const size_t here = (size_t)rows_of(rows, plan)[rows->rank];
    const size_t tokens = (size_t)tokens_of(rows, plan)[rows->rank];
    const struct memory memory = {.first = buffer, .count = here, .first_bytes = here * row_bytes(numbers)};
    struct phase phase = {.desc = desc_of(numbers, kind, weights != NULL)};
    zpp_status status = enter_phase(rows, err);
    if (status != ZPP_OK) return status;
    status = phase_begin(rows, &phase, &memory, pool, wait, err);
    if (status == ZPP_OK) status = check_counts(rows, &phase, rows_of(rows, plan), err);
    if (status != ZPP_OK) return leave(rows, status);
    const struct zpp_moe_peer_rows peer = peer_rows(rows, numbers, phase.first);
    zpp_moe_peer_sum(&peer, plan->slots, tokens, weights, y, pool);
    if (rows->comm) {
        size_t foreign = 0;
        for (size_t a = 0; a < tokens * peer.k; a++)
            foreign += plan->slots[a] >= 0 && (size_t)(plan->slots[a] >> 32) != rows->rank;
        count_read(rows, foreign * row_bytes(numbers));
    }
    return leave(rows, phase_end(rows, &phase, wait, err));
}

zpp_status zpp_rows_combine(zpp_rows *rows, const struct zpp_rows_plan *plan, const void *made, const float *weights,
                            void *y, zpp_pool *pool, const struct zpp_wait *wait, struct zpp_err *err) {
    return sum_phase(rows, plan, COMBINE, made, weights, y, pool, wait, err);
}

zpp_status zpp_rows_dispatch_backward(zpp_rows *rows, const struct zpp_rows_plan *plan, const void *grad_buffer,
                                      void *grad_x, zpp_pool *pool, const struct zpp_wait *wait, struct zpp_err *err) {
    return sum_phase(rows, plan, DISPATCH_BACKWARD, grad_buffer, NULL, grad_x, pool, wait, err);
}

/* Gather the gradients of the sums: times the weight, and with `dots` their products with the rows. */
static zpp_status gather_phase(struct zpp_rows *rows, const struct zpp_rows_plan *plan,
                               const struct zpp_rows_grads *grads, float *dots, zpp_pool *pool,
                               const struct zpp_wait *wait, struct zpp_err *err) {
    const int64_t *numbers = plan->numbers;
    const size_t tokens = (size_t)tokens_of(rows, plan)[rows->rank], k = (size_t)numbers[ZPP_ROWS_K];
    const struct memory memory = {grads->grad_y, tokens ? grads->weights : NULL, tokens, tokens * row_bytes(numbers),
                                  tokens * k * sizeof(float)};
    struct phase phase = {.desc = desc_of(numbers, COMBINE_BACKWARD, grads->weights != NULL)};
    zpp_status status = phase_begin(rows, &phase, &memory, pool, wait, err);
    if (status == ZPP_OK) status = check_counts(rows, &phase, tokens_of(rows, plan), err);
    if (status != ZPP_OK) return status;
    const struct zpp_moe_peer_scale scale = {(const float *const *)phase.second, grads->made, dots};
    const struct zpp_moe_peer_rows peer = peer_rows(rows, numbers, phase.first);
    if (grads->weights) zpp_moe_peer_gather_scaled(&peer, plan->taken, starts_of(plan), &scale, grads->grad_made, pool);
    else zpp_moe_peer_gather(&peer, plan->taken, starts_of(plan), grads->grad_made, pool);
    count_read(rows, foreign_rows(rows, plan) * row_bytes(numbers));
    return phase_end(rows, &phase, wait, err);
}

/* The products lie with the experts; the owners of the weights read them there. */
static zpp_status weights_phase(struct zpp_rows *rows, const struct zpp_rows_plan *plan, const float *dots,
                                float *grad_weights, zpp_pool *pool, const struct zpp_wait *wait, struct zpp_err *err) {
    const size_t here = (size_t)rows_of(rows, plan)[rows->rank];
    const size_t tokens = (size_t)tokens_of(rows, plan)[rows->rank], k = (size_t)plan->numbers[ZPP_ROWS_K];
    const struct memory memory = {.first = dots, .count = here, .first_bytes = here * sizeof *dots};
    struct phase phase = {.desc = desc_of(plan->numbers, WEIGHTS_BACKWARD, true)};
    zpp_status status = phase_begin(rows, &phase, &memory, pool, wait, err);
    if (status == ZPP_OK) status = check_counts(rows, &phase, rows_of(rows, plan), err);
    if (status != ZPP_OK) return status;
    zpp_moe_peer_pick((const float *const *)phase.first, plan->slots, tokens * k, grad_weights);
    return phase_end(rows, &phase, wait, err);
}

zpp_status zpp_rows_combine_backward(zpp_rows *rows, const struct zpp_rows_plan *plan,
                                     const struct zpp_rows_grads *grads, zpp_pool *pool, const struct zpp_wait *wait,
                                     struct zpp_err *err) {
    const bool of_weights = grads->weights && grads->of_weights;
    const size_t here = (size_t)rows_of(rows, plan)[rows->rank];
    float *dots = of_weights ? malloc((here + 1) * sizeof *dots) : NULL;
    if (of_weights && !dots) return zpp_fail(err, ZPP_NOMEM, "moe: no memory for the products of %zu rows", here);
    zpp_status status = enter_phase(rows, err);
    if (status == ZPP_OK) {
        status = gather_phase(rows, plan, grads, dots, pool, wait, err);
        if (status == ZPP_OK && of_weights)
            status = weights_phase(rows, plan, dots, grads->grad_weights, pool, wait, err);
        (void)leave(rows, status);
    }
    free(dots);
    return status;
}
