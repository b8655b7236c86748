/* SPDX-License-Identifier: Apache-2.0
 *
 * Packs segments of low_cuda.h into launches: groups of 25, each one grid with a block a chunk.
 */
#include "low_cuda.h"

#include <assert.h>

#include "../launch_cuda.h"

_Static_assert(sizeof(struct zpp_low_cuda_segments) + ZPP_LOW_CUDA_SEGMENTS * ZPP_LOW_CUDA_CONSTS_BYTES <=
                   ZPP_LOW_CUDA_BATCH_BYTES, "kernel arguments must fit 4096 bytes");
_Static_assert((int)ZPP_LOW_CUDA_THREADS == (int)ZPP_MOMENTS_BLOCK_ELEMS, "a thread an element of a block");

void zpp_low_cuda_hold(struct zpp_low_cuda_segment *segment, const struct zpp_moments *how,
                       const struct zpp_moment *moments, size_t count, enum zpp_moments_which first) {
    segment->key = how->key;
    segment->index = (uint32_t)how->first_elems;
    segment->moments = (uint8_t)count;
    segment->first = (uint8_t)first;
    segment->int8 = how->kind == ZPP_MOMENTS_INT8;
    for (size_t k = 0; k < count; ++k) segment->codes[k] = moments[k].codes, segment->scales[k] = moments[k].scales;
}

size_t zpp_low_cuda_fill(const struct zpp_low_cuda_source *source, size_t begin, void *batch, unsigned int *blocks) {
    assert(source->consts_bytes <= ZPP_LOW_CUDA_CONSTS_BYTES);
    struct zpp_low_cuda_segments *list = batch;
    char *consts = (char *)(list + 1);
    size_t index = begin;
    *blocks = 0;
    list->count = 0;
    list->scale = source->scale;
    for (; index < source->count && list->count < ZPP_LOW_CUDA_SEGMENTS; ++index) {
        struct zpp_low_cuda_segment *at = &list->at[list->count];
        source->describe(source->arg, index, at, consts + list->count * source->consts_bytes);
        if (at->elems == 0) continue; /* the next one takes its place */
        at->first_block = *blocks;
        const uint64_t line = at->elems + at->index % ZPP_MOMENTS_BLOCK_ELEMS;
        *blocks += (unsigned int)((line - 1) / ZPP_LOW_CUDA_CHUNK_ELEMS + 1);
        list->count++;
    }
    return index - begin;
}

static size_t fill(const void *arg, size_t begin, void *batch, unsigned int *blocks) {
    return zpp_low_cuda_fill(arg, begin, batch, blocks);
}

zpp_status zpp_low_cuda_run(zpp_device *device, void *native, const struct zpp_low_cuda_source *source,
                            struct zpp_err *err) {
    _Alignas(16) char batch[ZPP_LOW_CUDA_BATCH_BYTES] = { 0 };
    const struct zpp_launch_cuda_list list = { source->kernel, ZPP_LOW_CUDA_THREADS, source->count, fill, source,
                                               batch };
    return zpp_launch_cuda_list(device, native, &list, err);
}
