/* SPDX-License-Identifier: Apache-2.0
 *
 * Where gradient buckets lie inside this rank's part of the gradient region: first fit from the front, so that few
 * pages are ever touched. Where fragmentation leaves no place, the caller falls back to one of the unit's own behind
 * it.
 */
#ifndef ZPP_ZERO_BUCKET_H
#define ZPP_ZERO_BUCKET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct zpp_bucket_span { size_t offset_bytes, bytes; };
struct zpp_buckets {
    struct zpp_bucket_span *used; /* sorted by offset; capacity for one per unit */
    size_t count, spans_capacity;
    size_t capacity_bytes, used_bytes, peak_bytes;
    size_t touched_bytes; /* from the front on: memory that was written to, and stays */
};

bool zpp_buckets_init(struct zpp_buckets *buckets, size_t units, size_t capacity_bytes);
void zpp_buckets_fini(struct zpp_buckets *buckets);
enum { ZPP_BUCKET_ALIGN_BYTES = 64 };
#define ZPP_BUCKET_NONE SIZE_MAX
/* `bytes` is a multiple of ZPP_BUCKET_ALIGN_BYTES. Returns the offset, or ZPP_BUCKET_NONE where nothing fits. */
size_t zpp_buckets_take(struct zpp_buckets *buckets, size_t bytes);
void zpp_buckets_give(struct zpp_buckets *buckets, size_t offset_bytes);

#endif
