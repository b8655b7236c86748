/* SPDX-License-Identifier: Apache-2.0
 *
 * Collectives between ranks that are threads: every dtype, odd lengths, ordinary and arena memory, 1 to 5 ranks.
 */
#include <math.h>

#include "../../csrc/comm/internal.h"
#include "../../csrc/comm/reduce.h"
#include "mix.h"
#include "ranks.h"

/* Element i of rank r, as a small number that every dtype holds. */
static float value_of(int rank, size_t i) {
    return (float)(mix((uint32_t)i * 31u + (uint32_t)rank * 977u) % 7u) - 2.0f;
}

static void put(void *data, zpp_dtype dtype, size_t i, float value) {
    switch (dtype) {
    case ZPP_F32: ((float *)data)[i] = value; break;
    case ZPP_F64: ((double *)data)[i] = value; break;
    case ZPP_BF16: ((uint16_t *)data)[i] = zpp_bf16_from_f32(value); break;
    case ZPP_F16: ((uint16_t *)data)[i] = zpp_f16_from_f32(value); break;
    case ZPP_I8: ((int8_t *)data)[i] = (int8_t)value; break;
    case ZPP_U8: ((uint8_t *)data)[i] = (uint8_t)(value + 2.0f); break;
    case ZPP_I16: ((int16_t *)data)[i] = (int16_t)value; break;
    case ZPP_I32: ((int32_t *)data)[i] = (int32_t)value; break;
    case ZPP_I64: ((int64_t *)data)[i] = (int64_t)value; break;
    default: ((uint8_t *)data)[i] = value > 0.0f; break;
    }
}

static double get(const void *data, zpp_dtype dtype, size_t i) {
    switch (dtype) {
    case ZPP_F32: return (double)((const float *)data)[i];
    case ZPP_F64: return ((const double *)data)[i];
    case ZPP_BF16: return (double)zpp_bf16_to_f32(((const uint16_t *)data)[i]);
    case ZPP_F16: return (double)zpp_f16_to_f32(((const uint16_t *)data)[i]);
    case ZPP_I8: return ((const int8_t *)data)[i];
    case ZPP_U8: return ((const uint8_t *)data)[i];
    case ZPP_I16: return ((const int16_t *)data)[i];
    case ZPP_I32: return ((const int32_t *)data)[i];
    case ZPP_I64: return (double)((const int64_t *)data)[i];
    default: return ((const uint8_t *)data)[i];
    }
}

/* The value as `dtype` stores it. */
static double stored(zpp_dtype dtype, float value) {
    unsigned char room[8];
    put(room, dtype, 0, value);
    return get(room, dtype, 0);
}

static double expected(zpp_dtype dtype, zpp_reduce_op op, int ranks, size_t i) {
    double all = stored(dtype, value_of(0, i));
    for (int r = 1; r < ranks; r++) {
        const double one = stored(dtype, value_of(r, i));
        switch (op) {
        case ZPP_PRODUCT: all *= one; break;
        case ZPP_MIN: all = one < all ? one : all; break;
        case ZPP_MAX: all = one > all ? one : all; break;
        case ZPP_BAND: all = (double)((int64_t)all & (int64_t)one); break;
        case ZPP_BOR: all = (double)((int64_t)all | (int64_t)one); break;
        case ZPP_BXOR: all = (double)((int64_t)all ^ (int64_t)one); break;
        default: all += one; break;
        }
    }
    if (dtype == ZPP_BOOL && (op == ZPP_SUM || op == ZPP_PRODUCT)) all = op == ZPP_SUM ? all > 0.0 : all;
    if (dtype == ZPP_I8) return (double)(int8_t)(int64_t)all; /* small integers wrap */
    if (dtype == ZPP_U8) return (double)(uint8_t)(int64_t)all;
    return op == ZPP_AVG ? all / ranks : all;
}

struct what {
    zpp_dtype dtype;
    zpp_reduce_op op;
    size_t elems;
    bool arena;
};

static void *memory(struct test_rank *me, const struct what *what, size_t bytes, zpp_block **block) {
    struct zpp_err err = ZPP_ERR_INIT;
    *block = NULL;
    if (!what->arena) return malloc(bytes ? bytes : 1);
    CHECK_OK(zpp_comm_alloc(me->comm, bytes, block, &err));
    return zpp_block_data(*block);
}

static void let_go(void *data, zpp_block *block) {
    if (block)
        zpp_block_free(block);
    else
        free(data);
}

static bool near(double seen, double wanted, zpp_dtype dtype) {
    const double slack = dtype == ZPP_BF16 ? 1e-2 : dtype == ZPP_F16 ? 2e-3 : dtype == ZPP_F32 ? 1e-6 : 1e-15;
    return seen == wanted || fabs(seen - wanted) <= slack * fabs(wanted);
}

static void all_reduce(struct test_rank *me, const struct what *what) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_block *block;
    void *data = memory(me, what, what->elems * zpp_dtype_bytes(what->dtype), &block);
    for (size_t i = 0; i < what->elems; i++) put(data, what->dtype, i, value_of(me->rank, i));
    CHECK_OK(zpp_all_reduce(me->comm, data, what->elems, what->dtype, what->op, NULL, &err));
    for (size_t i = 0; i < what->elems; i++)
        CHECK(near(get(data, what->dtype, i), expected(what->dtype, what->op, me->ranks, i), what->dtype));
    let_go(data, block);
}

static void reduce_to_one(struct test_rank *me, const struct what *what) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_block *block;
    const int root = me->ranks - 1;
    void *data = memory(me, what, what->elems * zpp_dtype_bytes(what->dtype), &block);
    for (size_t i = 0; i < what->elems; i++) put(data, what->dtype, i, value_of(me->rank, i));
    const struct zpp_call call = {
        .coll = ZPP_COLL_REDUCE, .dtype = what->dtype, .op = what->op, .dst = data, .elems = what->elems, .root = root};
    CHECK_OK(zpp_comm_call(me->comm, &call, NULL, &err));
    for (size_t i = 0; i < what->elems; i++) {
        const double wanted = me->rank == root ? expected(what->dtype, what->op, me->ranks, i)
                                               : stored(what->dtype, value_of(me->rank, i));
        CHECK(near(get(data, what->dtype, i), wanted, what->dtype));
    }
    let_go(data, block);
}

static void reduce_scatter(struct test_rank *me, const struct what *what) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_block *block;
    const size_t all = what->elems * (size_t)me->ranks, first = what->elems * (size_t)me->rank;
    void *src = memory(me, what, all * zpp_dtype_bytes(what->dtype), &block);
    void *dst = malloc(what->elems * zpp_dtype_bytes(what->dtype) + 1);
    for (size_t i = 0; i < all; i++) put(src, what->dtype, i, value_of(me->rank, i));
    CHECK_OK(zpp_reduce_scatter(me->comm, dst, src, what->elems, what->dtype, what->op, NULL, &err));
    for (size_t i = 0; i < what->elems; i++)
        CHECK(near(get(dst, what->dtype, i), expected(what->dtype, what->op, me->ranks, first + i), what->dtype));
    free(dst);
    let_go(src, block);
}

static void all_gather(struct test_rank *me, const struct what *what) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_block *block;
    unsigned char *src = memory(me, what, what->elems, &block), *dst = malloc(what->elems * (size_t)me->ranks + 1);
    for (size_t i = 0; i < what->elems; i++) src[i] = (unsigned char)mix((uint32_t)i + (uint32_t)me->rank * 1000003u);
    CHECK_OK(zpp_all_gather(me->comm, dst, src, what->elems, NULL, &err));
    for (int r = 0; r < me->ranks; r++)
        for (size_t i = 0; i < what->elems; i++)
            CHECK_EQUAL(dst[(size_t)r * what->elems + i], (unsigned char)mix((uint32_t)i + (uint32_t)r * 1000003u));
    free(dst);
    let_go(src, block);
}

static void broadcast(struct test_rank *me, const struct what *what) {
    struct zpp_err err = ZPP_ERR_INIT;
    zpp_block *block;
    unsigned char *data = memory(me, what, what->elems, &block);
    for (int root = 0; root < me->ranks; root++) {
        for (size_t i = 0; i < what->elems; i++) data[i] = (unsigned char)mix((uint32_t)i + (uint32_t)me->rank * 17u);
        CHECK_OK(zpp_broadcast(me->comm, data, what->elems, root, NULL, &err));
        for (size_t i = 0; i < what->elems; i++)
            CHECK_EQUAL(data[i], (unsigned char)mix((uint32_t)i + (uint32_t)root * 17u));
    }
    let_go(data, block);
}

static size_t pair_bytes(const struct what *what, int from, int to) {
    return what->elems ? mix((uint32_t)(from * 64 + to)) % (what->elems * 2) : 0;
}

static void all_to_all(struct test_rank *me, const struct what *what) {
    struct zpp_err err = ZPP_ERR_INIT;
    void *dsts[TEST_RANKS_MAX];
    const void *srcs[TEST_RANKS_MAX];
    size_t dst_bytes[TEST_RANKS_MAX], src_bytes[TEST_RANKS_MAX];
    zpp_block *block;
    size_t sent = 0;
    for (int r = 0; r < me->ranks; r++) sent += src_bytes[r] = pair_bytes(what, me->rank, r);
    unsigned char *src = memory(me, what, sent, &block); /* one after the other: in an arena they are read in place */
    sent = 0;
    for (int r = 0; r < me->ranks; r++) {
        for (size_t i = 0; i < src_bytes[r]; i++)
            src[sent + i] = (unsigned char)(i * 7u + (unsigned)(me->rank * 16 + r));
        srcs[r] = src + sent;
        sent += src_bytes[r];
        dsts[r] = malloc((dst_bytes[r] = pair_bytes(what, r, me->rank)) + 1);
    }
    const struct zpp_call call = {.coll = ZPP_COLL_ALL_TO_ALL,
                                  .dtype = ZPP_U8,
                                  .dsts = dsts,
                                  .srcs = srcs,
                                  .dst_bytes = dst_bytes,
                                  .src_bytes = src_bytes};
    CHECK_OK(zpp_comm_call(me->comm, &call, NULL, &err));
    for (int r = 0; r < me->ranks; r++) {
        for (size_t i = 0; i < dst_bytes[r]; i++)
            CHECK_EQUAL(((unsigned char *)dsts[r])[i], (unsigned char)(i * 7u + (unsigned)(r * 16 + me->rank)));
        free(dsts[r]);
    }
    let_go(src, block);
}

static const size_t lengths[] = {0, 1, 3, 16, 255, 4096, 20001, 300007};

static void each_length(struct test_rank *me) {
    const bool *arena = me->arg;
    for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++) {
        const struct what sums = {ZPP_F32, ZPP_SUM, lengths[l], *arena};
        all_reduce(me, &sums);
        reduce_to_one(me, &sums);
        reduce_scatter(me, &sums);
        all_gather(me, &sums);
        broadcast(me, &sums);
        all_to_all(me, &sums);
    }
}

static void lengths_ordinary(void) {
    bool arena = false;
    for (int ranks = 1; ranks <= 5; ranks++) run_ranks(ranks, each_length, &arena);
}

static void lengths_arena(void) {
    bool arena = true;
    for (int ranks = 1; ranks <= 5; ranks++) run_ranks(ranks, each_length, &arena);
}

static void each_dtype(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    for (int dtype = 0; dtype < ZPP_DTYPES; dtype++)
        for (int op = 0; op < ZPP_REDUCE_OPS; op++) {
            if (zpp_reduce_check((zpp_reduce_op)op, (zpp_dtype)dtype, &err) != ZPP_OK) continue;
            const struct what small = {(zpp_dtype)dtype, (zpp_reduce_op)op, 77, false};
            const struct what large = {(zpp_dtype)dtype, (zpp_reduce_op)op, 20011, false};
            all_reduce(me, &small);
            all_reduce(me, &large);
            reduce_scatter(me, &small);
        }
}

static void dtypes_and_operations(void) {
    for (int ranks = 2; ranks <= 4; ranks++) run_ranks(ranks, each_dtype, NULL);
}

/* Sums in rank order have other bits than sums in another order: the numbers are made for it. */
static void rank_order(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    enum { ELEMS = 200003 };
    float *data = malloc(ELEMS * sizeof *data);
    for (int large = 0; large < 2; large++) {
        const size_t elems = large ? ELEMS : 1001;
        for (size_t i = 0; i < elems; i++) data[i] = (float)mix((uint32_t)i * 5u + (uint32_t)me->rank) / 3.0f;
        CHECK_OK(zpp_all_reduce(me->comm, data, elems, ZPP_F32, ZPP_SUM, NULL, &err));
        for (size_t i = 0; i < elems; i++) {
            float sum = (float)mix((uint32_t)i * 5u) / 3.0f;
            for (int r = 1; r < me->ranks; r++) sum += (float)mix((uint32_t)i * 5u + (uint32_t)r) / 3.0f;
            CHECK(data[i] == sum);
        }
    }
    free(data);
}

static void sums_are_in_rank_order(void) {
    for (int ranks = 2; ranks <= 5; ranks++) run_ranks(ranks, rank_order, NULL);
}

/* The first calls go every way in turn; every rank goes the way of rank 0, and the bits do not tell which it was. */
static void every_store_policy(struct test_rank *me) {
    const bool in_place = me->arg != NULL;
    const struct what what = {.arena = in_place};
    struct zpp_err err = ZPP_ERR_INIT;
    enum { ELEMS = 70001, CALLS = 8 };
    zpp_block *block;
    float *data = memory(me, &what, ELEMS * sizeof *data, &block), *first = malloc(ELEMS * sizeof *first);
    for (unsigned call = 0; call < CALLS; call++) {
        for (size_t i = 0; i < ELEMS; i++) data[i] = (float)mix((uint32_t)i * 5u + (uint32_t)me->rank) / 3.0f;
        CHECK_OK(zpp_all_reduce(me->comm, data, ELEMS, ZPP_F32, ZPP_SUM, NULL, &err));
        CHECK(me->comm->policy == (in_place ? call % 4 : ZPP_OWN_CACHED | call % 2));
        if (call == 0) memcpy(first, data, ELEMS * sizeof *data);
        CHECK(memcmp(first, data, ELEMS * sizeof *data) == 0);
    }
    const struct zpp_store_costs *costs = &me->comm->costs[ZPP_COLL_ALL_REDUCE][in_place][0];
    for (unsigned policy = in_place ? 0 : ZPP_OWN_CACHED; policy < ZPP_STORE_POLICIES; policy++)
        CHECK(me->rank != 0 || costs->ns_per_byte[policy] > 0);
    let_go(data, block);
    free(first);
}

static void store_policies(void) {
    bool in_place = true;
    for (int ranks = 2; ranks <= 3; ranks++) {
        run_ranks(ranks, every_store_policy, NULL);
        run_ranks(ranks, every_store_policy, &in_place);
    }
}

/* What a rank learns, it goes by: the cheapest way, but for a trial now and then, and a tensor of another size has
 * figures of its own. */
static void cheapest(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    enum { ELEMS = 300000, CALLS = 40 };
    float *data = calloc(ELEMS, sizeof *data);
    struct zpp_store_costs *costs = &me->comm->costs[ZPP_COLL_ALL_REDUCE][0][0];
    *costs = (struct zpp_store_costs){.ns_per_byte = {[ZPP_OWN_CACHED] = 1e-9, [ZPP_OWN_CACHED | 1] = 1e9},
                                      .calls = 1000};
    for (int call = 0; call < CALLS; call++) {
        const bool trial = costs->calls % 64 == 0;
        CHECK_OK(zpp_all_reduce(me->comm, data, ELEMS, ZPP_F32, ZPP_SUM, NULL, &err));
        CHECK(me->rank != 0 || trial || me->comm->policy == ZPP_OWN_CACHED);
    }
    CHECK(me->comm->costs[ZPP_COLL_ALL_REDUCE][0][1].calls == 0);
    free(data);
}

static void the_cheapest_store_policy(void) { run_ranks(2, cheapest, NULL); }

static void refused(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    float data[4] = {0};
    CHECK_FAILS(zpp_all_reduce(me->comm, data, 4, ZPP_F32, ZPP_BOR, NULL, &err), ZPP_INVALID, "bor of float32");
    CHECK_FAILS(zpp_all_reduce(me->comm, data, 4, ZPP_I32, ZPP_AVG, NULL, &err), ZPP_INVALID, "avg of int32");
    CHECK_FAILS(zpp_broadcast(me->comm, data, 4, 2, NULL, &err), ZPP_INVALID, "root 2");
    CHECK_OK(zpp_barrier(me->comm, NULL, &err)); /* arguments that are wrong do not end the group */
}

static void wrong_arguments(void) { run_ranks(2, refused, NULL); }

static void many_at_once(struct test_rank *me) {
    struct zpp_err err = ZPP_ERR_INIT;
    enum { CALLS = 40, ELEMS = 9001 };
    float *data[CALLS];
    zpp_work *work[CALLS];
    for (int k = 0; k < CALLS; k++) {
        const size_t elems = k % 2 ? ELEMS : 3;
        data[k] = malloc(ELEMS * sizeof(float));
        for (size_t i = 0; i < elems; i++) data[k][i] = (float)(me->rank + k);
        const struct zpp_call call = {.coll = ZPP_COLL_ALL_REDUCE, .dtype = ZPP_F32, .dst = data[k], .elems = elems};
        CHECK_OK(zpp_comm_submit(me->comm, &call, NULL, NULL, &work[k], &err));
    }
    float last = 1.0f;
    CHECK_OK(zpp_all_reduce(me->comm, &last, 1, ZPP_F32, ZPP_SUM, NULL, &err)); /* goes behind what is queued */
    CHECK(last == (float)me->ranks);
    for (int k = 0; k < CALLS; k++) {
        CHECK(zpp_work_finished(work[k]));
        CHECK_OK(zpp_work_wait(work[k], NULL, &err));
        CHECK(data[k][k % 2 ? ELEMS - 1 : 2] == (float)(me->ranks * k + me->ranks * (me->ranks - 1) / 2));
        free(data[k]);
        zpp_work_free(work[k]);
    }
}

static void asynchronous(void) {
    for (int ranks = 1; ranks <= 3; ranks++) run_ranks(ranks, many_at_once, NULL);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {TEST(lengths_ordinary),
                                             TEST(lengths_arena),
                                             TEST(dtypes_and_operations),
                                             TEST(sums_are_in_rank_order),
                                             TEST(store_policies),
                                             TEST(the_cheapest_store_policy),
                                             TEST(wrong_arguments),
                                             TEST(asynchronous),
                                             {0}};
    return test_main(argc, argv, cases);
}
