/* SPDX-License-Identifier: Apache-2.0
 *
 * torch.ops.zeropp.token_*: read and check tensors, then csrc/ops/tokens. Rows are bytes, so any dtype will do.
 */
#include "../ops/tokens/tokens.h"
#include "op_checks.h"
#include "op_entries.h"

enum { ANY_DTYPE = (1u << ZPP_DTYPES) - 1 };

static bool check_count(struct zpp_boxed *args, const char *name, int64_t value, int64_t least) {
    if (!zpp_boxed_ok(args)) return false;
    if (value >= least && value <= INT32_MAX) return true;
    return zpp_boxed_fail(args, "%s is %lld, wanted %lld to %d", name, (long long)value, (long long)least, INT32_MAX);
}

/* kept and the sizes of what is moved. */
static bool check_tokens(struct zpp_boxed *args, const struct zpp_tensor *kept, int64_t seq, int64_t keep,
                         int64_t width, struct zpp_tokens *tokens) {
    if (!zpp_op_check_tensor(args, "kept", kept, 1u << ZPP_I32) || !check_count(args, "seq", seq, 1) ||
        !check_count(args, "keep", keep, 1) || !check_count(args, "width", width, 1)) return false;
    if (kept->elems % (size_t)keep) {
        return zpp_boxed_fail(args, "kept has %zu numbers, wanted rows of %lld", kept->elems, (long long)keep);
    }
    *tokens = (struct zpp_tokens){ kept->data, kept->elems / (size_t)keep, (size_t)seq, (size_t)keep, 0 };
    struct zpp_err err = ZPP_ERR_INIT;
    if (!zpp_op_is_on_cuda(args) && zpp_tokens_check(tokens, &err)) return zpp_boxed_fail(args, "%s", err.text);
    return true;
}

static bool check_moved(struct zpp_boxed *args, const char *name, const struct zpp_tensor *tensor, size_t batch,
                        size_t rows, size_t width) {
    return zpp_op_check_elems(args, name, tensor, ANY_DTYPE, batch * rows * width, "a row of width for each token");
}

static void *new_rows(struct zpp_boxed *args, zpp_dtype dtype, size_t batch, size_t rows, size_t width,
                      AtenTensorHandle *made) {
    const int64_t sizes[] = { (int64_t)batch, (int64_t)rows, (int64_t)width };
    void *data = NULL;
    zpp_boxed_new_sized(args, dtype, sizes, 3, made, &data);
    return data;
}

static void give(struct zpp_boxed *args, AtenTensorHandle made) {
    if (zpp_boxed_ok(args)) args->stack[0] = (StableIValue)(uintptr_t)made;
    else if (made) zpp_torch.aoti_torch_delete_tensor_object(made);
    zpp_boxed_end(args);
}

static void sample(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_token_sample, stack, inputs);
    const struct zpp_tensor *kept = zpp_boxed_tensor(&args);
    const int64_t seq = zpp_boxed_int(&args), keep = zpp_boxed_int(&args);
    const int64_t seed = zpp_boxed_int(&args), layer = zpp_boxed_int(&args), first = zpp_boxed_int(&args);
    const struct zpp_tokens_key key = { (uint64_t)seed, (uint64_t)layer, (uint64_t)first };
    if (cuda) zpp_op_on_cuda(&args, kept);
    if (zpp_op_check_tensor(&args, "kept", kept, 1u << ZPP_I32) && check_count(&args, "seq", seq, 1) &&
        check_count(&args, "keep", keep, 1)) {
        if (keep > seq) {
            zpp_boxed_fail(&args, "keep is %lld, wanted at most seq, %lld", (long long)keep, (long long)seq);
        } else if (kept->elems % (size_t)keep) {
            zpp_boxed_fail(&args, "kept has %zu numbers, wanted rows of %lld", kept->elems, (long long)keep);
        }
    }
    struct zpp_op_stream on;
    const size_t batch = zpp_boxed_ok(&args) ? kept->elems / (size_t)keep : 0;
    if (zpp_boxed_ok(&args) && !cuda) {
        zpp_pool *pool = zpp_op_pool_take();
        zpp_tokens_sample(kept->data, batch, (size_t)seq, (size_t)keep, key, pool);
        zpp_op_pool_give(pool);
    } else if (zpp_boxed_ok(&args) && zpp_op_find_stream(&args, &on)) {
        struct zpp_err err = ZPP_ERR_INIT;
        zpp_op_launched(&args, zpp_tokens_sample_cuda(on.device, on.native, kept->data, batch, (size_t)seq,
                                                      (size_t)keep, key, &err), &err);
    }
    zpp_boxed_end(&args);
}

ZPP_OP_BOTH(token_sample, sample)

/* gather: full to out; else full and part to out. */
static void run_move(struct zpp_boxed *args, const struct zpp_tokens *tokens, const void *full, const void *part,
                     void *out, bool gather) {
    struct zpp_op_stream on;
    if (!zpp_op_is_on_cuda(args)) {
        zpp_pool *pool = zpp_op_pool_take();
        if (gather) zpp_tokens_gather(tokens, full, out, pool);
        else zpp_tokens_scatter(tokens, full, part, out, pool);
        zpp_op_pool_give(pool);
    } else if (zpp_op_find_stream(args, &on)) {
        struct zpp_err err = ZPP_ERR_INIT;
        zpp_op_launched(args, gather ? zpp_tokens_gather_cuda(on.device, on.native, tokens, full, out, &err)
                                     : zpp_tokens_scatter_cuda(on.device, on.native, tokens, full, part, out, &err),
                        &err);
    }
}

static void gather(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    struct zpp_tokens tokens = { .kept = NULL };
    AtenTensorHandle made = NULL;
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_token_gather, stack, inputs);
    const struct zpp_tensor *full = zpp_boxed_tensor(&args);
    const struct zpp_tensor *kept = zpp_boxed_tensor(&args);
    const int64_t seq = zpp_boxed_int(&args), keep = zpp_boxed_int(&args), width = zpp_boxed_int(&args);
    if (cuda) zpp_op_on_cuda(&args, full);
    if (check_tokens(&args, kept, seq, keep, width, &tokens) &&
        check_moved(&args, "full", full, tokens.batch, tokens.seq, (size_t)width)) {
        tokens.row_bytes = (size_t)width * zpp_dtype_bytes(full->dtype);
        void *part = new_rows(&args, full->dtype, tokens.batch, tokens.keep, (size_t)width, &made);
        if (zpp_boxed_ok(&args)) run_move(&args, &tokens, full->data, NULL, part, true);
    }
    give(&args, made);
}

ZPP_OP_BOTH(token_gather, gather)

/* An empty full or part stands for zeros; not both are. */
static void scatter(StableIValue *stack, uint64_t inputs, bool cuda) {
    struct zpp_boxed args;
    struct zpp_tokens tokens = { .kept = NULL };
    AtenTensorHandle made = NULL;
    zpp_boxed_begin(&args, ZPP_SCHEMA_zpp_op_token_scatter, stack, inputs);
    const struct zpp_tensor *full = zpp_boxed_tensor(&args);
    const struct zpp_tensor *part = zpp_boxed_tensor(&args);
    const struct zpp_tensor *kept = zpp_boxed_tensor(&args);
    const int64_t seq = zpp_boxed_int(&args), keep = zpp_boxed_int(&args), width = zpp_boxed_int(&args);
    if (cuda) zpp_op_on_cuda(&args, full);
    if (check_tokens(&args, kept, seq, keep, width, &tokens) && zpp_op_check_tensor(&args, "full", full, ANY_DTYPE) &&
        zpp_op_check_tensor(&args, "part", part, 1u << full->dtype) &&
        (!full->elems || check_moved(&args, "full", full, tokens.batch, tokens.seq, (size_t)width)) &&
        (!part->elems || check_moved(&args, "part", part, tokens.batch, tokens.keep, (size_t)width))) {
        tokens.row_bytes = (size_t)width * zpp_dtype_bytes(full->dtype);
        void *out = new_rows(&args, full->dtype, tokens.batch, tokens.seq, (size_t)width, &made);
        if (zpp_boxed_ok(&args)) {
            run_move(&args, &tokens, full->elems ? full->data : NULL, part->elems ? part->data : NULL, out, false);
        }
    }
    give(&args, made);
}

ZPP_OP_BOTH(token_scatter, scatter)
