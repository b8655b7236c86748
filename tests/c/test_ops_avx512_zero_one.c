/* SPDX-License-Identifier: Apache-2.0
 *
 * test_zero_one.c with the AVX-512 version of 0/1 Adam's step, its very source run lane by lane (avx512_emulated.h).
 */
#include "avx512_emulated.h"
#include "emulated_cpu.h"

#include "../../csrc/ops/zero_one/zero_one_avx512.c"

#include "test_zero_one.c"
