/* SPDX-License-Identifier: Apache-2.0
 *
 * The fat binaries of *_cuda.cu files that setup.py embeds where it finds nvcc: one image a file. Without nvcc, and in
 * the C test programs, the table is empty (cuda_images.c).
 */
#ifndef ZPP_BASE_CUDA_IMAGES_H
#define ZPP_BASE_CUDA_IMAGES_H

#include <stddef.h>

struct zpp_cuda_image {
    const char *source; /* path below csrc/, for messages */
    const void *data;
    size_t bytes;
};
extern const struct zpp_cuda_image zpp_cuda_images[];
extern const size_t zpp_cuda_images_count;
extern const int zpp_cuda_images_toolkit; /* CUDA version that compiled them, such as 13000 for 13.0; 0 without any */
extern const char zpp_cuda_images_kinds[]; /* for messages: "sm_75, sm_80, PTX of sm_80"; empty without any */

#endif
