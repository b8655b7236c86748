/* SPDX-License-Identifier: Apache-2.0
 *
 * Arguments of an op, read from libtorch's stack: every entry of register.c reads all of them first, then checks, then
 * works, then ends.
 *
 *     void entry(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
 *         struct zpp_boxed args;
 *         zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_thing, stack, inputs);
 *         const struct zpp_tensors *xs = zpp_boxed_tensors(&args);
 *         ...every argument, in the order of the schema...
 *         if (zpp_boxed_ok(&args)) work(...);
 *         zpp_boxed_end(&args);           // last statement: frees what the arguments own, then raises if failed
 *     }
 *
 * The schema (schema.h) gives each argument's name, for messages, its type, and whether the op writes to it.
 *
 * Arguments own memory, so an entry may not return before all were read: a read that fails only notes its message
 * (the first one stays), and gives something empty. Raising unwinds through C frames, hence -fexceptions, and hence the
 * one place, zpp_boxed_end, where nothing is left to free.
 */
#ifndef ZPP_BIND_BOXED_H
#define ZPP_BIND_BOXED_H

#include "schema.h"
#include "shim.h"

enum { ZPP_BOXED_LISTS = 9, ZPP_BOXED_FLOATS = 3, ZPP_BOXED_HANDLES = 10 };

/* A list of tensors. Borrowed: lives until zpp_boxed_end. */
struct zpp_tensors {
    const char *name; /* of the argument, for messages */
    size_t count;
    struct zpp_tensor *at;
    bool write; /* the op writes to them */
};
struct zpp_ints {
    const char *name;
    size_t count;
    int64_t *at;
};
struct zpp_floats {
    const char *name;
    size_t count;
    double *at;
};

/* Where tensors are. */
struct zpp_place {
    int32_t device_type, device_index; /* index -1: the only one, as for cpu */
};

struct zpp_boxed {
    const struct zpp_schema *schema;
    struct zpp_place place; /* of this call's tensors, for op_checks.h and new ones: the cpu, or what an entry sets */
    StableIValue *stack;
    uint64_t inputs, next;
    struct zpp_err err;
    struct zpp_tensors lists[ZPP_BOXED_LISTS];
    StableListHandle list_handles[ZPP_BOXED_LISTS]; /* keep the tensors alive */
    size_t lists_count;
    struct zpp_ints ints;
    struct zpp_floats floats[ZPP_BOXED_FLOATS];
    size_t floats_count;
    AtenTensorHandle handles[ZPP_BOXED_HANDLES]; /* single tensors */
    struct zpp_tensor looks[ZPP_BOXED_HANDLES];
    size_t handles_count;
};

void zpp_boxed_begin(struct zpp_boxed *args, enum zpp_op op, StableIValue *stack, uint64_t inputs);
/* The next argument, which is of this type. */
const struct zpp_tensors *zpp_boxed_tensors(struct zpp_boxed *args);
const struct zpp_tensor *zpp_boxed_tensor(struct zpp_boxed *args);
const struct zpp_ints *zpp_boxed_ints(struct zpp_boxed *args); /* one a call */
const struct zpp_floats *zpp_boxed_floats(struct zpp_boxed *args);
double zpp_boxed_float(struct zpp_boxed *args);
int64_t zpp_boxed_int(struct zpp_boxed *args);
bool zpp_boxed_bool(struct zpp_boxed *args);

/* --- checks: note a message that begins with the op's name; false if this or anything before failed ------------- */
bool zpp_boxed_ok(const struct zpp_boxed *args);
bool zpp_boxed_fail(struct zpp_boxed *args, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Same number of tensors with the same numbers of elements as `model`. */
bool zpp_boxed_check_like(struct zpp_boxed *args, const struct zpp_tensors *list, const struct zpp_tensors *model);
/* No tensor of `written` shares memory with another one of them or with one of `read`. Lists in rising order of
 * addresses, which is what allocators and flat buffers give, are checked in one walk. */
bool zpp_boxed_check_apart(struct zpp_boxed *args, const struct zpp_tensors *const *written, size_t written_count,
                           const struct zpp_tensors *const *read, size_t read_count);

/* A new tensor of one dimension at the call's place; `*data` is its memory. The caller gives the handle to the stack,
 * or deletes it. */
bool zpp_boxed_new(struct zpp_boxed *args, zpp_dtype dtype, size_t elems, AtenTensorHandle *made, void **data);
/* The same with `dims` (1 to 3) dimensions. */
bool zpp_boxed_new_sized(struct zpp_boxed *args, zpp_dtype dtype, const int64_t *sizes, int dims,
                         AtenTensorHandle *made, void **data);

void zpp_boxed_end(struct zpp_boxed *args);

#endif
