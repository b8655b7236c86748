/* SPDX-License-Identifier: Apache-2.0
 *
 * Adam: every CPU version against the scalar one, bit for bit, over kinds, options, lengths, alignments, cuts and
 * threads; nothing beyond a segment's end is touched. (That the scalar version is Adam is shown in tests/ops/.)
 */
#include "harness.h"
#include "threads.h"

#include <math.h>

#include "../../csrc/ops/optim/optim.h"

enum { ROOM_ELEMS = 4096 + 128, ARRAYS = 6 };

/* p, m, v, top, gradient, copy-out; the last two may be 16-bit and use less of their room. */
struct arrays { float at[ARRAYS][ROOM_ELEMS]; };

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

static void fill(struct arrays *a, zpp_dtype grad_dtype) {
    for (int k = 0; k < ARRAYS; ++k) {
        for (size_t i = 0; i < ROOM_ELEMS; ++i) a->at[k][i] = k == 2 || k == 3 ? fabsf(random_value()) : random_value();
    }
    if (grad_dtype == ZPP_F32) return;
    for (size_t i = 0; i < ROOM_ELEMS; ++i) {
        const float value = random_value();
        const uint16_t bits = grad_dtype == ZPP_BF16 ? zpp_bf16_from_f32(value) : zpp_f16_from_f32(value);
        memcpy((char *)a->at[4] + 2 * i, &bits, sizeof bits);
    }
}

struct options {
    zpp_dtype grad, out; /* out ZPP_DTYPES: none */
    bool amsgrad, decoupled, maximize;
    double beta1, weight_decay;
};

static struct zpp_optim_segment segment_over(struct arrays *a, const struct options *o, size_t offset, size_t elems) {
    return (struct zpp_optim_segment){
        .param = a->at[0] + offset, .exp_avg = a->at[1] + offset, .exp_avg_sq = a->at[2] + offset,
        .max_exp_avg_sq = o->amsgrad ? a->at[3] + offset : NULL,
        .grad = (char *)a->at[4] + offset * zpp_dtype_bytes(o->grad), .grad_dtype = o->grad,
        .param_out = o->out == ZPP_DTYPES ? NULL : (char *)a->at[5] + offset * zpp_dtype_bytes(o->out),
        .out_dtype = o->out, .elems = elems, .step = 3, .lr = 1e-2, .beta1 = o->beta1, .beta2 = 0.99, .eps = 1e-8,
        .weight_decay = o->weight_decay, .decoupled_decay = o->decoupled, .maximize = o->maximize,
    };
}

/* Equal bits; a NaN equals a NaN. The copy-out is compared as bits, its NaNs being made from p's by one rule. */
static bool equal(const struct arrays *a, const struct arrays *b, zpp_dtype out) {
    for (int k = 0; k < ARRAYS; ++k) {
        for (size_t i = 0; i < ROOM_ELEMS; ++i) {
            const bool floats = k < 4 || (k == 5 && out == ZPP_F32);
            if (floats && isnan(a->at[k][i]) && isnan(b->at[k][i])) continue;
            if (k == 5 && !floats) {
                uint16_t x[2], y[2];
                memcpy(x, &a->at[k][i], 4), memcpy(y, &b->at[k][i], 4);
                const uint16_t infinite = out == ZPP_F16 ? 0x7c00 : 0x7f80;
                for (int h = 0; h < 2; ++h) {
                    const bool both_nan = (x[h] & 0x7fff) > infinite && (y[h] & 0x7fff) > infinite;
                    if (x[h] != y[h] && !both_nan) return false;
                }
                continue;
            }
            if (memcmp(&a->at[k][i], &b->at[k][i], sizeof(float)) != 0) return false;
        }
    }
    return true;
}

static zpp_pool *threads(void) {
    zpp_pool *pool = NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_pool_create(in_new_threads, 3, &pool, &err));
    return pool;
}

static int failures;
static void expect(bool ok, const char *what, const struct options *o, size_t offset, size_t elems, int level) {
    if (ok) return;
    failures++;
    fprintf(stderr, "adam %s: %s: grad %s, out %s, amsgrad %d, decoupled %d, maximize %d, beta1 %g, decay %g, "
                    "offset %zu, %zu elements\n", zpp_cpu_level_name((enum zpp_cpu_level)level), what,
            zpp_dtype_name(o->grad), o->out == ZPP_DTYPES ? "none" : zpp_dtype_name(o->out), o->amsgrad, o->decoupled,
            o->maximize, o->beta1, o->weight_decay, offset, elems);
}

/* One segment in one go, with the scalar version, against: one go, and cut in pieces over threads. */
static void check_case(const struct options *o, size_t offset, size_t elems, zpp_pool *pool) {
    static struct arrays start, want, got;
    fill(&start, o->grad);
    want = start;
    struct zpp_optim_segment whole = segment_over(&want, o, offset, elems);
    zpp_optim_step_at(ZPP_CPU_SCALAR, &whole, 1, 0.5f, NULL);
    for (int level = ZPP_CPU_SCALAR; level < ZPP_CPU_LEVELS; ++level) {
        got = start;
        whole = segment_over(&got, o, offset, elems);
        if (!zpp_optim_step_at((enum zpp_cpu_level)level, &whole, 1, 0.5f, NULL)) continue;
        expect(equal(&want, &got, o->out), "differs from scalar", o, offset, elems, level);
        got = start;
        struct zpp_optim_segment pieces[8];
        size_t count = 0;
        for (size_t at = 0; at < elems;) {
            size_t length = count == 7 ? elems - at : random_bits() % (elems - at) + 1;
            pieces[count++] = segment_over(&got, o, offset + at, length);
            at += length;
        }
        zpp_optim_step_at((enum zpp_cpu_level)level, pieces, count, 0.5f, pool);
        expect(equal(&want, &got, o->out), "cut in pieces differs", o, offset, elems, level);
    }
}

static void kinds(void) {
    zpp_pool *pool = threads();
    static const zpp_dtype grads[] = { ZPP_F32, ZPP_BF16, ZPP_F16 };
    static const zpp_dtype outs[] = { ZPP_DTYPES, ZPP_F32, ZPP_BF16, ZPP_F16 };
    static const size_t lengths[] = { 0, 1, 31, 32, 33, 64, 100, 4096 };
    static const size_t offsets[] = { 0, 1, 16, 21 };
    for (int g = 0; g < 3; ++g) for (int out = 0; out < 4; ++out) for (int flags = 0; flags < 16; ++flags) {
        const struct options o = { grads[g], outs[out], flags & 1, flags & 2, flags & 4, flags & 8 ? 0.3 : 0.9,
                                   flags & 2 ? 0.01 : 0.1 * (flags & 1) };
        for (int l = 0; l < 8; ++l) check_case(&o, offsets[(l + flags) % 4], lengths[l], pool);
    }
    zpp_pool_destroy(pool);
    CHECK_EQUAL(failures, 0);
}

/* More segments than fit the stack table, each with its own constants: the same as one call a segment. */
static void many_segments(void) {
    zpp_pool *pool = threads();
    enum { SEGMENTS = 700, LENGTH = 37 };
    static float want[4][SEGMENTS * LENGTH], got[4][SEGMENTS * LENGTH];
    struct zpp_optim_segment *segments = calloc(SEGMENTS, sizeof *segments);
    for (int k = 0; k < 4; ++k) for (size_t i = 0; i < SEGMENTS * LENGTH; ++i) want[k][i] = 0.25f + (float)(i % 13);
    memcpy(got, want, sizeof got);
    for (size_t s = 0; s < SEGMENTS; ++s) {
        segments[s] = (struct zpp_optim_segment){
            .param = want[0] + s * LENGTH, .grad = want[1] + s * LENGTH, .exp_avg = want[2] + s * LENGTH,
            .exp_avg_sq = want[3] + s * LENGTH, .elems = s % 5 ? LENGTH : 0, .step = 1 + s % 3,
            .lr = 1e-3 * (double)(s % 4), .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1,
            .decoupled_decay = s % 2 };
        zpp_optim_step(&segments[s], 1, 1.0f, NULL);
        segments[s].param = got[0] + s * LENGTH, segments[s].grad = got[1] + s * LENGTH;
        segments[s].exp_avg = got[2] + s * LENGTH, segments[s].exp_avg_sq = got[3] + s * LENGTH;
    }
    zpp_optim_step(segments, SEGMENTS, 1.0f, pool);
    CHECK(memcmp(want, got, sizeof got) == 0);
    zpp_optim_step(NULL, 0, 1.0f, pool);
    free(segments);
    zpp_pool_destroy(pool);
}

/* float64: one call over two segments, in threads, has the bits of a call for every few elements; and it is Adam, to
 * within what fp32 keeps of it. */
static void doubles(void) {
    zpp_pool *pool = threads();
    enum { ELEMS = 3 * 4096 + 5, PART = 37 };
    static double want[5][ELEMS], got[5][ELEMS];
    static float narrow[5][ELEMS];
    for (int k = 0; k < 5; ++k) {
        for (size_t i = 0; i < ELEMS; ++i) want[k][i] = (0.25 + (double)((i + (size_t)k) % 13)) / 16.0;
    }
    for (int flags = 0; flags < 8; ++flags) {
        const struct options o = { ZPP_F32, ZPP_DTYPES, flags & 1, flags & 2, flags & 4, flags & 1 ? 0.3 : 0.9, 0.1 };
        memcpy(got, want, sizeof got);
        for (int k = 0; k < 5; ++k) for (size_t i = 0; i < ELEMS; ++i) narrow[k][i] = (float)want[k][i];
        struct zpp_optim_segment rates = segment_over(&(struct arrays){ 0 }, &o, 0, PART);
        struct zpp_adam_f64_segment halves[2];
        for (size_t s = 0; s < 2; ++s) {
            const size_t from = s ? ELEMS / 2 : 0;
            halves[s] = (struct zpp_adam_f64_segment){ rates,         got[0] + from, got[4] + from,
                                                       got[1] + from, got[2] + from, o.amsgrad ? got[3] + from : NULL };
            halves[s].rates.elems = s ? ELEMS - ELEMS / 2 : ELEMS / 2;
        }
        zpp_adam_step_f64(halves, 2, 0.7, pool);
        for (size_t from = 0; from < ELEMS; from += PART) {
            struct zpp_adam_f64_segment few = { rates, want[0] + from, want[4] + from, want[1] + from, want[2] + from,
                                                o.amsgrad ? want[3] + from : NULL };
            few.rates.elems = ELEMS - from < PART ? ELEMS - from : PART;
            zpp_adam_step_f64(&few, 1, 0.7, NULL);
        }
        CHECK(memcmp(want, got, sizeof got) == 0);
        rates.param = narrow[0], rates.grad = narrow[4], rates.exp_avg = narrow[1], rates.exp_avg_sq = narrow[2];
        rates.max_exp_avg_sq = o.amsgrad ? narrow[3] : NULL;
        rates.elems = ELEMS;
        zpp_optim_step(&rates, 1, 0.7f, pool);
        for (int k = 0; k < 4; ++k) {
            for (size_t i = 0; i < ELEMS; ++i) CHECK(fabs(got[k][i] - (double)narrow[k][i]) < 1e-5);
        }
    }
    zpp_pool_destroy(pool);
}

/* Says which versions the other cases cover. */
static void levels(void) {
    for (int level = 0; level < ZPP_CPU_LEVELS; ++level) {
        const bool ran = zpp_optim_step_at((enum zpp_cpu_level)level, NULL, 0, 1.0f, NULL);
        printf("%s %s, ", zpp_cpu_level_name((enum zpp_cpu_level)level), ran ? "here" : "not on this machine");
        CHECK(ran == (level <= (int)zpp_cpu_detected()));
    }
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(levels), TEST(kinds), TEST(many_segments), TEST(doubles),
                                              {0} };
    return test_main(argc, argv, cases);
}
