/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading and checking the arguments of ops, and the one place that raises into libtorch: boxed.h.
 */
#include "boxed.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void zpp_boxed_begin(struct zpp_boxed *args, enum zpp_op op, StableIValue *stack, uint64_t inputs) {
    memset(args, 0, sizeof *args);
    args->schema = zpp_schema_of(op);
    args->place = (struct zpp_place){ zpp_torch.aoti_torch_device_type_cpu(), -1 };
    args->stack = stack;
    args->inputs = inputs;
}

bool zpp_boxed_ok(const struct zpp_boxed *args) { return args->err.status == ZPP_OK; }

bool zpp_boxed_fail(struct zpp_boxed *args, const char *format, ...) {
    if (!zpp_boxed_ok(args)) return false; /* the first cause stays */
    char message[ZPP_ERR_TEXT_BYTES];
    va_list values;
    va_start(values, format);
    vsnprintf(message, sizeof message, format, values);
    va_end(values);
    zpp_fail(&args->err, ZPP_INVALID, "%s: %s", args->schema->op, message);
    return false;
}

/* --- reading ------------------------------------------------------------------------------------------------------ */
/* The argument that next() gives. */
static const struct zpp_argument *argument(const struct zpp_boxed *args) {
    return &args->schema->arguments[args->next];
}

static StableIValue next(struct zpp_boxed *args, enum zpp_argument_type type) {
    assert(args->next < args->inputs && args->next < args->schema->count);
    assert(argument(args)->type == type);
    (void)type;
    return args->stack[args->next++];
}

static void look(struct zpp_boxed *args, const struct zpp_argument *of, size_t index, AtenTensorHandle tensor,
                 struct zpp_tensor *out) {
    struct zpp_err err = ZPP_ERR_INIT;
    if (zpp_torch_look(tensor, of->write, out, &err) != ZPP_OK) {
        zpp_boxed_fail(args, "%s[%zu]: %s", of->name, index, err.text);
    }
}

const struct zpp_tensors *zpp_boxed_tensors(struct zpp_boxed *args) {
    assert(args->lists_count < ZPP_BOXED_LISTS);
    const struct zpp_argument *const of = argument(args);
    const char *const name = of->name;
    const size_t slot = args->lists_count++;
    struct zpp_tensors *list = &args->lists[slot];
    StableListHandle handle = (StableListHandle)(uintptr_t)next(args, ZPP_ARGUMENT_TENSORS);
    args->list_handles[slot] = handle;
    list->name = name;
    list->write = of->write;
    size_t count = 0;
    zpp_torch.torch_list_size(handle, &count);
    list->at = calloc(count ? count : 1, sizeof *list->at);
    if (!list->at) {
        zpp_boxed_fail(args, "no memory for %zu tensors of %s", count, name);
        return list;
    }
    list->count = count;
    for (size_t i = 0; i < count; ++i) {
        StableIValue item;
        if (zpp_torch.torch_list_get_item(handle, i, &item) != 0) {
            zpp_boxed_fail(args, "libtorch cannot give %s[%zu]", name, i);
            continue;
        }
        AtenTensorHandle tensor = (AtenTensorHandle)(uintptr_t)item;
        look(args, of, i, tensor, &list->at[i]);
        zpp_torch.aoti_torch_delete_tensor_object(tensor); /* the list still has the tensor */
    }
    return list;
}

const struct zpp_tensor *zpp_boxed_tensor(struct zpp_boxed *args) {
    assert(args->handles_count < ZPP_BOXED_HANDLES);
    const struct zpp_argument *const of = argument(args);
    const size_t slot = args->handles_count++;
    args->handles[slot] = (AtenTensorHandle)(uintptr_t)next(args, ZPP_ARGUMENT_TENSOR);
    look(args, of, 0, args->handles[slot], &args->looks[slot]);
    return &args->looks[slot];
}

/* The raw values of a list of numbers: new memory, `*count` of them; 0 with a message noted if there is none. */
static StableIValue *read_numbers(struct zpp_boxed *args, enum zpp_argument_type type, size_t *count) {
    const char *const name = argument(args)->name;
    StableListHandle handle = (StableListHandle)(uintptr_t)next(args, type);
    size_t wanted = 0;
    zpp_torch.torch_list_size(handle, &wanted);
    StableIValue *values = calloc(wanted ? wanted : 1, sizeof *values);
    if (!values) zpp_boxed_fail(args, "no memory for %zu numbers of %s", wanted, name);
    *count = values ? wanted : 0;
    for (size_t i = 0; i < *count; ++i) {
        if (zpp_torch.torch_list_get_item(handle, i, &values[i]) != 0) {
            zpp_boxed_fail(args, "libtorch cannot give %s[%zu]", name, i);
        }
    }
    zpp_torch.torch_delete_list(handle);
    return values;
}

const struct zpp_ints *zpp_boxed_ints(struct zpp_boxed *args) {
    assert(!args->ints.at);
    struct zpp_ints *ints = &args->ints;
    ints->name = argument(args)->name;
    StableIValue *values = read_numbers(args, ZPP_ARGUMENT_INTS, &ints->count);
    ints->at = (int64_t *)(void *)values; /* 64 bits, signed or not */
    return ints;
}

static double double_of(StableIValue bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

const struct zpp_floats *zpp_boxed_floats(struct zpp_boxed *args) {
    assert(args->floats_count < ZPP_BOXED_FLOATS);
    struct zpp_floats *floats = &args->floats[args->floats_count++];
    floats->name = argument(args)->name;
    StableIValue *values = read_numbers(args, ZPP_ARGUMENT_FLOATS, &floats->count);
    floats->at = calloc(floats->count ? floats->count : 1, sizeof *floats->at);
    if (!floats->at) {
        zpp_boxed_fail(args, "no memory for %zu numbers of %s", floats->count, floats->name);
        floats->count = 0;
    }
    for (size_t i = 0; i < floats->count; ++i) floats->at[i] = double_of(values[i]);
    free(values);
    return floats;
}

double zpp_boxed_float(struct zpp_boxed *args) { return double_of(next(args, ZPP_ARGUMENT_FLOAT)); }

int64_t zpp_boxed_int(struct zpp_boxed *args) { return (int64_t)next(args, ZPP_ARGUMENT_INT); }

bool zpp_boxed_bool(struct zpp_boxed *args) { return (next(args, ZPP_ARGUMENT_BOOL) & 0xff) != 0; }

/* --- checks ------------------------------------------------------------------------------------------------------- */
bool zpp_boxed_check_like(struct zpp_boxed *args, const struct zpp_tensors *list, const struct zpp_tensors *model) {
    if (!zpp_boxed_ok(args)) return false;
    if (list->count != model->count) {
        return zpp_boxed_fail(args, "%s has %zu tensors, wanted %zu as in %s", list->name, list->count, model->count,
                              model->name);
    }
    for (size_t i = 0; i < list->count; ++i) {
        if (list->at[i].elems == model->at[i].elems) continue;
        return zpp_boxed_fail(args, "%s[%zu] has %zu elements, wanted %zu as in %s[%zu]", list->name, i,
                              list->at[i].elems, model->at[i].elems, model->name, i);
    }
    return true;
}

/* --- overlap ------------------------------------------------------------------------------------------------------ */
struct span {
    uintptr_t begin, end;
    const char *name;
    size_t index;
    bool written;
};

static size_t add_spans(struct span *spans, size_t count, const struct zpp_tensors *list, bool written) {
    for (size_t i = 0; i < list->count; ++i) {
        const size_t bytes = list->at[i].elems * zpp_dtype_bytes(list->at[i].dtype);
        const uintptr_t begin = (uintptr_t)list->at[i].data;
        if (bytes) spans[count++] = (struct span){ begin, begin + bytes, list->name, i, written };
    }
    return count;
}

/* Return the end of the run of rising spans that begins at `at`. */
static size_t run_end(const struct span *spans, size_t at, size_t count) {
    if (at < count) at++;
    while (at < count && spans[at - 1].begin <= spans[at].begin) at++;
    return at;
}

static void merge(const struct span *from, size_t middle, size_t end, struct span *to) {
    for (size_t left = 0, right = middle, at = 0; at < end; ++at) {
        const bool take_left = right == end || (left < middle && from[left].begin <= from[right].begin);
        to[at] = from[take_left ? left++ : right++];
    }
}

/* By their begins; merges runs, neighbour with neighbour, until there is one: a list of tensors mostly is one, and a
 * sort that knows nothing of that takes longer than looking at the tensors. `other` has the same capacity; either is
 * returned. */
static struct span *sorted(struct span *spans, struct span *other, size_t count) {
    while (run_end(spans, 0, count) < count) {
        for (size_t at = 0; at < count;) {
            const size_t middle = run_end(spans, at, count), end = run_end(spans, middle, count);
            merge(spans + at, middle - at, end - at, other + at);
            at = end;
        }
        struct span *swap = spans;
        spans = other;
        other = swap;
    }
    return spans;
}

/* Of sorted spans, any that begins before the furthest end so far overlaps the one that reaches it. Two that are only
 * read may, so the furthest written and the furthest read end are kept apart. */
static bool check_sorted(struct zpp_boxed *args, const struct span *spans, size_t count) {
    const struct span *written = NULL, *read = NULL;
    for (size_t i = 0; i < count; ++i) {
        const struct span *s = &spans[i], *other = NULL;
        if (written && written->end > s->begin) other = written;
        else if (s->written && read && read->end > s->begin) other = read;
        if (other) {
            return zpp_boxed_fail(args, "%s[%zu] and %s[%zu] share memory, wanted tensors apart from each other",
                                  other->name, other->index, s->name, s->index);
        }
        const struct span **furthest = s->written ? &written : &read;
        if (!*furthest || (*furthest)->end < s->end) *furthest = s;
    }
    return true;
}

bool zpp_boxed_check_apart(struct zpp_boxed *args, const struct zpp_tensors *const *written, size_t written_count,
                           const struct zpp_tensors *const *read, size_t read_count) {
    if (!zpp_boxed_ok(args)) return false;
    size_t capacity = 1, count = 0;
    for (size_t k = 0; k < written_count; ++k) capacity += written[k]->count;
    for (size_t k = 0; k < read_count; ++k) capacity += read[k]->count;
    struct span *spans = malloc(2 * capacity * sizeof *spans);
    if (!spans) return zpp_boxed_fail(args, "no memory to compare %zu tensors", capacity - 1);
    for (size_t k = 0; k < written_count; ++k) count = add_spans(spans, count, written[k], true);
    for (size_t k = 0; k < read_count; ++k) count = add_spans(spans, count, read[k], false);
    const bool apart = check_sorted(args, sorted(spans, spans + capacity, count), count);
    free(spans);
    return apart;
}

/* --- results and the end ------------------------------------------------------------------------------------------ */
bool zpp_boxed_new(struct zpp_boxed *args, zpp_dtype dtype, size_t elems, AtenTensorHandle *made, void **data) {
    const int64_t size = (int64_t)elems;
    return zpp_boxed_new_sized(args, dtype, &size, 1, made, data);
}

bool zpp_boxed_new_sized(struct zpp_boxed *args, zpp_dtype dtype, const int64_t *sizes, int dims,
                         AtenTensorHandle *made, void **data) {
    if (!zpp_boxed_ok(args)) return false;
    assert(dims >= 1 && dims <= 3);
    int64_t strides[3], elems = 1;
    for (int d = dims - 1; d >= 0; --d) {
        strides[d] = elems;
        elems *= sizes[d];
    }
    AtenTensorHandle tensor = NULL;
    const int32_t index = args->place.device_index < 0 ? 0 : args->place.device_index;
    AOTITorchError failed = zpp_torch.aoti_torch_empty_strided(dims, sizes, strides, zpp_torch_dtype_of(dtype),
                                                               args->place.device_type, index, &tensor);
    if (failed) {
        return zpp_boxed_fail(args, "libtorch cannot make a tensor of %lld %s", (long long)elems,
                              zpp_dtype_name(dtype));
    }
    if (zpp_torch.torch_get_mutable_data_ptr(tensor, data) != 0) {
        zpp_torch.aoti_torch_delete_tensor_object(tensor);
        return zpp_boxed_fail(args, "libtorch gives no memory of a new tensor");
    }
    *made = tensor;
    return true;
}

void zpp_boxed_end(struct zpp_boxed *args) {
    for (size_t k = 0; k < args->lists_count; ++k) {
        free(args->lists[k].at);
        zpp_torch.torch_delete_list(args->list_handles[k]);
    }
    for (size_t k = 0; k < args->handles_count; ++k) {
        if (args->handles[k]) zpp_torch.aoti_torch_delete_tensor_object(args->handles[k]);
    }
    free(args->ints.at);
    for (size_t k = 0; k < args->floats_count; ++k) free(args->floats[k].at);
    if (!zpp_boxed_ok(args)) zpp_torch.aoti_torch_check(false, args->schema->op, "zeropp", 0, args->err.text);
}
