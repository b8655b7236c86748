/* SPDX-License-Identifier: Apache-2.0
 *
 * First fit over a sorted array: a handful of buckets live at a time, so a list walk beats any cleverer structure.
 */
#include "bucket.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

bool zpp_buckets_init(struct zpp_buckets *buckets, size_t units, size_t capacity_bytes) {
    *buckets = (struct zpp_buckets){ .room = units, .capacity_bytes = capacity_bytes };
    buckets->used = calloc(units ? units : 1, sizeof *buckets->used);
    return buckets->used != NULL;
}

void zpp_buckets_fini(struct zpp_buckets *buckets) {
    free(buckets->used);
    buckets->used = NULL;
}

size_t zpp_buckets_take(struct zpp_buckets *buckets, size_t bytes) {
    assert(buckets->count < buckets->room);
    size_t at = 0, index = 0;
    while (index < buckets->count && buckets->used[index].offset_bytes - at < bytes) {
        at = buckets->used[index].offset_bytes + buckets->used[index].bytes;
        index++;
    }
    if (at + bytes > buckets->capacity_bytes) return ZPP_BUCKET_NONE;
    memmove(&buckets->used[index + 1], &buckets->used[index], (buckets->count - index) * sizeof *buckets->used);
    buckets->used[index] = (struct zpp_bucket_span){ at, bytes };
    buckets->count++;
    buckets->used_bytes += bytes;
    if (buckets->used_bytes > buckets->peak_bytes) buckets->peak_bytes = buckets->used_bytes;
    if (at + bytes > buckets->touched_bytes) buckets->touched_bytes = at + bytes;
    return at;
}

void zpp_buckets_give(struct zpp_buckets *buckets, size_t offset_bytes) {
    size_t index = 0;
    while (index < buckets->count && buckets->used[index].offset_bytes != offset_bytes) index++;
    assert(index < buckets->count);
    buckets->used_bytes -= buckets->used[index].bytes;
    buckets->count--;
    memmove(&buckets->used[index], &buckets->used[index + 1], (buckets->count - index) * sizeof *buckets->used);
}
