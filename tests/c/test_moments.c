/* SPDX-License-Identifier: Apache-2.0
 *
 * Moments in fewer bits: every CPU version against the scalar one, bit for bit, over kinds, lengths, places and what
 * is not finite; encoding what was decoded gives the same codes; and Adam over such moments is the fp32 step between
 * decoding and encoding, whatever the cuts and the threads. (What codes mean is shown in tests/ops/test_moments.py.)
 */
#include "harness.h"
#include "threads.h"

#include <math.h>

#include "../../csrc/ops/optim/optim.h"
#include "../../csrc/ops/moments/kernels.h"

enum { ROOM_ELEMS = 6000, GUARD_ELEMS = 64, ROOM_SCALES = ROOM_ELEMS / ZPP_MOMENTS_BLOCK_ELEMS + 2 };

static uint64_t random_state = 1;
static uint32_t random_bits(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

static float random_value(bool wild) {
    static const float special[] = { 0.0f, -0.0f, 1e-40f, -1e-45f, 3e38f, INFINITY, -INFINITY, NAN, 1e38f, 1e-20f };
    const uint32_t kind = random_bits() % 512;
    if (wild && kind < sizeof special / sizeof special[0]) return special[kind];
    return ldexpf((float)random_bits() / 4294967296.0f - 0.4f, -(int)(random_bits() % 30));
}

struct coded {
    uint16_t codes[ROOM_ELEMS + GUARD_ELEMS]; /* of 8 bits: the first half */
    float scales[ROOM_SCALES];
};

static bool same_scales(const struct coded *a, const struct coded *b) {
    for (size_t i = 0; i < ROOM_SCALES; ++i) {
        if (isnan(a->scales[i]) && isnan(b->scales[i])) continue;
        if (memcmp(&a->scales[i], &b->scales[i], sizeof(float)) != 0) return false;
    }
    return true;
}

static void check_codec(const struct zpp_moments *how, enum zpp_moments_which which, size_t elems, bool nearest,
                        bool wild) {
    static float values[ROOM_ELEMS], decoded[ROOM_ELEMS], other[ROOM_ELEMS];
    static struct coded want, got, again;
    const struct zpp_moments_kernels *scalar = zpp_moments_kernels_of(ZPP_CPU_SCALAR);
    for (size_t i = 0; i < elems; ++i) {
        values[i] = which == ZPP_MOMENT_FIRST ? random_value(wild) : fabsf(random_value(wild));
    }
    memset(&want, 0xa5, sizeof want);
    const struct zpp_moment to = { want.codes, want.scales };
    zpp_moments_store(scalar, how, which, &to, 0, elems, values, nearest);
    zpp_moments_load(scalar, how, which, &to, 0, elems, decoded);
    for (int level = 0; level < ZPP_CPU_LEVELS; ++level) {
        const struct zpp_moments_kernels *kernels = zpp_moments_kernels_of((enum zpp_cpu_level)level);
        if (!kernels || level > (int)zpp_cpu_detected()) continue;
        memset(&got, 0xa5, sizeof got);
        const struct zpp_moment mine = { got.codes, got.scales };
        zpp_moments_store(kernels, how, which, &mine, 0, elems, values, nearest);
        CHECK(memcmp(want.codes, got.codes, sizeof got.codes) == 0); /* what lies behind them, too */
        CHECK(same_scales(&want, &got));
        zpp_moments_load(kernels, how, which, &mine, 0, elems, other);
        for (size_t i = 0; i < elems; ++i) {
            CHECK((isnan(decoded[i]) && isnan(other[i])) || memcmp(&decoded[i], &other[i], sizeof(float)) == 0);
        }
        again = got;
        const struct zpp_moment back = { again.codes, again.scales };
        zpp_moments_store(kernels, how, which, &back, 0, elems, other, true);
        CHECK(memcmp(again.codes, got.codes, sizeof got.codes) == 0 && same_scales(&again, &got));
    }
}

static void codecs(void) {
    static const size_t lengths[] = { 0, 1, 15, 16, 17, 31, 100, 255, 256, 257, 600, 5000 };
    static const size_t places[] = { 0, 1, 255, 256, 300, 70001 };
    for (int kind = ZPP_MOMENTS_BF16; kind <= ZPP_MOMENTS_INT8; ++kind)
    for (int which = 0; which < 3; ++which) for (int l = 0; l < 12; ++l) for (int p = 0; p < 6; ++p)
    for (int flags = 0; flags < 4; ++flags) {
        const struct zpp_moments how = { (enum zpp_moments_kind)kind, places[p], zpp_moments_key(7, which, 3) };
        check_codec(&how, (enum zpp_moments_which)which, lengths[l], flags & 1, flags & 2);
    }
}

/* A cut is at the start or at a border, and never above what was asked for. */
static void cuts(void) {
    for (size_t first = 0; first < 600; first += 37) for (size_t at = 0; at < 3000; at += 13) {
        const struct zpp_moments how = { ZPP_MOMENTS_INT8, first, 0 };
        const size_t cut = zpp_moments_cut(&how, at);
        CHECK(cut <= at && (cut == 0 || (first + cut) % ZPP_MOMENTS_BLOCK_ELEMS == 0));
        CHECK(at - cut < ZPP_MOMENTS_BLOCK_ELEMS);
        CHECK(zpp_moments_tile_end(&how, cut, 5000) > cut);
        CHECK(zpp_moments_tile_end(&how, cut, 5000) - cut <= ZPP_MOMENTS_TILE_ELEMS);
    }
}

/* --- Adam --------------------------------------------------------------------------------------------------------- */
struct memory {
    float p[ROOM_ELEMS], grad[ROOM_ELEMS], out[ROOM_ELEMS];
    struct coded moments[3];
};

static struct zpp_optim_segment over(struct memory *memory, enum zpp_moments_kind kind, int flags, size_t first,
                                    size_t at, size_t elems) {
    struct zpp_optim_segment s = {
        .param = memory->p + at, .grad = memory->grad + at, .param_out = flags & 4 ? memory->out + at : NULL,
        .elems = elems, .step = 5, .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1,
        .decoupled_decay = flags & 2, .how = { kind, first + at, zpp_moments_key(1, 2, 5) } };
    const size_t block = (first + at) / ZPP_MOMENTS_BLOCK_ELEMS - first / ZPP_MOMENTS_BLOCK_ELEMS;
    for (int k = 0; k < 2 + (flags & 1); ++k) {
        s.moments[k].codes = (char *)memory->moments[k].codes + at * zpp_moments_elem_bytes(kind);
        s.moments[k].scales = memory->moments[k].scales + block;
    }
    return s;
}

/* The same in three passes, with the scalar versions. */
static void three_passes(const struct zpp_optim_segment *s) {
    static float values[3][ROOM_ELEMS];
    const struct zpp_moments_kernels *scalar = zpp_moments_kernels_of(ZPP_CPU_SCALAR);
    struct zpp_optim_segment plain = *s;
    plain.how.kind = ZPP_MOMENTS_F32;
    plain.exp_avg = values[0], plain.exp_avg_sq = values[1];
    plain.max_exp_avg_sq = s->moments[2].codes ? values[2] : NULL;
    for (int k = 0; k < 3 && s->moments[k].codes; ++k)
        zpp_moments_load(scalar, &s->how, (enum zpp_moments_which)k, &s->moments[k], 0, s->elems, values[k]);
    CHECK(zpp_optim_step_at(ZPP_CPU_SCALAR, &plain, 1, 0.5f, NULL));
    for (int k = 0; k < 3 && s->moments[k].codes; ++k)
        zpp_moments_store(scalar, &s->how, (enum zpp_moments_which)k, &s->moments[k], 0, s->elems, values[k], false);
}

static void check_adam(enum zpp_moments_kind kind, int flags, size_t first, size_t elems, zpp_pool *pool) {
    static struct memory start, want, got;
    for (size_t i = 0; i < ROOM_ELEMS; ++i) start.p[i] = random_value(false), start.grad[i] = random_value(false);
    memset(start.moments, 0, sizeof start.moments);
    struct zpp_optim_segment whole = over(&start, kind, flags, first, 0, elems);
    three_passes(&whole); /* moments that some step left */
    want = start;
    whole = over(&want, kind, flags, first, 0, elems);
    three_passes(&whole);
    for (int level = 0; level < ZPP_CPU_LEVELS; ++level) for (int cut = 0; cut < 2; ++cut) {
        struct zpp_optim_segment pieces[8];
        size_t count = 0;
        got = start;
        for (size_t at = 0, end = 0; end < elems || count == 0; at = end) {
            const struct zpp_moments how = { kind, first, 0 };
            const size_t asked = cut && count < 7 ? zpp_moments_cut(&how, at + 1 + random_bits() % (elems + 1)) : elems;
            end = asked > at && asked < elems ? asked : elems;
            pieces[count++] = over(&got, kind, flags, first, at, end - at);
        }
        if (!zpp_optim_step_at((enum zpp_cpu_level)level, pieces, count, 0.5f, cut ? pool : NULL)) continue;
        CHECK(memcmp(want.p, got.p, sizeof got.p) == 0 && memcmp(want.out, got.out, sizeof got.out) == 0);
        for (int k = 0; k < 3; ++k) {
            CHECK(memcmp(want.moments[k].codes, got.moments[k].codes, sizeof got.moments[k].codes) == 0);
            CHECK(same_scales(&want.moments[k], &got.moments[k]));
        }
    }
}

static void adam(void) {
    static const size_t lengths[] = { 0, 1, 33, 256, 700, 2048, 2049, 5900 }, places[] = { 0, 1, 256, 300 };
    zpp_pool *pool = NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_pool_create(in_new_threads, 3, &pool, &err));
    for (int kind = ZPP_MOMENTS_BF16; kind <= ZPP_MOMENTS_INT8; ++kind) for (int flags = 0; flags < 8; ++flags)
    for (int l = 0; l < 8; ++l) {
        check_adam((enum zpp_moments_kind)kind, flags, places[(l + flags) % 4], lengths[l], pool);
    }
    zpp_pool_destroy(pool);
}

/* Sixteen bits, evenly; neighbours, steps and moments know nothing of each other. */
static void random_bits_are_even(void) {
    enum { COUNT = 1 << 16 };
    for (int way = 0; way < 3; ++way) {
        double sum = 0, with_next = 0, squares = 0, before = 0;
        size_t low = 0;
        for (uint32_t i = 0; i < COUNT; ++i) {
            const uint64_t which = way == 2 ? i % 3 : 0;
            const uint64_t key = zpp_moments_key(0, 5, way == 1 ? i + 1 : 1) + which * ZPP_MOMENTS_WHICH_KEY;
            const double x = zpp_moments_random(key, way == 1 ? 9 : way == 2 ? i / 3 : i) / 65536.0 - 0.5;
            sum += x, squares += x * x, with_next += x * before, before = x;
            low += x < -0.49;
        }
        CHECK(fabs(sum / COUNT) < 5 * 0.2887 / 256);              /* five standard errors of a mean of COUNT */
        CHECK(fabs(squares / COUNT - 1.0 / 12) < 5 * 0.0745 / 256);
        CHECK(fabs(with_next / COUNT) < 5 * 0.0833 / 256);
        CHECK(fabs((double)low - 0.01 * COUNT) < 5 * sqrt(0.01 * COUNT));
    }
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(codecs), TEST(cuts), TEST(adam), TEST(random_bits_are_even), {0} };
    return test_main(argc, argv, cases);
}
