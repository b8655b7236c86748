/* SPDX-License-Identifier: Apache-2.0
 *
 * CRC-32 as in zlib, gzip and Ethernet (polynomial 0x04c11db7, bits reflected): the checksum of checkpoints
 * (docs/checkpoint-format.md). It detects every error burst of up to 32 bits in a block, but not deliberate changes.
 *
 *   zpp_crc32(0, "123456789", 9) == 0xcbf43926
 *   zpp_crc32(zpp_crc32(0, a, a_bytes), b, b_bytes) is the sum of a followed by b
 *
 * Two versions with the same results: carry-less multiplication where the CPU has it (16 bytes in about 4 cycles;
 * zlib's tables take 16 bytes in about 25), tables elsewhere and with ZEROPP_CPU=scalar.
 *
 * Threads: any. Pointers may have any alignment, and be NULL where bytes is 0.
 */
#ifndef ZPP_BASE_CRC32_H
#define ZPP_BASE_CRC32_H

#include <stddef.h>
#include <stdint.h>

/* Return the sum of earlier bytes, whose sum is `crc` (0: none), followed by [data, data + bytes). */
uint32_t zpp_crc32(uint32_t crc, const void *data, size_t bytes);
/* Return the same sum, and copy the bytes to `to` in the same pass. They must not overlap. */
uint32_t zpp_crc32_copy(uint32_t crc, void *restrict to, const void *restrict from, size_t bytes);

/* The two versions, for tests and crc32.c. With `to` NULL nothing is copied. The state is the sum with its bits
 * flipped. zpp_crc32_fold needs zpp_cpu_extras().clmul and takes a multiple of 16 bytes, 64 or more. It leaves 16 bytes
 * in `rest`: the state after all bytes is zpp_crc32_by_tables(0, NULL, rest, 16). */
uint32_t zpp_crc32_by_tables(uint32_t state, void *to, const void *from, size_t bytes);
/* On aarch64, with the CRC32 instructions; it needs zpp_cpu_extras().clmul. */
uint32_t zpp_crc32_by_words(uint32_t state, void *to, const void *from, size_t bytes);
void zpp_crc32_fold(uint32_t state, void *to, const void *from, size_t bytes, unsigned char rest[16]);

#endif
