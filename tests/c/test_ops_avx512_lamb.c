/* SPDX-License-Identifier: Apache-2.0
 *
 * test_lamb.c with the AVX-512 version of LAMB, its very source run lane by lane (avx512_emulated.h).
 */
#include "avx512_emulated.h"
#include "emulated_cpu.h"

#include "../../csrc/ops/lamb/lamb_isa.c"

#include "test_lamb.c"
