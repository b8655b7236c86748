/* SPDX-License-Identifier: Apache-2.0
 *
 * CRC-32 by tables, eight bytes a round ("slicing by 8", Kounavis and Berry 2005), and the choice of a version.
 *
 * Table k holds the sum of one byte followed by k zero bytes. The state goes into the first four of eight bytes; then
 * each byte's contribution is looked up at its distance from the end, and all are added (exclusive or).
 */
#include "crc32.h"

#include <pthread.h>
#include <string.h>

#include "cpu.h"

enum { SLICES = 8 };
static const uint32_t polynomial = 0xedb88320u; /* 0x04c11db7 with its bits reflected */

static uint32_t tables[SLICES][256];
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

static void fill_tables(void) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t state = byte;
        for (int bit = 0; bit < 8; ++bit) state = state >> 1 ^ (state & 1 ? polynomial : 0);
        tables[0][byte] = state;
    }
    for (int slice = 1; slice < SLICES; ++slice)
        for (uint32_t byte = 0; byte < 256; ++byte) {
            const uint32_t before = tables[slice - 1][byte];
            tables[slice][byte] = before >> 8 ^ tables[0][before & 255];
        }
}

static uint64_t little_endian(const unsigned char *bytes) {
    uint64_t word = 0;
    for (int i = 7; i >= 0; --i) word = word << 8 | bytes[i];
    return word;
}

uint32_t zpp_crc32_by_tables(uint32_t state, void *to, const void *from, size_t bytes) {
    pthread_once(&tables_once, fill_tables);
    if (to && bytes) memcpy(to, from, bytes);
    const unsigned char *at = from;
    for (; bytes >= SLICES; bytes -= SLICES, at += SLICES) {
        const uint64_t word = little_endian(at) ^ state;
        state = 0;
        for (int i = 0; i < SLICES; ++i) state ^= tables[SLICES - 1 - i][word >> 8 * i & 255];
    }
    for (; bytes; --bytes) state = state >> 8 ^ tables[0][(state ^ *at++) & 255];
    return state;
}

static uint32_t sum(uint32_t crc, void *to, const void *from, size_t bytes) {
    uint32_t (*finish)(uint32_t state, void *to, const void *from, size_t bytes) = zpp_crc32_by_tables;
    uint32_t state = ~crc;
    size_t folded = 0;
#if ZPP_CPU_X86 || ZPP_CPU_ARM
    const bool fast = zpp_cpu_extras().clmul;
#if ZPP_CPU_ARM
    if (fast) finish = zpp_crc32_by_words;
#endif
    if (bytes >= 64 && fast) {
        folded = bytes & ~(size_t)15;
        unsigned char rest[16];
        zpp_crc32_fold(state, to, from, folded, rest);
        state = finish(0, NULL, rest, sizeof rest);
    }
#endif
    if (bytes == folded) return ~state;
    char *const rest_to = to ? (char *)to + folded : NULL;
    return ~finish(state, rest_to, (const char *)from + folded, bytes - folded);
}

uint32_t zpp_crc32(uint32_t crc, const void *data, size_t bytes) { return sum(crc, NULL, data, bytes); }

uint32_t zpp_crc32_copy(uint32_t crc, void *restrict to, const void *restrict from, size_t bytes) {
    return sum(crc, to, from, bytes);
}
