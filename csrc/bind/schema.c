/* SPDX-License-Identifier: Apache-2.0
 *
 * schema.h: a schema is "(type name, type name, ...) -> results", and a tensor that is written has a type such as
 * "Tensor(a!)" or "Tensor(a!)[]".
 */
#include "schema.h"

#include <stdio.h>
#include <string.h>

static const struct { const char *name, *schema; } texts[ZPP_OPS] = {
#define ZPP_OP(name, schema, cpu, cuda) [ZPP_SCHEMA_##cpu] = { name, schema },
#include "../ops/ops.def"
#undef ZPP_OP
};
static struct zpp_schema schemas[ZPP_OPS]; /* written once, before any op runs */

static bool read_type(const char *text, size_t length, struct zpp_argument *argument) {
    static const struct { const char *prefix; enum zpp_argument_type one, list; } types[] = {
        { "Tensor", ZPP_ARGUMENT_TENSOR, ZPP_ARGUMENT_TENSORS },
        { "int", ZPP_ARGUMENT_INT, ZPP_ARGUMENT_INTS },
        { "float", ZPP_ARGUMENT_FLOAT, ZPP_ARGUMENT_FLOATS },
        { "bool", ZPP_ARGUMENT_BOOL, ZPP_ARGUMENT_BOOL },
    };
    for (size_t k = 0; k < sizeof types / sizeof types[0]; ++k) {
        if (strncmp(text, types[k].prefix, strlen(types[k].prefix)) != 0) continue;
        argument->type = text[length - 1] == ']' ? types[k].list : types[k].one;
        argument->write = memchr(text, '!', length) != NULL;
        return true;
    }
    return false;
}

/* "type name" of the given length. */
static bool read_argument(const char *text, size_t length, struct zpp_argument *argument) {
    const char *space = memchr(text, ' ', length);
    if (!space) return false;
    const size_t name_bytes = length - (size_t)(space + 1 - text);
    if (name_bytes == 0 || name_bytes >= sizeof argument->name) return false;
    memcpy(argument->name, space + 1, name_bytes);
    return read_type(text, (size_t)(space - text), argument);
}

static bool read_schema(const char *text, struct zpp_schema *schema) {
    const char *end = strstr(text, ") ->");
    if (!end) return false;
    for (const char *at = text + 1; at < end;) {
        const char *comma = strchr(at, ',');
        const char *stop = comma && comma < end ? comma : end;
        if (schema->count == ZPP_SCHEMA_ARGUMENTS) return false;
        if (!read_argument(at, (size_t)(stop - at), &schema->arguments[schema->count++])) return false;
        at = stop == end ? end : stop + strlen(", ");
    }
    return true;
}

/* thing_step_low_ has one Python function with thing_step_, and both report errors under the latter's name. */
static void set_name(const char *name, struct zpp_schema *schema) {
    const size_t length = strlen(name), low = strlen("low_");
    const bool is_low = length > low && strcmp(name + length - low, "low_") == 0;
    snprintf(schema->op, sizeof schema->op, "zeropp::%.*s", (int)(is_low ? length - low : length), name);
}

const char *zpp_schema_read_all(void) {
    memset(schemas, 0, sizeof schemas);
    for (size_t op = 0; op < ZPP_OPS; ++op) {
        set_name(texts[op].name, &schemas[op]);
        if (!read_schema(texts[op].schema, &schemas[op])) return texts[op].name;
    }
    return NULL;
}

const struct zpp_schema *zpp_schema_of(enum zpp_op op) { return &schemas[op]; }
