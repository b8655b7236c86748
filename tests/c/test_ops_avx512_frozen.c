/* SPDX-License-Identifier: Apache-2.0
 *
 * test_frozen.c with the AVX-512 version of the optimizers' loops: the same source, run lane by lane
 * (avx512_emulated.h).
 */
#include "avx512_emulated.h"
#include "emulated_cpu.h"

#include "../../csrc/ops/optim/optim_isa.c"

#include "test_frozen.c"
