/* SPDX-License-Identifier: Apache-2.0
 *
 * Random token dropping (random-LTD, Yao et al. 2022, "Random-LTD: Random and Layerwise Token Dropping Brings Efficient
 * Training for Large-scale Transformers", section 3): a middle layer works on a random subset of each sequence's
 * tokens, in their order, and what it makes of them takes their places among the others.
 *
 *   sample    K of S positions of each sample, every subset equally likely, rising; fixed by seed, layer and sample
 *   gather    part_bk = full_b,kept(bk)
 *   scatter   out_bs  = part_bk where s = kept(bk), else full_bs
 *
 * Each is the other's backward: of gather a scatter into zeros; of scatter a gather for part, and for full the gradient
 * with zeros at what was kept. Bytes are moved, once, and not looked at.
 */
#ifndef ZPP_OPS_TOKENS_H
#define ZPP_OPS_TOKENS_H

#include <stddef.h>
#include <stdint.h>
#include "../../base/device.h"
#include "../../base/pool.h"

struct zpp_tokens {
    const int32_t *kept; /* [batch][keep], each in [0, seq), rising within a sample */
    size_t batch, seq, keep, row_bytes;
};

/* INVALID, with the sentence, unless kept is as said above. */
zpp_status zpp_tokens_check(const struct zpp_tokens *tokens, struct zpp_err *err);

/* What a draw follows from. `first`: the number of the first sample, counted over whatever is drawn apart. */
struct zpp_tokens_key {
    uint64_t seed, layer, first;
};

/* kept [batch][keep], keep <= seq < 2^31. Selection sampling (Knuth, volume 2, 3.4.2, algorithm S): S random numbers a
 * sample, no memory, rising of itself. The same on every machine and for any number of threads. */
void zpp_tokens_sample(int32_t *kept, size_t batch, size_t seq, size_t keep, struct zpp_tokens_key key, zpp_pool *pool);

/* part [batch][keep] rows from full [batch][seq]. No overlap. */
void zpp_tokens_gather(const struct zpp_tokens *tokens, const void *full, void *part, zpp_pool *pool);

/* out [batch][seq] from part and full, either of which may be NULL: zeros. No overlap. */
void zpp_tokens_scatter(const struct zpp_tokens *tokens, const void *full, const void *part, void *out,
                        zpp_pool *pool);

/* The same on CUDA, where all pointers are device memory: enqueued on `native` (torch's current stream). Same bytes.
 * There kept is not checked, which would wait for the device: a position outside [0, seq) gives a row of zeros, and is
 * placed nowhere. NOT_BUILT without the kernels, DEVICE if a launch fails. */
zpp_status zpp_tokens_sample_cuda(zpp_device *device, void *native, int32_t *kept, size_t batch, size_t seq,
                                  size_t keep, struct zpp_tokens_key key, struct zpp_err *err);
zpp_status zpp_tokens_gather_cuda(zpp_device *device, void *native, const struct zpp_tokens *tokens, const void *full,
                                  void *part, struct zpp_err *err);
zpp_status zpp_tokens_scatter_cuda(zpp_device *device, void *native, const struct zpp_tokens *tokens, const void *full,
                                   const void *part, void *out, struct zpp_err *err);

#endif
