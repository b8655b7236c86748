/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches the moves of rows over the memory of several GPUs (peers_cuda.cu).
 */
#include "peers_cuda.h"

#include "../../base/device_cuda.h"
#include "../copy_words_cuda.h"
#include "../element_cuda.h"
#include "../launch_cuda.h"
#include "kernels.h"
#include "peers.h"

_Static_assert(ZPP_PEERS_CUDA_LANES == (int)ZPP_MOE_LANES, "the order of kernels.h");
_Static_assert(ZPP_PEERS_CUDA_RANKS == (int)ZPP_MOE_PEER_CUDA_RANKS, "addresses are in the argument of the kernel");
_Static_assert(sizeof(struct zpp_peers_cuda_args) <= 4096, "kernel arguments must fit 4096 bytes");
_Static_assert(sizeof(struct zpp_peers_cuda_taken) == sizeof(struct zpp_moe_taken), "one layout");

enum kernel { GATHER, SCALE, SUM, PICK, KERNELS };
static const char *const names[KERNELS] = { "zpp_moe_peer_cuda_gather", "zpp_moe_peer_cuda_scale",
                                            "zpp_moe_peer_cuda_sum", "zpp_moe_peer_cuda_pick" };

zpp_status zpp_moe_peer_cuda_find(zpp_device *device, struct zpp_err *err) {
    CUfunction found;
    zpp_status status = ZPP_OK;
    for (int kernel = 0; kernel < KERNELS && status == ZPP_OK; ++kernel) {
        status = zpp_cuda_kernel(device, names[kernel], &found, err);
    }
    return status;
}

static zpp_status launch(const struct zpp_moe_peer_cuda *on, enum kernel kernel, uint64_t blocks,
                         const struct zpp_peers_cuda_args *args, struct zpp_err *err) {
    const struct zpp_launch_cuda launch = { names[kernel], blocks, ZPP_PEERS_CUDA_THREADS, 0 };
    return zpp_launch_cuda(on->device, on->native, &launch, args, err);
}

static struct zpp_peers_cuda_args args_of(const struct zpp_moe_peer_cuda *on, const struct zpp_moe_peer_rows *rows,
                                          void *out) {
    struct zpp_peers_cuda_args args = { .halt = on->halt, .out = out, .k = rows->k, .width_elems = rows->width_elems,
                                        .dtype = zpp_cuda_dtype_of(rows->dtype) };
    const uint64_t row_bytes = rows->width_elems * zpp_dtype_bytes(rows->dtype);
    uintptr_t addresses = (uintptr_t)out;
    for (size_t r = 0; r < rows->ranks; ++r) {
        args.bases[r] = rows->bases[r];
        addresses |= (uintptr_t)rows->bases[r];
    }
    args.wide = addresses % 16 == 0 && rows->width_elems % ZPP_PEERS_CUDA_WIDE == 0;
    args.word_bytes = zpp_words_bytes(row_bytes, (void *)addresses, NULL, NULL);
    args.row_words = row_bytes / args.word_bytes;
    return args;
}

zpp_status zpp_moe_peer_gather_cuda(const struct zpp_moe_peer_cuda *on, const struct zpp_moe_peer_rows *rows,
                                    const struct zpp_moe_taken *taken, const int64_t *starts,
                                    const struct zpp_moe_peer_scale *scale, void *buffer, struct zpp_err *err) {
    struct zpp_peers_cuda_args args = args_of(on, rows, buffer);
    args.taken = (const struct zpp_peers_cuda_taken *)(const void *)taken;
    for (size_t r = 0; r <= rows->ranks; ++r) args.starts[r] = starts[r];
    for (size_t r = 0; r < rows->ranks && scale; ++r) args.weights_of[r] = scale->weights[r];
    args.made = scale ? scale->made : NULL;
    args.wide = args.wide && (uintptr_t)args.made % 16 == 0;
    args.values = scale ? scale->dots : NULL;
    return launch(on, scale ? SCALE : GATHER, (uint64_t)starts[rows->ranks], &args, err);
}

zpp_status zpp_moe_peer_sum_cuda(const struct zpp_moe_peer_cuda *on, const struct zpp_moe_peer_rows *rows,
                                 const int64_t *slots, size_t tokens, const float *weights, void *y,
                                 struct zpp_err *err) {
    struct zpp_peers_cuda_args args = args_of(on, rows, y);
    args.slots = slots;
    args.weights = weights;
    return launch(on, SUM, tokens, &args, err);
}

zpp_status zpp_moe_peer_pick_cuda(const struct zpp_moe_peer_cuda *on, const struct zpp_moe_peer_rows *rows,
                                  const int64_t *slots, size_t assignments, float *values, struct zpp_err *err) {
    struct zpp_peers_cuda_args args = args_of(on, rows, NULL);
    args.slots = slots;
    args.values = values;
    args.count = assignments;
    return launch(on, PICK, zpp_launch_cuda_blocks(assignments, ZPP_PEERS_CUDA_THREADS), &args, err);
}
