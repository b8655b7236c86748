/* SPDX-License-Identifier: Apache-2.0
 *
 * Tables of checksums: checksums.h.
 */
#include "checksums.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "../base/crc32.h"
#include "../base/mem.h"

enum {
    BATCH = 64, /* pages looked up under one lock */
    LEAST_SPARE = 256,
    SHARED_PAGES_A_SPARE = 8,
    HEADER_BYTES = 128,
};
#define MORE (UINT64_C(1) << 63)

struct spare {
    uint64_t page_1; /* page + 1; 0: never used */
    uint64_t word;   /* 0: none any more */
};

/* A table in this process, or at the beginning of shared memory. */
struct table {
    pthread_mutex_t lock; /* guards everything but `refs` */
    uint64_t pages, spares, spares_used;
};
_Static_assert(sizeof(struct table) <= HEADER_BYTES, "the header has room");

struct zpp_checksums {
    atomic_uint refs;
    struct table own, *table;
    uint64_t *words;
    struct spare *spares;
    bool shared;
};

/* --- words --- */

static uint64_t word_of(uint32_t crc, size_t begin, size_t length) {
    return (uint64_t)crc | (uint64_t)begin << 32 | (uint64_t)length << 44;
}
static uint32_t crc_of(uint64_t word) { return (uint32_t)word; }
static size_t begin_of(uint64_t word) { return word >> 32 & 0xfff; }
static size_t length_of(uint64_t word) { return word >> 44 & 0x1fff; }

static bool touches(uint64_t word, size_t begin, size_t end) {
    return length_of(word) && begin_of(word) < end && begin < begin_of(word) + length_of(word);
}

/* --- create and destroy --- */

static bool init_lock(pthread_mutex_t *lock, bool shared) {
    pthread_mutexattr_t attributes;
    if (!shared) return pthread_mutex_init(lock, NULL) == 0;
    if (pthread_mutexattr_init(&attributes) != 0) return false;
    const bool made = pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED) == 0 &&
                      pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST) == 0 &&
                      pthread_mutex_init(lock, &attributes) == 0;
    pthread_mutexattr_destroy(&attributes);
    return made;
}

zpp_checksums *zpp_checksums_create(void) {
    zpp_checksums *sums = calloc(1, sizeof *sums);
    if (!sums) return NULL;
    atomic_init(&sums->refs, 1);
    sums->table = &sums->own;
    if (init_lock(&sums->own.lock, false)) return sums;
    free(sums);
    return NULL;
}

static uint64_t pages_of(uint64_t bytes) { return (bytes + ZPP_BLOCK_BYTES - 1) / ZPP_BLOCK_BYTES; }

static uint64_t shared_spares(uint64_t pages) {
    uint64_t spares = LEAST_SPARE;
    while (spares < pages / SHARED_PAGES_A_SPARE) spares *= 2;
    return spares;
}

size_t zpp_checksums_shared_bytes(uint64_t file_bytes) {
    const uint64_t pages = pages_of(file_bytes);
    return (size_t)(HEADER_BYTES + pages * sizeof(uint64_t) + shared_spares(pages) * sizeof(struct spare));
}

zpp_checksums *zpp_checksums_attach(void *memory, uint64_t file_bytes, bool make) {
    zpp_checksums *sums = calloc(1, sizeof *sums);
    if (!sums) return NULL;
    atomic_init(&sums->refs, 1);
    sums->shared = true;
    sums->table = memory;
    if (make) {
        sums->table->pages = pages_of(file_bytes);
        sums->table->spares = shared_spares(sums->table->pages);
        if (!init_lock(&sums->table->lock, true)) {
            free(sums);
            return NULL;
        }
    }
    sums->words = (uint64_t *)(void *)((unsigned char *)memory + HEADER_BYTES);
    sums->spares = (struct spare *)(void *)(sums->words + sums->table->pages);
    return sums;
}

zpp_checksums *zpp_checksums_ref(zpp_checksums *sums) {
    if (sums) atomic_fetch_add(&sums->refs, 1);
    return sums;
}

void zpp_checksums_unref(zpp_checksums *sums) {
    if (!sums || atomic_fetch_sub(&sums->refs, 1) > 1) return;
    if (!sums->shared) {
        pthread_mutex_destroy(&sums->own.lock);
        free(sums->words);
        free(sums->spares);
    }
    free(sums);
}

static void lock(zpp_checksums *sums) {
    /* A process that died with the lock was between two stores of one page at most. The sums of that page may be wrong;
     * a check then fails. */
    if (pthread_mutex_lock(&sums->table->lock) == EOWNERDEAD) pthread_mutex_consistent(&sums->table->lock);
}

static void unlock(zpp_checksums *sums) { pthread_mutex_unlock(&sums->table->lock); }

/* --- growing; the lock is held --- */

static bool has_pages(zpp_checksums *sums, uint64_t pages) {
    struct table *table = sums->table;
    if (pages <= table->pages) return true;
    if (sums->shared) return false;
    uint64_t more = table->pages + table->pages / 4;
    if (more < pages) more = pages;
    uint64_t *words = realloc(sums->words, (size_t)more * sizeof *words);
    if (!words) return false;
    memset(words + table->pages, 0, (size_t)(more - table->pages) * sizeof *words);
    sums->words = words;
    table->pages = more;
    return true;
}

static struct spare *spare_at(const zpp_checksums *sums, uint64_t page, uint64_t probe) {
    const uint64_t hash = page * UINT64_C(0x9e3779b97f4a7c15) >> 20;
    return &sums->spares[(hash + probe) & (sums->table->spares - 1)];
}

static void put_spare(zpp_checksums *sums, uint64_t page, uint64_t word) {
    for (uint64_t probe = 0; probe < sums->table->spares; ++probe) {
        struct spare *spare = spare_at(sums, page, probe);
        if (spare->page_1 && (spare->page_1 != page + 1 || spare->word)) continue;
        if (!spare->page_1) ++sums->table->spares_used;
        *spare = (struct spare){page + 1, word};
        return;
    }
}

/* Return true if there is room for one more. */
static bool has_spare(zpp_checksums *sums) {
    struct table *table = sums->table;
    if (table->spares_used < table->spares / 4 * 3) return true;
    if (sums->shared) return false;
    struct spare *old = sums->spares;
    const uint64_t old_spares = table->spares;
    uint64_t used = 0;
    for (uint64_t index = 0; index < old_spares; ++index) used += old[index].word != 0;
    uint64_t spares = LEAST_SPARE;
    while (spares < 4 * used) spares *= 2;
    sums->spares = calloc((size_t)spares, sizeof *sums->spares);
    if (!sums->spares) {
        sums->spares = old;
        return false;
    }
    table->spares = spares;
    table->spares_used = 0;
    for (uint64_t index = 0; index < old_spares; ++index)
        if (old[index].word) put_spare(sums, old[index].page_1 - 1, old[index].word);
    free(old);
    return true;
}

/* --- fragments; the lock is held --- */

/* Return the page's further fragments one a call; NULL: no more. */
static struct spare *next_spare(const zpp_checksums *sums, uint64_t page, uint64_t *probe) {
    while (*probe < sums->table->spares) {
        struct spare *spare = spare_at(sums, page, (*probe)++);
        if (!spare->page_1) return NULL;
        if (spare->page_1 == page + 1 && spare->word) return spare;
    }
    return NULL;
}

/* Return how many are left. */
static size_t drop_touched(zpp_checksums *sums, uint64_t page, size_t begin, size_t end) {
    uint64_t *word = &sums->words[page];
    if (touches(*word, begin, end)) *word &= MORE;
    size_t left = length_of(*word) != 0, spares_left = 0;
    uint64_t probe = 0;
    for (struct spare *spare; *word & MORE && (spare = next_spare(sums, page, &probe));) {
        if (touches(spare->word, begin, end)) spare->word = 0;
        else ++spares_left;
    }
    if (!spares_left) *word &= ~MORE;
    return left + spares_left;
}

static void put_fragment(zpp_checksums *sums, uint64_t page, uint64_t fragment) {
    const size_t left = drop_touched(sums, page, begin_of(fragment), begin_of(fragment) + length_of(fragment));
    uint64_t *word = &sums->words[page];
    if (!length_of(*word)) {
        *word = fragment | (*word & MORE);
    } else if (left < ZPP_SUMS_FRAGMENTS && has_spare(sums)) {
        put_spare(sums, page, fragment);
        *word |= MORE;
    }
}

/* --- pieces of pages --- */

/* Return the bytes of [offset, end) in the page of `offset`. */
static size_t in_page(uint64_t offset, uint64_t end, size_t *begin) {
    *begin = (size_t)(offset % ZPP_BLOCK_BYTES);
    const uint64_t left = end - offset, in_page = ZPP_BLOCK_BYTES - *begin;
    return (size_t)(left < in_page ? left : in_page);
}

void zpp_checksums_set(zpp_checksums *sums, uint64_t offset_bytes, const void *data, size_t bytes, void *copy) {
    const uint64_t end = offset_bytes + bytes;
    const unsigned char *from = data;
    unsigned char *to = copy;
    while (offset_bytes < end) {
        uint64_t fragments[BATCH];
        const uint64_t first = offset_bytes / ZPP_BLOCK_BYTES;
        size_t count = 0;
        for (; count < BATCH && offset_bytes < end; ++count) {
            size_t begin;
            const size_t length = in_page(offset_bytes, end, &begin);
            const uint32_t crc = to ? zpp_crc32_copy(0, to, from, length) : zpp_crc32(0, from, length);
            fragments[count] = word_of(crc, begin, length);
            offset_bytes += length;
            from += length;
            if (to) to += length;
        }
        lock(sums);
        const bool fits = has_pages(sums, first + count);
        for (size_t index = 0; index < count; ++index) {
            if (fits || first + index < sums->table->pages) put_fragment(sums, first + index, fragments[index]);
        }
        unlock(sums);
    }
}

void zpp_checksums_clear(zpp_checksums *sums, uint64_t offset_bytes, size_t bytes) {
    const uint64_t end = offset_bytes + bytes;
    lock(sums);
    while (offset_bytes < end && offset_bytes / ZPP_BLOCK_BYTES < sums->table->pages) {
        size_t begin;
        const size_t length = in_page(offset_bytes, end, &begin);
        drop_touched(sums, offset_bytes / ZPP_BLOCK_BYTES, begin, begin + length);
        offset_bytes += length;
    }
    unlock(sums);
}

void zpp_checksums_clear_all(zpp_checksums *sums) {
    lock(sums);
    if (sums->table->pages) memset(sums->words, 0, (size_t)sums->table->pages * sizeof *sums->words);
    if (sums->table->spares) memset(sums->spares, 0, (size_t)sums->table->spares * sizeof *sums->spares);
    sums->table->spares_used = 0;
    unlock(sums);
}

/* --- checking --- */

struct check {
    zpp_checksums *sums;
    const unsigned char *data;
    uint64_t offset_bytes, end, wanted, wanted_end;
    size_t checked_bytes;
    struct zpp_checksums_bad *bad;
};

static bool check_fragment(struct check *check, uint64_t page, uint64_t word) {
    const uint64_t begin = page * ZPP_BLOCK_BYTES + begin_of(word), end = begin + length_of(word);
    if (begin == end || begin >= check->wanted_end || end <= check->wanted || end > check->end) return true;
    const uint32_t crc = zpp_crc32(0, check->data + (begin - check->offset_bytes), (size_t)(end - begin));
    if (crc != crc_of(word)) {
        *check->bad = (struct zpp_checksums_bad){begin, (size_t)(end - begin), crc_of(word), crc};
        return false;
    }
    const uint64_t from = begin > check->wanted ? begin : check->wanted;
    const uint64_t to = end < check->wanted_end ? end : check->wanted_end;
    check->checked_bytes += (size_t)(to - from);
    return true;
}

static bool check_spares(struct check *check, uint64_t page) {
    uint64_t words[ZPP_SUMS_FRAGMENTS], probe = 0;
    size_t count = 0;
    lock(check->sums);
    for (struct spare *spare; count < ZPP_SUMS_FRAGMENTS && (spare = next_spare(check->sums, page, &probe));)
        words[count++] = spare->word;
    unlock(check->sums);
    for (size_t index = 0; index < count; ++index)
        if (!check_fragment(check, page, words[index])) return false;
    return true;
}

bool zpp_checksums_check(zpp_checksums *sums, uint64_t offset_bytes, const void *data, size_t bytes, uint64_t wanted,
                         size_t wanted_bytes, size_t *checked_bytes, struct zpp_checksums_bad *bad) {
    assert(offset_bytes % ZPP_BLOCK_BYTES == 0);
    struct check check = {.sums = sums, .data = data, .offset_bytes = offset_bytes, .end = offset_bytes + bytes,
                          .wanted = wanted, .wanted_end = wanted + wanted_bytes, .bad = bad};
    const uint64_t last = pages_of(check.end);
    for (uint64_t page = offset_bytes / ZPP_BLOCK_BYTES; page < last;) {
        uint64_t words[BATCH];
        const uint64_t count = last - page < BATCH ? last - page : BATCH;
        lock(sums);
        for (uint64_t index = 0; index < count; ++index)
            words[index] = page + index < sums->table->pages ? sums->words[page + index] : 0;
        unlock(sums);
        for (uint64_t index = 0; index < count; ++index, ++page) {
            if (!check_fragment(&check, page, words[index])) return false;
            if (words[index] & MORE && !check_spares(&check, page)) return false;
        }
    }
    *checked_bytes = check.checked_bytes;
    return true;
}

size_t zpp_checksums_bytes(zpp_checksums *sums) {
    lock(sums);
    const size_t bytes =
        (size_t)(sums->table->pages * sizeof *sums->words + sums->table->spares * sizeof *sums->spares);
    unlock(sums);
    return bytes;
}
