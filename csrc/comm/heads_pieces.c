/* SPDX-License-Identifier: Apache-2.0
 *
 * See heads_pieces.h.
 */
#include "heads_pieces.h"

/* --- what a message is ------------------------------------------------------------------------------------------- */

static struct zpp_heads_box packed(const uint8_t *data, const struct zpp_heads_extent *extent) {
    const size_t token_bytes = extent->heads * extent->width_bytes;
    return (struct zpp_heads_box){data, extent->tokens * token_bytes, token_bytes, extent->width_bytes};
}

static size_t span(const struct zpp_heads_tensor *tensor, int rank) { return tensor->end[rank] - tensor->begin[rank]; }

/* What `from` sends to `to` of one tensor. */
static struct zpp_heads_extent extent_of(const struct zpp_heads_job *job, const struct zpp_heads_tensor *tensor,
                                         int from, int to) {
    return (struct zpp_heads_extent){job->batch, job->lengths[job->to_tokens ? to : from],
                                     span(tensor, job->to_tokens ? from : to), tensor->width_bytes};
}

size_t zpp_heads_message_bytes(const struct zpp_heads_job *job, int from, int to) {
    size_t bytes = 0;
    for (int i = 0; i < job->tensors; i++) {
        const struct zpp_heads_extent extent = extent_of(job, &job->tensor[i], from, to);
        bytes += zpp_heads_extent_bytes(&extent);
    }
    return bytes;
}

size_t zpp_heads_tokens_before(const struct zpp_heads_job *job, int rank) {
    size_t sum = 0;
    for (int r = 0; r < rank; r++) sum += job->lengths[r];
    return sum;
}

static struct zpp_heads_box place_at(const struct zpp_heads_place *place, size_t token, size_t head) {
    const uint8_t *data = place->data;
    return (struct zpp_heads_box){data + token * place->token_stride + head * place->head_stride, place->batch_stride,
                                  place->token_stride, place->head_stride};
}

/* Where this rank holds what it sends to `to`. */
static struct zpp_heads_box outgoing(const struct zpp_heads_plan *plan, const struct zpp_heads_tensor *tensor,
                                     int to) {
    const struct zpp_heads_job *job = plan->job;
    return job->to_tokens ? place_at(&tensor->whole, zpp_heads_tokens_before(job, to), 0)
                          : place_at(&tensor->cut, 0, tensor->begin[to]);
}

/* Where tensor `index` of what `from` sent lies: in `piece`, or, of this rank itself, in its source. */
static struct zpp_heads_box incoming(const struct zpp_heads_plan *plan, int index, int from, const uint8_t *piece) {
    const struct zpp_heads_job *job = plan->job;
    if (from == plan->me) return outgoing(plan, &job->tensor[index], from);
    for (int i = 0; piece && i < index; i++) { /* NULL: nothing comes from there */
        const struct zpp_heads_extent before = extent_of(job, &job->tensor[i], from, plan->me);
        piece += zpp_heads_extent_bytes(&before);
    }
    const struct zpp_heads_extent extent = extent_of(job, &job->tensor[index], from, plan->me);
    return packed(piece, &extent);
}

/* --- writing messages -------------------------------------------------------------------------------------------- */

static zpp_status copy(const struct zpp_heads_plan *plan, const struct zpp_heads_copy *copy, struct zpp_err *err) {
    return zpp_heads_extent_bytes(&copy->extent) ? plan->copy(plan->ctx, copy, err) : ZPP_OK;
}

zpp_status zpp_heads_pack(const struct zpp_heads_plan *plan, uint8_t *block, struct zpp_err *err) {
    const struct zpp_heads_job *job = plan->job;
    zpp_status status = ZPP_OK;
    for (int to = 0; to < plan->ranks; to++) {
        for (int i = 0; to != plan->me && i < job->tensors && status == ZPP_OK; i++) {
            const struct zpp_heads_extent extent = extent_of(job, &job->tensor[i], plan->me, to);
            const struct zpp_heads_box src = outgoing(plan, &job->tensor[i], to);
            status = copy(plan, &(struct zpp_heads_copy){extent, packed(block, &extent), &src, 1, job->dtype}, err);
            block += zpp_heads_extent_bytes(&extent);
        }
    }
    return status;
}

/* --- reading ----------------------------------------------------------------------------------------------------- */

static zpp_status read_to_heads(const struct zpp_heads_plan *plan, const void *const *pieces, int index,
                                struct zpp_err *err) {
    const struct zpp_heads_job *job = plan->job;
    const struct zpp_heads_tensor *tensor = &job->tensor[index];
    zpp_status status = ZPP_OK;
    for (int k = pieces ? 1 : 0; k < (pieces ? plan->ranks : 1) && status == ZPP_OK; k++) {
        const int from = (plan->me + k) % plan->ranks;
        const struct zpp_heads_box src = incoming(plan, index, from, pieces ? pieces[from] : NULL);
        const struct zpp_heads_copy one = {extent_of(job, tensor, from, plan->me),
                                           place_at(&tensor->whole, zpp_heads_tokens_before(job, from), 0), &src, 1,
                                           job->dtype};
        status = copy(plan, &one, err);
    }
    return status;
}

/* Collect where the ranks have `head` that have it; return the first head from which on others have it. */
static size_t collect(const struct zpp_heads_plan *plan, const void *const *pieces, int index, size_t head,
                      struct zpp_heads_box *src, int *sources) {
    const struct zpp_heads_tensor *tensor = &plan->job->tensor[index];
    size_t until = tensor->heads;
    *sources = 0;
    for (int from = 0; from < plan->ranks; from++) {
        const size_t begin = tensor->begin[from], end = tensor->end[from];
        if (begin > head && begin < until) until = begin;
        if (begin > head || end <= head) continue;
        if (end < until) until = end;
        struct zpp_heads_box box = incoming(plan, index, from, pieces ? pieces[from] : NULL);
        if (box.data) box.data += (head - begin) * box.head_stride;
        src[(*sources)++] = box;
    }
    return until;
}

static zpp_status read_to_tokens(const struct zpp_heads_plan *plan, const void *const *pieces, int index,
                                 struct zpp_err *err) {
    const struct zpp_heads_job *job = plan->job;
    const struct zpp_heads_tensor *tensor = &job->tensor[index];
    struct zpp_heads_box src[ZPP_RANKS_MAX];
    zpp_status status = ZPP_OK;
    if (!job->batch || !job->lengths[plan->me]) return ZPP_OK; /* no bytes come, so the pieces have no address */
    for (size_t head = 0, until; head < tensor->heads && status == ZPP_OK; head = until) {
        struct zpp_heads_copy one = {.dst = place_at(&tensor->cut, 0, head), .src = src, .dtype = job->dtype};
        until = collect(plan, pieces, index, head, src, &one.sources);
        one.extent =
            (struct zpp_heads_extent){job->batch, job->lengths[plan->me], until - head, tensor->width_bytes};
        const bool own = one.sources == 1 && tensor->begin[plan->me] <= head && head < tensor->end[plan->me];
        if (own == !pieces) status = copy(plan, &one, err);
    }
    return status;
}

zpp_status zpp_heads_read(const struct zpp_heads_plan *plan, const void *const *pieces, struct zpp_err *err) {
    zpp_status status = ZPP_OK;
    for (int i = 0; i < plan->job->tensors && status == ZPP_OK; i++)
        status = plan->job->to_tokens ? read_to_tokens(plan, pieces, i, err) : read_to_heads(plan, pieces, i, err);
    return status;
}

/* --- checks ------------------------------------------------------------------------------------------------------ */

static zpp_status check_tensor(const struct zpp_heads_job *job, int ranks, int index, struct zpp_err *err) {
    const struct zpp_heads_tensor *tensor = &job->tensor[index];
    size_t covered = 0;
    if (tensor->width_bytes == 0 || tensor->width_bytes % zpp_dtype_bytes(job->dtype))
        return zpp_fail(err, ZPP_INVALID, "comm: heads of %zu bytes, wanted whole elements of %s", tensor->width_bytes,
                        zpp_dtype_name(job->dtype));
    for (int r = 0; r < ranks; r++) {
        if (tensor->begin[r] > tensor->end[r] || tensor->end[r] > tensor->heads || tensor->begin[r] > covered ||
            tensor->end[r] < covered)
            return zpp_fail(err, ZPP_INVALID,
                            "comm: rank %d computes heads %zu to %zu of %zu; wanted every head with some rank, in "
                            "the order of the ranks",
                            r, tensor->begin[r], tensor->end[r], tensor->heads);
        covered = tensor->end[r];
    }
    if (covered == tensor->heads) return ZPP_OK;
    return zpp_fail(err, ZPP_INVALID, "comm: no rank computes head %zu of %zu", covered, tensor->heads);
}

zpp_status zpp_heads_check(const struct zpp_heads_job *job, int ranks, struct zpp_err *err) {
    if (job->dtype != ZPP_F32 && job->dtype != ZPP_BF16 && job->dtype != ZPP_F16 && job->dtype != ZPP_F64)
        return zpp_fail(err, ZPP_INVALID, "comm: heads of dtype %d, wanted a floating point one", (int)job->dtype);
    if (job->tensors < 1 || job->tensors > ZPP_HEADS_TENSORS)
        return zpp_fail(err, ZPP_INVALID, "comm: an exchange of %d tensors, wanted 1 to %d", job->tensors,
                        (int)ZPP_HEADS_TENSORS);
    zpp_status status = ZPP_OK;
    for (int i = 0; status == ZPP_OK && i < job->tensors; i++) status = check_tensor(job, ranks, i, err);
    return status;
}
