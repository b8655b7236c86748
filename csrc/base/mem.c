/* SPDX-License-Identifier: Apache-2.0
 *
 * Aligned buffers: mem.h. Small ones come from malloc; from 1 MiB on they are mappings of their own, which start at a
 * 2 MiB boundary where that pays and ask for huge pages (fewer page faults and TLB misses in the optimizer's
 * streams). The reserved address range is range.c.
 */
#include "mem.h"

#include <errno.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { MAPPED_FROM_BYTES = 1 << 20, HUGE_BYTES = 2 << 20, HUGE_FROM_BYTES = 2 * HUGE_BYTES };

/* Map more than needed and unmap the ends, so that munmap(memory, bytes rounded up to pages) frees it whole. */
static void *map_aligned(size_t bytes, size_t align_bytes) {
    const size_t extra_bytes = align_bytes - ZPP_BLOCK_BYTES; /* mmap aligns to a page, which is no less */
    if (bytes + extra_bytes < bytes) return NULL;
    char *whole = mmap(NULL, bytes + extra_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (whole == MAP_FAILED) return NULL;
    const size_t head_bytes = (size_t)(-(uintptr_t)whole & (align_bytes - 1));
    if (head_bytes) munmap(whole, head_bytes);
    if (extra_bytes > head_bytes) munmap(whole + head_bytes + bytes, extra_bytes - head_bytes);
    return whole + head_bytes;
}

static void *alloc_mapped(size_t bytes, size_t align_bytes) {
    if (bytes > SIZE_MAX - zpp_page_bytes()) return NULL;
    if (align_bytes < zpp_page_bytes()) align_bytes = zpp_page_bytes();
    if (bytes >= HUGE_FROM_BYTES && align_bytes < HUGE_BYTES) align_bytes = HUGE_BYTES;
    void *memory = map_aligned(zpp_round_up(bytes, zpp_page_bytes()), align_bytes);
    if (memory && bytes >= HUGE_FROM_BYTES) madvise(memory, bytes, MADV_HUGEPAGE); /* a hint, which may be refused */
    return memory;
}

static void *alloc_small(size_t bytes, size_t align_bytes) {
    void *memory = NULL;
    if (align_bytes < sizeof(void *)) align_bytes = sizeof(void *);
    if (posix_memalign(&memory, align_bytes, bytes ? bytes : 1) != 0) return NULL;
    return memset(memory, 0, bytes);
}

zpp_status zpp_mem_alloc(size_t bytes, size_t align_bytes, void **out, struct zpp_err *err) {
    if (!align_bytes || (align_bytes & (align_bytes - 1))) {
        return zpp_fail(err, ZPP_INVALID, "memory: align_bytes is %zu, wanted a power of two", align_bytes);
    }
    void *memory = bytes >= MAPPED_FROM_BYTES ? alloc_mapped(bytes, align_bytes) : alloc_small(bytes, align_bytes);
    if (!memory) return zpp_fail(err, ZPP_NOMEM, "memory: no room for %zu bytes", bytes);
    *out = memory;
    return ZPP_OK;
}

void zpp_mem_expect(void *memory, size_t bytes) {
    const uintptr_t mask = zpp_page_bytes() - 1, begin = ((uintptr_t)memory + mask) & ~mask;
    const uintptr_t end = ((uintptr_t)memory + bytes) & ~mask;
    if (bytes < HUGE_FROM_BYTES) return;
    const int saved = errno;
    madvise((void *)begin, end - begin, MADV_HUGEPAGE); /* a hint, which may be refused */
    errno = saved;
}

void zpp_mem_free(void *memory, size_t bytes) {
    if (!memory) return;
    if (bytes < MAPPED_FROM_BYTES) free(memory);
    else munmap(memory, zpp_round_up(bytes, zpp_page_bytes()));
}

void zpp_mem_trim(void) {
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

void *zpp_array_reserve(void *array, size_t count, size_t *capacity, size_t elem_bytes) {
    enum { FIRST_CAPACITY = 64 };
    if (count < *capacity) return array;
    const size_t wanted = *capacity ? 2 * *capacity : FIRST_CAPACITY;
    void *grown = realloc(array, wanted * elem_bytes);
    if (grown) *capacity = wanted;
    return grown;
}
