/* SPDX-License-Identifier: Apache-2.0
 *
 * The empty table of CUDA kernels, for builds without nvcc: the one that setup.py writes takes its place.
 */
#include "cuda_images.h"

__attribute__((weak)) const struct zpp_cuda_image zpp_cuda_images[] = {{0, 0, 0}};
__attribute__((weak)) const size_t zpp_cuda_images_count = 0;
__attribute__((weak)) const int zpp_cuda_images_toolkit = 0;
__attribute__((weak)) const char zpp_cuda_images_kinds[] = "";
