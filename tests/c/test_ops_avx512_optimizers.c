/* SPDX-License-Identifier: Apache-2.0
 *
 * test_ops_optimizers.c with the AVX-512 versions of Lion, Adagrad and SGD, their very sources run lane by lane
 * (avx512_emulated.h). Each includes step_vec16.h for itself, so its names are made its own.
 */
#include "avx512_emulated.h"
#include "emulated_cpu.h"

#define step_sixteen lion_sixteen
#define step_turns lion_turns
#define step_turns_out lion_turns_out
#define step_all_turns lion_all_turns
#define step_head_elems lion_head_elems
#define step_walk lion_walk
#include "../../csrc/ops/lion/lion_avx512.c"

#undef ZPP_OPS_STEP_VEC16_H
#undef STEP_SEGMENT
#undef STEP_CONSTS
#undef step_elements
#undef step_sixteen
#undef step_turns
#undef step_turns_out
#undef step_all_turns
#undef step_head_elems
#undef step_walk
#define step_sixteen adagrad_sixteen
#define step_turns adagrad_turns
#define step_turns_out adagrad_turns_out
#define step_all_turns adagrad_all_turns
#define step_head_elems adagrad_head_elems
#define step_walk adagrad_walk
#include "../../csrc/ops/adagrad/adagrad_avx512.c"

#undef ZPP_OPS_STEP_VEC16_H
#undef STEP_SEGMENT
#undef STEP_CONSTS
#undef step_elements
#undef step_sixteen
#undef step_turns
#undef step_turns_out
#undef step_all_turns
#undef step_head_elems
#undef step_walk
#define step_sixteen sgd_sixteen
#define step_turns sgd_turns
#define step_turns_out sgd_turns_out
#define step_all_turns sgd_all_turns
#define step_head_elems sgd_head_elems
#define step_walk sgd_walk
#include "../../csrc/ops/sgd/sgd_avx512.c"

#include "test_ops_optimizers.c"
