/* SPDX-License-Identifier: Apache-2.0
 *
 * torch.ops.zeropp.moments_encode_ and moments_decode_: an optimizer's moment between fp32 and bf16 or 8 bits
 * (csrc/ops/moments), outside of a step: for checkpoints, and to look at. Codes are bfloat16 or uint8 tensors.
 */
#include <stdio.h>

#include "../ops/moments/moments.h"
#include "op_checks.h"
#include "op_entries.h"

enum { OF_BYTES = 96 };

/* The arguments that both have. */
struct moment {
    const struct zpp_tensor *codes, *scales, *values;
    int64_t which, first;
};

static bool check(struct zpp_boxed *args, const struct moment *m, const char *values_name) {
    if (!zpp_op_check_tensor(args, "codes", m->codes, 1u << ZPP_BF16 | 1u << ZPP_U8)) return false;
    if (m->which < ZPP_MOMENT_FIRST || m->which > ZPP_MOMENT_MAX) {
        return zpp_boxed_fail(args, "moment is %lld, wanted 0 (first), 1 (second) or 2 (its maximum)",
                              (long long)m->which);
    }
    if (m->first < 0) return zpp_boxed_fail(args, "first is %lld, wanted first >= 0", (long long)m->first);
    char of[OF_BYTES];
    const size_t elems = m->codes->elems;
    const size_t scales = m->codes->dtype == ZPP_U8 ? zpp_moments_scales((size_t)m->first, elems) : 0;
    snprintf(of, sizeof of, "elements %lld to %lld in blocks of %d", (long long)m->first,
             (long long)m->first + (long long)elems, (int)ZPP_MOMENTS_BLOCK_ELEMS);
    return zpp_op_check_elems(args, values_name, m->values, 1u << ZPP_F32, elems, "as codes has") &&
           zpp_op_check_elems(args, "scales", m->scales, 1u << ZPP_F32, scales,
                              m->codes->dtype == ZPP_U8 ? of : "bf16 has none");
}

static struct zpp_moments how_of(const struct moment *m) {
    return (struct zpp_moments){ .kind = m->codes->dtype == ZPP_U8 ? ZPP_MOMENTS_INT8 : ZPP_MOMENTS_BF16,
                                 .first_elems = (size_t)m->first };
}

void zpp_op_moments_encode(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
    (void)outputs;
    struct zpp_boxed args;
    struct moment m;
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_moments_encode, stack, inputs);
    m.values = zpp_boxed_tensor(&args);
    m.codes = zpp_boxed_tensor(&args);
    m.scales = zpp_boxed_tensor(&args);
    m.which = zpp_boxed_int(&args);
    m.first = zpp_boxed_int(&args);
    const int64_t seed = zpp_boxed_int(&args), stream = zpp_boxed_int(&args), step = zpp_boxed_int(&args);
    const struct zpp_tensors w[] = { zpp_op_one("codes", m.codes), zpp_op_one("scales", m.scales) };
    const struct zpp_tensors r = zpp_op_one("src", m.values), *written[] = { &w[0], &w[1] }, *read = &r;
    if (check(&args, &m, "src") && zpp_boxed_check_apart(&args, written, 2, &read, 1)) {
        const struct zpp_moment to = { m.codes->data, m.scales->data };
        struct zpp_moments how = how_of(&m);
        how.key = zpp_moments_key((uint64_t)seed, (uint64_t)stream, (uint64_t)step);
        zpp_moments_store(zpp_moments_kernels_of(zpp_cpu_level()), &how, (enum zpp_moments_which)m.which, &to, 0,
                          m.codes->elems, m.values->data, step == 0);
    }
    zpp_boxed_end(&args);
}

void zpp_op_moments_decode(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
    (void)outputs;
    struct zpp_boxed args;
    struct moment m;
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_moments_decode, stack, inputs);
    m.codes = zpp_boxed_tensor(&args);
    m.scales = zpp_boxed_tensor(&args);
    m.values = zpp_boxed_tensor(&args);
    m.which = zpp_boxed_int(&args);
    m.first = zpp_boxed_int(&args);
    const struct zpp_tensors r[] = { zpp_op_one("codes", m.codes), zpp_op_one("scales", m.scales) };
    const struct zpp_tensors w = zpp_op_one("dst", m.values), *written = &w, *read[] = { &r[0], &r[1] };
    if (check(&args, &m, "dst") && zpp_boxed_check_apart(&args, &written, 1, read, 2)) {
        const struct zpp_moment from = { m.codes->data, m.scales->data };
        const struct zpp_moments how = how_of(&m);
        zpp_moments_load(zpp_moments_kernels_of(zpp_cpu_level()), &how, (enum zpp_moments_which)m.which, &from, 0,
                         m.codes->elems, m.values->data);
    }
    zpp_boxed_end(&args);
}
