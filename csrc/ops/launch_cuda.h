/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches of an op's CUDA kernel that takes one struct: what most launchers of csrc/ops do.
 */
#ifndef ZPP_OPS_LAUNCH_CUDA_H
#define ZPP_OPS_LAUNCH_CUDA_H

#include <stdint.h>
#include "../base/device.h"

struct zpp_launch_cuda {
    const char *kernel;
    uint64_t blocks; /* 0: nothing is done */
    unsigned int threads, shared_bytes;
};

/* Enqueued on torch's or our stream `native`. `argument`: the struct, copied by the launch. INVALID for more blocks
 * than a launch may have, NOT_BUILT without the kernel, DEVICE if the launch fails. */
zpp_status zpp_launch_cuda(zpp_device *device, void *native, const struct zpp_launch_cuda *launch,
                           const void *argument, struct zpp_err *err);

/* Work over a list that takes several launches. */
struct zpp_launch_cuda_list {
    const char *kernel;
    unsigned int threads;
    size_t count; /* of the list */
    /* Packs what comes from `begin` on into `batch`, the kernel's struct: how many it took, and the blocks of the grid
     * (0: nothing to do). */
    size_t (*fill)(const void *arg, size_t begin, void *batch, unsigned int *blocks);
    const void *arg;
    void *batch;
};
zpp_status zpp_launch_cuda_list(zpp_device *device, void *native, const struct zpp_launch_cuda_list *list,
                                struct zpp_err *err);

/* Blocks that give each of `items` a thread. */
static inline uint64_t zpp_launch_cuda_blocks(uint64_t items, unsigned int threads) {
    return items / threads + (items % threads != 0);
}

#endif
