/* SPDX-License-Identifier: Apache-2.0
 *
 * The arguments of every op, read from the schemas of ops/ops.def once, before the first op is registered.
 */
#ifndef ZPP_BIND_SCHEMA_H
#define ZPP_BIND_SCHEMA_H

#include <stdbool.h>
#include <stddef.h>

/* An op by the name of its entry for the CPU, such as ZPP_SCHEMA_zpp_op_adam_step. */
enum zpp_op {
#define ZPP_OP(name, schema, cpu, cuda) ZPP_SCHEMA_##cpu,
#include "../ops/ops.def"
#undef ZPP_OP
    ZPP_OPS
};

enum zpp_argument_type {
    ZPP_ARGUMENT_TENSOR, ZPP_ARGUMENT_TENSORS, ZPP_ARGUMENT_INT, ZPP_ARGUMENT_INTS, ZPP_ARGUMENT_FLOAT,
    ZPP_ARGUMENT_FLOATS, ZPP_ARGUMENT_BOOL,
};

enum { ZPP_SCHEMA_ARGUMENTS = 20, ZPP_SCHEMA_NAME_BYTES = 20, ZPP_SCHEMA_OP_BYTES = 40 };

struct zpp_argument {
    char name[ZPP_SCHEMA_NAME_BYTES];
    enum zpp_argument_type type;
    bool write; /* the op writes to the tensors */
};

struct zpp_schema {
    char op[ZPP_SCHEMA_OP_BYTES]; /* with its namespace, for messages */
    size_t count;
    struct zpp_argument arguments[ZPP_SCHEMA_ARGUMENTS];
};

/* Read all schemas. Return the name of an op whose schema has something unknown, or NULL. Not beside other threads. */
const char *zpp_schema_read_all(void);

const struct zpp_schema *zpp_schema_of(enum zpp_op op);

#endif
