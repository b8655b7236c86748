/* SPDX-License-Identifier: Apache-2.0
 *
 * test_quant.c with the AVX-512 version of block quantisation, its very source run lane by lane (avx512_emulated.h).
 */
#include "avx512_emulated.h"
#include "emulated_cpu.h"

#include "../../csrc/ops/quant/quant_isa.c"

#include "test_quant.c"
