/* SPDX-License-Identifier: Apache-2.0
 *
 * test_onebit.c with the AVX-512 version of one-bit compression, its very source run lane by lane (avx512_emulated.h).
 */
#include "avx512_emulated.h"
#include "emulated_cpu.h"

#include "../../csrc/ops/onebit/onebit_isa.c"

#include "test_onebit.c"
