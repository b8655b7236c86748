/* SPDX-License-Identifier: Apache-2.0
 *
 * 0/1 Adam's step: every CPU version against the scalar one, bit for bit, over kinds, what is kept, lengths,
 * alignments, cuts and threads; nothing beyond a segment's end is touched. (That the scalar version is that step is
 * shown in tests/ops/test_zero_one.py.)
 */
#include "floats.h"
#include "threads.h"

#include "../../csrc/ops/optim/optim.h"

enum { ROOM_ELEMS = 4096 + 64, GUARD = 0xa5, PIECES = 5, WRITTEN = 4 };

struct arrays {
    float written[WRITTEN][ROOM_ELEMS], exp_avg_sq[ROOM_ELEMS]; /* p, m, u and a */
    uint8_t grad[4 * ROOM_ELEMS], out[4 * ROOM_ELEMS];
};
static struct arrays start, want, got;

struct format {
    zpp_dtype grad, out; /* out ZPP_DTYPES: none */
    int flags;           /* 1: decays, 2: u is kept, 4: a is */
    size_t elems, offset;
};

static void *at(void *base, zpp_dtype dtype, size_t i) { return (char *)base + i * zpp_dtype_bytes(dtype); }

/* In `pieces` segments, one behind the other; the last has what is left. */
static bool step(const struct format *f, struct arrays *a, size_t pieces, int level, zpp_pool *pool) {
    struct zpp_optim_segment segments[PIECES];
    for (size_t k = 0; k < pieces; ++k) {
        const size_t first = f->offset + k * (f->elems / pieces);
        segments[k] = (struct zpp_optim_segment){
            .param = a->written[0] + first,
            .state = { a->written[1] + first, a->exp_avg_sq + first, f->flags & 2 ? a->written[2] + first : NULL,
                       f->flags & 4 ? a->written[3] + first : NULL },
            .grad = at(a->grad, f->grad, first), .grad_dtype = f->grad,
            .param_out = f->out == ZPP_DTYPES ? NULL : at(a->out, f->out, first), .out_dtype = f->out,
            .elems = k + 1 < pieces ? f->elems / pieces : f->elems - k * (f->elems / pieces), .variance_step = 3,
            .optimizer = ZPP_OPTIM_ZERO_ONE,
            .step_size = 0.01, .decay = f->flags & 1 ? 0.1 : 0.0, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8 };
    }
    return zpp_optim_step_at((enum zpp_cpu_level)level, segments, pieces, 0.5f, pool);
}

static void check_equal(const struct format *f) {
    const size_t bytes = f->out == ZPP_DTYPES ? 0 : zpp_dtype_bytes(f->out);
    for (int k = 0; k < WRITTEN; ++k) {
        CHECK(same(want.written[k] + f->offset, got.written[k] + f->offset, ZPP_F32, f->elems));
    }
    if (bytes) CHECK(same(at(want.out, f->out, f->offset), at(got.out, f->out, f->offset), f->out, f->elems));
    const bool kept[WRITTEN] = { true, true, f->flags & 2, (f->flags & 5) == 5 };
    for (int k = 0; k < WRITTEN; ++k) { /* all else is as it was */
        if (kept[k]) memcpy(got.written[k] + f->offset, start.written[k] + f->offset, f->elems * sizeof(float));
    }
    memcpy(got.out + f->offset * bytes, start.out + f->offset * bytes, f->elems * bytes);
    CHECK(memcmp(&got, &start, sizeof got) == 0);
}

static void check_format(const struct format *f, zpp_pool *pool) {
    memset(&start, GUARD, sizeof start);
    for (size_t i = f->offset; i < f->offset + f->elems; ++i) {
        for (int k = 0; k < WRITTEN; ++k) start.written[k][i] = random_float(true, 12, -8);
        start.exp_avg_sq[i] = i % 9 ? fabsf(random_float(true, 12, -8)) : 0.0f;
        zpp_element_store(start.grad, f->grad, i, random_float(true, 12, -8));
    }
    want = start;
    CHECK(step(f, &want, 1, ZPP_CPU_SCALAR, NULL));
    for (int level = ZPP_CPU_SCALAR; level <= (int)zpp_cpu_detected(); ++level) {
        got = start;
        CHECK(step(f, &got, 1, level, NULL));
        check_equal(f);
        got = start;
        CHECK(step(f, &got, PIECES, level, pool));
        check_equal(f);
    }
}

static void formats(void) {
    static const zpp_dtype grads[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
    static const zpp_dtype outs[] = { ZPP_DTYPES, ZPP_F32, ZPP_BF16, ZPP_F16 };
    static const size_t lengths[] = { 0, 1, 31, 32, 33, 64, 100, 4096 };
    static const size_t offsets[] = { 0, 1, 16, 21 };
    zpp_pool *pool = NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_pool_create(in_new_threads, 3, &pool, &err));
    for (int g = 0; g < 3; ++g) for (int out = 0; out < 4; ++out) for (int flags = 0; flags < 8; ++flags)
    for (size_t l = 0; l < 8; ++l) {
        const struct format f = { grads[g], outs[out], flags, lengths[l], offsets[(l + (size_t)flags) % 4] };
        check_format(&f, pool);
    }
    zpp_pool_destroy(pool);
}

/* Says which versions the other case covers. */
static void levels(void) {
    for (int level = 0; level < ZPP_CPU_LEVELS; ++level) {
        const bool here = level <= (int)zpp_cpu_detected();
        printf("%s %s, ", zpp_cpu_level_name((enum zpp_cpu_level)level), here ? "here" : "not on this machine");
        CHECK(zpp_optim_step_at((enum zpp_cpu_level)level, NULL, 0, 1.0f, NULL) == here);
    }
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(levels), TEST(formats), {0} };
    return test_main(argc, argv, cases);
}
