/* SPDX-License-Identifier: Apache-2.0
 *
 * Lion, Adagrad and SGD: every CPU version against the scalar one, bit for bit, over kinds, options, lengths,
 * alignments, cuts and threads; nothing beyond a segment's end is touched; lists longer than the stack's table. (That
 * the scalar versions are those optimizers is shown in tests/ops/.)
 */
#include "floats.h"
#include "threads.h"

#include <math.h>

#include "../../csrc/ops/optim/optim.h"
#include "../../csrc/ops/element.h"

enum { ROOM_ELEMS = 4096 + 64, GUARD = 0xa5, FLAGS = 8 };

static uint64_t random_state = 1;
static uint32_t random_bits(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

static float random_value(void) {
    static const float special[] = { 0.0f, -0.0f, 1e-40f, -1e-45f, 3e38f, INFINITY, -INFINITY, NAN, 65504.0f, 1e-20f };
    const uint32_t kind = random_bits() % 64;
    if (kind < sizeof special / sizeof special[0]) return special[kind];
    return ldexpf((float)random_bits() / 4294967296.0f - 0.5f, (int)(random_bits() % 12) - 8);
}

/* Parameters, one state, gradient, copy-out; the last two may be 16-bit. */
struct arrays {
    float param[ROOM_ELEMS], state[ROOM_ELEMS];
    uint8_t grad[4 * ROOM_ELEMS], out[4 * ROOM_ELEMS];
};

struct format {
    zpp_dtype grad, out; /* out ZPP_DTYPES: none */
    int flags;           /* what they mean is each optimizer's */
    size_t elems, offset;
};

/* A step of pieces_count pieces of the arrays from `begin` on, at a level; false where the machine lacks it. */
struct piece {
    size_t begin, elems;
};
typedef bool (*step_fn)(const struct format *, struct arrays *, const struct piece *, size_t, int level, zpp_pool *);

static void *at(void *base, zpp_dtype dtype, size_t i) { return (char *)base + i * zpp_dtype_bytes(dtype); }

#define SEGMENT(f, a, piece)                                                                                     \
    .param = (a)->param + (f)->offset + (piece)->begin, .elems = (piece)->elems,                                 \
    .grad = at((a)->grad, (f)->grad, (f)->offset + (piece)->begin), .grad_dtype = (f)->grad,                     \
    .param_out = (f)->out == ZPP_DTYPES ? NULL : at((a)->out, (f)->out, (f)->offset + (piece)->begin),           \
    .out_dtype = (f)->out

static bool lion(const struct format *f, struct arrays *a, const struct piece *pieces, size_t count, int level,
                 zpp_pool *pool) {
    struct zpp_optim_segment segments[8];
    for (size_t k = 0; k < count; ++k) {
        segments[k] = (struct zpp_optim_segment) { SEGMENT(f, a, &pieces[k]),
                                                  .optimizer = ZPP_OPTIM_LION,
                                                  .exp_avg = a->state + f->offset + pieces[k].begin,
                                                  .lr = f->flags & 4 ? 0.0 : 0.01,
                                                  .beta1 = 0.9,
                                                  .beta2 = 0.99,
                                                  .weight_decay = f->flags & 1 ? 0.1 : 0.0,
                                                  .maximize = f->flags & 2 };
    }
    return zpp_optim_step_at((enum zpp_cpu_level)level, segments, count, 0.5f, pool);
}

static bool adagrad(const struct format *f, struct arrays *a, const struct piece *pieces, size_t count, int level,
                    zpp_pool *pool) {
    struct zpp_optim_segment segments[8];
    for (size_t k = 0; k < count; ++k) {
        segments[k] = (struct zpp_optim_segment){
            SEGMENT(f, a, &pieces[k]), .optimizer = ZPP_OPTIM_ADAGRAD,
            .sum = a->state + f->offset + pieces[k].begin, .step = 3, .lr = 0.01,
            .lr_decay = f->flags & 4 ? 0.01 : 0.0, .eps = 1e-10, .weight_decay = f->flags & 1 ? 0.1 : 0.0,
            .maximize = f->flags & 2 };
    }
    return zpp_optim_step_at((enum zpp_cpu_level)level, segments, count, 0.5f, pool);
}

static bool sgd_with(const struct format *f, struct arrays *a, const struct piece *pieces, size_t count, int level,
                     zpp_pool *pool, bool momentum, bool first) {
    struct zpp_optim_segment segments[8];
    for (size_t k = 0; k < count; ++k) {
        segments[k] =
            (struct zpp_optim_segment) { SEGMENT(f, a, &pieces[k]),
                                       .optimizer = ZPP_OPTIM_SGD,
                                       .momentum_buffer = momentum ? a->state + f->offset + pieces[k].begin : NULL,
                                       .lr = 0.01,
                                       .momentum = 0.9,
                                       .dampening = f->flags & 1 ? 0.25 : 0.0,
                                       .weight_decay = f->flags & 1 ? 0.1 : 0.0,
                                       .maximize = f->flags & 2,
                                       .nesterov = f->flags & 4,
                                       .step = first ? 1 : 2 };
    }
    return zpp_optim_step_at((enum zpp_cpu_level)level, segments, count, 0.5f, pool);
}

static bool sgd(const struct format *f, struct arrays *a, const struct piece *pieces, size_t count, int level,
                zpp_pool *pool) {
    return sgd_with(f, a, pieces, count, level, pool, true, false);
}
static bool sgd_first(const struct format *f, struct arrays *a, const struct piece *pieces, size_t count, int level,
                      zpp_pool *pool) {
    return sgd_with(f, a, pieces, count, level, pool, true, true);
}
static bool sgd_plain(const struct format *f, struct arrays *a, const struct piece *pieces, size_t count, int level,
                      zpp_pool *pool) {
    return sgd_with(f, a, pieces, count, level, pool, false, false);
}

/* Equal elements, and bytes around them as they were. */
static bool equal(const struct format *f, struct arrays *want, struct arrays *got) {
    const zpp_dtype out = f->out == ZPP_DTYPES ? ZPP_F32 : f->out;
    struct arrays *const both[] = { want, got };
    bool ok = same(want->param + f->offset, got->param + f->offset, ZPP_F32, f->elems) &&
              same(want->state + f->offset, got->state + f->offset, ZPP_F32, f->elems) &&
              (f->out == ZPP_DTYPES ||
               same(at(want->out, out, f->offset), at(got->out, out, f->offset), out, f->elems));
    for (int k = 0; k < 2; ++k) { /* what was compared as numbers is made equal, the rest is compared as bytes */
        memset(both[k]->param + f->offset, 0, f->elems * sizeof(float));
        memset(both[k]->state + f->offset, 0, f->elems * sizeof(float));
        if (f->out != ZPP_DTYPES) memset(at(both[k]->out, out, f->offset), 0, f->elems * zpp_dtype_bytes(out));
    }
    return ok && memcmp(want, got, sizeof *want) == 0;
}

static int failures;
static void expect(bool ok, const char *what, const char *name, const struct format *f, int level) {
    if (ok) return;
    failures++;
    fprintf(stderr, "%s %s: %s: grad %s, out %s, flags %d, %zu elements at %zu\n", name,
            zpp_cpu_level_name((enum zpp_cpu_level)level), what, zpp_dtype_name(f->grad),
            f->out == ZPP_DTYPES ? "none" : zpp_dtype_name(f->out), f->flags, f->elems, f->offset);
}

static size_t cut(size_t elems, struct piece pieces[8]) {
    size_t count = 0;
    for (size_t begin = 0; begin < elems;) {
        const size_t length = count == 7 ? elems - begin : random_bits() % (elems - begin) + 1;
        pieces[count++] = (struct piece){ begin, length };
        begin += length;
    }
    return count;
}

static void check_format(const char *name, step_fn step, const struct format *f, zpp_pool *pool) {
    static struct arrays start, want, got, kept;
    memset(&start, GUARD, sizeof start);
    for (size_t i = 0; i < ROOM_ELEMS; ++i) {
        start.param[i] = random_value();
        start.state[i] = step == adagrad ? fabsf(random_value()) : random_value();
        if (i < f->elems) zpp_element_store(at(start.grad, f->grad, f->offset), f->grad, i, random_value());
    }
    const struct piece whole = { 0, f->elems };
    kept = start;
    CHECK(step(f, &kept, &whole, 1, ZPP_CPU_SCALAR, NULL));
    for (int level = ZPP_CPU_SCALAR; level < ZPP_CPU_LEVELS; ++level) {
        want = kept, got = start;
        if (!step(f, &got, &whole, 1, level, NULL)) continue;
        expect(equal(f, &want, &got), "differs from scalar", name, f, level);
        struct piece pieces[8];
        const size_t count = cut(f->elems, pieces);
        want = kept, got = start;
        step(f, &got, pieces, count, level, pool);
        expect(equal(f, &want, &got), "cut in pieces differs", name, f, level);
    }
}

static zpp_pool *threads(void) {
    zpp_pool *pool = NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_pool_create(in_new_threads, 3, &pool, &err));
    return pool;
}

static void formats(void) {
    static const struct { const char *name; step_fn step; } steps[] = {
        { "lion", lion }, { "adagrad", adagrad }, { "sgd", sgd }, { "sgd first", sgd_first },
        { "sgd plain", sgd_plain } };
    static const zpp_dtype grads[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
    static const zpp_dtype outs[] = { ZPP_DTYPES, ZPP_F32, ZPP_BF16, ZPP_F16 };
    static const size_t lengths[] = { 0, 1, 31, 32, 33, 64, 100, 4096 };
    static const size_t offsets[] = { 0, 1, 16, 21 };
    zpp_pool *pool = threads();
    for (int s = 0; s < 5; ++s) for (int g = 0; g < 3; ++g) for (int out = 0; out < 4; ++out)
    for (int flags = 0; flags < FLAGS; ++flags) for (size_t l = 0; l < 8; ++l) {
        const struct format f = { grads[g], outs[out], flags, lengths[l], offsets[(l + (size_t)flags) % 4] };
        check_format(steps[s].name, steps[s].step, &f, pool);
    }
    zpp_pool_destroy(pool);
    CHECK_EQUAL(failures, 0);
}

/* More segments than fit the stack table, each with its own constants: the same as one call a segment. */
static void many_segments(void) {
    enum { SEGMENTS = 700, LENGTH = 37 };
    static float want[3][SEGMENTS * LENGTH], got[3][SEGMENTS * LENGTH];
    static struct zpp_optim_segment segments[SEGMENTS];
    zpp_pool *pool = threads();
    for (int k = 0; k < 3; ++k) for (size_t i = 0; i < SEGMENTS * LENGTH; ++i) want[k][i] = (float)(i % 13) - 6.0f;
    memcpy(got, want, sizeof got);
    for (size_t s = 0; s < SEGMENTS; ++s) {
        segments[s] = (struct zpp_optim_segment){
            .param = want[0] + s * LENGTH, .grad = want[1] + s * LENGTH, .exp_avg = want[2] + s * LENGTH,
            .elems = s % 5 ? LENGTH : 0, .optimizer = ZPP_OPTIM_LION,
            .lr = 1e-3 * (double)(s % 4), .beta1 = 0.9, .beta2 = 0.99,
            .weight_decay = 0.1 };
        zpp_optim_step(&segments[s], 1, 1.0f, NULL);
        segments[s].param = got[0] + s * LENGTH, segments[s].grad = got[1] + s * LENGTH;
        segments[s].exp_avg = got[2] + s * LENGTH;
    }
    zpp_optim_step(segments, SEGMENTS, 1.0f, pool);
    CHECK(memcmp(want, got, sizeof got) == 0);
    zpp_optim_step(NULL, 0, 1.0f, pool);
    zpp_pool_destroy(pool);
}

/* Says which versions the other cases cover. */
static void levels(void) {
    for (int level = 0; level < ZPP_CPU_LEVELS; ++level) {
        const bool here = level <= (int)zpp_cpu_detected();
        printf("%s %s, ", zpp_cpu_level_name((enum zpp_cpu_level)level), here ? "here" : "not on this machine");
        CHECK(zpp_optim_step_at((enum zpp_cpu_level)level, NULL, 0, 1.0f, NULL) == here);
    }
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(levels), TEST(formats), TEST(many_segments), {0} };
    return test_main(argc, argv, cases);
}
