/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches token moves on CUDA (tokens_cuda.cu).
 */
#include "tokens_cuda.h"

#include "../copy_words_cuda.h"
#include "../launch_cuda.h"
#include "tokens.h"

zpp_status zpp_tokens_sample_cuda(zpp_device *device, void *native, int32_t *kept, size_t batch, size_t seq,
                                  size_t keep, struct zpp_tokens_key key, struct zpp_err *err) {
    const struct zpp_tokens_cuda_args args = { .kept = kept, .batch = batch, .seq = seq, .keep = keep,
                                               .seed = key.seed, .layer = key.layer, .first = key.first };
    const struct zpp_launch_cuda launch = { "zpp_tokens_cuda_sample",
                                            zpp_launch_cuda_blocks(batch, ZPP_TOKENS_CUDA_THREADS),
                                            ZPP_TOKENS_CUDA_THREADS, 0 };
    return zpp_launch_cuda(device, native, &launch, &args, err);
}

static zpp_status move(zpp_device *device, void *native, const char *kernel, uint64_t rows,
                       const struct zpp_tokens *tokens, const void *full, const void *part, void *out,
                       struct zpp_err *err) {
    struct zpp_tokens_cuda_args args = { .kept = (int32_t *)(uintptr_t)tokens->kept, .full = full, .part = part,
                                         .out = out, .batch = tokens->batch, .seq = tokens->seq,
                                         .keep = tokens->keep };
    args.word_bytes = zpp_words_bytes(tokens->row_bytes, full, part, out);
    args.row_words = tokens->row_bytes / args.word_bytes;
    const struct zpp_launch_cuda launch = { kernel, rows, ZPP_TOKENS_CUDA_THREADS, 0 };
    return zpp_launch_cuda(device, native, &launch, &args, err);
}

zpp_status zpp_tokens_gather_cuda(zpp_device *device, void *native, const struct zpp_tokens *tokens, const void *full,
                                  void *part, struct zpp_err *err) {
    return move(device, native, "zpp_tokens_cuda_gather", (uint64_t)tokens->batch * tokens->keep, tokens, full, NULL,
                part, err);
}

zpp_status zpp_tokens_scatter_cuda(zpp_device *device, void *native, const struct zpp_tokens *tokens, const void *full,
                                   const void *part, void *out, struct zpp_err *err) {
    return move(device, native, "zpp_tokens_cuda_scatter", (uint64_t)tokens->batch * tokens->seq, tokens, full, part,
                out, err);
}
