/* SPDX-License-Identifier: Apache-2.0
 *
 * test_moe.c with the AVX-512 version of the MoE kernels, its very source run lane by lane (avx512_emulated.h).
 */
#include "avx512_emulated.h"
#include "emulated_cpu.h"

#include "../../csrc/ops/moe/moe_isa.c"

#include "test_moe.c"
