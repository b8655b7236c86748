/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory: aligned buffers, and the reserved address range of released units.
 *
 * A range reserves addresses for all units (PROT_NONE, no memory). A unit that is gathered gets memory at its fixed
 * address from a few warm slots (pages that were touched before, so no page faults), moved there with mremap; on
 * release the pages move back. Addresses never change, "is this pointer ours" is one comparison, and a stray read of a
 * released unit faults at an address that names it.
 *
 * Threads: zpp_range functions are called by one thread at a time per range.
 */
#ifndef ZPP_BASE_MEM_H
#define ZPP_BASE_MEM_H

#include <stdbool.h>
#include "status.h"

/* Bytes of a file come in blocks of this size: O_DIRECT, checksums, stripes, records. It is no page of memory. */
enum { ZPP_BLOCK_BYTES = 4096 };
/* Return the size of a page of memory: 4, 16 or 64 KiB (aarch64 has all three), a multiple of ZPP_BLOCK_BYTES. */
size_t zpp_page_bytes(void);
/* Return the least multiple of `multiple` that is not below `value`. */
static inline size_t zpp_round_up(size_t value, size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

/* Allocate zeroed memory, aligned to `align_bytes` (a power of two). New; free with zpp_mem_free(ptr, bytes). Large
 * blocks ask for huge pages. */
zpp_status zpp_mem_alloc(size_t bytes, size_t align_bytes, void **out, struct zpp_err *err);
void zpp_mem_free(void *memory, size_t bytes);
/* Ask for huge pages where another allocator's memory is about to be written for the first time, and is large enough.
 * Contents stay. A fault a page costs more than a copy of the page. */
void zpp_mem_expect(void *memory, size_t bytes);
/* Return the pages of freed blocks to the system, where the C library can (glibc: all of its arenas). Its heap keeps
 * them otherwise, and does not always use them again: the hole that an aligned block leaves is too small for the next
 * aligned block of the same size. Pages that are used again cost a page fault each. Any thread. */
void zpp_mem_trim(void);
/* Return `array`, from malloc (NULL: empty), with capacity for one element more than `count`, perhaps at a new address;
 * NULL: no memory, and the array and its capacity are as they were. */
void *zpp_array_reserve(void *array, size_t count, size_t *capacity, size_t elem_bytes);

typedef struct zpp_range zpp_range;
/* Reserve `bytes` (rounded up to pages). New; free with zpp_range_destroy. */
zpp_status zpp_range_create(size_t bytes, zpp_range **out, struct zpp_err *err);
void zpp_range_destroy(zpp_range *range); /* NULL is fine; unmaps everything, so no thread may read it any more */
void *zpp_range_base(const zpp_range *range);
/* Map memory at [offset, offset + bytes), or unmap it; both are multiples of zpp_page_bytes(). Contents are undefined
 * after map and lost at unmap. At most `warm_bytes` (zpp_range_set_warm) of unmapped pages are kept for the next map;
 * the rest returns to the system. */
zpp_status zpp_range_map(zpp_range *range, size_t offset_bytes, size_t bytes, struct zpp_err *err);
zpp_status zpp_range_unmap(zpp_range *range, size_t offset_bytes, size_t bytes, struct zpp_err *err);
void zpp_range_set_warm(zpp_range *range, size_t warm_bytes);
/* Return the best begin behind `used_bytes` for a piece of `bytes` that is mapped as one: for a large one, a multiple
 * of 2 MiB. */
size_t zpp_range_place(size_t used_bytes, size_t bytes);
size_t zpp_range_held_bytes(const zpp_range *range); /* mapped now, plus warm */

#endif
