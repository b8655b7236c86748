/* SPDX-License-Identifier: Apache-2.0
 *
 * Packs segments of list_cuda.h into launches: groups of 48, each one grid with a block a chunk.
 */
#include "list_cuda.h"

#include <assert.h>

#include "launch_cuda.h"

_Static_assert(sizeof(struct zpp_list_cuda_segments) + ZPP_LIST_CUDA_SEGMENTS * ZPP_LIST_CUDA_CONSTS_BYTES <=
                   ZPP_LIST_CUDA_BATCH_BYTES, "kernel arguments must fit 4096 bytes");

size_t zpp_list_cuda_fill(const struct zpp_list_cuda_source *source, size_t begin, void *batch, unsigned int *blocks) {
    assert(source->consts_bytes <= ZPP_LIST_CUDA_CONSTS_BYTES);
    struct zpp_list_cuda_segments *list = batch;
    char *consts = (char *)(list + 1);
    size_t index = begin;
    *blocks = 0;
    list->count = 0;
    for (; index < source->count && list->count < ZPP_LIST_CUDA_SEGMENTS; ++index) {
        struct zpp_list_cuda_segment *at = &list->at[list->count];
        source->describe(source->arg, index, at, consts + list->count * source->consts_bytes);
        if (at->elems == 0) continue; /* the next one takes its place */
        at->first_block = *blocks;
        /* 2^31 blocks of 2^15 elements: more than any memory */
        *blocks += (unsigned int)((at->elems - 1) / ZPP_LIST_CUDA_CHUNK_ELEMS + 1);
        list->count++;
    }
    return index - begin;
}

static size_t fill(const void *arg, size_t begin, void *batch, unsigned int *blocks) {
    return zpp_list_cuda_fill(arg, begin, batch, blocks);
}

zpp_status zpp_list_cuda_run(zpp_device *device, void *native, const struct zpp_list_cuda_source *source,
                             struct zpp_err *err) {
    _Alignas(16) char batch[ZPP_LIST_CUDA_BATCH_BYTES] = { 0 };
    const struct zpp_launch_cuda_list list = { source->kernel, ZPP_LIST_CUDA_THREADS, source->count, fill, source,
                                               batch };
    return zpp_launch_cuda_list(device, native, &list, err);
}
