/* SPDX-License-Identifier: Apache-2.0
 *
 * torch.ops.zeropp.onebit_compress_, onebit_decode_ and onebit_reduce_: read and check tensors, then csrc/ops/onebit.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "../ops/onebit/onebit.h"
#include "op_checks.h"
#include "op_entries.h"

enum { TEXT_BYTES = 96 };

static bool check_chunk(struct zpp_boxed *args, int64_t chunk_elems) {
    if (!zpp_boxed_ok(args)) return false;
    if (chunk_elems >= 16 && chunk_elems % 16 == 0) return true;
    return zpp_boxed_fail(args, "chunk_elems is %lld, wanted a multiple of 16, at least 16", (long long)chunk_elems);
}

/* bits and scales of an array of `elems` elements. */
static bool check_pair(struct zpp_boxed *args, const struct zpp_tensor *bits, const char *bits_name,
                       const struct zpp_tensor *scales, const char *scales_name, size_t chunk_elems, size_t elems) {
    char of[TEXT_BYTES];
    snprintf(of, sizeof of, "%zu elements, 8 a byte", elems);
    if (!zpp_op_check_elems(args, bits_name, bits, 1u << ZPP_U8, zpp_onebit_bytes(elems), of)) return false;
    snprintf(of, sizeof of, "%zu elements in chunks of %zu", elems, chunk_elems);
    return zpp_op_check_elems(args, scales_name, scales, 1u << ZPP_F32, zpp_onebit_chunks(chunk_elems, elems), of);
}

static bool check_error(struct zpp_boxed *args, const struct zpp_tensor *error, size_t elems) {
    return zpp_op_check_elems(args, "error", error, 1u << ZPP_F32, elems, "as many as src has");
}

/* Memory for the sums of lanes: torch's allocator follows the stream, so it may be given back before they are read. */
static float *new_work(struct zpp_boxed *args, size_t chunk_elems, size_t elems, AtenTensorHandle *memory) {
    void *work = NULL;
    const size_t elems_needed = zpp_onebit_cuda_work_elems(chunk_elems, elems);
    return zpp_boxed_new(args, ZPP_F32, elems_needed + 1, memory, &work) ? work : NULL;
}

static void compress_on_cuda(struct zpp_boxed *args, size_t chunk, const struct zpp_tensor *src, float *error,
                             uint8_t *bits, float *scales) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_op_stream on;
    AtenTensorHandle memory = NULL;
    float *work = zpp_op_find_stream(args, &on) ? new_work(args, chunk, src->elems, &memory) : NULL;
    if (!work) return;
    zpp_op_launched(args, zpp_onebit_compress_cuda(on.device, on.native, chunk, src->data, src->dtype, error,
                                                   src->elems, bits, scales, work, &err), &err);
    zpp_torch.aoti_torch_delete_tensor_object(memory);
}

static void compress(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_onebit_compress, stack, inputs);
    const struct zpp_tensor *src = zpp_boxed_tensor(&args);
    const struct zpp_tensor *error = zpp_boxed_tensor(&args);
    const struct zpp_tensor *bits = zpp_boxed_tensor(&args);
    const struct zpp_tensor *scales = zpp_boxed_tensor(&args);
    const int64_t chunk = zpp_boxed_int(&args);
    if (cuda) zpp_op_on_cuda(&args, src);
    const struct zpp_tensors ones[] = { zpp_op_one("error", error), zpp_op_one("bits", bits),
                                        zpp_op_one("scales", scales), zpp_op_one("src", src) };
    const struct zpp_tensors *const written[] = { &ones[0], &ones[1], &ones[2] }, *const read[] = { &ones[3] };
    if (check_chunk(&args, chunk) && zpp_op_check_tensor(&args, "src", src, ZPP_OP_FLOATS) &&
        check_error(&args, error, src->elems) &&
        check_pair(&args, bits, "bits", scales, "scales", (size_t)chunk, src->elems) &&
        zpp_boxed_check_apart(&args, written, 3, read, 1)) {
        if (cuda) {
            compress_on_cuda(&args, (size_t)chunk, src, error->data, bits->data, scales->data);
        } else {
            zpp_pool *pool = zpp_op_pool_take();
            zpp_onebit_compress((size_t)chunk, src->data, src->dtype, error->data, src->elems, bits->data,
                                scales->data, pool);
            zpp_op_pool_give(pool);
        }
    }
    zpp_boxed_end(&args);
}

ZPP_OP_BOTH(onebit_compress, compress)

static void run_decode(struct zpp_boxed *args, size_t chunk, const struct zpp_onebit_source *from,
                       const struct zpp_tensor *dst, bool accumulate) {
    struct zpp_op_stream on;
    if (!zpp_op_is_on_cuda(args)) {
        zpp_pool *pool = zpp_op_pool_take();
        zpp_onebit_decode(chunk, from, dst->data, dst->dtype, dst->elems, accumulate, pool);
        zpp_op_pool_give(pool);
    } else if (zpp_op_find_stream(args, &on)) {
        struct zpp_err err = ZPP_ERR_INIT;
        zpp_op_launched(args, zpp_onebit_decode_cuda(on.device, on.native, chunk, from, dst->data, dst->dtype,
                                                     dst->elems, accumulate, &err), &err);
    }
}

static void decode(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_onebit_decode, stack, inputs);
    const struct zpp_tensor *bits = zpp_boxed_tensor(&args);
    const struct zpp_tensor *scales = zpp_boxed_tensor(&args);
    const struct zpp_tensor *dst = zpp_boxed_tensor(&args);
    const int64_t chunk = zpp_boxed_int(&args);
    const bool accumulate = zpp_boxed_bool(&args);
    if (cuda) zpp_op_on_cuda(&args, dst);
    const struct zpp_tensors ones[] = { zpp_op_one("dst", dst), zpp_op_one("bits", bits),
                                        zpp_op_one("scales", scales) };
    const struct zpp_tensors *const written[] = { &ones[0] }, *const read[] = { &ones[1], &ones[2] };
    if (check_chunk(&args, chunk) && zpp_op_check_tensor(&args, "dst", dst, ZPP_OP_FLOATS) &&
        check_pair(&args, bits, "bits", scales, "scales", (size_t)chunk, dst->elems) &&
        zpp_boxed_check_apart(&args, written, 1, read, 2)) {
        const struct zpp_onebit_source from = { bits->data, scales->data };
        run_decode(&args, (size_t)chunk, &from, dst, accumulate);
    }
    zpp_boxed_end(&args);
}

ZPP_OP_BOTH(onebit_decode, decode)

/* The sources as C takes them: new; free them. NULL, with a message noted, if anything is wrong. */
static struct zpp_onebit_source *new_sources(struct zpp_boxed *args, const struct zpp_tensors *bits,
                                             const struct zpp_tensors *scales, size_t chunk_elems, size_t elems) {
    if (!zpp_boxed_ok(args)) return NULL;
    if (bits->count == 0 || bits->count != scales->count) {
        zpp_boxed_fail(args, "bits and scales have %zu and %zu tensors, wanted as many of each, at least 1",
                       bits->count, scales->count);
        return NULL;
    }
    struct zpp_onebit_source *sources = malloc(bits->count * sizeof *sources);
    if (!sources) zpp_boxed_fail(args, "no memory for %zu sources", bits->count);
    for (size_t s = 0; sources && s < bits->count; ++s) {
        char names[2][TEXT_BYTES];
        snprintf(names[0], sizeof names[0], "bits[%zu]", s);
        snprintf(names[1], sizeof names[1], "scales[%zu]", s);
        if (!check_pair(args, &bits->at[s], names[0], &scales->at[s], names[1], chunk_elems, elems)) break;
        sources[s] = (struct zpp_onebit_source){ bits->at[s].data, scales->at[s].data };
    }
    if (zpp_boxed_ok(args)) return sources;
    free(sources);
    return NULL;
}

struct target {
    float *error;
    uint8_t *bits;
    float *scales;
};

static void run_reduce(struct zpp_boxed *args, size_t chunk, const struct zpp_onebit_source *sources, size_t count,
                       float factor, size_t elems, const struct target *to) {
    struct zpp_op_stream on;
    AtenTensorHandle memory = NULL;
    float *work;
    if (!zpp_op_is_on_cuda(args)) {
        zpp_pool *pool = zpp_op_pool_take();
        zpp_onebit_reduce(chunk, sources, count, factor, to->error, elems, to->bits, to->scales, pool);
        zpp_op_pool_give(pool);
    } else if (zpp_op_find_stream(args, &on) && (work = new_work(args, chunk, elems, &memory)) != NULL) {
        struct zpp_err err = ZPP_ERR_INIT;
        zpp_op_launched(args, zpp_onebit_reduce_cuda(on.device, on.native, chunk, sources, count, factor, to->error,
                                                     elems, to->bits, to->scales, work, &err), &err);
        zpp_torch.aoti_torch_delete_tensor_object(memory);
    }
}

static void reduce(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_onebit_reduce, stack, inputs);
    const struct zpp_tensors *bits = zpp_boxed_tensors(&args);
    const struct zpp_tensors *scales = zpp_boxed_tensors(&args);
    const struct zpp_tensor *error = zpp_boxed_tensor(&args);
    const struct zpp_tensor *to_bits = zpp_boxed_tensor(&args);
    const struct zpp_tensor *to_scales = zpp_boxed_tensor(&args);
    const int64_t chunk = zpp_boxed_int(&args);
    const double factor = zpp_boxed_float(&args);
    if (cuda) zpp_op_on_cuda(&args, error);
    const struct zpp_op_rate rate = { "factor", factor, -INFINITY, INFINITY };
    const struct zpp_tensors ones[] = { zpp_op_one("error", error), zpp_op_one("to_bits", to_bits),
                                        zpp_op_one("to_scales", to_scales) };
    const struct zpp_tensors *const written[] = { &ones[0], &ones[1], &ones[2] }, *const read[] = { bits, scales };
    struct zpp_onebit_source *sources = NULL;
    if (check_chunk(&args, chunk) && zpp_op_check_rates(&args, &rate, 1) &&
        zpp_op_check_tensor(&args, "error", error, 1u << ZPP_F32) &&
        check_pair(&args, to_bits, "to_bits", to_scales, "to_scales", (size_t)chunk, error->elems) &&
        (sources = new_sources(&args, bits, scales, (size_t)chunk, error->elems)) != NULL &&
        zpp_boxed_check_apart(&args, written, 3, read, 2)) {
        const struct target to = { error->data, to_bits->data, to_scales->data };
        run_reduce(&args, (size_t)chunk, sources, bits->count, (float)factor, error->elems, &to);
    }
    free(sources);
    zpp_boxed_end(&args);
}

ZPP_OP_BOTH(onebit_reduce, reduce)
