/* SPDX-License-Identifier: Apache-2.0
 *
 * torch.ops.zeropp.quantise_, dequantise_, quant_sum_ and quant_reduce_: read and check tensors, then csrc/ops/quant.
 * Codes are int8 tensors for 8 bits, uint8 for 4; mids without elements mean symmetric.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "../ops/quant/quant.h"
#include "op_checks.h"
#include "op_entries.h"

enum { OF_BYTES = 96 };

/* A quantised array as it arrives. */
struct parts {
    const struct zpp_tensor *codes, *scales, *mids;
};

static bool check_spec(struct zpp_boxed *args, int64_t bits, int64_t block_elems) {
    if (!zpp_boxed_ok(args)) return false;
    if (bits != 8 && bits != 4) return zpp_boxed_fail(args, "bits is %lld, wanted 8 or 4", (long long)bits);
    if (block_elems >= 16 && block_elems % 16 == 0) return true;
    return zpp_boxed_fail(args, "block_elems is %lld, wanted a multiple of 16, at least 16", (long long)block_elems);
}

static bool parts_are_fine(const struct zpp_boxed *args, const struct parts *p, const struct zpp_quant_spec *spec,
                           size_t elems) {
    const size_t blocks = zpp_quant_blocks(spec, elems);
    return zpp_op_is_fine(args, p->codes, spec->bits == 8 ? 1u << ZPP_I8 : 1u << ZPP_U8) &&
           zpp_op_is_fine(args, p->scales, 1u << ZPP_F32) && zpp_op_is_fine(args, p->mids, 1u << ZPP_F32) &&
           p->codes->elems == zpp_quant_code_bytes(spec, elems) && p->scales->elems == blocks &&
           p->mids->elems == (spec->asymmetric ? blocks : 0);
}

/* codes, scales and mids of an array of `elems` elements; `index` >= 0: of a list of arrays. */
static bool check_parts(struct zpp_boxed *args, const struct parts *p, const struct zpp_quant_spec *spec, size_t elems,
                        const char *prefix, long index) {
    if (!zpp_boxed_ok(args)) return false;
    if (parts_are_fine(args, p, spec, elems)) return true;
    char name[3][OF_BYTES], of[OF_BYTES];
    static const char *const fields[] = { "codes", "scales", "mids" };
    for (int k = 0; k < 3; ++k) {
        if (index < 0) snprintf(name[k], sizeof name[k], "%s%s", prefix, fields[k]);
        else snprintf(name[k], sizeof name[k], "%s%s[%ld]", prefix, fields[k], index);
    }
    const unsigned code_dtype = spec->bits == 8 ? 1u << ZPP_I8 : 1u << ZPP_U8;
    snprintf(of, sizeof of, "%zu elements of %d bits", elems, spec->bits);
    const size_t code_bytes = zpp_quant_code_bytes(spec, elems);
    if (!zpp_op_check_elems(args, name[0], p->codes, code_dtype, code_bytes, of)) return false;
    snprintf(of, sizeof of, "%zu elements in blocks of %zu", elems, spec->block_elems);
    const size_t blocks = zpp_quant_blocks(spec, elems);
    return zpp_op_check_elems(args, name[1], p->scales, 1u << ZPP_F32, blocks, of) &&
           zpp_op_check_elems(args, name[2], p->mids, 1u << ZPP_F32, spec->asymmetric ? blocks : 0, of);
}

static bool check_apart(struct zpp_boxed *args, const struct zpp_tensors *written, size_t written_count,
                        const struct zpp_tensors *read, size_t read_count) {
    const struct zpp_tensors *w[3], *r[3];
    for (size_t k = 0; k < written_count; ++k) w[k] = &written[k];
    for (size_t k = 0; k < read_count; ++k) r[k] = &read[k];
    return zpp_boxed_check_apart(args, w, written_count, r, read_count);
}

static void run_quantise(struct zpp_boxed *args, const struct zpp_quant_spec *spec, const struct zpp_tensor *src,
                         const struct zpp_quant_target *to) {
    struct zpp_op_stream on;
    struct zpp_err err = ZPP_ERR_INIT;
    if (!zpp_op_is_on_cuda(args)) {
        zpp_pool *pool = zpp_op_pool_take();
        zpp_quantise(spec, src->data, src->dtype, src->elems, to, pool);
        zpp_op_pool_give(pool);
    } else if (zpp_op_find_stream(args, &on)) {
        const zpp_status status =
            zpp_quantise_cuda(on.device, on.native, spec, src->data, src->dtype, src->elems, to, &err);
        zpp_op_launched(args, status, &err);
    }
}

static void quantise(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    struct parts to;
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_quantise, stack, inputs);
    const struct zpp_tensor *src = zpp_boxed_tensor(&args);
    to.codes = zpp_boxed_tensor(&args);
    to.scales = zpp_boxed_tensor(&args);
    to.mids = zpp_boxed_tensor(&args);
    const int64_t bits = zpp_boxed_int(&args), block_elems = zpp_boxed_int(&args);
    if (cuda) zpp_op_on_cuda(&args, src);
    const struct zpp_quant_spec spec = { (size_t)block_elems, (int)bits, to.mids->elems != 0 };
    const struct zpp_tensors written[] = { zpp_op_one("codes", to.codes), zpp_op_one("scales", to.scales),
                                           zpp_op_one("mids", to.mids) };
    const struct zpp_tensors read = zpp_op_one("src", src);
    if (check_spec(&args, bits, block_elems) && zpp_op_check_tensor(&args, "src", src, ZPP_OP_FLOATS) &&
        check_parts(&args, &to, &spec, src->elems, "", -1) && check_apart(&args, written, 3, &read, 1)) {
        const struct zpp_quant_target target = { to.codes->data, to.scales->data, to.mids->data };
        run_quantise(&args, &spec, src, &target);
    }
    zpp_boxed_end(&args);
}

ZPP_OP_BOTH(quantise, quantise)

static void run_dequantise(struct zpp_boxed *args, const struct zpp_quant_spec *spec,
                           const struct zpp_quant_source *from, const struct zpp_tensor *dst, bool accumulate) {
    struct zpp_op_stream on;
    struct zpp_err err = ZPP_ERR_INIT;
    if (!zpp_op_is_on_cuda(args)) {
        zpp_pool *pool = zpp_op_pool_take();
        zpp_dequantise(spec, from, dst->data, dst->dtype, dst->elems, accumulate, pool);
        zpp_op_pool_give(pool);
    } else if (zpp_op_find_stream(args, &on)) {
        const zpp_status status = zpp_dequantise_cuda(on.device, on.native, spec, from, dst->data, dst->dtype,
                                                      dst->elems, accumulate, &err);
        zpp_op_launched(args, status, &err);
    }
}

static void dequantise(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    struct parts from;
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_dequantise, stack, inputs);
    from.codes = zpp_boxed_tensor(&args);
    from.scales = zpp_boxed_tensor(&args);
    from.mids = zpp_boxed_tensor(&args);
    const struct zpp_tensor *dst = zpp_boxed_tensor(&args);
    const int64_t bits = zpp_boxed_int(&args), block_elems = zpp_boxed_int(&args);
    const bool accumulate = zpp_boxed_bool(&args);
    if (cuda) zpp_op_on_cuda(&args, dst);
    const struct zpp_quant_spec spec = { (size_t)block_elems, (int)bits, from.mids->elems != 0 };
    const struct zpp_tensors written = zpp_op_one("dst", dst);
    const struct zpp_tensors read[] = { zpp_op_one("codes", from.codes), zpp_op_one("scales", from.scales),
                                        zpp_op_one("mids", from.mids) };
    if (check_spec(&args, bits, block_elems) && zpp_op_check_tensor(&args, "dst", dst, ZPP_OP_FLOATS) &&
        check_parts(&args, &from, &spec, dst->elems, "", -1) && check_apart(&args, &written, 1, read, 3)) {
        const struct zpp_quant_source source = { from.codes->data, from.scales->data, from.mids->data };
        run_dequantise(&args, &spec, &source, dst, accumulate);
    }
    zpp_boxed_end(&args);
}

ZPP_OP_BOTH(dequantise, dequantise)

/* --- sums of several quantised arrays ----------------------------------------------------------------------------- */
struct part_lists {
    const struct zpp_tensors *codes, *scales, *mids;
};

static void read_part_lists(struct zpp_boxed *args, struct part_lists *l) {
    l->codes = zpp_boxed_tensors(args);
    l->scales = zpp_boxed_tensors(args);
    l->mids = zpp_boxed_tensors(args);
}

/* The sources as C takes them: new; free them. NULL, with a message noted, if anything is wrong. */
static struct zpp_quant_source *new_sources(struct zpp_boxed *args, const struct part_lists *l,
                                            const struct zpp_quant_spec *spec, size_t elems) {
    if (!zpp_boxed_ok(args)) return NULL;
    if (l->codes->count == 0) {
        zpp_boxed_fail(args, "codes has 0 tensors, wanted at least 1");
        return NULL;
    }
    if (l->scales->count != l->codes->count || (spec->asymmetric && l->mids->count != l->codes->count)) {
        zpp_boxed_fail(args, "codes, scales and mids have %zu, %zu and %zu tensors, wanted as many of each (or no "
                       "mids)", l->codes->count, l->scales->count, l->mids->count);
        return NULL;
    }
    static const struct zpp_tensor no_mids = { .dtype = ZPP_F32, .contiguous = true };
    struct zpp_quant_source *sources = malloc(l->codes->count * sizeof *sources);
    if (!sources) zpp_boxed_fail(args, "no memory for %zu sources", l->codes->count);
    for (size_t s = 0; sources && s < l->codes->count; ++s) {
        struct zpp_tensor none = no_mids;
        none.device_type = args->place.device_type;
        none.device_index = args->place.device_index;
        const struct parts p = { &l->codes->at[s], &l->scales->at[s], spec->asymmetric ? &l->mids->at[s] : &none };
        if (!check_parts(args, &p, spec, elems, "", (long)s)) break;
        sources[s] = (struct zpp_quant_source){ p.codes->data, p.scales->data, p.mids->data };
    }
    if (zpp_boxed_ok(args)) return sources;
    free(sources);
    return NULL;
}

static bool check_factor(struct zpp_boxed *args, double factor) {
    const struct zpp_op_rate rate = { "factor", factor, -INFINITY, INFINITY };
    return zpp_op_check_rates(args, &rate, 1);
}

/* The destination of a sum: floats, or codes. */
struct sum_target {
    const struct zpp_tensor *dst;
    const struct zpp_quant_spec *spec;
    struct zpp_quant_target quantised;
    size_t elems;
};

static void run_sum(struct zpp_boxed *args, const struct zpp_quant_spec *spec, const struct zpp_quant_source *sources,
                    size_t count, float factor, const struct sum_target *to) {
    struct zpp_op_stream on;
    struct zpp_err err = ZPP_ERR_INIT;
    const struct zpp_tensor *dst = to->dst;
    if (!zpp_op_is_on_cuda(args)) {
        zpp_pool *pool = zpp_op_pool_take();
        if (dst) zpp_quant_sum(spec, sources, count, factor, dst->data, dst->dtype, to->elems, pool);
        else zpp_quant_reduce(spec, sources, count, factor, to->elems, to->spec, &to->quantised, pool);
        zpp_op_pool_give(pool);
    } else if (zpp_op_find_stream(args, &on)) {
        const zpp_status status =
            dst ? zpp_quant_sum_cuda(on.device, on.native, spec, sources, count, factor, dst->data, dst->dtype,
                                     to->elems, &err)
                : zpp_quant_reduce_cuda(on.device, on.native, spec, sources, count, factor, to->elems, to->spec,
                                        &to->quantised, &err);
        zpp_op_launched(args, status, &err);
    }
}

static void quant_sum(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    struct part_lists from;
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_quant_sum, stack, inputs);
    read_part_lists(&args, &from);
    const struct zpp_tensor *dst = zpp_boxed_tensor(&args);
    const int64_t bits = zpp_boxed_int(&args), block_elems = zpp_boxed_int(&args);
    const double factor = zpp_boxed_float(&args);
    if (cuda) zpp_op_on_cuda(&args, dst);
    const struct zpp_quant_spec spec = { (size_t)block_elems, (int)bits, from.mids->count != 0 };
    const struct zpp_tensors one = zpp_op_one("dst", dst), *const written[] = { &one };
    const struct zpp_tensors *const read[] = { from.codes, from.scales, from.mids };
    struct zpp_quant_source *sources = NULL;
    if (check_spec(&args, bits, block_elems) && check_factor(&args, factor) &&
        zpp_op_check_tensor(&args, "dst", dst, ZPP_OP_FLOATS) &&
        (sources = new_sources(&args, &from, &spec, dst->elems)) != NULL &&
        zpp_boxed_check_apart(&args, written, 1, read, 3)) {
        const struct sum_target to = { .dst = dst, .elems = dst->elems };
        run_sum(&args, &spec, sources, from.codes->count, (float)factor, &to);
    }
    free(sources);
    zpp_boxed_end(&args);
}

ZPP_OP_BOTH(quant_sum, quant_sum)

static void quant_reduce(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    struct part_lists from;
    struct parts to;
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_quant_reduce, stack, inputs);
    read_part_lists(&args, &from);
    to.codes = zpp_boxed_tensor(&args);
    to.scales = zpp_boxed_tensor(&args);
    to.mids = zpp_boxed_tensor(&args);
    const int64_t elems = zpp_boxed_int(&args), bits = zpp_boxed_int(&args), block_elems = zpp_boxed_int(&args);
    const int64_t to_bits = zpp_boxed_int(&args), to_block_elems = zpp_boxed_int(&args);
    const double factor = zpp_boxed_float(&args);
    if (cuda) zpp_op_on_cuda(&args, to.codes);
    const struct zpp_quant_spec spec = { (size_t)block_elems, (int)bits, from.mids->count != 0 };
    const struct zpp_quant_spec to_spec = { (size_t)to_block_elems, (int)to_bits, to.mids->elems != 0 };
    const struct zpp_tensors ones[] = { zpp_op_one("to_codes", to.codes), zpp_op_one("to_scales", to.scales),
                                        zpp_op_one("to_mids", to.mids) };
    const struct zpp_tensors *const written[] = { &ones[0], &ones[1], &ones[2] };
    const struct zpp_tensors *const read[] = { from.codes, from.scales, from.mids };
    struct zpp_quant_source *sources = NULL;
    if (elems < 0) zpp_boxed_fail(&args, "elems is %lld, wanted elems >= 0", (long long)elems);
    if (check_spec(&args, bits, block_elems) && check_spec(&args, to_bits, to_block_elems) &&
        check_factor(&args, factor) && check_parts(&args, &to, &to_spec, (size_t)elems, "to_", -1) &&
        (sources = new_sources(&args, &from, &spec, (size_t)elems)) != NULL &&
        zpp_boxed_check_apart(&args, written, 3, read, 3)) {
        const struct sum_target target = { .spec = &to_spec, .elems = (size_t)elems,
                                           .quantised = { to.codes->data, to.scales->data, to.mids->data } };
        run_sum(&args, &spec, sources, from.codes->count, (float)factor, &target);
    }
    free(sources);
    zpp_boxed_end(&args);
}

ZPP_OP_BOTH(quant_reduce, quant_reduce)
