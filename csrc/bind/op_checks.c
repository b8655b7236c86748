/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks of op_checks.h.
 */
#include "op_checks.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "op_entries.h"

enum { LABEL_BYTES = 64, DTYPES_BYTES = 96, OF_BYTES = 96 };

/* "float32, bfloat16 or float16" */
static void name_dtypes(unsigned dtypes, char text[DTYPES_BYTES]) {
    size_t used = 0;
    text[0] = '\0';
    for (int dtype = 0; dtype < ZPP_DTYPES; ++dtype) {
        if (!(dtypes & 1u << dtype)) continue;
        const char *before = used == 0 ? "" : dtypes >> dtype == 1u ? " or " : ", ";
        const int added = snprintf(text + used, DTYPES_BYTES - used, "%s%s", before, zpp_dtype_name((zpp_dtype)dtype));
        if (added > 0 && (size_t)added < DTYPES_BYTES - used) used += (size_t)added;
    }
}

static const char *place_name(int32_t device_type, int32_t device_index, char text[LABEL_BYTES]) {
    if (device_type == zpp_torch.aoti_torch_device_type_cpu()) return "cpu";
    const bool cuda = device_type == zpp_torch.aoti_torch_device_type_cuda();
    snprintf(text, LABEL_BYTES, cuda ? "cuda:%d" : "device type %d", (int)(cuda ? device_index : device_type));
    return text;
}

static bool is_here(const struct zpp_boxed *args, const struct zpp_tensor *tensor) {
    return tensor->device_type == args->place.device_type &&
           (!zpp_op_is_on_cuda(args) || tensor->device_index == args->place.device_index);
}

static bool check_place(struct zpp_boxed *args, const char *name, const struct zpp_tensor *tensor) {
    char seen[LABEL_BYTES], wanted[LABEL_BYTES];
    if (is_here(args, tensor)) return true;
    return zpp_boxed_fail(args, "%s is on %s, wanted %s: move all tensors to one device", name,
                          place_name(tensor->device_type, tensor->device_index, seen),
                          place_name(args->place.device_type, args->place.device_index, wanted));
}

void zpp_op_on_cuda(struct zpp_boxed *args, const struct zpp_tensor *first) {
    const bool there = first && zpp_accelerator_has(first->device_type) && first->device_index >= 0;
    args->place = there ? (struct zpp_place){ first->device_type, first->device_index }
                        : (struct zpp_place){ zpp_torch.aoti_torch_device_type_cuda(), 0 };
}

bool zpp_op_find_stream(struct zpp_boxed *args, struct zpp_op_stream *on) {
    struct zpp_err err = ZPP_ERR_INIT;
    const zpp_status status = zpp_accelerator_current(args->place.device_type, args->place.device_index, &on->device,
                                                      &on->native, &err);
    if (status == ZPP_OK) return true;
    return zpp_boxed_fail(args, "%s", err.text);
}

bool zpp_op_find_work(struct zpp_boxed *args, struct zpp_op_stream *on, size_t bytes, AtenTensorHandle *memory,
                      void **work) {
    return zpp_op_find_stream(args, on) && zpp_boxed_new(args, ZPP_F64, bytes / sizeof(double) + 1, memory, work);
}

void *zpp_op_new_segments(struct zpp_boxed *args, size_t count, size_t segment_bytes) {
    void *segments = calloc(count + 1, segment_bytes);
    if (!segments) zpp_boxed_fail(args, "no memory for %zu segments", count);
    return segments;
}

void zpp_op_launched(struct zpp_boxed *args, zpp_status status, const struct zpp_err *err) {
    if (status != ZPP_OK) zpp_boxed_fail(args, "%s", err->text);
}

bool zpp_op_check_tensor(struct zpp_boxed *args, const char *name, const struct zpp_tensor *tensor, unsigned dtypes) {
    if (!zpp_boxed_ok(args) || !check_place(args, name, tensor)) return false;
    if (tensor->dtype == ZPP_DTYPES || !(dtypes & 1u << tensor->dtype)) {
        char wanted[DTYPES_BYTES], seen[LABEL_BYTES];
        name_dtypes(dtypes, wanted);
        if (tensor->dtype == ZPP_DTYPES) snprintf(seen, sizeof seen, "torch dtype %d", (int)tensor->torch_dtype);
        else snprintf(seen, sizeof seen, "%s", zpp_dtype_name(tensor->dtype));
        return zpp_boxed_fail(args, "%s is %s, wanted %s", name, seen, wanted);
    }
    if (!tensor->contiguous) {
        return zpp_boxed_fail(args, "%s is not contiguous, wanted contiguous: pass a contiguous tensor, not a "
                              "transposed or strided view", name);
    }
    return true;
}

bool zpp_op_check_elems(struct zpp_boxed *args, const char *name, const struct zpp_tensor *tensor, unsigned dtypes,
                        size_t elems, const char *of) {
    if (!zpp_op_check_tensor(args, name, tensor, dtypes)) return false;
    if (tensor->elems == elems) return true;
    return zpp_boxed_fail(args, "%s has %zu elements, wanted %zu: %s", name, tensor->elems, elems, of);
}

bool zpp_op_is_fine(const struct zpp_boxed *args, const struct zpp_tensor *tensor, unsigned dtypes) {
    const bool known = tensor->dtype != ZPP_DTYPES && (dtypes & 1u << tensor->dtype);
    return known && is_here(args, tensor) && tensor->contiguous;
}

bool zpp_op_check_list(struct zpp_boxed *args, const struct zpp_tensors *list, const struct zpp_tensors *model,
                       unsigned dtypes, bool may_be_empty) {
    if (may_be_empty && list->count == 0) return zpp_boxed_ok(args);
    if (!zpp_boxed_check_like(args, list, model)) return false;
    for (size_t i = 0; i < list->count; ++i) {
        const struct zpp_tensor *tensor = &list->at[i];
        if (zpp_op_is_fine(args, tensor, dtypes)) continue;
        char label[LABEL_BYTES];
        snprintf(label, sizeof label, "%s[%zu]", list->name, i);
        if (!zpp_op_check_tensor(args, label, tensor, dtypes)) return false;
    }
    return true;
}

bool zpp_op_check_steps(struct zpp_boxed *args, const struct zpp_ints *steps, const struct zpp_tensors *model) {
    if (!zpp_boxed_ok(args)) return false;
    if (steps->count != model->count) {
        return zpp_boxed_fail(args, "%s has %zu numbers, wanted %zu as %s has tensors", steps->name, steps->count,
                              model->count, model->name);
    }
    for (size_t i = 0; i < steps->count; ++i) {
        if (steps->at[i] >= 1) continue;
        return zpp_boxed_fail(args, "%s[%zu] is %lld, wanted the number of this update, counted from 1", steps->name, i,
                              (long long)steps->at[i]);
    }
    return true;
}

bool zpp_op_check_floats(struct zpp_boxed *args, const struct zpp_floats *floats, const struct zpp_tensors *model,
                         double least) {
    if (!zpp_boxed_ok(args)) return false;
    if (floats->count != 1 && floats->count != model->count) {
        return zpp_boxed_fail(args, "%s has %zu numbers, wanted one, or %zu as %s has tensors", floats->name,
                              floats->count, model->count, model->name);
    }
    for (size_t i = 0; i < floats->count; ++i) {
        char label[LABEL_BYTES];
        if (isfinite(floats->at[i]) && floats->at[i] >= least) continue;
        if (floats->count == 1) snprintf(label, sizeof label, "%s", floats->name);
        else snprintf(label, sizeof label, "%s[%zu]", floats->name, i);
        if (isfinite(least)) {
            return zpp_boxed_fail(args, "%s is %g, wanted %s >= %g and finite", label, floats->at[i], floats->name,
                                  least);
        }
        return zpp_boxed_fail(args, "%s is %g, wanted a finite number", label, floats->at[i]);
    }
    return true;
}

bool zpp_op_check_rates(struct zpp_boxed *args, const struct zpp_op_rate *rates, size_t rates_count) {
    for (size_t k = 0; k < rates_count && zpp_boxed_ok(args); ++k) {
        const struct zpp_op_rate *rate = &rates[k];
        if (isfinite(rate->value) && rate->value >= rate->least && rate->value < rate->below) continue;
        if (isinf(rate->below) && isinf(rate->least)) {
            zpp_boxed_fail(args, "%s is %g, wanted a finite number", rate->name, rate->value);
        } else if (isinf(rate->below)) {
            zpp_boxed_fail(args, "%s is %g, wanted %s >= %g and finite", rate->name, rate->value, rate->name,
                           rate->least);
        } else {
            zpp_boxed_fail(args, "%s is %g, wanted %g <= %s < %g", rate->name, rate->value, rate->least, rate->name,
                           rate->below);
        }
    }
    return zpp_boxed_ok(args);
}

/* --- words of a step (csrc/ops/grad_scale.h) ---------------------------------------------------------------------- */
static bool check_word(struct zpp_boxed *args, const struct zpp_tensors *word, zpp_dtype dtype) {
    if (!word || word->count == 0) return zpp_boxed_ok(args);
    if (word->count > 1) return zpp_boxed_fail(args, "%s has %zu tensors, wanted at most 1", word->name, word->count);
    return zpp_op_check_elems(args, word->name, &word->at[0], 1u << dtype, 1, "one for all parameters");
}

bool zpp_op_check_scale(struct zpp_boxed *args, const struct zpp_op_scale *scale) {
    const struct zpp_op_rate rate = {"grad_scale", scale->value, -INFINITY, INFINITY};
    return zpp_op_check_rates(args, &rate, 1) && check_word(args, scale->at, ZPP_F32) &&
           check_word(args, scale->skip, ZPP_I32);
}

struct zpp_grad_scale zpp_op_scale_of(const struct zpp_op_scale *scale) {
    struct zpp_grad_scale made = zpp_grad_scale_of((float)scale->value);
    if (scale->at && scale->at->count) made.at = scale->at->at[0].data;
    if (scale->skip && scale->skip->count) made.skip = scale->skip->at[0].data;
    return made;
}

/* --- moments in bf16 or 8 bits (csrc/ops/moments) ----------------------------------------------------------------- */
unsigned zpp_op_low_dtypes(struct zpp_op_low *low, const struct zpp_tensors *codes) {
    const zpp_dtype first = codes->count ? codes->at[0].dtype : ZPP_BF16;
    low->kind = first == ZPP_U8 ? ZPP_MOMENTS_INT8 : ZPP_MOMENTS_BF16;
    return first == ZPP_U8 || first == ZPP_BF16 ? 1u << first : 1u << ZPP_BF16 | 1u << ZPP_U8;
}

int64_t zpp_op_low_place(const struct zpp_op_low *low, size_t param, int which) {
    return low->places ? low->places->at[param * ZPP_OP_LOW_PLACE + (size_t)which] : 0;
}

bool zpp_op_low_check_scales(struct zpp_boxed *args, const struct zpp_op_low *low, const struct zpp_tensors *params,
                             size_t moments) {
    const size_t wanted = low->kind == ZPP_MOMENTS_INT8 ? moments * params->count : 0;
    if (!zpp_boxed_ok(args)) return false;
    if (low->scales->count != wanted) {
        return zpp_boxed_fail(args, "scales has %zu tensors, wanted %zu: %s", low->scales->count, wanted,
                              wanted ? "one for each moment of each parameter" : "bf16 has none");
    }
    for (size_t i = 0; i < wanted; ++i) {
        char label[LABEL_BYTES], of[OF_BYTES];
        const size_t elems = params->at[i % params->count].elems;
        const size_t first = (size_t)zpp_op_low_place(low, i % params->count, ZPP_OP_LOW_FIRST);
        snprintf(label, sizeof label, "scales[%zu]", i);
        snprintf(of, sizeof of, "%zu elements from %zu on in blocks of %d", elems, first,
                 (int)ZPP_MOMENTS_BLOCK_ELEMS);
        if (!zpp_op_check_elems(args, label, &low->scales->at[i], 1u << ZPP_F32, zpp_moments_scales(first, elems),
                                of)) return false;
    }
    return true;
}

bool zpp_op_low_check_places(struct zpp_boxed *args, const struct zpp_op_low *low, const struct zpp_tensors *params) {
    static const char *const names[] = { "steps", "streams", "firsts" };
    if (!zpp_boxed_ok(args)) return false;
    if (low->places->count != ZPP_OP_LOW_PLACE * params->count) {
        return zpp_boxed_fail(args, "places has %zu numbers, wanted %zu: step, stream and first of each of params",
                              low->places->count, ZPP_OP_LOW_PLACE * params->count);
    }
    for (size_t i = 0; i < low->places->count; ++i) {
        const size_t which = i % ZPP_OP_LOW_PLACE;
        if (low->places->at[i] >= (which == ZPP_OP_LOW_STEP)) continue;
        return zpp_boxed_fail(args, "%s[%zu] is %lld, wanted %s", names[which], i / ZPP_OP_LOW_PLACE,
                              (long long)low->places->at[i],
                              which == ZPP_OP_LOW_STEP ? "the number of this update, counted from 1" : "at least 0");
    }
    return true;
}

struct zpp_moments zpp_op_low_how(const struct zpp_op_low *low, size_t param) {
    return (struct zpp_moments){
        .kind = low->kind, .first_elems = (size_t)zpp_op_low_place(low, param, ZPP_OP_LOW_FIRST),
        .key = zpp_moments_key(low->seed, (uint64_t)zpp_op_low_place(low, param, ZPP_OP_LOW_STREAM),
                               (uint64_t)zpp_op_low_place(low, param, ZPP_OP_LOW_STEP)) };
}
