/* SPDX-License-Identifier: Apache-2.0
 *
 * The start of every collective: its sequence number, its signature, and the comparison with the peers' signatures.
 * Equal order does not prove an equal call: ranks whose programs diverged would otherwise add the halves of two
 * different tensors without an error.
 *
 *   what: bits 0-6 collective, 7 on an accelerator (nccl.h), 8-15 dtype, 16-23 reduce op, 24-39 root
 *         of quantised ones: 40 four bits, 41-56 sixteenths of a block, 57-62 ranks a node (0: all)
 *         of the others: 40-63 object
 *   elems: of quantised ones: bits 40-63 object; of an all-to-all: zpp_comm_rows
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "internal.h"
#include "reduce.h"

static const char *const coll_names[ZPP_COLLS] = {
    [ZPP_COLL_BARRIER] = "barrier",       [ZPP_COLL_ALL_REDUCE] = "all_reduce",
    [ZPP_COLL_ALL_GATHER] = "all_gather", [ZPP_COLL_REDUCE_SCATTER] = "reduce_scatter",
    [ZPP_COLL_BROADCAST] = "broadcast",   [ZPP_COLL_REDUCE] = "reduce",
    [ZPP_COLL_ALL_TO_ALL] = "all_to_all", [ZPP_COLL_GATHER] = "gather",
    [ZPP_COLL_SCATTER] = "scatter",
    [ZPP_COLL_ALL_GATHER_QUANT] = "quantised all_gather",
    [ZPP_COLL_REDUCE_SCATTER_QUANT] = "quantised reduce_scatter",
    [ZPP_COLL_ALL_REDUCE_QUANT] = "quantised all_reduce",
};
static const char *const op_names[ZPP_REDUCE_OPS] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"};

const char *zpp_reduce_op_name(zpp_reduce_op op) { return (unsigned)op < ZPP_REDUCE_OPS ? op_names[op] : "?"; }

zpp_status zpp_root_check(const struct zpp_comm *comm, const struct zpp_call *call, struct zpp_err *err) {
    if (!zpp_coll_has_root(call->coll) || (call->root >= 0 && call->root < comm->ranks)) return ZPP_OK;
    return zpp_fail(err, ZPP_INVALID, "comm: root %d, wanted a rank of group \"%s\", 0..%d", call->root, comm->name,
                    comm->ranks - 1);
}

struct zpp_sig zpp_sig_make(enum zpp_coll coll, zpp_dtype dtype, unsigned reduce_op, unsigned root, uint64_t elems) {
    const struct zpp_sig sig = {
        (uint64_t)coll | (uint64_t)dtype << 8 | (uint64_t)reduce_op << 16 | (uint64_t)root << 24, elems};
    return sig;
}

/* A text that grows at its end; what does not fit is cut off. */
struct text {
    char *at;
    size_t capacity, used;
};

static void __attribute__((format(printf, 2, 3))) add(struct text *text, const char *format, ...) {
    va_list args;
    va_start(args, format);
    const int length = vsnprintf(text->at + text->used, text->capacity - text->used, format, args);
    va_end(args);
    const size_t left = text->capacity - text->used - 1;
    text->used += length > 0 && (size_t)length < left ? (size_t)length : length > 0 ? left : 0;
}

static const char *const phase_names[ZPP_ROWS_PHASES] = {
    [ZPP_ROWS_ROUTE] = "route",
    [ZPP_ROWS_DISPATCH] = "dispatch",
    [ZPP_ROWS_WEIGHTS] = "weights",
    [ZPP_ROWS_COMBINE] = "combine",
    [ZPP_ROWS_DISPATCH_BACK] = "backward of dispatch",
    [ZPP_ROWS_WEIGHTS_BACK] = "backward of weights",
    [ZPP_ROWS_COMBINE_BACK] = "backward of combine",
};

/* What an exchange of rows says of itself, in place of a length. */
static void add_rows(struct text *text, uint64_t rows) {
    const unsigned phase = rows & 0xff;
    if (phase == 0 || phase >= ZPP_ROWS_PHASES) return;
    add(text, ", %s #%u of experts' layer %u", phase_names[phase], (unsigned)(rows >> 24),
        (unsigned)(rows >> 8 & 0xffff));
}

static void add_quantised(struct text *text, const struct zpp_sig *sig) {
    const unsigned block_elems = (sig->what >> 41 & 0xffff) * 16, node_ranks = sig->what >> 57 & 0x3f;
    if (block_elems) add(text, ", int%d in blocks of %u", sig->what >> 40 & 1 ? 4 : 8, block_elems);
    if (node_ranks) add(text, ", %u ranks a node", node_ranks);
}

static void add_object(struct text *text, unsigned object) {
    if (object) add(text, ", object %u", object % ZPP_OBJECTS);
    if (object >= ZPP_OBJECTS) add(text, " of model %u", object / ZPP_OBJECTS);
}

/* Collectives with a length of their own on each rank are described without one. */
static void add_tensor(struct text *text, unsigned coll, unsigned dtype, uint64_t elems) {
    const char *name = dtype < ZPP_DTYPES ? zpp_dtype_name((zpp_dtype)dtype) : "?";
    if (coll == ZPP_COLL_BARRIER) return;
    if (coll == ZPP_COLL_ALL_TO_ALL || coll == ZPP_COLL_SCATTER || coll == ZPP_COLL_GATHER) add(text, "%s", name);
    else add(text, "%s, %" PRIu64 " elements", name, elems);
}

void zpp_sig_describe(const struct zpp_sig *sig, char *out, size_t capacity) {
    const unsigned coll = sig->what & 0x7f, op = sig->what >> 16 & 0xff, root = sig->what >> 24 & 0xffff;
    const bool quantised = coll >= ZPP_COLL_ALL_GATHER_QUANT;
    struct text text = {out, capacity, 0};
    if (coll == 0 || coll >= ZPP_COLLS) {
        add(&text, "an unknown collective %u", coll);
        return;
    }
    add(&text, "%s(", coll_names[coll]);
    add_tensor(&text, coll, sig->what >> 8 & 0xff, quantised ? sig->elems & (ZPP_QUANT_ELEMS_END - 1) : sig->elems);
    if (quantised) add_quantised(&text, sig);
    if (coll == ZPP_COLL_ALL_TO_ALL) add_rows(&text, sig->elems);
    if (op < ZPP_REDUCE_OPS) add(&text, ", %s", op_names[op]);
    if (root != ZPP_NO_ROOT) add(&text, ", root %u", root);
    add_object(&text, (unsigned)((quantised ? sig->elems : sig->what) >> 40));
    add(&text, "%s", sig->what & ZPP_SIG_BESIDE ? ") on GPUs" : ")");
}

static void describe_now(const void *ctx, char *text, size_t capacity) {
    const struct zpp_comm *comm = ctx;
    char call[160];
    zpp_sig_describe(&comm->now, call, sizeof call);
    snprintf(text, capacity, "%s #%" PRIu32, call, comm->seq);
}

zpp_status zpp_enter(struct zpp_comm *comm, struct zpp_sig sig, const struct zpp_wait *wait,
                     struct zpp_wait_ctx *wait_ctx, struct zpp_err *err) {
    const zpp_status status = zpp_comm_check(comm, err);
    if (status != ZPP_OK) return status;
    comm->seq++;
    comm->now = sig;
    comm->policy = 0;
    comm->costs_now = NULL;
    *wait_ctx = (struct zpp_wait_ctx){
        .comm = comm, .wait = wait, .own_timeout = true, .fatal = true, .describe = describe_now, .ctx = comm};
    return ZPP_OK;
}

static bool same_sig(const struct zpp_sig *a, const struct zpp_sig *b) {
    return a->what == b->what && a->elems == b->elems;
}

/* Every rank names the same pair: rank 0 and the lowest rank that differs from it. */
static zpp_status diverged(struct zpp_comm *comm, struct zpp_err *err) {
    const struct zpp_sig first = zpp_post_of(comm, 0)->sig;
    int other = 1;
    while (other < comm->ranks - 1 && same_sig(&first, &zpp_post_of(comm, other)->sig)) other++;
    const struct zpp_sig second = zpp_post_of(comm, other)->sig;
    const uint32_t seq = comm->outer ? comm->outer->seq : comm->seq; /* the number of calls that the caller made */
    char here[160], there[160];
    zpp_sig_describe(&first, here, sizeof here);
    zpp_sig_describe(&second, there, sizeof there);
    return zpp_comm_fail(comm, ZPP_PEER, other, err,
                         "comm: rank %d is in %s #%" PRIu32 " but rank %d is in %s #%" PRIu32 " of group \"%s\"; "
                         "all ranks must call the same collectives with the same sizes in the same order",
                         zpp_label(comm, 0), here, seq, zpp_label(comm, other), there, seq, comm->name);
}

void zpp_post(struct zpp_comm *comm) {
    struct zpp_post *mine = zpp_my_post(comm);
    if (comm->ranks == 1) return;
    mine->sig = comm->now;
    zpp_counter_raise(&mine->counter, comm->seq);
}

zpp_status zpp_await_posts(struct zpp_wait_ctx *wait_ctx, struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    if (comm->ranks == 1) return ZPP_OK;
    const struct zpp_wait_target wait_target =
        zpp_target_at(comm, offsetof(struct zpp_control, post) + (comm->seq % 2) * sizeof(struct zpp_post), comm->seq);
    const zpp_status status = zpp_await_all(wait_ctx, &wait_target, err);
    if (status != ZPP_OK) return status;
    for (int r = 0; r < comm->ranks; r++)
        if (!same_sig(&zpp_post_of(comm, r)->sig, &comm->now)) return diverged(comm, err);
    return ZPP_OK;
}

zpp_status zpp_exchange(struct zpp_wait_ctx *wait_ctx, struct zpp_err *err) {
    zpp_post(wait_ctx->comm);
    return zpp_await_posts(wait_ctx, err);
}

zpp_status zpp_exchange_small(struct zpp_wait_ctx *wait_ctx, const void *payload, size_t bytes, struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    if (bytes)
        memcpy(bytes <= ZPP_INLINE_BYTES ? zpp_my_post(comm)->bytes
                                         : zpp_control(comm, comm->rank)->small[comm->seq % 2],
               payload, bytes);
    return zpp_exchange(wait_ctx, err);
}

zpp_status zpp_exchange_place_of(struct zpp_wait_ctx *wait_ctx, int owner, const void *tensor_here, size_t bytes,
                                 bool *in_arena, const uint8_t **tensor, struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    struct zpp_place *place = &zpp_my_post(comm)->place;
    if (comm->rank != owner || !zpp_arena_find(comm, tensor_here, bytes, place)) *place = (struct zpp_place){0};
    zpp_store_policy_post(comm, bytes, place);
    const zpp_status status = zpp_exchange(wait_ctx, err);
    if (status != ZPP_OK) return status;
    *in_arena = zpp_post_of(comm, owner)->place.arena != 0;
    zpp_store_policy_adopt(comm, *in_arena);
    *tensor = tensor_here;
    if (!*in_arena || comm->rank == owner) return ZPP_OK;
    return zpp_arena_at(wait_ctx, owner, &zpp_post_of(comm, owner)->place, bytes, tensor, err);
}

zpp_status zpp_exchange_place(struct zpp_wait_ctx *wait_ctx, const void *tensor_here, size_t bytes, bool *in_place,
                              const uint8_t **tensor, struct zpp_err *err) {
    struct zpp_comm *comm = wait_ctx->comm;
    struct zpp_place *place = &zpp_my_post(comm)->place;
    if (!zpp_arena_find(comm, tensor_here, bytes, place)) *place = (struct zpp_place){0};
    zpp_store_policy_post(comm, bytes, place);
    zpp_status status = zpp_exchange(wait_ctx, err);
    *in_place = status == ZPP_OK;
    for (int r = 0; status == ZPP_OK && r < comm->ranks; r++)
        if (!zpp_post_of(comm, r)->place.arena) *in_place = false;
    if (status == ZPP_OK) zpp_store_policy_adopt(comm, *in_place);
    if (!*in_place) return status;
    for (int r = 0; status == ZPP_OK && r < comm->ranks; r++) {
        if (r == comm->rank)
            tensor[r] = tensor_here;
        else
            status = zpp_arena_at(wait_ctx, r, &zpp_post_of(comm, r)->place, bytes, &tensor[r], err);
    }
    return status;
}
