/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks that the entries of optimizers, quantisation and one-bit compression share, beyond those of boxed.h. Each
 * notes a sentence and gives false if it, or anything before, failed.
 */
#ifndef ZPP_BIND_OP_CHECKS_H
#define ZPP_BIND_OP_CHECKS_H

#include "boxed.h"

enum { ZPP_OP_FLOATS = 1u << ZPP_F32 | 1u << ZPP_BF16 | 1u << ZPP_F16 };

/* One tensor: contiguous, on the CPU, of a kind in `dtypes`. */
bool zpp_op_check_tensor(struct zpp_boxed *args, const char *name, const struct zpp_tensor *tensor, unsigned dtypes);
/* The same, with this number of elements; `of` says what that number belongs to, such as "scales of 3 blocks". */
bool zpp_op_check_elems(struct zpp_boxed *args, const char *name, const struct zpp_tensor *tensor, unsigned dtypes,
                        size_t elems, const char *of);
/* Both on a place of boxed.h: the cpu, or one CUDA device. */
bool zpp_op_check_tensor_on(struct zpp_boxed *args, struct zpp_place place, const char *name,
                            const struct zpp_tensor *tensor, unsigned dtypes);
bool zpp_op_check_elems_on(struct zpp_boxed *args, struct zpp_place place, const char *name,
                           const struct zpp_tensor *tensor, unsigned dtypes, size_t elems, const char *of);
/* Every tensor of a list as above, with as many tensors and elements as `model`; an empty list passes if it may. */
bool zpp_op_check_list(struct zpp_boxed *args, const struct zpp_tensors *list, const struct zpp_tensors *model,
                       unsigned dtypes, bool may_be_empty);
/* numbers that count updates from 1, one a tensor of `model` */
bool zpp_op_check_steps(struct zpp_boxed *args, const struct zpp_ints *steps, const struct zpp_tensors *model);

struct zpp_op_rate {
    const char *name;
    double value, least, below; /* wanted least <= value < below */
};
bool zpp_op_check_rates(struct zpp_boxed *args, const struct zpp_op_rate *rates, size_t rates_count);

/* A single tensor as a list of one, for zpp_boxed_check_apart. Borrows both. */
static inline struct zpp_tensors zpp_op_one(const char *name, const struct zpp_tensor *tensor) {
    return (struct zpp_tensors){ name, 1, (struct zpp_tensor *)(uintptr_t)tensor };
}

#endif
