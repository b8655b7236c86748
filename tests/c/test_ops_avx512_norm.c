/* SPDX-License-Identifier: Apache-2.0
 *
 * The AVX-512 version of the sum of squares, its very source run lane by lane (avx512_emulated.h) against the scalar
 * one.
 */
#include "harness.h"

#include "avx512_emulated.h"

#include "../../csrc/ops/norm/norm_isa.c"

static void equals_scalar(void) {
    static const zpp_dtype kinds[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
    static const size_t lengths[] = { 0, 1, 31, 32, 33, 1000, ZPP_NORM_BLOCK_ELEMS };
    static float data[ZPP_NORM_BLOCK_ELEMS + 3];
    for (size_t i = 0; i < ZPP_NORM_BLOCK_ELEMS + 3; ++i) {
        const uint32_t bits = 0x3c003c00u + (uint32_t)(i * 2654435761u % 0x1ffu) * 0x10001u; /* finite as every kind */
        memcpy(&data[i], &bits, sizeof bits);
    }
    for (int k = 0; k < 3; ++k) for (int l = 0; l < 7; ++l) for (size_t offset = 0; offset < 4; offset += 3) {
        const char *at = (const char *)data + offset * zpp_dtype_bytes(kinds[k]);
        CHECK(zpp_norm_avx512.block(at, kinds[k], lengths[l]) == zpp_norm_scalar.block(at, kinds[k], lengths[l]));
    }
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(equals_scalar), {0} };
    return test_main(argc, argv, cases);
}
