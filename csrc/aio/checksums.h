/* SPDX-License-Identifier: Apache-2.0
 *
 * Checksums of what was written to a file: CRC-32 (base/crc32.h) by page of ZPP_BLOCK_BYTES, kept in memory, because
 * the files are scratch. Design note 26.
 *
 * A page that was written whole has one sum. One that was written in parts has a sum for each part, its *fragments*, so
 * that writers of neighbouring bytes need not know each other's. A write replaces the fragments that it touches. Bytes
 * without a sum are not checked: those beside a fragment that was overwritten in part, a page's fragments beyond
 * ZPP_SUMS_FRAGMENTS, and those for which a shared table has no room.
 *
 *   page word   | more: 1 | length: 13 | begin: 12 | crc: 32 |      length 0: no sum
 *   spare       further fragments of pages with `more`: a hash table of (page, word), linear probing
 *
 * 8 bytes a page, and 16 for each further fragment.
 *
 * A table is one engine's own, which grows, or lies in memory that several processes map, of fixed size.
 *
 * Threads: any function from any thread. The table's lock is a leaf; a process that dies with it leaves a table that
 * others can use.
 */
#ifndef ZPP_AIO_SUMS_H
#define ZPP_AIO_SUMS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct zpp_checksums zpp_checksums;

enum { ZPP_SUMS_FRAGMENTS = 64 /* most of one page */ };

/* Create a table of this process. New, with one reference; NULL: no memory. */
zpp_checksums *zpp_checksums_create(void);
/* Return the bytes of a shared table for a file of `file_bytes`. */
size_t zpp_checksums_shared_bytes(uint64_t file_bytes);
/* Attach to a table in that many bytes of shared memory, aligned to 64, borrowed until the last reference is released.
 * With `make` the memory is zeros, and this call, before any other process's, makes the table. New; NULL: no memory. */
zpp_checksums *zpp_checksums_attach(void *memory, uint64_t file_bytes, bool make);
zpp_checksums *zpp_checksums_ref(zpp_checksums *sums);
void zpp_checksums_unref(zpp_checksums *sums); /* NULL is fine */

/* Record the sums of bytes that are about to be written at an offset of the file: those of `data`, which is copied to
 * `copy` in the same pass unless that is NULL. Where a growing table finds no memory, the bytes are not checked later.
 * */
void zpp_checksums_set(zpp_checksums *sums, uint64_t offset_bytes, const void *data, size_t bytes, void *copy);
/* Forget the sums of these bytes. */
void zpp_checksums_clear(zpp_checksums *sums, uint64_t offset_bytes, size_t bytes);
void zpp_checksums_clear_all(zpp_checksums *sums);

struct zpp_checksums_bad {
    uint64_t offset_bytes; /* in the file, of the fragment */
    size_t bytes;
    uint32_t wrote, read; /* the two sums */
};
/* Check `data`, which was read at an offset that is a multiple of ZPP_BLOCK_BYTES. Only fragments that share a byte
 * with [wanted, wanted + wanted_bytes) of the file, and lie within `data`, are checked. Return false if one differs;
 * `*bad` is the first of them. On true, `*checked_bytes` of the wanted bytes were checked. */
bool zpp_checksums_check(zpp_checksums *sums, uint64_t offset_bytes, const void *data, size_t bytes,
                         uint64_t wanted, size_t wanted_bytes, size_t *checked_bytes, struct zpp_checksums_bad *bad);
/* Return the memory of the table. */
size_t zpp_checksums_bytes(zpp_checksums *sums);

#endif
