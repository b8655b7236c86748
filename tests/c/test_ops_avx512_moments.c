/* SPDX-License-Identifier: Apache-2.0
 *
 * test_moments.c with the AVX-512 versions of moments in fewer bits and of the optimizers: the same sources, run lane
 * by lane (avx512_emulated.h).
 */
#include "avx512_emulated.h"
#include "emulated_cpu.h"

#include "../../csrc/ops/optim/optim_isa.c"
#include "../../csrc/ops/moments/moments_isa.c"

#include "test_moments.c"
