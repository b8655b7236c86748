/* SPDX-License-Identifier: Apache-2.0
 *
 * test_onebit_lamb.c with the AVX-512 version of 1-bit LAMB's fresh variance and norms, its very source run lane by
 * lane (avx512_emulated.h).
 */
#include "avx512_emulated.h"
#include "emulated_cpu.h"

#include "../../csrc/ops/onebit_lamb/onebit_lamb_isa.c"

#include "test_onebit_lamb.c"
