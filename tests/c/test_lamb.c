/* SPDX-License-Identifier: Apache-2.0
 *
 * LAMB: every CPU version against the scalar one, bit for bit, over kinds, options, lengths, alignments and threads;
 * nothing beyond a tensor's end is touched. (That the scalar version is LAMB is shown in tests/ops/test_lamb.py.)
 */
#include "floats.h"
#include "threads.h"

#include <math.h>

#include "../../csrc/ops/element.h"
#include "../../csrc/ops/lamb/lamb.h"

enum { ROOM_ELEMS = 9100, GUARD = 0xa5 };

static uint64_t random_state = 1;
static float random_value(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    const uint32_t bits = (uint32_t)(random_state >> 32);
    if (bits % 997 == 0) return bits & 1024 ? INFINITY : NAN;
    return ldexpf((float)bits / 4294967296.0f - 0.5f, (int)(bits % 12) - 8);
}

struct arrays {
    float param[ROOM_ELEMS], exp_avg[ROOM_ELEMS], exp_avg_sq[ROOM_ELEMS];
    uint8_t grad[4 * ROOM_ELEMS], out[4 * ROOM_ELEMS];
};
static struct arrays start, want, got;

struct format {
    zpp_dtype grad, out; /* out ZPP_DTYPES: none */
    int flags;
    size_t elems, offset;
};

static void *at(void *base, zpp_dtype dtype, size_t i) { return (char *)base + i * zpp_dtype_bytes(dtype); }

/* Two tensors, one behind the other. */
static void describe(const struct format *f, struct arrays *a, struct zpp_lamb_segment segments[2]) {
    for (size_t k = 0; k < 2; ++k) {
        const size_t first = f->offset + (k ? f->elems / 3 : 0);
        segments[k] = (struct zpp_lamb_segment){
            .param = a->param + first, .exp_avg = a->exp_avg + first, .exp_avg_sq = a->exp_avg_sq + first,
            .grad = at(a->grad, f->grad, first), .grad_dtype = f->grad, .out_dtype = f->out,
            .param_out = f->out == ZPP_DTYPES ? NULL : at(a->out, f->out, first),
            .elems = k ? f->elems - f->elems / 3 : f->elems / 3, .step = 3, .lr = 0.01, .beta1 = 0.9, .beta2 = 0.99,
            .eps = 1e-6, .weight_decay = f->flags & 1 ? 0.1 : 0.0, .trust_most = 10.0, .maximize = f->flags & 2 };
    }
}

static zpp_status step(const struct format *f, struct arrays *a, int level, zpp_pool *pool, float trust[2]) {
    struct zpp_lamb_segment segments[2];
    struct zpp_err err = ZPP_ERR_INIT;
    describe(f, a, segments);
    return zpp_lamb_step_at((enum zpp_cpu_level)level, segments, 2, 0.5f, trust, pool, &err);
}

static bool guarded(const void *array, size_t bytes, size_t begin, size_t end) {
    const uint8_t *from = array;
    for (size_t i = 0; i < bytes; ++i) {
        if ((i < begin || i >= end) && from[i] != GUARD) return false;
    }
    return true;
}

static void check_format(const struct format *f, zpp_pool *pool) {
    const zpp_dtype out = f->out == ZPP_DTYPES ? ZPP_F32 : f->out;
    const size_t begin = f->offset * sizeof(float), end = begin + f->elems * sizeof(float);
    float trust[2], again[2];
    memset(&start, GUARD, sizeof start);
    for (size_t i = f->offset; i < f->offset + f->elems; ++i) {
        start.param[i] = random_value();
        start.exp_avg[i] = random_value();
        start.exp_avg_sq[i] = fabsf(random_value());
        zpp_element_store(start.grad, f->grad, i, random_value());
    }
    want = start;
    CHECK(step(f, &want, ZPP_CPU_SCALAR, NULL, trust) == ZPP_OK);
    for (int level = ZPP_CPU_SCALAR; level <= (int)zpp_cpu_detected(); ++level) {
        got = start;
        CHECK(step(f, &got, level, pool, again) == ZPP_OK);
        CHECK(memcmp(trust, again, sizeof trust) == 0);
        CHECK(same(want.param + f->offset, got.param + f->offset, ZPP_F32, f->elems));
        CHECK(same(want.exp_avg + f->offset, got.exp_avg + f->offset, ZPP_F32, f->elems));
        CHECK(same(want.exp_avg_sq + f->offset, got.exp_avg_sq + f->offset, ZPP_F32, f->elems));
        CHECK(guarded(got.param, sizeof got.param, begin, end) && guarded(got.exp_avg, sizeof got.exp_avg, begin, end));
        CHECK(guarded(got.exp_avg_sq, sizeof got.exp_avg_sq, begin, end));
        CHECK(memcmp(got.grad, start.grad, sizeof got.grad) == 0);
        const size_t bytes = f->out == ZPP_DTYPES ? 0 : zpp_dtype_bytes(out);
        CHECK(guarded(got.out, sizeof got.out, f->offset * bytes, (f->offset + f->elems) * bytes));
        if (bytes) CHECK(same(at(want.out, out, f->offset), at(got.out, out, f->offset), out, f->elems));
    }
}

/* The first pass alone: the moments of a step, one sum for all levels, and parameters as they were. `want` has had the
 * step. */
static void check_moments(const struct format *f, zpp_pool *pool) {
    struct zpp_lamb_segment segments[2];
    struct zpp_err err = ZPP_ERR_INIT;
    double sums[2][4];
    for (int level = ZPP_CPU_SCALAR; level <= (int)zpp_cpu_detected(); ++level) {
        double *to = sums[level != ZPP_CPU_SCALAR];
        got = start;
        describe(f, &got, segments);
        CHECK_OK(zpp_lamb_norms_at((enum zpp_cpu_level)level, segments, 2, 0.5f, to, pool, &err));
        for (int k = 0; k < 4; ++k) CHECK((isnan(sums[0][k]) && isnan(to[k])) || sums[0][k] == to[k]);
        CHECK(same(want.exp_avg + f->offset, got.exp_avg + f->offset, ZPP_F32, f->elems));
        CHECK(same(want.exp_avg_sq + f->offset, got.exp_avg_sq + f->offset, ZPP_F32, f->elems));
        CHECK(memcmp(got.param, start.param, sizeof got.param) == 0 && memcmp(got.out, start.out, sizeof got.out) == 0);
    }
}

static void formats(void) {
    static const zpp_dtype grads[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
    static const zpp_dtype outs[] = { ZPP_DTYPES, ZPP_F32, ZPP_BF16, ZPP_F16 };
    static const size_t lengths[] = { 0, 1, 31, 32, 33, 100, 4096, 9001 };
    static const size_t offsets[] = { 0, 1, 16, 21 };
    zpp_pool *pool = NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_pool_create(in_new_threads, 3, &pool, &err));
    for (int g = 0; g < 3; ++g) for (int out = 0; out < 4; ++out) for (int flags = 0; flags < 4; ++flags)
    for (size_t l = 0; l < 8; ++l) {
        const struct format f = { grads[g], outs[out], flags, lengths[l], offsets[(l + (size_t)flags) % 4] };
        check_format(&f, pool);
        check_moments(&f, pool);
    }
    zpp_pool_destroy(pool);
}

/* Says which versions the other case covers. */
static void levels(void) {
    for (int level = 0; level < ZPP_CPU_LEVELS; ++level) {
        const bool here = level <= (int)zpp_cpu_detected();
        struct zpp_err err = ZPP_ERR_INIT;
        printf("%s %s, ", zpp_cpu_level_name((enum zpp_cpu_level)level), here ? "here" : "not on this machine");
        CHECK((zpp_lamb_step_at((enum zpp_cpu_level)level, NULL, 0, 1.0f, NULL, NULL, &err) == ZPP_OK) == here);
    }
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(levels), TEST(formats), {0} };
    return test_main(argc, argv, cases);
}
