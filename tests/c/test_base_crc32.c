/* SPDX-License-Identifier: Apache-2.0
 *
 * CRC-32: both versions against the definition (division by the polynomial, bit by bit), at every length, alignment and
 * cut that decides a branch. tests/checkpoint/test_sums.py compares with zlib.
 */
#include "harness.h"

#include "../../csrc/base/cpu.h"
#include "../../csrc/base/crc32.h"

static uint32_t by_definition(uint32_t crc, const unsigned char *data, size_t bytes) {
    uint32_t state = ~crc;
    for (size_t i = 0; i < bytes; ++i) {
        state ^= data[i];
        for (int bit = 0; bit < 8; ++bit) state = state >> 1 ^ (state & 1 ? 0xedb88320u : 0);
    }
    return ~state;
}

enum { ROOM = 4096 };
static unsigned char bytes_of_chance[ROOM];

static void fill(void) {
    uint64_t state = 88172645463325252u;
    for (size_t i = 0; i < ROOM; ++i) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes_of_chance[i] = (unsigned char)(state >> 24);
    }
}

static void known_sums(void) {
    CHECK_EQUAL(zpp_crc32(0, NULL, 0), 0);
    CHECK_EQUAL(zpp_crc32(0, "123456789", 9), 0xcbf43926u);
    CHECK_EQUAL(zpp_crc32(0, "The quick brown fox jumps over the lazy dog", 43), 0x414fa339u);
}

static void every_length_and_alignment(void) {
    fill();
    for (size_t offset = 0; offset < 17; ++offset)
        for (size_t bytes = 0; bytes < 400; ++bytes)
            CHECK_EQUAL(zpp_crc32(7, bytes_of_chance + offset, bytes),
                        by_definition(7, bytes_of_chance + offset, bytes));
    CHECK_EQUAL(zpp_crc32(0, bytes_of_chance, ROOM), by_definition(0, bytes_of_chance, ROOM));
}

static void sums_of_parts_are_the_sum(void) {
    fill();
    const uint32_t whole = zpp_crc32(0, bytes_of_chance, 1000);
    for (size_t cut = 0; cut <= 1000; ++cut)
        CHECK_EQUAL(zpp_crc32(zpp_crc32(0, bytes_of_chance, cut), bytes_of_chance + cut, 1000 - cut), whole);
}

static void versions_agree(void) {
    fill();
    CHECK_EQUAL(~zpp_crc32_by_tables(~5u, NULL, bytes_of_chance, 999), by_definition(5, bytes_of_chance, 999));
#if ZPP_CPU_X86 || ZPP_CPU_ARM
    if (!zpp_cpu_extras().clmul) {
        printf("  (this CPU multiplies without carry by no instruction, or ZEROPP_CPU=scalar)\n");
        return;
    }
#if ZPP_CPU_ARM
    CHECK_EQUAL(~zpp_crc32_by_words(~5u, NULL, bytes_of_chance, 999), by_definition(5, bytes_of_chance, 999));
#endif
    for (size_t bytes = 64; bytes <= ROOM; bytes += 16) {
        unsigned char rest[16];
        zpp_crc32_fold(~5u, NULL, bytes_of_chance, bytes, rest);
        CHECK_EQUAL(zpp_crc32_by_tables(0, NULL, rest, sizeof rest),
                    zpp_crc32_by_tables(~5u, NULL, bytes_of_chance, bytes));
    }
#endif
}

static void copies_what_it_sums(void) {
    fill();
    unsigned char copy[600];
    for (size_t offset = 0; offset < 20; ++offset)
        for (size_t bytes = 0; bytes < 300; bytes += 7) {
            memset(copy, 0, sizeof copy);
            CHECK_EQUAL(zpp_crc32_copy(9, copy + offset, bytes_of_chance + 3, bytes),
                        by_definition(9, bytes_of_chance + 3, bytes));
            CHECK(memcmp(copy + offset, bytes_of_chance + 3, bytes) == 0);
            for (size_t i = offset + bytes; i < sizeof copy; ++i) CHECK_EQUAL(copy[i], 0);
        }
}

static void every_flipped_bit_changes_it(void) {
    fill();
    const uint32_t whole = zpp_crc32(0, bytes_of_chance, 200);
    for (size_t bit = 0; bit < 200 * 8; ++bit) {
        bytes_of_chance[bit / 8] ^= (unsigned char)(1 << bit % 8);
        CHECK(zpp_crc32(0, bytes_of_chance, 200) != whole);
        bytes_of_chance[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        TEST(known_sums),     TEST(every_length_and_alignment), TEST(sums_of_parts_are_the_sum),
        TEST(versions_agree), TEST(copies_what_it_sums),        TEST(every_flipped_bit_changes_it),
        {0},
    };
    return test_main(argc, argv, cases);
}
