/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches the copies of an exchange of heads for tokens on CUDA (heads_cuda.cu): all those with one source in as few
 * launches as their arguments allow, a sum in one of its own.
 */
#include "heads_cuda.h"

#include "../ops/copy_words_cuda.h"
#include "../ops/element_cuda.h"
#include "../ops/launch_cuda.h"

_Static_assert(sizeof(struct zpp_heads_cuda_copies) <= 4096, "kernel arguments must fit 4096 bytes");
_Static_assert(sizeof(struct zpp_heads_cuda_sum) <= 4096, "kernel arguments must fit 4096 bytes");

static struct zpp_heads_cuda_place place_of(const struct zpp_heads_box *box) {
    return (struct zpp_heads_cuda_place){(char *)(uintptr_t)box->data, box->batch_stride, box->token_stride,
                                         box->head_stride};
}

static uint64_t strides_of(const struct zpp_heads_box *box) {
    return box->batch_stride | box->token_stride | box->head_stride;
}

zpp_status zpp_heads_cuda_flush(struct zpp_heads_on_cuda *on, struct zpp_err *err) {
    const struct zpp_launch_cuda launch = {"zpp_heads_cuda_copies", on->blocks, ZPP_HEADS_CUDA_THREADS, 0};
    const zpp_status status = zpp_launch_cuda(on->device, on->native, &launch, &on->copies, err);
    on->copies.boxes = 0;
    on->blocks = 0;
    return status;
}

static zpp_status add_box(struct zpp_heads_on_cuda *on, const struct zpp_heads_copy *copy, struct zpp_err *err) {
    const struct zpp_heads_extent *extent = &copy->extent;
    const uint64_t all = extent->width_bytes | strides_of(&copy->dst) | strides_of(&copy->src[0]);
    const uint32_t word_bytes = zpp_words_bytes(all, copy->dst.data, copy->src[0].data, NULL);
    const uint64_t words = extent->width_bytes / word_bytes;
    const uint64_t items = extent->batch * extent->tokens * extent->heads * words;
    const uint64_t blocks = zpp_launch_cuda_blocks(items, ZPP_HEADS_CUDA_THREADS);
    zpp_status status = ZPP_OK;
    if (on->copies.boxes == ZPP_HEADS_CUDA_BOXES || on->blocks + blocks > INT32_MAX)
        status = zpp_heads_cuda_flush(on, err);
    if (status != ZPP_OK) return status;
    on->copies.box[on->copies.boxes++] = (struct zpp_heads_cuda_box){
        .dst = place_of(&copy->dst), .src = place_of(&copy->src[0]), .items = items, .tokens = extent->tokens,
        .heads = (uint32_t)extent->heads, .words = (uint32_t)words, .first_block = (uint32_t)on->blocks,
        .word_bytes = word_bytes};
    on->blocks += blocks;
    return ZPP_OK;
}

zpp_status zpp_heads_cuda_copy(void *ctx, const struct zpp_heads_copy *copy, struct zpp_err *err) {
    struct zpp_heads_on_cuda *on = ctx;
    const struct zpp_heads_extent *extent = &copy->extent;
    if (copy->sources == 1) return add_box(on, copy, err);
    if (copy->sources > ZPP_HEADS_CUDA_SOURCES)
        return zpp_fail(err, ZPP_NOT_BUILT,
                        "comm: %d ranks have a part of one head of keys, wanted at most %d on CUDA; make sp smaller",
                        copy->sources, (int)ZPP_HEADS_CUDA_SOURCES);
    const uint64_t elems = extent->width_bytes / zpp_dtype_bytes(copy->dtype);
    struct zpp_heads_cuda_sum sum = {
        .dst = place_of(&copy->dst), .items = extent->batch * extent->tokens * extent->heads * elems,
        .tokens = extent->tokens, .heads = (uint32_t)extent->heads, .elems = (uint32_t)elems,
        .sources = (uint32_t)copy->sources,
        .kind = copy->dtype == ZPP_F64 ? ZPP_HEADS_CUDA_F64 : zpp_cuda_dtype_of(copy->dtype)};
    for (int s = 0; s < copy->sources; s++) sum.src[s] = place_of(&copy->src[s]);
    const struct zpp_launch_cuda launch = {"zpp_heads_cuda_sum",
                                           zpp_launch_cuda_blocks(sum.items, ZPP_HEADS_CUDA_THREADS),
                                           ZPP_HEADS_CUDA_THREADS, 0};
    return zpp_launch_cuda(on->device, on->native, &launch, &sum, err);
}
