/* SPDX-License-Identifier: Apache-2.0
 *
 * torch.ops.zeropp.sparse_attention and its backward: read and check tensors, then csrc/ops/sparse_attention. The sizes
 * of (batch, heads, queries, dim) and (batch, kv_heads, seq, dim) but the first are arguments, since the ABI gives only
 * how many elements there are.
 */
#include <math.h>

#include "../ops/sparse_attention/sparse_attention.h"
#include "op_checks.h"
#include "op_entries.h"

enum { RESULTS = 3 };

/* Arguments after q, k and v. */
struct rest {
    const struct zpp_tensor *key_mask, *starts, *columns, *seed;
    int64_t heads, kv_heads, queries, first, seq, dim, block;
};

static void read_layout(struct zpp_boxed *args, struct rest *rest) {
    rest->key_mask = zpp_boxed_tensor(args);
    rest->starts = zpp_boxed_tensor(args);
    rest->columns = zpp_boxed_tensor(args);
    rest->seed = zpp_boxed_tensor(args);
}

static void read_numbers(struct zpp_boxed *args, struct rest *rest, struct zpp_sparse_attention *at) {
    rest->heads = zpp_boxed_int(args);
    rest->kv_heads = zpp_boxed_int(args);
    rest->queries = zpp_boxed_int(args);
    rest->first = zpp_boxed_int(args);
    rest->seq = zpp_boxed_int(args);
    rest->dim = zpp_boxed_int(args);
    rest->block = zpp_boxed_int(args);
    at->scale = (float)zpp_boxed_float(args);
    at->causal = zpp_boxed_bool(args);
    at->dropout = (float)zpp_boxed_float(args);
}

static bool check_count(struct zpp_boxed *args, const char *name, int64_t value, int64_t least, int64_t most) {
    if (!zpp_boxed_ok(args)) return false;
    if (value >= least && value <= most) return true;
    return zpp_boxed_fail(args, "%s is %lld, wanted %lld to %lld", name, (long long)value, (long long)least,
                          (long long)most);
}

static bool check_layout(struct zpp_boxed *args, const struct rest *rest, struct zpp_sparse_attention *at) {
    struct zpp_sparse_layout *layout = &at->layout;
    if (!zpp_op_check_tensor(args, "starts", rest->starts, 1u << ZPP_I32) ||
        !zpp_op_check_tensor(args, "columns", rest->columns, 1u << ZPP_I32)) return false;
    layout->block_elems = (size_t)rest->block;
    layout->blocks = (at->seq + layout->block_elems - 1) / layout->block_elems;
    layout->heads = rest->starts->elems / (layout->blocks + 1);
    if (layout->heads * (layout->blocks + 1) != rest->starts->elems || layout->heads == 0) {
        return zpp_boxed_fail(args, "starts has %zu numbers, wanted %zu for each head of the layout: a sequence of %zu "
                              "in blocks of %zu", rest->starts->elems, layout->blocks + 1, at->seq,
                              layout->block_elems);
    }
    layout->starts = rest->starts->data;
    layout->columns = rest->columns->data;
    layout->entries = rest->columns->elems;
    struct zpp_err err = ZPP_ERR_INIT;
    if (zpp_op_is_on_cuda(args)) return true; /* sparse_attention.h: looking at it would wait */
    if (zpp_sparse_layout_check(layout, at->heads, at->seq, &err)) return zpp_boxed_fail(args, "%s", err.text);
    return true;
}

/* The numbers, into `at`; batch follows from q. */
static bool check_sizes(struct zpp_boxed *args, const struct zpp_tensor *q, const struct rest *rest,
                        struct zpp_sparse_attention *at) {
    if (!check_count(args, "heads", rest->heads, 1, INT32_MAX) ||
        !check_count(args, "kv_heads", rest->kv_heads, 1, rest->heads) ||
        !check_count(args, "seq", rest->seq, 1, INT32_MAX) ||
        !check_count(args, "queries", rest->queries, 1, rest->seq) ||
        !check_count(args, "first", rest->first, 0, rest->seq - rest->queries) ||
        !check_count(args, "dim", rest->dim, 1, ZPP_SPARSE_ATTENTION_MOST_DIM) ||
        !check_count(args, "block", rest->block, ZPP_SPARSE_ATTENTION_LEAST_BLOCK, ZPP_SPARSE_ATTENTION_MOST_BLOCK)) {
        return false;
    }
    if (rest->heads % rest->kv_heads) {
        return zpp_boxed_fail(args, "heads is %lld, wanted a multiple of kv_heads, %lld", (long long)rest->heads,
                              (long long)rest->kv_heads);
    }
    at->heads = (size_t)rest->heads, at->kv_heads = (size_t)rest->kv_heads, at->dim = (size_t)rest->dim;
    at->queries = (size_t)rest->queries, at->first = (size_t)rest->first, at->seq = (size_t)rest->seq;
    const size_t sample = at->heads * at->queries * at->dim;
    at->batch = q->elems / sample;
    if (at->batch * sample == q->elems) return true;
    return zpp_boxed_fail(args, "q has %zu elements, wanted a multiple of %zu: heads, queries and dim", q->elems,
                          sample);
}

static bool check_dropout(struct zpp_boxed *args, const struct rest *rest, struct zpp_sparse_attention *at) {
    if (!zpp_op_check_tensor(args, "seed", rest->seed, 1u << ZPP_I64)) return false;
    at->seed = rest->seed->data;
    if (!(at->dropout >= 0.0f && at->dropout < 1.0f)) {
        return zpp_boxed_fail(args, "dropout is %g, wanted at least 0 and less than 1", (double)at->dropout);
    }
    if (at->dropout == 0.0f || rest->seed->elems == 1) return true;
    return zpp_boxed_fail(args, "seed has %zu numbers, wanted 1 for a dropout of %g", rest->seed->elems,
                          (double)at->dropout);
}

/* Checks and fills everything that `at` needs but q, k and v. */
static bool check_all(struct zpp_boxed *args, const struct zpp_tensor *q, const struct rest *rest,
                      struct zpp_sparse_attention *at) {
    if (!zpp_op_check_tensor(args, "q", q, ZPP_OP_FLOATS) || !check_sizes(args, q, rest, at)) return false;
    at->dtype = q->dtype;
    if (!isfinite(at->scale)) return zpp_boxed_fail(args, "scale is %g, wanted a finite number", (double)at->scale);
    if (rest->key_mask->elems &&
        !zpp_op_check_elems(args, "key_mask", rest->key_mask, 1u << ZPP_BOOL, at->batch * at->seq, "batch and seq")) {
        return false;
    }
    if (!zpp_op_check_tensor(args, "key_mask", rest->key_mask, 1u << ZPP_BOOL)) return false;
    at->key_mask = rest->key_mask->elems ? rest->key_mask->data : NULL;
    return check_dropout(args, rest, at) && check_layout(args, rest, at);
}

static bool check_keys(struct zpp_boxed *args, const char *name, const struct zpp_tensor *tensor,
                       const struct zpp_sparse_attention *at) {
    return zpp_op_check_elems(args, name, tensor, 1u << at->dtype, at->batch * at->kv_heads * at->seq * at->dim,
                              "batch, kv_heads, seq and dim");
}

static bool check_like_q(struct zpp_boxed *args, const char *name, const struct zpp_tensor *tensor,
                         const struct zpp_tensor *q) {
    return zpp_op_check_elems(args, name, tensor, 1u << q->dtype, q->elems, "as q");
}

/* Results shaped (heads of all batches, rows, dim), or (heads, rows) without dim. */
static void *new_result(struct zpp_boxed *args, zpp_dtype dtype, size_t heads, size_t rows, size_t dim,
                        AtenTensorHandle *made) {
    const int64_t sizes[] = {(int64_t)heads, (int64_t)rows, (int64_t)dim};
    void *data = NULL;
    zpp_boxed_new_sized(args, dtype, sizes, dim ? 3 : 2, made, &data);
    return data;
}

static void give_results(struct zpp_boxed *args, const AtenTensorHandle *made, int count) {
    for (int i = 0; i < count; ++i) {
        if (zpp_boxed_ok(args)) args->stack[i] = (StableIValue)(uintptr_t)made[i];
        else if (made[i]) zpp_torch.aoti_torch_delete_tensor_object(made[i]);
    }
}

static void run_forward(struct zpp_boxed *args, const struct zpp_sparse_attention *at, void *out, float *lse) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_op_stream on;
    if (!zpp_boxed_ok(args)) return;
    if (!zpp_op_is_on_cuda(args)) {
        zpp_pool *pool = zpp_op_pool_take();
        zpp_op_launched(args, zpp_sparse_attention_forward(at, out, lse, pool, &err), &err);
        zpp_op_pool_give(pool);
    } else if (zpp_op_find_stream(args, &on)) {
        zpp_op_launched(args, zpp_sparse_attention_cuda(on.device, on.native, at, out, lse, &err), &err);
    }
}

static void forward(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    struct rest rest;
    struct zpp_sparse_attention at = { .dtype = ZPP_F32 };
    AtenTensorHandle made[RESULTS] = { NULL };
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_sparse_attention, stack, inputs);
    const struct zpp_tensor *q = zpp_boxed_tensor(&args);
    const struct zpp_tensor *k = zpp_boxed_tensor(&args);
    const struct zpp_tensor *v = zpp_boxed_tensor(&args);
    read_layout(&args, &rest);
    read_numbers(&args, &rest, &at);
    if (cuda) zpp_op_on_cuda(&args, q);
    if (check_all(&args, q, &rest, &at) && check_keys(&args, "k", k, &at) && check_keys(&args, "v", v, &at)) {
        at.q = q->data, at.k = k->data, at.v = v->data;
        void *out = new_result(&args, at.dtype, at.batch * at.heads, at.queries, at.dim, &made[0]);
        float *lse = new_result(&args, ZPP_F32, at.batch * at.heads, at.queries, 0, &made[1]);
        run_forward(&args, &at, out, lse);
    }
    give_results(&args, made, 2);
    zpp_boxed_end(&args);
}

ZPP_OP_BOTH(sparse_attention, forward)

static void run_backward(struct zpp_boxed *args, const struct zpp_sparse_attention *at,
                         const struct zpp_sparse_attention_grads *grads) {
    struct zpp_err err = ZPP_ERR_INIT;
    struct zpp_op_stream on;
    AtenTensorHandle memory = NULL; /* torch's allocator follows the stream: it may be given back before the end */
    void *delta = NULL;
    if (!zpp_boxed_ok(args)) return;
    if (!zpp_op_is_on_cuda(args)) {
        zpp_pool *pool = zpp_op_pool_take();
        zpp_op_launched(args, zpp_sparse_attention_backward(at, grads, pool, &err), &err);
        zpp_op_pool_give(pool);
    } else if (zpp_op_find_stream(args, &on) &&
               zpp_boxed_new(args, ZPP_F32, at->batch * at->heads * at->queries + 1, &memory, &delta)) {
        zpp_op_launched(args, zpp_sparse_attention_backward_cuda(on.device, on.native, at, grads, delta, &err), &err);
        zpp_torch.aoti_torch_delete_tensor_object(memory);
    }
}

static void backward(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    struct rest rest;
    struct zpp_sparse_attention at = { .dtype = ZPP_F32 };
    AtenTensorHandle made[RESULTS] = { NULL };
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_sparse_attention_backward, stack, inputs);
    const struct zpp_tensor *grad_out = zpp_boxed_tensor(&args);
    const struct zpp_tensor *q = zpp_boxed_tensor(&args);
    const struct zpp_tensor *k = zpp_boxed_tensor(&args);
    const struct zpp_tensor *v = zpp_boxed_tensor(&args);
    const struct zpp_tensor *out = zpp_boxed_tensor(&args);
    const struct zpp_tensor *lse = zpp_boxed_tensor(&args);
    read_layout(&args, &rest);
    read_numbers(&args, &rest, &at);
    if (cuda) zpp_op_on_cuda(&args, q);
    if (check_all(&args, q, &rest, &at) && check_keys(&args, "k", k, &at) && check_keys(&args, "v", v, &at) &&
        check_like_q(&args, "grad_out", grad_out, q) && check_like_q(&args, "out", out, q) &&
        zpp_op_check_elems(&args, "lse", lse, 1u << ZPP_F32, at.batch * at.heads * at.queries,
                           "batch, heads and queries")) {
        at.q = q->data, at.k = k->data, at.v = v->data;
        struct zpp_sparse_attention_grads grads = { .out = out->data, .grad_out = grad_out->data, .lse = lse->data };
        grads.grad_q = new_result(&args, at.dtype, at.batch * at.heads, at.queries, at.dim, &made[0]);
        grads.grad_k = new_result(&args, at.dtype, at.batch * at.kv_heads, at.seq, at.dim, &made[1]);
        grads.grad_v = new_result(&args, at.dtype, at.batch * at.kv_heads, at.seq, at.dim, &made[2]);
        run_backward(&args, &at, &grads);
    }
    give_results(&args, made, RESULTS);
    zpp_boxed_end(&args);
}

ZPP_OP_BOTH(sparse_attention_backward, backward)
