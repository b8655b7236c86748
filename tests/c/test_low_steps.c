/* SPDX-License-Identifier: Apache-2.0
 *
 * Lion, Adagrad, SGD and LAMB on states in bf16 and 8 bits: every CPU version, cut and number of threads gives the bits
 * of the fp32 step between decoding and encoding, and writes nothing beyond. (Adam: test_moments.c.)
 */
#include "harness.h"
#include "threads.h"

#include <math.h>

#include "../../csrc/ops/optim/optim.h"
#include "../../csrc/ops/lamb/lamb.h"
#include "../../csrc/ops/moments/kernels.h"

enum { ROOM_ELEMS = 40000, ROOM_SCALES = ROOM_ELEMS / ZPP_MOMENTS_BLOCK_ELEMS + 2, MOMENTS = 2 };

struct memory {
    float p[ROOM_ELEMS], grad[ROOM_ELEMS], out[ROOM_ELEMS];
    uint16_t codes[MOMENTS][ROOM_ELEMS]; /* of 8 bits: the first half */
    float scales[MOMENTS][ROOM_SCALES];
};
static struct memory start, want, got;
static float values[MOMENTS][ROOM_ELEMS]; /* in fp32 */

static uint32_t random_bits(void) {
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 32);
}

static float random_value(void) {
    return ldexpf((float)random_bits() / 4294967296.0f - 0.4f, -(int)(random_bits() % 20));
}

struct piece {
    size_t at, elems, first; /* in the arrays; first: place in its tensor */
};

static struct zpp_moments how_of(enum zpp_moments_kind kind, const struct piece *piece) {
    return (struct zpp_moments){ kind, piece->first, zpp_moments_key(1, 2, 5) };
}

/* Moment k of the tensor whose piece at 0 begins at `tensor_first`. */
static struct zpp_moment moment_of(struct memory *m, enum zpp_moments_kind kind, size_t k, const struct piece *piece,
                                   size_t tensor_first) {
    const size_t block = piece->first / ZPP_MOMENTS_BLOCK_ELEMS - tensor_first / ZPP_MOMENTS_BLOCK_ELEMS;
    return (struct zpp_moment){ (char *)m->codes[k] + piece->at * zpp_moments_elem_bytes(kind), m->scales[k] + block };
}

#define SEGMENT(m, piece)                                                                                        \
    .param = (m)->p + (piece)->at, .grad = (m)->grad + (piece)->at, .param_out = (m)->out + (piece)->at,         \
    .out_dtype = ZPP_F32, .elems = (piece)->elems, .lr = 0.01, .weight_decay = 0.1

/* One optimizer: a step of pieces; `kind` fp32: with `values` in the place of codes. */
typedef bool (*step_fn)(struct memory *m, enum zpp_moments_kind kind, const struct piece *pieces, size_t count,
                        int level, zpp_pool *pool);

#define STEP(op, OP, which, ...)                                                                              \
    static bool op(struct memory *m, enum zpp_moments_kind kind, const struct piece *pieces, size_t count,    \
                   int level, zpp_pool *pool) {                                                               \
        struct zpp_optim_segment segments[8];                                                                 \
        for (size_t i = 0; i < count; ++i) {                                                                  \
            const struct piece *piece = &pieces[i];                                                           \
            segments[i] = (struct zpp_optim_segment){ SEGMENT(m, piece), .how = how_of(kind, piece),          \
                                                      .optimizer = ZPP_OPTIM_##OP, __VA_ARGS__ };             \
            segments[i].moments[which] = moment_of(m, kind, 0, piece, pieces[0].first);                       \
            if (kind == ZPP_MOMENTS_F32) segments[i].state[which] = values[0] + piece->at;                    \
        }                                                                                                     \
        return zpp_optim_step_at((enum zpp_cpu_level)level, segments, count, 0.5f, pool);                     \
    }
STEP(lion, LION, ZPP_MOMENT_FIRST, .beta1 = 0.9, .beta2 = 0.99)
STEP(adagrad, ADAGRAD, ZPP_MOMENT_SECOND, .step = 3, .lr_decay = 0.01, .eps = 1e-10)
STEP(sgd, SGD, ZPP_MOMENT_FIRST, .step = 2, .momentum = 0.9, .dampening = 0.1)

static bool lamb(struct memory *m, enum zpp_moments_kind kind, const struct piece *pieces, size_t count, int level,
                 zpp_pool *pool) {
    struct zpp_lamb_segment segment = { SEGMENT(m, pieces), .how = how_of(kind, pieces), .step = 3, .beta1 = 0.9,
                                        .beta2 = 0.99, .eps = 1e-6, .trust_most = 10.0 };
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_EQUAL(count, 1); /* a segment is a whole tensor */
    if (kind == ZPP_MOMENTS_F32) segment.exp_avg = values[0], segment.exp_avg_sq = values[1];
    for (size_t k = 0; k < 2; ++k) segment.moments[k] = moment_of(m, kind, k, pieces, pieces->first);
    return zpp_lamb_step_at((enum zpp_cpu_level)level, &segment, 1, 0.5f, NULL, pool, &err) == ZPP_OK;
}

static const struct optimizer {
    step_fn step;
    size_t moments;
    enum zpp_moments_which first;
    bool pieces;
} OPTIMIZERS[] = { { lion, 1, ZPP_MOMENT_FIRST, true }, { adagrad, 1, ZPP_MOMENT_SECOND, true },
                   { sgd, 1, ZPP_MOMENT_FIRST, true }, { lamb, 2, ZPP_MOMENT_FIRST, false } };

/* Decoded, stepped in fp32 and encoded, with the scalar versions. */
static void three_passes(const struct optimizer *o, struct memory *m, enum zpp_moments_kind kind,
                         const struct piece *whole) {
    const struct zpp_moments_kernels *scalar = zpp_moments_kernels_of(ZPP_CPU_SCALAR);
    const struct zpp_moments how = how_of(kind, whole);
    for (size_t k = 0; k < o->moments; ++k) {
        const struct zpp_moment moment = moment_of(m, kind, k, whole, whole->first);
        zpp_moments_load(scalar, &how, (enum zpp_moments_which)(o->first + k), &moment, 0, whole->elems, values[k]);
    }
    CHECK(o->step(m, ZPP_MOMENTS_F32, whole, 1, ZPP_CPU_SCALAR, NULL));
    for (size_t k = 0; k < o->moments; ++k) {
        const struct zpp_moment moment = moment_of(m, kind, k, whole, whole->first);
        zpp_moments_store(scalar, &how, (enum zpp_moments_which)(o->first + k), &moment, 0, whole->elems, values[k],
                          false);
    }
}

static size_t cut_up(enum zpp_moments_kind kind, const struct piece *whole, struct piece pieces[8]) {
    const struct zpp_moments how = { kind, whole->first, 0 };
    size_t count = 0;
    for (size_t at = 0, end = 0; end < whole->elems || count == 0; at = end) {
        const size_t asked = count < 7 ? zpp_moments_cut(&how, at + 1 + random_bits() % (whole->elems + 1)) : 0;
        end = asked > at && asked < whole->elems ? asked : whole->elems;
        pieces[count++] = (struct piece){ at, end - at, whole->first + at };
    }
    return count;
}

static void check(const struct optimizer *o, enum zpp_moments_kind kind, size_t first, size_t elems, zpp_pool *pool) {
    const struct piece whole = { 0, elems, o->pieces ? first : 0 };
    memset(&start, 0, sizeof start);
    for (size_t i = 0; i < ROOM_ELEMS; ++i) start.p[i] = random_value(), start.grad[i] = random_value();
    three_passes(o, &start, kind, &whole); /* states that some step left */
    want = start;
    three_passes(o, &want, kind, &whole);
    for (int level = 0; level < ZPP_CPU_LEVELS; ++level) for (int cut = 0; cut < 2; ++cut) {
        struct piece pieces[8] = { whole };
        const size_t count = cut && o->pieces ? cut_up(kind, &whole, pieces) : 1;
        got = start;
        if (!o->step(&got, kind, pieces, count, level, cut ? pool : NULL)) continue;
        CHECK(memcmp(&want, &got, sizeof got) == 0);
    }
}

static void steps(void) {
    static const size_t lengths[] = { 0, 1, 33, 256, 700, 2049, 5900, 39000 }, places[] = { 0, 1, 256, 300 };
    zpp_pool *pool = NULL;
    struct zpp_err err = ZPP_ERR_INIT;
    CHECK_OK(zpp_pool_create(in_new_threads, 3, &pool, &err));
    for (size_t o = 0; o < sizeof OPTIMIZERS / sizeof OPTIMIZERS[0]; ++o)
    for (int kind = ZPP_MOMENTS_BF16; kind <= ZPP_MOMENTS_INT8; ++kind) for (size_t l = 0; l < 8; ++l) {
        check(&OPTIMIZERS[o], (enum zpp_moments_kind)kind, places[(l + o) % 4], lengths[l], pool);
    }
    zpp_pool_destroy(pool);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = { TEST(steps), {0} };
    return test_main(argc, argv, cases);
}
