/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks that the entries of optimizers, quantisation and one-bit compression share, beyond those of boxed.h. Each
 * notes a message and gives false if it, or anything before, failed.
 */
#ifndef ZPP_BIND_OP_CHECKS_H
#define ZPP_BIND_OP_CHECKS_H

#include "../base/device.h"
#include "../ops/grad_scale.h"
#include "../ops/moments/moments.h"
#include "boxed.h"

enum { ZPP_OP_FLOATS = 1u << ZPP_F32 | 1u << ZPP_BF16 | 1u << ZPP_F16 };

/* An entry for CUDA: this call's tensors are to be on the device of `first` (NULL: device 0). */
void zpp_op_on_cuda(struct zpp_boxed *args, const struct zpp_tensor *first);
static inline bool zpp_op_is_on_cuda(const struct zpp_boxed *args) { return args->place.device_index >= 0; }

/* Our device at the call's place, and torch's current stream there. */
struct zpp_op_stream {
    zpp_device *device;
    void *native;
};
bool zpp_op_find_stream(struct zpp_boxed *args, struct zpp_op_stream *on);
/* The same, and memory there for a kernel to work in, at least `bytes` of it, aligned for doubles. Delete `memory`
 * after the launch: torch's allocator follows the stream. */
bool zpp_op_find_work(struct zpp_boxed *args, struct zpp_op_stream *on, size_t bytes, AtenTensorHandle *memory,
                      void **work);
/* Memory for a segment a tensor, zeros; free it. NULL, with a message noted, without memory. */
void *zpp_op_new_segments(struct zpp_boxed *args, size_t count, size_t segment_bytes);
/* Notes the message of a launch that failed. */
void zpp_op_launched(struct zpp_boxed *args, zpp_status status, const struct zpp_err *err);

/* One tensor: contiguous, at the call's place, of a dtype in `dtypes` (a bit each: 1 << ZPP_F32 ...). */
bool zpp_op_check_tensor(struct zpp_boxed *args, const char *name, const struct zpp_tensor *tensor, unsigned dtypes);
/* The same, with this number of elements; `of` says what that number belongs to, such as "scales of 3 blocks". */
bool zpp_op_check_elems(struct zpp_boxed *args, const char *name, const struct zpp_tensor *tensor, unsigned dtypes,
                        size_t elems, const char *of);
/* True if zpp_op_check_tensor would pass. To make up a name first costs more than an operator on few elements. */
bool zpp_op_is_fine(const struct zpp_boxed *args, const struct zpp_tensor *tensor, unsigned dtypes);
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

/* What a step multiplies gradients with (grad_scale.h): the number `grad_scale`, in whose place `grad_scales` may have
 * one fp32 tensor of one element, and `skips` one of int32. Borrows the tensors' memory. */
struct zpp_op_scale {
    double value;
    const struct zpp_tensors *at, *skip; /* NULL: the operator has no such argument */
};
bool zpp_op_check_scale(struct zpp_boxed *args, const struct zpp_op_scale *scale);
struct zpp_grad_scale zpp_op_scale_of(const struct zpp_op_scale *scale);

/* One number for all tensors of `model`, or one a tensor: finite, and not below `least`. */
bool zpp_op_check_floats(struct zpp_boxed *args, const struct zpp_floats *floats, const struct zpp_tensors *model,
                         double least);
static inline double zpp_op_float_of(const struct zpp_floats *floats, size_t i) {
    return floats->at[floats->count == 1 ? 0 : i];
}

/* A single tensor as a list of one, for zpp_boxed_check_apart. Borrows both. */
static inline struct zpp_tensors zpp_op_one(const char *name, const struct zpp_tensor *tensor) {
    return (struct zpp_tensors){ .name = name, .count = 1, .at = (struct zpp_tensor *)(uintptr_t)tensor };
}

/* -- moments in bf16 or 8 bits (csrc/ops/moments) ------------------------------------------------------------------ */
/* What the steps of optimizers with such moments take beside the arguments of fp32. Codes of one call are of one kind,
 * bfloat16 or uint8. */
struct zpp_op_low {
    bool is; /* else all that follows is of no meaning */
    const struct zpp_tensors *scales; /* of 8 bits only: one for each parameter's first moment, then second, ... */
    const struct zpp_ints *places;    /* three numbers a parameter: step, stream, first; NULL: first is 0 everywhere */
    uint64_t seed;
    enum zpp_moments_kind kind;
};
enum { ZPP_OP_LOW_STEP, ZPP_OP_LOW_STREAM, ZPP_OP_LOW_FIRST, ZPP_OP_LOW_PLACE };

/* The kinds that codes may have, as a set of dtypes: what the first has, which sets `kind`; or all that are allowed,
 * where that one is not. */
unsigned zpp_op_low_dtypes(struct zpp_op_low *low, const struct zpp_tensors *codes);

/* A scale for each block of each of `moments` moments, of 8 bits; none of bf16. */
bool zpp_op_low_check_scales(struct zpp_boxed *args, const struct zpp_op_low *low, const struct zpp_tensors *params,
                             size_t moments);

/* As many places as parameters, steps from 1, the others from 0. */
bool zpp_op_low_check_places(struct zpp_boxed *args, const struct zpp_op_low *low, const struct zpp_tensors *params);

int64_t zpp_op_low_place(const struct zpp_op_low *low, size_t param, int which);

/* How the moments of a parameter are held in this step, where there are places. */
struct zpp_moments zpp_op_low_how(const struct zpp_op_low *low, size_t param);

#endif
