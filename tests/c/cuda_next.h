/* SPDX-License-Identifier: Apache-2.0
 *
 * Between two optimizers' .cu files in one test: their walks (list_walk_cuda.h, low_walk_cuda.h) may be included again.
 * No guard: it is included as often. The test gives what they define another name for each.
 */
#undef ZPP_OPS_LIST_WALK_CUDA_H
#undef ZPP_OPS_MOMENTS_LOW_ONE_CUDA_H
#undef ZPP_OPS_MOMENTS_LOW_WALK_CUDA_H
#undef WALK_CONSTS
#undef walk_element
#undef walk
#undef walk_chunk
#undef LOW_CONSTS
#undef low_one
#undef low_element
#undef low_step
#undef low_turn
#undef low_walk
