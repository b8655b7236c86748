/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches plan and moves of rows on CUDA (rows_cuda.cu).
 */
#include "rows_cuda.h"

#include "../copy_words_cuda.h"
#include "../element_cuda.h"
#include "../launch_cuda.h"
#include "kernels.h"

_Static_assert(ZPP_ROWS_CUDA_LANES == (int)ZPP_MOE_LANES, "the order of kernels.h");

static zpp_status launch(zpp_device *device, void *native, const char *kernel, uint64_t blocks,
                         const struct zpp_rows_cuda_args *args, struct zpp_err *err) {
    const struct zpp_launch_cuda launch = { kernel, blocks, ZPP_ROWS_CUDA_THREADS, 0 };
    return zpp_launch_cuda(device, native, &launch, args, err);
}

zpp_status zpp_moe_plan_cuda(zpp_device *device, void *native, const struct zpp_moe_plan *plan, int32_t *slots,
                             int64_t *kept, uint32_t *order, struct zpp_err *err) {
    const bool shuffled = plan->seed >= 0 && plan->capacity > 0;
    const struct zpp_rows_cuda_args args = {
        .chosen = plan->chosen, .slots = slots, .kept = kept, .order = shuffled ? order : NULL,
        .tokens = plan->tokens, .k = plan->k, .experts = plan->experts, .capacity = plan->capacity,
        .seed = (uint64_t)plan->seed };
    const uint64_t all = zpp_launch_cuda_blocks((uint64_t)plan->tokens * plan->k, ZPP_ROWS_CUDA_THREADS);
    zpp_status status = launch(device, native, "zpp_moe_cuda_drop", all, &args, err);
    if (!status && shuffled) status = launch(device, native, "zpp_moe_cuda_shuffle", 1, &args, err);
    if (!status) status = launch(device, native, "zpp_moe_cuda_keep", plan->experts, &args, err);
    if (!status) status = launch(device, native, "zpp_moe_cuda_place", plan->experts, &args, err);
    return status;
}

static struct zpp_rows_cuda_args args_of(const struct zpp_moe_rows *rows, const void *from, void *to) {
    struct zpp_rows_cuda_args args = {
        .slots = (int32_t *)(uintptr_t)rows->slots, .kept = (int64_t *)(uintptr_t)rows->kept, .out = to,
        .tokens = rows->tokens, .k = rows->k, .experts = rows->experts, .capacity = rows->capacity,
        .buffer_rows = zpp_moe_buffer_rows(rows), .width_elems = rows->width_elems,
        .dtype = zpp_cuda_dtype_of(rows->dtype) };
    const uint64_t row_bytes = rows->width_elems * zpp_dtype_bytes(rows->dtype);
    args.word_bytes = zpp_words_bytes(row_bytes, from, to, NULL);
    args.row_words = row_bytes / args.word_bytes;
    return args;
}

static zpp_status blank(zpp_device *device, void *native, const struct zpp_rows_cuda_args *args, struct zpp_err *err) {
    return args->capacity ? launch(device, native, "zpp_moe_cuda_blank", args->buffer_rows, args, err) : ZPP_OK;
}

zpp_status zpp_moe_dispatch_cuda(zpp_device *device, void *native, const struct zpp_moe_rows *rows, const void *x,
                                 void *buffer, struct zpp_err *err) {
    struct zpp_rows_cuda_args args = args_of(rows, x, buffer);
    args.tokens_in = x;
    const zpp_status status = launch(device, native, "zpp_moe_cuda_dispatch", args.tokens * args.k, &args, err);
    return status ? status : blank(device, native, &args, err);
}

zpp_status zpp_moe_combine_cuda(zpp_device *device, void *native, const struct zpp_moe_rows *rows, const void *buffer,
                                const float *weights, void *y, struct zpp_err *err) {
    struct zpp_rows_cuda_args args = args_of(rows, buffer, y);
    args.buffer_in = buffer;
    args.weights = weights;
    return launch(device, native, "zpp_moe_cuda_combine", args.tokens, &args, err);
}

zpp_status zpp_moe_combine_backward_cuda(zpp_device *device, void *native, const struct zpp_moe_rows *rows,
                                         const void *buffer, const float *weights, const void *grad_y,
                                         void *grad_buffer, float *grad_weights, struct zpp_err *err) {
    struct zpp_rows_cuda_args args = args_of(rows, NULL, grad_buffer);
    args.buffer_in = buffer;
    args.tokens_in = grad_y;
    args.weights = weights;
    args.grad_weights = grad_weights;
    const zpp_status status =
        launch(device, native, "zpp_moe_cuda_combine_backward", args.tokens * args.k, &args, err);
    return status ? status : blank(device, native, &args, err);
}
